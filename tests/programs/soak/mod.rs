//! Thousands of payments in all flows, while connections, RPC calls and the chain fail at random. In the end the books balance to the
//! atomic unit, no outcome is unknown, and every payment was worked on once and settled once.
//!
//! ```text
//! plan.rs      the size of a run, from the environment
//! dice.rs      randomness from a seed
//! market.rs    a seller on a chain, in all three flows
//! buyer.rs     a buyer that sends copies, disconnects and retries
//! weather.rs   reorganizations, fee spikes and stalls
//! books.rs     the invariants that hold in the end
//! process.rs   a selling process
//! replicas.rs  several processes on one database
//! channels/    the same with payment channels: deposits are claims, refunds and what is left
//! ```
//!
//! `.ci/run` runs small sizes. These commands run the full size and print the figures:
//!
//! ```text
//! cargo test --release -p tower-x402-tests --test programs -- --ignored --nocapture soak::devnet
//! cargo test --release -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture soak::replicas
//! cargo test --release -p tower-x402-tests --features test-postgres --test programs -- --ignored --nocapture soak::channels
//! (cd tests/peers && npm install) && cargo test --release -p tower-x402-tests --features test-peers --test programs -- --ignored --nocapture soak::anvil
//! ```
//!
//! `SOAK_PAYMENTS`, `SOAK_PAYERS`, `SOAK_AT_ONCE`, `SOAK_FAULTS` (percent of the RPC calls) and `SOAK_SEED` change any of them.

mod books;
mod buyer;
#[cfg(feature = "test-postgres")]
mod channels;
mod dice;
mod market;
mod plan;
#[cfg(feature = "test-postgres")]
mod process;
#[cfg(feature = "test-postgres")]
mod replicas;
mod weather;

use std::{sync::Arc, time::Duration};

use support::devnet::DevnetChain;

use self::{market::Market, plan::Plan};

/// Blocks come quickly, so that reorganizations are frequent and final blocks not far away.
const BLOCK_TIME: Duration = Duration::from_millis(100);
const FINALITY_DEPTH: u64 = 20;

async fn on_devnet(plan: Plan) {
    let chain = DevnetChain::start_with(Some(BLOCK_TIME), FINALITY_DEPTH).await;
    let devnet = chain.devnet.clone();
    let market = Arc::new(Market::open(&chain, &plan, |builder| builder.client(devnet.rpc_client())).await);
    // A reorganization must not remove the payers' balances.
    (0..weather::DEEPEST).for_each(|_| devnet.mine());
    devnet.faults().reset();
    devnet.faults().random(plan.seed, plan.faults);
    let weather = tokio::spawn(weather::on_devnet(devnet.clone(), plan.seed));
    let bought = market.serve(&plan).await;
    weather.abort();
    weather::clear(&devnet);
    let calls = devnet.faults().calls().values().sum();
    books::balance(&chain, &market, &plan, bought, calls).await;
}

#[cfg(feature = "test-anvil")]
async fn on_anvil(plan: Plan) {
    let chain = support::anvil::AnvilChain::start(Some(Duration::from_millis(200))).await;
    let proxy = support::rpc_proxy::RpcProxy::start(support::chain::Chain::rpc_url(&chain)).await;
    let market = Arc::new(Market::open(&chain, &plan, |builder| builder.rpc_url(proxy.url())).await);
    proxy.reset();
    weather::on_the_way(&proxy, &plan);
    let bought = market.serve(&plan).await;
    proxy.judge(|_| support::rpc_proxy::Fate::Pass);
    books::balance(&chain, &market, &plan, bought, proxy.counts().calls).await;
}

/// The sizes that `.ci/run` runs.
mod devnet {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn the_books_balance_after_a_storm() {
        on_devnet(Plan::of(1_000, 50)).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    #[ignore = "takes minutes; see the head of this file"]
    async fn the_books_balance_after_a_storm_of_full_size() {
        on_devnet(Plan::of(20_000, 200)).await;
    }
}

#[cfg(feature = "test-anvil")]
mod anvil {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn the_books_balance_after_a_storm() {
        on_anvil(Plan::of(200, 20)).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    #[ignore = "takes minutes; see the head of this file"]
    async fn the_books_balance_after_a_storm_of_full_size() {
        on_anvil(Plan::of(2_000, 100)).await;
    }
}
