//! A facilitator as a service: verifies and settles payments for sellers that have no node.

#[path = "serving.rs"]
mod serving;
#[path = "settings.rs"]
mod settings;

use std::{process::ExitCode, time::Duration};

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use anyhow::Context as _;
use axum::{Router, routing::get};
use clap::Parser;
use metrics_exporter_prometheus::PrometheusBuilder;
use serde_json::json;
use tower_x402::{Network, facilitator::OnchainFacilitator};
use tracing::{info, warn};
use x402_devnet::{Devnet, DevnetPort};
use x402_facilitator::FacilitatorService;

use serving::{Serving, Signals, announce, exit_of, listen, log_of};
use settings::{LedgerAt, TokenFlags, private_key};

const KEY: &str = "SETTLEMENT_PRIVATE_KEY";
/// What the settlement key gets on a chain in this process: one ether, in wei.
const GAS_TANK: u64 = 1_000_000_000_000_000_000;
/// How long a stopping facilitator waits for requests and settlements.
const LAST_REQUESTS: Duration = Duration::from_secs(60);
/// How often the metrics exporter drains its histograms.
const NUMBERS_INTERVAL: Duration = Duration::from_secs(5);

/// Verifies and settles x402 payments for sellers: POST /verify, POST /settle, GET /supported, GET /healthz.
///
/// Without --rpc-url, a chain with its own USDC is started in the process.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
OUTPUT
  One JSON line on standard output when ready, and nothing else; logs go to standard error:
    {\"listening\", \"rpc_url\", \"asset\", \"network\", \"settlement_address\"}

ENVIRONMENT
  SETTLEMENT_PRIVATE_KEY  the key that sends the transactions and pays their gas (32 bytes in hex); required with --rpc-url
  FACILITATOR_KEYS        comma-separated keys, one of which callers send as Authorization: Bearer …
                          [default: anyone may call]
  PGPASSWORD              the password for --ledger postgres://…, if the URL has none
  RUST_LOG                the log filter [default: warn,facilitator=info]

TRY IT
  facilitator --listen 127.0.0.1:4022
  # In another terminal, with the rpc_url that the first one printed:
  evaluator --facilitator-url http://127.0.0.1:4022 --rpc-url http://127.0.0.1:(port)/ --pay-to 0x…"
)]
struct Flags {
    /// The address to listen on; port 0 for any free one
    #[arg(long, default_value = "127.0.0.1:4022")]
    listen: String,
    /// The network to settle on: base, base-sepolia or eip155:N
    #[arg(long, default_value = "base-sepolia")]
    network: Network,
    /// A node of the network [default: a chain in this process]
    #[arg(long, value_name = "URL")]
    rpc_url: Option<String>,
    #[command(flatten)]
    token: TokenFlags,
    /// Serve this payee only; repeatable [default: all]
    #[arg(long, value_name = "ADDR")]
    payee: Vec<Address>,
    /// How many requests each caller may make per minute
    #[arg(long, value_name = "N", default_value_t = 600)]
    rate: u32,
    /// The most gas for one request [default: 400000, or 16777216 if callers need a key]
    #[arg(long, value_name = "GAS")]
    max_gas: Option<u64>,
    /// The most gas in an hour, for all callers together
    #[arg(long, value_name = "GAS", default_value_t = 100_000_000)]
    gas_per_hour: u64,
    /// List up to N resources that were paid for at GET /discovery/resources, each for 30 days [default: none]
    #[arg(long, value_name = "N")]
    catalogue: Option<usize>,
    /// Serve GET /metrics for Prometheus, without authentication
    #[arg(long)]
    metrics: bool,
    /// The ledger: memory, sqlite:PATH, or postgres://USER@HOST/DATABASE, which several facilitators may share
    #[arg(long, default_value = "memory")]
    ledger: LedgerAt,
}

impl Flags {
    /// Returns the facilitator, its node's URL, and the port of the chain if it is in this process.
    async fn facilitator(&self) -> anyhow::Result<(OnchainFacilitator, String, Option<DevnetPort>)> {
        let key = private_key(KEY)?;
        let settling = OnchainFacilitator::builder().network(self.network).ledger(self.ledger.open().await?.payments);
        if let Some(url) = &self.rpc_url {
            let key = key.with_context(|| format!("set {KEY} to the private key that pays for gas"))?;
            let facilitator = settling.rpc_url(url).signer(key).build().await.context("--rpc-url")?;
            return Ok((facilitator, url.clone(), None));
        }
        let devnet = Devnet::builder().chain_id(self.network.chain_id()).start().await?;
        let key = key.unwrap_or_else(PrivateKeySigner::random);
        devnet.fund(key.address(), U256::from(GAS_TANK));
        let port = devnet.serve("127.0.0.1:0").await.context("no port for the chain in this process")?;
        let facilitator = settling.client(devnet.rpc_client()).signer(key).build().await?;
        Ok((facilitator, port.url().to_string(), Some(port)))
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    log_of("facilitator");
    exit_of("facilitator", run(flags).await)
}

async fn run(flags: Flags) -> anyhow::Result<()> {
    // The recorder must be installed before the facilitator is built.
    let numbers = flags.metrics.then(|| PrometheusBuilder::new().install_recorder()).transpose()?;
    let mut signals = Signals::catch()?;
    let listener = listen(&flags.listen).await?;
    let asset = flags.token.on(flags.network)?;
    let (facilitator, rpc_url, _port) = flags.facilitator().await?;
    let mut service =
        FacilitatorService::builder(facilitator.clone()).asset(asset.clone()).rate(flags.rate, Duration::from_secs(60));
    service = service.gas_per_hour(flags.gas_per_hour);
    if let Some(gas) = flags.max_gas {
        service = service.max_gas(gas);
    }
    for payee in &flags.payee {
        service = service.payee(*payee);
    }
    let given = std::env::var("FACILITATOR_KEYS").unwrap_or_default();
    let keys: Vec<&str> = given.split(',').map(str::trim).filter(|key| !key.is_empty()).collect();
    anyhow::ensure!(
        given.is_empty() || !keys.is_empty(),
        "FACILITATOR_KEYS has no key: give one, or unset it to serve anybody"
    );
    for key in &keys {
        service = service.bearer_key(*key);
    }
    if let Some(resources) = flags.catalogue {
        service = service.catalogue(resources, Duration::from_secs(30 * 86_400));
    }
    let mut app = Router::new().fallback_service(service.build());
    if let Some(numbers) = numbers {
        let shown = numbers.clone();
        app = app.route("/metrics", get(async move || shown.render()));
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(NUMBERS_INTERVAL).await;
                numbers.run_upkeep();
            }
        });
    }
    announce(&json!({
        "listening": listener.local_addr()?.to_string(),
        "rpc_url": rpc_url,
        "asset": asset.address.to_string(),
        "network": flags.network,
        "settlement_address": facilitator.settlement_address().to_string(),
    }))?;
    info!(network = %flags.network, keys = keys.len(), "settling for others");

    let serving = Serving::begin(listener, app);
    signals.next().await;
    if let Err(error) = serving.finish(LAST_REQUESTS).await {
        warn!("{error:#}");
    }
    if !facilitator.drain(LAST_REQUESTS).await {
        warn!("some settlements are still open; the next process continues with them from the ledger");
    }
    Ok(())
}
