//! The gas of a payment in a batch, on anvil with Circle's bytecode. It is deterministic, except for the zero bytes in signatures.
//!
//! `cargo test -p tower-x402-tests --features test-peers --test settlement -- gas:: --nocapture` prints the table.

use alloy_signer_local::PrivateKeySigner;

use super::batch::{Payment, Stage, batch, paid};
use support::{anvil::AnvilChain, authorization::random_address, chain::Chain, token::transfer_vrs};

/// At most, in a batch of a hundred.
const DISTINCT: u64 = 49_000;
const SAME: u64 = 42_000;

mod anvil {
    #[tokio::test]
    async fn gas_of_a_payment_in_a_batch_is_within_its_budget() {
        super::gas_of_a_payment_in_a_batch_is_within_its_budget().await;
    }
}

#[allow(clippy::print_stdout)]
async fn gas_of_a_payment_in_a_batch_is_within_its_budget() {
    let chain = AnvilChain::start(None).await;
    let stage = Stage::on(&chain).await;
    // A payee who was paid before, as all but new ones.
    let payee = random_address();
    chain.mint(payee, 1).await;
    let payers = stage.payers(330).await;

    let alone = Payment::by(&payers[0], payee, &chain);
    let receipt = stage.relayer.send(&chain, transfer_vrs(&alone.message, &alone.signature)).await;
    assert!(alone.is_paid_by(&receipt));
    println!("alone: {} gas, {} bytes of calldata", receipt.gas_used, 4 + 9 * 32);
    println!("{:>8} {:>16} {:>16} {:>12}", "payments", "distinct payers", "the same payer", "bytes each");
    for count in [1, 2, 5, 10, 50, 100, 200, 330] {
        let distinct = gas_each(&stage, &payers[..count], payee).await;
        let same = gas_each(&stage, &vec![payers[0].clone(); count], payee).await;
        let bytes = (24 + 22 + 138 * count) as f64 / count as f64;
        println!("{count:>8} {distinct:>16} {same:>16} {bytes:>12.1}");
        if count >= 100 {
            assert!(distinct <= DISTINCT, "{count} payers: {distinct} gas each");
            assert!(same <= SAME, "{count} payments of one payer: {same} gas each");
        }
    }
}

async fn gas_each(stage: &Stage<'_>, payers: &[PrivateKeySigner], payee: alloy_primitives::Address) -> u64 {
    let payments: Vec<_> = payers.iter().map(|payer| Payment::by(payer, payee, stage.chain)).collect();
    let receipt = stage.settle(batch(stage.chain, &payments)).await;
    assert!(paid(&payments, &receipt).iter().all(|paid| *paid), "all {} are paid", payments.len());
    receipt.gas_used.div_ceil(payments.len() as u64)
}
