//! What payments by voucher cost on the chain, all of it included.

use std::time::Duration;

use alloy_signer_local::PrivateKeySigner;
use futures_util::{StreamExt as _, stream};
use support::{
    authorization::random_address,
    chain::{Chain, on_every_chain},
    escrow::{Channel, install},
};
use tower_x402::{facilitator::channels::ChannelFacilitator as _, vouchers::AuthorizerKey};

use super::{builder, gas_key};

on_every_chain! {
    a_hundred_thousand_payments_cost_less_than_180_gas_each,
}

async fn a_hundred_thousand_payments_cost_less_than_180_gas_each(chain: &dyn Chain) {
    const PRICE: u128 = 1_000;
    println!(
        "{:>8} {:>7} {:>9} {:>9} {:>9} {:>11}",
        "payments", "payers", "deposits", "claim", "settle", "gas/payment"
    );
    for (payers, payments, most) in [(10, 1_000, 1_800), (100, 100_000, 180)] {
        let each = PRICE * payments / payers;
        install(chain).await;
        // The devnet's own simulation of a hundred claims, not optimized, takes seconds.
        let channels = builder(chain).rpc_timeout(Duration::from_secs(60)).signer(gas_key(chain).await);
        let channels = channels.build().await.unwrap();
        let (key, receiver) = (PrivateKeySigner::random(), random_address());
        let until = chain.timestamp().await + 3_600;
        let mut funded = Vec::new();
        for _ in 0..payers {
            funded.push(Channel::funded(chain, receiver, &key, each as u64).await);
        }
        let filled: Vec<_> = stream::iter(&funded)
            .map(|channel| async {
                let deposit = channel.sign_deposit(chain, each, until).await;
                let done = channels
                    .deposit(&channel.config, &channel.voucher(1), &deposit)
                    .await
                    .expect("the deposit is executed");
                (channel.row(each, each).await, chain.gas_used(done.transaction).await)
            })
            .buffered(8)
            .collect()
            .await;
        let deposits: u64 = filled.iter().map(|(_, gas)| gas).sum();
        let rows: Vec<_> = filled.into_iter().map(|(row, _)| row).collect();
        let claimed = channels.claim(&rows, &AuthorizerKey::new(key)).await.expect("the claim is executed");
        assert_eq!((claimed.transactions.len(), claimed.amount), (1, PRICE * payments));
        let claim = chain.gas_used(claimed.transactions[0]).await;
        let settled = channels.settle(receiver, chain.asset().address).await.unwrap().expect("there is something");
        let settle = chain.gas_used(settled.transaction).await;
        assert_eq!(u128::from(chain.balance(receiver).await), PRICE * payments);
        let per_payment = (deposits + claim + settle) as f64 / payments as f64;
        println!("{payments:>8} {payers:>7} {deposits:>9} {claim:>9} {settle:>9} {per_payment:>11.1}");
        assert!(per_payment <= f64::from(most), "{per_payment} gas");
    }
}
