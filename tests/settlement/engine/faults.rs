//! Answers that are lost, late or wrong: the money still moves exactly once.

use std::time::Duration;

use tower_x402::{facilitator::FacilitatorError, ledger::Settlement, payment::SettlementOutcome};
use x402_devnet::Fault;

use support::engine_stage::*;

const SYNC: &str = "eth_sendRawTransactionSync";

async fn settles_in_spite_of(hook: impl Fn(&str, u64) -> Fault + Send + Sync + 'static) -> Stage {
    let stage = Stage::with(every(50), |b| b.rpc_timeout(Duration::from_millis(500))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().reset();
    stage.devnet.faults().set(move |call| hook(call.method, call.index));
    let transaction = paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.received(), 1);
    assert_eq!(stage.record(&payment).await.transactions, [transaction]);
    assert_eq!(stage.next_nonce().await, 1);
    stage
}

fn error(code: i64, message: &str) -> Fault {
    Fault::Error { code, message: message.into() }
}

#[tokio::test(start_paused = true)]
async fn node_without_the_synchronous_send_is_polled() {
    let stage = settles_in_spite_of(|method, _| match method {
        SYNC => error(-32601, "the method eth_sendRawTransactionSync does not exist/is not available"),
        _ => Fault::None,
    })
    .await;
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    assert_eq!(stage.calls(SYNC), 1);
    assert_eq!(stage.calls("eth_sendRawTransaction"), 2);
}

#[tokio::test(start_paused = true)]
async fn lost_broadcast_is_repeated() {
    let stage = settles_in_spite_of(|method, _| match method {
        SYNC => Fault::DropBefore,
        _ => Fault::None,
    })
    .await;
    assert_eq!(stage.calls("eth_sendRawTransaction"), 1);
}

#[tokio::test(start_paused = true)]
async fn broadcast_whose_answer_was_lost_settles_once() {
    settles_in_spite_of(|method, index| match (method, index) {
        (SYNC, _) => Fault::DropAfter,
        ("eth_getTransactionReceipt", 0..3) => Fault::DropBefore,
        _ => Fault::None,
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn nonce_does_not_count_as_taken_while_receipts_cannot_be_read() {
    settles_in_spite_of(|method, index| match (method, index) {
        (SYNC, _) => Fault::DropAfter,
        ("eth_getTransactionReceipt", 0..12) => Fault::DropBefore,
        _ => Fault::None,
    })
    .await;
    // Something on the way sent it twice, and the second answer is the one that arrives.
    settles_in_spite_of(|method, index| match (method, index) {
        (SYNC, _) => Fault::ErrorAfter { code: -32000, message: "nonce too low".into() },
        ("eth_getTransactionReceipt", 0..3) => Fault::DropBefore,
        _ => Fault::None,
    })
    .await;
}

/// Slower than the pause between two looks at why a transaction is in no block.
#[tokio::test(start_paused = true)]
async fn late_receipt_is_waited_for() {
    let stage = Stage::with(every(50), |b| b.block_time(Duration::from_millis(50))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().set(|call| match call.method {
        SYNC => error(-32601, "method not found"),
        "eth_getTransactionReceipt" => Fault::Delay(Duration::from_millis(2_700)),
        _ => Fault::None,
    });
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn broadcast_that_timed_out_in_the_pool_is_found() {
    for code in [4, 5] {
        settles_in_spite_of(move |method, _| match method {
            SYNC => Fault::ErrorAfter { code, message: "not processed in time".into() },
            _ => Fault::None,
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn unrecognized_error_is_no_refusal() {
    settles_in_spite_of(|method, _| match method {
        SYNC => Fault::ErrorAfter { code: -32603, message: "upstream said something odd".into() },
        _ => Fault::None,
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn underpriced_transaction_is_signed_again() {
    let stage = Stage::with(|d| d, |b| b).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().reset();
    stage.devnet.faults().set(|call| match (call.method, call.index) {
        (SYNC, 0) => error(-32000, "max fee per gas less than block base fee"),
        _ => Fault::None,
    });
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.next_nonce().await, 1);
}

#[tokio::test(start_paused = true)]
async fn silent_node_leaves_the_outcome_unknown_until_it_answers() {
    let stage = Stage::with(every(50), |b| {
        b.rpc_timeout(Duration::from_millis(100)).confirm_timeout(Duration::from_millis(600))
    })
    .await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().set(|call| match call.method {
        "eth_feeHistory" | "eth_getTransactionCount" => Fault::None,
        SYNC => Fault::DropAfter,
        _ => Fault::DropBefore,
    });
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    let SettlementOutcome::Unknown { transaction: Some(transaction) } = outcome else { panic!("{outcome:?}") };
    assert_eq!(stage.record(&payment).await.transactions, [transaction]);
    assert!(matches!(stage.reconcile(&payment).await, Err(FacilitatorError::Unreachable { .. })));
    stage.devnet.faults().clear();
    assert_eq!(paid_by(&stage.reconcile(&payment).await), transaction);
    assert_eq!(stage.received(), 1);
    // Its nonce was kept meanwhile, and the key goes on after it.
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    assert_eq!(stage.next_nonce().await, 2);
}

#[tokio::test(start_paused = true)]
async fn unreadable_fees_and_nonces_leave_the_payment_due() {
    for method in ["eth_feeHistory", "eth_getTransactionCount"] {
        let stage = stage().await;
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        stage.devnet.faults().set(move |call| if call.method == method { Fault::DropBefore } else { Fault::None });
        let error = stage.settle(&payment, &verified).await.unwrap_err();
        assert!(matches!(error, FacilitatorError::Unreachable { .. }), "{error:?}");
        assert_eq!(stage.record(&payment).await.settlement, Settlement::Due);
        stage.devnet.faults().clear();
        tokio::time::sleep(Duration::from_millis(1_050)).await;
        paid_by(&stage.settle(&payment, &verified).await);
    }
}

#[tokio::test(start_paused = true)]
async fn empty_account_submits_nothing_and_leaves_the_payment_due() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(2));
    let verified = stage.admit(&payment).await;
    let tank = stage.facilitator.gas_balance().await.unwrap();
    empty(&stage).await;
    let error = stage.settle(&payment, &verified).await.unwrap_err();
    assert!(matches!(error, FacilitatorError::InsufficientGas { .. }), "{error:?}");
    assert_eq!(stage.record(&payment).await.settlement, Settlement::Due);
    assert_eq!((stage.received(), stage.next_nonce().await), (0, 0));
    stage.devnet.fund(settlement_key().address(), tank);
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.next_nonce().await, 1);
}

pub(crate) async fn empty(stage: &Stage) {
    use alloy_provider::Provider as _;
    let provider = stage.provider();
    provider
        .raw_request::<_, ()>("anvil_setBalance".into(), (settlement_key().address(), alloy_primitives::U256::ZERO))
        .await
        .unwrap();
}
