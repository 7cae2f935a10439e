//! JSON-RPC over HTTP, without ever showing the URL.
//!
//! Node providers put the customer's key into the URL. alloy's own HTTP transport writes it into its tracing span and
//! reqwest into its errors; this one does neither, and follows no redirect with a signed transaction in its hands.

use std::{
    fmt,
    task::{Context, Poll},
    time::Duration,
};

use alloy_json_rpc::{RequestPacket, ResponsePacket};
use alloy_rpc_client::RpcClient;
use alloy_transport::{TransportError, TransportErrorKind, TransportFut, TransportResult};
use alloy_transport_http::reqwest::{Client, header::CONTENT_TYPE, redirect::Policy};
use tower_service::Service;
use url::Url;

use crate::body::read_body;

/// The largest answer that is read, in bytes. Receipts and log ranges stay far below it.
const MAX_ANSWER: usize = 16 << 20;

/// How many idle connections are kept. Each takes about 30 KiB.
const MAX_IDLE: usize = 32;

/// Returns a client of the node at this `http` or `https` URL.
pub(crate) fn client_at(url: &str) -> Result<RpcClient, EndpointError> {
    let url = Url::parse(url).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    let endpoint = Endpoint::new(url.ok_or(EndpointError::Url)?).ok_or(EndpointError::Tls)?;
    Ok(RpcClient::new(endpoint, false))
}

/// Why there is no client of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndpointError {
    /// The URL is not one of HTTP.
    Url,
    /// The machine's TLS cannot be used.
    Tls,
}

/// A JSON-RPC endpoint reached over HTTP.
#[derive(Clone)]
struct Endpoint {
    client: Client,
    url: Url,
}

impl Endpoint {
    /// Returns `None` if the machine's TLS cannot be used.
    fn new(url: Url) -> Option<Self> {
        let client = Client::builder()
            .redirect(Policy::none())
            .connect_timeout(Duration::from_secs(5))
            .pool_idle_timeout(Duration::from_secs(90))
            .pool_max_idle_per_host(MAX_IDLE)
            .tcp_nodelay(true)
            .build()
            .ok()?;
        Some(Self { client, url })
    }

    async fn post(self, packet: RequestPacket) -> TransportResult<ResponsePacket> {
        let body = packet.serialize().map_err(TransportError::ser_err)?;
        let request =
            self.client.post(self.url).header(CONTENT_TYPE, "application/json").body(body.get().as_bytes().to_vec());
        let answer = request.send().await.map_err(|error| TransportErrorKind::custom(error.without_url()))?;
        let status = answer.status();
        let bytes = read_body(answer, MAX_ANSWER).await.map_err(TransportErrorKind::custom)?;
        match serde_json::from_slice::<ResponsePacket>(&bytes) {
            // Some nodes send a JSON-RPC error with a status of 4xx or 5xx. The error says more than the status.
            Ok(packet) if status.is_success() || packet.is_error() => Ok(packet),
            Err(error) if status.is_success() => Err(TransportError::deser_err(error, "")),
            _ => Err(TransportErrorKind::http_error(status.as_u16(), String::new())),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Endpoint(..)")
    }
}

impl Service<RequestPacket> for Endpoint {
    type Response = ResponsePacket;
    type Error = TransportError;
    type Future = TransportFut<'static>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, packet: RequestPacket) -> Self::Future {
        Box::pin(self.clone().post(packet))
    }
}
