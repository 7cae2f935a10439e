//! The response body that leaves the layer.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::record::Recorder;

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
        Self::replay(bytes.into(), None)
    }

    pub(super) fn replay(bytes: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        Self { kind: Kind::Own { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()), trailers } }
    }

    pub(super) fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    pub(super) fn recorded(recorder: Box<Recorder<B>>) -> Self {
        Self { kind: Kind::Recorded { recorder } }
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
