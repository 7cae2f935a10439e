//! The HTTP service of a directory.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS},
    request::Parts,
};
use http_body::Body;
use http_body_util::Full;
use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit};
use tower_service::Service;
use tower_x402::{Clock, server::RateLimit};

use super::{
    page::{self, Pages, Shown},
    payment_check::PaymentChecker,
    report::{CardsBody, ReportsBody},
    store::{DirectoryStore, Filter, Limits, StoreError},
};
use x402_market::{
    CardFetcher,
    shared::{Refusal, document, json_response, receive},
};

/// The largest request body, in bytes.
const MAX_BODY: usize = 16 * 1024;
/// How long a request body may take to arrive. Until then it holds no permit, only its caller's allowance.
const BODY_DEADLINE: Duration = Duration::from_secs(10);
/// How many cards and reports are on a page: by default, and at most.
const CARDS: [u64; 2] = [20, 100];
const REPORTS: [u64; 2] = [100, 1_000];
/// How many bytes of cards are on a page, after the first card.
const PAGE_BYTES: usize = 1 << 20;
/// How long clients may keep cards and pages.
const CACHED: &str = "public, max-age=60";

/// An HTTP service that lists evaluators and the reports of their payers. Create it with [`DirectoryService::builder`]. Cheap to clone.
///
/// | request | answer |
/// |---|---|
/// | `POST /cards {"url"}` | fetches the card at this URL, verifies and lists it: 201 if it is new, 200 if its evaluator was listed, under the `url` in the answer |
/// | `GET /cards?skill=&after=&limit=` | signed cards as their evaluators serve them, up to 100 a page, with an ETag |
/// | `POST /evidence` | a [`SignedEvidence`](super::SignedEvidence): 201 if it is accepted, 200 if it was accepted before |
/// | `GET /evidence?evaluator=&skill=&payer=&after=&limit=` | [accepted reports](super::AcceptedReport), up to 1,000 a page |
/// | `GET /?skill=&after=` | a page for people, without scripts: who sells what, for how much, and what payers report. It is up to half a minute old |
/// | `GET /healthz` | 200 if the service runs |
///
/// Paths are matched by their ends, so the service can be mounted below another path. Refusals are `{"error", "detail"}`:
///
/// | status | errors |
/// |---|---|
/// | 400 | `bad_request`, `bad_query`, `body_broken` |
/// | 408, 413 | `body_too_slow`, `body_too_large` (more than 16 KiB) |
/// | 409 | `payee_changed`; `already_reported`: the payment, or a part of it, has another report; `not_yet`: the payment is not on the chain, not claimed or not deep enough, try again |
/// | 410 | `too_old`: reports about payments of that time were deleted, of all payers or of this one |
/// | 422 | `bad_card`, `not_public`, `too_many_skills` (256 of one payee), `bad_report`: the report is not valid or not signed by the payer, `not_served`, `unknown_evaluator`, `unknown_skill`, `underpaid`: less than the evaluator's lowest price, or than $0.0001 by voucher, `not_paid`, `implausible_time` |
/// | 429 | `too_many_requests`, `too_many_reports`: the payer's limit of reports is reached, `too_many_of_host`, `too_many_of_payee` |
/// | 502 | `unreachable`: the card could not be fetched |
/// | 503 | `unavailable`, `full`: try again later |
#[derive(Clone)]
pub struct DirectoryService {
    pub(super) shared: Arc<Shared>,
}

/// What all clones share.
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) fetcher: CardFetcher,
    pub(super) pages: Pages,
}

/// What a directory was built with.
pub(super) struct Settings {
    pub(super) store: DirectoryStore,
    pub(super) checkers: Vec<PaymentChecker>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) limits: Limits,
    pub(super) ages: Ages,
    pub(super) callers: RateLimit,
    pub(super) payers: RateLimit,
    pub(super) permits: Permits,
}

/// When cards are fetched again, and what happens to those that cannot be fetched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ages {
    /// How often a card is fetched.
    pub(super) refresh: Duration,
    /// How long after it was last seen it is unlisted.
    pub(super) unlist: Duration,
    /// How long after it was last seen it is deleted.
    pub(super) delete: Duration,
}

/// Limits on concurrent work. They are separate, because listing waits for unknown servers, reports wait for nodes, and reads wait for
/// neither.
pub(super) struct Permits {
    pub(super) cards: Semaphore,
    pub(super) reports: Semaphore,
    pub(super) reads: Semaphore,
}

tower_x402::debug_fields!(DirectoryService |this| { checkers: this.shared.settings.checkers });

impl<B> Service<Request<B>> for DirectoryService
where
    B: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shared = self.shared.clone();
        Box::pin(async move {
            let mut answer = shared.answer(request).await.unwrap_or_else(Refusal::into_response);
            answer.headers_mut().entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
            Ok(answer)
        })
    }
}

impl Shared {
    async fn answer<B: Body<Data = Bytes>>(&self, request: Request<B>) -> Result<Answer, Refusal> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        if path.ends_with("/healthz") {
            return Ok(json_response(StatusCode::OK, &json!({ "status": "ok" })));
        }
        self.settings.callers.admit(&parts.extensions).map_err(|refused| too_many(refused.retry_after))?;
        let query = parts.uri.query().unwrap_or_default();
        match (path.rsplit('/').next().unwrap_or_default(), &parts.method) {
            (end @ ("cards" | "evidence" | ""), &Method::GET | &Method::HEAD) => {
                let _permit = permit(&self.settings.permits.reads)?;
                match end {
                    "cards" => self.list_cards(query, &parts).await,
                    "evidence" => self.list_reports(query).await,
                    _ => self.show(query, &parts).await,
                }
            }
            ("cards", &Method::POST) => {
                let body = receive(body, MAX_BODY, BODY_DEADLINE).await?;
                let _permit = permit(&self.settings.permits.cards)?;
                self.list(&body).await
            }
            ("evidence", &Method::POST) => {
                let body = receive(body, MAX_BODY, BODY_DEADLINE).await?;
                let _permit = permit(&self.settings.permits.reports)?;
                self.accept_report(&body).await
            }
            ("cards" | "evidence", _) => Err(Refusal::wrong_method("GET, HEAD, POST")),
            ("", _) => Err(Refusal::wrong_method("GET, HEAD")),
            _ => Err(Refusal::new(StatusCode::NOT_FOUND, "not_found", "/, /cards, /evidence")),
        }
    }

    async fn list_cards(&self, query: &str, request: &Parts) -> Result<Answer, Refusal> {
        let filter = filter(query, CARDS)?;
        let (cards, more) = self.settings.store.cards(&filter, PAGE_BYTES).await?;
        let after = cards.last().map_or(filter.after, |card| card.id);
        let page = serde_json::to_vec(&CardsBody { cards, after, more }).unwrap_or_default();
        Ok(document(request, page.into(), "application/json", CACHED))
    }

    /// Answers a person.
    async fn show(&self, query: &str, request: &Parts) -> Result<Answer, Refusal> {
        let Filter { skill, after, .. } = filter(query, CARDS)?;
        let (skill, now) = (skill.as_deref(), self.settings.clock.now());
        if let Some(page) = self.pages.get(skill, after, now) {
            return Ok(page_for(request, page));
        }
        let filter = Filter { skill: skill.map(str::to_owned), after, limit: page::CARDS, ..Filter::default() };
        let (cards, more) = self.settings.store.cards(&filter, PAGE_BYTES).await?;
        let next = cards.last().map(|card| card.id).filter(|_| more);
        let shown: Vec<Shown> = cards.into_iter().filter_map(|card| Shown::of(card, skill)).collect();
        let cells =
            |shown: &Shown| shown.skills.iter().map(|skill| (shown.entry.pay_to, skill.clone())).collect::<Vec<_>>();
        let mut reports =
            self.settings.store.seen(shown.iter().flat_map(cells).collect(), page::REPORTS).await?.into_iter();
        let with_reports = |shown: Shown| {
            let reports = reports.by_ref().take(shown.skills.len()).collect();
            (shown, reports)
        };
        let shown: Vec<_> = shown.into_iter().map(with_reports).collect();
        let page = Bytes::from(page::draw(skill, &shown, next));
        self.pages.put(skill, after, now, page.clone());
        Ok(page_for(request, page))
    }

    async fn list_reports(&self, query: &str) -> Result<Answer, Refusal> {
        let filter = filter(query, REPORTS)?;
        let (reports, more) = self.settings.store.reports(&filter).await?;
        let after = reports.last().map_or(filter.after, |report| report.id);
        Ok(json_response(StatusCode::OK, &ReportsBody { reports, after, more }))
    }
}

fn permit(permits: &Semaphore) -> Result<SemaphorePermit<'_>, Refusal> {
    permits.try_acquire().map_err(|_| unavailable("too many requests are being served"))
}

/// Reads what is wanted. Unknown and empty parameters are ignored.
fn filter(query: &str, [default, most]: [u64; 2]) -> Result<Filter, Refusal> {
    let mut filter = Filter { limit: default, ..Filter::default() };
    for (name, value) in form_urlencoded::parse(query.as_bytes()).filter(|(_, value)| !value.is_empty()) {
        match &*name {
            "evaluator" => filter.evaluator = Some(parse(&value, "evaluator is an address")?),
            "skill" => filter.skill = Some(value.into_owned()),
            "payer" => filter.payer = Some(parse(&value, "payer is an address")?),
            "after" => filter.after = parse(&value, "after is a number")?,
            "limit" => filter.limit = parse::<u64>(&value, "limit is a number")?.clamp(1, most),
            _ => {}
        }
    }
    Ok(filter)
}

fn parse<T: FromStr>(text: &str, problem: &'static str) -> Result<T, Refusal> {
    text.parse().map_err(|_| Refusal::new(StatusCode::BAD_REQUEST, "bad_query", problem))
}

pub(super) type Answer = Response<Full<Bytes>>;

/// Returns a page for a person.
fn page_for(request: &Parts, html: Bytes) -> Answer {
    let mut answer = document(request, html, "text/html; charset=utf-8", CACHED);
    let headers = answer.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, page::POLICY.clone());
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

pub(super) fn too_many(retry_after: Duration) -> Refusal {
    Refusal::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", "ask less often").later(retry_after)
}

pub(super) fn unavailable(detail: impl ToString) -> Refusal {
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail).later(Duration::from_secs(2))
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        tracing::error!(error = &error as &dyn std::error::Error, "the directory's file cannot be used");
        unavailable("the directory cannot use its storage")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_size_has_a_limit() {
        let asked = |query| (filter(query, CARDS).unwrap().limit, filter(query, REPORTS).unwrap().limit);
        assert_eq!(asked("limit=100000000"), (100, 1_000));
        assert_eq!(asked("limit=0"), (1, 1));
        assert_eq!(asked(""), (20, 100));
    }
}
