//! How long the price of gas is cached, and how often a silent node is asked for it.

use std::time::Duration;

use support::engine_stage::*;
use tokio::time::{Instant, sleep_until};
use tower_x402::{facilitator::FacilitatorError, ledger::Settlement, payment::SettlementOutcome};
use x402_devnet::Fault;

const FEES: &str = "eth_feeHistory";
const NONCE: &str = "eth_getTransactionCount";

async fn quiet() -> Stage {
    Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await
}

async fn pay(stage: &Stage) -> Result<SettlementOutcome, FacilitatorError> {
    stage.admit_and_settle(&stage.payment(&stage.payer(1))).await
}

#[tokio::test(start_paused = true)]
async fn gas_price_is_cached_for_ten_seconds() {
    let (stage, begun) = (quiet().await, Instant::now());
    paid_by(&pay(&stage).await);
    for (millis, looks) in [(9_900, 1), (10_100, 2), (19_000, 2)] {
        sleep_until(begun + Duration::from_millis(millis)).await;
        paid_by(&pay(&stage).await);
        assert_eq!(stage.calls(FEES), looks, "after {millis} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn last_gas_price_is_used_for_a_minute_without_an_answer() {
    let (stage, begun) = (quiet().await, Instant::now());
    paid_by(&pay(&stage).await);
    stage.devnet.faults().set(|call| if call.method == FEES { Fault::DropBefore } else { Fault::None });
    sleep_until(begun + Duration::from_millis(59_900)).await;
    paid_by(&pay(&stage).await);
    assert_eq!(stage.calls(FEES), 2);
    sleep_until(begun + Duration::from_millis(61_100)).await;
    let payment = stage.payment(&stage.payer(1));
    let error = stage.admit_and_settle(&payment).await.unwrap_err();
    assert!(matches!(error, FacilitatorError::Unreachable { .. }), "{error:?}");
    assert_eq!((stage.calls(FEES), stage.record(&payment).await.settlement), (3, Settlement::Due));
    assert_eq!(stage.received(), 2);
}

/// This holds for fees and nonces. Payments that could not be settled are due, and nothing was signed for them.
#[tokio::test(start_paused = true)]
async fn silent_node_is_asked_for_fees_once_a_second() {
    for method in [FEES, NONCE] {
        let (stage, begun) = (quiet().await, Instant::now());
        stage.devnet.faults().set(move |call| if call.method == method { Fault::DropBefore } else { Fault::None });
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        for (millis, looks) in [(0, 1), (100, 1), (900, 1), (1_100, 2), (1_900, 2)] {
            sleep_until(begun + Duration::from_millis(millis)).await;
            let error = stage.settle(&payment, &verified).await.unwrap_err();
            assert!(matches!(error, FacilitatorError::Unreachable { .. }), "{error:?}");
            assert_eq!(stage.calls(method), looks, "{method} after {millis} ms");
        }
        let record = stage.record(&payment).await;
        assert_eq!((record.settlement, record.transactions.len()), (Settlement::Due, 0));
        stage.devnet.faults().clear();
        sleep_until(begun + Duration::from_millis(3_000)).await;
        paid_by(&stage.settle(&payment, &verified).await);
        assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
    }
}
