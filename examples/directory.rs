//! A directory as a service: lists evaluators, and pools reports of payers about them.

#[path = "serving.rs"]
mod serving;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use alloy_primitives::Address;
use anyhow::Context as _;
use axum::Router;
use clap::Parser;
use serde_json::json;
use tower_x402::{Asset, Network};
use tracing::{info, warn};
use x402_devnet::{Devnet, DevnetPort};
use x402_directory::{DirectoryService, DirectoryStore, PaymentChecker};

use serving::{Serving, Signals, announce, exit_of, listen, log_of};

/// How long a stopping directory waits for requests.
const LAST_REQUESTS: Duration = Duration::from_secs(30);

/// Lists evaluators and pools evidence: POST and GET /cards, POST and GET /evidence, GET /healthz.
///
/// Without --rpc-url, a chain with its own USDC is started in the process, and cards on this machine are listed.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
OUTPUT
  One JSON line on standard output when ready, and nothing else; logs go to standard error:
    {\"listening\", \"network\", \"asset\", \"rpc_url\"}
  rpc_url is the node of the chain in this process, or null.

ENVIRONMENT
  RUST_LOG  the log filter [default: warn,directory=info]

TRY IT
  directory --listen 127.0.0.1:4023
  # In another terminal, with the rpc_url that the first one printed: a well-known key, ether for its gas, and an evaluator.
  export SETTLEMENT_PRIVATE_KEY=0xac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80
  curl -H 'content-type: application/json' -d '{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"devnet_fund\",
      \"params\": [\"0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266\", \"0xde0b6b3a7640000\"]}' http://127.0.0.1:(port)/
  evaluator --listen 127.0.0.1:4021 --rpc-url http://127.0.0.1:(port)/
  # In a third terminal, list it:
  curl -d '{\"url\": \"http://127.0.0.1:4021\"}' http://127.0.0.1:4023/cards
  curl http://127.0.0.1:4023/cards"
)]
struct Flags {
    /// The address to listen on; port 0 for any free one
    #[arg(long, default_value = "127.0.0.1:4023")]
    listen: String,
    /// The network of the payments: base, base-sepolia or eip155:N
    #[arg(long, default_value = "base-sepolia")]
    network: Network,
    /// A node of the network; repeatable, and all must agree [default: a chain in this process]
    #[arg(long, value_name = "URL")]
    rpc_url: Vec<String>,
    /// Accept evidence about payments in this EIP-3009 token, too; its owner could forge payments
    #[arg(long, value_name = "ADDR")]
    asset: Option<Address>,
    /// How many blocks must follow that of a payment [default: 12, or 0 with a chain in this process]
    #[arg(long, value_name = "N")]
    depth: Option<u64>,
    /// The SQLite file for cards and evidence [default: in memory]
    #[arg(long, value_name = "FILE")]
    db: Option<PathBuf>,
    /// List cards on this machine and in private networks, too. Anybody can then make the directory send requests there
    #[arg(long)]
    private_hosts: bool,
    /// How many requests each caller may make per minute
    #[arg(long, value_name = "N", default_value_t = 600)]
    rate: u32,
}

impl Flags {
    /// Who looks at the chain, and the port of that chain if it is in this process.
    async fn payment_checker(&self) -> anyhow::Result<(PaymentChecker, Option<DevnetPort>)> {
        let mut checker = PaymentChecker::new(self.network);
        if let Some(address) = self.asset {
            let (name, version) = (String::new(), String::new());
            checker = checker.token(&Asset::new(self.network, address, name, version));
        }
        if self.rpc_url.is_empty() {
            let devnet = Devnet::builder().chain_id(self.network.chain_id()).start().await?;
            let port = devnet.serve("127.0.0.1:0").await.context("no port for the chain in this process")?;
            let checker = checker.client(devnet.rpc_client()).depth(self.depth.unwrap_or(0));
            return Ok((checker, Some(port)));
        }
        for url in &self.rpc_url {
            checker = checker.rpc_url(url).context("--rpc-url")?;
        }
        Ok((checker.depth(self.depth.unwrap_or(12)), None))
    }

    async fn store(&self) -> anyhow::Result<DirectoryStore> {
        match &self.db {
            Some(path) => DirectoryStore::open(path).await.with_context(|| format!("--db {}", path.display())),
            None => Ok(DirectoryStore::in_memory().await?),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    log_of("directory");
    exit_of("directory", run(flags).await)
}

async fn run(flags: Flags) -> anyhow::Result<()> {
    let mut signals = Signals::catch()?;
    let listener = listen(&flags.listen).await?;
    let (checker, port) = flags.payment_checker().await?;
    let directory = DirectoryService::builder(flags.store().await?)
        .payment_checker(checker)
        .private_hosts(flags.private_hosts || port.is_some())
        .rate(f64::from(flags.rate) / 60.0, f64::from(flags.rate))
        .build()?;
    let upkeep = tokio::spawn(directory.clone().upkeep());
    announce(&json!({
        "listening": listener.local_addr()?.to_string(),
        "network": flags.network,
        "asset": flags.network.usdc().map(|usdc| usdc.address.to_string()),
        "rpc_url": port.as_ref().map(|port| port.url().to_string()),
    }))?;
    info!(network = %flags.network, nodes = flags.rpc_url.len(), "listing evaluators");

    let serving = Serving::begin(listener, Router::new().fallback_service(directory));
    signals.next().await;
    if let Err(error) = serving.finish(LAST_REQUESTS).await {
        warn!("{error:#}");
    }
    upkeep.abort();
    Ok(())
}
