//! A seller that is paid its price by permits of Permit2 (scheme `exact`): what is settled, once, and what is refused.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, Bytes, U256, hex};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use futures_util::future::join_all;
use http::StatusCode;
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::Chain as _,
    devnet::DevnetChain,
    permit::{self, EXACT_PROXY, ExactPermit, Permit, approve, burn},
    shop::{Answer, PRICE, Shop, demand, evaluate, paid, send, serve_facilitator},
    world::World,
};
use tower_x402::{
    facilitator::RemoteFacilitator,
    ledger::{MemoryLedger, Settlement},
    protocol::PaymentFlow,
    server::{BuildError, RequirePaymentLayer},
};
use x402_facilitator::FacilitatorService;

async fn open() -> World {
    World::with(|layer| layer.permits()).await
}

async fn sign(world: &World, body: &'static str) -> ExactPermit {
    ExactPermit::pay(&world.payer, &world.app, evaluate(body)).await
}

/// Presents a permit, and lets this happen while the handler works.
async fn meanwhile(world: &World, permit: &ExactPermit, what: impl FnOnce()) -> Answer {
    world.meanwhile(permit.on(evaluate("held")), async || what()).await
}

#[tokio::test]
async fn permit_pays_the_price_once_and_its_request_gets_the_same_answer_again() {
    use alloy_consensus::Transaction as _;
    use alloy_provider::Provider as _;

    let world = open().await;
    let permit = sign(&world, "a").await;
    let copies = (0..10).map(|_| send(&world.app, permit.on(evaluate("a"))));
    let answers = join_all(copies).await;
    for answer in &answers {
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
        assert_eq!(answer.settlement(), answers[0].settlement());
    }
    let transfers = world.chain.token_transfers(world.shop.pay_to).await;
    let moved: Vec<_> = transfers.iter().map(|it| (it.transaction, it.units)).collect();
    assert_eq!(moved, [(answers[0].transaction(), PRICE)]);
    // The call is what the documents say, and nothing else in the transaction.
    let sent = world.chain.provider().get_transaction_by_hash(answers[0].transaction()).await.unwrap().unwrap();
    assert_eq!((sent.to(), hex::encode(&sent.input()[..4])), (Some(EXACT_PROXY), "13cd3b53".to_owned()));
    assert_eq!(sent.input()[..], permit.calldata()[..]);
    let other = http::Request::post("/evaluate?k=2").body(Body::from("a")).unwrap();
    assert_eq!(send(&world.app, permit.on(other)).await.status, StatusCode::CONFLICT);
    assert_eq!((world.shop.handled(), world.received().await), (1, PRICE));
}

#[tokio::test]
async fn offer_by_permit_stands_beside_the_other_and_is_not_made_in_v1() {
    let world =
        World::with(|layer| layer.permits().permits().flow(PaymentFlow::Authorization).flow(PaymentFlow::Upfront))
            .await;
    let unpaid = send(&world.app, evaluate("a")).await;
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
    let customer = world.customer();
    assert_eq!(
        send(&world.app, customer.pay(&world.app, evaluate("a")).await.on(evaluate("a"))).await.status,
        StatusCode::OK
    );
    assert_eq!(send(&world.app, sign(&world, "a").await.on(evaluate("a"))).await.status, StatusCode::OK);
    let mut upfront = sign(&world, "a").await;
    upfront.offer = offered[3].clone();
    assert_eq!(send(&world.app, upfront.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!((world.shop.handled(), world.received().await), (3, 3 * PRICE));
}

#[tokio::test]
async fn what_is_wrong_with_a_permit_is_named() {
    let world = open().await;
    let good = sign(&world, "a").await;
    let signed = |change: fn(&mut permit::exact::PermitWitnessTransferFrom)| good.clone().with(change).payload();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut payload = good.payload();
        change(&mut payload);
        payload
    };
    let mut forged = good.clone();
    forged.signer = PrivateKeySigner::random();
    forged.resign();
    let authorized = demand(&send(&world.app, evaluate("a")).await)["accepts"][0].clone();
    let customer = world.customer();
    let authorization = serde_json::to_value(customer.pay(&world.app, evaluate("a")).await.payload()).unwrap();
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
        let answer = send(&world.app, paid(evaluate("a"), &payload)).await;
        assert!(answer.status.is_client_error(), "{reason} {answer:?}");
        assert_eq!(answer.reason(), reason, "{payload}");
    }
    assert_eq!((world.shop.handled(), world.received().await), (0, 0));
    assert_eq!(send(&world.app, good.on(evaluate("a"))).await.status, StatusCode::OK);
}

/// Permit2 takes a nonce once, whichever proxy uses it.
#[tokio::test]
async fn one_nonce_of_permit2_pays_once_in_both_schemes() {
    let world = World::with(|layer| layer.permits().upto()).await;
    let exact = sign(&world, "held").await;
    let nonce = exact.message.nonce;
    let maximum = Permit::pay(&world.payer, &world.app, evaluate("a")).await.with(|it| it.nonce = nonce);
    let (first, second) = tokio::join!(send(&world.app, exact.on(evaluate("held"))), async {
        world.begun.notified().await;
        let second = send(&world.app, maximum.on(evaluate("a"))).await;
        world.go_on.notify_one();
        second
    });
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    assert!(second.status.is_client_error(), "{second:?}");
    assert!(send(&world.app, maximum.on(evaluate("a"))).await.status.is_client_error());
    assert_eq!((world.shop.handled(), world.received().await), (1, PRICE));
}

#[tokio::test]
async fn payer_that_approved_too_little_is_told_so_before_the_work() {
    let world = open().await;
    approve(&world.chain.devnet, world.payer.address(), U256::from(PRICE - 1));
    let permit = sign(&world, "a").await;
    let answer = send(&world.app, permit.on(evaluate("a"))).await;
    let said = (answer.status, answer.reason());
    assert_eq!(said, (StatusCode::PRECONDITION_FAILED, "permit2_allowance_required".to_owned()));
    approve(&world.chain.devnet, world.payer.address(), U256::from(PRICE));
    assert_eq!(send(&world.app, permit.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!(world.shop.handled(), 1);
}

/// The payee was paid, whoever asked the proxy.
#[tokio::test]
async fn permit_that_a_stranger_settles_during_the_work_has_paid() {
    let world = open().await;
    let permit = sign(&world, "held").await;
    let mut settled = B256::ZERO;
    let answer = meanwhile(&world, &permit, || settled = permit.settle(&world.chain.devnet)).await;
    assert_eq!((answer.status, answer.transaction()), (StatusCode::OK, settled), "{answer:?}");
    // One that was settled before it was presented may have paid for something else.
    let early = sign(&world, "a").await;
    early.settle(&world.chain.devnet);
    let answer = send(&world.app, early.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_invalid_nonce"));
    assert_eq!((world.shop.handled(), world.received().await), (1, 2 * PRICE));
}

/// No calldata says which permit was settled. It may have been this one, so it has not failed.
#[tokio::test]
async fn permit_that_was_settled_where_nobody_sees_it_is_never_called_failed() {
    for is_within_another in [false, true] {
        let world = open().await;
        let permit = sign(&world, "held").await;
        let answer = meanwhile(&world, &permit, || match is_within_another {
            false => permit.settle_by_contract(&world.chain.devnet),
            true => permit.settle_within_another_permit(&world.chain.devnet),
        })
        .await;
        let said = (answer.status, answer.reason());
        assert_eq!(said, (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending".to_owned()), "{answer:?}");
        for _ in 0..3 {
            world.chain.mine().await;
            world.shop.facilitator.reconcile_now();
        }
        assert!(world.shop.facilitator.drain(Duration::from_secs(10)).await);
        assert_eq!(world.shop.record_of(&permit.key()).await.unwrap().settlement, Settlement::Unknown);
        assert_eq!(world.received().await, PRICE);
    }
}

#[tokio::test]
async fn nonce_that_is_invalidated_or_used_otherwise_during_the_work_has_its_answer_not_given() {
    let world = open().await;
    let invalidated = sign(&world, "held").await;
    let nonce = invalidated.message.nonce;
    let answer =
        meanwhile(&world, &invalidated, || permit::invalidate(&world.chain.devnet, world.payer.address(), nonce)).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_invalid_nonce"));
    let burnt = sign(&world, "held").await;
    let answer = meanwhile(&world, &burnt, || burn(&world.chain.devnet, &world.payer, burnt.message.nonce)).await;
    // Nothing was transferred to the payee by any proxy. That is final once its block is.
    assert!(!answer.status.is_success(), "{answer:?}");
    assert_eq!(world.received().await, 0);
    support::eventually::eventually("it is dead", async || {
        world.chain.mine().await;
        world.shop.facilitator.reconcile_now();
        world.shop.record_of(&burnt.key()).await.is_none_or(|it| it.settlement == Settlement::Dead)
    })
    .await;
}

#[tokio::test]
async fn contract_wallets_pay_by_permit() {
    let world = open().await;
    let wallet = world.chain.deploy_wallet(world.payer.address()).await;
    world.chain.mint(wallet, 10 * PRICE).await;
    approve(&world.chain.devnet, wallet, U256::from(10 * PRICE));
    let mut permit = sign(&world, "a").await;
    permit.from = wallet;
    assert_eq!(send(&world.app, permit.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!((send(&world.app, permit.on(evaluate("a"))).await.status, world.shop.handled()), (StatusCode::OK, 1));
    let mut forged = sign(&world, "a").await;
    (forged.from, forged.signer) = (wallet, PrivateKeySigner::random());
    forged.resign();
    assert_eq!(send(&world.app, forged.on(evaluate("a"))).await.reason(), "invalid_permit2_signature");
    assert_eq!(world.received().await, PRICE);
}

#[tokio::test]
async fn permit_pays_once_through_a_facilitators_service() {
    for confirms in [false, true] {
        let chain = DevnetChain::start(None).await;
        let shop = Shop::open(&chain).await;
        let mut remote =
            RemoteFacilitator::builder(serve_facilitator(&shop).await).ledger(Arc::new(MemoryLedger::new()));
        if confirms {
            remote = remote.confirm(chain.asset().network, chain.rpc_url());
        }
        let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(chain.asset().network, shop.pay_to);
        let layer = layer.facilitator(remote.build().await.unwrap()).permits();
        let world = World::builder().chain(chain).shop(shop).layer(|_| layer).open().await;
        let permit = sign(&world, "a").await;
        let answer = send(&world.app, permit.on(evaluate("a"))).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
        assert_eq!(send(&world.app, permit.on(evaluate("a"))).await.settlement(), answer.settlement());
        assert_eq!((world.shop.handled(), world.received().await), (1, PRICE));
    }
}

/// The amount is signed, so whoever asks can settle nothing else.
#[tokio::test]
async fn service_settles_a_permit_for_its_amount_and_names_what_is_wrong() {
    let world = open().await;
    let service = support::shop::app(FacilitatorService::builder(world.shop.facilitator.clone()).build());
    let ask = async |permit: &ExactPermit, path: &str, amount: &str| {
        let mut required = permit.offer.clone();
        required["amount"] = amount.into();
        let body = json!({ "x402Version": 2, "paymentPayload": permit.payload(), "paymentRequirements": required });
        let request = http::Request::post(path).body(Body::from(body.to_string())).unwrap();
        send(&service, request).await.json()
    };
    let permit = sign(&world, "a").await;
    assert_eq!(ask(&permit, "/verify", "1000").await["isValid"], true);
    assert_eq!(ask(&permit, "/settle", "999").await["success"], false);
    let settled = ask(&permit, "/settle", "1000").await;
    assert_eq!(settled["success"], true, "{settled}");
    assert_eq!(ask(&permit, "/settle", "1000").await, settled);
    let used = sign(&world, "a").await;
    used.settle(&world.chain.devnet);
    assert_eq!(ask(&used, "/verify", "1000").await["invalidReason"], "permit2_invalid_nonce");
    assert_eq!(world.received().await, 2 * PRICE);
}

#[tokio::test]
async fn layer_on_a_chain_that_lacks_the_proxy_is_not_built_and_settles_nothing() {
    let world = open().await;
    let permit = sign(&world, "a").await;
    world.chain.devnet.set_code(EXACT_PROXY, Bytes::new());
    let answer = send(&world.app, permit.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_proxy_not_deployed"));
    let shop = Shop::open(&world.chain).await;
    assert!(matches!(shop.layer().permits().build(), Err(BuildError::NoPermits { scheme: "exact", .. })));
    assert!(shop.layer().upto().build().is_ok());
}
