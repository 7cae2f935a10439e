//! The file that a directory keeps.

use std::{error::Error as _, fs, path::Path};

use support::sqlite_file;
use tower_x402::ledger::SqliteLedger;
use x402_directory::DirectoryStore;

/// Why it is not opened.
async fn refusal(path: &Path) -> String {
    let error = DirectoryStore::open(path).await.expect_err("it is not to be opened");
    error.source().expect("a cause").to_string()
}

#[tokio::test]
async fn file_of_another_version_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.sqlite");
    DirectoryStore::open(&path).await.unwrap().close().await;
    for version in [-1, 0, 2, 5] {
        let before = sqlite_file::set_version(&path, version);
        let refusal = refusal(&path).await;
        assert!(refusal.contains("another version") && refusal.contains("start with a new file"), "{refusal}");
        assert!(fs::read(&path).unwrap() == before, "not a byte is changed");
    }
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
