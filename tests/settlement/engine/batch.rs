//! Many payments in one transaction, through the engine.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use alloy_primitives::{Address, Bytes, U256};
use alloy_provider::Provider as _;
use alloy_sol_types::{SolCall as _, sol};
use futures_util::future::join_all;
use tower_x402::{
    Clock as _,
    facilitator::{BatchSettler, Facilitator},
    ledger::{Settlement, SettlementStep},
    payment::{Prechecked, SettlementOutcome, Terms, Window, precheck},
    protocol::{ExactPayload, Reason},
};

use super::settle::bury_the_first_transaction;
use support::engine_stage::*;

sol! {
    interface Minted {
        function initialize(string name, string version, address owner);
        function owner() returns (address);
        function mint(address to, uint256 amount);
        function balanceOf(address account) returns (uint256);
    }
}

async fn with_settler(millis: u64) -> Arc<Stage> {
    let stage = Stage::with(every(millis), |b| b.block_time(Duration::from_millis(millis))).await;
    stage.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
    Arc::new(stage)
}

async fn settle_at_once(stage: &Arc<Stage>, payments: &[Prechecked]) -> Vec<SettlementOutcome> {
    let verified = join_all(payments.iter().map(|payment| stage.admit(payment))).await;
    let settling = payments.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified));
    join_all(settling).await.into_iter().map(Result::unwrap).collect()
}

fn payments(stage: &Stage, count: usize) -> Vec<Prechecked> {
    (0..count).map(|_| stage.payment(&stage.payer(1))).collect()
}

fn fee(outcome: &SettlementOutcome) -> U256 {
    match outcome {
        SettlementOutcome::Settled { fee: Some(fee), .. } => *fee,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn burst_shares_a_few_transactions_and_their_cost() {
    let stage = with_settler(200).await;
    let before = stage.facilitator.stats();
    let outcomes = settle_at_once(&stage, &payments(&stage, 150)).await;
    assert_eq!(stage.received(), 150);
    let after = stage.facilitator.stats();
    let transactions = after.transactions - before.transactions;
    assert!(transactions <= 4, "{transactions} transactions for 150 payments at once");
    assert_eq!(after.settled - before.settled, 150);
    let fees: U256 = outcomes.iter().map(fee).sum();
    let spent = after.spent - before.spent;
    assert!(fees <= spent && spent - fees < U256::from(150), "what was spent, {spent}, is the payments': {fees}");
    assert_eq!((after.pending, after.in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn no_transaction_holds_more_payments_than_it_may() {
    let stage = Stage::with(every(200), |b| b.block_time(Duration::from_millis(200)).batch_size(3)).await;
    stage.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
    let stage = Arc::new(stage);
    let outcomes = settle_at_once(&stage, &payments(&stage, 10)).await;
    let mut by_transaction = BTreeMap::new();
    for outcome in outcomes {
        *by_transaction.entry(paid_by(&Ok(outcome))).or_insert(0) += 1;
    }
    assert_eq!(by_transaction.values().max(), Some(&3), "{by_transaction:?}");
    assert_eq!(stage.received(), 10);
}

/// The contract takes signatures of keys only.
#[tokio::test(start_paused = true)]
async fn wallet_payment_is_signed_for_once_and_alone() {
    let stage = with_settler(200).await;
    let owner = new_key();
    let wallet = stage.wallet(owner.address());
    stage.devnet.mint(wallet, "$1".parse().unwrap()).unwrap();
    let mut all = payments(&stage, 8);
    for index in [0, 5] {
        all.insert(index, stage.payment_from(&owner, wallet));
    }
    let outcomes = settle_at_once(&stage, &all).await;
    let paid_by: Vec<_> = outcomes.into_iter().map(|outcome| paid_by(&Ok(outcome))).collect();
    for (index, payment) in all.iter().enumerate() {
        assert_eq!(stage.record(payment).await.transactions, [paid_by[index]], "{index}");
        let together = paid_by.iter().filter(|transaction| **transaction == paid_by[index]).count();
        assert_eq!(together == 1, [0, 5].contains(&index), "{index}: {paid_by:?}");
    }
}

/// Puts a second token on the devnet, and returns the terms of payments in it.
fn second_token(stage: &Stage) -> Arc<Terms> {
    let artifact: serde_json::Value =
        serde_json::from_str(include_str!("../../../crates/x402-devnet/contracts/artifacts/DevnetUsdc.json")).unwrap();
    let (address, owner) = (Address::repeat_byte(0x70), new_key().address());
    let code: Bytes = artifact["deployedBytecode"].as_str().unwrap().parse().unwrap();
    stage.devnet.set_code(address, code);
    let asset = support::changed(stage.devnet.asset(), |asset| {
        asset.address = address;
        asset.name = "Second".into();
    });
    let (name, version) = (asset.name.clone(), asset.version.clone());
    stage.devnet.execute(owner, address, Minted::initializeCall { name, version, owner }.abi_encode()).unwrap();
    Arc::new(Terms::new(support::changed(stage.terms.offer().clone(), |offer| offer.asset = asset)))
}

/// A payment in that token, from a payer who has just enough of it.
fn payment_in(stage: &Stage, terms: &Arc<Terms>) -> Prechecked {
    let (payer, token) = (new_key(), terms.offer().asset.address);
    let owner = stage.devnet.call(token, Minted::ownerCall {}.abi_encode()).unwrap();
    let mint = Minted::mintCall { to: payer.address(), amount: U256::from(PRICE) };
    stage.devnet.execute(Address::from_slice(&owner[12..]), token, mint.abi_encode()).unwrap();
    let authorization = stage.authorization(payer.address());
    let payload = ExactPayload::new(sign(&payer, &authorization, terms), authorization);
    precheck(terms.clone(), payload, Window::default().skew(5), stage.clock.now()).unwrap()
}

/// The contract calls one token for all: payments in another one would be left behind, and each take a transaction of its own.
#[tokio::test(start_paused = true)]
async fn only_payments_in_one_token_share_a_transaction() {
    let stage = with_settler(200).await;
    let terms = second_token(&stage);
    let both = |_| [stage.payment(&stage.payer(1)), payment_in(&stage, &terms)];
    let mixed: Vec<_> = (0..5).flat_map(both).collect();
    let before = stage.facilitator.stats().transactions;
    let outcomes = settle_at_once(&stage, &mixed).await;
    assert!(outcomes.iter().all(|outcome| matches!(outcome, SettlementOutcome::Settled { .. })), "{outcomes:?}");
    let transactions = stage.facilitator.stats().transactions - before;
    assert!(transactions <= 3, "{transactions} transactions for five payments in each of two tokens");
    let balance = Minted::balanceOfCall { account: PAYEE }.abi_encode();
    let received = stage.devnet.call(terms.offer().asset.address, balance).unwrap();
    assert_eq!((stage.received(), U256::from_be_slice(&received)), (5, U256::from(5 * PRICE)));
}

#[tokio::test(start_paused = true)]
async fn single_payment_calls_the_token() {
    let stage = with_settler(50).await;
    let [payment] = &payments(&stage, 1)[..] else { panic!() };
    let transaction = paid_by(&stage.admit_and_settle(payment).await);
    let receipt = stage.provider().get_transaction_receipt(transaction).await.unwrap().unwrap();
    assert_eq!(receipt.to, Some(stage.terms.offer().asset.address));
    let outcomes = settle_at_once(&stage, &payments(&stage, 10)).await;
    let SettlementOutcome::Settled { transaction, .. } = &outcomes[9] else { panic!("{outcomes:?}") };
    let receipt = stage.provider().get_transaction_receipt(*transaction).await.unwrap().unwrap();
    assert_eq!(receipt.to, Some(BatchSettler::ADDRESS));
}

#[tokio::test(start_paused = true)]
async fn payment_that_needs_more_gas_than_a_batch_allows_is_settled_alone() {
    let stage = Stage::with(every(50), |b| b.block_time(Duration::from_millis(50)).batch_gas_cap(30_000)).await;
    stage.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
    let stage = Arc::new(stage);
    settle_at_once(&stage, &payments(&stage, 6)).await;
    let stats = stage.facilitator.stats();
    assert_eq!((stage.received(), stats.transactions, stats.reverted), (6, 7, 0));
}

#[tokio::test(start_paused = true)]
async fn without_the_batch_settler_payments_settle_one_by_one() {
    let stage = Arc::new(Stage::with(every(50), |b| b).await);
    settle_at_once(&stage, &payments(&stage, 20)).await;
    assert_eq!((stage.received(), stage.next_nonce().await), (20, 20));
    let off = Arc::new(Stage::with(every(50), |b| b.batch_size(1)).await);
    off.facilitator.deploy_batch_settler().await.unwrap().unwrap();
    settle_at_once(&off, &payments(&off, 20)).await;
    assert_eq!(off.next_nonce().await, 21);
}

/// The payer is fine when it is verified. Before the transaction runs, its account gets code that burns gas (EIP-7702).
#[tokio::test(start_paused = true)]
async fn hostile_payer_in_a_batch_does_not_affect_others() {
    let stage = with_settler(200).await;
    let hostile_key = stage.payer(1);
    let mut all = payments(&stage, 99);
    all.insert(40, stage.payment(&hostile_key));
    let verified = join_all(all.iter().map(|payment| stage.admit(payment))).await;
    // JUMPDEST PUSH0 JUMP: for ever.
    let burner = alloy_primitives::Address::repeat_byte(0xb0);
    stage.devnet.set_code(burner, alloy_primitives::bytes!("5b5f56"));
    stage.devnet.delegate(hostile_key.address(), burner);
    let before = stage.facilitator.stats();
    let outcomes = join_all(all.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified))).await;
    for (index, outcome) in outcomes.iter().enumerate() {
        match index {
            40 => assert!(matches!(outcome, Ok(SettlementOutcome::Failed { dead: false, .. })), "{outcome:?}"),
            _ => assert!(matches!(outcome, Ok(SettlementOutcome::Settled { .. })), "{outcome:?}"),
        }
    }
    assert_eq!(stage.received(), 99);
    let spent = stage.facilitator.stats().gas_used - before.gas_used;
    assert!(spent < 99 * 70_000 + 500_000, "{spent} gas");
    assert_eq!(stage.record(&all[40]).await.settlement, Settlement::Due);
}

#[tokio::test(start_paused = true)]
async fn payer_without_funds_fails_alone_and_without_another_transaction() {
    let stage = with_settler(200).await;
    let poor = stage.payer(1);
    let mut all = payments(&stage, 9);
    all.push(stage.payment(&poor));
    let verified = join_all(all.iter().map(|payment| stage.admit(payment))).await;
    stage.drain(poor.address());
    let before = stage.facilitator.stats().transactions;
    let mut outcomes =
        join_all(all.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified))).await;
    let failed = outcomes.pop().unwrap().unwrap();
    assert!(matches!(failed, SettlementOutcome::Failed { reason: Reason::InsufficientFunds, .. }), "{failed:?}");
    for outcome in &outcomes {
        paid_by(outcome);
    }
    assert_eq!(stage.received(), 9);
    assert!(stage.facilitator.stats().transactions - before <= 2);
}

#[tokio::test(start_paused = true)]
async fn front_run_payment_in_a_batch_is_settled_with_the_other_transaction() {
    let stage = with_settler(200).await;
    let all = payments(&stage, 10);
    let verified = join_all(all.iter().map(|payment| stage.admit(payment))).await;
    let foreign = stage.front_run(&all[3]);
    let outcomes = join_all(all.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified))).await;
    let transactions: Vec<_> = outcomes.iter().map(paid_by).collect();
    assert_eq!(transactions[3], foreign);
    assert_eq!((stage.received(), stage.facilitator.stats().settled_by_others), (10, 1));
}

#[tokio::test(start_paused = true)]
async fn stuck_batch_is_replaced_although_one_of_its_payments_is_settled() {
    let stage = with_settler(200).await;
    let both = payments(&stage, 2);
    let verified = join_all(both.iter().map(|payment| stage.admit(payment))).await;
    let next_nonce = stage.next_nonce().await;
    bury_the_first_transaction(&stage);
    let settling = join_all(both.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified)));
    let meanwhile = async {
        until(async || !stage.record(&both[0]).await.transactions.is_empty()).await;
        let theirs = stage.front_run(&both[0]);
        let step = SettlementStep::Settle { transaction: theirs, block: None, fee: None };
        stage.ledger.settle(&both[0].key(), &step).await.unwrap();
        theirs
    };
    let (outcomes, theirs) = tokio::join!(settling, meanwhile);
    assert_eq!(paid_by(&outcomes[0]), theirs);
    assert_eq!(stage.record(&both[0]).await.transactions.len(), 1);
    let signed = stage.record(&both[1]).await.transactions;
    assert_eq!(signed.len(), 2);
    assert_eq!(paid_by(&outcomes[1]), signed[1]);
    assert_eq!((stage.received(), stage.next_nonce().await), (2, next_nonce + 1));
}

#[tokio::test(start_paused = true)]
async fn one_payment_is_settled_by_one_task_at_a_time() {
    let stage = with_settler(200).await;
    let [payment] = &payments(&stage, 1)[..] else { panic!() };
    let verified = stage.admit(payment).await;
    let both = join_all((0..2).map(|_| stage.facilitator.settle(payment, &verified))).await;
    paid_by(&both[0]);
    assert!(matches!(both[1], Ok(SettlementOutcome::Unknown { transaction: None })), "{both:?}");
    assert_eq!(stage.received(), 1);
}

#[tokio::test(start_paused = true)]
async fn full_queue_verifies_nothing() {
    let stage = Arc::new(Stage::with(|d| d, |b| b.backlog(3)).await);
    let all = payments(&stage, 4);
    let verified = join_all(all[..3].iter().map(|payment| stage.admit(payment))).await;
    stage.devnet.stall(true);
    let settling: Vec<_> = all[..3]
        .iter()
        .cloned()
        .zip(verified)
        .map(|(payment, verified)| {
            let stage = stage.clone();
            tokio::spawn(async move { stage.settle(&payment, &verified).await })
        })
        .collect();
    until(async || stage.facilitator.stats().pending == 3).await;
    let refused = stage.verify(&all[3]).await;
    assert!(matches!(refused, Err(tower_x402::facilitator::VerifyError::Unavailable(_))), "{refused:?}");
    stage.devnet.stall(false);
    for settled in join_all(settling).await {
        paid_by(&settled.unwrap());
    }
    until(async || stage.facilitator.stats().pending == 0).await;
    stage.verify(&all[3]).await.expect("there is room again");
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_what_was_begun_and_begins_nothing() {
    let stage = with_settler(200).await;
    let all = payments(&stage, 21);
    let verified = join_all(all.iter().map(|payment| stage.admit(payment))).await;
    let settling: Vec<_> = all[..20]
        .iter()
        .cloned()
        .zip(verified.clone())
        .map(|(payment, verified)| {
            let stage = stage.clone();
            tokio::spawn(async move { stage.settle(&payment, &verified).await })
        })
        .collect();
    until(async || stage.facilitator.stats().pending == 20).await;
    assert!(stage.facilitator.drain(Duration::from_secs(10)).await);
    assert_eq!(stage.received(), 20);
    stage.facilitator.settle(&all[20], &verified[20]).await.expect_err("closed");
    for settled in join_all(settling).await {
        paid_by(&settled.unwrap());
    }
}
