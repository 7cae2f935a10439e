//! `x402 charge` is stopped or killed while somebody pays.

use std::{net::TcpListener, time::Duration};

use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::stage::{PATIENCE, PRICE, Running, Stage, facts, run};

#[tokio::test]
async fn a_seller_that_is_stopped_answers_the_requests_in_progress_and_takes_no_more() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let address = charge.text("listening").to_owned();
    let mut pay = stage.pay(&format!("http://{address}/gated"));
    pay.args(["--attempts", "1"]).stderr(std::process::Stdio::piped());
    let paying = tokio::spawn(async move { timeout(PATIENCE, pay.output()).await.unwrap().unwrap() });
    timeout(PATIENCE, stage.upstream.state.arrived.acquire()).await.unwrap().unwrap().forget();
    let stopping = tokio::spawn(charge.stop());
    timeout(PATIENCE, async {
        while TcpStream::connect(&address).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    stage.upstream.state.gate.add_permits(1);
    let paid = facts(&paying.await.unwrap());
    assert_eq!((&paid["outcome"], &paid["body"]), (&"settled".into(), &"done".into()), "{paid}");
    stopping.await.unwrap();
    assert_eq!(stage.income().await, PRICE);
}

#[tokio::test]
async fn a_killed_seller_answers_after_its_restart_and_charges_once() {
    let stage = Stage::new().await;
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = async || Running::start(stage.charge(&address).args(["--price", "$0.001"])).await;
    let mut charge = start().await;
    let mut pay = stage.pay(&format!("http://{address}/gated"));
    pay.args(["--attempts", "20"]).stderr(std::process::Stdio::piped());
    let paying = tokio::spawn(async move { timeout(PATIENCE, pay.output()).await.unwrap().unwrap() });
    // A payment's work is begun three times at most.
    for _ in 0..2 {
        // It is killed in the middle of the work.
        timeout(PATIENCE, stage.upstream.state.arrived.acquire()).await.unwrap().unwrap().forget();
        charge.kill().await;
        charge = start().await;
    }
    timeout(PATIENCE, stage.upstream.state.arrived.acquire()).await.unwrap().unwrap().forget();
    // Those of before, whose requests are gone, may take permits, too.
    stage.upstream.state.gate.add_permits(3);
    let output = paying.await.unwrap();
    let paid = facts(&output);
    assert!(output.status.success(), "{paid}");
    assert_eq!((&paid["outcome"], &paid["body"]), (&"settled".into(), &"done".into()));
    charge.stop().await;
    assert_eq!(stage.income().await, PRICE);
    let report = stage.report().await;
    assert_eq!(report["payments"][0]["owed"]["payments"], 0, "{report}");
}

#[tokio::test]
async fn an_answer_that_was_paid_for_outlives_a_kill() {
    let stage = Stage::new().await;
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = async || Running::start(stage.charge(&address).args(["--price", "$0.001"])).await;
    let journal = stage.path("journal");
    let buy = async || {
        let mut pay = stage.pay(&format!("http://{address}/echo"));
        facts(&run(pay.args(["-d", "x", "--purchase", "monday", "--journal"]).arg(&journal)).await)
    };
    let charge = start().await;
    let first = buy().await;
    assert_eq!(first["outcome"], "settled", "{first}");
    charge.kill().await;
    let charge = start().await;
    assert_eq!(buy().await["body"], first["body"]);
    charge.stop().await;
    assert_eq!((stage.upstream.count("/echo"), stage.income().await), (1, PRICE));
}
