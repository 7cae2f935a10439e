//! Background reconciliation, for every kind of facilitator.
//!
//! A process may have died between any two steps, a node may have lost a transaction, or the request of an open payment may be gone.
//! So the ledger is searched for open payments that no process works on, and each is reconciled: its outcome is recorded, or it is
//! settled. Settled payments are followed in a task of their own until they are final. If nothing is open, the chain is not asked.

use std::{
    future::Future,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::timeout,
};

use super::journal::Journal;
use crate::{
    ledger::{Listing, Record, SettlementState},
    network::Network,
    settlement::FacilitatorError,
};

/// The states in which a payment is open.
pub(crate) const OPEN: [SettlementState; 3] =
    [SettlementState::Due, SettlementState::Submitted, SettlementState::Unknown];

/// A facilitator that reconciles its payments in the background.
pub(crate) trait Reconcile: Send + Sync + 'static {
    /// How many payments are reconciled at a time.
    const CONCURRENCY: usize;

    fn journal(&self) -> &Journal;

    /// Returns `true` if payments on this network are this facilitator's to reconcile.
    fn serves(&self, network: Network) -> bool;

    /// Returns `true` while there is room for further payments in this pass.
    fn has_room(&self) -> bool {
        true
    }

    /// Runs one pass over everything that is open. Failures are logged.
    fn run_pass(self: &Arc<Self>) -> impl Future<Output = ()> + Send;

    /// Reconciles one open payment: records what became of it, or settles it if it is owed.
    fn reconcile_payment(self: &Arc<Self>, record: Record)
    -> impl Future<Output = Result<(), FacilitatorError>> + Send;

    /// Follows settled payments: records which are final, and finds those that were reorged. Failures are logged.
    fn follow_settled(self: &Arc<Self>) -> impl Future<Output = ()> + Send;

    /// Counts a settled payment that was reorged.
    #[cfg(feature = "onchain")]
    fn count_reorged(&self) {}
}

/// Runs a pass every `interval`, and whenever `wake` is notified, for as long as the facilitator is used.
pub(crate) fn spawn<R: Reconcile>(facilitator: &Arc<R>, interval: Duration, wake: Arc<Notify>) {
    let weak = Arc::downgrade(facilitator);
    let (passed, passes) = watch::channel(());
    tokio::spawn(follow_after_each_pass(weak.clone(), passes));
    tokio::spawn(async move {
        while let Some(facilitator) = weak.upgrade() {
            facilitator.run_pass().await;
            drop(facilitator);
            passed.send_replace(());
            let _ = timeout(interval, wake.notified()).await;
        }
    });
}

/// Follows settled payments in a task of its own, which ends with the other one. There may be many of them, and payments that are due
/// may expire while they wait.
async fn follow_after_each_pass<R: Reconcile>(weak: Weak<R>, mut passes: watch::Receiver<()>) {
    while passes.changed().await.is_ok() {
        let Some(facilitator) = weak.upgrade() else { return };
        facilitator.follow_settled().await;
    }
}

/// Reconciles all payments on this list that no process works on.
pub(crate) async fn reconcile_listed<R: Reconcile>(
    facilitator: &Arc<R>,
    listing: Listing,
) -> Result<(), FacilitatorError> {
    let journal = facilitator.journal();
    let mut listing = Listing { idle_at: Some(journal.now()), ..listing };
    loop {
        let page = journal.ledger().list(&listing).await?;
        let Some(last) = page.last() else { return Ok(()) };
        listing.after = Some(last.key);
        let mut running = JoinSet::new();
        let mut is_full = false;
        for record in page.into_iter().filter(|record| facilitator.serves(record.key.network)) {
            is_full = !facilitator.has_room();
            if is_full {
                // The rest is found again in the ledger.
                break;
            }
            if running.len() >= R::CONCURRENCY {
                running.join_next().await;
            }
            let facilitator = facilitator.clone();
            running.spawn(async move {
                let (payer, nonce) = (record.key.payer, record.key.nonce);
                if let Err(error) = facilitator.reconcile_payment(record).await {
                    tracing::warn!(%error, %payer, %nonce, "an open payment could not be reconciled");
                }
            });
        }
        // A panic is reported where it happens; the payment is reconciled again.
        while running.join_next().await.is_some() {}
        if is_full {
            return Ok(());
        }
    }
}
