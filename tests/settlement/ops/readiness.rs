//! A service that cannot settle payments reports that it is not ready, and why.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use tower_x402::{
    ManualClock, Network,
    channels::Channels,
    facilitator::{Facilitator, NotReady, OnchainFacilitator, Readiness, channels::OnchainChannels},
    ledger::{MemoryLedger, SqliteLedger},
    vouchers::AuthorizerKey,
};
use x402_devnet::{Devnet, Fault};

use support::authorization::unix_now;

use support::engine_stage::*;
use support::scripted::Scripted;

async fn until_it_says(facilitator: &OnchainFacilitator, reasons: &[NotReady]) {
    until(async || facilitator.readiness().await.reasons == reasons).await;
}

#[tokio::test]
async fn readiness_names_each_obstacle_until_it_is_gone() {
    let stage = stage().await;
    until_it_says(&stage.facilitator, &[]).await;

    stage.devnet.faults().set(|_| Fault::Error { code: -32000, message: "away".into() });
    until_it_says(&stage.facilitator, &[NotReady::Node]).await;
    stage.devnet.faults().clear();
    until_it_says(&stage.facilitator, &[]).await;

    let balance = U256::from(1_000);
    let set_balance = (settlement_key().address(), balance);
    stage.provider().raw_request::<_, ()>("anvil_setBalance".into(), set_balance).await.unwrap();
    until_it_says(&stage.facilitator, &[NotReady::InsufficientGas { balance }]).await;
    stage.devnet.fund(settlement_key().address(), U256::from(ETHER));
    until_it_says(&stage.facilitator, &[]).await;

    assert!(stage.facilitator.drain(Duration::from_secs(5)).await);
    until_it_says(&stage.facilitator, &[NotReady::ShuttingDown]).await;
}

#[tokio::test]
async fn full_backlog_and_gas_above_the_ceiling_are_reasons() {
    let full = Stage::with(|d| d, |b| b.backlog(0)).await;
    until_it_says(&full.facilitator, &[NotReady::Backlog { waiting: 0 }]).await;
    let dear = Stage::with(|d| d, |b| b.max_gas_price(1)).await;
    until_it_says(&dear.facilitator, &[NotReady::GasPrice]).await;
}

#[tokio::test]
async fn not_ready_until_the_past_is_reconciled() {
    let stage = stage().await;
    // Without the ledger's past there is nothing to catch up with, so the node is asked, in vain, for a journalled nonce.
    let payment = stage.payment(&stage.payer(1));
    stage.admit_and_settle(&payment).await.unwrap();
    let other = OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(settlement_key())
        .ledger(stage.ledger.clone())
        .clock(stage.clock.clone());
    stage.devnet.faults().set(|call| match call.method {
        "eth_getTransactionCount" => Fault::Error { code: -32000, message: "away".into() },
        _ => Fault::None,
    });
    let other = other.reconcile_interval(Duration::from_millis(20)).build().await.unwrap();
    until_it_says(&other, &[NotReady::CatchingUp]).await;
    stage.devnet.faults().clear();
    until_it_says(&other, &[]).await;
}

#[tokio::test]
async fn failed_ledger_is_a_reason_for_every_facilitator() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = Arc::new(SqliteLedger::open(directory.path().join("ledger.sqlite")).await.unwrap());
    let mut facilitator = Scripted::new();
    facilitator.ledger = ledger.clone();
    assert_eq!(facilitator.readiness().await, Readiness::default());
    ledger.close().await;
    let readiness = Arc::new(facilitator).readiness().await;
    assert_eq!(readiness.reasons, [NotReady::Ledger]);
    assert_eq!(readiness.to_string(), "not ready: the ledger fails");
}

#[tokio::test]
async fn frequent_readiness_checks_do_not_load_the_node() {
    let stage = stage().await;
    until_it_says(&stage.facilitator, &[]).await;
    let before = stage.calls("eth_getBalance");
    let asked = std::time::Instant::now();
    for _ in 0..1_000 {
        stage.facilitator.readiness().await;
    }
    assert!(stage.calls("eth_getBalance") - before <= 1 + asked.elapsed().as_secs());
}

#[tokio::test]
async fn readiness_of_channels_names_each_obstacle_until_it_is_gone() {
    let (devnet, clock) = (Devnet::start().await.unwrap(), Arc::new(ManualClock::at(unix_now())));
    let (gas_key, ledger) = (PrivateKeySigner::random(), Arc::new(MemoryLedger::new()));
    devnet.fund(gas_key.address(), U256::from(ETHER));
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).client(devnet.rpc_client());
    let contract = contract.signer(gas_key.clone()).clock(clock.clone()).build().await.unwrap();
    let channels = Channels::builder(contract, AuthorizerKey::new(PrivateKeySigner::random())).ledger(ledger);
    let channels = channels.clock(clock.clone()).build().unwrap();
    let until_it_says = async |reasons: &[NotReady]| {
        until(async || channels.readiness().await.reasons == reasons).await;
    };
    until_it_says(&[]).await;

    devnet.faults().set(|_| Fault::Error { code: -32000, message: "away".into() });
    until_it_says(&[NotReady::Node]).await;
    devnet.faults().clear();
    until_it_says(&[]).await;

    let balance = U256::from(1_000);
    let empty = (gas_key.address(), balance);
    devnet.rpc_client().request::<_, ()>("anvil_setBalance", empty).await.unwrap();
    until_it_says(&[NotReady::InsufficientGas { balance }]).await;
    devnet.fund(gas_key.address(), U256::from(ETHER));
    until_it_says(&[]).await;

    // Two minutes is the default of `max_block_age`.
    clock.advance(600);
    until(async || matches!(channels.readiness().await.reasons[..], [NotReady::NodeBehind { age: 121.. }])).await;
}
