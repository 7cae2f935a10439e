//! The exclusive right to work on a payment: among the requests of this process, and in the ledger.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use super::in_progress::InProgress;
use crate::{
    ledger::{
        BodyDigest, Fulfilment, FulfilmentStep, Lease, Ledger, LedgerError, Pauses, PaymentStep, Record, Reservation,
    },
    payment::Verified,
};

/// A leased payment: its record, and the right to change it.
///
/// Dropped before it is [disarmed](Self::disarm), as when the handler panics, it gives the payment back, so that presenting it again
/// is not refused until the lease ends.
pub(crate) struct HeldLease {
    record: Box<Record>,
    /// Whoever else holds the payment by now, as the record may say.
    lease: Lease,
    /// `None` once there is nothing to give back.
    ledger: Option<Arc<dyn Ledger>>,
    /// Keeps copies of the payment waiting.
    in_progress: Option<InProgress>,
}

/// The ledger's answer to a reservation.
pub(crate) enum Reserved {
    /// The payment is new, and leased.
    New(HeldLease),
    /// The payment is on record.
    Known(Option<InProgress>, Box<Record>),
}

impl HeldLease {
    /// Reserves a payment that is seen for the first time.
    pub(crate) async fn reserve(
        ledger: Arc<dyn Ledger>,
        mut record: Box<Record>,
        in_progress: Option<InProgress>,
    ) -> Result<Reserved, LedgerError> {
        match ledger.reserve(&record).await? {
            Reservation::New(lease) => {
                record.epoch = lease.epoch;
                Ok(Reserved::New(Self { record, lease, ledger: Some(ledger), in_progress }))
            }
            Reservation::Known(known) => Ok(Reserved::Known(in_progress, known)),
        }
    }

    /// Leases a known payment anew. Returns `None` if somebody else was faster.
    pub(crate) async fn take_over(
        ledger: Arc<dyn Ledger>,
        mut record: Box<Record>,
        now: u64,
        until: u64,
        in_progress: Option<InProgress>,
    ) -> Result<Option<Self>, LedgerError> {
        let step = PaymentStep::TakeOver { seen: record.epoch, now, until };
        match ledger.advance(&record.key, &step).await {
            Ok(taken) => *record = taken,
            Err(LedgerError::LeaseLost | LedgerError::NotFound) => return Ok(None),
            Err(error) => return Err(error),
        }
        Ok(Some(Self { lease: record.lease(), record, ledger: Some(ledger), in_progress }))
    }

    /// Returns the record as it stands.
    pub(crate) const fn record(&self) -> &Record {
        &self.record
    }

    /// Returns the right to work on the payment.
    pub(crate) const fn lease(&self) -> Lease {
        self.lease
    }

    /// Returns the record, for a settlement to replace.
    pub(crate) const fn record_mut(&mut self) -> &mut Record {
        &mut self.record
    }

    /// Takes a step of the work.
    pub(crate) async fn step(&mut self, step: FulfilmentStep) -> Result<(), LedgerError> {
        let Some(ledger) = &self.ledger else { return Err(LedgerError::LeaseLost) };
        *self.record = ledger.advance(&self.lease.key, &self.lease.step(step)).await?;
        Ok(())
    }

    /// Counts the payment as in flight.
    pub(crate) async fn admit(&mut self, verified: Verified, due: bool) -> Result<(), LedgerError> {
        self.step(FulfilmentStep::Admit { funds: verified.funds, due }).await
    }

    /// Takes a step after the work. If the ledger fails it is asked again for a while: what is done must not be done again because of one
    /// call, nor be charged for after the client was told that it is not.
    pub(crate) async fn step_after_work(
        &mut self,
        ledger: &dyn Ledger,
        step: FulfilmentStep,
    ) -> Result<(), LedgerError> {
        let (lease, step) = (&self.lease, self.lease.step(step));
        *self.record = match ledger.advance(&lease.key, &step).await {
            Err(error @ LedgerError::Backend(_)) => {
                tracing::warn!(%error, "the ledger did not take a step");
                Box::pin(step_again(ledger, lease, &step, error)).await?
            }
            answer => answer?,
        };
        Ok(())
    }

    /// Records a failed attempt, whose work read this much of the request's body.
    pub(crate) async fn release(&mut self, body: BodyDigest) {
        if let Err(error) = self.step(FulfilmentStep::Release { body: Some(body) }).await {
            let key = &self.record.key;
            tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a failed attempt was not released");
        }
        self.disarm();
    }

    /// Leaves the payment as if it had not been presented, where that loses nothing. Returns `true` if the ledger has it so.
    pub(crate) async fn give_back(&mut self) -> bool {
        let keeps_failures = self.record.last_failure.is_some();
        self.end(keeps_failures).await
    }

    /// Does the same for a payment whose failures need not be remembered: its payer was told of them, and is owed no work.
    pub(crate) async fn forget(&mut self) {
        self.end(false).await;
    }

    async fn end(&mut self, is_kept: bool) -> bool {
        let Some(ledger) = self.disarm() else { return false };
        let given_back = give_back(ledger.as_ref(), &self.lease, &self.record, is_kept).await;
        if let Err(error) = &given_back {
            let key = &self.record.key;
            tracing::debug!(%error, payer = %key.payer, nonce = %key.nonce, "a reservation was not given back");
        }
        given_back.is_ok()
    }

    /// From now on the payment is not given back if this is dropped.
    pub(crate) fn disarm(&mut self) -> Option<Arc<dyn Ledger>> {
        self.ledger.take()
    }

    /// Hands on the mark that keeps copies of the payment waiting.
    pub(crate) fn take_in_progress(&mut self) -> Option<InProgress> {
        self.in_progress.take()
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        if let (Some(ledger), Ok(runtime)) = (self.ledger.take(), tokio::runtime::Handle::try_current()) {
            let (record, lease, in_progress) = (self.record.clone(), self.lease, self.in_progress.take());
            runtime.spawn(async move {
                // A lease that was lost in the meantime is another worker's to give back.
                let _ = give_back(ledger.as_ref(), &lease, &record, record.last_failure.is_some()).await;
                drop(in_progress);
            });
        }
    }
}

/// A future that is finished in a task of its own if it is dropped before it is ready. The ledger may grant a lease to a client that
/// has gone away meanwhile; this way it reaches a [`HeldLease`], which gives it back.
pub(crate) struct FinishOnDrop<T: Send + 'static>(Option<Pin<Box<dyn Future<Output = T> + Send>>>);

impl<T: Send + 'static> FinishOnDrop<T> {
    pub(crate) fn new(work: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Some(Box::pin(work)))
    }
}

impl<T: Send + 'static> Future for FinishOnDrop<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some(work) = &mut self.0 else { return Poll::Pending };
        let output = ready!(work.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static> Drop for FinishOnDrop<T> {
    fn drop(&mut self) {
        if let (Some(work), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(work);
        }
    }
}

async fn give_back(ledger: &dyn Ledger, lease: &Lease, record: &Record, is_kept: bool) -> Result<(), LedgerError> {
    // The settlement may have written to the journal, although nothing came of it. Then it is released.
    if record.is_discardable() && !is_kept && ledger.discard(lease).await.is_ok() {
        return Ok(());
    }
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Release { body: None })).await.map(drop)
}

async fn step_again(
    ledger: &dyn Ledger,
    lease: &Lease,
    step: &PaymentStep,
    mut error: LedgerError,
) -> Result<Record, LedgerError> {
    let mut pauses = pauses_after_work();
    while pauses.wait().await {
        error = match ledger.advance(&lease.key, step).await {
            Ok(record) => return Ok(record),
            Err(error @ LedgerError::Backend(_)) => error,
            // It may have been taken before, and the answer was lost.
            Err(error) => match ledger.get(&lease.key).await {
                Ok(Some(record)) if record.epoch == lease.epoch && has_taken(&record, step) => return Ok(record),
                Ok(_) => return Err(error),
                Err(unknown) => unknown,
            },
        };
    }
    Err(error)
}

/// For how long, and how often, a ledger that fails is asked to take a step after the work.
pub(crate) fn pauses_after_work() -> Pauses {
    Pauses::new(Duration::from_millis(50), Duration::from_secs(2))
}

fn has_taken(record: &Record, step: &PaymentStep) -> bool {
    match step {
        PaymentStep::Fulfil { step: FulfilmentStep::Produce { .. }, .. } => {
            matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered)
        }
        PaymentStep::Fulfil { step: FulfilmentStep::Defer { .. }, .. } => record.deferred,
        _ => false,
    }
}
