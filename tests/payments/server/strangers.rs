//! What the layer does with the bodies and headers of requests that nobody has paid for.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{HeaderValue, Request, Response, StatusCode};
use support::{
    eventually::{eventually, in_time},
    scripted::{Scripted, customer, echo, layer, serve},
    shop::{App, app, send},
};
use tower::Layer as _;
use tower_x402::{
    Usdc,
    protocol::PaymentFlow,
    server::{Quote, RequestBody, RequirePaymentLayerBuilder},
};

fn priced_by_body() -> RequirePaymentLayerBuilder {
    let price = |length: usize| std::future::ready(Ok(Usdc::from_atomic(1_000 + length as u64).into()));
    layer(&Arc::new(Scripted::new())).price_with_body(move |_, body| price(body.len()))
}

fn upload(body: Body) -> Request<Body> {
    Request::post("/evaluate").body(body).unwrap()
}

/// A body that begins and never ends.
fn stalled() -> Body {
    Body::from_stream(stream::iter([Ok::<_, std::io::Error>("x")]).chain(stream::pending()))
}

#[tokio::test]
async fn stalled_bodies_take_little_room_and_lock_nobody_out() {
    let (app, _) = serve(priced_by_body().max_concurrent(64), echo);
    let refused = Arc::new(AtomicU64::new(0));
    for _ in 0..1_100 {
        let (app, refused) = (app.clone(), refused.clone());
        tokio::spawn(async move {
            let answer = send(&app, upload(stalled())).await;
            assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "busy"));
            refused.fetch_add(1, Ordering::SeqCst);
        });
    }
    // 64 MiB have room for 64 bodies of 1 MiB, or for 1,024 of which one piece has arrived.
    eventually("the rest is refused", async || refused.load(Ordering::SeqCst) == 1_100 - 1_024).await;
    for length in [1, 100_000, 1 << 20] {
        let asking = send(&app, upload(Body::from(vec![b'x'; length])));
        let answer = in_time("an honest client is answered", asking).await;
        assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{length}");
    }
}

/// Whether the price is asked for, or a payer's body is read before its work.
#[tokio::test(start_paused = true)]
async fn body_that_stands_still_is_given_up_after_thirty_seconds() {
    let (priced, _) = serve(priced_by_body(), echo);
    let (upfront, _) = serve(layer(&Arc::new(Scripted::new())).flow(PaymentFlow::Upfront), echo);
    let payment = customer().pay(&upfront, upload(Body::empty())).await;
    for (app, request) in [(priced, upload(stalled())), (upfront, payment.on(upload(stalled())))] {
        let start = tokio::time::Instant::now();
        let answer = send(&app, request).await;
        assert_eq!((answer.status, start.elapsed().as_secs()), (StatusCode::REQUEST_TIMEOUT, 30), "{answer:?}");
    }
}

/// What a handler below the layer sees of the payment header in a request that is handed on unpaid.
async fn handed_on(layer: RequirePaymentLayerBuilder, request: http::request::Builder) -> Vec<HeaderValue> {
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let sees = seen.clone();
    let inner = tower::service_fn(move |request: Request<RequestBody<Body>>| {
        for name in ["payment-signature", "x-payment"] {
            sees.lock().unwrap().extend(request.headers().get_all(name).iter().cloned());
        }
        std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(Body::empty())))
    });
    let app: App = app(layer.build().unwrap().layer(inner));
    let request = request.header("payment-signature", "one").header("payment-signature", "two");
    assert_eq!(send(&app, request.header("x-payment", "three").body(Body::empty()).unwrap()).await.status, 200);
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen, ["one", "two", "three"], "it may be for a layer below");
    seen
}

#[tokio::test]
async fn payments_are_sensitive_wherever_a_request_is_handed_on() {
    let fixed = || layer(&Arc::new(Scripted::new()));
    let free = || fixed().price_with(|_| std::future::ready(Ok(Quote::Free)));
    let preflight = || {
        Request::options("/").header("origin", "https://app.example").header("access-control-request-method", "POST")
    };
    for (what, seen) in [
        ("a preflight", handed_on(fixed(), preflight()).await),
        ("a free preflight", handed_on(free(), preflight()).await),
        ("a free request", handed_on(free(), Request::get("/")).await),
        ("a request that offers HTTP/2", handed_on(free(), Request::get("/").header("upgrade", "h2c")).await),
    ] {
        assert!(seen.iter().all(HeaderValue::is_sensitive), "{what}");
    }
}

#[tokio::test]
async fn price_is_asked_for_with_an_empty_body() {
    let (app, _) = serve(priced_by_body(), echo);
    for body in [Body::empty(), Body::from(Bytes::new())] {
        assert_eq!(send(&app, upload(body)).await.status, StatusCode::PAYMENT_REQUIRED);
    }
}
