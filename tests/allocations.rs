//! What a request may allocate, and what a student may hold: a guard against growing slower that needs no clock.
//!
//! The figures are those of a build without optimization, in which the optimizer takes no allocation away; `benches/hot_path.rs`
//! has those of a release, and the times. A change that needs more says why when it raises a bound here; one that needs much
//! less lowers it.

use std::alloc::System;

use alloy_primitives::Address;
use http::{HeaderValue, StatusCode, header::HOST};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::hot_path::{Answers, AtOnce, Mint, NOW, Seller, Signed, answer, buyer, clock, layer, order};
use tower::Service as _;
use tower_x402::{Usdc, server::RequirePaymentLayer};
use x402_market::{
    evidence::{CallOutcome, Pairs},
    selection::{Candidate, Job, Observation, Selector as _, Skill, SkillSet, Thompson},
};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// How many requests are counted; what tables allocate as they grow is spread over them.
const REQUESTS: usize = 500;

/// Runs `work` as often, and says how much each run allocated, after a while in which whatever is made once is made.
async fn allocations<I>(inputs: Vec<I>, mut work: impl AsyncFnMut(I)) -> f64 {
    assert_eq!(inputs.len(), 2 * REQUESTS);
    let mut inputs = inputs.into_iter();
    for input in inputs.by_ref().take(REQUESTS) {
        work(input).await;
    }
    let before = HEAP.stats();
    for input in inputs {
        work(input).await;
    }
    let after = HEAP.stats();
    let counted = after.allocations - before.allocations + after.reallocations - before.reallocations;
    counted as f64 / REQUESTS as f64
}

/// What requests to `app` allocate, each answered with `status`.
async fn of_requests(mut app: impl Answers, status: StatusCode, requests: Vec<http::Request<axum::body::Body>>) -> f64 {
    let count = async |request| {
        let response = answer(&mut app, request).await;
        assert_eq!(response.status(), status);
    };
    allocations(requests, count).await
}

fn paywall() -> RequirePaymentLayer {
    layer(AtOnce::in_memory(clock()), clock()).build().unwrap()
}

/// The layer without a router: what axum allocates is not ours to guard.
fn shop() -> impl Answers {
    support::hot_path::alone(paywall())
}

fn many<T>(make: impl FnMut() -> T) -> Vec<T> {
    std::iter::repeat_with(make).take(2 * REQUESTS).collect()
}

/// What is wrong with a count: it may be a tenth above what is usual, and not so much below it that this guards nothing.
fn judge(what: &str, counted: f64, usual: f64) -> Option<String> {
    println!("{what}: {counted:.1} allocations, usually {usual}");
    let is_more = counted > 1.1 * usual + 0.5;
    let is_less = counted < 0.8 * usual;
    (is_more || is_less).then(|| format!("{what}: {counted:.1} allocations where {usual} are usual"))
}

/// One test: the heap counts for all threads.
#[tokio::test]
async fn neither_requests_nor_a_student_take_more_memory_than_they_did() {
    let unpaid = of_requests(shop(), StatusCode::PAYMENT_REQUIRED, many(support::hot_path::unpaid)).await;
    let at_a_host = many(|| {
        let mut request = support::hot_path::unpaid();
        request.headers_mut().insert(HOST, HeaderValue::from_static("api.example:8443"));
        request
    });
    // The same: its URL is written once, whatever it is made of.
    let named = of_requests(shop(), StatusCode::PAYMENT_REQUIRED, at_a_host).await;
    let mut mint = Mint::new(10);
    let mut payments = |signed| many(|| support::hot_path::paid(&mint.header(signed, NOW)));
    let by_wallet = of_requests(shop(), StatusCode::OK, payments(Signed::ByWallet)).await;
    let by_key = of_requests(shop(), StatusCode::OK, payments(Signed::ByKey)).await;
    let seller = Seller::like(&mut support::hot_path::sold(paywall())).await;
    let asked_twice = allocations(many(|| (seller.clone(), seller.clone())), async |(mut one, mut two)| {
        one.call(order()).await.unwrap();
        two.call(order()).await.unwrap();
    })
    .await;
    let client = buyer(seller);
    let paying = allocations(many(|| client.clone()), async |mut client| {
        assert_eq!(client.call(order()).await.unwrap().status(), StatusCode::OK);
    })
    .await;
    // Three are for a body that its handler does not read: its box, its permit, and the task that drains it. Four are for the labels of the
    // metric of what was charged.
    let wrong: Vec<String> = [
        judge("an unpaid request", unpaid, 11.0),
        judge("an unpaid request that names its host", named, 11.0),
        judge("a paid request, signed by a key", by_key, 55.0),
        judge("a paid request, signed by a wallet", by_wallet, 59.0),
        judge("a payment by a client, beside its two requests", paying - asked_twice, 120.0),
    ]
    .into_iter()
    .flatten()
    .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");

    let before = held();
    let selector = informed();
    let bytes = held() - before;
    drop(selector);
    assert!((500_000..1 << 20).contains(&bytes), "a student's selector holds {bytes} bytes");
}

/// Bytes that are allocated and not freed.
fn held() -> usize {
    let stats = HEAP.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

/// The selector of a student that has seen 1,000 evaluators of 20 skills, and heard of 100 of them from 1,200 payers.
fn informed() -> Thompson {
    let address = |number: u64| Address::left_padding_from(&number.to_be_bytes());
    let skill = |number: usize| Skill::new(number % 20).unwrap();
    let right = |evaluator, skill| {
        Observation::new(evaluator, skill, Usdc::from_atomic(1), CallOutcome::answered(Pairs::new(1, 0, 1)))
    };
    let claims = SkillSet::from_iter([skill(0)]);
    let market: Vec<_> = (0..1_000).map(|n| Candidate::new(address(n), claims, Usdc::from_atomic(1))).collect();
    let mut selector = Thompson::seeded(1);
    for turn in 0..9_000_u64 {
        selector.learn_report(address(10_000 + turn % 1_200), &right(address(turn / 20 % 100), skill(turn as usize)));
    }
    (0..20).for_each(|number| selector.learn(&right(address(0), skill(number))));
    let mut full = Job::new(skill(0), Usdc::from_atomic(1_000_000), 1_000);
    full.seats = 5;
    (0..300).for_each(|_| drop((selector.select(&full, &market), selector.explore(&full, &market))));
    selector
}
