//! A price that depends on the body.

use axum::body::Body;
use http::{Request, StatusCode};
use tower_x402::{
    Usdc,
    protocol::PaymentFlow,
    server::{PriceError, Quote, RequirePaymentLayerBuilder},
};

use support::{
    chain::Chain as _,
    devnet::DevnetChain,
    shop::{Customer, PRICE, Shop, demand, send},
};

/// A unit of a thousand for each byte; an "x" is not for sale, and nothing is free.
fn by_length(layer: RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder {
    layer.max_request_body(8).price_with_body(|_, body| {
        let quote = match body.as_ref() {
            [] => Ok(Quote::Free),
            [b'x', ..] => Err(PriceError::new(StatusCode::UNPROCESSABLE_ENTITY, "no x")),
            body => Ok(Usdc::from_atomic(PRICE * body.len() as u64).into()),
        };
        std::future::ready(quote)
    })
}

fn request(body: impl Into<Body>) -> Request<Body> {
    Request::post("/evaluate").body(body.into()).unwrap()
}

#[tokio::test]
async fn each_body_has_its_price() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let app = shop.app(by_length(shop.layer()));
    for (body, price) in [("a", PRICE), ("four", 4 * PRICE), ("eight888", 8 * PRICE)] {
        let asked = demand(&send(&app, request(body)).await);
        assert_eq!(asked["accepts"][0]["amount"], price.to_string(), "{body}");
    }
    // A body in pieces is the same body.
    let pieces = || Body::from_stream(futures_util::stream::iter(["fo", "u", "r"].map(Ok::<_, std::io::Error>)));
    let asked = demand(&send(&app, request(pieces())).await);
    assert_eq!(asked["accepts"][0]["amount"], (4 * PRICE).to_string());

    let customer = Customer::with_funds(&chain, 100 * PRICE).await;
    let purchase = customer.sign(&asked, 0);
    let answer = send(&app, purchase.on(request(pieces()))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "four"), "the handler reads the whole body");
    assert_eq!(chain.balance(shop.pay_to).await, 4 * PRICE);
    let again = send(&app, purchase.on(request("four"))).await;
    assert_eq!((again.text(), shop.handled()), ("four", 1), "a copy is answered, and not worked on");
}

#[tokio::test]
async fn payment_for_one_body_buys_no_other() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let app = shop.app(by_length(shop.layer().flow(flow)));
        let customer = Customer::with_funds(&chain, 100 * PRICE).await;
        let cheap = customer.pay(&app, request("a")).await;
        let before = (shop.handled(), chain.balance(shop.pay_to).await);
        let answer = send(&app, cheap.on(request("four"))).await;
        assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{}", answer.text());
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), before, "{flow}");
        assert_eq!(send(&app, cheap.on(request("a"))).await.status, StatusCode::OK);
        assert_eq!(send(&app, cheap.on(request("b"))).await.status, StatusCode::CONFLICT, "of the same price");
        assert_eq!(shop.handled(), before.0 + 1);
    }
}

#[tokio::test]
async fn body_without_a_price_is_refused_before_payment() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let app = shop.app(by_length(shop.layer()));
    let customer = Customer::with_funds(&chain, 100 * PRICE).await;
    let purchase = customer.pay(&app, request("a")).await;
    for (body, status) in [("xenon", StatusCode::UNPROCESSABLE_ENTITY), ("nine99999", StatusCode::PAYLOAD_TOO_LARGE)] {
        assert_eq!(send(&app, request(body)).await.status, status, "unpaid {body}");
        assert_eq!(send(&app, purchase.on(request(body))).await.status, status, "paid {body}");
    }
    let broken = Body::from_stream(futures_util::stream::iter([Err::<&str, _>(std::io::Error::other("gone"))]));
    assert_eq!(send(&app, request(broken)).await.status, StatusCode::BAD_REQUEST);
    assert_eq!((shop.handled(), shop.counts().await.pending), (0, 0), "nothing reached the ledger");
}

#[tokio::test]
async fn free_body_passes_unchanged() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let layer = shop.layer().price_with_body(|_, _| std::future::ready(Ok(Quote::Free))).build().unwrap();
    let echo = tower::service_fn(|request: Request<tower_x402::server::RequestBody<Body>>| async move {
        Ok::<_, std::convert::Infallible>(http::Response::new(Body::new(request.into_body())))
    });
    let app = support::shop::app(tower::Layer::layer(&layer, echo));
    let answer = send(&app, request("hello")).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "hello"));
}
