//! Reconciliation of open payments with the chain.

use std::{sync::Arc, time::Duration};

use alloy_provider::ProviderBuilder;
use alloy_signer_local::PrivateKeySigner;
use serde_json::json;
use tower_x402::{
    ManualClock, Usdc,
    client::{
        Budget, Journal, Payer, PaymentError, PaymentMiddleware, PaymentOutcome, ReceiptExt, ReconcileError,
        Reconciliation, RetryPolicy, reconcile,
    },
    protocol::ExactPayload,
};
use x402_devnet::Devnet;

use super::middleware;
use support::script::{NOW, Reply, Server, TempPath, budget as purse, cut, decode, offer, required, with_settlement};
use support::{
    authorization::{CancelAuthorization, sign},
    chain::{Chain, on_every_chain},
    devnet::DevnetChain,
    rpc_proxy::{Fate, RpcProxy},
    token::{Token, cancel_vrs},
};

on_every_chain! {
    settled_payment_that_was_reported_as_failed_is_spent,
    unused_payment_is_released_when_it_expires_and_not_a_block_earlier,
    cancelled_authorization_is_released,
    open_payments_of_an_earlier_process_are_reconciled,
    answered_payment_is_not_counted_twice,
}

async fn settled_payment_that_was_reported_as_failed_is_spent(chain: &dyn Chain) {
    let buyer = Buyer::new(chain, Journal::in_memory()).await;
    let (outcome, payment) = buyer.buy(failed()).await;
    assert_eq!(outcome, PaymentOutcome::Failed);
    buyer.execute(&payment).await;
    let found = buyer.reconcile().await;
    assert_eq!((found.paid, found.void, found.open, found.spent), (1, 0, 0, Usdc::from_atomic(1_000)));
    assert_eq!(buyer.books(), (1_000, 0));
    assert!(buyer.budget.journal().unresolved().is_empty());
    assert_eq!(buyer.budget.journal().was_paid(payment.authorization.nonce), Some(true));
}

async fn unused_payment_is_released_when_it_expires_and_not_a_block_earlier(chain: &dyn Chain) {
    let buyer = Buyer::new(chain, Journal::in_memory()).await;
    let (outcome, payment) = buyer.buy(vec![cut(), cut()]).await;
    assert_eq!(outcome, PaymentOutcome::Unknown);
    let valid_before: u64 = payment.authorization.valid_before.to();
    chain.set_next_timestamp(valid_before - 1).await;
    chain.mine().await;
    let found = buyer.reconcile().await;
    assert!(chain.timestamp().await >= valid_before - 1);
    if chain.timestamp().await < valid_before {
        assert_eq!((found.void, found.open), (0, 1));
        assert_eq!(buyer.books(), (0, 1_000));
    }
    chain.set_next_timestamp(valid_before + 100).await;
    chain.mine().await;
    let found = buyer.reconcile().await;
    assert_eq!((found.void, found.open, found.released), (1, 0, Usdc::from_atomic(1_000)));
    assert_eq!(buyer.books(), (0, 0));
}

async fn cancelled_authorization_is_released(chain: &dyn Chain) {
    let buyer = Buyer::new(chain, Journal::in_memory()).await;
    let (_, payment) = buyer.buy(failed()).await;
    let message = CancelAuthorization { authorizer: buyer.key.address(), nonce: payment.authorization.nonce };
    let signature = sign(&buyer.key, &chain.asset(), &message);
    assert!(chain.relayer().await.send(chain, cancel_vrs(&message, &signature)).await.status());
    assert_eq!(buyer.reconcile().await.void, 1);
    assert_eq!(buyer.books(), (0, 0));
    assert_eq!(buyer.budget.journal().was_paid(payment.authorization.nonce), Some(false));
}

async fn open_payments_of_an_earlier_process_are_reconciled(chain: &dyn Chain) {
    let path = TempPath::new(&format!("reconcile-{}", chain.rpc_url().replace(['/', ':'], "")));
    let mut buyer = Buyer::new(chain, Journal::open(&path.0).unwrap()).await;
    let (_, executed) = buyer.buy(vec![cut(), cut()]).await;
    buyer.buy(failed()).await;
    buyer.execute(&executed).await;

    buyer.budget = Budget::default();
    buyer.budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
    assert_eq!(buyer.books(), (0, 2_000));
    let found = buyer.reconcile().await;
    assert_eq!((found.paid, found.open), (1, 1));
    assert_eq!(buyer.books(), (1_000, 1_000));

    buyer.budget = Budget::default();
    buyer.budget = Budget::builder().journal(Journal::open(&path.0).unwrap()).build();
    assert_eq!(buyer.books(), (1_000, 1_000), "what was found is in the journal");
}

async fn answered_payment_is_not_counted_twice(chain: &dyn Chain) {
    let buyer = Buyer::new(chain, Journal::in_memory()).await;
    let (first, executed) = buyer.buy(vec![cut(), cut()]).await;
    buyer.execute(&executed).await;
    let (second, _) = buyer.buy(failed()).await;
    assert_eq!((first, second), (PaymentOutcome::Unknown, PaymentOutcome::Failed));
    let (one, other) = tokio::join!(buyer.reconcile(), buyer.reconcile());
    assert_eq!(one.paid + other.paid, 1);
    assert_eq!(buyer.books(), (1_000, 1_000));
}

/// A payer with funds on a chain.
struct Buyer<'a> {
    chain: &'a dyn Chain,
    key: PrivateKeySigner,
    budget: Budget,
}

impl<'a> Buyer<'a> {
    async fn new(chain: &'a dyn Chain, journal: Journal) -> Self {
        let key = PrivateKeySigner::random();
        chain.mint(key.address(), 10_000).await;
        Self { chain, key, budget: Budget::builder().journal(journal).build() }
    }

    /// Pays a server with these replies, and returns the outcome and the payment that it received.
    async fn buy(&self, replies: Vec<Reply>) -> (PaymentOutcome, ExactPayload) {
        let attempts = u32::try_from(replies.len()).unwrap();
        let server = Server::paid(required(&[offer(1_000)]), replies).await;
        let payer = Payer::builder(self.key.clone()).budget(self.budget.clone()).build();
        let client = PaymentMiddleware::new(payer)
            .retry(RetryPolicy::default().max_attempts(attempts).first_pause(Duration::ZERO))
            .client(reqwest::Client::builder().no_proxy())
            .unwrap();
        let outcome = match client.post(server.url()).send().await {
            Ok(response) => response.receipt().unwrap().outcome,
            Err(error) => PaymentError::of(&error).unwrap().outcome(),
        };
        (outcome, decode(&server.payments()[0]).payload.read().unwrap())
    }

    /// Executes a payment on the chain, as anybody can who has it.
    async fn execute(&self, payment: &ExactPayload) {
        let authorization = payment.authorization.clone();
        let call = Token::transferWithAuthorization_1Call {
            from: authorization.from,
            to: authorization.to,
            value: authorization.value,
            validAfter: authorization.valid_after,
            validBefore: authorization.valid_before,
            nonce: authorization.nonce,
            signature: payment.signature.as_bytes().to_vec().into(),
        };
        assert!(self.chain.relayer().await.send(self.chain, call).await.status());
    }

    /// Reconciles after all blocks so far are final.
    async fn reconcile(&self) -> Reconciliation {
        // anvil takes the block two epochs ago for final.
        for _ in 0..65 {
            self.chain.mine().await;
        }
        reconcile(&self.budget, self.chain.provider()).await.unwrap()
    }

    /// Returns what is spent and what is reserved.
    fn books(&self) -> (u64, u64) {
        (self.budget.spent().atomic(), self.budget.reserved().atomic())
    }
}

fn failed() -> Vec<Reply> {
    let failed = json!({
        "success": false, "errorReason": "insufficient_funds", "transaction": "", "network": "eip155:84532",
    });
    vec![with_settlement(402, failed)]
}

#[tokio::test]
async fn payment_that_cannot_be_looked_up_keeps_no_other_open() {
    let chain = DevnetChain::start(None).await;
    let buyer = Buyer::new(&chain, Journal::in_memory()).await;
    let (_, one) = buyer.buy(vec![cut()]).await;
    let (_, other) = buyer.buy(vec![cut()]).await;
    // They are looked at in the order of their nonces.
    let is_first = one.authorization.nonce < other.authorization.nonce;
    let (used, unused) = if is_first { (one, other) } else { (other, one) };
    buyer.execute(&used).await;
    let valid_before: u64 = unused.authorization.valid_before.max(used.authorization.valid_before).to();
    chain.set_next_timestamp(valid_before + 100).await;
    for _ in 0..65 {
        chain.mine().await;
    }
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    proxy.judge(|methods| match methods.iter().any(|method| method == "eth_getLogs") {
        true => Fate::Error(-32_005),
        false => Fate::Pass,
    });
    let node = ProviderBuilder::new().connect_http(proxy.url().parse().unwrap());
    let found = reconcile(&buyer.budget, &node).await.unwrap();
    assert_eq!((found.paid, found.void, found.open, found.unseen), (0, 1, 1, 1));
    assert_eq!(buyer.books(), (0, 1_000));

    let nothing = reconcile(&buyer.budget, &node).await;
    assert!(matches!(nothing, Err(ReconcileError::Refused { code: -32_005, .. })), "{nothing:?}");
    proxy.judge(|_| Fate::Pass);
    let found = reconcile(&buyer.budget, &node).await.unwrap();
    assert_eq!((found.paid, found.open, found.unseen), (1, 0, 0));
    assert_eq!(buyer.books(), (1_000, 0));
}

/// A used and an unused authorization: both may change until a block is final.
#[tokio::test]
async fn nothing_is_resolved_without_a_final_block() {
    let chain = DevnetChain::start(None).await;
    let buyer = Buyer::new(&chain, Journal::in_memory()).await;
    let (outcome, executed) = buyer.buy(vec![cut(), cut()]).await;
    buyer.buy(failed()).await;
    assert_eq!(outcome, PaymentOutcome::Unknown);
    buyer.execute(&executed).await;
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    let node = ProviderBuilder::new().connect_http(proxy.url().parse().unwrap());
    proxy.judge(|methods| match methods[0].as_str() {
        "eth_getBlockByNumber" => Fate::Result("null"),
        _ => Fate::Pass,
    });
    let nothing = reconcile(&buyer.budget, &node).await;
    assert!(matches!(nothing, Err(ReconcileError::NoFinality)), "{nothing:?}");
    assert_eq!((buyer.books(), buyer.budget.journal().unresolved().len()), ((0, 2_000), 2));
    assert_eq!(proxy.counts().of("eth_call"), 0, "no block is asked that may be replaced");
    proxy.judge(|_| Fate::Pass);
    let found = reconcile(&buyer.budget, &node).await.unwrap();
    assert_eq!((found.paid, found.void, found.open), (1, 0, 1));
    assert_eq!(buyer.books(), (1_000, 1_000));
}

#[tokio::test]
async fn payments_pruned_by_the_node_keep_no_other_open() {
    let chain = DevnetChain::start(None).await;
    let buyer = Buyer::new(&chain, Journal::in_memory()).await;
    let mut payments = Vec::new();
    for _ in 0..4 {
        payments.push(buyer.buy(vec![cut()]).await.1);
    }
    payments.sort_by_key(|payment| payment.authorization.nonce);
    let valid_before = payments.iter().map(|payment| payment.authorization.valid_before).max().unwrap().to::<u64>();
    for used in &payments[..3] {
        buyer.execute(used).await;
    }
    chain.set_next_timestamp(valid_before + 100).await;
    for _ in 0..65 {
        chain.mine().await;
    }
    let proxy = RpcProxy::start(chain.rpc_url()).await;
    proxy.judge(|methods| match methods.iter().any(|method| method == "eth_getLogs") {
        true => Fate::DropBefore,
        false => Fate::Pass,
    });
    let node = ProviderBuilder::new().connect_http(proxy.url().parse().unwrap());
    let found = reconcile(&buyer.budget, &node).await.unwrap();
    assert_eq!((found.paid, found.void, found.open, found.unseen), (0, 1, 3, 3));
}

#[tokio::test]
async fn nothing_is_resolved_before_it_is_final_or_by_another_chain() {
    let server = Server::paid(required(&[offer(1_000)]), failed()).await;
    let purse = purse(10_000);
    middleware::buy(&server, &purse).await.unwrap();
    let clock = Arc::new(ManualClock::at(NOW));
    let young = Devnet::builder().finality_depth(2).clock(clock.clone()).start().await.unwrap();
    clock.advance(1_000_000);
    let other = Devnet::builder().chain_id(8453).start().await.unwrap();
    young.mine();
    for (devnet, open) in [(&other, 1), (&young, 1), (&young, 0)] {
        let port = devnet.serve("127.0.0.1:0").await.unwrap();
        let provider = ProviderBuilder::new().connect_http(port.url().clone());
        assert_eq!(reconcile(&purse, &provider).await.unwrap().open, open);
        assert_eq!(purse.reserved().atomic(), 1_000 * open as u64);
        devnet.mine();
        devnet.mine();
    }
}
