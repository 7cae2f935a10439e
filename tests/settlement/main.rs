//! What happens to a payment once it is verified: the ledger, the settlement engine, other people's facilitators, and what an
//! operator sees of them.

mod batch_settler;
mod batching;
mod channels;
mod devnet;
mod engine;
mod escrow;
mod ledger;
mod ledger_faults;
mod lookup;
mod ops;
mod remote;
mod rpc_proxy;
mod token;
