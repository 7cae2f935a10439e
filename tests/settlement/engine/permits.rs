//! Permits for exactly a price: settled once, by whichever process and from whichever account.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{U256, hex};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use tower_x402::{
    facilitator::{Facilitator as _, OnchainFacilitator},
    payment::{Prechecked, SettlementOutcome, Terms},
    protocol::{ExactOffer, Reason},
};
use x402_devnet::{Fault, Orphans};

use support::{
    engine_stage::*,
    permit::{approve, burn, invalidate, transaction_of_a_stranger},
};

/// A facilitator whose terms are to be paid by permit.
async fn permit_stage() -> Stage {
    let mut stage = Stage::with(|devnet| devnet.finality_depth(2), |builder| builder).await;
    let offer = ExactOffer::new(stage.devnet.asset(), U256::from(PRICE), PAYEE, VALID);
    stage.terms = Arc::new(Terms::new(offer.by_permit()));
    stage
}

fn payer(stage: &Stage) -> PrivateKeySigner {
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    key
}

fn received(stage: &Stage) -> u64 {
    stage.devnet.balance_of(PAYEE).unwrap().atomic()
}

#[tokio::test(start_paused = true)]
async fn lost_settlement_for_a_price_is_sent_again_after_a_restart() {
    let stage = permit_stage().await;
    let payment = stage.payment(&payer(&stage));
    let verified = stage.admit(&payment).await;
    let outcome = stage.facilitator.settle(&payment, &verified).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Settled { .. }), "{outcome:?}");
    stage.devnet.reorg(1, Orphans::Lost);
    assert_eq!(received(&stage), 0);
    // Another key settles it as well: nobody is named.
    let restarted = OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(settlement_key())
        .ledger(stage.ledger.clone())
        .clock(stage.clock.clone())
        .build()
        .await
        .unwrap();
    until(async || received(&stage) == PRICE).await;
    let outcome = restarted.reconcile(&stage.record(&payment).await).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Settled { .. }), "{outcome:?}");
    assert_eq!(received(&stage), PRICE);
}

/// An invalidation is in the logs. That nothing was transferred is known once the use is final.
#[tokio::test(start_paused = true)]
async fn permit_for_a_price_whose_nonce_is_gone_has_failed() {
    let stage = permit_stage().await;
    let key = payer(&stage);
    let [invalidated, burnt] = [0, 1].map(|_| stage.payment(&key));
    for payment in [&invalidated, &burnt] {
        stage.admit(payment).await;
    }
    invalidate(&stage.devnet, key.address(), invalidated.authorization().nonce.into());
    burn(&stage.devnet, &key, burnt.authorization().nonce.into());
    let outcome = stage.reconcile(&invalidated).await.unwrap();
    let has_failed = |outcome: &SettlementOutcome| {
        matches!(outcome, SettlementOutcome::Failed { reason: Reason::NonceAlreadyUsed, .. })
    };
    assert!(has_failed(&outcome), "{outcome:?}");
    let outcome = stage.reconcile(&burnt).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Unknown { .. }), "anybody may have settled it: {outcome:?}");
    for _ in 0..3 {
        stage.devnet.mine();
    }
    let outcome = stage.reconcile(&burnt).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: true, .. }), "{outcome:?}");
    assert_eq!(received(&stage), 0);
}

/// The block in which it was seen unused is replaced by one in which a stranger executes it. No later block shows that.
#[tokio::test(start_paused = true)]
async fn permit_that_was_executed_in_the_place_of_the_block_where_it_was_unused_is_never_called_failed() {
    for is_invalidated_later in [false, true] {
        let stage = permit_stage().await;
        let key = payer(&stage);
        let payment = stage.payment(&key);
        stage.devnet.mine();
        stage.admit(&payment).await;
        stage.devnet.stall(true);
        let raw = transaction_of_a_stranger(&stage.devnet, &payment);
        let _ = stage.provider().send_raw_transaction(&raw).await.unwrap();
        stage.devnet.reorg(1, Orphans::Lost);
        stage.devnet.stall(false);
        assert_eq!(stage.record(&payment).await.block_seen, Some(stage.devnet.block_number()));
        assert_eq!(received(&stage), PRICE);
        if is_invalidated_later {
            invalidate(&stage.devnet, key.address(), payment.authorization().nonce.into());
        }
        for _ in 0..5 {
            let outcome = stage.reconcile(&payment).await.unwrap();
            assert!(matches!(outcome, SettlementOutcome::Unknown { .. }), "{outcome:?}");
            stage.devnet.mine();
        }
    }
}

/// A stranger's transaction is in the block that arrives between two of the requests of one look.
#[tokio::test(start_paused = true)]
async fn permit_that_a_stranger_settles_between_two_reads_of_the_chain_is_settled() {
    let stage = permit_stage().await;
    let payment = stage.payment(&payer(&stage));
    let verified = stage.admit(&payment).await;
    // It is verified again.
    stage.clock.advance(10);
    stage.devnet.faults().reset();
    stage.devnet.faults().set(|call| match (call.method, call.index) {
        ("eth_estimateGas", 0) => Fault::Delay(Duration::from_millis(500)),
        _ => Fault::None,
    });
    let raw = transaction_of_a_stranger(&stage.devnet, &payment);
    let (outcome, ()) = tokio::join!(stage.settle(&payment, &verified), async {
        tokio::time::sleep(Duration::from_millis(250)).await;
        let _ = stage.provider().send_raw_transaction(&raw).await.unwrap();
    });
    assert!(matches!(outcome, Ok(SettlementOutcome::Settled { fee: None, .. })), "{outcome:?}");
    assert_eq!(received(&stage), PRICE);
}

/// Permit2 passes on what a contract wallet reverts with. The code reverts with `InvalidNonce()` whatever it is asked.
#[tokio::test(start_paused = true)]
async fn permit_whose_wallet_reverts_as_if_it_was_used_is_refused_and_counts_as_its_payers_fault() {
    let stage = permit_stage().await;
    let key = payer(&stage);
    let [first, second, third] = [0, 1, 2].map(|_| stage.payment(&key));
    let verified = [stage.admit(&first).await, stage.admit(&second).await];
    stage.devnet.set_code(key.address(), hex!("63756688fe60e01b60005260046000fd"));
    stage.devnet.faults().reset();
    let rejection = stage.rejection(&third).await;
    assert_eq!((rejection.reason, stage.requests()), (Reason::SimulationFailed, 9), "{}", rejection.detail);
    for (payment, verified) in [&first, &second].into_iter().zip(&verified) {
        let outcome = stage.settle(payment, verified).await.unwrap();
        let has_failed = matches!(
            outcome,
            SettlementOutcome::Failed { reason: Reason::SimulationFailed, transaction: Some(_), dead: false, .. }
        );
        assert!(has_failed, "{outcome:?}");
    }
    stage.devnet.set_code(key.address(), []);
    let rejection = stage.rejection(&third).await;
    assert_eq!(rejection.reason, Reason::InvalidTransactionState, "{}", rejection.detail);
}

/// The numbers of SECURITY.md. A permit is looked at by three requests: what the chain has, whether it would be executed, and what the payee would
/// have more.
#[tokio::test(start_paused = true)]
async fn verifying_a_permit_takes_three_requests_and_five_if_its_payer_has_no_money() {
    let stage = permit_stage().await;
    let requests = async |payment: &Prechecked| {
        stage.devnet.faults().reset();
        let is_good = stage.verify(payment).await.is_ok();
        (is_good, stage.requests())
    };
    let good = payer(&stage);
    assert_eq!(requests(&stage.payment(&good)).await, (true, 3));
    assert_eq!(requests(&stage.payment(&new_key())).await, (false, 5), "no money");
    assert_eq!(requests(&stage.payment(&stage.payer(1))).await, (false, 3), "no approval");
    let forged = stage.payment_from(&new_key(), good.address());
    assert_eq!(requests(&forged).await, (false, 3), "a signature that only a contract could accept");
}
