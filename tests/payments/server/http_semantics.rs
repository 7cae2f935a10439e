//! HTTP semantics of a paid service: methods, statuses, caches, CORS, streams, computed prices.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use support::{
    chain::Chain,
    devnet::DevnetChain,
    shop::{Customer, PRICE, Shop, demand, evaluate, send, try_send},
};
use tower_x402::{
    Network, Usdc,
    protocol::PaymentFlow,
    server::{BuildError, PriceError, Quote, RequirePaymentLayer},
};

async fn open() -> (DevnetChain, Shop, Customer) {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let customer = Customer::with_funds(&chain, 100 * PRICE).await;
    (chain, shop, customer)
}

fn bare(method: &str) -> http::request::Builder {
    Request::builder().method(method).uri("/evaluate")
}

#[tokio::test]
async fn a_head_request_is_neither_served_free_nor_charged() {
    let (chain, shop, customer) = open().await;
    let app = shop.app(shop.layer());
    let unpaid = send(&app, bare("HEAD").body(Body::empty()).unwrap()).await;
    assert_eq!(unpaid.status, StatusCode::PAYMENT_REQUIRED);
    assert!(unpaid.headers.contains_key("payment-required"), "the price can be asked for");
    let purchase = customer.pay(&app, bare("GET").body(Body::empty()).unwrap()).await;
    let paid = send(&app, purchase.on(bare("HEAD").body(Body::empty()).unwrap())).await;
    assert_eq!(paid.status, StatusCode::BAD_REQUEST);
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (0, 0));
    let get = send(&app, purchase.on(bare("GET").body(Body::empty()).unwrap())).await;
    assert_eq!(get.status, StatusCode::OK, "and the payment is still good");
}

#[tokio::test]
async fn only_preflights_pass_unpaid() {
    let (_chain, shop, _) = open().await;
    let preflight = || {
        bare("OPTIONS")
            .header("origin", "https://app.example")
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "payment-signature, access-control-expose-headers")
    };
    let layer = shop.layer().build().unwrap();
    let inner = tower::service_fn(async |request: Request<tower_x402::server::RequestBody<Body>>| {
        assert!(request.extensions().get::<tower_x402::server::VerifiedPayment>().is_none());
        Ok::<_, std::convert::Infallible>(
            Response::builder().status(204).header("x-inner", "1").body(Body::empty()).unwrap(),
        )
    });
    let app = support::shop::app(tower::Layer::layer(&layer, inner));
    let passed = send(&app, preflight().body(Body::empty()).unwrap()).await;
    assert_eq!((passed.status.as_u16(), passed.headers.contains_key("x-inner")), (204, true), "the service answers it");
    for (what, request) in [
        ("plain OPTIONS", bare("OPTIONS").body(Body::empty()).unwrap()),
        ("no origin", bare("OPTIONS").header("access-control-request-method", "GET").body(Body::empty()).unwrap()),
        ("no method", bare("OPTIONS").header("origin", "https://a.example").body(Body::empty()).unwrap()),
        (
            "not OPTIONS",
            bare("GET")
                .header("origin", "a")
                .header("access-control-request-method", "GET")
                .body(Body::empty())
                .unwrap(),
        ),
    ] {
        assert_eq!(send(&app, request).await.status, StatusCode::PAYMENT_REQUIRED, "{what}");
    }

    let app = shop.app(shop.layer().answer_preflights(true));
    let answered = send(&app, preflight().body(Body::empty()).unwrap()).await;
    assert_eq!(answered.status, StatusCode::NO_CONTENT);
    assert_eq!(answered.headers["access-control-allow-origin"], "*");
    assert_eq!(answered.headers["access-control-allow-methods"], "POST");
    assert!(answered.headers["access-control-allow-headers"].to_str().unwrap().contains("payment-signature"));
    let unpaid = send(&app, bare("GET").header("origin", "https://app.example").body(Body::empty()).unwrap()).await;
    assert_eq!(unpaid.headers["access-control-allow-origin"], "*");
    assert!(unpaid.headers["access-control-expose-headers"].to_str().unwrap().contains("PAYMENT-REQUIRED"));
    assert_eq!(shop.handled(), 0);
}

/// And nothing is charged: the payment is good for a request that can be answered.
#[tokio::test]
async fn an_upgrade_is_refused_paid_or_not() {
    let (_chain, shop, customer) = open().await;
    let upgrade = |method| {
        let request = bare(method).header("connection", "upgrade").header("upgrade", "websocket");
        request.header("sec-websocket-version", "13").header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
    };
    let app = shop.app(shop.layer());
    let purchase = customer.pay(&app, bare("GET").body(Body::empty()).unwrap()).await;
    for request in
        [upgrade("GET").body(Body::empty()).unwrap(), purchase.on(upgrade("GET").body(Body::empty()).unwrap())]
    {
        let answer = send(&app, request).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.json()["error"], "upgrade_not_payable", "{answer:?}");
    }
    assert_eq!(shop.handled(), 0);
    let answered = send(&app, purchase.on(bare("GET").body(Body::empty()).unwrap())).await;
    assert_eq!((answered.status, shop.handled()), (StatusCode::OK, 1));
}

#[tokio::test]
async fn a_paid_response_stays_out_of_shared_caches() {
    let (_chain, shop, customer) = open().await;
    let app = shop.app_with(shop.layer(), |_, _| async {
        let response =
            Response::builder().header("cache-control", "public, max-age=60, s-maxage=600").header("etag", "\"1\"");
        Ok(response.body(Body::from("x")).unwrap())
    });
    let purchase = customer.pay(&app, evaluate("a")).await;
    for _ in 0..2 {
        let answer = send(&app, purchase.on(evaluate("a"))).await;
        assert_eq!(answer.headers[header::CACHE_CONTROL], "private, max-age=60");
        assert_eq!(answer.headers["etag"], "\"1\"", "the handler's own headers, replayed too");
    }
}

/// A classifier for a service that reports failures inside a 200.
#[tokio::test]
async fn success_classifier_decides_what_is_charged() {
    let (chain, shop, customer) = open().await;
    let layer = shop.layer().success(|response| {
        response.status.is_success() && response.headers.get("grpc-status").is_none_or(|status| status == "0")
    });
    let app = shop.app_with(layer, |_, body| async move {
        let status = std::str::from_utf8(&body).unwrap().to_owned();
        Ok(Response::builder().header("grpc-status", status).body(Body::empty()).unwrap())
    });
    for (status, charged) in [("13", 0), ("0", PRICE)] {
        let purchase = customer.pay(&app, evaluate(status)).await;
        assert_eq!(send(&app, purchase.on(evaluate(status))).await.status, StatusCode::OK);
        assert_eq!(chain.balance(shop.pay_to).await, charged, "grpc-status {status}");
    }
}

#[tokio::test]
async fn a_response_streams_as_it_is_made_and_replays_with_its_trailers() {
    let (_chain, shop, customer) = open().await;
    let (sender, receiver) = tokio::sync::mpsc::channel::<&'static str>(1);
    let receiver = std::sync::Arc::new(tokio::sync::Mutex::new(Some(receiver)));
    let app = shop.app_with(shop.layer(), move |_, _| {
        let receiver = receiver.clone();
        async move {
            let receiver = receiver.lock().await.take().expect("one run");
            let chunks = futures_util::stream::unfold(receiver, |mut receiver| async {
                receiver.recv().await.map(|chunk| (Ok::<_, std::io::Error>(Bytes::from(chunk)), receiver))
            });
            let trailers = HeaderMap::from_iter([("x-checksum".parse().unwrap(), "7".parse().unwrap())]);
            let body = Body::from_stream(chunks).with_trailers(std::future::ready(Some(Ok(trailers))));
            Ok(Response::new(Body::new(body)))
        }
    });
    let purchase = customer.pay(&app, evaluate("a")).await;
    sender.send("first").await.unwrap();
    let response = try_send(&app, purchase.on(evaluate("a"))).await.unwrap();
    assert!(response.headers().contains_key("payment-response"), "the head is there before the rest is made");
    let mut frames = response.into_body().into_data_stream();
    for chunk in ["first", "second"] {
        if chunk == "second" {
            sender.send(chunk).await.unwrap();
        }
        let arrived = tokio::time::timeout(Duration::from_secs(5), frames.next()).await.expect("not held back");
        assert_eq!(arrived.unwrap().unwrap(), chunk);
    }
    drop(sender);
    assert!(frames.next().await.is_none());
    let replay = try_send(&app, purchase.on(evaluate("a"))).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(replay.trailers().unwrap()["x-checksum"], "7");
    assert_eq!(replay.to_bytes(), "firstsecond");
}

#[tokio::test]
async fn a_response_too_large_to_keep_is_delivered_once_and_named_afterwards() {
    let (_chain, shop, customer) = open().await;
    let app = shop.app_with(shop.layer(), |_, _| async { Ok(Response::new(Body::from(vec![7; 1 << 20]))) });
    let purchase = customer.pay(&app, evaluate("a")).await;
    let first = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(first.body.len(), 1 << 20);
    let again = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(again.status, StatusCode::CONFLICT);
    assert_eq!(again.json()["transaction"], first.transaction().to_string());
    assert_eq!(shop.handled(), 1);
}

#[tokio::test]
async fn a_body_larger_than_may_be_read_whole_is_refused_before_money_moves() {
    let (chain, shop, customer) = open().await;
    let app = shop.app(shop.layer().flow(PaymentFlow::Upfront).max_request_body(10));
    let purchase = customer.pay(&app, evaluate("a")).await;
    let answer = send(&app, purchase.on(evaluate("more than ten bytes"))).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (0, 0));
    assert_eq!(send(&app, purchase.on(evaluate("few"))).await.status, StatusCode::OK);

    let app = shop.app(shop.layer().max_request_body(10));
    let purchase = customer.pay(&app, evaluate("a")).await;
    let answer = send(&app, purchase.on(evaluate("more than ten bytes"))).await;
    assert_eq!(answer.text(), "more than ten bytes", "worked on first, it streams, whatever its size");
}

#[tokio::test]
async fn the_price_may_depend_on_the_request() {
    let (chain, shop, customer) = open().await;
    let layer = shop.layer().price_with(|request| {
        let units = request.uri.query().and_then(|query| query.strip_prefix("outputs=")).map(str::parse::<u64>);
        async move {
            match units {
                None => Ok(Quote::Free),
                Some(Ok(outputs)) => Ok(Usdc::from_atomic(outputs * PRICE).into()),
                Some(Err(_)) => Err(PriceError::new(StatusCode::BAD_REQUEST, "outputs is no number")),
            }
        }
    });
    let app = {
        let layer = layer.build().unwrap();
        let inner = tower::service_fn(async |request: Request<tower_x402::server::RequestBody<Body>>| {
            let amount =
                request.extensions().get::<tower_x402::server::VerifiedPayment>().map(|payment| payment.amount);
            Ok::<_, std::convert::Infallible>(Response::new(Body::from(format!("{amount:?}"))))
        });
        support::shop::app(tower::Layer::layer(&layer, inner))
    };
    let request = |outputs: &str| Request::post(format!("/evaluate?outputs={outputs}")).body(Body::empty()).unwrap();
    assert_eq!(send(&app, evaluate("a")).await.text(), "None", "free");
    assert_eq!(send(&app, request("many")).await.status, StatusCode::BAD_REQUEST);
    let three = customer.pay(&app, request("3")).await;
    assert_eq!(send(&app, three.on(request("4"))).await.status, StatusCode::PAYMENT_REQUIRED, "three do not buy four");
    assert_eq!(send(&app, three.on(request("3"))).await.text(), "Some(3000)");
    assert_eq!(send(&app, three.on(request("4"))).await.status, StatusCode::CONFLICT);
    assert_eq!(chain.balance(shop.pay_to).await, 3 * PRICE);
}

#[tokio::test]
async fn several_offers_stand_side_by_side() {
    let (chain, shop, customer) = open().await;
    let layer = shop.layer().flow(PaymentFlow::Upfront).flow(PaymentFlow::Authorization);
    let other = support::changed(shop.asset.clone(), |asset| asset.address = support::authorization::random_address());
    let app = shop.app(layer.pay_to_in(other, shop.pay_to));
    let unpaid = send(&app, evaluate("a")).await;
    let offers = demand(&unpaid)["accepts"].as_array().unwrap().clone();
    assert_eq!(offers.len(), 4, "two tokens in two flows");
    for index in [0, 2] {
        let purchase = customer.pay_offer(&app, evaluate("a"), index).await;
        let answer = send(&app, purchase.on(evaluate("a"))).await;
        assert_eq!(answer.status, StatusCode::OK, "{:?}: {answer:?}", offers[index]);
    }
    assert_eq!(chain.balance(shop.pay_to).await, 2 * PRICE);
    let purchase = customer.pay_offer(&app, evaluate("a"), 1).await;
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(answer.reason(), "asset_not_deployed_contract");
}

#[tokio::test]
async fn a_configured_resource_is_never_named_by_the_host() {
    let (_chain, shop, _) = open().await;
    let ask = async |layer: tower_x402::server::RequirePaymentLayerBuilder| {
        let mut request = evaluate("a");
        request.headers_mut().insert("host", "evil.example".parse().unwrap());
        demand(&send(&shop.app(layer), request).await)
    };
    let named =
        ask(shop.layer().public_origin("https://api.example/").description("Marks arithmetic").tags(["math"])).await;
    assert_eq!(named["resource"]["url"], "https://api.example/evaluate");
    assert_eq!(named["resource"]["description"], "Marks arithmetic");
    assert_eq!(named["resource"]["tags"][0], "math");
    assert_eq!(
        ask(shop.layer().resource_url("https://api.example/x?y=1")).await["resource"]["url"],
        "https://api.example/x?y=1"
    );
}

#[tokio::test]
async fn build_error_says_what_to_change() {
    let (_chain, shop, _) = open().await;
    let refused = |layer: tower_x402::server::RequirePaymentLayerBuilder| layer.build().unwrap_err();
    let empty = RequirePaymentLayer::builder;
    assert_eq!(refused(empty()), BuildError::NoPrice);
    assert!(matches!(refused(empty().price("a penny")), BuildError::Price(_)));
    assert_eq!(refused(shop.layer().price("$0.00")), BuildError::ZeroPrice);
    assert_eq!(refused(empty().price("$1")), BuildError::NoPayee);
    assert_eq!(refused(empty().price("$1").pay_to(Network::BASE, shop.pay_to)), BuildError::NoFacilitator);
    assert_eq!(refused(shop.layer().pay_to(Network::BASE, shop.pay_to)), BuildError::NotServed(Network::BASE));
    let unknown = Network::eip155(1);
    assert_eq!(refused(shop.layer().pay_to(unknown, shop.pay_to)), BuildError::NoUsdc(unknown));
    assert_eq!(refused(shop.layer().pay_to(Network::BASE_SEPOLIA, Default::default())), BuildError::ZeroPayee);
    assert!(matches!(refused(shop.layer().max_timeout(Duration::from_secs(10))), BuildError::TimeoutTooShort { .. }));
    assert_eq!(refused(shop.layer().max_concurrent(0)), BuildError::ZeroLimit);
    assert!(matches!(refused(shop.layer().public_origin("api.example")), BuildError::Url(_)));
    assert!(matches!(refused(shop.layer().resource_url("ftp://api.example")), BuildError::Url(_)));
    assert_eq!(refused(shop.layer().tags(["a", "b", "c", "d", "e", "f"])), BuildError::TooManyTags(6));
    let long = || shop.layer().description("x".repeat(10_000));
    let priced = long().price_with(|_| std::future::ready(Ok(Quote::Free)));
    let by_body = long().price_with_body(|_, _| std::future::ready(Ok(Quote::Free)));
    for layer in [long(), priced, by_body] {
        assert!(matches!(refused(layer), BuildError::OffersTooLarge { .. }));
    }
    // Offers are made in whole seconds, and 75 of them are needed.
    let halves = shop.layer().max_timeout(Duration::from_millis(75_500));
    assert!(matches!(refused(halves), BuildError::TimeoutTooShort { .. }));
    for error in [BuildError::NoPrice, BuildError::NoPayee, BuildError::NoFacilitator] {
        assert!(error.to_string().contains("call ."), "{error}");
    }
}
