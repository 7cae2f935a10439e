//! Payments, and the checks after them.

use std::time::Duration;

use alloy_primitives::{Address, B256};
use alloy_signer_local::PrivateKeySigner;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use super::{
    programs::{BUYER, Bank, Buyer, PAYEE, Seller},
    recorder::{Cell, Recorder},
};
use support::{
    anvil::AnvilChain,
    chain::{Chain, Transfer},
    programs::example,
};

/// The timeout of everything that a program does here, without compiling.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The price of an evaluation, in atomic units.
pub const PRICE: u64 = 1_000;
pub const TASK: &str = r#"{"task": {"id": "t1", "skill": "arithmetic", "prompt": "What is 17 * 23 + 4?"},
    "output": "17 * 23 = 391, and 4 more is 395. Answer: 395"}"#;

/// Runs a client of another project against our evaluator.
pub async fn pays_the_evaluator(buyer: Buyer, flow: &str) {
    pays_the_evaluator_behind(Bank::Own, buyer, flow).await;
}

/// Runs a client against our evaluator, which settles through this facilitator.
pub async fn pays_the_evaluator_behind(bank: Bank, buyer: Buyer, flow: &str) {
    let chain = AnvilChain::start(None).await;
    let mut server = Server::open(&chain, Seller::Evaluator, bank, flow).await;
    let url = server.recorded().await;
    buys(&chain, &server, &url, buyer).await;
    if let Bank::Own = bank {
        server.keep("client", buyer.name(), flow, "settled");
    }
}

/// Runs a client against our evaluator without a configured URL.
pub async fn pays_an_evaluator_without_a_url(buyer: Buyer, flow: &str) {
    let chain = AnvilChain::start(None).await;
    let server = Server::open(&chain, Seller::EvaluatorWithoutUrl, Bank::Own, flow).await;
    buys(&chain, &server, &server.url, buyer).await;
}

/// Checks that one evaluation was paid once.
async fn buys(chain: &AnvilChain, server: &Server, url: &str, buyer: Buyer) {
    let account = funded(chain).await;
    let purchase = buyer.buy(url, &account).await.unwrap_or_else(|error| panic!("{buyer:?}: {error}"));
    assert_eq!(purchase["status"], 200, "{purchase}");
    let evaluation: Value = serde_json::from_str(purchase["body"].as_str().unwrap()).unwrap();
    assert_eq!(evaluation["score"], 1.0, "{purchase}");
    let payment = &purchase["payment"];
    assert_eq!(payment["success"], true, "{purchase}");
    let payer: Address = payment["payer"].as_str().unwrap().parse().unwrap();
    assert_eq!(payer, account.address());
    server.was_paid_once(chain, &account, payment).await;

    let stats = server.stats().await;
    let counts = ["handled", "settled", "pending", "unknown", "failed"].map(|name| &stats[name]);
    assert_eq!(counts, [1, 1, 0, 0, 0], "{stats}");
}

/// Runs a client that cannot pay our evaluator. Returns its output, after checking that no money moved.
pub async fn does_not_pay_the_evaluator(buyer: Buyer, flow: &str) -> Result<Value, String> {
    let chain = AnvilChain::start(None).await;
    let server = Server::open(&chain, Seller::Evaluator, Bank::Own, flow).await;
    let said = buyer.buy(&server.url, &funded(&chain).await).await;
    assert!(chain.token_transfers(server.pay_to).await.is_empty(), "{said:?}");
    assert_eq!(server.stats().await["handled"], 0, "{said:?}");
    said
}

/// Runs our student against a server that settles through this facilitator.
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

/// Lets our student pay a server from an empty account. Checks that the answer contains this reason, and that nothing was done.
pub async fn an_empty_account_is_refused(seller: Seller, bank: Bank, why: &str) {
    let chain = AnvilChain::start(None).await;
    let mut server = Server::open(&chain, seller, bank, "authorization").await;
    let mut student = example("student");
    student.args(["--url", &server.recorded().await]).env("STUDENT_PRIVATE_KEY", BUYER.to_string());
    let output = timeout(PATIENCE, student.output()).await.expect("the student ends").unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let purchase: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    // r402's server gives a text instead of a code, as other servers do in every 402, so the student does not count it as a failure.
    let outcome = if matches!(seller, Seller::R402) { "unknown" } else { "failed" };
    assert_eq!((&purchase["status"], &purchase["outcome"]), (&json!(402), &json!(outcome)), "{purchase}");
    assert!(purchase["error"].as_str().unwrap().contains(why), "{purchase}");
    assert_eq!(server.stats().await["handled"], 0);
    assert!(chain.token_transfers(server.pay_to).await.is_empty());
    match seller {
        Seller::Evaluator => server.keep("facilitator", (bank.name(), 2), "authorization", "refused"),
        _ => server.keep("facilitated", seller.name(), "authorization", "refused"),
    }
}

/// Gives the buyer a hundred times the price.
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
    /// Its facilitator, if that is another process.
    _facilitator: Option<Other>,
    /// The recording proxies before the facilitator and before the server.
    recorders: Vec<Recorder>,
}

/// A process that serves, killed when dropped.
pub struct Other {
    pub url: String,
    _process: Child,
    // Closing the pipe would make the program's next line fail.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Other {
    /// Starts the process and reads its address.
    pub async fn start(mut program: Command) -> Self {
        let mut process = program.spawn().unwrap_or_else(|error| panic!("{program:?}: {error}"));
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, output.next_line()).await.expect("it says that it is ready").unwrap();
        let ready: Value = serde_json::from_str(&line.expect("it says that it is ready")).unwrap();
        let url = format!("http://{}", ready["listening"].as_str().unwrap());
        Self { url, _process: process, _output: output }
    }
}

impl Server {
    pub async fn open(chain: &AnvilChain, seller: Seller, bank: Bank, flow: &str) -> Self {
        let facilitator = match bank.program(chain).await {
            Some(program) => Some(Other::start(program).await),
            None => None,
        };
        let mut recorders = Vec::new();
        if let Some(facilitator) = &facilitator {
            recorders.extend(Recorder::before(&facilitator.url).await);
        }
        let facilitator_url = recorders.first().map(|recorder| recorder.url.clone());
        let facilitator_url = facilitator_url.or_else(|| Some(facilitator.as_ref()?.url.clone()));
        let process = Other::start(seller.program(chain, facilitator_url.as_deref(), flow)).await;
        Self {
            url: format!("{}/evaluate", process.url),
            pay_to: PAYEE,
            client: reqwest::Client::new(),
            _process: process,
            _facilitator: facilitator,
            recorders,
        }
    }

    /// Returns the request that every client pays for.
    pub fn post(&self) -> reqwest::RequestBuilder {
        self.client.post(&self.url).header("content-type", "application/json").body(TASK)
    }

    pub async fn stats(&self) -> Value {
        let stats = reqwest::get(self.url.replace("/evaluate", "/stats")).await.unwrap();
        serde_json::from_slice(&stats.bytes().await.unwrap()).unwrap()
    }

    /// Checks that there is one transfer on the chain: of the price, from `buyer`, in the receipt's transaction.
    async fn was_paid_once(&self, chain: &AnvilChain, buyer: &PrivateKeySigner, receipt: &Value) {
        let transaction: B256 = receipt["transaction"].as_str().unwrap().parse().unwrap();
        let transfer = Transfer { transaction, from: buyer.address(), units: PRICE };
        assert_eq!(chain.token_transfers(self.pay_to).await, [transfer]);
    }

    /// Returns the URL of the recording proxy, or the server's own if nothing is recorded.
    async fn recorded(&mut self) -> String {
        let Some(recorder) = Recorder::before(self.url.trim_end_matches("/evaluate")).await else {
            return self.url.clone();
        };
        let url = format!("{}/evaluate", recorder.url);
        self.recorders.push(recorder);
        url
    }

    /// Writes the recorded exchanges.
    fn keep(&self, role: &'static str, (peer, x402_version): (&'static str, u8), flow: &str, outcome: &'static str) {
        // Exchanges between two other projects are not recorded.
        let skipped = if role == "server" { self.recorders.len().saturating_sub(1) } else { 0 };
        if !self.recorders.is_empty() {
            Cell { role, peer, x402_version, flow, outcome }.write(&self.recorders[skipped..]);
        }
    }
}
