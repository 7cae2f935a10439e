//! The URL in a 402 if the seller configured none: it has the host of the request, and only in that request's answer.

use std::sync::{Arc, atomic::Ordering};

use axum::body::Body;
use futures_util::future::join_all;
use http::{Request, StatusCode};
use serde_json::{Value, json};
use support::{
    scripted::{Scripted, customer, echo, layer, record, serve},
    shop::{Answer, App, demand, evaluate, send},
};
use tower_x402::{
    Usdc,
    server::{Quote, RequirePaymentLayerBuilder},
};

/// Returns the paid request, sent to `host`.
fn at(host: &str) -> Request<Body> {
    with(evaluate("a"), &[("host", host)])
}

fn with(mut request: Request<Body>, headers: &[(&'static str, &str)]) -> Request<Body> {
    for (name, value) in headers {
        request.headers_mut().append(*name, value.parse().unwrap());
    }
    request
}

/// Returns the resource URL of the answer, which is the same in both versions.
fn named(answer: &Answer) -> String {
    let url = demand(answer)["resource"]["url"].as_str().unwrap().to_owned();
    assert_eq!(answer.json()["accepts"][0]["resource"], json!(url), "in v1 as in v2");
    assert_eq!(answer.headers["cache-control"], "no-store", "it is for whoever asked");
    url
}

async fn ask(app: &App, request: Request<Body>) -> String {
    let answer = send(app, request).await;
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED);
    named(&answer)
}

fn open(layer: RequirePaymentLayerBuilder) -> App {
    serve(layer, echo).0
}

/// Returns a layer with a fixed price, and one with a computed price.
fn priced() -> [RequirePaymentLayerBuilder; 2] {
    let facilitator = Arc::new(Scripted::new());
    let computed = layer(&facilitator).price_with(|request| {
        assert!(request.headers.get("host").is_none() && request.uri.host().is_none(), "prices see no host");
        std::future::ready(Ok(Quote::Amount(Usdc::from_atomic(1_000))))
    });
    [layer(&facilitator), computed]
}

#[tokio::test]
async fn without_an_origin_the_402_names_the_host_that_was_asked() {
    for layer in priced() {
        let app = open(layer);
        for (host, url) in [
            ("api.example", "https://api.example/evaluate"),
            ("api.example:8443", "https://api.example:8443/evaluate"),
            ("localhost:4021", "http://localhost:4021/evaluate"),
            ("127.0.0.1:4021", "http://127.0.0.1:4021/evaluate"),
            ("[::1]:4021", "http://[::1]:4021/evaluate"),
            ("[2001:db8::1]", "https://[2001:db8::1]/evaluate"),
        ] {
            assert_eq!(ask(&app, at(host)).await, url);
        }
        // HTTP/2 has host and scheme in the URI.
        let request = Request::post("http://api.example:8080/evaluate?k=1").body(Body::empty()).unwrap();
        assert_eq!(ask(&app, request).await, "http://api.example:8080/evaluate");
    }
}

#[tokio::test]
async fn malformed_host_is_not_repeated_in_the_402() {
    let long = "a".repeat(64 * 1024);
    for layer in priced() {
        let app = open(layer);
        for host in [
            "",
            "user:secret@api.example",
            "api.example/evil?x=",
            "a.example, b.example",
            "\"}],\"payTo\":\"",
            "<script>alert(1)</script>",
            "api.example:99999",
            "b\u{fc}cher.example",
            &long,
        ] {
            assert_eq!(ask(&app, at(host)).await, "/evaluate", "{host:?}");
        }
        assert_eq!(ask(&app, with(at("a.example"), &[("host", "a.example")])).await, "/evaluate");
        assert_eq!(ask(&app, evaluate("a")).await, "/evaluate", "HTTP/1.0 has none");
    }
}

#[tokio::test]
async fn host_of_one_request_is_never_in_the_402_of_another() {
    for layer in priced() {
        let app = open(layer);
        let hosts: Vec<String> = (0..500).map(|n| format!("host-{}.example", n % 7)).collect();
        let answers = join_all(hosts.iter().map(|host| ask(&app, at(host)))).await;
        for (host, url) in hosts.iter().zip(answers) {
            assert_eq!(url, format!("https://{host}/evaluate"));
        }
    }
}

#[tokio::test]
async fn a_configured_url_wins_over_any_host() {
    for [fixed, computed] in [priced(), priced()] {
        for (layer, url) in [
            (fixed.public_origin("https://api.example/"), "https://api.example/evaluate"),
            (computed.resource_url("https://api.example/x?y=1"), "https://api.example/x?y=1"),
        ] {
            let app = open(layer.trust_forwarded_proto(true));
            let forwarded = [("x-forwarded-proto", "http"), ("x-forwarded-host", "evil.example")];
            for request in [at("evil.example"), evaluate("a"), with(at("evil.example"), &forwarded)] {
                assert_eq!(ask(&app, request).await, url);
            }
        }
    }
    let emptied = layer(&Arc::new(Scripted::new())).public_origin("https://api.example").public_origin("");
    assert_eq!(ask(&open(emptied), at("b.example")).await, "https://b.example/evaluate", "an empty one is none");
}

#[tokio::test]
async fn forwarded_scheme_is_read_only_if_the_seller_trusts_the_proxy() {
    let facilitator = Arc::new(Scripted::new());
    let (app, trusting) = (open(layer(&facilitator)), open(layer(&facilitator).trust_forwarded_proto(true)));
    for (host, header, url, believed) in [
        ("localhost", ("x-forwarded-proto", "https"), "http://localhost/evaluate", "https://localhost/evaluate"),
        ("a.example", ("x-forwarded-proto", "http"), "https://a.example/evaluate", "http://a.example/evaluate"),
        ("a.example", ("forwarded", "for=_a;proto=http"), "https://a.example/evaluate", "http://a.example/evaluate"),
        ("a.example", ("x-forwarded-proto", "gopher"), "https://a.example/evaluate", "https://a.example/evaluate"),
        ("a.example", ("x-forwarded-host", "b.example"), "https://a.example/evaluate", "https://a.example/evaluate"),
    ] {
        let request = || with(at(host), &[header]);
        assert_eq!(ask(&app, request()).await, url, "{header:?}");
        assert_eq!(ask(&trusting, request()).await, believed, "{header:?}");
    }
}

/// The signature does not cover the host, so another name of the same server cannot make a client pay twice.
#[tokio::test]
async fn a_payment_for_an_offer_made_at_one_host_is_good_at_any() {
    for in_v1 in [false, true] {
        let facilitator = Arc::new(Scripted::new());
        let (app, handled) = serve(layer(&facilitator), echo);
        let buyer = customer();
        let purchase = match in_v1 {
            true => buyer.pay_v1(&app, at("evil.example")).await,
            false => buyer.pay(&app, at("evil.example")).await,
        };
        let presented = |host| if in_v1 { purchase.on_v1(at(host)) } else { purchase.on(at(host)) };
        for host in ["a.example", "b.example:8080", "user@nowhere", "evil.example"] {
            let answer = send(&app, presented(host)).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{host}: {answer:?}");
        }
        assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 1), "one purchase");
        let elsewhere = Request::post("http://c.example/evaluate?k=1").body(Body::from("a")).unwrap();
        let elsewhere = if in_v1 { purchase.on_v1(elsewhere) } else { purchase.on(elsewhere) };
        assert_eq!(send(&app, elsewhere).await.text(), "a");
        let unnamed = record(&facilitator, &purchase).await.unwrap().request;

        // Without a host, the fingerprint is the same.
        let other = buyer.pay(&app, evaluate("a")).await;
        assert_eq!(send(&app, other.on(evaluate("a"))).await.status, StatusCode::OK);
        assert_eq!(record(&facilitator, &other).await.unwrap().request, unnamed);
    }
}

#[tokio::test]
async fn a_refusal_names_the_host_that_was_asked_too() {
    let facilitator = Arc::new(Scripted::new());
    let app = open(layer(&facilitator));
    let mut purchase = customer().pay(&app, at("a.example")).await;
    purchase.signature = alloy_primitives::Bytes::from(vec![0; 65]);
    purchase.authorization.value += alloy_primitives::U256::from(1);
    for host in ["a.example", "b.example"] {
        for request in [purchase.on(at(host)), purchase.on_v1(at(host)), with(at(host), &[("x-payment", "{}")])] {
            let answer = send(&app, request).await;
            assert!(matches!(answer.status.as_u16(), 400 | 402), "{answer:?}");
            assert_eq!(named(&answer), format!("https://{host}/evaluate"));
        }
    }
}

#[tokio::test]
async fn the_page_shows_the_address_that_was_asked() {
    let app = open(layer(&Arc::new(Scripted::new())));
    let visit = async |host: &str| {
        let browser = [("host", host), ("accept", "text/html"), ("user-agent", "Mozilla/5.0")];
        let request = Request::get("/essay?page=2").body(Body::empty()).unwrap();
        send(&app, with(request, &browser)).await
    };
    for (host, shown) in [
        ("essays.example", "<code id=\"address\">https://essays.example/essay?page=2</code>"),
        ("\"><script>alert(1)</script>", "<code id=\"address\">/essay?page=2</code>"),
        ("'; rm -rf '", "<code id=\"address\">/essay?page=2</code>"),
    ] {
        let answer = visit(host).await;
        assert_eq!(
            (answer.status, &answer.headers["cache-control"]),
            (StatusCode::PAYMENT_REQUIRED, &"no-store".parse().unwrap())
        );
        assert!(answer.text().contains(shown), "{shown} in {}", answer.text());
        assert!(host.contains("example") || !answer.text().contains(host), "{host}");
    }
}

/// The 402 names the URL that a real client requested.
#[tokio::test]
async fn over_http_the_402_names_the_url_that_was_asked() {
    let facilitator = Arc::new(Scripted::new());
    let shop = axum::Router::new().route("/evaluate", axum::routing::post(async || "a"));
    let shop = shop.layer(layer(&facilitator).build().unwrap());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, shop).await });
    for host in [address.to_string(), format!("localhost:{}", address.port())] {
        let url = format!("http://{host}/evaluate");
        let answer = reqwest::Client::builder()
            .resolve("localhost", address)
            .build()
            .unwrap()
            .post(format!("{url}?k=1"))
            .send()
            .await
            .unwrap();
        let body: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        assert_eq!(body["accepts"][0]["resource"], json!(url));
    }
}
