//! The nonces of one key, when sends fail and when others use it.

use std::{sync::Arc, time::Duration};

use alloy_consensus::{SignableTransaction as _, TxEip1559, TxEnvelope};
use alloy_eips::Encodable2718 as _;
use alloy_network::TxSignerSync as _;
use alloy_primitives::{B256, TxKind};
use alloy_provider::Provider as _;
use tower_x402::{devnet::Fault, facilitator::FacilitatorError};

use crate::stage::*;

const SYNC: &str = "eth_sendRawTransactionSync";

/// Another process sends with the settlement key.
async fn foreign(stage: &Stage, nonce: u64, max_fee_per_gas: u128) -> B256 {
    let mut transaction = TxEip1559 {
        chain_id: stage.devnet.chain_id(),
        nonce,
        gas_limit: 21_000,
        max_fee_per_gas,
        max_priority_fee_per_gas: max_fee_per_gas / 2,
        to: TxKind::Call(new_key().address()),
        ..TxEip1559::default()
    };
    let signature = settlement_key().sign_transaction_sync(&mut transaction).unwrap();
    let envelope = TxEnvelope::from(transaction.into_signed(signature));
    *stage.provider().send_raw_transaction(&envelope.encoded_2718()).await.unwrap().tx_hash()
}

#[tokio::test]
async fn nonces_that_another_process_used_are_skipped() {
    let stage = stage().await;
    let key = stage.payer(3);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    foreign(&stage, 1, 100_000_000).await;
    foreign(&stage, 2, 100_000_000).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    assert_eq!(stage.next_nonce().await, 5);
    assert_eq!(stage.received(), 3);
}

#[tokio::test]
async fn a_nonce_that_another_process_waits_with_is_left_to_it() {
    let stage = stage().await;
    let key = stage.payer(2);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    stage.devnet.stall(true);
    foreign(&stage, 1, 1_000_000_000).await;
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    let devnet = stage.devnet.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        devnet.stall(false);
    });
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.next_nonce().await, 3);
}

#[tokio::test]
async fn a_gap_left_by_a_refused_send_is_filled() {
    let stage = Arc::new(Stage::with(every(50), |b| b.block_time(Duration::from_millis(50))).await);
    // The first broadcast is refused for good after the others are under way.
    stage.devnet.faults().set(|call| match (call.method, call.index) {
        (SYNC, 0) => Fault::Error { code: -32000, message: "txpool is full".into() },
        _ => Fault::None,
    });
    let payments: Vec<_> = (0..5).map(|_| stage.payment(&stage.payer(1))).collect();
    let mut verified = Vec::new();
    for payment in &payments {
        verified.push(stage.admit(payment).await);
    }
    let settling = payments.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified));
    let outcomes = futures_util::future::join_all(settling).await;
    let refused = outcomes.iter().filter(|outcome| matches!(outcome, Err(FacilitatorError::Busy { .. }))).count();
    assert_eq!(refused, 1);
    for outcome in outcomes.iter().filter(|outcome| outcome.is_ok()) {
        paid_by(outcome);
    }
    assert_eq!(stage.received(), 4);
    // Four payments, and a transfer of nothing in the gap.
    assert_eq!(stage.next_nonce().await, 5);
}

#[tokio::test]
async fn a_window_that_is_full_holds_back_and_nothing_is_lost() {
    let stage = Arc::new(Stage::with(every(50), |b| b.in_flight(2).block_time(Duration::from_millis(50))).await);
    let settling = (0..20).map(|_| {
        let stage = stage.clone();
        async move { stage.admit_and_settle(&stage.payment(&stage.payer(1))).await }
    });
    for outcome in futures_util::future::join_all(settling).await {
        paid_by(&outcome);
    }
    assert_eq!(stage.received(), 20);
}

#[tokio::test]
async fn a_key_with_a_history_goes_on_where_the_chain_is() {
    let stage = stage().await;
    foreign(&stage, 0, 100_000_000).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    assert_eq!(stage.next_nonce().await, 2);
}
