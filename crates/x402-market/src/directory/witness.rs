//! Whether a payment reached an evaluator, as a chain tells it.

use std::{fmt, time::Duration};

use alloy_primitives::{Address, B256, U256};
use alloy_rpc_client::RpcClient;
use tokio::{
    sync::{OnceCell, Semaphore, SemaphorePermit},
    time::timeout,
};
use url::Url;

use super::{PaymentOf, SignedEvidence, VoiceError};
use crate::{
    network::{Asset, Network},
    settlement::{
        credit::{self, Use},
        http::Endpoint,
        judge::Expected,
        rpc::{Block, Receipt, Rpc, RpcFailure},
    },
};

/// How long a check waits for its turn.
const PATIENCE: Duration = Duration::from_secs(2);

/// So many blocks before and after its own a payment is looked for that was moved to another one; together they are one request.
#[cfg(feature = "directory")]
const NEAR: u64 = 1_000;

const LATE: WitnessError = WitnessError::Unavailable("the node did not answer in time");

/// Looks at a chain for the payments that evidence is about.
///
/// A payment took place if one transaction, in a block that is deep enough, holds `AuthorizationUsed(payer, nonce)` of the token with
/// exactly the matching `Transfer(payer → evaluator, paid)` right after it; the same rule by which sellers recognize that they
/// were paid. `authorizationState` does not prove it, since cancelling sets it too; but where it is not set, nothing was paid.
///
/// Several nodes may be given: then all of them must say so, and one that lies can keep a voice out, but let none in, and have none
/// removed.
///
/// ```no_run
/// # fn example() -> Result<(), tower_x402::market::directory::WitnessError> {
/// use tower_x402::{Network, market::directory::Witness};
///
/// let witness = Witness::new(Network::BASE).rpc_url("https://your-node.example")?.depth(20);
/// # Ok(()) }
/// ```
pub struct Witness {
    network: Network,
    tokens: Vec<Address>,
    nodes: Vec<Node>,
    depth: u64,
    search: u64,
    drift: Duration,
    timeout: Duration,
    places: Semaphore,
}

struct Node {
    rpc: Rpc,
    is_of_network: OnceCell<()>,
}

/// A payment that took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Payment {
    /// What identifies it.
    pub of: PaymentOf,
    /// The transaction that settled it.
    pub transaction: B256,
    /// Its block.
    pub block: u64,
    /// When that was, in seconds since the Unix epoch.
    pub block_time: u64,
}

/// Why a payment is not taken for one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WitnessError {
    /// The record itself is bad, or not the payer's.
    #[error(transparent)]
    Voice(#[from] VoiceError),
    /// Another network, or a token that is not looked at.
    #[error("payments with {asset} on {network} are not looked at here")]
    NotServed {
        /// The chain.
        network: Network,
        /// The token.
        asset: Address,
    },
    /// It is not on the chain, or not deep enough. It may be later.
    #[error("{0}")]
    NotYet(&'static str),
    /// The chain shows something else.
    #[error("{0}")]
    NotPaid(&'static str),
    /// The record's time and that of the payment's block are too far apart.
    #[error("the record is of {at}, but the payment was in a block of {block_time}")]
    Implausible {
        /// When the record says that it was.
        at: u64,
        /// When the block was.
        block_time: u64,
    },
    /// The node could not be asked, or does not make sense.
    #[error("the chain cannot be asked now: {0}")]
    Unavailable(&'static str),
    /// The node's URL is none (not shown: it may hold a key), or the machine's TLS cannot be used.
    #[error("not the URL of a node, or no TLS")]
    Url,
}

impl Witness {
    /// A witness of payments in the network's USDC, if it is known, at a depth of twelve blocks. It needs a node.
    pub fn new(network: Network) -> Self {
        Self {
            network,
            tokens: network.usdc().map(|usdc| usdc.address).into_iter().collect(),
            nodes: Vec::new(),
            depth: 12,
            search: 10_000,
            drift: Duration::from_secs(3_600),
            timeout: Duration::from_secs(10),
            places: Semaphore::new(16),
        }
    }

    /// Asks this node. Of several, all must agree.
    ///
    /// # Errors
    /// [`WitnessError::Url`].
    pub fn rpc_url(self, url: impl AsRef<str>) -> Result<Self, WitnessError> {
        let url = Url::parse(url.as_ref()).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let endpoint = Endpoint::new(url.ok_or(WitnessError::Url)?).ok_or(WitnessError::Url)?;
        Ok(self.client(RpcClient::new(endpoint, false)))
    }

    /// The same, as an alloy client with a transport of your choice.
    pub fn client(mut self, client: RpcClient) -> Self {
        let rpc = Rpc::new(client, self.timeout);
        self.nodes.push(Node { rpc, is_of_network: OnceCell::new() });
        self
    }

    /// Looks at payments in this token, too. It must be one whose events cannot be had for nothing: whoever owns a token can make
    /// up any payment.
    pub fn token(mut self, asset: &Asset) -> Self {
        if asset.network == self.network {
            self.tokens.push(asset.address);
        }
        self
    }

    /// How many blocks must be on top of a payment's; 12 unless set. Base replaces blocks rarely, and only the newest.
    pub fn depth(mut self, blocks: u64) -> Self {
        self.depth = blocks;
        self
    }

    /// How many of the newest blocks are searched for a payment whose transaction is not named; 10,000 unless set, at most 100,000. A
    /// node that searches less than a hundred at once is not asked for them one by one; one that searches a hundred is asked for 6,000.
    pub fn search(mut self, blocks: u64) -> Self {
        self.search = blocks.min(100_000);
        self
    }

    /// How far a record's time may be from that of the payment's block, before it or after; an hour unless set.
    pub fn drift(mut self, drift: Duration) -> Self {
        self.drift = drift;
        self
    }

    /// How long a check may take in all; ten seconds unless set.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How many checks may be under way at once; 16 unless set. The others wait a moment, and are then told to come again.
    pub fn at_once(mut self, checks: usize) -> Self {
        self.places = Semaphore::new(checks.min(Semaphore::MAX_PERMITS));
        self
    }

    /// Its chain.
    pub const fn network(&self) -> Network {
        self.network
    }

    /// Whether it looks at payments with this token on this chain.
    pub fn serves(&self, network: Network, asset: Address) -> bool {
        self.network == network && self.tokens.contains(&asset)
    }

    /// Checks the signature, and that the payment took place about when the record says.
    ///
    /// # Errors
    /// [`WitnessError`].
    pub async fn check(&self, said: &SignedEvidence) -> Result<Payment, WitnessError> {
        let of = said.verify()?;
        if !self.serves(of.network, of.asset) {
            return Err(WitnessError::NotServed { network: of.network, asset: of.asset });
        }
        let expected = expected(&of, said);
        let looking = async {
            let _place = self.enter().await?;
            let mut found = None;
            for node in &self.nodes {
                // The first to find the transaction tells the others where it is.
                let transaction = found.map(|(transaction, _)| transaction).or(said.transaction);
                found = Some(self.look(node, &expected, transaction).await?);
            }
            found.ok_or(WitnessError::Unavailable("no node is known"))
        };
        let (transaction, block) = timeout(self.timeout, looking).await.map_err(|_| LATE)??;
        let (at, block_time) = (said.evidence.at, block.timestamp.saturating_to::<u64>());
        if at.abs_diff(block_time) > self.drift.as_secs() {
            return Err(WitnessError::Implausible { at, block_time });
        }
        Ok(Payment { of, transaction, block: block.number.saturating_to(), block_time })
    }

    /// The newest block that will not be undone, if the node tells.
    #[cfg(feature = "directory")]
    pub(super) async fn finalized(&self) -> Option<u64> {
        let block = self.nodes.first()?.rpc.block("finalized").await.ok()??;
        Some(block.number.saturating_to())
    }

    /// Whether a payment that was found in this block is there, or gone, for good; `None` if not all nodes know and say the same. In
    /// another block now, its time may be another one, but it stands.
    ///
    /// # Errors
    /// If the nodes cannot be asked in time.
    #[cfg(feature = "directory")]
    pub(super) async fn stands(&self, said: &SignedEvidence, block: u64) -> Result<Option<bool>, WitnessError> {
        let (of, Some(transaction)) = (said.verify()?, said.transaction) else { return Ok(None) };
        let expected = expected(&of, said);
        let looking = async {
            let _place = self.enter().await?;
            let mut all = None;
            for node in &self.nodes {
                let here = self.stands_at(node, &expected, transaction, block).await?;
                if here.is_none() || all.is_some_and(|before| Some(before) != here) {
                    return Ok(None);
                }
                all = here;
            }
            Ok(all)
        };
        timeout(self.timeout, looking).await.map_err(|_| LATE)?
    }

    /// The same, as one node tells. One that has not come to that block, or that shows the payment in a block that may yet be
    /// replaced, does not know.
    #[cfg(feature = "directory")]
    async fn stands_at(
        &self,
        node: &Node,
        expected: &Expected,
        transaction: B256,
        block: u64,
    ) -> Result<Option<bool>, WitnessError> {
        let rpc = &node.rpc;
        node.is_of_network.get_or_try_init(|| self.check_network(rpc)).await?;
        let Some(is_final) = rpc.block("finalized").await?.map(|block| block.number.saturating_to::<u64>()) else {
            return Ok(None);
        };
        if is_final < block {
            return Ok(None);
        }
        let Some(receipt) = rpc.receipt(transaction).await? else {
            return Ok(is_gone(rpc, expected, transaction, [block, is_final]).await.then_some(false));
        };
        if receipt.transaction_hash != transaction || receipt.block() > is_final {
            return Ok(None);
        }
        match self.block_of(rpc, &receipt).await {
            Ok(_) => Ok(Some(receipt.succeeded() && expected.is_paid_by(&receipt))),
            Err(WitnessError::NotYet(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn enter(&self) -> Result<SemaphorePermit<'_>, WitnessError> {
        let place = timeout(PATIENCE, self.places.acquire()).await;
        place.ok().and_then(Result::ok).ok_or(WitnessError::Unavailable("too many are asking"))
    }

    async fn look(
        &self,
        node: &Node,
        expected: &Expected,
        transaction: Option<B256>,
    ) -> Result<(B256, Block), WitnessError> {
        let rpc = &node.rpc;
        node.is_of_network.get_or_try_init(|| self.check_network(rpc)).await?;
        let head = rpc.block("latest").await?.ok_or(WitnessError::Unavailable("the node has no block"))?;
        let head: u64 = head.number.saturating_to();
        let transaction = match transaction {
            Some(transaction) => transaction,
            None => match search(rpc, expected, head.saturating_sub(self.search), head).await? {
                Use::Paid { transaction, .. } => transaction,
                Use::Wasted { .. } => {
                    return Err(WitnessError::NotPaid(
                        "the authorization was cancelled, or paid something else than that",
                    ));
                }
                Use::NotFound => {
                    return Err(WitnessError::NotYet("the payment is not in the newest blocks; name its transaction"));
                }
            },
        };
        let receipt = rpc.receipt(transaction).await?;
        let receipt = receipt.ok_or(WitnessError::NotYet("the transaction is in no block"))?;
        if receipt.transaction_hash != transaction {
            return Err(WitnessError::Unavailable("the node answers something else than it was asked"));
        }
        if !receipt.succeeded() {
            return Err(WitnessError::NotPaid("the transaction failed"));
        }
        if !expected.is_paid_by(&receipt) {
            return Err(WitnessError::NotPaid(
                "the transaction does not execute this payer's authorization with this nonce, for exactly this amount, to this evaluator",
            ));
        }
        if head < receipt.block().saturating_add(self.depth) {
            return Err(WitnessError::NotYet("the payment's block is not deep enough"));
        }
        Ok((transaction, self.block_of(rpc, &receipt).await?))
    }

    /// The block of a receipt, if it is on the chain as it is now.
    async fn block_of(&self, rpc: &Rpc, receipt: &Receipt) -> Result<Block, WitnessError> {
        let block = rpc.block_at(receipt.block()).await?;
        let is_it = |block: &Block| {
            block.number == receipt.block_number
                && receipt.logs.iter().all(|log| log.block_hash.is_none_or(|hash| hash == block.hash))
        };
        block.filter(is_it).ok_or(WitnessError::NotYet("the payment's block was replaced"))
    }

    async fn check_network(&self, rpc: &Rpc) -> Result<(), WitnessError> {
        let is_it = rpc.chain_id().await? == self.network.chain_id();
        is_it.then_some(()).ok_or(WitnessError::Unavailable("the node is one of another chain"))
    }
}

/// Whether a transaction that was in this block and has no receipt now is gone, as of that final block.
///
/// That there is no receipt proves nothing: behind one address there may be several nodes, of which the one that was asked for it is
/// behind the others, or has forgotten. What proves it is an authorization that is unused in the final block, or that another
/// transaction has used. A node that does not tell proves nothing either.
#[cfg(feature = "directory")]
async fn is_gone(rpc: &Rpc, expected: &Expected, transaction: B256, [block, is_final]: [u64; 2]) -> bool {
    match credit::is_used(rpc, expected, is_final).await {
        Ok(Some(false)) => true,
        Ok(Some(true)) => {
            let near = [block.saturating_sub(NEAR), block.saturating_add(NEAR).min(is_final)];
            match credit::find(rpc, expected, near[0], near[1]).await {
                Ok(Use::Paid { transaction: by, .. } | Use::Wasted { transaction: by, .. }) => by != transaction,
                Ok(Use::NotFound) | Err(_) => false,
            }
        }
        Ok(None) | Err(_) => false,
    }
}

fn expected(of: &PaymentOf, said: &SignedEvidence) -> Expected {
    Expected {
        token: of.asset,
        payer: of.voice.payer,
        payee: said.evidence.evaluator,
        value: U256::from(said.evidence.paid.atomic()),
        nonce: of.voice.nonce,
    }
}

async fn search(rpc: &Rpc, expected: &Expected, after: u64, head: u64) -> Result<Use, WitnessError> {
    credit::find_newest(rpc, expected, after, head).await.map_err(|failure| match failure {
        RpcFailure::Refused { .. } => WitnessError::Unavailable(
            "the node does not search a hundred blocks at once; name the payment's transaction, or use another node",
        ),
        other => other.into(),
    })
}

impl fmt::Debug for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Witness")
            .field("network", &self.network)
            .field("nodes", &self.nodes.len())
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}

impl From<RpcFailure> for WitnessError {
    fn from(_: RpcFailure) -> Self {
        Self::Unavailable("the node did not answer, or with an error")
    }
}
