//! Evaluators that contradict their cards.

use std::sync::Arc;

use alloy_primitives::{Address, U256, address};
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, routing::post};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_x402::{
    Asset, Network,
    client::{Budget, Payer, PaymentMiddleware, RetryPolicy},
    server::{RequirePaymentLayer, RequirePaymentLayerBuilder},
};
use x402_market::{
    CARD_PATH, CardFetcher, EvaluateError, EvaluationClient, MessageError, Submission, Task, VerifiedCard,
};

use super::stage::{PRICE, Stage, card, serve};
use support::chain::Chain as _;

/// Somebody with a signed card, who demands what he likes and answers what he likes.
async fn liar(
    stage: &Stage,
    demand: impl FnOnce(RequirePaymentLayerBuilder, Address) -> RequirePaymentLayerBuilder,
    answer: impl Into<Value>,
) -> (Arc<VerifiedCard>, PrivateKeySigner) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let key = PrivateKeySigner::random();
    let card = card(listener.local_addr().unwrap(), key.address()).build().unwrap().sign(&key).await.unwrap();
    let card = serde_json::to_vec(&card).unwrap();
    let paywall = RequirePaymentLayer::builder().price("$0.001").facilitator(stage.facilitator.clone());
    let paywall = match demand(paywall, key.address()) {
        changed if format!("{changed:?}").contains("payees: []") => {
            changed.pay_to(Network::BASE_SEPOLIA, key.address())
        }
        changed => changed,
    };
    let answer = match answer.into() {
        Value::String(text) => text,
        json => json.to_string(),
    };
    let evaluate = post(async move || answer.clone()).layer(paywall.build().unwrap());
    let router =
        Router::new().route("/evaluate", evaluate).route(CARD_PATH, axum::routing::get(async move || card.clone()));
    let url = serve(listener, router);
    (CardFetcher::new().unwrap().fetch(&url).await.unwrap(), key)
}

fn submission() -> Submission {
    Submission::single(Task::new("prose", "Write.").unwrap().with_id("t").unwrap(), "Written.").unwrap()
}

fn evaluation(score: &Value) -> Value {
    let verdict = json!({ "score": score, "reward": 0, "confidence": 0.5, "critique": { "summary": "" } });
    json!({ "evaluator": { "id": "e", "version": "1" }, "task": "t", "verdicts": [verdict] })
}

async fn student(stage: &Stage) -> (EvaluationClient, Payer) {
    let payer = stage.payer(100 * PRICE).await;
    (
        EvaluationClient::with(PaymentMiddleware::new(payer.clone()).retry(RetryPolicy::default().max_attempts(2)))
            .unwrap(),
        payer,
    )
}

#[tokio::test]
async fn price_that_differs_from_the_card_costs_nothing() {
    let stage = Stage::set().await;
    let (student, payer) = student(&stage).await;
    for asked in ["$0.002", "$0.0005"] {
        let (card, _) = liar(&stage, |paywall, _| paywall.price(asked), evaluation(&json!(1))).await;
        let error = student.evaluate(&card, &submission()).await.unwrap_err();
        let EvaluateError::PriceMismatch { expected, demanded } = &error else { panic!("{error:?}") };
        assert_eq!(expected.atomic(), PRICE);
        assert_ne!(*demanded, U256::from(PRICE));
        assert!(error.receipt().is_none());
    }
    // A pair costs twice the price: a fixed price is a lie about it.
    let (card, _) = liar(&stage, |paywall, _| paywall, evaluation(&json!(1))).await;
    let pair = Submission::pair(Task::new("prose", "").unwrap(), "", "").unwrap();
    assert!(matches!(student.evaluate(&card, &pair).await, Err(EvaluateError::PriceMismatch { .. })));
    let thief = address!("70997970C51812dc3A010C7d01b50e0d17dc79C8");
    let (card, key) =
        liar(&stage, |paywall, _| paywall.pay_to(Network::BASE_SEPOLIA, thief), evaluation(&json!(1))).await;
    match student.evaluate(&card, &submission()).await {
        Err(EvaluateError::PayeeMismatch { expected, demanded }) => {
            assert_eq!((expected, demanded), (key.address(), thief))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((payer.budget().spent().atomic(), payer.budget().reserved().atomic()), (0, 0));
}

#[tokio::test]
async fn token_that_is_not_on_the_card_costs_nothing() {
    let stage = Stage::set().await;
    // Of this the same amount may be worth more: money of a main chain where the card speaks of a test chain's, say.
    let dearer = support::changed(stage.chain.asset(), |asset| asset.address = Address::repeat_byte(0xd0));
    let both = Payer::builder(PrivateKeySigner::random()).asset(stage.chain.asset()).asset(dearer.clone());
    let payer = both.budget(Budget::builder().per_payment("$1".parse().unwrap()).build()).build();
    let student =
        EvaluationClient::with(PaymentMiddleware::new(payer.clone()).retry(RetryPolicy::default().max_attempts(2)))
            .unwrap();
    // Alone, and beside what the card says.
    let alone =
        async |asset: Asset| liar(&stage, |paywall, key| paywall.pay_to_in(asset, key), evaluation(&json!(1))).await;
    let beside = async |asset: Asset| {
        let demand =
            |paywall: RequirePaymentLayerBuilder, key| paywall.pay_to(Network::BASE_SEPOLIA, key).pay_to_in(asset, key);
        liar(&stage, demand, evaluation(&json!(1))).await
    };
    for (card, _) in [alone(dearer.clone()).await, beside(dearer.clone()).await] {
        let error = student.evaluate(&card, &submission()).await.unwrap_err();
        let EvaluateError::TokenMismatch { network, asset } = error else { panic!("{error:?}") };
        assert_eq!((network, asset), (dearer.network, dearer.address));
        assert!(error.receipt().is_none());
    }
    assert_eq!((payer.budget().spent().atomic(), payer.budget().reserved().atomic()), (0, 0));
}

#[tokio::test]
async fn invalid_evaluations_are_refused() {
    let stage = Stage::set().await;
    let (student, payer) = student(&stage).await;
    let mut other_task = evaluation(&json!(1));
    other_task["task"] = json!("another");
    let mut too_many = evaluation(&json!(1));
    too_many["verdicts"] = json!([too_many["verdicts"][0], too_many["verdicts"][0]]);
    let mut of_the_future = evaluation(&json!(1));
    of_the_future["version"] = json!(2);
    let answers = [
        evaluation(&json!(1.01)),
        evaluation(&json!(-1)),
        evaluation(&json!(null)),
        other_task,
        too_many,
        of_the_future,
        json!("what a nice submission"),
        json!("x".repeat(2 << 20)),
    ];
    let count = answers.len() as u64;
    for answer in answers {
        let (card, _) = liar(&stage, |paywall, _| paywall, answer.clone()).await;
        let error = student.evaluate(&card, &submission()).await.unwrap_err();
        let EvaluateError::InvalidEvaluation { problem, .. } = &error else { panic!("{answer:.200}: {error:?}") };
        assert!(matches!(problem, MessageError::Invalid { .. } | MessageError::NotJson(_) | MessageError::Version(2)));
        assert!(error.receipt().is_some_and(|receipt| receipt.outcome.is_paid()), "it was paid for all the same");
    }
    assert_eq!(payer.budget().spent().atomic(), count * PRICE);
    let (card, _) = liar(&stage, |paywall, _| paywall, evaluation(&json!(1))).await;
    assert_eq!(student.evaluate(&card, &submission()).await.unwrap().evaluation.verdicts[0].score.get(), 1.0);
}

#[tokio::test]
async fn skills_that_are_not_on_the_card_are_not_requested() {
    let stage = Stage::set().await;
    let (student, _) = student(&stage).await;
    let (card, _) = liar(&stage, |paywall, _| paywall, evaluation(&json!(1))).await;
    let poetry = Submission::single(Task::new("poetry", "Rhyme").unwrap(), "time").unwrap();
    let error = student.evaluate(&card, &poetry).await.unwrap_err();
    assert!(matches!(&error, EvaluateError::NotOffered(_)), "{error:?}");
}
