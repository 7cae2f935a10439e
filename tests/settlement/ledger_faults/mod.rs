//! Every method of the ledger fails once, in every flow, at every point.
//!
//! Each flow of a payment (`flows.rs`) is first gone without faults, and its calls of the ledger are noted. Then it is gone again
//! once for every call, with that call failing: before it was done, after it was done, and as the first of an outage of twenty
//! seconds. The client comes again at once, or leaves with the answer it has and comes again when everything has happened that
//! happens without it. In the end (`scene.rs`) the chain and the ledger tell whether a payment was
//!
//! - **lost**: charged and never answered, or answered and never charged, or the ledger has it wrong;
//! - **doubled**: the work was done twice, or more was paid than was charged for. Work that was done while the ledger was away
//!   for long, so that nothing could be kept of it, is done again;
//! - told **untrue**: "nothing was charged" or "failed" of a payment that is charged then, or later without being presented again;
//!   settled by a transaction that did not pay it; 200 without a receipt.
//!
//! A point is **missed** if its call did not fail: that is a failure of the test, too. This prints the tables, one for each test
//! (`LEDGER_FAULTS_FLOW` and `LEDGER_FAULTS_CALL` choose some of it by name):
//!
//! ```text
//! cargo test -p tower-x402-tests --test settlement -- --nocapture no_call_that_fails
//! ```
//!
//! The stores behind the ledgers fail as they really do in `backends.rs`.

mod backends;
mod flows;
mod scene;
mod table;
