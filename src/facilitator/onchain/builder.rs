//! Settings of the facilitator on a chain.

use std::{
    fmt,
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Duration,
};

use alloy_network::TxSigner;
use alloy_primitives::{Address, Signature, U256};
use alloy_provider::Provider;
use alloy_rpc_client::RpcClient;
use tokio::sync::{Mutex as AsyncMutex, Notify, watch};
use url::Url;

use super::{LONGEST, OnchainBuildError, OnchainFacilitator, Wallets, preflight::preflight};
use crate::{
    chain::{
        block_time::BlockTime, broadcast::Broadcaster, endpoint::Endpoint, fees::FeeOracle, probe::Probe, rpc::Rpc,
        rpc_batcher::RpcBatcher,
    },
    clock::{Clock, SystemClock},
    ledger::{Ledger, MemoryLedger, measured},
    network::Network,
    settlement::{
        costs::Costs,
        deploy::Deployment,
        depth::Depths,
        engine::{Engine, SharedSigner},
        member::Active,
        nonce_manager::NonceManager,
        queue::Queue,
        readiness_look::LastLook,
        reverts::Reverts,
    },
    usdc::Usdc,
};

/// Settings of an [`OnchainFacilitator`]. Network, node and signer are needed; the rest has defaults.
#[must_use]
pub struct OnchainFacilitatorBuilder {
    network: Option<Network>,
    url: Option<String>,
    client: Option<RpcClient>,
    signers: Vec<SharedSigner>,
    ledger: Option<Arc<dyn Ledger>>,
    clock: Arc<dyn Clock>,
    max_gas_price: Option<u128>,
    in_flight: usize,
    contract_wallets: usize,
    confirm_timeout: Duration,
    block_time: Option<Duration>,
    rpc_timeout: Duration,
    max_transfer_gas: u64,
    batch_size: usize,
    batch_gas_cap: u32,
    depths: Depths,
    backlog: usize,
    upkeep_interval: Duration,
    native_price: Option<Usdc>,
    refuse_losses: bool,
}

impl Default for OnchainFacilitatorBuilder {
    fn default() -> Self {
        Self {
            network: None,
            url: None,
            client: None,
            signers: Vec::new(),
            ledger: None,
            clock: Arc::new(SystemClock),
            max_gas_price: None,
            in_flight: 16,
            contract_wallets: 8,
            confirm_timeout: Duration::from_secs(15),
            block_time: None,
            rpc_timeout: Duration::from_secs(5),
            max_transfer_gas: 400_000,
            batch_size: 100,
            batch_gas_cap: 120_000,
            depths: Depths::default(),
            backlog: 10_000,
            upkeep_interval: Duration::from_secs(5),
            native_price: None,
            refuse_losses: false,
        }
    }
}

impl OnchainFacilitatorBuilder {
    /// The chain to settle on. [`build`](Self::build) makes sure that the node is on it.
    pub fn network(mut self, network: Network) -> Self {
        self.network = Some(network);
        self
    }

    /// The node, over HTTP. The URL may hold a key: it appears in no error, span or `Debug` output.
    pub fn rpc_url(mut self, url: impl AsRef<str>) -> Self {
        self.url = Some(url.as_ref().to_owned());
        self
    }

    /// The node, as an alloy client with a transport of your choice.
    pub fn client(mut self, client: RpcClient) -> Self {
        self.client = Some(client);
        self
    }

    /// The node, as an alloy provider. Only its transport is used: its fillers, wallet and poll interval are not.
    pub fn provider<P: Provider<N>, N: alloy_network::Network>(self, provider: P) -> Self {
        let client = provider.client();
        let client = RpcClient::new(client.transport().clone(), client.is_local());
        self.client(client)
    }

    /// A settlement key, which pays for gas: any alloy transaction signer, which has five seconds for a signature. Further calls add
    /// further keys: each has its own nonces, and so its own [window](Self::in_flight) of transactions. Processes on one
    /// ledger may share keys.
    pub fn signer(mut self, signer: impl TxSigner<Signature> + Send + Sync + 'static) -> Self {
        self.signers.push(Arc::new(signer));
        self
    }

    /// The ledger in which transactions are journalled; a [`MemoryLedger`] if not set.
    pub fn ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Where the time comes from; the machine's clock if not set.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The most that is offered for a unit of gas, in wei. While the chain asks for more, payments are not settled, and nothing new
    /// is verified: [`FacilitatorError::Busy`](crate::facilitator::FacilitatorError::Busy) says so. If not set, only the tip is bounded: by 20
    /// times the base fee, or 0.1 gwei if that is more. A node that wants more gets what others tip.
    pub fn max_gas_price(mut self, wei: u128) -> Self {
        self.max_gas_price = Some(wei);
        self
    }

    /// How many transactions may wait for a block at once; 16 if not set, which is about what nodes keep per sender.
    pub fn in_flight(mut self, transactions: usize) -> Self {
        self.in_flight = transactions;
        self
    }

    /// How many signatures that only a contract can judge are looked at at a time; 8 if not set.
    pub fn contract_wallets(mut self, at_a_time: usize) -> Self {
        self.contract_wallets = at_a_time;
        self
    }

    /// After how long without a receipt an outcome is [`Outcome::Unknown`](crate::payment::Outcome::Unknown); 15 seconds if not set. The transaction is watched
    /// on, and [`Facilitator::reconcile`](crate::facilitator::Facilitator::reconcile) tells later.
    pub fn confirm_timeout(mut self, timeout: Duration) -> Self {
        self.confirm_timeout = timeout.min(LONGEST);
        self
    }

    /// Payments of at least `from` atomic units are settled only once this many further blocks are on top of theirs, so that a
    /// reorganization cannot undo them soon; of several bounds the highest that a payment reaches counts. None if not set: a
    /// payment is settled when it is in a block, and watched until that is final. Blocks must come within
    /// [`confirm_timeout`](Self::confirm_timeout), or the outcome is [`Outcome::Unknown`](crate::payment::Outcome::Unknown) until they do.
    ///
    /// ```
    /// # use tower_x402::facilitator::OnchainFacilitator;
    /// use alloy_primitives::U256;
    ///
    /// // From one dollar on, ten blocks: two seconds on Base.
    /// let builder = OnchainFacilitator::builder().confirmations(U256::from(1_000_000), 10);
    /// ```
    pub fn confirmations(mut self, from: U256, blocks: u64) -> Self {
        self.depths.add(from, blocks);
        self
    }

    /// How long a block takes; measured if not set.
    pub fn block_time(mut self, block_time: Duration) -> Self {
        self.block_time = Some(block_time.min(LONGEST));
        self
    }

    /// How long a single request may take; 5 seconds if not set.
    pub fn rpc_timeout(mut self, timeout: Duration) -> Self {
        self.rpc_timeout = timeout.min(LONGEST);
        self
    }

    /// How much gas the token may use for one transfer; 400,000 if not set, which leaves room for a contract wallet's check of
    /// its signature. A plain transfer takes about 60,000.
    pub fn max_transfer_gas(mut self, gas: u64) -> Self {
        self.max_transfer_gas = gas;
        self
    }

    /// How many payments share a transaction at most, where the chain has the [`BatchSettler`](crate::facilitator::BatchSettler); 100 if not set. One transaction has
    /// room for about 300. With 1, payments are settled one by one.
    pub fn batch_size(mut self, payments: usize) -> Self {
        self.batch_size = payments;
        self
    }

    /// How much gas the token's call for one payment in a batch may use; 120,000 if not set. A plain transfer takes about 60,000;
    /// what takes more is settled alone.
    pub fn batch_gas_cap(mut self, gas: u32) -> Self {
        self.batch_gas_cap = gas;
        self
    }

    /// How many payments may wait for their settlement; 10,000 if not set. While there are as many, nothing new is verified, so
    /// that no work is done that cannot be paid for in time: [`FacilitatorError::Busy`](crate::facilitator::FacilitatorError::Busy).
    pub fn backlog(mut self, payments: usize) -> Self {
        self.backlog = payments;
        self
    }

    /// How often open payments that nobody looks after are looked for in the ledger; 5 seconds if not set. The node is asked only
    /// if there are any, or while settled payments are not final.
    pub fn upkeep_interval(mut self, interval: Duration) -> Self {
        self.upkeep_interval = interval.clamp(Duration::from_millis(10), LONGEST);
        self
    }

    /// What an ether (10¹⁸ wei of what gas is paid in) is worth. With it, a payment whose share of its transaction's cost exceeds its
    /// amount is warned of and counted ([`SettlementStats::losses`](crate::facilitator::SettlementStats::losses)), and [`spent_in_usdc`](OnchainFacilitator::spent_in_usdc)
    /// says what settling costs. Nobody is asked for it: [`set_native_price`](OnchainFacilitator::set_native_price) keeps it
    /// true. Not known if not set.
    pub fn native_price(mut self, usdc_per_ether: Usdc) -> Self {
        self.native_price = Some(usdc_per_ether);
        self
    }

    /// Whether payments are refused while settling them is expected to cost more than they bring in: before any work is
    /// done, with [`FacilitatorError::Busy`](crate::facilitator::FacilitatorError::Busy). ExpectedTransfer is what gas costs now, times what recent payments took on average, in
    /// batches or alone. What is refused is not settled, so that the average stays where it is until others are. Needs the
    /// [`native_price`](Self::native_price). No if not set.
    pub fn refuse_losses(mut self, refuse: bool) -> Self {
        self.refuse_losses = refuse;
        self
    }

    /// Looks at the node (its chain, its clock, the key's balance) and builds the facilitator.
    ///
    /// # Errors
    /// [`OnchainBuildError`] says what to change.
    pub async fn build(self) -> Result<OnchainFacilitator, OnchainBuildError> {
        let network = self.network.ok_or(OnchainBuildError::Missing("network"))?;
        if self.signers.is_empty() {
            return Err(OnchainBuildError::Missing("signer"));
        }
        let accounts: Vec<Address> = self.signers.iter().map(|signer| signer.address()).collect();
        if let Some(twice) = accounts.iter().enumerate().find(|(index, account)| accounts[..*index].contains(account)) {
            return Err(OnchainBuildError::SameKey(*twice.1));
        }
        let client = match (self.client, self.url) {
            (Some(client), _) => client,
            (None, Some(url)) => {
                let url = Url::parse(&url).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
                let endpoint = Endpoint::new(url.ok_or(OnchainBuildError::Url)?).ok_or(OnchainBuildError::Tls)?;
                RpcClient::new(endpoint, false)
            }
            (None, None) => return Err(OnchainBuildError::Missing("rpc_url, client or provider")),
        };
        if self.refuse_losses && self.native_price.is_none() {
            return Err(OnchainBuildError::Missing("native_price, without which refuse_losses cannot tell a loss"));
        }
        let rpc = Rpc::new(client, self.rpc_timeout);
        let pace = BlockTime::new(self.block_time);
        preflight(&rpc, network, &*self.clock, &accounts, &pace).await?;
        let freed = Arc::<Notify>::default();
        let engine = Engine {
            network,
            probe: Probe::new(self.max_transfer_gas).ok_or(OnchainBuildError::Probe)?,
            pace,
            fees: FeeOracle::new(self.max_gas_price),
            lanes: self
                .signers
                .into_iter()
                .map(|signer| NonceManager::new(signer, rpc.clone(), self.in_flight, freed.clone()))
                .collect(),
            freed,
            node: Broadcaster::new(),
            ledger: measured(self.ledger.unwrap_or_else(|| Arc::new(MemoryLedger::new()))),
            clock: self.clock,
            gas_cap: self.max_transfer_gas,
            confirm_timeout: self.confirm_timeout,
            totals: Mutex::default(),
            watched: Mutex::default(),
            reverts: Reverts::default(),
            batch_size: self.batch_size,
            batch_gas_cap: self.batch_gas_cap,
            deployment: Deployment::default(),
            depths: self.depths,
            backlog: self.backlog,
            process: getrandom::u64().map_err(|_| OnchainBuildError::Randomness)?,
            queue: Queue::default(),
            active: Active::default(),
            caught_up: watch::Sender::new(false),
            closing: AtomicBool::new(false),
            resending: AsyncMutex::default(),
            hint: Arc::default(),
            costs: Costs::new(self.native_price, self.refuse_losses),
            last_look: LastLook::default(),
            looks: RpcBatcher::new(rpc.clone()),
            rpc,
        };
        let engine = Arc::new(engine);
        if let Ok(is_there) = engine.has_batch_settler().await {
            engine.deployment.note(is_there);
        }
        engine.keep_up(self.upkeep_interval);
        Ok(OnchainFacilitator { engine, wallets: Arc::new(Wallets::new(self.contract_wallets)) })
    }
}

impl fmt::Debug for OnchainFacilitatorBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnchainFacilitatorBuilder").field("network", &self.network).finish_non_exhaustive()
    }
}
