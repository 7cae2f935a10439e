//! A seller that is paid at most its price (scheme `upto`): what is charged, once, and what is not.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, Bytes, U256, hex};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, sol};
use axum::body::Body;
use futures_util::future::join_all;
use http::{Response, StatusCode};
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::Chain as _,
    devnet::DevnetChain,
    eventually::eventually,
    faulty_ledger::{Fault as LedgerFault, How, faulty},
    permit::{PROXY, Permit, approve, burn, settle_by_contract},
    shop::{App, PRICE, Shop, demand, evaluate, paid, send, serve_facilitator},
    world::World,
};
use tower_x402::{
    ManualClock, Network, Usdc,
    facilitator::{Facilitator, FacilitatorError, OnchainFacilitator, RemoteFacilitator, VerifyError},
    ledger::{Ledger, MemoryLedger, Record, Settlement},
    payment::{Prechecked, SettlementOutcome, Terms, Verified},
    protocol::{SupportedResponse, TransferMethod},
    server::{ActualPrice, BuildError, DeferredPolicy, RequirePaymentLayer},
};
use x402_devnet::Fault;
use x402_facilitator::FacilitatorService;

sol! {
    function transfer(address to, uint256 value);
}

async fn open() -> World {
    World::with(|layer| layer.upto()).await
}

async fn sign(world: &World, body: &'static str) -> Permit {
    Permit::pay(&world.payer, &world.app, evaluate(body)).await
}

/// The payer's money goes elsewhere, but for this much.
async fn leave(world: &World, units: u64) {
    let value = U256::from(world.chain.balance(world.payer.address()).await - units);
    let data = transferCall { to: Address::repeat_byte(0xee), value }.abi_encode();
    world.chain.devnet.execute(world.payer.address(), world.shop.asset.address, data).unwrap();
}

#[tokio::test]
async fn permit_is_charged_what_the_work_cost() {
    let world = open().await;
    let permit = sign(&world, "costs 250").await;
    let answer = send(&world.app, permit.on(evaluate("costs 250"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "costs 250"), "{answer:?}");
    let settlement = answer.settlement().unwrap();
    assert_eq!((settlement["success"].clone(), settlement["amount"].clone()), (json!(true), json!("250")));
    let transfers = world.chain.token_transfers(world.shop.pay_to).await;
    assert_eq!(
        transfers.iter().map(|it| (it.transaction, it.units)).collect::<Vec<_>>(),
        [(answer.transaction(), 250)]
    );
    // Presented again, it gets the same answer, and charges nothing.
    let again = send(&world.app, permit.on(evaluate("costs 250"))).await;
    assert_eq!((again.status, again.settlement()), (StatusCode::OK, Some(settlement)));
    assert_eq!((world.shop.handled(), world.received().await), (1, 250));
}

#[tokio::test]
async fn handler_that_names_no_price_charges_all_of_it_and_one_that_names_more_charges_nothing() {
    let world = open().await;
    let permit = sign(&world, "a").await;
    assert_eq!(send(&world.app, permit.on(evaluate("a"))).await.settlement().unwrap()["amount"], PRICE.to_string());
    let permit = sign(&world, "costs 1001").await;
    assert_eq!(send(&world.app, permit.on(evaluate("costs 1001"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let permit = sign(&world, "fails").await;
    let failed = send(&world.app, permit.on(evaluate("fails"))).await;
    assert_eq!((failed.status, failed.settlement()), (StatusCode::INTERNAL_SERVER_ERROR, None));
    assert_eq!((world.shop.handled(), world.received().await), (3, PRICE));
}

/// The chain takes no charge of nothing, so the permit could still be settled: only the books say that it is used up.
#[tokio::test]
async fn charge_of_nothing_uses_the_permit_up() {
    let world = open().await;
    let permit = sign(&world, "costs 0").await;
    let answer = send(&world.app, permit.on(evaluate("costs 0"))).await;
    let settlement = answer.settlement().unwrap();
    assert_eq!(answer.status, StatusCode::OK);
    let said = ["success", "transaction", "amount"].map(|field| settlement[field].clone());
    assert_eq!(said, [json!(true), json!(""), json!("0")]);
    let record = world.shop.record_of(&permit.key()).await.unwrap();
    assert!(matches!(record.settlement, Settlement::Final { .. }) && record.transaction().is_none(), "{record:?}");
    // The same header buys the same answer, and nothing else.
    let again = send(&world.app, permit.on(evaluate("costs 0"))).await;
    assert_eq!((again.status, again.settlement()), (StatusCode::OK, Some(settlement)));
    let other = send(&world.app, permit.on(evaluate("costs 1000"))).await;
    assert_eq!(other.status, StatusCode::CONFLICT, "{other:?}");
    world.shop.facilitator.reconcile_now();
    assert!(world.shop.facilitator.drain(Duration::from_secs(10)).await);
    assert_eq!((world.shop.handled(), world.received().await), (1, 0));
}

#[tokio::test]
async fn copies_of_one_permit_are_worked_on_once_however_they_spell_it() {
    let world = open().await;
    let permit = sign(&world, "costs 7").await;
    let spelled = |change: &dyn Fn(&mut Value)| {
        let mut payload = permit.payload();
        change(&mut payload["payload"]["permit2Authorization"]);
        payload
    };
    let nonce = permit.message.nonce;
    let spellings = [
        spelled(&|_| {}),
        spelled(&|permit| permit["nonce"] = format!("0x{nonce:x}").into()),
        spelled(&|permit| permit["nonce"] = format!("{nonce:0>78}").into()),
        spelled(&|permit| permit["from"] = permit["from"].as_str().unwrap().to_lowercase().into()),
    ];
    let copies = spellings.iter().cycle().take(20).map(|payload| send(&world.app, paid(evaluate("costs 7"), payload)));
    for answer in join_all(copies).await {
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "costs 7"), "{answer:?}");
    }
    // The other form of the signature is valid for Permit2, and is no other payment.
    let mut twin = permit.clone();
    let order = U256::from_str_radix("fffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141", 16).unwrap();
    let mut bytes = twin.signature.to_vec();
    let s = order - U256::from_be_slice(&bytes[32..64]);
    bytes[32..64].copy_from_slice(&s.to_be_bytes::<32>());
    bytes[64] = 55 - bytes[64];
    twin.signature = bytes.into();
    let answer = send(&world.app, twin.on(evaluate("costs 7"))).await;
    assert!(answer.status.is_client_error(), "{answer:?}");
    assert_eq!((world.shop.handled(), world.received().await), (1, 7));
}

#[tokio::test]
async fn permit_binds_the_request_that_it_was_first_used_for() {
    let world = open().await;
    let permit = sign(&world, "costs 7").await;
    assert_eq!(send(&world.app, permit.on(evaluate("costs 7"))).await.status, StatusCode::OK);
    let other = http::Request::post("/evaluate?k=2").body(Body::from("costs 7")).unwrap();
    assert_eq!(send(&world.app, permit.on(other)).await.status, StatusCode::CONFLICT);
    assert_eq!(world.shop.handled(), 1);
}

#[tokio::test]
async fn payer_that_approved_nothing_is_told_so_before_the_work() {
    let world = open().await;
    approve(&world.chain.devnet, world.payer.address(), U256::from(PRICE - 1));
    let permit = sign(&world, "a").await;
    let answer = send(&world.app, permit.on(evaluate("a"))).await;
    assert_eq!(
        (answer.status, answer.reason().as_str()),
        (StatusCode::PRECONDITION_FAILED, "permit2_allowance_required")
    );
    approve(&world.chain.devnet, world.payer.address(), U256::from(PRICE));
    assert_eq!(send(&world.app, permit.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!(world.shop.handled(), 1);
}

#[tokio::test]
async fn what_is_wrong_with_a_permit_is_named() {
    let world = open().await;
    let good = sign(&world, "a").await;
    let other = Address::repeat_byte(9);
    let signed = |change: fn(&mut support::permit::PermitWitnessTransferFrom)| good.clone().with(change).payload();
    let with_payload = |change: &dyn Fn(&mut Value)| {
        let mut payload = good.payload();
        change(&mut payload["payload"]);
        payload
    };
    let mut forged = good.clone();
    forged.signer = PrivateKeySigner::random();
    forged.resign();
    let mut short = good.clone();
    short.signature = short.signature.slice(..64);
    for (payload, reason) in [
        (signed(|it| it.spender = Address::repeat_byte(9)), "invalid_permit2_spender"),
        (signed(|it| it.witness.to = Address::repeat_byte(9)), "invalid_permit2_recipient_mismatch"),
        (signed(|it| it.witness.facilitator = Address::repeat_byte(9)), "upto_facilitator_mismatch"),
        (signed(|it| it.permitted.token = Address::repeat_byte(9)), "permit2_token_mismatch"),
        (signed(|it| it.permitted.amount += U256::ONE), "permit2_amount_mismatch"),
        (signed(|it| it.permitted.amount -= U256::ONE), "permit2_amount_mismatch"),
        (signed(|it| it.deadline = U256::from(unix_now() + 5)), "permit2_deadline_expired"),
        (signed(|it| it.deadline = U256::from(unix_now() + 100_000)), "permit2_deadline_expired"),
        (signed(|it| it.witness.validAfter = U256::from(unix_now() + 60)), "permit2_not_yet_valid"),
        (forged.payload(), "invalid_permit2_signature"),
        (short.payload(), "invalid_permit2_signature"),
        (with_payload(&|it| it["permit2Authorization"]["nonce"] = json!(7)), "invalid_payload"),
        (with_payload(&|it| it["permit2Authorization"]["from"] = json!(other)), "invalid_permit2_signature"),
    ] {
        let answer = send(&world.app, paid(evaluate("a"), &payload)).await;
        assert!(answer.status.is_client_error(), "{reason} {answer:?}");
        assert_eq!(answer.reason(), reason, "{payload}");
    }
    // Nothing of that was wrong.
    assert_eq!((world.shop.handled(), world.received().await), (0, 0));
    assert_eq!(send(&world.app, good.on(evaluate("a"))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn used_and_invalidated_permits_are_refused_before_the_work() {
    let world = open().await;
    let invalidated = sign(&world, "a").await;
    invalidated.invalidate(&world.chain.devnet);
    let answer = send(&world.app, invalidated.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_invalid_nonce"));
    assert_eq!(world.shop.handled(), 0);
}

/// Nothing is locked while the work lasts. What is left has to cover what is charged, and not the price.
#[tokio::test]
async fn balance_that_covers_the_charge_and_not_the_price_is_charged() {
    let world = open().await;
    let permit = sign(&world, "held, costs 250").await;
    let answer = world
        .meanwhile(permit.on(evaluate("held, costs 250")), async || {
            leave(&world, 300).await;
        })
        .await;
    assert_eq!((answer.status, answer.settlement().unwrap()["amount"].clone()), (StatusCode::OK, json!("250")));
    assert_eq!(world.received().await, 250);
}

#[tokio::test]
async fn permit_that_is_invalidated_during_the_work_is_not_settled_and_its_answer_not_given() {
    let world = open().await;
    let permit = sign(&world, "held, costs 250").await;
    let answer = world
        .meanwhile(permit.on(evaluate("held, costs 250")), async || {
            permit.invalidate(&world.chain.devnet);
        })
        .await;
    assert!(!answer.status.is_success(), "{answer:?}");
    assert_eq!(world.received().await, 0);
}

/// Of such a use there is nothing to be found, and the payment has failed all the same.
#[tokio::test]
async fn nonce_that_is_used_for_something_else_during_the_work_has_its_answer_not_given() {
    let world = open().await;
    let permit = sign(&world, "held, costs 250").await;
    let answer = world
        .meanwhile(permit.on(evaluate("held, costs 250")), async || {
            burn(&world.chain.devnet, &world.payer, permit.message.nonce);
        })
        .await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_invalid_nonce"));
    assert_eq!(world.received().await, 0);
    world.chain.mine().await;
    world.shop.facilitator.reconcile_now();
    eventually("it is dead", async || {
        world.shop.record_of(&permit.key()).await.is_none_or(|it| it.settlement == Settlement::Dead)
    })
    .await;
}

/// By whatever scheme it pays, a payer with money for one request gets one.
#[tokio::test]
async fn balance_covers_what_is_in_flight_by_either_scheme() {
    let world = World::builder().layer(|layer| layer.upto()).funds(PRICE).open().await;
    let permit = sign(&world, "held").await;
    let customer = world.customer();
    let exact = customer.pay(&world.app, evaluate("a")).await;
    let first = world
        .meanwhile(permit.on(evaluate("held")), async || {
            let second = send(&world.app, exact.on(evaluate("a"))).await;
            assert_eq!((second.status, second.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "insufficient_funds"));
        })
        .await;
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    assert_eq!((world.shop.handled(), world.received().await), (1, PRICE));
}

#[tokio::test]
async fn offer_of_a_maximum_names_the_account_and_is_not_made_in_v1() {
    let world = open().await;
    let unpaid = send(&world.app, evaluate("a")).await;
    let offered = demand(&unpaid)["accepts"].clone();
    assert_eq!(offered.as_array().map(Vec::len), Some(2));
    assert_eq!(offered[1]["extra"]["facilitatorAddress"], world.shop.facilitator.settlement_address().to_string());
    assert_eq!(unpaid.json()["accepts"].as_array().map(Vec::len), Some(1));
    let supported = world.shop.facilitator.supported().await.unwrap();
    let kinds: Vec<_> = supported.kinds.iter().map(|kind| kind.scheme.as_str()).collect();
    assert_eq!(kinds, ["exact", "upto"]);
}

/// The node shows all blocks, and in none of them is a transfer by this permit.
#[tokio::test]
async fn nonce_that_is_used_for_something_else_ends_the_payment_of_a_confirmed_facilitator() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let (network, url, ledger) = (chain.asset().network, serve_facilitator(&shop).await, Arc::new(MemoryLedger::new()));
    let remote = RemoteFacilitator::builder(url).ledger(ledger.clone()).confirm(network, chain.rpc_url());
    let remote = remote.reconcile_interval(Duration::from_millis(10)).build().await.unwrap();
    let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(network, shop.pay_to).facilitator(remote).upto();
    let world = World::builder().chain(chain).shop(shop).layer(|_| layer).open().await;
    let permit = sign(&world, "held, costs 250").await;
    let answer = world
        .meanwhile(permit.on(evaluate("held, costs 250")), async || {
            burn(&world.chain.devnet, &world.payer, permit.message.nonce);
        })
        .await;
    assert!(!answer.status.is_success(), "{answer:?}");
    let key = permit.key();
    eventually("it is dead", async || {
        world.chain.mine().await;
        ledger.get(&key).await.unwrap().is_none_or(|record| record.settlement == Settlement::Dead)
    })
    .await;
    assert_eq!(world.received().await, 0);
}

/// Permit2 logs an invalidation of a nonce that was used, too.
#[tokio::test]
async fn permit_that_is_invalidated_after_its_settlement_is_not_dead() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let (network, url, ledger) = (chain.asset().network, serve_facilitator(&shop).await, Arc::new(MemoryLedger::new()));
    let remote = RemoteFacilitator::builder(url).ledger(ledger.clone()).confirm(network, chain.rpc_url());
    let remote = remote.build().await.unwrap();
    let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(network, shop.pay_to).facilitator(remote).upto();
    let world = World::builder().chain(chain).shop(shop).layer(|_| layer).open().await;
    let permit = sign(&world, "held, costs 250").await;
    let answer = world
        .meanwhile(permit.on(evaluate("held, costs 250")), async || {
            settle_by_contract(&world.chain.devnet, &permit.payload(), 250);
            permit.invalidate(&world.chain.devnet);
        })
        .await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending"));
    let key = permit.key();
    assert_eq!(ledger.get(&key).await.unwrap().unwrap().settlement, Settlement::Unknown);
    assert_eq!(world.received().await, 250);
}

/// An outage is to show as "busy", and a payer that leaves the outcome unknown is not.
#[tokio::test]
async fn permit_whose_outcome_stays_unknown_holds_its_place_until_its_deadline() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let clock = Arc::new(ManualClock::at(unix_now()));
    let (network, key) = (chain.asset().network, chain.gas_key().await);
    let facilitator = OnchainFacilitator::builder().network(network).client(chain.devnet.rpc_client()).signer(key);
    let facilitator = facilitator.confirm_timeout(Duration::from_millis(300)).build().await.unwrap();
    let layer = RequirePaymentLayer::builder().price("$0.001").pay_to(network, shop.pay_to).facilitator(facilitator);
    let layer = layer.upto().max_concurrent(1).clock(clock.clone());
    let world = World::builder().chain(chain).shop(shop).layer(|_| layer).open().await;
    let permit = sign(&world, "costs 250").await;
    let later = sign(&world, "a").await;
    world.chain.devnet.stall(true);
    let answer = send(&world.app, permit.on(evaluate("costs 250"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "settlement_pending"));
    let answer = send(&world.app, later.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "busy"));
    clock.advance(1_000);
    eventually("its place is free", async || send(&world.app, later.on(evaluate("a"))).await.reason() != "busy").await;
}

/// A facilitator that settles through another one, which is ours.
#[tokio::test]
async fn permit_is_charged_once_through_a_facilitators_service() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let url = serve_facilitator(&shop).await;
    for confirms in [false, true] {
        let mut remote = RemoteFacilitator::builder(&url).ledger(Arc::new(MemoryLedger::new()));
        if confirms {
            remote = remote.confirm(chain.asset().network, chain.rpc_url());
        }
        let remote = remote.build().await.unwrap();
        let account = shop.facilitator.settlement_address();
        assert_eq!(remote.permit_methods(chain.asset().network), TransferMethod::by_permit(account));
        let layer = RequirePaymentLayer::builder()
            .price("$0.001")
            .pay_to(chain.asset().network, shop.pay_to)
            .facilitator(remote)
            .upto();
        let before = chain.balance(shop.pay_to).await;
        let app = shop.app_with(layer, |_, body| async move {
            let units = std::str::from_utf8(&body)?.strip_prefix("costs ").unwrap_or("1000").parse()?;
            let mut response = Response::new(Body::from(body));
            response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(units)));
            Ok(response)
        });
        let payer = PrivateKeySigner::random();
        chain.mint(payer.address(), 10 * PRICE).await;
        let unapproved = Permit::pay(&payer, &app, evaluate("a")).await;
        let refused = send(&app, unapproved.on(evaluate("a"))).await;
        assert_eq!(refused.reason(), "permit2_allowance_required", "{refused:?}");
        approve(&chain.devnet, payer.address(), U256::MAX >> 1);
        for (body, amount) in [("costs 250", "250"), ("costs 0", "0"), ("all", "1000")] {
            let permit = Permit::pay(&payer, &app, evaluate(body)).await;
            let answer = send(&app, permit.on(evaluate(body))).await;
            assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
            assert_eq!(answer.settlement().unwrap()["amount"], amount);
            let again = send(&app, permit.on(evaluate(body))).await;
            assert_eq!(again.settlement(), answer.settlement(), "{again:?}");
        }
        assert_eq!(chain.balance(shop.pay_to).await - before, 1_250);
    }
}

/// Asks a facilitator's service about this amount of a permit.
async fn ask(service: &App, permit: &Permit, path: &str, amount: &str) -> Value {
    let mut required = permit.offer.clone();
    required["amount"] = amount.into();
    let body = json!({ "x402Version": 2, "paymentPayload": permit.payload(), "paymentRequirements": required });
    let request = http::Request::post(path).body(Body::from(body.to_string())).unwrap();
    send(service, request).await.json()
}

/// What a caller asks for a second time, with another amount, is another settlement of a permit that has been settled.
#[tokio::test]
async fn service_settles_a_permit_for_one_amount_only() {
    let world = open().await;
    let service = support::shop::app(FacilitatorService::builder(world.shop.facilitator.clone()).build());
    let ask = async |permit: &Permit, path: &str, amount: &str| ask(&service, permit, path, amount).await;
    let permit = sign(&world, "a").await;
    assert_eq!(ask(&permit, "/verify", "1000").await["isValid"], true);
    let verified = ask(&permit, "/verify", "999").await;
    assert_eq!(
        (verified["isValid"].clone(), verified["invalidReason"].is_string()),
        (json!(false), true),
        "{verified}"
    );
    let exceeds = ask(&permit, "/settle", "1001").await;
    assert_eq!(exceeds["errorReason"], "invalid_upto_evm_payload_settlement_exceeds_amount");
    let settled = ask(&permit, "/settle", "100").await;
    assert_eq!((settled["success"].clone(), settled["amount"].clone()), (json!(true), json!("100")), "{settled}");
    assert_eq!(ask(&permit, "/settle", "100").await, settled);
    let more = ask(&permit, "/settle", "900").await;
    assert_eq!((more["success"].clone(), more["errorReason"].clone()), (json!(false), json!("permit2_invalid_nonce")));
    // Of a permit that is charged nothing it is the same.
    let free = sign(&world, "a").await;
    let settled = ask(&free, "/settle", "0").await;
    assert_eq!(
        (settled["success"].clone(), settled["transaction"].clone(), settled["amount"].clone()),
        (json!(true), json!(""), json!("0")),
        "{settled}"
    );
    assert_eq!(ask(&free, "/settle", "0").await, settled);
    assert_eq!(ask(&free, "/settle", "900").await["success"], false);
    assert_eq!(world.received().await, 100);
    // Asked for two amounts at once, it settles one of them, and says so to nobody else.
    let both = sign(&world, "a").await;
    let (one, other) = tokio::join!(ask(&both, "/settle", "200"), ask(&both, "/settle", "300"));
    let settled: u64 = [(&one, 200), (&other, 300)]
        .iter()
        .filter(|(answer, _)| answer["success"] == true)
        .map(|(_, units)| units)
        .sum();
    assert_eq!(world.received().await, 100 + settled, "{one} {other}");
    let supported = send(&service, http::Request::get("/supported").body(Body::empty()).unwrap()).await.json();
    let kinds = supported["kinds"].as_array().unwrap();
    let of_upto: Vec<_> = kinds.iter().filter(|kind| kind["scheme"] == "upto").collect();
    assert_eq!(of_upto.len(), 1, "{supported}");
    assert_eq!(of_upto[0]["extra"]["facilitatorAddress"], world.shop.facilitator.settlement_address().to_string());
}

/// The account that the permit names sends the transaction, although another one is free.
#[tokio::test]
async fn account_that_a_permit_names_settles_it() {
    let chain = DevnetChain::start(None).await;
    let (second, url) = (chain.gas_key().await, chain.rpc_url());
    let shop = Shop::open_with(&chain, |builder| builder.rpc_url(url).signer(second)).await;
    let world = World::builder().chain(chain).shop(shop).layer(|layer| layer.upto()).funds(100 * PRICE).open().await;
    let bought = (0..6).map(async |_| {
        let permit = sign(&world, "costs 5").await;
        send(&world.app, permit.on(evaluate("costs 5"))).await
    });
    for answer in join_all(bought).await {
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        let receipt = world.chain.receipt(answer.transaction()).await;
        assert_eq!(receipt.from, world.shop.facilitator.settlement_address());
    }
    assert_eq!(world.received().await, 30);
}

#[tokio::test]
async fn layer_that_nobody_settles_permits_for_is_not_built() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let layer = RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(chain.asset().network, shop.pay_to)
        .facilitator(support::scripted::Scripted::new())
        .upto();
    assert!(matches!(layer.build(), Err(BuildError::NoPermits { .. })));
    // Nor one on a chain that lacks the proxy.
    chain.devnet.set_code(PROXY, Bytes::new());
    let shop = Shop::open(&chain).await;
    assert!(matches!(shop.layer().upto().build(), Err(BuildError::NoPermits { .. })));
}

/// What a contract settles cannot be told by the transaction that calls it.
#[tokio::test]
async fn confirmed_facilitator_that_settles_by_a_contract_is_offered_no_permits() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let url = serve_facilitator(&shop).await;
    let (network, account) = (chain.asset().network, shop.facilitator.settlement_address());
    let offered = async |confirms: bool| {
        let mut remote = RemoteFacilitator::builder(&url);
        if confirms {
            remote = remote.confirm(network, chain.rpc_url());
        }
        remote.build().await.unwrap().permit_methods(network)
    };
    let all = TransferMethod::by_permit(account);
    assert_eq!([offered(false).await, offered(true).await], [all, all]);
    chain.devnet.delegate(account, PROXY);
    assert_eq!(offered(false).await, all);
    assert!(offered(true).await.is_empty());
}

/// The calldata is what the specification's contract takes: its selector, and the words in order.
#[tokio::test]
async fn settlement_calls_the_proxy_as_its_documents_say() {
    use alloy_consensus::Transaction as _;
    use alloy_provider::Provider as _;

    let world = open().await;
    let permit = sign(&world, "costs 250").await;
    let answer = send(&world.app, permit.on(evaluate("costs 250"))).await;
    let sent = world.chain.provider().get_transaction_by_hash(answer.transaction()).await.unwrap().unwrap();
    assert_eq!(sent.to(), Some(PROXY));
    let input = sent.input();
    assert_eq!((input.len(), hex::encode(&input[..4])), (452, "ff11e7b4".to_owned()));
    assert_eq!(U256::from_be_slice(&input[4 + 32..4 + 64]), U256::from(PRICE));
    assert_eq!(U256::from_be_slice(&input[4 + 4 * 32..4 + 5 * 32]), U256::from(250));
}

/// The payer's money would cover both, and what Permit2 may move covers one.
#[tokio::test]
async fn approval_covers_what_is_in_flight() {
    let world = open().await;
    approve(&world.chain.devnet, world.payer.address(), U256::from(2 * PRICE - 1));
    let (first, second) = (sign(&world, "held, costs 250").await, sign(&world, "a").await);
    let (answer, refused) = tokio::join!(send(&world.app, first.on(evaluate("held, costs 250"))), async {
        world.begun.notified().await;
        let refused = send(&world.app, second.on(evaluate("a"))).await;
        world.go_on.notify_one();
        refused
    });
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    let said = (refused.status, refused.reason());
    assert_eq!(said, (StatusCode::PAYMENT_REQUIRED, "permit2_insufficient_balance".to_owned()), "{refused:?}");
    assert_eq!(world.shop.handled(), 1);
    // What is left of it covers the second one.
    assert_eq!(send(&world.app, second.on(evaluate("a"))).await.status, StatusCode::OK);
    assert_eq!(world.received().await, 250 + PRICE);
}

#[tokio::test]
async fn permit_is_known_after_the_key_that_it_names_was_changed() {
    let world = open().await;
    let (answered, unseen) = (sign(&world, "costs 250").await, sign(&world, "costs 250").await);
    let answer = send(&world.app, answered.on(evaluate("costs 250"))).await;
    let service = support::shop::app(FacilitatorService::builder(world.shop.facilitator.clone()).build());
    let asked = sign(&world, "a").await;
    let settled = ask(&service, &asked, "/settle", "100").await;
    assert_eq!((answer.status, settled["success"].clone()), (StatusCode::OK, json!(true)), "{answer:?} {settled}");

    let (url, ledger) = (world.chain.rpc_url(), world.shop.facilitator.ledger().clone());
    let mut shop = Shop::open_with(&world.chain, |builder| builder.rpc_url(url).ledger(ledger)).await;
    (shop.pay_to, shop.handled) = (world.shop.pay_to, world.shop.handled.clone());
    let app = shop.app(shop.layer().upto());
    let again = send(&app, answered.on(evaluate("costs 250"))).await;
    assert_eq!((again.status, again.settlement()), (StatusCode::OK, answer.settlement()), "{again:?}");
    let service = support::shop::app(FacilitatorService::builder(shop.facilitator.clone()).build());
    assert_eq!(ask(&service, &asked, "/settle", "100").await, settled);
    // For new work nobody here has the key.
    assert!(send(&app, unseen.on(evaluate("costs 250"))).await.status.is_client_error());
    assert_eq!(ask(&service, &unseen, "/settle", "100").await["errorReason"], "upto_facilitator_mismatch");
    assert_eq!((shop.handled(), world.received().await), (1, 350));
}

/// Only the chain can check its signature, and the chain takes no charge of nothing.
#[tokio::test]
async fn permit_of_a_contract_wallet_is_charged_nothing_at_a_service() {
    let world = open().await;
    let service = support::shop::app(FacilitatorService::builder(world.shop.facilitator.clone()).build());
    let wallet = world.chain.deploy_wallet(world.payer.address()).await;
    world.chain.mint(wallet, 10 * PRICE).await;
    approve(&world.chain.devnet, wallet, U256::MAX >> 1);
    let mut permit = sign(&world, "a").await;
    permit.from = wallet;
    let settled = ask(&service, &permit, "/settle", "0").await;
    let said = ["success", "transaction", "amount"].map(|field| settled[field].clone());
    assert_eq!(said, [json!(true), json!(""), json!("0")], "{settled}");
    assert_eq!(ask(&service, &permit, "/settle", "900").await["success"], false);
    let mut forged = sign(&world, "a").await;
    (forged.from, forged.signer) = (wallet, PrivateKeySigner::random());
    forged.resign();
    assert_eq!(ask(&service, &forged, "/settle", "0").await["success"], false);
    assert_eq!(world.received().await, 0);
}

#[tokio::test]
async fn charge_of_nothing_is_one_step_of_a_service() {
    let chain = DevnetChain::start(None).await;
    let ledger = faulty(Arc::new(MemoryLedger::new()));
    let (url, books) = (chain.rpc_url(), ledger.clone());
    let shop = Shop::open_with(&chain, |builder| builder.rpc_url(url).ledger(books)).await;
    let world = World::builder().chain(chain).shop(shop).layer(|layer| layer.upto()).open().await;
    let service = support::shop::app(FacilitatorService::builder(world.shop.facilitator.clone()).build());
    let permit = sign(&world, "a").await;
    // As if the process ended after the first.
    ledger.around.arm(Some(LedgerFault { call: "settle Finalize", nth: 0, how: How::Before }));
    let settled = ask(&service, &permit, "/settle", "0").await;
    assert_eq!(settled["success"], true, "{settled}");
    let record = world.shop.record_of(&permit.key()).await.unwrap();
    assert!(matches!(record.settlement, Settlement::Final { .. }) && record.transaction().is_none(), "{record:?}");
}

/// A facilitator that says yes to everything, and that it charged this much.
async fn yes_man(account: Address, amount: Option<&'static str>) -> String {
    let answer = move |request: http::Request<Body>| async move {
        let kind = |scheme: &str| json!({ "x402Version": 2, "scheme": scheme, "network": "eip155:84532" });
        let mut permits = kind("upto");
        permits["extra"] = json!({ "facilitatorAddress": account });
        axum::Json(match request.uri().path() {
            "/supported" => json!({
                "kinds": [kind("exact"), permits], "extensions": [],
                "signers": { "eip155:*": [Address::repeat_byte(1), account] },
            }),
            "/verify" => json!({ "isValid": true }),
            _ => {
                let transaction = B256::repeat_byte(0xab);
                let mut settled = json!({ "success": true, "transaction": transaction, "network": "eip155:84532" });
                if let Some(amount) = amount {
                    settled["amount"] = amount.into();
                }
                settled
            }
        })
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await.unwrap() });
    url
}

/// Nobody looks at the chain, so that only the facilitator says what it charged.
#[tokio::test]
async fn facilitators_success_is_believed_if_it_names_what_was_charged() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let account = Address::repeat_byte(7);
    for (amount, is_believed) in [(Some("250"), true), (None, false), (Some(""), false), (Some("1000"), false)] {
        let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
        let remote = RemoteFacilitator::builder(yes_man(account, amount).await).ledger(ledger.clone());
        let remote = remote.build().await.unwrap();
        // It is the account that it names, although it lists another one first.
        assert_eq!(remote.permit_methods(chain.asset().network), TransferMethod::by_permit(account));
        let layer = tower_x402::server::RequirePaymentLayer::builder()
            .price("$0.001")
            .pay_to(chain.asset().network, shop.pay_to)
            .facilitator(remote)
            .upto();
        let app = shop.app_with(layer, |_, body| async move {
            let mut response = Response::new(Body::from(body));
            response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(250)));
            Ok(response)
        });
        let permit = Permit::pay(&PrivateKeySigner::random(), &app, evaluate("a")).await;
        let answer = send(&app, permit.on(evaluate("a"))).await;
        assert_eq!(answer.status.is_success(), is_believed, "{amount:?} {answer:?}");
        let record = ledger.get(&permit.key()).await.unwrap().unwrap();
        assert_eq!(record.transaction().is_some(), is_believed, "{amount:?} {record:?}");
    }
}

/// Settles permits, and nothing in the background.
#[derive(Debug)]
struct Asked(Arc<OnchainFacilitator>);

#[async_trait::async_trait]
impl Facilitator for Asked {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        self.0.ledger()
    }

    fn serves(&self, terms: &Terms) -> bool {
        terms.permit().is_some() && self.0.serves(terms)
    }

    fn permit_methods(&self, network: Network) -> Vec<TransferMethod> {
        self.0.permit_methods(network)
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        self.0.supported().await
    }

    async fn verify(&self, payment: &Prechecked) -> Result<Verified, VerifyError> {
        self.0.verify(payment).await
    }

    async fn settle(&self, payment: &Prechecked, verified: &Verified) -> Result<SettlementOutcome, FacilitatorError> {
        self.0.settle(payment, verified).await
    }

    async fn reconcile(&self, record: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        self.0.reconcile(record).await
    }
}

#[tokio::test]
async fn layer_that_defers_needs_a_facilitator_for_permits_that_settles_by_itself() {
    let chain = DevnetChain::start(None).await;
    let shop = Shop::open(&chain).await;
    let layer = |is_deferred: bool| {
        let builder = tower_x402::server::RequirePaymentLayer::builder()
            .price("$0.001")
            .pay_to(chain.asset().network, shop.pay_to)
            .facilitator(Asked(shop.facilitator.clone()))
            .facilitator(shop.facilitator.clone())
            .upto();
        if is_deferred { builder.deferred(DeferredPolicy::default()).build() } else { builder.build() }
    };
    assert!(layer(false).is_ok());
    assert!(matches!(layer(true), Err(BuildError::NotDeferrable(_))));
}

/// The node's words may be about the node.
#[tokio::test]
async fn payer_is_not_told_what_the_node_says_of_a_revert() {
    let world = open().await;
    world.chain.devnet.faults().set(|call| match call.method {
        "eth_estimateGas" => Fault::Error { code: 3, message: "execution reverted: see http://node.internal".into() },
        _ => Fault::None,
    });
    let answer = send(&world.app, sign(&world, "a").await.on(evaluate("a"))).await;
    let said = (answer.status, answer.reason());
    assert_eq!(said, (StatusCode::PAYMENT_REQUIRED, "permit2_simulation_failed".to_owned()), "{answer:?}");
    assert!(!format!("{answer:?} {}", demand(&answer)).contains("node.internal"), "{answer:?}");
}

/// A call of an address without code would succeed.
#[tokio::test]
async fn chain_without_the_proxy_takes_no_permits() {
    let world = open().await;
    let permit = sign(&world, "a").await;
    world.chain.devnet.set_code(support::permit::PROXY, alloy_primitives::Bytes::new());
    let answer = send(&world.app, permit.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "permit2_proxy_not_deployed"));
    assert_eq!(world.shop.handled(), 0);
    let other = Shop::open(&world.chain).await;
    let supported = other.facilitator.supported().await.unwrap();
    assert!(supported.kinds.iter().all(|kind| kind.scheme == "exact"), "{supported:?}");
}

/// An account with a contract's signature, and one that delegates to a contract.
#[tokio::test]
async fn contract_wallets_pay_by_permit() {
    let world = open().await;
    let wallet = world.chain.deploy_wallet(world.payer.address()).await;
    world.chain.mint(wallet, 10 * PRICE).await;
    approve(&world.chain.devnet, wallet, U256::from(10 * PRICE));
    let mut permit = sign(&world, "costs 250").await;
    permit.from = wallet;
    let answer = send(&world.app, permit.on(evaluate("costs 250"))).await;
    assert_eq!((answer.status, answer.settlement().unwrap()["amount"].clone()), (StatusCode::OK, json!("250")));
    let again = send(&world.app, permit.on(evaluate("costs 250"))).await;
    assert_eq!((again.status, world.shop.handled()), (StatusCode::OK, 1), "{again:?}");
    // Another key's signature is refused by the wallet.
    let mut forged = sign(&world, "costs 250").await;
    (forged.from, forged.signer) = (wallet, PrivateKeySigner::random());
    forged.resign();
    let answer = send(&world.app, forged.on(evaluate("costs 250"))).await;
    assert_eq!(answer.reason(), "invalid_permit2_signature");
}
