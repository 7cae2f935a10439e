//! tower-x402 and the other Rust implementations of x402 at the same work, in one process, in turns.
//!
//! ```text
//! cd benches/peers
//! cargo run --release -- request          what one request costs, driven on one thread
//! cargo run --release -- chain            requests to a node and time, 50 ms away
//! cargo run --release -- copies           twenty copies of one payment at once
//! cargo run --release -- load             paid requests a second over loopback, and how long they take at half of that
//! cargo run --release -- paced            how long they take at 2,000 a second, and what of that is the machine's; twelve turns
//! cargo run --release -- paced 60         or so many
//! cargo run --release -- paced 60 sqlite  those with the ledger on disk alone
//! cargo run --release -- vouchers         paid requests a second by voucher, each payer with a channel on a chain
//! cargo run --release -- vouchers 800     over so many connections
//! cargo run --release -- own              the same with the facilitator that each brings, and a node that answers at once
//! cargo run --release -- memory           what 100,000 payments leave in memory; a process each
//! cargo run --release --features secp256k1 -- load
//! ```
//!
//! All are given the same handler, the same price, the same payments (made for each from its own 402), and a facilitator
//! that does the least that it can. What is compared, and what is not, says `BENCHMARKS.md`.

#[allow(dead_code, unreachable_pub)]
#[path = "../../../tests/support/hot_path.rs"]
mod hot_path;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../tests/support/rpc_proxy.rs"]
mod rpc_proxy;
#[allow(unreachable_pub)]
#[path = "../../../tests/support/thread_time.rs"]
mod thread_time;

mod at_once;
mod awake;
mod chain;
mod copies;
mod generator;
mod listening;
mod load;
mod memory;
mod onchain;
mod own;
mod paced;
mod payments;
mod plain_file;
mod request;
mod sellers;
mod vouchers;

use std::error::Error;

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["request"] => request::run(),
        ["chain"] => chain::run(),
        ["copies"] => copies::run(),
        ["load"] => load::run(),
        ["paced"] => paced::run(paced::TURNS),
        ["paced", turns] => paced::run(turns.parse()?),
        ["paced", turns, "sqlite"] => paced::run_sqlite(turns.parse()?),
        ["vouchers"] => vouchers::run(vouchers::CONNECTIONS),
        ["vouchers", connections] => vouchers::run(connections.parse()?),
        ["own"] => own::run(),
        ["node"] => own::node(),
        ["memory"] => memory::run(),
        ["memory", seller] => memory::of(seller),
        _ => Err("request, chain, copies, load, paced, vouchers, own or memory?".into()),
    }
}
