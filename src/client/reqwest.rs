//! The payer as a reqwest middleware.

use std::time::Duration;

use ::reqwest::{Body, Client, Request, Response, ResponseBuilderExt as _, StatusCode, Url, redirect};
use async_trait::async_trait;
use bytes::Bytes;
use http::{Extensions, HeaderMap, Method};
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next as Chain};

use super::{
    Budget, Payer, PaymentError, Refusal, ResponseBody,
    demand::{Demand, Place},
    present::{Carrier, present},
    retry::Retry,
};
use crate::protocol::{
    MAX_REQUIRED_BODY,
    header_name::{PAYMENT_SIGNATURE, X_PAYMENT},
};

/// Pays for requests that are answered 402, within its payer's budget.
///
/// A request is sent unpaid first; a free resource costs nothing extra. On a 402 with an offer, the payment is signed and the
/// same request sent again with it. If the answer to that does not come, or says that the server is not done (5xx; 409 or 429
/// with `Retry-After`), the *same* payment is presented again, a bounded number of times and not past its validity. One
/// request never leads to a second signature. The response carries its [`Receipt`](super::Receipt) (see [`ReceiptExt`](super::ReceiptExt)).
///
/// A 402 without `PAYMENT-REQUIRED` may be one of x402 v1, which makes its offers in the body: JSON is read for that, up to 64 KiB
/// and for no longer than an attempt takes (ten seconds at most). What turns out not to be x402's is returned as it
/// came, as is the answer to a request that already carries a payment header of the caller's, and to a `HEAD`, whose answer holds
/// nothing to pay for.
///
/// # Redirects
///
/// reqwest follows redirects below its middlewares and takes the payment along, to whatever origin the server names. Use
/// [`client`](Self::client), which turns that off: a 3xx is then returned like any other answer. Around a client that does
/// follow redirects, a 402 that comes from elsewhere is refused ([`Refusal::Redirected`]), but a redirect of the paid
/// request itself cannot be stopped.
///
/// ```no_run
/// # #[cfg(feature = "local-signer")]
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_signer_local::PrivateKeySigner;
/// use tower_x402::client::{Budget, Payer, PaymentMiddleware, ReceiptExt};
///
/// let key: PrivateKeySigner = std::env::var("STUDENT_PRIVATE_KEY")?.parse()?;
/// let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
/// let payer = Payer::builder(key).budget(budget.clone()).build();
/// let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder())?;
///
/// let response = client.post("https://api.example/evaluate").body("17 * 23 = 391").send().await?;
/// if let Some(receipt) = response.receipt() {
///     println!("{} for {}, {} left", receipt.outcome, receipt.amount, budget.remaining());
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct PaymentMiddleware {
    payer: Payer,
    retry: Retry,
}

impl PaymentMiddleware {
    /// Pays as `payer`: five attempts of 30 seconds for each payment.
    pub const fn new(payer: Payer) -> Self {
        Self { payer, retry: Retry::DEFAULT }
    }

    /// How often one payment is presented at most; at least once.
    pub const fn max_attempts(mut self, attempts: u32) -> Self {
        self.retry.max_attempts = attempts;
        self
    }

    /// How long each paid attempt waits for the head of its response.
    pub const fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.retry.attempt_timeout = timeout;
        self
    }

    /// The pause before the second attempt, doubled for each further one, unless the server says how long to wait.
    pub const fn first_pause(mut self, pause: Duration) -> Self {
        self.retry.first_pause = pause;
        self
    }

    /// The budget it pays from.
    pub fn budget(&self) -> &Budget {
        self.payer.budget()
    }

    /// A client that pays, and that follows no redirects.
    ///
    /// # Errors
    /// What [`reqwest::ClientBuilder::build`] returns.
    pub fn client(self, builder: ::reqwest::ClientBuilder) -> ::reqwest::Result<ClientWithMiddleware> {
        let client: Client = builder.redirect(redirect::Policy::none()).build()?;
        Ok(reqwest_middleware::ClientBuilder::new(client).with(self).build())
    }
}

#[async_trait]
impl Middleware for PaymentMiddleware {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        chain: Chain<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let is_paid = [PAYMENT_SIGNATURE, X_PAYMENT].iter().any(|name| request.headers().contains_key(*name));
        if is_paid || request.method() == Method::HEAD {
            return chain.run(request, extensions).await;
        }
        let url = request.url().clone();
        let copy = request.try_clone();
        let response = chain.clone().run(request, extensions).await?;
        let (body, response) = match Demand::place(response.status(), response.headers()) {
            Place::Nowhere => return Ok(response),
            Place::Header => (None, response),
            Place::Body => open(response, self.retry.patience()).await,
        };
        let demand = Demand::read(response.headers(), body.as_deref());
        let Some(demand) = demand.map_err(|why| error(PaymentError::Unreadable(why)))? else { return Ok(response) };
        let mut paid = copy.ok_or_else(|| error(Refusal::BodyNotReplayable))?;
        if !same_resource(&url, response.url()) {
            return Err(error(Refusal::Redirected { to: without_secrets(response.url()) }));
        }
        drop(response);
        let payment = self.payer.meet(demand, paid.method(), &url).await.map_err(error)?;
        paid.headers_mut().insert(payment.header_name(), payment.header().clone());
        let carrier = Paid { request: paid, extensions, chain };
        present(&self.payer, &self.retry, payment, carrier).await.map_err(error)
    }
}

struct Paid<'a> {
    request: Request,
    extensions: &'a mut Extensions,
    chain: Chain<'a>,
}

impl Carrier for Paid<'_> {
    type Answer = Response;
    type Error = reqwest_middleware::Error;

    async fn carry(&mut self) -> reqwest_middleware::Result<Response> {
        // It was cloned before, so it can be cloned again.
        let copy = self.request.try_clone().ok_or_else(|| error(Refusal::BodyNotReplayable))?;
        self.chain.clone().run(copy, self.extensions).await
    }

    async fn open(answer: Response, patience: Duration) -> (Option<Bytes>, Response) {
        open(answer, patience).await
    }

    fn head(answer: &Response) -> (StatusCode, &HeaderMap) {
        (answer.status(), answer.headers())
    }

    fn extensions(answer: &mut Response) -> &mut Extensions {
        answer.extensions_mut()
    }
}

/// The body of a response, if it is short and comes in time; and the response as it came.
async fn open(response: Response, patience: Duration) -> (Option<Bytes>, Response) {
    let carries_url = http::Response::builder().url(response.url().clone()).body(());
    let (mut parts, body) = http::Response::<Body>::from(response).into_parts();
    // reqwest keeps the URL elsewhere, and looks for it here on the way back.
    if let Ok(carrier) = carries_url {
        parts.extensions.extend(carrier.into_parts().0.extensions);
    }
    let (text, body) = ResponseBody::untouched(body).open(MAX_REQUIRED_BODY, patience).await;
    (text, http::Response::from_parts(parts, Body::wrap(body)).into())
}

fn error(error: impl Into<PaymentError>) -> reqwest_middleware::Error {
    reqwest_middleware::Error::middleware(error.into())
}

/// Whether a response comes from where the request was for; fragments and credentials are not sent in a URL.
fn same_resource(asked: &Url, answered: &Url) -> bool {
    asked.origin() == answered.origin() && asked.path() == answered.path() && asked.query() == answered.query()
}

/// A URL that may be shown: the query may hold a token.
fn without_secrets(url: &Url) -> String {
    format!("{}{}", url.origin().ascii_serialization(), url.path())
}
