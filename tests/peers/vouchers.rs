//! Vouchers: the official clients pay our seller, with our contract or behind the official facilitators, and the official servers behind our
//! facilitator.

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
    Network,
    channels::Channels,
    facilitator::{
        RemoteFacilitator,
        channels::{ChannelFacilitator, OnchainChannels},
    },
    ledger::MemoryLedger,
    vouchers::AuthorizerKey,
};
use x402_facilitator::FacilitatorService;

use super::{
    programs::{PAYEE, PYTHON, SETTLER, script},
    stage::{Other, PATIENCE},
};

const TYPESCRIPT_CLIENT: [&str; 2] = ["node", "vouchers.mjs"];
const PYTHON_CLIENT: [&str; 2] = [PYTHON, "vouchers.py"];

#[tokio::test]
async fn the_official_client_pays_our_seller_with_vouchers() {
    let chain = DevnetChain::start(None).await;
    pays_our_seller(&chain, TYPESCRIPT_CLIENT, contract(&chain).await).await;
}

#[tokio::test]
async fn the_official_python_client_pays_our_seller_with_vouchers() {
    let chain = DevnetChain::start(None).await;
    pays_our_seller(&chain, PYTHON_CLIENT, contract(&chain).await).await;
}

#[tokio::test]
async fn the_official_facilitator_serves_channels_of_our_seller() {
    pays_our_seller_behind(["node", "facilitator.mjs"]).await;
}

#[tokio::test]
async fn the_python_facilitator_serves_channels_of_our_seller() {
    pays_our_seller_behind([PYTHON, "facilitator.py"]).await;
}

#[tokio::test]
async fn our_facilitator_serves_channels_of_the_official_express_server() {
    pays_their_server(["node", "channels_server.mjs"], TYPESCRIPT_CLIENT).await;
}

#[tokio::test]
async fn our_facilitator_serves_channels_of_the_fastapi_server() {
    pays_their_server([PYTHON, "fastapi_server.py"], PYTHON_CLIENT).await;
}

/// Our own contract, with a key for gas.
async fn contract(chain: &DevnetChain) -> OnchainChannels {
    let sender = PrivateKeySigner::random();
    chain.fund(sender.address(), U256::from(10).pow(U256::from(19))).await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url()).signer(sender);
    contract.build().await.expect("the contracts are on the devnet")
}

async fn fund_their_settler(chain: &DevnetChain) {
    let settler: PrivateKeySigner = SETTLER.parse().expect("a key");
    chain.fund(settler.address(), U256::from(10).pow(U256::from(19))).await;
}

async fn pays_our_seller_behind(facilitator: [&str; 2]) {
    let chain = DevnetChain::start(None).await;
    fund_their_settler(&chain).await;
    let mut program = script(facilitator);
    program.env("PRIVATE_KEY", SETTLER).env("RPC_URL", chain.rpc_url());
    let facilitator = Other::start(program).await;
    let remote = RemoteFacilitator::builder(&facilitator.url).confirm(Network::BASE_SEPOLIA, chain.rpc_url());
    let remote = remote.build().await.expect("it says what it supports");
    let contract = remote.channels(chain.asset()).await.expect("it serves channels");
    pays_our_seller(&chain, TYPESCRIPT_CLIENT, contract).await;
}

/// Runs an official client against an official server that settles through our service.
async fn pays_their_server(server: [&str; 2], client: [&str; 2]) {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let service = FacilitatorService::builder(shop.facilitator.clone()).channels(contract(&chain).await).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let facilitator = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback_service(service)).await });
    let mut program = script(server);
    program.env("PAY_TO", PAYEE.to_string()).env("PRIVATE_KEY", SETTLER).env("FACILITATOR_URL", facilitator);
    program.env("OFFERS", "batch-settlement");
    let server = Other::start(program).await;
    buys(&chain, client, &format!("{}/evaluate", server.url), true).await;
    let claimed = reqwest::Client::new().post(format!("{}/claim", server.url)).send().await.expect("an answer");
    assert!(claimed.status().is_success(), "{claimed:?}");
    assert_eq!(chain.balance(PAYEE).await, 7_300);
}

async fn pays_our_seller(chain: &DevnetChain, client: [&str; 2], contract: impl ChannelFacilitator) {
    let authorizer = AuthorizerKey::new(PrivateKeySigner::random());
    let channels = Channels::builder(contract, authorizer).ledger(Arc::new(MemoryLedger::new()));
    let channels = channels.build().expect("complete settings");
    let shop = Shop::open(chain).await;
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

    buys(chain, client, &url, false).await;
    assert_eq!(shop.handled(), 8, "no request was worked for twice");
    let report = channels.claim_all().await.expect("it is claimed");
    assert_eq!(report.claimed, 1_000, "all but the last was claimed with the refund");
    assert_eq!(chain.balance(shop.pay_to).await, 7_300);
}

/// Runs a client, and checks what each of its steps cost. `alone`: no two requests at once.
async fn buys(chain: &DevnetChain, client: [&str; 2], url: &str, alone: bool) {
    let payer = PrivateKeySigner::random();
    chain.mint(payer.address(), 100 * PRICE).await;
    let mut program = script(client);
    if alone {
        program.env("ALONE", "1");
    }
    program.arg(url).env("PRIVATE_KEY", payer.to_bytes().to_string()).env("RPC_URL", chain.rpc_url());
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
}
