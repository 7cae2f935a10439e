//! What the chain says about payments that nobody answered for.

use std::time::{Duration, Instant};

use alloy_primitives::U64;
use alloy_provider::Provider;
use alloy_rpc_client::RpcClient;

use super::{
    Budget, JournalEntry,
    reconciliation::{Proof, Reconciliation},
};
use crate::chain::{
    authorization_use::{self, AuthorizationUse},
    receipt_check::ExpectedTransfer,
    rpc::{Block, Rpc, RpcFailure},
};

/// How long one request to the node may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How far the clock that signed may have been ahead of the chain's, in seconds.
const SKEW: u64 = 900;
/// After how many payments in a row for which the node was silent the others are left for another time.
const MOST_SILENT: usize = 3;
/// A block is looked up no more exactly than this: one request for logs covers as many.
const CLOSE_ENOUGH: u64 = 500;

/// Why the chain could not be looked at. Nothing is resolved then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReconcileError {
    /// No answer, or none that can be read; try again.
    #[error("the node did not answer")]
    Silent,
    /// The node refused a request that it must serve: blocks by number, calls at a final block, logs.
    #[error("the node refused: {message} ({code})")]
    Refused {
        /// The JSON-RPC code.
        code: i64,
        /// Its words.
        message: String,
    },
    /// The node knows no final block.
    #[error("the node knows no final block")]
    NoFinality,
}

impl From<RpcFailure> for ReconcileError {
    fn from(failure: RpcFailure) -> Self {
        match failure {
            RpcFailure::Refused { code, message } => Self::Refused { code, message },
            RpcFailure::Silent => Self::Silent,
        }
    }
}

/// Resolves what is open in the budget's journal by what is final on the chain.
///
/// Whatever a server said or did not say, the chain knows: a payment was made if the token's logs show its authorization used
/// with the transfer to the payee, and is void if a final block past `validBefore` shows it unused (or cancelled). The
/// first becomes spent, the second is no longer reserved, and both leave the journal. Everything else stays as it is, also an
/// authorization that was used while the transfer cannot be told: this payer's signature can have paid nobody but the payee.
/// It may be called at any time, also while payments are under way. A payment that cannot be looked at is left as it is and counted
/// ([`unseen`](Reconciliation::unseen)); it does not keep the others open.
///
/// ```no_run
/// # async fn example(budget: tower_x402::client::Budget) -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_provider::ProviderBuilder;
/// use tower_x402::client::reconcile;
///
/// let provider = ProviderBuilder::new().connect_http("https://mainnet.base.org".parse()?);
/// let found = reconcile(&budget, &provider).await?;
/// println!("{} paid, {} void, {} still open", found.paid, found.void, found.open);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ReconcileError`] if no payment could be looked at.
pub async fn reconcile<P, N>(budget: &Budget, provider: &P) -> Result<Reconciliation, ReconcileError>
where
    P: Provider<N>,
    N: alloy_network::Network,
{
    let mut found = Reconciliation::default();
    let entries = budget.journal().unresolved();
    if entries.is_empty() {
        return Ok(found);
    }
    let client = provider.client();
    let rpc = Rpc::new(RpcClient::new(client.transport().clone(), client.is_local()), PATIENCE);
    let chain_id = rpc.chain_id().await?;
    let last = rpc.block("finalized").await?.ok_or(ReconcileError::NoFinality)?;
    let (mut seen, mut silent, mut failure) = (0, 0, None);
    for entry in entries {
        if entry.network.chain_id() != chain_id {
            found.enter(budget, &entry, None).await;
            continue;
        }
        if silent >= MOST_SILENT {
            found.enter_unseen();
            continue;
        }
        let asked = Instant::now();
        match prove(&rpc, &entry, last).await {
            Ok(proof) => {
                (seen, silent) = (seen + 1, 0);
                found.enter(budget, &entry, proof).await;
            }
            Err(error) => {
                tracing::debug!(?error, nonce = %entry.nonce, "a payment could not be looked at");
                // A node that has forgotten something says so at once.
                let is_late = matches!(error, RpcFailure::Silent) && asked.elapsed() >= PATIENCE;
                silent = if is_late { silent + 1 } else { 0 };
                failure.get_or_insert(error);
                found.enter_unseen();
            }
        }
    }
    match failure {
        Some(error) if seen == 0 => Err(error.into()),
        _ => Ok(found),
    }
}

/// What blocks up to `last`, the newest final one, prove about a payment.
async fn prove(rpc: &Rpc, entry: &JournalEntry, last: Block) -> Result<Option<Proof>, RpcFailure> {
    let expected = ExpectedTransfer {
        token: entry.asset,
        payer: entry.payer,
        payee: entry.pay_to,
        value: entry.amount.into(),
        nonce: entry.nonce,
    };
    let Some(used) = authorization_use::is_used(rpc, &expected, last.number.saturating_to()).await? else {
        return Ok(None);
    };
    if !used {
        let expired = last.timestamp.saturating_to::<u64>() >= entry.valid_before;
        return Ok(expired.then_some(Proof::Void));
    }
    let (from, _) = around(rpc, entry.signed_at.saturating_sub(SKEW), last).await?;
    let (_, to) = around(rpc, entry.valid_before, last).await?;
    Ok(match authorization_use::find(rpc, &expected, from, to).await? {
        AuthorizationUse::Paid { transaction, .. } => Some(Proof::Paid { transaction }),
        AuthorizationUse::Otherwise { transaction, .. } => {
            // The node just showed a log of this transaction.
            let receipt = rpc.receipt(transaction).await?.ok_or(RpcFailure::Silent)?;
            expected.is_cancelled_by(&receipt).then_some(Proof::Void)
        }
        AuthorizationUse::NotFound => None,
    })
}

/// Two blocks that are close together, the first from before `time` and the second, if there is one yet, not from before it.
async fn around(rpc: &Rpc, time: u64, last: Block) -> Result<(u64, u64), RpcFailure> {
    let (mut high, mut step) = (last.number.saturating_to::<u64>(), CLOSE_ENOUGH);
    if last.timestamp.saturating_to::<u64>() < time {
        return Ok((high, high));
    }
    let mut low = high.saturating_sub(step);
    while low > 0 && timestamp(rpc, low).await? >= time {
        high = low;
        step = step.saturating_mul(4);
        low = low.saturating_sub(step);
    }
    while high - low > CLOSE_ENOUGH {
        let middle = low + (high - low) / 2;
        match timestamp(rpc, middle).await? < time {
            true => low = middle,
            false => high = middle,
        }
    }
    Ok((low, high))
}

async fn timestamp(rpc: &Rpc, number: u64) -> Result<u64, RpcFailure> {
    let block: Option<Block> = rpc.call("eth_getBlockByNumber", (U64::from(number), false)).await?;
    Ok(block.ok_or(RpcFailure::Silent)?.timestamp.saturating_to())
}
