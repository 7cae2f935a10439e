//! A seller that is paid its price by permits of Permit2 (scheme `exact`): what is settled, once, and what is refused.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes, U256, hex};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use futures_util::future::join_all;
use http::{Response, StatusCode};
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::Chain as _,
    devnet::DevnetChain,
    permit::{self, EXACT_PROXY, ExactPermit, Permit, approve, burn},
    shop::{Answer, App, Customer, PRICE, Shop, demand, evaluate, paid, send},
};
use tokio::sync::Notify;
use tower_x402::{
    facilitator::{Facilitator as _, RemoteFacilitator},
    ledger::{MemoryLedger, Record, Settlement},
    payment::PaymentKey,
    permit2::PERMIT2,
    protocol::PaymentFlow,
    server::{BuildError, RequirePaymentLayer, RequirePaymentLayerBuilder},
};
use x402_facilitator::FacilitatorService;

/// A seller on a devnet, whose handler waits if it is told to.
pub(super) struct Stage {
    pub(super) chain: DevnetChain,
    pub(super) shop: Shop,
    pub(super) app: App,
    pub(super) payer: PrivateKeySigner,
    pub(super) begun: Arc<Notify>,
    pub(super) go_on: Arc<Notify>,
    /// The next work fails.
    pub(super) fails: Arc<AtomicBool>,
}

impl Stage {
    pub(super) async fn open() -> Self {
        Self::with(|layer| layer.permits()).await
    }

    pub(super) async fn with(settings: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder) -> Self {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let layer = settings(shop.layer());
        Self::of(chain, shop, layer)
    }

    pub(super) fn of(chain: DevnetChain, shop: Shop, layer: RequirePaymentLayerBuilder) -> Self {
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

    pub(super) async fn permit(&self, body: &'static str) -> ExactPermit {
        ExactPermit::pay(&self.payer, &self.app, evaluate(body)).await
    }

    pub(super) async fn record(&self, permit: &ExactPermit) -> Option<Record> {
        self.shop.facilitator.ledger().get(&key(permit)).await.unwrap()
    }

    pub(super) async fn received(&self) -> u64 {
        self.chain.balance(self.shop.pay_to).await
    }

    /// Presents a permit, and lets this happen while the handler works.
    pub(super) async fn meanwhile(&self, permit: &ExactPermit, what: impl FnOnce()) -> Answer {
        self.during(permit.on(evaluate("held")), async { what() }).await
    }

    /// Sends a paid request, and lets this happen while the handler works.
    pub(super) async fn during(&self, request: http::Request<Body>, what: impl Future<Output = ()>) -> Answer {
        let (answer, ()) = tokio::join!(send(&self.app, request), async {
            self.begun.notified().await;
            what.await;
            self.go_on.notify_one();
        });
        answer
    }
}

fn key(permit: &ExactPermit) -> PaymentKey {
    PaymentKey { network: permit.network, asset: PERMIT2, payer: permit.from, nonce: permit.message.nonce.into() }
}

#[tokio::test]
async fn permit_pays_the_price_once_and_its_request_gets_the_same_answer_again() {
    use alloy_consensus::Transaction as _;
    use alloy_provider::Provider as _;

    let stage = Stage::open().await;
    let permit = stage.permit("a").await;
    let copies = (0..10).map(|_| send(&stage.app, permit.on(evaluate("a"))));
    let answers = join_all(copies).await;
    for answer in &answers {
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
        assert_eq!(answer.settlement(), answers[0].settlement());
    }
    let transfers = stage.chain.token_transfers(stage.shop.pay_to).await;
    let moved: Vec<_> = transfers.iter().map(|it| (it.transaction, it.units)).collect();
    assert_eq!(moved, [(answers[0].transaction(), PRICE)]);
    // The call is what the documents say, and nothing else in the transaction.
    let sent = stage.chain.provider().get_transaction_by_hash(answers[0].transaction()).await.unwrap().unwrap();
    assert_eq!((sent.to(), hex::encode(&sent.input()[..4])), (Some(EXACT_PROXY), "13cd3b53".to_owned()));
    assert_eq!(sent.input()[..], permit.calldata()[..]);
    let other = http::Request::post("/evaluate?k=2").body(Body::from("a")).unwrap();
    assert_eq!(send(&stage.app, permit.on(other)).await.status, StatusCode::CONFLICT);
    assert_eq!((stage.shop.handled(), stage.received().await), (1, PRICE));
}

#[tokio::test]
async fn offer_by_permit_stands_beside_the_other_and_is_not_made_in_v1() {
    let stage =
        Stage::with(|layer| layer.permits().permits().flow(PaymentFlow::Authorization).flow(PaymentFlow::Upfront))
            .await;
    let unpaid = send(&stage.app, evaluate("a")).await;
    let offered = demand(&unpaid)["accepts"].clone();
    let said: Vec<_> = offered
        .as_array()
        .unwrap()
        .iter()
        .map(|it| {
            (it["scheme"].clone(), it["extra"]["assetTransferMethod"].clone(), it["extra"]["paymentFlow"].clone())
        })
        .collect();
    let (exact, permit, upfront) = (json!("exact"), json!("permit2"), json!("upfront"));
    assert_eq!(
        said,
        [
            (exact.clone(), Value::Null, Value::Null),
            (exact.clone(), Value::Null, upfront.clone()),
            (exact.clone(), permit.clone(), Value::Null),
            (exact, permit, upfront),
        ]
    );
    assert_eq!(unpaid.json()["accepts"].as_array().map(Vec::len), Some(1));
    // Either can be paid by the same payer.
    let customer = Customer { from: stage.payer.address(), signer: stage.payer.clone() };
    assert_eq!(
        send(&stage.app, customer.pay(&stage.app, evaluate("a")).await.on(evaluate("a"))).await.status,
        StatusCode::OK
    );
    assert_eq!(send(&stage.app, stage.permit("a").await.on(evaluate("a"))).await.status, StatusCode::OK);
    let mut upfront = stage.permit("a").await;
    upfront.offer = offered[3].clone();
    assert_eq!(send(&stage.app, upfront.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!((stage.shop.handled(), stage.received().await), (3, 3 * PRICE));
}

#[tokio::test]
async fn what_is_wrong_with_a_permit_is_named() {
    let stage = Stage::open().await;
    let good = stage.permit("a").await;
    let signed = |change: fn(&mut permit::exact::PermitWitnessTransferFrom)| good.clone().with(change).payload();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut payload = good.payload();
        change(&mut payload);
        payload
    };
    let mut forged = good.clone();
    forged.signer = PrivateKeySigner::random();
    forged.resign();
    let authorized = demand(&send(&stage.app, evaluate("a")).await)["accepts"][0].clone();
    let customer = Customer { from: stage.payer.address(), signer: stage.payer.clone() };
    let authorization = serde_json::to_value(customer.pay(&stage.app, evaluate("a")).await.payload()).unwrap();
    for (payload, reason) in [
        (signed(|it| it.spender = permit::PROXY), "invalid_permit2_spender"),
        (signed(|it| it.witness.to = Address::repeat_byte(9)), "invalid_permit2_recipient_mismatch"),
        (signed(|it| it.permitted.token = Address::repeat_byte(9)), "permit2_token_mismatch"),
        (signed(|it| it.permitted.amount += U256::ONE), "permit2_amount_mismatch"),
        (signed(|it| it.permitted.amount -= U256::ONE), "permit2_amount_mismatch"),
        (signed(|it| it.deadline = U256::from(unix_now() + 5)), "permit2_deadline_expired"),
        (signed(|it| it.deadline = U256::from(unix_now() + 100_000)), "permit2_deadline_expired"),
        (signed(|it| it.witness.validAfter = U256::from(unix_now() + 60)), "permit2_not_yet_valid"),
        (forged.payload(), "invalid_permit2_signature"),
        (
            with(&|it| it["payload"]["permit2Authorization"]["from"] = json!(Address::repeat_byte(9))),
            "invalid_permit2_signature",
        ),
        (with(&|it| it["payload"]["permit2Authorization"]["nonce"] = json!(7)), "invalid_payload"),
        // For the other offer, and the other message for this one.
        (with(&|it| it["accepted"] = authorized.clone()), "invalid_payload"),
        (with(&|it| it["payload"] = authorization["payload"].clone()), "unsupported_payload_type"),
    ] {
        let answer = send(&stage.app, paid(evaluate("a"), &payload)).await;
        assert!(answer.status.is_client_error(), "{reason} {answer:?}");
        assert_eq!(answer.reason(), reason, "{payload}");
    }
    assert_eq!((stage.shop.handled(), stage.received().await), (0, 0));
    assert_eq!(send(&stage.app, good.on(evaluate("a"))).await.status, StatusCode::OK);
}

/// Permit2 takes a nonce once, whichever proxy uses it.
#[tokio::test]
async fn one_nonce_of_permit2_pays_once_in_both_schemes() {
    let stage = Stage::with(|layer| layer.permits().upto()).await;
    let exact = stage.permit("held").await;
    let nonce = exact.message.nonce;
    let maximum = Permit::pay(&stage.payer, &stage.app, evaluate("a")).await.with(|it| it.nonce = nonce);
    let (first, second) = tokio::join!(send(&stage.app, exact.on(evaluate("held"))), async {
        stage.begun.notified().await;
        let second = send(&stage.app, maximum.on(evaluate("a"))).await;
        stage.go_on.notify_one();
        second
    });
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    assert!(second.status.is_client_error(), "{second:?}");
    assert!(send(&stage.app, maximum.on(evaluate("a"))).await.status.is_client_error());
    assert_eq!((stage.shop.handled(), stage.received().await), (1, PRICE));
}

#[tokio::test]
async fn payer_that_approved_too_little_is_told_so_before_the_work() {
    let stage = Stage::open().await;
    approve(&stage.chain.devnet, stage.payer.address(), U256::from(PRICE - 1));
    let permit = stage.permit("a").await;
    let answer = send(&stage.app, permit.on(evaluate("a"))).await;
    let said = (answer.status, answer.reason());
    assert_eq!(said, (StatusCode::PRECONDITION_FAILED, "permit2_allowance_required".to_owned()));
    approve(&stage.chain.devnet, stage.payer.address(), U256::from(PRICE));
    assert_eq!(send(&stage.app, permit.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!(stage.shop.handled(), 1);
}

/// The payee was paid, whoever asked the proxy.
#[tokio::test]
async fn permit_that_a_stranger_settles_during_the_work_has_paid() {
    let stage = Stage::open().await;
    let permit = stage.permit("held").await;
    let mut settled = B256::ZERO;
    let answer = stage.meanwhile(&permit, || settled = permit.settle(&stage.chain.devnet)).await;
    assert_eq!((answer.status, answer.transaction()), (StatusCode::OK, settled), "{answer:?}");
    // One that was settled before it was presented may have paid for something else.
    let early = stage.permit("a").await;
    early.settle(&stage.chain.devnet);
    let answer = send(&stage.app, early.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_invalid_nonce"));
    assert_eq!((stage.shop.handled(), stage.received().await), (1, 2 * PRICE));
}

/// No calldata says which permit was settled. It may have been this one, so it has not failed.
#[tokio::test]
async fn permit_that_was_settled_where_nobody_sees_it_is_never_called_failed() {
    for is_within_another in [false, true] {
        let stage = Stage::open().await;
        let permit = stage.permit("held").await;
        let answer = stage
            .meanwhile(&permit, || match is_within_another {
                false => permit.settle_by_contract(&stage.chain.devnet),
                true => permit.settle_within_another_permit(&stage.chain.devnet),
            })
            .await;
        let said = (answer.status, answer.reason());
        assert_eq!(said, (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending".to_owned()), "{answer:?}");
        for _ in 0..3 {
            stage.chain.mine().await;
            stage.shop.facilitator.reconcile_now();
        }
        assert!(stage.shop.facilitator.drain(Duration::from_secs(10)).await);
        assert_eq!(stage.record(&permit).await.unwrap().settlement, Settlement::Unknown);
        assert_eq!(stage.received().await, PRICE);
    }
}

#[tokio::test]
async fn nonce_that_is_invalidated_or_used_otherwise_during_the_work_has_its_answer_not_given() {
    let stage = Stage::open().await;
    let invalidated = stage.permit("held").await;
    let nonce = invalidated.message.nonce;
    let answer =
        stage.meanwhile(&invalidated, || permit::invalidate(&stage.chain.devnet, stage.payer.address(), nonce)).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_invalid_nonce"));
    let burnt = stage.permit("held").await;
    let answer = stage.meanwhile(&burnt, || burn(&stage.chain.devnet, &stage.payer, burnt.message.nonce)).await;
    // Nothing was transferred to the payee by any proxy. That is final once its block is.
    assert!(!answer.status.is_success(), "{answer:?}");
    assert_eq!(stage.received().await, 0);
    support::eventually::eventually("it is dead", async || {
        stage.chain.mine().await;
        stage.shop.facilitator.reconcile_now();
        stage.record(&burnt).await.is_none_or(|it| it.settlement == Settlement::Dead)
    })
    .await;
}

#[tokio::test]
async fn contract_wallets_pay_by_permit() {
    let stage = Stage::open().await;
    let wallet = stage.chain.deploy_wallet(stage.payer.address()).await;
    stage.chain.mint(wallet, 10 * PRICE).await;
    approve(&stage.chain.devnet, wallet, U256::from(10 * PRICE));
    let mut permit = stage.permit("a").await;
    permit.from = wallet;
    assert_eq!(send(&stage.app, permit.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!((send(&stage.app, permit.on(evaluate("a"))).await.status, stage.shop.handled()), (StatusCode::OK, 1));
    let mut forged = stage.permit("a").await;
    (forged.from, forged.signer) = (wallet, PrivateKeySigner::random());
    forged.resign();
    assert_eq!(send(&stage.app, forged.on(evaluate("a"))).await.reason(), "invalid_permit2_signature");
    assert_eq!(stage.received().await, PRICE);
}

/// Serves the shop's facilitator to others. Returns its URL.
pub(super) async fn served(shop: &Shop) -> String {
    let service = FacilitatorService::builder(shop.facilitator.clone()).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback_service(service)).await.unwrap() });
    url
}

/// A seller that has a facilitator's service settle, and a node confirm that if it `confirms`.
pub(super) async fn remote_stage(confirms: bool) -> Stage {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let mut remote = RemoteFacilitator::builder(served(&shop).await).ledger(Arc::new(MemoryLedger::new()));
    if confirms {
        remote = remote.confirm(chain.asset().network, chain.rpc_url());
    }
    let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(chain.asset().network, shop.pay_to);
    let layer = layer.facilitator(remote.build().await.unwrap()).permits();
    Stage::of(chain, shop, layer)
}

#[tokio::test]
async fn permit_pays_once_through_a_facilitators_service() {
    for confirms in [false, true] {
        let stage = remote_stage(confirms).await;
        let permit = stage.permit("a").await;
        let answer = send(&stage.app, permit.on(evaluate("a"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
        assert_eq!(send(&stage.app, permit.on(evaluate("a"))).await.settlement(), answer.settlement());
        assert_eq!((stage.shop.handled(), stage.received().await), (1, PRICE));
    }
}

/// The amount is signed, so whoever asks can settle nothing else.
#[tokio::test]
async fn service_settles_a_permit_for_its_amount_and_names_what_is_wrong() {
    let stage = Stage::open().await;
    let service = support::shop::app(FacilitatorService::builder(stage.shop.facilitator.clone()).build());
    let ask = async |permit: &ExactPermit, path: &str, amount: &str| {
        let mut required = permit.offer.clone();
        required["amount"] = amount.into();
        let body = json!({ "x402Version": 2, "paymentPayload": permit.payload(), "paymentRequirements": required });
        let request = http::Request::post(path).body(Body::from(body.to_string())).unwrap();
        send(&service, request).await.json()
    };
    let permit = stage.permit("a").await;
    assert_eq!(ask(&permit, "/verify", "1000").await["isValid"], true);
    assert_eq!(ask(&permit, "/settle", "999").await["success"], false);
    let settled = ask(&permit, "/settle", "1000").await;
    assert_eq!(settled["success"], true, "{settled}");
    assert_eq!(ask(&permit, "/settle", "1000").await, settled);
    let used = stage.permit("a").await;
    used.settle(&stage.chain.devnet);
    assert_eq!(ask(&used, "/verify", "1000").await["invalidReason"], "permit2_invalid_nonce");
    assert_eq!(stage.received().await, 2 * PRICE);
}

#[tokio::test]
async fn layer_on_a_chain_that_lacks_the_proxy_is_not_built_and_settles_nothing() {
    let stage = Stage::open().await;
    let permit = stage.permit("a").await;
    stage.chain.devnet.set_code(EXACT_PROXY, Bytes::new());
    let answer = send(&stage.app, permit.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_proxy_not_deployed"));
    let shop = Shop::open(&stage.chain).await;
    assert!(matches!(shop.layer().permits().build(), Err(BuildError::NoPermits { scheme: "exact", .. })));
    assert!(shop.layer().upto().build().is_ok());
}
