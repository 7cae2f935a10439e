//! The proxy that other tests count and break RPC with does what it says.

use std::time::{Duration, Instant};

use axum::{Json, Router, extract::State, routing::post};
use serde_json::{Value, json};
use support::rpc_proxy::{Fate, RpcProxy};
use tokio::{net::TcpListener, sync::mpsc};

#[tokio::test]
async fn counts_round_trips_and_calls_apart() {
    let (proxy, _served) = proxy().await;
    let batch = json!([call(1, "eth_call"), call(2, "eth_call"), call(3, "eth_chainId")]);
    assert_eq!(send(&proxy, &batch).await.unwrap().as_array().unwrap().len(), 3);
    assert_eq!(send(&proxy, &call(4, "eth_call")).await.unwrap()["id"], 4);

    let counts = proxy.reset();
    assert_eq!((counts.requests, counts.calls), (2, 4));
    assert_eq!((counts.of("eth_call"), counts.of("eth_chainId"), counts.of("eth_gasPrice")), (3, 1, 0));
    assert_eq!(proxy.counts().requests, 0);
}

#[tokio::test]
async fn adds_latency() {
    let (proxy, _served) = proxy().await;
    proxy.set_latency(Duration::from_millis(50));
    let start = Instant::now();
    send(&proxy, &call(1, "eth_call")).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(50));
}

#[tokio::test]
async fn faults_strike_before_or_after_the_effect() {
    let (proxy, mut served) = proxy().await;
    proxy.judge(|methods| match methods[0].as_str() {
        "before" => Fate::DropBefore,
        "after" => Fate::DropAfter,
        "error" => Fate::Error(-32000),
        "status" => Fate::Status(503),
        _ => Fate::Pass,
    });
    assert!(send(&proxy, &call(1, "before")).await.is_err());
    assert!(send(&proxy, &call(2, "after")).await.is_err());
    assert_eq!(send(&proxy, &call(3, "error")).await.unwrap()["error"]["code"], -32000);
    assert!(send(&proxy, &call(4, "status")).await.is_err());
    assert_eq!(send(&proxy, &call(5, "pass")).await.unwrap()["result"], "done");

    served.close();
    let mut methods = Vec::new();
    while let Some(method) = served.recv().await {
        methods.push(method);
    }
    assert_eq!(methods, ["after", "pass"]);
    assert_eq!(proxy.counts().requests, 5);
}

/// A proxy in front of a server that answers every call with "done" and reports the methods it served.
async fn proxy() -> (RpcProxy, mpsc::UnboundedReceiver<String>) {
    let (sender, served) = mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().route("/", post(answer)).with_state(sender);
    tokio::spawn(async { axum::serve(listener, app).await });
    (RpcProxy::start(url).await, served)
}

async fn answer(State(served): State<mpsc::UnboundedSender<String>>, Json(message): Json<Value>) -> Json<Value> {
    let one = |call: &Value| {
        let _ = served.send(call["method"].as_str().unwrap().to_owned());
        json!({ "jsonrpc": "2.0", "id": call["id"], "result": "done" })
    };
    Json(match message.as_array() {
        Some(calls) => calls.iter().map(one).collect(),
        None => one(&message),
    })
}

fn call(id: u64, method: &str) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": [] })
}

async fn send(proxy: &RpcProxy, message: &Value) -> reqwest::Result<Value> {
    let request = reqwest::Client::new().post(proxy.url()).header("content-type", "application/json");
    let response = request.body(message.to_string()).send().await?.error_for_status()?;
    Ok(serde_json::from_slice(&response.bytes().await?).unwrap())
}
