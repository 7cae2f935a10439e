//! Group commit: one thread writes what changed in memory, and changes made at the same time share one transaction.

use std::{
    collections::{HashMap, HashSet},
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
    file::{Batch, ChannelWrite, LedgerFile, PaymentWrite},
    schema::backend,
};
use crate::{payment::PaymentKey, vouchers::ChannelId};

/// How long a change that nobody waits for may wait for one that somebody waits for, to share its transaction.
const LINGER: Duration = Duration::from_millis(5);
/// The number of callers that must wait for a batch before the writer waits for more of them.
const COMPANY: usize = 4;
/// How long the writer waits for more callers at most. With 4 ms a transaction had twelve times as many, a request took 8 % less processor
/// time, and one at half the greatest load was answered after 9.5 ms instead of 1.1 ms.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The queue of changes in memory that are not on disk, and the thread that writes them.
pub(super) struct GroupCommit {
    shared: Arc<Shared>,
    /// Closed when the writer has ended.
    writing: watch::Receiver<()>,
}

#[derive(Default)]
struct Shared {
    /// Held for reading by every call that changes memory, until its change is queued, and for writing while the writer copies a batch. So a
    /// batch holds a state of memory between two changes: never a payment without the response of the same step.
    changing: RwLock<()>,
    queue: Mutex<Queue>,
    wake: Condvar,
    commits: AtomicU64,
}

/// What one call changed.
#[derive(Default)]
pub(super) struct Changes {
    /// A payment that was reserved, beside those in `payments`.
    pub(super) reserved: Option<PaymentKey>,
    pub(super) payments: Vec<PaymentKey>,
    pub(super) responses: Vec<PaymentKey>,
    pub(super) nonces: Vec<(Sender, u64)>,
    pub(super) channels: Vec<ChannelId>,
    /// A channel of which only the progress changed.
    pub(super) progress: Option<ChannelId>,
}

/// The keys of what changed. The writer copies the values when it begins a batch, so that the order of changes does not matter.
#[derive(Default)]
struct Keys {
    /// With whether the payment was reserved since the last batch.
    payments: HashMap<PaymentKey, bool>,
    responses: HashSet<PaymentKey>,
    nonces: HashSet<(Sender, u64)>,
    /// With whether more than the progress changed since the last batch.
    channels: HashMap<ChannelId, bool>,
}

/// A change of memory in progress. A batch has all of it, or nothing.
pub(super) struct Change<'a> {
    shared: &'a Shared,
    _changing: RwLockReadGuard<'a, ()>,
}

/// Waits until changes are on disk.
#[must_use]
pub(super) struct OnDisk(Option<Durable>);

#[derive(Default)]
struct Queue {
    /// What the next batch writes.
    keys: Keys,
    /// Tells those who wait for the next batch that it is on disk. Closed if that will never be.
    done: watch::Sender<bool>,
    /// The same for the batch that is being written.
    current: Option<Durable>,
    /// The channels in that batch.
    writing: HashMap<ChannelId, bool>,
    /// Whether the writer waits to be woken.
    is_idle: bool,
    closed: bool,
    /// Whether the writer has ended.
    ended: bool,
}

type Durable = watch::Receiver<bool>;

/// The writing end. Dropping it fails everybody who waits.
struct Writer {
    shared: Arc<Shared>,
    _alive: watch::Sender<()>,
}

impl GroupCommit {
    /// Opens the file, restores its contents in memory, and starts the writer. The writer has a thread of its own, because a commit
    /// blocks, and because those who wait for it should not also wait for a busy runtime.
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
                Ok((file, removed)) => {
                    writer.shared.queue().keys.responses.extend(removed);
                    // If the caller no longer waits, the queue is closed and the writer ends.
                    let _ = opened.send(Ok(()));
                    writer.run(file, &memory);
                }
                Err(error) => drop(opened.send(Err(error))),
            }
        };
        let this = Self { shared, writing };
        thread::Builder::new().name("x402-ledger".into()).spawn(run).map_err(backend)?;
        is_open.await.unwrap_or_else(|_| Err(failed()))?;
        Ok(this)
    }

    pub(super) fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    /// Writes the queue and closes the file.
    pub(super) async fn close(&self) {
        self.shared.close();
        let mut writing = self.writing.clone();
        while writing.changed().await.is_ok() {}
    }

    /// Begins a change of memory. No batch is copied until it is queued.
    ///
    /// Fails once the writer has ended: memory would then differ from the disk for good.
    pub(super) fn begin(&self) -> Result<Change<'_>, LedgerError> {
        self.writing.has_changed().map_err(|_| failed())?;
        Ok(Change { shared: &self.shared, _changing: self.shared.read_lock() })
    }

    /// Waits until everything that the caller could see in memory is on disk.
    pub(super) async fn all_on_disk(&self) -> Result<(), LedgerError> {
        // Changes that can be seen and are not queued yet.
        drop(self.shared.write_lock());
        self.shared.write(Changes::default())?.wait().await
    }

    /// Waits until everything that the caller could see of a channel in memory is on disk. Other channels do not delay it.
    pub(super) async fn channel_on_disk(&self, id: &ChannelId) -> Result<(), LedgerError> {
        drop(self.shared.write_lock());
        self.shared.channel(id)?.wait().await
    }
}

impl Change<'_> {
    /// Queues the change; nobody waits for it.
    pub(super) fn note(self, changes: Changes) {
        let mut queue = self.shared.queue();
        let was_empty = queue.keys.is_empty();
        queue.keys.add(changes);
        if was_empty && !queue.keys.is_empty() {
            self.shared.wake(queue);
        }
    }

    /// Queues the change and returns what to wait for. It is written whether the caller waits or not.
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
        self.payments.is_empty() && self.responses.is_empty() && self.nonces.is_empty() && self.channels.is_empty()
    }

    fn add(&mut self, changes: Changes) {
        for key in changes.payments {
            self.payments.entry(key).or_insert(false);
        }
        self.payments.extend(changes.reserved.map(|key| (key, true)));
        self.responses.extend(changes.responses);
        self.nonces.extend(changes.nonces);
        self.channels.extend(changes.channels.into_iter().map(|id| (id, true)));
        if let Some(id) = changes.progress {
            self.channels.entry(id).or_insert(false);
        }
    }

    /// Copies the values from memory, which must not change meanwhile.
    fn into_batch(self, memory: &MemoryLedger) -> Batch {
        let payment = |(key, is_new)| PaymentWrite { key, is_new, record: memory.snapshot(&key) };
        let channel = |(id, is_whole)| ChannelWrite { id, is_whole, record: memory.channel_snapshot(&id) };
        let nonce = |(sender, number)| (sender, number, memory.nonces().get(&sender, number).cloned());
        Batch {
            payments: self.payments.into_iter().map(payment).collect(),
            responses: self.responses.into_iter().map(|key| (key, memory.kept_response(&key))).collect(),
            nonces: self.nonces.into_iter().map(nonce).collect(),
            channels: self.channels.into_iter().map(channel).collect(),
        }
    }
}

impl Queue {
    /// Returns what tells when everything queued or being written now is on disk; `None` if it is.
    fn durable(&self) -> Result<Option<Durable>, LedgerError> {
        match self.keys.is_empty() {
            _ if self.ended => Err(failed()),
            true => Ok(self.current.clone()),
            false => Ok(Some(self.done.subscribe())),
        }
    }

    /// Takes what to write now, and what tells that it was written.
    fn take(&mut self) -> (Keys, watch::Sender<bool>) {
        let done = std::mem::take(&mut self.done);
        self.current = Some(done.subscribe());
        self.writing.clone_from(&self.keys.channels);
        (std::mem::take(&mut self.keys), done)
    }
}

impl Drop for GroupCommit {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl fmt::Debug for GroupCommit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupCommit").field("commits", &self.commits()).finish_non_exhaustive()
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_lock(&self) -> RwLockReadGuard<'_, ()> {
        self.changing.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_lock(&self) -> RwLockWriteGuard<'_, ()> {
        self.changing.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut queue = self.queue();
        queue.closed = true;
        self.wake(queue);
    }

    fn wake(&self, mut queue: MutexGuard<'_, Queue>) {
        if std::mem::take(&mut queue.is_idle) {
            drop(queue);
            self.wake.notify_one();
        }
    }

    fn write(&self, changes: Changes) -> Result<OnDisk, LedgerError> {
        let mut queue = self.queue();
        queue.keys.add(changes);
        let durable = queue.durable()?;
        // Also for changes that were only noted before: somebody waits for them now.
        if !queue.keys.is_empty() {
            self.wake(queue);
        }
        Ok(OnDisk(durable))
    }

    fn channel(&self, id: &ChannelId) -> Result<OnDisk, LedgerError> {
        let queue = self.queue();
        if queue.ended {
            return Err(failed());
        }
        if queue.keys.channels.contains_key(id) {
            let durable = queue.done.subscribe();
            self.wake(queue);
            return Ok(OnDisk(Some(durable)));
        }
        Ok(OnDisk(queue.current.clone().filter(|_| queue.writing.contains_key(id))))
    }

    /// Waits for the next batch, and copies it. Returns `None` when the queue is closed and empty. `last` is how long the last batch took.
    fn next(&self, memory: &MemoryLedger, last: Duration) -> Option<(Batch, watch::Sender<bool>)> {
        if !self.wait_for_work() {
            return None;
        }
        let waiting = self.queue().done.receiver_count();
        thread::sleep(pause_before_commit(waiting, last));
        let _exclusive = self.write_lock();
        let (keys, done) = self.queue().take();
        Some((keys.into_batch(memory), done))
    }

    /// Waits until there is something to write. Returns `false` if there never will be.
    fn wait_for_work(&self) -> bool {
        let mut queue = self.queue();
        queue.current = None;
        queue.writing.clear();
        let mut has_lingered = false;
        loop {
            match (queue.keys.is_empty(), queue.closed) {
                (true, true) => return false,
                (false, closed) if closed || has_lingered || queue.done.receiver_count() > 0 => return true,
                (is_empty, _) => {
                    queue.is_idle = true;
                    let timeout = if is_empty { Duration::MAX } else { LINGER };
                    let waited = self.wake.wait_timeout(queue, timeout).unwrap_or_else(PoisonError::into_inner);
                    (queue, has_lingered) = (waited.0, waited.1.timed_out());
                    queue.is_idle = false;
                }
            }
        }
    }
}

impl Writer {
    fn run(self, mut file: LedgerFile, memory: &MemoryLedger) {
        let mut last = Duration::ZERO;
        while let Some((batch, done)) = self.shared.next(memory, last) {
            let started = Instant::now();
            if let Err(error) = file.write(batch) {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "the ledger's file cannot be written; the ledger refuses all calls"
                );
                // First, so that those who are told of the failure find that the ledger takes nothing more.
                drop(self);
                return drop(done);
            }
            last = started.elapsed();
            crate::telemetry::committed(last);
            self.shared.commits.fetch_add(1, Ordering::Relaxed);
            done.send_replace(true);
        }
        file.close();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        *self.shared.queue() = Queue { ended: true, closed: true, ..Queue::default() };
    }
}

/// Returns how long to wait for more callers before a batch is copied. Where several wait, others are about to, and sharing a transaction
/// costs less than the next one. One that is alone, or nearly, is not delayed.
fn pause_before_commit(waiting: usize, last: Duration) -> Duration {
    if waiting < COMPANY { Duration::ZERO } else { (last / 2).min(LONGEST_PAUSE) }
}

fn failed() -> LedgerError {
    LedgerError::Backend("the file could not be written; restart the process when it can be".into())
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use alloy_primitives::{Address, B256, Bytes, U256};
    use futures_util::FutureExt as _;

    use super::*;
    use crate::{
        clock::ManualClock,
        eip3009::{Authorization, PaymentSignature},
        ledger::{
            Fingerprint, Fulfilment, FulfilmentStep, JournaledTransaction, Ledger as _, Record, Reservation,
            ResponseLimits, Settlement, SqliteLedger, StoredResponse, TransactionLedger as _,
        },
        network::Network,
        payment::{Terms, Window, precheck},
        protocol::{ExactOffer, ExactPayload, PaymentFlow},
    };

    fn payment(n: u8) -> PaymentKey {
        PaymentKey {
            network: Network::BASE,
            asset: Address::ZERO,
            payer: Address::repeat_byte(n),
            nonce: B256::repeat_byte(n),
        }
    }

    /// A queue whose writer is the test: no disk, and no clock.
    fn group_commit() -> (GroupCommit, Writer) {
        let shared = Arc::new(Shared::default());
        let (alive, writing) = watch::channel(());
        (GroupCommit { shared: shared.clone(), writing }, Writer { shared, _alive: alive })
    }

    impl GroupCommit {
        async fn pay(&self, n: u8) -> Result<(), LedgerError> {
            self.begin()?.write(Changes::of_payments([payment(n)]))?.wait().await
        }

        fn note(&self, n: u8) {
            self.begin().unwrap().note(Changes::of_payments([payment(n)]));
        }
    }

    impl Writer {
        /// Returns the payments in the next batch, and what tells that they were written.
        fn next(&self) -> Option<(HashSet<PaymentKey>, watch::Sender<bool>)> {
            let (batch, done) = self.shared.next(&MemoryLedger::default(), Duration::ZERO)?;
            Some((batch.payments.into_iter().map(|payment| payment.key).collect(), done))
        }
    }

    #[test]
    fn changes_before_a_batch_is_copied_share_it_and_later_ones_the_next() {
        let (commits, writer) = group_commit();
        commits.note(1);
        let [mut first, mut second, mut third] = [2, 3, 4].map(|n| Box::pin(commits.pay(n)));
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        let (payments, done) = writer.next().expect("somebody waits");
        assert_eq!(payments, [1, 2, 3].map(payment).into());
        assert!((&mut third).now_or_never().is_none());
        let mut reader = pin!(commits.all_on_disk());
        assert!((&mut reader).now_or_never().is_none(), "it may have seen what the third changed");
        done.send_replace(true);
        assert!(matches!((first.now_or_never(), second.now_or_never()), (Some(Ok(())), Some(Ok(())))));
        assert!((&mut third).now_or_never().is_none(), "this is not on disk");
        let (payments, done) = writer.next().expect("somebody waits");
        assert_eq!(payments, [payment(4)].into());
        let mut late = pin!(commits.all_on_disk());
        assert!((&mut late).now_or_never().is_none(), "what is being written can be seen already");
        done.send_replace(true);
        assert!(matches!((third.now_or_never(), reader.now_or_never()), (Some(Ok(())), Some(Ok(())))));
        assert!(matches!(late.now_or_never(), Some(Ok(()))));
    }

    #[test]
    fn only_several_callers_together_wait_for_more_and_at_most_a_millisecond() {
        let [last, slow] = [300, 60_000].map(Duration::from_micros);
        assert_eq!([0, 1, 3].map(|waiting| pause_before_commit(waiting, slow)), [Duration::ZERO; 3]);
        assert_eq!(pause_before_commit(4, last), Duration::from_micros(150));
        assert_eq!(pause_before_commit(200, slow), Duration::from_millis(1));
    }

    #[test]
    fn a_change_that_nobody_waits_for_is_written_after_a_while_and_at_the_end() {
        let (commits, writer) = group_commit();
        commits.note(1);
        assert_eq!(writer.next().expect("it was long enough").0, [payment(1)].into());
        commits.note(2);
        drop(commits);
        assert_eq!(writer.next().expect("before it ends").0, [payment(2)].into());
        assert!(writer.next().is_none());
    }

    #[test]
    fn the_end_of_the_writer_fails_those_who_wait() {
        let (commits, writer) = group_commit();
        let mut before = Box::pin(commits.pay(1));
        assert!((&mut before).now_or_never().is_none());
        drop(writer);
        assert!(matches!(before.now_or_never(), Some(Err(LedgerError::Backend(_)))));
        assert!(commits.begin().is_err());
        assert!(matches!(commits.all_on_disk().now_or_never(), Some(Err(LedgerError::Backend(_)))));
    }

    const NOW: u64 = 1_800_000_000;

    fn record(payer: u8, nonce: u64) -> Record {
        let offer = ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(10),
            pay_to: Address::repeat_byte(0xee),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Authorization,
            method: Default::default(),
        };
        let authorization = Authorization {
            from: Address::repeat_byte(payer),
            to: offer.pay_to,
            value: offer.amount,
            valid_after: U256::ZERO,
            valid_before: U256::from(NOW + 60),
            nonce: B256::from(U256::from(nonce)),
        };
        let payload = ExactPayload::new(PaymentSignature::from(vec![1; 65]), authorization);
        let payment = precheck(Arc::new(Terms::new(offer)), payload, Window::default(), NOW).unwrap();
        Record::new(&payment, Fingerprint { digest: B256::ZERO, names_caller: false }, NOW, NOW + 30)
    }

    fn transaction(payer: u8, nonce: u64, key: PaymentKey) -> JournaledTransaction {
        let sender = Sender { network: key.network, address: Address::repeat_byte(payer) };
        let raw = Bytes::from_static(b"signed");
        JournaledTransaction {
            sender,
            nonce,
            hash: key.nonce,
            raw,
            payments: vec![key],
            by: 1,
            at: NOW,
            until: NOW + 30,
            known_failures: Default::default(),
        }
    }

    /// Works on a payment and submits it.
    async fn sell(ledger: &SqliteLedger, payer: u8, nonce: u64) {
        let Reservation::New(lease) = ledger.reserve(&record(payer, nonce)).await.unwrap() else { panic!("it is new") };
        let response = StoredResponse { head: "head".into(), body: "good".into(), stored_at: NOW };
        for step in [
            FulfilmentStep::Admit { funds: None, due: false },
            FulfilmentStep::Start { until: NOW + 30 },
            FulfilmentStep::Produce { charged: None, body: None, at: NOW, response: Some(response) },
        ] {
            ledger.advance(&lease.key, &lease.step(step)).await.unwrap();
        }
        ledger.submit(transaction(payer, nonce, lease.key)).await.unwrap();
    }

    /// Any batch may be the last before a crash. The test looks at what the file would hold after each.
    #[test]
    fn a_batch_has_no_payment_without_its_response_and_transaction() {
        let memory = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, Arc::new(ManualClock::at(NOW))));
        let (commits, writer) = group_commit();
        let ledger = Arc::new(SqliteLedger { memory: memory.clone(), commits });
        let sellers = [1, 2, 3, 4].map(|payer| {
            let ledger = ledger.clone();
            thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(async {
                    for nonce in 0..1_000 {
                        sell(&ledger, payer, nonce).await;
                    }
                });
            })
        });
        drop(ledger);
        let (mut produced, mut submitted) = (0, 0);
        let (mut responses, mut nonces) = (HashSet::new(), HashSet::new());
        while let Some((batch, done)) = writer.shared.next(&memory, Duration::ZERO) {
            responses.extend(batch.responses.into_iter().map(|(key, response)| (key, response.is_some())));
            nonces.extend(batch.nonces.into_iter().map(|(sender, nonce, is)| (sender.address, nonce, is.is_some())));
            for PaymentWrite { key, record, .. } in batch.payments {
                let record = record.expect("none is removed");
                if record.fulfilment == Fulfilment::Produced {
                    assert!(responses.contains(&(key, true)), "without its response");
                    produced += 1;
                }
                if record.settlement == Settlement::Submitted {
                    let nonce = U256::from_be_bytes(key.nonce.0).to();
                    assert!(nonces.contains(&(key.payer, nonce, true)), "without its transaction");
                    submitted += 1;
                }
            }
            done.send_replace(true);
        }
        assert!(produced >= 4_000 && submitted >= 4_000);
        for seller in sellers {
            seller.join().unwrap();
        }
    }
}
