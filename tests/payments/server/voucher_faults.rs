//! Every call of the channels' books and of their facilitator fails once, in every step of a channel's life: before it takes effect, after
//! it took effect, or as the first of an outage of twenty seconds. The buyer repeats each step until it is done.
//!
//! In the end all that was charged is claimed, and it is the sum of the answers that the buyer got: no charge is without an answer, and
//! none is doubled. What the buyer was told was true. Only a response that streams is not stored with its charge: if the books are away right after
//! that, the buyer is told what it was charged for a response that is lost. This command prints the table:
//!
//! ```text
//! cargo test -p tower-x402-tests --test payments -- --nocapture failed_call_harms_no_channel
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, Bytes, U256};
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::body::Body;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use futures_util::stream;
use http::{Request, Response, StatusCode};
use serde_json::Value;
use support::{
    around_ledger::{CHANNEL_OPERATIONS, operation_of},
    authorization::{random_address, unix_now},
    faulty_ledger::{Calls, Fault, FaultyChannels, How, faulty_channels},
    shop::{App, PRICE, Shop},
};
use tokio::time::{Instant, sleep};
use tower::{BoxError, Layer as _, ServiceExt as _, util::BoxCloneSyncService};
use tower_x402::{
    Clock, Network, Usdc,
    channels::{Channels, ClaimPolicy},
    client::{AddPaymentLayer, Budget, ChannelPolicy, Payer, RetryPolicy},
    facilitator::{
        FacilitatorError, OnchainFacilitator,
        channels::{ChannelError, ChannelFacilitator, Claimed, Executed, OnchainChannels, Settled, SignedRefund},
    },
    ledger::{MemoryLedger, ResponseLimits},
    server::ActualPrice,
    vouchers::{AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, Claim, Deposit, Voucher},
};
use x402_devnet::Devnet;

const MINTED: u64 = 100 * PRICE;
const OUTAGE: Duration = Duration::from_secs(20);
/// The most tries of a step, a second apart: longer than all leases.
const TRIES: u32 = 400;

/// The methods of the facilitator that a seller calls.
const FACILITATOR_METHODS: [&str; 5] = ["observe", "deposit", "claim", "settle", "refund_signed"];

/// A step of a channel's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Pay(&'static str),
    /// The first answer is lost on its way, and the request comes again.
    Lost(&'static str),
    /// The buyer lost its journal, and learns from a corrective 402 what was charged.
    Corrective(&'static str),
    /// The seller looked at the channel too long ago.
    Stale(&'static str),
    Claim,
    Refund,
}

const LIFE: [(&str, Step); 10] = [
    ("deposit", Step::Pay("first")),
    ("voucher", Step::Pay("second")),
    ("lower price", Step::Pay("costs 400")),
    ("top-up", Step::Pay("fourth")),
    ("lost answer", Step::Lost("again")),
    ("streamed", Step::Pay("streams")),
    ("claim", Step::Claim),
    ("stale mirror", Step::Stale("fifth")),
    ("corrective", Step::Corrective("sixth")),
    ("refund", Step::Refund),
];

fn cost(question: &str) -> u64 {
    question.strip_prefix("costs ").and_then(|units| units.parse().ok()).unwrap_or(PRICE)
}

/// The clock of tokio's virtual time.
#[derive(Debug)]
struct VirtualClock(u64, Instant);

impl Clock for VirtualClock {
    fn now(&self) -> u64 {
        self.0 + self.1.elapsed().as_secs()
    }
}

/// A facilitator of which one call fails, once.
struct Faulty {
    inner: OnchainChannels,
    calls: Arc<Calls>,
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faulty").finish_non_exhaustive()
    }
}

impl Faulty {
    async fn around<T>(
        &self,
        call: &'static str,
        moves: bool,
        work: impl Future<Output = Result<T, ChannelError>>,
    ) -> Result<T, ChannelError> {
        let retry_after = Duration::from_secs(1);
        let away = || FacilitatorError::Unreachable { what: "the facilitator, on purpose", retry_after }.into();
        let [before, after] = self.calls.enter(call);
        if before {
            return Err(away());
        }
        let done = work.await?;
        match after {
            // Only of what was not sent may it be said that it is not available.
            true if moves => Err(ChannelError::Pending { transaction: None }),
            true => Err(away()),
            false => Ok(done),
        }
    }
}

#[async_trait]
impl ChannelFacilitator for Faulty {
    fn network(&self) -> Network {
        self.inner.network()
    }

    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError> {
        self.around("observe", false, self.inner.observe(channels)).await
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
        self.around("deposit", true, self.inner.deposit(config, voucher, deposit)).await
    }

    async fn claim(&self, claims: &[Claim], authorizer: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        self.around("claim", true, self.inner.claim(claims, authorizer)).await
    }

    async fn claim_signed(&self, claims: &[Claim], signature: &Bytes) -> Result<Claimed, ChannelError> {
        self.inner.claim_signed(claims, signature).await
    }

    async fn settle(&self, receiver: Address, token: Address) -> Result<Option<Settled>, ChannelError> {
        self.around("settle", true, self.inner.settle(receiver, token)).await
    }

    async fn refund_signed(&self, refund: &SignedRefund) -> Result<Executed, ChannelError> {
        self.around("refund_signed", true, self.inner.refund_signed(refund)).await
    }
}

/// A seller and a buyer on a devnet.
struct Stage {
    devnet: Devnet,
    clock: Arc<VirtualClock>,
    pay_to: Address,
    books: Arc<FaultyChannels>,
    moves: Arc<Calls>,
    channels: Channels,
    /// The seller, which notes what it answers.
    app: App,
    key: PrivateKeySigner,
    payer: Payer,
    notes: Arc<Notes>,
}

/// What the buyer was told.
#[derive(Default)]
struct Notes {
    /// What each answer cost, by its text, which is another one each time that the handler runs.
    answers: Mutex<BTreeMap<String, u64>>,
    wrongs: Mutex<Vec<String>>,
    /// The next answer to a voucher does not arrive.
    loses_next: AtomicBool,
    /// The response streams.
    streams: AtomicBool,
}

impl Notes {
    fn wrong(&self, what: String) {
        self.wrongs.lock().unwrap().push(what);
    }
}

impl Stage {
    async fn open() -> Self {
        let clock = Arc::new(VirtualClock(unix_now(), Instant::now()));
        let devnet = Devnet::builder().clock(clock.clone()).start().await.unwrap();
        let [gas, exact, key, authorizer] = std::array::from_fn(|_| PrivateKeySigner::random());
        for sender in [&gas, &exact] {
            devnet.fund(sender.address(), U256::from(10).pow(U256::from(18)));
        }
        devnet.mint(key.address(), Usdc::from_atomic(MINTED)).unwrap();
        let network = Network::BASE_SEPOLIA;
        let contract = OnchainChannels::builder().network(network).client(devnet.rpc_client()).signer(gas);
        let contract = contract.clock(clock.clone()).build().await.unwrap();
        let books = MemoryLedger::with(ResponseLimits::default(), 1_000, clock.clone());
        let (books, moves) = (faulty_channels(Arc::new(books)), Arc::new(Calls::default()));
        let facilitator = Faulty { inner: contract, calls: moves.clone() };
        let policy = ClaimPolicy::default().amount(Usdc::MAX).age(Duration::from_secs(u64::MAX >> 1));
        let channels = Channels::builder(facilitator, AuthorizerKey::new(authorizer))
            .ledger(books.clone())
            .claims(policy)
            .clock(clock.clone())
            .build()
            .unwrap();
        let exact = OnchainFacilitator::builder().network(network).client(devnet.rpc_client()).signer(exact);
        let shop = Shop {
            facilitator: Arc::new(exact.build().await.unwrap()),
            pay_to: random_address(),
            asset: devnet.asset(),
            handled: Arc::default(),
        };
        let layer = shop.layer().vouchers(channels.clone()).clock(clock.clone());
        let layer = layer.handler_deadline(Duration::from_secs(5)).settlement_margin(Duration::from_secs(1));
        let runs = Arc::new(AtomicU64::new(0));
        let seller = shop.app_with(layer, move |_, body| {
            let question = std::str::from_utf8(&body).unwrap();
            let run = runs.fetch_add(1, Ordering::SeqCst);
            let text = format!("run {run}: {question}");
            let body = match question {
                "streams" => Body::from_stream(stream::iter([Ok::<_, BoxError>(text)])),
                _ => Body::from(text),
            };
            let mut response = Response::new(body);
            response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(cost(question))));
            async move { Ok(response) }
        });
        let notes = Arc::new(Notes::default());
        let app = noting(seller, books.clone(), notes.clone());
        let pay_to = shop.pay_to;
        let payer = Self::payer(&key, &clock);
        Self { devnet, clock, pay_to, books, moves, channels, app, key, payer, notes }
    }

    /// A buyer with an empty journal.
    fn payer(key: &PrivateKeySigner, clock: &Arc<VirtualClock>) -> Payer {
        let much = Usdc::from_atomic(MINTED);
        let policy = ChannelPolicy::new().deposit(Usdc::from_atomic(3 * PRICE)).lanes(1);
        let policy = policy.escrow_per_payee(much).escrow_total(much);
        let budget = Budget::builder().total(much).build();
        Payer::builder(key.clone()).budget(budget).vouchers(policy).clock(clock.clone()).build()
    }

    /// Takes a step until it is done, and returns the calls that it took.
    async fn take(&mut self, step: Step, fault: Option<Fault>) -> Vec<&'static str> {
        match step {
            Step::Corrective(_) => self.payer = Self::payer(&self.key, &self.clock),
            Step::Lost(_) => self.notes.loses_next.store(true, Ordering::SeqCst),
            Step::Stale(_) => sleep(Duration::from_secs(301)).await,
            _ => {}
        }
        self.notes.streams.store(step == Step::Pay("streams"), Ordering::SeqCst);
        self.books.around.arm(fault);
        self.moves.arm(fault);
        let mut tries = 0;
        while !self.is_done(step).await {
            tries += 1;
            if tries == TRIES {
                self.notes.wrong(format!("{step:?} is not done"));
                break;
            }
            sleep(Duration::from_secs(1)).await;
        }
        [self.books.around.made(), self.moves.made()].concat()
    }

    async fn is_done(&self, step: Step) -> bool {
        match step {
            Step::Pay(question) | Step::Lost(question) | Step::Corrective(question) | Step::Stale(question) => {
                self.buys(question).await
            }
            Step::Claim => self.is_claimed().await,
            Step::Refund => self.is_refunded().await,
        }
    }

    async fn buys(&self, question: &'static str) -> bool {
        let retry = RetryPolicy::default().max_attempts(2);
        let http = self.app.clone().map_request(|request: Request<String>| request.map(Body::from));
        let client = AddPaymentLayer::new(self.payer.clone()).retry(retry).layer(http);
        let request = Request::post("http://shop.example/evaluate").body(question.to_owned()).unwrap();
        client.oneshot(request).await.is_ok_and(|answer| answer.status() == StatusCode::OK)
    }

    async fn is_claimed(&self) -> bool {
        let _ = self.channels.claim_all().await;
        let records = self.books.ledger.channels(None, 10).await.unwrap();
        let charged: u128 = records.iter().map(|record| record.charged()).sum();
        u128::from(self.devnet.balance_of(self.pay_to).unwrap().atomic()) == charged
    }

    async fn is_refunded(&self) -> bool {
        let entry = self.payer.budget().journal().channels().pop().unwrap();
        let Some(mut refund) = self.payer.refund(entry.id(), None).await.unwrap() else { return true };
        loop {
            let request = Request::post("http://shop.example/evaluate").header(refund.header_name(), refund.header());
            let answer = self.app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
            if !refund.answered(answer.status(), answer.headers()).await.unwrap() {
                let reason = refund.conclude().await.reason;
                return reason.is_none_or(|reason| reason.ends_with("refund_no_balance"));
            }
        }
    }

    /// Returns what is wrong in the end.
    async fn end(mut self) -> Vec<String> {
        self.take(Step::Claim, None).await;
        self.take(Step::Refund, None).await;
        let records = self.books.ledger.channels(None, 10).await.unwrap();
        let charged: u128 = records.iter().map(|record| record.charged()).sum();
        let worth: u64 = self.notes.answers.lock().unwrap().values().sum();
        if records.len() != 1 || charged != u128::from(worth) {
            self.notes.wrong(format!("{charged} was charged for answers for {worth}"));
        }
        let (payer, payee) = (self.key.address(), self.pay_to);
        let [payer, payee] = [payer, payee].map(|account| self.devnet.balance_of(account).unwrap().atomic());
        if (payer, payee) != (MINTED - worth, worth) {
            self.notes.wrong(format!("the payer has {payer} and the payee {payee} after answers for {worth}"));
        }
        let known = self.payer.budget().journal().channels().pop().unwrap();
        if u128::from(known.charged.atomic()) != charged || known.dispute().is_some() {
            self.notes.wrong(format!("the buyer knows of {known:?}"));
        }
        std::mem::take(&mut self.notes.wrongs.lock().unwrap())
    }
}

/// The seller, with a look at each answer to a voucher: whether it is true.
fn noting(seller: App, books: Arc<FaultyChannels>, notes: Arc<Notes>) -> App {
    BoxCloneSyncService::new(tower::service_fn(move |request: Request<Body>| {
        let (seller, books, notes) = (seller.clone(), books.clone(), notes.clone());
        async move {
            let is_paid = request.headers().contains_key("payment-signature");
            let charged = || async {
                let records = books.ledger.channels(None, 10).await.unwrap();
                records.iter().map(|record| record.charged()).sum::<u128>()
            };
            let before = charged().await;
            let (parts, body) = seller.oneshot(request).await?.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await?;
            let receipt = parts
                .headers
                .get("payment-response")
                .map(|receipt| serde_json::from_slice::<Value>(&BASE64_STANDARD.decode(receipt).unwrap()).unwrap());
            let told = receipt.as_ref().and_then(|receipt| receipt["extra"]["chargedAmount"].as_str()?.parse().ok());
            let after = charged().await;
            let (status, text) = (parts.status, String::from_utf8_lossy(&body).into_owned());
            let question = text.split_once(": ").map(|(_, question)| question.to_owned());
            match (status, question) {
                _ if !is_paid => {}
                (StatusCode::OK, Some(question)) if text.starts_with("run ") => {
                    if told != Some(cost(&question)) || receipt.is_none_or(|receipt| receipt["success"] != true) {
                        notes.wrong(format!("{text} cost {told:?}"));
                    }
                    if notes.loses_next.swap(false, Ordering::SeqCst) {
                        return Err("the answer is lost on purpose".into());
                    }
                    notes.answers.lock().unwrap().insert(text.clone(), cost(&question));
                }
                (StatusCode::PAYMENT_REQUIRED, _) if after != before => {
                    notes.wrong(format!("{} was charged, and the answer was {status} {text}", after - before));
                }
                (StatusCode::CONFLICT, _) if notes.streams.load(Ordering::SeqCst) => {
                    notes.answers.lock().unwrap().insert("a lost stream".to_owned(), told.unwrap_or_default());
                }
                _ if told.is_some_and(|told: u64| told > 0) => {
                    notes.wrong(format!("{told:?} for {status} {text}"));
                }
                _ => {}
            }
            Ok::<_, BoxError>(Response::from_parts(parts, Body::from(body)))
        }
    }))
}

/// Lets a channel live in virtual time, with a fault in one step. Returns the calls of each step, whether the fault occurred, and what was
/// wrong.
fn live(fault: Option<(usize, Fault)>) -> (Vec<Vec<&'static str>>, bool, Vec<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut stage = Stage::open().await;
        let (mut calls, mut has_failed) = (Vec::new(), false);
        // After the step with the fault comes one more.
        let steps = fault.map_or(LIFE.len(), |(at, _)| at + 2);
        for (index, (_, step)) in LIFE.into_iter().enumerate().take(steps) {
            let fault = fault.filter(|(at, _)| *at == index).map(|(_, fault)| fault);
            calls.push(stage.take(step, fault).await);
            has_failed |= stage.books.around.has_failed() || stage.moves.has_failed();
        }
        (calls, has_failed, stage.end().await)
    })
}

#[test]
fn failed_call_harms_no_channel() {
    let (calls, _, wrongs) = live(None);
    assert_eq!(wrongs, Vec::<String>::new());
    let called: BTreeSet<_> = calls.iter().flatten().map(|call| operation_of(call)).collect();
    let mut methods = CHANNEL_OPERATIONS.into_iter().chain(FACILITATOR_METHODS);
    assert_eq!(methods.find(|method| !called.contains(method)), None, "a method is not tested");

    let mut points = Vec::new();
    for (step, calls) in calls.iter().enumerate() {
        let mut counts = BTreeMap::<&'static str, usize>::new();
        for call in calls {
            let nth = counts.entry(call).or_default();
            let kinds = [How::Before, How::After, How::GoneBefore(OUTAGE), How::GoneAfter(OUTAGE)];
            // A call that changes nothing has no "after", and an outage begins with the first call of each name.
            let changes_nothing = ["channel", "channels", "channel_response", "observe"].contains(call);
            let is_new = |how: &How| match how {
                How::Before => true,
                How::After => !changes_nothing,
                How::GoneBefore(_) => *nth == 0,
                How::GoneAfter(_) => *nth == 0 && !changes_nothing,
            };
            let faults = kinds.into_iter().filter(is_new).map(|how| Fault { call, nth: *nth, how });
            points.extend(faults.map(|fault| (step, fault)));
            *nth += 1;
        }
    }
    let (mut rows, mut wrongs) = (BTreeMap::<(usize, &str), [usize; 2]>::new(), String::new());
    let half = points.split_off(points.len() / 2);
    let lives = |points: Vec<(usize, Fault)>| -> Vec<_> {
        points.into_iter().map(|(step, fault)| (step, fault, live(Some((step, fault))))).collect()
    };
    let other = std::thread::spawn(move || lives(half));
    let lives = [lives(points), other.join().unwrap()].concat();
    for (step, fault, (_, has_failed, wrong)) in lives {
        let row = rows.entry((step, fault.call)).or_default();
        row[0] += 1;
        if !wrong.is_empty() || !has_failed {
            row[1] += 1;
            let missed = if has_failed { "" } else { "missed " };
            writeln!(wrongs, "{missed}{}: {fault:?}: {wrong:?}", LIFE[step].0).unwrap();
        }
    }
    println!("{:<14} {:<20} {:>7} {:>7}", "step", "call", "points", "wrong");
    for ((step, call), [points, wrong]) in rows {
        println!("{:<14} {call:<20} {points:>7} {wrong:>7}", LIFE[step].0);
    }
    assert!(wrongs.is_empty(), "{wrongs}");
}
