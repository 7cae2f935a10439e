//! Which payments a remote facilitator settles in the background.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256};
use bytes::Bytes;
use serde_json::{Value, json};
use tower_x402::{
    Clock as _, ManualClock, Network,
    eip3009::{Authorization, PaymentSignature},
    ledger::{
        Fingerprint, FulfilmentStep, Lease, Ledger, MemoryLedger, Record, Reservation, ResponseLimits, SettlementStep,
        StoredResponse,
    },
    payment::{Terms, Window, precheck},
    protocol::{ExactOffer, ExactPayload, Reason},
};

use super::stage::{Reply, Stage, Turn};
use support::{authorization::unix_now, eventually::eventually, shop::PRICE};

const PAYEE: Address = Address::repeat_byte(0xee);
const DUE: FulfilmentStep = FulfilmentStep::Admit { funds: None, due: true };
const START: FulfilmentStep = FulfilmentStep::Start { until: 0 };

/// Enters a payment whose process is gone. Until then it was verified and began its work, or was to be paid for first.
async fn entered(ledger: &dyn Ledger, payer: u8, steps: impl IntoIterator<Item = FulfilmentStep>) -> Lease {
    entered_as(ledger, payer, 0, steps).await
}

async fn entered_as(
    ledger: &dyn Ledger,
    payer: u8,
    nonce: u8,
    steps: impl IntoIterator<Item = FulfilmentStep>,
) -> Lease {
    let (now, amount) = (unix_now(), U256::from(PRICE));
    let asset = Network::BASE_SEPOLIA.usdc().unwrap();
    let offer = ExactOffer::new(asset, amount, PAYEE, 600);
    let authorization = Authorization {
        from: Address::repeat_byte(payer),
        to: PAYEE,
        value: amount,
        valid_after: U256::ZERO,
        valid_before: U256::from(now + 600),
        nonce: B256::repeat_byte(nonce),
    };
    let payload = ExactPayload::new(PaymentSignature::from(vec![1; 65]), authorization);
    let payment = precheck(Arc::new(Terms::new(offer)), payload, Window::default(), now).unwrap();
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    let reserved = ledger.reserve(&Record::new(&payment, request, now, now - 1)).await.unwrap();
    let Reservation::New(lease) = reserved else { panic!("known") };
    for step in steps {
        ledger.advance(&lease.key, &lease.step(step)).await.unwrap();
    }
    lease
}

/// Enters a payment whose work is done, and whose response was kept or not.
async fn produced(ledger: &dyn Ledger, payer: u8, is_kept: bool) -> Lease {
    let now = unix_now();
    let response = is_kept.then(|| StoredResponse { head: "200".into(), body: "answer".into(), stored_at: now });
    let produce = FulfilmentStep::Produce { charged: None, body: None, at: now, response };
    entered(ledger, payer, [FulfilmentStep::Admit { funds: None, due: false }, START, produce]).await
}

async fn fail(ledger: &dyn Ledger, lease: &Lease) {
    let step = SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0, known_transactions: Vec::new() };
    ledger.advance(&lease.key, &step.into()).await.unwrap();
}

/// Returns the payers whose payments were sent to the facilitator, each as one byte.
fn asked_for(stage: &Stage) -> BTreeSet<u8> {
    let payer = |body: &Bytes| {
        let body: Value = serde_json::from_slice(body).unwrap();
        let payer = body["paymentPayload"]["payload"]["authorization"]["from"].as_str().unwrap().to_owned();
        payer.parse::<Address>().unwrap()[0]
    };
    stage.settles().iter().map(payer).collect()
}

/// Its payer can have made it unknowable. What was signed for it is of no use any more.
#[tokio::test]
async fn payment_whose_outcome_stays_unknown_after_its_time_is_asked_for_ever_less_often() {
    let stage = Stage::open().await;
    stage.script([], Turn::Without(Reply::Status(500, "")));
    let clock = Arc::new(ManualClock::at(unix_now()));
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::with(ResponseLimits::default(), 100, clock.clone()));
    let payment = produced(&*ledger, 1, true).await.key;
    let remote = stage.remote().reconcile_interval(Duration::from_millis(10)).clock(clock.clone());
    let _facilitator = remote.ledger(ledger.clone()).build().await.unwrap();
    // For a quarter of its age, in seconds, it is left alone.
    for (times, (later, pause)) in [(0, 2), (200_000, 50_000), (60_000, 65_000)].into_iter().enumerate() {
        clock.advance(later);
        eventually("it is asked for", async || stage.settles().len() == times + 1).await;
        eventually("it is left alone", async || {
            let record = ledger.get(&payment).await.unwrap().unwrap();
            record.settling.is_some_and(|settling| settling.until >= clock.now() + pause)
        })
        .await;
    }
}

#[tokio::test]
async fn background_settlement_charges_only_for_available_responses() {
    let stage = Stage::open().await;
    let paid = json!({ "success": true, "transaction": B256::repeat_byte(7), "network": "eip155:84532" });
    stage.script([], Turn::Without(Reply::Json(200, paid)));
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());

    // Owed: a delivered response, even if settling failed once,
    let lease = produced(&*ledger, 1, false).await;
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Deliver)).await.unwrap();
    fail(&*ledger, &lease).await;
    // a response that is kept for replays,
    produced(&*ledger, 2, true).await;
    // a deferred payment,
    let before = entered_as(&*ledger, 3, 1, []).await;
    let settled = SettlementStep::Settle { transaction: B256::repeat_byte(6), block: None, fee: None };
    ledger.advance(&before.key, &settled.into()).await.unwrap();
    let lease = produced(&*ledger, 3, false).await;
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Defer { limit: U256::MAX })).await.unwrap();
    // and a payment that was settled once.
    let lease = produced(&*ledger, 4, false).await;
    let settled = SettlementStep::Settle { transaction: B256::repeat_byte(8), block: Some(1), fee: None };
    for step in [settled, SettlementStep::Reorg] {
        ledger.advance(&lease.key, &step.into()).await.unwrap();
    }

    // Not owed: a lost response, a payment whose failure was reported, and unfinished work.
    produced(&*ledger, 5, false).await;
    fail(&*ledger, &produced(&*ledger, 6, true).await).await;
    fail(&*ledger, &produced(&*ledger, 7, false).await).await;
    entered(&*ledger, 8, [DUE]).await;
    entered(&*ledger, 9, [DUE, START]).await;
    entered(&*ledger, 10, [DUE, START, FulfilmentStep::Release { body: None }]).await;

    let remote = stage.remote().reconcile_interval(Duration::from_millis(10)).ledger(ledger.clone());
    let _facilitator = remote.build().await.unwrap();
    eventually("what is owed is asked for", async || asked_for(&stage).len() >= 4).await;
    // This one is found by a pass that began after the first one was over.
    produced(&*ledger, 11, true).await;
    eventually("what is owed later is asked for", async || asked_for(&stage).contains(&11)).await;
    assert_eq!(asked_for(&stage), BTreeSet::from([1, 2, 3, 4, 11]));
}
