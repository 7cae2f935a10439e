//! Checks on a chain that reported payments took place.

use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use alloy_rpc_client::RpcClient;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};
#[cfg(feature = "service")]
use tower_x402::chain::Finality;
use tower_x402::{
    Asset, Network,
    chain::{LookupError, MinedPayment, PaymentLookup, PaymentState, SoughtCharge, SoughtPayment},
    payment::PaymentKey,
};

use super::{ReportError, SignedEvidence};
use x402_market::evidence::Evidence;

/// How long a check waits for a permit.
const PERMIT_WAIT: Duration = Duration::from_secs(2);

/// How many of the newest blocks are searched if a report names no transaction.
///
/// The search asks for ranges of blocks. A node that answers only for ranges below a hundred blocks is not searched; one that answers for a
/// hundred is searched for 6,000.
const SEARCH: u64 = 10_000;
/// How far a report's time may be from the time of the payment's block, before or after, in seconds.
const DRIFT: u64 = 3_600;
/// How much later a charge on a payment channel may be claimed, in seconds. Sellers claim within an hour, unless they set another time.
const CLAIM_DELAY: u64 = 86_400;

const LATE: PaymentCheckError = PaymentCheckError::Unavailable("the node did not answer in time");

/// Checks on a chain that the payments of reports took place.
///
/// A payment took place if one transaction, in a block that is deep enough, contains `AuthorizationUsed(payer, nonce)` of the token,
/// directly followed by `Transfer(payer → evaluator, paid)`. Sellers recognize payments by the same rule. `authorizationState` is not
/// enough, because cancelling an authorization sets it, too.
///
/// A payment by voucher took place if one event `Claimed` of the escrow contract, in such a block, claimed the whole
/// [charge](x402_market::evidence::ChannelCharge) for the evaluator. What is claimed cannot be taken back by the payer: refunds and withdrawals
/// only take what is not. Two reports can name parts of one claim that overlap. Whoever counts reports refuses that, as the directory does.
///
/// With several nodes, all must agree. A lying node can then keep a report out, but it cannot get one in or have one removed.
///
/// ```no_run
/// # fn example() -> Result<(), x402_directory::PaymentCheckError> {
/// use tower_x402::Network;
/// use x402_directory::PaymentChecker;
///
/// let checker = PaymentChecker::new(Network::BASE).rpc_url("https://your-node.example")?.depth(20);
/// # Ok(()) }
/// ```
#[must_use]
pub struct PaymentChecker {
    network: Network,
    tokens: Vec<Address>,
    nodes: Vec<PaymentLookup>,
    depth: u64,
    timeout: Duration,
    permits: Semaphore,
}

/// The payment of a report, as it was found on the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReportedPayment {
    /// Its identity.
    pub key: PaymentKey,
    /// The transaction that settled it, or claimed it from a payment channel.
    pub transaction: B256,
    /// The number of its block.
    pub block: u64,
    /// The time of its block, in seconds since the Unix epoch.
    pub block_time: u64,
}

/// A reported payment could not be confirmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PaymentCheckError {
    /// The report is not valid or not signed by the payer.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// The checker is for another network or other tokens. See [`PaymentChecker::token`].
    #[error("payments with {asset} on {network} are not checked here")]
    NotServed {
        /// The chain.
        network: Network,
        /// The token.
        asset: Address,
    },
    /// The payment was not found, or its block is not deep enough. Try again later.
    #[error("{0}")]
    NotYet(&'static str),
    /// The chain contradicts the report.
    #[error("{0}")]
    NotPaid(&'static str),
    /// The report's time and the block's time are too far apart. They may be an hour apart;
    /// a charge on a payment channel may be claimed a day later.
    #[error("the report is of {at}, but the payment's block is of {block_time}")]
    Implausible {
        /// The time in the report, in seconds since the Unix epoch.
        at: u64,
        /// The block's time, in seconds since the Unix epoch.
        block_time: u64,
    },
    /// No node could answer, or the answers make no sense. Try again later.
    #[error("the chain cannot be asked now: {0}")]
    Unavailable(&'static str),
    /// The node's URL is not valid, or TLS cannot be used. The URL is not shown, because it may contain a key.
    #[error("the node's URL is not valid, or TLS cannot be used")]
    Url,
}

impl PaymentChecker {
    /// Creates a checker of payments in the network's USDC, if that is known. Add a node with [`rpc_url`](Self::rpc_url).
    pub fn new(network: Network) -> Self {
        Self {
            network,
            tokens: network.usdc().map(|usdc| usdc.address).into_iter().collect(),
            nodes: Vec::new(),
            depth: 12,
            timeout: Duration::from_secs(10),
            permits: Semaphore::new(16),
        }
    }

    /// Adds a node. If there are several, all must agree.
    ///
    /// # Errors
    /// [`PaymentCheckError::Url`] if the URL is not valid or TLS cannot be used.
    pub fn rpc_url(self, url: impl AsRef<str>) -> Result<Self, PaymentCheckError> {
        let node = PaymentLookup::at_url(self.network, url)?;
        Ok(self.node(node))
    }

    /// Adds a node by its alloy client, with any transport.
    pub fn client(self, client: RpcClient) -> Self {
        let node = PaymentLookup::new(self.network, client);
        self.node(node)
    }

    fn node(mut self, node: PaymentLookup) -> Self {
        self.nodes.push(node.timeout(self.timeout));
        self
    }

    /// Checks payments in this token, too. Add only tokens whose contract you trust: whoever controls a token can emit events of
    /// payments that never took place.
    pub fn token(mut self, asset: &Asset) -> Self {
        if asset.network == self.network {
            self.tokens.push(asset.address);
        }
        self
    }

    /// Sets how many blocks must be on top of a payment's block. Default: 12. Base replaces blocks rarely, and only the newest.
    pub fn depth(self, blocks: u64) -> Self {
        Self { depth: blocks, ..self }
    }

    /// Sets how long a check may take in all. Default: 10 s.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets how many checks may run at once. Default: 16. Further ones wait two seconds, then fail with
    /// [`PaymentCheckError::Unavailable`].
    pub fn max_concurrent(self, checks: usize) -> Self {
        Self { permits: Semaphore::new(checks.min(Semaphore::MAX_PERMITS)), ..self }
    }

    /// Returns `true` if payments with this token on this chain are checked.
    pub fn serves(&self, network: Network, asset: Address) -> bool {
        self.network == network && self.tokens.contains(&asset)
    }

    /// Checks the report's signature, and that its payment took place at about the report's time.
    ///
    /// # Errors
    /// [`PaymentCheckError`] says what is wrong, or that it cannot be known now.
    pub async fn check(&self, report: &SignedEvidence) -> Result<ReportedPayment, PaymentCheckError> {
        let key = report.verify()?;
        if !self.serves(key.network, key.asset) {
            return Err(PaymentCheckError::NotServed { network: key.network, asset: key.asset });
        }
        let sought = sought(&key, report);
        let looking = async {
            let _permit = self.permit().await?;
            let mut found = None::<MinedPayment>;
            for node in &self.nodes {
                // The first to find the transaction tells the others where it is.
                let transaction = found.map(|mined| mined.transaction).or(report.transaction);
                found = Some(self.look(node, &sought, transaction).await?);
            }
            found.ok_or(PaymentCheckError::Unavailable("no node was given"))
        };
        let mined = timeout(self.timeout, looking).await.map_err(|_| LATE)??;
        let (at, block_time) = (report.evidence.at, mined.block_time);
        let latest = DRIFT + report.evidence.charge.map_or(0, |_| CLAIM_DELAY);
        if block_time < at.saturating_sub(DRIFT) || block_time > at.saturating_add(latest) {
            return Err(PaymentCheckError::Implausible { at, block_time });
        }
        Ok(ReportedPayment { key, transaction: mined.transaction, block: mined.block, block_time })
    }

    /// Returns the number of the finalized block, if the node knows it.
    #[cfg(feature = "service")]
    pub(super) async fn finalized(&self) -> Option<u64> {
        self.nodes.first()?.finalized().await.ok()?
    }

    /// Returns whether a payment that was found in this block exists (`true`) or is gone for good (`false`). `None` if not all nodes
    /// know and agree. A payment that moved to another block exists, even though its time may differ.
    ///
    /// # Errors
    /// If the nodes cannot be asked in time.
    #[cfg(feature = "service")]
    pub(super) async fn exists_finally(
        &self,
        report: &SignedEvidence,
        block: u64,
    ) -> Result<Option<bool>, PaymentCheckError> {
        let (key, Some(transaction)) = (report.verify()?, report.transaction) else { return Ok(None) };
        let sought = sought(&key, report);
        let looking = async {
            let _permit = self.permit().await?;
            let mut all = None;
            for node in &self.nodes {
                // A node that is behind that block, or has the payment in a block that is not final, does not know.
                let finality = match &sought {
                    Sought::Transfer(payment) => node.finality(payment, transaction, block).await?,
                    Sought::Charge(charge) => node.claim_finality(charge, transaction, block).await?,
                };
                let here = match finality {
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

    async fn permit(&self) -> Result<SemaphorePermit<'_>, PaymentCheckError> {
        let permit = timeout(PERMIT_WAIT, self.permits.acquire()).await;
        permit.ok().and_then(Result::ok).ok_or(PaymentCheckError::Unavailable("too many checks are running"))
    }

    async fn look(
        &self,
        node: &PaymentLookup,
        sought: &Sought,
        transaction: Option<B256>,
    ) -> Result<MinedPayment, PaymentCheckError> {
        let state = match (sought, transaction) {
            (Sought::Transfer(payment), Some(transaction)) => node.transaction(payment, transaction).await?,
            (Sought::Transfer(payment), None) => node.search(payment, SEARCH).await?,
            (Sought::Charge(charge), Some(transaction)) => node.claim(charge, transaction).await?,
            (Sought::Charge(charge), None) => node.search_claim(charge, SEARCH).await?,
        };
        match state {
            PaymentState::Made(mined) if mined.latest < mined.block.saturating_add(self.depth) => {
                Err(PaymentCheckError::NotYet("the payment's block is not deep enough"))
            }
            PaymentState::Made(mined) => Ok(mined),
            PaymentState::NotFound => Err(PaymentCheckError::NotYet(match sought {
                Sought::Transfer(_) => "the payment is not in the newest blocks; name its transaction",
                Sought::Charge(_) => {
                    "the charge was not claimed in the newest blocks; if it was before, name the transaction"
                }
            })),
            PaymentState::NotMined => Err(PaymentCheckError::NotYet("the transaction is in no block")),
            PaymentState::Replaced => Err(PaymentCheckError::NotYet("the payment's block was replaced")),
            PaymentState::Failed => Err(PaymentCheckError::NotPaid("the transaction failed")),
            PaymentState::UsedOtherwise => {
                Err(PaymentCheckError::NotPaid("the authorization was cancelled, or used for another payment"))
            }
            // A state that is added later does not prove a payment.
            PaymentState::NotThis | _ => Err(PaymentCheckError::NotPaid(match sought {
                Sought::Transfer(_) => {
                    "the transaction does not execute this payer's authorization with this nonce, for exactly this amount, to this evaluator"
                }
                Sought::Charge(_) => "the transaction does not claim the whole charge from this payment channel",
            })),
        }
    }
}

/// What a report says that was paid.
enum Sought {
    Transfer(SoughtPayment),
    Charge(SoughtCharge),
}

/// Returns what to look for. The report is verified, so its channel is of its payer, evaluator and token.
fn sought(key: &PaymentKey, report: &SignedEvidence) -> Sought {
    let Evidence { evaluator, paid, charge, .. } = &report.evidence;
    match charge {
        Some(charge) => Sought::Charge(SoughtCharge {
            channel: charge.channel_id(key.network),
            charged: charge.charged.atomic().into(),
            amount: paid.atomic().into(),
        }),
        None => Sought::Transfer(SoughtPayment {
            token: key.asset,
            payer: key.payer,
            payee: *evaluator,
            amount: U256::from(paid.atomic()),
            nonce: key.nonce,
        }),
    }
}

tower_x402::debug_fields!(PaymentChecker |this| { network: this.network, nodes: this.nodes.len(), depth: this.depth });

impl From<LookupError> for PaymentCheckError {
    fn from(error: LookupError) -> Self {
        match error {
            LookupError::Url => Self::Url,
            LookupError::OtherChain => Self::Unavailable("the node is of another chain"),
            LookupError::NoBlock => Self::Unavailable("the node has no blocks"),
            LookupError::Mismatch => Self::Unavailable("the node answered another question"),
            LookupError::SearchRefused => Self::Unavailable(
                "the node does not search a hundred blocks at once: name the payment's transaction, or use another node",
            ),
            _ => Self::Unavailable("the node did not answer, or answered with an error"),
        }
    }
}
