//! What no message has, and what the doctor says if nothing is wrong.

use serde_json::json;

use crate::stage::{PRICE, Stage, facts, run, x402};

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
        "permits",
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
