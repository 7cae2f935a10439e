//! Calls of contracts, each in a transaction of its own: sent, followed and replaced if they hang.
//!
//! Calls are not journalled: they must be such that sending one again cannot pay twice, and that the chain tells whether it was made.

use std::{sync::Arc, time::Duration};

use alloy_consensus::TxEip1559;
use alloy_primitives::{Address, B256, TxKind};
use tokio::{
    sync::{Notify, Semaphore, watch},
    time::{Instant, sleep, timeout_at},
};

use super::{
    FacilitatorError,
    accounts::{Account, Accounts, NonceLease, SharedSigner, WindowPermit},
    submitter::Call,
};
use crate::{
    chain::{broadcast::SendResult, confirm::Inclusion, fees::Fees, node::Node, rpc::Receipt},
    telemetry,
};

/// How long a node may hold a broadcast until inclusion.
const SYNC_TIMEOUT: Duration = Duration::from_secs(8);
/// How long a transaction without a receipt keeps its nonce.
const WATCH_TIMEOUT: Duration = Duration::from_secs(1_800);
/// How many blocks pass between two checks of a transaction that is in no block.
const CHECK_BLOCKS: u32 = 3;
/// At which checks a transaction is replaced although its fees are high enough: the node may have lost it.
const STUCK_CHECKS: [u32; 3] = [1, 3, 8];
/// How often the transaction of one nonce is replaced.
const MAX_REPLACEMENTS: usize = 5;
/// How often one call is sent with another nonce, or after the node refused it for a reason that passes.
const MAX_ATTEMPTS: usize = 4;
/// How many callers may wait for a place in the window.
const MAX_WAITING: usize = 1_000;
/// How long a gap in the nonces may wait for a call to fill it.
const GAP_PATIENCE: Duration = Duration::from_millis(300);
/// How many gaps one task fills.
const MAX_FILLERS: usize = 64;

/// Sends calls from one or more accounts, whose keys nobody else may use.
pub(crate) struct Caller {
    node: Arc<Node>,
    accounts: Accounts,
    /// Notified whenever a place in a window becomes free.
    freed: Arc<Notify>,
    waiting: Semaphore,
    confirm_timeout: Duration,
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

/// The end of one transaction.
enum Submitted {
    Included(Receipt),
    /// Another transaction has the nonce.
    NonceTaken,
    /// The node refused the transaction.
    Refused(SendResult),
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
        Arc::new(Self { node, accounts, freed, waiting: Semaphore::new(MAX_WAITING), confirm_timeout })
    }

    /// Returns the addresses of the accounts.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Address> {
        self.accounts.iter().map(Account::address)
    }

    /// Makes a call and waits for its block. A caller that goes away does not cancel it.
    ///
    /// # Errors
    /// [`FacilitatorError`] if no transaction can be in a block.
    pub(crate) async fn call(self: &Arc<Self>, call: Call) -> Result<CallOutcome, FacilitatorError> {
        let busy =
            || FacilitatorError::Busy { what: "calls of the escrow contract", retry_after: Duration::from_secs(2) };
        let _waiting = self.waiting.try_acquire().map_err(|_| busy())?;
        let deadline = Instant::now() + self.confirm_timeout;
        let (account, permit) = timeout_at(deadline, self.enter()).await.map_err(|_| busy())?;
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

    /// Waits for a place in an account's window.
    async fn enter(&self) -> (Account, WindowPermit) {
        loop {
            match self.accounts.try_enter() {
                Some(entered) => return entered,
                None => self.freed.notified().await,
            }
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
            match self.submit(lease, call, fees, Some(progress)).await? {
                Submitted::Included(receipt) => return Ok(Some(receipt)),
                Submitted::Unresolved => return Ok(None),
                Submitted::NonceTaken => {}
                Submitted::Refused(refusal) => self.refused(account, refusal).await?,
            }
        }
        Err(FacilitatorError::Busy { what: "the nonces of the sender", retry_after: Duration::from_secs(2) })
    }

    /// Signs and sends one transaction, and follows it to its end.
    async fn submit(
        self: &Arc<Self>,
        mut lease: NonceLease,
        call: &Call,
        fees: Fees,
        progress: Option<&watch::Sender<Progress>>,
    ) -> Result<Submitted, FacilitatorError> {
        let started = Instant::now();
        let transaction = TxEip1559 {
            chain_id: self.node.network().chain_id(),
            nonce: lease.nonce(),
            gas_limit: call.gas_limit,
            max_fee_per_gas: fees.max_fee,
            max_priority_fee_per_gas: fees.tip,
            to: TxKind::Call(call.to),
            input: call.input.clone(),
            ..TxEip1559::default()
        };
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
        let note = |hash| progress.map(|progress| progress.send_replace(Progress::Sending(Some(hash))));
        note(signed.hash);
        tracing::debug!(transaction = %signed.hash, account_nonce = lease.nonce(), "sending a call");
        let limit = SYNC_TIMEOUT.min(self.confirm_timeout).min(self.check_interval());
        let sent = self.node.send(&signed.raw, signed.hash, limit).await;
        match sent {
            SendResult::Included(receipt) => Ok(self.included(lease, receipt, started)),
            SendResult::Pooled | SendResult::Unknown | SendResult::NonceUsed | SendResult::NonceContested => {
                let certainly = matches!(sent, SendResult::Pooled);
                let mut pending = self.node.pending(signed.raw, signed.hash, certainly);
                let (mut transaction, mut fees, stop_at) = (transaction, fees, started + WATCH_TIMEOUT);
                let (mut checks, mut replacements) = (0, 0);
                loop {
                    let check_at = stop_at.min(Instant::now() + self.check_interval());
                    match self.node.watch(&mut pending, check_at).await {
                        Inclusion::Included(receipt) => return Ok(self.included(lease, receipt, started)),
                        Inclusion::NonceTaken => {
                            tracing::warn!(account_nonce = lease.nonce(), "another transaction took the nonce");
                            lease.taken_by_other();
                            return Ok(Submitted::NonceTaken);
                        }
                        Inclusion::Pending if Instant::now() >= stop_at => {
                            lease.abandon();
                            return Ok(Submitted::Unresolved);
                        }
                        Inclusion::Pending => checks += 1,
                    }
                    if replacements == MAX_REPLACEMENTS {
                        continue;
                    }
                    match self.raised(&lease, fees, checks).await {
                        Ok(Some(raised)) => {
                            fees = raised;
                            transaction.max_fee_per_gas = fees.max_fee;
                            transaction.max_priority_fee_per_gas = fees.tip;
                            let better = account.sign(transaction.clone()).await;
                            let Ok(better) = better else { continue };
                            replacements += 1;
                            self.node.resend(&better.raw).await;
                            note(better.hash);
                            tracing::info!(transaction = %better.hash, account_nonce = lease.nonce(), "raising the fees");
                            pending.replaced_by(better.raw, better.hash);
                        }
                        Ok(None) => {}
                        Err(error) => tracing::warn!(%error, "the fees could not be raised"),
                    }
                }
            }
            refusal => {
                lease.release();
                self.fill_gaps_of(&account);
                Ok(Submitted::Refused(refusal))
            }
        }
    }

    /// Returns the fees of a replacement, if gas costs more by now or the node seems to have lost the transaction. If a reorganization removed
    /// earlier transactions of the account, has their nonces filled.
    async fn raised(
        self: &Arc<Self>,
        lease: &NonceLease,
        fees: Fees,
        checks: u32,
    ) -> Result<Option<Fees>, FacilitatorError> {
        self.node.forget_fees().await;
        let is_cheap = self.node.fees().await?.max_fee > fees.max_fee.saturating_add(fees.max_fee / 10);
        let (mut is_stuck, account) = (false, lease.account());
        if !is_cheap && STUCK_CHECKS.contains(&checks) {
            let next = account.chain_nonce("latest").await?;
            is_stuck = next == lease.nonce();
            if next < account.consumed() {
                tracing::warn!(account = %account.address(), next, "transactions of the account were removed by a reorganization");
                account.resume_after_reorg().await?;
                self.fill_gaps_of(account);
            }
        }
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

    /// Starts a task that fills the gaps in the account's nonces with transfers of nothing, if no call fills them soon.
    fn fill_gaps_of(self: &Arc<Self>, account: &Account) {
        if !account.begin_filling() {
            return;
        }
        let (this, account) = (self.clone(), account.clone());
        tokio::spawn(Box::pin(async move {
            for _ in 0..MAX_FILLERS {
                sleep(GAP_PATIENCE.max(2 * this.node.poll_interval())).await;
                let Ok(fees) = this.node.fees().await else { continue };
                let Some(lease) = account.take_gap(GAP_PATIENCE).await else { break };
                if let Ok(Submitted::Included(_)) = this.submit(lease, &Call::filler(&account), fees, None).await {
                    telemetry::gap_filled(this.node.network());
                }
            }
            account.end_filling();
        }) as std::pin::Pin<Box<dyn Future<Output = ()> + Send>>);
    }

    fn included(&self, lease: NonceLease, receipt: Receipt, started: Instant) -> Submitted {
        self.node.observe_block(receipt.block());
        let gas = receipt.gas_used.saturating_to();
        telemetry::included(self.node.network(), receipt.succeeded(), gas, receipt.cost(), started.elapsed());
        lease.consumed();
        Submitted::Included(receipt)
    }

    /// Returns how long a transaction may be in no block before it is checked.
    fn check_interval(&self) -> Duration {
        (CHECK_BLOCKS * self.node.block_time()).max(Duration::from_secs(2))
    }
}

debug_fields!(Caller { accounts });
