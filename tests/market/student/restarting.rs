//! Restarts: what a student knows again from its files.

use std::time::{SystemTime, UNIX_EPOCH};

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use tower_x402::client::Journal;
use x402_market::{
    Student, Truth,
    evidence::{CallOutcome, Evidence, EvidenceLog, EvidencePayment, Pairs},
    selection::Thompson,
};

use support::crowd::{Endpoint, garbage};
use support::student_stage::{PRICE, Stage, group, honest, single};

#[tokio::test]
async fn restarted_student_has_the_same_report_and_budget() {
    let stage = Stage::set().await;
    let folder = tempfile::tempdir().unwrap();
    let (journal, log) = (folder.path().join("journal"), folder.path().join("evidence"));
    let babbler = stage.answering(&Endpoint::default(), garbage).await;
    let booths = [stage.open(honest()).await, stage.open(honest()).await, babbler];
    let urls: Vec<_> = booths.iter().map(|booth| booth.url.clone()).collect();
    let key = PrivateKeySigner::random();
    let start = async |units: u64, done: u64| {
        let payer = stage.payer_with(units, key.clone(), Journal::open(&journal).unwrap()).await;
        let evidence = EvidenceLog::open(&log, 1_000).unwrap();
        let student = Student::builder(payer).source(urls.clone()).panel_size(3).tasks(20).tasks_done(done).seed(1);
        let student = student.evidence(evidence).build().unwrap();
        assert_eq!(student.discover().await.found.len(), 3);
        student
    };

    let first = start(500 * PRICE, 0).await;
    for _ in 0..4 {
        let feedback = first.evaluate(&group(&["a good one", "a poor one"])).await.unwrap();
        first.audit(&feedback, &Truth::good([true, false])).await.unwrap();
    }
    let before = first.spending();
    let (remaining, examined) = (first.budget().remaining(), first.evidence().exploration_cost());
    assert!(before.accounts.len() == 3 && before.paid.atomic() >= 8 * PRICE, "{before:?}");
    drop(first);

    let second = start(500 * PRICE, before.tasks).await;
    let after = second.spending();
    assert_eq!((&after.accounts, after.paid, after.tasks), (&before.accounts, before.paid, before.tasks));
    assert_eq!((after.elsewhere.atomic(), second.budget().remaining()), (0, remaining));
    assert_eq!(second.evidence().exploration_cost(), examined);
    second.evaluate(&single("a good one")).await.unwrap();
    let books = second.spending();
    let mut income = 0;
    for booth in &booths {
        income += stage.income(booth).await;
    }
    assert_eq!((books.paid.atomic(), second.budget().spent().atomic()), (income, income));
    assert!(books.paid > before.paid);
}

#[tokio::test]
async fn reports_do_not_displace_own_evidence() {
    const RECORDS: usize = 50;
    let stage = Stage::set().await;
    let folder = tempfile::tempdir().unwrap();
    let files = ["journal", "evidence", "heard"].map(|name| folder.path().join(name));
    let booth = stage.open(honest()).await;
    let key = PrivateKeySigner::random();
    let start = async || {
        let payer = stage.payer_with(500 * PRICE, key.clone(), Journal::open(&files[0]).unwrap()).await;
        let [evidence, heard] = [1, 2].map(|file| EvidenceLog::open(&files[file], RECORDS).unwrap());
        let student =
            Student::builder(payer).source(vec![booth.url.clone()]).tasks(20).seed(1).selector(Thompson::seeded(1));
        let student = student.evidence(evidence).reports(heard).build().unwrap();
        student.discover().await;
        student
    };
    let first = start().await;
    for _ in 0..6 {
        let feedback = first.evaluate(&group(&["a good one", "a poor one"])).await.unwrap();
        first.audit(&feedback, &Truth::good([true, false])).await.unwrap();
    }
    let (books, believed) = (first.spending(), first.expected_worth(booth.payee, "prose").unwrap());
    assert!(believed > 0.5 && first.evidence().len() == 6, "{believed} {books:?}");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    for number in 0..4 * RECORDS as u64 {
        let payer = Address::left_padding_from(&(1 + number % 7).to_be_bytes());
        let payment = EvidencePayment { payer, nonce: U256::from(number).into() };
        let outcome = CallOutcome::answered(Pairs::new(0, 1, 1));
        // As far ahead as clocks may be, so that what is dropped makes everything of now too old.
        let said = Evidence::new(booth.payee, "prose", books.paid, now + 200, outcome).with_payment(payment);
        assert!(first.add_report(said).unwrap() || number >= RECORDS as u64);
    }
    assert!(first.reports().len() <= RECORDS && first.evidence().len() == 6);
    let flooded = first.expected_worth(booth.payee, "prose").unwrap();
    assert!(flooded > 0.3, "{flooded}");
    let feedback = first.evaluate(&group(&["a good one", "a poor one"])).await.unwrap();
    first.audit(&feedback, &Truth::good([true, false])).await.unwrap();
    let books = first.spending();
    assert_eq!(books.account(booth.payee, "prose").unwrap().audited, 7);
    drop(first);

    let second = start().await;
    assert_eq!((&second.spending().accounts, second.spending().elsewhere.atomic()), (&books.accounts, 0));
    let recalled = second.expected_worth(booth.payee, "prose").unwrap();
    assert!(recalled > 0.3, "{recalled}");
}

#[tokio::test]
async fn audit_sent_in_parts_counts_the_same_after_a_restart() {
    let stage = Stage::set().await;
    let booth = stage.open_with(honest(), |card| card.max_outputs(2)).await;
    let payer = stage.payer(1_000 * PRICE).await;
    let start = |evidence: EvidenceLog| {
        Student::builder(payer.clone())
            .source(vec![booth.url.clone()])
            .evidence(evidence)
            .tasks(20)
            .seed(1)
            .build()
            .unwrap()
    };
    let first = start(EvidenceLog::in_memory(100));
    first.discover().await;
    let outputs = group(&["a good one", "a poor one", "another good one", "another poor one"]);
    let feedback = first.evaluate(&outputs).await.unwrap();
    let audited = first.audit(&feedback, &Truth::good([true, false, false, true])).await.unwrap();
    assert_eq!((first.evidence().len(), audited.evaluations.len()), (2, 2));
    assert!(first.audit(&feedback, &Truth::good([true; 4])).await.unwrap().evaluations.is_empty(), "it was audited");
    let second = start(first.evidence().clone());
    second.discover().await;
    // Their selectors look at cards when they choose.
    for student in [&first, &second] {
        student.evaluate(&outputs).await.unwrap();
    }
    let [before, after] = [&first, &second].map(|student| student.expected_worth(booth.payee, "prose").unwrap());
    assert!((before - after).abs() < 0.01, "{before} {after}");
}
