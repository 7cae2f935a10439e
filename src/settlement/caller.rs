//! Calls of contracts, each in a transaction of its own: sent, followed and replaced if they hang.
//!
//! Calls are not journalled: they must be such that sending one again cannot pay twice, and that the chain tells whether it was made.

use std::{
    collections::HashMap,
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Poll, ready},
    time::Duration,
};

use alloy_consensus::TxEip1559;
use alloy_primitives::{Address, B256};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout},
};

use super::{
    FacilitatorError, NotReady,
    accounts::{Account, Accounts, NonceLease, SharedSigner, WindowPermit},
    gaps::FillGaps,
    line::{Lane, Line, Urgency},
    submitter::Call,
};
use crate::{
    chain::{
        broadcast::SendResult,
        confirm::{Inclusion, PendingTransaction},
        fees::Fees,
        node::Node,
        rpc::Receipt,
    },
    telemetry,
};

/// How long a node may hold a broadcast until inclusion.
const SYNC_TIMEOUT: Duration = Duration::from_secs(8);
/// How long a transaction without a receipt keeps its nonce.
const WATCH_TIMEOUT: Duration = Duration::from_secs(1_800);
/// At which checks a transaction is replaced although its fees are high enough: the node may have lost it.
const STUCK_CHECKS: [u32; 3] = [1, 3, 8];
/// How often the transaction of one nonce is replaced. All later ones wait for it, so this is only to bound what is followed.
const MAX_REPLACEMENTS: usize = 20;
/// For how many checks the transactions of an account wait for one in the pool that is not ours.
const FOREIGN_CHECKS: u32 = 4;
/// How often one call is sent with another nonce, or after the node refused it for a reason that passes.
const MAX_ATTEMPTS: usize = 4;
/// The places of each window that only claims at risk may take, so that none waits behind a window full of others.
const KEPT: usize = 1;
/// How long a deposit waits for a place in the window. Its request may have ended by then, and a repeated request joins it.
const DEPOSIT_PATIENCE: Duration = Duration::from_secs(600);
/// The gas limit that an account must be able to pay for: that of a deposit into a payment channel.
const MIN_GAS: u64 = 215_000;
/// The gas that calls which can wait leave to an account: claims of some eighty channels.
const KEPT_GAS: u128 = 2_000_000;

/// Sends calls from one or more accounts, whose keys nobody else may use.
pub(crate) struct Caller {
    node: Arc<Node>,
    accounts: Accounts,
    /// Notified whenever a place in a window becomes free.
    freed: Arc<Notify>,
    /// Those that wait for a place.
    line: Line<(Account, WindowPermit)>,
    /// What becomes of the calls that are under way, by what they do.
    under_way: Mutex<HashMap<B256, watch::Receiver<Progress>>>,
    confirm_timeout: Duration,
    gas_used: AtomicU64,
}

/// The right to have one more transaction in flight.
#[derive(Debug)]
pub(crate) struct Place {
    account: Account,
    permit: WindowPermit,
    urgency: Urgency,
}

/// What is known of a call when the time to confirm it has passed.
#[derive(Debug)]
pub(crate) enum CallOutcome {
    /// Its transaction is in a block. It may have reverted.
    Included(Receipt),
    /// Not known: it may be in a block later. The transaction is `None` if it was not even signed in time.
    Pending(Option<B256>),
}

/// What the task that makes a call tells its caller.
#[derive(Clone, Debug)]
enum Progress {
    Sending(Option<B256>),
    Included(Receipt),
    Failed(FacilitatorError),
}

/// What came of sending a transaction.
enum Sent {
    Included(Receipt),
    /// The node refused the transaction.
    Refused(SendResult),
    Waiting(Box<Waiting>),
}

/// A transaction that may be in a block later.
struct Waiting {
    transaction: TxEip1559,
    fees: Fees,
    /// The most that it may offer for a unit of gas, in wei, where that is more than the ceiling.
    most: u128,
    lease: NonceLease,
    pending: PendingTransaction,
    started: Instant,
}

/// The end of a transaction that waited.
#[expect(clippy::large_enum_variant, reason = "one at a time, on its way to whoever waits")]
enum Ended {
    Included(Receipt),
    /// Another transaction has the nonce.
    NonceTaken,
    /// In no block for half an hour.
    Unresolved,
}

impl Caller {
    /// Each account has at most `window` transactions in flight. Callers are told that an outcome is not known after `confirm_timeout`.
    pub(crate) fn new(
        node: Arc<Node>,
        signers: Vec<SharedSigner>,
        window: usize,
        confirm_timeout: Duration,
    ) -> Arc<Self> {
        let freed = Arc::new(Notify::new());
        let accounts = Accounts::new(signers, &node, window, &freed);
        let (line, under_way, gas_used) = Default::default();
        Arc::new(Self { node, accounts, freed, line, under_way, confirm_timeout, gas_used })
    }

    /// Returns the addresses of the accounts.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Address> {
        self.accounts.iter().map(Account::address)
    }

    /// Returns the gas that transactions of this process have used.
    pub(crate) fn gas_used(&self) -> u64 {
        self.gas_used.load(Ordering::Relaxed)
    }

    /// Returns why no call could be sent now, if that is so.
    pub(crate) async fn cannot_send(&self) -> Option<NotReady> {
        self.accounts.cannot_send(&self.node, MIN_GAS.into()).await
    }

    /// Returns why no call that can wait should be sent now: gas is kept for claims.
    pub(crate) async fn cannot_spare(&self) -> Option<NotReady> {
        self.accounts.cannot_send(&self.node, KEPT_GAS).await
    }

    /// Waits until the transactions that an earlier process with these keys left in the pool are in blocks: they may do what is about to be
    /// sent. Those that hang are waited for as long as transactions of others who use a key.
    ///
    /// # Errors
    /// [`FacilitatorError::Unreachable`] if the node does not tell its pool.
    pub(crate) async fn outlive_predecessors(&self) -> Result<(), FacilitatorError> {
        for account in self.accounts.iter() {
            account.outlive_predecessor(FOREIGN_CHECKS * self.node.check_interval()).await?;
        }
        Ok(())
    }

    /// Waits for a place in an account's window. The most urgent is served first. Claims wait for as long as it takes.
    ///
    /// # Errors
    /// [`FacilitatorError::Busy`] if there is none in time, or too many wait that are as urgent.
    pub(crate) async fn enter(&self, urgency: Urgency) -> Result<Place, FacilitatorError> {
        let busy =
            || FacilitatorError::Busy { what: "calls of the escrow contract", retry_after: Duration::from_secs(2) };
        let mut place = self.line.join(urgency).ok_or_else(busy)?;
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
            Lane::Claim | Lane::AtRisk => return entering.await,
        };
        timeout(patience, entering).await.map_err(|_| busy())?
    }

    fn serve(&self) {
        self.line.serve(|urgency| match urgency.lane() {
            Lane::AtRisk => self.accounts.try_enter(),
            Lane::Deposit | Lane::Refund | Lane::Claim => self.accounts.try_enter_keeping(KEPT),
        });
    }

    /// Returns what becomes of the call that does `what`, if one is under way.
    pub(crate) async fn join(&self, what: &B256) -> Option<Result<CallOutcome, FacilitatorError>> {
        let progress = self.lock().get(what).cloned()?;
        Some(self.outcome(progress).await)
    }

    /// Makes a call and waits for its block. If a call that does `what` is under way, waits for that one. A caller that goes away does not
    /// cancel it.
    ///
    /// # Errors
    /// [`FacilitatorError`] if no transaction can be in a block.
    pub(crate) async fn call(
        self: &Arc<Self>,
        place: Place,
        what: B256,
        call: Call,
    ) -> Result<CallOutcome, FacilitatorError> {
        let progress = self.begin(place, what, call);
        self.outcome(progress).await
    }

    fn begin(self: &Arc<Self>, place: Place, what: B256, call: Call) -> watch::Receiver<Progress> {
        let mut under_way = self.lock();
        if let Some(progress) = under_way.get(&what) {
            return progress.clone();
        }
        let (sender, progress) = watch::channel(Progress::Sending(None));
        under_way.insert(what, progress.clone());
        let entry = UnderWay { caller: self.clone(), what };
        tokio::spawn(async move {
            let ended = match entry.caller.make(place, &call, &sender).await {
                Ok(Some(receipt)) => Progress::Included(receipt),
                Ok(None) => return,
                Err(error) => Progress::Failed(error),
            };
            let _ = sender.send(ended);
        });
        progress
    }

    /// Waits for the end of a call, for as long as it may take to confirm one.
    async fn outcome(&self, mut progress: watch::Receiver<Progress>) -> Result<CallOutcome, FacilitatorError> {
        let is_over = |progress: &Progress| !matches!(progress, Progress::Sending(_));
        let _ = timeout(self.confirm_timeout, progress.wait_for(is_over)).await;
        match &*progress.borrow() {
            Progress::Included(receipt) => Ok(CallOutcome::Included(receipt.clone())),
            Progress::Failed(error) => Err(error.clone()),
            Progress::Sending(transaction) => Ok(CallOutcome::Pending(*transaction)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<B256, watch::Receiver<Progress>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a call, again if another transaction took its nonce. Returns `None` if its outcome is not known at the end.
    async fn make(
        self: &Arc<Self>,
        place: Place,
        call: &Call,
        progress: &watch::Sender<Progress>,
    ) -> Result<Option<Receipt>, FacilitatorError> {
        let urgency = place.urgency;
        let mut place = Some(place);
        for _ in 0..MAX_ATTEMPTS {
            let Place { account, permit, .. } = match place.take() {
                Some(place) => place,
                None => self.enter(urgency).await?,
            };
            // Those that it waits for may have to offer as much.
            let below = MIN_GAS.saturating_mul(account.in_flight() as u64);
            let most = urgency.max_fee(call.gas_limit.saturating_add(below));
            let fees = self.node.fees_up_to(most).await?;
            let lease = account.take(permit).await?;
            if most > 0 {
                lease.hurry(most);
            }
            match self.send(lease, call.clone(), (fees, most), Some(progress)).await? {
                Sent::Included(receipt) => return Ok(Some(receipt)),
                Sent::Refused(refusal) => self.refused(&account, refusal).await?,
                Sent::Waiting(waiting) => match self.follow(*waiting, Some(progress)).await {
                    Ended::Included(receipt) => return Ok(Some(receipt)),
                    Ended::NonceTaken => {}
                    Ended::Unresolved => return Ok(None),
                },
            }
        }
        Err(FacilitatorError::Busy { what: "the nonces of the sender", retry_after: Duration::from_secs(2) })
    }

    /// Signs and sends one transaction. Waits for its block only if there is somebody to tell.
    async fn send(
        self: &Arc<Self>,
        mut lease: NonceLease,
        call: Call,
        (fees, most): (Fees, u128),
        progress: Option<&watch::Sender<Progress>>,
    ) -> Result<Sent, FacilitatorError> {
        let started = Instant::now();
        let transaction = call.into_transaction(&self.node, lease.nonce(), fees);
        let account = lease.account().clone();
        let signed = match account.sign(transaction.clone()).await {
            Ok(signed) => signed,
            Err(error) => {
                lease.release();
                self.fill_gaps_of(&account);
                return Err(error);
            }
        };
        lease.sent();
        note(progress, signed.hash);
        tracing::debug!(transaction = %signed.hash, account_nonce = lease.nonce(), "sending a call");
        let sent = match progress {
            Some(_) => {
                let limit = SYNC_TIMEOUT.min(self.confirm_timeout).min(self.node.check_interval());
                self.node.send(&signed.raw, signed.hash, limit).await
            }
            None => self.node.resend(&signed.raw).await,
        };
        match sent {
            SendResult::Included(receipt) => Ok(Sent::Included(self.included(lease, receipt, started))),
            SendResult::Pooled | SendResult::Unknown | SendResult::NonceUsed | SendResult::NonceContested => {
                let certainly = matches!(sent, SendResult::Pooled);
                let pending = self.node.pending(signed.raw, signed.hash, certainly);
                Ok(Sent::Waiting(Box::new(Waiting { transaction, fees, most, lease, pending, started })))
            }
            refusal => {
                if let SendResult::AccountFull { is_delegated } = refusal {
                    account.narrow(is_delegated);
                }
                lease.release();
                self.fill_gaps_of(&account);
                Ok(Sent::Refused(refusal))
            }
        }
    }

    /// Follows a transaction to its end, and replaces it if it hangs.
    async fn follow(self: &Arc<Self>, waiting: Waiting, progress: Option<&watch::Sender<Progress>>) -> Ended {
        let Waiting { mut transaction, mut fees, most, lease, mut pending, started } = waiting;
        let stop_at = started + WATCH_TIMEOUT;
        let (mut checks, mut replacements) = (0, 0);
        loop {
            let check_at = stop_at.min(Instant::now() + self.node.check_interval());
            match self.node.watch(&mut pending, check_at).await {
                Inclusion::Included(receipt) => return Ended::Included(self.included(lease, receipt, started)),
                Inclusion::NonceTaken => {
                    tracing::warn!(account_nonce = lease.nonce(), "another transaction took the nonce");
                    lease.taken_by_other();
                    return Ended::NonceTaken;
                }
                Inclusion::Pending if Instant::now() >= stop_at => {
                    lease.abandon();
                    return Ended::Unresolved;
                }
                Inclusion::Pending => checks += 1,
            }
            let is_next = self.is_next(&lease).await;
            if replacements == MAX_REPLACEMENTS {
                continue;
            }
            match self.raised(is_next, fees, checks, most.max(lease.hurried())).await {
                Ok(Some(raised)) => {
                    fees = raised;
                    transaction.max_fee_per_gas = fees.max_fee;
                    transaction.max_priority_fee_per_gas = fees.tip;
                    let better = lease.account().sign(transaction.clone()).await;
                    let Ok(better) = better else { continue };
                    replacements += 1;
                    self.node.resend(&better.raw).await;
                    note(progress, better.hash);
                    tracing::info!(transaction = %better.hash, account_nonce = lease.nonce(), "raising the fees");
                    pending.replaced_by(better.raw, better.hash);
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "the fees could not be raised"),
            }
        }
    }

    /// Returns `true` if the nonce is known to be the account's next. If there is a gap below, has it filled: until then none of those that
    /// wait can be included, and together they may fill the window.
    async fn is_next(self: &Arc<Self>, lease: &NonceLease) -> bool {
        let account = lease.account();
        if !account.is_lowest(lease.nonce()) {
            return false;
        }
        // Without an answer of the node, the next check looks again.
        let Ok(next) = account.chain_nonce("latest").await else { return false };
        let _ = account.find_gaps(next, FOREIGN_CHECKS * self.node.check_interval()).await;
        self.fill_gaps_of(account);
        next == lease.nonce()
    }

    /// Returns the fees of a replacement, if gas costs more by now or the node seems to have lost the transaction, for which all later ones
    /// wait if it `is_next`. It may offer `most`, where that is more than the ceiling.
    async fn raised(
        &self,
        is_next: bool,
        fees: Fees,
        checks: u32,
        most: u128,
    ) -> Result<Option<Fees>, FacilitatorError> {
        self.node.forget_fees().await;
        let is_cheap = self.node.fees_up_to(most).await?.max_fee > fees.max_fee.saturating_add(fees.max_fee / 10);
        let is_stuck = !is_cheap && is_next && STUCK_CHECKS.contains(&checks);
        if !is_cheap && !is_stuck {
            return Ok(None);
        }
        let raised = self.node.raised_fees_up_to(fees, most).await?;
        telemetry::replaced(self.node.network(), if is_stuck { "stuck" } else { "price" });
        Ok(Some(raised))
    }

    /// Deals with a node's refusal. Returns `Ok` if another attempt may succeed.
    async fn refused(&self, account: &Account, refusal: SendResult) -> Result<(), FacilitatorError> {
        match refusal {
            SendResult::InsufficientGas => {
                let balance = account.balance().await.unwrap_or_default();
                tracing::error!(account = %account.address(), %balance, "the sender cannot pay for gas");
                account.rest(balance);
                Err(FacilitatorError::InsufficientGas { balance })
            }
            SendResult::Refused(reason) => {
                Err(FacilitatorError::Misconfigured(format!("the node refuses the transaction: {reason}")))
            }
            SendResult::Underpriced => {
                self.node.require_market_tip().await;
                Ok(())
            }
            _ => {
                sleep(self.node.block_time().min(Duration::from_secs(1))).await;
                Ok(())
            }
        }
    }

    fn included(&self, lease: NonceLease, receipt: Receipt, started: Instant) -> Receipt {
        self.node.observe_block(receipt.block());
        let gas = receipt.gas_used.saturating_to();
        self.gas_used.fetch_add(gas, Ordering::Relaxed);
        telemetry::included(self.node.network(), receipt.succeeded(), gas, receipt.cost(), started.elapsed());
        lease.consumed();
        receipt
    }
}

impl FillGaps for Caller {
    fn node(&self) -> &Node {
        &self.node
    }

    async fn send_filler(self: &Arc<Self>, lease: NonceLease) -> Result<bool, FacilitatorError> {
        let (fees, account) = (self.node.fees().await?, lease.account().clone());
        match self.send(lease, Call::filler(&account), (fees, 0), None).await? {
            Sent::Included(_) => {}
            Sent::Waiting(waiting) => {
                let this = self.clone();
                tokio::spawn(async move { this.follow(*waiting, None).await });
            }
            Sent::Refused(refusal) => {
                self.refused(&account, refusal).await?;
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A call under way, until this is dropped, however it ends.
struct UnderWay {
    caller: Arc<Caller>,
    what: B256,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.caller.lock().remove(&self.what);
    }
}

/// Tells who waits for a call its newest transaction.
fn note(progress: Option<&watch::Sender<Progress>>, hash: B256) {
    if let Some(progress) = progress {
        progress.send_replace(Progress::Sending(Some(hash)));
    }
}

debug_fields!(Caller { accounts });

#[cfg(all(test, feature = "devnet"))]
mod tests {
    use alloy_signer_local::PrivateKeySigner;

    use super::*;
    use crate::{chain::rpc::Rpc, devnet::Devnet};

    #[allow(clippy::unwrap_used)]
    fn caller_on(devnet: &Devnet, window: usize) -> Arc<Caller> {
        let rpc = Rpc::new(devnet.rpc_client(), Duration::from_secs(5));
        let node = Node::new(devnet.network(), rpc, 100_000, None, Some(Duration::from_millis(200))).unwrap();
        Caller::new(Arc::new(node), vec![Arc::new(PrivateKeySigner::random())], window, Duration::from_secs(10))
    }

    async fn entered(
        caller: &Arc<Caller>,
        urgency: Urgency,
    ) -> tokio::task::JoinHandle<Result<Place, FacilitatorError>> {
        let entering = caller.clone();
        let entering = tokio::spawn(async move { entering.enter(urgency).await });
        // It has joined the line then.
        sleep(Duration::from_millis(1)).await;
        entering
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_that_is_free_goes_to_the_most_urgent_though_others_wait_longer() {
        let caller = caller_on(&Devnet::start().await.unwrap(), 1);
        let taken = caller.enter(Urgency::deposit(1)).await.unwrap();
        let deposit = entered(&caller, Urgency::deposit(1)).await;
        let refund = entered(&caller, Urgency::refund(1)).await;
        let claim = entered(&caller, Urgency::claim()).await;
        let at_risk = entered(&caller, Urgency::claim_at_risk(1)).await;
        // A filler that went without a place ends: nothing is free.
        caller.freed.notify_one();
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
        let caller = caller_on(&Devnet::start().await.unwrap(), 3);
        let _taken = [caller.enter(Urgency::claim()).await.unwrap(), caller.enter(Urgency::refund(1)).await.unwrap()];
        let others =
            [Urgency::deposit(1), Urgency::refund(9), Urgency::claim()].map(|urgency| entered(&caller, urgency));
        let others = futures_util::future::join_all(others).await;
        caller.enter(Urgency::claim_at_risk(1)).await.unwrap();
        assert!(others.iter().all(|waits| !waits.is_finished()));
    }

    #[tokio::test(start_paused = true)]
    async fn claims_keep_their_place_in_the_line_and_the_others_are_told_to_come_again() {
        let caller = caller_on(&Devnet::start().await.unwrap(), 1);
        let taken = caller.enter(Urgency::claim()).await.unwrap();
        let claim = entered(&caller, Urgency::claim()).await;
        for (urgency, patience) in [(Urgency::refund(1), 10), (Urgency::deposit(1), 600)] {
            let (begun, told) = (Instant::now(), caller.enter(urgency).await);
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
        let caller = caller_on(&devnet, 1);
        devnet.set_base_fee(10_000_000_000);
        let fees = caller.node.fees().await.unwrap();
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
            let raised = caller.raised(is_next, fees, checks, 0).await.unwrap();
            let is_enough = raised.is_some_and(|raised| raised.max_fee > fees.max_fee + fees.max_fee / 10);
            assert_eq!((raised.is_some(), is_enough), (is_raised, is_raised), "{base_fee} {is_next} {checks}");
        }
    }
}
