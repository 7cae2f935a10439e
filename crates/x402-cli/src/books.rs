//! `x402 books`: lists, finds, exports and reconciles the payments in a ledger.

use alloy_primitives::{Address, B256};
use serde_json::json;
use tower_x402::{
    ledger::LedgerError,
    ops::{ExportEntry, ExportFormat, Operator, PaymentFilter, PaymentSearch},
    payment::PaymentKey,
    permit2,
};

use crate::{
    chain::ChainFlags,
    error::{Error, Sentence},
    keys::{self, KeyFlags, Role},
    output,
    values::LedgerAt,
};

/// The most payments that a search prints.
const MAX_FOUND: usize = 1_000;

/// Lists, finds, sums up and exports the payments in a ledger.
///
/// A ledger in SQLite is open in one process only: stop `x402 charge` first, or ask its --admin address. One in PostgreSQL is read while it
/// is in use.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  x402 books --ledger sqlite:payments.sqlite list
  x402 books --ledger sqlite:payments.sqlite owed                      settled and not delivered whole
  x402 books --ledger sqlite:payments.sqlite export --format csv > payments.csv
  x402 books --ledger sqlite:payments.sqlite find 0x70997970
  x402 books --ledger postgres://x402@db/x402 reconcile 0x(payer):0x(nonce) --rpc-url https://…")]
pub(crate) struct Command {
    /// The ledger: sqlite:PATH or postgres://USER@HOST/DATABASE
    #[arg(long, env = "X402_LEDGER", hide_env_values = true)]
    ledger: LedgerAt,
    #[command(subcommand)]
    question: Question,
}

#[derive(Debug, clap::Subcommand)]
enum Question {
    /// List payments, in columns for people
    List {
        /// all, open, owed, deferred, or a state: none, due, submitted, unknown, settled, final or dead
        #[arg(default_value = "all")]
        which: PaymentFilter,
        /// Print JSON lines instead
        #[arg(long)]
        json: bool,
    },
    /// Find payments by payer, nonce or transaction
    Find {
        /// At least 8 hex digits that a payer, a nonce or a transaction begins with, or 0x(payer):0x(nonce)
        text: PaymentSearch,
        /// Print JSON lines instead
        #[arg(long)]
        json: bool,
    },
    /// List payments that settled and were not delivered whole: look at what happened, and pay them back
    Owed {
        /// Print JSON lines instead
        #[arg(long)]
        json: bool,
    },
    /// Export payments for accounting
    Export {
        /// all, open, owed, deferred, or a state
        #[arg(default_value = "all")]
        which: PaymentFilter,
        #[arg(long, value_enum, default_value = "csv")]
        format: Format,
    },
    /// Print totals by token, as JSON
    Report,
    /// Ask the chain now what became of a payment, and record it. Needs the settlement key, as x402 charge does
    Reconcile {
        /// The payment: 0x(payer):0x(nonce)
        payment: PaymentSearch,
        /// Print a JSON line instead
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        chain: ChainFlags,
    },
}

/// An export format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    Csv,
    Jsonl,
}

impl From<Format> for ExportFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Csv => Self::Csv,
            Format::Jsonl => Self::JsonLines,
        }
    }
}

/// Returns the error of a ledger that fails while it is read.
pub(crate) fn unreadable(error: LedgerError) -> Error {
    Error::Failed {
        what: format!("the ledger cannot be read: {}", Sentence(&error)),
        advice: "Check the disk or the database.",
    }
}

impl Command {
    pub(crate) async fn run(self) -> Result<(), Error> {
        let books = self.ledger.open_existing().await?;
        let operator = Operator::new(books.payments.clone()).channel_ledger(books.channels.clone());
        match self.question {
            Question::List { which, json } => list(&operator, which, json).await,
            Question::Owed { json } => list(&operator, PaymentFilter::Owed, json).await,
            Question::Find { text, json } => {
                let found = operator.find(&text, MAX_FOUND).await.map_err(unreadable)?;
                if found.is_empty() {
                    return Err(Error::Failed {
                        what: "no payment begins with that".to_owned(),
                        advice: "See x402 books list.",
                    });
                }
                found.iter().map(ExportEntry::of).for_each(|entry| print(&entry, json));
                Ok(())
            }
            Question::Export { which, format } => {
                let mut export = operator.export(which, format.into());
                while let Some(lines) = export.next().await.map_err(unreadable)? {
                    output::bytes(lines.as_bytes());
                }
                Ok(())
            }
            Question::Report => {
                let reading =
                    async { Ok::<_, LedgerError>((operator.report().await?, operator.channel_report().await?)) };
                let (payments, channels) = output::progress("reading the ledger", reading).await.map_err(unreadable)?;
                output::line(json!({ "payments": payments.assets, "channels": channels }));
                Ok(())
            }
            Question::Reconcile { payment, json, chain } => {
                let PaymentSearch::Payment { payer, nonce } = payment else {
                    return Err(Error::setting(
                        "PAYMENT",
                        "expected 0x(payer):0x(nonce), as x402 books find prints them",
                    ));
                };
                let mut key = PaymentKey { network: chain.network(), asset: chain.asset()?.address, payer, nonce };
                if books.payments.get(&key).await.map_err(unreadable)?.is_none() {
                    // The nonce of a permit (scheme upto) is one of Permit2, whatever the token.
                    key.asset = permit2::PERMIT2;
                }
                let settling = keys::require(Role::SETTLEMENT, &KeyFlags::default()).await?;
                let facilitator = chain.settle(settling, &books).await?;
                let reconciling = output::progress("asking the chain", operator.reconcile(&facilitator, &key));
                let reconciled = reconciling.await.map_err(|error| Error::Failed {
                    what: Sentence(&error).to_string(),
                    advice: "See x402 books find; if the node did not answer, try again.",
                })?;
                books.close().await;
                print(&ExportEntry::of(&reconciled.0), json);
                Ok(())
            }
        }
    }
}

async fn list(operator: &Operator, which: PaymentFilter, json: bool) -> Result<(), Error> {
    let mut pages = operator.payments(which);
    let mut is_empty = true;
    while let Some(page) = pages.next().await.map_err(unreadable)? {
        is_empty = false;
        page.iter().map(ExportEntry::of).for_each(|entry| print(&entry, json));
    }
    if is_empty && !json {
        output::remark("There are none.");
    }
    Ok(())
}

fn print(entry: &ExportEntry, json: bool) {
    if json {
        output::bytes(entry.json().as_bytes());
        return;
    }
    let ExportEntry { time, amount, state, work, payer, payee, nonce, transaction, .. } = entry;
    let (payer, payee): (&Address, &Address) = (payer, payee);
    let transaction = transaction.map_or_else(|| "-".to_owned(), |transaction: B256| transaction.to_string());
    output::line(format_args!(
        "{time}  {amount:>12}  {state:<9} {work:<9} {payer}:{nonce} to {payee} in {transaction}"
    ));
}
