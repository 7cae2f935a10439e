//! Settles payments from within a request, and records what became of them.

use std::{sync::Arc, time::Duration};

use alloy_primitives::B256;
use tokio::sync::OwnedSemaphorePermit;

use super::{receipt::Known, request::ExactRequest};
use crate::{
    charge::{Refusal, Why, common, in_progress::InProgress},
    clock::Clock,
    facilitator::{Facilitator, FacilitatorError},
    ledger::{Ledger, PaymentStep, Record, Settlement, SettlementStep, settle_with_retries},
    payment::{PaymentKey, Prechecked, SettlementOutcome, Verified},
    protocol::Reason,
};

/// The pause before an unknown outcome is looked at again, doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// How long after `validBefore` an unknown outcome is still looked at, in seconds: blocks become final in between.
const WATCHED_AFTER_EXPIRY: u64 = 3600;

/// What became of a payment, as far as the ledger has it.
pub(crate) enum Outcome {
    /// `is_known` unless the ledger failed, so that it still has to learn it.
    Settled { transaction: B256, is_known: bool },
    /// It failed, and the ledger has it as failed: it is settled only if it is presented again.
    Failed { reason: Reason, detail: String, transaction: Option<B256> },
    /// It failed, and the ledger does not have it so: it may be settled yet.
    Unrecorded(Option<B256>),
    /// It is not known.
    Unknown(Option<B256>),
}

/// Settles a payment that is due. `record` is what it became. Fails if nothing was sent.
pub(crate) async fn settle(
    facilitator: &dyn Facilitator,
    payment: &Prechecked,
    verified: &Verified,
    record: &mut Record,
    now: u64,
) -> Result<Outcome, FacilitatorError> {
    let outcome = facilitator.settle(payment, verified).await?;
    Ok(note(facilitator, record, outcome, now).await)
}

/// Finds out what became of a payment whose outcome is unknown.
pub(crate) async fn reconcile(
    facilitator: &dyn Facilitator,
    record: &mut Record,
    now: u64,
) -> Result<Outcome, FacilitatorError> {
    match facilitator.reconcile(record).await? {
        SettlementOutcome::Unknown { transaction } => Ok(Outcome::Unknown(transaction)),
        outcome => Ok(note(facilitator, record, outcome, now).await),
    }
}

/// Records what became of a payment. A settlement is a fact of the chain, whether it is recorded or not.
async fn note(facilitator: &dyn Facilitator, record: &mut Record, outcome: SettlementOutcome, now: u64) -> Outcome {
    let step = SettlementStep::of(&outcome, facilitator.process_id(), &record.transactions);
    let (is_taken, is_known) = match recorded(facilitator.ledger().as_ref(), &record.key, &step.clone().into()).await {
        Some(Some(taken)) => {
            *record = taken;
            (true, true)
        }
        refused => {
            // For the answer: the ledger has the same or more, or does not know it yet.
            let _ = record.settle(&step, now);
            (false, refused.is_some())
        }
    };
    match outcome {
        SettlementOutcome::Settled { transaction, .. } => Outcome::Settled { transaction, is_known },
        SettlementOutcome::Failed { reason, detail, transaction, .. } if is_taken => {
            Outcome::Failed { reason, detail, transaction }
        }
        SettlementOutcome::Failed { transaction, .. } => Outcome::Unrecorded(transaction),
        SettlementOutcome::Unknown { transaction } => Outcome::Unknown(transaction),
    }
}

/// Records a step. Returns the record after it, or nothing in its place if the ledger refused the step: another worker has recorded the same or
/// more. Returns `None` if the ledger failed for long; then the step is left to reconciliation, which finds the same fact.
async fn recorded(ledger: &dyn Ledger, key: &PaymentKey, step: &PaymentStep) -> Option<Option<Record>> {
    let recorded = settle_with_retries(ledger, key, step).await;
    recorded
        .inspect_err(|error| {
            tracing::error!(%error, payer = %key.payer, nonce = %key.nonce, ?step, "an outcome was not recorded");
        })
        .ok()
}

impl ExactRequest {
    /// Settles. `record` is what the payment became.
    pub(super) async fn settle(&mut self, record: &mut Record) -> Result<(), Refusal> {
        let verified = self.verified.unwrap_or_default();
        let now = self.seller.now();
        match settle(self.facilitator.as_ref(), &self.payment, &verified, record, now).await {
            Ok(Outcome::Settled { transaction, .. }) => {
                common::moved(transaction);
                Ok(())
            }
            Ok(Outcome::Failed { reason, detail, transaction }) => {
                Err(self.not_settled(record, reason, &detail, transaction))
            }
            Ok(Outcome::Unrecorded(transaction)) => Err(self.pending(record, transaction)),
            Ok(Outcome::Unknown(transaction)) => {
                let clock = self.seller.rules.clock.clone();
                tokio::spawn(watch(self.facilitator.clone(), record.key, clock, self.permit.take()));
                Err(self.pending(record, transaction))
            }
            Err(error) => {
                let unavailable = Refusal::from(&error);
                let is_failed = self.record_as_failed(record).await;
                Err(if is_failed { unavailable } else { self.pending(record, None) })
            }
        }
    }

    /// Settles a payment whose work is done and whose first settlement failed; detached like the work. Returns the record as it is then.
    pub(super) async fn settle_due(
        &mut self,
        mut record: Box<Record>,
        in_progress: Option<InProgress>,
    ) -> Result<Box<Record>, Refusal> {
        let mut copy = self.copy(None);
        let settling = async move {
            let _in_progress = in_progress;
            copy.settle(&mut record).await?;
            Ok(record)
        };
        Known::of(self).run(settling).await?
    }

    /// Finds out what became of a payment whose outcome is unknown; detached as well, because asking may settle it. Fails if that is still
    /// not known.
    pub(super) async fn reconcile(
        &self,
        mut record: Box<Record>,
        in_progress: Option<InProgress>,
    ) -> Result<(), Refusal> {
        let copy = self.copy(None);
        let asking = async move {
            let _in_progress = in_progress;
            let is_known = is_resolved(copy.facilitator.as_ref(), &mut record, copy.seller.now()).await;
            if is_known { Ok(()) } else { Err(copy.pending(&record, None)) }
        };
        Known::of(self).run(asking).await?
    }

    /// Returns `true` if somebody else executed a payment that nobody had asked to be settled: then it is paid for, and `record` says so
    /// (invariant I8). It is asked before a payer is `refused` who would make another payment. Fails if the money may have moved.
    pub(super) async fn is_executed(&self, record: &mut Record, refused: &Refusal) -> Result<bool, Refusal> {
        let was_seen_unused = match record.settlement {
            Settlement::None => record.attempts > 0 || record.block_seen.is_some(),
            Settlement::Due => true,
            _ => false,
        };
        if !was_seen_unused || refused.retry_after().is_some() {
            return Ok(false);
        }
        let facilitator = self.facilitator.as_ref();
        let outcome = match facilitator.reconcile(record).await.map_err(|error| Refusal::from(&error))? {
            SettlementOutcome::Unknown { transaction } => return Err(self.pending(record, transaction)),
            SettlementOutcome::Failed { reason, dead: false, .. } => {
                // The verification shows a use of which nobody knows what for.
                let is_unclear = refused.says_used() && reason != Reason::NonceAlreadyUsed;
                return if is_unclear { Err(self.pending(record, None)) } else { Ok(false) };
            }
            outcome => outcome,
        };
        match note(facilitator, record, outcome, self.seller.now()).await {
            Outcome::Settled { is_known: true, .. } => Ok(true),
            Outcome::Settled { transaction, .. } => Err(self.pending(record, Some(transaction))),
            Outcome::Failed { reason, detail, transaction } => {
                Err(self.not_settled(record, reason, &detail, transaction))
            }
            Outcome::Unrecorded(_) | Outcome::Unknown(_) => Ok(false),
        }
    }

    /// The response is gone before it was paid for. Its payer is told to make another payment only if nobody settles this one any more: another
    /// process may be about to. Returns `Ok` if it was paid for all the same.
    pub(super) async fn not_kept(&self, mut record: Box<Record>) -> Result<(), Refusal> {
        let is_failed = self.record_as_failed(&mut record).await;
        let refusal = if is_failed { Why::NotKept.into() } else { self.pending(&record, None) };
        if self.is_executed(&mut record, &refusal).await? { Ok(()) } else { Err(refusal) }
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
        let Some(Some(taken)) = recorded(ledger, &record.key, &step.into()).await else { return false };
        *record = taken;
        true
    }
}

/// Asks what became of a payment and records it. Returns `true` if that is now known.
async fn is_resolved(facilitator: &dyn Facilitator, record: &mut Record, now: u64) -> bool {
    match reconcile(facilitator, record, now).await {
        Ok(Outcome::Settled { is_known, .. }) => is_known,
        Ok(Outcome::Failed { .. }) => true,
        // Another process may be settling what failed here.
        Ok(Outcome::Unrecorded(_) | Outcome::Unknown(_)) => false,
        Err(error) => {
            tracing::warn!(%error, payer = %record.key.payer, nonce = %record.key.nonce, "a payment could not be reconciled");
            false
        }
    }
}

/// Asks for an unknown outcome until it is known. Holds the permit of the request it came from, so that an outage shows as
/// "busy" before work is done instead of as a growing number of open payments. The payer of a permit can leave its outcome unknown,
/// by a use of the nonce that nobody sees, so that it is left to reconciliation once what was signed has expired.
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
        let mut record = match facilitator.ledger().get(&key).await {
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
        if record.terms.permit().is_some() && record.terms.is_over(&record.authorization, clock.now()) {
            break;
        }
        let expiry = u64::try_from(record.authorization.valid_before).unwrap_or(u64::MAX);
        if is_resolved(facilitator.as_ref(), &mut record, clock.now()).await
            || clock.now() > expiry.saturating_add(WATCHED_AFTER_EXPIRY)
        {
            break;
        }
    }
    drop(permit);
}
