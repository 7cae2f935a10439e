//! Charging through a facilitator over HTTP: an honest one, which is this crate's own service on the devnet, and bad ones.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bad;
mod echo;
mod honest;
mod lies;
mod service;
#[allow(unreachable_pub)]
mod stage;
#[path = "../support/mod.rs"]
mod support;
