//! Whether payments could be settled through a facilitator elsewhere.

use std::time::Duration;

use tokio::time::Instant;

use super::Remote;
use crate::{
    facilitator::{NotReady, Readiness},
    network::Network,
    telemetry,
};

/// For how long the answer is good.
const TTL: Duration = Duration::from_secs(2);

/// What was found last, and when. Who asks meanwhile waits for the same answer.
#[derive(Debug, Default)]
pub(super) struct LastLook(tokio::sync::Mutex<Option<(Instant, Readiness)>>);

impl Remote {
    pub(super) async fn readiness(&self) -> Readiness {
        let mut last = self.last_look.0.lock().await;
        if let Some((at, readiness)) = &*last
            && at.elapsed() < TTL
        {
            return readiness.clone();
        }
        let readiness = self.look_whether_ready().await;
        for network in self.served() {
            telemetry::ready(network, readiness.is_ready());
        }
        *last = Some((Instant::now(), readiness.clone()));
        readiness
    }

    async fn look_whether_ready(&self) -> Readiness {
        let mut readiness = Readiness::of_ledger(&*self.ledger).await;
        // Whatever it says to this, it is there; not every one tells what it supports.
        let answer = self.api.get("supported").await;
        if !answer.is_ok_and(|answer| !answer.status.is_server_error()) {
            readiness.reasons.push(NotReady::Facilitator);
        }
        for (_, witness) in &self.witnesses {
            if witness.chain(None).await.is_err() {
                readiness.reasons.push(NotReady::Node);
                break;
            }
        }
        readiness
    }

    fn served(&self) -> Vec<Network> {
        if self.networks.is_empty() { self.supported.networks() } else { self.networks.clone() }
    }
}
