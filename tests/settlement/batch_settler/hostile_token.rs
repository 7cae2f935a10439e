//! A token that misbehaves costs its own batch gas, up to the cap for each payment, and nothing else.

use alloy_primitives::{Address, Bytes, U256, address};
use alloy_rpc_types_eth::TransactionReceipt;
use alloy_sol_types::{SolCall, SolError, SolEvent, sol};
use tower_x402::facilitator::BatchSettler;

use super::batch::{GAS_CAP, MAX_GAS, Payment, Settler, Stage, pack, paid, unsigned};
use support::{
    authorization::random_address,
    chain::{Chain, creation_code, on_every_chain},
};

sol! {
    /// `contracts/test/HostileToken.sol`.
    #[derive(Debug)]
    interface Hostile {
        event Called(address from, address to, uint256 value, uint256 validAfter, uint256 validBefore, bytes32 nonce,
            uint8 v, bytes32 r, bytes32 s, uint256 gas);

        function setCallback(address target, bytes data);
        function setLeast(uint256 least);
    }
}

/// What the token does with an authorization of this value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Reverts = 1,
    RevertsWithALongReason,
    ReturnsFalse,
    ReturnsNothing,
    ReturnsALot,
    BurnsAllGas,
    FailsAtOnce,
    TakesAllButTheLast,
    CallsBack,
}

pub const PAYEE: Address = address!("00000000000000000000000000000000000bacc0");

on_every_chain! {
    every_argument_arrives_as_it_was_signed,
    no_member_makes_another_fail_or_costs_more_than_its_cap,
    a_token_that_calls_the_settler_again_pays_each_once,
    a_batch_of_nothing_but_failures_reverts,
}

pub async fn deploy(chain: &dyn Chain) -> Address {
    chain.deploy(creation_code("HostileToken")).await
}

async fn every_argument_arrives_as_it_was_signed(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let token = deploy(chain).await;
    let mut payments: Vec<_> = (0..40).map(|n| unsigned(random_address(), PAYEE, 1_000 + n)).collect();
    let (value, time) = ((U256::from(1) << 96) - U256::from(1), (U256::from(1) << 40) - U256::from(1));
    for (n, payment) in payments.iter_mut().enumerate() {
        let message = &mut payment.message;
        message.validAfter = if n % 3 == 0 { time } else { U256::from(n) };
        message.validBefore = if n % 2 == 0 { time } else { U256::ZERO };
        if n % 5 == 0 {
            message.value = value;
        }
    }
    assert!([27, 28].iter().all(|v| payments.iter().any(|payment| payment.signature.v() == *v)));

    let receipt = stage.settle(pack(token, GAS_CAP, &[(PAYEE, &payments)])).await;
    let called: Vec<_> = receipt.logs().iter().filter_map(|log| Hostile::Called::decode_log(&log.inner).ok()).collect();
    assert_eq!(called.len(), payments.len());
    for (called, Payment { message, signature }) in called.iter().zip(&payments) {
        assert_eq!((called.from, called.to, called.value), (message.from, message.to, message.value));
        assert_eq!((called.validAfter, called.validBefore), (message.validAfter, message.validBefore));
        assert_eq!(called.nonce, message.nonce);
        assert_eq!((called.v, called.r, called.s), (signature.v(), signature.r(), signature.s()));
    }
}

async fn no_member_makes_another_fail_or_costs_more_than_its_cap(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let token = deploy(chain).await;
    let honest = || unsigned(random_address(), PAYEE, 1_000);
    let pair = stage.settle(pack(token, GAS_CAP, &[(PAYEE, &[honest(), honest()])])).await.gas_used;
    let beside_call = 138 * 16 + 2_600 + 600;
    for (way, at_least, at_most) in [
        (Way::Reverts, 0, 5_000),
        (Way::RevertsWithALongReason, 90_000, 100_000),
        (Way::ReturnsFalse, 0, 5_000),
        (Way::ReturnsNothing, 0, 5_000),
        // Were it copied, it would be paid for twice.
        (Way::ReturnsALot, 90_000, 100_000),
        (Way::BurnsAllGas, 119_000, 120_000),
        (Way::FailsAtOnce, 119_000, 120_000),
        (Way::TakesAllButTheLast, 119_000, 120_000),
    ] {
        let members = [honest(), unsigned(random_address(), PAYEE, way as u64), honest()];
        let receipt = stage.settle(pack(token, GAS_CAP, &[(PAYEE, &members)])).await;
        assert_eq!(paid(&members, &receipt), [true, way == Way::TakesAllButTheLast, true], "{way:?}");
        let cost = receipt.gas_used - pair;
        assert!((at_least..at_most + beside_call).contains(&cost), "{way:?}: {cost}");
    }
}

async fn a_token_that_calls_the_settler_again_pays_each_once(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let token = deploy(chain).await;
    let honest: Vec<_> = (0..3).map(|n| unsigned(random_address(), PAYEE, 1_000 + n)).collect();
    let caller = unsigned(random_address(), PAYEE, Way::CallsBack as u64);
    // While it is called with `caller`, it has the settler execute the second and the third.
    let again = pack(token, 70_000, &[(PAYEE, &honest[1..])]);
    let callback = Hostile::setCallbackCall { target: BatchSettler::ADDRESS, data: again }.abi_encode();
    assert!(stage.relayer.send_to(chain, token, callback.into()).await.status());

    let members = [honest[0].clone(), caller.clone(), honest[1].clone(), honest[2].clone()];
    let calldata = pack(token, 400_000, &[(PAYEE, &members)]);
    assert_eq!(stage.simulate(calldata.clone(), MAX_GAS).await, Some(Ok((4, 2))));
    let receipt = stage.settle(calldata).await;
    assert_eq!(paid(&members, &receipt), [true; 4]);
    assert_eq!(calls(&receipt), 4);

    // Calling back for ever ends with the cap.
    let endless = pack(token, 400_000, &[(PAYEE, &[unsigned(random_address(), PAYEE, Way::CallsBack as u64)])]);
    let callback = Hostile::setCallbackCall { target: BatchSettler::ADDRESS, data: endless.clone() }.abi_encode();
    assert!(stage.relayer.send_to(chain, token, callback.into()).await.status());
    let last = unsigned(random_address(), PAYEE, 1_000);
    let members = [unsigned(random_address(), PAYEE, Way::CallsBack as u64), last.clone()];
    let receipt = stage.settle(pack(token, 400_000, &[(PAYEE, &members)])).await;
    assert_eq!(paid(&members, &receipt), [false, true]);
}

async fn a_batch_of_nothing_but_failures_reverts(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let token = deploy(chain).await;
    let members: Vec<_> = [Way::Reverts, Way::FailsAtOnce, Way::BurnsAllGas]
        .map(|way| unsigned(random_address(), PAYEE, way as u64))
        .into();
    let calldata = pack(token, GAS_CAP, &[(PAYEE, &members)]);
    let nothing: Bytes = Settler::NothingExecuted { reached: U256::from(3) }.abi_encode().into();
    assert_eq!(stage.simulate(calldata.clone(), MAX_GAS).await, Some(Err(nothing)));
    assert!(!stage.settle(calldata).await.status());
}

fn calls(receipt: &TransactionReceipt) -> usize {
    receipt.logs().iter().filter(|log| log.topic0() == Some(&Hostile::Called::SIGNATURE_HASH)).count()
}
