//! The rules of x402-conformance, by the package's own programs. `crates/x402-cli/tests/rules.rs` has the rules that they leave out, and
//! those that they show with doubles.

use support::programs::x402;
use tokio::time::timeout;

use super::{
    super::{programs::script, stage::PATIENCE},
    Serving,
};

/// The program of the package x402-conformance.
const CONFORMANCE: &str = ".venv/bin/x402conf";

/// The live rules of the package: an unpaid answer of a seller, and what a facilitator says that it supports.
#[tokio::test]
async fn the_rules_of_x402_conformance_hold_for_seller_and_facilitator() {
    let mut charge = x402();
    charge.args(["charge", "--upstream", "http://127.0.0.1:9", "--price", "$0.001", "--listen", "127.0.0.1:0"]);
    let seller = Serving::start(&mut charge).await;
    let facilitator = Serving::start(x402().args(["facilitator", "--listen", "127.0.0.1:0"])).await;
    for (mode, url) in [("resource", format!("{}/evaluate", seller.url())), ("live", facilitator.url())] {
        let mut check = script([CONFORMANCE, mode]);
        let checked = timeout(PATIENCE, check.args([&url, "--fail-on-error"]).output()).await.unwrap().unwrap();
        let said = String::from_utf8_lossy(&checked.stdout).into_owned();
        assert!(checked.status.success() && said.contains("\"pass\": true"), "{mode}: {said}");
    }
}
