//! Where request bodies arrive. Nothing is known of a request until its body is there, so it holds no place to work in and little memory.

use std::{
    collections::BTreeMap,
    error::Error,
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt as _;
use tokio::{sync::oneshot, time::timeout};

/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many bodies may be arriving.
const MAX_BODIES: usize = 256;
/// How many bytes of them are held.
const MAX_BYTES: usize = 4 << 20;

/// The bodies that are arriving. If there are too many or they hold too much, the one that has taken longest is given up: bodies of honest
/// callers arrive in a moment, however many others stand still.
#[derive(Default)]
pub(crate) struct Arrivals(Mutex<State>);

#[derive(Default)]
struct State {
    next: u64,
    /// In the order in which they began.
    arriving: BTreeMap<u64, Arriving>,
    bytes: usize,
}

struct Arriving {
    bytes: usize,
    /// Dropped to give it up.
    _kept: oneshot::Sender<()>,
}

/// Why there is no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoBody {
    TooLarge,
    Broken,
    TooSlow,
    /// Given up in favour of others.
    Crowded,
}

impl Arrivals {
    /// Reads a body of at most `limit` bytes.
    pub(crate) async fn read<B>(&self, body: B, limit: usize) -> Result<Vec<u8>, NoBody>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let (kept, given_up) = oneshot::channel();
        let place = Place { arrivals: self, number: self.lock().enter(kept) };
        let reading = async {
            let (mut body, mut read) = (pin!(body), Vec::new());
            while let Some(frame) = body.frame().await {
                let Ok(data) = frame.map_err(|_| NoBody::Broken)?.into_data() else { continue };
                if read.len() + data.len() > limit {
                    return Err(NoBody::TooLarge);
                }
                self.lock().grow(place.number, data.len());
                read.extend_from_slice(&data);
            }
            Ok(read)
        };
        tokio::select! {
            biased;
            read = timeout(PATIENCE, reading) => read.unwrap_or(Err(NoBody::TooSlow)),
            _ = given_up => Err(NoBody::Crowded),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn enter(&mut self, kept: oneshot::Sender<()>) -> u64 {
        self.next += 1;
        self.arriving.insert(self.next, Arriving { bytes: 0, _kept: kept });
        self.make_room();
        self.next
    }

    fn grow(&mut self, number: u64, bytes: usize) {
        if let Some(arriving) = self.arriving.get_mut(&number) {
            arriving.bytes += bytes;
            self.bytes += bytes;
            self.make_room();
        }
    }

    fn make_room(&mut self) {
        while self.arriving.len() > MAX_BODIES || self.bytes > MAX_BYTES {
            let Some((_, oldest)) = self.arriving.pop_first() else { return };
            self.bytes -= oldest.bytes;
        }
    }

    fn leave(&mut self, number: u64) {
        if let Some(arrived) = self.arriving.remove(&number) {
            self.bytes -= arrived.bytes;
        }
    }
}

/// A body's place among those that are arriving.
struct Place<'a> {
    arrivals: &'a Arrivals,
    number: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.arrivals.lock().leave(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, sync::Arc};

    use futures_util::{FutureExt as _, future::pending, stream, stream::StreamExt as _};
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};

    use super::*;

    /// A body that begins with so many bytes and stands still.
    fn stalled(bytes: usize) -> impl Body<Data = Bytes, Error = Infallible> {
        let begun = stream::iter([Ok(Frame::data(Bytes::from(vec![b' '; bytes])))]);
        StreamBody::new(begun.chain(stream::once(pending())))
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_stand_still_give_way_and_hold_little() {
        for (bytes, kept) in [(0, MAX_BODIES), (64 * 1024, MAX_BYTES / (64 * 1024))] {
            let arrivals = Arc::new(Arrivals::default());
            let reading: Vec<_> = (0..2 * MAX_BODIES)
                .map(|_| {
                    let arrivals = arrivals.clone();
                    tokio::spawn(async move { arrivals.read(stalled(bytes), 64 * 1024).await })
                })
                .collect();
            while arrivals.lock().next < 2 * MAX_BODIES as u64 {
                tokio::task::yield_now().await;
            }
            assert_eq!(arrivals.lock().arriving.len(), kept);
            assert_eq!(arrivals.lock().bytes, kept * bytes);
            let honest = arrivals.read(Full::new(Bytes::from_static(b"{}")), 10).now_or_never();
            assert_eq!(honest, Some(Ok(b"{}".to_vec())), "it is read at once");
            let mut ends = Vec::new();
            for reader in reading {
                ends.push(reader.await.expect("it ends"));
            }
            // One more made way for the honest one.
            let (crowded, slow) = ends.split_at(2 * MAX_BODIES - kept + 1);
            assert!(crowded.iter().all(|end| *end == Err(NoBody::Crowded)), "{ends:?}");
            assert!(slow.iter().all(|end| *end == Err(NoBody::TooSlow)), "{ends:?}");
            let state = arrivals.lock();
            assert_eq!((state.arriving.len(), state.bytes), (0, 0));
        }
    }

    #[tokio::test]
    async fn body_above_the_limit_is_refused() {
        let arrivals = Arrivals::default();
        let body = |bytes| Full::new(Bytes::from(vec![b' '; bytes]));
        assert_eq!(arrivals.read(body(10), 10).await.map(|read| read.len()), Ok(10));
        assert_eq!(arrivals.read(body(11), 10).await, Err(NoBody::TooLarge));
    }
}
