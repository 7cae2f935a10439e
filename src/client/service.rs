//! The payer around any tower HTTP client.

use std::{
    error::Error,
    fmt,
    future::poll_fn,
    mem,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Extensions, HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body::Body;
use tower_service::Service;
use url::Url;

use super::{
    Payer, PaymentError, Refusal, ResponseBody,
    demand::{Demand, Place},
    present::{Carrier, present},
    retry::Retry,
};
use crate::protocol::{
    MAX_REQUIRED_BODY,
    header_name::{PAYMENT_SIGNATURE, X_PAYMENT},
};

/// An HTTP client that pays; made by [`AddPaymentLayer`](super::AddPaymentLayer).
#[derive(Clone, Debug)]
pub struct AddPayment<S> {
    inner: S,
    payer: Payer,
    retry: Retry,
}

impl<S> AddPayment<S> {
    pub(super) const fn new(inner: S, payer: Payer, retry: Retry) -> Self {
        Self { inner, payer, retry }
    }

    /// The client underneath.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }
}

/// Why a request has no response.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddPaymentError<E> {
    /// The inner service failed before there was anything to pay.
    #[error(transparent)]
    Inner(E),
    /// The request had to be paid for, and was not, or has no answer.
    #[error(transparent)]
    Payment(PaymentError),
}

impl<E> AddPaymentError<E> {
    /// The payment error, if that is what it is.
    pub const fn payment(&self) -> Option<&PaymentError> {
        match self {
            Self::Inner(_) => None,
            Self::Payment(error) => Some(error),
        }
    }
}

impl<E, P: Into<PaymentError>> From<P> for AddPaymentError<E> {
    fn from(error: P) -> Self {
        Self::Payment(error.into())
    }
}

impl<S, B, R> Service<Request<B>> for AddPayment<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>> + Send,
    S::Future: Send,
    B: Clone + Send + 'static,
    R: Body<Data = Bytes, Error: Send> + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = AddPaymentError<S::Error>;
    type Future = AddPaymentFuture<R, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(AddPaymentError::Inner)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The service that was polled ready is the one that is called.
        let fresh = self.inner.clone();
        let inner = mem::replace(&mut self.inner, fresh);
        AddPaymentFuture(Box::pin(buy(inner, self.payer.clone(), self.retry, request)))
    }
}

async fn buy<S, B, R>(
    mut inner: S,
    payer: Payer,
    retry: Retry,
    mut request: Request<B>,
) -> Result<Response<ResponseBody<R>>, AddPaymentError<S::Error>>
where
    S: Service<Request<B>, Response = Response<R>> + Send,
    S::Error: Into<Box<dyn Error + Send + Sync>> + Send,
    S::Future: Send,
    B: Clone + Send,
    R: Body<Data = Bytes, Error: Send> + Send,
{
    let is_paid = [PAYMENT_SIGNATURE, X_PAYMENT].iter().any(|name| request.headers().contains_key(*name));
    if is_paid || request.method() == Method::HEAD {
        let response = inner.call(request).await.map_err(AddPaymentError::Inner)?;
        return Ok(response.map(ResponseBody::untouched));
    }
    let response = inner.call(request.clone()).await.map_err(AddPaymentError::Inner)?;
    let (body, response) = match Demand::place(response.status(), response.headers()) {
        Place::Nowhere => return Ok(response.map(ResponseBody::untouched)),
        Place::Header => (None, response.map(ResponseBody::untouched)),
        Place::Body => open(response.map(ResponseBody::untouched), retry.patience()).await,
    };
    let demand = Demand::read(response.headers(), body.as_deref()).map_err(PaymentError::Unreadable)?;
    let Some(demand) = demand else { return Ok(response) };
    drop(response);
    let url = absolute(request.uri())?;
    let payment = payer.meet(demand, request.method(), &url).await?;
    request.headers_mut().insert(payment.header_name(), payment.header().clone());
    Ok(present(&payer, &retry, payment, Paid { inner, request }).await?)
}

fn absolute(uri: &Uri) -> Result<Url, Refusal> {
    Url::parse(&uri.to_string()).ok().filter(Url::has_host).ok_or(Refusal::NoHost)
}

struct Paid<S, B> {
    inner: S,
    request: Request<B>,
}

impl<S, B, R> Carrier for Paid<S, B>
where
    S: Service<Request<B>, Response = Response<R>> + Send,
    S::Error: Into<Box<dyn Error + Send + Sync>> + Send,
    S::Future: Send,
    B: Clone + Send,
    R: Body<Data = Bytes, Error: Send> + Send,
{
    type Answer = Response<ResponseBody<R>>;
    type Error = S::Error;

    async fn carry(&mut self) -> Result<Self::Answer, Self::Error> {
        poll_fn(|cx| self.inner.poll_ready(cx)).await?;
        let copy = self.request.clone();
        Ok(self.inner.call(copy).await?.map(ResponseBody::untouched))
    }

    async fn open(answer: Self::Answer, patience: Duration) -> (Option<Bytes>, Self::Answer) {
        open(answer, patience).await
    }

    fn head(answer: &Self::Answer) -> (StatusCode, &HeaderMap) {
        (answer.status(), answer.headers())
    }

    fn extensions(answer: &mut Self::Answer) -> &mut Extensions {
        answer.extensions_mut()
    }
}

/// The body of a response, if it is short and comes in time; and the response as it came.
async fn open<R>(response: Response<ResponseBody<R>>, patience: Duration) -> (Option<Bytes>, Response<ResponseBody<R>>)
where
    R: Body<Data = Bytes, Error: Send> + Send,
{
    let (parts, body) = response.into_parts();
    let (text, body) = body.open(MAX_REQUIRED_BODY, patience).await;
    (text, Response::from_parts(parts, body))
}

type Answer<R, E> = Result<Response<ResponseBody<R>>, AddPaymentError<E>>;

/// The response of an [`AddPayment`]. Dropped while a payment is under way, it leaves the amount reserved.
pub struct AddPaymentFuture<R: Body, E>(Pin<Box<dyn Future<Output = Answer<R, E>> + Send>>);

impl<R: Body, E> Future for AddPaymentFuture<R, E> {
    type Output = Answer<R, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl<R: Body, E> fmt::Debug for AddPaymentFuture<R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddPaymentFuture").finish_non_exhaustive()
    }
}
