//! A paid request from end to end, on every chain: the money moves once, the handler runs once, the answer arrives.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{B256, U256};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode, header};
use support::{
    authorization::{Signature, random_nonce},
    chain::{Chain, on_every_chain},
    rpc_proxy::RpcProxy,
    shop::{Answer, Customer, PRICE, Purchase, Shop, evaluate, send, try_send},
};
use tower_x402::{ledger::Counts, protocol::PaymentFlow};

on_every_chain! {
    a_request_is_worked_on_then_paid,
    a_request_is_paid_then_worked_on,
    a_contract_wallet_pays,
    a_delegated_account_pays,
    two_hundred_copies_are_one_payment,
    two_hundred_copies_are_one_payment_upfront,
    two_hundred_payments_at_once_all_settle,
    a_balance_for_ten_buys_ten,
    a_published_payment_buys_nothing_else,
    an_answer_without_a_secret_is_replayed_a_few_times,
    failed_work_is_not_charged,
    failed_work_that_was_paid_for_is_owed,
    panicking_work_is_not_charged,
    slow_work_is_cut_off_and_not_charged,
    a_client_that_goes_away_finds_its_answer,
    a_client_that_goes_away_while_the_answer_streams_finds_it,
    a_drained_payer_is_not_served,
    a_front_run_payment_is_credited_once,
    a_payment_seen_first_when_it_was_used_is_refused,
    round_trips_are_counted,
}

async fn a_request_is_worked_on_then_paid(chain: &dyn Chain) {
    buy_once(chain, PaymentFlow::Authorization).await;
}

async fn a_request_is_paid_then_worked_on(chain: &dyn Chain) {
    buy_once(chain, PaymentFlow::Upfront).await;
}

async fn buy_once(chain: &dyn Chain, flow: PaymentFlow) {
    let shop = Shop::open(chain).await;
    let app = shop.app_with(shop.layer().flow(flow), move |payment, body| async move {
        assert_eq!(payment.amount, U256::from(PRICE));
        assert_eq!(payment.flow, flow);
        assert_eq!(payment.transaction.is_some(), flow == PaymentFlow::Upfront, "paid before the work or not");
        Ok(Response::builder().status(201).header("x-payer", payment.payer.to_string()).body(Body::from(body)).unwrap())
    });
    let customer = Customer::with_funds(chain, 3 * PRICE).await;
    let unpaid = send(&app, evaluate("17 * 23")).await;
    assert_eq!(unpaid.status, StatusCode::PAYMENT_REQUIRED);
    assert_eq!(unpaid.headers[header::CACHE_CONTROL], "no-store");
    assert_eq!(shop.handled(), 0);

    let purchase = customer.pay(&app, evaluate("17 * 23")).await;
    let answer = send(&app, purchase.on(evaluate("17 * 23"))).await;
    assert_eq!(answer.status, StatusCode::CREATED, "the handler's own status: {answer:?}");
    assert_eq!(answer.text(), "17 * 23");
    assert_eq!(answer.headers["x-payer"], customer.from.to_string());
    assert_eq!(answer.headers[header::CACHE_CONTROL], "private");
    let settlement = answer.settlement().unwrap();
    assert_eq!(settlement["network"], "eip155:84532");
    assert_eq!(settlement["payer"], serde_json::json!(customer.from), "in the letters of the payment");
    assert_eq!(settlement["amount"], PRICE.to_string());

    let transfers = chain.token_transfers(shop.pay_to).await;
    assert_eq!(transfers.len(), 1);
    assert_eq!((transfers[0].transaction, transfers[0].units), (answer.transaction(), PRICE));
    assert_eq!(chain.balance(customer.from).await, 2 * PRICE);
    assert_eq!(shop.counts().await, Counts { settled: 1, ..Counts::default() });
}

async fn a_contract_wallet_pays(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let owner = PrivateKeySigner::random();
    let wallet = chain.deploy_wallet(owner.address()).await;
    chain.mint(wallet, 2 * PRICE).await;
    let customer = Customer { signer: owner, from: wallet };
    let purchase = customer.pay(&app, evaluate("a")).await;
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.text(), "a", "and its answer is replayed");
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
    assert_eq!(shop.handled(), 1);

    let mut forged = customer.pay(&app, evaluate("b")).await;
    forged.signer = PrivateKeySigner::random();
    forged.resign();
    let answer = send(&app, forged.on(evaluate("b"))).await;
    assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, SIGNATURE));
    assert!(shop.record(&forged.authorization).await.is_none(), "garbage never reaches the ledger");
    assert_eq!(shop.handled(), 1);
}

async fn a_delegated_account_pays(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, PRICE).await;
    let implementation = chain.deploy_wallet(PrivateKeySigner::random().address()).await;
    chain.delegate(customer.from, implementation).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
}

async fn two_hundred_copies_are_one_payment(chain: &dyn Chain) {
    copies(chain, PaymentFlow::Authorization).await;
}

async fn two_hundred_copies_are_one_payment_upfront(chain: &dyn Chain) {
    copies(chain, PaymentFlow::Upfront).await;
}

async fn copies(chain: &dyn Chain, flow: PaymentFlow) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer().flow(flow));
    let customer = Customer::with_funds(chain, 200 * PRICE).await;
    let purchase = customer.pay(&app, evaluate("once")).await;
    let answers = join_all((0..200).map(|_| send(&app, purchase.on(evaluate("once"))))).await;
    assert_eq!(shop.handled(), 1);
    assert_eq!(chain.token_transfers(shop.pay_to).await.len(), 1);
    let transactions: BTreeSet<B256> = answers.iter().map(Answer::transaction).collect();
    assert_eq!(transactions.len(), 1, "every copy names the one transaction");
    assert!(answers.iter().all(|answer| answer.status == StatusCode::OK && answer.text() == "once"));
}

async fn two_hundred_payments_at_once_all_settle(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, 200 * PRICE).await;
    let demand = support::shop::demand(&send(&app, evaluate("a")).await);
    let purchases: Vec<Purchase> = (0..200).map(|_| customer.sign(&demand, 0)).collect();
    let answers = join_all(purchases.iter().map(|purchase| send(&app, purchase.on(evaluate("a"))))).await;
    for answer in &answers {
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    }
    let transactions: BTreeSet<B256> = answers.iter().map(Answer::transaction).collect();
    assert_eq!((shop.handled(), transactions.len()), (200, 200));
    assert_eq!(chain.balance(shop.pay_to).await, 200 * PRICE);
    assert_eq!(shop.counts().await, Counts { settled: 200, ..Counts::default() });
}

async fn a_balance_for_ten_buys_ten(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, 10 * PRICE).await;
    let demand = support::shop::demand(&send(&app, evaluate("a")).await);
    let purchases: Vec<Purchase> = (0..200).map(|_| customer.sign(&demand, 0)).collect();
    let answers = join_all(purchases.iter().map(|purchase| send(&app, purchase.on(evaluate("a"))))).await;
    let (served, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.status == StatusCode::OK);
    assert_eq!((served.len(), shop.handled()), (10, 10));
    for answer in refused {
        assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::PAYMENT_REQUIRED, "insufficient_funds"));
    }
    assert_eq!(chain.balance(shop.pay_to).await, 10 * PRICE);
    let settler = shop.facilitator.settlement_address();
    let transactions = chain.provider().get_transaction_count(settler).await.expect("eth_getTransactionCount");
    assert_eq!(transactions, 10, "no gas is spent on payments that the balance does not cover");
}

async fn a_published_payment_buys_nothing_else(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    let request = || Request::post("/evaluate?k=1").header("authorization", "Bearer a");
    let purchase = customer.pay(&app, request().body("secret".into()).unwrap()).await;
    let first = send(&app, purchase.on(request().body("secret".into()).unwrap())).await;
    assert_eq!(first.status, StatusCode::OK, "{first:?}");
    let others = [
        request().body("another".into()).unwrap(),
        request().body("secret and more".into()).unwrap(),
        request().body(Body::empty()).unwrap(),
        request().uri("/evaluate?k=2").body("secret".into()).unwrap(),
        request().uri("/evaluate").body("secret".into()).unwrap(),
        request().uri("/%65valuate?k=1").body("secret".into()).unwrap(),
        request().uri("/other?k=1").body("secret".into()).unwrap(),
        request().method("PUT").body("secret".into()).unwrap(),
        request().header("authorization", "Bearer b").body("secret".into()).unwrap(),
        request().header("cookie", "session=1").body("secret".into()).unwrap(),
        Request::post("/evaluate?k=1").body("secret".into()).unwrap(),
        Request::post("/evaluate?k=1").header("authorization", "Bearer b").body("secret".into()).unwrap(),
    ];
    for other in others {
        let what = format!("{} {} {:?}", other.method(), other.uri(), other.headers());
        let answer = send(&app, purchase.on(other)).await;
        assert_eq!(answer.status, StatusCode::CONFLICT, "{what}");
        assert!(!answer.text().contains("secret"), "{what} learned: {}", answer.text());
        assert!(!answer.headers.contains_key("payment-response"), "{what}");
    }
    let again = send(&app, purchase.on(request().body("secret".into()).unwrap())).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "secret"), "the same request finds its answer");
    assert_eq!(again.transaction(), first.transaction());
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

async fn an_answer_without_a_secret_is_replayed_a_few_times(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let layer = shop.layer().anonymous_replays(2, Duration::from_secs(60));
    let app = shop.app_with(layer, |_, _| async { Ok(Response::new(Body::from("public price list"))) });
    let customer = Customer::with_funds(chain, PRICE).await;
    let request = || Request::get("/list").body(Body::empty()).unwrap();
    let purchase = customer.pay(&app, request()).await;
    let first = send(&app, purchase.on(request())).await;
    for _ in 0..2 {
        assert_eq!(send(&app, purchase.on(request())).await.text(), "public price list");
    }
    let refused = send(&app, purchase.on(request())).await;
    assert_eq!(refused.status, StatusCode::CONFLICT);
    assert_eq!(refused.json()["transaction"], first.transaction().to_string(), "named, for whoever paid");
    assert_eq!(shop.handled(), 1);
}

async fn failed_work_is_not_charged(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app_with(shop.layer().max_attempts(2), |payment, body| async move {
        let status = match (&body[..], payment.attempt) {
            (b"redirect", _) => StatusCode::FOUND,
            (b"error", _) => return Err("the handler is broken".into()),
            (b"flaky", 2) => StatusCode::OK,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Ok(Response::builder().status(status).body(Body::from("details")).unwrap())
    });
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    for (body, status) in [("fail", StatusCode::INTERNAL_SERVER_ERROR), ("redirect", StatusCode::FOUND)] {
        let purchase = customer.pay(&app, evaluate(body)).await;
        for _ in 0..2 {
            let answer = send(&app, purchase.on(evaluate(body))).await;
            assert_eq!((answer.status, answer.text()), (status, "details"));
            assert!(answer.settlement().is_none());
        }
        let answer = send(&app, purchase.on(evaluate(body))).await;
        assert_eq!((answer.status, answer.reason().as_str()), (StatusCode::CONFLICT, "attempts_exhausted"));
    }
    assert_eq!(shop.handled(), 4, "two attempts each");
    let purchase = customer.pay(&app, evaluate("error")).await;
    let error = try_send(&app, purchase.on(evaluate("error"))).await.unwrap_err();
    assert_eq!(error.to_string(), "the handler is broken", "the service's own error, unchanged");
    assert_eq!(chain.balance(shop.pay_to).await, 0);

    let purchase = customer.pay(&app, evaluate("flaky")).await;
    assert_eq!(send(&app, purchase.on(evaluate("flaky"))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let other = send(&app, purchase.on(evaluate("fl_ky"))).await;
    assert_eq!(other.status, StatusCode::CONFLICT, "frozen at first use, paid or not");
    let answer = send(&app, purchase.on(evaluate("flaky"))).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
}

async fn failed_work_that_was_paid_for_is_owed(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let layer = shop.layer().flow(PaymentFlow::Upfront);
    let app = shop.app_with(layer, |payment, _| async move {
        let status = if payment.attempt == 3 { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
        Ok(Response::builder().status(status).body(Body::from("details")).unwrap())
    });
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let mut transactions = BTreeSet::new();
    for status in [StatusCode::BAD_GATEWAY, StatusCode::BAD_GATEWAY, StatusCode::OK, StatusCode::OK] {
        let answer = send(&app, purchase.on(evaluate("a"))).await;
        assert_eq!(answer.status, status);
        transactions.insert(answer.transaction());
    }
    assert_eq!(shop.handled(), 3, "run until it succeeded, then replayed");
    assert_eq!((transactions.len(), chain.balance(shop.pay_to).await), (1, PRICE), "charged once");
}

async fn panicking_work_is_not_charged(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app_with(shop.layer(), |payment, body| async move {
        assert_ne!(payment.attempt, 1, "the first attempt panics");
        Ok(Response::new(Body::from(body)))
    });
    let customer = Customer::with_funds(chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(chain.balance(shop.pay_to).await, 0);
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.text(), "a", "and may be tried again at once");
    assert_eq!(chain.balance(shop.pay_to).await, PRICE);
}

async fn slow_work_is_cut_off_and_not_charged(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app_with(shop.layer().handler_deadline(Duration::from_millis(50)), |_, _| std::future::pending());
    let customer = Customer::with_funds(chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(chain.balance(shop.pay_to).await, 0);
}

async fn a_client_that_goes_away_finds_its_answer(chain: &dyn Chain) {
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = Shop::open_at(chain, proxy.url()).await;
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        let app = shop.app(shop.layer().flow(flow));
        // The client disconnects at various times, most of them during settlement.
        for patience in [1, 30, 60, 90, 120] {
            proxy.set_latency(Duration::from_millis(50));
            let purchase = customer.pay(&app, evaluate("mine")).await;
            let (handled, income) = (shop.handled(), chain.balance(shop.pay_to).await);
            let impatient = send(&app, purchase.on(evaluate("mine")));
            let gone = tokio::time::timeout(Duration::from_millis(patience), impatient).await;
            proxy.set_latency(Duration::ZERO);
            let answer = send(&app, purchase.on(evaluate("mine"))).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, "mine"), "after {patience} ms ({gone:?})");
            assert_eq!(shop.handled(), handled + 1, "after {patience} ms");
            assert_eq!(chain.balance(shop.pay_to).await, income + PRICE, "after {patience} ms");
            chain.mint(customer.from, PRICE).await;
        }
    }
}

async fn a_client_that_goes_away_while_the_answer_streams_finds_it(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app_with(shop.layer(), |_, _| async {
        let chunks = futures_util::stream::unfold(0, |n| async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            (n < 5).then(|| (Ok::<_, std::io::Error>(bytes::Bytes::from(n.to_string())), n + 1))
        });
        Ok(Response::new(Body::from_stream(chunks)))
    });
    let customer = Customer::with_funds(chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    drop(try_send(&app, purchase.on(evaluate("a"))).await.unwrap());
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.text(), "01234");
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

async fn a_drained_payer_is_not_served(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let (drained, may_work) = (Arc::new(tokio::sync::Notify::new()), Arc::new(AtomicBool::new(false)));
    let app = {
        let (drained, may_work) = (drained.clone(), may_work.clone());
        shop.app_with(shop.layer(), move |_, body| {
            let (drained, may_work) = (drained.clone(), may_work.clone());
            async move {
                may_work.store(true, Ordering::SeqCst);
                drained.notified().await;
                Ok(Response::new(Body::from(body)))
            }
        })
    };
    let customer = Customer::with_funds(chain, PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let request = tokio::spawn({
        let (app, purchase) = (app.clone(), purchase.clone());
        async move { send(&app, purchase.on(evaluate("a"))).await }
    });
    support::eventually::eventually("the handler works", async || may_work.load(Ordering::SeqCst)).await;
    // While the handler runs, the payer's money goes elsewhere.
    let other = Shop { pay_to: support::authorization::random_address(), ..shop.clone() };
    let other_app = other.app(other.layer());
    let elsewhere = customer.pay(&other_app, evaluate("b")).await;
    let relayer = chain.relayer().await;
    let signature: Signature = elsewhere.by_key();
    relayer.send(chain, support::token::transfer_vrs(&elsewhere.authorization, &signature)).await;
    assert_eq!(chain.balance(customer.from).await, 0);
    drained.notify_one();
    let answer = request.await.unwrap();
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    assert_eq!(answer.settlement().unwrap()["success"], false);
    assert!(!answer.text().contains("\"a\""), "no content without payment");

    // The authorization is still good; once the payer can pay, the answer is there, and the work is not done again.
    chain.mint(customer.from, PRICE).await;
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
}

async fn a_front_run_payment_is_credited_once(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let relayer = Arc::new(chain.relayer().await);
    let working = Arc::new(tokio::sync::Semaphore::new(0));
    let front_run = Arc::new(tokio::sync::Notify::new());
    let app = {
        let (working, front_run) = (working.clone(), front_run.clone());
        shop.app_with(shop.layer(), move |_, body| {
            let (working, front_run) = (working.clone(), front_run.clone());
            async move {
                working.add_permits(1);
                front_run.notified().await;
                Ok(Response::new(Body::from(body)))
            }
        })
    };
    let customer = Customer::with_funds(chain, 2 * PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let request = tokio::spawn({
        let (app, purchase) = (app.clone(), purchase.clone());
        async move { send(&app, purchase.on(evaluate("a"))).await }
    });
    working.acquire().await.unwrap().forget();
    let message = support::token::transfer_vrs(&purchase.authorization, &purchase.by_key());
    let theirs = relayer.send(chain, message).await;
    assert!(theirs.status());
    front_run.notify_one();
    let answer = request.await.unwrap();
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "a"), "{answer:?}");
    assert_eq!(answer.transaction(), theirs.transaction_hash, "the transfer that reached the payee, whoever sent it");
    assert_eq!(send(&app, purchase.on(evaluate("a"))).await.transaction(), theirs.transaction_hash);
    assert_eq!((shop.handled(), chain.balance(shop.pay_to).await), (1, PRICE));
    assert_eq!(shop.counts().await, Counts { settled: 1, ..Counts::default() });
}

async fn a_payment_seen_first_when_it_was_used_is_refused(chain: &dyn Chain) {
    let shop = Shop::open(chain).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, 2 * PRICE).await;
    let purchase = customer.pay(&app, evaluate("a")).await;
    let relayer = chain.relayer().await;
    assert!(
        relayer.send(chain, support::token::transfer_vrs(&purchase.authorization, &purchase.by_key())).await.status()
    );
    let answer = send(&app, purchase.on(evaluate("a"))).await;
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED);
    assert_eq!(answer.reason(), "invalid_exact_evm_nonce_already_used");
    assert_eq!(shop.handled(), 0);
}

async fn round_trips_are_counted(chain: &dyn Chain) {
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let shop = Shop::open_at(chain, proxy.url()).await;
    let app = shop.app(shop.layer());
    let customer = Customer::with_funds(chain, 9 * PRICE).await;
    let warm_up = customer.pay(&app, evaluate("a")).await;
    assert_eq!(send(&app, warm_up.on(evaluate("a"))).await.status, StatusCode::OK);

    proxy.reset();
    let purchase = customer.pay(&app, evaluate("b")).await;
    assert_eq!(send(&app, purchase.on(evaluate("b"))).await.status, StatusCode::OK);
    let counts = proxy.reset();
    assert!(counts.requests <= 4 && counts.calls <= 4, "verify and settle: {counts:?}");

    let mut unused = customer.pay(&app, evaluate("c")).await;
    unused.authorization.nonce = random_nonce();
    unused.authorization.from = support::authorization::random_address();
    unused.resign();
    assert_eq!(send(&app, unused.on(evaluate("c"))).await.status, StatusCode::PAYMENT_REQUIRED);
    let counts = proxy.reset();
    // A refusal counts only if the node is not behind, which two more requests show.
    assert_eq!((counts.requests, counts.calls), (3, 3), "verify alone: {counts:?}");

    assert_eq!(send(&app, purchase.on(evaluate("b"))).await.status, StatusCode::OK);
    assert_eq!(proxy.reset().requests, 0, "a replay asks nobody");
}

const SIGNATURE: &str = "invalid_exact_evm_payload_signature";
