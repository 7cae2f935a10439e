//! What clients, services, web pages and sellers try on the command, for money or secrets.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    response::IntoResponse as _,
    routing::{any, get},
};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tower_x402::{client::ChannelPolicy, protocol::encode_header};

use crate::{
    removed::{payer, payment, transfer},
    rules::{offer, signed},
    stage::{PATIENCE, PRICE, Running, Stage, client, facts, run, x402},
    what_can_go_wrong::{NOBODY, below, with_argument},
};

/// Sends a request as it is written, and returns the answer.
async fn raw(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.replace('\n', "\r\n").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// Returns the headers that /echo saw.
fn echoed(answer: &str) -> serde_json::Map<String, Value> {
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let body: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"));
    body["headers"].as_object().unwrap().clone()
}

#[tokio::test]
async fn no_client_makes_the_service_forget_or_believe_who_asks() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file("[[route]]\npath = \"/echo\"\nfree = true").await;
    // `Connection` names what is for one connection, and a client may name anything there (RFC 9110, section 7.6.1).
    let request = "GET /echo HTTP/1.1\nHost: api.example\nConnection: close, x-forwarded-for, x-forwarded-host, x-forwarded-proto\n\
                   X-Forwarded-For: 6.6.6.6\nX_Forwarded_For: 6.6.6.6\nX-Forwarded.For: 6.6.6.6\nx402.payer: 6.6.6.6\n\
                   X402_Amount: 6.6.6.6\nx402~actual-price: 6.6.6.6\nX402-Actual-Price: 6.6.6.6\n\n";
    let answer = raw(charge.text("listening"), request).await;
    let headers = echoed(&answer);
    assert_eq!(headers.get("x-forwarded-for"), Some(&json!("127.0.0.1")), "{answer}");
    assert_eq!(headers.get("x-forwarded-host"), Some(&json!("api.example")), "{answer}");
    assert!(!answer.contains("6.6.6.6"), "{answer}");
    charge.stop().await;
}

/// A service that answers each request with these bytes.
async fn answering(bytes: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let bytes = bytes.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") && stream.read_buf(&mut head).await.is_ok_and(|read| read > 0) {}
                stream.write_all(bytes.as_bytes()).await.unwrap();
                // Until the other side has read it.
                let _ = stream.read_buf(&mut head).await;
            });
        }
    });
    url
}

#[tokio::test]
async fn the_price_is_what_the_head_of_the_answer_says_and_nothing_else() {
    const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X402-Actual-Price\r\n";
    const DONE: &str = "4\r\ndone\r\n0\r\nX402-Actual-Price: $0.0001\r\n\r\n";
    let whole = |head: &str| format!("{head}Content-Length: 4\r\n\r\ndone");
    let stage = Stage::new().await;
    stage.approve("$1").await;
    let mut income = 0;
    for (answer, status, amount) in [
        (format!("{CHUNKED}\r\n{DONE}"), 200, PRICE),
        (format!("{CHUNKED}Content-Type: text/event-stream\r\nX402-Actual-Price: $0.0003\r\n\r\n{DONE}"), 200, 300),
        (whole("HTTP/1.1 103 Early Hints\r\nX402-Actual-Price: $0.0001\r\n\r\nHTTP/1.1 200 OK\r\n"), 200, PRICE),
        (whole("HTTP/1.1 200 OK\r\nX402-Actual-Price: $0.0001\r\nX402_Actual_Price: $0.0002\r\n"), 200, 100),
        (whole("HTTP/1.1 200 OK\r\nX402-Actual-Price: $0.0001\r\nx402-actual-price: $0.0001\r\n"), 502, 0),
        (whole("HTTP/1.1 200 OK\r\nX402-Actual-Price: $0.0001, $0.0001\r\n"), 502, 0),
        (whole("HTTP/1.1 200 OK\r\nX402-Actual-Price: \u{661}\r\n"), 502, 0),
        (whole("HTTP/1.1 500 No\r\nX402-Actual-Price: what?\r\n"), 500, 0),
        ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n".to_owned(), 502, 0),
    ] {
        let charge = charging_for(&stage, &answering(answer.clone()).await, &["--upto"]).await;
        let paid = facts(&run(&mut stage.pay_by_permit(&format!("{}/x", charge.url()))).await);
        assert_eq!(paid["status"], status, "{answer}: {paid}");
        charge.stop().await;
        income += amount;
        assert_eq!(stage.income().await, income, "{answer}");
    }
}

/// Starts to charge the usual price for another service.
async fn charging_for(stage: &Stage, upstream: &str, more: &[&str]) -> Running {
    let mut command = x402();
    command.args(["charge", "--upstream", upstream, "--listen", "127.0.0.1:0", "--price", "$0.001"]);
    command.args(more).args(["--pay-to", stage.devnet.text("payee"), "--ledger", &stage.ledger()]);
    command.env("X402_RPC_URL", stage.devnet.text("rpc_url"));
    command.env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"));
    command.env("CHANNELS_PRIVATE_KEY", stage.devnet.text("channels_private_key"));
    Running::start(&mut command).await
}

#[tokio::test]
async fn a_body_of_unknown_size_is_not_sold_by_its_size() {
    const BY_SIZE: &str = "price = \"$0.001\"\n[[route]]\npath = \"/echo\"\nprice_per_kilobyte = \"$0.0001\"\n";
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(BY_SIZE).await;
    let payment = transfer(&stage, &format!("{}/echo", charge.url())).await;
    let paid = format!("Content-Encoding: gzip\nPAYMENT-SIGNATURE: {}\n", payment.to_str().unwrap());
    for (path, more, status) in [
        ("/echo", "Content-Encoding: gzip\n", "415"),
        ("/echo", "Content_Encoding: gzip\n", "415"),
        ("/echo", "Content-Encoding: identity\nContent-Encoding: br\n", "415"),
        ("/echo", "Content-Encoding: identity, gzip\n", "415"),
        ("/echo", paid.as_str(), "415"),
        ("/echo", "Content-Encoding: Identity\n", "402"),
        ("/priced", "Content-Encoding: gzip\n", "402"),
    ] {
        let request = format!("POST {path} HTTP/1.1\nHost: h\nConnection: close\nContent-Length: 4\n{more}\nbody");
        let answer = raw(charge.text("listening"), &request).await;
        assert_eq!(&answer[9..12], status, "{more}: {answer}");
        assert_eq!(answer.contains("encoding_not_priced"), status == "415", "{answer}");
    }
    charge.stop().await;
    assert_eq!((stage.upstream.count("/echo"), stage.income().await), (0, 0));
}

#[tokio::test]
async fn the_name_of_a_method_is_no_way_around_a_price() {
    let stage = Stage::new().await;
    let charge = stage
        .charging_by_file(
            "[[route]]\npath = \"/echo\"\nmethods = [\"POST\"]\nprice = \"$0.001\"\n\
             [[route]]\npath = \"/priced\"\nmethods = [\"GET\"]\nprice = \"$0.001\"\n\
             [[route]]\npath = \"/*\"\nfree = true\n",
        )
        .await;
    for (line, status) in [
        ("post /echo", "400"),
        ("Post /echo", "400"),
        ("POST_ /echo", "400"),
        ("get /priced", "400"),
        ("head /priced", "400"),
        ("POST /echo", "402"),
        ("GET /priced", "402"),
        // Many services run what a GET runs.
        ("HEAD /priced", "402"),
        ("M-SEARCH /nowhere", "404"),
    ] {
        let request = format!("{line} HTTP/1.1\nHost: h\nConnection: close\nContent-Length: 0\n\n");
        let answer = raw(charge.text("listening"), &request).await;
        assert_eq!(&answer[9..12], status, "{line}: {answer}");
        assert_eq!(answer.contains("unknown_method"), status == "400", "{answer}");
    }
    charge.stop().await;
    assert_eq!((stage.upstream.count("/echo"), stage.upstream.count("/priced")), (0, 0));
}

#[tokio::test]
async fn a_preflight_of_what_is_paid_for_never_reaches_the_service() {
    let stage = Stage::new().await;
    let charge = stage
        .charging_by_file(
            "[[route]]\npath = \"/echo\"\nmethods = [\"POST\"]\nprice = \"$0.001\"\n\
             [[route]]\npath = \"/priced\"\nprice = \"$0.001\"\n\
             [[route]]\npath = \"/*\"\nfree = true\n",
        )
        .await;
    let preflight = async |path: &str, method: &'static str| {
        let asked = client().request(Method::OPTIONS, format!("{}{path}?send=it", charge.url())).body("abc");
        let asked = asked.header("origin", "https://page.example").header("access-control-request-method", method);
        asked.header("access-control-request-headers", "payment-signature").send().await.unwrap()
    };
    for (path, method) in [("/echo", "POST"), ("/priced", "GET")] {
        let answer = preflight(path, method).await;
        let allowed = |name: &str| answer.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(answer.status(), 204, "{path}");
        assert_eq!(allowed("access-control-allow-methods").as_deref(), Some(method));
        assert_eq!(allowed("access-control-allow-headers").as_deref(), Some("payment-signature"));
        assert_eq!(allowed("access-control-allow-origin").as_deref(), Some("*"));
    }
    assert_eq!((stage.upstream.count("/echo"), stage.upstream.count("/priced")), (0, 0));
    // What is free is the service's own.
    assert_eq!(preflight("/echo", "GET").await.status(), 200);
    charge.stop().await;
    assert_eq!(stage.upstream.count("/echo"), 1);
}

#[tokio::test]
async fn a_fixed_price_is_charged_whatever_the_service_passes_on() {
    for header in ["X402-Actual-Price: $0", "X402-Actual-Price: what?", "Settlement-Overrides: {\"amount\":\"0\"}"] {
        let stage = Stage::new().await;
        let answer = format!("HTTP/1.1 200 OK\r\n{header}\r\nContent-Length: 4\r\n\r\ndone");
        let charge = charging_for(&stage, &answering(answer).await, &[]).await;
        let url = format!("{}/x", charge.url());
        let voucher = payment(&payer(&stage).vouchers(ChannelPolicy::new()).build(), &url).await;
        let answer = client().get(&url).header("payment-signature", voucher).send().await.unwrap();
        let is_passed_on =
            ["x402-actual-price", "settlement-overrides"].map(|name| answer.headers().contains_key(name));
        assert_eq!((answer.status().as_u16(), is_passed_on), (200, [false, false]), "{header}");
        // It claims before it stops.
        charge.stop().await;
        assert_eq!(stage.income().await, PRICE, "{header}");
    }
}

#[tokio::test]
async fn nobody_is_told_to_have_paid_nothing_after_a_transfer_that_came_first() {
    const PAID: &str = "it is paid for, and presenting the same payment again charges nothing more";
    let stage = Stage::new().await;
    let odd = answering(
        "HTTP/1.1 200 OK\r\nConnection: close\r\nX402-Actual-Price: zz\r\nContent-Length: 4\r\n\r\ndone".to_owned(),
    )
    .await;
    let mut income = 0;
    for (upstream, flow, error, charged) in [
        (NOBODY, "upfront", "upstream_unreachable", PAID),
        (odd.as_str(), "upfront", "actual_price_unreadable", PAID),
        (NOBODY, "authorization", "upstream_unreachable", "nothing was charged"),
        (odd.as_str(), "authorization", "actual_price_unreadable", "nothing was charged"),
    ] {
        let charge = charging_for(&stage, upstream, &["--flow", flow, "--upto"]).await;
        let url = format!("{}/x", charge.url());
        let payment = transfer(&stage, &url).await;
        income += if flow == "upfront" { PRICE } else { 0 };
        for _ in 0..2 {
            let answer = client().get(&url).header("payment-signature", &payment).send().await.unwrap();
            let said: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
            assert_eq!(said["error"], error, "{said}");
            assert!(said["detail"].as_str().unwrap().ends_with(charged), "{flow}: {said}");
            assert_eq!(stage.income().await, income, "{flow}");
        }
        charge.stop().await;
    }
}

#[tokio::test]
async fn only_the_command_says_what_was_paid() {
    let stage = Stage::new().await;
    let receipt =
        json!({ "success": true, "transaction": format!("0x{}", "07".repeat(32)), "network": "eip155:84532" });
    let forged = encode_header(&receipt).unwrap();
    // The service asks for money of its own, and says that it got it.
    let lies = |status: &str| {
        let about =
            ["PAYMENT-REQUIRED", "PAYMENT-RESPONSE", "X-PAYMENT-RESPONSE"].map(|name| format!("{name}: {forged}\r\n"));
        format!("HTTP/1.1 {status}\r\n{}Content-Length: 4\r\n\r\nlies", about.concat())
    };
    let charge = charging_for(&stage, &answering(lies("500 No")).await, &[]).await;
    let paid = facts(&run(stage.pay(&format!("{}/x", charge.url())).args(["--attempts", "1"])).await);
    assert_eq!((&paid["status"], &paid["transaction"]), (&json!(500), &Value::Null), "{paid}");
    assert_ne!(paid["outcome"], "settled", "{paid}");
    charge.stop().await;
    assert_eq!(stage.income().await, 0);

    // The seller says what only the proxy knows.
    let lies = "HTTP/1.1 200 OK\r\nX402-Outcome: settled\r\nX402-Amount: 7\r\nX402_Left: $99\r\nX402-Transaction: 0x7\r\nContent-Length: 4\r\n\r\nlies";
    let proxy = proxying(&stage, &answering(lies.to_owned()).await, &[]).await;
    let answer = reqwest::Client::builder().no_proxy().build().unwrap().get(proxy.text("url")).send().await.unwrap();
    assert!(!answer.headers().keys().any(|name| name.as_str().starts_with("x402")), "{answer:?}");
    proxy.stop().await;
}

#[tokio::test]
async fn what_is_paid_for_while_the_routes_change_is_answered_and_charged_as_it_was_offered() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file("[[route]]\npath = \"/gated\"\nprice = \"$0.001\"\n").await;
    let url = format!("{}/gated", charge.url());
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let payment = encode_header(&signed(&stage, &offer(Method::POST, &url).await).await).unwrap();
    let send = || client.post(&url).header("payment-signature", &payment).body("work").send();
    let paying = tokio::spawn(send());
    timeout(PATIENCE, stage.upstream.state.arrived.acquire()).await.unwrap().unwrap().forget();
    // Dearer, and to somebody else: who is paid stays as it was until a restart.
    let dearer = "pay_to = \"0x00000000000000000000000000000000000000aa\"\nprice = \"$0.002\"\n";
    stage.reload(&charge, dearer, ("/new", 402)).await;
    stage.upstream.state.gate.add_permits(1);
    let answer = paying.await.unwrap().unwrap();
    assert_eq!((answer.status(), answer.text().await.unwrap().as_str()), (StatusCode::OK, "done"));
    // Asked for again, it is what was bought.
    assert_eq!(send().await.unwrap().text().await.unwrap(), "done");
    let dear = offer(Method::POST, &url).await;
    assert_eq!((&dear["amount"], &dear["payTo"]), (&json!("2000"), &stage.devnet.ready["payee"]));
    charge.stop().await;
    assert_eq!((stage.upstream.count("/gated"), stage.income().await), (1, PRICE));
}

/// Starts a proxy that pays for this service.
async fn proxying(stage: &Stage, to: &str, more: &[&str]) -> Running {
    let mut proxy = x402();
    proxy.args(["proxy", "--listen", "127.0.0.1:0", "--to", to]).args(more);
    Running::start(proxy.env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key"))).await
}

#[tokio::test]
async fn the_token_of_a_proxy_goes_to_no_seller_and_into_no_log() {
    let stage = Stage::new().await;
    let errors = stage.path("errors");
    let mut proxy = x402();
    proxy.args(["proxy", "--listen", "127.0.0.1:0", "--to", &stage.upstream.url]).env("RUST_LOG", "debug");
    proxy
        .env("PAYER_PRIVATE_KEY", stage.devnet.text("payer_private_key"))
        .stderr(std::fs::File::create(&errors).unwrap());
    let proxy = Running::start(&mut proxy).await;
    let (url, token) = (proxy.text("url").to_owned(), proxy.text("token").to_owned());
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    // A browser sends the address of the page before, and a program may send it as it likes.
    let asked = client
        .get(format!("{url}echo"))
        .header("referer", format!("{url}page"))
        .header("x-from", format!("a {token} b"));
    let answer = asked.header("x402-proxy-token", &token).header("accept", "text/html").send().await.unwrap();
    let seen = answer.text().await.unwrap();
    assert!(!seen.contains(&token) && seen.contains("text/html"), "{seen}");
    // Nor does it get there by a mistake.
    for path in ["nowhere", "%2e%2e/", "a//b"] {
        client.get(format!("{url}{path}")).send().await.unwrap();
    }
    proxy.stop().await;
    let logged = crate::stage::read(&errors);
    assert!(logged.contains("stopping") && !logged.contains(&token), "{logged}");
}

#[tokio::test]
async fn a_proxy_is_no_open_proxy() {
    let stage = Stage::new().await;
    let proxy = proxying(&stage, &stage.upstream.url, &[]).await;
    let (here, token) = (proxy.text("listening").to_owned(), proxy.text("token").to_owned());
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = other.local_addr().unwrap().to_string();
    let status = async |request: &str| raw(&here, &format!("{request}\nConnection: close\n\n")).await[9..12].to_owned();
    for (request, expected) in [
        (format!("CONNECT {elsewhere} HTTP/1.1\nHost: {here}\nX402-Proxy-Token: {token}"), "400"),
        (format!("CONNECT {elsewhere} HTTP/1.1\nHost: evil.example\nX402-Proxy-Token: {token}"), "403"),
        (format!("GET http://{elsewhere}/ HTTP/1.1\nHost: evil.example\nX402-Proxy-Token: {token}"), "403"),
        (format!("GET http://{elsewhere}/ HTTP/1.1\nHost: {here}"), "403"),
        // The path is asked for where it always is.
        (format!("GET http://{elsewhere}/echo HTTP/1.1\nHost: {here}\nX402-Proxy-Token: {token}"), "200"),
        (format!("GET /{token}/echo HTTP/1.1\nHost: evil.example"), "403"),
        (format!("GET /{token}/echo HTTP/1.1\nHost: {here}@{elsewhere}"), "403"),
        (format!("GET /{token}//{elsewhere}/ HTTP/1.1\nHost: {here}"), "400"),
        (format!("GET /{token}@{elsewhere}/ HTTP/1.1\nHost: {here}"), "403"),
        // It goes where the seller says to by itself, or not at all.
        (format!("GET /{token}/moved HTTP/1.1\nHost: {here}"), "302"),
    ] {
        assert_eq!(status(&request).await, expected, "{request}");
    }
    proxy.stop().await;
    // Nobody came.
    assert!(timeout(std::time::Duration::ZERO, other.accept()).await.is_err());

    let open = proxying(&stage, &stage.upstream.url, &["--no-token"]).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let asked = async |name: &'static str, value: &'static str| {
        client.get(format!("{}echo", open.text("url"))).header(name, value).send().await.unwrap().status().as_u16()
    };
    // As a browser asks for an image, which has no origin.
    assert_eq!(asked("sec-fetch-site", "cross-site").await, 403);
    assert_eq!((asked("origin", "https://evil.example").await, asked("accept", "*/*").await), (403, 200));
    open.stop().await;
}

#[tokio::test]
async fn a_proxy_pays_each_service_no_more_than_its_bound_and_calls_no_other() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let port = charge.text("listening").rsplit(':').next().unwrap();
    let more = ["--to", &format!("http://localhost:{port}"), "--budget", "$1"];
    let proxy = proxying(&stage, &format!("http://127.0.0.1:{port}=$0.0015"), &more).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for (host, status, error) in [
        (format!("127.0.0.1:{port}"), 200, ""),
        (format!("127.0.0.1:{port}"), 402, "not_paid"),
        (format!("localhost:{port}"), 200, ""),
        ("evil.example".to_owned(), 404, "no_such_service"),
    ] {
        let answer = client.get(format!("{}{host}/echo", proxy.text("url"))).send().await.unwrap();
        let found = answer.status().as_u16();
        let said: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        assert_eq!((found, said["error"].as_str().unwrap_or_default()), (status, error), "{host}: {said}");
    }
    proxy.stop().await;
    charge.stop().await;
    assert_eq!((stage.upstream.count("/echo"), stage.income().await), (2, 2 * PRICE));
}

#[tokio::test]
async fn a_seller_that_asks_again_and_again_gets_no_more_than_the_budget() {
    let stage = Stage::new().await;
    let signatures = Arc::<Mutex<Vec<String>>>::default();
    let charge = stage.charging().await;
    let demand = reqwest::Client::builder().no_proxy().build().unwrap().get(charge.url()).send().await.unwrap();
    let demand = demand.headers()["payment-required"].clone();
    let kept = signatures.clone();
    let answer = async move |request: Request| {
        if let Some(payment) = request.headers().get("payment-signature") {
            kept.lock().unwrap().push(payment.to_str().unwrap().to_owned());
        }
        match request.uri().path() {
            "/moved" => (StatusCode::TEMPORARY_REDIRECT, [("location", "/again")]).into_response(),
            _ => (StatusCode::PAYMENT_REQUIRED, [("payment-required", demand.to_str().unwrap().to_owned())])
                .into_response(),
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(any(answer))).await });
    let again = run(stage.pay(&format!("{url}/again")).args(["--budget", "$0.005", "--attempts", "10"])).await;
    assert_eq!(again.status.code(), Some(1), "{}", facts(&again));
    let moved = run(stage.pay(&format!("{url}/moved")).args(["--budget", "$0.005"])).await;
    assert_eq!((facts(&moved)["status"].clone(), facts(&moved)["outcome"].clone()), (json!(307), Value::Null));
    let mut distinct = signatures.lock().unwrap().clone();
    distinct.sort();
    distinct.dedup();
    assert!(
        distinct.len() <= 1,
        "one purchase is signed for once, and not for what it was sent on to: {}",
        distinct.len()
    );
    charge.stop().await;
}

#[tokio::test]
async fn a_proxy_gives_no_cookies_to_sellers_and_lets_no_page_spend() {
    let stage = Stage::new().await;
    let proxy = proxying(&stage, &stage.upstream.url, &[]).await;
    let asked = async |name: &'static str, value: &'static str| {
        client().get(format!("{}echo", proxy.text("url"))).header(name, value).send().await.unwrap()
    };
    // A cookie jar knows neither ports nor who of several sellers gave it what.
    let seen: Value =
        serde_json::from_slice(&asked("cookie", "session=of-another").await.bytes().await.unwrap()).unwrap();
    assert_eq!(seen["headers"].get("cookie"), None, "{seen}");
    for (name, value) in [("origin", "https://evil.example"), ("sec-fetch-site", "same-origin")] {
        assert_eq!(asked(name, value).await.status(), StatusCode::FORBIDDEN, "{name}");
    }
    proxy.stop().await;
    assert_eq!(stage.upstream.count("/echo"), 1);
}

#[tokio::test]
async fn a_page_of_a_seller_runs_no_scripts_and_its_redirects_get_no_token() {
    let stage = Stage::new().await;
    let answer = "HTTP/1.1 302 Found\r\nConnection: close\r\nLocation: http://127.0.0.1:9/evil\r\nSet-Cookie: session=secret; Path=/\r\n\
                  Content-Security-Policy: default-src *\r\nContent-Security-Policy: sandbox allow-scripts\r\n\
                  Content-Security-Policy-Report-Only: default-src 'none'; report-uri http://127.0.0.1:9/\r\n\
                  Referrer-Policy: unsafe-url\r\nX402-Location: /forged\r\nContent-Length: 4\r\n\r\npage";
    let proxy = proxying(&stage, &answering(answer.to_owned()).await, &[]).await;
    let client = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let by_path = client.get(proxy.text("url")).send().await.unwrap();
    let of = |answer: &reqwest::Response, name: &str| {
        answer.headers().get_all(name).iter().map(|value| value.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for (name, values) in [
        ("content-security-policy", &["default-src 'none'; sandbox"][..]),
        ("referrer-policy", &["no-referrer"]),
        ("x-content-type-options", &["nosniff"]),
        ("content-security-policy-report-only", &[]),
        ("set-cookie", &[]),
        ("location", &["http://127.0.0.1:9/evil"]),
    ] {
        assert_eq!(of(&by_path, name), values, "{name}");
    }
    // A client that follows takes the header with the token along.
    let by_header = client.get(proxy.url()).header("x402-proxy-token", proxy.text("token")).send().await.unwrap();
    assert_eq!(of(&by_header, "location"), [""; 0]);
    assert_eq!(of(&by_header, "x402-location"), ["http://127.0.0.1:9/evil"]);
    proxy.stop().await;
}

#[tokio::test]
async fn clients_that_read_no_answers_keep_nobody_out_for_long() {
    const FILES: usize = 120;
    let stage = Stage::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // Longer than what the system keeps for a client.
    let app = Router::new().fallback(any(async || vec![b'x'; 16 << 20]));
    tokio::spawn(async move { axum::serve(listener, app).await });
    let config = stage.path("x402.toml");
    std::fs::write(&config, "[[route]]\npath = \"/*\"\nfree = true\n").unwrap();
    let mut charge = with_argument(&stage.charge("127.0.0.1:0"), &stage.upstream.url, &url);
    charge.args(["--admin", "127.0.0.1:0", "--config"]).arg(&config);
    let charge = Running::start(&mut below(&["prlimit", &format!("--nofile={FILES}")], &charge)).await;

    let mut clients = Vec::new();
    for _ in 0..FILES {
        let mut client = TcpStream::connect(charge.text("listening")).await.unwrap();
        client.write_all(b"GET /long HTTP/1.1\r\nHost: api.example\r\n\r\n").await.unwrap();
        clients.push(client);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let ready = client().get(format!("http://{}/readyz", charge.text("admin"))).timeout(Duration::from_secs(5));
    assert_eq!(ready.send().await.unwrap().status(), StatusCode::OK);
    // Those that were let in stay; the others do not wait any more.
    clients.truncate(FILES / 4);
    let answer = client().get(charge.url()).timeout(PATIENCE).send().await.unwrap();
    assert_eq!(answer.bytes().await.unwrap().len(), 16 << 20);
    charge.stop().await;
    drop(clients);
}

#[tokio::test]
async fn the_doctor_reads_a_facilitator_that_settles_everywhere() {
    let kinds = json!({ "kinds": [{ "x402Version": 2, "scheme": "exact", "network": "eip155:*" }], "extensions": [], "signers": {} });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().route("/supported", get(async move || kinds.to_string()));
    tokio::spawn(async move { axum::serve(listener, app).await });
    let output = run(x402().args(["doctor", "--network", "base", "--facilitator-url", &url])).await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains(&format!("ok       facilitator    {url} settles on eip155:8453")), "{said}");
}
