//! Reconciliation with the chain.

use std::time::{Duration, Instant};

use alloy_provider::Provider;
use alloy_rpc_client::RpcClient;

use super::{Budget, JournalEntry, Proof, Reconciliation};
use crate::chain::{
    authorization_use::{self, AuthorizationUse, FOR_THE_OLDEST},
    block_search::around,
    permit::{self, PermitUse, Searched},
    receipt_check::ExpectedTransfer,
    rpc::{Block, Rpc, RpcFailure},
};
use crate::usdc::Usdc;

/// The timeout of one request to the node.
pub(in crate::client) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How far the client's clock may have been ahead of the chain's when it signed, in seconds.
const CLOCK_SKEW: u64 = 900;
/// After this many timeouts in a row, the other payments are not looked up.
const MAX_TIMEOUTS: usize = 3;

/// An error that prevented every lookup. No payment was resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReconcileError {
    /// The node did not answer, or its answer could not be read. Try again.
    #[error("the node did not answer")]
    Silent,
    /// The node refused a request that reconciliation needs: blocks by number, calls at a final block, logs. Use another node.
    #[error("the node refused: {message} ({code})")]
    Refused {
        /// The JSON-RPC error code.
        code: i64,
        /// The JSON-RPC error message.
        message: String,
    },
    /// The node has no final block. Use another node.
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

/// Resolves the open payments of the budget's journal by what is final on the chain.
///
/// - A payment was *made* if the token's logs show that its authorization was used, with the transfer to the payee. It becomes spent.
/// - A payment is *void* if a final block past `validBefore` shows that its authorization is unused, or if it was cancelled. It is no
///   longer reserved.
/// - Any other payment stays open. This includes an authorization that was used by a transaction that cannot be found: the signature
///   can have paid nobody but the payee.
///
/// Call it at any time, also while payments are under way. A payment that cannot be looked up is counted
/// ([`unseen`](Reconciliation::unseen)) and does not prevent the others from being resolved.
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
/// [`ReconcileError`] if no payment could be looked up.
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
    let rpc = Rpc::new(RpcClient::new(client.transport().clone(), client.is_local()), REQUEST_TIMEOUT);
    let chain_id = rpc.chain_id().await?;
    let last = rpc.block("finalized").await?.ok_or(ReconcileError::NoFinality)?;
    let (mut seen, mut timeouts, mut failure) = (0, 0, None);
    for entry in entries {
        if entry.network.chain_id() != chain_id {
            found.record(budget, &entry, None).await;
            continue;
        }
        if timeouts >= MAX_TIMEOUTS {
            found.count_unseen();
            continue;
        }
        let asked = Instant::now();
        match prove(&rpc, &entry, last).await {
            Ok(proof) => {
                (seen, timeouts) = (seen + 1, 0);
                found.record(budget, &entry, proof).await;
            }
            Err(error) => {
                tracing::debug!(?error, nonce = %entry.nonce, "a payment could not be looked up");
                // A node that has pruned the block answers at once; other payments may be found.
                let is_timeout = matches!(error, RpcFailure::Silent) && asked.elapsed() >= REQUEST_TIMEOUT;
                timeouts = if is_timeout { timeouts + 1 } else { 0 };
                failure.get_or_insert(error);
                found.count_unseen();
            }
        }
    }
    match failure {
        Some(error) if seen == 0 => Err(error.into()),
        _ => Ok(found),
    }
}

/// Returns what the blocks up to `last`, the newest final one, prove about a payment.
async fn prove(rpc: &Rpc, entry: &JournalEntry, last: Block) -> Result<Option<Proof>, RpcFailure> {
    let expected = ExpectedTransfer {
        token: entry.asset,
        payer: entry.payer,
        payee: entry.pay_to,
        value: entry.amount.into(),
        nonce: entry.nonce,
        permit: entry.permit,
    };
    let Some(used) = authorization_use::is_used(rpc, &expected, last.number.saturating_to()).await? else {
        return Ok(None);
    };
    if !used {
        // A permit is valid up to and including its deadline.
        let void_from = entry.valid_before.saturating_add(expected.is_by_permit().into());
        let expired = last.timestamp.saturating_to::<u64>() >= void_from;
        return Ok(expired.then_some(Proof::Void));
    }
    let (from, _) = around(rpc, entry.signed_at.saturating_sub(CLOCK_SKEW), last).await?;
    let (_, to) = around(rpc, entry.valid_before, last).await?;
    if expected.is_by_permit() {
        let blocks = [from.saturating_add(1), to];
        let is_unused = match permit::find_use(rpc, &expected, blocks, FOR_THE_OLDEST).await? {
            Searched::Found(PermitUse { transaction, amount, .. }) => {
                return Ok(Some(Proof::Paid { transaction, charged: Usdc::try_from(amount).ok() }));
            }
            Searched::NotFound { is_complete } => is_complete,
        };
        let invalidated = permit::find_invalidation(rpc, &expected, blocks, FOR_THE_OLDEST, is_unused).await?;
        return Ok(matches!(invalidated, Searched::Found(_)).then_some(Proof::Void));
    }
    Ok(match authorization_use::find(rpc, &expected, from, to).await? {
        AuthorizationUse::Paid { transaction, .. } => Some(Proof::Paid { transaction, charged: None }),
        AuthorizationUse::Otherwise { transaction, .. } => {
            // The node just showed a log of this transaction.
            let receipt = rpc.receipt(transaction).await?.ok_or(RpcFailure::Silent)?;
            expected.is_cancelled_by(&receipt).then_some(Proof::Void)
        }
        AuthorizationUse::NotFound { .. } => None,
    })
}
