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
    let first_pause = GAP_PATIENCE.max(2 * node.poll_interval());
    let mut pause = first_pause;
    for _ in 0..MAX_FILLERS {
        sleep(pause).await;
        if !account.has_gap() {
            account.end_filling();
            if !account.begin_filling() {
                return;
            }
            // A gap that came between these two lines is left to nobody else.
            pause = first_pause;
            continue;
        }
        let Some(lease) = account.take_gap(pause.min(GAP_PATIENCE)).await else {
            pause = first_pause;
            continue;
        };
        let account_nonce = lease.nonce();
        match sender.send_filler(lease).await {
            Ok(true) => {
                telemetry::gap_filled(node.network());
                tracing::info!(account_nonce, "filling a gap in the nonces");
                // The next one has waited as long: a reorganization can remove many at once, and more before they are filled.
                pause = Duration::ZERO;
            }
            Ok(false) => pause = first_pause,
            Err(error) => {
                tracing::warn!(account_nonce, %error, "a gap in the nonces cannot be filled");
                pause = (2 * pause).clamp(first_pause, MAX_PAUSE);
            }
        }
    }
    account.end_filling();
}

#[cfg(all(test, feature = "local-signer"))]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use alloy_signer_local::PrivateKeySigner;
    use tokio::{sync::Notify, time::Instant};
    use x402_devnet::Devnet;

    use super::*;
    use crate::{Network, chain::rpc::Rpc, settlement::accounts::Accounts};

    /// Fails so many times at first.
    struct Failing(Node, AtomicU32);

    impl FillGaps for Failing {
        fn node(&self) -> &Node {
            &self.0
        }

        async fn send_filler(self: &Arc<Self>, lease: NonceLease) -> Result<bool, FacilitatorError> {
            if self.1.load(Ordering::Relaxed) > 0 {
                self.1.fetch_sub(1, Ordering::Relaxed);
                return Err(FacilitatorError::Unreachable { what: "the node", retry_after: Duration::ZERO });
            }
            lease.consumed();
            Ok(true)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_gaps_are_filled_at_once_when_the_node_answers_again() {
        let devnet = Devnet::start().await.unwrap();
        let node = || {
            let rpc = Rpc::new(devnet.rpc_client(), Duration::from_secs(5));
            Node::new(Network::BASE_SEPOLIA, rpc, 100_000, None, Some(Duration::from_millis(200))).unwrap()
        };
        let key = Arc::new(PrivateKeySigner::random());
        let accounts = Accounts::new(vec![key], &Arc::new(node()), 20, &Arc::new(Notify::new()));
        let account = accounts.iter().next().unwrap();
        let mut leases = Vec::new();
        for _ in 0..20 {
            leases.push(account.take(account.enter().await, 100_000).await.unwrap());
        }
        let waiting = leases.pop().unwrap();
        drop(leases);
        let begun = Instant::now();
        Arc::new(Failing(node(), AtomicU32::new(5))).fill_gaps_of(account);
        while account.has_gap() {
            sleep(Duration::from_millis(50)).await;
        }
        // The pauses add up to that.
        assert!((18..21).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        assert_eq!(account.consumed(), waiting.nonce());
    }
}
