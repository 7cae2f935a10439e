//! For every gas limit, a payment is executed with its whole gas cap, or skipped.

use alloy_primitives::{Bytes, U256};
use alloy_sol_types::{SolCall, SolError, SolEvent};

use super::{
    batch::{GAS_CAP, Payment, Settler, Stage, batch, nonce, pack, paid, unsigned},
    hostile_token::{Hostile, PAYEE, Way, deploy},
};
use support::{
    authorization::random_address,
    chain::{Chain, on_every_chain},
    token::Token,
};

on_every_chain! {
    no_gas_limit_makes_a_payment_fail,
    no_gas_limit_keeps_a_payment_from_its_whole_cap,
    what_is_not_reached_is_untouched_and_paid_later,
}

async fn no_gas_limit_makes_a_payment_fail(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payers, payee) = (stage.payers(4).await, random_address());
    let payments: Vec<_> = payers.iter().map(|payer| Payment::by(payer, payee, chain)).collect();
    let counts = sweep(&stage, batch(chain, &payments), 21_000, 400_000).await;
    assert_eq!(counts, [1, 2, 3, 4]);
}

async fn no_gas_limit_keeps_a_payment_from_its_whole_cap(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let token = deploy(chain).await;
    // The token refuses what comes with less than its cap. Of a large one, 1/64 is more than all else.
    for (gas_cap, way, members, from, to) in
        [(70_000, Way::TakesAllButTheLast as u64, 3, 21_000, 320_000), (4_000_000, 1_000, 1, 4_000_000, 4_150_000)]
    {
        let least = Hostile::setLeastCall { least: U256::from(gas_cap - 1_000) }.abi_encode();
        assert!(stage.relayer.send_to(chain, token, least.into()).await.status());
        let payments: Vec<_> = (0..members).map(|_| unsigned(random_address(), PAYEE, way)).collect();
        let calldata = pack(token, gas_cap, &[(PAYEE, &payments)]);
        let counts = sweep(&stage, calldata.clone(), from, to).await;
        assert_eq!(counts, (1..=members).collect::<Vec<_>>(), "{gas_cap}");

        // In a block the token tells how much gas came with each call.
        let receipt = stage.settle_with(calldata, to).await;
        let gas: Vec<u64> = receipt
            .logs()
            .iter()
            .filter_map(|log| Hostile::Called::decode_log(&log.inner).ok())
            .map(|called| called.gas.to())
            .collect();
        assert_eq!(gas.len() as u64, members);
        assert!(gas.iter().all(|gas| *gas <= u64::from(gas_cap)), "{gas:?}");
    }
}

/// Simulates with ever more gas, and returns how many payments were executed, without repetition.
async fn sweep(stage: &Stage<'_>, calldata: Bytes, from: u64, to: u64) -> Vec<u64> {
    let untouched: Bytes = Settler::NothingExecuted { reached: U256::ZERO }.abi_encode().into();
    let mut counts = Vec::new();
    for gas_limit in (from..to).step_by(997) {
        match stage.simulate(calldata.clone(), gas_limit).await {
            // It does not even get as far as the first payment.
            None => assert!(counts.is_empty(), "{gas_limit}: out of gas"),
            Some(Err(revert)) => {
                assert_eq!(revert, untouched, "{gas_limit}");
                assert!(counts.is_empty(), "{gas_limit}");
            }
            Some(Ok((reached, executed))) => {
                assert_eq!(reached, executed, "{gas_limit}: a payment failed for want of gas");
                counts.push(executed);
            }
        }
    }
    counts.dedup();
    counts
}

async fn what_is_not_reached_is_untouched_and_paid_later(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payers, payee) = (stage.payers(20).await, random_address());
    let payments: Vec<_> = payers.iter().map(|payer| Payment::by(payer, payee, chain)).collect();
    let receipt = stage.settle_with(batch(chain, &payments), 700_000).await;
    assert!(receipt.status());
    let paid_first = paid(&payments, &receipt);
    let reached = paid_first.iter().take_while(|paid| **paid).count();
    assert!((5..15).contains(&reached), "{reached}");
    assert!(paid_first[reached..].iter().all(|paid| !paid));
    assert!(700_000 - receipt.gas_used >= u64::from(GAS_CAP) / 3, "the rest comes back to the sender");
    for payment in &payments[reached..] {
        let state = Token::authorizationStateCall { authorizer: payment.message.from, nonce: nonce(payment) };
        assert!(!chain.simulate(state).await.unwrap());
    }

    let rest = &payments[reached..];
    assert!(paid(rest, &stage.settle(batch(chain, rest)).await).iter().all(|paid| *paid));
    assert_eq!(chain.balance(payee).await, 2_000);
}
