//! Two processes on one ledger, with a remote facilitator.

use std::{future::pending, sync::Arc, time::Duration};

use tower_x402::{
    ledger::{Fulfilment, Ledger, MemoryLedger, Settlement, SettlementStep, conformance::take_over},
    protocol::Reason,
};

use super::stage::Stage;
use support::{
    engine_stage::until,
    gated_ledger::{GatedLedger, Held},
    scripted::{self, Scripted, echo, layer, serve},
    shop::{evaluate, send},
};

/// One process has found the payment due when another one reports its failure.
#[tokio::test]
async fn payment_that_failed_meanwhile_is_not_sent_to_the_facilitator() {
    let stage = Stage::open().await;
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let mut dying = Scripted::new().settle(|_, _| pending());
    dying.ledger = ledger.clone();
    let dying = Arc::new(dying);
    let (app, _) = serve(layer(&dying), echo);
    let purchase = stage.customer().await.pay(&app, evaluate("x")).await;
    let (asked, request) = (app.clone(), purchase.on(evaluate("x")));
    let asking = tokio::spawn(async move { send(&asked, request).await });
    let key = scripted::key(&purchase);
    let record = async || ledger.get(&key).await.unwrap();
    until(async || record().await.is_some_and(|record| record.fulfilment == Fulfilment::Produced)).await;
    // Its lease ends with its process.
    take_over(&*ledger, &key, 0, 0, 0).await.expect("the work is done");
    asking.abort();

    let gated = GatedLedger::over(ledger.clone(), Held::Taking);
    let remote = stage.remote().reconcile_interval(Duration::from_secs(3_600));
    let _seller = stage.seller_on(gated.clone(), remote, |layer| layer).await;
    gated.until_one_waits().await;
    let failed = SettlementStep::Fail { reason: Reason::UnexpectedSettleError, by: 9, known_transactions: Vec::new() };
    ledger.advance(&key, &failed.into()).await.expect("nobody has it");
    gated.open();
    until(async || record().await.is_some_and(|record| record.failures == 2)).await;
    assert!(stage.settles().is_empty(), "given away without being asked for");
    assert_eq!(record().await.unwrap().settlement, Settlement::Due);
}
