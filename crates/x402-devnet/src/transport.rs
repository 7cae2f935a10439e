//! Access to the devnet: an alloy transport in the same process, and JSON-RPC over HTTP on a port.

use std::{
    io,
    task::{Context, Poll},
};

use alloy_json_rpc::{Id, RequestPacket, Response as RpcResponse, ResponsePacket, ResponsePayload, SerializedRequest};
use alloy_transport::{TransportError, TransportErrorKind, TransportFut, TransportResult};
use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::{
    net::{TcpListener, ToSocketAddrs},
    sync::oneshot,
};
use tower_service::Service;
use url::Url;

use super::{Devnet, rpc};

/// The largest request body, in bytes.
const MAX_BODY: usize = 2 * 1024 * 1024;

/// An alloy transport to a [`Devnet`] in the same process. Clones reach the same chain.
#[derive(Clone, Debug)]
pub struct DevnetTransport(pub(super) Devnet);

impl Service<RequestPacket> for DevnetTransport {
    type Response = ResponsePacket;
    type Error = TransportError;
    type Future = TransportFut<'static>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, packet: RequestPacket) -> Self::Future {
        let devnet = self.0.clone();
        Box::pin(async move {
            match packet {
                RequestPacket::Single(request) => answer(&devnet, request).await.map(ResponsePacket::Single),
                RequestPacket::Batch(requests) => {
                    let mut responses = Vec::with_capacity(requests.len());
                    for request in requests {
                        responses.push(answer(&devnet, request).await?);
                    }
                    Ok(ResponsePacket::Batch(responses))
                }
            }
        })
    }
}

async fn answer(devnet: &Devnet, request: SerializedRequest) -> TransportResult<RpcResponse> {
    let answer = rpc::serve(devnet, request.method(), request.params())
        .await
        .map_err(|rpc::Dropped| TransportErrorKind::custom_str("the devnet dropped the connection"))?;
    let payload = match answer {
        Ok(result) => ResponsePayload::Success(result),
        Err(failure) => ResponsePayload::Failure(failure.into()),
    };
    Ok(RpcResponse { id: request.id().clone(), payload })
}

/// A port on which a devnet answers JSON-RPC over HTTP. Dropping it closes the port; open connections end after the current call.
#[derive(Debug)]
pub struct DevnetPort {
    url: Url,
    /// Dropping it stops the server.
    _running: oneshot::Sender<()>,
}

impl DevnetPort {
    /// Returns the URL of its JSON-RPC endpoint.
    pub fn url(&self) -> &Url {
        &self.url
    }
}

pub(super) async fn serve(devnet: Devnet, address: impl ToSocketAddrs) -> io::Result<DevnetPort> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    let url = Url::parse(&format!("http://{address}/")).map_err(io::Error::other)?;
    let app = Router::new().route("/", post(handle)).layer(DefaultBodyLimit::max(MAX_BODY)).with_state(devnet);
    let (running, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    tokio::spawn(server.into_future());
    Ok(DevnetPort { url, _running: running })
}

#[derive(Deserialize)]
struct Request<'a> {
    #[serde(default)]
    id: Option<Id>,
    method: String,
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
}

async fn handle(State(devnet): State<Devnet>, body: Bytes) -> Response {
    match answer_all(&devnet, &body).await {
        Ok(response) => response,
        Err(rpc::Dropped) => StatusCode::BAD_GATEWAY.into_response(),
    }
}

async fn answer_all(devnet: &Devnet, body: &[u8]) -> Result<Response, rpc::Dropped> {
    let Ok(batch) = serde_json::from_slice::<Vec<&RawValue>>(body) else {
        return Ok(Json(answer_http(devnet, body).await?).into_response());
    };
    let mut responses = Vec::with_capacity(batch.len());
    for request in batch {
        responses.push(answer_http(devnet, request.get().as_bytes()).await?);
    }
    Ok(Json(responses).into_response())
}

async fn answer_http(devnet: &Devnet, request: &[u8]) -> Result<RpcResponse, rpc::Dropped> {
    let Ok(request) = serde_json::from_slice::<Request<'_>>(request) else {
        return Ok(RpcResponse::parse_error(Id::None));
    };
    let payload = match rpc::serve(devnet, &request.method, request.params).await? {
        Ok(result) => ResponsePayload::Success(result),
        Err(failure) => ResponsePayload::Failure(failure.into()),
    };
    Ok(RpcResponse { id: request.id.unwrap_or(Id::None), payload })
}
