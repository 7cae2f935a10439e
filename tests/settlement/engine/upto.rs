//! Permits (scheme `upto`): settled for what was charged, by whichever process, and looked up where that is not known.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{B256, Bytes, U256};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use tower_x402::{
    Clock as _, Usdc,
    facilitator::{Facilitator as _, FacilitatorError, OnchainFacilitator, VerifyError},
    ledger::{Fingerprint, FulfilmentStep, Record, Reservation, Settlement},
    payment::{Prechecked, SettlementOutcome, Terms},
    permit2::approval,
    protocol::{ExactOffer, Reason, TransferMethod},
};
use x402_devnet::{DevnetBuilder, Orphans};

use support::{
    engine_stage::*,
    permit::{PERMIT2, PROXY, approve, burn, decoy, invalidate, settle, transfer_of_nothing},
};

alloy_sol_types::sol! {
    function mint(address to, uint256 value);
}

/// A facilitator whose terms are to be charged at most the price.
async fn permit_stage() -> Stage {
    permit_stage_with(|devnet| devnet).await
}

async fn permit_stage_with(devnet: impl FnOnce(DevnetBuilder) -> DevnetBuilder) -> Stage {
    let mut stage = Stage::with(devnet, |builder| builder).await;
    let offer = ExactOffer::new(stage.devnet.asset(), U256::from(PRICE), PAYEE, VALID);
    stage.terms = Arc::new(Terms::new(offer.up_to(settlement_key().address())));
    stage
}

fn payer(stage: &Stage) -> PrivateKeySigner {
    let key = stage.payer(1);
    approve(&stage.devnet, key.address(), U256::from(PRICE));
    key
}

fn received(stage: &Stage) -> u64 {
    stage.devnet.balance_of(PAYEE).unwrap().atomic()
}

/// Enters a payment into the ledger that was charged this much, by a process that is gone.
async fn charged(stage: &Stage, payment: &Prechecked, amount: u64) {
    let funds = stage.verify(payment).await.unwrap().funds;
    let now = stage.clock.now();
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    let record = Record::new(payment, request, now, now - 1);
    let Reservation::New(lease) = stage.ledger.reserve(&record).await.unwrap() else { panic!("known") };
    let charged = Some(U256::from(amount));
    let response = tower_x402::ledger::StoredResponse { head: "200".into(), body: "answer".into(), stored_at: now };
    for step in [
        FulfilmentStep::Admit { funds, due: false },
        FulfilmentStep::Start { until: 0 },
        FulfilmentStep::Produce { charged, body: None, at: now, response: Some(response) },
    ] {
        stage.ledger.advance(&lease.key, &lease.step(step)).await.unwrap();
    }
}

async fn restarted(stage: &Stage) -> OnchainFacilitator {
    OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(settlement_key())
        .ledger(stage.ledger.clone())
        .clock(stage.clock.clone())
        .build()
        .await
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn permit_that_a_dead_process_charged_is_settled_for_that_amount_and_becomes_final() {
    let stage = permit_stage().await;
    let payment = stage.payment(&payer(&stage));
    charged(&stage, &payment, 250).await;
    stage.facilitator.reconcile_now();
    until(async || matches!(stage.record(&payment).await.settlement, Settlement::Final { .. })).await;
    assert_eq!(received(&stage), 250);
}

#[tokio::test(start_paused = true)]
async fn permit_that_was_charged_nothing_is_never_sent() {
    let stage = permit_stage().await;
    let payment = stage.payment(&payer(&stage));
    charged(&stage, &payment, 0).await;
    let restarted = restarted(&stage).await;
    restarted.reconcile_now();
    assert!(restarted.drain(Duration::from_secs(60)).await);
    assert_eq!((received(&stage), stage.calls("eth_sendRawTransaction")), (0, 0));
    assert_eq!(stage.calls("eth_sendRawTransactionSync"), 0);
}

#[tokio::test(start_paused = true)]
async fn lost_settlement_of_a_permit_is_sent_again_after_a_restart() {
    let stage = permit_stage().await;
    let payment = stage.payment(&payer(&stage));
    let payment = payment.charging(U256::from(250));
    let verified = stage.admit(&payment).await;
    let SettlementOutcome::Settled { .. } = stage.facilitator.settle(&payment, &verified).await.unwrap() else {
        panic!("it is settled");
    };
    stage.devnet.reorg(1, Orphans::Lost);
    assert_eq!(received(&stage), 0);
    let restarted = restarted(&stage).await;
    until(async || received(&stage) == 250).await;
    let outcome = restarted.reconcile(&stage.record(&payment).await).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Settled { .. }), "{outcome:?}");
}

/// Only the calldata of a transaction says which of two permits it used.
#[tokio::test(start_paused = true)]
async fn settlement_by_another_process_is_found_and_is_not_that_of_another_permit() {
    let stage = permit_stage().await;
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    let [first, second, third] = [0, 1, 2].map(|_| stage.payment(&key).charging(U256::from(250)));
    for payment in [&first, &second, &third] {
        stage.admit(payment).await;
    }
    let by = settle(&stage.devnet, &second, 250);
    settle(&stage.devnet, &third, 249);
    let outcome = stage.reconcile(&second).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Settled { transaction, .. } if transaction == by), "{outcome:?}");
    let outcome = stage.reconcile(&first).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: false, .. }), "it is unused: {outcome:?}");
    let outcome = stage.reconcile(&third).await.unwrap();
    let SettlementOutcome::Failed { reason: Reason::NonceAlreadyUsed, .. } = outcome else { panic!("{outcome:?}") };
}

/// Of all that calls the proxy with this nonce and moves money from payer to payee, only the payer's own permit is the payment.
#[tokio::test(start_paused = true)]
async fn transfer_that_pays_for_something_else_does_not_pay_for_a_permit_with_the_same_nonce() {
    let stage = permit_stage().await;
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    let permit = stage.payment(&key).charging(U256::from(PRICE));
    stage.admit(&permit).await;
    // Another payment of the payer is executed within a stranger's settlement.
    let exact = Terms::new(ExactOffer::new(stage.devnet.asset(), U256::from(PRICE), PAYEE, VALID));
    let authorization = stage.authorization(key.address());
    let execution = execution(&authorization, &sign(&key, &authorization, &exact));
    burn(&stage.devnet, &key, permit.authorization().nonce.into());
    decoy(&stage.devnet, &permit, stage.devnet.asset().address, &execution);
    assert_eq!(received(&stage), PRICE);
    let outcome = stage.reconcile(&permit).await.unwrap();
    assert!(!matches!(outcome, SettlementOutcome::Settled { .. }), "{outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn transfers_of_nothing_and_of_other_payments_do_not_hide_a_settlement() {
    let stage = permit_stage().await;
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    let payment = stage.payment(&key).charging(U256::from(250));
    stage.admit(&payment).await;
    let token = stage.devnet.asset().address;
    let nothing = transfer_of_nothing(key.address(), PAYEE);
    decoy(&stage.devnet, &payment, token, &nothing);
    for _ in 0..300 {
        stage.devnet.execute(new_key().address(), token, nothing.clone()).unwrap();
        let unit = Token::transferCall { to: PAYEE, value: U256::ONE }.abi_encode();
        stage.devnet.execute(key.address(), token, unit).unwrap();
    }
    let by = settle(&stage.devnet, &payment, 250);
    stage.devnet.faults().reset();
    let outcome = stage.reconcile(&payment).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Settled { transaction, .. } if transaction == by), "{outcome:?}");
    // Only one of them settled something.
    assert_eq!(stage.calls("eth_getTransactionByHash"), 1);
}

/// Its calldata does not change, and a payer could have as many transactions looked at for each of its payments.
#[tokio::test(start_paused = true)]
async fn transaction_is_looked_at_once_for_all_payments_of_its_payer() {
    let stage = permit_stage().await;
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    let payments = [0; 4].map(|_| stage.payment(&key).charging(U256::from(250)));
    for payment in &payments {
        stage.admit(payment).await;
    }
    for payment in &payments {
        settle(&stage.devnet, payment, 1);
    }
    stage.devnet.faults().reset();
    for payment in &payments {
        let outcome = stage.reconcile(payment).await.unwrap();
        assert!(matches!(outcome, SettlementOutcome::Failed { .. }), "{outcome:?}");
    }
    assert_eq!(stage.calls("eth_getTransactionByHash"), 4);
}

/// The number of SECURITY.md. The payer makes as many transactions as it likes.
#[tokio::test(start_paused = true)]
async fn permit_is_looked_for_among_256_transactions_of_its_payer() {
    let stage = permit_stage().await;
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    let payment = stage.payment(&key).charging(U256::from(250));
    stage.admit(&payment).await;
    burn(&stage.devnet, &key, payment.authorization().nonce.into());
    for _ in 0..260 {
        settle(&stage.devnet, &stage.payment(&key).charging(U256::ONE), 1);
    }
    stage.devnet.faults().reset();
    stage.reconcile(&payment).await.unwrap();
    assert_eq!(stage.calls("eth_getTransactionByHash"), 256);
}

#[tokio::test(start_paused = true)]
async fn blocks_after_the_deadline_of_a_permit_are_not_searched() {
    let stage = permit_stage().await;
    let key = payer(&stage);
    let payment = stage.payment(&key).charging(U256::from(250));
    stage.admit(&payment).await;
    burn(&stage.devnet, &key, payment.authorization().nonce.into());
    stage.clock.advance(VALID + 1);
    for _ in 0..5_000 {
        stage.devnet.mine();
    }
    stage.devnet.faults().reset();
    let outcome = stage.reconcile(&payment).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: true, .. }), "{outcome:?}");
    // One for transfers, one for those in blocks that may have been replaced, and one for invalidations: each has room for 2,000 blocks.
    assert_eq!(stage.calls("eth_getLogs"), 3);
}

/// Permit2 has no event for a use, so there is nothing to find.
#[tokio::test(start_paused = true)]
async fn permit_whose_nonce_was_used_for_something_else_has_failed_and_is_dead_once_that_is_final() {
    let stage = permit_stage_with(|devnet| devnet.finality_depth(3)).await;
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    let payment = stage.payment(&key).charging(U256::from(250));
    let verified = stage.admit(&payment).await;
    burn(&stage.devnet, &key, payment.authorization().nonce.into());
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    let SettlementOutcome::Failed { reason: Reason::NonceAlreadyUsed, dead: false, transaction: Some(sent), .. } =
        outcome
    else {
        panic!("{outcome:?}")
    };
    assert_eq!(stage.record(&payment).await.transactions, [sent]);
    for _ in 0..2 {
        let outcome = stage.reconcile(&payment).await.unwrap();
        assert!(matches!(outcome, SettlementOutcome::Failed { dead: false, .. }), "{outcome:?}");
        stage.devnet.mine();
    }
    let outcome = stage.reconcile(&payment).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: true, .. }), "{outcome:?}");
    assert_eq!(received(&stage), 0);
}

/// The seller pays for each of the transactions.
#[tokio::test(start_paused = true)]
async fn payer_that_uses_its_nonces_for_something_else_has_to_wait() {
    let stage = permit_stage().await;
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    let third = stage.payment(&key);
    for _ in 0..2 {
        stage.verify(&third).await.unwrap();
        let payment = stage.payment(&key);
        let verified = stage.admit(&payment).await;
        burn(&stage.devnet, &key, payment.authorization().nonce.into());
        stage.settle(&payment, &verified).await.unwrap();
    }
    assert_eq!(stage.facilitator.stats().reverted, 2);
    assert_eq!(stage.rejection(&third).await.reason, Reason::InvalidTransactionState);
}

#[tokio::test(start_paused = true)]
async fn permit_that_was_invalidated_or_has_expired_is_dead() {
    let stage = permit_stage().await;
    let key = stage.payer(10);
    approve(&stage.devnet, key.address(), U256::MAX >> 1);
    let [invalidated, expired] = [0, 1].map(|_| stage.payment(&key));
    for payment in [&invalidated, &expired] {
        stage.admit(payment).await;
    }
    invalidate(&stage.devnet, key.address(), invalidated.authorization().nonce.into());
    stage.devnet.mine();
    let outcome = stage.reconcile(&invalidated).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: true, .. }), "{outcome:?}");
    // At its deadline it is good, and a second later it is not.
    stage.clock.advance(VALID);
    stage.devnet.mine();
    let outcome = stage.reconcile(&expired).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: false, .. }), "{outcome:?}");
    stage.clock.advance(1);
    stage.devnet.mine();
    let outcome = stage.reconcile(&expired).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Failed { dead: true, .. }), "{outcome:?}");
}

/// What is charged is simulated, and not what was signed for.
#[tokio::test]
async fn what_is_charged_is_what_is_verified() {
    let stage = permit_stage().await;
    let key = payer(&stage);
    let payment = stage.payment(&key);
    approve(&stage.devnet, key.address(), U256::from(250));
    assert_eq!(stage.rejection(&payment).await.reason.as_str(), "permit2_allowance_required");
    stage.verify(&payment.clone().charging(U256::from(250))).await.unwrap();
    approve(&stage.devnet, key.address(), U256::from(PRICE));
    stage.verify(&payment).await.unwrap();
}

/// A call of an address without code succeeds, and does nothing.
#[tokio::test]
async fn permits_are_neither_offered_nor_verified_where_a_contract_is_missing() {
    for missing in [PROXY, PERMIT2] {
        let stage = permit_stage().await;
        let payment = stage.payment(&payer(&stage));
        let methods = TransferMethod::by_permit(settlement_key().address());
        assert_eq!(stage.facilitator.permit_methods(stage.devnet.network()), methods);
        stage.devnet.set_code(missing, Bytes::new());
        let restarted = restarted(&stage).await;
        let left = if missing == PROXY { vec![TransferMethod::Permit] } else { Vec::new() };
        assert_eq!(restarted.permit_methods(stage.devnet.network()), left);
        let Err(VerifyError::Invalid(rejection)) = restarted.verify(&payment).await else { panic!("{missing}") };
        assert_eq!(rejection.reason.as_str(), "permit2_proxy_not_deployed");
    }
}

/// The code of a payer decides how much gas its signature takes, and the transaction has a limit.
#[tokio::test]
async fn payer_whose_signature_takes_more_gas_than_a_transaction_has_is_refused() {
    let stage = permit_stage().await;
    let owner = stage.payer(1);
    let wallet = stage.wallet(owner.address());
    stage.devnet.mint(wallet, Usdc::from_atomic(10 * PRICE)).unwrap();
    approve(&stage.devnet, wallet, U256::MAX >> 1);
    let burn_gas = |amount: u64| {
        let data = Wallet::setGasBurnCall { amount: U256::from(amount) }.abi_encode();
        stage.devnet.execute(owner.address(), wallet, data).unwrap();
    };
    burn_gas(200_000);
    let payment = stage.payment_from(&owner, wallet).charging(U256::from(250));
    let verified = stage.admit(&payment).await;
    let outcome = stage.settle(&payment, &verified).await;
    stage.devnet.mine();
    assert!(matches!(outcome, Ok(SettlementOutcome::Settled { .. })), "{outcome:?}");
    burn_gas(600_000);
    let rejection = stage.rejection(&stage.payment_from(&owner, wallet)).await;
    assert_eq!(rejection.reason, Reason::SimulationFailed, "{rejection:?}");
    assert_eq!((received(&stage), stage.facilitator.stats().reverted), (250, 0));
}

/// A facilitator with two keys, each for one transaction at a time. Permits are for the second one.
async fn stage_of_two_keys() -> (Stage, PrivateKeySigner) {
    let second = new_key();
    let signer = second.clone();
    let mut stage = Stage::with(|devnet| devnet, |builder| builder.signer(signer).in_flight(1)).await;
    let offer = ExactOffer::new(stage.devnet.asset(), U256::from(PRICE), PAYEE, VALID);
    stage.terms = Arc::new(Terms::new(offer.up_to(second.address())));
    (stage, second)
}

/// Only the account that a permit names can send it, however much room others have.
#[tokio::test(start_paused = true)]
async fn permit_whose_account_is_busy_ends_in_time_and_is_verified_again_when_its_turn_comes() {
    let (stage, second) = stage_of_two_keys().await;
    stage.devnet.fund(second.address(), U256::from(ETHER));
    let [first, then, last] = [0; 3].map(|_| payer(&stage));
    let [first, waiting] = [&first, &then].map(|key| stage.payment(key));
    let last = (stage.payment(&last), last);
    let mut verified = Vec::new();
    for payment in [&first, &waiting, &last.0] {
        verified.push(stage.admit(payment).await);
    }
    stage.devnet.stall(true);
    let outcome = stage.settle(&first, &verified[0]).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Unknown { transaction: Some(_) }), "{outcome:?}");
    let outcome = stage.facilitator.settle(&waiting, &verified[1]).await;
    assert!(matches!(outcome, Err(FacilitatorError::Busy { .. })), "{outcome:?}");
    // Its nonce is used for something else while it waits.
    let settling = stage.facilitator.settle(&last.0, &verified[2]);
    let (outcome, ()) = tokio::join!(settling, async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        stage.clock.advance(10);
        burn(&stage.devnet, &last.1, last.0.authorization().nonce.into());
        stage.devnet.stall(false);
        stage.devnet.mine();
    });
    let Ok(SettlementOutcome::Failed { reason: Reason::NonceAlreadyUsed, .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!((stage.facilitator.stats().transactions, stage.facilitator.stats().reverted), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn permit_whose_account_cannot_pay_for_gas_is_not_verified() {
    let (stage, second) = stage_of_two_keys().await;
    let [first, then] = [0; 2].map(|_| stage.payment(&payer(&stage)));
    let verified = stage.admit(&first).await;
    let outcome = stage.facilitator.settle(&first, &verified).await;
    assert!(outcome.is_err(), "{outcome:?}");
    let refused = stage.verify(&then).await;
    assert!(matches!(refused, Err(VerifyError::Unavailable(FacilitatorError::InsufficientGas { .. }))), "{refused:?}");
    stage.devnet.fund(second.address(), U256::from(ETHER));
    until(async || stage.verify(&then).await.is_ok()).await;
}

/// Its logs show the whole amount.
#[tokio::test]
async fn token_that_keeps_a_part_of_what_is_sent_is_refused() {
    let mut stage = permit_stage().await;
    let artifact: serde_json::Value =
        serde_json::from_str(include_str!("../../../contracts/artifacts/FeeToken.json")).unwrap();
    let address = stage.devnet.deploy(artifact["bytecode"].as_str().unwrap().parse::<Bytes>().unwrap()).unwrap();
    let mut asset = stage.devnet.asset();
    asset.address = address;
    let offer = ExactOffer::new(asset, U256::from(PRICE), PAYEE, VALID);
    stage.terms = Arc::new(Terms::new(offer.up_to(settlement_key().address())));
    let key = new_key();
    let mint = mintCall { to: key.address(), value: U256::from(10 * PRICE) }.abi_encode();
    stage.devnet.execute(key.address(), address, mint).unwrap();
    stage.devnet.execute(key.address(), address, approval(U256::from(PRICE))).unwrap();
    let rejection = stage.rejection(&stage.payment(&key)).await;
    assert_eq!(rejection.reason, Reason::SimulationFailed);
    assert!(rejection.detail.contains("receive 990 atomic units, not 1000"), "{rejection:?}");
    // Of a charge so small that it keeps nothing, the payee has all.
    stage.verify(&stage.payment(&key).charging(U256::from(99))).await.unwrap();
}
