//! The rules of x402-conformance 1.6.0 (its README) as tests of the binary, by the numbers that they have there.
//!
//! The package's own programs run in `tests/peers/command/rules.rs`. Here is what they leave out, and what they show with a double of a
//! chain or of a facilitator, on a chain: who is charged, how often, and for what. R14 (a crash) is in `restart.rs`.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use alloy_primitives::{Address, B256, U256};
use axum::{Router, extract::Request, response::IntoResponse as _, routing::any};
use futures_util::future::join_all;
use http::{Method, StatusCode};
use reqwest::{Client, Response};
use serde_json::{Value, json};
use tower_x402::{
    Asset,
    eip3009::{Authorization, AuthorizationSigner as _, TokenDomain},
    protocol::{MAX_PAYMENT_HEADER, MAX_REQUIRED_HEADER, decode_header, encode_header},
    signers::PrivateKeySigner,
};

use crate::stage::{PRICE, Running, Stage, facts, run, x402};

const FILE: &str = r#"
price = "$0.001"

[[route]]
path = "/moved"
methods = ["GET"]
price = "$0.0005"
"#;

fn client() -> Client {
    Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build().unwrap()
}

/// Returns the first offer of a 402.
pub(crate) async fn offer(method: Method, url: &str) -> Value {
    let answer = client().request(method, url).send().await.unwrap();
    assert_eq!(answer.status(), 402);
    let demand: Value = decode_header(answer.headers()["payment-required"].as_bytes(), MAX_REQUIRED_HEADER).unwrap();
    demand["accepts"][0].clone()
}

/// Signs a payment for this offer, as it stands.
pub(crate) async fn signed(stage: &Stage, offer: &Value) -> Value {
    let key: PrivateKeySigner = stage.devnet.text("payer_private_key").parse().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut nonce = B256::ZERO;
    getrandom::fill(nonce.as_mut_slice()).unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let authorization = Authorization {
        from: key.address(),
        to: text(&offer["payTo"]).parse().unwrap(),
        value: text(&offer["amount"]).parse().unwrap(),
        valid_after: U256::ZERO,
        valid_before: U256::from(now + offer["maxTimeoutSeconds"].as_u64().unwrap()),
        nonce,
    };
    let asset = Asset::new(
        text(&offer["network"]).parse().unwrap(),
        text(&offer["asset"]).parse().unwrap(),
        text(&offer["extra"]["name"]),
        text(&offer["extra"]["version"]),
    );
    let signature = key.sign(&authorization, &TokenDomain::of(&asset)).await.unwrap();
    let payload = json!({
        "signature": format!("0x{}", alloy_primitives::hex::encode(signature.as_bytes())),
        "authorization": {
            "from": authorization.from,
            "to": authorization.to,
            "value": authorization.value.to_string(),
            "validAfter": "0",
            "validBefore": authorization.valid_before.to_string(),
            "nonce": nonce,
        },
    });
    json!({ "x402Version": 2, "accepted": offer, "payload": payload })
}

pub(crate) async fn send(method: Method, url: &str, payment: &Value, body: &'static str) -> Response {
    let header = encode_header(payment).unwrap();
    client().request(method, url).header("payment-signature", header).body(body).send().await.unwrap()
}

/// The decoded `PAYMENT-RESPONSE`, if there is one.
fn receipt(answer: &Response) -> Option<Value> {
    let header = answer.headers().get("payment-response")?;
    Some(decode_header(header.as_bytes(), MAX_PAYMENT_HEADER).unwrap())
}

#[tokio::test]
async fn r1_r2_r10_a_payment_serves_one_request_and_is_receipted() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let url = format!("{}/echo", charge.url());
    let payment = signed(&stage, &offer(Method::POST, &url).await).await;
    let first = send(Method::POST, &url, &payment, "work").await;
    assert_eq!((first.status().as_u16(), &receipt(&first).unwrap()["success"]), (200, &json!(true)));
    let first = first.text().await.unwrap();
    // The same request gets the same answer, another one gets none.
    assert_eq!(send(Method::POST, &url, &payment, "work").await.text().await.unwrap(), first);
    assert_eq!(send(Method::POST, &url, &payment, "other work").await.status(), 409);
    assert_eq!((stage.upstream.count("/echo"), stage.income().await), (1, PRICE));
    charge.stop().await;
}

#[tokio::test]
async fn r12_eight_copies_at_once_are_one_payment() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let url = format!("{}/echo", charge.url());
    let payment = signed(&stage, &offer(Method::POST, &url).await).await;
    let answers = join_all((0..8).map(|_| send(Method::POST, &url, &payment, "work"))).await;
    let served: Vec<&Response> = answers.iter().filter(|answer| answer.status().is_success()).collect();
    assert!(!served.is_empty() && answers.iter().all(|answer| [200, 409].contains(&answer.status().as_u16())));
    let settled = receipt(served[0]).unwrap();
    assert!(served.iter().all(|answer| receipt(answer).unwrap()["transaction"] == settled["transaction"]));
    assert_eq!((stage.upstream.count("/echo"), stage.income().await), (1, PRICE));
    charge.stop().await;
}

#[tokio::test]
async fn r11_a_payment_is_for_its_route_its_method_and_its_offer() {
    let stage = Stage::new().await;
    let charge = stage.charging_by_file(FILE).await;
    let [cheap, dear] = ["moved", "echo"].map(|path| format!("{}/{path}", charge.url()));
    let of_cheap = offer(Method::GET, &cheap).await;
    assert_eq!(of_cheap["amount"], "500");
    // Another route, another method.
    let payment = signed(&stage, &of_cheap).await;
    assert_eq!(send(Method::GET, &dear, &payment, "").await.status(), 402);
    assert_eq!(send(Method::POST, &cheap, &payment, "").await.status(), 402);
    // Another payee, token, network or amount.
    let of_dear = offer(Method::GET, &dear).await;
    for (field, value) in [
        ("payTo", json!(Address::repeat_byte(0xba))),
        ("asset", json!(Address::repeat_byte(0xba))),
        ("network", json!("eip155:8453")),
        ("amount", json!("1")),
    ] {
        let mut other = of_dear.clone();
        other[field] = value;
        let answer = send(Method::GET, &dear, &signed(&stage, &other).await, "").await;
        assert!([400, 402].contains(&answer.status().as_u16()), "{field}: {answer:?}");
    }
    assert_eq!((stage.upstream.count("/echo"), stage.income().await), (0, 0));
    charge.stop().await;
}

#[tokio::test]
async fn r15_failed_and_redirected_work_is_not_charged() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    for (path, status) in [("fail", 500), ("moved", 302)] {
        let url = format!("{}/{path}", charge.url());
        let payment = signed(&stage, &offer(Method::GET, &url).await).await;
        let answer = send(Method::GET, &url, &payment, "").await;
        let is_charged = receipt(&answer).is_some_and(|receipt| receipt["success"] == true);
        assert_eq!((answer.status().as_u16(), is_charged), (status, false), "{path}");
    }
    charge.stop().await;
    assert_eq!(stage.income().await, 0);
}

#[tokio::test]
async fn r16_head_is_offered_what_get_is_and_never_charged() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let url = format!("{}/echo", charge.url());
    let of_get = offer(Method::GET, &url).await;
    assert_eq!(offer(Method::HEAD, &url).await, of_get);
    let answer = send(Method::HEAD, &url, &signed(&stage, &of_get).await, "").await;
    assert!(!answer.status().is_success() && receipt(&answer).is_none(), "{answer:?}");
    charge.stop().await;
    assert_eq!((stage.upstream.count("/echo"), stage.income().await), (0, 0));
}

#[tokio::test]
async fn r17_no_cache_keeps_a_paid_answer() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let url = format!("{}/echo", charge.url());
    let answer = send(Method::GET, &url, &signed(&stage, &offer(Method::GET, &url).await).await, "").await;
    let cache_control = answer.headers()["cache-control"].to_str().unwrap();
    assert!(cache_control.contains("private") || cache_control.contains("no-store"), "{cache_control}");
    charge.stop().await;
}

#[tokio::test]
async fn r19_what_is_paid_upfront_is_settled_before_the_work() {
    let stage = Stage::new().await;
    let charge = Running::start(stage.charge("127.0.0.1:0").args(["--price", "$0.001", "--flow", "upfront"])).await;
    let url = format!("{}/echo", charge.url());
    let of_upfront = offer(Method::GET, &url).await;
    assert_eq!(of_upfront["extra"]["paymentFlow"], "upfront", "{of_upfront}");
    let answer = send(Method::GET, &url, &signed(&stage, &of_upfront).await, "").await;
    let transaction = receipt(&answer).unwrap()["transaction"].clone();
    let told: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
    assert_eq!(told["headers"]["x402-transaction"], transaction, "the service is told how it was paid");
    // A flow that is not offered.
    let mut other = of_upfront;
    other["extra"]["paymentFlow"] = "escrow".into();
    let answer = send(Method::GET, &url, &signed(&stage, &other).await, "").await;
    assert!([400, 402].contains(&answer.status().as_u16()), "{answer:?}");
    charge.stop().await;
    assert_eq!((stage.upstream.count("/echo"), stage.income().await), (1, PRICE));
}

#[tokio::test]
async fn r22_status_and_headers_of_the_service_stay() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let url = format!("{}/created", charge.url());
    let answer = send(Method::POST, &url, &signed(&stage, &offer(Method::POST, &url).await).await, "").await;
    assert_eq!((answer.status().as_u16(), &answer.headers()["location"]), (201, &"/report/7".parse().unwrap()));
    assert_eq!(receipt(&answer).unwrap()["success"], true);
    charge.stop().await;
}

#[tokio::test]
async fn r23_a_client_that_goes_away_is_charged_once_and_finds_its_answer() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let url = format!("{}/gated", charge.url());
    let payment = signed(&stage, &offer(Method::POST, &url).await).await;
    tokio::select! {
        answer = send(Method::POST, &url, &payment, "work") => panic!("{answer:?}"),
        arrived = stage.upstream.state.arrived.acquire() => arrived.unwrap().forget(),
    }
    stage.upstream.state.gate.add_permits(1);
    let mut answer = send(Method::POST, &url, &payment, "work").await;
    while answer.status() == 409 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        answer = send(Method::POST, &url, &payment, "work").await;
    }
    assert_eq!(receipt(&answer).unwrap()["success"], true);
    assert_eq!(answer.text().await.unwrap(), "done");
    charge.stop().await;
    assert_eq!((stage.upstream.count("/gated"), stage.income().await), (1, PRICE));
}

#[tokio::test]
async fn r24_a_payment_that_cannot_be_read_is_a_bad_request() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let url = format!("{}/echo", charge.url());
    let encoded = |value: Value| encode_header(&value).unwrap();
    for header in
        ["%%%".to_owned(), "bm90IEpTT04=".to_owned(), encoded(json!([])), encoded(json!("text")), encoded(json!(402))]
    {
        let answer = client().get(&url).header("payment-signature", &header).send().await.unwrap();
        assert!([400, 402].contains(&answer.status().as_u16()), "{header}: {answer:?}");
        let body: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        assert!(body["error"].is_string(), "{header}: {body}");
    }
    assert_eq!(stage.upstream.count("/echo"), 0);
    charge.stop().await;
}

/// A facilitator on the devnet.
async fn facilitator(stage: &Stage) -> Running {
    let mut facilitator = x402();
    facilitator.args(["facilitator", "--listen", "127.0.0.1:0", "--rpc-url", stage.devnet.text("rpc_url")]);
    Running::start(facilitator.env("SETTLEMENT_PRIVATE_KEY", stage.devnet.text("settlement_private_key"))).await
}

/// The requirements of a seller that the facilitator settles for.
fn requirements(stage: &Stage) -> Value {
    json!({
        "scheme": "exact",
        "network": stage.devnet.text("network"),
        "asset": stage.devnet.text("asset"),
        "amount": PRICE.to_string(),
        "payTo": stage.devnet.text("payee"),
        "maxTimeoutSeconds": 120,
        "extra": { "name": stage.devnet.text("asset_name"), "version": stage.devnet.text("asset_version") },
    })
}

pub(crate) async fn ask(facilitator: &Running, path: &str, payment: &Value, requirements: &Value) -> Value {
    let body = json!({ "x402Version": 2, "paymentPayload": payment, "paymentRequirements": requirements });
    let post = client().post(format!("{}/{path}", facilitator.url())).header("content-type", "application/json");
    let answer = post.body(body.to_string()).send().await.unwrap();
    assert!(answer.status() != StatusCode::INTERNAL_SERVER_ERROR, "{answer:?}");
    serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap()
}

#[tokio::test]
async fn f1_f2_f10_f12_f13_f14_the_facilitator_refuses_with_a_reason_and_moves_nothing() {
    let stage = Stage::new().await;
    let facilitator = facilitator(&stage).await;
    let required = requirements(&stage);
    let with = |field: &str, value: Value| {
        let mut other = required.clone();
        other[field] = value;
        other
    };
    let garbled = {
        let mut payment = signed(&stage, &required).await;
        payment["payload"]["signature"] = "0x1234".into();
        payment
    };
    let (elsewhere, token) = (json!("eip155:1"), json!(Address::repeat_byte(0xba)));
    let cases = [
        ("F1 malformed", garbled, required.clone()),
        ("F2 underpaid", signed(&stage, &with("amount", json!("1"))).await, required.clone()),
        ("F10 other requirements", signed(&stage, &required).await, with("amount", json!("2000"))),
        ("F10 other payee", signed(&stage, &required).await, with("payTo", token.clone())),
        ("F12 network", signed(&stage, &with("network", elsewhere.clone())).await, with("network", elsewhere.clone())),
        ("F12 asset", signed(&stage, &with("asset", token.clone())).await, with("asset", token.clone())),
        ("F13 asset", signed(&stage, &with("asset", token)).await, required.clone()),
        ("F14 network", signed(&stage, &with("network", elsewhere)).await, required.clone()),
    ];
    for (rule, payment, required) in &cases {
        let verified = ask(&facilitator, "verify", payment, required).await;
        assert_eq!(verified["isValid"], false, "{rule}: {verified}");
        assert!(verified["invalidReason"].is_string(), "{rule}: {verified}");
        let settled = ask(&facilitator, "settle", payment, required).await;
        assert_eq!(settled["success"], false, "{rule}: {settled}");
        assert!(settled["errorReason"].is_string(), "{rule}: {settled}");
    }
    facilitator.stop().await;
    assert_eq!(stage.income().await, 0);
}

#[tokio::test]
async fn f3_f4_f11_verifying_commits_nothing_and_a_payment_settles_once() {
    let stage = Stage::new().await;
    let facilitator = facilitator(&stage).await;
    let required = requirements(&stage);
    let payment = signed(&stage, &required).await;
    for _ in 0..2 {
        assert_eq!(ask(&facilitator, "verify", &payment, &required).await["isValid"], true);
    }
    assert_eq!(stage.income().await, 0);
    let first = ask(&facilitator, "settle", &payment, &required).await;
    assert_eq!(first["success"], true, "{first}");
    let again = ask(&facilitator, "settle", &payment, &required).await;
    assert!(again["success"] == false || again["transaction"] == first["transaction"], "{again}");
    assert_eq!(stage.income().await, PRICE);
    // F4: its nonce is used, whatever else is signed with it.
    assert_eq!(ask(&facilitator, "verify", &payment, &required).await["isValid"], false);
    facilitator.stop().await;
}

#[tokio::test]
async fn s5_each_kind_that_the_facilitator_lists_is_answered() {
    let stage = Stage::new().await;
    let facilitator = facilitator(&stage).await;
    let supported = client().get(format!("{}/supported", facilitator.url())).send().await.unwrap();
    let supported: Value = serde_json::from_slice(&supported.bytes().await.unwrap()).unwrap();
    let kinds = supported["kinds"].as_array().unwrap();
    assert!(!kinds.is_empty(), "{supported}");
    for kind in kinds.iter().filter(|kind| kind["x402Version"] == 2) {
        let mut required = requirements(&stage);
        (required["scheme"], required["network"]) = (kind["scheme"].clone(), kind["network"].clone());
        let payment = json!({ "x402Version": 2, "accepted": required, "payload": {} });
        let verified = ask(&facilitator, "verify", &payment, &required).await;
        assert_eq!(verified["isValid"], false, "{kind}: {verified}");
        assert!(verified["invalidReason"].is_string(), "{kind}: {verified}");
    }
    facilitator.stop().await;
}

/// A seller that says this in its 402, and keeps what it is paid with.
async fn seller(demand: Value, v1: Value) -> (String, Arc<Mutex<Vec<Value>>>) {
    let paid = Arc::<Mutex<Vec<Value>>>::default();
    let kept = paid.clone();
    let answer = async move |request: Request| {
        if let Some(header) = request.headers().get("x-payment") {
            panic!("paid in v1: {header:?}");
        }
        match request.headers().get("payment-signature") {
            Some(header) => {
                kept.lock().unwrap().push(decode_header(header.as_bytes(), MAX_PAYMENT_HEADER).unwrap());
                let receipt =
                    json!({ "success": true, "transaction": B256::repeat_byte(7), "network": "eip155:84532" });
                ([("payment-response", encode_header(&receipt).unwrap())], "served").into_response()
            }
            None => {
                let header = encode_header(&demand).unwrap();
                (StatusCode::PAYMENT_REQUIRED, [("payment-required", header)], v1.to_string()).into_response()
            }
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(any(answer))).await });
    (url, paid)
}

fn demand(accepts: &[Value]) -> Value {
    json!({ "x402Version": 2, "resource": { "url": "http://127.0.0.1/" }, "accepts": accepts })
}

#[tokio::test]
async fn c1_a_402_is_never_a_success_of_pay() {
    let stage = Stage::new().await;
    let charge = stage.charging().await;
    let mut pay = stage.pay(&format!("{}/echo", charge.url()));
    let unfunded = B256::repeat_byte(0x46).to_string();
    let output = run(pay.env("PAYER_PRIVATE_KEY", unfunded)).await;
    assert_eq!((output.status.code(), &facts(&output)["status"]), (Some(1), &json!(402)));
    charge.stop().await;
}

#[tokio::test]
async fn c2_pay_chooses_an_offer_of_its_networks_within_its_budget() {
    let stage = Stage::new().await;
    let with = |changes: &[(&str, Value)]| {
        let mut offer = requirements(&stage);
        changes.iter().for_each(|(field, value)| offer[*field] = value.clone());
        offer
    };
    let offers = [
        with(&[("network", json!("solana:EtWTRABZaYq6iMfeYKouRu166VU2xqa1"))]),
        with(&[("network", json!("eip155:1"))]),
        with(&[("amount", json!("50000000"))]),
        with(&[("amount", json!("2000"))]),
    ];
    let (url, paid) = seller(demand(&offers), json!({})).await;
    let output = run(stage.pay(&url).args(["--network", "base-sepolia", "--budget", "$0.01"])).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let paid = paid.lock().unwrap().clone();
    assert_eq!((paid.len(), &paid[0]["accepted"]), (1, &offers[3]));
}

#[tokio::test]
async fn c3_pay_stays_with_v2_if_the_402_has_a_body_of_v1_too() {
    let stage = Stage::new().await;
    let v1 = json!({
        "x402Version": 1,
        "error": "X-PAYMENT header is required",
        "accepts": [{
            "scheme": "exact",
            "network": "base-sepolia",
            "maxAmountRequired": "1000",
            "resource": "http://127.0.0.1/",
            "description": "",
            "mimeType": "",
            "payTo": stage.devnet.text("payee"),
            "maxTimeoutSeconds": 120,
            "asset": stage.devnet.text("asset"),
            "extra": { "name": stage.devnet.text("asset_name"), "version": stage.devnet.text("asset_version") },
        }],
    });
    let (url, paid) = seller(demand(&[requirements(&stage)]), v1).await;
    assert!(run(&mut stage.pay(&url)).await.status.success());
    assert_eq!(paid.lock().unwrap()[0]["x402Version"], 2);
}
