//! How much room there is for bodies and for requests that wait: little for one payer or one payment, and none of another one's.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{Request, StatusCode};
use http_body::Frame;
use support::{
    around_ledger::{Around, AroundChannels, Call},
    chain::Chain as _,
    eventually::{eventually, in_time},
    rpc_proxy::RpcProxy,
    shop::{Customer, PRICE, ask, demand, evaluate, paid, send, try_send},
    world::{COST, DEPOSIT, World, by_voucher, pay, refused},
};
use tokio::sync::{Notify, Semaphore};
use tower_x402::{ledger::LedgerError, protocol::PaymentFlow};

use super::{
    Held, PLACES, Piece, ROOM_OF_ONE, STALLED, WAITING_OF_ONE, failing_at_bad, finished, holding, holding_with,
    is_submitted, stalled,
};

/// Of such payments each counts with its body.
#[tokio::test]
async fn payments_presented_again_that_wait_with_their_bodies_take_little_memory() {
    let world = World::with_blocks_every(Duration::from_millis(20)).await;
    let app = world.shop.app_with(world.shop.layer().max_concurrent(PLACES), failing_at_bad);
    let attacker = Customer::with_funds(&world.chain, PRICE).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    let held = Arc::<Held>::default();
    let mut released = Vec::new();
    for _ in 0..4 {
        let purchase = attacker.sign(&demanded, 0);
        let answer = send(&app, purchase.on(arrived(&held))).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{answer:?}");
        released.push(purchase);
    }
    world.chain.devnet.stall(true);
    let purchase = attacker.sign(&demanded, 0);
    let first = ask(&app, purchase.on(evaluate("a")));
    is_submitted(&world, &purchase).await;
    let mut waiting = Vec::new();
    for purchase in &released {
        waiting.push(ask(&app, purchase.on(arrived(&held))));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    eventually("all but one make room", async || finished(&waiting) == 3).await;
    assert!(held.now.load(Ordering::SeqCst) <= 1, "they hold nothing");
    let last = waiting.pop().unwrap();
    for request in waiting {
        let answer = request.await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "busy"), "{answer:?}");
    }
    world.chain.devnet.stall(false);
    assert_eq!(in_time("it is settled", first).await.unwrap().status, StatusCode::OK);
    assert_eq!(in_time("its balance is spent", last).await.unwrap().status, StatusCode::PAYMENT_REQUIRED);
}

#[tokio::test]
async fn copies_of_one_payers_payments_keep_no_other_payers_copy_out() {
    let world = World::open().await;
    let (app, go_on) = holding(&world);
    let [payer, attacker] =
        [Customer::with_funds(&world.chain, PRICE).await, Customer::with_funds(&world.chain, 100 * PRICE).await];
    let held = payer.pay(&app, evaluate("held")).await;
    let mut held = [0; 2].map(|_| held.on(evaluate("held"))).map(|request| ask(&app, request));
    let mut copies = Vec::new();
    for _ in 0..2 * ROOM_OF_ONE {
        let purchase = attacker.pay(&app, evaluate("held")).await;
        copies.extend((0..=ROOM_OF_ONE).map(|_| ask(&app, purchase.on(evaluate("held")))));
    }
    // One of each is worked on.
    let waiting = copies.len() - 2 * ROOM_OF_ONE;
    eventually("the oldest make room", async || finished(&copies) == waiting - WAITING_OF_ONE).await;
    assert_eq!(finished(&held), 0);
    go_on.close();
    for answer in &mut held {
        let answer = in_time("it is served", answer).await.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
    }
}

/// A payment that is settled before its work is on the chain, where anybody can read it. Anybody can sign one with the same nonce, too.
#[tokio::test]
async fn copies_of_a_payment_on_the_chain_keep_no_copy_of_its_payers_others_out() {
    for has_same_nonce in [false, true] {
        let world = World::open().await;
        let (app, go_on) = holding_with(&world, |layer| layer.flow(PaymentFlow::Upfront));
        let payer = Customer::with_funds(&world.chain, 2 * PRICE).await;
        let own = payer.pay(&app, evaluate("held")).await;
        let public = if has_same_nonce {
            let mut public = Customer::with_funds(&world.chain, PRICE).await.pay(&app, evaluate("held")).await;
            public.authorization.nonce = own.authorization.nonce;
            public.resign();
            public
        } else {
            payer.pay(&app, evaluate("held")).await
        };
        let works = [&public, &own].map(|purchase| ask(&app, purchase.on(evaluate("held"))));
        eventually("both are worked on", async || world.shop.handled() == 2).await;
        let copy = ask(&app, own.on(evaluate("held")));
        // Whatever takes its place comes later.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let strangers: Vec<_> = (0..3 * WAITING_OF_ONE).map(|_| ask(&app, public.on(evaluate("held")))).collect();
        eventually("the oldest make room", async || finished(&strangers) == 2 * WAITING_OF_ONE).await;
        assert!(!copy.is_finished(), "its place is its payer's");
        go_on.close();
        for answer in works.into_iter().chain([copy]) {
            let answer = in_time("it is served", answer).await.unwrap();
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
        }
    }
}

/// Whoever has the price of one request can send any number of them.
#[tokio::test]
async fn bodies_of_payers_take_as_much_room_as_has_arrived() {
    let world = World::open().await;
    let layer = world.shop.layer().flow(PaymentFlow::Upfront).max_concurrent(PLACES);
    let app = world.shop.app(layer.vouchers(world.channels.clone()));
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    let voucher = by_voucher(&app, &channel, 2 * COST).await;
    let demanded = demand(&send(&app, evaluate("a")).await);
    for scheme in ["exact", "batch-settlement"] {
        let held = Arc::<Held>::default();
        let requests: Vec<_> = (0..2 * ROOM_OF_ONE)
            .map(|_| match scheme {
                "exact" => paid(stalled(&held), &customer.sign(&demanded, 0).payload()),
                _ => paid(stalled(&held), &voucher),
            })
            .map(|request| ask(&app, request))
            .collect();
        // One of the longest takes the share of its payer.
        eventually("all but one make room", async || finished(&requests) == 2 * ROOM_OF_ONE - 1).await;
        assert_eq!(held.now.load(Ordering::SeqCst), 1, "{scheme}");
        requests.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Copies of streams of any number of payers, and refunds of its channel, which anybody can ask for.
#[tokio::test]
async fn payers_wait_in_the_line_of_their_channel_whatever_strangers_wait_for() {
    let world = World::open().await;
    let (app, go_on) = holding(&world);
    let channel = world.filled(&app).await;
    let first = ask(&app, pay(&app, &channel, 2 * COST, None, "held").await);
    eventually("it is worked on", async || world.shop.handled() == 2).await;
    let second = ask(&app, pay(&app, &channel, 3 * COST, None, "second").await);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut streaming = Vec::new();
    let mut strangers = Vec::new();
    let mut refund = by_voucher(&app, &channel, COST).await;
    refund["payload"]["type"] = "refund".into();
    refund["payload"]["amount"] = "5000".into();
    strangers.extend((0..2 * WAITING_OF_ONE).map(|_| ask(&app, paid(evaluate("a"), &refund))));
    eventually("the oldest make room", async || finished(&strangers) == WAITING_OF_ONE).await;
    for _ in 0..9 {
        let customer = Customer::with_funds(&world.chain, PRICE).await;
        let purchase = customer.pay(&app, evaluate("stream")).await;
        streaming.push(try_send(&app, purchase.on(evaluate("stream"))).await.unwrap());
        strangers.extend((0..WAITING_OF_ONE).map(|_| ask(&app, purchase.on(evaluate("stream")))));
    }
    eventually("no more wait than have places", async || finished(&strangers) == strangers.len() - 8 * WAITING_OF_ONE)
        .await;
    assert!(!first.is_finished() && !second.is_finished());
    go_on.close();
    let first = in_time("it is served", first).await.unwrap();
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    // Two vouchers were signed beforehand: the second is the right one now.
    let second = in_time("it is served", second).await.unwrap();
    assert_eq!((second.status, second.text()), (StatusCode::OK, "second"), "{second:?}");
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Anybody who has read the newest voucher in a claim can ask for a refund, which needs the chain to be looked at.
#[tokio::test]
async fn refunds_of_strangers_do_not_hold_up_the_next_voucher() {
    let world = World::open().await;
    let proxy = RpcProxy::start(world.chain.rpc_url()).await;
    let contract = world.contract(|contract| contract.rpc_url(proxy.url())).await;
    let app = world.seller(world.channels_of(contract).build().unwrap());
    let channel = world.filled(&app).await;
    world.channels.claim_all().await.expect("the devnet claims");
    // Each is another one, and none can be executed.
    world.chain.devnet.faults().set(|call| match call.method {
        "eth_estimateGas" => x402_devnet::Fault::Error { code: -32005, message: "too many requests".into() },
        _ => x402_devnet::Fault::None,
    });
    proxy.set_latency(Duration::from_millis(50));
    let mut refund = by_voucher(&app, &channel, COST).await;
    refund["payload"]["type"] = "refund".into();
    let strangers: Vec<_> = (0..400)
        .map(|number| {
            refund["payload"]["amount"] = (5_000 + number).to_string().into();
            ask(&app, paid(evaluate("a"), &refund))
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let begun = std::time::Instant::now();
    let answer = in_time("it is served", send(&app, pay(&app, &channel, 2 * COST, None, "mine").await)).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "mine"), "{answer:?}");
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    // They are for what was charged before.
    for stranger in strangers {
        let answer = in_time("it is answered", stranger).await.unwrap();
        assert!(answer.status.is_client_error() || answer.status.is_server_error(), "{answer:?}");
    }
}

/// The newest voucher was charged in part and claimed, and does not fit.
#[tokio::test]
async fn refund_does_not_wait_behind_strangers_with_a_claimed_voucher() {
    let world = World::open().await;
    // As a database is: each call takes a while.
    let slow = AroundChannels::new(world.ledger.clone(), Slow(Duration::from_millis(5)));
    let app = world.obeying(world.shop.layer().vouchers(world.process(slow).await));
    let channel = world.filled(&app).await;
    let cheap = send(&app, pay(&app, &channel, 2 * COST, None, "costs 300").await).await;
    assert_eq!(cheap.status, StatusCode::OK, "{cheap:?}");
    world.channels.claim_all().await.expect("the devnet claims");
    let public = by_voucher(&app, &channel, 2 * COST).await;
    let refused = Arc::new(AtomicU64::new(0));
    let strangers: Vec<_> = (0..32)
        .map(|_| {
            let (app, public, refused) = (app.clone(), public.clone(), refused.clone());
            tokio::spawn(async move {
                loop {
                    let answer = send(&app, paid(evaluate("a"), &public)).await;
                    assert!(!answer.status.is_success(), "{answer:?}");
                    refused.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    eventually("they are refused", async || refused.load(Ordering::SeqCst) > 64).await;
    let refunded = support::world::refund(&app, &channel, COST + 300, None);
    let answer = tokio::time::timeout(Duration::from_secs(10), refunded).await.expect("it is refunded soon");
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Takes this long for each call.
struct Slow(Duration);

impl Around for Slow {
    async fn around<T: Send>(
        &self,
        _: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        tokio::time::sleep(self.0).await;
        work.await
    }
}

/// The newest voucher was charged in part, and is on the chain with its signature since that was claimed.
#[tokio::test]
async fn copies_of_a_claimed_voucher_take_no_room_of_its_payers_next_request() {
    let world = World::open().await;
    let layer = world.layer().max_concurrent(PLACES);
    let app = world.obeying(layer);
    let channel = world.filled(&app).await;
    let cheap = send(&app, pay(&app, &channel, 2 * COST, None, "costs 300").await).await;
    assert_eq!(cheap.status, StatusCode::OK, "{cheap:?}");
    assert_eq!(world.channels.claim_all().await.expect("the devnet claims").claimed, COST + 300);
    let (begun, come) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
    let body = Body::from_stream(stream::once({
        let (begun, come) = (begun.clone(), come.clone());
        async move {
            begun.notify_one();
            drop(come.acquire().await);
            Ok::<_, Infallible>("mine")
        }
    }));
    let next = by_voucher(&app, &channel, COST + 300 + COST).await;
    let mine = ask(&app, paid(Request::post("/evaluate?k=1").body(body).unwrap(), &next));
    in_time("its body is waited for", begun.notified()).await;
    let (public, held) = (by_voucher(&app, &channel, 2 * COST).await, Arc::<Held>::default());
    let strangers: Vec<_> = (0..STALLED).map(|_| ask(&app, paid(stalled(&held), &public))).collect();
    eventually("all but the last make room", async || finished(&strangers) == STALLED - 1).await;
    come.close();
    let answer = in_time("it is served", mine).await.unwrap();
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "mine"), "{answer:?}");
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

/// A mebibyte that has arrived, and is counted for as long as somebody holds it.
fn arrived(held: &Arc<Held>) -> Request<Body> {
    let now = held.now.fetch_add(1, Ordering::SeqCst) + 1;
    held.most.fetch_max(now, Ordering::SeqCst);
    let piece = Bytes::from_owner(Piece(vec![7; 1 << 20], held.clone()));
    Request::post("/evaluate?k=1").body(Body::from(piece)).expect("a request")
}

#[tokio::test]
async fn requests_that_wait_with_their_bodies_take_little_memory() {
    let world = World::open().await;
    let (app, go_on) = holding(&world);
    let channel = world.filled(&app).await;
    let customer = Customer::with_funds(&world.chain, 2 * PRICE).await;
    let first = ask(&app, pay(&app, &channel, 2 * COST, None, "held").await);
    let purchase = customer.pay(&app, evaluate("held")).await;
    let work = ask(&app, purchase.on(evaluate("held")));
    eventually("they are worked on", async || world.shop.handled() == 3).await;
    let payment = by_voucher(&app, &channel, 2 * COST).await;
    let held = Arc::<Held>::default();
    let waiting: Vec<_> = (0..32).map(|_| ask(&app, paid(arrived(&held), &payment))).collect();
    eventually("all but one make room", async || finished(&waiting) == 31).await;
    assert!(held.now.load(Ordering::SeqCst) <= 1, "they hold nothing");
    assert!(!first.is_finished() && !work.is_finished());
    go_on.close();
    for answer in [first, work] {
        assert_eq!(in_time("it is served", answer).await.unwrap().status, StatusCode::OK);
    }
}

/// A body that is announced, and of which nothing comes.
struct Announced;

impl http_body::Body for Announced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(1 << 20)
    }
}

#[tokio::test]
async fn payer_is_given_its_answer_while_others_announce_bodies_for_their_payments() {
    let world = World::open().await;
    let app = world.shop.app(world.layer());
    let channel = world.filled(&app).await;
    let attackers = [world.filled(&app).await, world.filled(&app).await];
    let purchase = Customer::with_funds(&world.chain, PRICE).await.pay(&app, evaluate("first")).await;
    assert_eq!(send(&app, purchase.on(evaluate("first"))).await.status, StatusCode::OK);
    let payments = [by_voucher(&app, &channel, COST).await, purchase.payload()];
    let (come, arrive) = (Arc::new(Semaphore::new(0)), |payment: &serde_json::Value, come: &Arc<Semaphore>| {
        let come = come.clone();
        let body = Body::from_stream(stream::once(async move {
            drop(come.acquire().await);
            Ok::<_, Infallible>("first")
        }));
        ask(&app, paid(Request::post("/evaluate?k=1").body(body).unwrap(), payment))
    });
    let waiting = payments.each_ref().map(|payment| arrive(payment, &come));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut strangers = Vec::new();
    for attacker in &attackers {
        let payment = by_voucher(&app, attacker, COST).await;
        for _ in 0..STALLED {
            let request = Request::post("/evaluate?k=1").body(Body::new(Announced)).unwrap();
            strangers.push(ask(&app, paid(request, &payment)));
        }
    }
    eventually("the oldest of each make room", async || finished(&strangers) == 2 * (STALLED - 16)).await;
    come.close();
    for answer in waiting {
        let answer = in_time("it is answered", answer).await.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "first"), "{answer:?}");
    }
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn voucher_above_what_is_in_the_channel_has_no_body_kept() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let held = Arc::<Held>::default();
    for (max, code) in [(DEPOSIT + 1, "cumulative_amount_mismatch"), (DEPOSIT + COST, "cumulative_amount_mismatch")] {
        refused(&send(&app, paid(stalled(&held), &by_voucher(&app, &channel, max).await)).await, code);
    }
    assert!(held.most.load(Ordering::SeqCst) <= 1, "and not kept");
}
