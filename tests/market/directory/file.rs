//! The file that a directory keeps.

use std::{error::Error as _, fs, path::Path};

use alloy_primitives::address;
use tower_x402::ledger::SqliteLedger;
use x402_market::directory::{CardQuery, DirectoryStore, ReportQuery};

use super::{
    charges::Tab,
    stage::{PRICE, Stage, checker},
};
use support::{devnet::DevnetChain, sqlite_file};

async fn open<'a>(chain: &'a DevnetChain, path: &Path) -> Stage<'a> {
    let store = DirectoryStore::open(path).await.unwrap();
    Stage::open(chain, store, |directory| directory.payment_checker(checker(chain))).await
}

/// Why it is not opened.
async fn refusal(path: &Path) -> String {
    let error = DirectoryStore::open(path).await.expect_err("it is not to be opened");
    error.source().expect("a cause").to_string()
}

/// One that was written with `sqlx`. Its tables are the same.
#[tokio::test]
async fn file_of_an_earlier_version_is_migrated() {
    let folder = tempfile::tempdir().unwrap();
    let [path, old] = ["directory.sqlite", "old.sqlite"].map(|name| folder.path().join(name));
    let chain = DevnetChain::start(None).await;
    let stage = open(&chain, &path).await;
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let evaluator = booth.payee.address();
    let report = stage.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
    assert_eq!(stage.post(&report).await.0, 201);
    // It is served to the end of the test; what is in the file now goes on in another one.
    for end in ["", "-wal"] {
        fs::copy(format!("{}{end}", path.display()), format!("{}{end}", old.display())).unwrap();
    }
    sqlite_file::note_as_sqlx(&old, 5);
    DirectoryStore::open(&old).await.expect("the first time").close().await;
    let again = open(&chain, &old).await;
    let read = async |stage: &Stage<'_>| {
        let reports = stage.client().reports(&ReportQuery::default()).await.unwrap().reports;
        (reports, stage.client().cards(&CardQuery::default()).await.unwrap().found)
    };
    let (before, after) = (read(&stage).await, read(&again).await);
    assert!(before == after && before.0.len() == 1 && before.1.len() == 1);
    assert_eq!(again.post(&report).await.0, 200, "it has report so before");
    let next = again.pay(&payer, evaluator, PRICE).await.report(evaluator, &payer).await;
    assert_eq!(again.post(&next).await.0, 201);
    assert!(read(&again).await.0[1].id > before.0[0].id);
}

/// One that was written when the directory was a part of tower-x402: `user_version` 3, in WAL mode.
#[tokio::test]
async fn file_written_by_tower_x402_0_1_is_opened_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.sqlite");
    fs::write(&path, include_bytes!("files/directory-0.1.0.sqlite")).unwrap();
    let chain = DevnetChain::start(None).await;
    let stage = open(&chain, &path).await;
    let reports = stage.client().reports(&ReportQuery::default()).await.unwrap().reports;
    let [old] = &reports[..] else { panic!("{reports:?}") };
    let evidence = &old.report.evidence;
    assert_eq!((old.id, &*evidence.skill, evidence.paid.atomic()), (1, "prose", 1_000));
    assert_eq!(evidence.evaluator, address!("2ac7088de47fa6ef56904ad72e06f86d2dd7234d"));
    let cards = stage.client().cards(&CardQuery::default()).await.unwrap().found;
    assert_eq!(cards.iter().map(|found| found.card.pay_to()).collect::<Vec<_>>(), [evidence.evaluator]);
    let (booth, payer) = (stage.booth(&["prose"]).await, stage.payer().await);
    let next = stage.pay(&payer, booth.payee.address(), PRICE).await.report(booth.payee.address(), &payer).await;
    assert_eq!(stage.post(&next).await.0, 201);
    let reports = stage.client().reports(&ReportQuery::default()).await.unwrap().reports;
    assert_eq!(reports.iter().map(|accepted| accepted.id).collect::<Vec<_>>(), [1, 2]);
    // A payment by voucher can be reported, too.
    let tab = Tab::open(&stage, booth.payee.address()).await;
    tab.claim(&stage, PRICE).await;
    assert_eq!(stage.post(&tab.report(PRICE, PRICE).await).await.0, 201);
}

#[tokio::test]
async fn file_of_a_later_version_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.sqlite");
    DirectoryStore::open(&path).await.unwrap().close().await;
    let before = sqlite_file::make_later(&path);
    let refusal = refusal(&path).await;
    assert!(refusal.contains("later version"), "{refusal}");
    assert!(fs::read(&path).unwrap() == before, "not a byte is changed");
}

#[tokio::test]
async fn file_of_another_kind_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let [ledger, list] = ["ledger.sqlite", "list"].map(|name| folder.path().join(name));
    SqliteLedger::open(&ledger).await.unwrap().close().await;
    let before = fs::read(&ledger).unwrap();
    let why = refusal(&ledger).await;
    assert!(why.contains("something else"), "{why}");
    assert!(fs::read(&ledger).unwrap() == before, "not a byte is changed");
    SqliteLedger::open(&ledger).await.expect("it is a ledger still");
    fs::write(&list, "a list of evaluators, kept by hand").unwrap();
    refusal(&list).await;
    assert_eq!(fs::read(&list).unwrap(), b"a list of evaluators, kept by hand");
    refusal(&folder.path().join("nowhere/directory.sqlite")).await;
}

#[tokio::test]
async fn file_is_locked_until_it_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.sqlite");
    for _ in 0..10 {
        let store = DirectoryStore::open(&path).await.expect("nobody has it");
        let refusal = refusal(&path).await;
        assert!(refusal.contains("locked"), "{refusal}");
        store.close().await;
        assert!(!folder.path().join("directory.sqlite-wal").exists(), "all is in the file itself");
    }
}
