//! The operator's view of a ledger: lists, searches, sums and exports payments.

use std::{collections::BTreeMap, str::FromStr, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, hex};

use super::report::{AssetReport, PeriodReport};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::{Facilitator, FacilitatorError},
    ledger::{
        Fingerprint, Fulfilment, Ledger, LedgerError, Listing, Record, Settlement, SettlementState, SettlementStep,
        channels::ChannelLedger,
    },
    payment::{PaymentKey, SettlementOutcome},
};

/// Lists, finds, sums up and exports the payments of a ledger.
///
/// Everything but [`reconcile`](Self::reconcile) only reads, one page at a time, while the ledger is in use. A payment that changes
/// meanwhile is seen before or after the change.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_x402::ledger::LedgerError> {
/// use std::sync::Arc;
/// use tower_x402::{ledger::MemoryLedger, ops::{Operator, PaymentFilter}};
///
/// let operator = Operator::new(Arc::new(MemoryLedger::new()));
/// let mut owed = operator.payments(PaymentFilter::Owed);
/// while let Some(page) = owed.next().await? {
///     for record in page {
///         println!("{} paid {} and got nothing", record.key.payer, record.amount());
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Operator {
    ledger: Arc<dyn Ledger>,
    pub(super) channels: Option<Arc<dyn ChannelLedger>>,
    pub(super) clock: Arc<dyn Clock>,
    pause: Duration,
}

impl Operator {
    /// Creates an operator of this ledger, which is that of the facilitator.
    pub fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self { ledger, channels: None, clock: Arc::new(SystemClock), pause: Duration::ZERO }
    }

    /// Sets the clock. Default: [`SystemClock`].
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets how long to wait before each page but the first of a listing, a report or an export, so that a long one leaves the ledger to
    /// payments. Needs a tokio runtime with timers. Default: zero.
    #[must_use]
    pub const fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    /// Waits before the next page.
    pub(super) async fn rest(&self) {
        if !self.pause.is_zero() {
            tokio::time::sleep(self.pause).await;
        }
    }

    /// Returns the payments that match a filter, one page at a time.
    pub fn payments(&self, which: PaymentFilter) -> PaymentPages {
        let settlement = which.states();
        PaymentPages { operator: self.clone(), which, listing: Listing { settlement, ..Listing::default() } }
    }

    /// Returns up to `limit` payments that match a search. Reads the whole ledger if there are fewer.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    pub async fn find(&self, search: &PaymentSearch, limit: usize) -> Result<Vec<Record>, LedgerError> {
        let mut found = Vec::new();
        let mut payments = self.payments(PaymentFilter::All);
        while found.len() < limit
            && let Some(page) = payments.next().await?
        {
            found.extend(page.into_iter().filter(|record| search.matches(record)));
        }
        found.truncate(limit);
        Ok(found)
    }

    /// Reconciles a payment with the chain now, and returns its record afterwards and the outcome.
    ///
    /// A settlement and a failure for good are recorded. That a payment was not executed *so far* is recorded only if it was
    /// submitted and is not being settled now.
    ///
    /// # Errors
    /// [`OperatorError::Unknown`] if the payment is not in the ledger; [`OperatorError::Facilitator`] if the chain did not
    /// answer; [`OperatorError::Ledger`] if the ledger failed.
    pub async fn reconcile(
        &self,
        facilitator: &dyn Facilitator,
        key: &PaymentKey,
    ) -> Result<(Record, SettlementOutcome), OperatorError> {
        let record = self.ledger.get(key).await?.ok_or(OperatorError::Unknown)?;
        let outcome = facilitator.reconcile(&record).await?;
        let now = self.clock.now();
        let is_submitted = matches!(record.settlement, Settlement::Submitted | Settlement::Unknown);
        let is_idle = record.settling.is_none_or(|settling| settling.until < now);
        let is_new = match &outcome {
            SettlementOutcome::Settled { .. } => !matches!(record.settlement, Settlement::Final { .. }),
            SettlementOutcome::Failed { dead: true, .. } => record.settlement.paid_by().is_none(),
            SettlementOutcome::Failed { dead: false, .. } => is_submitted && is_idle,
            SettlementOutcome::Unknown { .. } => false,
        };
        tracing::info!(payer = %key.payer, nonce = %key.nonce, ?outcome, is_new, "reconciled by the operator");
        if is_new {
            let step = SettlementStep::of(&outcome, facilitator.process_id(), &record.transactions);
            match self.ledger.advance(key, &step.into()).await {
                Ok(record) => return Ok((record, outcome)),
                // It was recorded in the meantime.
                Err(LedgerError::InvalidTransition(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let record = self.ledger.get(key).await?.ok_or(OperatorError::Unknown)?;
        Ok((record, outcome))
    }

    /// Sums up the whole ledger, and updates the metrics of owed and deferred payments.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    pub async fn report(&self) -> Result<PeriodReport, LedgerError> {
        let mut assets = BTreeMap::new();
        let mut payments = self.payments(PaymentFilter::All);
        while let Some(page) = payments.next().await? {
            for record in page {
                let (network, asset) = (record.key.network, record.terms.offer().asset.address);
                let report = assets.entry((network, asset)).or_insert_with(|| AssetReport::new(network, asset));
                report.add(&record, self.is_owed(&record).await?);
            }
        }
        let report = PeriodReport { assets: assets.into_values().collect() };
        for asset in &report.assets {
            crate::telemetry::outstanding(asset.network, asset.asset, asset.owed.payments, asset.deferred.units);
        }
        Ok(report)
    }

    /// Returns `true` if a payment was charged but its response was not delivered whole, and cannot be had by an idempotent retry.
    ///
    /// Look at what happened before you refund it: the payer of a response that streamed may have nearly all of it, and can bring its end about.
    ///
    /// A payment that is being worked on is not owed yet. One that was settled for others is not owed here: its seller answers for it.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed.
    pub async fn is_owed(&self, record: &Record) -> Result<bool, LedgerError> {
        let is_in_progress = record.lease_until >= self.clock.now();
        Ok(record.transaction().is_some()
            && record.request != Fingerprint::of_settler()
            && match record.fulfilment {
                Fulfilment::Delivered => false,
                Fulfilment::Released => true,
                Fulfilment::Reserved | Fulfilment::Working => !is_in_progress,
                // The response of a deferred payment was sent before it was settled.
                Fulfilment::Produced => {
                    !record.deferred && !is_in_progress && self.ledger.response(&record.key).await?.is_none()
                }
            })
    }
}

debug_fields!(Operator {});

/// A filter for payments. As text: `all`, `open`, `owed`, `deferred`, or the name of a settlement state.
///
/// ```
/// use tower_x402::{ledger::SettlementState, ops::PaymentFilter};
///
/// assert_eq!("owed".parse(), Ok(PaymentFilter::Owed));
/// assert_eq!("due".parse(), Ok(PaymentFilter::State(SettlementState::Due)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PaymentFilter {
    /// `all`: every payment.
    All,
    /// `open`: payments that are due, submitted or unknown.
    Open,
    /// `owed`: payments that settled but were not delivered whole.
    Owed,
    /// `deferred`: payments that were delivered and are not settled yet.
    Deferred,
    /// Payments in this state of settlement: `none`, `due`, `submitted`, `unknown`, `settled`, `final` or `dead`.
    State(SettlementState),
}

impl PaymentFilter {
    fn states(self) -> Vec<SettlementState> {
        use SettlementState::{Due, Final, Settled, Submitted, Unknown};
        match self {
            Self::All | Self::Deferred => Vec::new(),
            Self::Open => vec![Due, Submitted, Unknown],
            Self::Owed => vec![Settled, Final],
            Self::State(state) => vec![state],
        }
    }
}

impl FromStr for PaymentFilter {
    type Err = ParsePaymentFilterError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        use SettlementState::{Dead, Due, Final, None, Settled, Submitted, Unknown};
        let states = [None, Due, Submitted, Unknown, Settled, Final, Dead];
        match text {
            "all" => Ok(Self::All),
            "open" => Ok(Self::Open),
            "owed" => Ok(Self::Owed),
            "deferred" => Ok(Self::Deferred),
            name => {
                states.into_iter().find(|state| state.as_str() == name).map(Self::State).ok_or(ParsePaymentFilterError)
            }
        }
    }
}

/// An error while a [`PaymentFilter`] was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected all, open, owed, deferred, none, due, submitted, unknown, settled, final or dead")]
#[non_exhaustive]
pub struct ParsePaymentFilterError;

/// Pages of payments, in the order of [`PaymentKey`].
#[derive(Debug)]
pub struct PaymentPages {
    operator: Operator,
    which: PaymentFilter,
    listing: Listing,
}

impl PaymentPages {
    /// Returns the next page, which has at least one payment, or `None` at the end.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the store failed. Call again to retry.
    pub async fn next(&mut self) -> Result<Option<Vec<Record>>, LedgerError> {
        loop {
            if self.listing.after.is_some() {
                self.operator.rest().await;
            }
            let page = self.operator.ledger.list(&self.listing).await?;
            let Some(last) = page.last() else { return Ok(None) };
            let after = last.key;
            let mut found = Vec::new();
            for record in page {
                let belongs = match self.which {
                    PaymentFilter::Owed => self.operator.is_owed(&record).await?,
                    PaymentFilter::Deferred => !record.owed().is_zero(),
                    PaymentFilter::All | PaymentFilter::Open | PaymentFilter::State(_) => true,
                };
                if belongs {
                    found.push(record);
                }
            }
            self.listing.after = Some(after);
            if !found.is_empty() {
                return Ok(Some(found));
            }
        }
    }
}

/// An error of [`Operator::reconcile`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperatorError {
    /// The payment is not in the ledger.
    #[error("the payment is not in the ledger")]
    Unknown,
    /// The facilitator could not reach the chain. Try again.
    #[error(transparent)]
    Facilitator(#[from] FacilitatorError),
    /// The ledger failed. Try again.
    #[error("the ledger failed")]
    Ledger(#[from] LedgerError),
}

/// A search for payments by the identifiers that people have.
///
/// As text: `0x(payer):0x(nonce)`, or at least the first eight hex digits of a payer, a nonce or a transaction.
///
/// ```
/// use tower_x402::ops::PaymentSearch;
///
/// assert!("0x70997970C51812dc".parse::<PaymentSearch>().is_ok());
/// assert!("0x7099".parse::<PaymentSearch>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PaymentSearch {
    /// The payment of this payer with this nonce, on any network and in any token.
    Payment {
        /// The payer's address.
        payer: Address,
        /// The authorization's nonce.
        nonce: B256,
    },
    /// Payments that this transaction settled or was sent to settle.
    Transaction(B256),
    /// Payments whose payer, nonce or transaction has this prefix: hex digits in lower case, without `0x`.
    Prefix(String),
}

/// A shorter prefix matches too many payments.
const MIN_DIGITS: usize = 8;

impl PaymentSearch {
    /// Returns `true` if a payment matches.
    pub fn matches(&self, record: &Record) -> bool {
        let key = &record.key;
        let mut transactions = record.transactions.iter().copied().chain(record.settlement.paid_by());
        match self {
            Self::Payment { payer, nonce } => key.payer == *payer && key.nonce == *nonce,
            Self::Transaction(hash) => transactions.any(|transaction| transaction == *hash),
            Self::Prefix(digits) => {
                let has_prefix = |bytes: &[u8]| hex::encode(bytes).starts_with(digits);
                has_prefix(key.payer.as_slice())
                    || has_prefix(key.nonce.as_slice())
                    || transactions.any(|transaction| has_prefix(transaction.as_slice()))
            }
        }
    }
}

impl FromStr for PaymentSearch {
    type Err = ParsePaymentSearchError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((payer, nonce)) = text.split_once(':') {
            let payer = payer.parse().map_err(|_| ParsePaymentSearchError)?;
            return Ok(Self::Payment { payer, nonce: nonce.parse().map_err(|_| ParsePaymentSearchError)? });
        }
        let digits = text.strip_prefix("0x").unwrap_or(text).to_ascii_lowercase();
        let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        match is_hex && (MIN_DIGITS..=64).contains(&digits.len()) {
            true => Ok(Self::Prefix(digits)),
            false => Err(ParsePaymentSearchError),
        }
    }
}

/// An error while a [`PaymentSearch`] was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected 0x(payer):0x(nonce), or 8 to 64 hexadecimal digits that a payer, a nonce or a transaction begins with"
)]
#[non_exhaustive]
pub struct ParsePaymentSearchError;
