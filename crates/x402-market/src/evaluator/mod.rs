//! An evaluator: a judge, with everything that it takes to sell its verdicts.

mod judging;
mod service;
mod stats;

use std::{fmt, sync::Arc, time::Duration};

use http::Method;
use serde_json::json;
use tower_x402::{
    Asset,
    facilitator::Facilitator,
    protocol::bazaar::{BodyType, Discovery},
    server::{BrowserPage, BuildError, RequirePaymentLayer, RequirePaymentLayerBuilder, WaitingLine},
};
use url::Url;

pub use service::{EvaluatorFuture, EvaluatorService};
pub use stats::{Earned, SkillStats, Stats};

use super::{AgentCard, CardError, EvaluatorId, LONGEST_WAIT, MAX_OUTPUTS, judge::Judge};
use judging::Work;
use stats::Counters;

/// Describes an evaluator: its card says what it is good at, what it costs and who is paid; its judge does the work.
///
/// ```no_run
/// # #[cfg(feature = "onchain")]
/// # async fn example(facilitator: tower_x402::facilitator::OnchainFacilitator) -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_signer_local::PrivateKeySigner;
/// use axum::Router;
/// use tower_x402::Network;
/// use x402_market::{AgentCard, Confidence, Evaluator, Score, Verdict, judge::output_judge};
///
/// # let key = PrivateKeySigner::random();
/// let judge = output_judge(async |_task, output| {
///     let score = if output.contains("because") { Score::MAX } else { Score::MIN };
///     Ok(Verdict::new(score, Confidence::new(0.7)?, "whether it gives reasons"))
/// });
/// let card = AgentCard::builder("Reasons", "https://reasons.example".parse()?)
///     .skill("reasoning", "Says whether an answer gives reasons", Score::new(0.7)?)
///     .price("$0.001").pay_to(Network::BASE_SEPOLIA, key.address()).build()?.sign(&key).await?;
/// let evaluator = Evaluator::new(card, judge).facilitator(facilitator).build()?;
/// axum::serve(tokio::net::TcpListener::bind("0.0.0.0:4021").await?, Router::new().fallback_service(evaluator)).await?;
/// # Ok(()) }
/// ```
pub struct Evaluator {
    card: AgentCard,
    judge: Arc<dyn Judge>,
    paywall: RequirePaymentLayerBuilder,
    facilitator: Option<Arc<dyn Facilitator>>,
    listed: bool,
    limits: Limits,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    body: usize,
    judgements: usize,
    time: Duration,
}

/// How much longer than the judge the handler may take: to wait for its turn, and to write the answer.
const SLACK: Duration = Duration::from_secs(5);
/// How long a submission waits for its turn.
const PATIENCE: Duration = Duration::from_secs(4);
/// What is left of a payment's validity for the settlement, at least.
const SETTLEMENT: Duration = Duration::from_secs(60);

impl Evaluator {
    /// Starts with limits of 256 KiB for a body, 64 judgements at once and 55 seconds for each.
    ///
    /// Payers are told the URLs that follow from the card's, and may name their payments (`payment-identifier`).
    pub fn new(card: AgentCard, judge: impl Judge) -> Self {
        let page = BrowserPage::new().name(&*card.name).methods([Method::POST]);
        let mut paywall = RequirePaymentLayer::builder().service_name(&*card.name).payment_identifier(true);
        paywall = paywall.browser_page(Some(page));
        let endpoint = card.pricing().ok().and_then(|pricing| pricing.endpoint.parse::<Url>().ok());
        if let Some(endpoint) = endpoint {
            let status = endpoint.join(service::PAYMENT_STATUS_PATH.trim_start_matches('/'));
            paywall = paywall.resource_url(endpoint);
            if let Ok(status) = status {
                paywall = paywall.status_url(status);
            }
        }
        Self {
            card,
            judge: Arc::new(judge),
            paywall,
            facilitator: None,
            listed: true,
            limits: Limits { body: 256 * 1024, judgements: 64, time: Duration::from_secs(55) },
        }
    }

    /// Who verifies and settles.
    pub fn facilitator(mut self, facilitator: impl Facilitator) -> Self {
        self.facilitator = Some(Arc::new(facilitator));
        self
    }

    /// The largest submission, in bytes.
    pub fn max_body(mut self, bytes: usize) -> Self {
        self.limits.body = bytes;
        self
    }

    /// Sets how many submissions are judged at once. Default: 64. Further ones wait for their turn, sixteen times as many at most
    /// and for four seconds at most; then they are answered 503 and not charged.
    pub fn max_judgements(mut self, judgements: usize) -> Self {
        self.limits.judgements = judgements;
        self
    }

    /// How long judging a submission may take once it is its turn, a day at most; then it is answered 504 and not charged.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.limits.time = limit.min(LONGEST_WAIT);
        self
    }

    /// Whether the 402 declares what is sold (the extension [`bazaar`](tower_x402::protocol::bazaar)), so that facilitators may list it. It
    /// does unless this is turned off, or the card's endpoint is not a whole URL.
    pub fn listed(mut self, listed: bool) -> Self {
        self.listed = listed;
        self
    }

    /// Changes how payments are taken: flows, credit, the URL where payers ask after payments. Price, payee, facilitator and the
    /// largest body are not to be set here: they are the card's and the evaluator's.
    pub fn paywall(mut self, change: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder) -> Self {
        self.paywall = change(self.paywall);
        self
    }

    /// Checks the description and makes the service.
    ///
    /// # Errors
    /// [`EvaluatorError`].
    pub fn build(self) -> Result<EvaluatorService, EvaluatorError> {
        let Self { card, judge, paywall, facilitator, listed, limits } = self;
        let pricing = card.pricing()?;
        let facilitator = facilitator.ok_or(EvaluatorError::Paywall(BuildError::NoFacilitator))?;
        if limits.body == 0 || limits.judgements == 0 || limits.time.is_zero() {
            return Err(EvaluatorError::ZeroLimit);
        }
        let identity = EvaluatorId::new(&*card.name, &*card.version);
        let identity = identity.map_err(|error| CardError::invalid("name or version", &error))?;
        pricing.price_of(MAX_OUTPUTS).ok_or_else(|| CardError::invalid("pricing.pricePerOutput", "it is too high"))?;
        let counters = Arc::new(Counters::new(&card));
        let work = Arc::new(Work {
            judge,
            identity,
            pricing,
            skills: card.skills.iter().map(|skill| skill.id.clone()).collect(),
            limits,
            line: WaitingLine::new(limits.judgements, PATIENCE),
            counters,
        });
        let deadline = limits.time + SLACK;
        let mut paywall = paywall
            .max_request_body(limits.body)
            .handler_deadline(deadline)
            .max_timeout((deadline + SETTLEMENT).max(Duration::from_secs(120)))
            .description(&*card.description)
            .mime_type("application/json")
            .facilitator(facilitator.clone());
        if listed && work.pricing.endpoint.parse::<Url>().is_ok() {
            paywall = paywall.discovery(discovery(work.skills.first().map_or("", String::as_str)));
        }
        for token in &work.pricing.accepts {
            paywall = paywall.pay_to_in(Asset::from(token), work.pricing.pay_to);
        }
        let priced = work.clone();
        let paywall = paywall.price_with_body(move |request, body| std::future::ready(priced.quote(request, body)));
        Ok(EvaluatorService::new(&card, work, &paywall.build()?, facilitator)?)
    }
}

/// What is taken and given, in as few words as fit into a header; the schemas on the card say the rest.
fn discovery(skill: &str) -> Discovery {
    let task = json!({ "id": "t1", "skill": skill, "prompt": "…" });
    let text = json!({ "type": "string" });
    let properties =
        json!({ "task": { "type": "object" }, "output": text, "outputs": { "type": "array", "items": text } });
    Discovery::post(BodyType::Json)
        .body(json!({ "task": task, "output": "…" }))
        .body_schema(json!({ "type": "object", "properties": properties, "required": ["task"] }))
        .output(
            json!({ "verdicts": [{ "score": 1.0, "reward": 1.0, "confidence": 0.9, "critique": { "summary": "…" } }] }),
        )
}

impl fmt::Debug for Evaluator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Evaluator").field("card", &self.card).field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// What is wrong with the description of an evaluator.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvaluatorError {
    /// The card has no terms, or none that can be kept.
    #[error(transparent)]
    Card(#[from] CardError),
    /// Payments cannot be taken like that.
    #[error(transparent)]
    Paywall(#[from] BuildError),
    /// A limit of zero serves nobody.
    #[error("max_body, max_judgements and time_limit must be more than zero")]
    ZeroLimit,
}
