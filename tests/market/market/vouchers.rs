//! Evaluators that offer vouchers, and students that pay with them.

use std::sync::Arc;

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, http::StatusCode, response::IntoResponse as _, routing::get};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_x402::{
    Network, Usdc,
    channels::Channels,
    client::{Budget, ChannelPolicy, Payer},
    facilitator::channels::OnchainChannels,
    ledger::MemoryLedger,
    vouchers::AuthorizerKey,
};
use x402_market::{
    CARD_PATH, CardFetcher, EvaluateError, EvaluationClient, Student, Submission, Task, Verdict, judge::output_judge,
};

use super::stage::{Booth, PRICE, Stage, card, serve};
use support::chain::Chain as _;

/// An evaluator that offers vouchers beside `exact`.
async fn open(stage: &Stage) -> (Booth, Channels) {
    let key = PrivateKeySigner::random();
    stage.chain.fund(key.address(), U256::from(10).pow(U256::from(18))).await;
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(stage.chain.rpc_url());
    let contract = contract.signer(key.clone()).build().await.unwrap();
    let channels = Channels::builder(contract, AuthorizerKey::new(key)).ledger(Arc::new(MemoryLedger::new()));
    let channels = channels.build().unwrap();
    let offered = channels.clone();
    let settings = |evaluator: x402_market::EvaluatorBuilder| evaluator.paywall(|paywall| paywall.vouchers(offered));
    let judge = output_judge(async |_, _| Ok(Verdict::new(0.5, 0.5, "It is short.")));
    (stage.open_with(judge, |card| card, settings).await, channels)
}

/// A payer that pays with vouchers from the start, and has this much in all.
async fn payer(stage: &Stage, units: u64) -> Payer {
    let key = PrivateKeySigner::random();
    stage.chain.mint(key.address(), units).await;
    let budget = Budget::builder().total(Usdc::from_atomic(units)).build();
    let channels = ChannelPolicy::new().deposit(Usdc::from_atomic(units)).escrow_per_payee(Usdc::from_atomic(units));
    Payer::builder(key).asset(stage.chain.asset()).budget(budget).vouchers(channels).build()
}

fn submission(output: &str) -> Submission {
    Submission::single(Task::new("prose", "Write.").unwrap(), output).unwrap()
}

#[tokio::test]
async fn student_whose_money_is_all_in_escrow_spends_it_there() {
    let stage = Stage::set().await;
    let (booth, channels) = open(&stage).await;
    let payer = payer(&stage, 100 * PRICE).await;
    let student = Student::builder(payer.clone()).source(booth.url.clone()).panel_size(1).tasks(10).seed(1).build();
    let student = student.unwrap();
    assert_eq!(student.discover().await.found.len(), 1);
    for number in 1..=5 {
        let feedback = student.evaluate(&submission("A sentence. It is short.")).await.unwrap();
        assert_eq!(feedback.paid, Usdc::from_atomic(PRICE), "{feedback:?}");
        assert_eq!(payer.budget().spent(), Usdc::from_atomic(number * PRICE));
        assert_eq!((payer.budget().remaining(), payer.budget().in_escrow()), (Usdc::ZERO, left(number)));
    }
    let books = student.spending();
    assert_eq!((books.paid, books.held, books.elsewhere), (Usdc::from_atomic(5 * PRICE), Usdc::ZERO, Usdc::ZERO));
    let records = student.evidence().records();
    let charged: Vec<_> = records.iter().map(|record| record.charge.unwrap().charged).collect();
    assert_eq!(charged, [1, 2, 3, 4, 5].map(|number| Usdc::from_atomic(number * PRICE)));
    for record in &records {
        assert_eq!(record.payment, Some(record.charge.unwrap().payment(Network::BASE_SEPOLIA)));
        assert_eq!(record.charge.unwrap().channel.receiver, record.evaluator);
    }
    // Another one pays by transfer.
    let card = booth.card().await;
    stage.student(PRICE).await.evaluate(&card, &submission("Written.")).await.unwrap();
    channels.claim_all().await.unwrap();
    assert_eq!(booth.income(&stage).await, 6 * PRICE);
}

fn left(paid: u64) -> Usdc {
    Usdc::from_atomic((100 - paid) * PRICE)
}

/// As clients of the official packages ask for it.
#[tokio::test]
async fn refund_is_taken_with_get() {
    let stage = Stage::set().await;
    let (booth, _channels) = open(&stage).await;
    let payer = payer(&stage, 100 * PRICE).await;
    let client = EvaluationClient::new(payer.clone()).unwrap();
    client.evaluate(&*booth.card().await, &submission("Written.")).await.unwrap();
    let (http, url) = (reqwest::Client::new(), booth.url.join("evaluate").unwrap());
    let probe = http.get(url.clone()).send().await.unwrap();
    assert_eq!(
        (probe.status(), probe.headers().contains_key("payment-required")),
        (StatusCode::PAYMENT_REQUIRED, true)
    );
    let channel = payer.budget().journal().channels().pop().unwrap().id();
    let mut refund = payer.refund(channel, None).await.unwrap().expect("something is left");
    let answer = http.get(url).header(refund.header_name(), refund.header()).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK, "{answer:?}");
    assert!(!refund.answered(answer.status(), answer.headers()).await.unwrap(), "it is answered");
    assert_eq!(refund.conclude().await.amount, left(1));
}

/// The offer of `exact` is what the card says, and the one of vouchers is not. The payer would take the second.
#[tokio::test]
async fn voucher_offer_that_differs_from_the_card_costs_nothing() {
    let stage = Stage::set().await;
    let payer = payer(&stage, 100 * PRICE).await;
    let client = EvaluationClient::new(payer.clone()).unwrap();
    let stranger = Address::repeat_byte(0x77);
    for (field, value) in [("amount", "2000".to_owned()), ("payTo", stranger.to_string())] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let key = PrivateKeySigner::random();
        let card = card(listener.local_addr().unwrap(), key.address()).build().unwrap().sign(&key).await.unwrap();
        let asset = stage.chain.asset();
        let offer = |scheme: &str| {
            json!({
                "scheme": scheme, "network": asset.network, "amount": PRICE.to_string(), "asset": asset.address,
                "payTo": key.address(), "maxTimeoutSeconds": 60, "extra": {
                    "name": asset.name, "version": asset.version, "receiverAuthorizer": key.address(), "withdrawDelay": 900,
                },
            })
        };
        let mut accepts = [offer("exact"), offer("batch-settlement")];
        accepts[1][field] = Value::from(value);
        let required = json!({ "x402Version": 2, "resource": { "url": "http://judge.example" }, "accepts": accepts });
        let header = BASE64_STANDARD.encode(required.to_string());
        let evaluate = axum::routing::post(async move || {
            (StatusCode::PAYMENT_REQUIRED, [("payment-required", header)]).into_response()
        });
        let card = serde_json::to_vec(&card).unwrap();
        let router = Router::new().route("/evaluate", evaluate).route(CARD_PATH, get(async move || card.clone()));
        let url = serve(listener, router);
        let card = CardFetcher::new().unwrap().fetch(&url).await.unwrap();
        let error = client.evaluate(&card, &submission("Written.")).await.unwrap_err();
        match field {
            "amount" => assert!(matches!(error, EvaluateError::PriceMismatch { .. }), "{error:?}"),
            _ => assert!(matches!(error, EvaluateError::PayeeMismatch { demanded, .. } if demanded == stranger)),
        }
    }
    assert_eq!((payer.budget().spent(), payer.budget().reserved()), (Usdc::ZERO, Usdc::ZERO));
}
