//! Against the API server of Atropos itself (PyPI `atroposlib`): does it understand us and we it, and is what the example's
//! environment hands over paid for, whatever happens on the way?

mod client;
mod environment;
mod flags;
mod interrupted;
mod model;
mod open;
mod program;
mod proxy;
mod server;
mod signals;
mod trainer;
