//! The token of the devnet behaves as USDC.

use alloy_primitives::{Bytes, U256, b256};
use alloy_signer::SignerSync as _;
use alloy_sol_types::{SolCall as _, SolEvent as _};
use x402_devnet::Devnet;

use super::fixture::*;

#[tokio::test]
async fn domains_are_those_of_usdc_on_base() {
    // Read from the deployed contracts.
    for (chain_id, separator) in [
        (8453, b256!("02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f")),
        (84532, b256!("71f17a3b2ff373b803d70a5a07c046c1a2bc8e89c09ef722fcb047abe94c9818")),
    ] {
        let devnet = Devnet::builder().chain_id(chain_id).start().await.unwrap();
        let answer = devnet.call(devnet.asset().address, Usdc::DOMAIN_SEPARATORCall {}.abi_encode()).unwrap();
        assert_eq!(answer, Bytes::from(separator), "{chain_id}");
    }
}

#[tokio::test]
async fn both_overloads_transfer_and_emit_events() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let mut authorization = authorization(payer.address(), 1_000);
    let signature = authorization.sign(&asset, &payer);
    let receipt =
        send(&devnet, authorization.with_vrs(27 + u8::from(signature.v()), signature.r(), signature.s())).unwrap();
    let logs = receipt.logs();
    let used = Usdc::AuthorizationUsed::decode_log(&logs[0].inner).unwrap();
    assert_eq!((used.authorizer, used.nonce), (payer.address(), authorization.nonce));
    let moved = Usdc::Transfer::decode_log(&logs[1].inner).unwrap();
    assert_eq!((moved.from, moved.to, moved.value), (payer.address(), PAYEE, U256::from(1_000)));

    authorization.nonce.0[0] ^= 1;
    send(&devnet, authorization.signed(&asset, &payer)).unwrap();
    assert_eq!(devnet.balance_of(PAYEE).unwrap(), "$0.002".parse().unwrap());
    assert_eq!(devnet.balance_of(payer.address()).unwrap(), "$0.998".parse().unwrap());
}

#[tokio::test]
async fn used_or_cancelled_authorization_cannot_be_used() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let mut authorization = authorization(payer.address(), 1_000);
    send(&devnet, authorization.signed(&asset, &payer)).unwrap();
    let error = send(&devnet, authorization.signed(&asset, &payer)).unwrap_err();
    assert_eq!(error, "execution reverted: FiatTokenV2: authorization is used or canceled");

    authorization.nonce.0[0] ^= 1;
    let cancel = CancelAuthorization { authorizer: payer.address(), nonce: authorization.nonce };
    let signature = payer.sign_hash_sync(&digest(&asset, &cancel)).unwrap();
    let cancel = Usdc::cancelAuthorizationCall {
        authorizer: cancel.authorizer,
        nonce: cancel.nonce,
        signature: signature.as_bytes().into(),
    };
    send(&devnet, cancel.abi_encode().into()).unwrap();
    let error = send(&devnet, authorization.signed(&asset, &payer)).unwrap_err();
    assert_eq!(error, "execution reverted: FiatTokenV2: authorization is used or canceled");
    assert_eq!(devnet.balance_of(PAYEE).unwrap(), "$0.001".parse().unwrap());
}

#[tokio::test]
async fn signatures_have_one_form_only() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let authorization = authorization(payer.address(), 1_000);
    let signature = authorization.sign(&asset, &payer);
    let (v, r, s) = (u8::from(signature.v()), signature.r(), signature.s());
    for (calldata, reason) in [
        (authorization.with_vrs(v, r, s), "ECRecover: invalid signature 'v' value"),
        (authorization.with_vrs(28 - v, r, CURVE_ORDER - s), "ECRecover: invalid signature 's' value"),
        (authorization.with_vrs(28 - v, r, s), "FiatTokenV2: invalid signature"),
        (authorization.with_vrs(27 + v, U256::ZERO, s), "ECRecover: invalid signature"),
        (authorization.with_bytes(signature.as_bytes()[..64].to_vec()), "ECRecover: invalid signature length"),
        (authorization.signed(&asset, &key(0x33)), "FiatTokenV2: invalid signature"),
    ] {
        assert_eq!(send(&devnet, calldata).unwrap_err(), format!("execution reverted: {reason}"));
    }
    send(&devnet, authorization.with_vrs(27 + v, r, s)).unwrap();
}

#[tokio::test]
async fn both_ends_of_the_window_are_outside() {
    let (devnet, clock) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let mut authorization = authorization(payer.address(), 1_000);
    authorization.validAfter = U256::from(NOW);
    authorization.validBefore = U256::from(NOW + 2);
    let calldata = authorization.signed(&asset, &payer);
    assert!(send(&devnet, calldata.clone()).unwrap_err().ends_with("authorization is not yet valid"));
    clock.advance(2);
    assert!(send(&devnet, calldata).unwrap_err().ends_with("authorization is expired"));
}

#[tokio::test]
async fn balance_pause_and_blacklist_are_respected() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let too_much = authorization(payer.address(), 1_000_001).signed(&asset, &payer);
    assert!(send(&devnet, too_much).unwrap_err().ends_with("ERC20: transfer amount exceeds balance"));

    let calldata = authorization(payer.address(), 1_000).signed(&asset, &payer);
    devnet.administer(Usdc::pauseCall {}.abi_encode()).unwrap();
    assert!(send(&devnet, calldata.clone()).unwrap_err().ends_with("Pausable: paused"));
    devnet.administer(Usdc::unpauseCall {}.abi_encode()).unwrap();
    devnet.administer(Usdc::blacklistCall { account: PAYEE }.abi_encode()).unwrap();
    assert!(send(&devnet, calldata).unwrap_err().ends_with("Blacklistable: account is blacklisted"));
}

#[tokio::test]
async fn contract_wallet_verifies_its_own_signatures() {
    let (devnet, _) = devnet().await;
    let (asset, owner) = (devnet.asset(), key(0x44));
    let wallet = deploy_wallet(&devnet, owner.address());
    devnet.mint(wallet, "$1".parse().unwrap()).unwrap();
    let mut authorization = authorization(wallet, 1_000);
    let mut long = authorization.sign(&asset, &owner).as_bytes().to_vec();
    long.extend([0xab; 31]);
    send(&devnet, authorization.with_bytes(long)).unwrap();

    authorization.nonce.0[0] ^= 1;
    let calldata = authorization.signed(&asset, &owner);
    devnet.execute(RELAYER, wallet, TestWallet::setAcceptingCall { accepting: false }.abi_encode()).unwrap();
    assert!(send(&devnet, calldata.clone()).unwrap_err().ends_with("FiatTokenV2: invalid signature"));

    devnet.execute(RELAYER, wallet, TestWallet::setAcceptingCall { accepting: true }.abi_encode()).unwrap();
    devnet.execute(RELAYER, wallet, TestWallet::setGasBurnCall { amount: U256::from(300_000) }.abi_encode()).unwrap();
    assert!(send(&devnet, calldata).unwrap().gas_used > 300_000);
}

#[tokio::test]
async fn delegated_account_verifies_its_own_signatures() {
    let (devnet, _) = devnet().await;
    let (asset, payer) = (devnet.asset(), payer(&devnet));
    let calldata = authorization(payer.address(), 1_000).signed(&asset, &payer);
    // Code without ERC-1271 refuses even the account's own signature.
    devnet.delegate(payer.address(), asset.address);
    assert!(send(&devnet, calldata.clone()).unwrap_err().ends_with("FiatTokenV2: invalid signature"));
    devnet.delegate(payer.address(), deploy_wallet(&devnet, PAYEE));
    send(&devnet, calldata).unwrap();
}
