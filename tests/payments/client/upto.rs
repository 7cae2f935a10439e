//! Our buyer pays our seller at most a price (scheme `upto`): what its budget counts, what comes back, and what stays reserved.

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::json;
use support::{
    chain::Chain as _,
    devnet::DevnetChain,
    permit::{approve, invalidate, settle_by_contract},
    script::TempPath,
    shop::{App, PRICE, Shop, evaluate, send},
};
use tower::{Layer as _, ServiceExt as _};
use tower_x402::{
    Network, Usdc,
    client::{
        AddPaymentLayer, Budget, Journal, NextStep, OfferRefusal, Payer, PaymentOutcome, PermitPolicy, Receipt,
        ReceiptExt as _, Refusal, SignedPayment, reconcile,
    },
    server::ActualPrice,
};

fn usdc(units: u64) -> Usdc {
    Usdc::from_atomic(units)
}

struct Stage {
    chain: DevnetChain,
    app: App,
    buyer: PrivateKeySigner,
}

impl Stage {
    /// A seller whose handler is told by the body what the work costs, and a buyer who has approved this much.
    async fn open(approved: U256) -> Self {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let app = shop.app_with(shop.layer().upto(), |_, body| async move {
            let units = std::str::from_utf8(&body)?.strip_prefix("costs ").map(str::parse).transpose()?;
            let mut response = Response::new(Body::from(body));
            if let Some(units) = units {
                response.extensions_mut().insert(ActualPrice(usdc(units)));
            }
            Ok(response)
        });
        let buyer = PrivateKeySigner::random();
        chain.mint(buyer.address(), 100 * PRICE).await;
        approve(&chain.devnet, buyer.address(), approved);
        Self { chain, app, buyer }
    }

    fn payer(&self, budget: Budget) -> Payer {
        let policy = PermitPolicy::default().node(Network::BASE_SEPOLIA, self.chain.devnet.rpc_client());
        Payer::builder(self.buyer.clone()).budget(budget).upto(policy).build()
    }

    async fn buy(&self, payer: &Payer, body: &'static str) -> (StatusCode, Receipt) {
        let http = self.app.clone().map_request(|request: Request<String>| request.map(Body::from));
        let client = AddPaymentLayer::new(payer.clone()).layer(http);
        let request = Request::post("http://shop.example/evaluate").body(body.to_owned()).unwrap();
        let response = client.oneshot(request).await.expect("an answer");
        (response.status(), response.receipt().expect("it was paid for").clone())
    }

    /// Signs for the seller's offer, and sends nothing.
    async fn sign(&self, payer: &Payer) -> SignedPayment {
        let unpaid = send(&self.app, evaluate("a")).await;
        let url = "http://shop.example/evaluate?k=1".parse().unwrap();
        payer.pay(&Method::POST, &url, &unpaid.headers, None).await.unwrap().expect("a 402")
    }

    async fn at(&self, seconds: u64) {
        self.chain.set_next_timestamp(seconds).await;
        self.chain.mine().await;
    }
}

fn budget() -> Budget {
    Budget::builder().per_payment(usdc(PRICE)).total(usdc(3 * PRICE)).build()
}

#[tokio::test]
async fn buyer_spends_what_was_charged_and_gets_the_rest_back() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let payer = stage.payer(budget());
    for paid in 1..=8 {
        let (status, receipt) = stage.buy(&payer, "costs 250").await;
        assert_eq!((status, receipt.outcome, receipt.amount), (StatusCode::OK, PaymentOutcome::Settled, usdc(250)));
        assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(250 * paid), Usdc::ZERO));
    }
    let by_payee = payer.budget().spent_by_payee();
    assert_eq!(by_payee.values().copied().collect::<Vec<_>>(), [usdc(2_000)]);
}

#[tokio::test]
async fn limit_per_payment_counts_the_most_that_may_be_charged() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let payer = stage.payer(Budget::builder().per_payment(usdc(PRICE - 1)).build());
    let unpaid = send(&stage.app, evaluate("a")).await;
    let url = "http://shop.example/evaluate?k=1".parse().unwrap();
    let refused = payer.pay(&Method::POST, &url, &unpaid.headers, None).await.unwrap_err();
    assert!(refused.to_string().contains("above the limit"), "{refused}");
}

#[tokio::test]
async fn buyer_that_approved_too_little_signs_no_permit() {
    let stage = Stage::open(U256::from(2 * PRICE - 1)).await;
    let payer = stage.payer(budget());
    assert_eq!(stage.buy(&payer, "costs 250").await.1.amount, usdc(250));
    // What is left of it does not cover another one, so that it pays by the other offer.
    approve(&stage.chain.devnet, stage.buyer.address(), U256::from(PRICE - 1));
    let (status, receipt) = stage.buy(&payer, "costs 250").await;
    assert_eq!((status, receipt.amount), (StatusCode::OK, usdc(PRICE)));
    // Where there is none, it says why.
    let unpaid = send(&stage.app, evaluate("a")).await;
    let mut required: serde_json::Value =
        serde_json::from_slice(&BASE64_STANDARD.decode(&unpaid.headers["payment-required"]).unwrap()).unwrap();
    required["accepts"].as_array_mut().unwrap().remove(0);
    let mut headers = HeaderMap::new();
    headers.insert("payment-required", BASE64_STANDARD.encode(required.to_string()).parse().unwrap());
    let url = "http://shop.example/evaluate?k=1".parse().unwrap();
    let error = payer.pay(&Method::POST, &url, &headers, None).await.unwrap_err();
    let tower_x402::client::PaymentError::Refused(Refusal::NoPayableOffer { reasons }) = error else {
        panic!("{error}")
    };
    let (approved, needed) = (U256::from(PRICE - 1), U256::from(PRICE));
    assert_eq!(reasons, [OfferRefusal::NotApproved { approved, needed }]);
    // One that does not pay by permit does not sign either.
    let other = Payer::builder(stage.buyer.clone()).build();
    assert_eq!(stage.buy(&other, "costs 250").await.1.amount, usdc(PRICE));
}

/// The seller could charge all of it until the deadline, whatever it says now.
#[tokio::test]
async fn charge_of_nothing_stays_reserved_until_the_chain_shows_that_the_permit_has_expired() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let path = TempPath::new("upto-nothing");
    let open = || {
        let journal = Journal::open(&path.0).unwrap();
        Budget::builder().per_payment(usdc(PRICE)).total(usdc(3 * PRICE)).journal(journal).build()
    };
    let payer = stage.payer(open());
    let (status, receipt) = stage.buy(&payer, "costs 0").await;
    assert_eq!((status, receipt.outcome, receipt.amount), (StatusCode::OK, PaymentOutcome::Accepted, Usdc::ZERO));
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (Usdc::ZERO, usdc(PRICE)));
    // Also for a later process.
    drop(payer);
    let payer = stage.payer(open());
    assert_eq!(payer.budget().reserved(), usdc(PRICE));
    let provider = stage.chain.provider();
    assert_eq!(reconcile(payer.budget(), provider).await.unwrap().open, 1);
    let deadline = payer.budget().journal().unresolved()[0].valid_before;
    stage.at(deadline).await;
    assert_eq!(reconcile(payer.budget(), provider).await.unwrap().open, 1);
    stage.at(deadline + 1).await;
    let found = reconcile(payer.budget(), provider).await.unwrap();
    assert_eq!((found.void, found.released), (1, usdc(PRICE)));
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (Usdc::ZERO, Usdc::ZERO));
}

#[tokio::test]
async fn permit_is_released_when_its_nonce_is_invalidated() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let payer = stage.payer(budget());
    let payment = stage.sign(&payer).await;
    drop(payment);
    let entry = payer.budget().journal().unresolved().remove(0);
    assert!(entry.permit.is_some());
    invalidate(&stage.chain.devnet, stage.buyer.address(), entry.nonce.into());
    let found = reconcile(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.void, payer.budget().reserved()), (1, Usdc::ZERO));
}

/// Permit2 logs an invalidation of a nonce that was used, too, and what a contract settled cannot be told.
#[tokio::test]
async fn permit_that_was_charged_is_not_released_when_its_nonce_is_invalidated_afterwards() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let payer = stage.payer(budget());
    let mut signed = Vec::new();
    for _ in 0..2 {
        let payment = stage.sign(&payer).await;
        signed.push(serde_json::from_slice(&BASE64_STANDARD.decode(payment.header()).unwrap()).unwrap());
    }
    let [charged, unused] = [&signed[0], &signed[1]];
    settle_by_contract(&stage.chain.devnet, charged, 250);
    assert_eq!(stage.chain.balance(stage.buyer.address()).await, 100 * PRICE - 250);
    for payment in [charged, unused] {
        let nonce: &serde_json::Value = &payment["payload"]["permit2Authorization"]["nonce"];
        invalidate(&stage.chain.devnet, stage.buyer.address(), nonce.as_str().unwrap().parse().unwrap());
    }
    let found = reconcile(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.paid, found.void, found.open), (0, 1, 1));
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (Usdc::ZERO, usdc(PRICE)));
}

#[tokio::test]
async fn chain_tells_what_was_charged_by_an_answer_that_was_lost() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let payer = stage.payer(budget());
    // An equal transfer by another permit is not this one's.
    assert_eq!(stage.buy(&payer, "costs 250").await.1.amount, usdc(250));
    let unpaid = send(&stage.app, evaluate("costs 250")).await;
    let url = "http://shop.example/evaluate?k=1".parse().unwrap();
    let payment = payer.pay(&Method::POST, &url, &unpaid.headers, None).await.unwrap().expect("a 402");
    let untouched = stage.sign(&payer).await;
    let mut request = evaluate("costs 250");
    request.headers_mut().insert(payment.header_name(), payment.header().clone());
    assert_eq!(send(&stage.app, request).await.status, StatusCode::OK);
    drop((payment, untouched));
    assert_eq!(payer.budget().reserved(), usdc(2 * PRICE));
    let found = reconcile(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.paid, found.spent, found.open), (1, usdc(250), 1));
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(500), usdc(PRICE)));
}

/// What a seller answers that says that it charged this much, in this transaction.
fn says(stage: &Stage, transaction: &str, amount: &str) -> HeaderMap {
    let response = json!({
        "success": true, "transaction": transaction, "network": "eip155:84532", "amount": amount,
        "payer": stage.buyer.address(),
    });
    let mut headers = HeaderMap::new();
    headers.insert("payment-response", BASE64_STANDARD.encode(response.to_string()).parse().unwrap());
    headers
}

#[tokio::test]
async fn seller_is_believed_no_charge_above_what_was_signed_and_none_below_it() {
    let stage = Stage::open(U256::MAX >> 1).await;
    // It paid another permit of the same payer to the same payee, by as much.
    let (_, other) = stage.buy(&stage.payer(budget()), "costs 250").await;
    let other = other.transaction.unwrap().to_string();
    let invented = format!("0x{}", "ab".repeat(32));
    for (transaction, amount, outcome, spent, reserved) in [
        (invented.as_str(), "1001", PaymentOutcome::Unknown, 0, PRICE),
        (&invented, "-1", PaymentOutcome::Unknown, 0, PRICE),
        (&invented, "1000", PaymentOutcome::Settled, PRICE, 0),
        (&invented, "1", PaymentOutcome::Settled, 0, PRICE),
        (&other, "250", PaymentOutcome::Settled, 0, PRICE),
        ("", "1", PaymentOutcome::Accepted, PRICE, 0),
        ("", "0", PaymentOutcome::Accepted, 0, PRICE),
    ] {
        let payer = stage.payer(budget());
        let mut payment = stage.sign(&payer).await;
        let next = payment.answered(StatusCode::OK, &says(&stage, transaction, amount), None);
        assert_eq!(next, NextStep::Conclude);
        let receipt = payment.conclude().await;
        assert_eq!(receipt.outcome, outcome, "{transaction} {amount}");
        let budget = payer.budget();
        assert_eq!((budget.spent(), budget.reserved()), (usdc(spent), usdc(reserved)), "{transaction} {amount}");
    }
}

/// It says that it charged one unit, and charges all of it.
#[tokio::test]
async fn seller_that_lies_about_its_charge_gets_no_more_than_the_budget() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let path = TempPath::new("upto-lies");
    let open = || {
        let journal = Journal::open(&path.0).unwrap();
        Budget::builder().per_payment(usdc(PRICE)).total(usdc(3 * PRICE)).journal(journal).build()
    };
    let payer = stage.payer(open());
    for lies in 1..=3 {
        let unpaid = send(&stage.app, evaluate("all of it")).await;
        let url = "http://shop.example/evaluate?k=1".parse().unwrap();
        let mut payment = payer.pay(&Method::POST, &url, &unpaid.headers, None).await.unwrap().expect("a 402");
        let invented = format!("0x{}", "ab".repeat(32));
        payment.answered(StatusCode::OK, &says(&stage, &invented, "1"), None);
        let mut request = evaluate("all of it");
        request.headers_mut().insert(payment.header_name(), payment.header().clone());
        let receipt = payment.conclude().await;
        assert_eq!((receipt.outcome, receipt.amount), (PaymentOutcome::Settled, usdc(1)));
        assert_eq!(send(&stage.app, request).await.status, StatusCode::OK);
        assert_eq!((payer.budget().spent(), payer.budget().reserved()), (Usdc::ZERO, usdc(lies * PRICE)));
    }
    // A later process counts the same, and signs nothing more.
    drop(payer);
    let payer = stage.payer(open());
    assert_eq!(payer.budget().remaining(), Usdc::ZERO);
    let unpaid = send(&stage.app, evaluate("a")).await;
    let url = "http://shop.example/evaluate?k=1".parse().unwrap();
    let refused = payer.pay(&Method::POST, &url, &unpaid.headers, None).await.unwrap_err();
    assert!(refused.to_string().contains("limit"), "{refused}");
    let found = reconcile(payer.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.paid, found.spent), (3, usdc(3 * PRICE)));
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (usdc(3 * PRICE), Usdc::ZERO));
}

#[tokio::test]
async fn charge_that_no_node_shows_stays_reserved_until_it_is_looked_up() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let blind = Payer::builder(stage.buyer.clone()).budget(budget()).upto(PermitPolicy::default()).build();
    let (status, receipt) = stage.buy(&blind, "costs 250").await;
    assert_eq!((status, receipt.outcome, receipt.amount), (StatusCode::OK, PaymentOutcome::Settled, usdc(250)));
    assert_eq!((blind.budget().spent(), blind.budget().reserved()), (Usdc::ZERO, usdc(PRICE)));
    let found = reconcile(blind.budget(), stage.chain.provider()).await.unwrap();
    assert_eq!((found.paid, found.spent), (1, usdc(250)));
    assert_eq!((blind.budget().spent(), blind.budget().reserved()), (usdc(250), Usdc::ZERO));
}

#[tokio::test]
async fn budget_that_trusts_sellers_counts_what_they_say_once_the_permit_has_expired() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let path = TempPath::new("upto-trusts");
    let open = || {
        let journal = Journal::open(&path.0).unwrap();
        let budget = Budget::builder().per_payment(usdc(PRICE)).total(usdc(3 * PRICE)).release_failed();
        Payer::builder(stage.buyer.clone())
            .budget(budget.journal(journal).build())
            .upto(PermitPolicy::default())
            .build()
    };
    let payer = open();
    assert_eq!(stage.buy(&payer, "costs 250").await.1.amount, usdc(250));
    assert_eq!(stage.buy(&payer, "costs 0").await.1.amount, Usdc::ZERO);
    drop(payer);
    let payer = open();
    let budget = payer.budget();
    assert_eq!((budget.spent(), budget.reserved()), (Usdc::ZERO, usdc(2 * PRICE)));
    let expiry = budget.journal().unresolved().iter().map(|entry| entry.valid_before).max().unwrap();
    budget.release_expired(expiry);
    assert_eq!(budget.reserved(), usdc(2 * PRICE), "the clocks may differ");
    budget.release_expired(expiry + 60);
    assert_eq!((budget.spent(), budget.reserved()), (usdc(250), Usdc::ZERO));
}

#[tokio::test]
async fn approval_of_one_payer_is_not_anothers() {
    let stage = Stage::open(U256::MAX >> 1).await;
    let policy = PermitPolicy::default().node(Network::BASE_SEPOLIA, stage.chain.devnet.rpc_client());
    let payer = |signer| Payer::builder(signer).budget(budget()).upto(policy.clone()).build();
    assert_eq!(stage.buy(&payer(stage.buyer.clone()), "costs 250").await.1.amount, usdc(250));
    let other = PrivateKeySigner::random();
    stage.chain.mint(other.address(), PRICE).await;
    // It has approved nothing, so that it pays by the other offer.
    let (status, receipt) = stage.buy(&payer(other), "costs 250").await;
    assert_eq!((status, receipt.amount), (StatusCode::OK, usdc(PRICE)));
}
