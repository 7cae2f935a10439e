//! The devnet on a port: JSON-RPC over HTTP.

use std::{io, net::SocketAddr};

use alloy_json_rpc::{Id, Response as RpcResponse, ResponsePayload};
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
use url::Url;

use super::{Devnet, rpc};

/// Requests larger than this are refused.
const MAX_BODY: usize = 2 * 1024 * 1024;

/// A port on which a devnet answers, until this is dropped: then it takes no connection any more, and those it has end with
/// the call they are at.
#[derive(Debug)]
pub struct DevnetPort {
    address: SocketAddr,
    url: Url,
    /// Dropping it stops the server.
    _running: oneshot::Sender<()>,
}

impl DevnetPort {
    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of its JSON-RPC endpoint.
    pub fn url(&self) -> &Url {
        &self.url
    }
}

pub(super) async fn serve(devnet: Devnet, address: impl ToSocketAddrs) -> io::Result<DevnetPort> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    let url = Url::parse(&format!("http://{address}/")).map_err(io::Error::other)?;
    let app = Router::new().route("/", post(answer)).layer(DefaultBodyLimit::max(MAX_BODY)).with_state(devnet);
    let (running, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    tokio::spawn(server.into_future());
    Ok(DevnetPort { address, url, _running: running })
}

#[derive(Deserialize)]
struct Request<'a> {
    #[serde(default)]
    id: Option<Id>,
    method: String,
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
}

async fn answer(State(devnet): State<Devnet>, body: Bytes) -> Response {
    match answer_all(&devnet, &body).await {
        Ok(response) => response,
        Err(rpc::Dropped) => StatusCode::BAD_GATEWAY.into_response(),
    }
}

async fn answer_all(devnet: &Devnet, body: &[u8]) -> Result<Response, rpc::Dropped> {
    let Ok(batch) = serde_json::from_slice::<Vec<&RawValue>>(body) else {
        return Ok(Json(answer_one(devnet, body).await?).into_response());
    };
    let mut responses = Vec::with_capacity(batch.len());
    for request in batch {
        responses.push(answer_one(devnet, request.get().as_bytes()).await?);
    }
    Ok(Json(responses).into_response())
}

async fn answer_one(devnet: &Devnet, request: &[u8]) -> Result<RpcResponse, rpc::Dropped> {
    let Ok(request) = serde_json::from_slice::<Request<'_>>(request) else {
        return Ok(RpcResponse::parse_error(Id::None));
    };
    let payload = match rpc::serve(devnet, &request.method, request.params).await? {
        Ok(result) => ResponsePayload::Success(result),
        Err(failure) => ResponsePayload::Failure(failure.into()),
    };
    Ok(RpcResponse { id: request.id.unwrap_or(Id::None), payload })
}
