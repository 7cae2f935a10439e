//! An extension that somebody else wrote: what payers return of it reaches the handler, within bounds, and binds the payment.

use alloy_signer_local::PrivateKeySigner;
use axum::{Extension as Shared, Router, routing::post};
use bytes::Bytes;
use reqwest_middleware::ClientBuilder;
use serde_json::{Map, Value, json};
use support::{
    chain::Chain,
    devnet::DevnetChain,
    shop::{Answer, Customer, PRICE, Purchase, Shop, evaluate, paid, send},
};
use tower_x402::{
    client::{Payer, PaymentMiddleware, PaymentOutcome, ReceiptExt},
    ledger::Counts,
    protocol::{Extension, PaymentFlow},
    server::{BuildError, Echoed, RequirePaymentLayerBuilder},
};

/// A payer may say whom to greet, with at most 40 bytes.
fn greeting() -> Extension {
    let schema = json!({ "properties": { "name": { "type": "string", "maxLength": 40 } } });
    Extension::new("greeting", json!({ "language": "en" }), schema).check(|info| match info.get("name") {
        None => Ok(()),
        Some(Value::String(name)) if name.len() <= 40 => Ok(()),
        Some(_) => Err("name is a text of at most 40 bytes".to_owned()),
    })
}

struct Stage {
    chain: DevnetChain,
    shop: Shop,
    url: String,
}

impl Stage {
    async fn open(settings: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder) -> Self {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let layer = settings(shop.layer().extension(greeting())).build().unwrap();
        let handled = shop.handled.clone();
        let greet = async move |Shared(echoed): Shared<Echoed>| {
            handled.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let info: Option<Map<String, Value>> = echoed.info("greeting").unwrap();
            assert_eq!(echoed.info::<Value>("payment-identifier").unwrap(), None, "an id is its payer's secret");
            match info.as_ref().and_then(|info| info.get("name")) {
                Some(name) => format!("Hello, {}!", name.as_str().unwrap()),
                None => "Hello!".to_owned(),
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/evaluate?k=1", listener.local_addr().unwrap());
        let router = Router::new().route("/evaluate", post(greet)).layer(layer);
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { chain, shop, url }
    }

    /// Presents a payment by hand, over a socket.
    async fn present(&self, payment: Option<&Value>) -> Answer {
        let mut request = reqwest::Client::new().post(&self.url).body("a");
        if let Some(payment) = payment {
            let signed = paid(evaluate("a"), payment);
            request = request.header("payment-signature", signed.headers()["payment-signature"].clone());
        }
        let response = http::Response::<reqwest::Body>::from(request.send().await.unwrap());
        let (parts, body) = response.into_parts();
        let body: Bytes = http_body_util::BodyExt::collect(body).await.unwrap().to_bytes();
        Answer { status: parts.status, headers: parts.headers, body }
    }

    async fn sign(&self, customer: &Customer) -> (Purchase, Value) {
        let demand = support::shop::demand(&self.present(None).await);
        let purchase = customer.sign(&demand, 0);
        let mut payment = purchase.payload();
        payment["extensions"] = demand["extensions"].clone();
        (purchase, payment)
    }

    async fn income(&self) -> u64 {
        self.chain.balance(self.shop.pay_to).await
    }
}

#[tokio::test]
async fn handler_reads_what_our_payer_adds() {
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let stage = Stage::open(|layer| layer.flow(flow).payment_identifier(true)).await;
        for (extension, name, greeted) in
            [("greeting", Some("Ada"), "Hello, Ada!"), ("greeting", None, "Hello!"), ("other", Some("Ada"), "Hello!")]
        {
            let key = PrivateKeySigner::random();
            stage.chain.mint(key.address(), PRICE).await;
            let info = name.map(|name| ("name".to_owned(), name.into())).into_iter().collect();
            let payer = Payer::builder(key).asset(stage.shop.asset.clone()).extension(extension, info).build();
            let client = ClientBuilder::new(reqwest::Client::new()).with(PaymentMiddleware::new(payer)).build();
            let response = client.post(&stage.url).body("a").send().await.unwrap();
            let outcome = response.receipt().map(|receipt| receipt.outcome);
            assert_eq!((response.status().as_u16(), outcome), (200, Some(PaymentOutcome::Settled)));
            assert_eq!(response.text().await.unwrap(), greeted, "{flow} {extension} {name:?}");
        }
        assert_eq!(stage.income().await, 3 * PRICE);
    }
}

#[tokio::test]
async fn hostile_echo_is_refused_before_anything_is_recorded() {
    let stage = Stage::open(|layer| layer).await;
    let customer = Customer::with_funds(&stage.chain, 9 * PRICE).await;
    let (_, good) = stage.sign(&customer).await;
    let info = |info: Value| json!({ "greeting": { "info": info } });
    for (what, extensions, status, reason) in [
        ("a name that is too long", info(json!({ "language": "en", "name": "x".repeat(41) })), 400, "invalid_payload"),
        ("a name of another type", info(json!({ "language": "en", "name": ["Ada"] })), 400, "invalid_payload"),
        ("9 KiB", info(json!({ "language": "en", "more": "x".repeat(9 << 10) })), 400, "invalid_payload"),
        ("another language", info(json!({ "language": "fr" })), 402, "extension_echo_mismatch"),
        ("no language", info(json!({ "name": "Ada" })), 402, "extension_echo_mismatch"),
        ("an info of another type", info(json!("Ada")), 402, "extension_echo_mismatch"),
        ("an extension of another type", json!({ "greeting": 7 }), 402, "extension_echo_mismatch"),
        ("a list of extensions", json!([{ "greeting": {} }]), 400, "invalid_payload"),
    ] {
        let mut payment = good.clone();
        payment["extensions"] = extensions;
        let answer = stage.present(Some(&payment)).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (status, reason), "{what}: {}", answer.text());
    }
    assert_eq!(stage.shop.counts().await, Counts::default(), "nothing in the ledger");
    assert_eq!((stage.shop.handled(), stage.income().await), (0, 0));
    assert_eq!(stage.present(Some(&good)).await.text(), "Hello!", "after all that, it still buys");
}

#[tokio::test]
async fn extension_that_was_not_declared_is_not_shown_to_the_handler() {
    let stage = Stage::open(|layer| layer).await;
    let customer = Customer::with_funds(&stage.chain, PRICE).await;
    let (_, mut payment) = stage.sign(&customer).await;
    payment["extensions"] = json!({ "Greeting": { "info": { "language": "en", "name": "Eve" } }, "other": [1] });
    assert_eq!(stage.present(Some(&payment)).await.text(), "Hello!");
}

/// Otherwise somebody who sees an authorization on the chain could have the work done for another name.
#[tokio::test]
async fn payment_is_bound_to_what_its_payer_added() {
    let stage = Stage::open(|layer| layer).await;
    let customer = Customer::with_funds(&stage.chain, 9 * PRICE).await;
    let (_, mut payment) = stage.sign(&customer).await;
    let mut named = |name: Option<&str>| {
        match name {
            Some(name) => payment["extensions"]["greeting"]["info"]["name"] = name.into(),
            None => drop(payment["extensions"]["greeting"]["info"].as_object_mut().unwrap().remove("name")),
        }
        payment.clone()
    };
    assert_eq!(stage.present(Some(&named(Some("Ada")))).await.text(), "Hello, Ada!");
    assert_eq!(stage.present(Some(&named(Some("Ada")))).await.text(), "Hello, Ada!", "replayed");
    for other in [Some("Eve"), None] {
        assert_eq!(stage.present(Some(&named(other))).await.status, 409, "{other:?}");
    }
    assert_eq!((stage.shop.handled(), stage.income().await), (1, PRICE));
}

/// What a seller declares later is no reason to lose what was paid for.
#[tokio::test]
async fn stored_answer_is_given_again_whatever_is_declared_since() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let layer = || shop.layer().payment_identifier(true);
    let app = shop.app(layer().extension(greeting()));
    let strict = greeting().check(|_| Err("nobody is greeted any more".to_owned()));
    let german = Extension::new("greeting", json!({ "language": "de" }), json!({}));
    let wordless = Extension::new("greeting", json!({}), json!({}));
    let named = Extension::new("greeting", json!({ "name": "Eve" }), json!({}));
    let later = [
        ("a stricter check", layer().extension(strict)),
        ("another language", layer().extension(german)),
        ("no language", layer().extension(wordless)),
        ("a name", layer().extension(named)),
        ("one more", layer().extension(greeting()).extension(Extension::new("more", json!({}), json!({})))),
        ("none", layer()),
    ]
    .map(|(what, layer)| (what, shop.app(layer)));
    let customer = Customer::with_funds(&chain, 9 * PRICE).await;
    for name in [None, Some("Ada")] {
        let demanded = support::shop::demand(&send(&app, evaluate("a")).await);
        let mut payment = customer.sign(&demanded, 0).payload();
        payment["extensions"] = demanded["extensions"].clone();
        if let Some(name) = name {
            payment["extensions"]["greeting"]["info"]["name"] = name.into();
        }
        let (handled, income) = (shop.handled(), chain.balance(shop.pay_to).await);
        assert_eq!(send(&app, paid(evaluate("a"), &payment)).await.text(), "a");
        for (what, app) in &later {
            let answer = send(app, paid(evaluate("a"), &payment)).await;
            assert_eq!((answer.status.as_u16(), answer.text()), (200, "a"), "{name:?}, {what}: {answer:?}");
            let mut other = payment.clone();
            other["extensions"]["greeting"]["info"]["name"] = "Bob".into();
            let answer = send(app, paid(evaluate("a"), &other)).await;
            assert!([402, 409].contains(&answer.status.as_u16()), "{name:?}, {what}: {answer:?}");
        }
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (handled + 1, income + PRICE));
    }
}

/// Its payer signs anew, for what is declared now, under the identifier that it chose before.
#[tokio::test]
async fn payment_signed_anew_for_another_declaration_gets_the_answer_to_its_identifier() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let declares = |language: &str| {
        let extension = Extension::new("greeting", json!({ "language": language }), json!({}));
        shop.app(shop.layer().payment_identifier(true).extension(extension))
    };
    let customer = Customer::with_funds(&chain, 9 * PRICE).await;
    for app in [declares("en"), declares("de")] {
        let demanded = support::shop::demand(&send(&app, evaluate("a")).await);
        let mut payment = customer.sign(&demanded, 0).payload();
        payment["extensions"] = demanded["extensions"].clone();
        payment["extensions"]["greeting"]["info"]["name"] = "Ada".into();
        payment["extensions"]["payment-identifier"]["info"]["id"] = "a-name-of-32-letters-for-this-one".into();
        let answer = send(&app, paid(evaluate("a"), &payment)).await;
        assert_eq!((answer.status.as_u16(), answer.text()), (200, "a"), "{answer:?}");
    }
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

#[tokio::test]
async fn extensions_that_do_not_fit_together_are_refused_when_the_layer_is_built() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let built = |layer: RequirePaymentLayerBuilder| layer.build().map(drop);
    let twice = |name: &str| Err(BuildError::ExtensionTwice(name.to_owned()));
    assert_eq!(built(shop.layer().extension(greeting()).extension(greeting())), twice("greeting"));
    let ids = Extension::new("payment-identifier", json!({}), json!({}));
    assert_eq!(built(shop.layer().payment_identifier(true).extension(ids)), twice("payment-identifier"));
    let description = || Extension::new("route", json!({}), json!({})).describes_resource();
    assert_eq!(built(shop.layer().extension(description())), Err(BuildError::NoPublicUrl("route".to_owned())));
    assert_eq!(built(shop.layer().public_origin("https://api.example").extension(description())), Ok(()));
    let long = Extension::new("long", json!({ "text": "x".repeat(6_000) }), json!({}));
    assert!(matches!(built(shop.layer().extension(long)), Err(BuildError::OffersTooLarge { .. })));
}
