//! Compares the budget with the chain.

use std::time::Duration;

use alloy_primitives::{Address, U256};
use alloy_provider::{DynProvider, Provider as _, ProviderBuilder};
use alloy_rpc_types_eth::{Filter, TransactionRequest};
use alloy_sol_types::{SolCall, SolEvent as _, sol};
use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};
use tower_x402::{
    Usdc,
    client::{Budget, Reconciliation, reconcile, reconcile_channels},
    vouchers::Escrow,
};
use url::Url;

/// How long to wait for the chain to agree with the budget and for blocks to become final. After that, payments stay open.
const FINALITY: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_secs(1);

sol! {
    function balanceOf(address account) external view returns (uint256);
    function authorizationState(address authorizer, bytes32 nonce) external view returns (bool);
    function channels(bytes32 channelId) external view returns (uint128 balance, uint128 totalClaimed);
    event Transfer(address indexed from, address indexed to, uint256 value);
}

/// A node that is asked for the payer's balance.
pub(crate) struct Chain {
    node: DynProvider,
    asset: Address,
    payer: Address,
}

/// The state of budget and chain at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opening {
    /// The payer's balance plus what the budget had spent by then and what was in payment channels.
    balance: Usdc,
    /// The block at which the balance was read.
    block: u64,
}

/// The chain's view of the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct OnChain {
    /// What left the payer and is not in payment channels; `None` if the node did not answer.
    pub(crate) paid: Option<Usdc>,
    /// Whether that is what the budget spent; `None` while payments are not final, or if the node did not answer.
    pub(crate) agrees: Option<bool>,
    /// The part of the reserved amount that was paid in blocks that are not final yet.
    pub(crate) open: Option<Usdc>,
    /// What is in payment channels and was not charged.
    pub(crate) escrow: Option<Usdc>,
}

/// The newest block's view.
struct Sight {
    block: u64,
    balance: Usdc,
    open: Usdc,
    escrow: Usdc,
}

impl Chain {
    pub(crate) fn connect(url: Url, asset: Address, payer: Address) -> Self {
        Self { node: ProviderBuilder::new().connect_http(url).erased(), asset, payer }
    }

    /// Reconciles open payments and payment channels with the final blocks.
    pub(crate) async fn resolve(&self, budget: &Budget) -> anyhow::Result<Reconciliation> {
        if !budget.journal().channels().is_empty() {
            for (channel, finding) in reconcile_channels(budget, &self.node).await.context("--rpc-url")?.findings {
                eprintln!("payment channel {channel}: {finding}");
            }
        }
        reconcile(budget, &self.node).await.context("--rpc-url")
    }

    /// Returns what later balances are compared with. No payment may be in progress.
    pub(crate) async fn opening(&self, budget: &Budget) -> anyhow::Result<Opening> {
        let Sight { block, balance, open, escrow } = self.look(budget).await?;
        let all = [budget.spent(), open, escrow].into_iter().try_fold(balance, Usdc::checked_add);
        Ok(Opening { balance: all.context("the payer is too rich for this program")?, block })
    }

    /// Compares the budget with the chain, once no payment is in progress.
    pub(crate) async fn compare(&self, opening: &Opening, budget: &Budget) -> OnChain {
        let until = Instant::now() + FINALITY;
        loop {
            let found = self.found(opening, budget).await;
            let agrees = found.as_ref().is_ok_and(|found| found.agrees == Some(true));
            let is_settled = agrees && budget.journal().unresolved().is_empty();
            if is_settled || Instant::now() + PAUSE > until {
                return found.unwrap_or_else(|error| {
                    eprintln!("the budget cannot be compared with the chain: {error:#}");
                    OnChain { paid: None, agrees: None, open: None, escrow: None }
                });
            }
            sleep(PAUSE).await;
        }
    }

    async fn found(&self, opening: &Opening, budget: &Budget) -> anyhow::Result<OnChain> {
        self.resolve(budget).await?;
        let sight = self.look(budget).await?;
        let (spent, open) = (budget.spent(), sight.open);
        let expected = spent.checked_add(open).unwrap_or(Usdc::MAX);
        let gone = |had: Usdc| had.checked_sub(sight.balance)?.checked_sub(sight.escrow);
        let mut paid = gone(opening.balance);
        if paid != Some(expected) {
            // The payer may have received money meanwhile.
            let received = self.received(opening.block, sight.block).await?;
            paid = gone(opening.balance.checked_add(received).unwrap_or(Usdc::MAX));
        }
        let agrees = match paid {
            Some(paid) if paid == expected => (open == Usdc::ZERO).then_some(true),
            Some(_) => Some(false),
            None => None,
        };
        Ok(OnChain { paid, agrees, open: Some(open), escrow: Some(sight.escrow) })
    }

    async fn look(&self, budget: &Budget) -> anyhow::Result<Sight> {
        let block = self.node.get_block_number().await.context("--rpc-url")?;
        let balance: U256 = self.call(self.asset, balanceOfCall { account: self.payer }, block).await?;
        let balance = u64::try_from(balance).context("the payer is too rich for this program")?;
        let mut open = Usdc::ZERO;
        for entry in budget.journal().unresolved() {
            if entry.asset == self.asset && entry.payer == self.payer {
                let state = authorizationStateCall { authorizer: entry.payer, nonce: entry.nonce };
                if self.call(self.asset, state, block).await? {
                    open = open.checked_add(entry.amount).unwrap_or(Usdc::MAX);
                }
            }
        }
        let mut escrow = Usdc::ZERO;
        for channel in budget.journal().channels() {
            if channel.config.token == self.asset && channel.config.payer == self.payer {
                let state =
                    self.call(Escrow::ADDRESS, channelsCall { channelId: channel.id().digest() }, block).await?;
                let held = Usdc::from_atomic(u64::try_from(state.balance).unwrap_or(u64::MAX));
                let charged = channel.opening.checked_add(channel.spent()).unwrap_or(Usdc::MAX);
                escrow = escrow.checked_add(held.checked_sub(charged).unwrap_or(Usdc::ZERO)).unwrap_or(Usdc::MAX);
            }
        }
        Ok(Sight { block, balance: Usdc::from_atomic(balance), open, escrow })
    }

    /// Returns what the payer received after one block, up to another, without refunds and withdrawals from payment channels.
    async fn received(&self, after: u64, to: u64) -> anyhow::Result<Usdc> {
        let filter = Filter::new().from_block(after + 1).to_block(to).address(self.asset);
        let filter = filter.event_signature(Transfer::SIGNATURE_HASH).topic2(self.payer);
        let logs = if after < to { self.node.get_logs(&filter).await.context("--rpc-url")? } else { Vec::new() };
        let mut sum = Usdc::ZERO;
        for log in logs {
            let Transfer { from, value, .. } = log.log_decode::<Transfer>().context("--rpc-url")?.inner.data;
            if from != self.payer && from != Escrow::ADDRESS {
                let value = u64::try_from(value).map_or(Usdc::MAX, Usdc::from_atomic);
                sum = sum.checked_add(value).unwrap_or(Usdc::MAX);
            }
        }
        Ok(sum)
    }

    async fn call<C: SolCall>(&self, to: Address, call: C, block: u64) -> anyhow::Result<C::Return> {
        let request = TransactionRequest::default().to(to).input(call.abi_encode().into());
        let answer = self.node.call(request).block(block.into()).await.context("--rpc-url")?;
        C::abi_decode_returns(&answer)
            .context("--rpc-url: a contract does not answer as USDC or the escrow contract does")
    }
}

impl OnChain {
    /// Returns a remark on the comparison for standard error.
    pub(crate) fn remark(&self, spent: Usdc) -> Option<String> {
        match (self.paid, self.agrees, self.open) {
            (_, Some(true), _) => None,
            (Some(paid), Some(false), _) => {
                Some(format!("the budget does not agree with the chain: {spent} spent, and {paid} paid on the chain"))
            }
            (Some(_), None, Some(open)) => Some(format!(
                "{spent} and {open} more were paid; the books call that spent once its blocks are final, when the same command runs \
                 again with --checkpoint"
            )),
            _ => Some("it is not known whether the budget agrees with the chain".to_owned()),
        }
    }
}
