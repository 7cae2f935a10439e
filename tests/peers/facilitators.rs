//! Facilitators of other projects settle for our evaluator, and ours settles for their servers.

use super::{
    programs::{Bank, Buyer, Seller},
    stage::{an_empty_account_is_refused, pays_the_evaluator_behind, the_student_pays},
};

#[tokio::test]
async fn the_official_facilitator_settles_for_our_evaluator_on_anvil() {
    the_student_pays(Seller::Evaluator, Bank::Official, "authorization").await;
}

#[tokio::test]
async fn the_official_facilitator_settles_upfront_for_our_evaluator_on_anvil() {
    the_student_pays(Seller::Evaluator, Bank::Official, "upfront").await;
}

/// The facilitator gets the payment in v2; the signed message is the same.
#[tokio::test]
async fn the_official_facilitator_settles_what_the_legacy_client_pays_in_v1_on_anvil() {
    pays_the_evaluator_behind(Bank::Official, Buyer::FetchV1, "authorization").await;
}

#[tokio::test]
async fn the_python_facilitator_settles_for_our_evaluator_on_anvil() {
    the_student_pays(Seller::Evaluator, Bank::Python, "authorization").await;
}

#[tokio::test]
async fn the_python_facilitator_settles_upfront_for_our_evaluator_on_anvil() {
    the_student_pays(Seller::Evaluator, Bank::Python, "upfront").await;
}

#[tokio::test]
async fn the_facilitator_of_x402_rs_settles_for_our_evaluator_on_anvil() {
    the_student_pays(Seller::Evaluator, Bank::X402Rs, "authorization").await;
}

#[tokio::test]
async fn the_facilitator_of_x402_rs_settles_upfront_for_our_evaluator_on_anvil() {
    the_student_pays(Seller::Evaluator, Bank::X402Rs, "upfront").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_official_express_server_on_anvil() {
    the_student_pays(Seller::Express, Bank::Ours, "authorization").await;
}

#[tokio::test]
async fn our_facilitator_settles_upfront_for_the_official_express_server_on_anvil() {
    the_student_pays(Seller::Express, Bank::Ours, "upfront").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_official_hono_server_on_anvil() {
    the_student_pays(Seller::Hono, Bank::Ours, "authorization").await;
}

#[tokio::test]
async fn our_facilitator_settles_upfront_for_the_official_hono_server_on_anvil() {
    the_student_pays(Seller::Hono, Bank::Ours, "upfront").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_fastapi_server_on_anvil() {
    the_student_pays(Seller::FastApi, Bank::Ours, "authorization").await;
}

#[tokio::test]
async fn our_facilitator_settles_upfront_for_the_fastapi_server_on_anvil() {
    the_student_pays(Seller::FastApi, Bank::Ours, "upfront").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_legacy_express_server_in_v1_on_anvil() {
    the_student_pays(Seller::ExpressV1, Bank::Ours, "authorization").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_server_of_r402_on_anvil() {
    the_student_pays(Seller::R402, Bank::Ours, "authorization").await;
}

#[tokio::test]
async fn our_facilitator_settles_upfront_for_the_server_of_r402_on_anvil() {
    the_student_pays(Seller::R402, Bank::Ours, "upfront").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_server_of_x402_rs_on_anvil() {
    the_student_pays(Seller::X402Axum(2), Bank::Ours, "authorization").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_server_of_x402_rs_that_settles_first_on_anvil() {
    the_student_pays(Seller::X402Axum(2), Bank::Ours, "upfront").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_server_of_x402_rs_in_v1_on_anvil() {
    the_student_pays(Seller::X402Axum(1), Bank::Ours, "authorization").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_server_of_x402_rs_that_settles_first_in_v1_on_anvil() {
    the_student_pays(Seller::X402Axum(1), Bank::Ours, "upfront").await;
}

#[tokio::test]
async fn the_official_facilitator_refuses_an_empty_account_for_our_evaluator_on_anvil() {
    an_empty_account_is_refused(Seller::Evaluator, Bank::Official, "invalid_exact_evm_transaction_simulation_failed")
        .await;
}

#[tokio::test]
async fn the_python_facilitator_refuses_an_empty_account_for_our_evaluator_on_anvil() {
    an_empty_account_is_refused(Seller::Evaluator, Bank::Python, "insufficient").await;
}

#[tokio::test]
async fn the_facilitator_of_x402_rs_refuses_an_empty_account_for_our_evaluator_on_anvil() {
    an_empty_account_is_refused(Seller::Evaluator, Bank::X402Rs, "insufficient_funds").await;
}

#[tokio::test]
async fn our_facilitator_refuses_an_empty_account_for_the_official_express_server_on_anvil() {
    an_empty_account_is_refused(Seller::Express, Bank::Ours, "insufficient_funds").await;
}

#[tokio::test]
async fn our_facilitator_refuses_an_empty_account_for_the_official_hono_server_on_anvil() {
    an_empty_account_is_refused(Seller::Hono, Bank::Ours, "insufficient_funds").await;
}

#[tokio::test]
async fn our_facilitator_refuses_an_empty_account_for_the_legacy_express_server_in_v1_on_anvil() {
    an_empty_account_is_refused(Seller::ExpressV1, Bank::Ours, "insufficient_funds").await;
}

#[tokio::test]
async fn our_facilitator_refuses_an_empty_account_for_the_fastapi_server_on_anvil() {
    an_empty_account_is_refused(Seller::FastApi, Bank::Ours, "insufficient_funds").await;
}

#[tokio::test]
async fn our_facilitator_refuses_an_empty_account_for_the_server_of_r402_on_anvil() {
    an_empty_account_is_refused(Seller::R402, Bank::Ours, "the payer has 0 atomic units").await;
}

#[tokio::test]
async fn our_facilitator_refuses_an_empty_account_for_the_server_of_x402_rs_on_anvil() {
    an_empty_account_is_refused(Seller::X402Axum(2), Bank::Ours, "insufficient_funds").await;
}
