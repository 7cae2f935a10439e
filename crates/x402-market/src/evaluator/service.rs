//! The HTTP service of an evaluator.

use std::{
    convert::Infallible,
    fmt,
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
    server::{PaymentStatus, RequestBody, RequirePayment, RequirePaymentLayer, ResponseBody, is_navigation},
};

use super::{
    judging::Work,
    stats::{Income, Stats},
};
use crate::{
    AgentCard, CARD_PATH, CardError,
    respond::{self, json_response},
    schema::{EVALUATION_SCHEMA, EVALUATION_SCHEMA_PATH, SUBMISSION_SCHEMA, SUBMISSION_SCHEMA_PATH},
};

/// Where submissions are posted.
const EVALUATE_PATH: &str = "/evaluate";
const STATS_PATH: &str = "/stats";
pub(super) const PAYMENT_STATUS_PATH: &str = "/payments/status";

/// Sells verdicts; made by [`Evaluator::build`](super::Evaluator::build). Cheap to clone; clones count together.
///
/// | request | answer |
/// |---|---|
/// | `POST /evaluate` | an [`Evaluation`](crate::Evaluation), for the price of the outputs; a browser that opens it is shown what it costs |
/// | `GET /.well-known/agent-card.json` | the [`AgentCard`] |
/// | `GET /.well-known/submission.v1.schema.json`, `…/evaluation.v1.schema.json` | the [schemas](crate::schema) |
/// | `GET /stats` | [`Stats`] |
/// | `GET /payments/status` | what became of a payment: [`PaymentStatus`] |
///
/// Paths are told by their ends, so that it can stand below another path. A POST without a body and without a payment is shown
/// the price of one output.
#[derive(Clone)]
pub struct EvaluatorService {
    pages: Arc<[(&'static str, Page); 3]>,
    paid: RequirePayment<Judging>,
    work: Arc<Work>,
    income: Arc<Income>,
    facilitator: Arc<dyn Facilitator>,
}

type Answer = Response<ResponseBody<Full<Bytes>>>;

impl EvaluatorService {
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
        let income = Arc::new(Income::of(work.pricing.pay_to));
        let paid = paywall.layer(Judging(work.clone()));
        Ok(Self { pages: Arc::new(pages), paid, work, income, facilitator })
    }

    /// What it did and earned.
    pub async fn stats(&self) -> Stats {
        let earned = self.income.earned(self.facilitator.ledger().as_ref()).await;
        Stats { earned: earned.ok(), ..self.work.counters.stats() }
    }

    fn route<B>(&mut self, request: Request<B>) -> Pin<Box<dyn Future<Output = Answer> + Send>>
    where
        B: Body<Data = Bytes> + Send + 'static,
    {
        let (method, path) = (request.method(), request.uri().path());
        if path.ends_with(EVALUATE_PATH) {
            // A person who looks is shown the offer.
            if !matches!(*method, Method::POST | Method::OPTIONS) && !is_navigation(method, request.headers()) {
                return ready(not_allowed("POST"));
            }
            let paid = self.paid.call(request);
            return Box::pin(async { paid.await.unwrap_or_else(|never| match never {}) });
        }
        if let Some((_, page)) = self.pages.iter().find(|(end, _)| path.ends_with(end)) {
            return ready(page.answer(method, request.headers()));
        }
        if path.ends_with(PAYMENT_STATUS_PATH) {
            let status = PaymentStatus::new(self.facilitator.ledger().clone()).oneshot(request);
            return Box::pin(async { status.await.unwrap_or_else(|never| match never {}).map(ResponseBody::from) });
        }
        if path.ends_with(STATS_PATH) {
            if !matches!(*method, Method::GET | Method::HEAD) {
                return ready(not_allowed("GET, HEAD"));
            }
            let service = self.clone();
            return Box::pin(async move {
                let mut response = json_response(StatusCode::OK, &service.stats().await);
                response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
                response.map(ResponseBody::from)
            });
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
    type Future = EvaluatorFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> EvaluatorFuture {
        EvaluatorFuture(self.route(request))
    }
}

impl fmt::Debug for EvaluatorService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EvaluatorService").field("identity", &self.work.identity).finish_non_exhaustive()
    }
}

/// The answer of an [`EvaluatorService`].
pub struct EvaluatorFuture(Pin<Box<dyn Future<Output = Answer> + Send>>);

impl Future for EvaluatorFuture {
    type Output = Result<Answer, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx).map(Ok)
    }
}

impl fmt::Debug for EvaluatorFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EvaluatorFuture").finish_non_exhaustive()
    }
}

/// What is below the paywall.
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

fn ready(response: Response<Full<Bytes>>) -> Pin<Box<dyn Future<Output = Answer> + Send>> {
    Box::pin(std::future::ready(response.map(ResponseBody::from)))
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
    fn what_is_known_is_not_sent_again() {
        assert_eq!(status(Method::GET, None), (200, 5));
        assert_eq!(status(Method::HEAD, None), (200, 0));
        assert_eq!(status(Method::GET, Some("\"other\"")), (200, 5));
        for known in ["\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"", "\"a\", W/\"2cf24dba5fb0a30e26e83b2ac5b9e29e\"", "*"] {
            assert_eq!(status(Method::GET, Some(known)), (304, 0), "{known}");
        }
        assert_eq!(status(Method::POST, None).0, 405);
    }
}
