//! The ledger in a PostgreSQL database, which several processes share.

mod channels;
mod connections;
mod payments;
mod processes;
mod responses;
mod rows;
mod steps;
mod transactions;
mod upkeep;

use std::{
    hash::{BuildHasher as _, RandomState},
    str::FromStr as _,
    sync::Arc,
};

use async_trait::async_trait;
use sqlx::{Connection as _, PgConnection, Row as _, migrate::MigrateError, postgres::PgConnectOptions};
use tokio::sync::Mutex;

use self::{
    connections::{Connections, DatabaseError, Failure, Statement, Tries},
    payments::Stamped,
    processes::Process,
    responses::Responses,
    rows::column,
    steps::Known,
    upkeep::Upkeep,
};
use super::{
    Counts, FulfilmentStep, JournaledTransaction, Lease, Ledger, LedgerError, Listing, PaymentStep, Record,
    Reservation, ResponseLedger, ResponseLimits, Sender, StoredResponse, TransactionLedger,
};
use crate::{
    clock::{Clock, SystemClock},
    payment::PaymentKey,
};

/// The number of locks that payers share.
const PAYER_LOCKS: usize = 256;

/// A durable ledger for several processes, in a PostgreSQL database (12 or later).
///
/// This process decides each step with the state machine that all ledgers share, and writes it with one statement, which does nothing
/// if the record has changed since it was read. Then the step is decided again. So no lock outlives a statement, a process that dies
/// leaves nothing half done, and a step whose answer was lost with the connection is recognized and not taken twice. Records that
/// this process wrote last are tried first, so most steps take one round trip.
///
/// Each process says once a second that it is alive, from a thread and over a connection of its own. If one dies, the others, or the same
/// one started again, take over after four seconds what it worked on, whatever is left of its leases. The database's clock decides. A process that
/// was only held up for so long, or cut off from the database, cannot charge any more for what another one has taken over.
///
/// Sessions run with `synchronous_commit=on`, whatever the server's setting, so a commit is on the server's disk before a call returns.
/// A failover to an asynchronous standby can still lose it; synchronous replication (`synchronous_standby_names`) prevents that. After
/// a lost connection, statements that may be repeated are repeated for about five seconds; then calls fail with
/// [`LedgerError::Backend`].
///
/// The tables are in a schema of their own, `x402`. They hold bearer data (signatures, responses) until records are removed: grant access
/// only to the services that share the ledger. Connect to the server itself; poolers that share sessions (PgBouncer in transaction
/// mode) are refused.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::ledger::{Ledger, PostgresLedger};
///
/// let ledger = PostgresLedger::connect("postgres://shop:secret@db.internal/shop?sslmode=verify-full").await?;
/// println!("{:?}", ledger.counts().await?);
/// # Ok(())
/// # }
/// ```
pub struct PostgresLedger {
    connections: Connections,
    process: Process,
    known: Known<PaymentKey, Stamped>,
    channels: channels::Channels,
    /// Held by `Admit` and `Defer`: concurrent ones of one payer would fail in the database, and one process need not try.
    payer_locks: Vec<Mutex<()>>,
    hasher: RandomState,
    responses: Responses,
    upkeep: Upkeep,
    clock: Arc<dyn Clock>,
}

impl PostgresLedger {
    /// Connects to a database (`postgres://user:password@host:port/database`) and creates the tables if they are missing.
    ///
    /// # Errors
    /// As [`PostgresLedgerBuilder::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, LedgerError> {
        Self::builder(url).connect().await
    }

    /// Returns a builder for a ledger with another schema, limits or clock.
    pub fn builder(url: impl AsRef<str>) -> PostgresLedgerBuilder {
        PostgresLedgerBuilder {
            options: PgConnectOptions::from_str(url.as_ref()).ok(),
            schema: "x402".to_owned(),
            max_connections: 16,
            responses: ResponseLimits::default(),
            max_records: 1_000_000,
            clock: Arc::new(SystemClock),
        }
    }

    fn payer_lock(&self, key: &PaymentKey) -> &Mutex<()> {
        &self.payer_locks[self.hasher.hash_one(key.payer) as usize % PAYER_LOCKS]
    }
}

debug_fields!(PostgresLedger { connections });

#[async_trait]
impl Ledger for PostgresLedger {
    async fn reserve(&self, record: &Record) -> Result<Reservation, LedgerError> {
        self.keep_up().await;
        if self.is_full().await? {
            let known = self.get(&record.key).await?.ok_or(LedgerError::Full)?;
            return Ok(Reservation::Known(Box::new(known)));
        }
        let reservation = self.insert(record).await?;
        if matches!(reservation, Reservation::New(_)) {
            self.upkeep.one_more();
        }
        Ok(reservation)
    }

    async fn get(&self, key: &PaymentKey) -> Result<Option<Record>, LedgerError> {
        Ok(payments::read(&self.connections, key).await?.map(|seen| seen.record))
    }

    async fn advance(&self, key: &PaymentKey, step: &PaymentStep) -> Result<Record, LedgerError> {
        if matches!(step, PaymentStep::Replay) {
            return payments::count_replay(&self.connections, key).await;
        }
        let response = step.response().filter(|response| self.responses.limits().admit(response));
        let is_in_turn = matches!(
            step,
            PaymentStep::Fulfil {
                step: FulfilmentStep::Admit { funds: Some(_), .. } | FulfilmentStep::Defer { .. },
                ..
            }
        );
        let _turn = if is_in_turn { Some(self.payer_lock(key).lock().await) } else { None };
        let record = self.change(key, step, response).await?;
        if let Some(response) = response {
            self.responses.stored(&self.connections, response).await;
        }
        Ok(record)
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        self.remove(lease).await?;
        self.upkeep.fewer(1);
        Ok(())
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        payments::list(&self.connections, listing).await
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        payments::counts(&self.connections).await
    }
}

#[async_trait]
impl ResponseLedger for PostgresLedger {
    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        self.responses.store(&self.connections, key, &response).await
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<StoredResponse>, LedgerError> {
        self.responses.load(&self.connections, key, self.clock.now()).await
    }

    fn response_limit(&self) -> usize {
        self.responses.limits().longest()
    }
}

#[async_trait]
impl TransactionLedger for PostgresLedger {
    async fn submit(&self, transaction: JournaledTransaction) -> Result<(), LedgerError> {
        self.submit_transaction(&transaction).await
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        transactions::free_nonce(&self.connections, sender, nonce, by).await
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        transactions::forget_nonces(&self.connections, sender, below).await
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<JournaledTransaction>, LedgerError> {
        transactions::list(&self.connections, sender, from).await
    }
}

/// Opens a [`PostgresLedger`]; returned by [`PostgresLedger::builder`].
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
    /// Sets the schema of the ledger's tables, which is created if it is missing. Default: `x402`. Two ledgers in one database have two
    /// schemas.
    ///
    /// The name has lower-case letters, digits and underscores, begins with a letter, and has at most 63 of them.
    pub fn schema(mut self, name: &str) -> Self {
        name.clone_into(&mut self.schema);
        self
    }

    /// Sets the largest number of connections of this process. Default: 16. They are opened as needed and kept. There is one more, by
    /// which the process says that it is alive.
    ///
    /// More of them commit more payments at the same time. The server's `max_connections` limits all processes together.
    pub fn max_connections(mut self, max: u32) -> Self {
        self.max_connections = max;
        self
    }

    /// Sets the limits on responses kept for replays, for all processes together. Each process may exceed them by a 32nd for a while.
    pub fn responses(mut self, limits: ResponseLimits) -> Self {
        self.responses = limits;
        self
    }

    /// Sets the largest number of payments, and of payment channels. Default: one million. They are counted once a minute, so what other processes reserve in
    /// between may exceed it.
    pub fn max_records(mut self, max: usize) -> Self {
        self.max_records = max;
        self
    }

    /// Sets the clock. Default: the system's. The clocks of all processes must agree to a few seconds; the database's is used for nothing but
    /// whether a process is alive.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Connects, and creates or migrates the tables. Several processes may do so at the same time.
    ///
    /// # Errors
    /// [`LedgerError::Backend`] if the URL or the schema's name is invalid, if the database cannot be reached or is a standby, or if a
    /// pooler in between discards the session's settings; [`LedgerError::OtherVersion`] if another version of this crate made the tables.
    pub async fn connect(self) -> Result<PostgresLedger, LedgerError> {
        let is_valid = |name: &str| {
            name.len() <= 63
                && name.starts_with(|first: char| first.is_ascii_lowercase())
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        if !is_valid(&self.schema) {
            return Err(refused("the schema's name must be of lower-case letters, digits and underscores"));
        }
        // The error does not repeat the URL, which holds a password.
        let options = self.options.ok_or_else(|| refused("the URL is not one of a PostgreSQL database"))?;
        let options =
            if options.get_application_name().is_none() { options.application_name("tower-x402") } else { options };
        let options = options.options([("search_path", &self.schema)]);
        let connections = Connections::new(options, self.max_connections);
        migrate(&connections, &self.schema).await?;
        check_settings(&connections, &self.schema).await?;
        Ok(PostgresLedger {
            process: Process::join(&connections).await?,
            connections,
            known: Known::default(),
            channels: channels::Channels::new(self.max_records),
            payer_locks: (0..PAYER_LOCKS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            responses: Responses::new(self.responses),
            upkeep: Upkeep::new(self.max_records),
            clock: self.clock,
        })
    }
}

debug_fields!(PostgresLedgerBuilder { schema });

const SCHEMA_EXISTS: &str = "SELECT FROM pg_namespace WHERE nspname = current_setting('search_path')";
const SETTINGS: &str = "SELECT current_setting('synchronous_commit') AS synchronous_commit, \
       current_setting('fsync') AS fsync, pg_is_in_recovery() AS is_standby, current_schema()::text AS schema";

async fn migrate(connections: &Connections, schema: &str) -> Result<(), LedgerError> {
    let mut tries = Tries::new();
    let mut connection = loop {
        match connections.for_migrations().await {
            Ok(connection) => break connection,
            Err(Failure::NotDone(error) | Failure::Perhaps(error)) => tries.again_after(error).await?,
            Err(failure) => return Err(failure.into()),
        }
    };
    create_schema(&mut connection, schema).await?;
    // sqlx takes a lock on the database for this: one of several processes migrates, and the others wait.
    sqlx::migrate!("src/ledger/postgres/migrations").run(&mut connection).await.map_err(|error| match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => DatabaseError::of(&error).into(),
        MigrateError::VersionMissing(_) | MigrateError::VersionMismatch(_) => LedgerError::OtherVersion,
        error => LedgerError::Backend(Box::new(error)),
    })?;
    let _ = connection.close().await;
    Ok(())
}

/// Creates the schema unless it exists. A role that may not create schemas can use an existing one.
async fn create_schema(connection: &mut PgConnection, schema: &str) -> Result<(), LedgerError> {
    let database = |error: sqlx::Error| LedgerError::from(DatabaseError::of(&error));
    let exists = |rows: Vec<sqlx::postgres::PgRow>| !rows.is_empty();
    if exists(sqlx::query(SCHEMA_EXISTS).fetch_all(&mut *connection).await.map_err(database)?) {
        return Ok(());
    }
    // `connect` has checked the name.
    let created = sqlx::query(sqlx::AssertSqlSafe(format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\"")))
        .execute(&mut *connection)
        .await;
    let Err(error) = created else { return Ok(()) };
    // Another process may have been faster.
    if exists(sqlx::query(SCHEMA_EXISTS).fetch_all(connection).await.map_err(database)?) {
        return Ok(());
    }
    Err(database(error))
}

async fn check_settings(connections: &Connections, schema: &str) -> Result<(), LedgerError> {
    let rows = connections.repeat(Statement::new(SETTINGS)).await?;
    let row = rows.first().ok_or_else(rows::unreadable)?;
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
