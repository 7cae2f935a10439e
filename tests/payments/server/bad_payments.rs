//! Every way in which a payment can be invalid. Each gets the right status and reason; no work is done and no money moves.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes, U256, hex};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use base64::{Engine, prelude::BASE64_STANDARD};
use http::{Request, StatusCode};
use proptest::{prelude::*, test_runner::TestRunner};
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
    rpc_proxy::{Fate, RpcProxy},
    shop::{Answer, App, Customer, PRICE, Purchase, Shop, evaluate, paid, send},
};

on_every_chain! {
    a_header_that_cannot_be_read_is_a_bad_request,
    a_payment_for_something_else_is_refused,
    an_authorization_outside_its_window_is_refused,
    a_signature_that_the_token_refuses_is_refused,
    a_payer_who_cannot_pay_is_refused,
    a_payment_under_way_is_not_lost_when_the_price_changes,
}

/// A seller, a customer with money, and the checks after each refusal.
struct Counter<'a> {
    chain: &'a dyn Chain,
    shop: Shop,
    app: App,
    customer: Customer,
}

impl<'a> Counter<'a> {
    async fn open(chain: &'a dyn Chain) -> Self {
        let shop = Shop::open(chain).await;
        let app = shop.app(shop.layer());
        let customer = Customer::with_funds(chain, 10 * PRICE).await;
        Self { chain, shop, app, customer }
    }

    async fn purchase(&self) -> Purchase {
        self.customer.pay(&self.app, evaluate("a")).await
    }

    async fn refused(&self, what: &str, request: Request<Body>, status: u16, reason: &str) -> Answer {
        let answer = send(&self.app, request).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (status, reason), "{what}: {}", answer.text());
        assert!(answer.headers.contains_key("payment-required"), "{what}: the offer is made again");
        assert!(answer.json()["error"].as_str().unwrap().len() > reason.len() + 10, "{what}: and a sentence says why");
        assert_eq!(self.shop.handled(), 0, "{what}: no work");
        assert_eq!(self.chain.balance(self.shop.pay_to).await, 0, "{what}: no money");
        assert_eq!(self.shop.counts().await, Default::default(), "{what}: nothing in the ledger");
        answer
    }

    /// Checks that the payment is refused after this change of its payload.
    async fn payload(&self, what: &str, status: u16, reason: &str, change: impl FnOnce(&mut Value)) {
        let mut payload = self.purchase().await.payload();
        change(&mut payload);
        self.refused(what, paid(evaluate("a"), &payload), status, reason).await;
    }

    /// Checks that the payment is refused although it is signed after this change.
    async fn signed(&self, what: &str, reason: &str, change: impl FnOnce(&mut Purchase)) {
        let mut purchase = self.purchase().await;
        change(&mut purchase);
        purchase.resign();
        self.refused(what, purchase.on(evaluate("a")), 402, reason).await;
    }
}

fn with_header(value: impl AsRef<[u8]>) -> Request<Body> {
    let mut request = evaluate("a");
    request.headers_mut().insert("payment-signature", http::HeaderValue::from_bytes(value.as_ref()).unwrap());
    request
}

async fn a_header_that_cannot_be_read_is_a_bad_request(chain: &dyn Chain) {
    let counter = Counter::open(chain).await;
    let good = BASE64_STANDARD.encode(counter.purchase().await.payload().to_string());
    for (what, value) in [
        ("empty", String::new()),
        ("not base64", "{}".into()),
        ("URL-safe base64", "-_-_".into()),
        ("wrong padding", format!("{good}=")),
        ("cut off", good[..good.len() / 2].into()),
        ("not JSON", BASE64_STANDARD.encode("payment")),
        ("not an object", BASE64_STANDARD.encode("[]")),
        ("an empty object", BASE64_STANDARD.encode("{}")),
        ("nested beyond reason", BASE64_STANDARD.encode("[".repeat(10_000))),
        ("16 KiB and one byte", "A".repeat(16 * 1024 + 1)),
        ("1 MB", "A".repeat(1_000_000)),
    ] {
        counter.refused(what, with_header(value), 400, "invalid_payload").await;
    }
    counter.refused("not text", with_header([0xff, 0xfe]), 400, "invalid_payload").await;
    let mut twice = with_header(&good);
    twice.headers_mut().append("payment-signature", good.parse().unwrap());
    counter.refused("two payments", twice, 400, "invalid_payload").await;

    for version in [json!(0), json!(1), json!(3), json!(258)] {
        counter
            .payload("another version", 400, "invalid_x402_version", |payload| payload["x402Version"] = version)
            .await;
    }
    for version in [json!("2"), json!(null), json!(2.5), json!(-2)] {
        counter.payload("no version", 400, "invalid_payload", |payload| payload["x402Version"] = version).await;
    }
    for field in ["accepted", "payload"] {
        let remove = |payload: &mut Value| drop(payload.as_object_mut().unwrap().remove(field));
        counter.payload(field, 400, "invalid_payload", remove).await;
    }
    for field in ["from", "to", "value", "validAfter", "validBefore", "nonce"] {
        let bad = [json!(null), json!(1), json!(""), json!("0x"), json!("-1"), json!("1e3"), json!("1.0"), json!([])];
        for value in bad.into_iter().chain([json!("9".repeat(79)), json!("0x12"), json!(" 1")]) {
            let what = format!("{field}: {value}");
            let change = |payload: &mut Value| payload["payload"]["authorization"][field] = value;
            counter.payload(&what, 400, "invalid_payload", change).await;
        }
    }
    for signature in [json!(null), json!(""), json!("12"), json!("0x1"), json!("0xzz")] {
        let what = format!("signature: {signature}");
        counter.payload(&what, 400, "invalid_payload", |payload| payload["payload"]["signature"] = signature).await;
    }
    let huge = format!("0x{}", "ab".repeat(1_000_000));
    counter
        .payload("1 MB signature", 400, "invalid_payload", |payload| payload["payload"]["signature"] = huge.into())
        .await;
}

async fn a_payment_for_something_else_is_refused(chain: &dyn Chain) {
    let counter = Counter::open(chain).await;
    let other = Address::repeat_byte(9);
    for (what, reason, field, value) in [
        ("an unknown scheme", "unsupported_scheme", "scheme", json!("upto")),
        ("another network", "invalid_network", "network", json!("eip155:8453")),
        ("no EVM network", "invalid_network", "network", json!("solana:5eykt4UsFv8P8NJdTREpY1vzqKqZKvdp")),
        ("another amount", "invalid_payment_requirements", "amount", json!("999")),
        ("no amount", "invalid_payment_requirements", "amount", json!("0")),
        ("another token", "invalid_payment_requirements", "asset", json!(other)),
        ("another payee", "invalid_payment_requirements", "payTo", json!(other)),
        ("another window", "invalid_payment_requirements", "maxTimeoutSeconds", json!(3600)),
        ("another domain", "invalid_payment_requirements", "extra", json!({"name": "USD Coin", "version": "2"})),
        ("no domain", "invalid_payment_requirements", "extra", json!({})),
    ] {
        let mut purchase = counter.purchase().await;
        purchase.offer[field] = value;
        counter.refused(what, purchase.on(evaluate("a")), 402, reason).await;
    }
    let mut other_flow = counter.purchase().await;
    other_flow.offer["extra"]["paymentFlow"] = "upfront".into();
    counter.refused("another flow", other_flow.on(evaluate("a")), 402, "invalid_payment_requirements").await;

    // Validly signed, but for another offer.
    counter.signed("pays somebody else", RECIPIENT, |purchase| purchase.authorization.to = other).await;
    for value in [0, 1, PRICE - 1, PRICE + 1] {
        let what = format!("pays {value}");
        counter.signed(&what, VALUE_MISMATCH, |purchase| purchase.authorization.value = U256::from(value)).await;
    }
    counter.signed("pays everything", VALUE_MISMATCH, |purchase| purchase.authorization.value = U256::MAX).await;
    counter.signed("signs for another chain", SIGNATURE, |p| p.asset.network = tower_x402::Network::BASE).await;
    counter.signed("signs for another token", SIGNATURE, |purchase| purchase.asset.address = other).await;
    counter.signed("signs for another name", SIGNATURE, |purchase| purchase.asset.name = "USD Coin".into()).await;
    counter.signed("signs for another version", SIGNATURE, |purchase| purchase.asset.version = "1".into()).await;
}

async fn an_authorization_outside_its_window_is_refused(chain: &dyn Chain) {
    let counter = Counter::open(chain).await;
    let now = unix_now();
    for (what, reason, after, before) in [
        ("expired", VALID_BEFORE, 0, now - 1),
        ("expires now", VALID_BEFORE, 0, now),
        ("leaves no time to work and settle", VALID_BEFORE, 0, now + 60),
        ("lasts too long", VALID_BEFORE, 0, now + 120 + 30 + 60),
        ("lasts for ever", VALID_BEFORE, 0, u64::MAX),
        ("not yet valid", VALID_AFTER, now + 60, now + 110),
        ("never valid", VALID_AFTER, u64::MAX, now + 110),
    ] {
        let change = |purchase: &mut Purchase| {
            purchase.authorization.validAfter = U256::from(after);
            purchase.authorization.validBefore = U256::from(before);
        };
        counter.signed(what, reason, change).await;
    }
    let endless = |purchase: &mut Purchase| purchase.authorization.validBefore = U256::MAX;
    counter.signed("lasts for 2^256 seconds", VALID_BEFORE, endless).await;
}

async fn a_signature_that_the_token_refuses_is_refused(chain: &dyn Chain) {
    let counter = Counter::open(chain).await;
    let purchase = counter.purchase().await;
    let good = purchase.by_key();
    let erc6492 = [&good.0[..], &hex!("6492649264926492649264926492649264926492649264926492649264926492")].concat();
    for (what, reason, signature) in [
        ("high s", SIGNATURE, good.high_s().bytes()),
        ("v of 0", SIGNATURE, good.with_v(0).bytes()),
        ("v of 1", SIGNATURE, good.with_v(1).bytes()),
        ("v of 29", SIGNATURE, good.with_v(29).bytes()),
        ("the other v", SIGNATURE, good.with_v(55 - good.v()).bytes()),
        ("one byte short", SIGNATURE, Bytes::copy_from_slice(&good.0[..64])),
        ("one byte more", SIGNATURE, [&good.0[..], &[0]].concat().into()),
        ("one byte in all", SIGNATURE, Bytes::from_static(&[1])),
        ("empty", SIGNATURE, Bytes::new()),
        ("all zero", SIGNATURE, vec![0; 65].into()),
        ("all ones", SIGNATURE, vec![0xff; 65].into()),
        ("as long as a header may hold", SIGNATURE, vec![0xab; 5_000].into()),
        ("for a wallet that is not deployed", "eip6492_factory_not_allowed", erc6492.into()),
    ] {
        let forged = Purchase { signature, ..purchase.clone() };
        counter.refused(what, forged.on(evaluate("a")), 402, reason).await;
    }
    let mut stranger = purchase.clone();
    stranger.signer = PrivateKeySigner::random();
    stranger.resign();
    counter.refused("another key's", stranger.on(evaluate("a")), 402, SIGNATURE).await;
    let mut altered = purchase.clone();
    altered.authorization.nonce = B256::repeat_byte(1);
    counter.refused("for another nonce", altered.on(evaluate("a")), 402, SIGNATURE).await;

    // After all that, the valid payment still buys.
    assert_eq!(send(&counter.app, purchase.on(evaluate("a"))).await.status, StatusCode::OK);
}

async fn a_payer_who_cannot_pay_is_refused(chain: &dyn Chain) {
    let mut counter = Counter::open(chain).await;
    let rich = counter.customer.clone();
    counter.customer = Customer::with_funds(chain, PRICE - 1).await;
    let purchase = counter.purchase().await;
    counter.refused("one unit short", purchase.on(evaluate("a")), 402, "insufficient_funds").await;

    counter.customer = rich;
    let used = counter.purchase().await;
    let relayer = chain.relayer().await;
    let cancel = support::authorization::CancelAuthorization {
        authorizer: used.authorization.from,
        nonce: used.authorization.nonce,
    };
    let signature = support::authorization::sign(&used.signer, &used.asset, &cancel);
    assert!(relayer.send(chain, support::token::cancel_vrs(&cancel, &signature)).await.status());
    counter.refused("cancelled", used.on(evaluate("a")), 402, "invalid_exact_evm_nonce_already_used").await;

    let blocked = counter.purchase().await;
    chain.blacklist(counter.customer.from).await;
    counter.refused("blacklisted", blocked.on(evaluate("a")), 402, SIMULATION).await;
    counter.customer = Customer::with_funds(chain, PRICE).await;
    let paused = counter.purchase().await;
    chain.pause().await;
    counter.refused("a paused token", paused.on(evaluate("a")), 402, SIMULATION).await;
}

async fn a_payment_under_way_is_not_lost_when_the_price_changes(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let cheap = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, 10 * PRICE).await;
    let purchase = customer.pay(&cheap, evaluate("a")).await;
    let bought = send(&cheap, purchase.on(evaluate("a"))).await;
    assert_eq!(bought.status, StatusCode::OK);

    let dear = shop.app(shop.layer().price("$0.002"));
    let again = send(&dear, purchase.on(evaluate("a"))).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "a"), "bought at the old price, and replayed");
    assert_eq!(send(&dear, purchase.on(evaluate("b"))).await.status, StatusCode::CONFLICT);

    let unused = customer.pay(&cheap, evaluate("b")).await;
    let answer = send(&dear, unused.on(evaluate("b"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (402, "invalid_payment_requirements"));
    let mut forged = purchase.clone();
    forged.signature = vec![7; 65].into();
    let answer = send(&dear, forged.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "without the signature nothing is learned");
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

#[tokio::test]
async fn silent_node_is_answered_503_with_retry_after() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = Shop::open_at(&chain, proxy.url()).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(&chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    for fate in [Fate::DropBefore, Fate::Status(500), Fate::Status(429), Fate::Error(-32000)] {
        proxy.judge(move |_| fate);
        let answer = send(&app, purchase.on(evaluate("a"))).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{fate:?}: {}", answer.text());
        assert!(answer.headers.contains_key("retry-after"), "{fate:?}");
        assert_eq!(shop.handled(), 0, "{fate:?}");
        assert!(shop.record(&purchase.authorization).await.is_none(), "{fate:?}: as if it had not been presented");
    }
    proxy.judge(|_| Fate::Pass);
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.status, StatusCode::OK, "and later it buys");
}

#[tokio::test]
async fn interrupted_settlement_is_unknown_until_it_is_reconciled() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = Shop::open_with(&chain, |b| b.rpc_url(proxy.url()).confirm_timeout(Duration::from_secs(1))).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(&chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    cut_off_after_sending(&proxy);
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{}", answer.text());
    let settlement = answer.settlement().unwrap();
    assert_eq!((&settlement["success"], &settlement["errorReason"]), (&json!(false), &json!("settlement_pending")));
    let transaction: B256 = settlement["transaction"].as_str().unwrap().parse().unwrap();
    assert_eq!(shop.counts().await.unknown, 1);
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.status, StatusCode::SERVICE_UNAVAILABLE, "still unknown");

    proxy.judge(|_| Fate::Pass);
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.text(), answer.transaction()), (StatusCode::OK, "a", transaction));
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
    assert_eq!(shop.counts().await.unknown, 0);
}

#[tokio::test]
async fn an_unknown_outcome_is_followed_without_the_client() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = Shop::open_with(&chain, |b| b.rpc_url(proxy.url()).confirm_timeout(Duration::from_secs(1))).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(&chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    cut_off_after_sending(&proxy);
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.status, StatusCode::SERVICE_UNAVAILABLE);
    proxy.judge(|_| Fate::Pass);
    for _ in 0..200 {
        if shop.counts().await.settled == 1 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not followed: {:?}", shop.counts().await);
}

/// The first transaction reaches the node, which answers nothing from then on.
fn cut_off_after_sending(proxy: &RpcProxy) {
    let sent = AtomicBool::new(false);
    proxy.judge(move |methods| {
        let sends = methods.iter().any(|method| method.starts_with("eth_sendRaw"));
        match (sent.fetch_or(sends, Ordering::SeqCst), sends) {
            (false, false) => Fate::Pass,
            (false, true) => Fate::DropAfter,
            (true, _) => Fate::DropBefore,
        }
    });
}

/// Any bytes and any JSON get an answer below 500; no work is done and no money moves.
#[test]
fn no_request_makes_the_server_panic() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let chain = runtime.block_on(DevnetChain::start(None));
    let counter = runtime.block_on(Counter::open(&chain));
    let good = runtime.block_on(counter.purchase()).payload();
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,80}".prop_map(Value::from),
        "0x[0-9a-f]{0,140}".prop_map(Value::from),
        "[0-9]{1,80}".prop_map(Value::from),
    ];
    let pointers = prop::sample::select(vec![
        "",
        "/x402Version",
        "/resource",
        "/accepted",
        "/accepted/network",
        "/accepted/extra",
        "/accepted/amount",
        "/payload",
        "/payload/signature",
        "/payload/authorization",
        "/payload/authorization/from",
        "/payload/authorization/value",
        "/payload/authorization/validBefore",
        "/payload/authorization/validAfter",
        "/payload/authorization/nonce",
    ]);
    let changes = prop::collection::vec((pointers, leaf), 1..4);
    let mut runner = TestRunner::new(ProptestConfig { cases: 512, ..ProptestConfig::default() });
    let check = |request: Request<Body>| {
        let answer = runtime.block_on(send(&counter.app, request));
        prop_assert!(answer.status.is_client_error(), "{answer:?}");
        prop_assert_eq!(counter.shop.handled(), 0);
        Ok(())
    };
    runner
        .run(&changes, |changes| {
            let mut payload = good.clone();
            let mut changed = false;
            for (pointer, value) in changes {
                if let Some(place) = payload.pointer_mut(pointer) {
                    changed |= *place != value && pointer != "/resource";
                    *place = value;
                }
            }
            prop_assume!(changed);
            check(paid(evaluate("a"), &payload))
        })
        .unwrap();
    let bytes = prop::collection::vec(any::<u8>().prop_filter("a header byte", |b| *b >= 32 && *b != 127), 0..200);
    runner.run(&bytes, |bytes| check(with_header(bytes))).unwrap();
    runner.run(&".{0,200}", |text| check(with_header(BASE64_STANDARD.encode(text)))).unwrap();
}

const SIGNATURE: &str = "invalid_exact_evm_payload_signature";
const RECIPIENT: &str = "invalid_exact_evm_payload_recipient_mismatch";
const VALUE_MISMATCH: &str = "invalid_exact_evm_payload_authorization_value_mismatch";
const VALID_AFTER: &str = "invalid_exact_evm_payload_authorization_valid_after";
const VALID_BEFORE: &str = "invalid_exact_evm_payload_authorization_valid_before";
const SIMULATION: &str = "invalid_exact_evm_transaction_simulation_failed";
