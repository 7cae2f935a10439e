//! Nodes that fail, are slow, or lie.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use alloy_primitives::B256;
use axum::{Router, body::Bytes, routing::post};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_x402::Network;
use x402_devnet::Orphans;
use x402_directory::{PaymentCheckError, PaymentChecker, Publication};

use super::stage::{PRICE, Paid, Stage, checker, moved, sign_report, used};
use support::{
    authorization::{authorization, random_address, random_nonce, unix_now},
    chain::Chain,
    devnet::DevnetChain,
    eventually::eventually,
    rpc_proxy::{Fate, RpcProxy},
};

#[tokio::test]
async fn failing_or_slow_node_loses_no_report() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let asked = || PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(proxy.url()).unwrap().depth(0);
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(asked())).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let report = stage.pay(&payer, booth.payee.address(), PRICE).await.report(booth.payee.address(), &payer).await;
    let is_unavailable = async |stage: &Stage, fate| {
        proxy.judge(move |_| fate);
        assert_eq!(stage.post(&report).await, (503, "unavailable".into()), "{fate:?}");
        assert!(matches!(stage.client().publish_signed(&report).await.unwrap(), Publication::Busy { .. }));
    };
    for fate in [Fate::DropBefore, Fate::Status(500), Fate::Error(-32000)] {
        is_unavailable(&stage, fate).await;
    }
    // Another directory, which waits for its node no longer than this node takes.
    let impatient = asked().timeout(Duration::from_millis(100));
    let other = Stage::set_with(&chain, |directory| directory.payment_checker(impatient)).await;
    other.client().list(&booth.url).await.unwrap();
    is_unavailable(&other, Fate::Hold).await;
    // In the middle of a check, too.
    proxy.judge(|methods| match methods[0].as_str() {
        "eth_getTransactionReceipt" => Fate::DropAfter,
        _ => Fate::Pass,
    });
    assert_eq!(stage.post(&report).await, (503, "unavailable".into()));
    proxy.judge(|_| Fate::Pass);
    assert_eq!(stage.post(&report).await.0, 201);
}

#[tokio::test]
async fn hanging_node_blocks_nobody_and_gets_few_requests() {
    let chain = DevnetChain::start(None).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let asked = PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(proxy.url()).unwrap().depth(0).max_concurrent(1);
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(asked)).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let paid = stage.pay(&payer, booth.payee.address(), PRICE).await;
    let report = paid.report(booth.payee.address(), &payer).await;
    assert_eq!(stage.post(&report).await.0, 201);
    assert!(proxy.reset().calls <= 4, "the chain's number once, the head, the receipt, the block");
    stage.post(&report).await;
    let mut garbage = report.clone();
    garbage.evidence.at += 1;
    stage.post(&garbage).await;
    assert_eq!(proxy.reset().calls, 0, "what is known or not signed costs none");

    let next = stage.pay(&payer, booth.payee.address(), PRICE).await.report(booth.payee.address(), &payer).await;
    let other = stage.pay(&payer, booth.payee.address(), PRICE).await.report(booth.payee.address(), &payer).await;
    proxy.judge(|_| Fate::Hold);
    let behind = async {
        eventually("the node is asked about the first one", async || proxy.counts().requests > 0).await;
        let answer = stage.post(&other).await;
        proxy.release();
        answer
    };
    let (first, second) = tokio::join!(stage.post(&next), behind);
    assert_eq!((first.0, second.0), (201, 503), "{first:?} {second:?}");
    assert_eq!(stage.post(&other).await.0, 201);
}

#[tokio::test]
async fn node_of_another_chain_is_refused() {
    let chain = DevnetChain::start(None).await;
    let other = x402_devnet::Devnet::builder().chain_id(8453).start().await.unwrap();
    let port = other.serve("127.0.0.1:0").await.unwrap();
    let wrong = PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(port.url()).unwrap().depth(0);
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(wrong)).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let report = stage.pay(&payer, booth.payee.address(), PRICE).await.report(booth.payee.address(), &payer).await;
    assert_eq!(stage.post(&report).await, (503, "unavailable".into()));
}

/// A node that shows a payment that never took place.
#[tokio::test]
async fn lying_node_beside_an_honest_one_gets_no_report_accepted() {
    let chain = DevnetChain::start(None).await;
    let setup = Stage::set(&chain).await;
    let (booth, payer) = (super::stage::Booth::open(&["prose"]).await, setup.payer().await);
    let evaluator = booth.payee.address();
    let message = authorization(payer.address(), evaluator, PRICE);
    let transaction = random_nonce();
    let invented = Paid { message: message.clone(), transaction, at: unix_now() };
    let swaps = Arc::new(AtomicBool::new(false));
    let liar = liar(
        &chain,
        transaction,
        [used(payer.address(), message.nonce), moved(payer.address(), evaluator, PRICE)],
        swaps.clone(),
    )
    .await;
    let report = invented.report(evaluator, &payer).await;

    // Who asks it alone believes it.
    let alone = PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(&liar).unwrap().depth(0);
    assert_eq!(alone.check(&report).await.unwrap().transaction, transaction);
    // A receipt of another transaction than was asked for is noticed even then.
    swaps.store(true, Ordering::Relaxed);
    assert!(matches!(alone.check(&report).await, Err(PaymentCheckError::Unavailable(_))));
    swaps.store(false, Ordering::Relaxed);

    for honest_first in [true, false] {
        let both = match honest_first {
            true => checker(&chain).rpc_url(&liar).unwrap(),
            false => PaymentChecker::new(Network::BASE_SEPOLIA)
                .rpc_url(&liar)
                .unwrap()
                .depth(0)
                .rpc_url(chain.rpc_url())
                .unwrap(),
        };
        let stage = Stage::set_with(&chain, |directory| directory.payment_checker(both)).await;
        stage.client().list(&booth.url).await.unwrap();
        assert_eq!(stage.post(&report).await, (409, "not_yet".into()));
        assert_eq!(stage.count().await, 0);
    }
}

/// Passes everything on to the chain but the receipt of one transaction, which it makes up.
async fn liar(chain: &DevnetChain, transaction: B256, logs: [[B256; 5]; 2], swaps: Arc<AtomicBool>) -> String {
    let (upstream, token) = (chain.rpc_url(), chain.asset().address);
    chain.mine().await;
    let number = chain.block_number().await;
    let answer = async move |body: Bytes| {
        let request: Value = serde_json::from_slice(&body).unwrap();
        if request["method"] != "eth_getTransactionReceipt" || request["params"][0] != json!(transaction) {
            let response = reqwest::Client::new().post(&upstream).header("content-type", "application/json").body(body);
            return response.send().await.unwrap().text().await.unwrap();
        }
        let logs = logs.map(|[event, one, two, length, data]| {
            let data = if length.is_zero() { json!("0x") } else { json!(data) };
            json!({ "address": token, "topics": [event, one, two], "data": data })
        });
        let named = if swaps.load(Ordering::Relaxed) { random_nonce() } else { transaction };
        let receipt = json!({
            "transactionHash": named, "blockHash": random_nonce(), "blockNumber": format!("0x{number:x}"), "status": "0x1", "to": token,
            "gasUsed": "0x5208", "logs": logs,
        });
        json!({ "jsonrpc": "2.0", "id": request["id"], "result": receipt }).to_string()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/", post(answer))).await });
    url
}

/// How a node that passes everything on differs from the others.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mood {
    Honest,
    /// It knows the chain only up to this block.
    Lagging(u64),
    /// It knows the blocks, and no transaction.
    Forgetful,
    /// It searches so many blocks at once.
    Narrow(u64),
}

/// A node in a mood, and how often it was asked for logs.
async fn moody(chain: &DevnetChain, mood: Arc<Mutex<Mood>>) -> (String, Arc<AtomicUsize>) {
    let upstream = chain.rpc_url();
    let searches = Arc::new(AtomicUsize::new(0));
    let counted = searches.clone();
    let answer = async move |body: Bytes| {
        let mut request: Value = serde_json::from_slice(&body).unwrap();
        let mood = *mood.lock().unwrap();
        let method = request["method"].as_str().unwrap().to_owned();
        let told = |result: Value| json!({ "jsonrpc": "2.0", "id": request["id"], "result": result }).to_string();
        match (mood, &*method) {
            (Mood::Lagging(_) | Mood::Forgetful, "eth_getTransactionReceipt") => return told(Value::Null),
            (Mood::Lagging(head), "eth_getBlockByNumber") => match request["params"][0].as_str().unwrap() {
                "latest" | "finalized" => request["params"][0] = json!(format!("0x{head:x}")),
                number if u64::from_str_radix(&number[2..], 16).unwrap() > head => return told(Value::Null),
                _ => {}
            },
            (Mood::Narrow(most), "eth_getLogs") => {
                counted.fetch_add(1, Ordering::Relaxed);
                let number = |name| request["params"][0][name].as_str().unwrap()[2..].to_owned();
                let [from, to] = ["fromBlock", "toBlock"].map(|name| u64::from_str_radix(&number(name), 16).unwrap());
                if to - from + 1 > most {
                    let error = json!({ "code": -32005, "message": "block range too large" });
                    return json!({ "jsonrpc": "2.0", "id": request["id"], "error": error }).to_string();
                }
            }
            _ => {}
        }
        let sent = reqwest::Client::new().post(&upstream).header("content-type", "application/json");
        sent.body(request.to_string()).send().await.unwrap().text().await.unwrap()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/", post(answer))).await });
    (url, searches)
}

#[tokio::test]
async fn report_is_deleted_only_if_all_nodes_agree_that_its_payment_is_gone() {
    for moody_first in [true, false] {
        let chain = DevnetChain::start_with(None, 4).await;
        let mood = Arc::new(Mutex::new(Mood::Honest));
        let (url, _) = moody(&chain, mood.clone()).await;
        let both = match moody_first {
            true => PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(&url).unwrap().rpc_url(chain.rpc_url()).unwrap(),
            false => {
                PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url()).unwrap().rpc_url(&url).unwrap()
            }
        };
        let stage = Stage::set_with(&chain, |directory| directory.payment_checker(both.depth(0))).await;
        let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
        let evaluator = booth.payee.address();
        let left_after = async |now: Mood| {
            *mood.lock().unwrap() = now;
            stage.service.upkeep_once().await.unwrap();
            stage.count().await
        };
        let before = chain.block_number().await;
        let kept = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
        assert_eq!(stage.post(&kept).await.0, 201);
        (0..10).for_each(|_| chain.devnet.mine());
        let all = [Mood::Lagging(before), Mood::Lagging(before + 2), Mood::Forgetful, Mood::Honest, Mood::Forgetful];
        for mood in all {
            assert_eq!(left_after(mood).await, 1, "{mood:?}");
        }
        *mood.lock().unwrap() = Mood::Honest;
        let lost = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
        assert_eq!(stage.post(&lost).await.0, 201);
        let at = chain.block_number().await;
        chain.devnet.reorg(1, Orphans::Lost);
        (0..10).for_each(|_| chain.devnet.mine());
        // Who has not come to that block cannot know.
        assert_eq!(left_after(Mood::Lagging(at - 1)).await, 2);
        assert_eq!(left_after(Mood::Honest).await, 1);
    }
}

/// Behind one address there may be several nodes, of which one tells what is final and another one has no receipt yet.
#[tokio::test]
async fn missing_receipt_deletes_no_report() {
    let chain = DevnetChain::start_with(None, 4).await;
    let mood = Arc::new(Mutex::new(Mood::Honest));
    let (url, _) = moody(&chain, mood.clone()).await;
    let alone = PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(&url).unwrap().depth(0);
    let stage = Stage::set_with(&chain, |directory| directory.payment_checker(alone)).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let report = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
    assert_eq!(stage.post(&report).await.0, 201);
    (0..10).for_each(|_| chain.devnet.mine());
    for now in [Mood::Forgetful, Mood::Forgetful, Mood::Honest] {
        *mood.lock().unwrap() = now;
        stage.service.upkeep_once().await.unwrap();
        assert_eq!(stage.count().await, 1, "{now:?}");
    }
}

#[tokio::test]
async fn newest_blocks_are_searched_first_and_a_node_that_cannot_search_is_reported() {
    let chain = DevnetChain::start(None).await;
    (0..1_000).for_each(|_| chain.devnet.mine());
    let mood = Arc::new(Mutex::new(Mood::Narrow(100)));
    let (url, searches) = moody(&chain, mood.clone()).await;
    let narrow = PaymentChecker::new(Network::BASE_SEPOLIA).rpc_url(&url).unwrap().depth(0);
    let setup = Stage::set(&chain).await;
    let (evaluator, payer) = (random_address(), setup.payer().await);
    let paid = setup.pay(&payer, evaluator, PRICE).await;
    let unnamed = sign_report(paid.record(evaluator), None, &payer).await;
    assert_eq!(narrow.check(&unnamed).await.unwrap().transaction, paid.transaction);
    assert!(searches.load(Ordering::Relaxed) <= 3, "two that are refused, and the newest hundred blocks");
    *mood.lock().unwrap() = Mood::Narrow(1);
    let error = narrow.check(&unnamed).await.unwrap_err();
    assert!(matches!(error, PaymentCheckError::Unavailable(_)) && error.to_string().contains("transaction"), "{error}");
    assert!(narrow.check(&paid.report(evaluator, &payer).await).await.is_ok(), "it is not needed for that");
}
