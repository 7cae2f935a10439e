//! The most that a payer can owe: selling on a channel stops when too much of it is unclaimed, or for too long, whatever keeps claims from
//! being made, and in every process that has the ledger.

use std::time::Duration;

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use http::StatusCode;
use support::{
    authorization::unix_now,
    chain::Chain as _,
    escrow::{Channel, send as execute},
    eventually::eventually,
    shop::{Answer, App, send},
    world::{COST, DEPOSIT, World, pay},
};
use tower_x402::{
    Usdc,
    channels::{Channels, ClaimPolicy},
    vouchers::{abi::BatchSettlement, reason},
};
use x402_devnet::Devnet;

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
    async fn seller(self, world: &World, sender: &PrivateKeySigner) -> (Channels, App) {
        let contract = world.contract_by(sender.clone(), |contract| {
            contract.max_gas_price(4_000_000_000).block_time(Duration::from_millis(100))
        });
        let policy = ClaimPolicy::default().amount(Usdc::from_atomic(1_000)).age(Duration::from_secs(3_600));
        let policy = policy.credit(Usdc::from_atomic((CREDIT * COST) as u64));
        let channels = world.channels_of(contract.await).claims(policy).build().expect("complete settings");
        let layer = world.shop.layer().clock(world.clock.clone()).vouchers(channels.clone());
        (channels, world.shop.app(layer))
    }
}

/// A channel that its payer filled without the seller.
async fn filled_by_its_payer(world: &World) -> Channel {
    let channel = world.channel().await;
    channel.deposit(&world.chain, &world.chain.relayer().await, DEPOSIT).await;
    channel
}

fn is_stopped(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!(answer.json()["error"], "claim_pending", "{answer:?}");
    assert_eq!(answer.headers["retry-after"], "30", "{answer:?}");
}

async fn payer_owes_at_most_the_credit(trouble: Trouble) {
    let world = World::open().await;
    world.chain.devnet.set_base_fee(1_000_000_000);
    let sender = PrivateKeySigner::random();
    if !matches!(trouble, Trouble::NoGas) {
        world.chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
    }
    let (channels, app) = trouble.seller(&world, &sender).await;
    let channel = filled_by_its_payer(&world).await;
    trouble.begin(&world.chain.devnet);
    for n in 1..=CREDIT {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "on credit").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{n}: {answer:?}");
    }
    // In this process and in the next.
    let (_next, restarted) = trouble.seller(&world, &PrivateKeySigner::random()).await;
    for app in [&app, &restarted] {
        is_stopped(&send(app, pay(app, &channel, (CREDIT + 1) * COST, None, "on credit").await).await);
    }
    assert_eq!(world.charged(&channel).await, CREDIT * COST);

    // When claims are made again, it goes on.
    trouble.end(&world.chain.devnet, &sender);
    eventually("all is claimed", async || {
        let _ = channels.claim_all().await;
        channel.state(&world.chain).await.1 == CREDIT * COST
    })
    .await;
    eventually("the books know it", async || world.record(&channel).await.unclaimed() == 0).await;
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
    let world = World::open().await;
    let trouble = Trouble::NoGas;
    let (_channels, app) = trouble.seller(&world, &PrivateKeySigner::random()).await;
    let channel = filled_by_its_payer(&world).await;
    let had = world.chain.balance(channel.payer.address()).await;
    for n in 1..=CREDIT {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "on credit").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{n}: {answer:?}");
    }
    let payer = world.announce_withdrawal(&channel, DEPOSIT).await;
    // Before the seller notices, and when it has looked at the channel again, of which nothing stays.
    is_stopped(&send(&app, pay(&app, &channel, (CREDIT + 1) * COST, None, "more").await).await);
    world.clock.advance(301);
    let answer = send(&app, pay(&app, &channel, (CREDIT + 1) * COST, None, "more").await).await;
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    assert_eq!(answer.reason(), reason::CUMULATIVE_EXCEEDS_BALANCE, "{answer:?}");
    world.chain.set_next_timestamp(unix_now() + 1_000).await;
    let finalize = BatchSettlement::finalizeWithdrawCall { config: (&channel.config).into() };
    assert!(execute(&world.chain, &payer, &finalize).await.status());
    assert_eq!(world.chain.balance(channel.payer.address()).await, had + DEPOSIT as u64);
    assert_eq!(world.charged(&channel).await, CREDIT * COST, "what the seller lost");
}

#[tokio::test]
async fn selling_stops_ten_minutes_after_a_claim_is_overdue() {
    let world = World::open().await;
    let trouble = Trouble::NoGas;
    let sender = PrivateKeySigner::random();
    let (channels, app) = trouble.seller(&world, &sender).await;
    let channel = filled_by_its_payer(&world).await;
    for (n, later) in [(1, 0), (2, 3_600 + 600)] {
        world.clock.advance(later);
        let answer = send(&app, pay(&app, &channel, n * COST, None, "on credit").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{n}: {answer:?}");
    }
    world.clock.advance(1);
    is_stopped(&send(&app, pay(&app, &channel, 3 * COST, None, "late").await).await);
    trouble.end(&world.chain.devnet, &sender);
    eventually("all is claimed", async || {
        let _ = channels.claim_all().await;
        world.record(&channel).await.unclaimed() == 0
    })
    .await;
    let answer = send(&app, pay(&app, &channel, 3 * COST, None, "late").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
}

/// Neither its amount nor its age says so.
#[tokio::test]
async fn half_of_the_credit_is_claimed_at_once() {
    let world = World::open().await;
    let contract = world.contract(|contract| contract).await;
    let policy = ClaimPolicy::default().amount(Usdc::from_atomic(u64::MAX)).age(Duration::from_secs(86_400));
    let channels = world.channels_of(contract).claims(policy.credit(Usdc::from_atomic(4 * COST as u64)));
    let app = world.seller(channels.build().expect("complete settings"));
    let channel = filled_by_its_payer(&world).await;
    for n in 1..=3 {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "on credit").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{n}: {answer:?}");
    }
    eventually("it is claimed", async || channel.state(&world.chain).await.1 == 3 * COST).await;
}

/// One request may cost more than the credit, if nothing is unclaimed.
#[tokio::test]
async fn a_request_above_the_credit_is_sold_alone() {
    let world = World::open().await;
    let contract = world.contract_by(PrivateKeySigner::random(), |contract| contract).await;
    let policy = ClaimPolicy::default().credit(Usdc::from_atomic(1));
    let channels = world.channels_of(contract).claims(policy).build().expect("complete settings");
    let app = world.seller(channels);
    let channel = filled_by_its_payer(&world).await;
    let answer = send(&app, pay(&app, &channel, COST, None, "one").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    is_stopped(&send(&app, pay(&app, &channel, 2 * COST, None, "two").await).await);
}
