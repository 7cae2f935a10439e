//! Anybody deploys the settler, once, and it is where it is expected.

use std::slice::from_ref;

use alloy_primitives::{Bytes, U256, keccak256};
use alloy_provider::Provider;
use alloy_signer_local::PrivateKeySigner;
use tower_x402::{
    Network,
    facilitator::{BatchSettler, FacilitatorError, OnchainFacilitator},
};

use super::batch::{Payment, Stage, batch};
use support::{
    authorization::random_address,
    chain::{Chain, on_every_chain},
};

on_every_chain! {
    it_is_deployed_once_and_works,
    two_who_deploy_at_once_both_succeed,
    a_chain_without_the_deployer_is_named,
    other_code_at_its_address_is_not_taken_for_it,
    it_costs_what_is_documented,
}

async fn it_is_deployed_once_and_works(chain: &dyn Chain) {
    let facilitator = facilitator(chain).await;
    let transaction = facilitator.deploy_batch_settler().await.unwrap().expect("a new chain needs it");
    assert!(chain.receipt(transaction).await.status());
    let code = chain.provider().get_code_at(BatchSettler::ADDRESS).await.unwrap();
    assert_eq!(keccak256(code), BatchSettler::CODE_HASH);

    let gas_tank = facilitator.gas_balance().await.unwrap();
    assert_eq!(facilitator.deploy_batch_settler().await.unwrap(), None);
    assert_eq!(facilitator.gas_balance().await.unwrap(), gas_tank);

    let stage = Stage { chain, relayer: chain.relayer().await };
    let payment = Payment::by(&stage.payer().await, random_address(), chain);
    assert!(payment.is_paid_by(&stage.settle(batch(chain, from_ref(&payment))).await));
}

async fn two_who_deploy_at_once_both_succeed(chain: &dyn Chain) {
    let (one, other) = (facilitator(chain).await, facilitator(chain).await);
    let (one, other) = tokio::join!(one.deploy_batch_settler(), other.deploy_batch_settler());
    assert!(one.unwrap().is_some() || other.unwrap().is_some());
}

async fn a_chain_without_the_deployer_is_named(chain: &dyn Chain) {
    chain.set_code(BatchSettler::DEPLOYER, Bytes::new()).await;
    let error = facilitator(chain).await.deploy_batch_settler().await.unwrap_err();
    assert!(matches!(&error, FacilitatorError::Misconfigured(why) if why.contains("deployment proxy")), "{error}");
}

async fn other_code_at_its_address_is_not_taken_for_it(chain: &dyn Chain) {
    chain.set_code(BatchSettler::ADDRESS, Bytes::from_static(&[0x00])).await;
    let error = facilitator(chain).await.deploy_batch_settler().await.unwrap_err();
    assert!(matches!(&error, FacilitatorError::Misconfigured(why) if why.contains("not the batch settler")), "{error}");
}

async fn it_costs_what_is_documented(chain: &dyn Chain) {
    let transaction = facilitator(chain).await.deploy_batch_settler().await.unwrap().unwrap();
    let gas = chain.gas_used(transaction).await;
    assert!((180_000..200_000).contains(&gas), "{gas}");
}

async fn facilitator(chain: &dyn Chain) -> OnchainFacilitator {
    let key = PrivateKeySigner::random();
    chain.fund(key.address(), U256::from(10).pow(U256::from(18))).await;
    let builder = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url());
    builder.signer(key).build().await.unwrap()
}
