//! Clients that try to use a payment for more than it is: on another route, at another price, under another spelling of the path, in
//! another flow or version. One payment never buys twice, and never buys at another price than it was signed for.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{Router, body::Body, routing::any};
use futures_util::future::join_all;
use http::{Request, StatusCode};
use serde_json::Value;
use support::{
    chain::{Chain, on_every_chain},
    scripted::{self, Scripted},
    shop::{App, Customer, PRICE, Purchase, Shop, app, demand, evaluate, send},
};
use tower_x402::{Asset, Network, protocol::PaymentFlow, server::RequirePaymentLayer};

on_every_chain! {
    a_payment_for_one_price_never_buys_another,
    payment_sent_to_two_routes_at_once_buys_one,
    path_written_differently_is_never_served_twice_or_unpaid,
    a_payment_signed_for_one_flow_is_not_paid_again_in_another,
    payment_of_another_payer_buys_nothing,
}

/// Two routes of one seller, at $0.001 and $0.002, and how often their handlers ran.
struct Market {
    shop: Shop,
    app: App,
    cheap: Arc<AtomicU64>,
    dear: Arc<AtomicU64>,
}

impl Market {
    async fn open(chain: &dyn Chain) -> Self {
        let shop = Shop::open(chain).await;
        let counts = [Arc::<AtomicU64>::default(), Arc::default()];
        let route = |path: &str, price: &str, count: &Arc<AtomicU64>| {
            let count = count.clone();
            let handler = any(async move |body: String| {
                count.fetch_add(1, Ordering::SeqCst);
                body
            });
            Router::new().route(path, handler).route_layer(shop.layer().price(price).build().unwrap())
        };
        let [cheap, dear] = counts;
        let router = route("/cheap", "$0.001", &cheap).merge(route("/dear", "$0.002", &dear));
        Self { app: app(router), shop, cheap, dear }
    }

    fn handled(&self) -> [u64; 2] {
        [&self.cheap, &self.dear].map(|count| count.load(Ordering::SeqCst))
    }
}

fn to(path: &str) -> Request<Body> {
    Request::post(path).body(Body::from("a")).unwrap()
}

/// Checks that the answer is a refusal with this status and reason.
async fn refused(app: &App, what: &str, request: Request<Body>, status: u16, reason: &str) {
    let answer = send(app, request).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (status, reason), "{what}: {}", answer.text());
}

async fn a_payment_for_one_price_never_buys_another(chain: &dyn Chain) {
    let market = Market::open(chain).await;
    let app = &market.app;
    let customer = Customer::with_funds(chain, 100 * PRICE).await;
    let purchase = customer.pay(app, to("/cheap")).await;
    let dear_offer = demand(&send(app, to("/dear")).await)["accepts"][0].clone();
    let claiming = |offer: &Value| Purchase { offer: offer.clone(), ..purchase.clone() };

    let mismatch = "invalid_exact_evm_payload_authorization_value_mismatch";
    for _ in 0..2 {
        refused(app, "as it is", purchase.on(to("/dear")), 402, "invalid_payment_requirements").await;
        refused(app, "as if it were for the other", claiming(&dear_offer).on(to("/dear")), 402, mismatch).await;
        refused(app, "in v1", purchase.on_v1(to("/dear")), 402, mismatch).await;
        assert_eq!(market.handled(), [0, 0]);
        assert_eq!(market.shop.counts().await, Default::default(), "nothing in the ledger");
    }
    // A higher amount than the price is refused, too.
    let too_much = customer.pay(app, to("/dear")).await;
    refused(app, "too much", too_much.on(to("/cheap")), 402, "invalid_payment_requirements").await;

    // Once it is used, it buys nothing more.
    assert_eq!(send(app, purchase.on(to("/cheap"))).await.status, StatusCode::OK);
    refused(app, "used", purchase.on(to("/dear")), 409, "payment_already_used").await;
    refused(app, "used, as if for the other", claiming(&dear_offer).on(to("/dear")), 409, "payment_already_used").await;
    refused(app, "used, in v1", purchase.on_v1(to("/dear")), 409, "payment_already_used").await;
    assert_eq!((market.handled(), chain.balance(market.shop.pay_to).await), ([1, 0], PRICE));
}

/// The offers differ only in the path, and the two routes share only a ledger.
async fn payment_sent_to_two_routes_at_once_buys_one(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, 100 * PRICE).await;
    let purchase = customer.pay(&app, to("/one")).await;
    let answers =
        join_all((0..20).map(|n| send(&app, purchase.on(to(if n % 2 == 0 { "/one" } else { "/other" }))))).await;
    let served: Vec<bool> = answers.iter().map(|answer| answer.status == StatusCode::OK).collect();
    for (n, answer) in answers.iter().enumerate() {
        assert_eq!(served[n], served[n % 2], "one of the two is served, and only that one");
        assert!(served[n] || answer.status == StatusCode::CONFLICT, "{answer:?}");
    }
    assert_ne!(served[0], served[1]);
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

async fn path_written_differently_is_never_served_twice_or_unpaid(chain: &dyn Chain) {
    let market = Market::open(chain).await;
    let app = &market.app;
    let customer = Customer::with_funds(chain, 100 * PRICE).await;
    let purchase = customer.pay(app, to("/cheap")).await;
    assert_eq!(send(app, purchase.on(to("/cheap"))).await.status, StatusCode::OK);
    for path in [
        "/%63heap",
        "/chea%70",
        "/che%61p",
        "/cheap/",
        "//cheap",
        "/./cheap",
        "/x/../cheap",
        "/cheap/.",
        "/CHEAP",
        "/cheap;a=b",
        "/cheap%20",
        "/cheap%2F",
        "/%2Fcheap",
        "/cheap?",
        "/cheap?a",
        "/cheap?%61",
        "/cheap%3Fa",
        "/cheap%00",
        "/%64ear",
        "/dear/",
    ] {
        for request in [to(path), purchase.on(to(path)), purchase.on_v1(to(path))] {
            let answer = send(app, request).await;
            let is_refused = [402, 404, 409].contains(&answer.status.as_u16());
            assert!(is_refused && answer.text() != "a", "{path}: {answer:?}");
        }
    }
    assert_eq!((market.handled(), chain.balance(market.shop.pay_to).await), ([1, 0], PRICE));

    // A service that treats all spellings as one page sells each at its own price, once per payment.
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let spellings = ["/evaluate", "/%65valuate", "/evaluat%65", "//evaluate", "/evaluate/", "/EVALUATE"];
    let purchase = customer.pay(&app, to(spellings[0])).await;
    for path in spellings {
        assert_eq!(send(&app, to(path)).await.status, StatusCode::PAYMENT_REQUIRED, "{path}");
        let answer = send(&app, purchase.on(to(path))).await;
        assert_eq!(answer.status == StatusCode::OK, path == spellings[0], "{path}: {answer:?}");
    }
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

async fn a_payment_signed_for_one_flow_is_not_paid_again_in_another(chain: &dyn Chain) {
    let flows = [PaymentFlow::Authorization, PaymentFlow::Upfront];
    for (index, flow) in flows.into_iter().enumerate() {
        // This seller offers the other flow only.
        let shop = Shop::open(chain).await;
        let other = shop.app(shop.layer().flow(flows[1 - index]));
        let both = shop.app(flows.iter().fold(shop.layer(), |layer, flow| layer.flow(*flow)));
        let customer = Customer::with_funds(chain, 100 * PRICE).await;
        let purchase = customer.pay_offer(&both, evaluate("a"), index).await;
        assert_eq!(purchase.offer["extra"].get("paymentFlow").is_some(), flow == PaymentFlow::Upfront);
        refused(&other, "another flow", purchase.on(evaluate("a")), 402, "invalid_payment_requirements").await;
        assert_eq!(shop.counts().await, Default::default(), "nothing in the ledger");

        // This seller offers both. The authorization does not name the flow, so the first request decides.
        let first = send(&both, purchase.on(evaluate("a"))).await;
        assert_eq!((first.status, first.text()), (StatusCode::OK, "a"), "{flow}");
        let offers = demand(&send(&both, evaluate("a")).await)["accepts"].clone();
        let renamed = Purchase { offer: offers[1 - index].clone(), ..purchase.clone() };
        for (what, request) in [("the other flow", renamed.on(evaluate("a"))), ("v1", purchase.on_v1(evaluate("a")))] {
            let again = send(&both, request).await;
            assert_eq!((again.status, again.text()), (StatusCode::OK, "a"), "{flow}, {what}: replayed");
        }
        refused(&both, "another request", renamed.on(evaluate("b")), 409, "payment_already_used").await;
        assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE), "{flow}");
    }
}

async fn payment_of_another_payer_buys_nothing(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let payer = Customer::with_funds(chain, 100 * PRICE).await;
    let thief = Customer::with_funds(chain, 100 * PRICE).await;
    let secret = || Request::post("/evaluate").header("authorization", "Bearer payer").body(Body::from("a")).unwrap();
    let purchase = payer.pay(&app, secret()).await;
    let signature = "invalid_exact_evm_payload_signature";
    // Stolen in transit, before it is used: redirected to the thief, or signed by it.
    let mut renamed = purchase.clone();
    renamed.authorization.from = thief.from;
    refused(&app, "in another name", renamed.on(secret()), 402, signature).await;
    let mut resigned = Purchase { signer: thief.signer.clone(), ..purchase.clone() };
    resigned.resign();
    refused(&app, "signed by another", resigned.on(secret()), 402, signature).await;
    assert_eq!(shop.counts().await, Default::default(), "nothing in the ledger");

    // Read from the chain after it was used, and presented with another request.
    assert_eq!(send(&app, purchase.on(secret())).await.status, StatusCode::OK);
    refused(&app, "for another caller", purchase.on(to("/evaluate")), 409, "payment_already_used").await;
    refused(&app, "resigned", resigned.on(secret()), 402, signature).await;
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

/// A network without a name in v1 is neither offered nor paid in v1.
#[tokio::test]
async fn a_payment_in_v1_to_an_offer_of_v2_only_is_refused() {
    let facilitator = Arc::new(Scripted::new());
    let asset = Asset::new(Network::eip155(31_337), alloy_primitives::Address::repeat_byte(5), "USDC", "2");
    let layer = RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to_in(asset, alloy_primitives::Address::repeat_byte(6))
        .facilitator(facilitator.clone());
    let (app, handled) = scripted::serve(layer, scripted::echo);
    let purchase = scripted::customer().pay(&app, evaluate("a")).await;
    let answer = send(&app, evaluate("a")).await;
    assert_eq!(answer.json()["x402Version"], 2, "nothing is offered in v1");
    for network in ["base-sepolia", "base", "eip155:31337", "31337", ""] {
        let mut payload = purchase.payload_v1();
        payload["network"] = network.into();
        refused(&app, network, support::shop::paid_v1(evaluate("a"), &payload), 402, "invalid_network").await;
    }
    let in_the_header_of_v2 = support::shop::paid(evaluate("a"), &purchase.payload_v1());
    refused(&app, "v1 in the header of v2", in_the_header_of_v2, 400, "invalid_x402_version").await;
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (0, 0));
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.status, StatusCode::OK);
}
