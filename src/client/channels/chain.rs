//! The books of channels compared with the chain, and withdrawals without the seller.

use alloy_primitives::U256;
use alloy_provider::Provider;
use alloy_rpc_client::RpcClient;
use alloy_rpc_types_eth::TransactionRequest;
use alloy_sol_types::SolCall as _;

use super::{
    ChannelEntry, ChannelFinding,
    entry::{Correction, Seen},
    lease::Lease,
};
use crate::{
    chain::{authorization_use, escrow, receipt_check::ExpectedTransfer, rpc::Rpc},
    client::{Budget, ReconcileError, reconcile::REQUEST_TIMEOUT, sums::plus},
    usdc::Usdc,
    vouchers::{ChannelId, Escrow, abi::BatchSettlement},
};

/// The result of comparing the channels of a journal with the chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelReconciliation {
    /// The number of channels that were compared.
    pub seen: usize,
    /// The number of channels of this chain that could not be compared, because a request uses them now. Try again.
    pub in_use: usize,
    /// What is in escrow, uncharged, in the channels that were compared.
    pub escrow: Usdc,
    /// What sellers did that the books exclude.
    pub findings: Vec<(ChannelId, ChannelFinding)>,
}

/// Compares the channels of the budget's journal with what is final on the chain.
///
/// - Deposits that arrived count as escrow; deposits that can never be made, refunds and withdrawals are no longer reserved.
/// - Channels whose earlier journal was lost are continued from what was claimed, with what is in them.
/// - A seller that claimed more than these books explain is found ([`ChannelFinding::ClaimedTooMuch`]), and nothing more is signed for it. The
///   rest of a voucher that was charged in part is a finding only ([`ChannelFinding::ChargedTheRest`]).
///
/// Call it at any time: after a lost journal, after refunds, and from time to time, since only the chain shows what was claimed.
///
/// ```no_run
/// # async fn example(budget: tower_x402::client::Budget) -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_provider::ProviderBuilder;
/// use tower_x402::client::reconcile_channels;
///
/// let provider = ProviderBuilder::new().connect_http("https://mainnet.base.org".parse()?);
/// let found = reconcile_channels(&budget, &provider).await?;
/// println!("{} in {} channels", found.escrow, found.seen);
/// for (channel, finding) in found.findings {
///     eprintln!("{channel}: {finding}");
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ReconcileError`] if the channels could not be read.
pub async fn reconcile_channels<P, N>(budget: &Budget, provider: &P) -> Result<ChannelReconciliation, ReconcileError>
where
    P: Provider<N>,
    N: alloy_network::Network,
{
    let mut found = ChannelReconciliation::default();
    let rpc = rpc(provider);
    let chain_id = rpc.chain_id().await?;
    let here = budget.journal().channels().into_iter().filter(|entry| entry.network.chain_id() == chain_id);
    let entries: Vec<_> = here.collect();
    let Some(network) = entries.first().map(|entry| entry.network) else { return Ok(found) };
    let ids: Vec<_> = entries.iter().map(ChannelEntry::id).collect();
    // While a channel is leased, no request changes it.
    let leases: Vec<_> = ids.iter().filter_map(|id| Lease::get(budget, *id)).collect();
    found.in_use = ids.len() - leases.len();
    if leases.is_empty() {
        return Ok(found);
    }
    let last = rpc.block("finalized").await?.ok_or(ReconcileError::NoFinality)?;
    let ids: Vec<_> = leases.iter().map(Lease::id).collect();
    let observed = escrow::observe(&rpc, network, &ids, Some(last.number.saturating_to())).await?;
    for (mut lease, observation) in leases.into_iter().zip(observed) {
        let pending_used = match pending_deposit(&lease.entry) {
            Some(expected) => authorization_use::is_used(&rpc, &expected, last.number.saturating_to()).await?,
            None => None,
        };
        let seen = Seen {
            balance: units(observation.state.balance),
            claimed: units(observation.state.total_claimed),
            pending_used,
            time: last.timestamp.saturating_to(),
        };
        if let Correction::Disputed(finding) | Correction::Charged(finding) = lease.entry.observe(&seen) {
            tracing::warn!(channel = %lease.id(), %finding, "a seller contradicts the books of its channel");
            found.findings.push((lease.id(), finding));
        }
        found.seen += 1;
        found.escrow = plus(found.escrow, lease.entry.available());
        lease.write_soon().await;
    }
    Ok(found)
}

/// Returns the transaction with which the payer announces the withdrawal of all that is not claimed, if there is anything.
///
/// Use it if the seller does not answer any more. It is sent by the channel's payer or voucher key, and costs gas. The money can be
/// withdrawn ([`finalize_withdrawal`]) after the channel's `withdraw_delay`; until then the seller can still claim what was signed.
///
/// # Errors
/// [`ReconcileError`] if the channel could not be read.
pub async fn initiate_withdrawal<P, N>(
    provider: &P,
    channel: &ChannelEntry,
) -> Result<Option<TransactionRequest>, ReconcileError>
where
    P: Provider<N>,
    N: alloy_network::Network,
{
    let observed = escrow::observe(&rpc(provider), channel.network, &[channel.id()], None).await?;
    let amount = observed.first().map_or(0, |observation| observation.state.available());
    let call = BatchSettlement::initiateWithdrawCall { config: (&channel.config).into(), amount };
    Ok((amount > 0).then(|| transaction(channel, call.abi_encode())))
}

/// Returns the transaction that withdraws, once `withdraw_delay` seconds have passed since
/// [`initiate_withdrawal`]. Afterwards [`reconcile_channels`] takes the money out of the budget's reserved sum.
pub fn finalize_withdrawal(channel: &ChannelEntry) -> TransactionRequest {
    let call = BatchSettlement::finalizeWithdrawCall { config: (&channel.config).into() };
    transaction(channel, call.abi_encode())
}

fn transaction(channel: &ChannelEntry, input: Vec<u8>) -> TransactionRequest {
    TransactionRequest::default().from(channel.config.payer).to(Escrow::ADDRESS).input(input.into())
}

fn rpc<P: Provider<N>, N: alloy_network::Network>(provider: &P) -> Rpc {
    let client = provider.client();
    Rpc::new(RpcClient::new(client.transport().clone(), client.is_local()), REQUEST_TIMEOUT)
}

/// Returns the transfer that a pending deposit would make.
fn pending_deposit(entry: &ChannelEntry) -> Option<ExpectedTransfer> {
    let pending = entry.pending.as_ref()?;
    Some(ExpectedTransfer {
        token: entry.config.token,
        payer: entry.config.payer,
        payee: Escrow::ERC3009_COLLECTOR,
        value: U256::from(pending.amount.atomic()),
        nonce: pending.nonce(entry.id()),
        permit: None,
    })
}

/// Nobody's escrow reaches the bound.
fn units(amount: u128) -> Usdc {
    Usdc::from_atomic(amount.try_into().unwrap_or(u64::MAX))
}
