//! Nodes that do not answer, answer late or lie, and transactions that hang: nothing moves twice, and nothing is reported that is not so.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use alloy_json_rpc::{RequestPacket, ResponsePacket, ResponsePayload};
use alloy_primitives::{Address, address};
use alloy_provider::Provider as _;
use alloy_rpc_client::RpcClient;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, sol};
use alloy_transport::{TransportError, TransportFut};
use serde_json::value::to_raw_value;
use support::{
    authorization::unix_now,
    chain::{Chain as _, Relayer},
    devnet::DevnetChain,
    escrow::{Channel, refund_call, send},
    eventually::{eventually, in_time},
};
use tower_service::Service;
use tower_x402::{
    Clock, Network,
    facilitator::channels::{ChannelError, ChannelFacilitator as _, OnchainChannels, OnchainChannelsBuilder},
    vouchers::{Deposit, Escrow, abi::BatchSettlement as escrow, reason},
};
use x402_devnet::{DevnetTransport, Fault, Orphans};

use super::{authorizer, builder, gas_key, order, reason as code};

pub(super) const SEND: &str = "eth_sendRawTransaction";
pub(super) const SEND_SYNC: &str = "eth_sendRawTransactionSync";

sol! {
    function pause() external;
    function unpause() external;
}

struct Stage {
    chain: DevnetChain,
    channels: OnchainChannels,
    channel: Channel,
    key: PrivateKeySigner,
}

impl Stage {
    async fn start(block_time: Option<Duration>) -> Self {
        // Only what is not final is sent again after a reorganization.
        let chain = DevnetChain::start_with(block_time, 100_000).await;
        let key = gas_key(&chain).await;
        let channels = builder(&chain).signer(key.clone()).confirm_timeout(Duration::from_secs(3));
        let channels = channels.build().await.unwrap();
        let receiver = address!("00000000000000000000000000000000000bacc0");
        let channel = Channel::funded(&chain, receiver, &PrivateKeySigner::random(), 100_000).await;
        Self { chain, channels, channel, key }
    }

    async fn sign(&self, units: u128) -> Deposit {
        self.channel.sign_deposit(&self.chain, units, self.chain.timestamp().await + 3_600).await
    }

    fn fault(&self, hook: impl Fn(&str, u64) -> Fault + Send + Sync + 'static) {
        let faults = self.chain.devnet.faults();
        faults.reset();
        faults.set(move |call| hook(call.method, call.index));
    }

    fn calls(&self, method: &str) -> u64 {
        self.chain.devnet.faults().calls().get(method).copied().unwrap_or_default()
    }

    async fn sent(&self) -> u64 {
        self.chain.provider().get_transaction_count(self.key.address()).await.unwrap()
    }

    /// Returns the next nonce after the transactions in the pool.
    async fn pending(&self) -> u64 {
        self.chain.provider().get_transaction_count(self.key.address()).pending().await.unwrap()
    }
}

/// Asks again until the outcome is known.
async fn until_known<T>(what: &str, mut ask: impl AsyncFnMut() -> Result<T, ChannelError>) -> Result<T, ChannelError> {
    in_time(what, async {
        loop {
            match ask().await {
                Err(ChannelError::Pending { .. } | ChannelError::Unavailable(_)) => {}
                known => return known,
            }
        }
    })
    .await
}

fn is_unavailable<T: std::fmt::Debug>(result: &Result<T, ChannelError>) -> bool {
    matches!(result, Err(ChannelError::Unavailable(_)))
}

#[tokio::test]
async fn a_node_that_does_not_answer_sends_nothing_and_loses_nothing() {
    let stage = Stage::start(None).await;
    let (deposit, key) = (stage.sign(10_000).await, authorizer(&stage.channel));
    let rows = [stage.channel.row(2_000, 2_000).await];
    let token = stage.chain.asset().address;
    for method in ["eth_call", "eth_estimateGas", "eth_getTransactionCount"] {
        stage.fault(move |called, _| if called == method { Fault::DropBefore } else { Fault::None });
        let result = stage.channels.deposit(&stage.channel.config, &stage.channel.voucher(1), &deposit).await;
        assert!(is_unavailable(&result), "{method}: {result:?}");
        assert_eq!(stage.calls(SEND) + stage.calls(SEND_SYNC), 0);
    }
    stage.fault(|method, _| if method == "eth_call" { Fault::DropBefore } else { Fault::None });
    let channel = &stage.channel;
    assert!(is_unavailable(&stage.channels.observe(&[channel.id()]).await));
    assert!(is_unavailable(&stage.channels.verify_deposit(&channel.config, &deposit).await));
    assert!(is_unavailable(&stage.channels.claim(&rows, &key).await));
    assert!(is_unavailable(&stage.channels.settle(channel.config.receiver, token).await));
    assert!(is_unavailable(&stage.channels.refund(&order(channel, 1, 0, None), &key).await));
    stage.chain.devnet.faults().clear();
    // The failed request for the next account nonce is not repeated for a second.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap();
    assert_eq!(stage.channels.claim(&rows, &key).await.unwrap().amount, 2_000);
    assert_eq!(channel.state(&stage.chain).await, (10_000, 2_000));
}

/// Some nodes answer everything but receipts. What is deposited then is not known to have arrived.
#[tokio::test]
async fn nothing_is_deposited_while_the_node_refuses_receipts() {
    let stage = Stage::start(None).await;
    let first = stage.sign(10_000).await;
    let other =
        Channel::funded(&stage.chain, stage.channel.config.receiver, &PrivateKeySigner::random(), 100_000).await;
    let second = other.sign_deposit(&stage.chain, 10_000, stage.chain.timestamp().await + 3_600).await;
    stage.fault(|method, _| match method {
        "eth_getTransactionReceipt" => {
            Fault::Error { code: -32_000, message: "archive requests need a paid plan".into() }
        }
        SEND_SYNC => Fault::Error { code: -32_601, message: "Method not found".into() },
        _ => Fault::None,
    });
    let (channels, channel) = (&stage.channels, &stage.channel);
    let sent = channels.deposit(&channel.config, &channel.voucher(1), &first).await;
    assert!(matches!(sent, Err(ChannelError::Pending { .. } | ChannelError::Unavailable(_))), "{sent:?}");
    assert_eq!(channel.state(&stage.chain).await, (10_000, 0), "the node was not known to refuse them");
    assert!(is_unavailable(&channels.verify_deposit(&other.config, &second).await));
    assert!(is_unavailable(&channels.deposit(&other.config, &other.voucher(1), &second).await));
    assert_eq!(other.state(&stage.chain).await, (0, 0));
    stage.chain.devnet.faults().clear();
    for (channel, deposit) in [(channel, &first), (&other, &second)] {
        let made = until_known("it is deposited", async || {
            channels.deposit(&channel.config, &channel.voucher(1), deposit).await
        });
        assert_eq!(made.await.unwrap().observed.state.balance, 10_000);
    }
}

#[tokio::test]
async fn answers_that_are_lost_after_sending_move_nothing_twice() {
    let stage = Stage::start(None).await;
    let (channel, key, token) = (&stage.channel, authorizer(&stage.channel), stage.chain.asset().address);
    let lost = |method: &str, index: u64| match (method, index) {
        (SEND | SEND_SYNC, _) => Fault::DropAfter,
        ("eth_getTransactionReceipt", 0..2) => Fault::DropBefore,
        _ => Fault::None,
    };
    let deposit = stage.sign(10_000).await;
    stage.fault(lost);
    assert_eq!(
        stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap().observed.state.balance,
        10_000
    );
    stage.fault(lost);
    assert_eq!(stage.channels.claim(&[channel.row(4_000, 3_000).await], &key).await.unwrap().amount, 3_000);
    stage.fault(lost);
    assert_eq!(stage.channels.settle(channel.config.receiver, token).await.unwrap().unwrap().amount, 3_000);
    stage.fault(lost);
    let refund = order(channel, 7_000, 0, Some(channel.row(4_000, 4_000).await));
    assert_eq!(stage.channels.refund(&refund, &key).await.unwrap().amount, 6_000);
    assert_eq!((stage.sent().await, channel.state(&stage.chain).await), (4, (4_000, 4_000)));
}

#[tokio::test]
async fn a_deposit_that_is_in_no_block_is_pending_and_found_later() {
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let deposit = stage.sign(10_000).await;
    stage.chain.devnet.stall(true);
    let config = &stage.channel.config;
    let pending = stage.channels.deposit(config, &stage.channel.voucher(1), &deposit).await;
    let Err(ChannelError::Pending { transaction: Some(transaction) }) = pending else { panic!("{pending:?}") };
    stage.chain.devnet.stall(false);
    stage.chain.receipt(transaction).await;
    let done = stage.channels.deposit(config, &stage.channel.voucher(1), &deposit).await.unwrap();
    assert_eq!((done.transaction, stage.sent().await), (transaction, 1));
    assert_eq!(stage.chain.balance(config.payer).await, 90_000);
}

/// The fees rise right after the transaction was sent, and after each of the first replacements.
#[tokio::test]
async fn a_transaction_that_hangs_is_replaced_at_higher_fees() {
    const RISES: usize = 7;
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let channels = builder(&stage.chain).signer(stage.key.clone()).in_flight(1).block_time(Duration::from_millis(50));
    let channels = channels.build().await.unwrap();
    let deposit = stage.sign(10_000).await;
    let (devnet, sends) = (stage.chain.devnet.clone(), Arc::new(Mutex::new(HashSet::new())));
    let sent = sends.clone();
    stage.chain.devnet.faults().set(move |call| {
        let mut sent = sent.lock().unwrap();
        if matches!(call.method, SEND | SEND_SYNC) && sent.insert(call.params[0].to_string()) && sent.len() <= RISES {
            devnet.set_base_fee(5_000_000 * 4u64.pow(sent.len() as u32));
        }
        Fault::None
    });
    let config = &stage.channel.config;
    let voucher = stage.channel.voucher(1);
    let done = until_known("the deposit is executed", async || channels.deposit(config, &voucher, &deposit).await);
    assert_eq!((done.await.unwrap().amount, stage.channel.state(&stage.chain).await), (10_000, (10_000, 0)));
    assert!(sends.lock().unwrap().len() > RISES, "it was replaced after each");
    assert_eq!(stage.chain.balance(config.payer).await, 90_000);
}

/// Deposits into channels, through a window with room for two of them or another one.
struct Narrow {
    stage: Stage,
    channels: OnchainChannels,
    funded: Vec<Channel>,
    deposits: Vec<Deposit>,
}

impl Narrow {
    async fn start(count: usize) -> Self {
        // The last place is for claims at risk.
        Self::with(count, |builder| builder.in_flight(3)).await
    }

    async fn with(count: usize, set: impl FnOnce(OnchainChannelsBuilder) -> OnchainChannelsBuilder) -> Self {
        let stage = Stage::start(Some(Duration::from_millis(50))).await;
        let narrow = set(builder(&stage.chain).signer(stage.key.clone()));
        let channels = narrow.confirm_timeout(Duration::from_secs(1)).build().await.unwrap();
        let (receiver, mut funded, mut deposits) = (stage.channel.config.receiver, Vec::new(), Vec::new());
        for _ in 0..count {
            let channel = Channel::funded(&stage.chain, receiver, &stage.channel.authorizer, 100_000).await;
            deposits.push(channel.sign_deposit(&stage.chain, 10_000, stage.chain.timestamp().await + 3_600).await);
            funded.push(channel);
        }
        Self { stage, channels, funded, deposits }
    }

    /// Makes a deposit, and returns its block.
    async fn made(&self, n: usize) -> u64 {
        let channel = &self.funded[n];
        let done = self.channels.deposit(&channel.config, &channel.voucher(1), &self.deposits[n]).await;
        done.unwrap().observed.block
    }

    /// Sends deposits while no blocks come.
    async fn waits(&self, ns: impl ExactSizeIterator<Item = usize>) {
        let count = ns.len();
        assert_eq!(self.wait_if_there_is_room(ns).await, count);
    }

    /// Sends deposits while no blocks come. Returns how many have a place in the window.
    async fn wait_if_there_is_room(&self, ns: impl Iterator<Item = usize>) -> usize {
        self.stage.chain.devnet.stall(true);
        let deposits = ns.map(async |n| {
            let channel = &self.funded[n];
            self.channels.deposit(&channel.config, &channel.voucher(1), &self.deposits[n]).await
        });
        let waiting = futures_util::future::join_all(deposits).await;
        waiting.iter().filter(|waits| matches!(waits, Err(ChannelError::Pending { transaction: Some(_) }))).count()
    }

    /// Removes the blocks from this one on, and their transactions.
    async fn removed(&self, block: u64, sent: u64) {
        let devnet = &self.stage.chain.devnet;
        devnet.reorg(devnet.block_number() + 1 - block, Orphans::Lost);
        assert_eq!(self.stage.sent().await, sent);
    }

    /// Lets blocks come until so many transactions are in them.
    async fn all_sent(&self, count: u64) {
        self.stage.chain.devnet.stall(false);
        eventually("all are in blocks", async || self.stage.sent().await == count).await;
    }

    async fn balance(&self, n: usize) -> u128 {
        self.funded[n].state(&self.stage.chain).await.0
    }
}

/// The window is full of transactions that wait for one that a reorganization removed.
#[tokio::test]
async fn a_reorganization_below_a_full_window_stops_nothing() {
    let narrow = Narrow::start(3).await;
    let block = narrow.made(0).await;
    narrow.waits(1..3).await;
    narrow.removed(block, 0).await;
    narrow.all_sent(3).await;
    assert_eq!([narrow.balance(0).await, narrow.balance(1).await, narrow.balance(2).await], [10_000; 3]);
}

/// While the window is full, one reorganization after another leaves a gap below the filler of the one before. The last one removes
/// fillers, too.
#[tokio::test]
async fn gaps_below_fillers_and_removed_fillers_are_filled() {
    let narrow = Narrow::start(5).await;
    let blocks = [narrow.made(0).await, narrow.made(1).await];
    narrow.waits(2..4).await;
    for (sent, block) in blocks.into_iter().enumerate().rev() {
        narrow.removed(block, sent as u64).await;
        eventually("the pool has all", async || narrow.stage.pending().await == 4).await;
    }
    narrow.all_sent(4).await;
    assert_eq!([narrow.balance(2).await, narrow.balance(3).await], [10_000, 10_000]);
    narrow.waits(4..5).await;
    narrow.removed(blocks[0], 0).await;
    narrow.all_sent(5).await;
    assert_eq!(narrow.balance(4).await, 10_000);
}

/// The node keeps no more than 16 of an account's transactions, but for the one with its next nonce.
#[tokio::test]
async fn gaps_below_a_full_window_are_all_filled_before_the_next_block() {
    let narrow = Narrow::with(24, |builder| builder).await;
    let made = futures_util::future::join_all((0..8).map(|n| narrow.made(n))).await;
    narrow.wait_if_there_is_room(8..24).await;
    // On a slow machine a request ends before it is told that its transaction was sent.
    let all = narrow.stage.pending().await;
    assert!(all > 8, "{all}");
    narrow.removed(*made.iter().min().unwrap(), 0).await;
    eventually("the pool has all", async || narrow.stage.pending().await == all).await;
}

#[tokio::test]
async fn no_more_transactions_wait_for_a_block_than_may() {
    for (in_flight, is_sent) in [(1, false), (2, false), (3, true)] {
        let stage = Stage::start(Some(Duration::from_millis(50))).await;
        let channels = builder(&stage.chain).signer(gas_key(&stage.chain).await).in_flight(in_flight);
        let channels = channels.block_time(Duration::from_secs(2)).confirm_timeout(Duration::from_millis(1_500));
        let channels = channels.build().await.unwrap();
        let deposits = [stage.sign(1_000).await, stage.sign(2_000).await];
        stage.chain.devnet.stall(true);
        let (config, voucher) = (&stage.channel.config, stage.channel.voucher(1));
        let first = channels.deposit(config, &voucher, &deposits[0]).await;
        assert!(matches!(first, Err(ChannelError::Pending { transaction: Some(_) })), "{first:?}");
        let second = channels.deposit(config, &voucher, &deposits[1]).await;
        let was_sent = matches!(second, Err(ChannelError::Pending { transaction: Some(_) }));
        assert_eq!(was_sent, is_sent, "{second:?}");
    }
}

/// Two deposits wait while the window is full, and their payers do not come back. Somebody else makes the second one meanwhile.
#[tokio::test]
async fn a_deposit_keeps_its_turn_when_its_payer_has_gone_and_is_not_made_if_somebody_else_made_it() {
    let narrow = Narrow::with(3, |builder| builder.in_flight(1)).await;
    narrow.waits(0..1).await;
    for n in [1, 2] {
        let (channel, deposit) = (&narrow.funded[n], &narrow.deposits[n]);
        let waiting = narrow.channels.deposit(&channel.config, &channel.voucher(1), deposit).await;
        assert!(matches!(waiting, Err(ChannelError::Pending { transaction: None })), "{waiting:?}");
    }
    let other = builder(&narrow.stage.chain).signer(gas_key(&narrow.stage.chain).await).build().await.unwrap();
    let (channel, deposit) = (&narrow.funded[2], &narrow.deposits[2]);
    let made = async { other.deposit(&channel.config, &channel.voucher(1), deposit).await.unwrap() };
    let calm = async { narrow.stage.chain.devnet.stall(false) };
    futures_util::future::join(made, calm).await;
    eventually("it was made in its turn", async || narrow.balance(1).await == 10_000).await;
    assert_eq!((narrow.balance(0).await, narrow.balance(2).await), (10_000, 10_000));
    // The one that waited longest has looked again, and found it made.
    let again = narrow.channels.deposit(&channel.config, &channel.voucher(1), deposit).await.unwrap();
    assert_eq!((again.amount, narrow.stage.sent().await), (10_000, 2));
}

#[tokio::test]
async fn nothing_is_sent_while_gas_costs_more_than_it_may() {
    let stage = Stage::start(None).await;
    let (channel, devnet) = (&stage.channel, &stage.chain.devnet);
    let channels = builder(&stage.chain).signer(stage.key.clone()).max_gas_price(10_000_000_000);
    let deposit = stage.sign(10_000).await;
    devnet.set_base_fee(20_000_000_000);
    let channels = channels.build().await.unwrap();
    let refused = channels.deposit(&channel.config, &channel.voucher(1), &deposit).await;
    assert!(is_unavailable(&refused), "{refused:?}");
    assert_eq!((stage.sent().await, channel.state(&stage.chain).await), (0, (0, 0)));
    // Prices are asked for again after a while.
    devnet.set_base_fee(1_000_000_000);
    let affordable = builder(&stage.chain).signer(stage.key.clone()).max_gas_price(10_000_000_000);
    let affordable = affordable.build().await.unwrap();
    affordable.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap();
    assert_eq!(stage.sent().await, 1);
}

#[tokio::test]
async fn a_nonce_that_somebody_else_took_is_no_failure() {
    let stage = Stage::start(None).await;
    let config = &stage.channel.config;
    stage.channels.deposit(config, &stage.channel.voucher(1), &stage.sign(1_000).await).await.unwrap();
    // The same key in another program: the next account nonce is used without our knowledge.
    let other = Relayer::of(&stage.chain.rpc_url(), stage.key.clone());
    assert!(
        send(&stage.chain, &other, &escrow::settleCall { receiver: config.receiver, token: config.token })
            .await
            .status()
    );
    let deposit = stage.sign(2_000).await;
    let done = until_known("the deposit is executed", async || {
        stage.channels.deposit(config, &stage.channel.voucher(1), &deposit).await
    });
    let done = done.await.unwrap();
    assert_eq!((done.observed.state.balance, stage.sent().await), (3_000, 3));
}

/// A node has seen its transaction, and whoever else has can make the call.
#[tokio::test]
async fn a_call_that_lost_its_nonce_and_cannot_be_sent_again_is_pending() {
    let stage = Stage::start(None).await;
    let config = &stage.channel.config;
    // So long that it is not why nothing is known at the end.
    let channels = builder(&stage.chain).signer(stage.key.clone()).confirm_timeout(Duration::from_secs(60));
    let channels = channels.build().await.unwrap();
    channels.deposit(config, &stage.channel.voucher(1), &stage.sign(1_000).await).await.unwrap();
    let other = Relayer::of(&stage.chain.rpc_url(), stage.key.clone());
    send(&stage.chain, &other, &escrow::settleCall { receiver: config.receiver, token: config.token }).await;
    let deposit = stage.sign(2_000).await;
    let is_sent = AtomicBool::new(false);
    stage.fault(move |method, _| match method {
        SEND | SEND_SYNC => {
            is_sent.store(true, Ordering::SeqCst);
            Fault::None
        }
        "eth_getTransactionReceipt" => Fault::None,
        _ if is_sent.load(Ordering::SeqCst) => Fault::Error { code: -32000, message: "later".into() },
        _ => Fault::None,
    });
    let result = channels.deposit(config, &stage.channel.voucher(1), &deposit).await;
    assert!(matches!(result, Err(ChannelError::Pending { .. })), "{result:?}");
}

/// The token is paused between the simulation and the transaction, and again before each further one.
#[tokio::test]
async fn transactions_that_revert_are_reported_with_their_code() {
    let stage = Stage::start(None).await;
    let (channel, key, token) = (&stage.channel, authorizer(&stage.channel), stage.chain.asset().address);
    stage.channels.deposit(&channel.config, &channel.voucher(1), &stage.sign(10_000).await).await.unwrap();
    stage.channels.claim(&[channel.row(3_000, 3_000).await], &key).await.unwrap();
    let pausing = || {
        let devnet = stage.chain.devnet.clone();
        stage.fault(move |method, _| {
            if matches!(method, SEND | SEND_SYNC) {
                devnet.administer(pauseCall {}.abi_encode()).unwrap();
            } else if method == "eth_estimateGas" {
                devnet.administer(unpauseCall {}.abi_encode()).unwrap();
            }
            Fault::None
        });
    };
    let deposit = stage.sign(5_000).await;
    pausing();
    assert_eq!(
        code(stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await),
        reason::DEPOSIT_TRANSACTION_FAILED
    );
    pausing();
    let settled = stage.channels.settle(channel.config.receiver, token).await;
    assert_eq!(code(settled), reason::SETTLE_TRANSACTION_FAILED);
    pausing();
    let refund = order(channel, 1_000, 0, Some(channel.row(4_000, 4_000).await));
    assert_eq!(code(stage.channels.refund(&refund, &key).await), reason::REFUND_TRANSACTION_FAILED);
    assert_eq!(channel.state(&stage.chain).await, (10_000, 3_000), "a claim reverts with its refund");
    assert_eq!(stage.sent().await, 2 + 3 * 2, "each was sent twice");
    stage.chain.devnet.faults().clear();
    stage.chain.devnet.administer(unpauseCall {}.abi_encode()).unwrap();

    // The payer whose deposits and refunds reverted has to wait, and no other.
    let sent = stage.sent().await;
    assert!(is_unavailable(&stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await));
    assert!(is_unavailable(&stage.channels.refund(&refund, &key).await));
    assert_eq!(stage.sent().await, sent, "no gas is spent on it");
    let other = Channel::funded(&stage.chain, channel.config.receiver, &channel.authorizer, 100_000).await;
    let theirs = other.sign_deposit(&stage.chain, 5_000, stage.chain.timestamp().await + 3_600).await;
    stage.channels.deposit(&other.config, &other.voucher(1), &theirs).await.unwrap();
    // What somebody else executed meanwhile is found.
    let relayer = stage.chain.relayer().await;
    assert!(send(&stage.chain, &relayer, &channel.deposit_call(&deposit)).await.status());
    let found = stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await;
    assert_eq!(found.unwrap().amount, 5_000);
}

/// The first transaction reverts because the token is paused, the last one because somebody else executes the same a moment before.
#[tokio::test]
async fn what_somebody_else_executed_before_the_last_attempt_is_found() {
    let stage = Stage::start(None).await;
    let channel = &stage.channel;
    let (deposit, key) = (stage.sign(10_000).await, authorizer(channel));
    let racing = |call: Vec<u8>| {
        let devnet = stage.chain.devnet.clone();
        let sends = AtomicU64::new(0);
        stage.fault(move |method, _| {
            if matches!(method, SEND | SEND_SYNC) {
                match sends.fetch_add(1, Ordering::Relaxed) {
                    0 => drop(devnet.administer(pauseCall {}.abi_encode()).unwrap()),
                    _ => drop(devnet.execute(Address::repeat_byte(9), Escrow::ADDRESS, call.clone())),
                }
            } else if method == "eth_estimateGas" {
                devnet.administer(unpauseCall {}.abi_encode()).unwrap();
            }
            Fault::None
        });
    };
    racing(channel.deposit_call(&deposit).abi_encode());
    let done = stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap();
    assert_eq!((done.amount, channel.state(&stage.chain).await, stage.sent().await), (10_000, (10_000, 0), 2));
    racing(refund_call(channel, 1_000, 0).abi_encode());
    let done = stage.channels.refund(&order(channel, 1_000, 0, None), &key).await.unwrap();
    assert_eq!((done.amount, channel.state(&stage.chain).await, stage.sent().await), (1_000, (9_000, 0), 4));
}

/// Copies of a deposit reach several processes, of which one executes it: the transactions of the others revert.
#[tokio::test]
async fn a_deposit_that_another_process_made_first_is_not_held_against_its_payer() {
    let stage = Stage::start(None).await;
    let channel = &stage.channel;
    for n in 1..=4 {
        let deposit = stage.sign(1_000).await;
        let (devnet, call) = (stage.chain.devnet.clone(), channel.deposit_call(&deposit).abi_encode());
        stage.fault(move |method, _| {
            if matches!(method, SEND | SEND_SYNC) {
                drop(devnet.execute(Address::repeat_byte(9), Escrow::ADDRESS, call.clone()));
            }
            Fault::None
        });
        let done = stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap();
        assert_eq!((done.amount, u64::try_from(channel.state(&stage.chain).await.0).unwrap()), (1_000, n * 1_000));
        assert_eq!(stage.sent().await, n, "each was sent, and reverted");
    }
}

/// Another process does it after this one has seen that it is not done, and before this one simulates it.
#[tokio::test]
async fn what_another_process_executed_before_the_simulation_is_found() {
    let stage = Stage::start(None).await;
    let (channel, deposit, key) = (&stage.channel, stage.sign(1_000).await, authorizer(&stage.channel));
    let racing = |call: Vec<u8>| {
        let devnet = stage.chain.devnet.clone();
        stage.fault(move |method, _| {
            if method == "eth_estimateGas" {
                drop(devnet.execute(Address::repeat_byte(9), Escrow::ADDRESS, call.clone()));
            }
            Fault::None
        });
    };
    racing(channel.deposit_call(&deposit).abi_encode());
    let done = stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap();
    assert_eq!((done.amount, channel.state(&stage.chain).await), (1_000, (1_000, 0)));
    racing(refund_call(channel, 400, 0).abi_encode());
    let done = stage.channels.refund(&order(channel, 400, 0, None), &key).await.unwrap();
    assert_eq!((done.amount, channel.state(&stage.chain).await), (400, (600, 0)));
    assert_eq!(stage.sent().await, 0);
}

/// The payer takes money out between the simulation and the transaction: the batch reverts, and is sent again without that row.
#[tokio::test]
async fn a_row_that_goes_bad_on_the_way_is_left_out_of_the_second_attempt() {
    let stage = Stage::start(None).await;
    let (relayer, channel) = (stage.chain.relayer().await, &stage.channel);
    let other = Channel::funded(&stage.chain, channel.config.receiver, &channel.authorizer, 100_000).await;
    channel.deposit(&stage.chain, &relayer, 10_000).await;
    other.deposit(&stage.chain, &relayer, 10_000).await;
    let rows = [channel.row(9_000, 9_000).await, other.row(9_000, 9_000).await];
    let refund = refund_call(channel, 5_000, 0).abi_encode();
    let devnet = stage.chain.devnet.clone();
    stage.fault(move |method, index| {
        if matches!(method, SEND | SEND_SYNC) && index == 0 {
            devnet.execute(relayer.address, Escrow::ADDRESS, refund.clone()).unwrap();
        }
        Fault::None
    });
    let claimed = stage.channels.claim(&rows, &authorizer(channel)).await.unwrap();
    assert_eq!((claimed.amount, claimed.transactions.len(), claimed.refused[0].index), (9_000, 1, 0));
    assert_eq!(claimed.refused[0].detail, "ClaimExceedsBalance");
    assert_eq!((channel.state(&stage.chain).await, other.state(&stage.chain).await), ((5_000, 0), (10_000, 9_000)));
}

/// A node that shows receipts without the contract's events.
#[derive(Clone)]
struct WithoutEvents(DevnetTransport);

impl Service<RequestPacket> for WithoutEvents {
    type Response = ResponsePacket;
    type Error = TransportError;
    type Future = TransportFut<'static>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, packet: RequestPacket) -> Self::Future {
        let answer = self.0.call(packet);
        Box::pin(async move {
            let mut answer = answer.await?;
            if let ResponsePacket::Single(response) = &mut answer
                && let ResponsePayload::Success(result) = &mut response.payload
                && let Ok(mut value) = serde_json::from_str::<serde_json::Value>(result.get())
                && value.get("logs").is_some()
            {
                value["logs"] = serde_json::json!([]);
                *result = to_raw_value(&value).expect("JSON");
            }
            Ok(answer)
        })
    }
}

#[tokio::test]
async fn a_success_without_the_contracts_event_is_not_believed() {
    let stage = Stage::start(None).await;
    let (channel, key, token) = (&stage.channel, authorizer(&stage.channel), stage.chain.asset().address);
    let liar = RpcClient::new(WithoutEvents(stage.chain.devnet.transport()), true);
    let through_liar = OnchainChannels::builder().network(Network::BASE_SEPOLIA).client(liar);
    let through_liar = through_liar.signer(gas_key(&stage.chain).await).build().await.unwrap();
    let is_pending =
        |result: Result<(), ChannelError>| matches!(result, Err(ChannelError::Pending { transaction: Some(_) }));
    let deposit = stage.sign(10_000).await;
    assert!(is_pending(through_liar.deposit(&channel.config, &channel.voucher(1), &deposit).await.map(drop)));
    let refund = order(channel, 1_000, 0, None);
    assert!(is_pending(through_liar.refund(&refund, &key).await.map(drop)));
    // Who asks a node that tells the truth finds both.
    assert_eq!(stage.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await.unwrap().amount, 10_000);
    assert_eq!(stage.channels.refund(&refund, &key).await.unwrap().amount, 1_000);
    // What was claimed and settled shows in the contract's state, too.
    let claimed = through_liar.claim(&[channel.row(2_000, 2_000).await], &key).await.unwrap();
    assert_eq!((claimed.amount, claimed.observed[0].state.total_claimed), (0, 2_000));
    assert_eq!(through_liar.settle(channel.config.receiver, token).await.unwrap(), None);
    assert_eq!(stage.chain.balance(channel.config.receiver).await, 2_000);
}

/// A process of its own, which ends with its call under way.
async fn in_a_process_that_dies<T: Send + 'static>(
    stage: &Stage,
    call: impl AsyncFnOnce(OnchainChannels) -> T + Send + 'static,
) -> T {
    let settings = builder(&stage.chain).signer(stage.key.clone()).confirm_timeout(Duration::from_secs(1));
    let process = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let result = runtime.block_on(async { call(settings.build().await.unwrap()).await });
        runtime.shutdown_background();
        result
    };
    tokio::task::spawn_blocking(process).await.unwrap()
}

/// The deposit and the claim of a process that was killed are in the pool and in no block yet when the next process asks for the same:
/// with the same key, or with another.
#[tokio::test]
async fn what_a_dead_process_left_in_the_pool_is_found_and_not_paid_twice() {
    for same_key in [true, false] {
        let stage = Stage::start(Some(Duration::from_millis(50))).await;
        let (channel, deposit, token) = (&stage.channel, stage.sign(10_000).await, stage.chain.asset().address);
        let rows = vec![channel.row(4_000, 3_000).await];
        let authorizer = authorizer(channel);
        let is_pending = |result: &Result<(), ChannelError>| {
            assert!(matches!(result, Err(ChannelError::Pending { .. })), "{result:?}");
        };
        let key = if same_key { stage.key.clone() } else { gas_key(&stage.chain).await };
        let restart = || builder(&stage.chain).signer(key.clone()).confirm_timeout(Duration::from_secs(1)).build();

        stage.chain.devnet.stall(true);
        let (config, sent, voucher) = (channel.config, deposit.clone(), channel.voucher(1));
        let copy = voucher.clone();
        let run = async move |it: OnchainChannels| it.deposit(&config, &copy, &sent).await.map(drop);
        is_pending(&in_a_process_that_dies(&stage, run).await);
        let next = restart().await.unwrap();
        is_pending(&next.deposit(&config, &voucher, &deposit).await.map(drop));
        stage.chain.devnet.stall(false);
        let done = until_known("the deposit is found", async || next.deposit(&config, &voucher, &deposit).await);
        let done = done.await.unwrap();
        assert!(stage.chain.receipt(done.transaction).await.status());
        assert_eq!(stage.chain.balance(config.payer).await, 90_000);

        stage.chain.devnet.stall(true);
        let (claimed, by) = (rows.clone(), authorizer.clone());
        is_pending(&in_a_process_that_dies(&stage, async move |it| it.claim(&claimed, &by).await.map(drop)).await);
        let next = restart().await.unwrap();
        is_pending(&next.claim(&rows, &authorizer).await.map(drop));
        stage.chain.devnet.stall(false);
        let claimed = until_known("the claim is found", async || next.claim(&rows, &authorizer).await);
        let claimed = claimed.await.unwrap();
        assert_eq!(claimed.observed[0].state.total_claimed, 3_000);
        let settled = until_known("it is transferred", async || next.settle(config.receiver, token).await);
        let settled = settled.await.unwrap();
        assert_eq!(settled.map_or(3_000, |settled| settled.amount), 3_000);
        assert_eq!(stage.chain.balance(config.receiver).await, 3_000);
        assert_eq!(channel.state(&stage.chain).await, (10_000, 3_000));
    }
}

/// A clock that runs thirty times as fast.
#[derive(Debug)]
struct Fast(Instant, u64);

impl Clock for Fast {
    fn now(&self) -> u64 {
        self.1 + 30 * self.0.elapsed().as_secs()
    }
}

/// The fees rise right after a process sent a deposit and died. The same deposit, from the next process, waits behind it.
#[tokio::test]
async fn a_hanging_transaction_of_a_dead_process_is_replaced() {
    let stage = Stage::start(Some(Duration::from_millis(50))).await;
    let (config, voucher, deposit) = (stage.channel.config, stage.channel.voucher(1), stage.sign(10_000).await);
    let devnet = stage.chain.devnet.clone();
    stage.fault(move |method, _| {
        if matches!(method, SEND | SEND_SYNC) {
            devnet.set_base_fee(500_000_000_000);
        }
        Fault::None
    });
    let (sent, copy) = (deposit.clone(), voucher.clone());
    let run = async move |it: OnchainChannels| it.deposit(&config, &copy, &sent).await.map(drop);
    let pending = in_a_process_that_dies(&stage, run).await;
    assert!(matches!(pending, Err(ChannelError::Pending { .. })), "{pending:?}");
    stage.chain.devnet.faults().clear();
    // After a minute a nonce may be given to another transaction.
    let next = builder(&stage.chain).signer(stage.key.clone()).block_time(Duration::from_millis(50));
    let next = next.clock(Arc::new(Fast(Instant::now(), unix_now()))).max_block_age(Duration::from_secs(3_600));
    let next = next.build().await.unwrap();
    let done = until_known("the deposit is executed", async || next.deposit(&config, &voucher, &deposit).await);
    assert_eq!(done.await.unwrap().amount, 10_000);
    assert_eq!((stage.chain.balance(config.payer).await, stage.sent().await), (90_000, 2));
}

#[tokio::test]
async fn a_large_deposit_counts_when_enough_blocks_are_on_top_of_it() {
    let stage = Stage::start(None).await;
    let channels = builder(&stage.chain).signer(gas_key(&stage.chain).await).confirmations(5_000, 3);
    let channels = channels.block_time(Duration::from_millis(50)).confirm_timeout(Duration::from_secs(1));
    let channels = channels.build().await.unwrap();
    let (config, voucher) = (&stage.channel.config, &stage.channel.voucher(1));
    assert_eq!(channels.deposit(config, voucher, &stage.sign(4_999).await).await.unwrap().amount, 4_999, "at once");

    // No block comes after it, and then it is removed.
    let deposit = stage.sign(5_000).await;
    for _ in 0..2 {
        let pending = channels.deposit(config, voucher, &deposit).await;
        assert!(matches!(pending, Err(ChannelError::Pending { transaction: Some(_) })), "{pending:?}");
    }
    assert_eq!(stage.channel.state(&stage.chain).await, (9_999, 0));
    stage.chain.devnet.reorg(1, Orphans::Lost);
    assert_eq!(stage.channel.state(&stage.chain).await, (4_999, 0));
    let done = in_time("it is made again and has blocks on top", async {
        loop {
            match channels.deposit(config, voucher, &deposit).await {
                Err(ChannelError::Pending { .. }) => (0..3).for_each(|_| stage.chain.devnet.mine()),
                other => return other,
            }
        }
    })
    .await
    .unwrap();
    let block = stage.chain.receipt(done.transaction).await.block_number.unwrap();
    assert_eq!(block + 3, stage.chain.block_number().await, "as many as it needs are enough");
    assert_eq!(
        (stage.channel.state(&stage.chain).await, stage.chain.balance(config.payer).await),
        ((9_999, 0), 90_001)
    );
}
