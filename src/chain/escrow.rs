//! Reading the escrow contract of payment channels: many channels in one call, all as of one block.

use alloy_primitives::{Address, B256, Bytes, U64, U256, address};
use alloy_sol_types::{SolCall, SolEvent, SolValue as _, sol};
use serde::Deserialize;
use serde_json::json;

use super::{
    rpc::{Log, Receipt, Revert, Rpc, RpcFailure},
    transfer::Token,
};
use crate::{
    network::Network,
    vouchers::{
        ChannelConfig, ChannelId, ChannelObservation, ChannelState, Escrow,
        abi::{
            self,
            BatchSettlement::{self, BatchSettlementErrors},
        },
    },
};

sol! {
    /// The functions that are used of <https://github.com/mds1/multicall3>.
    interface Multicall3 {
        struct Call3 {
            address target;
            bool allowFailure;
            bytes callData;
        }

        struct Result {
            bool success;
            bytes returnData;
        }

        function aggregate3(Call3[] calls) external payable returns (Result[] returnData);
        function getBlockNumber() external view returns (uint256 blockNumber);
        function getChainId() external view returns (uint256 chainid);
        function getCurrentBlockTimestamp() external view returns (uint256 timestamp);
    }

    function balanceOf(address account) external view returns (uint256);
}

/// The contract that makes several calls in one. It has the same address on every chain.
pub(crate) const MULTICALL3: Address = address!("cA11bde05977b3631167028862bE2a173976CA11");

/// Channels per call. Each takes three reads of about 5,000 gas; nodes allow a call some ten million.
const CHANNELS_PER_CALL: usize = 400;
/// Blocks that are searched for a refund: an hour on Base, or what the node allows.
const SEARCHED: [u64; 3] = [2_000, 500, 100];
/// Refunds of one channel that are looked at.
const MAX_CANDIDATES: usize = 16;
/// Reads per channel.
const READS: usize = 3;

/// The contracts that payment channels need, by name.
const CONTRACTS: [(&str, Address); 3] = [
    ("x402BatchSettlement", Escrow::ADDRESS),
    ("ERC3009DepositCollector", Escrow::ERC3009_COLLECTOR),
    ("Multicall3", MULTICALL3),
];

/// A payer's side of a deposit, as of the block in which its channel was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DepositState {
    /// The channel.
    pub(crate) channel: ChannelObservation,
    /// The payer's balance of the token.
    pub(crate) payer_balance: U256,
    /// The authorization was used or cancelled.
    pub(crate) is_used: bool,
    /// The timestamp of the block.
    pub(crate) time: u64,
}

/// The block that reads were made in.
#[derive(Clone, Copy, Debug)]
struct Block {
    number: u64,
    time: u64,
}

/// Returns the name and the address of a contract that this chain lacks, if it lacks one.
pub(crate) async fn missing_contract(rpc: &Rpc) -> Result<Option<(&'static str, Address)>, RpcFailure> {
    for (name, address) in CONTRACTS {
        if rpc.code(address).await?.is_empty() {
            return Ok(Some((name, address)));
        }
    }
    Ok(None)
}

/// Reads channels in the order asked for, all as of one block: the newest, or `block`.
pub(crate) async fn observe(
    rpc: &Rpc,
    network: Network,
    channels: &[ChannelId],
    block: Option<u64>,
) -> Result<Vec<ChannelObservation>, RpcFailure> {
    observe_with_time(rpc, network, channels, block).await.map(|(observations, _)| observations)
}

/// Does the same, and returns the timestamp of the block. Without channels there is none.
pub(crate) async fn observe_with_time(
    rpc: &Rpc,
    network: Network,
    channels: &[ChannelId],
    mut block: Option<u64>,
) -> Result<(Vec<ChannelObservation>, Option<u64>), RpcFailure> {
    let mut observations = Vec::with_capacity(channels.len());
    let mut time = None;
    for part in channels.chunks(CHANNELS_PER_CALL) {
        let (read, results) = aggregate(rpc, network, block, part.iter().flat_map(reads).collect()).await?;
        // The following parts are of the same block.
        block = Some(read.number);
        time = time.or(Some(read.time));
        for (channel, results) in part.iter().zip(results.chunks(READS)) {
            observations.push(observation(*channel, results, read)?);
        }
    }
    Ok((observations, time))
}

/// Reads what decides on a deposit: the channel, the payer's balance and whether the authorization with this nonce is used.
pub(crate) async fn deposit_state(
    rpc: &Rpc,
    network: Network,
    channel: ChannelId,
    config: &ChannelConfig,
    nonce: B256,
) -> Result<DepositState, RpcFailure> {
    let mut calls = reads(&channel).to_vec();
    calls.push((config.token, balanceOfCall { account: config.payer }.abi_encode().into()));
    let used = Token::authorizationStateCall { authorizer: config.payer, nonce };
    calls.push((config.token, used.abi_encode().into()));
    let (block, results) = aggregate(rpc, network, None, calls).await?;
    let [channel_reads @ .., balance, used] = &results[..] else { return Err(RpcFailure::Silent) };
    Ok(DepositState {
        channel: observation(channel, channel_reads, block)?,
        payer_balance: decode::<balanceOfCall>(balance)?,
        is_used: decode::<Token::authorizationStateCall>(used)?,
        time: block.time,
    })
}

/// Returns `true` if a transaction in the pool uses the authorization, or one in a block. Many nodes do not show what is in the pool.
pub(crate) async fn is_deposit_pending(rpc: &Rpc, config: &ChannelConfig, nonce: B256) -> bool {
    let call = Token::authorizationStateCall { authorizer: config.payer, nonce };
    pending(rpc, config.token, call).await.unwrap_or(false)
}

/// Returns `true` if a transaction in the pool uses this refund nonce of the channel, or one in a block, as far as the node shows that.
pub(crate) async fn is_refund_pending(rpc: &Rpc, channel: ChannelId, nonce: u128) -> bool {
    let call = BatchSettlement::refundNonceCall { channelId: channel.digest() };
    pending(rpc, Escrow::ADDRESS, call).await.is_some_and(|next| next > U256::from(nonce))
}

/// Reads as of the block that the node would build now.
async fn pending<C: SolCall>(rpc: &Rpc, to: Address, call: C) -> Option<C::Return> {
    let call = json!({ "to": to, "data": Bytes::from(call.abi_encode()) });
    let answer: Bytes = rpc.call("eth_call", (call, "pending")).await.ok()?;
    C::abi_decode_returns_validate(&answer).ok()
}

/// Returns the timestamp of the newest block.
pub(crate) async fn newest_time(rpc: &Rpc, network: Network) -> Result<u64, RpcFailure> {
    aggregate(rpc, network, None, Vec::new()).await.map(|(block, _)| block.time)
}

/// Returns what was claimed for a receiver and not transferred yet, in atomic units, after the number of the block.
pub(crate) async fn unsettled(
    rpc: &Rpc,
    network: Network,
    receiver: Address,
    token: Address,
) -> Result<(u64, u128), RpcFailure> {
    let call = BatchSettlement::receiversCall { receiver, token };
    let (block, results) = aggregate(rpc, network, None, vec![(Escrow::ADDRESS, call.abi_encode().into())]).await?;
    let totals = decode::<BatchSettlement::receiversCall>(results.first().ok_or(RpcFailure::Silent)?)?;
    Ok((block.number, totals.totalClaimed.saturating_sub(totals.totalSettled)))
}

/// Returns the events of this kind that the escrow contract emitted in a transaction.
pub(crate) fn events<E: SolEvent>(receipt: &Receipt) -> impl Iterator<Item = E> {
    let logs = receipt.logs.iter().filter(|log| log.address == Escrow::ADDRESS && !log.removed);
    logs.filter_map(|log| E::decode_raw_log_validate(log.topics.iter().copied(), &log.data).ok())
}

/// Names the error with which a call of the contract reverts.
pub(crate) fn describe(revert: &Revert) -> String {
    let selector = revert.data.get(..4).and_then(|selector| selector.try_into().ok());
    match selector.and_then(BatchSettlementErrors::name_by_selector) {
        Some(name) => name.to_owned(),
        None => revert.message.clone(),
    }
}

/// Finds the refund of this channel with this amount and nonce in the newest blocks. Returns the receipt of its transaction.
pub(crate) async fn find_refund(
    rpc: &Rpc,
    channel: ChannelId,
    order: (&ChannelConfig, u128, u128),
    latest: u64,
) -> Result<Option<Receipt>, RpcFailure> {
    let (config, amount, nonce) = order;
    // The arguments of `refundWithSignature` up to the signature, which may be another one each time.
    let arguments = (abi::ChannelConfig::from(config), amount, U256::from(nonce)).abi_encode_params();
    for blocks in SEARCHED {
        let filter = json!({
            "address": Escrow::ADDRESS,
            "topics": [BatchSettlement::Refunded::SIGNATURE_HASH, channel.digest()],
            "fromBlock": U64::from(latest.saturating_sub(blocks - 1)),
            "toBlock": U64::from(latest),
        });
        let logs: Vec<Log> = match rpc.call("eth_getLogs", [filter]).await {
            Err(RpcFailure::Refused { .. }) => continue,
            answer => answer?,
        };
        for hash in logs.iter().rev().filter_map(|log| log.transaction_hash).take(MAX_CANDIDATES) {
            let transaction: Option<Transaction> = rpc.call("eth_getTransactionByHash", [hash]).await?;
            let input = transaction.map(|transaction| transaction.input).unwrap_or_default();
            if input.windows(arguments.len()).any(|part| part == arguments) {
                return rpc.receipt(hash).await;
            }
        }
        return Ok(None);
    }
    Ok(None)
}

#[derive(Deserialize)]
struct Transaction {
    input: Bytes,
}

type Read = (Address, Bytes);

fn reads(channel: &ChannelId) -> [Read; READS] {
    let id = channel.digest();
    [
        BatchSettlement::channelsCall { channelId: id }.abi_encode(),
        BatchSettlement::pendingWithdrawalsCall { channelId: id }.abi_encode(),
        BatchSettlement::refundNonceCall { channelId: id }.abi_encode(),
    ]
    .map(|calldata| (Escrow::ADDRESS, calldata.into()))
}

fn observation(channel_id: ChannelId, results: &[Bytes], block: Block) -> Result<ChannelObservation, RpcFailure> {
    let [channel, withdrawal, refund_nonce] = results else { return Err(RpcFailure::Silent) };
    let channel = decode::<BatchSettlement::channelsCall>(channel)?;
    let withdrawal = decode::<BatchSettlement::pendingWithdrawalsCall>(withdrawal)?;
    let refund_nonce = decode::<BatchSettlement::refundNonceCall>(refund_nonce)?;
    // The contract takes no claim beyond the balance, and pays out nothing that was claimed.
    if channel.totalClaimed > channel.balance {
        tracing::warn!(channel = %channel_id, "the node tells of a claim beyond the balance; its answer is not used");
        return Err(RpcFailure::Silent);
    }
    let state = ChannelState {
        channel_id,
        balance: channel.balance,
        total_claimed: channel.totalClaimed,
        withdraw_requested_at: withdrawal.initiatedAt.to(),
        refund_nonce: refund_nonce.try_into().map_err(|_| RpcFailure::Silent)?,
        charged_cumulative_amount: None,
    };
    Ok(ChannelObservation { state, withdrawal: withdrawal.amount, block: block.number, time: block.time })
}

/// Makes these reads in one call, as of `block` or the newest. Returns the block and the results in order. Fails if the call was made on
/// another chain, which has other channels: behind one address there may be nodes of several.
async fn aggregate(
    rpc: &Rpc,
    network: Network,
    block: Option<u64>,
    reads: Vec<Read>,
) -> Result<(Block, Vec<Bytes>), RpcFailure> {
    let chain = (MULTICALL3, Multicall3::getChainIdCall {}.abi_encode().into());
    let number = (MULTICALL3, Multicall3::getBlockNumberCall {}.abi_encode().into());
    let time = (MULTICALL3, Multicall3::getCurrentBlockTimestampCall {}.abi_encode().into());
    let count = reads.len();
    let calls = [chain, number, time].into_iter().chain(reads);
    let calls = calls.map(|(target, data)| Multicall3::Call3 { target, allowFailure: false, callData: data }).collect();
    let request = json!({ "to": MULTICALL3, "data": Bytes::from(Multicall3::aggregate3Call { calls }.abi_encode()) });
    let answer: Bytes = match block {
        Some(block) => rpc.call("eth_call", (request, U64::from(block))).await?,
        None => rpc.call("eth_call", (request, "latest")).await?,
    };
    let mut results = decode::<Multicall3::aggregate3Call>(&answer)?.into_iter().map(|result| result.returnData);
    let chain = decode::<Multicall3::getChainIdCall>(&results.next().ok_or(RpcFailure::Silent)?)?;
    if chain != U256::from(network.chain_id()) {
        tracing::warn!(%network, %chain, "the node answered for another chain; its answer is not used");
        return Err(RpcFailure::Silent);
    }
    let number = decode::<Multicall3::getBlockNumberCall>(&results.next().ok_or(RpcFailure::Silent)?)?;
    let time = decode::<Multicall3::getCurrentBlockTimestampCall>(&results.next().ok_or(RpcFailure::Silent)?)?;
    let results: Vec<Bytes> = results.collect();
    if results.len() != count {
        return Err(RpcFailure::Silent);
    }
    Ok((Block { number: number.saturating_to(), time: time.saturating_to() }, results))
}

/// Decodes a result. A contract that answers by another interface counts as a node that does not answer. Where there is no contract, as
/// in the first blocks of a chain, there is an empty result.
fn decode<C: SolCall>(result: &[u8]) -> Result<C::Return, RpcFailure> {
    if result.is_empty() {
        let message = "the block that was asked for has none of the contracts that payment channels need; on a young chain, try again when \
             newer blocks are final";
        return Err(RpcFailure::Refused { code: -32000, message: message.to_owned() });
    }
    C::abi_decode_returns_validate(result).map_err(|error| {
        tracing::debug!(%error, function = C::SIGNATURE, "a contract's answer cannot be read");
        RpcFailure::Silent
    })
}
