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
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode,
    header::{ACCESS_CONTROL_ALLOW_ORIGIN, ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, ETAG},
};
use http_body::Body;
use http_body_util::Full;
use serde_json::json;
use tower::ServiceExt as _;
use tower_layer::Layer as _;
use tower_service::Service;
use tower_x402::{
    facilitator::Facilitator,
    server::{PaymentStatus, RequestBody, RequirePayment, RequirePaymentLayer, ResponseBody, drain},
};

use super::{EvaluatorBuilder, judging::Work, stats::EvaluatorStats};
use crate::{
    AgentCard, CARD_PATH, CardError,
    judge::Judge,
    respond::{self, json_response},
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
    pages: Arc<[(&'static str, Page); 3]>,
    paid: RequirePayment<Judging>,
    work: Arc<Work>,
    facilitator: Arc<dyn Facilitator>,
}

type Answer = Response<ResponseBody<Full<Bytes>>>;
type AnswerFuture = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

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
        EvaluatorBuilder::new(card, judge)
    }

    pub(super) fn new(
        card: &AgentCard,
        work: Arc<Work>,
        paywall: &RequirePaymentLayer,
        facilitator: Arc<dyn Facilitator>,
    ) -> Result<Self, CardError> {
        let card = serde_json::to_vec(card).map_err(|error| CardError::invalid(".", &error))?;
        let schema = |text: &'static str| Page::new(text, "application/schema+json", "public, max-age=86400");
        let pages = [
            (CARD_PATH, Page::new(card, "application/json", "public, max-age=300")),
            (SUBMISSION_SCHEMA_PATH, schema(SUBMISSION_SCHEMA)),
            (EVALUATION_SCHEMA_PATH, schema(EVALUATION_SCHEMA)),
        ];
        let paid = paywall.layer(Judging(work.clone()));
        Ok(Self { pages: Arc::new(pages), paid, work, facilitator })
    }

    /// Returns what the evaluator judged.
    pub fn stats(&self) -> EvaluatorStats {
        self.work.counters.stats()
    }

    fn route<B>(&mut self, request: Request<B>) -> AnswerFuture
    where
        B: Body<Data = Bytes> + Send + 'static,
    {
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
        let request = Request::from_parts(parts.clone(), ());
        drain(Request::from_parts(parts, body));
        let (method, path) = (request.method(), request.uri().path());
        if let Some((_, page)) = self.pages.iter().find(|(end, _)| path.ends_with(end)) {
            return ready(page.answer(method, request.headers()));
        }
        if path.ends_with(PAYMENT_STATUS_PATH) {
            let status = PaymentStatus::new(self.facilitator.ledger().clone()).oneshot(request);
            return Box::pin(async { Ok(status.await?.map(ResponseBody::from)) });
        }
        if path.ends_with(STATS_PATH) {
            if !matches!(*method, Method::GET | Method::HEAD) {
                return ready(not_allowed("GET, HEAD"));
            }
            let mut response = json_response(StatusCode::OK, &self.stats());
            response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            return ready(response);
        }
        let detail = format!("POST {EVALUATE_PATH}, GET {CARD_PATH}, {STATS_PATH} or {PAYMENT_STATUS_PATH}");
        ready(json_response(StatusCode::NOT_FOUND, &json!({ "error": "not_found", "detail": detail })))
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
        self.route(request)
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
        Box::pin(async move { Ok(work.serve(request).await) })
    }
}

fn ready(response: Response<Full<Bytes>>) -> AnswerFuture {
    Box::pin(std::future::ready(Ok(response.map(ResponseBody::from))))
}

fn not_allowed(methods: &'static str) -> Response<Full<Bytes>> {
    let mut response =
        json_response(StatusCode::METHOD_NOT_ALLOWED, &json!({ "error": "method_not_allowed", "detail": methods }));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}

/// A document that does not change while the process runs.
#[derive(Clone, Debug)]
struct Page {
    body: Bytes,
    tag: HeaderValue,
    media_type: &'static str,
    cache_control: &'static str,
}

impl Page {
    fn new(body: impl Into<Bytes>, media_type: &'static str, cache_control: &'static str) -> Self {
        let body = body.into();
        let tag = respond::etag(&body);
        Self { body, tag, media_type, cache_control }
    }

    /// Answers GET and HEAD, conditional or not (RFC 9110, section 13).
    fn answer(&self, method: &Method, headers: &HeaderMap) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::default());
        if !matches!(*method, Method::GET | Method::HEAD) {
            *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        let answer = response.headers_mut();
        answer.insert(ETAG, self.tag.clone());
        answer.insert(CACHE_CONTROL, HeaderValue::from_static(self.cache_control));
        answer.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        if respond::is_known(headers, &self.tag) {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
            return response;
        }
        answer.insert(CONTENT_TYPE, HeaderValue::from_static(self.media_type));
        answer.insert(CONTENT_LENGTH, self.body.len().into());
        if method == Method::GET {
            *response.body_mut() = Full::new(self.body.clone());
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use http::header::IF_NONE_MATCH;

    use super::*;

    fn status(method: Method, known: Option<&'static str>) -> (u16, usize) {
        let page = Page::new("hello", "text/plain", "public");
        let mut headers = HeaderMap::new();
        headers.extend(known.map(|known| (IF_NONE_MATCH, HeaderValue::from_static(known))));
        let response = page.answer(&method, &headers);
        assert!(response.status() == 405 || response.headers()[ETAG] == TAG);
        let size = http_body::Body::size_hint(response.body()).exact().unwrap_or(0);
        (response.status().as_u16(), size as usize)
    }

    const TAG: &str = "\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"";

    #[test]
    fn document_that_the_client_has_is_not_sent_again() {
        assert_eq!(status(Method::GET, None), (200, 5));
        assert_eq!(status(Method::HEAD, None), (200, 0));
        assert_eq!(status(Method::GET, Some("\"other\"")), (200, 5));
        for known in ["\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"", "\"a\", W/\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"", "*"] {
            assert_eq!(status(Method::GET, Some(known)), (304, 0), "{known}");
        }
        assert_eq!(status(Method::POST, None).0, 405);
    }
}
