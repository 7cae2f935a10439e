//! Payments of the chain's own token: all valid ones are made, whatever happens to the others.

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall, SolError, sol};

use super::batch::{GAS_CAP, MAX_GAS, Payment, Settler, Stage, batch, pack, paid};
use support::{
    authorization::{CancelAuthorization, TransferWithAuthorization, authorization, random_address, sign},
    chain::{Chain, on_every_chain},
    token::{Token, cancel_vrs, transfer_vrs},
};

sol! {
    interface Wallet {
        function setGasBurn(uint256 amount);
    }
}

on_every_chain! {
    every_member_is_paid,
    three_hundred_and_thirty_payments_fit_one_transaction,
    payees_share_a_transaction,
    members_that_the_token_refuses_keep_nobody_from_being_paid,
    what_somebody_else_executed_first_is_left_out,
    a_batch_that_was_executed_before_reverts_cheaply,
    ninety_nine_are_paid_around_a_payer_that_gained_code,
    a_hundred_payments_of_a_delegated_payer_cost_little,
}

async fn every_member_is_paid(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let payers = stage.payers(100).await;
    for count in [1, 2, 100] {
        let payee = random_address();
        let payments: Vec<_> = payers[..count].iter().map(|payer| Payment::by(payer, payee, chain)).collect();
        let receipt = stage.settle(batch(chain, &payments)).await;
        assert!(receipt.status());
        assert!(paid(&payments, &receipt).iter().all(|paid| *paid));
        assert_eq!(receipt.logs().len(), 2 * count, "nothing but the token's events");
        assert_eq!(chain.balance(payee).await, 100 * count as u64);
    }
}

async fn three_hundred_and_thirty_payments_fit_one_transaction(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payers, payee) = (stage.payers(330).await, random_address());
    let payments: Vec<_> = payers.iter().map(|payer| Payment::by(payer, payee, chain)).collect();
    let receipt = stage.settle(batch(chain, &payments)).await;
    assert_eq!(paid(&payments, &receipt), [true; 330]);
    assert_eq!(chain.balance(payee).await, 33_000);
}

async fn payees_share_a_transaction(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payer, payees) = (stage.payer().await, [random_address(), random_address(), random_address()]);
    let to = |payee| [Payment::by(&payer, payee, chain), Payment::by(&payer, payee, chain)];
    let [first, second, third] = payees.map(to);
    let groups = [(payees[0], &first[..]), (payees[1], &second[..1]), (payees[2], &third), (payees[1], &second[1..])];
    let receipt = stage.settle(pack(chain.asset().address, GAS_CAP, &groups)).await;
    for payments in [first, second, third] {
        assert_eq!(paid(&payments, &receipt), [true; 2]);
        assert_eq!(chain.balance(payments[0].message.to).await, 200);
    }
    // The payee is signed too: a payment in another one's group pays nobody.
    let misplaced = Payment::by(&payer, payees[0], chain);
    let receipt = stage.settle(pack(chain.asset().address, GAS_CAP, &[(payees[1], &[misplaced])])).await;
    assert!(!receipt.status());
    assert_eq!(chain.balance(payees[1]).await, 200);
}

async fn members_that_the_token_refuses_keep_nobody_from_being_paid(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payer, payee) = (stage.payer().await, random_address());
    let poor = PrivateKeySigner::random();
    let barred = stage.payer().await;
    chain.blacklist(barred.address()).await;
    let now = chain.timestamp().await;
    let of = |change: fn(&mut TransferWithAuthorization, u64)| {
        let mut message = authorization(payer.address(), payee, 100);
        change(&mut message, now);
        Payment::signed(&payer, message, chain)
    };

    let good = Payment::by(&payer, payee, chain);
    let expired = of(|message, now| message.validBefore = U256::from(now));
    let early = of(|message, now| message.validAfter = U256::from(now + 3_000));
    let overdrawn = of(|message, _| message.value = U256::from(100_001));
    let poor = Payment::by(&poor, payee, chain);
    let barred = Payment::by(&barred, payee, chain);
    let forged = Payment::signed(&PrivateKeySigner::random(), authorization(payer.address(), payee, 100), chain);
    let mut flipped = Payment::by(&payer, payee, chain);
    flipped.signature = flipped.signature.with_v(55 - flipped.signature.v());
    let mut high_s = Payment::by(&payer, payee, chain);
    // As near to a high s as the layout comes; the key never made it.
    high_s.signature.0[32..64].fill(0x7f);

    let cancelled = Payment::by(&payer, payee, chain);
    let cancel = CancelAuthorization { authorizer: payer.address(), nonce: cancelled.message.nonce };
    let cancel = cancel_vrs(&cancel, &sign(&payer, &chain.asset(), &cancel));
    assert!(stage.relayer.send(chain, cancel).await.status());

    // The payer uses the nonce of a payment to pay itself.
    let outrun = Payment::by(&payer, payee, chain);
    let to_self = TransferWithAuthorization { to: payer.address(), ..outrun.message.clone() };
    let to_self = Payment::signed(&payer, to_self, chain);

    let bad =
        [good.clone(), expired, early, overdrawn, poor, barred, forged, flipped, high_s, cancelled, outrun.clone()];
    let honest: Vec<_> = (0..bad.len()).map(|_| Payment::by(&payer, payee, chain)).collect();
    let mut members = vec![good.clone()];
    for (bad, honest) in bad.iter().zip(&honest) {
        members.extend([bad.clone(), honest.clone()]);
    }
    let groups = [(payer.address(), &[to_self.clone()][..]), (payee, &members[..])];
    let receipt = stage.settle(pack(chain.asset().address, GAS_CAP, &groups)).await;

    assert!(receipt.status());
    assert!(good.is_paid_by(&receipt) && to_self.is_paid_by(&receipt));
    assert!(paid(&honest, &receipt).iter().all(|paid| *paid));
    assert_eq!(paid(&bad[1..], &receipt), [false; 10]);
    assert_eq!(chain.balance(payee).await, 100 * (1 + honest.len() as u64), "the duplicate pays once");
}

async fn what_somebody_else_executed_first_is_left_out(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payers, payee) = (stage.payers(10).await, random_address());
    let payments: Vec<_> = payers.iter().map(|payer| Payment::by(payer, payee, chain)).collect();
    let other = chain.relayer().await;
    for index in [0, 4] {
        let Payment { message, signature } = &payments[index];
        assert!(other.send(chain, transfer_vrs(message, signature)).await.status());
    }
    assert!(stage.settle(batch(chain, &payments[7..])).await.status());

    let receipt = stage.settle(batch(chain, &payments)).await;
    let (t, f) = (true, false);
    assert_eq!(paid(&payments, &receipt), [f, t, t, t, f, t, t, f, f, f]);
    assert_eq!(chain.balance(payee).await, 1_000);
}

async fn a_batch_that_was_executed_before_reverts_cheaply(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payers, payee) = (stage.payers(10).await, random_address());
    let payments: Vec<_> = payers.iter().map(|payer| Payment::by(payer, payee, chain)).collect();
    let calldata = batch(chain, &payments);
    let first = stage.settle(calldata.clone()).await;
    assert!(first.status());

    let nothing = Settler::NothingExecuted { reached: U256::from(10) }.abi_encode();
    assert_eq!(stage.simulate(calldata.clone(), MAX_GAS).await, Some(Err(nothing.into())));
    let second = stage.settle(calldata).await;
    assert!(!second.status());
    assert!(second.gas_used < first.gas_used / 2, "{} after {}", second.gas_used, first.gas_used);
}

async fn ninety_nine_are_paid_around_a_payer_that_gained_code(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (payers, payee) = (stage.payers(100).await, random_address());
    chain.mint(payee, 1).await;
    let payments = |payers: &[PrivateKeySigner]| -> Vec<_> {
        payers.iter().map(|payer| Payment::by(payer, payee, chain)).collect()
    };
    let without = payments(&[&payers[..50], &payers[51..]].concat());
    let without = stage.settle(batch(chain, &without)).await.gas_used;
    let members = payments(&payers);
    burn_gas_from_now_on(&stage, payers[50].address()).await;
    // The token would ask it, and it would burn what it is given.
    let Payment { message, signature } = &members[50];
    let alone = stage.relayer.send(chain, transfer_vrs(message, signature)).await;
    assert!(!alone.status() && alone.gas_used > 450_000, "{}", alone.gas_used);

    let receipt = stage.settle(batch(chain, &members)).await;
    let paid = paid(&members, &receipt);
    assert!(paid.iter().enumerate().all(|(n, paid)| *paid == (n != 50)), "{paid:?}");
    // It costs 138 bytes and a look at an account; the zeros in the signatures of the others vary by a little.
    assert!(receipt.gas_used < without + 10_000, "{} after {without}", receipt.gas_used);
}

async fn a_hundred_payments_of_a_delegated_payer_cost_little(chain: &dyn Chain) {
    let stage = Stage::on(chain).await;
    let (attacker, honest, payee) = (stage.payer().await, stage.payer().await, random_address());
    let mut members: Vec<_> = (0..100).map(|_| Payment::by(&attacker, payee, chain)).collect();
    members.push(Payment::by(&honest, payee, chain));
    burn_gas_from_now_on(&stage, attacker.address()).await;

    let receipt = stage.settle(batch(chain, &members)).await;
    assert!(members[100].is_paid_by(&receipt));
    // Calldata alone costs up to 40 gas a byte where nothing else is done (EIP-7623).
    assert!(receipt.gas_used < 21_000 + 101 * 40 * 140, "{}", receipt.gas_used);
    assert_eq!(chain.balance(payee).await, 100);
}

/// An account delegates to a wallet that burns all gas when it is asked about a signature.
async fn burn_gas_from_now_on(stage: &Stage<'_>, account: Address) {
    let wallet = stage.chain.deploy_wallet(Address::ZERO).await;
    stage.chain.delegate(account, wallet).await;
    let burn = Wallet::setGasBurnCall { amount: U256::from(100_000_000) }.abi_encode();
    assert!(stage.relayer.send_to(stage.chain, account, burn.into()).await.status());
    let used = Token::authorizationStateCall { authorizer: account, nonce: Default::default() };
    assert!(!stage.chain.simulate(used).await.unwrap(), "the token itself still answers");
}
