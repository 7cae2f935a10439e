//! The invariants that hold after the faults have stopped.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use alloy_primitives::U256;
use alloy_provider::Provider as _;
use tower_x402::{
    facilitator::Facilitator as _,
    ledger::{Counts, Listing, Record},
};

use super::{
    buyer::Bought,
    market::{Market, payer_of, price},
    plan::Plan,
};
use support::{chain::Chain, shop::Shop};

/// The time for the facilitator to finish every payment after the faults have stopped.
const CALM: Duration = Duration::from_secs(120);

/// Checks that chain, ledger and buyers agree to the atomic unit.
pub(crate) async fn balance(chain: &dyn Chain, market: &Market, plan: &Plan, bought: Bought, calls: u64) {
    let storm = bought.time;
    assert!(bought.unanswered.is_empty(), "never answered: {:?}", bought.unanswered);
    assert_eq!(bought.paid.len() as u64, plan.payments);
    let calm = Instant::now();
    let shop = &market.shop;
    let counts = until_all_is_known(chain, shop, plan.payments).await;
    assert_eq!(counts, Counts { settled: plan.payments, ..Counts::default() }, "nothing is unknown, open or failed");
    let calm = calm.elapsed();

    assert_eq!(market.wrongly_worked(plan.payments), [], "every order was worked for once");
    let owed: u64 = (0..plan.payments).map(price).sum();
    let transfers = chain.token_transfers(shop.pay_to).await;
    assert_eq!(transfers.len() as u64, plan.payments, "one transfer per order");
    assert_eq!(transfers.iter().map(|transfer| transfer.units).sum::<u64>(), owed);
    assert_eq!(chain.balance(shop.pay_to).await, owed);
    for (index, customer) in market.customers.iter().enumerate() {
        assert_eq!(chain.balance(customer.from).await, 0, "payer {index} paid for its orders and nothing else");
    }

    let records = all(shop).await;
    assert_eq!(records.len() as u64, plan.payments);
    let known: HashMap<_, _> = records.iter().map(|record| ((record.key.payer, record.key.nonce), record)).collect();
    let on_chain: HashSet<_> =
        transfers.iter().map(|transfer| (transfer.transaction, transfer.from, U256::from(transfer.units))).collect();
    for (n, payer, nonce) in &bought.paid {
        let record = known[&(*payer, *nonce)];
        assert_eq!(*payer, market.customers[payer_of(*n, plan)].from);
        assert_eq!(record.authorization.value, U256::from(price(*n)));
        let transaction = record.settlement.paid_by().unwrap();
        assert!(on_chain.contains(&(transaction, *payer, record.authorization.value)), "order {n} names its transfer");
    }

    let transactions: HashSet<_> = transfers.iter().map(|transfer| transfer.transaction).collect();
    let mut gas = 0;
    for transaction in &transactions {
        gas += chain.gas_used(*transaction).await;
    }
    let nonce = chain.provider().get_transaction_count(market.settler).await.unwrap();
    let stats = shop.facilitator.stats();
    println!(
        "{} payments of {} payers, {} at once: storm {storm:.1?} ({:.0} payments/s), then calm after {calm:.1?}",
        plan.payments,
        plan.payers,
        plan.at_once,
        plan.payments as f64 / storm.as_secs_f64(),
    );
    println!(
        "  presented {} times, {} times hung up, answers by status {:?}",
        bought.presented, bought.disconnected, bought.answers
    );
    println!(
        "  {} transactions paid ({:.1} payments each), {nonce} nonces used; {:.0} gas a payment; {calls} RPC calls ({:.2} a payment)",
        transactions.len(),
        plan.payments as f64 / transactions.len() as f64,
        gas as f64 / plan.payments as f64,
        calls as f64 / plan.payments as f64,
    );
    println!(
        "  undone by reorganizations {}, credited {}, included without paying {}",
        stats.reorged, stats.settled_by_others, stats.reverted
    );
}

/// The last reorganization is noticed a moment later. Until then the ledger has settled payments that are not on the chain.
async fn until_all_is_known(chain: &dyn Chain, shop: &Shop, payments: u64) -> Counts {
    let deadline = Instant::now() + CALM;
    loop {
        shop.facilitator.reconcile_now();
        let counts = shop.counts().await;
        let is_all_there = chain.token_transfers(shop.pay_to).await.len() as u64 == payments;
        if (counts.settled == payments && is_all_there) || Instant::now() > deadline {
            if counts.settled != payments {
                for record in all(shop).await.iter().filter(|record| record.settlement.paid_by().is_none()).take(20) {
                    println!("open: {record:?}");
                }
            }
            return counts;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn all(shop: &Shop) -> Vec<Record> {
    let mut listing = Listing::default();
    let mut records = Vec::new();
    loop {
        let page = shop.facilitator.ledger().list(&listing).await.unwrap();
        let Some(last) = page.last() else { return records };
        listing.after = Some(last.key);
        records.extend(page);
    }
}
