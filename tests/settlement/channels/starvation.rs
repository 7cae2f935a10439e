//! A seller that is flooded with deposits: its claims are made, its payers are served, and what it can lose is bounded.
//!
//! Seller, payers and attackers speak HTTP over loopback, and share the processors with each other and the node. Attackers and node have a
//! thread of their own, so that the seller waits for them as it would for other machines. The node answers after 60 ms and makes a block every
//! two seconds. The ignored tests are of full size and print their figures:
//!
//! ```text
//! cargo test --release -p tower-x402-tests --test settlement -- --ignored --nocapture --test-threads 1 channels::starvation
//! ```

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fmt,
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use alloy_primitives::{B256, U256};
use alloy_provider::Provider as _;
use alloy_rpc_types_eth::{Filter, Log};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, SolEvent as _};
use axum::{Router, body::Body};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::{Chain as _, Relayer},
    devnet::DevnetChain,
    escrow::{Channel, send as execute},
    shop::{Answer, PRICE, Shop, demand},
};
use tokio::{
    net::TcpListener,
    runtime::{self, Runtime},
    time::{Instant, interval, sleep, timeout},
};
use tower::Layer as _;
use tower_x402::{
    Clock, Network, Usdc,
    channels::{Channels, ClaimPolicy},
    facilitator::channels::OnchainChannels,
    ledger::{MemoryLedger, channels::ChannelLedger as _},
    server::RequestBody,
    vouchers::{AuthorizerKey, Deposit, Escrow, abi::BatchSettlement},
};
use x402_devnet::Fault;

use super::gas_key;

const LATENCY: Duration = Duration::from_millis(60);
/// How long the handler works.
const WORK: Duration = Duration::from_millis(50);
const COST: u128 = PRICE as u128;
/// What honest payers deposit: those that pay all the time, those that deposit all the time, and those that withdraw.
const LARGE: u128 = 10_000_000;
const USUAL: u128 = 50_000;
const ON_CREDIT: u128 = 1_000_000;
const CREDIT: u128 = 500_000;
const PAYERS: usize = 8;
const DEPOSITORS: usize = 4;
/// So many blocks after a withdrawal was noticed, what it could take is claimed.
const MAX_BLOCKS: u64 = 2;

/// Where the node and the attackers are.
static ELSEWHERE: LazyLock<Runtime> =
    LazyLock::new(|| runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());

/// What the attackers send.
#[derive(Clone, Copy, Debug)]
enum Deposits {
    /// Of a payer that has the money, and did not sign them.
    Unsigned,
    /// Signed by payers that have no money.
    Empty,
    /// Good ones, of $0.001, each of a payer of its own.
    Small,
}

struct Attack {
    deposits: Deposits,
    connections: u32,
    per_second: u32,
    /// For how long the honest payers are alone, and then beside the attack.
    quiet: Duration,
    lasts: Duration,
    /// How many payers announce a withdrawal, one after the other.
    withdrawals: u32,
    block_time: Duration,
    /// Whether the run is long enough to compare how many honest payers were served.
    is_measured: bool,
}

/// The machine's clock, set forward: channels that were looked at become stale.
#[derive(Debug, Default)]
struct Ahead(AtomicU64);

impl Clock for Ahead {
    fn now(&self) -> u64 {
        unix_now() + self.0.load(Relaxed)
    }
}

struct Stage {
    chain: DevnetChain,
    channels: Channels,
    ledger: Arc<MemoryLedger>,
    clock: Arc<Ahead>,
    authorizer: PrivateKeySigner,
    shop: Shop,
    url: String,
    offer: Value,
    is_over: AtomicBool,
}

impl Stage {
    async fn open(block_time: Duration) -> Self {
        let chain = ELSEWHERE.spawn(DevnetChain::start(Some(block_time))).await.unwrap();
        let (authorizer, ledger, clock) =
            (PrivateKeySigner::random(), Arc::new(MemoryLedger::new()), Arc::<Ahead>::default());
        let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url());
        let contract = contract.signer(gas_key(&chain).await).block_time(block_time).build().await.unwrap();
        let channels = Channels::builder(contract, AuthorizerKey::new(authorizer.clone()))
            .ledger(ledger.clone())
            .claims(ClaimPolicy::default().credit(Usdc::from_atomic(CREDIT as u64)))
            .clock(clock.clone())
            .build()
            .unwrap();
        let shop = Shop::in_process(&chain, |builder| builder).await;
        let layer = shop.layer().vouchers(channels.clone()).clock(clock.clone()).build().unwrap();
        let handler = tower::service_fn(async |_: Request<RequestBody<Body>>| {
            sleep(WORK).await;
            Ok::<_, Infallible>(Response::new(Body::from("well done")))
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/evaluate", listener.local_addr().unwrap());
        let app = Router::new().fallback_service(layer.layer(handler));
        tokio::spawn(async { axum::serve(listener, app).await });
        let required = demand(&post(&client(), &url, None).await);
        let is_by_voucher = |offer: &&Value| offer["scheme"] == "batch-settlement";
        let offer = required["accepts"].as_array().unwrap().iter().find(is_by_voucher).unwrap().clone();
        let is_over = AtomicBool::new(false);
        Self { chain, channels, ledger, clock, authorizer, shop, url, offer, is_over }
    }

    async fn channel(&self, units: u128) -> Channel {
        Channel::funded(&self.chain, self.shop.pay_to, &self.authorizer, units as u64).await
    }

    async fn sign(&self, channel: &Channel, units: u128) -> Deposit {
        channel.sign_deposit(&self.chain, units, unix_now() + 7_200).await
    }

    /// A payment as it is in its header.
    fn payment(&self, kind: &str, channel: &Channel, max: u128, deposit: Option<&Deposit>) -> String {
        let mut payload = json!({ "type": kind, "channelConfig": channel.config, "voucher": channel.voucher(max) });
        if let Some(deposit) = deposit {
            payload["deposit"] = json!(deposit);
        }
        let payment = json!({ "x402Version": 2, "accepted": self.offer, "payload": payload });
        BASE64_STANDARD.encode(payment.to_string())
    }

    /// What an attacker sends, signed before the attack begins.
    async fn attacks(&self, attack: &Attack) -> Vec<String> {
        let (rich, stranger) = (self.channel(LARGE).await, PrivateKeySigner::random());
        let count = u64::from(attack.per_second) * attack.lasts.as_secs();
        let mut payments = Vec::new();
        for n in 1..=count {
            let mut channel = rich.clone();
            channel.config.salt = B256::from(U256::from(n));
            channel.payer = match attack.deposits {
                Deposits::Unsigned => stranger.clone(),
                Deposits::Empty | Deposits::Small => PrivateKeySigner::random(),
            };
            let mut units = USUAL;
            if !matches!(attack.deposits, Deposits::Unsigned) {
                channel.config.payer = channel.payer.address();
            }
            if matches!(attack.deposits, Deposits::Small) {
                units = COST;
                self.chain.mint(channel.config.payer, PRICE).await;
            }
            let deposit = self.sign(&channel, units).await;
            payments.push(self.payment("deposit", &channel, COST, Some(&deposit)));
        }
        payments
    }

    async fn buyer(self: &Arc<Self>, funds: u128) -> Buyer {
        Buyer { stage: self.clone(), channel: self.channel(funds).await, charged: 0, http: client() }
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Relaxed)
    }

    fn block(&self) -> u64 {
        self.chain.devnet.block_number()
    }

    /// The blocks in which something of this channel was claimed, and what was claimed in all by then.
    async fn claims(&self, channel: &Channel) -> Vec<(u64, u128)> {
        let filter = Filter::new().from_block(0).address(Escrow::ADDRESS).topic1(channel.id().digest());
        let filter = filter.event_signature(BatchSettlement::Claimed::SIGNATURE_HASH);
        let logs = self.chain.provider().get_logs(&filter).await.unwrap();
        let claim = |log: &Log| {
            let event = log.log_decode::<BatchSettlement::Claimed>().unwrap().inner.data;
            (log.block_number.unwrap(), event.newTotalClaimed)
        };
        logs.iter().map(claim).collect()
    }
}

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

async fn post(http: &reqwest::Client, url: &str, payment: Option<&str>) -> Answer {
    let mut request = http.post(url).body("evaluate");
    if let Some(payment) = payment {
        request = request.header("payment-signature", payment);
    }
    let answer = request.send().await.unwrap();
    let (status, headers) = (answer.status(), answer.headers().clone());
    Answer { status, headers, body: answer.bytes().await.unwrap() }
}

/// The code of an answer, for the table.
fn code(answer: &Answer) -> String {
    let error = match answer.headers.get("payment-required") {
        Some(_) => demand(answer)["error"].clone(),
        None => serde_json::from_slice::<Value>(&answer.body).map_or(Value::Null, |body| body["error"].clone()),
    };
    let text = error.as_str().unwrap_or_default().replace("invalid_batch_settlement_evm_", "");
    format!("{} {}", answer.status.as_u16(), text.split(':').next().unwrap_or_default()).trim().to_owned()
}

/// An honest payer with a channel.
struct Buyer {
    stage: Arc<Stage>,
    channel: Channel,
    charged: u128,
    http: reqwest::Client,
}

impl Buyer {
    async fn pay(&mut self, deposit: Option<&Deposit>) -> Answer {
        let kind = if deposit.is_some() { "deposit" } else { "voucher" };
        let payment = self.stage.payment(kind, &self.channel, self.charged + COST, deposit);
        let answer = post(&self.http, &self.stage.url, Some(&payment)).await;
        if answer.status == StatusCode::OK {
            self.charged += COST;
        }
        answer
    }

    /// Pays with a deposit until it is served.
    async fn deposit(&mut self, units: u128) {
        let deposit = self.stage.sign(&self.channel, units).await;
        while !self.stage.is_over() && self.pay(Some(&deposit)).await.status != StatusCode::OK {
            sleep(Duration::from_millis(500)).await;
        }
    }
}

/// What happened, counted.
#[derive(Default)]
struct Counts {
    served: AtomicU64,
    refused: Mutex<BTreeMap<String, u64>>,
    deposits: AtomicU64,
    slowest_deposit: Mutex<Duration>,
    /// Claims of everything, and the most blocks that one took.
    passes: AtomicU64,
    failed_passes: AtomicU64,
    slowest_pass: AtomicU64,
    attacks: Mutex<BTreeMap<String, u64>>,
}

impl Counts {
    fn rates(&self, before: (u64, u64), time: Duration) -> (f64, f64) {
        let rate = |now: u64, before: u64| (now - before) as f64 / time.as_secs_f64();
        let (served, deposits) = self.now();
        (rate(served, before.0), rate(deposits, before.1))
    }

    fn now(&self) -> (u64, u64) {
        (self.served.load(Relaxed), self.deposits.load(Relaxed))
    }
}

async fn pay_all_the_time(mut buyer: Buyer, counts: Arc<Counts>) {
    while !buyer.stage.is_over() {
        let answer = buyer.pay(None).await;
        if answer.status == StatusCode::OK {
            counts.served.fetch_add(1, Relaxed);
            continue;
        }
        *counts.refused.lock().unwrap().entry(code(&answer)).or_default() += 1;
        sleep(Duration::from_millis(200)).await;
    }
}

/// One after the other, each into a channel of its own.
async fn deposit_all_the_time(buyers: Vec<Buyer>, counts: Arc<Counts>) {
    for mut buyer in buyers {
        let began = Instant::now();
        buyer.deposit(USUAL).await;
        if buyer.stage.is_over() {
            return;
        }
        counts.deposits.fetch_add(1, Relaxed);
        let mut slowest = counts.slowest_deposit.lock().unwrap();
        *slowest = began.elapsed().max(*slowest);
    }
}

async fn claim_all_the_time(stage: Arc<Stage>, counts: Arc<Counts>) {
    while !stage.is_over() {
        let block = stage.block();
        let claimed = stage.channels.claim_all().await;
        counts.passes.fetch_add(1, Relaxed);
        counts.slowest_pass.fetch_max(stage.block() - block, Relaxed);
        if let Err(error) = claimed {
            println!("a claim of everything failed: {error}");
            counts.failed_passes.fetch_add(1, Relaxed);
        }
        sleep(Duration::from_secs(5)).await;
    }
}

/// Sends one deposit after the other at its rate. A connection whose answer is late is closed, and another is opened: the seller goes on with
/// what it began.
async fn flood(
    stage: Arc<Stage>,
    payments: Arc<Vec<String>>,
    next: Arc<AtomicUsize>,
    pause: Duration,
    counts: Arc<Counts>,
) {
    let (http, mut turns) = (client(), interval(pause));
    while let Some(payment) = payments.get(next.fetch_add(1, Relaxed)) {
        turns.tick().await;
        let answer = timeout(pause, post(&http, &stage.url, Some(payment))).await;
        let code = answer.map_or("no answer in its turn".to_owned(), |answer| code(&answer));
        *counts.attacks.lock().unwrap().entry(code).or_default() += 1;
    }
}

/// The end of a payer that is served on credit and withdraws.
struct Withdrawn {
    channel: Channel,
    /// The block in which the withdrawal was noticed; what was charged then, and what of it was not claimed.
    noticed: u64,
    charged: u128,
    at_risk: u128,
    refusal: String,
}

async fn withdraw(mut buyer: Buyer, after: Duration) -> Withdrawn {
    let stage = buyer.stage.clone();
    let announced = Instant::now() + after;
    while Instant::now() < announced {
        let answer = buyer.pay(None).await;
        if answer.status != StatusCode::OK {
            sleep(Duration::from_millis(200)).await;
        }
    }
    let relayer = Relayer::of(&stage.chain.rpc_url(), buyer.channel.payer.clone());
    let channel = buyer.channel.clone();
    let noticed = tokio::spawn({
        let (stage, id) = (stage.clone(), channel.id());
        async move {
            loop {
                let record = stage.ledger.channel(&id).await.unwrap().unwrap();
                if record.observed.withdrawal > 0 {
                    return (stage.block(), record.charged(), record.unclaimed());
                }
                sleep(Duration::from_millis(5)).await;
            }
        }
    });
    // All that is not claimed. It reverts if something is claimed in the same block.
    loop {
        let (balance, claimed) = buyer.channel.state(&stage.chain).await;
        let config = (&buyer.channel.config).into();
        let all = BatchSettlement::initiateWithdrawCall { config, amount: balance - claimed };
        if execute(&stage.chain, &relayer, &all).await.status() {
            break;
        }
    }
    stage.clock.0.fetch_add(301, Relaxed);
    let refusal = loop {
        let answer = buyer.pay(None).await;
        match answer.status {
            StatusCode::OK => {}
            StatusCode::PAYMENT_REQUIRED => break code(&answer),
            _ => sleep(Duration::from_millis(200)).await,
        }
    };
    let (noticed, charged, at_risk) = noticed.await.unwrap();
    Withdrawn { channel, noticed, charged, at_risk, refusal }
}

/// Asks for what is left until it is refunded. Returns how long that took.
async fn refund(buyer: Buyer, after: Duration) -> Duration {
    sleep(after).await;
    let began = Instant::now();
    let payment = buyer.stage.payment("refund", &buyer.channel, buyer.charged, None);
    loop {
        let answer = post(&buyer.http, &buyer.stage.url, Some(&payment)).await;
        match answer.status {
            StatusCode::OK => return began.elapsed(),
            StatusCode::SERVICE_UNAVAILABLE => sleep(Duration::from_millis(500)).await,
            _ => panic!("{answer:?}"),
        }
    }
}

/// A line of the table.
fn line(what: &str, value: impl fmt::Display) {
    println!("| {what} | {value} |");
}

async fn survives(attack: Attack) {
    let stage = Arc::new(Stage::open(attack.block_time).await);
    let counts = Arc::new(Counts::default());
    let payments = Arc::new(stage.attacks(&attack).await);
    let mut payers = Vec::new();
    for _ in 0..PAYERS {
        payers.push(stage.buyer(LARGE).await);
    }
    let mut withdrawing = Vec::new();
    for _ in 0..attack.withdrawals {
        let buyer = stage.buyer(ON_CREDIT).await;
        stage.chain.fund(buyer.channel.config.payer, U256::from(10).pow(U256::from(19))).await;
        withdrawing.push(buyer);
    }
    let mut refunded = stage.buyer(USUAL).await;
    let rounds = (attack.quiet + attack.lasts).as_secs() as usize / attack.block_time.as_secs() as usize + 4;
    let mut depositors = Vec::new();
    for _ in 0..DEPOSITORS {
        let mut buyers = Vec::new();
        for _ in 0..rounds {
            buyers.push(stage.buyer(USUAL).await);
        }
        depositors.push(buyers);
    }
    let filled =
        payers.iter_mut().map(|buyer| (buyer, LARGE)).chain(withdrawing.iter_mut().map(|buyer| (buyer, ON_CREDIT)));
    let filled = filled.chain([(&mut refunded, USUAL)]);
    join_all(filled.map(async |(buyer, units)| buyer.deposit(units).await)).await;
    stage.chain.devnet.faults().set(|_| Fault::Delay(LATENCY));

    let mut honest = Vec::new();
    for buyer in payers {
        honest.push(tokio::spawn(pay_all_the_time(buyer, counts.clone())));
    }
    for buyers in depositors {
        honest.push(tokio::spawn(deposit_all_the_time(buyers, counts.clone())));
    }
    honest.push(tokio::spawn(claim_all_the_time(stage.clone(), counts.clone())));
    sleep(attack.block_time).await;
    let before = counts.now();
    sleep(attack.quiet).await;
    let alone = counts.rates(before, attack.quiet);
    *counts.slowest_deposit.lock().unwrap() = Duration::ZERO;

    let (before, began, next) = (counts.now(), Instant::now(), Arc::<AtomicUsize>::default());
    let pause = Duration::from_secs(1) * attack.connections / attack.per_second;
    let mut attackers = Vec::new();
    for _ in 0..attack.connections {
        attackers.push(ELSEWHERE.spawn(flood(stage.clone(), payments.clone(), next.clone(), pause, counts.clone())));
    }
    let turn = attack.lasts / (attack.withdrawals + 1);
    let withdrawing: Vec<_> =
        withdrawing.into_iter().zip(1..).map(|(buyer, n)| tokio::spawn(withdraw(buyer, turn * n - turn / 2))).collect();
    let refunded = tokio::spawn(refund(refunded, attack.lasts / 2));
    for ended in join_all(attackers).await {
        ended.unwrap();
    }
    let lasted = began.elapsed();
    let attacked = counts.rates(before, lasted);
    let slowest_deposit = *counts.slowest_deposit.lock().unwrap();
    let made = payments.len() as f64 / lasted.as_secs_f64();

    let patience = Duration::from_secs(60);
    let refunded = timeout(patience, refunded).await.expect("the refund is made").unwrap();
    let mut withdrawn = Vec::new();
    for withdrawing in withdrawing {
        withdrawn.push(timeout(patience, withdrawing).await.expect("the withdrawal is noticed").unwrap());
    }
    sleep(2 * attack.block_time).await;
    stage.is_over.store(true, Relaxed);
    for task in honest {
        timeout(patience, task).await.expect("honest payers are answered").unwrap();
    }
    stage.chain.devnet.faults().clear();

    line("attack", format!("{:?} deposits, {} connections", attack.deposits, attack.connections));
    line("deposits sent", format!("{made:.0} per second for {:.0} s", lasted.as_secs_f64()));
    line("their answers", format!("{:?}", counts.attacks.lock().unwrap()));
    let part =
        |(alone, attacked): (f64, f64)| format!("{alone:.2} alone, {attacked:.2} beside it: {:.2} ×", attacked / alone);
    line("paid requests per second", part((alone.0, attacked.0)));
    line("their refusals", format!("{:?}", counts.refused.lock().unwrap()));
    line("deposits per second", part((alone.1, attacked.1)));
    line("slowest deposit", format!("{:.1} s", slowest_deposit.as_secs_f64()));
    line("the refund took", format!("{:.1} s", refunded.as_secs_f64()));
    let (passes, failed) = (counts.passes.load(Relaxed), counts.failed_passes.load(Relaxed));
    let slowest_pass = counts.slowest_pass.load(Relaxed);
    line("claims of everything", format!("{passes}, {failed} failed, at most {slowest_pass} blocks each"));

    // The withdrawals end as soon as they may.
    stage.chain.set_next_timestamp(unix_now() + 2_000).await;
    let (mut slow, mut lost) = (Vec::new(), 0);
    for Withdrawn { channel, noticed, charged, at_risk, refusal } in &withdrawn {
        let claims = stage.claims(channel).await;
        let finalize = BatchSettlement::finalizeWithdrawCall { config: (&channel.config).into() };
        stage.chain.devnet.execute(channel.config.payer, Escrow::ADDRESS, finalize.abi_encode()).unwrap();
        let in_all = stage.ledger.channel(&channel.id()).await.unwrap().unwrap().charged();
        let (balance, claimed) = channel.state(&stage.chain).await;
        let loss = (in_all - claimed).saturating_sub(balance - claimed);
        let blocks_until = |sum: u128| {
            let claim = claims.iter().find(|(_, claimed)| *claimed >= sum);
            claim.map(|(block, _)| block.saturating_sub(*noticed))
        };
        let (after, all_after) = (blocks_until(*charged), blocks_until(in_all));
        let text = format!(
            "{at_risk} at risk, claimed {after:?} blocks later; {} charged after that, claimed {all_after:?} blocks later; \
             {in_all} charged, {claimed} claimed, {loss} lost; then {refusal}",
            in_all - charged
        );
        line("a withdrawal", text);
        if *at_risk > 0 && after.is_none_or(|blocks| blocks > MAX_BLOCKS) {
            slow.push((at_risk, after));
        }
        assert!(loss <= ON_CREDIT.min(CREDIT.max(COST)), "more is lost than the guide says: {loss}");
        lost += loss;
    }
    line("lost", lost);
    assert!(withdrawn.iter().any(|withdrawn| withdrawn.at_risk > 0), "something was at risk");
    assert!(slow.is_empty(), "claimed too late: {slow:?}");
    assert_eq!(failed, 0, "claims that failed");
    for (what, alone, beside) in [("requests", alone.0, attacked.0), ("deposits", alone.1, attacked.1)] {
        let is_served = beside > alone / 2.0 || !attack.is_measured;
        assert!(is_served, "{beside} honest {what} a second, and {alone} without the attack");
    }
}

fn attack(deposits: Deposits, times: u32) -> Attack {
    Attack {
        deposits,
        connections: 24 * times,
        per_second: 90 * times,
        quiet: Duration::from_secs(20),
        lasts: Duration::from_secs(60),
        withdrawals: 5,
        block_time: Duration::from_secs(2),
        is_measured: true,
    }
}

/// How many are served is not compared: a few seconds beside other tests say nothing of that.
#[tokio::test(flavor = "multi_thread")]
async fn seller_survives_a_short_flood_of_deposits() {
    let (quiet, lasts) = (Duration::from_secs(1), Duration::from_secs(3));
    let short = Attack { quiet, lasts, withdrawals: 1, is_measured: false, ..attack(Deposits::Unsigned, 1) };
    survives(Attack { block_time: Duration::from_secs(1), ..short }).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a minute and a half"]
async fn seller_survives_deposits_that_nobody_signed() {
    survives(attack(Deposits::Unsigned, 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a minute and a half"]
async fn seller_survives_twice_as_many_deposits_that_nobody_signed() {
    survives(attack(Deposits::Unsigned, 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a minute and a half"]
async fn seller_survives_signed_deposits_without_money() {
    survives(attack(Deposits::Empty, 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a minute and a half"]
async fn seller_survives_twice_as_many_signed_deposits_without_money() {
    survives(attack(Deposits::Empty, 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a minute and a half"]
async fn seller_survives_good_deposits_of_a_tenth_of_a_cent() {
    survives(attack(Deposits::Small, 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a minute and a half"]
async fn seller_survives_twice_as_many_good_deposits_of_a_tenth_of_a_cent() {
    survives(attack(Deposits::Small, 2)).await;
}
