//! The end of a process, and the next one.

use alloy_signer_local::PrivateKeySigner;
use tower_x402::{
    client::Journal,
    market::{Student, Truth, evidence::EvidenceLog},
};

use crate::{
    crowd::{Endpoint, garbage},
    stage::{PRICE, Stage, honest, single},
};

#[tokio::test]
async fn a_student_that_starts_from_the_same_files_has_the_same_books_and_the_same_money() {
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
        let student = Student::builder(payer).source(urls.clone()).panel(3).tasks(20).tasks_done(done).seed(1);
        let student = student.evidence(evidence).build().unwrap();
        assert_eq!(student.discover().await.found.len(), 3);
        student
    };

    let first = start(500 * PRICE, 0).await;
    for _ in 0..4 {
        first.evaluate_known(&single("a good one"), &Truth::good([true])).await.unwrap();
        first.settled().await;
    }
    let before = first.books();
    let (remaining, examined) = (first.budget().remaining(), first.evidence().examinations());
    let sightings = first.evidence().sightings();
    assert!(before.accounts.len() == 3 && before.paid.atomic() >= 8 * PRICE, "{before:?}");
    drop(first);

    let second = start(500 * PRICE, before.tasks).await;
    let after = second.books();
    assert_eq!((&after.accounts, after.paid, after.tasks), (&before.accounts, before.paid, before.tasks));
    assert_eq!((after.elsewhere.atomic(), second.budget().remaining()), (0, remaining));
    assert_eq!((second.evidence().examinations(), second.evidence().sightings()), (examined, sightings));
    second.evaluate(&single("a good one")).await.unwrap();
    let books = second.books();
    let mut income = 0;
    for booth in &booths {
        income += stage.income(booth).await;
    }
    assert_eq!((books.paid.atomic(), second.budget().spent().atomic()), (income, income));
    assert!(books.paid > before.paid);
}
