//! Buys one evaluation from one evaluator, and believes it nothing that its card or the formats deny.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, U256};
use async_trait::async_trait;
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
    client::{Payer, PaymentError, PaymentMiddleware, Receipt, ReceiptExt as _},
    protocol::{ExactOffer, MAX_REQUIRED_HEADER, PaymentRequired, decode_header, header_name},
};

use super::{
    Evaluation, MAX_EVALUATION, MessageError, Submission, VerifiedCard,
    net::{self, BodyError, read_body},
};

/// Buys evaluations, within its payer's budget.
///
/// What an evaluator demands is compared with its card before anything is signed, and what it answers is checked before it is
/// returned. Redirects are not followed.
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
/// let bought = client.evaluate(&card, &Submission::single(task, "Because of Rayleigh scattering.")?).await?;
/// println!("{}", bought.evaluation.verdicts[0].score);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct EvaluationClient {
    http: ClientWithMiddleware,
    public_only: bool,
    max_answer: usize,
    ask_timeout: Duration,
    answer_timeout: Duration,
}

/// An evaluation, and what was paid for it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PaidEvaluation {
    /// The verdicts.
    pub evaluation: Evaluation,
    /// What was signed and what became of it; `None` if the evaluator wanted nothing.
    pub receipt: Option<Receipt>,
}

/// Why there is no evaluation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvaluateError {
    /// The card does not offer that; nothing was asked.
    #[error("the card does not offer it: {0}")]
    NotOffered(String),
    /// The evaluator demands another price than its card says. Nothing was signed.
    #[error("the card says {said}, but the evaluator demands {asked} atomic units")]
    PriceMismatch {
        /// What the card says the submission costs.
        said: Usdc,
        /// What the 402 demands, in atomic units.
        asked: U256,
    },
    /// The evaluator wants somebody else to be paid than its card says. Nothing was signed.
    #[error("the card says that {said} is paid, but the evaluator demands a payment to {asked}")]
    PayeeMismatch {
        /// Who is paid by the card.
        said: Address,
        /// Who would be paid.
        asked: Address,
    },
    /// The evaluator wants to be paid in a token, or on a chain, that its card does not accept. Nothing was signed.
    #[error("the evaluator demands a payment in {asset} on {network}, which its card does not accept")]
    TokenMismatch {
        /// The chain that the 402 demands.
        network: Network,
        /// The token that the 402 demands.
        asset: Address,
    },
    /// The evaluator's 402 has no offer that can be read. Nothing was signed.
    #[error("the evaluator demands a payment, but makes no offer that can be read")]
    NoOffer,
    /// The evaluator is on a host that is not everybody's; see [`EvaluationClient::public_only`].
    #[error("the evaluator's address is one of this machine or of a private network")]
    NotPublic,
    /// No payment, or one without an answer.
    #[error(transparent)]
    Payment(PaymentError),
    /// The evaluator could not be reached, or did not answer to the end.
    #[error("the evaluator did not answer")]
    Unreachable {
        /// What was signed, if anything was.
        receipt: Option<Box<Receipt>>,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The evaluator answered something else.
    #[error("the evaluator answered with status {status}: {detail}")]
    Answered {
        /// The status.
        status: u16,
        /// What it says about it, in at most 500 characters.
        detail: String,
        /// What was signed, if anything was.
        receipt: Option<Box<Receipt>>,
    },
    /// The evaluator answered something that is no evaluation of what was submitted.
    #[error("what the evaluator answered is no evaluation: {problem}")]
    InvalidEvaluation {
        /// What is wrong with it.
        problem: MessageError,
        /// What was signed, if anything was.
        receipt: Option<Box<Receipt>>,
    },
}

impl EvaluateError {
    /// What was signed, if anything was.
    pub fn receipt(&self) -> Option<&Receipt> {
        match self {
            Self::Payment(error) => error.receipt(),
            Self::Unreachable { receipt, .. }
            | Self::Answered { receipt, .. }
            | Self::InvalidEvaluation { receipt, .. } => receipt.as_deref(),
            Self::NotOffered(_)
            | Self::PriceMismatch { .. }
            | Self::PayeeMismatch { .. }
            | Self::TokenMismatch { .. }
            | Self::NoOffer
            | Self::NotPublic => None,
        }
    }

    /// Whether the evaluator is to blame: it lied, failed or did not answer. Otherwise the student should have asked somebody
    /// else, or something else, or has no money.
    pub fn is_evaluators_fault(&self) -> bool {
        match self {
            Self::NotOffered(_) => false,
            Self::Answered { status, .. } => !matches!(status, 400..=499),
            Self::Payment(error) => matches!(error, PaymentError::Unanswered { .. } | PaymentError::Unreadable(_)),
            _ => true,
        }
    }
}

impl EvaluationClient {
    /// Pays as `payer`, and reads answers of up to [`MAX_EVALUATION`] within 60 seconds.
    ///
    /// # Errors
    /// [`EvaluateError::Unreachable`] if no HTTP client could be made.
    pub fn new(payer: Payer) -> Result<Self, EvaluateError> {
        Self::with(PaymentMiddleware::new(payer))
    }

    /// The same, with a middleware whose patience was adjusted.
    ///
    /// # Errors
    /// [`EvaluateError::Unreachable`] if no HTTP client could be made.
    pub fn with(payments: PaymentMiddleware) -> Result<Self, EvaluateError> {
        Self::make(Client::builder(), payments, false)
    }

    /// The same for evaluators that strangers named: those on this machine or in a private network are refused
    /// ([`EvaluateError::NotPublic`]), whatever their names mean at that moment. A proxy from the environment is not used.
    ///
    /// # Errors
    /// [`EvaluateError::Unreachable`] if no HTTP client could be made.
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
        let http = reqwest_middleware::ClientBuilder::new(client).with(payments).with(HoldToCard).build();
        let (ask_timeout, answer_timeout) = (Duration::from_secs(30), Duration::from_secs(60));
        Ok(Self { http, public_only, max_answer: MAX_EVALUATION, ask_timeout, answer_timeout })
    }

    /// The longest answer, in bytes.
    pub fn max_answer(mut self, bytes: usize) -> Self {
        self.max_answer = bytes;
        self
    }

    /// How long an evaluator may take to say that it wants to be paid; 30 seconds if not set. How long it may take from then on, the
    /// middleware says ([`PaymentMiddleware::attempt_timeout`]).
    pub fn ask_timeout(mut self, timeout: Duration) -> Self {
        self.ask_timeout = timeout;
        self
    }

    /// How long the body of an answer may take to come.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// Has a submission evaluated by the evaluator of this card.
    ///
    /// # Errors
    /// [`EvaluateError`]; [`EvaluateError::receipt`] is what was paid for it all the same.
    pub async fn evaluate(
        &self,
        card: &VerifiedCard,
        submission: &Submission,
    ) -> Result<PaidEvaluation, EvaluateError> {
        self.evaluate_while(card, submission, &Arc::new(AtomicBool::new(true))).await
    }

    /// The same, but nothing is signed any more once `wanted` is false.
    pub(super) async fn evaluate_while(
        &self,
        card: &VerifiedCard,
        submission: &Submission,
        wanted: &Arc<AtomicBool>,
    ) -> Result<PaidEvaluation, EvaluateError> {
        let price = price(card, submission)?;
        if self.public_only && !net::may_be_public(card.endpoint()) {
            return Err(EvaluateError::NotPublic);
        }
        let body = serde_json::to_vec(submission)
            .map_err(|error| EvaluateError::NotOffered(format!("the submission cannot be written: {error}")))?;
        let request = self.http.post(card.endpoint().clone()).header(CONTENT_TYPE, "application/json");
        let request = request.header(ACCEPT, "application/json").body(body);
        let tokens = card.pricing().accepts.iter().map(|token| (token.network, token.asset)).collect();
        let terms = Terms { price, pay_to: card.pay_to(), tokens, patience: self.ask_timeout, wanted: wanted.clone() };
        let response = request.with_extension(terms).send().await.map_err(sent)?;
        let receipt = response.receipt().cloned();
        let status = response.status();
        let reading = tokio::time::timeout(self.answer_timeout, read_body(response, self.max_answer));
        let signed = || receipt.clone().map(Box::new);
        let json = match reading.await {
            Ok(Ok(json)) => json,
            Ok(Err(BodyError::TooLarge)) => {
                let problem = MessageError::invalid(".", format!("it has more than {} bytes", self.max_answer));
                return Err(EvaluateError::InvalidEvaluation { problem, receipt: signed() });
            }
            Ok(Err(BodyError::Broken(error))) => return Err(unreachable(signed(), error)),
            Err(_elapsed) => return Err(unreachable(signed(), "the answer did not come in time")),
        };
        if status != StatusCode::OK {
            return Err(EvaluateError::Answered { status: status.as_u16(), detail: detail(&json), receipt: signed() });
        }
        let evaluation = Evaluation::from_json(&json).and_then(|evaluation| {
            evaluation.check(submission)?;
            Ok(evaluation)
        });
        match evaluation {
            Ok(evaluation) => Ok(PaidEvaluation { evaluation, receipt }),
            Err(problem) => Err(EvaluateError::InvalidEvaluation { problem, receipt: signed() }),
        }
    }
}

/// What the submission costs by the card.
fn price(card: &VerifiedCard, submission: &Submission) -> Result<Usdc, EvaluateError> {
    let (outputs, most) = (submission.outputs().len(), card.pricing().max_outputs);
    let skill = &*submission.task.skill;
    if !card.card().has_skill(skill) {
        return Err(EvaluateError::NotOffered(format!("the skill {skill:?}")));
    }
    if outputs > most {
        return Err(EvaluateError::NotOffered(format!("{outputs} outputs, where {most} are taken at once")));
    }
    let price = card.pricing().price_of(outputs);
    price.ok_or_else(|| EvaluateError::NotOffered(format!("{outputs} outputs, at a price beyond all money")))
}

fn unreachable(
    receipt: Option<Box<Receipt>>,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> EvaluateError {
    EvaluateError::Unreachable { receipt, source: source.into() }
}

/// What stopped a request on its way.
fn sent(error: reqwest_middleware::Error) -> EvaluateError {
    match error {
        reqwest_middleware::Error::Reqwest(error) if net::is_refusal(&error) => EvaluateError::NotPublic,
        reqwest_middleware::Error::Reqwest(error) => unreachable(None, error.without_url()),
        reqwest_middleware::Error::Middleware(error) => match error.downcast::<Lie>() {
            Ok(Lie(lie)) => lie,
            Err(error) => match error.downcast::<PaymentError>() {
                Ok(error) => EvaluateError::Payment(error),
                Err(error) => unreachable(None, error.to_string()),
            },
        },
    }
}

/// What a refusal says.
fn detail(json: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Problem {
        error: Option<String>,
        detail: Option<String>,
    }
    let problem = serde_json::from_slice(json).ok().and_then(|Problem { error, detail }| detail.or(error));
    problem.unwrap_or_else(|| String::from_utf8_lossy(json).into_owned()).chars().take(500).collect()
}

/// What a 402 may demand.
#[derive(Clone, Debug)]
struct Terms {
    price: Usdc,
    pay_to: Address,
    /// What is accepted, by chain and contract.
    tokens: Arc<[(Network, Address)]>,
    /// How long it may take to come.
    patience: Duration,
    /// Whether the evaluation is waited for.
    wanted: Arc<AtomicBool>,
}

/// Compares a demand with the card's terms, below the middleware that would pay it.
struct HoldToCard;

/// An error of ours, on its way through the middleware above.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Lie(EvaluateError);

#[async_trait]
impl Middleware for HoldToCard {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let is_paid = request.headers().contains_key(header_name::PAYMENT_SIGNATURE);
        let Some(terms) = extensions.get::<Terms>().cloned().filter(|_| !is_paid) else {
            return next.run(request, extensions).await;
        };
        let stopped = |error| reqwest_middleware::Error::middleware(Lie(error));
        let response = tokio::time::timeout(terms.patience, next.run(request, extensions)).await;
        let response = response.map_err(|late| stopped(unreachable(None, late)))??;
        if response.status() == StatusCode::PAYMENT_REQUIRED {
            terms.hold(&response).map_err(stopped)?;
            if !terms.wanted.load(Ordering::Relaxed) {
                return Err(stopped(unreachable(None, "it was too late to pay for it")));
            }
        }
        Ok(response)
    }
}

impl Terms {
    fn hold(&self, response: &Response) -> Result<(), EvaluateError> {
        let header = response.headers().get(header_name::PAYMENT_REQUIRED).ok_or(EvaluateError::NoOffer)?;
        let required: PaymentRequired =
            decode_header(header.as_bytes(), MAX_REQUIRED_HEADER).map_err(|_| EvaluateError::NoOffer)?;
        let offers = required.accepts.iter().filter_map(|offer| ExactOffer::try_from(&offer.read().ok()?).ok());
        let mut offers = offers.peekable();
        if offers.peek().is_none() {
            return Err(EvaluateError::NoOffer);
        }
        let price: U256 = self.price.into();
        for offer in offers {
            if offer.amount != price {
                return Err(EvaluateError::PriceMismatch { said: self.price, asked: offer.amount });
            }
            if offer.pay_to != self.pay_to {
                return Err(EvaluateError::PayeeMismatch { said: self.pay_to, asked: offer.pay_to });
            }
            // The payer may have other tokens, too, and of those the same amount may be worth more.
            let (network, asset) = (offer.network(), offer.asset.address);
            if !self.tokens.contains(&(network, asset)) {
                return Err(EvaluateError::TokenMismatch { network, asset });
            }
        }
        Ok(())
    }
}
