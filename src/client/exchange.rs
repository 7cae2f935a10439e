//! The paid request, written once for every HTTP client: send it, and if the answer is a 402, pay and send it again.

use std::{error::Error, time::Duration};

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use tokio::time::{sleep, timeout};
use url::Url;

use super::{
    AddPaymentError, NextStep, Payer, PaymentError, Purchase, Refusal, SignedPayment,
    challenge::{Challenge, OfferLocation},
    held::HeldPayment,
    purchase::Identity,
    wallet::{Asked, date_of},
};
use crate::protocol::header_name::{PAYMENT_SIGNATURE, X_PAYMENT};

type BoxError = Box<dyn Error + Send + Sync>;

/// A policy for sending one payment again while its outcome is unclear.
///
/// The outcome is unclear if no answer comes, or if the server is not done: 502, 503 and 504; 408, 409, 425, 429 and any 5xx with
/// `Retry-After`; and any other 5xx if the request may be repeated, because its method is idempotent (GET, PUT, DELETE) or because the seller
/// took a payment identifier, as the sellers of this crate do. Every attempt sends the same payment, which can move money only once, and none
/// is made after it has expired. A voucher of a payment channel may be signed again after a refusal: that is an attempt, too, and all of them
/// together cost no more than the limit per payment.
///
/// What is still unclear then can be asked for again, as often as needed: see [`Purchase`](super::Purchase).
///
/// ```
/// use std::time::Duration;
/// use tower_x402::client::RetryPolicy;
///
/// let policy = RetryPolicy::default().max_attempts(3).attempt_timeout(Duration::from_secs(10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct RetryPolicy {
    max_attempts: u32,
    attempt_timeout: Duration,
    first_pause: Duration,
}

impl Default for RetryPolicy {
    /// Returns five attempts of 30 seconds, with pauses of 200 ms, 400 ms, 800 ms and 1.6 s.
    fn default() -> Self {
        Self { max_attempts: 5, attempt_timeout: Duration::from_secs(30), first_pause: Duration::from_millis(200) }
    }
}

impl RetryPolicy {
    /// The longest pause, whatever a server asks for.
    const MAX_PAUSE: Duration = Duration::from_secs(30);
    /// The longest time to wait for the body of a 402.
    const MAX_BODY_TIMEOUT: Duration = Duration::from_secs(10);

    /// Sets how often a payment is sent at most; at least once. Default: 5.
    pub const fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// Sets how long each attempt waits for the head of the response. Default: 30 seconds.
    pub const fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    /// Sets the pause before the second attempt. It doubles with each attempt, up to 30 seconds. A `Retry-After` takes its place.
    /// Default: 200 ms.
    pub const fn first_pause(mut self, pause: Duration) -> Self {
        self.first_pause = pause;
        self
    }

    fn body_timeout(&self) -> Duration {
        self.attempt_timeout.min(Self::MAX_BODY_TIMEOUT)
    }

    /// Returns the pause before the next attempt, or `None` if there is to be none.
    fn pause(&self, next: NextStep, attempts: u32, now: u64, payment: &SignedPayment) -> Option<Duration> {
        let NextStep::Retry { after } = next else { return None };
        if attempts >= self.max_attempts {
            return None;
        }
        let backoff = self.first_pause.saturating_mul(1 << (attempts - 1).min(16));
        let pause = after.unwrap_or(backoff).min(Self::MAX_PAUSE);
        let is_in_time = now.saturating_add(pause.as_secs()) < payment.valid_before();
        is_in_time.then_some(pause)
    }
}

/// A request and the HTTP client that can send it, more than once.
pub(super) trait Exchange: Send {
    type Response: Send;
    type Error: Into<BoxError> + Send;

    /// Sends the request and waits for the head of the response.
    fn send(&mut self) -> impl Future<Output = Result<Self::Response, Self::Error>> + Send;

    /// Returns method and URL to pay for, or why the request that was answered so cannot be paid for.
    fn target(&self, response: &Self::Response) -> Result<(Method, Url), Refusal>;

    /// Adds the payment header to the request.
    fn add_header(&mut self, name: HeaderName, value: HeaderValue);

    /// Reads a short body within `timeout`, and returns the response with its whole body in any case.
    fn read_body(
        response: Self::Response,
        timeout: Duration,
    ) -> impl Future<Output = (Option<Bytes>, Self::Response)> + Send;

    fn head(response: &Self::Response) -> (StatusCode, &HeaderMap);

    fn extensions_mut(response: &mut Self::Response) -> &mut Extensions;

    /// Returns the purchase that the caller put into the request's extensions.
    fn purchase(&self) -> Option<Purchase>;

    /// Returns what another request must have in common with this one to be a repetition of it.
    fn identity(&self) -> Identity;
}

/// Returns `true` for requests that are passed on without paying: the caller pays itself, or the method is `HEAD`, for which no
/// server charges.
pub(super) fn is_passed_on(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::HEAD || [PAYMENT_SIGNATURE, X_PAYMENT].iter().any(|name| headers.contains_key(*name))
}

/// Sends a request and, if the answer is a 402 of x402, pays for it once and sends it again. A request whose purchase has a payment is sent
/// with that at once.
///
/// The response gets the receipt as an extension.
pub(super) async fn send_and_pay<X: Exchange>(
    payer: &Payer,
    retry: &RetryPolicy,
    mut exchange: X,
) -> Result<X::Response, AddPaymentError<X::Error>> {
    let mut held = match exchange.purchase() {
        Some(purchase) => Box::pin(HeldPayment::of(payer, purchase, exchange.identity())).await?,
        None => HeldPayment::none(payer),
    };
    if held.payment().is_none() {
        let response = exchange.send().await.map_err(AddPaymentError::Inner)?;
        let (status, headers) = X::head(&response);
        let (body, response) = match OfferLocation::of(status, headers) {
            OfferLocation::None => return Ok(response),
            OfferLocation::Header => (None, response),
            OfferLocation::Body => X::read_body(response, retry.body_timeout()).await,
        };
        let headers = X::head(&response).1;
        let challenge = Challenge::read(headers, body.as_deref()).map_err(PaymentError::Unreadable)?;
        let Some(challenge) = challenge else { return Ok(response) };
        let date = date_of(headers);
        let (method, url) = exchange.target(&response)?;
        drop(response);
        let asked = Asked { method: &method, url: &url, date, purchase: None };
        held.find_or_sign(challenge, asked, exchange.identity()).await?;
    }
    Ok(send_paid(payer, retry, held, exchange).await?)
}

/// Sends the paid request until the outcome is clear or another attempt makes no sense.
async fn send_paid<X: Exchange>(
    payer: &Payer,
    retry: &RetryPolicy,
    mut held: HeldPayment<'_>,
    mut exchange: X,
) -> Result<X::Response, PaymentError> {
    // It is there: it was just found or signed.
    let Some(payment) = held.payment() else { return Err(Refusal::NoPayableOffer { reasons: Vec::new() }.into()) };
    exchange.add_header(payment.header_name(), payment.header().clone());
    let mut attempts = 0;
    loop {
        attempts += 1;
        // Whatever error comes, a layer below may have sent it before, and the error is that of its last attempt.
        payment.set_sent();
        let (response, next) = match timeout(retry.attempt_timeout, exchange.send()).await {
            Ok(Ok(response)) => {
                let (body, response) = read_rejection::<X>(response, retry).await;
                let (status, headers) = X::head(&response);
                let next = payment.answered(status, headers, body.as_deref());
                (Ok(response), next)
            }
            Ok(Err(error)) => (Err(error.into()), payment.unanswered()),
            Err(elapsed) => (Err(elapsed.into()), payment.unanswered()),
        };
        if next == NextStep::SignAgain && attempts < retry.max_attempts {
            drop(response);
            payment.sign_again().await?;
            exchange.add_header(payment.header_name(), payment.header().clone());
            continue;
        }
        if let Some(pause) = retry.pause(next, attempts, payer.now(), payment) {
            drop(response);
            sleep(pause).await;
            continue;
        }
        let receipt = payment.finish().await;
        let is_unused = payment.is_unused();
        return match response {
            Ok(mut response) => {
                let status = X::head(&response).0;
                if is_unused {
                    held.discard();
                }
                held.set_answered(!matches!(next, NextStep::Retry { .. }) && !may_be_repeated(status));
                X::extensions_mut(&mut response).insert(receipt);
                Ok(response)
            }
            Err(source) => {
                held.set_answered(false);
                Err(PaymentError::Unanswered { receipt: Box::new(receipt), attempts, source })
            }
        };
    }
}

/// Returns `true` for answers after which retry layers repeat a request.
fn may_be_repeated(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429)
}

/// Reads the body of another 402 of v1, which has the reason for it.
async fn read_rejection<X: Exchange>(response: X::Response, retry: &RetryPolicy) -> (Option<Bytes>, X::Response) {
    let (status, headers) = X::head(&response);
    match OfferLocation::of(status, headers) == OfferLocation::Body {
        true => X::read_body(response, retry.body_timeout()).await,
        false => (None, response),
    }
}
