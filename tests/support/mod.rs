//! What the integration tests share: chains to run on, a counting RPC proxy, authorizations signed by hand.
//!
//! ```text
//! chain.rs          what a test may ask of a chain; `on_every_chain!` runs one test on all of them
//! devnet.rs         the crate's own devnet
//! anvil.rs          Foundry's anvil with Circle's own USDC (circle.rs); tests on it need the feature `test-anvil`
//! token.rs          the token's ABI and one-line calls of it
//! authorization.rs  EIP-3009 messages, hashed and signed without this crate's own code
//! rpc_proxy.rs      counts and delays JSON-RPC requests, and makes them fail
//! shop.rs           a service that charges, and customers who pay it by hand
//! postgres.rs       a PostgreSQL server of the tests' own; tests on it need the feature `test-postgres`
//! scripted.rs       a facilitator that does as it is told, and a service that charges through it
//! programs.rs       the examples, compiled and run
//! sqlite_file.rs    files of SQLite as other versions leave them behind
//! ```

// Every test crate compiles all of this and uses its share.
#![allow(dead_code, unreachable_pub, unused_imports, unused_macros)]

pub mod anvil;
pub mod authorization;
pub mod chain;
pub mod circle;
pub mod devnet;
pub mod postgres;
pub mod programs;
pub mod rpc_proxy;
pub mod scripted;
pub mod shop;
pub mod sqlite_file;
pub mod token;
