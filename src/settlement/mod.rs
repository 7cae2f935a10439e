//! The machinery that moves EIP-3009 authorizations onto a chain.
//!
//! [`engine`] drives one payment from a signed transaction to an outcome. It leans on [`probe`] (everything worth knowing
//! about a payment in one `eth_call`), [`lane`] (the nonces of one key), [`fees`], [`broadcast`] (what an answer to a send
//! means), [`confirm`] (waiting for a receipt), [`judge`] (what the logs of a receipt prove) and [`credit`] (finding the
//! transfer when somebody else sent it). [`rpc`] and [`http`] carry the requests, [`pace`] knows how fast blocks come.

pub(crate) mod broadcast;
pub(crate) mod confirm;
pub(crate) mod credit;
pub(crate) mod engine;
pub(crate) mod fees;
pub(crate) mod http;
pub(crate) mod judge;
pub(crate) mod lane;
pub(crate) mod pace;
pub(crate) mod probe;
pub(crate) mod rpc;
pub(crate) mod transfer;
