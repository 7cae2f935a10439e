//! The payer as a reqwest middleware.

use std::time::Duration;

use ::reqwest::{Client, Request, Response, StatusCode, Url, redirect};
use async_trait::async_trait;
use http::{Extensions, HeaderMap};
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next as Chain};

use super::{
    Budget, Payer, PaymentError, Refusal,
    present::{Carrier, present},
    retry::Retry,
};
use crate::protocol::header_name::PAYMENT_SIGNATURE;

/// Pays for requests that are answered 402, within its payer's budget.
///
/// A request is sent unpaid first; a free resource costs nothing extra. On a 402 with an offer, the payment is signed and the
/// same request sent again with it. If the answer to that does not come, or says that the server is not done (5xx; 409 or 429
/// with `Retry-After`), the *same* payment is presented again, a bounded number of times and not past its validity. One
/// request never leads to a second signature. The response carries its [`Receipt`](super::Receipt) (see [`ReceiptExt`](super::ReceiptExt)).
///
/// A 402 without `PAYMENT-REQUIRED` is not x402's and is returned as it came, as is the answer to a request that already
/// carries a `PAYMENT-SIGNATURE` of the caller's.
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
        if request.headers().contains_key(PAYMENT_SIGNATURE) {
            return chain.run(request, extensions).await;
        }
        let url = request.url().clone();
        let copy = request.try_clone();
        let response = chain.clone().run(request, extensions).await?;
        if !Payer::is_asked(response.status(), response.headers()) {
            return Ok(response);
        }
        let mut paid = copy.ok_or_else(|| error(Refusal::BodyNotReplayable))?;
        if !same_resource(&url, response.url()) {
            return Err(error(Refusal::Redirected { to: without_secrets(response.url()) }));
        }
        let Some(payment) = self.payer.pay(paid.method(), &url, response.headers()).await.map_err(error)? else {
            return Ok(response);
        };
        drop(response);
        paid.headers_mut().insert(PAYMENT_SIGNATURE, payment.header().clone());
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

    fn head(answer: &Response) -> (StatusCode, &HeaderMap) {
        (answer.status(), answer.headers())
    }

    fn extensions(answer: &mut Response) -> &mut Extensions {
        answer.extensions_mut()
    }
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
