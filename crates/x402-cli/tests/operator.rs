//! What the operator asks a running seller: who may, and what the page shows.

use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use crate::stage::{PATIENCE, PRICE, Running, Stage, facts, run, x402};

const TOKEN: &str = "0123456789abcdefghij";

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

async fn summary(admin: &str) -> Value {
    let answer = client().get(format!("{admin}/summary")).send().await.unwrap();
    serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap()
}

#[tokio::test]
async fn the_page_shows_what_each_route_brought_in_and_what_the_ledger_has() {
    let stage = Stage::new().await;
    std::fs::write(
        stage.path("x402.toml"),
        "admin = \"127.0.0.1:0\"\n[[route]]\npath = \"/cheap\"\nmax_price = \"$0.001\"\n\
         [[route]]\npath = \"/echo\"\nmethods = [\"GET\"]\nprice = \"$0.001\"\n[[route]]\npath = \"/fail\"\nprice = \"$1\"",
    )
    .unwrap();
    let charge = Running::start(stage.charge("127.0.0.1:0").arg("--config").arg(stage.path("x402.toml"))).await;
    let admin = format!("http://{}", charge.text("admin"));
    let url = charge.url();
    assert_eq!(facts(&run(&mut stage.pay(&format!("{url}/echo"))).await)["outcome"], "settled");
    let mut by_voucher = stage.pay(&format!("{url}/cheap"));
    let by_voucher =
        run(by_voucher.args(["-d", "", "--budget", "$0.05", "--journal"]).arg(stage.path("journal"))).await;
    assert_eq!(facts(&by_voucher)["amount"], "400");
    run(stage.pay(&format!("{url}/fail")).args(["--attempts", "1", "--budget", "$2"])).await;

    // The ledger is gone through in the background, every few seconds.
    let all = async {
        loop {
            let seen = summary(&admin).await;
            if seen["books"]["channels"][0]["unclaimed"] == "400" {
                return seen;
            }
            sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    let seen = timeout(PATIENCE, all).await.unwrap();
    assert_eq!((&seen["ready"], &seen["reasons"]), (&json!(true), &json!([])));
    let newest = |route: &Value| {
        let hours: Vec<u64> =
            route["hours"].as_array().unwrap().iter().map(|units| units.as_str().unwrap().parse().unwrap()).collect();
        assert_eq!(hours.len(), 24);
        // The hour may have ended since.
        hours[22] + hours[23]
    };
    let routes: Vec<_> = seen["routes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|route| (route["route"].as_str().unwrap(), newest(route)))
        .collect();
    assert_eq!(routes, [("/cheap", 400), ("GET /echo", PRICE), ("/fail", 0)]);
    assert_eq!(seen["routes"][1]["price"], "$0.001");
    let payments = &seen["books"]["payments"][0];
    assert_eq!((&payments["paid"]["units"], &payments["owed"]["payments"]), (&json!(PRICE.to_string()), &json!(0)));
    let key = stage.devnet.text("settlement_address");
    let tank = seen["tanks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|tank| tank["account"].as_str().unwrap().eq_ignore_ascii_case(key));
    assert_eq!(tank.unwrap()["is_low"], false);
    assert_eq!(seen["requests"]["paid"], 2.0);
    for secret in ["settlement_private_key", "channels_private_key"] {
        assert!(!seen.to_string().contains(stage.devnet.text(secret).trim_start_matches("0x")), "{secret}");
    }
    charge.stop().await;
}

#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere_and_is_not_kept() {
    let stage = Stage::new().await;
    let charge =
        Running::start(stage.charge("127.0.0.1:0").args(["--price", "$0.001", "--admin", "127.0.0.1:0"])).await;
    let admin = format!("http://{}", charge.text("admin"));
    for (path, kind) in [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")] {
        let answer = client().get(format!("{admin}{path}")).send().await.unwrap();
        let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
        assert!(header("content-type").starts_with(kind), "{path}");
        assert!(header("content-security-policy").starts_with("default-src 'none'; script-src 'self';"));
        assert!(header("content-security-policy").contains("frame-ancestors 'none'"));
        assert_eq!((header("cache-control"), header("x-content-type-options")), ("no-store".into(), "nosniff".into()));
        let text = answer.text().await.unwrap();
        let addresses = text.matches("://").count();
        assert_eq!(addresses, text.matches("://www.w3.org/2000/svg").count(), "{path} names no place but its language");
        // Rebound: a name of somebody else's that points here.
        let rebound = client().get(format!("{admin}{path}")).header("host", "evil.example").send().await.unwrap();
        assert_eq!(rebound.status(), 403);
    }
    assert_eq!(client().post(format!("{admin}/summary")).send().await.unwrap().status(), 405);
    charge.stop().await;
}

#[tokio::test]
async fn other_machines_need_the_token() {
    let stage = Stage::new().await;
    let charge = || {
        let mut command = stage.charge("127.0.0.1:0");
        command.args(["--price", "$0.001", "--admin", "0.0.0.0:0"]);
        command
    };
    let refused = run(&mut charge()).await;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.contains("set X402_ADMIN_TOKEN"), "{said}");
    let short = run(charge().env("X402_ADMIN_TOKEN", "short")).await;
    let said = String::from_utf8_lossy(&short.stderr).into_owned();
    assert!(said.contains("at least 16 letters and digits") && !said.contains("short"), "{said}");

    let charge = Running::start(charge().env("X402_ADMIN_TOKEN", TOKEN)).await;
    let port = charge.text("admin").rsplit(':').next().unwrap();
    let get = async |path: &str, token: Option<&str>| {
        let asking = client().get(format!("http://127.0.0.1:{port}{path}")).header("host", "x402.internal");
        let asking = token.into_iter().fold(asking, |asking, token| asking.bearer_auth(token));
        let answer = asking.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    for path in ["/", "/page.js", "/summary", "/metrics", "/payments", "/channels", "/report", "/nowhere"] {
        assert_eq!(get(path, None).await.0, 401, "{path}");
        assert_eq!(get(path, Some("0123456789abcdefghi0")).await.0, 401, "{path}");
    }
    assert_eq!(get("/summary", Some(TOKEN)).await.0, 200);
    // A load balancer learns whether, and not why.
    assert_eq!(get("/readyz", None).await, (200, r#"{"ready":true}"#.to_owned()));
    assert_eq!(get("/readyz", Some(TOKEN)).await.1, r#"{"ready":true,"reasons":[]}"#);
    assert_eq!(get("/healthz", None).await.0, 200);
    let by_password = client().get(format!("http://127.0.0.1:{port}/summary")).basic_auth("anybody", Some(TOKEN));
    assert_eq!(by_password.send().await.unwrap().status(), 200);
    charge.stop().await;
}

#[tokio::test]
async fn the_operator_of_a_facilitator_sees_what_it_settled_and_for_whom_it_works() {
    let stage = Stage::new().await;
    let facilitator = || {
        let mut command = x402();
        command.args(["facilitator", "--listen", "127.0.0.1:0", "--rpc-url", stage.devnet.text("rpc_url")]);
        command.args(["--ledger", &stage.ledger()]);
        for name in ["settlement_private_key", "channels_private_key"] {
            command.env(name.to_uppercase(), stage.devnet.text(name));
        }
        command
    };
    let refused = run(facilitator().args(["--admin", "0.0.0.0:0"])).await;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.contains("set X402_ADMIN_TOKEN"), "{said}");

    let facilitator = Running::start(facilitator().args(["--admin", "127.0.0.1:0"])).await;
    let admin = format!("http://{}", facilitator.text("admin"));
    let mut charge = x402();
    charge.args(["charge", "--upstream", &stage.upstream.url, "--price", "$0.001", "--listen", "127.0.0.1:0"]);
    charge.args(["--pay-to", stage.devnet.text("payee"), "--facilitator-url", &facilitator.url()]);
    let charge = Running::start(&mut charge).await;
    assert_eq!(facts(&run(&mut stage.pay(&format!("{}/echo", charge.url()))).await)["outcome"], "settled");
    charge.stop().await;

    let settled = async {
        loop {
            let seen = summary(&admin).await;
            if seen["books"]["payments"][0]["paid"]["payments"] == 1 {
                return seen;
            }
            sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    let seen = timeout(PATIENCE, settled).await.unwrap();
    assert_eq!((&seen["ready"], &seen["about"]["command"]), (&json!(true), &json!("x402 facilitator")));
    assert_eq!((&seen["routes"], &seen["requests"]["settle 200"]), (&json!([]), &json!(1.0)));
    let get = async |path: &str| {
        let answer = client().get(format!("{admin}{path}")).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    assert_eq!(get("/readyz").await, (200, r#"{"ready":true,"reasons":[]}"#.to_owned()));
    assert_eq!(get("/payments?state=all").await.1.lines().count(), 1);
    let numbers = get("/metrics").await.1;
    for sample in [
        "x402_ready{",
        "x402_channels_ready{",
        "x402_gas_tank_wei{",
        "x402_facilitator_requests_total{endpoint=\"settle\"",
    ] {
        assert!(numbers.lines().any(|line| line.starts_with(sample)), "{sample}: {numbers}");
    }
    let supported = client().get(format!("{}/supported", facilitator.url())).send().await.unwrap();
    let supported: Value = serde_json::from_slice(&supported.bytes().await.unwrap()).unwrap();
    let schemes = supported["kinds"].as_array().unwrap().iter().map(|kind| kind["scheme"].as_str().unwrap());
    let schemes: std::collections::BTreeSet<_> = schemes.collect();
    assert!(schemes.contains("exact") && schemes.contains("batch-settlement"), "{supported}");
    facilitator.stop().await;
}

#[tokio::test]
async fn a_seller_gives_back_what_nobody_uses() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file("[[route]]\npath = \"/cheap\"\nmax_price = \"$0.001\"").await;
    let mut pay = stage.pay(&format!("{}/cheap", charge.url()));
    let paid = run(pay.args(["-d", "", "--budget", "$0.05", "--journal"]).arg(stage.path("journal"))).await;
    assert_eq!(facts(&paid)["amount"], "400");
    charge.kill().await;
    let seller = |arguments: &[&str]| {
        let mut command = x402();
        command.args(["channels", arguments[0], "--ledger", &stage.ledger()]).args(&arguments[1..]);
        command.args(["--rpc-url", stage.devnet.text("rpc_url")]);
        command.env("CHANNELS_PRIVATE_KEY", stage.devnet.text("channels_private_key"));
        command
    };
    let said = async |arguments: &[&str]| {
        let output = run(&mut seller(arguments)).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(run(&mut seller(&["refund"])).await.status.code(), Some(2), "it must say which are idle");
    assert!(said(&["refund", "--idle", "86400"]).await.contains("Refunded $0.00 from 0 channels"));
    let none = said(&["refund", "--idle", "86400", "--json"]).await;
    assert_eq!(
        serde_json::from_str::<Value>(&none).unwrap(),
        json!({ "refunded": "0", "failed": 0, "transactions": [] })
    );
    let refunded = said(&["refund", "--idle", "0", "--least", "$0.001"]).await;
    assert!(refunded.contains("Refunded $0.0096 from 1 channels"), "{refunded}");
    said(&["claim"]).await;
    assert_eq!(stage.income().await, 400, "what was charged is not given back");
}

#[tokio::test]
async fn the_doctor_looks_at_facilitator_service_and_payee() {
    let stage = Stage::new().await;
    let facilitator = Running::start(
        x402()
            .args(["facilitator", "--listen", "127.0.0.1:0", "--rpc-url", stage.devnet.text("rpc_url")])
            .env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"))
            .env("FACILITATOR_KEYS", "a-key-of-the-caller"),
    )
    .await;
    let settles_at = facilitator.url();
    let doctor = |upstream: &str, pay_to: &str, more: &[&str]| {
        let mut command = x402();
        command.args(["doctor", "--facilitator-url", &settles_at, "--upstream", upstream, "--pay-to", pay_to]);
        command.args(more).env("FACILITATOR_TOKEN", "a-key-of-the-caller");
        command
    };
    let found = async |command: &mut tokio::process::Command, expected: &[&str]| {
        let said = String::from_utf8_lossy(&run(command).await.stdout).into_owned();
        for text in expected {
            assert!(said.contains(text), "{text}: {said}");
        }
    };
    let (there, payee) = (stage.upstream.url.as_str(), "0x5FbDB2315678afecb367f032d93F642f64180aa3");
    let good = [
        "settles on eip155:84532",
        "ok       payee",
        "ok       service",
        "the facilitator's answers are not checked on the chain",
    ];
    found(&mut doctor(there, payee, &[]), &good).await;
    let public = stage.devnet.text("payee");
    found(
        &mut doctor("http://127.0.0.1:9", public, &[]),
        &["nothing listens at http://127.0.0.1:9", "whose key everybody knows"],
    )
    .await;
    let other = ["--network", "base"];
    found(&mut doctor(there, payee, &other), &["does not say that it settles on eip155:8453"]).await;
    found(doctor(there, payee, &[]).env("FACILITATOR_TOKEN", "other"), &["refuses to answer", "Set FACILITATOR_TOKEN"])
        .await;
    facilitator.stop().await;
    found(&mut doctor(there, payee, &[]), &["does not answer", "Check --facilitator-url"]).await;
}
