//! Passes requests on to the upstream, and its answers back.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version, header::HOST};
use http_body_util::BodyDataStream;
use tokio::time::timeout;
use tower_service::Service;
use tower_x402::{
    Usdc,
    protocol::PaymentFlow,
    server::{ActualPrice, VerifiedPayment},
};
use url::Url;

use super::bounded::TooLong;
use crate::{error::Error, headers, problem::Problem, serve::Peer, values::HttpUrl};

/// The header in which an upstream says what a request really cost, in dollars: `$0.0004`.
const ACTUAL_PRICE: HeaderName = HeaderName::from_static("x402-actual-price");
/// The same header of the official packages. The layer reads it, and removes it from answers that are paid for.
const OVERRIDES: HeaderName = HeaderName::from_static("settlement-overrides");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
pub(super) const NO_ROUTE: &str = "there is nothing at this path, or not with this method";
/// The timeout for a connection to the upstream.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The upstream as a service. Clones share its connections.
#[derive(Clone, Debug)]
pub(crate) struct Forwarder {
    inner: Arc<Inner>,
    only_paid: bool,
    is_metered: bool,
}

#[derive(Debug)]
struct Inner {
    client: reqwest::Client,
    /// Without a slash at the end.
    base: String,
    timeout: Duration,
    behind_proxy: bool,
}

impl Forwarder {
    /// `timeout` is how long the head of an answer may take, and each pause in its body. `behind_proxy` says that the headers in which a
    /// proxy before this one names the client are true.
    pub(crate) fn new(upstream: &HttpUrl, timeout: Duration, behind_proxy: bool) -> Result<Self, Error> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(timeout)
            .build()
            .map_err(Error::Http)?;
        let base = upstream.as_str().trim_end_matches('/').to_owned();
        Ok(Self { inner: Arc::new(Inner { client, base, timeout, behind_proxy }), only_paid: false, is_metered: false })
    }

    /// Returns the same upstream for requests that are paid for, and for no others, such as preflights.
    pub(crate) fn only_paid(&self) -> Self {
        Self { only_paid: true, ..self.clone() }
    }

    /// Returns the same upstream for routes of which it says what a request cost. Of others it is not asked: it may be passing on what a
    /// client had it say.
    pub(crate) fn metered(&self) -> Self {
        Self { is_metered: true, ..self.clone() }
    }
}

impl<B> Service<Request<B>> for Forwarder
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let inner = self.inner.clone();
        if self.only_paid && request.extensions().get::<VerifiedPayment>().is_none() {
            return Box::pin(std::future::ready(Ok(no_route().into_response())));
        }
        let is_metered = self.is_metered;
        Box::pin(async move { Ok(inner.forward(request, is_metered).await.unwrap_or_else(Problem::into_response)) })
    }
}

impl Inner {
    async fn forward<B>(&self, request: Request<B>, is_metered: bool) -> Result<Response<Body>, Problem>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (parts, body) = request.into_parts();
        let url = self.at(&parts.uri)?;
        let mut headers = parts.headers;
        let host = headers.get(HOST).cloned();
        // First, since the client chooses what `Connection` names: nothing that is added later may be among it.
        headers::remove_hop_by_hop(&mut headers);
        self.name_the_client(&mut headers, host, parts.extensions.get());
        headers::remove_what_is_ours(&mut headers);
        headers::remove_overrides(&mut headers);
        headers::remove_of_connection(&mut headers);
        let payment = parts.extensions.get::<VerifiedPayment>();
        let (is_paid, charged) = (payment.is_some(), charged(payment));
        if let Some(payment) = payment {
            headers::add_payment(&mut headers, payment);
        }
        let mut outgoing = self.client.request(parts.method, url).headers(headers);
        if !body.is_end_stream() {
            outgoing = outgoing.body(reqwest::Body::wrap_stream(BodyDataStream::new(body)));
        }
        let answer = match timeout(self.timeout, outgoing.send()).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) if error.is_timeout() => return Err(too_slow(charged)),
            Ok(Err(error)) if TooLong::is_cause_of(&error) => {
                let detail = format!("the body is larger than it may be; {charged}");
                return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", detail));
            }
            Ok(Err(error)) => {
                tracing::warn!(error = %error.without_url(), "the upstream does not answer");
                let detail = format!("the service behind this address does not answer; {charged}");
                return Err(Problem::new(StatusCode::BAD_GATEWAY, "upstream_unreachable", detail));
            }
            Err(_elapsed) => return Err(too_slow(charged)),
        };
        let mut response = Response::<reqwest::Body>::from(answer).map(Body::new);
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let detail = format!("the service behind this address changed the protocol without being asked; {charged}");
            return Err(Problem::new(StatusCode::BAD_GATEWAY, "upstream_switched_protocols", detail));
        }
        // The version is one of the connection. An upstream that speaks HTTP/1.0 does not make us close ours.
        *response.version_mut() = Version::HTTP_11;
        headers::remove_hop_by_hop(response.headers_mut());
        headers::remove_about_payments(response.headers_mut());
        if !(is_paid && is_metered) {
            response.headers_mut().remove(OVERRIDES);
        }
        let said: Vec<HeaderValue> = response.headers().get_all(ACTUAL_PRICE).iter().cloned().collect();
        response.headers_mut().remove(ACTUAL_PRICE);
        // What failed costs nothing, whatever it says.
        if is_metered && !said.is_empty() && response.status().is_success() {
            let price = read_price(&said).ok_or_else(|| {
                tracing::error!("the upstream's X402-Actual-Price is not one amount such as $0.0004; {charged}");
                let detail = format!("the service behind this address gave a price that cannot be read; {charged}");
                Problem::new(StatusCode::BAD_GATEWAY, "actual_price_unreadable", detail)
            })?;
            response.extensions_mut().insert(ActualPrice(price));
        }
        Ok(response)
    }

    fn at(&self, uri: &Uri) -> Result<Url, Problem> {
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        format!("{}{path}", self.base)
            .parse()
            .map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "bad_path", "the path cannot be read"))
    }

    /// Tells the upstream which client asks, and for which host.
    fn name_the_client(&self, headers: &mut HeaderMap, host: Option<HeaderValue>, peer: Option<&Peer>) {
        let address = peer.and_then(|Peer(peer)| HeaderValue::from_str(&peer.ip().to_string()).ok());
        if self.behind_proxy {
            if let Some(address) = address {
                headers.append(FORWARDED_FOR, address);
            }
            return;
        }
        headers::remove_forwarded(headers);
        for (name, value) in [
            (FORWARDED_FOR, address),
            (FORWARDED_HOST, host),
            (FORWARDED_PROTO, Some(HeaderValue::from_static("http"))),
        ] {
            if let Some(value) = value {
                headers.insert(name, value);
            }
        }
    }
}

/// The answer where nothing is sold.
pub(super) fn no_route() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "no_route", NO_ROUTE)
}

/// Returns what a request that fails here costs its client.
fn charged(payment: Option<&VerifiedPayment>) -> &'static str {
    match payment {
        Some(payment) if payment.flow == PaymentFlow::Upfront => {
            "it is paid for, and presenting the same payment again charges nothing more"
        }
        // It filled the channel, or is a transfer that somebody else sent.
        Some(payment) if payment.transaction.is_some() => {
            "however often the same payment is presented, it is charged once at most"
        }
        _ => "nothing was charged",
    }
}

fn too_slow(charged: &str) -> Problem {
    let detail = format!("the service behind this address takes too long; {charged}");
    Problem::new(StatusCode::GATEWAY_TIMEOUT, "upstream_too_slow", detail)
}

/// Reads the price that the upstream gives. An answer with a price that cannot be read, or with two, is not charged for, and not passed on.
fn read_price(said: &[HeaderValue]) -> Option<Usdc> {
    match said {
        [said] => said.to_str().ok()?.trim().parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_upstream_gets_path_and_query_as_they_came() {
        let upstream = "http://127.0.0.1:8000/base/".parse().unwrap();
        let forwarder = Forwarder::new(&upstream, Duration::from_secs(1), false).unwrap();
        let url = forwarder.inner.at(&"/a%20b?x=%2F&y".parse().unwrap()).unwrap();
        assert_eq!(url.as_str(), "http://127.0.0.1:8000/base/a%20b?x=%2F&y");
    }

    #[test]
    fn a_price_that_cannot_be_read_is_no_price() {
        let read = |said: &[&'static str]| {
            read_price(&said.iter().map(|text| HeaderValue::from_static(text)).collect::<Vec<_>>())
        };
        assert_eq!(read(&[" $0.0004"]), Some(Usdc::from_atomic(400)));
        assert_eq!(read(&["$0"]), Some(Usdc::ZERO), "nothing is a price, too");
        for said in [
            &[""][..],
            &["much"],
            &["-1"],
            &["-$0.1"],
            &["$0.0000001"],
            &["$1e-4"],
            &["$99999999999999999999"],
            &["$1", "$1"],
        ] {
            assert_eq!(read(said), None, "{said:?}");
        }
    }
}
