//! The price says who is paid, so that one layer charges for many sellers.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use alloy_primitives::Address;
use axum::body::Body;
use http::{Request, StatusCode};
use support::{
    authorization::random_address,
    chain::Chain,
    devnet::DevnetChain,
    shop::{App, Customer, PRICE, Shop, demand, paid, send},
};
use tower_x402::{
    Usdc,
    ledger::Counts,
    protocol::PaymentFlow,
    server::{PriceError, Quote},
};

struct Mall {
    chain: DevnetChain,
    shop: Shop,
    app: App,
    sellers: [Address; 2],
    customer: Customer,
}

impl Mall {
    async fn open() -> Self {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let sellers = [random_address(), random_address()];
        let layer = shop.layer().price_with(move |request| {
            let pay_to = match request.uri.path() {
                "/0" => Some(sellers[0]),
                "/1" => Some(sellers[1]),
                "/nobody" => Some(Address::ZERO),
                _ => None,
            };
            let amount = Usdc::from_atomic(PRICE);
            async move { Ok(pay_to.map_or(amount.into(), |pay_to| Quote::To { pay_to, amount })) }
        });
        let app = shop.app(layer);
        let customer = Customer::with_funds(&chain, 9 * PRICE).await;
        Self { chain, shop, app, sellers, customer }
    }

    async fn income(&self) -> [u64; 3] {
        let [first, second] = self.sellers;
        [self.chain.balance(first).await, self.chain.balance(second).await, self.chain.balance(self.shop.pay_to).await]
    }
}

fn ask(path: &'static str) -> Request<Body> {
    Request::post(path).body(Body::from(path)).unwrap()
}

#[tokio::test]
async fn each_seller_is_paid_for_its_own_requests() {
    let mall = Mall::open().await;
    for (path, income) in [("/0", [PRICE, 0, 0]), ("/1", [PRICE, PRICE, 0]), ("/else", [PRICE, PRICE, PRICE])] {
        let purchase = mall.customer.pay(&mall.app, ask(path)).await;
        assert_eq!(send(&mall.app, purchase.on(ask(path))).await.text(), path);
        assert_eq!(send(&mall.app, purchase.on(ask(path))).await.text(), path, "replayed");
        assert_eq!(mall.income().await, income, "{path}");
    }
    let in_v1 = mall.customer.pay_v1(&mall.app, ask("/1")).await;
    assert_eq!(send(&mall.app, in_v1.on_v1(ask("/1"))).await.status, StatusCode::OK);
    assert_eq!((mall.income().await, mall.shop.handled()), ([PRICE, 2 * PRICE, PRICE], 4));
}

#[tokio::test]
async fn payment_to_one_seller_buys_nothing_from_another() {
    let mall = Mall::open().await;
    let purchase = mall.customer.pay(&mall.app, ask("/0")).await;
    let answer = send(&mall.app, purchase.on(ask("/1"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (402, "invalid_payment_requirements"));
    assert_eq!(demand(&answer)["accepts"][0]["payTo"], mall.sellers[1].to_string(), "the right offer is made again");
    let mut disguised = purchase.payload();
    disguised["accepted"] = demand(&answer)["accepts"][0].clone();
    let answer = send(&mall.app, support::shop::paid(ask("/1"), &disguised)).await;
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    assert_eq!(send(&mall.app, purchase.on(ask("/0"))).await.status, StatusCode::OK);
    assert_eq!(send(&mall.app, purchase.on(ask("/1"))).await.status, StatusCode::CONFLICT, "nor after it was used");
    assert_eq!((mall.income().await, mall.shop.handled()), ([PRICE, 0, 0], 1));
}

#[tokio::test]
async fn zero_address_is_never_paid() {
    let mall = Mall::open().await;
    let answer = send(&mall.app, ask("/nobody")).await;
    assert_eq!(
        (answer.status, answer.json()["error"].as_str()),
        (StatusCode::INTERNAL_SERVER_ERROR, Some("not_priced"))
    );
}

/// What was sold is not for sale any more.
#[tokio::test]
async fn answer_that_was_paid_for_is_given_again_after_its_request_has_lost_its_price() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let (seller, is_sold) = (random_address(), Arc::new(AtomicBool::new(false)));
    let sold = is_sold.clone();
    let layer = shop.layer().price_with(move |_| {
        let gone = sold.load(Ordering::SeqCst);
        async move {
            match gone {
                true => Err(PriceError::new(StatusCode::NOT_FOUND, "it is sold")),
                false => Ok(Quote::To { pay_to: seller, amount: Usdc::from_atomic(PRICE) }),
            }
        }
    });
    let app = shop.app(layer);
    let customer = Customer::with_funds(&chain, 9 * PRICE).await;
    let [late, late_in_v1] = [customer.pay(&app, ask("/0")).await, customer.pay_v1(&app, ask("/0")).await];
    let (bought, in_v1) = (customer.pay(&app, ask("/0")).await, customer.pay_v1(&app, ask("/1")).await);
    assert_eq!(send(&app, bought.on(ask("/0"))).await.text(), "/0");
    assert_eq!(send(&app, in_v1.on_v1(ask("/1"))).await.text(), "/1");
    is_sold.store(true, Ordering::SeqCst);
    for (request, path) in [(bought.on(ask("/0")), "/0"), (in_v1.on_v1(ask("/1")), "/1")] {
        let answer = send(&app, request).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, path), "{answer:?}");
    }
    for other in [bought.on(ask("/1")), in_v1.on_v1(ask("/0"))] {
        let answer = send(&app, other).await;
        assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, "payment_already_used"), "{answer:?}");
    }
    let mut unreadable = late.payload();
    unreadable["payload"]["signature"] = "0x00".into();
    for unknown in [
        ask("/0"),
        late.on(ask("/0")),
        late_in_v1.on_v1(ask("/0")),
        paid(ask("/0"), &unreadable),
        paid(ask("/0"), &serde_json::json!({ "x402Version": 2, "accepted": {}, "payload": {} })),
    ] {
        let answer = send(&app, unknown).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{answer:?}");
        assert_eq!(answer.json()["error"], "not_priced", "{answer:?}");
        assert!(!answer.headers.contains_key("payment-required"), "{answer:?}");
    }
    assert_eq!((shop.handled(), chain.balance(seller).await), (2, 2 * PRICE));
    assert_eq!(shop.counts().await, Counts { settled: 2, ..Counts::default() }, "nothing else is on record");
}

/// Its work is owed by whoever was paid for it.
#[tokio::test]
async fn work_that_one_seller_was_paid_for_is_done_by_no_other() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let (sellers, moved) = ([random_address(), random_address()], Arc::new(AtomicBool::new(false)));
    let is_moved = moved.clone();
    let layer = shop.layer().flow(PaymentFlow::Upfront).price_with(move |_| {
        let pay_to = sellers[usize::from(is_moved.load(Ordering::SeqCst))];
        async move { Ok(Quote::To { pay_to, amount: Usdc::from_atomic(PRICE) }) }
    });
    let app = shop.app_with(layer, |_, body| async move {
        let status = if body == "/0" { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::OK };
        Ok(http::Response::builder().status(status).body(Body::from(body)).unwrap())
    });
    let customer = Customer::with_funds(&chain, 9 * PRICE).await;
    let owed = customer.pay(&app, ask("/0")).await;
    assert_eq!(send(&app, owed.on(ask("/0"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let done = customer.pay(&app, ask("/1")).await;
    assert_eq!(send(&app, done.on(ask("/1"))).await.text(), "/1");
    moved.store(true, Ordering::SeqCst);
    assert_eq!(send(&app, done.on(ask("/1"))).await.text(), "/1", "an answer is given again whoever sells now");
    let answer = send(&app, owed.on(ask("/0"))).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (409, "payment_already_used"), "{answer:?}");
    assert_eq!(answer.settlement().expect("it is told that it has paid")["success"], true);
    moved.store(false, Ordering::SeqCst);
    assert_eq!(send(&app, owed.on(ask("/0"))).await.status, StatusCode::INTERNAL_SERVER_ERROR, "tried once more");
    assert_eq!((shop.handled(), chain.balance(sellers[0]).await, chain.balance(sellers[1]).await), (3, 2 * PRICE, 0));
}
