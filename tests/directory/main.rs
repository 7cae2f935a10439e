//! A directory: who is listed, whose voice is admitted, and what readers make of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod cards;
mod evidence;
mod file;
mod forging;
mod nodes;
mod process;
mod reorg;
mod reputation;
mod service;
mod stage;
#[path = "../support/mod.rs"]
mod support;
