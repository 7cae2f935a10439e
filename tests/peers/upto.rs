//! The scheme `upto`: the official clients pay our seller, with our facilitator or behind the official ones; they and our buyer pay the
//! official servers, with the official facilitators or behind ours.

use std::process::Stdio;

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::Response;
use serde_json::{Value, json};
use support::{
    chain::Chain,
    devnet::DevnetChain,
    permit::approve,
    shop::{App, PRICE, Shop},
};
use tokio::{process::Command, time::timeout};
use tower_x402::{
    Network, Usdc,
    client::{Payer, PaymentMiddleware, PaymentOutcome, PermitPolicy, ReceiptExt as _},
    facilitator::RemoteFacilitator,
    server::{ActualPrice, RequirePaymentLayer, RequirePaymentLayerBuilder},
};
use x402_facilitator::FacilitatorService;

use super::{
    programs::{PAYEE, PYTHON, SETTLER, script},
    stage::{Other, PATIENCE},
};

const CLIENTS: [[&str; 2]; 2] = [["node", "upto.mjs"], [PYTHON, "upto.py"]];
const SERVERS: [[&str; 2]; 2] = [["node", "channels_server.mjs"], [PYTHON, "fastapi_server.py"]];
pub(super) const FACILITATORS: [[&str; 2]; 2] = [["node", "facilitator.mjs"], [PYTHON, "facilitator.py"]];

#[tokio::test]
async fn the_official_clients_pay_our_seller_at_most_its_price() {
    for client in CLIENTS {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let url = serve(app(&shop, shop.layer().upto())).await;
        buys(&chain, client, &format!("{url}/evaluate")).await;
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (3, 1_300), "{client:?}");
    }
}

#[tokio::test]
async fn the_official_facilitators_settle_permits_of_our_seller() {
    for facilitator in FACILITATORS {
        let chain = DevnetChain::start(None).await;
        let facilitator = their_facilitator(&chain, facilitator).await;
        let remote = RemoteFacilitator::builder(&facilitator.url).confirm(Network::BASE_SEPOLIA, chain.rpc_url());
        let remote = remote.build().await.expect("it says what it supports");
        let shop = Shop::open(&chain).await;
        let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE_SEPOLIA, shop.pay_to);
        let url = serve(app(&shop, layer.facilitator(remote).upto())).await;
        buys(&chain, CLIENTS[0], &format!("{url}/evaluate")).await;
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (3, 1_300));
    }
}

#[tokio::test]
async fn our_facilitator_settles_permits_of_the_official_servers() {
    for (server, client) in SERVERS.into_iter().zip(CLIENTS) {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let service = FacilitatorService::builder(shop.facilitator.clone()).build();
        let facilitator = serve(support::shop::app(service)).await;
        let mut program = their_server(server);
        program.env("FACILITATOR_URL", facilitator);
        let server = Other::start(program).await;
        buys(&chain, client, &format!("{}/evaluate", server.url)).await;
        assert_eq!(chain.balance(PAYEE).await, 1_300);
    }
}

#[tokio::test]
async fn our_buyer_pays_the_official_servers_at_most_their_price() {
    for server in SERVERS {
        let chain = DevnetChain::start(None).await;
        fund_their_settler(&chain).await;
        let mut program = their_server(server);
        program.env("RPC_URL", chain.rpc_url());
        let server = Other::start(program).await;
        let payer = buyer(&chain).await;
        let policy = PermitPolicy::default().node(Network::BASE_SEPOLIA, chain.devnet.rpc_client());
        let payer = Payer::builder(payer).upto(policy).build();
        let http = PaymentMiddleware::new(payer.clone()).client(reqwest::Client::builder().no_proxy()).unwrap();
        for (charge, outcome) in
            [(1_000, PaymentOutcome::Settled), (300, PaymentOutcome::Settled), (0, PaymentOutcome::Accepted)]
        {
            let request = http.post(format!("{}/evaluate?charge={charge}", server.url)).body("x");
            let response = request.send().await.expect("an answer");
            assert_eq!(response.status(), 200);
            let receipt = response.receipt().expect("it was paid for");
            assert_eq!((receipt.outcome, receipt.amount), (outcome, Usdc::from_atomic(charge)), "{receipt:?}");
        }
        let budget = payer.budget();
        assert_eq!((budget.spent(), budget.reserved()), (Usdc::from_atomic(1_300), Usdc::from_atomic(PRICE)));
        assert_eq!(chain.balance(PAYEE).await, 1_300);
    }
}

/// A handler that is told by the body what the work costs.
fn app(shop: &Shop, layer: RequirePaymentLayerBuilder) -> App {
    shop.app_with(layer, |_, body| async move {
        let units = std::str::from_utf8(&body)?.parse()?;
        let mut response = Response::new(Body::from(body));
        response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(units)));
        Ok(response)
    })
}

pub(super) async fn serve(app: App) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let service = axum::routing::any_service(tower::util::MapErr::new(app, |error| -> std::convert::Infallible {
        panic!("it failed: {error}")
    }));
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback_service(service)).await });
    url
}

async fn fund_their_settler(chain: &DevnetChain) {
    let settler: PrivateKeySigner = SETTLER.parse().expect("a key");
    chain.fund(settler.address(), U256::from(10).pow(U256::from(19))).await;
}

pub(super) async fn their_facilitator(chain: &DevnetChain, facilitator: [&str; 2]) -> Other {
    fund_their_settler(chain).await;
    let mut program = script(facilitator);
    program.env("PRIVATE_KEY", SETTLER).env("RPC_URL", chain.rpc_url());
    Other::start(program).await
}

fn their_server(server: [&str; 2]) -> Command {
    let mut program = script(server);
    program.env("PAY_TO", PAYEE.to_string()).env("PRIVATE_KEY", SETTLER).env("OFFERS", "upto");
    program
}

/// A key with money that it lets Permit2 move.
pub(super) async fn buyer(chain: &DevnetChain) -> PrivateKeySigner {
    let key = PrivateKeySigner::random();
    chain.mint(key.address(), 100 * PRICE).await;
    approve(&chain.devnet, key.address(), U256::from(100 * PRICE));
    key
}

/// Runs a client, and checks what each of its requests was charged.
async fn buys(chain: &DevnetChain, client: [&str; 2], url: &str) {
    let payer = buyer(chain).await;
    let mut program = script(client);
    program.arg(url).env("PRIVATE_KEY", payer.to_bytes().to_string());
    let output = timeout(PATIENCE, program.stderr(Stdio::piped()).output()).await.expect("the client ends").unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let bought: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let charges: Vec<&Value> = bought.iter().map(|it| &it["charge"]).collect();
    assert_eq!(charges, ["1000", "300", "0"], "{text}\n{error}");
    for it in &bought {
        assert_eq!((&it["status"], &it["payment"]["success"]), (&json!(200), &json!(true)), "{it}\n{error}");
        assert_eq!(it["payment"]["amount"], it["charge"], "{it}");
        assert_eq!(it["payment"]["transaction"] == "", it["charge"] == "0", "{it}");
    }
}
