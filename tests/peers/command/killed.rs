//! `x402 charge` is killed at random moments, and started again, while the official clients pay through it: one process with SQLite, and
//! three with PostgreSQL behind a load balancer, as the files in `crates/x402-cli/deploy` start them.
//!
//! A few purchases run with the other tests; ten times as many with
//! `cargo nextest run -p tower-x402-tests --features test-peers --test peers killed --run-ignored all`.

use std::{collections::BTreeSet, time::Duration};

use alloy_signer_local::PrivateKeySigner;
use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus};
use serde_json::{Value, json};
use support::postgres::Server;
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    super::{
        nginx::Nginx,
        programs::{PYTHON, script},
        stage::{PATIENCE, PRICE},
    },
    Serving, Stage,
};

/// The programs that buy, and which client of them.
const CLIENTS: [(&[&str], [&str; 2]); 3] =
    [(&[], ["node", "stubborn.mjs"]), (&["httpx"], [PYTHON, "stubborn.py"]), (&["requests"], [PYTHON, "stubborn.py"])];
/// What each client has, in atomic units.
const FUNDS: u64 = 10_000_000;
/// The pauses between two kills, in milliseconds. A payment is settled in a block, of which there are five a second.
const PAUSES: std::ops::Range<u64> = 100..1_200;

#[tokio::test]
async fn killed_at_random_a_seller_loses_and_doubles_nothing() {
    let kills = killed_while_clients_buy(1, 20).await;
    assert!(kills >= 3, "{kills} kills");
}

#[tokio::test]
async fn killed_at_random_three_sellers_behind_a_load_balancer_lose_and_double_nothing() {
    let kills = killed_while_clients_buy(3, 20).await;
    assert!(kills >= 3, "{kills} kills");
}

#[tokio::test]
#[ignore = "two minutes"]
async fn killed_at_random_a_seller_loses_and_doubles_nothing_in_full() {
    let kills = killed_while_clients_buy(1, 200).await;
    assert!(kills >= 30, "{kills} kills");
}

/// Has each client buy so often while one of the sellers after the other is killed. Returns the number of kills.
async fn killed_while_clients_buy(processes: usize, purchases: usize) -> usize {
    let accounts = CLIENTS.map(|_| PrivateKeySigner::random());
    let gifts = accounts.each_ref().map(|account| format!("--fund={}=${}", account.address(), FUNDS / 1_000_000));
    let mut arguments = vec!["--block-time-ms", "200"];
    arguments.extend(gifts.iter().map(String::as_str));
    let stage = Stage::new(&arguments).await;
    let database = (processes > 1).then(Server::start);
    let ledger = database.as_ref().map_or_else(|| stage.ledger(), |database| database.url().to_owned());
    let start = async |address: &str| Serving::start(stage.charge_with(&ledger, address).arg("--behind-proxy")).await;
    let mut sellers = Vec::new();
    for _ in 0..processes {
        let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
        sellers.push((start(&address).await, address));
    }
    let addresses: Vec<_> = sellers.iter().map(|(_, address)| address.clone()).collect();
    let balancer = if processes > 1 { Some(Nginx::balancing(&addresses).await) } else { None };
    let url = balancer.as_ref().map_or_else(|| format!("http://{}", addresses[0]), |balancer| balancer.url.clone());

    let mut clients = JoinSet::new();
    for ((kind, program), account) in CLIENTS.into_iter().zip(&accounts) {
        let mut client = script(program);
        client.args(kind).args([format!("{url}/evaluate"), purchases.to_string()]);
        client.env("PRIVATE_KEY", account.to_bytes().to_string());
        let patience = PATIENCE * u32::try_from(purchases.div_ceil(20)).unwrap();
        clients.spawn(async move { timeout(patience, client.output()).await.expect("the client ends").unwrap() });
    }
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).unwrap();
    println!("seed {seed:?}");
    let mut random = Xoshiro256PlusPlus::seed_from_u64(u64::from_le_bytes(seed));
    let (mut answers, mut kills) = (Vec::new(), 0);
    while !clients.is_empty() {
        tokio::select! {
            Some(ended) = clients.join_next() => {
                let output = ended.unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                answers.extend(serde_json::from_slice::<Vec<Value>>(&output.stdout).unwrap());
            }
            () = sleep(Duration::from_millis(random.random_range(PAUSES))) => {
                let (seller, address) = sellers.swap_remove(random.random_range(0..processes));
                seller.kill().await;
                kills += 1;
                sellers.push((start(&address).await, address));
            }
        }
    }
    for (seller, _) in sellers {
        seller.stop().await;
    }

    // Every purchase got the answer to its own request.
    assert_eq!(answers.len(), CLIENTS.len() * purchases);
    for answer in &answers {
        assert_eq!((&answer["status"], &answer["payment"]["success"]), (&json!(200), &json!(true)), "{answer}");
        let body: Value = serde_json::from_str(answer["body"].as_str().unwrap()).unwrap();
        assert_eq!(body, json!({ "score": answer["score"] }), "{answer}");
    }
    // Money: the books, the chain, and what each client spent.
    stage.has_sold_by(&ledger, answers.len() as u64).await;
    for account in &accounts {
        let left = stage.balance_of(&account.address().to_string()).await;
        assert_eq!(left, FUNDS - purchases as u64 * PRICE, "{}", account.address());
    }
    let transactions: BTreeSet<&str> =
        answers.iter().filter_map(|answer| answer["payment"]["transaction"].as_str()).collect();
    println!("{} answers in {} transactions, {kills} kills", answers.len(), transactions.len());
    kills
}
