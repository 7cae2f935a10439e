//! The processes that share the database. Each says once a second that it is alive. Leases, claims and account nonces of a process that is
//! silent are void, so that the payers of one that died wait for seconds, and not for the end of its leases.
//!
//! The database's clock decides. A process that was only held up loses nothing until another one takes over, and is fenced then: its steps
//! fail with [`LedgerError::LeaseLost`], and its claims are the other's.

use std::{thread, time::Duration};

use tokio::{
    runtime,
    sync::oneshot,
    time::{Instant, timeout},
};

use super::{
    connections::{Connections, Statement},
    refused,
};
use crate::ledger::LedgerError;

/// How often a process says that it is alive.
const BEAT: Duration = Duration::from_secs(1);
/// How long that may take.
const BEAT_TIMEOUT: Duration = Duration::from_secs(2);
/// After what silence a process counts as dead, as in [`is_alive`].
const SILENCE: Duration = Duration::from_secs(4);
/// After what silence, in seconds, its row is removed.
const FORGOTTEN: f64 = 3600.0;

/// SQL that is true while the process in this column is alive. While the database was down nobody could say so.
macro_rules! is_alive {
    ($process:literal) => {
        concat!(
            "EXISTS (SELECT FROM processes WHERE processes.id = ",
            $process,
            " AND GREATEST(seen_at, pg_postmaster_start_time()) > clock_timestamp() - interval '4 seconds')"
        )
    };
}
pub(super) use is_alive;

const SAY: &str = "INSERT INTO processes (id, seen_at) VALUES ($1, clock_timestamp()) \
     ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp()";
const LEAVE: &str = "DELETE FROM processes WHERE id = $1";
const FORGET: &str = "DELETE FROM processes WHERE seen_at < clock_timestamp() - make_interval(secs => $1)";

/// This process among those that share the database. It leaves when this is dropped.
#[derive(Debug)]
pub(super) struct Process {
    id: i64,
    _leave: oneshot::Sender<()>,
}

impl Process {
    /// Joins the processes, and says from then on that this one is alive: in a thread of its own, because a handler that blocks the
    /// executor has not died.
    pub(super) async fn join(connections: &Connections) -> Result<Self, LedgerError> {
        let id = getrandom::u64().map_err(|_| refused("there is no randomness"))?.cast_signed();
        connections.repeat(Statement::new(SAY).bind(id)).await?;
        let connections = connections.for_heartbeats();
        let (leave, left) = oneshot::channel();
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| LedgerError::Backend(Box::new(error)))?;
        thread::Builder::new()
            .name("x402-ledger".to_owned())
            .spawn(move || runtime.block_on(say_until(left, &connections, id)))
            .map_err(|error| LedgerError::Backend(Box::new(error)))?;
        Ok(Self { id, _leave: leave })
    }

    pub(super) const fn id(&self) -> i64 {
        self.id
    }
}

/// Removes processes that have been silent for long.
pub(super) async fn forget_silent(connections: &Connections) -> Result<(), LedgerError> {
    connections.repeat(Statement::new(FORGET).bind(FORGOTTEN)).await.map(drop)
}

async fn say_until(mut left: oneshot::Receiver<()>, connections: &Connections, id: i64) {
    let mut heard = Instant::now();
    let mut is_warned = false;
    while timeout(BEAT, &mut left).await.is_err() {
        let said = timeout(BEAT_TIMEOUT, connections.once(&Statement::new(SAY).bind(id))).await;
        if matches!(said, Ok(Ok(_))) {
            (heard, is_warned) = (Instant::now(), false);
        } else if heard.elapsed() > SILENCE && !is_warned {
            is_warned = true;
            tracing::warn!(
                "the ledger's database does not answer; other processes may take over what this one works on"
            );
        }
    }
    let _ = timeout(BEAT_TIMEOUT, connections.once(&Statement::new(LEAVE).bind(id))).await;
}
