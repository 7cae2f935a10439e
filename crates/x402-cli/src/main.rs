//! The command `x402`: charge for any HTTP service, pay for one, settle for others, and try all of it on a chain of your own.
//!
//! It contains the layer, the payer, the facilitator and the devnet of `tower-x402` as they are. Nothing here decides about money.
//!
//! | file | what it has |
//! |---|---|
//! | `charge/`, `pay.rs`, `proxy.rs`, `devnet.rs`, … | a subcommand each |
//! | `admin/` | what the operator of a seller or facilitator is shown |
//! | `chain.rs` | what is settled on: a node, a facilitator, or a chain in the process |
//! | `purse.rs` | what is paid with |
//! | `keys.rs`, `token.rs` | private keys, from variables and files; secrets that callers give |
//! | `serve.rs`, `headers.rs`, `paths.rs`, `problem.rs` | HTTP: a port within bounds, what a proxy passes on, answers of our own |
//! | `error.rs`, `output.rs`, `signals.rs`, `values.rs` | errors that say what to do, what is printed, signals, shared flags |

mod admin;
mod books;
mod chain;
mod channels;
mod charge;
mod devnet;
mod doctor;
mod error;
mod facilitator;
mod headers;
mod keys;
mod node;
mod output;
mod paths;
mod pay;
mod problem;
mod proxy;
mod purse;
mod serve;
mod signals;
mod token;
mod values;
mod wallet;

use std::{io::IsTerminal as _, process::ExitCode};

use clap::{CommandFactory as _, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::error::{Error, Sentence};

/// Charges for HTTP requests in USDC, and pays for them, over x402.
///
/// A server answers 402 with a price, the client signs a USDC authorization and sends the request again with it, and the server settles it
/// on Base. Nobody needs an account, and the client needs no ETH.
#[derive(Debug, Parser)]
#[command(
    name = "x402",
    version,
    after_help = "\
THE FIRST FIVE MINUTES
  python3 -m http.server 8000 --bind 127.0.0.1                       any HTTP service
  x402 charge --upstream http://127.0.0.1:8000 --price '$0.001'      charge for it, on a chain in the process
  export PAYER_PRIVATE_KEY=…                                         as x402 charge prints it
  x402 pay http://127.0.0.1:4021/                                    pay for it

EXIT STATUS
  0  done, or stopped by a signal
  1  the work failed: nothing was paid, no answer came, something is not as it should be
  2  it could not begin: a flag, a file, a key, a node or a port. The message says what to do"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Devnet(devnet::Command),
    Charge(Box<charge::Command>),
    Pay(Box<pay::Command>),
    Proxy(Box<proxy::Command>),
    Facilitator(Box<facilitator::Command>),
    Books(Box<books::Command>),
    Channels(channels::Command),
    Wallet(wallet::Command),
    Doctor(Box<doctor::Command>),
    Completions(Completions),
}

/// Prints completions for a shell.
///
/// For bash: x402 completions bash > ~/.local/share/bash-completion/completions/x402
#[derive(Debug, clap::Args)]
struct Completions {
    shell: clap_complete::Shell,
}

impl Command {
    const fn name(&self) -> &'static str {
        match self {
            Self::Devnet(_) => "devnet",
            Self::Charge(_) => "charge",
            Self::Pay(_) => "pay",
            Self::Proxy(_) => "proxy",
            Self::Facilitator(_) => "facilitator",
            Self::Books(_) => "books",
            Self::Channels(_) => "channels",
            Self::Wallet(_) => "wallet",
            Self::Doctor(_) => "doctor",
            Self::Completions(_) => "completions",
        }
    }

    async fn run(self) -> Result<(), Error> {
        match self {
            Self::Devnet(command) => command.run().await,
            Self::Charge(command) => command.run().await,
            Self::Pay(command) => command.run().await,
            Self::Proxy(command) => command.run().await,
            Self::Facilitator(command) => command.run().await,
            Self::Books(command) => command.run().await,
            Self::Channels(command) => command.run().await,
            Self::Wallet(command) => command.run().await,
            Self::Doctor(command) => command.run().await,
            Self::Completions(Completions { shell }) => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Arguments::command(), "x402", &mut script);
                output::bytes(&script);
                Ok(())
            }
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let Arguments { command } = Arguments::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn,x402=info".into());
    let logs = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    logs.with_env_filter(filter).init();
    let name = command.name();
    match command.run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::remark(format_args!("x402 {name}: {}", Sentence(&error)));
            if let Some(advice) = error.advice() {
                output::remark(advice);
            }
            ExitCode::from(error.exit_code())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn no_flag_takes_a_private_key() {
        let mut commands = vec![Arguments::command()];
        while let Some(command) = commands.pop() {
            for argument in command.get_arguments().filter_map(clap::Arg::get_long) {
                assert!(!["key", "private-key", "password", "secret", "token"].contains(&argument), "{argument}");
            }
            commands.extend(command.get_subcommands().cloned());
        }
    }
}
