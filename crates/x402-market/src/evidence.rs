//! A log of what evaluators did.
//!
//! Everything that a student believes about evaluators can be computed again from this log: reputation is a computation over evidence, not
//! a stored number, and each reader applies its own trust.
//!
//! ```
//! use alloy_primitives::Address;
//! use tower_x402::Usdc;
//! use x402_market::evidence::{CallOutcome, Evidence, EvidenceLog, Pairs};
//!
//! let log = EvidenceLog::in_memory(1_000);
//! let evaluator = Address::repeat_byte(7);
//! let outcome = CallOutcome::answered(Pairs::of(&[0.9, 0.2, 0.4], &[true, false, true]));
//! let paid = Usdc::from_atomic(300);
//! let now = 1_800_000_000;
//! log.record(Evidence::new(evaluator, "prose", paid, now, outcome), now)?;
//! assert!(log.records().iter().any(|record| record.evaluator == evaluator));
//! # Ok::<(), x402_market::evidence::EvidenceError>(())
//! ```

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    io,
    ops::Bound::{Excluded, Unbounded},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use tower_x402::{
    Network, Usdc,
    client::{JournalFile, Receipt},
    vouchers::{ChannelConfig, ChannelId, Escrow},
};

use super::{lock::lock, message::json_line, skills::Skill, submission::MAX_OUTPUTS};

/// How far ahead the clocks of others may be, in seconds.
const MAX_CLOCK_SKEW: u64 = 300;
/// The longest name of a skill, in bytes.
pub const MAX_SKILL_BYTES: usize = 128;

/// The result of a call to an evaluator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
#[non_exhaustive]
pub enum CallOutcome {
    /// A valid evaluation.
    #[non_exhaustive]
    Answered {
        /// How it ordered pairs of outputs, if it was audited.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pairs: Option<Pairs>,
    },
    /// An answer that is no valid evaluation.
    #[serde(rename = "garbage")]
    InvalidAnswer,
    /// No answer in time.
    Timeout,
    /// A demand for another price than on the card.
    #[serde(rename = "priceLie")]
    PriceMismatch,
    /// A demand for a payment to another address than on the card.
    #[serde(rename = "payeeLie")]
    PayeeMismatch,
    /// A demand for a token that is not on the card.
    #[serde(rename = "tokenLie")]
    TokenMismatch,
}

impl CallOutcome {
    /// Creates the outcome of a valid evaluation, with the pairs that it ordered if it was audited.
    pub const fn answered(pairs: Option<Pairs>) -> Self {
        Self::Answered { pairs }
    }

    /// Returns how an audited evaluation ordered pairs of outputs.
    pub const fn pairs(&self) -> Option<Pairs> {
        match self {
            Self::Answered { pairs } => *pairs,
            _ => None,
        }
    }
}

/// How an audited evaluation ordered the pairs of a good and a bad output.
///
/// ```
/// use x402_market::evidence::Pairs;
///
/// let scores = [0.4, 0.1, 0.1, 0.4];
/// let pairs = Pairs::of(&scores, &[true, false, true, true]).unwrap();
/// assert_eq!((pairs.right(), pairs.wrong(), pairs.all()), (2, 0, 3), "one pair has equal scores");
/// assert!((pairs.worth() - 2.0 / 3.0).abs() < 1e-12);
/// assert_eq!(Pairs::of(&scores, &[true; 4]), None, "outputs that are equally good show nothing");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "PairsJson")]
pub struct Pairs {
    right: u32,
    wrong: u32,
    all: u32,
}

#[derive(Deserialize)]
struct PairsJson {
    right: u32,
    wrong: u32,
    all: u32,
}

impl Pairs {
    /// The most pairs of one evaluation: 32 good and 32 bad outputs.
    pub const MAX: u32 = (MAX_OUTPUTS * MAX_OUTPUTS / 4) as u32;

    /// Creates counts of pairs: in which the good output has the higher score, in which the bad one has, and in all. Returns `None` unless
    /// there are 1 to [`MAX`](Self::MAX), and as many as the other two together.
    pub const fn new(right: u32, wrong: u32, all: u32) -> Option<Self> {
        match right.checked_add(wrong) {
            Some(ordered) if ordered <= all && 1 <= all && all <= Self::MAX => Some(Self { right, wrong, all }),
            _ => None,
        }
    }

    /// Counts the pairs of outputs with these scores, of which `good` says whether they are good. Returns `None` if there is no pair.
    pub fn of(scores: &[f64], good: &[bool]) -> Option<Self> {
        let of =
            |wanted: bool| scores.iter().zip(good).filter(move |(_, good)| **good == wanted).map(|(score, _)| score);
        let (mut right, mut wrong, mut all) = (0, 0, 0);
        for (better, worse) in of(true).flat_map(|better| of(false).map(move |worse| (better, worse))) {
            right += u32::from(better > worse);
            wrong += u32::from(better < worse);
            all += 1;
        }
        Self::new(right, wrong, all)
    }

    /// Returns the number of pairs in which the good output has the higher score.
    pub const fn right(self) -> u32 {
        self.right
    }

    /// Returns the number of pairs in which the bad output has the higher score.
    pub const fn wrong(self) -> u32 {
        self.wrong
    }

    /// Returns the number of pairs, those with equal scores included.
    pub const fn all(self) -> u32 {
        self.all
    }

    /// Returns the ordering advantage D, from -1 to 1: the share of pairs ordered rightly, minus that ordered wrongly. It is 0 for equal
    /// scores, and on average for scores at random.
    pub fn worth(self) -> f64 {
        (f64::from(self.right) - f64::from(self.wrong)) / f64::from(self.all)
    }

    /// Returns how many independent comparisons the pairs count as, for and against the evaluator.
    ///
    /// Pairs of one group share outputs, so *n*·*m* of them say less than as many comparisons of different outputs. The variance of the
    /// share ordered rightly by a coin is (*n*+*m*+1) / 12*nm*, that of 3*nm* / (*n*+*m*+1) independent comparisons. Only the product is
    /// known; the sum is taken as if *n* = *m*.
    pub fn comparisons(self) -> [f32; 2] {
        let all = f64::from(self.all);
        let comparisons = 3.0 * all / (2.0 * all.sqrt() + 1.0);
        [0.5, -0.5].map(|half| (comparisons * (0.5 + half * self.worth())) as f32)
    }
}

impl TryFrom<PairsJson> for Pairs {
    type Error = &'static str;

    fn try_from(PairsJson { right, wrong, all }: PairsJson) -> Result<Self, Self::Error> {
        Self::new(right, wrong, all).ok_or("right and wrong exceed all, or all is outside 1..=1024")
    }
}

/// The payer and the nonce, which identify a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EvidencePayment {
    /// The address that paid.
    pub payer: Address,
    /// The nonce of the authorization, or that of a [`ChannelCharge`].
    pub nonce: B256,
}

/// The charge on a payment channel that paid for a call by voucher.
///
/// With the amount paid it is a part of what the seller claims of the channel: the part that ends at `charged`. Parts of different calls
/// do not overlap, so anybody can compare them with what was claimed on the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelCharge {
    /// The channel. Its payer paid, and its receiver is the evaluator.
    pub channel: ChannelConfig,
    /// What was charged in the channel in all, this call included.
    pub charged: Usdc,
}

impl ChannelCharge {
    /// Returns the charge that a receipt is about, or `None` if nothing was charged by voucher.
    pub fn of(receipt: &Receipt) -> Option<Self> {
        let channel = receipt.channel.as_ref()?;
        let is_charged = receipt.outcome.is_paid() && receipt.amount > Usdc::ZERO;
        is_charged.then_some(Self { channel: channel.config, charged: channel.charged })
    }

    /// Returns the channel's id on this chain.
    pub fn channel_id(&self, network: Network) -> ChannelId {
        Escrow::on(network).channel_id(&self.channel)
    }

    /// Returns what identifies the payment. The nonce is the EIP-712 digest of a voucher over [`charged`](Self::charged), so it depends on
    /// the chain and on every field of the channel.
    pub fn payment(&self, network: Network) -> EvidencePayment {
        let escrow = Escrow::on(network);
        let nonce = escrow.voucher_digest(escrow.channel_id(&self.channel), self.charged.atomic().into());
        EvidencePayment { payer: self.channel.payer, nonce }
    }
}

/// A record of one call to an evaluator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Evidence {
    /// The payment for the call. Evidence without one counts only for the student that recorded it: a price mismatch that was found before
    /// anything was signed, or a call for which a voucher was signed and nothing charged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payment: Option<EvidencePayment>,
    /// The charge on a payment channel, if the payment was made by voucher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charge: Option<ChannelCharge>,
    /// The address that is paid.
    pub evaluator: Address,
    /// The skill, in at most 128 bytes.
    pub skill: String,
    /// The time, in seconds since the Unix epoch.
    pub at: u64,
    /// The amount paid.
    pub paid: Usdc,
    /// The result.
    pub outcome: CallOutcome,
}

impl Evidence {
    /// Creates a record of a call without a payment. `evaluator` is the address that is paid, `at` the time in seconds since the Unix
    /// epoch.
    pub fn new(evaluator: Address, skill: impl Into<String>, paid: Usdc, at: u64, outcome: CallOutcome) -> Self {
        Self { payment: None, charge: None, evaluator, skill: skill.into(), at, paid, outcome }
    }

    /// Sets the payment for the call, or the charge if it was paid by voucher, from the receipt.
    #[must_use]
    pub fn with_receipt(self, receipt: &Receipt) -> Self {
        let charge = ChannelCharge::of(receipt);
        let payment = match charge {
            Some(charge) => Some(charge.payment(receipt.network)),
            None if receipt.is_by_voucher() => None,
            None => Some(EvidencePayment { payer: receipt.payer, nonce: receipt.nonce }),
        };
        Self { payment, charge, ..self }
    }

    /// Sets the payment for the call, by an authorization. See [`with_receipt`](Self::with_receipt) for vouchers.
    #[must_use]
    pub const fn with_payment(mut self, payment: EvidencePayment) -> Self {
        self.payment = Some(payment);
        self.charge = None;
        self
    }

    /// Returns the charge, and where the part of the channel begins that it ends.
    pub fn charged_part(&self) -> Option<(&ChannelCharge, Usdc)> {
        let charge = self.charge.as_ref()?;
        Some((charge, charge.charged.checked_sub(self.paid).unwrap_or(Usdc::ZERO)))
    }

    /// Returns the observation for a selector, in which the skill has this number.
    pub const fn observation(&self, skill: Skill) -> Observation {
        Observation { evaluator: self.evaluator, skill, paid: self.paid, outcome: self.outcome }
    }
}

/// The result of one request to one evaluator.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Observation {
    /// The address that is paid.
    pub evaluator: Address,
    /// The skill of the task.
    pub skill: Skill,
    /// The amount paid, zero for some failures.
    pub paid: Usdc,
    /// The result.
    pub outcome: CallOutcome,
}

impl Observation {
    /// Creates an observation. `evaluator` is the address that is paid.
    pub const fn new(evaluator: Address, skill: Skill, paid: Usdc, outcome: CallOutcome) -> Self {
        Self { evaluator, skill, paid, outcome }
    }
}

/// A log of evidence, in memory or in a file with one JSON object per line.
///
/// A record is written to the file before it counts, so that the end of the process loses none. It is not flushed to disk: a crash of the
/// machine may lose the last records, unless [`sync`](Self::sync) was called. An incomplete last line is removed when the file is opened. The
/// file is locked against other processes, and readable by its owner only (on Unix).
///
/// The log keeps the last records, up to its capacity. The file is rewritten when it holds twice as many. Records older than a dropped one
/// are refused, so that no payment counts again after it was dropped.
///
/// Clones are the same log.
#[derive(Clone)]
pub struct EvidenceLog(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    capacity: usize,
    records: VecDeque<Evidence>,
    /// The payments of all records.
    payments: HashSet<EvidencePayment>,
    charges: Charges,
    exploration_cost: Usdc,
    /// The time of the newest dropped record. Whether a record as old as that was in the log before is not known.
    dropped_until: Option<u64>,
    file: Option<JournalFile>,
    lines: usize,
    /// Refuses lines, as a full disk would.
    #[cfg(test)]
    is_full: bool,
}

/// The parts of payment channels that paid for records: where each ends, and where it begins. They do not overlap.
#[derive(Default)]
struct Charges(HashMap<ChannelConfig, BTreeMap<Usdc, Usdc>>);

impl Charges {
    /// Returns `true` if a part of this record's charge paid for another record.
    fn overlap(&self, evidence: &Evidence) -> bool {
        let Some((charge, begin)) = evidence.charged_part() else { return false };
        let next = self.0.get(&charge.channel).and_then(|parts| parts.range((Excluded(begin), Unbounded)).next());
        next.is_some_and(|(_, next_begin)| *next_begin < charge.charged)
    }

    fn insert(&mut self, evidence: &Evidence) {
        if let Some((charge, begin)) = evidence.charged_part() {
            self.0.entry(charge.channel).or_default().insert(charge.charged, begin);
        }
    }

    fn remove(&mut self, evidence: &Evidence) {
        let Some((charge, _)) = evidence.charged_part() else { return };
        if let Some(parts) = self.0.get_mut(&charge.channel) {
            parts.remove(&charge.charged);
            if parts.is_empty() {
                self.0.remove(&charge.channel);
            }
        }
    }
}

/// One line of the file.
#[derive(Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase")]
enum Line {
    Evidence(Box<Evidence>),
    /// A late audit of a call that is on record.
    Audited {
        payment: EvidencePayment,
        pairs: Pairs,
    },
    Dropped {
        until: u64,
    },
    #[serde(rename = "examined")]
    Explored {
        paid: Usdc,
    },
    /// When an evaluator was first seen, in logs of earlier versions. It counts no more.
    Seen,
}

impl EvidenceLog {
    /// Creates a log in memory that keeps the last `capacity` records, at least 1.
    pub fn in_memory(capacity: usize) -> Self {
        Self(Arc::new(Mutex::new(Inner { capacity: capacity.max(1), ..Inner::default() })))
    }

    /// Opens or creates the log at `path`, which keeps the last `capacity` records, at least 1.
    ///
    /// # Errors
    /// [`EvidenceError::Open`] if the file cannot be opened or another process uses it, [`EvidenceError::Line`] if it holds something else.
    pub fn open(path: impl AsRef<Path>, capacity: usize) -> Result<Self, EvidenceError> {
        let path = path.as_ref();
        let (file, text) =
            JournalFile::open(path).map_err(|source| EvidenceError::Open { path: path.into(), source })?;
        let mut inner = Inner { capacity: capacity.max(1), lines: text.lines().count(), ..Inner::default() };
        for (index, line) in text.lines().enumerate() {
            let line = serde_json::from_str(line);
            inner.apply(line.map_err(|_| EvidenceError::Line { path: path.into(), line: index + 1 })?);
        }
        inner.file = Some(file);
        Ok(Self(Arc::new(Mutex::new(inner))))
    }

    /// Adds a record. `now` is in seconds since the Unix epoch.
    ///
    /// # Errors
    /// [`EvidenceError`] if the payment is on record already, or the record is too old, from the future, out of range, or cannot be written.
    /// The record does not count then.
    pub fn record(&self, evidence: Evidence, now: u64) -> Result<(), EvidenceError> {
        let mut inner = lock(&self.0);
        inner.check(&evidence, now)?;
        Ok(inner.add(Line::Evidence(Box::new(evidence)))?)
    }

    /// Adds the result of an audit to the record of the call that this payment paid for. Returns `false` if there is no such record of a
    /// valid evaluation, or it was audited before.
    ///
    /// # Errors
    /// An I/O error if it cannot be written. It does not count then.
    pub fn audit(&self, payment: EvidencePayment, pairs: Pairs) -> io::Result<bool> {
        let mut inner = lock(&self.0);
        if inner.unaudited(payment).is_none() {
            return Ok(false);
        }
        inner.add(Line::Audited { payment, pairs }).map(|()| true)
    }

    /// Records what it cost to ask an evaluator only to learn about it ([`Selector::explore`](super::selection::Selector::explore)), so that a
    /// restarted student does not spend its [share](super::selection::ThompsonConfig::exploration_share) twice.
    ///
    /// # Errors
    /// An I/O error if it cannot be written. It is not recorded then.
    pub fn record_exploration_cost(&self, paid: Usdc) -> io::Result<()> {
        lock(&self.0).add(Line::Explored { paid })
    }

    /// Returns what exploration has cost in all, including records that were dropped.
    pub fn exploration_cost(&self) -> Usdc {
        lock(&self.0).exploration_cost
    }

    /// Waits until everything recorded is on disk.
    ///
    /// # Errors
    /// An I/O error if the disk does not take it.
    pub fn sync(&self) -> io::Result<()> {
        match &mut lock(&self.0).file {
            Some(file) => file.append(&[], true),
            None => Ok(()),
        }
    }

    /// Returns all records, in the order in which they were added.
    pub fn records(&self) -> Vec<Evidence> {
        lock(&self.0).records.iter().cloned().collect()
    }

    /// Calls `with` for every record, in the order in which they were added. `with` must not use the log, which is locked.
    pub fn for_each(&self, with: impl FnMut(&Evidence)) {
        lock(&self.0).records.iter().for_each(with);
    }

    /// Returns how many records are kept at most.
    pub fn capacity(&self) -> usize {
        lock(&self.0).capacity
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        lock(&self.0).records.len()
    }

    /// Returns `true` if there are no records.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

tower_x402::debug_fields!(EvidenceLog |this| { records: this.len() });

impl Inner {
    /// Writes a line, if there is a file. Then it counts.
    fn add(&mut self, record: Line) -> io::Result<()> {
        #[cfg(test)]
        if self.is_full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if let Some(file) = &mut self.file {
            file.append(&json_line(&record)?, false)?;
            self.lines += 1;
        }
        self.apply(record);
        self.shorten();
        Ok(())
    }

    fn apply(&mut self, record: Line) {
        match record {
            Line::Evidence(evidence) => self.keep(*evidence),
            Line::Audited { payment, pairs } => {
                if let Some(missing) = self.unaudited(payment) {
                    *missing = Some(pairs);
                }
            }
            Line::Dropped { until } => self.dropped_until = self.dropped_until.max(Some(until)),
            Line::Explored { paid } => {
                self.exploration_cost = self.exploration_cost.checked_add(paid).unwrap_or(Usdc::MAX);
            }
            Line::Seen => {}
        }
    }

    fn check(&self, evidence: &Evidence, now: u64) -> Result<(), EvidenceError> {
        if evidence.at > now.saturating_add(MAX_CLOCK_SKEW) {
            return Err(EvidenceError::Future);
        }
        if self.dropped_until.is_some_and(|until| evidence.at <= until) {
            return Err(EvidenceError::TooOld);
        }
        if self.has_payment_of(evidence) {
            return Err(EvidenceError::Duplicate);
        }
        if evidence.skill.len() > MAX_SKILL_BYTES {
            return Err(EvidenceError::LongSkill);
        }
        Ok(())
    }

    /// Returns `true` if the payment of this record, or a part of it, is on record.
    fn has_payment_of(&self, evidence: &Evidence) -> bool {
        evidence.payment.is_some_and(|payment| self.payments.contains(&payment)) || self.charges.overlap(evidence)
    }

    fn keep(&mut self, evidence: Evidence) {
        if self.has_payment_of(&evidence) {
            return;
        }
        self.payments.extend(evidence.payment);
        self.charges.insert(&evidence);
        self.records.push_back(evidence);
        if self.records.len() > self.capacity
            && let Some(dropped) = self.records.pop_front()
        {
            self.dropped_until = self.dropped_until.max(Some(dropped.at));
            if let Some(payment) = dropped.payment {
                self.payments.remove(&payment);
            }
            self.charges.remove(&dropped);
        }
    }

    /// Returns the pairs, still missing, of the valid evaluation that a payment paid for.
    fn unaudited(&mut self, payment: EvidencePayment) -> Option<&mut Option<Pairs>> {
        let record = self.records.iter_mut().rev().find(|record| record.payment == Some(payment))?;
        match &mut record.outcome {
            CallOutcome::Answered { pairs } if pairs.is_none() => Some(pairs),
            _ => None,
        }
    }

    /// Rewrites a file that holds twice as much as is kept. If that fails, the file stays as it is until the next attempt.
    fn shorten(&mut self) {
        if self.lines <= 2 * self.capacity {
            return;
        }
        let Some(file) = &mut self.file else { return };
        let dropped = self.dropped_until.map(|until| Line::Dropped { until });
        let kept = self.records.iter().cloned().map(Box::new).map(Line::Evidence);
        let paid = self.exploration_cost;
        let explored = (paid > Usdc::ZERO).then_some(Line::Explored { paid });
        let lines = dropped.into_iter().chain(explored).chain(kept);
        let lines = lines.map(|record| json_line(&record)).collect::<io::Result<Vec<_>>>();
        match lines.and_then(|lines| file.replace(&lines.concat())) {
            Ok(()) => self.lines = self.records.len() + 2,
            Err(error) => {
                tracing::warn!(%error, "could not shorten the evidence log");
                self.lines = self.capacity;
            }
        }
    }
}

/// The reason why evidence was not recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvidenceError {
    /// The payment is on record already, or a part of the charge is. Each payment supports one record.
    #[error("the payment is on record already")]
    Duplicate,
    /// The record is not newer than one that was dropped, so that it may have been on record before.
    #[error("the record is older than what the log has dropped")]
    TooOld,
    /// The evidence cannot be a report of another payer; see [`Student::add_report`](super::Student::add_report).
    #[error("a report needs a payment from another payer to another payee")]
    NotAReport,
    /// The record's time is more than five minutes ahead. Check the clocks.
    #[error("the record is from the future")]
    Future,
    /// The skill's name exceeds 128 bytes.
    #[error("the skill's name exceeds 128 bytes")]
    LongSkill,
    /// The file cannot be opened, read or locked. It is locked while another process uses it.
    #[error("could not open the log {}, which another process may be using", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A complete line of the file is not a record. Repair or move the file.
    #[error("line {line} of the log {} is not a record", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: usize,
    },
    /// The record could not be written.
    #[error("could not write the record")]
    Write(#[from] io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(number: u8, at: u64) -> Evidence {
        Evidence {
            payment: Some(EvidencePayment {
                payer: Address::repeat_byte(number % 3),
                nonce: B256::repeat_byte(number),
            }),
            charge: None,
            evaluator: Address::repeat_byte(number % 5),
            skill: if number.is_multiple_of(2) { "prose" } else { "arithmetic" }.into(),
            at,
            paid: Usdc::from_atomic(1_000),
            outcome: CallOutcome::answered(Pairs::new(number.into(), 1, 300)),
        }
    }

    fn all(log: &EvidenceLog) -> Vec<Evidence> {
        log.records()
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
    fn records_survive_a_restart() {
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

    /// The lines are as they were first written, some with what counts no more: when an evaluator was first seen, and whether single verdicts
    /// were right.
    #[test]
    fn log_as_first_written_is_opened() {
        const LINES: &str = r#"{"event":"dropped","until":1}
{"event":"seen","evaluator":"0x0202020202020202020202020202020202020202","at":2}
{"event":"evidence","payment":{"payer":"0x0202020202020202020202020202020202020202","nonce":"0x0202020202020202020202020202020202020202020202020202020202020202"},"evaluator":"0x0202020202020202020202020202020202020202","skill":"prose","at":2,"paid":"1000","outcome":{"kind":"answered","score":0.9,"confidence":0.8,"right":true}}
{"event":"examined","paid":"30"}
"#;
        let failures = [
            ("garbage", CallOutcome::InvalidAnswer),
            ("timeout", CallOutcome::Timeout),
            ("priceLie", CallOutcome::PriceMismatch),
            ("payeeLie", CallOutcome::PayeeMismatch),
            ("tokenLie", CallOutcome::TokenMismatch),
        ];
        let line = |(kind, _): &(&str, CallOutcome)| {
            let evaluator = "0x0303030303030303030303030303030303030303";
            format!(
                r#"{{"event":"evidence","evaluator":"{evaluator}","skill":"arithmetic","at":3,"paid":"1000","outcome":{{"kind":"{kind}"}}}}"#
            )
        };
        let path = Path::new();
        std::fs::write(path.file(), format!("{LINES}{}\n", failures.each_ref().map(line).join("\n"))).unwrap();
        let log = EvidenceLog::open(path.file(), 100).unwrap();
        let answered = Evidence { outcome: CallOutcome::answered(None), ..evidence(2, 2) };
        let failed = failures.map(|(_, outcome)| Evidence { payment: None, outcome, ..evidence(3, 3) });
        assert_eq!(all(&log), [vec![answered], failed.into()].concat());
        assert_eq!(log.exploration_cost().atomic(), 30);
        assert!(matches!(log.record(evidence(1, 1), 9), Err(EvidenceError::TooOld)));
    }

    #[test]
    fn late_audit_counts_once_and_survives_a_restart() {
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 100).unwrap();
        let plain = Evidence { outcome: CallOutcome::answered(None), ..evidence(1, 1) };
        let failed = Evidence { outcome: CallOutcome::InvalidAnswer, ..evidence(2, 2) };
        [&plain, &failed].into_iter().for_each(|evidence| log.record(evidence.clone(), 9).unwrap());
        let (first, other) = (Pairs::new(3, 1, 4).unwrap(), Pairs::new(0, 4, 4).unwrap());
        assert!(log.audit(plain.payment.unwrap(), first).unwrap());
        assert!(!log.audit(plain.payment.unwrap(), other).unwrap(), "it was audited");
        assert!(!log.audit(failed.payment.unwrap(), other).unwrap(), "there was no evaluation");
        assert!(!log.audit(evidence(5, 5).payment.unwrap(), other).unwrap(), "there is no record");
        drop(log);
        let log = EvidenceLog::open(path.file(), 100).unwrap();
        assert_eq!(all(&log).iter().map(|evidence| evidence.outcome.pairs()).collect::<Vec<_>>(), [Some(first), None]);
    }

    #[test]
    fn each_payment_supports_one_record() {
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
    fn each_part_of_a_channel_supports_one_record() {
        let charge = |number: u8, charged: u64, paid: u64| {
            let channel = ChannelConfig {
                payer: Address::repeat_byte(1),
                payer_authorizer: Address::ZERO,
                receiver: Address::repeat_byte(2),
                receiver_authorizer: Address::repeat_byte(3),
                token: Address::repeat_byte(4),
                withdraw_delay: 900,
                salt: B256::ZERO,
            };
            let charge = ChannelCharge { channel, charged: Usdc::from_atomic(charged) };
            let payment = Some(charge.payment(Network::BASE));
            Evidence { payment, charge: Some(charge), paid: Usdc::from_atomic(paid), ..evidence(number, number.into()) }
        };
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 2).unwrap();
        log.record(charge(1, 2_000, 1_000), 9).unwrap();
        let refused = |log: &EvidenceLog, evidence| matches!(log.record(evidence, 9), Err(EvidenceError::Duplicate));
        for (charged, paid) in [(2_000, 1), (1_001, 1_000), (1_500, 100), (2_999, 1_000), (5_000, 5_000)] {
            assert!(refused(&log, charge(2, charged, paid)), "{charged} {paid}");
        }
        log.record(charge(2, 1_000, 1_000), 9).unwrap();
        drop(log);
        let log = EvidenceLog::open(path.file(), 2).unwrap();
        assert!(refused(&log, charge(3, 1_999, 1)) && refused(&log, charge(3, 500, 1)));
        log.record(charge(3, 3_000, 1_000), 9).unwrap();
        // The first was dropped, and with it its part.
        log.record(charge(4, 1_500, 500), 9).unwrap();
    }

    #[test]
    fn incomplete_last_line_is_dropped_and_foreign_line_is_refused() {
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
    fn log_is_bounded_and_dropped_payments_do_not_count_again() {
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
    fn exploration_cost_survives_restart_and_dropping() {
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 10).unwrap();
        log.record_exploration_cost(Usdc::from_atomic(30)).unwrap();
        for number in 0..100 {
            log.record(evidence(number, u64::from(number)), 100).unwrap();
            log.record_exploration_cost(Usdc::from_atomic(1)).unwrap();
        }
        assert!(std::fs::read_to_string(path.file()).unwrap().lines().count() < 30);
        drop(log);
        assert_eq!(EvidenceLog::open(path.file(), 10).unwrap().exploration_cost().atomic(), 130);
    }

    #[test]
    fn records_out_of_range_are_refused() {
        let log = EvidenceLog::in_memory(10);
        assert!(matches!(log.record(evidence(1, 1_000), 500), Err(EvidenceError::Future)));
        let skill = "x".repeat(129);
        assert!(matches!(log.record(Evidence { skill, ..evidence(1, 1) }, 9), Err(EvidenceError::LongSkill)));
        assert!(log.is_empty());
        for pairs in [(1, 1, 1), (0, 0, 0), (u32::MAX, 1, 1), (1, 0, 1_025)] {
            assert_eq!(Pairs::new(pairs.0, pairs.1, pairs.2), None);
            let json = serde_json::json!({ "right": pairs.0, "wrong": pairs.1, "all": pairs.2 });
            assert!(serde_json::from_value::<Pairs>(json).is_err());
        }
    }

    #[test]
    fn pairs_of_one_group_count_less_than_as_many_comparisons() {
        let near = |[right, wrong]: [f32; 2], expected: [f32; 2]| {
            assert!((right - expected[0]).abs() < 1e-5 && (wrong - expected[1]).abs() < 1e-5, "{right} {wrong}");
        };
        near(Pairs::new(1, 0, 1).unwrap().comparisons(), [1.0, 0.0]);
        near(Pairs::new(0, 1, 1).unwrap().comparisons(), [0.0, 1.0]);
        near(Pairs::new(0, 0, 1).unwrap().comparisons(), [0.5, 0.5]);
        // Four good and four bad outputs: 3 · 16 / 9 comparisons.
        near(Pairs::new(12, 4, 16).unwrap().comparisons(), [4.0, 4.0 / 3.0]);
    }

    #[test]
    fn record_that_cannot_be_written_does_not_count() {
        let path = Path::new();
        let log = EvidenceLog::open(path.file(), 10).unwrap();
        lock(&log.0).is_full = true;
        assert!(matches!(log.record(evidence(1, 1), 9), Err(EvidenceError::Write(_))));
        assert!(log.is_empty());
    }
}
