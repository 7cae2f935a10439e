//! One exchange with a facilitator over HTTP, bounded in time and bytes, without redirects.

use std::{future::Future, sync::Arc, time::Duration};

use ::reqwest::{Client, ClientBuilder, redirect::Policy};
use async_trait::async_trait;
use bytes::Bytes;
use http::{
    HeaderMap, Method, StatusCode,
    header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER},
};
use url::Url;

use crate::body::read_body;

/// The largest answer that is read, in bytes. Settlements have about 500.
const MAX_ANSWER: usize = 64 * 1024;
/// How long idle connections are kept: shorter than Node's servers keep theirs (5 seconds). A request on a connection that is being
/// closed is lost, and a lost settlement costs more than a new connection.
const IDLE: Duration = Duration::from_secs(4);
/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);
/// The longest pause that an answer may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// A request that is about to be sent, for an [`Authenticate`] that signs requests.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outgoing {
    /// `GET` or `POST`.
    pub method: Method,
    /// The facilitator's host, with its port if that is not the scheme's default.
    pub host: String,
    /// The whole path, such as `/platform/v2/x402/settle`.
    pub path: String,
}

/// Makes the headers that authenticate requests to a facilitator.
///
/// It is called for every request, repeated ones included, so the headers may be short-lived. Closures that return a future of headers
/// implement it:
///
/// ```
/// use http::{HeaderMap, header::AUTHORIZATION};
/// use tower_x402::facilitator::{Authenticate, Outgoing};
///
/// fn signed() -> impl Authenticate {
///     |request: Outgoing| async move {
///         let token = format!("a token for {} {}{}", request.method, request.host, request.path);
///         Ok(HeaderMap::from_iter([(AUTHORIZATION, format!("Bearer {token}").parse()?)]))
///     }
/// }
/// # let _ = signed();
/// ```
#[async_trait]
pub trait Authenticate: Send + Sync + 'static {
    /// Returns the headers for this request.
    ///
    /// # Errors
    /// Any error: the request is not sent.
    async fn headers(&self, request: Outgoing) -> Result<HeaderMap, Box<dyn std::error::Error + Send + Sync>>;
}

#[async_trait]
impl<F, Fut> Authenticate for F
where
    F: Fn(Outgoing) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<HeaderMap, Box<dyn std::error::Error + Send + Sync>>> + Send,
{
    async fn headers(&self, request: Outgoing) -> Result<HeaderMap, Box<dyn std::error::Error + Send + Sync>> {
        self(request).await
    }
}

/// A facilitator's address, and the client that asks it.
pub(super) struct Api {
    client: Client,
    base: Url,
    authenticate: Option<Arc<dyn Authenticate>>,
    timeout: Duration,
}

/// A complete answer.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) retry_after: Option<Duration>,
    pub(super) body: Vec<u8>,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// The request was not sent, so it had no effect.
    NotSent,
    /// The request may have had an effect.
    Lost,
}

impl Api {
    /// Returns `None` if the machine's TLS cannot be used.
    pub(super) fn new(
        client: ClientBuilder,
        base: Url,
        authenticate: Option<Arc<dyn Authenticate>>,
        timeout: Duration,
    ) -> Option<Self> {
        let client = client
            .redirect(Policy::none())
            .connect_timeout(CONNECT.min(timeout))
            .pool_idle_timeout(IDLE)
            .tcp_nodelay(true)
            .build()
            .ok()?;
        Some(Self { client, base, authenticate, timeout })
    }

    pub(super) async fn get(&self, path: &str) -> Result<Answer, NoAnswer> {
        self.exchange(Method::GET, path, Bytes::new()).await
    }

    pub(super) async fn post(&self, path: &str, body: Bytes) -> Result<Answer, NoAnswer> {
        self.exchange(Method::POST, path, body).await
    }

    async fn exchange(&self, method: Method, path: &str, body: Bytes) -> Result<Answer, NoAnswer> {
        let mut url = self.base.clone();
        url.set_path(&format!("{}/{path}", self.base.path().trim_end_matches('/')));
        let mut headers = HeaderMap::new();
        if let Some(authenticate) = &self.authenticate {
            let host = url.host_str().unwrap_or_default();
            let host = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
            let outgoing = Outgoing { method: method.clone(), host, path: url.path().to_owned() };
            match tokio::time::timeout(self.timeout, authenticate.headers(outgoing)).await {
                Ok(Ok(made)) => headers = made,
                // The error's text may quote a secret.
                Ok(Err(_)) | Err(_) => {
                    tracing::error!(path, "a request to the facilitator could not be authenticated");
                    return Err(NoAnswer::NotSent);
                }
            }
            headers.values_mut().for_each(|value| value.set_sensitive(true));
        }
        headers.insert(ACCEPT, http::HeaderValue::from_static("application/json"));
        let mut request = self.client.request(method.clone(), url).headers(headers);
        if method == Method::POST {
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        match tokio::time::timeout(self.timeout, read(request)).await {
            Ok(answer) => answer,
            Err(_) => {
                tracing::warn!(path, timeout = ?self.timeout, "the facilitator did not answer in time");
                Err(NoAnswer::Lost)
            }
        }
    }
}

// The host alone: a path or a query may hold a key.
debug_fields!(Api |this| { host: this.base.host_str() });

async fn read(request: ::reqwest::RequestBuilder) -> Result<Answer, NoAnswer> {
    let answer = request.send().await.map_err(|error| {
        let no_answer = if error.is_connect() || error.is_builder() { NoAnswer::NotSent } else { NoAnswer::Lost };
        tracing::warn!(?no_answer, "the request to the facilitator failed");
        no_answer
    })?;
    let status = answer.status();
    let retry_after = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let retry_after = retry_after.map(|seconds| Duration::from_secs(seconds).min(LONGEST_PAUSE));
    match read_body(answer, MAX_ANSWER).await {
        Ok(body) => Ok(Answer { status, retry_after, body }),
        Err(error) => {
            tracing::warn!(%status, %error, "the facilitator's answer cannot be read");
            Err(NoAnswer::Lost)
        }
    }
}
