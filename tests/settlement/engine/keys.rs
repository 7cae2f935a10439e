//! Several settlement keys, and several processes that share them.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, U256};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use futures_util::future::join_all;
use tower_x402::{
    facilitator::{Facilitator, FacilitatorError, OnchainBuildError, OnchainFacilitator},
    payment::SettlementOutcome,
};
use x402_devnet::Devnet;

use support::engine_stage::*;

fn second_key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::repeat_byte(0x5f)).unwrap()
}

async fn nonce(devnet: &Devnet, key: &PrivateKeySigner) -> u64 {
    devnet.provider().get_transaction_count(key.address()).await.unwrap()
}

/// Settles one by one. Each account has room for one transaction, so that both keys are needed.
async fn with_two_keys() -> Arc<Stage> {
    let stage = Stage::with(every(100), |b| b.signer(second_key()).in_flight(1).batch_size(1)).await;
    stage.devnet.fund(second_key().address(), U256::from(ETHER));
    Arc::new(stage)
}

async fn settle_many(stage: &Arc<Stage>, count: usize) -> Vec<Result<SettlementOutcome, FacilitatorError>> {
    let payments: Vec<_> = (0..count).map(|_| stage.payment(&stage.payer(1))).collect();
    let verified = join_all(payments.iter().map(|payment| stage.admit(payment))).await;
    join_all(payments.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified))).await
}

#[tokio::test(start_paused = true)]
async fn keys_share_the_work() {
    let stage = with_two_keys().await;
    for outcome in settle_many(&stage, 12).await {
        paid_by(&outcome);
    }
    let (first, second) = (nonce(&stage.devnet, &settlement_key()).await, nonce(&stage.devnet, &second_key()).await);
    assert_eq!((stage.received(), first + second), (12, 12));
    assert!(first >= 4 && second >= 4, "{first} and {second}");
}

#[tokio::test(start_paused = true)]
async fn key_without_gas_leaves_the_work_to_the_other() {
    let stage = Arc::new(Stage::with(every(50), |b| b.signer(second_key()).in_flight(2).batch_size(1)).await);
    for outcome in settle_many(&stage, 12).await {
        paid_by(&outcome);
    }
    assert_eq!(nonce(&stage.devnet, &settlement_key()).await, 12);
    assert_eq!(nonce(&stage.devnet, &second_key()).await, 0);
    assert_eq!(stage.facilitator.gas_balance().await.unwrap(), U256::ZERO, "the one that has least");
}

#[tokio::test(start_paused = true)]
async fn same_key_twice_is_refused() {
    let devnet = Devnet::start().await.unwrap();
    let builder = OnchainFacilitator::builder().network(devnet.network()).client(devnet.rpc_client());
    let built = builder.signer(settlement_key()).signer(settlement_key()).build().await;
    assert_eq!(built.unwrap_err(), OnchainBuildError::SameKey(settlement_key().address()));
}

/// Four facilitators on one ledger, as four processes on one database are.
#[tokio::test(start_paused = true)]
async fn processes_that_share_keys_use_every_nonce_once() {
    let stage = Stage::with(every(50), |b| b.signer(second_key()).reconcile_interval(Duration::from_millis(100))).await;
    stage.devnet.fund(second_key().address(), U256::from(ETHER));
    let mut facilitators = vec![stage.facilitator.clone()];
    for _ in 0..3 {
        let another = OnchainFacilitator::builder()
            .network(stage.devnet.network())
            .client(stage.devnet.rpc_client())
            .signer(settlement_key())
            .signer(second_key())
            .ledger(stage.ledger.clone())
            .clock(stage.clock.clone())
            .block_time(Duration::from_millis(50))
            .reconcile_interval(Duration::from_millis(100));
        facilitators.push(another.build().await.unwrap());
    }
    facilitators[0].deploy_batch_settler().await.unwrap().unwrap();
    for facilitator in &facilitators {
        facilitator.reconcile_now();
    }
    let payments: Vec<_> = (0..80).map(|_| stage.payment(&stage.payer(1))).collect();
    let verified = join_all(payments.iter().map(|payment| stage.admit(payment))).await;
    let settling = payments.iter().zip(&verified).enumerate().map(|(index, (payment, verified))| {
        let facilitator = &facilitators[index % 4];
        async move { facilitator.settle(payment, verified).await }
    });
    for outcome in join_all(settling).await {
        paid_by(&outcome);
    }
    assert_eq!(stage.received(), 80);
    let included: u64 = facilitators.iter().map(|facilitator| facilitator.stats().transactions).sum();
    let used = nonce(&stage.devnet, &settlement_key()).await + nonce(&stage.devnet, &second_key()).await;
    assert_eq!(used, included, "no nonce was lost and none used for nothing");
}
