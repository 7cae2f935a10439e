//! Facilitators that report falsely, to a seller that confirms on the chain.

use std::time::Duration;

use alloy_primitives::B256;
use serde_json::json;
use tower_x402::{ledger::Settlement, protocol::PaymentFlow};
use x402_devnet::Fault;

use super::{
    honest::chain_url,
    stage::{Reply, Seller, Stage, Turn, refusal},
};
use support::{
    chain::Chain as _,
    eventually::{eventually, skip},
    shop::{PRICE, Purchase, evaluate},
    token::Token,
};

const NET: tower_x402::Network = tower_x402::Network::BASE_SEPOLIA;

fn success(transaction: &str) -> serde_json::Value {
    json!({ "success": true, "transaction": transaction, "network": NET })
}

async fn confirming(stage: &Stage, flow: PaymentFlow) -> Seller {
    let remote = stage.remote().settle_timeout(Duration::from_millis(1)).confirm(NET, chain_url(stage));
    stage.seller(remote, flow).await
}

async fn stays_unknown(seller: &Seller, purchase: &Purchase, what: &str) {
    let answer = seller.ask(purchase).await;
    assert_eq!((answer.status.as_u16(), answer.reason().as_str()), (503, "settlement_pending"), "{what}");
    let record = seller.record(purchase).await.unwrap();
    assert!(matches!(record.settlement, Settlement::Unknown | Settlement::Submitted), "{what}: {record:?}");
}

#[tokio::test]
async fn reported_success_that_the_chain_does_not_show_is_not_believed() {
    let stage = Stage::open().await;
    let seller = confirming(&stage, PaymentFlow::Upfront).await;
    let customer = stage.customer().await;
    // A real transaction, of another payment of the same payer to the same payee.
    let other = customer.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let real = seller.ask(&other).await.transaction().to_string();
    let lies = [("nowhere", B256::repeat_byte(0x77).to_string()), ("another payment's", real)];
    for (bought, (what, transaction)) in (1..).zip(lies) {
        let purchase = customer.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        stage.script([], Turn::Without(Reply::Json(200, success(&transaction))));
        let asked = stage.settles().len();
        let time = async {
            eventually("the facilitator lies", async || stage.settles().len() > asked).await;
            // The node may lag behind the facilitator's: it is asked for five seconds.
            skip(Duration::from_secs(5)).await;
        };
        tokio::join!(stays_unknown(&seller, &purchase, what), time);
        // No work is done for a false report.
        break_even(&stage, &seller, bought).await;
        // It is no second purchase when the transaction is found.
        stage.script([], Turn::Honest);
        assert_eq!(seller.insist(&purchase).await.status, 200, "{what}");
        break_even(&stage, &seller, bought + 1).await;
    }
}

async fn break_even(stage: &Stage, seller: &Seller, purchases: u64) {
    assert_eq!((seller.handled(), seller.income(stage).await), (purchases, purchases * PRICE));
}

#[tokio::test]
async fn reported_success_of_another_payment_is_not_believed_without_a_node() {
    let stage = Stage::open().await;
    let somebody = "0x1111111111111111111111111111111111111111";
    let hash = B256::repeat_byte(0x77).to_string();
    let lies = [
        ("another payer", json!({ "success": true, "transaction": hash, "network": NET, "payer": somebody })),
        ("another amount", json!({ "success": true, "transaction": hash, "network": NET, "amount": "1" })),
        ("another network", json!({ "success": true, "transaction": hash, "network": "eip155:1" })),
        ("no transaction", success("")),
        ("no hash", success("0x1234")),
        ("the hash of nothing", success(&B256::ZERO.to_string())),
    ];
    for (what, lie) in lies {
        let remote = stage.remote().settle_timeout(Duration::from_millis(1));
        let seller = stage.seller(remote, PaymentFlow::Upfront).await;
        let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        stage.script([], Turn::Without(Reply::Json(200, lie)));
        stays_unknown(&seller, &purchase, what).await;
        assert_eq!((seller.handled(), seller.income(&stage).await), (0, 0), "{what}");
    }
}

#[tokio::test]
async fn reported_failure_that_the_chain_shows_as_paid_is_settled() {
    let stage = Stage::open().await;
    let seller = confirming(&stage, PaymentFlow::Authorization).await;
    for (what, reason) in [("plainly", "insufficient_funds"), ("darkly", "invalid_exact_evm_nonce_already_used")] {
        let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
        let before = seller.handled();
        stage.script([], Turn::Instead(refusal(reason)));
        let answer = seller.ask(&purchase).await;
        assert_eq!(answer.status, 200, "{what}: {answer:?}");
        break_even(&stage, &seller, before + 1).await;
    }
}

#[tokio::test]
async fn payment_executed_by_a_stranger_is_settled() {
    let stage = Stage::open().await;
    let seller = confirming(&stage, PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    // The facilitator loses the request; somebody who saw the authorization executes it.
    stage.script([], Turn::Without(Reply::Status(502, "")));
    assert_eq!(seller.ask(&purchase).await.status, 503);
    let transaction = execute(&stage, &purchase).await;
    let answer = seller.insist(&purchase).await;
    assert_eq!((answer.status.as_u16(), answer.transaction()), (200, transaction));
    break_even(&stage, &seller, 1).await;
}

#[tokio::test]
async fn node_without_a_final_block_can_be_used() {
    let stage = Stage::open().await;
    let seller = confirming(&stage, PaymentFlow::Authorization).await;
    let purchase = stage.customer().await.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    stage.script([], Turn::Without(Reply::Status(502, "")));
    stage.chain.devnet.faults().set(|call| match call.method {
        "eth_getBlockByNumber" if call.params[0] == "finalized" => {
            Fault::Error { code: -39001, message: "finalized block not found".into() }
        }
        _ => Fault::None,
    });
    assert_eq!(seller.ask(&purchase).await.status, 503);
    let transaction = execute(&stage, &purchase).await;
    let answer = seller.insist(&purchase).await;
    assert_eq!((answer.status.as_u16(), answer.transaction()), (200, transaction));
    break_even(&stage, &seller, 1).await;
}

/// Somebody who saw the authorization executes it.
pub(super) async fn execute(stage: &Stage, purchase: &Purchase) -> B256 {
    let relayer = stage.chain.relayer().await;
    let (authorization, signature) = (&purchase.authorization, purchase.by_key());
    let call = Token::transferWithAuthorization_0Call {
        from: authorization.from,
        to: authorization.to,
        value: authorization.value,
        validAfter: authorization.validAfter,
        validBefore: authorization.validBefore,
        nonce: authorization.nonce,
        v: signature.v(),
        r: signature.r(),
        s: signature.s(),
    };
    relayer.send(&stage.chain, call).await.transaction_hash
}

#[tokio::test]
async fn insufficient_balance_is_refused_whatever_the_facilitator_answers() {
    let stage = Stage::open().await;
    // It waits no longer for the first payment to be settled.
    let remote = stage.remote().settle_timeout(Duration::from_millis(1)).confirm(NET, chain_url(&stage));
    let seller = stage.seller_with(remote, |layer| layer.settlement_margin(Duration::from_millis(100))).await;
    let customer = support::shop::Customer::with_funds(&stage.chain, PRICE).await;
    let first = customer.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    let second = customer.pay(&seller.app, evaluate("2 + 2 = 4")).await;
    // The first is in flight, and the facilitator, which looks at each alone, finds both good.
    stage.script([], Turn::Without(Reply::Status(502, "")));
    assert_eq!(seller.ask(&first).await.status, 503);
    let worked = seller.handled();
    let answer = seller.ask(&second).await;
    assert_ne!(answer.status, 200, "one balance pays once");
    assert_eq!(seller.handled(), worked, "and nothing is worked for the second");
}
