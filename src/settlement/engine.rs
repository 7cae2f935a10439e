//! One payment, from the wish to settle it to an outcome.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy_eips::eip2718::Encodable2718;
use alloy_network::TxSigner;
use alloy_primitives::{Address, B256, Bytes, Signature, TxKind, U256};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};
use tracing::Instrument;

use super::{
    broadcast::{Broadcaster, Sent},
    confirm::{Flight, Seen},
    credit::{self, Use},
    fees::{FeeCache, Fees},
    judge::Expected,
    lane::{Lane, Slot},
    pace::Pace,
    probe::{Facts, Probe},
    rpc::{Receipt, Rpc, RpcFailure},
    transfer,
};
use crate::{
    clock::Clock,
    facilitator::{FacilitatorError, Outcome, Prechecked, Rejection, Verified},
    ledger::{Ledger, PaymentKey, Record, Settlement, SettlementStep},
    network::Network,
    protocol::Reason,
};

/// What was verified longer ago than this many seconds is looked at again before it is signed for.
const FRESH: u64 = 5;
/// How often a payment is signed for anew after its nonce went to somebody else or its offer was too low.
const ATTEMPTS: usize = 4;
/// How long a settlement waits for a place in the lane.
const QUEUE_PATIENCE: Duration = Duration::from_secs(60);
/// A node that holds a broadcast until inclusion lets go after 6 s on Base; this is how long we hold on.
const SYNC_LIMIT: Duration = Duration::from_secs(8);
/// How long a transaction out of sight keeps its nonce.
const WATCH_LIMIT: Duration = Duration::from_secs(1_800);
/// Gas for a transfer of nothing to oneself.
const FILLER_GAS: u64 = 21_000;
/// What a simulation may fall short of: it reads the token's storage before the transfer, which makes that cheaper, and the
/// payee's balance may be gone by the time of the real one.
const GAS_MARGIN: u64 = 60_000;
/// How long a gap in the nonces may wait for a payment to fill it.
const GAP_PATIENCE: Duration = Duration::from_millis(300);
/// How often filling gaps is tried before it is left to the next payment.
const MAX_FILLERS: usize = 64;
/// How often the price of one nonce is raised.
const MAX_RAISES: usize = 3;

/// Any signer of transactions.
pub(crate) type SharedSigner = Arc<dyn TxSigner<Signature> + Send + Sync>;

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SettlementStats {
    /// Payments settled by transactions of this process.
    pub settled: u64,
    /// Payments that somebody else's transaction settled.
    pub credited: u64,
    /// Transactions included that did not pay.
    pub reverted: u64,
    /// Gas used by transactions of this process.
    pub gas_used: u64,
    /// What they cost, in wei, data availability included.
    pub spent: U256,
    /// Transactions in flight now.
    pub in_flight: u64,
}

/// Everything that settling on one chain with one key takes.
pub(crate) struct Engine {
    pub(crate) network: Network,
    pub(crate) rpc: Rpc,
    pub(crate) probe: Probe,
    pub(crate) pace: Pace,
    pub(crate) fees: FeeCache,
    pub(crate) lane: Lane,
    pub(crate) node: Broadcaster,
    pub(crate) signer: SharedSigner,
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) gas_cap: u64,
    pub(crate) confirm_timeout: Duration,
    pub(crate) totals: Mutex<SettlementStats>,
    /// Transactions that a task of this process looks after.
    pub(crate) watched: Mutex<HashSet<B256>>,
    pub(crate) filling: AtomicBool,
}

/// A signed transaction.
struct Signed {
    raw: Bytes,
    hash: B256,
}

/// A payment with what settling it needs.
struct Job {
    payment: Prechecked,
    key: PaymentKey,
    calldata: Bytes,
    expected: Expected,
}

impl Job {
    fn new(payment: Prechecked) -> Self {
        let token = payment.terms().offer().asset.address;
        Self {
            key: payment.key(),
            calldata: transfer::calldata(payment.authorization(), payment.signature()),
            expected: Expected::of(token, payment.authorization()),
            payment,
        }
    }
}

/// How far one settlement came.
struct Progress {
    /// Where the outcome goes, at most once; the task goes on when nobody waits any more.
    answer: Option<oneshot::Sender<Result<Outcome, FacilitatorError>>>,
    /// Every transaction in the journal.
    journalled: Vec<B256>,
    /// Those that no node took.
    refused: Vec<B256>,
}

impl Progress {
    fn answer(&mut self, outcome: Result<Outcome, FacilitatorError>) {
        if let Some(sender) = self.answer.take() {
            // An error here means that the caller is gone.
            let _ = sender.send(outcome);
        }
    }
}

/// What came of one transaction.
enum Attempt {
    /// It is in a block.
    Included(Receipt),
    /// Its nonce went to another transaction, or its offer was too low.
    Again,
    /// Nobody waits for it any more.
    Abandoned,
}

impl Engine {
    /// One look at the payment, and what is wrong with it.
    pub(crate) async fn verify(&self, payment: &Prechecked) -> Result<(Facts, Option<Rejection>), RpcFailure> {
        let calldata = transfer::calldata(payment.authorization(), payment.signature());
        let facts = self.probe.look(&self.rpc, payment, &calldata).await?;
        self.pace.observe(facts.block);
        let rejection = self.probe.diagnose(&facts, payment);
        Ok((facts, rejection))
    }

    /// Settles a payment in a task of its own, which ends neither with the caller nor before the nonce is resolved.
    pub(crate) async fn settle(
        self: &Arc<Self>,
        payment: Prechecked,
        verified: Verified,
    ) -> Result<Outcome, FacilitatorError> {
        let (sender, outcome) = oneshot::channel();
        let job = Job::new(payment);
        let span =
            tracing::info_span!("settle", network = %self.network, payer = %job.key.payer, nonce = %job.key.nonce);
        let engine = self.clone();
        let task = async move {
            let mut progress = Progress { answer: Some(sender), journalled: Vec::new(), refused: Vec::new() };
            let outcome = match engine.drive(&job, verified, &mut progress).await {
                Err(error) => engine.give_up(&job, &progress, error).await,
                outcome => outcome,
            };
            progress.answer(outcome);
        };
        tokio::spawn(task.instrument(span));
        // The task answers unless the runtime shuts down.
        outcome.await.unwrap_or(Err(FacilitatorError::Unreachable {
            what: "the settlement task",
            retry_after: Duration::from_secs(5),
        }))
    }

    async fn drive(
        self: &Arc<Self>,
        job: &Job,
        verified: Verified,
        progress: &mut Progress,
    ) -> Result<Outcome, FacilitatorError> {
        let seen_unused = verified.funds.map(|funds| funds.block);
        let mut gas = verified.gas;
        if gas.is_none() || self.clock.now().saturating_sub(verified.at) > FRESH {
            let (facts, rejection) = self.verify(&job.payment).await?;
            if facts.used {
                return self.look_for_use(job, seen_unused, &facts, None).await;
            }
            if let Some(Rejection { reason, detail }) = rejection {
                return Ok(Outcome::Failed { reason, detail, transaction: None, dead: false });
            }
            gas = Some(facts.gas);
        }
        let gas_limit = self.gas_limit(&job.calldata, gas);
        for _ in 0..ATTEMPTS {
            match self.attempt(job, gas_limit, progress).await? {
                Attempt::Included(receipt) => return self.conclude(job, seen_unused, &receipt).await,
                Attempt::Abandoned => return Ok(Outcome::Unknown { transaction: progress.journalled.last().copied() }),
                Attempt::Again => {}
            }
        }
        Err(FacilitatorError::Busy { what: "the settlement key or its fees", retry_after: Duration::from_secs(2) })
    }

    /// One transaction: signed, journalled, sent, followed.
    async fn attempt(
        self: &Arc<Self>,
        job: &Job,
        gas_limit: u64,
        progress: &mut Progress,
    ) -> Result<Attempt, FacilitatorError> {
        let fees = self.fees.get(&self.rpc).await?;
        let mut slot = self.lane.take(QUEUE_PATIENCE).await?;
        let transaction = self.transaction(slot.nonce(), fees, gas_limit, job.expected.token, job.calldata.clone());
        let signed = match self.sign_and_journal(job, transaction.clone(), progress).await {
            Ok(signed) => signed,
            Err(error) => {
                self.give_back(slot);
                return Err(error);
            }
        };
        slot.sent();
        let started = Instant::now();
        let _watched = Watched::enter(self, signed.hash);
        tracing::debug!(transaction = %signed.hash, lane_nonce = slot.nonce(), gas_limit, "sending");
        let limit = SYNC_LIMIT.min(self.confirm_timeout);
        match self.node.send(&self.rpc, &signed.raw, signed.hash, limit).await {
            Sent::Included(receipt) => {
                self.account(&receipt, started);
                slot.consumed();
                Ok(Attempt::Included(receipt))
            }
            sent @ (Sent::Pooled | Sent::Perhaps) => {
                let certainly = matches!(sent, Sent::Pooled);
                let flight = Flight::new(signed.raw, signed.hash, certainly, &self.pace);
                self.follow(job, slot, flight, (transaction, fees), started, progress).await
            }
            Sent::NonceUsed | Sent::NonceContested => {
                // A retry below us may have sent it twice.
                if let Ok(Some(receipt)) = self.rpc.receipt(signed.hash).await {
                    self.account(&receipt, started);
                    slot.consumed();
                    return Ok(Attempt::Included(receipt));
                }
                tracing::warn!(lane_nonce = slot.nonce(), "another process uses the settlement key");
                progress.refused.push(signed.hash);
                slot.displaced();
                Ok(Attempt::Again)
            }
            refusal => {
                progress.refused.push(signed.hash);
                self.give_back(slot);
                self.refused(refusal).await
            }
        }
    }

    /// No node took the transaction: shall it be tried again?
    async fn refused(&self, refusal: Sent) -> Result<Attempt, FacilitatorError> {
        match refusal {
            Sent::NoGas => {
                let account = self.signer.address();
                let balance = self.rpc.balance(account).await.unwrap_or_default();
                tracing::error!(%account, %balance, "the settlement key cannot pay for gas");
                Err(FacilitatorError::GasTank { balance })
            }
            Sent::PoolFull => {
                Err(FacilitatorError::Busy { what: "the node's transaction pool", retry_after: Duration::from_secs(2) })
            }
            Sent::Refused(words) => {
                tracing::error!(words, "the node refuses the transaction");
                Err(FacilitatorError::Misconfigured(format!("the node refuses the transaction: {words}")))
            }
            _ => {
                self.fees.forget().await;
                Ok(Attempt::Again)
            }
        }
    }

    /// Nothing more can be done now. If no node took any transaction of the payment, it is due again; otherwise its fate is
    /// unknown.
    async fn give_up(
        &self,
        job: &Job,
        progress: &Progress,
        error: FacilitatorError,
    ) -> Result<Outcome, FacilitatorError> {
        let Some(transaction) = progress.journalled.last().copied() else { return Err(error) };
        let was_refused = |transaction: &B256| progress.refused.contains(transaction);
        let record = self.ledger.get(&job.key).await.ok().flatten();
        if record.is_some_and(|record| record.transactions.iter().all(was_refused))
            && self
                .ledger
                .settle(&job.key, SettlementStep::Fail { reason: Reason::UnexpectedSettleError })
                .await
                .is_ok()
        {
            return Err(error);
        }
        Ok(Outcome::Unknown { transaction: Some(transaction) })
    }

    /// Follows a transaction until its nonce is resolved. Who waits for the outcome is told `Unknown` in good time.
    async fn follow(
        self: &Arc<Self>,
        job: &Job,
        slot: Slot,
        mut flight: Flight,
        (mut transaction, mut fees): (TxEip1559, Fees),
        started: Instant,
        progress: &mut Progress,
    ) -> Result<Attempt, FacilitatorError> {
        let raise_after = (6 * self.pace.block_time()).max(Duration::from_secs(2));
        let answer_at = started + self.confirm_timeout;
        let mut raised = Vec::new();
        loop {
            let deadline = match progress.answer {
                Some(_) => answer_at.min(Instant::now() + raise_after),
                None => Instant::now() + 4 * raise_after,
            };
            match flight.watch(&self.rpc, &self.node, &self.pace, deadline).await {
                Seen::Included(receipt) => {
                    self.account(&receipt, started);
                    slot.consumed();
                    return Ok(Attempt::Included(receipt));
                }
                Seen::Displaced => {
                    tracing::warn!(lane_nonce = slot.nonce(), "another transaction took the nonce");
                    slot.displaced();
                    // Whoever was told "unknown" asks again, and decides what happens next.
                    return Ok(if progress.answer.is_some() { Attempt::Again } else { Attempt::Abandoned });
                }
                Seen::NotYet => {}
            }
            if Instant::now() >= answer_at && progress.answer.is_some() {
                tracing::warn!(transaction = %flight.hash(), "not in a block in time; its fate is unknown");
                progress.answer(Ok(Outcome::Unknown { transaction: Some(flight.hash()) }));
            }
            if started.elapsed() >= WATCH_LIMIT {
                slot.displaced();
                return Ok(Attempt::Abandoned);
            }
            if raised.len() < MAX_RAISES
                && let Ok(Some(better)) = self.raise(job, &mut transaction, &mut fees, progress).await
            {
                raised.push(Watched::enter(self, better.hash));
                self.node.resend(&self.rpc, &better.raw).await;
                flight.replaced_by(better.raw, better.hash);
            }
        }
    }

    /// Signs the same call with the same nonce for a better price, if the price is what it waits for.
    async fn raise(
        &self,
        job: &Job,
        transaction: &mut TxEip1559,
        fees: &mut Fees,
        progress: &mut Progress,
    ) -> Result<Option<Signed>, FacilitatorError> {
        self.fees.forget().await;
        if self.fees.get(&self.rpc).await?.max_fee <= fees.max_fee.saturating_add(fees.max_fee / 10) {
            return Ok(None);
        }
        let raised = self.fees.raise(&self.rpc, *fees).await?;
        let (nonce, gas_limit) = (transaction.nonce, transaction.gas_limit);
        *transaction = self.transaction(nonce, raised, gas_limit, job.expected.token, job.calldata.clone());
        *fees = raised;
        let signed = self.sign_and_journal(job, transaction.clone(), progress).await?;
        tracing::info!(transaction = %signed.hash, lane_nonce = nonce, max_fee = raised.max_fee, "raising the price");
        Ok(Some(signed))
    }

    /// What an included transaction of ours did.
    async fn conclude(
        &self,
        job: &Job,
        seen_unused: Option<u64>,
        receipt: &Receipt,
    ) -> Result<Outcome, FacilitatorError> {
        let transaction = receipt.transaction_hash;
        if job.expected.is_paid_by(receipt) {
            self.totals().settled += 1;
            return Ok(Outcome::Settled { transaction, block: Some(receipt.block()) });
        }
        self.totals().reverted += 1;
        tracing::info!(%transaction, gas = %receipt.gas_used, "included, and did not pay");
        let unknown = Outcome::Unknown { transaction: Some(transaction) };
        // A node that lags behind the receipt cannot say why.
        for _ in 0..5 {
            match self.verify(&job.payment).await {
                Ok((facts, _)) if facts.block < receipt.block() => {}
                Ok((facts, _)) if facts.used => {
                    let found = self.look_for_use(job, seen_unused, &facts, Some(transaction)).await;
                    return Ok(found.unwrap_or(unknown));
                }
                Ok((_, rejection)) => {
                    let (reason, detail) = match rejection {
                        Some(Rejection { reason, detail }) => (reason, detail),
                        None => {
                            (Reason::InvalidTransactionState, "the transaction was included and did not pay".into())
                        }
                    };
                    return Ok(Outcome::Failed { reason, detail, transaction: Some(transaction), dead: false });
                }
                Err(_) => {}
            }
            sleep(self.pace.poll_interval()).await;
        }
        Ok(unknown)
    }

    /// The authorization is used: by whom, and for what?
    async fn look_for_use(
        &self,
        job: &Job,
        seen_unused: Option<u64>,
        facts: &Facts,
        transaction: Option<B256>,
    ) -> Result<Outcome, FacilitatorError> {
        let record = self.ledger.get(&job.key).await?;
        let reserved = record.map(|record| record.block_seen.or(seen_unused));
        let Some(seen_unused) = reserved.flatten() else {
            let detail = "the authorization was used before it was reserved here".to_owned();
            return Ok(Outcome::Failed { reason: Reason::NonceAlreadyUsed, detail, transaction, dead: false });
        };
        match credit::find(&self.rpc, &job.expected, seen_unused, facts.block).await? {
            Use::Paid { transaction, block } => {
                self.totals().credited += 1;
                tracing::info!(%transaction, block, "settled by another sender's transaction");
                Ok(Outcome::Settled { transaction, block: Some(block) })
            }
            Use::Wasted { transaction, block } => {
                let finalized = self.rpc.block("finalized").await.ok().flatten();
                let dead = finalized.is_some_and(|finalized| finalized.number.saturating_to::<u64>() >= block);
                let detail = "the payer cancelled the authorization or used its nonce for something else".to_owned();
                Ok(Outcome::Failed { reason: Reason::NonceAlreadyUsed, detail, transaction: Some(transaction), dead })
            }
            Use::NotFound => Ok(Outcome::Unknown { transaction }),
        }
    }

    /// What became of a payment that an earlier call, or an earlier process, lost sight of.
    pub(crate) async fn reconcile(&self, record: &Record) -> Result<Outcome, FacilitatorError> {
        if let Settlement::Settled { transaction, block } | Settlement::Final { transaction, block } = record.settlement
        {
            return Ok(Outcome::Settled { transaction, block });
        }
        let job = Job::new(Prechecked::of_record(record));
        let newest_first = || record.transactions.iter().rev().take(16).copied();
        for transaction in newest_first() {
            if let Some(receipt) = self.rpc.receipt(transaction).await?
                && job.expected.is_paid_by(&receipt)
            {
                return Ok(Outcome::Settled { transaction, block: Some(receipt.block()) });
            }
        }
        // Final before newest: what is unused now was unused then.
        let finalized = self.rpc.block("finalized").await?;
        let (facts, rejection) = self.verify(&job.payment).await?;
        if facts.used {
            return self.look_for_use(&job, record.block_seen, &facts, newest_first().next()).await;
        }
        let valid_before = record.authorization.valid_before;
        let expired = |timestamp: u64| U256::from(timestamp) >= valid_before;
        let expired_for_good = finalized.is_some_and(|block| {
            expired(block.timestamp.saturating_to()) && facts.block >= block.number.saturating_to::<u64>()
        });
        let failed = |reason, detail: String, dead| {
            Ok(Outcome::Failed { reason, detail, transaction: newest_first().next(), dead })
        };
        if expired_for_good {
            return failed(Reason::ValidBefore, format!("unused when validBefore, {valid_before}, passed"), true);
        }
        for transaction in newest_first() {
            if self.watches(transaction) || self.is_pending(transaction).await? {
                return Ok(Outcome::Unknown { transaction: Some(transaction) });
            }
        }
        match rejection {
            Some(Rejection { reason, detail }) => failed(reason, detail, false),
            None => failed(Reason::InvalidTransactionState, "no transaction executed it so far".to_owned(), false),
        }
    }

    async fn is_pending(&self, transaction: B256) -> Result<bool, RpcFailure> {
        let found: Option<serde_json::Value> = self.rpc.call("eth_getTransactionByHash", [transaction]).await?;
        Ok(found.is_some_and(|found| found.get("blockNumber").is_none_or(serde_json::Value::is_null)))
    }

    /// Makes a transaction's hash known to the journal before anybody else can know it.
    async fn sign_and_journal(
        &self,
        job: &Job,
        transaction: TxEip1559,
        progress: &mut Progress,
    ) -> Result<Signed, FacilitatorError> {
        let signed = self.sign(transaction).await?;
        self.ledger.settle(&job.key, SettlementStep::Submit { transaction: signed.hash }).await?;
        progress.journalled.push(signed.hash);
        Ok(signed)
    }

    fn transaction(&self, nonce: u64, fees: Fees, gas_limit: u64, to: Address, input: Bytes) -> TxEip1559 {
        TxEip1559 {
            chain_id: self.network.chain_id(),
            nonce,
            gas_limit,
            max_fee_per_gas: fees.max_fee,
            max_priority_fee_per_gas: fees.tip,
            to: TxKind::Call(to),
            input,
            ..TxEip1559::default()
        }
    }

    async fn sign(&self, mut transaction: TxEip1559) -> Result<Signed, FacilitatorError> {
        // A signer's error may quote what it was asked to sign, or where its key service is.
        let signature = self.signer.sign_transaction(&mut transaction).await.map_err(|_| {
            tracing::error!(account = %self.signer.address(), "the settlement key's signer failed");
            FacilitatorError::Unreachable { what: "the settlement key's signer", retry_after: Duration::from_secs(5) }
        })?;
        let envelope = TxEnvelope::from(transaction.into_signed(signature));
        Ok(Signed { hash: *envelope.tx_hash(), raw: envelope.encoded_2718().into() })
    }

    fn gas_limit(&self, calldata: &[u8], simulated: Option<u64>) -> u64 {
        let call = simulated.map_or(self.gas_cap, |gas| gas.saturating_add(gas / 8).min(self.gas_cap));
        transfer::intrinsic_gas(calldata).saturating_add(call).saturating_add(GAS_MARGIN)
    }

    fn account(&self, receipt: &Receipt, started: Instant) {
        let gas = receipt.gas_used.saturating_to::<u64>();
        let block = receipt.block();
        self.pace.observe(block);
        tracing::info!(transaction = %receipt.transaction_hash, block, gas, latency = ?started.elapsed(), "included");
        let mut totals = self.totals();
        totals.gas_used = totals.gas_used.saturating_add(gas);
        totals.spent = totals.spent.saturating_add(receipt.cost());
    }

    pub(crate) fn totals(&self) -> MutexGuard<'_, SettlementStats> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watches(&self, transaction: B256) -> bool {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).contains(&transaction)
    }

    /// Gives a nonce back and sees to it that nobody waits for it.
    fn give_back(self: &Arc<Self>, slot: Slot) {
        slot.release();
        if self.lane.has_gap() && !self.filling.swap(true, Ordering::AcqRel) {
            tokio::spawn(self.clone().fill_gaps());
        }
    }

    /// Fills gaps that no payment fills soon with transfers of nothing to ourselves, so that what is in flight above them can
    /// be included.
    async fn fill_gaps(self: Arc<Self>) {
        let mut pause = GAP_PATIENCE.max(2 * self.pace.poll_interval());
        for _ in 0..MAX_FILLERS {
            sleep(pause).await;
            if !self.lane.has_gap() {
                break;
            }
            let Some(slot) = self.lane.take_gap(QUEUE_PATIENCE).await else { continue };
            let nonce = slot.nonce();
            match self.fill(slot).await {
                Ok(()) => tracing::info!(lane_nonce = nonce, "filling a gap in the nonces"),
                Err(error) => {
                    tracing::warn!(lane_nonce = nonce, %error, "a gap in the nonces cannot be filled");
                    pause = (2 * pause).min(Duration::from_secs(10));
                }
            }
        }
        self.filling.store(false, Ordering::Release);
    }

    async fn fill(self: &Arc<Self>, mut slot: Slot) -> Result<(), FacilitatorError> {
        let fees = self.fees.get(&self.rpc).await?;
        let transaction = self.transaction(slot.nonce(), fees, FILLER_GAS, self.signer.address(), Bytes::new());
        let signed = self.sign(transaction).await?;
        slot.sent();
        let sent = self.node.resend(&self.rpc, &signed.raw).await;
        match sent {
            Sent::Included(_) | Sent::Pooled | Sent::Perhaps => {}
            Sent::NonceUsed | Sent::NonceContested => {
                slot.displaced();
                return Ok(());
            }
            refusal => {
                slot.release();
                return self.refused(refusal).await.map(drop);
            }
        }
        let engine = self.clone();
        let mut flight = Flight::new(signed.raw, signed.hash, matches!(sent, Sent::Pooled), &self.pace);
        tokio::spawn(async move {
            let started = Instant::now();
            match flight.watch(&engine.rpc, &engine.node, &engine.pace, started + WATCH_LIMIT).await {
                Seen::Included(receipt) => {
                    engine.account(&receipt, started);
                    slot.consumed();
                }
                Seen::Displaced | Seen::NotYet => slot.displaced(),
            }
        });
        Ok(())
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("network", &self.network)
            .field("account", &self.signer.address())
            .field("lane", &self.lane)
            .finish_non_exhaustive()
    }
}

/// A transaction that a task looks after, for as long as it lives.
struct Watched {
    engine: Arc<Engine>,
    transaction: B256,
}

impl Watched {
    fn enter(engine: &Arc<Engine>, transaction: B256) -> Self {
        engine.watched.lock().unwrap_or_else(PoisonError::into_inner).insert(transaction);
        Self { engine: engine.clone(), transaction }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.engine.watched.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.transaction);
    }
}
