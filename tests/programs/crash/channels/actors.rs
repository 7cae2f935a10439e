//! The two processes that are killed: a seller that takes vouchers, and a buyer that goes through a channel's life.

use std::{
    fs,
    future::Future,
    io::Write as _,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use alloy_network::EthereumWallet;
use alloy_primitives::{Address, B256};
use alloy_provider::{DynProvider, Provider as _, ProviderBuilder};
use alloy_rpc_types_eth::{BlockId, TransactionRequest};
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::{
    Extension, Router,
    body::{Body, Bytes},
    http::{Request, Response, StatusCode},
    middleware::from_fn,
    routing::post,
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use support::around_ledger::AroundChannels;
use tokio::{net::TcpListener, time::sleep};
use tower::{Layer as _, ServiceExt as _};
use tower_x402::{
    Clock as _, Network, SystemClock, Usdc,
    channels::{Channels, ClaimPolicy},
    client::{
        AddPaymentLayer, Budget, ChannelEntry, ChannelPolicy, Journal, Payer, Purchase, ReceiptExt as _, RetryPolicy,
        finalize_withdrawal, initiate_withdrawal, reconcile_channels,
    },
    eip3009::{Authorization, AuthorizationSigner, PaymentSignature, SignError, TokenDomain},
    facilitator::{OnchainFacilitator, channels::OnchainChannels},
    server::{ActualPrice, RequirePaymentLayer, VerifiedPayment},
    vouchers::{AuthorizerKey, Escrow, abi::BatchSettlement},
};

use super::super::{
    ledger::Watched,
    node,
    points::{Point, Points, say},
    server::{Ahead, Handler, LISTENING, PRICE, VALID, deliver, obey},
    store::Store,
};

/// The environment variable with the [`Setup`] as JSON; set in the processes that are killed only.
pub(crate) const SETUP: &str = "CRASH_CHANNELS";
/// The line by which a buyer says that its channel's life is over.
pub(crate) const DONE: &str = "done";
/// The size of a deposit.
pub(crate) const DEPOSIT: u64 = 3 * PRICE;
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Role {
    Seller,
    Buyer,
}

/// The settings of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) role: Role,
    pub(crate) node: String,
    /// The seller's URL, which stays the same.
    pub(crate) shop: String,
    pub(crate) store: Store,
    pub(crate) directory: PathBuf,
    pub(crate) gas_key: B256,
    /// Transactions of channels are sent by the facilitator, which journals them.
    pub(crate) has_one_key: bool,
    pub(crate) authorizer: B256,
    pub(crate) payer: B256,
    pub(crate) pay_to: Address,
    /// How far the seller's clock is ahead, in seconds.
    pub(crate) ahead: u64,
    pub(crate) stop: Option<Point>,
}

impl Setup {
    /// The buyer's journal.
    pub(crate) fn journal(&self) -> PathBuf {
        self.directory.join("journal")
    }

    /// The journal as it was when the buyer last sent a payment. That much is on disk.
    pub(crate) fn synced(&self) -> PathBuf {
        self.directory.join("journal.synced")
    }

    /// A file with a line for each answer that reached the buyer.
    pub(crate) fn answers(&self) -> PathBuf {
        self.directory.join("answers")
    }

    /// A file with a line for each paid request that was refused with 402.
    pub(crate) fn refused(&self) -> PathBuf {
        self.directory.join("refused")
    }

    /// A file with a line for each step that is done.
    pub(crate) fn progress(&self) -> PathBuf {
        self.directory.join("progress")
    }

    /// A file with what the buyer found on the chain in the end.
    pub(crate) fn found(&self) -> PathBuf {
        self.directory.join("found")
    }
}

/// A step of a channel's life. The buyer repeats it until it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Pay(&'static str),
    /// The seller claims all that was charged.
    Claim,
    Refund,
    /// The payer announces a withdrawal.
    Announce,
    /// It withdraws, once the withdraw delay is over.
    Withdraw,
    /// It compares its books with the chain.
    LookUp,
}

/// The life of a channel.
pub(crate) const LIFE: [Step; 14] = [
    Step::Pay("opens the channel"),
    Step::Pay("costs 400"),
    Step::Pay("costs all"),
    Step::Pay("needs a top-up"),
    Step::Claim,
    Step::Pay("after the claim"),
    Step::Refund,
    Step::Pay("after the refund"),
    Step::Announce,
    Step::Claim,
    Step::Withdraw,
    Step::Pay("after the withdrawal"),
    Step::Claim,
    Step::LookUp,
];

/// Returns what the answer to a question costs.
pub(crate) fn cost(question: &str) -> u64 {
    question.strip_prefix("costs ").and_then(|units| units.parse().ok()).unwrap_or(PRICE)
}

/// An answer that reached the buyer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) question: String,
    /// The voucher that it was paid with.
    pub(crate) max: u128,
    pub(crate) text: String,
    pub(crate) receipt: Value,
}

/// Runs until it is killed or its parent ends.
pub(crate) fn run(setup: Setup) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let points = Arc::new(Points::new(setup.stop.clone(), true));
        match setup.role {
            Role::Seller => sell(setup, points).await,
            Role::Buyer => buy(setup, points).await,
        }
    });
}

async fn sell(setup: Setup, points: Arc<Points>) {
    let clock = Arc::new(Ahead::by(setup.ahead));
    let store = Arc::new(setup.store.open(clock.clone()).await);
    obey(points.clone(), clock.clone(), store.clone());
    let exact = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).ledger(store.ledger.clone());
    let exact = exact.clock(clock.clone()).confirm_timeout(Duration::from_secs(10));
    let exact = match setup.has_one_key {
        true => exact.client(node::client(&setup.node, points.clone())).signer(key(setup.gas_key)),
        false => exact.rpc_url(&setup.node).signer(PrivateKeySigner::random()),
    };
    let exact = exact.build().await.expect("the node answers");
    let contract = match setup.has_one_key {
        true => OnchainChannels::builder().facilitator(&exact),
        false => OnchainChannels::builder()
            .network(Network::BASE_SEPOLIA)
            .client(node::client(&setup.node, points.clone()))
            .signer(key(setup.gas_key))
            .clock(clock.clone())
            .confirm_timeout(Duration::from_secs(10)),
    };
    // All claims are asked for, except those of a channel with an announced withdrawal.
    let policy = ClaimPolicy::default().amount(Usdc::MAX).age(Duration::from_secs(u64::MAX >> 1));
    let channels = Channels::builder(
        contract.build().await.expect("the contracts are on the devnet"),
        AuthorizerKey::new(key(setup.authorizer)),
    );
    let channels = channels
        .ledger(AroundChannels::new(store.channels.clone(), Watched(points.clone())))
        .claims(policy)
        .clock(clock.clone())
        .build()
        .expect("complete settings");
    let layer = RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, setup.pay_to)
        .facilitator(exact)
        .vouchers_only(channels.clone())
        .clock(clock)
        .max_timeout(Duration::from_secs(VALID))
        .handler_deadline(Duration::from_secs(10))
        .settlement_margin(Duration::from_secs(5))
        .max_wait(Duration::from_secs(2))
        .build()
        .expect("a complete layer");
    let runs = setup.directory.join("runs");
    let handler = Arc::new(Handler { points: points.clone(), runs, streams: false, ran: AtomicU64::new(0) });
    let work = move |Extension(payment): Extension<VerifiedPayment>, body: Bytes| async move {
        let price = cost(std::str::from_utf8(&body).expect("text"));
        let mut response = handler.run(payment, body).await;
        response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(price)));
        response
    };
    let claim = move || async move {
        match channels.claim_all().await {
            Ok(report) => (StatusCode::OK, format!("{report:?}")),
            Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        }
    };
    let app = Router::new()
        .route("/evaluate", post(work))
        .layer(layer)
        .layer(from_fn(move |request, next| deliver(points.clone(), request, next)))
        .route("/claim", post(claim));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    say(&format!("{LISTENING}{}", listener.local_addr().expect("it is bound")));
    axum::serve(listener, app).await.expect("it serves");
}

async fn buy(setup: Setup, points: Arc<Points>) {
    std::thread::spawn(|| {
        // Its parent writes nothing, and has ended when this does.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(1);
    });
    say(&format!("{LISTENING}nowhere"));
    let buyer = Buyer::open(setup, points);
    let progress = buyer.setup.progress();
    for step in &LIFE[done(&progress)..] {
        while !buyer.take(*step).await {
            // As a buyer would whose seller proves nothing.
            let _ = reconcile_channels(buyer.payer.budget(), &buyer.provider).await;
            sleep(PAUSE).await;
        }
        buyer.points.pass("step: done");
        append(&progress, &format!("{step:?}"));
        buyer.points.pass("step: noted");
    }
    say(DONE);
    std::future::pending().await
}

/// Returns how many steps are done.
pub(crate) fn done(progress: &Path) -> usize {
    fs::read_to_string(progress).unwrap_or_default().lines().count()
}

fn append(path: &Path, line: &str) {
    let mut file = fs::OpenOptions::new().append(true).create(true).open(path).expect("a file");
    writeln!(file, "{line}").expect("a line");
}

fn key(bytes: B256) -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&bytes).expect("a key")
}

#[derive(Clone)]
struct Buyer {
    setup: Arc<Setup>,
    points: Arc<Points>,
    payer: Payer,
    http: reqwest::Client,
    provider: DynProvider,
}

impl Buyer {
    fn open(setup: Setup, points: Arc<Points>) -> Self {
        let journal = Journal::open(setup.journal()).expect("the journal opens");
        let much = Usdc::from_atomic(1_000_000);
        let budget = Budget::builder().total(much).journal(journal).build();
        let policy =
            ChannelPolicy::new().deposit(Usdc::from_atomic(DEPOSIT)).escrow_per_payee(much).escrow_total(much).lanes(1);
        let signer = Watching { key: key(setup.payer), points: points.clone() };
        let payer = Payer::builder(signer).budget(budget).vouchers(policy).build();
        let provider = ProviderBuilder::default().connect_client(node::client(&setup.node, points.clone())).erased();
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).timeout(Duration::from_secs(20));
        Self { setup: Arc::new(setup), points, payer, http: http.build().expect("an HTTP client"), provider }
    }

    /// Takes a step, and returns whether it is done.
    async fn take(&self, step: Step) -> bool {
        match step {
            Step::Pay(question) => self.pay(question).await,
            Step::Claim => {
                let request = Request::post(format!("{}/claim", self.setup.shop)).body(String::new());
                let answer = self.send("shop claim", request.expect("a request")).await;
                answer.is_ok_and(|answer| answer.status() == StatusCode::OK) && self.is_claimed().await
            }
            Step::Refund => self.refund().await,
            Step::Announce => {
                let entry = self.entry();
                let announce = async {
                    if let Ok(Some(transaction)) = initiate_withdrawal(&self.provider, &entry).await {
                        self.execute(transaction).await;
                    }
                };
                self.until_withdrawal_is(true, &entry, announce).await
            }
            Step::Withdraw => {
                let entry = self.entry();
                self.until_withdrawal_is(false, &entry, self.execute(finalize_withdrawal(&entry))).await
                    && reconcile_channels(self.payer.budget(), &self.provider).await.is_ok_and(|found| found.seen == 1)
            }
            Step::LookUp => {
                // While a signed deposit could still be made, what is missing on the chain proves nothing.
                let latest = self.provider.get_block(BlockId::latest()).await.expect("the node answers");
                if latest.expect("a block").header.timestamp < SystemClock.now() + VALID {
                    return false;
                }
                let found = reconcile_channels(self.payer.budget(), &self.provider).await.expect("the node answers");
                let (escrow, reserved) = (found.escrow.atomic(), self.payer.budget().reserved().atomic());
                let findings = format!("{:?}", found.findings);
                let found = json!({ "escrow": escrow, "reserved": reserved, "findings": findings });
                fs::write(self.setup.found(), found.to_string()).expect("a file");
                true
            }
        }
    }

    fn entry(&self) -> ChannelEntry {
        self.payer.budget().journal().channels().pop().expect("a channel")
    }

    async fn pay(&self, question: &str) -> bool {
        // A question is asked once in a channel's life.
        let request = Request::post(format!("{}/evaluate", self.setup.shop)).extension(Purchase::named(question));
        let request = request.body(question.to_owned());
        let buyer = self.clone();
        let shop = tower::service_fn(move |request: Request<String>| {
            let buyer = buyer.clone();
            async move { buyer.send("shop", request).await }
        });
        let retry = RetryPolicy::default().first_pause(PAUSE).max_attempts(3);
        let client = AddPaymentLayer::new(self.payer.clone()).retry(retry).layer(shop);
        let answer = client.oneshot(request.expect("a request")).await;
        answer.is_ok_and(|answer| answer.status() == StatusCode::OK && answer.receipt().is_some())
    }

    async fn refund(&self) -> bool {
        let entry = self.entry();
        let request = || Request::post(format!("{}/evaluate", self.setup.shop)).body(String::new()).expect("a request");
        let Ok(refund) = self.payer.refund(entry.id(), None).await else { return false };
        // Nothing is left: it was refunded before.
        let Some(mut refund) = refund else { return true };
        loop {
            let mut paid = request();
            paid.headers_mut().insert(refund.header_name(), refund.header().clone());
            let Ok(answer) = self.send("shop refund", paid).await else { return false };
            match refund.answered(answer.status(), answer.headers()).await {
                Ok(true) => {}
                // If an earlier request was executed, nothing is left now.
                Ok(false) => {
                    let reason = refund.conclude().await.reason;
                    return reason.is_none_or(|reason| reason.ends_with("refund_no_balance"));
                }
                Err(_) => return false,
            }
        }
    }

    /// Sends a transaction unless the withdrawal is as it should be, and returns whether it is then.
    async fn until_withdrawal_is(&self, announced: bool, entry: &ChannelEntry, send: impl Future<Output = ()>) -> bool {
        if self.is_announced(entry).await == announced {
            return true;
        }
        send.await;
        for _ in 0..20 {
            sleep(PAUSE).await;
            if self.is_announced(entry).await == announced {
                return true;
            }
        }
        false
    }

    /// Returns `true` if the seller has got all that this buyer knows to be charged.
    async fn is_claimed(&self) -> bool {
        let ChannelEntry { config, charged, .. } = self.entry();
        let asked = BatchSettlement::channelsCall { channelId: self.entry().id().digest() };
        let channel = support::chain::call(&self.provider, Escrow::ADDRESS, asked).await.expect("the contract answers");
        let asked = BatchSettlement::receiversCall { receiver: config.receiver, token: config.token };
        let receiver =
            support::chain::call(&self.provider, Escrow::ADDRESS, asked).await.expect("the contract answers");
        channel.totalClaimed >= charged.atomic().into() && receiver.totalClaimed == receiver.totalSettled
    }

    /// Sends a transaction of the payer, unless it would fail.
    async fn execute(&self, transaction: TransactionRequest) {
        // A new provider knows of no account nonce of a transaction that was not sent.
        let sender = ProviderBuilder::new()
            .wallet(EthereumWallet::from(key(self.setup.payer)))
            .connect_client(node::client(&self.setup.node, self.points.clone()));
        let _ = sender.send_transaction(transaction).await;
    }

    async fn is_announced(&self, entry: &ChannelEntry) -> bool {
        let asked = BatchSettlement::pendingWithdrawalsCall { channelId: entry.id().digest() };
        support::chain::call(&self.provider, Escrow::ADDRESS, asked).await.expect("the contract answers").amount > 0
    }

    /// Sends a request to the seller, and notes the answer if it was paid for.
    async fn send(&self, name: &str, request: Request<String>) -> Result<Response<Body>, reqwest::Error> {
        let payment = request.headers().get("payment-signature").cloned();
        let name = match payment {
            Some(_) if name == "shop" => "shop paid",
            _ => name,
        };
        if payment.is_some() {
            // What is sent is on disk. What was written since the last time need not be, and a power cut may take it.
            fs::copy(self.setup.journal(), self.setup.synced()).expect("a copy");
        }
        let payment = payment.as_ref().map(|value| value.as_bytes());
        self.points.around_request(name, self.exchange(name, payment, request)).await
    }

    async fn exchange(
        &self,
        name: &str,
        payment: Option<&[u8]>,
        request: Request<String>,
    ) -> Result<Response<Body>, reqwest::Error> {
        let (parts, question) = request.into_parts();
        let sent = self.http.request(parts.method, parts.uri.to_string()).headers(parts.headers).body(question.clone());
        let answer = sent.send().await?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let body = answer.bytes().await?;
        // Killed here, the buyer has paid for an answer that is lost.
        self.points.pass(&format!("{name}: answered"));
        if payment.is_some() && status == StatusCode::PAYMENT_REQUIRED {
            append(&self.setup.refused(), &format!("{question}: {}", String::from_utf8_lossy(&body)));
        }
        if let (Some(payment), Some(receipt), true) = (payment, headers.get("payment-response"), status.is_success()) {
            let (payment, receipt) = (decoded(payment), decoded(receipt.as_bytes()));
            let max = payment["payload"]["voucher"]["maxClaimableAmount"].as_str().expect("an amount");
            let text = String::from_utf8_lossy(&body).into_owned();
            let answer = Answer { question, max: max.parse().expect("an amount"), text, receipt };
            append(&self.setup.answers(), &serde_json::to_string(&answer).expect("JSON"));
        }
        let mut response = Response::new(Body::from(body));
        (*response.status_mut(), *response.headers_mut()) = (status, headers);
        Ok(response)
    }
}

fn decoded(header: &[u8]) -> Value {
    serde_json::from_slice(&BASE64_STANDARD.decode(header).expect("base64")).expect("JSON")
}

/// The payer's key, with a point before and after every signature.
struct Watching {
    key: PrivateKeySigner,
    points: Arc<Points>,
}

#[async_trait]
impl AuthorizationSigner for Watching {
    fn address(&self) -> Address {
        self.key.address()
    }

    async fn sign(&self, authorization: &Authorization, domain: &TokenDomain) -> Result<PaymentSignature, SignError> {
        AuthorizationSigner::sign(&self.key, authorization, domain).await
    }

    async fn sign_receive(&self, deposit: &Authorization, domain: &TokenDomain) -> Result<PaymentSignature, SignError> {
        self.points.around("sign deposit", self.key.sign_receive(deposit, domain)).await
    }

    async fn sign_digest(&self, digest: B256) -> Result<PaymentSignature, SignError> {
        self.points.around("sign voucher", self.key.sign_digest(digest)).await
    }
}
