//! Charging and paying: the wire, the layer that charges, the client that pays.

mod client;
mod server;
mod wire;
