//! Payment channels through somebody else's facilitator: honest, silent, failing and lying. The chain decides what happened.

use std::{
    slice,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use alloy_primitives::{Address, B256, U256, address, bytes};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use axum::body::Body;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use serde_json::json;
use support::{
    authorization::random_address,
    chain::Chain as _,
    devnet::DevnetChain,
    escrow::{Channel, claim_call, refund_call},
    scripted,
    shop::{App, PRICE},
};
use tower::{Layer as _, ServiceExt as _};
use tower_x402::{
    Network, Usdc,
    channels::Channels,
    client::{AddPaymentLayer, Budget, ChannelPolicy, Payer, PaymentOutcome, ReceiptExt as _},
    facilitator::{
        RemoteBuildError, RemoteFacilitator, RemoteFacilitatorBuilder,
        channels::{ChannelError, ChannelFacilitator as _, OnchainChannels, RefundOrder},
    },
    ledger::MemoryLedger,
    server::{ActualPrice, RequestBody, RequirePaymentLayer},
    vouchers::{AuthorizerKey, Claim, Deposit, Escrow, abi::BatchSettlement, reason},
};

use super::stage::{Reply, Stage, Turn, refusal, still_pending};

/// A facilitator that serves channels, a seller's side of it, and a channel.
struct Bank {
    stage: Stage,
    channels: OnchainChannels,
    channel: Channel,
}

impl Bank {
    async fn open() -> Self {
        Self::open_with(|remote| remote).await
    }

    async fn open_with(settings: impl FnOnce(RemoteFacilitatorBuilder) -> RemoteFacilitatorBuilder) -> Self {
        let chain = DevnetChain::start(None).await;
        let sender = PrivateKeySigner::random();
        chain.fund(sender.address(), U256::from(10).pow(U256::from(18))).await;
        let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url());
        let contract = contract.signer(sender).build().await.unwrap();
        let stage = Stage::open_on(chain, Duration::from_secs(5), |service| service.channels(contract)).await;
        let remote = settings(confirmed(&stage).request_timeout(Duration::from_millis(800))).build().await.unwrap();
        let channels = remote.channels(stage.chain.asset()).await.unwrap();
        let channel = Channel::funded(&stage.chain, random_address(), &PrivateKeySigner::random(), 100_000).await;
        Self { stage, channels, channel }
    }

    async fn sign(&self, units: u128) -> Deposit {
        self.channel.sign_deposit(&self.stage.chain, units, self.stage.chain.timestamp().await + 3_600).await
    }

    /// Deposits on a voucher for one request.
    async fn deposit(&self, deposit: &Deposit) -> Result<u128, ChannelError> {
        let voucher = self.channel.voucher(self.state().await.1 + 1_000);
        let executed = self.channels.deposit(&self.channel.config, &voucher, deposit).await?;
        let receipt = self.stage.chain.receipt(executed.transaction).await;
        assert!(receipt.status() && receipt.block_number <= Some(executed.observed.block));
        assert_eq!(executed.amount, deposit.amount);
        Ok(executed.observed.state.balance)
    }

    async fn state(&self) -> (u128, u128) {
        self.channel.state(&self.stage.chain).await
    }

    fn key(&self) -> AuthorizerKey {
        AuthorizerKey::new(self.channel.authorizer.clone())
    }

    async fn order(&self, amount: u128, nonce: u128, charged: u128) -> RefundOrder {
        order(self, amount, nonce, Some(self.channel.row(charged, charged).await))
    }
}

fn confirmed(stage: &Stage) -> RemoteFacilitatorBuilder {
    stage.remote().confirm(Network::BASE_SEPOLIA, stage.chain.rpc_url())
}

/// Ways to lose an answer.
fn losses() -> [Reply; 6] {
    [
        Reply::Status(502, "bad gateway"),
        Reply::Silence,
        Reply::Cut,
        still_pending(),
        refusal("the_moon_is_full"),
        Reply::Json(200, json!({ "success": true, "transaction": "", "network": "eip155:84532" })),
    ]
}

#[tokio::test]
async fn a_channels_life_through_a_facilitator() {
    let bank = Bank::open().await;
    let Bank { stage, channels, channel } = &bank;
    let (config, token) = (channel.config, channel.config.token);
    assert_eq!(channels.network(), Network::BASE_SEPOLIA);
    let deposit = bank.sign(10_000).await;
    assert_eq!(channels.verify_deposit(&config, &deposit).await.unwrap().state.balance, 0);
    assert_eq!(bank.deposit(&deposit).await.unwrap(), 10_000);
    assert_eq!(bank.deposit(&deposit).await.unwrap(), 10_000, "it is found on the chain");
    assert_eq!(stage.settles().len(), 1, "nobody is asked for what was done");

    // Of the claims, one is for more than is in its channel.
    let rows = [channel.row(4_000, 3_300).await, channel.row(20_000, 20_000).await];
    let claimed = channels.claim(&rows, &bank.key()).await.unwrap();
    assert_eq!((claimed.amount, claimed.refused.len(), claimed.refused[0].index), (3_300, 1, 1));
    assert!(channels.claim(&rows[..1], &bank.key()).await.unwrap().transactions.is_empty(), "claimed before");
    let settled = channels.settle(config.receiver, token).await.unwrap().unwrap();
    assert_eq!((settled.amount, stage.chain.balance(config.receiver).await), (3_300, 3_300));
    assert_eq!(channels.settle(config.receiver, token).await.unwrap(), None);

    let order = bank.order(20_000, 0, 4_000).await;
    let refunded = channels.refund(&order, &bank.key()).await.unwrap();
    assert_eq!((refunded.amount, refunded.observed.state.refund_nonce), (6_000, 1));
    assert_eq!(channels.refund(&order, &bank.key()).await.unwrap().transaction, refunded.transaction);
    assert_eq!((bank.state().await, stage.chain.balance(config.payer).await), ((4_000, 4_000), 96_000));
    assert_eq!(stage.settles().len(), 4);
    // Without anything to claim the refund is alone in its transaction.
    let more = bank.sign(1_000).await;
    assert_eq!(bank.deposit(&more).await.unwrap(), 5_000);
    let refunded = channels.refund(&bank.order(1_000, 1, 4_000).await, &bank.key()).await.unwrap();
    let transaction = stage.chain.provider().get_transaction_by_hash(refunded.transaction).await.unwrap().unwrap();
    let input = alloy_consensus::Transaction::input(&transaction);
    assert_eq!((refunded.amount, &input[..4]), (1_000, &BatchSettlement::refundWithSignatureCall::SELECTOR[..]));
}

#[tokio::test]
async fn an_answer_that_is_lost_moves_nothing_twice() {
    let bank = Bank::open().await;
    let Bank { stage, channels, channel } = &bank;
    let (mut balance, mut charged, mut paid) = (0, 0, 0);
    for (index, reply) in losses().into_iter().enumerate() {
        let asked = stage.settles().len();
        let lose = || stage.script([Turn::Instead(reply.clone())], Turn::Honest);
        lose();
        balance += 10_000;
        assert_eq!(bank.deposit(&bank.sign(10_000).await).await.unwrap(), balance, "loss {index}");
        lose();
        charged += 1_000;
        channels.claim(&[channel.row(charged, charged).await], &bank.key()).await.unwrap();
        lose();
        channels.settle(channel.config.receiver, channel.config.token).await.unwrap();
        lose();
        charged += 1_000;
        let order = bank.order(500, index as u128, charged).await;
        assert_eq!(channels.refund(&order, &bank.key()).await.unwrap().amount, 500, "loss {index}");
        balance -= 500;
        paid += 1_000;
        assert_eq!(
            (bank.state().await, stage.chain.balance(channel.config.receiver).await),
            ((balance, charged), paid)
        );
        paid += 1_000;
        // Who says that it is done is not asked again, but the chain.
        let asked = stage.settles().len() - asked;
        assert_eq!(asked, if index == 5 { 4 } else { 8 }, "loss {index}");
    }
}

#[tokio::test]
async fn a_facilitator_is_asked_again_for_what_it_did_not_get_or_does_not_see_yet() {
    let bank = Bank::open().await;
    let Bank { stage, channels, channel } = &bank;
    stage.script([Turn::Without(Reply::Cut), Turn::Without(Reply::Cut)], Turn::Honest);
    assert_eq!(bank.deposit(&bank.sign(10_000).await).await.unwrap(), 10_000);
    assert_eq!(stage.settles().len(), 3);
    channels.claim(&[channel.row(1_000, 1_000).await], &bank.key()).await.unwrap();
    stage.script([Turn::Without(refusal(reason::NOTHING_TO_SETTLE))], Turn::Honest);
    let settled = channels.settle(channel.config.receiver, channel.config.token).await.unwrap();
    assert_eq!(settled.map(|settled| settled.amount), Some(1_000));
}

/// The last answer is lost, too: then the chain tells.
#[tokio::test]
async fn a_facilitator_that_never_answers_but_acts_is_found_out() {
    let bank = Bank::open().await;
    let Bank { stage, channels, channel } = &bank;
    stage.script([], Turn::Instead(Reply::Status(500, "{}")));
    assert_eq!(bank.deposit(&bank.sign(10_000).await).await.unwrap(), 10_000);
    channels.claim(&[channel.row(1_000, 1_000).await], &bank.key()).await.unwrap();
    assert_eq!(channels.settle(channel.config.receiver, channel.config.token).await.unwrap(), None, "nothing is left");
    assert_eq!(channels.refund(&bank.order(9_000, 0, 1_000).await, &bank.key()).await.unwrap().amount, 9_000);
    assert_eq!((bank.state().await, stage.chain.balance(channel.config.receiver).await), ((1_000, 1_000), 1_000));
    // It refuses what it did: a deposit cannot be made twice, says its simulation.
    stage.script([], Turn::Instead(refusal(reason::DEPOSIT_SIMULATION_FAILED)));
    assert_eq!(bank.deposit(&bank.sign(3_000).await).await.unwrap(), 4_000);
}

#[tokio::test]
async fn an_outage_is_unknown_until_the_chain_shows_the_action() {
    let bank = Bank::open().await;
    let stage = &bank.stage;
    let deposit = bank.sign(10_000).await;
    let pending = |result: Result<u128, ChannelError>| matches!(result, Err(ChannelError::Pending { .. }));
    for reply in [Reply::Status(502, "bad gateway"), Reply::Cut, still_pending(), refusal(reason::RPC_READ_FAILED)] {
        stage.script([], Turn::Without(reply));
        assert!(pending(bank.deposit(&deposit).await));
    }
    // A refusal after a lost request may be that request's doing.
    stage.script([Turn::Without(Reply::Cut)], Turn::Without(refusal(reason::DEPOSIT_SIMULATION_FAILED)));
    assert!(pending(bank.deposit(&deposit).await));
    // The first word that it hears is believed if the chain does not say otherwise: nothing was sent.
    stage.script([], Turn::Without(refusal(reason::RECEIVER_MISMATCH)));
    let refused = bank.deposit(&deposit).await.unwrap_err();
    assert!(matches!(refused, ChannelError::Rejected { reason: reason::RECEIVER_MISMATCH, .. }), "{refused:?}");
    assert_eq!(bank.state().await, (0, 0));
    stage.script([], Turn::Honest);
    assert_eq!(bank.deposit(&deposit).await.unwrap(), 10_000);
    assert_eq!(bank.state().await, (10_000, 0));
}

/// Says that it did it: in this transaction, and with this amount.
fn lie(transaction: B256, amount: &str) -> Reply {
    let state = json!({
        "channelId": B256::ZERO, "balance": amount, "totalClaimed": "0", "withdrawRequestedAt": 0, "refundNonce": "0",
    });
    Reply::Json(
        200,
        json!({
            "success": true, "transaction": transaction, "network": "eip155:84532", "amount": amount,
            "extra": { "channelState": state },
        }),
    )
}

#[tokio::test]
async fn a_facilitator_that_lies_is_not_believed() {
    let bank = Bank::open_with(|remote| remote.settle_timeout(Duration::ZERO)).await;
    let Bank { stage, channels, channel } = &bank;
    let config = channel.config;
    let first = bank.sign(10_000).await;
    // A lie about the amount has no effect, since nobody looks at it.
    stage.script([], Turn::Instead(lie(B256::ZERO, "999999")));
    assert_eq!(bank.deposit(&first).await.unwrap(), 10_000);
    let transaction = channels.deposit(&config, &channel.voucher(1_000), &first).await.unwrap().transaction;
    // Nor is there a second deposit because a transaction made an equal one before.
    let second = bank.sign(10_000).await;
    let asked = stage.settles().len();
    for named in [B256::repeat_byte(1), transaction] {
        stage.script([], Turn::Without(lie(named, "10000")));
        let lied = channels.deposit(&config, &channel.voucher(1_000), &second).await;
        assert!(matches!(lied, Err(ChannelError::Pending { transaction: Some(hash) }) if hash == named), "{lied:?}");
    }
    stage.script([], Turn::Without(Reply::Status(502, "bad gateway")));
    let lost = channels.deposit(&config, &channel.voucher(1_000), &second).await;
    assert!(matches!(lost, Err(ChannelError::Pending { .. })), "{lost:?}");
    assert_eq!(stage.settles().len() - asked, 3, "there is no time to ask again");
    let lied = channels.claim(&[channel.row(2_000, 2_000).await], &bank.key()).await;
    assert!(matches!(lied, Err(ChannelError::Pending { .. })), "{lied:?}");
    stage.script([], Turn::Honest);
    channels.claim(&[channel.row(2_000, 2_000).await], &bank.key()).await.unwrap();
    let settled = channels.settle(config.receiver, config.token).await.unwrap().unwrap();
    // An old settlement is none of what was claimed since.
    channels.claim(&[channel.row(4_000, 4_000).await], &bank.key()).await.unwrap();
    stage.script([], Turn::Without(lie(settled.transaction, "2000")));
    let lied = channels.settle(config.receiver, config.token).await;
    assert!(matches!(lied, Err(ChannelError::Pending { .. })), "{lied:?}");
    assert_eq!((bank.state().await, stage.chain.balance(config.receiver).await), ((10_000, 4_000), 2_000));
}

/// Makes calls of the escrow contract, as anybody can, and names the transaction of the last one.
fn does(chain: &DevnetChain, calls: Vec<Vec<u8>>) -> Turn {
    let devnet = chain.devnet.clone();
    Turn::Other(Arc::new(move || {
        let transaction = calls.iter().fold(B256::ZERO, |_, call| {
            devnet.execute(Address::repeat_byte(9), Escrow::ADDRESS, call.clone()).unwrap().transaction_hash
        });
        lie(transaction, "1")
    }))
}

/// A transaction of the contract that succeeded, after the channel was looked at, and is about other money than was asked for.
#[tokio::test]
async fn a_transaction_that_does_something_else_is_not_believed() {
    let bank = Bank::open_with(|remote| remote.settle_timeout(Duration::ZERO)).await;
    let Bank { stage, channels, channel } = &bank;
    let (chain, config) = (&stage.chain, channel.config);
    let other = Channel::funded(chain, random_address(), &channel.authorizer, 100_000).await;
    let until = chain.timestamp().await + 3_600;
    let asks = |does: Turn| stage.script([], does);
    let is_pending = |result: Result<(), ChannelError>, what: &str| {
        assert!(matches!(result, Err(ChannelError::Pending { transaction: Some(_) })), "{what}: {result:?}");
    };

    // As much into another channel, and less into this one.
    let deposit = bank.sign(10_000).await;
    let elsewhere = other.deposit_call(&other.sign_deposit(chain, 10_000, until).await).abi_encode();
    let less = channel.deposit_call(&bank.sign(9_000).await).abi_encode();
    for (what, call) in [("another channel", elsewhere), ("less", less)] {
        asks(does(chain, vec![call]));
        is_pending(channels.deposit(&config, &channel.voucher(1_000), &deposit).await.map(drop), what);
    }
    assert_eq!(bank.state().await, (9_000, 0));

    // Less than was asked for, and the claim of another channel.
    let claims = |rows: &[Claim]| claim_call(rows, &channel.authorizer).abi_encode();
    for (what, row) in [("less", channel.row(1_000, 1_000).await), ("another", other.row(2_000, 2_000).await)] {
        asks(does(chain, vec![claims(&[row])]));
        is_pending(channels.claim(&[channel.row(2_000, 2_000).await], &bank.key()).await.map(drop), what);
    }
    assert_eq!(bank.state().await, (9_000, 1_000));

    // The transfer of what was claimed for another receiver.
    let settle = BatchSettlement::settleCall { receiver: other.config.receiver, token: config.token };
    asks(does(chain, vec![settle.abi_encode()]));
    is_pending(channels.settle(config.receiver, config.token).await.map(drop), "another receiver");
    assert_eq!(chain.balance(config.receiver).await, 0);

    // A refund of another channel, one without the claim that goes before it, and a claim without the refund.
    asks(does(chain, vec![refund_call(&other, 100, 0).abi_encode()]));
    is_pending(channels.refund(&order(&bank, 100, 0, None), &bank.key()).await.map(drop), "another channel");
    asks(does(chain, vec![refund_call(channel, 100, 0).abi_encode()]));
    let claim = Some(channel.row(2_000, 2_000).await);
    is_pending(channels.refund(&order(&bank, 100, 0, claim), &bank.key()).await.map(drop), "no claim");
    let all = channel.row(8_900, 8_900).await;
    asks(does(chain, vec![claims(slice::from_ref(&all))]));
    is_pending(channels.refund(&order(&bank, 100, 1, None), &bank.key()).await.map(drop), "no refund");
    assert_eq!(bank.state().await, (8_900, 8_900));
    assert_eq!(stage.settles().len(), 8, "without time nobody is asked twice");
}

/// A moment before the transaction somebody else claims: what was to be claimed with the refund, or all that is there.
#[tokio::test]
async fn a_claim_that_comes_before_a_refund_is_taken_into_account() {
    let bank = Bank::open_with(|remote| remote.settle_timeout(Duration::ZERO)).await;
    let Bank { stage, channels, channel } = &bank;
    bank.deposit(&bank.sign(10_000).await).await.unwrap();
    let (first, all) = (channel.row(2_000, 2_000).await, channel.row(9_900, 9_900).await);
    let claims = |row: &Claim| claim_call(slice::from_ref(row), &channel.authorizer).abi_encode();
    let refund = |nonce| refund_call(channel, 100, nonce).abi_encode();
    stage.script([], does(&stage.chain, vec![claims(&first), refund(0)]));
    let refunded = channels.refund(&order(&bank, 100, 0, Some(first.clone())), &bank.key()).await.unwrap();
    assert_eq!((refunded.amount, bank.state().await), (100, (9_900, 2_000)));
    stage.script([], does(&stage.chain, vec![claims(&all), refund(1)]));
    let nothing = channels.refund(&order(&bank, 100, 1, None), &bank.key()).await;
    assert!(matches!(nothing, Err(ChannelError::Rejected { reason: reason::REFUND_NO_BALANCE, .. })), "{nothing:?}");
}

/// It simulates well at the seller's node, and reverts at the facilitator's cost, which does not name the transaction.
#[tokio::test]
async fn a_refund_that_reverts_without_a_hash_is_asked_for_more_and_more_rarely() {
    let bank = Bank::open().await;
    let Bank { stage, channels, .. } = &bank;
    bank.deposit(&bank.sign(10_000).await).await.unwrap();
    stage.script([], Turn::Without(refusal(reason::REFUND_TRANSACTION_FAILED)));
    let before = stage.settles().len();
    let ask = async || channels.refund(&order(&bank, 100, 0, None), &bank.key()).await;
    for asked in 1..=2 {
        let refund = ask().await;
        assert!(matches!(refund, Err(ChannelError::Pending { transaction: None })), "{refund:?}");
        assert_eq!(stage.settles().len() - before, asked, "once each");
    }
    for _ in 0..3 {
        let refund = ask().await;
        assert!(matches!(refund, Err(ChannelError::Unavailable(_))), "{refund:?}");
    }
    assert_eq!(stage.settles().len() - before, 2, "then it has to wait");
    // Other payers do not.
    let other = Channel::funded(&stage.chain, random_address(), &bank.channel.authorizer, 100_000).await;
    other.deposit(&stage.chain, &stage.chain.relayer().await, 10_000).await;
    stage.script([], Turn::Honest);
    let theirs = RefundOrder { config: other.config, voucher: other.voucher(1), amount: 100, nonce: 0, claim: None };
    assert_eq!(channels.refund(&theirs, &bank.key()).await.unwrap().amount, 100);
}

/// A facilitator pays for few rows of callers that it does not know, and says so.
#[tokio::test]
async fn claims_have_as_many_rows_as_the_facilitator_takes() {
    let bank = Bank::open().await;
    let mut rows = Vec::new();
    for _ in 0..6 {
        let channel = Channel::funded(&bank.stage.chain, random_address(), &bank.channel.authorizer, 10_000).await;
        channel.deposit(&bank.stage.chain, &bank.stage.chain.relayer().await, 10_000).await;
        rows.push(channel.row(1_000, 1_000).await);
    }
    let claimed = bank.channels.claim(&rows, &bank.key()).await.unwrap();
    assert_eq!((claimed.amount, claimed.transactions.len(), claimed.refused.len()), (6_000, 2, 0));
}

fn order(bank: &Bank, amount: u128, nonce: u128, claim: Option<Claim>) -> RefundOrder {
    RefundOrder { config: bank.channel.config, voucher: bank.channel.voucher(1_000), amount, nonce, claim }
}

#[tokio::test]
async fn a_facilitator_that_is_not_there_was_sent_nothing() {
    let bank = Bank::open().await;
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let front = closed.local_addr().unwrap();
    // The address answers once, what is supported.
    let supported = json!({ "kinds": [{ "x402Version": 2, "scheme": "batch-settlement", "network": "eip155:*" }] });
    let answering = tokio::spawn(async move {
        let app = axum::Router::new().fallback(move || async move { supported.to_string() });
        axum::serve(closed, app).await
    });
    let remote = RemoteFacilitator::builder(format!("http://{front}")).network(Network::BASE_SEPOLIA);
    let remote = remote.confirm(Network::BASE_SEPOLIA, bank.stage.chain.rpc_url()).build().await.unwrap();
    let channels = remote.channels(bank.stage.chain.asset()).await.unwrap();
    answering.abort();
    let _ = answering.await;
    let deposit = bank.sign(10_000).await;
    let unsent = channels.deposit(&bank.channel.config, &bank.channel.voucher(1), &deposit).await;
    assert!(matches!(unsent, Err(ChannelError::Unavailable(_))), "{unsent:?}");
    assert_eq!(bank.deposit(&deposit).await.unwrap(), 10_000);
}

#[tokio::test]
async fn what_channels_need_is_checked_at_the_start() {
    let bank = Bank::open().await;
    let (network, asset) = (Network::BASE_SEPOLIA, bank.stage.chain.asset());
    let without_node = bank.stage.remote().build().await.unwrap();
    assert_eq!(without_node.channels(asset.clone()).await.unwrap_err(), RemoteBuildError::NoNode(network));
    let other = Stage::open().await;
    let without_channels = confirmed(&other).build().await.unwrap();
    let error = without_channels.channels(asset.clone()).await.unwrap_err();
    assert_eq!(error, RemoteBuildError::NoChannels(network));
    assert!(error.to_string().contains("eip155:84532"), "{error}");
    bank.stage.chain.set_code(Escrow::ADDRESS, bytes!("")).await;
    let error = confirmed(&bank.stage).build().await.unwrap().channels(asset).await.unwrap_err();
    let missing = RemoteBuildError::NoContract { name: "x402BatchSettlement", address: Escrow::ADDRESS, network };
    assert_eq!(error, missing);
}

const PAYEE: Address = address!("90F79bf6EB2c4f870365E785982E1f101E93b906");

/// Buys an answer. Returns what it cost.
async fn buy(app: &App, payer: &Payer, body: &'static str) -> u64 {
    let http = app.clone().map_request(|request: Request<String>| request.map(Body::from));
    let request = Request::post("http://shop.example/evaluate").body(body.to_owned()).unwrap();
    let response = AddPaymentLayer::new(payer.clone()).layer(http).oneshot(request).await.unwrap();
    let receipt = response.receipt().unwrap();
    assert_eq!((response.status().as_u16(), receipt.outcome), (200, PaymentOutcome::Accepted), "{receipt:?}");
    receipt.amount.atomic()
}

#[tokio::test]
async fn a_seller_without_a_gas_key_is_paid_by_voucher() {
    let Bank { stage, channels: contract, .. } = Bank::open().await;
    let channels = Channels::builder(contract, AuthorizerKey::new(PrivateKeySigner::random()))
        .ledger(Arc::new(MemoryLedger::new()))
        .min_deposit("$0.01")
        .build()
        .unwrap();
    let layer = RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, PAYEE)
        .facilitator(confirmed(&stage).build().await.unwrap())
        .vouchers(channels.clone());
    let (app, handled) = scripted::serve(layer, |_, request: Request<RequestBody<Body>>| async move {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let mut response = Response::new(Body::from(body.clone()));
        if &body[..] == b"cheap" {
            response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(300)));
        }
        response
    });
    let buyer = PrivateKeySigner::random();
    stage.chain.mint(buyer.address(), 100 * PRICE).await;
    let payer = Payer::builder(buyer.clone()).budget(Budget::builder().build()).vouchers(ChannelPolicy::new()).build();

    // The answer to the first deposit is lost.
    stage.script([Turn::Instead(Reply::Cut)], Turn::Honest);
    assert_eq!(buy(&app, &payer, "one").await, 1_000);
    let asked = stage.settles().len();
    assert_eq!(buy(&app, &payer, "two").await, 1_000);
    assert_eq!(buy(&app, &payer, "cheap").await, 300);
    assert_eq!(stage.settles().len(), asked, "a voucher asks nobody");
    let report = channels.claim_all().await.unwrap();
    assert_eq!((report.claimed, report.settled, stage.chain.balance(PAYEE).await), (2_300, 2_300, 2_300));
    assert_eq!(buy(&app, &payer, "three").await, 1_000);

    // The channel is emptied at the payer's wish, which claims the last payment in the same transaction.
    let id = payer.budget().journal().channels()[0].id();
    let unpaid = || Request::post("http://shop.example/evaluate");
    let mut refund = payer.refund(id, None).await.unwrap().expect("something is left");
    let request = unpaid().header(refund.header_name(), refund.header()).body(Body::empty()).unwrap();
    let answer = app.clone().oneshot(request).await.unwrap();
    refund.answered(answer.status(), answer.headers()).await.unwrap();
    let refund = refund.conclude().await;
    assert_eq!((refund.amount.atomic(), &refund.reason), (6_700, &None), "{refund:?}");
    assert_eq!(stage.chain.balance(buyer.address()).await, 100 * PRICE - 3_300);
    channels.claim_all().await.unwrap();
    assert_eq!((stage.chain.balance(PAYEE).await, handled.load(Ordering::SeqCst)), (3_300, 4));
}
