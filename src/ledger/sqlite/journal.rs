//! Group commit: what changed in memory, written in one transaction by one thread.

use std::{
    collections::HashSet,
    fmt,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::sync::{oneshot, watch};

use super::{
    super::{LedgerError, MemoryLedger, Sender},
    batch::Batch,
    file::{LedgerFile, backend},
};
use crate::payment::PaymentKey;

/// How long what nobody waits for may wait for something that somebody does wait for, to be written with it.
const LINGER: Duration = Duration::from_millis(5);

/// Which records and responses are newer in memory than on disk, and how far the disk has come.
pub(super) struct Journal {
    shared: Arc<Shared>,
    /// Closed when nothing is written any more.
    writing: watch::Receiver<()>,
}

#[derive(Default)]
struct Shared {
    /// Shared by those who change memory, each until its change is among the keys; the writer's alone while it copies what it will
    /// write. So what is written together was true at one time: never a payment with its response on the way.
    changing: RwLock<()>,
    dirty: Mutex<Dirty>,
    wake: Condvar,
    commits: AtomicU64,
}

/// What one call changed.
#[derive(Default)]
pub(super) struct Changes {
    pub(super) payments: Vec<PaymentKey>,
    pub(super) responses: Vec<PaymentKey>,
    pub(super) nonces: Vec<(Sender, u64)>,
}

/// Of what changed. Keys only: what is written is what memory holds when it is copied, so that no order of changes can be confused.
#[derive(Default)]
pub(super) struct Keys {
    pub(super) payments: HashSet<PaymentKey>,
    pub(super) responses: HashSet<PaymentKey>,
    pub(super) nonces: HashSet<(Sender, u64)>,
}

/// A change of memory that is under way: what is written has all of it, or nothing.
pub(super) struct Change<'a> {
    shared: &'a Shared,
    _under_way: RwLockReadGuard<'a, ()>,
}

/// Tells when something is on disk.
#[must_use]
pub(super) struct OnDisk(Option<Durable>);

/// What is not on disk.
#[derive(Default)]
struct Dirty {
    /// What the next transaction writes.
    keys: Keys,
    /// Tells those who wait for it, and only those, that it is on disk; closed if that will never be.
    done: watch::Sender<bool>,
    /// The same of the transaction that is being written.
    current: Option<Durable>,
    /// Whether the writer waits to be woken.
    is_idle: bool,
    closed: bool,
    /// Nothing is written any more.
    ended: bool,
}

type Durable = watch::Receiver<bool>;

/// Tells when the writer ends, for whatever reason.
struct Writer {
    shared: Arc<Shared>,
    _alive: watch::Sender<()>,
}

impl Journal {
    /// Opens the file, brings what it holds into memory, and starts to write: in a thread of its own, since a commit keeps a thread
    /// waiting for the disk, and since whoever waits for it should not also wait for a runtime that has other things to do.
    pub(super) async fn open(path: &Path, memory: Arc<MemoryLedger>) -> Result<Self, LedgerError> {
        let shared = Arc::new(Shared::default());
        let (alive, writing) = watch::channel(());
        let writer = Writer { shared: shared.clone(), _alive: alive };
        let (opened, is_open) = oneshot::channel();
        let path = path.to_owned();
        let dispatch = tracing::dispatcher::get_default(Clone::clone);
        let run = move || {
            let _log = tracing::dispatcher::set_default(&dispatch);
            match LedgerFile::open(&path, &memory) {
                Ok((file, gone)) => {
                    writer.shared.dirty().keys.responses.extend(gone);
                    // Whoever opened it may have stopped waiting; then nothing will come, and it is closed.
                    let _ = opened.send(Ok(()));
                    writer.write(file, &memory);
                }
                Err(error) => drop(opened.send(Err(error))),
            }
        };
        let journal = Self { shared, writing };
        thread::Builder::new().name("x402-ledger".into()).spawn(run).map_err(backend)?;
        is_open.await.unwrap_or_else(|_| Err(failed()))?;
        Ok(journal)
    }

    pub(super) fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    /// Writes what is left and lets go of the file.
    pub(super) async fn close(&self) {
        self.shared.close();
        let mut writing = self.writing.clone();
        while writing.changed().await.is_ok() {}
    }

    /// Refuses to go on once the disk has fallen behind for good, or the file was let go of.
    fn check(&self) -> Result<(), LedgerError> {
        self.writing.has_changed().map(drop).map_err(|_| failed())
    }

    /// Begins to change memory. Nothing is written until it is said what has changed.
    pub(super) fn begin(&self) -> Result<Change<'_>, LedgerError> {
        self.check()?;
        Ok(Change { shared: &self.shared, _under_way: self.shared.under_way() })
    }

    /// Returns when everything that could be seen in memory before is durable.
    pub(super) async fn settled_down(&self) -> Result<(), LedgerError> {
        // Some of it may not be among the keys yet.
        drop(self.shared.nothing_under_way());
        self.shared.write(Changes::default())?.wait().await
    }
}

impl Change<'_> {
    /// Has it written soon, and nobody waits.
    pub(super) fn note(self, changes: Changes) {
        let mut dirty = self.shared.dirty();
        let is_first = dirty.keys.is_empty();
        dirty.keys.add(changes);
        if is_first && !dirty.keys.is_empty() {
            self.shared.wake(dirty);
        }
    }

    /// Has it written, whether the caller waits for that or not: on disk is all of it or nothing.
    pub(super) fn write(self, changes: Changes) -> Result<OnDisk, LedgerError> {
        self.shared.write(changes)
    }
}

impl OnDisk {
    pub(super) async fn wait(self) -> Result<(), LedgerError> {
        let Some(mut durable) = self.0 else { return Ok(()) };
        durable.wait_for(|durable| *durable).await.map(drop).map_err(|_| failed())
    }
}

impl Changes {
    pub(super) fn of_payments(keys: impl IntoIterator<Item = PaymentKey>) -> Self {
        Self { payments: keys.into_iter().collect(), ..Self::default() }
    }
}

impl Keys {
    fn is_empty(&self) -> bool {
        self.payments.is_empty() && self.responses.is_empty() && self.nonces.is_empty()
    }

    fn add(&mut self, changes: Changes) {
        self.payments.extend(changes.payments);
        self.responses.extend(changes.responses);
        self.nonces.extend(changes.nonces);
    }
}

impl Dirty {
    /// What tells that everything is on disk that has been added until now; `None` if it is.
    fn durable(&self) -> Result<Option<Durable>, LedgerError> {
        match self.keys.is_empty() {
            _ if self.ended => Err(failed()),
            true => Ok(self.current.clone()),
            false => Ok(Some(self.done.subscribe())),
        }
    }

    /// What is to be written now, and what tells that it was; others gather meanwhile.
    fn take(&mut self) -> (Keys, watch::Sender<bool>) {
        let done = std::mem::take(&mut self.done);
        self.current = Some(done.subscribe());
        (std::mem::take(&mut self.keys), done)
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("commits", &self.commits()).finish_non_exhaustive()
    }
}

impl Shared {
    fn dirty(&self) -> MutexGuard<'_, Dirty> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn under_way(&self) -> RwLockReadGuard<'_, ()> {
        self.changing.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn nothing_under_way(&self) -> RwLockWriteGuard<'_, ()> {
        self.changing.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut dirty = self.dirty();
        dirty.closed = true;
        self.wake(dirty);
    }

    /// Has the writer look again, if it does not in any case.
    fn wake(&self, mut dirty: MutexGuard<'_, Dirty>) {
        if std::mem::take(&mut dirty.is_idle) {
            drop(dirty);
            self.wake.notify_one();
        }
    }

    /// Puts these among what is written, and returns what tells when all of it is on disk.
    fn write(&self, changes: Changes) -> Result<OnDisk, LedgerError> {
        let mut dirty = self.dirty();
        dirty.keys.add(changes);
        let durable = dirty.durable()?;
        // Also if it was only noted before: somebody waits for it now.
        if !dirty.keys.is_empty() {
            self.wake(dirty);
        }
        Ok(OnDisk(durable))
    }

    /// What is to be written next, once there is something; `None` if nothing will be.
    fn next(&self, memory: &MemoryLedger) -> Option<(Batch, watch::Sender<bool>)> {
        if !self.is_something_due() {
            return None;
        }
        let _alone = self.nothing_under_way();
        let (keys, done) = self.dirty().take();
        Some((Batch::of(keys, memory), done))
    }

    /// Waits until there is something to be written; whether there will be.
    fn is_something_due(&self) -> bool {
        let mut dirty = self.dirty();
        dirty.current = None;
        let mut has_lingered = false;
        loop {
            match (dirty.keys.is_empty(), dirty.closed) {
                (true, true) => return false,
                (false, closed) if closed || has_lingered || dirty.done.receiver_count() > 0 => return true,
                (is_empty, _) => {
                    dirty.is_idle = true;
                    (dirty, has_lingered) = self.wait(dirty, (!is_empty).then_some(LINGER));
                    dirty.is_idle = false;
                }
            }
        }
    }

    /// Until there is something new; whether it took too long.
    fn wait<'a>(&self, dirty: MutexGuard<'a, Dirty>, at_most: Option<Duration>) -> (MutexGuard<'a, Dirty>, bool) {
        match at_most {
            None => (self.wake.wait(dirty).unwrap_or_else(PoisonError::into_inner), false),
            Some(at_most) => {
                let (dirty, timeout) = self.wake.wait_timeout(dirty, at_most).unwrap_or_else(PoisonError::into_inner);
                (dirty, timeout.timed_out())
            }
        }
    }
}

impl Writer {
    fn write(self, mut file: LedgerFile, memory: &MemoryLedger) {
        while let Some((batch, done)) = self.shared.next(memory) {
            let started = Instant::now();
            if let Err(error) = file.write(batch) {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "the ledger's file cannot be written; it refuses everything"
                );
                // Whoever is told that this failed finds that nothing more is taken.
                drop(self);
                return drop(done);
            }
            crate::telemetry::committed(started.elapsed());
            self.shared.commits.fetch_add(1, Ordering::Relaxed);
            done.send_replace(true);
        }
        file.close();
    }
}

impl Drop for Writer {
    /// Whoever waits now, or will, waits for nothing.
    fn drop(&mut self) {
        *self.shared.dirty() = Dirty { ended: true, closed: true, ..Dirty::default() };
    }
}

fn failed() -> LedgerError {
    LedgerError::Backend("the file could not be written; restart the process when it can be".into())
}

#[cfg(test)]
mod tests;
