//! Payment channels: what each backend promises beyond their contract.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
};

use futures_util::future::join_all;
use support::{
    around_ledger::{CHANNEL_OPERATIONS, operation_of},
    faulty_ledger::{Fault, How, faulty_channels},
    sqlite_file,
};
use tower_x402::{
    ManualClock, Network,
    ledger::{
        LedgerError, MemoryLedger, ResponseLedger, ResponseLimits, SqliteLedger, StoredResponse,
        channels::{ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep},
        conformance::{
            START, channels,
            channels::{begin, charge, config, get, id, observation, open, sell},
            hash, response,
        },
    },
    vouchers::ChannelObservation,
};

async fn sqlite(path: &Path, max: usize) -> SqliteLedger {
    let clock = Arc::new(ManualClock::at(START));
    SqliteLedger::open_with(path, ResponseLimits::default(), max, clock).await.unwrap()
}

/// Opens a channel, unless the ledger is full.
async fn opens(ledger: &dyn ChannelLedger, salt: u8, now: u64) -> bool {
    let observation = observation(salt, 100, 0, 1);
    let step = ChannelStep::Open { network: Network::BASE, config: config(salt), observation, now };
    match ledger.advance(&id(salt), &step).await {
        Ok(_) => true,
        Err(ChannelLedgerError::Ledger(LedgerError::Full)) => false,
        Err(error) => panic!("{error:?}"),
    }
}

/// Works for a request of a channel and stores its response.
async fn sell_with_response(ledger: &dyn ChannelLedger, salt: u8, n: u8) -> ChannelRecord {
    let charged = get(ledger, salt).await.charged();
    let held = ledger.advance(&id(salt), &begin(salt, hash(n), charged + 1, 1)).await.unwrap();
    let response = StoredResponse { body: vec![n].into(), ..response(b"") };
    let step = ChannelStep::Charge { epoch: held.epoch, amount: 1, response: Some(response), now: START };
    ledger.advance(&id(salt), &step).await.unwrap()
}

/// What is unclaimed, pending, or was claimed a short time ago is never removed.
async fn a_full_ledger_keeps_what_may_be_claimed(ledger: &dyn ChannelLedger) {
    const HOUR: u64 = 3_600;
    for salt in 1..=4 {
        assert!(opens(ledger, salt, START).await);
    }
    assert!(!opens(ledger, 5, START).await, "it is full");
    assert!(!opens(ledger, 5, START + HOUR - 1).await, "the others were used in the last hour");
    // One that is charged, one that is being worked for, one whose claim may be reorged.
    sell(ledger, 1, hash(1), 10).await;
    let until = START + 2 * HOUR;
    let (request, voucher) = (hash(1), channels::voucher(2, 1));
    let request = ChannelStep::Begin { request, name: None, voucher, price: 1, now: START, until };
    ledger.advance(&id(2), &request).await.unwrap();
    sell(ledger, 3, hash(1), 10).await;
    let claimed = ChannelStep::Observe { observation: observation(3, 100, 10, 2), now: START + HOUR };
    ledger.advance(&id(3), &claimed).await.unwrap();
    assert!(opens(ledger, 5, START + HOUR).await, "the fourth has to go");
    assert_eq!(ledger.channel(&id(4)).await.unwrap(), None);
    assert!(!opens(ledger, 6, START + HOUR).await);
    assert!(opens(ledger, 6, START + 2 * HOUR).await, "the claim is final, and nobody works");
    let left: Vec<_> = ledger.channels(None, 10).await.unwrap().into_iter().map(|record| record.id).collect();
    assert!(left.contains(&id(1)), "it is still unclaimed");
    assert!(opens(ledger, 1, START + 2 * HOUR).await, "a known one is observed, however full it is");
}

#[tokio::test]
async fn a_full_ledger_in_memory_keeps_what_may_be_claimed() {
    let clock = Arc::new(ManualClock::at(START));
    a_full_ledger_keeps_what_may_be_claimed(&MemoryLedger::with(ResponseLimits::default(), 4, clock)).await;
}

#[tokio::test]
async fn a_full_file_keeps_what_may_be_claimed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = sqlite(&path, 4).await;
    a_full_ledger_keeps_what_may_be_claimed(&ledger).await;
    let before = ledger.channels(None, 10).await.unwrap();
    ledger.close().await;
    let after = sqlite(&path, 4).await.channels(None, 10).await.unwrap();
    let ids = |records: Vec<ChannelRecord>| records.into_iter().map(|record| record.id).collect::<Vec<_>>();
    assert_eq!(ids(after), ids(before), "those that were removed have left the file");
}

#[tokio::test]
async fn channels_and_their_responses_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = sqlite(&path, 100).await;
    open(&ledger, 1, 100).await;
    open(&ledger, 2, 100).await;
    let charged = sell_with_response(&ledger, 1, 7).await;
    ledger.advance(&id(1), &channels::refund(hash(5), 5)).await.unwrap();
    ledger.advance(&id(1), &begin(1, hash(8), 2, 1)).await.unwrap();
    ledger.advance(&id(1), &ChannelStep::BeginClaim { now: START, until: START + 90 }).await.unwrap();
    ledger.close().await;

    let ledger = sqlite(&path, 100).await;
    let restored = get(&ledger, 1).await;
    assert_eq!((restored.charged(), &restored.voucher, restored.claim()), (1, &charged.voucher, charged.claim()));
    let refund = restored.open_refund().expect("it may be executed");
    assert_eq!((refund.amount, refund.until), (5, START + 180), "its transaction may be under way");
    assert_eq!(restored.answers, charged.answers);
    let response = ledger.response(&restored.response_key(hash(7))).await.unwrap().expect("kept");
    assert_eq!(&response.body[..], [7]);
    assert_eq!((restored.pending, restored.claiming_until), (None, None), "their process is gone");
    assert_eq!(restored.observed_at, 0, "the file may be a backup from before the last claims");
    assert_eq!(restored.observed, charged.observed);
    let again = ledger.advance(&id(1), &begin(1, hash(8), 2, 1)).await.expect("it is free");
    assert_eq!(again.epoch, 3, "no epoch comes twice");
    let known = ledger.advance(&id(1), &begin(1, hash(7), 1, 1)).await;
    assert!(matches!(known, Err(ChannelLedgerError::Answered(_))), "{known:?}");
    assert_eq!(get(&ledger, 2).await.charged(), 0);
}

#[tokio::test]
async fn a_request_is_on_disk_before_its_work_and_an_observation_costs_no_commit() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = sqlite(&directory.path().join("ledger.sqlite"), 100).await;
    open(&ledger, 1, 100).await;
    let before = ledger.commits();
    let held = ledger.advance(&id(1), &begin(1, hash(1), 1, 1)).await.unwrap();
    assert_eq!(ledger.commits() - before, 1);
    let observe = ChannelStep::Observe { observation: observation(1, 200, 0, 2), now: START };
    ledger.advance(&id(1), &observe).await.unwrap();
    ledger.advance(&id(1), &charge(held.epoch, 1)).await.unwrap();
    assert_eq!(ledger.commits() - before, 2, "the observation shares the commit of the charge");
    for _ in 0..20 {
        get(&ledger, 1).await;
        let refused = ledger.advance(&id(1), &begin(1, hash(2), 7, 1)).await;
        assert!(matches!(refused, Err(ChannelLedgerError::Mismatch(_))), "{refused:?}");
    }
    assert_eq!(ledger.commits() - before, 2, "reading writes nothing, nor does a refused step");
}

/// Every step but an observation, in an order in which each is taken.
fn steps() -> Vec<ChannelStep> {
    let (network, observation, now, until) = (Network::BASE, observation(1, 100, 0, 1), START, START + 30);
    let response = StoredResponse { body: "verdict".into(), ..response(b"") };
    vec![
        ChannelStep::Open { network, config: config(1), observation, now },
        begin(1, hash(1), 10, 10),
        ChannelStep::Charge { epoch: 1, amount: 7, response: Some(response), now },
        begin(1, hash(2), 17, 10),
        ChannelStep::Release { epoch: 2 },
        ChannelStep::BeginClaim { now, until },
        ChannelStep::EndClaim { until },
        channels::refund(hash(5), 5),
        begin(1, hash(3), 17, 10),
    ]
}

/// Makes all writes of channels fail after so many.
fn fill_the_disk_after(writes: usize, path: &Path) {
    let sql = format!(
        "CREATE TABLE writes (n INTEGER); INSERT INTO writes VALUES (0);
         CREATE TRIGGER disk BEFORE INSERT ON channel_progress BEGIN
             UPDATE writes SET n = n + 1;
             SELECT RAISE(FAIL, 'disk full') FROM writes WHERE n > {writes};
         END;"
    );
    sqlite_file::change(path, &sql);
}

/// Whoever sees the state of a step sees it only when it is on disk.
#[tokio::test]
async fn steps_on_channels_wait_for_the_disk() {
    for (taken, step) in steps().iter().enumerate() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ledger.sqlite");
        sqlite(&path, 10).await.close().await;
        fill_the_disk_after(taken, &path);
        let ledger = sqlite(&path, 10).await;
        for step in &steps()[..taken] {
            ledger.advance(&id(1), step).await.unwrap();
        }
        let failed = ledger.advance(&id(1), step).await;
        assert!(matches!(failed, Err(ChannelLedgerError::Ledger(LedgerError::Backend(_)))), "{step:?}: {failed:?}");
        assert!(ledger.channel(&id(1)).await.is_err(), "{step:?}: what is not on disk is not shown");
        assert!(ledger.channels(None, 10).await.is_err(), "{step:?}");
        ledger.close().await;
    }
}

#[tokio::test]
async fn channels_share_commits() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = sqlite(&directory.path().join("ledger.sqlite"), 1_000).await;
    join_all((0..200).map(|salt| open(&ledger, salt, 100))).await;
    let before = ledger.commits();
    join_all((0..200).map(|salt| sell_with_response(&ledger, salt, 1))).await;
    let commits = ledger.commits() - before;
    assert!((2..400).contains(&commits), "200 requests took {commits} commits");
}

/// The last moment before a crash: the file as it is at some time, without the process having closed it.
#[tokio::test]
async fn an_unfinished_request_charges_nothing_after_a_crash() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = sqlite(&path, 100).await;
    open(&ledger, 1, 100).await;
    sell(&ledger, 1, hash(1), 10).await;
    let held = ledger.advance(&id(1), &begin(1, hash(2), 20, 10)).await.unwrap();
    // As kill -9 leaves them: the log is copied without being written back.
    let crashed = directory.path().join("crashed.sqlite");
    std::fs::copy(&path, &crashed).unwrap();
    std::fs::copy(path.with_extension("sqlite-wal"), crashed.with_extension("sqlite-wal")).unwrap();
    ledger.advance(&id(1), &charge(held.epoch, 10)).await.unwrap();

    let after = sqlite(&crashed, 100).await;
    let record = get(&after, 1).await;
    assert_eq!((record.charged(), record.epoch), (10, 2), "the request was on disk, and cost nothing yet");
    let retried = after.advance(&id(1), &begin(1, hash(2), 20, 10)).await.unwrap();
    after.advance(&id(1), &charge(retried.epoch, 10)).await.unwrap();
    assert_eq!(get(&after, 1).await.charged(), 20);
}

/// A ledger in a file that a backup was restored over: the chain knows of more than the ledger.
#[tokio::test]
async fn a_restored_backup_learns_what_was_claimed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let ledger = sqlite(&path, 100).await;
    open(&ledger, 1, 1_000).await;
    sell(&ledger, 1, hash(1), 10).await;
    ledger.close().await;
    let ledger = sqlite(&path, 100).await;
    let claimed = ChannelObservation { block: 9, ..observation(1, 1_000, 500, 9) };
    ledger.advance(&id(1), &ChannelStep::Observe { observation: claimed, now: START }).await.unwrap();
    let old = ledger.advance(&id(1), &begin(1, hash(2), 20, 10)).await;
    assert!(matches!(old, Err(ChannelLedgerError::Mismatch(_))), "an old voucher buys nothing: {old:?}");
    let next = ledger.advance(&id(1), &begin(1, hash(3), 510, 10)).await.unwrap();
    assert_eq!(ledger.advance(&id(1), &charge(next.epoch, 10)).await.unwrap().unclaimed(), 10);
}

/// Takes a step, and again if the store failed.
async fn advance(ledger: &dyn ChannelLedger, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
    match ledger.advance(&id(1), step).await {
        Err(ChannelLedgerError::Ledger(LedgerError::Backend(_))) => ledger.advance(&id(1), step).await,
        answer => answer,
    }
}

/// Sells one request, and claims. Every failed call is repeated once.
async fn sell_and_claim(ledger: &dyn ChannelLedger) {
    let (network, observation) = (Network::BASE, observation(1, 100, 0, 1));
    let opened = ChannelStep::Open { network, config: config(1), observation, now: START };
    let opened = advance(ledger, &opened).await.unwrap();
    let request = |now| {
        let (request, voucher) = (hash(1), channels::voucher(1, 10));
        ChannelStep::Begin { request, name: None, voucher, price: 10, now, until: now + 30 }
    };
    let held = match advance(ledger, &request(START)).await {
        // The lost answer was its own: it has to wait for the end of its own lease.
        Err(ChannelLedgerError::Busy { until }) => advance(ledger, &request(until)).await,
        begun => begun,
    };
    let held = held.unwrap();
    let response = StoredResponse { body: "verdict".into(), ..response(b"") };
    let streamed = StoredResponse { body: "streamed".into(), ..response.clone() };
    let step = ChannelStep::Charge { epoch: held.epoch, amount: 7, response: Some(response), now: START };
    advance(ledger, &step).await.unwrap();
    let key = opened.response_key(hash(2));
    if ledger.store_response(&key, streamed.clone()).await.is_err() {
        ledger.store_response(&key, streamed).await.unwrap();
    }
    let key = opened.response_key(hash(1));
    let kept = match ledger.response(&key).await {
        Err(_) => ledger.response(&key).await.unwrap(),
        Ok(kept) => kept,
    };
    assert_eq!(&kept.expect("it is kept").body[..], b"verdict");
    let listed = match ledger.channels(None, 10).await {
        Err(_) => ledger.channels(None, 10).await.unwrap(),
        Ok(listed) => listed,
    };
    assert_eq!(listed.iter().map(ChannelRecord::unclaimed).collect::<Vec<_>>(), [7]);
    let until = START + 10;
    let claiming = advance(ledger, &ChannelStep::BeginClaim { now: START, until }).await;
    assert!(matches!(claiming, Ok(_) | Err(ChannelLedgerError::Busy { .. })), "{claiming:?}");
    let observation = channels::observation(1, 100, 7, 2);
    advance(ledger, &ChannelStep::Observe { observation, now: START }).await.unwrap();
    advance(ledger, &ChannelStep::EndClaim { until }).await.unwrap();
    let read = match ledger.channel(&id(1)).await {
        Err(_) => ledger.channel(&id(1)).await.unwrap(),
        Ok(read) => read,
    };
    let record = read.expect("it is there");
    assert_eq!((record.charged(), record.unclaimed(), record.claiming_until), (7, 0, None));
    assert_eq!(record.answers.len(), 1, "charged once");
}

/// The calls that a server makes, each of them failing once: before it is done, and after, so that its answer is lost.
#[tokio::test]
async fn a_seller_that_repeats_failed_calls_charges_once() {
    let ledger = || {
        let clock = Arc::new(ManualClock::at(START));
        faulty_channels(Arc::new(MemoryLedger::with(ResponseLimits::default(), 10, clock)))
    };
    let sound = ledger();
    sound.around.arm(None);
    sell_and_claim(&*sound).await;
    let calls = sound.around.made();
    for method in CHANNEL_OPERATIONS {
        assert!(calls.iter().any(|call| operation_of(call) == method), "{method} is not called");
    }
    for call in calls {
        for how in [How::Before, How::After] {
            let ledger = ledger();
            ledger.around.arm(Some(Fault { call, nth: 0, how }));
            sell_and_claim(&*ledger).await;
            assert!(ledger.around.has_failed(), "{call}");
        }
    }
}

/// Names the file to [`seller`].
const FILE: &str = "TOWER_X402_TEST_CHANNELS";

#[tokio::test]
#[ignore = "is the process that the test below kills"]
async fn seller() {
    let path = std::env::var_os(FILE).expect("started by a test");
    let ledger = SqliteLedger::open(path).await.expect("it is free");
    if ledger.channel(&id(1)).await.unwrap().is_none() {
        open(&ledger, 1, u128::MAX).await;
    }
    for n in 0_u64.. {
        let charged = get(&ledger, 1).await.charged();
        let request = alloy_primitives::keccak256([charged.to_be_bytes(), u128::from(n).to_be_bytes()].concat());
        let answered = sell(&ledger, 1, request, 1).await;
        // A client sees this when the charge is on disk, and not before.
        println!("charged {}", answered.charged());
    }
}

#[tokio::test]
async fn a_killed_seller_has_charged_what_it_answered() {
    const KILLS: u64 = 12;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.sqlite");
    let mut charged = 0;
    for kill in 0..KILLS {
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", "ledger::channels::seller", "--ignored", "--nocapture"]).env(FILE, &path);
        let mut process = process.stdout(Stdio::piped()).spawn().unwrap();
        let mut answered = charged;
        let lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        // The runner of tests has words of its own in the first line.
        let numbers = lines.filter_map(|line| line.split_once("charged ")?.1.parse::<u128>().ok());
        let mut seen = 0;
        for number in numbers {
            assert_eq!(number, answered + 1, "every charge is answered once");
            answered = number;
            seen += 1;
            if seen == 3 + kill {
                process.kill().unwrap();
            }
        }
        process.wait().unwrap();
        assert!(seen >= 3, "it sold something");
        let ledger = sqlite(&path, 10).await;
        let record = get(&ledger, 1).await;
        ledger.close().await;
        assert!(
            record.charged() == answered || record.charged() == answered + 1,
            "{} after {answered}",
            record.charged()
        );
        assert_eq!(record.claim().expect("it can be claimed").total_claimed, record.charged());
        charged = record.charged();
    }
}

#[cfg(feature = "test-postgres")]
mod replicas {
    use support::postgres::Server;
    use tower_x402::ledger::{PostgresLedger, PostgresLedgerBuilder};

    use super::*;

    fn replica(schema: &str) -> PostgresLedgerBuilder {
        let clock = Arc::new(ManualClock::at(START));
        PostgresLedger::builder(Server::shared().url()).schema(schema).max_connections(4).clock(clock)
    }

    async fn replicas(schema: &str, number: usize) -> Vec<Arc<PostgresLedger>> {
        let opened = join_all((0..number).map(|_| replica(schema).connect())).await;
        opened.into_iter().map(|ledger| Arc::new(ledger.unwrap())).collect()
    }

    #[tokio::test]
    async fn a_full_database_keeps_what_may_be_claimed() {
        let ledger = replica(&Server::shared().new_schema()).max_records(4).connect().await.unwrap();
        a_full_ledger_keeps_what_may_be_claimed(&ledger).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn one_of_many_replicas_opens_and_one_holds_a_channel() {
        let replicas = replicas(&Server::shared().new_schema(), 4).await;
        let tasks = (0..40).map(|n: u8| {
            let ledger = replicas[usize::from(n) % 4].clone();
            tokio::spawn(async move {
                open(&*ledger, 1, 100).await;
                ledger.advance(&id(1), &begin(1, hash(n), 10, 10)).await.is_ok()
            })
        });
        let held = join_all(tasks).await.into_iter().filter(|held| *held.as_ref().unwrap()).count();
        assert_eq!(held, 1);
        assert_eq!(get(&*replicas[0], 1).await.epoch, 1);
    }

    /// Each replica remembers the channel as it left it, while the others charge.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn replicas_that_take_turns_lose_no_charge() {
        let replicas = replicas(&Server::shared().new_schema(), 3).await;
        open(&*replicas[0], 1, 10_000).await;
        for n in 0..30_u8 {
            let ledger = &replicas[usize::from(n) % 3];
            let price = u128::from(n) + 1;
            let charged = u128::from(n) * u128::from(n + 1) / 2;
            let held = ledger.advance(&id(1), &begin(1, hash(n + 1), charged + price, price)).await.unwrap();
            // Another replica sees a deposit while the request is worked for.
            let observe = ChannelStep::Observe { observation: observation(1, 10_000, 0, 2 + u64::from(n)), now: START };
            replicas[usize::from(n + 1) % 3].advance(&id(1), &observe).await.unwrap();
            ledger.advance(&id(1), &charge(held.epoch, price)).await.unwrap();
        }
        for ledger in &replicas {
            assert_eq!(get(&**ledger, 1).await.charged(), 465);
        }
    }

    #[tokio::test]
    async fn a_replica_finds_the_response_of_another() {
        let replicas = replicas(&Server::shared().new_schema(), 2).await;
        open(&*replicas[0], 1, 100).await;
        let charged = sell_with_response(&*replicas[0], 1, 7).await;
        let copy = replicas[1].advance(&id(1), &begin(1, hash(7), 1, 1)).await;
        assert!(matches!(&copy, Err(ChannelLedgerError::Answered(shown)) if **shown == charged), "{copy:?}");
        let response = replicas[1].response(&charged.response_key(hash(7))).await.unwrap().expect("kept");
        assert_eq!(&response.body[..], [7]);
    }

    /// A process that was killed leaves its request, and nothing half done.
    #[tokio::test]
    async fn the_channel_of_another_replica_is_taken_over_when_its_time_is_over() {
        let schema = Server::shared().new_schema();
        let slow = replica(&schema).connect().await.unwrap();
        open(&slow, 1, 100).await;
        slow.advance(&id(1), &begin(1, hash(1), 10, 10)).await.unwrap();
        let ledger = replica(&schema).connect().await.unwrap();
        let early = ledger.advance(&id(1), &begin(1, hash(1), 10, 10)).await;
        assert!(matches!(early, Err(ChannelLedgerError::Busy { .. })), "{early:?}");
        let request = ChannelStep::Begin {
            request: hash(1),
            name: None,
            voucher: channels::voucher(1, 10),
            price: 10,
            now: START + 30,
            until: START + 60,
        };
        let held = ledger.advance(&id(1), &request).await.unwrap();
        ledger.advance(&id(1), &charge(held.epoch, 10)).await.unwrap();
        assert_eq!(get(&ledger, 1).await.charged(), 10);
    }
}
