//! What evaluators were seen to do, on record.
//!
//! Reputation is this log, not an average of stars: everything that is believed of an evaluator can be computed anew from it,
//! by whoever reads it, with its own doubts.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use tower_x402::{Usdc, client::JournalFile};

use super::selection::{Observation, Skill};

/// How far the clocks of others may be ahead, in seconds.
const SKEW: u64 = 300;
/// The longest name of a skill, in bytes.
const SKILL_BYTES: usize = 128;

/// What came back from an evaluator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
#[non_exhaustive]
pub enum CallOutcome {
    /// A valid evaluation.
    #[non_exhaustive]
    Answered {
        /// The verdict, in [0, 1].
        score: f64,
        /// The probability that the evaluator gave to its verdict being right.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        confidence: Option<f64>,
        /// Whether the verdict was right, if the student knew the truth (an audit).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        right: Option<bool>,
    },
    /// Something that is no evaluation, or one out of range.
    #[serde(rename = "garbage")]
    InvalidAnswer,
    /// Nothing in time.
    Timeout,
    /// It asked for more than its card says.
    #[serde(rename = "priceLie")]
    PriceMismatch,
    /// It wanted somebody else to be paid than its card says.
    #[serde(rename = "payeeLie")]
    PayeeMismatch,
    /// It wanted to be paid in a token, or on a chain, that its card does not accept.
    #[serde(rename = "tokenLie")]
    TokenMismatch,
}

impl CallOutcome {
    /// A valid evaluation. The confidence counts only if it is a probability.
    pub fn answered(score: f64, confidence: Option<f64>, right: Option<bool>) -> Self {
        Self::Answered { score, confidence: confidence.filter(|p| (0.0..=1.0).contains(p)), right }
    }
}

/// What identifies a payment, and so a voice: one payment is one voice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PaymentId {
    /// Who paid.
    pub payer: Address,
    /// The nonce of the authorization.
    pub nonce: B256,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Evidence {
    /// The payment it is about. Without one, for instance because a lie about the price was found before anything was paid, it is
    /// the student's own, and nobody else's business.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payment: Option<PaymentId>,
    /// The address that is paid.
    pub evaluator: Address,
    /// At most 128 bytes.
    pub skill: String,
    /// Seconds since the Unix epoch.
    pub at: u64,
    /// What was paid.
    pub paid: Usdc,
    /// What came back.
    pub outcome: CallOutcome,
}

impl Evidence {
    /// What it tells a selector, where its skill has this number.
    pub const fn observation(&self, skill: Skill) -> Observation {
        Observation { evaluator: self.evaluator, skill, paid: self.paid, at: self.at, outcome: self.outcome }
    }
}

/// Which records to find; what is left out does not matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvidenceQuery {
    /// About whom.
    pub evaluator: Option<Address>,
    /// In which skill.
    pub skill: Option<String>,
    /// By whom it was paid.
    pub payer: Option<Address>,
    /// Seconds since the Unix epoch; the end is not included.
    pub at: Option<Range<u64>>,
}

impl EvidenceQuery {
    fn matches(&self, evidence: &Evidence) -> bool {
        self.evaluator.is_none_or(|evaluator| evaluator == evidence.evaluator)
            && self.skill.as_ref().is_none_or(|skill| *skill == evidence.skill)
            && self.payer.is_none_or(|payer| evidence.payment.is_some_and(|payment| payment.payer == payer))
            && self.at.as_ref().is_none_or(|at| at.contains(&evidence.at))
    }
}

/// A durable log of evidence that can be asked, one JSON object a line.
///
/// A record is written with one write before it is known, so that the end of the process loses none. It is not waited for the
/// disk: the end of the machine may lose the last ones, and with them some cents' worth of knowledge; [`EvidenceLog::sync`]
/// waits. An incomplete last line is removed when the file is opened. The file is locked against a second process and readable
/// by its owner only (on Unix).
///
/// It keeps the last records, up to a number, in memory as well as in the file, which is rewritten when it holds twice as many. What is
/// older than something that was dropped is refused, so that no payment speaks a second time after it was forgotten.
#[derive(Clone)]
pub struct EvidenceLog(Arc<Mutex<Inner>>);

struct Inner {
    capacity: usize,
    records: VecDeque<Evidence>,
    voices: HashSet<PaymentId>,
    /// When evaluators were seen for the first time.
    seen: BTreeMap<Address, u64>,
    /// What examinations have cost.
    examined: Usdc,
    /// Of records without a nonce or with one that is as old as this or older, nobody knows whether they were here before.
    dropped_until: Option<u64>,
    file: Option<JournalFile>,
    lines: usize,
    /// As a full disk would, refuses lines.
    #[cfg(test)]
    refuses: bool,
}

/// One line.
#[derive(Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase")]
enum Line {
    Evidence(Evidence),
    Dropped { until: u64 },
    Seen { evaluator: Address, at: u64 },
    Examined { paid: Usdc },
}

impl EvidenceLog {
    /// A log that ends with the process and keeps the last `capacity` records (at least one).
    pub fn in_memory(capacity: usize) -> Self {
        let inner = Inner {
            capacity: capacity.max(1),
            records: VecDeque::new(),
            voices: HashSet::new(),
            seen: BTreeMap::new(),
            examined: Usdc::ZERO,
            dropped_until: None,
            file: None,
            lines: 0,
            #[cfg(test)]
            refuses: false,
        };
        Self(Arc::new(Mutex::new(inner)))
    }

    /// Opens or creates the log at `path`, which keeps the last `capacity` records (at least one).
    ///
    /// # Errors
    /// If the file cannot be opened, is used by another process, or holds a complete line that is no record.
    pub fn open(path: impl AsRef<Path>, capacity: usize) -> Result<Self, EvidenceError> {
        let path = path.as_ref();
        let (file, text) =
            JournalFile::open(path).map_err(|source| EvidenceError::Open { path: path.into(), source })?;
        let log = Self::in_memory(capacity);
        {
            let mut inner = log.lock();
            for (index, line) in text.lines().enumerate() {
                match serde_json::from_str(line) {
                    Ok(Line::Evidence(evidence)) => inner.keep(evidence),
                    Ok(Line::Dropped { until }) => inner.dropped_until = inner.dropped_until.max(Some(until)),
                    Ok(Line::Seen { evaluator, at }) => inner.see(evaluator, at),
                    Ok(Line::Examined { paid }) => inner.examine(paid),
                    Err(_) => return Err(EvidenceError::Line { path: path.into(), line: index + 1 }),
                }
            }
            inner.lines = text.lines().count();
            inner.file = Some(file);
        }
        Ok(log)
    }

    /// Enters a record. `now` is in seconds since the Unix epoch.
    ///
    /// # Errors
    /// If the same payment has spoken before, if the record is older than something that was dropped, from the future, or
    /// out of range, or if it cannot be written; then it is not known either.
    pub fn record(&self, evidence: Evidence, now: u64) -> Result<(), EvidenceError> {
        let mut inner = self.lock();
        inner.admit(&evidence, now)?;
        let line = line(&Line::Evidence(evidence.clone()))?;
        inner.append(&line)?;
        inner.keep(evidence);
        inner.shorten();
        Ok(())
    }

    /// When an evaluator was seen for the first time: `now`, which is noted then, unless it was seen before. Of as many evaluators as
    /// records are kept this is remembered; all others are always new.
    ///
    /// # Errors
    /// If it cannot be written; then it is not known either.
    pub fn first_seen(&self, evaluator: Address, now: u64) -> Result<u64, EvidenceError> {
        let mut inner = self.lock();
        if let Some(at) = inner.seen.get(&evaluator) {
            return Ok(*at);
        }
        if inner.seen.len() < inner.capacity {
            let line = line(&Line::Seen { evaluator, at: now })?;
            inner.append(&line)?;
            inner.see(evaluator, now);
        }
        Ok(now)
    }

    /// When evaluators were seen for the first time, as far as it was [noted](Self::first_seen), in seconds since the Unix epoch.
    pub fn first_seen_times(&self) -> BTreeMap<Address, u64> {
        self.lock().seen.clone()
    }

    /// Notes what it cost to hire evaluators only to see how good they are ([`Panel::examined`](super::selection::Panel::examined)), for
    /// the [allowance](super::selection::ThompsonConfig::examinations) not to be used twice.
    ///
    /// # Errors
    /// If it cannot be written; then it is not known either.
    pub fn record_exploration_cost(&self, paid: Usdc) -> io::Result<()> {
        let mut inner = self.lock();
        let line = line(&Line::Examined { paid })?;
        inner.append(&line)?;
        inner.examine(paid);
        inner.shorten();
        Ok(())
    }

    /// What examinations have cost so far, those that are no longer on record included.
    pub fn exploration_cost(&self) -> Usdc {
        self.lock().examined
    }

    /// Waits until everything that was recorded is on disk.
    ///
    /// # Errors
    /// If the disk does not take it.
    pub fn sync(&self) -> io::Result<()> {
        match &mut self.lock().file {
            Some(file) => file.append(&[], true),
            None => Ok(()),
        }
    }

    /// The records that match, in the order in which they came.
    pub fn find(&self, query: &EvidenceQuery) -> Vec<Evidence> {
        self.lock().records.iter().filter(|evidence| query.matches(evidence)).cloned().collect()
    }

    /// Calls `with` for every record, in the order in which they came. The log must not be used from within.
    pub fn for_each(&self, with: impl FnMut(&Evidence)) {
        self.lock().records.iter().for_each(with);
    }

    /// How many records are kept at most.
    pub(super) fn capacity(&self) -> usize {
        self.lock().capacity
    }

    /// How many records are kept.
    pub fn len(&self) -> usize {
        self.lock().records.len()
    }

    /// Whether nothing is on record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Nothing in here panics halfway through a change, so a poisoned lock guards sound data.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for EvidenceLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EvidenceLog").field("records", &self.len()).finish_non_exhaustive()
    }
}

impl Inner {
    /// Writes a line, where there is a file.
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        if self.refuses {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if let Some(file) = &mut self.file {
            file.append(line, false)?;
            self.lines += 1;
        }
        Ok(())
    }

    fn admit(&self, evidence: &Evidence, now: u64) -> Result<(), EvidenceError> {
        if evidence.at > now.saturating_add(SKEW) {
            return Err(EvidenceError::Future);
        }
        if self.dropped_until.is_some_and(|until| evidence.at <= until) {
            return Err(EvidenceError::TooOld);
        }
        if evidence.payment.is_some_and(|payment| self.voices.contains(&payment)) {
            return Err(EvidenceError::Duplicate);
        }
        let probability = |p: f64| (0.0..=1.0).contains(&p);
        let sound = match evidence.outcome {
            CallOutcome::Answered { score, confidence, .. } => probability(score) && confidence.is_none_or(probability),
            _ => true,
        };
        if !sound || evidence.skill.len() > SKILL_BYTES {
            return Err(EvidenceError::OutOfRange);
        }
        Ok(())
    }

    fn keep(&mut self, evidence: Evidence) {
        if evidence.payment.is_some_and(|payment| !self.voices.insert(payment)) {
            return;
        }
        self.records.push_back(evidence);
        if self.records.len() > self.capacity
            && let Some(dropped) = self.records.pop_front()
        {
            self.dropped_until = self.dropped_until.max(Some(dropped.at));
            if let Some(payment) = dropped.payment {
                self.voices.remove(&payment);
            }
        }
    }

    fn see(&mut self, evaluator: Address, at: u64) {
        let first = self.seen.entry(evaluator).or_insert(at);
        *first = at.min(*first);
    }

    fn examine(&mut self, paid: Usdc) {
        self.examined = self.examined.checked_add(paid).unwrap_or(Usdc::MAX);
    }

    /// Rewrites a file that holds twice as much as is kept. One that cannot be rewritten goes on as it is, until next time.
    fn shorten(&mut self) {
        if self.lines <= 2 * (self.capacity + self.seen.len()) {
            return;
        }
        let Some(file) = &mut self.file else { return };
        let dropped = self.dropped_until.map(|until| Line::Dropped { until });
        let kept = self.records.iter().cloned().map(Line::Evidence);
        let seen = self.seen.iter().map(|(evaluator, at)| Line::Seen { evaluator: *evaluator, at: *at });
        let examined = (self.examined > Usdc::ZERO).then_some(Line::Examined { paid: self.examined });
        let lines = dropped.into_iter().chain(examined).chain(seen).chain(kept);
        let lines = lines.map(|record| line(&record)).collect::<io::Result<Vec<_>>>();
        match lines.and_then(|lines| file.replace(&lines.concat())) {
            Ok(()) => self.lines = self.records.len() + self.seen.len() + 2,
            Err(error) => {
                tracing::warn!(%error, "the log of evidence could not be made shorter");
                self.lines = self.capacity + self.seen.len();
            }
        }
    }
}

fn line(record: &Line) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

/// Why evidence was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvidenceError {
    /// This payment has spoken already.
    #[error("this payment is on record already")]
    Duplicate,
    /// Older than something that was forgotten.
    #[error("older than what was forgotten, so that nobody knows whether it was on record before")]
    TooOld,
    /// What others are heard to say names their payment to somebody else.
    #[error("it names no payment of one stranger to another")]
    NotAReport,
    /// More than five minutes ahead.
    #[error("from the future")]
    Future,
    /// A score or a confidence outside [0, 1], or a skill with a name of over 128 bytes.
    #[error("a score or a confidence outside [0, 1], or a skill with too long a name")]
    OutOfRange,
    /// The file cannot be opened, read or locked; it is locked if another process uses it.
    #[error("the log {} cannot be opened, or is in use by another process", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A complete line that no version of this crate wrote. Repair or move the file.
    #[error("line {line} of the log {} is no evidence", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from one.
        line: usize,
    },
    /// The record could not be written.
    #[error("the record could not be written")]
    Write(#[from] io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(number: u8, at: u64) -> Evidence {
        Evidence {
            payment: Some(PaymentId { payer: Address::repeat_byte(number % 3), nonce: B256::repeat_byte(number) }),
            evaluator: Address::repeat_byte(number % 5),
            skill: if number.is_multiple_of(2) { "prose" } else { "arithmetic" }.into(),
            at,
            paid: Usdc::from_atomic(1_000),
            outcome: CallOutcome::answered(0.5, Some(0.9), Some(number.is_multiple_of(3))),
        }
    }

    fn all(log: &EvidenceLog) -> Vec<Evidence> {
        log.find(&EvidenceQuery::default())
    }

    struct Path(tempfile::TempDir);

    impl Path {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn file(&self) -> PathBuf {
            self.0.path().join("evidence.jsonl")
        }
    }

    #[test]
    fn what_was_recorded_is_there_after_a_restart() {
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 100).unwrap();
        let unpaid =
            Evidence { payment: None, paid: Usdc::ZERO, outcome: CallOutcome::PriceMismatch, ..evidence(1, 1) };
        log.record(unpaid.clone(), 9).unwrap();
        (1..9).for_each(|number| log.record(evidence(number, u64::from(number)), 9).unwrap());
        log.sync().unwrap();
        let before = all(&log);
        assert!(EvidenceLog::open(path.file(), 100).is_err(), "one process at a time");
        drop(log);
        let log = EvidenceLog::open(path.file(), 100).unwrap();
        assert_eq!(all(&log), before);
        assert_eq!((before.len(), &before[0]), (9, &unpaid));
    }

    #[test]
    fn one_payment_is_one_voice() {
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 100).unwrap();
        log.record(evidence(1, 1), 9).unwrap();
        let again = Evidence { evaluator: Address::repeat_byte(9), ..evidence(1, 2) };
        assert!(matches!(log.record(again.clone(), 9), Err(EvidenceError::Duplicate)));
        drop(log);
        let log = EvidenceLog::open(path.file(), 100).unwrap();
        assert!(matches!(log.record(again, 9), Err(EvidenceError::Duplicate)));
        assert_eq!(log.len(), 1);
    }

    #[test]
    fn a_line_cut_by_a_crash_is_dropped_and_a_foreign_line_is_not() {
        let path = Path::new();
        EvidenceLog::open(path.file(), 100).unwrap().record(evidence(1, 1), 9).unwrap();
        let whole = std::fs::read_to_string(path.file()).unwrap();
        std::fs::write(path.file(), format!("{whole}{}", &whole[..40])).unwrap();
        assert_eq!(all(&EvidenceLog::open(path.file(), 100).unwrap()), [evidence(1, 1)]);
        assert_eq!(std::fs::read_to_string(path.file()).unwrap(), whole);

        std::fs::write(path.file(), format!("{whole}{{\"event\":\"other\"}}\n")).unwrap();
        assert!(matches!(EvidenceLog::open(path.file(), 100), Err(EvidenceError::Line { line: 2, .. })));
    }

    #[test]
    fn it_can_be_asked_by_evaluator_skill_payer_and_time() {
        let log = EvidenceLog::in_memory(100);
        (0..30).for_each(|number| log.record(evidence(number, u64::from(number)), 30).unwrap());
        let count = |query: EvidenceQuery| log.find(&query).len();
        assert_eq!(count(EvidenceQuery { evaluator: Some(Address::repeat_byte(2)), ..EvidenceQuery::default() }), 6);
        assert_eq!(count(EvidenceQuery { skill: Some("prose".into()), ..EvidenceQuery::default() }), 15);
        assert_eq!(count(EvidenceQuery { payer: Some(Address::repeat_byte(1)), ..EvidenceQuery::default() }), 10);
        assert_eq!(count(EvidenceQuery { at: Some(10..20), ..EvidenceQuery::default() }), 10);
        let all = EvidenceQuery {
            evaluator: Some(Address::repeat_byte(2)),
            skill: Some("prose".into()),
            payer: Some(Address::repeat_byte(0)),
            at: Some(0..20),
        };
        assert_eq!(log.find(&all), [evidence(12, 12)]);
    }

    #[test]
    fn memory_and_file_are_bounded_and_nothing_forgotten_speaks_again() {
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 10).unwrap();
        let mut longest = 0;
        for number in 0..100 {
            log.record(evidence(number, u64::from(number)), 100).unwrap();
            longest = longest.max(std::fs::read_to_string(path.file()).unwrap().lines().count());
        }
        assert!(log.len() == 10 && longest <= 21, "{longest}");
        let refused = |log: &EvidenceLog| matches!(log.record(evidence(3, 3), 100), Err(EvidenceError::TooOld));
        assert!(refused(&log));
        drop(log);
        let log = EvidenceLog::open(path.file(), 10).unwrap();
        assert!(log.len() == 10 && refused(&log));
        assert_eq!(all(&log)[0].at, 90);
    }

    #[test]
    fn first_sights_and_examinations_outlive_the_process_and_the_records() {
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 10).unwrap();
        let who = Address::repeat_byte;
        assert_eq!((log.first_seen(who(1), 5).unwrap(), log.first_seen(who(1), 9).unwrap()), (5, 5));
        log.record_exploration_cost(Usdc::from_atomic(30)).unwrap();
        for number in 0..100 {
            log.record(evidence(number, u64::from(number)), 100).unwrap();
            log.record_exploration_cost(Usdc::from_atomic(1)).unwrap();
        }
        assert!(std::fs::read_to_string(path.file()).unwrap().lines().count() < 30);
        drop(log);
        let log = EvidenceLog::open(path.file(), 10).unwrap();
        assert_eq!((log.first_seen(who(1), 9).unwrap(), log.exploration_cost().atomic()), (5, 130));
        // Beyond the capacity nobody is remembered, and everybody is new.
        (2..20).for_each(|number| assert_eq!(log.first_seen(who(number), 9).unwrap(), 9));
        assert_eq!((log.first_seen_times().len(), log.first_seen(who(19), 11).unwrap()), (10, 11));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let log = EvidenceLog::in_memory(10);
        assert!(matches!(log.record(evidence(1, 1_000), 500), Err(EvidenceError::Future)));
        let outcome = CallOutcome::answered(1.5, None, None);
        assert!(matches!(log.record(Evidence { outcome, ..evidence(1, 1) }, 9), Err(EvidenceError::OutOfRange)));
        let skill = "x".repeat(129);
        assert!(matches!(log.record(Evidence { skill, ..evidence(1, 1) }, 9), Err(EvidenceError::OutOfRange)));
        assert!(log.is_empty());
    }

    #[test]
    fn a_record_that_the_disk_does_not_take_is_not_known() {
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 10).unwrap();
        log.lock().refuses = true;
        assert!(matches!(log.record(evidence(1, 1), 9), Err(EvidenceError::Write(_))));
        assert!(log.is_empty());
    }
}
