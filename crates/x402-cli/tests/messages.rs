//! What is said if something is wrong, and what to do then. The table in README.md has the same.

use std::{net::TcpListener, process::Stdio};

use axum::{Json, Router, body::Bytes, routing::post};
use serde_json::{Value, json};

use crate::stage::{PRICE, Stage, facts, run, x402};

/// Runs a command that cannot begin, and checks what it says.
async fn says(command: &mut tokio::process::Command, expected: &[&str]) {
    let output = run(command.stdout(Stdio::null())).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    for text in expected {
        assert!(said.contains(text), "{text:?} in: {said}");
    }
}

#[tokio::test]
async fn each_mistake_is_named_with_what_to_do() {
    let stage = Stage::new().await;
    let charge = || stage.charge("127.0.0.1:0");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();

    says(&mut charge(), &["--price", "say what a request costs"]).await;
    says(x402().args(["charge", "--price", "$0.001"]), &["--upstream", "http://127.0.0.1:8000"]).await;
    says(charge().args(["--price", "$0"]), &["more than zero"]).await;
    says(stage.charge(&taken).args(["--price", "$0.001"]), &["cannot listen on", "another port with --listen"]).await;
    says(
        charge().args(["--price", "$0.001"]).env("SETTLEMENT_PRIVATE_KEY", "0xsecret"),
        &["SETTLEMENT_PRIVATE_KEY is not a private key"],
    )
    .await;
    says(
        charge().args(["--price", "$0.001"]).env_remove("SETTLEMENT_PRIVATE_KEY"),
        &["SETTLEMENT_PRIVATE_KEY", "set it to the key"],
    )
    .await;
    says(
        charge().args(["--price", "$0.001"]).env("X402_RPC_URL", "http://127.0.0.1:9/secret"),
        &["the node does not answer"],
    )
    .await;
    says(
        charge().args(["--price", "$0.001", "--network", "base"]),
        &["the node is on eip155:84532, not on eip155:8453"],
    )
    .await;
    let same = stage.devnet.text("settlement_private_key");
    says(charge().args(["--price", "$0.001"]).env("CHANNELS_PRIVATE_KEY", same), &["use another key for channels"])
        .await;
    let file = stage.path("bad.toml");
    std::fs::write(&file, "listen = \"127.0.0.1:0\"\nprise = \"$1\"\n").unwrap();
    says(charge().arg("--config").arg(&file), &["bad.toml, line 2, field prise"]).await;
    says(charge().args(["--config", "/nowhere.toml"]), &["cannot read /nowhere.toml", "Check the path"]).await;
    says(
        x402().args(["charge", "--upstream", "http://127.0.0.1:1", "--price", "$1", "--ledger", "sqlite:/tmp/x"]),
        &["--ledger", "outlives the chain"],
    )
    .await;
    let nowhere = ["--price", "$0.001", "--ledger", "sqlite:/nowhere/payments.sqlite"];
    says(
        x402().args(["books", "--ledger", nowhere[3], "list"]),
        &["cannot open the ledger", "its directory can be written to"],
    )
    .await;
    says(x402().args(["pay", "http://127.0.0.1:1"]), &["PAYER_PRIVATE_KEY", "set it to the key of the payer"]).await;
    says(
        x402().args(["proxy", "--to", "http://127.0.0.1:1", "--listen", "0.0.0.0:1"]),
        &["reachable from other machines"],
    )
    .await;
}

#[tokio::test]
async fn no_secret_is_in_a_message() {
    let stage = Stage::new().await;
    let secret = "http://127.0.0.1:9/v2/very-secret";
    let output = run(stage.charge("127.0.0.1:0").args(["--price", "$0.001", "--rpc-url", secret])).await;
    assert!(!String::from_utf8_lossy(&output.stderr).contains("very-secret"));
    let key = stage.devnet.text("payer_private_key");
    let output = run(x402().args(["pay", "http://127.0.0.1:9/?key=very-secret"]).env("PAYER_PRIVATE_KEY", key)).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("Nothing was paid") && !said.contains("very-secret"), "{said}");
    let output = run(x402().args(["pay", "http://127.0.0.1:9/"]).env("PAYER_PRIVATE_KEY", "very-secret")).await;
    assert!(!String::from_utf8_lossy(&output.stderr).contains("very-secret"));
}

#[tokio::test]
async fn the_doctor_finds_nothing_wrong_and_then_an_empty_tank() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let doctor = || {
        let mut command = x402();
        command
            .args(["doctor", "--public-url", &format!("{}/echo", charge.url())])
            .env("X402_RPC_URL", stage.devnet.text("rpc_url"))
            .env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"))
            .env("CHANNELS_PRIVATE_KEY", stage.devnet.text("channels_private_key"));
        command
    };
    let output = run(&mut doctor()).await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    for check in [
        "node",
        "clock",
        "receipts",
        "logs",
        "history",
        "token",
        "batch settler",
        "channel escrow",
        "settlement key",
        "public address",
    ] {
        assert!(said.lines().any(|line| line.starts_with("ok") && line.contains(check)), "{check}: {said}");
    }
    let empty = format!("0x{}", "46".repeat(32));
    let output = run(doctor().env("SETTLEMENT_PRIVATE_KEY", empty)).await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("has no ETH for gas") && said.contains("Send it a little ETH"), "{said}");
    charge.stop().await;
}

#[tokio::test]
async fn a_full_disk_is_named_and_what_was_paid_too() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let output = run(stage.pay(&format!("{}/echo", charge.url())).args(["-o", "/dev/full"])).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), &facts(&output)["outcome"]), (Some(1), &json!("settled")));
    assert!(said.contains("cannot be written") && said.contains("Make room on the disk"), "{said}");
    let output = run(stage.pay(&format!("{}/echo", charge.url())).args(["-o", "/nowhere/answer"])).await;
    assert_eq!(output.status.code(), Some(2), "before anything is paid");
    charge.stop().await;
    assert_eq!(stage.income().await, PRICE);
}

/// Answers as the devnet does, but for a fault.
async fn faulty_node(stage: &Stage, fault: fn(&str, &mut Value)) -> String {
    let (node, client) =
        (stage.devnet.text("rpc_url").to_owned(), reqwest::Client::builder().no_proxy().build().unwrap());
    let answer = async move |body: Bytes| {
        let asked: Value = serde_json::from_slice(&body).unwrap();
        let sent = client.post(&node).header("content-type", "application/json").body(body).send().await.unwrap();
        let mut answer: Value = serde_json::from_slice(&sent.bytes().await.unwrap()).unwrap();
        match (asked.as_array(), answer.as_array_mut()) {
            (Some(asked), Some(answers)) => {
                let pairs = asked.iter().zip(answers);
                pairs.for_each(|(asked, answer)| fault(asked["method"].as_str().unwrap(), answer));
            }
            _ => fault(asked["method"].as_str().unwrap(), &mut answer),
        }
        Json(answer)
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/", post(answer))).await });
    url
}

#[tokio::test]
async fn a_node_without_receipts_is_refused() {
    let stage = Stage::new().await;
    let node = faulty_node(&stage, |method, answer| {
        if method == "eth_getTransactionReceipt" {
            *answer = json!({ "jsonrpc": "2.0", "id": answer["id"], "error": { "code": -32601, "message": "not in your plan" } });
        }
    })
    .await;
    let mut charge = stage.charge("127.0.0.1:0");
    says(
        charge.args(["--price", "$0.001"]).env("X402_RPC_URL", &node),
        &["the node refuses eth_getTransactionReceipt", "use another node"],
    )
    .await;
    let output = run(x402().args(["doctor", "--rpc-url", &node])).await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("wrong    receipts") && said.contains("Use a node that gives receipts"), "{said}");
}

#[tokio::test]
async fn a_clock_that_is_off_by_an_hour_is_named() {
    let stage = Stage::new().await;
    let node = faulty_node(&stage, |method, answer| {
        if method == "eth_getBlockByNumber" {
            let time = u64::from_str_radix(&answer["result"]["timestamp"].as_str().unwrap()[2..], 16).unwrap();
            answer["result"]["timestamp"] = json!(format!("{:#x}", time + 3_600));
        }
    })
    .await;
    let output = run(x402().args(["doctor", "--rpc-url", &node])).await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("wrong    clock") && said.contains("Set the clock"), "{said}");
}
