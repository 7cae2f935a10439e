//! The command `x402` charges for a service in Python, and the clients of other projects pay it.
//!
//! ```text
//! command.rs    a devnet, the evaluator of the guide, `x402 charge` before it; their clients pay, and the books balance
//! killed.rs     the same while `x402 charge` is killed at random
//! rules.rs      the rules of x402-conformance, for seller and facilitator
//! hostile.rs    hostile-facilitator: a facilitator that loses its answers, and a caller that asks twice
//! ```

mod hostile;
mod killed;
mod rules;

use std::path::PathBuf;

use alloy_signer_local::PrivateKeySigner;
use serde_json::{Value, json};
use support::{eventually::eventually, programs::x402, repository};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    time::timeout,
};

use super::{
    programs::{Buyer, PYTHON, script},
    stage::{PATIENCE, PRICE, TASK},
};

/// A process of the command that serves, and what it printed when it was ready.
struct Serving {
    child: Child,
    ready: Value,
}

impl Serving {
    async fn start(command: &mut Command) -> Self {
        let mut child = command.arg("--json").spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().expect("it says that it is ready");
        Self { child, ready: serde_json::from_str(&line).unwrap() }
    }

    fn text(&self, name: &str) -> &str {
        self.ready[name].as_str().unwrap_or_else(|| panic!("{name} in {}", self.ready))
    }

    fn url(&self) -> String {
        format!("http://{}", self.text("listening"))
    }

    /// Kills it without a warning.
    async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    /// Has it stop, and waits until it has.
    async fn stop(mut self) {
        let id = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().await.unwrap().success());
        assert!(timeout(PATIENCE, self.child.wait()).await.unwrap().unwrap().success());
    }
}

/// A devnet, the evaluator of the guide, and a ledger for the command that charges for it.
struct Stage {
    devnet: Serving,
    upstream: String,
    directory: TempDir,
    _evaluator: Child,
}

impl Stage {
    /// `arguments` are those of `x402 devnet`.
    async fn new(arguments: &[&str]) -> Self {
        let directory = TempDir::new().unwrap();
        let devnet = Serving::start(x402().args(["devnet", "--listen", "127.0.0.1:0"]).args(arguments)).await;
        let (evaluator, upstream) = evaluator(&directory).await;
        Self { devnet, upstream, directory, _evaluator: evaluator }
    }

    fn ledger(&self) -> String {
        format!("sqlite:{}", self.directory.path().join("payments.sqlite").display())
    }

    /// Returns the command that charges for the evaluator.
    fn charge(&self, listen: &str) -> Command {
        self.charge_with(&self.ledger(), listen)
    }

    fn charge_with(&self, ledger: &str, listen: &str) -> Command {
        let mut charge = x402();
        charge
            .args(["charge", "--upstream", &self.upstream, "--price", "$0.001", "--listen", listen])
            .args(["--ledger", ledger, "--pay-to", self.devnet.text("payee")])
            .env("X402_RPC_URL", self.devnet.text("rpc_url"))
            .env("SETTLEMENT_PRIVATE_KEY", self.devnet.text("settlement_private_key"));
        charge
    }

    /// Checks that so many payments are in the books and on the chain, and nothing else, once nobody has the ledger open.
    async fn has_sold(&self, payments: u64) {
        self.has_sold_by(&self.ledger(), payments).await;
    }

    async fn has_sold_by(&self, ledger: &str, payments: u64) {
        let mut books = x402();
        let report = timeout(PATIENCE, books.args(["books", "--ledger", ledger, "report"]).output()).await;
        let report: Value = serde_json::from_slice(&report.unwrap().unwrap().stdout).unwrap();
        let units = payments * PRICE;
        let sold = &report["payments"][0];
        assert_eq!(sold["paid"], json!({ "payments": payments, "units": units.to_string() }), "{report}");
        assert_eq!(sold["owed"]["payments"], 0, "{report}");
        assert_eq!(self.balance_of(self.devnet.text("payee")).await, units);
    }

    /// Returns what an account has, in atomic units.
    async fn balance_of(&self, account: &str) -> u64 {
        let account = account.trim_start_matches("0x").to_ascii_lowercase();
        let call = json!({ "to": self.devnet.text("asset"), "data": format!("0x70a08231{account:0>64}") });
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [call, "latest"] });
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let post = client.post(self.devnet.text("rpc_url")).header("content-type", "application/json");
        let answer = post.body(request.to_string()).send().await.unwrap().bytes().await.unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        u64::from_str_radix(&answer["result"].as_str().unwrap()[2..], 16).unwrap()
    }
}

/// Returns the program in Python of a guide, as it stands there.
fn program(guide: &str, directory: &TempDir) -> PathBuf {
    let text = std::fs::read_to_string(repository().join("crates/x402-cli/docs/guide").join(guide)).unwrap();
    let program = text.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let path = directory.path().join(guide).with_extension("py");
    std::fs::write(&path, program).unwrap();
    path
}

/// The evaluator of the guide, in Flask, and its URL.
async fn evaluator(directory: &TempDir) -> (Child, String) {
    let path = program("charge-anything.md", directory);
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut flask = script([PYTHON, path.to_str().unwrap()]);
    let child = flask.arg(address.port().to_string()).stderr(std::process::Stdio::null()).spawn().unwrap();
    eventually("the evaluator listens", async || TcpStream::connect(address).await.is_ok()).await;
    (child, format!("http://{address}"))
}

#[tokio::test]
async fn clients_of_others_pay_a_service_in_flask_and_the_books_balance() {
    let stage = Stage::new(&[]).await;
    let charge = Serving::start(&mut stage.charge("127.0.0.1:0")).await;
    let url = format!("{}/evaluate", charge.url());
    let key = stage.devnet.text("payer_private_key");
    let account: PrivateKeySigner = key.parse().unwrap();
    let verdict = |body: &str| serde_json::from_str::<Value>(body).unwrap_or_else(|_| panic!("{body}"));
    let mut bought = 0;
    for buyer in [Buyer::Fetch, Buyer::FetchV1, Buyer::Httpx, Buyer::Requests] {
        let purchase = buyer.buy(&url, &account).await.unwrap_or_else(|error| panic!("{buyer:?}: {error}"));
        assert_eq!(purchase["status"], 200, "{buyer:?}: {purchase}");
        assert_eq!(verdict(purchase["body"].as_str().unwrap()), json!({ "score": 1 }), "{buyer:?}");
        assert_eq!(purchase["payment"]["success"], true, "{purchase}");
        bought += 1;
    }
    let mut pay = x402();
    pay.args(["pay", &url, "-d", TASK]).env("PAYER_PRIVATE_KEY", key);
    let paid = timeout(PATIENCE, pay.output()).await.unwrap().unwrap();
    assert_eq!(verdict(&String::from_utf8_lossy(&paid.stdout)), json!({ "score": 1 }));
    bought += 1;
    let mut proxy = x402();
    proxy.args(["proxy", "--to", &charge.url(), "--listen", "127.0.0.1:0", "--budget", "$0.003"]);
    let proxy = Serving::start(proxy.env("PAYER_PRIVATE_KEY", key)).await;
    let mut asking = Command::new("python3");
    asking.arg(program("pay-from-anything.md", &stage.directory)).env("SERVICE", proxy.text("url"));
    let asked = timeout(PATIENCE, asking.output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&asked.stdout).into_owned();
    assert!(said.starts_with("{\"score\":1}") && said.ends_with("paid 1000 left $0.002\n"), "{said}");
    bought += 1;

    charge.stop().await;
    stage.has_sold(bought).await;
    assert_eq!(stage.balance_of(stage.devnet.text("payer")).await, 1_000_000_000 - bought * PRICE);
}
