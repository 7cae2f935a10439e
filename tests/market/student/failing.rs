//! Evaluators that fail, each in its own way.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use alloy_signer_local::PrivateKeySigner;
use axum::{
    Router,
    body::Bytes,
    extract::Request,
    routing::{get, post},
};
use tower_x402::{
    Clock, ManualClock, SystemClock, Usdc,
    client::{Budget, Payer, reconcile},
    server::RequirePaymentLayer,
};
use x402_market::{CARD_PATH, Failure, SpendingReport, Student, StudentBuilder, StudentError};

use support::chain::Chain;
use support::crowd::{Endpoint, failing, garbage, honestly, income, praise};
use support::student_stage::{Booth, Cheapest, PRICE, Stage, group, honest, says, single};

/// The only failure of those hired from `booth`.
fn failure<'a>(feedback: &'a x402_market::Feedback, booth: &Booth) -> Option<&'a Failure> {
    let hire = feedback.hires.iter().find(|hire| hire.evaluator == booth.payee);
    hire.unwrap_or_else(|| panic!("not hired: {feedback:?}")).failure.as_ref()
}

fn balanced(books: &SpendingReport, spent: u64) {
    assert_eq!((books.paid.atomic(), books.elsewhere.atomic(), books.promised.atomic()), (spent, 0, 0), "{books:?}");
    assert_eq!(books.accounts.iter().map(|account| account.paid.atomic()).sum::<u64>(), spent);
    assert_eq!(books.accounts.iter().map(|account| account.held.atomic()).sum::<u64>(), books.held.atomic());
}

#[tokio::test]
async fn failed_evaluators_are_replaced_and_every_unit_is_accounted_for() {
    let stage = Stage::set().await;
    let quiet = Endpoint::default();
    let dead = stage.open(honest()).await;
    let dear = |paywall, payee| honestly(paywall, payee).price("$0.002");
    let liar = stage.crooked(&quiet, dear, praise).await;
    let babbler = stage.answering(&quiet, garbage).await;
    let thief = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8".parse().unwrap();
    let robber = stage.crooked(&quiet, |paywall, _| honestly(paywall, thief), praise).await;
    let good = stage.open(honest()).await;
    let booths = [&dead, &liar, &babbler, &robber, &good];
    let student = stage.student(1_000 * PRICE, &booths, |student| student.panel_size(5).max_replacements(0)).await;
    dead.server.abort();

    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    assert_eq!(feedback.outputs[0].verdict.unwrap().score.get(), 0.9);
    assert_eq!(feedback.outputs[0].members[0].evaluator, good.payee);
    assert!(matches!(failure(&feedback, &dead), Some(Failure::Unreachable { .. })));
    assert!(matches!(failure(&feedback, &liar), Some(Failure::PriceMismatch { .. })));
    assert!(matches!(failure(&feedback, &babbler), Some(Failure::InvalidAnswer { .. })));
    assert!(matches!(failure(&feedback, &robber), Some(Failure::PayeeMismatch { .. })));
    assert_eq!(failure(&feedback, &good), None);
    assert_eq!(feedback.paid.atomic(), 2 * PRICE, "the babbler was paid too");

    let books = student.spending();
    let account = |booth: &Booth| books.account(booth.payee, "prose").unwrap();
    assert_eq!((account(&dead).timeouts, account(&liar).mismatches, account(&robber).mismatches), (1, 1, 1));
    assert_eq!((account(&babbler).invalid, account(&good).answered), (1, 1));
    balanced(&books, income(&stage, &booths).await);
    assert_eq!(books.paid, student.budget().spent());
    let records = student.evidence().records();
    assert_eq!(records.len(), 5);
    let with_payment: Vec<_> = records.iter().filter(|record| record.payment.is_some()).collect();
    assert_eq!(with_payment.len(), 2, "only payments can be reported");
}

#[tokio::test]
async fn failed_member_is_replaced_by_the_next_candidate() {
    let stage = Stage::set().await;
    let mut dead = Vec::new();
    for _ in 0..2 {
        dead.push(stage.open(honest()).await);
    }
    let good = stage.open_with(honest(), |card| card.price("$0.002")).await;
    let booths = [&dead[0], &dead[1], &good];
    // Whoever asks for the least is asked first.
    let settings = |student: StudentBuilder| student.selector(Cheapest).max_replacements(2);
    let student = stage.student(1_000 * PRICE, &booths, settings).await;
    dead.iter().for_each(|booth| booth.server.abort());
    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    let order: Vec<_> = feedback.hires.iter().map(|hire| hire.evaluator).collect();
    assert_eq!(order, [dead[0].payee, dead[1].payee, good.payee]);
    assert_eq!(feedback.judged_outputs(), 1);
    balanced(&student.spending(), 2 * PRICE);
}

#[tokio::test]
async fn feedback_without_verdicts_if_all_evaluators_fail() {
    let stage = Stage::set().await;
    let quiet = Endpoint::default();
    let babbler = stage.answering(&quiet, garbage).await;
    let student = stage.student(1_000 * PRICE, &[&babbler], |student| student).await;
    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    assert_eq!((feedback.judged_outputs(), feedback.hires.len(), feedback.outputs[0].members.len()), (0, 1, 0));
    balanced(&student.spending(), PRICE);
}

#[tokio::test]
async fn late_evaluator_is_given_up_and_its_payment_is_reported_later() {
    let stage = Stage::set().await;
    let slow = Endpoint::holding();
    let (sloth, good) = (stage.answering(&slow, praise).await, stage.open(honest()).await);
    let settings = |student: StudentBuilder| student.panel_size(2).deadline(Duration::from_secs(4));
    let student = stage.student(1_000 * PRICE, &[&sloth, &good], settings).await;
    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    assert_eq!(failure(&feedback, &sloth), Some(&Failure::Timeout));
    assert_eq!((feedback.judged_outputs(), feedback.paid.atomic()), (1, PRICE));
    // What is under way stays promised, and nobody who is awaited is hired again.
    let books = student.spending();
    assert_eq!((books.paid.atomic(), books.promised.atomic()), (PRICE, PRICE));
    let again = student.evaluate(&single("a good one")).await.unwrap();
    assert_eq!(again.hires.len(), 1);

    slow.holds.store(false, std::sync::atomic::Ordering::Relaxed);
    slow.let_go.notify_waiters();
    student.wait_until_idle().await;
    let books = student.spending();
    balanced(&books, income(&stage, &[&sloth, &good]).await);
    assert_eq!(books.account(sloth.payee, "prose").unwrap().paid.atomic(), PRICE);
    assert_eq!(books.account(sloth.payee, "prose").unwrap().timeouts, 1);
    assert_eq!(books.paid, student.budget().spent());
}

#[tokio::test]
async fn unproven_payment_is_held_until_the_chain_decides() {
    let stage = Stage::set().await;
    let quiet = Endpoint::default();
    let broken = stage.answering(&quiet, failing).await;
    let student = stage.student(1_000 * PRICE, &[&broken], |student| student).await;
    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    assert!(matches!(failure(&feedback, &broken), Some(Failure::Unreachable { .. })));
    assert_eq!((feedback.paid.atomic(), feedback.held.atomic()), (0, PRICE));
    let books = student.spending();
    balanced(&books, 0);
    assert_eq!((books.held, student.budget().reserved()), (feedback.held, feedback.held));

    let valid_before = student.budget().journal().unresolved()[0].valid_before;
    stage.chain.set_next_timestamp(valid_before + 1).await;
    stage.chain.mine().await;
    assert_eq!(reconcile(student.budget(), stage.chain.provider()).await.unwrap().void, 1);
    balanced(&student.spending(), 0);
    assert_eq!(student.spending().held.atomic(), 0);
}

#[tokio::test]
async fn price_changed_together_with_the_card_is_no_mismatch() {
    let stage = Stage::set().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let key = PrivateKeySigner::random();
    let address = listener.local_addr().unwrap();
    let at = |price: &'static str| support::student_stage::card(address, key.address()).price(price);
    let service =
        |card| x402_market::EvaluatorService::builder(card, says(0.9)).facilitator(stage.facilitator.clone()).build();
    let old = service(at("$0.001").build().unwrap().sign(&key).await.unwrap()).unwrap();
    let new = service(at("$0.003").build().unwrap().sign(&key).await.unwrap()).unwrap();
    let current = std::sync::Arc::new(std::sync::Mutex::new(old));
    let shown = current.clone();
    let dispatch = tower::service_fn(move |request| {
        let service = shown.lock().unwrap().clone();
        tower::ServiceExt::oneshot(service, request)
    });
    let (url, server) = support::student_stage::serve(listener, axum::Router::new().fallback_service(dispatch));
    let booth = Booth { url, payee: key.address(), server };
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student).await;
    assert_eq!(student.evaluate(&single("one")).await.unwrap().paid.atomic(), PRICE);
    *current.lock().unwrap() = new;
    let feedback = student.evaluate(&single("two")).await.unwrap();
    assert_eq!((failure(&feedback, &booth), feedback.paid.atomic()), (Some(&Failure::TermsChanged), 0));
    assert_eq!(student.evaluate(&single("three")).await.unwrap().paid.atomic(), 3 * PRICE);
    assert_eq!(student.spending().account(booth.payee, "prose").unwrap().mismatches, 0);
    balanced(&student.spending(), 4 * PRICE);
}

#[tokio::test]
async fn changed_price_excuses_no_paid_part() {
    let stage = Stage::set().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (key, address) = (PrivateKeySigner::random(), listener.local_addr().unwrap());
    let shop = async |price: &'static str| {
        let card = support::student_stage::card(address, key.address()).price(price).max_outputs(1);
        let card = support::crowd::signed(card, &key).await;
        let paywall = RequirePaymentLayer::builder().facilitator(stage.facilitator.clone());
        let paywall = honestly(paywall, key.address()).price(price).build().unwrap();
        let evaluate = post(async |_: Bytes| "what a nice submission").layer(paywall);
        Router::new().route("/evaluate", evaluate).route(CARD_PATH, get(async move || card.clone()))
    };
    let (cheap, dear) = (shop("$0.001").await, shop("$0.002").await);
    // Whoever comes first pays, and gets nothing for it; all others are told the new price after that.
    let (came, served) = (Arc::new(AtomicUsize::new(0)), tokio::sync::watch::channel(false).0);
    let dispatch = tower::service_fn(move |request: Request| {
        let pays = request.headers().contains_key("payment-signature");
        let is_first = request.uri().path() == "/evaluate" && !pays && came.fetch_add(1, Ordering::SeqCst) == 0;
        let (cheap, dear, served) = (cheap.clone(), dear.clone(), served.clone());
        async move {
            if pays || is_first || (request.method() == "GET" && !*served.borrow()) {
                let response = tower::ServiceExt::oneshot(cheap, request).await;
                served.send_replace(pays);
                return response;
            }
            let _ = served.subscribe().wait_for(|served| *served).await;
            tower::ServiceExt::oneshot(dear, request).await
        }
    });
    let (url, server) = support::student_stage::serve(listener, Router::new().fallback_service(dispatch));
    let booth = Booth { url, payee: key.address(), server };
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student).await;
    let feedback = student.evaluate(&group(&["one", "two", "three"])).await.unwrap();
    assert_eq!((feedback.paid.atomic(), feedback.judged_outputs()), (PRICE, 0));
    let account = student.spending().account(booth.payee, "prose").unwrap().clone();
    assert_eq!((account.invalid, account.mismatches), (1, 0), "{account:?}");
    assert_eq!(student.evidence().records().len(), 1);
    balanced(&student.spending(), PRICE);
}

#[tokio::test]
async fn exhausted_budget_is_an_error_and_nothing_is_signed() {
    let stage = Stage::set().await;
    let good = stage.open(honest()).await;
    let settings = |student: StudentBuilder| student.tasks(2).selector(Cheapest);
    let student = stage.student(2 * PRICE, &[&good], settings).await;
    let poetry = x402_market::Task::new("poetry", "Rhyme.").unwrap();
    let poetry = x402_market::Submission::single(poetry, "time").unwrap();
    let nobody = student.evaluate(&poetry).await.unwrap_err();
    assert_eq!(nobody, StudentError::NoEvaluators { skill: "poetry".to_owned() });
    for _ in 0..2 {
        assert_eq!(student.evaluate(&single("a good one")).await.unwrap().judged_outputs(), 1);
    }
    let error = student.evaluate(&single("a good one")).await.unwrap_err();
    assert!(matches!(error, StudentError::BudgetExhausted { remaining, .. } if remaining.atomic() == 0), "{error:?}");
    let books = student.spending();
    assert_eq!(books.tasks, 2);
    balanced(&books, stage.income(&good).await);
    assert_eq!(student.evidence().len(), 2);
}

#[tokio::test]
async fn expired_failed_payment_can_be_spent_again() {
    let stage = Stage::set().await;
    let booth = stage.open(honest()).await;
    let clock = Arc::new(ManualClock::at(SystemClock.now()));
    // One price, without money behind it.
    let budget = Budget::builder().total(Usdc::from_atomic(PRICE)).release_failed().build();
    let payer = Payer::builder(PrivateKeySigner::random()).asset(stage.chain.asset()).budget(budget);
    let payer = payer.clock(clock.clone()).build();
    let student = Student::builder(payer).source(booth.url.clone()).selector(Cheapest).clock(clock.clone());
    let student = student.build().unwrap();
    student.discover().await;
    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    assert!(matches!(failure(&feedback, &booth), Some(Failure::PaymentFailed { .. })), "{feedback:?}");
    student.wait_until_idle().await;
    let valid_before = student.budget().journal().unresolved()[0].valid_before;
    clock.advance(valid_before - clock.now());
    let error = student.evaluate(&single("a good one")).await.unwrap_err();
    assert!(matches!(error, StudentError::BudgetExhausted { .. }), "blocks may be late: {error:?}");
    clock.advance(61);
    assert_eq!(student.evaluate(&single("a good one")).await.unwrap().hires.len(), 1);
}

#[tokio::test]
async fn claimed_payment_failure_is_a_timeout_and_its_money_is_held() {
    let stage = Stage::set().await;
    let booth = stage.open(honest()).await;
    // A budget without money behind it.
    let payer = Payer::builder(PrivateKeySigner::random()).asset(stage.chain.asset()).build();
    let student = Student::builder(payer).source(booth.url.clone()).selector(Cheapest).build().unwrap();
    student.discover().await;
    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    assert!(matches!(failure(&feedback, &booth), Some(Failure::PaymentFailed { .. })), "{feedback:?}");
    assert_eq!((feedback.paid.atomic(), feedback.held.atomic()), (0, PRICE));
    assert_eq!(student.spending().account(booth.payee, "prose").unwrap().timeouts, 1);
}
