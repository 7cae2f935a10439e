//! Gaps in an account's nonces: no later transaction can be included before they are filled.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;

use super::{
    FacilitatorError,
    accounts::{Account, NonceLease},
};
use crate::{chain::node::Node, telemetry};

/// How long a gap may wait for a call or a payment to fill it, and its filler for a place in the window.
const GAP_PATIENCE: Duration = Duration::from_millis(300);
/// How often one task fills a gap.
const MAX_FILLERS: usize = 64;
/// The longest pause after a gap could not be filled.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// Fills gaps with transfers of nothing.
pub(super) trait FillGaps: Sized + Send + Sync + 'static {
    fn node(&self) -> &Node;

    /// Sends a transfer of nothing with the nonce, and has a task follow it to its end. Returns `false` if the nonce turned out to be another
    /// transaction's, or if the node refused the transfer for a reason that will pass.
    fn send_filler(self: &Arc<Self>, lease: NonceLease) -> impl Future<Output = Result<bool, FacilitatorError>> + Send;

    /// Starts a task that fills the account's gaps if nothing else does soon, unless there are none or a task does so already.
    fn fill_gaps_of(self: &Arc<Self>, account: &Account) {
        if account.begin_filling() {
            tokio::spawn(fill(self.clone(), account.clone()));
        }
    }
}

/// A filler is not waited for: a reorganization can leave another gap below it.
async fn fill<S: FillGaps>(sender: Arc<S>, account: Account) {
    let node = sender.node();
    let mut pause = GAP_PATIENCE.max(2 * node.poll_interval());
    for _ in 0..MAX_FILLERS {
        sleep(pause).await;
        if !account.has_gap() {
            account.end_filling();
            match account.begin_filling() {
                // A gap that came between these two lines is left to nobody else.
                true => continue,
                false => return,
            }
        }
        let Some(lease) = account.take_gap(GAP_PATIENCE).await else { continue };
        let account_nonce = lease.nonce();
        match sender.send_filler(lease).await {
            Ok(true) => {
                telemetry::gap_filled(node.network());
                tracing::info!(account_nonce, "filling a gap in the nonces");
            }
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(account_nonce, %error, "a gap in the nonces cannot be filled");
                pause = (2 * pause).min(MAX_PAUSE);
            }
        }
    }
    account.end_filling();
}
