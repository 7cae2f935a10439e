//! The limits of settling a payment. Each test reaches one limit and shows what happens there.
//!
//! Time is the runtime's: it passes only while there is nothing else to do, so that minutes take milliseconds and are exact.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_consensus::{SignableTransaction, Transaction as _, TxEip1559, TxEnvelope};
use alloy_eips::{Decodable2718 as _, Encodable2718 as _};
use alloy_network::{TxSigner, TxSignerSync as _};
use alloy_primitives::{Address, B256, Bytes, Signature, TxKind, U256};
use alloy_provider::Provider as _;
use async_trait::async_trait;
use futures_util::future::join_all;
use serde_json::Value;
use support::{
    around_ledger::{AroundLedger, Call, Refusing},
    engine_stage::*,
    eventually::eventually,
};
use tokio::time::{Instant, sleep};
use tower_x402::{
    Clock as _, ManualClock,
    facilitator::{Facilitator, FacilitatorError, OnchainFacilitator, OnchainFacilitatorBuilder},
    ledger::{
        JournaledTransaction, LedgerError, MemoryLedger, ResponseLimits, Sender, Settlement, SettlementStep, Settling,
    },
    payment::{Prechecked, SettlementOutcome, Verified},
    protocol::Reason,
};
use x402_devnet::{Fault, Orphans};

const SYNC: &str = "eth_sendRawTransactionSync";
const SEND: &str = "eth_sendRawTransaction";
const RECEIPT: &str = "eth_getTransactionReceipt";

/// How long a process follows a transaction that is in no block.
const WATCHED: Duration = Duration::from_secs(1_800);

/// Background reconciliation runs once an hour, so that it does not interfere.
fn rarely(builder: OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder {
    builder.reconcile_interval(Duration::from_secs(3_600))
}

/// A slow chain: three blocks, after which a transaction that is in none is checked, are six seconds.
fn two_seconds_a_block(builder: OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder {
    rarely(builder).block_time(Duration::from_secs(2))
}

fn error(code: i64, message: &str) -> Fault {
    Fault::Error { code, message: message.into() }
}

fn no_sync() -> Fault {
    error(-32601, "method not found")
}

fn transaction(params: &[Value]) -> TxEnvelope {
    let raw: Bytes = params[0].as_str().unwrap().parse().unwrap();
    TxEnvelope::decode_2718(&mut raw.as_ref()).unwrap()
}

/// The times of events, from the start of the log.
#[derive(Clone)]
struct Log<T>(Arc<Mutex<Vec<(Duration, T)>>>, Instant);

impl<T: Clone> Log<T> {
    fn begin() -> Self {
        Self(Arc::default(), Instant::now())
    }

    fn add(&self, what: T) {
        self.0.lock().unwrap().push((self.1.elapsed(), what));
    }

    fn all(&self) -> Vec<T> {
        self.0.lock().unwrap().iter().map(|(_, what)| what.clone()).collect()
    }

    /// Whole seconds.
    fn seconds(&self) -> Vec<u64> {
        self.times().iter().map(Duration::as_secs).collect()
    }

    fn times(&self) -> Vec<Duration> {
        self.0.lock().unwrap().iter().map(|(at, _)| *at).collect()
    }
}

/// Makes the node accept every transaction and include none. Returns the transactions that it was sent.
fn bury_all(stage: &Stage) -> Log<TxEnvelope> {
    let sent = Log::begin();
    let seen = sent.clone();
    stage.devnet.faults().set(move |call| match call.method {
        SYNC => no_sync(),
        SEND => {
            let transaction = transaction(call.params);
            if !seen.all().contains(&transaction) {
                seen.add(transaction);
            }
            error(-32000, "already known")
        }
        _ => Fault::None,
    });
    sent
}

fn offers(sent: &Log<TxEnvelope>) -> Vec<u128> {
    sent.all().iter().map(|transaction| transaction.max_fee_per_gas()).collect()
}

async fn settlement(stage: &Stage, payment: &Prechecked) -> Settlement {
    stage.record(payment).await.settlement
}

/// Returns another key's transaction for the payment, whose process journalled it and died before sending it.
async fn journalled_by_another(stage: &Stage, payment: &Prechecked) -> TxEnvelope {
    let key = new_key();
    stage.devnet.fund(key.address(), U256::from(ETHER));
    let mut transaction = TxEip1559 {
        chain_id: stage.devnet.chain_id(),
        gas_limit: 200_000,
        max_fee_per_gas: 1_000_000_000,
        max_priority_fee_per_gas: 1,
        to: TxKind::Call(stage.terms.offer().asset.address),
        input: execution(payment.authorization(), payment.signature()).into(),
        ..TxEip1559::default()
    };
    let signature = key.sign_transaction_sync(&mut transaction).unwrap();
    let envelope = TxEnvelope::from(transaction.into_signed(signature));
    let now = stage.clock.now();
    let submission = JournaledTransaction {
        sender: Sender { network: stage.devnet.network(), address: key.address() },
        nonce: 0,
        hash: *envelope.tx_hash(),
        raw: envelope.encoded_2718().into(),
        payments: vec![payment.key()],
        by: 1,
        at: now - 60,
        until: now - 1,
        known_failures: Default::default(),
    };
    stage.ledger.submit(submission).await.unwrap();
    envelope
}

// ---- Gas prices

/// The devnet's base fee is 5,000,000 wei and the lowest tip 1,000,000. So 11,000,000 are offered, and then an eighth and one more.
#[tokio::test(start_paused = true)]
async fn fees_are_raised_up_to_the_ceiling_to_the_wei() {
    for (ceiling, expected) in [(12_375_001, vec![11_000_000, 12_375_001]), (12_375_000, vec![11_000_000])] {
        let stage = Stage::with(|d| d, |b| two_seconds_a_block(b).max_gas_price(ceiling)).await;
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        let sent = bury_all(&stage);
        let outcome = stage.settle(&payment, &verified).await.unwrap();
        assert!(matches!(outcome, SettlementOutcome::Unknown { transaction: Some(_) }), "{outcome:?}");
        // Until after the last check at which a transaction with high fees is replaced.
        sleep(Duration::from_secs(60)).await;
        assert_eq!(offers(&sent), expected, "of at most {ceiling} wei");
        assert_eq!(stage.record(&payment).await.transactions.len(), expected.len());
    }
}

/// The same if the market's price is the reason, and if recovery replaces the transaction of a dead process.
#[tokio::test(start_paused = true)]
async fn no_market_price_leads_above_the_ceiling() {
    const CEILING: u128 = 12_200_000;
    let stage = Stage::with(|d| d, |b| two_seconds_a_block(b).max_gas_price(CEILING)).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let sent = bury_all(&stage);
    let settling = stage.settle(&payment, &verified);
    let rising = async {
        sleep(Duration::from_secs(1)).await;
        // Twice that and the tip would be more than a tenth above what was offered, and less than is allowed.
        stage.devnet.set_base_fee(10_900_000);
    };
    let (outcome, ()) = tokio::join!(settling, rising);
    assert!(matches!(outcome, Ok(SettlementOutcome::Unknown { .. })), "{outcome:?}");
    sleep(WATCHED).await;
    stage.clock.advance(61);
    for _ in 0..3 {
        let fees = stage.calls("eth_feeHistory");
        stage.facilitator.reconcile_now();
        sleep(Duration::from_secs(11)).await;
        assert!(stage.calls("eth_feeHistory") > fees, "recovery asked for the market price");
    }
    assert_eq!(offers(&sent), [11_000_000], "nothing between that and {CEILING} would be taken for a replacement");
}

#[tokio::test(start_paused = true)]
async fn fees_are_raised_at_most_five_times() {
    let stage = Stage::with(|d| d, |b| two_seconds_a_block(b).confirm_timeout(Duration::from_secs(60))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let sent = Log::begin();
    let (seen, devnet, base_fee) = (sent.clone(), stage.devnet.clone(), AtomicU64::new(5_000_000));
    stage.devnet.faults().set(move |call| match call.method {
        "eth_feeHistory" => {
            // At each check the price is half as much again.
            let fee = base_fee.load(Ordering::Relaxed);
            base_fee.store(fee + fee / 2, Ordering::Relaxed);
            devnet.set_base_fee(fee);
            Fault::None
        }
        SYNC => no_sync(),
        SEND => {
            let transaction = transaction(call.params);
            if !seen.all().contains(&transaction) {
                seen.add(transaction);
            }
            error(-32000, "already known")
        }
        _ => Fault::None,
    });
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    let newest = *sent.all().last().unwrap().tx_hash();
    assert_eq!(outcome, SettlementOutcome::Unknown { transaction: Some(newest) });
    assert_eq!(sent.seconds(), [0, 6, 12, 18, 24, 30]);
    sleep(Duration::from_secs(600)).await;
    assert_eq!(sent.all().len(), 6, "the market rises on, and nothing more is offered");
    let hashes: Vec<B256> = sent.all().iter().map(|transaction| *transaction.tx_hash()).collect();
    assert_eq!(stage.record(&payment).await.transactions, hashes);
    // Whichever of them is included is the payment's.
    stage.devnet.faults().clear();
    stage.devnet.set_base_fee(5_000_000);
    eventually("the payment is settled", async || settlement(&stage, &payment).await.paid_by() == Some(newest)).await;
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

/// The fees are not the reason: its nonce is the next, and it is in no block.
#[tokio::test(start_paused = true)]
async fn transaction_with_high_fees_is_replaced_three_times_and_then_abandoned() {
    let stage = Stage::with(|d| d, two_seconds_a_block).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let sent = bury_all(&stage);
    let begun = Instant::now();
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Unknown { transaction: Some(_) }), "{outcome:?}");
    assert_eq!(begun.elapsed().as_secs(), 15, "whoever waits has the answer in time");
    sleep(WATCHED - begun.elapsed() - Duration::from_secs(10)).await;
    // Checks 1, 3 and 8.
    assert_eq!(sent.seconds(), [0, 6, 18, 48]);
    assert_eq!(stage.facilitator.stats().in_flight, 1, "its nonce is kept until then");
    sleep(Duration::from_secs(20)).await;
    let stats = stage.facilitator.stats();
    assert_eq!((stats.in_flight, stats.pending), (0, 0));
    let record = stage.record(&payment).await;
    assert_eq!((record.settlement, record.last_failure), (Settlement::Submitted, None), "nobody says that it failed");
    assert_eq!(sent.all().len(), 4);
}

/// Most fee spikes pass by themselves, so while nobody waits a check of the fees may come late.
#[tokio::test(start_paused = true)]
async fn without_waiting_callers_fees_are_compared_at_every_eighth_check() {
    let stage = Arc::new(Stage::with(|d| d, two_seconds_a_block).await);
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let sent = bury_all(&stage);
    let gone = tokio::time::timeout(Duration::from_secs(1), stage.settle(&payment, &verified)).await;
    gone.expect_err("the client went away");
    // From then on every check finds a price that is a half above the last one.
    let rising = tokio::spawn({
        let stage = stage.clone();
        async move {
            for times in 1..200 {
                stage.devnet.set_base_fee(5_000_000 * 3_u64.pow(times.min(12)) / 2_u64.pow(times.min(12)));
                sleep(Duration::from_secs(16)).await;
            }
        }
    });
    sleep(Duration::from_secs(600)).await;
    rising.abort();
    // As stuck at checks 1 and 3; for its fees at 8, 16 and 24.
    assert_eq!(sent.seconds(), [0, 6, 18, 48, 96, 144]);
}

// ---- Attempts and nonces

/// A node with a full pool, for so many broadcasts.
fn full_for(stage: &Stage, times: u64) {
    stage.devnet.faults().reset();
    stage.devnet.faults().set(move |call| match (call.method, call.index) {
        (SYNC, index) if index < times => error(-32000, "txpool is full"),
        _ => Fault::None,
    });
}

#[tokio::test(start_paused = true)]
async fn payment_has_at_most_four_attempts() {
    for refusals in [3, 4] {
        let stage = Stage::with(|d| d, rarely).await;
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        full_for(&stage, refusals);
        let outcome = stage.settle(&payment, &verified).await;
        assert_eq!(stage.calls(SYNC), 4);
        if refusals == 3 {
            paid_by(&outcome);
        } else {
            assert!(matches!(outcome, Err(FacilitatorError::Busy { .. })), "{outcome:?}");
            let record = stage.record(&payment).await;
            assert_eq!(record.settlement, Settlement::Due);
            assert!(record.last_failure.is_some(), "nobody settles it unasked: its buyer was told that it failed");
            assert_eq!(stage.received(), 0);
            paid_by(&stage.settle(&payment, &verified).await);
        }
        assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
    }
}

/// No node took any of our transactions. The one that another process signed before may still be included.
#[tokio::test(start_paused = true)]
async fn payment_has_not_failed_while_another_processes_transaction_may_pay_it() {
    let stage = Stage::with(|d| d, rarely).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let theirs = journalled_by_another(&stage, &payment).await;
    full_for(&stage, 4);
    let outcome = stage.facilitator.settle(&payment, &verified).await;
    assert_eq!(stage.calls(SYNC), 4);
    assert!(matches!(outcome, Ok(SettlementOutcome::Unknown { transaction: Some(_) })), "{outcome:?}");
    let record = stage.record(&payment).await;
    assert_eq!((record.settlement, record.last_failure), (Settlement::Submitted, None));
    // It is included: a buyer that was told of a failure would have been charged all the same.
    let _ = stage.provider().send_raw_transaction(&theirs.encoded_2718()).await.unwrap();
    assert_eq!(stage.received(), 1);
    assert_eq!(paid_by(&stage.reconcile(&payment).await), *theirs.tx_hash());
}

/// A stage on a ledger that refuses the calls for which `refuse` returns an error.
async fn stage_on_refusing_ledger(
    refuse: impl Fn(Call<'_>) -> Option<LedgerError> + Send + Sync + 'static,
    facilitator: impl FnOnce(OnchainFacilitatorBuilder) -> OnchainFacilitatorBuilder,
) -> Stage {
    let clock = Arc::new(ManualClock::at(1_800_000_000));
    let inner = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone()));
    let ledger = AroundLedger::new(inner, Refusing(refuse));
    Stage::build(clock, ledger, |d| d, |b| rarely(facilitator(b.signer(settlement_key())))).await
}

/// The node refuses the transaction and the ledger keeps it in its journal, from where it is sent again and may pay. Before it is signed
/// for anew, the payment is verified, and its payer has no money at that moment. That a second transaction cannot pay is no reason.
#[tokio::test(start_paused = true)]
async fn payment_whose_transaction_stays_in_the_journal_has_not_failed() {
    for refused in [1, 2] {
        let is_first = AtomicBool::new(true);
        let refuse = move |call: Call<'_>| match call {
            Call::Other("free_nonce") if is_first.swap(false, Ordering::SeqCst) => {
                Some(LedgerError::Backend("away".into()))
            }
            _ => None,
        };
        let stage = stage_on_refusing_ledger(refuse, |b| b).await;
        let payer = stage.payer(1);
        let payment = stage.payment(&payer);
        let verified = stage.admit(&payment).await;
        stage.devnet.faults().reset();
        let devnet = stage.devnet.clone();
        stage.devnet.faults().set(move |call| match (call.method, call.index) {
            (SYNC, index) if index + 1 == refused => error(-32000, "txpool is full"),
            (SYNC, 0) => {
                devnet.set_base_fee(1_000_000_000);
                error(-32000, "max fee per gas less than block base fee")
            }
            _ => Fault::None,
        });
        let meanwhile = async {
            eventually("the node has refused it", async || stage.calls(SYNC) == refused).await;
            stage.clock.advance(6);
            stage.drain(payer.address());
        };
        let (outcome, ()) = tokio::join!(stage.facilitator.settle(&payment, &verified), meanwhile);
        let journalled = stage.record(&payment).await.transactions;
        assert_eq!(journalled.len() as u64, refused, "it is not signed for anew");
        assert_eq!(outcome.unwrap(), SettlementOutcome::Unknown { transaction: journalled.last().copied() });
    }
}

/// It would pay without the other process's knowledge: the ledger shows a replacement only to whoever looks after its payments.
#[tokio::test(start_paused = true)]
async fn transaction_is_not_replaced_while_another_process_has_its_payment() {
    let stage = Stage::with(|d| d, two_seconds_a_block).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let sent = bury_all(&stage);
    let claimed = async {
        eventually("it is sent", async || sent.all().len() == 1).await;
        stage.clock.advance(3_600);
        let settling = Settling { by: 1, until: stage.clock.now() + 3_600 };
        stage.ledger.settle(&payment.key(), &SettlementStep::Claim(settling)).await.unwrap();
    };
    let (outcome, ()) = tokio::join!(stage.facilitator.settle(&payment, &verified), claimed);
    assert!(matches!(outcome, Ok(SettlementOutcome::Unknown { .. })), "{outcome:?}");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(sent.all().len(), 1);
    let sender = Sender { network: stage.devnet.network(), address: settlement_key().address() };
    assert_eq!(stage.ledger.submissions(&sender, 0).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn transaction_is_replaced_although_its_payment_failed_before() {
    let stage = Stage::with(|d| d, two_seconds_a_block).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let failed = SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0, known_transactions: Vec::new() };
    stage.ledger.settle(&payment.key(), &failed).await.unwrap();
    super::settle::bury_the_first_transaction(&stage);
    let transaction = paid_by(&stage.settle(&payment, &verified).await);
    let signed = stage.record(&payment).await.transactions;
    assert_eq!((signed.len(), signed[1]), (2, transaction));
}

/// Other processes are always faster: every nonce is taken.
#[tokio::test(start_paused = true)]
async fn at_most_256_nonces_of_others_are_skipped() {
    for taken in [255, 256] {
        let asked = Arc::new(AtomicU64::new(0));
        let count = asked.clone();
        let stage = stage_on_refusing_ledger(
            move |asked| match asked {
                Call::Submit(submission) if count.fetch_add(1, Ordering::Relaxed) < taken => {
                    Some(LedgerError::NonceTaken { next: submission.nonce + 1 })
                }
                _ => None,
            },
            |b| b,
        )
        .await;
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        stage.devnet.stall(true);
        let mut settling = Box::pin(stage.settle(&payment, &verified));
        let outcome = tokio::time::timeout(Duration::from_secs(5), &mut settling).await;
        assert_eq!(asked.load(Ordering::Relaxed), 256);
        if taken == 255 {
            outcome.expect_err("it waits for the others' transactions");
            assert_eq!(settlement(&stage, &payment).await, Settlement::Submitted);
        } else {
            let outcome = outcome.expect("nobody asks for ever");
            assert!(matches!(outcome, Err(FacilitatorError::Busy { .. })), "{outcome:?}");
            assert_eq!(settlement(&stage, &payment).await, Settlement::Due);
            assert!(stage.record(&payment).await.transactions.is_empty());
            assert_eq!((stage.calls(SYNC), stage.facilitator.stats().in_flight), (0, 0));
        }
    }
}

/// One report of the node that a nonce is taken is not enough: it must say so for two blocks, between 2 and 10 seconds.
#[tokio::test(start_paused = true)]
async fn nonce_counts_as_taken_after_two_blocks() {
    // Of blocks that take 200 ms, 3 s and 30 s: within 2 and 10 seconds.
    for (millis, seconds) in [(200, 2), (3_000, 6), (30_000, 10)] {
        let stage = Stage::with(
            |d| d,
            |b| rarely(b).block_time(Duration::from_millis(millis)).confirm_timeout(Duration::from_secs(60)),
        )
        .await;
        let key = stage.payer(2);
        paid_by(&stage.admit_and_settle(&stage.payment(&key)).await);
        super::nonces::foreign(&stage, 1, 100_000_000).await;
        let payment = stage.payment(&key);
        let verified = stage.admit(&payment).await;
        let sent = Log::begin();
        let seen = sent.clone();
        stage.devnet.faults().set(move |call| {
            if call.method == SYNC {
                seen.add(transaction(call.params).nonce());
            }
            Fault::None
        });
        paid_by(&stage.settle(&payment, &verified).await);
        assert_eq!(sent.all(), [1, 2]);
        assert_eq!(sent.seconds(), [0, seconds], "blocks of {millis} ms");
        assert_eq!(stage.received(), 2);
    }
}

/// Of several nodes behind one address, the one that takes transactions is ahead of the one that shows receipts.
#[tokio::test(start_paused = true)]
async fn late_receipt_proves_that_the_nonce_is_ours() {
    let stage = Stage::with(|d| d, rarely).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.stall(true);
    stage.devnet.faults().reset();
    stage.devnet.faults().set(|call| match call.method {
        SYNC => no_sync(),
        SEND if call.index == 0 => Fault::ErrorAfter { code: -32000, message: "nonce too low".into() },
        SEND => error(-32000, "nonce too low"),
        _ => Fault::None,
    });
    let included = async {
        sleep(Duration::from_millis(1_900)).await;
        assert!(stage.calls(SEND) >= 5, "it has been said often enough");
        stage.devnet.mine();
    };
    let (outcome, ()) = tokio::join!(stage.settle(&payment, &verified), included);
    let transaction = paid_by(&outcome);
    assert_eq!(stage.record(&payment).await.transactions, [transaction]);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

/// A signer that fails once.
struct Throttled(AtomicU64);

#[async_trait]
impl TxSigner<Signature> for Throttled {
    fn address(&self) -> Address {
        settlement_key().address()
    }

    async fn sign_transaction(
        &self,
        transaction: &mut dyn SignableTransaction<Signature>,
    ) -> alloy_signer::Result<Signature> {
        if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
            sleep(Duration::from_millis(100)).await;
            return Err(alloy_signer::Error::other("throttled"));
        }
        settlement_key().sign_transaction_sync(transaction)
    }
}

/// Every filler is refused. After 64 tries the gap is left to the next payment, which takes its nonce.
#[tokio::test(start_paused = true)]
async fn filling_a_gap_is_tried_sixty_four_times() {
    let facilitator = |b: OnchainFacilitatorBuilder| {
        rarely(b).signer(Throttled(AtomicU64::new(0))).confirm_timeout(Duration::from_secs(5))
    };
    let stage = Stage::with_keys(|d| d, facilitator).await;
    let payments: Vec<_> = (0..2).map(|_| stage.payment(&stage.payer(1))).collect();
    let verified = join_all(payments.iter().map(|payment| stage.admit(payment))).await;
    let fillers = Arc::new(AtomicU64::new(0));
    let count = fillers.clone();
    stage.devnet.faults().set(move |call| match call.method {
        SEND if transaction(call.params).gas_limit() == 21_000 => {
            count.fetch_add(1, Ordering::Relaxed);
            error(-32000, "exceeds block gas limit")
        }
        _ => Fault::None,
    });
    let mut outcomes =
        join_all(payments.iter().zip(&verified).map(|(payment, verified)| stage.settle(payment, verified))).await;
    assert!(matches!(outcomes.remove(0), Err(FacilitatorError::Unreachable { .. })));
    assert!(matches!(outcomes.remove(0), Ok(SettlementOutcome::Unknown { .. })), "it waits behind the gap");
    sleep(Duration::from_secs(1_200)).await;
    assert_eq!(fillers.load(Ordering::Relaxed), 64);
    paid_by(&stage.settle(&payments[0], &verified[0]).await);
    eventually("the other one is settled, too", async || stage.received() == 2).await;
    assert_eq!(stage.next_nonce().await, 2);
}

// ---- Waiting

/// The only place in the window is taken by a transaction that is in no block.
#[tokio::test(start_paused = true)]
async fn payment_waits_a_minute_for_its_transaction() {
    let stage = Stage::with(|d| d, |b| two_seconds_a_block(b).in_flight(1)).await;
    let payments = [stage.payment(&stage.payer(1)), stage.payment(&stage.payer(1))];
    let verified = [stage.admit(&payments[0]).await, stage.admit(&payments[1]).await];
    let sent = bury_all(&stage);
    let first = stage.settle(&payments[0], &verified[0]);
    let begun = Instant::now();
    let second = async {
        let outcome = stage.settle(&payments[1], &verified[1]).await;
        (outcome, begun.elapsed())
    };
    let (first, (second, waited)) = tokio::join!(first, second);
    assert!(matches!(first, Ok(SettlementOutcome::Unknown { .. })), "{first:?}");
    assert!(matches!(second, Err(FacilitatorError::Busy { what: "the settlement key", .. })), "{second:?}");
    assert!((60..=61).contains(&waited.as_secs()), "{waited:?}");
    let record = stage.record(&payments[1]).await;
    assert_eq!((record.settlement, record.transactions.len()), (Settlement::Due, 0));
    assert!(sent.all().iter().all(|transaction| transaction.nonce() == 0));
    // When there is room again, it is settled as any other.
    stage.devnet.faults().clear();
    paid_by(&stage.settle(&payments[1], &verified[1]).await);
    assert_eq!(stage.received(), 2);
}

/// A node may hold on to a transaction that it will never include.
#[tokio::test(start_paused = true)]
async fn broadcast_waits_at_most_eight_seconds_for_an_answer() {
    // With blocks of ten seconds, the first check comes after half a minute.
    let builder = |b: OnchainFacilitatorBuilder| {
        rarely(b).block_time(Duration::from_secs(10)).confirm_timeout(Duration::from_secs(60))
    };
    let stage = Stage::with(|d| d, builder).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let receipts = Log::begin();
    let seen = receipts.clone();
    stage.devnet.faults().set(move |call| match call.method {
        SYNC => Fault::Delay(Duration::from_secs(3_600)),
        RECEIPT => {
            seen.add(());
            Fault::None
        }
        _ => Fault::None,
    });
    paid_by(&stage.settle(&payment, &verified).await);
    assert_eq!(receipts.seconds()[0], 8);
    assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn last_request_before_the_deadline_takes_at_most_half_a_second() {
    let builder = |b: OnchainFacilitatorBuilder| {
        two_seconds_a_block(b).rpc_timeout(Duration::from_secs(60)).confirm_timeout(Duration::from_secs(5))
    };
    let stage = Stage::with(|d| d, builder).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().set(|call| match call.method {
        SYNC => Fault::ErrorAfter { code: 4, message: "not in time".into() },
        RECEIPT => Fault::Delay(Duration::from_secs(3_600)),
        _ => Fault::None,
    });
    let begun = Instant::now();
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Unknown { transaction: Some(_) }), "{outcome:?}");
    assert_eq!(begun.elapsed().as_millis() / 10, 550, "{:?}", begun.elapsed());
    stage.devnet.faults().clear();
    paid_by(&stage.reconcile(&payment).await);
}

/// For the time that confirming may take and 45 seconds more a payment is left to the process that sent a transaction for it.
#[tokio::test(start_paused = true)]
async fn other_processes_leave_a_payment_alone_while_it_may_settle() {
    let stage = Stage::with(|d| d, |b| rarely(b).confirm_timeout(Duration::from_secs(15))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    bury_all(&stage);
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    assert!(matches!(outcome, SettlementOutcome::Unknown { .. }), "{outcome:?}");
    let take = async || {
        let step = SettlementStep::Claim(Settling { by: 1, until: stage.clock.now() + 1 });
        stage.ledger.settle(&payment.key(), &step).await
    };
    stage.clock.advance(60);
    assert!(matches!(take().await, Err(LedgerError::InvalidTransition(_))));
    stage.clock.advance(1);
    take().await.unwrap();
}

/// A verification counts for five seconds.
#[tokio::test(start_paused = true)]
async fn payment_is_verified_again_after_six_seconds() {
    for (age, looks) in [(5, 0), (6, 1)] {
        let stage = Stage::with(|d| d, rarely).await;
        let payment = stage.payment(&stage.payer(1));
        let verified = stage.admit(&payment).await;
        stage.clock.advance(age);
        stage.devnet.faults().reset();
        paid_by(&stage.settle(&payment, &verified).await);
        assert_eq!(stage.calls("eth_call"), looks, "{age} seconds");
    }
}

/// While a transaction is in flight, payments gather for half a block, and for half a second at most.
#[tokio::test(start_paused = true)]
async fn payments_gather_for_half_a_block_and_no_longer_than_half_a_second() {
    for (block, gathered) in [(200, 100), (10_000, 500)] {
        let stage = Stage::with(|d| d, |b| rarely(b).block_time(Duration::from_millis(block))).await;
        stage.facilitator.deploy_batch_settler().await.unwrap().expect("a new chain");
        let payments: Vec<_> = (0..3).map(|_| stage.payment(&stage.payer(1))).collect();
        let verified = join_all(payments.iter().map(|payment| stage.admit(payment))).await;
        stage.devnet.stall(true);
        let sent = Log::begin();
        let seen = sent.clone();
        stage.devnet.faults().set(move |call| {
            if call.method == SYNC {
                seen.add(());
            }
            Fault::None
        });
        let first = stage.settle(&payments[0], &verified[0]);
        let others = async {
            sleep(Duration::from_millis(20)).await;
            tokio::join!(stage.settle(&payments[1], &verified[1]), stage.settle(&payments[2], &verified[2]))
        };
        let blocks = async {
            sleep(Duration::from_millis(1_000)).await;
            stage.devnet.stall(false);
        };
        let (first, (second, third), ()) = tokio::join!(first, others, blocks);
        assert_ne!(paid_by(&first), paid_by(&second));
        assert_eq!(paid_by(&second), paid_by(&third));
        let [alone, together] = sent.times()[..] else { panic!("{:?}", sent.times()) };
        assert!(alone < Duration::from_millis(20), "a lone payment waits for nobody: {alone:?}");
        let waited = together - Duration::from_millis(20);
        assert_eq!(waited.as_millis() / 10 * 10, gathered, "blocks of {block} ms: {waited:?}");
    }
}

// ---- Confirmations

#[tokio::test(start_paused = true)]
async fn payment_without_enough_blocks_in_time_is_unknown_until_they_come() {
    let builder =
        |b: OnchainFacilitatorBuilder| b.confirmations(U256::from(PRICE), 3).confirm_timeout(Duration::from_secs(5));
    let stage = Stage::with(|d| d, |b| rarely(builder(b))).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let begun = Instant::now();
    let outcome = stage.settle(&payment, &verified).await.unwrap();
    let transaction = stage.record(&payment).await.transactions[0];
    assert_eq!(
        (outcome, begun.elapsed().as_secs()),
        (SettlementOutcome::Unknown { transaction: Some(transaction) }, 5)
    );
    assert_eq!((stage.received(), settlement(&stage, &payment).await), (1, Settlement::Unknown));
    for _ in 0..2 {
        stage.devnet.mine();
    }
    assert_eq!(stage.reconcile(&payment).await.unwrap(), SettlementOutcome::Unknown { transaction: Some(transaction) });
    stage.devnet.mine();
    assert_eq!(paid_by(&stage.reconcile(&payment).await), transaction);
}

/// Its block is replaced, and a later one includes it again. The blocks on top of the first one do not count.
#[tokio::test(start_paused = true)]
async fn payment_in_a_later_block_counts_from_there() {
    let stage = Stage::with(|d| d, |b| rarely(b).confirmations(U256::from(PRICE), 3)).await;
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    let replaced = async {
        eventually("the payment is in a block", async || stage.received() == 1).await;
        let first = stage.devnet.block_number();
        let sender = Sender { network: stage.devnet.network(), address: settlement_key().address() };
        let raw = stage.ledger.submissions(&sender, 0).await.unwrap().remove(0).raw;
        stage.devnet.reorg(1, Orphans::Lost);
        stage.devnet.mine();
        let _ = stage.provider().send_raw_transaction(&raw).await.unwrap();
        assert_eq!((stage.received(), stage.devnet.block_number()), (1, first + 2));
        // Three blocks are on top of the first one's place, and one on top of its own.
        stage.devnet.mine();
    };
    let (outcome, ()) = tokio::join!(stage.settle(&payment, &verified), replaced);
    let transaction = stage.record(&payment).await.transactions[0];
    assert_eq!(outcome.unwrap(), SettlementOutcome::Unknown { transaction: Some(transaction) });
    assert_eq!(settlement(&stage, &payment).await, Settlement::Unknown);
    stage.devnet.mine();
    assert!(matches!(stage.reconcile(&payment).await, Ok(SettlementOutcome::Unknown { .. })));
    stage.devnet.mine();
    assert_eq!(paid_by(&stage.reconcile(&payment).await), transaction);
}

// ---- Nodes that lag, and ledgers that fail

/// A node that lags behind the receipt that it just showed cannot say why the transaction did not pay.
#[tokio::test(start_paused = true)]
async fn reason_of_an_unpaid_transaction_is_asked_for_five_times() {
    for failures in [4, 5] {
        let stage = Stage::with(|d| d, rarely).await;
        let payer = stage.payer(1);
        let payment = stage.payment(&payer);
        let verified = stage.admit(&payment).await;
        stage.drain(payer.address());
        stage.devnet.faults().reset();
        stage.devnet.faults().set(move |call| match (call.method, call.index) {
            ("eth_call", index) if index < failures => Fault::DropBefore,
            _ => Fault::None,
        });
        let outcome = stage.settle(&payment, &verified).await.unwrap();
        assert_eq!(stage.calls("eth_call"), 5);
        match failures {
            4 => assert!(matches!(outcome, SettlementOutcome::Failed { dead: false, .. }), "{outcome:?}"),
            _ => assert!(matches!(outcome, SettlementOutcome::Unknown { transaction: Some(_) }), "{outcome:?}"),
        }
    }
}

/// Nobody waits, so that the engine records the outcome itself. If the ledger fails, reconciliation finds the outcome again.
#[tokio::test(start_paused = true)]
async fn outcome_is_recorded_within_five_tries_or_found_again() {
    for failures in [4, 5] {
        let asked = Arc::new(AtomicU64::new(0));
        let count = asked.clone();
        let refuse = move |asked: Call<'_>| match asked {
            Call::Settle(SettlementStep::Settle { .. }) => {
                (count.fetch_add(1, Ordering::Relaxed) < failures).then(|| LedgerError::Backend("away".into()))
            }
            _ => None,
        };
        let stage = stage_on_refusing_ledger(refuse, |b| b).await;
        let payment = stage.payment(&stage.payer(1));
        stage.produced(&payment).await;
        stage.devnet.stall(true);
        let unverified = Verified::default();
        let settling = stage.facilitator.settle(&payment, &unverified);
        tokio::time::timeout(Duration::from_millis(500), settling).await.expect_err("the client went away");
        stage.devnet.stall(false);
        assert_eq!(stage.received(), 1);
        sleep(Duration::from_secs(60)).await;
        assert_eq!(asked.load(Ordering::Relaxed), 5);
        let is_known = settlement(&stage, &payment).await.paid_by().is_some();
        assert_eq!(is_known, failures == 4);
        assert_eq!(stage.facilitator.stats().pending, 0, "nobody waits for ever");
        // Until then other processes leave it to this one.
        stage.clock.advance(61);
        stage.facilitator.reconcile_now();
        eventually("it is in the ledger", async || settlement(&stage, &payment).await.paid_by().is_some()).await;
        assert_eq!((stage.received(), stage.next_nonce().await), (1, 1));
    }
}

/// A node that shows the logs of ten blocks at a time: 96 requests are made, the first three of them too wide.
#[tokio::test(start_paused = true)]
async fn search_for_a_use_ends_after_ninety_six_requests() {
    let stage = Stage::with(|d| d, rarely).await;
    let payment = stage.payment(&stage.payer(1));
    stage.admit(&payment).await;
    // After the oldest blocks that are searched, and before the newest ones.
    for _ in 0..615 {
        stage.devnet.mine();
    }
    let theirs = stage.front_run(&payment);
    for _ in 0..325 {
        stage.devnet.mine();
    }
    let wide = |limit: u64| {
        move |call: &x402_devnet::RpcCall<'_>| {
            let number = |name: &str| {
                u64::from_str_radix(call.params[0][name].as_str().unwrap().trim_start_matches("0x"), 16).unwrap()
            };
            match call.method {
                "eth_getLogs" if number("toBlock") - number("fromBlock") >= limit => error(-32005, "range too wide"),
                _ => Fault::None,
            }
        }
    };
    stage.devnet.faults().reset();
    stage.devnet.faults().set(wide(10));
    assert_eq!(stage.reconcile(&payment).await.unwrap(), SettlementOutcome::Unknown { transaction: None });
    assert_eq!(stage.calls("eth_getLogs"), 96);
    stage.devnet.faults().set(wide(500));
    assert_eq!(paid_by(&stage.reconcile(&payment).await), theirs);
}

// ---- Reconciliation

/// Another process on the stage's ledger, with its key.
fn another(stage: &Stage) -> OnchainFacilitatorBuilder {
    let builder = OnchainFacilitator::builder().network(stage.devnet.network()).client(stage.devnet.rpc_client());
    rarely(builder.signer(settlement_key()).ledger(stage.ledger.clone()).clock(stage.clock.clone()))
}

/// The process that just sent it follows it.
#[tokio::test(start_paused = true)]
async fn other_processes_resend_a_transaction_after_ten_seconds() {
    let stage = Stage::with(|d| d, rarely).await;
    // A process that has caught up, and has nothing in flight.
    let other = another(&stage).build().await.unwrap();
    let payment = stage.payment(&stage.payer(1));
    let verified = stage.admit(&payment).await;
    stage.devnet.faults().set(|call| match call.method {
        SYNC => no_sync(),
        SEND => Fault::DropBefore,
        _ => Fault::None,
    });
    let gone = tokio::time::timeout(Duration::from_millis(500), stage.settle(&payment, &verified)).await;
    gone.expect_err("nothing arrives");
    stage.clock.advance(10);
    for (seconds, sends) in [(0, false), (1, true)] {
        stage.clock.advance(seconds);
        let asked = stage.calls("eth_getTransactionCount");
        other.reconcile_now();
        sleep(Duration::from_millis(10)).await;
        assert_eq!(stage.calls("eth_getTransactionCount") > asked, sends, "{seconds}");
    }
}

/// So that a restart with thousands of open payments does not ask the node for all of them at once.
#[tokio::test(start_paused = true)]
async fn sixteen_open_payments_are_reconciled_at_a_time() {
    let stage = Stage::with(|d| d, rarely).await;
    paid_by(&stage.admit_and_settle(&stage.payment(&stage.payer(1))).await);
    for _ in 0..40 {
        let payment = stage.payment(&stage.payer(1));
        stage.produced(&payment).await;
        stage.ledger.settle(&payment.key(), &SettlementStep::MarkUnknown).await.unwrap();
    }
    let looks = Log::begin();
    let seen = looks.clone();
    stage.devnet.faults().set(move |call| match call.method {
        "eth_getBlockByNumber" if call.params[0] == "finalized" => {
            seen.add(());
            Fault::Delay(Duration::from_secs(1))
        }
        _ => Fault::None,
    });
    stage.facilitator.reconcile_now();
    sleep(Duration::from_millis(900)).await;
    // One more may come from the task that follows settled payments.
    assert!((16..=17).contains(&looks.all().len()), "{}", looks.all().len());
    stage.devnet.faults().clear();
    stage.clock.advance(10);
    stage.facilitator.reconcile_now();
    eventually("all are settled", async || stage.received() == 41).await;
}
