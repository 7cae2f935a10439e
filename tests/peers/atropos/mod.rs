//! Tests against the API server of Atropos itself (PyPI `atroposlib`): client and server understand each other, and every group that the
//! example's environment pushes was paid for, whatever fails on the way.

mod client;
mod environment;
mod flags;
mod guide;
mod interrupted;
mod model;
mod open;
mod policy;
mod program;
mod proxy;
mod server;
mod signals;
mod trainer;
mod vouchers;
