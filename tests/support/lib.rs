//! What the tests share: chains to run on, a counting RPC proxy, sellers and customers, authorizations signed by hand.
//!
//! ```text
//! chain.rs          what a test may ask of a chain; `on_every_chain!` runs one test on all of them
//! devnet.rs         the crate's own devnet
//! anvil.rs          Foundry's anvil with Circle's own USDC (circle.rs); tests on it need the feature `test-anvil`
//! token.rs          the token's ABI and one-line calls of it
//! authorization.rs  EIP-3009 messages, hashed and signed without this crate's own code
//! rpc_proxy.rs      counts and delays JSON-RPC requests, and makes them fail
//! eventually.rs     waiting for what must happen, with an end
//! engine_stage.rs   an on-chain facilitator on the devnet, and payments for it
//! world.rs          a seller on the devnet with all that a test turns on it, and payers by each scheme
//! shop.rs           a service that charges, and customers who pay it by hand
//! script.rs         a server that answers by a script, for the paying client
//! student_stage.rs  evaluators for hire on the devnet, and a student; crowd.rs has their judges
//! gated_ledger.rs   a ledger that holds calls back until the test lets them go on
//! around_ledger.rs  something before, after or in place of every call of a ledger; faulty_ledger.rs lets one call fail
//! postgres.rs       a PostgreSQL server of the tests' own; tests on it need the feature `test-postgres`
//! power_cut.rs      a process whose files lose what was not synced (power_cut.c)
//! scripted.rs       a facilitator that does as it is told, and a service that charges through it
//! programs.rs       the examples and the command x402, compiled and run
//! sqlite_file.rs    files of SQLite as other versions leave them behind
//! uploads.rs        a seller over real connections, and our clients that pay it for long bodies
//! numbers.rs        what was reported to the metrics recorder
//! hot_path.rs       one request and nothing around it, for what counts and times it (thread_time.rs)
//! ```

// For tests, not for the world.
#![allow(clippy::new_without_default, clippy::len_without_is_empty)]

use std::path::PathBuf;

pub mod anvil;
pub mod around_ledger;
pub mod authorization;
pub mod chain;
pub mod circle;
pub mod crowd;
pub mod devnet;
pub mod engine_stage;
pub mod escrow;
pub mod eventually;
pub mod faulty_ledger;
pub mod gated_ledger;
pub mod hot_path;
pub mod numbers;
pub mod permit;
pub mod postgres;
pub mod power_cut;
pub mod programs;
pub mod rpc_proxy;
pub mod script;
pub mod scripted;
pub mod shop;
pub mod sqlite_file;
pub mod student_stage;
pub mod thread_time;
pub mod token;
pub mod uploads;
pub mod world;

/// Returns the value after this change.
pub fn changed<T>(mut value: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut value);
    value
}

/// The root of the checkout.
pub fn repository() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
