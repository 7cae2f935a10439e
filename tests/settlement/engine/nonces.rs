//! The nonces of one key, when sends fail and when others use it.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_consensus::Transaction as _;
use alloy_consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy_eips::{Decodable2718 as _, Encodable2718 as _};
use alloy_network::{TxSigner, TxSignerSync as _};
use alloy_primitives::{Address, B256, Bytes, Signature, TxKind, U256};
use alloy_provider::Provider as _;
use tower_x402::{
    facilitator::{Facilitator, FacilitatorError, OnchainFacilitator, OnchainFacilitatorBuilder},
    ledger::Settlement,
};
use x402_devnet::{Fault, Orphans};

use support::{
    engine_stage::*,
    eventually::skip,
    rpc_proxy::{Fate, RpcProxy},
};

const SYNC: &str = "eth_sendRawTransactionSync";

/// Another process sends with the settlement key.
pub(crate) async fn foreign(stage: &Stage, nonce: u64, max_fee_per_gas: u128) -> B256 {
    let mut transaction = TxEip1559 {
        chain_id: stage.devnet.chain_id(),
        nonce,
        gas_limit: 21_000,
        max_fee_per_gas,
        max_priority_fee_per_gas: max_fee_per_gas / 2,
        to: TxKind::Call(new_key().address()),
        ..TxEip1559::default()
    };
    let signature = settlement_key().sign_transaction_sync(&mut transaction).unwrap();
    let envelope = TxEnvelope::from(transaction.into_signed(signature));
    *stage.provider().send_raw_transaction(&envelope.encoded_2718()).await.unwrap().tx_hash()
}

#[tokio::test(start_paused = true)]
async fn nonces_that_another_process_used_are_skipped() {
    let stage = stage().await;
    let key = stage.payer(3);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    foreign(&stage, 1, 100_000_000).await;
    foreign(&stage, 2, 100_000_000).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    assert_eq!(stage.next_nonce().await, 5);
    assert_eq!(stage.received(), 3);
}

/// Of several nodes behind one address, the one that tells the next nonce knows of no transaction at all.
#[tokio::test]
async fn nonce_used_by_another_process_is_not_taken_again_from_a_lagging_node() {
    let stage = stage().await;
    let port = stage.devnet.serve("127.0.0.1:0").await.unwrap();
    let proxy = RpcProxy::start(port.url().to_string()).await;
    let builder = OnchainFacilitator::builder().network(stage.devnet.network()).rpc_url(proxy.url());
    let builder = builder.signer(settlement_key()).ledger(stage.ledger.clone()).clock(stage.clock.clone());
    let facilitator = builder.block_time(Duration::from_millis(200)).build().await.unwrap();
    let (first, second) = (stage.payment(&stage.payer(1)), stage.payment(&stage.payer(1)));
    let verified = stage.admit(&first).await;
    paid_by(&facilitator.settle(&first, &verified).await);
    foreign(&stage, 1, 100_000_000).await;
    proxy.judge(|methods| match methods[0].as_str() {
        "eth_getTransactionCount" => Fate::Stale,
        _ => Fate::Pass,
    });
    let verified = stage.admit(&second).await;
    let sends = Arc::new(Mutex::new(Vec::new()));
    let seen = sends.clone();
    stage.devnet.faults().set(move |call| {
        if call.method == SYNC {
            let raw: Bytes = call.params[0].as_str().unwrap().parse().unwrap();
            seen.lock().unwrap().push(TxEnvelope::decode_2718(&mut raw.as_ref()).unwrap().nonce());
        }
        Fault::None
    });
    let time = async {
        until(async || !sends.lock().unwrap().is_empty()).await;
        // After two blocks of saying so, the nonce is another's.
        skip(Duration::from_secs(3)).await;
    };
    let (outcome, ()) = tokio::join!(facilitator.settle(&second, &verified), time);
    paid_by(&outcome);
    assert_eq!(*sends.lock().unwrap(), [1, 2]);
    assert_eq!((stage.received(), stage.next_nonce().await), (2, 3));
}

#[tokio::test(start_paused = true)]
async fn nonce_of_another_process_is_left_to_it() {
    let stage = stage().await;
    let key = stage.payer(2);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    stage.devnet.stall(true);
    foreign(&stage, 1, 1_000_000_000).await;
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    let sends = stage.calls(SYNC);
    let waiting = async {
        // The transaction that does not outbid the other one, and one behind it.
        until(async || stage.calls(SYNC) == sends + 2).await;
        stage.devnet.stall(false);
    };
    let (outcome, ()) = tokio::join!(stage.settle(&payment, &verified), waiting);
    paid_by(&outcome);
    assert_eq!(stage.next_nonce().await, 3);
}

/// A key in a service that is slow to fail, once until it is told to fail again.
#[derive(Clone, Default)]
struct FlakySigner(Arc<AtomicBool>);

#[async_trait::async_trait]
impl TxSigner<Signature> for FlakySigner {
    fn address(&self) -> Address {
        settlement_key().address()
    }

    async fn sign_transaction(
        &self,
        transaction: &mut dyn SignableTransaction<Signature>,
    ) -> alloy_signer::Result<Signature> {
        if !self.0.swap(true, Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(100)).await;
            return Err(alloy_signer::Error::other("throttled"));
        }
        settlement_key().sign_transaction_sync(transaction)
    }
}

#[tokio::test(start_paused = true)]
async fn each_gap_left_by_an_unsent_payment_is_filled() {
    let signer = FlakySigner::default();
    let stage = Stage::with_keys(every(50), |b| b.signer(signer.clone())).await;
    for gaps in 1..=2 {
        let payments: Vec<_> = (0..5).map(|_| stage.payment(&stage.payer(1))).collect();
        let mut verified = Vec::new();
        for payment in &payments {
            verified.push(stage.admit(payment).await);
        }
        let settling =
            payments.iter().zip(&verified).map(|(payment, verified)| stage.facilitator.settle(payment, verified));
        let mut outcomes = futures_util::future::join_all(settling).await;
        // The first nonce was given back while the others waited behind it.
        assert!(matches!(outcomes.remove(0), Err(FacilitatorError::Unreachable { .. })));
        for outcome in &outcomes {
            paid_by(outcome);
        }
        assert_eq!(stage.received(), 4 * gaps);
        // Four payments, and a transfer of nothing in the gap.
        assert_eq!(stage.next_nonce().await, 5 * gaps);
        assert!(stage.record(&payments[0]).await.transactions.is_empty());
        signer.0.store(false, Ordering::Relaxed);
        // Whoever filled the gap looks for another one, and has ended by then.
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
}

/// A key in a service that never answers its first request.
struct SilentSigner(AtomicBool);

#[async_trait::async_trait]
impl TxSigner<Signature> for SilentSigner {
    fn address(&self) -> Address {
        settlement_key().address()
    }

    async fn sign_transaction(
        &self,
        transaction: &mut dyn SignableTransaction<Signature>,
    ) -> alloy_signer::Result<Signature> {
        if !self.0.swap(true, Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        settlement_key().sign_transaction_sync(transaction)
    }
}

#[tokio::test(start_paused = true)]
async fn silent_signer_blocks_neither_its_caller_nor_the_nonce() {
    let stage = Stage::with_keys(|d| d, |b| b.signer(SilentSigner(AtomicBool::new(false))).in_flight(1)).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let settling = stage.settle(&payment, &verified);
    let outcome = tokio::time::timeout(Duration::from_secs(10), settling).await.expect("nobody waits for ever");
    assert!(matches!(outcome, Err(FacilitatorError::Unreachable { .. })), "{outcome:?}");
    assert!(stage.record(&payment).await.transactions.is_empty());
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn nonce_of_a_refused_transaction_is_used_by_the_next() {
    let stage = stage().await;
    let key = stage.payer(2);
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().set(|call| match (call.method, call.index) {
        (SYNC, 0..4) => Fault::Error { code: -32000, message: "txpool is full".into() },
        _ => Fault::None,
    });
    assert!(matches!(stage.settle(&payment, &verified).await, Err(FacilitatorError::Busy { .. })));
    assert_eq!(stage.record(&payment).await.settlement, Settlement::Due);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.next_nonce().await, 2);
}

#[tokio::test(start_paused = true)]
async fn full_window_delays_payments_and_loses_none() {
    let stage = Arc::new(Stage::with(every(50), |b| b.in_flight(2).block_time(Duration::from_millis(50))).await);
    let settling = (0..20).map(|_| {
        let stage = stage.clone();
        async move { stage.admit_and_settle(&stage.payment(&stage.payer(1))).await }
    });
    for outcome in futures_util::future::join_all(settling).await {
        paid_by(&outcome);
    }
    assert_eq!(stage.received(), 20);
}

/// The window is full of transactions that wait for one that a reorganization removed.
#[tokio::test(start_paused = true)]
async fn reorganization_below_a_full_window_stops_nothing() {
    let quick = |builder: OnchainFacilitatorBuilder| builder.in_flight(2).reconcile_interval(Duration::from_secs(1));
    let stage = Stage::with(|d| d.finality_depth(64), quick).await;
    let payments: Vec<_> = (0..3).map(|_| stage.payment(&stage.payer(1))).collect();
    paid_by(&stage.admit_and_settle(&payments[0]).await);
    stage.devnet.stall(true);
    let verified = [stage.admit(&payments[1]).await, stage.admit(&payments[2]).await];
    let removed = async {
        let pending = async || stage.provider().get_transaction_count(settlement_key().address()).pending().await;
        until(async || pending().await.unwrap() == 3).await;
        stage.devnet.reorg(1, Orphans::Lost);
        assert_eq!((stage.next_nonce().await, stage.received()), (0, 0));
        stage.devnet.stall(false);
        until(async || pending().await.unwrap() == 3).await;
        stage.devnet.mine();
    };
    let (first, second) = (stage.settle(&payments[1], &verified[0]), stage.settle(&payments[2], &verified[1]));
    let (first, second, ()) = tokio::join!(first, second, removed);
    paid_by(&first);
    paid_by(&second);
    assert_eq!((stage.received(), stage.next_nonce().await), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn key_with_earlier_transactions_continues_at_its_next_nonce() {
    let stage = stage().await;
    foreign(&stage, 0, 100_000_000).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    assert_eq!(stage.next_nonce().await, 2);
}

#[tokio::test(start_paused = true)]
async fn balance_set_aside_for_transactions_in_flight_does_not_count_as_empty() {
    let stage = stage().await;
    let key = stage.payer(3);
    let payments: Vec<_> = (0..3).map(|_| stage.payment(&key)).collect();
    let mut verified = Vec::new();
    for payment in &payments[..2] {
        verified.push(stage.admit(payment).await);
    }
    stage.devnet.stall(true);
    let first = stage.settle(&payments[0], &verified[0]);
    let others = async {
        let sent = async || stage.record(&payments[0]).await.transactions.first().copied();
        until(async || sent().await.is_some()).await;
        let sent = sent().await.unwrap();
        let in_pool = async || stage.provider().get_transaction_by_hash(sent).await.unwrap();
        until(async || in_pool().await.is_some()).await;
        let sent = in_pool().await.unwrap();
        // Enough for any one payment, but not for two at their highest cost.
        let most = U256::from(sent.gas_limit()) * U256::from(sent.max_fee_per_gas());
        let tank = most * U256::from(9) / U256::from(5);
        let set = ("anvil_setBalance".into(), (settlement_key().address(), tank));
        stage.provider().raw_request::<_, ()>(set.0, set.1).await.unwrap();
        let sends = stage.calls(SYNC);
        let refused = async {
            until(async || stage.calls(SYNC) > sends + 1).await;
            stage.devnet.stall(false);
        };
        let (second, ()) = tokio::join!(stage.settle(&payments[1], &verified[1]), refused);
        (second, stage.facilitator.verify(&payments[2]).await)
    };
    let (first, (second, third)) = tokio::join!(first, others);
    paid_by(&first);
    paid_by(&second);
    assert!(third.is_ok(), "{third:?}");
}
