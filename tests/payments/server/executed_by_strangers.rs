//! Payments by `exact` in the hands of strangers: anybody who has seen a permit or an authorization can have it executed, or ask a
//! facilitator to.

use std::{
    future::ready,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::{Response, StatusCode};
use serde_json::json;
use support::{
    authorization::unix_now,
    chain::Chain as _,
    devnet::DevnetChain,
    permit::{ExactPermit, approve, invalidate},
    shop::{Answer, App, Customer, PRICE, Purchase, Shop, app, ask, evaluate, paid, send, serve_facilitator},
};
use tokio::sync::Notify;
use tower_x402::{
    Clock as _, ManualClock, Usdc,
    facilitator::{Facilitator as _, RemoteFacilitator, RemoteFacilitatorBuilder},
    ledger::{MemoryLedger, Record},
    server::{Quote, RequirePaymentLayer, RequirePaymentLayerBuilder},
};
use x402_devnet::Fault;
use x402_facilitator::FacilitatorService;

/// A seller on a devnet, whose handler waits if it is told to.
struct Stage {
    chain: DevnetChain,
    shop: Shop,
    app: App,
    payer: PrivateKeySigner,
    begun: Arc<Notify>,
    go_on: Arc<Notify>,
    /// The next work fails.
    fails: Arc<AtomicBool>,
}

impl Stage {
    async fn open() -> Self {
        Self::with(|layer| layer.permits()).await
    }

    async fn with(settings: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder) -> Self {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let layer = settings(shop.layer());
        Self::of(chain, shop, layer)
    }

    fn of(chain: DevnetChain, shop: Shop, layer: RequirePaymentLayerBuilder) -> Self {
        let signals: (Arc<Notify>, Arc<Notify>, Arc<AtomicBool>) = Default::default();
        let (begun, go_on, fails) = signals.clone();
        let app = shop.app_with(layer, move |_, body| {
            let (begun, go_on, fails) = signals.clone();
            async move {
                if body == "held" {
                    begun.notify_one();
                    go_on.notified().await;
                }
                let mut response = Response::new(Body::from(body));
                if fails.swap(false, Ordering::SeqCst) {
                    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                }
                Ok(response)
            }
        });
        let payer = PrivateKeySigner::random();
        chain.devnet.mint(payer.address(), tower_x402::Usdc::from_atomic(10 * PRICE)).unwrap();
        approve(&chain.devnet, payer.address(), U256::MAX >> 1);
        Self { chain, shop, app, payer, begun, go_on, fails }
    }

    async fn permit(&self, body: &'static str) -> ExactPermit {
        ExactPermit::pay(&self.payer, &self.app, evaluate(body)).await
    }

    async fn record(&self, permit: &ExactPermit) -> Option<Record> {
        self.shop.facilitator.ledger().get(&permit.key()).await.unwrap()
    }

    async fn received(&self) -> u64 {
        self.chain.balance(self.shop.pay_to).await
    }

    /// Presents a permit, and lets this happen while the handler works.
    async fn meanwhile(&self, permit: &ExactPermit, what: impl FnOnce()) -> Answer {
        self.during(permit.on(evaluate("held")), async { what() }).await
    }

    /// Pays for work that fails.
    async fn in_vain(&self) -> Purchase {
        let customer = Customer { from: self.payer.address(), signer: self.payer.clone() };
        let purchase = customer.pay(&self.app, evaluate("held")).await;
        self.fails.store(true, Ordering::SeqCst);
        self.go_on.notify_one();
        let failed = send(&self.app, purchase.on(evaluate("held"))).await;
        assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
        purchase
    }

    /// The same, and a stranger executes the authorization. Returns the transaction.
    async fn executed_in_vain(&self) -> (Purchase, B256) {
        let purchase = self.in_vain().await;
        let transaction = self.execute(&purchase).await;
        (purchase, transaction)
    }

    /// A stranger executes an authorization.
    async fn execute(&self, purchase: &Purchase) -> B256 {
        let stranger = self.chain.relayer().await;
        let transfer = support::token::transfer_vrs(&purchase.authorization, &purchase.by_key());
        stranger.send(&self.chain, transfer).await.transaction_hash
    }

    /// Sends a paid request, and lets this happen while the handler works.
    async fn during(&self, request: http::Request<Body>, what: impl Future<Output = ()>) -> Answer {
        let (answer, ()) = tokio::join!(send(&self.app, request), async {
            self.begun.notified().await;
            what.await;
            self.go_on.notify_one();
        });
        answer
    }
}

/// A seller that has a facilitator's service settle, and a node confirm that if it `confirms`.
async fn remote_stage(confirms: bool) -> Stage {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let url = serve_facilitator(&shop).await;
    stage_with_remote(chain, shop, &url, confirms).await
}

async fn stage_with_remote(chain: DevnetChain, shop: Shop, url: &str, confirms: bool) -> Stage {
    let mut remote = RemoteFacilitator::builder(url).ledger(Arc::new(MemoryLedger::new()));
    if confirms {
        remote = remote.confirm(chain.asset().network, chain.rpc_url());
    }
    let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(chain.asset().network, shop.pay_to);
    let layer = layer.facilitator(remote.build().await.unwrap()).permits();
    Stage::of(chain, shop, layer)
}

/// Returns the URL of a facilitator that looks at the payer's money before it looks at the nonce.
async fn serve_money_first(shop: &Shop) -> String {
    let service = service(shop);
    let answer = move |request: http::Request<Body>| async move {
        let is_verification = request.uri().path() == "/verify";
        let answer = send(&service, request).await;
        let mut said = answer.json();
        if is_verification && said["isValid"] == false {
            said["invalidReason"] = json!("insufficient_funds");
        }
        (answer.status, said.to_string())
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    url
}

/// A request for a settlement by the shop's facilitator, which asks for this amount.
fn settlement(permit: &ExactPermit, accepted: &str, required: &str) -> http::Request<Body> {
    let mut permit = permit.clone();
    permit.offer["amount"] = accepted.into();
    let mut required_of_payer = permit.offer.clone();
    required_of_payer["amount"] = required.into();
    let body = json!({
        "x402Version": 2, "paymentPayload": permit.payload(), "paymentRequirements": required_of_payer,
    });
    http::Request::post("/settle").body(Body::from(body.to_string())).unwrap()
}

/// The same in x402 v1, for the whole amount.
fn settlement_v1(permit: &ExactPermit) -> http::Request<Body> {
    let (offer, signed) = (&permit.offer, permit.payload()["payload"].clone());
    let body = json!({
        "x402Version": 1,
        "paymentPayload": { "x402Version": 1, "scheme": "exact", "network": "base-sepolia", "payload": signed },
        "paymentRequirements": {
            "scheme": "exact", "network": "base-sepolia", "maxAmountRequired": offer["amount"], "resource": "https://a.b/c",
            "payTo": offer["payTo"], "maxTimeoutSeconds": offer["maxTimeoutSeconds"], "asset": offer["asset"],
            "extra": offer["extra"],
        },
    });
    http::Request::post("/settle").body(Body::from(body.to_string())).unwrap()
}

fn service(shop: &Shop) -> App {
    app(FacilitatorService::builder(shop.facilitator.clone()).build())
}

/// What is asked for is neither booked nor sent, also where no node says what a payee would get.
#[tokio::test]
async fn service_settles_a_permit_for_a_price_for_no_other_amount() {
    let stage = Stage::open().await;
    let service = service(&stage.shop);
    let permit = stage.permit("a").await;
    for (accepted, required, reason) in [
        ("1000", "0", "invalid_payment_requirements"),
        ("1000", "1", "invalid_payment_requirements"),
        ("1", "1", "permit2_amount_mismatch"),
        ("999", "999", "permit2_amount_mismatch"),
        ("1001", "1001", "permit2_amount_mismatch"),
    ] {
        let said = send(&service, settlement(&permit, accepted, required)).await.json();
        assert_eq!((&said["success"], &said["errorReason"]), (&json!(false), &json!(reason)), "{required}: {said}");
        assert!(stage.record(&permit).await.is_none(), "{required}");
    }
    let said = send(&service, settlement(&permit, "0", "0")).await.json();
    assert_eq!(said["success"], false, "{said}");
    // x402 v1 has no permits.
    let said = send(&service, settlement_v1(&permit)).await.json();
    assert_eq!(said["success"], false, "{said}");
    assert!(stage.record(&permit).await.is_none());
    let settled = send(&service, settlement(&permit, "1000", "1000")).await.json();
    assert_eq!((&settled["success"], &settled["amount"]), (&json!(true), &json!("1000")), "{settled}");
    assert_eq!(stage.received().await, PRICE);
}

#[tokio::test]
async fn stranger_at_the_service_takes_no_permit_from_its_seller() {
    let stage = remote_stage(false).await;
    let service = service(&stage.shop);
    for (accepted, required) in [("1000", "0"), ("0", "0"), ("999", "999")] {
        let permit = stage.permit("held").await;
        let answer = stage
            .during(permit.on(evaluate("held")), async {
                send(&service, settlement(&permit, accepted, required)).await;
                send(&service, settlement_v1(&permit)).await;
            })
            .await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{required}: {answer:?}");
    }
    assert_eq!((stage.shop.handled(), stage.received().await), (3, 3 * PRICE));
}

/// The payee has the money, so the payer has the work.
#[tokio::test]
async fn permit_that_a_stranger_settles_while_the_work_fails_buys_the_work_when_it_is_presented_again() {
    for stage in [Stage::open().await, remote_stage(true).await] {
        let permit = stage.permit("held").await;
        stage.fails.store(true, Ordering::SeqCst);
        let mut settled = B256::ZERO;
        let failed = stage.meanwhile(&permit, || settled = permit.settle(&stage.chain.devnet)).await;
        assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
        stage.go_on.notify_one();
        let answer = send(&stage.app, permit.on(evaluate("held"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
        assert_eq!(answer.transaction(), settled);
        assert_eq!(send(&stage.app, permit.on(evaluate("held"))).await.settlement(), answer.settlement());
        assert_eq!((stage.shop.handled(), stage.received().await), (2, PRICE));
    }
}

#[tokio::test]
async fn authorization_that_a_stranger_executes_while_the_work_fails_buys_the_work_when_it_is_presented_again() {
    for stage in [Stage::open().await, remote_stage(true).await] {
        let (purchase, transaction) = stage.executed_in_vain().await;
        stage.go_on.notify_one();
        let answer = send(&stage.app, purchase.on(evaluate("held"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
        assert_eq!(answer.transaction(), transaction);
        assert_eq!((stage.shop.handled(), stage.received().await), (2, PRICE));
    }
}

/// A payment that may not begin anew is paid for all the same, and its payer is not told to make another one.
#[tokio::test]
async fn payment_that_a_stranger_executed_while_the_work_failed_counts_whatever_keeps_it_from_beginning_anew() {
    let (done, conflict) = (StatusCode::OK, StatusCode::CONFLICT);
    for (obstacle, status, said) in [
        ("the window ends soon", done, "held"),
        ("the window has ended", done, "held"),
        ("another price", done, "held"),
        ("another payee", conflict, "payment_already_used"),
        ("no attempts left", conflict, "attempts_exhausted"),
    ] {
        for is_executed in [true, false] {
            let clock = Arc::new(ManualClock::at(unix_now()));
            let (price, pay_to) = <(Arc<AtomicU64>, Arc<Mutex<Option<Address>>>)>::default();
            price.store(PRICE, Ordering::SeqCst);
            let (now, payee) = (price.clone(), pay_to.clone());
            let stage = Stage::with(|layer| {
                let attempts = if obstacle == "no attempts left" { 1 } else { 3 };
                layer.clock(clock.clone()).max_attempts(attempts).price_with(move |_| {
                    let amount = Usdc::from_atomic(now.load(Ordering::SeqCst));
                    let pay_to = *payee.lock().unwrap();
                    ready(Ok(pay_to.map_or(amount.into(), |pay_to| Quote::To { pay_to, amount })))
                })
            })
            .await;
            let (purchase, transaction) =
                if is_executed { stage.executed_in_vain().await } else { (stage.in_vain().await, B256::ZERO) };
            let ends = purchase.authorization.validBefore.to::<u64>();
            match obstacle {
                "the window ends soon" => clock.advance(ends - 60 - clock.now()),
                "the window has ended" => clock.advance(ends + 5 - clock.now()),
                "another price" => price.store(2 * PRICE, Ordering::SeqCst),
                "another payee" => *pay_to.lock().unwrap() = Some(Address::repeat_byte(0x0e)),
                _ => {}
            }
            stage.go_on.notify_one();
            let answer = send(&stage.app, purchase.on(evaluate("held"))).await;
            let received = stage.received().await;
            if !is_executed {
                assert!(answer.status.is_client_error(), "{obstacle}: {answer:?}");
                assert_eq!((answer.settlement(), stage.shop.handled(), received), (None, 1, 0), "{obstacle}");
                continue;
            }
            let text = if status == done { answer.text().to_owned() } else { answer.reason() };
            assert_eq!((answer.status, text.as_str()), (status, said), "{obstacle}: {answer:?}");
            assert_eq!((answer.transaction(), received), (transaction, PRICE), "{obstacle}");
            assert_eq!(stage.shop.handled(), if status == done { 2 } else { 1 }, "{obstacle}");
        }
    }
}

/// Its payer may make another payment under the identifier of the first.
#[tokio::test]
async fn payment_made_anew_under_the_identifier_of_one_that_a_stranger_executed_is_not_used() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let stage = Stage::with(|layer| layer.clock(clock.clone())).await;
    let customer = Customer { from: stage.payer.address(), signer: stage.payer.clone() };
    let present = async |purchase: &Purchase| {
        let mut payload = purchase.payload();
        let info = json!({ "required": false, "id": "pay_7d5d747be160e280504c099d984bcfe0" });
        payload["extensions"] = json!({ "payment-identifier": { "info": info, "schema": {} } });
        stage.go_on.notify_one();
        send(&stage.app, paid(evaluate("held"), &payload)).await
    };
    let first = customer.pay(&stage.app, evaluate("held")).await;
    stage.fails.store(true, Ordering::SeqCst);
    assert_eq!(present(&first).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let transaction = stage.execute(&first).await;
    clock.advance(first.authorization.validBefore.to::<u64>() - 60 - clock.now());
    let mut anew = customer.pay(&stage.app, evaluate("held")).await;
    anew.authorization.validBefore = U256::from(clock.now() + 100);
    anew.resign();
    let answer = present(&anew).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
    assert_eq!((answer.transaction(), stage.shop.handled(), stage.received().await), (transaction, 2, PRICE));
}

/// The first payment may be charged yet: its payer is not told of a conflict, and gets its answer.
#[tokio::test]
async fn payment_made_anew_under_the_identifier_of_one_under_work_waits_for_its_answer() {
    let clock = Arc::new(ManualClock::at(unix_now()));
    let stage = Stage::with(|layer| layer.clock(clock.clone())).await;
    let customer = Customer { from: stage.payer.address(), signer: stage.payer.clone() };
    let present = |purchase: &Purchase| {
        let mut payload = purchase.payload();
        let info = json!({ "required": false, "id": "pay_7d5d747be160e280504c099d984bcfe0" });
        payload["extensions"] = json!({ "payment-identifier": { "info": info, "schema": {} } });
        paid(evaluate("held"), &payload)
    };
    let mut first = customer.pay(&stage.app, evaluate("held")).await;
    first.authorization.validBefore = U256::from(clock.now() + 80);
    first.resign();
    let anew = customer.pay(&stage.app, evaluate("held")).await;
    let mut again = None;
    let answer = stage
        .during(present(&first), async {
            clock.advance(10);
            let asked = ask(&stage.app, present(&anew));
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert!(!asked.is_finished(), "{:?}", asked.await);
            again = Some(asked);
        })
        .await;
    let again = again.unwrap().await.unwrap();
    for answer in [&answer, &again] {
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
    }
    assert_eq!((again.transaction(), stage.shop.handled()), (answer.transaction(), 1));
    assert_eq!(stage.received().await, PRICE);
}

/// Its balance is gone with the payment, of course.
#[tokio::test]
async fn payment_that_a_stranger_executed_counts_where_a_facilitator_looks_at_the_balance_first() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let url = serve_money_first(&shop).await;
    let stage = stage_with_remote(chain, shop, &url, true).await;
    let (purchase, transaction) = stage.executed_in_vain().await;
    stage.go_on.notify_one();
    let answer = send(&stage.app, purchase.on(evaluate("held"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
    assert_eq!((answer.transaction(), stage.shop.handled(), stage.received().await), (transaction, 2, PRICE));
}

/// A payment that nobody executed is not settled because somebody asks what became of it.
#[tokio::test]
async fn payment_whose_work_failed_is_not_settled_when_it_is_refused() {
    for confirms in [true, false] {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let url = serve_money_first(&shop).await;
        let stage = stage_with_remote(chain, shop, &url, confirms).await;
        let purchase = stage.in_vain().await;
        // What is left does not cover it.
        let mut other = purchase.clone();
        (other.authorization.nonce, other.authorization.value) = (B256::repeat_byte(7), U256::from(10 * PRICE - 1));
        other.resign();
        stage.execute(&other).await;
        let answer = send(&stage.app, purchase.on(evaluate("held"))).await;
        assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "insufficient_funds"));
        stage.chain.mint(stage.payer.address(), PRICE).await;
        stage.go_on.notify_one();
        let answer = send(&stage.app, purchase.on(evaluate("held"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
        assert_eq!((stage.shop.handled(), stage.received().await), (2, 11 * PRICE - 1));
    }
}

/// Nobody sees what the permit was executed for. Its payer is not told to buy anew; one that withdrew it is.
#[tokio::test]
async fn permit_whose_nonce_is_used_while_the_work_fails_is_refused_only_if_it_has_not_paid() {
    let stage = Stage::open().await;
    for (is_paid, status, reason) in [
        (true, StatusCode::SERVICE_UNAVAILABLE, "settlement_pending"),
        (false, StatusCode::PAYMENT_REQUIRED, "permit2_invalid_nonce"),
    ] {
        let permit = stage.permit("held").await;
        stage.fails.store(true, Ordering::SeqCst);
        let failed = stage
            .meanwhile(&permit, || match is_paid {
                true => permit.settle_by_contract(&stage.chain.devnet),
                false => invalidate(&stage.chain.devnet, permit.from, permit.message.nonce),
            })
            .await;
        assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
        let answer = send(&stage.app, permit.on(evaluate("held"))).await;
        assert_eq!((answer.status, answer.reason().as_str()), (status, reason), "{answer:?}");
    }
    assert_eq!((stage.shop.handled(), stage.received().await), (2, PRICE));
}

/// A stranger's contract executes this permit before the next transaction of the facilitator, which reverts.
fn front_run(stage: &Stage, permit: &ExactPermit) {
    let (devnet, permit, is_done) = (stage.chain.devnet.clone(), permit.clone(), AtomicBool::new(false));
    stage.chain.devnet.faults().set(move |call| {
        if call.method.starts_with("eth_sendRawTransaction") && !is_done.swap(true, Ordering::SeqCst) {
            permit.settle_by_contract(&devnet);
        }
        Fault::None
    });
}

/// The payer has paid each time, and cannot help it.
#[tokio::test]
async fn stranger_whose_contract_executes_permits_first_keeps_nobody_from_paying() {
    let stage = Stage::open().await;
    let under_work = stage.permit("held").await;
    let answer = stage
        .during(under_work.on(evaluate("held")), async {
            for _ in 0..2 {
                let permit = stage.permit("a").await;
                let before = stage.shop.facilitator.stats().gas_used;
                front_run(&stage, &permit);
                let answer = send(&stage.app, permit.on(evaluate("a"))).await;
                let said = (answer.status, answer.reason());
                assert_eq!(said, (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending".to_owned()), "{answer:?}");
                let used = stage.shop.facilitator.stats().gas_used - before;
                assert!((21_000..=400_000).contains(&used), "a transaction that reverts used {used} gas");
            }
            stage.chain.devnet.faults().clear();
        })
        .await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "its work is done: {answer:?}");
    // More of these permits would cost the seller gas for nothing.
    let another = send(&stage.app, stage.permit("a").await.on(evaluate("a"))).await;
    assert_eq!(another.status, StatusCode::PAYMENT_REQUIRED, "{another:?}");
    assert!(another.text().contains("executed by others"), "{another:?}");
    let customer = Customer { from: stage.payer.address(), signer: stage.payer.clone() };
    let purchase = customer.pay(&stage.app, evaluate("a")).await;
    let answer = send(&stage.app, purchase.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
    assert_eq!((stage.shop.handled(), stage.received().await), (4, 4 * PRICE));
}

/// What was approved has to cover all permits under work.
#[tokio::test]
async fn permits_under_work_are_covered_by_what_was_approved() {
    let stage = Stage::open().await;
    approve(&stage.chain.devnet, stage.payer.address(), U256::from(PRICE));
    let permit = stage.permit("held").await;
    let held = stage
        .during(permit.on(evaluate("held")), async {
            let answer = send(&stage.app, stage.permit("a").await.on(evaluate("a"))).await;
            assert!(answer.status.is_client_error(), "{answer:?}");
        })
        .await;
    assert_eq!(held.status, StatusCode::OK, "{held:?}");
    assert_eq!((stage.shop.handled(), stage.received().await), (1, PRICE));
}

/// No receipt shows which permit a contract settled.
#[tokio::test]
async fn facilitator_whose_account_is_a_contract_is_offered_no_permits_where_a_node_confirms() {
    let stage = Stage::open().await;
    let account = stage.shop.facilitator.settlement_addresses()[0];
    stage.chain.devnet.set_code(account, vec![0x00]);
    let url = serve_facilitator(&stage.shop).await;
    let network = stage.chain.asset().network;
    let build = async |remote: RemoteFacilitatorBuilder| {
        let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(network, stage.shop.pay_to);
        layer.facilitator(remote.build().await.unwrap()).permits().build()
    };
    let confirming = RemoteFacilitator::builder(&url).confirm(network, stage.chain.rpc_url());
    let Err(error) = build(confirming).await else { panic!("it is built") };
    assert!(error.to_string().contains("whose accounts are no contracts"), "{error}");
    assert!(build(RemoteFacilitator::builder(&url)).await.is_ok());
}

/// A node that fails once when it is asked for code takes no permits away for good.
#[tokio::test]
async fn permits_that_a_node_did_not_answer_about_are_offered_once_it_does() {
    let stage = Stage::open().await;
    let url = serve_facilitator(&stage.shop).await;
    let network = stage.chain.asset().network;
    let faults = stage.chain.devnet.faults();
    faults.set(|call| if call.method == "eth_getCode" { Fault::DropBefore } else { Fault::None });
    let remote = RemoteFacilitator::builder(&url).confirm(network, stage.chain.rpc_url()).build().await.unwrap();
    let is_known = remote.supported().await.is_ok();
    let before = remote.permit_methods(network);
    faults.set(|_| Fault::None);
    remote.supported().await.unwrap();
    assert_eq!((is_known, before.len(), remote.permit_methods(network).is_empty()), (false, 0, false));
}
