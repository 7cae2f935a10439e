//! What can be said on the command line.

use std::path::PathBuf;

use alloy_primitives::Address;
use anyhow::Context as _;
use clap::Parser;
use tower_x402::{Asset, Network, Usdc};
use url::Url;

/// An Atropos environment whose scores are bought: answers to word problems, judged by evaluators that are paid over x402.
///
/// Rolls out groups of answers from a policy, has them judged by whoever the market selects within the budget, and pushes the scored
/// groups to the Atropos API server. Without --policy-url the policy is a small one in this process, which learns from the rewards.
/// Without --evaluator, a chain and some evaluators of different price and quality are started in this process, so that nothing
/// is needed but the Atropos server and a trainer.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
OUTPUT
  One JSON document on standard output at the end:
    {\"groups\": {\"rolled_out\", \"pushed\", \"equal_scores\", \"unjudged\", \"unsure\"}, \"budget\", \"spent\", \"reserved\",
     \"on_chain\": {\"paid\", \"agrees\"} | null, \"evaluators\": [{\"name\", \"evaluator\", \"earned\", ...}],
     \"learning\": {\"start\": {...}, \"end\": {...}}, \"atropos\": {\"environment\", \"step\"}, \"plots\"}
  Amounts are in atomic units (millionths of a USDC). Progress goes to standard error. With --out, learning.svg and learning.png are
  drawn there.

  Each sequence's overrides have what the evaluators said of it (\"critique\"), \"confidence\" and \"payments\": payer, nonce,
  transaction and amount of what was paid for judging its group.

ENVIRONMENT
  STUDENT_PRIVATE_KEY  who pays, with --evaluator (32 bytes in hex); it needs USDC and no ETH
  POLICY_API_KEY       what --policy-url knows us by: sent as Authorization: Bearer ..., if set

EXIT STATUS
  0  done, and the books agree with the chain, as far as --rpc-url or the chain in this process shows it
  1  not done, or the books do not agree; with --checkpoint, the same command goes on where it stopped

EXAMPLES
  atropos_environment --trainer --out target/atropos    # with a server: run-api --host 127.0.0.1 --port 8000
  atropos_environment --evaluator http://127.0.0.1:4021 --evaluator http://127.0.0.1:4022 --rpc-url https://sepolia.base.org \\
      --network base-sepolia --budget '$0.50' --checkpoint run.json"
)]
pub(crate) struct Flags {
    /// The Atropos API server
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub(crate) atropos_url: Url,
    /// Play the trainer as well, one that takes batches and does nothing with them: to try it without one
    #[arg(long)]
    pub(crate) trainer: bool,
    /// An evaluator that may be hired; may be given several times
    #[arg(long = "evaluator", value_name = "URL")]
    pub(crate) evaluators: Vec<Url>,
    /// How many groups to roll out; with --checkpoint, over all runs
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) groups: u64,
    /// How many answers a group has; the trainer's batch size must be a multiple of it
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(2..=64))]
    pub(crate) group_size: u8,
    /// The most to spend in all; with --checkpoint, over all runs
    #[arg(long, default_value = "$1.00")]
    pub(crate) budget: Usdc,
    /// The most that one payment may be
    #[arg(long, default_value = "$0.05")]
    pub(crate) max_payment: Usdc,
    /// How many evaluators judge each group in each skill
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) panel: u8,
    /// The share of submissions that go along with a hidden one whose truth is known, 0 to 1
    #[arg(long, default_value_t = 0.15)]
    pub(crate) audit_rate: f64,
    /// An OpenAI-compatible endpoint (the URL above chat/completions) whose model is the policy
    #[arg(long)]
    pub(crate) policy_url: Option<Url>,
    /// The model's name
    #[arg(long, default_value = "default", requires = "policy_url")]
    pub(crate) policy_model: String,
    /// Keep all that is needed to go on after an interruption in this file, with the journal of payments and the evidence beside it
    #[arg(long, requires = "evaluators")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Draw learning and spending into this directory
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// A node to check the books against, and to ask what became of payments that were left open
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
    /// What chance starts from
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Pause while as many groups wait for the trainer
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_queue: u64,
    /// How many seconds to wait for the trainer, each time
    #[arg(long, default_value_t = 600)]
    pub(crate) patience: u64,
}

impl Flags {
    /// The token to pay with.
    pub(crate) fn asset(&self) -> anyhow::Result<Asset> {
        match (self.asset, &self.asset_name, &self.asset_version) {
            (Some(address), Some(name), Some(version)) => {
                Ok(Asset { network: self.network, address, name: name.clone(), version: version.clone() })
            }
            _ => self.network.usdc().with_context(|| {
                format!("no USDC is known on {}; give --asset, --asset-name and --asset-version", self.network)
            }),
        }
    }

    /// A file beside the checkpoint.
    pub(crate) fn beside(&self, extension: &str) -> Option<PathBuf> {
        self.checkpoint.as_ref().map(|path| path.with_extension(extension))
    }
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
    fn nonsense_is_refused() {
        for flags in [
            &["--groups", "0"][..],
            &["--group-size", "1"],
            &["--budget", "much"],
            &["--asset", "0x0000000000000000000000000000000000000001"],
            &["--policy-model", "x"],
            &["--max-queue", "0"],
        ] {
            assert!(read(flags).is_err(), "{flags:?}");
        }
    }
}
