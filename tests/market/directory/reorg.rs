//! Payments that are reorged.

use x402_devnet::Orphans;

use super::stage::{PRICE, Stage};
use support::{authorization::sign, chain::Chain, devnet::DevnetChain, token::transfer_vrs};

#[tokio::test]
async fn reorged_payment_cannot_be_reported() {
    let chain = DevnetChain::start_with(None, 4).await;
    let stage = Stage::set(&chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let report = stage.pay(&payer, booth.payee.address(), PRICE).await.report(booth.payee.address(), &payer).await;
    chain.devnet.reorg(1, Orphans::Lost);
    assert_eq!(stage.post(&report).await, (409, "not_yet".into()));
    let mut unnamed = report.clone();
    unnamed.transaction = None;
    assert_eq!(stage.post(&unnamed).await, (409, "not_yet".into()));
    assert_eq!(stage.count().await, 0);
}

#[tokio::test]
async fn report_of_a_payment_that_is_reorged_later_is_deleted() {
    let chain = DevnetChain::start_with(None, 4).await;
    let stage = Stage::set(&chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let kept = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
    let moved = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
    assert_eq!((stage.post(&kept).await.0, stage.post(&moved).await.0), (201, 201));
    chain.devnet.reorg(1, Orphans::Requeued);
    let lost = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
    assert_eq!(stage.post(&lost).await.0, 201);
    chain.devnet.reorg(1, Orphans::Lost);
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 3, "nothing is final yet");
    (0..10).for_each(|_| chain.devnet.mine());
    stage.service.upkeep_once().await.unwrap();
    let reports = stage.client().reports(&Default::default()).await.unwrap().reports;
    let kept_ones: Vec<_> = reports.iter().map(|accepted| accepted.report.evidence.payment).collect();
    assert_eq!(kept_ones, [kept.evidence.payment, moved.evidence.payment]);
    // The payment may be settled after all, and then be reported.
    assert_eq!(stage.post(&lost).await, (409, "not_yet".into()));
}

/// Readers check the transaction that a report names.
#[tokio::test]
async fn payment_by_another_transaction_after_a_reorg_can_be_reported_again() {
    let chain = DevnetChain::start_with(None, 4).await;
    let stage = Stage::set(&chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    assert_eq!(stage.post(&paid.report(evaluator, &payer).await).await.0, 201);
    chain.devnet.reorg(1, Orphans::Lost);
    let signature = sign(&payer, &chain.asset(), &paid.message);
    let receipt = chain.relayer().await.send(&chain, transfer_vrs(&paid.message, &signature)).await;
    let again = stage.paid(paid.message.clone(), &receipt).await;
    assert_ne!(again.transaction, paid.transaction);
    (0..10).for_each(|_| chain.devnet.mine());
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 0);
    assert_eq!(stage.post(&again.report(evaluator, &payer).await).await.0, 201);
}
