//! The HTTP client: requests that are bounded in size and time.

use std::{fmt, time::Duration};

use reqwest::{Client, Method, Response, StatusCode, header, redirect};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use url::Url;

use super::AtroposError;

/// How much of an error message of the server is kept, in characters.
const MAX_DETAIL: usize = 500;

/// A client of an Atropos API server. Clones share its connections.
#[derive(Clone)]
pub struct AtroposClient {
    http: Client,
    base: Url,
    timeout: Duration,
    max_answer: usize,
    max_request: usize,
}

impl AtroposClient {
    /// Creates a client of the server at this URL, by default `http://127.0.0.1:8000`. Sends no request.
    ///
    /// # Errors
    /// [`AtroposError::Url`] or [`AtroposError::Client`].
    pub fn new(base: impl AsRef<str>) -> Result<Self, AtroposError> {
        let mut base = Url::parse(base.as_ref()).map_err(|_| AtroposError::Url)?;
        if !matches!(base.scheme(), "http" | "https") || !base.has_host() {
            return Err(AtroposError::Url);
        }
        base.set_query(None);
        base.set_fragment(None);
        if !base.path().ends_with('/') {
            base.set_path(&format!("{}/", base.path()));
        }
        // A redirected POST would be sent twice, or become a GET.
        let http = Client::builder().redirect(redirect::Policy::none()).connect_timeout(Duration::from_secs(10));
        let http = http.build().map_err(AtroposError::Client)?;
        Ok(Self { http, base, timeout: Duration::from_secs(30), max_answer: 64 << 20, max_request: 32 << 20 })
    }

    /// Sets the timeout of a request, with its answer. Default: 30 seconds.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the largest answer, in bytes. Default: 64 MiB. Batches are large, since token ids are numbers in JSON.
    #[must_use]
    pub const fn max_answer(mut self, bytes: usize) -> Self {
        self.max_answer = bytes;
        self
    }

    /// Sets the largest request body, in bytes. Default: 32 MiB.
    #[must_use]
    pub const fn max_request(mut self, bytes: usize) -> Self {
        self.max_request = bytes;
        self
    }

    /// Sends a POST with a body.
    pub(super) async fn post<A: DeserializeOwned>(
        &self,
        call: &'static str,
        body: &(impl Serialize + ?Sized),
    ) -> Result<A, AtroposError> {
        self.call(Method::POST, call, Some(self.body(call, body)?)).await
    }

    /// Sends a GET.
    pub(super) async fn get<A: DeserializeOwned>(&self, call: &'static str) -> Result<A, AtroposError> {
        self.call(Method::GET, call, None).await
    }

    /// Sends a GET with a body, which the server requires for environments.
    pub(super) async fn get_with<A: DeserializeOwned>(
        &self,
        call: &'static str,
        body: &(impl Serialize + ?Sized),
    ) -> Result<A, AtroposError> {
        self.call(Method::GET, call, Some(self.body(call, body)?)).await
    }

    fn body(&self, call: &'static str, body: &(impl Serialize + ?Sized)) -> Result<Vec<u8>, AtroposError> {
        let body = serde_json::to_vec(body).map_err(|error| AtroposError::Answer {
            call,
            problem: format!("the request cannot be written: {error}"),
        })?;
        if body.len() > self.max_request {
            return Err(AtroposError::TooMuch { call, bytes: body.len(), limit: self.max_request });
        }
        Ok(body)
    }

    async fn call<A: DeserializeOwned>(
        &self,
        method: Method,
        call: &'static str,
        body: Option<Vec<u8>>,
    ) -> Result<A, AtroposError> {
        let url = self.base.join(call).map_err(|_| AtroposError::Url)?;
        let mut request = self.http.request(method, url).timeout(self.timeout);
        if let Some(body) = body {
            request = request.header(header::CONTENT_TYPE, "application/json").body(body);
        }
        let response = request.send().await.map_err(|error| match error.is_connect() {
            true => AtroposError::Unreachable(error.without_url()),
            false => unanswered(call, error),
        })?;
        let status = response.status();
        if status.is_server_error() {
            return Err(AtroposError::Failed { call, status: status.as_u16() });
        }
        let answer = self.read(call, response).await;
        if status != StatusCode::OK {
            let detail = answer.map(|answer| detail(&answer)).unwrap_or_default();
            return Err(AtroposError::Refused { call, status: status.as_u16(), detail });
        }
        // Not by way of a `Value`, in which a number of 128 bits would become a float.
        serde_json::from_slice(&answer?)
            .map_err(|error| AtroposError::Answer { call, problem: without_content(&error) })
    }

    async fn read(&self, call: &'static str, mut response: Response) -> Result<Vec<u8>, AtroposError> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| unanswered(call, error))? {
            if body.len() + chunk.len() > self.max_answer {
                return Err(AtroposError::TooLarge { call, limit: self.max_answer });
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

fn unanswered(call: &'static str, error: reqwest::Error) -> AtroposError {
    AtroposError::Unanswered { call, source: error.without_url().into() }
}

/// Describes an error without the text that serde_json quotes from the answer.
fn without_content(error: &serde_json::Error) -> String {
    let what = match error.classify() {
        serde_json::error::Category::Data => "unexpected content",
        serde_json::error::Category::Eof => "it ends too early",
        _ => "no JSON",
    };
    format!("{what} in line {}, column {}", error.line(), error.column())
}

/// Returns the error message of FastAPI about a body, without the parts of the body that it repeats.
fn detail(answer: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Details {
        detail: Vec<Detail>,
    }
    #[derive(Deserialize)]
    struct Detail {
        #[serde(default)]
        loc: Vec<serde_json::Value>,
        msg: String,
    }
    let Ok(Details { detail }) = serde_json::from_slice(answer) else { return String::new() };
    let place = |loc: &[serde_json::Value]| {
        let parts = loc.iter().map(|part| part.as_str().map_or_else(|| part.to_string(), str::to_owned));
        parts.collect::<Vec<_>>().join(".")
    };
    let problems = detail.iter().take(5).map(|detail| format!("{}: {}", place(&detail.loc), detail.msg));
    problems.collect::<Vec<_>>().join("; ").chars().take(MAX_DETAIL).collect()
}

impl fmt::Debug for AtroposClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AtroposClient").field("at", &self.base.origin().ascii_serialization()).finish_non_exhaustive()
    }
}
