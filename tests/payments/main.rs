//! Charging and paying: the wire, the layer that charges, the client that pays.

mod client;
mod other_transport;
mod server;
mod wire;
