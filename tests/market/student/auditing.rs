//! Audits after the verdict, and what a student learns from them.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use alloy_primitives::{Address, B256};
use tower_x402::Usdc;
use x402_market::{
    Feedback, StudentBuilder, StudentError, Submission, Task, Truth,
    evidence::{CallOutcome, Evidence, EvidenceError, EvidencePayment, Pairs},
    judge::{Judge, output_judge},
    selection::Thompson,
};

use support::student_stage::{Cheapest, PRICE, Stage, group, honest, says, single, task, verdict};

/// Says anything, very sure of itself.
fn coin() -> impl Judge {
    let tosses = AtomicU64::new(0);
    output_judge(move |_: Arc<Task>, _: String| {
        let toss = tosses.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 63;
        async move { Ok(verdict(if toss == 0 { 0.9 } else { 0.1 })) }
    })
}

/// Two good outputs and two poor ones.
const OUTPUTS: [&str; 4] = ["a good one", "a poor one", "another good one", "another poor one"];
const TRUTH: [bool; 4] = [true, false, true, false];

#[tokio::test]
async fn audits_tell_a_coin_from_an_evaluator_that_orders_rightly() {
    const TASKS: u64 = 80;
    let stage = Stage::set().await;
    let cheap = stage.open_with(coin(), |card| card.price("$0.0005")).await;
    let good = stage.open(honest()).await;
    let settings = |student: StudentBuilder| student.tasks(TASKS).selector(Thompson::seeded(1));
    let student = stage.student(400 * PRICE, &[&cheap, &good], settings).await;
    let (mut of_good, mut late) = (0, 0);
    for number in 0..TASKS {
        let feedback = student.evaluate(&group(&OUTPUTS)).await.unwrap();
        if number.is_multiple_of(4) {
            student.audit(&feedback, &Truth::good(TRUTH)).await.unwrap();
        }
        if number >= TASKS * 3 / 4 {
            late += 1;
            of_good += usize::from(feedback.hires.iter().any(|hire| hire.evaluator == good.payee));
        }
    }
    assert!(of_good * 10 >= late * 9, "{of_good} of {late}");
    let books = student.spending();
    let of = |payee| books.account(payee, "prose").unwrap();
    let (coin, honest) = (of(cheap.payee), of(good.payee));
    assert!(honest.audited >= 5 && honest.right == honest.pairs && honest.pairs == 4 * honest.audited, "{books:?}");
    assert!(coin.audited >= 1 && coin.right < coin.pairs, "{books:?}");
    assert_eq!(books.audits, TASKS / 4);
    let income = stage.income(&cheap).await + stage.income(&good).await;
    assert_eq!((books.paid.atomic(), books.held.atomic()), (income, 0));
    assert_eq!(books.paid, student.budget().spent());
}

#[tokio::test]
async fn audit_counts_for_everyone_who_judged_and_asks_others_about_the_same_outputs() {
    let stage = Stage::set().await;
    let booths = [stage.open(honest()).await, stage.open(honest()).await, stage.open(says(0.9)).await];
    let settings = |student: StudentBuilder| student.panel_size(2).tasks(200).selector(Thompson::seeded(1));
    let student = stage.student(2_000 * PRICE, &[&booths[0], &booths[1], &booths[2]], settings).await;
    let (mut audited, mut explored) = (0, 0);
    // Who is asked besides is drawn.
    for number in 0..20 {
        let feedback = student.evaluate(&group(&OUTPUTS)).await.unwrap();
        assert_eq!(feedback.audits, audited);
        if number == 0 {
            let unfit = student.audit(&feedback, &Truth::good([true])).await;
            assert_eq!(unfit.unwrap_err(), StudentError::TruthMismatch);
        }
        let report = student.audit(&feedback, &Truth::good(TRUTH)).await.unwrap();
        let hired: Vec<_> = feedback.hires.iter().map(|hire| hire.evaluator).collect();
        for audited in &report.evaluations {
            assert_eq!(audited.is_exploration, !hired.contains(&audited.evaluator));
            let is_constant = audited.evaluator == booths[2].payee;
            assert_eq!(audited.pairs, Pairs::new(if is_constant { 0 } else { 4 }, 0, 4).unwrap());
            explored += u64::from(audited.is_exploration);
        }
        assert!(report.evaluations.len() >= hired.len());
        audited += report.evaluations.len() as u64;
        let again = student.audit(&feedback, &Truth::good(TRUTH)).await.unwrap();
        assert!(again.evaluations.is_empty(), "it counts once");
    }
    assert!(explored > 0);
    assert_eq!(student.evidence().exploration_cost().atomic(), explored * 4 * PRICE);
    let books = student.spending();
    assert_eq!((books.audits, books.accounts.iter().map(|account| account.audited).sum::<u64>()), (20, audited));
}

#[tokio::test]
async fn feedback_kept_as_json_can_be_audited_later() {
    let stage = Stage::set().await;
    let booth = stage.open(honest()).await;
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student).await;
    let feedback = student.evaluate(&Submission::pair(task(), "a poor one", "a good one").unwrap()).await.unwrap();
    let kept = serde_json::to_string(&feedback).unwrap();
    let feedback: Feedback = serde_json::from_str(&kept).unwrap();
    let report = student.audit(&feedback, &Truth::good([false, true])).await.unwrap();
    assert_eq!(report.evaluations[0].pairs, Pairs::new(1, 0, 1).unwrap());
}

#[tokio::test]
async fn audit_of_equally_good_outputs_shows_nothing_without_anchors() {
    let stage = Stage::set().await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let shown = seen.clone();
    let blind = output_judge(move |_: Arc<Task>, output: String| {
        shown.lock().unwrap().push(output);
        async { Ok(verdict(0.9)) }
    });
    let (good, blind) = (stage.open(honest()).await, stage.open(blind).await);
    let settings = |student: StudentBuilder| student.selector(Cheapest).panel_size(2);
    let student = stage.student(1_000 * PRICE, &[&good, &blind], settings).await;
    let poor = group(&["a poor one", "another poor one"]);
    let feedback = student.evaluate(&poor).await.unwrap();
    let report = student.audit(&feedback, &Truth::good([false, false])).await.unwrap();
    assert!(report.evaluations.is_empty() && student.spending().audits == 0, "{report:?}");

    seen.lock().unwrap().clear();
    let anchored = poor.with_anchor("a good one", true).unwrap();
    let feedback = student.evaluate(&anchored).await.unwrap();
    assert_eq!((feedback.outputs.len(), feedback.paid.atomic()), (2, 2 * 3 * PRICE), "anchors are paid for");
    let mut sent = seen.lock().unwrap().clone();
    sent.sort_unstable();
    assert_eq!(sent, ["a good one", "a poor one", "another poor one"]);
    let report = student.audit(&feedback, &Truth::good([false, false])).await.unwrap();
    let of = |payee| report.evaluations.iter().find(|audited| audited.evaluator == payee).unwrap().pairs;
    assert_eq!(of(good.payee), Pairs::new(2, 0, 2).unwrap());
    assert_eq!(of(blind.payee), Pairs::new(0, 0, 2).unwrap());
}

#[tokio::test]
async fn identical_outputs_are_bought_once_and_a_uniform_group_not_at_all() {
    let stage = Stage::set().await;
    let booth = stage.open(honest()).await;
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student).await;
    let feedback = student.evaluate(&group(&["a good one", "a poor one", "a good one", "a good one"])).await.unwrap();
    assert_eq!((feedback.judged_outputs(), feedback.paid.atomic()), (4, 2 * PRICE));
    let rewards = feedback.rewards().unwrap();
    let third = 1.0 / 3.0_f64.sqrt();
    for (reward, expected) in rewards.iter().zip([third, -3.0 * third, third, third]) {
        assert!((reward - expected).abs() < 1e-5, "{rewards:?}");
    }
    let uniform = student.evaluate(&group(&["a good one"; 4])).await.unwrap();
    assert_eq!((uniform.outputs.len(), uniform.hires.len(), uniform.paid.atomic()), (4, 0, 0));
    assert_eq!(uniform.rewards(), None);
    assert!(student.audit(&uniform, &Truth::good([true; 4])).await.unwrap().evaluations.is_empty());
    let books = student.spending();
    assert_eq!((books.tasks, books.uniform, books.kept, books.paid.atomic()), (2, 1, 0, 2 * PRICE));
    assert_eq!(stage.income(&booth).await, 2 * PRICE);
}

#[tokio::test]
async fn audit_of_a_group_sent_in_parts_counts_the_pairs_within_each_part() {
    let stage = Stage::set().await;
    let (whole, split) = (stage.open(honest()).await, stage.open_with(honest(), |card| card.max_outputs(2)).await);
    let settings = |student: StudentBuilder| student.panel_size(2).selector(Cheapest);
    let student = stage.student(1_000 * PRICE, &[&whole, &split], settings).await;
    let feedback = student.evaluate(&group(&OUTPUTS)).await.unwrap();
    student.audit(&feedback, &Truth::good(TRUTH)).await.unwrap();
    let books = student.spending();
    let of = |payee| {
        let account = books.account(payee, "prose").unwrap();
        (account.answered, account.audited, account.pairs, account.right)
    };
    assert_eq!((of(whole.payee), of(split.payee)), ((1, 1, 4, 4), (2, 2, 2, 2)));
}

#[tokio::test]
async fn reports_are_added_once_and_move_the_estimate() {
    let stage = Stage::set().await;
    let booth = stage.open(honest()).await;
    let student = stage.student(1_000 * PRICE, &[&booth], |student| student.selector(Thompson::seeded(1))).await;
    let said = |nonce: u8| {
        let outcome = CallOutcome::answered(Pairs::new(4, 0, 4));
        Evidence::new(booth.payee, "prose", Usdc::from_atomic(PRICE), 1_700_000_000, outcome)
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
    assert_eq!(student.expected_worth(booth.payee, "prose"), None);
    student.evaluate(&single("a good one")).await.unwrap();
    let before = student.expected_worth(booth.payee, "prose").unwrap();
    let stranger = stage.open(honest()).await;
    assert_eq!(student.expected_worth(stranger.payee, "prose"), None);
    (3..9).for_each(|nonce| assert!(student.add_report(said(nonce)).unwrap()));
    assert!(student.expected_worth(booth.payee, "prose").unwrap() > before);
    assert_eq!(student.spending().accounts.len(), 1, "payments of others are not in the report");
    assert_eq!(student.spending().paid.atomic(), PRICE);
}
