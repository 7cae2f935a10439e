//! Settling what somebody else charges for, once.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, keccak256};
use tokio::time::{Instant, sleep};

use super::{
    Shared,
    answer::{Answer, Said},
    read::Asked,
};
use crate::{
    facilitator::{Facilitator, FacilitatorError, VerifyError, single_flight::NoResult},
    ledger::{
        Fingerprint, FulfilmentStep, Lease, Ledger, LedgerError, Record, Reservation, Settlement, SettlementStep,
        settle_with_retries,
    },
    payment::{Authenticity, Outcome, PaymentKey, Prechecked, Rejection, Verified},
    protocol::Reason,
};

/// How long one process may take for a settlement, in seconds.
const LEASE: u64 = 120;
/// How often it is looked whether a payer's other payments are settled.
const ADMISSION_POLL: Duration = Duration::from_millis(20);
/// How often the balance of a payer is read again that pays others all the time.
const MAX_LOOKS: u32 = 5;
/// When somebody should ask again who cannot be told now.
const RETRY: Duration = Duration::from_secs(2);

impl Shared {
    /// The answer to `/settle`: of the settlement under way, or of one begun now. It goes on if the caller goes away.
    pub(super) async fn settle(self: &Arc<Self>, asked: &Asked) -> Answer {
        let checked = match self.check(asked) {
            Ok(checked) => Ok(checked),
            Err(rejection) => match self.known(asked).await {
                Ok(Some(known)) => Ok(known),
                Ok(None) => Err(failed(rejection)),
                Err(error) => Err(unavailable(&error)),
            },
        };
        let (facilitator, payment) = match checked {
            Ok(checked) => checked,
            Err(said) => return asked.settled(&said),
        };
        let shared = self.clone();
        let landed = self
            .flights
            .run(flight(&payment), || async move { shared.settle_alone(&*facilitator, &payment).await })
            .await;
        asked.settled(&landed.unwrap_or_else(|none| match none {
            NoResult::Full => Said::Unavailable(RETRY),
            NoResult::Lost => Said::Pending(None),
        }))
    }

    async fn settle_alone(&self, facilitator: &dyn Facilitator, payment: &Prechecked) -> Said {
        match self.settle_once(facilitator, payment).await {
            Ok(said) => said,
            Err(error) => unavailable(&error),
        }
    }

    async fn settle_once(&self, facilitator: &dyn Facilitator, payment: &Prechecked) -> Result<Said, FacilitatorError> {
        let ledger = facilitator.ledger().as_ref();
        let key = payment.key();
        // Only the chain can judge some signatures: garbage is not recorded.
        if payment.authenticity() != Authenticity::Proven && ledger.get(&key).await?.is_none() {
            match facilitator.verify(payment).await {
                Ok(_) => {}
                Err(VerifyError::Invalid(rejection)) => return Ok(failed(rejection)),
                Err(VerifyError::Unavailable(error)) => return Err(error),
            }
        }
        let now = self.clock.now();
        let record = Record::new(payment, of_this_service(), now, now + LEASE);
        let (lease, record) = match ledger.reserve(&record).await? {
            Reservation::New(lease) => (lease, record),
            Reservation::Known(known) if known.request != of_this_service() || !is_same(&known, payment) => {
                let detail = "another payment with this nonce, or this one for something else, is on record";
                return Ok(failed(Rejection::new(Reason::NonceAlreadyUsed, detail)));
            }
            Reservation::Known(known) => {
                let was_settled = known.settlement.paid_by().is_some();
                match self.resume(facilitator, *known, now).await? {
                    Ok(owned) => owned,
                    Err(said) => {
                        if !was_settled {
                            self.catalogue(payment, &said);
                        }
                        return Ok(said);
                    }
                }
            }
        };
        let said = self.fresh(facilitator, payment, lease, &record).await;
        if let Ok(said) = &said {
            self.catalogue(payment, said);
        }
        if !matches!(said, Ok(Said::Paid(_) | Said::Pending(_))) {
            release(ledger, &lease, &record).await;
        }
        said
    }

    /// Notes what was sold, once for a payment: asking again must not change what is listed.
    fn catalogue(&self, payment: &Prechecked, said: &Said) {
        if let (Some(catalogue), Said::Paid(_)) = (&self.catalogue, said) {
            catalogue.learn(payment, self.clock.now());
        }
    }

    /// A payment that is known: what became of it, or the right to settle it now.
    async fn resume(
        &self,
        facilitator: &dyn Facilitator,
        record: Record,
        now: u64,
    ) -> Result<Result<(Lease, Record), Said>, FacilitatorError> {
        let ledger = facilitator.ledger().as_ref();
        let submitted = record.transactions.last().copied();
        let said = match record.settlement {
            Settlement::Settled { transaction, .. } | Settlement::Final { transaction, .. } => Said::Paid(transaction),
            Settlement::Dead => {
                let reason = record.last_failure.clone().unwrap_or(Reason::InvalidTransactionState);
                failed(Rejection::new(reason, "this payment can never be settled"))
            }
            Settlement::Submitted | Settlement::Unknown => {
                let outcome = facilitator.reconcile(&record).await?;
                if matches!(outcome, Outcome::Unknown { .. }) {
                    Said::Pending(submitted)
                } else {
                    note(facilitator, &record.key, outcome).await
                }
            }
            Settlement::None | Settlement::Due => {
                // Its window may have passed, which is told before it is tried in vain.
                if record.is_leased(now) {
                    return Ok(Err(Said::Pending(submitted)));
                }
                match ledger.take_over(&record.key, record.epoch, now, now + LEASE).await? {
                    Some(lease) => {
                        let mut record = record;
                        record.lease_anew(now + LEASE);
                        return Ok(Ok((lease, record)));
                    }
                    None => Said::Pending(submitted),
                }
            }
        };
        Ok(Err(said))
    }

    /// Verifies, admits, settles.
    async fn fresh(
        &self,
        facilitator: &dyn Facilitator,
        payment: &Prechecked,
        lease: Lease,
        record: &Record,
    ) -> Result<Said, FacilitatorError> {
        // Of what is due, a transaction may have been seen by others: whoever settles looks whether somebody executed it, and credits
        // that, where a verification would only say that the nonce is used.
        let verified = if record.settlement == Settlement::None {
            let verified = match look(facilitator, payment).await? {
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
        // Whoever asks again has heard of earlier failures.
        let outcome = facilitator.settle(&payment.clone().again(record.failures), &verified).await?;
        Ok(note(facilitator, &lease.key, outcome).await)
    }

    /// Counts the payment as in flight. Where that depends on what the payer's other payments are doing just now, looks again,
    /// a while.
    async fn admit(
        &self,
        facilitator: &dyn Facilitator,
        payment: &Prechecked,
        lease: Lease,
        mut verified: Verified,
    ) -> Result<Result<Verified, Rejection>, FacilitatorError> {
        let deadline = Instant::now() + self.settle_patience;
        let mut looks = 0;
        loop {
            let step = FulfilmentStep::Admit { funds: verified.funds, due: true };
            match facilitator.ledger().fulfil(&lease, &step).await {
                Ok(()) => return Ok(Ok(verified)),
                Err(LedgerError::Stale) if looks < MAX_LOOKS => {
                    looks += 1;
                    verified = match look(facilitator, payment).await? {
                        Ok(verified) => verified,
                        Err(rejection) => return Ok(Err(rejection)),
                    };
                }
                Err(LedgerError::BalancePending) if Instant::now() < deadline => sleep(ADMISSION_POLL).await,
                Err(LedgerError::InsufficientFunds | LedgerError::Stale | LedgerError::BalancePending) => {
                    let detail = "the payer's balance does not cover this payment and what else it has in flight";
                    return Ok(Err(Rejection::new(Reason::InsufficientFunds, detail)));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

async fn look(
    facilitator: &dyn Facilitator,
    payment: &Prechecked,
) -> Result<Result<Verified, Rejection>, FacilitatorError> {
    match facilitator.verify(payment).await {
        Ok(verified) => Ok(Ok(verified)),
        Err(VerifyError::Invalid(rejection)) => Ok(Err(rejection)),
        Err(VerifyError::Unavailable(error)) => Err(error),
    }
}

/// Gives a payment back that was not settled. It is forgotten if nothing was sent for it; otherwise it can be asked for again,
/// and is not settled unasked.
async fn release(ledger: &dyn Ledger, lease: &Lease, record: &Record) {
    let result = match if record.is_discardable() { ledger.discard(lease).await } else { Err(LedgerError::NotFound) } {
        Ok(()) => Ok(()),
        Err(_) => ledger.fulfil(lease, &FulfilmentStep::Release { body: None }).await,
    };
    if let Err(error) = result {
        tracing::debug!(%error, payer = %lease.key.payer, nonce = %lease.key.nonce, "a reservation was not given back");
    }
}

/// Records an outcome, and returns what is said of it: a failure that the ledger does not take may be none. A fact about the chain stays
/// true if the ledger is slow to take it.
async fn note(facilitator: &dyn Facilitator, key: &PaymentKey, outcome: Outcome) -> Said {
    let step = SettlementStep::of(&outcome, facilitator.process_id());
    let recorded = settle_with_retries(&**facilitator.ledger(), key, &step).await;
    let is_recorded = matches!(recorded, Ok(true));
    match outcome {
        Outcome::Failed { dead: false, transaction, .. } if !is_recorded => {
            tracing::warn!(payer = %key.payer, nonce = %key.nonce, "a failure was not recorded; it is not told");
            Said::Pending(transaction)
        }
        outcome => told(outcome),
    }
}

/// What two payments have in common if they are one. A payer may sign several with one nonce, and nobody is told what became of another
/// one than its own.
fn flight(payment: &Prechecked) -> B256 {
    let mut all = payment.signing_hash().to_vec();
    // Of two signatures that only the chain can judge, one may be nobody's.
    if payment.authenticity() != Authenticity::Proven {
        all.extend_from_slice(payment.signature().as_bytes());
    }
    keccak256(all)
}

/// Payments that were reserved here, and not by a layer on the same ledger.
fn of_this_service() -> Fingerprint {
    Fingerprint { digest: keccak256("tower-x402 facilitator service"), names_caller: false }
}

fn is_same(record: &Record, payment: &Prechecked) -> bool {
    record.is_of(payment)
        && (payment.authenticity() == Authenticity::Proven || record.signature == *payment.signature())
}

fn told(outcome: Outcome) -> Said {
    match outcome {
        Outcome::Settled { transaction, .. } => Said::Paid(transaction),
        Outcome::Failed { reason, detail, transaction, .. } => Said::Failed { reason, detail, transaction },
        Outcome::Unknown { transaction } => Said::Pending(transaction),
    }
}

fn failed(rejection: Rejection) -> Said {
    Said::Failed { reason: rejection.reason, detail: rejection.detail, transaction: None }
}

fn unavailable(error: &FacilitatorError) -> Said {
    tracing::warn!(%error, "a payment cannot be settled now");
    Said::Unavailable(error.retry_after())
}
