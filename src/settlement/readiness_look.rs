//! Whether a payment could be settled now.

use std::time::Duration;

use alloy_primitives::U256;
use tokio::{sync::Mutex, time::Instant};

use super::engine::Engine;
use crate::{
    chain::fees::FeeError,
    settlement::{NotReady, Readiness},
    telemetry,
};

/// How long an answer is good for: whoever asks all the time must not make the node work.
const TTL: Duration = Duration::from_secs(1);
/// Gas that a key must be able to pay for: a transfer alone.
const LEAST_GAS: u128 = 110_000;

/// The last answer.
#[derive(Debug, Default)]
pub(crate) struct LastLook(Mutex<Option<(Instant, Readiness)>>);

impl Engine {
    /// What is in the way of settling, if anything is; of many callers one looks.
    pub(crate) async fn readiness(&self) -> Readiness {
        let mut last = self.last_look.0.lock().await;
        if let Some((at, readiness)) = &*last
            && at.elapsed() < TTL
        {
            return readiness.clone();
        }
        let readiness = self.look_whether_ready().await;
        telemetry::ready(self.network, readiness.is_ready());
        *last = Some((Instant::now(), readiness.clone()));
        readiness
    }

    async fn look_whether_ready(&self) -> Readiness {
        let mut readiness = Readiness::of_ledger(&*self.ledger).await;
        let mut note = |reason| readiness.reasons.push(reason);
        if self.is_closing() {
            note(NotReady::ShuttingDown);
        }
        if !*self.caught_up.borrow() {
            note(NotReady::CatchingUp);
        }
        if self.check_backlog().is_err() {
            note(NotReady::Backlog { waiting: self.active.count() });
        }
        let mut balance = U256::ZERO;
        for lane in &self.lanes {
            let account = lane.account();
            let Ok(wei) = self.rpc.balance(account).await else {
                note(NotReady::Node);
                return readiness;
            };
            lane.wake(wei);
            telemetry::gas_tank(self.network, account, wei);
            balance = balance.max(wei);
        }
        match self.fees.get(&self.rpc).await {
            Ok(fees) => {
                if balance < U256::from(fees.max_fee.saturating_mul(LEAST_GAS)) {
                    note(NotReady::GasTank { balance });
                }
            }
            Err(FeeError::TooHigh { .. }) => note(NotReady::GasPrice),
            Err(FeeError::Rpc(_)) => note(NotReady::Node),
        }
        readiness
    }
}
