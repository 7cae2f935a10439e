//! SQLite's files while nobody has them open: looked into, and made what other versions leave behind.

use std::path::Path;

use rusqlite::Connection;

/// Does this to a file.
pub fn change(path: &Path, sql: &str) {
    let file = Connection::open(path).unwrap();
    file.execute_batch(sql).unwrap();
    file.close().unwrap();
}

/// Has a file say how many migrations it has seen as the first versions did, which used `sqlx`: in a table, with checksums.
pub fn note_as_sqlx(path: &Path, migrations: u32) {
    let mut sql = "CREATE TABLE _sqlx_migrations (
            version BIGINT PRIMARY KEY,
            description TEXT NOT NULL,
            installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
            success BOOLEAN NOT NULL,
            checksum BLOB NOT NULL,
            execution_time BIGINT NOT NULL
        );
        PRAGMA user_version = 0;"
        .to_owned();
    for version in 1..=migrations {
        sql += &format!(
            "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
             VALUES ({version}, 'some', TRUE, randomblob(48), 1000000);"
        );
    }
    change(path, &sql);
}

/// Makes a file one of a later version; what is in it then.
pub fn make_later(path: &Path) -> Vec<u8> {
    change(path, "PRAGMA user_version = 1000");
    std::fs::read(path).unwrap()
}
