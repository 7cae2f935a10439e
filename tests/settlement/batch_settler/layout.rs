//! Malformed calldata executes nothing.

use std::slice::from_ref;

use alloy_primitives::{Address, Bytes, U256};
use alloy_provider::Provider;
use alloy_rpc_types_eth::TransactionRequest;
use alloy_sol_types::SolError;
use tower_x402::facilitator::BatchSettler;

use super::{
    batch::{GAS_CAP, MAX_GAS, Payment, Settler, Stage, batch, pack, unsigned},
    hostile_token::{PAYEE, deploy},
};
use support::{
    authorization::random_address,
    chain::{Chain, on_every_chain},
};

on_every_chain! {
    a_length_that_does_not_fit_the_counts_is_refused,
    whatever_is_not_groups_end_to_end_is_refused,
    a_batch_of_nothing_is_refused,
    a_token_without_code_is_refused,
    ether_is_refused,
}

async fn a_length_that_does_not_fit_the_counts_is_refused(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payer, payees) = (stage.payer().await, [random_address(), random_address()]);
    let [first, second] = payees.map(|payee| Payment::by(&payer, payee, chain));
    let good = pack(chain.asset().address, GAS_CAP, &[(payees[0], &[first]), (payees[1], &[second])]);
    assert_eq!(good.len(), 24 + 2 * (22 + 138));

    // Cut after the first group it is a batch of one; nowhere else.
    let cuts = (0..good.len()).filter(|length| *length != 24 + 22 + 138);
    for length in cuts {
        refused(&stage, good.slice(..length), &format!("cut to {length} bytes")).await;
    }
    for extra in [1, 20, 21, 22, 137, 138, 139] {
        refused(&stage, [good.as_ref(), &vec![0; extra]].concat().into(), &format!("{extra} zeros more")).await;
    }
    for count in [0_u16, 2, 3, u16::MAX] {
        for group in [24, 24 + 22 + 138] {
            let mut wrong = good.to_vec();
            wrong[group + 20..group + 22].copy_from_slice(&count.to_be_bytes());
            refused(&stage, wrong.into(), &format!("a count of {count} at {group}")).await;
        }
    }
    assert!(!stage.settle(good.slice(..good.len() - 1)).await.status());
    assert_eq!(chain.balance(payees[0]).await, 0, "not even what came before the mistake");
    assert!(stage.settle(good).await.status());
    assert_eq!((chain.balance(payees[0]).await, chain.balance(payees[1]).await), (100, 100));
}

/// Groups of all sizes, damaged in their counts and lengths; each judged by a reader of the layout that shares nothing with the
/// contract.
async fn whatever_is_not_groups_end_to_end_is_refused(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let token = deploy(chain).await;
    let mut random = Random(0x5eed);
    let (mut good, mut bad) = (0, 0);
    for _ in 0..200 {
        let groups: Vec<Vec<_>> = (0..1 + random.below(4))
            .map(|_| (0..1 + random.below(3)).map(|_| unsigned(random_address(), PAYEE, 1_000)).collect())
            .collect();
        let groups: Vec<_> = groups.iter().map(|payments| (PAYEE, &payments[..])).collect();
        let mut calldata = pack(token, GAS_CAP, &groups).to_vec();
        match random.below(4) {
            0 => {}
            1 => calldata.truncate(24 + random.below(calldata.len() - 24)),
            2 => calldata.extend(vec![random.below(3) as u8; random.below(400)]),
            _ => calldata[24 + 20..24 + 22].copy_from_slice(&(random.below(10) as u16).to_be_bytes()),
        }
        match payments_in(&calldata) {
            Some(payments) => {
                // What fills a gap may be a payment that the token takes for another of its ways, so only the count is certain.
                let (reached, _) = stage.simulate(calldata.into(), MAX_GAS).await.unwrap().unwrap();
                assert_eq!(reached, payments);
                good += 1;
            }
            None => {
                refused(&stage, calldata.into(), "damaged").await;
                bad += 1;
            }
        }
    }
    assert!(good > 40 && bad > 40, "{good} good, {bad} bad");
}

/// How many payments the calldata holds, if it is well-formed.
fn payments_in(calldata: &[u8]) -> Option<u64> {
    let mut rest = calldata.get(24..).filter(|rest| !rest.is_empty())?;
    let mut payments = 0;
    while !rest.is_empty() {
        let count = u16::from_be_bytes(rest.get(20..22)?.try_into().unwrap());
        let records = rest.get(22..22 + 138 * usize::from(count)).filter(|records| !records.is_empty())?;
        rest = &rest[22 + records.len()..];
        payments += u64::from(count);
    }
    Some(payments)
}

/// The same numbers every time (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

async fn a_batch_of_nothing_is_refused(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let token = chain.asset().address;
    refused(&stage, Bytes::new(), "nothing").await;
    refused(&stage, pack(token, GAS_CAP, &[]), "no group").await;
    refused(&stage, pack(token, GAS_CAP, &[(random_address(), &[])]), "no payment").await;
    let payment = Payment::by(&stage.payer().await, random_address(), chain);
    refused(&stage, pack(token, 0, &[(payment.message.to, &[payment])]), "no gas").await;
}

async fn a_token_without_code_is_refused(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let payment = Payment::by(&stage.payer().await, random_address(), chain);
    // Where there is nothing, and at a precompile, every call succeeds.
    for token in [random_address(), Address::with_last_byte(4)] {
        let calldata = pack(token, GAS_CAP, &[(payment.message.to, from_ref(&payment))]);
        let revert = Settler::NoToken {}.abi_encode();
        assert_eq!(stage.simulate(calldata, MAX_GAS).await, Some(Err(revert.into())), "{token}");
    }
}

async fn ether_is_refused(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let payment = Payment::by(&stage.payer().await, random_address(), chain);
    let with = |wei: u64, input: Bytes| {
        let request = TransactionRequest::default().from(stage.relayer.address).to(BatchSettler::ADDRESS);
        chain.provider().call(request.value(U256::from(wei)).input(input.into()))
    };
    assert!(with(0, batch(chain, from_ref(&payment))).await.is_ok());
    assert!(with(1, batch(chain, &[payment])).await.is_err());
    assert!(with(1, Bytes::new()).await.is_err());
}

async fn refused(stage: &Stage<'_>, calldata: Bytes, what: &str) {
    let revert = Settler::Malformed {}.abi_encode();
    assert_eq!(stage.simulate(calldata, MAX_GAS).await, Some(Err(revert.into())), "{what}");
}
