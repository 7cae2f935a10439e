//! A chain in the same process, for tests, examples and first runs.
//!
//! It has Base's chain id, with USDC at its canonical address under its EIP-712 domain, and speaks JSON-RPC as an alloy
//! transport and on a port: what is configured for Base Sepolia runs here unchanged. The EVM is revm; the token is ours
//! (`contracts/DevnetUsdc.sol`) and answers as Circle's does.
//!
//! ```
//! use alloy_primitives::{U256, address};
//! use alloy_provider::Provider as _;
//! use tower_x402::devnet::Devnet;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let devnet = Devnet::start().await?;
//! let payer = address!("00000000000000000000000000000000000000aa");
//! devnet.mint(payer, "$5".parse()?)?;
//! devnet.fund(payer, U256::from(10).pow(U256::from(18)));
//! assert_eq!(devnet.balance_of(payer)?, "$5".parse()?);
//!
//! // In the same process:
//! assert_eq!(devnet.provider().get_chain_id().await?, 84532);
//! // And for everybody else, until `port` is dropped:
//! let port = devnet.serve("127.0.0.1:0").await?;
//! println!("{}", port.url());
//! # Ok(())
//! # }
//! ```
//!
//! **Blocks** are made when a transaction arrives, or at an interval ([`BlockTime`]). What the devnet does in somebody's name
//! ([`Devnet::mint`], [`Devnet::execute`], [`Devnet::deploy`]) is a block of its own at once, without a fee.
//! [`Devnet::fund`], [`Devnet::delegate`] and [`Devnet::set_code`] change the state outside any block.
//!
//! **What goes wrong** on request, or by chance: calls fail, stall, arrive twice or get lost before or after they took effect
//! ([`Faults`]); blocks stop ([`Devnet::stall`]); the base fee rises ([`Devnet::set_base_fee`]); blocks are replaced ([`Devnet::reorg`]).
//!
//! **Limits.** State roots are not computed, `pending` is the newest state, blob transactions are refused, and everything is
//! kept in memory forever. Calls run one at a time. The base fee does not move by itself.

mod builder;
mod chain;
mod estimate;
mod evm;
mod failure;
mod faults;
mod http;
mod logs;
mod pool;
mod rpc;
mod state;
mod token;
mod transport;
mod view;

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_consensus::TxEnvelope as Transaction;
use alloy_eips::{BlockId, BlockNumberOrTag};
use alloy_primitives::{Address, B256, Bytes, TxKind, U256};
use alloy_provider::RootProvider;
use alloy_rpc_client::RpcClient;
use alloy_rpc_types_eth::{TransactionReceipt, TransactionRequest};
use alloy_sol_types::SolCall as _;
use tokio::{net::ToSocketAddrs, sync::watch, time::timeout};

pub use self::{
    builder::{BlockTime, DevnetBuilder},
    faults::{Fault, Faults, LONGEST_DELAY, RpcCall},
    http::DevnetPort,
    transport::DevnetTransport,
};
use self::{
    chain::Chain,
    evm::Rules,
    failure::Failure,
    token::{DevnetUsdc, OWNER},
};
use crate::{Asset, Network, Usdc};

/// How often alloy asks this node for receipts.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// What becomes of the transactions of replaced blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orphans {
    /// They wait in the pool and are in the first of the new blocks, if they can still run.
    Requeued,
    /// They are gone, as if they had never been sent.
    Lost,
}

/// Why the devnet could not do what a test asked it for.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DevnetError {
    /// A contract's committed artifact cannot be read: a broken build.
    #[error("a contract of the devnet cannot be read: {0}")]
    Genesis(String),
    /// Blocks at an interval need a tokio runtime to make them.
    #[error("blocks at an interval need a tokio runtime")]
    NoRuntime,
    /// The contract reverted, or the chain would not run the transaction.
    #[error("{message}")]
    Execution {
        /// The reason, as JSON-RPC words it.
        message: String,
        /// What the contract returned with its revert.
        data: Option<Bytes>,
    },
    /// The token holds more for this account than [`Usdc`] can express.
    #[error("the balance is larger than any amount of USDC")]
    Balance,
}

impl From<Failure> for DevnetError {
    fn from(failure: Failure) -> Self {
        Self::Execution { message: failure.message.into_owned(), data: failure.data }
    }
}

/// A running chain. A clone is a handle to the same chain, which ends with its last handle.
#[derive(Clone, Debug)]
pub struct Devnet(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    asset: Asset,
    block_time: BlockTime,
    chain: Mutex<Chain>,
    faults: Faults,
    stalled: AtomicBool,
    /// Told of every new block.
    blocks: watch::Sender<()>,
}

impl Devnet {
    /// Starts a chain with the default settings: Base Sepolia, blocks at once, the machine's clock.
    pub async fn start() -> Result<Self, DevnetError> {
        Self::builder().start().await
    }

    /// A chain with other settings.
    pub fn builder() -> DevnetBuilder {
        DevnetBuilder::default()
    }

    /// The chain id.
    pub fn chain_id(&self) -> u64 {
        self.network().chain_id()
    }

    /// The network that it stands in for.
    pub fn network(&self) -> Network {
        self.0.asset.network
    }

    /// Its USDC.
    pub fn asset(&self) -> Asset {
        self.0.asset.clone()
    }

    /// The number of the newest block.
    pub fn block_number(&self) -> u64 {
        self.chain().head()
    }

    /// Gives an account USDC that did not exist before.
    pub fn mint(&self, to: Address, amount: Usdc) -> Result<(), DevnetError> {
        self.mint_units(to, amount.into()).map(drop).map_err(DevnetError::from)
    }

    /// An account's USDC.
    pub fn balance_of(&self, account: Address) -> Result<Usdc, DevnetError> {
        let data = self.call(self.0.asset.address, DevnetUsdc::balanceOfCall { account }.abi_encode())?;
        DevnetUsdc::balanceOfCall::abi_decode_returns(&data)
            .map_err(|_| DevnetError::Balance)
            .and_then(|units| Usdc::try_from(units).map_err(|_| DevnetError::Balance))
    }

    /// Adds to an account's ether.
    pub fn fund(&self, account: Address, wei: U256) {
        self.chain().state.edit(account, |info| info.balance = info.balance.saturating_add(wei));
    }

    /// An account's ether, in wei.
    pub fn eth_balance(&self, account: Address) -> U256 {
        self.chain().state.account(account).balance
    }

    /// Deploys a contract, given its creation code with the arguments appended.
    pub fn deploy(&self, initcode: impl Into<Bytes>) -> Result<Address, DevnetError> {
        let receipt = self.execute_as(OWNER, TxKind::Create, initcode.into())?;
        receipt.contract_address.ok_or_else(|| Failure::internal("nothing was deployed").into())
    }

    /// Calls a contract in anybody's name, in a block of its own.
    ///
    /// If it reverts the block is made all the same, and the reason returned.
    pub fn execute(
        &self,
        from: Address,
        to: Address,
        data: impl Into<Bytes>,
    ) -> Result<TransactionReceipt, DevnetError> {
        Ok(self.execute_as(from, TxKind::Call(to), data.into())?)
    }

    /// Does on the token what only its owner may, such as `pause()` and `blacklist(address)`.
    pub fn administer(&self, data: impl Into<Bytes>) -> Result<TransactionReceipt, DevnetError> {
        self.execute(OWNER, self.0.asset.address, data)
    }

    /// Calls a contract without changing anything, and returns what it returns.
    pub fn call(&self, to: Address, data: impl Into<Bytes>) -> Result<Bytes, DevnetError> {
        let chain = self.chain();
        let request = TransactionRequest::default().to(to).input(data.into().into());
        let (view, env) = chain.call_context(BlockId::Number(BlockNumberOrTag::Latest))?;
        let tx = evm::call_env(request, chain.chain_id, evm::CALL_GAS_LIMIT);
        Ok(evm::output(evm::run(chain.chain_id, view, env, tx, Rules::Lenient)?.result)?)
    }

    /// Lets an account run the code at `target` (EIP-7702), as if it had signed that delegation.
    pub fn delegate(&self, account: Address, target: Address) {
        self.set_code(account, [&[0xef, 0x01, 0x00], target.as_slice()].concat());
    }

    /// Replaces the code at an address; none if empty.
    pub fn set_code(&self, address: Address, code: impl Into<Bytes>) {
        self.chain().state.set_code(address, code.into());
    }

    /// Makes a block now, even while blocks are stalled and even an empty one.
    pub fn mine(&self) {
        self.chain().mine();
        self.0.blocks.send_replace(());
    }

    /// Stops making blocks, or goes on. Transactions wait meanwhile; [`mine`](Self::mine) still works.
    pub fn stall(&self, stalled: bool) {
        self.0.stalled.store(stalled, Ordering::Relaxed);
        self.make_block_if_instant();
    }

    /// Sets the base fee, in wei, from the next block on. Transactions that offer less wait.
    pub fn set_base_fee(&self, wei: u64) {
        self.chain().base_fee = wei;
        self.make_block_if_instant();
    }

    /// Replaces the newest `depth` blocks by as many others. What the devnet did in somebody's name there is undone.
    pub fn reorg(&self, depth: u64, orphans: Orphans) {
        self.chain().reorg(depth, orphans);
        self.0.blocks.send_replace(());
    }

    /// Fault injection for JSON-RPC calls.
    pub fn faults(&self) -> &Faults {
        &self.0.faults
    }

    /// An alloy transport to this chain.
    pub fn transport(&self) -> DevnetTransport {
        DevnetTransport(self.clone())
    }

    /// A JSON-RPC client of this chain.
    pub fn rpc_client(&self) -> RpcClient {
        RpcClient::new(self.transport(), true).with_poll_interval(POLL_INTERVAL)
    }

    /// An alloy provider on this chain.
    pub fn provider(&self) -> RootProvider {
        RootProvider::new(self.rpc_client())
    }

    /// Answers JSON-RPC over HTTP on `address` (port 0 for any free one) until the returned port is dropped.
    ///
    /// A dropped call ([`Fault::DropBefore`], [`Fault::DropAfter`]) is a 502 without a body here.
    pub async fn serve(&self, address: impl ToSocketAddrs) -> io::Result<DevnetPort> {
        http::serve(self.clone(), address).await
    }

    fn chain(&self) -> MutexGuard<'_, Chain> {
        self.0.chain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&self, tx: Transaction) -> Result<B256, Failure> {
        let hash = self.chain().submit(tx)?;
        self.make_block_if_instant();
        Ok(hash)
    }

    fn make_block_if_instant(&self) {
        if self.0.block_time == BlockTime::Instant && !self.0.stalled.load(Ordering::Relaxed) {
            self.chain().mine_pending();
            self.0.blocks.send_replace(());
        }
    }

    fn mint_units(&self, to: Address, amount: U256) -> Result<TransactionReceipt, Failure> {
        let mint = DevnetUsdc::mintCall { to, amount }.abi_encode();
        self.execute_as(OWNER, TxKind::Call(self.0.asset.address), mint.into())
    }

    fn execute_as(&self, from: Address, to: TxKind, data: Bytes) -> Result<TransactionReceipt, Failure> {
        let (receipt, result) = self.chain().execute_as(from, to, data)?;
        self.0.blocks.send_replace(());
        evm::output(result)?;
        Ok(receipt)
    }

    /// The receipt as soon as there is one, unless that takes too long.
    async fn receipt_within(&self, hash: B256, limit: Duration) -> Option<TransactionReceipt> {
        let mut blocks = self.0.blocks.subscribe();
        let receipt = async {
            loop {
                if let Some(mined) = self.chain().mined(hash) {
                    return Some(mined.receipt.clone());
                }
                blocks.changed().await.ok()?;
            }
        };
        timeout(limit, receipt).await.ok().flatten()
    }
}
