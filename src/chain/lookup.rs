//! Looking up on a chain whether a payment was made.
//!
//! [`PaymentLookup`] asks one node. It answers for anybody's payments: a seller's accountant, a buyer who doubts a receipt, a service
//! that believes only what was paid for. It sends no transaction and needs no key.
//!
//! A payment counts as made if one transaction holds `AuthorizationUsed(payer, nonce)` of the token with exactly the matching
//! `Transfer(payer → payee, amount)` right after it: the rule by which this crate's own settlement is judged. `authorizationState`
//! does not prove a payment, since cancelling an authorization sets it too.

use std::{fmt, time::Duration};

use alloy_primitives::{Address, B256, U256};
use alloy_rpc_client::RpcClient;
use tokio::sync::OnceCell;
use url::Url;

use crate::{
    chain::{
        authorization_use::{self, Use},
        endpoint::Endpoint,
        receipt_check::ExpectedTransfer,
        rpc::{Block, Receipt, Rpc, RpcFailure},
    },
    network::Network,
};

/// How long a request to the node may take, unless set.
const TIMEOUT: Duration = Duration::from_secs(10);

/// So many blocks before and after its own a payment is looked for that was moved to another one; together they are one request.
const NEAR: u64 = 1_000;

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
    network: Network,
    client: RpcClient,
    rpc: Rpc,
    is_of_network: OnceCell<()>,
}

/// The payment that is looked up: a transfer by an EIP-3009 authorization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SoughtPayment {
    /// The token's contract. Its events are believed, so it must be one that both sides trust: a token's owner can make up any payment.
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

/// A payment that is in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MinedPayment {
    /// The transaction that made it.
    pub transaction: B256,
    /// Its block.
    pub block: u64,
    /// The block's time, in seconds since the Unix epoch.
    pub block_time: u64,
    /// The newest block that the node knew when it was asked first. Behind one address there may be several nodes, so this may be below
    /// [`block`](Self::block).
    pub latest: u64,
}

/// What a node tells of a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PaymentState {
    /// It was made. A reorganization may still undo it: see [`MinedPayment::latest`], and [`PaymentLookup::finality`].
    Made(MinedPayment),
    /// The authorization is not used in the blocks that were searched.
    NotFound,
    /// The transaction is in no block that the node knows. It may be later.
    NotMined,
    /// The transaction's block was replaced while the node was asked. Ask again.
    Replaced,
    /// The transaction failed, and moved nothing.
    Failed,
    /// The transaction succeeded, but did not make this payment.
    NotThis,
    /// The authorization was cancelled, or paid something else than what was looked up.
    UsedOtherwise,
}

/// Whether a payment can still be undone by a reorganization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finality {
    /// It was made in a final block, and stands for good.
    Final,
    /// It was undone for good.
    Undone,
    /// The node does not know yet, or does not tell. Ask again later.
    Open,
}

/// The node could not be asked, or its answers make no sense. Nothing is known of the payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// The URL is not that of a node (it is not shown: it may hold a key), or the machine's TLS cannot be used.
    #[error("not the URL of a node, or no TLS")]
    Url,
    /// The node did not answer in time, or with an error. Try again.
    #[error("the node did not answer, or with an error")]
    NoAnswer,
    /// The node is one of another chain.
    #[error("the node is one of another chain")]
    OtherChain,
    /// The node has no block.
    #[error("the node has no block")]
    NoBlock,
    /// The node refused to search even ten blocks at once. Name the payment's transaction ([`PaymentLookup::transaction`]), or use another
    /// node.
    #[error("the node refused to search for the payment")]
    SearchRefused,
    /// The node answered for another transaction than it was asked for.
    #[error("the node answers something else than it was asked")]
    Mismatch,
}

impl PaymentLookup {
    /// Asks the node at `url` (`http` or `https`). The URL is never shown, in logs or errors: it may hold a key.
    ///
    /// # Errors
    /// [`LookupError::Url`].
    pub fn at_url(network: Network, url: impl AsRef<str>) -> Result<Self, LookupError> {
        let url = Url::parse(url.as_ref()).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let endpoint = Endpoint::new(url.ok_or(LookupError::Url)?).ok_or(LookupError::Url)?;
        Ok(Self::new(network, RpcClient::new(endpoint, false)))
    }

    /// Asks a node through an alloy client with a transport of your choice.
    pub fn new(network: Network, client: RpcClient) -> Self {
        let rpc = Rpc::new(client.clone(), TIMEOUT);
        Self { network, client, rpc, is_of_network: OnceCell::new() }
    }

    /// Sets how long each request to the node may take. Default: 10 seconds. A lookup takes a few requests, and a search up to a hundred.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { rpc: Rpc::new(self.client.clone(), timeout), ..self }
    }

    /// Returns the chain.
    pub const fn network(&self) -> Network {
        self.network
    }

    /// Looks up whether `transaction` made the payment.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn transaction(&self, payment: &SoughtPayment, transaction: B256) -> Result<PaymentState, LookupError> {
        let latest = self.latest().await?;
        self.look(&payment.expected(), transaction, latest).await
    }

    /// Looks for the payment in the newest `blocks` blocks, the newest first.
    ///
    /// It takes at most 96 requests for logs, each of 2,000 blocks or as few as the node searches at once (at least 10). If it searches few,
    /// the search ends before all `blocks` were looked at.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn search(&self, payment: &SoughtPayment, blocks: u64) -> Result<PaymentState, LookupError> {
        let latest = self.latest().await?;
        let expected = payment.expected();
        let found = authorization_use::find_newest(&self.rpc, &expected, latest.saturating_sub(blocks), latest).await;
        match found.map_err(search_error)? {
            Use::Paid { transaction, .. } => self.look(&expected, transaction, latest).await,
            Use::Wasted { .. } => Ok(PaymentState::UsedOtherwise),
            Use::NotFound => Ok(PaymentState::NotFound),
        }
    }

    /// Returns the newest final block, or `None` if the node knows none.
    ///
    /// # Errors
    /// [`LookupError::NoAnswer`].
    pub async fn finalized(&self) -> Result<Option<u64>, LookupError> {
        Ok(self.rpc.block("finalized").await?.map(|block| block.number.saturating_to()))
    }

    /// Tells whether a payment that was seen in this transaction and block stands for good. In another block now, it stands as well.
    ///
    /// A payment is [`Finality::Undone`] only if a final block shows its authorization unused, or used by another transaction. The lack
    /// of a receipt proves nothing: the node may be behind, or may have forgotten.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn finality(
        &self,
        payment: &SoughtPayment,
        transaction: B256,
        block: u64,
    ) -> Result<Finality, LookupError> {
        self.check_network().await?;
        let expected = payment.expected();
        let Some(is_final) = self.finalized().await?.filter(|is_final| *is_final >= block) else {
            return Ok(Finality::Open);
        };
        let Some(receipt) = self.rpc.receipt(transaction).await? else {
            let is_gone = self.is_gone(&expected, transaction, [block, is_final]).await;
            return Ok(if is_gone { Finality::Undone } else { Finality::Open });
        };
        if receipt.transaction_hash != transaction || receipt.block() > is_final {
            return Ok(Finality::Open);
        }
        Ok(match self.block_of(&receipt).await? {
            Some(_) if expected.is_paid_by(&receipt) => Finality::Final,
            Some(_) => Finality::Undone,
            None => Finality::Open,
        })
    }

    /// The number of the node's newest block, if it is a node of this chain.
    async fn latest(&self) -> Result<u64, LookupError> {
        self.check_network().await?;
        let block = self.rpc.block("latest").await?.ok_or(LookupError::NoBlock)?;
        Ok(block.number.saturating_to())
    }

    async fn look(
        &self,
        expected: &ExpectedTransfer,
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
        if !expected.is_paid_by(&receipt) {
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

    /// The block of a receipt, if it is on the chain as it is now.
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

    /// Whether a transaction that was in this block and has no receipt now is gone, as of that final block.
    ///
    /// That there is no receipt proves nothing: behind one address there may be several nodes, of which the one that was asked for it
    /// is behind the others, or has forgotten. What proves it is an authorization that is unused in the final block, or that another
    /// transaction has used. A node that does not tell proves nothing either.
    async fn is_gone(&self, expected: &ExpectedTransfer, transaction: B256, [block, is_final]: [u64; 2]) -> bool {
        match authorization_use::is_used(&self.rpc, expected, is_final).await {
            Ok(Some(false)) => true,
            Ok(Some(true)) => {
                let near = [block.saturating_sub(NEAR), block.saturating_add(NEAR).min(is_final)];
                match authorization_use::find(&self.rpc, expected, near[0], near[1]).await {
                    Ok(Use::Paid { transaction: by, .. } | Use::Wasted { transaction: by, .. }) => by != transaction,
                    Ok(Use::NotFound) | Err(_) => false,
                }
            }
            Ok(None) | Err(_) => false,
        }
    }
}

impl SoughtPayment {
    const fn expected(&self) -> ExpectedTransfer {
        let Self { token, payer, payee, amount: value, nonce } = *self;
        ExpectedTransfer { token, payer, payee, value, nonce }
    }
}

fn search_error(failure: RpcFailure) -> LookupError {
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

impl fmt::Debug for PaymentLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PaymentLookup").field("network", &self.network).finish_non_exhaustive()
    }
}
