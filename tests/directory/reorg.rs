//! Payments that a reorganization undoes.

use tower_x402::devnet::Orphans;

use crate::{
    stage::{PRICE, Stage},
    support::devnet::DevnetChain,
};

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
    stage.service.tidy().await.unwrap();
    assert_eq!(stage.count().await, 3, "nothing is final yet");
    (0..10).for_each(|_| chain.devnet.mine());
    stage.service.tidy().await.unwrap();
    let voices = stage.client().voices(&Default::default()).await.unwrap().voices;
    let kept_ones: Vec<_> = voices.iter().map(|voice| voice.said.evidence.payment).collect();
    assert_eq!(kept_ones, [kept.evidence.payment, moved.evidence.payment]);
    // It may be paid after all, and speak then.
    assert_eq!(stage.post(&lost).await, (409, "not_yet".into()));
}
