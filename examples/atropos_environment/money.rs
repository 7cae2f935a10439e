//! The payer and its budget.

use alloy_signer_local::PrivateKeySigner;
use tower_x402::{
    Asset,
    client::{Budget, Journal, Payer, key},
};
use x402_market::evidence::EvidenceLog;

use crate::flags::Flags;

/// How many records of evidence are kept.
const RECORDS: usize = 100_000;

/// Returns the key that pays: the student's, or a random one for the chain in this process.
pub(crate) fn key(flags: &Flags) -> anyhow::Result<PrivateKeySigner> {
    if flags.evaluators.is_empty() { Ok(PrivateKeySigner::random()) } else { Ok(key::from_env("STUDENT_PRIVATE_KEY")?) }
}

/// Returns the payer with its budget, which covers all runs with one checkpoint.
pub(crate) fn payer(flags: &Flags, key: PrivateKeySigner, asset: Asset) -> anyhow::Result<Payer> {
    let mut budget = Budget::builder().per_payment(flags.max_payment).total(flags.budget);
    if let Some(path) = flags.beside("journal") {
        budget = budget.journal(Journal::open(path)?);
    }
    Ok(Payer::builder(key).budget(budget.build()).asset(asset).build())
}

/// Opens the log of evidence, which covers all runs with one checkpoint.
pub(crate) fn evidence(flags: &Flags) -> anyhow::Result<EvidenceLog> {
    match flags.beside("evidence") {
        Some(path) => Ok(EvidenceLog::open(path, RECORDS)?),
        None => Ok(EvidenceLog::in_memory(RECORDS)),
    }
}
