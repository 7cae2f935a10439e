//! The command `x402` charges for a service in Python, and the clients of other projects pay it.

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
    programs::{Buyer, script},
    stage::{PATIENCE, PRICE, TASK},
};

/// The program of the package x402-conformance.
const CONFORMANCE: &str = ".venv/bin/x402conf";

/// A process of the command that serves, and what it printed when it was ready.
async fn serving(command: &mut Command) -> (Child, Value) {
    let mut child = command.arg("--json").spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().expect("it says that it is ready");
    (child, serde_json::from_str(&line).unwrap())
}

/// Returns the program in Python of a guide, as it stands there.
fn program(guide: &str, directory: &TempDir) -> PathBuf {
    let text = std::fs::read_to_string(repository().join("crates/x402-cli/docs/guide").join(guide)).unwrap();
    let program = text.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let path = directory.path().join(guide).with_extension("py");
    std::fs::write(&path, program).unwrap();
    path
}

/// The evaluator of the guide.
async fn evaluator(directory: &TempDir) -> (Child, String) {
    let path = program("charge-anything.md", directory);
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut python = Command::new("python3");
    let child = python.arg(path).arg(address.port().to_string()).kill_on_drop(true).spawn().unwrap();
    eventually("the evaluator listens", async || TcpStream::connect(address).await.is_ok()).await;
    (child, format!("http://{address}"))
}

#[tokio::test]
async fn clients_of_others_pay_a_service_in_python_and_the_books_balance() {
    let directory = TempDir::new().unwrap();
    let (_devnet, chain) = serving(x402().args(["devnet", "--listen", "127.0.0.1:0"])).await;
    let text = |name: &str| chain[name].as_str().unwrap();
    let (_evaluator, upstream) = evaluator(&directory).await;
    let ledger = format!("sqlite:{}", directory.path().join("payments.sqlite").display());
    let mut charge = x402();
    charge
        .args(["charge", "--upstream", &upstream, "--price", "$0.001", "--listen", "127.0.0.1:0", "--ledger", &ledger])
        .args(["--pay-to", text("payee")])
        .env("X402_RPC_URL", text("rpc_url"))
        .env("SETTLEMENT_PRIVATE_KEY", text("settlement_private_key"));
    let (mut charge, ready) = serving(&mut charge).await;
    let url = format!("http://{}/evaluate", ready["listening"].as_str().unwrap());
    let account: PrivateKeySigner = text("payer_private_key").parse().unwrap();
    let mut bought = 0;
    for buyer in [Buyer::Fetch, Buyer::FetchV1, Buyer::Httpx, Buyer::Requests] {
        let purchase = buyer.buy(&url, &account).await.unwrap_or_else(|error| panic!("{buyer:?}: {error}"));
        assert_eq!(
            (&purchase["status"], &purchase["body"]),
            (&json!(200), &json!(r#"{"score": 1}"#)),
            "{buyer:?}: {purchase}"
        );
        assert_eq!(purchase["payment"]["success"], true, "{purchase}");
        bought += 1;
    }
    let mut pay = x402();
    pay.args(["pay", &url, "-d", TASK]).env("PAYER_PRIVATE_KEY", text("payer_private_key"));
    let paid = timeout(PATIENCE, pay.output()).await.unwrap().unwrap();
    assert_eq!(String::from_utf8_lossy(&paid.stdout), r#"{"score": 1}"#);
    bought += 1;
    let mut proxy = x402();
    let to = url.trim_end_matches("evaluate");
    proxy.args(["proxy", "--to", to, "--listen", "127.0.0.1:0", "--budget", "$0.003"]);
    let (_proxy, ready) = serving(proxy.env("PAYER_PRIVATE_KEY", text("payer_private_key"))).await;
    let mut asking = Command::new("python3");
    asking.arg(program("pay-from-anything.md", &directory)).arg(ready["url"].as_str().unwrap());
    let asked = timeout(PATIENCE, asking.output()).await.unwrap().unwrap();
    assert_eq!(String::from_utf8_lossy(&asked.stdout), "{\"score\": 1}\npaid 1000 left $0.002\n");
    bought += 1;

    let id = charge.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().await.unwrap().success());
    assert!(timeout(PATIENCE, charge.wait()).await.unwrap().unwrap().success());
    let report =
        timeout(PATIENCE, x402().args(["books", "--ledger", &ledger, "report"]).output()).await.unwrap().unwrap();
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let books = &report["payments"][0];
    assert_eq!(books["paid"], json!({ "payments": bought, "units": (bought * PRICE).to_string() }), "{report}");
    assert_eq!(books["owed"]["payments"], 0, "{report}");
}

/// The live rules of the package: an unpaid answer of a seller, and what a facilitator says that it supports.
#[tokio::test]
async fn the_rules_of_x402_conformance_hold_for_seller_and_facilitator() {
    let mut charge = x402();
    charge.args(["charge", "--upstream", "http://127.0.0.1:9", "--price", "$0.001", "--listen", "127.0.0.1:0"]);
    let (_charge, seller) = serving(&mut charge).await;
    let (_facilitator, facilitator) = serving(x402().args(["facilitator", "--listen", "127.0.0.1:0"])).await;
    for (mode, ready, path) in [("resource", &seller, "/evaluate"), ("live", &facilitator, "")] {
        let url = format!("http://{}{path}", ready["listening"].as_str().unwrap());
        let mut check = script([CONFORMANCE, mode]);
        let checked = timeout(PATIENCE, check.args([&url, "--fail-on-error"]).output()).await.unwrap().unwrap();
        let said = String::from_utf8_lossy(&checked.stdout).into_owned();
        assert!(checked.status.success() && said.contains("\"pass\": true"), "{mode}: {said}");
    }
}
