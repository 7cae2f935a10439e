//! Clients of other projects pay our evaluator, our student pays their servers, and each settles for the other: the official
//! TypeScript and Python packages, the legacy v1 packages, r402 and x402-rs at pinned versions (in this directory), on anvil with
//! Circle's own USDC. `docs/peers.md` has the results.
//!
//! ```text
//! programs.rs       the clients, servers and facilitators
//! stage.rs          payments, and the checks after them
//! clients.rs        their clients pay our evaluator
//! servers.rs        our student pays their servers
//! facilitators.rs   their facilitators settle for us, ours for them
//! atropos           the API server of Atropos takes what our environment buys
//! bazaar.rs         catalogues: their client reads ours, ours is listed by theirs
//! browser_directory a person reads a directory in Chromium
//! browser_wallet    a person pays in Chromium
//! channels.rs       our buyer pays by vouchers
//! command.rs        their clients pay a service in Python, for which the command x402 charges
//! comparison.rs     the same payments, presented the same way to their server and to ours
//! permits.rs        their clients pay our seller by permit of Permit2, and their facilitators settle it
//! operator_page     the operator looks at the page of the command x402
//! fidelity.rs       the devnet's token answers as Circle's does
//! identifiers.rs    the extension payment-identifier
//! vouchers.rs       their clients pay our seller by vouchers
//! upto.rs           at most a price: their clients, servers and facilitators, and ours
//! uploads           long bodies, refused while they are sent; nginx.rs is the proxy before it
//! cors              a script on another origin pays in Chromium
//! proxies           a seller behind nginx
//! recorder.rs       records the exchanges, with TOWER_X402_RECORD=1, for tests/exchanges
//! ```

mod atropos;
mod bazaar;
mod browser_directory;
mod browser_wallet;
mod channels;
mod clients;
mod command;
mod comparison;
mod cors;
mod facilitators;
mod fidelity;
mod identifiers;
mod nginx;
mod operator_page;
mod permits;
mod programs;
mod proxies;
mod recorder;
mod servers;
mod stage;
mod uploads;
mod upto;
mod vouchers;
