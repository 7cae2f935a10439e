//! The rules of x402-conformance, by the package's own programs, and R13, which needs two sellers on one PostgreSQL.
//! `crates/x402-cli/tests/rules.rs` has the other rules that they leave out, and those that they show with doubles.

use alloy_signer_local::PrivateKeySigner;
use futures_util::future::join;
use serde_json::{Value, json};
use support::{postgres::Server, programs::x402, shop::Customer};
use tokio::time::timeout;
use tower_x402::protocol::{MAX_PAYMENT_HEADER, MAX_REQUIRED_HEADER, decode_header, encode_header};

use super::{
    super::{
        programs::script,
        stage::{PATIENCE, PRICE},
    },
    Serving, Stage,
};

/// The program of the package x402-conformance.
const CONFORMANCE: &str = ".venv/bin/x402conf";

/// The live rules of the package: an unpaid answer of a seller, and what a facilitator says that it supports.
#[tokio::test]
async fn the_rules_of_x402_conformance_hold_for_seller_and_facilitator() {
    let mut charge = x402();
    charge.args(["charge", "--upstream", "http://127.0.0.1:9", "--price", "$0.001", "--listen", "127.0.0.1:0"]);
    let seller = Serving::start(&mut charge).await;
    let facilitator = Serving::start(x402().args(["facilitator", "--listen", "127.0.0.1:0"])).await;
    for (mode, url) in [("resource", format!("{}/evaluate", seller.url())), ("live", facilitator.url())] {
        let mut check = script([CONFORMANCE, mode]);
        let checked = timeout(PATIENCE, check.args([&url, "--fail-on-error"]).output()).await.unwrap().unwrap();
        let said = String::from_utf8_lossy(&checked.stdout).into_owned();
        assert!(checked.status.success() && said.contains("\"pass\": true"), "{mode}: {said}");
    }
}

/// Signs another payment with this identifier for an evaluation by this seller, and returns what it gets for it.
async fn buy(customer: &Customer, seller: &str, id: &str) -> (String, Value) {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let ask = || client.post(format!("{seller}/evaluate")).body("17 * 23 = 391");
    let demand = ask().send().await.unwrap();
    let demand: Value = decode_header(demand.headers()["payment-required"].as_bytes(), MAX_REQUIRED_HEADER).unwrap();
    let mut payment = customer.sign(&demand, 0).payload();
    payment["extensions"] = json!({ "payment-identifier": { "info": { "required": false, "id": id }, "schema": {} } });
    let answer = ask().header("payment-signature", encode_header(&payment).unwrap()).send().await.unwrap();
    assert_eq!(answer.status(), 200, "{answer:?}");
    let receipt = decode_header(answer.headers()["payment-response"].as_bytes(), MAX_PAYMENT_HEADER).unwrap();
    (answer.text().await.unwrap(), receipt)
}

/// At one replica and then at the other, and at both at once.
#[tokio::test]
async fn r13_of_payments_with_one_identifier_at_two_replicas_one_is_settled() {
    let stage = Stage::new(&[]).await;
    let replica = async || Serving::start(&mut stage.charge_with(Server::shared().url(), "127.0.0.1:0")).await;
    let (one, other) = (replica().await, replica().await);
    let signer: PrivateKeySigner = stage.devnet.text("payer_private_key").parse().unwrap();
    let customer = Customer { from: signer.address(), signer };
    let first = buy(&customer, &one.url(), "first-identifier").await;
    assert_eq!(buy(&customer, &other.url(), "first-identifier").await, first);
    let urls = [one.url(), other.url()];
    let [at_one, at_other] = urls.each_ref().map(|url| buy(&customer, url, "second-identifier"));
    let (at_one, at_other) = join(at_one, at_other).await;
    assert_eq!(at_one, at_other);
    assert_ne!(at_one.1["transaction"], first.1["transaction"]);
    one.stop().await;
    other.stop().await;
    assert_eq!(stage.balance_of(stage.devnet.text("payee")).await, 2 * PRICE);
}
