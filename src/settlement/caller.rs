//! Calls of contracts, each in a transaction of its own: sent, followed and replaced if they hang.
//!
//! Calls are not journalled: they must be such that sending one again cannot pay twice, and that the chain tells whether it was made.

use std::{sync::Arc, time::Duration};

use alloy_consensus::TxEip1559;
use alloy_primitives::{Address, B256};
use tokio::{
    sync::{Mutex, Notify, Semaphore, watch},
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{
    FacilitatorError, NotReady,
    accounts::{Account, Accounts, NonceLease, SharedSigner, WindowPermit},
    gaps::FillGaps,
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
/// How many callers may wait for a place in the window.
const MAX_WAITING: usize = 1_000;
/// The gas limit that an account must be able to pay for: that of a deposit into a payment channel.
const MIN_GAS: u128 = 215_000;

/// Sends calls from one or more accounts, whose keys nobody else may use.
pub(crate) struct Caller {
    node: Arc<Node>,
    accounts: Accounts,
    /// Notified whenever a place in a window becomes free.
    freed: Arc<Notify>,
    waiting: Semaphore,
    /// Held by the first of those that wait for a place.
    line: Mutex<()>,
    confirm_timeout: Duration,
}

/// The right to have one more transaction in flight.
#[derive(Debug)]
pub(crate) struct Place {
    account: Account,
    permit: WindowPermit,
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
        let waiting = Semaphore::new(MAX_WAITING);
        Arc::new(Self { node, accounts, freed, waiting, line: Mutex::default(), confirm_timeout })
    }

    /// Returns the addresses of the accounts.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Address> {
        self.accounts.iter().map(Account::address)
    }

    /// Returns why no call could be sent now, if that is so.
    pub(crate) async fn cannot_send(&self) -> Option<NotReady> {
        self.accounts.cannot_send(&self.node, MIN_GAS).await
    }

    /// Waits for a place in an account's window, in the order in which callers came.
    ///
    /// # Errors
    /// [`FacilitatorError::Busy`] if there is none in time, or too many wait.
    pub(crate) async fn enter(&self, patience: Duration) -> Result<Place, FacilitatorError> {
        let busy =
            || FacilitatorError::Busy { what: "calls of the escrow contract", retry_after: Duration::from_secs(2) };
        let _waiting = self.waiting.try_acquire().map_err(|_| busy())?;
        let entering = async {
            let _first = self.line.lock().await;
            loop {
                match self.accounts.try_enter() {
                    Some((account, permit)) => return Place { account, permit },
                    None => self.freed.notified().await,
                }
            }
        };
        timeout(patience, entering).await.map_err(|_| busy())
    }

    /// Makes a call and waits for its block, and for a place if there is none yet. A caller that goes away does not cancel it.
    ///
    /// # Errors
    /// [`FacilitatorError`] if no transaction can be in a block.
    pub(crate) async fn call(
        self: &Arc<Self>,
        place: Option<Place>,
        call: Call,
    ) -> Result<CallOutcome, FacilitatorError> {
        let deadline = Instant::now() + self.confirm_timeout;
        let Place { account, permit } = match place {
            Some(place) => place,
            None => self.enter(self.confirm_timeout).await?,
        };
        let (sender, mut progress) = watch::channel(Progress::Sending(None));
        tokio::spawn({
            let this = self.clone();
            async move {
                let ended = match this.make(&account, permit, &call, &sender).await {
                    Ok(Some(receipt)) => Progress::Included(receipt),
                    Ok(None) => return,
                    Err(error) => Progress::Failed(error),
                };
                let _ = sender.send(ended);
            }
        });
        let is_over = |progress: &Progress| !matches!(progress, Progress::Sending(_));
        let _ = timeout_at(deadline, progress.wait_for(is_over)).await;
        match &*progress.borrow() {
            Progress::Included(receipt) => Ok(CallOutcome::Included(receipt.clone())),
            Progress::Failed(error) => Err(error.clone()),
            Progress::Sending(transaction) => Ok(CallOutcome::Pending(*transaction)),
        }
    }

    /// Sends a call, again if another transaction took its nonce. Returns `None` if its outcome is not known at the end.
    async fn make(
        self: &Arc<Self>,
        account: &Account,
        permit: WindowPermit,
        call: &Call,
        progress: &watch::Sender<Progress>,
    ) -> Result<Option<Receipt>, FacilitatorError> {
        let mut permit = Some(permit);
        for _ in 0..MAX_ATTEMPTS {
            let entered = match permit.take() {
                Some(permit) => permit,
                None => account.enter().await,
            };
            let fees = self.node.fees().await?;
            let lease = account.take(entered).await?;
            match self.send(lease, call.clone(), fees, Some(progress)).await? {
                Sent::Included(receipt) => return Ok(Some(receipt)),
                Sent::Refused(refusal) => self.refused(account, refusal).await?,
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
        fees: Fees,
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
                Ok(Sent::Waiting(Box::new(Waiting { transaction, fees, lease, pending, started })))
            }
            refusal => {
                lease.release();
                self.fill_gaps_of(&account);
                Ok(Sent::Refused(refusal))
            }
        }
    }

    /// Follows a transaction to its end, and replaces it if it hangs.
    async fn follow(self: &Arc<Self>, waiting: Waiting, progress: Option<&watch::Sender<Progress>>) -> Ended {
        let Waiting { mut transaction, mut fees, lease, mut pending, started } = waiting;
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
            match self.raised(is_next, fees, checks).await {
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
    /// wait if it `is_next`.
    async fn raised(&self, is_next: bool, fees: Fees, checks: u32) -> Result<Option<Fees>, FacilitatorError> {
        self.node.forget_fees().await;
        let is_cheap = self.node.fees().await?.max_fee > fees.max_fee.saturating_add(fees.max_fee / 10);
        let is_stuck = !is_cheap && is_next && STUCK_CHECKS.contains(&checks);
        if !is_cheap && !is_stuck {
            return Ok(None);
        }
        let raised = self.node.raised_fees(fees).await?;
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
        match self.send(lease, Call::filler(&account), fees, None).await? {
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
    fn caller_on(devnet: &Devnet) -> Arc<Caller> {
        let rpc = Rpc::new(devnet.rpc_client(), Duration::from_secs(5));
        let node = Node::new(devnet.network(), rpc, 100_000, None, Some(Duration::from_millis(200))).unwrap();
        Caller::new(Arc::new(node), vec![Arc::new(PrivateKeySigner::random())], 1, Duration::from_secs(10))
    }

    #[tokio::test(start_paused = true)]
    async fn places_are_given_in_the_order_in_which_callers_came() {
        let caller = caller_on(&Devnet::start().await.unwrap());
        let patience = Duration::from_secs(10);
        let taken = caller.enter(patience).await.unwrap();
        let (sender, mut entered) = tokio::sync::mpsc::unbounded_channel();
        for n in 0..3 {
            let (caller, sender) = (caller.clone(), sender.clone());
            tokio::spawn(async move {
                let place = caller.enter(patience).await.unwrap();
                sender.send(n).unwrap();
                drop(place);
            });
            sleep(Duration::from_millis(1)).await;
        }
        // A filler that went without a place ends: nothing is free.
        caller.freed.notify_one();
        sleep(Duration::from_millis(1)).await;
        drop(taken);
        for n in 0..3 {
            assert_eq!(entered.recv().await, Some(n));
        }
    }

    /// Gas has to cost a tenth more than a transaction offers, unless all later ones wait for it.
    #[tokio::test]
    async fn fees_are_raised_when_gas_costs_a_tenth_more_or_others_wait() {
        let devnet = Devnet::start().await.unwrap();
        let caller = caller_on(&devnet);
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
            let raised = caller.raised(is_next, fees, checks).await.unwrap();
            let is_enough = raised.is_some_and(|raised| raised.max_fee > fees.max_fee + fees.max_fee / 10);
            assert_eq!((raised.is_some(), is_enough), (is_raised, is_raised), "{base_fee} {is_next} {checks}");
        }
    }
}
