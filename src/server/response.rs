//! The response to a paid request: kept for replays before or while it leaves.
//!
//! A body that says its length and fits into the ledger is read whole and kept before anybody pays for it. Any other streams to the
//! client and is copied, within bounds.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, response::Parts};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::Instant;

use super::kept_response::KeptResponse;
use crate::{
    charge::{Unfinished, recording},
    ledger::StoredResponse,
    payment::PaymentKey,
};

/// How long a response may take to finish after its client went away.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

pin_project! {
    /// The body of a response from [`RequirePayment`](super::RequirePayment): the handler's, streamed, or the layer's own.
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<B> {
        /// Written or replayed by the layer.
        Own { bytes: Option<Bytes>, trailers: Option<Box<HeaderMap>> },
        /// The handler's.
        Inner { #[pin] body: B },
        /// The handler's, copied for replays as it passes.
        Recorded { recorder: Box<Recorder<B>> },
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn own(bytes: impl Into<Bytes>) -> Self {
        Self::whole(bytes.into(), None)
    }

    pub(super) fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    pub(super) fn whole(bytes: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        Self { kind: Kind::Own { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()), trailers } }
    }
}

/// A body that passes unchanged, for a service that answers some requests by itself and leaves the others to the layer.
impl<B> From<B> for ResponseBody<B> {
    fn from(body: B) -> Self {
        Self::inner(body)
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            KindProjection::Own { bytes, trailers } => {
                let frame = bytes
                    .take()
                    .map(Frame::data)
                    .or_else(|| trailers.take().map(|trailers| Frame::trailers(*trailers)));
                Poll::Ready(frame.map(Ok))
            }
            KindProjection::Inner { body } => body.poll_frame(cx),
            KindProjection::Recorded { recorder } => recorder.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Own { bytes, trailers } => bytes.is_none() && trailers.is_none(),
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Recorded { recorder } => recorder.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Own { bytes, .. } => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Kind::Inner { body } => body.size_hint(),
            Kind::Recorded { recorder } => recorder.size_hint(),
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.kind {
            Kind::Own { .. } => "ResponseBody(own)",
            Kind::Inner { .. } => "ResponseBody(streaming)",
            Kind::Recorded { .. } => "ResponseBody(streaming, recorded)",
        })
    }
}

/// The body of a response that is being paid for. Dropped after it was [charged](Self::charged) for and before it is
/// [delivered](Self::deliver), what was being recorded is still kept for replays.
pub(super) enum PaidBody<R> {
    /// Small enough for the ledger.
    Whole {
        bytes: Bytes,
        trailers: Option<Box<HeaderMap>>,
    },
    Streaming(R),
    Recorded(Box<Recorder<R>>),
}

impl<R: Body<Data = Bytes> + Send + 'static> PaidBody<R> {
    /// Reads a body that says its length, and whose length is at most `limit`, until `deadline`. A body that breaks off is
    /// work that did not succeed.
    pub(super) async fn read(parts: &Parts, body: R, limit: usize, deadline: Instant) -> Result<Self, Unfinished> {
        // A connection follows 101.
        let length = body.size_hint().exact().filter(|_| parts.status != StatusCode::SWITCHING_PROTOCOLS);
        let Some(length) = length.and_then(|length| usize::try_from(length).ok()).filter(|length| *length <= limit)
        else {
            return Ok(Self::Streaming(body));
        };
        let read = tokio::time::timeout_at(deadline, read_exactly(body, length)).await;
        let (bytes, trailers) = read.map_err(|_elapsed| Unfinished::TooSlow)?.ok_or(Unfinished::BrokeOff)?;
        Ok(Self::Whole { bytes, trailers })
    }

    /// Returns what the ledger keeps in the same step as the fact that the work is done. `asked` are the request's headers.
    pub(super) fn to_keep(&self, parts: &Parts, asked: &HeaderMap, now: u64) -> Option<StoredResponse> {
        match self {
            Self::Whole { bytes, trailers } => {
                let (body, trailers) = (bytes.clone(), trailers.as_deref().cloned());
                Some(KeptResponse { body, trailers, ..KeptResponse::of(parts, asked, now) }.to_stored())
            }
            Self::Streaming(_) | Self::Recorded(_) => None,
        }
    }

    /// Returns `true` if the ledger has been given all of it to [keep](Self::to_keep).
    pub(super) const fn is_whole(&self) -> bool {
        matches!(self, Self::Whole { .. })
    }

    /// Records what streams, from now on. `asked` are the request's headers.
    pub(super) fn record(self, parts: &Parts, asked: &HeaderMap, target: recording::Recording) -> Self {
        match self {
            Self::Streaming(body) => Self::Recorded(Box::new(Recorder::new(parts, asked, body, target))),
            other => other,
        }
    }

    /// Waits until the first piece of a stream is there, which the client gets with the rest. A stream that fails before is work that did not
    /// succeed.
    pub(super) async fn begin(&mut self, deadline: Instant) -> Result<(), Unfinished> {
        let Self::Recorded(recorder) = self else { return Ok(()) };
        let begun = tokio::time::timeout_at(deadline, recorder.begin()).await;
        let why = match begun {
            Ok(true) => return Ok(()),
            Ok(false) => Unfinished::BrokeOff,
            Err(_elapsed) => Unfinished::TooSlow,
        };
        recorder.discard();
        Err(why)
    }

    /// Has what streams kept from now on, whatever becomes of its client.
    pub(super) fn charged(&mut self) {
        if let Self::Recorded(recorder) = self
            && let Some(recording) = &mut recorder.recording
        {
            recording.is_charged = true;
        }
    }

    /// Returns the body for the client. `delivered` records that it got a body that is whole.
    pub(super) fn deliver(self, delivered: impl Future<Output = ()> + Send + 'static) -> ResponseBody<R> {
        match self {
            Self::Whole { bytes, trailers } => {
                spawn_if_pending(delivered);
                ResponseBody::whole(bytes, trailers)
            }
            Self::Streaming(body) => ResponseBody::inner(body),
            Self::Recorded(mut recorder) => {
                recorder.release();
                ResponseBody { kind: Kind::Recorded { recorder } }
            }
        }
    }
}

/// Returns `None` if the body breaks off, or is not as long as it said.
async fn read_exactly<R: Body<Data = Bytes>>(body: R, length: usize) -> Option<(Bytes, Option<Box<HeaderMap>>)> {
    let mut body = pin!(body);
    let (mut first, mut rest) = (Bytes::new(), BytesMut::new());
    let mut trailers: Option<Box<HeaderMap>> = None;
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        match frame.ok()?.into_data() {
            Ok(data) if first.len() + rest.len() + data.len() > length => return None,
            // Most bodies come in one piece, which then need not be copied.
            Ok(data) if first.is_empty() && rest.is_empty() => first = data,
            Ok(data) => {
                rest.extend_from_slice(&std::mem::take(&mut first));
                rest.extend_from_slice(&data);
            }
            Err(frame) => {
                if let Ok(more) = frame.into_trailers() {
                    trailers.get_or_insert_default().extend(more);
                }
            }
        }
    }
    let bytes = if rest.is_empty() { first } else { rest.freeze() };
    (bytes.len() == length).then_some((bytes, trailers))
}

/// Copies a streaming body for replays, up to the ledger's limit. If the client goes away before the end, the rest is drained into the copy, so that
/// presenting the payment again finds the answer.
pub(super) struct Recorder<B> {
    recording: Option<Recording<B>>,
    /// Set where the bounds are known, so that the type itself needs none.
    drain: fn(Recording<B>),
}

struct Recording<B> {
    body: Pin<Box<B>>,
    /// The first piece, if it was waited for. It is in the copy already.
    first: Option<Frame<Bytes>>,
    /// There is no more: it is kept once it was charged for.
    has_ended: bool,
    head: KeptResponse,
    copy: Option<BytesMut>,
    limit: usize,
    target: recording::Recording,
    /// Whether it was charged for. Of what was not, nothing is kept.
    is_charged: bool,
    /// Whether the client gets it.
    is_released: bool,
}

impl<B> Recorder<B>
where
    B: Body<Data = Bytes> + Send + 'static,
{
    pub(super) fn new(parts: &Parts, asked: &HeaderMap, body: B, target: recording::Recording) -> Self {
        let limit = target.limit();
        // A connection follows 101, which cannot be replayed.
        let is_kept = body.size_hint().lower() <= limit as u64 && parts.status != StatusCode::SWITCHING_PROTOCOLS;
        let head = KeptResponse::of(parts, asked, target.now);
        let copy = is_kept.then(BytesMut::new);
        let recording = Recording {
            body: Box::pin(body),
            first: None,
            has_ended: false,
            head,
            copy,
            limit,
            target,
            is_charged: false,
            is_released: false,
        };
        Self { recording: Some(recording), drain: spawn_drain }
    }
}

impl<B> Recorder<B> {
    /// Forgets it.
    fn discard(&mut self) {
        self.recording = None;
    }

    /// Records that the client gets it.
    pub(super) fn release(&mut self) {
        if let Some(recording) = &mut self.recording {
            recording.is_released = true;
        }
    }
}

impl<B: Body<Data = Bytes>> Recorder<B> {
    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let Some(recording) = &mut self.recording else { return Poll::Ready(None) };
        if let Some(first) = recording.first.take() {
            if recording.body.is_end_stream() {
                self.complete();
            }
            return Poll::Ready(Some(Ok(first)));
        }
        if recording.has_ended {
            self.complete();
            return Poll::Ready(None);
        }
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
                // A response that broke off is not one to replay, and was not delivered: its client was here to read the rest. It stays
                // charged, since what has left may be nearly all, and clients can bring an end about. What settled is listed as owed.
                let PaymentKey { payer, nonce, .. } = recording.target.key;
                tracing::warn!(%payer, %nonce, "a paid response broke off, and its payer got a part of it");
                (recording.copy, recording.is_released) = (None, false);
                self.complete();
            }
            Poll::Pending => {}
        }
        polled
    }

    pub(super) fn is_end_stream(&self) -> bool {
        let is_over = |recording: &Recording<B>| recording.has_ended || recording.body.is_end_stream();
        self.recording.as_ref().is_none_or(|recording| recording.first.is_none() && is_over(recording))
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.recording.as_ref().map_or(SizeHint::with_exact(0), Recording::size_hint)
    }

    /// Waits for the first piece. Returns `false` if there is an error instead.
    async fn begin(&mut self) -> bool {
        let Some(recording) = &mut self.recording else { return true };
        match poll_fn(|cx| recording.body.as_mut().poll_frame(cx)).await {
            Some(Ok(frame)) => {
                recording.copy(&frame);
                recording.first = Some(frame);
                true
            }
            Some(Err(_)) => false,
            None => {
                recording.has_ended = true;
                true
            }
        }
    }

    fn complete(&mut self) {
        if let Some(recording) = self.recording.take() {
            let Recording { head, copy, target, is_released, .. } = recording;
            let copy = copy.map(|copy| KeptResponse { body: copy.freeze(), ..head }.to_stored());
            spawn(target.end(copy, is_released));
        }
    }
}

impl<B> Drop for Recorder<B> {
    fn drop(&mut self) {
        if let Some(recording) = self.recording.take().filter(|recording| recording.is_charged) {
            (self.drain)(recording);
        }
    }
}

impl<B: Body> Recording<B> {
    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let first = self.first.as_ref().and_then(Frame::data_ref).map_or(0, |data| data.len() as u64);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(first));
        }
        hint.set_lower(hint.lower().saturating_add(first));
        hint
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
            while recording.copy.is_some() && !recording.has_ended && !recording.body.is_end_stream() {
                match poll_fn(|cx| recording.body.as_mut().poll_frame(cx)).await {
                    Some(Ok(frame)) => recording.copy(&frame),
                    Some(Err(_)) => return false,
                    None => break,
                }
            }
            true
        });
        let is_whole = drained.await == Ok(true);
        let Recording { head, copy, target, is_released, .. } = recording;
        let copy = copy.filter(|_| is_whole).map(|copy| KeptResponse { body: copy.freeze(), ..head }.to_stored());
        target.end(copy, is_released).await;
    });
}

/// Does work at once and leaves to a task only what there is to wait for: mostly nothing.
fn spawn_if_pending(work: impl Future<Output = ()> + Send + 'static) {
    let mut work = Box::pin(work);
    if work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        spawn(work);
    }
}

/// Outside a runtime there is no client left to replay to.
fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(work);
    }
}
