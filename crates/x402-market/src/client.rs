//! Buys one evaluation from one evaluator, and holds the evaluator to its card.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, U256};
use async_trait::async_trait;
use bytes::Bytes;
use http::Extensions;
use reqwest::{
    Client, Request, Response, StatusCode,
    header::{ACCEPT, CONTENT_TYPE},
    redirect,
};
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use serde::Deserialize;
use tower_x402::{
    Network, Usdc,
    client::{Payer, PaymentError, PaymentMiddleware, Purchase, Receipt, ReceiptExt as _},
    protocol::{
        ExactOffer, MAX_REQUIRED_HEADER, PaymentRequired, PaymentRequirements, Verbatim, decode_header, header_name,
    },
};

use super::{
    Evaluation, Lesson, MAX_EVALUATION, MessageError, Submission, VerifiedCard,
    net::{self, BodyError, read_body},
};

/// A client that buys evaluations within its payer's budget.
///
/// Use it to ask an evaluator that you have chosen yourself; [`Student`](crate::Student) chooses evaluators for you.
///
/// - **What you get**: a [`PaidEvaluation`], whose evaluation has been checked against the submission.
/// - **What it costs**: the price on the card for each output. A demand that differs from the card is refused before anything is signed.
/// - **If the evaluator fails**: an [`EvaluateError`], whose [`receipt`](EvaluateError::receipt) is what was signed all the same.
///
/// Redirects are not followed.
///
/// ```no_run
/// # async fn example(key: alloy_signer_local::PrivateKeySigner) -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::client::{Budget, Payer};
/// use x402_market::{CardFetcher, EvaluationClient, Submission, Task};
///
/// let budget = Budget::builder().per_payment("$0.01".parse()?).total("$1.00".parse()?).build();
/// let client = EvaluationClient::new(Payer::builder(key).budget(budget).build())?;
/// let card = CardFetcher::new()?.fetch(&"https://reasons.example".parse()?).await?;
/// let task = Task::new("reasoning", "Why is the sky blue?")?;
/// match client.evaluate(&card, &Submission::single(task, "Because of Rayleigh scattering.")?).await {
///     Ok(paid) => println!("{}, by {:?}", paid.evaluation.verdicts[0].score, paid.receipt),
///     Err(error) => println!("{error}; signed all the same: {:?}", error.receipt()),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct EvaluationClient {
    http: ClientWithMiddleware,
    /// For what costs nothing: it pays no 402.
    unpaid: Client,
    public_only: bool,
    ask_timeout: Duration,
    answer_timeout: Duration,
}

/// An evaluation, and what was paid for it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PaidEvaluation {
    /// The evaluation, checked against the submission.
    pub evaluation: Evaluation,
    /// The receipt of the payment; `None` if the evaluator demanded none.
    pub receipt: Option<Receipt>,
}

/// The reason why there is no evaluation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvaluateError {
    /// The card does not offer what was asked for; nothing was sent.
    #[error("the card does not offer {0}")]
    NotOffered(String),
    /// The evaluator demands another price than on its card. Nothing was signed.
    #[error("the evaluator demands {demanded} atomic units, but its card says {expected}")]
    PriceMismatch {
        /// The price of the submission by the card.
        expected: Usdc,
        /// The price in the 402, in atomic units.
        demanded: U256,
    },
    /// The evaluator demands a payment to another address than on its card. Nothing was signed.
    #[error("the evaluator demands a payment to {demanded}, but its card says {expected}")]
    PayeeMismatch {
        /// The payee by the card.
        expected: Address,
        /// The payee in the 402.
        demanded: Address,
    },
    /// The evaluator demands a token that is not on its card. Nothing was signed.
    #[error("the evaluator demands {asset} on {network}, which is not on its card")]
    TokenMismatch {
        /// The chain in the 402.
        network: Network,
        /// The token in the 402.
        asset: Address,
    },
    /// The evaluator's 402 has no offer that can be read. Nothing was signed.
    #[error("the evaluator's 402 has no readable offer")]
    NoOffer,
    /// The evaluator is on this machine or in a private network; see [`EvaluationClient::public_only`].
    #[error("the evaluator's address is not public")]
    NotPublic,
    /// There was no payment, or no answer to it.
    #[error(transparent)]
    Payment(PaymentError),
    /// The evaluator could not be reached, or did not finish its answer.
    #[error("the evaluator did not answer")]
    Unreachable {
        /// What was signed, if anything was.
        receipt: Option<Box<Receipt>>,
        /// The reason.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The evaluator answered with an error.
    #[error("the evaluator answered with status {status}: {detail}")]
    Answered {
        /// The HTTP status.
        status: u16,
        /// The evaluator's explanation, at most 500 characters.
        detail: String,
        /// What was signed, if anything was.
        receipt: Option<Box<Receipt>>,
    },
    /// The evaluator's answer is no valid evaluation of the submission.
    #[error("the evaluator's answer is no valid evaluation: {problem}")]
    InvalidEvaluation {
        /// What is wrong with it.
        problem: MessageError,
        /// What was signed, if anything was.
        receipt: Option<Box<Receipt>>,
    },
}

impl EvaluateError {
    /// Returns what was signed, if anything was.
    pub fn receipt(&self) -> Option<&Receipt> {
        match self {
            Self::Payment(error) => error.receipt(),
            Self::Unreachable { receipt, .. }
            | Self::Answered { receipt, .. }
            | Self::InvalidEvaluation { receipt, .. } => receipt.as_deref(),
            // The others are found before anything is signed.
            _ => None,
        }
    }
}

impl EvaluationClient {
    /// Creates a client that pays as `payer`.
    ///
    /// # Errors
    /// [`EvaluateError::Unreachable`] if no HTTP client could be created.
    pub fn new(payer: Payer) -> Result<Self, EvaluateError> {
        Self::with(PaymentMiddleware::new(payer))
    }

    /// Creates a client with a middleware that has its own timeouts and number of attempts.
    ///
    /// # Errors
    /// [`EvaluateError::Unreachable`] if no HTTP client could be created.
    pub fn with(payments: PaymentMiddleware) -> Result<Self, EvaluateError> {
        Self::make(Client::builder(), payments, false)
    }

    /// Creates a client for evaluators whose URLs come from strangers. It refuses addresses of this machine and of private networks
    /// ([`EvaluateError::NotPublic`]), whatever their names resolve to at that moment. It does not use a proxy from the environment.
    ///
    /// # Errors
    /// [`EvaluateError::Unreachable`] if no HTTP client could be created.
    pub fn public_only(payments: PaymentMiddleware) -> Result<Self, EvaluateError> {
        Self::make(net::public_client(), payments, true)
    }

    fn make(
        client: reqwest::ClientBuilder,
        payments: PaymentMiddleware,
        public_only: bool,
    ) -> Result<Self, EvaluateError> {
        let client = client.redirect(redirect::Policy::none()).connect_timeout(Duration::from_secs(10));
        let client = client.build().map_err(|error| unreachable(None, error))?;
        let http = reqwest_middleware::ClientBuilder::new(client.clone()).with(payments).with(CheckOffers).build();
        let (ask_timeout, answer_timeout) = (Duration::from_secs(30), Duration::from_secs(60));
        Ok(Self { http, unpaid: client, public_only, ask_timeout, answer_timeout })
    }

    /// Sets how long an evaluator may take to demand its payment. Default: 30 seconds. Once it is paid,
    /// [`RetryPolicy::attempt_timeout`](tower_x402::client::RetryPolicy::attempt_timeout) applies.
    pub fn ask_timeout(self, timeout: Duration) -> Self {
        Self { ask_timeout: timeout, ..self }
    }

    /// Sets how long the body of an answer may take to arrive. Default: 60 seconds.
    pub fn answer_timeout(self, timeout: Duration) -> Self {
        Self { answer_timeout: timeout, ..self }
    }

    /// Tells an evaluator the truth about a submission that it judged. This costs nothing; a demand for a payment is not met.
    ///
    /// # Errors
    /// [`EvaluateError`] if the evaluator did not take the lesson.
    pub async fn teach(&self, card: &VerifiedCard, lesson: &Lesson) -> Result<(), EvaluateError> {
        let url = card.endpoint().join("lessons").map_err(|error| unreachable(None, error))?;
        if self.public_only && !net::may_be_public(&url) {
            return Err(EvaluateError::NotPublic);
        }
        let body = serde_json::to_vec(lesson).map_err(|error| unreachable(None, error))?;
        let request =
            self.unpaid.post(url).header(CONTENT_TYPE, "application/json").timeout(self.ask_timeout).body(body);
        let response = request.send().await.map_err(|error| send_error(error.into()))?;
        match response.status() {
            StatusCode::OK => Ok(()),
            status => Err(answered(status, &read_body(response, MAX_EVALUATION).await.unwrap_or_default(), None)),
        }
    }

    /// Has a submission evaluated by the evaluator of this card.
    ///
    /// # Errors
    /// [`EvaluateError`]. Its [`receipt`](EvaluateError::receipt) is what was signed all the same.
    pub async fn evaluate(
        &self,
        card: &VerifiedCard,
        submission: &Submission,
    ) -> Result<PaidEvaluation, EvaluateError> {
        self.evaluate_while(card, submission, &Arc::new(AtomicBool::new(true))).await
    }

    /// Evaluates as [`evaluate`](Self::evaluate) does, but signs nothing once `is_wanted` is `false`.
    pub(super) async fn evaluate_while(
        &self,
        card: &VerifiedCard,
        submission: &Submission,
        is_wanted: &Arc<AtomicBool>,
    ) -> Result<PaidEvaluation, EvaluateError> {
        let price = price(card, submission)?;
        if self.public_only && !net::may_be_public(card.endpoint()) {
            return Err(EvaluateError::NotPublic);
        }
        let body = serde_json::to_vec(submission)
            .map_err(|error| EvaluateError::NotOffered(format!("a submission that cannot be encoded: {error}")))?;
        let body = Bytes::from(body);
        let terms = CardTerms {
            price,
            pay_to: card.pay_to(),
            tokens: card.pricing().accepts.iter().map(|token| (token.network, token.asset)).collect(),
            ask_timeout: self.ask_timeout,
            is_wanted: is_wanted.clone(),
        };
        // However often the same is asked for, the evaluator is paid once and gives its answer again.
        let purchase = Purchase::new();
        let ask = || {
            let request = self.http.post(card.endpoint().clone()).header(CONTENT_TYPE, "application/json");
            let request = request.header(ACCEPT, "application/json").body(body.clone());
            request.with_extension(terms.clone()).with_extension(purchase.clone()).send()
        };
        let mut is_repeated = false;
        let (status, receipt, json) = loop {
            let response = ask().await.map_err(send_error)?;
            let (status, receipt) = (response.status(), response.receipt().cloned());
            let reading = tokio::time::timeout(self.answer_timeout, read_body(response, MAX_EVALUATION));
            let signed = || receipt.clone().map(Box::new);
            match reading.await {
                Ok(Ok(json)) => break (status, receipt, json),
                Ok(Err(BodyError::TooLarge)) => {
                    let problem = MessageError::invalid(".", format!("it has more than {MAX_EVALUATION} bytes"));
                    return Err(EvaluateError::InvalidEvaluation { problem, receipt: signed() });
                }
                // The answer is paid for, and can be asked for again.
                Ok(Err(BodyError::Broken(_))) if receipt.is_some() && !is_repeated => is_repeated = true,
                Ok(Err(BodyError::Broken(error))) => return Err(unreachable(signed(), error)),
                Err(_elapsed) => return Err(unreachable(signed(), "the answer did not arrive in time")),
            }
        };
        let signed = || receipt.clone().map(Box::new);
        if status != StatusCode::OK {
            return Err(answered(status, &json, signed()));
        }
        let evaluation = Evaluation::from_json(&json);
        match evaluation.and_then(|evaluation| evaluation.check(submission).map(|()| evaluation)) {
            Ok(evaluation) => Ok(PaidEvaluation { evaluation, receipt }),
            Err(problem) => Err(EvaluateError::InvalidEvaluation { problem, receipt: signed() }),
        }
    }
}

/// Returns what the submission costs by the card.
fn price(card: &VerifiedCard, submission: &Submission) -> Result<Usdc, EvaluateError> {
    let (outputs, most) = (submission.outputs().len(), card.pricing().max_outputs);
    let skill = &*submission.task.skill;
    if !card.card().has_skill(skill) {
        return Err(EvaluateError::NotOffered(format!("the skill {skill:?}")));
    }
    if outputs > most {
        return Err(EvaluateError::NotOffered(format!("more than {most} outputs at once, and there are {outputs}")));
    }
    let price = card.pricing().price_of(outputs);
    price.ok_or_else(|| EvaluateError::NotOffered(format!("{outputs} outputs at a price that can be expressed")))
}

fn unreachable(
    receipt: Option<Box<Receipt>>,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> EvaluateError {
    EvaluateError::Unreachable { receipt, source: source.into() }
}

fn send_error(error: reqwest_middleware::Error) -> EvaluateError {
    match error {
        reqwest_middleware::Error::Reqwest(error) if net::is_refusal(&error) => EvaluateError::NotPublic,
        reqwest_middleware::Error::Reqwest(error) => unreachable(None, error.without_url()),
        reqwest_middleware::Error::Middleware(error) => match error.downcast::<Stopped>() {
            Ok(Stopped(error)) => error,
            Err(error) => match error.downcast::<PaymentError>() {
                Ok(error) => EvaluateError::Payment(error),
                Err(error) => unreachable(None, error.to_string()),
            },
        },
    }
}

/// Returns the explanation in the body of an error.
fn answered(status: StatusCode, json: &[u8], receipt: Option<Box<Receipt>>) -> EvaluateError {
    #[derive(Deserialize)]
    struct Problem {
        error: Option<String>,
        detail: Option<String>,
    }
    let problem = serde_json::from_slice(json).ok().and_then(|Problem { error, detail }| detail.or(error));
    let detail = problem.unwrap_or_else(|| String::from_utf8_lossy(json).into_owned()).chars().take(500).collect();
    EvaluateError::Answered { status: status.as_u16(), detail, receipt }
}

/// What a 402 may demand by the card.
#[derive(Clone, Debug)]
struct CardTerms {
    price: Usdc,
    pay_to: Address,
    /// Accepted tokens, by chain and contract.
    tokens: Arc<[(Network, Address)]>,
    /// How long the 402 may take to arrive.
    ask_timeout: Duration,
    is_wanted: Arc<AtomicBool>,
}

/// Compares the offers of a 402 with the card, below the middleware that would pay one of them.
struct CheckOffers;

/// Reads what an offer asks for. Payers know two schemes, which ask for an amount of a token for a payee in the same way.
fn read_offer(offer: &Verbatim<PaymentRequirements>) -> Option<ExactOffer> {
    let mut offer = offer.read().ok()?;
    if offer.scheme == "batch-settlement" {
        offer.scheme = "exact".to_owned();
    }
    ExactOffer::try_from(&offer).ok()
}

/// Carries an error of ours through the middleware above.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Stopped(EvaluateError);

#[async_trait]
impl Middleware for CheckOffers {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let is_paid = request.headers().contains_key(header_name::PAYMENT_SIGNATURE);
        let Some(terms) = extensions.get::<CardTerms>().cloned().filter(|_| !is_paid) else {
            return next.run(request, extensions).await;
        };
        let stop = |error| reqwest_middleware::Error::middleware(Stopped(error));
        let response = tokio::time::timeout(terms.ask_timeout, next.run(request, extensions)).await;
        let response = response.map_err(|elapsed| stop(unreachable(None, elapsed)))??;
        if response.status() == StatusCode::PAYMENT_REQUIRED {
            terms.check(&response).map_err(stop)?;
            if !terms.is_wanted.load(Ordering::Relaxed) {
                return Err(stop(unreachable(None, "the call was given up before it was paid for")));
            }
        }
        Ok(response)
    }
}

impl CardTerms {
    /// Checks all offers, because the payer may choose any of them.
    fn check(&self, response: &Response) -> Result<(), EvaluateError> {
        let header = response.headers().get(header_name::PAYMENT_REQUIRED).ok_or(EvaluateError::NoOffer)?;
        let required: PaymentRequired =
            decode_header(header.as_bytes(), MAX_REQUIRED_HEADER).map_err(|_| EvaluateError::NoOffer)?;
        let mut offers = required.accepts.iter().filter_map(read_offer).peekable();
        if offers.peek().is_none() {
            return Err(EvaluateError::NoOffer);
        }
        let price: U256 = self.price.into();
        for offer in offers {
            if offer.amount != price {
                return Err(EvaluateError::PriceMismatch { expected: self.price, demanded: offer.amount });
            }
            if offer.pay_to != self.pay_to {
                return Err(EvaluateError::PayeeMismatch { expected: self.pay_to, demanded: offer.pay_to });
            }
            // The same amount of another token may be worth more.
            let (network, asset) = (offer.network(), offer.asset.address);
            if !self.tokens.contains(&(network, asset)) {
                return Err(EvaluateError::TokenMismatch { network, asset });
            }
        }
        Ok(())
    }
}
