//! Bytes: test vectors, recorded exchanges, hostile input, and the pages that list them.

mod bad_peers_page;
mod fuzz_corpus;
mod peers_page;
mod permits;
mod replayed_exchanges;
mod upto;
mod vouchers;
