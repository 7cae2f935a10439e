//! The devnet's token is compared with Circle's on anvil: the same calls in the same states, the same answers.

use alloy_primitives::{Address, B256, Bytes, U256, address};
use alloy_provider::{DynProvider, Provider};
use alloy_rpc_types_eth::TransactionRequest;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall, SolValue, decode_revert_reason, sol};
use support::{
    anvil::AnvilChain,
    authorization::{Signature, TransferWithAuthorization, authorization, random_address, sign, unix_now},
    chain::{Chain, creation_code, deployed_code},
    devnet::DevnetChain,
    token::{transfer_bytes, transfer_vrs},
};

sol! {
    function setOwner(address owner) external;
}

/// A contract wallet, at the same address on both chains.
const WALLET: Address = address!("0000000000000000000000000000000000c0c0c0");

/// A payment, and one way to present it to the token.
struct Case {
    name: &'static str,
    message: TransferWithAuthorization,
    calldata: Bytes,
}

#[tokio::test]
async fn the_devnet_answers_as_circles_token_on_anvil() {
    let (devnet, anvil) = (DevnetChain::start(None).await, AnvilChain::start(None).await);
    let chains: [&dyn Chain; 2] = [&devnet, &anvil];
    let (payer, delegated) = (PrivateKeySigner::random(), PrivateKeySigner::random());
    let payee = random_address();
    let cases = cases(&payer, &delegated, payee, &devnet.asset());
    let used = cases.iter().find(|case| case.name == "used").unwrap();

    for chain in chains {
        let relayer = chain.relayer().await;
        chain.set_code(WALLET, deployed_code("TestWallet")).await;
        chain.delegate(delegated.address(), WALLET).await;
        for holder in [payer.address(), delegated.address(), WALLET] {
            chain.mint(holder, 1_000_000).await;
        }
        let owner = setOwnerCall { owner: payer.address() }.abi_encode();
        assert!(relayer.send_to(chain, WALLET, owner.into()).await.status());
        assert!(relayer.send_to(chain, chain.asset().address, used.calldata.clone()).await.status());
    }

    let paying = ["good, v r s", "good, bytes", "a wallet's", "a wallet's, long", "a delegated account's"];
    assert_eq!(compare(chains, &cases, "open").await, paying);
    for chain in chains {
        chain.blacklist(payee).await;
    }
    assert!(compare(chains, &cases, "payee blacklisted").await.is_empty());
    for chain in chains {
        chain.pause().await;
    }
    assert!(compare(chains, &cases, "paused").await.is_empty());
}

fn cases(
    payer: &PrivateKeySigner,
    delegated: &PrivateKeySigner,
    payee: Address,
    asset: &tower_x402::Asset,
) -> Vec<Case> {
    let stranger = PrivateKeySigner::random();
    let from = |from: Address| authorization(from, payee, 1_000);
    let signed = |message: &TransferWithAuthorization, signer: &PrivateKeySigner| {
        transfer_bytes(message, &sign(signer, asset, message)).abi_encode()
    };
    let with_bytes = |message: &TransferWithAuthorization, signature: &[u8]| {
        let mut call = transfer_bytes(message, &Signature([0; 65]));
        call.signature = Bytes::copy_from_slice(signature);
        call.abi_encode()
    };

    let good = from(payer.address());
    let signature = sign(payer, asset, &good);
    let mut no_r = signature;
    no_r.0[..32].fill(0);
    let of_good = [
        ("good, v r s", transfer_vrs(&good, &signature).abi_encode()),
        ("good, bytes", transfer_bytes(&good, &signature).abi_encode()),
        ("v of 0 or 1", transfer_vrs(&good, &signature.with_v(signature.v() - 27)).abi_encode()),
        ("the other v", transfer_vrs(&good, &signature.with_v(55 - signature.v())).abi_encode()),
        ("high s", transfer_vrs(&good, &signature.high_s()).abi_encode()),
        ("no r", transfer_vrs(&good, &no_r).abi_encode()),
        ("64 bytes", with_bytes(&good, &signature.0[..64])),
        ("66 bytes", with_bytes(&good, &[signature.0.as_slice(), &[0]].concat())),
        ("no signature", with_bytes(&good, &[])),
        ("a stranger's", signed(&good, &stranger)),
    ];
    let of_good = of_good.map(|(name, calldata)| Case { name, message: good.clone(), calldata: calldata.into() });

    let case = |name, message: TransferWithAuthorization, signer: &PrivateKeySigner| {
        let calldata = signed(&message, signer).into();
        Case { name, message, calldata }
    };
    let late = TransferWithAuthorization { validBefore: U256::from(unix_now() - 1), ..from(payer.address()) };
    let early = TransferWithAuthorization { validAfter: U256::from(unix_now() + 600), ..from(payer.address()) };
    let rich = TransferWithAuthorization { value: U256::from(1_000_000), ..from(payer.address()) };
    let nowhere = TransferWithAuthorization { to: Address::ZERO, ..from(payer.address()) };
    let by_wallet = from(WALLET);
    let long = [sign(payer, asset, &by_wallet).0.as_slice(), &[7; 40]].concat();
    let long = Case { name: "a wallet's, long", calldata: with_bytes(&by_wallet, &long).into(), message: by_wallet };
    let others = [
        case("used", from(payer.address()), payer),
        case("late", late, payer),
        case("early", early, payer),
        case("more than there is", rich, payer),
        case("to nobody", nowhere, payer),
        case("a wallet's", from(WALLET), payer),
        case("a wallet's, refused", from(WALLET), &stranger),
        long,
        case("a delegated account's", from(delegated.address()), delegated),
        case("a delegated account's, refused", from(delegated.address()), &stranger),
    ];
    of_good.into_iter().chain(others).collect()
}

/// Compares the answers of both chains to each case, and returns the cases that both accept.
async fn compare<'a>([devnet, anvil]: [&dyn Chain; 2], cases: &'a [Case], state: &str) -> Vec<&'a str> {
    let token = devnet.asset().address;
    let mut accepted = Vec::new();
    for Case { name, message, calldata } in cases {
        let request = TransactionRequest::default().to(token).input(calldata.clone().into());
        let ours = answer(devnet.provider(), request.clone()).await;
        let theirs = answer(anvil.provider(), request).await;
        assert_eq!(ours, theirs, "{state}: {name}");
        if ours.is_ok() {
            accepted.push(*name);
        }

        let request = probe(token, message, calldata.clone());
        let ours = facts(&answer(devnet.provider(), request.clone()).await.unwrap());
        let theirs = facts(&answer(anvil.provider(), request).await.unwrap());
        assert_eq!(ours, theirs, "{state}: {name}, probed");
    }
    accepted
}

/// Returns a node's answer, or the reason of the revert.
async fn answer(provider: &DynProvider, request: TransactionRequest) -> Result<Bytes, Option<String>> {
    provider.call(request).await.map_err(|error| {
        let response = error.as_error_resp().unwrap_or_else(|| panic!("eth_call: {error}"));
        reason(&response.as_revert_data().unwrap_or_else(|| panic!("eth_call: {error}")))
    })
}

/// Reasons are compared as text: the padding that Circle's compiler leaves behind them is not always zero.
fn reason(data: &[u8]) -> Option<String> {
    decode_revert_reason(data).filter(|reason| !reason.is_empty())
}

/// Returns the call by which the library verifies a payment.
fn probe(token: Address, message: &TransferWithAuthorization, calldata: Bytes) -> TransactionRequest {
    let gas = U256::from(300_000);
    let arguments: (Address, Address, Address, B256, U256, Bytes) =
        (token, message.from, message.to, message.nonce, gas, calldata);
    let code = [creation_code("PaymentProbe").as_ref(), &arguments.abi_encode_params()].concat();
    TransactionRequest::default().input(Bytes::from(code).into())
}

/// Returns the probe's answer without the parts that differ between chains: block number, time, gas, and the size of the token's code.
fn facts(answer: &Bytes) -> ([U256; 13], Option<String>) {
    let (mut facts, revert) = <([U256; 13], Bytes)>::abi_decode_params(answer).unwrap();
    for own in [0, 1, 6, 7] {
        facts[own] = U256::ZERO;
    }
    (facts, reason(&revert))
}
