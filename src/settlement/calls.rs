//! Calls of contracts, each in a transaction of its own, which copies of the call share.

use std::{
    collections::HashMap,
    future::{Future as _, poll_fn},
    mem,
    pin::pin,
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use alloy_primitives::B256;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use super::{
    FacilitatorError, NotReady,
    gas::{KEPT_GAS, TYPICAL_GAS},
    line::{Lane, Urgency},
    load::{Call, Load, Progress, SharedCall},
    submitter::{AttemptResult, Place, Submitter},
};
use crate::{chain::rpc::Receipt, ledger::NONCE_HELD_SECONDS};

/// After what time other processes with the ledger may use a nonce, at the earliest: their clocks may be ahead, and the ledger may be slow.
const HELD: Duration = Duration::from_secs(NONCE_HELD_SECONDS - 15);
/// For how many checks of a transaction those are waited for that an earlier process left in the pool.
const FOREIGN_CHECKS: u32 = 4;
/// How often one call is sent with another nonce, or after the node refused it for a reason that passes.
const MAX_ATTEMPTS: usize = 4;
/// How often a claim is sent again that the node had no room for, before these attempts count. A block passes between two.
const MAX_WAITS: usize = 60;

/// What is known of a call when the time to confirm it has passed.
#[derive(Debug)]
pub(crate) enum CallOutcome {
    /// Its transaction is in a block. It may have reverted.
    Included(Receipt),
    /// Not known: it may be in a block later. The transaction is `None` if it was not even signed in time.
    Pending(Option<B256>),
}

/// A call that somebody may wait for.
struct Asked {
    call: Call,
    progress: watch::Sender<Progress>,
    urgency: watch::Receiver<Urgency>,
    /// A transaction of it may be known or be sent later: a node may have taken it before another one took the nonce, or the ledger may keep
    /// it. Whoever has seen it can make the call.
    may_be_seen: bool,
    /// When its newest transaction was signed.
    signed: Option<Instant>,
    /// Another process with the ledger may have made it with the nonce, at a higher fee.
    may_be_made: bool,
    /// The last attempt ended because the account's other transactions come first.
    must_wait: bool,
}

impl Load for Asked {
    const IS_CALL: bool = true;

    fn call(&self) -> Call {
        self.call.clone()
    }

    fn worth(&self) -> u128 {
        self.urgency.borrow().worth()
    }

    fn signed(&mut self, transaction: B256) {
        self.signed = Some(Instant::now());
        self.progress.send_replace(Progress::Sending(Some(transaction)));
    }

    fn must_wait(&mut self) {
        self.must_wait = true;
    }

    fn may_be_kept(&mut self) {
        self.may_be_seen = true;
    }

    fn lost_nonce(&mut self, is_late: bool) {
        self.may_be_seen = true;
        self.may_be_made = is_late && self.signed.is_none_or(|at| at.elapsed() >= HELD);
    }
}

impl Submitter {
    /// Returns why no call could be sent now, if that is so.
    pub(crate) async fn cannot_send(&self) -> Option<NotReady> {
        self.accounts().cannot_send(self.node(), TYPICAL_GAS.into()).await
    }

    /// Returns why no call that can wait should be sent now: gas is kept for claims.
    pub(crate) async fn cannot_spare(&self) -> Option<NotReady> {
        self.accounts().cannot_send(self.node(), KEPT_GAS.into()).await
    }

    /// Waits until the transactions that an earlier process with these keys journalled or left in the pool are in blocks: they may do what is
    /// about to be sent. Those that hang are waited for as long as transactions of others who use a key.
    ///
    /// # Errors
    /// [`FacilitatorError::Unreachable`] if the node does not tell its pool, or takes none of the journalled ones.
    pub(crate) async fn outlive_predecessors(&self) -> Result<(), FacilitatorError> {
        let patience = FOREIGN_CHECKS * self.node().check_interval();
        let mut recovered = self.has_recovered.subscribe();
        // The sender is in `self`, so it is not closed.
        let _ = timeout(patience, recovered.wait_for(|has_recovered| *has_recovered)).await.map_err(|_| {
            let what = "a node that takes the transactions of an earlier process";
            FacilitatorError::Unreachable { what, retry_after: Duration::from_secs(5) }
        })?;
        for account in self.accounts().iter() {
            account.outlive_predecessor(patience).await?;
        }
        Ok(())
    }

    /// Returns what becomes of the call that does `what`, if one is under way.
    pub(crate) async fn join(&self, what: &B256) -> Option<Result<CallOutcome, FacilitatorError>> {
        let progress = self.calls().get(what)?.progress.clone();
        Some(self.outcome(progress).await)
    }

    /// Makes a call and waits for its block. If a call that does `what` is under way, waits for that one. A caller that goes away does not
    /// cancel it. The gas that it uses is added to `used`.
    ///
    /// # Errors
    /// [`FacilitatorError`] if no transaction can be in a block.
    pub(crate) async fn call(
        self: &Arc<Self>,
        place: Place,
        what: B256,
        call: Call,
        used: &Arc<AtomicU64>,
    ) -> Result<CallOutcome, FacilitatorError> {
        let progress = self.begin_call(place, what, call, used.clone());
        self.outcome(progress).await
    }

    fn begin_call(
        self: &Arc<Self>,
        place: Place,
        what: B256,
        call: Call,
        used: Arc<AtomicU64>,
    ) -> watch::Receiver<Progress> {
        let mut under_way = self.calls();
        if let Some(shared) = under_way.get(&what) {
            shared.join(place.urgency);
            return shared.progress.clone();
        }
        let (sender, progress) = watch::channel(Progress::Sending(None));
        let (urgency, urgency_now) = watch::channel(place.urgency);
        under_way.insert(what, SharedCall { progress: progress.clone(), urgency });
        let entry = UnderWay { submitter: self.clone(), what };
        let (may_be_seen, may_be_made, must_wait) = Default::default();
        let signed = None;
        let mut asked =
            Asked { call, progress: sender, urgency: urgency_now, may_be_seen, signed, may_be_made, must_wait };
        tokio::spawn(async move {
            let ended = match entry.submitter.make_call(place, &mut asked).await {
                Ok(Some(receipt)) => {
                    used.fetch_add(receipt.gas_used.saturating_to(), Ordering::Relaxed);
                    Progress::Included(receipt)
                }
                Ok(None) => return,
                Err(error) => Progress::Failed(error),
            };
            let _ = asked.progress.send(ended);
        });
        progress
    }

    /// Waits for the end of a call, for as long as it may take to confirm one.
    async fn outcome(&self, mut progress: watch::Receiver<Progress>) -> Result<CallOutcome, FacilitatorError> {
        let is_over = |progress: &Progress| !matches!(progress, Progress::Sending(_));
        let _ = timeout(self.confirm_timeout(), progress.wait_for(is_over)).await;
        match &*progress.borrow() {
            Progress::Included(receipt) => Ok(CallOutcome::Included(receipt.clone())),
            Progress::Failed(error) => Err(error.clone()),
            Progress::Sending(transaction) => Ok(CallOutcome::Pending(*transaction)),
        }
    }

    /// Sends a call, again if another transaction took its nonce. Returns `None` if its outcome is not known at the end.
    async fn make_call(self: &Arc<Self>, place: Place, asked: &mut Asked) -> Result<Option<Receipt>, FacilitatorError> {
        let mut place = Ok(place);
        let (mut attempts, mut waits) = (0, 0);
        let error = loop {
            let result = match place {
                Ok(place) => self.make(place, asked).await.result,
                Err(error) => break error,
            };
            let lane = asked.urgency.borrow().lane();
            // What was checked of a deposit may have changed while it waited, and anybody can sign one that expires. It is checked again first.
            let most = if lane == Lane::Deposit { 1 } else { MAX_ATTEMPTS };
            match mem::take(&mut asked.must_wait) && lane >= Lane::Payment && waits < MAX_WAITS {
                true => waits += 1,
                false => attempts += 1,
            }
            match result {
                AttemptResult::Included(receipt) => return Ok(Some(receipt)),
                // Whoever asked looks at the chain.
                AttemptResult::Retry | AttemptResult::Unpaid { .. } if asked.may_be_made => return Ok(None),
                AttemptResult::Retry | AttemptResult::Unpaid { .. } if attempts < most => {}
                // Others may always be in flight, and a part of the claim may cost little enough beside them.
                AttemptResult::Unpaid { balance } if lane >= Lane::Claim => {
                    break FacilitatorError::InsufficientGas { balance };
                }
                AttemptResult::Retry | AttemptResult::Unpaid { .. } => {
                    let what = "the nonces of the sender";
                    break FacilitatorError::Busy { what, retry_after: Duration::from_secs(2) };
                }
                AttemptResult::Failed(error) => break error,
                AttemptResult::Unresolved => return Ok(None),
            }
            place = self.enter_again(&mut asked.urgency).await;
        };
        if asked.may_be_seen { Ok(None) } else { Err(error) }
    }

    /// Waits for a place for a call that may become more urgent meanwhile.
    async fn enter_again(&self, urgency: &mut watch::Receiver<Urgency>) -> Result<Place, FacilitatorError> {
        loop {
            let known = *urgency.borrow_and_update();
            let (mut entering, mut changed) = (pin!(self.enter(known)), pin!(urgency.changed()));
            let entered = poll_fn(|cx| match entering.as_mut().poll(cx) {
                Poll::Ready(place) => Poll::Ready(Some(place)),
                Poll::Pending => changed.as_mut().poll(cx).map(|_| None),
            });
            if let Some(place) = entered.await {
                return place;
            }
        }
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<B256, SharedCall>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call under way, until this is dropped, however it ends.
struct UnderWay {
    submitter: Arc<Submitter>,
    what: B256,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.submitter.calls().remove(&self.what);
    }
}
