//! What `x402 charge` does to requests and answers.

use http::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::Command,
    time::timeout,
};

use tower_x402::protocol::encode_header;

use crate::{
    rules::{offer, signed},
    stage::{PATIENCE, PRICE, Running, Stage, facts, run},
};

const FILE: &str = r#"
[[route]]
path = "/stream"
free = true

[[route]]
path = "/upload"
free = true

[[route]]
path = "/cheap"
max_price = "$0.001"

[[route]]
path = "/dear"
max_price = "$0.001"

[[route]]
path = "/echo"
methods = ["POST"]
price = "$0.0005"
price_per_kilobyte = "$0.0001"
"#;

async fn paid(command: &mut Command) -> Value {
    facts(&run(command).await)
}

/// Sends a request as it is written, and returns the answer.
async fn raw(charge: &Running, request: &str) -> String {
    let mut stream = TcpStream::connect(charge.text("listening")).await.unwrap();
    stream.write_all(request.replace('\n', "\r\n").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_client_cannot_forge_who_paid() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let answer = paid(stage.pay(&format!("{}/echo", charge.url())).args([
        "-H",
        "x402-payer: 0xforged",
        "-H",
        "X402_Payer: 0xforged",
        "-H",
        "x402-anything: forged",
        "-H",
        "x-forwarded-for: 6.6.6.6",
    ]))
    .await;
    let body: Value = serde_json::from_str(answer["body"].as_str().unwrap()).unwrap();
    let headers = body["headers"].as_object().unwrap();
    assert_eq!(headers["x402-payer"], stage.devnet.ready["payer"]);
    assert_eq!(headers["x402-payment"], answer["nonce"]);
    assert_eq!((&headers["x402-amount"], &headers["x402-attempt"]), (&json!("1000"), &json!("1")));
    assert_eq!(headers["x-forwarded-for"], "127.0.0.1");
    assert!(!headers.values().any(|value| value.as_str().unwrap().contains("forged")), "{body}");
    assert!(!headers.contains_key("payment-signature"), "{body}");
    charge.stop().await;
}

#[tokio::test]
async fn a_failed_answer_is_not_charged_for() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let output = run(stage.pay(&format!("{}/fail", charge.url())).args(["--attempts", "1"])).await;
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(facts(&output)["status"], 500);
    charge.stop().await;
    assert_eq!(stage.income().await, 0);
}

#[tokio::test]
async fn answers_come_as_they_are_made() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(FILE).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut free = client.get(format!("{}/stream", charge.url())).send().await.unwrap();
    assert_eq!(timeout(PATIENCE, free.chunk()).await.unwrap().unwrap().unwrap(), "data: 0\n\n");
    // Only now is the second event made.
    stage.upstream.state.gate.add_permits(1);
    assert_eq!(timeout(PATIENCE, free.chunk()).await.unwrap().unwrap().unwrap(), "data: 1\n\n");
    assert_eq!(timeout(PATIENCE, free.chunk()).await.unwrap().unwrap(), None);
    charge.stop().await;

    let charge = stage.charging().await;
    let file = stage.path("events");
    let mut pay = stage.pay(&format!("{}/stream", charge.url()));
    let mut paying = pay.arg("-o").arg(&file).spawn().unwrap();
    let first = async {
        while !std::fs::read_to_string(&file).is_ok_and(|text| text == "data: 0\n\n") {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, first).await.unwrap();
    stage.upstream.state.gate.add_permits(1);
    assert!(timeout(PATIENCE, paying.wait()).await.unwrap().unwrap().success());
    assert_eq!(crate::stage::read(&file), "data: 0\n\ndata: 1\n\n");
    charge.stop().await;
    assert_eq!(stage.income().await, PRICE);
}

#[tokio::test]
async fn bodies_reach_the_service_as_they_are_sent() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(FILE).await;
    let mut stream = TcpStream::connect(charge.text("listening")).await.unwrap();
    let head = "POST /upload HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(format!("{head}5\r\nfirst\r\n").as_bytes()).await.unwrap();
    // Only now is the rest sent.
    timeout(PATIENCE, stage.upstream.state.arrived.acquire()).await.unwrap().unwrap().forget();
    stream.write_all(b"6\r\nsecond\r\n0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("11"), "{answer}");
    charge.stop().await;
}

#[tokio::test]
async fn a_body_of_unknown_length_has_a_bound_too() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(&format!("max_body = 1000\n{FILE}")).await;
    let mut request =
        String::from("POST /upload HTTP/1.1\nHost: localhost\nConnection: close\nTransfer-Encoding: chunked\n\n");
    request += &format!("3e8\n{0}\n3e8\n{0}\n0\n\n", "x".repeat(1_000));
    let answer = raw(&charge, &request).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    charge.stop().await;
}

#[tokio::test]
async fn the_service_says_what_a_voucher_is_charged() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(FILE).await;
    let journal = stage.path("journal");
    let pay = |path: &str| {
        let mut command = stage.pay(&format!("{}{path}", charge.url()));
        command.args(["-d", "", "--attempts", "1", "--budget", "$0.05", "--journal"]).arg(&journal);
        command
    };
    for _ in 0..2 {
        let answer = paid(&mut pay("/cheap")).await;
        assert_eq!(
            (&answer["status"], &answer["amount"], &answer["voucher"]),
            (&json!(200), &json!("400"), &json!(true)),
            "{answer}"
        );
    }
    let answer = paid(&mut pay("/dear")).await;
    assert_eq!(answer["status"], 500, "more than the price: {answer}");
    // It claims before it stops.
    charge.stop().await;
    assert_eq!(stage.income().await, 800);
}

#[tokio::test]
async fn a_price_that_cannot_be_read_charges_nothing() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file("upto = true\nprice = \"$0.001\"").await;
    let answer = paid(stage.pay(&format!("{}/odd", charge.url())).args(["-d", "", "--attempts", "1"])).await;
    assert_eq!(answer["status"], 502);
    charge.stop().await;
    assert_eq!(stage.income().await, 0);
}

#[tokio::test]
async fn a_dry_run_of_a_service_that_fails_gives_no_price() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file("[[route]]\npath = \"/fail\"\nfree = true").await;
    let output = run(stage.pay(&format!("{}/fail", charge.url())).arg("--dry-run")).await;
    let (code, said) = (output.status.code(), facts(&output));
    assert_eq!((code, &said["would_pay"], &said["status"]), (Some(1), &json!(false), &json!(500)));
    assert_eq!(said["reason"], "no price is known: the answer is 500 Internal Server Error");
    charge.stop().await;
}

#[cfg(unix)]
#[tokio::test]
async fn a_ledger_that_everybody_could_read_is_tightened() {
    use std::os::unix::fs::PermissionsExt as _;
    let stage = Stage::new().await;
    let path = stage.path("payments.sqlite");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let charge = stage.charging().await;
    let mode = |name: &str| std::fs::metadata(stage.path(name)).unwrap().permissions().mode() & 0o007;
    assert_eq!((mode("payments.sqlite"), mode("payments.sqlite-wal")), (0, 0));
    charge.stop().await;
}

#[tokio::test]
async fn a_body_is_charged_for_by_its_size() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(FILE).await;
    let answer = paid(stage.pay(&format!("{}/echo", charge.url())).args(["-d", &"x".repeat(1_001)])).await;
    assert_eq!(answer["amount"], "700", "{answer}");
    charge.stop().await;
}

#[tokio::test]
async fn nothing_is_passed_on_that_no_route_is_for() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(FILE).await;
    for (request, status, code) in [
        ("GET /echo HTTP/1.1", 404, "no_route"),
        ("GET /nowhere HTTP/1.1", 404, "no_route"),
        ("GET /stream/../echo HTTP/1.1", 400, "ambiguous_path"),
        ("GET /stream%2f..%2fecho HTTP/1.1", 400, "ambiguous_path"),
        ("GET //stream HTTP/1.1", 400, "ambiguous_path"),
        ("GET /stream%3Fx HTTP/1.1", 400, "ambiguous_path"),
        ("GET /stream%23x HTTP/1.1", 400, "ambiguous_path"),
        ("POST /echo HTTP/1.1\nContent-Length: 99999999", 413, "body_too_large"),
    ] {
        let answer = raw(&charge, &format!("{request}\nHost: localhost\nConnection: close\n\n")).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(code), "{request}: {answer}");
    }
    assert_eq!(stage.upstream.count("/echo"), 0);
    charge.stop().await;
}

#[tokio::test]
async fn a_websocket_is_refused_on_every_route_paid_or_not() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file("price = \"$0.001\"\n[[route]]\npath = \"/gated\"\nfree = true\n").await;
    let offered = offer(Method::GET, &format!("{}/echo", charge.url())).await;
    let payment = encode_header(&signed(&stage, &offered).await).unwrap();
    for more in ["/gated", "/echo", &format!("/echo HTTP/1.1\nPAYMENT-SIGNATURE: {payment}")] {
        let (path, more) = more.split_once(" HTTP/1.1").unwrap_or((more, ""));
        // As a browser opens one; the server closes the connection after its answer or waits for another request.
        let handshake = format!(
            "GET {path} HTTP/1.1\nHost: localhost\nConnection: Upgrade, close\nUpgrade: websocket\n\
             Sec-WebSocket-Version: 13\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=={more}\n\n"
        );
        let answer = raw(&charge, &handshake).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 400 ") && !head.to_lowercase().contains("payment-response"), "{answer}");
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"], "upgrade_not_payable");
        assert!(body["detail"].as_str().unwrap().contains("WebSockets"), "{body}");
    }
    charge.stop().await;
    assert_eq!((stage.upstream.count("/echo"), stage.upstream.count("/gated"), stage.income().await), (0, 0, 0));
}

#[tokio::test]
async fn routes_are_read_again_and_a_bad_file_changes_nothing() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(FILE).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let status = async || client.get(format!("{}/echo", charge.url())).send().await.unwrap().status().as_u16();
    assert_eq!(status().await, 404);
    stage.reload(&charge, "[[route]]\npath = \"/*\"\nfree = true", ("/echo", 200)).await;
    std::fs::write(stage.path("x402.toml"), "[[route]]\npath = \"/*\"\nfree = maybe").unwrap();
    charge.signal("HUP").await;
    assert_eq!(status().await, 200);
    stage.reload(&charge, "price = \"$0.002\"", ("/echo", 402)).await;
    charge.stop().await;
}

#[tokio::test]
async fn the_operator_sees_whether_it_is_ready_and_what_was_paid() {
    let stage = Stage::new().await;
    let admin = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let charge =
        Running::start(stage.charge("127.0.0.1:0").args(["--price", "$0.001", "--admin", &admin.to_string()])).await;
    let answer = paid(&mut stage.pay(&format!("{}/echo", charge.url()))).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let get = async |path: &str| {
        let answer = client.get(format!("http://{admin}{path}")).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    assert_eq!(get("/readyz").await, (200, r#"{"ready":true,"reasons":[]}"#.to_owned()));
    assert!(get("/metrics").await.1.contains("x402_requests_total"));
    let payments = get("/payments?state=all").await.1;
    assert_eq!(payments.lines().count(), 1);
    assert!(payments.contains(answer["nonce"].as_str().unwrap()));
    assert_eq!(get("/payments?state=odd").await.0, 400);
    assert!(get("/report").await.1.contains("\"payments\":[{"));
    let elsewhere = client.get(format!("http://{admin}/payments")).header("host", "evil.example").send().await.unwrap();
    assert_eq!(elsewhere.status(), 403);
    charge.stop().await;
}
