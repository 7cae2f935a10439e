//! Buyers with the library's own client. Each has a journal and several channels, and pays for its orders from all of them at once.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use alloy_signer_local::PrivateKeySigner;
use axum::{
    body::Body,
    http::{Request, Response, StatusCode},
};
use futures_util::future::join_all;
use http_body_util::BodyExt as _;
use tower::{BoxError, Layer as _, ServiceExt as _};
use tower_x402::{
    Usdc,
    client::{
        AddPaymentLayer, Budget, ChannelPolicy, Journal, Payer, PaymentOutcome, Receipt, ReceiptExt as _, RetryPolicy,
    },
    vouchers::ChannelId,
};

use super::{
    super::{buyer::answer_to, dice::Dice, plan::Plan},
    LANES, cost,
    replica::REPLICAS,
};
use support::{chain::Chain, devnet::DevnetChain};

/// The time after which an order counts as never answered.
const PATIENCE: Duration = Duration::from_secs(300);
/// A buyer's money, in atomic units.
pub(super) const MINTED: u64 = 100_000_000;

/// All buyers, and where the replicas are.
pub(super) struct Buyers {
    plan: Plan,
    pub(super) buyers: Vec<Buyer>,
    shop: Arc<Shop>,
    begun: AtomicU64,
    pub(super) bought: Mutex<Bought>,
}

pub(super) struct Buyer {
    pub(super) payer: Payer,
    pub(super) journal: PathBuf,
    /// The number of its orders that were begun.
    begun: AtomicU64,
}

/// What happened to the orders.
#[derive(Default)]
pub(super) struct Bought {
    /// What the receipts of each channel add up to, in atomic units.
    pub(super) charged: BTreeMap<ChannelId, u64>,
    /// Orders that were charged, and whose answer was lost for good, with what the buyer got instead.
    pub(super) lost: Vec<String>,
    /// Orders that were paid for again because the outcome of a payment for them stayed unknown, with that payment's channel.
    pub(super) unknown: Vec<(u64, ChannelId)>,
    pub(super) deposits: u64,
    pub(super) refunds: u64,
    /// Why orders were placed again.
    pub(super) again: BTreeMap<String, u64>,
}

impl Buyers {
    pub(super) async fn new(
        chain: &DevnetChain,
        plan: Plan,
        deposit: u64,
        urls: Vec<String>,
        directory: &Path,
    ) -> Self {
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build().unwrap();
        let dice = Mutex::new(Dice::new(plan.seed, u64::MAX - 2));
        let shop = Arc::new(Shop { urls: Mutex::new(urls), http, dice, sent: AtomicU64::new(0) });
        let mut buyers = Vec::new();
        for index in 0..plan.payers {
            let (key, journal) = (PrivateKeySigner::random(), directory.join(format!("journal-{index}")));
            chain.mint(key.address(), MINTED).await;
            let much = Usdc::from_atomic(MINTED);
            let budget = Budget::builder().total(much).journal(Journal::open(&journal).unwrap()).build();
            let policy = ChannelPolicy::new()
                .deposit(Usdc::from_atomic(deposit))
                .escrow_per_payee(much)
                .escrow_total(much)
                .lanes(LANES as u32);
            let payer = Payer::builder(key).budget(budget).vouchers(policy).build();
            buyers.push(Buyer { payer, journal, begun: AtomicU64::new(0) });
        }
        Self { plan, buyers, shop, begun: AtomicU64::new(0), bought: Mutex::default() }
    }

    /// Returns the number of orders that were begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns how often a payment was sent.
    pub(super) fn sent(&self) -> u64 {
        self.shop.sent.load(Ordering::Relaxed)
    }

    /// Notes where a replica is now.
    pub(super) fn replaced(&self, replica: usize, url: String) {
        self.shop.urls.lock().unwrap()[replica] = url;
    }

    /// Has a replica do something. Returns what it says if it was done.
    pub(super) async fn tell(&self, replica: usize, what: &str) -> Option<String> {
        let url = self.shop.urls.lock().unwrap()[replica].clone();
        let answer = self.shop.http.post(format!("{url}/{what}")).send().await.ok()?;
        answer.error_for_status().ok()?.text().await.ok()
    }

    pub(super) async fn tell_all(&self, what: &str) {
        for replica in 0..REPLICAS {
            self.tell(replica, what).await.expect("it is alive");
        }
    }

    /// Places all planned orders.
    pub(super) async fn buy_all(all: Arc<Self>) {
        let mut working = tokio::task::JoinSet::new();
        for lane in 0..LANES * all.plan.payers {
            let all = all.clone();
            working.spawn(async move {
                let index = lane % all.plan.payers;
                let (buyer, payers) = (&all.buyers[index], all.plan.payers as u64);
                let share = (all.plan.payments - index as u64).div_ceil(payers);
                loop {
                    let next = buyer.begun.fetch_add(1, Ordering::Relaxed);
                    if next >= share {
                        return;
                    }
                    all.begun.fetch_add(1, Ordering::Relaxed);
                    let n = next * payers + index as u64;
                    all.buy(buyer, n).await;
                    if index.is_multiple_of(5) && next == share / 2 {
                        all.refund(buyer, 1).await;
                    }
                }
            });
        }
        while let Some(ended) = working.join_next().await {
            ended.unwrap();
        }
    }

    async fn buy(&self, buyer: &Buyer, n: u64) {
        let (mut dice, deadline) = (Dice::new(self.plan.seed, n), Instant::now() + PATIENCE);
        let retry = RetryPolicy::default()
            .first_pause(Duration::from_millis(50))
            .max_attempts(16)
            .attempt_timeout(if n.is_multiple_of(6) { Duration::from_millis(900) } else { Duration::from_secs(15) });
        let shop = self.shop.clone();
        let send = tower::service_fn(move |request| shop.clone().send(request));
        let client = AddPaymentLayer::new(buyer.payer.clone()).retry(retry).layer(send);
        let mut said = String::new();
        while Instant::now() < deadline {
            let request = Request::post(format!("http://shop.example/work?n={n}")).body(n.to_string()).unwrap();
            let answered = client.clone().oneshot(request).await;
            let (receipt, response) = match answered {
                Ok(response) => (response.receipt().cloned(), Ok(response)),
                Err(error) => (receipt_of(&error), Err(error)),
            };
            if receipt.as_ref().is_some_and(|receipt| self.note(n, receipt)) {
                match response {
                    Ok(response) if response.status() == StatusCode::OK => {
                        let body = response.into_body().collect().await.unwrap().to_bytes();
                        assert_eq!(body, answer_to(n), "everybody gets the answer to the own question");
                    }
                    Ok(response) => self.lost(n, format!("{}, {receipt:?}", response.status())),
                    Err(error) => self.lost(n, format!("{error}, {receipt:?}")),
                }
                return;
            }
            said = match response {
                Ok(response) => format!("{} {:?}", response.status(), receipt.and_then(|receipt| receipt.reason)),
                // Without the URL.
                Err(error) => error.to_string().split(" for url").next().unwrap_or_default().to_owned(),
            };
            *self.bought.lock().unwrap().again.entry(said.clone()).or_default() += 1;
            tokio::time::sleep(dice.millis(50..800)).await;
        }
        panic!("order {n} was never answered: {said}");
    }

    fn lost(&self, n: u64, instead: String) {
        self.bought.lock().unwrap().lost.push(format!("order {n} got {instead}"));
    }

    /// Notes a receipt, and returns `true` if the order was charged.
    fn note(&self, n: u64, receipt: &Receipt) -> bool {
        let mut bought = self.bought.lock().unwrap();
        let channel = receipt.channel.as_ref().expect("vouchers are all that is taken");
        assert_eq!(channel.finding, None, "order {n}: the seller contradicts the buyer's books");
        match receipt.outcome {
            PaymentOutcome::Accepted => {
                assert_eq!(receipt.amount.atomic(), cost(n), "order {n}: {receipt:?}");
                *bought.charged.entry(channel.id).or_default() += receipt.amount.atomic();
                bought.deposits += u64::from(channel.deposit.is_some());
                true
            }
            PaymentOutcome::Unknown => {
                bought.unknown.push((n, channel.id));
                false
            }
            _ => false,
        }
    }

    /// Asks for the money in a buyer's channels, some times for each. Returns the number of channels that are empty then.
    async fn refund(&self, buyer: &Buyer, times: u32) -> usize {
        let mut empty = 0;
        for entry in buyer.payer.budget().journal().channels() {
            for _ in 0..times {
                match self.refund_once(buyer, entry.id()).await {
                    Some(true) => {
                        empty += 1;
                        break;
                    }
                    Some(false) => tokio::time::sleep(Duration::from_millis(200)).await,
                    // A request uses it.
                    None => break,
                }
            }
        }
        empty
    }

    async fn refund_once(&self, buyer: &Buyer, id: ChannelId) -> Option<bool> {
        let Some(mut refund) = buyer.payer.refund(id, None).await.ok()? else { return Some(true) };
        loop {
            let request = Request::post("http://shop.example/work?n=0").header(refund.header_name(), refund.header());
            let sent = self.shop.clone().send(request.body(String::new()).unwrap()).await;
            let is_again = match sent {
                Ok(answer) => refund.answered(answer.status(), answer.headers()).await.unwrap(),
                Err(_) => false,
            };
            if is_again {
                continue;
            }
            let refund = refund.conclude().await;
            assert_eq!(refund.finding, None, "the seller contradicts the buyer's books");
            self.bought.lock().unwrap().refunds += u64::from(refund.amount > Usdc::ZERO);
            let is_empty = refund.reason.as_ref().is_some_and(|reason| reason.ends_with("refund_no_balance"));
            return Some(refund.amount > Usdc::ZERO || is_empty);
        }
    }

    /// Asks for the money of every second buyer. Returns the number of channels that are empty then.
    pub(super) async fn refund_half(&self) -> usize {
        let asking = self.buyers.iter().step_by(2).map(|buyer| self.refund(buyer, 20));
        join_all(asking).await.into_iter().sum()
    }
}

fn receipt_of(error: &tower_x402::client::AddPaymentError<BoxError>) -> Option<Receipt> {
    match error {
        tower_x402::client::AddPaymentError::Payment(error) => error.receipt().cloned(),
        _ => None,
    }
}

/// The way to the replicas: to any of them, sometimes to several at once, and sometimes the answer is lost.
struct Shop {
    urls: Mutex<Vec<String>>,
    http: reqwest::Client,
    dice: Mutex<Dice>,
    /// How often a payment was sent.
    sent: AtomicU64,
}

impl Shop {
    async fn send(self: Arc<Self>, request: Request<String>) -> Result<Response<Body>, BoxError> {
        let is_paid = request.headers().contains_key("payment-signature");
        let (first, copies, is_lost) = {
            let mut dice = self.dice.lock().unwrap();
            let copies = if is_paid && dice.one_in(12) { dice.of(2..REPLICAS as u64 + 1) } else { 1 };
            (dice.of(0..REPLICAS as u64) as usize, copies as usize, dice.one_in(25))
        };
        self.sent.fetch_add(if is_paid { copies as u64 } else { 0 }, Ordering::Relaxed);
        let urls = self.urls.lock().unwrap().clone();
        let sent = (0..copies).map(|copy| self.post(&urls[(first + copy) % REPLICAS], &request));
        let answers: Vec<_> = join_all(sent).await;
        if is_lost {
            return Err("the answer is lost".into());
        }
        let (good, other): (Vec<_>, Vec<_>) = answers
            .into_iter()
            .partition(|answer| answer.as_ref().is_ok_and(|answer| answer.status() == StatusCode::OK));
        good.into_iter().chain(other).next().expect("it was sent once at least")
    }

    async fn post(&self, url: &str, request: &Request<String>) -> Result<Response<Body>, BoxError> {
        let path = request.uri().path_and_query().expect("a path").as_str();
        let sent =
            self.http.post(format!("{url}{path}")).headers(request.headers().clone()).body(request.body().clone());
        let answer = sent.send().await?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let mut response = Response::new(Body::from(answer.bytes().await?));
        (*response.status_mut(), *response.headers_mut()) = (status, headers);
        Ok(response)
    }
}
