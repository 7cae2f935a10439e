//! What a look at the chain finds, with one request.

use alloy_primitives::{Address, U256};
use alloy_sol_types::SolCall;
use futures_util::future::join_all;
use tower_x402::{
    Clock as _, Usdc,
    eip3009::PaymentSignature,
    facilitator::{Facilitator, FacilitatorError, OnchainBuildError, OnchainFacilitator, VerifyError},
    payment::Terms,
    protocol::{ExactOffer, Reason},
};
use x402_devnet::Fault;

use super::faults::empty;
use support::{authorization, engine_stage::*};

#[tokio::test(start_paused = true)]
async fn payment_is_verified_with_one_request() {
    let stage = stage().await;
    let payment = stage.payment(&stage.payer(3));
    let verified = stage.verify(&payment).await.unwrap();
    let funds = verified.funds.unwrap();
    assert_eq!(funds.balance, U256::from(3 * PRICE));
    assert_eq!(funds.block, stage.devnet.block_number());
    assert!((20_000..150_000).contains(&verified.gas.unwrap()), "{verified:?}");
    assert_eq!(stage.requests(), 1);
    assert_eq!(stage.calls("eth_call"), 1);
}

#[tokio::test(start_paused = true)]
async fn rejection_for_insufficient_funds_names_balance_and_amount() {
    let stage = stage().await;
    let key = new_key();
    stage.devnet.mint(key.address(), Usdc::from_atomic(7)).unwrap();
    let rejection = stage.rejection(&stage.payment(&key)).await;
    assert_eq!(rejection.reason, Reason::InsufficientFunds);
    assert!(rejection.detail.contains('7') && rejection.detail.contains("1000"), "{rejection}");
    // Another node may have a newer block.
    assert_eq!((stage.calls("eth_call"), stage.calls("eth_blockNumber"), stage.requests()), (1, 2, 3));
}

#[tokio::test(start_paused = true)]
async fn used_or_cancelled_authorization_is_refused() {
    let stage = stage().await;
    let key = stage.payer(2);
    let (used, cancelled) = (stage.payment(&key), stage.payment(&key));
    stage.front_run(&used);
    stage.cancel(&key, &cancelled);
    for payment in [used, cancelled] {
        assert_eq!(stage.rejection(&payment).await.reason, Reason::NonceAlreadyUsed);
    }
}

#[tokio::test(start_paused = true)]
async fn validity_is_checked_by_the_time_of_the_chain() {
    let stage = stage().await;
    let key = stage.payer(1);
    let mut authorization = stage.authorization(key.address());
    authorization.valid_after = U256::from(stage.clock.now() - 1);
    authorization.valid_before = U256::from(stage.clock.now() + 2);
    let payment = stage.precheck(authorization.clone(), sign(&key, &authorization, &stage.terms));
    stage.devnet.mine();
    stage.clock.advance(2);
    stage.devnet.mine();
    assert_eq!(stage.rejection(&payment).await.reason, Reason::ValidBefore);
}

#[tokio::test(start_paused = true)]
async fn rejection_names_a_pause_and_blacklists() {
    for (name, paused, blacklisted) in
        [("paused", true, None), ("payer", false, Some("payer")), ("payee", false, Some("payee"))]
    {
        let stage = stage().await;
        let payment = stage.payment(&stage.payer(1));
        if paused {
            stage.devnet.administer(Token::pauseCall {}.abi_encode()).unwrap();
        }
        if let Some(who) = blacklisted {
            let account = if who == "payer" { payment.authorization().from } else { PAYEE };
            stage.devnet.administer(Token::blacklistCall { account }.abi_encode()).unwrap();
        }
        let rejection = stage.rejection(&payment).await;
        assert_eq!(rejection.reason, Reason::SimulationFailed);
        assert!(rejection.detail.contains(name), "{rejection}");
    }
}

/// The same payment under another asset.
async fn rejected_with(change: impl FnOnce(&Stage, &mut ExactOffer)) -> Reason {
    let mut stage = stage().await;
    let key = stage.payer(1);
    let mut offer = stage.terms.offer().clone();
    change(&stage, &mut offer);
    stage.terms = Terms::new(offer).into();
    stage.rejection(&stage.payment(&key)).await.reason
}

#[tokio::test(start_paused = true)]
async fn wrong_asset_and_domain_are_distinguished_from_a_wrong_signature() {
    let missing = rejected_with(|_, offer| offer.asset.address = Address::repeat_byte(0x77)).await;
    assert_eq!(missing, Reason::AssetNotDeployed);
    let renamed = rejected_with(|_, offer| offer.asset.name = "USD Coin".into()).await;
    assert_eq!(renamed, Reason::TokenNameMismatch);
    let other_contract = rejected_with(|stage, offer| {
        offer.asset.address = stage.wallet(Address::ZERO);
    });
    // It answers no balance at all: the first thing missing is money.
    assert_eq!(other_contract.await, Reason::InsufficientFunds);
}

#[tokio::test(start_paused = true)]
async fn wrong_signatures_are_refused_and_the_payer_remembered() {
    let stage = stage().await;
    let payer = stage.payer(1);
    let forged = stage.payment_from(&new_key(), payer.address());
    assert!(needs_chain(&forged));
    let rejection = stage.rejection(&forged).await;
    assert_eq!(rejection.reason, Reason::Signature);
    assert!(rejection.detail.contains("no contract code"), "{rejection}");
    assert_eq!(stage.requests(), 1);
    // For a few seconds more garbage in the payer's name costs no request …
    let garbage = stage.precheck(stage.authorization(payer.address()), PaymentSignature::from(vec![7; 90]));
    assert_eq!(stage.rejection(&garbage).await.reason, Reason::Signature);
    assert_eq!(stage.requests(), 1);
    // … and the payer's own payments are as welcome as before.
    stage.verify(&stage.payment(&payer)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn zero_amount_is_refused() {
    let mut stage = stage().await;
    stage.terms = Terms::new(support::changed(stage.terms.offer().clone(), |offer| offer.amount = U256::ZERO)).into();
    let key = stage.payer(1);
    let mut authorization = stage.authorization(key.address());
    authorization.value = U256::ZERO;
    let payment = stage.precheck(authorization.clone(), sign(&key, &authorization, &stage.terms));
    assert_eq!(stage.rejection(&payment).await.reason, Reason::Value);
    assert_eq!(stage.requests(), 0);
}

#[tokio::test(start_paused = true)]
async fn contract_wallets_and_delegated_accounts_can_pay() {
    let stage = stage().await;
    let owner = new_key();
    let wallet = stage.wallet(owner.address());
    stage.devnet.mint(wallet, "$1".parse().unwrap()).unwrap();
    let payment = stage.payment_from(&owner, wallet);
    assert!(needs_chain(&payment));
    paid_by(&stage.admit_and_settle(&payment).await);

    // A longer signature goes through the overload for wallets.
    let authorization = stage.authorization(wallet);
    let mut long = sign(&owner, &authorization, &stage.terms).as_bytes().to_vec();
    long.extend([1, 2, 3]);
    let payment = stage.precheck(authorization, PaymentSignature::from(long));
    paid_by(&stage.admit_and_settle(&payment).await);

    let delegated = stage.payer(1);
    stage.devnet.delegate(delegated.address(), stage.wallet(Address::ZERO));
    paid_by(&stage.admit_and_settle(&stage.payment(&delegated)).await);
    assert_eq!(stage.received(), 3);
}

#[tokio::test(start_paused = true)]
async fn wallet_that_refuses_or_burns_gas_is_refused() {
    let stage = stage().await;
    let owner = new_key();
    let wallet = stage.wallet(owner.address());
    stage.devnet.mint(wallet, "$1".parse().unwrap()).unwrap();
    let payment = stage.payment_from(&owner, wallet);
    let tell = |data: Vec<u8>| stage.devnet.execute(owner.address(), wallet, data).unwrap();
    tell(Wallet::setAcceptingCall { accepting: false }.abi_encode());
    assert_eq!(stage.rejection(&payment).await.reason, Reason::Signature);
    tell(Wallet::setAcceptingCall { accepting: true }.abi_encode());
    tell(Wallet::setGasBurnCall { amount: U256::from(5_000_000) }.abi_encode());
    assert_eq!(stage.rejection(&payment).await.reason, Reason::Signature);
    tell(Wallet::setGasBurnCall { amount: U256::from(50_000) }.abi_encode());
    stage.verify(&payment).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn failure_of_the_node_does_not_invalidate_the_payment() {
    let stage = Stage::with(|d| d, |b| b.rpc_timeout(std::time::Duration::from_millis(100))).await;
    let payment = stage.payment(&stage.payer(1));
    let faults = [
        Fault::DropBefore,
        Fault::Error { code: 429, message: "rate limited".into() },
        Fault::Delay(std::time::Duration::from_secs(5)),
    ];
    for fault in faults {
        stage.devnet.faults().set(move |_| fault.clone());
        let error = stage.verify(&payment).await.unwrap_err();
        assert!(matches!(error, VerifyError::Unavailable(FacilitatorError::Unreachable { .. })), "{error:?}");
    }
}

/// Why nothing is verified now, which the node was not asked for.
async fn unavailable(stage: &Stage) -> FacilitatorError {
    let payment = stage.payment(&stage.payer(1));
    stage.devnet.faults().reset();
    match stage.verify(&payment).await {
        Err(VerifyError::Unavailable(error)) => {
            assert_eq!(stage.requests(), 0);
            error
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_verified_during_shutdown() {
    let stage = stage().await;
    assert!(stage.facilitator.drain(std::time::Duration::from_secs(5)).await);
    let error = unavailable(&stage).await;
    assert!(matches!(error, FacilitatorError::Busy { .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_verified_while_gas_is_too_expensive() {
    let stage = Stage::with(|d| d, |b| b.max_gas_price(50_000_000)).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.set_base_fee(100_000_000);
    stage.settle(&payment, &verified).await.unwrap_err();
    let error = unavailable(&stage).await;
    assert!(matches!(error, FacilitatorError::Busy { .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_verified_while_no_key_can_pay_for_gas() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(std::time::Duration::from_millis(50))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    empty(&stage).await;
    stage.settle(&payment, &verified).await.unwrap_err();
    let refused = stage.verify(&payment).await;
    assert!(matches!(refused, Err(VerifyError::Unavailable(FacilitatorError::InsufficientGas { .. }))), "{refused:?}");
    stage.devnet.fund(settlement_key().address(), U256::from(ETHER));
    until(async || stage.verify(&payment).await.is_ok()).await;
}

#[tokio::test(start_paused = true)]
async fn supported_kinds_are_returned() {
    let stage = stage().await;
    let supported = stage.facilitator.supported().await.unwrap();
    assert_eq!(supported.kinds[0].network, "eip155:84532");
    assert_eq!(supported.kinds[0].x402_version, 2);
    assert_eq!(supported.signers["eip155:*"], [settlement_key().address().to_string()]);
    assert!(stage.facilitator.serves(&stage.terms));
    let elsewhere = tower_x402::Network::BASE.usdc().unwrap();
    assert!(
        !stage
            .facilitator
            .serves(&Terms::new(support::changed(stage.terms.offer().clone(), |offer| offer.asset = elsewhere)))
    );
    assert_eq!(stage.facilitator.gas_balance().await.unwrap(), U256::from(ETHER));
}

#[tokio::test]
async fn builder_errors_name_the_setting_and_never_show_the_url() {
    let devnet = x402_devnet::Devnet::start().await.unwrap();
    let builder = || OnchainFacilitator::builder().signer(settlement_key()).network(devnet.network());
    assert_eq!(OnchainFacilitator::builder().build().await.unwrap_err(), OnchainBuildError::Missing("network"));
    assert!(matches!(builder().build().await, Err(OnchainBuildError::Missing(_))));
    let wrong = builder().network(tower_x402::Network::BASE).client(devnet.rpc_client()).build().await.unwrap_err();
    assert!(matches!(wrong, OnchainBuildError::WrongChain { .. }));
    assert_eq!(builder().rpc_url("not a url SECRET").build().await.unwrap_err(), OnchainBuildError::Url);
    let unreachable = builder().rpc_url("http://127.0.0.1:9/v2/SECRET");
    assert!(!format!("{unreachable:?}").contains("SECRET"));
    let error = unreachable.build().await.unwrap_err();
    assert_eq!(error, OnchainBuildError::Node);
    assert!(!format!("{error:?} {error}").contains("SECRET"));
    let asleep = std::sync::Arc::new(tower_x402::ManualClock::at(1_000_000));
    let clock = builder().client(devnet.rpc_client()).clock(asleep).build().await.unwrap_err();
    assert!(matches!(clock, OnchainBuildError::Clock { .. }));
    // Through a port and a provider it is the same chain.
    let port = devnet.serve("127.0.0.1:0").await.unwrap();
    let facilitator = builder().rpc_url(port.url()).build().await.unwrap();
    assert_eq!(facilitator.network(), devnet.network());
    builder().provider(devnet.provider()).build().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn unproven_signatures_wait_for_their_turn_and_others_do_not() {
    let stage = Stage::with(|d| d, |b| b).await;
    // The first request has one of them, the second one those that came meanwhile.
    stage.devnet.faults().set(|call| match call.index {
        0 | 1 => Fault::Delay(std::time::Duration::from_secs(3)),
        _ => Fault::None,
    });
    let stranger = new_key();
    let made_up = [(); 9].map(|()| stage.payment_from(&stranger, authorization::random_address()));
    let honest = stage.payment(&stage.payer(1));
    let made_up = join_all(made_up.iter().map(|payment| stage.verify(payment)));
    let (mut made_up, honest) = tokio::join!(made_up, stage.verify(&honest));
    let last = made_up.pop();
    assert!(matches!(last, Some(Err(VerifyError::Unavailable(FacilitatorError::Busy { .. })))), "{last:?}");
    assert!(made_up.iter().all(|verified| matches!(verified, Err(VerifyError::Invalid(_)))), "{made_up:?}");
    honest.unwrap();
}
