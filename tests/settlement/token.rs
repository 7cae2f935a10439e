//! The token behaves as x402 relies on: Circle's own bytecode on anvil, and the devnet's stand-in for it.

use std::time::Duration;

use alloy_primitives::{Address, B256, U256, b256, hex};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolEvent;
use serde_json::Value;
#[cfg(feature = "test-anvil")]
use support::anvil::AnvilChain;
use support::{
    authorization::{
        CancelAuthorization, Signature, TransferWithAuthorization, authorization, domain, random_address, sign,
        unix_now,
    },
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
    token::{Token, cancel_vrs, transfer_bytes, transfer_vrs},
};
use tower_x402::Network;

/// Base's.
const BLOCK_TIME: Duration = Duration::from_millis(200);

on_every_chain! {
    the_token_is_usdc_of_base_sepolia,
    a_signature_of_the_vectors_pays,
    both_overloads_move_money_and_say_so,
    an_authorization_is_used_once,
    only_low_s_with_v_27_or_28_is_accepted,
    a_cancelled_authorization_moves_nothing,
    time_limits_are_strict,
    a_contract_wallet_pays_through_erc1271_only,
    a_delegated_account_pays_by_its_code,
    a_blacklisted_payer_and_a_paused_token_move_nothing,
    nothing_moves_beyond_the_balance,
}

#[test]
fn the_domain_of_base_is_pinned_too() {
    let pinned = b256!("02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f");
    assert_eq!(domain(&Network::BASE.usdc().unwrap()).separator(), pinned);
}

#[tokio::test]
async fn blocks_come_by_the_clock_on_devnet() {
    blocks_come_by_the_clock(&DevnetChain::start(Some(BLOCK_TIME)).await).await;
}

#[cfg(feature = "test-anvil")]
#[tokio::test]
async fn blocks_come_by_the_clock_on_anvil() {
    blocks_come_by_the_clock(&AnvilChain::start(Some(BLOCK_TIME)).await).await;
}

async fn blocks_come_by_the_clock(chain: &dyn Chain) {
    let payer = payer_with(chain, 1_000).await;
    let message = authorization(payer.address(), random_address(), 300);
    let signature = sign(&payer, &chain.asset(), &message);
    let receipt = chain.relayer().await.send(chain, transfer_vrs(&message, &signature)).await;
    assert!(receipt.status());

    tokio::time::sleep(5 * BLOCK_TIME).await;
    assert!(chain.block_number().await >= receipt.block_number.unwrap() + 3);
    assert!(chain.timestamp().await.abs_diff(unix_now()) <= 2, "several blocks share a second");
}

async fn the_token_is_usdc_of_base_sepolia(chain: &dyn Chain) {
    let pinned = b256!("71f17a3b2ff373b803d70a5a07c046c1a2bc8e89c09ef722fcb047abe94c9818");
    assert_eq!(chain.simulate(Token::DOMAIN_SEPARATORCall {}).await.unwrap(), pinned);
    assert_eq!(domain(&chain.asset()).separator(), pinned);
    assert_eq!(chain.simulate(Token::nameCall {}).await.unwrap(), "USDC");
    assert_eq!(chain.simulate(Token::versionCall {}).await.unwrap(), "2");
    assert_eq!(chain.simulate(Token::decimalsCall {}).await.unwrap(), 6);
}

async fn a_signature_of_the_vectors_pays(chain: &dyn Chain) {
    let vectors: Value = serde_json::from_str(include_str!("../vectors/eip3009.json")).unwrap();
    let cases = vectors["cases"].as_array().unwrap();
    let case = cases.iter().find(|case| case["label"] == "base sepolia: a tenth of a cent").unwrap();
    let field = |name: &str| case["authorization"][name].as_str().unwrap();
    let message = TransferWithAuthorization {
        from: field("from").parse().unwrap(),
        to: field("to").parse().unwrap(),
        value: field("value").parse().unwrap(),
        validAfter: field("validAfter").parse().unwrap(),
        validBefore: field("validBefore").parse().unwrap(),
        nonce: field("nonce").parse().unwrap(),
    };
    let signature = hex::decode_to_array(case["signature"].as_str().unwrap()).map(Signature).unwrap();

    chain.mint(message.from, 1_000).await;
    chain.set_next_timestamp(message.validBefore.to::<u64>() - 1).await;
    assert!(chain.relayer().await.send(chain, transfer_bytes(&message, &signature)).await.status());
    assert_eq!(chain.balance(message.to).await, 1_000);
}

async fn both_overloads_move_money_and_say_so(chain: &dyn Chain) {
    let (payer, payee) = (payer_with(chain, 1_000).await, random_address());
    let relayer = chain.relayer().await;
    let (first, second) = (authorization(payer.address(), payee, 300), authorization(payer.address(), payee, 50));

    let signature = sign(&payer, &chain.asset(), &first);
    let receipt = relayer.send(chain, transfer_vrs(&first, &signature)).await;
    assert!(receipt.status());
    let used = receipt.logs().iter().find_map(|log| log.log_decode::<Token::AuthorizationUsed>().ok()).unwrap();
    assert_eq!((used.inner.authorizer, used.inner.nonce), (payer.address(), first.nonce));

    let signature = sign(&payer, &chain.asset(), &second);
    assert!(relayer.send(chain, transfer_bytes(&second, &signature)).await.status());

    assert_eq!((chain.balance(payer.address()).await, chain.balance(payee).await), (650, 350));
    let transfers = chain.token_transfers(payee).await;
    assert_eq!(transfers.iter().map(|transfer| transfer.units).collect::<Vec<_>>(), [300, 50]);
    assert!(transfers.iter().all(|transfer| transfer.from == payer.address()));
    assert_eq!(transfers[0].transaction, receipt.transaction_hash);
    assert_eq!(chain.gas_used(receipt.transaction_hash).await, receipt.gas_used);
}

async fn an_authorization_is_used_once(chain: &dyn Chain) {
    let (payer, payee) = (payer_with(chain, 1_000).await, random_address());
    let relayer = chain.relayer().await;
    let message = authorization(payer.address(), payee, 300);
    let signature = sign(&payer, &chain.asset(), &message);
    assert!(relayer.send(chain, transfer_vrs(&message, &signature)).await.status());
    assert!(used(chain, message.from, message.nonce).await);

    assert!(!relayer.send(chain, transfer_vrs(&message, &signature)).await.status());
    assert!(!relayer.send(chain, transfer_bytes(&message, &signature)).await.status());
    assert_eq!(chain.balance(payee).await, 300);
    let refused = chain.simulate(transfer_vrs(&message, &signature)).await.unwrap_err();
    assert!(refused.contains("used or canceled"), "{refused}");
}

async fn only_low_s_with_v_27_or_28_is_accepted(chain: &dyn Chain) {
    let payer = payer_with(chain, 1_000).await;
    let message = authorization(payer.address(), random_address(), 300);
    let good = sign(&payer, &chain.asset(), &message);
    assert!(chain.simulate(transfer_vrs(&message, &good)).await.is_ok());

    let flipped = good.with_v(55 - good.v());
    for bad in [good.high_s(), good.with_v(good.v() - 27), good.with_v(0), good.with_v(1), flipped] {
        assert!(chain.simulate(transfer_vrs(&message, &bad)).await.is_err(), "{bad:?}");
        assert!(chain.simulate(transfer_bytes(&message, &bad)).await.is_err(), "{bad:?}");
    }
    let mut long = transfer_bytes(&message, &good);
    long.signature = [good.bytes().as_ref(), &[0]].concat().into();
    assert!(chain.simulate(long).await.is_err(), "66 bytes");
    assert!(!chain.relayer().await.send(chain, transfer_vrs(&message, &good.high_s())).await.status());
}

async fn a_cancelled_authorization_moves_nothing(chain: &dyn Chain) {
    let (payer, payee) = (payer_with(chain, 1_000).await, random_address());
    let relayer = chain.relayer().await;
    let message = authorization(payer.address(), payee, 300);
    let cancel = CancelAuthorization { authorizer: payer.address(), nonce: message.nonce };
    let receipt = relayer.send(chain, cancel_vrs(&cancel, &sign(&payer, &chain.asset(), &cancel))).await;
    assert!(receipt.status());
    assert!(receipt.logs().iter().any(|log| log.topic0() == Some(&Token::AuthorizationCanceled::SIGNATURE_HASH)));

    // The state alone does not tell a payment from a cancellation.
    assert!(used(chain, message.from, message.nonce).await);
    let signature = sign(&payer, &chain.asset(), &message);
    assert!(!relayer.send(chain, transfer_vrs(&message, &signature)).await.status());
    assert_eq!(chain.balance(payee).await, 0);
}

async fn time_limits_are_strict(chain: &dyn Chain) {
    let (payer, payee) = (payer_with(chain, 1_000).await, random_address());
    let relayer = chain.relayer().await;
    let start = chain.timestamp().await + 1_000;
    let cases = [(0, 1, false), (-1, 0, false), (-1, 1, true)];
    for (second, (after, before, accepted)) in (start..).zip(cases) {
        let mut message = authorization(payer.address(), payee, 100);
        message.validAfter = U256::from(second.saturating_add_signed(after));
        message.validBefore = U256::from(second.saturating_add_signed(before));
        chain.set_next_timestamp(second).await;
        let receipt = relayer.send(chain, transfer_vrs(&message, &sign(&payer, &chain.asset(), &message))).await;
        assert_eq!(chain.timestamp().await, second);
        assert_eq!(receipt.status(), accepted, "at {second}: after {after:+}, before {before:+}");
    }
    assert_eq!(chain.balance(payee).await, 100);
}

async fn a_contract_wallet_pays_through_erc1271_only(chain: &dyn Chain) {
    let (owner, payee) = (PrivateKeySigner::random(), random_address());
    let wallet = chain.deploy_wallet(owner.address()).await;
    chain.mint(wallet, 1_000).await;
    let message = authorization(wallet, payee, 300);

    let stranger = sign(&PrivateKeySigner::random(), &chain.asset(), &message);
    assert!(chain.simulate(transfer_bytes(&message, &stranger)).await.is_err());

    // The wallet, not the token, judges the signature: even a high s or a long one.
    let signature = sign(&owner, &chain.asset(), &message);
    assert!(chain.simulate(transfer_bytes(&message, &signature.high_s())).await.is_ok());
    let mut long = transfer_bytes(&message, &signature);
    long.signature = [signature.bytes().as_ref(), &[7; 100]].concat().into();
    assert!(chain.relayer().await.send(chain, long).await.status());
    assert_eq!((chain.balance(wallet).await, chain.balance(payee).await), (700, 300));
}

async fn a_delegated_account_pays_by_its_code(chain: &dyn Chain) {
    let (payer, payee) = (payer_with(chain, 1_000).await, random_address());
    let message = authorization(payer.address(), payee, 300);
    let signature = sign(&payer, &chain.asset(), &message);

    // A delegation to code that knows no ERC-1271 makes a valid ECDSA signature worthless.
    chain.delegate(payer.address(), chain.asset().address).await;
    assert!(chain.simulate(transfer_bytes(&message, &signature)).await.is_err());

    let wallet = chain.deploy_wallet(random_address()).await;
    chain.delegate(payer.address(), wallet).await;
    assert!(chain.relayer().await.send(chain, transfer_bytes(&message, &signature)).await.status());
    assert_eq!(chain.balance(payee).await, 300);
}

async fn a_blacklisted_payer_and_a_paused_token_move_nothing(chain: &dyn Chain) {
    let (payer, barred) = (payer_with(chain, 1_000).await, payer_with(chain, 1_000).await);
    let transfer = |payer: &PrivateKeySigner| {
        let message = authorization(payer.address(), Address::repeat_byte(7), 1);
        transfer_vrs(&message, &sign(payer, &chain.asset(), &message))
    };
    chain.blacklist(barred.address()).await;
    let refused = chain.simulate(transfer(&barred)).await.unwrap_err();
    assert!(refused.contains("blacklisted"), "{refused}");
    assert!(chain.simulate(transfer(&payer)).await.is_ok());

    chain.pause().await;
    let refused = chain.simulate(transfer(&payer)).await.unwrap_err();
    assert!(refused.contains("paused"), "{refused}");
}

async fn nothing_moves_beyond_the_balance(chain: &dyn Chain) {
    let payer = payer_with(chain, 299).await;
    let message = authorization(payer.address(), random_address(), 300);
    let refused = chain.simulate(transfer_vrs(&message, &sign(&payer, &chain.asset(), &message))).await.unwrap_err();
    assert!(refused.contains("exceeds balance"), "{refused}");
}

async fn payer_with(chain: &dyn Chain, units: u64) -> PrivateKeySigner {
    let payer = PrivateKeySigner::random();
    chain.mint(payer.address(), units).await;
    payer
}

async fn used(chain: &dyn Chain, authorizer: Address, nonce: B256) -> bool {
    chain.simulate(Token::authorizationStateCall { authorizer, nonce }).await.unwrap()
}
