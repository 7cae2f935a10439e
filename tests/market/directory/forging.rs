//! Forged reports, all of which are refused.

use std::time::Duration;

use alloy_primitives::{Bytes, U256};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, SolValue as _};
use serde_json::{Value, json};
use tower_x402::{Network, Usdc, eip3009::PaymentSignature};
use x402_directory::{CardQuery, PaymentCheckError, PaymentChecker, Publication, ReportError, SignedEvidence};
use x402_market::evidence::{CallOutcome, EvidencePayment, Pairs};

use super::stage::{Booth, FORWARDER, PRICE, Paid, Stage, checker, forge, moved, send_as, sign_report, used};
use support::{
    authorization::{CancelAuthorization, Signature, authorization, random_address, random_nonce, sign, unix_now},
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
    token::{Token, cancel_vrs, transfer_bytes, transfer_vrs},
};

on_every_chain! {
    payment_has_one_report,
    nobody_can_report_for_another_payer,
    contract_wallet_cannot_report,
    changed_report_is_refused,
    invented_payment_is_refused,
    failed_transfer_is_refused,
    amount_and_payee_must_be_those_of_the_payment,
    report_costs_the_price_of_the_evaluator,
    changed_price_silences_no_earlier_payer,
    evaluator_cannot_report_about_itself,
    cancelled_authorization_is_refused,
    transfer_without_an_authorization_is_refused,
    nonce_must_be_the_payers_own,
    other_payments_of_the_same_transaction_do_not_count,
    events_of_other_contracts_do_not_count,
    authorization_event_and_transfer_must_both_be_there,
    payment_that_is_not_deep_enough_is_refused_for_now,
    time_must_be_that_of_the_payment,
    evaluator_and_skill_must_be_known,
    payment_is_found_without_its_transaction,
}

async fn payment_has_one_report(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let paid = stage.pay(&payer, booth.payee.address(), PRICE).await;
    let report = paid.report(booth.payee.address(), &payer).await;
    assert_eq!(stage.post(&report).await, (201, String::new()));
    assert_eq!(stage.post(&report).await, (200, String::new()), "the same again changes nothing");
    for (outcome, at) in [
        (CallOutcome::answered(Pairs::new(0, 1, 1)), paid.at),
        (CallOutcome::InvalidAnswer, paid.at),
        (CallOutcome::answered(Pairs::new(1, 0, 1)), paid.at + 1),
    ] {
        let otherwise = support::changed(paid.record(booth.payee.address()), |record| {
            record.outcome = outcome;
            record.at = at;
        });
        let otherwise = sign_report(otherwise, Some(paid.transaction), &payer).await;
        assert_eq!(stage.post(&otherwise).await, (409, "already_reported".into()));
    }
    assert_eq!(stage.count().await, 1);
}

async fn nobody_can_report_for_another_payer(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer, mallory) = (stage.booth(&["prose"]).await, stage.payer().await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let refused =
        SignedEvidence::sign(paid.record(evaluator), Network::BASE_SEPOLIA, random_address(), None, &mallory).await;
    assert!(matches!(refused, Err(ReportError::WrongSigner { .. })));

    // The evaluator, and anybody else, can read the payment from the chain and sign what it likes.
    let good = paid.report(evaluator, &payer).await;
    for key in [&mallory, &booth.payee] {
        let mut own = paid.record(evaluator);
        own.payment = Some(EvidencePayment { payer: key.address(), nonce: paid.message.nonce });
        let signature = forge(own, None, key).await.signature;
        assert_eq!(
            stage.refusal(&support::changed(good.clone(), |report| report.signature = signature)).await,
            "bad_report"
        );
    }
    // The payer's signature on the payment itself is public, too.
    let asset = stage.chain.asset();
    let signature = sign(&payer, &asset, &paid.message).bytes().to_vec().into();
    assert_eq!(
        stage.refusal(&support::changed(good.clone(), |report| report.signature = signature)).await,
        "bad_report"
    );
    // A second form of the same signature, and what is none.
    let bytes = Signature(good.signature.as_bytes().try_into().unwrap());
    for signature in
        [bytes.high_s().0.to_vec(), bytes.with_v(bytes.v() - 27).0.to_vec(), vec![0; 65], vec![], vec![1; 5_000]]
    {
        let signature = PaymentSignature::from(signature);
        assert_eq!(
            stage.refusal(&support::changed(good.clone(), |report| report.signature = signature)).await,
            "bad_report"
        );
    }
    assert_eq!((stage.count().await, stage.post(&good).await.0), (0, 201));
}

/// A contract wallet pays, and its owner's key signs the very record, which the wallet would accept (ERC-1271). That is not asked:
/// tomorrow it may answer otherwise.
async fn contract_wallet_cannot_report(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, owner) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let wallet = stage.chain.deploy_wallet(owner.address()).await;
    stage.chain.mint(wallet, 1_000_000).await;
    let message = authorization(wallet, evaluator, PRICE);
    let signature = sign(&owner, &stage.chain.asset(), &message);
    let receipt = stage.relayer.send(stage.chain, transfer_bytes(&message, &signature)).await;
    assert!(receipt.status() && stage.chain.balance(evaluator).await == PRICE);
    let paid = stage.paid(message, &receipt).await;
    let report = forge(paid.record(evaluator), Some(paid.transaction), &owner).await;
    assert!(matches!(report.verify(), Err(ReportError::NotThePayer(payer)) if payer == wallet));
    assert_eq!(stage.refusal(&report).await, "bad_report");
    // The same from the owner's own account is heard.
    let paid = stage.pay(&owner, evaluator, PRICE).await;
    let report = forge(paid.record(evaluator), Some(paid.transaction), &owner).await;
    assert_eq!((stage.count().await, stage.post(&report).await.0), (0, 201));
}

async fn changed_report_is_refused(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose", "arithmetic"]).await, stage.payer().await);
    let other = stage.booth(&["prose"]).await;
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let good = serde_json::to_value(paid.report(evaluator, &payer).await).unwrap();
    let mut changed = 0;
    for (at, value) in [
        ("/network", json!("eip155:8453")),
        ("/asset", json!(random_address())),
        ("/evidence/payment/payer", json!(booth.payee.address())),
        ("/evidence/payment/nonce", json!(random_nonce())),
        ("/evidence/evaluator", json!(other.payee.address())),
        ("/evidence/skill", json!("arithmetic")),
        ("/evidence/at", json!(paid.at + 1)),
        ("/evidence/paid", json!("1001")),
        ("/evidence/outcome/pairs/right", json!(0)),
        ("/evidence/outcome/pairs/all", json!(2)),
        ("/evidence/outcome/pairs", json!({ "right": 0, "wrong": 1, "all": 1 })),
        ("/evidence/outcome/pairs", Value::Null),
        ("/evidence/outcome", json!({ "kind": "garbage" })),
        ("/evidence/outcome", json!({ "kind": "timeout" })),
    ] {
        let mut forged = good.clone();
        *forged.pointer_mut(at).unwrap() = value;
        assert_eq!(stage.refusal(&forged).await, "bad_report", "{at}");
        changed += 1;
    }
    // What no payment can say.
    for (at, value) in [
        ("/evidence/payment", Value::Null),
        ("/evidence/outcome", json!({ "kind": "priceLie" })),
        ("/evidence/skill", json!("")),
        ("/evidence/skill", json!("x".repeat(129))),
    ] {
        let mut forged = good.clone();
        *forged.pointer_mut(at).unwrap() = value;
        assert_eq!(stage.refusal(&forged).await, "bad_report", "{at}");
        changed += 1;
    }
    assert_eq!((changed, stage.count().await, stage.post(&good).await.0), (18, 0, 201));
}

async fn invented_payment_is_refused(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let mut never = paid.record(evaluator);
    never.payment = Some(EvidencePayment { payer: payer.address(), nonce: random_nonce() });
    // By the transaction of another payment, by one that does not exist, by none.
    let with = async |transaction| stage.refusal(&sign_report(never.clone(), transaction, &payer).await).await;
    assert_eq!(with(Some(paid.transaction)).await, "not_paid");
    assert_eq!(with(Some(random_nonce())).await, "not_yet");
    assert_eq!(with(None).await, "not_yet");
    // A payment that is signed and not executed is none, either.
    let message = authorization(payer.address(), evaluator, PRICE);
    let signed = Paid { message, transaction: paid.transaction, at: paid.at };
    assert_eq!(stage.refusal(&signed.report(evaluator, &payer).await).await, "not_paid");
    assert_eq!(stage.count().await, 0);
}

async fn failed_transfer_is_refused(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let booth = stage.booth(&["prose"]).await;
    let poor = PrivateKeySigner::random();
    let failed = stage.pay(&poor, booth.payee.address(), PRICE).await;
    assert!(!stage.chain.receipt(failed.transaction).await.status());
    assert_eq!(stage.refusal(&failed.report(booth.payee.address(), &poor).await).await, "not_paid");
    assert_eq!(stage.refusal(&sign_report(failed.record(booth.payee.address()), None, &poor).await).await, "not_yet");
}

async fn amount_and_payee_must_be_those_of_the_payment(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, other, payer) = (stage.booth(&["prose"]).await, stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, 2 * PRICE).await;
    for record in [
        support::changed(paid.record(evaluator), |record| record.paid = Usdc::from_atomic(2 * PRICE - 1)),
        support::changed(paid.record(evaluator), |record| record.paid = Usdc::from_atomic(2 * PRICE + 1)),
        paid.record(other.payee.address()),
    ] {
        for transaction in [Some(paid.transaction), None] {
            assert_eq!(stage.refusal(&sign_report(record.clone(), transaction, &payer).await).await, "not_paid");
        }
    }
    // Money to a friend is no purchase from the evaluator.
    let to_friend = stage.pay(&payer, random_address(), PRICE).await;
    assert_eq!(stage.refusal(&to_friend.report(evaluator, &payer).await).await, "not_paid");
    assert_eq!(stage.count().await, 0);
}

async fn report_costs_the_price_of_the_evaluator(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    // A payment of nothing takes place like any other, and a payer without money can make thousands.
    let nothing = stage.pay(&payer, evaluator, 0).await;
    assert!(stage.chain.receipt(nothing.transaction).await.status());
    let report = forge(nothing.record(evaluator), Some(nothing.transaction), &payer).await;
    assert_eq!(stage.refusal(&report).await, "bad_report");
    assert!(matches!(report.verify(), Err(ReportError::NoPayment)));
    assert!(matches!(checker(chain).check(&report).await, Err(PaymentCheckError::Report(_))), "readers refuse it, too");

    let dust = stage.pay(&payer, evaluator, PRICE - 1).await;
    assert_eq!(stage.post(&dust.report(evaluator, &payer).await).await, (422, "underpaid".into()));
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let report = forge(paid.record(evaluator), Some(paid.transaction), &payer).await;
    assert_eq!((stage.count().await, stage.post(&report).await.0), (0, 201));
    // Of another skill it is that one's price which counts, though the same is paid for it.
    let cheaper = Booth::open(&["poetry"]).await;
    cheaper.show(&["poetry"], &booth.payee, 10).await;
    stage.client().list(&cheaper.url).await.unwrap();
    let of_ten = async |skill: &str| {
        let paid = stage.pay(&payer, evaluator, 10).await;
        let record = support::changed(paid.record(evaluator), |record| record.skill = skill.into());
        stage.post(&sign_report(record, Some(paid.transaction), &payer).await).await
    };
    assert_eq!(of_ten("prose").await, (422, "underpaid".into()));
    assert_eq!(of_ten("poetry").await.0, 201);
}

async fn changed_price_silences_no_earlier_payer(chain: &dyn Chain) {
    let (now, day) = (Duration::ZERO, Duration::from_secs(86_400));
    let stage =
        Stage::set_with(chain, |directory| directory.payment_checker(checker(chain)).card_ages(now, day, 30 * day))
            .await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let before = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
    let send = async |units: u64| {
        let report = stage.pay(&payer, evaluator, units).await.report(evaluator, &payer).await;
        stage.post(&report).await
    };
    for price in [5 * PRICE, PRICE / 2, 7 * PRICE] {
        booth.show(&["prose"], &booth.payee, price).await;
        stage.service.upkeep_once().await.unwrap();
        let cards = stage.client().cards(&CardQuery::default()).await.unwrap().found;
        assert_eq!(cards[0].card.pricing().price_per_output().atomic(), price);
        assert_eq!(send(price).await.0, 201, "{price}");
    }
    assert_eq!(stage.post(&before).await.0, 201);
    assert_eq!(send(PRICE / 2).await.0, 201, "it may have been paid before");
    assert_eq!(send(PRICE / 2 - 1).await, (422, "underpaid".into()));
}

async fn evaluator_cannot_report_about_itself(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let booth = stage.booth(&["prose"]).await;
    let evaluator = booth.payee.address();
    stage.chain.mint(evaluator, 1_000_000).await;
    let paid = stage.pay(&booth.payee, evaluator, PRICE).await;
    assert!(stage.chain.receipt(paid.transaction).await.status());
    let report = forge(paid.record(evaluator), Some(paid.transaction), &booth.payee).await;
    assert_eq!(stage.refusal(&report).await, "bad_report");
    let network = Network::BASE_SEPOLIA;
    let own = SignedEvidence::sign(paid.record(evaluator), network, stage.chain.asset().address, None, &booth.payee);
    assert!(matches!(own.await, Err(ReportError::PaidItself)));
}

async fn cancelled_authorization_is_refused(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let message = authorization(payer.address(), evaluator, PRICE);
    let cancel = CancelAuthorization { authorizer: payer.address(), nonce: message.nonce };
    let signature = sign(&payer, &stage.chain.asset(), &cancel);
    let receipt = stage.relayer.send(stage.chain, cancel_vrs(&cancel, &signature)).await;
    assert!(receipt.status());
    let state = Token::authorizationStateCall { authorizer: payer.address(), nonce: message.nonce };
    assert!(stage.chain.simulate(state).await.unwrap(), "it is used, as far as the token's state tells");
    let cancelled = stage.paid(message, &receipt).await;
    assert_eq!(stage.refusal(&cancelled.report(evaluator, &payer).await).await, "not_paid");
    assert_eq!(stage.refusal(&sign_report(cancelled.record(evaluator), None, &payer).await).await, "not_paid");
}

async fn transfer_without_an_authorization_is_refused(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let message = authorization(payer.address(), evaluator, PRICE);
    let transfer = Token::transferCall { to: evaluator, value: U256::from(PRICE) }.abi_encode();
    let receipt = send_as(stage.chain, &payer, stage.chain.asset().address, transfer.into()).await;
    assert!(receipt.status() && stage.chain.balance(evaluator).await == PRICE);
    let plain = stage.paid(message, &receipt).await;
    assert_eq!(stage.refusal(&plain.report(evaluator, &payer).await).await, "not_paid");
}

async fn nonce_must_be_the_payers_own(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer, mallory) = (stage.booth(&["prose"]).await, stage.payer().await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let mut stolen = paid.record(evaluator);
    stolen.payment = Some(EvidencePayment { payer: mallory.address(), nonce: paid.message.nonce });
    assert_eq!(stage.refusal(&sign_report(stolen, Some(paid.transaction), &mallory).await).await, "not_paid");
    assert_eq!(stage.post(&paid.report(evaluator, &payer).await).await.0, 201, "and it blocks no report");
}

async fn other_payments_of_the_same_transaction_do_not_count(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let (evaluator, friend) = (booth.payee.address(), random_address());
    let asset = stage.chain.asset();
    let forwarder = random_address();
    stage.chain.set_code(forwarder, Bytes::from_static(&FORWARDER)).await;
    // Three payments in one transaction, the first and the last to a friend.
    let messages = [friend, evaluator, friend].map(|to| authorization(payer.address(), to, PRICE));
    let mut calldata = asset.address.abi_encode();
    for message in &messages {
        calldata.extend(transfer_vrs(message, &sign(&payer, &asset, message)).abi_encode());
    }
    let receipt = stage.relayer.send_to(stage.chain, forwarder, calldata.into()).await;
    assert_eq!((stage.chain.balance(evaluator).await, stage.chain.balance(friend).await), (PRICE, 2 * PRICE));
    let [first, second, third] = messages;
    for message in [first, third] {
        let other = stage.paid(message, &receipt).await;
        assert_eq!(stage.refusal(&other.report(evaluator, &payer).await).await, "not_paid");
    }
    let paid = stage.paid(second, &receipt).await;
    assert_eq!(stage.post(&paid.report(evaluator, &payer).await).await.0, 201);
}

async fn events_of_other_contracts_do_not_count(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let message = authorization(payer.address(), evaluator, PRICE);
    let imitation = random_address();
    let logs = [used(payer.address(), message.nonce), moved(payer.address(), evaluator, PRICE)];
    let receipt = stage.emit(imitation, &logs).await;
    assert_eq!(receipt.inner.logs().len(), 2);
    let made_up = stage.paid(message, &receipt).await;
    assert_eq!(stage.refusal(&made_up.report(evaluator, &payer).await).await, "not_paid");
    // By its own name it is not looked at.
    let network = Network::BASE_SEPOLIA;
    let own =
        SignedEvidence::sign(made_up.record(evaluator), network, imitation, Some(receipt.transaction_hash), &payer);
    assert_eq!(stage.refusal(&own.await.unwrap()).await, "not_served");
}

/// The token itself never emits these; should one do, it is no payment.
async fn authorization_event_and_transfer_must_both_be_there(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let (evaluator, token) = (booth.payee.address(), stage.chain.asset().address);
    let message = authorization(payer.address(), evaluator, PRICE);
    let (us, them) = (used(payer.address(), message.nonce), moved(payer.address(), evaluator, PRICE));
    for logs in [
        vec![us],
        vec![them],
        vec![us, moved(payer.address(), evaluator, PRICE - 1)],
        vec![us, moved(payer.address(), random_address(), PRICE)],
        vec![us, moved(random_address(), evaluator, PRICE)],
        vec![used(random_address(), message.nonce), them],
        vec![used(payer.address(), random_nonce()), them],
    ] {
        let receipt = stage.emit(token, &logs).await;
        assert_eq!(receipt.inner.logs().len(), logs.len());
        let paid = stage.paid(message.clone(), &receipt).await;
        assert_eq!(stage.refusal(&paid.report(evaluator, &payer).await).await, "not_paid");
    }
    let receipt = stage.emit(token, &[us, them]).await;
    let paid = stage.paid(message, &receipt).await;
    assert_eq!(stage.post(&paid.report(evaluator, &payer).await).await.0, 201, "these two would be");
}

async fn payment_that_is_not_deep_enough_is_refused_for_now(chain: &dyn Chain) {
    let stage = Stage::set_with(chain, |directory| directory.payment_checker(checker(chain).depth(3))).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let report = stage.pay(&payer, booth.payee.address(), PRICE).await.report(booth.payee.address(), &payer).await;
    for _ in 0..3 {
        assert_eq!(stage.post(&report).await, (409, "not_yet".into()));
        assert_eq!(stage.client().publish_signed(&report).await.unwrap(), Publication::NotYet);
        stage.chain.mine().await;
    }
    assert_eq!(stage.post(&report).await.0, 201);
}

async fn time_must_be_that_of_the_payment(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    for at in [0, paid.at - 3_700, paid.at + 3_700, unix_now() + 400, u64::MAX] {
        let record = support::changed(paid.record(evaluator), |record| record.at = at);
        let error = stage.refusal(&sign_report(record, Some(paid.transaction), &payer).await).await;
        assert_eq!(error, "implausible_time", "{at}");
    }
    let record = support::changed(paid.record(evaluator), |record| record.at = paid.at - 3_000);
    assert_eq!(stage.post(&sign_report(record, Some(paid.transaction), &payer).await).await.0, 201);
}

async fn evaluator_and_skill_must_be_known(chain: &dyn Chain) {
    let (now, day) = (Duration::ZERO, Duration::from_secs(86_400));
    let stage =
        Stage::set_with(chain, |directory| directory.payment_checker(checker(chain)).card_ages(now, day, 30 * day))
            .await;
    let (booth, payer) = (stage.booth(&["prose", "poetry"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let unknown = random_address();
    let paid = stage.pay(&payer, unknown, PRICE).await;
    assert_eq!(stage.refusal(&paid.report(unknown, &payer).await).await, "unknown_evaluator");
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let record = support::changed(paid.record(evaluator), |record| record.skill = "clairvoyance".into());
    assert_eq!(stage.refusal(&sign_report(record, Some(paid.transaction), &payer).await).await, "unknown_skill");
    // Removing a skill from the card does not stop reports about it.
    booth.show(&["poetry"], &booth.payee, PRICE).await;
    stage.service.upkeep_once().await.unwrap();
    let prose = CardQuery::default().skill("prose");
    assert!(stage.client().cards(&prose).await.unwrap().found.is_empty());
    assert_eq!(stage.post(&paid.report(evaluator, &payer).await).await.0, 201);
}

async fn payment_is_found_without_its_transaction(chain: &dyn Chain) {
    let stage = Stage::set(chain).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    assert_eq!(stage.post(&sign_report(paid.record(evaluator), None, &payer).await).await.0, 201);
    let page = stage.client().reports(&Default::default()).await.unwrap();
    assert_eq!(page.reports[0].report.transaction, Some(paid.transaction), "readers see the transaction");
    assert_eq!(page.reports[0].block, stage.chain.receipt(paid.transaction).await.block_number.unwrap());
}

#[tokio::test]
async fn network_and_token_belong_to_the_identity_of_a_payment() {
    let (here, there) = (DevnetChain::start(None).await, DevnetOnBase::start().await);
    let token = random_address();
    let asset = support::changed(here.asset(), |asset| asset.address = token);
    let stage = Stage::set_with(&here, |directory| {
        let elsewhere = PaymentChecker::new(Network::BASE).rpc_url(&there.url).unwrap().depth(0);
        directory.payment_checker(checker(&here).token(&asset)).payment_checker(elsewhere)
    })
    .await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let paid = stage.pay(&payer, evaluator, PRICE).await;
    let good = paid.report(evaluator, &payer).await;
    // The signature does not mean the other chain or token,
    let base = Network::BASE.usdc().unwrap();
    let replayed = support::changed(good.clone(), |report| {
        report.network = Network::BASE;
        report.asset = base.address;
    });
    assert_eq!(stage.refusal(&replayed).await, "bad_report");
    assert_eq!(stage.refusal(&support::changed(good.clone(), |report| report.asset = token)).await, "bad_report");
    // and one that does finds no payment there.
    let sign = async |network, asset, transaction| {
        let report = SignedEvidence::sign(paid.record(evaluator), network, asset, transaction, &payer).await.unwrap();
        stage.refusal(&report).await
    };
    assert_eq!(sign(Network::BASE, base.address, Some(paid.transaction)).await, "not_yet");
    assert_eq!(sign(Network::BASE, base.address, None).await, "not_yet");
    assert_eq!(sign(Network::BASE_SEPOLIA, token, Some(paid.transaction)).await, "not_paid");
    assert_eq!(sign(Network::eip155(1), base.address, None).await, "not_served");
    assert_eq!((stage.count().await, stage.post(&good).await.0), (0, 201));
}

/// A chain with Base's number.
struct DevnetOnBase {
    url: String,
    _port: x402_devnet::DevnetPort,
}

impl DevnetOnBase {
    async fn start() -> Self {
        let devnet = x402_devnet::Devnet::builder().chain_id(8453).start().await.unwrap();
        devnet.mine();
        let port = devnet.serve("127.0.0.1:0").await.unwrap();
        Self { url: port.url().to_string(), _port: port }
    }
}
