//! The record of signed payments, in memory or in a file.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use alloy_primitives::{Address, B256, keccak256};
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedMutexGuard, oneshot};
use url::Url;

use super::{
    JournalFile, PaymentError, PaymentOutcome,
    channels::{Books, ChannelEntry},
    journal_queue::{Write, WriteQueue},
    totals::{Charge, PaidTotals, host_of},
};
use crate::{clock::Nonces, network::Network, permit2::Permit, protocol::Version, usdc::Usdc};

/// The file is compacted at this length, in bytes, or at four times its length after the last time.
const COMPACT_AT: u64 = 1 << 20;
/// How many resolved payments are remembered for [`Journal::was_paid`].
const MAX_RESOLVED: usize = 1 << 12;
/// How many named purchases that were paid are kept.
const MAX_PURCHASES: usize = 1 << 14;
/// How long after `validBefore` an authorization is taken to be void, in seconds: the clocks of client and chain may differ by this.
const EXPIRY_MARGIN: u64 = 60;

/// The record of every signed payment. Each is recorded before it is sent.
///
/// A journal in memory knows what this process has left open. A journal in a file survives the process: a
/// [`Budget`](super::Budget) built on it counts its paid entries as spent and its open ones as reserved. Each signature is on disk
/// (`fsync`) before its payment is sent. Outcomes are written without waiting for the disk; a lost outcome leaves its payment open,
/// which is the safe side.
///
/// # The file
///
/// The file has one JSON object per line. It holds open payments as they were sent, so that they can be presented again. Such a
/// payment is money until it expires: the file is readable by its owner only (on Unix), a second process cannot open it, and `Debug`
/// shows no payment.
///
/// Paid entries are summed up when the file is opened and when it has grown, so that it holds what is open and one more line. The
/// sums are by payee, by host and by time: to the second for the last day, by the hour before that. The payments of
/// [named purchases](super::Purchase::named) are kept after they were paid, so that their answers can be asked for again.
#[derive(Clone)]
pub struct Journal(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Held while the disk is written, so it is only locked on threads that may block. Locked before `state`.
    file: Option<Mutex<OpenFile>>,
    /// What waits to be written to the file.
    queue: Arc<WriteQueue>,
    state: Mutex<State>,
    /// Held while a request of a named purchase is under way.
    purchase_locks: Mutex<BTreeMap<B256, Weak<tokio::sync::Mutex<()>>>>,
}

struct OpenFile {
    file: JournalFile,
    compact_at: u64,
}

impl Journal {
    /// Creates a journal that ends with the process.
    pub fn in_memory() -> Self {
        Self(Arc::default())
    }

    /// Opens or creates the journal at `path`.
    ///
    /// An incomplete last line is removed: it was being written when a process died, and its payment was not sent yet.
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
            state.apply(record);
        }
        let mut file = OpenFile { compact_at: COMPACT_AT.max(4 * file.length()), file };
        let is_compactable = text.lines().count() > state.lines();
        let state = Mutex::new(state);
        if is_compactable {
            file.compact(&state);
        }
        Ok(Self(Arc::new(Inner { file: Some(Mutex::new(file)), state, ..Inner::default() })))
    }

    /// Returns the payments without a proven outcome, ordered by nonce. Payments under way are among them.
    pub fn unresolved(&self) -> Vec<JournalEntry> {
        self.state().open.values().cloned().collect()
    }

    /// Returns whether the payment with this authorization nonce was made, if its outcome was found out after its answer: by
    /// `reconcile`, by `reconcile_with_servers`, or because a failed payment expired.
    ///
    /// Returns `None` for payments that their answer closed and for [unresolved](Self::unresolved) ones. Only the last 4,096 results
    /// of this process are kept.
    pub fn was_paid(&self, nonce: B256) -> Option<bool> {
        self.state().resolved.iter().find(|(known, _)| *known == nonce).map(|(_, paid)| *paid)
    }

    /// Returns the sums of paid entries, for a budget to start from.
    pub(super) fn paid(&self) -> PaidTotals {
        self.state().paid.clone()
    }

    /// Removes and returns payments that a server called failed, or charged for less than was signed, and that have expired since. They were
    /// charged what the server said.
    pub(super) fn take_expired(&self, now: u64) -> Vec<JournalEntry> {
        let mut state = self.state();
        let valid = state.failed.split_off(&(now.saturating_add(1), B256::ZERO));
        let expired = std::mem::replace(&mut state.failed, valid);
        let mut entries: Vec<_> = expired.iter().filter_map(|(_, nonce)| state.open.remove(nonce)).collect();
        for entry in &mut entries {
            let is_paid = *entry.charged.get_or_insert(Usdc::ZERO) > Usdc::ZERO;
            state.remember_resolved(entry.nonce, is_paid);
            state.conclude(entry, is_paid);
        }
        entries
    }

    /// Waits until no other request of a named purchase is under way.
    pub(super) async fn lock_purchase(&self, key: B256) -> OwnedMutexGuard<()> {
        let purchase = {
            let mut locks = lock(&self.0.purchase_locks);
            let known = locks.get(&key).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                locks.retain(|_, lock| lock.strong_count() > 0);
                let new = Arc::default();
                locks.insert(key, Arc::downgrade(&new));
                new
            })
        };
        purchase.lock_owned().await
    }

    /// Returns a secret that only a named purchase has. It is the same for the same key, also after a restart.
    pub(super) async fn purchase_id(&self, key: B256, random: &dyn Nonces) -> Result<B256, PaymentError> {
        let known = self.state().secret;
        let secret = match known {
            Some(secret) => secret,
            None => {
                let keep =
                    |journal: &Self, record, written: io::Result<()>| written.map(|()| drop(journal.apply(record)));
                let secret = random.next()?;
                self.append(Record::Secret { secret }, true, keep).await.map_err(PaymentError::Journal)?;
                // The first of two that were written at once counts.
                self.state().secret.unwrap_or(secret)
            }
        };
        Ok(keccak256([secret.as_slice(), key.as_slice()].concat()))
    }

    /// Returns the payment of a named purchase, and whether it was paid.
    pub(super) fn purchase(&self, key: B256) -> Option<(JournalEntry, bool)> {
        let state = self.state();
        let entry = state.purchases.get(&key)?;
        let open = state.open.get(&entry.nonce);
        let is_paid = open.is_none_or(|open| open.charged.is_some_and(|charged| charged > Usdc::ZERO));
        Some((open.unwrap_or(entry).clone(), is_paid))
    }

    /// Remembers the outcome of a payment that its answer did not close.
    #[cfg(any(feature = "onchain", feature = "reqwest"))]
    pub(super) fn remember_resolved(&self, nonce: B256, paid: bool) {
        self.state().remember_resolved(nonce, paid);
    }

    /// Writes an outcome that [`close`](Self::close) applied, as soon as possible. A later process that does not find it takes the payment
    /// for open, which is the safe side.
    pub(super) fn write_soon(&self, outcome: Record) {
        if self.0.file.is_some()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let journal = self.clone();
            runtime.spawn(async move { journal.write_outcome(outcome).await });
        }
    }

    /// Applies an outcome in memory, and returns the payment if this closed it.
    ///
    /// A payment is closed once, by the answer to its request or by the chain, whichever comes first.
    pub(super) fn close(&self, outcome: &Record) -> Option<JournalEntry> {
        self.apply(outcome.clone())
    }

    /// Applies a record in memory, and returns the payment that it closes.
    pub(super) fn apply(&self, record: Record) -> Option<JournalEntry> {
        self.state().apply(record)
    }

    /// Writes an outcome that [`close`](Self::close) applied.
    pub(super) async fn write_outcome(&self, outcome: Record) -> io::Result<()> {
        self.append(outcome, false, |_, _, written| written).await
    }

    /// Appends a record to the file, if there is one, and calls `finish` with the record and whether it was written. If `durable`, it is on
    /// disk then.
    ///
    /// `finish` is called before any later record is written: what it changes in the state is there when the file is compacted the next
    /// time. If the caller is cancelled, either `finish` is called all the same, or it is dropped and nothing was written.
    pub(super) async fn append<T: Send + 'static>(
        &self,
        record: Record,
        durable: bool,
        finish: impl FnOnce(&Self, Record, io::Result<()>) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        if self.0.file.is_none() {
            return finish(self, record, Ok(()));
        }
        let line = match line(&record) {
            Ok(line) => line,
            Err(error) => return finish(self, record, Err(error)),
        };
        let room = match self.0.queue.room().await {
            Ok(room) => room,
            Err(error) => return finish(self, record, Err(error)),
        };
        let (finished, outcome) = oneshot::channel();
        let journal = self.clone();
        let finish = move |written| {
            let result = finish(&journal, record, written);
            // Whoever drops the journal now can open its file again at once.
            drop(journal);
            drop(finished.send(result));
        };
        if let Some(mut writer) = self.0.queue.add(Write { line, durable, finish: Box::new(finish), room }) {
            let journal = Arc::downgrade(&self.0);
            let append = move |lines: &[u8], durable| match journal.upgrade() {
                Some(inner) => Self(inner).append_lines(lines, durable),
                None => Err(io::Error::other("the journal was dropped")),
            };
            tokio::task::spawn_blocking(move || writer.run(append));
        }
        outcome.await.map_err(io::Error::other)?
    }

    /// Blocks on the disk.
    fn append_lines(&self, lines: &[u8], durable: bool) -> io::Result<()> {
        match &self.0.file {
            Some(file) => lock(file).append(lines, durable, &self.0.state),
            None => Ok(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

impl Journal {
    /// Returns the payment channels, ordered by id. A channel stays in the journal when it is empty, since another deposit continues it.
    pub fn channels(&self) -> Vec<ChannelEntry> {
        self.state().books.entries().cloned().collect()
    }

    pub(super) fn with_books<T>(&self, ask: impl FnOnce(&mut Books) -> T) -> T {
        ask(&mut self.state().books)
    }

    /// Has every later write to its file fail, as on a full disk.
    #[cfg(test)]
    pub(super) fn refuse_writes(&self, path: &Path) {
        // Opened for reading, the very file refuses to be written.
        if let (Some(file), Ok(only_read)) = (&self.0.file, std::fs::File::open(path)) {
            lock(file).file.swap(only_read);
        }
    }
}

/// No code here panics halfway through a change, so a poisoned lock guards sound data.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

debug_fields!(Journal |this| { open: this.state().open.len() });

/// A signed payment, as the journal holds it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct JournalEntry {
    /// When it was signed, in seconds since the Unix epoch.
    pub signed_at: u64,
    /// The method of the request it pays for.
    pub method: String,
    /// The URL of the request it pays for.
    pub url: String,
    /// The chain.
    pub network: Network,
    /// The token's address.
    pub asset: Address,
    /// The payer's address.
    pub payer: Address,
    /// The payee's address.
    pub pay_to: Address,
    /// The amount.
    pub amount: Usdc,
    /// When the authorization expires, in seconds since the Unix epoch.
    pub valid_before: u64,
    /// The authorization's nonce.
    pub nonce: B256,
    /// The permit, if it is paid by one. If that is [for a maximum](Permit::is_maximum), [`amount`](Self::amount) is the most that may be charged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permit: Option<Permit>,
    /// What was charged, if that is known and may be less than the amount. Of an unresolved payment it is what the seller says, who may
    /// charge all of it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charged: Option<Usdc>,
    /// The version of x402 it is paid in; [`Version::payment_header`] is the header to present it in.
    #[serde(default, skip_serializing_if = "is_default")]
    pub version: Version,
    /// The URL where the server reports the status of the payment. Always on the origin that is paid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_url: Option<String>,
    /// The hash of the purchase's key, if the caller [named](super::Purchase::named) it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purchase: Option<B256>,
    /// The hash of the request (method, URL and body) that a named purchase is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<B256>,
    /// The value of the payment header. It is money until the payment is settled or expired.
    pub payment: String,
}

/// Journals of earlier versions of this crate do not name the version.
fn is_default(version: &Version) -> bool {
    *version == Version::default()
}

impl JournalEntry {
    /// Returns what this payment takes out of a budget.
    pub(super) fn charge(&self) -> Charge {
        let host = Url::parse(&self.url).as_ref().map(host_of).unwrap_or_default();
        Charge { amount: self.amount, payee: self.pay_to, host, signed_at: self.signed_at }
    }

    /// Returns the part of that which was spent, of a payment that was made.
    pub(super) fn spent(&self) -> Charge {
        let charge = self.charge();
        Charge { amount: self.charged.map_or(charge.amount, |charged| charged.min(charge.amount)), ..charge }
    }

    /// Returns when the authorization is void by any reasonable clock.
    const fn void_at(&self) -> u64 {
        self.valid_before.saturating_add(EXPIRY_MARGIN)
    }
}

// Leaves out the payment, and the URL, which may hold a token.
debug_fields!(JournalEntry { signed_at, network, payer, pay_to, amount, valid_before, nonce });

/// An error that prevents opening a journal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The file cannot be opened, read or locked. It is locked while another process uses it.
    #[error("the journal {} cannot be opened, or is in use by another process", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// A line was not written by this crate. Repair or move the file; without it the budget starts anew.
    #[error("line {line} of the journal {} is not a journal record (column {column})", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from one.
        line: usize,
        /// The column of the first mistake. The text is not shown, since it may be secret.
        column: usize,
    },
}

/// One line of the file.
#[derive(Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase")]
pub(super) enum Record {
    /// The sum of all lines before it. If there is one, it is the first line.
    Paid(PaidTotals),
    Signed(JournalEntry),
    Outcome {
        nonce: B256,
        outcome: PaymentOutcome,
        transaction: Option<B256>,
        /// What was charged, if that is less than what was signed for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        charged: Option<Usdc>,
    },
    /// The chain proves that the payment can never be executed.
    Void {
        nonce: B256,
    },
    /// The payment of a named purchase that was paid, which [`Self::Paid`] has the sum of.
    Purchase(JournalEntry),
    /// A channel as it is now. The last record of a channel counts.
    Channel(Box<ChannelEntry>),
    /// What the ids of named purchases are made from. The first one counts.
    Secret {
        secret: B256,
    },
}

/// The result of applying all records so far.
#[derive(Clone, Default)]
struct State {
    /// Payments without a proven outcome.
    open: BTreeMap<B256, JournalEntry>,
    /// Open payments that a server called failed, by the time at which they are certainly void.
    failed: BTreeSet<(u64, B256)>,
    /// The last payments that were not closed by their answer, and whether they were paid.
    resolved: VecDeque<(B256, bool)>,
    /// The payments of named purchases, open or paid, by the hash of the key.
    purchases: BTreeMap<B256, JournalEntry>,
    /// The purchases that were paid, the oldest first.
    paid_purchases: VecDeque<B256>,
    paid: PaidTotals,
    books: Books,
    secret: Option<B256>,
}

impl State {
    fn forget_purchase(&mut self, entry: &JournalEntry) {
        if let Some(key) = entry.purchase
            && self.purchases.get(&key).is_some_and(|known| known.nonce == entry.nonce)
        {
            self.purchases.remove(&key);
        }
    }

    fn keep_paid_purchase(&mut self, entry: JournalEntry) {
        let Some(key) = entry.purchase else { return };
        self.purchases.insert(key, entry);
        self.paid_purchases.push_back(key);
        if self.paid_purchases.len() > MAX_PURCHASES
            && let Some(oldest) = self.paid_purchases.pop_front()
        {
            self.purchases.remove(&oldest);
        }
    }

    fn remember_resolved(&mut self, nonce: B256, paid: bool) {
        if self.resolved.len() == MAX_RESOLVED {
            self.resolved.pop_front();
        }
        self.resolved.push_back((nonce, paid));
    }

    /// Applies a record, and returns the payment that it closes.
    fn apply(&mut self, record: Record) -> Option<JournalEntry> {
        let mut of_permit = None;
        let (nonce, paid) = match record {
            Record::Paid(totals) => {
                self.paid = totals;
                return None;
            }
            Record::Signed(entry) => {
                if let Some(key) = entry.purchase {
                    self.purchases.insert(key, entry.clone());
                }
                self.open.insert(entry.nonce, entry);
                return None;
            }
            Record::Purchase(entry) => {
                self.keep_paid_purchase(entry);
                return None;
            }
            Record::Outcome { outcome: PaymentOutcome::Unknown | PaymentOutcome::Refused, .. } => return None,
            Record::Outcome { nonce, outcome: PaymentOutcome::Failed, charged, .. } => {
                let entry = self.open.get_mut(&nonce)?;
                entry.charged = charged.or(entry.charged);
                self.failed.insert((entry.void_at(), nonce));
                return None;
            }
            Record::Outcome { nonce, outcome: PaymentOutcome::Settled | PaymentOutcome::Accepted, charged, .. } => {
                of_permit = charged;
                (nonce, true)
            }
            Record::Void { nonce } => (nonce, false),
            Record::Channel(entry) => {
                self.books.put(entry.id(), *entry);
                return None;
            }
            Record::Secret { secret } => {
                self.secret.get_or_insert(secret);
                return None;
            }
        };
        let mut entry = self.open.remove(&nonce)?;
        entry.charged = of_permit;
        self.failed.remove(&(entry.void_at(), nonce));
        self.conclude(&entry, paid);
        Some(entry)
    }

    /// Adds up what was spent on a payment that is not open any more.
    fn conclude(&mut self, entry: &JournalEntry, paid: bool) {
        if paid {
            self.paid.add(&entry.spent());
            if entry.purchase.is_some() {
                self.keep_paid_purchase(entry.clone());
            }
        } else {
            self.forget_purchase(entry);
        }
    }

    /// Returns the number of records that [`compacted`](Self::compacted) has.
    fn lines(&self) -> usize {
        usize::from(!self.paid.is_empty())
            + self.open.len()
            + self.failed.len()
            + self.paid_purchases.len()
            + self.books.len()
            + usize::from(self.secret.is_some())
    }

    /// Returns the fewest records that lead to this state.
    fn compacted(&mut self) -> Vec<Record> {
        self.paid.compact();
        let paid = (!self.paid.is_empty()).then(|| Record::Paid(self.paid.clone()));
        let open = self.open.values().cloned().map(Record::Signed);
        let failed = self.failed.iter().map(|(_, nonce)| Record::Outcome {
            nonce: *nonce,
            outcome: PaymentOutcome::Failed,
            transaction: None,
            charged: None,
        });
        let purchases = self.paid_purchases.iter().filter_map(|key| self.purchases.get(key).cloned());
        let records = paid.into_iter().chain(purchases.map(Record::Purchase)).chain(open).chain(failed);
        let records = records.chain(self.books.entries().cloned().map(|entry| Record::Channel(Box::new(entry))));
        records.chain(self.secret.map(|secret| Record::Secret { secret })).collect()
    }
}

impl OpenFile {
    fn append(&mut self, lines: &[u8], durable: bool, state: &Mutex<State>) -> io::Result<()> {
        if self.file.length() >= self.compact_at {
            self.compact(state);
        }
        self.file.append(lines, durable)
    }

    /// Rewrites the file as its compacted records. If that fails, the file is kept as it is.
    ///
    /// The state is not locked while the disk is written. Outcomes applied meanwhile are appended afterwards by their own callers.
    fn compact(&mut self, state: &Mutex<State>) {
        let records = lock(state).compacted();
        let lines = records.iter().map(line).collect::<io::Result<Vec<_>>>();
        if let Err(error) = lines.and_then(|lines| self.file.replace(&lines.concat())) {
            tracing::warn!(%error, "the journal could not be compacted");
        }
        self.compact_at = COMPACT_AT.max(4 * self.file.length());
    }
}

fn line(record: &Record) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

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
            permit: None,
            charged: None,
            version: Version::V2,
            status_url: None,
            purchase: None,
            request: None,
            payment: "bearer-data".into(),
        }
    }

    async fn conclude(journal: &Journal, entry: &JournalEntry, outcome: PaymentOutcome) {
        let record = Record::Outcome { nonce: entry.nonce, outcome, transaction: None, charged: None };
        journal.close(&record);
        journal.write_outcome(record).await.unwrap();
    }

    impl Journal {
        async fn signed(&self, entry: JournalEntry) -> io::Result<()> {
            let budget = Budget::builder().per_payment(entry.amount).total(Usdc::MAX).journal(self.clone()).build();
            let unsent = budget.reserve(entry.charge(), 0).unwrap().record(entry).await;
            unsent.map(|mut unsent| unsent.set_sent())
        }
    }

    #[tokio::test]
    async fn budget_starts_from_what_its_journal_holds() {
        let path = TempPath::new("restart");
        {
            let journal = Journal::open(&path.0).unwrap();
            for (nonce, outcome) in [
                (1, PaymentOutcome::Settled),
                (2, PaymentOutcome::Accepted),
                (3, PaymentOutcome::Failed),
                (4, PaymentOutcome::Unknown),
            ] {
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
    async fn paid_entries_become_one_line_when_the_file_is_opened() {
        let path = TempPath::new("compact");
        let (mut sizes, mut spent) = (Vec::new(), 0);
        for life in 1..=3_u8 {
            let journal = Journal::open(&path.0).unwrap();
            for payment in 1..=20 {
                let entry = entry(life * 30 + payment, 7);
                journal.signed(entry.clone()).await.unwrap();
                conclude(&journal, &entry, PaymentOutcome::Settled).await;
                spent += 7;
            }
            let failed = entry(life, 1);
            journal.signed(failed.clone()).await.unwrap();
            conclude(&journal, &failed, PaymentOutcome::Failed).await;
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
    async fn named_purchase_is_kept_until_its_payment_is_void() {
        let path = TempPath::new("purchases");
        let key = B256::repeat_byte;
        let named = |nonce: u8| JournalEntry { purchase: Some(key(nonce)), ..entry(nonce, 5) };
        {
            let journal = Journal::open(&path.0).unwrap();
            for (nonce, outcome) in
                [(1, PaymentOutcome::Settled), (2, PaymentOutcome::Unknown), (3, PaymentOutcome::Failed)]
            {
                journal.signed(named(nonce)).await.unwrap();
                conclude(&journal, &named(nonce), outcome).await;
            }
            journal.signed(named(4)).await.unwrap();
            let void = Record::Void { nonce: named(4).nonce };
            journal.close(&void);
            journal.write_outcome(void).await.unwrap();
        }
        // As it was written, as it is compacted, and as that is read.
        for _ in 0..3 {
            let journal = Journal::open(&path.0).unwrap();
            let found =
                [1, 2, 3, 4, 5].map(|nonce| journal.purchase(key(nonce)).map(|(entry, paid)| (entry.nonce[0], paid)));
            assert_eq!(found, [Some((1, true)), Some((2, false)), Some((3, false)), None, None]);
            assert_eq!(journal.paid().spent.atomic(), 5);
        }
    }

    #[test]
    fn oldest_paid_purchases_are_forgotten_first() {
        let mut state = State::default();
        let named = |n: usize| {
            let name = B256::left_padding_from(&n.to_be_bytes());
            JournalEntry { purchase: Some(name), nonce: name, ..entry(1, 1) }
        };
        state.apply(Record::Signed(named(usize::MAX)));
        for n in 0..=MAX_PURCHASES {
            state.apply(Record::Purchase(named(n)));
        }
        assert_eq!((state.purchases.len(), state.paid_purchases.len()), (MAX_PURCHASES + 1, MAX_PURCHASES));
        let is_kept = |n: usize| state.purchases.contains_key(&named(n).nonce);
        assert!(is_kept(usize::MAX) && !is_kept(0) && is_kept(1) && is_kept(MAX_PURCHASES));
    }

    #[tokio::test]
    async fn grown_file_is_compacted_while_it_is_open() {
        let path = TempPath::new("grown");
        let journal = Journal::open(&path.0).unwrap();
        lock(journal.0.file.as_ref().unwrap()).compact_at = 4_000;
        for nonce in 0..30 {
            let entry = entry(nonce, 7);
            journal.signed(entry.clone()).await.unwrap();
            conclude(&journal, &entry, if nonce < 28 { PaymentOutcome::Settled } else { PaymentOutcome::Unknown })
                .await;
            lock(journal.0.file.as_ref().unwrap()).compact_at = 4_000;
        }
        assert!(std::fs::metadata(&path.0).unwrap().len() < 6_000);
        drop(journal);
        let journal = Journal::open(&path.0).unwrap();
        assert_eq!((journal.paid().spent.atomic(), journal.unresolved().len()), (28 * 7, 2));
    }

    #[tokio::test]
    async fn file_without_versions_is_read_and_written_unchanged() {
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

    /// The file is as it was first written, over two lives of a process: its first line sums up what the first life paid. It is never written
    /// again; a later format gets a file of its own.
    #[test]
    fn journal_as_first_written_is_read_with_every_open_payment() {
        let path = TempPath::new("first");
        std::fs::write(&path.0, include_str!("journal-0.1.0.jsonl")).unwrap();
        let of_v1 = JournalEntry {
            version: Version::V1,
            status_url: Some("http://127.0.0.1/status/6".into()),
            ..entry(6, 100_000)
        };
        let elsewhere = JournalEntry {
            signed_at: 1_001,
            url: "http://other.example/x".into(),
            pay_to: Address::repeat_byte(9),
            ..entry(8, 10_000_000)
        };
        let mut paid = PaidTotals::default();
        [entry(1, 11), elsewhere].iter().for_each(|entry| paid.add(&entry.charge()));
        // As it was written, and as it is compacted.
        for _ in 0..2 {
            let journal = Journal::open(&path.0).unwrap();
            assert_eq!(journal.unresolved(), [entry(3, 100), entry(4, 1_000), entry(5, 10_000), of_v1.clone()]);
            assert_eq!(journal.paid(), paid);
        }
        // A server called the smallest one failed. It is void a minute after it expired.
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).release_failed().build();
        for (now, reserved) in [(2_059, 111_100), (2_060, 111_000)] {
            budget.release_expired(now);
            assert_eq!(budget.reserved().atomic(), reserved);
        }
    }

    #[tokio::test]
    async fn payment_that_cannot_be_written_is_not_open_and_leaves_no_trace() {
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
    async fn unrecorded_payment_is_released_even_if_its_caller_is_cancelled() {
        let path = TempPath::new("given-up");
        let journal = Journal::open(&path.0).unwrap();
        let budget = Budget::builder().journal(journal.clone()).build();
        let good = {
            let mut file = lock(journal.0.file.as_ref().unwrap());
            let good = file.file.swap(std::fs::File::open(&path.0).unwrap());
            let reservation = budget.reserve(entry(1, 5).charge(), 0).unwrap();
            let recording = reservation.record(entry(1, 5));
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
        let reservation = budget.reserve(entry(2, 5).charge(), 0).unwrap();
        reservation.record(entry(2, 5)).await.unwrap().set_sent();
        assert_eq!((budget.reserved().atomic(), journal.unresolved().len()), (5, 1));
        let reservation = budget.reserve(entry(3, 5).charge(), 0).unwrap();
        drop(reservation.record(entry(3, 5)).await.unwrap());
        assert_eq!((budget.reserved().atomic(), journal.unresolved().len()), (5, 1), "it was not sent");
    }

    #[test]
    fn device_file_is_refused() {
        assert!(matches!(Journal::open("/dev/full"), Err(JournalError::Io { .. })));
    }

    #[tokio::test]
    async fn line_cut_by_a_crash_is_removed_and_a_foreign_line_is_an_error() {
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
    async fn file_is_private_and_opened_once() {
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
