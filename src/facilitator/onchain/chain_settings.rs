//! The settings that everything shares that sends transactions to a chain with keys of its own.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use alloy_primitives::Address;
use alloy_rpc_client::RpcClient;

use super::{OnchainBuildError, preflight::preflight};
use crate::{
    chain::{endpoint::client_at, node::Node, rpc::Rpc},
    clock::{Clock, SystemClock},
    network::Network,
    settlement::{accounts::SharedSigner, confirmation::Depths},
};

/// Longer durations are cut to this one.
pub(in crate::facilitator) const LONGEST: Duration = Duration::from_secs(3_600);
/// Gas that the token may use for one transfer. A plain one uses about 60,000; a contract wallet checks its signature with the rest.
pub(in crate::facilitator) const MAX_TRANSFER_GAS: u64 = 400_000;

/// The node, and the keys that send through it. [`chain_setters`] has the builder's methods.
pub(in crate::facilitator) struct ChainSettings {
    pub(in crate::facilitator) network: Option<Network>,
    pub(in crate::facilitator) url: Option<String>,
    pub(in crate::facilitator) client: Option<RpcClient>,
    pub(in crate::facilitator) signers: Vec<SharedSigner>,
    pub(in crate::facilitator) clock: Arc<dyn Clock>,
    pub(in crate::facilitator) max_gas_price: Option<u128>,
    pub(in crate::facilitator) in_flight: Option<usize>,
    pub(in crate::facilitator) confirm_timeout: Duration,
    pub(in crate::facilitator) block_time: Option<Duration>,
    pub(in crate::facilitator) rpc_timeout: Duration,
    pub(in crate::facilitator) depths: Depths,
    /// What the keys send is in a ledger that nobody else has.
    pub(in crate::facilitator) has_own_ledger: bool,
}

/// The keys in use in this process.
static KEYS: Mutex<Vec<KeysInUse>> = Mutex::new(Vec::new());

/// Keys that send through one node, and whether they have a ledger of their own.
struct KeysInUse {
    node: Weak<Node>,
    accounts: Vec<Address>,
    has_own_ledger: bool,
}

impl Default for ChainSettings {
    fn default() -> Self {
        Self {
            network: None,
            url: None,
            client: None,
            signers: Vec::new(),
            clock: Arc::new(SystemClock),
            max_gas_price: None,
            in_flight: None,
            has_own_ledger: false,
            confirm_timeout: Duration::from_secs(15),
            block_time: None,
            rpc_timeout: Duration::from_secs(5),
            depths: Depths::default(),
        }
    }
}

impl ChainSettings {
    /// Checks what must be set, and then the node: its chain, its time, the keys' balances.
    pub(in crate::facilitator) async fn connect(&mut self) -> Result<Arc<Node>, OnchainBuildError> {
        let network = self.network.ok_or(OnchainBuildError::Missing("network"))?;
        if self.signers.is_empty() {
            return Err(OnchainBuildError::Missing("signer"));
        }
        let accounts: Vec<Address> = self.signers.iter().map(|signer| signer.address()).collect();
        if let Some(twice) = accounts.iter().enumerate().find(|(index, account)| accounts[..*index].contains(account)) {
            return Err(OnchainBuildError::SameKey(*twice.1));
        }
        let client = match (self.client.take(), &self.url) {
            (Some(client), _) => client,
            (None, Some(url)) => client_at(url)?,
            (None, None) => return Err(OnchainBuildError::Missing("rpc_url, client or provider")),
        };
        let rpc = Rpc::new(client, self.rpc_timeout);
        let node = Node::new(network, rpc, MAX_TRANSFER_GAS, self.max_gas_price, self.block_time);
        let node = Arc::new(node.ok_or(OnchainBuildError::Probe)?);
        preflight(&node, &*self.clock, &accounts).await?;
        self.enter_keys(&node, accounts)?;
        Ok(node)
    }

    /// Fails if a key is in use beside another ledger: neither would know which nonces the other one takes. Only what is in this process is
    /// seen, and processes that share a ledger may share keys.
    fn enter_keys(&self, node: &Arc<Node>, accounts: Vec<Address>) -> Result<(), OnchainBuildError> {
        let mut keys = KEYS.lock().unwrap_or_else(PoisonError::into_inner);
        keys.retain(|keys| keys.node.strong_count() > 0);
        for other in &*keys {
            let is_there = other.node.upgrade().is_some_and(|other| other.network() == node.network());
            let shared = other.accounts.iter().find(|account| accounts.contains(account));
            if let Some(shared) = shared.filter(|_| is_there && other.has_own_ledger != self.has_own_ledger) {
                return Err(OnchainBuildError::TwoLedgers(*shared));
            }
        }
        keys.push(KeysInUse { node: Arc::downgrade(node), accounts, has_own_ledger: self.has_own_ledger });
        Ok(())
    }
}

/// The setters that mean the same in every builder that has [`ChainSettings`] in its field `chain`.
macro_rules! chain_setters {
    () => {
        /// Sets the chain. Required. [`build`](Self::build) checks that the node is on it.
        pub fn network(mut self, network: $crate::network::Network) -> Self {
            self.chain.network = Some(network);
            self
        }

        /// Sets the node, by its `http` or `https` URL. The URL may hold a key: it appears in no error, span or `Debug` output.
        pub fn rpc_url(mut self, url: impl AsRef<str>) -> Self {
            self.chain.url = Some(url.as_ref().to_owned());
            self
        }

        /// Sets the node, as an alloy client with a transport of your choice.
        pub fn client(mut self, client: alloy_rpc_client::RpcClient) -> Self {
            self.chain.client = Some(client);
            self
        }

        /// Sets the node, as an alloy provider. Its transport is used; its fillers, wallet and poll interval are not.
        pub fn provider<P: alloy_provider::Provider<N>, N: alloy_network::Network>(self, provider: P) -> Self {
            let client = provider.client();
            let client = alloy_rpc_client::RpcClient::new(client.transport().clone(), client.is_local());
            self.client(client)
        }

        /// Sets the clock. Default: the machine's.
        pub fn clock(mut self, clock: std::sync::Arc<dyn $crate::clock::Clock>) -> Self {
            self.chain.clock = clock;
            self
        }

        /// Sets how many transactions of one key may wait for a block at once. Nodes keep about 16 per account. Default: 16, or 8 if the key
        /// sends for payment channels: when a reorganization removes others below them, those are sent again in the other places.
        pub fn in_flight(mut self, transactions: usize) -> Self {
            self.chain.in_flight = Some(transactions);
            self
        }

        /// Sets how long a block takes, at most an hour. Default: measured.
        pub fn block_time(mut self, block_time: std::time::Duration) -> Self {
            self.chain.block_time = Some(block_time.min($crate::facilitator::onchain::LONGEST));
            self
        }

        /// Sets how long one request to the node may take, at most an hour. Default: 5 seconds.
        pub fn rpc_timeout(mut self, timeout: std::time::Duration) -> Self {
            self.chain.rpc_timeout = timeout.min($crate::facilitator::onchain::LONGEST);
            self
        }
    };
}
pub(in crate::facilitator) use chain_setters;
