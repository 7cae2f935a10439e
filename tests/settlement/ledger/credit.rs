//! The sums that a ledger keeps of what payers owe are those of its records.

use tower_x402::{Clock as _, ledger::Listing};

use super::*;

/// The amount of one payment of these tests.
const AMOUNT: u64 = 10;

async fn produced(ledger: &dyn Ledger, payer: u8, nonce: u64) -> Lease {
    let lease = reserve(ledger, record(payer, nonce)).await;
    produce(ledger, &lease).await;
    lease
}

async fn defer(ledger: &dyn Ledger, lease: &Lease, limit: U256) -> bool {
    match ledger.advance(&lease.key, &lease.step(FulfilmentStep::Defer { limit })).await {
        Ok(_) => true,
        Err(LedgerError::NoCredit) => {
            assert!(!ledger.get(&lease.key).await.unwrap().unwrap().deferred, "refused, and deferred");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// A step of one of several payments.
fn any_move() -> impl Strategy<Value = (u8, u64, Result<FulfilmentStep, SettlementStep>)> {
    let moves = prop_oneof![
        3 => Just(Ok(FulfilmentStep::Defer { limit: U256::MAX })),
        2 => Just(Err(SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None })),
        1 => Just(Err(SettlementStep::Submit { transaction: hash(1) })),
        1 => Just(Err(SettlementStep::MarkUnknown)),
        1 => Just(Err(SettlementStep::Finalize)),
        1 => Just(Err(SettlementStep::Fail { reason: Reason::InsufficientFunds, by: 0, known_transactions: Vec::new() })),
        1 => Just(Err(SettlementStep::Invalidate { reason: Reason::InsufficientFunds })),
        1 => Just(Err(SettlementStep::Reorg)),
    ];
    (1..=3_u8, 0..6_u64, moves)
}

proptest! {
    #[test]
    fn the_sums_of_what_is_owed_are_exact(moves in prop::collection::vec(any_move(), 0..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let ledger = MemoryLedger::with(ResponseLimits::default(), 10_000, Arc::new(ManualClock::at(CLOCK_START)));
            for payer in 1..=3 {
                for nonce in 0..6 {
                    produced(&ledger, payer, nonce).await;
                }
            }
            for (payer, nonce, step) in moves {
                let key = record(payer, nonce).key;
                // Not every step is possible.
                let _ = match step {
                    Ok(step) => ledger.advance(&key, &Lease { key, epoch: 0 }.step(step)).await,
                    Err(step) => ledger.advance(&key, &step.into()).await,
                };
            }
            let records = ledger.list(&Listing::default()).await.unwrap();
            let of = |payer: u8| records.iter().filter(move |record| record.key.payer == Address::repeat_byte(payer));
            for payer in 1..=3 {
                let settled = of(payer).filter(|record| record.settlement.paid_by().is_some()).count() as u64 * AMOUNT;
                let owed = u64::try_from(of(payer).map(Record::owed).sum::<U256>()).unwrap();
                let failed = of(payer).any(|record| !record.owed().is_zero()
                    && (record.last_failure.is_some() || record.settlement == Settlement::Dead));
                let next = produced(&ledger, payer, 100).await;
                let needed = owed + AMOUNT;
                assert!(!defer(&ledger, &next, U256::from(needed - 1)).await, "above the limit");
                assert_eq!(defer(&ledger, &next, U256::from(needed)).await, needed <= settled && !failed);
                ledger.advance(&next.key, &SettlementStep::Settle { transaction: hash(2), block: None, fee: None }.into()).await.unwrap();
            }
        });
    }
}

/// A payment of the payer that is signed at this time.
fn signed_at(now: u64, nonce: u64) -> Record {
    let mut record = record(1, nonce);
    record.authorization.valid_before = U256::from(now + 60);
    (record.reserved_at, record.lease_until) = (now, now + 30);
    record
}

/// A step of a payer that takes as much as it gets.
#[derive(Clone, Copy, Debug)]
enum Move {
    Pay,
    Borrow,
    /// Pays back the oldest loan.
    Repay,
    /// Makes all its loans worthless.
    Cheat,
    Wait(u64),
}

fn any_cheating_move() -> impl Strategy<Value = Move> {
    prop_oneof![
        3 => Just(Move::Pay),
        6 => Just(Move::Borrow),
        1 => Just(Move::Repay),
        2 => Just(Move::Cheat),
        3 => (1..700_u64).prop_map(Move::Wait),
        1 => (900..2_000_u64).prop_map(Move::Wait),
        1 => (3_600..6_000_u64).prop_map(Move::Wait),
    ]
}

proptest! {
    /// Whatever is forgotten meanwhile.
    #[test]
    fn no_payer_takes_more_than_it_has_paid(moves in prop::collection::vec(any_cheating_move(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let clock = Arc::new(ManualClock::at(CLOCK_START));
            let ledger = MemoryLedger::with(ResponseLimits::default(), 10_000, clock.clone());
            let (mut nonce, mut paid, mut loans) = (0, 0, Vec::<Lease>::new());
            for step in moves {
                let mut new = async || {
                    nonce += 1;
                    let lease = reserve(&ledger, signed_at(clock.now(), nonce)).await;
                    produce(&ledger, &lease).await;
                    lease
                };
                let settle = SettlementStep::Settle { transaction: hash(1), block: Some(1), fee: None };
                match step {
                    Move::Pay => {
                        ledger.advance(&new().await.key, &settle.into()).await.unwrap();
                        paid += AMOUNT;
                    }
                    Move::Borrow => {
                        let lease = new().await;
                        if defer(&ledger, &lease, U256::MAX).await {
                            loans.push(lease);
                        }
                    }
                    Move::Repay => {
                        // It may have been made worthless, or forgotten.
                        if let Some(loan) = loans.first()
                            && ledger.advance(&loan.key, &settle.into()).await.is_ok()
                        {
                            loans.remove(0);
                            paid += AMOUNT;
                        }
                    }
                    Move::Cheat => {
                        for loan in &loans {
                            let dead = SettlementStep::Invalidate { reason: Reason::InsufficientFunds };
                            let _ = ledger.advance(&loan.key, &dead.into()).await;
                        }
                    }
                    Move::Wait(seconds) => {
                        clock.advance(seconds);
                    }
                }
                let taken = loans.len() as u64 * AMOUNT;
                assert!(taken <= paid, "{taken} taken and not paid, {paid} paid");
            }
        });
    }
}
