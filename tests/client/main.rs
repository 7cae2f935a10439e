//! The paying client, over real connections.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod bodies;
mod concurrent;
mod discovery;
mod hostile;
mod layer;
mod middleware;
mod reconcile;
mod script;
mod status;
#[path = "../support/mod.rs"]
mod support;
mod unclear;
mod v1;
