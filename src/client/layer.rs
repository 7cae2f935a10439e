//! The layer that makes an HTTP client pay.

use std::time::Duration;

use tower_layer::Layer;

use super::{AddPayment, Budget, Payer, retry::Retry};

/// Makes any tower HTTP client pay for requests that are answered 402, within its payer's budget.
///
/// The client is a `tower::Service<http::Request<B>, Response = http::Response<R>>` whose clones share their connections, such
/// as hyper-util's `Client`. What happens to a request is what [`PaymentMiddleware`](super::PaymentMiddleware) does to one: it
/// is sent unpaid first; on a 402 with an offer one payment is signed and the same request sent again with it; an unclear
/// answer makes the *same* payment be presented again. The response carries its [`Receipt`](super::Receipt) (see
/// [`ReceiptExt`](super::ReceiptExt)).
///
/// # Bodies
///
/// The request's body is sent at least twice, so `B` must be [`Clone`]: `Full<Bytes>`, `Empty`, `String` are; a body that
/// streams is not, and does not compile here. Collect it first (`BodyExt::collect`, within a bound of your choice).
///
/// The response's body is an [`http_body::Body`] of [`Bytes`](bytes::Bytes), as hyper's and axum's are, and comes out as a
/// [`ResponseBody`](super::ResponseBody) of it: that of a 402 may have been read for offers of x402 v1.
///
/// # Redirects
///
/// A 3xx is an answer like any other, and this layer follows none. Do not put one that does *below* it: the payment would
/// go to wherever the server points.
///
/// # Order of layers
///
/// The request must have its absolute URI here: hosts have budgets of their own, and the journal says what was bought.
/// A timeout above this layer cuts a purchase short, which leaves its outcome unknown; one below it is an unclear answer.
///
/// ```no_run
/// # #[cfg(feature = "local-signer")]
/// # async fn example<C>(http: C) -> Result<(), Box<dyn std::error::Error>>
/// # where
/// #     C: tower_service::Service<http::Request<String>, Response = http::Response<String>> + Clone + Send + 'static,
/// #     C::Error: std::error::Error + Send + Sync + 'static,
/// #     C::Future: Send,
/// # {
/// use alloy_signer_local::PrivateKeySigner;
/// use tower_layer::Layer;
/// use tower_service::Service;
/// use tower_x402::client::{AddPaymentLayer, Budget, Payer, ReceiptExt};
///
/// let key: PrivateKeySigner = std::env::var("STUDENT_PRIVATE_KEY")?.parse()?;
/// let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
/// let mut client = AddPaymentLayer::new(Payer::builder(key).budget(budget).build()).layer(http);
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
pub struct AddPaymentLayer {
    payer: Payer,
    retry: Retry,
}

impl AddPaymentLayer {
    /// Pays as `payer`: five attempts of 30 seconds for each payment.
    pub const fn new(payer: Payer) -> Self {
        Self { payer, retry: Retry::DEFAULT }
    }

    /// How often one payment is presented at most; at least once.
    pub const fn max_attempts(mut self, attempts: u32) -> Self {
        self.retry.max_attempts = attempts;
        self
    }

    /// How long each paid attempt waits for the inner service to be ready and for the head of its response.
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
}

impl<S> Layer<S> for AddPaymentLayer {
    type Service = AddPayment<S>;

    fn layer(&self, inner: S) -> Self::Service {
        AddPayment::new(inner, self.payer.clone(), self.retry)
    }
}
