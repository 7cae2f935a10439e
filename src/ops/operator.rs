//! What a seller asks of its ledger.

use std::{fmt, str::FromStr, sync::Arc};

use super::{
    export::{Export, ExportFormat},
    report::Report,
    search::Search,
};
use crate::{
    clock::{Clock, SystemClock},
    facilitator::{Facilitator, FacilitatorError},
    ledger::{Fulfilment, Ledger, LedgerError, Listing, Record, Settlement, SettlementState, SettlementStep},
    payment::{Outcome, PaymentKey},
};

/// Asks a ledger for its payments.
///
/// Everything but [`reconcile`](Self::reconcile) only reads, a page at a time, beside whatever else the ledger does: what changes
/// meanwhile may be seen before or after its change.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_x402::ledger::LedgerError> {
/// use std::sync::Arc;
/// use tower_x402::{ledger::MemoryLedger, ops::{Operator, Which}};
///
/// let operator = Operator::new(Arc::new(MemoryLedger::new()));
/// let mut owed = operator.payments(Which::Owed);
/// while let Some(page) = owed.next().await? {
///     for record in page {
///         println!("{} paid {} and got nothing", record.key.payer, record.authorization.value);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Operator {
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
}

impl Operator {
    /// Asks this ledger: that of the facilitator which payments are charged through.
    pub fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self { ledger, clock: Arc::new(SystemClock) }
    }

    /// Takes the time from `clock` instead of the machine's.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// These payments, a page at a time.
    pub fn payments(&self, which: Which) -> Payments {
        let settlement = which.states();
        Payments { operator: self.clone(), which, listing: Listing { settlement, ..Listing::default() } }
    }

    /// Payments that fit, `limit` at most. Looks through the ledger until there are as many.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    pub async fn find(&self, search: &Search, limit: usize) -> Result<Vec<Record>, LedgerError> {
        let mut found = Vec::new();
        let mut payments = self.payments(Which::All);
        while found.len() < limit
            && let Some(page) = payments.next().await?
        {
            found.extend(page.into_iter().filter(|record| search.fits(record)));
        }
        found.truncate(limit);
        Ok(found)
    }

    /// Asks the chain at once what became of a payment, records what it proves, and returns the record as it is then. That no
    /// transaction has executed a payment so far is recorded only of one that was submitted and that nobody looks after
    /// now.
    ///
    /// # Errors
    /// [`OperatorError::Unknown`] if the payment is not in the ledger; [`OperatorError::Facilitator`] if the chain could not be
    /// asked; [`OperatorError::Ledger`] if the ledger failed.
    pub async fn reconcile(
        &self,
        facilitator: &dyn Facilitator,
        key: &PaymentKey,
    ) -> Result<(Record, Outcome), OperatorError> {
        let record = self.ledger.get(key).await?.ok_or(OperatorError::Unknown)?;
        let outcome = facilitator.reconcile(&record).await?;
        let now = self.clock.now();
        let is_submitted = matches!(record.settlement, Settlement::Submitted | Settlement::Unknown);
        let is_idle = record.settling.is_none_or(|settling| settling.until < now);
        let is_news = match &outcome {
            Outcome::Settled { .. } => !matches!(record.settlement, Settlement::Final { .. }),
            Outcome::Failed { dead: true, .. } => record.settlement.paid_by().is_none(),
            Outcome::Failed { dead: false, .. } => is_submitted && is_idle,
            Outcome::Unknown { .. } => false,
        };
        tracing::info!(payer = %key.payer, nonce = %key.nonce, ?outcome, is_news, "reconciled by the operator");
        if is_news {
            match self.ledger.settle(key, &SettlementStep::of(&outcome, facilitator.process_id())).await {
                // Somebody else was faster.
                Ok(()) | Err(LedgerError::InvalidTransition(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let record = self.ledger.get(key).await?.ok_or(OperatorError::Unknown)?;
        Ok((record, outcome))
    }

    /// Sums up the whole ledger. Sets the numbers of what is owed and outstanding, too.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    pub async fn report(&self) -> Result<Report, LedgerError> {
        let mut report = Report::default();
        let mut payments = self.payments(Which::All);
        while let Some(page) = payments.next().await? {
            for record in page {
                let is_owed = self.is_owed(&record).await?;
                report.add(&record, is_owed);
            }
        }
        for asset in &report.assets {
            crate::telemetry::outstanding(asset.network, asset.asset, asset.owed.payments, asset.deferred.units);
        }
        Ok(report)
    }

    /// These payments for accounting, in pieces.
    pub fn export(&self, which: Which, format: ExportFormat) -> Export {
        Export::new(self.payments(which), format)
    }

    /// Whether a payer paid and has nothing for it, nor gets it by presenting the payment again. What is being worked on just now
    /// is not owed yet.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed.
    pub async fn is_owed(&self, record: &Record) -> Result<bool, LedgerError> {
        let is_in_progress = record.lease_until >= self.clock.now();
        Ok(record.settlement.paid_by().is_some()
            && match record.fulfilment {
                Fulfilment::Delivered => false,
                Fulfilment::Released => true,
                Fulfilment::Reserved | Fulfilment::Working => !is_in_progress,
                // What was deferred left before it was paid.
                Fulfilment::Produced => {
                    !record.deferred && !is_in_progress && self.ledger.response(&record.key).await?.is_none()
                }
            })
    }
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operator").finish_non_exhaustive()
    }
}

/// Which payments.
///
/// ```
/// use tower_x402::{ledger::SettlementState, ops::Which};
///
/// assert_eq!("owed".parse(), Ok(Which::Owed));
/// assert_eq!("due".parse(), Ok(Which::State(SettlementState::Due)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// `all`.
    All,
    /// `open`: due, submitted, or out of sight.
    Open,
    /// `owed`: paid, and the payer got nothing.
    Owed,
    /// `deferred`: answered on credit, and not paid.
    Deferred,
    /// In this state of settlement, by its name: `none`, `due`, `submitted`, `unknown`, `settled`, `final` or `dead`.
    State(SettlementState),
}

impl Which {
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

impl FromStr for Which {
    type Err = ParseWhichError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        use SettlementState::{Dead, Due, Final, None, Settled, Submitted, Unknown};
        let states = [None, Due, Submitted, Unknown, Settled, Final, Dead];
        match text {
            "all" => Ok(Self::All),
            "open" => Ok(Self::Open),
            "owed" => Ok(Self::Owed),
            "deferred" => Ok(Self::Deferred),
            name => states.into_iter().find(|state| state.as_str() == name).map(Self::State).ok_or(ParseWhichError),
        }
    }
}

/// The text names no selection of payments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected all, open, owed, deferred, none, due, submitted, unknown, settled, final or dead")]
pub struct ParseWhichError;

/// Payments, a page at a time, in the order of [`PaymentKey`].
#[derive(Debug)]
pub struct Payments {
    operator: Operator,
    which: Which,
    listing: Listing,
}

impl Payments {
    /// Some more, at least one; `None` when there are no more.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the backend failed; asking again asks for the same.
    pub async fn next(&mut self) -> Result<Option<Vec<Record>>, LedgerError> {
        loop {
            let page = self.operator.ledger.list(&self.listing).await?;
            let Some(last) = page.last() else { return Ok(None) };
            let after = last.key;
            let mut found = Vec::new();
            for record in page {
                let belongs = match self.which {
                    Which::Owed => self.operator.is_owed(&record).await?,
                    Which::Deferred => !record.owed().is_zero(),
                    Which::All | Which::Open | Which::State(_) => true,
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

/// Why a payment was not reconciled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperatorError {
    /// The payment is not in the ledger.
    #[error("the payment is not in the ledger")]
    Unknown,
    /// The chain could not be asked.
    #[error(transparent)]
    Facilitator(#[from] FacilitatorError),
    /// The ledger failed.
    #[error("the ledger failed")]
    Ledger(#[from] LedgerError),
}
