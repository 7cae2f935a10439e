//! Gold tasks and other audits, and what a student learns from them.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256};
use serde_json::Value;
use tower_x402::Usdc;
use x402_market::{
    Gold, StudentBuilder, StudentError, Submission, Task, Truth,
    evidence::{CallOutcome, Evidence, EvidenceError, EvidencePayment},
    judge::{Judge, output_judge},
    selection::{Cheapest, Thompson},
};

use support::crowd::{Endpoint, praise};
use support::student_stage::{Booth, PRICE, Stage, group, honest, single, task, verdict};

/// Says anything, very sure of itself.
fn coin() -> impl Judge {
    let tosses = AtomicU64::new(0);
    output_judge(move |_: Arc<Task>, _: String| {
        let toss = tosses.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 63;
        async move { Ok(verdict(if toss == 0 { 0.9 } else { 0.1 })) }
    })
}

fn gold(number: usize) -> Gold {
    let gold = Gold::new(Task::new("prose", format!("Write about {number}.")).unwrap());
    let gold = gold.good(format!("a good one on {number}")).unwrap();
    gold.bad(format!("a poor one on {number}")).unwrap()
}

#[tokio::test]
async fn audits_tell_a_coin_toss_from_an_accurate_evaluator() {
    const TASKS: u64 = 80;
    let stage = Stage::set().await;
    let cheap = stage.open_with(coin(), |card| card.price("$0.0005")).await;
    let good = stage.open(honest()).await;
    let settings = |student: StudentBuilder| {
        let student = (0..40).fold(student.tasks(TASKS), |student, number| student.gold(gold(number)));
        student.audit_rate(0.5).selector(Thompson::seeded(1))
    };
    let student = stage.student(200 * PRICE, &[&cheap, &good], settings).await;
    let (mut of_good, mut late) = (0, 0);
    for number in 0..TASKS {
        let feedback = student.evaluate(&single("a good one")).await.unwrap();
        student.wait_until_idle().await;
        if number >= TASKS * 3 / 4 {
            late += 1;
            of_good += usize::from(feedback.hires.iter().any(|hire| hire.evaluator == good.payee));
        }
    }
    assert!(of_good * 10 >= late * 9, "{of_good} of {late}");
    let books = student.spending();
    let of = |payee| books.account(payee, "prose").unwrap();
    let (coin, honest) = (of(cheap.payee), of(good.payee));
    assert!(honest.audited >= 10 && honest.right == honest.audited, "{books:?}");
    assert!(coin.audited >= 3 && coin.right < coin.audited, "{books:?}");
    assert!((20..=60).contains(&books.audits), "about every second submission: {}", books.audits);
    let income = stage.income(&cheap).await + stage.income(&good).await;
    assert_eq!((books.paid.atomic(), books.held.atomic()), (income, 0));
    assert_eq!(books.paid, student.budget().spent());
}

#[tokio::test]
async fn gold_task_looks_like_a_submission_on_the_wire() {
    let known = |prompt: &str| Task::new("prose", prompt).unwrap().with_id("gold").unwrap();
    let bare = known("Gold, bare?");
    let referenced = known("Gold, with a reference?").with_reference("the truth").unwrap();
    let whole = known("Gold?").with_reference("the truth").unwrap().with_context("a test").unwrap();
    let asked = task().with_rubric("Be kind.").unwrap();
    let with_context = asked.clone().with_context("a letter").unwrap();
    // All of them go along with the first, and fewer with those that have more to show.
    for (asked, hidden) in [
        (asked.clone(), 3),
        (asked.with_reference("like this").unwrap(), 2),
        (with_context.clone(), 1),
        (with_context.with_reference("like this").unwrap(), 1),
    ] {
        let stage = Stage::set().await;
        let end = Endpoint::default();
        let nosy = stage.answering(&end, praise).await;
        let settings = |student: StudentBuilder| {
            let golds = [&bare, &referenced, &whole].map(|task| Gold::new(task.clone()));
            let golds = golds.map(|gold| gold.good("a good one").unwrap().bad("a poor one").unwrap());
            golds.into_iter().fold(student, StudentBuilder::gold).audit_rate(1.0).selector(Cheapest)
        };
        let student = stage.student(1_000 * PRICE, &[&nosy], settings).await;
        let asked = Submission::single(asked, "an answer").unwrap();
        for _ in 0..6 {
            student.evaluate(&asked).await.unwrap();
            student.wait_until_idle().await;
        }
        let seen = end.seen.lock().unwrap().clone();
        let golds =
            seen.iter().filter_map(|body| body["task"]["prompt"].as_str().filter(|text| text.starts_with("Gold")));
        let golds: Vec<_> = golds.collect();
        assert_eq!((seen.len(), golds.len(), golds.iter().collect::<HashSet<_>>().len()), (12, 6, hidden));
        let shape = |body: &Value| {
            let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
            (keys(body), keys(&body["task"]), body["task"]["rubric"].clone())
        };
        assert_eq!(seen.iter().map(shape).collect::<HashSet<_>>().len(), 1, "{seen:?}");
        let ids: HashSet<_> = seen.iter().map(|body| body["task"]["id"].as_str().unwrap()).collect();
        assert!(ids.len() == 12 && ids.iter().all(|id| id.len() == 16 && id.chars().all(|c| c.is_ascii_hexdigit())));
        let account = student.spending().account(nosy.payee, "prose").unwrap().clone();
        assert_eq!((account.answered, account.audited), (12, 6));
    }
}

/// Judges well as long as something else is to be judged meanwhile: of a student that sends one after the other that would be a hidden
/// task.
fn wary() -> impl Judge {
    let here = Arc::new(AtomicU64::new(0));
    output_judge(move |_: Arc<Task>, output: String| {
        let here = here.clone();
        async move {
            let before = here.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(50)).await;
            let alone = before == 0 && here.load(Ordering::SeqCst) == 1;
            here.fetch_sub(1, Ordering::SeqCst);
            Ok(verdict(if output.contains("good") == alone { 0.1 } else { 0.9 }))
        }
    })
}

#[tokio::test]
async fn evaluator_honest_only_for_two_requests_at_once_is_found_out() {
    let stage = Stage::set().await;
    let wary = stage.open(wary()).await;
    let settings = |student: StudentBuilder| {
        let student = (0..20).fold(student, |student, number| student.gold(gold(number)));
        student.audit_rate(0.5).selector(Cheapest)
    };
    let student = stage.student(200 * PRICE, &[&wary], settings).await;
    for _ in 0..20 {
        assert_eq!(student.evaluate(&single("a good one")).await.unwrap().judged_outputs(), 1);
    }
    student.wait_until_idle().await;
    let account = student.spending().account(wary.payee, "prose").unwrap().clone();
    assert!(account.audited >= 4 && account.right == 0, "{account:?}");
}

#[tokio::test]
async fn delayed_gold_task_times_out_and_its_evaluator_is_not_asked_meanwhile() {
    let stage = Stage::set().await;
    let end = Endpoint::holding();
    let sly = stage.answering(&end, praise).await;
    let settings = |student: StudentBuilder| {
        student.gold(gold(1)).audit_rate(1.0).selector(Cheapest).deadline(Duration::from_millis(300))
    };
    let student = stage.student(100 * PRICE, &[&sly], settings).await;
    let feedback = student.evaluate(&single("a good one")).await.unwrap();
    assert!(feedback.hires.is_empty(), "{feedback:?}");
    end.let_go.notify_one();
    student.wait_until_idle().await;
    assert_eq!(end.seen.lock().unwrap().len(), 1);
    let account = student.spending().account(sly.payee, "prose").unwrap().clone();
    assert_eq!((account.timeouts, account.answered, account.audited), (1, 0, 0), "{account:?}");
}

#[tokio::test]
async fn gold_task_leaves_money_for_the_submission_it_precedes() {
    let stage = Stage::set().await;
    let good = stage.open(honest()).await;
    let settings = |student: StudentBuilder| student.gold(gold(1)).audit_rate(1.0).selector(Cheapest);
    let student = stage.student(3 * PRICE, &[&good], settings).await;
    let mut judged = 0;
    while let Ok(feedback) = student.evaluate(&single("a good one")).await {
        judged += feedback.judged_outputs();
    }
    assert_eq!((judged, student.spending().audits, student.budget().remaining().atomic()), (2, 1, 0));
}

#[tokio::test]
async fn known_truth_counts_as_an_audit_and_explores_other_evaluators() {
    let stage = Stage::set().await;
    let (one, other) = (stage.open(honest()).await, stage.open(honest()).await);
    let student = stage.student(1_000 * PRICE, &[&one, &other], |student| student).await;
    let outputs = group(&["a good one", "a poor one"]);
    let unfit = student.evaluate_known(&outputs, &Truth::good([true])).await;
    assert_eq!(unfit.unwrap_err(), StudentError::TruthMismatch);
    for _ in 0..3 {
        let feedback = student.evaluate_known(&outputs, &Truth::good([true, false])).await.unwrap();
        assert_eq!((feedback.judged_outputs(), feedback.hires.len()), (2, 1));
        student.wait_until_idle().await;
    }
    let books = student.spending();
    let accounts = [one.payee, other.payee].map(|payee| books.account(payee, "prose").cloned().unwrap_or_default());
    let audited: u64 = accounts.iter().map(|account| account.audited).sum();
    assert_eq!(audited, accounts.iter().map(|account| account.right).sum::<u64>());
    assert!(books.audits == 3 && audited > 3, "more than one was explored: {books:?}");
    assert_eq!(student.evidence().exploration_cost().atomic(), (audited - 3) * 2 * PRICE);
    assert_eq!(books.paid.atomic(), stage.income(&one).await + stage.income(&other).await);
}

#[tokio::test]
async fn audit_sent_in_parts_counts_once() {
    let stage = Stage::set().await;
    let (whole, split) = (stage.open(honest()).await, stage.open_with(honest(), |card| card.max_outputs(1)).await);
    let student =
        stage.student(1_000 * PRICE, &[&whole, &split], |student| student.panel_size(2).selector(Cheapest)).await;
    let outputs = ["a good one", "a poor one"].repeat(4);
    let truth = Truth::good([true, false].repeat(4));
    let feedback = student.evaluate_known(&group(&outputs), &truth).await.unwrap();
    assert_eq!((feedback.judged_outputs(), feedback.paid.atomic()), (8, 16 * PRICE));
    let books = student.spending();
    let account = |booth: &Booth| books.account(booth.payee, "prose").unwrap();
    let audits = [account(&whole), account(&split)].map(|account| (account.audited, account.right));
    assert_eq!(audits, [(1, 1); 2]);
    assert_eq!((account(&whole).answered, account(&split).answered), (1, 8), "each part is an answer");
}

#[tokio::test]
async fn reports_are_added_once_and_move_the_estimate() {
    let stage = Stage::set().await;
    let booth = stage.open(honest()).await;
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student.selector(Thompson::seeded(1))).await;
    let said = |nonce: u8| {
        Evidence::new(
            booth.payee,
            "prose",
            Usdc::from_atomic(PRICE),
            1_700_000_000,
            CallOutcome::answered(0.9, Some(0.9), Some(true)),
        )
        .with_payment(EvidencePayment { payer: Address::repeat_byte(9), nonce: B256::repeat_byte(nonce) })
    };
    // Before there is work for the skill.
    assert!(student.add_report(said(1)).unwrap());
    assert!(!student.add_report(said(1)).unwrap(), "each payment supports one report");
    assert!(matches!(
        student.add_report(support::changed(said(2), |record| record.payment = None)),
        Err(EvidenceError::NotAReport)
    ));
    let of_itself = support::changed(said(2), |record| record.evaluator = Address::repeat_byte(9));
    assert!(matches!(student.add_report(of_itself), Err(EvidenceError::NotAReport)));
    assert_eq!(student.expected_accuracy(booth.payee, "prose"), None);
    student.evaluate(&single("a good one")).await.unwrap();
    let before = student.expected_accuracy(booth.payee, "prose").unwrap();
    let stranger = stage.open(honest()).await;
    assert_eq!(student.expected_accuracy(stranger.payee, "prose"), None);
    (3..9).for_each(|nonce| assert!(student.add_report(said(nonce)).unwrap()));
    assert!(student.expected_accuracy(booth.payee, "prose").unwrap() > before);
    assert_eq!(student.spending().accounts.len(), 1, "payments of others are not in the report");
    assert_eq!(student.spending().paid.atomic(), PRICE);
}
