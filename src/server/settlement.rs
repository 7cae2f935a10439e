//! Settles payments from within a request, and records what became of them.

use std::{sync::Arc, time::Duration};

use tokio::sync::OwnedSemaphorePermit;

use super::{
    answer::{self, Answer, RequestContext},
    lease::InProgress,
    paid_request::{Detached, PaidRequest},
};
use crate::{
    clock::Clock,
    facilitator::Facilitator,
    ledger::{Ledger, Record, Settlement, SettlementStep, settle_with_retries},
    payment::{PaymentKey, Prechecked, SettlementOutcome, Verified},
    protocol::Reason,
};

/// The pause before an unknown outcome is looked at again, doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// How long after `validBefore` an unknown outcome is still looked at, in seconds: blocks become final in between.
const WATCHED_AFTER_EXPIRY: u64 = 3600;

/// The parts of a paid request that settling it takes.
pub(super) struct Settler<'a> {
    context: &'a RequestContext,
    facilitator: &'a Arc<dyn Facilitator>,
    payment: &'a Prechecked,
    permit: &'a mut Option<OwnedSemaphorePermit>,
}

impl<'a> Settler<'a> {
    pub(super) const fn of(request: &'a mut PaidRequest) -> Self {
        let PaidRequest { context, facilitator, payment, permit, .. } = request;
        Self { context, facilitator, payment, permit }
    }

    /// Settles, and keeps `record` in step with the ledger. The error is what the client is told.
    pub(super) async fn settle(self, record: &mut Record, verified: &Verified) -> Result<(), Answer> {
        let outcome = match self.facilitator.as_ref().settle(self.payment, verified).await {
            Ok(outcome) => outcome,
            Err(error) => {
                let unavailable = answer::unavailable(&error);
                let is_failed = self.record_as_failed(record).await;
                return Err(if is_failed { unavailable } else { self.context.pending(record, None) });
            }
        };
        let step = SettlementStep::of(&outcome, self.facilitator.process_id(), &record.transactions);
        let recorded = record_step(self.facilitator.ledger().as_ref(), &record.key, &step).await;
        // The local copy only serves the answer; the ledger has judged the step.
        let _ = record.settle(&step, self.context.config.settings.clock.now());
        match outcome {
            SettlementOutcome::Settled { transaction, .. } => {
                tracing::Span::current().record("transaction", tracing::field::display(transaction));
                Ok(())
            }
            SettlementOutcome::Failed { reason, detail, transaction, .. } if matches!(recorded, Recorded::Now) => {
                Err(self.context.not_settled(record, reason, &detail, transaction))
            }
            // A payment that the ledger does not have as failed may be settled yet.
            SettlementOutcome::Failed { transaction, .. } => Err(self.context.pending(record, transaction)),
            SettlementOutcome::Unknown { transaction } => {
                let clock = self.context.config.settings.clock.clone();
                tokio::spawn(watch(self.facilitator.clone(), record.key, clock, self.permit.take()));
                Err(self.context.pending(record, transaction))
            }
        }
    }

    /// Records as failed what was not sent: a client that is told so may buy it elsewhere, and is charged for it only if it presents the
    /// payment again. Returns `true` if it may be told so. The ledger decides: a payment that it has as submitted, or as delegated to
    /// another facilitator, may be charged yet, and so may one of which it does not take the failure.
    async fn record_as_failed(&self, record: &mut Record) -> bool {
        let ledger = self.facilitator.ledger().as_ref();
        // A payment that is submitted by now has not failed; if it is submitted after this look, the ledger refuses the step.
        let Ok(Some(known)) = ledger.get(&record.key).await else { return false };
        if known.settlement != Settlement::Due {
            return false;
        }
        // It is about to be discarded, and only payments in the ledger are settled.
        if record.is_discardable() {
            return true;
        }
        let step = SettlementStep::Fail {
            reason: Reason::UnexpectedSettleError,
            by: self.facilitator.process_id(),
            known_transactions: known.transactions,
        };
        let is_recorded = matches!(record_step(ledger, &record.key, &step).await, Recorded::Now);
        if is_recorded {
            let _ = record.settle(&step, self.context.config.settings.clock.now());
        }
        is_recorded
    }
}

/// Settles a payment whose work is done and whose first settlement failed; detached like the work. Returns the record as it is then.
pub(super) async fn settle_due(
    request: &mut PaidRequest,
    mut record: Box<Record>,
    in_progress: InProgress,
) -> Result<Box<Record>, Answer> {
    let (context, facilitator) = (request.context.clone(), request.facilitator.clone());
    let (payment, mut permit) = (request.payment.clone(), request.permit.take());
    let settling = async move {
        let _in_progress = in_progress;
        let settler = Settler { context: &context, facilitator: &facilitator, payment: &payment, permit: &mut permit };
        // The verification is out of date; the facilitator looks again.
        settler.settle(&mut record, &Verified::default()).await?;
        Ok(record)
    };
    Detached::of(request).run(settling).await?
}

/// Finds out what became of a payment whose outcome is unknown; detached as well, because asking may settle it. The error is what the client is told if that is still not known.
pub(super) async fn reconcile(
    request: &PaidRequest,
    record: Box<Record>,
    in_progress: InProgress,
) -> Result<(), Answer> {
    let (context, facilitator) = (request.context.clone(), request.facilitator.clone());
    let asking = async move {
        let _in_progress = in_progress;
        if resolve(facilitator.as_ref(), &record).await { Ok(()) } else { Err(context.pending(&record, None)) }
    };
    Detached::of(request).run(asking).await?
}

/// Asks what became of a payment and records it. Returns `true` if that is now known.
async fn resolve(facilitator: &dyn Facilitator, record: &Record) -> bool {
    match facilitator.reconcile(record).await {
        Ok(SettlementOutcome::Unknown { .. }) => false,
        Ok(outcome) => {
            let step = SettlementStep::of(&outcome, facilitator.process_id(), &record.transactions);
            match record_step(facilitator.ledger().as_ref(), &record.key, &step).await {
                Recorded::Now => true,
                // Another process may be settling what failed here.
                Recorded::Refused => !matches!(step, SettlementStep::Fail { .. }),
                Recorded::Not => false,
            }
        }
        Err(error) => {
            tracing::warn!(%error, payer = %record.key.payer, nonce = %record.key.nonce, "a payment could not be reconciled");
            false
        }
    }
}

/// Asks for an unknown outcome until it is known. Holds the permit of the request it came from, so that an outage shows as
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
        let expiry = u64::try_from(record.authorization.valid_before).unwrap_or(u64::MAX);
        if resolve(facilitator.as_ref(), &record).await || clock.now() > expiry.saturating_add(WATCHED_AFTER_EXPIRY) {
            break;
        }
    }
    drop(permit);
}

/// Whether the ledger took a step.
#[derive(Clone, Copy)]
enum Recorded {
    Now,
    /// The payment is in a state that does not allow it: another worker has recorded the same or more.
    Refused,
    /// The ledger failed.
    Not,
}

/// Records a fact about the chain. If the ledger does not take it for long, it is left to reconciliation, which finds the same fact.
async fn record_step(ledger: &dyn Ledger, key: &PaymentKey, step: &SettlementStep) -> Recorded {
    match settle_with_retries(ledger, key, step).await {
        Ok(true) => Recorded::Now,
        Ok(false) => Recorded::Refused,
        Err(error) => {
            tracing::error!(%error, payer = %key.payer, nonce = %key.nonce, ?step, "an outcome was not recorded");
            Recorded::Not
        }
    }
}
