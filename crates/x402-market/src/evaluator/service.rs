//! The HTTP service of an evaluator.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{ACCESS_CONTROL_ALLOW_ORIGIN, CACHE_CONTROL},
};
use http_body::Body;
use http_body_util::Full;
use tower::ServiceExt as _;
use tower_layer::Layer as _;
use tower_service::Service;
use tower_x402::{
    facilitator::Facilitator,
    server::{PaymentStatus, RequestBody, RequirePayment, RequirePaymentLayer, ResponseBody, drain},
};

use super::{judging::Work, stats::EvaluatorStats};
use crate::{
    AgentCard, CARD_PATH, CardError,
    respond::{Refusal, document, json_response},
    schema::{EVALUATION_SCHEMA, EVALUATION_SCHEMA_PATH, SUBMISSION_SCHEMA, SUBMISSION_SCHEMA_PATH},
};

/// The path to which submissions are posted.
const EVALUATE_PATH: &str = "/evaluate";
const LESSONS_PATH: &str = "/lessons";
const STATS_PATH: &str = "/stats";
pub(super) const PAYMENT_STATUS_PATH: &str = "/payments/status";

/// An HTTP service that sells verdicts. Create it with [`EvaluatorService::builder`]. Cheap to clone; clones share their statistics.
///
/// | request | answer |
/// |---|---|
/// | `POST /evaluate` | an [`Evaluation`](crate::Evaluation), for the price of its outputs. A browser is shown a page with the price |
/// | `POST /lessons` | takes a [`Lesson`](crate::Lesson), if the card says so: 200. 403 if the payer did not sign it, 404 if nothing of it was judged for that payer, 409 if it was taught before, 413 and 503 beyond the limits |
/// | `GET /.well-known/agent-card.json` | the [`AgentCard`] |
/// | `GET /.well-known/submission.v1.schema.json`, `…/evaluation.v1.schema.json` | the [schemas](crate::schema) |
/// | `GET /stats` | [`EvaluatorStats`] |
/// | `GET /payments/status` | the [`PaymentStatus`] of a payment |
///
/// Paths are matched by their ends, so the service can be mounted below another path. A request to `/evaluate` without body and payment is
/// answered with the price of one output, whatever its method, and a payer that paid by voucher can ask for a refund with any method.
///
/// A submission that cannot be judged is refused before payment: one that cannot be read, has too many outputs or a skill that is not on
/// the card, or that [`Judge::accepts`](crate::judge::Judge::accepts) refuses. Nothing is charged either if the judge fails, takes too
/// long, or returns verdicts that students would refuse.
#[derive(Clone)]
pub struct EvaluatorService {
    pages: Arc<[Page; 3]>,
    paid: RequirePayment<Judging>,
    work: Arc<Work>,
    facilitator: Arc<dyn Facilitator>,
}

/// A document that does not change while the process runs: its path, its bytes, its media type and how long it may be kept.
type Page = (&'static str, Bytes, [&'static str; 2]);
type Answer = Response<ResponseBody<Full<Bytes>>>;
type AnswerFuture = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

impl EvaluatorService {
    pub(super) fn new(
        card: &AgentCard,
        work: Arc<Work>,
        paywall: &RequirePaymentLayer,
        facilitator: Arc<dyn Facilitator>,
    ) -> Result<Self, CardError> {
        let card = serde_json::to_vec(card).map_err(|error| CardError::invalid(".", error))?;
        let schema = ["application/schema+json", "public, max-age=86400"];
        let pages = [
            (CARD_PATH, card.into(), ["application/json", "public, max-age=300"]),
            (SUBMISSION_SCHEMA_PATH, SUBMISSION_SCHEMA.into(), schema),
            (EVALUATION_SCHEMA_PATH, EVALUATION_SCHEMA.into(), schema),
        ];
        let paid = paywall.layer(Judging(work.clone()));
        Ok(Self { pages: Arc::new(pages), paid, work, facilitator })
    }

    /// Returns what the evaluator judged.
    pub fn stats(&self) -> EvaluatorStats {
        self.work.counters.stats()
    }
}

impl<B> Service<Request<B>> for EvaluatorService
where
    B: Body<Data = Bytes> + Send + 'static,
{
    type Response = Answer;
    type Error = Infallible;
    type Future = AnswerFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> AnswerFuture {
        if request.uri().path().ends_with(EVALUATE_PATH) {
            // With any method: a browser is shown the offer, and clients of the official packages ask for refunds with GET. Only a POST has
            // a price when it is paid, and is judged.
            return Box::pin(self.paid.call(request));
        }
        let lessons = self.work.lessons.clone().filter(|_| request.uri().path().ends_with(LESSONS_PATH));
        if let Some(lessons) = lessons {
            return Box::pin(async move { Ok(lessons.serve(request).await.map(ResponseBody::from)) });
        }
        // Nothing else has a body; a client that sends one gets its answer.
        let (parts, body) = request.into_parts();
        drain(Request::from_parts(parts.clone(), body));
        let path = parts.uri.path();
        if path.ends_with(PAYMENT_STATUS_PATH) {
            let status = PaymentStatus::new(self.facilitator.ledger().clone()).oneshot(Request::from_parts(parts, ()));
            return Box::pin(async { Ok(status.await?.map(ResponseBody::from)) });
        }
        let page = self.pages.iter().find(|(at, ..)| path.ends_with(at));
        let response = if page.is_none() && !path.ends_with(STATS_PATH) {
            let detail = format!("POST {EVALUATE_PATH}, GET {CARD_PATH}, {STATS_PATH} or {PAYMENT_STATUS_PATH}");
            Refusal::new(StatusCode::NOT_FOUND, "not_found", detail).into_response()
        } else if !matches!(parts.method, Method::GET | Method::HEAD) {
            Refusal::wrong_method("GET, HEAD").into_response()
        } else if let Some((_, body, [media_type, cache_control])) = page {
            let mut response = document(&parts, body.clone(), media_type, cache_control);
            response.headers_mut().insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
            response
        } else {
            let mut response = json_response(StatusCode::OK, &self.stats());
            response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        };
        Box::pin(std::future::ready(Ok(response.map(ResponseBody::from))))
    }
}

tower_x402::debug_fields!(EvaluatorService |this| { identity: this.work.identity });

/// The handler behind the paywall.
#[derive(Clone)]
struct Judging(Arc<Work>);

impl<B> Service<Request<RequestBody<B>>> for Judging
where
    B: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<B>>) -> Self::Future {
        let work = self.0.clone();
        Box::pin(async move { Ok(work.serve(request).await.unwrap_or_else(Refusal::into_response)) })
    }
}
