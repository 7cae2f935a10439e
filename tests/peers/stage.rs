//! The programs, and what a purchase must leave behind.

use std::{path::PathBuf, process::Stdio, sync::OnceLock, time::Duration};

use alloy_primitives::{Address, B256, address, b256, bytes};
use alloy_signer_local::PrivateKeySigner;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use crate::{
    recorder::{Cell, Recorder},
    support::{
        anvil::AnvilChain,
        chain::{Chain, Transfer},
        programs::example,
    },
};

/// For everything a program does here; compiling is not part of it.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// What an evaluation costs, in units.
pub const PRICE: u64 = 1_000;
pub const TASK: &str = r#"{"task": {"id": "t1", "skill": "arithmetic", "prompt": "What is 17 * 23 + 4?"},
    "output": "17 * 23 = 391, and 4 more is 395. Answer: 395"}"#;

/// Who buys, who settles and who is paid: accounts of anvil's own, whose keys everybody knows, since what they sign is recorded.
const BUYER: B256 = b256!("59c6995e998f97a5a0044966f0945389dc9e86dae88c7a8412f4603b6b78690d");
const SETTLER: &str = "0x5de4111afa1a4b94908f83103eb1f1706367c2e68ca870fc3fb9a804cdab365a";
const PAYEE: Address = address!("90F79bf6EB2c4f870365E785982E1f101E93b906");

/// The validator of ERC-6492, Permit2 and the proxy that x402 has for it.
const X402_RS_NEEDS: [Address; 3] = [
    address!("dAcD51A54883eb67D95FAEb2BBfdC4a9a6BD2a3B"),
    address!("000000000022D473030F116dDEE9F6B43aC78BA3"),
    address!("402085c248EeA27D92E8b30b2C58ed07f9E20001"),
];

/// A client of others.
#[derive(Clone, Copy, Debug)]
pub enum Buyer {
    /// The official client for fetch.
    Fetch,
    /// The legacy one, which knows v1 only.
    FetchV1,
    /// The official Python client, over httpx.
    Httpx,
    /// The same, over requests.
    Requests,
    R402,
    /// The client of x402-rs, registered for this version of x402 only.
    X402Reqwest(u8),
}

impl Buyer {
    fn program(self) -> Command {
        match self {
            Self::Fetch => script(["node", "fetch_v2.mjs"]),
            Self::FetchV1 => script(["node", "fetch_v1.mjs"]),
            Self::Httpx => script([PYTHON, "pay_httpx.py"]),
            Self::Requests => script([PYTHON, "pay_requests.py"]),
            Self::R402 => script([RUST, "r402-client"]),
            Self::X402Reqwest(1) => script([RUST, "x402-reqwest-v1"]),
            Self::X402Reqwest(_) => script([RUST, "x402-reqwest-v2"]),
        }
    }

    /// Runs it; what it printed, or why it ended without.
    async fn buy(self, url: &str, account: &PrivateKeySigner) -> Result<Value, String> {
        let mut program = self.program();
        program.arg(url).env("PRIVATE_KEY", account.to_bytes().to_string()).env("TASK", TASK).stderr(Stdio::piped());
        let output = timeout(PATIENCE, program.output()).await.expect("the peer ends").unwrap();
        let error = || String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(serde_json::from_slice(&output.stdout).unwrap()) } else { Err(error()) }
    }

    /// The package and the version of x402 it speaks here.
    const fn name(self) -> (&'static str, u8) {
        match self {
            Self::Fetch => ("@x402/fetch", 2),
            Self::FetchV1 => ("x402-fetch", 1),
            Self::Httpx => ("x402-httpx", 2),
            Self::Requests => ("x402-requests", 2),
            Self::R402 => ("r402-client", 2),
            Self::X402Reqwest(version) => ("x402-reqwest", version),
        }
    }
}

/// A server, ours or of others.
#[derive(Clone, Copy, Debug)]
pub enum Seller {
    Evaluator,
    Express,
    Hono,
    FastApi,
    /// The legacy middleware, which speaks v1 only.
    ExpressV1,
    R402,
    /// The middleware of x402-rs, which speaks one version of x402 at a time.
    X402Axum(u8),
}

impl Seller {
    const fn name(self) -> (&'static str, u8) {
        match self {
            Self::Evaluator => ("evaluator", 2),
            Self::Express => ("@x402/express", 2),
            Self::Hono => ("@x402/hono", 2),
            Self::FastApi => ("x402-fastapi", 2),
            Self::ExpressV1 => ("x402-express", 1),
            Self::R402 => ("r402-server", 2),
            Self::X402Axum(version) => ("x402-axum", version),
        }
    }
}

/// Who settles for a seller.
#[derive(Clone, Copy, Debug)]
pub enum Bank {
    /// Nobody else: the seller's own facilitator in its process.
    Own,
    /// Our facilitator.
    Ours,
    /// The official one.
    Official,
    /// The official one in Python.
    Python,
    /// That of x402-rs.
    X402Rs,
}

impl Bank {
    const fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Ours => "tower-x402",
            Self::Official => "@x402/core",
            Self::Python => "x402-python",
            Self::X402Rs => "x402-facilitator-local",
        }
    }
}

/// Runs a client of others against our evaluator.
pub async fn pays_the_evaluator(buyer: Buyer, flow: &str) {
    pays_the_evaluator_behind(Bank::Own, buyer, flow).await;
}

/// The same while somebody else settles.
pub async fn pays_the_evaluator_behind(bank: Bank, buyer: Buyer, flow: &str) {
    let chain = AnvilChain::start(None).await;
    let mut server = Server::open(&chain, Seller::Evaluator, bank, flow).await;
    let account = funded(&chain).await;
    let url = server.recorded().await;
    let purchase = buyer.buy(&url, &account).await.unwrap_or_else(|error| panic!("{buyer:?}: {error}"));
    assert_eq!(purchase["status"], 200, "{purchase}");
    let evaluation: Value = serde_json::from_str(purchase["body"].as_str().unwrap()).unwrap();
    assert_eq!(evaluation["score"], 1.0, "{purchase}");
    let payment = &purchase["payment"];
    assert_eq!(payment["success"], true, "{purchase}");
    let payer: Address = payment["payer"].as_str().unwrap().parse().unwrap();
    assert_eq!(payer, account.address());
    server.was_paid_once(&chain, &account, payment).await;

    let stats = server.stats().await;
    let counts = ["handled", "settled", "pending", "unknown", "failed"].map(|name| &stats[name]);
    assert_eq!(counts, [1, 1, 0, 0, 0], "{stats}");
    if let Bank::Own = bank {
        server.keep("client", buyer.name(), flow, "settled");
    }
}

/// Runs a client of others that cannot pay our evaluator: what it says, and nothing has moved.
pub async fn does_not_pay_the_evaluator(buyer: Buyer, flow: &str) -> Result<Value, String> {
    let chain = AnvilChain::start(None).await;
    let server = Server::open(&chain, Seller::Evaluator, Bank::Own, flow).await;
    let said = buyer.buy(&server.url, &funded(&chain).await).await;
    assert!(chain.token_transfers(server.pay_to).await.is_empty(), "{said:?}");
    assert_eq!(server.stats().await["handled"], 0, "{said:?}");
    said
}

/// Runs our student against a server whose payments somebody settles.
pub async fn the_student_pays(seller: Seller, bank: Bank, flow: &str) {
    let chain = AnvilChain::start(None).await;
    let mut server = Server::open(&chain, seller, bank, flow).await;
    let account = funded(&chain).await;

    let demand = server.post().send().await.unwrap();
    let speaks_v2 = demand.headers().contains_key("payment-required");
    assert_eq!((demand.status().as_u16(), speaks_v2), (402, seller.name().1 == 2), "what is spoken here");
    let url = server.recorded().await;
    let mut student = example("student");
    student.args(["--url", &url, "--rpc-url", &chain.rpc_url()]);
    student.env("STUDENT_PRIVATE_KEY", account.to_bytes().to_string());
    let output = timeout(PATIENCE, student.output()).await.expect("the student ends").unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{lines}{}", String::from_utf8_lossy(&output.stderr));
    let purchase: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    assert_eq!(purchase["outcome"], "settled", "{purchase}");
    server.was_paid_once(&chain, &account, &purchase).await;
    assert_eq!(server.stats().await["handled"], 1);
    match (seller, bank) {
        (Seller::Evaluator, _) => server.keep("facilitator", (bank.name(), 2), flow, "settled"),
        (_, Bank::Ours) => server.keep("facilitated", seller.name(), flow, "settled"),
        _ => server.keep("server", seller.name(), flow, "settled"),
    }
}

/// Lets our student pay a server from an empty account: it is told why not, in these words among others, and nothing has happened.
pub async fn an_empty_account_is_refused(seller: Seller, bank: Bank, why: &str) {
    let chain = AnvilChain::start(None).await;
    let mut server = Server::open(&chain, seller, bank, "authorization").await;
    let mut student = example("student");
    student.args(["--url", &server.recorded().await]).env("STUDENT_PRIVATE_KEY", BUYER.to_string());
    let output = timeout(PATIENCE, student.output()).await.expect("the student ends").unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let purchase: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    assert_eq!((&purchase["status"], &purchase["outcome"]), (&json!(402), &json!("failed")), "{purchase}");
    assert!(purchase["error"].as_str().unwrap().contains(why), "{purchase}");
    assert_eq!(server.stats().await["handled"], 0);
    assert!(chain.token_transfers(server.pay_to).await.is_empty());
    match seller {
        Seller::Evaluator => server.keep("facilitator", (bank.name(), 2), "authorization", "refused"),
        _ => server.keep("facilitated", seller.name(), "authorization", "refused"),
    }
}

/// The buyer, with a hundred times the price.
pub async fn funded(chain: &AnvilChain) -> PrivateKeySigner {
    let account = PrivateKeySigner::from_bytes(&BUYER).unwrap();
    chain.mint(account.address(), 100 * PRICE).await;
    account
}

/// A process that sells `POST /evaluate`, killed when dropped.
pub struct Server {
    pub url: String,
    pub pay_to: Address,
    client: reqwest::Client,
    _process: Other,
    /// Who settles for it, if that is another process.
    _facilitator: Option<Other>,
    /// What was said to the facilitator, and to the server.
    recorders: Vec<Recorder>,
}

/// A process that serves, killed when dropped.
struct Other {
    url: String,
    _process: Child,
    // Closing the pipe would make the program's next line fail.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Other {
    /// Starts it and reads where it is.
    async fn start(mut program: Command) -> Self {
        let mut process = program.spawn().unwrap_or_else(|error| panic!("{program:?}: {error}"));
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, output.next_line()).await.expect("it says that it is ready").unwrap();
        let ready: Value = serde_json::from_str(&line.expect("it says that it is ready")).unwrap();
        let url = format!("http://{}", ready["listening"].as_str().unwrap());
        Self { url, _process: process, _output: output }
    }

    async fn facilitator(chain: &AnvilChain, bank: Bank) -> Option<Self> {
        let mut program = match bank {
            Bank::Own => return None,
            Bank::Official => script(["node", "facilitator.mjs"]),
            Bank::Python => script([PYTHON, "facilitator.py"]),
            Bank::X402Rs => {
                // Base has these contracts and x402-rs does not start without them, but no payment by a key calls them.
                for contract in X402_RS_NEEDS {
                    chain.set_code(contract, bytes!("00")).await;
                }
                script([RUST, "x402-facilitator"])
            }
            Bank::Ours => {
                let mut program = example("facilitator");
                program.args(["--listen", "127.0.0.1:0", "--network", "base-sepolia", "--rpc-url", &chain.rpc_url()]);
                program.env("SETTLEMENT_PRIVATE_KEY", SETTLER);
                program
            }
        };
        program.env("PRIVATE_KEY", SETTLER).env("RPC_URL", chain.rpc_url());
        Some(Self::start(program).await)
    }
}

impl Server {
    pub async fn open(chain: &AnvilChain, seller: Seller, bank: Bank, flow: &str) -> Self {
        let facilitator = Other::facilitator(chain, bank).await;
        let mut recorders = Vec::new();
        if let Some(facilitator) = &facilitator {
            recorders.extend(Recorder::before(&facilitator.url).await);
        }
        let facilitator_url = recorders.first().map(|recorder| recorder.url.clone());
        let facilitator_url = facilitator_url.or_else(|| Some(facilitator.as_ref()?.url.clone()));
        let mut program = match seller {
            Seller::Evaluator => evaluator(chain, facilitator_url.as_deref(), flow),
            Seller::Express => script(["node", "express_server.mjs"]),
            Seller::Hono => script(["node", "hono_server.mjs"]),
            Seller::ExpressV1 => script(["node", "express_v1_server.mjs"]),
            Seller::FastApi => script([PYTHON, "fastapi_server.py"]),
            Seller::R402 => script([RUST, "r402-server"]),
            Seller::X402Axum(1) => script([RUST, "x402-axum-v1"]),
            Seller::X402Axum(_) => script([RUST, "x402-axum-v2"]),
        };
        program.env("PAY_TO", PAYEE.to_string()).env("FLOW", flow);
        match facilitator_url {
            Some(url) => program.env("FACILITATOR_URL", url),
            None => program.env("PRIVATE_KEY", SETTLER).env("RPC_URL", chain.rpc_url()),
        };
        let process = Other::start(program).await;
        Self {
            url: format!("{}/evaluate", process.url),
            pay_to: PAYEE,
            client: reqwest::Client::new(),
            _process: process,
            _facilitator: facilitator,
            recorders,
        }
    }

    /// The request that everybody pays for.
    pub fn post(&self) -> reqwest::RequestBuilder {
        self.client.post(&self.url).header("content-type", "application/json").body(TASK)
    }

    pub async fn stats(&self) -> Value {
        let stats = reqwest::get(self.url.replace("/evaluate", "/stats")).await.unwrap();
        serde_json::from_slice(&stats.bytes().await.unwrap()).unwrap()
    }

    /// One transfer on the chain: of the price, from `buyer`, in the transaction that `receipt` names.
    async fn was_paid_once(&self, chain: &AnvilChain, buyer: &PrivateKeySigner, receipt: &Value) {
        let transaction: B256 = receipt["transaction"].as_str().unwrap().parse().unwrap();
        let transfer = Transfer { transaction, from: buyer.address(), units: PRICE };
        assert_eq!(chain.token_transfers(self.pay_to).await, [transfer]);
    }

    /// Where it is reached while what is said is recorded; where it is anyway if nothing is.
    async fn recorded(&mut self) -> String {
        let Some(recorder) = Recorder::before(self.url.trim_end_matches("/evaluate")).await else {
            return self.url.clone();
        };
        let url = format!("{}/evaluate", recorder.url);
        self.recorders.push(recorder);
        url
    }

    /// Writes down what was recorded.
    fn keep(&self, role: &'static str, (peer, x402_version): (&'static str, u8), flow: &str, outcome: &'static str) {
        // What two others say to each other is not ours.
        let skipped = if role == "server" { self.recorders.len().saturating_sub(1) } else { 0 };
        if !self.recorders.is_empty() {
            Cell { role, peer, x402_version, flow, outcome }.write(&self.recorders[skipped..]);
        }
    }
}

fn evaluator(chain: &AnvilChain, facilitator_url: Option<&str>, flow: &str) -> Command {
    let mut program = example("evaluator");
    program.args(["--listen", "127.0.0.1:0", "--price", "$0.001", "--network", "base-sepolia", "--flow", flow]);
    program.args(["--rpc-url", &chain.rpc_url(), "--public-url", "http://evaluator.example"]);
    program.args(["--pay-to", &PAYEE.to_string(), "--handler-delay-ms", "50"]);
    match facilitator_url {
        Some(url) => program.args(["--facilitator-url", url]),
        None => program.env("SETTLEMENT_PRIVATE_KEY", SETTLER),
    };
    program
}

const PYTHON: &str = ".venv/bin/python";
const RUST: &str = "rust/target/debug/tower-x402-rust-peers";

/// A program of this directory: what runs it, and what.
pub fn script([interpreter, file]: [&str; 2]) -> Command {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/peers");
    if interpreter == RUST {
        compile_the_rust_peers(&directory.join("rust"));
    }
    // A path is relative to that directory, a bare name is looked up.
    let interpreter = if interpreter.contains('/') { directory.join(interpreter) } else { interpreter.into() };
    let mut command = Command::new(interpreter);
    command.arg(file).current_dir(directory).stdin(Stdio::null()).stdout(Stdio::piped());
    command.kill_on_drop(true);
    command
}

fn compile_the_rust_peers(directory: &PathBuf) {
    static COMPILED: OnceLock<()> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let mut cargo = std::process::Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked"]).current_dir(directory).env_remove("CARGO_TARGET_DIR");
        assert!(cargo.status().unwrap().success(), "the Rust peers compile");
    });
}
