//! The tables, and how those of earlier versions become them.

use crate::sqlite::Schema;

pub(super) const SCHEMA: Schema = Schema {
    table: "payments",
    migrations: &[
        include_str!("migrations/0001_payments.sql"),
        include_str!("migrations/0002_transactions.sql"),
        include_str!("migrations/0003_in_order.sql"),
        include_str!("migrations/0004_numbered.sql"),
        include_str!("migrations/0005_progress.sql"),
    ],
};
