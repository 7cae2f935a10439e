//! Moving the money from within a request, and recording what became of it.

use std::{sync::Arc, time::Duration};

use tokio::sync::OwnedSemaphorePermit;
use tracing::Instrument as _;

use super::{
    answer::Answer,
    crashed::Witness,
    purchase::Purchase,
    sale::{self, Sale},
    wait::Busy,
};
use crate::{
    clock::Clock,
    facilitator::Facilitator,
    ledger::{Ledger, LedgerError, Record, Settlement, SettlementStep},
    payment::{Outcome, PaymentKey, Prechecked, Verified},
    protocol::Reason,
};

/// The pause before an unknown outcome is looked at again, doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// How long after `validBefore` an unknown outcome is still looked at, in seconds: blocks become final in between.
const PATIENCE: u64 = 3600;

/// Everything that settling one payment takes.
pub(super) struct Settler<'a> {
    sale: &'a Sale,
    facilitator: &'a Arc<dyn Facilitator>,
    payment: &'a Prechecked,
    permit: &'a mut Option<OwnedSemaphorePermit>,
}

impl<'a> Settler<'a> {
    pub(super) const fn of(purchase: &'a mut Purchase) -> Self {
        let Purchase { sale, facilitator, payment, permit, .. } = purchase;
        Self { sale, facilitator, payment, permit }
    }

    /// Settles, and keeps `record` in step with the ledger. The error is what the client is told.
    pub(super) async fn settle(self, record: &mut Record, verified: &Verified) -> Result<(), Answer> {
        let outcome = match self.facilitator.as_ref().settle(self.payment, verified).await {
            Ok(outcome) => outcome,
            Err(error) => {
                let unavailable = sale::unavailable(&error);
                return Err(if self.let_go(record).await { unavailable } else { self.sale.pending(record, None) });
            }
        };
        let step = SettlementStep::of(&outcome, self.facilitator.process_id());
        let recorded = record_step(self.facilitator.ledger().as_ref(), &record.key, &step).await;
        // The local copy only serves the answer; the ledger has judged the step.
        let _ = record.settle(&step, self.sale.config.clock.now());
        match outcome {
            Outcome::Settled { transaction, .. } => {
                let span = tracing::Span::current();
                if !span.is_disabled() {
                    span.record("transaction", tracing::field::display(transaction));
                }
                Ok(())
            }
            Outcome::Failed { reason, detail, transaction, .. } if matches!(recorded, Recorded::Now) => {
                Err(self.sale.not_settled(record, reason, &detail, transaction))
            }
            // What the ledger does not know to have failed may be settled yet.
            Outcome::Failed { transaction, .. } => Err(self.sale.pending(record, transaction)),
            Outcome::Unknown { transaction } => {
                let watch =
                    watch(self.facilitator.clone(), record.key, self.sale.config.clock.clone(), self.permit.take());
                tokio::spawn(watch);
                Err(self.sale.pending(record, transaction))
            }
        }
    }
}

impl Settler<'_> {
    /// Records as failed what was not sent: whoever is told so may buy it elsewhere, and is charged for it only if it presents the
    /// payment again. Returns `true` if it may be told so. The ledger decides: a payment that it has as submitted, or as entrusted to
    /// somebody, may be charged yet, and so may one of which it does not take the failure.
    async fn let_go(&self, record: &mut Record) -> bool {
        let ledger = self.facilitator.ledger().as_ref();
        // What is under way by now is not a failure; if it comes under way after this look, the ledger refuses the step.
        let known = ledger.get(&record.key).await;
        if !known.is_ok_and(|known| known.is_some_and(|known| known.settlement == Settlement::Due)) {
            return false;
        }
        // It is about to be forgotten, and what is not in the ledger is settled by nobody.
        if record.is_discardable() {
            return true;
        }
        let step = SettlementStep::Fail { reason: Reason::UnexpectedSettleError, by: self.facilitator.process_id() };
        let is_told = matches!(record_step(ledger, &record.key, &step).await, Recorded::Now);
        if is_told {
            let _ = record.settle(&step, self.sale.config.clock.now());
        }
        is_told
    }
}

/// Settles a payment whose work is done and whose first settlement failed; detached like the work. Returns the record as it is then.
pub(super) async fn settle_due(
    purchase: &mut Purchase,
    mut record: Box<Record>,
    busy: Busy,
) -> Result<Box<Record>, Answer> {
    let (sale, facilitator) = (purchase.sale.clone(), purchase.facilitator.clone());
    let (payment, mut permit) = (purchase.payment.clone(), purchase.permit.take());
    let witness = Witness::of(purchase);
    let settling = async move {
        let _busy = busy;
        let settler = Settler { sale: &sale, facilitator: &facilitator, payment: &payment, permit: &mut permit };
        // Nothing that was verified then is worth anything now; the facilitator looks again.
        settler.settle(&mut record, &Verified::default()).await?;
        Ok(record)
    };
    match tokio::spawn(settling.in_current_span()).await {
        Ok(settled) => settled,
        Err(_panicked) => Err(witness.crashed().await),
    }
}

/// Finds out what became of a payment that sight was lost of; detached as well, because asking may settle it, and nobody else hears
/// the answer. The error is what the client is told if that is still not known.
pub(super) async fn find_out(purchase: &Purchase, record: Box<Record>, busy: Busy) -> Result<(), Answer> {
    let (sale, facilitator) = (purchase.sale.clone(), purchase.facilitator.clone());
    let witness = Witness::of(purchase);
    let asking = async move {
        let _busy = busy;
        if resolve(facilitator.as_ref(), &record).await { Ok(()) } else { Err(sale.pending(&record, None)) }
    };
    match tokio::spawn(asking.in_current_span()).await {
        Ok(answered) => answered,
        Err(_panicked) => Err(witness.crashed().await),
    }
}

/// Asks what became of a payment and records it. Whether that is now known.
async fn resolve(facilitator: &dyn Facilitator, record: &Record) -> bool {
    match facilitator.reconcile(record).await {
        Ok(Outcome::Unknown { .. }) => false,
        Ok(outcome) => {
            let step = SettlementStep::of(&outcome, facilitator.process_id());
            match record_step(facilitator.ledger().as_ref(), &record.key, &step).await {
                Recorded::Now => true,
                // Another process may be settling what failed here.
                Recorded::Otherwise => !matches!(step, SettlementStep::Fail { .. }),
                Recorded::Not => false,
            }
        }
        Err(error) => {
            tracing::warn!(%error, payer = %record.key.payer, nonce = %record.key.nonce, "a payment could not be reconciled");
            false
        }
    }
}

/// Follows an unknown outcome to its end. Holds the permit of the request it came from, so that an outage shows as
/// "busy" before work is done instead of as a growing number of open payments.
async fn watch(
    facilitator: Arc<dyn Facilitator>,
    key: PaymentKey,
    clock: Arc<dyn Clock>,
    permit: Option<OwnedSemaphorePermit>,
) {
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        let record = match facilitator.ledger().get(&key).await {
            Ok(Some(record)) => record,
            Ok(None) => break,
            Err(error) => {
                tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "an unknown outcome could not be looked up");
                continue;
            }
        };
        if !matches!(record.settlement, Settlement::Unknown | Settlement::Submitted) {
            break;
        }
        let last = u64::try_from(record.authorization.valid_before).unwrap_or(u64::MAX).saturating_add(PATIENCE);
        if resolve(facilitator.as_ref(), &record).await || clock.now() > last {
            break;
        }
    }
    drop(permit);
}

/// What the ledger made of a step.
#[derive(Clone, Copy)]
enum Recorded {
    Now,
    /// The payment is in a state that does not allow it: whoever looked in between saw the same or more.
    Otherwise,
    /// The ledger failed.
    Not,
}

/// A fact about the chain stays true if the ledger is slow to take it: tries again for a while, then leaves it to
/// reconciliation, which finds the same fact.
async fn record_step(ledger: &dyn Ledger, key: &PaymentKey, step: &SettlementStep) -> Recorded {
    match ledger.settle(key, step).await {
        Ok(()) => Recorded::Now,
        Err(error) => Box::pin(record_again(ledger, key, step, error)).await,
    }
}

async fn record_again(
    ledger: &dyn Ledger,
    key: &PaymentKey,
    step: &SettlementStep,
    mut error: LedgerError,
) -> Recorded {
    for attempt in 1..5_u32 {
        if !matches!(error, LedgerError::Backend(_)) {
            break;
        }
        tracing::warn!(%error, attempt, "the ledger did not take an outcome");
        tokio::time::sleep(Duration::from_millis(50 << attempt)).await;
        error = match ledger.settle(key, step).await {
            Ok(()) => return Recorded::Now,
            Err(error) => error,
        };
    }
    if matches!(error, LedgerError::InvalidTransition(_)) {
        tracing::debug!(%error, payer = %key.payer, nonce = %key.nonce, ?step, "the ledger knows more than this");
        return Recorded::Otherwise;
    }
    tracing::error!(%error, payer = %key.payer, nonce = %key.nonce, ?step, "an outcome was not recorded");
    Recorded::Not
}
