//! The ledger in PostgreSQL.

mod builder;
mod connections;
mod known;
mod listing;
mod payments;
mod responses;
mod steps;
mod submissions;
mod upkeep;

use std::{
    fmt,
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use async_trait::async_trait;
use tokio::sync::Mutex;

pub use self::builder::PostgresLedgerBuilder;
use self::{
    connections::Connections,
    known::Known,
    payments::Stamped,
    responses::Responses,
    steps::{Change, Needs},
    upkeep::Upkeep,
};
use super::{
    Counts, FulfilmentStep, InvalidTransition, Lease, Ledger, LedgerError, Listing, Record, Reservation,
    ResponseLimits, Sender, SettlementStep, StoredResponse, Submission,
};
use crate::{clock::Clock, payment::PaymentKey};

/// Payers share so many turnstiles.
const TURNS: usize = 256;

/// A durable ledger for several processes, in a PostgreSQL database (12 or later).
///
/// Every step is decided here, by the state machine that all ledgers share, and written by one statement that does nothing if
/// the record has changed since it was read; then it is read and decided again. So no lock outlives a statement, a process
/// that dies leaves nothing half done, and a step whose answer is lost with its connection is recognized and not taken
/// twice. What this process saw last it tries first: most steps cost one round trip.
///
/// Sessions run with `synchronous_commit=on`, whatever the server's own setting, so that a commit is on disk before a call
/// returns. It may still be lost when the server fails over to an asynchronous standby; synchronous replication
/// (`synchronous_standby_names`) prevents that. A lost connection is made anew, and what can be repeated is, for about five
/// seconds; then calls fail with [`LedgerError::Backend`].
///
/// The tables are in a schema of their own, `x402`. They hold bearer data (signatures, responses) until records age out: give
/// access to the services that share the ledger and to nobody else. Connect to the server itself; poolers that share
/// sessions (PgBouncer in transaction mode) are refused.
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
    known: Known<PaymentKey, Stamped>,
    /// Admissions of one payer that happen here wait for each other here: in the database they would be in vain.
    turns: Vec<Mutex<()>>,
    /// The same for payments that are deferred, whoever pays.
    turn_of_all: Mutex<()>,
    hasher: RandomState,
    responses: Responses,
    upkeep: Upkeep,
    clock: Arc<dyn Clock>,
}

impl PostgresLedger {
    /// Connects to a database (`postgres://user:password@host:port/database`) and makes the tables if they are missing.
    ///
    /// # Errors
    /// As [`PostgresLedgerBuilder::connect`].
    pub async fn connect(url: &str) -> Result<Self, LedgerError> {
        Self::builder(url).connect().await
    }

    /// A ledger with a schema, bounds or a clock of the caller's.
    pub fn builder(url: &str) -> PostgresLedgerBuilder {
        PostgresLedgerBuilder::new(url)
    }

    fn of(connections: Connections, responses: ResponseLimits, max_records: usize, clock: Arc<dyn Clock>) -> Self {
        Self {
            connections,
            known: Known::new(),
            turns: (0..TURNS).map(|_| Mutex::default()).collect(),
            turn_of_all: Mutex::default(),
            hasher: RandomState::new(),
            responses: Responses::new(responses),
            upkeep: Upkeep::new(max_records),
            clock,
        }
    }

    fn turn_of(&self, key: &PaymentKey) -> &Mutex<()> {
        &self.turns[self.hasher.hash_one(key.payer) as usize % TURNS]
    }
}

impl fmt::Debug for PostgresLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresLedger").field("connections", &self.connections).finish_non_exhaustive()
    }
}

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

    async fn take_over(&self, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Result<Option<Lease>, LedgerError> {
        let change = Change { key, needs: Needs::Nothing, response: None };
        let taken = self.change(change, |record| {
            if record.epoch != seen || record.is_leased(now) {
                return Err(LedgerError::LeaseLost);
            }
            record.lease_anew(until);
            Ok(())
        });
        match taken.await {
            Ok(record) => Ok(Some(Lease { key: *key, epoch: record.epoch })),
            Err(LedgerError::LeaseLost | LedgerError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn fulfil(&self, lease: &Lease, step: &FulfilmentStep) -> Result<(), LedgerError> {
        let (needs, turn) = match &step {
            FulfilmentStep::Admit { funds: Some(funds), .. } => (Needs::Funds(*funds), Some(self.turn_of(&lease.key))),
            FulfilmentStep::Defer { limit } => (Needs::Credit(*limit), Some(&self.turn_of_all)),
            _ => (Needs::Nothing, None),
        };
        let response = match &step {
            FulfilmentStep::Produce { response: Some(response), .. } => self.responses.row(response),
            _ => None,
        };
        let _turn = match turn {
            Some(turn) => Some(turn.lock().await),
            None => None,
        };
        let change = Change { key: &lease.key, needs, response: response.as_ref() };
        self.change(change, |record| {
            if record.epoch != lease.epoch {
                return Err(LedgerError::LeaseLost);
            }
            Ok(record.fulfil(step)?)
        })
        .await?;
        if let Some(response) = &response {
            self.responses.stored(&self.connections, response).await;
        }
        Ok(())
    }

    async fn settle(&self, key: &PaymentKey, step: &SettlementStep) -> Result<(), LedgerError> {
        let now = self.clock.now();
        let change = Change { key, needs: Needs::Nothing, response: None };
        self.change(change, |record| Ok(record.settle(step, now)?)).await.map(drop)
    }

    async fn discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        self.remove(&lease.key, |record| {
            if record.epoch != lease.epoch {
                return Err(LedgerError::LeaseLost);
            }
            if !record.is_discardable() {
                return Err(InvalidTransition { fulfilment: record.fulfilment, settlement: record.settlement }.into());
            }
            Ok(())
        })
        .await?;
        self.upkeep.fewer(1);
        Ok(())
    }

    async fn store_response(&self, key: &PaymentKey, response: StoredResponse) -> Result<(), LedgerError> {
        match self.responses.row(&response) {
            Some(response) => self.responses.store(&self.connections, key, &response).await,
            None => Ok(()),
        }
    }

    async fn response(&self, key: &PaymentKey) -> Result<Option<Arc<StoredResponse>>, LedgerError> {
        self.responses.load(&self.connections, key, self.clock.now()).await
    }

    async fn count_replay(&self, key: &PaymentKey) -> Result<u32, LedgerError> {
        payments::count_replay(&self.connections, key).await
    }

    async fn submit(&self, submission: Submission) -> Result<(), LedgerError> {
        self.submit_all(&submission).await
    }

    async fn free_nonce(&self, sender: &Sender, nonce: u64, by: u64) -> Result<(), LedgerError> {
        self.give_back(sender, nonce, by).await
    }

    async fn forget_nonces(&self, sender: &Sender, below: u64) -> Result<(), LedgerError> {
        self.forget_below(sender, below).await
    }

    async fn submissions(&self, sender: &Sender, from: u64) -> Result<Vec<Submission>, LedgerError> {
        self.list_from(sender, from).await
    }

    async fn list(&self, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
        listing::list(&self.connections, listing).await
    }

    async fn counts(&self) -> Result<Counts, LedgerError> {
        listing::counts(&self.connections).await
    }

    fn response_limit(&self) -> usize {
        self.responses.limits.body_bytes
    }
}
