//! From an empty machine to balanced books, with nothing but the command and a service.

use serde_json::json;

use crate::stage::{PRICE, Running, Stage, facts, run, x402};

#[tokio::test]
async fn a_service_is_charged_for_and_the_books_balance() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;

    let output =
        run(stage.pay(&format!("{}/echo?a=b", charge.url())).args(["-d", "2 + 2 = 4", "-H", "x-test: 1"])).await;
    let paid = facts(&output);
    assert!(output.status.success(), "{paid}");
    assert_eq!((&paid["status"], &paid["outcome"], &paid["amount"]), (&json!(200), &json!("settled"), &json!("1000")));
    let body: serde_json::Value = serde_json::from_str(paid["body"].as_str().unwrap()).unwrap();
    assert_eq!(
        (&body["method"], &body["uri"], &body["body"]),
        (&json!("POST"), &json!("/echo?a=b"), &json!("2 + 2 = 4"))
    );
    assert_eq!(body["headers"]["x402-payer"], stage.devnet.ready["payer"]);
    assert_eq!(stage.income().await, PRICE);

    // Any program, in any language.
    let proxy = Running::start(
        x402()
            .args(["proxy", "--listen", "127.0.0.1:0", "--budget", "$0.0025", "--to", &charge.url()])
            .env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key")),
    )
    .await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for (left, status) in [("$0.0015", 200), ("$0.0005", 200), ("", 402)] {
        let answer = client.get(format!("{}echo", proxy.text("url"))).send().await.unwrap();
        assert_eq!(answer.status(), status);
        let shown = answer.headers().get("x402-left").map_or("", |left| left.to_str().unwrap());
        assert_eq!(shown, left);
    }
    assert_eq!(client.get(format!("{}/echo", proxy.url())).send().await.unwrap().status(), 403, "without the token");
    proxy.stop().await;
    charge.stop().await;

    assert_eq!(stage.income().await, 3 * PRICE);
    let report = stage.report().await;
    let books = &report["payments"][0];
    assert_eq!(books["owed"]["payments"], 0, "{report}");
    assert_eq!(books["paid"]["units"], json!((3 * PRICE).to_string()), "{report}");
    assert_eq!(stage.upstream.count("/echo"), 3);
    stage.devnet.stop().await;
}

#[tokio::test]
async fn everything_works_without_a_node_and_says_that_no_money_is_real() {
    let stage = Stage::new().await;
    let mut command = x402();
    command.args(["charge", "--upstream", &stage.upstream.url, "--price", "$0.001", "--listen", "127.0.0.1:0"]);
    let errors = stage.path("errors");
    command.stderr(std::fs::File::create(&errors).unwrap());
    let charge = Running::start(&mut command).await;
    assert!(crate::stage::read(&errors).contains("NO REAL MONEY"));
    let output = run(&mut stage.pay(&format!("{}/echo", charge.url()))).await;
    assert_eq!(facts(&output)["outcome"], "settled");
    charge.stop().await;
}
