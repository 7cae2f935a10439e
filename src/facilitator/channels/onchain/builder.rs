//! The settings of on-chain channels.

use std::{sync::Arc, time::Duration};

use alloy_network::TxSigner;
use alloy_primitives::{Signature, U256};

use super::{BlockRules, MAX_BLOCK_AGE, OnchainChannels, sender::OwnKeys};
use crate::{
    chain::escrow,
    facilitator::{
        OnchainBuildError, OnchainFacilitator, OnchainFacilitatorBuilder,
        onchain::{ChainSettings, LONGEST, chain_setters},
    },
    network::Asset,
};

/// A builder of [`OnchainChannels`]. A [`facilitator`](Self::facilitator), or network, node and signer, are required; all else has defaults.
#[must_use]
pub struct OnchainChannelsBuilder {
    chain: ChainSettings,
    facilitator: Option<OnchainFacilitator>,
    assets: Vec<Asset>,
    max_block_age: Duration,
}

impl Default for OnchainChannelsBuilder {
    fn default() -> Self {
        Self { chain: ChainSettings::default(), facilitator: None, assets: Vec::new(), max_block_age: MAX_BLOCK_AGE }
    }
}

impl OnchainChannelsBuilder {
    chain_setters!();

    /// Sends with the keys of this facilitator, so that one gas key is enough for both: journalled in its ledger, through its node, with its
    /// clock, window, timeout and highest gas price. Such settings of this builder have no effect then, and it may have no signer.
    ///
    /// Claims at risk go before payments, other claims take turns with them, and refunds and deposits come last. One place in the window of
    /// each key is kept for claims at risk, and payments leave it gas for claims: while there is less, they are refused with
    /// [`FacilitatorError::InsufficientGas`](crate::facilitator::FacilitatorError::InsufficientGas). At most 8 transactions of a key wait for a
    /// block at once then, unless [`in_flight`](crate::facilitator::OnchainFacilitatorBuilder::in_flight) was set.
    ///
    /// Several may be built of one facilitator. Each counts the gas of its own calls: a seller whose process also serves the channels of others
    /// builds one for itself and one for them, so that its own claims are not charged to their gas of an hour.
    ///
    /// ```no_run
    /// # async fn example(key: impl alloy_network::TxSigner<alloy_primitives::Signature> + Send + Sync + 'static)
    /// # -> Result<(), tower_x402::facilitator::OnchainBuildError> {
    /// use tower_x402::{
    ///     Network,
    ///     facilitator::{OnchainFacilitator, channels::OnchainChannels},
    /// };
    ///
    /// let facilitator = OnchainFacilitator::builder()
    ///     .network(Network::BASE)
    ///     .rpc_url("https://mainnet.base.org")
    ///     .signer(key)
    ///     .build()
    ///     .await?;
    /// let channels = OnchainChannels::builder().facilitator(&facilitator).build().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn facilitator(mut self, facilitator: &OnchainFacilitator) -> Self {
        self.facilitator = Some(facilitator.clone());
        self
    }

    /// Adds a key that pays for gas: any alloy transaction signer that signs within five seconds. Required without a
    /// [`facilitator`](Self::facilitator). Nobody else may send with it, and what it sends is journalled only in memory.
    ///
    /// If the only key is a channel's receiver authorizer, its claims need no signature in the transaction, which saves some gas.
    pub fn signer(mut self, signer: impl TxSigner<Signature> + Send + Sync + 'static) -> Self {
        self.chain.signers.push(Arc::new(signer));
        self
    }

    /// Adds a token whose channels are served. Default: USDC, where its address is known.
    pub fn asset(mut self, asset: Asset) -> Self {
        self.assets.push(asset);
        self
    }

    /// Sets the highest price that is offered for a unit of gas, in wei. While gas costs more, nothing is sent, except claims of what an
    /// announced withdrawal could take: such a claim may spend as much as it brings in, where an ether costs $10,000. Default: only the tip is
    /// bounded, as in [`OnchainFacilitatorBuilder::max_gas_price`](crate::facilitator::OnchainFacilitatorBuilder::max_gas_price).
    pub fn max_gas_price(mut self, wei: u128) -> Self {
        self.chain.max_gas_price = Some(wei);
        self
    }

    /// Sets after how long without a receipt an outcome is
    /// [`ChannelError::Pending`](crate::facilitator::channels::ChannelError::Pending), at most an hour. Default: 15 seconds. The transaction is
    /// followed further. A deposit gets twice that time, and waits for its turn to be sent for up to ten minutes, also when its request has ended.
    pub fn confirm_timeout(mut self, timeout: Duration) -> Self {
        self.chain.confirm_timeout = timeout.min(LONGEST);
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
        self.chain.depths.add(U256::from(from), blocks);
        self
    }

    /// Sets how far the time of the node's newest block may be from the clock, at most an hour. Default: two minutes.
    ///
    /// A node that has fallen behind does not show withdrawals, so that channels are sold on after their money has left. While its newest
    /// block is older, or of a time to come, actions and reads fail with [`ChannelError::Unavailable`](crate::facilitator::channels::ChannelError::Unavailable).
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
        let (depths, network) = (self.chain.depths.clone(), self.chain.network);
        let facilitator = match self.facilitator {
            Some(_) if !self.chain.signers.is_empty() => return Err(OnchainBuildError::TwoSenders),
            Some(facilitator) => facilitator,
            None => OnchainFacilitatorBuilder::for_channels(self.chain).build().await?,
        };
        let engine = facilitator.engine();
        let (node, found) = (engine.node(), engine.network());
        if let Some(expected) = network.filter(|expected| *expected != found) {
            return Err(OnchainBuildError::WrongChain { expected, found });
        }
        if self.assets.is_empty() {
            self.assets.push(found.usdc().ok_or(OnchainBuildError::Missing("asset"))?);
        }
        let missing = escrow::missing_contract(node.rpc()).await.map_err(|_| OnchainBuildError::Node)?;
        if let Some((name, address)) = missing {
            return Err(OnchainBuildError::NoContract { name, address, network: found });
        }
        let timeout = engine.submitter().confirm_timeout();
        let rules = BlockRules { max_age: self.max_block_age.as_secs(), depths, timeout };
        let (clock, sender) = (engine.journal().clock().clone(), Arc::new(OwnKeys::of(engine.clone())));
        Ok(OnchainChannels::new(node.clone(), self.assets, clock, sender, rules))
    }
}

debug_fields!(OnchainChannelsBuilder |this| { network: this.chain.network });
