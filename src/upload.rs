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
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
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
    /// What its connection may hold, in permits: its buffer has grown with what was read, also if little is left.
    buffer: u32,
    drain: fn(Pin<Box<B>>, u32),
}

impl<B: Body<Data = Bytes> + Send + 'static> Upload<B> {
    /// Wraps the body of a request that has these headers.
    pub(crate) fn new(headers: &HeaderMap, body: B) -> Self {
        let waits_to_be_asked =
            headers.get(EXPECT).is_some_and(|expected| expected.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let buffer = permits_for(body.size_hint().upper()).min(MAX_BUFFER);
        let body = (!body.is_end_stream()).then(|| Box::pin(body));
        Self { body, waits_to_be_asked, buffer, drain: drain_in_background }
    }
}

impl<B: Body<Data = Bytes>> Body for Upload<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        self.waits_to_be_asked = false;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(body.as_mut().poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            self.body = None;
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
            (self.drain)(body, self.buffer);
        }
    }
}

impl<B> fmt::Debug for Upload<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload").field("has_ended", &self.body.is_none()).finish_non_exhaustive()
    }
}

fn drain_in_background<B: Body<Data = Bytes> + Send + 'static>(body: Pin<Box<B>>, buffer: u32) {
    if body.is_end_stream() || body.size_hint().lower() > MAX_DRAINED {
        return;
    }
    // Without a runtime nobody is connected.
    if let Ok(runtime) = Handle::try_current() {
        let permit = DRAINED.acquire(buffer);
        runtime.spawn(tokio::time::timeout(MAX_DRAINING, permit.unless_evicted(drain(body))));
    }
}

async fn drain<B: Body<Data = Bytes>>(mut body: Pin<Box<B>>) {
    let mut left = MAX_DRAINED;
    loop {
        let length = match poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len) as u64,
            Some(Err(_)) | None => break,
        };
        match left.checked_sub(length) {
            Some(fewer) => left = fewer,
            None => break,
        }
        // A body that is always ready would keep the thread, and not see that its time is over.
        tokio::task::consume_budget().await;
    }
}

/// Returns how many permits a body takes that has this many bytes, or any number.
pub(crate) fn permits_for(bytes: Option<u64>) -> u32 {
    bytes.map_or(u32::MAX, |bytes| u32::try_from(bytes.div_ceil(PERMIT)).unwrap_or(u32::MAX).max(1))
}

/// A semaphore that makes nobody wait: if no permits are free, those are taken back that were held longest.
///
/// Strangers who are slow on purpose cannot lock others out by it: whoever needs its permits shortly has them until it is done, unless
/// all of them are taken anew in that time.
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

    /// Gives this many permits, or all there are.
    pub(crate) fn acquire(self: &Arc<Self>, permits: u32) -> EvictablePermit {
        self.give(self.state(), permits.min(self.permits), None)
    }

    /// Gives one permit to an owner who may have `most`: if it has as many, its oldest is taken back.
    pub(crate) fn acquire_for(self: &Arc<Self>, owner: B256, most: usize) -> EvictablePermit {
        let mut state = self.state();
        let mut own = state.holders.iter().enumerate().filter(|(_, holder)| holder.owner == Some(owner));
        let oldest = own.next().map(|(index, _)| index);
        if 1 + own.count() >= most
            && let Some(oldest) = oldest.and_then(|index| state.holders.remove(index))
        {
            state.take_back(oldest);
        }
        self.give(state, self.permits.min(1), Some(owner))
    }

    fn give(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, Permits>,
        permits: u32,
        owner: Option<B256>,
    ) -> EvictablePermit {
        let evicted = Arc::<Notify>::default();
        while state.free < permits
            && let Some(oldest) = state.holders.pop_front()
        {
            state.take_back(oldest);
        }
        state.free -= permits;
        let number = state.next;
        state.next += 1;
        state.holders.push_back(Holder { number, permits, owner, evicted: evicted.clone() });
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
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    match poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
        Poll::Ready(done) => Some(done),
        Poll::Pending => acquire().unless_evicted(work).await,
    }
}

impl Permits {
    fn take_back(&mut self, holder: Holder) {
        self.free += holder.permits;
        holder.evicted.notify_one();
    }
}

impl EvictablePermit {
    /// Works until the permits are taken back. Returns `None` if they were.
    pub(crate) async fn unless_evicted<T>(self, work: impl Future<Output = T>) -> Option<T> {
        let (mut evicted, mut work) = (pin!(self.evicted.notified()), pin!(work));
        poll_fn(|cx| match evicted.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => work.as_mut().poll(cx).map(Some),
        })
        .await
    }
}

impl Drop for EvictablePermit {
    fn drop(&mut self) {
        let mut state = self.semaphore.state();
        let found = state.holders.binary_search_by_key(&self.number, |holder| holder.number);
        if let Some(holder) = found.ok().and_then(|index| state.holders.remove(index)) {
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
        let [first, second] = [1, 2].map(|permits| semaphore.acquire(permits));
        drop(semaphore.acquire(1));
        let third = semaphore.acquire(1);
        // Two are needed: the first one's, and then the second one's, of which one is left over.
        let fourth = semaphore.acquire(2);
        assert_eq!(first.unless_evicted(pending::<()>()).await, None);
        assert_eq!(second.unless_evicted(pending::<()>()).await, None);
        assert_eq!(third.unless_evicted(async { 3 }).await, Some(3));
        // The third's permit came back: with the one left over, two are free.
        let fifth = semaphore.acquire(2);
        assert_eq!(fourth.unless_evicted(async { 4 }).await, Some(4));
        let all = semaphore.acquire(u32::MAX);
        assert_eq!(fifth.unless_evicted(pending::<()>()).await, None);
        drop(all);
        assert_eq!(semaphore.state().free, 4);
    }

    #[tokio::test]
    async fn owner_that_has_all_it_may_have_loses_its_own_oldest_permit() {
        let semaphore = EvictingSemaphore::new(4);
        let [one, two] = [1, 2].map(B256::repeat_byte);
        let other = semaphore.acquire_for(two, 2);
        let [first, second, third] = [(); 3].map(|()| semaphore.acquire_for(one, 2));
        assert_eq!(first.unless_evicted(pending::<()>()).await, None);
        assert_eq!(second.unless_evicted(async { 2 }).await, Some(2));
        let fourth = semaphore.acquire_for(one, 2);
        assert_eq!(third.unless_evicted(async { 3 }).await, Some(3));
        assert_eq!(other.unless_evicted(async { 0 }).await, Some(0));
        drop(fourth);
        assert_eq!(semaphore.state().free, 4);
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
        for _ in 0..PERMITS / MAX_BUFFER {
            drop(Upload::new(&HeaderMap::new(), Sent(None, Arc::default())));
        }
        dropped.notified().await;
        assert_eq!(start.elapsed().as_secs(), 0);
    }

    #[test]
    fn body_takes_permits_by_its_length() {
        for (bytes, permits) in [
            (Some(0), 1),
            (Some(1), 1),
            (Some(65_536), 1),
            (Some(65_537), 2),
            (Some(u64::MAX), u32::MAX),
            (None, u32::MAX),
        ] {
            assert_eq!(permits_for(bytes), permits, "{bytes:?}");
        }
    }
}
