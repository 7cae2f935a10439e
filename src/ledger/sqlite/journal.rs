//! Group commit: what changed in memory, written in one transaction by one thread.

use std::{
    collections::HashSet,
    fmt,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::sync::{oneshot, watch};

use super::{
    super::{LedgerError, MemoryLedger, PaymentKey, Sender},
    file::{LedgerFile, backend},
};

/// How long what nobody waits for may wait for something that somebody does wait for, to be written with it.
const LINGER: Duration = Duration::from_millis(5);

/// Which records and responses are newer in memory than on disk, and how far the disk has come.
pub(super) struct Journal {
    shared: Arc<Shared>,
    /// Closed when nothing is written any more.
    writing: watch::Receiver<()>,
}

struct Shared {
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

/// What a transaction writes. Keys only: what is written is what memory holds when it is written, so that no order of
/// changes can be confused.
#[derive(Default)]
pub(super) struct Keys {
    pub(super) payments: HashSet<PaymentKey>,
    pub(super) responses: HashSet<PaymentKey>,
    pub(super) nonces: HashSet<(Sender, u64)>,
}

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
        let shared = Arc::new(Shared { dirty: Mutex::default(), wake: Condvar::new(), commits: AtomicU64::new(0) });
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
    pub(super) fn check(&self) -> Result<(), LedgerError> {
        self.writing.has_changed().map(drop).map_err(|_| failed())
    }

    /// Returns when these changes are durable. They will be even if the caller stops waiting.
    pub(super) async fn payments_changed(&self, keys: impl IntoIterator<Item = PaymentKey>) -> Result<(), LedgerError> {
        self.changed(Changes { payments: keys.into_iter().collect(), ..Changes::default() }).await
    }

    /// The same for responses.
    pub(super) async fn responses_changed(
        &self,
        keys: impl IntoIterator<Item = PaymentKey>,
    ) -> Result<(), LedgerError> {
        self.changed(Changes { responses: keys.into_iter().collect(), ..Changes::default() }).await
    }

    /// Returns when everything that can be seen in memory now is durable.
    pub(super) async fn settled_down(&self) -> Result<(), LedgerError> {
        self.changed(Changes::default()).await
    }

    /// The same for changes of all kinds, which share one transaction: on disk are all of them or none.
    pub(super) async fn changed(&self, changes: Changes) -> Result<(), LedgerError> {
        let durable = {
            let mut dirty = self.shared.dirty();
            dirty.keys.add(changes);
            let durable = dirty.durable()?;
            // Also if it was only noted before: somebody waits for it now.
            if !dirty.keys.is_empty() {
                self.shared.wake(dirty);
            }
            durable
        };
        let Some(mut durable) = durable else { return Ok(()) };
        durable.wait_for(|durable| *durable).await.map(drop).map_err(|_| failed())
    }

    /// Has these changes written soon, and does not wait.
    pub(super) fn note(&self, changes: Changes) {
        let mut dirty = self.shared.dirty();
        let is_first = dirty.keys.is_empty();
        dirty.keys.add(changes);
        if is_first && !dirty.keys.is_empty() {
            self.shared.wake(dirty);
        }
    }
}

impl Keys {
    pub(super) fn is_empty(&self) -> bool {
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

    /// What is to be written next, once there is something; `None` if nothing will be.
    fn next(&self) -> Option<(Keys, watch::Sender<bool>)> {
        let mut dirty = self.dirty();
        dirty.current = None;
        let mut has_lingered = false;
        loop {
            match (dirty.keys.is_empty(), dirty.closed) {
                (true, true) => return None,
                (false, closed) if closed || has_lingered || dirty.done.receiver_count() > 0 => {
                    return Some(dirty.take());
                }
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
        while let Some((keys, done)) = self.shared.next() {
            let started = Instant::now();
            if let Err(error) = file.write(memory, keys) {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "the ledger's file cannot be written; it refuses everything"
                );
                // Whoever is told that this failed finds that nothing more is taken.
                drop(self);
                return drop(done);
            }
            crate::metrics::committed(started.elapsed());
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
mod tests {
    use std::pin::pin;

    use alloy_primitives::{Address, B256};
    use futures_util::FutureExt as _;

    use super::*;
    use crate::network::Network;

    fn payment(n: u8) -> PaymentKey {
        PaymentKey {
            network: Network::BASE,
            asset: Address::ZERO,
            payer: Address::repeat_byte(n),
            nonce: B256::repeat_byte(n),
        }
    }

    /// A journal whose writer is the test.
    fn journal() -> (Journal, Writer) {
        let shared = Arc::new(Shared { dirty: Mutex::default(), wake: Condvar::new(), commits: AtomicU64::new(0) });
        let (alive, writing) = watch::channel(());
        (Journal { shared: shared.clone(), writing }, Writer { shared, _alive: alive })
    }

    #[test]
    fn what_comes_before_a_transaction_begins_shares_it_and_what_comes_later_the_next() {
        let (journal, writer) = journal();
        journal.note(Changes { payments: vec![payment(1)], ..Changes::default() });
        let [mut first, mut second, mut third] = [2, 3, 4].map(|n| Box::pin(journal.payments_changed([payment(n)])));
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        let (keys, done) = writer.shared.next().expect("somebody waits");
        assert_eq!(keys.payments, [1, 2, 3].map(payment).into());
        assert!((&mut third).now_or_never().is_none());
        let mut reader = pin!(journal.settled_down());
        assert!((&mut reader).now_or_never().is_none(), "it may have seen what the third changed");
        done.send_replace(true);
        assert!(matches!((first.now_or_never(), second.now_or_never()), (Some(Ok(())), Some(Ok(())))));
        assert!((&mut third).now_or_never().is_none(), "this is not on disk");
        let (keys, done) = writer.shared.next().expect("somebody waits");
        assert_eq!(keys.payments, [payment(4)].into());
        let mut late = pin!(journal.settled_down());
        assert!((&mut late).now_or_never().is_none(), "what is being written can be seen already");
        done.send_replace(true);
        assert!(matches!((third.now_or_never(), reader.now_or_never()), (Some(Ok(())), Some(Ok(())))));
        assert!(matches!(late.now_or_never(), Some(Ok(()))));
    }

    #[test]
    fn what_nobody_waits_for_is_taken_after_a_while_and_at_the_end() {
        let (journal, writer) = journal();
        let note = |n| journal.note(Changes { payments: vec![payment(n)], ..Changes::default() });
        note(1);
        assert_eq!(writer.shared.next().expect("it was long enough").0.payments, [payment(1)].into());
        note(2);
        drop(journal);
        assert_eq!(writer.shared.next().expect("before it ends").0.payments, [payment(2)].into());
        assert!(writer.shared.next().is_none());
    }

    #[test]
    fn a_writer_that_is_gone_is_waited_for_by_nobody() {
        let (journal, writer) = journal();
        let mut before = Box::pin(journal.payments_changed([payment(1)]));
        assert!((&mut before).now_or_never().is_none());
        drop(writer);
        assert!(matches!(before.now_or_never(), Some(Err(LedgerError::Backend(_)))));
        assert!(journal.check().is_err());
        assert!(matches!(journal.settled_down().now_or_never(), Some(Err(LedgerError::Backend(_)))));
    }
}
