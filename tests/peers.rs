//! Programs of others pay our evaluator, and our student pays a server of others: the official TypeScript and Python
//! packages and the legacy v1 client at pinned versions (tests/peers), on anvil with Circle's own USDC.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{path::PathBuf, process::Stdio, sync::OnceLock, time::Duration};

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::future::join_all;
use http::{HeaderValue, Method};
use serde_json::Value;
use support::{
    anvil::AnvilChain,
    authorization::random_address,
    chain::{Chain, Transfer},
    shop::Customer,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};
use tower_x402::client::Payer;

/// For everything a program does here; compiling is not part of it.
const PATIENCE: Duration = Duration::from_secs(60);
/// What an evaluation costs, in units.
const PRICE: u64 = 1_000;
const TASK: &str = r#"{"task": {"id": "t1", "skill": "arithmetic", "prompt": "What is 17 * 23 + 4?"},
    "output": "17 * 23 = 391, and 4 more is 395. Answer: 395"}"#;

/// The official client of x402 v2, over fetch.
const FETCH_V2: [&str; 2] = ["node", "fetch_v2.mjs"];
/// The legacy client, which knows v1 only.
const FETCH_V1: [&str; 2] = ["node", "fetch_v1.mjs"];
/// The official Python client, over httpx.
const HTTPX: [&str; 2] = [".venv/bin/python", "pay_httpx.py"];
/// The official Python client, over requests.
const REQUESTS: [&str; 2] = [".venv/bin/python", "pay_requests.py"];

#[tokio::test]
async fn the_official_fetch_client_pays_the_evaluator_on_anvil() {
    pays_the_evaluator(FETCH_V2, "authorization").await;
}

#[tokio::test]
async fn the_official_fetch_client_pays_the_evaluator_upfront_on_anvil() {
    pays_the_evaluator(FETCH_V2, "upfront").await;
}

#[tokio::test]
async fn the_python_client_pays_the_evaluator_over_httpx_on_anvil() {
    pays_the_evaluator(HTTPX, "authorization").await;
}

#[tokio::test]
async fn the_python_client_pays_the_evaluator_upfront_over_httpx_on_anvil() {
    pays_the_evaluator(HTTPX, "upfront").await;
}

#[tokio::test]
async fn the_python_client_pays_the_evaluator_over_requests_on_anvil() {
    pays_the_evaluator(REQUESTS, "authorization").await;
}

#[tokio::test]
async fn the_python_client_pays_the_evaluator_upfront_over_requests_on_anvil() {
    pays_the_evaluator(REQUESTS, "upfront").await;
}

#[tokio::test]
async fn the_legacy_fetch_client_pays_the_evaluator_on_anvil() {
    pays_the_evaluator(FETCH_V1, "authorization").await;
}

/// It knows no flows, and is offered this one because it is the only one.
#[tokio::test]
async fn the_legacy_fetch_client_pays_the_evaluator_upfront_on_anvil() {
    pays_the_evaluator(FETCH_V1, "upfront").await;
}

#[tokio::test]
async fn the_student_pays_the_official_express_server_on_anvil() {
    the_student_pays(Server::express, "authorization").await;
}

#[tokio::test]
async fn the_student_pays_the_official_express_server_upfront_on_anvil() {
    the_student_pays(Server::express, "upfront").await;
}

#[tokio::test]
async fn the_student_pays_the_legacy_express_server_in_v1_on_anvil() {
    the_student_pays(Server::express_v1, "authorization").await;
}

#[tokio::test]
async fn the_official_facilitator_settles_for_our_evaluator_on_anvil() {
    the_student_pays(Server::evaluator_behind_theirs, "authorization").await;
}

#[tokio::test]
async fn the_official_facilitator_settles_upfront_for_our_evaluator_on_anvil() {
    the_student_pays(Server::evaluator_behind_theirs, "upfront").await;
}

#[tokio::test]
async fn our_facilitator_settles_for_the_official_express_server_on_anvil() {
    the_student_pays(Server::express_behind_ours, "authorization").await;
}

#[tokio::test]
async fn our_facilitator_settles_upfront_for_the_official_express_server_on_anvil() {
    the_student_pays(Server::express_behind_ours, "upfront").await;
}

#[tokio::test]
async fn eight_copies_of_a_payment_run_one_handler_here_on_anvil() {
    let chain = AnvilChain::start(None).await;
    let server = Server::evaluator(&chain, "authorization").await;
    assert_eq!(server.handlers_run_by_copies(&chain, 8).await, 1);
    assert_eq!(chain.token_transfers(server.pay_to).await.len(), 1);
}

/// The comparison: the same eight requests, sent the same way.
#[tokio::test]
async fn eight_copies_of_a_payment_run_many_handlers_in_the_official_express_server_on_anvil() {
    let chain = AnvilChain::start(None).await;
    let server = Server::express(&chain, "authorization").await;
    let handlers = server.handlers_run_by_copies(&chain, 8).await;
    println!("8 copies of one payment: the official express server ran {handlers} handlers, ours runs 1");
    assert!(handlers > 1, "{handlers}");
    assert_eq!(chain.token_transfers(server.pay_to).await.len(), 1);
}

#[tokio::test]
async fn payment_identifiers_are_those_of_the_official_package_on_anvil() {
    let chain = AnvilChain::start(None).await;
    let server = Server::evaluator(&chain, "authorization").await;
    let headers = server.post().send().await.unwrap().headers().clone();
    let demand = decode(&headers["payment-required"]);
    let payer = Payer::builder(funded(&chain).await).asset(chain.asset()).build();
    let ours = payer.pay(&Method::POST, &server.url.parse().unwrap(), &headers, None).await.unwrap().expect("an offer");
    let ours = decode(ours.header());

    let mut program = script(["node", "payment_identifier.mjs"]);
    program.args([demand["extensions"].to_string(), ours["extensions"].to_string()]);
    let output = timeout(PATIENCE, program.output()).await.expect("the script ends").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let theirs: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(theirs["offered"], true, "{demand}");
    let id = &ours["extensions"]["payment-identifier"]["info"]["id"];
    assert!(id.is_string() && theirs["id"] == *id, "{ours} {theirs}");

    // Their id opens the answer, and nothing else does.
    let mut payload = Customer::with_funds(&chain, PRICE).await.sign(&demand, 0).payload();
    let unnamed = payload.to_string();
    payload["extensions"] = theirs["given"].clone();
    for (payload, status) in [(payload.to_string(), 200), (unnamed, 409), (payload.to_string(), 200)] {
        let answer = server.post().header("payment-signature", BASE64_STANDARD.encode(payload)).send().await.unwrap();
        assert_eq!(answer.status(), status);
    }
    assert_eq!(server.stats().await["handled"], 1);
}

async fn pays_the_evaluator(peer: [&str; 2], flow: &str) {
    let chain = AnvilChain::start(None).await;
    let server = Server::evaluator(&chain, flow).await;
    let buyer = funded(&chain).await;

    let mut program = script(peer);
    program.arg(&server.url).env("PRIVATE_KEY", buyer.to_bytes().to_string()).env("TASK", TASK);
    let output = timeout(PATIENCE, program.output()).await.expect("the peer ends").unwrap();
    assert!(output.status.success(), "{peer:?}: {}", String::from_utf8_lossy(&output.stderr));
    let purchase: Value = serde_json::from_slice(&output.stdout).unwrap();

    assert_eq!(purchase["status"], 200, "{purchase}");
    let evaluation: Value = serde_json::from_str(purchase["body"].as_str().unwrap()).unwrap();
    assert_eq!(evaluation["score"], 1.0, "{purchase}");
    let payment = &purchase["payment"];
    assert_eq!(payment["success"], true, "{purchase}");
    let payer: Address = payment["payer"].as_str().unwrap().parse().unwrap();
    assert_eq!(payer, buyer.address());
    server.was_paid_once(&chain, &buyer, payment).await;

    let stats = server.stats().await;
    let counts = ["handled", "settled", "pending", "unknown", "failed"].map(|name| &stats[name]);
    assert_eq!(counts, [1, 1, 0, 0, 0], "{stats}");
}

async fn the_student_pays(open: impl AsyncFn(&AnvilChain, &str) -> Server, flow: &str) {
    let chain = AnvilChain::start(None).await;
    let server = open(&chain, flow).await;
    let buyer = funded(&chain).await;

    let mut student = example("student");
    student.args(["--url", &server.url, "--rpc-url", &chain.rpc_url()]);
    student.env("STUDENT_PRIVATE_KEY", buyer.to_bytes().to_string());
    let output = timeout(PATIENCE, student.output()).await.expect("the student ends").unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{lines}{}", String::from_utf8_lossy(&output.stderr));
    let purchase: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    assert_eq!(purchase["outcome"], "settled", "{purchase}");
    server.was_paid_once(&chain, &buyer, &purchase).await;
    assert_eq!(server.stats().await["handled"], 1);
}

/// An account with a hundred times the price.
async fn funded(chain: &AnvilChain) -> PrivateKeySigner {
    Customer::with_funds(chain, 100 * PRICE).await.signer
}

/// A process that sells `POST /evaluate`, killed when dropped.
struct Server {
    url: String,
    pay_to: Address,
    client: reqwest::Client,
    _process: Other,
    /// Who settles for it, if that is another process.
    _facilitator: Option<Other>,
}

/// A process that serves, killed when dropped.
struct Other {
    _process: Child,
    // Closing the pipe would make the program's next line fail.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Other {
    /// Starts it and says where it is.
    async fn start(mut program: Command) -> (Self, String) {
        let mut process = program.spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, output.next_line()).await.expect("it says that it is ready").unwrap();
        let ready: Value = serde_json::from_str(&line.expect("it says that it is ready")).unwrap();
        let url = format!("http://{}", ready["listening"].as_str().unwrap());
        (Self { _process: process, _output: output }, url)
    }
}

impl Server {
    /// Our evaluator.
    async fn evaluator(chain: &AnvilChain, flow: &str) -> Self {
        let (settler, pay_to) = (settler(chain).await, random_address());
        let mut program = example("evaluator");
        program.args(["--listen", "127.0.0.1:0", "--price", "$0.001", "--network", "base-sepolia", "--flow", flow]);
        program.args(["--rpc-url", &chain.rpc_url(), "--public-url", "http://evaluator.example", "--pay-to"]);
        program.arg(pay_to.to_string()).args(["--handler-delay-ms", "50"]).env("SETTLEMENT_PRIVATE_KEY", settler);
        Self::start(program, pay_to).await
    }

    /// The official middleware for express, with the official facilitator.
    async fn express(chain: &AnvilChain, flow: &str) -> Self {
        let (settler, pay_to) = (settler(chain).await, random_address());
        let mut program = script(["node", "express_server.mjs"]);
        program.env("PRIVATE_KEY", settler).env("RPC_URL", chain.rpc_url());
        program.env("PAY_TO", pay_to.to_string()).env("FLOW", flow);
        Self::start(program, pay_to).await
    }

    /// Our evaluator, with the official facilitator in a process of its own.
    async fn evaluator_behind_theirs(chain: &AnvilChain, flow: &str) -> Self {
        let mut program = script(["node", "facilitator.mjs"]);
        program.env("PRIVATE_KEY", settler(chain).await).env("RPC_URL", chain.rpc_url());
        let (facilitator, url) = Other::start(program).await;
        let pay_to = random_address();
        let mut program = example("evaluator");
        program.args(["--listen", "127.0.0.1:0", "--network", "base-sepolia", "--flow", flow]);
        program.args(["--facilitator-url", &url, "--rpc-url", &chain.rpc_url(), "--pay-to", &pay_to.to_string()]);
        Self { _facilitator: Some(facilitator), ..Self::start(program, pay_to).await }
    }

    /// The official middleware for express, with our facilitator.
    async fn express_behind_ours(chain: &AnvilChain, flow: &str) -> Self {
        let mut program = example("facilitator");
        program.args(["--listen", "127.0.0.1:0", "--network", "base-sepolia", "--rpc-url", &chain.rpc_url()]);
        program.env("SETTLEMENT_PRIVATE_KEY", settler(chain).await);
        let (facilitator, url) = Other::start(program).await;
        let pay_to = random_address();
        let mut program = script(["node", "express_server.mjs"]);
        program.env("FACILITATOR_URL", url).env("PAY_TO", pay_to.to_string()).env("FLOW", flow);
        Self { _facilitator: Some(facilitator), ..Self::start(program, pay_to).await }
    }

    /// The legacy middleware for express, which speaks v1 only and knows no flows.
    async fn express_v1(chain: &AnvilChain, _: &str) -> Self {
        let (settler, pay_to) = (settler(chain).await, random_address());
        let mut program = script(["node", "express_v1_server.mjs"]);
        program.env("PRIVATE_KEY", settler).env("RPC_URL", chain.rpc_url()).env("PAY_TO", pay_to.to_string());
        let server = Self::start(program, pay_to).await;
        let demand = reqwest::Client::new().post(&server.url).send().await.unwrap();
        assert!(demand.status() == 402 && !demand.headers().contains_key("payment-required"), "v1 only");
        server
    }

    async fn start(program: Command, pay_to: Address) -> Self {
        let (process, url) = Other::start(program).await;
        let url = format!("{url}/evaluate");
        Self { url, pay_to, client: reqwest::Client::new(), _process: process, _facilitator: None }
    }

    /// The request that everybody pays for.
    fn post(&self) -> reqwest::RequestBuilder {
        self.client.post(&self.url).header("content-type", "application/json").body(TASK)
    }

    async fn stats(&self) -> Value {
        let stats = reqwest::get(self.url.replace("/evaluate", "/stats")).await.unwrap();
        serde_json::from_slice(&stats.bytes().await.unwrap()).unwrap()
    }

    /// One transfer on the chain: of the price, from `buyer`, in the transaction that `receipt` names.
    async fn was_paid_once(&self, chain: &AnvilChain, buyer: &PrivateKeySigner, receipt: &Value) {
        let transaction: B256 = receipt["transaction"].as_str().unwrap().parse().unwrap();
        let transfer = Transfer { transaction, from: buyer.address(), units: PRICE };
        assert_eq!(chain.token_transfers(self.pay_to).await, [transfer]);
    }

    /// How many handlers `copies` of one payment start that arrive at once. One of them at least is answered 200.
    async fn handlers_run_by_copies(&self, chain: &AnvilChain, copies: usize) -> u64 {
        let customer = Customer::with_funds(chain, 100 * PRICE).await;
        let demand = decode(&self.post().send().await.unwrap().headers()["payment-required"]);
        let payment = BASE64_STANDARD.encode(customer.sign(&demand, 0).payload().to_string());
        let answers = join_all((0..copies).map(|_| self.post().header("payment-signature", &payment).send())).await;
        let statuses: Vec<u16> = answers.into_iter().map(|answer| answer.unwrap().status().as_u16()).collect();
        assert!(statuses.contains(&200), "{statuses:?}");
        self.stats().await["handled"].as_u64().unwrap()
    }
}

/// The message in a header.
fn decode(header: &HeaderValue) -> Value {
    serde_json::from_slice(&BASE64_STANDARD.decode(header).expect("base64")).expect("JSON")
}

/// The key of an account with ether.
async fn settler(chain: &AnvilChain) -> String {
    let settler = PrivateKeySigner::random();
    chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
    settler.to_bytes().to_string()
}

/// A program of tests/peers.
fn script([interpreter, file]: [&str; 2]) -> Command {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/peers");
    // A path is relative to that directory, a bare name is looked up.
    let interpreter = if interpreter.contains('/') { directory.join(interpreter) } else { interpreter.into() };
    let mut command = Command::new(interpreter);
    command.arg(file).current_dir(directory).stdin(Stdio::null()).stdout(Stdio::piped());
    command.kill_on_drop(true);
    command
}

/// An example's program, compiled if need be.
fn example(name: &str) -> Command {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| {
        let mut cargo = std::process::Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--example", "evaluator", "--example", "student", "--example", "facilitator"]);
        cargo.args((!cfg!(debug_assertions)).then_some("--release"));
        assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success(), "the examples compile");
        let test = std::env::current_exe().unwrap();
        test.parent().unwrap().parent().unwrap().join("examples")
    });
    let mut command = Command::new(directory.join(name));
    command.env_remove("SETTLEMENT_PRIVATE_KEY").env_remove("STUDENT_PRIVATE_KEY");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    command
}
