//! Looking up on a chain whether a payment was made.
//!
//! [`PaymentLookup`] asks one node about anybody's payments. It sends no transaction and needs no key. It is for a seller's accountant, a
//! buyer who doubts a receipt, or a service that accepts reports of payments.
//!
//! A payment counts as made if one transaction has the token's `AuthorizationUsed(payer, nonce)` with exactly the matching
//! `Transfer(payer → payee, amount)` right after it. The same rule holds for this crate's own settlements. `authorizationState`
//! does not prove a payment, since cancelling an authorization sets it too.
//!
//! A payment by voucher is made when it is claimed. The file `claim_lookup.rs` adds the methods that look that up.

use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use alloy_rpc_client::RpcClient;
use tokio::sync::OnceCell;

use crate::{
    chain::{
        authorization_use::{self, AuthorizationUse},
        endpoint,
        receipt_check::ExpectedTransfer,
        rpc::{Block, Receipt, Rpc, RpcFailure},
    },
    network::Network,
};

/// The default time for a request to the node.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How many blocks before and after its own a payment is searched that is in another block now. Together they are one request.
pub(super) const NEAR: u64 = 1_000;

/// Looks up whether payments were made, at one node of one chain.
///
/// ```no_run
/// # async fn example(payment: tower_x402::chain::SoughtPayment) -> Result<(), tower_x402::chain::LookupError> {
/// use tower_x402::{Network, chain::{PaymentLookup, PaymentState}};
///
/// let lookup = PaymentLookup::at_url(Network::BASE, "https://your-node.example")?;
/// match lookup.search(&payment, 10_000).await? {
///     PaymentState::Made(mined) => println!("{} in block {}", mined.transaction, mined.block),
///     PaymentState::NotFound => println!("not in the last 10,000 blocks"),
///     state => println!("not made: {state:?}"),
/// }
/// # Ok(()) }
/// ```
pub struct PaymentLookup {
    pub(super) network: Network,
    client: RpcClient,
    pub(super) rpc: Rpc,
    is_of_network: OnceCell<()>,
}

/// The payment to look up: a transfer by an EIP-3009 authorization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SoughtPayment {
    /// The token's contract. Its events are trusted, so it must be one that both sides trust: a token's owner can make up any payment.
    pub token: Address,
    /// The payer's address.
    pub payer: Address,
    /// The payee's address.
    pub payee: Address,
    /// The exact amount, in atomic units of the token.
    pub amount: U256,
    /// The nonce of the authorization.
    pub nonce: B256,
}

/// A payment in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MinedPayment {
    /// The transaction that made it.
    pub transaction: B256,
    /// Its block.
    pub block: u64,
    /// The block's time, in seconds since the Unix epoch.
    pub block_time: u64,
    /// The newest block when the lookup began. Behind one URL there may be several nodes, so this may be below
    /// [`block`](Self::block).
    pub latest: u64,
}

/// The state of a payment, as a node shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PaymentState {
    /// The payment was made. A reorganization may still remove it: see [`MinedPayment::latest`] and [`PaymentLookup::finality`].
    Made(MinedPayment),
    /// The authorization is not used in the blocks that were searched.
    NotFound,
    /// The transaction is in no block that the node knows. It may be mined later.
    NotMined,
    /// The transaction's block was replaced while the node was asked. Ask again.
    Replaced,
    /// The transaction reverted.
    Failed,
    /// The transaction succeeded, but did not make this payment.
    NotThis,
    /// The authorization was cancelled, or made another payment.
    UsedOtherwise,
}

/// The answer to whether a reorganization can still remove a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finality {
    /// The payment is in a final block.
    Final,
    /// The payment was removed by a reorganization, and will not come back.
    Reorged,
    /// It is not known yet, or the node does not say. Ask again later.
    Open,
}

/// The lookup failed. Nothing is known about the payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// The URL is invalid (it is not shown: it may hold a key), or the machine's TLS cannot be used.
    #[error("the URL is not an http or https URL, or TLS cannot be used")]
    Url,
    /// The node did not answer in time, or answered with an error. Try again.
    #[error("the node did not answer, or answered with an error")]
    NoAnswer,
    /// The node is on another chain.
    #[error("the node is on another chain")]
    OtherChain,
    /// The node has no block.
    #[error("the node has no block")]
    NoBlock,
    /// The node refused to search even ten blocks at once. Look up the payment's transaction ([`PaymentLookup::transaction`]) instead, or use
    /// another node.
    #[error("the node refused to search for the payment")]
    SearchRefused,
    /// The node returned another transaction than the requested one.
    #[error("the node returned another transaction than the requested one")]
    Mismatch,
}

impl PaymentLookup {
    /// Creates a lookup at the node with this `http` or `https` URL. The URL is never shown in logs or errors: it may hold a key.
    ///
    /// # Errors
    /// [`LookupError::Url`].
    pub fn at_url(network: Network, url: impl AsRef<str>) -> Result<Self, LookupError> {
        let client = endpoint::client_at(url.as_ref()).map_err(|_| LookupError::Url)?;
        Ok(Self::new(network, client))
    }

    /// Creates a lookup at a node, given as an alloy client with a transport of your choice.
    pub fn new(network: Network, client: RpcClient) -> Self {
        let rpc = Rpc::new(client.clone(), TIMEOUT);
        Self { network, client, rpc, is_of_network: OnceCell::new() }
    }

    /// Sets how long each request to the node may take. Default: 10 seconds. A lookup takes a few requests, and a search up to a hundred.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { rpc: Rpc::new(self.client.clone(), timeout), ..self }
    }

    /// Looks up whether `transaction` made the payment.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn transaction(&self, payment: &SoughtPayment, transaction: B256) -> Result<PaymentState, LookupError> {
        let latest = self.latest().await?;
        let expected = payment.expected();
        self.look(|receipt| expected.is_paid_by(receipt), transaction, latest).await
    }

    /// Searches the newest `blocks` blocks for the payment, the newest first.
    ///
    /// Takes at most 96 requests for logs, each for 2,000 blocks or as few as the node searches at once (at least 10). If the node searches
    /// few, not all `blocks` are searched.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn search(&self, payment: &SoughtPayment, blocks: u64) -> Result<PaymentState, LookupError> {
        let latest = self.latest().await?;
        let expected = payment.expected();
        let found = authorization_use::find_newest(&self.rpc, &expected, latest.saturating_sub(blocks), latest).await;
        match found.map_err(search_error)? {
            AuthorizationUse::Paid { transaction, .. } => {
                self.look(|receipt| expected.is_paid_by(receipt), transaction, latest).await
            }
            AuthorizationUse::Otherwise { .. } => Ok(PaymentState::UsedOtherwise),
            AuthorizationUse::NotFound { .. } => Ok(PaymentState::NotFound),
        }
    }

    /// Returns the newest final block, or `None` if the node knows none.
    ///
    /// # Errors
    /// [`LookupError::NoAnswer`].
    pub async fn finalized(&self) -> Result<Option<u64>, LookupError> {
        Ok(self.rpc.finalized().await?.map(|block| block.number.saturating_to()))
    }

    /// Returns whether a payment that was in this transaction and block is final. It may be in another block by now.
    ///
    /// A payment is [`Finality::Reorged`] only if a final block shows its authorization unused, or used by another transaction. A missing
    /// receipt proves nothing: the node may lag behind, or may not keep old receipts.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn finality(
        &self,
        payment: &SoughtPayment,
        transaction: B256,
        block: u64,
    ) -> Result<Finality, LookupError> {
        let expected = payment.expected();
        let is_gone = async |is_final| self.is_gone(&expected, transaction, [block, is_final]).await;
        self.finality_of(transaction, block, |receipt| expected.is_paid_by(receipt), is_gone).await
    }

    /// Returns whether what a transaction made, which was in this block, is final. `is_gone` is asked if there is no receipt, with the newest
    /// final block.
    pub(super) async fn finality_of(
        &self,
        transaction: B256,
        block: u64,
        is_made_by: impl Fn(&Receipt) -> bool,
        is_gone: impl AsyncFnOnce(u64) -> bool,
    ) -> Result<Finality, LookupError> {
        self.check_network().await?;
        let Some(is_final) = self.finalized().await?.filter(|is_final| *is_final >= block) else {
            return Ok(Finality::Open);
        };
        let Some(receipt) = self.rpc.receipt(transaction).await? else {
            return Ok(if is_gone(is_final).await { Finality::Reorged } else { Finality::Open });
        };
        if receipt.transaction_hash != transaction || receipt.block() > is_final {
            return Ok(Finality::Open);
        }
        Ok(match self.block_of(&receipt).await? {
            Some(_) if is_made_by(&receipt) => Finality::Final,
            Some(_) => Finality::Reorged,
            None => Finality::Open,
        })
    }

    /// Returns the number of the node's newest block, after checking the node's chain.
    pub(super) async fn latest(&self) -> Result<u64, LookupError> {
        self.check_network().await?;
        let block = self.rpc.block("latest").await?.ok_or(LookupError::NoBlock)?;
        Ok(block.number.saturating_to())
    }

    /// Returns the state of a payment that this transaction is said to have made.
    pub(super) async fn look(
        &self,
        is_made_by: impl Fn(&Receipt) -> bool,
        transaction: B256,
        latest: u64,
    ) -> Result<PaymentState, LookupError> {
        let Some(receipt) = self.rpc.receipt(transaction).await? else { return Ok(PaymentState::NotMined) };
        if receipt.transaction_hash != transaction {
            return Err(LookupError::Mismatch);
        }
        if !receipt.succeeded() {
            return Ok(PaymentState::Failed);
        }
        if !is_made_by(&receipt) {
            return Ok(PaymentState::NotThis);
        }
        let Some(block) = self.block_of(&receipt).await? else { return Ok(PaymentState::Replaced) };
        Ok(PaymentState::Made(MinedPayment {
            transaction,
            block: block.number.saturating_to(),
            block_time: block.timestamp.saturating_to(),
            latest,
        }))
    }

    /// Returns the block of a receipt, if it is on the chain now.
    async fn block_of(&self, receipt: &Receipt) -> Result<Option<Block>, LookupError> {
        let block = self.rpc.block_at(receipt.block()).await?;
        let is_it = |block: &Block| {
            block.number == receipt.block_number
                && receipt.logs.iter().all(|log| log.block_hash.is_none_or(|hash| hash == block.hash))
        };
        Ok(block.filter(is_it))
    }

    async fn check_network(&self) -> Result<(), LookupError> {
        let check = async || {
            let is_it = self.rpc.chain_id().await? == self.network.chain_id();
            is_it.then_some(()).ok_or(LookupError::OtherChain)
        };
        self.is_of_network.get_or_try_init(check).await.copied()
    }

    /// Returns `true` if a transaction that was in this block and has no receipt now is gone, as of that final block.
    ///
    /// A missing receipt proves nothing: behind one URL there may be several nodes, and the one that was asked may lag behind or not keep
    /// old receipts. An authorization that is unused in the final block, or used by another transaction, proves it.
    async fn is_gone(&self, expected: &ExpectedTransfer, transaction: B256, [block, is_final]: [u64; 2]) -> bool {
        match authorization_use::is_used(&self.rpc, expected, is_final).await {
            Ok(Some(false)) => true,
            Ok(Some(true)) => {
                let near = [block.saturating_sub(NEAR), block.saturating_add(NEAR).min(is_final)];
                match authorization_use::find(&self.rpc, expected, near[0], near[1]).await {
                    Ok(
                        AuthorizationUse::Paid { transaction: by, .. }
                        | AuthorizationUse::Otherwise { transaction: by, .. },
                    ) => by != transaction,
                    Ok(AuthorizationUse::NotFound { .. }) | Err(_) => false,
                }
            }
            Ok(None) | Err(_) => false,
        }
    }
}

impl SoughtPayment {
    const fn expected(&self) -> ExpectedTransfer {
        let Self { token, payer, payee, amount: value, nonce } = *self;
        ExpectedTransfer { token, payer, payee, value, nonce, permit: None }
    }
}

pub(super) fn search_error(failure: RpcFailure) -> LookupError {
    match failure {
        RpcFailure::Refused { .. } => LookupError::SearchRefused,
        RpcFailure::Silent => LookupError::NoAnswer,
    }
}

impl From<RpcFailure> for LookupError {
    fn from(_: RpcFailure) -> Self {
        Self::NoAnswer
    }
}

debug_fields!(PaymentLookup { network });
