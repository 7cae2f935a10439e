//! A response body that may have been looked into.

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
    /// The body of a response from [`AddPayment`](super::AddPayment): the inner service's, all of it.
    ///
    /// The body of a 402 may be an offer of x402 v1. Where it turned out to be none, what was read of it comes first, then
    /// the rest; the bytes are the same, the frames may be longer.
    pub struct ResponseBody<R: Body> {
        #[pin]
        kind: Kind<R, R::Error>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<R, E> {
        Untouched { #[pin] body: R },
        Opened { opened: Opened<R, E> },
    }
}

/// In the order in which it is given back; what ended the reading excludes what would come after it.
struct Opened<R, E> {
    start: Bytes,
    error: Option<E>,
    trailers: Option<HeaderMap>,
    rest: Option<Pin<Box<R>>>,
}

impl<R: Body<Data = Bytes>> ResponseBody<R> {
    pub(super) fn untouched(body: R) -> Self {
        Self { kind: Kind::Untouched { body } }
    }

    /// Reads an untouched body of at most `limit` bytes. Returns its bytes, if that is all of it and it came within `patience`, and a
    /// body that is whole in any case.
    pub(super) async fn open(self, limit: usize, patience: Duration) -> (Option<Bytes>, Self) {
        let body = match self.kind {
            Kind::Untouched { body } if body.size_hint().lower() <= limit as u64 => body,
            kind => return (None, Self { kind }),
        };
        let deadline = Instant::now() + patience;
        let mut rest = Box::pin(body);
        let (mut text, mut error, mut trailers, mut is_whole) = (Vec::new(), None, None, false);
        // Empty frames count, too: a body may have any number of them at hand.
        for _ in 0..=limit {
            match timeout_at(deadline, poll_fn(|cx| rest.as_mut().poll_frame(cx))).await {
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => text.extend_from_slice(&data),
                    Err(frame) => trailers = frame.into_trailers().ok(),
                },
                Ok(Some(Err(failure))) => error = Some(failure),
                Ok(None) => is_whole = true,
                Err(_) => break,
            }
            if is_whole || error.is_some() || text.len() > limit {
                break;
            }
        }
        let start = Bytes::from(text);
        let ended = is_whole || error.is_some();
        let opened = Opened { start: start.clone(), error, trailers, rest: (!ended).then_some(rest) };
        (is_whole.then_some(start).filter(|text| text.len() <= limit), Self { kind: Kind::Opened { opened } })
    }
}

impl<R: Body<Data = Bytes>> Body for ResponseBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        match self.project().kind.project() {
            KindProjection::Untouched { body } => body.poll_frame(cx),
            KindProjection::Opened { opened } => opened.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Untouched { body } => body.is_end_stream(),
            Kind::Opened { opened: Opened { start, error, trailers, rest } } => {
                let is_over = rest.as_ref().is_none_or(|rest| rest.is_end_stream());
                start.is_empty() && error.is_none() && trailers.is_none() && is_over
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Untouched { body } => body.size_hint(),
            Kind::Opened { opened } => {
                let mut hint = match &opened.rest {
                    Some(rest) => rest.size_hint(),
                    None if opened.error.is_some() => SizeHint::new(),
                    None => SizeHint::with_exact(0),
                };
                let start = opened.start.len() as u64;
                if let Some(upper) = hint.upper() {
                    hint.set_upper(upper.saturating_add(start));
                }
                hint.set_lower(hint.lower().saturating_add(start));
                hint
            }
        }
    }
}

impl<R: Body<Data = Bytes>> Opened<R, R::Error> {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        if !self.start.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(mem::take(&mut self.start)))));
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

impl<R: Body> fmt::Debug for ResponseBody<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}
