//! One transaction: signed, journalled, sent, followed to its end.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use alloy_consensus::TxEip1559;
use alloy_primitives::{Address, B256, Bytes, U256};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

use super::{
    engine::{Engine, WATCH_LIMIT, Watched},
    member::{Member, known_failures},
    nonce_manager::{NonceManager, Place, Slot},
    transaction::Signed,
};
use crate::{
    chain::{
        batch::{self, GasLimit},
        batch_settler::BatchSettler,
        broadcast::Sent,
        confirm::{Flight, Seen},
        fees::Fees,
        rpc::Receipt,
        transfer,
    },
    ledger::{LedgerError, Settlement, SettlementStep, Submission},
    payment::{Outcome, PaymentKey},
    protocol::Reason,
    settlement::FacilitatorError,
    telemetry,
};

/// A node that holds a broadcast until inclusion lets go after 6 s on Base; this is how long we hold on.
const SYNC_LIMIT: Duration = Duration::from_secs(8);
/// How long the last look before a deadline may take.
const GRACE: Duration = Duration::from_millis(500);
/// How often the price of one nonce is raised.
const MAX_RAISES: usize = 5;
/// How many blocks pass between two looks at why a transaction is in none.
const LOOK_BLOCKS: u32 = 3;
/// At which looks a transaction is replaced that the price cannot be the reason for. At the first, since whoever waits has
/// patience for few looks; then seldom, since a chain that stands still is no reason, and must leave raises for the day when the
/// price is.
const STUCK_LOOKS: [usize; 3] = [1, 3, 8];
/// How many looks apart the price is looked at if nobody waits: most spikes pass by themselves.
const PATIENT_LOOKS: usize = 8;
/// How often a nonce is given up to another process in one attempt.
const MAX_COLLISIONS: usize = 256;
/// For how long after a submission other processes leave its payments alone, in seconds, beyond the time to confirm.
const SETTLING_SLACK: u64 = 45;

/// What a transaction calls.
struct Call {
    to: Address,
    input: Bytes,
    gas_limit: u64,
}

/// What a transaction that is in no block may be replaced for.
struct Reasons {
    /// It offers less than blocks cost by now.
    price: bool,
    /// Its nonce is the next, so that everything behind waits for it: a node that forgot it, or forgot to offer it to a block,
    /// takes the new one.
    stuck: bool,
}

impl Engine {
    /// Settles these payments in one transaction, and answers them.
    pub(super) async fn attempt(self: &Arc<Self>, mut members: Vec<Member>, lane: &NonceManager, place: Place) {
        let (fees, mut slot) = match self.fees.get(&self.rpc).await {
            Ok(fees) => match lane.take(place).await {
                Ok(slot) => (fees, slot),
                Err(error) => return self.give_up_all(members, error).await,
            },
            Err(error) => return self.give_up_all(members, error.into()).await,
        };
        let call = self.call(&members);
        let transaction = self.transaction(slot.nonce(), fees, call.gas_limit, call.to, call.input);
        let (transaction, signed) = match self.sign_and_journal(&mut members, &mut slot, transaction).await {
            Ok(Some(signed)) => signed,
            Ok(None) => {
                self.give_back(slot).await;
                return;
            }
            Err(error) => {
                self.give_back(slot).await;
                return self.give_up_all(members, error).await;
            }
        };
        slot.sent();
        let started = Instant::now();
        let _watched = Watched::enter(self, signed.hash);
        let (lane_nonce, payments, gas_limit) = (slot.nonce(), members.len(), transaction.gas_limit);
        tracing::debug!(transaction = %signed.hash, lane_nonce, payments, gas_limit, "sending");
        // No longer than until the first look: a node may hold on to a transaction that it will never include.
        let limit = SYNC_LIMIT.min(self.confirm_timeout).min(self.look_interval());
        match self.node.send(&self.rpc, &signed.raw, signed.hash, limit).await {
            Sent::Included(receipt) => self.included(members, slot, &receipt, started).await,
            // The nonce may be used by this very transaction: a retry below us may have sent it twice.
            sent @ (Sent::Pooled | Sent::Perhaps | Sent::NonceUsed) => {
                let certainly = matches!(sent, Sent::Pooled);
                let flight = Flight::new(signed.raw, signed.hash, certainly, &self.pace);
                self.follow(members, slot, flight, (transaction, fees), started).await;
            }
            Sent::NonceContested => {
                if let Ok(Some(receipt)) = self.rpc.receipt(signed.hash).await {
                    return self.included(members, slot, &receipt, started).await;
                }
                tracing::warn!(lane_nonce, "another process uses the settlement key");
                slot.displaced();
                members.iter_mut().for_each(Member::displaced);
                self.again(members).await;
            }
            refusal => {
                // What stays in the journal may be sent again, and pay then.
                if self.give_back(slot).await {
                    members.iter_mut().for_each(|member| member.spent.push(signed.hash));
                }
                match self.refused(lane, refusal).await {
                    Ok(()) => self.again(members).await,
                    Err(error) => self.give_up_all(members, error).await,
                }
            }
        }
    }

    /// One payment is a call of its token, several are a call of the contract that takes them.
    fn call(&self, members: &[Member]) -> Call {
        if let [member] = members {
            let input = transfer::calldata(member.payment.authorization(), member.payment.signature());
            return Call { to: member.expected().token, gas_limit: self.gas_limit(&input, member.verified.gas), input };
        }
        let mut gas = GasLimit::new(self.batch_gas_cap);
        for member in members {
            gas.admit(member.verified.gas);
        }
        let packed: Vec<_> = members.iter().filter_map(|member| member.packed(self.batch_gas_cap)).collect();
        let token = members.first().map_or(Address::ZERO, |member| member.expected().token);
        Call {
            to: BatchSettler::ADDRESS,
            input: batch::encode(token, self.batch_gas_cap, &packed),
            gas_limit: gas.get(),
        }
    }

    /// Makes the transaction and all its payments known to the journal before anybody else can know it. Those that are
    /// settled meanwhile, another process's, or failed since somebody asked for them, are left out; `None` if nobody remains.
    async fn sign_and_journal(
        self: &Arc<Self>,
        members: &mut Vec<Member>,
        slot: &mut Slot,
        mut transaction: TxEip1559,
    ) -> Result<Option<(TxEip1559, Signed)>, FacilitatorError> {
        for _ in 0..MAX_COLLISIONS {
            transaction.nonce = slot.nonce();
            let signed = self.sign(slot.lane(), transaction.clone()).await?;
            let payments = members.iter().map(|member| *member.key()).collect();
            let submission =
                Submission { known_failures: known_failures(members), ..self.submission(slot, &signed, payments) };
            match self.ledger.submit(submission).await {
                Ok(()) => {
                    for member in members {
                        member.journalled.push(signed.hash);
                        tracing::debug!(parent: &member.span, transaction = %signed.hash, lane_nonce = slot.nonce(), "signed for");
                        member.attempts += 1;
                    }
                    return Ok(Some((transaction, signed)));
                }
                Err(LedgerError::NonceTaken { next }) => slot.skip_to(next),
                Err(LedgerError::NotDue(keys)) => {
                    let (others, kept): (Vec<_>, Vec<_>) =
                        members.drain(..).partition(|member| keys.contains(member.key()));
                    *members = kept;
                    for member in others {
                        self.finish_as_recorded(member).await;
                    }
                    if members.is_empty() {
                        return Ok(None);
                    }
                    let call = self.call(members);
                    transaction.gas_limit = call.gas_limit;
                    transaction.to = call.to.into();
                    transaction.input = call.input;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(FacilitatorError::Busy { what: "the nonces of the settlement key", retry_after: Duration::from_secs(2) })
    }

    pub(super) fn submission(&self, slot: &Slot, signed: &Signed, payments: Vec<PaymentKey>) -> Submission {
        self.submission_of(slot.lane(), slot.nonce(), signed, payments)
    }

    pub(super) fn submission_of(
        &self,
        lane: &NonceManager,
        nonce: u64,
        signed: &Signed,
        payments: Vec<PaymentKey>,
    ) -> Submission {
        let at = self.clock.now();
        Submission {
            sender: self.sender(lane),
            nonce,
            hash: signed.hash,
            raw: signed.raw.clone(),
            payments,
            by: self.process,
            at,
            until: at.saturating_add(self.confirm_timeout.as_secs()).saturating_add(SETTLING_SLACK),
            known_failures: BTreeMap::new(),
        }
    }

    /// Follows a transaction until its nonce is resolved. Who waits for the outcome is told `Unknown` in good time.
    async fn follow(
        self: &Arc<Self>,
        mut members: Vec<Member>,
        slot: Slot,
        mut flight: Flight,
        (mut transaction, mut fees): (TxEip1559, Fees),
        started: Instant,
    ) {
        let answer_at = started + self.confirm_timeout;
        let stop_at = started + WATCH_LIMIT;
        let mut look_at = stop_at.min(started + self.look_interval());
        let mut raised = Vec::new();
        let mut looks = 0;
        loop {
            let is_awaited = members.iter().any(Member::is_awaited);
            let deadline = if is_awaited { answer_at.min(look_at) } else { look_at };
            let watch = flight.watch(&self.rpc, &self.node, &self.pace, deadline);
            let seen = match is_awaited {
                // A last look that hangs must not keep the callers; one that is slow is waited for until then.
                true => timeout_at(answer_at + GRACE, watch).await.unwrap_or(Seen::NotYet),
                false => watch.await,
            };
            match seen {
                Seen::Included(receipt) => return self.included(members, slot, &receipt, started).await,
                Seen::Displaced => {
                    tracing::warn!(lane_nonce = slot.nonce(), "another transaction took the nonce");
                    slot.consumed_by_another();
                    members.iter_mut().for_each(Member::displaced);
                    // Whoever was told "unknown" asks again, or the upkeep does, and decides what happens next.
                    let (awaited, alone): (Vec<_>, Vec<_>) = members.into_iter().partition(Member::is_awaited);
                    self.again(awaited).await;
                    drop(alone);
                    return;
                }
                Seen::NotYet => {}
            }
            if Instant::now() >= answer_at && is_awaited {
                tracing::warn!(transaction = %flight.hash(), "not in a block in time; its fate is unknown");
                for member in &mut members {
                    drop(member.answer(Ok(Outcome::Unknown { transaction: Some(flight.hash()) })));
                }
            }
            if Instant::now() >= stop_at {
                return slot.displaced();
            }
            if Instant::now() < look_at {
                continue;
            }
            (look_at, looks) = (stop_at.min(Instant::now() + self.look_interval()), looks + 1);
            let reasons =
                Reasons { price: is_awaited || looks % PATIENT_LOOKS == 0, stuck: STUCK_LOOKS.contains(&looks) };
            if raised.len() >= MAX_RAISES {
                continue;
            }
            match self.raise(&mut members, &slot, &mut transaction, &mut fees, reasons).await {
                Ok(Some(better)) => {
                    raised.push(Watched::enter(self, better.hash));
                    self.node.resend(&self.rpc, &better.raw).await;
                    flight.replaced_by(better.raw, better.hash);
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, lane_nonce = slot.nonce(), "the price could not be raised"),
            }
        }
    }

    /// How long a transaction may be in no block before somebody looks why.
    fn look_interval(&self) -> Duration {
        (LOOK_BLOCKS * self.pace.block_time()).max(Duration::from_secs(2))
    }

    /// Signs the same call with the same nonce for a better price, for one of the `reasons`.
    async fn raise(
        &self,
        members: &mut [Member],
        slot: &Slot,
        transaction: &mut TxEip1559,
        fees: &mut Fees,
        reasons: Reasons,
    ) -> Result<Option<Signed>, FacilitatorError> {
        if !reasons.price && !reasons.stuck {
            return Ok(None);
        }
        self.fees.forget().await;
        let is_cheap = self.fees.get(&self.rpc).await?.max_fee > fees.max_fee.saturating_add(fees.max_fee / 10);
        let is_stuck =
            !is_cheap && reasons.stuck && self.rpc.nonce(slot.lane().account(), "latest").await? == slot.nonce();
        if !is_cheap && !is_stuck {
            return Ok(None);
        }
        let raised = self.fees.raise(&self.rpc, *fees).await?;
        let (gas_limit, input) = (transaction.gas_limit, transaction.input.clone());
        let to = transaction.to.to().copied().unwrap_or_default();
        let better = self.transaction(slot.nonce(), raised, gas_limit, to, input);
        let signed = self.sign(slot.lane(), better.clone()).await?;
        let payments = members.iter().map(|member| *member.key()).collect();
        let submission =
            Submission { known_failures: known_failures(members), ..self.submission(slot, &signed, payments) };
        self.journal_replacement(submission).await?;
        (*transaction, *fees) = (better, raised);
        members.iter_mut().for_each(|member| member.journalled.push(signed.hash));
        telemetry::replaced(self.network, if is_stuck { "stuck" } else { "price" });
        tracing::info!(transaction = %signed.hash, lane_nonce = slot.nonce(), max_fee = raised.max_fee, "raising the price");
        Ok(Some(signed))
    }

    /// Makes a replacement known to the journal before anybody else can know it. Payments that have come to their end meanwhile are
    /// left out, even if those are all: they need it no more, but everything behind its nonce does. One that another process looks
    /// after stays in and is a reason to wait: that process could not see that the replacement may pay it.
    async fn journal_replacement(&self, mut submission: Submission) -> Result<(), FacilitatorError> {
        loop {
            let refused = match self.ledger.submit(submission.clone()).await {
                Err(LedgerError::NotDue(keys)) => keys,
                answer => return Ok(answer?),
            };
            let before = submission.payments.len();
            if self.are_at_their_end(&refused).await? {
                submission.payments.retain(|key| !refused.contains(key));
            }
            if submission.payments.len() == before {
                return Err(LedgerError::NotDue(refused).into());
            }
        }
    }

    /// Whether all of them are paid, or never will be.
    async fn are_at_their_end(&self, payments: &[PaymentKey]) -> Result<bool, LedgerError> {
        for key in payments {
            let settlement = self.ledger.get(key).await?.map(|record| record.settlement);
            let is_at_its_end = settlement.is_some_and(|now| now == Settlement::Dead || now.paid_by().is_some());
            if !is_at_its_end {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What an included transaction did to each of its payments. Those that a batch did not pay are looked at again, and get a
    /// transaction of their own.
    async fn included(self: &Arc<Self>, members: Vec<Member>, slot: Slot, receipt: &Receipt, started: Instant) {
        self.account(receipt, started);
        slot.consumed();
        self.queue.changed.notify_one();
        let shared = members.len() > 1;
        let (paid, unpaid): (Vec<_>, Vec<_>) =
            members.into_iter().partition(|member| member.expected().is_paid_by(receipt));
        let (transaction, block) = (receipt.transaction_hash, Some(receipt.block()));
        let fee = receipt.cost().checked_div(U256::from(paid.len()));
        telemetry::shared(self.network, paid.len() + unpaid.len());
        self.weigh(receipt, &paid);
        self.totals().settled += paid.len() as u64;
        // Whom nobody waits for is entered into the ledger: all at once, so that they share its commits.
        let mut finishing = JoinSet::new();
        for member in paid {
            match self.depths.of(member.expected().value) {
                0 => {
                    let engine = self.clone();
                    let outcome = Ok(Outcome::Settled { transaction, block, fee });
                    finishing.spawn(async move { engine.finish(member, outcome).await });
                }
                depth => drop(tokio::spawn(self.clone().bury(member, receipt.clone(), depth, fee))),
            }
        }
        finishing.join_all().await;
        if shared {
            let mut left_behind = Vec::new();
            for mut member in unpaid {
                tracing::info!(parent: &member.span, %transaction, "in a batch that did not pay it");
                member.left_behind = true;
                member.spent.push(transaction);
                left_behind.push(member);
            }
            return self.again(left_behind).await;
        }
        for member in unpaid {
            let outcome = self.conclude(&member, receipt).await;
            self.finish(member, outcome).await;
        }
    }

    /// Tells what became of a payment: whoever waits, else the ledger.
    pub(super) async fn finish(&self, mut member: Member, outcome: Result<Outcome, FacilitatorError>) {
        match member.answer(outcome) {
            None => {}
            Some(Ok(outcome)) => self.record(member.key(), SettlementStep::of(&outcome, self.process)).await,
            Some(Err(error)) => tracing::warn!(parent: &member.span, %error, "not settled; it will be tried again"),
        }
    }

    /// Another process was faster, is at it, or has recorded a failure since this settlement was asked for. The ledger knows as much
    /// already: only whoever waits is told.
    async fn finish_as_recorded(&self, mut member: Member) {
        let outcome = match self.ledger.get(member.key()).await {
            Ok(Some(record)) => Ok(record.outcome(&member.payment)),
            Ok(None) => Ok(member.unknown()),
            Err(error) => Err(error.into()),
        };
        drop(member.answer(outcome));
    }

    /// Nothing more can be done now. If no node took any transaction of the payment, it is due again; otherwise its fate is
    /// unknown.
    pub(super) async fn give_up(&self, member: Member, error: FacilitatorError) {
        if member.journalled.is_empty() {
            return self.finish(member, Err(error)).await;
        }
        let unknown = Ok(member.unknown());
        if !member.is_clean() {
            return self.finish(member, unknown).await;
        }
        let was_spent = |transaction: &B256| member.spent.contains(transaction);
        let record = self.ledger.get(member.key()).await.ok().flatten();
        let step = SettlementStep::Fail { reason: Reason::UnexpectedSettleError, by: self.process };
        let is_due = record.is_some_and(|record| record.transactions.iter().all(was_spent))
            && self.ledger.settle(member.key(), &step).await.is_ok();
        self.finish(member, if is_due { Err(error) } else { unknown }).await;
    }

    async fn give_up_all(&self, members: Vec<Member>, error: FacilitatorError) {
        for member in members {
            self.give_up(member, error.clone()).await;
        }
    }

    /// A fact about the chain stays true if the ledger is slow to take it; what it does not take now is found again.
    pub(super) async fn record(&self, key: &PaymentKey, step: SettlementStep) {
        for attempt in 1..=5_u32 {
            match self.ledger.settle(key, &step).await {
                Ok(()) | Err(LedgerError::InvalidTransition(_)) => return,
                Err(error) => {
                    tracing::warn!(%error, attempt, payer = %key.payer, nonce = %key.nonce, "an outcome was not recorded");
                    tokio::time::sleep(Duration::from_millis(50 << attempt)).await;
                }
            }
        }
    }
}
