//! The command line.

use std::path::PathBuf;

use alloy_primitives::Address;
use anyhow::Context as _;
use clap::Parser;
use tower_x402::{Asset, Network, Usdc};
use url::Url;

/// An Atropos environment that buys its scores: answers to word problems, or programs, judged by evaluators that are paid over x402.
///
/// Rolls out groups of answers from a policy, has them judged by the evaluators that the market selects within the budget, and
/// pushes the scored groups to the Atropos API server. Without --policy-url, a small policy in this process learns from the rewards.
/// Without --evaluator, a chain and evaluators of different price and quality are started in this process, so that only the
/// Atropos server and a trainer are needed.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
OUTPUT
  One JSON document on standard output at the end:
    {\"groups\": {\"rolled_out\", \"pushed\", \"equal_scores\", \"unjudged\", \"too_long\", \"unsure\"}, \"budget\", \"spent\", \"reserved\",
     \"escrow\", \"on_chain\": {\"paid\", \"agrees\", \"open\", \"escrow\"} | null, \"elsewhere\", \"evaluators\": [{\"name\", \"evaluator\", \"earned\", \"answered\",
     \"audited\", \"pairs\", \"right\", \"failed\", \"lies\"}], \"learning\": {\"start\": {...}, \"end\": {...}},
     \"atropos\": {\"environment\", \"step\", \"batches\"}, \"plots\"}
  Amounts are in atomic units (millionths of a USDC). Progress goes to standard error. --out draws learning.svg and learning.png.

  spent and reserved are the budget's. escrow is what is left in payment channels; a refund stays reserved until the chain has
  proved it for good. on_chain is the view of the newest block: paid is what left the payer and is not in payment channels; open is
  the part of it that the budget still calls reserved, because its block is not final; escrow is what is in the channels and was not
  charged; agrees says whether chain and budget agree (null while something is open, or if the chain could not be asked). elsewhere
  is the part of earned whose purpose is not recorded, because the process was killed between paying and recording it.

  Each sequence's overrides hold the evaluators' \"critique\", their \"confidence\" and the \"payments\" for its group: payer, nonce,
  transaction and amount. The nonce of a payment by voucher is the voucher's digest; its transaction is a deposit, or null.

  At the end the evaluators are asked for refunds of what is left in payment channels. With --checkpoint, a run that did not
  complete leaves it there for the next.

ENVIRONMENT
  STUDENT_PRIVATE_KEY  the key that pays, with --evaluator (32 bytes in hex); its account needs USDC and no ETH
  POLICY_API_KEY       sent to --policy-url as Authorization: Bearer ..., if set

EXIT STATUS
  0  completed, and the chain, if it was asked (--rpc-url, or the one in this process), does not contradict the budget
  1  not completed, or the chain contradicts the budget; with --checkpoint, the same command continues where it stopped

EXAMPLES
  atropos_environment --trainer --out target/atropos    # with a server: run-api --host 127.0.0.1 --port 8000
  atropos_environment --evaluator http://127.0.0.1:4021 --evaluator http://127.0.0.1:4022 --rpc-url https://sepolia.base.org \\
      --network base-sepolia --budget '$0.50' --checkpoint run.json"
)]
pub(crate) struct Flags {
    /// The Atropos API server
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub(crate) atropos_url: Url,
    /// What the policy is asked for: word problems, or programs in levels that open as more of them pass
    #[arg(long, value_enum, default_value = "words", requires_if("code", "policy_url"))]
    pub(crate) tasks: Tasks,
    /// The program x402-code-worker of the package x402-judges, in which the evaluators in this process run programs
    #[arg(long, value_name = "PATH")]
    pub(crate) code_worker: Option<PathBuf>,
    /// Also run a trainer that takes batches and does nothing with them, to try it without one
    #[arg(long)]
    pub(crate) trainer: bool,
    /// An evaluator that may be hired; repeatable
    #[arg(long = "evaluator", value_name = "URL")]
    pub(crate) evaluators: Vec<Url>,
    /// How many groups to roll out; with --checkpoint, over all runs
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) groups: u64,
    /// How many answers are in a group; the trainer's batch size must be a multiple of it
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(2..=64))]
    pub(crate) group_size: u8,
    /// The most to spend in total; with --checkpoint, over all runs
    #[arg(long, default_value = "$1.00")]
    pub(crate) budget: Usdc,
    /// The most to spend on one payment
    #[arg(long, default_value = "$0.05")]
    pub(crate) max_payment: Usdc,
    /// How many evaluators judge each group in each skill
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) panel: u8,
    /// The share of submissions that are audited after the verdict, with two answers of known quality among the others, 0 to 1
    #[arg(long, default_value_t = 0.15, value_parser = share)]
    pub(crate) audit_rate: f64,
    /// An OpenAI-compatible endpoint (the URL above chat/completions) whose model is the policy
    #[arg(long)]
    pub(crate) policy_url: Option<Url>,
    /// The name of the model
    #[arg(long, default_value = "default", requires = "policy_url")]
    pub(crate) policy_model: String,
    /// Keep the state of the run in this file, with the journal of payments and the evidence beside it, to continue after an
    /// interruption
    #[arg(long, requires = "evaluators")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// The directory for plots of learning and spending
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// A node to compare the budget with, and to ask what became of open payments
    #[arg(long)]
    pub(crate) rpc_url: Option<Url>,
    /// The chain to pay on: base, base-sepolia or eip155:N
    #[arg(long, default_value = "base-sepolia")]
    pub(crate) network: Network,
    /// Pay in this token, which must be worth a dollar and have six decimal places
    #[arg(long, requires_all = ["asset_name", "asset_version"])]
    asset: Option<Address>,
    /// The EIP-712 name of --asset
    #[arg(long, requires = "asset")]
    asset_name: Option<String>,
    /// The EIP-712 version of --asset
    #[arg(long, requires = "asset")]
    asset_version: Option<String>,
    /// How to pay: by a transfer for each submission (exact), by vouchers of payment channels only, or both: three transfers to an
    /// evaluator, then vouchers if it offers them
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) scheme: Scheme,
    /// How many payment channels may be open to one evaluator; each carries one request at a time
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) channels: u32,
    /// The seed of the random numbers
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Pause while this many groups wait for the trainer
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_queue: u64,
    /// How many seconds to wait for the trainer, each time
    #[arg(long, default_value_t = 600)]
    pub(crate) patience: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Tasks {
    Words,
    Code,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Scheme {
    Exact,
    Vouchers,
    Both,
}

impl Flags {
    /// Returns the token to pay with.
    pub(crate) fn asset(&self) -> anyhow::Result<Asset> {
        match (self.asset, &self.asset_name, &self.asset_version) {
            (Some(address), Some(name), Some(version)) => {
                Ok(Asset::new(self.network, address, name.clone(), version.clone()))
            }
            _ => self.network.usdc().with_context(|| {
                format!("no USDC is known on {}; give --asset, --asset-name and --asset-version", self.network)
            }),
        }
    }

    /// Returns the path of a file beside the checkpoint.
    pub(crate) fn beside(&self, extension: &str) -> Option<PathBuf> {
        self.checkpoint.as_ref().map(|path| path.with_extension(extension))
    }
}

fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("not from 0 to 1".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(flags: &[&str]) -> Result<Flags, clap::Error> {
        Flags::try_parse_from(std::iter::once(&"atropos_environment").chain(flags))
    }

    #[test]
    fn nothing_has_to_be_said() {
        let flags = read(&[]).unwrap();
        assert_eq!(flags.atropos_url.as_str(), "http://127.0.0.1:8000/");
        assert_eq!(flags.asset().unwrap(), Network::BASE_SEPOLIA.usdc().unwrap());
        assert_eq!(flags.beside("journal"), None);
    }

    #[test]
    fn a_run_that_can_go_on_needs_a_market_that_is_still_there() {
        assert!(read(&["--checkpoint", "run.json"]).is_err(), "the chain in the process ends with it");
        let flags = read(&["--checkpoint", "run.json", "--evaluator", "http://127.0.0.1:1"]).unwrap();
        assert_eq!(flags.beside("journal"), Some("run.journal".into()));
    }

    #[test]
    fn a_share_is_from_none_to_all() {
        for (text, share) in [("0", 0.0), ("0.5", 0.5), ("1", 1.0)] {
            assert!((read(&["--audit-rate", text]).unwrap().audit_rate - share).abs() < f64::EPSILON);
        }
        let error = read(&["--audit-rate", "7"]).unwrap_err().to_string();
        assert!(error.contains("--audit-rate") && error.contains("from 0 to 1"), "{error}");
    }

    #[test]
    fn nonsense_is_refused() {
        for flags in [
            &["--groups", "0"][..],
            &["--group-size", "1"],
            &["--budget", "much"],
            &["--asset", "0x0000000000000000000000000000000000000001"],
            &["--policy-model", "x"],
            &["--tasks", "code"],
            &["--max-queue", "0"],
            &["--audit-rate", "7"],
            &["--audit-rate", "-0.1"],
            &["--audit-rate", "NaN"],
            &["--audit-rate", "often"],
        ] {
            assert!(read(flags).is_err(), "{flags:?}");
        }
    }
}
