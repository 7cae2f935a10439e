//! Against the API server of Atropos itself (PyPI `atroposlib`): does it understand us, and we it?

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;
mod server;
