//! The settings of on-chain channels.

use std::{fmt, sync::Arc, time::Duration};

use alloy_network::TxSigner;
use alloy_primitives::{Address, Signature, U256};
use alloy_provider::Provider;
use alloy_rpc_client::RpcClient;

use super::{BlockRules, CONFIRM_TIMEOUT, MAX_BLOCK_AGE, OnchainChannels};
use crate::{
    chain::{endpoint::client_at, escrow, node::Node, rpc::Rpc},
    clock::{Clock, SystemClock},
    facilitator::{OnchainBuildError, onchain::preflight},
    network::{Asset, Network},
    settlement::{accounts::SharedSigner, caller::Caller, confirmation::Depths},
};

/// Longer durations are cut to this one.
const LONGEST: Duration = Duration::from_secs(3_600);
/// Gas of the probe, which is not used here.
const PROBE_GAS: u64 = 400_000;

/// A builder of [`OnchainChannels`]. Network, node and signer are required; all else has defaults.
#[must_use]
pub struct OnchainChannelsBuilder {
    network: Option<Network>,
    url: Option<String>,
    client: Option<RpcClient>,
    signers: Vec<SharedSigner>,
    assets: Vec<Asset>,
    clock: Arc<dyn Clock>,
    max_gas_price: Option<u128>,
    in_flight: usize,
    confirm_timeout: Duration,
    block_time: Option<Duration>,
    rpc_timeout: Duration,
    max_block_age: Duration,
    depths: Depths,
}

impl Default for OnchainChannelsBuilder {
    fn default() -> Self {
        Self {
            network: None,
            url: None,
            client: None,
            signers: Vec::new(),
            assets: Vec::new(),
            clock: Arc::new(SystemClock),
            max_gas_price: None,
            in_flight: 16,
            confirm_timeout: CONFIRM_TIMEOUT,
            block_time: None,
            rpc_timeout: Duration::from_secs(5),
            max_block_age: MAX_BLOCK_AGE,
            depths: Depths::default(),
        }
    }
}

impl OnchainChannelsBuilder {
    /// Sets the chain. Required. [`build`](Self::build) checks that the node is on it, and that it has the contracts.
    pub fn network(mut self, network: Network) -> Self {
        self.network = Some(network);
        self
    }

    /// Sets the node, by its `http` or `https` URL. The URL may hold a key: it appears in no error, span or `Debug` output.
    pub fn rpc_url(mut self, url: impl AsRef<str>) -> Self {
        self.url = Some(url.as_ref().to_owned());
        self
    }

    /// Sets the node, as an alloy client with a transport of your choice.
    pub fn client(mut self, client: RpcClient) -> Self {
        self.client = Some(client);
        self
    }

    /// Sets the node, as an alloy provider. Its transport is used; its fillers, wallet and poll interval are not.
    pub fn provider<P: Provider<N>, N: alloy_network::Network>(self, provider: P) -> Self {
        let client = provider.client();
        let client = RpcClient::new(client.transport().clone(), client.is_local());
        self.client(client)
    }

    /// Adds a key that pays for gas: any alloy transaction signer that signs within five seconds. Required. Nobody else may send with it.
    ///
    /// If the only key is a channel's receiver authorizer, its claims need no signature in the transaction, which saves some gas.
    pub fn signer(mut self, signer: impl TxSigner<Signature> + Send + Sync + 'static) -> Self {
        self.signers.push(Arc::new(signer));
        self
    }

    /// Adds a token whose channels are served. Default: USDC, where its address is known.
    pub fn asset(mut self, asset: Asset) -> Self {
        self.assets.push(asset);
        self
    }

    /// Sets the clock. Default: the machine's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the highest price that is offered for a unit of gas, in wei. While gas costs more, nothing is sent. Default: only the tip is
    /// bounded, as in [`OnchainFacilitatorBuilder::max_gas_price`](crate::facilitator::OnchainFacilitatorBuilder::max_gas_price).
    pub fn max_gas_price(mut self, wei: u128) -> Self {
        self.max_gas_price = Some(wei);
        self
    }

    /// Sets how many transactions of one key may wait for a block at once. Default: 16, about what nodes keep per account.
    pub fn in_flight(mut self, transactions: usize) -> Self {
        self.in_flight = transactions;
        self
    }

    /// Sets after how long without a receipt an outcome is
    /// [`ChannelError::Pending`](crate::facilitator::channels::ChannelError::Pending), at most an hour. Default: 15 seconds. The transaction is
    /// followed further.
    pub fn confirm_timeout(mut self, timeout: Duration) -> Self {
        self.confirm_timeout = timeout.min(LONGEST);
        self
    }

    /// Requires so many blocks on top of the block of a deposit of at least `from` atomic units, before the deposit counts as executed. This
    /// makes a reorganization unlikely. Of several bounds the highest that a deposit reaches counts.
    ///
    /// Default: none. If a reorganization removes a deposit, the seller can lose what it charged on the channel since: at most the deposit, and
    /// what is charged within five minutes, after which it looks at the channel again. The blocks must come within
    /// [`confirm_timeout`](Self::confirm_timeout), or the outcome is
    /// [`ChannelError::Pending`](crate::facilitator::channels::ChannelError::Pending) until they do.
    pub fn confirmations(mut self, from: u128, blocks: u64) -> Self {
        self.depths.add(U256::from(from), blocks);
        self
    }

    /// Sets how long a block takes, at most an hour. Default: measured.
    pub fn block_time(mut self, block_time: Duration) -> Self {
        self.block_time = Some(block_time.min(LONGEST));
        self
    }

    /// Sets how long one request to the node may take, at most an hour. Default: 5 seconds.
    pub fn rpc_timeout(mut self, timeout: Duration) -> Self {
        self.rpc_timeout = timeout.min(LONGEST);
        self
    }

    /// Sets how old the newest block of the node may be, at most an hour. Default: two minutes.
    ///
    /// A node that has fallen behind does not show withdrawals, so that channels are sold on after their money has left. While its newest
    /// block is older, actions and reads fail with [`ChannelError::Unavailable`](crate::facilitator::channels::ChannelError::Unavailable).
    /// Raise it for a test chain that makes blocks only when there are transactions.
    pub fn max_block_age(mut self, age: Duration) -> Self {
        self.max_block_age = age.min(LONGEST);
        self
    }

    /// Checks the node (its chain, its time, the keys' balances, the contracts) and builds the facilitator of channels.
    ///
    /// # Errors
    /// [`OnchainBuildError`] names the setting to change, or the contract that the chain lacks.
    pub async fn build(mut self) -> Result<OnchainChannels, OnchainBuildError> {
        let network = self.network.ok_or(OnchainBuildError::Missing("network"))?;
        if self.signers.is_empty() {
            return Err(OnchainBuildError::Missing("signer"));
        }
        let accounts: Vec<Address> = self.signers.iter().map(|signer| signer.address()).collect();
        if let Some((_, twice)) =
            accounts.iter().enumerate().find(|(index, account)| accounts[..*index].contains(account))
        {
            return Err(OnchainBuildError::SameKey(*twice));
        }
        if self.assets.is_empty() {
            self.assets.push(network.usdc().ok_or(OnchainBuildError::Missing("asset"))?);
        }
        let client = match (self.client, self.url) {
            (Some(client), _) => client,
            (None, Some(url)) => client_at(&url)?,
            (None, None) => return Err(OnchainBuildError::Missing("rpc_url, client or provider")),
        };
        let rpc = Rpc::new(client, self.rpc_timeout);
        let node = Node::new(network, rpc, PROBE_GAS, self.max_gas_price, self.block_time);
        let node = Arc::new(node.ok_or(OnchainBuildError::Probe)?);
        preflight(&node, &*self.clock, &accounts).await?;
        let missing = escrow::missing_contract(node.rpc()).await.map_err(|_| OnchainBuildError::Node)?;
        if let Some((name, address)) = missing {
            return Err(OnchainBuildError::NoContract { name, address, network });
        }
        let caller = Caller::new(node.clone(), self.signers, self.in_flight, self.confirm_timeout);
        let rules =
            BlockRules { max_age: self.max_block_age.as_secs(), depths: self.depths, timeout: self.confirm_timeout };
        Ok(OnchainChannels::new(node, self.assets, self.clock, Arc::new(caller), rules))
    }
}

impl fmt::Debug for OnchainChannelsBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnchainChannelsBuilder").field("network", &self.network).finish_non_exhaustive()
    }
}
