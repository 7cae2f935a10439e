//! The payment probe returns in one call everything that a verification needs.

use alloy_eips::BlockId;
use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_provider::Provider as _;
use alloy_rpc_types_eth::{TransactionInput, TransactionRequest};
use alloy_sol_types::{SolCall as _, SolValue as _, decode_revert_reason};
use tower_x402::Network;
use x402_devnet::Devnet;

use super::fixture::*;

#[derive(Debug)]
struct Probe {
    block_number: u64,
    timestamp: u64,
    payer_balance: u64,
    payer_has_code: bool,
    used: bool,
    succeeded: bool,
    gas: u64,
    token_has_code: bool,
    domain_separator: B256,
    paused: bool,
    payer_blacklisted: bool,
    payee_blacklisted: bool,
    gain: u64,
    reason: Option<String>,
}

async fn probe(devnet: &Devnet, token: Address, payment: &TransferWithAuthorization, calldata: Bytes) -> Probe {
    let arguments = (token, payment.from, payment.to, payment.nonce, U256::from(300_000), calldata).abi_encode_params();
    let code = bytecode(include_str!("../../../contracts/artifacts/PaymentProbe.json"));
    let input = TransactionInput::new([code.as_ref(), &arguments].concat().into());
    let request = TransactionRequest { input, ..TransactionRequest::default() };
    let answer = devnet.provider().call(request).block(BlockId::latest()).await.unwrap();
    assert_ne!(answer[0], 0xef);
    let (facts, reason) = <([U256; 13], Bytes)>::abi_decode_params(&answer).unwrap();
    let [block, time, balance, payer_code, used, succeeded, gas, token_code, domain, paused, payer, payee, gain] =
        facts;
    Probe {
        block_number: block.to(),
        timestamp: time.to(),
        payer_balance: balance.to(),
        payer_has_code: !payer_code.is_zero(),
        used: !used.is_zero(),
        succeeded: !succeeded.is_zero(),
        gas: gas.to(),
        token_has_code: !token_code.is_zero(),
        domain_separator: domain.into(),
        paused: !paused.is_zero(),
        payer_blacklisted: !payer.is_zero(),
        payee_blacklisted: !payee.is_zero(),
        gain: gain.to(),
        reason: Some(reason).filter(|reason| !reason.is_empty()).and_then(|reason| decode_revert_reason(&reason)),
    }
}

#[tokio::test]
async fn a_good_payment() {
    let (devnet, clock) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    clock.advance(5);
    let payment = authorization(payer.address(), 1_000);
    let answer = probe(&devnet, asset.address, &payment, payment.signed(&asset, &payer)).await;
    assert!(answer.succeeded && answer.token_has_code && !answer.payer_has_code && !answer.used, "{answer:?}");
    assert!(!answer.paused && !answer.payer_blacklisted && !answer.payee_blacklisted);
    assert_eq!((answer.payer_balance, answer.gain), (1_000_000, 1_000));
    assert_eq!((answer.block_number, answer.timestamp), (devnet.block_number(), NOW + 5));
    assert!((40_000..110_000).contains(&answer.gas), "{}", answer.gas);
    let separator = devnet.call(asset.address, Usdc::DOMAIN_SEPARATORCall {}.abi_encode()).unwrap();
    assert_eq!(answer.domain_separator.as_slice(), separator.as_ref());
    assert_eq!(devnet.balance_of(PAYEE).unwrap(), "$0".parse().unwrap(), "nothing moved");
}

#[tokio::test]
async fn a_payer_without_the_money() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let payment = authorization(payer.address(), 2_000_000);
    let answer = probe(&devnet, asset.address, &payment, payment.signed(&asset, &payer)).await;
    assert!(!answer.succeeded);
    assert_eq!((answer.payer_balance, answer.gain), (1_000_000, 0));
    assert!(answer.reason.unwrap().ends_with("ERC20: transfer amount exceeds balance"));
}

#[tokio::test]
async fn a_used_nonce() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let payment = authorization(payer.address(), 1_000);
    let calldata = payment.signed(&asset, &payer);
    send(&devnet, calldata.clone()).unwrap();
    let answer = probe(&devnet, asset.address, &payment, calldata).await;
    assert!(answer.used && !answer.succeeded);
    assert!(answer.reason.unwrap().ends_with("FiatTokenV2: authorization is used or canceled"));
}

#[tokio::test]
async fn a_signature_for_another_domain() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let payment = authorization(payer.address(), 1_000);
    let elsewhere = support::changed(asset.clone(), |asset| asset.network = Network::BASE);
    let answer = probe(&devnet, asset.address, &payment, payment.signed(&elsewhere, &payer)).await;
    assert!(!answer.succeeded && !answer.used);
    assert!(answer.reason.unwrap().ends_with("FiatTokenV2: invalid signature"));
}

#[tokio::test]
async fn a_payer_with_code() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let wallet = deploy_wallet(&devnet, PAYEE);
    devnet.delegate(payer.address(), wallet);
    let payment = authorization(payer.address(), 1_000);
    let calldata = payment.signed(&asset, &payer);
    let answer = probe(&devnet, asset.address, &payment, calldata.clone()).await;
    assert!(answer.payer_has_code && answer.succeeded);

    // One that burns all it is given costs the probe no more than its gas cap.
    let burn = TestWallet::setGasBurnCall { amount: U256::MAX }.abi_encode();
    devnet.execute(RELAYER, payer.address(), burn).unwrap();
    let answer = probe(&devnet, asset.address, &payment, calldata).await;
    assert!(!answer.succeeded && answer.gas <= 310_000, "{answer:?}");
}

#[tokio::test]
async fn a_frozen_token_and_listed_parties() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    devnet.administer(Usdc::pauseCall {}.abi_encode()).unwrap();
    devnet.administer(Usdc::blacklistCall { account: payer.address() }.abi_encode()).unwrap();
    devnet.administer(Usdc::blacklistCall { account: PAYEE }.abi_encode()).unwrap();
    let payment = authorization(payer.address(), 1_000);
    let answer = probe(&devnet, asset.address, &payment, payment.signed(&asset, &payer)).await;
    assert!(answer.paused && answer.payer_blacklisted && answer.payee_blacklisted && !answer.succeeded);
}

#[tokio::test]
async fn no_token_at_all() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let payment = authorization(payer.address(), 1_000);
    let answer = probe(&devnet, Address::repeat_byte(0xee), &payment, payment.signed(&asset, &payer)).await;
    assert!(!answer.token_has_code && !answer.succeeded && !answer.used && answer.reason.is_none());
    assert_eq!((answer.payer_balance, answer.gain, answer.gas, answer.domain_separator), (0, 0, 0, B256::ZERO));
}

#[tokio::test]
async fn a_token_that_is_hostile_to_callers() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let payment = authorization(payer.address(), 1_000);
    let calldata = payment.signed(&asset, &payer);
    // Reverts with 60,000 bytes, whatever is asked.
    devnet.set_code(Address::repeat_byte(0xee), Bytes::from_static(&[0x61, 0xea, 0x60, 0x5f, 0xfd]));
    let answer = probe(&devnet, Address::repeat_byte(0xee), &payment, calldata.clone()).await;
    assert!(answer.token_has_code && !answer.succeeded);
    // Burns all gas, whatever is asked.
    devnet.set_code(Address::repeat_byte(0xee), Bytes::from_static(&[0xfe]));
    let answer = probe(&devnet, Address::repeat_byte(0xee), &payment, calldata).await;
    assert!(answer.token_has_code && !answer.succeeded);
    assert_eq!(devnet.provider().get_code_at(asset.address).block_id(BlockId::latest()).await.unwrap()[0], 0x60);
}
