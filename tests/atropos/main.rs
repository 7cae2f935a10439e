//! Against the API server of Atropos itself (PyPI `atroposlib`): does it understand us and we it, and is what the example's
//! environment hands over paid for, whatever happens on the way?

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub)]

mod client;
#[allow(dead_code)]
#[path = "../student/crowd.rs"]
mod crowd;
mod environment;
mod interrupted;
mod model;
mod program;
mod proxy;
mod server;
#[allow(dead_code)]
#[path = "../student/stage.rs"]
mod stage;
#[path = "../support/mod.rs"]
mod support;
mod trainer;
