//! Our student pays servers of other projects, which settle through their own facilitators.

use super::{
    programs::{Bank, Seller},
    stage::the_student_pays,
};

#[tokio::test]
async fn the_student_pays_the_official_express_server_on_anvil() {
    the_student_pays(Seller::Express, Bank::Own, "authorization").await;
}

#[tokio::test]
async fn the_student_pays_the_official_express_server_upfront_on_anvil() {
    the_student_pays(Seller::Express, Bank::Own, "upfront").await;
}

#[tokio::test]
async fn the_student_pays_the_official_hono_server_on_anvil() {
    the_student_pays(Seller::Hono, Bank::Own, "authorization").await;
}

#[tokio::test]
async fn the_student_pays_the_official_hono_server_upfront_on_anvil() {
    the_student_pays(Seller::Hono, Bank::Own, "upfront").await;
}

#[tokio::test]
async fn the_student_pays_the_fastapi_server_on_anvil() {
    the_student_pays(Seller::FastApi, Bank::Own, "authorization").await;
}

#[tokio::test]
async fn the_student_pays_the_fastapi_server_upfront_on_anvil() {
    the_student_pays(Seller::FastApi, Bank::Own, "upfront").await;
}

#[tokio::test]
async fn the_student_pays_the_legacy_express_server_in_v1_on_anvil() {
    the_student_pays(Seller::ExpressV1, Bank::Own, "authorization").await;
}

#[tokio::test]
async fn the_student_pays_the_server_of_r402_on_anvil() {
    the_student_pays(Seller::R402, Bank::Own, "authorization").await;
}

#[tokio::test]
async fn the_student_pays_the_server_of_r402_upfront_on_anvil() {
    the_student_pays(Seller::R402, Bank::Own, "upfront").await;
}

#[tokio::test]
async fn the_student_pays_the_server_of_x402_rs_on_anvil() {
    the_student_pays(Seller::X402Axum(2), Bank::X402Rs, "authorization").await;
}

/// The server settles before the work, without saying so in its offer.
#[tokio::test]
async fn the_student_pays_the_server_of_x402_rs_that_settles_first_on_anvil() {
    the_student_pays(Seller::X402Axum(2), Bank::X402Rs, "upfront").await;
}

#[tokio::test]
async fn the_student_pays_the_server_of_x402_rs_in_v1_on_anvil() {
    the_student_pays(Seller::X402Axum(1), Bank::X402Rs, "authorization").await;
}

#[tokio::test]
async fn the_student_pays_the_server_of_x402_rs_that_settles_first_in_v1_on_anvil() {
    the_student_pays(Seller::X402Axum(1), Bank::X402Rs, "upfront").await;
}
