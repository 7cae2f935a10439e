//! Who waits for whom: claims never wait for deposits, deposits are backed by money, and what reverts is bounded.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use alloy_json_rpc::{ErrorPayload, RequestPacket, ResponsePacket, ResponsePayload};
use alloy_primitives::{Address, U256, address};
use alloy_provider::Provider as _;
use alloy_rpc_client::RpcClient;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use alloy_transport::{TransportError, TransportFut};
use futures_util::future::join_all;
use serde_json::value::to_raw_value;
use support::{
    authorization::unix_now,
    chain::{Chain as _, deployed_code},
    devnet::DevnetChain,
    escrow::Channel,
    eventually::{eventually, in_time},
};
use tokio::time::sleep;
use tower_service::Service;
use tower_x402::{
    Network,
    facilitator::{
        FacilitatorError,
        channels::{ChannelError, ChannelFacilitator as _, OnchainChannels, OnchainChannelsBuilder},
    },
    vouchers::{Deposit, DepositAuthorization, Escrow, abi::BatchSettlement as escrow, reason},
};
use x402_devnet::{DevnetTransport, Fault};

use super::{
    authorizer, builder,
    faults::{SEND, SEND_SYNC, pauseCall, unpauseCall},
    gas_key, order, reason as code,
};

const RECEIVER: Address = address!("00000000000000000000000000000000000bacc0");

struct Stage {
    chain: DevnetChain,
    key: PrivateKeySigner,
    authorizer: PrivateKeySigner,
}

impl Stage {
    async fn start(block_time: Option<Duration>) -> Self {
        let chain = DevnetChain::start(block_time).await;
        let key = gas_key(&chain).await;
        Self { chain, key, authorizer: PrivateKeySigner::random() }
    }

    fn builder(&self) -> OnchainChannelsBuilder {
        builder(&self.chain).signer(self.key.clone()).confirm_timeout(Duration::from_secs(1))
    }

    /// A channel whose payer holds so much.
    async fn channel(&self, units: u64) -> Channel {
        Channel::funded(&self.chain, RECEIVER, &self.authorizer, units).await
    }

    async fn sign(&self, channel: &Channel, units: u128) -> Deposit {
        channel.sign_deposit(&self.chain, units, unix_now() + 3_600).await
    }

    /// A channel with this deposit, all of which its payer withdraws.
    async fn withdrawn(&self, units: u128) -> Channel {
        let channel = self.channel(100_000).await;
        let deposit = self.sign(&channel, units).await;
        let devnet = &self.chain.devnet;
        let made = channel.deposit_call(&deposit).abi_encode();
        devnet.execute(Address::repeat_byte(9), Escrow::ADDRESS, made).unwrap();
        let withdraw = escrow::initiateWithdrawCall { config: (&channel.config).into(), amount: units };
        devnet.execute(channel.config.payer, Escrow::ADDRESS, withdraw.abi_encode()).unwrap();
        channel
    }

    async fn sent(&self) -> u64 {
        self.chain.provider().get_transaction_count(self.key.address()).await.unwrap()
    }

    async fn pending(&self) -> u64 {
        self.chain.provider().get_transaction_count(self.key.address()).pending().await.unwrap()
    }

    /// The token is paused in transactions, and not in their simulations.
    fn reverting(&self) {
        let devnet = self.chain.devnet.clone();
        self.chain.devnet.faults().set(move |call| {
            match call.method {
                SEND | SEND_SYNC => drop(devnet.administer(pauseCall {}.abi_encode()).unwrap()),
                "eth_estimateGas" => drop(devnet.administer(unpauseCall {}.abi_encode()).unwrap()),
                _ => {}
            }
            Fault::None
        });
    }

    fn calm(&self) {
        self.chain.devnet.faults().clear();
        self.chain.devnet.administer(unpauseCall {}.abi_encode()).unwrap();
    }
}

async fn deposit(channels: &OnchainChannels, channel: &Channel, deposit: &Deposit) -> Result<u128, ChannelError> {
    let made = channels.deposit(&channel.config, &channel.voucher(1), deposit).await;
    made.map(|made| made.observed.state.balance)
}

/// A deposit with the signature of somebody else.
fn unsigned(deposit: Deposit, other: &Deposit) -> Deposit {
    let mut unsigned = deposit;
    match (&mut unsigned.authorization, &other.authorization) {
        (DepositAuthorization::Erc3009 { signature, .. }, DepositAuthorization::Erc3009 { signature: theirs, .. }) => {
            *signature = theirs.clone();
        }
        other => panic!("{other:?}"),
    }
    unsigned
}

fn is_busy<T: std::fmt::Debug>(result: &Result<T, ChannelError>) -> bool {
    matches!(result, Err(ChannelError::Unavailable(FacilitatorError::Busy { .. })))
}

/// The node takes 60 ms for each answer, and a block two seconds. Of 200 deposits that come first nobody signed a third, a third has no
/// money, and a third is real and small.
#[tokio::test(start_paused = true)]
async fn a_claim_at_risk_and_an_honest_deposit_are_made_at_once_beside_a_flood_of_deposits() {
    let stage = Stage::start(Some(Duration::from_secs(2))).await;
    let channels = OnchainChannels::builder().network(Network::BASE_SEPOLIA).client(stage.chain.devnet.rpc_client());
    let channels = channels.signer(stage.key.clone()).block_time(Duration::from_secs(2)).build().await.unwrap();
    let (withdrawn, honest) = (stage.withdrawn(50_000).await, stage.channel(100_000).await);
    let real = stage.sign(&honest, 50_000).await;
    let mut flood = Vec::new();
    for n in 0..200 {
        let channel = stage.channel(if n % 3 == 1 { 0 } else { 1_000 }).await;
        let signed = stage.sign(&channel, 1_000).await;
        flood.push((channel, if n % 3 == 0 { unsigned(signed, &real) } else { signed }));
    }
    stage.chain.devnet.faults().set(|_| Fault::Delay(Duration::from_millis(60)));
    let refused = Arc::new(AtomicU64::new(0));
    let (flooding, strangers) = (channels.clone(), refused.clone());
    let flood = tokio::spawn(async move {
        let made = flood.into_iter().map(async |(channel, sent)| match deposit(&flooding, &channel, &sent).await {
            Err(ChannelError::Rejected { .. }) => drop(strangers.fetch_add(1, Ordering::Relaxed)),
            Err(ChannelError::Pending { .. } | ChannelError::Unavailable(_)) | Ok(1_000) => {}
            other => panic!("{other:?}"),
        });
        join_all(made).await;
    });
    sleep(Duration::from_secs(1)).await;

    let (block, row) = (stage.chain.devnet.block_number(), withdrawn.row(50_000, 50_000).await);
    let key = authorizer(&withdrawn);
    let claimed = channels.claim(&[row], &key).await.unwrap();
    let blocks = claimed.observed[0].block - block;
    assert!(claimed.amount == 50_000 && blocks <= 2, "{claimed:?} {blocks} blocks later");

    // All have been checked by then. The small ones take some ten blocks.
    let block = stage.chain.devnet.block_number();
    assert_eq!(deposit(&channels, &honest, &real).await.unwrap(), 50_000);
    let blocks = stage.chain.devnet.block_number() - block;
    assert!(blocks <= 4, "{blocks} blocks later");
    flood.await.unwrap();
    assert_eq!(refused.load(Ordering::Relaxed), 134);
}

/// The window is full of deposits, but for the place that is kept.
#[tokio::test]
async fn a_claim_at_risk_is_sent_while_the_window_is_full_of_deposits_that_hang() {
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let channels = stage.builder().in_flight(3).build().await.unwrap();
    let withdrawn = stage.withdrawn(50_000).await;
    stage.chain.devnet.stall(true);
    let made = join_all((0..4).map(async |_| {
        let channel = stage.channel(1_000).await;
        let sent = stage.sign(&channel, 1_000).await;
        deposit(&channels, &channel, &sent).await
    }));
    let in_pool = |made: &&Result<u128, _>| matches!(made, Err(ChannelError::Pending { transaction: Some(_) }));
    assert_eq!(made.await.iter().filter(in_pool).count(), 2);
    let claim = channels.claim(&[withdrawn.row(50_000, 50_000).await], &authorizer(&withdrawn)).await;
    assert!(matches!(claim, Err(ChannelError::Pending { transaction: Some(_) })), "{claim:?}");
    assert_eq!(stage.pending().await, 3);
}

/// It is checked before it stands in the line.
#[tokio::test]
async fn a_deposit_that_nobody_signed_is_refused_while_the_window_is_full() {
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let channels = stage.builder().in_flight(2).build().await.unwrap();
    let (first, second) = (stage.channel(1_000).await, stage.channel(1_000).await);
    let (good, other) = (stage.sign(&first, 1_000).await, stage.sign(&second, 1_000).await);
    stage.chain.devnet.stall(true);
    assert!(matches!(deposit(&channels, &first, &good).await, Err(ChannelError::Pending { .. })));
    let refused = deposit(&channels, &second, &unsigned(other, &good)).await;
    assert_eq!(code(refused), reason::RECEIVE_AUTHORIZATION_SIGNATURE);
}

/// What gas may cost for a claim at risk is bounded by what the claim brings in, where an ether costs 10,000 dollars.
#[tokio::test]
async fn a_claim_at_risk_exceeds_the_ceiling_of_the_gas_price_up_to_its_worth() {
    let stage = Stage::start(None).await;
    let (large, small) = (stage.withdrawn(90_000).await, stage.withdrawn(1_000).await);
    let calm = stage.channel(100_000).await;
    let filled = channels_of(&stage).await;
    deposit(&filled, &calm, &stage.sign(&calm, 90_000).await).await.unwrap();
    stage.chain.devnet.set_base_fee(20_000_000);
    let channels = stage.builder().max_gas_price(10_000_000).build().await.unwrap();
    for (channel, units) in [(&calm, 90_000), (&small, 1_000)] {
        let claimed = channels.claim(&[channel.row(units, units).await], &authorizer(channel)).await;
        assert!(matches!(claimed, Err(ChannelError::Unavailable(_))), "{claimed:?}");
    }
    let rows = [large.row(90_000, 90_000).await];
    assert_eq!(channels.claim(&rows, &authorizer(&large)).await.unwrap().amount, 90_000);
}

/// A deposit offers too little for the block, and may not offer more.
#[tokio::test]
async fn a_claim_at_risk_does_not_wait_for_the_ceiling_of_a_transaction_before_it() {
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let (withdrawn, channel) = (stage.withdrawn(90_000).await, stage.channel(100_000).await);
    stage.chain.devnet.set_base_fee(1_000_000);
    let channels =
        stage.builder().max_gas_price(10_000_000).block_time(Duration::from_millis(50)).build().await.unwrap();
    let sent = stage.sign(&channel, 10_000).await;
    stage.chain.devnet.stall(true);
    assert!(matches!(deposit(&channels, &channel, &sent).await, Err(ChannelError::Pending { .. })));
    stage.chain.devnet.set_base_fee(15_000_000);
    stage.chain.devnet.stall(false);
    let rows = [withdrawn.row(90_000, 90_000).await];
    let _ = channels.claim(&rows, &authorizer(&withdrawn)).await;
    eventually("both are made", async || stage.sent().await == 2).await;
    assert_eq!(withdrawn.state(&stage.chain).await, (90_000, 90_000));
    assert_eq!(channel.state(&stage.chain).await, (10_000, 0));
}

/// With a key of its own.
async fn channels_of(stage: &Stage) -> OnchainChannels {
    builder(&stage.chain).signer(gas_key(&stage.chain).await).build().await.unwrap()
}

#[tokio::test]
async fn deposits_of_one_payer_at_once_need_its_balance_together() {
    let stage = Stage::start(Some(Duration::from_millis(100))).await;
    let channels = stage.builder().build().await.unwrap();
    let channel = stage.channel(100_000).await;
    let mut signed = Vec::new();
    for _ in 0..5 {
        signed.push(stage.sign(&channel, 40_000).await);
    }
    let made = join_all(signed.iter().map(|sent| deposit(&channels, &channel, sent))).await;
    assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 2, "{made:?}");
    assert_eq!(made.iter().filter(|made| is_busy(made)).count(), 3, "{made:?}");
    assert_eq!((stage.sent().await, channel.state(&stage.chain).await.0), (2, 80_000));
    // What was promised is over.
    assert_eq!(deposit(&channels, &channel, &stage.sign(&channel, 20_000).await).await.unwrap(), 100_000);
}

/// Wallets with code, each with another address.
#[tokio::test]
async fn wallets_whose_deposits_revert_are_bounded_all_together() {
    let stage = Stage::start(None).await;
    let channels = stage.builder().build().await.unwrap();
    let wallet = async || {
        let channel = stage.channel(10_000).await;
        stage.chain.set_code(channel.config.payer, deployed_code("TestWallet")).await;
        channel
    };
    let known = wallet().await;
    assert_eq!(deposit(&channels, &known, &stage.sign(&known, 1_000).await).await.unwrap(), 1_000);
    stage.reverting();
    let before = stage.sent().await;
    for n in 0..8 {
        let channel = wallet().await;
        let refused = deposit(&channels, &channel, &stage.sign(&channel, 1_000).await).await;
        match n {
            // Each is sent twice.
            0..4 => assert_eq!(code(refused), reason::DEPOSIT_TRANSACTION_FAILED),
            _ => assert!(is_busy(&refused), "{refused:?}"),
        }
    }
    assert_eq!(stage.sent().await - before, 8);
    stage.calm();
    // Who has deposited before goes on, after a restart, too, and so does a payer without code.
    let channels = channels_of(&stage).await;
    stage.reverting();
    for _ in 0..4 {
        let channel = wallet().await;
        let _ = deposit(&channels, &channel, &stage.sign(&channel, 1_000).await).await;
    }
    stage.calm();
    assert!(is_busy(&{
        let channel = wallet().await;
        deposit(&channels, &channel, &stage.sign(&channel, 1_000).await).await
    }));
    assert_eq!(deposit(&channels, &known, &stage.sign(&known, 1_000).await).await.unwrap(), 2_000);
    let plain = stage.channel(10_000).await;
    assert_eq!(deposit(&channels, &plain, &stage.sign(&plain, 1_000).await).await.unwrap(), 1_000);
}

/// Its transaction is in no block for so long that its requests end.
#[tokio::test]
async fn a_deposit_and_a_refund_that_are_under_way_are_not_sent_again_by_repeated_requests() {
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let channels = stage.builder().build().await.unwrap();
    let channel = stage.channel(100_000).await;
    let sent = stage.sign(&channel, 10_000).await;
    stage.chain.devnet.stall(true);
    for _ in 0..3 {
        let pending = deposit(&channels, &channel, &sent).await;
        assert!(matches!(pending, Err(ChannelError::Pending { transaction: Some(_) })), "{pending:?}");
    }
    assert_eq!(stage.pending().await, 1);
    stage.chain.devnet.stall(false);
    eventually("it is made", async || deposit(&channels, &channel, &sent).await.is_ok_and(|balance| balance == 10_000))
        .await;
    let (key, order) = (authorizer(&channel), order(&channel, 4_000, 0, None));
    stage.chain.devnet.stall(true);
    for _ in 0..3 {
        let pending = channels.refund(&order, &key).await;
        assert!(matches!(pending, Err(ChannelError::Pending { transaction: Some(_) })), "{pending:?}");
    }
    assert_eq!(stage.pending().await, 2);
    stage.chain.devnet.stall(false);
    eventually("it is made", async || channels.refund(&order, &key).await.is_ok_and(|made| made.amount == 4_000)).await;
    assert_eq!((stage.sent().await, channel.state(&stage.chain).await.0), (2, 6_000));
}

/// A process is killed with a deposit, and then with a refund, in the pool. The next one has the same key.
#[tokio::test]
async fn what_an_earlier_process_left_in_the_pool_is_waited_for_and_not_sent_again() {
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let channel = stage.channel(100_000).await;
    let sent = stage.sign(&channel, 10_000).await;
    let is_pending = |result: Result<(), ChannelError>| matches!(result, Err(ChannelError::Pending { .. }));
    // Its tasks follow the transactions; they send nothing anew.
    let killed = stage.builder().build().await.unwrap();
    stage.chain.devnet.stall(true);
    assert!(is_pending(deposit(&killed, &channel, &sent).await.map(drop)));
    drop(killed);
    let next = stage.builder().build().await.unwrap();
    for _ in 0..2 {
        assert!(is_pending(deposit(&next, &channel, &sent).await.map(drop)));
    }
    assert_eq!(stage.pending().await, 1);
    stage.chain.devnet.stall(false);
    eventually("it is found", async || deposit(&next, &channel, &sent).await.is_ok_and(|balance| balance == 10_000))
        .await;

    let (key, order) = (authorizer(&channel), order(&channel, 4_000, 0, None));
    stage.chain.devnet.stall(true);
    assert!(is_pending(next.refund(&order, &key).await.map(drop)));
    drop(next);
    let last = stage.builder().build().await.unwrap();
    let refund = tokio::spawn(async move { last.refund(&order, &key).await });
    sleep(Duration::from_millis(500)).await;
    assert_eq!((stage.pending().await, refund.is_finished()), (2, false));
    stage.chain.devnet.stall(false);
    assert_eq!(in_time("it is found", refund).await.unwrap().unwrap().amount, 4_000);
    assert_eq!((stage.sent().await, channel.state(&stage.chain).await.0), (2, 6_000));
}

/// A node that simulates, and reads at `pending`, as if the transactions in its pool were in a block: here, that all which is asked for is
/// done.
#[derive(Clone)]
struct AfterThePool(DevnetTransport);

impl Service<RequestPacket> for AfterThePool {
    type Response = ResponsePacket;
    type Error = TransportError;
    type Future = TransportFut<'static>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, packet: RequestPacket) -> Self::Future {
        let asked = packet.as_single().map(|request| {
            let params = request.params().map(|params| params.get().to_owned()).unwrap_or_default();
            (request.method().to_owned(), params.contains("\"pending\""))
        });
        let answer = self.0.call(packet);
        Box::pin(async move {
            let mut answer = answer.await?;
            if let ResponsePacket::Single(response) = &mut answer {
                match asked {
                    Some((method, true)) if method == "eth_call" => {
                        let word = format!("{:#066x}", U256::from(1));
                        response.payload = ResponsePayload::Success(to_raw_value(&word).expect("JSON"));
                    }
                    Some((method, _)) if method == "eth_estimateGas" => {
                        response.payload = ResponsePayload::Failure(ErrorPayload {
                            code: 3,
                            message: "execution reverted".into(),
                            data: None,
                        });
                    }
                    _ => {}
                }
            }
            Ok(answer)
        })
    }
}

/// Another process, with another key, has sent them.
#[tokio::test]
async fn a_deposit_or_refund_in_the_pool_is_pending_where_the_node_simulates_after_the_pool() {
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let client = RpcClient::new(AfterThePool(stage.chain.devnet.transport()), true);
    let after_the_pool = OnchainChannels::builder().network(Network::BASE_SEPOLIA).client(client);
    let after_the_pool = after_the_pool.signer(gas_key(&stage.chain).await).build().await.unwrap();
    let other = stage.builder().build().await.unwrap();
    let channel = stage.channel(100_000).await;
    let sent = stage.sign(&channel, 10_000).await;
    let is_pending = |result: Result<(), ChannelError>| {
        assert!(matches!(result, Err(ChannelError::Pending { transaction: None })), "{result:?}");
    };
    stage.chain.devnet.stall(true);
    assert!(matches!(deposit(&other, &channel, &sent).await, Err(ChannelError::Pending { .. })));
    is_pending(deposit(&after_the_pool, &channel, &sent).await.map(drop));
    is_pending(after_the_pool.verify_deposit(&channel.config, &sent).await.map(drop));
    stage.chain.devnet.stall(false);
    eventually("it is found", async || {
        deposit(&after_the_pool, &channel, &sent).await.is_ok_and(|balance| balance == 10_000)
    })
    .await;
    let (key, order) = (authorizer(&channel), order(&channel, 4_000, 0, None));
    stage.chain.devnet.stall(true);
    assert!(matches!(other.refund(&order, &key).await, Err(ChannelError::Pending { .. })));
    is_pending(after_the_pool.refund(&order, &key).await.map(drop));
    stage.chain.devnet.stall(false);
    eventually("it is found", async || {
        after_the_pool.refund(&order, &key).await.is_ok_and(|made| made.amount == 4_000)
    })
    .await;
    assert_eq!(stage.sent().await, 2);
}
