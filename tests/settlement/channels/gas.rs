//! What a payment costs its seller on the chain: alone, in a batch, and by voucher with deposits, claim and settlement.

use std::time::Duration;

use alloy_signer_local::PrivateKeySigner;
use futures_util::{StreamExt as _, stream};
use support::{
    authorization::random_address,
    chain::{Chain, on_every_chain},
    escrow::{Channel, install},
    token::transfer_vrs,
};
use tower_x402::{
    facilitator::channels::{ChannelFacilitator as _, RefundOrder},
    vouchers::AuthorizerKey,
};

use super::{builder, gas_key};
use crate::batch_settler::batch::{Payment, Stage, batch, paid};

on_every_chain! {
    a_hundred_thousand_payments_cost_less_than_180_gas_each,
}

/// The price of an evaluation, in dollars and in atomic units.
const PRICE_IN_DOLLARS: f64 = 0.001;
const PRICE: u128 = 1_000;

/// Prints the tables in `docs/settlement-figures.md`.
async fn a_hundred_thousand_payments_cost_less_than_180_gas_each(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (alone, batched) = (gas_of_exact(&stage, 1).await, gas_of_exact(&stage, 100).await);
    assert!(alone <= 87_000.0 && batched <= 49_000.0, "{alone} gas alone, {batched} in a batch");
    let mut ways = vec![("`exact`, alone", alone), ("`exact`, batches of 100", batched)];
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
        ways.push((if payers == 10 { "vouchers, 10 payers" } else { "vouchers, 100 payers" }, per_payment));
    }
    print_costs(&ways);
    let refund = gas_of_refund(chain).await;
    println!("{refund} gas for a refund with a claim");
    assert!(refund <= 155_000, "{refund} gas");
}

/// Returns the gas of a refund to a payer that has other money, with the claim that goes before it in the same transaction.
async fn gas_of_refund(chain: &dyn Chain) -> u64 {
    let channels = builder(chain).signer(gas_key(chain).await).build().await.unwrap();
    let key = PrivateKeySigner::random();
    let channel = Channel::funded(chain, random_address(), &key, 20_000).await;
    let deposit = channel.sign_deposit(chain, 10_000, chain.timestamp().await + 3_600).await;
    let voucher = channel.voucher(1_000);
    channels.deposit(&channel.config, &voucher, &deposit).await.expect("the deposit is executed");
    let claim = Some(channel.row(1_000, 1_000).await);
    let order = RefundOrder { config: channel.config, voucher, amount: 9_000, nonce: 0, claim };
    let refunded = channels.refund(&order, &AuthorizerKey::new(key)).await.expect("the refund is executed");
    assert_eq!((refunded.amount, channel.state(chain).await), (9_000, (1_000, 1_000)));
    chain.gas_used(refunded.transaction).await
}

/// Returns the gas of each of `count` payments by authorization, in one transaction.
async fn gas_of_exact(stage: &Stage<'_>, count: usize) -> f64 {
    // A payee who was paid before, as all but new ones.
    let payee = random_address();
    stage.chain.mint(payee, 1).await;
    let payers = stage.payers(count).await;
    let payments: Vec<_> = payers.iter().map(|payer| Payment::by(payer, payee, stage.chain)).collect();
    let receipt = match &payments[..] {
        [alone] => stage.relayer.send(stage.chain, transfer_vrs(&alone.message, &alone.signature)).await,
        all => stage.settle(batch(stage.chain, all)).await,
    };
    assert!(paid(&payments, &receipt).iter().all(|paid| *paid), "all {count} are paid");
    receipt.gas_used as f64 / count as f64
}

/// Prints what a payment costs in each of these ways, and how much of its price that is.
fn print_costs(ways: &[(&str, f64)]) {
    print!("| gas | an ETH |");
    ways.iter().for_each(|(name, gas)| print!(" {name}: {gas:.0} gas |"));
    println!("\n|---|---|{}", "---|".repeat(ways.len()));
    for (gwei, ether) in
        [0.005, 0.05, 0.5].into_iter().flat_map(|gwei| [2_000.0, 3_000.0, 5_000.0].map(|ether| (gwei, ether)))
    {
        print!("| {gwei} gwei | ${ether} |");
        for (_, gas) in ways {
            let dollars = gas * gwei * 1e-9 * ether;
            print!(" ${dollars:.6}, {:.1} % |", 100.0 * dollars / PRICE_IN_DOLLARS);
        }
        println!();
    }
}
