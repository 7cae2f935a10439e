//! The tables, and how those of earlier versions become them.

use crate::sqlite::Schema;

pub(super) const SCHEMA: Schema = Schema {
    table: "cards",
    migrations: &[
        include_str!("migrations/0001_directory.sql"),
        include_str!("migrations/0002_prices.sql"),
        include_str!("migrations/0003_endpoints.sql"),
    ],
};

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::*;
    use crate::market::pricing::EXTENSION_URI;

    /// A file from before prices were kept, as it is opened now.
    #[test]
    fn what_was_offered_before_prices_were_kept_costs_what_its_cards_say() {
        let mut connection = Connection::open_in_memory().unwrap();
        connection.execute_batch(SCHEMA.migrations[0]).unwrap();
        connection
            .execute_batch(
                "INSERT INTO cards VALUES (1, 'a', 'a', x'01', 1000, '{}', 0, 0, 0, 1), (2, 'b', 'b', x'01', 10, '{}', 0, 0, 0, 1);
                 INSERT INTO card_skills VALUES ('prose', 1), ('poetry', 2);
                 INSERT INTO offered VALUES (x'01', 'prose', 0), (x'01', 'poetry', 0), (x'01', 'old', 0), (x'02', 'lost', 0);
                 PRAGMA user_version = 1;",
            )
            .unwrap();
        SCHEMA.bring_up_to_date(&mut connection).unwrap();
        let mut select = connection.prepare("SELECT skill, price FROM offered ORDER BY skill").unwrap();
        let prices = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        let prices: Vec<(String, i64)> = prices.map(Result::unwrap).collect();
        let expected = [("lost", 0), ("old", 10), ("poetry", 10), ("prose", 1_000)];
        assert_eq!(prices, expected.map(|(skill, price)| (skill.to_owned(), price)));
    }

    /// A file from before endpoints were kept.
    #[test]
    fn the_endpoints_of_cards_are_read_from_what_was_kept_of_them() {
        let mut connection = Connection::open_in_memory().unwrap();
        SCHEMA.migrations[..2].iter().for_each(|migration| connection.execute_batch(migration).unwrap());
        let (ours, endpoint) = (EXTENSION_URI, "http://a.example/evaluate");
        let card = format!(
            r#"{{"capabilities": {{"extensions": [{{"uri": "other", "params": {{"endpoint": "elsewhere"}}}}, {{"uri": "{ours}",
            "params": {{"endpoint": "{endpoint}"}}}}]}}}}"#
        );
        let insert = "INSERT INTO cards VALUES (?1, ?1, 'a', x'01', 1000, ?2, 0, 0, 0, 1)";
        for (id, card) in [(1, &*card), (2, "{}")] {
            connection.execute(insert, (id, card)).unwrap();
        }
        connection.pragma_update(None, "user_version", 2).unwrap();
        SCHEMA.bring_up_to_date(&mut connection).unwrap();
        let mut select = connection.prepare("SELECT endpoint FROM cards ORDER BY id").unwrap();
        let endpoints = select.query_map([], |row| row.get::<_, String>(0)).unwrap();
        assert_eq!(endpoints.map(Result::unwrap).collect::<Vec<_>>(), [endpoint, ""]);
    }
}
