//! What a seller believes of a channel: nothing that its clock or its node cannot know, and the truth again when they are right again.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::{Address, Bytes};
use async_trait::async_trait;
use http::StatusCode;
use support::{
    authorization::unix_now,
    chain::Chain as _,
    escrow::{Channel, refund_call, send as execute},
    eventually::eventually,
    rpc_proxy::{Fate, RpcProxy},
    shop::{App, send},
    world::{COST, DEPOSIT, World, pay, refused},
};
use tower_x402::{
    Clock as _, ManualClock, Network,
    facilitator::{
        FacilitatorError,
        channels::{ChannelError, ChannelFacilitator, Claimed, Executed, OnchainChannels, Settled, SignedRefund},
    },
    ledger::channels::{ChannelLedger as _, ChannelStep},
    vouchers::{AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, Claim, Deposit, Voucher},
};

type Change = Box<dyn FnOnce(&mut ChannelObservation) + Send>;

/// A facilitator whose next observation is another one.
#[derive(Clone)]
struct Misread {
    inner: OnchainChannels,
    next: Arc<Mutex<Option<Change>>>,
}

impl fmt::Debug for Misread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Misread").finish_non_exhaustive()
    }
}

#[async_trait]
impl ChannelFacilitator for Misread {
    fn network(&self) -> Network {
        self.inner.network()
    }

    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError> {
        let mut observed = self.inner.observe(channels).await?;
        if let (Some(first), Some(change)) = (observed.first_mut(), self.next.lock().unwrap().take()) {
            change(first);
        }
        Ok(observed)
    }

    async fn verify_deposit(
        &self,
        config: &ChannelConfig,
        deposit: &Deposit,
    ) -> Result<ChannelObservation, ChannelError> {
        self.inner.verify_deposit(config, deposit).await
    }

    async fn deposit(
        &self,
        config: &ChannelConfig,
        voucher: &Voucher,
        deposit: &Deposit,
    ) -> Result<Executed, ChannelError> {
        self.inner.deposit(config, voucher, deposit).await
    }

    async fn claim(&self, claims: &[Claim], authorizer: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        self.inner.claim(claims, authorizer).await
    }

    async fn claim_signed(&self, claims: &[Claim], signature: &Bytes) -> Result<Claimed, ChannelError> {
        self.inner.claim_signed(claims, signature).await
    }

    async fn settle(&self, receiver: Address, token: Address) -> Result<Option<Settled>, ChannelError> {
        self.inner.settle(receiver, token).await
    }

    async fn refund_signed(&self, refund: &SignedRefund) -> Result<Executed, ChannelError> {
        self.inner.refund_signed(refund).await
    }
}

fn seller(world: &World, contract: impl ChannelFacilitator, clock: Arc<ManualClock>) -> App {
    world.seller(world.channels_of(contract).clock(clock).build().expect("complete settings"))
}

/// A seller whose node can be misread.
async fn misreading(world: &World) -> (Misread, App) {
    let inner = world.contract(|contract| contract).await;
    let misread = Misread { inner, next: Arc::default() };
    let app = seller(world, misread.clone(), world.clock.clone());
    (misread, app)
}

impl Misread {
    fn next(&self, change: impl FnOnce(&mut ChannelObservation) + Send + 'static) {
        *self.next.lock().unwrap() = Some(Box::new(change));
    }
}

/// Takes all out of the channel, without the seller that has the ledger.
async fn empty(world: &World, channel: &Channel) {
    let relayer = world.chain.relayer().await;
    assert!(execute(&world.chain, &relayer, &refund_call(channel, DEPOSIT, 0)).await.status());
    assert_eq!(channel.state(&world.chain).await, (0, 0));
}

#[tokio::test]
async fn a_clock_that_is_set_back_makes_no_channel_fresh() {
    let world = World::open().await;
    let channel = world.filled(&world.app).await;
    world.channels.claim_all().await.expect("the devnet claims");
    world.announce_withdrawal(&channel, DEPOSIT - COST).await;
    let inner = world.contract(|contract| contract).await;
    let app = seller(&world, inner, Arc::new(ManualClock::at(world.clock.now() - 3_600)));
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "an hour ago").await).await;
    refused(&answer, "cumulative_exceeds_balance");
    assert_eq!(world.shop.handled(), 1);
}

/// An hour ago, a node that is an hour behind would have the newest block.
#[tokio::test]
async fn a_block_of_a_time_to_come_is_not_relied_on() {
    let world = World::open().await;
    for (ahead, is_good) in [(0, true), (100, true), (3_600, false)] {
        let clock = Arc::new(ManualClock::at(unix_now() - ahead));
        let contract = world.contract(|contract| contract.clock(clock)).await;
        let observed = contract.observe(&[world.channel().await.id()]).await;
        assert_eq!(observed.is_ok(), is_good, "{ahead}: {observed:?}");
    }
}

#[tokio::test]
async fn a_block_that_is_too_high_closes_no_channel() {
    let world = World::open().await;
    let (misread, app) = misreading(&world).await;
    let channel = world.filled(&app).await;
    world.clock.advance(301);
    misread.next(|seen| seen.block += 20_000_000);
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "high").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    // With the next block of the chain.
    world.clock.advance(301);
    eventually("the books find back", async || {
        send(&app, pay(&app, &channel, 3 * COST, None, "next").await).await.status == StatusCode::OK
    })
    .await;
    let record = world.record(&channel).await;
    assert!(record.observed.block < 20_000_000, "{record:?}");
    assert_eq!(world.shop.handled(), 3);
}

/// As after a clock that ran ahead: no block of the chain is newer for a long time.
#[tokio::test]
async fn a_block_of_a_time_to_come_closes_no_channel() {
    let world = World::open().await;
    let (misread, app) = misreading(&world).await;
    let channel = world.filled(&app).await;
    world.clock.advance(301);
    misread.next(|seen| seen.time += 20_000_000);
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "ahead").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    world.clock.advance(301);
    let answer = send(&app, pay(&app, &channel, 3 * COST, None, "next").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    let (seen, now) = (world.record(&channel).await.observed, unix_now());
    assert!(seen.time < now + 10_000_000, "{seen:?}");
}

#[tokio::test]
async fn an_executed_deposit_is_no_cover_after_its_money_has_left() {
    let world = World::open().await;
    let (misread, app) = misreading(&world).await;
    let channel = world.channel().await;
    let deposit = channel.sign_deposit(&world.chain, DEPOSIT, unix_now() + 600).await;
    let first = send(&app, pay(&app, &channel, COST, Some(&deposit), "first").await).await;
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    world.clock.advance(301);
    misread.next(|seen| seen.block += 20_000_000);
    let second = send(&app, pay(&app, &channel, 2 * COST, None, "second").await).await;
    assert_eq!(second.status, StatusCode::OK, "{second:?}");
    empty(&world, &channel).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let answer = send(&app, pay(&app, &channel, 3 * COST, Some(&deposit), "third").await).await;
    refused(&answer, "cumulative_exceeds_balance");
    assert_eq!(world.shop.handled(), 2);
}

/// The books know a later block than the node that finds the deposit.
#[tokio::test]
async fn an_executed_deposit_makes_no_stale_channel_fresh() {
    let world = World::open().await;
    let (_, app) = misreading(&world).await;
    let channel = world.channel().await;
    let deposit = channel.sign_deposit(&world.chain, DEPOSIT, unix_now() + 600).await;
    let first = send(&app, pay(&app, &channel, COST, Some(&deposit), "first").await).await;
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    let seen = world.record(&channel).await.observed;
    let later = ChannelObservation { block: seen.block + 50, time: seen.time + 400, ..seen };
    world.clock.advance(301);
    let step = ChannelStep::Observe { observation: later, now: world.clock.now() };
    world.ledger.advance(&channel.id(), &step).await.unwrap();
    world.clock.advance(301);
    empty(&world, &channel).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, Some(&deposit), "second").await).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!(world.shop.handled(), 1);
}

/// Behind the node's address is, for once, a node of another chain: of Base, and not of Base Sepolia.
#[tokio::test]
async fn a_node_of_another_chain_is_not_heard() {
    const HERE: &str = "0000000000000000000000000000000000000000000000000000000000014a34";
    const ELSEWHERE: &str = "0000000000000000000000000000000000000000000000000000000000002105";
    let world = World::open().await;
    let proxy = RpcProxy::start(world.chain.rpc_url()).await;
    let contract = world.contract(|contract| contract.rpc_url(proxy.url())).await;
    let app = seller(&world, contract.clone(), world.clock.clone());
    let channel = world.filled(&app).await;
    let before = world.ledger.channel(&channel.id()).await.unwrap();
    world.clock.advance(301);
    proxy.judge(|_| Fate::Replace(HERE, ELSEWHERE));
    let observed = contract.observe(&[channel.id()]).await;
    let is_unreachable = matches!(observed, Err(ChannelError::Unavailable(FacilitatorError::Unreachable { .. })));
    assert!(is_unreachable, "{observed:?}");
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "elsewhere").await).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!(world.ledger.channel(&channel.id()).await.unwrap(), before);
    proxy.judge(|_| Fate::Pass);
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, Some(&deposit), "at home").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(world.shop.handled(), 2);
}

/// Nobody can make the contract pay out what was claimed, or claim what is not there.
#[tokio::test]
async fn a_claim_beyond_the_balance_is_not_believed() {
    const DEPOSITED: &str = "0000000000000000000000000000000000000000000000000000000000002710";
    const LESS: &str = "00000000000000000000000000000000000000000000000000000000000003e7";
    let world = World::open().await;
    let channel = world.filled(&world.app).await;
    world.channels.claim_all().await.unwrap();
    let proxy = RpcProxy::start(world.chain.rpc_url()).await;
    let contract = world.contract(|contract| contract.rpc_url(proxy.url())).await;
    let seen = contract.observe(&[channel.id()]).await.unwrap()[0].state;
    assert_eq!((seen.balance, seen.total_claimed), (10_000, 1_000));
    proxy.judge(|_| Fate::Replace(DEPOSITED, LESS));
    let observed = contract.observe(&[channel.id()]).await;
    let is_unreachable = matches!(observed, Err(ChannelError::Unavailable(FacilitatorError::Unreachable { .. })));
    assert!(is_unreachable, "{observed:?}");
}

#[tokio::test]
async fn a_claim_that_was_never_made_counts_until_the_next_look() {
    let world = World::open().await;
    let (misread, app) = misreading(&world).await;
    let channel = world.filled(&app).await;
    world.clock.advance(301);
    misread.next(|seen| seen.state.total_claimed = 5 * COST);
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "misread").await).await;
    refused(&answer, "cumulative_amount_mismatch");
    assert_eq!(world.charged(&channel).await, 5 * COST);
    world.clock.advance(301);
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "read").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(world.charged(&channel).await, 2 * COST);
    world.channels.claim_all().await.unwrap();
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 2 * COST));
}

/// What a pass once saw on another chain does not make a deposit that was executed useless.
#[tokio::test]
async fn a_deposit_pays_although_its_channel_was_seen_empty() {
    let world = World::open().await;
    let (misread, app) = misreading(&world).await;
    let channel = world.filled(&app).await;
    world.clock.advance(301);
    misread.next(|seen| {
        seen.block += 20_000_000;
        seen.state.balance = 0;
    });
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let lost = send(&app, pay(&app, &channel, 2 * COST, None, "lost").await).await;
    assert_eq!(lost.status, StatusCode::PAYMENT_REQUIRED, "{lost:?}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, Some(&deposit), "found").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(channel.state(&world.chain).await, (2 * DEPOSIT, 0));
}
