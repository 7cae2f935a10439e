//! Finding the transaction that used an authorization, if it was not one of ours.
//!
//! An authorization is public once it is broadcast, and anybody may execute it: the payee is paid all the same. Settlement counts
//! such a transfer if it came after the payment was reserved here. An earlier one may have paid for something else.

use alloy_primitives::{Address, B256, Bytes, U64, U256, hex};
use alloy_sol_types::{SolCall as _, SolEvent, SolType as _, sol_data};
use serde_json::json;

use super::{
    log_search,
    permit::{self, PermitUse, Searched},
    receipt_check::ExpectedTransfer,
    rpc::{Log, Rpc, RpcFailure},
    transfer::Token,
};
use crate::network::Network;

/// How many requests search the oldest blocks, where most uses are; the others search the newest.
pub(crate) const FOR_THE_OLDEST: usize = 64;

/// How many blocks may be replaced, the newest at most: 17 minutes on a chain with a block every two seconds, where blocks are final sooner.
const REPLACEABLE: u64 = 512;

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

/// The state of an authorization in the newest block, with what proves of which chain that block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProvenState {
    pub(crate) is_used: bool,
    pub(crate) block: u64,
    pub(crate) timestamp: u64,
}

/// Returns the state of the authorization in the newest block. Fails if a node of another chain answers, which knows of no use: behind one
/// address there may be nodes of several.
pub(crate) async fn proven_state(
    rpc: &Rpc,
    network: Network,
    expected: &ExpectedTransfer,
) -> Result<ProvenState, RpcFailure> {
    let (contract, call, bit) = match expected.is_by_permit() {
        true => permit::use_call(expected.payer, expected.nonce),
        false => {
            let call = Token::authorizationStateCall { authorizer: expected.payer, nonce: expected.nonce };
            (expected.token, call.abi_encode(), U256::MAX)
        }
    };
    let request = json!({ "data": Bytes::from([&state_code(contract)[..], &call].concat()) });
    let answer: Bytes = rpc.call("eth_call", (request, "latest")).await?;
    let words = sol_data::FixedArray::<sol_data::Uint<256>, 5>::abi_decode(&answer);
    let [chain, length, state, block, timestamp] = words.map_err(|_| RpcFailure::Silent)?;
    if chain != U256::from(network.chain_id()) {
        tracing::warn!(%network, %chain, "the node answered for another chain; its answer is not used");
        return Err(RpcFailure::Silent);
    }
    if length < U256::from(32) {
        return Err(RpcFailure::Silent);
    }
    let is_used = !(state & bit).is_zero();
    Ok(ProvenState { is_used, block: block.saturating_to(), timestamp: timestamp.saturating_to() })
}

/// Returns creation code that is never deployed, and takes 68 bytes of calldata after it. It returns the chain's identifier, how much `contract`
/// answered to that calldata (0 if it reverted), the answer's first word, and the block's number and time.
fn state_code(contract: Address) -> Vec<u8> {
    [
        &hex!("6044603c60a039")[..], // codecopy(0xa0, 60, 68)
        &hex!("60206040604460a073"), // staticcall(gas, contract, 0xa0, 68, 0x40, 32)
        contract.as_slice(),
        &hex!("5afa3d02602052"), // its success, times the length of the answer
        &hex!("46600052436060524260805260a06000f3"),
    ]
    .concat()
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
    search(rpc, expected, [seen_unused.saturating_add(1), latest], FOR_THE_OLDEST, None).await
}

/// The same for a block `seen_unused` that may have been replaced since. A permit that was used in one of the blocks before has an unknown
/// use: what was unused in a block that is gone may have been used in the one that took its place.
pub(crate) async fn find_after_replaceable(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    seen_unused: u64,
    latest: u64,
) -> Result<AuthorizationUse, RpcFailure> {
    let replaceable = [seen_unused.saturating_sub(REPLACEABLE - 1), seen_unused];
    search(rpc, expected, [seen_unused.saturating_add(1), latest], FOR_THE_OLDEST, Some(replaceable)).await
}

/// Searches the newest blocks first, for callers that do not know when the authorization was unused. The search may end before all
/// blocks were searched.
pub(crate) async fn find_newest(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    after: u64,
    latest: u64,
) -> Result<AuthorizationUse, RpcFailure> {
    search(rpc, expected, [after.saturating_add(1), latest], 0, None).await
}

async fn search(
    rpc: &Rpc,
    expected: &ExpectedTransfer,
    blocks: [u64; 2],
    for_the_oldest: usize,
    replaceable: Option<[u64; 2]>,
) -> Result<AuthorizationUse, RpcFailure> {
    if expected.is_by_permit() {
        return search_permit(rpc, expected, blocks, for_the_oldest, replaceable).await;
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
    replaceable: Option<[u64; 2]>,
) -> Result<AuthorizationUse, RpcFailure> {
    let mut has_searched_uses = match permit::find_use(rpc, expected, blocks, for_the_oldest).await? {
        Searched::Found(PermitUse { transaction, block, amount, is_received }) => {
            return Ok(match amount == expected.value && is_received {
                true => AuthorizationUse::Paid { transaction, block },
                false => AuthorizationUse::Otherwise { transaction, block },
            });
        }
        Searched::NotFound { is_complete } => is_complete,
    };
    if let Some(blocks) = replaceable.filter(|_| has_searched_uses) {
        let before = permit::find_use(rpc, expected, blocks, 0).await?;
        has_searched_uses = matches!(before, Searched::NotFound { is_complete: true });
    }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use x402_devnet::Devnet;

    use super::*;
    use crate::permit2::Permit;

    #[tokio::test]
    async fn state_of_an_authorization_is_that_of_the_chain_which_was_asked_for() {
        let devnet = Devnet::start().await.unwrap();
        let rpc = Rpc::new(devnet.rpc_client(), Duration::from_secs(5));
        let token = devnet.asset().address;
        for permit in [None, Some(Permit::new(token))] {
            let expected = ExpectedTransfer {
                token,
                payer: Address::repeat_byte(1),
                payee: Address::repeat_byte(2),
                value: U256::ONE,
                nonce: B256::repeat_byte(3),
                permit,
            };
            let state = proven_state(&rpc, Network::BASE_SEPOLIA, &expected).await.unwrap();
            assert_eq!((state.is_used, state.block), (false, devnet.block_number()));
            assert!(state.timestamp > 0);
            assert!(proven_state(&rpc, Network::BASE, &expected).await.is_err());
            let absent = ExpectedTransfer { token: Address::repeat_byte(4), ..expected };
            assert_eq!(proven_state(&rpc, Network::BASE_SEPOLIA, &absent).await.is_err(), permit.is_none());
        }
    }
}
