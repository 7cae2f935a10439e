//! Who pays, within which limits, and what the chain says of it.

use std::time::Duration;

use alloy_primitives::{Address, U256, hex, keccak256};
use alloy_provider::{DynProvider, Provider as _, ProviderBuilder};
use alloy_signer_local::PrivateKeySigner;
use anyhow::Context as _;
use serde_json::json;
use tower_x402::{
    Asset, Usdc,
    client::{Budget, Journal, Payer, Reconciliation, key, reconcile},
    market::evidence::EvidenceLog,
};
use url::Url;

use crate::flags::Flags;

/// How many records of evaluators are kept.
const RECORDS: usize = 100_000;
/// How long to wait for blocks to become final, so that the chain can say what became of the last payments. What it cannot say by
/// then stays reserved.
const FINALITY: Duration = Duration::from_secs(5);

/// The key that pays: the student's own, or one made for the chain in this process.
pub(crate) fn key(flags: &Flags) -> anyhow::Result<PrivateKeySigner> {
    if flags.evaluators.is_empty() { Ok(PrivateKeySigner::random()) } else { Ok(key::from_env("STUDENT_PRIVATE_KEY")?) }
}

/// The payer with its budget; with a checkpoint, of all runs.
pub(crate) fn payer(flags: &Flags, key: PrivateKeySigner, asset: Asset) -> anyhow::Result<Payer> {
    let mut budget = Budget::builder().per_payment(flags.max_payment).total(flags.budget);
    if let Some(path) = flags.beside("journal") {
        budget = budget.journal(Journal::open(path)?);
    }
    Ok(Payer::builder(key).budget(budget.build()).asset(asset).build())
}

/// What evaluators were seen to do; with a checkpoint, in all runs.
pub(crate) fn evidence(flags: &Flags) -> anyhow::Result<EvidenceLog> {
    match flags.beside("evidence") {
        Some(path) => Ok(EvidenceLog::open(path, RECORDS)?),
        None => Ok(EvidenceLog::in_memory(RECORDS)),
    }
}

/// A node, asked for what the payer has.
pub(crate) struct Chain {
    node: DynProvider,
    asset: Address,
    payer: Address,
}

impl Chain {
    pub(crate) fn connect(url: Url, asset: Address, payer: Address) -> Self {
        Self { node: ProviderBuilder::new().connect_http(url).erased(), asset, payer }
    }

    /// The payer's balance.
    pub(crate) async fn balance(&self) -> anyhow::Result<Usdc> {
        let selector = &keccak256("balanceOf(address)")[..4];
        let data = hex::encode_prefixed([selector, self.payer.into_word().as_slice()].concat());
        let call = (json!({ "to": self.asset, "data": data }), "latest");
        let balance: U256 = self.node.raw_request("eth_call".into(), call).await.context("--rpc-url")?;
        Ok(Usdc::from_atomic(u64::try_from(balance).context("the payer is too rich for this program")?))
    }

    /// Finds out what became of payments that nobody answered for, as far as blocks are final.
    pub(crate) async fn resolve(&self, budget: &Budget) -> anyhow::Result<Reconciliation> {
        reconcile(budget, &self.node).await.context("--rpc-url")
    }

    /// The same, waiting a while for blocks to become final.
    pub(crate) async fn resolve_last(&self, budget: &Budget) -> anyhow::Result<()> {
        let waiting = async {
            while budget.reserved() > Usdc::ZERO {
                let before = budget.reserved();
                self.resolve(budget).await?;
                if budget.reserved() == before {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(FINALITY, waiting).await.unwrap_or(Ok(()))
    }
}
