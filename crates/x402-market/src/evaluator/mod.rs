//! An evaluator: a judge behind an HTTP service that charges for its verdicts.

mod judging;
mod lessons;
#[cfg(feature = "serve")]
mod program;
mod refusal;
mod service;
mod stats;

use std::{sync::Arc, time::Duration};

use http::Method;
use serde_json::json;
use tower_x402::{
    Asset,
    facilitator::Facilitator,
    server::{AdmissionQueue, BrowserPage, BuildError, RequirePaymentLayer, RequirePaymentLayerBuilder},
};
use url::Url;
use x402_bazaar::{BodyType, Discovery, InvalidDiscovery};

#[cfg(feature = "serve")]
pub use program::{Evaluator, ServeError};
pub use service::EvaluatorService;
pub use stats::{EvaluatorStats, SkillStats};

use super::{AgentCard, CardError, EvaluatorId, LONGEST_WAIT, MAX_OUTPUTS, judge::Judge};
use judging::Work;
use lessons::Lessons;
use stats::Counters;

/// The settings of an [`EvaluatorService`]. Create it with [`EvaluatorService::builder`]. It needs a [`facilitator`](Self::facilitator).
#[must_use]
pub struct EvaluatorBuilder {
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

/// How much longer than the judge the handler may take: it waits for a permit, and writes the answer.
const HANDLER_SLACK: Duration = Duration::from_secs(5);
/// How long a submission waits for a permit.
const QUEUE_WAIT: Duration = Duration::from_secs(4);
/// The time for settlement that must remain of a payment's validity.
const SETTLEMENT: Duration = Duration::from_secs(60);

impl EvaluatorService {
    /// Starts the settings of an evaluator. Its card names skills, price and payee; its judge gives the verdicts.
    ///
    /// Clients are shown the URLs of the card. They may name their payments (extension `payment-identifier`).
    ///
    /// ```no_run
    /// # async fn example(facilitator: tower_x402::facilitator::OnchainFacilitator) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// use alloy_signer_local::PrivateKeySigner;
    /// use axum::Router;
    /// use tower_x402::Network;
    /// use x402_judges::ArithmeticJudge;
    /// use x402_market::{AgentCard, EvaluatorService, Score};
    ///
    /// # let key = PrivateKeySigner::random();
    /// let card = AgentCard::builder("Sums", "https://sums.example")
    ///     .skill("arithmetic", "Checks every step of a worked calculation", Score::new(0.99)?)
    ///     .price("$0.001")
    ///     .pay_to(Network::BASE_SEPOLIA, key.address())
    ///     .build()?
    ///     .sign(&key)
    ///     .await?;
    /// let evaluator = EvaluatorService::builder(card, ArithmeticJudge)
    ///     .facilitator(facilitator)
    ///     .time_limit(Duration::from_secs(5))
    ///     .build()?;
    /// let listener = tokio::net::TcpListener::bind("0.0.0.0:4021").await?;
    /// axum::serve(listener, Router::new().fallback_service(evaluator)).await?;
    /// # Ok(()) }
    /// ```
    pub fn builder(card: AgentCard, judge: impl Judge) -> EvaluatorBuilder {
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
        EvaluatorBuilder {
            card,
            judge: Arc::new(judge),
            paywall,
            facilitator: None,
            listed: true,
            limits: Limits { body: 256 * 1024, judgements: 64, time: Duration::from_secs(55) },
        }
    }
}

impl EvaluatorBuilder {
    /// Sets the facilitator that verifies and settles payments. Required.
    pub fn facilitator(self, facilitator: impl Facilitator) -> Self {
        Self { facilitator: Some(Arc::new(facilitator)), ..self }
    }

    /// Sets the largest submission, in bytes. Default: 256 KiB.
    pub fn max_body(mut self, bytes: usize) -> Self {
        self.limits.body = bytes;
        self
    }

    /// Sets how many submissions are judged at once. Default: 64.
    ///
    /// Up to sixteen times as many wait, for four seconds at most. Further ones are answered 503 and not charged.
    pub fn max_judgements(mut self, judgements: usize) -> Self {
        self.limits.judgements = judgements;
        self
    }

    /// Sets how long judging a submission may take. Default: 55 s, maximum: 1 day. Slower ones are answered 504 and not charged.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.limits.time = limit.min(LONGEST_WAIT);
        self
    }

    /// Sets whether the 402 describes the resource (extension [`bazaar`](x402_bazaar)), so that facilitators may list it.
    /// Default: `true`. It needs a card whose endpoint is an absolute URL.
    pub fn listed(self, listed: bool) -> Self {
        Self { listed, ..self }
    }

    /// Changes how payments are taken, for instance the flow or the URL for payment status. Do not set price, payee, facilitator and the
    /// largest body here: they are taken from the card and from this builder.
    pub fn paywall(mut self, change: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder) -> Self {
        self.paywall = change(self.paywall);
        self
    }

    /// Checks the settings and creates the service.
    ///
    /// # Errors
    /// [`EvaluatorError`] says which setting is missing or does not fit.
    pub fn build(self) -> Result<EvaluatorService, EvaluatorError> {
        let Self { card, judge, paywall, facilitator, listed, limits } = self;
        let pricing = card.pricing()?;
        let facilitator = facilitator.ok_or(EvaluatorError::Paywall(BuildError::NoFacilitator))?;
        if limits.body == 0 || limits.judgements == 0 || limits.time.is_zero() {
            return Err(EvaluatorError::ZeroLimit);
        }
        let identity = EvaluatorId::new(&*card.name, &*card.version);
        let identity = identity.map_err(|error| CardError::invalid("name or version", error))?;
        pricing.price_of(MAX_OUTPUTS).ok_or_else(|| CardError::invalid("pricing.pricePerOutput", "it is too high"))?;
        let counters = Counters::new(&card);
        let lessons = pricing.lessons.then(|| Arc::new(Lessons::new(judge.clone(), pricing.pay_to, limits.body)));
        let work = Arc::new(Work {
            judge,
            identity,
            pricing,
            skills: card.skills.iter().map(|skill| skill.id.clone()).collect(),
            limits,
            lessons,
            line: AdmissionQueue::new(limits.judgements, QUEUE_WAIT),
            counters,
        });
        let deadline = limits.time + HANDLER_SLACK;
        let mut paywall = paywall
            .max_request_body(limits.body)
            .handler_deadline(deadline)
            .max_timeout((deadline + SETTLEMENT).max(Duration::from_secs(120)))
            .description(&*card.description)
            .mime_type("application/json")
            .facilitator(facilitator.clone());
        if listed && work.pricing.endpoint.parse::<Url>().is_ok() {
            paywall = paywall.extension(discovery(work.skills.first().map_or("", String::as_str)).extension()?);
        }
        for token in work.pricing.accepts.iter() {
            paywall = paywall.pay_to_in(Asset::from(token), work.pricing.pay_to);
        }
        let priced = work.clone();
        let paywall = paywall.price_with_body(move |request, body| std::future::ready(priced.quote(request, body)));
        Ok(EvaluatorService::new(&card, work, &paywall.build()?, facilitator)?)
    }
}

/// Describes request and response. It must fit into a header, so it is short; the card links to the full schemas.
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

tower_x402::debug_fields!(EvaluatorBuilder { card, limits });

/// The settings of an evaluator do not fit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvaluatorError {
    /// The card has no pricing, or pricing that the service cannot honour.
    #[error(transparent)]
    Card(#[from] CardError),
    /// Payments cannot be taken with these settings.
    #[error(transparent)]
    Paywall(#[from] BuildError),
    /// The resource cannot be described.
    #[error(transparent)]
    Description(#[from] InvalidDiscovery),
    /// A limit is zero.
    #[error("max_body, max_judgements and time_limit must be greater than zero")]
    ZeroLimit,
}
