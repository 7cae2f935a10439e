//! How long payment channels wait, on virtual time: for a node's reads, for a transaction that hangs, and after refunds that reverted.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, address};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use support::{
    authorization::unix_now,
    devnet::DevnetChain,
    escrow::{Channel, claim_call},
};
use tokio::time::{Instant, sleep};
use tower_x402::{
    Clock as _, ManualClock, Network, Usdc,
    channels::{Channels, ClaimPolicy},
    facilitator::channels::{ChannelFacilitator as _, OnchainChannels, OnchainChannelsBuilder},
    ledger::{
        MemoryLedger,
        channels::{ChannelLedger as _, ChannelStep},
    },
    vouchers::{AuthorizerKey, Claim, Escrow},
};
use x402_devnet::Fault;

use super::{
    faults::{SEND, SEND_SYNC, pauseCall, unpauseCall},
    gas_key, order,
};

const RECEIVER: Address = address!("00000000000000000000000000000000000bacc0");
const DAY: u64 = 86_400;

/// A chain in this process, without a connection: time passes only where somebody waits for it.
struct Stage {
    chain: DevnetChain,
    channels: OnchainChannels,
    authorizer: PrivateKeySigner,
}

impl Stage {
    async fn open(settings: impl FnOnce(OnchainChannelsBuilder) -> OnchainChannelsBuilder) -> Self {
        let chain = DevnetChain::start(None).await;
        let channels = OnchainChannels::builder().network(Network::BASE_SEPOLIA).client(chain.devnet.rpc_client());
        let channels = settings(channels.signer(gas_key(&chain).await)).build().await.unwrap();
        Self { chain, channels, authorizer: PrivateKeySigner::random() }
    }

    /// A channel that is not filled yet.
    async fn channel(&self) -> Channel {
        Channel::funded(&self.chain, RECEIVER, &self.authorizer, 100_000).await
    }

    /// Deposits into a channel. Returns what is in it then.
    async fn deposit(&self, channel: &Channel) -> u128 {
        let deposit = channel.sign_deposit(&self.chain, 10_000, unix_now() + 3_600).await;
        let done = self.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await;
        done.unwrap().observed.state.balance
    }

    fn key(&self) -> AuthorizerKey {
        AuthorizerKey::new(self.authorizer.clone())
    }

    /// Has each new transaction's time noted. If `is_paused`, the token is paused in the transactions, and not in their simulations.
    fn sent(&self, is_paused: bool) -> impl Fn() -> Vec<Duration> {
        let (devnet, begun) = (self.chain.devnet.clone(), Instant::now());
        let sent = Arc::new(Mutex::new(Vec::<(String, Duration)>::new()));
        let log = sent.clone();
        self.chain.devnet.faults().set(move |call| {
            let mut log = log.lock().unwrap();
            match call.method {
                SEND | SEND_SYNC => {
                    let raw = call.params[0].to_string();
                    if log.iter().all(|(other, _)| *other != raw) {
                        log.push((raw, begun.elapsed()));
                    }
                    if is_paused {
                        devnet.administer(pauseCall {}.abi_encode()).unwrap();
                    }
                }
                "eth_estimateGas" if is_paused => drop(devnet.administer(unpauseCall {}.abi_encode()).unwrap()),
                _ => {}
            }
            Fault::None
        });
        move || sent.lock().unwrap().iter().map(|(_, at)| *at).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_node_does_not_show_is_taken_from_the_events() {
    let stage = Stage::open(|channels| channels).await;
    let [channel, other, third] = [stage.channel().await, stage.channel().await, stage.channel().await];
    stage.deposit(&other).await;
    stage.deposit(&third).await;
    // The node answers no reads once the transaction is sent.
    let reads = Arc::new(AtomicU64::new(0));
    let unseen = || {
        let (is_sent, reads) = (AtomicBool::new(false), reads.clone());
        stage.chain.devnet.faults().set(move |call| match call.method {
            SEND | SEND_SYNC => {
                is_sent.store(true, Ordering::Relaxed);
                Fault::None
            }
            "eth_call" if is_sent.load(Ordering::Relaxed) => {
                reads.fetch_add(1, Ordering::Relaxed);
                Fault::DropBefore
            }
            _ => Fault::None,
        });
    };
    unseen();
    assert_eq!(stage.deposit(&channel).await, 10_000);
    assert_eq!(reads.load(Ordering::Relaxed), 8, "it is asked often enough");

    // One of the rows was claimed before. The others share a transaction.
    stage.chain.devnet.faults().clear();
    let rows = [other.row(3_000, 3_000).await, channel.row(2_000, 2_000).await, third.row(1_000, 1_000).await];
    let claim = |rows: &[Claim]| claim_call(rows, &stage.authorizer).abi_encode();
    stage.chain.devnet.execute(Address::repeat_byte(9), Escrow::ADDRESS, claim(&rows[..1])).unwrap();
    unseen();
    let claimed = stage.channels.claim(&rows, &stage.key()).await.unwrap();
    let totals: Vec<_> = claimed.observed.iter().map(|seen| seen.state.total_claimed).collect();
    assert_eq!((claimed.amount, totals), (3_000, vec![3_000, 2_000, 1_000]));

    // A refund with a claim, and one whose claim was made before.
    let claim = channel.row(4_000, 4_000).await;
    for (nonce, balance) in [(0, 9_900), (1, 9_800)] {
        unseen();
        let order = order(&channel, 100, nonce, Some(claim.clone()));
        let after = stage.channels.refund(&order, &stage.key()).await.unwrap().observed.state;
        assert_eq!((after.balance, after.total_claimed, after.refund_nonce), (balance, 4_000, nonce + 1));
    }
    assert_eq!(reads.load(Ordering::Relaxed), 4 * 8, "no answer was got");
}

/// The node waits for the transaction's block, for three blocks and six seconds at most. After three blocks more it is replaced.
#[tokio::test(start_paused = true)]
async fn a_transaction_that_hangs_is_replaced_after_blocks_of_the_time_that_is_set() {
    for (block_time, replaced) in [(1, 3 + 3), (10, 6 + 30)] {
        let timeouts = |channels: OnchainChannelsBuilder| {
            let minute = Duration::from_secs(60);
            channels.block_time(Duration::from_secs(block_time)).confirm_timeout(minute).rpc_timeout(minute)
        };
        let stage = Stage::open(timeouts).await;
        let channel = stage.channel().await;
        let sent = stage.sent(false);
        stage.chain.devnet.stall(true);
        let until_it_is_replaced = async {
            while sent().len() < 2 {
                sleep(Duration::from_millis(100)).await;
            }
            stage.chain.devnet.stall(false);
        };
        let (balance, ()) = tokio::join!(stage.deposit(&channel), until_it_is_replaced);
        let seconds: Vec<_> = sent().iter().map(Duration::as_secs).collect();
        assert_eq!((balance, seconds), (10_000, vec![0, replaced]), "blocks of {block_time} s");
    }
}

/// The token is paused between the simulation and the transaction, again and again.
#[tokio::test(start_paused = true)]
async fn refunds_of_an_idle_channel_that_revert_are_tried_more_and_more_rarely() {
    let stage = Stage::open(|channels| channels).await;
    let (ledger, clock) = (Arc::new(MemoryLedger::new()), Arc::new(ManualClock::at(unix_now())));
    // A channel of which a tenth was charged, and that nobody used for a day.
    let idle = async |channel: &Channel| {
        stage.deposit(channel).await;
        let (id, now) = (channel.id(), clock.now());
        let observation = stage.channels.observe(&[id]).await.unwrap()[0];
        let (voucher, network) = (channel.voucher(1_000), Network::BASE_SEPOLIA);
        for step in [
            ChannelStep::Open { network, config: channel.config, observation, now },
            ChannelStep::Begin { request: B256::ZERO, name: None, voucher, price: 1_000, now, until: now + 60 },
            ChannelStep::Charge { epoch: 1, amount: 1_000, response: None, now },
        ] {
            ledger.advance(&id, &step).await.unwrap();
        }
        clock.advance(DAY);
    };
    let left = async |channel: &Channel| ledger.channel(&channel.id()).await.unwrap().unwrap().observed.state.balance;
    let first = stage.channel().await;
    idle(&first).await;

    let sent = stage.sent(true);
    // Nothing is claimed alone.
    let policy = ClaimPolicy::default().amount(Usdc::MAX).age(Duration::from_secs(u64::MAX >> 1));
    let channels = Channels::builder(stage.channels.clone(), stage.key())
        .ledger(ledger.clone())
        .clock(clock.clone())
        .claims(policy.refund_idle(Duration::from_secs(DAY), Usdc::from_atomic(1)))
        .build()
        .unwrap();
    sleep(Duration::from_secs(3_000)).await;
    // Each is sent twice.
    let tries = [0, 30, 150, 630, 2_550];
    assert_eq!(sent().iter().map(Duration::as_secs).collect::<Vec<_>>(), tries.map(|at| [at; 2]).concat());
    assert_eq!(left(&first).await, 10_000);

    // Other channels do not wait for it, whatever their place in the books.
    stage.chain.devnet.faults().clear();
    stage.chain.devnet.administer(unpauseCall {}.abi_encode()).unwrap();
    let mut second = stage.channel().await;
    while second.id() < first.id() {
        second = stage.channel().await;
    }
    idle(&second).await;
    sleep(Duration::from_secs(31)).await;
    assert_eq!((left(&first).await, left(&second).await), (10_000, 1_000));
    sleep(Duration::from_secs(3_600)).await;
    assert_eq!(left(&first).await, 1_000, "it is tried again within an hour");
    drop(channels);
}
