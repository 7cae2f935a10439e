//! Facilitators that fail: no payment is charged twice, and no unknown outcome is reported as failed.

use std::{
    future::ready,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use http::HeaderMap;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use serde_json::json;
use tower_x402::{
    ManualClock,
    facilitator::{Facilitator as _, Outgoing, RemoteFacilitator},
    ledger::{Ledger, MemoryLedger, ResponseLimits, Settlement},
    payment::SettlementOutcome,
    protocol::PaymentFlow,
};

use super::{
    honest::chain_url,
    stage::{Reply, Stage, Turn, refusal, still_pending},
};
use support::{
    authorization::unix_now,
    shop::{PRICE, evaluate, send},
};

const FLOWS: [PaymentFlow; 2] = [PaymentFlow::Authorization, PaymentFlow::Upfront];
const NET: tower_x402::Network = tower_x402::Network::BASE_SEPOLIA;

/// Ways to lose the answer to a settlement that was made.
fn losses() -> Vec<(&'static str, Reply)> {
    vec![
        ("502", Reply::Status(502, "bad gateway")),
        ("503", Reply::Status(503, "{}")),
        ("a cut connection", Reply::Cut),
        ("a 402", Reply::Json(402, json!({ "x402Version": 2, "error": "payment required", "accepts": [] }))),
        ("a 401", Reply::Status(401, "who are you?")),
        ("a redirect", Reply::Status(302, "")),
        ("HTML with 200", Reply::Status(200, "<html><body>Welcome!</body></html>")),
        ("nothing with 200", Reply::Status(200, "")),
        ("6 MB", Reply::Huge(6 << 20)),
        ("half a body", Reply::Half),
        ("a list", Reply::Json(200, json!([true, null, null, null, "0x11", NET, "1000"]))),
        ("success with 400", Reply::Json(400, json!({ "success": true, "transaction": "0x11", "network": NET }))),
        ("an error of its own", refusal("unexpected_settle_error")),
        ("an error that nobody knows", refusal("the_moon_is_full")),
    ]
}

#[tokio::test]
async fn lost_answer_is_asked_for_again_and_charges_once() {
    let stage = Stage::open().await;
    for flow in FLOWS {
        let seller = stage.seller(stage.remote(), flow).await;
        let mut bought = 0;
        for (what, reply) in losses() {
            stage.script([Turn::Instead(reply)], Turn::Honest);
            stage.settles.lock().unwrap().clear();
            let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
            let answer = seller.ask(&purchase).await;
            bought += 1;
            assert_eq!(answer.status, 200, "{flow}, {what}: {answer:?}");
            assert_eq!(seller.handled(), bought, "{flow}, {what}");
            assert_eq!(seller.income(&stage).await, bought * PRICE, "{flow}, {what}");
            assert_eq!(stage.settles().len(), 2, "{what}");
            stage.assert_identical();
        }
    }
    assert_eq!(stage.most_at_once(), 1);
}

#[tokio::test]
async fn outage_after_the_settlement_is_unknown_and_charges_once() {
    let stage = Stage::open().await;
    for flow in FLOWS {
        let seller = stage.seller(stage.remote(), flow).await;
        let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        stage.script([], Turn::Instead(Reply::Status(502, "")));
        let answer = seller.ask(&purchase).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "settlement_pending"), "{flow}");
        let record = seller.record(&purchase).await.unwrap();
        assert_eq!(record.settlement, Settlement::Unknown, "{flow}");
        let worked = seller.handled();
        assert_eq!(worked, u64::from(flow == PaymentFlow::Authorization), "{flow}: no work before it is paid for");

        stage.script([], Turn::Honest);
        let answer = seller.insist(&purchase).await;
        assert_eq!((answer.status.as_u16(), answer.text()), (200, "2 + 2 = 4"), "{flow}");
        assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE), "{flow}");
    }
}

#[tokio::test]
async fn timeout_of_the_facilitator_leaves_the_outcome_unknown() {
    let stage = Stage::open().await;
    let remote = stage.remote().request_timeout(Duration::from_secs(1)).settle_timeout(Duration::from_millis(1));
    let seller = stage.seller(remote, PaymentFlow::Authorization).await;
    stage.script([Turn::Instead(Reply::Silence)], Turn::Honest);
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(seller.ask(&purchase).await.status, 503);
    assert_eq!(seller.insist(&purchase).await.status, 200);
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
    stage.assert_identical();
}

#[tokio::test]
async fn endless_pending_is_neither_settled_nor_failed() {
    let stage = Stage::open().await;
    let remote = stage.remote().settle_timeout(Duration::from_millis(700));
    let seller = stage.seller(remote, PaymentFlow::Upfront).await;
    stage.script([], Turn::Without(still_pending()));
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    for _ in 0..3 {
        let answer = seller.ask(&purchase).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "settlement_pending"));
    }
    assert_eq!(seller.record(&purchase).await.unwrap().settlement, Settlement::Unknown);
    assert_eq!((seller.handled(), seller.income(&stage).await), (0, 0));
    assert!(stage.settles().len() >= 3, "it is asked again");
    stage.assert_identical();
    assert_eq!(stage.most_at_once(), 1);
}

#[tokio::test]
async fn pending_is_followed_to_the_end() {
    let stage = Stage::open().await;
    let seller = stage.seller(stage.remote(), PaymentFlow::Upfront).await;
    stage.script(vec![Turn::Instead(still_pending()); 3], Turn::Honest);
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(seller.ask(&purchase).await.status, 200);
    assert_eq!((seller.handled(), seller.income(&stage).await, stage.settles().len()), (1, PRICE, 4));
    stage.assert_identical();
}

#[tokio::test]
async fn refusal_after_a_lost_answer_is_not_believed() {
    let stage = Stage::open().await;
    let seller = stage.seller(stage.remote(), PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    // It settles, loses the answer, and then refuses for lack of funds or a used nonce, which is the effect of its own settlement.
    stage.script([Turn::Instead(Reply::Status(504, ""))], Turn::Without(refusal("insufficient_funds")));
    assert_eq!(seller.ask(&purchase).await.status, 503);
    assert_eq!(seller.record(&purchase).await.unwrap().settlement, Settlement::Unknown);

    stage.script([], Turn::Honest);
    assert_eq!(seller.insist(&purchase).await.status, 200);
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}

#[tokio::test]
async fn used_nonce_reported_by_the_facilitator_is_unknown() {
    let stage = Stage::open().await;
    let reasons = [
        "invalid_exact_evm_nonce_already_used",
        "invalid_exact_evm_transaction_simulation_failed",
        "invalid_transaction_state",
    ];
    for reason in reasons {
        let remote = stage.remote().settle_timeout(Duration::from_millis(1));
        let seller = stage.seller(remote, PaymentFlow::Authorization).await;
        let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        stage.script([], Turn::Without(refusal(reason)));
        let answer = seller.ask(&purchase).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "settlement_pending"), "{reason}");
    }
}

#[tokio::test]
async fn plain_refusal_is_a_failure_that_may_be_tried_again() {
    let stage = Stage::open().await;
    for confirmed in [false, true] {
        let mut remote = stage.remote();
        if confirmed {
            remote = remote.confirm(NET, chain_url(&stage));
        }
        let seller = stage.seller(remote, PaymentFlow::Authorization).await;
        let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        stage.script([Turn::Without(refusal("insufficient_funds"))], Turn::Honest);
        let answer = seller.ask(&purchase).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (402, "insufficient_funds"));
        assert_eq!(seller.record(&purchase).await.unwrap().settlement, Settlement::Due);
        assert_eq!(seller.ask(&purchase).await.status, 200, "the work is kept");
        assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
    }
}

#[tokio::test]
async fn copies_of_a_failing_payment_are_settled_one_at_a_time() {
    let stage = Stage::open().await;
    let seller = stage.seller(stage.remote(), PaymentFlow::Upfront).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let trouble = [Reply::Status(500, ""), Reply::Cut, Reply::Half].map(Turn::Instead);
    stage.script(trouble, Turn::Honest);
    join_all((0..10).map(|_| seller.insist(&purchase))).await.iter().for_each(|answer| {
        assert_eq!(answer.status, 200);
    });
    assert_eq!((seller.handled(), seller.income(&stage).await, stage.most_at_once()), (1, PRICE, 1));
    stage.assert_identical();
}

#[tokio::test]
async fn unsent_settlement_leaves_the_payment_due() {
    let stage = Stage::open().await;
    let is_broken = Arc::new(AtomicBool::new(true));
    let broken = is_broken.clone();
    let sign = move |request: Outgoing| {
        let fails = request.path.ends_with("/settle") && broken.load(Ordering::SeqCst);
        async move { if fails { Err("the key service is away".into()) } else { Ok(HeaderMap::new()) } }
    };
    let seller = stage.seller(stage.remote().authenticate(sign), PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let answer = seller.ask(&purchase).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "facilitator_unavailable"));
    assert_eq!(seller.record(&purchase).await.unwrap().settlement, Settlement::Due);
    assert!(stage.settles().is_empty());

    is_broken.store(false, Ordering::SeqCst);
    assert_eq!(seller.ask(&purchase).await.status, 200, "the work is kept");
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}

/// The name of the facilitator's host leads nowhere once it has refused to answer.
struct Vanishing(SocketAddr, Arc<AtomicBool>);

impl Resolve for Vanishing {
    fn resolve(&self, _: Name) -> Resolving {
        let found: Result<Addrs, Box<dyn std::error::Error + Send + Sync>> = match self.1.load(Ordering::SeqCst) {
            true => Err("no such host".into()),
            false => Ok(Box::new([self.0].into_iter())),
        };
        Box::pin(ready(found))
    }
}

/// The caller's client would repeat the request by itself, and only the last attempt could not connect.
#[tokio::test]
async fn settlement_that_was_sent_is_unknown_although_the_facilitator_is_gone_now() {
    let stage = Stage::open().await;
    let is_gone = Arc::new(AtomicBool::new(false));
    let repeats = reqwest::retry::for_host("facilitator.test").classify_fn(|answer| match answer.status() {
        Some(status) if status == 503 => answer.retryable(),
        _ => answer.success(),
    });
    let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).retry(repeats);
    let client = client.dns_resolver(Vanishing(stage.address, is_gone.clone()));
    let remote = RemoteFacilitator::builder(format!("http://facilitator.test:{}/", stage.address.port()));
    let remote = remote.network(NET).settle_timeout(Duration::from_secs(4)).client(client);
    let seller = stage.seller(remote, PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let vanish = move || {
        is_gone.store(true, Ordering::SeqCst);
        Reply::Status(503, "{}")
    };
    stage.script([Turn::Other(Arc::new(vanish))], Turn::Honest);
    let answer = seller.ask(&purchase).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "settlement_pending"));
    assert_eq!(seller.record(&purchase).await.unwrap().settlement, Settlement::Unknown);
    assert_eq!(stage.settles().len(), 1);
}

#[tokio::test]
async fn two_processes_ask_one_at_a_time_and_finish_for_each_other() {
    let stage = Stage::open().await;
    let clock = Arc::new(ManualClock::at(unix_now()));
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::with(ResponseLimits::default(), 100, clock.clone()));
    // The first one asks, and is never answered.
    stage.script([Turn::Instead(Reply::Silence)], Turn::Honest);
    let first = stage.remote().clock(clock.clone()).request_timeout(Duration::from_secs(600));
    let first = stage.seller_on(ledger.clone(), first, |layer| layer).await;
    let purchase = stage.customer().await.pay(&first.app, evaluate("2 + 2 = 4")).await;
    let waiting = tokio::spawn({
        let (app, purchase) = (first.app.clone(), purchase.clone());
        async move { send(&app, purchase.on(evaluate("2 + 2 = 4"))).await }
    });
    support::eventually::eventually("the first process asks", async || !stage.settles().is_empty()).await;
    let record = first.record(&purchase).await.unwrap();
    assert_eq!(record.settlement, Settlement::Unknown, "from before it is asked");

    let second =
        stage.remote().clock(clock.clone()).ledger(ledger.clone()).reconcile_interval(Duration::from_millis(10));
    let second = second.build().await.unwrap();
    assert_eq!(second.reconcile(&record).await.unwrap(), SettlementOutcome::Unknown { transaction: None });
    assert_eq!(stage.settles().len(), 1, "the other one still waits for its answer");

    clock.advance(600);
    let settlement = async || first.record(&purchase).await.unwrap().settlement;
    support::eventually::eventually("it is settled", async || matches!(settlement().await, Settlement::Settled { .. }))
        .await;
    assert_eq!((first.income(&stage).await, first.handled()), (PRICE, 1));
    stage.assert_identical();
    waiting.abort();
}

#[tokio::test]
async fn slow_answer_is_bounded_by_the_timeout() {
    let stage = Stage::open().await;
    let remote = stage.remote().request_timeout(Duration::from_secs(1)).settle_timeout(Duration::from_millis(1));
    let seller = stage.seller(remote, PaymentFlow::Upfront).await;
    stage.script([Turn::Instead(Reply::Trickle)], Turn::Honest);
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let answer = seller.ask(&purchase).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "settlement_pending"));
    assert_eq!(seller.insist(&purchase).await.status, 200);
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
    stage.assert_identical();
}

#[tokio::test]
async fn refusal_after_pending_is_not_believed() {
    let stage = Stage::open().await;
    let seller = stage.seller(stage.remote(), PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    // It settles while it answers pending; then it refuses for lack of funds.
    stage.script([Turn::Instead(still_pending())], Turn::Without(refusal("insufficient_funds")));
    assert_eq!(seller.ask(&purchase).await.status, 503);
    assert_eq!(seller.record(&purchase).await.unwrap().settlement, Settlement::Unknown);
    stage.script([], Turn::Honest);
    assert_eq!(seller.insist(&purchase).await.status, 200);
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}

#[tokio::test]
async fn reported_settlement_is_not_asked_for_again() {
    let stage = Stage::open().await;
    for flow in FLOWS {
        let seller = stage.seller(stage.remote().reconcile_interval(Duration::from_millis(10)), flow).await;
        let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        stage.settles.lock().unwrap().clear();
        stage.script([], Turn::Honest);
        let first = seller.ask(&purchase).await.transaction();
        stage.script([], Turn::Without(refusal("insufficient_funds")));
        for _ in 0..3 {
            let answer = seller.ask(&purchase).await;
            assert_eq!((answer.status.as_u16(), answer.transaction()), (200, first), "{flow}");
        }
        assert_eq!((stage.settles().len(), seller.handled(), seller.income(&stage).await), (1, 1, PRICE), "{flow}");
    }
}

/// Answers to `/verify` that say nothing about the payment.
fn no_verdicts() -> Vec<(&'static str, Reply)> {
    let somebody = "0x1111111111111111111111111111111111111111";
    vec![
        ("502", Reply::Status(502, "bad gateway")),
        ("valid with 500", Reply::Json(500, json!({ "isValid": true }))),
        ("valid with 402", Reply::Json(402, json!({ "isValid": true }))),
        ("a re-challenge", Reply::Json(402, json!({ "x402Version": 2, "error": "payment required", "accepts": [] }))),
        ("a redirect", Reply::Status(302, "")),
        ("HTML with 200", Reply::Status(200, "<html><body>isValid: true</body></html>")),
        ("nothing with 200", Reply::Status(200, "")),
        ("a list", Reply::Json(200, json!([true]))),
        ("a word for yes", Reply::Json(200, json!({ "isValid": "true" }))),
        ("no, and not why", Reply::Json(200, json!({ "isValid": false }))),
        ("another payer", Reply::Json(200, json!({ "isValid": true, "payer": somebody }))),
        ("its own failure", Reply::Json(200, json!({ "isValid": false, "invalidReason": "unexpected_verify_error" }))),
        ("6 MB", Reply::Huge(6 << 20)),
        ("half a body", Reply::Half),
        ("a cut connection", Reply::Cut),
        ("silence", Reply::Silence),
        ("a trickle", Reply::Trickle),
    ]
}

#[tokio::test]
async fn unusable_verification_starts_no_work_and_sends_nothing() {
    let stage = Stage::open().await;
    let seller = stage.seller(stage.remote().request_timeout(Duration::from_millis(500)), FLOWS[0]).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    for (what, reply) in no_verdicts() {
        stage.script_verify(Turn::Instead(reply));
        let answer = seller.ask(&purchase).await;
        assert_eq!(answer.status, 503, "{what}: {answer:?}");
        assert_eq!(answer.reason(), "facilitator_unavailable", "{what}");
        assert!(answer.headers.contains_key("retry-after"), "{what}");
        assert_eq!((seller.handled(), stage.settles().len()), (0, 0), "{what}");
        assert!(seller.record(&purchase).await.is_none(), "{what}: the reservation was given back");
    }
    stage.script_verify(Turn::Honest);
    assert_eq!(seller.ask(&purchase).await.status, 200, "the same payment is good for it still");
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}

#[tokio::test]
async fn payment_found_invalid_and_then_valid_is_charged_once() {
    let stage = Stage::open().await;
    let seller = stage.seller(stage.remote(), FLOWS[0]).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let bad = json!({ "isValid": false, "invalidReason": "insufficient_funds", "invalidMessage": "\u{7}poor" });
    stage.script_verify(Turn::Without(Reply::Json(200, bad)));
    for _ in 0..2 {
        let answer = seller.ask(&purchase).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (402, "insufficient_funds"));
        assert!(!answer.text().contains('\u{7}'), "nothing that a terminal would obey");
    }
    assert_eq!((seller.handled(), stage.settles().len()), (0, 0));
    stage.script_verify(Turn::Honest);
    assert_eq!(seller.ask(&purchase).await.status, 200);
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}
