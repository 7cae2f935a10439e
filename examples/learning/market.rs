//! The simulation of docs/market.md.

#![allow(dead_code)]

use super::baselines;

#[path = "../market/oracle.rs"]
mod oracle;
#[path = "../market/run.rs"]
pub(crate) mod run;
#[path = "../market/world.rs"]
pub(crate) mod world;
