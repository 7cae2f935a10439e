//! Servers of x402 v1, honest and hostile.

use std::time::Duration;

use alloy_signer_local::PrivateKeySigner;
use axum::{
    body::{Body, Bytes},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use http::Request;
use http_body_util::Full;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower::{Layer, ServiceExt};
use tower_x402::{
    Network, Usdc,
    client::{
        AddPaymentLayer, Budget, Journal, OfferRefusal, Payer, PaymentError, PaymentMiddleware, PaymentOutcome,
        Receipt, ReceiptExt, Refusal, RetryPolicy,
    },
    protocol::{DecodeError, OfferError, PaymentFlow, Version, v1::PaymentPayloadV1},
};

use super::middleware::{client, refusal};
use support::script::*;
use support::{
    chain::{Chain, on_every_chain},
    shop::{App, PRICE, Shop, send},
};

/// The result of a request, which must be the same for the reqwest middleware and the tower layer.
struct Bought {
    outcome: PaymentOutcome,
    reason: Option<String>,
    spent: u64,
    reserved: u64,
    status: Option<u16>,
}

/// Pays servers of v1 with these replies, with both clients.
async fn bought(required: &Value, replies: impl Fn(&Bank) -> Vec<Reply>) -> (Bought, Vec<(Bank, Server)>) {
    let mut all = Vec::new();
    for through_tower in [false, true] {
        let (bank, budget) = (Bank::default(), budget(10_000));
        let server = Server::paid_in_v1(required.clone(), replies(&bank)).await;
        let (status, receipt) = match through_tower {
            false => through_reqwest(&server, &budget).await,
            true => through_hyper(&server, &budget).await,
        };
        let (outcome, reason) =
            receipt.map_or((PaymentOutcome::Refused, None), |receipt| (receipt.outcome, receipt.reason));
        let (spent, reserved) = (budget.spent().atomic(), budget.reserved().atomic());
        all.push((Bought { outcome, reason, spent, reserved, status }, bank, server));
    }
    let (other, bank, server) = all.remove(1);
    let (one, ..) = &all[0];
    assert_eq!((one.outcome, &one.reason, one.status), (other.outcome, &other.reason, other.status));
    assert_eq!((one.spent, one.reserved), (other.spent, other.reserved));
    let (_, first_bank, first_server) = all.remove(0);
    (other, vec![(first_bank, first_server), (bank, server)])
}

async fn through_reqwest(server: &Server, budget: &Budget) -> (Option<u16>, Option<Receipt>) {
    match client(budget).post(server.url()).body("my answer").send().await {
        Ok(response) => (Some(response.status().as_u16()), response.receipt().cloned()),
        Err(error) => (None, PaymentError::of(&error).unwrap().receipt().cloned()),
    }
}

async fn through_hyper(server: &Server, budget: &Budget) -> (Option<u16>, Option<Receipt>) {
    let layer = AddPaymentLayer::new(payer(budget)).retry(
        RetryPolicy::default().attempt_timeout(Duration::from_millis(300)).first_pause(Duration::from_millis(5)),
    );
    let hyper: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let request = Request::post(server.url()).body(Full::from("my answer")).unwrap();
    match layer.layer(hyper).oneshot(request).await {
        Ok(response) => (Some(response.status().as_u16()), response.receipt().cloned()),
        Err(error) => (None, error.payment().unwrap().receipt().cloned()),
    }
}

#[tokio::test]
async fn v1_is_paid_and_its_receipt_read_in_the_headers_of_v1() {
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let required = required_v1(&[support::changed(offer(1_000), |offer| offer.flow = flow)]);
        let (bought, servers) = bought(&required, |bank| vec![bank.then(settled_in_v1())]).await;
        assert_eq!((bought.outcome, bought.status), (PaymentOutcome::Settled, Some(200)));
        assert_eq!((bought.spent, bought.reserved), (1_000, 0));
        for (bank, server) in servers {
            assert_eq!(bank.taken(), 1_000);
            let seen = server.seen();
            let headers: Vec<_> = seen.iter().map(|seen| seen.paid_in).collect();
            assert_eq!(headers, [None, Some("x-payment")]);
            assert!(seen.iter().all(|seen| seen.body == b"my answer"));
            let payment: PaymentPayloadV1 =
                tower_x402::protocol::decode_header(server.payments()[0].as_bytes(), 4_096).unwrap();
            assert_eq!((payment.scheme.as_str(), payment.network.as_str()), ("exact", "base-sepolia"));
        }
    }
}

/// Some servers send the receipt of v1 in the header of v2.
#[tokio::test]
async fn v1_receipt_is_read_from_the_header_of_v2_if_that_of_v1_is_missing() {
    let required = required_v1(&[offer(1_000)]);
    let mut lie = settlement_v1();
    lie["network"] = json!("base");
    for (settlement, outcome, spent) in
        [(settlement_v1(), PaymentOutcome::Settled, 1_000), (lie, PaymentOutcome::Unknown, 0)]
    {
        let replies = |bank: &Bank| vec![bank.then(with_settlement(200, settlement.clone()))];
        let (bought, _) = bought(&required, replies).await;
        assert_eq!((bought.outcome, bought.spent, bought.reserved), (outcome, spent, 1_000 - spent));
    }
}

#[tokio::test]
async fn server_of_both_versions_is_paid_in_v2() {
    let both = || {
        let mut response = required_402_v1(&required_v1(&[offer(1)]));
        response.headers_mut().insert("payment-required", required(&[offer(1_000)]).parse().unwrap());
        response
    };
    let (server, budget) = (Server::selling(both, vec![settled()]).await, budget(10_000));
    let (_, receipt) = through_reqwest(&server, &budget).await;
    assert_eq!((receipt.unwrap().outcome, budget.spent().atomic()), (PaymentOutcome::Settled, 1_000));
    assert_eq!(server.seen()[1].paid_in, Some("payment-signature"));

    // A header that cannot be read is not a reason to look elsewhere.
    let broken = || {
        let mut response = required_402_v1(&required_v1(&[offer(1)]));
        response.headers_mut().insert("payment-required", "?".parse().unwrap());
        response
    };
    let server = Server::selling(broken, vec![settled_in_v1()]).await;
    let error = client(&budget).post(server.url()).send().await.unwrap_err();
    assert!(matches!(PaymentError::of(&error), Some(PaymentError::Unreadable(DecodeError::NotBase64))));
    assert!(server.payments().is_empty());
}

#[tokio::test]
async fn unclear_answers_are_retried_with_the_same_payment() {
    let failures: [fn() -> Reply; 4] = [silence, || status(502), cut, || later(409, None)];
    for failure in failures {
        let replies = |bank: &Bank| vec![bank.then(failure()), bank.then(settled_in_v1())];
        let (bought, servers) = bought(&required_v1(&[offer(1_000)]), replies).await;
        assert_eq!((bought.outcome, bought.spent, bought.reserved), (PaymentOutcome::Settled, 1_000, 0));
        for (bank, server) in servers {
            let payments = server.payments();
            assert_eq!((payments.len(), &payments[0]), (2, &payments[1]));
            assert_eq!(bank.taken(), 1_000);
        }
    }
}

#[tokio::test]
async fn a_second_402_never_leads_to_a_second_signature() {
    for (error, outcome, reason) in [
        (json!("insufficient_funds"), PaymentOutcome::Failed, Some("insufficient_funds")),
        (json!("insufficient_funds: the payer has 7 units"), PaymentOutcome::Failed, Some("insufficient_funds")),
        (
            json!("invalid_exact_evm_nonce_already_used"),
            PaymentOutcome::Unknown,
            Some("invalid_exact_evm_nonce_already_used"),
        ),
        (json!({}), PaymentOutcome::Unknown, Some("the server asked again")),
        (json!("Pay again"), PaymentOutcome::Unknown, Some("the server asked again: Pay again")),
    ] {
        for price in [1_000, 9_000] {
            let replies = |bank: &Bank| vec![bank.then(required_again_v1(price, error.clone())), settled_in_v1()];
            let (bought, servers) = bought(&required_v1(&[offer(1_000)]), replies).await;
            assert_eq!((bought.outcome, bought.reason.as_deref()), (outcome, reason));
            assert_eq!(
                (bought.spent, bought.reserved, bought.status),
                (0, 1_000, Some(402)),
                "what it may take is held"
            );
            for (bank, server) in servers {
                assert_eq!((bank.taken(), server.payments().len()), (1_000, 1));
            }
        }
    }
}

#[tokio::test]
async fn failure_after_an_unclear_attempt_is_unknown() {
    let replies = |bank: &Bank| vec![bank.then(cut()), required_again_v1(1_000, json!("insufficient_funds"))];
    let (bought, _) = bought(&required_v1(&[offer(1_000)]), replies).await;
    assert_eq!((bought.outcome, bought.reserved), (PaymentOutcome::Unknown, 1_000));
}

#[tokio::test]
async fn receipt_that_contradicts_what_was_signed_settles_nothing() {
    for (field, value) in [
        ("network", json!("base")),
        ("network", json!("solana")),
        ("payer", json!("0x0000000000000000000000000000000000000001")),
        ("transaction", json!("0x12")),
    ] {
        let mut settlement = settlement_v1();
        settlement[field] = value;
        let replies = |_: &Bank| vec![with_settlement_v1(200, settlement.clone())];
        let (bought, _) = bought(&required_v1(&[offer(1_000)]), replies).await;
        assert_eq!((bought.outcome, bought.reserved), (PaymentOutcome::Unknown, 1_000), "{field}");
    }
}

/// Returns the error for this 402, and asserts that nothing was signed.
async fn refused(required: Value) -> Result<Refusal, PaymentError> {
    let (server, budget) = (Server::paid_in_v1(required, vec![settled_in_v1()]).await, budget(10_000));
    let request = client(&budget).post(server.url()).body("my answer").send();
    let error = match request.await.unwrap_err() {
        reqwest_middleware::Error::Middleware(error) => error.downcast::<PaymentError>().unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!((server.seen().len(), budget.remaining()), (1, budget.total()));
    assert!(budget.journal().unresolved().is_empty());
    match error {
        PaymentError::Refused(refusal) => Ok(refusal),
        other => Err(other),
    }
}

#[tokio::test]
async fn unpayable_offers_are_refused_before_anything_is_signed() {
    assert_eq!(refused(required_v1(&[])).await.unwrap(), Refusal::NoPayableOffer { reasons: vec![] });
    let limit = Usdc::from_atomic(10_000);
    let above = Refusal::AbovePaymentLimit { asked: Usdc::from_atomic(10_001), limit };
    assert_eq!(refused(required_v1(&[offer(10_001)])).await.unwrap(), above);
    for network in ["avalanche", "eip155:84532", "", "BASE-SEPOLIA"] {
        let mut required = required_v1(&[offer(1)]);
        required["accepts"][0]["network"] = network.into();
        let unknown = OfferRefusal::Unsupported(OfferError::Network(network.into()));
        assert_eq!(refused(required).await.unwrap(), Refusal::NoPayableOffer { reasons: vec![unknown] });
    }
    for (field, value) in [
        ("maxAmountRequired", json!(1)),
        ("maxAmountRequired", json!("-1")),
        ("payTo", json!("bob")),
        ("asset", json!("0x0000000000000000000000000000000000000000")),
        ("scheme", json!("upto")),
        ("maxTimeoutSeconds", json!(0)),
        ("extra", json!(null)),
        ("extra", json!({ "name": "USD Coin", "version": "2" })),
    ] {
        let mut required = required_v1(&[offer(1)]);
        required["accepts"][0][field] = value;
        let refusal = refused(required).await.unwrap();
        assert!(matches!(&refusal, Refusal::NoPayableOffer { reasons } if reasons.len() == 1), "{field}: {refusal:?}");
    }
    let broken = json!({ "x402Version": 1, "accepts": "all major credit cards" });
    assert!(matches!(refused(broken).await, Err(PaymentError::Unreadable(DecodeError::Json(_)))));
}

#[tokio::test]
async fn long_streaming_body_and_redirect_are_refused_unless_the_402_is_foreign() {
    let budget = budget(10_000);
    let client = |budget: &Budget| {
        let client = super::middleware::middleware(budget).max_buffered_body(3);
        client.client(reqwest::Client::builder().no_proxy()).unwrap()
    };
    let stream = || reqwest::Body::wrap_stream(futures_util::stream::iter([Ok::<_, std::io::Error>("my answer")]));
    let server = Server::paid_in_v1(required_v1(&[offer(1_000)]), vec![]).await;
    let error = client(&budget).post(server.url()).body(stream()).send().await.unwrap_err();
    assert_eq!(refusal(&error), &Refusal::BodyNotReplayable);
    let foreign = Server::start(|_| Answer::Response(required_402_v1(&json!({ "error": "call us" })))).await;
    let response = client(&budget).post(foreign.url()).body(stream()).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.url().as_str()), (402, foreign.url().as_str()));
    assert_eq!(response.text().await.unwrap(), r#"{"error":"call us"}"#);

    let thief = Server::paid_in_v1(required_v1(&[offer(1_000)]), vec![settled_in_v1()]).await;
    let (url, code) = (thief.url(), StatusCode::TEMPORARY_REDIRECT);
    let mover =
        Server::start(move |_| Answer::Response((code, [(header::LOCATION, url.clone())]).into_response())).await;
    let follows = super::middleware::middleware(&budget);
    let follows =
        reqwest_middleware::ClientBuilder::new(reqwest::Client::builder().no_proxy().build().unwrap()).with(follows);
    let error = follows.build().post(mover.url()).body("x").send().await.unwrap_err();
    assert!(matches!(refusal(&error), Refusal::Redirected { .. }));
    assert!(thief.payments().is_empty());
}

#[tokio::test]
async fn payment_of_the_caller_passes_through() {
    let server = Server::paid_in_v1(required_v1(&[offer(1_000)]), vec![status(402)]).await;
    let budget = budget(10_000);
    let response = client(&budget).get(server.url()).header("x-payment", "mine").send().await.unwrap();
    assert_eq!((response.status().as_u16(), server.payments()), (402, vec!["mine".to_owned()]));
}

on_every_chain! {
    the_student_buys_from_a_shop_that_speaks_v1_only,
    open_v1_payment_is_sent_in_v1_by_the_next_process,
}

/// A shop whose 402s have offers of v1 only.
async fn shop_in_v1(chain: &dyn Chain, flow: PaymentFlow) -> (Shop, String) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer().public_origin("http://shop.example").flow(flow));
    let handler = move |request: axum::extract::Request| {
        let app: App = app.clone();
        async move {
            assert!(!request.headers().contains_key("payment-signature"));
            let answer = send(&app, request).await;
            let mut response = Response::new(Body::from(answer.body.clone()));
            (*response.status_mut(), *response.headers_mut()) = (answer.status, answer.headers.clone());
            response.headers_mut().remove("payment-required");
            response
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/evaluate", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(handler)).await });
    (shop, url)
}

async fn the_student_buys_from_a_shop_that_speaks_v1_only(chain: &dyn Chain) {
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let (shop, url) = shop_in_v1(chain, flow).await;
        let key = PrivateKeySigner::random();
        chain.mint(key.address(), 2 * PRICE).await;
        let (one, other) = (budget(PRICE), budget(PRICE));
        let payer = |budget: &Budget| Payer::builder(key.clone()).asset(chain.asset()).budget(budget.clone()).build();
        let client = PaymentMiddleware::new(payer(&one)).client(reqwest::Client::builder().no_proxy()).unwrap();
        let response = client.post(&url).body("17 * 23").send().await.unwrap();
        let receipt = response.receipt().unwrap().clone();
        assert_eq!((receipt.outcome, response.text().await.unwrap().as_str()), (PaymentOutcome::Settled, "17 * 23"));

        let hyper: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
        let request = Request::post(&url).body(Full::from("17 * 24")).unwrap();
        let response = AddPaymentLayer::new(payer(&other)).layer(hyper).oneshot(request).await.unwrap();
        assert_eq!(response.receipt().unwrap().outcome, PaymentOutcome::Settled);

        let transfers = chain.token_transfers(shop.pay_to).await;
        assert_eq!(
            (transfers.len(), transfers[0].units, Some(transfers[0].transaction)),
            (2, PRICE, receipt.transaction)
        );
        assert_eq!((one.spent().atomic(), other.spent().atomic(), shop.handled()), (PRICE, PRICE, 2));
    }
}

async fn open_v1_payment_is_sent_in_v1_by_the_next_process(chain: &dyn Chain) {
    let path = TempPath::new(&format!("v1-{}", chain.rpc_url().replace(['/', ':'], "")));
    let (shop, url) = shop_in_v1(chain, PaymentFlow::Authorization).await;
    let key = PrivateKeySigner::random();
    chain.mint(key.address(), PRICE).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    {
        // Signed, and not heard of again.
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
        let payer = Payer::builder(key).asset(chain.asset()).budget(budget).build();
        let asked = http.post(&url).body("my answer").send().await.unwrap();
        let (url, headers) = (url.parse().unwrap(), asked.headers().clone());
        let body = asked.bytes().await.unwrap();
        let payment = payer.pay(&http::Method::POST, &url, &headers, Some(&body)).await.unwrap().unwrap();
        assert_eq!((payment.version(), payment.header_name().as_str()), (Version::V1, "x-payment"));
    }
    let journal = Journal::open(&path.0).unwrap();
    let open = journal.unresolved().remove(0);
    assert_eq!((open.version, open.network), (Version::V1, Network::BASE_SEPOLIA));
    let request = http.post(&open.url).header(open.version.payment_header(), &open.payment).body("my answer");
    let response = request.send().await.unwrap();
    assert!(response.headers().contains_key(open.version.response_header()));
    assert_eq!(response.text().await.unwrap(), "my answer");
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}
