//! The ledger metrics of a seller with a remote facilitator.

use std::{collections::BTreeMap, sync::Arc};

use alloy_primitives::B256;
use serde_json::json;
use tower_x402::ledger::SqliteLedger;

use super::stage::{Reply, Stage, Turn};
use support::{numbers::Recording, shop::evaluate};

#[tokio::test]
async fn ledger_calls_are_timed_and_failures_counted() {
    let recording = Recording::begin();
    let stage = Stage::open().await;
    let directory = tempfile::tempdir().unwrap();
    let ledger = Arc::new(SqliteLedger::open(directory.path().join("ledger.sqlite")).await.unwrap());
    let seller = stage.seller_on(ledger.clone(), stage.remote(), |layer| layer).await;
    // The facilitator has a ledger of its own, which has no part in this.
    stage.script_verify(Turn::Without(Reply::Json(200, json!({ "isValid": true }))));
    let paid = json!({ "success": true, "transaction": B256::repeat_byte(7), "network": "eip155:84532" });
    stage.script([], Turn::Without(Reply::Json(200, paid)));
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(seller.ask(&purchase).await.status, 200);

    let numbers = recording.read();
    let timed =
        |operation| numbers.observed("x402_ledger_operation_duration_seconds", Some(("operation", operation))).len();
    assert_eq!(timed("reserve"), 1);
    assert_eq!(timed("settle"), 2, "entrusted, and settled");
    assert!(timed("fulfil") >= 3, "admitted, begun, produced");
    assert_eq!(numbers.counters("x402_ledger_errors_total", "operation"), BTreeMap::new());

    ledger.close().await;
    let refused = seller.ask(&purchase).await;
    assert_eq!((refused.status.as_u16(), refused.reason().as_str()), (503, "ledger_unavailable"));
    let failed = recording.read();
    let failed = failed.counters("x402_ledger_errors_total", "operation");
    assert_eq!(failed.get("reserve"), Some(&1), "{failed:?}");
}
