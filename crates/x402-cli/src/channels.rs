//! `x402 channels`: payment channels, of a seller and of a payer.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use alloy_provider::{ProviderBuilder, network::EthereumWallet};
use serde_json::json;
use tower_x402::{
    Usdc,
    client::{
        Budget, ChannelEntry, Refund, finalize_withdrawal, initiate_withdrawal, reconcile_channels, refund_channels,
    },
    ops::{ChannelFilter, ChannelSummary, Operator},
    vouchers::ChannelId,
};

use crate::{
    books::unreadable,
    chain::{ChainFlags, send},
    error::{Error, Sentence},
    keys::{self, KeyFlags, Role},
    output,
    purse::PurseFlags,
    values::{LedgerAt, some_amount},
};

/// Lists payment channels, claims what was charged on them, and gets back what was not.
///
/// A seller's channels are in its --ledger, a payer's in its --journal.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
WITH --json
  claim     {\"claimed\", \"settled\", \"refused\", \"transactions\"}; refused is the number of channels that were not claimed
  refund    of a seller: {\"refunded\", \"failed\", \"transactions\"}; of a payer, for each channel: {\"channel\", \"amount\", \"transaction\",
            \"reason\"}
  withdraw  {\"channel\", \"transaction\", \"finished\", \"withdraw_delay\"}, the delay in seconds
  Amounts are in atomic units (millionths of a USDC).

EXAMPLES
  For a seller, with CHANNELS_PRIVATE_KEY:
  x402 channels list --ledger sqlite:payments.sqlite at-risk
  x402 channels claim --ledger sqlite:payments.sqlite --network base --rpc-url https://…
  x402 channels refund --ledger sqlite:payments.sqlite --idle 2592000 --network base --rpc-url https://…
  For a payer, with PAYER_PRIVATE_KEY:
  x402 channels list --journal ~/.x402.jsonl
  x402 channels refund --journal ~/.x402.jsonl
  x402 channels withdraw 0x… --journal ~/.x402.jsonl --rpc-url https://…     if the seller does not answer any more")]
pub(crate) struct Command {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// List channels
    List {
        /// Of a seller: all, unclaimed, at-risk, or idle:SECONDS
        #[arg(default_value = "all")]
        which: ChannelFilter,
        /// The seller's ledger: sqlite:PATH or postgres://USER@HOST/DATABASE
        #[arg(long, env = "X402_LEDGER", hide_env_values = true)]
        ledger: Option<LedgerAt>,
        /// The payer's journal
        #[arg(long, value_name = "FILE")]
        journal: Option<PathBuf>,
        /// Print JSON lines
        #[arg(long)]
        json: bool,
    },
    /// Claim all that was charged on a seller's channels, and have it transferred
    Claim {
        /// The seller's ledger
        #[arg(long, env = "X402_LEDGER", hide_env_values = true)]
        ledger: LedgerAt,
        /// Print one JSON line
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        chain: ChainFlags,
    },
    /// Get a payer's money back from its channels by asking their sellers; or, with --ledger, give a seller's payers theirs back
    Refund {
        /// Only channels that no request used for this many seconds [default: 0; a seller has to say it]
        #[arg(long, value_name = "SECONDS")]
        idle: Option<u64>,
        /// The seller's ledger. Each refund is a transaction of the key in CHANNELS_PRIVATE_KEY, which claims what was charged, too
        #[arg(long, requires = "idle")]
        ledger: Option<LedgerAt>,
        /// Of a seller: only channels with at least this much left
        #[arg(long, value_name = "AMOUNT", default_value = "$0.05", value_parser = some_amount)]
        least: Usdc,
        /// Print JSON: a line for each channel of a payer, or one of a seller
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        purse: Box<PurseFlags>,
    },
    /// Withdraw what is left in a payer's channel without the seller, in two steps with its withdraw delay between. Costs gas
    Withdraw {
        /// The channel, as x402 channels list prints it
        channel: String,
        /// The second step: withdraw what was announced by the first
        #[arg(long)]
        finish: bool,
        /// Print one JSON line
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        purse: Box<PurseFlags>,
    },
}

impl Command {
    pub(crate) async fn run(self) -> Result<(), Error> {
        match self.what {
            What::List { journal: Some(journal), json, .. } => list_bought(&journal, json),
            What::List { which, ledger: Some(ledger), json, .. } => list_sold(&ledger, which, json).await,
            What::List { .. } => Err(Error::setting("--ledger", "give a seller's ledger, or a payer's --journal")),
            What::Claim { ledger, json, chain } => claim(&ledger, &chain, json).await,
            What::Refund { idle, ledger, least, json, purse } => {
                let idle = Duration::from_secs(idle.unwrap_or_default());
                match ledger {
                    Some(ledger) => give_back(&ledger, &purse.chain, (idle, least), json).await,
                    None => refund(idle, &purse, json).await,
                }
            }
            What::Withdraw { channel, finish, json, purse } => withdraw(&channel, finish, &purse, json).await,
        }
    }
}

async fn list_sold(ledger: &LedgerAt, which: ChannelFilter, json: bool) -> Result<(), Error> {
    let books = ledger.open_existing().await?;
    let operator = Operator::new(books.payments).channel_ledger(books.channels);
    let mut pages = operator.channels(which);
    let mut is_empty = true;
    while let Some(page) = pages.next().await.map_err(unreadable)? {
        is_empty = false;
        for record in &page {
            let channel = ChannelSummary::of(record);
            if json {
                output::bytes(channel.json().as_bytes());
                continue;
            }
            let [charged, unclaimed, at_risk, held] =
                [record.charged(), record.unclaimed(), record.at_risk(), record.state().available()].map(dollars);
            let ChannelSummary { channel, payer, .. } = &channel;
            output::line(format_args!(
                "{channel}  charged {charged}, unclaimed {unclaimed}, at risk {at_risk}, in escrow {held}  payer {payer}"
            ));
        }
    }
    if is_empty && !json {
        output::remark("There are none.");
    }
    Ok(())
}

fn list_bought(journal: &Path, json: bool) -> Result<(), Error> {
    // Of a mistyped path, no new one is made.
    std::fs::metadata(journal).map_err(|source| Error::Read { path: journal.to_owned(), source })?;
    let journal = tower_x402::client::Journal::open(journal).map_err(Error::Journal)?;
    for channel in journal.channels() {
        match json {
            true => output::line(json!({
                "channel": channel.id(),
                "network": channel.network.to_string(),
                "host": channel.host,
                "payee": channel.config.receiver.to_string(),
                "charged": channel.charged,
                "available": channel.available(),
                "withdraw_delay": channel.config.withdraw_delay,
                "disputed": channel.dispute().is_some(),
            })),
            false => {
                let disputed = if channel.dispute().is_some() { ", disputed" } else { "" };
                let (left, charged) = (channel.available(), channel.charged);
                output::line(format_args!(
                    "{}  {left} left, {charged} charged at {}{disputed}",
                    channel.id(),
                    channel.host
                ));
            }
        }
    }
    Ok(())
}

async fn claim(ledger: &LedgerAt, chain: &ChainFlags, json: bool) -> Result<(), Error> {
    let key = keys::require(Role::CHANNELS, &KeyFlags::default()).await?;
    let books = ledger.open_existing().await?;
    let channels = chain.channels_of_seller(key, &books).await?;
    let claimed = output::progress("claiming", channels.claim_all()).await;
    books.close().await;
    let report = claimed.map_err(|error| Error::Failed {
        what: format!("nothing was claimed: {}", Sentence(&error)),
        advice: "What was charged stays in the ledger. x402 doctor says what is wrong with the node and the key.",
    })?;
    match json {
        true => output::line(json!({
            "claimed": report.claimed.to_string(), "settled": report.settled.to_string(), "refused": report.refused.len(),
            "transactions": report.transactions,
        })),
        false => {
            report.transactions.iter().for_each(output::line);
            let (claimed, settled) = (dollars(report.claimed), dollars(report.settled));
            output::line(format_args!("Claimed {claimed}, and transferred {settled}"));
        }
    }
    match &report.refused[..] {
        [] => Ok(()),
        [first, ..] => Err(Error::Failed {
            what: format!("{} channels were not claimed, the first because: {}", report.refused.len(), first.detail),
            advice: "They stay in the ledger: see x402 channels list unclaimed.",
        }),
    }
}

/// Refunds a seller's channels that nobody uses.
async fn give_back(
    ledger: &LedgerAt,
    chain: &ChainFlags,
    (idle, least): (Duration, Usdc),
    json: bool,
) -> Result<(), Error> {
    let key = keys::require(Role::CHANNELS, &KeyFlags::default()).await?;
    let books = ledger.open_existing().await?;
    let channels = chain.channels_of_seller(key, &books).await?;
    let refunded = output::progress("refunding", channels.refund_idle(idle, least)).await;
    books.close().await;
    let report = refunded.map_err(|error| Error::Failed {
        what: format!("the channels were not all refunded: {}", Sentence(&error)),
        advice: "Run it again for the rest. x402 doctor says what is wrong with the node and the key.",
    })?;
    match json {
        true => output::line(json!({
            "refunded": report.refunded.to_string(), "failed": report.failed.len(), "transactions": report.transactions,
        })),
        false => {
            report.transactions.iter().for_each(output::line);
            let channels = report.transactions.len();
            output::line(format_args!("Refunded {} from {channels} channels", dollars(report.refunded)));
        }
    }
    match report.failed.len() {
        0 => Ok(()),
        failed => Err(Error::Failed {
            what: format!("{failed} channels were not refunded"),
            advice: "Run it again later; the log says why.",
        }),
    }
}

/// Returns an amount in atomic units as dollars.
fn dollars(units: u128) -> String {
    u64::try_from(units).map_or_else(|_| format!("{units} units"), |units| Usdc::from_atomic(units).to_string())
}

async fn refund(idle: Duration, purse: &PurseFlags, json: bool) -> Result<(), Error> {
    let key = keys::require(Role::PAYER, &purse.key).await?;
    let budget = Budget::builder().journal(needed_journal(purse)?).build();
    let payer = purse.payer(Some(key), budget).await?;
    let refunding = refund_channels(&payer, idle, purse.http());
    let refunds = output::progress("asking sellers for refunds", refunding).await.map_err(Error::Http)?;
    let mut failed = 0;
    for refund in &refunds {
        failed += usize::from(refund.reason.is_some());
        if json {
            let Refund { channel, amount, transaction, reason, .. } = refund;
            output::line(json!({
                "channel": channel, "amount": amount, "transaction": transaction, "reason": reason,
            }));
            continue;
        }
        let end = refund.reason.as_ref().map_or_else(
            || format!("in {}", crate::devnet::or_none(refund.transaction)),
            |reason| format!("({})", reason.escape_debug()),
        );
        output::line(format_args!("{}  {} {end}", refund.channel, refund.amount));
    }
    match failed {
        0 => Ok(()),
        failed => Err(Error::Failed {
            what: format!("{failed} of {} channels were not refunded", refunds.len()),
            advice: "If a seller does not answer any more, see x402 channels withdraw.",
        }),
    }
}

async fn withdraw(channel: &str, finish: bool, purse: &PurseFlags, json: bool) -> Result<(), Error> {
    let key = keys::require(Role::PAYER, &purse.key).await?;
    let budget = Budget::builder().journal(needed_journal(purse)?).build();
    let channels = budget.journal().channels();
    let is_asked = |entry: &&ChannelEntry| channel.parse::<ChannelId>().is_ok_and(|id| id == entry.id());
    let entry = channels.iter().find(is_asked).ok_or_else(|| {
        Error::setting("CHANNEL", "is not in this journal: x402 channels list --journal prints those that are")
    })?;
    let url = purse.chain.node()?.to_url("--rpc-url")?;
    let provider = ProviderBuilder::new().wallet(EthereumWallet::from(key)).connect_http(url);
    let transaction = match finish {
        true => Some(finalize_withdrawal(entry)),
        false => initiate_withdrawal(&provider, entry).await.map_err(|error| Error::Failed {
            what: Sentence(&error).to_string(),
            advice: "Try again, or use another node.",
        })?,
    };
    let Some(transaction) = transaction else {
        return Err(Error::Failed {
            what: "nothing is left in this channel".to_owned(),
            advice: "There is nothing to withdraw.",
        });
    };
    let reverted = "The withdraw delay may not be over, or nothing was announced: run it without --finish first.";
    let hash = output::progress("waiting for a block", send(&provider, transaction, reverted)).await?;
    let delay = entry.config.withdraw_delay;
    if finish {
        // What came back is reserved no longer.
        if let Err(error) = reconcile_channels(&budget, &provider).await {
            output::remark(format_args!("x402: the journal is not up to date: {}", Sentence(&error)));
        }
    }
    match (json, finish) {
        (true, _) => output::line(json!({
            "channel": entry.id(), "transaction": hash, "finished": finish, "withdraw_delay": delay,
        })),
        (false, true) => output::line(format_args!("Withdrawn in {hash}")),
        (false, false) => output::line(format_args!(
            "Announced in {hash}. In {delay} seconds: x402 channels withdraw {channel} --finish"
        )),
    }
    Ok(())
}

fn needed_journal(purse: &PurseFlags) -> Result<tower_x402::client::Journal, Error> {
    match purse.journal {
        Some(_) => purse.open_journal(),
        None => Err(Error::setting("--journal", "give the journal that the payments were made with")),
    }
}
