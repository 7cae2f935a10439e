//! Ledgers that version 0.1.0 wrote, with payments in every state: this version reads every field and continues their work.
//!
//! The files in `files/` are never written again. The ignored tests below wrote them:
//!
//! ```console
//! $ cargo nextest run -p tower-x402-tests --test settlement --run-ignored only --features test-postgres ledger::earlier_version
//! ```

use std::{path::Path, sync::Arc};

use http::{HeaderMap, StatusCode};
use tower_x402::ledger::{JournaledTransaction, Sender};

use super::*;

/// When the payment that is no longer on record was made, in Unix seconds.
const LONG_AGO: u64 = CLOCK_START - 10_000;
const SENDER: Sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };
/// The process that submitted the transactions.
const PROCESS: u64 = 71;
const UNTIL: u64 = CLOCK_START + 30;

/// The states, one payment of one payer each.
const RESERVED: u8 = 1;
const WORKING: u8 = 2;
const PRODUCED: u8 = 3;
const DELIVERED: u8 = 4;
const RELEASED: u8 = 5;
const FAILED: u8 = 6;
const DUE: u8 = 7;
const SUBMITTED: u8 = 8;
const FINAL: u8 = 9;
const UNKNOWN: u8 = 10;
const DEAD: u8 = 11;
const DEFERRED: u8 = 12;
const WITH_ID: u8 = 13;
const LEASED_ANEW: u8 = 14;

fn body(length: u64) -> Option<BodyDigest> {
    Some(BodyDigest { length, digest: hash(0xb0), complete: true })
}

fn new_record(payer: u8) -> Record {
    let mut record = record(payer, 1);
    record.request = Fingerprint { digest: hash(payer), names_caller: payer.is_multiple_of(2) };
    record.signature = PaymentSignature::from(vec![payer; 65]);
    match payer {
        WITH_ID => with_id(7, record),
        _ => record,
    }
}

fn answer() -> StoredResponse {
    StoredResponse {
        status: StatusCode::CREATED,
        headers: HeaderMap::from_iter([(
            "x-bytes".parse().unwrap(),
            http::HeaderValue::from_bytes(b"\xff\xfe").unwrap(),
        )]),
        body: Bytes::from_static(b"\0answer"),
        trailers: Some(HeaderMap::from_iter([("x-after".parse().unwrap(), "1".parse().unwrap())])),
        varied_by: Vec::new(),
        stored_at: CLOCK_START,
    }
}

fn submission(nonce: u64, transaction: u8, payments: &[PaymentKey]) -> JournaledTransaction {
    JournaledTransaction {
        sender: SENDER,
        nonce,
        hash: hash(transaction),
        raw: vec![transaction; 3].into(),
        payments: payments.to_vec(),
        by: PROCESS,
        at: CLOCK_START,
        until: UNTIL,
        known_failures: Default::default(),
    }
}

fn settled_in(transaction: u8, block: u64) -> SettlementStep {
    SettlementStep::Settle { transaction: hash(transaction), block: Some(block), fee: Some(U256::from(21_000)) }
}

/// Brings an empty ledger, whose clock shows [`LONG_AGO`], to the state that the files hold.
async fn fill(ledger: &dyn Ledger, clock: &ManualClock) {
    let mut forgotten = record(1, 999);
    forgotten.authorization.valid_before = U256::from(LONG_AGO + 60);
    let lease = reserve(ledger, forgotten).await;
    produce(ledger, &lease).await;
    ledger.settle(&lease.key, &settled_in(99, 1)).await.unwrap();
    ledger.settle(&lease.key, &SettlementStep::Finalize).await.unwrap();
    clock.advance(CLOCK_START - LONG_AGO);

    let start = FulfilmentStep::Start { until: CLOCK_START + 45 };
    let produce = |response: Option<StoredResponse>| FulfilmentStep::Produce {
        body: body(12),
        at: CLOCK_START + 1,
        response: response.map(Arc::new),
    };
    let mut leases = Vec::new();
    for payer in RESERVED..=LEASED_ANEW {
        leases.push(reserve(ledger, new_record(payer)).await);
    }
    let of = |payer: u8| &leases[usize::from(payer - RESERVED)];
    for payer in [WORKING, PRODUCED, DELIVERED, RELEASED, SUBMITTED, FINAL, UNKNOWN, DEAD, DEFERRED, WITH_ID] {
        admit(ledger, of(payer), 1_000, 5).await.unwrap();
        ledger.fulfil(of(payer), &start).await.unwrap();
    }
    for payer in [SUBMITTED, FINAL, UNKNOWN, DEAD, DEFERRED] {
        ledger.fulfil(of(payer), &produce(None)).await.unwrap();
    }
    for payer in [PRODUCED, DELIVERED, WITH_ID] {
        ledger.fulfil(of(payer), &produce(Some(answer()))).await.unwrap();
    }
    ledger.fulfil(of(RELEASED), &FulfilmentStep::Release { body: body(3) }).await.unwrap();
    for payer in [FAILED, DUE] {
        let funds = Some(Funds { balance: U256::from(1_000), block: 6 });
        ledger.fulfil(of(payer), &FulfilmentStep::Admit { funds, due: true }).await.unwrap();
    }
    let reason = Reason::InsufficientFunds;
    ledger
        .settle(
            &of(FAILED).key,
            &SettlementStep::Fail { reason: reason.clone(), by: PROCESS, known_transactions: Vec::new() },
        )
        .await
        .unwrap();
    ledger.fulfil(of(FAILED), &FulfilmentStep::Release { body: None }).await.unwrap();

    let (submitted, unknown) = (of(SUBMITTED).key, of(UNKNOWN).key);
    ledger.submit(submission(2, 0x21, &[of(DELIVERED).key, of(FINAL).key])).await.unwrap();
    ledger.submit(submission(3, 0x31, &[submitted, unknown])).await.unwrap();
    ledger.submit(submission(3, 0x32, &[submitted, unknown])).await.unwrap();
    ledger.submit(submission(4, 0x41, &[])).await.unwrap();
    ledger.free_nonce(&SENDER, 4, PROCESS).await.unwrap();
    ledger.settle(&unknown, &SettlementStep::MarkUnknown).await.unwrap();
    for payer in [DELIVERED, FINAL] {
        ledger.settle(&of(payer).key, &settled_in(0x21, 7)).await.unwrap();
        ledger.fulfil(of(payer), &FulfilmentStep::Deliver).await.unwrap();
    }
    ledger.settle(&of(FINAL).key, &SettlementStep::Finalize).await.unwrap();
    ledger.settle(&of(DEAD).key, &SettlementStep::Invalidate { reason: Reason::ValidBefore }).await.unwrap();
    let limit = CreditLimit { total: U256::from(100), per_payer: U256::from(100), history: 0 };
    ledger.fulfil(of(DEFERRED), &FulfilmentStep::Defer { limit }).await.unwrap();
    ledger.fulfil(of(DEFERRED), &FulfilmentStep::Deliver).await.unwrap();
    let claim = SettlementStep::Claim(Settling { by: PROCESS, until: UNTIL });
    ledger.settle(&of(WITH_ID).key, &claim).await.unwrap();
    for _ in 0..2 {
        ledger.count_replay(&of(WITH_ID).key).await.unwrap();
    }
    ledger.fulfil(of(LEASED_ANEW), &FulfilmentStep::Release { body: None }).await.unwrap();
    ledger.take_over(&of(LEASED_ANEW).key, 0, CLOCK_START, CLOCK_START + 90).await.unwrap().expect("released");
}

/// The record that [`fill`] left of this payer's payment, as a process that shares the ledger sees it.
fn expected(payer: u8) -> Record {
    let mut record = new_record(payer);
    let settling = Some(Settling { by: PROCESS, until: UNTIL });
    if ![RESERVED, FAILED, DUE, LEASED_ANEW].contains(&payer) {
        (record.admitted, record.block_seen, record.attempts) = (true, Some(5), 1);
        (record.fulfilment, record.lease_until) = (Fulfilment::Working, CLOCK_START + 45);
    }
    if [PRODUCED, DELIVERED, SUBMITTED, FINAL, UNKNOWN, DEAD, DEFERRED, WITH_ID].contains(&payer) {
        (record.fulfilment, record.settlement) = (Fulfilment::Produced, Settlement::Due);
        (record.body, record.produced_at) = (body(12), Some(CLOCK_START + 1));
    }
    match payer {
        RELEASED => {
            (record.fulfilment, record.admitted, record.body) = (Fulfilment::Released, false, body(3));
        }
        FAILED | DUE => {
            (record.settlement, record.admitted, record.block_seen) = (Settlement::Due, true, Some(6));
            if payer == FAILED {
                record.fulfilment = Fulfilment::Released;
                (record.last_failure, record.failures) = (Some(Reason::InsufficientFunds), 1);
            }
        }
        SUBMITTED => (record.settlement, record.settling) = (Settlement::Submitted, settling),
        UNKNOWN => (record.settlement, record.settling) = (Settlement::Unknown, settling),
        DELIVERED | FINAL => {
            let (transaction, block) = (hash(0x21), Some(7));
            record.settlement = match payer {
                FINAL => Settlement::Final { transaction, block },
                _ => Settlement::Settled { transaction, block },
            };
            (record.fulfilment, record.admitted) = (Fulfilment::Delivered, false);
            (record.transactions, record.settling) = (vec![transaction], settling);
            (record.settled_at, record.fee) = (Some(CLOCK_START), Some(U256::from(21_000)));
        }
        DEAD => {
            (record.settlement, record.admitted) = (Settlement::Dead, false);
            record.last_failure = Some(Reason::ValidBefore);
        }
        DEFERRED => {
            (record.fulfilment, record.deferred, record.lease_until) = (Fulfilment::Delivered, true, 0);
        }
        WITH_ID => (record.replays, record.settling) = (2, settling),
        LEASED_ANEW => (record.epoch, record.lease_until) = (1, CLOCK_START + 90),
        _ => {}
    }
    if [SUBMITTED, UNKNOWN].contains(&payer) {
        record.transactions = vec![hash(0x31), hash(0x32)];
    }
    record
}

/// Reads everything that [`fill`] wrote. `seen` makes of a record what this backend shows of it, and `removed` is the number of settled
/// payments whose records were removed.
async fn assert_is_read(ledger: &dyn Ledger, seen: impl Fn(Record) -> Record, removed: u64) {
    for payer in RESERVED..=LEASED_ANEW {
        let expected = seen(expected(payer));
        let read = ledger.get(&expected.key).await.unwrap().unwrap_or_else(|| panic!("payment {payer} is lost"));
        assert_eq!(format!("{read:#?}"), format!("{expected:#?}"), "payment {payer}");
        // What `Debug` does not show.
        assert_eq!(read.signature, expected.signature, "payment {payer}");
        assert_eq!(read.request, expected.request, "payment {payer}");
        assert_eq!(read.terms.text(), expected.terms.text(), "payment {payer}");
        let response = ledger.response(&expected.key).await.unwrap();
        assert_eq!(response.is_some(), [PRODUCED, DELIVERED, WITH_ID].contains(&payer), "payment {payer}");
        if let Some(response) = response {
            let StoredResponse { status, headers, body, trailers, stored_at, .. } = answer();
            assert_eq!((response.status, &response.headers, &response.body), (status, &headers, &body));
            assert_eq!((&response.trailers, response.stored_at), (&trailers, stored_at));
        }
    }
    assert_eq!(ledger.counts().await.unwrap(), Counts { settled: 2 + removed, pending: 8, unknown: 1, failed: 2 });
    let submissions = ledger.submissions(&SENDER, 0).await.unwrap();
    let shown: Vec<_> =
        submissions.iter().map(|it| (it.nonce, it.hash, it.raw.to_vec(), it.payments.clone())).collect();
    let key = |payer| expected(payer).key;
    assert_eq!(
        shown,
        [
            (2, hash(0x21), vec![0x21; 3], vec![key(DELIVERED), key(FINAL)]),
            (3, hash(0x32), vec![0x32; 3], vec![key(SUBMITTED), key(UNKNOWN)])
        ]
    );
}

/// Does with every payment what comes next.
async fn assert_work_continues(ledger: &dyn Ledger, removed: u64) {
    let lease = |payer| expected(payer).lease();
    let settle = async |payer: u8, step| ledger.settle(&lease(payer).key, &step).await;
    // The due payments are submitted by another process: together, but for the one whose failure is not known to it.
    let due = [PRODUCED, DUE, DEFERRED].map(|payer| lease(payer).key);
    let mut next = submission(5, 0x51, &due);
    (next.by, next.at) = (PROCESS + 1, CLOCK_START + 31);
    next.payments.push(lease(FAILED).key);
    let refused = ledger.submit(next.clone()).await;
    assert!(matches!(&refused, Err(LedgerError::NotDue(keys)) if *keys == [lease(FAILED).key]), "{refused:?}");
    next.known_failures = [(lease(FAILED).key, 1)].into();
    ledger.submit(next).await.unwrap();
    for payer in [PRODUCED, DUE, DEFERRED, FAILED, SUBMITTED, UNKNOWN] {
        settle(payer, settled_in(0x51, 8)).await.unwrap();
        settle(payer, SettlementStep::Finalize).await.unwrap();
    }
    settle(DELIVERED, SettlementStep::Reorg).await.unwrap();
    settle(DEAD, settled_in(0x51, 8)).await.expect_err("dead is dead");
    settle(FINAL, SettlementStep::Reorg).await.expect_err("final is final");
    ledger.fulfil(&lease(PRODUCED), &FulfilmentStep::Deliver).await.unwrap();
    // The payment that was being worked on begins anew, with the next owner.
    let taken = ledger.take_over(&lease(WORKING).key, 0, CLOCK_START + 46, CLOCK_START + 90).await.unwrap();
    ledger.fulfil(&taken.expect("its lease ran out"), &FulfilmentStep::Start { until: 0 }).await.unwrap();
    let known = ledger.reserve(&with_id(7, record(WITH_ID, 2))).await;
    assert!(matches!(known, Err(LedgerError::IdTaken { key }) if key == lease(WITH_ID).key), "{known:?}");
    assert_eq!(ledger.count_replay(&lease(WITH_ID).key).await.unwrap(), 3);
    let refused = admit(ledger, &reserve(ledger, record(WORKING, 2)).await, 19, 9).await;
    assert!(matches!(refused, Err(LedgerError::InsufficientFunds)), "the payment of before is in flight: {refused:?}");
    let again = ledger.reserve(&new_record(RESERVED)).await.unwrap();
    assert!(matches!(again, Reservation::Known(_)), "{again:?}");
    ledger.discard(&lease(RESERVED)).await.unwrap();
    assert_eq!(ledger.counts().await.unwrap(), Counts { settled: 7 + removed, pending: 5, unknown: 0, failed: 1 });
}

async fn open(path: &Path, clock: &Arc<ManualClock>) -> SqliteLedger {
    SqliteLedger::open_with(path, ResponseLimits::default(), 10_000, clock.clone()).await.unwrap()
}

/// After a restart no process works on a payment or settles it any more.
fn after_restart(record: Record) -> Record {
    let mut record = record;
    (record.lease_until, record.settling) = (0, None);
    record
}

#[tokio::test]
async fn a_sqlite_file_is_read_and_its_payments_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    std::fs::write(&path, include_bytes!("files/ledger-0.1.0.sqlite")).unwrap();
    let clock = Arc::new(ManualClock::at(CLOCK_START));
    let ledger = open(&path, &clock).await;
    // The removed payment was settled and removed before either was written.
    assert_is_read(&ledger, after_restart, 0).await;
    ledger.close().await;
    let ledger = open(&path, &clock).await;
    assert_is_read(&ledger, after_restart, 0).await;
    assert_work_continues(&ledger, 0).await;
}

#[tokio::test]
#[ignore = "writes the file of the test above, once per version"]
async fn write_the_sqlite_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("settlement/ledger/files/ledger-0.1.0.sqlite");
    let _ = std::fs::remove_file(&path);
    let clock = Arc::new(ManualClock::at(LONG_AGO));
    let ledger = open(&path, &clock).await;
    fill(&ledger, &clock).await;
    ledger.close().await;
}

#[cfg(feature = "test-postgres")]
mod postgres {
    use sqlx::{Connection as _, PgConnection};
    use support::postgres::Server;
    use tower_x402::ledger::PostgresLedger;

    use super::*;

    async fn connect(schema: &str, clock: &Arc<ManualClock>) -> PostgresLedger {
        PostgresLedger::builder(Server::shared().url()).schema(schema).clock(clock.clone()).connect().await.unwrap()
    }

    #[tokio::test]
    async fn a_postgres_schema_is_read_and_its_payments_go_on() {
        let schema = Server::shared().new_schema();
        let sql = include_str!("files/ledger-0.1.0.sql").replace("x402_0_1_0", &schema);
        let mut session = PgConnection::connect(Server::shared().url()).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut session).await.unwrap();
        let clock = Arc::new(ManualClock::at(CLOCK_START));
        let ledger = connect(&schema, &clock).await;
        // The process that wrote them is gone, and holds nothing any more.
        let freed = |mut record: Record| {
            record.lease_until = 0;
            record.settling = record.settling.map(|settling| Settling { until: 0, ..settling });
            record
        };
        assert_is_read(&ledger, freed, 1).await;
        assert_work_continues(&ledger, 1).await;
    }

    #[tokio::test]
    #[ignore = "writes the file of the test above, once per version"]
    async fn write_the_postgres_file() {
        let clock = Arc::new(ManualClock::at(LONG_AGO));
        let ledger = connect("x402_0_1_0", &clock).await;
        fill(&ledger, &clock).await;
        let dump = Server::shared().dump("x402_0_1_0");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("settlement/ledger/files/ledger-0.1.0.sql");
        std::fs::write(path, dump).unwrap();
    }
}
