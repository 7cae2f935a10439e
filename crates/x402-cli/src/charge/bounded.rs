//! The body of a request, up to a bound.

use std::{
    error::Error,
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, header::EXPECT};
use http_body::{Body as _, Frame, SizeHint};
use tower_x402::server::drain;

/// The body was longer than it may be.
#[derive(Debug, thiserror::Error)]
#[error("the body is longer than it may be")]
pub(super) struct TooLong;

impl TooLong {
    /// Returns `true` if this is why something failed.
    pub(super) fn is_cause_of(error: &(dyn Error + 'static)) -> bool {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if error.is::<Self>() {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

/// A body that fails once it is longer than a bound. The unread rest is read in the background, within the bounds of [`drain`]: otherwise a
/// client that is still sending would not see its answer.
#[derive(Debug)]
pub(super) struct Bounded {
    body: Body,
    /// The number of bytes that may still come.
    left: usize,
    expect: Option<HeaderValue>,
}

impl Bounded {
    /// `headers` are those of the request. A client that waits to be asked for its body is not asked in the background.
    pub(super) fn new(headers: &HeaderMap, body: Body, most: usize) -> Self {
        Self { body, left: most, expect: headers.get(EXPECT).cloned() }
    }
}

impl http_body::Body for Bounded {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            match self.left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                Some(left) => self.left = left,
                None => return Poll::Ready(Some(Err(TooLong.into()))),
            }
        }
        polled.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        if self.body.is_end_stream() {
            return;
        }
        let mut request = Request::new(std::mem::take(&mut self.body));
        if let Some(expect) = self.expect.take() {
            request.headers_mut().insert(EXPECT, expect);
        }
        drain(request);
    }
}
