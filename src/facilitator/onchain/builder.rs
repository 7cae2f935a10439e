//! The settings of the on-chain facilitator.

use std::{sync::Arc, time::Duration};

use alloy_network::TxSigner;
use alloy_primitives::{Signature, U256};

use super::{
    OnchainBuildError, OnchainFacilitator, Wallets,
    chain_settings::{ChainSettings, LONGEST, MAX_TRANSFER_GAS, chain_setters},
};
use crate::{
    ledger::Ledger,
    settlement::{
        engine::{Engine, EngineSettings},
        journal::Journal,
        transfers::GasCaps,
    },
    usdc::Usdc,
};

/// How many signatures that only a contract can check are checked at a time.
const CONTRACT_WALLETS: usize = 8;

/// A builder of an [`OnchainFacilitator`]. Network, node and signer are required; all else has defaults.
#[must_use]
pub struct OnchainFacilitatorBuilder {
    chain: ChainSettings,
    ledger: Option<Arc<dyn Ledger>>,
    batch_size: usize,
    batch_gas_cap: u32,
    backlog: usize,
    reconcile_interval: Duration,
    native_price: Option<Usdc>,
    refuse_losses: bool,
}

impl Default for OnchainFacilitatorBuilder {
    fn default() -> Self {
        Self {
            chain: ChainSettings::default(),
            ledger: None,
            batch_size: 100,
            batch_gas_cap: 120_000,
            backlog: 10_000,
            reconcile_interval: Duration::from_secs(5),
            native_price: None,
            refuse_losses: false,
        }
    }
}

impl OnchainFacilitatorBuilder {
    chain_setters!();

    /// A facilitator that sends only for payment channels.
    pub(in crate::facilitator) fn for_channels(chain: ChainSettings) -> Self {
        Self { chain: ChainSettings { has_own_ledger: true, ..chain }, batch_size: 1, ..Self::default() }
    }

    /// Adds a settlement key, which pays for gas: any alloy transaction signer that signs within five seconds. Required.
    ///
    /// Each key has its own nonces, and so its own [window](Self::in_flight) of transactions. Processes on one ledger may share keys.
    pub fn signer(mut self, signer: impl TxSigner<Signature> + Send + Sync + 'static) -> Self {
        self.chain.signers.push(Arc::new(signer));
        self
    }

    /// Sets the ledger in which transactions are journalled. Default: a [`MemoryLedger`](crate::ledger::MemoryLedger).
    pub fn ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Sets the highest price that is offered for a unit of gas, in wei. While gas costs more, payments are neither verified nor settled:
    /// the error is [`FacilitatorError::Busy`](crate::facilitator::FacilitatorError::Busy).
    ///
    /// Default: only the tip is bounded, by 20 times the base fee or 0.1 gwei, whichever is more. If the node refuses such a tip, the
    /// market's tip is offered.
    pub fn max_gas_price(mut self, wei: u128) -> Self {
        self.chain.max_gas_price = Some(wei);
        self
    }

    /// Sets after how long without a receipt an outcome is [`SettlementOutcome::Unknown`](crate::payment::SettlementOutcome::Unknown), at most an hour. Default:
    /// 15 seconds. The transaction is followed further, and
    /// [`Facilitator::reconcile`](crate::facilitator::Facilitator::reconcile) returns its outcome later.
    pub fn confirm_timeout(mut self, timeout: Duration) -> Self {
        self.chain.confirm_timeout = timeout.min(LONGEST);
        self
    }

    /// Requires so many blocks on top of the block of a payment of at least `from` atomic units, before the payment is settled. This makes
    /// a reorganization unlikely. Of several bounds the highest that a payment reaches counts.
    ///
    /// Default: none. A payment is settled when it is in a block, and followed until that block is final. The blocks must come within
    /// [`confirm_timeout`](Self::confirm_timeout), or the outcome is [`SettlementOutcome::Unknown`](crate::payment::SettlementOutcome::Unknown) until they do.
    ///
    /// ```
    /// # use tower_x402::facilitator::OnchainFacilitator;
    /// use alloy_primitives::U256;
    ///
    /// // From one dollar on, ten blocks: two seconds on Base.
    /// let builder = OnchainFacilitator::builder().confirmations(U256::from(1_000_000), 10);
    /// ```
    pub fn confirmations(mut self, from: U256, blocks: u64) -> Self {
        self.chain.depths.add(from, blocks);
        self
    }

    /// Sets how many payments may share a transaction, if the chain has the [`BatchSettler`](crate::facilitator::BatchSettler). Default: 100.
    /// One transaction has room for about 300. With 1, payments are settled one by one.
    pub fn batch_size(mut self, payments: usize) -> Self {
        self.batch_size = payments;
        self
    }

    /// Sets how much gas the token may use for one payment in a batch. Default: 120,000. A plain transfer uses about 60,000. Payments that
    /// need more are settled alone.
    pub fn batch_gas_cap(mut self, gas: u32) -> Self {
        self.batch_gas_cap = gas;
        self
    }

    /// Sets how many payments may wait for settlement. Default: 10,000. While the queue is full, nothing is verified, so that no work is
    /// done whose payment could not be settled in time: the error is
    /// [`FacilitatorError::Busy`](crate::facilitator::FacilitatorError::Busy).
    pub fn backlog(mut self, payments: usize) -> Self {
        self.backlog = payments;
        self
    }

    /// Sets how often open payments in the ledger are reconciled, from 10 ms to an hour. Default: 5 seconds. The node is asked only if there
    /// are any, or while settled payments are not final.
    pub fn reconcile_interval(mut self, interval: Duration) -> Self {
        self.reconcile_interval = interval.clamp(Duration::from_millis(10), LONGEST);
        self
    }

    /// Sets the price of an ether (10¹⁸ wei of the currency that pays for gas). Default: not known.
    ///
    /// With it, payments that cost more than they bring in are logged and counted
    /// ([`SettlementStats::losses`](crate::facilitator::SettlementStats::losses)), and
    /// [`spent_in_usdc`](OnchainFacilitator::spent_in_usdc) returns the cost of settling. Update it with
    /// [`set_native_price`](OnchainFacilitator::set_native_price); it is not looked up.
    pub fn native_price(mut self, usdc_per_ether: Usdc) -> Self {
        self.native_price = Some(usdc_per_ether);
        self
    }

    /// Sets whether payments are refused while settling them is expected to cost more than they bring in. Default: `false`. Requires
    /// [`native_price`](Self::native_price).
    ///
    /// They are refused before any work is done, with [`FacilitatorError::Busy`](crate::facilitator::FacilitatorError::Busy). The expected
    /// cost is the current price of gas times the average gas of recent payments, in batches or alone.
    pub fn refuse_losses(mut self, refuse: bool) -> Self {
        self.refuse_losses = refuse;
        self
    }

    /// Checks the node (its chain, its time, the keys' balances) and builds the facilitator.
    ///
    /// # Errors
    /// [`OnchainBuildError`] names the setting to change.
    pub async fn build(mut self) -> Result<OnchainFacilitator, OnchainBuildError> {
        if self.refuse_losses && self.native_price.is_none() {
            return Err(OnchainBuildError::Missing("native_price, without which refuse_losses cannot tell a loss"));
        }
        let node = self.chain.connect().await?;
        let journal = Journal::new(self.ledger, self.chain.clock).ok_or(OnchainBuildError::Randomness)?;
        let settings = EngineSettings {
            signers: self.chain.signers,
            in_flight: self.chain.in_flight,
            gas: GasCaps { alone: MAX_TRANSFER_GAS, in_batch: self.batch_gas_cap },
            confirm_timeout: self.chain.confirm_timeout,
            batch_size: self.batch_size,
            depths: self.chain.depths,
            backlog: self.backlog,
            native_price: self.native_price,
            refuse_losses: self.refuse_losses,
            reconcile_interval: self.reconcile_interval,
        };
        let engine = Engine::start(node, journal, settings).await;
        Ok(OnchainFacilitator { engine, wallets: Arc::new(Wallets::new(CONTRACT_WALLETS)) })
    }
}

debug_fields!(OnchainFacilitatorBuilder |this| { network: this.chain.network });
