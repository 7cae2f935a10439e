//! The scheme `exact` by permits of Permit2: the official clients pay our seller, with our facilitator or behind the official ones.

use std::process::Stdio;

use serde_json::Value;
use support::{
    chain::Chain,
    devnet::DevnetChain,
    shop::{PRICE, Shop},
};
use tokio::time::timeout;
use tower_x402::{Network, facilitator::RemoteFacilitator, server::RequirePaymentLayer};

use super::{
    programs::{PYTHON, script},
    stage::PATIENCE,
    upto::{FACILITATORS, buyer, serve, their_facilitator},
};

const CLIENTS: [[&str; 2]; 2] = [["node", "permits.mjs"], [PYTHON, "permits.py"]];

#[tokio::test]
async fn the_official_clients_pay_our_seller_by_permit() {
    for client in CLIENTS {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let url = serve(shop.app(shop.layer().permits())).await;
        buys(&chain, client, &format!("{url}/evaluate")).await;
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE), "{client:?}");
    }
}

#[tokio::test]
async fn the_official_facilitators_settle_permits_for_the_price() {
    for facilitator in FACILITATORS {
        let chain = DevnetChain::start(None).await;
        let facilitator = their_facilitator(&chain, facilitator).await;
        let remote = RemoteFacilitator::builder(&facilitator.url).confirm(Network::BASE_SEPOLIA, chain.rpc_url());
        let remote = remote.build().await.expect("it says what it supports");
        let shop = Shop::open(&chain).await;
        let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE_SEPOLIA, shop.pay_to);
        let url = serve(shop.app(layer.facilitator(remote).permits())).await;
        buys(&chain, CLIENTS[0], &format!("{url}/evaluate")).await;
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
    }
}

/// Runs a client, which pays once.
async fn buys(chain: &DevnetChain, client: [&str; 2], url: &str) {
    let payer = buyer(chain).await;
    let mut program = script(client);
    program.arg(url).env("PRIVATE_KEY", payer.to_bytes().to_string()).env("TASK", "{}");
    let output = timeout(PATIENCE, program.stderr(Stdio::piped()).output()).await.expect("the client ends").unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    let bought: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{client:?} {error}"));
    assert_eq!((&bought["status"], &bought["payment"]["success"]), (&200.into(), &true.into()), "{bought} {error}");
}
