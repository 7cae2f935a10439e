//! Finding the transaction that used an authorization, if it was not one of ours.
//!
//! An authorization is public once it is broadcast, and anybody may execute it: the payee is paid all the same. Settlement counts
//! such a transfer if it came after the payment was reserved here. An earlier one may have paid for something else.

use alloy_primitives::{B256, Bytes, U64};
use alloy_sol_types::{SolCall as _, SolEvent};
use serde_json::json;

use super::{
    log_search,
    permit::{self, PermitUse, Searched},
    receipt_check::ExpectedTransfer,
    rpc::{Log, Rpc, RpcFailure},
    transfer::Token,
};

/// How many requests search the oldest blocks, where most uses are; the others search the newest.
pub(crate) const FOR_THE_OLDEST: usize = 64;

/// What an authorization was used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuthorizationUse {
    /// It made the payment.
    Paid { transaction: B256, block: u64 },
    /// It was cancelled, or made another payment.
    Otherwise { transaction: B256, block: u64 },
    /// No use was found. Of a permit, nothing may have been found although all blocks were searched: Permit2 has no event for its uses.
    NotFound { is_complete: bool },
}

/// Returns `true` if the authorization is used or cancelled as of that block, or `None` if the token does not say.
pub(crate) async fn is_used(rpc: &Rpc, expected: &ExpectedTransfer, block: u64) -> Result<Option<bool>, RpcFailure> {
    if expected.is_by_permit() {
        return permit::is_used(rpc, expected.payer, expected.nonce, U64::from(block)).await;
    }
    let call = Token::authorizationStateCall { authorizer: expected.payer, nonce: expected.nonce };
    let request = json!({ "to": expected.token, "data": Bytes::from(call.abi_encode()) });
    let answer: Bytes = rpc.call("eth_call", (request, U64::from(block))).await?;
    Ok(Token::authorizationStateCall::abi_decode_returns(&answer).ok())
}

/// Searches the blocks after `seen_unused` up to `latest` for the use of the authorization.
///
/// The oldest blocks come first, since most authorizations are used soon after they were seen. Then come the newest, so that repeated
/// searches find a later use too, however few blocks the node searches at once.
pub(crate) async fn find(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    seen_unused: u64,
    latest: u64,
) -> Result<AuthorizationUse, RpcFailure> {
    search(rpc, expected, [seen_unused.saturating_add(1), latest], FOR_THE_OLDEST).await
}

/// Searches the newest blocks first, for callers that do not know when the authorization was unused. The search may end before all
/// blocks were searched.
pub(crate) async fn find_newest(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    after: u64,
    latest: u64,
) -> Result<AuthorizationUse, RpcFailure> {
    search(rpc, expected, [after.saturating_add(1), latest], 0).await
}

async fn search(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    blocks: [u64; 2],
    for_the_oldest: usize,
) -> Result<AuthorizationUse, RpcFailure> {
    if expected.is_by_permit() {
        return search_permit(rpc, expected, blocks, for_the_oldest).await;
    }
    let topics = json!([
        [Token::AuthorizationUsed::SIGNATURE_HASH, Token::AuthorizationCanceled::SIGNATURE_HASH],
        expected.payer.into_word(),
        expected.nonce,
    ]);
    match log_search::find(rpc, expected.token, &topics, blocks, for_the_oldest, |_| true).await? {
        Some(log) => classify(rpc, expected, &log).await,
        None => Ok(AuthorizationUse::NotFound { is_complete: false }),
    }
}

/// A permit made the payment, moved another amount, or was invalidated.
async fn search_permit(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    blocks: [u64; 2],
    for_the_oldest: usize,
) -> Result<AuthorizationUse, RpcFailure> {
    let has_searched_uses = match permit::find_use(rpc, expected, blocks, for_the_oldest).await? {
        Searched::Found(PermitUse { transaction, block, amount, is_received }) => {
            return Ok(match amount == expected.value && is_received {
                true => AuthorizationUse::Paid { transaction, block },
                false => AuthorizationUse::Otherwise { transaction, block },
            });
        }
        Searched::NotFound { is_complete } => is_complete,
    };
    Ok(match permit::find_invalidation(rpc, expected, blocks, for_the_oldest, has_searched_uses).await? {
        Searched::Found((transaction, block)) => AuthorizationUse::Otherwise { transaction, block },
        Searched::NotFound { is_complete } => {
            AuthorizationUse::NotFound { is_complete: is_complete && has_searched_uses }
        }
    })
}

/// Tells from the receipt what the use that this log shows was for.
async fn classify(rpc: &Rpc, expected: &ExpectedTransfer, log: &Log) -> Result<AuthorizationUse, RpcFailure> {
    let (Some(transaction), Some(block)) = (log.transaction_hash, log.block_number) else {
        return Ok(AuthorizationUse::NotFound { is_complete: false });
    };
    let block = block.saturating_to();
    // The node just showed a log of this transaction. If there is no receipt, the block was replaced meanwhile.
    let receipt = rpc.receipt(transaction).await?.ok_or(RpcFailure::Silent)?;
    if expected.is_paid_by(&receipt) {
        return Ok(AuthorizationUse::Paid { transaction, block: receipt.block() });
    }
    Ok(AuthorizationUse::Otherwise { transaction, block })
}
