//! Panels that answer: verdicts, splitting, pairs, concurrency and cancellation.

use std::{collections::BTreeSet, sync::atomic::Ordering, time::Duration};

use serde_json::Value;
use tower_x402::Usdc;
use x402_market::{MAX_OUTPUTS, StudentBuilder, StudentError, Submission};

use support::crowd::{Endpoint, praise};
use support::student_stage::{Cheapest, PRICE, Stage, group, honest, single, task};

#[tokio::test]
async fn panel_judges_a_group_and_every_unit_is_reported() {
    let stage = Stage::set().await;
    let booths = [stage.open(honest()).await, stage.open(honest()).await];
    let student = stage.student(1_000 * PRICE, &[&booths[0], &booths[1]], |student| student.panel_size(2)).await;
    let feedback = student.evaluate(&group(&["a good one", "a poor one", "another good one"])).await.unwrap();

    let scores: Vec<_> = feedback.outputs.iter().map(|output| output.verdict.unwrap().score.get()).collect();
    assert_eq!(scores, [0.9, 0.1, 0.9]);
    assert_eq!(&*feedback.task, "mine");
    assert_eq!(feedback.hires.len(), 2);
    assert!(feedback.outputs.iter().all(|output| output.members.len() == 2));
    assert!(feedback.hires.iter().all(|hire| hire.payments[0].transaction.is_some()));
    assert_eq!(feedback.paid.atomic(), 6 * PRICE);

    let books = student.spending();
    assert_eq!((books.tasks, books.paid, books.held.atomic(), books.elsewhere.atomic()), (1, feedback.paid, 0, 0));
    assert_eq!(books.paid, student.budget().spent());
    for booth in &booths {
        let account = books.account(booth.payee, "prose").unwrap();
        assert_eq!((account.answered, account.paid.atomic()), (1, stage.income(booth).await));
        assert_eq!(account.paid.atomic(), 3 * PRICE);
    }
}

#[tokio::test]
async fn evaluators_see_random_ids_in_place_of_the_tasks_own() {
    let stage = Stage::set().await;
    let end = Endpoint::default();
    let booths = [stage.answering(&end, praise).await, stage.answering(&end, praise).await];
    let student = stage.student(1_000 * PRICE, &[&booths[0], &booths[1]], |student| student.panel_size(2)).await;
    for _ in 0..2 {
        let feedback = student.evaluate(&single("a good one")).await.unwrap();
        assert_eq!((&*feedback.task, feedback.outputs[0].members.len()), ("mine", 2));
    }
    let id = |body: &Value| body["task"]["id"].as_str().unwrap().to_owned();
    let ids: BTreeSet<_> = end.seen.lock().unwrap().iter().map(id).collect();
    assert_eq!(ids.len(), 4, "each evaluator sees another one of each submission: {ids:?}");
    assert!(ids.iter().all(|id| id.len() == 16 && id.bytes().all(|digit| digit.is_ascii_hexdigit())), "{ids:?}");
}

#[tokio::test]
async fn panel_members_are_asked_at_once() {
    let stage = Stage::set().await;
    let ends = [Endpoint::holding(), Endpoint::holding(), Endpoint::holding()];
    let mut booths = Vec::new();
    for end in &ends {
        booths.push(stage.answering(end, praise).await);
    }
    let booths: Vec<_> = booths.iter().collect();
    let student = stage.student(1_000 * PRICE, &booths, |student| student.panel_size(3)).await;
    let asking = tokio::spawn({
        let student = student.clone();
        async move { student.evaluate(&single("a good one")).await }
    });
    // Nobody answers before all have been asked.
    for end in &ends {
        support::eventually::in_time("every evaluator is asked", end.arrived.notified()).await;
    }
    ends.iter().for_each(|end| end.let_go.notify_one());
    assert_eq!(asking.await.unwrap().unwrap().outputs[0].members.len(), 3);
}

#[tokio::test]
async fn large_group_is_sent_in_parts() {
    let stage = Stage::set().await;
    let narrow = stage.open_with(honest(), |card| card.max_outputs(3)).await;
    let student = stage.student(1_000 * PRICE, &[&narrow], |student| student).await;
    let output = |n| format!("{} one, number {n}", if n % 3 == 0 { "a good" } else { "a poor" });
    let outputs = Submission::group(task(), (0..MAX_OUTPUTS).map(output)).unwrap();
    let feedback = student.evaluate(&outputs).await.unwrap();
    for (number, output) in feedback.outputs.iter().enumerate() {
        let expected = if number % 3 == 0 { 0.9 } else { 0.1 };
        assert_eq!(output.verdict.unwrap().score.get(), expected, "output {number}");
    }
    assert_eq!((feedback.hires.len(), feedback.hires[0].payments.len()), (1, 22));
    assert_eq!(feedback.paid.atomic(), 64 * PRICE);
    assert_eq!((student.spending().paid.atomic(), stage.income(&narrow).await), (64 * PRICE, 64 * PRICE));
    // Of one size, so that none is too small to be compared.
    student.evaluate(&group(&["one", "two", "three", "four"])).await.unwrap();
    let sizes: Vec<_> = student.evidence().records().iter().rev().take(2).map(|seen| seen.paid).collect();
    assert_eq!(sizes, [Usdc::from_atomic(2 * PRICE); 2]);
    // A pair would be no pair in parts.
    let single_minded = stage.open_with(honest(), |card| card.max_outputs(1)).await;
    let student = stage.student(1_000 * PRICE, &[&single_minded], |student| student).await;
    let pair = Submission::pair(task(), "a good one", "a poor one").unwrap();
    let feedback = student.evaluate(&pair).await.unwrap();
    assert_eq!((feedback.hires.len(), feedback.rewards()), (0, None));
    assert_eq!(student.spending().kept, 1);
}

#[tokio::test]
async fn better_output_of_a_pair_gets_the_higher_reward() {
    let stage = Stage::set().await;
    let booth = stage.open(honest()).await;
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student).await;
    let pair = Submission::pair(task(), "a poor one", "a good one").unwrap();
    assert_eq!(student.evaluate(&pair).await.unwrap().rewards().unwrap(), [-1.0, 1.0]);
}

#[tokio::test]
async fn longest_durations_are_accepted() {
    let stage = Stage::set().await;
    let booth = stage.open(honest()).await;
    let patient = |student: StudentBuilder| student.selector(Cheapest).deadline(Duration::MAX);
    let student = stage.student(100 * PRICE, &[&booth], patient).await;
    assert_eq!(student.evaluate(&single("a good one")).await.unwrap().judged_outputs(), 1);
}

#[tokio::test]
async fn concurrent_submissions_promise_no_unit_twice() {
    const AFFORDED: u64 = 25;
    let stage = Stage::set().await;
    let booths = [stage.open(honest()).await, stage.open(honest()).await];
    let settings = |student: StudentBuilder| student.selector(Cheapest).tasks(40);
    let student = stage.student(AFFORDED * PRICE, &[&booths[0], &booths[1]], settings).await;
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let student = student.clone();
        all.spawn(async move { student.evaluate(&single("a good one")).await });
    }
    let all = all.join_all().await;
    let judged = all.iter().flatten().filter(|feedback| feedback.judged_outputs() == 1).count() as u64;
    let poor = all.iter().filter(|result| matches!(result, Err(StudentError::BudgetExhausted { .. }))).count() as u64;
    assert_eq!((judged, poor), (AFFORDED, 40 - AFFORDED), "{:?}", all.iter().flatten().collect::<Vec<_>>());
    let books = student.spending();
    assert_eq!((books.tasks, books.paid.atomic(), books.promised.atomic()), (AFFORDED, AFFORDED * PRICE, 0));
    assert_eq!(stage.income(&booths[0]).await + stage.income(&booths[1]).await, AFFORDED * PRICE);
    assert_eq!(student.budget().remaining().atomic(), 0);
}

#[tokio::test]
async fn dropped_evaluation_is_still_reported() {
    let stage = Stage::set().await;
    let slow = Endpoint::holding();
    let booth = stage.answering(&slow, praise).await;
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student).await;
    let asking = tokio::spawn({
        let student = student.clone();
        async move { student.evaluate(&single("a good one")).await }
    });
    support::eventually::in_time("the slow one is asked", slow.arrived.notified()).await;
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    slow.let_go.notify_one();
    student.wait_until_idle().await;
    let account = student.spending().account(booth.payee, "prose").unwrap().clone();
    assert_eq!((account.answered, account.timeouts, account.paid.atomic()), (1, 0, PRICE));
    assert_eq!(stage.income(&booth).await, PRICE);
}

#[tokio::test]
async fn dropped_evaluation_is_not_paid_and_blames_no_evaluator() {
    let stage = Stage::set().await;
    let slow = Endpoint::default();
    slow.bars.store(true, Ordering::Relaxed);
    let booth = stage.answering(&slow, praise).await;
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student).await;
    let asking = tokio::spawn({
        let student = student.clone();
        async move { student.evaluate(&single("a good one")).await }
    });
    support::eventually::in_time("it is asked", slow.knocked.notified()).await;
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    slow.opened.notify_one();
    student.wait_until_idle().await;
    assert_eq!((student.budget().spent(), student.budget().reserved()), (Usdc::ZERO, Usdc::ZERO));
    assert!(slow.seen.lock().unwrap().is_empty());
    let books = student.spending();
    assert!(books.accounts.is_empty() && books.promised == Usdc::ZERO && student.evidence().is_empty(), "{books:?}");
}
