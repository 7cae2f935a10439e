//! The extension `payment-identifier`, compared with the official package.

use base64::{Engine, prelude::BASE64_STANDARD};
use http::{HeaderValue, Method};
use serde_json::Value;
use tokio::time::timeout;
use tower_x402::client::Payer;

use super::{
    programs::{Bank, Seller, script},
    stage::{PATIENCE, PRICE, Server, funded},
};
use support::{anvil::AnvilChain, chain::Chain, shop::Customer};

#[tokio::test]
async fn payment_identifiers_are_those_of_the_official_package_on_anvil() {
    let chain = AnvilChain::start(None).await;
    let server = Server::open(&chain, Seller::Evaluator, Bank::Own, "authorization").await;
    let headers = server.post().send().await.unwrap().headers().clone();
    let demand = decode(&headers["payment-required"]);
    let payer = Payer::builder(funded(&chain).await).asset(chain.asset()).build();
    let ours = payer.pay(&Method::POST, &server.url.parse().unwrap(), &headers, None).await.unwrap().expect("an offer");
    let ours = decode(ours.header());

    let mut program = script(["node", "payment_identifier.mjs"]);
    program.args([demand["extensions"].to_string(), ours["extensions"].to_string()]);
    let output = timeout(PATIENCE, program.output()).await.expect("the script ends").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let theirs: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(theirs["offered"], true, "{demand}");
    let id = &ours["extensions"]["payment-identifier"]["info"]["id"];
    assert!(id.is_string() && theirs["id"] == *id, "{ours} {theirs}");

    // Only the official package's id opens the answer.
    let mut payload = Customer::with_funds(&chain, PRICE).await.sign(&demand, 0).payload();
    let unnamed = payload.to_string();
    payload["extensions"] = theirs["given"].clone();
    for (payload, status) in [(payload.to_string(), 200), (unnamed, 409), (payload.to_string(), 200)] {
        let answer = server.post().header("payment-signature", BASE64_STANDARD.encode(payload)).send().await.unwrap();
        assert_eq!(answer.status(), status);
    }
    assert_eq!(server.stats().await["handled"], 1);
}

/// Decodes the message in a header.
fn decode(header: &HeaderValue) -> Value {
    serde_json::from_slice(&BASE64_STANDARD.decode(header).expect("base64")).expect("JSON")
}
