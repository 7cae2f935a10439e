//! The faults of hostile-facilitator 0.2.2, in both directions.
//!
//! It stands in for a facilitator that settles and loses its answer, and counts for how many payments a purchase asked it: one is right.
//! `x402 charge` is its client, and `x402 pay` pays. And it presents payments again to a facilitator, which is `x402 facilitator`.

use alloy_signer_local::PrivateKeySigner;
use serde_json::{Value, json};
use support::programs::x402;
use tempfile::TempDir;
use tokio::time::timeout;

use super::{
    super::{
        programs::{PYTHON, script},
        stage::{PATIENCE, PRICE},
    },
    Serving, Stage, evaluator,
};

const HOSTILE: &str = ".venv/bin/hostile-facilitator";
const PAYEE: &str = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";

#[tokio::test]
async fn a_facilitator_that_loses_its_answers_is_asked_to_settle_one_payment() {
    let directory = TempDir::new().unwrap();
    let (_evaluator, upstream) = evaluator(&directory).await;
    let result = directory.path().join("result.json");
    let mut battery = script([HOSTILE, "test"]);
    battery.args(["--client-timeout", "1", "--json"]).arg(&result).args(["--", "bash", "one_purchase.sh"]);
    battery.env("X402", x402().as_std().get_program()).env("UPSTREAM", &upstream).env("PAY_TO", PAYEE);
    battery.env("PAYER_PRIVATE_KEY", PrivateKeySigner::random().to_bytes().to_string());
    let output = timeout(PATIENCE * 3, battery.output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    let result: Value = serde_json::from_slice(&std::fs::read(&result).unwrap()).unwrap();
    let modes = result["results"].as_array().unwrap();
    assert!(modes.len() >= 5, "{result}");
    for mode in modes {
        assert_eq!((&mode["distinct"], &mode["unidentified"]), (&json!(1), &json!(0)), "{mode}");
    }
}

#[tokio::test]
async fn a_payment_that_is_presented_again_to_the_facilitator_settles_once() {
    let stage = Stage::new(&[]).await;
    let mut facilitator = x402();
    facilitator.args(["facilitator", "--listen", "127.0.0.1:0", "--rpc-url", stage.devnet.text("rpc_url")]);
    facilitator.env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"));
    let facilitator = Serving::start(&mut facilitator).await;
    let requirements = json!({
        "scheme": "exact",
        "network": stage.devnet.text("network"),
        "asset": stage.devnet.text("asset"),
        "amount": PRICE.to_string(),
        "payTo": stage.devnet.text("payee"),
        "maxTimeoutSeconds": 120,
        "extra": { "name": stage.devnet.text("asset_name"), "version": stage.devnet.text("asset_version") },
    });
    let mut caller = script([PYTHON, "hostile_caller.py"]);
    caller.args([facilitator.url(), requirements.to_string()]);
    caller.env("PRIVATE_KEY", stage.devnet.text("payer_private_key"));
    let output = timeout(PATIENCE, caller.output()).await.unwrap().unwrap();
    let probes: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(probes.len(), 3, "{probes:?}");
    for probe in &probes {
        // Where it did not read the first answer, the package says that only the chain can tell.
        let verdicts = if probe["probe"] == "abandoned_reply" { ["UNDETERMINED", "SAFE"] } else { ["SAFE", "SAFE"] };
        assert!(verdicts.contains(&probe["verdict"].as_str().unwrap()), "{probe}");
        assert_eq!(probe["transactions"].as_array().unwrap().len(), 1, "{probe}");
    }
    // The chain tells.
    assert_eq!(stage.balance_of(stage.devnet.text("payee")).await, 3 * PRICE);
    facilitator.stop().await;
}
