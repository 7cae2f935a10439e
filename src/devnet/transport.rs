//! The devnet as an alloy transport: JSON-RPC without a network.

use std::task::{Context, Poll};

use alloy_json_rpc::{RequestPacket, Response, ResponsePacket, ResponsePayload, SerializedRequest};
use alloy_transport::{TransportError, TransportErrorKind, TransportFut, TransportResult};
use tower_service::Service;

use super::{Devnet, rpc};

/// Carries JSON-RPC to a [`Devnet`] in the same process. A clone reaches the same chain.
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

async fn answer(devnet: &Devnet, request: SerializedRequest) -> TransportResult<Response> {
    let answer = rpc::serve(devnet, request.method(), request.params())
        .await
        .map_err(|rpc::Dropped| TransportErrorKind::custom_str("the devnet dropped the connection"))?;
    let payload = match answer {
        Ok(result) => ResponsePayload::Success(result),
        Err(failure) => ResponsePayload::Failure(failure.into()),
    };
    Ok(Response { id: request.id().clone(), payload })
}
