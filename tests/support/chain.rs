//! What a test may ask of a chain, whichever one it runs on.

use std::time::Duration;

use alloy_network::EthereumWallet;
use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_provider::{DynProvider, Provider, ProviderBuilder};
use alloy_rpc_types_eth::{BlockNumberOrTag, Filter, TransactionReceipt, TransactionRequest};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall, SolEvent, SolValue, decode_revert_reason};
use async_trait::async_trait;
use tower_x402::{Asset, Network};

use super::token::Token;

/// A Base Sepolia look-alike with USDC on it, of which the test is the master.
///
/// Chains start with nothing but the token. What only the chain's master can do is required; the rest goes over JSON-RPC
/// and is the same everywhere.
#[async_trait]
pub trait Chain: Send + Sync {
    /// Where the chain serves JSON-RPC.
    fn rpc_url(&self) -> String;
    /// A provider at [`Self::rpc_url`], without wallet or fillers.
    fn provider(&self) -> &DynProvider;

    /// Gives `to` new tokens.
    async fn mint(&self, to: Address, units: u64);
    /// Gives `account` ether.
    async fn fund(&self, account: Address, wei: U256);
    /// Puts runtime code at `account`.
    async fn set_code(&self, account: Address, code: Bytes);
    /// Runs `init_code` and returns where the contract is.
    async fn deploy(&self, init_code: Bytes) -> Address;
    /// Makes one block now.
    async fn mine(&self);
    /// Makes the next block carry this timestamp. Whether time goes on after it is up to the chain.
    async fn set_next_timestamp(&self, seconds: u64);
    /// Bars `account` from sending and receiving tokens.
    async fn blacklist(&self, account: Address);
    /// Stops all transfers of the token.
    async fn pause(&self);

    /// USDC, at its canonical address.
    fn asset(&self) -> Asset {
        Network::BASE_SEPOLIA.usdc().expect("USDC on Base Sepolia is known")
    }

    /// Deploys an ERC-1271 wallet that accepts the signatures of `owner`.
    async fn deploy_wallet(&self, owner: Address) -> Address {
        let code = [creation_code("TestWallet").as_ref(), &owner.abi_encode()].concat();
        self.deploy(code.into()).await
    }

    /// Makes `account` an EIP-7702 account that runs the code of `implementation`.
    async fn delegate(&self, account: Address, implementation: Address) {
        self.set_code(account, [&[0xef, 0x01, 0x00], implementation.as_slice()].concat().into()).await;
    }

    /// The tokens of `account`.
    async fn balance(&self, account: Address) -> u64 {
        let balance = call(self.provider(), self.asset().address, Token::balanceOfCall { account }).await;
        let balance = balance.expect("balanceOf answers");
        balance.try_into().expect("balances in tests fit u64")
    }

    /// The number of the latest block.
    async fn block_number(&self) -> u64 {
        self.provider().get_block_number().await.expect("eth_blockNumber")
    }

    /// The timestamp of the latest block.
    async fn timestamp(&self) -> u64 {
        let block = self.provider().get_block_by_number(BlockNumberOrTag::Latest).await.expect("eth_getBlockByNumber");
        block.expect("there is a latest block").header.timestamp
    }

    /// All transfers of the token to `to`, oldest first.
    async fn token_transfers(&self, to: Address) -> Vec<Transfer> {
        let filter = Filter::new()
            .from_block(BlockNumberOrTag::Earliest)
            .to_block(BlockNumberOrTag::Latest)
            .address(self.asset().address)
            .event_signature(Token::Transfer::SIGNATURE_HASH)
            .topic2(to);
        let logs = self.provider().get_logs(&filter).await.expect("eth_getLogs");
        logs.iter()
            .map(|log| {
                let event = log.log_decode::<Token::Transfer>().expect("a Transfer event");
                Transfer {
                    transaction: log.transaction_hash.expect("mined logs name their transaction"),
                    from: event.inner.from,
                    units: event.inner.value.try_into().expect("amounts in tests fit u64"),
                }
            })
            .collect()
    }

    /// The receipt of a transaction, waiting for it up to ten seconds.
    async fn receipt(&self, transaction: B256) -> TransactionReceipt {
        for _ in 0..500 {
            let receipt =
                self.provider().get_transaction_receipt(transaction).await.expect("eth_getTransactionReceipt");
            match receipt {
                Some(receipt) => return receipt,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        panic!("no receipt of {transaction} in ten seconds");
    }

    /// The gas a transaction used.
    async fn gas_used(&self, transaction: B256) -> u64 {
        self.receipt(transaction).await.gas_used
    }

    /// A new key with an ether, to pay for gas.
    async fn gas_key(&self) -> PrivateKeySigner {
        let key = PrivateKeySigner::random();
        self.fund(key.address(), U256::from(10).pow(U256::from(18))).await;
        key
    }

    /// A new account with a hundred ether that sends transactions.
    async fn relayer(&self) -> Relayer {
        let signer = PrivateKeySigner::random();
        let address = signer.address();
        self.fund(address, U256::from(100) * U256::from(10).pow(U256::from(18))).await;
        Relayer::of(&self.rpc_url(), signer)
    }
}

impl dyn Chain + '_ {
    /// What a call of the token returns when nothing is sent, or why it reverts.
    pub async fn simulate<C: SolCall>(&self, message: C) -> Result<C::Return, String> {
        call(self.provider(), self.asset().address, message).await
    }
}

/// One transfer of the token, read from its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub transaction: B256,
    pub from: Address,
    pub units: u64,
}

/// An account that pays for transactions.
pub struct Relayer {
    pub address: Address,
    provider: DynProvider,
}

impl Relayer {
    /// The account of this key, which must have ether.
    pub fn of(rpc_url: &str, signer: PrivateKeySigner) -> Self {
        let (address, url) = (signer.address(), rpc_url.parse().expect("rpc_url is a URL"));
        let provider = ProviderBuilder::new().wallet(EthereumWallet::from(signer)).connect_http(url).erased();
        Self { address, provider }
    }

    /// Sends a call of `chain`'s token and waits for its receipt. It is sent even if it will revert.
    pub async fn send(&self, chain: &dyn Chain, message: impl SolCall) -> TransactionReceipt {
        self.send_to(chain, chain.asset().address, message.abi_encode().into()).await
    }

    /// Sends a call and waits for its receipt. It is sent even if it will revert.
    pub async fn send_to(&self, chain: &dyn Chain, to: Address, calldata: Bytes) -> TransactionReceipt {
        self.send_with_gas(chain, to, calldata, 500_000).await
    }

    /// The same with another gas limit.
    pub async fn send_with_gas(
        &self,
        chain: &dyn Chain,
        to: Address,
        calldata: Bytes,
        gas_limit: u64,
    ) -> TransactionReceipt {
        let request = TransactionRequest::default()
            .to(to)
            .input(calldata.into())
            .gas_limit(gas_limit)
            .max_fee_per_gas(100_000_000_000)
            .max_priority_fee_per_gas(0);
        let pending = self.provider.send_transaction(request).await.expect("eth_sendRawTransaction");
        chain.receipt(*pending.tx_hash()).await
    }
}

/// The creation code of one of this repository's contracts.
pub fn creation_code(contract: &str) -> Bytes {
    artifact(contract, "bytecode")
}

/// The runtime code of one of this repository's contracts.
pub fn deployed_code(contract: &str) -> Bytes {
    artifact(contract, "deployedBytecode")
}

fn artifact(contract: &str, field: &str) -> Bytes {
    let package = if contract.starts_with("Devnet") { "crates/x402-devnet/" } else { "" };
    let path = crate::repository().join(format!("{package}contracts/artifacts/{contract}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let artifact: serde_json::Value = serde_json::from_str(&text).expect("artifacts are JSON");
    artifact[field].as_str().expect("artifacts have bytecode").parse().expect("bytecode is hex")
}

/// What a call returns when nothing is sent, or why it reverts.
pub async fn call<C: SolCall>(provider: &DynProvider, to: Address, message: C) -> Result<C::Return, String> {
    let request = TransactionRequest::default().to(to).input(message.abi_encode().into());
    let output = provider.call(request).await.map_err(|error| match error.as_error_resp() {
        Some(response) => response
            .as_revert_data()
            .and_then(|data| decode_revert_reason(&data))
            .unwrap_or_else(|| response.message.to_string()),
        None => panic!("eth_call: {error}"),
    })?;
    Ok(C::abi_decode_returns(&output).expect("the token answers by its ABI"))
}

/// Runs each test on every chain: `on_every_chain! { a }` makes `devnet::a` and, with the feature `test-anvil`, `anvil::a`
/// of `async fn a(chain: &dyn Chain)`. Blocks come with the transactions.
#[macro_export]
macro_rules! on_every_chain {
    ($($test:ident),* $(,)?) => {
        mod devnet {
            $(
                #[tokio::test]
                async fn $test() {
                    super::$test(&$crate::devnet::DevnetChain::start(None).await).await;
                }
            )*
        }

        #[cfg(feature = "test-anvil")]
        mod anvil {
            $(
                #[tokio::test]
                async fn $test() {
                    super::$test(&$crate::anvil::AnvilChain::start(None).await).await;
                }
            )*
        }
    };
}
pub use on_every_chain;
