//! Reorganizations of settlements by a remote facilitator, and what the seller's operator sees.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use serde_json::json;
use tower_x402::{
    Network,
    eip3009::{Authorization, PaymentSignature},
    facilitator::{Facilitator as _, NotReady, RemoteFacilitator},
    ledger::{Fingerprint, Fulfilment, Ledger, MemoryLedger, Record, Settlement, SettlementStep},
    payment::{Terms, Window, precheck},
    protocol::{ExactOffer, ExactPayload, PaymentFlow},
    server::DeferredPolicy,
};
use x402_devnet::{Devnet, Orphans};

use super::{
    honest::chain_url,
    stage::{Seller, Stage, Turn, refusal},
};
use support::numbers::Recording;
use support::{
    chain::Chain as _,
    devnet::DevnetChain,
    rpc_proxy::{Fate, RpcProxy},
    shop::{PRICE, Purchase, evaluate},
};

const NET: tower_x402::Network = tower_x402::Network::BASE_SEPOLIA;
const OFTEN: Duration = Duration::from_millis(20);
const HARDLY_EVER: Duration = Duration::from_secs(3_600);

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let so = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), so).await.expect("it comes to pass");
}

async fn settlement(seller: &Seller, purchase: &Purchase) -> Settlement {
    seller.record(purchase).await.unwrap().settlement
}

/// A seller who was paid, and whose node has been asked since how far the chain is.
async fn paid(stage: &Stage, node: &RpcProxy) -> (Seller, Purchase, B256) {
    let (seller, purchase) = charged(stage, node).await;
    let answer = seller.ask(&purchase).await;
    assert_eq!(answer.status, 200);
    until_followed(node).await;
    (seller, purchase, answer.transaction())
}

/// A seller with a node of its own, and a payment for it that it has not seen yet.
async fn charged(stage: &Stage, node: &RpcProxy) -> (Seller, Purchase) {
    let remote = stage.remote().confirm(NET, node.url()).reconcile_interval(OFTEN).settle_timeout(OFTEN);
    let seller = stage.seller(remote, PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    (seller, purchase)
}

/// Returns when the node has been asked how far the chain is.
async fn until_followed(node: &RpcProxy) {
    let seen = node.counts().of("eth_getBlockByNumber");
    until(async || node.counts().of("eth_getBlockByNumber") >= seen + 6).await;
}

#[tokio::test]
async fn reorged_payment_is_settled_again() {
    let chain = DevnetChain::start_with(None, 64).await;
    let stage = Stage::open_on(chain, OFTEN, |service| service).await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    let (seller, purchase, _) = paid(&stage, &node).await;
    stage.chain.devnet.reorg(1, Orphans::Lost);
    assert_eq!(seller.income(&stage).await, 0, "undone");
    until(async || seller.income(&stage).await == PRICE).await;
    until(async || {
        let transfers = stage.chain.token_transfers(seller.pay_to).await;
        settlement(&seller, &purchase).await.paid_by() == Some(transfers[0].transaction)
    })
    .await;
    assert_eq!(seller.ask(&purchase).await.status, 200, "replayed");
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, PRICE));
}

/// The node takes its time to say how far the chain is.
#[tokio::test]
async fn deferred_payments_do_not_wait_for_settled_ones() {
    let chain = DevnetChain::start_with(None, 64).await;
    let stage = Stage::open_on(chain, HARDLY_EVER, |service| service).await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    let remote = stage.remote().confirm(NET, node.url()).reconcile_interval(OFTEN);
    let policy = DeferredPolicy::default();
    let seller = stage.seller_with(remote, |layer| layer.deferred(policy)).await;
    let customer = stage.customer().await;
    let buy = async || {
        let purchase = customer.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        let answer = seller.ask(&purchase).await;
        assert_eq!(answer.status, 200);
        (purchase, answer)
    };
    assert_ne!(buy().await.1.settlement().unwrap()["transaction"], "");
    let is_slow = |methods: &[String]| methods.iter().any(|method| method == "eth_getBlockByNumber");
    node.judge(move |methods| if is_slow(methods) { Fate::Delay(Duration::from_secs(4)) } else { Fate::Pass });
    let asked = node.counts().of("eth_getBlockByNumber");
    until(async || node.counts().of("eth_getBlockByNumber") > asked).await;
    let (purchase, answer) = buy().await;
    assert_eq!(answer.settlement().unwrap()["transaction"], "");
    let paid = until(async || settlement(&seller, &purchase).await.paid_by().is_some());
    tokio::time::timeout(Duration::from_secs(2), paid).await.expect("it is settled meanwhile");
}

#[tokio::test]
async fn facilitator_that_misses_a_reorganization_is_not_believed() {
    let chain = DevnetChain::start_with(None, 64).await;
    let stage = Stage::open_on(chain, HARDLY_EVER, |service| service).await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    let recording = Recording::begin();
    let (seller, purchase, transaction) = paid(&stage, &node).await;
    assert_eq!(settlement(&seller, &purchase).await.paid_by(), Some(transaction));
    stage.chain.devnet.reorg(1, Orphans::Lost);
    // It is asked again, and reports the transaction that is gone.
    let asked = stage.settles().len();
    until(async || stage.settles().len() > asked).await;
    until(async || matches!(settlement(&seller, &purchase).await, Settlement::Unknown | Settlement::Submitted)).await;
    assert_eq!(recording.read().total("x402_settlements_undone_total"), 1);
    assert_eq!((seller.handled(), seller.income(&stage).await), (1, 0));
    stage.assert_identical();
}

/// The buyer was told of a failure, presented the payment again and got the recorded response, so the payment is owed.
#[tokio::test]
async fn reorged_payment_of_a_replayed_response_is_asked_for_again() {
    let chain = DevnetChain::start_with(None, 64).await;
    let stage = Stage::open_on(chain, HARDLY_EVER, |service| service).await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    let (seller, purchase) = charged(&stage, &node).await;
    stage.script([Turn::Without(refusal("insufficient_funds"))], Turn::Honest);
    assert_eq!(seller.ask(&purchase).await.status, 402);
    assert_eq!(seller.ask(&purchase).await.status, 200);
    assert_eq!(seller.record(&purchase).await.unwrap().fulfilment, Fulfilment::Produced);
    until_followed(&node).await;
    let asked = stage.settles().len();
    stage.chain.devnet.reorg(1, Orphans::Lost);
    until(async || stage.settles().len() > asked).await;
}

#[tokio::test]
async fn settlement_is_final_only_with_a_node() {
    let stage = Stage::open_on(DevnetChain::start_with(None, 3).await, OFTEN, |service| service).await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    let (seller, purchase, transaction) = paid(&stage, &node).await;
    let blind = stage.seller(stage.remote().reconcile_interval(OFTEN), PaymentFlow::Authorization).await;
    let trusted = stage.customer().await.pay(&blind.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(blind.ask(&trusted).await.status, 200);
    assert!(matches!(settlement(&seller, &purchase).await, Settlement::Settled { .. }), "too young");
    for _ in 0..4 {
        stage.chain.devnet.mine();
    }
    until(async || matches!(settlement(&seller, &purchase).await, Settlement::Final { .. })).await;
    assert_eq!(settlement(&seller, &purchase).await.paid_by(), Some(transaction));
    assert!(matches!(settlement(&blind, &trusted).await, Settlement::Settled { block: None, .. }));
}

/// The block on record was replaced, and the transaction is in a later one.
#[tokio::test]
async fn settlement_moved_to_a_later_block_is_final_with_that_block() {
    let stage = Stage::open_on(DevnetChain::start_with(None, 3).await, HARDLY_EVER, |service| service).await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    for _ in 0..4 {
        stage.chain.devnet.mine();
    }
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    let quiet = stage.remote().confirm(NET, node.url()).reconcile_interval(HARDLY_EVER);
    let seller = stage.seller_on(ledger.clone(), quiet, |layer| layer).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let transaction = seller.ask(&purchase).await.transaction();
    let block = settlement(&seller, &purchase).await.block().unwrap();
    // Final by its number.
    let moved = SettlementStep::Settle { transaction, block: Some(1), fee: None };
    ledger.advance(&support::scripted::key(&purchase), &moved.into()).await.unwrap();

    let diligent = stage.remote().confirm(NET, node.url()).reconcile_interval(OFTEN).ledger(ledger.clone());
    let _another = diligent.build().await.unwrap();
    until(async || settlement(&seller, &purchase).await.block() == Some(block)).await;
    until_followed(&node).await;
    assert_eq!(settlement(&seller, &purchase).await, Settlement::Settled { transaction, block: Some(block) });
    while stage.chain.devnet.block_number() < block + 3 {
        stage.chain.devnet.mine();
    }
    // Its block is the newest final one.
    until(async || settlement(&seller, &purchase).await == Settlement::Final { transaction, block: Some(block) }).await;
}

#[tokio::test]
async fn without_a_reorganization_no_receipt_is_requested_again() {
    let chain = DevnetChain::start_with(None, 64).await;
    let stage = Stage::open_on(chain, HARDLY_EVER, |service| service).await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    let (seller, purchase, transaction) = paid(&stage, &node).await;
    node.reset();
    for _ in 0..3 {
        stage.chain.devnet.mine();
        until_followed(&node).await;
    }
    assert_eq!(node.counts().of("eth_getTransactionReceipt"), 0);
    assert_eq!(settlement(&seller, &purchase).await.paid_by(), Some(transaction));
}

#[tokio::test]
async fn receipt_missing_once_is_no_reorganization() {
    let stage = Stage::open_on(DevnetChain::start_with(None, 3).await, HARDLY_EVER, |service| service).await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    let recording = Recording::begin();
    let (seller, purchase, transaction) = paid(&stage, &node).await;
    let is_asked = AtomicBool::new(false);
    node.judge(move |methods| match methods[0].as_str() {
        // Of a node that is behind.
        "eth_getTransactionReceipt" if !is_asked.swap(true, Ordering::SeqCst) => Fate::Result("null"),
        _ => Fate::Pass,
    });
    for _ in 0..4 {
        stage.chain.devnet.mine();
    }
    until(async || matches!(settlement(&seller, &purchase).await, Settlement::Final { .. })).await;
    assert_eq!(settlement(&seller, &purchase).await.paid_by(), Some(transaction));
    assert_eq!(recording.read().total("x402_settlements_undone_total"), 0);
    assert_eq!(stage.settles().len(), 1);
}

/// A payment on another network, settled by whatever transaction.
async fn settled_on(network: Network, ledger: &dyn Ledger) {
    let asset = network.usdc().unwrap();
    let (pay_to, amount) = (Address::repeat_byte(0xee), U256::from(PRICE));
    let terms = Terms::new(ExactOffer::new(asset, amount, pay_to, 60));
    let authorization = Authorization {
        from: Address::repeat_byte(1),
        to: pay_to,
        value: amount,
        valid_after: U256::ZERO,
        valid_before: U256::from(60),
        nonce: B256::ZERO,
    };
    let payload = ExactPayload::new(PaymentSignature::from(vec![1; 65]), authorization);
    let payment = precheck(Arc::new(terms), payload, Window::default(), 30).unwrap();
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    ledger.reserve(&Record::new(&payment, request, 30, 60)).await.unwrap();
    let step = SettlementStep::Settle { transaction: B256::ZERO, block: Some(1), fee: None };
    ledger.advance(&payment.key(), &step.into()).await.unwrap();
}

#[tokio::test]
async fn failure_of_one_node_does_not_stop_another_chain() {
    let stage = Stage::open_on(DevnetChain::start_with(None, 3).await, OFTEN, |service| service).await;
    let (node, elsewhere) = (RpcProxy::start(chain_url(&stage)).await, Devnet::builder().chain_id(8453).start().await);
    let port = elsewhere.unwrap().serve("127.0.0.1:0").await.unwrap();
    let down = RpcProxy::start(port.url().to_string()).await;
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::new());
    settled_on(Network::BASE, &*ledger).await;
    let remote = stage.remote().confirm(Network::BASE, down.url()).confirm(NET, node.url()).reconcile_interval(OFTEN);
    let seller = stage.seller_on(ledger, remote, |layer| layer).await;
    down.judge(|_| Fate::Status(500));
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(seller.ask(&purchase).await.status, 200);
    for _ in 0..4 {
        stage.chain.devnet.mine();
    }
    until(async || matches!(settlement(&seller, &purchase).await, Settlement::Final { .. })).await;
}

#[tokio::test]
async fn readiness_names_the_reasons() {
    let stage = Stage::open().await;
    let node = RpcProxy::start(chain_url(&stage)).await;
    let remote = stage.remote().confirm(NET, node.url()).build().await.unwrap();
    assert_eq!(remote.readiness().await.to_string(), "ready");
    node.judge(|_| Fate::Status(500));
    until(async || remote.readiness().await.reasons == [NotReady::Node]).await;

    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let remote = RemoteFacilitator::builder(format!("http://{nobody}")).network(NET).build().await.unwrap();
    let recording = Recording::begin();
    assert_eq!(remote.readiness().await.reasons, [NotReady::Facilitator]);
    assert!(recording.read().names().contains("x402_ready"));
}

#[tokio::test]
async fn readiness_is_shown_for_the_networks_that_the_facilitator_settles_on() {
    let kinds = [
        (2, "exact", "eip155:8453"),
        (2, "exact", "eip155:84532"),
        (1, "exact", "eip155:1"),
        (2, "upto", "eip155:10"),
        (1, "upto", "eip155:137"),
    ];
    let kind = |(version, scheme, network)| json!({ "x402Version": version, "scheme": scheme, "network": network });
    let said = json!({ "kinds": kinds.map(kind) });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = axum::Router::new().route("/supported", axum::routing::get(async || axum::Json(said)));
    tokio::spawn(async { axum::serve(listener, app).await });
    let remote = RemoteFacilitator::builder(url).build().await.unwrap();
    let recording = Recording::begin();
    assert!(remote.readiness().await.is_ready());
    let numbers = recording.read();
    let mut networks: Vec<_> =
        numbers.0.iter().filter(|number| number.name == "x402_ready").map(|number| &number.labels["network"]).collect();
    networks.sort_unstable();
    assert_eq!(networks, ["eip155:8453", "eip155:84532"]);
}

#[tokio::test]
async fn remote_settlements_are_counted_at_the_seller() {
    let stage = Stage::open().await;
    let recording = Recording::begin();
    let seller = stage.seller(stage.remote(), PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(seller.ask(&purchase).await.status, 200);
    let poor = support::scripted::customer().pay(&seller.app, evaluate("2 + 2 = 4")).await;
    assert_eq!(seller.ask(&poor).await.status, 402);
    let numbers = recording.read();
    let results = |name: &str| {
        let of_name = numbers.0.iter().filter(|number| number.name == name);
        let mut results: Vec<_> = of_name.map(|number| number.labels["result"].clone()).collect();
        results.sort();
        results
    };
    // The facilitator is in the same process here and counts, too; what the labels say is the same.
    assert_eq!(results("x402_verification_duration_seconds"), ["invalid", "valid"]);
    assert_eq!(results("x402_settlement_duration_seconds"), ["settled"]);
}
