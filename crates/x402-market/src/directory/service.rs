//! The HTTP service of a directory.

use std::{
    borrow::Cow,
    convert::Infallible,
    fmt,
    future::Future,
    pin::Pin,
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, ETAG, RETRY_AFTER},
};
use http_body::Body;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use serde::Serialize;
use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit};
use tower_service::Service;
use tower_x402::{Clock, facilitator::service::RateLimit};

use super::{
    builder::{Ages, DirectoryBuilder},
    report::{CardPage, Problem, VoicePage},
    store::{CardFilter, DirectoryStore, Limits, StoreError, VoiceFilter},
    witness::Witness,
};
use crate::{CardFetcher, respond};

/// The largest request body, in bytes.
const MAX_BODY: usize = 16 * 1024;
/// How long a request body may take to arrive. Until then it takes nobody's place, only its caller's allowance.
const BODY_DEADLINE: Duration = Duration::from_secs(10);
/// How many bytes of cards are on a page, after the first card.
const PAGE_BYTES: usize = 1 << 20;

/// Lists evaluators, and what their payers say of them; made by [`DirectoryService::builder`]. Cheap to clone.
///
/// | request | answer |
/// |---|---|
/// | `POST /cards {"url"}` | the directory fetches the card there, verifies it and lists it: 201 if it is new, 200 if its evaluator was known, by the `url` in the answer |
/// | `GET /cards?skill=&network=&maxPrice=&after=&limit=` | signed cards as their evaluators serve them, up to 100 a page; with ETag. `maxPrice` is in atomic units per output |
/// | `POST /evidence` | a [`SignedEvidence`](super::SignedEvidence): 201 if it is admitted, 200 if it was before |
/// | `GET /evidence?evaluator=&skill=&payer=&after=&limit=` | [`Admitted`](super::Admitted) voices with their proofs, up to 1,000 a page |
/// | `GET /evidence.jsonl?…` | the same, one a line, up to 1,000; go on `after` the last line's `id` |
/// | `GET /healthz` | whether it answers |
///
/// Paths are told by their ends, so that it can stand below another path. Refusals are `{"error", "detail"}`:
///
/// | status | errors |
/// |---|---|
/// | 400 | `bad_request`, `bad_query` |
/// | 408, 413 | `body_too_slow`, `body_too_large` (16 KiB are read) |
/// | 409 | `payee_changed`; `spoken`: the payment has said something else; `not_yet`: the payment is not on the chain or not deep enough, come again |
/// | 410 | `too_old`: what was said about payments of that time was forgotten |
/// | 422 | `bad_card`, `not_public`, `too_many_skills` (256 of one payee are known), `bad_voice`, `not_served`, `unknown_evaluator`, `unknown_skill`, `underpaid`: less than the evaluator ever asked, `not_paid`, `implausible_time` |
/// | 429 | `too_many_requests`, `too_many_voices`, `too_many_of_host`, `too_many_of_payee` |
/// | 502 | `unreachable`: the card could not be fetched |
/// | 503 | `unavailable`, `full`: nobody can tell now, or there is no room; nothing was lost |
#[derive(Clone)]
pub struct DirectoryService {
    pub(super) shared: Arc<Shared>,
}

/// What all handles share.
pub(super) struct Shared {
    pub(super) store: DirectoryStore,
    pub(super) witnesses: Vec<Witness>,
    pub(super) fetcher: CardFetcher,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) limits: Limits,
    pub(super) ages: Ages,
    pub(super) callers: RateLimit,
    pub(super) payers: RateLimit,
    /// How many cards, voices and readers may be worked on besides those that are.
    pub(super) places: Places,
}

/// Apart from each other: cards wait for strangers, voices for nodes, and readers for neither.
pub(super) struct Places {
    pub(super) cards: Semaphore,
    pub(super) voices: Semaphore,
    pub(super) reads: Semaphore,
}

impl DirectoryService {
    /// Settings to start from, with what the directory keeps.
    pub fn builder(store: DirectoryStore) -> DirectoryBuilder {
        DirectoryBuilder::new(store)
    }

    pub(super) fn of(shared: Shared) -> Self {
        Self { shared: Arc::new(shared) }
    }
}

impl fmt::Debug for DirectoryService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectoryService").field("witnesses", &self.shared.witnesses).finish_non_exhaustive()
    }
}

impl<B> Service<Request<B>> for DirectoryService
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = DirectoryFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> DirectoryFuture {
        let shared = self.shared.clone();
        DirectoryFuture(Box::pin(async move {
            let answer = shared.answer(request).await.unwrap_or_else(|refusal| refusal);
            answer.into_response()
        }))
    }
}

/// The answer of a [`DirectoryService`].
pub struct DirectoryFuture(Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>);

impl Future for DirectoryFuture {
    type Output = Result<Response<Full<Bytes>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx).map(Ok)
    }
}

impl fmt::Debug for DirectoryFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectoryFuture").finish_non_exhaustive()
    }
}

impl Shared {
    async fn answer<B>(&self, request: Request<B>) -> Result<Answer, Answer>
    where
        B: Body<Data = Bytes> + Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        if path.ends_with("/healthz") {
            return Ok(Answer::healthy());
        }
        self.callers.admit(&parts.extensions).map_err(|refused| Answer::too_many(refused.retry_after))?;
        let query = parts.uri.query().unwrap_or_default();
        let is_read = matches!(parts.method, Method::GET | Method::HEAD);
        if path.ends_with("/cards") && is_read {
            let _place = enter(&self.places.reads)?;
            self.list_cards(query, &parts.headers).await
        } else if path.ends_with("/evidence") && is_read {
            let _place = enter(&self.places.reads)?;
            self.list_voices(query).await
        } else if path.ends_with("/evidence.jsonl") && is_read {
            let _place = enter(&self.places.reads)?;
            self.export_voices(query).await
        } else if path.ends_with("/cards") && parts.method == Method::POST {
            let body = read(body).await?;
            let _place = enter(&self.places.cards)?;
            self.list(&body).await
        } else if path.ends_with("/evidence") && parts.method == Method::POST {
            let body = read(body).await?;
            let _place = enter(&self.places.voices)?;
            self.hear(&body).await
        } else if path.ends_with("/evidence.jsonl") {
            Err(Answer::wrong_method("GET, HEAD"))
        } else if path.ends_with("/cards") || path.ends_with("/evidence") {
            Err(Answer::wrong_method("GET, HEAD, POST"))
        } else {
            Err(Answer::problem(StatusCode::NOT_FOUND, "not_found", "/cards, /evidence, /evidence.jsonl"))
        }
    }

    async fn list_cards(&self, query: &str, headers: &HeaderMap) -> Result<Answer, Answer> {
        let filter = card_filter(query).map_err(bad_query)?;
        let (cards, more) = self.store.cards(&filter, PAGE_BYTES).await?;
        let after = cards.last().map_or(filter.after, |card| card.id);
        Ok(Answer::tagged(&CardPage { cards, after, more }, headers))
    }

    async fn list_voices(&self, query: &str) -> Result<Answer, Answer> {
        let filter = voice_filter(query).map_err(bad_query)?;
        let (voices, more) = self.store.voices(&filter).await?;
        let after = voices.last().map_or(filter.after, |voice| voice.id);
        Ok(Answer::json(StatusCode::OK, &VoicePage { voices, after, more }))
    }

    async fn export_voices(&self, query: &str) -> Result<Answer, Answer> {
        let filter = voice_filter(query).map_err(bad_query)?;
        let (voices, _) = self.store.voices(&filter).await?;
        let mut lines = Vec::new();
        for voice in voices {
            let line = serde_json::to_vec(&voice).map_err(|_| Answer::unavailable("a voice cannot be written"))?;
            lines.extend_from_slice(&line);
            lines.push(b'\n');
        }
        Ok(Answer::bytes(StatusCode::OK, "application/jsonl", lines))
    }
}

fn enter(places: &Semaphore) -> Result<SemaphorePermit<'_>, Answer> {
    places.try_acquire().map_err(|_| Answer::unavailable("too many requests are being worked on"))
}

fn bad_query(problem: &'static str) -> Answer {
    Answer::problem(StatusCode::BAD_REQUEST, "bad_query", problem)
}

async fn read<B>(body: B) -> Result<Bytes, Answer>
where
    B: Body<Data = Bytes> + Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match tokio::time::timeout(BODY_DEADLINE, Limited::new(body, MAX_BODY).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(Answer::problem(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", "16 KiB are read"))
        }
        Ok(Err(_)) => Err(Answer::problem(StatusCode::BAD_REQUEST, "bad_request", "the body broke off")),
        Err(_) => Err(Answer::problem(StatusCode::REQUEST_TIMEOUT, "body_too_slow", "the body took too long")),
    }
}

/// How many voices are on a page that says no other limit, and at most.
const USUAL: u64 = 100;
const MOST: u64 = 1_000;

/// Which cards are wanted. What is not known here is ignored.
fn card_filter(query: &str) -> Result<CardFilter, &'static str> {
    let mut filter = CardFilter { limit: 20, ..CardFilter::default() };
    for (name, value) in parameters(query) {
        match &*name {
            "skill" => filter.skill = Some(value.into_owned()),
            "network" => filter.network = Some(parse(&value, "network is CAIP-2: eip155:8453")?),
            "maxPrice" => filter.max_price = Some(parse(&value, "maxPrice is in atomic units")?),
            "after" => filter.after = parse(&value, "after is a number")?,
            "limit" => filter.limit = parse::<u64>(&value, "limit is a number")?.clamp(1, 100),
            _ => {}
        }
    }
    Ok(filter)
}

/// Which voices are wanted.
fn voice_filter(query: &str) -> Result<VoiceFilter, &'static str> {
    let mut filter = VoiceFilter { limit: USUAL, ..VoiceFilter::default() };
    for (name, value) in parameters(query) {
        match &*name {
            "evaluator" => filter.evaluator = Some(parse(&value, "evaluator is an address")?),
            "skill" => filter.skill = Some(value.into_owned()),
            "payer" => filter.payer = Some(parse(&value, "payer is an address")?),
            "after" => filter.after = parse(&value, "after is a number")?,
            "limit" => filter.limit = parse::<u64>(&value, "limit is a number")?.clamp(1, MOST),
            _ => {}
        }
    }
    Ok(filter)
}

fn parameters(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    form_urlencoded::parse(query.as_bytes()).filter(|(_, value)| !value.is_empty())
}

fn parse<T: FromStr>(text: &str, problem: &'static str) -> Result<T, &'static str> {
    text.parse().map_err(|_| problem)
}

/// An answer in the making. Boxed, because it is the error of functions here.
#[derive(Debug)]
pub(super) struct Answer(Box<Response<Full<Bytes>>>);

impl Answer {
    pub(super) fn bytes(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Self {
        let mut response = Response::new(Full::new(body.into()));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Self(Box::new(response))
    }

    pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Self {
        Self::bytes(status, "application/json", serde_json::to_vec(body).unwrap_or_default())
    }

    /// What may be kept by those who read it, and asked for by its tag.
    pub(super) fn tagged(body: &impl Serialize, headers: &HeaderMap) -> Self {
        let body = serde_json::to_vec(body).unwrap_or_default();
        let tag = respond::etag(&body);
        let mut answer = match respond::is_known(headers, &tag) {
            true => Self(Box::new(Response::new(Full::default()))).with_status(StatusCode::NOT_MODIFIED),
            false => Self::bytes(StatusCode::OK, "application/json", body),
        };
        let headers = answer.0.headers_mut();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("public, max-age=60"));
        headers.insert(ETAG, tag);
        answer
    }

    pub(super) fn problem(status: StatusCode, error: &str, detail: impl ToString) -> Self {
        Self::json(status, &Problem { error: error.to_owned(), detail: detail.to_string() })
    }

    pub(super) fn healthy() -> Self {
        Self::json(StatusCode::OK, &json!({ "status": "ok" }))
    }

    pub(super) fn wrong_method(allowed: &'static str) -> Self {
        let mut answer = Self::problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", allowed);
        answer.0.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        answer
    }

    pub(super) fn too_many(retry_after: Duration) -> Self {
        Self::problem(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", "ask less often").later(retry_after)
    }

    pub(super) fn unavailable(detail: impl ToString) -> Self {
        Self::problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail).later(Duration::from_secs(2))
    }

    /// Says when to come again.
    pub(super) fn later(mut self, delay: Duration) -> Self {
        self.0.headers_mut().insert(RETRY_AFTER, delay.as_secs().max(1).into());
        self
    }

    fn with_status(mut self, status: StatusCode) -> Self {
        *self.0.status_mut() = status;
        self
    }

    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        *self.0
    }
}

impl From<StoreError> for Answer {
    fn from(error: StoreError) -> Self {
        tracing::error!(error = &error as &dyn std::error::Error, "the directory's file cannot be used");
        Self::unavailable("the directory cannot read or write what it keeps")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_page_is_larger_than_one_may_be() {
        let asked = |query| (card_filter(query).unwrap().limit, voice_filter(query).unwrap().limit);
        assert_eq!(asked("limit=100000000"), (100, 1_000));
        assert_eq!(asked("limit=0"), (1, 1));
        assert_eq!(asked(""), (20, 100));
    }
}
