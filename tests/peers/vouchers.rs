//! Vouchers: the official client pays our seller on its payment channels.

use std::{process::Stdio, sync::Arc};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::Response;
use serde_json::{Value, json};
use support::{
    chain::Chain,
    devnet::DevnetChain,
    shop::{PRICE, Shop},
};
use tokio::time::timeout;
use tower_x402::{
    Network, channels::Channels, facilitator::channels::OnchainChannels, ledger::MemoryLedger, vouchers::AuthorizerKey,
};

use super::{
    programs::{PYTHON, script},
    stage::PATIENCE,
};

#[tokio::test]
async fn the_official_client_pays_our_seller_with_vouchers() {
    pays_our_seller(["node", "vouchers.mjs"]).await;
}

#[tokio::test]
async fn the_official_python_client_pays_our_seller_with_vouchers() {
    pays_our_seller([PYTHON, "vouchers.py"]).await;
}

async fn pays_our_seller(client: [&str; 2]) {
    let chain = DevnetChain::start(None).await;
    let (sender, authorizer) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    chain.fund(sender.address(), U256::from(10).pow(U256::from(19))).await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url()).signer(sender);
    let contract = contract.build().await.expect("the contracts are on the devnet");
    let channels = Channels::builder(contract, AuthorizerKey::new(authorizer)).ledger(Arc::new(MemoryLedger::new()));
    let channels = channels.build().expect("complete settings");
    let shop = Shop::open(&chain).await;
    let app = shop.app_with(shop.layer().vouchers(channels.clone()), |_, body| async move {
        let mut response = Response::new(Body::from(body.clone()));
        if &body[..] == b"cheap" {
            response.headers_mut().insert("settlement-overrides", r#"{"amount":"300"}"#.parse().expect("a value"));
        }
        Ok(response)
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/evaluate", listener.local_addr().expect("bound"));
    let service = axum::routing::any_service(tower::util::MapErr::new(app, |error| -> std::convert::Infallible {
        panic!("the seller failed: {error}")
    }));
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback_service(service)).await });

    let payer = PrivateKeySigner::random();
    chain.mint(payer.address(), 100 * PRICE).await;
    let mut program = script(client);
    program.arg(&url).env("PRIVATE_KEY", payer.to_bytes().to_string()).env("RPC_URL", chain.rpc_url());
    let output = timeout(PATIENCE, program.stderr(Stdio::piped()).output()).await.expect("the client ends").unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let steps: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let names: Vec<&str> = steps.iter().filter_map(|step| step["step"].as_str()).collect();
    let all = ["deposit", "voucher", "cheaper", "after", "together", "together", "recovered", "refund", "again"];
    assert_eq!(names, all, "{text}\n{error}");
    for step in &steps {
        assert_eq!(step["status"], 200, "{step}");
        assert_eq!(step["payment"]["success"], true, "{step}");
    }
    let charged = |step: usize| {
        let extra = &steps[step]["payment"]["extra"];
        (extra["chargedAmount"].clone(), extra["channelState"]["chargedCumulativeAmount"].clone())
    };
    assert_eq!(charged(0), (json!("1000"), json!("1000")));
    assert_eq!(charged(1), (json!("1000"), json!("2000")));
    assert_eq!(charged(2), (json!("300"), json!("2300")));
    assert_eq!(charged(3), (json!("1000"), json!("3300")));
    assert_eq!(charged(6), (json!("1000"), json!("6300")), "the client recovered its state from the corrective 402");
    assert_eq!(charged(8), (json!("1000"), json!("7300")), "what was charged is not forgotten with the money");
    assert_eq!(shop.handled(), 8, "no request was worked for twice");
    let report = channels.claim_all().await.expect("the devnet claims");
    assert_eq!(report.claimed, 1_000, "all but the last was claimed with the refund");
    assert_eq!(chain.balance(shop.pay_to).await, 7_300);
}
