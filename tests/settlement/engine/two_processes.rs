//! Two processes on one ledger: if one reports a failure of a payment that the other has queued, the payment is not charged unless it is
//! presented again.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_signer_local::PrivateKeySigner;
use tower_x402::{
    ManualClock, Network,
    facilitator::{Facilitator, OnchainFacilitator},
    ledger::{
        JournaledTransaction, Ledger, Listing, MemoryLedger, ResponseLimits, Sender, Settlement, SettlementState,
        SettlementStep, Settling,
    },
    payment::{Prechecked, SettlementOutcome, Verified},
    protocol::{PaymentFlow, Reason},
};

use support::{
    authorization,
    chain::Chain,
    devnet::DevnetChain,
    engine_stage::{Stage, paid_by, settlement_key, until},
    gated_ledger::{GatedLedger, Held},
    scripted::{Scripted, away, customer, echo, layer, not_yet, paid, record, serve},
    shop::{Answer, App, Customer, FAILED_ELSEWHERE, PRICE, Shop, evaluate, send},
};

/// When the clock of the ledgers starts, in Unix seconds.
const START: u64 = 1_800_000_000;
/// Runs no background reconciliation.
const NEVER: Duration = Duration::from_secs(3_600);

/// One ledger as two processes see it.
type Views = [Arc<dyn Ledger>; 2];

fn in_memory(clock: &Arc<ManualClock>) -> Views {
    let ledger = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone()));
    [ledger.clone(), ledger]
}

#[cfg(feature = "test-postgres")]
async fn in_postgres(clock: &Arc<ManualClock>) -> Views {
    let server = support::postgres::Server::shared();
    let schema = server.new_schema();
    let connect = async || {
        let builder = tower_x402::ledger::PostgresLedger::builder(server.url()).schema(&schema).clock(clock.clone());
        Arc::new(builder.max_connections(4).connect().await.unwrap())
    };
    [connect().await, connect().await]
}

#[tokio::test]
async fn payment_queued_by_reconciliation_is_not_charged_after_a_failure_in_memory() {
    let clock = Arc::new(ManualClock::at(START));
    reconciliation_does_not_charge_after_a_failure(in_memory(&clock), clock).await;
}

#[cfg(feature = "test-postgres")]
#[tokio::test]
async fn payment_queued_by_reconciliation_is_not_charged_after_a_failure_in_postgres() {
    let clock = Arc::new(ManualClock::at(START));
    reconciliation_does_not_charge_after_a_failure(in_postgres(&clock).await, clock).await;
}

async fn reconciliation_does_not_charge_after_a_failure([first, second]: Views, clock: Arc<ManualClock>) {
    let gated = GatedLedger::over(first, Held::Submissions);
    let ledger: Arc<dyn Ledger> = gated.clone();
    let stage = Stage::build(clock, ledger, |d| d, |b| b.signer(settlement_key()).reconcile_interval(NEVER)).await;
    let other = OnchainFacilitator::builder()
        .network(stage.devnet.network())
        .client(stage.devnet.rpc_client())
        .signer(settlement_key())
        .ledger(second.clone())
        .clock(stage.clock.clone())
        .reconcile_interval(NEVER)
        .build()
        .await
        .unwrap();
    // Then the other's first pass over what is open is over, and it does not take up what follows.
    let first = stage.payment(&stage.payer(1));
    let verified = stage.admit(&first).await;
    paid_by(&other.settle(&first, &verified).await);
    let payment = stage.payment(&stage.payer(1));
    stage.produced(&payment).await;
    stage.facilitator.reconcile_now();
    gated.until_one_waits().await;
    let failed = SettlementStep::Fail {
        reason: Reason::UnexpectedSettleError,
        by: other.process_id(),
        known_transactions: Vec::new(),
    };
    second.advance(&payment.key(), &failed.clone().into()).await.expect("nothing was submitted");
    gated.open();
    until(async || stage.facilitator.stats().pending == 0).await;
    assert_eq!(stage.received(), 1, "charged without being asked");
    let record = stage.record(&payment).await;
    assert_eq!((record.settlement, record.failures), (Settlement::Due, 1));
    assert!(record.transactions.is_empty());

    let outcome = other.settle(&payment, &Verified::default()).await;
    assert!(
        matches!(outcome, Ok(SettlementOutcome::Failed { dead: false, .. })),
        "asked for before it failed: {outcome:?}"
    );
    assert_eq!(stage.received(), 1);
    paid_by(&other.settle(&payment.again(record.failures), &Verified::default()).await);
    assert_eq!(stage.received(), 2, "charged once for whoever asks again");
}

/// A payment that had failed is asked for again, and is in line when the other process takes it up or settles it.
#[tokio::test]
async fn payment_claimed_or_settled_by_another_process_is_not_reported_as_failed() {
    let transaction = B256::repeat_byte(7);
    let settling = Settling { by: 7, until: START + 600 };
    let meanwhile = [
        (SettlementStep::Claim(settling), SettlementOutcome::Unknown { transaction: None }),
        (
            SettlementStep::Settle { transaction, block: Some(1), fee: None },
            SettlementOutcome::Settled { transaction, block: Some(1), fee: None },
        ),
    ];
    for (step, expected) in meanwhile {
        let clock = Arc::new(ManualClock::at(START));
        let [first, second] = in_memory(&clock);
        let gated = GatedLedger::over(first, Held::Submissions);
        let ledger: Arc<dyn Ledger> = gated.clone();
        let stage = Stage::build(clock, ledger, |d| d, |b| b.signer(settlement_key()).reconcile_interval(NEVER)).await;
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        let failed =
            SettlementStep::Fail { reason: Reason::UnexpectedSettleError, by: 0, known_transactions: Vec::new() };
        second.advance(&payment.key(), &failed.into()).await.unwrap();
        let again = payment.clone().again(1);
        let others = async {
            gated.until_one_waits().await;
            second.advance(&payment.key(), &step.clone().into()).await.unwrap();
            gated.open();
        };
        let (outcome, ()) = tokio::join!(stage.facilitator.settle(&again, &verified), others);
        assert_eq!(outcome.unwrap(), expected, "{step:?}");
        assert_eq!(stage.received(), 0);
    }
}

/// Two sellers' processes on one ledger and one chain.
struct Sellers {
    chain: DevnetChain,
    shops: [Shop; 2],
    apps: [App; 2],
}

impl Sellers {
    async fn open(ledgers: [Arc<dyn Ledger>; 2]) -> Self {
        let chain = DevnetChain::start(None).await;
        let pay_to = authorization::random_address();
        let mut shops = Vec::new();
        for ledger in ledgers {
            let settler = PrivateKeySigner::random();
            chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
            let facilitator = OnchainFacilitator::builder()
                .rpc_url(chain.rpc_url())
                .network(Network::BASE_SEPOLIA)
                .signer(settler)
                .ledger(ledger)
                .reconcile_interval(NEVER)
                .build()
                .await
                .unwrap();
            let (facilitator, asset) = (Arc::new(facilitator), chain.asset());
            shops.push(Shop { facilitator, pay_to, asset, handled: Arc::default() });
        }
        let shops = <[Shop; 2]>::try_from(shops).unwrap_or_else(|_| panic!("two"));
        let apps = shops.each_ref().map(|shop| shop.app(shop.layer()));
        Self { chain, shops, apps }
    }

    async fn income(&self) -> u64 {
        self.chain.balance(self.shops[0].pay_to).await
    }

    async fn ask_in_background(&self, purchase: &support::shop::Purchase) -> tokio::task::JoinHandle<Answer> {
        let (app, request) = (self.apps[0].clone(), purchase.on(evaluate("x")));
        tokio::spawn(async move { send(&app, request).await })
    }
}

/// The buyer lost patience with the first process, which has the payment in line, and came to the second, which shuts down.
#[tokio::test]
async fn failure_reported_by_one_process_is_not_charged_by_another() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let gated = GatedLedger::over(ledger.clone(), Held::Submissions);
    let sellers = Sellers::open([gated.clone(), ledger]).await;
    let customer = Customer::with_funds(&sellers.chain, 10 * PRICE).await;
    let purchase = customer.pay(&sellers.apps[0], evaluate("x")).await;
    let first = sellers.ask_in_background(&purchase).await;
    gated.until_one_waits().await;

    sellers.shops[1].facilitator.drain(Duration::from_secs(10)).await;
    let told = send(&sellers.apps[1], purchase.on(evaluate("x"))).await;
    assert_eq!((told.status.as_u16(), told.reason().as_str()), (503, "facilitator_unavailable"));
    gated.open();
    let first = first.await.unwrap();
    assert!(first.status == 402 && first.text().contains(FAILED_ELSEWHERE), "{first:?}");
    assert_eq!(sellers.income().await, 0, "charged although a process said that nothing was");

    let again = send(&sellers.apps[0], purchase.on(evaluate("x"))).await;
    assert_eq!((again.status.as_u16(), again.text()), (200, "x"), "{again:?}");
    assert_eq!(sellers.income().await, PRICE);
    assert_eq!([sellers.shops[0].handled(), sellers.shops[1].handled()], [1, 0]);
}

/// The second process is about to record that it failed when the first one submits.
#[tokio::test]
async fn submitted_payment_is_not_reported_as_uncharged_by_another_process() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let submitting = GatedLedger::over(ledger.clone(), Held::Submissions);
    let failing = GatedLedger::over(ledger.clone(), Held::Failures);
    let sellers = Sellers::open([submitting.clone(), failing.clone()]).await;
    let customer = Customer::with_funds(&sellers.chain, 10 * PRICE).await;
    let purchase = customer.pay(&sellers.apps[0], evaluate("x")).await;
    let first = sellers.ask_in_background(&purchase).await;
    submitting.until_one_waits().await;
    sellers.shops[1].facilitator.drain(Duration::from_secs(10)).await;
    let (app, request) = (sellers.apps[1].clone(), purchase.on(evaluate("x")));
    let told = tokio::spawn(async move { send(&app, request).await });
    failing.until_one_waits().await;
    sellers.chain.devnet.stall(true);
    submitting.open();
    let submitted = Listing::of([SettlementState::Submitted]);
    until(async || !ledger.list(&submitted).await.unwrap().is_empty()).await;
    failing.open();
    let told = told.await.unwrap();
    assert_eq!((told.status.as_u16(), told.reason().as_str()), (503, "settlement_pending"), "{told:?}");
    sellers.chain.devnet.stall(false);
    let first = first.await.unwrap();
    assert_eq!((first.status.as_u16(), first.text()), (200, "x"), "{first:?}");
    assert_eq!(sellers.income().await, PRICE);
}

/// The buyer comes to another process while the payment is submitted. That process cannot know the outcome yet, and says when to ask again.
#[tokio::test]
async fn copy_at_another_process_is_pending_while_the_payment_is_submitted_and_replayed_then() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let sellers = Sellers::open([ledger.clone(), ledger.clone()]).await;
    let customer = Customer::with_funds(&sellers.chain, 10 * PRICE).await;
    let purchase = customer.pay(&sellers.apps[0], evaluate("x")).await;
    sellers.chain.devnet.stall(true);
    let first = sellers.ask_in_background(&purchase).await;
    let submitted = Listing::of([SettlementState::Submitted]);
    until(async || !ledger.list(&submitted).await.unwrap().is_empty()).await;
    let copy = send(&sellers.apps[1], purchase.on(evaluate("x"))).await;
    assert_eq!((copy.status.as_u16(), copy.reason().as_str()), (503, "settlement_pending"), "{copy:?}");
    assert!(copy.headers.contains_key(http::header::RETRY_AFTER), "{copy:?}");
    sellers.chain.devnet.stall(false);
    let first = first.await.unwrap();
    assert_eq!((first.status.as_u16(), first.text()), (200, "x"), "{first:?}");
    let copy = send(&sellers.apps[1], purchase.on(evaluate("x"))).await;
    assert_eq!((copy.status.as_u16(), copy.text()), (200, "x"), "{copy:?}");
    assert_eq!(sellers.income().await, PRICE);
    assert_eq!([sellers.shops[0].handled(), sellers.shops[1].handled()], [1, 0]);
}

async fn submit(ledger: &dyn Ledger, by: u64, payment: &Prechecked) {
    let now = authorization::unix_now();
    let submission = JournaledTransaction {
        sender: Sender { network: Network::BASE_SEPOLIA, address: Address::repeat_byte(1) },
        nonce: 0,
        hash: B256::repeat_byte(1),
        raw: Bytes::from_static(b"signed"),
        payments: vec![payment.key()],
        by,
        at: now,
        until: now + 600,
        known_failures: Default::default(),
    };
    ledger.submit(submission).await.unwrap();
}

/// Two layers of one process share a facilitator. The first could not settle, and is about to record that when the second submits.
#[tokio::test]
async fn submitted_payment_is_not_reported_as_uncharged_by_another_layer_of_the_process() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let gated = GatedLedger::over(ledger.clone(), Held::Failures);
    let mut scripted = Scripted::new().settle(move |call, payment| {
        let ledger = ledger.clone();
        async move {
            if call == 0 {
                return Err(away());
            }
            submit(&*ledger, 0, &payment).await;
            Ok(SettlementOutcome::Unknown { transaction: None })
        }
    });
    scripted.ledger = gated.clone();
    let facilitator = Arc::new(scripted);
    assert_eq!(facilitator.process_id(), 0);
    let [(first, _), (second, _)] = [serve(layer(&facilitator), echo), serve(layer(&facilitator), echo)];
    let purchase = customer().pay(&first, evaluate("x")).await;
    let request = purchase.on(evaluate("x"));
    let told = tokio::spawn(async move { send(&first, request).await });
    gated.until_one_waits().await;
    let other = send(&second, purchase.on(evaluate("x"))).await;
    assert_eq!((other.status.as_u16(), other.reason().as_str()), (503, "settlement_pending"), "{other:?}");
    gated.open();
    let told = told.await.unwrap();
    assert_eq!((told.status.as_u16(), told.reason().as_str()), (503, "settlement_pending"), "{told:?}");
    let known = record(&facilitator, &purchase).await.unwrap();
    assert_eq!((known.settlement, known.failures), (Settlement::Unknown, 0));
}

/// A facilitator that says that a payment failed which another process, or another task of its own, has submitted meanwhile.
#[tokio::test]
async fn failure_that_the_ledger_does_not_take_is_not_reported() {
    for by in [7, 0] {
        failure_of_a_payment_submitted_by(by).await;
    }
}

async fn failure_of_a_payment_submitted_by(by: u64) {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let others = ledger.clone();
    let mut scripted = Scripted::new().settle(move |_, payment| {
        let others = others.clone();
        async move {
            submit(&*others, by, &payment).await;
            Ok(not_yet())
        }
    });
    scripted.ledger = ledger;
    let facilitator = Arc::new(scripted);
    let (app, handled) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    let told = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((told.status.as_u16(), told.reason().as_str()), (503, "settlement_pending"), "{told:?}");
    let known = record(&facilitator, &purchase).await.unwrap();
    assert_eq!((known.settlement, known.failures, known.last_failure), (Settlement::Submitted, 0, None));
    assert_eq!(handled.load(Ordering::SeqCst), 1);
}

/// Reconciliation finds a failure, and the ledger refuses it because another process has the payment. The facilitator is not asked over
/// and over.
#[tokio::test]
async fn reconciled_failure_that_the_ledger_does_not_take_is_pending() {
    let facilitator = Arc::new(
        Scripted::new().settle(|_, _| async { Ok(SettlementOutcome::Unknown { transaction: None }) }).reconcile(
            |call, _| async move {
                assert!(call < 50, "asked over and over");
                Ok(not_yet())
            },
        ),
    );
    let (app, _) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.reason(), "settlement_pending");
    let key = record(&facilitator, &purchase).await.unwrap().key;
    let settling = Settling { by: 7, until: authorization::unix_now() + 600 };
    facilitator.ledger.advance(&key, &SettlementStep::Claim(settling).into()).await.unwrap();
    let again = send(&app, purchase.on(evaluate("x"))).await;
    assert_eq!((again.status.as_u16(), again.reason().as_str()), (503, "settlement_pending"), "{again:?}");
    let known = record(&facilitator, &purchase).await.unwrap();
    assert_eq!((known.settlement, known.failures), (Settlement::Unknown, 0));
}

/// Of a payment that an earlier owner may have in line elsewhere.
#[tokio::test]
async fn upfront_failure_is_recorded_before_it_is_reported() {
    let facilitator = Arc::new(Scripted::new().settle(|call, _| async move {
        match call {
            0 => Ok(not_yet()),
            1 => Err(away()),
            _ => Ok(paid()),
        }
    }));
    let (app, handled) = serve(layer(&facilitator).flow(PaymentFlow::Upfront), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    for (failures, status) in [(1, 402), (2, 503)] {
        assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, status);
        let known = record(&facilitator, &purchase).await.unwrap();
        assert_eq!((known.settlement, known.failures), (Settlement::Due, failures));
    }
    assert_eq!(send(&app, purchase.on(evaluate("x"))).await.status, 200);
    assert_eq!(handled.load(Ordering::SeqCst), 1);
}
