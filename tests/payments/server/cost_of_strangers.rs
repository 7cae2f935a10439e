//! What one request of a stranger costs a seller: requests to its node, and gas of its key. These are rows of *What strangers can make us
//! pay* in SECURITY.md.

use std::{ops::RangeInclusive, time::Duration};

use alloy_primitives::{Address, U256};
use alloy_sol_types::SolCall as _;
use axum::body::Body;
use http::Request;
use serde_json::Value;
use support::{
    authorization::random_address,
    chain::Chain as _,
    changed,
    devnet::DevnetChain,
    engine_stage::Wallet,
    permit::{ExactPermit, approve},
    scripted::customer,
    shop::{Customer, PRICE, Purchase, Shop, demand, evaluate, paid, send},
    world::{COST, DEPOSIT, World, offer, pay, payment},
};

use super::admission::worthless;

const NO_GAS: RangeInclusive<u64> = 0..=0;

/// What is sent, its status, how many requests to the node it takes, if that is always the same, and how much gas.
type Row = (&'static str, Request<Body>, u16, Option<u64>, RangeInclusive<u64>);

/// A seller that takes each scheme with one key, and does nothing by itself while it is measured.
async fn open() -> World {
    let chain = DevnetChain::start(None).await;
    let quiet = Duration::from_secs(3_600);
    let shop = Shop::open_with(&chain, |shop| shop.rpc_url(chain.rpc_url()).reconcile_interval(quiet)).await;
    let mut world = World::builder().chain(chain).shop(shop).one_key().funds(100 * PRICE).open().await;
    world.app = world.obeying(world.layer().permits());
    world
}

/// Has the code of this account burn so much gas when it checks a signature.
fn burn(world: &World, account: Address, gas: u64) {
    let call = Wallet::setGasBurnCall { amount: U256::from(gas) };
    world.chain.devnet.execute(Address::repeat_byte(9), account, call.abi_encode()).unwrap();
}

#[tokio::test]
async fn each_request_costs_a_seller_what_the_table_says() {
    let world = open().await;
    let (app, payer) = (&world.app, world.customer());
    let asked = demand(&send(app, evaluate("a")).await);
    let by = |payment: &Value| paid(evaluate("a"), payment);
    // A wallet takes any bytes after the signature.
    let exact = |payer: &Customer, more: usize| {
        let long =
            |purchase: &mut Purchase| purchase.signature = [&purchase.signature[..], &vec![1; more]].concat().into();
        by(&changed(payer.sign(&asked, 0), long).payload())
    };
    let unreadable = changed(evaluate("a"), |request| {
        request.headers_mut().insert("payment-signature", "?".parse().unwrap());
    });
    let to_another = changed(payer.sign(&asked, 0), |purchase| {
        purchase.authorization.to = random_address();
        purchase.resign();
    });
    let to_another = by(&to_another.payload());
    let good = payer.sign(&asked, 0).payload();
    let poor = customer().sign(&asked, 0).payload();
    // Signs in the name of others.
    let forger = customer();
    let forged = Customer { from: payer.from, ..forger.clone() };
    let nobody = Customer { from: random_address(), ..forger.clone() };

    // Their checks of signatures take any amount of gas.
    let owner = customer();
    let wallet = world.chain.deploy_wallet(owner.from).await;
    world.chain.mint(wallet, 100 * PRICE).await;
    burn(&world, wallet, 260_000);
    approve(&world.chain.devnet, wallet, U256::MAX >> 1);
    let wallet = Customer { from: wallet, ..owner.clone() };
    let delegated = world.channel().await;
    world.chain.delegate(delegated.config.payer, wallet.from).await;
    burn(&world, delegated.config.payer, 200_000);

    let unapproved = customer();
    world.chain.mint(unapproved.from, PRICE).await;
    let forged_permit = Customer { from: unapproved.from, ..forger.clone() };
    let penniless = customer();
    approve(&world.chain.devnet, penniless.from, U256::MAX >> 1);

    let channel = world.channel().await;
    let deposit = world.sign_deposit(&channel, DEPOSIT).await;
    let refund_of = async |amount: Option<&str>| {
        let mut refund = payment("refund", &offer(app, "a").await, &channel, 2 * COST).await;
        if let Some(amount) = amount {
            refund["payload"]["amount"] = amount.into();
        }
        by(&refund)
    };
    let unsigned = support::escrow::Channel { payer: payer.signer.clone(), ..world.channel().await };
    let unsigned_deposit = world.sign_deposit(&unsigned, DEPOSIT).await;
    let of_wallet = world.sign_deposit(&delegated, DEPOSIT).await;

    let by_permit =
        |payer: &Customer| by(&ExactPermit { from: payer.from, ..ExactPermit::sign(&payer.signer, &asked) }.payload());
    // What a process asks once, it has asked.
    world.filled(app).await;

    let rows: Vec<Row> = vec![
        ("no payment", evaluate("a"), 402, Some(0), NO_GAS),
        ("unreadable", unreadable, 400, Some(0), NO_GAS),
        ("to another payee", to_another, 402, Some(0), NO_GAS),
        ("signature of no key", exact(&forged, 0), 402, Some(1), NO_GAS),
        ("signature of no key in the name of nobody", exact(&nobody, 0), 402, Some(3), NO_GAS),
        ("exact without money", by(&poor), 402, Some(3), NO_GAS),
        ("a copy of it", by(&poor), 402, Some(3), NO_GAS),
        ("permit without approval", by_permit(&unapproved), 412, Some(3), NO_GAS),
        ("permit with a signature of no key", by_permit(&forged_permit), 402, Some(3), NO_GAS),
        ("permit without money", by_permit(&penniless), 402, Some(5), NO_GAS),
        ("voucher for no channel", by(&worthless(&world, app, 0).await), 402, Some(1), NO_GAS),
        ("refund of no channel", by(&worthless(&world, app, 1).await), 402, Some(1), NO_GAS),
        ("empty deposit", by(&worthless(&world, app, 2).await), 402, Some(6), NO_GAS),
        ("unsigned deposit", pay(app, &unsigned, COST, Some(&unsigned_deposit), "a").await, 402, Some(8), NO_GAS),
        // The payee has none of the token yet.
        ("exact, the first", by(&good), 200, None, 80_000..=103_000),
        ("exact", exact(&payer, 0), 200, None, 70_000..=86_000),
        ("exact again", by(&good), 200, Some(0), NO_GAS),
        ("exact of a wallet", exact(&wallet, 0), 200, None, 300_000..=430_000),
        ("exact of a wallet, with a long signature", exact(&wallet, 5_000), 200, None, 400_001..=520_000),
        ("permit", by_permit(&payer), 200, None, 80_000..=103_000),
        ("permit of a wallet", by_permit(&wallet), 200, None, 300_000..=430_000),
        ("deposit", pay(app, &channel, COST, Some(&deposit), "a").await, 200, None, 120_000..=160_000),
        ("deposit of a wallet", pay(app, &delegated, COST, Some(&of_wallet), "a").await, 200, None, 300_000..=400_000),
        ("voucher", pay(app, &channel, 2 * COST, None, "b").await, 200, Some(0), NO_GAS),
        ("refund of a part", refund_of(Some("6000")).await, 200, None, 80_000..=300_000),
        ("a copy of it", refund_of(Some("6000")).await, 200, Some(1), NO_GAS),
        ("refund of all", refund_of(None).await, 200, None, 60_000..=300_000),
    ];
    let mut wrong = Vec::new();
    for (what, request, status, requests, gas) in rows {
        let before = world.shop.facilitator.stats().gas_used;
        world.chain.devnet.faults().reset();
        let answer = send(app, request).await;
        let calls = world.chain.devnet.faults().calls();
        let (asked, used) = (calls.values().sum::<u64>(), world.shop.facilitator.stats().gas_used - before);
        let row = format!("{what}: {asked} requests, {used} gas, {calls:?}");
        println!("{row}");
        let is_exact = requests.is_none_or(|requests| requests == asked);
        if answer.status != status || !is_exact || !gas.contains(&used) {
            wrong.push(format!("{row}, {answer:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
