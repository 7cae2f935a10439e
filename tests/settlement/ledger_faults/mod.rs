//! Every method of the ledger fails once, in every flow, at every point.
//!
//! Each flow of a payment (`flows.rs`) first runs without faults, and its calls of the ledger are recorded. Then it runs again once for
//! every call, and that call fails: before it takes effect, after it took effect, or as the first of an outage of twenty seconds.
//! The client retries at once, or only after all background work is done. In the end (`scene.rs`) the chain and the ledger show
//! whether a payment was
//!
//! - **lost**: charged and never answered, answered and never charged, or wrong in the ledger;
//! - **doubled**: the work was done twice, or more was paid than the price. Work whose result could not be stored because the ledger
//!   was away for long may be done again;
//! - reported **untruly**: "nothing was charged" or "failed" for a payment that is charged all the same without being presented again;
//!   "settled" with a transaction that did not pay it; 200 without a receipt.
//!
//! A point is **missed** if its call did not fail, and that fails the test, too. This command prints the tables, one for each test
//! (`LEDGER_FAULTS_FLOW` and `LEDGER_FAULTS_CALL` select a flow and a call by name):
//!
//! ```text
//! cargo test -p tower-x402-tests --test settlement -- --nocapture failed_ledger_call
//! ```
//!
//! `backends.rs` makes the real stores fail.

mod backends;
mod flows;
mod scene;
mod table;
