//! Payments that are settled after the response was released, with a chain to settle them on.

use std::time::Duration;

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, body::Body, routing::post};
use http::Request;
use support::{
    authorization,
    chain::Chain,
    devnet::DevnetChain,
    rpc_proxy::{Fate, RpcProxy},
    scripted::key,
    shop::{Answer, App, Customer, PRICE, Purchase, Shop, evaluate, send},
    token::transfer_vrs,
};
use tower_x402::{
    Usdc,
    client::{Budget, Payer, PaymentMiddleware, PaymentOutcome, ReceiptExt},
    facilitator::Facilitator,
    ledger::{Record, Settlement, SettlementStep},
    payment::PaymentKey,
    server::{DeferredPolicy, PaymentStatus},
};

/// Returns a policy with credit for three payments at most.
fn policy() -> DeferredPolicy {
    let three = Usdc::from_atomic(3 * PRICE);
    DeferredPolicy::default().per_payer(three)
}

/// Waits until the facilitator's background passes have brought a payment into this state.
async fn until(shop: &Shop, key: &PaymentKey, is_there: impl Fn(&Record) -> bool) -> Record {
    let looking = async {
        loop {
            let record = shop.facilitator.ledger().get(key).await.unwrap().unwrap();
            if is_there(&record) {
                return record;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), looking).await.expect("the facilitator looks after it")
}

fn is_paid(record: &Record) -> bool {
    record.settlement.paid_by().is_some()
}

async fn buy(app: &App, customer: &Customer) -> (Purchase, Answer) {
    let purchase = customer.pay(app, evaluate("x")).await;
    let answer = send(app, purchase.on(evaluate("x"))).await;
    assert_eq!((answer.status.as_u16(), answer.text()), (200, "x"), "{answer:?}");
    (purchase, answer)
}

fn is_accepted(answer: &Answer) -> bool {
    answer.settlement().unwrap()["transaction"] == ""
}

/// Has a customer pay for so many answers where nothing is deferred.
async fn pay_in_line(shop: &Shop, customer: &Customer, times: u32) {
    let app = shop.app(shop.layer());
    for _ in 0..times {
        assert!(!is_accepted(&buy(&app, customer).await.1));
    }
}

#[tokio::test]
async fn deferred_payment_is_settled_later() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let app = shop.app(shop.layer().deferred(policy()));
    let customer = Customer::with_funds(&chain, 10 * PRICE).await;
    pay_in_line(&shop, &customer, 3).await;
    let mut bought = Vec::new();
    for _ in 0..3 {
        let (purchase, answer) = buy(&app, &customer).await;
        assert!(is_accepted(&answer));
        let info = answer.settlement().unwrap()["extensions"]["payment-status"]["info"].clone();
        bought.push((purchase, info));
    }
    for (purchase, _) in &bought {
        until(&shop, &key(purchase), is_paid).await;
    }
    assert_eq!(chain.balance(shop.pay_to).await, 6 * PRICE);
    let transfers = chain.token_transfers(shop.pay_to).await;
    let status = support::shop::app(PaymentStatus::new(shop.facilitator.ledger().clone()));
    for (purchase, info) in bought {
        let transaction = send(&app, purchase.on(evaluate("x"))).await.transaction();
        assert!(transfers.iter().any(|transfer| transfer.transaction == transaction));
        // The status service that the answer names reports the same.
        let named =
            ["network", "asset", "payer", "nonce"].map(|name| format!("{name}={}", info[name].as_str().unwrap()));
        let asked = Request::get(format!("/payments/status?{}", named.join("&"))).body(Body::empty()).unwrap();
        assert_eq!(send(&status, asked).await.json()["transaction"], transaction.to_string());
    }
    assert!(is_accepted(&buy(&app, &customer).await.1), "it is good for more");
    assert_eq!(shop.handled(), 7);
}

/// The background pass waits for its node at that time.
#[tokio::test]
async fn deferred_payment_is_settled_before_shutdown() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = Shop::open_at(&chain, proxy.url()).await;
    let app = shop.app(shop.layer().deferred(policy()));
    let customer = Customer::with_funds(&chain, 10 * PRICE).await;
    assert!(!is_accepted(&buy(&app, &customer).await.1));
    let is_slow = |methods: &[String]| methods.iter().any(|method| method == "eth_getBlockByNumber");
    proxy.judge(move |methods| if is_slow(methods) { Fate::Delay(Duration::from_secs(1)) } else { Fate::Pass });
    let looks = proxy.counts().of("eth_getBlockByNumber");
    shop.facilitator.reconcile_now();
    support::eventually::eventually("the upkeep asks its node", async || {
        proxy.counts().of("eth_getBlockByNumber") > looks
    })
    .await;
    let (purchase, answer) = buy(&app, &customer).await;
    assert!(is_accepted(&answer));
    assert!(shop.facilitator.drain(Duration::from_secs(10)).await);
    assert!(is_paid(&shop.record(&purchase.authorization).await.unwrap()));
}

#[tokio::test]
async fn payer_that_spends_its_balance_elsewhere_costs_no_more_than_its_credit() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = Shop::open_at(&chain, proxy.url()).await;
    let app = shop.app(shop.layer().deferred(policy()));
    let customer = Customer::with_funds(&chain, 12 * PRICE).await;
    pay_in_line(&shop, &customer, 3).await;
    // Nothing reaches the chain before the payer is done.
    let sends = |methods: &[String]| methods.iter().any(|method| method.starts_with("eth_sendRawTransaction"));
    proxy.judge(move |methods| if sends(methods) { Fate::DropBefore } else { Fate::Pass });
    let mut owed = Vec::new();
    for _ in 0..3 {
        let (purchase, answer) = buy(&app, &customer).await;
        assert!(is_accepted(&answer));
        owed.push(purchase);
    }
    let all = authorization::authorization(customer.from, authorization::random_address(), 9 * PRICE);
    let signature = authorization::sign(&customer.signer, &shop.asset, &all);
    assert!(chain.relayer().await.send(&chain, transfer_vrs(&all, &signature)).await.status());
    assert_eq!(chain.balance(customer.from).await, 0);
    proxy.judge(|_| Fate::Pass);
    for purchase in &owed {
        until(&shop, &key(purchase), |record| record.last_failure.is_some()).await;
    }
    assert_eq!(chain.balance(shop.pay_to).await, 3 * PRICE, "there is nothing to collect");

    // Other payers are not affected.
    let other = Customer::with_funds(&chain, 10 * PRICE).await;
    assert!(!is_accepted(&buy(&app, &other).await.1), "it has not paid yet");
    assert!(is_accepted(&buy(&app, &other).await.1));

    let last = owed.iter().map(|purchase| purchase.authorization.validBefore).max().unwrap();
    chain.set_next_timestamp(u64::try_from(last).unwrap() + 100).await;
    chain.mine().await;
    for purchase in &owed {
        // A background pass would find this a minute later.
        let key = key(purchase);
        let record = shop.facilitator.ledger().get(&key).await.unwrap().unwrap();
        let outcome = shop.facilitator.reconcile(&record).await.unwrap();
        shop.facilitator
            .ledger()
            .advance(&key, &SettlementStep::of(&outcome, shop.facilitator.process_id(), &record.transactions).into())
            .await
            .unwrap();
        let lost = shop.facilitator.ledger().get(&key).await.unwrap().unwrap();
        assert_eq!((lost.settlement, lost.owed()), (Settlement::Dead, U256::from(PRICE)), "never to be paid");
    }
}

#[tokio::test]
async fn our_client_counts_a_deferred_payment_as_accepted_and_spent() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let paywall = shop.layer().deferred(policy()).build().unwrap();
    let router = Router::new().route("/evaluate", post(async |body: String| body)).layer(paywall);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/evaluate", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });

    let key = PrivateKeySigner::random();
    chain.mint(key.address(), 5 * PRICE).await;
    let budget = Budget::builder().total(Usdc::from_atomic(5 * PRICE)).build();
    let payer = Payer::builder(key).budget(budget.clone()).build();
    let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder().no_proxy()).unwrap();
    let buy = async || {
        let response = client.post(&url).body("x").send().await.unwrap();
        let receipt = response.receipt().unwrap().clone();
        assert_eq!(response.text().await.unwrap(), "x");
        receipt
    };
    assert_eq!(buy().await.outcome, PaymentOutcome::Settled);
    let receipt = buy().await;
    assert_eq!((receipt.outcome, receipt.transaction), (PaymentOutcome::Accepted, None));
    assert_eq!((budget.spent(), budget.reserved()), (Usdc::from_atomic(2 * PRICE), Usdc::ZERO));
    let key = PaymentKey { network: receipt.network, asset: receipt.asset, payer: receipt.payer, nonce: receipt.nonce };
    let paid_by = until(&shop, &key, is_paid).await.settlement.paid_by();
    let transfers = chain.token_transfers(shop.pay_to).await;
    assert!(transfers.iter().any(|transfer| Some(transfer.transaction) == paid_by && transfer.from == receipt.payer));
}
