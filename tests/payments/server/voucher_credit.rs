//! The most that a payer can owe: selling on a channel stops when too much of it is unclaimed, or for too long, whatever keeps claims from
//! being made, and in every process that has the ledger.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use http::StatusCode;
use support::{
    authorization::unix_now,
    chain::{Chain as _, Relayer},
    escrow::{Channel, send as execute},
    eventually::eventually,
    shop::{Answer, App, send},
};
use tower_x402::{
    Network, Usdc,
    channels::{Channels, ClaimPolicy},
    facilitator::channels::OnchainChannels,
    ledger::channels::ChannelLedger as _,
    vouchers::{AuthorizerKey, abi::BatchSettlement, reason},
};
use x402_devnet::Devnet;

use super::vouchers::{COST, DEPOSIT, Stage, pay};

/// How many requests a payer can owe for.
const CREDIT: u128 = 5;

/// What keeps claims from being made.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    NodeHangs,
    GasAboveCeiling,
    NoGas,
}

impl Trouble {
    fn begin(self, devnet: &Devnet) {
        match self {
            Self::NodeHangs => devnet.faults().set(|call| match call.method {
                "eth_estimateGas" => x402_devnet::Fault::Delay(Duration::from_secs(3_600)),
                _ => x402_devnet::Fault::None,
            }),
            Self::GasAboveCeiling => devnet.set_base_fee(5_000_000_000),
            Self::NoGas => {}
        }
    }

    fn end(self, devnet: &Devnet, sender: &PrivateKeySigner) {
        match self {
            Self::NodeHangs => devnet.faults().clear(),
            Self::GasAboveCeiling => devnet.set_base_fee(1_000_000_000),
            Self::NoGas => devnet.fund(sender.address(), U256::from(10).pow(U256::from(18))),
        }
    }

    /// A seller whose claims this befalls. It claims whatever is charged.
    async fn seller(self, stage: &Stage, sender: &PrivateKeySigner) -> (Channels, App) {
        let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(stage.chain.rpc_url());
        let contract = contract.signer(sender.clone()).max_gas_price(4_000_000_000);
        let contract = contract.block_time(Duration::from_millis(100)).build().await.expect("the devnet answers");
        let policy = ClaimPolicy::default().amount(Usdc::from_atomic(1_000)).age(Duration::from_secs(3_600));
        let channels = Channels::builder(contract, AuthorizerKey::new(stage.authorizer.clone()))
            .ledger(stage.ledger.clone())
            .claims(policy.credit(Usdc::from_atomic((CREDIT * COST) as u64)))
            .clock(stage.clock.clone())
            .build()
            .expect("complete settings");
        let layer = stage.shop.layer().clock(stage.clock.clone()).vouchers(channels.clone());
        (channels, stage.shop.app(layer))
    }
}

/// A channel that its payer filled without the seller.
async fn filled_by_its_payer(stage: &Stage) -> Channel {
    let channel = stage.payer().await;
    channel.deposit(&stage.chain, &stage.chain.relayer().await, DEPOSIT).await;
    channel
}

fn is_stopped(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!(answer.json()["error"], "claim_pending", "{answer:?}");
    assert_eq!(answer.headers["retry-after"], "30", "{answer:?}");
}

async fn payer_owes_at_most_the_credit(trouble: Trouble) {
    let stage = Stage::open().await;
    stage.chain.devnet.set_base_fee(1_000_000_000);
    let sender = PrivateKeySigner::random();
    if !matches!(trouble, Trouble::NoGas) {
        stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    }
    let (channels, app) = trouble.seller(&stage, &sender).await;
    let channel = filled_by_its_payer(&stage).await;
    trouble.begin(&stage.chain.devnet);
    for n in 1..=CREDIT {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "on credit").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{n}: {answer:?}");
    }
    // In this process and in the next.
    let (_next, restarted) = trouble.seller(&stage, &PrivateKeySigner::random()).await;
    for app in [&app, &restarted] {
        is_stopped(&send(app, pay(app, &channel, (CREDIT + 1) * COST, None, "on credit").await).await);
    }
    assert_eq!(stage.charged(&channel).await, CREDIT * COST);

    // When claims are made again, it goes on.
    trouble.end(&stage.chain.devnet, &sender);
    eventually("all is claimed", async || {
        let _ = channels.claim_all().await;
        channel.state(&stage.chain).await.1 == CREDIT * COST
    })
    .await;
    eventually("the books know it", async || {
        stage.ledger.channel(&channel.id()).await.unwrap().unwrap().unclaimed() == 0
    })
    .await;
    let answer = send(&app, pay(&app, &channel, (CREDIT + 1) * COST, None, "more").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
}

#[tokio::test]
async fn a_payer_owes_at_most_the_credit_while_the_node_hangs() {
    payer_owes_at_most_the_credit(Trouble::NodeHangs).await;
}

#[tokio::test]
async fn a_payer_owes_at_most_the_credit_while_gas_costs_more_than_is_allowed() {
    payer_owes_at_most_the_credit(Trouble::GasAboveCeiling).await;
}

#[tokio::test]
async fn a_payer_owes_at_most_the_credit_while_the_gas_account_is_empty() {
    payer_owes_at_most_the_credit(Trouble::NoGas).await;
}

/// The worst that can happen to a seller: the payer uses its credit, and withdraws before a claim is made.
#[tokio::test]
async fn a_payer_that_withdraws_takes_at_most_the_credit() {
    let stage = Stage::open().await;
    let trouble = Trouble::NoGas;
    let (_channels, app) = trouble.seller(&stage, &PrivateKeySigner::random()).await;
    let channel = filled_by_its_payer(&stage).await;
    let had = stage.chain.balance(channel.payer.address()).await;
    for n in 1..=CREDIT {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "on credit").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{n}: {answer:?}");
    }
    stage.chain.fund(channel.payer.address(), U256::from(10).pow(U256::from(19))).await;
    let payer = Relayer::of(&stage.chain.rpc_url(), channel.payer.clone());
    let withdraw = BatchSettlement::initiateWithdrawCall { config: (&channel.config).into(), amount: DEPOSIT };
    assert!(execute(&stage.chain, &payer, &withdraw).await.status());
    // Before the seller notices, and when it has looked at the channel again, of which nothing stays.
    is_stopped(&send(&app, pay(&app, &channel, (CREDIT + 1) * COST, None, "more").await).await);
    stage.clock.advance(301);
    let answer = send(&app, pay(&app, &channel, (CREDIT + 1) * COST, None, "more").await).await;
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    assert_eq!(answer.reason(), reason::CUMULATIVE_EXCEEDS_BALANCE, "{answer:?}");
    stage.chain.set_next_timestamp(unix_now() + 1_000).await;
    let finalize = BatchSettlement::finalizeWithdrawCall { config: (&channel.config).into() };
    assert!(execute(&stage.chain, &payer, &finalize).await.status());
    assert_eq!(stage.chain.balance(channel.payer.address()).await, had + DEPOSIT as u64);
    assert_eq!(stage.charged(&channel).await, CREDIT * COST, "what the seller lost");
}

#[tokio::test]
async fn selling_stops_ten_minutes_after_a_claim_is_overdue() {
    let stage = Stage::open().await;
    let trouble = Trouble::NoGas;
    let sender = PrivateKeySigner::random();
    let (channels, app) = trouble.seller(&stage, &sender).await;
    let channel = filled_by_its_payer(&stage).await;
    for (n, later) in [(1, 0), (2, 3_600 + 600)] {
        stage.clock.advance(later);
        let answer = send(&app, pay(&app, &channel, n * COST, None, "on credit").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{n}: {answer:?}");
    }
    stage.clock.advance(1);
    is_stopped(&send(&app, pay(&app, &channel, 3 * COST, None, "late").await).await);
    trouble.end(&stage.chain.devnet, &sender);
    eventually("all is claimed", async || {
        let _ = channels.claim_all().await;
        stage.ledger.channel(&channel.id()).await.unwrap().unwrap().unclaimed() == 0
    })
    .await;
    let answer = send(&app, pay(&app, &channel, 3 * COST, None, "late").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
}

/// Neither its amount nor its age says so.
#[tokio::test]
async fn half_of_the_credit_is_claimed_at_once() {
    let stage = Stage::open().await;
    let sender = PrivateKeySigner::random();
    stage.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(stage.chain.rpc_url());
    let contract = contract.signer(sender).build().await.expect("the devnet answers");
    let policy = ClaimPolicy::default().amount(Usdc::from_atomic(u64::MAX)).age(Duration::from_secs(86_400));
    let channels = Channels::builder(contract, AuthorizerKey::new(stage.authorizer.clone()));
    let channels =
        channels.ledger(Arc::clone(&stage.ledger) as _).claims(policy.credit(Usdc::from_atomic(4 * COST as u64)));
    let app = stage.shop.app(stage.shop.layer().vouchers(channels.build().expect("complete settings")));
    let channel = filled_by_its_payer(&stage).await;
    for n in 1..=3 {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "on credit").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{n}: {answer:?}");
    }
    eventually("it is claimed", async || channel.state(&stage.chain).await.1 == 3 * COST).await;
}

/// One request may cost more than the credit, if nothing is unclaimed.
#[tokio::test]
async fn a_request_above_the_credit_is_sold_alone() {
    let stage = Stage::open().await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(stage.chain.rpc_url());
    let contract = contract.signer(PrivateKeySigner::random()).build().await.expect("the devnet answers");
    let channels = Channels::builder(contract, AuthorizerKey::new(stage.authorizer.clone()));
    let policy = ClaimPolicy::default().credit(Usdc::from_atomic(1));
    let channels = channels.ledger(Arc::clone(&stage.ledger) as _).claims(policy).build().expect("complete settings");
    let app = stage.shop.app(stage.shop.layer().vouchers(channels));
    let channel = filled_by_its_payer(&stage).await;
    let answer = send(&app, pay(&app, &channel, COST, None, "one").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    is_stopped(&send(&app, pay(&app, &channel, 2 * COST, None, "two").await).await);
}
