//! The ledger in PostgreSQL is shared by several processes, and survives failing connections and servers.

use std::{path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use sqlx::{Connection, PgConnection};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::watch,
};
use tower_x402::{
    ManualClock,
    ledger::{
        JournaledTransaction, Listing, PaymentStep, PostgresLedger, PostgresLedgerBuilder, ResponseLedger,
        ResponseLimits, Sender, SettlementState, StoredResponse, TransactionLedger,
        channels::{ChannelLedgerError, ChannelStep},
        conformance::{channels, state, take_over},
    },
};

use super::*;
use support::postgres::Server;

const SENDER: Sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };

fn replica(url: &str, schema: &str) -> PostgresLedgerBuilder {
    PostgresLedger::builder(url).schema(schema).max_connections(8).clock(Arc::new(ManualClock::at(CLOCK_START)))
}

async fn replicas<const N: usize>(schema: &str) -> [Arc<PostgresLedger>; N] {
    let url = Server::shared().url();
    // At once, on nothing: one of them makes the tables.
    let opened = join_all((0..N).map(|_| replica(url, schema).connect())).await;
    opened.into_iter().map(|ledger| Arc::new(ledger.unwrap())).collect::<Vec<_>>().try_into().unwrap()
}

async fn session(url: &str, schema: &str) -> PgConnection {
    let mut connection = PgConnection::connect(url).await.unwrap();
    run(&mut connection, format!("SET search_path = {schema}")).await;
    connection
}

async fn run(connection: &mut PgConnection, sql: String) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(connection).await.unwrap();
}

async fn number(connection: &mut PgConnection, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(connection).await.unwrap()
}

fn submission(by: u64, nonce: u64, transaction: u8, payments: &[PaymentKey]) -> JournaledTransaction {
    JournaledTransaction {
        sender: SENDER,
        nonce,
        hash: hash(transaction),
        raw: vec![transaction; 3].into(),
        payments: payments.to_vec(),
        by,
        at: CLOCK_START,
        until: CLOCK_START + 30,
        known_failures: Default::default(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_many_replicas_reserves() {
    let replicas: [_; 4] = replicas(&Server::shared().new_schema()).await;
    let tasks = (0..100).map(|n| {
        let ledger = replicas[n % 4].clone();
        tokio::spawn(async move { matches!(ledger.reserve(&record(1, 1)).await.unwrap(), Reservation::New(_)) })
    });
    let won = join_all(tasks).await.into_iter().filter(|won| *won.as_ref().unwrap()).count();
    assert_eq!(won, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn payments_in_flight_stay_within_the_balance_across_replicas() {
    let replicas: [_; 4] = replicas(&Server::shared().new_schema()).await;
    let tasks = (0..60).map(|nonce| {
        let ledger = replicas[nonce as usize % 4].clone();
        tokio::spawn(async move {
            let lease = reserve(&*ledger, record(1, nonce)).await;
            match admit(&*ledger, &lease, 100, 1).await {
                Ok(_) => true,
                Err(LedgerError::InsufficientFunds) => false,
                Err(error) => panic!("{error:?}"),
            }
        })
    });
    let admitted = join_all(tasks).await.into_iter().filter(|admitted| *admitted.as_ref().unwrap()).count();
    assert_eq!(admitted, 10, "ten times ten");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_owed_stays_within_the_limit_across_replicas() {
    let replicas: [_; 4] = replicas(&Server::shared().new_schema()).await;
    // Half of the payers have settled no more than that.
    let limit = U256::from(29);
    let mut leases = Vec::new();
    for payer in 1..=6 {
        for nonce in 10..12 + 2 * u64::from(payer % 2) {
            let paid = reserve(&*replicas[0], record(payer, nonce)).await;
            produce(&*replicas[0], &paid).await;
            let settle = SettlementStep::Settle { transaction: hash(1), block: None, fee: None };
            replicas[0].advance(&paid.key, &settle.into()).await.unwrap();
        }
        for nonce in 1..=4 {
            let lease = reserve(&*replicas[0], record(payer, nonce)).await;
            produce(&*replicas[0], &lease).await;
            leases.push(lease);
        }
    }
    let tasks = leases.into_iter().enumerate().map(|(n, lease)| {
        let ledger = replicas[n % 4].clone();
        tokio::spawn(async move {
            match ledger.advance(&lease.key, &lease.step(FulfilmentStep::Defer { limit })).await {
                Ok(_) => true,
                Err(LedgerError::NoCredit) => false,
                Err(error) => panic!("{error:?}"),
            }
        })
    });
    let deferred = join_all(tasks).await.into_iter().filter(|deferred| *deferred.as_ref().unwrap()).count();
    assert_eq!(deferred, 6 * 2, "two of each payer");
}

#[tokio::test]
async fn replicas_see_each_others_steps() {
    let schema = Server::shared().new_schema();
    let [first, second] = replicas(&schema).await;
    let lease = reserve(&*first, record(1, 1)).await;
    assert_eq!(take_over(&*second, &lease.key, 0, CLOCK_START, CLOCK_START + 90).await, None, "its owner lives");
    admit(&*first, &lease, 10, 1).await.unwrap();
    let other = reserve(&*second, record(1, 2)).await;
    assert!(matches!(admit(&*second, &other, 10, 1).await, Err(LedgerError::InsufficientFunds)));
    second
        .advance(&lease.key, &SettlementStep::Settle { transaction: hash(1), block: Some(2), fee: None }.into())
        .await
        .unwrap();
    // The first one remembers an unsettled payment, and finds out.
    first.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    assert_eq!(state(&*first, &lease.key).await.1.state(), SettlementState::Settled);
    assert!(matches!(admit(&*second, &other, 10, 1).await, Err(LedgerError::Stale)));
    admit(&*second, &other, 10, 2).await.unwrap();
    first.advance(&lease.key, &PaymentStep::Replay).await.unwrap();
    assert_eq!(second.advance(&lease.key, &PaymentStep::Replay).await.unwrap().replays, 2);
    let taken = take_over(&*second, &lease.key, 0, CLOCK_START + 31, CLOCK_START + 90).await;
    assert!(taken.is_some(), "its lease ran out");
    assert!(matches!(
        first.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await,
        Err(LedgerError::LeaseLost)
    ));
    let [third] = replicas(&schema).await;
    assert!(third.get(&lease.key).await.unwrap().is_some_and(|record| record.lease_until == CLOCK_START + 90));
}

/// Keeps a process from saying that it is alive, as if it had died or was held up, until the session is given up.
async fn silence(schema: &str, process: i64) -> PgConnection {
    let mut session = session(Server::shared().url(), schema).await;
    run(&mut session, format!("BEGIN; SELECT FROM processes WHERE id = {process} FOR UPDATE")).await;
    session
}

/// Two ledgers in this schema, and the number under which the first one is known there.
async fn numbered(schema: &str) -> (PostgresLedger, i64, PostgresLedger) {
    let url = Server::shared().url();
    let first = replica(url, schema).connect().await.unwrap();
    let process = number(&mut session(url, schema).await, "SELECT id FROM processes").await;
    (first, process, replica(url, schema).connect().await.unwrap())
}

/// Within this time the next process takes over from one that died.
const TAKEN_OVER: Duration = Duration::from_secs(5);

async fn within_the_bound(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let look = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(TAKEN_OVER, look).await.is_ok(), "{what} took longer than {TAKEN_OVER:?}");
}

/// The clock of the ledgers stands still, so that no lease and no claim ends by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_next_process_takes_over_from_a_dead_one_within_seconds_and_fences_it() {
    let schema = Server::shared().new_schema();
    let (first, process, second) = numbered(&schema).await;

    // Work in progress, a transaction in flight, and a payment that nobody else wants.
    let working = reserve(&first, record(1, 1)).await;
    admit(&first, &working, 30, 1).await.unwrap();
    first.advance(&working.key, &working.step(FulfilmentStep::Start { until: CLOCK_START + 600 })).await.unwrap();
    let sent = reserve(&first, record(1, 2)).await;
    produce(&first, &sent).await;
    first.submit(submission(1, 0, 1, &[sent.key])).await.unwrap();
    let kept = reserve(&first, record(1, 3)).await;
    admit(&first, &kept, 30, 1).await.unwrap();

    let take_it_over = async || take_over(&second, &working.key, 0, CLOCK_START, CLOCK_START + 600).await;
    let idle = Listing { idle_at: Some(CLOCK_START), ..Listing::of([SettlementState::Submitted]) };
    tokio::time::sleep(TAKEN_OVER).await;
    assert_eq!(take_it_over().await, None, "its process is alive, however long it works");
    assert!(second.list(&idle).await.unwrap().is_empty(), "and settles");
    assert!(matches!(second.submit(submission(2, 1, 2, &[sent.key])).await, Err(LedgerError::NotDue(_))));
    assert!(matches!(second.submit(submission(2, 0, 2, &[])).await, Err(LedgerError::NonceTaken { .. })));

    let stalled = silence(&schema, process).await;
    let mut taken = None;
    within_the_bound("taking over", async || {
        taken = take_it_over().await;
        taken.is_some()
    })
    .await;
    let taken = taken.unwrap();
    assert_eq!(second.list(&idle).await.unwrap().len(), 1, "nobody settles it");
    second.submit(submission(2, 0, 2, &[sent.key])).await.expect("neither the claim nor the nonce is held");

    // It was only held up.
    drop(stalled);
    let done = FulfilmentStep::Produce { charged: None, body: None, at: CLOCK_START, response: None };
    assert!(matches!(first.advance(&working.key, &working.step(done.clone())).await, Err(LedgerError::LeaseLost)));
    assert!(matches!(first.submit(submission(1, 1, 3, &[sent.key])).await, Err(LedgerError::NotDue(_))));
    assert!(matches!(first.submit(submission(1, 0, 3, &[])).await, Err(LedgerError::NonceTaken { .. })));
    second.advance(&taken.key, &taken.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    second.advance(&taken.key, &taken.step(done.clone())).await.unwrap();
    first.advance(&kept.key, &kept.step(FulfilmentStep::Start { until: 0 })).await.expect("nobody took it over");
    within_the_bound("coming back", async || {
        second.get(&kept.key).await.unwrap().is_some_and(|record| record.lease_until > CLOCK_START)
    })
    .await;
    assert_eq!(take_over(&second, &kept.key, 0, CLOCK_START, CLOCK_START + 600).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_next_process_takes_channels_over_from_a_dead_one_within_seconds_and_fences_it() {
    let schema = Server::shared().new_schema();
    let (first, process, second) = numbered(&schema).await;
    let [first, second] = [&first, &second].map(|ledger| ledger as &dyn tower_x402::ledger::channels::ChannelLedger);
    channels::open(first, 1, 100).await;
    let held = first.advance(&channels::id(1), &channels::begin(1, hash(1), 10, 10)).await.unwrap();
    let claim = |until| ChannelStep::BeginClaim { now: CLOCK_START, until };
    first.advance(&channels::id(1), &claim(CLOCK_START + 600)).await.unwrap();

    let begin = async || second.advance(&channels::id(1), &channels::begin(1, hash(2), 10, 10)).await;
    tokio::time::sleep(TAKEN_OVER).await;
    assert!(matches!(begin().await, Err(ChannelLedgerError::Busy { .. })), "its process is alive");
    let claimed = second.advance(&channels::id(1), &claim(CLOCK_START + 601)).await;
    assert!(matches!(claimed, Err(ChannelLedgerError::Busy { .. })));

    let stalled = silence(&schema, process).await;
    let mut taken = None;
    within_the_bound("taking over", async || {
        taken = begin().await.ok();
        taken.is_some()
    })
    .await;
    second.advance(&channels::id(1), &claim(CLOCK_START + 601)).await.unwrap();

    // It was only held up.
    drop(stalled);
    let charge = |epoch| ChannelStep::Charge { epoch, amount: 10, response: None, now: CLOCK_START };
    let late = first.advance(&channels::id(1), &charge(held.epoch)).await;
    assert!(matches!(late, Err(ChannelLedgerError::LeaseLost)));
    first.advance(&channels::id(1), &ChannelStep::EndClaim { until: CLOCK_START + 600 }).await.unwrap();
    let charged = second.advance(&channels::id(1), &charge(taken.unwrap().epoch)).await.unwrap();
    assert_eq!((charged.charged(), charged.claiming_until), (10, Some(CLOCK_START + 601)), "once, and still claimed");
}

/// A deploy: the process goes, and says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_process_that_leaves_is_taken_over_from_at_once() {
    let schema = Server::shared().new_schema();
    let (first, _, second) = numbered(&schema).await;
    let lease = reserve(&first, record(1, 1)).await;
    drop(first);
    let started = std::time::Instant::now();
    within_the_bound("taking over", async || {
        take_over(&second, &lease.key, 0, CLOCK_START, CLOCK_START + 600).await.is_some()
    })
    .await;
    assert!(started.elapsed() < Duration::from_secs(3), "it need not fall silent first");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_submissions_of_the_same_payments_do_not_deadlock() {
    let replicas: [_; 2] = replicas(&Server::shared().new_schema()).await;
    let mut keys = Vec::new();
    for payer in 1..=40 {
        let lease = reserve(&*replicas[0], record(payer, 1)).await;
        produce(&*replicas[0], &lease).await;
        keys.push(lease.key);
    }
    for round in 0..5 {
        let tasks = (0..2).map(|n| {
            let (ledger, mut keys) = (replicas[n].clone(), keys.clone());
            if n == 1 {
                keys.reverse();
            }
            let nonce = 2 * round + n as u64;
            tokio::spawn(async move { ledger.submit(submission(7, nonce, nonce as u8, &keys)).await })
        });
        for result in join_all(tasks).await {
            result.unwrap().unwrap();
        }
    }
    for key in &keys {
        assert_eq!(replicas[1].get(key).await.unwrap().unwrap().transactions.len(), 10);
    }
    assert_eq!(replicas[1].submissions(&SENDER, 0).await.unwrap().len(), 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_nonce_keeps_its_newest_transaction() {
    let schema = Server::shared().new_schema();
    let [ledger] = replicas(&schema).await;
    for n in 0..100 {
        for nonce in [4, 5] {
            ledger.submit(submission(1, nonce, n, &[])).await.unwrap();
            ledger.submit(submission(1, nonce, n, &[])).await.expect("once more");
        }
        // No node took the one; the other is offered for more each time.
        ledger.free_nonce(&SENDER, 4, 1).await.unwrap();
    }
    let mut session = session(Server::shared().url(), &schema).await;
    assert_eq!(number(&mut session, "SELECT count(*) FROM nonces").await, 2);
    let [left] = &ledger.submissions(&SENDER, 0).await.unwrap()[..] else { panic!("the other is free") };
    assert_eq!(*left, submission(1, 5, 99, &[]));
}

/// The connection is killed while the statement waits in its middle: one payment is locked, the other is not reached.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_submission_on_a_broken_connection_is_atomic() {
    let (server, schema) = (Server::start(), "cut_off");
    let ledger = Arc::new(replica(server.url(), schema).connect().await.unwrap());
    let mut keys = Vec::new();
    for payer in 1..=2 {
        let lease = reserve(&*ledger, record(payer, 1)).await;
        produce(&*ledger, &lease).await;
        keys.push(lease.key);
    }
    let mut holder = session(server.url(), schema).await;
    run(&mut holder, "BEGIN; SELECT FROM payments ORDER BY payer DESC LIMIT 1 FOR UPDATE".into()).await;
    let task = tokio::spawn({
        let (ledger, submission) = (ledger.clone(), submission(1, 0, 1, &keys));
        async move { ledger.submit(submission).await }
    });
    let mut admin = session(server.url(), schema).await;
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    support::eventually::eventually("the statement waits", async || number(&mut admin, waiting).await > 0).await;
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    assert_eq!(number(&mut admin, kill).await, 1);
    for key in &keys {
        assert_eq!(state(&*ledger, key).await.1, Settlement::Due);
    }
    assert_eq!(number(&mut admin, "SELECT count(*) FROM nonces").await, 0);
    run(&mut holder, "ROLLBACK".into()).await;
    task.await.unwrap().expect("it is made again over another connection");
    for key in &keys {
        assert_eq!(state(&*ledger, key).await.1, Settlement::Submitted);
    }
    assert_eq!(number(&mut admin, "SELECT count(*) FROM nonces").await, 1);
}

/// Between a ledger and its server: breaks the connection when an answer comes by that holds a certain text.
struct Cutter {
    directory: tempfile::TempDir,
    cut_at: watch::Sender<Option<&'static [u8]>>,
}

impl Cutter {
    fn start(server: PathBuf) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join(".s.PGSQL.5432")).unwrap();
        let (cut_at, cut) = watch::channel(None);
        let switch = cut_at.clone();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = UnixStream::connect(server.join(".s.PGSQL.5432")).await.unwrap();
                tokio::spawn(Self::pass(client, server, cut.clone(), switch.clone()));
            }
        });
        Self { directory, cut_at }
    }

    async fn pass(
        mut client: UnixStream,
        mut server: UnixStream,
        cut: watch::Receiver<Option<&'static [u8]>>,
        switch: watch::Sender<Option<&'static [u8]>>,
    ) {
        let (mut question, mut answer) = ([0; 65536], [0; 65536]);
        loop {
            tokio::select! {
                read = client.read(&mut question) => match read {
                    Ok(n) if n > 0 => server.write_all(&question[..n]).await.unwrap(),
                    _ => return,
                },
                read = server.read(&mut answer) => match read {
                    Ok(n) if n > 0 => {
                        let text = *cut.borrow();
                        if text.is_some_and(|text| answer[..n].windows(text.len()).any(|window| window == text)) {
                            switch.send_replace(None);
                            return;
                        }
                        client.write_all(&answer[..n]).await.unwrap();
                    }
                    _ => return,
                },
            }
        }
    }

    fn cut_at(&self, text: &'static [u8]) {
        self.cut_at.send_replace(Some(text));
    }

    fn has_cut(&self) -> bool {
        self.cut_at.borrow().is_none()
    }
}

/// PostgreSQL commits the step, and the connection breaks before the answer arrives: the ledger finds out whether it was taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_step_whose_answer_is_lost_is_taken_once() {
    let server = Server::shared();
    let (_, directory) = server.url().split_once("host=").unwrap();
    let cutter = Cutter::start(directory.into());
    let url = format!("postgres://tests@localhost/postgres?host={}", cutter.directory.path().display());
    let ledger = replica(&url, &server.new_schema()).connect().await.unwrap();
    // Once without harm, so that what is cut is no preparation.
    reserve(&ledger, record(9, 1)).await;

    cutter.cut_at(b"SELECT 1\0");
    let lease = reserve(&ledger, record(1, 1)).await;
    assert!(cutter.has_cut(), "and it is still the caller's");
    admit(&ledger, &lease, 10, 1).await.unwrap();
    cutter.cut_at(b"UPDATE 1\0");
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    assert!(cutter.has_cut());
    assert_eq!(ledger.get(&lease.key).await.unwrap().unwrap().attempts, 1);
    cutter.cut_at(b"UPDATE 1\0");
    let produce = FulfilmentStep::Produce { charged: None, body: None, at: CLOCK_START, response: None };
    ledger.advance(&lease.key, &lease.step(produce.clone())).await.unwrap();
    assert!(cutter.has_cut());
    // The answer is the hash.
    cutter.cut_at(&[1; 32]);
    ledger.submit(submission(1, 0, 1, &[lease.key])).await.unwrap();
    assert!(cutter.has_cut());
    assert_eq!(ledger.get(&lease.key).await.unwrap().unwrap().transactions, [hash(1)]);
    let second = reserve(&ledger, record(1, 2)).await;
    cutter.cut_at(b"UPDATE 1\0");
    admit(&ledger, &second, 20, 1).await.expect("it is not in its own way");
    assert!(cutter.has_cut());
    let third = reserve(&ledger, record(1, 3)).await;
    cutter.cut_at(b"DELETE 1\0");
    ledger.discard(&third).await.unwrap();
    assert!(cutter.has_cut());
    assert!(ledger.get(&third.key).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_ledger_outlives_its_server() {
    let server = Server::start();
    let ledger = replica(server.url(), "restart").connect().await.unwrap();
    let lease = reserve(&ledger, record(1, 1)).await;
    produce(&ledger, &lease).await;
    tokio::task::block_in_place(|| server.restart());
    assert_eq!(state(&ledger, &lease.key).await, (Fulfilment::Produced, Settlement::Due));
    ledger.submit(submission(1, 0, 1, &[lease.key])).await.expect("over a new connection");
    tokio::task::block_in_place(|| server.restart());
    let [submitted] = &ledger.submissions(&SENDER, 0).await.unwrap()[..] else { panic!("one") };
    assert_eq!(*submitted, submission(1, 0, 1, &[lease.key]));
    ledger.advance(&lease.key, &SettlementStep::MarkUnknown.into()).await.unwrap();
}

/// What was answered is on disk, whatever the server was about to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reservations_survive_a_killed_server() {
    let server = Server::start();
    let mut settings = PgConnection::connect(server.url()).await.unwrap();
    run(&mut settings, "ALTER DATABASE postgres SET synchronous_commit = off".into()).await;
    let ledger = Arc::new(replica(server.url(), "killed").connect().await.unwrap());
    let (count, mut counted) = watch::channel(0);
    let count = Arc::new(count);
    let tasks: Vec<_> = (0..16)
        .map(|payer| {
            let (ledger, count) = (ledger.clone(), count.clone());
            tokio::spawn(async move {
                let mut reserved = Vec::new();
                loop {
                    let record = record(payer, reserved.len() as u64);
                    let key = record.key;
                    match ledger.reserve(&record).await {
                        Ok(Reservation::New(_)) => reserved.push(key),
                        _ => return reserved,
                    }
                    count.send_modify(|count| *count += 1);
                }
            })
        })
        .collect();
    support::eventually::in_time("so many are reserved", counted.wait_for(|count| *count >= 300)).await.unwrap();
    tokio::task::block_in_place(|| server.kill());
    let reserved: Vec<PaymentKey> = join_all(tasks).await.into_iter().flat_map(Result::unwrap).collect();
    assert!(reserved.len() >= 300);
    tokio::task::block_in_place(|| server.start_again());
    for key in &reserved {
        assert!(ledger.get(key).await.unwrap().is_some(), "{key:?}");
    }
}

#[tokio::test]
async fn responses_stay_within_their_limits() {
    let schema = Server::shared().new_schema();
    let limits =
        ResponseLimits::default().body_bytes(100).total_bytes(5 * 612).count(4).max_age(Duration::from_secs(60));
    let url = Server::shared().url();
    let first = replica(url, &schema).responses(limits).connect().await.unwrap();
    let second = replica(url, &schema).responses(limits).connect().await.unwrap();
    let response = |size, stored_at| StoredResponse { head: Bytes::new(), body: vec![0; size].into(), stored_at };
    let kept = async |range: std::ops::Range<u64>| {
        let mut kept = Vec::new();
        for nonce in range {
            if first.response(&record(1, nonce).key).await.unwrap().is_some() {
                kept.push(nonce);
            }
        }
        kept
    };
    for nonce in 0..10 {
        let ledger = if nonce % 2 == 0 { &first } else { &second };
        ledger.store_response(&record(1, nonce).key, response(10, CLOCK_START)).await.unwrap();
    }
    assert_eq!(kept(0..10).await, [6, 7, 8, 9], "no more than four");
    first.store_response(&record(1, 10).key, response(101, CLOCK_START)).await.unwrap();
    assert!(kept(10..11).await.is_empty(), "too large alone");
    let narrow = limits.total_bytes(2 * 612);
    let narrow = replica(url, &schema).responses(narrow).connect().await.unwrap();
    narrow.store_response(&record(1, 11).key, response(100, CLOCK_START)).await.unwrap();
    assert_eq!(kept(0..12).await, [9, 11], "pushed out by the total");
    second.store_response(&record(1, 12).key, response(1, CLOCK_START + 61)).await.unwrap();
    let mut session = session(url, &schema).await;
    assert_eq!(number(&mut session, "SELECT count(*) FROM responses").await, 1, "what is too old is gone");
}

#[tokio::test]
async fn a_full_ledger_refuses_new_payments() {
    let schema = Server::shared().new_schema();
    let ledger = replica(Server::shared().url(), &schema).max_records(3).connect().await.unwrap();
    for nonce in 0..3 {
        reserve(&ledger, record(1, nonce)).await;
    }
    assert!(matches!(ledger.reserve(&record(1, 3)).await, Err(LedgerError::Full)));
    assert!(matches!(ledger.reserve(&record(1, 2)).await, Ok(Reservation::Known(_))), "what is known stays so");
    ledger.discard(&Lease { key: record(1, 0).key, epoch: 0 }).await.unwrap();
    reserve(&ledger, record(1, 3)).await;
}

#[tokio::test]
async fn a_password_is_in_no_error() {
    let (_, directory) = Server::shared().url().split_once("host=").unwrap();
    for url in [
        format!("postgres://tests:secret@localhost/missing?host={directory}"),
        format!("postgres://secret:secret:secret@localhost:99999/x?host={directory}"),
        "secret".to_owned(),
    ] {
        let builder = PostgresLedger::builder(&url);
        assert!(!format!("{builder:?}").contains("secret"));
        let error = builder.connect().await.unwrap_err();
        assert!(matches!(error, LedgerError::Backend(_)));
        assert!(!format!("{error:?} {error} {:?}", std::error::Error::source(&error)).contains("secret"), "{error:?}");
    }
    let url = format!("postgres://tests:secret@localhost/postgres?host={directory}");
    let ledger = PostgresLedger::connect(&url).await.unwrap();
    assert!(!format!("{ledger:?}").contains("secret"));
}

/// Tables of a version before and of one after.
#[tokio::test]
async fn a_schema_of_another_version_is_refused() {
    for change in ["SET checksum = '\\x00'", "SET version = 2"] {
        let schema = Server::shared().new_schema();
        drop(replicas::<1>(&schema).await);
        let mut session = session(Server::shared().url(), &schema).await;
        run(&mut session, format!("UPDATE _sqlx_migrations {change}")).await;
        let opened = replica(Server::shared().url(), &schema).connect().await;
        assert!(matches!(opened, Err(LedgerError::OtherVersion)), "{opened:?}");
    }
}

#[tokio::test]
async fn a_session_without_its_settings_is_refused() {
    for name in ["Upper", "", "a;b", "1a", "pg-x", &"a".repeat(64)] {
        let opened = replica(Server::shared().url(), name).connect().await;
        assert!(matches!(opened, Err(LedgerError::Backend(_))), "{name}");
    }
    // Asked for in the URL, and not granted.
    let url = format!("{}&options[synchronous_commit]=off", Server::shared().url());
    let schema = Server::shared().new_schema();
    replica(&url, &schema).connect().await.expect("the ledger's settings come last, or it would refuse");
}
