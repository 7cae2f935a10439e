//! Paid requests over loopback, each seller with the facilitator that it brings for a chain, and a node that answers at once.
//!
//! The node is the embedded chain in a process of its own; what it takes of the processors is counted apart.

use std::{
    path::Path,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::{B256, U256, hex};
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::{
    Router,
    routing::{MethodRouter, post},
};
use bytes::Bytes;
use r402_http::server::SettlementMode;
use r402_protocol::{
    FacilitatorError as R402Error,
    payment::{SettleRequest, SettleResponse, SupportedResponse as R402Supported, VerifyRequest, VerifyResponse},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    process::{Child, Command},
};
use tower_x402::{
    Network, Usdc,
    facilitator::{Facilitator, FacilitatorError, OnchainFacilitator, VerifyError},
    ledger::{Ledger, MemoryLedger, Record, SqliteLedger},
    payment::{Prechecked, SettlementOutcome, Terms, Verified},
    protocol::SupportedResponse,
    server::DeferredPolicy,
};
use x402_devnet::Devnet;
use x402_types::proto;

use crate::{
    Result,
    at_once::{AtOnce, Checks},
    chain, hot_path,
    listening::Listening,
    load::{self, median},
    onchain,
    payments::keys,
    sellers::{self, NAMES},
};

const TURNS: usize = 3;
const PAYERS: u8 = 200;
/// How long what was answered before it was settled may take.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Verified by its own means; whatever is to be settled is settled at once.
    Verifies,
    /// The answer waits for the settlement.
    Settles,
    /// It does not wait.
    SettlesLater,
    /// First settled, then worked on.
    SettlesFirst,
}

impl Mode {
    const fn describe(self) -> &'static str {
        match self {
            Self::Verifies => "verified; nothing to settle",
            Self::Settles => "verified, worked on, settled, answered",
            Self::SettlesLater => "verified, worked on, answered, settled",
            Self::SettlesFirst => "settled, worked on, answered",
        }
    }
}

impl Mode {
    /// Those whose rates are compared.
    const fn kind(self) -> usize {
        match self {
            Self::Verifies => 0,
            Self::Settles | Self::SettlesFirst => 1,
            Self::SettlesLater => 2,
        }
    }
}

struct Row {
    name: &'static str,
    mode: Mode,
    connections: usize,
    payments: usize,
}

const fn row(name: &'static str, mode: Mode, connections: usize, payments: usize) -> Row {
    Row { name, mode, connections, payments }
}

/// The others with few connections: with 64 a run of 300 payments did not end within a minute.
const ROWS: [Row; 11] = [
    row("tower-x402, SQLite", Mode::Verifies, 256, 4_000),
    row("tower-x402, in memory", Mode::Verifies, 256, 4_000),
    row(NAMES[1], Mode::Verifies, 256, 4_000),
    row(NAMES[2], Mode::Verifies, 256, 4_000),
    row("tower-x402, SQLite", Mode::Settles, 1_024, 4_000),
    row("tower-x402, in memory", Mode::Settles, 1_024, 4_000),
    row(NAMES[1], Mode::Settles, 16, 200),
    row(NAMES[2], Mode::Settles, 16, 200),
    row(NAMES[2], Mode::SettlesFirst, 16, 200),
    row("tower-x402, SQLite", Mode::SettlesLater, 256, 4_000),
    row(NAMES[1], Mode::SettlesLater, 256, 4_000),
];

impl Row {
    fn is_ours(&self) -> bool {
        !NAMES[1..].contains(&self.name)
    }

    /// Payments before those that count: of ours some by each payer, so that all are known.
    const fn warm_up(&self) -> usize {
        match self.mode {
            Mode::SettlesLater => 3 * PAYERS as usize,
            _ => 2 * self.connections,
        }
    }
}

pub fn run() -> Result {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(all())
}

/// The node, until whoever started it is gone.
pub fn node() -> Result {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(async {
        let devnet = Devnet::start().await?;
        for contract in chain::EXPECTED {
            devnet.set_code(contract, alloy_primitives::bytes!("00"));
        }
        for payer in keys(PAYERS) {
            devnet.mint(payer.address(), Usdc::from_atomic(1_000_000_000))?;
        }
        devnet.fund(settler()?.address(), U256::from(10).pow(U256::from(18)));
        let port = devnet.serve("127.0.0.1:0").await?;
        println!("{}", port.url());
        tokio::io::stdin().read_to_end(&mut Vec::new()).await?;
        Ok(())
    })
}

pub fn settler() -> Result<PrivateKeySigner> {
    Ok(PrivateKeySigner::from_bytes(&B256::repeat_byte(0xee))?)
}

pub struct Node {
    pub url: String,
    process: Child,
}

impl Node {
    pub async fn start() -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("node").stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn()?;
        let mut url = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut url).await?;
        Ok(Self { url: url.trim().to_owned(), process })
    }

    /// How many payments the payee has got.
    async fn paid(&self) -> Result<u64> {
        let usdc = Network::BASE_SEPOLIA.usdc().ok_or("no USDC")?.address;
        let data = format!("0x70a08231{}", hex::encode(hot_path::pay_to().into_word()));
        let call = json!({ "jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [{ "to": usdc, "data": data }, "latest"] });
        let answer: Value = serde_json::from_slice(
            &reqwest::Client::new()
                .post(&self.url)
                .header("content-type", "application/json")
                .body(call.to_string())
                .send()
                .await?
                .bytes()
                .await?,
        )?;
        let balance: U256 = answer["result"].as_str().ok_or("no balance")?.parse()?;
        Ok((balance / U256::from(hot_path::PRICE)).to())
    }

    /// What the process has had of the processors; nothing where there is no `/proc`.
    fn processor_time(&self) -> Duration {
        self.process.id().map_or(Duration::ZERO, |id| processor_time(&id.to_string()))
    }
}

/// In ticks of 10 ms, as Linux counts them.
pub fn processor_time(process: &str) -> Duration {
    let stat = std::fs::read_to_string(Path::new("/proc").join(process).join("stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2).flat_map(str::parse::<u64>).sum::<u64>();
    Duration::from_millis(10 * ticks)
}

/// What a virtual machine's host has kept of the processors since they started, all of them together, in ticks of 10 ms.
pub fn stolen_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = stat.split_whitespace().nth(8).and_then(|ticks| ticks.parse().ok()).unwrap_or(0);
    Duration::from_millis(10 * ticks)
}

#[derive(Clone, Copy, Debug, Default)]
struct Run {
    /// With 200, a second.
    answered: f64,
    /// Of those that were answered with 200, how many were paid for in the end.
    paid: f64,
    /// How many were answered with something else.
    refused: f64,
    /// Microseconds of the processors a payment: of this process, and of the node.
    here: f64,
    node: f64,
}

async fn all() -> Result {
    let mut runs = vec![Vec::new(); ROWS.len()];
    for turn in 0..TURNS {
        for (row, runs) in ROWS.iter().zip(&mut runs) {
            let run = once(row).await?;
            eprintln!("turn {turn}, {}, {}: {run:.0?}", row.name, row.mode.describe());
            runs.push(run);
        }
    }
    println!("each with its own facilitator, on a node that answers at once; medians of {TURNS} runs\n");
    println!(
        "| | | connections | answered a second | to the better peer | paid for | µs of the processors, and of the node's |"
    );
    println!("|---|---|---|---|---|---|---|");
    let of = |runs: &[Run], what: fn(&Run) -> f64| median(runs.iter().map(what).collect());
    let best = |kind: usize| {
        let peers = ROWS.iter().zip(&runs).filter(|(row, _)| !row.is_ours() && row.mode.kind() == kind);
        peers.map(|(_, runs)| of(runs, |run| run.answered)).fold(0.0, f64::max)
    };
    for (row, runs) in ROWS.iter().zip(&runs) {
        let answered = of(runs, |run| run.answered);
        let paid = match row.mode {
            Mode::Verifies => "–".to_owned(),
            _ => format!("{:.1} %", 100.0 * of(runs, |run| run.paid)),
        };
        println!(
            "| {} | {} | {} | {answered:.0} | {:.1} × | {paid} | {:.0}, {:.0} |",
            row.name,
            row.mode.describe(),
            row.connections,
            answered / best(row.mode.kind()),
            of(runs, |run| run.here),
            of(runs, |run| run.node),
        );
    }
    for (row, runs) in ROWS.iter().zip(&runs) {
        let refused = of(runs, |run| run.refused);
        if refused > 0.0 {
            println!("\n{}, {}: {refused:.0} of {} got no 200", row.name, row.mode.describe(), row.payments);
        }
    }
    Ok(())
}

async fn once(row: &Row) -> Result<Run> {
    let node = Node::start().await?;
    let directory = tempfile::tempdir()?;
    let handler = post(async |_: Bytes| hot_path::WORK);
    let server = Listening::here(app(&handler, row, &node.url, directory.path()).await?).await?;
    let demand = server.demand().await?;
    let settles = row.mode != Mode::Verifies;
    let warm = load::drive(&server, &demand, row.connections, row.warm_up(), None).await?;
    let before = if settles { settled(&node, (row.warm_up() - warm.refused) as u64).await? } else { 0 };
    let there = node.processor_time();
    let driven = load::drive(&server, &demand, row.connections, row.payments, None).await?;
    let here = processor_time("self");
    let served = row.payments - driven.refused;
    let paid = if settles { settled(&node, before + served as u64).await? - before } else { 0 };
    let each = |time: Duration| time.as_secs_f64() * 1e6 / served.max(1) as f64;
    Ok(Run {
        answered: served as f64 / driven.took.as_secs_f64(),
        paid: paid as f64 / served.max(1) as f64,
        refused: driven.refused as f64,
        here: each(driven.cpu + (processor_time("self") - here)),
        node: each(node.processor_time() - there),
    })
}

/// Waits until so many payments have reached the payee, and returns how many have.
async fn settled(node: &Node, payments: u64) -> Result<u64> {
    let started = Instant::now();
    loop {
        let paid = node.paid().await?;
        if paid >= payments || started.elapsed() > PATIENCE {
            return Ok(paid);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn app(handler: &MethodRouter, row: &Row, url: &str, directory: &Path) -> Result<Router> {
    let (key, name, mode) = (settler()?, row.name, row.mode);
    match name {
        "r402 0.21.0" => {
            let facilitator = onchain::r402(url, key)?;
            match mode {
                Mode::Verifies => sellers::r402(handler, OnlyVerifies::new(facilitator)),
                Mode::SettlesLater => sellers::r402_in(handler, facilitator, SettlementMode::Background),
                _ => sellers::r402(handler, facilitator),
            }
        }
        "x402-axum 2.0.2" => {
            let facilitator = onchain::x402_rs(url, key).await?;
            Ok(match mode {
                Mode::Verifies => sellers::x402_axum(handler, OnlyVerifies::new(facilitator)),
                Mode::SettlesFirst => sellers::x402_axum_that_settles_first(handler, facilitator),
                _ => sellers::x402_axum(handler, facilitator),
            })
        }
        _ => {
            let ledger: Arc<dyn Ledger> = match name.ends_with("SQLite") {
                true => Arc::new(SqliteLedger::open(directory.join("ledger.sqlite")).await?),
                false => Arc::new(MemoryLedger::new()),
            };
            let facilitator = onchain::ours_with(url, key, ledger).await?;
            facilitator.deploy_batch_settler().await?;
            let much = Usdc::from_atomic(1_000_000_000);
            let policy = DeferredPolicy::default().per_payer(much);
            match mode {
                Mode::Verifies => sellers::ours_with(handler, OnlyVerifies::new(facilitator)),
                Mode::SettlesLater => sellers::ours_deferred(handler, facilitator, policy),
                _ => sellers::ours_with(handler, facilitator),
            }
        }
    }
}

/// A facilitator that verifies as it does, and to whom everything is settled at once.
#[derive(Clone, Debug)]
struct OnlyVerifies<F> {
    inner: F,
    at_once: AtOnce,
}

impl<F> OnlyVerifies<F> {
    fn new(inner: F) -> Self {
        Self { inner, at_once: AtOnce::new(Checks::Nothing) }
    }
}

#[async_trait]
impl Facilitator for OnlyVerifies<OnchainFacilitator> {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        self.inner.ledger()
    }

    fn serves(&self, terms: &Terms) -> bool {
        self.inner.serves(terms)
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        self.inner.supported().await
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        self.inner.verify(payment).await
    }

    async fn settle(&self, payment: &Prechecked, _: &Verified) -> Result<SettlementOutcome, FacilitatorError> {
        Ok(SettlementOutcome::Settled { transaction: payment.authorization().nonce, block: None, fee: None })
    }

    async fn reconcile(&self, _: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        Ok(SettlementOutcome::Unknown { transaction: None })
    }
}

impl<F: r402_facilitator::Facilitator + Sync> r402_facilitator::Facilitator for OnlyVerifies<F> {
    async fn verify(&self, request: VerifyRequest) -> Result<VerifyResponse, R402Error> {
        self.inner.verify(request).await
    }

    async fn settle(&self, request: SettleRequest) -> Result<SettleResponse, R402Error> {
        r402_facilitator::Facilitator::settle(&self.at_once, request).await
    }

    async fn supported(&self) -> Result<R402Supported, R402Error> {
        self.inner.supported().await
    }
}

impl<F: x402_types::facilitator::Facilitator + Sync> x402_types::facilitator::Facilitator for OnlyVerifies<F> {
    type Error = F::Error;

    async fn verify(&self, request: &proto::VerifyRequest) -> Result<proto::VerifyResponse, Self::Error> {
        self.inner.verify(request).await
    }

    async fn settle(&self, request: &proto::SettleRequest) -> Result<proto::SettleResponse, Self::Error> {
        match x402_types::facilitator::Facilitator::settle(&self.at_once, request).await {
            Ok(settled) => Ok(settled),
            Err(never) => match never {},
        }
    }

    async fn supported(&self) -> Result<proto::SupportedResponse, Self::Error> {
        self.inner.supported().await
    }
}
