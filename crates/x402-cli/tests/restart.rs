//! `x402 charge` is killed while somebody pays.

use std::net::TcpListener;

use tokio::time::timeout;

use crate::stage::{PATIENCE, PRICE, Running, Stage, facts};

#[tokio::test]
async fn a_killed_seller_answers_after_its_restart_and_charges_once() {
    let stage = Stage::new().await;
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = async || Running::start(stage.charge(&address).args(["--price", "$0.001"])).await;
    let mut charge = start().await;
    let mut pay = stage.pay(&format!("http://{address}/gated"));
    pay.args(["--attempts", "20"]).stderr(std::process::Stdio::piped());
    let paying = tokio::spawn(async move { timeout(PATIENCE, pay.output()).await.unwrap().unwrap() });
    for _ in 0..3 {
        // It is killed in the middle of the work.
        timeout(PATIENCE, stage.upstream.state.arrived.acquire()).await.unwrap().unwrap().forget();
        charge.kill().await;
        charge = start().await;
    }
    timeout(PATIENCE, stage.upstream.state.arrived.acquire()).await.unwrap().unwrap().forget();
    // Those of before, whose requests are gone, may take permits, too.
    stage.upstream.state.gate.add_permits(4);
    let output = paying.await.unwrap();
    let paid = facts(&output);
    assert!(output.status.success(), "{paid}");
    assert_eq!((&paid["outcome"], &paid["body"]), (&"settled".into(), &"done".into()));
    charge.stop().await;
    assert_eq!(stage.income().await, PRICE);
    let report = stage.report().await;
    assert_eq!(report["payments"][0]["owed"]["payments"], 0, "{report}");
}
