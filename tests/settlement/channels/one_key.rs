//! One gas key for payments and payment channels: one line, nonces without gaps, one journal, and gas that is kept for claims.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use alloy_consensus::{SignableTransaction as _, Transaction as _, TxEip1559, TxEnvelope};
use alloy_eips::Encodable2718 as _;
use alloy_network::TxSignerSync as _;
use alloy_primitives::{Address, B256, TxKind, U256, address};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use futures_util::future::join_all;
use support::{
    devnet::DevnetChain,
    engine_stage::{Stage, new_key, paid_by, settlement_key},
    escrow::{Channel, claim_call},
    eventually::{eventually, in_time},
    faulty_ledger::{self, How, faulty},
};
use tower_x402::{
    Clock as _, ManualClock, Network,
    channels::Channels,
    facilitator::{
        Facilitator as _, FacilitatorError, OnchainBuildError, OnchainFacilitator, OnchainFacilitatorBuilder,
        VerifyError,
        channels::{ChannelError, ChannelFacilitator as _, OnchainChannels, RefundOrder},
    },
    ledger::{
        JournaledTransaction, Ledger, MemoryLedger, ResponseLimits, Sender,
        channels::{ChannelLedger, ChannelStep},
    },
    payment::{Prechecked, SettlementOutcome, Verified},
    vouchers::{AuthorizerKey, Deposit, Escrow, abi::BatchSettlement as escrow, reason},
};
use x402_devnet::{BlockTime, DevnetBuilder, Fault, Orphans};

const RECEIVER: Address = address!("00000000000000000000000000000000000bacc1");
const BLOCKS: Duration = Duration::from_millis(50);
/// The pause between two passes of reconciliation.
const PASS: Duration = Duration::from_millis(100);
/// How long a transaction may take that is not to hang.
const PATIENCE: Duration = Duration::from_secs(30);
/// The blocks on top of one that is final: more than any test has.
const FINALITY: u64 = 100_000;

/// A facilitator whose key sends for channels, too.
struct OneKey {
    stage: Stage,
    chain: DevnetChain,
    channels: OnchainChannels,
    authorizer: PrivateKeySigner,
}

impl OneKey {
    async fn start(set: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder) -> Self {
        Self::with_finality(FINALITY, set).await
    }

    async fn with_finality(
        blocks: u64,
        set: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
    ) -> Self {
        let clock = Arc::new(ManualClock::at(1_800_000_000));
        Self::over(memory(&clock), clock, blocks, set).await
    }

    async fn over(
        ledger: Arc<dyn Ledger>,
        clock: Arc<ManualClock>,
        blocks: u64,
        set: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
    ) -> Self {
        let devnet = |devnet: DevnetBuilder| devnet.block_time(BlockTime::Every(BLOCKS)).finality_depth(blocks);
        let set = |builder: OnchainFacilitatorBuilder| {
            let builder = builder.signer(settlement_key());
            set(builder.block_time(BLOCKS).reconcile_interval(PASS).confirm_timeout(PATIENCE))
        };
        let stage = Stage::build(clock, ledger, devnet, set).await;
        let chain = DevnetChain::of(stage.devnet.clone()).await;
        let channels = OnchainChannels::builder().facilitator(&stage.facilitator).build().await.unwrap();
        Self { stage, chain, channels, authorizer: new_key() }
    }

    /// The next process with the same key and the same ledger.
    async fn restarted(&self) -> (OnchainFacilitator, OnchainChannels) {
        let facilitator = self.facilitator().reconcile_interval(PASS).confirm_timeout(PATIENCE).build().await.unwrap();
        let channels = OnchainChannels::builder().facilitator(&facilitator).build().await.unwrap();
        (facilitator, channels)
    }

    fn facilitator(&self) -> OnchainFacilitatorBuilder {
        OnchainFacilitator::builder()
            .network(self.stage.devnet.network())
            .client(self.stage.devnet.rpc_client())
            .signer(settlement_key())
            .ledger(self.stage.ledger.clone())
            .clock(self.stage.clock.clone())
            .block_time(BLOCKS)
            .confirm_timeout(Duration::from_secs(2))
    }

    async fn channel(&self) -> Channel {
        Channel::funded(&self.chain, RECEIVER, &self.authorizer, 100_000).await
    }

    async fn sign(&self, channel: &Channel, units: u128) -> Deposit {
        channel.sign_deposit(&self.chain, units, 1_800_000_000 + 3_600).await
    }

    /// A channel with a deposit that somebody else sent.
    async fn filled(&self, units: u128) -> Channel {
        let channel = self.channel().await;
        let call = channel.deposit_call(&self.sign(&channel, units).await).abi_encode();
        self.stage.devnet.execute(Address::repeat_byte(9), Escrow::ADDRESS, call).unwrap();
        channel
    }

    /// The same, and its payer withdraws all of it.
    async fn withdrawn(&self, units: u128) -> Channel {
        let channel = self.filled(units).await;
        self.withdraw(&channel, units);
        channel
    }

    fn withdraw(&self, channel: &Channel, units: u128) {
        let withdraw = escrow::initiateWithdrawCall { config: (&channel.config).into(), amount: units };
        self.stage.devnet.execute(channel.config.payer, Escrow::ADDRESS, withdraw.abi_encode()).unwrap();
    }

    async fn claim(&self, channel: &Channel, units: u128) -> Result<u128, ChannelError> {
        let rows = [channel.row(units, units).await];
        self.channels.claim(&rows, &AuthorizerKey::new(self.authorizer.clone())).await.map(|claimed| claimed.amount)
    }

    /// Enters what was charged on a channel into a seller's books.
    async fn charge(&self, books: &dyn ChannelLedger, channel: &Channel, units: u128) {
        let (id, network, config) = (channel.id(), self.stage.devnet.network(), channel.config);
        let (observation, now) = (self.channels.observe(&[id]).await.unwrap()[0], self.stage.clock.now());
        let (voucher, until) = (channel.voucher(units), now + 60);
        for step in [
            ChannelStep::Open { network, config, observation, now },
            ChannelStep::Begin { request: B256::ZERO, name: None, voucher, price: units, now, until },
            ChannelStep::Charge { epoch: 1, amount: units, response: None, now },
        ] {
            books.advance(&id, &step).await.unwrap();
        }
    }

    /// Enters what the chain shows of a channel into a seller's books.
    async fn look(&self, books: &dyn ChannelLedger, channel: &Channel) {
        let observation = self.channels.observe(&[channel.id()]).await.unwrap()[0];
        let seen = ChannelStep::Observe { observation, now: self.stage.clock.now() };
        books.advance(&channel.id(), &seen).await.unwrap();
    }

    /// A seller whose books these are, and that claims with the key.
    fn seller(&self, books: &Arc<MemoryLedger>) -> Channels {
        let seller = Channels::builder(self.channels.clone(), AuthorizerKey::new(self.authorizer.clone()));
        seller.ledger(books.clone()).clock(self.stage.clock.clone()).build().unwrap()
    }

    /// Sets the key's ether, so that it pays for so much gas at what transactions offer.
    async fn holds_gas(&self, gas: u64) {
        let fees = self.stage.provider().estimate_eip1559_fees().await.unwrap();
        let key = settlement_key().address();
        let wei = U256::from(gas) * U256::from(fees.max_fee_per_gas);
        self.stage.provider().raw_request::<_, ()>("anvil_setBalance".into(), (key, wei)).await.unwrap();
    }

    async fn deposit(&self, channel: &Channel, units: u128) -> Result<u128, ChannelError> {
        let sent = self.sign(channel, units).await;
        let made = self.channels.deposit(&channel.config, &channel.voucher(1), &sent).await;
        made.map(|made| made.observed.state.balance)
    }

    async fn admitted(&self) -> (Prechecked, Verified) {
        let payment = self.stage.payment(&self.stage.payer(1));
        let verified = self.stage.admit(&payment).await;
        (payment, verified)
    }

    async fn pending(&self) -> u64 {
        self.stage.provider().get_transaction_count(settlement_key().address()).pending().await.unwrap()
    }

    /// What the key's transactions in blocks call, in the order of nonces.
    async fn called(&self) -> Vec<Address> {
        let mut sent = Vec::new();
        for number in 0..=self.stage.devnet.block_number() {
            let block = self.stage.provider().get_block_by_number(number.into()).full().await.unwrap().unwrap();
            for transaction in block.transactions.into_transactions() {
                if transaction.inner.signer() == settlement_key().address() {
                    sent.push((transaction.nonce(), transaction.to().unwrap_or_default()));
                }
            }
        }
        sent.sort_unstable();
        assert!(sent.iter().map(|(nonce, _)| *nonce).eq(0..sent.len() as u64), "{sent:?}");
        sent.into_iter().map(|(_, to)| to).collect()
    }

    async fn journalled(&self) -> Vec<JournaledTransaction> {
        let sender = Sender { network: self.stage.devnet.network(), address: settlement_key().address() };
        self.stage.ledger.submissions(&sender, 0).await.unwrap()
    }

    /// What another process of the ledger has journalled and not sent: a call of the token that offers little.
    fn of_another_process(&self, nonce: u64, gas_limit: u64) -> JournaledTransaction {
        let (key, now) = (settlement_key(), self.stage.clock.now());
        let mut call = TxEip1559 {
            chain_id: self.stage.devnet.network().chain_id(),
            nonce,
            gas_limit,
            max_fee_per_gas: 1_000,
            max_priority_fee_per_gas: 1_000,
            to: TxKind::Call(self.stage.devnet.asset().address),
            ..TxEip1559::default()
        };
        let signature = key.sign_transaction_sync(&mut call).unwrap();
        let call = TxEnvelope::from(call.into_signed(signature));
        JournaledTransaction {
            sender: Sender { network: self.stage.devnet.network(), address: key.address() },
            nonce,
            hash: *call.tx_hash(),
            raw: call.encoded_2718().into(),
            payments: Vec::new(),
            by: 99,
            at: now,
            until: now + 45,
            known_failures: Default::default(),
        }
    }

    /// Moves the clock of the ledger past the time for which a nonce is its process's.
    fn a_minute_later(&self) {
        self.stage.clock.advance(61);
    }
}

fn memory(clock: &Arc<ManualClock>) -> Arc<dyn Ledger> {
    Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone()))
}

fn is_paid(outcome: &Result<SettlementOutcome, FacilitatorError>) {
    paid_by(outcome);
}

/// A process of its own, which ends with its call under way.
async fn in_a_process_that_dies<T: Send + 'static>(
    settings: OnchainFacilitatorBuilder,
    call: impl AsyncFnOnce(OnchainChannels) -> T + Send + 'static,
) -> T {
    let process = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let result = runtime.block_on(async {
            let facilitator = settings.build().await.unwrap();
            call(OnchainChannels::builder().facilitator(&facilitator).build().await.unwrap()).await
        });
        runtime.shutdown_background();
        result
    };
    tokio::task::spawn_blocking(process).await.unwrap()
}

#[tokio::test]
async fn one_key_settles_payments_and_sends_deposits_claims_and_transfers_at_once() {
    let one = OneKey::start(|builder| builder.batch_size(1)).await;
    let mut channels = Vec::new();
    for _ in 0..4 {
        channels.push((one.channel().await, one.filled(10_000).await, one.withdrawn(5_000).await));
    }
    let mut payments = Vec::new();
    for _ in 0..12 {
        payments.push(one.admitted().await);
    }
    let paid = join_all(payments.iter().map(async |(payment, verified)| {
        paid_by(&one.stage.settle(payment, verified).await);
    }));
    let moved = join_all(channels.iter().map(async |(new, filled, withdrawn)| {
        let made = tokio::join!(one.deposit(new, 7_000), one.claim(filled, 3_000), one.claim(withdrawn, 5_000));
        assert_eq!((made.0.unwrap(), made.1.unwrap(), made.2.unwrap()), (7_000, 3_000, 5_000));
    }));
    tokio::join!(paid, moved);
    let token = one.stage.devnet.asset().address;
    let settled = one.channels.settle(RECEIVER, token).await.unwrap().unwrap();
    assert_eq!((settled.amount, one.stage.received()), (32_000, 12));
    let called = one.called().await;
    let counts = [token, Escrow::ADDRESS].map(|to| called.iter().filter(|called| **called == to).count());
    assert_eq!((counts, called.len()), ([12, 13], 25), "no filler was needed");
    let stats = one.stage.facilitator.stats();
    assert_eq!((stats.transactions, stats.settled), (25, 12));
    assert_eq!(one.channels.gas_used() + one.stage.facilitator.gas_used(), stats.gas_used, "counted once");
    assert!(one.channels.gas_used() > 13 * 40_000 && one.stage.facilitator.gas_used() > 12 * 40_000, "{stats:?}");
}

/// The window is full of payments, but for the place that is kept.
#[tokio::test]
async fn a_claim_at_risk_is_sent_while_the_window_is_full_of_payments_that_hang() {
    let one = OneKey::start(|builder| builder.batch_size(1).in_flight(3)).await;
    let withdrawn = one.withdrawn(50_000).await;
    let mut payments = Vec::new();
    for _ in 0..5 {
        payments.push(one.admitted().await);
    }
    one.stage.devnet.stall(true);
    let settled = join_all(payments.iter().map(|(payment, verified)| one.stage.settle(payment, verified)));
    let claimed = async {
        eventually("the payments have their places", async || one.pending().await == 2).await;
        let claiming = one.claim(&withdrawn, 50_000);
        let waiting = eventually("the claim is in the pool", async || one.pending().await == 3);
        let resumed = async {
            waiting.await;
            one.stage.devnet.stall(false);
        };
        tokio::join!(claiming, resumed).0
    };
    let (settled, claimed) = tokio::join!(settled, claimed);
    settled.iter().for_each(is_paid);
    assert_eq!(claimed.unwrap(), 50_000);
    assert_eq!(one.called().await[2], Escrow::ADDRESS);
}

/// There is one place. A payment has it, and others wait for it.
#[tokio::test]
async fn a_claim_at_risk_is_sent_before_payments_that_wait() {
    let one = OneKey::start(|builder| builder.batch_size(1).in_flight(1)).await;
    let withdrawn = one.withdrawn(50_000).await;
    let mut payments = Vec::new();
    for _ in 0..4 {
        payments.push(one.admitted().await);
    }
    one.stage.devnet.stall(true);
    let settled = join_all(payments.iter().map(|(payment, verified)| one.stage.settle(payment, verified)));
    let claimed = async {
        eventually("a payment has the place", async || one.pending().await == 1).await;
        let resumed = async {
            eventually("the claim is simulated", async || one.stage.calls("eth_estimateGas") > 0).await;
            // It is in the line.
            tokio::time::sleep(2 * BLOCKS).await;
            one.stage.devnet.stall(false);
        };
        tokio::join!(one.claim(&withdrawn, 50_000), resumed).0
    };
    let (settled, claimed) = tokio::join!(settled, claimed);
    settled.iter().for_each(is_paid);
    assert_eq!(claimed.unwrap(), 50_000);
    assert_eq!(one.called().await[1], Escrow::ADDRESS);
}

/// A payment offers too little for the block, and may not offer more for itself.
#[tokio::test]
async fn a_claim_at_risk_does_not_wait_for_the_ceiling_of_a_payment_before_it() {
    let one = OneKey::start(|builder| builder.max_gas_price(10_000_000)).await;
    let withdrawn = one.withdrawn(90_000).await;
    one.stage.devnet.set_base_fee(1_000_000);
    let (payment, verified) = one.admitted().await;
    one.stage.devnet.stall(true);
    let settled = one.stage.settle(&payment, &verified);
    let claimed = async {
        eventually("the payment is sent", async || one.pending().await == 1).await;
        one.stage.devnet.set_base_fee(15_000_000);
        one.stage.devnet.stall(false);
        let _ = one.claim(&withdrawn, 90_000).await;
    };
    let _ = tokio::join!(settled, claimed);
    eventually("both are made", async || one.stage.next_nonce().await == 2).await;
    assert_eq!((withdrawn.state(&one.chain).await, one.stage.received()), ((90_000, 90_000), 1));
}

/// The claim was sent before its payer withdrew, and offers too little for the block. The same claim is asked for again.
#[tokio::test]
async fn a_claim_that_comes_to_be_at_risk_while_it_hangs_does_not_wait_for_the_ceiling() {
    let one = OneKey::start(|builder| builder.max_gas_price(10_000_000).confirm_timeout(Duration::from_secs(1))).await;
    let filled = one.filled(90_000).await;
    one.stage.devnet.set_base_fee(1_000_000);
    one.stage.devnet.stall(true);
    let claimed = one.claim(&filled, 90_000).await;
    assert!(matches!(claimed, Err(ChannelError::Pending { .. })), "{claimed:?}");
    one.stage.devnet.set_base_fee(15_000_000);
    one.stage.devnet.stall(false);
    one.withdraw(&filled, 90_000);
    let _ = one.claim(&filled, 90_000).await;
    eventually("it is made", async || one.stage.next_nonce().await == 1).await;
    assert_eq!(filled.state(&one.chain).await, (90_000, 90_000));
}

#[tokio::test]
async fn gas_for_claims_is_kept_from_payments() {
    let one = OneKey::start(|builder| builder).await;
    // The key has an ether: enough for some payments or claims, and not for three million gas beside them.
    one.stage.devnet.set_base_fee(500_000_000_000);
    let filled = one.filled(10_000).await;
    let (payment, verified) = one.admitted().await;
    let refused = one.stage.settle(&payment, &verified).await;
    assert!(matches!(refused, Err(FacilitatorError::InsufficientGas { .. })), "{refused:?}");
    let later = one.stage.payment(&one.stage.payer(1));
    let refused = one.stage.verify(&later).await;
    assert!(
        matches!(refused, Err(VerifyError::Unavailable(FacilitatorError::InsufficientGas { .. }))),
        "nothing is worked for that could not be settled: {refused:?}"
    );
    assert_eq!(one.claim(&filled, 3_000).await.unwrap(), 3_000);
    assert_eq!(one.stage.next_nonce().await, 1);
}

/// There is one place for both. The payment waits for longer than a second, after which it is looked at again.
#[tokio::test]
async fn a_payment_keeps_its_place_in_the_line_before_a_claim_that_came_later() {
    let one = OneKey::start(|builder| builder.batch_size(1).in_flight(2)).await;
    let filled = one.filled(10_000).await;
    let (first, second) = (one.admitted().await, one.admitted().await);
    one.stage.devnet.stall(true);
    let later = async {
        eventually("a payment has the place", async || one.pending().await == 1).await;
        let settled = one.stage.settle(&second.0, &second.1);
        let claimed = async {
            tokio::time::sleep(4 * BLOCKS).await;
            one.claim(&filled, 3_000).await
        };
        let resumed = async {
            eventually("the claim is simulated", async || one.stage.calls("eth_estimateGas") > 0).await;
            tokio::time::sleep(Duration::from_millis(1_500)).await;
            one.stage.devnet.stall(false);
        };
        tokio::join!(settled, claimed, resumed)
    };
    let (settled, (waited, claimed, ())) = tokio::join!(one.stage.settle(&first.0, &first.1), later);
    [settled, waited].iter().for_each(is_paid);
    assert_eq!(claimed.unwrap(), 3_000);
    let token = one.stage.devnet.asset().address;
    assert_eq!(one.called().await, [token, token, Escrow::ADDRESS]);
}

#[tokio::test]
async fn gas_for_claims_is_kept_from_deposits() {
    let one = OneKey::start(|builder| builder).await;
    // The key's ether pays for 3.1 million gas: more than is kept, and less than that and a deposit.
    one.stage.devnet.set_base_fee(160_000_000_000);
    let (channel, filled) = (one.channel().await, one.filled(10_000).await);
    let refused = one.deposit(&channel, 7_000).await;
    let is_kept = matches!(refused, Err(ChannelError::Unavailable(FacilitatorError::InsufficientGas { .. })));
    assert!(is_kept, "{refused:?}");
    assert_eq!(one.claim(&filled, 3_000).await.unwrap(), 3_000);
    assert_eq!(one.called().await, [Escrow::ADDRESS]);
}

/// Whoever has a channel of its own can have any number of claims and transfers sent.
#[tokio::test]
async fn gas_for_claims_is_kept_from_claims_that_others_signed_and_from_transfers() {
    let one = OneKey::start(|builder| builder).await;
    // After a claim, the key's ether pays for three million gas and some more.
    one.stage.devnet.set_base_fee(160_000_000_000);
    let (filled, withdrawn) = (one.filled(10_000).await, one.withdrawn(10_000).await);
    assert_eq!(one.claim(&filled, 3_000).await.unwrap(), 3_000);
    let rows = [withdrawn.row(10_000, 10_000).await];
    let signature = claim_call(&rows, &one.authorizer).authorizerSignature;
    let claimed = one.channels.claim_signed(&rows, &signature).await.map(drop);
    let transferred = one.channels.settle(RECEIVER, one.stage.devnet.asset().address).await.map(drop);
    for refused in [claimed, transferred] {
        let is_kept = matches!(refused, Err(ChannelError::Unavailable(FacilitatorError::InsufficientGas { .. })));
        assert!(is_kept, "{refused:?}");
    }
    assert_eq!(one.claim(&withdrawn, 10_000).await.unwrap(), 10_000);
}

/// The node has no room for it at first.
#[tokio::test]
async fn a_deposit_that_expires_before_it_is_sent_costs_no_gas() {
    let one = OneKey::start(|builder| builder).await;
    let channel = one.channel().await;
    let deposit = channel.sign_deposit(&one.chain, 7_000, 1_800_000_000 + 60).await;
    let (clock, has_refused) = (one.stage.clock.clone(), AtomicBool::new(false));
    one.stage.devnet.faults().set(move |call| {
        if !call.method.starts_with("eth_sendRaw") || has_refused.swap(true, Relaxed) {
            return Fault::None;
        }
        clock.advance(61);
        Fault::Error { code: -32_000, message: "account limit exceeded".into() }
    });
    let refused = one.channels.deposit(&channel.config, &channel.voucher(1), &deposit).await;
    assert_eq!(one.called().await, [] as [Address; 0]);
    let is_expired = |reason: &str| reason == reason::PAYLOAD_AUTHORIZATION_VALID_BEFORE;
    assert!(matches!(refused, Err(ChannelError::Rejected { reason, .. }) if is_expired(reason)), "{refused:?}");
}

/// The number of SECURITY.md.
#[tokio::test]
async fn a_deposit_for_which_the_node_has_no_room_is_checked_four_times() {
    let one = OneKey::start(|builder| builder).await;
    let channel = one.channel().await;
    one.stage.devnet.faults().reset();
    one.stage.devnet.faults().set(|call| match call.method.starts_with("eth_sendRaw") {
        true => Fault::Error { code: -32_000, message: "account limit exceeded".into() },
        false => Fault::None,
    });
    let refused = one.deposit(&channel, 7_000).await;
    assert!(matches!(refused, Err(ChannelError::Unavailable(FacilitatorError::Busy { .. }))), "{refused:?}");
    assert_eq!((one.stage.calls("eth_estimateGas"), one.called().await.len()), (4, 0));
}

/// The number of SECURITY.md. Each check is a read and a simulation.
#[tokio::test(start_paused = true)]
async fn deposits_are_checked_32_at_a_time() {
    let stage = support::engine_stage::stage().await;
    let chain = DevnetChain::of(stage.devnet.clone()).await;
    let channels = OnchainChannels::builder().facilitator(&stage.facilitator).build().await.unwrap();
    let mut deposits = Vec::new();
    for _ in 0..40 {
        let channel = Channel::funded(&chain, RECEIVER, &new_key(), 100_000).await;
        let deposit = channel.sign_deposit(&chain, 7_000, 1_800_000_000 + 3_600).await;
        deposits.push((channel.config, deposit));
    }
    stage.devnet.faults().reset();
    stage.devnet.faults().set(|_| Fault::Delay(Duration::from_secs(2)));
    let checked = join_all(deposits.iter().map(|(config, deposit)| channels.verify_deposit(config, deposit)));
    let asked = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        stage.calls("eth_call")
    };
    let (checked, asked) = tokio::join!(checked, asked);
    checked.iter().for_each(|checked| assert!(checked.is_ok(), "{checked:?}"));
    assert_eq!((asked, stage.calls("eth_call"), stage.calls("eth_estimateGas")), (32, 40, 40));
}

/// The node reserves the data fee, too, of which nothing is known before.
#[tokio::test]
async fn a_claim_that_the_key_cannot_pay_for_is_made_in_parts() {
    let one = OneKey::start(|builder| builder).await;
    let mut rows = Vec::new();
    for _ in 0..4 {
        rows.push(one.filled(10_000).await.row(3_000, 3_000).await);
    }
    // Nobody has the ether for more than two rows, which take some 2,600 digits.
    one.stage.devnet.faults().set(|call| {
        let length = call.params.first().and_then(|raw| raw.as_str()).map_or(0, str::len);
        match call.method.starts_with("eth_sendRaw") && length > 2_900 {
            true => Fault::Error { code: -32_000, message: "insufficient funds for gas * price + value".into() },
            false => Fault::None,
        }
    });
    let claimed = one.channels.claim(&rows, &AuthorizerKey::new(one.authorizer.clone())).await.unwrap();
    assert_eq!((claimed.amount, claimed.transactions.len(), claimed.observed.len()), (12_000, 2, 4));
}

/// The payers of sixteen channels withdraw. The operator keeps so much ether on the key that it pays for a claim of a few channels and a
/// payment. Another process of the ledger, which keeps no gas for claims, always has a payment in flight.
#[tokio::test(start_paused = true)]
async fn claims_at_risk_that_the_key_pays_for_only_in_parts_are_made_beside_steady_payments() {
    const WITHDRAWN: usize = 16;
    let one = OneKey::start(|builder| builder).await;
    let (books, mut withdrawn, mut payments) = (Arc::new(MemoryLedger::new()), Vec::new(), Vec::new());
    for _ in 0..WITHDRAWN {
        let channel = one.filled(10_000).await;
        one.charge(&*books, &channel, 3_000).await;
        one.withdraw(&channel, 10_000);
        one.look(&*books, &channel).await;
        withdrawn.push(channel);
    }
    for _ in 0..200 {
        payments.push(one.admitted().await);
    }
    let replica = one.facilitator().batch_size(1).build().await.unwrap();
    let (paid, is_over) = (AtomicU32::new(0), AtomicBool::new(false));
    let paying = async {
        for (payment, verified) in &payments {
            if !is_over.load(Relaxed) && replica.settle(payment, verified).await.is_ok() {
                paid.fetch_add(1, Relaxed);
            }
        }
    };
    let supplying = async {
        while !is_over.load(Relaxed) {
            one.holds_gas(450_000).await;
            tokio::time::sleep(BLOCKS / 5).await;
        }
    };
    let claiming = async {
        eventually("payments are in flight", async || paid.load(Relaxed) > 2).await;
        let (block, before) = (one.stage.devnet.block_number(), paid.load(Relaxed));
        let seller = one.seller(&books);
        eventually("all is claimed", async || {
            let mut claimed = 0;
            for channel in &withdrawn {
                let record = books.channel(&channel.id()).await.unwrap().unwrap();
                claimed += usize::from(record.unclaimed() == 0);
            }
            claimed == WITHDRAWN
        })
        .await;
        is_over.store(true, Relaxed);
        (one.stage.devnet.block_number() - block, paid.load(Relaxed) - before, seller.readiness().await)
    };
    let ((blocks, beside, readiness), (), ()) = tokio::join!(claiming, paying, supplying);
    assert!(blocks <= 60, "{blocks} blocks later, beside {beside} payments");
    assert!(u64::from(beside) * 2 >= blocks, "only {beside} payments were made in {blocks} blocks");
    assert!(readiness.is_ready(), "{readiness:?}");
    for channel in &withdrawn {
        assert_eq!(channel.state(&one.chain).await.1, 3_000);
    }
}

/// The ether ends before all is claimed.
#[tokio::test(start_paused = true)]
async fn claims_that_the_key_can_pay_for_are_in_the_books_and_the_others_are_reported() {
    let one = OneKey::start(|builder| builder).await;
    let (books, mut filled) = (Arc::new(MemoryLedger::new()), Vec::new());
    for _ in 0..16 {
        let channel = one.filled(10_000).await;
        one.charge(&*books, &channel, 3_000).await;
        filled.push(channel);
    }
    one.holds_gas(350_000).await;
    let report = one.seller(&books).claim_all().await.unwrap();
    let left = report.refused.len();
    assert!((1..16).contains(&left), "{report:?}");
    assert_eq!(report.claimed, 3_000 * (16 - left as u128));
    for channel in &filled {
        let is_refused = report.refused.iter().any(|refused| refused.channel == channel.id());
        let expected = if is_refused { (0, 3_000) } else { (3_000, 0) };
        let unclaimed = books.channel(&channel.id()).await.unwrap().unwrap().unclaimed();
        assert_eq!((channel.state(&one.chain).await.1, unclaimed), expected);
    }
    let next = filled.iter().find(|channel| channel.id() == report.refused[0].channel).unwrap();
    let alone = one.claim(next, 3_000).await;
    let is_poor = matches!(alone, Err(ChannelError::Unavailable(FacilitatorError::InsufficientGas { .. })));
    assert!(is_poor, "nothing more could be paid for: {alone:?}");
}

/// The other key has no ether.
#[tokio::test(start_paused = true)]
async fn a_part_of_a_claim_is_sent_with_the_key_that_pays_for_it() {
    let one = OneKey::start(|builder| builder.signer(new_key())).await;
    let mut rows = Vec::new();
    for _ in 0..16 {
        rows.push(one.filled(10_000).await.row(3_000, 3_000).await);
    }
    // The claim may use more, and half of it less.
    one.holds_gas(500_000).await;
    let claimed = one.channels.claim(&rows, &AuthorizerKey::new(one.authorizer.clone())).await.unwrap();
    assert_eq!((claimed.amount, claimed.refused), (48_000, vec![]));
}

/// All its payments had ended when it was replaced, so that it is journalled without them.
#[tokio::test]
async fn a_batch_of_a_dead_process_that_hangs_is_not_made_again() {
    let one = OneKey::start(|builder| builder).await;
    one.stage.devnet.set_base_fee(1_000_000_000);
    let journalled = one.of_another_process(0, 1_000_000);
    one.stage.ledger.submit(journalled).await.unwrap();
    one.a_minute_later();
    eventually("its nonce is used up", async || one.stage.next_nonce().await == 1).await;
    assert_eq!(one.called().await, [settlement_key().address()]);
}

/// What another process of the ledger has in flight has to be paid for, too.
#[tokio::test]
async fn gas_for_claims_is_kept_from_deposits_beside_those_of_another_process() {
    let one = OneKey::start(|builder| builder).await;
    // The key's ether pays for four million gas.
    one.stage.devnet.set_base_fee(125_000_000_000);
    let channel = one.channel().await;
    one.stage.ledger.submit(one.of_another_process(1, 1_000_000)).await.unwrap();
    let refused = one.deposit(&channel, 7_000).await;
    assert!(matches!(refused, Err(ChannelError::Unavailable(FacilitatorError::Busy { .. }))), "{refused:?}");
    assert_eq!(one.journalled().await.len(), 1);
    // The other one is over.
    let sender = one.of_another_process(1, 0).sender;
    one.stage.ledger.forget_nonces(&sender, 2).await.unwrap();
    assert_eq!(one.deposit(&channel, 7_000).await.unwrap(), 7_000);
}

/// A batch of ten may use more than a million gas beside what is kept, and a payment alone some hundred thousand.
#[tokio::test]
async fn payments_that_the_key_cannot_pay_for_in_a_batch_are_settled_alone() {
    let one = OneKey::start(|builder| builder).await;
    // The key's ether pays for 3.7 million gas then.
    one.stage.devnet.set_base_fee(133_000_000_000);
    one.stage.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
    let before = one.stage.next_nonce().await;
    let mut payments = Vec::new();
    for _ in 0..10 {
        payments.push(one.admitted().await);
    }
    let settled = join_all(payments.iter().map(|(payment, verified)| one.stage.settle(payment, verified))).await;
    let paid = settled.iter().filter(|outcome| outcome.is_ok()).inspect(|outcome| is_paid(outcome)).count();
    assert!(paid > 1, "{settled:?}");
    let token = one.stage.devnet.asset().address;
    let called = one.called().await.split_off(before as usize);
    assert_eq!(called.iter().filter(|to| **to == token).count(), paid, "{called:?}");
}

#[tokio::test]
async fn payments_are_settled_while_the_node_does_not_tell_balances() {
    let one = OneKey::start(|builder| builder).await;
    let [first, second] = [one.admitted().await, one.admitted().await];
    is_paid(&one.stage.settle(&first.0, &first.1).await);
    let faults = one.stage.devnet.faults();
    faults.set(|call| if call.method == "eth_getBalance" { Fault::DropBefore } else { Fault::None });
    is_paid(&one.stage.settle(&second.0, &second.1).await);
}

/// A node keeps sixteen transactions of an account, and fewer are in flight where a reorganization may leave as many below them.
#[tokio::test]
async fn keys_that_send_for_channels_keep_eight_transactions_in_flight() {
    let one = OneKey::start(|builder| builder.batch_size(1)).await;
    let mut payments = Vec::new();
    for _ in 0..12 {
        payments.push(one.admitted().await);
    }
    let withdrawn = one.withdrawn(50_000).await;
    one.stage.devnet.stall(true);
    let settled = join_all(payments.iter().map(|(payment, verified)| one.stage.settle(payment, verified)));
    let claimed = async {
        eventually("the payments have their places", async || one.pending().await >= 7).await;
        tokio::time::sleep(8 * BLOCKS).await;
        assert_eq!(one.pending().await, 7, "one place is kept");
        let claiming = one.claim(&withdrawn, 50_000);
        let waiting = eventually("the claim is in the pool", async || one.pending().await == 8);
        let resumed = async {
            waiting.await;
            one.stage.devnet.stall(false);
        };
        tokio::join!(claiming, resumed).0
    };
    assert_eq!(tokio::join!(settled, claimed).1.unwrap(), 50_000);
}

/// The node keeps nothing more of the account, for longer than four attempts take.
#[tokio::test]
async fn a_claim_at_risk_is_sent_when_the_node_has_room_for_it() {
    let one = OneKey::start(|builder| builder).await;
    let withdrawn = one.withdrawn(50_000).await;
    let refusals = AtomicU32::new(0);
    one.stage.devnet.faults().set(move |call| {
        let is_full = call.method.starts_with("eth_sendRaw") && refusals.fetch_add(1, Relaxed) < 12;
        match is_full {
            true => Fault::Error { code: -32_000, message: "account limit exceeded".into() },
            false => Fault::None,
        }
    });
    assert_eq!(one.claim(&withdrawn, 50_000).await.unwrap(), 50_000);
}

/// A payment has the only place. It offers too little for the block, and may not offer more for itself.
#[tokio::test]
async fn a_claim_at_risk_that_waits_for_a_place_does_not_wait_for_the_ceiling_of_a_payment() {
    let one = OneKey::start(|builder| builder.max_gas_price(10_000_000).in_flight(1)).await;
    let withdrawn = one.withdrawn(90_000).await;
    one.stage.devnet.set_base_fee(1_000_000);
    let (payment, verified) = one.admitted().await;
    one.stage.devnet.stall(true);
    let settled = one.stage.settle(&payment, &verified);
    let claimed = async {
        eventually("the payment is sent", async || one.pending().await == 1).await;
        one.stage.devnet.set_base_fee(15_000_000);
        one.stage.devnet.stall(false);
        let _ = one.claim(&withdrawn, 90_000).await;
    };
    let _ = tokio::join!(settled, claimed);
    eventually("both are made", async || one.stage.next_nonce().await == 2).await;
    assert_eq!((withdrawn.state(&one.chain).await, one.stage.received()), ((90_000, 90_000), 1));
}

/// A service bounds what strangers make it pay for, and the seller beside it claims for itself.
#[tokio::test]
async fn each_of_several_channels_counts_the_gas_of_its_own_calls() {
    let one = OneKey::start(|builder| builder).await;
    one.stage.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
    let others = OnchainChannels::builder().facilitator(&one.stage.facilitator).build().await.unwrap();
    assert_eq!((one.channels.gas_used(), others.gas_used()), (0, 0));
    let filled = one.filled(10_000).await;
    one.claim(&filled, 3_000).await.unwrap();
    assert!(one.channels.gas_used() > 40_000, "{}", one.channels.gas_used());
    assert_eq!(others.gas_used(), 0);
}

/// The node has lost what a process sent that died, and nobody asks again.
#[tokio::test]
async fn calls_of_a_dead_process_that_the_node_lost_are_sent_again() {
    let one = OneKey::start(|builder| builder).await;
    let (channel, withdrawn) = (one.channel().await, one.withdrawn(50_000).await);
    let deposit = one.sign(&channel, 10_000).await;
    let rows = vec![withdrawn.row(50_000, 50_000).await];
    one.stage.devnet.stall(true);
    let faults = one.stage.devnet.faults();
    // Sent, and on its way lost.
    faults.set(|call| if call.method.starts_with("eth_sendRaw") { Fault::DropBefore } else { Fault::None });
    let (key, sent, config) = (AuthorizerKey::new(one.authorizer.clone()), deposit.clone(), channel.config);
    let voucher = channel.voucher(1);
    let settings = one.facilitator().reconcile_interval(Duration::from_secs(3_600));
    let died = in_a_process_that_dies(settings, async move |it| {
        let claimed = it.claim(&rows, &key).await.map(drop);
        (claimed, it.deposit(&config, &voucher, &sent).await.map(drop))
    });
    let died = died.await;
    assert!(matches!(died, (Err(ChannelError::Pending { .. }), Err(ChannelError::Pending { .. }))), "{died:?}");
    let journalled = one.journalled().await;
    assert_eq!(journalled.len(), 2);
    assert!(journalled.iter().all(|transaction| transaction.payments.is_empty()));
    faults.clear();
    assert_eq!(one.pending().await, 0);
    one.stage.devnet.stall(false);
    let (_facilitator, next) = one.restarted().await;
    // The same deposit is not made twice.
    let made = in_time("the deposit is found", async {
        loop {
            match next.deposit(&channel.config, &channel.voucher(1), &deposit).await {
                Err(ChannelError::Pending { .. } | ChannelError::Unavailable(_)) => {}
                known => return known.unwrap(),
            }
        }
    });
    assert_eq!(made.await.amount, 10_000);
    assert_eq!(withdrawn.state(&one.chain).await, (50_000, 50_000));
    assert_eq!(one.called().await, [Escrow::ADDRESS; 2]);
    drop(next);
}

/// The ledger commits the transaction of a refund, is away before it says so, and cannot take it back.
#[tokio::test]
async fn a_refund_that_the_ledger_may_have_kept_is_not_reported_as_unsent() {
    let clock = Arc::new(ManualClock::at(1_800_000_000));
    let ledger = faulty(memory(&clock));
    let one = OneKey::over(ledger.clone(), clock, FINALITY, |builder| builder).await;
    let filled = one.filled(10_000).await;
    let key = AuthorizerKey::new(one.authorizer.clone());
    let how = How::GoneAfter(Duration::from_secs(1));
    ledger.around.arm(Some(faulty_ledger::Fault { call: "submit", nth: 0, how }));
    let order = RefundOrder { config: filled.config, voucher: filled.voucher(1), amount: 4_000, nonce: 0, claim: None };
    let refunded = one.channels.refund(&order, &key).await;
    one.a_minute_later();
    eventually("the journalled refund is sent", async || one.stage.next_nonce().await == 1).await;
    assert_eq!(filled.state(&one.chain).await, (6_000, 0));
    assert!(matches!(refunded, Err(ChannelError::Pending { .. })), "{refunded:?}");
}

/// Its process died, and by now gas costs more than it offers.
#[tokio::test]
async fn a_claim_of_a_dead_process_that_hangs_is_made_at_a_higher_fee() {
    let one = OneKey::start(|builder| builder).await;
    let withdrawn = one.withdrawn(50_000).await;
    let rows = vec![withdrawn.row(50_000, 50_000).await];
    one.stage.devnet.stall(true);
    let key = AuthorizerKey::new(one.authorizer.clone());
    let settings = one.facilitator().reconcile_interval(Duration::from_secs(3_600));
    let died = in_a_process_that_dies(settings, async move |it| it.claim(&rows, &key).await.map(drop)).await;
    assert!(matches!(died, Err(ChannelError::Pending { .. })), "{died:?}");
    one.stage.devnet.set_base_fee(500_000_000_000);
    one.stage.devnet.stall(false);
    tokio::time::sleep(4 * BLOCKS).await;
    assert_eq!(one.stage.next_nonce().await, 0, "it hangs");
    one.a_minute_later();
    eventually("another process makes the claim", async || one.stage.next_nonce().await == 1).await;
    assert_eq!(withdrawn.state(&one.chain).await, (50_000, 50_000));
}

/// Nothing but calls is in the ledger, and nobody asks again.
#[tokio::test]
async fn calls_that_a_reorganization_removed_are_sent_again() {
    let one = OneKey::start(|builder| builder).await;
    let (channel, filled) = (one.channel().await, one.filled(10_000).await);
    let block = one.stage.devnet.block_number();
    one.stage.devnet.stall(true);
    let calls = async { tokio::join!(one.deposit(&channel, 7_000), one.claim(&filled, 3_000)) };
    let resumed = async {
        eventually("both are in the pool", async || one.pending().await == 2).await;
        one.stage.devnet.stall(false);
    };
    let ((deposited, claimed), ()) = tokio::join!(calls, resumed);
    assert_eq!((deposited.unwrap(), claimed.unwrap()), (7_000, 3_000));
    one.stage.devnet.stall(true);
    one.stage.devnet.reorg(one.stage.devnet.block_number() - block, Orphans::Lost);
    assert_eq!(one.stage.next_nonce().await, 0);
    one.stage.devnet.stall(false);
    eventually("both are made again", async || one.stage.next_nonce().await == 2).await;
    assert_eq!((channel.state(&one.chain).await, filled.state(&one.chain).await), ((7_000, 0), (10_000, 3_000)));
    assert_eq!(one.called().await, [Escrow::ADDRESS; 2]);
}

/// Final ones are forgotten, though no payment becomes final.
#[tokio::test]
async fn calls_that_are_final_are_removed_from_the_journal() {
    let one = OneKey::with_finality(2, |builder| builder).await;
    let filled = one.filled(10_000).await;
    one.claim(&filled, 3_000).await.unwrap();
    eventually("the journal is empty", async || one.journalled().await.is_empty()).await;
}

/// Two processes share the key and the ledger, and both send both at once.
#[tokio::test]
async fn two_processes_with_one_key_use_each_nonce_once() {
    let one = OneKey::start(|builder| builder.batch_size(1)).await;
    let (other, others) = one.restarted().await;
    let mut work = Vec::new();
    for _ in 0..6 {
        work.push((one.filled(10_000).await, one.filled(10_000).await, one.admitted().await, one.admitted().await));
    }
    let key = AuthorizerKey::new(one.authorizer.clone());
    join_all(work.iter().map(async |(here, there, first, second)| {
        let rows = [there.row(4_000, 4_000).await];
        let (mine, theirs, paid, paid_there) = tokio::join!(
            one.claim(here, 3_000),
            others.claim(&rows, &key),
            one.stage.settle(&first.0, &first.1),
            other.settle(&second.0, &second.1),
        );
        assert_eq!((mine.unwrap(), theirs.unwrap().amount), (3_000, 4_000));
        paid_by(&paid);
        paid_by(&paid_there);
    }))
    .await;
    assert_eq!(one.stage.received(), 12);
    let called = one.called().await;
    assert_eq!(called.iter().filter(|to| **to == Escrow::ADDRESS).count(), 12);
}

#[tokio::test]
async fn channels_send_with_a_facilitators_keys_or_with_others_and_on_its_chain() {
    let one = OneKey::start(|builder| builder).await;
    let builder = || OnchainChannels::builder().facilitator(&one.stage.facilitator);
    assert_eq!(builder().signer(new_key()).build().await.unwrap_err(), OnchainBuildError::TwoSenders);
    // What another sender does with the key, the facilitator's ledger would not know.
    let unknown = OnchainChannels::builder().network(one.stage.devnet.network()).client(one.stage.devnet.rpc_client());
    let unknown = unknown.clock(one.stage.clock.clone()).signer(settlement_key()).build().await;
    assert_eq!(unknown.unwrap_err(), OnchainBuildError::TwoLedgers(settlement_key().address()));
    let elsewhere = builder().network(Network::BASE).build().await;
    assert!(matches!(elsewhere.unwrap_err(), OnchainBuildError::WrongChain { .. }));
    assert_eq!(one.channels.senders(), [settlement_key().address()]);
}
