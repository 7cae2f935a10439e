//! How a ledger in PostgreSQL is opened.

use std::{fmt, str::FromStr as _, sync::Arc};

use sqlx::{Connection as _, PgConnection, Row as _, postgres::PgConnectOptions};

use super::{
    super::{LedgerError, ResponseLimits},
    PostgresLedger,
    connections::{Connections, DatabaseError, Failure, Statement, Tries},
    payments::column,
};
use crate::clock::{Clock, SystemClock};

const SCHEMA_EXISTS: &str = "SELECT FROM pg_namespace WHERE nspname = current_setting('search_path')";
const SETTINGS: &str = "SELECT current_setting('synchronous_commit') AS synchronous_commit, \
       current_setting('fsync') AS fsync, pg_is_in_recovery() AS is_standby, current_schema()::text AS schema";

/// Opens a [`PostgresLedger`]; made by [`PostgresLedger::builder`].
#[must_use]
pub struct PostgresLedgerBuilder {
    options: Option<PgConnectOptions>,
    schema: String,
    max_connections: u32,
    responses: ResponseLimits,
    max_records: usize,
    clock: Arc<dyn Clock>,
}

impl PostgresLedgerBuilder {
    pub(super) fn new(url: &str) -> Self {
        Self {
            options: PgConnectOptions::from_str(url).ok(),
            schema: "x402".to_owned(),
            max_connections: 16,
            responses: ResponseLimits::default(),
            max_records: 1_000_000,
            clock: Arc::new(SystemClock),
        }
    }

    /// The schema that holds the ledger's tables, made if it is missing; `x402` unless set. A name of lower-case letters, digits
    /// and underscores that begins with a letter, of at most 63 of them. Two ledgers in one database have two schemas.
    pub fn schema(mut self, name: &str) -> Self {
        name.clone_into(&mut self.schema);
        self
    }

    /// How many connections this process makes at most; 16 unless set. They are made as they are needed and kept. More of them
    /// commit more payments at the same time; the server's `max_connections` is for all processes.
    pub fn max_connections(mut self, max: u32) -> Self {
        self.max_connections = max;
        self
    }

    /// Bounds on the responses kept for replays, for all processes together. They may be exceeded for a while, by a 32nd for
    /// every process.
    pub fn responses(mut self, limits: ResponseLimits) -> Self {
        self.responses = limits;
        self
    }

    /// How many records there may be; a million unless set. They are counted once a minute: what other processes reserve in
    /// between may exceed the bound.
    pub fn max_records(mut self, max: usize) -> Self {
        self.max_records = max;
        self
    }

    /// The clock to go by. The clocks of all processes must agree to a few seconds; the database's own is not asked.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Connects, and makes or upgrades the tables. Several processes may do so at the same time.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the URL or the schema's name cannot be used, the database cannot be reached or is a standby, or
    /// a pooler between here and there does not let the session have its settings.
    pub async fn connect(self) -> Result<PostgresLedger, LedgerError> {
        let is_name = |name: &str| {
            name.len() <= 63
                && name.starts_with(|first: char| first.is_ascii_lowercase())
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        if !is_name(&self.schema) {
            return Err(refused("the schema's name must be of lower-case letters, digits and underscores"));
        }
        // The text is not repeated: it holds a password.
        let options = self.options.ok_or_else(|| refused("the URL is not one of a PostgreSQL database"))?;
        let options =
            if options.get_application_name().is_none() { options.application_name("tower-x402") } else { options };
        let options = options.options([("search_path", &self.schema)]);
        let connections = Connections::new(options, self.max_connections);
        migrate(&connections, &self.schema).await?;
        check(&connections, &self.schema).await?;
        Ok(PostgresLedger::of(connections, self.responses, self.max_records, self.clock))
    }
}

impl fmt::Debug for PostgresLedgerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresLedgerBuilder").field("schema", &self.schema).finish_non_exhaustive()
    }
}

async fn migrate(connections: &Connections, schema: &str) -> Result<(), LedgerError> {
    let mut tries = Tries::new();
    let mut connection = loop {
        match connections.for_migrations().await {
            Ok(connection) => break connection,
            Err(Failure::NotDone(error) | Failure::Perhaps(error)) => tries.again_after(error).await?,
            Err(failure) => return Err(failure.into()),
        }
    };
    make_schema(&mut connection, schema).await?;
    // sqlx takes a lock on the database for this: of several processes one does it, and the others wait.
    sqlx::migrate!("src/ledger/postgres/migrations").run(&mut connection).await.map_err(|error| match error {
        sqlx::migrate::MigrateError::Execute(error) | sqlx::migrate::MigrateError::ExecuteMigration(error, _) => {
            DatabaseError::of(&error).into()
        }
        error => LedgerError::Backend(Box::new(error)),
    })?;
    let _ = connection.close().await;
    Ok(())
}

/// Asks first: whoever may not make schemas may use one that is there.
async fn make_schema(connection: &mut PgConnection, schema: &str) -> Result<(), LedgerError> {
    let database = |error: sqlx::Error| LedgerError::from(DatabaseError::of(&error));
    let exists = |rows: Vec<sqlx::postgres::PgRow>| !rows.is_empty();
    if exists(sqlx::query(SCHEMA_EXISTS).fetch_all(&mut *connection).await.map_err(database)?) {
        return Ok(());
    }
    // The name is one that `connect` has checked.
    let made = sqlx::query(sqlx::AssertSqlSafe(format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\"")))
        .execute(&mut *connection)
        .await;
    let Err(error) = made else { return Ok(()) };
    // Another process may have been faster.
    if exists(sqlx::query(SCHEMA_EXISTS).fetch_all(connection).await.map_err(database)?) {
        return Ok(());
    }
    Err(database(error))
}

async fn check(connections: &Connections, schema: &str) -> Result<(), LedgerError> {
    let rows = connections.repeat(Statement::new(SETTINGS)).await?;
    let row = rows.first().ok_or_else(super::payments::unreadable)?;
    if column::<bool>(row, "is_standby")? {
        return Err(refused("the database is a standby, which cannot be written to"));
    }
    let current: Option<&str> = row.try_get("schema").ok();
    if column::<&str>(row, "synchronous_commit")? != "on" || current != Some(schema) {
        return Err(refused("the session's settings are not in force: connect to the server itself, without a pooler"));
    }
    if column::<&str>(row, "fsync")? != "on" {
        tracing::warn!("the database server runs with fsync=off: payments may be lost when its machine fails");
    }
    Ok(())
}

fn refused(why: &'static str) -> LedgerError {
    LedgerError::Backend(why.into())
}
