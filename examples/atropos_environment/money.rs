//! The payer, its budget, and its payment channels.

use std::time::Duration;

use alloy_signer_local::PrivateKeySigner;
use tower_x402::{
    Asset,
    client::{Budget, ChannelPolicy, Journal, Payer, key, refund_channels},
};
use x402_market::evidence::EvidenceLog;

use crate::flags::{Flags, Scheme};

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
    let payer = Payer::builder(key).budget(budget.build()).asset(asset);
    // Escrow is a part of the budget, and may be all of it.
    let channels = ChannelPolicy::new().lanes(flags.channels).escrow_per_payee(flags.budget).escrow_total(flags.budget);
    Ok(match flags.scheme {
        Scheme::Exact => payer.build(),
        // The deposit costs the evaluator about as much gas.
        Scheme::Both => payer.vouchers(channels.exact_first(3)).build(),
        // Neither of the flows of `exact`.
        Scheme::Vouchers => payer.vouchers(channels).flows([]).build(),
    })
}

/// Asks for refunds of what is left in payment channels.
pub(crate) async fn close_channels(payer: &Payer) -> anyhow::Result<()> {
    for refund in refund_channels(payer, Duration::ZERO, reqwest::Client::builder()).await? {
        if let Some(reason) = refund.reason {
            eprintln!("payment channel {} was not refunded: {reason}", refund.channel);
        }
    }
    Ok(())
}

/// Opens the log of evidence, which covers all runs with one checkpoint.
pub(crate) fn evidence(flags: &Flags) -> anyhow::Result<EvidenceLog> {
    match flags.beside("evidence") {
        Some(path) => Ok(EvidenceLog::open(path, RECORDS)?),
        None => Ok(EvidenceLog::in_memory(RECORDS)),
    }
}
