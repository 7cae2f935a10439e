//! The sender of all transactions: signed, journalled, sent, followed to their end and replaced if they hang.
//!
//! A transaction, its nonce and its payments are in the ledger before it leaves the process, and processes that share it may share accounts.
//! Calls are journalled as transactions without payments: the contract executes each once, and the chain tells whether it was done.

use std::{
    collections::{HashMap, HashSet},
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Poll, ready},
    time::Duration,
};

use alloy_consensus::TxEip1559;
use alloy_primitives::{Address, B256, U256};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{
    accounts::{Account, Accounts, NonceLease, SharedSigner, Signed, WindowPermit},
    costs::Costs,
    gaps::FillGaps,
    gas::{Affords, KEPT_GAS, TYPICAL_GAS},
    journal::Journal,
    line::{Lane, Line, Urgency},
    load::{Call, Filler, Load, MAX_REPLACEMENTS, SharedCall},
    queue::{QueuedPayment, known_failures},
};
use crate::{
    chain::{
        broadcast::SendResult,
        confirm::{Inclusion, PendingTransaction},
        fees::{FeeError, Fees},
        node::Node,
        rpc::Receipt,
    },
    ledger::{JournaledTransaction, LedgerError, Sender, Settlement},
    payment::PaymentKey,
    settlement::FacilitatorError,
    telemetry,
};

/// How long a node may hold a broadcast until inclusion. Nodes of Base let go after 6 s.
const SYNC_TIMEOUT: Duration = Duration::from_secs(8);
/// How long the last request before a deadline may take.
const GRACE: Duration = Duration::from_millis(500);
/// How long a transaction without a receipt keeps its nonce.
const WATCH_TIMEOUT: Duration = Duration::from_secs(1_800);
/// At which checks a transaction is replaced although its fees are high enough. The first is early, while callers wait. Later ones are
/// rare: a chain that stands still is no reason, and replacements must be left for when the fees are the reason.
const STUCK_CHECKS: [usize; 3] = [1, 3, 8];
/// How many checks apart the fees are compared if nobody waits. Most spikes pass by themselves.
const PATIENT_CHECKS: usize = 8;
/// How many nonces one transaction leaves to other processes.
const MAX_COLLISIONS: usize = 256;
/// How long other processes leave the payments of a transaction alone, in seconds, beyond the time to confirm.
const SETTLING_SLACK: u64 = 45;
/// The places of each window that only claims at risk may take, so that none waits behind a window full of others.
const KEPT: usize = 1;
/// How long a deposit waits for a place in the window. Its request may have ended by then, and a repeated request joins it.
const DEPOSIT_PATIENCE: Duration = Duration::from_secs(600);
/// How many transactions of one key wait for a block at once, unless set. Nodes keep about as many.
const WINDOW: usize = 16;
/// The same where claims are sent: below a full window the gaps that a reorganization leaves would be filled one per block.
const WINDOW_FOR_CLAIMS: usize = 8;

/// The right to have one more transaction in flight.
#[derive(Debug)]
pub(crate) struct Place {
    account: Account,
    permit: WindowPermit,
    pub(super) urgency: Urgency,
}

/// The end of an attempt to get a call into a block.
pub(super) struct Attempt {
    pub(super) result: AttemptResult,
    /// The transactions count as followed until their payments have been dealt with.
    pub(super) watched: Vec<WatchGuard>,
}

pub(super) enum AttemptResult {
    /// The transaction is in a block.
    Included(Receipt),
    /// No transaction was sent, or another one took the nonce: another attempt may succeed.
    Retry,
    /// No transaction was sent, since the node wanted more ether than this balance, in wei. Another attempt may succeed.
    Unpaid { balance: U256 },
    /// No transaction was sent, and another attempt would fail, too.
    Failed(FacilitatorError),
    /// The transaction was in no block for half an hour. Reconciliation goes on.
    Unresolved,
}

/// What came of sending a transaction.
#[expect(clippy::large_enum_variant, reason = "one at a time, on its way to whoever waits")]
enum Sent {
    Ended(Attempt),
    InFlight(Box<Flight>),
}

impl Sent {
    /// Nothing was sent, and it may be later.
    const RETRY: Self = Self::Ended(Attempt { result: AttemptResult::Retry, watched: Vec::new() });
}

/// A transaction that may be in a block later.
struct Flight {
    transaction: TxEip1559,
    fees: Fees,
    lease: NonceLease,
    pending: PendingTransaction,
    started: Instant,
    watched: Vec<WatchGuard>,
}

/// Sends the transactions of one or more accounts.
pub(crate) struct Submitter {
    node: Arc<Node>,
    journal: Journal,
    accounts: Accounts,
    is_window_set: bool,
    /// Notified whenever a place in a window becomes free.
    freed: Arc<Notify>,
    /// Those that wait for a place.
    line: Line<(Account, WindowPermit)>,
    /// Claims are sent from the accounts: places and gas are kept for them.
    sends_claims: AtomicBool,
    /// What an earlier process journalled has been sent again.
    pub(super) has_recovered: watch::Sender<bool>,
    /// The calls that are under way, by what they do.
    pub(super) under_way: Mutex<HashMap<B256, SharedCall>>,
    costs: Arc<Costs>,
    confirm_timeout: Duration,
    /// Transactions that a task of this process follows.
    watched: Mutex<HashSet<B256>>,
}

impl Submitter {
    /// Each account has at most `window` transactions in flight, if set. After `confirm_timeout` callers are told that an outcome is unknown.
    pub(crate) fn new(
        node: Arc<Node>,
        journal: Journal,
        signers: Vec<SharedSigner>,
        window: Option<usize>,
        costs: Arc<Costs>,
        confirm_timeout: Duration,
    ) -> Arc<Self> {
        let freed = Arc::new(Notify::new());
        let accounts = Accounts::new(signers, &node, window.unwrap_or(WINDOW), &freed);
        let (line, under_way, watched, sends_claims, has_recovered) = Default::default();
        Arc::new(Self {
            node,
            journal,
            accounts,
            is_window_set: window.is_some(),
            freed,
            line,
            sends_claims,
            has_recovered,
            under_way,
            costs,
            confirm_timeout,
            watched,
        })
    }

    /// Keeps places and gas for claims from now on.
    pub(crate) fn keep_for_claims(&self) {
        self.sends_claims.store(true, Ordering::Relaxed);
        if !self.is_window_set {
            self.accounts.iter().for_each(|account| account.limit(WINDOW_FOR_CLAIMS));
        }
    }

    /// Returns `true` if places and gas are kept for claims.
    pub(super) fn keeps_for_claims(&self) -> bool {
        self.sends_claims.load(Ordering::Relaxed)
    }

    pub(super) const fn journal(&self) -> &Journal {
        &self.journal
    }

    pub(super) const fn node(&self) -> &Arc<Node> {
        &self.node
    }

    pub(super) const fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    pub(crate) const fn confirm_timeout(&self) -> Duration {
        self.confirm_timeout
    }

    /// Waits for a place in an account's window. The most urgent is served first. Claims and payments wait for as long as it takes.
    ///
    /// # Errors
    /// [`FacilitatorError::Busy`] if there is none in time, or too many wait that are as urgent.
    pub(crate) async fn enter(&self, urgency: Urgency) -> Result<Place, FacilitatorError> {
        self.enter_of(urgency, None).await
    }

    async fn enter_of(&self, urgency: Urgency, of: Option<Address>) -> Result<Place, FacilitatorError> {
        let busy = || FacilitatorError::Busy { what: "places of the gas keys", retry_after: Duration::from_secs(2) };
        let mut place = self.line.join(urgency, of).ok_or_else(busy)?;
        let entering = async {
            let mut freed = pin!(self.freed.notified());
            let given = poll_fn(|cx| {
                loop {
                    // Whoever is woken serves all.
                    self.serve();
                    if let Poll::Ready(given) = Pin::new(&mut place).poll(cx) {
                        return Poll::Ready(given);
                    }
                    ready!(freed.as_mut().poll(cx));
                    freed.set(self.freed.notified());
                }
            });
            let (account, permit) = given.await.map_err(|_| busy())?;
            Ok(Place { account, permit, urgency })
        };
        let patience = match urgency.lane() {
            Lane::Deposit => DEPOSIT_PATIENCE,
            Lane::Refund => self.confirm_timeout,
            // What would be lost if it lost its place waits for one.
            Lane::Payment | Lane::Claim | Lane::AtRisk => return entering.await,
        };
        timeout(patience, entering).await.map_err(|_| busy())?
    }

    /// Exchanges a place for one of this account, for what only that account may send. Waits for it until then.
    ///
    /// # Errors
    /// [`FacilitatorError::Misconfigured`] if it is none of ours, [`FacilitatorError::Busy`] if its window stays full.
    pub(super) async fn exchange(
        &self,
        place: Place,
        sender: Address,
        until: Instant,
    ) -> Result<Place, FacilitatorError> {
        if place.account.address() == sender {
            return Ok(place);
        }
        let urgency = place.urgency;
        // Others need it meanwhile.
        drop(place);
        let Some(account) = self.accounts.get(sender) else {
            let key = format!("the key of {sender}, for which a permit was signed");
            return Err(FacilitatorError::Misconfigured(key));
        };
        let entering = async {
            let _first = account.exchanging().await;
            self.enter_of(urgency, Some(sender)).await
        };
        timeout_at(until, entering).await.unwrap_or(Err(FacilitatorError::Busy {
            what: "places of the gas key that a permit names",
            retry_after: Duration::from_secs(2),
        }))
    }

    fn serve(&self) {
        // Where no claims are sent, nothing is more urgent.
        let kept = if self.keeps_for_claims() { KEPT } else { 0 };
        self.line.serve(|urgency, of| {
            let lane = urgency.lane();
            let kept = if lane == Lane::AtRisk { 0 } else { kept };
            match of {
                Some(of) => self.accounts.get(of)?.try_enter_keeping(kept),
                None => self.accounts.try_enter_keeping(kept, lane),
            }
        });
    }

    /// Sends a transaction from this place, and follows it to its end.
    pub(super) async fn make<L: Load>(self: &Arc<Self>, place: Place, load: &mut L) -> Attempt {
        match self.begin(place, load).await {
            Ok(Sent::InFlight(flight)) => self.follow(*flight, load).await,
            Ok(Sent::Ended(attempt)) => attempt,
            Err(error) => Attempt { result: AttemptResult::Failed(error), watched: Vec::new() },
        }
    }

    async fn begin<L: Load>(
        self: &Arc<Self>,
        Place { account, permit, urgency }: Place,
        load: &mut L,
    ) -> Result<Sent, FacilitatorError> {
        let (call, lane) = (load.call(), urgency.lane());
        let leaves_gas = self.keeps_for_claims() && lane < Lane::Claim;
        if leaves_gas {
            // If the ledger fails, what is known counts.
            let _ = self.submissions(&account).await;
        }
        let (announced, before) = account.announce(call.gas_limit);
        // Those that it waits for may have to offer as much.
        let gas = call.gas_limit.saturating_add(before);
        let most = load.worth() / u128::from(gas.max(1));
        let fees = self.node.fees_up_to(most).await?;
        if leaves_gas {
            let affords = account.affords(call.gas_limit, before, KEPT_GAS, fees.max_fee).await;
            if affords != Affords::Yes {
                // Otherwise those that wait would wait for each other.
                drop((announced, permit));
                if affords == Affords::Later {
                    load.must_wait();
                }
                self.cannot_pay(&account, affords, (call.gas_limit, KEPT_GAS, fees), lane, load).await?;
                return Ok(Sent::RETRY);
            }
        }
        let lease = account.take(permit, call.gas_limit).await?;
        drop(announced);
        account.gas(|gas| gas.hurry(lease.nonce(), load.worth()));
        self.send(lease, call, fees, load).await
    }

    /// Waits if the account may pay for the transaction later, or else has it rest for this lane. Fails if no account can pay for it.
    async fn cannot_pay<L: Load>(
        &self,
        account: &Account,
        affords: Affords,
        (gas_limit, kept, fees): (u64, u64, Fees),
        lane: Lane,
        load: &mut L,
    ) -> Result<(), FacilitatorError> {
        match affords {
            Affords::Yes | Affords::Later => {
                self.wait_for_block().await;
                // What others sent may be in blocks.
                account.consumed_below(account.chain_nonce("latest").await.unwrap_or_default());
                return Ok(());
            }
            Affords::Less if load.must_be_alone() => return Ok(()),
            Affords::Less | Affords::No => {}
        }
        let balance = account.gas(|gas| gas.balance());
        tracing::error!(account = %account.address(), %balance, ?lane, "the settlement key cannot pay for gas");
        // It pays for claims all the same, if not for as many at once.
        let lane = if affords == Affords::Less { lane.min(Lane::Payment) } else { lane };
        if affords == Affords::Less && !self.others_afford(account, (gas_limit, kept, fees.max_fee), lane).await {
            // Other transactions need less.
            return Err(FacilitatorError::InsufficientGas { balance });
        }
        account.gas(|gas| gas.rest(lane));
        self.accounts.check_known_balances(lane)
    }

    /// Returns `true` if another account that does not rest can pay for so much gas at this price, beside what is kept.
    async fn others_afford(&self, account: &Account, (gas, kept, max_fee): (u64, u64, u128), lane: Lane) -> bool {
        for other in self.accounts.iter() {
            let is_awake = other.address() != account.address() && other.resting(lane).is_none();
            if is_awake && matches!(other.affords(gas, 0, kept, max_fee).await, Affords::Yes | Affords::Later) {
                return true;
            }
        }
        false
    }

    /// Signs, journals and sends one transaction.
    async fn send<L: Load>(
        self: &Arc<Self>,
        mut lease: NonceLease,
        call: Call,
        fees: Fees,
        load: &mut L,
    ) -> Result<Sent, FacilitatorError> {
        let signed = self.sign_and_journal(&mut lease, call, fees, load).await;
        let Ok(Some((transaction, signed))) = signed else {
            if L::IS_FILLER && signed.is_ok() {
                lease.abandon();
            } else {
                self.give_back(lease, load).await;
            }
            signed?;
            return Ok(Sent::RETRY);
        };
        lease.sent();
        let started = Instant::now();
        let watched = vec![self.watch(signed.hash)];
        let (account, account_nonce) = (lease.account().clone(), lease.nonce());
        let (payments, gas_limit) = (load.payments().len(), transaction.gas_limit);
        tracing::debug!(transaction = %signed.hash, account_nonce, payments, gas_limit, "sending");
        // Not beyond the first check: a node may hold on to a transaction that it will never include.
        let limit = SYNC_TIMEOUT.min(self.confirm_timeout).min(self.node.check_interval());
        let sent = match L::IS_FILLER {
            true => self.node.resend(&signed.raw).await,
            false => self.node.send(&signed.raw, signed.hash, limit).await,
        };
        let result = match sent {
            SendResult::Included(receipt) => self.included::<L>(lease, receipt, started),
            // The nonce is ours in the ledger: somebody uses the key without it.
            SendResult::NonceContested => match self.node.rpc().receipt(signed.hash).await {
                Ok(Some(receipt)) => self.included::<L>(lease, receipt, started),
                _ => {
                    tracing::warn!(account_nonce, "another process uses the settlement key");
                    lease.abandon();
                    load.lost_nonce(false);
                    AttemptResult::Retry
                }
            },
            // The nonce may be used by this very transaction: a retry below us may have sent it twice.
            SendResult::Pooled | SendResult::Unknown | SendResult::NonceUsed => {
                let certainly = matches!(sent, SendResult::Pooled);
                let pending = self.node.pending(signed.raw, signed.hash, certainly);
                let flight = Flight { transaction, fees, lease, pending, started, watched };
                return Ok(Sent::InFlight(Box::new(flight)));
            }
            refusal => {
                if let SendResult::AccountFull { is_delegated } = refusal {
                    account.narrow(is_delegated);
                    load.must_wait();
                }
                let has_removed = self.give_back(lease, load).await;
                load.refused(signed.hash, has_removed);
                let refused = self.refused(&account, refusal, (transaction.gas_limit, fees), load).await;
                refused.unwrap_or_else(AttemptResult::Failed)
            }
        };
        Ok(Sent::Ended(Attempt { result, watched }))
    }

    /// Returns `true` if a task of this process follows the transaction.
    pub(super) fn is_watched(&self, transaction: B256) -> bool {
        self.lock_watched().contains(&transaction)
    }

    /// Returns the account's name in the ledger.
    pub(super) fn sender(&self, account: &Account) -> Sender {
        Sender { network: self.node.network(), address: account.address() }
    }

    /// Returns the account's journalled transactions that are in no known block. Those of other processes count as in flight from now on.
    pub(super) async fn submissions(&self, account: &Account) -> Result<Vec<JournaledTransaction>, LedgerError> {
        let journalled = self.journal.ledger().submissions(&self.sender(account), account.consumed()).await?;
        account.gas(|gas| gas.note_journalled(&journalled));
        Ok(journalled)
    }

    /// Returns what may be offered for a unit of gas with this nonce, in wei, since it is a claim at risk, which must not wait for a ceiling, or
    /// since one waits for it: with a higher nonce, or for a place in a window. `more` is the gas of transactions that are not counted yet.
    pub(super) fn hurried(&self, account: &Account, nonce: u64, more: u64) -> u128 {
        let all = self.accounts.iter().map(|account| account.gas(|gas| gas.in_flight()));
        let waiting = self.line.most(all.fold(more, u64::saturating_add));
        account.gas(|gas| gas.most(nonce, more)).max(waiting)
    }

    /// Signs and journals a transaction without payments that uses this nonce. Returns `None` if another process has the nonce.
    pub(super) async fn prepare(
        &self,
        account: &Account,
        nonce: u64,
        (call, fees): (Call, Fees),
    ) -> Result<Option<Signed>, FacilitatorError> {
        let signed = account.sign(call.into_transaction(&self.node, nonce, fees)).await?;
        match self.journal.ledger().submit(self.submission(account, nonce, &signed, &[])).await {
            Ok(()) => Ok(Some(signed)),
            Err(LedgerError::NonceTaken { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives a nonce back, and makes sure that no later transaction waits for it. Returns `true` if the ledger took it back; otherwise
    /// its transaction may be sent again.
    async fn give_back<L: Load>(self: &Arc<Self>, lease: NonceLease, load: &mut L) -> bool {
        let account = lease.account().clone();
        // The ledger comes first, while nobody here can take the nonce: it must not free one that is in use again already.
        let (sender, nonce) = (self.sender(&account), lease.nonce());
        let freed = self.journal.ledger().free_nonce(&sender, nonce, self.journal.process_id()).await;
        if let Err(error) = &freed {
            tracing::warn!(%error, account_nonce = nonce, "a nonce was not given back; other processes wait for it a while");
            load.may_be_kept();
        }
        lease.release();
        self.fill_gaps_of(&account);
        freed.is_ok()
    }

    /// Deals with a node's refusal. Returns `Ok` if another attempt may succeed.
    async fn refused<L: Load>(
        &self,
        account: &Account,
        refusal: SendResult,
        (gas_limit, fees): (u64, Fees),
        load: &mut L,
    ) -> Result<AttemptResult, FacilitatorError> {
        match refusal {
            SendResult::InsufficientGas => {
                let before = account.gas(|gas| gas.in_flight());
                let affords = match account.affords(gas_limit, before, 0, fees.max_fee).await {
                    // Nodes set aside the highest possible cost of transactions in flight. With the next block there is more.
                    Affords::Yes | Affords::Later if before > 0 => Affords::Later,
                    // The node wants more than gas costs, as on chains that charge for data. Waiting does not help.
                    Affords::Yes | Affords::Later if gas_limit > TYPICAL_GAS => Affords::Less,
                    Affords::Yes | Affords::Later => Affords::No,
                    too_little => too_little,
                };
                self.cannot_pay(account, affords, (gas_limit, 0, fees), Lane::AtRisk, load).await?;
                return Ok(AttemptResult::Unpaid { balance: account.gas(|gas| gas.balance()) });
            }
            SendResult::Refused(reason) => {
                tracing::error!(reason, "the node refuses the transaction");
                return Err(FacilitatorError::Misconfigured(format!("the node refuses the transaction: {reason}")));
            }
            SendResult::Underpriced => self.node.require_market_tip().await,
            // There is no room in the pool: other processes may share the key. With the next block there is room again.
            _ => self.wait_for_block().await,
        }
        Ok(AttemptResult::Retry)
    }

    async fn wait_for_block(&self) {
        sleep(self.node.block_time().min(Duration::from_secs(1))).await;
    }

    /// Signs the transaction and journals it with all its payments, before anybody else can know it. Payments that were settled meanwhile,
    /// that are another process's, or that failed since they were asked for are left out and answered. Returns `None` if none is left, or if
    /// another process has the nonce to fill.
    async fn sign_and_journal<L: Load>(
        &self,
        lease: &mut NonceLease,
        mut call: Call,
        fees: Fees,
        load: &mut L,
    ) -> Result<Option<(TxEip1559, Signed)>, FacilitatorError> {
        for _ in 0..MAX_COLLISIONS {
            let transaction = call.clone().into_transaction(&self.node, lease.nonce(), fees);
            let signed = lease.account().sign(transaction.clone()).await?;
            let submission = self.submission(lease.account(), lease.nonce(), &signed, load.payments());
            match self.journal.ledger().submit(submission).await {
                Ok(()) => {
                    load.signed(signed.hash);
                    return Ok(Some((transaction, signed)));
                }
                Err(LedgerError::NonceTaken { .. }) if L::IS_FILLER => return Ok(None),
                Err(LedgerError::NonceTaken { next }) => lease.skip_to(next),
                Err(LedgerError::NotDue(keys)) => {
                    for queued in load.leave_out(&keys) {
                        queued.finish_as_recorded(&self.journal).await;
                    }
                    if load.payments().is_empty() {
                        return Ok(None);
                    }
                    call = load.call();
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

    /// Follows a transaction until it is included or its nonce is taken, and replaces it if it hangs. Those who wait are told when the time
    /// to confirm has passed.
    async fn follow<L: Load>(self: &Arc<Self>, mut flight: Flight, load: &mut L) -> Attempt {
        let started = flight.started;
        let (answer_at, stop_at) = (started + self.confirm_timeout, started + WATCH_TIMEOUT);
        let checked_from = if L::COUNTS_BROADCAST { started } else { Instant::now() };
        let mut check_at = stop_at.min(checked_from + self.node.check_interval());
        let (mut checks, mut replacements) = (0, 0);
        loop {
            let (is_awaited, is_patient) = (load.is_awaited(), load.is_patient());
            let deadline = if is_awaited { answer_at.min(check_at) } else { check_at };
            let watch = self.node.watch(&mut flight.pending, deadline);
            let inclusion = match is_awaited {
                // A last request that hangs must not keep the callers; a slow one is waited for until then.
                true => timeout_at(answer_at + GRACE, watch).await.unwrap_or(Inclusion::Pending),
                false => watch.await,
            };
            match inclusion {
                Inclusion::Included(receipt) => {
                    let result = self.included::<L>(flight.lease, receipt, started);
                    return Attempt { result, watched: flight.watched };
                }
                Inclusion::NonceTaken => {
                    tracing::warn!(account_nonce = flight.lease.nonce(), "another transaction took the nonce");
                    flight.lease.taken_by_other();
                    load.lost_nonce(true);
                    return Attempt { result: AttemptResult::Retry, watched: flight.watched };
                }
                Inclusion::Pending => {}
            }
            if Instant::now() >= answer_at && is_awaited {
                tracing::warn!(transaction = %flight.pending.hash(), "not in a block in time; its outcome is unknown");
                load.tell_unknown(flight.pending.hash());
            }
            if Instant::now() >= stop_at {
                flight.lease.abandon();
                return Attempt { result: AttemptResult::Unresolved, watched: flight.watched };
            }
            if Instant::now() < check_at {
                continue;
            }
            (check_at, checks) = (stop_at.min(Instant::now() + self.node.check_interval()), checks + 1);
            let is_next = self.is_next(&flight.lease, checks).await;
            let (account, nonce) = (flight.lease.account(), flight.lease.nonce());
            // It may have come to be at risk since it was sent.
            account.gas(|gas| gas.hurry(nonce, load.worth()));
            let is_hurried = self.hurried(account, nonce, 0) > 0;
            let is_due = !is_patient || is_hurried || STUCK_CHECKS.contains(&checks) || checks % PATIENT_CHECKS == 0;
            let most = if is_hurried { MAX_REPLACEMENTS } else { L::MAX_REPLACEMENTS };
            if replacements >= most || !is_due {
                continue;
            }
            match self.replace(&mut flight, load, (is_next, checks)).await {
                Ok(has_replaced) => replacements += usize::from(has_replaced),
                Err(error) => {
                    tracing::warn!(%error, account_nonce = flight.lease.nonce(), "the fees could not be raised");
                }
            }
        }
    }

    /// Returns `true` if the nonce is known to be the account's next, at the checks at which a transaction may be stuck.
    async fn is_next(&self, lease: &NonceLease, checks: usize) -> bool {
        let (account, nonce) = (lease.account(), lease.nonce());
        // Without an answer of the node, the next check looks again.
        STUCK_CHECKS.contains(&checks)
            && account.is_lowest(nonce)
            && account.chain_nonce("latest").await.is_ok_and(|next| next == nonce)
    }

    /// Signs, journals and sends the same call with the same nonce and higher fees, if there is a reason. Returns `true` if there was.
    async fn replace<L: Load>(
        self: &Arc<Self>,
        flight: &mut Flight,
        load: &mut L,
        (is_next, checks): (bool, usize),
    ) -> Result<bool, FacilitatorError> {
        let (account, account_nonce) = (flight.lease.account(), flight.lease.nonce());
        let most = self.hurried(account, account_nonce, 0);
        let Some((fees, reason)) = self.raised(is_next, flight.fees, checks, most).await? else { return Ok(false) };
        let better = TxEip1559 {
            max_fee_per_gas: fees.max_fee,
            max_priority_fee_per_gas: fees.tip,
            ..flight.transaction.clone()
        };
        let signed = account.sign(better.clone()).await?;
        self.journal_replacement(self.submission(account, account_nonce, &signed, load.payments())).await?;
        (flight.transaction, flight.fees) = (better, fees);
        load.signed(signed.hash);
        flight.watched.push(self.watch(signed.hash));
        telemetry::replaced(self.node.network(), reason);
        tracing::info!(transaction = %signed.hash, account_nonce, max_fee = fees.max_fee, "raising the fees");
        self.node.resend(&signed.raw).await;
        flight.pending.replaced_by(signed.raw, signed.hash);
        Ok(true)
    }

    /// Returns the fees of a replacement and the reason, if gas costs more by now or the node seems to have lost the transaction, for which
    /// all later ones wait if it `is_next`. It may offer `most`, where that is more than the ceiling.
    async fn raised(
        &self,
        is_next: bool,
        fees: Fees,
        checks: usize,
        most: u128,
    ) -> Result<Option<(Fees, &'static str)>, FeeError> {
        self.node.forget_fees().await;
        let is_cheap = self.node.fees_up_to(most).await?.max_fee > fees.max_fee.saturating_add(fees.max_fee / 10);
        let is_stuck = is_next && STUCK_CHECKS.contains(&checks);
        if !is_cheap && !is_stuck {
            return Ok(None);
        }
        let raised = self.node.raised_fees_up_to(fees, most).await?;
        Ok(Some((raised, if is_cheap { "price" } else { "stuck" })))
    }

    fn included<L: Load>(&self, lease: NonceLease, receipt: Receipt, started: Instant) -> AttemptResult {
        self.node.observe_block(receipt.block());
        self.costs.count_included(&receipt, L::IS_CALL, started.elapsed());
        let above = self.node.above_ceiling(&receipt);
        lease.account().gas(|gas| {
            gas.spend(receipt.cost());
            gas.spend_above_ceiling(lease.nonce(), above);
        });
        lease.consumed();
        AttemptResult::Included(receipt)
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

    /// Marks a transaction as followed by a task of this process.
    fn watch(self: &Arc<Self>, transaction: B256) -> WatchGuard {
        self.lock_watched().insert(transaction);
        WatchGuard { submitter: self.clone(), transaction }
    }

    fn lock_watched(&self) -> MutexGuard<'_, HashSet<B256>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

debug_fields!(Submitter { accounts });

impl FillGaps for Submitter {
    fn node(&self) -> &Node {
        &self.node
    }

    async fn send_filler(self: &Arc<Self>, lease: NonceLease) -> Result<bool, FacilitatorError> {
        let most = self.hurried(lease.account(), lease.nonce(), 0);
        let fees = self.node.fees_up_to(most).await?;
        let mut filler = Filler(Call::filler(lease.account()));
        match self.send(lease, filler.call(), fees, &mut filler).await? {
            Sent::InFlight(flight) => {
                let this = self.clone();
                tokio::spawn(async move { this.follow(*flight, &mut filler).await });
                Ok(true)
            }
            Sent::Ended(Attempt { result: AttemptResult::Failed(error), .. }) => Err(error),
            Sent::Ended(_) => Ok(false),
        }
    }
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

#[cfg(all(test, feature = "local-signer"))]
mod tests {
    use alloy_signer_local::PrivateKeySigner;
    use x402_devnet::Devnet;

    use super::*;
    use crate::{Network, chain::rpc::Rpc, clock::SystemClock};

    #[allow(clippy::unwrap_used)]
    fn submitter_on(devnet: &Devnet, window: usize) -> Arc<Submitter> {
        submitter_with(devnet, window, 1)
    }

    #[allow(clippy::unwrap_used)]
    fn submitter_with(devnet: &Devnet, window: usize, keys: usize) -> Arc<Submitter> {
        let rpc = Rpc::new(devnet.rpc_client(), Duration::from_secs(5));
        let node = Node::new(Network::BASE_SEPOLIA, rpc, 100_000, None, Some(Duration::from_millis(200))).unwrap();
        let costs = Arc::new(Costs::new(Network::BASE_SEPOLIA, None, false));
        let keys = (0..keys).map(|_| Arc::new(PrivateKeySigner::random()) as SharedSigner).collect();
        let journal = Journal::new(None, Arc::new(SystemClock)).unwrap();
        let submitter = Submitter::new(Arc::new(node), journal, keys, Some(window), costs, Duration::from_secs(10));
        submitter.keep_for_claims();
        submitter
    }

    async fn entered(
        submitter: &Arc<Submitter>,
        urgency: Urgency,
    ) -> tokio::task::JoinHandle<Result<Place, FacilitatorError>> {
        let entering = submitter.clone();
        let entering = tokio::spawn(async move { entering.enter(urgency).await });
        // It has joined the line then.
        sleep(Duration::from_millis(1)).await;
        entering
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_that_is_free_goes_to_the_most_urgent_though_others_wait_longer() {
        let submitter = submitter_on(&Devnet::start().await.unwrap(), 1);
        let taken = submitter.enter(Urgency::deposit(1)).await.unwrap();
        let deposit = entered(&submitter, Urgency::deposit(1)).await;
        let refund = entered(&submitter, Urgency::refund(1)).await;
        let claim = entered(&submitter, Urgency::claim(0, 1)).await;
        let at_risk = entered(&submitter, Urgency::claim(1, 1)).await;
        // A filler that went without a place ends: nothing is free.
        submitter.freed.notify_one();
        sleep(Duration::from_millis(1)).await;
        drop(taken);
        for (waits, lane) in
            [at_risk, claim, refund, deposit].into_iter().zip([Lane::AtRisk, Lane::Claim, Lane::Refund, Lane::Deposit])
        {
            assert_eq!(waits.await.unwrap().unwrap().urgency.lane(), lane);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_place_of_a_window_is_for_claims_at_risk() {
        let submitter = submitter_on(&Devnet::start().await.unwrap(), 3);
        let _taken =
            [submitter.enter(Urgency::claim(0, 1)).await.unwrap(), submitter.enter(Urgency::refund(1)).await.unwrap()];
        let others =
            [Urgency::deposit(1), Urgency::refund(9), Urgency::claim(0, 1)].map(|urgency| entered(&submitter, urgency));
        let others = futures_util::future::join_all(others).await;
        submitter.enter(Urgency::claim(1, 1)).await.unwrap();
        assert!(others.iter().all(|waits| !waits.is_finished()));
    }

    /// Many permits name an account whose window is full.
    #[tokio::test(start_paused = true)]
    async fn one_permit_at_a_time_waits_in_the_line_for_the_account_that_it_names() {
        let submitter = submitter_with(&Devnet::start().await.unwrap(), 2, 2);
        let mut first = Vec::new();
        for _ in 0..2 {
            first.push(submitter.enter(Urgency::claim(0, 1)).await.unwrap());
        }
        let busy = first[0].account.address();
        let other = first.pop().unwrap();
        assert_ne!(other.account.address(), busy);
        drop(other);
        for _ in 0..1_200 {
            let (submitter, place) = (submitter.clone(), submitter.enter(Urgency::claim(0, 1)).await.unwrap());
            tokio::spawn(async move { submitter.exchange(place, busy, Instant::now() + SYNC_TIMEOUT).await });
            sleep(Duration::from_millis(1)).await;
        }
        submitter.enter(Urgency::claim(0, 1)).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn claims_keep_their_place_in_the_line_and_the_others_are_told_to_come_again() {
        let submitter = submitter_on(&Devnet::start().await.unwrap(), 1);
        let taken = submitter.enter(Urgency::claim(0, 1)).await.unwrap();
        let claim = entered(&submitter, Urgency::claim(0, 1)).await;
        for (urgency, patience) in [(Urgency::refund(1), 10), (Urgency::deposit(1), 600)] {
            let (begun, told) = (Instant::now(), submitter.enter(urgency).await);
            assert!(matches!(told, Err(FacilitatorError::Busy { .. })), "{told:?}");
            assert_eq!(begun.elapsed().as_secs(), patience);
        }
        sleep(Duration::from_secs(86_400)).await;
        assert!(!claim.is_finished());
        drop(taken);
        claim.await.unwrap().unwrap();
    }

    /// Gas has to cost a tenth more than a transaction offers, unless all later ones wait for it.
    #[tokio::test]
    async fn fees_are_raised_when_gas_costs_a_tenth_more_or_others_wait() {
        let devnet = Devnet::start().await.unwrap();
        let submitter = submitter_on(&devnet, 1);
        devnet.set_base_fee(10_000_000_000);
        let fees = submitter.node.fees().await.unwrap();
        // Twice the base fee and the tip are offered.
        let tenth_more = (fees.max_fee + fees.max_fee / 10 - fees.tip) / 2;
        for (base_fee, is_next, checks, is_raised) in [
            (10_000_000_000, false, 1, false),
            (10_500_000_000, false, 1, false),
            (10_500_000_000, true, 1, true),
            (10_500_000_000, true, 2, false),
            (tenth_more, false, 2, false),
            (tenth_more + 1, false, 2, true),
        ] {
            devnet.set_base_fee(u64::try_from(base_fee).unwrap());
            let raised = submitter.raised(is_next, fees, checks, 0).await.unwrap();
            let is_enough = raised.is_some_and(|(raised, _)| raised.max_fee > fees.max_fee + fees.max_fee / 10);
            assert_eq!((raised.is_some(), is_enough), (is_raised, is_raised), "{base_fee} {is_next} {checks}");
        }
    }
}
