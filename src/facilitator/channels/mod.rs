//! The chain's side of payment channels: deposits, claims, transfers and refunds.
//!
//! ```
//! # #[cfg(all(feature = "client", feature = "onchain", feature = "local-signer"))]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> anyhow::Result<()> {
//! use tower_x402::{
//!     Clock, Network, Nonces, OsNonces, SystemClock, Usdc,
//!     eip3009::TokenDomain,
//!     facilitator::channels::{ChannelFacilitator, OnchainChannels, RefundOrder},
//!     primitives::{Address, B256, U256},
//!     signers::PrivateKeySigner,
//!     vouchers::{AuthorizerKey, ChannelConfig, Claim, ClaimedVoucher, Deposit, Escrow, Voucher},
//! };
//! use x402_devnet::Devnet;
//!
//! let (devnet, network) = (Devnet::start().await?, Network::BASE_SEPOLIA);
//! let [gas_key, payer, authorizer] = std::array::from_fn(|_| PrivateKeySigner::random());
//! devnet.fund(gas_key.address(), U256::from(10).pow(U256::from(18)));
//! devnet.mint(payer.address(), Usdc::from_atomic(1_000_000))?;
//! let channels =
//!     OnchainChannels::builder().network(network).client(devnet.rpc_client()).signer(gas_key).build().await?;
//!
//! // The payer deposits ten cents.
//! let (escrow, token) = (Escrow::on(network), devnet.asset());
//! let config = ChannelConfig {
//!     payer: payer.address(),
//!     payer_authorizer: payer.address(),
//!     receiver: Address::repeat_byte(7),
//!     receiver_authorizer: authorizer.address(),
//!     token: token.address,
//!     withdraw_delay: 900,
//!     salt: B256::ZERO,
//! };
//! let id = escrow.channel_id(&config);
//! let until = SystemClock.now() + 300;
//! let deposit = Deposit::sign(id, 100_000, until, OsNonces.next()?, &TokenDomain::of(&token), &payer).await?;
//! let voucher = Voucher::sign(&escrow, id, 60_000, &payer).await?;
//! let executed = channels.deposit(&config, &voucher, &deposit).await?;
//! assert_eq!(executed.observed.state.balance, 100_000);
//!
//! // It promised up to six cents. The seller charged five, and claims them.
//! let claim = Claim {
//!     voucher: ClaimedVoucher { channel: config, max_claimable_amount: 60_000 },
//!     signature: voucher.signature,
//!     total_claimed: 50_000,
//! };
//! let key = AuthorizerKey::new(authorizer);
//! assert_eq!(channels.claim(&[claim], &key).await?.amount, 50_000);
//! let settled = channels.settle(config.receiver, config.token).await?.expect("something was claimed");
//! assert_eq!(settled.amount, 50_000);
//!
//! // The payer gets the rest back.
//! let order = RefundOrder { config, voucher, amount: 50_000, nonce: 0, claim: None };
//! assert_eq!(channels.refund(&order, &key).await?.amount, 50_000);
//! assert_eq!(devnet.balance_of(payer.address())?, Usdc::from_atomic(950_000));
//! # Ok(())
//! # }
//! # #[cfg(not(all(feature = "client", feature = "onchain", feature = "local-signer")))]
//! # fn main() {}
//! ```

#[cfg(feature = "onchain")]
pub(super) mod onchain;

use std::fmt;

use alloy_primitives::{Address, B256, Bytes};
use async_trait::async_trait;
use auto_impl::auto_impl;

use super::{FacilitatorError, Readiness};
use crate::{
    network::Network,
    vouchers::{
        AuthorizerError, AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, Claim, Deposit, Escrow, Voucher,
    },
};
#[cfg(feature = "onchain")]
pub use onchain::{OnchainChannels, OnchainChannelsBuilder};

/// Reads channels of one chain, and moves money into and out of them.
///
/// # Contract
///
/// - An action is reported as done only if its transaction is in a block with the contract's event for this channel and amount.
/// - Actions may be repeated. A deposit is identified by its authorization, a claim by the contract's watermark, a refund by its nonce: what
///   was done before, by anybody, is found on the chain and reported, and not done again.
/// - A caller that goes away does not cancel an action that has begun.
// One facilitator can serve several sellers, behind an `Arc`.
#[async_trait]
#[auto_impl(Arc)]
pub trait ChannelFacilitator: fmt::Debug + Send + Sync + 'static {
    /// Returns the chain.
    fn network(&self) -> Network;

    /// Returns the addresses that pay for gas, for `/supported`. Default: none is named.
    fn senders(&self) -> Vec<Address> {
        Vec::new()
    }

    /// Returns the gas that transactions of this process have used since it was built. Default: 0, for one that somebody else sends
    /// transactions for. The service of the crate `x402-facilitator` bounds it by the hour.
    fn gas_used(&self) -> u64 {
        0
    }

    /// Returns whether deposits, claims and refunds could be made now, and why not. Asks the chain each time; `Channels::readiness` asks at
    /// most once a second. Default: always ready.
    async fn readiness(&self) -> Readiness {
        Readiness::default()
    }

    /// Reads channels as they are now, in the order asked for, all as of one block.
    ///
    /// # Errors
    /// [`ChannelError::Unavailable`].
    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError>;

    /// Checks that the deposit would be executed now: its window, signature, the payer's balance, and a simulation. Changes nothing. Returns
    /// the channel before the deposit.
    ///
    /// # Errors
    /// [`ChannelError::Rejected`] if it would fail, [`ChannelError::Unavailable`] if that could not be checked.
    async fn verify_deposit(
        &self,
        config: &ChannelConfig,
        deposit: &Deposit,
    ) -> Result<ChannelObservation, ChannelError>;

    /// Executes the deposit and waits for its block. If it was executed before, by anybody, returns that transaction. `voucher` came with
    /// it, and was checked: other facilitators want to see it.
    ///
    /// # Errors
    /// [`ChannelError`]. After [`ChannelError::Pending`], ask again with the same deposit.
    async fn deposit(
        &self,
        config: &ChannelConfig,
        voucher: &Voucher,
        deposit: &Deposit,
    ) -> Result<Executed, ChannelError>;

    /// Signs and claims these rows. Rows that the contract would refuse, or that the gas key cannot pay for, are left out, and named in
    /// [`Claimed::refused`]. Rows whose amount was claimed before count as claimed.
    ///
    /// # Errors
    /// [`ChannelError`] if none was claimed.
    async fn claim(&self, claims: &[Claim], authorizer: &AuthorizerKey) -> Result<Claimed, ChannelError>;

    /// Claims these rows, in this order, with a signature that the receiver authorizer made: all or none.
    ///
    /// # Errors
    /// [`ChannelError`].
    async fn claim_signed(&self, claims: &[Claim], signature: &Bytes) -> Result<Claimed, ChannelError>;

    /// Transfers what was claimed to the receiver. Returns `None` if there is nothing.
    ///
    /// # Errors
    /// [`ChannelError`].
    async fn settle(&self, receiver: Address, token: Address) -> Result<Option<Settled>, ChannelError>;

    /// Fails if no refund should be sent now: the gas that is left is kept for claims. It is asked before a refund is signed. Default: one may
    /// be sent.
    ///
    /// # Errors
    /// [`ChannelError::Unavailable`].
    async fn may_refund(&self) -> Result<(), ChannelError> {
        Ok(())
    }

    /// Claims and refunds in one transaction, with signatures that the receiver authorizer made.
    ///
    /// # Errors
    /// [`ChannelError`]; [`ChannelError::Unavailable`] only if nobody was given the signatures to execute.
    async fn refund_signed(&self, refund: &SignedRefund) -> Result<Executed, ChannelError>;

    /// Signs the order's claim and refund, and does both in one transaction.
    ///
    /// # Errors
    /// [`ChannelError`].
    async fn refund(&self, order: &RefundOrder, authorizer: &AuthorizerKey) -> Result<Executed, ChannelError> {
        self.refund_signed(&SignedRefund::sign(order.clone(), self.network(), authorizer).await?).await
    }
}

/// The most gas that the transactions of one action may use, whatever becomes of them. An action that needs more is refused.
pub mod gas {
    /// Of a deposit. Plainly it uses 120,000 to 160,000; the rest is for the check of a contract wallet's signature.
    pub const DEPOSIT: u64 = 400_000;
    /// Of a transfer to the receiver.
    pub const SETTLE: u64 = 200_000;
    /// Of a refund, with the claim that goes before it.
    pub const REFUND: u64 = 300_000;

    /// For a claim, and for each of its rows, of which each plainly takes 25,000.
    const CLAIM: u64 = 150_000;
    const ROW: u64 = 60_000;

    /// Returns the bound for a claim of so many rows.
    pub const fn claim(rows: usize) -> u64 {
        (rows as u64).saturating_mul(ROW).saturating_add(CLAIM)
    }

    /// Returns how many rows a claim may have that may use so much gas, at most 1,000.
    ///
    /// ```
    /// use tower_x402::facilitator::channels::gas;
    ///
    /// assert_eq!(gas::claims_within(gas::claim(4)), 4);
    /// ```
    pub const fn claims_within(gas: u64) -> usize {
        let rows = gas.saturating_sub(CLAIM) / ROW;
        // What has no room in a body has none here.
        if rows < 1_000 { rows as usize } else { 1_000 }
    }
}

/// A deposit or a refund that is in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Its transaction.
    pub transaction: B256,
    /// The amount that moved, in atomic units.
    pub amount: u128,
    /// The channel after it.
    pub observed: ChannelObservation,
}

/// A transfer to a receiver that is in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settled {
    /// Its transaction.
    pub transaction: B256,
    /// The amount that moved, in atomic units.
    pub amount: u128,
}

/// What became of a batch of claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    /// The transactions that claimed. None if all was claimed before.
    pub transactions: Vec<B256>,
    /// The amount that they claimed in all, in atomic units.
    pub amount: u128,
    /// The channels afterwards, in the order of the rows, without the refused ones.
    pub observed: Vec<ChannelObservation>,
    /// Rows that were left out.
    pub refused: Vec<RefusedClaim>,
}

/// A row that was left out of a batch of claims: the contract would have refused it, and with it the whole batch, or the gas key cannot pay
/// for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedClaim {
    /// The index of the row.
    pub index: usize,
    /// The channel.
    pub channel: ChannelId,
    /// Why, as the contract or the node says it, or what the gas key holds.
    pub detail: String,
}

/// What to refund to a channel's payer, and what to claim first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefundOrder {
    /// The channel.
    pub config: ChannelConfig,
    /// The payer's voucher, with which it asked for the refund. The contract does not need it; other facilitators want to see it.
    pub voucher: Voucher,
    /// The most to refund, in atomic units. If less is left after the claim, that is refunded.
    pub amount: u128,
    /// The contract's refund nonce of the channel, as it was observed. It identifies the refund: an order is executed once.
    pub nonce: u128,
    /// What to claim of the channel in the same transaction.
    pub claim: Option<Claim>,
}

/// A [`RefundOrder`] with the receiver authorizer's signatures. `Debug` does not show them.
#[derive(Clone, PartialEq, Eq)]
pub struct SignedRefund {
    /// The order.
    pub order: RefundOrder,
    /// The signature over the refund.
    pub refund_signature: Bytes,
    /// The signature over the claim, if there is one.
    pub claim_signature: Option<Bytes>,
}

impl SignedRefund {
    /// Signs an order.
    ///
    /// # Errors
    /// [`AuthorizerError`] if the signer refused or failed.
    pub async fn sign(
        order: RefundOrder,
        network: Network,
        authorizer: &AuthorizerKey,
    ) -> Result<Self, AuthorizerError> {
        let escrow = Escrow::on(network);
        let channel = escrow.channel_id(&order.config);
        let refund_signature = authorizer.sign_refund(&escrow, channel, order.nonce, order.amount).await?;
        let claim_signature = match &order.claim {
            Some(claim) => Some(authorizer.sign_claims(&escrow, std::slice::from_ref(claim)).await?),
            None => None,
        };
        Ok(Self { order, refund_signature, claim_signature })
    }
}

debug_fields!(SignedRefund { order });

/// Why an action on a channel was not done, or is not known to be done.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// Refused: nothing moved. Asking again changes nothing, unless the channel or the payer's balance changes.
    #[error("{reason}: {detail}")]
    Rejected {
        /// A code of [`vouchers::reason`](crate::vouchers::reason).
        reason: &'static str,
        /// What is wrong, for people.
        detail: String,
    },
    /// It could not be checked or done now, and nothing was sent. Ask again.
    #[error(transparent)]
    Unavailable(#[from] FacilitatorError),
    /// It was sent, or waits to be sent, and its outcome is not known yet. Ask again: what was done is found on the chain.
    #[error("the transaction is under way, but is not known to be in a block yet")]
    Pending {
        /// Its transaction, if there is one and it is known.
        transaction: Option<B256>,
    },
}

#[cfg(any(feature = "onchain", feature = "server"))]
impl ChannelError {
    /// A refusal.
    pub(crate) fn rejected(reason: &'static str, detail: impl Into<String>) -> Self {
        Self::Rejected { reason, detail: detail.into() }
    }
}

impl From<AuthorizerError> for ChannelError {
    fn from(error: AuthorizerError) -> Self {
        FacilitatorError::Misconfigured(error.to_string()).into()
    }
}
