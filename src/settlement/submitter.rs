//! Transactions of the settlement accounts: signed, journalled, sent, followed to their end and replaced if they hang.
//!
//! A transaction, its nonce and its payments are in the ledger before it leaves the process.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_consensus::TxEip1559;
use alloy_primitives::{Address, B256, Bytes, TxKind, U256};
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    accounts::{Account, NonceLease, Signed, WindowPermit},
    costs::Costs,
    gaps::FillGaps,
    journal::Journal,
    queue::{QueuedPayment, known_failures},
};
use crate::{
    chain::{
        batch::{self, GasLimit},
        batch_settler::BatchSettler,
        broadcast::SendResult,
        confirm::{Inclusion, PendingTransaction},
        fees::Fees,
        node::Node,
        rpc::Receipt,
        transfer,
    },
    ledger::{JournaledTransaction, LedgerError, Sender, Settlement},
    payment::{PaymentKey, SettlementOutcome},
    settlement::FacilitatorError,
    telemetry,
};

/// How long a node may hold a broadcast until inclusion. Nodes of Base let go after 6 s.
const SYNC_TIMEOUT: Duration = Duration::from_secs(8);
/// How long the last request before a deadline may take.
const GRACE: Duration = Duration::from_millis(500);
/// How long a transaction without a receipt keeps its nonce.
const WATCH_TIMEOUT: Duration = Duration::from_secs(1_800);
/// How often the transaction of one nonce is replaced.
const MAX_REPLACEMENTS: usize = 5;
/// At which checks a transaction is replaced although its fees are high enough. The first is early, while callers wait. Later ones are
/// rare: a chain that stands still is no reason, and replacements must be left for when the fees are the reason.
const STUCK_CHECKS: [usize; 3] = [1, 3, 8];
/// How many checks apart the fees are compared if nobody waits. Most spikes pass by themselves.
const PATIENT_CHECKS: usize = 8;
/// How many nonces one attempt leaves to other processes.
const MAX_COLLISIONS: usize = 256;
/// How long other processes leave the payments of a transaction alone, in seconds, beyond the time to confirm.
const SETTLING_SLACK: u64 = 45;
/// Gas that a real transfer may use beyond a simulation: the simulation reads the token's storage first, which makes the transfer cheaper,
/// and the payee's balance may be zero by then. Unused gas is not paid for.
const GAS_MARGIN: u64 = 60_000;
/// Gas of a payment that is settled alone, rounded up.
const SINGLE_PAYMENT_GAS: u128 = 200_000;
/// Gas for a transfer of nothing to the account itself.
const FILLER_GAS: u64 = 21_000;

/// What a transaction calls.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) to: Address,
    pub(crate) input: Bytes,
    pub(crate) gas_limit: u64,
}

impl Call {
    /// A transfer of nothing to the account itself, which uses up a nonce.
    pub(super) fn filler(account: &Account) -> Self {
        Self { to: account.address(), input: Bytes::new(), gas_limit: FILLER_GAS }
    }

    /// Returns a transaction that makes the call.
    pub(super) fn into_transaction(self, node: &Node, nonce: u64, fees: Fees) -> TxEip1559 {
        TxEip1559 {
            chain_id: node.network().chain_id(),
            nonce,
            gas_limit: self.gas_limit,
            max_fee_per_gas: fees.max_fee,
            max_priority_fee_per_gas: fees.tip,
            to: TxKind::Call(self.to),
            input: self.input,
            ..TxEip1559::default()
        }
    }
}

/// The end of an attempt to settle payments in one transaction. Payments that are not in it have been answered.
pub(super) struct Attempt {
    pub(super) payments: Vec<QueuedPayment>,
    pub(super) result: AttemptResult,
    /// The transactions count as followed until their payments have been dealt with.
    pub(super) watched: Vec<WatchGuard>,
}

pub(super) enum AttemptResult {
    /// The transaction is in a block.
    Included(Receipt),
    /// No transaction was sent, or another one took the nonce: another attempt may succeed.
    Retry,
    /// No transaction was sent, and another attempt would fail, too.
    Failed(FacilitatorError),
    /// The transaction was in no block for half an hour. Reconciliation goes on.
    Unresolved,
}

/// Sends the transactions of the settlement accounts.
pub(crate) struct Submitter {
    node: Arc<Node>,
    journal: Journal,
    costs: Arc<Costs>,
    /// How many accounts there are.
    accounts: usize,
    gas_cap: u64,
    batch_gas_cap: u32,
    confirm_timeout: Duration,
    /// Transactions that a task of this process follows.
    watched: Mutex<HashSet<B256>>,
}

/// Gas limits and timeouts of a [`Submitter`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct SubmitterSettings {
    /// Gas that the token may use for a payment that is settled alone.
    pub(crate) gas_cap: u64,
    /// Gas that the token may use for a payment in a batch.
    pub(crate) batch_gas_cap: u32,
    /// After how long without a receipt callers are told that the outcome is unknown.
    pub(crate) confirm_timeout: Duration,
}

impl Submitter {
    pub(super) fn new(
        node: Arc<Node>,
        journal: Journal,
        costs: Arc<Costs>,
        accounts: usize,
        settings: SubmitterSettings,
    ) -> Self {
        let SubmitterSettings { gas_cap, batch_gas_cap, confirm_timeout } = settings;
        let watched = Mutex::default();
        Self { node, journal, costs, accounts, gas_cap, batch_gas_cap, confirm_timeout, watched }
    }

    /// Settles these payments in one transaction, and follows it to its end.
    pub(super) async fn attempt(
        self: &Arc<Self>,
        mut payments: Vec<QueuedPayment>,
        account: &Account,
        permit: WindowPermit,
    ) -> Attempt {
        let leased = match self.node.fees().await {
            Ok(fees) => account.take(permit).await.map(|lease| (fees, lease)),
            Err(error) => Err(error.into()),
        };
        let (fees, mut lease) = match leased {
            Ok(leased) => leased,
            Err(error) => return ended(payments, AttemptResult::Failed(error)),
        };
        let transaction = self.call(&payments).into_transaction(&self.node, lease.nonce(), fees);
        let (transaction, signed) = match self.sign_and_journal(&mut payments, &mut lease, transaction).await {
            Ok(Some(signed)) => signed,
            Ok(None) => {
                self.give_back(lease).await;
                return ended(payments, AttemptResult::Retry);
            }
            Err(error) => {
                self.give_back(lease).await;
                return ended(payments, AttemptResult::Failed(error));
            }
        };
        lease.sent();
        let started = Instant::now();
        let watched = vec![self.watch(signed.hash)];
        let (account_nonce, count, gas_limit) = (lease.nonce(), payments.len(), transaction.gas_limit);
        tracing::debug!(transaction = %signed.hash, account_nonce, payments = count, gas_limit, "sending");
        // Not beyond the first check: a node may hold on to a transaction that it will never include.
        let limit = SYNC_TIMEOUT.min(self.confirm_timeout).min(self.node.check_interval());
        let result = match self.node.send(&signed.raw, signed.hash, limit).await {
            SendResult::Included(receipt) => self.included(lease, receipt, started),
            // The nonce may be used by this very transaction: a retry below us may have sent it twice.
            sent @ (SendResult::Pooled | SendResult::Unknown | SendResult::NonceUsed) => {
                let certainly = matches!(sent, SendResult::Pooled);
                let pending = self.node.pending(signed.raw, signed.hash, certainly);
                let attempt = Attempt { payments, result: AttemptResult::Unresolved, watched };
                return self.follow(attempt, lease, pending, (transaction, fees), started).await;
            }
            SendResult::NonceContested => match self.node.rpc().receipt(signed.hash).await {
                Ok(Some(receipt)) => self.included(lease, receipt, started),
                _ => {
                    tracing::warn!(account_nonce, "another process uses the settlement key");
                    lease.abandon();
                    payments.iter_mut().for_each(QueuedPayment::lost_nonce);
                    AttemptResult::Retry
                }
            },
            refusal => {
                if let SendResult::AccountFull { is_delegated } = refusal {
                    account.narrow(is_delegated);
                    // It waits for its turn, and the queue bounds for how long.
                    payments.iter_mut().for_each(|queued| queued.attempts = queued.attempts.saturating_sub(1));
                }
                // A transaction that stays in the journal may be sent again, and pay then.
                if self.give_back(lease).await {
                    payments.iter_mut().for_each(|queued| queued.ineffective.push(signed.hash));
                }
                match self.refused(account, refusal).await {
                    Ok(()) => AttemptResult::Retry,
                    Err(error) => AttemptResult::Failed(error),
                }
            }
        };
        Attempt { payments, result, watched }
    }

    /// Returns `true` if a task of this process follows the transaction.
    pub(super) fn is_watched(&self, transaction: B256) -> bool {
        self.lock_watched().contains(&transaction)
    }

    /// Returns the account's name in the ledger.
    pub(super) fn sender(&self, account: &Account) -> Sender {
        Sender { network: self.node.network(), address: account.address() }
    }

    /// Signs and journals a transaction without payments. Returns `None` if another process has the nonce.
    pub(super) async fn prepare(
        &self,
        account: &Account,
        nonce: u64,
        fees: Fees,
        call: Call,
    ) -> Result<Option<Signed>, FacilitatorError> {
        let signed = account.sign(call.into_transaction(&self.node, nonce, fees)).await?;
        match self.journal.ledger().submit(self.submission(account, nonce, &signed, &[])).await {
            Ok(()) => Ok(Some(signed)),
            Err(LedgerError::NonceTaken { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends a transaction without payments, with the leased nonce. Returns `None` if another transaction has the nonce, or if the node
    /// refused it for a reason that will pass.
    pub(super) async fn send_call(
        &self,
        mut lease: NonceLease,
        call: Call,
    ) -> Result<Option<(NonceLease, PendingTransaction)>, FacilitatorError> {
        let fees = self.node.fees().await?;
        let signed = match self.prepare(lease.account(), lease.nonce(), fees, call).await {
            Ok(Some(signed)) => signed,
            Ok(None) => {
                lease.abandon();
                return Ok(None);
            }
            Err(error) => {
                self.release(lease).await;
                return Err(error);
            }
        };
        lease.sent();
        match self.node.resend(&signed.raw).await {
            sent @ (SendResult::Included(_) | SendResult::Pooled | SendResult::Unknown) => {
                let certainly = matches!(sent, SendResult::Pooled);
                return Ok(Some((lease, self.node.pending(signed.raw, signed.hash, certainly))));
            }
            SendResult::NonceUsed => lease.taken_by_other(),
            SendResult::NonceContested => lease.abandon(),
            refusal => {
                let account = lease.account().clone();
                self.release(lease).await;
                self.refused(&account, refusal).await?;
            }
        }
        Ok(None)
    }

    /// Follows a transaction without payments until `deadline`. Returns its receipt if it was included.
    pub(super) async fn follow_call(
        &self,
        lease: NonceLease,
        mut pending: PendingTransaction,
        deadline: Instant,
    ) -> Option<Receipt> {
        let started = Instant::now();
        match self.node.watch(&mut pending, deadline).await {
            Inclusion::Included(receipt) => {
                self.count_included(&receipt, started);
                lease.consumed();
                return Some(receipt);
            }
            Inclusion::NonceTaken => lease.taken_by_other(),
            Inclusion::Pending => lease.abandon(),
        }
        None
    }

    /// Gives a nonce back, and makes sure that no later transaction waits for it. Returns `true` if the ledger took it back; otherwise
    /// its transaction may be sent again.
    pub(super) async fn give_back(self: &Arc<Self>, lease: NonceLease) -> bool {
        let account = lease.account().clone();
        let is_free = self.release(lease).await;
        self.fill_gaps_of(&account);
        is_free
    }

    async fn release(&self, lease: NonceLease) -> bool {
        // The ledger comes first, while nobody here can take the nonce: it must not free one that is in use again already.
        let (sender, nonce) = (self.sender(lease.account()), lease.nonce());
        let freed = self.journal.ledger().free_nonce(&sender, nonce, self.journal.process_id()).await;
        if let Err(error) = &freed {
            tracing::warn!(%error, account_nonce = nonce, "a nonce was not given back; other processes wait for it a while");
        }
        lease.release();
        freed.is_ok()
    }

    /// Deals with a node's refusal. Returns `Ok` if another attempt may succeed.
    async fn refused(&self, account: &Account, refusal: SendResult) -> Result<(), FacilitatorError> {
        match refusal {
            SendResult::InsufficientGas => {
                let balance = account.balance().await.unwrap_or_default();
                // Nodes set aside the highest possible cost of transactions in flight. With the next block there is more.
                if account.in_flight() > 0 && self.pays_for_one(balance).await {
                    self.wait_for_block().await;
                    return Ok(());
                }
                tracing::error!(account = %account.address(), %balance, "the settlement key cannot pay for gas");
                account.rest(balance);
                if self.accounts > 1 {
                    return Ok(());
                }
                Err(FacilitatorError::InsufficientGas { balance })
            }
            SendResult::PoolFull | SendResult::AccountFull { .. } => {
                // Other processes may share the key. With the next block there is room again.
                self.wait_for_block().await;
                Ok(())
            }
            SendResult::Refused(reason) => {
                tracing::error!(reason, "the node refuses the transaction");
                Err(FacilitatorError::Misconfigured(format!("the node refuses the transaction: {reason}")))
            }
            SendResult::Underpriced => {
                self.node.require_market_tip().await;
                Ok(())
            }
            _ => {
                self.node.forget_fees().await;
                Ok(())
            }
        }
    }

    async fn wait_for_block(&self) {
        sleep(self.node.block_time().min(Duration::from_secs(1))).await;
    }

    /// Returns `true` if the balance pays for one payment that is settled alone.
    async fn pays_for_one(&self, balance: U256) -> bool {
        let fees = self.node.fees().await;
        fees.is_ok_and(|fees| balance >= U256::from(fees.max_fee.saturating_mul(SINGLE_PAYMENT_GAS)))
    }

    /// Returns the call that makes these payments: of the token for one payment, of the batch settler for several.
    fn call(&self, payments: &[QueuedPayment]) -> Call {
        if let [queued] = payments {
            let input = transfer::calldata(queued.payment.authorization(), queued.payment.signature());
            return Call { to: queued.expected().token, gas_limit: self.gas_limit(&input, queued.verified.gas), input };
        }
        let mut gas = GasLimit::new(self.batch_gas_cap);
        for queued in payments {
            gas.admit(queued.verified.gas);
        }
        let entries: Vec<_> = payments.iter().filter_map(|queued| queued.batch_entry(self.batch_gas_cap)).collect();
        let token = payments.first().map_or(Address::ZERO, |queued| queued.expected().token);
        Call {
            to: BatchSettler::ADDRESS,
            input: batch::encode(token, self.batch_gas_cap, &entries),
            gas_limit: gas.get(),
        }
    }

    fn gas_limit(&self, calldata: &[u8], simulated: Option<u64>) -> u64 {
        let call = simulated.map_or(self.gas_cap, |gas| gas.saturating_add(gas / 8).min(self.gas_cap));
        transfer::intrinsic_gas(calldata).saturating_add(call).saturating_add(GAS_MARGIN)
    }

    /// Signs the transaction and journals it with all its payments, before anybody else can know it. Payments that were settled meanwhile,
    /// that are another process's, or that failed since they were asked for are left out and answered. Returns `None` if none is left.
    async fn sign_and_journal(
        &self,
        payments: &mut Vec<QueuedPayment>,
        lease: &mut NonceLease,
        mut transaction: TxEip1559,
    ) -> Result<Option<(TxEip1559, Signed)>, FacilitatorError> {
        for _ in 0..MAX_COLLISIONS {
            transaction.nonce = lease.nonce();
            let signed = lease.account().sign(transaction.clone()).await?;
            match self.journal.ledger().submit(self.submission(lease.account(), lease.nonce(), &signed, payments)).await
            {
                Ok(()) => {
                    for queued in payments {
                        queued.journalled.push(signed.hash);
                        tracing::debug!(parent: &queued.span, transaction = %signed.hash, account_nonce = lease.nonce(), "signed");
                        queued.attempts += 1;
                    }
                    return Ok(Some((transaction, signed)));
                }
                Err(LedgerError::NonceTaken { next }) => lease.skip_to(next),
                Err(LedgerError::NotDue(keys)) => {
                    let (others, kept): (Vec<_>, Vec<_>) =
                        payments.drain(..).partition(|queued| keys.contains(queued.key()));
                    *payments = kept;
                    for queued in others {
                        queued.finish_as_recorded(&self.journal).await;
                    }
                    if payments.is_empty() {
                        return Ok(None);
                    }
                    let call = self.call(payments);
                    transaction.gas_limit = call.gas_limit;
                    transaction.to = call.to.into();
                    transaction.input = call.input;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(FacilitatorError::Busy { what: "the nonces of the settlement key", retry_after: Duration::from_secs(2) })
    }

    fn submission(
        &self,
        account: &Account,
        nonce: u64,
        signed: &Signed,
        payments: &[QueuedPayment],
    ) -> JournaledTransaction {
        let at = self.journal.now();
        JournaledTransaction {
            sender: self.sender(account),
            nonce,
            hash: signed.hash,
            raw: signed.raw.clone(),
            payments: payments.iter().map(|queued| *queued.key()).collect(),
            by: self.journal.process_id(),
            at,
            until: at.saturating_add(self.confirm_timeout.as_secs()).saturating_add(SETTLING_SLACK),
            known_failures: known_failures(payments),
        }
    }

    /// Follows a transaction until it is included or its nonce is taken. Callers are told `Unknown` when the time to confirm has passed.
    async fn follow(
        self: &Arc<Self>,
        mut attempt: Attempt,
        lease: NonceLease,
        mut pending: PendingTransaction,
        (mut transaction, mut fees): (TxEip1559, Fees),
        started: Instant,
    ) -> Attempt {
        let answer_at = started + self.confirm_timeout;
        let stop_at = started + WATCH_TIMEOUT;
        let mut check_at = stop_at.min(started + self.node.check_interval());
        let (mut checks, mut replacements) = (0, 0);
        loop {
            let is_awaited = attempt.payments.iter().any(QueuedPayment::is_awaited);
            let deadline = if is_awaited { answer_at.min(check_at) } else { check_at };
            let watch = self.node.watch(&mut pending, deadline);
            let inclusion = match is_awaited {
                // A last request that hangs must not keep the callers; a slow one is waited for until then.
                true => timeout_at(answer_at + GRACE, watch).await.unwrap_or(Inclusion::Pending),
                false => watch.await,
            };
            match inclusion {
                Inclusion::Included(receipt) => {
                    attempt.result = self.included(lease, receipt, started);
                    return attempt;
                }
                Inclusion::NonceTaken => {
                    tracing::warn!(account_nonce = lease.nonce(), "another transaction took the nonce");
                    lease.taken_by_other();
                    attempt.payments.iter_mut().for_each(QueuedPayment::lost_nonce);
                    // Callers that were told `Unknown` ask again, or reconciliation does, and decide what happens next.
                    attempt.payments.retain(QueuedPayment::is_awaited);
                    attempt.result = AttemptResult::Retry;
                    return attempt;
                }
                Inclusion::Pending => {}
            }
            if Instant::now() >= answer_at && is_awaited {
                tracing::warn!(transaction = %pending.hash(), "not in a block in time; its outcome is unknown");
                for queued in &mut attempt.payments {
                    drop(queued.answer(Ok(SettlementOutcome::Unknown { transaction: Some(pending.hash()) })));
                }
            }
            if Instant::now() >= stop_at {
                lease.abandon();
                attempt.result = AttemptResult::Unresolved;
                return attempt;
            }
            if Instant::now() < check_at {
                continue;
            }
            (check_at, checks) = (stop_at.min(Instant::now() + self.node.check_interval()), checks + 1);
            let reasons =
                Reasons { fees: is_awaited || checks % PATIENT_CHECKS == 0, stuck: STUCK_CHECKS.contains(&checks) };
            if replacements >= MAX_REPLACEMENTS {
                continue;
            }
            match self.replace(&mut attempt.payments, &lease, &mut transaction, &mut fees, reasons).await {
                Ok(Some(better)) => {
                    replacements += 1;
                    attempt.watched.push(self.watch(better.hash));
                    self.node.resend(&better.raw).await;
                    pending.replaced_by(better.raw, better.hash);
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, account_nonce = lease.nonce(), "the fees could not be raised"),
            }
        }
    }

    /// Signs and journals the same call with the same nonce and higher fees, if one of these reasons holds.
    async fn replace(
        &self,
        payments: &mut [QueuedPayment],
        lease: &NonceLease,
        transaction: &mut TxEip1559,
        fees: &mut Fees,
        reasons: Reasons,
    ) -> Result<Option<Signed>, FacilitatorError> {
        if !reasons.fees && !reasons.stuck {
            return Ok(None);
        }
        self.node.forget_fees().await;
        let is_cheap = self.node.fees().await?.max_fee > fees.max_fee.saturating_add(fees.max_fee / 10);
        let is_stuck = !is_cheap && reasons.stuck && lease.account().chain_nonce("latest").await? == lease.nonce();
        if !is_cheap && !is_stuck {
            return Ok(None);
        }
        let raised = self.node.raised_fees(*fees).await?;
        let better =
            TxEip1559 { max_fee_per_gas: raised.max_fee, max_priority_fee_per_gas: raised.tip, ..transaction.clone() };
        let signed = lease.account().sign(better.clone()).await?;
        self.journal_replacement(self.submission(lease.account(), lease.nonce(), &signed, payments)).await?;
        (*transaction, *fees) = (better, raised);
        payments.iter_mut().for_each(|queued| queued.journalled.push(signed.hash));
        telemetry::replaced(self.node.network(), if is_stuck { "stuck" } else { "price" });
        tracing::info!(transaction = %signed.hash, account_nonce = lease.nonce(), max_fee = raised.max_fee, "raising the fees");
        Ok(Some(signed))
    }

    /// Journals a replacement before anybody else can know it. Payments that have ended meanwhile are left out, even if all have: the
    /// transactions behind the nonce still need the replacement. A payment that another process settles stays in, and fails the
    /// replacement: that process could not see that the replacement may pay it.
    async fn journal_replacement(&self, mut submission: JournaledTransaction) -> Result<(), FacilitatorError> {
        loop {
            let refused = match self.journal.ledger().submit(submission.clone()).await {
                Err(LedgerError::NotDue(keys)) => keys,
                answer => return Ok(answer?),
            };
            let before = submission.payments.len();
            if self.have_ended(&refused).await? {
                submission.payments.retain(|key| !refused.contains(key));
            }
            if submission.payments.len() == before {
                return Err(LedgerError::NotDue(refused).into());
            }
        }
    }

    /// Returns `true` if each of these payments is paid, or never will be.
    async fn have_ended(&self, payments: &[PaymentKey]) -> Result<bool, LedgerError> {
        for key in payments {
            let settlement = self.journal.get(key).await?.map(|record| record.settlement);
            if !settlement.is_some_and(|now| now == Settlement::Dead || now.paid_by().is_some()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn included(&self, lease: NonceLease, receipt: Receipt, started: Instant) -> AttemptResult {
        self.count_included(&receipt, started);
        lease.consumed();
        AttemptResult::Included(receipt)
    }

    fn count_included(&self, receipt: &Receipt, started: Instant) {
        self.node.observe_block(receipt.block());
        self.costs.count_included(receipt, started.elapsed());
    }

    /// Marks a transaction as followed by a task of this process.
    fn watch(self: &Arc<Self>, transaction: B256) -> WatchGuard {
        self.lock_watched().insert(transaction);
        WatchGuard { submitter: self.clone(), transaction }
    }

    fn lock_watched(&self) -> MutexGuard<'_, HashSet<B256>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FillGaps for Submitter {
    fn node(&self) -> &Node {
        &self.node
    }

    async fn send_filler(self: &Arc<Self>, lease: NonceLease) -> Result<bool, FacilitatorError> {
        let call = Call::filler(lease.account());
        let Some((lease, pending)) = self.send_call(lease, call).await? else { return Ok(false) };
        let this = self.clone();
        tokio::spawn(async move { this.follow_call(lease, pending, Instant::now() + WATCH_TIMEOUT).await });
        Ok(true)
    }
}

fn ended(payments: Vec<QueuedPayment>, result: AttemptResult) -> Attempt {
    Attempt { payments, result, watched: Vec::new() }
}

/// Why a transaction that is in no block may be replaced.
struct Reasons {
    /// Its fees are lower than the market's by now.
    fees: bool,
    /// Its nonce is the account's next, so that all later ones wait for it. A node that forgot it takes the replacement.
    stuck: bool,
}

/// A transaction counts as followed until this is dropped.
pub(super) struct WatchGuard {
    submitter: Arc<Submitter>,
    transaction: B256,
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.submitter.lock_watched().remove(&self.transaction);
    }
}
