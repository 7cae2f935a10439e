//! Metrics count what happens, and all of them are documented.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_network::TxSigner;
use alloy_primitives::{Address, Signature, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use tower::{Layer as _, ServiceExt as _};
use tower_x402::{
    Clock, Network, Usdc,
    channels::{Channels, ClaimPolicy},
    charge::{self, Begun, Seller},
    client::{AddPaymentLayer, Budget, ChannelPolicy, Payer},
    facilitator::{Facilitator, channels::OnchainChannels},
    ledger::{FulfilmentStep, Lease, MemoryLedger, SqliteLedger},
    ops::{METRICS, MetricKind, Operator},
    payment::{Prechecked, SettlementOutcome},
    protocol::{ExactOffer, PaymentPayload},
    server::{DeferredPolicy, Quote},
    vouchers::AuthorizerKey,
};
use x402_devnet::{BlockTime, Fault, Orphans};
use x402_facilitator::FacilitatorService;

use support::chain::Chain as _;
use support::devnet::DevnetChain;
use support::engine_stage::*;
use support::numbers::{Number, Numbers, OfThreads, Recording};
use support::{
    scripted::{Scripted, away, customer, echo, layer, not_yet, serve},
    shop::{Answer, App, Customer, Purchase, evaluate, paid, send},
};

async fn buy(app: &App, customer: &Customer) -> (Purchase, Answer) {
    let purchase = customer.pay(app, evaluate("x")).await;
    let answer = send(app, purchase.on(evaluate("x"))).await;
    (purchase, answer)
}

#[tokio::test]
async fn requests_are_counted_by_outcome() {
    let recording = Recording::begin();
    let facilitator = Arc::new(Scripted::new().settle(|call, _| async move {
        match call {
            1 => Ok(not_yet()),
            2 => Ok(SettlementOutcome::Unknown { transaction: None }),
            3 => Err(away()),
            _ => Ok(support::scripted::paid()),
        }
    }));
    let policy = DeferredPolicy::default().per_payer(Usdc::from_atomic(PRICE));
    let (app, _) = serve(layer(&facilitator), echo);
    // Each asks for the price first: unpaid.
    let (purchase, answer) = buy(&app, &customer()).await;
    assert_eq!(answer.status, 200);
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, 200, "replayed");
    assert_eq!(send(&app, purchase.on(evaluate("other"))).await.status, 409);
    for status in [402, 503, 503] {
        assert_eq!(buy(&app, &customer()).await.1.status, status, "rejected, pending, unavailable");
    }
    assert_eq!(send(&app, paid(evaluate("x"), &serde_json::json!("nonsense"))).await.status, 400);

    let (refusing, _) = serve(layer(&facilitator), |_, _| async {
        let mut response = Response::new(Body::from("no"));
        *response.status_mut() = StatusCode::UNPROCESSABLE_ENTITY;
        response
    });
    assert_eq!(buy(&refusing, &customer()).await.1.status, 422);
    let (crashing, _) = serve(layer(&facilitator), |_, _| async { panic!("the handler crashes") });
    assert_eq!(buy(&crashing, &customer()).await.1.status, 500);

    let (lending, _) = serve(layer(&facilitator).deferred(policy), echo);
    let known = customer();
    assert_eq!(buy(&lending, &known).await.1.settlement().unwrap()["success"], true);
    assert_eq!(buy(&lending, &known).await.1.settlement().unwrap()["transaction"], "");

    let (free, _) = serve(layer(&facilitator).price_with(|_| async { Ok(Quote::Free) }), echo);
    assert_eq!(send(&free, evaluate("x")).await.status, 200);
    let numbers = recording.read();
    let counted = numbers.counters("x402_requests_total", "outcome");
    let expected = BTreeMap::from([
        ("unpaid", 8),
        ("paid", 2),
        ("replayed", 1),
        ("conflict", 1),
        ("rejected", 1),
        ("pending", 1),
        ("unavailable", 1),
        ("malformed", 1),
        ("unsuccessful", 1),
        ("failed", 1),
        ("deferred", 1),
        ("free", 1),
    ]);
    assert_eq!(counted, expected);
}

/// By a seller on another transport, whatever came of it.
#[tokio::test]
async fn requests_to_a_seller_on_another_transport_are_counted_as_those_to_the_layer() {
    let recording = Recording::begin();
    let facilitator = Arc::new(Scripted::new());
    let seller = Seller::builder("oracle", facilitator.clone()).build();
    let asset = Network::BASE_SEPOLIA.usdc().unwrap();
    let most = seller.max_timeout_seconds();
    let offers = [seller.offer(ExactOffer::new(asset, U256::from(PRICE), Address::repeat_byte(7), most)).unwrap()];
    let accepts = [offers[0].requirements()];
    let demand = serde_json::json!({ "x402Version": 2, "accepts": accepts, "resource": { "url": "call:oracle" } });
    let pay = || -> PaymentPayload { serde_json::from_value(customer().sign(&demand, 0).payload()).unwrap() };
    let begin = async |payment: &PaymentPayload, what: &'static str| {
        seller.begin(&offers, payment.clone(), &charge::Request::new(what)).await
    };
    let Ok(Begun::Work(work)) = begin(&pay(), "a").await else { panic!("it is new") };
    work.release().await;
    let Ok(Begun::Work(work)) = begin(&pay(), "a").await else { panic!("it is new") };
    let too_long = vec![7; work.response_limit() + 1];
    work.charge(too_long).await.unwrap_err();
    let payment = pay();
    let Ok(Begun::Work(work)) = begin(&payment, "a").await else { panic!("it is new") };
    work.charge("done").await.unwrap();
    assert!(matches!(begin(&payment, "a").await, Ok(Begun::Replay { .. })));
    begin(&payment, "b").await.unwrap_err();
    let numbers = recording.read();
    let expected = BTreeMap::from([("unsuccessful", 1), ("failed", 1), ("paid", 1), ("replayed", 1), ("conflict", 1)]);
    assert_eq!(numbers.counters("x402_requests_total", "outcome"), expected);
    assert_eq!(numbers.counters("x402_charged_units_total", "route"), BTreeMap::from([("oracle", PRICE)]));
}

#[tokio::test]
async fn settlements_and_their_costs_are_counted() {
    let recording = Recording::begin();
    let stage = stage().await;
    let key = stage.payer(3);
    for _ in 0..2 {
        paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    }
    let others = stage.payment(&key);
    let verified = stage.admit(&others).await;
    stage.front_run(&others);
    paid_by(&stage.settle(&others, &verified).await);
    stage.verify(&stage.payment(&key)).await.unwrap_err();

    let (numbers, stats) = (recording.read(), stage.facilitator.stats());
    let network = stage.devnet.network().to_string();
    for Number { name, labels, .. } in &numbers.0 {
        assert!(labels.get("network").is_none_or(|label| *label == network), "{name}: {labels:?}");
    }
    let count = |name, label| numbers.observed(name, Some(("result", label))).len();
    assert_eq!(count("x402_verification_duration_seconds", "valid"), 3);
    assert_eq!(count("x402_verification_duration_seconds", "invalid"), 1);
    assert_eq!(count("x402_settlement_duration_seconds", "settled"), 2);
    assert_eq!(count("x402_settlement_duration_seconds", "credited"), 1);
    assert_eq!(
        numbers.counters("x402_transactions_total", "result"),
        BTreeMap::from([("reverted", 1), ("succeeded", 2)])
    );
    assert_eq!(numbers.total("x402_gas_used_total"), stats.gas_used);
    assert_eq!(U256::from(numbers.total("x402_fees_wei_total")), stats.spent);
    assert_eq!(numbers.observed("x402_payments_per_transaction", None), [1.0; 3]);
    assert_eq!(numbers.observed("x402_transaction_duration_seconds", None).len(), 3);
    assert_eq!(numbers.gauge("x402_transactions_in_flight"), Some(0.0), "every nonce came back");
    assert_eq!(numbers.gauge("x402_settlement_backlog"), Some(0.0));
    assert_eq!(numbers.observed("x402_ledger_operation_duration_seconds", Some(("operation", "submit"))).len(), 3);
    // No payer, nonce or transaction is a label: what tells two of them apart would make as many series.
    let keys: BTreeSet<_> = numbers.0.iter().flat_map(|number| number.labels.keys()).collect();
    assert!(keys.iter().all(|key| ["network", "result", "account", "operation"].contains(&key.as_str())), "{keys:?}");
}

#[tokio::test]
async fn stored_responses_are_measured_when_added_and_removed() {
    let recording = Recording::begin();
    let stage = stage().await;
    stage.produced(&stage.payment(&stage.payer(1))).await;
    let kept = recording.read().gauge("x402_responses_stored_bytes").unwrap();
    assert!((512.0..2_000.0).contains(&kept), "{kept}");
    stage.clock.advance(601);
    stage.produced(&stage.payment(&stage.payer(1))).await;
    let more = recording.read().gauge("x402_responses_stored_bytes").unwrap();
    assert_eq!(more, 0.0, "one came, one of the same size went");
}

/// A signer that fails once.
struct FlakySigner(AtomicBool);

#[async_trait::async_trait]
impl TxSigner<Signature> for FlakySigner {
    fn address(&self) -> Address {
        settlement_key().address()
    }

    async fn sign_transaction(
        &self,
        transaction: &mut dyn alloy_consensus::SignableTransaction<Signature>,
    ) -> alloy_signer::Result<Signature> {
        if !self.0.swap(true, Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(50)).await;
            return Err(alloy_signer::Error::other("the key service is away"));
        }
        settlement_key().sign_transaction(transaction).await
    }
}

/// Leaves a gap in the account nonces.
async fn leave_a_gap() {
    let stage = Stage::with_keys(every(50), |b| b.signer(FlakySigner(AtomicBool::new(false)))).await;
    let payments: Vec<Prechecked> = (0..3).map(|_| stage.payment(&stage.payer(1))).collect();
    let mut verified = Vec::new();
    for payment in &payments {
        verified.push(stage.admit(payment).await);
    }
    let settling =
        payments.iter().zip(&verified).map(|(payment, verified)| stage.facilitator.settle(payment, verified));
    join_all(settling).await;
    assert_eq!(stage.received(), 2);
}

/// Raises the base fee while a transaction waits.
async fn raise_a_price() {
    let stage = Stage::with(
        |d| d.block_time(BlockTime::Every(Duration::from_millis(50))),
        |b| b.block_time(Duration::from_millis(50)).native_price("$3000".parse().unwrap()),
    )
    .await;
    let key = stage.payer(2);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    stage.devnet.set_base_fee(100_000_000);
    stage.devnet.faults().set(|call| match call.method {
        "eth_sendRawTransactionSync" => Fault::Error { code: -32601, message: "method not found".into() },
        _ => Fault::None,
    });
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.facilitator.stats().losses, 2);
    assert!(stage.facilitator.readiness().await.is_ready());
}

/// Removes a settlement by a reorganization.
async fn reorganize() {
    let stage = Stage::with(|d| d.finality_depth(64), |b| b.reconcile_interval(Duration::from_millis(30))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let is_paid = async || stage.record(&payment).await.settlement.paid_by().is_some();
    until(&is_paid).await;
    stage
        .ledger
        .advance(&payment.key(), &Lease { key: payment.key(), epoch: 0 }.step(FulfilmentStep::Deliver))
        .await
        .unwrap();
    stage.devnet.mine();
    let calls = stage.calls("eth_getBlockByNumber");
    until(async || stage.calls("eth_getBlockByNumber") >= calls + 4).await;
    // Sent again, it waits.
    stage.devnet.stall(true);
    stage.devnet.reorg(2, Orphans::Lost);
    until(async || stage.facilitator.stats().reorged == 1).await;
    stage.devnet.stall(false);
    until(async || {
        // It is looked at again after a pause.
        stage.clock.advance(1);
        is_paid().await
    })
    .await;
}

/// Sends requests to a facilitator service.
async fn ask_a_facilitator() {
    let service = FacilitatorService::builder(Scripted::new()).rate(3, Duration::from_secs(3_600)).build();
    for (method, path) in [("GET", "/healthz"), ("GET", "/supported"), ("POST", "/verify"), ("POST", "/settle")] {
        let request = Request::builder().method(method).uri(path).body(Body::from("no payment")).unwrap();
        let _: Result<_, Infallible> = service.clone().oneshot(request).await;
    }
    let request = Request::get("/etc/passwd").body(Body::empty()).unwrap();
    let _: Result<_, Infallible> = service.oneshot(request).await;
}

#[tokio::test]
async fn requests_to_a_facilitator_are_counted_by_endpoint_and_status() {
    let recording = Recording::begin();
    ask_a_facilitator().await;
    let numbers = recording.read();
    let endpoints = numbers.counters("x402_facilitator_requests_total", "endpoint");
    let expected = [("healthz", 1), ("other", 1), ("settle", 1), ("supported", 1), ("verify", 1)];
    assert_eq!(endpoints, BTreeMap::from(expected));
    let statuses = numbers.counters("x402_facilitator_requests_total", "status");
    assert_eq!(statuses, BTreeMap::from([("200", 2), ("400", 2), ("404", 1)]));
}

/// Uses a ledger on disk, sums it up, and makes it fail.
async fn keep_books() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = Arc::new(SqliteLedger::open(directory.path().join("ledger.sqlite")).await.unwrap());
    let stage = stage().await;
    let facilitator = tower_x402::facilitator::OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(settlement_key())
        .ledger(ledger.clone())
        .clock(stage.clock.clone())
        .build()
        .await
        .unwrap();
    let books = Stage { ledger: ledger.clone(), facilitator: facilitator.clone(), ..stage };
    books.produced(&books.payment(&books.payer(1))).await;
    let report = Operator::new(ledger.clone()).clock(books.clock.clone() as Arc<dyn Clock>).report().await.unwrap();
    assert_eq!(report.assets.len(), 1);
    ledger.close().await;
    facilitator.ledger().counts().await.unwrap_err();
}

/// A seller and a buyer of two answers by voucher, which are claimed. What can be lost meanwhile is in the gauges before and after.
async fn sell_on_channels(recording: &Recording) -> (Numbers, Numbers) {
    let chain = DevnetChain::start(None).await;
    let [gas_key, authorizer, buyer] = std::array::from_fn(|_| PrivateKeySigner::random());
    chain.fund(gas_key.address(), U256::from(ETHER)).await;
    chain.mint(buyer.address(), 100 * PRICE).await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url()).signer(gas_key);
    let policy = ClaimPolicy::default().amount(Usdc::MAX).age(Duration::from_secs(u64::MAX >> 1));
    let channels = Channels::builder(contract.build().await.unwrap(), AuthorizerKey::new(authorizer))
        .ledger(Arc::new(MemoryLedger::new()))
        .claims(policy)
        .build()
        .unwrap();
    let shop = support::shop::Shop::open(&chain).await;
    let app = shop.app(shop.layer().vouchers(channels.clone()));
    let payer = Payer::builder(buyer).budget(Budget::builder().build()).vouchers(ChannelPolicy::new()).build();
    for _ in 0..2 {
        let http = app.clone().map_request(|request: Request<String>| request.map(Body::from));
        let request = Request::post("http://shop.example/evaluate").body("x".to_owned()).unwrap();
        let response = AddPaymentLayer::new(payer.clone()).layer(http).oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
    }
    assert!(channels.readiness().await.is_ready());
    channels.claim_all().await.unwrap();
    let before = recording.read();
    channels.claim_all().await.unwrap();
    (before, recording.read())
}

#[tokio::test]
async fn payment_channels_are_counted_and_what_is_unclaimed_is_measured() {
    let recording = Recording::begin();
    let (before, after) = sell_on_channels(&recording).await;
    assert_eq!(before.counters("x402_voucher_requests_total", "outcome"), BTreeMap::from([("paid", 2)]));
    assert_eq!(before.counters("x402_requests_total", "outcome"), BTreeMap::from([("paid", 2), ("unpaid", 2)]));
    let actions = before.counters("x402_channel_actions_total", "action");
    assert_eq!(actions, BTreeMap::from([("claim", 1), ("deposit", 1), ("settle", 1)]));
    assert_eq!(before.counters("x402_channel_actions_total", "result"), BTreeMap::from([("executed", 3)]));
    assert_eq!(before.counters("x402_claims_total", "result"), BTreeMap::from([("claimed", 1)]));
    assert_eq!(
        before.observed("x402_ledger_operation_duration_seconds", Some(("operation", "channel_charge"))).len(),
        2
    );
    // The ledger is gone through before its channels are claimed.
    let units = |numbers: &Numbers| {
        ["x402_channels_open", "x402_channels_unclaimed_units", "x402_channels_at_risk_units"]
            .map(|name| numbers.gauge(name))
    };
    assert_eq!(units(&before), [Some(1.0), Some(2.0 * PRICE as f64), Some(0.0)]);
    assert_eq!(units(&after), [Some(1.0), Some(0.0), Some(0.0)]);
    assert_eq!(before.gauge("x402_channels_ready"), Some(1.0));
}

#[tokio::test]
async fn documented_and_reported_metrics_are_the_same() {
    let (recording, of_threads) = (Recording::begin(), OfThreads::begin());
    leave_a_gap().await;
    raise_a_price().await;
    reorganize().await;
    keep_books().await;
    let (app, _) = serve(layer(&Arc::new(Scripted::new())), echo);
    buy(&app, &customer()).await;
    ask_a_facilitator().await;
    let (of_channels, _) = sell_on_channels(&recording).await;
    let mut numbers: Numbers = recording.read();
    numbers.0.extend(of_channels.0);
    // SQLite's ledger writes from a thread of its own.
    numbers.0.extend(of_threads.read("x402_ledger_commit_duration_seconds").0);
    let documented: BTreeSet<_> = METRICS.iter().map(|metric| metric.name).collect();
    assert_eq!(numbers.names(), documented);
    for number in &numbers.0 {
        let metric = METRICS.iter().find(|metric| metric.name == number.name).unwrap();
        let labels: Vec<_> = number.labels.keys().map(String::as_str).collect();
        let expected: BTreeSet<_> = metric.labels.iter().copied().collect();
        assert_eq!(labels, expected.into_iter().collect::<Vec<_>>(), "{}", metric.name);
        let kind = match number.value {
            metrics_util::debugging::DebugValue::Counter(_) => MetricKind::Counter,
            metrics_util::debugging::DebugValue::Gauge(_) => MetricKind::Gauge,
            metrics_util::debugging::DebugValue::Histogram(_) => MetricKind::Histogram,
        };
        assert_eq!(kind, metric.kind, "{}", metric.name);
    }
}

#[test]
fn documentation_lists_all_metrics() {
    let docs = include_str!("../../../src/ops/mod.rs");
    let rows: Vec<&str> = docs.lines().filter(|line| line.starts_with("//! | `x402_")).collect();
    let expected = METRICS.iter().map(|metric| {
        let kind = format!("{:?}", metric.kind).to_lowercase();
        let labels = match metric.labels.join(", ") {
            labels if labels.is_empty() => String::new(),
            labels => format!("{labels} "),
        };
        format!("//! | `{}` | {kind} | {} | {labels}| {} |", metric.name, metric.unit, metric.meaning)
    });
    assert_eq!(rows, expected.collect::<Vec<_>>());
}

#[test]
fn metric_names_follow_the_conventions_of_prometheus() {
    for metric in METRICS {
        let ends = |endings: &[&str]| endings.iter().any(|ending| metric.name.ends_with(ending));
        assert!(metric.name.starts_with("x402_"));
        assert!(metric.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'));
        assert_eq!(ends(&["_total"]), metric.kind == MetricKind::Counter, "{}", metric.name);
        assert_eq!(ends(&["_seconds"]), metric.unit == "seconds", "{}", metric.name);
    }
}
