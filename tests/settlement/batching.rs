//! Requests at the same time share transactions, on a chain with the pace of Base.

use std::{collections::BTreeSet, time::Duration};

use alloy_primitives::B256;
use futures_util::future::join_all;
use http::StatusCode;
use support::{
    chain::Chain,
    devnet::DevnetChain,
    shop::{Answer, Customer, PRICE, Purchase, Shop, demand, evaluate, send},
};
use tower_x402::{ledger::Counts, protocol::PaymentFlow};

const BLOCK_TIME: Duration = Duration::from_millis(200);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_requests_at_once_share_a_few_transactions() {
    for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
        fifty_at_once(&DevnetChain::start(Some(BLOCK_TIME)).await, flow).await;
    }
}

#[cfg(feature = "test-anvil")]
mod anvil {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn fifty_requests_at_once_share_a_few_transactions() {
        for flow in [PaymentFlow::Authorization, PaymentFlow::Upfront] {
            fifty_at_once(&support::anvil::AnvilChain::start(Some(BLOCK_TIME)).await, flow).await;
        }
    }
}

async fn fifty_at_once(chain: &dyn Chain, flow: PaymentFlow) {
    let shop = Shop::open(chain).await;
    shop.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
    let app = shop.app(shop.layer().flow(flow));
    let ask = demand(&send(&app, evaluate("a")).await);
    let mut purchases: Vec<Purchase> = Vec::new();
    for _ in 0..50 {
        purchases.push(Customer::with_funds(chain, PRICE).await.sign(&ask, 0));
    }
    let answers = join_all(purchases.iter().map(|purchase| send(&app, purchase.on(evaluate("a"))))).await;
    for answer in &answers {
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    }
    let transactions: BTreeSet<B256> = answers.iter().map(Answer::transaction).collect();
    assert!(transactions.len() <= 12, "{} transactions", transactions.len());
    assert_eq!(chain.balance(shop.pay_to).await, 50 * PRICE);
    assert_eq!(shop.counts().await, Counts { settled: 50, ..Counts::default() });
}
