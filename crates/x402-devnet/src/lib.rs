//! A chain in the same process, for tests, examples and first runs. Not for production.
//!
//! Use it to run a seller and a buyer without a node, without a network and without money. Code that is configured for Base Sepolia
//! runs on it unchanged: it has the chain id of Base Sepolia (or of Base), USDC at its address there with the same EIP-712 domain, and
//! speaks JSON-RPC, as an alloy transport in the process and over HTTP on a port.
//!
//! The EVM is revm. The token is `contracts/DevnetUsdc.sol`, which behaves as Circle's USDC.
//!
//! ```
//! use alloy_provider::Provider as _;
//! use tower_x402::primitives::{U256, address};
//! use x402_devnet::Devnet;
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
//! // For other processes, until `port` is dropped:
//! let port = devnet.serve("127.0.0.1:0").await?;
//! println!("{}", port.url());
//! # Ok(())
//! # }
//! ```
//!
//! # Blocks
//!
//! A block is made for each transaction, or at an interval ([`BlockTime`]). [`Devnet::mint`], [`Devnet::execute`] and
//! [`Devnet::deploy`] make a block of their own, without a fee. [`Devnet::fund`], [`Devnet::delegate`] and [`Devnet::set_code`] change the
//! state outside any block.
//!
//! # Faults
//!
//! A test can make calls fail, stall, arrive twice or get lost ([`Faults`]), stop blocks ([`Devnet::stall`]), raise the base fee
//! ([`Devnet::set_base_fee`]), and replace blocks ([`Devnet::reorg`]).
//!
//! # Limits
//!
//! State roots are not computed, and blob transactions are refused. The state as of `pending` is that of the newest block, unless
//! [`DevnetBuilder::pending_state`] is set. Everything stays in memory. Calls are executed one at a time. The base fee changes only if it
//! is set.

mod block;
mod builder;
mod chain;
mod evm;
mod failure;
mod faults;
mod genesis;
mod pool;
mod rpc;
mod state;
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
use tower_x402::{Asset, Network, Usdc};

pub use self::{
    builder::{BlockTime, DevnetBuilder},
    faults::{Fault, Faults, LONGEST_DELAY, RpcCall},
    transport::{DevnetPort, DevnetTransport},
};
use self::{
    chain::Chain,
    evm::Rules,
    failure::Failure,
    genesis::{DevnetUsdc, OWNER},
};

/// The interval at which alloy polls this node for receipts.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The fate of the transactions of replaced blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Orphans {
    /// They return to the pool and are in the first of the new blocks, if they can still be executed.
    Requeued,
    /// They are dropped, as if they had never been sent.
    Lost,
}

/// An error of a [`Devnet`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DevnetError {
    /// A compiled contract cannot be read. The build is broken.
    #[error("a contract of the devnet cannot be read: {0}")]
    Genesis(String),
    /// Blocks at an interval need a tokio runtime. Start the devnet inside of one.
    #[error("blocks at an interval need a tokio runtime")]
    NoRuntime,
    /// The contract reverted, or the transaction could not be executed.
    #[error("{message}")]
    Execution {
        /// The reason, as in the JSON-RPC error.
        message: String,
        /// The return data of the revert.
        data: Option<Bytes>,
    },
    /// The balance is larger than [`Usdc::MAX`].
    #[error("the balance is larger than any amount of USDC")]
    Balance,
}

impl From<Failure> for DevnetError {
    fn from(failure: Failure) -> Self {
        Self::Execution { message: failure.message.into_owned(), data: failure.data }
    }
}

/// A running chain. Clones are handles to the same chain, which stops when the last one is dropped.
#[derive(Clone, Debug)]
pub struct Devnet(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    asset: Asset,
    block_time: BlockTime,
    chain: Mutex<Chain>,
    faults: Faults,
    stalled: AtomicBool,
    /// Notified of every new block.
    blocks: watch::Sender<()>,
}

impl Devnet {
    /// Starts a chain with the default settings: the chain id of Base Sepolia, and a block for each transaction.
    ///
    /// # Errors
    /// [`DevnetError::Genesis`] in a broken build.
    pub async fn start() -> Result<Self, DevnetError> {
        Self::builder().start().await
    }

    /// Returns a builder for a chain with other settings.
    pub fn builder() -> DevnetBuilder {
        DevnetBuilder::default()
    }

    /// Returns the chain id.
    pub fn chain_id(&self) -> u64 {
        self.network().chain_id()
    }

    /// Returns the network with this chain id.
    pub fn network(&self) -> Network {
        self.0.asset.network
    }

    /// Returns the USDC of this chain.
    pub fn asset(&self) -> Asset {
        self.0.asset.clone()
    }

    /// Returns the number of the newest block.
    pub fn block_number(&self) -> u64 {
        self.chain().head()
    }

    /// Mints USDC for an account, in a block of its own.
    pub fn mint(&self, to: Address, amount: Usdc) -> Result<(), DevnetError> {
        self.mint_units(to, amount.into()).map(drop).map_err(DevnetError::from)
    }

    /// Returns the USDC balance of an account.
    pub fn balance_of(&self, account: Address) -> Result<Usdc, DevnetError> {
        let data = self.call(self.0.asset.address, DevnetUsdc::balanceOfCall { account }.abi_encode())?;
        DevnetUsdc::balanceOfCall::abi_decode_returns(&data)
            .map_err(|_| DevnetError::Balance)
            .and_then(|units| Usdc::try_from(units).map_err(|_| DevnetError::Balance))
    }

    /// Adds ether to an account, in wei, outside any block.
    pub fn fund(&self, account: Address, wei: U256) {
        self.chain().state.edit(account, |info| info.balance = info.balance.saturating_add(wei));
    }

    /// Returns the ether balance of an account, in wei.
    pub fn eth_balance(&self, account: Address) -> U256 {
        self.chain().state.account(account).balance
    }

    /// Deploys a contract, in a block of its own. `initcode` is its creation code with the arguments appended.
    pub fn deploy(&self, initcode: impl Into<Bytes>) -> Result<Address, DevnetError> {
        let receipt = self.execute_as(OWNER, TxKind::Create, initcode.into())?;
        receipt.contract_address.ok_or_else(|| Failure::internal("nothing was deployed").into())
    }

    /// Calls a contract as any account, without a signature, in a block of its own.
    ///
    /// # Errors
    /// [`DevnetError::Execution`] with the reason if the call reverts. Its block is made all the same.
    pub fn execute(
        &self,
        from: Address,
        to: Address,
        data: impl Into<Bytes>,
    ) -> Result<TransactionReceipt, DevnetError> {
        Ok(self.execute_as(from, TxKind::Call(to), data.into())?)
    }

    /// Calls the token as its owner, for `pause()`, `blacklist(address)` and the like.
    pub fn administer(&self, data: impl Into<Bytes>) -> Result<TransactionReceipt, DevnetError> {
        self.execute(OWNER, self.0.asset.address, data)
    }

    /// Calls a contract without changing the state, and returns the return data.
    pub fn call(&self, to: Address, data: impl Into<Bytes>) -> Result<Bytes, DevnetError> {
        let chain = self.chain();
        let request = TransactionRequest::default().to(to).input(data.into().into());
        let (view, env) = chain.call_context(BlockId::Number(BlockNumberOrTag::Latest))?;
        let tx = evm::call_env(request, chain.chain_id, evm::CALL_GAS_LIMIT);
        Ok(evm::output(evm::run(chain.chain_id, view, env, tx, Rules::Lenient)?.result)?)
    }

    /// Delegates an account to the code at `target` (EIP-7702), without a signature.
    pub fn delegate(&self, account: Address, target: Address) {
        self.set_code(account, [&[0xef, 0x01, 0x00], target.as_slice()].concat());
    }

    /// Replaces the code at an address. Empty code removes it.
    pub fn set_code(&self, address: Address, code: impl Into<Bytes>) {
        self.chain().state.set_code(address, code.into());
    }

    /// Makes a block now, even an empty one, and even while blocks are stalled.
    pub fn mine(&self) {
        self.chain().mine();
        self.0.blocks.send_replace(());
    }

    /// Stops or resumes the making of blocks. [`mine`](Self::mine) still makes one.
    pub fn stall(&self, stalled: bool) {
        self.0.stalled.store(stalled, Ordering::Relaxed);
        self.make_block_if_instant();
    }

    /// Sets the base fee from the next block on, in wei. Transactions that offer less wait.
    pub fn set_base_fee(&self, wei: u64) {
        self.chain().base_fee = wei;
        self.make_block_if_instant();
    }

    /// Replaces the newest `depth` blocks by as many others. Calls of [`mint`](Self::mint), [`execute`](Self::execute) and the like in
    /// these blocks are undone.
    pub fn reorg(&self, depth: u64, orphans: Orphans) {
        self.chain().reorg(depth, orphans);
        self.0.blocks.send_replace(());
    }

    /// Returns the fault injection for JSON-RPC calls.
    pub fn faults(&self) -> &Faults {
        &self.0.faults
    }

    /// Returns an alloy transport to this chain.
    pub fn transport(&self) -> DevnetTransport {
        DevnetTransport(self.clone())
    }

    /// Returns a JSON-RPC client of this chain.
    pub fn rpc_client(&self) -> RpcClient {
        RpcClient::new(self.transport(), true).with_poll_interval(POLL_INTERVAL)
    }

    /// Returns an alloy provider of this chain.
    pub fn provider(&self) -> RootProvider {
        RootProvider::new(self.rpc_client())
    }

    /// Serves JSON-RPC over HTTP on `address` until the returned port is dropped. Port 0 takes any free one.
    ///
    /// A lost call ([`Fault::DropBefore`], [`Fault::DropAfter`]) is answered with a 502 without a body.
    pub async fn serve(&self, address: impl ToSocketAddrs) -> io::Result<DevnetPort> {
        transport::serve(self.clone(), address).await
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

    /// Returns the receipt as soon as there is one, or `None` after `limit`.
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
