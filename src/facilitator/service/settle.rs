//! `/settle`: settles a payment for somebody else, once.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, keccak256};
use tokio::time::{Instant, sleep};

use super::{
    Shared,
    access::Caller,
    messages::{Answer, ParsedRequest, SettlementResult},
};
use crate::{
    facilitator::{Facilitator, FacilitatorError, VerifyError, single_flight::NoResult},
    ledger::{
        Fingerprint, FulfilmentStep, Lease, Ledger, LedgerError, Record, Reservation, Settlement, SettlementStep,
        settle_with_retries,
    },
    payment::{Authenticity, Prechecked, Rejection, SettlementOutcome, Verified},
    protocol::Reason,
};

/// The lease of one process on a settlement, in seconds.
const LEASE: u64 = 120;
/// The pause between two attempts to admit a payment while the payer's other payments are being settled.
const ADMISSION_POLL: Duration = Duration::from_millis(20);
/// How often a payer's balance is read again because it changed in the meantime.
const MAX_BALANCE_READS: u32 = 5;
/// The `Retry-After` of answers without an outcome.
const RETRY_AFTER: Duration = Duration::from_secs(2);

impl Shared {
    /// Answers `/settle` with the result of the settlement under way, or of a new one. It continues if the caller disconnects.
    pub(super) async fn settle(self: &Arc<Self>, request: &ParsedRequest, caller: Caller) -> Answer {
        let checked = match self.precheck(request) {
            Ok(checked) => Ok(checked),
            Err(rejection) => match self.find_recorded(request).await {
                Ok(Some(recorded)) => Ok(recorded),
                Ok(None) => Err(failed(rejection)),
                Err(error) => Err(unavailable(&error)),
            },
        };
        let (facilitator, payment) = match checked {
            Ok(checked) => checked,
            Err(result) => return Answer::settlement(request, &result),
        };
        let (id, shared) = (settlement_id(&payment), self.clone());
        let settlement = async move {
            shared.settle_once(&*facilitator, &payment).await.unwrap_or_else(|error| unavailable(&error))
        };
        let result = self.settlements.run(id, || settlement).await.unwrap_or_else(|none| match none {
            NoResult::Full => SettlementResult::Unavailable(RETRY_AFTER),
            NoResult::Lost => SettlementResult::Pending(None),
        });
        if let SettlementResult::Failed { transaction: Some(_), .. } = result {
            self.gas.note_revert(caller);
        }
        Answer::settlement(request, &result)
    }

    async fn settle_once(
        &self,
        facilitator: &dyn Facilitator,
        payment: &Prechecked,
    ) -> Result<SettlementResult, FacilitatorError> {
        let ledger = facilitator.ledger().as_ref();
        let key = payment.key();
        // Only the chain can verify some signatures, and an invalid one must not be recorded.
        if payment.authenticity() != Authenticity::Proven
            && ledger.get(&key).await?.is_none()
            && let Err(rejection) = verify(facilitator, payment).await?
        {
            return Ok(failed(rejection));
        }
        let now = self.clock.now();
        let record = Record::new(payment, service_fingerprint(), now, now + LEASE);
        let (lease, record) = match ledger.reserve(&record).await? {
            Reservation::New(lease) => (lease, record),
            Reservation::Known(known) if known.request != service_fingerprint() || !is_same(&known, payment) => {
                let detail = "another payment with this nonce, or this one for something else, is on record";
                return Ok(failed(Rejection::new(Reason::NonceAlreadyUsed, detail)));
            }
            Reservation::Known(known) => {
                #[cfg(feature = "bazaar")]
                let was_settled = known.settlement.paid_by().is_some();
                match self.resume(facilitator, *known, now).await? {
                    Ok(owned) => owned,
                    Err(result) => {
                        #[cfg(feature = "bazaar")]
                        if !was_settled {
                            self.add_to_catalogue(payment, &result);
                        }
                        return Ok(result);
                    }
                }
            }
        };
        let result = self.verify_and_settle(facilitator, payment, lease, &record).await;
        #[cfg(feature = "bazaar")]
        if let Ok(result) = &result {
            self.add_to_catalogue(payment, result);
        }
        if !matches!(result, Ok(SettlementResult::Settled(_) | SettlementResult::Pending(_))) {
            release(ledger, &lease, &record).await;
        }
        result
    }

    /// Lists the resource of a payment, once: a repeated request must not change the catalogue.
    #[cfg(feature = "bazaar")]
    fn add_to_catalogue(&self, payment: &Prechecked, result: &SettlementResult) {
        if let (Some(catalogue), SettlementResult::Settled(_)) = (&self.catalogue, result) {
            catalogue.record(payment, self.clock.now());
        }
    }

    /// Returns the result of a recorded payment, or the lease to settle it now.
    async fn resume(
        &self,
        facilitator: &dyn Facilitator,
        record: Record,
        now: u64,
    ) -> Result<Result<(Lease, Record), SettlementResult>, FacilitatorError> {
        let ledger = facilitator.ledger().as_ref();
        let submitted = record.transactions.last().copied();
        let result = match record.settlement {
            Settlement::Settled { transaction, .. } | Settlement::Final { transaction, .. } => {
                SettlementResult::Settled(transaction)
            }
            Settlement::Dead => {
                let reason = record.last_failure.clone().unwrap_or(Reason::InvalidTransactionState);
                failed(Rejection::new(reason, "this payment can never be settled"))
            }
            Settlement::Submitted | Settlement::Unknown => {
                let outcome = facilitator.reconcile(&record).await?;
                if matches!(outcome, SettlementOutcome::Unknown { .. }) {
                    SettlementResult::Pending(submitted)
                } else {
                    record_outcome(facilitator, &record, outcome).await
                }
            }
            Settlement::None | Settlement::Due => {
                if record.is_leased(now) {
                    return Ok(Err(SettlementResult::Pending(submitted)));
                }
                match ledger.take_over(&record.key, record.epoch, now, now + LEASE).await? {
                    Some(lease) => {
                        let mut record = record;
                        record.lease_anew(now + LEASE);
                        return Ok(Ok((lease, record)));
                    }
                    None => SettlementResult::Pending(submitted),
                }
            }
        };
        Ok(Err(result))
    }

    /// Verifies, admits and settles a payment.
    async fn verify_and_settle(
        &self,
        facilitator: &dyn Facilitator,
        payment: &Prechecked,
        lease: Lease,
        record: &Record,
    ) -> Result<SettlementResult, FacilitatorError> {
        // A due payment may have been executed already, by an earlier transaction of ours or by somebody who saw it. Settling finds that out,
        // while verifying would only report a used nonce.
        let verified = if record.settlement == Settlement::None {
            let verified = match verify(facilitator, payment).await? {
                Ok(verified) => verified,
                Err(rejection) => return Ok(failed(rejection)),
            };
            match self.admit(facilitator, payment, lease, verified).await? {
                Ok(verified) => verified,
                Err(rejection) => return Ok(failed(rejection)),
            }
        } else {
            Verified::default()
        };
        let gas = match self.check_gas(payment, &verified) {
            Ok(gas) => gas,
            Err(rejection) => return Ok(failed(rejection)),
        };
        let _reserved = match self.gas.reserve(gas, self.gas_used(), Instant::now()) {
            Ok(reserved) => reserved,
            Err(wait) => return Ok(SettlementResult::Unavailable(wait)),
        };
        // The caller knows of earlier failures, since it asks again.
        let outcome = facilitator.settle(&payment.clone().again(record.failures), &verified).await?;
        Ok(record_outcome(facilitator, record, outcome).await)
    }

    /// Admits the payment as covered by the payer's balance. Waits for a while if that depends on the payer's other payments.
    async fn admit(
        &self,
        facilitator: &dyn Facilitator,
        payment: &Prechecked,
        lease: Lease,
        mut verified: Verified,
    ) -> Result<Result<Verified, Rejection>, FacilitatorError> {
        let deadline = Instant::now() + self.admission_timeout;
        let mut reads = 0;
        loop {
            let step = FulfilmentStep::Admit { funds: verified.funds, due: true };
            match facilitator.ledger().fulfil(&lease, &step).await {
                Ok(()) => return Ok(Ok(verified)),
                Err(LedgerError::Stale) if reads < MAX_BALANCE_READS => {
                    reads += 1;
                    verified = match verify(facilitator, payment).await? {
                        Ok(verified) => verified,
                        Err(rejection) => return Ok(Err(rejection)),
                    };
                }
                Err(LedgerError::BalancePending) if Instant::now() < deadline => sleep(ADMISSION_POLL).await,
                Err(LedgerError::InsufficientFunds | LedgerError::Stale | LedgerError::BalancePending) => {
                    let detail = "the payer's balance does not cover this payment and its other pending payments";
                    return Ok(Err(Rejection::new(Reason::InsufficientFunds, detail)));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

async fn verify(
    facilitator: &dyn Facilitator,
    payment: &Prechecked,
) -> Result<Result<Verified, Rejection>, FacilitatorError> {
    match facilitator.verify(payment).await {
        Ok(verified) => Ok(Ok(verified)),
        Err(VerifyError::Invalid(rejection)) => Ok(Err(rejection)),
        Err(VerifyError::Unavailable(error)) => Err(error),
    }
}

/// Releases a payment that was not settled. Its record is discarded if no transaction was sent for it; otherwise it is settled only if
/// it is asked for again.
async fn release(ledger: &dyn Ledger, lease: &Lease, record: &Record) {
    let result = match if record.is_discardable() { ledger.discard(lease).await } else { Err(LedgerError::NotFound) } {
        Ok(()) => Ok(()),
        Err(_) => ledger.fulfil(lease, &FulfilmentStep::Release { body: None }).await,
    };
    if let Err(error) = result {
        tracing::debug!(%error, payer = %lease.key.payer, nonce = %lease.key.nonce, "a reservation was not released");
    }
}

/// Records an outcome and returns its result. A failure that cannot be recorded is answered as pending, since it may be retried and
/// succeed; a settlement is a fact of the chain and is answered in any case.
async fn record_outcome(
    facilitator: &dyn Facilitator,
    record: &Record,
    outcome: SettlementOutcome,
) -> SettlementResult {
    let key = &record.key;
    let step = SettlementStep::of(&outcome, facilitator.process_id(), &record.transactions);
    let recorded = settle_with_retries(&**facilitator.ledger(), key, &step).await;
    let is_recorded = matches!(recorded, Ok(true));
    match outcome {
        SettlementOutcome::Failed { dead: false, transaction, .. } if !is_recorded => {
            tracing::warn!(payer = %key.payer, nonce = %key.nonce, "a failure was not recorded, so it is answered as pending");
            SettlementResult::Pending(transaction)
        }
        outcome => result_of(outcome),
    }
}

/// Identifies a settlement by everything that was signed, since a payer may sign several payments with one nonce.
fn settlement_id(payment: &Prechecked) -> B256 {
    let mut all = payment.signing_hash().to_vec();
    // If only the chain can verify the signature, another one for the same message may be invalid.
    if payment.authenticity() != Authenticity::Proven {
        all.extend_from_slice(payment.signature().as_bytes());
    }
    keccak256(all)
}

/// The fingerprint of payments that were reserved here, and not by a `RequirePaymentLayer` on the same ledger.
fn service_fingerprint() -> Fingerprint {
    Fingerprint { digest: keccak256("tower-x402 facilitator service"), names_caller: false }
}

fn is_same(record: &Record, payment: &Prechecked) -> bool {
    record.is_of(payment)
        && (payment.authenticity() == Authenticity::Proven || record.signature == *payment.signature())
}

fn result_of(outcome: SettlementOutcome) -> SettlementResult {
    match outcome {
        SettlementOutcome::Settled { transaction, .. } => SettlementResult::Settled(transaction),
        SettlementOutcome::Failed { reason, detail, transaction, .. } => {
            SettlementResult::Failed { reason, detail, transaction }
        }
        SettlementOutcome::Unknown { transaction } => SettlementResult::Pending(transaction),
    }
}

fn failed(rejection: Rejection) -> SettlementResult {
    SettlementResult::Failed { reason: rejection.reason, detail: rejection.detail, transaction: None }
}

fn unavailable(error: &FacilitatorError) -> SettlementResult {
    tracing::warn!(%error, "a payment cannot be settled now");
    SettlementResult::Unavailable(error.retry_after())
}
