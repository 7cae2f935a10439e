//! What one request costs, on one thread and without a network: time and allocations of every step, and of the whole.
//!
//! ```text
//! cargo bench -p tower-x402-tests --bench hot_path                       all of it
//! cargo bench -p tower-x402-tests --bench hot_path -- whole              the whole path of a request, through an axum router
//! cargo bench -p tower-x402-tests --bench hot_path -- steps              what it is made of
//! cargo bench -p tower-x402-tests --bench hot_path -- 'by a wallet'      the lines of that name
//! cargo bench -p tower-x402-tests --bench hot_path --features secp256k1  recovery with libsecp256k1
//! ```
//!
//! For instructions in place of time, which need a quiet machine no more than allocations do, any one line of the table
//! by its name, as often as told:
//!
//! ```text
//! valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*measured*' \
//!     target/release/deps/hot_path-… once 'paid, by a wallet' 200
//! ```
//!
//! Times are those of the thread's own clock, of short runs interleaved with those of all other lines, so that what else the
//! machine does hits all of them alike: the least is given, and the median. Allocations are exact.

use std::{alloc::System, hint::black_box, time::Duration};

use alloy_primitives::B256;
use alloy_signer::SignerSync as _;
use axum::body::Body;
use http::{HeaderValue, Request, StatusCode};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::hot_path::{
    Answers, AtOnce, Mint, NOW, Seller, Signed, VALID, VoucherMint, answer, buyer, clock, layer, order,
};
use support::thread_time::ThreadTime;
use tokio::runtime::Runtime;
use tower::Service as _;
use tower_x402::{
    client::AddPayment,
    eip3009::AuthorizationSigner,
    facilitator::batch_calldata,
    ledger::{Fingerprint, FulfilmentStep, Ledger as _, MemoryLedger, Record, Reservation, SettlementStep},
    payment::{Terms, Window, precheck},
    protocol::{ExactPayload, MAX_PAYMENT_HEADER, PaymentPayload, PaymentRequired, decode_header, encode_header},
    server::RequirePaymentLayer,
};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// How often each line is run, and how much of it at a time.
const RUNS: usize = 60;

/// One line of the table.
struct Line {
    name: &'static str,
    /// How many times the work is done in one run.
    size: usize,
    /// Prepares a run, and gives the work itself, of which only the doing is timed.
    prepare: Box<dyn FnMut(usize) -> Box<dyn FnOnce()>>,
    times: Vec<Duration>,
    allocations: f64,
}

impl Line {
    fn new(name: &'static str, size: usize, prepare: impl FnMut(usize) -> Box<dyn FnOnce()> + 'static) -> Self {
        Self { name, size, prepare: Box::new(prepare), times: Vec::new(), allocations: 0.0 }
    }

    fn run(&mut self) {
        let work = (self.prepare)(self.size);
        let before = HEAP.stats().allocations;
        let started = ThreadTime::now();
        measured(work);
        self.times.push(started.elapsed() / self.size as u32);
        self.allocations = (HEAP.stats().allocations - before) as f64 / self.size as f64;
    }

    /// Without a look at a clock, which valgrind has none of.
    fn run_untimed(&mut self) {
        let work = (self.prepare)(self.size);
        measured(work);
    }

    fn report(&mut self) {
        self.times.sort();
        let micros = |time: Duration| time.as_nanos() as f64 / 1_000.0;
        let (least, median) = (micros(self.times[0]), micros(self.times[self.times.len() / 2]));
        println!("| {} | {least:.2} | {median:.2} | {:.1} |", self.name, self.allocations);
    }
}

/// What callgrind counts.
#[inline(never)]
fn measured(work: Box<dyn FnOnce()>) {
    work();
}

fn runtime() -> &'static Runtime {
    static RUNTIME: std::sync::LazyLock<Runtime> =
        std::sync::LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap());
    &RUNTIME
}

/// A line that does the same all the time.
fn again<T>(name: &'static str, size: usize, work: impl Fn() -> T + Clone + 'static) -> Line {
    Line::new(name, size, move |size| {
        let work = work.clone();
        Box::new(move || {
            for _ in 0..size {
                black_box(work());
            }
        })
    })
}

/// A line that does something to each of many things.
fn each<I: 'static, T>(
    name: &'static str,
    size: usize,
    mut one: impl FnMut() -> I + 'static,
    work: impl Fn(I) -> T + Clone + 'static,
) -> Line {
    Line::new(name, size, move |size| {
        let things: Vec<I> = (0..size).map(|_| one()).collect();
        let work = work.clone();
        Box::new(move || {
            for thing in things {
                black_box(work(thing));
            }
        })
    })
}

/// Requests to a router, of which every one is answered with `status`. A task asks for them, as a server's connection does: what
/// the runtime itself waits for costs two system calls whenever it has waited.
fn requests(
    name: &'static str,
    app: impl Answers<Future: Send, Body: Send> + Clone + Send + 'static,
    status: StatusCode,
    mut request: impl FnMut() -> Request<Body> + 'static,
) -> Line {
    Line::new(name, 100, move |size| {
        let requests: Vec<_> = (0..size).map(|_| request()).collect();
        let mut app = app.clone();
        Box::new(move || {
            let connection = runtime().spawn(async move {
                for request in requests {
                    let response = answer(&mut app, request).await;
                    assert_eq!(response.status(), status);
                    black_box(response);
                }
            });
            runtime().block_on(connection).unwrap();
        })
    })
}

fn paywall() -> RequirePaymentLayer {
    layer(AtOnce::in_memory(clock()), clock()).build().unwrap()
}

fn paid(
    name: &'static str,
    app: impl Answers<Future: Send, Body: Send> + Clone + Send + 'static,
    signed: Signed,
) -> Line {
    let mut mint = Mint::new(50);
    requests(name, app, StatusCode::OK, move || support::hot_path::paid(&mint.header(signed, NOW)))
}

/// The same handler, paid with vouchers of one channel.
fn paid_by_voucher() -> Line {
    let _runtime = runtime().enter();
    let ledger = std::sync::Arc::new(MemoryLedger::with(Default::default(), 10_000_000, clock()));
    let channels = support::hot_path::rich_channels(ledger, clock());
    let layer = layer(AtOnce::in_memory(clock()), clock()).vouchers(channels).build().unwrap();
    let mut app = support::hot_path::sold(layer);
    let mut mint = runtime().block_on(VoucherMint::of(&mut app));
    requests("paid, by a voucher", app, StatusCode::OK, move || support::hot_path::paid(&mint.header()))
}

fn whole() -> Vec<Line> {
    let sold = support::hot_path::sold(paywall());
    let anywhere = AtOnce::in_memory(clock());
    let anywhere = RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(tower_x402::Network::BASE_SEPOLIA, support::hot_path::pay_to())
        .public_origin("https://api.example")
        .facilitator(anywhere)
        .build()
        .unwrap();
    let mut lines = vec![
        requests("bare handler", support::hot_path::bare(), StatusCode::OK, support::hot_path::unpaid),
        requests("unpaid 402", sold.clone(), StatusCode::PAYMENT_REQUIRED, support::hot_path::unpaid),
        requests(
            "unpaid 402, resource by path",
            support::hot_path::sold(anywhere),
            StatusCode::PAYMENT_REQUIRED,
            support::hot_path::unpaid,
        ),
        paid("paid, by a wallet", support::hot_path::sold(paywall()), Signed::ByWallet),
        paid("paid, by a key", support::hot_path::sold(paywall()), Signed::ByKey),
        paid_by_voucher(),
        requests(
            "the layer alone: unpaid 402",
            support::hot_path::alone(paywall()),
            StatusCode::PAYMENT_REQUIRED,
            support::hot_path::unpaid,
        ),
        paid("the layer alone: paid, by a wallet", support::hot_path::alone(paywall()), Signed::ByWallet),
        recover(),
    ];
    let mut app = sold;
    let seller = runtime().block_on(Seller::like(&mut app));
    lines.push(client(
        "client: two requests",
        {
            let seller = seller.clone();
            move || seller.clone()
        },
        async |mut seller: Seller| {
            for _ in 0..2 {
                black_box(seller.call(order()).await.unwrap());
            }
        },
    ));
    lines.push(client(
        "client: pays",
        move || buyer(seller.clone()),
        async |mut buyer: AddPayment<Seller>| {
            let response = buyer.call(order()).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            black_box(response);
        },
    ));
    lines.push(sign());
    lines
}

fn client<C: Clone + 'static>(
    name: &'static str,
    make: impl Fn() -> C + 'static,
    work: impl AsyncFn(C) + Copy + 'static,
) -> Line {
    let client = make();
    Line::new(name, 20, move |size| {
        let client = client.clone();
        Box::new(move || {
            runtime().block_on(async {
                for _ in 0..size {
                    work(client.clone()).await;
                }
            });
        })
    })
}

fn recover() -> Line {
    let (mut mint, domain) = (Mint::new(50), support::hot_path::domain());
    each(
        "recover the payer",
        50,
        move || {
            let ExactPayload { signature, authorization, .. } = mint.payment(Signed::ByKey, NOW);
            (signature, authorization.signing_hash(&domain))
        },
        |(signature, hash)| signature.recover(hash).unwrap(),
    )
}

fn sign() -> Line {
    let key = support::hot_path::key();
    let hash = B256::repeat_byte(3);
    again("sign a hash", 20, move || key.sign_hash_sync(&hash).unwrap())
}

fn steps() -> Vec<Line> {
    let mut app = support::hot_path::sold(paywall());
    let demand =
        runtime().block_on(answer(&mut app, support::hot_path::unpaid())).headers()["payment-required"].clone();
    let required: PaymentRequired = decode_header(demand.as_bytes(), MAX_PAYMENT_HEADER).unwrap();
    let header: HeaderValue = Mint::new(1).header(Signed::ByKey, NOW);
    let message: PaymentPayload = decode_header(header.as_bytes(), MAX_PAYMENT_HEADER).unwrap();
    let (authorization, domain) =
        (support::hot_path::authorization(support::hot_path::pay_to(), B256::ZERO, NOW), support::hot_path::domain());
    let (key, by_domain, to_sign) = (support::hot_path::key(), domain.clone(), authorization.clone());
    let offer = support::hot_path::terms().offer().clone();
    let terms = std::sync::Arc::new(support::hot_path::terms());
    let mut mint = Mint::new(50);
    let window = Window::default();
    let text = message.payload.clone();
    vec![
        again("decode a 402", 100, move || decode_header::<PaymentRequired>(demand.as_bytes(), MAX_PAYMENT_HEADER)),
        again("encode a 402", 100, move || encode_header(&required)),
        again("decode a payment", 100, move || decode_header::<PaymentPayload>(header.as_bytes(), MAX_PAYMENT_HEADER)),
        again("read what was signed", 100, move || text.read().unwrap()),
        again("encode a payment", 100, move || encode_header(&message)),
        again("build an offer's terms", 50, move || Terms::new(offer.clone())),
        again("hash the typed data", 100, move || authorization.signing_hash(&domain)),
        again("sign the typed data", 20, move || {
            runtime().block_on(AuthorizationSigner::sign(&key, &to_sign, &by_domain)).unwrap()
        }),
        sign(),
        recover(),
        each(
            "precheck",
            50,
            move || (terms.clone(), mint.payment(Signed::ByKey, NOW)),
            move |(terms, payload)| precheck(terms, payload, window, NOW).unwrap(),
        ),
        ledger(),
        batch_of_100(),
    ]
}

/// From a hundred payments to the calldata of the transaction that settles them.
fn batch_of_100() -> Line {
    let (mut mint, terms) = (Mint::new(50), std::sync::Arc::new(support::hot_path::terms()));
    let window = Window::default();
    let payments = move || {
        let payments =
            (0..100).map(|_| precheck(terms.clone(), mint.payment(Signed::ByKey, NOW), window, NOW).unwrap());
        payments.collect::<Vec<_>>()
    };
    let name = "batch of 100: its calldata and gas limit";
    each(name, 1, payments, |payments| batch_calldata(&payments).unwrap())
}

/// All that the layer and the facilitator ask of the ledger for one payment; `benches/ledger.rs` has the durable ones.
fn ledger() -> Line {
    let ledger = std::sync::Arc::new(MemoryLedger::with(Default::default(), 10_000_000, clock()));
    let (mut mint, terms) = (Mint::new(50), std::sync::Arc::new(support::hot_path::terms()));
    let window = Window::default();
    let record = move || {
        let payment = precheck(terms.clone(), mint.payment(Signed::ByWallet, NOW), window, NOW).unwrap();
        Record::new(&payment, Fingerprint { digest: B256::ZERO, names_caller: false }, NOW, NOW + VALID)
    };
    each("ledger in memory: reserve and five steps", 100, record, move |record| {
        runtime().block_on(async {
            let key = record.key;
            let Reservation::New(lease) = ledger.reserve(&record).await.unwrap() else { panic!("known") };
            for step in [
                FulfilmentStep::Admit { funds: None, due: false },
                FulfilmentStep::Start { until: NOW + VALID },
                FulfilmentStep::Produce { charged: None, body: None, at: NOW, response: None },
            ] {
                ledger.advance(&lease.key, &lease.step(step.clone())).await.unwrap();
            }
            let settle = SettlementStep::Settle { transaction: key.nonce, block: None, fee: None };
            ledger.advance(&key, &settle.clone().into()).await.unwrap();
            ledger.advance(&lease.key, &lease.step(FulfilmentStep::Deliver)).await.unwrap();
        });
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let mut lines = Vec::new();
    if has("whole") || !has("steps") {
        lines.extend(whole());
    }
    if has("steps") || !has("whole") {
        lines.extend(steps());
    }
    if let [once, name, size] = &arguments[..]
        && once == "once"
    {
        let line = lines.iter_mut().find(|line| line.name == name).expect("a line of that name");
        line.size = size.parse().unwrap();
        return line.run_untimed();
    }
    if let Some(name) = arguments.iter().find(|argument| !["whole", "steps"].contains(&argument.as_str())) {
        lines.retain(|line| line.name.contains(name.as_str()));
    }
    for _ in 0..RUNS {
        lines.iter_mut().for_each(Line::run);
    }
    println!("| | least, µs | median, µs | allocations |");
    println!("|---|---|---|---|");
    lines.iter_mut().for_each(Line::report);
}
