//! In which order channels are claimed, and what holds up what, on virtual time.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use support::{
    authorization::unix_now,
    escrow::Channel,
    eventually::{eventually, in_time},
};
use tower_x402::{
    Clock, ManualClock, Network, Usdc,
    channels::{Channels, ClaimPolicy},
    facilitator::{
        NotReady,
        channels::{ChannelError, ChannelFacilitator, Claimed, Executed, RefusedClaim, Settled, SignedRefund},
    },
    ledger::{
        MemoryLedger,
        channels::{ChannelLedger as _, ChannelStep},
    },
    vouchers::{AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, ChannelState, Claim, Deposit, Voucher},
};

const DEPOSIT: u128 = 10_000;
const CHARGED: u128 = 1_000;

/// Channels whose claims hang, but for those that are withdrawn.
#[derive(Clone, Debug, Default)]
struct Hanging(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    withdrawn: HashSet<ChannelId>,
    /// The rows of each call.
    claims: Vec<Vec<ChannelId>>,
    claimed: HashMap<ChannelId, u128>,
    answers: bool,
    /// How many claims panic first.
    panics: u32,
    /// How long a claim takes.
    takes: Duration,
    /// What the contract would refuse to claim.
    refused: HashSet<ChannelId>,
    /// What is never claimed, although it is withdrawn.
    stuck: HashSet<ChannelId>,
}

impl Hanging {
    fn observation(&self, id: ChannelId) -> ChannelObservation {
        let state = self.0.lock().unwrap();
        let withdrawal = if state.withdrawn.contains(&id) { DEPOSIT } else { 0 };
        let total_claimed = state.claimed.get(&id).copied().unwrap_or(0);
        ChannelObservation {
            state: ChannelState {
                channel_id: id,
                balance: DEPOSIT,
                total_claimed,
                withdraw_requested_at: u64::from(withdrawal > 0),
                refund_nonce: 0,
                charged_cumulative_amount: None,
            },
            withdrawal,
            block: 1,
            time: unix_now(),
        }
    }

    fn claims(&self) -> Vec<Vec<ChannelId>> {
        self.0.lock().unwrap().claims.clone()
    }
}

#[async_trait]
impl ChannelFacilitator for Hanging {
    fn network(&self) -> Network {
        Network::BASE_SEPOLIA
    }

    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError> {
        Ok(channels.iter().map(|id| self.observation(*id)).collect())
    }

    async fn verify_deposit(&self, _: &ChannelConfig, _: &Deposit) -> Result<ChannelObservation, ChannelError> {
        unreachable!("nothing is deposited")
    }

    async fn deposit(&self, _: &ChannelConfig, _: &Voucher, _: &Deposit) -> Result<Executed, ChannelError> {
        unreachable!("nothing is deposited")
    }

    async fn claim(&self, claims: &[Claim], _: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        let ids: Vec<ChannelId> =
            claims.iter().map(|claim| Channel::escrow().channel_id(&claim.voucher.channel)).collect();
        let (is_answered, takes) = {
            let mut state = self.0.lock().unwrap();
            state.claims.push(ids.clone());
            if let Some(left) = state.panics.checked_sub(1) {
                state.panics = left;
                drop(state);
                panic!("a claim panics, on purpose");
            }
            let is_answered = |id| state.withdrawn.contains(id) && !state.stuck.contains(id);
            (state.answers || ids.iter().all(is_answered), state.takes)
        };
        tokio::time::sleep(takes).await;
        if !is_answered {
            std::future::pending::<()>().await;
        }
        let bad = self.0.lock().unwrap().refused.clone();
        let (mut amount, mut observed, mut refused) = (0, Vec::new(), Vec::new());
        for (index, (channel, claim)) in ids.into_iter().zip(claims).enumerate() {
            if bad.contains(&channel) {
                refused.push(RefusedClaim { index, channel, detail: "ClaimExceedsBalance".into() });
                continue;
            }
            self.0.lock().unwrap().claimed.insert(channel, claim.total_claimed);
            amount += claim.total_claimed;
            observed.push(self.observation(channel));
        }
        Ok(Claimed { transactions: vec![B256::ZERO], amount, observed, refused })
    }

    async fn claim_signed(&self, _: &[Claim], _: &Bytes) -> Result<Claimed, ChannelError> {
        unreachable!("the seller signs itself")
    }

    async fn settle(&self, _: Address, _: Address) -> Result<Option<Settled>, ChannelError> {
        Ok(None)
    }

    async fn refund_signed(&self, _: &SignedRefund) -> Result<Executed, ChannelError> {
        unreachable!("nothing is refunded")
    }
}

struct Stage {
    contract: Hanging,
    ledger: Arc<MemoryLedger>,
    clock: Arc<ManualClock>,
    authorizer: PrivateKeySigner,
    voucher: Voucher,
    config: ChannelConfig,
}

impl Stage {
    fn open() -> Self {
        let authorizer = PrivateKeySigner::random();
        let config = ChannelConfig {
            payer: Address::repeat_byte(1),
            payer_authorizer: Address::repeat_byte(2),
            receiver: Address::repeat_byte(3),
            receiver_authorizer: authorizer.address(),
            token: Network::BASE_SEPOLIA.usdc().unwrap().address,
            withdraw_delay: 900,
            salt: B256::ZERO,
        };
        let any = PrivateKeySigner::random();
        let channel = Channel { config, payer: any.clone(), voucher_key: any, authorizer: authorizer.clone() };
        let (contract, ledger) = (Hanging::default(), Arc::new(MemoryLedger::new()));
        let clock = Arc::new(ManualClock::at(unix_now()));
        Self { contract, ledger, clock, authorizer, voucher: channel.voucher(CHARGED), config }
    }

    /// Charges something on so many channels, one second after the other. Returns them in that order.
    async fn charged(&self, count: usize) -> Vec<ChannelId> {
        self.charged_each(std::iter::repeat_n(CHARGED, count)).await
    }

    /// The same, with these amounts.
    async fn charged_each(&self, amounts: impl Iterator<Item = u128>) -> Vec<ChannelId> {
        let mut ids = Vec::new();
        for (n, amount) in amounts.enumerate() {
            let config = ChannelConfig { salt: U256::from(n).into(), ..self.config };
            let id = Channel::escrow().channel_id(&config);
            self.clock.advance(1);
            let (network, now) = (Network::BASE_SEPOLIA, self.clock.now());
            let voucher = Voucher { channel_id: id, max_claimable_amount: amount, ..self.voucher.clone() };
            for step in [
                ChannelStep::Open { network, config, observation: self.contract.observation(id), now },
                ChannelStep::Begin { request: B256::ZERO, name: None, voucher, price: amount, now, until: now + 60 },
                ChannelStep::Charge { epoch: 1, amount, response: None, now },
            ] {
                self.ledger.advance(&id, &step).await.unwrap();
            }
            ids.push(id);
        }
        ids
    }

    fn channels(&self, policy: ClaimPolicy) -> Channels {
        Channels::builder(self.contract.clone(), AuthorizerKey::new(self.authorizer.clone()))
            .ledger(self.ledger.clone())
            .clock(self.clock.clone())
            .claims(policy)
            .build()
            .unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_at_risk_is_claimed_at_once_while_all_other_claims_hang() {
    let stage = Stage::open();
    let ids = stage.charged(950).await;
    let _channels = stage.channels(ClaimPolicy::default().amount(Usdc::from_atomic(1)));
    in_time("claims are made side by side", async {
        while stage.contract.claims().len() < 8 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    // Two payers withdraw. The claim of one of them hangs already, the other's was not made yet.
    let (first, last) = (ids[0], ids[949]);
    stage.contract.0.lock().unwrap().withdrawn.extend([first, last]);
    stage.clock.advance(150);
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(stage.contract.claims()[8..], [vec![last]], "the next look finds it");
    assert_eq!(stage.ledger.channel(&last).await.unwrap().unwrap().unclaimed(), 0);
    // The one that waits among others is claimed alone, sooner than its lease ends.
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(stage.contract.claims()[9..], [vec![first]]);
    assert_eq!(stage.ledger.channel(&first).await.unwrap().unwrap().unclaimed(), 0);
}

/// A clock that panics when it is asked for the first time.
#[derive(Debug)]
struct Panicking(Arc<ManualClock>, AtomicBool);

impl Clock for Panicking {
    fn now(&self) -> u64 {
        assert!(self.1.swap(true, Ordering::SeqCst), "a look panics, on purpose");
        self.0.now()
    }
}

#[tokio::test(start_paused = true)]
async fn looks_and_claims_that_panic_are_made_again() {
    let stage = Stage::open();
    let id = stage.charged(1).await[0];
    {
        let mut state = stage.contract.0.lock().unwrap();
        (state.panics, state.answers) = (1, true);
        state.withdrawn.insert(id);
    }
    stage.clock.advance(300);
    let _channels = Channels::builder(stage.contract.clone(), AuthorizerKey::new(stage.authorizer.clone()))
        .ledger(stage.ledger.clone())
        .clock(Arc::new(Panicking(stage.clock.clone(), AtomicBool::new(false))))
        .build()
        .unwrap();
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert!(stage.contract.claims().is_empty(), "the first look panicked");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(stage.contract.claims(), [[id]], "and the first claim");
    // Its lease is still there: the third try is made anyhow.
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(stage.contract.claims(), [[id], [id]]);
    assert_eq!(stage.ledger.channel(&id).await.unwrap().unwrap().unclaimed(), 0);
}

/// A request had begun when the withdrawal was noticed, and is charged while the claim is under way.
#[tokio::test(start_paused = true)]
async fn what_is_charged_while_a_claim_is_made_is_claimed_right_after_it() {
    let stage = Stage::open();
    let id = stage.charged(1).await[0];
    let voucher = Voucher { channel_id: id, max_claimable_amount: 2 * CHARGED, ..stage.voucher.clone() };
    let (request, now) = (B256::repeat_byte(1), stage.clock.now());
    let begin = ChannelStep::Begin { request, name: None, voucher, price: CHARGED, now, until: now + 600 };
    let epoch = stage.ledger.advance(&id, &begin).await.unwrap().epoch;
    {
        let mut state = stage.contract.0.lock().unwrap();
        state.withdrawn.insert(id);
        state.takes = Duration::from_secs(4);
    }
    stage.clock.advance(150);
    let _channels = stage.channels(ClaimPolicy::default());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(stage.contract.claims(), [[id]], "the withdrawal is noticed");
    let charge = ChannelStep::Charge { epoch, amount: CHARGED, response: None, now: stage.clock.now() };
    stage.ledger.advance(&id, &charge).await.unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(stage.contract.claims(), [[id], [id]]);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(stage.ledger.channel(&id).await.unwrap().unwrap().unclaimed(), 0);
}

#[tokio::test(start_paused = true)]
async fn claim_at_risk_that_hangs_holds_up_no_other() {
    let stage = Stage::open();
    let ids = stage.charged(2).await;
    {
        let mut state = stage.contract.0.lock().unwrap();
        state.withdrawn.insert(ids[0]);
        state.stuck.insert(ids[0]);
    }
    stage.clock.advance(150);
    let _channels = stage.channels(ClaimPolicy::default());
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(stage.contract.claims(), [[ids[0]]]);
    stage.contract.0.lock().unwrap().withdrawn.insert(ids[1]);
    stage.clock.advance(150);
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(stage.contract.claims(), [[ids[0]], [ids[1]]]);
    assert_eq!(stage.ledger.channel(&ids[1]).await.unwrap().unwrap().unclaimed(), 0);
}

/// The contract would refuse the claim of one of two withdrawn channels.
#[tokio::test(start_paused = true)]
async fn claim_at_risk_that_is_left_out_of_its_batch_makes_its_seller_unready_and_is_tried_again() {
    let stage = Stage::open();
    let ids = stage.charged(2).await;
    {
        let mut state = stage.contract.0.lock().unwrap();
        state.withdrawn.extend(&ids);
        state.refused.insert(ids[1]);
    }
    stage.clock.advance(150);
    let channels = stage.channels(ClaimPolicy::default());
    tokio::time::sleep(Duration::from_secs(5)).await;
    let unclaimed = async |n: usize| stage.ledger.channel(&ids[n]).await.unwrap().unwrap().unclaimed();
    assert_eq!((unclaimed(0).await, unclaimed(1).await), (0, CHARGED));
    assert_eq!(channels.readiness().await.reasons, [NotReady::ClaimsFail { units: CHARGED }]);
    stage.contract.0.lock().unwrap().refused.clear();
    tokio::time::sleep(Duration::from_secs(12)).await;
    assert_eq!(unclaimed(1).await, 0, "sooner than the next look finds it");
    assert!(channels.readiness().await.is_ready());
}

/// More payers withdraw at once than can be claimed side by side.
#[tokio::test(start_paused = true)]
async fn what_is_at_risk_and_has_to_wait_is_claimed_in_the_order_of_the_amounts() {
    let stage = Stage::open();
    let ids = stage.charged_each(1..=1_200).await;
    {
        let mut state = stage.contract.0.lock().unwrap();
        state.withdrawn.extend(&ids);
        state.takes = Duration::from_secs(5);
    }
    stage.clock.advance(150);
    let _channels = stage.channels(ClaimPolicy::default());
    eventually("all are claimed", async || stage.contract.0.lock().unwrap().claimed.len() == ids.len()).await;
    let amounts: HashMap<ChannelId, u128> = ids.into_iter().zip(1..).collect();
    // The first ones are made as they are found.
    let waited: Vec<Vec<u128>> =
        stage.contract.claims()[8..].iter().map(|batch| batch.iter().map(|id| amounts[id]).collect()).collect();
    assert!(waited.len() >= 3, "{} waited", waited.len());
    for pair in waited.windows(2) {
        assert!(pair[0].iter().min() > pair[1].iter().max(), "{waited:?}");
    }
}

/// Payers choose the ids of their channels.
#[tokio::test(start_paused = true)]
async fn claims_are_made_in_the_order_in_which_the_charges_were_made_whatever_the_ids() {
    let stage = Stage::open();
    stage.contract.0.lock().unwrap().answers = true;
    let ids = stage.charged(1_000).await;
    let _channels = stage.channels(ClaimPolicy::default().amount(Usdc::from_atomic(1)));
    eventually("all are claimed", async || stage.contract.claims().len() == 10).await;
    let order: Vec<ChannelId> = stage.contract.claims().concat();
    assert_eq!(order, ids);
}
