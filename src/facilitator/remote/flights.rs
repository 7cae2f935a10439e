//! One settlement at a time per payment.

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    facilitator::{FacilitatorError, Outcome},
    ledger::PaymentKey,
};

/// How many payments may be at the facilitator at once.
const MAX_FLIGHTS: usize = 10_000;

type Landed = Option<Result<Outcome, FacilitatorError>>;

/// The payments that a task of this process is settling.
#[derive(Debug, Default)]
pub(super) struct Flights(Mutex<HashMap<PaymentKey, watch::Receiver<Landed>>>);

impl Flights {
    /// What becomes of the payment: of the settlement that is under way, or of `settle`, which then runs whether anybody
    /// waits for it or not.
    pub(super) async fn join<F>(
        self: &Arc<Self>,
        key: PaymentKey,
        settle: impl FnOnce() -> F,
    ) -> Result<Outcome, FacilitatorError>
    where
        F: Future<Output = Result<Outcome, FacilitatorError>> + Send + 'static,
    {
        let mut landed = self.take_off(key, settle)?;
        match landed.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or(Ok(Outcome::Unknown { transaction: None })),
            // It panicked, after it may have been sent.
            Err(_) => Ok(Outcome::Unknown { transaction: None }),
        }
    }

    fn take_off<F>(
        self: &Arc<Self>,
        key: PaymentKey,
        settle: impl FnOnce() -> F,
    ) -> Result<watch::Receiver<Landed>, FacilitatorError>
    where
        F: Future<Output = Result<Outcome, FacilitatorError>> + Send + 'static,
    {
        let mut flights = self.lock();
        if let Some(landed) = flights.get(&key) {
            return Ok(landed.clone());
        }
        if flights.len() >= MAX_FLIGHTS {
            return Err(FacilitatorError::Busy { what: "settlements", retry_after: Duration::from_secs(1) });
        }
        let (sender, landed) = watch::channel(None);
        flights.insert(key, landed.clone());
        let (runway, settlement) = (Runway { flights: self.clone(), key }, settle());
        tokio::spawn(async move {
            let _runway = runway;
            let result = settlement.await;
            let _ = sender.send(Some(result));
        });
        Ok(landed)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PaymentKey, watch::Receiver<Landed>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Free again when the flight has ended, however it ended.
struct Runway {
    flights: Arc<Flights>,
    key: PaymentKey,
}

impl Drop for Runway {
    fn drop(&mut self) {
        self.flights.lock().remove(&self.key);
    }
}
