//! How far a reader can trust reports: by how well each reporter agrees with the reader's own audits.
//!
//! [`Reputation`] reads directories, checks their reports, and returns each of them once.
//!
//! Counting reports would not do. An evaluator can pay itself a thousand times from accounts of its own, and each of these payments
//! supports a report. So a payer is trusted as far as its reports agree with the reader's **own audits** of the same evaluators in the
//! same skills. The measure is the Bayes factor of "the same worth" over "independent worth".
//! [`Thompson`](x402_market::selection::Thompson) computes it, with these rules:
//!
//! - Many payers who report the same are together trusted no more than the most trusted of them.
//! - A payer moves the reader by no more than the trust in it, however often it reports.
//! - What a payer reports about itself is ignored.
//!
//! ```no_run
//! # async fn example(student: x402_market::Student, me: alloy_primitives::Address) -> Result<(), Box<dyn std::error::Error>> {
//! use x402_directory::{DirectoryClient, reputation::Reputation};
//!
//! let mut reputation = Reputation::new(100_000, [me]);
//! let directory = DirectoryClient::new("https://directory.example")?;
//! let pulled = reputation.fetch(&directory).await?;
//! println!("{} new reports, {} refused", pulled.new.len(), pulled.refused);
//! for report in pulled.new {
//!     student.add_report(report)?;
//! }
//! # Ok(()) }
//! ```
//!
//! # Limits
//!
//! Trust can be bought. A payer can pay evaluators that the reader has audited, report what others have published, and so agree with the
//! reader's audits. Then it can praise an accomplice that the reader has not audited, and is trusted until the reader has audited that
//! one, too. The more it agreed before, the more audits that takes. An example: against twenty such payers that agreed with 120 audits,
//! and an accomplice that is right in one case of four, it takes some sixteen audits. Each of them also lowers the trust in everything
//! else that these payers report. The loss is what was spent on the accomplice meanwhile.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    sync::Arc,
};

use alloy_primitives::Address;
use tower_x402::{Clock, SystemClock};

use crate::{DirectoryClient, DirectoryError, ReportQuery, SignedEvidence};
#[cfg(feature = "onchain")]
use crate::{PaymentCheckError, PaymentChecker};
use x402_market::evidence::{Evidence, EvidenceError, EvidenceLog};

/// How many pages of a directory are read at a time, with up to a thousand reports each: as many as a directory stores by default.
const MAX_PAGES: usize = 1_000;
/// How many directories are remembered.
const MAX_DIRECTORIES: usize = 64;
/// How many reports of a directory are kept to be checked again, and for how many seconds.
const MAX_PENDING: usize = 1_000;
const PENDING_FOR: u64 = 3_600;

/// A reader of directories, which returns each valid report once.
#[must_use]
pub struct Reputation {
    /// The reports of others.
    log: EvidenceLog,
    own: Vec<Address>,
    /// Reports that are in the log, and were not returned yet.
    undelivered: Vec<Evidence>,
    read: HashMap<String, Progress>,
    clock: Arc<dyn Clock>,
    #[cfg(feature = "onchain")]
    checkers: Vec<Arc<PaymentChecker>>,
}

/// How far a directory was read.
#[derive(Default)]
struct Progress {
    after: u64,
    /// Reports whose payments were not deep enough, and since when.
    pending: VecDeque<(u64, SignedEvidence)>,
}

/// The result of reading a directory.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Pulled {
    /// The new reports, in the directory's order. Reports that were read before an earlier error come first.
    pub new: Vec<Evidence>,
    /// The number of refused reports: not signed by the payer, without a payment, or about the payer itself.
    pub refused: usize,
    /// The number of reports that were read before, are by the reader itself, or are older than reports that the log has dropped.
    pub known: usize,
    /// The number of payments that were not deep enough yet, or unknown to the reader's own node. They are checked again for an hour, and then
    /// refused.
    pub pending: usize,
    /// `true` if there is more to read.
    pub more: bool,
}

/// A directory was not read to the end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The directory could not be asked. Try again later.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A report could not be written to the log.
    #[error("a report could not be written to the log")]
    Log(#[from] EvidenceError),
    /// The chain could not be asked. The reports that were not checked are read again next time.
    #[cfg(feature = "onchain")]
    #[error("the payments cannot be checked")]
    Chain(#[source] PaymentCheckError),
}

impl Reputation {
    /// Creates a reader that keeps the last `capacity` reports in memory. Reports of the `own` addresses are skipped: the reader pays from
    /// them, so it has that evidence already.
    pub fn new(capacity: usize, own: impl IntoIterator<Item = Address>) -> Self {
        Self {
            log: EvidenceLog::in_memory(capacity),
            own: own.into_iter().collect(),
            undelivered: Vec::new(),
            read: HashMap::new(),
            clock: Arc::new(SystemClock),
            #[cfg(feature = "onchain")]
            checkers: Vec::new(),
        }
    }

    /// Sets the clock. Default: the machine's.
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// Checks payments itself, with this checker, instead of trusting the directory. Call it once for each network. Reports about payments
    /// that no checker serves are then refused.
    #[cfg(feature = "onchain")]
    pub fn payment_checker(mut self, checker: Arc<PaymentChecker>) -> Self {
        self.checkers.push(checker);
        self
    }

    /// Returns the log of the reports of others.
    pub fn log(&self) -> &EvidenceLog {
        &self.log
    }

    /// Returns the new reports of a directory, to the end or as many as the log keeps. A student learns them by
    /// [`add_report`](x402_market::Student::add_report), a selector by
    /// [`learn_report`](x402_market::selection::Selector::learn_report).
    ///
    /// # Errors
    /// [`PullError`]. What was read before it is in the [log](Self::log), is not read again, and comes with the next fetch.
    pub async fn fetch(&mut self, directory: &DirectoryClient) -> Result<Pulled, PullError> {
        let mut pulled = Pulled::default();
        // Undelivered reports are bounded as the log is.
        let forgotten = self.undelivered.len().saturating_sub(self.log.capacity());
        self.undelivered.drain(..forgotten);
        let name = directory.url().to_string();
        if self.read.len() < MAX_DIRECTORIES {
            self.read.entry(name.clone()).or_default();
        }
        self.check_pending(&name, &mut pulled).await?;
        let mut after = self.read.get(&name).map_or(0, |reading| reading.after);
        for _ in 0..MAX_PAGES {
            let page = directory.reports(&ReportQuery::default().after(after)).await?;
            pulled.refused += page.skipped;
            for accepted in page.reports {
                let is_done = self.take(&accepted.report, &mut pulled).await?;
                match self.read.get_mut(&name) {
                    Some(reading) => {
                        if !is_done {
                            reading.pending.push_back((self.clock.now(), accepted.report));
                        }
                        reading.after = accepted.id;
                    }
                    // This directory is not remembered, so it is read from the beginning next time.
                    None if !is_done => pulled.pending += 1,
                    None => {}
                }
            }
            after = page.after;
            if let Some(reading) = self.read.get_mut(&name) {
                reading.after = after;
                let too_many = reading.pending.len().saturating_sub(MAX_PENDING);
                reading.pending.drain(..too_many);
                pulled.refused += too_many;
            }
            pulled.more = page.more;
            if !page.more || self.undelivered.len() >= self.log.capacity() {
                break;
            }
        }
        pulled.pending += self.read.get(&name).map_or(0, |reading| reading.pending.len());
        pulled.new = mem::take(&mut self.undelivered);
        Ok(pulled)
    }

    /// Checks again the payments that were not deep enough.
    async fn check_pending(&mut self, name: &str, pulled: &mut Pulled) -> Result<(), PullError> {
        let mut place = 0;
        while let Some((since, report)) = self.read.get(name).and_then(|reading| reading.pending.get(place)).cloned() {
            let is_done = self.take(&report, pulled).await?;
            let is_too_late = self.clock.now() >= since.saturating_add(PENDING_FOR);
            if !is_done && !is_too_late {
                place += 1;
                continue;
            }
            pulled.refused += usize::from(!is_done);
            if let Some(reading) = self.read.get_mut(name) {
                reading.pending.remove(place);
            }
        }
        Ok(())
    }

    /// Checks a report and records it. Returns `false` if it must be checked again later.
    async fn take(&mut self, report: &SignedEvidence, pulled: &mut Pulled) -> Result<bool, PullError> {
        let Ok(key) = report.verify() else {
            pulled.refused += 1;
            return Ok(true);
        };
        if self.own.contains(&key.payer) {
            pulled.known += 1;
            return Ok(true);
        }
        #[cfg(feature = "onchain")]
        if !self.checkers.is_empty() {
            let checker = self.checkers.iter().find(|checker| checker.serves(report.network, report.asset));
            let found = match checker {
                Some(checker) => checker.check(report).await.map(drop),
                None => Err(PaymentCheckError::NotServed { network: report.network, asset: report.asset }),
            };
            match found {
                Ok(()) => {}
                Err(error @ (PaymentCheckError::Unavailable(_) | PaymentCheckError::Url)) => {
                    return Err(PullError::Chain(error));
                }
                Err(PaymentCheckError::NotYet(_)) => return Ok(false),
                Err(_) => {
                    pulled.refused += 1;
                    return Ok(true);
                }
            }
        }
        match self.log.record(report.evidence.clone(), self.clock.now()) {
            Ok(()) => self.undelivered.push(report.evidence.clone()),
            Err(EvidenceError::Duplicate | EvidenceError::TooOld) => pulled.known += 1,
            Err(EvidenceError::Future | EvidenceError::LongSkill) => pulled.refused += 1,
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }
}

tower_x402::debug_fields!(Reputation { log, own });
