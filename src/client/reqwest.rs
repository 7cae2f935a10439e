//! The payer as a reqwest middleware.

use std::time::Duration;

use ::reqwest::{Client, Request, Response, StatusCode, Url, redirect};
use async_trait::async_trait;
use http::Extensions;
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next as Chain};

use super::{Budget, Payer, Payment, PaymentError, Receipt, Refusal, retry::Retry};
use crate::protocol::header_name::{PAYMENT_REQUIRED, PAYMENT_SIGNATURE};

/// Pays for requests that are answered 402, within its payer's budget.
///
/// A request is sent unpaid first; a free resource costs nothing extra. On a 402 with an offer, the payment is signed and the
/// same request sent again with it. If the answer to that does not come, or says that the server is not done (5xx; 409 or 429
/// with `Retry-After`), the *same* payment is presented again, a bounded number of times and not past its validity. One
/// request never leads to a second signature. The response carries its [`Receipt`] (see [`ReceiptExt`]).
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

    /// Presents `payment` with `request` until an answer stands or presenting it again makes no sense.
    async fn present(
        &self,
        mut payment: Payment,
        request: Request,
        extensions: &mut Extensions,
        chain: Chain<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            // It was cloned before, so it can be cloned again.
            let copy = request.try_clone().ok_or_else(|| error(Refusal::BodyNotReplayable))?;
            let sent = tokio::time::timeout(self.retry.attempt_timeout, chain.clone().run(copy, extensions)).await;
            let (answer, next) = match sent {
                Ok(Ok(response)) => {
                    let next = payment.answered(response.status(), response.headers());
                    (Ok(response), next)
                }
                Ok(Err(failure)) => (Err(Box::from(failure)), payment.unanswered()),
                Err(elapsed) => (Err(Box::from(elapsed)), payment.unanswered()),
            };
            if let Some(pause) = self.retry.pause(next, attempts, &self.payer, &payment) {
                drop(answer);
                tokio::time::sleep(pause).await;
                continue;
            }
            let receipt = payment.conclude().await;
            return match answer {
                Ok(mut response) => {
                    response.extensions_mut().insert(receipt);
                    Ok(response)
                }
                Err(source) => Err(error(PaymentError::Unanswered { receipt: Box::new(receipt), attempts, source })),
            };
        }
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
        if response.status() != StatusCode::PAYMENT_REQUIRED || !response.headers().contains_key(PAYMENT_REQUIRED) {
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
        self.present(payment, paid, extensions, chain).await
    }
}

/// The receipt of a response that was paid for.
pub trait ReceiptExt {
    /// How the payment for this response ended; `None` if it was free.
    fn receipt(&self) -> Option<&Receipt>;
}

impl ReceiptExt for Response {
    fn receipt(&self) -> Option<&Receipt> {
        self.extensions().get()
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
