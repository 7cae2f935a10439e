//! Settling with an honest chain, and with honest and dishonest payers.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use alloy_primitives::U256;
use alloy_provider::Provider as _;
use alloy_sol_types::SolCall;
use futures_util::future::join_all;
use tower_x402::{
    Usdc,
    facilitator::{Facilitator as _, OnchainFacilitator},
    ledger::{Sender, Settlement, SettlementStep},
    payment::SettlementOutcome,
    protocol::Reason,
};
use x402_devnet::{BlockTime, Fault, Orphans};

use super::nonces::foreign;
use support::{
    engine_stage::*,
    rpc_proxy::{Fate, RpcProxy},
};

#[tokio::test(start_paused = true)]
async fn warm_facilitator_verifies_and_settles_with_two_requests() {
    let stage = stage().await;
    let key = stage.payer(2);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    assert!(stage.requests() <= 4, "cold: {:?}", stage.devnet.faults().calls());
    stage.devnet.faults().reset();
    let payment = stage.payment(&key);
    let transaction = paid_by(&stage.admit_and_settle(&payment).await);
    assert_eq!(stage.requests(), 2, "{:?}", stage.devnet.faults().calls());
    assert_eq!(stage.received(), 2);
    assert_eq!(stage.record(&payment).await.transactions, [transaction]);
    let stats = stage.facilitator.stats();
    assert_eq!((stats.settled, stats.reverted, stats.in_flight), (2, 0, 0));
    assert!(stats.gas_used > 100_000 && stats.spent > U256::ZERO, "{stats:?}");
}

async fn two_hundred_at_once(stage: Stage) {
    let stage = Arc::new(stage);
    let payments = (0..200).map(|_| stage.payment(&stage.payer(1)));
    let settled = join_all(payments.map(|payment| {
        let stage = stage.clone();
        async move { stage.admit_and_settle(&payment).await }
    }));
    for outcome in settled.await {
        paid_by(&outcome);
    }
    assert_eq!(stage.received(), 200);
    assert_eq!(stage.next_nonce().await, 200);
    assert_eq!(stage.facilitator.stats().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn two_hundred_payments_at_once_settle_through_one_key() {
    two_hundred_at_once(stage().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_payments_at_once_settle_in_timed_blocks() {
    two_hundred_at_once(Stage::with(every(200), |b| b).await).await;
}

#[tokio::test(start_paused = true)]
async fn transaction_is_journalled_before_it_is_sent() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let (ledger, key) = (stage.ledger.clone(), payment.key());
    let seen = Arc::new(std::sync::Mutex::new(None));
    let witness = seen.clone();
    stage.devnet.faults().set(move |call| {
        if call.method.starts_with("eth_sendRaw") {
            // The memory ledger never waits.
            let record = futures_util::FutureExt::now_or_never(ledger.get(&key)).unwrap().unwrap().unwrap();
            *witness.lock().unwrap() = Some((record.settlement, record.transactions));
        }
        Fault::None
    });
    let transaction = paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(seen.lock().unwrap().take(), Some((Settlement::Submitted, vec![transaction])));
}

#[tokio::test(start_paused = true)]
async fn settlement_continues_when_nobody_waits() {
    let stage = Stage::with(every(100), |b| b).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let gone = tokio::time::timeout(Duration::from_millis(1), stage.settle(&payment, &verified)).await;
    gone.expect_err("nobody waits");
    until(async || stage.received() == 1).await;
    paid_by(&stage.reconcile(&payment).await);
}

#[tokio::test(start_paused = true)]
async fn stale_verification_is_repeated() {
    let stage = stage().await;
    let key = stage.payer(1);
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    stage.clock.advance(10);
    stage.drain(key.address());
    stage.devnet.faults().reset();
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    assert!(
        matches!(
            outcome,
            SettlementOutcome::Failed { reason: Reason::InsufficientFunds, transaction: None, dead: false, .. }
        ),
        "{outcome:?}"
    );
    assert_eq!((stage.calls("eth_call"), stage.calls("eth_blockNumber"), stage.requests()), (1, 2, 3));
}

#[tokio::test(start_paused = true)]
async fn payment_of_a_drained_account_fails_and_stays_due() {
    let stage = stage().await;
    let key = stage.payer(1);
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    stage.drain(key.address());
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    let SettlementOutcome::Failed { reason, transaction: Some(_), dead: false, .. } = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(reason, Reason::InsufficientFunds);
    assert_eq!(stage.facilitator.stats().reverted, 1);

    // Unused and still valid: not executed, but not dead either.
    assert!(matches!(stage.reconcile(&payment).await, Ok(SettlementOutcome::Failed { dead: false, .. })));
    // Dead once a final block is past validBefore.
    stage.clock.advance(VALID);
    stage.devnet.mine();
    let outcome = stage.reconcile(&payment).await.unwrap();
    assert!(
        matches!(outcome, SettlementOutcome::Failed { reason: Reason::ValidBefore, dead: true, .. }),
        "{outcome:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn expiry_is_proven_by_a_final_block_only() {
    let stage = Stage::with(|devnet| devnet.finality_depth(10), |b| b).await;
    let payment = stage.payment(&stage.payer(1));
    stage.admit(&payment).await;
    stage.clock.advance(VALID);
    stage.devnet.mine();
    assert!(matches!(stage.reconcile(&payment).await, Ok(SettlementOutcome::Failed { dead: false, .. })));
    for _ in 0..10 {
        stage.devnet.mine();
    }
    assert!(matches!(stage.reconcile(&payment).await, Ok(SettlementOutcome::Failed { dead: true, .. })));
}

#[tokio::test(start_paused = true)]
async fn front_run_payment_is_settled_with_the_other_transaction() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let theirs = stage.front_run(&payment);
    assert_eq!(paid_by(&stage.settle(&payment, &verified).await), theirs);
    assert_eq!(stage.received(), 1);
    let stats = stage.facilitator.stats();
    assert_eq!((stats.settled, stats.settled_by_others, stats.reverted), (0, 1, 1));

    // Seen early enough, it costs no transaction of ours.
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let theirs = stage.front_run(&payment);
    stage.clock.advance(10);
    assert_eq!(paid_by(&stage.settle(&payment, &verified).await), theirs);
    assert_eq!(paid_by(&stage.reconcile(&payment).await), theirs);
    assert_eq!(stage.facilitator.stats().reverted, 1);
}

#[tokio::test(start_paused = true)]
async fn cancelled_authorization_is_dead() {
    let stage = stage().await;
    let key = stage.payer(1);
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    stage.cancel(&key, &payment);
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    assert!(
        matches!(outcome, SettlementOutcome::Failed { reason: Reason::NonceAlreadyUsed, dead: true, .. }),
        "{outcome:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn nonce_used_for_another_payee_has_not_paid() {
    let stage = Stage::with(|devnet| devnet.finality_depth(5), |b| b).await;
    let key = stage.payer(1);
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    // The same nonce and amount, to the payer itself.
    let mut elsewhere = payment.authorization().clone();
    elsewhere.to = key.address();
    let data = execution(&elsewhere, &sign(&key, &elsewhere, &stage.terms));
    stage.devnet.execute(key.address(), stage.terms.offer().asset.address, data).unwrap();
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    // Not final yet, so not dead yet.
    assert!(
        matches!(outcome, SettlementOutcome::Failed { reason: Reason::NonceAlreadyUsed, dead: false, .. }),
        "{outcome:?}"
    );
    for _ in 0..6 {
        stage.devnet.mine();
    }
    assert!(matches!(stage.reconcile(&payment).await, Ok(SettlementOutcome::Failed { dead: true, .. })));
    assert_eq!(stage.received(), 0);
}

#[tokio::test(start_paused = true)]
async fn wallet_that_reverts_has_not_paid() {
    let stage = stage().await;
    let owner = new_key();
    let wallet = stage.wallet(owner.address());
    stage.devnet.mint(wallet, "$1".parse().unwrap()).unwrap();
    let payment = stage.payment_from(&owner, wallet);
    let verified = stage.admit(&payment).await;
    let data = Wallet::setAcceptingCall { accepting: false }.abi_encode();
    stage.devnet.execute(owner.address(), wallet, data).unwrap();
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { transaction: Some(_), dead: false, .. }), "{outcome:?}");
    assert_eq!(stage.received(), 0);
    // It pays once it accepts again.
    let data = Wallet::setAcceptingCall { accepting: true }.abi_encode();
    stage.devnet.execute(owner.address(), wallet, data).unwrap();
    paid_by(&stage.settle(&payment, &verified).await);
}

#[tokio::test(start_paused = true)]
async fn wallet_that_reverts_repeatedly_wastes_gas_twice() {
    let stage = stage().await;
    let owner = new_key();
    let wallet = stage.wallet(owner.address());
    stage.devnet.mint(wallet, "$1".parse().unwrap()).unwrap();
    let accept = |accepting| {
        let data = Wallet::setAcceptingCall { accepting }.abi_encode();
        stage.devnet.execute(owner.address(), wallet, data).unwrap();
    };
    let payments: Vec<_> = (0..5).map(|_| stage.payment_from(&owner, wallet)).collect();
    let mut verified = Vec::new();
    for payment in &payments[..4] {
        verified.push(stage.admit(payment).await);
    }
    accept(false);
    for (payment, verified) in payments.iter().zip(&verified) {
        let outcome = stage.settle(payment, verified).await.unwrap();
        assert!(matches!(outcome, SettlementOutcome::Failed { dead: false, .. }), "{outcome:?}");
    }
    assert_eq!(stage.next_nonce().await, 2, "what was verified a moment ago is not sent either");
    accept(true);
    let rejection = stage.rejection(&payments[4]).await;
    assert!(rejection.detail.contains("try again"), "{rejection}");
    // Other payers are not affected.
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
}

#[tokio::test(start_paused = true)]
async fn gas_price_above_the_ceiling_journals_nothing() {
    let stage = Stage::with(|d| d, |b| b.max_gas_price(50_000_000)).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.set_base_fee(100_000_000);
    for _ in 0..3 {
        assert!(stage.settle(&payment, &verified).await.is_err());
    }
    assert_eq!(stage.calls("eth_feeHistory"), 1, "it is known for a while");
    assert_eq!(stage.record(&payment).await.settlement, Settlement::Due);
    assert!(stage.record(&payment).await.transactions.is_empty());
}

/// Settles a new payment and returns the price of gas that its transaction paid, in wei.
async fn price_paid(stage: &Stage) -> u128 {
    let transaction = paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    stage.provider().get_transaction_receipt(transaction).await.unwrap().unwrap().effective_gas_price
}

#[tokio::test(start_paused = true)]
async fn one_high_tip_does_not_set_the_price() {
    const GWEI: u128 = 1_000_000_000;
    let stage = stage().await;
    // Half of each is a tip.
    for (nonce, offer) in [GWEI / 20, GWEI / 20, GWEI / 20, 100 * GWEI, GWEI / 20, GWEI / 20].into_iter().enumerate() {
        foreign(&stage, nonce as u64, offer).await;
    }
    let price = price_paid(&stage).await;
    assert!(price < GWEI / 10, "{price}");
}

#[tokio::test(start_paused = true)]
async fn tip_above_the_ceiling_is_cut() {
    let stage = Stage::with(|d| d, |b| b.max_gas_price(50_000_000)).await;
    foreign(&stage, 0, 1_000_000_000).await;
    let price = price_paid(&stage).await;
    assert!(price <= 50_000_000, "{price}");
}

#[tokio::test(start_paused = true)]
async fn underpriced_transaction_is_replaced_at_its_nonce() {
    let stage = Stage::with(
        |d| d.block_time(BlockTime::Every(Duration::from_millis(50))),
        |b| b.block_time(Duration::from_millis(50)),
    )
    .await;
    let key = stage.payer(2);
    paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
    let payment = stage.payment(&key);
    let verified = stage.admit(&payment).await;
    stage.devnet.set_base_fee(100_000_000);
    stage.devnet.faults().set(|call| match call.method {
        "eth_sendRawTransactionSync" => Fault::Error { code: -32601, message: "method not found".into() },
        _ => Fault::None,
    });
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.record(&payment).await.transactions.len(), 2);
    assert_eq!(stage.next_nonce().await, 2);
}

#[tokio::test(start_paused = true)]
async fn transaction_that_is_never_included_is_replaced_at_its_nonce() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    bury_the_first_transaction(&stage);
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.record(&payment).await.transactions.len(), 2);
    assert_eq!(stage.next_nonce().await, 1);
}

#[tokio::test(start_paused = true)]
async fn transaction_held_by_the_synchronous_send_is_replaced_in_time() {
    // Blocks as slow as Base's and the default timeout: a late check would answer too late.
    let stage = Stage::with(|d| d, |b| b.block_time(Duration::from_secs(2))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let buried = OnceLock::new();
    stage.devnet.faults().set(move |call| {
        let is_broadcast = matches!(call.method, "eth_sendRawTransactionSync" | "eth_sendRawTransaction");
        match is_broadcast && buried.get_or_init(|| call.params[0].clone()) == &call.params[0] {
            true if call.method.ends_with("Sync") => Fault::Delay(Duration::from_secs(3_600)),
            true => Fault::Error { code: -32000, message: "already known".into() },
            false => Fault::None,
        }
    });
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(stage.record(&payment).await.transactions.len(), 2);
    assert_eq!(stage.next_nonce().await, 1);
}

#[tokio::test(start_paused = true)]
async fn stuck_transactions_are_replaced_during_shutdown() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    bury_the_first_transaction(&stage);
    let hung_up = tokio::time::timeout(Duration::from_millis(500), stage.settle(&payment, &verified)).await;
    assert!(hung_up.is_err(), "{hung_up:?}");
    assert!(stage.facilitator.drain(Duration::from_secs(10)).await);
    assert_eq!(stage.record(&payment).await.transactions.len(), 2);
    assert_eq!(stage.next_nonce().await, 1);
}

/// Its only payment does not need it any more; the transactions behind its nonce do.
#[tokio::test(start_paused = true)]
async fn front_run_payment_is_unknown_if_its_transaction_cannot_be_found() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let theirs = stage.front_run(&payment);
    stage.clock.advance(10);
    stage.devnet.faults().set(|call| match call.method {
        "eth_getLogs" => Fault::DropBefore,
        _ => Fault::None,
    });
    let outcome = stage.settle(&payment, &verified).await;
    assert!(matches!(outcome, Ok(SettlementOutcome::Unknown { .. })), "{outcome:?}");
    stage.devnet.faults().clear();
    assert_eq!(paid_by(&stage.reconcile(&payment).await), theirs);
}

#[tokio::test(start_paused = true)]
async fn stuck_transaction_is_replaced_although_its_payment_is_settled() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    bury_the_first_transaction(&stage);
    let meanwhile = async {
        until(async || !stage.record(&payment).await.transactions.is_empty()).await;
        let theirs = stage.front_run(&payment);
        let step = SettlementStep::Settle { transaction: theirs, block: None, fee: None };
        stage.ledger.settle(&payment.key(), &step).await.unwrap();
        theirs
    };
    let (outcome, theirs) = tokio::join!(stage.settle(&payment, &verified), meanwhile);
    assert_eq!(paid_by(&outcome), theirs);
    assert_eq!(stage.record(&payment).await.transactions.len(), 1);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

/// Makes the node accept the first transaction and never include it.
pub(crate) fn bury_the_first_transaction(stage: &Stage) {
    let buried = OnceLock::new();
    stage.devnet.faults().set(move |call| match call.method {
        "eth_sendRawTransactionSync" => Fault::Error { code: -32601, message: "method not found".into() },
        "eth_sendRawTransaction" if buried.get_or_init(|| call.params[0].clone()) == &call.params[0] => {
            Fault::Error { code: -32000, message: "already known".into() }
        }
        _ => Fault::None,
    });
}

/// Of several nodes behind one address, the one that is asked why the transaction did not pay has not seen its block, nor the one in
/// which somebody else's transaction paid.
#[tokio::test]
async fn node_behind_the_receipt_makes_no_payment_fail() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let port = stage.devnet.serve("127.0.0.1:0").await.unwrap();
    let proxy = RpcProxy::start(port.url().to_string()).await;
    let builder = OnchainFacilitator::builder().network(stage.devnet.network()).rpc_url(proxy.url());
    let builder = builder.signer(settlement_key()).ledger(stage.ledger.clone()).clock(stage.clock.clone());
    let builder = builder.block_time(Duration::from_millis(50)).reconcile_interval(Duration::from_secs(3_600));
    let facilitator = builder.build().await.unwrap();
    let payment = stage.payment(&stage.payer(1));
    stage.admit(&payment).await;
    let verified = facilitator.verify(&payment).await.unwrap();
    let theirs = stage.front_run(&payment);
    proxy.judge(|methods| if methods[0] == "eth_call" { Fate::Stale } else { Fate::Pass });
    let outcome = facilitator.settle(&payment, &verified).await.unwrap();
    let ours = stage.record(&payment).await.transactions[0];
    assert_eq!(outcome, SettlementOutcome::Unknown { transaction: Some(ours) });
    let outcome = facilitator.reconcile(&stage.record(&payment).await).await.unwrap();
    assert_eq!(outcome, SettlementOutcome::Unknown { transaction: Some(ours) });
    proxy.judge(|_| Fate::Pass);
    assert_eq!(paid_by(&facilitator.reconcile(&stage.record(&payment).await).await), theirs);
}

/// The block of a transaction that did not pay is replaced by an empty one before the node is asked why. The transaction may pay yet.
#[tokio::test(start_paused = true)]
async fn unpaid_transaction_whose_block_is_replaced_makes_no_payment_fail() {
    for are_several in [false, true] {
        let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
        stage.facilitator.deploy_batch_settler().await.unwrap();
        let payer = stage.payer(1);
        let (payment, other) = (stage.payment(&payer), stage.payment(&stage.payer(1)));
        let verified = stage.admit(&payment).await;
        let other_verified = stage.admit(&other).await;
        stage.drain(payer.address());
        stage.devnet.faults().reset();
        let devnet = stage.devnet.clone();
        stage.devnet.faults().set(move |call| {
            if (call.method, call.index) == ("eth_call", 0) {
                devnet.reorg(1, Orphans::Lost);
            }
            Fault::None
        });
        let outcome = if are_several {
            tokio::join!(stage.settle(&payment, &verified), stage.settle(&other, &other_verified)).0
        } else {
            stage.settle(&payment, &verified).await
        };
        let known = stage.record(&payment).await;
        let transaction = known.transactions[0];
        assert_eq!(outcome.unwrap(), SettlementOutcome::Unknown { transaction: Some(transaction) });
        assert_eq!((known.settlement, known.failures), (Settlement::Unknown, 0));

        stage.devnet.faults().clear();
        stage.devnet.mint(payer.address(), Usdc::from_atomic(PRICE)).unwrap();
        let sender = Sender { network: stage.devnet.network(), address: settlement_key().address() };
        let sent = stage.ledger.submissions(&sender, 0).await.unwrap();
        let raw = sent.into_iter().find(|sent| sent.hash == transaction).unwrap().raw;
        let _ = stage.provider().send_raw_transaction(&raw).await.unwrap();
        assert_eq!(paid_by(&stage.reconcile(&payment).await), transaction);
    }
}

#[tokio::test(start_paused = true)]
async fn successful_transaction_without_the_events_has_not_paid() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    // A token that accepts every call and does nothing.
    stage.devnet.set_code(stage.terms.offer().asset.address, vec![0x00]);
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { transaction: Some(_), dead: false, .. }), "{outcome:?}");
    assert_eq!((stage.facilitator.stats().settled, stage.next_nonce().await), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn payment_that_waited_long_is_verified_again_before_it_is_signed() {
    let stage = Stage::with(|d| d, |b| b.in_flight(1)).await;
    let (key, first) = (stage.payer(1), stage.payment(&stage.payer(1)));
    let second = stage.payment(&key);
    let verified = (stage.admit(&first).await, stage.admit(&second).await);
    stage.devnet.stall(true);
    let meanwhile = async {
        until(async || !stage.record(&first).await.transactions.is_empty()).await;
        until(async || stage.facilitator.stats().pending == 2).await;
        stage.clock.advance(10);
        stage.drain(key.address());
        stage.devnet.stall(false);
    };
    let (paid, unpaid, ()) =
        tokio::join!(stage.settle(&first, &verified.0), stage.settle(&second, &verified.1), meanwhile);
    paid_by(&paid);
    assert!(matches!(unpaid, Ok(SettlementOutcome::Failed { transaction: None, dead: false, .. })), "{unpaid:?}");
}
