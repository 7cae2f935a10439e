//! Reconciling a payment that was not followed to its end.

use std::time::Duration;

use alloy_primitives::B256;
use tower_x402::{
    Clock as _,
    facilitator::{Facilitator, OnchainFacilitator},
    ledger::{Fingerprint, FulfilmentStep, Record, Reservation},
    payment::SettlementOutcome,
    protocol::Reason,
};
use x402_devnet::{Fault, Orphans};

use support::engine_stage::*;

/// The same facilitator after a restart: nothing but the ledger survives.
async fn restarted(stage: &Stage) -> OnchainFacilitator {
    OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(settlement_key())
        .ledger(stage.ledger.clone())
        .clock(stage.clock.clone())
        .build()
        .await
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn pending_transaction_is_unknown_and_later_settled() {
    let stage = Stage::with(|d| d, |b| b.confirm_timeout(Duration::from_millis(200))).await;
    stage.devnet.stall(true);
    let payment = stage.payment(&stage.payer(1));
    let outcome = stage.admit_and_settle(&payment).await.unwrap();
    let SettlementOutcome::Unknown { transaction: Some(transaction) } = outcome else { panic!("{outcome:?}") };

    let restarted = restarted(&stage).await;
    let record = stage.record(&payment).await;
    assert_eq!(
        restarted.reconcile(&record).await.unwrap(),
        SettlementOutcome::Unknown { transaction: Some(transaction) }
    );
    stage.devnet.stall(false);
    assert_eq!(paid_by(&restarted.reconcile(&record).await), transaction);
    assert_eq!(paid_by(&stage.reconcile(&payment).await), transaction);
}

#[tokio::test(start_paused = true)]
async fn lost_transaction_is_sent_again_after_a_restart() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    // The process dies before it can note the outcome.
    paid_by(&stage.facilitator.settle(&payment, &verified).await);
    stage.devnet.reorg(1, Orphans::Lost);
    let restarted = restarted(&stage).await;
    // The journalled transaction is sent again, and pays once.
    until(async || stage.received() == 1).await;
    paid_by(&restarted.reconcile(&stage.record(&payment).await).await);
    assert_eq!(stage.next_nonce().await, 1);
}

#[tokio::test(start_paused = true)]
async fn crash_between_broadcast_and_answer_loses_nothing() {
    let stage = Stage::with(|d| d, |b| b.confirm_timeout(Duration::from_millis(100))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().set(|call| match call.method {
        "eth_sendRawTransactionSync" => Fault::DropAfter,
        "eth_getTransactionReceipt" => Fault::DropBefore,
        _ => Fault::None,
    });
    assert!(matches!(stage.settle(&payment, &verified).await, Ok(SettlementOutcome::Unknown { transaction: Some(_) })));
    stage.devnet.faults().clear();
    paid_by(&restarted(&stage).await.reconcile(&stage.record(&payment).await).await);
    assert_eq!(stage.received(), 1);
}

#[tokio::test(start_paused = true)]
async fn transfer_by_a_stranger_is_found_after_a_restart() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    stage.admit(&payment).await;
    for _ in 0..30 {
        stage.devnet.mine();
    }
    let theirs = stage.front_run(&payment);
    assert_eq!(paid_by(&restarted(&stage).await.reconcile(&stage.record(&payment).await).await), theirs);
}

/// It may have paid for something else: nobody here saw it unused.
#[tokio::test(start_paused = true)]
async fn transfer_from_before_the_reservation_does_not_count() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    stage.front_run(&payment);
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    let record = Record::new(&payment, request, stage.clock.now(), u64::MAX);
    let Reservation::New(lease) = stage.ledger.reserve(&record).await.unwrap() else { panic!("known") };
    stage.ledger.fulfil(&lease, &FulfilmentStep::Admit { funds: None, due: true }).await.unwrap();
    let outcome = stage.reconcile(&payment).await.unwrap();
    assert!(
        matches!(outcome, SettlementOutcome::Failed { reason: Reason::NonceAlreadyUsed, dead: false, .. }),
        "{outcome:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn log_range_shrinks_to_what_the_node_allows() {
    for (limit, blocks) in [(500, 700), (10, 35), (10, 700)] {
        let stage = stage().await;
        let payment = stage.payment(&stage.payer(1));
        stage.admit(&payment).await;
        for _ in 0..blocks {
            stage.devnet.mine();
        }
        let theirs = stage.front_run(&payment);
        limit_log_ranges(&stage, limit);
        assert_eq!(paid_by(&stage.reconcile(&payment).await), theirs, "{limit} blocks at a time");
    }
}

/// A node that shows the logs of no more than so many blocks at a time.
fn limit_log_ranges(stage: &Stage, limit: u64) {
    stage.devnet.faults().set(move |call| {
        let number = |name: &str| {
            let text = call.params[0][name].as_str().unwrap().trim_start_matches("0x");
            u64::from_str_radix(text, 16).unwrap()
        };
        match call.method {
            "eth_getLogs" if number("toBlock") - number("fromBlock") >= limit => {
                Fault::Error { code: -32005, message: "block range is too wide".into() }
            }
            _ => Fault::None,
        }
    });
}

#[tokio::test(start_paused = true)]
async fn payment_that_another_process_settles_has_not_failed() {
    let stage = stage().await;
    let key = new_key();
    stage.devnet.fund(key.address(), alloy_primitives::U256::from(ETHER));
    // Another process with another key: its journal does not have the transaction.
    let other = OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(key)
        .ledger(stage.ledger.clone())
        .clock(stage.clock.clone())
        .build()
        .await
        .unwrap();
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().set(|call| match call.method {
        "eth_sendRawTransactionSync" => Fault::Delay(Duration::from_secs(2)),
        _ => Fault::None,
    });
    let meanwhile = async {
        until(async || !stage.record(&payment).await.transactions.is_empty()).await;
        let record = stage.record(&payment).await;
        (other.reconcile(&record).await.unwrap(), stage.reconcile(&payment).await.unwrap(), stage.received())
    };
    let (outcome, (theirs, ours, received)) = tokio::join!(stage.settle(&payment, &verified), meanwhile);
    assert_eq!(received, 0, "it was on its way");
    assert!(matches!(theirs, SettlementOutcome::Unknown { .. }), "{theirs:?}");
    assert!(matches!(ours, SettlementOutcome::Unknown { .. }), "{ours:?}");
    paid_by(&outcome);
}

#[tokio::test(start_paused = true)]
async fn node_without_a_final_block_can_be_used() {
    let stage = stage().await;
    let payments = [stage.payment(&stage.payer(1)), stage.payment(&stage.payer(1))];
    for payment in &payments {
        stage.admit(payment).await;
    }
    let theirs = stage.front_run(&payments[0]);
    stage.devnet.faults().set(|call| match call.method {
        "eth_getBlockByNumber" if call.params[0] == "finalized" => {
            Fault::Error { code: -39001, message: "finalized block not found".into() }
        }
        _ => Fault::None,
    });
    assert_eq!(paid_by(&stage.reconcile(&payments[0]).await), theirs);
    stage.clock.advance(VALID);
    stage.devnet.mine();
    let outcome = stage.reconcile(&payments[1]).await.unwrap();
    assert!(
        matches!(outcome, SettlementOutcome::Failed { dead: false, .. }),
        "without a final block nothing is proven: {outcome:?}"
    );
}
