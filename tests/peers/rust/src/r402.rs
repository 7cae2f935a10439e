//! r402: a client, and a server with its facilitator in the same process or with another one over HTTP.

use alloy_network::EthereumWallet;
use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use r402_evm::{
    Eip155Exact, Eip155ExactClient, Eip155ExactFacilitator, USDC,
    chain::{Eip155ChainProvider, Eip155ChainReference},
};
use r402_http::{WithPayments as _, X402Client, X402Middleware};
use reqwest_middleware::ClientWithMiddleware;
use serde_json::json;

use crate::{Result, seller, variable};

pub fn client() -> Result<ClientWithMiddleware> {
    let signer: PrivateKeySigner = variable("PRIVATE_KEY")?.parse()?;
    let client = X402Client::new().register(Eip155ExactClient::new(signer));
    Ok(reqwest::Client::new().with_payments(client))
}

pub fn server() -> Result<Router> {
    match variable("FACILITATOR_URL") {
        Ok(url) => sell(X402Middleware::try_new(&url)?),
        Err(_) => sell(X402Middleware::from_facilitator(facilitator()?)),
    }
}

fn sell(middleware: X402Middleware) -> Result<Router> {
    let mut tag =
        Eip155Exact::price_tag(variable("PAY_TO")?.parse::<Address>()?, USDC::base_sepolia().amount(1_000_u64), None);
    let flow = variable("FLOW")?;
    if flow != "authorization" {
        tag.requirements.extra.get_or_insert_with(|| json!({}))["paymentFlow"] = json!(flow);
    }
    let layer = middleware
        .with_base_url("http://r402.example".parse()?)
        .with_scheme("eip155:*".parse()?, Eip155Exact)
        .with_price_tag(tag)?;
    Ok(Router::new().route("/evaluate", seller::evaluation().layer(layer)))
}

fn facilitator() -> Result<Eip155ExactFacilitator<Eip155ChainProvider>> {
    let signer: PrivateKeySigner = variable("PRIVATE_KEY")?.parse()?;
    let nodes = [(variable("RPC_URL")?.parse()?, None)];
    let (chain, wallet) = (Eip155ChainReference::new(84_532), EthereumWallet::from(signer));
    let provider = Eip155ChainProvider::new(chain, wallet, &nodes, true, false, 30)?;
    Ok(Eip155ExactFacilitator::try_new(provider)?)
}
