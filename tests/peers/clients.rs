//! Clients of other projects pay our evaluator.

use super::{
    programs::Buyer,
    stage::{does_not_pay_the_evaluator, pays_an_evaluator_without_a_url, pays_the_evaluator},
};

#[tokio::test]
async fn the_official_fetch_client_pays_the_evaluator_on_anvil() {
    pays_the_evaluator(Buyer::Fetch, "authorization").await;
}

#[tokio::test]
async fn the_official_fetch_client_pays_the_evaluator_upfront_on_anvil() {
    pays_the_evaluator(Buyer::Fetch, "upfront").await;
}

#[tokio::test]
async fn the_client_of_mppx_pays_the_evaluator_on_anvil() {
    pays_the_evaluator(Buyer::Mppx, "authorization").await;
}

/// The client knows no flows, and echoes the offer unchanged.
#[tokio::test]
async fn the_client_of_mppx_pays_the_evaluator_upfront_on_anvil() {
    pays_the_evaluator(Buyer::Mppx, "upfront").await;
}

#[tokio::test]
async fn the_python_client_pays_the_evaluator_over_httpx_on_anvil() {
    pays_the_evaluator(Buyer::Httpx, "authorization").await;
}

#[tokio::test]
async fn the_python_client_pays_the_evaluator_upfront_over_httpx_on_anvil() {
    pays_the_evaluator(Buyer::Httpx, "upfront").await;
}

#[tokio::test]
async fn the_python_client_pays_the_evaluator_over_requests_on_anvil() {
    pays_the_evaluator(Buyer::Requests, "authorization").await;
}

#[tokio::test]
async fn the_python_client_pays_the_evaluator_upfront_over_requests_on_anvil() {
    pays_the_evaluator(Buyer::Requests, "upfront").await;
}

#[tokio::test]
async fn the_legacy_fetch_client_pays_the_evaluator_on_anvil() {
    pays_the_evaluator(Buyer::FetchV1, "authorization").await;
}

/// The client knows no flows, and pays this offer because it is the only one.
#[tokio::test]
async fn the_legacy_fetch_client_pays_the_evaluator_upfront_on_anvil() {
    pays_the_evaluator(Buyer::FetchV1, "upfront").await;
}

/// The client requires an absolute URL as the resource of the 402, and signs nothing for a path.
#[tokio::test]
async fn the_legacy_fetch_client_pays_an_evaluator_that_knows_no_url_on_anvil() {
    for flow in ["authorization", "upfront"] {
        pays_an_evaluator_without_a_url(Buyer::FetchV1, flow).await;
    }
}

#[tokio::test]
async fn the_client_of_r402_pays_the_evaluator_on_anvil() {
    pays_the_evaluator(Buyer::R402, "authorization").await;
}

/// The client rewrites `extra` without the flow (r402-evm 0.21.0, exact/payload.rs, `PaymentRequirementsExtra`), and so accepts an
/// offer that was not made.
#[tokio::test]
async fn the_client_of_r402_loses_the_flow_and_is_not_charged_on_anvil() {
    let said = does_not_pay_the_evaluator(Buyer::R402, "upfront").await.unwrap();
    assert_eq!(said["status"], 402, "{said}");
    assert!(said["body"].as_str().unwrap().contains("invalid_payment_requirements"), "{said}");
}

#[tokio::test]
async fn the_client_of_x402_rs_pays_the_evaluator_on_anvil() {
    pays_the_evaluator(Buyer::X402Reqwest(2), "authorization").await;
}

/// The client knows no flows, and echoes the offer unchanged.
#[tokio::test]
async fn the_client_of_x402_rs_pays_the_evaluator_upfront_on_anvil() {
    pays_the_evaluator(Buyer::X402Reqwest(2), "upfront").await;
}

/// The client reads the body of a 402 only if there is no header of v2 (x402-reqwest 2.0.2, client.rs, `parse_payment_required`).
#[tokio::test]
async fn the_client_of_x402_rs_that_knows_v1_only_does_not_see_the_offer_in_v1_on_anvil() {
    for flow in ["authorization", "upfront"] {
        let said = does_not_pay_the_evaluator(Buyer::X402Reqwest(1), flow).await.unwrap_err();
        assert!(said.contains("No matching payment option found"), "{said}");
    }
}
