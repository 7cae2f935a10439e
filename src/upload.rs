//! Request bodies that are still arriving when their request was answered.
//!
//! A server that answers before it has read the body, and then closes the connection, makes the client's kernel drop the answer: the
//! client sees a reset. So what is left of a body is read and dropped in the background. Anybody may send such bodies: the memory, the
//! bytes and the time that they take are bounded for the whole process. Beyond that the connection is closed.

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use alloy_primitives::B256;
use bytes::Bytes;
use http::{HeaderMap, header::EXPECT};
use http_body::{Body, Frame, SizeHint};
use tokio::{runtime::Handle, sync::Notify};

/// How many bytes of one body are drained.
const MAX_DRAINED: u64 = 32 << 20;
/// How long one body is drained; nginx takes as long (`lingering_time`).
const MAX_DRAINING: Duration = Duration::from_secs(30);
/// What one permit stands for, in bytes.
const PERMIT: u64 = 64 << 10;
/// What a connection holds of a body that nobody keeps, in permits: the buffer of hyper has 408 KiB at most.
const MAX_BUFFER: u32 = 7;
/// How many permits the bodies have that are drained at once: 16 MiB.
const PERMITS: u32 = 256;

static DRAINED: LazyLock<Arc<EvictingSemaphore>> = LazyLock::new(|| EvictingSemaphore::new(PERMITS));

/// The body of a request. If it is dropped before its end, what is left is drained in the background.
pub(crate) struct Upload<B> {
    /// `None` once it has ended.
    body: Option<Pin<Box<B>>>,
    /// The client sends nothing before it is asked to, which is done by reading (`Expect: 100-continue`).
    waits_to_be_asked: bool,
    /// How much was read. The connection's buffer has grown with it, also if little is left.
    read: u64,
    /// The same for others, once they have asked.
    arrived: Option<Arrived>,
    drain: fn(Pin<Box<B>>, u64),
}

/// How much of a body has arrived, in bytes. Only that takes memory, whatever its head announces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arrived(Arc<AtomicU64>);

impl Arrived {
    fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl<B: Body<Data = Bytes> + Send + 'static> Upload<B> {
    /// Wraps the body of a request that has these headers.
    pub(crate) fn new(headers: &HeaderMap, body: B) -> Self {
        let waits_to_be_asked =
            headers.get(EXPECT).is_some_and(|expected| expected.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let body = (!body.is_end_stream()).then(|| Box::pin(body));
        Self { body, waits_to_be_asked, read: 0, arrived: None, drain: drain_in_background }
    }
}

impl<B> Upload<B> {
    /// Returns how much of it has arrived, from now on.
    pub(crate) fn arrived(&mut self) -> Arrived {
        self.arrived.get_or_insert_default().clone()
    }
}

impl<B: Body<Data = Bytes>> Body for Upload<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        self.waits_to_be_asked = false;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(body.as_mut().poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                let length = length_of(frame);
                self.read += length;
                if let Some(arrived) = &self.arrived {
                    arrived.add(length);
                }
            }
            Some(Err(_)) | None => self.body = None,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), |body| body.size_hint())
    }
}

impl<B> Drop for Upload<B> {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|_| !self.waits_to_be_asked) {
            (self.drain)(body, self.read);
        }
    }
}

impl<B> fmt::Debug for Upload<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload").field("has_ended", &self.body.is_none()).finish_non_exhaustive()
    }
}

fn length_of(frame: &Frame<Bytes>) -> u64 {
    frame.data_ref().map_or(0, Bytes::len) as u64
}

fn drain_in_background<B: Body<Data = Bytes> + Send + 'static>(body: Pin<Box<B>>, read: u64) {
    if body.is_end_stream() || body.size_hint().lower() > MAX_DRAINED {
        return;
    }
    // Without a runtime nobody is connected.
    if let Ok(runtime) = Handle::try_current() {
        let arrived = Arrived::default();
        arrived.add(read);
        let permit = DRAINED.acquire(1, MAX_BUFFER);
        let draining = permit.unless_evicted(Some(arrived.clone()), drain(body, arrived));
        runtime.spawn(tokio::time::timeout(MAX_DRAINING, draining));
    }
}

async fn drain<B: Body<Data = Bytes>>(mut body: Pin<Box<B>>, arrived: Arrived) {
    let mut left = MAX_DRAINED;
    loop {
        let length = match poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            Some(Ok(frame)) => length_of(&frame),
            Some(Err(_)) | None => break,
        };
        arrived.add(length);
        match left.checked_sub(length) {
            Some(fewer) => left = fewer,
            None => break,
        }
        // A body that is always ready would keep the thread, and not see that its time is over.
        tokio::task::consume_budget().await;
    }
}

/// Returns how many permits this many bytes take.
pub(crate) fn permits_for(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(PERMIT)).unwrap_or(u32::MAX).max(1)
}

/// A semaphore that makes nobody wait: if no permits are free, those are taken back that were held longest.
///
/// Strangers who are slow on purpose cannot lock others out by it: whoever needs its permits shortly has them until it is done, unless
/// all of them are taken anew in that time. An owner that has its share makes room for itself.
#[derive(Debug)]
pub(crate) struct EvictingSemaphore {
    permits: u32,
    state: Mutex<Permits>,
}

#[derive(Debug)]
struct Permits {
    free: u32,
    /// The number of the next holder.
    next: u64,
    /// In the order of their numbers.
    holders: VecDeque<Holder>,
}

#[derive(Debug)]
struct Holder {
    number: u64,
    permits: u32,
    /// How many it may have, together with all others of its owner.
    most: u32,
    owner: Option<B256>,
    evicted: Arc<Notify>,
}

/// Permits of an [`EvictingSemaphore`], which are returned when this is dropped.
#[derive(Debug)]
pub(crate) struct EvictablePermit {
    semaphore: Arc<EvictingSemaphore>,
    number: u64,
    evicted: Arc<Notify>,
}

impl EvictingSemaphore {
    pub(crate) fn new(permits: u32) -> Arc<Self> {
        let state = Mutex::new(Permits { free: permits, next: 0, holders: VecDeque::new() });
        Arc::new(Self { permits, state })
    }

    /// Gives this many permits, which may become `most`.
    pub(crate) fn acquire(self: &Arc<Self>, permits: u32, most: u32) -> EvictablePermit {
        self.give(None, permits, most)
    }

    /// Gives this many permits, which may become `most`, to an owner who may have no more than these in all.
    pub(crate) fn acquire_for(self: &Arc<Self>, owner: B256, permits: u32, most: u32) -> EvictablePermit {
        self.give(Some(owner), permits, most)
    }

    fn give(self: &Arc<Self>, owner: Option<B256>, permits: u32, most: u32) -> EvictablePermit {
        let (evicted, most) = (Arc::<Notify>::default(), most.min(self.permits));
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.holders.push_back(Holder { number, permits: 0, most, owner, evicted: evicted.clone() });
        state.grow(number, permits);
        drop(state);
        EvictablePermit { semaphore: self.clone(), number, evicted }
    }

    fn state(&self) -> MutexGuard<'_, Permits> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Works with permits that are acquired only if the work has to wait, until they are taken back. Returns `None` if they were.
pub(crate) async fn unless_evicted<T>(
    acquire: impl FnOnce() -> EvictablePermit,
    arrived: Option<Arrived>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    match poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
        Poll::Ready(done) => Some(done),
        Poll::Pending => acquire().unless_evicted(arrived, work).await,
    }
}

impl Permits {
    fn find(&self, number: u64) -> Option<usize> {
        self.holders.binary_search_by_key(&number, |holder| holder.number).ok()
    }

    /// Gives a holder more permits, up to so many: for its owner's share, and then for all there are, the oldest make room, even if that is
    /// the holder itself.
    fn grow(&mut self, number: u64, permits: u32) {
        while let Some(index) = self.find(number) {
            let Holder { permits: held, most, owner, .. } = self.holders[index];
            let more = permits.min(most).saturating_sub(held);
            if more == 0 {
                return;
            }
            let is_own = |holder: &&Holder| owner.is_some() && holder.owner == owner;
            let own: u32 = self.holders.iter().filter(is_own).map(|holder| holder.permits).sum();
            let oldest = match own.saturating_add(more) > most {
                true => self.holders.iter().position(|holder| is_own(&holder)),
                false if self.free < more => Some(0),
                false => None,
            };
            match oldest {
                Some(oldest) => {
                    if let Some(oldest) = self.holders.remove(oldest) {
                        self.free += oldest.permits;
                        oldest.evicted.notify_one();
                    }
                }
                None => {
                    self.free -= more;
                    self.holders[index].permits += more;
                }
            }
        }
    }
}

impl EvictablePermit {
    /// Works until the permits are taken back. Returns `None` if they were. Of a body that is kept there are as many permits as have arrived.
    pub(crate) async fn unless_evicted<T>(self, arrived: Option<Arrived>, work: impl Future<Output = T>) -> Option<T> {
        let (mut evicted, mut work) = (pin!(self.evicted.notified()), pin!(work));
        poll_fn(|cx| {
            if evicted.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            let polled = work.as_mut().poll(cx).map(Some);
            if let (Poll::Pending, Some(arrived)) = (&polled, &arrived) {
                self.semaphore.state().grow(self.number, permits_for(arrived.bytes()));
            }
            polled
        })
        .await
    }
}

impl Drop for EvictablePermit {
    fn drop(&mut self) {
        let mut state = self.semaphore.state();
        let found = state.find(self.number);
        if let Some(holder) = found.and_then(|index| state.holders.remove(index)) {
            state.free += holder.permits;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn permits_that_were_held_longest_are_taken_back() {
        let semaphore = EvictingSemaphore::new(4);
        let take = |permits| semaphore.acquire(permits, u32::MAX);
        let [first, second] = [1, 2].map(take);
        drop(take(1));
        let third = take(1);
        // Two are needed: the first one's, and then the second one's, of which one is left over.
        let fourth = take(2);
        assert_eq!(first.unless_evicted(None, pending::<()>()).await, None);
        assert_eq!(second.unless_evicted(None, pending::<()>()).await, None);
        assert_eq!(third.unless_evicted(None, async { 3 }).await, Some(3));
        // The third's permit came back: with the one left over, two are free.
        let fifth = take(2);
        assert_eq!(fourth.unless_evicted(None, async { 4 }).await, Some(4));
        let all = take(u32::MAX);
        assert_eq!(fifth.unless_evicted(None, pending::<()>()).await, None);
        drop(all);
        assert_eq!(semaphore.state().free, 4);
    }

    #[tokio::test]
    async fn owner_that_has_all_it_may_have_loses_its_own_oldest_permit() {
        let semaphore = EvictingSemaphore::new(4);
        let [one, two] = [1, 2].map(B256::repeat_byte);
        let other = semaphore.acquire_for(two, 1, 2);
        let [first, second, third] = [(); 3].map(|()| semaphore.acquire_for(one, 1, 2));
        assert_eq!(first.unless_evicted(None, pending::<()>()).await, None);
        assert_eq!(second.unless_evicted(None, async { 2 }).await, Some(2));
        let fourth = semaphore.acquire_for(one, 1, 2);
        assert_eq!(third.unless_evicted(None, async { 3 }).await, Some(3));
        assert_eq!(other.unless_evicted(None, async { 0 }).await, Some(0));
        drop(fourth);
        assert_eq!(semaphore.state().free, 4);
    }

    #[tokio::test]
    async fn holder_grows_with_what_has_arrived_up_to_its_share() {
        let semaphore = EvictingSemaphore::new(4);
        let [one, two] = [1, 2].map(B256::repeat_byte);
        let (other, first) = (semaphore.acquire_for(two, 1, 3), semaphore.acquire_for(one, 1, 3));
        let arrived = Arrived::default();
        let mut growing =
            Box::pin(semaphore.acquire_for(one, 1, 3).unless_evicted(Some(arrived.clone()), pending::<()>()));
        let mut poll = || growing.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop()));
        assert!(poll().is_pending());
        assert_eq!(semaphore.state().free, 1);
        arrived.add(3 * PERMIT);
        assert!(poll().is_pending());
        assert_eq!(first.unless_evicted(None, pending::<()>()).await, None, "its owner's share is used up");
        arrived.add(3 * PERMIT);
        assert!(poll().is_pending());
        assert_eq!(other.unless_evicted(None, async { 0 }).await, Some(0), "nobody else's is touched");
        assert_eq!(semaphore.state().free, 1);
    }

    /// A body that notes when it is dropped: endless, or one that never comes.
    struct Sent(Option<Bytes>, Arc<Notify>);

    impl Body for Sent {
        type Data = Bytes;
        type Error = std::io::Error;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            self.0.clone().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
        }
    }

    impl Drop for Sent {
        fn drop(&mut self) {
            self.1.notify_one();
        }
    }

    /// Returns how long a body is drained.
    async fn drained(data: Option<Bytes>) -> Duration {
        let dropped = Arc::<Notify>::default();
        let (body, start) = (Sent(data, dropped.clone()), tokio::time::Instant::now());
        drop(Upload::new(&HeaderMap::new(), body));
        dropped.notified().await;
        start.elapsed()
    }

    /// One test, because all bodies of a process share their room.
    #[tokio::test(start_paused = true)]
    async fn bodies_are_drained_within_bounds() {
        assert_eq!(drained(None).await.as_secs(), 30);
        assert_eq!(drained(Some(Bytes::from(vec![0; 1 << 20]))).await.as_secs(), 0, "32 MiB at most");
        // The oldest makes room for the last of a crowd.
        let dropped = Arc::<Notify>::default();
        let start = tokio::time::Instant::now();
        drop(Upload::new(&HeaderMap::new(), Sent(None, dropped.clone())));
        for _ in 0..PERMITS {
            drop(Upload::new(&HeaderMap::new(), Sent(None, Arc::default())));
        }
        dropped.notified().await;
        assert_eq!(start.elapsed().as_secs(), 0);
    }

    #[test]
    fn body_takes_permits_by_its_length() {
        for (bytes, permits) in [(0, 1), (1, 1), (65_536, 1), (65_537, 2), (u64::MAX, u32::MAX)] {
            assert_eq!(permits_for(bytes), permits, "{bytes}");
        }
    }
}
