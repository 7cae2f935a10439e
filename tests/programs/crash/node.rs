//! The connection to the node, with a point before, within and after every request.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use alloy_json_rpc::{RequestPacket, ResponsePacket};
use alloy_rpc_client::RpcClient;
use alloy_transport::{TransportError, TransportFut};
use alloy_transport_http::{Http, reqwest};
use tower_service::Service;

use super::points::Points;

/// Returns a client of the node at `url`.
pub(crate) fn client(url: &str, points: Arc<Points>) -> RpcClient {
    let http = reqwest::Client::builder().no_proxy().build().expect("an HTTP client");
    let node = Http::with_client(http, url.parse().expect("a URL"));
    RpcClient::new(Watched { node, points }, false)
}

#[derive(Clone)]
struct Watched {
    node: Http<reqwest::Client>,
    points: Arc<Points>,
}

impl Service<RequestPacket> for Watched {
    type Response = ResponsePacket;
    type Error = TransportError;
    type Future = TransportFut<'static>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, packet: RequestPacket) -> Self::Future {
        let mut methods: Vec<_> = packet.requests().iter().map(|request| request.method().to_owned()).collect();
        // How many calls share a request is chance and no point of a payment's life.
        methods.dedup();
        let name = format!("node {}", methods.join(" "));
        let (mut node, points) = (self.node.clone(), self.points.clone());
        Box::pin(async move { points.around_request(&name, node.call(packet)).await })
    }
}
