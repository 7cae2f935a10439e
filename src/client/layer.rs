//! The payer as a tower layer, around any HTTP client.

use std::{
    error::Error,
    future::poll_fn,
    mem,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;
use url::Url;

use super::{
    AddPaymentError, Budget, PaidResponseBody, Payer, Purchase, Refusal, RetryPolicy,
    exchange::{Exchange, is_passed_on, send_and_pay},
    purchase::{Identity, hash_body},
};
use crate::protocol::MAX_REQUIRED_BODY;

/// Makes a tower HTTP client pay for requests that are answered 402, within its payer's budget.
///
/// The client is a `tower::Service<http::Request<B>, Response = http::Response<R>>` whose clones share their connections, such
/// as hyper-util's `Client`. Requests are treated as by [`PaymentMiddleware`](super::PaymentMiddleware): sent unpaid first, and on a
/// 402 sent again with one payment. The response carries its [`Receipt`](super::Receipt), which
/// [`ReceiptExt`](super::ReceiptExt) reads.
///
/// # Bodies
///
/// The request's body is sent at least twice, so `B` must be [`Clone`], as `Full<Bytes>`, `Empty` and `String` are. Collect a body that
/// streams first (`BodyExt::collect`, within a bound).
///
/// The response's body must be an [`http_body::Body`] of [`Bytes`](bytes::Bytes), as hyper's and axum's are. It is returned as a
/// [`PaidResponseBody`](super::PaidResponseBody), since the body of a 402 may have been read for offers of x402 v1.
///
/// # Redirects
///
/// A 3xx is returned like any other answer. Do not put a layer that follows redirects *below* this one: it would send the payment to
/// any server that the seller names.
///
/// # Order of layers
///
/// A retry layer above this one presents the same payment again: see [`Purchase`](super::Purchase). Put none below it: this one would take the
/// answer to the last attempt for the answer to all, and call a payment failed that an earlier attempt has settled. Its amount stays reserved.
///
/// Requests must have an absolute URI here, because limits per host and the journal need it. A timeout above this layer leaves the
/// outcome of a payment unknown; a timeout below it counts as an unclear answer.
///
/// ```no_run
/// # #[cfg(feature = "local-signer")]
/// # async fn example<C>(http: C) -> Result<(), Box<dyn std::error::Error>>
/// # where
/// #     C: tower_service::Service<http::Request<String>, Response = http::Response<String>> + Clone + Send + 'static,
/// #     C::Error: std::error::Error + Send + Sync + 'static,
/// #     C::Future: Send,
/// # {
/// use tower_layer::Layer;
/// use tower_service::Service;
/// use tower_x402::client::{AddPaymentLayer, Budget, Payer, ReceiptExt, key};
///
/// let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
/// let payer = Payer::builder(key::from_env("STUDENT_PRIVATE_KEY")?).budget(budget).build();
/// let mut client = AddPaymentLayer::new(payer).layer(http);
///
/// let request = http::Request::post("https://api.example/evaluate").body("17 * 23 = 391".to_owned())?;
/// std::future::poll_fn(|cx| client.poll_ready(cx)).await?;
/// let response = client.call(request).await?;
/// if let Some(receipt) = response.receipt() {
///     println!("{} for {}", receipt.outcome, receipt.amount);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct AddPaymentLayer {
    payer: Payer,
    retry: RetryPolicy,
}

impl AddPaymentLayer {
    /// Creates a layer that pays as `payer`, with the default [`RetryPolicy`].
    pub fn new(payer: Payer) -> Self {
        Self { payer, retry: RetryPolicy::default() }
    }

    /// Sets how often a payment is sent again while its outcome is unclear.
    pub const fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Returns the payer's budget.
    pub fn budget(&self) -> &Budget {
        self.payer.budget()
    }
}

impl<S> Layer<S> for AddPaymentLayer {
    type Service = AddPayment<S>;

    fn layer(&self, inner: S) -> Self::Service {
        AddPayment { inner, payer: self.payer.clone(), retry: self.retry }
    }
}

/// An HTTP client that pays. Created by [`AddPaymentLayer`].
#[derive(Clone, Debug)]
pub struct AddPayment<S> {
    inner: S,
    payer: Payer,
    retry: RetryPolicy,
}

impl<S, B, R> Service<Request<B>> for AddPayment<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>> + Send,
    S::Future: Send,
    B: Body + Clone + Send + 'static,
    R: Body<Data = Bytes, Error: Send> + Send + 'static,
{
    type Response = Response<PaidResponseBody<R>>;
    type Error = AddPaymentError<S::Error>;
    /// If it is dropped while a payment is under way, the amount stays reserved.
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(AddPaymentError::Inner)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The service that was polled ready must be the one that is called.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);
        let (payer, retry) = (self.payer.clone(), self.retry);
        Box::pin(async move {
            let is_passed_on = is_passed_on(request.method(), request.headers());
            let mut exchange = TowerExchange { inner, request };
            match is_passed_on {
                true => exchange.send().await.map_err(AddPaymentError::Inner),
                false => send_and_pay(&payer, &retry, exchange).await,
            }
        })
    }
}

struct TowerExchange<S, B> {
    inner: S,
    request: Request<B>,
}

impl<S, B, R> Exchange for TowerExchange<S, B>
where
    S: Service<Request<B>, Response = Response<R>> + Send,
    S::Error: Into<Box<dyn Error + Send + Sync>> + Send,
    S::Future: Send,
    B: Body + Clone + Send,
    R: Body<Data = Bytes, Error: Send> + Send,
{
    type Response = Response<PaidResponseBody<R>>;
    type Error = S::Error;

    async fn send(&mut self) -> Result<Self::Response, Self::Error> {
        poll_fn(|cx| self.inner.poll_ready(cx)).await?;
        let request = self.request.clone();
        Ok(self.inner.call(request).await?.map(PaidResponseBody::unread))
    }

    fn target(&self, _: &Self::Response) -> Result<(Method, Url), Refusal> {
        let url = Url::parse(&self.request.uri().to_string()).ok().filter(Url::has_host).ok_or(Refusal::NoHost)?;
        Ok((self.request.method().clone(), url))
    }

    fn add_header(&mut self, name: HeaderName, value: HeaderValue) {
        self.request.headers_mut().insert(name, value);
    }

    async fn read_body(response: Self::Response, timeout: Duration) -> (Option<Bytes>, Self::Response) {
        let (parts, body) = response.into_parts();
        let (bytes, body) = body.read(MAX_REQUIRED_BODY, timeout).await;
        (bytes, Response::from_parts(parts, body))
    }

    fn head(response: &Self::Response) -> (StatusCode, &HeaderMap) {
        (response.status(), response.headers())
    }

    fn extensions_mut(response: &mut Self::Response) -> &mut Extensions {
        response.extensions_mut()
    }

    fn purchase(&self) -> Option<Purchase> {
        self.request.extensions().get().cloned()
    }

    fn identity(&self) -> Identity {
        let (method, url, headers) = (self.request.method(), self.request.uri().to_string(), self.request.headers());
        Identity::of(method, &url, headers, |hash| hash_body(self.request.body().clone(), hash))
    }
}
