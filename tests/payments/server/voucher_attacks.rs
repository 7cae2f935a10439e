//! Attacks on a seller that takes vouchers, by payers, strangers, nodes, reorganizations and crashes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::U256;
use axum::body::Body;
use http::{Response, StatusCode};
use serde_json::{Value, json};
use support::{
    authorization::unix_now,
    chain::Chain as _,
    escrow::Channel,
    eventually::in_time,
    rpc_proxy::{Fate, RpcProxy},
    shop::{ask, demand, evaluate, paid, send},
    world::{COST, DEPOSIT, World, by_voucher, offer, pay, payment, refund, refused, told},
};
use tower_x402::{
    Clock as _, Usdc,
    channels::{Channels, ChannelsBuildError},
    ledger::channels::ChannelLedger,
    server::{ActualPrice, BuildError},
};
use x402_devnet::Orphans;

/// Behind one URL there are two nodes: one that showed the books a later block, and one that has fallen behind it.
#[tokio::test]
async fn a_node_that_is_behind_the_books_sells_nothing() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let proxy = RpcProxy::start(world.chain.rpc_url()).await;
    let contract = world.contract(|contract| contract.rpc_url(proxy.url())).await;
    let behind = world.seller(world.channels_of(contract).build().unwrap());
    world.clock.advance(301);
    assert_eq!(send(&behind, pay(&app, &channel, 2 * COST, None, "a").await).await.status, StatusCode::OK);
    // The books learn of a later block, in which the channel still is as it was.
    world.chain.devnet.mine();
    world.clock.advance(301);
    assert_eq!(send(&app, pay(&app, &channel, 3 * COST, None, "b").await).await.status, StatusCode::OK);
    world.announce_withdrawal(&channel, DEPOSIT).await;
    world.clock.advance(301);
    proxy.judge(|_| Fate::Stale);
    let answer = send(&behind, pay(&app, &channel, 4 * COST, None, "c").await).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (3, 3 * COST));
    proxy.judge(|_| Fate::Pass);
    let answer = send(&behind, pay(&app, &channel, 4 * COST, None, "c").await).await;
    refused(&answer, "cumulative_exceeds_balance");
}

#[tokio::test]
async fn a_node_that_stands_still_sells_nothing() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let proxy = RpcProxy::start(world.chain.rpc_url()).await;
    let clock = world.clock.clone();
    let contract =
        world.contract(|contract| contract.rpc_url(proxy.url()).clock(clock).max_block_age(Duration::from_secs(310)));
    let still = world.seller(world.channels_of(contract.await).build().unwrap());
    world.clock.advance(301);
    assert_eq!(send(&still, pay(&app, &channel, 2 * COST, None, "a").await).await.status, StatusCode::OK);
    world.announce_withdrawal(&channel, DEPOSIT).await;
    // The node shows the same block for five minutes and more. It is not an earlier one than the books have.
    world.clock.advance(301);
    proxy.judge(|_| Fate::Stale);
    let answer = send(&still, pay(&app, &channel, 3 * COST, None, "b").await).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (2, 2 * COST));
}

#[tokio::test]
async fn a_claim_that_a_reorganization_removed_is_claimed_again() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let claimed = world.channels.claim_all().await.expect("the devnet claims");
    assert_eq!((claimed.claimed, claimed.transactions.len()), (COST, 2));
    // The claim and the transfer. Nobody uses the channel any more.
    world.chain.devnet.reorg(2, Orphans::Lost);
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 0));
    world.clock.advance(151);
    in_time("the channel is claimed again", async {
        while channel.state(&world.chain).await.1 < COST {
            let _ = world.channels.claim_all().await;
            world.chain.devnet.mine();
        }
    })
    .await;
    in_time("and transferred", async {
        while world.chain.balance(world.shop.pay_to).await < COST as u64 {
            let _ = world.channels.claim_all().await;
        }
    })
    .await;
    assert_eq!(channel.state(&world.chain).await, (DEPOSIT, COST));
}

#[tokio::test]
async fn a_deposit_that_a_reorganization_removed_costs_what_was_charged_until_the_seller_looks() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.channel().await;
    let deposit = channel.sign_deposit(&world.chain, DEPOSIT, unix_now() + 600).await;
    let first = send(&app, pay(&app, &channel, COST, Some(&deposit), "a").await).await;
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    world.chain.devnet.reorg(1, Orphans::Lost);
    // It is sent again, and in no block yet.
    world.chain.devnet.stall(true);
    assert_eq!(channel.state(&world.chain).await, (0, 0));
    let unnoticed = send(&app, pay(&app, &channel, 2 * COST, None, "b").await).await;
    assert_eq!(unnoticed.status, StatusCode::OK, "{unnoticed:?}");
    world.clock.advance(301);
    let answer = send(&app, pay(&app, &channel, 3 * COST, None, "c").await).await;
    refused(&answer, "cumulative_exceeds_balance");
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (2, 2 * COST));
    world.chain.devnet.stall(false);
    // The same deposit again pays for what was charged, too.
    let again = in_time("the deposit is made again", async {
        loop {
            let answer = send(&app, pay(&app, &channel, 3 * COST, Some(&deposit), "d").await).await;
            if answer.status != StatusCode::SERVICE_UNAVAILABLE {
                return answer;
            }
            world.chain.devnet.mine();
        }
    })
    .await;
    assert_eq!((again.status, told(&again)), (StatusCode::OK, ("1000".into(), "3000".into())), "{again:?}");
    assert_eq!(world.channels.claim_all().await.expect("the devnet claims").claimed, 3 * COST);
}

#[tokio::test]
async fn work_that_may_outlast_a_withdrawal_is_not_offered() {
    let world = World::open().await;
    let contract = world.contract(|contract| contract).await;
    let seller = |delay: u64| world.channels_of(contract.clone()).withdraw_delay(Duration::from_secs(delay)).build();
    for delay in [899, 2_592_001] {
        assert!(matches!(seller(delay), Err(ChannelsBuildError::WithdrawDelay(_))), "{delay}");
    }
    assert!(seller(2_592_000).is_ok());
    for delay in [900, 1_000] {
        let channels = seller(delay).expect("a delay that the contract allows");
        let layer = |deadline: u64| {
            let layer = world.shop.layer().vouchers(channels.clone());
            layer.handler_deadline(Duration::from_secs(deadline)).max_timeout(Duration::from_secs(2_000)).build()
        };
        // Looked at five minutes ago, and claimed four minutes before the withdrawal can end.
        assert!(layer(delay - 300 - 240 - 15).is_ok());
        let refused = layer(delay - 300 - 240 - 14).expect_err("the withdrawal may end first");
        assert!(matches!(refused, BuildError::WithdrawDelayTooShort { .. }), "{refused:?}");
        let offer = offer(&world.shop.app(world.shop.layer().vouchers(channels.clone())), "a").await;
        assert_eq!(offer["extra"]["withdrawDelay"], delay);
    }
}

#[tokio::test]
async fn a_channel_is_not_given_to_another_process_while_its_handler_may_run() {
    let world = World::open().await;
    let layer = |channels: &Channels| {
        let layer = world.shop.layer().vouchers(channels.clone()).clock(world.clock.clone());
        layer.max_wait(Duration::from_millis(300))
    };
    let app = world.obeying(layer(&world.channels));
    let other = world.process(world.ledger.clone()).await;
    let other = world.shop.app(layer(&other));
    let channel = world.filled(&app).await;
    let slow = ask(&app, pay(&app, &channel, 2 * COST, None, "held").await);
    world.begun.notified().await;
    let pending = world.record(&channel).await.pending.expect("it is worked on");
    assert_eq!(pending.until - world.clock.now(), 60 + 2 * 15 + 30, "nor for much longer, if its process is gone");
    // The handler may take a minute, its response is charged within the margin.
    for _ in 0..3 {
        world.clock.advance(25);
        let answer = send(&other, pay(&app, &channel, 2 * COST, None, "other").await).await;
        refused(&answer, "channel_busy");
    }
    world.go_on.notify_one();
    let slow = slow.await.unwrap();
    assert_eq!((slow.status, told(&slow)), (StatusCode::OK, ("1000".into(), "2000".into())), "{slow:?}");
    let next = send(&other, pay(&app, &channel, 3 * COST, None, "other").await).await;
    assert_eq!((next.status, world.shop.handled()), (StatusCode::OK, 3), "{next:?}");
}

/// Its process stood still for so long that another one has sold on the channel.
#[tokio::test]
async fn work_that_lost_its_channel_is_not_given_away() {
    let world = World::open().await;
    let layer = |channels: &Channels| world.shop.layer().vouchers(channels.clone()).clock(world.clock.clone());
    let app = world.obeying(layer(&world.channels));
    let other = world.process(world.ledger.clone()).await;
    let other = world.shop.app(layer(&other));
    let channel = world.filled(&app).await;
    let slow = ask(&app, pay(&app, &channel, 2 * COST, None, "held").await);
    world.begun.notified().await;
    world.clock.advance(121);
    let sold = send(&other, pay(&app, &channel, 2 * COST, None, "other").await).await;
    assert_eq!((sold.status, told(&sold)), (StatusCode::OK, ("1000".into(), "2000".into())), "{sold:?}");
    world.go_on.notify_one();
    refused(&slow.await.unwrap(), "channel_busy");
    assert_eq!(world.charged(&channel).await, 2 * COST);
}

#[tokio::test]
async fn a_filling_request_cannot_be_charged_more_than_its_price() {
    let world = World::open().await;
    let dear = Arc::new(AtomicU64::new(1));
    let app = {
        let dear = dear.clone();
        world.shop.app_with(world.layer(), move |_, body| {
            let amount = 1_000 + dear.swap(0, Ordering::SeqCst);
            async move {
                let mut response = Response::new(Body::from(body));
                response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(amount)));
                Ok(response)
            }
        })
    };
    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "a").await).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{answer:?}");
    assert_eq!(told(&answer), ("0".into(), "0".into()));
    let answer = send(&app, pay(&app, &channel, COST, None, "a").await).await;
    assert_eq!((answer.status, told(&answer)), (StatusCode::OK, ("1000".into(), "1000".into())));
}

/// Each deposit costs the seller a transaction, whatever it is for.
#[tokio::test]
async fn small_deposits_are_not_executed_if_the_seller_requires_a_larger_one() {
    let world = World::open().await;
    let contract = world.contract(|contract| contract).await;
    let channels = world.channels_of(contract).min_deposit("$0.005").require_min_deposit();
    let app = world.seller(channels.build().expect("complete settings"));
    let channel = world.channel().await;
    for units in [COST, 4_999] {
        let deposit = world.sign_deposit(&channel, units).await;
        let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "a").await).await;
        refused(&answer, "deposit_below_min_deposit");
    }
    assert_eq!((world.shop.handled(), channel.state(&world.chain).await), (0, (0, 0)));
    let deposit = world.sign_deposit(&channel, 5_000).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&deposit), "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
}

#[tokio::test]
async fn a_deposit_for_another_channel_or_by_another_payer_moves_nothing() {
    let world = World::open().await;
    let app = world.app.clone();
    let (channel, victim) = (world.channel().await, world.channel().await);
    let theirs = world.sign_deposit(&victim, DEPOSIT).await;
    let answer = send(&app, pay(&app, &channel, COST, Some(&theirs), "a").await).await;
    refused(&answer, "receive_authorization_signature");
    // A channel of the victim's money whose vouchers a stranger signs: the nonce of the deposit names the other channel.
    let mut stolen = Channel { voucher_key: channel.voucher_key.clone(), ..victim.clone() };
    stolen.config.payer_authorizer = channel.voucher_key.address();
    let answer = send(&app, pay(&app, &stolen, COST, Some(&theirs), "a").await).await;
    refused(&answer, "receive_authorization_signature");
    assert_eq!(world.shop.handled(), 0);
    let answer = send(&app, pay(&app, &victim, COST, Some(&theirs), "a").await).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
}

#[tokio::test]
async fn vouchers_that_the_contract_would_not_take_buy_nothing() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let good = by_voucher(&app, &channel, 2 * COST).await["payload"].take();
    let signature = good["voucher"]["signature"].as_str().expect("text");
    let bytes = alloy_primitives::hex::decode(signature).expect("hex");
    let with = |bytes: &[u8]| {
        let mut payload = good.clone();
        payload["voucher"]["signature"] = alloy_primitives::hex::encode_prefixed(bytes).into();
        payload
    };
    // The other signature over the same digest by the same key: s above half the order.
    let order =
        "115792089237316195423570985008687907852837564279074904382605163141518161494337".parse::<U256>().unwrap();
    let s = order - U256::from_be_slice(&bytes[32..64]);
    let high_s = [&bytes[..32], &s.to_be_bytes::<32>(), &[27 + (28 - bytes[64])]].concat();
    let y_parity = [&bytes[..64], &[bytes[64] - 27]].concat();
    let compact = &bytes[..64];
    for (what, payload) in [("high s", with(&high_s)), ("v of 0 or 1", with(&y_parity)), ("64 bytes", with(compact))] {
        let payment = json!({ "x402Version": 2, "accepted": offer(&app, "a").await, "payload": payload });
        let answer = send(&app, paid(evaluate("a"), &payment)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{what}: {answer:?}");
    }
    for amount in ["02000", "+2000", "2000.0", " 2000", "2e3", "-1", "340282366920938463463374607431768211456"] {
        let mut payload = good.clone();
        payload["voucher"]["maxClaimableAmount"] = amount.into();
        let payment = json!({ "x402Version": 2, "accepted": offer(&app, "a").await, "payload": payload });
        let answer = send(&app, paid(evaluate("a"), &payment)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{amount}: {answer:?}");
    }
    assert_eq!(world.charged(&channel).await, COST);
    // An id in another case is the same channel, not a second one.
    let mut upper = good;
    let id = channel.id().to_string();
    upper["voucher"]["channelId"] = format!("0x{}", id[2..].to_uppercase()).into();
    let payment = json!({ "x402Version": 2, "accepted": offer(&app, "a").await, "payload": upper });
    let answer = send(&app, paid(evaluate("a"), &payment)).await;
    assert_eq!((answer.status, told(&answer)), (StatusCode::OK, ("1000".into(), "2000".into())), "{answer:?}");
    assert_eq!(world.ledger.channels(None, 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn nothing_is_served_for_one_unit_after_a_refund_and_a_new_deposit() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    assert_eq!(refund(&app, &channel, COST, None).await.status, StatusCode::OK);
    assert_eq!(channel.state(&world.chain).await, (COST, COST));
    for max in [1, COST, COST + 1] {
        let deposit = world.sign_deposit(&channel, DEPOSIT).await;
        let answer = send(&app, pay(&app, &channel, max, Some(&deposit), "a").await).await;
        refused(&answer, "cumulative_amount_mismatch");
    }
    assert_eq!(channel.state(&world.chain).await, (COST, COST), "none of the deposits was made");
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, Some(&deposit), "a").await).await;
    assert_eq!((answer.status, told(&answer)), (StatusCode::OK, ("1000".into(), "2000".into())), "{answer:?}");
    assert_eq!(world.shop.handled(), 2);
}

/// Whoever reads the newest voucher in the transaction that claimed it.
#[tokio::test]
async fn a_voucher_that_was_claimed_buys_a_stranger_nothing() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    world.channels.claim_all().await.expect("the devnet claims");
    for body in ["another", "first, but not quite"] {
        refused(&send(&app, pay(&app, &channel, COST, None, body).await).await, "cumulative_amount_mismatch");
    }
    let forward = http::Request::get("/evaluate").body(Body::empty()).unwrap();
    let by = payment("voucher", &offer(&app, "first").await, &channel, COST).await;
    let answer = send(&app, paid(forward, &by)).await;
    refused(&answer, "cumulative_amount_mismatch");
    assert_eq!((world.shop.handled(), world.charged(&channel).await), (1, COST));
    // It is told the sums, and the voucher that it has.
    let demand = demand(&answer);
    let is_ours = |offer: &&Value| offer["scheme"] == "batch-settlement";
    let extra = &demand["accepts"].as_array().unwrap().iter().find(is_ours).unwrap()["extra"];
    assert_eq!(extra["voucherState"]["signedMaxClaimable"], "1000");
}

/// A corrective 402 must not give away a voucher that is on no chain: the next stranger could pay with the rest of it.
#[tokio::test]
async fn stranger_with_a_claimed_voucher_is_not_shown_a_later_one() {
    let world = World::open().await;
    let app = world.app.clone();
    let channel = world.filled(&app).await;
    let metered = send(&app, pay(&app, &channel, 2 * COST, None, "costs 300").await).await;
    assert_eq!(told(&metered), ("300".into(), "1300".into()), "{metered:?}");
    world.channels.claim_all().await.expect("the devnet claims");
    let bought = send(&app, pay(&app, &channel, 1_300 + COST, None, "costs 400").await).await;
    assert_eq!(told(&bought), ("400".into(), "1700".into()), "{bought:?}");
    let extra = async |kind: &str, max: u128| {
        let payment = payment(kind, &offer(&app, "a").await, &channel, max).await;
        let answer = send(&app, paid(evaluate("a"), &payment)).await;
        refused(&answer, "cumulative_amount_mismatch");
        demand(&answer)["accepts"][1]["extra"].clone()
    };
    // What the claim shows: a voucher for 2000, by which 1300 were charged.
    for (kind, max) in [("voucher", COST), ("voucher", 2 * COST), ("refund", COST), ("refund", 2 * COST)] {
        let extra = extra(kind, max).await;
        assert_eq!(extra["channelState"]["chargedCumulativeAmount"], "1700", "{kind} {max}");
        assert_eq!(extra.get("voucherState"), None, "{kind} {max}: {extra}");
    }
    // A deposit that the payer did not sign shows nothing.
    let theirs = world.sign_deposit(&world.channel().await, DEPOSIT).await;
    let answer = send(&app, pay(&app, &channel, 2 * COST, Some(&theirs), "a").await).await;
    refused(&answer, "cumulative_amount_mismatch");
    assert_eq!(demand(&answer)["accepts"][1]["extra"].get("voucherState"), None, "{answer:?}");
    // The payer has the newest one, or signs one that is in no claim.
    for (kind, max) in [("voucher", 2_300), ("voucher", 3_300), ("refund", 2_300)] {
        assert_eq!(extra(kind, max).await["voucherState"]["signedMaxClaimable"], "2300", "{kind} {max}");
    }
    world.channels.claim_all().await.expect("the devnet claims");
    assert_eq!(extra("voucher", COST).await["voucherState"]["signedMaxClaimable"], "2300", "everybody has it");
    assert_eq!(world.shop.handled(), 3);
}

#[cfg(feature = "test-postgres")]
mod postgres {
    use futures_util::future::join_all;
    use support::postgres::Server;
    use tower_x402::ledger::PostgresLedger;

    use super::*;

    async fn ledger(server: &Server, schema: &str) -> Arc<PostgresLedger> {
        let ledger = PostgresLedger::builder(server.url()).schema(schema).max_connections(4).connect().await;
        Arc::new(ledger.expect("the database is there"))
    }

    async fn charged(ledger: &PostgresLedger, channel: &Channel) -> u128 {
        ledger.channel(&channel.id()).await.expect("the database answers").expect("a known channel").charged()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn two_processes_on_one_channel_charge_each_request_once() {
        let (world, server) = (World::open().await, Server::shared());
        let schema = server.new_schema();
        let ledgers = [ledger(server, &schema).await, ledger(server, &schema).await];
        let [one, other] = [world.process(ledgers[0].clone()).await, world.process(ledgers[1].clone()).await];
        let app = world.obeying(world.shop.layer().vouchers(one.clone()));
        let apps = [app.clone(), world.shop.app(world.shop.layer().vouchers(other.clone()))];
        let channel = world.filled(&app).await;

        // Copies of a request at both.
        let copies = (0..8).map(|copy| {
            let (app, channel) = (apps[copy % 2].clone(), channel.clone());
            tokio::spawn(async move { send(&app, pay(&app, &channel, 2 * COST, None, "copy").await).await })
        });
        for answer in join_all(copies).await {
            let answer = answer.unwrap();
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "copy"), "{answer:?}");
            assert_eq!(told(&answer), ("1000".into(), "2000".into()));
        }
        assert_eq!(world.shop.handled(), 2);

        // The next request comes to the other process while the first works.
        let slow = ask(&app, pay(&app, &channel, 3 * COST, None, "held").await);
        world.begun.notified().await;
        let rivals = [(4 * COST, "next"), (3 * COST, "rival")].map(|(max, body)| {
            let (app, channel) = (apps[1].clone(), channel.clone());
            tokio::spawn(async move { send(&app, pay(&app, &channel, max, None, body).await).await })
        });
        tokio::time::sleep(Duration::from_millis(250)).await;
        assert!(rivals.iter().all(|rival| !rival.is_finished()) && world.shop.handled() == 3);
        world.go_on.notify_one();
        assert_eq!(told(&slow.await.unwrap()), ("1000".into(), "3000".into()));
        let [next, rival] = rivals;
        assert_eq!(told(&next.await.unwrap()), ("1000".into(), "4000".into()));
        refused(&rival.await.unwrap(), "cumulative_amount_mismatch");
        for ledger in &ledgers {
            assert_eq!(charged(ledger, &channel).await, 4 * COST);
        }

        // Both claim.
        let (one, other) = tokio::join!(one.claim_all(), other.claim_all());
        let claimed = [one, other].map(|report| report.expect("the devnet claims").claimed);
        assert_eq!(claimed.iter().sum::<u128>(), 4 * COST, "{claimed:?}");
        assert_eq!(channel.state(&world.chain).await, (DEPOSIT, 4 * COST));
        assert_eq!(u128::from(world.chain.balance(world.shop.pay_to).await), 4 * COST);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_database_that_fails_during_the_work_loses_no_charge_and_makes_none_twice() {
        let (world, server) = (World::open().await, Server::start());
        let ledger = ledger(&server, "channels").await;
        let channels = world.process(ledger.clone()).await;
        let layer = world.shop.layer().vouchers(channels).clock(world.clock.clone());
        let app = world.obeying(layer);
        let channel = world.filled(&app).await;
        let slow = |max: u128| {
            let (app, channel) = (app.clone(), channel.clone());
            tokio::spawn(async move { send(&app, pay(&app, &channel, max, None, "held").await).await })
        };

        // It is back before the seller gives up.
        let answer = slow(2 * COST);
        world.begun.notified().await;
        tokio::task::block_in_place(|| server.kill());
        world.go_on.notify_one();
        tokio::task::block_in_place(|| server.start_again());
        let answer = answer.await.unwrap();
        let mut total = COST;
        match answer.status {
            StatusCode::OK => {
                total += COST;
                assert_eq!(told(&answer), ("1000".into(), "2000".into()), "{answer:?}");
            }
            status => assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}"),
        }
        assert_eq!(charged(&ledger, &channel).await, total);

        // It is away for longer: the work is given to nobody, and whether it was charged is told when it is back.
        world.clock.advance(200);
        let before = world.shop.handled();
        let answer = slow(total + COST);
        world.begun.notified().await;
        tokio::task::block_in_place(|| server.kill());
        world.go_on.notify_one();
        let answer = in_time("it gives up", answer).await.unwrap();
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
        let receipt = answer.settlement().expect("a receipt");
        assert_eq!((&receipt["success"], &receipt["errorReason"]), (&json!(false), &json!("settlement_pending")));
        tokio::task::block_in_place(|| server.start_again());
        assert_eq!(charged(&ledger, &channel).await, total);
        // The lease of that request ends by itself.
        world.clock.advance(200);
        let again = slow(total + COST);
        world.begun.notified().await;
        world.go_on.notify_one();
        let again = again.await.unwrap();
        assert_eq!(told(&again), ("1000".into(), (total + COST).to_string()), "{again:?}");
        assert_eq!((charged(&ledger, &channel).await, world.shop.handled()), (total + COST, before + 2));
    }
}
