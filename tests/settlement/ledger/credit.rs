//! The sums that a ledger keeps of what payers owe are those of its records.

use tower_x402::ledger::Listing;

use super::*;

/// The amount of one payment of these tests.
const AMOUNT: u64 = 10;

fn limit(per_payer: u64, history: u32) -> CreditLimit {
    CreditLimit { per_payer: U256::from(per_payer), history }
}

async fn produced(ledger: &dyn Ledger, payer: u8, nonce: u64) -> Lease {
    let lease = reserve(ledger, record(payer, nonce)).await;
    produce(ledger, &lease).await;
    lease
}

async fn defer(ledger: &dyn Ledger, lease: &Lease, limit: CreditLimit) -> bool {
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
        3 => Just(Ok(FulfilmentStep::Defer { limit: limit(1_000_000, 1) })),
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
            let ledger = MemoryLedger::new();
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
                let history = of(payer).filter(|record| record.settlement.paid_by().is_some()).count() as u32;
                let owed = u64::try_from(of(payer).map(Record::owed).sum::<U256>()).unwrap();
                let failed = of(payer).any(|record| !record.owed().is_zero()
                    && (record.last_failure.is_some() || record.settlement == Settlement::Dead));
                let next = produced(&ledger, payer, 100).await;
                let own = owed + AMOUNT;
                for too_little in [limit(own - 1, history), limit(own, history + 1)] {
                    assert!(!defer(&ledger, &next, too_little).await, "{too_little:?}");
                }
                assert_eq!(defer(&ledger, &next, limit(own, history)).await, !failed);
                ledger.advance(&next.key, &SettlementStep::Settle { transaction: hash(2), block: None, fee: None }.into()).await.unwrap();
            }
        });
    }
}
