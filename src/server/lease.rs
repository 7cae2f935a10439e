//! Asking the ledger for the right to work, whatever becomes of who asks.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use super::{job::give_back, wait::Busy};
use crate::ledger::{Ledger, LedgerError, Record, Reservation};

/// What the ledger said.
pub(super) enum Claimed {
    /// The payment as it now stands, with the right to work on it.
    Granted(Box<Record>),
    /// The payment is known.
    Known(Box<Record>),
    /// Another caller was faster.
    TooLate,
}

type Asking = Pin<Box<dyn Future<Output = (Busy, Result<Claimed, LedgerError>)> + Send>>;

/// A question to the ledger. If the client goes away before the answer, it is awaited all the same, and a right that was
/// granted is given back: it would keep others waiting until its lease ends.
pub(super) struct LeaseClaim {
    ledger: Arc<dyn Ledger>,
    asking: Option<Asking>,
}

impl LeaseClaim {
    /// Reserves a payment seen for the first time.
    pub(super) fn first(ledger: &Arc<dyn Ledger>, mut record: Box<Record>, busy: Busy) -> Self {
        let asked = ledger.clone();
        Self::ask(ledger, async move {
            let claimed = asked.reserve(&record).await.map(|reservation| match reservation {
                Reservation::New(lease) => {
                    record.epoch = lease.epoch;
                    Claimed::Granted(record)
                }
                Reservation::Known(known) => Claimed::Known(known),
            });
            (busy, claimed)
        })
    }

    /// Leases a known payment anew.
    pub(super) fn again(ledger: &Arc<dyn Ledger>, mut record: Box<Record>, now: u64, until: u64, busy: Busy) -> Self {
        let asked = ledger.clone();
        Self::ask(ledger, async move {
            let leased = asked.take_over(&record.key, record.epoch, now, until).await;
            let claimed = leased.map(|lease| match lease {
                Some(lease) => {
                    record.lease_anew(until);
                    record.epoch = lease.epoch;
                    Claimed::Granted(record)
                }
                None => Claimed::TooLate,
            });
            (busy, claimed)
        })
    }

    fn ask(
        ledger: &Arc<dyn Ledger>,
        asking: impl Future<Output = (Busy, Result<Claimed, LedgerError>)> + Send + 'static,
    ) -> Self {
        Self { ledger: ledger.clone(), asking: Some(Box::pin(asking)) }
    }
}

impl Future for LeaseClaim {
    type Output = (Busy, Result<Claimed, LedgerError>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(asking) = &mut self.asking else { return Poll::Pending };
        let answer = asking.as_mut().poll(cx);
        if answer.is_ready() {
            self.asking = None;
        }
        answer
    }
}

impl Drop for LeaseClaim {
    fn drop(&mut self) {
        if let (Some(asking), Ok(runtime)) = (self.asking.take(), tokio::runtime::Handle::try_current()) {
            let ledger = self.ledger.clone();
            runtime.spawn(async move {
                let (busy, claimed) = asking.await;
                if let Ok(Claimed::Granted(record)) = claimed {
                    // Nobody is left to tell; the lease ends by itself.
                    let _ = give_back(ledger.as_ref(), &record).await;
                }
                drop(busy);
            });
        }
    }
}
