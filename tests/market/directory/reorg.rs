//! Payments that a reorganization undoes.

use tower_x402::devnet::Orphans;

use super::stage::{PRICE, Stage};
use support::{authorization::sign, chain::Chain, devnet::DevnetChain, token::transfer_vrs};

#[tokio::test]
async fn a_payment_that_was_undone_has_no_voice() {
    let chain = DevnetChain::start_with(None, 4).await;
    let stage = Stage::set(&chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let said = stage.pay(&payer, booth.payee.address(), PRICE).await.said(booth.payee.address(), &payer).await;
    chain.devnet.reorg(1, Orphans::Lost);
    assert_eq!(stage.post(&said).await, (409, "not_yet".into()));
    let mut unnamed = said.clone();
    unnamed.transaction = None;
    assert_eq!(stage.post(&unnamed).await, (409, "not_yet".into()));
    assert_eq!(stage.count().await, 0);
}

#[tokio::test]
async fn a_voice_whose_payment_is_undone_later_is_removed_and_the_others_stay() {
    let chain = DevnetChain::start_with(None, 4).await;
    let stage = Stage::set(&chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let kept = stage.pay(&payer, evaluator, PRICE).await.said(evaluator, &payer).await;
    let moved = stage.pay(&payer, evaluator, PRICE).await.said(evaluator, &payer).await;
    assert_eq!((stage.post(&kept).await.0, stage.post(&moved).await.0), (201, 201));
    chain.devnet.reorg(1, Orphans::Requeued);
    let lost = stage.pay(&payer, evaluator, PRICE).await.said(evaluator, &payer).await;
    assert_eq!(stage.post(&lost).await.0, 201);
    chain.devnet.reorg(1, Orphans::Lost);
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 3, "nothing is final yet");
    (0..10).for_each(|_| chain.devnet.mine());
    stage.service.upkeep_once().await.unwrap();
    let voices = stage.client().reports(&Default::default()).await.unwrap().reports;
    let kept_ones: Vec<_> = voices.iter().map(|accepted| accepted.report.evidence.payment).collect();
    assert_eq!(kept_ones, [kept.evidence.payment, moved.evidence.payment]);
    // It may be paid after all, and speak then.
    assert_eq!(stage.post(&lost).await, (409, "not_yet".into()));
}

/// Readers look at the transaction that a voice names.
#[tokio::test]
async fn a_payment_that_another_transaction_made_in_the_end_is_to_be_said_anew() {
    let chain = DevnetChain::start_with(None, 4).await;
    let stage = Stage::set(&chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    assert_eq!(stage.post(&paid.said(evaluator, &payer).await).await.0, 201);
    chain.devnet.reorg(1, Orphans::Lost);
    let signature = sign(&payer, &chain.asset(), &paid.message);
    let receipt = chain.relayer().await.send(&chain, transfer_vrs(&paid.message, &signature)).await;
    let again = stage.paid(paid.message.clone(), &receipt).await;
    assert_ne!(again.transaction, paid.transaction);
    (0..10).for_each(|_| chain.devnet.mine());
    stage.service.upkeep_once().await.unwrap();
    assert_eq!(stage.count().await, 0);
    assert_eq!(stage.post(&again.said(evaluator, &payer).await).await.0, 201);
}
