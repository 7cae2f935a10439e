//! The cost of durability, in commits. A kill proves that the next process sees what was written, not that it is on the disk: the commits
//! do that, so they are counted.

use super::{
    case::PAYMENTS,
    matrix::Backend,
    scene::{Ended, Life, Scene},
    server::{Flow, Via},
};

/// Commits per payment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// Commits of one payment alone, until it is final; each is one fsync.
    pub(crate) alone: f64,
    /// The same of one of many at a time.
    pub(crate) in_company: f64,
}

/// Counts the commits of one ledger for one flow.
pub(crate) async fn cost(via: Via, backend: Backend, flow: Flow) -> Cost {
    Cost { alone: commits(via, backend, flow, 1).await, in_company: commits(via, backend, flow, PAYMENTS).await }
}

async fn commits(via: Via, backend: Backend, flow: Flow, payments: usize) -> f64 {
    let spent = match backend {
        Backend::Sqlite => {
            let mut scene = Scene::new(via, flow, None).await;
            let mut process = scene.open(payments, None).await;
            let before = process.commits().await;
            assert_eq!(
                scene.live(&mut process, Life { number: 0, buyers: payments, is_last: true }).await,
                Ended::Quiet
            );
            let spent = process.commits().await - before;
            scene.kill(process).await;
            spent
        }
        #[cfg(feature = "test-postgres")]
        Backend::Postgres => {
            // The server counts for a process when that has ended: once with the payments, and once without.
            let (with, without) = (synced(via, flow, payments, true).await, synced(via, flow, payments, false).await);
            with.saturating_sub(without)
        }
    };
    spent as f64 / payments as f64
}

/// How often the server synced its log to disk for one process, which brings its payments to their end or none of them.
#[cfg(feature = "test-postgres")]
async fn synced(via: Via, flow: Flow, payments: usize, goes_on: bool) -> u64 {
    let backend = Backend::Postgres;
    let before = syncs().await;
    let mut scene = Scene::new(via, flow, backend.store()).await;
    let mut process = scene.open(payments, None).await;
    if goes_on {
        assert_eq!(scene.live(&mut process, Life { number: 0, buyers: payments, is_last: true }).await, Ended::Quiet);
    }
    scene.kill(process).await;
    syncs().await.saturating_sub(before)
}

/// How often the server has synced its log, once nobody is connected to it.
#[cfg(feature = "test-postgres")]
async fn syncs() -> u64 {
    use sqlx::{Connection as _, PgConnection, Row as _};

    const OTHERS: &str = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tower-x402'";
    // From PostgreSQL 18 on it is counted elsewhere.
    const SYNCS: &str = "SELECT wal_sync FROM pg_stat_wal";
    const SYNCS_18: &str = "SELECT sum(fsyncs)::bigint FROM pg_stat_io WHERE object = 'wal'";
    let url = support::postgres::Server::shared().url();
    let mut connection = PgConnection::connect(url).await.expect("the server answers");
    while sqlx::query(OTHERS).fetch_one(&mut connection).await.expect("a row").get::<i64, _>(0) > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let rows = match sqlx::query(SYNCS).fetch_one(&mut connection).await {
        Ok(row) => row,
        Err(_) => sqlx::query(SYNCS_18).fetch_one(&mut connection).await.expect("a row"),
    };
    rows.get::<i64, _>(0).unsigned_abs()
}
