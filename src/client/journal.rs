//! The record of what was signed.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};

use super::{Outcome, Receipt, budget::saturating_add};
use crate::{network::Network, usdc::Usdc};

/// How long after `validBefore` an authorization is taken to be void, in seconds: the difference that the clocks of client
/// and chain may have.
const EXPIRY_MARGIN: u64 = 60;

/// Every payment that was signed, recorded before it is sent.
///
/// In memory it knows what this process has left open. In a file, one JSON object a line, it also survives the process: a
/// [`Budget`](super::Budget) built on an existing journal starts with its paid entries as spent, and with its open ones
/// as reserved. Each signature is on disk (`fsync`) before its payment is sent. An outcome is written without waiting for
/// the disk; a lost one leaves its payment open, which is the safe side.
///
/// The file holds payments as they were sent, so that an open one can be presented again. Until it has expired such a
/// payment is money: the file is created readable by its owner only (on Unix), is locked against a second process, and
/// `Debug` shows none of it.
#[derive(Clone)]
pub struct Journal(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Locked while the disk is waited for, and only ever on a thread that may wait.
    file: Option<Mutex<JournalFile>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Payments without a definite outcome.
    open: BTreeMap<B256, JournalEntry>,
    past: Past,
}

/// What earlier processes left behind, for the budget to start from.
#[derive(Default)]
pub(super) struct Past {
    pub(super) spent: Usdc,
    pub(super) unknown: Usdc,
    /// Payments that a server called failed, with the time at which they are certainly void.
    pub(super) failed: Vec<(u64, Usdc)>,
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
        let mut state = State::default();
        for (index, line) in text.lines().enumerate() {
            let record = serde_json::from_str(line).map_err(|source| JournalError::Line {
                path: path.into(),
                line: index + 1,
                column: source.column(),
            })?;
            state.replay(record);
        }
        state.past.unknown = state.open.values().fold(Usdc::ZERO, |sum, entry| saturating_add(sum, entry.amount));
        Ok(Self(Arc::new(Inner { file: Some(Mutex::new(file)), state: Mutex::new(state) })))
    }

    /// Payments that were signed and have no definite outcome, in the order of their nonces.
    pub fn unresolved(&self) -> Vec<JournalEntry> {
        self.state().open.values().cloned().collect()
    }

    pub(super) fn take_past(&self) -> Past {
        std::mem::take(&mut self.state().past)
    }

    /// Returns when the payment is recorded and may be sent.
    pub(super) async fn signed(&self, entry: JournalEntry) -> io::Result<()> {
        self.record(Record::Signed(entry), true).await
    }

    pub(super) async fn concluded(&self, receipt: &Receipt) -> io::Result<()> {
        let Receipt { nonce, outcome, transaction, .. } = *receipt;
        self.record(Record::Outcome { nonce, outcome, transaction }, false).await
    }

    async fn record(&self, record: Record, durable: bool) -> io::Result<()> {
        if self.0.file.is_none() {
            self.state().apply(record);
            return Ok(());
        }
        let this = self.clone();
        let write = move || {
            if let Some(file) = &this.0.file {
                locked(file).append(&record, durable)?;
            }
            this.state().apply(record);
            Ok(())
        };
        tokio::task::spawn_blocking(write).await.map_err(io::Error::other)?
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.0.state)
    }
}

/// Nothing in here panics halfway through a change, so a poisoned lock guards sound data.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("open", &self.state().open.len()).finish_non_exhaustive()
    }
}

impl State {
    /// Keeps the open payments; definite ones are the budget's matter, or void.
    fn apply(&mut self, record: Record) -> Option<(JournalEntry, Outcome)> {
        match record {
            Record::Signed(entry) => {
                self.open.insert(entry.nonce, entry);
                None
            }
            Record::Outcome { outcome: Outcome::Unknown, .. } => None,
            Record::Outcome { nonce, outcome, .. } => self.open.remove(&nonce).map(|entry| (entry, outcome)),
        }
    }

    fn replay(&mut self, record: Record) {
        match self.apply(record) {
            Some((entry, Outcome::Settled | Outcome::Accepted)) => {
                self.past.spent = saturating_add(self.past.spent, entry.amount);
            }
            Some((entry, Outcome::Failed)) => self.past.failed.push((entry.void_at(), entry.amount)),
            Some(_) | None => {}
        }
    }
}

/// A payment that was signed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct JournalEntry {
    /// Unix time in seconds.
    pub signed_at: u64,
    /// The method of the request it pays for.
    pub method: String,
    /// The URL of the request it pays for.
    pub url: String,
    /// The chain.
    pub network: Network,
    /// The token.
    pub asset: Address,
    /// Who pays.
    pub payer: Address,
    /// Who is paid.
    pub pay_to: Address,
    /// How much.
    pub amount: Usdc,
    /// Unix time in seconds from which the authorization is void.
    pub valid_before: u64,
    /// The authorization's nonce.
    pub nonce: B256,
    /// The value of the `PAYMENT-SIGNATURE` header: money until it is used or void.
    pub payment: String,
}

impl JournalEntry {
    /// When the authorization is void by any reasonable clock.
    pub(super) const fn void_at(&self) -> u64 {
        self.valid_before.saturating_add(EXPIRY_MARGIN)
    }
}

impl fmt::Debug for JournalEntry {
    /// Without the payment itself, and without the URL, which may hold a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournalEntry")
            .field("signed_at", &self.signed_at)
            .field("network", &self.network)
            .field("payer", &self.payer)
            .field("pay_to", &self.pay_to)
            .field("amount", &self.amount)
            .field("valid_before", &self.valid_before)
            .field("nonce", &self.nonce)
            .finish_non_exhaustive()
    }
}

/// One line.
#[derive(Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase")]
enum Record {
    Signed(JournalEntry),
    Outcome { nonce: B256, outcome: Outcome, transaction: Option<B256> },
}

/// An append-only file that never keeps half a line.
struct JournalFile {
    file: File,
    /// Up to here it holds complete lines.
    length: u64,
}

impl JournalFile {
    fn open(path: &Path) -> io::Result<(Self, String)> {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path)?;
        file.try_lock()?;
        // The file may be older than this rule.
        #[cfg(unix)]
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let complete = text.rfind('\n').map_or(0, |end| end + 1);
        if complete < text.len() {
            text.truncate(complete);
            file.set_len(complete as u64)?;
        }
        if complete == 0 {
            sync_directory_of(path)?;
        }
        Ok((Self { file, length: complete as u64 }, text))
    }

    fn append(&mut self, record: &Record, durable: bool) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        // Removes what an earlier failed write may have left; does nothing otherwise.
        self.file.set_len(self.length)?;
        self.file.write_all(&line)?;
        if durable {
            self.file.sync_data()?;
        }
        self.length += line.len() as u64;
        Ok(())
    }
}

/// A new file is only found after a crash if its directory was written too.
fn sync_directory_of(path: &Path) -> io::Result<()> {
    if cfg!(unix) {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(parent)?.sync_all()?;
    }
    Ok(())
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
    use super::*;
    use crate::client::Budget;

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
        journal.concluded(&receipt).await.unwrap();
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
        assert_eq!(budget.reserved().atomic(), 111_000);
        let open: Vec<_> = journal.unresolved().iter().map(|entry| entry.amount.atomic()).collect();
        assert_eq!(open, [10_000, 100_000]);
        budget.reserve(Usdc::ZERO, 2_000 + EXPIRY_MARGIN).unwrap();
        assert_eq!(budget.reserved().atomic(), 110_000, "the failed one is void by now");
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
