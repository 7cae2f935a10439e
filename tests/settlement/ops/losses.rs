//! Settlements at a loss are counted, and refused if so configured.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;
use futures_util::future::join_all;
use tower_x402::{
    facilitator::{FacilitatorError, OnchainBuildError, OnchainFacilitator, VerifyError},
    ops::in_usdc,
    payment::Prechecked,
};

use support::engine_stage::*;

fn is_refused_as_a_loss(verified: &Result<tower_x402::payment::Verified, VerifyError>) -> bool {
    matches!(
        verified,
        Err(VerifyError::Unavailable(FacilitatorError::Busy { what: "gas costs more than the payment", .. }))
    )
}

#[tokio::test]
async fn payment_below_its_fee_is_counted_and_settled() {
    let stage = Stage::with(|d| d, |b| b.native_price("$1".parse().unwrap())).await;
    let key = stage.payer(2);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    assert_eq!(stage.facilitator.stats().losses, 0);
    stage.facilitator.set_native_price("$1000000".parse().unwrap());
    let payment = stage.payment(&key);
    paid_by(&stage.admit_and_settle(&payment).await);
    let stats = stage.facilitator.stats();
    assert_eq!((stats.losses, stats.settled), (1, 2));
    let spent = stage.facilitator.spent_in_usdc().unwrap();
    assert_eq!(Some(spent), in_usdc(stats.spent, "$1000000".parse().unwrap()));
    let fee = stage.record(&payment).await.fee.unwrap();
    assert!(in_usdc(fee, "$1000000".parse().unwrap()).unwrap().atomic() > PRICE);
    stage.facilitator.set_native_price(tower_x402::Usdc::ZERO);
    assert_eq!(stage.facilitator.spent_in_usdc(), None);
}

#[tokio::test]
async fn loss_is_refused_before_the_work() {
    let stage = Stage::with(|d| d, |b| b.native_price("$1".parse().unwrap()).refuse_losses(true)).await;
    let payment = stage.payment(&stage.payer(1));
    stage.verify(&payment).await.unwrap();
    stage.facilitator.set_native_price("$1000000".parse().unwrap());
    stage.devnet.faults().reset();
    assert!(is_refused_as_a_loss(&stage.verify(&payment).await));
    assert_eq!(stage.calls("eth_call"), 0, "nothing is simulated for it");
    stage.facilitator.set_native_price("$1".parse().unwrap());
    stage.verify(&payment).await.unwrap();
}

#[tokio::test]
async fn loss_is_judged_by_the_cost_of_batches() {
    let blocks = Duration::from_millis(50);
    let stage = Stage::with(every(50), |b| {
        b.block_time(blocks).batch_size(10).native_price("$1".parse().unwrap()).refuse_losses(true)
    });
    let stage = Arc::new(stage.await);
    stage.facilitator.deploy_batch_settler().await.unwrap().unwrap();
    // The price of ether at which 70,000 gas, between a batch's share and a transfer alone, are worth a payment.
    let gas_price = {
        let lone = stage.payment(&stage.payer(1));
        paid_by(&stage.admit_and_settle(&lone).await);
        let receipt = stage.facilitator.stats();
        receipt.spent / U256::from(receipt.gas_used)
    };
    let units = U256::from(PRICE) * U256::from(ETHER) / (gas_price * U256::from(70_000));
    let between = tower_x402::Usdc::try_from(units).unwrap();
    stage.facilitator.set_native_price(between);
    assert!(is_refused_as_a_loss(&stage.verify(&stage.payment(&stage.payer(1))).await), "alone, it costs too much");

    stage.facilitator.set_native_price("$1".parse().unwrap());
    let payments: Vec<Prechecked> = (0..150).map(|_| stage.payment(&stage.payer(1))).collect();
    let verified = join_all(payments.iter().map(|payment| stage.admit(payment))).await;
    let settling = payments.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified));
    for outcome in join_all(settling).await {
        paid_by(&outcome);
    }
    stage.facilitator.set_native_price(between);
    stage.verify(&stage.payment(&stage.payer(1))).await.unwrap();
}

#[tokio::test]
async fn nothing_is_a_loss_without_a_native_price() {
    let stage = stage().await;
    let builder = OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(settlement_key())
        .refuse_losses(true);
    assert!(matches!(builder.build().await, Err(OnchainBuildError::Missing(_))));
}
