//! A seller that takes vouchers beside `exact`: what they buy, what they do not buy, and what is claimed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::B256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::{Response, StatusCode};
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::Chain,
    devnet::DevnetChain,
    escrow::{Channel, send as execute},
    eventually::{eventually, in_time},
    faulty_ledger::{Fault, How, faulty_channels},
    rpc_proxy::RpcProxy,
    shop::{Customer, PRICE, ask, demand, evaluate, paid, send},
    world::{COST, DEPOSIT, World, by_voucher, channels_of, offer, pay, refused, told, voucher},
};
use tower_x402::{
    Clock as _, Network, Usdc,
    channels::ClaimReport,
    facilitator::{NotReady, channels::ChannelError},
    ledger::{
        MemoryLedger,
        channels::{ChannelLedger, ChannelStep},
        conformance::channels::observation,
    },
    server::{ActualPrice, BuildError, DeferredPolicy, RequirePaymentLayer, RequirePaymentLayerBuilder},
    vouchers::{ChannelConfig, ChannelState, Escrow, Voucher},
};

#[tokio::test]
async fn one_deposit_buys_many_answers_and_one_claim_pays_for_them() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;

    let first = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
    assert_eq!((first.status, first.text()), (StatusCode::OK, "one"), "{first:?}");
    let settlement = first.settlement().unwrap();
    assert_eq!((&settlement["amount"], settlement["transaction"].as_str().unwrap().len()), (&json!("10000"), 66));
    assert_eq!(told(&first), ("1000".into(), "1000".into()));
    for n in 2..=10 {
        let answer = send(&app, pay(&app, &channel, n * COST, None, "more").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        assert_eq!(answer.headers["cache-control"], "private");
        assert_eq!(told(&answer), ("1000".into(), (n * COST).to_string()));
        assert_eq!(answer.settlement().unwrap()["transaction"], "");
    }
    assert_eq!(world.shop.handled(), 10);
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 0), "nothing is claimed yet");
    refused(&send(&app, pay(&app, &channel, 11 * COST, None, "more").await).await, "cumulative_exceeds_balance");

    let report = world.channels.claim_all().await.expect("the devnet claims");
    assert_eq!((report.claimed, report.settled, report.refused.len()), (DEPOSIT, DEPOSIT, 0));
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, DEPOSIT));
    assert_eq!(world.chain.balance(world.shop.pay_to).await, 10 * PRICE);
    let again = world.channels.claim_all().await.expect("there is nothing to do");
    assert_eq!((again.claimed, again.settled), (0, 0));
}

/// However often a payer gives up before its deposit is deep enough, it finds the deposit in the books in the end.
#[tokio::test]
async fn deposit_whose_payer_has_left_is_noted() {
    let world = World::open().await;
    let (channel, sent) = (world.channel().await, Arc::<AtomicBool>::default());
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let devnet = &world.chain.devnet;
    devnet.stall(true);
    let seen = sent.clone();
    devnet.faults().set(move |call| {
        seen.fetch_or(call.method == "eth_sendRawTransaction", Ordering::SeqCst);
        x402_devnet::Fault::None
    });
    let first = ask(&world.app, pay(&world.app, &channel, COST, Some(&deposit), "one").await);
    eventually("the deposit is sent", async || sent.load(Ordering::SeqCst)).await;
    first.abort();
    devnet.stall(false);
    devnet.mine();
    eventually("it is noted", async || world.ledger.channel(&channel.id()).await.unwrap().is_some()).await;
    assert_eq!((world.record(&channel).await.covered(), world.charged(&channel).await), (DEPOSIT, 0));
    let answer = send(&world.app, pay(&world.app, &channel, COST, Some(&deposit), "one").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "one"), "{answer:?}");
}

#[tokio::test]
async fn a_claim_that_its_caller_gives_up_goes_on() {
    let world = World::with_blocks_every(Duration::from_millis(20)).await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    world.chain.devnet.stall(true);
    let given_up = tokio::time::timeout(Duration::from_millis(200), world.channels.claim_all()).await;
    assert!(given_up.is_err(), "{given_up:?}");
    let claiming = world.record(&channel).await.claiming_until;
    assert_eq!(claiming, Some(world.clock.now() + 180), "no other process claims it meanwhile");
    world.chain.devnet.stall(false);
    in_time("the claim is in the books", async {
        while world.record(&channel).await.claiming_until.is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, COST));
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "next").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(world.channels.claim_all().await.unwrap().claimed, COST);
    // That there was nothing to claim does not delay the next claim.
    assert_eq!(world.channels.claim_all().await.unwrap().claimed, 0);
    let answer = send(&app, pay(&app, &channel, 3 * COST, None, "last").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(world.channels.claim_all().await.unwrap().claimed, COST);
}

#[tokio::test]
async fn a_claim_without_its_transfer_is_reported_and_one_that_fails_is_an_error() {
    let world = World::open().await;
    let channel = world.filled(&world.app).await;
    let faults = world.chain.devnet.faults();
    let dropping = |after: u64| {
        faults.reset();
        faults.set(move |call| match call.method {
            "eth_call" if call.index >= after => x402_devnet::Fault::DropBefore,
            _ => x402_devnet::Fault::None,
        });
    };
    dropping(0);
    let failed = world.channels.claim_all().await;
    assert!(matches!(failed, Err(ChannelError::Unavailable(_))), "{failed:?}");
    // The channel is read before the claim and after it; then the node is gone.
    dropping(2);
    world.clock.advance(181);
    let report = world.channels.claim_all().await.expect("it was claimed");
    assert_eq!((report.claimed, report.settled, report.transactions.len()), (COST, 0, 1));
    faults.clear();
    let report = world.channels.claim_all().await.unwrap();
    assert_eq!((report.claimed, report.settled, report.transactions.len()), (0, COST, 1));
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, COST));
}

/// A withdrawal may have been announced, or a reorganization may have removed a claim.
#[tokio::test]
async fn a_channel_is_looked_at_again_for_as_long_as_something_can_be_lost() {
    let world = World::open().await;
    let app = world.shop.app(world.shop.layer().clock(world.clock.clone()).vouchers(world.channels.clone()));
    let channel = world.filled(&app).await;
    world.channels.claim_all().await.expect("the devnet claims");
    let opened = world.clock.now();
    // Nothing was ever charged on this one.
    let unused = world.channel().await;
    let mut observation = world.record(&channel).await.observed;
    observation.state = ChannelState { channel_id: unused.id(), total_claimed: 0, ..observation.state };
    let (network, config) = (Network::BASE_SEPOLIA, unused.config);
    let step = ChannelStep::Open { network, config, observation, now: opened };
    world.ledger.advance(&unused.id(), &step).await.expect("a new channel");

    let observed_at = async |channel: &Channel| world.record(channel).await.observed_at - opened;
    let mut now = 0;
    for (time, looked_at) in [(149, 0), (150, 150), (299, 150), (3_449, 3_449), (3_600, 3_449)] {
        world.clock.advance(time - std::mem::replace(&mut now, time));
        world.channels.claim_all().await.expect("there is nothing to do");
        assert_eq!((observed_at(&channel).await, observed_at(&unused).await), (looked_at, 0), "{time}");
    }
}

#[tokio::test]
async fn a_fresh_channel_is_charged_without_asking_the_node() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let world = World::builder().chain(chain).node(proxy.url()).open().await;
    let app = world.app.clone();
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, 3 * COST).await;
    let first = send(&app, pay(&app, &channel, COST, Some(&deposit), "first").await).await;
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    proxy.reset();
    // Fresh is what was looked at five minutes ago, and the last voucher is for all that is in the channel.
    for (max, later) in [(2 * COST, 0), (3 * COST, 300)] {
        world.clock.advance(later);
        let answer = send(&app, pay(&app, &channel, max, None, "quick").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    }
    assert_eq!(proxy.counts().requests, 0);
}

#[tokio::test]
async fn a_deposit_that_was_executed_before_the_seller_forgot_it_still_pays() {
    let world = World::open().await;
    // Of the places for requests that wait for the chain, it needs one at a time.
    let app = world.shop.app(world.layer().max_concurrent(1));
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let relayer = world.chain.relayer().await;
    let executed = execute(&world.chain, &relayer, &channel.deposit_call(&deposit)).await;
    assert!(executed.status());
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "one"), "{answer:?}");
    assert_eq!(answer.transaction(), executed.transaction_hash, "it is told as if the seller had made it");
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 0));
}

#[tokio::test]
async fn a_voucher_for_another_amount_gets_the_channels_state_and_nothing_else() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    for max in [1, COST, COST + 1, 2 * COST - 1, 2 * COST + 1, 9 * COST] {
        let answer = send(&app, pay(&app, &channel, max, None, "a").await).await;
        refused(&answer, "cumulative_amount_mismatch");
        assert!(answer.settlement().is_none());
        let demand = demand(&answer);
        let offer = demand["accepts"].as_array().unwrap().iter().find(|offer| offer["scheme"] == "batch-settlement");
        let extra = &offer.expect("the offer again")["extra"];
        assert_eq!(extra["channelState"]["chargedCumulativeAmount"], "1000");
        assert_eq!(extra["channelState"]["balance"], "10000");
        let newest = voucher(&channel, COST).await;
        let theirs = json!({ "signedMaxClaimable": "1000", "signature": newest.signature });
        assert_eq!(extra["voucherState"], theirs);
    }
    assert_eq!(world.shop.handled(), 1);
    assert_eq!(world.charged(&channel).await, COST);
}

#[tokio::test]
async fn failed_work_is_not_charged_and_its_voucher_pays_for_another_request() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let failed = send(&app, pay(&app, &channel, COST, Some(&deposit), "fails").await).await;
    assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR, "{failed:?}");
    assert_eq!(told(&failed), ("0".into(), "0".into()), "the deposit was made, and nothing was charged");
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 0));

    let answer = send(&app, pay(&app, &channel, COST, None, "another").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "another"), "{answer:?}");
    assert_eq!(told(&answer), ("1000".into(), "1000".into()));
}

#[tokio::test]
async fn work_that_panics_or_fails_frees_the_channel() {
    let world = World::open().await;
    let app = world.shop.app_with(world.layer(), |_, body| async move {
        match &body[..] {
            b"panic" => panic!("on purpose"),
            b"error" => Err("on purpose".into()),
            _ => Ok(Response::new(Body::from(body))),
        }
    });
    let channel = world.filled(&app).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "panic").await).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    let failed = support::shop::try_send(&app, pay(&app, &channel, 2 * COST, None, "error").await).await;
    assert!(failed.is_err(), "a handler's own error passes");
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "fine").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "fine"), "{answer:?}");
    assert_eq!(world.charged(&channel).await, 2 * COST);
}

#[tokio::test]
async fn work_may_cost_less_than_its_price_and_never_more() {
    let world = World::open().await;
    let app = world.shop.app_with(world.layer(), |_, body| async move {
        let mut response = Response::new(Body::from(body.clone()));
        let text = std::str::from_utf8(&body).unwrap();
        match text.strip_prefix("usdc ") {
            Some(amount) => {
                response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(amount.parse().unwrap())));
            }
            None if text.starts_with('{') => {
                response.headers_mut().insert("settlement-overrides", text.parse().unwrap());
            }
            None => {}
        }
        Ok(response)
    });
    let channel = world.filled(&app).await;
    let mut charged = COST;
    for (body, cost) in [
        ("usdc 300", 300),
        ("usdc 0", 0),
        (r#"{"amount":"250"}"#, 250),
        (r#"{"amount":"33.33%"}"#, 333),
        (r#"{"amount":"7.5%"}"#, 75),
        (r#"{"amount":"100%"}"#, 1_000),
        (r#"{"amount":"$0.0005"}"#, 500),
        (r#"{"amount":"0"}"#, 0),
        (r#"{}"#, 1_000),
        ("whole", 1_000),
    ] {
        let answer = send(&app, pay(&app, &channel, charged + COST, None, body).await).await;
        assert_eq!(answer.status, StatusCode::OK, "{body}: {answer:?}");
        assert!(!answer.headers.contains_key("settlement-overrides"));
        charged += cost;
        assert_eq!(told(&answer), (cost.to_string(), charged.to_string()), "{body}");
    }
    for body in [
        "usdc 1001",
        r#"{"amount":"1001"}"#,
        r#"{"amount":"100.01%"}"#,
        r#"{"amount":"-1"}"#,
        r#"{"amount":"x"}"#,
        r#"{"amount":"%"}"#,
        r#"{"amount":".5%"}"#,
        r#"{"amount":"1.005%"}"#,
        r#"{"amount":"+1%"}"#,
        r#"{"amount":"1.+5%"}"#,
    ] {
        let answer = send(&app, pay(&app, &channel, charged + COST, None, body).await).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{body}: {answer:?}");
    }
    assert_eq!(world.charged(&channel).await, charged);
    let report = world.channels.claim_all().await.unwrap();
    assert_eq!(report.claimed, charged, "what was charged, not what was signed");
}

#[tokio::test]
async fn requests_of_one_channel_wait_in_line() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let slow = ask(&app, pay(&app, &channel, 2 * COST, None, "held").await);
    world.begun.notified().await;
    // Signed for what will be charged then, and for what was charged before.
    let (next, outdated) =
        (pay(&app, &channel, 3 * COST, None, "next").await, pay(&app, &channel, 2 * COST, None, "outdated").await);
    let waiting = [next, outdated].map(|request| ask(&app, request));
    tokio::task::yield_now().await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    world.go_on.notify_one();
    assert_eq!(slow.await.unwrap().status, StatusCode::OK);
    let [next, outdated] = waiting;
    let next = next.await.unwrap();
    assert_eq!((next.status, next.text()), (StatusCode::OK, "next"), "{next:?}");
    refused(&outdated.await.unwrap(), "cumulative_amount_mismatch");
    assert_eq!(world.charged(&channel).await, 3 * COST);
}

#[tokio::test]
async fn nothing_is_served_for_one_unit_after_the_books_are_lost() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    world.channels.claim_all().await.expect("the devnet claims");
    // The same seller with empty books: what was charged is what was claimed.
    let empty = Arc::new(MemoryLedger::new());
    let channels = world.process(empty.clone()).await;
    let forgetful = world.seller(channels);
    for max in [1, COST, COST + 1] {
        refused(&send(&forgetful, pay(&app, &channel, max, None, "a").await).await, "cumulative_amount_mismatch");
    }
    let answer = send(&forgetful, pay(&app, &channel, 2 * COST, None, "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(world.shop.handled(), 2);
    assert_eq!(empty.channel(&channel.id()).await.unwrap().unwrap().charged(), 2 * COST);
}

#[tokio::test]
async fn a_withdrawal_stops_credit_and_everything_is_claimed_at_once() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    world.announce_withdrawal(&channel, DEPOSIT).await;
    // The seller believes what it saw for five minutes, a third of the time that a withdrawal takes.
    world.clock.advance(301);
    refused(&send(&app, pay(&app, &channel, 2 * COST, None, "a").await).await, "cumulative_exceeds_balance");
    let claimed = async {
        while channel.state(&world.chain).await.1 < COST {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), claimed).await.expect("what was charged is claimed");
}

/// Otherwise any payer could take the seller out of its load balancer.
#[tokio::test]
async fn a_withdrawal_makes_a_seller_unready_only_while_its_claim_fails() {
    let world = World::open().await;
    let app = world.app.clone();
    let [first, second] = [world.filled(&app).await, world.filled(&app).await];
    let withdraw = async |channel: &Channel| {
        let (balance, claimed) = channel.state(&world.chain).await;
        world.announce_withdrawal(channel, balance - claimed).await;
        // The seller looks at its channels again.
        world.clock.advance(301);
    };
    let until_it_says = async |reasons: &[NotReady]| {
        in_time("the readiness that is expected", async {
            while world.channels.readiness().await.reasons != reasons {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    };
    withdraw(&first).await;
    assert_eq!(world.channels.claim_all().await.expect("the devnet claims").claimed, 2 * COST);
    assert_eq!(world.channels.readiness().await.reasons, []);

    let answer = send(&app, pay(&app, &second, 2 * COST, None, "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    withdraw(&second).await;
    world.chain.devnet.faults().set(|call| match call.method {
        "eth_estimateGas" => x402_devnet::Fault::Error { code: -32000, message: "away".into() },
        _ => x402_devnet::Fault::None,
    });
    world.channels.claim_all().await.expect_err("the claim cannot be simulated");
    until_it_says(&[NotReady::ClaimsFail { units: COST }]).await;
    world.chain.devnet.faults().clear();
    assert_eq!(world.channels.claim_all().await.expect("the devnet claims").claimed, COST);
    until_it_says(&[]).await;
}

#[tokio::test]
async fn vouchers_of_other_keys_channels_sellers_and_chains_buy_nothing() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let stranger = PrivateKeySigner::random();
    let forged = Channel { voucher_key: stranger.clone(), ..channel.clone() };
    refused(&send(&app, pay(&app, &forged, 2 * COST, None, "a").await).await, "voucher_signature");
    for (code, config) in [
        ("receiver_mismatch", ChannelConfig { receiver: stranger.address(), ..channel.config }),
        ("receiver_authorizer_mismatch", ChannelConfig { receiver_authorizer: stranger.address(), ..channel.config }),
        ("token_mismatch", ChannelConfig { token: stranger.address(), ..channel.config }),
        ("withdraw_delay_mismatch", ChannelConfig { withdraw_delay: 901, ..channel.config }),
        ("channel_not_found", ChannelConfig { salt: B256::repeat_byte(9), ..channel.config }),
    ] {
        let other = Channel { config, ..channel.clone() };
        refused(&send(&app, pay(&app, &other, 2 * COST, None, "a").await).await, code);
    }
    // A voucher of one channel with the configuration of another, and one for another chain.
    let other = world.channel().await;
    let mixed = voucher(&other, 2 * COST).await;
    let elsewhere = Escrow::on(Network::BASE);
    let elsewhere =
        Voucher::sign(&elsewhere, channel.id(), 2 * COST, &channel.voucher_key).await.expect("a local key signs");
    for (voucher, code) in [(mixed, "channel_id_mismatch"), (elsewhere, "voucher_signature")] {
        let mut payment = by_voucher(&app, &channel, 2 * COST).await;
        payment["payload"]["voucher"] = json!(voucher);
        refused(&send(&app, paid(evaluate("a"), &payment)).await, code);
    }
    assert_eq!(world.shop.handled(), 1);
}

#[tokio::test]
async fn a_payload_that_no_seller_takes_is_refused() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let good = by_voucher(&app, &channel, 2 * COST).await["payload"].take();
    let mut upper = good.clone();
    upper["voucher"]["maxClaimableAmount"] = "02000".into();
    let mut high_s = good.clone();
    high_s["voucher"]["signature"] = format!("0x{}1b", "f".repeat(128)).into();
    let claim = json!({ "type": "claim", "claims": [] });
    let settle = json!({ "type": "settle", "receiver": channel.config.receiver, "token": channel.config.token });
    for payload in [upper, high_s, claim, settle, json!({ "type": "voucher" }), json!({})] {
        let payment = json!({ "x402Version": 2, "accepted": offer(&app, "a").await, "payload": payload });
        let answer = send(&app, paid(evaluate("a"), &payment)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{payload}: {answer:?}");
    }
    let mut cheap = offer(&app, "a").await;
    cheap["amount"] = "1".into();
    let payment = json!({ "x402Version": 2, "accepted": cheap, "payload": good });
    let answer = send(&app, paid(evaluate("a"), &payment)).await;
    assert_eq!(answer.reason(), "invalid_payment_requirements");
    assert_eq!(world.shop.handled(), 1);
}

#[tokio::test]
async fn a_seller_can_take_vouchers_only() {
    let world = World::open().await;
    let (both, only) = (world.app.clone(), world.shop.app(world.shop.layer().vouchers_only(world.channels.clone())));
    let schemes = |demand: &Value| -> Vec<String> {
        let offers = demand["accepts"].as_array().expect("offers");
        offers.iter().map(|offer| offer["scheme"].as_str().expect("a scheme").to_owned()).collect()
    };
    assert_eq!(schemes(&demand(&send(&both, evaluate("a")).await)), ["exact", "batch-settlement"]);
    assert_eq!(schemes(&demand(&send(&only, evaluate("a")).await)), ["batch-settlement"]);
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    let purchase = customer.pay(&both, evaluate("a")).await;
    assert_eq!(send(&only, purchase.on(evaluate("a"))).await.reason(), "unsupported_scheme");
    assert_eq!(send(&both, purchase.on(evaluate("a"))).await.status, StatusCode::OK, "it still pays where it is taken");
    let channel = world.filled(&only).await;
    assert_eq!(world.charged(&channel).await, COST);
}

#[tokio::test]
async fn a_seller_of_vouchers_only_needs_no_facilitator() {
    let world = World::open().await;
    let builder = || RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE_SEPOLIA, world.shop.pay_to);
    let app = world.shop.app(builder().vouchers_only(world.channels.clone()));
    let channel = world.filled(&app).await;
    assert_eq!(world.charged(&channel).await, COST);
    let customer = Customer::with_funds(&world.chain, PRICE).await;
    let purchase = customer.pay(&world.app, evaluate("a")).await;
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.reason(), "unsupported_scheme");
    let both = builder().vouchers(world.channels.clone()).build();
    assert!(matches!(both, Err(BuildError::NoFacilitator)));
}

#[tokio::test]
async fn a_seller_of_vouchers_only_is_told_of_settings_without_effect() {
    let world = World::open().await;
    let (pay_to, channels) = (world.shop.pay_to, || world.channels.clone());
    let builder = || RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE_SEPOLIA, pay_to);
    let refused = |layer: RequirePaymentLayerBuilder| layer.build().expect_err("a setting without effect");
    let elsewhere = builder().pay_to(Network::BASE, pay_to).vouchers_only(channels());
    assert_eq!(refused(elsewhere), BuildError::NoChannelsOn(Network::BASE));
    let nowhere = RequirePaymentLayer::builder().price("$0.001").pay_to(Network::BASE, pay_to);
    assert_eq!(refused(nowhere.vouchers_only(channels())), BuildError::NoChannelPayee(Network::BASE_SEPOLIA));
    let deferred = builder().deferred(DeferredPolicy::default()).vouchers_only(channels());
    assert_eq!(refused(deferred), BuildError::DeferredVouchers);
    builder().vouchers_only(channels()).build().expect("without both");
    // Beside `exact` both have an effect.
    let both = world.shop.layer().deferred(DeferredPolicy::default()).vouchers(channels());
    both.build().expect("exact is deferred");
}

/// A ledger may be shared with sellers on other chains, or with other keys.
#[tokio::test]
async fn channels_of_other_sellers_in_the_ledger_are_left_alone() {
    let world = World::open().await;
    let channel = world.filled(&world.app).await;
    // The same channel on another chain, where as much was charged.
    let id = Escrow::on(Network::BASE).channel_id(&channel.config);
    let mut observation = observation(1, DEPOSIT, 0, 1);
    observation.state.channel_id = id;
    let (network, config, now) = (Network::BASE, channel.config, unix_now());
    let voucher = Voucher { channel_id: id, ..voucher(&channel, COST).await };
    let request = B256::ZERO;
    for step in [
        ChannelStep::Open { network, config, observation, now },
        ChannelStep::Begin { request, name: None, voucher, price: COST, now, until: now + 60 },
        ChannelStep::Charge { epoch: 1, amount: COST, response: None, now },
    ] {
        world.ledger.advance(&id, &step).await.expect("memory");
    }
    let key = PrivateKeySigner::random();
    let contract = world.contract(|contract| contract).await;
    let other = channels_of(contract, &key, world.ledger.clone(), world.clock.clone()).build().unwrap();
    // By now both would look at channels before they claim.
    world.clock.advance(301);
    let before = world.ledger.channels(None, 10).await.expect("memory");
    assert_eq!(other.claim_all().await.expect("nothing to do"), ClaimReport::default());
    assert_eq!(world.ledger.channels(None, 10).await.expect("memory"), before);
    let report = world.channels.claim_all().await.expect("the devnet claims");
    assert_eq!((report.claimed, report.refused), (COST, vec![]));
    let elsewhere = world.ledger.channel(&id).await.expect("memory");
    assert_eq!(elsewhere, before.into_iter().find(|record| record.id == id));
}

#[tokio::test]
async fn a_deposit_below_the_price_of_a_request_is_not_executed() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let deposit = world.sign_deposit(&channel, COST - 1).await;
    refused(&send(&app, pay(&app, &channel, 2 * COST, Some(&deposit), "a").await).await, "deposit_below_min_deposit");
    // Nor one that comes with a voucher for the wrong amount.
    let new = world.channel().await;
    let deposit = world.sign_deposit(&new, DEPOSIT).await;
    for max in [COST - 1, COST + 1] {
        let answer = send(&app, pay(&app, &new, max, Some(&deposit), "a").await).await;
        refused(&answer, "cumulative_amount_mismatch");
    }
    assert_eq!(new.state(&world.chain).await, (0, 0));
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let answer = send(&app, pay(&app, &channel, 3 * COST, Some(&deposit), "a").await).await;
    refused(&answer, "cumulative_amount_mismatch");
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 0));
    let answer = send(&app, pay(&app, &channel, 2 * COST, Some(&deposit), "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(channel.state(&world.chain).await, (2 * DEPOSIT, 0));
}

#[tokio::test]
async fn a_deposit_of_exactly_the_price_is_enough_for_one_request() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, COST).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "one").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "one"), "{answer:?}");
    assert_eq!(channel.state(&world.chain).await, (COST, 0));
    // What somebody else deposits is found when it is needed.
    channel.deposit(&world.chain, &world.chain.relayer().await, COST).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, None, "two").await).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "two"), "{answer:?}");
}

/// Nor is a response lost. The first call fails without effect, or has its effect and its answer is lost.
#[tokio::test]
async fn a_ledger_that_fails_once_loses_no_charge_and_makes_none_twice() {
    let world = World::open().await;
    let books = faulty_channels(world.ledger.clone());
    let channels = world.process(books.clone()).await;
    let app = world.seller(channels);
    let channel = world.filled(&app).await;
    let mut charged = COST;
    for how in [How::Before, How::After] {
        let request = pay(&app, &channel, charged + COST, None, "work").await;
        books.around.arm(Some(Fault { call: "advance Charge", nth: 0, how }));
        let answer = send(&app, request).await;
        charged += COST;
        assert_eq!(
            (answer.status, told(&answer)),
            (StatusCode::OK, ("1000".into(), charged.to_string())),
            "{answer:?}"
        );
        assert!(books.around.has_failed());
        assert_eq!(world.charged(&channel).await, charged);
    }
    // Before the work it is not waited for.
    let request = pay(&app, &channel, charged + COST, None, "work").await;
    books.around.arm(Some(Fault { call: "advance Begin", nth: 0, how: How::Before }));
    let answer = send(&app, request).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (3, charged));
}

#[tokio::test]
async fn a_withdrawal_during_the_work_does_not_take_what_the_work_costs() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let slow = ask(&app, pay(&app, &channel, 2 * COST, None, "held").await);
    world.begun.notified().await;
    world.announce_withdrawal(&channel, DEPOSIT).await;
    world.go_on.notify_one();
    assert_eq!(slow.await.unwrap().status, StatusCode::OK);
    world.channels.claim_all().await.expect("the devnet claims");
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 2 * COST), "before the withdrawal can end");
    refused(&send(&app, pay(&app, &channel, 3 * COST, None, "a").await).await, "cumulative_exceeds_balance");
}
