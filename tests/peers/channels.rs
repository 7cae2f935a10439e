//! Our buyer pays the official express and FastAPI servers by vouchers, on the devnet.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::http::Extensions;
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use serde_json::Value;
use tokio::time::timeout;
use tower_x402::{
    ManualClock, Usdc,
    client::{
        Budget, ChannelEntry, ChannelFinding, ChannelPolicy, Journal, Payer, PaymentError, PaymentMiddleware,
        PaymentOutcome, Receipt, ReceiptExt as _, RetryPolicy, reconcile_channels, refund_channels,
    },
    vouchers::{Escrow, abi::BatchSettlement},
};

use support::{
    chain::{Chain, call},
    devnet::DevnetChain,
};

use super::{
    programs::{PAYEE, PYTHON, SETTLER, script},
    stage::{Other, PATIENCE, PRICE},
};

/// The official server, and a payer with money.
struct Stage {
    chain: DevnetChain,
    server: Other,
    key: PrivateKeySigner,
}

impl Stage {
    async fn new(offers: &str) -> Self {
        Self::at(["node", "channels_server.mjs"], offers).await
    }

    async fn at_fastapi() -> Self {
        Self::at([PYTHON, "fastapi_server.py"], "batch-settlement").await
    }

    async fn at(server: [&str; 2], offers: &str) -> Self {
        let chain = DevnetChain::start(None).await;
        let settler: PrivateKeySigner = SETTLER.parse().unwrap();
        chain.fund(settler.address(), U256::from(10_u128.pow(18))).await;
        let key = PrivateKeySigner::random();
        chain.mint(key.address(), 1_000_000).await;
        let mut program = script(server);
        program.env("PAY_TO", PAYEE.to_string()).env("OFFERS", offers);
        program.env("PRIVATE_KEY", SETTLER).env("RPC_URL", chain.rpc_url());
        let server = Other::start(program).await;
        Self { chain, server, key }
    }

    fn payer(&self, journal: Journal, policy: ChannelPolicy) -> Payer {
        let budget = Budget::builder().journal(journal).build();
        Payer::builder(self.key.clone()).budget(budget).vouchers(policy).build()
    }

    async fn stats(&self) -> Value {
        let stats = reqwest::get(format!("{}/stats", self.server.url)).await.unwrap();
        serde_json::from_slice(&stats.bytes().await.unwrap()).unwrap()
    }

    async fn ask(&self, path: &str) {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        assert!(client.post(format!("{}{path}", self.server.url)).send().await.unwrap().status().is_success());
    }

    /// Buys one evaluation; its status and receipt.
    async fn buy(&self, payer: &Payer, query: &str) -> (u16, Receipt) {
        self.buy_with(&client(payer), query).await
    }

    async fn buy_with(&self, client: &ClientWithMiddleware, query: &str) -> (u16, Receipt) {
        let request = client.post(format!("{}/evaluate{query}", self.server.url)).body("{}");
        let response = timeout(PATIENCE, request.send()).await.expect("an answer").unwrap();
        (response.status().as_u16(), response.receipt().unwrap().clone())
    }

    /// What is in a channel, and what of it was claimed.
    async fn on_chain(&self, channel: &ChannelEntry) -> (u128, u128) {
        let asked = BatchSettlement::channelsCall { channelId: channel.id().digest() };
        let state = call(self.chain.provider(), Escrow::ADDRESS, asked).await.unwrap();
        (state.balance, state.totalClaimed)
    }
}

fn client(payer: &Payer) -> ClientWithMiddleware {
    PaymentMiddleware::new(payer.clone()).client(reqwest::Client::builder().no_proxy()).unwrap()
}

/// Takes the time off what servers answer, which do not have that of the chain.
struct Undated;

#[async_trait]
impl Middleware for Undated {
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        let mut response = next.run(request, extensions).await?;
        response.headers_mut().remove("date");
        Ok(response)
    }
}

#[track_caller]
fn charged((status, receipt): (u16, Receipt)) -> u64 {
    assert_eq!((status, receipt.outcome), (200, PaymentOutcome::Accepted), "{receipt:?}");
    receipt.amount.atomic()
}

/// One channel of the payer's.
#[track_caller]
fn channel(payer: &Payer) -> ChannelEntry {
    let mut channels = payer.budget().journal().channels();
    assert_eq!(channels.len(), 1, "{channels:?}");
    channels.remove(0)
}

fn usdc(units: u64) -> Usdc {
    Usdc::from_atomic(units)
}

#[tokio::test]
async fn one_deposit_pays_many_requests_at_what_they_cost() {
    pays_many_requests_at_what_they_cost(Stage::new("batch-settlement,exact").await).await;
}

#[tokio::test]
async fn one_deposit_pays_many_requests_at_the_fastapi_server() {
    pays_many_requests_at_what_they_cost(Stage::at_fastapi().await).await;
}

async fn pays_many_requests_at_what_they_cost(stage: Stage) {
    let payer = stage.payer(Journal::in_memory(), ChannelPolicy::new());
    let (status, first) = stage.buy(&payer, "").await;
    assert_eq!((status, first.outcome), (200, PaymentOutcome::Accepted), "{first:?}");
    assert!(first.transaction.is_some(), "the deposit's");
    assert_eq!(first.channel.as_ref().unwrap().deposit, Some(usdc(10 * PRICE)));
    for (query, cost) in [("", PRICE), ("?charge=300", 300), ("?charge=0", 0)] {
        let receipt = stage.buy(&payer, query).await;
        assert_eq!(receipt.1.transaction, None);
        assert_eq!(charged(receipt), cost, "{query}");
    }
    let channel = channel(&payer);
    assert_eq!((channel.charged, channel.doubt), (usdc(2_300), Usdc::ZERO));
    assert_eq!(stage.on_chain(&channel).await, (10_000, 0));
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(2_300), usdc(7_700)));

    stage.ask("/claim").await;
    assert_eq!(stage.on_chain(&channel).await, (10_000, 2_300));
    assert_eq!(stage.chain.balance(PAYEE).await, 2_300);
    assert_eq!(stage.chain.balance(stage.key.address()).await, 990_000);
    assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
}

#[tokio::test]
async fn an_empty_channel_is_filled_again() {
    fills_an_empty_channel_again(Stage::new("batch-settlement").await).await;
}

#[tokio::test]
async fn an_empty_channel_is_filled_again_at_the_fastapi_server() {
    fills_an_empty_channel_again(Stage::at_fastapi().await).await;
}

async fn fills_an_empty_channel_again(stage: Stage) {
    let payer = stage.payer(Journal::in_memory(), ChannelPolicy::new().deposit(usdc(2_500)));
    for _ in 0..5 {
        assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    }
    let channel = channel(&payer);
    assert_eq!(stage.on_chain(&channel).await, (5_000, 0));
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(5_000), Usdc::ZERO));
}

#[tokio::test]
async fn failed_handler_charges_nothing_and_the_next_request_pays() {
    let stage = Stage::new("batch-settlement").await;
    let payer = stage.payer(Journal::in_memory(), ChannelPolicy::new());
    assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    let (status, receipt) = stage.buy(&payer, "?fail=422").await;
    assert_eq!((status, receipt.outcome), (422, PaymentOutcome::Failed));
    assert_eq!(channel(&payer).doubt, Usdc::ZERO);
    assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    assert_eq!(channel(&payer).charged, usdc(2 * PRICE));
}

#[tokio::test]
async fn restarted_buyer_continues_its_channel() {
    let stage = Stage::new("batch-settlement").await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    for life in 1..=3 {
        let payer = stage.payer(Journal::open(&path).unwrap(), ChannelPolicy::new());
        let budget = payer.budget();
        assert_eq!((budget.spent(), budget.reserved().atomic() > 0), (usdc((life - 1) * PRICE), life > 1));
        assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
        assert_eq!((budget.spent(), budget.reserved()), (usdc(life * PRICE), usdc((10 - life) * PRICE)));
    }
    assert_eq!(stage.chain.balance(stage.key.address()).await, 990_000, "one deposit");
}

#[tokio::test]
async fn buyer_without_its_journal_is_corrected_by_its_own_signature() {
    is_corrected_by_its_own_signature(Stage::new("batch-settlement").await).await;
}

#[tokio::test]
async fn buyer_without_its_journal_is_corrected_by_the_fastapi_server() {
    is_corrected_by_its_own_signature(Stage::at_fastapi().await).await;
}

async fn is_corrected_by_its_own_signature(stage: Stage) {
    let first = stage.payer(Journal::in_memory(), ChannelPolicy::new());
    for _ in 0..3 {
        assert_eq!(charged(stage.buy(&first, "").await), PRICE);
    }
    let second = stage.payer(Journal::in_memory(), ChannelPolicy::new());
    assert_eq!(charged(stage.buy(&second, "").await), PRICE);
    let found = channel(&second);
    assert_eq!((found.opening, found.charged), (usdc(3 * PRICE), usdc(4 * PRICE)));
    assert_eq!(second.budget().spent(), usdc(PRICE), "the others are not of this budget");
    // The first journal excludes what the second one was charged.
    let (status, receipt) = stage.buy(&first, "").await;
    let finding = receipt.channel.unwrap().finding;
    assert!(matches!(finding, Some(ChannelFinding::ChargeNotInBooks { asserted: 4_000, .. })), "{finding:?}");
    assert_eq!((status, receipt.outcome), (402, PaymentOutcome::Failed));
    let refused = client(&first).post(format!("{}/evaluate", stage.server.url)).send().await.unwrap_err();
    assert!(refused.to_string().contains("in dispute"), "{refused}");
}

/// The official server without books takes over from the chain what was claimed, and forgets what was not.
#[tokio::test]
async fn server_without_its_books_does_not_lose_its_buyer() {
    let stage = Stage::new("batch-settlement").await;
    let payer = stage.payer(Journal::in_memory(), ChannelPolicy::new());
    for _ in 0..3 {
        assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    }
    stage.ask("/claim").await;
    stage.ask("/forget").await;
    assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    assert_eq!(channel(&payer).charged, usdc(4 * PRICE));
}

#[tokio::test]
async fn answer_that_never_came_is_not_paid_for_twice() {
    let stage = Stage::new("batch-settlement").await;
    let payer = stage.payer(Journal::in_memory(), ChannelPolicy::new().lanes(1));
    assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    // The client hangs up before the handler is done; the server charges.
    let hasty = PaymentMiddleware::new(payer.clone())
        .retry(RetryPolicy::default().max_attempts(1).attempt_timeout(Duration::from_millis(200)))
        .client(reqwest::Client::builder().no_proxy())
        .unwrap();
    let error = hasty.post(format!("{}/evaluate?delay=600", stage.server.url)).send().await.unwrap_err();
    assert_eq!(PaymentError::of(&error).unwrap().outcome(), PaymentOutcome::Unknown);
    assert_eq!(channel(&payer).doubt, usdc(PRICE));
    timeout(PATIENCE, async {
        while stage.stats().await["handled"] != 2 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .expect("the handler starts");
    // Until it ends, the only channel is busy; then the server corrects, or agrees if it has not charged.
    let patient = PaymentMiddleware::new(payer.clone())
        .retry(RetryPolicy::default().max_attempts(8))
        .client(reqwest::Client::builder().no_proxy())
        .unwrap();
    let response = patient.post(format!("{}/evaluate", stage.server.url)).body("{}").send().await.unwrap();
    let receipt = response.receipt().unwrap();
    assert_eq!((response.status().as_u16(), receipt.outcome), (200, PaymentOutcome::Accepted), "{receipt:?}");
    let channel = channel(&payer);
    assert_eq!(channel.doubt, Usdc::ZERO);
    assert!([2 * PRICE, 3 * PRICE].contains(&channel.charged.atomic()), "{channel:?}");
    stage.ask("/claim").await;
    assert_eq!(stage.on_chain(&channel).await.1, channel.charged.atomic().into(), "both sides have the same books");
}

#[tokio::test]
async fn requests_at_once_share_lanes_and_none_is_refused() {
    let stage = Stage::new("batch-settlement").await;
    let payer = stage.payer(Journal::in_memory(), ChannelPolicy::new().lanes(4));
    let client = client(&payer);
    let requests: Vec<_> = (0..24)
        .map(|_| {
            let request = client.post(format!("{}/evaluate?delay=30", stage.server.url)).body("{}");
            tokio::spawn(async move { request.send().await.unwrap().receipt().unwrap().clone() })
        })
        .collect();
    for request in requests {
        let receipt = timeout(PATIENCE, request).await.expect("an answer").unwrap();
        assert_eq!((receipt.outcome, receipt.amount), (PaymentOutcome::Accepted, usdc(PRICE)), "{receipt:?}");
    }
    let channels = payer.budget().journal().channels();
    assert_eq!(channels.len(), 4);
    assert!(channels.iter().all(|channel| channel.charged > Usdc::ZERO), "{channels:?}");
    assert_eq!(payer.budget().spent(), usdc(24 * PRICE));
    // Its facilitator sends deposits that come together with the same account nonce. Each is sent again, after work for nothing.
    assert!(stage.stats().await["handled"].as_u64().unwrap() >= 24);
    stage.ask("/claim").await;
    assert_eq!(stage.chain.balance(PAYEE).await, 24 * PRICE);
}

#[tokio::test]
async fn idle_channel_is_refunded_and_filled_again_later() {
    refunds_an_idle_channel_and_fills_it_again(Stage::new("batch-settlement").await).await;
}

#[tokio::test]
async fn idle_channel_is_refunded_by_the_fastapi_server() {
    refunds_an_idle_channel_and_fills_it_again(Stage::at_fastapi().await).await;
}

async fn refunds_an_idle_channel_and_fills_it_again(stage: Stage) {
    let clock = Arc::new(ManualClock::at(stage.chain.timestamp().await));
    let payer = Payer::builder(stage.key.clone()).vouchers(ChannelPolicy::new()).clock(clock.clone()).build();
    for _ in 0..2 {
        assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    }
    let refund = async |idle| {
        let client = reqwest::Client::builder().no_proxy();
        refund_channels(&payer, Duration::from_secs(idle), client).await.unwrap()
    };
    assert_eq!(refund(60).await, [], "it is in use");
    clock.advance(60);
    let refunds = refund(60).await;
    assert_eq!((refunds.len(), refunds[0].amount, &refunds[0].reason), (1, usdc(8_000), &None), "{refunds:?}");
    assert!(refunds[0].transaction.is_some());
    assert_eq!(stage.chain.balance(stage.key.address()).await, 998_000);
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(2_000), usdc(8_000)), "until it is final");

    // Once no deposit can be made any more, the chain proves it.
    stage.chain.set_next_timestamp(stage.chain.timestamp().await + 600).await;
    stage.chain.mine().await;
    let found = reconcile_channels(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.seen, found.escrow, found.findings), (1, Usdc::ZERO, vec![]));
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(2_000), Usdc::ZERO));

    clock.advance(600);
    let client = ClientBuilder::new(reqwest::Client::builder().no_proxy().build().unwrap());
    let client = client.with(PaymentMiddleware::new(payer.clone())).with(Undated).build();
    assert_eq!(charged(stage.buy_with(&client, "").await), PRICE);
    assert_eq!(stage.on_chain(&channel(&payer)).await, (12_000, 2_000));
}

#[tokio::test]
async fn few_requests_are_paid_by_exact() {
    let stage = Stage::new("batch-settlement,exact").await;
    let payer = stage.payer(Journal::in_memory(), ChannelPolicy::new().exact_first(2));
    for _ in 0..2 {
        let (status, receipt) = stage.buy(&payer, "").await;
        assert_eq!((status, receipt.outcome, receipt.channel), (200, PaymentOutcome::Settled, None));
    }
    assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    assert_eq!(payer.budget().spent(), usdc(3 * PRICE));
}

#[tokio::test]
async fn separate_key_signs_vouchers() {
    let stage = Stage::new("batch-settlement").await;
    let hot = PrivateKeySigner::random();
    let payer = stage.payer(Journal::in_memory(), ChannelPolicy::new().voucher_key(hot.clone()));
    for _ in 0..2 {
        assert_eq!(charged(stage.buy(&payer, "").await), PRICE);
    }
    assert_eq!(channel(&payer).config.payer_authorizer, hot.address());
    stage.ask("/claim").await;
    assert_eq!(stage.chain.balance(PAYEE).await, 2 * PRICE);
}

#[tokio::test]
async fn deposit_that_the_payer_cannot_make_is_sent_again_when_it_can() {
    let stage = Stage::new("batch-settlement").await;
    let poor = Stage { key: PrivateKeySigner::random(), ..stage };
    let payer = poor.payer(Journal::in_memory(), ChannelPolicy::new());
    let (status, receipt) = poor.buy(&payer, "").await;
    assert_eq!((status, receipt.outcome), (402, PaymentOutcome::Failed), "{receipt:?}");
    assert_eq!(payer.budget().reserved(), usdc(10_000), "the seller has the authorization");
    let nonce = |payer: &Payer| channel(payer).pending.map(|pending| pending.nonce(channel(payer).id()));
    let first = nonce(&payer).unwrap();
    poor.buy(&payer, "").await;
    assert_eq!(nonce(&payer), Some(first), "there is never a second one");
    poor.chain.mint(poor.key.address(), 10_000).await;
    assert_eq!(charged(poor.buy(&payer, "").await), PRICE);
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(1_000), usdc(9_000)));
}
