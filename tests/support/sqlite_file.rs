//! SQLite's files while nobody has them open: looked into, and made what other versions leave behind.

use std::path::Path;

use rusqlite::Connection;

/// Does this to a file.
pub fn change(path: &Path, sql: &str) {
    let file = Connection::open(path).unwrap();
    file.execute_batch(sql).unwrap();
    file.close().unwrap();
}

/// Makes a file one of this version, and returns its bytes.
pub fn set_version(path: &Path, version: i32) -> Vec<u8> {
    change(path, &format!("PRAGMA user_version = {version}"));
    std::fs::read(path).unwrap()
}
