//! Permits of Permit2 (scheme `exact`) in the hands of strangers: anybody who has seen one can have it executed, or ask a facilitator to.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use alloy_primitives::{B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::{Response, StatusCode};
use serde_json::json;
use support::{
    chain::Chain as _,
    devnet::DevnetChain,
    permit::{ExactPermit, approve, invalidate},
    shop::{Answer, App, Customer, PRICE, Shop, app, evaluate, send, serve_facilitator},
};
use tokio::sync::Notify;
use tower_x402::{
    facilitator::{Facilitator as _, RemoteFacilitator, RemoteFacilitatorBuilder},
    ledger::{MemoryLedger, Record},
    server::{RequirePaymentLayer, RequirePaymentLayerBuilder},
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
    let mut remote = RemoteFacilitator::builder(serve_facilitator(&shop).await).ledger(Arc::new(MemoryLedger::new()));
    if confirms {
        remote = remote.confirm(chain.asset().network, chain.rpc_url());
    }
    let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(chain.asset().network, shop.pay_to);
    let layer = layer.facilitator(remote.build().await.unwrap()).permits();
    Stage::of(chain, shop, layer)
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
        let customer = Customer { from: stage.payer.address(), signer: stage.payer.clone() };
        let purchase = customer.pay(&stage.app, evaluate("held")).await;
        stage.fails.store(true, Ordering::SeqCst);
        let executed = stage.chain.relayer().await;
        let mut transaction = B256::ZERO;
        let failed = stage
            .during(purchase.on(evaluate("held")), async {
                let message = support::token::transfer_vrs(&purchase.authorization, &purchase.by_key());
                transaction = executed.send(&stage.chain, message).await.transaction_hash;
            })
            .await;
        assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
        stage.go_on.notify_one();
        let answer = send(&stage.app, purchase.on(evaluate("held"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "held"), "{answer:?}");
        assert_eq!(answer.transaction(), transaction);
        assert_eq!((stage.shop.handled(), stage.received().await), (2, PRICE));
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
                front_run(&stage, &permit);
                let answer = send(&stage.app, permit.on(evaluate("a"))).await;
                let said = (answer.status, answer.reason());
                assert_eq!(said, (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending".to_owned()), "{answer:?}");
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
