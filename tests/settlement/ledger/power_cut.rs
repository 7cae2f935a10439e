//! Power cuts of a seller. A voucher that was accepted is on disk before the handler starts, and what was charged is on disk with its
//! response before the client has the answer. The syncs that this costs are counted.
//!
//! A payment by `exact` is on disk with its response, too, before the client has the answer. While the handler runs it need not be: it was
//! not settled, and the client can present it again.

use std::{fs, future::ready, path::Path, process::Command, sync::Arc};

use alloy_primitives::{B256, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, routing::post};
use futures_util::future::join_all;
use http::StatusCode;
use http_body_util::BodyExt as _;
use rusqlite::Connection;
use support::{
    hot_path::{self, AtOnce, Mint, NOW, PRICE, Signed, VoucherMint, WORK, answer, asset, paid},
    power_cut::Disk,
};
use tower::ServiceExt as _;
use tower_x402::{
    Network,
    ledger::{Fulfilment, Ledger, ResponseLimits, SqliteLedger, channels::ChannelLedger},
    payment::PaymentKey,
};

/// How often a seller is paid by voucher, and by the scheme `exact`.
const ROUNDS: u64 = 3;
/// The number of power cuts in each round: when the handler starts, and when the client has its answer.
const CUTS: u64 = 4;

/// What a ledger has after a power cut.
#[derive(Debug, Default, PartialEq)]
struct Found {
    /// What the last voucher is for, be it charged by or only accepted.
    voucher: u128,
    /// What was charged by vouchers.
    charged: u128,
    /// What can be claimed.
    claimable: u128,
    /// The number of requests paid by voucher whose response can be given again.
    answered_by_voucher: u64,
    /// The same for `exact`.
    answered_by_exact: u64,
}

/// Returns what a power cut has to leave.
fn expected(cut: u64) -> Found {
    let answered_by_voucher = (cut + 3) / CUTS;
    let charged = u128::from(answered_by_voucher * PRICE);
    Found {
        voucher: u128::from((cut / CUTS + 1) * PRICE),
        charged,
        claimable: charged,
        answered_by_voucher,
        answered_by_exact: (cut + 1) / CUTS,
    }
}

/// Returns what a ledger has. `voucher` is what the last voucher is for.
async fn found(ledger: &(impl Ledger + ChannelLedger), voucher: u128) -> Found {
    let mut found = Found { voucher, ..Found::default() };
    if let Some(row) = ledger.channels(None, 1).await.unwrap().pop() {
        found.charged = row.charged();
        found.claimable = row.claim().map_or(0, |claim| claim.total_claimed);
        for answer in &row.answers {
            let response = ledger.response(&row.response_key(answer.request)).await.unwrap();
            found.answered_by_voucher += u64::from(response.is_some_and(|response| response.body == WORK));
        }
    }
    let payer = PrivateKeySigner::from_bytes(&B256::repeat_byte(1)).unwrap().address();
    for n in 1..=ROUNDS {
        let nonce = B256::from(U256::from(n));
        let key = PaymentKey { network: Network::BASE_SEPOLIA, asset: asset().address, payer, nonce };
        let Some(record) = ledger.get(&key).await.unwrap() else { continue };
        let response = ledger.response(&key).await.unwrap().filter(|response| response.body == WORK);
        let is_answered = matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered);
        found.answered_by_exact += u64::from(is_answered && response.is_some());
    }
    found
}

/// Returns a seller that takes vouchers and `exact`, whose handler does this before it answers.
fn seller<L: Ledger + ChannelLedger + 'static>(
    ledger: &Arc<L>,
    at_start: impl Fn() + Clone + Send + Sync + 'static,
) -> Router {
    let clock = hot_path::clock();
    let channels = hot_path::rich_channels(ledger.clone(), clock.clone());
    let layer = hot_path::layer(AtOnce::over(ledger.clone()), clock).vouchers(channels).build().unwrap();
    let handler = move || {
        at_start();
        ready(WORK)
    };
    Router::new().route("/evaluate", post(handler)).layer(layer)
}

/// Sells, and cuts the power whenever a handler starts and whenever a client has its answer.
async fn sell(ledger: Arc<impl Ledger + ChannelLedger + 'static>, disk: &Arc<Disk>) {
    let in_handler = disk.clone();
    let mut app = seller(&ledger, move || in_handler.cut());
    let (mut vouchers, mut exact) = (VoucherMint::of(&mut app).await, Mint::new(1));
    for _ in 0..ROUNDS {
        for payment in [vouchers.header(), exact.header(Signed::ByKey, NOW)] {
            let answer = answer(&mut app, paid(&payment)).await;
            assert_eq!(answer.status(), StatusCode::OK);
            assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), WORK);
            disk.cut();
        }
    }
    assert_eq!(disk.cuts().count() as u64, ROUNDS * CUTS);
}

/// Returns the number of syncs for each request paid by voucher, of so many channels at a time.
async fn syncs_per_request(ledger: Arc<impl Ledger + ChannelLedger + 'static>, disk: &Disk, channels: u8) -> f64 {
    const ROUNDS: u32 = 20;
    let mut app = seller(&ledger, || {});
    let mut payers = Vec::new();
    for salt in 0..channels {
        payers.push(VoucherMint::of_channel(&mut app, salt).await);
    }
    let mut before = 0;
    for round in 0..=ROUNDS {
        let answers = payers.iter_mut().map(|payer| app.clone().oneshot(paid(&payer.header())));
        for answer in join_all(answers).await {
            assert_eq!(answer.unwrap().status(), StatusCode::OK);
        }
        // The first voucher of a channel also opens it.
        if round == 0 {
            before = disk.syncs();
        }
    }
    (disk.syncs() - before) as f64 / f64::from(ROUNDS * u32::from(channels))
}

async fn sqlite(path: &Path) -> Arc<SqliteLedger> {
    Arc::new(SqliteLedger::open_with(path, ResponseLimits::default(), 100, hot_path::clock()).await.unwrap())
}

#[tokio::test]
#[ignore = "is the process whose power is cut; a test below starts it"]
async fn sqlite_seller() {
    let disk = Arc::new(Disk::of_this_process());
    sell(sqlite(&disk.files().join("ledger.sqlite")).await, &disk).await;
    for (n, cut) in disk.cuts().enumerate() {
        let path = cut.join("ledger.sqlite");
        // Before the ledger is opened, which frees the channels of a process that is gone.
        let file = Connection::open(&path).unwrap();
        let voucher = "SELECT ifnull(record ->> '$.pending[1][0]', record ->> '$.voucher[0]') FROM channel_progress";
        let voucher = file.query_row(voucher, [], |row| row.get::<_, i64>(0)).unwrap_or_default();
        drop(file);
        assert_eq!(found(&*sqlite(&path).await, voucher.unsigned_abs().into()).await, expected(n as u64), "cut {n}");
    }
    for synchronous in ["FULL", "OFF"] {
        // A control: the same settings as the ledger's, or without syncs.
        let file = Connection::open(disk.files().join(synchronous)).unwrap();
        for (name, value) in [("locking_mode", "EXCLUSIVE"), ("journal_mode", "WAL"), ("synchronous", synchronous)] {
            file.pragma_update(None, name, value).unwrap();
        }
        file.execute_batch("CREATE TABLE accepted (voucher); INSERT INTO accepted VALUES (1)").unwrap();
        disk.cut();
        let left = Connection::open(disk.cuts().last().unwrap().join(synchronous)).unwrap();
        let row = left.query_row("SELECT voucher FROM accepted", [], |row| row.get::<_, i64>(0));
        assert_eq!(row.is_ok(), synchronous == "FULL", "{synchronous}: {row:?}");
    }
}

#[tokio::test]
#[ignore = "is the process whose syncs are counted; a test below starts it"]
async fn sqlite_syncs() {
    let disk = Disk::of_this_process();
    let [mut alone, mut of_8] = [0.0; 2];
    for (channels, syncs) in [(1, &mut alone), (8, &mut of_8)] {
        let ledger = sqlite(&disk.files().join(format!("{channels}.sqlite"))).await;
        *syncs = syncs_per_request(ledger, &disk, channels).await;
    }
    println!("| SQLite | {alone:.2} | {of_8:.2} |");
    assert!((2.0..2.2).contains(&alone), "{alone}");
    assert!(of_8 < 1.0, "requests at the same time share syncs: {of_8}");
}

/// Runs a test of this file in a process whose power can be cut. Prints what it prints.
fn run_on_disk(test: &str) {
    let directory = tempfile::tempdir().unwrap();
    let files = directory.path().join("files");
    fs::create_dir(&files).unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", &format!("ledger::power_cut::{test}"), "--ignored", "--nocapture"]);
    let output = Disk::of(&files).run_on(&mut process).output().unwrap();
    let [printed, errors] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    println!("{printed}");
    assert!(output.status.success() && printed.contains("1 passed"), "{errors}");
}

#[test]
fn power_cuts_lose_nothing_that_a_file_accepted() {
    run_on_disk("sqlite_seller");
}

/// The figures of `docs/crash-matrix.md`.
#[test]
fn a_request_by_voucher_costs_two_syncs_of_a_file_and_less_in_company() {
    run_on_disk("sqlite_syncs");
}

#[cfg(feature = "test-postgres")]
mod postgres {
    use support::postgres::Server;
    use tower_x402::ledger::PostgresLedger;

    use super::*;

    async fn ledger(server: &Server, schema: &str) -> Arc<PostgresLedger> {
        let builder = PostgresLedger::builder(server.url()).schema(schema).max_connections(8).clock(hot_path::clock());
        Arc::new(builder.connect().await.unwrap())
    }

    /// Sells, and checks each power cut from this one on.
    async fn left(mut server: Server, first: usize) -> Vec<Found> {
        let schema = server.new_schema();
        let disk = server.disk().clone();
        sell(ledger(&server, &schema).await, &disk).await;
        let mut left = Vec::new();
        for cut in disk.cuts().skip(first) {
            server.start_from(&cut);
            let ledger = ledger(&server, &schema).await;
            let row = ledger.channels(None, 1).await.unwrap().pop();
            let accepted = row.and_then(|row| row.pending.map(|pending| pending.voucher).or(row.voucher));
            left.push(found(&*ledger, accepted.map_or(0, |voucher| voucher.max_claimable_amount)).await);
        }
        left
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn power_cuts_lose_nothing_that_a_database_accepted() {
        // Late, so that a commit that does not wait is found out.
        let server = Server::start_on_disk("wal_writer_delay = '10s'");
        assert_eq!(left(server, 0).await, (0..ROUNDS * CUTS).map(expected).collect::<Vec<_>>());
    }

    /// A control.
    #[tokio::test(flavor = "multi_thread")]
    async fn power_cuts_lose_what_a_database_does_not_sync() {
        let server = Server::start_on_disk("fsync = off");
        let last = ROUNDS * CUTS - 1;
        assert_eq!(left(server, last as usize).await, [Found::default()], "not {:?}", expected(last));
    }

    /// The figures of `docs/crash-matrix.md`.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_request_by_voucher_costs_two_syncs_of_a_database_and_less_in_company() {
        let server = Server::start_on_disk("");
        let [mut alone, mut of_8] = [0.0; 2];
        for (channels, syncs) in [(1, &mut alone), (8, &mut of_8)] {
            let ledger = ledger(&server, &server.new_schema()).await;
            *syncs = syncs_per_request(ledger, server.disk(), channels).await;
        }
        println!("| PostgreSQL | {alone:.2} | {of_8:.2} |");
        assert!((2.0..2.4).contains(&alone), "{alone}");
        assert!(of_8 < alone, "commits at the same time share syncs: {of_8}");
    }
}
