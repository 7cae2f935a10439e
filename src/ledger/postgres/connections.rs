//! Connections to the database, and the fate of statements sent over them.
//!
//! This is not sqlx's `PgPool`. A pool either pings before each statement, one more round trip, or hands out, one after the other, all
//! connections that a restart of the server broke; and it reports a wrong password as a timeout.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::{
    Arguments as _, ConnectOptions as _, Connection as _, Encode, PgConnection, Postgres, Type,
    postgres::{PgArguments, PgConnectOptions, PgDatabaseError, PgRow, PgSeverity},
};
use tokio::{sync::Semaphore, time::timeout};

use super::super::{LedgerError, Pauses};

/// How long a caller waits for an idle connection.
const WAIT_FOR_CONNECTION: Duration = Duration::from_secs(5);
/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a statement may take before the connection counts as broken. The server gives up earlier.
const STATEMENT: Duration = Duration::from_secs(10);
/// How long a statement is repeated that did not happen.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest pause between two tries.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// A bounded number of connections, each with the settings that the ledger relies on.
///
/// Every statement commits by itself. If a caller is dropped in the middle of a statement, the connection is closed.
pub(super) struct Connections {
    options: PgConnectOptions,
    idle: Mutex<Vec<PgConnection>>,
    permits: Semaphore,
}

/// A statement and its arguments.
pub(super) struct Statement {
    sql: &'static str,
    arguments: PgArguments,
    is_broken: bool,
}

/// Why a statement has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// It did not happen, and may be repeated.
    NotDone(DatabaseError),
    /// The connection broke: it may have happened, or may still happen.
    Perhaps(DatabaseError),
    /// It did not happen, and repeating it is pointless.
    Refused(DatabaseError),
}

/// The database's error code and message. Its details quote rows, which hold bearer data, and are left out.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct DatabaseError(String);

/// Pauses between tries, for as long as [`PATIENCE`].
pub(super) struct Tries(Pauses);

impl Connections {
    pub(super) fn new(options: PgConnectOptions, max: u32) -> Self {
        let permits = Semaphore::new(usize::try_from(max.clamp(1, 10_000)).unwrap_or(1));
        Self { options: with_settings(options), idle: Mutex::default(), permits }
    }

    /// Opens a connection for the caller alone, without timeouts.
    pub(super) async fn for_migrations(&self) -> Result<PgConnection, Failure> {
        connect(&self.options.clone().options([("statement_timeout", "0"), ("lock_timeout", "0")])).await
    }

    /// Returns one connection beside the others. What is written over it may be lost when the server crashes.
    pub(super) fn for_heartbeats(&self) -> Self {
        let options = self.options.clone().options([("synchronous_commit", "off")]);
        Self { options, idle: Mutex::default(), permits: Semaphore::new(1) }
    }

    /// Runs an idempotent statement, and repeats it until it has an answer.
    pub(super) async fn repeat(&self, statement: Statement) -> Result<Vec<PgRow>, LedgerError> {
        let mut tries = Tries::new();
        loop {
            match self.once(&statement).await {
                Ok(rows) => return Ok(rows),
                Err(Failure::Refused(error)) => return Err(error.into()),
                Err(Failure::NotDone(error) | Failure::Perhaps(error)) => tries.again_after(error).await?,
            }
        }
    }

    /// Runs a statement once.
    pub(super) async fn once(&self, statement: &Statement) -> Result<Vec<PgRow>, Failure> {
        if statement.is_broken {
            return Err(Failure::Refused(DatabaseError("a value cannot be written".to_owned())));
        }
        let permit = timeout(WAIT_FOR_CONNECTION, self.permits.acquire()).await;
        let Ok(Ok(_permit)) = permit else {
            return Err(Failure::Refused(DatabaseError("all connections are in use".to_owned())));
        };
        // Outside of the match, whose end would release the lock.
        let idle = self.idle().pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => connect(&self.options).await?,
        };
        let query = sqlx::query_with(statement.sql, statement.arguments.clone());
        let failure = match timeout(STATEMENT, query.fetch_all(&mut connection)).await {
            Ok(Ok(rows)) => {
                self.idle().push(connection);
                return Ok(rows);
            }
            Ok(Err(error)) => {
                if let Some(failure) = of_statement(&error) {
                    self.idle().push(connection);
                    return Err(failure);
                }
                of_connection(&error)
            }
            Err(_) => Failure::Perhaps(DatabaseError("the database does not answer".to_owned())),
        };
        // If the server was restarted, all connections are broken.
        self.idle().clear();
        Err(failure)
    }

    fn idle(&self) -> MutexGuard<'_, Vec<PgConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Statement {
    pub(super) fn new(sql: &'static str) -> Self {
        Self { sql, arguments: PgArguments::default(), is_broken: false }
    }

    /// Sets the next argument (`$1`, `$2` …).
    pub(super) fn bind<'v>(mut self, value: impl Encode<'v, Postgres> + Type<Postgres>) -> Self {
        self.is_broken |= self.arguments.add(value).is_err();
        self
    }
}

// The options hold the password.
debug_fields!(Connections |this| { idle: this.idle().len() });

impl Tries {
    pub(super) fn new() -> Self {
        Self(Pauses::new(Duration::from_millis(10), PATIENCE).up_to(LONGEST_PAUSE))
    }

    /// Pauses, or returns the error when there was enough time.
    pub(super) async fn again_after(&mut self, error: DatabaseError) -> Result<(), LedgerError> {
        if self.0.wait().await { Ok(()) } else { Err(error.into()) }
    }
}

impl DatabaseError {
    pub(super) fn of(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Database(error) => Self(match error.code() {
                Some(code) => format!("{} ({code})", error.message()),
                None => error.message().to_owned(),
            }),
            // It quotes the URL, with the password.
            sqlx::Error::Configuration(_) => Self("the connection options cannot be used".to_owned()),
            error => Self(error.to_string()),
        }
    }
}

impl From<DatabaseError> for LedgerError {
    fn from(error: DatabaseError) -> Self {
        Self::Backend(Box::new(error))
    }
}

impl From<Failure> for LedgerError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotDone(error) | Failure::Perhaps(error) | Failure::Refused(error) => error.into(),
        }
    }
}

/// Adds the settings that the ledger relies on, whatever the defaults of the server, the database or the role. The timeouts release the
/// locks of a process that vanished.
fn with_settings(options: PgConnectOptions) -> PgConnectOptions {
    options
        .options([
            ("synchronous_commit", "on"),
            ("default_transaction_isolation", "read committed"),
            ("default_transaction_read_only", "off"),
            ("statement_timeout", "8000"),
            ("lock_timeout", "4000"),
            ("idle_in_transaction_session_timeout", "10000"),
            ("tcp_keepalives_idle", "15"),
            ("tcp_keepalives_interval", "5"),
            ("tcp_keepalives_count", "3"),
            ("jit", "off"),
        ])
        .disable_statement_logging()
}

async fn connect(options: &PgConnectOptions) -> Result<PgConnection, Failure> {
    match timeout(CONNECT, PgConnection::connect_with(options)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(of_connecting(&error)),
        Err(_) => Err(Failure::NotDone(DatabaseError("the database does not answer".to_owned()))),
    }
}

/// Classifies an error of connecting. A server that starts or is full will be available; a wrong password stays wrong.
fn of_connecting(error: &sqlx::Error) -> Failure {
    let code = code(error);
    let is_passing = match error {
        sqlx::Error::Database(_) => code.starts_with("57P") || code.starts_with("53") || code.starts_with("08"),
        sqlx::Error::Configuration(_) | sqlx::Error::Tls(_) => false,
        _ => true,
    };
    let error = DatabaseError::of(error);
    if is_passing { Failure::NotDone(error) } else { Failure::Refused(error) }
}

/// Classifies the error of a statement. Returns `None` if the connection cannot be used any more.
fn of_statement(error: &sqlx::Error) -> Option<Failure> {
    let sqlx::Error::Database(cause) = error else { return None };
    let is_fatal = cause
        .try_downcast_ref::<PgDatabaseError>()
        .is_none_or(|cause| matches!(cause.severity(), PgSeverity::Fatal | PgSeverity::Panic));
    let code = code(error);
    // A new connection would help: the server became a standby, or a prepared statement is outdated.
    if is_fatal || matches!(&*code, "25006" | "0A000" | "26000") {
        return None;
    }
    let error = DatabaseError::of(error);
    // Serialization failure, deadlock, lock not available, cancelled.
    Some(match &*code {
        "40001" | "40P01" | "55P03" | "57014" => Failure::NotDone(error),
        _ => Failure::Refused(error),
    })
}

/// Classifies an error after which the connection cannot be used any more.
fn of_connection(error: &sqlx::Error) -> Failure {
    let is_not_done = matches!(&*code(error), "25006" | "0A000" | "26000");
    let error = DatabaseError::of(error);
    if is_not_done { Failure::NotDone(error) } else { Failure::Perhaps(error) }
}

fn code(error: &sqlx::Error) -> String {
    error.as_database_error().and_then(|error| error.code()).map(Into::into).unwrap_or_default()
}
