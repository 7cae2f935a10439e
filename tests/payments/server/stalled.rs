//! Memory of strangers whose bodies stand still, over sockets.

use std::{process::Command, time::Duration};

use axum::{Router, body::Body};
use http::{Request, StatusCode};
use serde_json::Value;
use support::{
    eventually::{eventually, in_time},
    permit::ExactPermit,
    scripted::{Scripted, customer as customer_without_money},
    shop::{App, Customer, PRICE, demand, evaluate, send, try_send},
    world::{COST, World, by_voucher, pay},
};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tower_x402::{
    Usdc,
    protocol::PaymentFlow,
    server::{DeferredPolicy, RequirePaymentLayerBuilder},
};
use x402_facilitator::FacilitatorService;

use super::admission::worthless;

/// How many strangers there are of each kind, and how many requests may be worked on at once.
const STRANGERS: usize = 512;
const PLACES: usize = 64;
/// How much memory they may take, in bytes.
const MOST: usize = 32 << 20;
/// Bodies are read that say what the price is. There is room of 64 MiB for all of them, beside the buffers of the connections, and those of
/// bodies that lost their place and are drained.
const PRICED_BY_BODY: &str = "no payment, price by the body";
const MOST_BY_BODY: usize = 160 << 20;

/// The memory is that of a process, so this one has a process of its own.
#[test]
fn strangers_whose_bodies_stand_still_take_less_than_32_mib() {
    let mut scenario = Command::new(std::env::current_exe().unwrap());
    scenario.args(["--exact", "server::stalled::scenario", "--ignored", "--nocapture"]);
    let output = scenario.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    print!("{text}");
}

/// A payment header, the beginning of a long body, and then nothing more.
struct Stalled {
    path: &'static str,
    header: Option<String>,
    length: usize,
}

impl Stalled {
    async fn connect(&self, to: std::net::SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(to).await.unwrap();
        let payment = self.header.as_ref().map(|header| format!("payment-signature: {header}\r\n")).unwrap_or_default();
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: shop.example\r\n{payment}content-length: {}\r\n\r\n",
            self.path, self.length
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // As much as the system takes, if the server does not read it.
        let body = vec![b'x'; self.length - 1];
        let _ = timeout(Duration::from_millis(2), stream.write_all(&body)).await;
        stream
    }
}

fn of_payment(payment: &Value) -> Stalled {
    use base64::{Engine as _, prelude::BASE64_STANDARD};
    let header = BASE64_STANDARD.encode(payment.to_string());
    Stalled { path: "/evaluate?k=1", header: Some(header), length: 1 << 20 }
}

#[tokio::test]
#[ignore = "the process that is measured; the other test starts it"]
async fn scenario() {
    let world = World::open().await;
    let app = |layer: RequirePaymentLayerBuilder| {
        world.shop.app(layer.max_concurrent(PLACES).vouchers(world.channels.clone()))
    };
    let [authorization, upfront] =
        [PaymentFlow::Authorization, PaymentFlow::Upfront].map(|flow| app(world.shop.layer().flow(flow).permits()));
    let credit = Usdc::from_atomic(100 * PRICE);
    let deferred = app(world.shop.layer().deferred(DeferredPolicy::default().per_payer(credit)));
    let price = || std::future::ready(Ok(Usdc::from_atomic(PRICE).into()));
    let priced = app(world.shop.layer().price_with_body(move |_, _| price()));
    let apps = [&authorization, &upfront, &deferred, &priced];
    let service = FacilitatorService::builder(Scripted::new()).max_concurrent(PLACES).build();
    let router = |app: &App| {
        let app = app.clone();
        Router::new().fallback(async move |request: Request<Body>| try_send(&app, request).await.expect("an answer"))
    };
    let mut addresses = Vec::new();
    for app in apps {
        addresses.push(listen(router(app)).await);
    }
    let [first, second, third, fourth] = addresses[..] else { unreachable!() };
    let service = listen(Router::new().fallback_service(service)).await;

    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, 90 * COST).await;
    let answer = send(&authorization, pay(&authorization, &channel, COST, Some(&deposit), "first").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    let customer = Customer::with_funds(&world.chain, 1_000 * PRICE).await;
    let mut paid = 1;
    serve_payers(&apps, (&channel, &mut paid), &customer).await;
    let known = customer.pay(&authorization, evaluate("known")).await;
    assert_eq!(send(&authorization, known.on(evaluate("known"))).await.status, StatusCode::OK);

    let charged = by_voucher(&authorization, &channel, COST).await;
    let facilitators = |path| move || Stalled { path, header: None, length: 60_000 };

    let mut kinds: Vec<(&str, std::net::SocketAddr, Vec<Stalled>)> = Vec::new();
    let asked = demand(&send(&authorization, evaluate("a")).await);
    let permits = (0..STRANGERS).map(|_| ExactPermit::sign(&customer_without_money().signer, &asked).payload());
    kinds.push(("permit", first, permits.map(|permit| of_payment(&permit)).collect()));
    for (kind, name) in ["voucher", "refund", "deposit", "exact"].into_iter().enumerate() {
        let mut requests = Vec::new();
        for _ in 0..STRANGERS {
            requests.push(of_payment(&worthless(&world, &authorization, kind).await));
        }
        kinds.push((name, first, requests));
    }
    for (name, app, address) in [("exact, upfront", &upfront, second), ("exact, deferred", &deferred, third)] {
        let offer = demand(&send(app, evaluate("a")).await);
        let payments = (0..STRANGERS).map(|_| of_payment(&customer_without_money().sign(&offer, 0).payload()));
        kinds.push((name, address, payments.collect()));
    }
    let known = known.payload();
    kinds.push(("a payment that was made", first, (0..STRANGERS).map(|_| of_payment(&known)).collect()));
    kinds.push(("a voucher that was charged", first, (0..STRANGERS).map(|_| of_payment(&charged)).collect()));
    let unpaid = || Stalled { path: "/evaluate?k=1", header: None, length: 1 << 20 };
    kinds.push(("no payment", first, std::iter::repeat_with(unpaid).take(STRANGERS).collect()));
    for (name, path) in [("facilitator, verify", "/verify"), ("facilitator, settle", "/settle")] {
        kinds.push((name, service, std::iter::repeat_with(facilitators(path)).take(STRANGERS).collect()));
    }
    // The last one, for its memory is not all given back.
    kinds.push((PRICED_BY_BODY, fourth, std::iter::repeat_with(unpaid).take(STRANGERS).collect()));

    let idle = resident();
    for (name, address, requests) in kinds {
        let mut streams = Vec::new();
        for request in &requests {
            streams.push(request.connect(address).await);
        }
        serve_payers(&apps, (&channel, &mut paid), &customer).await;
        let grown = resident().saturating_sub(idle);
        println!("{name}: {:.1} MiB", grown as f64 / f64::from(1 << 20));
        let most = if name == PRICED_BY_BODY { MOST_BY_BODY } else { MOST };
        assert!(grown < most, "{name}: {grown} bytes");
        drop(streams);
        eventually("their connections are closed", async || open_files() < STRANGERS).await;
    }
}

async fn listen(app: Router) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// Honest requests of each kind, each of which is served.
async fn serve_payers(apps: &[&App], (channel, paid): (&support::escrow::Channel, &mut u128), customer: &Customer) {
    for app in apps {
        *paid += 1;
        let request = pay(app, channel, *paid * COST, None, "paid").await;
        let answer = in_time("a payer is served", send(app, request)).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
        let purchase = customer.pay(app, evaluate("paid")).await;
        let answer = in_time("a payer is served", send(app, purchase.on(evaluate("paid")))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "paid"), "{answer:?}");
    }
}

/// Returns the memory of this process, in bytes.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4_096
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
