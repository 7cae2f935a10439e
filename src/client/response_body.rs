//! A response body of which the start may have been read.

use std::{
    fmt,
    future::poll_fn,
    mem,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::{Instant, timeout_at};

pin_project! {
    /// The body of a response from [`AddPayment`](super::AddPayment), with the bytes of the inner service's.
    ///
    /// The body of a 402 may have been read for offers of x402 v1. If it had none, the bytes that were read come first, in one frame,
    /// and then the rest.
    pub struct PaidResponseBody<R: Body> {
        #[pin]
        kind: Kind<R, R::Error>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<R, E> {
        Unread { #[pin] body: R },
        Read { read: ReadStart<R, E> },
    }
}

/// The start of a body that was read, and the rest of it. The fields are in the order in which they are returned.
struct ReadStart<R, E> {
    bytes: Bytes,
    /// If there is an error, there is no rest.
    error: Option<E>,
    trailers: Option<HeaderMap>,
    rest: Option<Pin<Box<R>>>,
}

impl<R: Body<Data = Bytes>> PaidResponseBody<R> {
    pub(super) fn unread(body: R) -> Self {
        Self { kind: Kind::Unread { body } }
    }

    /// Reads a body of at most `limit` bytes. Returns its bytes if it is complete and came within `timeout`; and, in any case, a body
    /// with all bytes.
    pub(super) async fn read(self, limit: usize, timeout: Duration) -> (Option<Bytes>, Self) {
        let body = match self.kind {
            Kind::Unread { body } if body.size_hint().lower() <= limit as u64 => body,
            kind => return (None, Self { kind }),
        };
        let deadline = Instant::now() + timeout;
        let mut rest = Box::pin(body);
        let (mut bytes, mut error, mut trailers, mut is_complete) = (Vec::new(), None, None, false);
        // Counts frames, not bytes, because a body may have any number of empty frames at hand.
        for _ in 0..=limit {
            match timeout_at(deadline, poll_fn(|cx| rest.as_mut().poll_frame(cx))).await {
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => bytes.extend_from_slice(&data),
                    Err(frame) => trailers = frame.into_trailers().ok(),
                },
                Ok(Some(Err(failure))) => error = Some(failure),
                Ok(None) => is_complete = true,
                Err(_) => break,
            }
            if is_complete || error.is_some() || bytes.len() > limit {
                break;
            }
        }
        let bytes = Bytes::from(bytes);
        let has_ended = is_complete || error.is_some();
        let read = ReadStart { bytes: bytes.clone(), error, trailers, rest: (!has_ended).then_some(rest) };
        (is_complete.then_some(bytes).filter(|bytes| bytes.len() <= limit), Self { kind: Kind::Read { read } })
    }
}

impl<R: Body<Data = Bytes>> Body for PaidResponseBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        match self.project().kind.project() {
            KindProjection::Unread { body } => body.poll_frame(cx),
            KindProjection::Read { read } => read.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Unread { body } => body.is_end_stream(),
            Kind::Read { read: ReadStart { bytes, error, trailers, rest } } => {
                let is_over = rest.as_ref().is_none_or(|rest| rest.is_end_stream());
                bytes.is_empty() && error.is_none() && trailers.is_none() && is_over
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Unread { body } => body.size_hint(),
            Kind::Read { read } => {
                let mut hint = match &read.rest {
                    Some(rest) => rest.size_hint(),
                    None if read.error.is_some() => SizeHint::new(),
                    None => SizeHint::with_exact(0),
                };
                let length = read.bytes.len() as u64;
                if let Some(upper) = hint.upper() {
                    hint.set_upper(upper.saturating_add(length));
                }
                hint.set_lower(hint.lower().saturating_add(length));
                hint
            }
        }
    }
}

impl<R: Body<Data = Bytes>> ReadStart<R, R::Error> {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        if !self.bytes.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(mem::take(&mut self.bytes)))));
        }
        if let Some(error) = self.error.take() {
            return Poll::Ready(Some(Err(error)));
        }
        if let Some(trailers) = self.trailers.take() {
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        self.rest.as_mut().map_or(Poll::Ready(None), |rest| rest.as_mut().poll_frame(cx))
    }
}

impl<R: Body> fmt::Debug for PaidResponseBody<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PaidResponseBody").finish_non_exhaustive()
    }
}
