//! Uploads to our seller, which answers before it has read them, by the official clients and by ours, directly and through nginx: no
//! client sees a reset.
//!
//! One of each size runs with the other tests; fifty of each with
//! `cargo nextest run -p tower-x402-tests --features test-peers --test peers uploads --run-ignored all`.

use alloy_signer_local::PrivateKeySigner;
use serde_json::Value;
use support::uploads::{SIZES, paid_by_layer, paid_by_middleware, seller};
use tokio::time::timeout;

use super::{
    nginx::Nginx,
    programs::{PYTHON, script},
    stage::PATIENCE,
};

/// A program of this directory, and which client of it.
const CLIENTS: [([&str; 2], &str); 4] = [
    (["node", "uploads.mjs"], "fetch"),
    (["node", "uploads.mjs"], "http"),
    ([PYTHON, "uploads.py"], "httpx"),
    ([PYTHON, "uploads.py"], "requests"),
];

async fn all_pay(url: &str, sizes: &[usize], times: usize) {
    for (program, client) in CLIENTS {
        let mut program = script(program);
        program.args([client, url, &times.to_string()]).args(sizes.iter().map(ToString::to_string));
        program.env("PRIVATE_KEY", PrivateKeySigner::random().to_bytes().to_string());
        let patience = PATIENCE * u32::try_from(times).unwrap();
        let output = timeout(patience, program.output()).await.expect("the client ends").unwrap();
        assert!(output.status.success(), "{client}: {}", String::from_utf8_lossy(&output.stderr));
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["failures"], Value::Array(vec![]), "{client}");
    }
    paid_by_middleware(url, sizes, times).await;
    paid_by_layer(url, sizes, times).await;
}

/// What is said of nginx here is its default, but for the body size above its megabyte.
async fn all_pay_through_nginx(times: usize) {
    let seller = seller().await;
    let (small, large) = SIZES.split_at(2);
    let nginx = Nginx::start(&format!("location / {{ proxy_pass {seller}; }}")).await;
    all_pay(&nginx.url, small, times).await;
    let large_bodies = "client_max_body_size 32m";
    let nginx = Nginx::start(&format!("location / {{ proxy_pass {seller}; {large_bodies}; }}")).await;
    all_pay(&nginx.url, large, times).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_pay_for_uploads_of_any_size() {
    all_pay(&seller().await, &SIZES, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_pay_for_uploads_of_any_size_through_nginx() {
    all_pay_through_nginx(1).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "fifty of each size"]
async fn clients_pay_for_uploads_of_any_size_fifty_times() {
    all_pay(&seller().await, &SIZES, 50).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "fifty of each size"]
async fn clients_pay_for_uploads_of_any_size_through_nginx_fifty_times() {
    all_pay_through_nginx(50).await;
}
