//! The future of a request that passes the layer.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower::util::Oneshot;
use tower_service::Service;

use super::{answer, request_body::RequestBody, response_body::ResponseBody};

type Boxed<R, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<R>>, E>> + Send>>;

pin_project! {
    /// The response of [`RequirePayment`](super::RequirePayment), in the making.
    pub struct ResponseFuture<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        #[pin]
        kind: Kind<S, B, R>,
        cors: Option<answer::Cors>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        /// Answered by the layer at once.
        Ready { response: Option<Response<ResponseBody<R>>> },
        /// A preflight, passed on unpaid: its answer is its head.
        Passed { #[pin] response: Oneshot<S, Request<RequestBody<B>>> },
        /// Being paid for.
        Paid { response: Boxed<R, S::Error> },
    }
}

impl<S, B, R> ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
{
    pub(super) fn ready(response: Response<ResponseBody<R>>, cors: Option<answer::Cors>) -> Self {
        Self { kind: Kind::Ready { response: Some(response) }, cors }
    }

    pub(super) fn preflight(response: Oneshot<S, Request<RequestBody<B>>>) -> Self {
        Self { kind: Kind::Passed { response }, cors: None }
    }

    pub(super) fn paid(response: Boxed<R, S::Error>, cors: Option<answer::Cors>) -> Self {
        Self { kind: Kind::Paid { response }, cors }
    }
}

impl<S, B, R> Future for ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut response = match this.kind.project() {
            KindProjection::Ready { response } => match response.take() {
                Some(response) => response,
                // Polled after it was ready; a future need not answer twice.
                None => return Poll::Pending,
            },
            KindProjection::Passed { response } => answer::head_only(ready!(response.poll(cx))?),
            KindProjection::Paid { response } => ready!(response.as_mut().poll(cx))?,
        };
        if let Some(cors) = this.cors {
            cors.apply(response.headers_mut());
        }
        Poll::Ready(Ok(response))
    }
}

impl<S, B, R> fmt::Debug for ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResponseFuture")
    }
}
