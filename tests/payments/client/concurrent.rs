//! Concurrent payments to several hosts from one budget.

use std::{collections::BTreeMap, time::Duration};

use alloy_primitives::Address;
use tower_x402::{
    Usdc,
    client::{Budget, BudgetBuilder, PaymentError, PaymentOutcome, ReceiptExt, Refusal},
};

use support::script::*;

use super::middleware::{client, refusal};

/// A shop: its host name in the URL, its address, the payee and the price.
const SHOPS: [(&str, &str, u8, u64); 5] = [
    ("127.0.0.1", "127.0.0.1", 1, 701),
    ("127.0.0.1", "127.0.0.1", 2, 997),
    ("localhost", "127.0.0.1", 2, 1_009),
    ("127.0.0.2", "127.0.0.2", 3, 853),
    ("127.0.0.2", "127.0.0.2", 1, 1_201),
];

const UNLIMITED: u64 = 1_000_000;
const LIMIT: u64 = 9_999;

fn usdc(units: u64) -> Usdc {
    Usdc::from_atomic(units)
}

fn unlimited() -> BudgetBuilder {
    Budget::builder().per_payment(usdc(UNLIMITED)).total(usdc(UNLIMITED))
}

/// What the servers received, by their own count.
#[derive(Default)]
struct Income {
    total: u64,
    by_payee: BTreeMap<Address, u64>,
    by_host: BTreeMap<&'static str, u64>,
}

/// Makes 64 concurrent requests to all shops in turn. Every third payment is settled and never answered.
async fn rush(limits: BudgetBuilder) -> (Budget, Income) {
    let mut shops = Vec::new();
    for (name, ip, payee, price) in SHOPS {
        let required = required(&[support::changed(offer(price), |offer| offer.pay_to = Address::repeat_byte(payee))]);
        let bank = Bank::default();
        let books = bank.clone();
        let server = Server::start_at(ip, move |seen| {
            let Some(payment) = &seen.payment else { return Answer::Response(required_402(&required)) };
            books.settle(payment);
            let nonce = decode(payment).payload.read().unwrap().authorization.nonce;
            if nonce[0].is_multiple_of(3) {
                return Answer::Cut;
            }
            let mut paid = settlement();
            paid["amount"] = price.to_string().into();
            with_settlement(200, paid)(seen)
        })
        .await;
        shops.push((name, format!("http://{name}:{}/", server.address.port()), bank));
    }
    let budget = limits.build();
    let client = client(&budget);
    let purchases: Vec<_> = (0..64)
        .map(|number| {
            let request = client.post(&shops[number % shops.len()].1).body("x").send();
            tokio::spawn(async move {
                match request.await {
                    Ok(response) => response.receipt().unwrap().outcome,
                    Err(error) => {
                        let outcome = PaymentError::of(&error).unwrap().outcome();
                        if outcome == PaymentOutcome::Refused {
                            assert!(!matches!(refusal(&error), Refusal::NoPayableOffer { .. }));
                        }
                        outcome
                    }
                }
            })
        })
        .collect();
    let mut outcomes = BTreeMap::new();
    for purchase in purchases {
        *outcomes.entry(purchase.await.unwrap().as_str()).or_insert(0) += 1;
    }
    let mut income = Income::default();
    for (name, _, bank) in &shops {
        for payload in bank.executed() {
            let units = payload.authorization.value.to::<u64>();
            income.total += units;
            *income.by_payee.entry(payload.authorization.to).or_default() += units;
            *income.by_host.entry(name).or_default() += units;
        }
    }
    assert_eq!(budget.spent().atomic() + budget.reserved().atomic(), income.total, "{outcomes:?}");
    let open: u64 = budget.journal().unresolved().iter().map(|entry| entry.amount.atomic()).sum();
    assert_eq!(budget.reserved().atomic(), open);
    (budget, income)
}

/// Asserts that the limit is kept and that the rest is below the cheapest price.
fn is_used_up(sum: u64, limit: u64) {
    let dearest = SHOPS.iter().map(|shop| shop.3).max().unwrap();
    assert!(sum <= limit && sum + dearest > limit, "{sum} of {limit}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_payments_keep_the_total() {
    let (_, income) = rush(unlimited().total(usdc(LIMIT))).await;
    is_used_up(income.total, LIMIT);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_payments_keep_the_window() {
    let (_, income) = rush(unlimited().per_window(Duration::from_secs(60), usdc(LIMIT))).await;
    is_used_up(income.total, LIMIT);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_payments_keep_the_limit_per_payee() {
    let (_, income) = rush(unlimited().per_payee(usdc(LIMIT))).await;
    assert_eq!(income.by_payee.len(), 3);
    income.by_payee.values().for_each(|sum| is_used_up(*sum, LIMIT));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_payments_keep_the_limit_per_host() {
    let (_, income) = rush(unlimited().per_host(usdc(LIMIT))).await;
    assert_eq!(income.by_host.len(), 3);
    income.by_host.values().for_each(|sum| is_used_up(*sum, LIMIT));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_payments_keep_all_limits_together() {
    let limits = Budget::builder()
        .per_payment(usdc(1_008))
        .per_payee(usdc(8_000))
        .per_host(usdc(9_000))
        .per_window(Duration::from_secs(60), usdc(15_000))
        .total(usdc(14_500));
    let (_, income) = rush(limits).await;
    assert!(income.by_payee.values().all(|sum| *sum <= 8_000), "{:?}", income.by_payee);
    assert!(income.by_host.values().all(|sum| *sum <= 9_000), "{:?}", income.by_host);
    assert!(!income.by_host.contains_key("localhost"), "its price is above the limit for one payment");
    is_used_up(income.total, 14_500);
}
