//! Balances for gas: how long a key that cannot pay rests, and when its operator is warned.

use std::{
    io::{self, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, U256};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall as _;
use futures_util::future::join_all;
use support::{engine_stage::*, numbers::Recording};
use tokio::time::sleep;
use tower_x402::{
    facilitator::{FacilitatorError, OnchainFacilitatorBuilder, VerifyError},
    ledger::Settlement,
};
use x402_devnet::{BlockTime, Fault};

const BALANCE: &str = "eth_getBalance";

/// The log of this thread.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<u8>>>);

impl Logged {
    fn begin() -> (Self, tracing::subscriber::DefaultGuard) {
        let logged = Self::default();
        let writer = logged.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        (logged, tracing::subscriber::set_default(subscriber))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    fn lines(&self, words: &str) -> usize {
        self.text().lines().filter(|line| line.contains(words)).count()
    }
}

impl Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn pay(stage: &Stage) {
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
}

async fn fill_to(stage: &Stage, wei: U256) {
    fill(stage, settlement_key().address(), wei).await;
}

async fn fill(stage: &Stage, key: Address, wei: U256) {
    stage.provider().raw_request::<_, ()>("anvil_setBalance".into(), (key, wei)).await.unwrap();
}

/// Enough for two hundred more transactions like those so far.
fn two_hundred_more(stage: &Stage) -> U256 {
    let stats = stage.facilitator.stats();
    stats.spent / U256::from(stats.transactions) * U256::from(200)
}

#[tokio::test(start_paused = true)]
async fn gas_balance_is_checked_once_a_minute_and_a_low_one_is_logged() {
    const LOW: &str = "will soon be unable to pay for gas";
    let (recording, (logged, _guard)) = (Recording::begin(), Logged::begin());
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(1))).await;
    let gauge = || recording.read().gauge("x402_gas_tank_wei");
    let balance = || stage.devnet.eth_balance(settlement_key().address());
    let as_gauge = |wei: U256| Some(f64::from(wei));
    sleep(Duration::from_secs(300)).await;
    assert_eq!(stage.calls(BALANCE), 0, "nothing was paid for with it");
    pay(&stage).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!((stage.calls(BALANCE), gauge()), (1, as_gauge(balance())));
    pay(&stage).await;
    sleep(Duration::from_secs(56)).await;
    assert_eq!(stage.calls(BALANCE), 1, "a minute has not passed");
    sleep(Duration::from_secs(4)).await;
    assert_eq!((stage.calls(BALANCE), gauge()), (2, as_gauge(balance())));
    sleep(Duration::from_secs(600)).await;
    assert_eq!(stage.calls(BALANCE), 2, "nothing was paid for with it since");

    pay(&stage).await;
    fill_to(&stage, two_hundred_more(&stage)).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!((stage.calls(BALANCE), logged.lines(LOW)), (3, 0));
    sleep(Duration::from_secs(60)).await;
    pay(&stage).await;
    let low = two_hundred_more(&stage) - U256::ONE;
    fill_to(&stage, low).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!((stage.calls(BALANCE), logged.lines(LOW), gauge()), (4, 1, as_gauge(low)));
    assert!(
        logged.text().lines().any(|line| line.contains(LOW) && line.contains(&low.to_string())),
        "the balance is logged"
    );
    sleep(Duration::from_secs(600)).await;
    assert_eq!(logged.lines(LOW), 1);

    // A balance that cannot be read is not taken for sufficient.
    stage.devnet.faults().set(|call| if call.method == BALANCE { Fault::DropBefore } else { Fault::None });
    pay(&stage).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(logged.lines("the settlement key's balance could not be read"), 1);
}

/// Only transactions in flight, for which the node sets aside gas, are a reason to wait.
#[tokio::test(start_paused = true)]
async fn account_with_nothing_in_flight_rests_at_the_first_refusal() {
    const SEND: &str = "eth_sendRawTransaction";
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().set(|call| match call.method.starts_with(SEND) {
        true => Fault::Error { code: -32000, message: "insufficient funds for gas * price + value".into() },
        false => Fault::None,
    });
    let refused = stage.settle(&payment, &verified).await;
    assert!(matches!(refused, Err(FacilitatorError::InsufficientGas { .. })), "{refused:?}");
    assert_eq!(stage.calls(SEND) + stage.calls("eth_sendRawTransactionSync"), 1);
}

/// The next block brings back what the node sets aside, but not enough for one payment more.
#[tokio::test(start_paused = true)]
async fn account_that_cannot_pay_rests_although_a_transaction_is_in_flight() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let [earlier, later] = [stage.payment(&stage.payer(1)), stage.payment(&stage.payer(1))];
    let verified = [stage.admit(&earlier).await, stage.admit(&later).await];
    stage.devnet.stall(true);
    stage.devnet.faults().reset();
    let sent = || stage.calls("eth_sendRawTransaction") + stage.calls("eth_sendRawTransactionSync");
    let refused = async {
        until(async || sent() == 1).await;
        fill_to(&stage, U256::from(7)).await;
        stage.settle(&later, &verified[1]).await
    };
    let refused = tokio::select! {
        refused = refused => refused,
        earlier = stage.settle(&earlier, &verified[0]) => panic!("its block does not come: {earlier:?}"),
    };
    assert!(
        matches!(refused, Err(FacilitatorError::InsufficientGas { balance }) if balance == U256::from(7)),
        "{refused:?}"
    );
    assert_eq!(sent(), 2);
}

/// The first payment goes alone, and the others share a transaction, which could use more gas than the key's ether pays for.
#[tokio::test(start_paused = true)]
async fn payments_of_a_batch_that_the_key_cannot_pay_for_are_settled_alone() {
    let stage = Stage::with(|d| d.block_time(BlockTime::Every(Duration::from_millis(200))), |b| b).await;
    stage.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
    let mut payments = Vec::new();
    for _ in 0..10 {
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        payments.push((payment, verified));
    }
    let fees = stage.provider().estimate_eip1559_fees().await.unwrap();
    fill_to(&stage, U256::from(700_000) * U256::from(fees.max_fee_per_gas)).await;
    let before = stage.next_nonce().await;
    let settled = join_all(payments.iter().map(|(payment, verified)| stage.settle(payment, verified))).await;
    for outcome in &settled {
        paid_by(outcome);
    }
    assert_eq!((stage.received(), stage.next_nonce().await - before), (10, 10));
}

/// The node sets aside what data costs, too, of which nothing is known here. Something is always in flight.
#[tokio::test(start_paused = true)]
async fn payments_of_a_batch_that_costs_more_than_its_gas_are_settled_alone_beside_one_in_flight() {
    settled_alone_beside_one_in_flight(None).await;
}

#[tokio::test(start_paused = true)]
async fn payments_taken_out_of_a_batch_wait_for_the_block_that_pays_for_them() {
    settled_alone_beside_one_in_flight(Some(4)).await;
}

/// The key has ether for no transaction with several payments, and until the next block for no more than `at_once`.
async fn settled_alone_beside_one_in_flight(at_once: Option<usize>) {
    let stage = Stage::with(|d| d.block_time(BlockTime::Every(Duration::from_millis(200))), |b| b).await;
    stage.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
    let mut payments = Vec::new();
    for _ in 0..10 {
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        payments.push((payment, verified));
    }
    let (sent, is_stalled) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(true)));
    let stalled = is_stalled.clone();
    stage.devnet.faults().set(move |call| {
        let length = call.params.first().and_then(|raw| raw.as_str()).map_or(0, str::len);
        // A payment takes some 800 digits. What fills a gap is shorter.
        if !call.method.starts_with("eth_sendRaw") || length < 600 {
            return Fault::None;
        }
        let is_too_dear = length > 1_200
            || stalled.load(Ordering::SeqCst) && at_once.is_some_and(|most| sent.load(Ordering::SeqCst) >= most);
        if is_too_dear {
            return Fault::Error { code: -32000, message: "insufficient funds for gas * price + value".into() };
        }
        sent.fetch_add(1, Ordering::SeqCst);
        Fault::None
    });
    stage.devnet.stall(true);
    let settle = |(payment, verified)| stage.settle(payment, verified);
    let pending = async || {
        let sent = stage.provider().get_transaction_count(settlement_key().address()).pending().await.unwrap();
        sent - stage.next_nonce().await
    };
    let (first, others) = payments.split_first().unwrap();
    let others = async {
        until(async || pending().await == 1).await;
        let resumed = async {
            until(async || pending().await >= at_once.unwrap_or(10) as u64).await;
            if at_once.is_some() {
                // The others have asked in vain.
                sleep(Duration::from_millis(500)).await;
            }
            is_stalled.store(false, Ordering::SeqCst);
            stage.devnet.stall(false);
        };
        tokio::join!(join_all(others.iter().map(|(payment, verified)| settle((payment, verified)))), resumed).0
    };
    let (first, others) = tokio::join!(settle((&first.0, &first.1)), others);
    paid_by(&first);
    for outcome in &others {
        paid_by(outcome);
    }
    assert_eq!(stage.received(), 10);
}

/// The payment of a contract wallet may need more gas than any key has ether for. Others need less. A key that has enough is found.
#[tokio::test(start_paused = true)]
async fn payment_that_no_key_can_pay_for_keeps_no_other_one_out() {
    let keys = [new_key(), new_key()];
    let addresses = keys.each_ref().map(PrivateKeySigner::address);
    let stage = Stage::with_keys(|d| d, |b| keys.into_iter().fold(b, OnchainFacilitatorBuilder::signer)).await;
    let (owner, dear) = (new_key(), U256::from(300_000));
    let wallet = stage.wallet(owner.address());
    stage.devnet.mint(wallet, "$1".parse().unwrap()).unwrap();
    stage.devnet.execute(owner.address(), wallet, Wallet::setGasBurnCall { amount: dear }.abi_encode()).unwrap();
    let payment = stage.payment_from(&owner, wallet);
    for key in addresses {
        stage.devnet.fund(key, U256::from(ETHER));
    }
    let verified = stage.admit(&payment).await;
    let fees = stage.provider().estimate_eip1559_fees().await.unwrap();
    let poor = U256::from(320_000) * U256::from(fees.max_fee_per_gas);
    for key in addresses {
        fill(&stage, key, poor).await;
    }
    let refused = stage.settle(&payment, &verified).await;
    assert!(matches!(refused, Err(FacilitatorError::InsufficientGas { .. })), "{refused:?}");
    pay(&stage).await;
    for rich in addresses {
        fill(&stage, rich, U256::from(ETHER)).await;
        let payment = stage.payment_from(&owner, wallet);
        let verified = stage.admit(&payment).await;
        paid_by(&stage.settle(&payment, &verified).await);
        fill(&stage, rich, poor).await;
        sleep(Duration::from_secs(31)).await;
    }
}

/// Until the account is funded, payments are refused before any work; after half a minute it is tried again.
#[tokio::test(start_paused = true)]
async fn empty_account_rests_for_half_a_minute() {
    let stage = Stage::with(|d| d, |b| b.reconcile_interval(Duration::from_secs(3_600))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    fill_to(&stage, U256::from(7)).await;
    let error = stage.settle(&payment, &verified).await.unwrap_err();
    assert!(matches!(error, FacilitatorError::InsufficientGas { balance } if balance == U256::from(7)), "{error:?}");
    assert_eq!(error.retry_after(), Duration::from_secs(60));
    let record = stage.record(&payment).await;
    assert_eq!(record.settlement, Settlement::Due);
    stage.devnet.faults().reset();
    for wait in [0, 29_900] {
        sleep(Duration::from_millis(wait)).await;
        let refused = stage.verify(&payment).await;
        assert!(
            matches!(refused, Err(VerifyError::Unavailable(FacilitatorError::InsufficientGas { .. }))),
            "{refused:?}"
        );
    }
    assert_eq!(stage.requests(), 0, "nobody asks the node while it is known");
    sleep(Duration::from_millis(200)).await;
    stage.verify(&payment).await.unwrap();
    assert!(matches!(stage.settle(&payment, &verified).await, Err(FacilitatorError::InsufficientGas { .. })));
    // Once funded, it is used again with the next pass.
    stage.devnet.fund(settlement_key().address(), U256::from(ETHER));
    stage.facilitator.reconcile_now();
    sleep(Duration::from_millis(10)).await;
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}
