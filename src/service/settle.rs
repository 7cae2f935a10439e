//! `/settle`: settles a payment for somebody else, once.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, keccak256};
use tokio::time::Instant;

use super::{
    Shared,
    access::Caller,
    messages::{Answer, ParsedRequest, SettlementResult},
};
use crate::{
    charge::{
        Refusal, Why,
        exact::{Outcome, admit, is_same_payment, reconcile, settle},
        lease::{HeldLease, Reserved},
    },
    facilitator::{Facilitator, single_flight::NoResult},
    ledger::{Fingerprint, Record, Settlement, SettlementStep},
    payment::{Authenticity, Prechecked, Verified},
    protocol::Reason,
};

/// The lease of one process on a settlement, in seconds.
const LEASE: u64 = 120;
/// The `Retry-After` of answers without an outcome.
const RETRY_AFTER: Duration = Duration::from_secs(2);

impl Shared {
    /// Answers `/settle` with the result of the settlement under way, or of a new one. It continues if the caller disconnects.
    pub(super) async fn settle(self: &Arc<Self>, request: &ParsedRequest, caller: Caller) -> Answer {
        let checked = match self.precheck(request) {
            Ok(checked) => Ok(checked),
            Err(rejection) => match self.find_recorded(request).await {
                Ok(Some(recorded)) => Ok(recorded),
                Ok(None) => Err(rejection.into()),
                Err(error) => Err(Refusal::from(error)),
            },
        };
        let (facilitator, payment) = match checked {
            Ok(checked) => checked,
            Err(refusal) => return Answer::settlement(request, &refusal.into()),
        };
        let (id, shared) = (settlement_id(&payment), self.clone());
        let settlement =
            async move { shared.settle_once(&facilitator, &payment).await.unwrap_or_else(SettlementResult::from) };
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
        facilitator: &Arc<dyn Facilitator>,
        payment: &Prechecked,
    ) -> Result<SettlementResult, Refusal> {
        let ledger = facilitator.ledger();
        // Only the chain can verify some signatures, and an invalid one must not be recorded.
        if payment.authenticity() != Authenticity::Proven && ledger.get(&payment.key()).await?.is_none() {
            facilitator.verify(&verifiable(payment)).await?;
        }
        let now = self.clock.now();
        let record = Box::new(Record::new(payment, service_fingerprint(), now, now + LEASE));
        let mut lease = match HeldLease::reserve(ledger.clone(), record, None).await? {
            Reserved::New(lease) => lease,
            Reserved::Known(_, known)
                if known.request != service_fingerprint()
                    || !is_same_payment(&known, payment)
                    || known.charged != payment.charged() =>
            {
                let detail = "another payment with this nonce, or this one for something else, is on record";
                return Err(Refusal::rejected(Reason::NonceAlreadyUsed, detail));
            }
            Reserved::Known(_, known) => {
                #[cfg(feature = "bazaar")]
                let was_settled = known.settlement.paid_by().is_some();
                match resume(facilitator, known, now).await? {
                    Ok(lease) => lease,
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
        let result = self.verify_and_settle(facilitator.as_ref(), payment, &mut lease).await;
        #[cfg(feature = "bazaar")]
        if let Ok(result) = &result {
            self.add_to_catalogue(payment, result);
        }
        match result {
            Ok(SettlementResult::Settled(_) | SettlementResult::Pending(_)) => drop(lease.disarm()),
            // Its record is discarded if no transaction was sent for it; otherwise it is settled only if it is asked for again.
            _ => lease.forget().await,
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

    /// Verifies, admits and settles a payment.
    async fn verify_and_settle(
        &self,
        facilitator: &dyn Facilitator,
        payment: &Prechecked,
        lease: &mut HeldLease,
    ) -> Result<SettlementResult, Refusal> {
        if payment.charged().is_some_and(|amount| amount.is_zero()) {
            return self.charge_nothing(facilitator, payment, lease).await;
        }
        // A due payment may have been executed already, by an earlier transaction of ours or by somebody who saw it. Settling finds that out,
        // while verifying would only report a used nonce.
        let verified = if lease.record().settlement == Settlement::None {
            let verified = facilitator.verify(payment).await?;
            let deadline = Instant::now() + self.admission_timeout;
            admit(facilitator, payment, lease, verified, true, (&self.waiting, deadline)).await?
        } else {
            Verified::default()
        };
        let gas = self.check_gas(payment, &verified)?;
        let _reserved = self.gas.reserve(gas, self.gas_used(), Instant::now()).map_err(Why::Unavailable)?;
        // The caller knows of earlier failures, since it asks again.
        let payment = payment.clone().again(lease.record().failures);
        let outcome = settle(facilitator, &payment, &verified, lease.record_mut(), self.clock.now()).await?;
        Ok(outcome.into())
    }
}

impl Shared {
    /// Uses up a permit that is charged nothing. No transaction is sent: the chain would not take it.
    async fn charge_nothing(
        &self,
        facilitator: &dyn Facilitator,
        payment: &Prechecked,
        lease: &mut HeldLease,
    ) -> Result<SettlementResult, Refusal> {
        facilitator.verify(&verifiable(payment)).await?;
        let step = SettlementStep::Settle { transaction: B256::ZERO, block: None, fee: None };
        *lease.record_mut() = facilitator.ledger().advance(&payment.key(), &step.into()).await?;
        Ok(SettlementResult::Settled(B256::ZERO))
    }
}

/// Returns what is verified for a settlement: the whole of a permit of which nothing is charged, since the chain takes no charge of nothing.
fn verifiable(payment: &Prechecked) -> Prechecked {
    let payment = payment.clone();
    let maximum = payment.authorization().value;
    if payment.amount().is_zero() { payment.charging(maximum) } else { payment }
}

/// Returns the result of a recorded payment, or the lease to settle it now.
async fn resume(
    facilitator: &Arc<dyn Facilitator>,
    mut record: Box<Record>,
    now: u64,
) -> Result<Result<HeldLease, SettlementResult>, Refusal> {
    let pending = SettlementResult::Pending(record.transactions.last().copied());
    Ok(Err(match record.settlement {
        Settlement::Settled { transaction, .. } | Settlement::Final { transaction, .. } => {
            SettlementResult::Settled(transaction)
        }
        Settlement::Dead => {
            let reason = record.last_failure.clone().unwrap_or(Reason::InvalidTransactionState);
            Refusal::rejected(reason, "this payment can never be settled").into()
        }
        Settlement::Submitted | Settlement::Unknown => match reconcile(facilitator.as_ref(), &mut record, now).await? {
            Outcome::Unknown(_) => pending,
            outcome => outcome.into(),
        },
        Settlement::None | Settlement::Due if record.is_leased(now) => pending,
        Settlement::None | Settlement::Due => {
            let ledger = facilitator.ledger().clone();
            return Ok(HeldLease::take_over(ledger, record, now, now + LEASE, None).await?.ok_or(pending));
        }
    }))
}

/// Identifies a settlement by everything that was signed, since a payer may sign several payments with one nonce.
fn settlement_id(payment: &Prechecked) -> B256 {
    let mut all = payment.signing_hash().to_vec();
    // If only the chain can verify the signature, another one for the same message may be invalid.
    if payment.authenticity() != Authenticity::Proven {
        all.extend_from_slice(payment.signature().as_bytes());
    }
    all.extend_from_slice(&payment.amount().to_be_bytes::<32>());
    keccak256(all)
}

/// The fingerprint of payments that were reserved here, and not by a `RequirePaymentLayer` on the same ledger.
fn service_fingerprint() -> Fingerprint {
    Fingerprint { digest: keccak256("tower-x402 facilitator service"), names_caller: false }
}

impl From<Outcome> for SettlementResult {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Settled { transaction, .. } => Self::Settled(transaction),
            Outcome::Failed { reason, detail, transaction } => Self::Failed { reason, detail, transaction },
            // It may be settled yet.
            Outcome::Unrecorded(transaction) | Outcome::Unknown(transaction) => Self::Pending(transaction),
        }
    }
}

impl From<Refusal> for SettlementResult {
    fn from(refusal: Refusal) -> Self {
        match (refusal.why(), refusal.retry_after()) {
            (Why::Malformed(rejection) | Why::Rejected(rejection), _) => {
                let (reason, detail) = (rejection.reason.clone(), rejection.detail.clone());
                Self::Failed { reason, detail, transaction: refusal.transaction() }
            }
            (Why::Pending | Why::InProgress, _) => Self::Pending(refusal.transaction()),
            (_, delay) => Self::Unavailable(delay.unwrap_or(RETRY_AFTER)),
        }
    }
}
