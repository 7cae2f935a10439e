//! A relay for requests of the code's own HTTP clients, in the process and on its only thread, with a point before, within and after
//! every request.

use std::{panic::resume_unwind, sync::Arc};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::Request,
    http::{Method, header::CONTENT_TYPE, request::Parts},
    response::Response,
};
use reqwest::Client;
use serde_json::Value;
use tokio::net::TcpListener;

use super::points::Points;

/// The largest message that is relayed.
const LARGEST: usize = 1 << 20;

/// Names a request by its parts and body.
type Name = fn(&Parts, &[u8]) -> String;

/// Opens a relay to the facilitator at `target`, and returns the relay's URL.
pub(crate) async fn to_facilitator(target: &str, points: Arc<Points>) -> String {
    open(target, points, |parts, _| format!("facilitator {}", parts.uri.path().trim_matches('/'))).await
}

/// Opens a relay to the node at `target`, and returns the relay's URL.
pub(crate) async fn to_node(target: &str, points: Arc<Points>) -> String {
    open(target, points, |_, body| {
        let said: Value = serde_json::from_slice(body).unwrap_or_default();
        let calls = said.as_array().map_or(std::slice::from_ref(&said), Vec::as_slice);
        let mut methods: Vec<_> = calls.iter().filter_map(|call| call["method"].as_str()).collect();
        // Points are named as those of a batch that the program sends itself.
        methods.dedup();
        format!("node {}", methods.join(" "))
    })
    .await
}

async fn open(target: &str, points: Arc<Points>, name: Name) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let client = Client::builder().no_proxy().build().expect("an HTTP client");
    let target = target.trim_end_matches('/').to_owned();
    let relay = Router::new().fallback(move |request: Request| {
        let (client, target, points) = (client.clone(), target.clone(), points.clone());
        async move {
            let (parts, body) = request.into_parts();
            let body = to_bytes(body, LARGEST).await.expect("a small body");
            let name = name(&parts, &body);
            match points.around_request(&name, exchange(&client, &target, &parts, body)).await {
                Ok(response) => response,
                // A panicking handler makes hyper drop the connection, as the other side did.
                Err(_) => resume_unwind(Box::new("cut")),
            }
        }
    });
    tokio::spawn(async move { axum::serve(listener, relay).await });
    format!("http://{address}")
}

async fn exchange(client: &Client, target: &str, parts: &Parts, body: Bytes) -> Result<Response, reqwest::Error> {
    let mut request = client.request(parts.method.clone(), format!("{target}{}", parts.uri.path()));
    if parts.method == Method::POST {
        request = request.header(CONTENT_TYPE, "application/json").body(body);
    }
    let answer = request.send().await?;
    let (status, headers) = (answer.status(), answer.headers().clone());
    let mut response = Response::new(Body::from(answer.bytes().await?));
    *response.status_mut() = status;
    for name in ["content-type", "retry-after"] {
        if let Some(value) = headers.get(name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    Ok(response)
}
