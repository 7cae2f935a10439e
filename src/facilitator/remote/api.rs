//! One exchange with a facilitator over HTTP, bounded in time and bytes. Redirects are not followed, but for one when it is built, and reqwest
//! repeats nothing.

use std::{future::Future, sync::Arc, time::Duration};

use ::reqwest::{Client, ClientBuilder, redirect::Policy, retry::never};
use async_trait::async_trait;
use bytes::Bytes;
use http::{
    HeaderMap, Method, StatusCode,
    header::{ACCEPT, CONTENT_TYPE, LOCATION, RETRY_AFTER},
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
/// The most characters that are shown of an address.
const MAX_SHOWN: usize = 200;
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
    /// The requests have headers that are for one origin: those of `authenticate`, or what a caller's client may add to all of its own.
    may_have_secrets: bool,
    timeout: Duration,
}

/// A complete answer.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) retry_after: Option<Duration>,
    /// Where a redirect leads.
    pub(super) location: Option<String>,
    pub(super) body: Vec<u8>,
}

/// Where a facilitator has moved to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// The new base URL, which may be used.
    To(Url),
    /// The new address, for people.
    Elsewhere(String),
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
    /// Returns `None` if the machine's TLS cannot be used. `client` is the caller's, if it has set one.
    pub(super) fn new(
        client: Option<ClientBuilder>,
        base: Url,
        authenticate: Option<Arc<dyn Authenticate>>,
        timeout: Duration,
    ) -> Option<Self> {
        // Whether a client has default headers cannot be seen.
        let may_have_secrets = authenticate.is_some() || client.is_some();
        let client = client
            .unwrap_or_default()
            .redirect(Policy::none())
            // Otherwise an error of connecting may be that of a second attempt, and would not show that nothing was sent.
            .retry(never())
            .connect_timeout(CONNECT.min(timeout))
            .pool_idle_timeout(IDLE)
            .tcp_nodelay(true)
            .build()
            .ok()?;
        Some(Self { client, base, authenticate, may_have_secrets, timeout })
    }

    pub(super) async fn get(&self, path: &str) -> Result<Answer, NoAnswer> {
        self.exchange(Method::GET, path, Bytes::new()).await
    }

    pub(super) async fn post(&self, path: &str, body: Bytes) -> Result<Answer, NoAnswer> {
        self.exchange(Method::POST, path, body).await
    }

    /// Uses another base URL from now on.
    pub(super) fn move_to(&mut self, base: Url) {
        self.base = base;
    }

    /// Returns where the answer to a request for `path` says that the facilitator has moved to, if it is a redirect.
    ///
    /// It may be used if the redirect keeps method and body, does not give up TLS, and leads to the host and port that secrets are for.
    pub(super) fn moved(&self, answer: &Answer, path: &str) -> Option<Moved> {
        let location = answer.location.as_ref().filter(|_| answer.status.is_redirection())?;
        let mut to = self.url_of(path).join(location).ok()?;
        to.set_fragment(None);
        let base = to.path().strip_suffix(path).and_then(|base| base.strip_suffix('/')).map(ToOwned::to_owned);
        let is_safe = matches!(answer.status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
            && (to.scheme() == "https" || to.scheme() == self.base.scheme())
            // A scheme's own port is `None`, so that the step from http to https stays within.
            && (!self.may_have_secrets || (to.host(), to.port()) == (self.base.host(), self.base.port()));
        match base {
            Some(base) => to.set_path(&base),
            None => return Some(Moved::Elsewhere(shown(&to))),
        }
        Some(if is_safe { Moved::To(to) } else { Moved::Elsewhere(shown(&to)) })
    }

    fn url_of(&self, path: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("{}/{path}", self.base.path().trim_end_matches('/')));
        url
    }

    async fn exchange(&self, method: Method, path: &str, body: Bytes) -> Result<Answer, NoAnswer> {
        let url = self.url_of(path);
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

/// Returns a URL without what may be a secret, and not at length.
pub(super) fn shown(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    let port = url.port().map_or_else(String::new, |port| format!(":{port}"));
    format!("{}://{host}{port}{}", url.scheme(), url.path()).chars().take(MAX_SHOWN).collect()
}

async fn read(request: ::reqwest::RequestBuilder) -> Result<Answer, NoAnswer> {
    let answer = request.send().await.map_err(|error| {
        let no_answer = if error.is_connect() || error.is_builder() { NoAnswer::NotSent } else { NoAnswer::Lost };
        tracing::warn!(?no_answer, "the request to the facilitator failed");
        no_answer
    })?;
    let status = answer.status();
    let retry_after = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let retry_after = retry_after.map(|seconds| Duration::from_secs(seconds).min(LONGEST_PAUSE));
    let location = answer.headers().get(LOCATION).and_then(|value| value.to_str().ok().map(ToOwned::to_owned));
    match read_body(answer, MAX_ANSWER).await {
        Ok(body) => Ok(Answer { status, retry_after, location, body }),
        Err(error) => {
            tracing::warn!(%status, %error, "the facilitator's answer cannot be read");
            Err(NoAnswer::Lost)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_is_followed_if_it_keeps_the_request_tls_and_the_origin_of_credentials() {
        let to = |url: &str| Some(Moved::To(url.parse().unwrap()));
        let elsewhere = |url: &str| Some(Moved::Elsewhere(url.to_owned()));
        let secure = "https://x.example/facilitator";
        for (base, status, location, has_credentials, expected) in [
            (
                secure,
                308,
                "https://www.x.example/facilitator/supported",
                false,
                to("https://www.x.example/facilitator"),
            ),
            (secure, 307, "/v2/supported", true, to("https://x.example/v2")),
            ("http://x.example", 308, "https://x.example/supported", true, to("https://x.example/")),
            (secure, 308, "http://x.example/supported", false, elsewhere("http://x.example/")),
            (secure, 301, "https://y.example/supported", false, elsewhere("https://y.example/")),
            (secure, 308, "https://y.example:8/supported", true, elsewhere("https://y.example:8/")),
            (secure, 308, "https://x.example:8/supported", true, elsewhere("https://x.example:8/")),
            (secure, 308, "https://x.example:8/supported", false, to("https://x.example:8/")),
            (secure, 308, "https://u:p@y.example/login?s=1", false, elsewhere("https://y.example/login")),
            (secure, 308, "ftp://x.example/supported", false, elsewhere("ftp://x.example/")),
            (secure, 200, "https://y.example/supported", false, None),
            (secure, 308, "https://", false, None),
        ] {
            let authenticate = || {
                let made = |_: Outgoing| async { Ok(HeaderMap::new()) };
                Arc::new(made) as Arc<dyn Authenticate>
            };
            let authenticate = has_credentials.then(authenticate);
            let api = Api::new(None, base.parse().unwrap(), authenticate, CONNECT).unwrap();
            let status = StatusCode::from_u16(status).unwrap();
            let location = Some(location.to_owned());
            let answer = Answer { status, retry_after: None, location, body: Vec::new() };
            assert_eq!(api.moved(&answer, "supported"), expected, "{base} {answer:?}", answer = answer.location);
        }
    }
}
