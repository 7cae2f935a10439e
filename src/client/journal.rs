//! The record of what was signed.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use alloy_primitives::B256;

use super::{
    JournalEntry, Outcome, budget::Reservation, journal_file::JournalFile, journal_record::Record, promise::Tally,
};

/// A file is folded when it is this long, or four times as long as after the last time.
const FOLD_AT: u64 = 1 << 20;
/// How many fates are remembered.
const FATES: usize = 1 << 12;

/// Every payment that was signed, recorded before it is sent.
///
/// In memory it knows what this process has left open. In a file, one JSON object a line, it also survives the process: a
/// [`Budget`](super::Budget) built on an existing journal starts with its paid entries as spent, and with its open ones
/// as reserved. Each signature is on disk (`fsync`) before its payment is sent. An outcome is written without waiting for
/// the disk; a lost one leaves its payment open, which is the safe side.
///
/// The file holds payments as they were sent, so that an open one can be presented again. Until it has expired such a
/// payment is money: the file is created readable by its owner only (on Unix), is locked against a second process, and
/// `Debug` shows none of it. Payments that were made are folded into sums when the file is opened and when it has grown,
/// so that it is as long as what is open, plus a line. The sums are by payee, by host and by time: to the second for a day,
/// by the hour before that.
#[derive(Clone)]
pub struct Journal(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Locked while the disk is waited for, and only ever on a thread that may wait. Locked before `state`.
    file: Option<Mutex<OpenFile>>,
    state: Mutex<State>,
}

struct OpenFile {
    file: JournalFile,
    fold_at: u64,
}

/// What the lines so far add up to.
#[derive(Clone, Default)]
struct State {
    /// Payments without a proven outcome.
    open: BTreeMap<B256, JournalEntry>,
    /// Those of them that a server called failed, by the time at which they are certainly void.
    failed: BTreeSet<(u64, B256)>,
    /// Of the last payments that were open and were closed by something else than their answer: whether they were made.
    fates: VecDeque<(B256, bool)>,
    paid: Tally,
}

impl Journal {
    /// A journal that ends with the process.
    pub fn in_memory() -> Self {
        Self(Arc::default())
    }

    /// Opens or creates the journal at `path`.
    ///
    /// An incomplete last line is a record that was being written when a process died. Its payment was not sent yet, so the
    /// line is removed.
    ///
    /// # Errors
    /// See [`JournalError`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, JournalError> {
        let path = path.as_ref();
        let (file, text) = JournalFile::open(path).map_err(|source| JournalError::Io { path: path.into(), source })?;
        let mut read = State::default();
        for (index, line) in text.lines().enumerate() {
            let record = serde_json::from_str(line).map_err(|source| JournalError::Line {
                path: path.into(),
                line: index + 1,
                column: source.column(),
            })?;
            read.apply(record);
        }
        let mut file = OpenFile { fold_at: FOLD_AT.max(4 * file.length()), file };
        let is_foldable = text.lines().count() > read.lines();
        let state = Mutex::new(read);
        if is_foldable {
            file.fold(&state);
        }
        Ok(Self(Arc::new(Inner { file: Some(Mutex::new(file)), state })))
    }

    /// Payments that were signed and of which nobody has proven that they were made or never will be, in the order of
    /// their nonces. Those that are just being made are among them.
    pub fn unresolved(&self) -> Vec<JournalEntry> {
        self.state().open.values().cloned().collect()
    }

    /// What was paid so far, for a budget to start from.
    pub(super) fn paid(&self) -> Tally {
        self.state().paid.clone()
    }

    /// Takes out payments that a server called failed and that have expired since.
    pub(super) fn take_expired(&self, now: u64) -> Vec<JournalEntry> {
        let mut state = self.state();
        let valid = state.failed.split_off(&(now.saturating_add(1), B256::ZERO));
        let expired = std::mem::replace(&mut state.failed, valid);
        let entries: Vec<_> = expired.iter().filter_map(|(_, nonce)| state.open.remove(nonce)).collect();
        entries.iter().for_each(|entry| state.note_fate(entry.nonce, false));
        entries
    }

    /// Returns whether the payment with this authorization nonce was made, if its answer did not tell and this process found out since
    /// (by `reconcile` or `reconcile_with_servers`, or because a failed payment has expired).
    ///
    /// `None` for all other payments: those that their answer closed, and those that are still [unresolved](Self::unresolved). Only
    /// the last 4,096 results are kept, and none of them in the file.
    pub fn was_paid(&self, nonce: B256) -> Option<bool> {
        self.state().fates.iter().find(|(known, _)| *known == nonce).map(|(_, paid)| *paid)
    }

    /// Remembers what became of a payment that its answer did not close.
    #[cfg(any(feature = "onchain", feature = "reqwest"))]
    pub(super) fn note_fate(&self, nonce: B256, paid: bool) {
        self.state().note_fate(nonce, paid);
    }

    /// Returns when the payment is recorded and may be sent. What is set aside for it is held from then on; if it cannot be
    /// recorded, it is given back, also if nobody waits any more to hear of it.
    pub(super) async fn signed_for(
        &self,
        entry: JournalEntry,
        mut reservation: Reservation,
    ) -> io::Result<Reservation> {
        let this = self.clone();
        let write = move || {
            // From here on the signature may survive this process; losing sight of it must not free the money.
            reservation.hold();
            match this.write_signed(entry) {
                Ok(()) => Ok(reservation),
                Err(error) => {
                    reservation.release();
                    Err(error)
                }
            }
        };
        self.wherever_it_may_wait(write).await
    }

    fn write_signed(&self, entry: JournalEntry) -> io::Result<()> {
        let record = Record::Signed(entry);
        // The file stays locked until the state knows the payment: folding writes what the state knows.
        let _file = match &self.0.file {
            Some(file) => {
                let mut file = lock(file);
                file.append(&record, true, &self.0.state)?;
                Some(file)
            }
            None => None,
        };
        self.state().apply(record);
        Ok(())
    }

    /// Enters an outcome, and returns the payment if this closed it.
    ///
    /// Closing happens once, whoever finds out first: the answer to the request, or a look at the chain.
    pub(super) fn close(&self, outcome: &Record) -> Option<JournalEntry> {
        self.state().apply(outcome.clone())
    }

    /// Writes an outcome that was entered.
    pub(super) async fn closed(&self, outcome: Record) -> io::Result<()> {
        let this = self.clone();
        let write = move || match &this.0.file {
            Some(file) => lock(file).append(&outcome, false, &this.0.state),
            None => Ok(()),
        };
        self.wherever_it_may_wait(write).await
    }

    async fn wherever_it_may_wait<T: Send + 'static>(
        &self,
        write: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        match self.0.file {
            Some(_) => tokio::task::spawn_blocking(write).await.map_err(io::Error::other)?,
            None => write(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

/// Nothing in here panics halfway through a change, so a poisoned lock guards sound data.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("open", &self.state().open.len()).finish_non_exhaustive()
    }
}

impl OpenFile {
    fn append(&mut self, record: &Record, durable: bool, state: &Mutex<State>) -> io::Result<()> {
        if self.file.length() >= self.fold_at {
            self.fold(state);
        }
        self.file.append(&line(record)?, durable)
    }

    /// Rewrites the file as what it adds up to. One that cannot be rewritten goes on as it is. Nobody who asks for the state waits
    /// for the disk: what is entered meanwhile is written when this is done, by whoever entered it.
    fn fold(&mut self, state: &Mutex<State>) {
        let records = lock(state).folded();
        let folded = records.iter().map(line).collect::<io::Result<Vec<_>>>();
        if let Err(error) = folded.and_then(|lines| self.file.replace(&lines.concat())) {
            tracing::warn!(%error, "the journal could not be made shorter");
        }
        self.fold_at = FOLD_AT.max(4 * self.file.length());
    }
}

fn line(record: &Record) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

impl State {
    fn note_fate(&mut self, nonce: B256, paid: bool) {
        if self.fates.len() == FATES {
            self.fates.pop_front();
        }
        self.fates.push_back((nonce, paid));
    }

    /// Returns the payment that the record closes.
    fn apply(&mut self, record: Record) -> Option<JournalEntry> {
        let (nonce, paid) = match record {
            Record::Paid(tally) => {
                self.paid = tally;
                return None;
            }
            Record::Signed(entry) => {
                self.open.insert(entry.nonce, entry);
                return None;
            }
            Record::Outcome { outcome: Outcome::Unknown | Outcome::Refused, .. } => return None,
            Record::Outcome { nonce, outcome: Outcome::Failed, .. } => {
                let void_at = self.open.get(&nonce)?.void_at();
                self.failed.insert((void_at, nonce));
                return None;
            }
            Record::Outcome { nonce, outcome: Outcome::Settled | Outcome::Accepted, .. } => (nonce, true),
            Record::Void { nonce } => (nonce, false),
        };
        let entry = self.open.remove(&nonce)?;
        self.failed.remove(&(entry.void_at(), nonce));
        if paid {
            self.paid.add(&entry.promise());
        }
        Some(entry)
    }

    /// How many records it takes.
    fn lines(&self) -> usize {
        usize::from(!self.paid.is_empty()) + self.open.len() + self.failed.len()
    }

    /// What it adds up to, as records.
    fn folded(&mut self) -> Vec<Record> {
        self.paid.thin();
        let paid = (!self.paid.is_empty()).then(|| Record::Paid(self.paid.clone()));
        let open = self.open.values().cloned().map(Record::Signed);
        let failed = self.failed.iter().map(|(_, nonce)| Record::Outcome {
            nonce: *nonce,
            outcome: Outcome::Failed,
            transaction: None,
        });
        paid.into_iter().chain(open).chain(failed).collect()
    }
}

/// Why a journal could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The file cannot be opened, read or locked; it is locked if another process uses it.
    #[error("the journal {} cannot be opened, or is in use by another process", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A complete line that no version of this crate wrote. Repair or move the file; without it the budget starts anew.
    #[error("line {line} of the journal {} is not a journal record (column {column})", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from one.
        line: usize,
        /// Where in the line it stops making sense; the text itself may be secret.
        column: usize,
    },
}

#[cfg(test)]
mod tests {
    use alloy_primitives::Address;
    use futures_util::FutureExt as _;

    use super::*;
    use crate::{
        Network,
        client::{Budget, Receipt},
        protocol::Version,
        usdc::Usdc,
    };

    struct TempPath(PathBuf);

    impl TempPath {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("x402-journal-{name}-{}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            Self(path)
        }
    }

    impl Drop for TempPath {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn entry(nonce: u8, amount: u64) -> JournalEntry {
        JournalEntry {
            signed_at: 1_000,
            method: "POST".into(),
            url: "http://127.0.0.1/evaluate?token=private".into(),
            network: Network::BASE,
            asset: Address::ZERO,
            payer: Address::repeat_byte(1),
            pay_to: Address::repeat_byte(2),
            amount: Usdc::from_atomic(amount),
            valid_before: 2_000,
            nonce: B256::repeat_byte(nonce),
            version: Version::V2,
            status_url: None,
            payment: "bearer-data".into(),
        }
    }

    async fn conclude(journal: &Journal, entry: &JournalEntry, outcome: Outcome) {
        let receipt = Receipt {
            outcome,
            transaction: None,
            network: entry.network,
            asset: entry.asset,
            amount: entry.amount,
            payer: entry.payer,
            pay_to: entry.pay_to,
            nonce: entry.nonce,
            reason: None,
        };
        let record = Record::from(&receipt);
        journal.close(&record);
        journal.closed(record).await.unwrap();
    }

    impl Journal {
        async fn signed(&self, entry: JournalEntry) -> io::Result<()> {
            let budget = Budget::builder().per_payment(entry.amount).build();
            self.signed_for(entry.clone(), budget.reserve(entry.promise(), 0).unwrap()).await.map(drop)
        }
    }

    #[tokio::test]
    async fn a_budget_starts_where_its_journal_ended() {
        let path = TempPath::new("restart");
        {
            let journal = Journal::open(&path.0).unwrap();
            for (nonce, outcome) in
                [(1, Outcome::Settled), (2, Outcome::Accepted), (3, Outcome::Failed), (4, Outcome::Unknown)]
            {
                let entry = entry(nonce, 10_u64.pow(nonce.into()));
                journal.signed(entry.clone()).await.unwrap();
                conclude(&journal, &entry, outcome).await;
            }
            journal.signed(entry(5, 100_000)).await.unwrap();
        }
        let journal = Journal::open(&path.0).unwrap();
        let budget = Budget::builder().journal(journal.clone()).build();
        assert_eq!(budget.spent().atomic(), 110);
        assert_eq!(budget.spent_by_payee(), [(Address::repeat_byte(2), budget.spent())].into());
        assert_eq!(budget.reserved().atomic(), 111_000);
        let open: Vec<_> = journal.unresolved().iter().map(|entry| entry.amount.atomic()).collect();
        assert_eq!(open, [1_000, 10_000, 100_000]);
    }

    #[tokio::test]
    async fn what_was_paid_is_folded_into_one_line_when_the_file_is_opened() {
        let path = TempPath::new("fold");
        let (mut sizes, mut spent) = (Vec::new(), 0);
        for life in 1..=3_u8 {
            let journal = Journal::open(&path.0).unwrap();
            for payment in 1..=20 {
                let entry = entry(life * 30 + payment, 7);
                journal.signed(entry.clone()).await.unwrap();
                conclude(&journal, &entry, Outcome::Settled).await;
                spent += 7;
            }
            let failed = entry(life, 1);
            journal.signed(failed.clone()).await.unwrap();
            conclude(&journal, &failed, Outcome::Failed).await;
            drop(journal);
            let before = std::fs::read_to_string(&path.0).unwrap();
            let journal = Journal::open(&path.0).unwrap();
            let after = std::fs::read_to_string(&path.0).unwrap();
            assert!(after.lines().count() == 1 + 2 * usize::from(life) && before.lines().count() > 40);
            assert_eq!(journal.paid().spent.atomic(), spent);
            assert_eq!(journal.unresolved().len(), usize::from(life));
            assert!(Journal::open(&path.0).is_err(), "the new file is locked like the old one");
            sizes.push(after.len());
        }
        assert!(sizes[2] < 2 * sizes[1]);
    }

    #[tokio::test]
    async fn a_file_that_has_grown_is_folded_while_it_is_open() {
        let path = TempPath::new("grown");
        let journal = Journal::open(&path.0).unwrap();
        lock(journal.0.file.as_ref().unwrap()).fold_at = 4_000;
        for nonce in 0..30 {
            let entry = entry(nonce, 7);
            journal.signed(entry.clone()).await.unwrap();
            conclude(&journal, &entry, if nonce < 28 { Outcome::Settled } else { Outcome::Unknown }).await;
            lock(journal.0.file.as_ref().unwrap()).fold_at = 4_000;
        }
        assert!(std::fs::metadata(&path.0).unwrap().len() < 6_000);
        drop(journal);
        let journal = Journal::open(&path.0).unwrap();
        assert_eq!((journal.paid().spent.atomic(), journal.unresolved().len()), (28 * 7, 2));
    }

    #[tokio::test]
    async fn a_file_of_before_there_were_versions_is_read_and_written_as_it_was() {
        const LINE: &str = r#"{"event":"signed","signedAt":1000,"method":"POST","url":"http://h/","network":"eip155:8453","asset":"0x0000000000000000000000000000000000000000","payer":"0x0101010101010101010101010101010101010101","payTo":"0x0202020202020202020202020202020202020202","amount":"7","validBefore":2000,"nonce":"0x0303030303030303030303030303030303030303030303030303030303030303","payment":"p"}"#;
        let path = TempPath::new("older");
        std::fs::write(&path.0, format!("{LINE}\n")).unwrap();
        let journal = Journal::open(&path.0).unwrap();
        let older = journal.unresolved().remove(0);
        assert_eq!((older.version, older.status_url.as_ref(), older.amount.atomic()), (Version::V2, None, 7));
        assert_eq!(serde_json::to_string(&Record::Signed(older)).unwrap(), LINE);

        let newer = JournalEntry { version: Version::V1, status_url: Some("http://h/s".into()), ..entry(1, 5) };
        journal.signed(newer.clone()).await.unwrap();
        drop(journal);
        assert!(Journal::open(&path.0).unwrap().unresolved().contains(&newer));
    }

    #[tokio::test]
    async fn a_payment_that_the_disk_does_not_take_is_not_open_and_leaves_no_trace() {
        let path = TempPath::new("full");
        let journal = Journal::open(&path.0).unwrap();
        let file = || lock(journal.0.file.as_ref().unwrap());
        journal.signed(entry(1, 5)).await.unwrap();
        let whole = std::fs::read_to_string(&path.0).unwrap();
        // Opened for reading, the very file refuses to be written.
        let good = file().file.swap(std::fs::File::open(&path.0).unwrap());
        assert!(journal.signed(entry(2, 5)).await.is_err());
        assert_eq!(journal.unresolved().len(), 1);
        file().file.swap(good);
        journal.signed(entry(3, 5)).await.unwrap();
        drop(journal);
        assert!(std::fs::read_to_string(&path.0).unwrap().starts_with(&whole));
        let open: Vec<_> = Journal::open(&path.0).unwrap().unresolved().iter().map(|entry| entry.nonce[0]).collect();
        assert_eq!(open, [1, 3]);
    }

    #[tokio::test]
    async fn what_is_not_recorded_is_given_back_also_if_nobody_waits_for_it() {
        let path = TempPath::new("given-up");
        let journal = Journal::open(&path.0).unwrap();
        let budget = Budget::builder().journal(journal.clone()).build();
        let good = {
            let mut file = lock(journal.0.file.as_ref().unwrap());
            let good = file.file.swap(std::fs::File::open(&path.0).unwrap());
            let reservation = budget.reserve(entry(1, 5).promise(), 0).unwrap();
            let recording = journal.signed_for(entry(1, 5), reservation);
            assert!(recording.now_or_never().is_none(), "the file is in use");
            assert_eq!(budget.reserved().atomic(), 5, "it may be recorded yet");
            good
        };
        for _ in 0..1_000 {
            if budget.reserved() == Usdc::ZERO {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(budget.reserved(), Usdc::ZERO);

        lock(journal.0.file.as_ref().unwrap()).file.swap(good);
        let reservation = budget.reserve(entry(2, 5).promise(), 0).unwrap();
        drop(journal.signed_for(entry(2, 5), reservation).await.unwrap());
        assert_eq!((budget.reserved().atomic(), journal.unresolved().len()), (5, 1));
    }

    #[test]
    fn a_device_is_not_a_journal() {
        assert!(matches!(Journal::open("/dev/full"), Err(JournalError::Io { .. })));
    }

    #[tokio::test]
    async fn a_line_cut_by_a_crash_is_dropped_and_a_foreign_line_is_not() {
        let path = TempPath::new("torn");
        Journal::open(&path.0).unwrap().signed(entry(1, 5)).await.unwrap();
        let whole = std::fs::read_to_string(&path.0).unwrap();
        std::fs::write(&path.0, format!("{whole}{}", &whole[..40])).unwrap();
        assert_eq!(Journal::open(&path.0).unwrap().unresolved().len(), 1);
        assert_eq!(std::fs::read_to_string(&path.0).unwrap(), whole);

        std::fs::write(&path.0, format!("{whole}{{\"event\":\"other\"}}\n")).unwrap();
        assert!(matches!(Journal::open(&path.0), Err(JournalError::Line { line: 2, .. })));
    }

    #[tokio::test]
    async fn the_file_is_private_and_used_by_one_process_at_a_time() {
        let path = TempPath::new("private");
        std::fs::write(&path.0, "").unwrap();
        let journal = Journal::open(&path.0).unwrap();
        assert!(matches!(Journal::open(&path.0), Err(JournalError::Io { .. })));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(&path.0).unwrap().permissions().mode() & 0o777, 0o600);
        }
        journal.signed(entry(1, 5)).await.unwrap();
        let shown = format!("{journal:?} {:?}", journal.unresolved());
        assert!(!shown.contains("bearer-data") && !shown.contains("private"), "{shown}");
    }
}
