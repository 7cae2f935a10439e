//! The payer as a reqwest middleware.

use std::time::Duration;

use ::reqwest::{Body, Client, Request, Response, ResponseBuilderExt as _, StatusCode, Url, redirect, retry};
use async_trait::async_trait;
use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method};
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use sha2::Digest as _;

use super::{
    AddPaymentError, Budget, PaidResponseBody, Payer, PaymentError, Purchase, Refusal, RetryPolicy,
    exchange::{Exchange, is_passed_on, send_and_pay},
    purchase::Identity,
};
use crate::protocol::MAX_REQUIRED_BODY;

/// Pays for requests that are answered 402, within its payer's budget.
///
/// Each request is sent unpaid first, so a free resource costs nothing extra. On a 402 with an offer, the middleware signs one payment
/// and sends the same request again with it. While the answer to that is unclear, it sends the *same* payment again, as its
/// [`RetryPolicy`] says. One request never leads to a second signature, also if a retry middleware above this one repeats it: see
/// [`Purchase`](super::Purchase). The response carries its [`Receipt`](super::Receipt), which
/// [`ReceiptExt`](super::ReceiptExt) reads.
///
/// A 402 without `PAYMENT-REQUIRED` may be one of x402 v1, with offers in its body. A JSON body is read for them, up to 64 KiB and for at
/// most 10 seconds. The caller still gets the whole body.
///
/// These are passed on without paying: a 402 that is not of x402, the answer to a request with a payment header of the caller's own, and
/// the answer to a `HEAD`, for which no server charges.
///
/// # Redirects
///
/// reqwest follows redirects below its middlewares and takes the payment header along, to any origin. Use [`client`](Self::client),
/// which turns that off and returns a 3xx like any other answer. Around a client that follows redirects, a 402 from another URL is
/// refused ([`Refusal::Redirected`]), but a redirect of the paid request cannot be stopped.
///
/// # Retries
///
/// Add a retry middleware before this one, so that it is above: it repeats the whole, and the same payment is presented again. Below this
/// one, where [`with`](reqwest_middleware::ClientBuilder::with) puts those that are added to a client that pays, it would hide the answers to
/// earlier attempts: a payment may then be called failed that one of them has settled. Its amount stays reserved.
/// [`client`](Self::client) turns off reqwest's own retries.
///
/// ```no_run
/// # #[cfg(feature = "local-signer")]
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::client::{Budget, Payer, PaymentMiddleware, ReceiptExt, key};
///
/// let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
/// let payer = Payer::builder(key::from_env("STUDENT_PRIVATE_KEY")?).budget(budget.clone()).build();
/// let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder())?;
///
/// let response = client.post("https://api.example/evaluate").body("17 * 23 = 391").send().await?;
/// if let Some(receipt) = response.receipt() {
///     println!("{} for {}, {} left", receipt.outcome, receipt.amount, budget.remaining());
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct PaymentMiddleware {
    payer: Payer,
    retry: RetryPolicy,
    max_buffered_body: usize,
}

impl PaymentMiddleware {
    /// Creates a middleware that pays as `payer`, with the default [`RetryPolicy`].
    pub fn new(payer: Payer) -> Self {
        Self { payer, retry: RetryPolicy::default(), max_buffered_body: 8 << 20 }
    }

    /// Sets how often a payment is sent again while its outcome is unclear.
    pub const fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Sets how much of a request body that streams, such as a multipart form, is read into memory so that it can be sent again with the
    /// payment, in bytes. Default: 8 MiB.
    ///
    /// A longer one is sent as it streams; if its request is answered 402, it is not paid for
    /// ([`Refusal::BodyNotReplayable`](super::Refusal::BodyNotReplayable)). Bodies that are given as bytes have no limit.
    pub const fn max_buffered_body(mut self, bytes: usize) -> Self {
        self.max_buffered_body = bytes;
        self
    }

    /// Returns the payer's budget.
    pub fn budget(&self) -> &Budget {
        self.payer.budget()
    }

    /// Builds a client that pays. It follows no redirects, and repeats requests only as the [`RetryPolicy`] says: the builder's redirect and retry
    /// policies are replaced.
    ///
    /// # Errors
    /// What [`reqwest::ClientBuilder::build`] returns.
    pub fn client(self, builder: ::reqwest::ClientBuilder) -> ::reqwest::Result<ClientWithMiddleware> {
        // reqwest's own retries would hide the answer to the first attempt. With HTTP/2 they are its default.
        let client: Client = builder.redirect(redirect::Policy::none()).retry(retry::never()).build()?;
        Ok(reqwest_middleware::ClientBuilder::new(client).with(self).build())
    }
}

#[async_trait]
impl Middleware for PaymentMiddleware {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        if is_passed_on(request.method(), request.headers()) {
            return next.run(request, extensions).await;
        }
        let request = buffered(request, self.max_buffered_body).await;
        let url = request.url().clone();
        let exchange = ReqwestExchange { request: Some(request), url, extensions, next };
        send_and_pay(&self.payer, &self.retry, exchange).await.map_err(|error| match error {
            AddPaymentError::Inner(error) => error,
            AddPaymentError::Payment(error) => reqwest_middleware::Error::middleware(error),
        })
    }
}

/// Reads a body that streams into memory, if it has at most `limit` bytes.
async fn buffered(mut request: Request, limit: usize) -> Request {
    /// A caller that streams slowly has its own timeouts.
    const NEVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    let Some(body) = request.body_mut().take_if(|body| body.as_bytes().is_none()) else { return request };
    let (bytes, body) = PaidResponseBody::unread(body).read(limit, NEVER).await;
    *request.body_mut() = Some(bytes.map_or_else(|| Body::wrap(body), Body::from));
    request
}

struct ReqwestExchange<'a> {
    /// `None` once a request was sent whose body is a stream: it cannot be sent again.
    request: Option<Request>,
    url: Url,
    extensions: &'a mut Extensions,
    next: Next<'a>,
}

impl Exchange for ReqwestExchange<'_> {
    type Response = Response;
    type Error = reqwest_middleware::Error;

    async fn send(&mut self) -> reqwest_middleware::Result<Response> {
        let not_replayable = || reqwest_middleware::Error::middleware(PaymentError::from(Refusal::BodyNotReplayable));
        let request = self.request.take().ok_or_else(not_replayable)?;
        self.request = request.try_clone();
        self.next.clone().run(request, self.extensions).await
    }

    fn target(&self, response: &Response) -> Result<(Method, Url), Refusal> {
        let request = self.request.as_ref().ok_or(Refusal::BodyNotReplayable)?;
        if !is_same_resource(&self.url, response.url()) {
            return Err(Refusal::Redirected { to: without_secrets(response.url()) });
        }
        Ok((request.method().clone(), self.url.clone()))
    }

    fn add_header(&mut self, name: HeaderName, value: HeaderValue) {
        if let Some(request) = &mut self.request {
            request.headers_mut().insert(name, value);
        }
    }

    async fn read_body(response: Response, timeout: Duration) -> (Option<Bytes>, Response) {
        let with_url = http::Response::builder().url(response.url().clone()).body(());
        let (mut parts, body) = http::Response::<Body>::from(response).into_parts();
        // The conversion back reads the URL from the extensions.
        if let Ok(with_url) = with_url {
            parts.extensions.extend(with_url.into_parts().0.extensions);
        }
        let (bytes, body) = PaidResponseBody::unread(body).read(MAX_REQUIRED_BODY, timeout).await;
        (bytes, http::Response::from_parts(parts, Body::wrap(body)).into())
    }

    fn head(response: &Response) -> (StatusCode, &HeaderMap) {
        (response.status(), response.headers())
    }

    fn extensions_mut(response: &mut Response) -> &mut Extensions {
        response.extensions_mut()
    }

    fn purchase(&self) -> Option<Purchase> {
        self.extensions.get().cloned()
    }

    fn identity(&self) -> Identity {
        let nothing = (Method::GET, HeaderMap::new());
        let request = self.request.as_ref();
        let (method, headers) =
            request.map_or((&nothing.0, &nothing.1), |request| (request.method(), request.headers()));
        Identity::of(method, self.url.as_str(), headers, |hash| match request.map(Request::body) {
            Some(Some(body)) => body.as_bytes().map(|bytes| hash.update(bytes)).is_some(),
            Some(None) => true,
            None => false,
        })
    }
}

/// Compares the parts of two URLs that a client sends: neither fragment nor credentials.
fn is_same_resource(asked: &Url, answered: &Url) -> bool {
    asked.origin() == answered.origin() && asked.path() == answered.path() && asked.query() == answered.query()
}

/// Leaves out the query, which may hold a token.
fn without_secrets(url: &Url) -> String {
    format!("{}{}", url.origin().ascii_serialization(), url.path())
}
