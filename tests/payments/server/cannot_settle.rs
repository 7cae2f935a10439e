//! The client's answer and the ledger's record if the engine cannot settle a payment, or does not know whether it did.
//!
//! The devnet is called without a network, so that the tests run in virtual time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::U256;
use alloy_provider::Provider as _;
use http::StatusCode;
use support::{
    authorization::unix_now,
    devnet::DevnetChain,
    eventually::eventually,
    scripted::key,
    shop::{Answer, App, Customer, PRICE, Purchase, Shop, evaluate, send},
};
use tokio::time::{Instant, sleep};
use tower_x402::{
    ManualClock, Usdc,
    facilitator::{Facilitator as _, OnchainFacilitatorBuilder},
    ledger::{Fulfilment, Record, Settlement},
    protocol::{PaymentFlow, Reason},
    server::DeferredPolicy,
};
use x402_devnet::Fault;

const SYNC: &str = "eth_sendRawTransactionSync";
const SEND: &str = "eth_sendRawTransaction";

struct Scene {
    chain: DevnetChain,
    shop: Shop,
}

impl Scene {
    async fn open(settings: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder) -> Self {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::in_process(&chain, settings).await;
        Self { chain, shop }
    }

    async fn customer(&self) -> Customer {
        Customer::with_funds(&self.chain, 10 * PRICE).await
    }

    fn broadcasts_end_in(&self, code: i64, message: &'static str) {
        self.chain.devnet.faults().reset();
        self.chain.devnet.faults().set(move |call| match call.method {
            SYNC | SEND => Fault::Error { code, message: message.into() },
            _ => Fault::None,
        });
    }

    fn calls(&self, method: &str) -> u64 {
        self.chain.devnet.faults().calls().get(method).copied().unwrap_or_default()
    }

    async fn record(&self, purchase: &Purchase) -> Record {
        self.shop.facilitator.ledger().get(&key(purchase)).await.unwrap().unwrap()
    }

    /// Returns the payee's balance.
    fn received(&self) -> u64 {
        self.chain.devnet.balance_of(self.shop.pay_to).unwrap().atomic()
    }

    /// Waits for a dozen background passes.
    async fn a_minute_later(&self) {
        sleep(Duration::from_secs(60)).await;
    }
}

async fn buy(app: &App, customer: &Customer) -> (Purchase, Answer) {
    let purchase = customer.pay(app, evaluate("x")).await;
    let answer = send(app, purchase.on(evaluate("x"))).await;
    (purchase, answer)
}

/// Checks for a 503 that says that this request charged nothing.
fn is_unavailable(answer: &Answer, retry_after: &str) {
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "facilitator_unavailable"));
    assert_eq!(answer.headers["retry-after"], retry_after);
    assert_eq!(answer.settlement(), None);
    assert!(answer.text().contains("nothing was charged by this request"), "{answer:?}");
}

/// The node refuses every transaction, as with a wrong chain id or gas limit.
#[tokio::test(start_paused = true)]
async fn work_is_not_charged_while_nodes_refuse_its_transaction() {
    let scene = Scene::open(|b| b).await;
    let (app, customer) = (scene.shop.app(scene.shop.layer()), scene.customer().await);
    scene.broadcasts_end_in(-32000, "exceeds block gas limit of the node at 10.0.0.7");
    let (purchase, answer) = buy(&app, &customer).await;
    is_unavailable(&answer, "60");
    assert!(!answer.text().contains("10.0.0.7"), "the node's words are not the client's: {answer:?}");
    assert_eq!(scene.calls(SYNC), 1, "trying again does not help");
    let record = scene.record(&purchase).await;
    assert_eq!((record.fulfilment, record.settlement), (Fulfilment::Produced, Settlement::Due));
    assert_eq!((record.last_failure, record.transactions.len()), (Some(Reason::UnexpectedSettleError), 1));
    // The client was told that nothing is charged, and nothing is, even if the node accepts transactions later.
    scene.chain.devnet.faults().clear();
    scene.a_minute_later().await;
    assert_eq!((scene.received(), scene.shop.handled()), (0, 1));
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "x"));
    assert_eq!(scene.record(&purchase).await.settlement.paid_by(), Some(again.transaction()));
    assert_eq!((scene.received(), scene.shop.handled()), (PRICE, 1), "the work is not done twice");
}

#[tokio::test(start_paused = true)]
async fn upfront_payment_that_nodes_refuse_starts_no_work() {
    let scene = Scene::open(|b| b).await;
    let (app, customer) = (scene.shop.app(scene.shop.layer().flow(PaymentFlow::Upfront)), scene.customer().await);
    scene.broadcasts_end_in(-32000, "invalid chain id for signer");
    let (purchase, answer) = buy(&app, &customer).await;
    is_unavailable(&answer, "60");
    let record = scene.record(&purchase).await;
    assert_eq!((record.attempts, record.settlement), (0, Settlement::Due));
    scene.chain.devnet.faults().clear();
    scene.a_minute_later().await;
    assert_eq!((scene.received(), scene.shop.handled()), (0, 0));
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "x"));
    assert_eq!((scene.received(), scene.shop.handled()), (PRICE, 1));
}

/// The answer was released, so the payment stays due and is tried again until a node accepts it.
#[tokio::test(start_paused = true)]
async fn deferred_payment_stays_due_while_nodes_refuse_its_transaction() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let scene = Scene::open(|b| b.clock(clock.clone())).await;
    let three = Usdc::from_atomic(3 * PRICE);
    let policy = DeferredPolicy::default().per_payer(three);
    let (app, customer) = (
        scene.shop.app(scene.shop.layer().max_timeout(Duration::from_secs(600)).deferred(policy)),
        scene.customer().await,
    );
    buy(&app, &customer).await.1.transaction();
    scene.broadcasts_end_in(-32000, "exceeds block gas limit");
    let (purchase, answer) = buy(&app, &customer).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "x"));
    assert_eq!(answer.settlement().unwrap()["transaction"], "");
    for _ in 0..3 {
        scene.a_minute_later().await;
        clock.advance(61);
    }
    assert_eq!(scene.calls(SYNC), 3, "it is tried again and again");
    let record = scene.record(&purchase).await;
    assert_eq!((record.settlement, record.owed()), (Settlement::Due, U256::from(PRICE)));
    assert_eq!(scene.received(), PRICE);
    scene.chain.devnet.faults().clear();
    clock.advance(61);
    eventually("what is owed is paid", async || scene.record(&purchase).await.settlement.paid_by().is_some()).await;
    assert_eq!((scene.received(), scene.shop.handled()), (2 * PRICE, 2));
}

/// The node accepts the transaction and then does not answer: the outcome is unknown, not failed.
#[tokio::test(start_paused = true)]
async fn payment_that_is_not_mined_in_time_is_pending_until_its_outcome_is_known() {
    let scene = Scene::open(|b| b).await;
    let (app, customer) = (scene.shop.app(scene.shop.layer()), scene.customer().await);
    scene.chain.devnet.stall(true);
    let begun = Instant::now();
    let (purchase, answer) = buy(&app, &customer).await;
    assert_eq!(begun.elapsed().as_secs(), 15);
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending"));
    let (told, record) = (answer.settlement().unwrap(), scene.record(&purchase).await);
    assert_eq!((told["success"].as_bool(), told["errorReason"].as_str()), (Some(false), Some("settlement_pending")));
    assert_eq!(told["transaction"], record.transactions.last().unwrap().to_string());
    assert_eq!((record.settlement, record.last_failure), (Settlement::Unknown, None));
    scene.chain.devnet.stall(false);
    scene.a_minute_later().await;
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "x"));
    assert!(record.transactions.contains(&again.transaction()));
    assert_eq!((scene.received(), scene.shop.handled()), (PRICE, 1));
}

/// After four attempts the buyer is told that nothing is charged.
#[tokio::test(start_paused = true)]
async fn work_is_not_charged_while_its_transactions_are_not_mined() {
    let scene = Scene::open(|b| b).await;
    let (app, customer) = (scene.shop.app(scene.shop.layer()), scene.customer().await);
    scene.broadcasts_end_in(-32000, "txpool is full");
    let (purchase, answer) = buy(&app, &customer).await;
    is_unavailable(&answer, "2");
    assert_eq!(scene.calls(SYNC), 4);
    let record = scene.record(&purchase).await;
    assert_eq!((record.settlement, record.last_failure), (Settlement::Due, Some(Reason::UnexpectedSettleError)));
    scene.chain.devnet.faults().clear();
    scene.a_minute_later().await;
    assert_eq!(scene.received(), 0);
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "x");
    assert_eq!((scene.received(), scene.shop.handled()), (PRICE, 1));
}

/// The only slot is taken by a transaction that is not mined. After a minute in the queue no transaction was signed for this payment.
#[tokio::test(start_paused = true)]
async fn work_is_not_charged_after_a_minute_in_the_settlement_queue() {
    let scene = Scene::open(|b| b.in_flight(1).batch_size(1)).await;
    let app = scene.shop.app(scene.shop.layer().max_timeout(Duration::from_secs(600)));
    let customers = [scene.customer().await, scene.customer().await];
    scene.chain.devnet.stall(true);
    let begun = Instant::now();
    let first = buy(&app, &customers[0]);
    let second = async {
        sleep(Duration::from_secs(1)).await;
        let bought = buy(&app, &customers[1]).await;
        (bought, begun.elapsed().as_secs())
    };
    let ((_, first), ((purchase, second), waited)) = tokio::join!(first, second);
    assert_eq!(first.reason(), "settlement_pending");
    is_unavailable(&second, "2");
    assert!((61..=62).contains(&waited), "{waited} seconds");
    let record = scene.record(&purchase).await;
    assert_eq!((record.settlement, record.transactions.len()), (Settlement::Due, 0));
    assert_eq!(record.last_failure, Some(Reason::UnexpectedSettleError));
    scene.chain.devnet.stall(false);
    scene.a_minute_later().await;
    assert_eq!(scene.received(), PRICE, "the first one's");
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "x");
    assert_eq!((scene.received(), scene.shop.handled()), (2 * PRICE, 2));
}

#[tokio::test(start_paused = true)]
async fn empty_gas_balance_charges_nothing_and_is_known_before_the_next_work() {
    let scene = Scene::open(|b| b).await;
    let (app, customer) = (scene.shop.app(scene.shop.layer()), scene.customer().await);
    let account = scene.shop.facilitator.settlement_address();
    let provider = scene.chain.devnet.provider();
    provider.raw_request::<_, ()>("anvil_setBalance".into(), (account, U256::from(7))).await.unwrap();
    let (purchase, answer) = buy(&app, &customer).await;
    is_unavailable(&answer, "60");
    let record = scene.record(&purchase).await;
    assert_eq!((record.fulfilment, record.settlement), (Fulfilment::Produced, Settlement::Due));
    let (_, refused) = buy(&app, &customer).await;
    is_unavailable(&refused, "60");
    assert_eq!(scene.shop.handled(), 1, "the second one's work was not begun");
    scene.chain.devnet.fund(account, U256::from(10).pow(U256::from(18)));
    scene.a_minute_later().await;
    assert_eq!(scene.received(), 0, "it was told that nothing is charged");
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.text(), "x");
    assert_eq!((scene.received(), scene.shop.handled()), (PRICE, 1));
}

/// On a node without final blocks, payments are settled and never reported as final.
#[tokio::test(start_paused = true)]
async fn on_a_chain_without_final_blocks_payments_are_settled_and_followed() {
    let scene = Scene::open(|b| b).await;
    let looks = Arc::new(AtomicU64::new(0));
    let count = looks.clone();
    scene.chain.devnet.faults().set(move |call| match call.method {
        "eth_getBlockByNumber" if call.params[0] == "finalized" => {
            count.fetch_add(1, Ordering::Relaxed);
            Fault::Error { code: -39001, message: "finalized block not found".into() }
        }
        _ => Fault::None,
    });
    let (app, customer) = (scene.shop.app(scene.shop.layer()), scene.customer().await);
    let (purchase, answer) = buy(&app, &customer).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "x"));
    for _ in 0..100 {
        scene.chain.devnet.mine();
    }
    scene.a_minute_later().await;
    assert!(looks.load(Ordering::Relaxed) >= 2, "it is asked for again and again");
    let record = scene.record(&purchase).await;
    assert!(matches!(record.settlement, Settlement::Settled { .. }), "{:?}", record.settlement);
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.transaction(), answer.transaction());
    // As soon as there are final blocks, it is in one.
    scene.chain.devnet.faults().clear();
    eventually("the payment is final", async || {
        matches!(scene.record(&purchase).await.settlement, Settlement::Final { .. })
    })
    .await;
    assert_eq!((scene.received(), scene.shop.handled()), (PRICE, 1));
}
