//! Copies a paid response for replays as it streams to the client: one whose length is not known, or too large to wait for.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, StatusCode,
    header::{CONNECTION, DATE, TE, TRANSFER_ENCODING, UPGRADE},
    response::Parts,
};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use super::wait::Busy;
use crate::ledger::{FulfilmentStep, Lease, Ledger, StoredResponse};

/// How long a response that nobody reads any more may take to finish.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

/// For how long a ledger that fails is asked to keep a response, and the pauses in between, doubled up to the longest.
const KEEP_FOR: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Copies up to the ledger's limit. If the client goes away before the end, the rest is drained into the copy, so that
/// presenting the payment again finds the answer.
pub(super) struct Recorder<B> {
    recording: Option<Recording<B>>,
    /// Set where the bounds are known, so that the type itself needs none.
    drain: fn(Recording<B>),
}

/// Where the copy goes.
pub(super) struct Destination {
    pub(super) ledger: Arc<dyn Ledger>,
    pub(super) lease: Lease,
    /// Copies of the payment wait until this is dropped.
    pub(super) busy: Option<Busy>,
    pub(super) now: u64,
}

struct Recording<B> {
    body: Pin<Box<B>>,
    head: StoredResponse,
    copy: Option<BytesMut>,
    limit: usize,
    destination: Destination,
    /// Whether the client gets it.
    is_released: bool,
}

impl<B> Recorder<B>
where
    B: Body<Data = Bytes> + Send + 'static,
{
    pub(super) fn new(parts: &Parts, body: B, destination: Destination) -> Self {
        let limit = destination.ledger.response_limit();
        // What follows 101 is a connection, which cannot be had twice.
        let is_kept = body.size_hint().lower() <= limit as u64 && parts.status != StatusCode::SWITCHING_PROTOCOLS;
        let head = stored(parts, Bytes::new(), None, destination.now);
        let copy = is_kept.then(BytesMut::new);
        let recording = Recording { body: Box::pin(body), head, copy, limit, destination, is_released: false };
        Self { recording: Some(recording), drain: spawn_drain }
    }
}

impl<B> Recorder<B> {
    /// Lets the client have it.
    pub(super) fn release(&mut self) {
        if let Some(recording) = &mut self.recording {
            recording.is_released = true;
        }
    }
}

impl<B: Body<Data = Bytes>> Recorder<B> {
    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let Some(recording) = &mut self.recording else { return Poll::Ready(None) };
        let polled = recording.body.as_mut().poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                recording.copy(frame);
                // Hyper does not ask again after the last frame of a body of known length.
                if recording.body.is_end_stream() {
                    self.complete();
                }
            }
            Poll::Ready(None) => self.complete(),
            Poll::Ready(Some(Err(_))) => {
                // A response that broke off is not one to replay.
                recording.copy = None;
                self.complete();
            }
            Poll::Pending => {}
        }
        polled
    }

    pub(super) fn is_end_stream(&self) -> bool {
        self.recording.as_ref().is_none_or(|recording| recording.body.is_end_stream())
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.recording.as_ref().map_or(SizeHint::with_exact(0), |recording| recording.body.size_hint())
    }

    fn complete(&mut self) {
        if let Some(recording) = self.recording.take() {
            let Recording { head, copy, destination, is_released, .. } = recording;
            spawn(store(head, copy, destination, is_released));
        }
    }
}

impl<B> Drop for Recorder<B> {
    fn drop(&mut self) {
        if let Some(recording) = self.recording.take() {
            (self.drain)(recording);
        }
    }
}

impl<B> Recording<B> {
    fn copy(&mut self, frame: &Frame<Bytes>) {
        if let Some(data) = frame.data_ref()
            && let Some(copy) = &mut self.copy
        {
            if copy.len() + data.len() > self.limit {
                self.copy = None;
            } else {
                copy.extend_from_slice(data);
            }
        }
        if let Some(trailers) = frame.trailers_ref() {
            self.head.trailers = Some(HeaderMap::clone(trailers));
        }
    }
}

fn spawn_drain<B>(mut recording: Recording<B>)
where
    B: Body<Data = Bytes> + Send + 'static,
{
    spawn(async move {
        let drained = tokio::time::timeout(DRAIN_LIMIT, async {
            while recording.copy.is_some() && !recording.body.is_end_stream() {
                match poll_fn(|cx| recording.body.as_mut().poll_frame(cx)).await {
                    Some(Ok(frame)) => recording.copy(&frame),
                    Some(Err(_)) => return false,
                    None => break,
                }
            }
            true
        });
        let is_whole = drained.await == Ok(true);
        let Recording { head, copy, destination, is_released, .. } = recording;
        store(head, copy.filter(|_| is_whole), destination, is_released).await;
    });
}

async fn store(head: StoredResponse, copy: Option<BytesMut>, destination: Destination, is_released: bool) {
    let Destination { ledger, lease, busy, now } = destination;
    let is_kept = match copy {
        Some(copy) => keep(ledger.as_ref(), &lease, StoredResponse { body: copy.freeze(), ..head }).await,
        None => false,
    };
    if is_released {
        delivered(ledger.as_ref(), &lease).await;
    } else if !is_kept {
        // Neither had nor kept: nobody is to be charged for it, nor to wait for it, so the lease ends.
        let _ = ledger.take_over(&lease.key, lease.epoch, now, 0).await;
    }
    drop(busy);
}

/// Keeps a response: it may be paid for already, and nobody else has it. Returns whether the ledger took it.
async fn keep(ledger: &dyn Ledger, lease: &Lease, response: StoredResponse) -> bool {
    let until = Instant::now() + KEEP_FOR;
    let mut pause = FIRST_PAUSE;
    loop {
        let Err(error) = ledger.store_response(&lease.key, response.clone()).await else { return true };
        let key = &lease.key;
        tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a response was not kept for replays");
        if Instant::now() + pause > until {
            return false;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Losing this step costs nothing: a produced response is replayed like a delivered one.
pub(super) async fn delivered(ledger: &dyn Ledger, lease: &Lease) {
    if let Err(error) = ledger.fulfil(lease, &FulfilmentStep::Deliver).await {
        tracing::debug!(%error, payer = %lease.key.payer, nonce = %lease.key.nonce, "a delivery was not recorded");
    }
}

/// A response as it is kept for replays.
pub(super) fn stored(parts: &Parts, body: Bytes, trailers: Option<HeaderMap>, stored_at: u64) -> StoredResponse {
    StoredResponse { status: parts.status, headers: kept_headers(&parts.headers), body, trailers, stored_at }
}

/// Without what belongs to the connection (RFC 9110, section 7.6.1) or the moment of the first answer.
fn kept_headers(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    let leaves = |name: &HeaderName| {
        [CONNECTION, TRANSFER_ENCODING, UPGRADE, TE, DATE].contains(name)
            || ["keep-alive", "proxy-connection"].contains(&name.as_str())
    };
    // Of most handlers' headers there is none.
    if headers.keys().any(leaves) {
        let named = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
        let named = named.flat_map(|value| value.split(',')).filter_map(|name| name.trim().parse().ok());
        for name in headers.keys().filter(|name| leaves(name)).cloned().chain(named) {
            kept.remove(name);
        }
    }
    kept
}

/// As [`spawn`], but for what there is to wait for: most of the time nothing, and a task would cost more than the work.
pub(super) fn begin(work: impl Future<Output = ()> + Send + 'static) {
    let mut work = Box::pin(work);
    if work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        spawn(work);
    }
}

/// Outside a runtime there is nobody left to replay to.
pub(super) fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(work);
    }
}
