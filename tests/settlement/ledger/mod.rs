//! Every backend against the contract (`ledger::conformance`), and what each promises beyond it.

mod backends;
mod channels;
mod credit;
mod durable;
mod map;
#[cfg(target_os = "linux")]
mod power_cut;
#[cfg(feature = "test-postgres")]
mod replicas;

use std::{future::Future, path::Path, sync::Arc};

use alloy_primitives::{Address, U256};
use proptest::{prelude::*, sample::select};
use support::around_ledger::{Around, AroundLedger, Call};
use tower_x402::{
    ManualClock, Network,
    ledger::{
        Fulfilment, FulfilmentStep, Lease, Ledger, LedgerError, MemoryLedger, Record, Reservation, ResponseLimits,
        Settlement, SettlementStep, Settling, SqliteLedger,
        conformance::{START as CLOCK_START, admit, hash, produce, record, reserve, with_id},
    },
    payment::{Funds, PaymentKey},
    protocol::Reason,
};

mod memory {
    tower_x402::ledger_conformance!(super::backends::memory);
}

mod sqlite {
    tower_x402::ledger_conformance!(super::backends::sqlite);
}

#[cfg(feature = "test-postgres")]
mod postgres {
    tower_x402::ledger_conformance!(super::backends::postgres);
}

mod somebody_elses {
    tower_x402::ledger_conformance!(super::map::open);
}

mod wrapped {
    tower_x402::ledger_conformance!(payments: super::wrapped_ledger);
}

/// When the payments of these tests expire, in Unix seconds.
const VALID_BEFORE: u64 = CLOCK_START + 60;

/// Forwards every call, as a ledger that logs or counts does.
struct Forwarding;

impl Around for Forwarding {
    async fn around<T: Send>(
        &self,
        _: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        work.await
    }
}

async fn wrapped_ledger(clock: Arc<ManualClock>) -> (AroundLedger<Forwarding>, ()) {
    let ledger = Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock));
    (AroundLedger { ledger, around: Forwarding }, ())
}

/// For the ledgers in memory and in a file, which remove records when others are reserved.
#[tokio::test]
async fn expired_records_make_room_in_a_full_ledger() {
    let clock = Arc::new(ManualClock::at(CLOCK_START));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let memory = Arc::new(MemoryLedger::with(ResponseLimits::default(), 4, clock.clone()));
    let sqlite = SqliteLedger::open_with(&path, ResponseLimits::default(), 4, clock.clone()).await.unwrap();
    let ledgers: [Arc<dyn Ledger>; 2] = [memory, Arc::new(sqlite)];
    for ledger in &ledgers {
        for nonce in 0..4 {
            reserve(&**ledger, record(1, nonce)).await;
        }
        assert!(matches!(ledger.reserve(&record(2, 0)).await, Err(LedgerError::Full)));
    }
    for ledger in &ledgers {
        assert!(matches!(ledger.reserve(&record(2, 1)).await, Err(LedgerError::Full)));
        let Ok(Some(first)) = ledger.get(&record(1, 0).key).await else { panic!("kept") };
        ledger.discard(&first.lease()).await.unwrap();
        reserve(&**ledger, record(1, 0)).await;
        assert!(matches!(ledger.reserve(&record(2, 1)).await, Err(LedgerError::Full)), "one for one");
    }
    clock.advance(VALID_BEFORE - CLOCK_START + 7_200);
    for ledger in &ledgers {
        // The payer that filled the ledger never returns.
        reserve(&**ledger, record(2, 0)).await;
        assert!(ledger.get(&record(1, 0).key).await.unwrap().is_none());
    }
    drop(ledgers);
    let sqlite = reopened(&path, clock).await;
    assert_eq!(sqlite.counts().await.unwrap().pending, 1, "forgotten in the file, too");
}

/// For the ledger in memory: a database removes records from time to time.
#[tokio::test]
async fn records_are_removed_after_their_time_if_their_outcome_is_known() {
    let clock = Arc::new(ManualClock::at(CLOCK_START));
    let ledger = MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone());
    let [last, open] = [1, 2].map(async |nonce| {
        let lease = reserve(&ledger, record(1, nonce)).await;
        produce(&ledger, &lease).await;
        lease.key
    });
    let (last, open) = (last.await, open.await);
    let settle = SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None };
    let others_come = async |nonce| drop(ledger.reserve(&record(1, nonce)).await.unwrap());
    let is_known = async |key| ledger.get(&key).await.unwrap().is_some();
    ledger.advance(&last, &settle.clone().into()).await.unwrap();
    ledger.advance(&last, &SettlementStep::Finalize.into()).await.unwrap();
    ledger.advance(&open, &SettlementStep::MarkUnknown.into()).await.unwrap();
    clock.advance(VALID_BEFORE + 900 - CLOCK_START);
    others_come(10).await;
    assert!(is_known(last).await, "a late reorganization finds it");
    clock.advance(1);
    others_come(11).await;
    assert_eq!((is_known(last).await, is_known(open).await), (false, true));
    // A record that could not be removed is looked at again.
    ledger.advance(&open, &settle.clone().into()).await.unwrap();
    ledger.advance(&open, &SettlementStep::Finalize.into()).await.unwrap();
    clock.advance(901);
    others_come(12).await;
    assert!(!is_known(open).await);
}

/// Opens the file once it is no longer in use.
async fn reopened(path: &Path, clock: Arc<ManualClock>) -> SqliteLedger {
    let mut ledger = None;
    support::eventually::eventually("whoever had the file lets go of it", async || {
        ledger = SqliteLedger::open_with(path, ResponseLimits::default(), 4, clock.clone()).await.ok();
        ledger.is_some()
    })
    .await;
    ledger.unwrap()
}

fn any_step() -> impl Strategy<Value = Result<FulfilmentStep, SettlementStep>> {
    let funds = Some(Funds { balance: U256::from(1_000), block: 1 });
    let reason = Reason::InsufficientFunds;
    select(vec![
        Ok(FulfilmentStep::Admit { funds, due: false }),
        Ok(FulfilmentStep::Admit { funds, due: true }),
        Ok(FulfilmentStep::Start { until: 0 }),
        Ok(FulfilmentStep::Release { body: None }),
        Ok(FulfilmentStep::Produce { charged: None, body: None, at: 1, response: None }),
        Ok(FulfilmentStep::Defer { limit: U256::MAX }),
        Ok(FulfilmentStep::Deliver),
        Err(SettlementStep::Submit { transaction: hash(1) }),
        Err(SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None }),
        Err(SettlementStep::Finalize),
        Err(SettlementStep::Fail { reason: reason.clone(), by: 0, known_transactions: vec![hash(1)] }),
        Err(SettlementStep::Invalidate { reason }),
        Err(SettlementStep::MarkUnknown),
        Err(SettlementStep::Reorg),
        Err(SettlementStep::Claim(Settling { by: 1, until: CLOCK_START + 9 })),
        Err(SettlementStep::Claim(Settling { by: 2, until: CLOCK_START + 9 })),
    ])
}

proptest! {
    #[test]
    fn no_order_of_steps_breaks_the_contract(steps in prop::collection::vec(any_step(), 0..40)) {
        let mut record = record(1, 1);
        for step in steps {
            let before = record.clone();
            let taken = match &step {
                Ok(step) => record.fulfil(step),
                Err(step) => record.settle(step, CLOCK_START),
            };
            let paid = |record: &Record| record.settlement.paid_by().is_some();
            let undone = matches!((&step, before.settlement), (Err(SettlementStep::Reorg), Settlement::Settled { .. }));
            prop_assert!(!paid(&before) || paid(&record) || undone, "paid, then unpaid by {:?}", step);
            prop_assert!(!undone || record.admitted, "undone, and not in flight");
            prop_assert!(before.settlement != Settlement::Dead || record.settlement == Settlement::Dead, "raised from the dead");
            let answered = |record: &Record| matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered);
            prop_assert!(!answered(&before) || answered(&record), "answered, then not, by {:?}", step);
            prop_assert!(!answered(&before) || record.attempts == before.attempts, "worked on again by {:?}", step);
            prop_assert!(record.fulfilment != Fulfilment::Working || record.admitted || paid(&record)
                || matches!(record.settlement, Settlement::Dead), "works unadmitted after {:?}", step);
            prop_assert!(record.transactions.len() >= before.transactions.len(), "forgot a transaction");
            prop_assert!(!paid(&record) || !record.admitted, "paid and in flight");
            prop_assert!(!record.deferred || answered(&record), "deferred before there is an answer");
            prop_assert!(record.owed().is_zero() || !paid(&record), "paid and owed");
            if taken.is_err() {
                prop_assert_eq!(format!("{:?}", before), format!("{:?}", record), "refused, yet changed");
            }
        }
    }
}
