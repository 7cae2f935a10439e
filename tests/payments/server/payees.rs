//! The price says who is paid, so that one layer charges for many sellers.

use alloy_primitives::Address;
use axum::body::Body;
use http::{Request, StatusCode};
use support::{
    authorization::random_address,
    chain::Chain,
    devnet::DevnetChain,
    shop::{App, Customer, PRICE, Shop, demand, send},
};
use tower_x402::{Usdc, server::Quote};

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
