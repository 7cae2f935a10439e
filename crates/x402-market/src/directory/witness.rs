//! Whether a payment reached an evaluator, as a chain tells it.

use std::{fmt, time::Duration};

use alloy_primitives::{Address, B256, U256};
use alloy_rpc_client::RpcClient;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};
#[cfg(feature = "directory")]
use tower_x402::chain::Finality;
use tower_x402::{
    Asset, Network,
    chain::{LookupError, MinedPayment, PaymentLookup, PaymentState, SoughtPayment},
};

use super::{PaymentOf, SignedEvidence, VoiceError};

/// How long a check waits for its turn.
const PATIENCE: Duration = Duration::from_secs(2);

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
/// # fn example() -> Result<(), x402_market::directory::WitnessError> {
/// use tower_x402::Network;
/// use x402_market::directory::Witness;
///
/// let witness = Witness::new(Network::BASE).rpc_url("https://your-node.example")?.depth(20);
/// # Ok(()) }
/// ```
pub struct Witness {
    network: Network,
    tokens: Vec<Address>,
    nodes: Vec<PaymentLookup>,
    depth: u64,
    search: u64,
    drift: Duration,
    timeout: Duration,
    places: Semaphore,
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
        let node = PaymentLookup::at_url(self.network, url)?;
        Ok(self.node(node))
    }

    /// The same, as an alloy client with a transport of your choice.
    pub fn client(self, client: RpcClient) -> Self {
        let node = PaymentLookup::new(self.network, client);
        self.node(node)
    }

    fn node(mut self, node: PaymentLookup) -> Self {
        self.nodes.push(node.timeout(self.timeout));
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
        let sought = sought(&of, said);
        let looking = async {
            let _place = self.enter().await?;
            let mut found = None::<MinedPayment>;
            for node in &self.nodes {
                // The first to find the transaction tells the others where it is.
                let transaction = found.map(|mined| mined.transaction).or(said.transaction);
                found = Some(self.look(node, &sought, transaction).await?);
            }
            found.ok_or(WitnessError::Unavailable("no node is known"))
        };
        let mined = timeout(self.timeout, looking).await.map_err(|_| LATE)??;
        let (at, block_time) = (said.evidence.at, mined.block_time);
        if at.abs_diff(block_time) > self.drift.as_secs() {
            return Err(WitnessError::Implausible { at, block_time });
        }
        Ok(Payment { of, transaction: mined.transaction, block: mined.block, block_time })
    }

    /// The newest block that will not be undone, if the node tells.
    #[cfg(feature = "directory")]
    pub(super) async fn finalized(&self) -> Option<u64> {
        self.nodes.first()?.finalized().await.ok()?
    }

    /// Whether a payment that was found in this block is there, or gone, for good; `None` if not all nodes know and say the same. In
    /// another block now, its time may be another one, but it stands.
    ///
    /// # Errors
    /// If the nodes cannot be asked in time.
    #[cfg(feature = "directory")]
    pub(super) async fn stands(&self, said: &SignedEvidence, block: u64) -> Result<Option<bool>, WitnessError> {
        let (of, Some(transaction)) = (said.verify()?, said.transaction) else { return Ok(None) };
        let sought = sought(&of, said);
        let looking = async {
            let _place = self.enter().await?;
            let mut all = None;
            for node in &self.nodes {
                // One that has not come to that block, or that shows the payment in a block that may yet be replaced, does not know.
                let here = match node.finality(&sought, transaction, block).await? {
                    Finality::Final => Some(true),
                    Finality::Reorged => Some(false),
                    Finality::Open => None,
                };
                if here.is_none() || all.is_some_and(|before| Some(before) != here) {
                    return Ok(None);
                }
                all = here;
            }
            Ok(all)
        };
        timeout(self.timeout, looking).await.map_err(|_| LATE)?
    }

    async fn enter(&self) -> Result<SemaphorePermit<'_>, WitnessError> {
        let place = timeout(PATIENCE, self.places.acquire()).await;
        place.ok().and_then(Result::ok).ok_or(WitnessError::Unavailable("too many are asking"))
    }

    async fn look(
        &self,
        node: &PaymentLookup,
        sought: &SoughtPayment,
        transaction: Option<B256>,
    ) -> Result<MinedPayment, WitnessError> {
        let state = match transaction {
            Some(transaction) => node.transaction(sought, transaction).await?,
            None => node.search(sought, self.search).await?,
        };
        match state {
            PaymentState::Made(mined) if mined.latest < mined.block.saturating_add(self.depth) => {
                Err(WitnessError::NotYet("the payment's block is not deep enough"))
            }
            PaymentState::Made(mined) => Ok(mined),
            PaymentState::NotFound => {
                Err(WitnessError::NotYet("the payment is not in the newest blocks; name its transaction"))
            }
            PaymentState::NotMined => Err(WitnessError::NotYet("the transaction is in no block")),
            PaymentState::Replaced => Err(WitnessError::NotYet("the payment's block was replaced")),
            PaymentState::Failed => Err(WitnessError::NotPaid("the transaction failed")),
            PaymentState::UsedOtherwise => {
                Err(WitnessError::NotPaid("the authorization was cancelled, or paid something else than that"))
            }
            // There are no others; what is not known proves no payment.
            PaymentState::NotThis | _ => Err(WitnessError::NotPaid(
                "the transaction does not execute this payer's authorization with this nonce, for exactly this amount, to this evaluator",
            )),
        }
    }
}

fn sought(of: &PaymentOf, said: &SignedEvidence) -> SoughtPayment {
    SoughtPayment {
        token: of.asset,
        payer: of.voice.payer,
        payee: said.evidence.evaluator,
        amount: U256::from(said.evidence.paid.atomic()),
        nonce: of.voice.nonce,
    }
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

impl From<LookupError> for WitnessError {
    fn from(error: LookupError) -> Self {
        match error {
            LookupError::Url => Self::Url,
            LookupError::OtherChain => Self::Unavailable("the node is one of another chain"),
            LookupError::NoBlock => Self::Unavailable("the node has no block"),
            LookupError::Mismatch => Self::Unavailable("the node answers something else than it was asked"),
            LookupError::SearchRefused => Self::Unavailable(
                "the node does not search a hundred blocks at once; name the payment's transaction, or use another node",
            ),
            _ => Self::Unavailable("the node did not answer, or with an error"),
        }
    }
}
