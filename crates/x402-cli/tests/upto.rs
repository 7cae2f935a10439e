//! `x402 charge --upto`: payers sign for the price as the most, and are charged what the service says.

use std::{net::TcpListener, sync::Arc};

use axum::{Json, Router, body::Bytes, extract::State, routing::post};
use http::Method;
use serde_json::{Value, json};
use tokio::{sync::Semaphore, time::timeout};
use tower_x402::{
    client::{Budget, Payer, PermitPolicy},
    protocol::{MAX_PAYMENT_HEADER, MAX_REQUIRED_HEADER, decode_header},
    signers::PrivateKeySigner,
};

use crate::{
    rules::{ask, offer, send, signed},
    stage::{PATIENCE, Running, Stage, client, facts, run, x402},
};

const METERED: &str = "upto = true\n[[route]]\npath = \"/priced\"\nmax_price = \"$0.05\"\n";
/// What the route above costs at most.
const MOST: u64 = 50_000;
const PURSE: u64 = 1_000_000_000;

/// Returns the schemes that a 402 offers.
async fn schemes(url: &str) -> Vec<String> {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let answer = client.request(Method::GET, url).send().await.unwrap();
    let demand: Value = decode_header(answer.headers()["payment-required"].as_bytes(), MAX_REQUIRED_HEADER).unwrap();
    demand["accepts"].as_array().unwrap().iter().map(|offer| offer["scheme"].as_str().unwrap().to_owned()).collect()
}

/// Returns what is said on standard error.
fn said(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn a_permit_is_charged_what_the_service_says_and_the_books_balance() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(METERED).await;
    let url = format!("{}/priced", charge.url());
    // What could only be charged whole is not on offer.
    assert_eq!(schemes(&url).await, ["upto", "batch-settlement"]);
    let mut exact = offer(Method::GET, &url).await;
    exact["scheme"] = "exact".into();
    exact["extra"] = json!({ "name": stage.devnet.text("asset_name"), "version": stage.devnet.text("asset_version") });
    assert_eq!(send(Method::GET, &url, &signed(&stage, &exact).await, "").await.status(), 402);
    assert_eq!(stage.approve("$0.2").await["approved"], "$0.20");
    let pay = async |prices: &[&str]| {
        let mut pay = stage.pay_by_permit(&url);
        pay.args(["--budget", "$0.05"]);
        prices.iter().for_each(|price| {
            pay.args(["-H", &format!("x-price: {price}")]);
        });
        facts(&run(&mut pay).await)
    };
    let paid = pay(&["$0.0004"]).await;
    let expected = (&json!(200), &json!("settled"), &json!("400"), &json!(false));
    assert_eq!((&paid["status"], &paid["outcome"], &paid["amount"], &paid["voucher"]), expected, "{paid}");
    // Nothing is a price, too, for which no transaction is sent.
    let free = pay(&["$0"]).await;
    let expected = (&json!(200), &json!("accepted"), &json!("0"), &Value::Null);
    assert_eq!((&free["status"], &free["outcome"], &free["amount"], &free["transaction"]), expected, "{free}");
    let whole = pay(&[]).await;
    assert_eq!((&whole["status"], &whole["amount"]), (&json!(200), &json!(MOST.to_string())), "{whole}");
    for (prices, status) in
        [(&["$0.050001"][..], 500), (&["$99999999999999999999"], 502), (&["-$1"], 502), (&["$0.01", "$0.01"], 502)]
    {
        assert_eq!(pay(prices).await["status"], status, "{prices:?}");
    }
    charge.stop().await;

    let income = 400 + MOST;
    assert_eq!((stage.income().await, stage.balance("payer").await), (income, PURSE - income));
    let report = stage.report().await;
    let books = &report["payments"][0];
    assert_eq!(
        (&books["paid"]["units"], &books["owed"]["payments"]),
        (&json!(income.to_string()), &json!(0)),
        "{report}"
    );
    let books = |arguments: &[&str]| {
        let mut command = x402();
        command.args(["books", "--ledger", &stage.ledger()]).args(arguments);
        command
    };
    let nonce = paid["nonce"].as_str().unwrap();
    let found = facts(&run(&mut books(&["find", &nonce[..14], "--json"])).await);
    assert_eq!((&found["amount_units"], &found["transaction"]), (&json!("400"), &paid["transaction"]), "{found}");
    // Its nonce is one of Permit2, and not of the token.
    let key = format!("{}:{nonce}", stage.devnet.text("payer"));
    let mut reconcile = books(&["reconcile", &key, "--rpc-url", stage.devnet.text("rpc_url")]);
    let reconciled = run(reconcile.env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"))).await;
    assert!(String::from_utf8_lossy(&reconciled.stdout).contains("0.000400"), "{}", said(&reconciled));
}

#[tokio::test]
async fn a_payer_that_approved_too_little_is_told_what_to_do() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(METERED).await;
    let url = format!("{}/priced", charge.url());
    let blind = run(stage.pay(&url).args(["--budget", "$0.05"])).await;
    assert_eq!((blind.status.code(), &facts(&blind)["outcome"]), (Some(1), &json!("refused")));
    assert!(
        said(&blind).contains("does not pay by permit") && said(&blind).contains("Give a node with --rpc-url"),
        "{}",
        said(&blind)
    );
    stage.approve("$0.049").await;
    let short = run(stage.pay_by_permit(&url).args(["--budget", "$0.05"])).await;
    assert_eq!((short.status.code(), &facts(&short)["outcome"]), (Some(1), &json!("refused")));
    assert!(
        said(&short).contains("may move 49000 atomic units") && said(&short).contains("x402 wallet approve"),
        "{}",
        said(&short)
    );
    // Who has no key yet is shown the price.
    let mut look = stage.pay_by_permit(&url);
    let looked = run(look.args(["--dry-run", "--budget", "$0.05"]).env_remove("PAYER_PRIVATE_KEY")).await;
    assert_eq!(facts(&looked)["would_pay"], true, "{}", said(&looked));
    stage.approve("$0.05").await;
    let mut show = x402();
    show.args(["wallet", "show", "--json", "--rpc-url", stage.devnet.text("rpc_url")]);
    let shown = facts(&run(show.env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key"))).await);
    assert_eq!((&shown["approved"], &shown["usdc"]), (&json!("$0.05"), &json!("$1000.00")), "{shown}");
    assert_eq!(facts(&run(stage.pay_by_permit(&url).args(["--budget", "$0.05"])).await)["outcome"], "settled");
    charge.stop().await;
    assert_eq!((stage.upstream.count("/priced"), stage.income().await), (1, MOST));
}

#[tokio::test]
async fn whoever_pays_by_transfer_only_still_pays_the_price() {
    let stage = Stage::new().await;
    let charge = Running::start(stage.charge("127.0.0.1:0").args(["--price", "$0.001", "--upto"])).await;
    assert_eq!(charge.ready["upto"], true);
    let url = format!("{}/priced", charge.url());
    assert_eq!(schemes(&url).await, ["exact", "upto", "batch-settlement"]);
    // With a node and nothing approved, and without a node.
    for mut pay in [stage.pay_by_permit(&url), stage.pay(&url)] {
        let paid = facts(&run(pay.args(["-H", "x-price: $0.0004"])).await);
        assert_eq!((&paid["outcome"], &paid["amount"]), (&json!("settled"), &json!("1000")), "{paid}");
    }
    stage.approve("$1").await;
    let paid = facts(&run(stage.pay_by_permit(&url).args(["-H", "x-price: $0.0004"])).await);
    assert_eq!((&paid["outcome"], &paid["amount"]), (&json!("settled"), &json!("400")), "{paid}");
    charge.stop().await;
    assert_eq!(stage.income().await, 2_400);
}

#[tokio::test]
async fn a_proxy_counts_what_the_chain_shows_was_charged() {
    let stage = Stage::new().await;
    std::fs::write(stage.path("x402.toml"), format!("admin = \"127.0.0.1:0\"\n{METERED}")).unwrap();
    let charge = Running::start(stage.charge("127.0.0.1:0").arg("--config").arg(stage.path("x402.toml"))).await;
    stage.approve("$1").await;
    let mut proxy = x402();
    proxy.args([
        "proxy",
        "--listen",
        "127.0.0.1:0",
        "--to",
        &charge.url(),
        "--budget",
        "$0.051",
        "--max-payment",
        "$0.05",
    ]);
    proxy
        .args(["--rpc-url", stage.devnet.text("rpc_url")])
        .env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key"));
    let proxy = Running::start(&mut proxy).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for (amount, left) in [("400", "$0.0506"), ("600", "$0.05"), ("50000", "$0.00")] {
        let price = format!("$0.{:0>6}", amount);
        let answer = client.get(format!("{}priced", proxy.text("url"))).header("x-price", price).send().await.unwrap();
        let header = |name: &str| answer.headers()[name].to_str().unwrap();
        assert_eq!((header("x402-amount"), header("x402-left")), (amount, left), "{answer:?}");
    }
    proxy.stop().await;
    let admin = format!("http://{}/summary", charge.text("admin"));
    let seen: Value = serde_json::from_slice(&client.get(admin).send().await.unwrap().bytes().await.unwrap()).unwrap();
    let route = &seen["routes"][0];
    let charged: u64 =
        route["hours"].as_array().unwrap().iter().map(|units| units.as_str().unwrap().parse::<u64>().unwrap()).sum();
    assert_eq!((&route["price"], charged), (&json!("up to $0.05"), 51_000), "{seen}");
    charge.stop().await;
    assert_eq!(stage.income().await, 51_000);
}

#[tokio::test]
async fn a_facilitator_settles_permits_for_callers_with_a_key_only() {
    let stage = Stage::new().await;
    let facilitator = async |keys: &str| facilitator_at(&stage, "127.0.0.1:0", keys).await;
    let seller = |facilitator: &Running| {
        let mut charge = x402();
        charge.args([
            "charge",
            "--upstream",
            &stage.upstream.url,
            "--price",
            "$0.05",
            "--upto",
            "--listen",
            "127.0.0.1:0",
        ]);
        charge.args(["--pay-to", stage.devnet.text("payee"), "--facilitator-url", &facilitator.url()]);
        charge.env("FACILITATOR_TOKEN", "a-key-of-the-seller");
        charge
    };
    let doctor = async |facilitator: &Running| {
        let mut doctor = x402();
        doctor
            .args(["doctor", "--upto", "--facilitator-url", &facilitator.url()])
            .env("FACILITATOR_TOKEN", "a-key-of-the-seller");
        String::from_utf8_lossy(&run(&mut doctor).await.stdout).into_owned()
    };
    // Whoever asks first says what a permit is charged, and a stranger may be its buyer.
    let open = facilitator("").await;
    let refused = run(&mut seller(&open)).await;
    assert_eq!(refused.status.code(), Some(2));
    assert!(said(&refused).contains("--upto: nobody settles permits on eip155:84532"), "{}", said(&refused));
    assert!(doctor(&open).await.contains("wrong    permits"));
    // A buyer cannot have its own permit settled for one unit there, which was for fifty thousand elsewhere.
    let charge = stage.charging_by_file(METERED).await;
    let url = format!("{}/priced", charge.url());
    let demand =
        reqwest::Client::builder().no_proxy().build().unwrap().get(&url).send().await.unwrap().headers().clone();
    let key: PrivateKeySigner = stage.devnet.text("payer_private_key").parse().unwrap();
    let budget = Budget::builder().per_payment("$0.05".parse().unwrap()).build();
    let payer = Payer::builder(key).budget(budget).upto(PermitPolicy::default()).build();
    let permit = payer.pay(&Method::GET, &url.parse().unwrap(), &demand, None).await.unwrap().unwrap();
    let permit: Value = decode_header(permit.header().as_bytes(), MAX_PAYMENT_HEADER).unwrap();
    let mut required = permit["accepted"].clone();
    required["amount"] = "1".into();
    stage.approve("$1").await;
    let answer = ask(&open, "settle", &permit, &required).await;
    assert_eq!((&answer["success"], &answer["errorReason"]), (&json!(false), &json!("unsupported_scheme")), "{answer}");
    assert_eq!(stage.income().await, 0);
    charge.stop().await;
    open.kill().await;

    let keyed = facilitator("a-key-of-the-seller").await;
    assert!(doctor(&keyed).await.contains("ok       permits"));
    let charge = Running::start(&mut seller(&keyed)).await;
    let mut pay = stage.pay_by_permit(&format!("{}/priced", charge.url()));
    let paid = facts(&run(pay.args(["--budget", "$0.05", "-H", "x-price: $0.0123"])).await);
    assert_eq!((&paid["outcome"], &paid["amount"]), (&json!("settled"), &json!("12300")), "{paid}");
    charge.stop().await;
    keyed.stop().await;
    assert_eq!(stage.income().await, 12_300);
}

/// Starts to charge, by permits too, through a facilitator that does not run yet, and returns it with the address that it is asked at.
pub(crate) async fn waiting(stage: &Stage, more: &[&str]) -> (Running, String) {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    std::fs::write(stage.path("x402.toml"), format!("{METERED}[[route]]\npath = \"/echo\"\nprice = \"$0.001\"\n"))
        .unwrap();
    let mut charge = x402();
    charge.args(["charge", "--upstream", &stage.upstream.url, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    charge.args(["--network", stage.devnet.text("network"), "--pay-to", stage.devnet.text("payee")]);
    charge
        .args(["--facilitator-url", &format!("http://{address}")])
        .arg("--config")
        .arg(stage.path("x402.toml"))
        .args(more);
    charge.env("FACILITATOR_TOKEN", "a-key-of-the-seller");
    charge.stderr(std::fs::File::create(stage.path("errors")).unwrap());
    (Running::start(&mut charge).await, address)
}

/// Starts a facilitator for callers with this key.
pub(crate) async fn facilitator_at(stage: &Stage, address: &str, keys: &str) -> Running {
    let mut facilitator = x402();
    facilitator.args(["facilitator", "--listen", address, "--rpc-url", stage.devnet.text("rpc_url")]);
    facilitator
        .env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"))
        .env("FACILITATOR_KEYS", keys);
    Running::start(&mut facilitator).await
}

#[tokio::test]
async fn a_seller_starts_before_the_facilitator_that_settles_its_permits() {
    for confirms in [false, true] {
        let stage = Stage::new().await;
        let node = ["--rpc-url", stage.devnet.text("rpc_url")];
        let (charge, address) = waiting(&stage, if confirms { &node } else { &[] }).await;
        assert_eq!(charge.ready["upto"], false, "nobody settles them yet");
        let (metered, fixed) = (format!("{}/priced", charge.url()), format!("{}/echo", charge.url()));
        assert_eq!(client().get(&metered).send().await.unwrap().status(), 503);
        assert_eq!(schemes(&fixed).await, ["exact"]);
        let ready = format!("http://{}/readyz", charge.text("admin"));
        assert_eq!(client().get(&ready).send().await.unwrap().status(), 503);

        let facilitator = facilitator_at(&stage, &address, "a-key-of-the-seller").await;
        let is_sold = async || client().get(&metered).send().await.unwrap().status() == 402;
        timeout(PATIENCE, async { while !is_sold().await {} }).await.unwrap();
        assert_eq!(
            (schemes(&metered).await, schemes(&fixed).await),
            (vec!["upto".into()], vec!["exact".into(), "upto".into()])
        );
        stage.approve("$1").await;
        let mut pay = stage.pay_by_permit(&metered);
        let paid = facts(&run(pay.args(["--budget", "$0.05", "-H", "x-price: $0.0004"])).await);
        assert_eq!((&paid["outcome"], &paid["amount"]), (&json!("settled"), &json!("400")), "{paid}");
        charge.stop().await;
        facilitator.stop().await;
        let said = crate::stage::read(&stage.path("errors"));
        assert_eq!(said.matches("permits (--upto) are taken as soon as").count(), 1, "{said}");
        assert_eq!(stage.income().await, 400);
    }
}

#[tokio::test]
async fn a_seller_whose_facilitator_settles_no_permits_after_all_goes_on_without() {
    let stage = Stage::new().await;
    let (charge, address) = waiting(&stage, &[]).await;
    let facilitator = facilitator_at(&stage, &address, "").await;
    let is_said = || crate::stage::read(&stage.path("errors")).contains("--upto: nobody settles permits");
    timeout(PATIENCE, async {
        while !is_said() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    let (metered, fixed) = (format!("{}/priced", charge.url()), format!("{}/echo", charge.url()));
    assert_eq!(
        (client().get(&metered).send().await.unwrap().status(), schemes(&fixed).await),
        (503.try_into().unwrap(), vec!["exact".into()])
    );
    assert_eq!(facts(&run(&mut stage.pay(&fixed)).await)["outcome"], "settled");
    charge.stop().await;
    facilitator.stop().await;
    assert_eq!(stage.income().await, 1_000);
}

/// A node that lets nobody hear of a transaction that was sent, or does not even pass it on.
async fn deaf_node(stage: &Stage, passes_on: bool) -> (String, Arc<Semaphore>) {
    struct Relay {
        node: String,
        client: reqwest::Client,
        sent: Arc<Semaphore>,
        passes_on: bool,
    }
    async fn answer(State(relay): State<Arc<Relay>>, body: Bytes) -> Json<Value> {
        let is_sent = String::from_utf8_lossy(&body).contains("eth_sendRawTransaction");
        let post =
            || relay.client.post(&relay.node).header("content-type", "application/json").body(body.clone()).send();
        if is_sent {
            if relay.passes_on {
                post().await.unwrap().bytes().await.unwrap();
            }
            relay.sent.add_permits(1);
            std::future::pending::<()>().await;
        }
        Json(serde_json::from_slice(&post().await.unwrap().bytes().await.unwrap()).unwrap())
    }
    let sent = Arc::new(Semaphore::new(0));
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let relay = Relay { node: stage.devnet.text("rpc_url").to_owned(), client, sent: sent.clone(), passes_on };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let app = Router::new().route("/", post(answer)).with_state(Arc::new(relay));
    tokio::spawn(async move { axum::serve(listener, app).await });
    (url, sent)
}

#[tokio::test]
async fn a_seller_killed_between_answer_and_settlement_charges_what_the_service_said_once() {
    for passes_on in [false, true] {
        let stage = Stage::new().await;
        stage.approve("$1").await;
        std::fs::write(stage.path("x402.toml"), METERED).unwrap();
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let start = async |node: &str| {
            let mut charge = stage.charge(&address);
            charge.arg("--config").arg(stage.path("x402.toml")).env("X402_RPC_URL", node);
            Running::start(&mut charge).await
        };
        let (deaf, sent) = deaf_node(&stage, passes_on).await;
        let charge = start(&deaf).await;
        let mut pay = stage.pay(&format!("http://{address}/priced"));
        pay.args([
            "--rpc-url",
            stage.devnet.text("rpc_url"),
            "--budget",
            "$0.05",
            "--attempts",
            "20",
            "-H",
            "x-price: $0.0004",
        ]);
        pay.stderr(std::process::Stdio::piped());
        let paying = tokio::spawn(async move { timeout(PATIENCE, pay.output()).await.unwrap().unwrap() });
        // The work is done and its price known. The transaction is in the journal, and in a block or nowhere.
        timeout(PATIENCE, sent.acquire()).await.unwrap().unwrap().forget();
        charge.kill().await;
        let charge = start(stage.devnet.text("rpc_url")).await;
        let output = paying.await.unwrap();
        let paid = facts(&output);
        assert!(output.status.success(), "{paid} {}", said(&output));
        assert_eq!(
            (&paid["outcome"], &paid["amount"], &paid["body"]),
            (&json!("settled"), &json!("400"), &json!("done")),
            "{paid}"
        );
        charge.stop().await;
        assert_eq!((stage.upstream.count("/priced"), stage.income().await), (1, 400), "passed on: {passes_on}");
        let report = stage.report().await;
        let books = &report["payments"][0];
        assert_eq!((&books["paid"]["units"], &books["owed"]["payments"]), (&json!("400"), &json!(0)), "{report}");
    }
}
