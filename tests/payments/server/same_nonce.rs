//! Two messages with one nonce are two payments: only the one on record is answered, and settled.

use std::sync::{Arc, atomic::Ordering};

use alloy_primitives::{Address, U256};
use support::{
    scripted::{Scripted, customer, echo, layer, serve},
    shop::{Answer, App, Customer, PRICE, Purchase, evaluate, send},
};
use tower_x402::{Network, server::RequirePaymentLayer};

async fn present(app: &App, purchase: &Purchase) -> Answer {
    send(app, purchase.on(evaluate("x"))).await
}

fn is_refused(answer: &Answer) -> bool {
    (answer.status.as_u16(), answer.reason().as_str()) == (409, "payment_already_used")
}

#[tokio::test]
async fn other_authorization_with_the_same_nonce_is_another_payment() {
    let facilitator = Arc::new(Scripted::new());
    let (app, handled) = serve(layer(&facilitator), echo);
    let purchase = customer().pay(&app, evaluate("x")).await;
    assert_eq!(present(&app, &purchase).await.text(), "x");
    let mut other = purchase.clone();
    other.authorization.validBefore -= U256::from(1);
    other.resign();
    let answer = present(&app, &other).await;
    assert!(is_refused(&answer), "{answer:?}");
    assert_eq!(present(&app, &purchase).await.text(), "x", "the first one is answered as ever");
    assert_eq!((handled.load(Ordering::SeqCst), facilitator.settlements()), (1, 1));
}

/// The EIP-712 domain is signed, too: payments for the seller with the wrong domain cannot be executed.
#[tokio::test]
async fn same_authorization_for_another_domain_is_another_payment() {
    let facilitator = Arc::new(Scripted::new());
    let on = |name: &str| {
        let asset = support::changed(Network::BASE_SEPOLIA.usdc().unwrap(), |asset| asset.name = name.into());
        let builder = RequirePaymentLayer::builder();
        builder.price("$0.001").pay_to_in(asset, Address::repeat_byte(0xba)).facilitator(facilitator.clone())
    };
    let ((first, handled), (second, handled_too)) = (serve(on("USDC"), echo), serve(on("USD Coin"), echo));
    let customer: Customer = customer();
    let purchase = customer.pay(&first, evaluate("x")).await;
    assert_eq!(present(&first, &purchase).await.text(), "x");
    let mut other = customer.pay(&second, evaluate("x")).await;
    assert_eq!(other.authorization.value, U256::from(PRICE));
    other.authorization = purchase.authorization.clone();
    other.resign();
    let answer = present(&second, &other).await;
    assert!(is_refused(&answer), "{answer:?}");
    assert_eq!((handled.load(Ordering::SeqCst), handled_too.load(Ordering::SeqCst)), (1, 0));
    assert_eq!(facilitator.settlements(), 1);
}
