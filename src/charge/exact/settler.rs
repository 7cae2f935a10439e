//! Settling for others: a payment is settled once, whoever asks for it and however often.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, U256, keccak256};
use tokio::time::Instant;

use super::{Outcome, admit, is_same_payment, reconcile, settle};
use crate::{
    charge::{
        Refusal, Why,
        lease::{HeldLease, Reserved},
        rooms::PayerRoom,
    },
    clock::Clock,
    facilitator::{
        Facilitator, FacilitatorError,
        single_flight::{NoResult, SingleFlight},
    },
    ledger::{Fingerprint, Record, Settlement, SettlementStep},
    payment::{Authenticity, PaymentKey, Prechecked, Terms, Verified},
    protocol::{ExactPayload, Reason},
};

/// The lease of one process on a settlement, in seconds.
const LEASE: u64 = 120;
/// How long a settlement waits for the payer's other payments.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(15);
/// When to ask again for an answer without an outcome.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// Settles payments that others present: each once, whoever asks for it and however often. It is what a facilitator does, whatever the
/// transport on which it is asked; the crate `x402-facilitator` is this over HTTP.
///
/// The facilitator's ledger has one record for each payment. While a settlement is under way, all who ask for it wait for the same answer;
/// it continues if they go away. Later they are answered from the record. A settlement that failed is tried again only when somebody asks
/// again. A payment that a [seller](crate::charge::Seller) has on record in the same ledger is refused.
///
/// ```
/// use std::sync::Arc;
/// use tower_x402::{
///     charge::{Refusal, SettleAnswer, Settler, Sponsor},
///     facilitator::Facilitator,
///     payment::{Prechecked, Verified},
/// };
///
/// /// Pays for every settlement.
/// struct Anybody;
///
/// impl Sponsor for Anybody {
///     fn grant(&self, _: &Prechecked, _: &Verified) -> Result<impl Send, Refusal> {
///         Ok(())
///     }
/// }
///
/// async fn settle(settler: &Settler, facilitator: &Arc<dyn Facilitator>, payment: &Prechecked) -> String {
///     match settler.settle(&Arc::new(Anybody), facilitator, payment).await {
///         SettleAnswer::Settled(transaction) => format!("settled in {transaction}"),
///         SettleAnswer::Pending(_) => "ask again".to_owned(),
///         SettleAnswer::Failed { reason, detail, .. } => format!("{reason}: {detail}"),
///         SettleAnswer::Unavailable(delay) => format!("ask again in {delay:?}"),
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Settler {
    clock: Arc<dyn Clock>,
    settlements: Arc<SingleFlight<B256, SettleAnswer>>,
    /// Payments that wait until their payers' other payments are settled.
    waiting: Arc<PayerRoom>,
}

/// Whoever pays for the transactions of a [`Settler`], and so says what they may cost.
pub trait Sponsor: Send + Sync + 'static {
    /// Grants the gas of a settlement, before a transaction is sent for it. What is returned is kept until the settlement has ended.
    ///
    /// `verified` is the result of the payment's verification; it is empty for a payment of which an earlier settlement may have been
    /// executed.
    ///
    /// # Errors
    /// A [`Refusal`], with which the settlement ends. A [`Rejection`](crate::payment::Rejection) is one.
    fn grant(&self, payment: &Prechecked, verified: &Verified) -> Result<impl Send, Refusal>;

    /// Is told of a payment that was settled. It is called once for a payment, unless several processes settle it.
    fn settled(&self, payment: &Prechecked) {
        let _ = payment;
    }
}

/// The answer to somebody who asked for a settlement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettleAnswer {
    /// It is settled, in this transaction. It is zero if nothing was charged of a maximum: there is no transaction then.
    Settled(B256),
    /// Its outcome is not known yet. This is its newest transaction, if one is known. Ask again.
    Pending(Option<B256>),
    /// It is not settled, and will not be unless somebody asks again.
    Failed {
        /// The reason, as it is named for an authorization; see [`Terms::reason`].
        reason: Reason,
        /// The details, for people.
        detail: String,
        /// The transaction that was reverted, or that used the payment for something else.
        transaction: Option<B256>,
    },
    /// No transaction was sent. Ask again after this time.
    Unavailable(Duration),
}

impl Settler {
    /// Creates a settler. Of payments whose payers have others in flight, `max_waiting` wait at once for what becomes of these, an eighth of
    /// them of one payer.
    pub fn new(clock: Arc<dyn Clock>, max_waiting: usize) -> Self {
        Self { clock, settlements: Arc::default(), waiting: Arc::new(PayerRoom::new(max_waiting)) }
    }

    /// Settles a payment, or returns what became of it. It takes as long as the facilitator does, and continues if the caller goes away.
    pub async fn settle(
        &self,
        sponsor: &Arc<impl Sponsor>,
        facilitator: &Arc<dyn Facilitator>,
        payment: &Prechecked,
    ) -> SettleAnswer {
        let run = Run { clock: self.clock.clone(), waiting: self.waiting.clone(), facilitator: facilitator.clone() };
        let (sponsor, payment) = (sponsor.clone(), payment.clone());
        let id = settlement_id(&payment);
        let settlement = async move { run.settle(&*sponsor, &payment).await.unwrap_or_else(SettleAnswer::from) };
        self.settlements.run(id, || settlement).await.unwrap_or_else(|none| match none {
            NoResult::Full => SettleAnswer::Unavailable(RETRY_AFTER),
            NoResult::Lost => SettleAnswer::Pending(None),
        })
    }

    /// Finds a payment that is on record, with the one of the facilitators that settles it: its window may have passed in the meantime, and
    /// asking for it again must still be answered. `charged` is what is to be charged of a maximum.
    ///
    /// # Errors
    /// [`FacilitatorError`] if the ledger cannot be read.
    pub async fn find_recorded(
        facilitators: &[Arc<dyn Facilitator>],
        terms: &Terms,
        payload: &ExactPayload,
        charged: Option<U256>,
    ) -> Result<Option<(Arc<dyn Facilitator>, Prechecked)>, FacilitatorError> {
        let key = PaymentKey::of(terms, &payload.authorization);
        for facilitator in facilitators.iter().filter(|facilitator| facilitator.knows(terms)) {
            if let Some(record) = facilitator.ledger().get(&key).await?
                && record.authorization == payload.authorization
                && record.signature == payload.signature
                && record.terms.offer().pay_to == terms.offer().pay_to
                && record.terms.offer().amount == terms.offer().amount
                && record.charged == charged
            {
                return Ok(Some((facilitator.clone(), record.payment())));
            }
        }
        Ok(None)
    }
}

/// What one settlement needs.
struct Run {
    clock: Arc<dyn Clock>,
    waiting: Arc<PayerRoom>,
    facilitator: Arc<dyn Facilitator>,
}

impl Run {
    async fn settle(&self, sponsor: &impl Sponsor, payment: &Prechecked) -> Result<SettleAnswer, Refusal> {
        let ledger = self.facilitator.ledger();
        // Only the chain can verify some signatures, and an invalid one must not be recorded.
        if payment.authenticity() != Authenticity::Proven && ledger.get(&payment.key()).await?.is_none() {
            self.facilitator.verify(&verifiable(payment)).await?;
        }
        let now = self.clock.now();
        let record = Box::new(Record::new(payment, Fingerprint::of_settler(), now, now + LEASE));
        let mut lease = match HeldLease::reserve(ledger.clone(), record, None).await? {
            Reserved::New(lease) => lease,
            Reserved::Known(_, known)
                if known.request != Fingerprint::of_settler()
                    || !is_same_payment(&known, payment)
                    || known.charged != payment.charged() =>
            {
                let detail = "another payment with this nonce, or this one for something else, is on record";
                return Err(Refusal::rejected(Reason::NonceAlreadyUsed, detail));
            }
            Reserved::Known(_, known) => {
                let was_settled = known.settlement.paid_by().is_some();
                match resume(&self.facilitator, known, now).await? {
                    Ok(lease) => lease,
                    Err(answer) => {
                        if !was_settled && matches!(answer, SettleAnswer::Settled(_)) {
                            sponsor.settled(payment);
                        }
                        return Ok(answer);
                    }
                }
            }
        };
        let answer = self.verify_and_settle(sponsor, payment, &mut lease).await;
        match answer {
            Ok(SettleAnswer::Settled(_)) => {
                sponsor.settled(payment);
                drop(lease.disarm());
            }
            Ok(SettleAnswer::Pending(_)) => drop(lease.disarm()),
            // Its record is discarded if no transaction was sent for it; otherwise it is settled only if it is asked for again.
            _ => lease.forget().await,
        }
        answer
    }

    /// Verifies, admits and settles a payment.
    async fn verify_and_settle(
        &self,
        sponsor: &impl Sponsor,
        payment: &Prechecked,
        lease: &mut HeldLease,
    ) -> Result<SettleAnswer, Refusal> {
        let facilitator = self.facilitator.as_ref();
        if payment.charged().is_some_and(|amount| amount.is_zero()) {
            return self.charge_nothing(payment, lease).await;
        }
        // A due payment may have been executed already, by an earlier transaction of ours or by somebody who saw it. Settling finds that out,
        // while verifying would only report a used nonce.
        let verified = if lease.record().settlement == Settlement::None {
            let verified = facilitator.verify(payment).await?;
            let deadline = Instant::now() + ADMISSION_TIMEOUT;
            admit(facilitator, payment, lease, verified, true, (&self.waiting, 0, deadline)).await?
        } else {
            Verified::default()
        };
        let _granted = sponsor.grant(payment, &verified)?;
        // The caller knows of earlier failures, since it asks again.
        let payment = payment.clone().again(lease.record().failures);
        let outcome = settle(facilitator, &payment, &verified, lease.record_mut(), self.clock.now()).await?;
        Ok(outcome.into())
    }

    /// Uses up a permit that is charged nothing. No transaction is sent: the chain would not take it.
    async fn charge_nothing(&self, payment: &Prechecked, lease: &mut HeldLease) -> Result<SettleAnswer, Refusal> {
        self.facilitator.verify(&verifiable(payment)).await?;
        let step = SettlementStep::Settle { transaction: B256::ZERO, block: None, fee: None };
        *lease.record_mut() = self.facilitator.ledger().advance(&payment.key(), &step.into()).await?;
        Ok(SettleAnswer::Settled(B256::ZERO))
    }
}

/// Returns what is verified for a settlement: the whole of a maximum of which nothing is charged, since the chain takes no charge of nothing.
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
) -> Result<Result<HeldLease, SettleAnswer>, Refusal> {
    let pending = SettleAnswer::Pending(record.transactions.last().copied());
    Ok(Err(match record.settlement {
        Settlement::Settled { transaction, .. } | Settlement::Final { transaction, .. } => {
            SettleAnswer::Settled(transaction)
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

impl From<Outcome> for SettleAnswer {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Settled { transaction, .. } => Self::Settled(transaction),
            Outcome::Failed { reason, detail, transaction } => Self::Failed { reason, detail, transaction },
            // It may be settled yet.
            Outcome::Unrecorded(transaction) | Outcome::Unknown(transaction) => Self::Pending(transaction),
        }
    }
}

impl From<Refusal> for SettleAnswer {
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
