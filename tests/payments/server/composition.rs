//! The layer over other services and under other layers: any body, any error, limits below, timeouts above.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, routing::post};
use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use support::{
    chain::Chain,
    devnet::DevnetChain,
    shop::{App, Customer, PRICE, Shop, app, demand, evaluate, send, try_send},
};
use tokio::sync::Semaphore;
use tower::{BoxError, Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_x402::server::RequestBody;

async fn open() -> (DevnetChain, Shop, Customer) {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let customer = Customer::with_funds(&chain, 1_000 * PRICE).await;
    (chain, shop, customer)
}

#[tokio::test]
async fn over_an_axum_router() {
    let (chain, shop, customer) = open().await;
    let layer = shop.layer().build().unwrap();
    let paid = Router::new().route("/evaluate", post(async |body: String| body.to_uppercase())).layer(layer);
    let router = paid.route("/free", axum::routing::get(async || "free"));
    let app = app(router);
    let purchase = customer.pay(&app, evaluate("a")).await;
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.text(), "A");
    let free = send(&app, Request::get("/free").body(Body::empty()).unwrap()).await;
    assert_eq!((free.status, free.text()), (StatusCode::OK, "free"), "routes added after the layer are free");
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
}

#[tokio::test]
async fn over_an_axum_route_layer_in_a_nested_router() {
    let (chain, shop, customer) = open().await;
    let api =
        Router::new().route("/evaluate", post(async |body: String| body)).route_layer(shop.layer().build().unwrap());
    let app = app(Router::new().nest("/v1", api));
    let request = |body: &'static str| Request::post("/v1/evaluate").body(Body::from(body)).unwrap();
    let purchase = customer.pay(&app, request("a")).await;
    assert_eq!(send(&app, purchase.on(request("a"))).await.text(), "a");
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
}

/// A bare hyper service over a real connection: `Incoming` in, `Full` out.
#[tokio::test]
async fn over_a_bare_hyper_service() {
    let (chain, shop, customer) = open().await;
    let service = shop.layer().build().unwrap().layer(service_fn(|request: Request<RequestBody<Incoming>>| async {
        let body = request.into_body().collect().await.map_err(|_| Broken)?.to_bytes();
        Ok::<_, Broken>(Response::new(Full::new(body)))
    }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/evaluate", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = TowerToHyperService::new(service.clone());
            let connection = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            tokio::spawn(connection);
        }
    });
    let client = reqwest::Client::new();
    let unpaid = client.post(&url).body("a").send().await.unwrap();
    assert_eq!(unpaid.status(), 402);
    let response = http::Response::<reqwest::Body>::from(unpaid);
    let (parts, _) = response.into_parts();
    let answer = support::shop::Answer { status: parts.status, headers: parts.headers, body: Bytes::new() };
    let purchase = customer.sign(&demand(&answer), 0);
    let header = purchase.on(evaluate("a")).headers()["payment-signature"].clone();
    let paid = client.post(&url).body("a").header("payment-signature", header).send().await.unwrap();
    assert_eq!(paid.status(), 200);
    assert!(paid.headers().contains_key("payment-response"));
    assert_eq!(paid.bytes().await.unwrap(), "a");
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
}

#[derive(Debug, PartialEq)]
struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("broken")
    }
}

impl std::error::Error for Broken {}

/// The service's error and body types need no conversions.
#[tokio::test]
async fn over_a_service_fn_with_its_own_error_and_bodies() {
    #[derive(Debug, PartialEq)]
    struct NotEvenAnError(u8);

    let (chain, shop, customer) = open().await;
    let layer = shop.layer().build().unwrap();
    let service = layer.layer(service_fn(|request: Request<RequestBody<Full<Bytes>>>| async move {
        match &request.into_body().collect().await.unwrap().to_bytes()[..] {
            b"fail" => Err(NotEvenAnError(7)),
            _ => Ok(Response::new(Empty::<Bytes>::new())),
        }
    }));
    let ask = |header: Option<http::HeaderValue>, body: &'static str| {
        let mut request = Request::post("/evaluate").body(Full::from(body)).unwrap();
        request.headers_mut().extend(header.map(|value| (http::HeaderName::from_static("payment-signature"), value)));
        service.clone().oneshot(request)
    };
    let (parts, _) = ask(None, "a").await.unwrap().into_parts();
    let answer = support::shop::Answer { status: parts.status, headers: parts.headers, body: Bytes::new() };
    let header = |_: &str| {
        let purchase = customer.sign(&demand(&answer), 0);
        Some(purchase.on(evaluate("")).headers()["payment-signature"].clone())
    };
    assert_eq!(ask(header("fail"), "fail").await.unwrap_err(), NotEvenAnError(7));
    let paid = ask(header("a"), "a").await.unwrap();
    assert_eq!(paid.status(), StatusCode::OK);
    assert!(paid.into_body().collect().await.unwrap().to_bytes().is_empty());
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
}

/// A handler that counts how many of it run at once and goes on when told.
#[derive(Clone)]
struct Gate {
    open: Arc<Semaphore>,
    running: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl Gate {
    fn closed() -> Self {
        Self { open: Arc::new(Semaphore::new(0)), running: Arc::default(), most: Arc::default() }
    }

    async fn pass(self, request: Request<RequestBody<Body>>) -> Result<Response<Body>, BoxError> {
        let body = request.into_body().collect().await?.to_bytes();
        let now = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.open.acquire().await?.forget();
        self.running.fetch_sub(1, Ordering::SeqCst);
        Ok(Response::new(Body::from(body)))
    }

    async fn until_running(&self, count: usize) {
        support::eventually::eventually("so many are running", async || self.running.load(Ordering::SeqCst) >= count)
            .await;
    }
}

fn buy(app: &App, purchase: &support::shop::Purchase) -> tokio::task::JoinHandle<support::shop::Answer> {
    let (app, purchase) = (app.clone(), purchase.clone());
    tokio::spawn(async move { send(&app, purchase.on(evaluate("a"))).await })
}

#[tokio::test]
async fn over_a_concurrency_limit() {
    let (chain, shop, customer) = open().await;
    let gate = Gate::closed();
    let inner = ServiceBuilder::new().concurrency_limit(2).service_fn({
        let gate = gate.clone();
        move |request| gate.clone().pass(request)
    });
    let app = app(shop.layer().build().unwrap().layer(inner));
    let demand = demand(&send(&app, evaluate("a")).await);
    let bought: Vec<_> = (0..10).map(|_| buy(&app, &customer.sign(&demand, 0))).collect();
    gate.until_running(2).await;
    gate.open.add_permits(10);
    for answer in join_all(bought).await {
        assert_eq!(answer.unwrap().status, StatusCode::OK);
    }
    assert_eq!(gate.most.load(Ordering::SeqCst), 2, "the limit held");
    assert_eq!(chain.balance(shop.pay_to).await, 10 * PRICE);
}

#[tokio::test]
async fn garbage_takes_no_capacity_from_the_service_below() {
    let (chain, shop, customer) = open().await;
    let gate = Gate::closed();
    let inner = ServiceBuilder::new().concurrency_limit(1).service_fn({
        let gate = gate.clone();
        move |request| gate.clone().pass(request)
    });
    let app = app(shop.layer().build().unwrap().layer(inner));
    let demand = demand(&send(&app, evaluate("a")).await);
    let busy = buy(&app, &customer.sign(&demand, 0));
    gate.until_running(1).await;
    // The one permit is taken; unpaid requests are answered at once all the same.
    let penniless = Customer { signer: alloy_signer_local::PrivateKeySigner::random(), ..customer.clone() };
    let garbage = (0..500).map(|n| {
        let mut request = evaluate("a");
        match n % 4 {
            0 => {}
            1 => drop(request.headers_mut().insert("payment-signature", "garbage".parse().unwrap())),
            2 => request = penniless.sign(&demand, 0).on(evaluate("a")),
            _ => {
                let mut forged = customer.sign(&demand, 0);
                forged.authorization.value += alloy_primitives::U256::from(1);
                request = forged.on(evaluate("a"));
            }
        }
        send(&app, request)
    });
    for answer in tokio::time::timeout(Duration::from_secs(20), join_all(garbage)).await.expect("nothing waits") {
        assert!(matches!(answer.status.as_u16(), 400 | 402 | 503), "{answer:?}");
    }
    let next = buy(&app, &customer.sign(&demand, 0));
    gate.open.add_permits(2);
    assert_eq!(busy.await.unwrap().status, StatusCode::OK);
    assert_eq!(next.await.unwrap().status, StatusCode::OK);
    assert_eq!(chain.balance(shop.pay_to).await, 2 * PRICE);
}

#[tokio::test]
async fn over_and_under_a_buffer() {
    let (chain, shop, customer) = open().await;
    let echo = service_fn(async |request: Request<RequestBody<Body>>| {
        let body = request.into_body().collect().await?.to_bytes();
        Ok::<_, BoxError>(Response::new(Body::from(body)))
    });
    let below = ServiceBuilder::new().buffer(8).concurrency_limit(2).service(echo);
    let above = ServiceBuilder::new().buffer(8).service(shop.layer().build().unwrap().layer(below));
    let app = app(above);
    let demand = demand(&send(&app, evaluate("a")).await);
    let bought: Vec<_> = (0..20).map(|_| buy(&app, &customer.sign(&demand, 0))).collect();
    for answer in join_all(bought).await {
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"));
    }
    assert_eq!(chain.balance(shop.pay_to).await, 20 * PRICE);
}

#[tokio::test]
async fn load_that_is_shed_below_is_not_charged() {
    let (chain, shop, customer) = open().await;
    let gate = Gate::closed();
    let inner = ServiceBuilder::new().load_shed().concurrency_limit(1).service_fn({
        let gate = gate.clone();
        move |request| gate.clone().pass(request)
    });
    let app = app(shop.layer().build().unwrap().layer(inner));
    let demand = demand(&send(&app, evaluate("a")).await);
    let busy = buy(&app, &customer.sign(&demand, 0));
    gate.until_running(1).await;
    let shed = customer.sign(&demand, 0);
    let error = try_send(&app, shed.on(evaluate("a"))).await.unwrap_err();
    assert!(error.is::<tower::load_shed::error::Overloaded>(), "{error}");
    gate.open.add_permits(2);
    assert_eq!(busy.await.unwrap().status, StatusCode::OK);
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
    assert_eq!(send(&app, shed.on(evaluate("a"))).await.status, StatusCode::OK, "presented again, it buys");
}

#[tokio::test]
async fn under_a_timeout_the_work_goes_on_and_its_answer_is_kept() {
    let (chain, shop, customer) = open().await;
    let gate = Gate::closed();
    let inner = service_fn({
        let gate = gate.clone();
        move |request| gate.clone().pass(request)
    });
    let layer = shop.layer().build().unwrap();
    let app = app(ServiceBuilder::new().timeout(Duration::from_millis(100)).layer(layer).service(inner));
    let purchase = customer.pay(&app, evaluate("a")).await;
    let error = try_send(&app, purchase.on(evaluate("a"))).await.unwrap_err();
    assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
    gate.open.add_permits(1);
    let looking = async {
        loop {
            // The timeout cuts off each retry, too, until there is an answer.
            if let Ok(answer) = try_send(&app, purchase.on(evaluate("a"))).await {
                break answer;
            }
        }
    };
    let answer = support::eventually::in_time("there is an answer", looking).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "a");
    assert_eq!((gate.most.load(Ordering::SeqCst), chain.balance(shop.pay_to).await), (1, PRICE));
}

#[tokio::test]
async fn payments_above_the_limit_are_answered_503() {
    let (chain, shop, customer) = open().await;
    let gate = Gate::closed();
    let inner = service_fn({
        let gate = gate.clone();
        move |request| gate.clone().pass(request)
    });
    let app = app(shop.layer().max_concurrent(1).build().unwrap().layer(inner));
    let demand = demand(&send(&app, evaluate("a")).await);
    let busy = buy(&app, &customer.sign(&demand, 0));
    gate.until_running(1).await;
    let refused = customer.sign(&demand, 0);
    let answer = send(&app, refused.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers.contains_key("retry-after"));
    gate.open.add_permits(2);
    assert_eq!(busy.await.unwrap().status, StatusCode::OK);
    assert_eq!(send(&app, refused.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!(chain.balance(shop.pay_to).await, 2 * PRICE);
}

#[tokio::test]
async fn two_layers_with_one_payee_share_the_ledger() {
    let (chain, shop, customer) = open().await;
    let (one, other) = (shop.app(shop.layer()), shop.app(shop.layer()));
    let purchase = customer.pay(&one, evaluate("a")).await;
    let answers =
        join_all((0..20).map(|n| send(if n % 2 == 0 { &one } else { &other }, purchase.on(evaluate("a"))))).await;
    assert!(answers.iter().all(|answer| answer.status == StatusCode::OK && answer.text() == "a"));
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}
