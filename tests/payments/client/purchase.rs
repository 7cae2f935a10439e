//! One purchase, one payment: whatever is lost, and whoever repeats the request.

use std::{
    collections::BTreeSet,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use axum::{
    body::{Body, Bytes},
    extract::Request as Incoming,
    http::{HeaderValue, Method, Request},
    response::Response,
};
use futures_util::future::{Either, select};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use reqwest_middleware::ClientBuilder;
use reqwest_retry::{RetryTransientMiddleware, Retryable, RetryableStrategy, policies::ExponentialBackoff};
use serde_json::json;
use support::{
    authorization::unix_now,
    chain::Chain,
    devnet::DevnetChain,
    eventually::eventually,
    script::*,
    shop::{PRICE, Shop},
};
use tower::{BoxError, Layer as _, ServiceExt as _, retry::Policy};
use tower_x402::{
    Clock, ManualClock, SystemClock, Usdc,
    client::{
        AddPaymentLayer, Budget, Journal, Payer, PaymentError, PaymentMiddleware, PaymentOutcome, Purchase,
        ReceiptExt as _, Refusal, RetryPolicy, reconcile,
    },
    eip3009::{Authorization, AuthorizationSigner, PaymentSignature, SignError, TokenDomain},
    protocol::PaymentId,
    server::RequirePaymentLayerBuilder,
};

use super::middleware::{client, middleware, refusal};

/// A signer that counts what it signed.
#[derive(Clone)]
struct Counting(PrivateKeySigner, Arc<AtomicU64>);

#[async_trait::async_trait]
impl AuthorizationSigner for Counting {
    fn address(&self) -> Address {
        self.0.address()
    }

    async fn sign(&self, message: &Authorization, domain: &TokenDomain) -> Result<PaymentSignature, SignError> {
        self.1.fetch_add(1, Ordering::SeqCst);
        AuthorizationSigner::sign(&self.0, message, domain).await
    }
}

/// Where a request is repeated, besides the client's own attempts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Retry {
    Above,
    Below,
    Nowhere,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Http {
    Reqwest,
    Tower,
}

/// A seller on a socket that cuts the connection in place of its first answers to paid requests.
struct Seller {
    shop: Shop,
    url: String,
    losing: Arc<AtomicU64>,
}

impl Seller {
    async fn open(
        chain: &DevnetChain,
        settings: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder,
    ) -> Self {
        let shop = Shop::open(chain).await;
        let app = shop.app(settings(shop.layer()));
        let losing = Arc::new(AtomicU64::new(0));
        let left = losing.clone();
        let handler = move |request: Incoming| {
            let (app, left) = (app.clone(), left.clone());
            async move {
                let is_paid = request.headers().contains_key("payment-signature");
                let response: Response = app.oneshot(request).await.unwrap();
                let lose = |left: u64| (is_paid && left > 0).then(|| left - 1);
                if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose).is_ok() {
                    std::panic::resume_unwind(Box::new("the connection is cut"));
                }
                response
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/report", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(handler)).await });
        Self { shop, url, losing }
    }
}

struct EveryError;

impl RetryableStrategy for EveryError {
    fn handle(&self, result: &Result<reqwest::Response, reqwest_middleware::Error>) -> Option<Retryable> {
        match result {
            Ok(response) if !response.status().is_server_error() => None,
            _ => Some(Retryable::Transient),
        }
    }
}

/// A policy as people write it: the request is cloned before it is sent.
#[derive(Clone)]
pub(super) struct Times(pub(super) u32);

impl<R, E> Policy<Request<Full<Bytes>>, http::Response<R>, E> for Times {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<Full<Bytes>>,
        result: &mut Result<http::Response<R>, E>,
    ) -> Option<Self::Future> {
        let is_lost = result.as_ref().map_or(true, |response| response.status().is_server_error());
        (is_lost && self.0 > 0).then(|| {
            self.0 -= 1;
            std::future::ready(())
        })
    }

    fn clone_request(&mut self, request: &Request<Full<Bytes>>) -> Option<Request<Full<Bytes>>> {
        Some(request.clone())
    }
}

/// The client's own attempts are the default five, and quick.
fn quick() -> RetryPolicy {
    RetryPolicy::default().first_pause(Duration::from_millis(1))
}

/// Sends the request as this client does, and returns the text if it was answered.
async fn ask(
    payer: &Payer,
    (http, retry): (Http, Retry),
    (method, url): (&Method, &str),
    purchase: Option<Purchase>,
) -> Option<String> {
    match http {
        Http::Reqwest => {
            let payments = PaymentMiddleware::new(payer.clone()).retry(quick());
            let policy = ExponentialBackoff::builder().retry_bounds(Duration::from_millis(1), Duration::from_millis(2));
            let repeat =
                RetryTransientMiddleware::new_with_policy_and_strategy(policy.build_with_max_retries(3), EveryError);
            let client = ClientBuilder::new(reqwest::Client::builder().no_proxy().build().unwrap());
            let client = match retry {
                Retry::Above => client.with(repeat).with(payments),
                Retry::Below => client.with(payments).with(repeat),
                Retry::Nowhere => client.with(payments),
            };
            let mut request = client.build().request(method.clone(), url);
            if *method == Method::POST {
                request = request.body("my answer");
            }
            if let Some(purchase) = purchase {
                request = request.with_extension(purchase);
            }
            let response = request.send().await.ok()?;
            assert_eq!(response.status(), 200);
            Some(response.text().await.unwrap())
        }
        Http::Tower => {
            let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
            let body = if *method == Method::POST { "my answer" } else { "" };
            let mut request = Request::builder().method(method).uri(url).body(Full::from(body)).unwrap();
            if let Some(purchase) = purchase {
                request.extensions_mut().insert(purchase);
            }
            let payments = AddPaymentLayer::new(payer.clone()).retry(quick());
            let repeat = tower::retry::RetryLayer::new(Times(3));
            let response = match retry {
                Retry::Above => repeat.layer(payments.layer(client)).oneshot(request).await.ok()?,
                Retry::Below => payments.layer(repeat.layer(client)).oneshot(request).await.ok()?,
                Retry::Nowhere => payments.layer(client).oneshot(request).await.ok()?,
            };
            assert_eq!(response.status(), 200);
            Some(String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap())
        }
    }
}

/// Buys with so many lost answers, asking again until there is one; `restart` makes each further call that of a new process.
async fn one_purchase(chain: &DevnetChain, http: Http, restart: bool) {
    let seller = Seller::open(chain, |layer| layer).await;
    for retry in [Retry::Above, Retry::Below, Retry::Nowhere] {
        for method in [Method::GET, Method::POST] {
            for lost in 1..=12 {
                let case = format!("{http:?}, retry {retry:?}, {method}, {lost} lost, restart: {restart}");
                let signed = Arc::new(AtomicU64::new(0));
                let key = PrivateKeySigner::random();
                chain.mint(key.address(), 10 * PRICE).await;
                let path = TempPath::new(&format!("purchase-{http:?}-{restart}"));
                let open = || {
                    let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
                    Payer::builder(Counting(key.clone(), signed.clone())).asset(chain.asset()).budget(budget).build()
                };
                let before = seller.shop.handled();
                seller.losing.store(lost, Ordering::SeqCst);
                let mut payer = open();
                let mut answer = None;
                for _ in 0..4 {
                    let purchase = restart.then(|| Purchase::named("report of today"));
                    answer = ask(&payer, (http, retry), (&method, &seller.url), purchase).await;
                    if answer.is_some() {
                        break;
                    }
                    if restart {
                        drop(payer);
                        payer = open();
                    }
                }
                let expected = if method == Method::POST { "my answer" } else { "" };
                assert_eq!(answer.as_deref(), Some(expected), "{case}");
                assert_eq!(seller.losing.load(Ordering::SeqCst), 0, "{case}");
                assert_eq!(signed.load(Ordering::SeqCst), 1, "signatures: {case}");
                assert_eq!(seller.shop.handled() - before, 1, "runs: {case}");
                assert_eq!(chain.balance(key.address()).await, 9 * PRICE, "paid: {case}");
                let budget = payer.budget();
                assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (PRICE, 0), "{case}");
            }
        }
    }
}

#[tokio::test]
async fn one_purchase_is_signed_and_paid_once_whoever_repeats_it_with_reqwest() {
    one_purchase(&DevnetChain::start(None).await, Http::Reqwest, false).await;
}

#[tokio::test]
async fn one_purchase_is_signed_and_paid_once_whoever_repeats_it_with_tower() {
    one_purchase(&DevnetChain::start(None).await, Http::Tower, false).await;
}

#[tokio::test]
async fn named_purchase_is_signed_and_paid_once_over_restarts_with_reqwest() {
    one_purchase(&DevnetChain::start(None).await, Http::Reqwest, true).await;
}

#[tokio::test]
async fn named_purchase_is_signed_and_paid_once_over_restarts_with_tower() {
    one_purchase(&DevnetChain::start(None).await, Http::Tower, true).await;
}

/// Returns the different payments that arrived.
fn different(server: &Server) -> usize {
    server.payments().into_iter().collect::<std::collections::BTreeSet<_>>().len()
}

#[tokio::test]
async fn equal_requests_that_are_answered_are_purchases_of_their_own() {
    // One after the other, and at the same time.
    let server = Server::paid(required(&[offer(1_000)]), (0..6).map(|_| settled()).collect()).await;
    let budget = budget(10_000);
    let client = client(&budget);
    let buy = || async { client.post(server.url()).body("x").send().await.unwrap().status().as_u16() };
    assert_eq!((buy().await, buy().await), (200, 200));
    assert_eq!(tokio::join!(buy(), buy(), buy()), (200, 200, 200));
    assert_eq!((different(&server), budget.spent().atomic()), (5, 5_000));
}

#[tokio::test]
async fn lost_answer_is_asked_for_by_the_same_request_only() {
    for status_code in [None, Some(500), Some(502), Some(429), Some(408)] {
        let lose = || status_code.map_or_else(cut, status);
        let attempts = quick().max_attempts(1);
        // What differs from the first request, and whether that is another purchase.
        let first = ("/evaluate?q=1", "x-plan", "a", "my answer");
        let table = [
            (("/evaluate?q=1", "x-plan", "b", "my answer"), true),
            (("/evaluate?q=2", "x-plan", "a", "my answer"), true),
            (("/evaluate?q=1", "x-plan", "a", "my other answer"), true),
            (("/evaluate?q=1", "traceparent", "00-1-2-01", "my answer"), true),
            (first, false),
        ];
        for (second, is_another) in table {
            let server = Server::paid(required(&[offer(1_000)]), vec![lose(), settled()]).await;
            let budget = budget(10_000);
            let client = middleware(&budget).retry(attempts).client(reqwest::Client::builder().no_proxy()).unwrap();
            for (path, name, value, body) in [first, second] {
                let url = format!("http://{}{path}", server.address);
                // The first one fails in one way or another.
                let _ = client.post(url).header(name, value).body(body).send().await;
            }
            let expected = if is_another { 2 } else { 1 };
            assert_eq!(different(&server), expected, "{status_code:?} {second:?}");
            assert_eq!(budget.spent().atomic() + budget.reserved().atomic(), 1_000 * expected as u64);
        }
    }
}

#[tokio::test]
async fn tracing_headers_make_no_other_request() {
    let server = Server::paid(required(&[offer(1_000)]), vec![cut(), settled()]).await;
    let budget = budget(10_000);
    let client =
        middleware(&budget).retry(quick().max_attempts(1)).client(reqwest::Client::builder().no_proxy()).unwrap();
    let send = |span: &'static str| client.post(server.url()).header("traceparent", span).body("x").send();
    assert!(send("00-1-1-01").await.is_err());
    assert_eq!(send("00-1-2-01").await.unwrap().receipt().unwrap().outcome, PaymentOutcome::Settled);
    assert_eq!(different(&server), 1);
}

#[tokio::test]
async fn request_that_was_cut_short_by_a_timeout_above_is_paid_once() {
    let server = Server::paid(required(&[offer(1_000)]), vec![silence(), silence(), settled()]).await;
    let budget = budget(10_000);
    let http = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let paying = AddPaymentLayer::new(payer(&budget)).layer(http);
    let client = tower::ServiceBuilder::new()
        .layer(tower::retry::RetryLayer::new(Times(3)))
        .layer(tower::timeout::TimeoutLayer::new(Duration::from_millis(300)))
        .service(paying.map_err(BoxError::from));
    let request = Request::post(server.url()).body(Full::from("x")).unwrap();
    let response = client.oneshot(request).await.unwrap();
    assert_eq!(response.receipt().unwrap().outcome, PaymentOutcome::Settled);
    assert_eq!((different(&server), server.payments().len()), (1, 3));
    assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (1_000, 0));
}

/// The refusal may be caused by what the first attempt did: a balance that is too low since then.
#[tokio::test]
async fn payment_that_was_cut_short_and_is_refused_then_is_in_doubt() {
    for purchase in [None, Some(Purchase::new()), Some(Purchase::named("order 17"))] {
        let refused = encode(json!({ "x402Version": 2, "error": "insufficient_funds", "accepts": [] }));
        let refused: Reply = Box::new(move |_| Answer::Response(required_402(&refused)));
        let server = Server::paid(required(&[offer(1_000)]), vec![silence(), refused]).await;
        let budget = budget(10_000);
        let client = client(&budget);
        let send = || {
            let request = client.post(server.url()).body("x");
            purchase.iter().fold(request, |request, purchase| request.with_extension(purchase.clone())).send()
        };
        {
            let (cut_short, sent) = (pin!(send()), pin!(eventually("it is sent", async || different(&server) == 1)));
            assert!(matches!(select(cut_short, sent).await, Either::Right(_)));
        }
        let answer = send().await.unwrap();
        let receipt = answer.receipt().unwrap();
        assert_eq!((answer.status().as_u16(), receipt.outcome), (402, PaymentOutcome::Unknown), "{purchase:?}");
        assert_eq!((different(&server), server.payments().len()), (1, 2), "{purchase:?}");
        assert_eq!((budget.reserved().atomic(), budget.journal().unresolved().len()), (1_000, 1), "{purchase:?}");
    }
}

#[tokio::test]
async fn purchase_gets_its_answer_again_and_pays_for_no_other_request() {
    let path = TempPath::new("again");
    for purchase in [Purchase::new(), Purchase::named("order 17")] {
        let server = Server::paid(required(&[offer(1_000)]), (0..5).map(|_| settled()).collect()).await;
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
        let spent = budget.spent().atomic();
        let client = client(&budget);
        let send = |body: &'static str| client.post(server.url()).body(body).with_extension(purchase.clone()).send();
        let (one, two) = tokio::join!(send("x"), send("x"));
        for response in [one.unwrap(), two.unwrap(), send("x").await.unwrap()] {
            assert_eq!(
                (response.status().as_u16(), response.receipt().unwrap().outcome),
                (200, PaymentOutcome::Settled)
            );
        }
        assert_eq!((different(&server), server.payments().len()), (1, 3));
        assert_eq!(server.seen().len(), 4, "a known payment needs no 402");
        assert_eq!((budget.spent().atomic() - spent, budget.reserved().atomic()), (1_000, 0));

        let error = send("y").await.unwrap_err();
        assert_eq!(refusal(&error), &Refusal::OtherRequest);
        assert_eq!(server.seen().len(), 4);
    }
    // The paid one is kept over restarts and compaction.
    for _ in 0..2 {
        let server = Server::start(|seen| match &seen.payment {
            None => panic!("it is known"),
            Some(_) => Answer::Response(Response::new(Body::from("again"))),
        })
        .await;
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
        assert_eq!(budget.spent().atomic(), 2_000);
        // Another port is another URL.
        let error =
            client(&budget).post(server.url()).body("x").with_extension(Purchase::named("order 17")).send().await;
        assert_eq!(refusal(&error.unwrap_err()), &Refusal::OtherRequest);
    }
}

#[tokio::test]
async fn named_purchase_is_signed_for_again_only_if_the_first_payment_was_never_used() {
    let chain = DevnetChain::start(None).await;
    let key = PrivateKeySigner::random();
    chain.mint(key.address(), 10 * PRICE).await;
    let path = TempPath::new("void");
    // Nothing of what is sent is ever executed, then everything is refused.
    let server = Server::paid(
        required(&[support::changed(offer(1_000), |offer| offer.asset = chain.asset())]),
        (0..2).map(|_| cut()).chain([status(402), settled()]).collect(),
    )
    .await;
    let later = Arc::new(ManualClock::at(unix_now() + 500));
    let now: Arc<dyn Clock> = Arc::new(SystemClock);
    let open = || Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
    let buy = |budget: Budget, clock: &Arc<dyn Clock>| {
        let payer = Payer::builder(key.clone()).asset(chain.asset()).budget(budget).clock(clock.clone()).build();
        let client = PaymentMiddleware::new(payer).retry(quick().max_attempts(1));
        let client = client.client(reqwest::Client::builder().no_proxy()).unwrap();
        client.post(server.url()).body("x").with_extension(Purchase::named("order 17")).send()
    };
    for _ in 0..2 {
        assert!(buy(open(), &now).await.is_err());
    }
    // It has expired, and nobody has asked the chain.
    assert_eq!(buy(open(), &(later as Arc<dyn Clock>)).await.unwrap().status(), 402);
    assert_eq!((server.payments().len(), different(&server)), (3, 1));

    chain.set_next_timestamp(unix_now() + 500).await;
    chain.mine().await;
    let budget = open();
    assert_eq!(reconcile(&budget, chain.provider()).await.unwrap().void, 1);
    drop(budget);
    assert!(buy(open(), &now).await.unwrap().status().is_success());
    assert_eq!(different(&server), 2);
}

/// A signer that takes its time, by the clock.
struct Slow {
    key: PrivateKeySigner,
    clock: Arc<ManualClock>,
    takes: Mutex<Vec<u64>>,
    nonces: Arc<Mutex<Vec<alloy_primitives::B256>>>,
}

#[async_trait::async_trait]
impl AuthorizationSigner for Slow {
    fn address(&self) -> Address {
        self.key.address()
    }

    async fn sign(&self, message: &Authorization, domain: &TokenDomain) -> Result<PaymentSignature, SignError> {
        let seconds = {
            let mut takes = self.takes.lock().unwrap();
            if takes.len() > 1 { takes.remove(0) } else { takes[0] }
        };
        self.clock.advance(seconds);
        self.nonces.lock().unwrap().push(message.nonce);
        AuthorizationSigner::sign(&self.key, message, domain).await
    }
}

#[tokio::test]
async fn window_of_validity_begins_when_the_signature_is_there() {
    // How long the signer takes each time, and how many seconds are left when it is sent; `None` if it is refused.
    for (takes, left) in [
        (vec![0], Some(60)),
        (vec![15], Some(45)),
        (vec![16], Some(60)),
        (vec![50], Some(60)),
        (vec![600], Some(60)),
        (vec![50, 40], Some(70)),
        (vec![50, 5, 7], Some(58)),
        (vec![100, 5, 60], None),
    ] {
        let clock = Arc::new(ManualClock::at(NOW));
        let nonces = Arc::<Mutex<Vec<_>>>::default();
        let signer = Slow {
            key: KEY.parse().unwrap(),
            clock: clock.clone(),
            takes: Mutex::new(takes.clone()),
            nonces: nonces.clone(),
        };
        let budget = budget(10_000);
        let payer = Payer::builder(signer).budget(budget.clone()).clock(clock.clone()).build();
        let client = PaymentMiddleware::new(payer).client(reqwest::Client::builder().no_proxy()).unwrap();
        let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
        let answer = client.post(server.url()).send().await;
        let nonces = nonces.lock().unwrap().clone();
        assert!(nonces.iter().all(|nonce| *nonce == nonces[0]), "at most one can be used");
        match left {
            Some(left) => {
                assert_eq!(answer.unwrap().receipt().unwrap().outcome, PaymentOutcome::Settled);
                let valid_before: u64 = payload(&server.payments()[0]).authorization.valid_before.to();
                assert_eq!(valid_before - clock.now(), left, "{takes:?}");
            }
            None => {
                let error = answer.unwrap_err();
                assert!(matches!(PaymentError::of(&error), Some(PaymentError::SlowSigner { .. })), "{error:?}");
                assert_eq!((budget.remaining(), server.payments().len()), (budget.total(), 0));
                assert!(budget.journal().unresolved().is_empty());
            }
        }
    }
}

#[tokio::test]
async fn clock_that_differs_from_the_sellers_is_named_before_anything_is_signed() {
    let seconds = Duration::from_secs;
    // The seller's clock less ours, other headers, and what the client says.
    for (difference, age, refused) in [
        (0, false, None),
        (-30, false, None),
        (-31, false, Some(Refusal::ClockAhead { by: seconds(31) })),
        (-60, false, Some(Refusal::ClockAhead { by: seconds(60) })),
        (40, false, None),
        (41, false, Some(Refusal::ClockBehind { by: seconds(41) })),
        (86_400, false, Some(Refusal::ClockBehind { by: seconds(86_400) })),
        // Nobody's clock is off by so much, and a cache says when the 402 was made.
        (86_401, false, None),
        (-60, true, None),
    ] {
        let date = std::time::UNIX_EPOCH + seconds(NOW.checked_add_signed(difference).unwrap());
        let required = required(&[offer(1_000)]);
        let demand = move || {
            let mut response = required_402(&required);
            response.headers_mut().insert("date", HeaderValue::from_str(&httpdate::fmt_http_date(date)).unwrap());
            if age {
                response.headers_mut().insert("age", HeaderValue::from_static("60"));
            }
            response
        };
        let server = Server::selling(demand, vec![settled()]).await;
        let budget = budget(10_000);
        let answer = client(&budget).post(server.url()).send().await;
        match refused {
            None => assert_eq!(answer.unwrap().status(), 200, "{difference}"),
            Some(expected) => {
                assert_eq!(refusal(&answer.unwrap_err()), &expected);
                assert_eq!((budget.remaining(), server.payments().len()), (budget.total(), 0));
            }
        }
    }
    let said = Refusal::ClockAhead { by: seconds(60) }.to_string();
    assert_eq!(said, "this machine's clock is 60 s ahead of the seller's; set it");
}

/// A seller that asks for a payment, and answers 503 to the paid request if it waits for that. Then nobody listens there.
async fn vanishing_seller(waits: bool) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let required = format!("402 Payment Required\r\npayment-required: {}", required(&[offer(1_000)]));
        let mut listener = Some(listener);
        for (is_last, is_paid, head) in [(!waits, false, required.as_str()), (true, true, "503 Service Unavailable")]
            .into_iter()
            .take(1 + usize::from(waits))
        {
            let (mut connection, _) = listener.as_ref().unwrap().accept().await.unwrap();
            if is_last {
                listener = None;
            }
            let mut request = vec![0; 16_384];
            let length = connection.read(&mut request).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&request[..length]).contains("payment-signature"), is_paid);
            let head = format!("HTTP/1.1 {head}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            connection.write_all(head.as_bytes()).await.unwrap();
        }
    });
    url
}

/// Repeats a request that got no answer, or a 503, and returns what came of the last attempt.
struct Repeat;

#[async_trait::async_trait]
impl reqwest_middleware::Middleware for Repeat {
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut http::Extensions,
        next: reqwest_middleware::Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        let first = next.clone().run(request.try_clone().unwrap(), extensions).await;
        match first {
            Ok(response) if response.status() != 503 => Ok(response),
            _ => next.run(request, extensions).await,
        }
    }
}

/// The last attempt could not connect. An earlier one, in a retry below the payments, may have brought the seller the payment.
#[tokio::test]
async fn payment_stays_reserved_although_nobody_listens_any_more() {
    let plain = || reqwest::Client::builder().no_proxy();
    let repeats = reqwest::retry::for_host("127.0.0.1").classify_fn(|answer| match answer.status() {
        Some(status) if status == 503 => answer.retryable(),
        _ => answer.success(),
    });
    for (case, waits, below, builder) in [
        ("gone before it is paid", false, false, plain()),
        ("gone once it is paid, repeated by reqwest", true, false, plain().retry(repeats)),
        ("gone once it is paid, repeated by a middleware", true, true, plain()),
    ] {
        let url = vanishing_seller(waits).await;
        let path = TempPath::new("vanished");
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
        let mut client = middleware(&budget).retry(quick()).client(builder).unwrap();
        if below {
            client = ClientBuilder::from_client(client).with(Repeat).build();
        }
        let order = Purchase::named("order 17");
        let mut nonces = BTreeSet::new();
        for _ in 0..2 {
            let error = client.get(&url).with_extension(order.clone()).send().await.unwrap_err();
            assert!(
                matches!(PaymentError::of(&error), Some(PaymentError::Unanswered { attempts: 5, .. })),
                "{case}: {error:?}"
            );
            nonces.insert(PaymentError::of(&error).unwrap().receipt().unwrap().nonce);
            assert_eq!(budget.reserved(), Usdc::from_atomic(1_000), "{case}");
        }
        assert_eq!(nonces.len(), 1, "{case}: a purchase is signed for once");
        drop((client, budget));
        eventually("the journal is closed", async || Journal::open(&path.0).is_ok()).await;
        let budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
        assert_eq!((budget.reserved(), budget.spent()), (Usdc::from_atomic(1_000), Usdc::ZERO), "{case}");
    }
}

/// The seller has the payment, and sends its request on to where nobody listens.
#[tokio::test]
async fn payment_that_a_redirect_carried_is_not_taken_as_unsent() {
    let answer = async |request: Incoming| match request.headers().contains_key("payment-signature") {
        true => Response::builder().status(307).header("location", "http://127.0.0.1:1/").body(Body::empty()).unwrap(),
        false => Response::builder()
            .status(402)
            .header("payment-required", required(&[offer(1_000)]))
            .body(Body::empty())
            .unwrap(),
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    let budget = Budget::builder().build();
    let follows = reqwest::Client::builder().no_proxy().build().unwrap();
    let client = ClientBuilder::new(follows).with(middleware(&budget)).build();
    let error = client.get(&url).send().await.unwrap_err();
    assert!(matches!(PaymentError::of(&error), Some(PaymentError::Unanswered { .. })), "{error:?}");
    assert_eq!(budget.reserved(), Usdc::from_atomic(1_000));
}

#[tokio::test]
async fn failed_work_is_repeated_only_where_that_is_safe() {
    for code in 500..=505_u16 {
        for (method, with_id, retry_after) in [
            (Method::POST, false, false),
            (Method::PATCH, false, false),
            (Method::POST, true, false),
            (Method::POST, false, true),
            (Method::GET, false, false),
            (Method::PUT, false, false),
            (Method::DELETE, false, false),
        ] {
            let is_safe = method.is_idempotent() || with_id || retry_after || (502..=504).contains(&code);
            let mut demand = json!({
                "x402Version": 2, "resource": { "url": "http://evaluator.example" },
                "accepts": [offer(1_000).to_requirements()],
            });
            if with_id {
                demand["extensions"] = PaymentId::extension().declared().into();
            }
            let replies = (0..9).map(|_| if retry_after { later(code, None) } else { status(code) }).collect();
            let server = Server::paid(encode(demand), replies).await;
            let budget = budget(10_000);
            let response = client(&budget).request(method.clone(), server.url()).send().await.unwrap();
            let case = format!("{code} {method} id: {with_id} retry-after: {retry_after}");
            assert_eq!(
                (response.status(), response.receipt().unwrap().outcome),
                (http::StatusCode::from_u16(code).unwrap(), PaymentOutcome::Unknown),
                "{case}"
            );
            assert_eq!(server.payments().len(), if is_safe { 5 } else { 1 }, "{case}");
            assert_eq!((different(&server), budget.reserved().atomic()), (1, 1_000), "{case}");
        }
    }
}

/// A multipart form with this file, as people write it.
fn form(length: usize) -> (String, reqwest::Body) {
    let head = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n";
    let file = vec![b'x'; length];
    let frames: Vec<Result<Vec<u8>, std::io::Error>> = [head.as_bytes().to_vec()]
        .into_iter()
        .chain(file.chunks(64 << 10).map(<[u8]>::to_vec))
        .chain([b"\r\n--b--\r\n".to_vec()])
        .map(Ok)
        .collect();
    ("multipart/form-data; boundary=b".into(), reqwest::Body::wrap_stream(futures_util::stream::iter(frames)))
}

#[tokio::test]
async fn streamed_body_is_sent_again_with_the_payment_up_to_a_bound() {
    const OVERHEAD: usize = 75;
    for (length, limit, is_paid) in [
        (0, 0, false),
        (0, OVERHEAD, true),
        (0, OVERHEAD - 1, false),
        (900_000, 1 << 20, true),
        (900_000, 900_000, false),
        (900_000, 8 << 20, true),
    ] {
        let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
        let budget = budget(10_000);
        let client =
            middleware(&budget).max_buffered_body(limit).client(reqwest::Client::builder().no_proxy()).unwrap();
        let (content_type, body) = form(length);
        let answer = client.post(server.url()).header("content-type", content_type).body(body).send().await;
        let bodies: Vec<_> = server.seen().into_iter().map(|seen| seen.body).collect();
        assert!(bodies.iter().all(|body| body.starts_with(b"--b\r\n") && body.ends_with(b"\r\n--b--\r\n")));
        assert!(bodies.iter().all(|body| body.len() == OVERHEAD + length), "{}", bodies[0].len());
        match is_paid {
            true => assert_eq!((answer.unwrap().status().as_u16(), bodies.len()), (200, 2)),
            false => {
                let error = answer.unwrap_err();
                assert_eq!((refusal(&error), bodies.len()), (&Refusal::BodyNotReplayable, 1));
                assert!(error.to_string().contains("max_buffered_body"), "{error}");
                assert_eq!(budget.remaining(), budget.total());
            }
        }
    }
}

#[tokio::test]
async fn body_that_breaks_while_it_streams_is_the_callers_error() {
    let server = Server::paid(required(&[offer(1_000)]), vec![settled()]).await;
    let budget = budget(10_000);
    let frames = [Ok("some"), Err(std::io::Error::other("the file is gone"))];
    let body = reqwest::Body::wrap_stream(futures_util::stream::iter(frames));
    let error = client(&budget).post(server.url()).body(body).send().await.unwrap_err();
    assert!(PaymentError::of(&error).is_none(), "{error:?}");
    assert_eq!(budget.remaining(), budget.total());
}
