//! Background reconciliation: after a crash, an outage, a reorganization.

use std::time::Duration;

use alloy_consensus::{SignableTransaction, Transaction as _, TxEip1559, TxEnvelope};
use alloy_eips::{Decodable2718 as _, Encodable2718 as _};
use alloy_network::TxSignerSync as _;
use alloy_primitives::{Address, B256, TxKind, U256};
use alloy_provider::Provider as _;
use tower_x402::{
    facilitator::{Facilitator, OnchainFacilitator, OnchainFacilitatorBuilder},
    ledger::{FulfilmentStep, JournaledTransaction, Lease, Sender, Settlement, SettlementStep},
    payment::{Prechecked, SettlementOutcome, Verified},
};
use x402_devnet::{Devnet, Fault, Orphans};

use support::engine_stage::*;
use support::rpc_proxy::{Fate, RpcProxy};

fn diligent(builder: OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder {
    builder.reconcile_interval(Duration::from_millis(30))
}

async fn settlement(stage: &Stage, payment: &Prechecked) -> Settlement {
    stage.record(payment).await.settlement
}

async fn until_settled(stage: &Stage, payment: &Prechecked) -> B256 {
    until(async || settlement(stage, payment).await.paid_by().is_some()).await;
    settlement(stage, payment).await.paid_by().unwrap()
}

/// Returns a transaction whose process signed and journalled it, and died before sending it.
async fn journalled(stage: &Stage, payment: &Prechecked, max_fee_per_gas: u128) -> B256 {
    journalled_with(stage, payment, max_fee_per_gas, 0).await
}

async fn journalled_with(stage: &Stage, payment: &Prechecked, max_fee_per_gas: u128, nonce: u64) -> B256 {
    let mut transaction = TxEip1559 {
        chain_id: stage.devnet.chain_id(),
        nonce,
        gas_limit: 200_000,
        max_fee_per_gas,
        max_priority_fee_per_gas: 1,
        to: TxKind::Call(stage.terms.offer().asset.address),
        input: execution(payment.authorization(), payment.signature()).into(),
        ..TxEip1559::default()
    };
    let signature = settlement_key().sign_transaction_sync(&mut transaction).unwrap();
    let envelope = TxEnvelope::from(transaction.into_signed(signature));
    let now = tower_x402::Clock::now(&*stage.clock);
    let submission = JournaledTransaction {
        sender: Sender { network: stage.devnet.network(), address: settlement_key().address() },
        nonce,
        hash: *envelope.tx_hash(),
        raw: envelope.encoded_2718().into(),
        payments: vec![payment.key()],
        by: 1,
        at: now - 11,
        until: now - 1,
        known_failures: Default::default(),
    };
    stage.ledger.submit(submission).await.unwrap();
    *envelope.tx_hash()
}

#[tokio::test(start_paused = true)]
async fn response_of_a_dead_process_is_settled_in_the_background() {
    let stage = Stage::with(|d| d, diligent).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    until_settled(&stage, &payment).await;
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn buyer_that_cannot_have_the_response_is_not_charged_in_the_background() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(1))).await;
    let (unkept, kept) = (stage.payment(&stage.payer(1)), stage.payment(&stage.payer(1)));
    // Its process died while the response streamed, and nothing of it was kept.
    stage.produced_with(&unkept, None).await;
    stage.produced(&kept).await;
    until_settled(&stage, &kept).await;
    // Reconciliation has seen both, and continues.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((stage.received(), stage.facilitator.stats().pending), (1, 0));
    assert_eq!(settlement(&stage, &unkept).await, Settlement::Due);
}

#[tokio::test(start_paused = true)]
async fn failed_settlement_is_not_charged_in_the_background() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(1))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let failed = SettlementStep::Fail {
        reason: tower_x402::protocol::Reason::InsufficientFunds,
        by: 0,
        known_transactions: Vec::new(),
    };
    stage.ledger.settle(&payment.key(), &failed).await.unwrap();
    until(async || stage.record(&payment).await.settling.is_some()).await;
    let seen = stage.record(&payment).await.settling;
    stage.clock.advance(10);
    until(async || stage.record(&payment).await.settling != seen).await;
    // Reconciliation has run twice.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((stage.received(), stage.facilitator.stats().pending), (0, 0));
    assert_eq!(settlement(&stage, &payment).await, Settlement::Due);
    // A payer that presents the payment again is charged.
    paid_by(&stage.settle(&payment, &Verified::default()).await);
}

/// A payer who asks again knows of the failure on record. With another one on record its settlement would be refused.
#[tokio::test(start_paused = true)]
async fn failure_is_recorded_once_in_the_background() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(1))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let transaction = journalled(&stage, &payment, 1).await;
    // The transaction can be executed no more, and the payer was told so.
    super::nonces::foreign(&stage, 0, 100_000_000).await;
    let failed = SettlementStep::Fail {
        reason: tower_x402::protocol::Reason::InsufficientFunds,
        by: 1,
        known_transactions: vec![transaction],
    };
    stage.ledger.settle(&payment.key(), &failed).await.unwrap();
    for _ in 0..3 {
        let looks = stage.calls("eth_call");
        stage.clock.advance(31);
        until(async || stage.calls("eth_call") > looks).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        let record = stage.record(&payment).await;
        assert_eq!((record.settlement, record.failures), (Settlement::Due, 1));
    }
    paid_by(&stage.settle(&payment, &Verified::default()).await);
    assert_eq!(stage.received(), 1);
}

/// A second caller is not told that nothing is charged, neither because the queue is full nor because the process shuts down.
#[tokio::test(start_paused = true)]
async fn queued_payment_is_not_refused_to_a_second_caller() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600)).backlog(1)).await;
    // Then the first pass over open payments has ended.
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    until(async || stage.facilitator.stats().pending == 0).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let looks = stage.calls("eth_call");
    stage.devnet.faults().set(|call| match call.method {
        "eth_call" => Fault::DelayAfter(Duration::from_secs(1)),
        _ => Fault::None,
    });
    stage.facilitator.reconcile_now();
    until(async || stage.calls("eth_call") > looks).await;
    assert_eq!(settlement(&stage, &payment).await, Settlement::Due);
    let unknown = SettlementOutcome::Unknown { transaction: None };
    assert_eq!(stage.settle(&payment, &Verified::default()).await.unwrap(), unknown);
    let drained = tokio::spawn({
        let facilitator = stage.facilitator.clone();
        async move { facilitator.drain(Duration::from_secs(10)).await }
    });
    tokio::task::yield_now().await;
    assert_eq!(stage.settle(&payment, &Verified::default()).await.unwrap(), unknown);
    // Unknown payments are not given up.
    until_settled(&stage, &payment).await;
    assert!(drained.await.unwrap());
    assert_eq!((stage.received(), stage.next_nonce().await), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn journalled_transaction_that_was_never_sent_is_sent() {
    let stage = Stage::with(|d| d, diligent).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    until_settled(&stage, &payment).await;

    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let transaction = journalled(&stage, &payment, 1_000_000_000).await;
    stage.facilitator.reconcile_now();
    assert_eq!(until_settled(&stage, &payment).await, transaction);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn payment_has_not_failed_while_its_transaction_will_be_resent() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let transaction = journalled(&stage, &payment, 1_000_000_000).await;
    let outcome = stage.facilitator.reconcile(&stage.record(&payment).await).await.unwrap();
    assert_eq!(outcome, SettlementOutcome::Unknown { transaction: Some(transaction) });
    stage.facilitator.reconcile_now();
    assert_eq!(until_settled(&stage, &payment).await, transaction);
}

/// Reconciliation finds no receipt. Before it decides, the transaction is sent and included, and its nonce is used.
#[tokio::test(start_paused = true)]
async fn payment_has_not_failed_if_its_transaction_is_mined_during_reconciliation() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    // Then the first pass over open payments has ended.
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let transaction = journalled_with(&stage, &payment, 1_000_000_000, 1).await;
    stage.devnet.faults().set(|call| match call.method {
        "eth_getTransactionByHash" => Fault::DelayAfter(Duration::from_secs(2)),
        _ => Fault::None,
    });
    let (facilitator, record) = (stage.facilitator.clone(), stage.record(&payment).await);
    let looking = tokio::spawn(async move { facilitator.reconcile(&record).await });
    until(async || stage.calls("eth_getTransactionByHash") == 1).await;
    assert_eq!(stage.received(), 1);
    let nonces_read = stage.calls("eth_getTransactionCount");
    stage.facilitator.reconcile_now();
    assert_eq!(until_settled(&stage, &payment).await, transaction);
    // Before it is sent, and after.
    until(async || stage.calls("eth_getTransactionCount") >= nonces_read + 2).await;
    assert!(!looking.is_finished(), "the look must end last");
    assert_eq!(looking.await.unwrap().unwrap(), SettlementOutcome::Unknown { transaction: Some(transaction) });
}

/// The same if this process does not have the transaction's key, so that it does not send it again.
#[tokio::test(start_paused = true)]
async fn payment_has_not_failed_if_its_transaction_is_mined_between_two_requests() {
    let key = new_key();
    let account = key.address();
    let stage = Stage::with_keys(|d| d, |b| b.signer(key).reconcile_interval(Duration::from_secs(3_600))).await;
    stage.devnet.fund(account, U256::from(ETHER));
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let transaction = journalled(&stage, &payment, 1_000_000_000).await;
    let sender = Sender { network: stage.devnet.network(), address: settlement_key().address() };
    let raw = stage.ledger.submissions(&sender, 0).await.unwrap().remove(0).raw;
    stage.devnet.stall(true);
    let _ = stage.provider().send_raw_transaction(&raw).await.unwrap();
    let devnet = stage.devnet.clone();
    stage.devnet.faults().set(move |call| {
        if call.method == "eth_getTransactionByHash" {
            devnet.mine();
        }
        Fault::None
    });
    assert_eq!(stage.reconcile(&payment).await.unwrap(), SettlementOutcome::Unknown { transaction: Some(transaction) });
    assert_eq!(stage.received(), 1);
    assert_eq!(paid_by(&stage.reconcile(&payment).await), transaction);
}

/// The transaction did not pay. While that is looked up, its block is replaced by one without what came before it, in which it pays.
#[tokio::test(start_paused = true)]
async fn payment_has_not_failed_if_its_transaction_pays_in_another_block() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payer = stage.payer(1);
    let payment = stage.payment(&payer);
    let verified = stage.admit(&payment).await;
    let before = stage.devnet.block_number();
    stage.drain(payer.address());
    // The process dies before it can note the outcome.
    let outcome = stage.facilitator.settle(&payment, &verified).await;
    assert!(matches!(outcome, Ok(SettlementOutcome::Failed { dead: false, .. })), "{outcome:?}");
    stage.devnet.mine();
    let (devnet, replaced) = (stage.devnet.clone(), stage.devnet.block_number() - before);
    stage.devnet.faults().reset();
    stage.devnet.faults().set(move |call| {
        if (call.method, call.index) == ("eth_getTransactionByHash", 0) {
            devnet.reorg(replaced, Orphans::Requeued);
        }
        Fault::None
    });
    let transaction = stage.record(&payment).await.transactions[0];
    assert_eq!(stage.reconcile(&payment).await.unwrap(), SettlementOutcome::Unknown { transaction: Some(transaction) });
    assert_eq!(stage.received(), 1);
    assert_eq!(paid_by(&stage.reconcile(&payment).await), transaction);
}

#[tokio::test(start_paused = true)]
async fn stuck_transaction_is_replaced_and_its_payment_settled_by_another() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    // Far below the base fee.
    let stuck = journalled(&stage, &payment, 1).await;
    stage.clock.advance(61);
    until(async || {
        stage.facilitator.reconcile_now();
        settlement(&stage, &payment).await.paid_by().is_some()
    })
    .await;
    assert_ne!(settlement(&stage, &payment).await.paid_by(), Some(stuck));
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 2));
}

/// No block comes: higher fees would change nothing, and the last offer is what the first block takes.
#[tokio::test(start_paused = true)]
async fn stuck_filler_with_high_fees_is_not_replaced() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    stage.devnet.stall(true);
    journalled(&stage, &payment, 1).await;
    let sender = Sender { network: stage.devnet.network(), address: settlement_key().address() };
    let submissions = async || stage.ledger.submissions(&sender, 0).await.unwrap();
    let mut offers = Vec::new();
    for _ in 0..40 {
        stage.clock.advance(61);
        stage.facilitator.reconcile_now();
        let now = tower_x402::Clock::now(&*stage.clock);
        // Longer than a pass takes.
        tokio::time::sleep(Duration::from_secs(1)).await;
        if let Some(newest) = submissions().await.into_iter().find(|submission| submission.at == now) {
            let envelope = TxEnvelope::decode_2718(&mut newest.raw.as_ref()).unwrap();
            offers.push((envelope.max_fee_per_gas(), envelope.max_priority_fee_per_gas().unwrap()));
        }
    }
    // The first offers what the market wants.
    let (market, newest) = (offers[0], offers[offers.len() - 1]);
    assert!(newest.0 > market.0 && newest.1 > market.1, "a little more may help: {offers:?}");
    assert!(newest.0 < 5 * market.0 && newest.1 < 5 * market.1, "{offers:?}");
}

/// A process died after its transaction was refused. Another process's transaction waits behind the nonce.
#[tokio::test(start_paused = true)]
async fn gap_left_by_another_process_is_filled() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let waiting = journalled_with(&stage, &payment, 1_000_000_000, 1).await;
    stage.facilitator.reconcile_now();
    assert_eq!(until_settled(&stage, &payment).await, waiting);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn reorged_payment_is_settled_again() {
    for orphans in [Orphans::Lost, Orphans::Requeued] {
        let stage = Stage::with(|d| d.finality_depth(64), diligent).await;
        let payment = stage.payment(&stage.payer(1));
        stage.produced(&payment).await;
        until_settled(&stage, &payment).await;
        let lease = Lease { key: payment.key(), epoch: 0 };
        stage.ledger.fulfil(&lease, &FulfilmentStep::Deliver).await.unwrap();
        stage.devnet.mine();
        // A pass that sees the chain as it is now.
        let calls = stage.calls("eth_getBlockByNumber");
        until(async || stage.calls("eth_getBlockByNumber") >= calls + 4).await;
        // The block that paid and the one after it.
        stage.devnet.reorg(2, orphans);
        until(async || stage.received() == 1).await;
        until_settled(&stage, &payment).await;
        assert_eq!(stage.received(), 1);
    }
}

/// The buyer was told of a failure, presented the payment again and got the recorded response, so the payment is owed.
#[tokio::test(start_paused = true)]
async fn reorged_payment_of_a_replayed_response_is_settled_again() {
    let stage = Stage::with(|d| d.finality_depth(64), |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let failed = SettlementStep::Fail {
        reason: tower_x402::protocol::Reason::UnexpectedSettleError,
        by: 0,
        known_transactions: Vec::new(),
    };
    stage.ledger.settle(&payment.key(), &failed).await.unwrap();
    let verified = stage.verify(&payment).await.unwrap();
    paid_by(&stage.settle(&payment, &verified).await);
    // Nor can the transaction be sent again.
    let sender = Sender { network: stage.devnet.network(), address: settlement_key().address() };
    stage.ledger.forget_nonces(&sender, 1).await.unwrap();
    stage.devnet.reorg(1, Orphans::Lost);
    assert_eq!(stage.received(), 0);
    until(async || {
        stage.facilitator.reconcile_now();
        stage.received() == 1
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn payment_reorged_between_two_passes_is_settled_again() {
    let stage = Stage::with(|d| d.finality_depth(64), diligent).await;
    let payments = [stage.payment(&stage.payer(1)), stage.payment(&stage.payer(1))];
    stage.produced(&payments[0]).await;
    until_settled(&stage, &payments[0]).await;
    // No pass runs while the second one is paid and its block is replaced.
    stage.devnet.faults().set(|call| match call.method {
        "eth_getBlockByNumber" => Fault::DropBefore,
        _ => Fault::None,
    });
    let seen = stage.calls("eth_getBlockByNumber");
    until(async || stage.calls("eth_getBlockByNumber") > seen + 1).await;
    let verified = stage.admit(&payments[1]).await;
    paid_by(&stage.settle(&payments[1], &verified).await);
    stage.devnet.reorg(1, Orphans::Lost);
    assert_eq!(stage.received(), 1);
    stage.devnet.faults().clear();
    until(async || stage.received() == 2).await;
}

/// No transaction of the seller's is undone with it: its nonces do not tell.
#[tokio::test(start_paused = true)]
async fn reorged_transaction_of_a_stranger_is_noticed() {
    let stage = Stage::with(|d| d.finality_depth(64), diligent).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let theirs = stage.front_run(&payment);
    // What was verified long ago is looked at again, and settled by their transaction.
    stage.clock.advance(10);
    assert_eq!(paid_by(&stage.settle(&payment, &verified).await), theirs);
    let calls = stage.calls("eth_getBlockByNumber");
    until(async || stage.calls("eth_getBlockByNumber") >= calls + 4).await;
    assert_eq!(stage.next_nonce().await, 0, "it has sent nothing");
    stage.devnet.reorg(1, Orphans::Lost);
    until(async || settlement(&stage, &payment).await.paid_by().is_none()).await;
    assert_eq!((stage.received(), stage.facilitator.stats().reorged), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn without_a_reorganization_nothing_is_requested_or_sent_again() {
    let stage = Stage::with(|d| d.finality_depth(64), diligent).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    let calls = async |more: u64| {
        let seen = stage.calls("eth_getBlockByNumber");
        until(async || stage.calls("eth_getBlockByNumber") >= seen + more).await;
    };
    // After the first pass that knows the newest block and the newest final one.
    calls(6).await;
    stage.devnet.faults().reset();
    for _ in 0..3 {
        stage.devnet.mine();
        calls(6).await;
    }
    for method in ["eth_getTransactionReceipt", "eth_sendRawTransaction", "eth_getLogs"] {
        assert_eq!(stage.calls(method), 0, "{method}");
    }
    assert_eq!(stage.facilitator.stats().reorged, 0);
}

/// Its block was replaced, and a later one holds its transaction.
#[tokio::test(start_paused = true)]
async fn payment_that_moved_to_a_later_block_is_recorded_with_it() {
    let stage = Stage::with(|d| d.finality_depth(64), diligent).await;
    let payment = stage.payment(&stage.payer(1));
    let transaction = paid_by(&stage.admit_and_settle(&payment).await);
    let block = settlement(&stage, &payment).await.block().unwrap();
    let calls = stage.calls("eth_getBlockByNumber");
    until(async || stage.calls("eth_getBlockByNumber") >= calls + 4).await;
    let sender = Sender { network: stage.devnet.network(), address: settlement_key().address() };
    let raw = stage.ledger.submissions(&sender, 0).await.unwrap().remove(0).raw;
    // The upkeep sees nothing until that is so.
    stage.devnet.faults().set(|call| match call.method {
        "eth_getBlockByNumber" => Fault::DropBefore,
        _ => Fault::None,
    });
    stage.devnet.reorg(1, Orphans::Lost);
    stage.devnet.mine();
    let _ = stage.provider().send_raw_transaction(&raw).await.unwrap();
    let now = stage.devnet.block_number();
    assert!(now > block && stage.received() == 1);
    stage.devnet.faults().clear();
    let moved = Settlement::Settled { transaction, block: Some(now) };
    until(async || settlement(&stage, &payment).await == moved).await;
    assert_eq!((stage.received(), stage.facilitator.stats().reorged), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn payment_in_a_final_block_is_final() {
    let stage = Stage::with(|d| d.finality_depth(3), diligent).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    until_settled(&stage, &payment).await;
    let sender = Sender { network: stage.devnet.network(), address: settlement_key().address() };
    assert_eq!(stage.ledger.submissions(&sender, 0).await.unwrap().len(), 1);
    for _ in 0..4 {
        stage.devnet.mine();
    }
    until(async || matches!(settlement(&stage, &payment).await, Settlement::Final { .. })).await;
    until(async || stage.ledger.submissions(&sender, 0).await.unwrap().is_empty()).await;
}

/// Its transaction is sent again.
#[tokio::test(start_paused = true)]
async fn reorged_payment_is_not_signed_for_again_while_its_transaction_waits() {
    let stage = Stage::with(|d| d.finality_depth(64), diligent).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    let transaction = until_settled(&stage, &payment).await;
    let calls = stage.calls("eth_getBlockByNumber");
    until(async || stage.calls("eth_getBlockByNumber") >= calls + 4).await;
    stage.devnet.stall(true);
    stage.devnet.reorg(1, Orphans::Lost);
    until(async || settlement(&stage, &payment).await.paid_by().is_none()).await;
    // Many passes see it.
    stage.clock.advance(31);
    tokio::time::sleep(Duration::from_secs(5)).await;
    stage.devnet.mine();
    stage.clock.advance(31);
    assert_eq!(until_settled(&stage, &payment).await, transaction);
    assert_eq!(stage.record(&payment).await.transactions, [transaction]);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn payment_settled_again_after_a_reorganization_becomes_final() {
    let stage = Stage::with(|d| d.finality_depth(3), diligent).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    until_settled(&stage, &payment).await;
    let calls = stage.calls("eth_getBlockByNumber");
    until(async || stage.calls("eth_getBlockByNumber") >= calls + 4).await;
    stage.devnet.reorg(1, Orphans::Lost);
    until(async || stage.received() == 1).await;
    until_settled(&stage, &payment).await;
    for _ in 0..4 {
        stage.devnet.mine();
    }
    until(async || matches!(settlement(&stage, &payment).await, Settlement::Final { .. })).await;
}

#[tokio::test(start_paused = true)]
async fn expired_unused_authorization_is_dead() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payer = stage.payer(1);
    let payment = stage.payment(&payer);
    stage.produced(&payment).await;
    stage.drain(payer.address());
    stage.clock.advance(VALID + 1);
    stage.devnet.mine();
    stage.facilitator.reconcile_now();
    until(async || settlement(&stage, &payment).await == Settlement::Dead).await;
    assert_eq!(stage.received(), 0);
}

#[tokio::test(start_paused = true)]
async fn node_is_not_asked_while_nothing_is_open() {
    let stage = Stage::with(|d| d, diligent).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(stage.requests(), 0);
}

/// Transactions of an earlier process are known before a new one is signed, and an outage in between loses nothing.
#[tokio::test(start_paused = true)]
async fn nothing_is_signed_before_earlier_transactions_are_known() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let past = stage.payment(&stage.payer(1));
    stage.produced(&past).await;
    journalled(&stage, &past, 1_000_000_000).await;
    let devnet: &Devnet = &stage.devnet;
    devnet.faults().set(|call| match call.method {
        "eth_sendRawTransaction" => x402_devnet::Fault::DropBefore,
        _ => x402_devnet::Fault::None,
    });
    let restarted = diligent(
        tower_x402::facilitator::OnchainFacilitator::builder()
            .network(devnet.network())
            .client(devnet.rpc_client())
            .signer(settlement_key())
            .ledger(stage.ledger.clone())
            .clock(stage.clock.clone()),
    )
    .build()
    .await
    .unwrap();
    let new = stage.payment(&stage.payer(1));
    let verified = stage.admit(&new).await;
    let settling = tokio::spawn({
        let (restarted, new) = (restarted.clone(), new.clone());
        async move { tower_x402::facilitator::Facilitator::settle(&restarted, &new, &verified).await }
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(stage.calls("eth_sendRawTransaction") > 1, "the past is tried again and again");
    assert!(stage.record(&new).await.transactions.is_empty() && !settling.is_finished());
    devnet.faults().clear();
    paid_by(&settling.await.unwrap());
    until_settled(&stage, &past).await;
    assert_eq!(stage.received(), 2);
    assert_eq!(U256::from(stage.next_nonce().await), U256::from(2));
}

/// Starts another process on the stage's ledger, with its key.
fn another(stage: &Stage) -> OnchainFacilitatorBuilder {
    OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(settlement_key())
        .ledger(stage.ledger.clone())
        .clock(stage.clock.clone())
}

/// Settles a new payment with it, which must not wait for earlier ones.
async fn goes_on(stage: &Stage, facilitator: &OnchainFacilitator) {
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let settling = facilitator.settle(&payment, &verified);
    let outcome = tokio::time::timeout(Duration::from_secs(10), settling).await.expect("it is not held up");
    stage
        .ledger
        .settle(&payment.key(), &SettlementStep::of(outcome.as_ref().unwrap(), facilitator.process_id(), &[]))
        .await
        .unwrap();
    paid_by(&outcome);
}

#[tokio::test(start_paused = true)]
async fn earlier_payments_that_cannot_be_reconciled_do_not_block_new_ones() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    // More than are reconciled in the few passes that the new payment causes.
    let mut past = Vec::new();
    for _ in 0..100 {
        let payment = stage.payment(&stage.payer(1));
        stage.produced(&payment).await;
        stage.ledger.settle(&payment.key(), &SettlementStep::MarkUnknown).await.unwrap();
        past.push(payment);
    }
    let payers: Vec<String> = past.iter().map(|payment| format!("{:x}", payment.authorization().from)).collect();
    stage.devnet.faults().set(move |call| {
        let asked = format!("{:?}", call.params);
        match call.method {
            "eth_call" if payers.iter().any(|payer| asked.contains(payer)) => {
                Fault::Error { code: -32_000, message: "header not found".into() }
            }
            _ => Fault::None,
        }
    });
    let restarted = another(&stage).reconcile_interval(Duration::from_secs(3_600)).build().await.unwrap();
    goes_on(&stage, &restarted).await;
    assert_eq!(stage.received(), 1);
    stage.devnet.faults().clear();
    // Until then the first claim keeps other processes away.
    stage.clock.advance(3);
    restarted.reconcile_now();
    until_settled(&stage, past.last().unwrap()).await;
}

#[tokio::test(start_paused = true)]
async fn failure_of_one_key_does_not_stop_the_other() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let past = stage.payment(&stage.payer(1));
    stage.produced(&past).await;
    let transaction = journalled(&stage, &past, 1_000_000_000).await;
    let healthy = new_key();
    stage.devnet.fund(healthy.address(), U256::from(ETHER));
    stage.devnet.faults().set(|call| {
        let account = || call.params[0].as_str().and_then(|account| account.parse::<Address>().ok());
        match call.method {
            "eth_getTransactionCount" if account() == Some(settlement_key().address()) => Fault::DropBefore,
            _ => Fault::None,
        }
    });
    let restarted = diligent(another(&stage).signer(healthy)).build().await.unwrap();
    goes_on(&stage, &restarted).await;
    assert_eq!(stage.received(), 1);
    stage.devnet.faults().clear();
    stage.clock.advance(3);
    assert_eq!(until_settled(&stage, &past).await, transaction);
    assert_eq!(stage.received(), 2);
}

#[tokio::test(start_paused = true)]
async fn unknown_payments_are_reconciled_less_and_less_often() {
    let rarely = Duration::from_secs(3_600);
    let stage = Stage::with(|d| d, |b| b.confirmations(U256::from(PRICE), 1_000).reconcile_interval(rarely)).await;
    for (age, pause) in [(20, 2), (100, 25), (400, 30)] {
        let payment = stage.payment(&stage.payer(1));
        stage.produced(&payment).await;
        stage.ledger.settle(&payment.key(), &SettlementStep::MarkUnknown).await.unwrap();
        // In a block, without enough blocks on top for long.
        stage.front_run(&payment);
        stage.clock.advance(age);
        let looks = stage.calls("eth_getLogs");
        stage.facilitator.reconcile_now();
        until(async || stage.calls("eth_getLogs") > looks).await;
        let until_when = async || stage.record(&payment).await.settling.map(|settling| settling.until);
        let expected = Some(tower_x402::Clock::now(&*stage.clock) + pause);
        until(async || until_when().await == expected).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(until_when().await, expected, "{age} seconds after it was reserved");
    }
}

#[tokio::test(start_paused = true)]
async fn large_payment_executed_by_a_stranger_is_settled_once_enough_blocks_are_on_top() {
    let rarely = Duration::from_secs(3_600);
    let stage = Stage::with(|d| d, |b| b.confirmations(U256::from(PRICE), 3).reconcile_interval(rarely)).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let theirs = stage.front_run(&payment);
    // A stale verification is repeated.
    stage.clock.advance(10);
    let not_deep = SettlementOutcome::Unknown { transaction: Some(theirs) };
    assert_eq!(stage.settle(&payment, &verified).await.unwrap(), not_deep);
    assert_eq!(settlement(&stage, &payment).await, Settlement::Unknown);
    assert_eq!(stage.reconcile(&payment).await.unwrap(), not_deep);
    for _ in 0..3 {
        stage.devnet.mine();
    }
    assert_eq!(paid_by(&stage.reconcile(&payment).await), theirs);
    assert_eq!(stage.facilitator.stats().settled_by_others, 1);
}

#[tokio::test(start_paused = true)]
async fn large_payment_is_settled_once_enough_blocks_are_on_top() {
    let stage =
        Stage::with(|d| d, |b| b.confirmations(U256::from(PRICE), 3).confirm_timeout(Duration::from_secs(5))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let settling = stage.settle(&payment, &verified);
    let mining = async {
        until(async || stage.received() == 1).await;
        let included = stage.devnet.block_number();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(settlement(&stage, &payment).await, Settlement::Submitted, "in a block, and not deep");
        for _ in 0..3 {
            stage.devnet.mine();
        }
        included
    };
    let (outcome, included) = tokio::join!(settling, mining);
    let tower_x402::payment::SettlementOutcome::Settled { block, .. } = outcome.unwrap() else { panic!() };
    assert_eq!(block, Some(included));
}

#[tokio::test(start_paused = true)]
async fn large_payment_is_not_settled_by_a_block_that_was_replaced() {
    let stage =
        Stage::with(|d| d, |b| b.confirmations(U256::from(PRICE), 2).confirm_timeout(Duration::from_secs(5))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let settling = stage.settle(&payment, &verified);
    let undoing = async {
        until(async || stage.received() == 1).await;
        stage.devnet.reorg(1, Orphans::Lost);
        for _ in 0..3 {
            stage.devnet.mine();
        }
    };
    let (outcome, ()) = tokio::join!(settling, undoing);
    assert!(matches!(outcome, Ok(tower_x402::payment::SettlementOutcome::Unknown { .. })), "{outcome:?}");
    assert_eq!(stage.received(), 0);
}

/// The payment was deferred a moment ago, by this process or another, and the engine was not notified.
#[tokio::test(start_paused = true)]
async fn owed_payments_are_settled_before_shutdown() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    assert!(stage.facilitator.drain(Duration::from_secs(10)).await);
    assert!(settlement(&stage, &payment).await.paid_by().is_some());
    assert_eq!(stage.received(), 2);
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_in_time_although_the_node_is_silent() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    stage.devnet.faults().set(|_| Fault::Delay(Duration::from_secs(60)));
    let draining = stage.facilitator.drain(Duration::from_millis(300));
    let is_done = tokio::time::timeout(Duration::from_secs(3), draining).await.expect("it ends in time");
    assert!(!is_done, "something is left");
    assert_eq!(stage.received(), 1);
}

#[tokio::test(start_paused = true)]
async fn due_payments_do_not_wait_for_the_check_of_final_ones() {
    let stage =
        Stage::with(|d| d.finality_depth(200), |b| b.batch_size(1).reconcile_interval(Duration::from_secs(3_600)))
            .await;
    for _ in 0..150 {
        paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    }
    for _ in 0..200 {
        stage.devnet.mine();
    }
    let slow = Duration::from_millis(100);
    stage.devnet.faults().reset();
    stage.devnet.faults().set(move |call| match call.method {
        "eth_getTransactionReceipt" => Fault::Delay(slow),
        _ => Fault::None,
    });
    stage.facilitator.reconcile_now();
    until(async || stage.calls("eth_getTransactionReceipt") > 0).await;
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    stage.facilitator.reconcile_now();
    let settled = tokio::time::timeout(Duration::from_secs(5), until_settled(&stage, &payment));
    settled.await.expect("what is final can wait, what expires cannot");
    assert!(
        stage.calls("eth_getTransactionReceipt") < 140,
        "this is no test unless the others are looked at meanwhile"
    );
}

#[tokio::test(start_paused = true)]
async fn reconciliation_ends_with_the_facilitator() {
    let stage = Stage::with(|d| d.finality_depth(64), diligent).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    let holders = std::sync::Arc::strong_count(&stage.ledger);
    let another = diligent(another(&stage)).build().await.unwrap();
    let followed = stage.calls("eth_getBlockByNumber");
    until(async || stage.calls("eth_getBlockByNumber") > followed + 6).await;
    assert!(std::sync::Arc::strong_count(&stage.ledger) > holders);
    drop(another);
    until(async || std::sync::Arc::strong_count(&stage.ledger) == holders).await;
}

/// Starts another process on the stage's ledger, whose node is reached through the proxy.
async fn another_through(stage: &Stage, proxy: &RpcProxy) -> OnchainFacilitator {
    let builder = OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .rpc_url(proxy.url())
        .signer(settlement_key())
        .ledger(stage.ledger.clone())
        .clock(stage.clock.clone());
    diligent(builder).build().await.unwrap()
}

/// The process was down for longer than its node keeps receipts.
#[tokio::test]
async fn settled_payment_stays_settled_although_the_node_pruned_its_receipt() {
    let stage = Stage::with(|d| d.finality_depth(3), |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    let transaction = paid_by(&stage.admit_and_settle(&payment).await);
    for _ in 0..4 {
        stage.devnet.mine();
    }
    let port = stage.devnet.serve("127.0.0.1:0").await.unwrap();
    let proxy = RpcProxy::start(port.url().to_string()).await;
    proxy.judge(|methods| match methods[0].as_str() {
        "eth_getTransactionReceipt" => Fate::Result("null"),
        "eth_getLogs" => Fate::Result("[]"),
        _ => Fate::Pass,
    });
    let _restarted = another_through(&stage, &proxy).await;
    until(async || proxy.counts().of("eth_getLogs") >= 1).await;
    // When the next pass asks for the newest block, this one has ended.
    let passes = proxy.counts().of("eth_getBlockByNumber");
    until(async || proxy.counts().of("eth_getBlockByNumber") > passes).await;
    let now = settlement(&stage, &payment).await;
    assert_eq!(now.paid_by(), Some(transaction), "{now:?}");
    assert_eq!(stage.received(), 1);
}

/// Its block was replaced while no process ran, and the payer cancelled the authorization meanwhile.
#[tokio::test(start_paused = true)]
async fn payment_reorged_and_then_cancelled_is_not_settled() {
    let stage = Stage::with(|d| d.finality_depth(3), |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payer = stage.payer(1);
    let payment = stage.payment(&payer);
    paid_by(&stage.admit_and_settle(&payment).await);
    stage.devnet.reorg(1, Orphans::Lost);
    stage.cancel(&payer, &payment);
    for _ in 0..4 {
        stage.devnet.mine();
    }
    let _restarted = diligent(another(&stage)).build().await.unwrap();
    until(async || settlement(&stage, &payment).await.paid_by().is_none()).await;
    assert_eq!(stage.received(), 0);
}
