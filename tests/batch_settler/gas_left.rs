//! Whatever gas a transaction is given: a payment is executed with its whole gas cap, or not touched.

use alloy_primitives::{Address, U256};
use alloy_sol_types::{SolError, SolEvent};

use crate::{
    batch::{GAS_CAP, Payment, Settler, Stage, batch, nonce, pack, paid, unsigned},
    hostile_token::{Hostile, Way, deploy},
    support::{
        authorization::random_address,
        chain::{Chain, on_every_chain},
        token::Token,
    },
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
    sweep(&stage, batch(chain, &payments), 4, 997).await;
}

async fn no_gas_limit_keeps_a_payment_from_its_whole_cap(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let token = deploy(chain).await;
    for gas_cap in [70_000, 400_000] {
        let payments: Vec<_> = (0..4)
            .map(|_| unsigned(random_address(), Address::repeat_byte(2), Way::TakesAllButTheLast as u64))
            .collect();
        let calldata = pack(token, gas_cap, &[(Address::repeat_byte(2), &payments)]);
        sweep(&stage, calldata.clone(), 4, u64::from(gas_cap) / 101).await;

        // In a block the token tells how much gas came with each call.
        let receipt = stage.settle_with(calldata, 64_000 + u64::from(gas_cap) * 7 / 2).await;
        let gas: Vec<u64> = receipt
            .logs()
            .iter()
            .filter_map(|log| Hostile::Called::decode_log(&log.inner).ok())
            .map(|called| called.gas.to())
            .collect();
        assert_eq!(gas.len(), 3, "half a cap is left for the fourth");
        assert!(gas.iter().all(|gas| u64::from(gas_cap) - 1_000 < *gas && *gas <= u64::from(gas_cap)), "{gas:?}");
    }
}

/// Simulates with ever more gas, up to where all `count` payments are executed.
async fn sweep(stage: &Stage<'_>, calldata: alloy_primitives::Bytes, count: u64, step: u64) {
    let untouched = Settler::NothingExecuted { reached: U256::ZERO }.abi_encode();
    let mut most = 0;
    let mut counts = Vec::new();
    for gas_limit in (21_000..).step_by(step as usize) {
        assert!(gas_limit < 5_000_000, "{most} of {count}");
        match stage.simulate(calldata.clone(), gas_limit).await {
            None => assert_eq!(most, 0, "{gas_limit}: out of gas"),
            Some(Err(revert)) => {
                assert_eq!(revert, untouched, "{gas_limit}");
                assert_eq!(most, 0, "{gas_limit}");
            }
            Some(Ok((reached, executed))) => {
                assert_eq!(reached, executed, "{gas_limit}: a payment failed for want of gas");
                assert!(executed >= most, "{gas_limit}");
                most = executed;
                counts.push(executed);
            }
        }
        if most == count {
            break;
        }
    }
    counts.dedup();
    assert_eq!(counts, (1..=count).collect::<Vec<_>>(), "one by one");
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
