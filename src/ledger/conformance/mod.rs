//! Tests of the ledger's [contract](super#contract), for those who write a backend.
//!
//! Enable the feature `conformance` in your `[dev-dependencies]`, and [`run`] all tests on empty ledgers of your backend. The tests panic
//! where the ledger breaks the contract. They need a tokio runtime with several threads, and a ledger that goes by the
//! [`ManualClock`] that it is opened with.
//!
//! ```
//! use std::sync::Arc;
//!
//! use tower_x402::{ManualClock, ledger::{Ledger, MemoryLedger, ResponseLimits, conformance}};
//!
//! async fn open(clock: Arc<ManualClock>) -> Arc<dyn Ledger> {
//!     // Yours, with nothing in it.
//!     Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000, clock))
//! }
//!
//! # #[tokio::main]
//! # async fn main() {
//! conformance::run(open).await;
//! # }
//! ```
//!
//! The contract's promises about crashes and about several processes depend on the storage, and need tests of their own. The functions that
//! make and move payments here are public for them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

pub mod channels;
mod credit;
mod failures;
mod fulfilment;
mod settling;

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use alloy_primitives::{Address, B256, U256};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use super::*;
use crate::{
    clock::ManualClock,
    eip3009::{Authorization, PaymentSignature},
    network::Asset,
    payment::{Funds, Terms, Window, precheck},
    protocol::{ExactOffer, ExactPayload, PaymentFlow, Reason, TransferMethod},
};

/// When the clock of every test starts, in Unix seconds.
pub const START: u64 = 1_800_000_000;

/// Returns all tests of the contract.
pub fn tests() -> impl Iterator<Item = &'static Test> {
    [fulfilment::TESTS, settling::TESTS, failures::TESTS, credit::TESTS].into_iter().flatten()
}

type Run<L> = fn(Arc<L>, Arc<ManualClock>) -> Pin<Box<dyn Future<Output = ()>>>;

/// A test of the contract of payments, or of another one that a ledger keeps.
pub struct Test<L: ?Sized = dyn Ledger> {
    name: &'static str,
    run: Run<L>,
}

impl<L: ?Sized> Test<L> {
    /// Returns the test's name: a fact that holds for every ledger.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Runs the test on an empty ledger that goes by `clock`, which shows [`START`].
    ///
    /// # Panics
    /// If the ledger breaks the contract.
    pub async fn run(&self, ledger: Arc<L>, clock: Arc<ManualClock>) {
        (self.run)(ledger, clock).await;
    }
}

impl<L: ?Sized> fmt::Debug for Test<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Test").field(&self.name).finish()
    }
}

/// Runs all [tests], one after the other, each on a ledger that `open` returns. It has to be empty, and go by the clock that it is
/// given.
///
/// # Panics
/// If the ledger breaks the contract.
pub async fn run<F: Future<Output = Arc<dyn Ledger>>>(open: impl Fn(Arc<ManualClock>) -> F) {
    run_all(tests(), open).await;
}

async fn run_all<L: ?Sized + 'static, F: Future<Output = Arc<L>>>(
    tests: impl Iterator<Item = &'static Test<L>>,
    open: impl Fn(Arc<ManualClock>) -> F,
) {
    for test in tests {
        let clock = Arc::new(ManualClock::at(START));
        test.run(open(clock.clone()).await, clock).await;
    }
}

/// Makes a table of tests from the names of their functions.
macro_rules! table {
    ($($test:ident),* $(,)?) => {
        &[$(Test { name: stringify!($test), run: |ledger, clock| Box::pin($test(ledger, clock)) }),*]
    };
}
use table;

const VALID_BEFORE: u64 = START + 60;
const SENDER: Sender = Sender { network: Network::BASE, address: Address::repeat_byte(0x5e) };

/// Returns the record of a new payment of 10 atomic units, valid for 60 seconds and leased for 30 from [`START`]. `payer` is repeated to an
/// address.
pub fn record(payer: u8, nonce: u64) -> Record {
    record_of(usdc(), TransferMethod::Authorization, payer, nonce)
}

fn usdc() -> Asset {
    Network::BASE.usdc().unwrap()
}

fn record_of(asset: Asset, method: TransferMethod, payer: u8, nonce: u64) -> Record {
    let offer = ExactOffer {
        asset,
        amount: U256::from(10),
        pay_to: Address::repeat_byte(0xee),
        max_timeout_seconds: 60,
        flow: PaymentFlow::Authorization,
        method,
    };
    let authorization = Authorization {
        from: Address::repeat_byte(payer),
        to: offer.pay_to,
        value: offer.amount,
        valid_after: U256::ZERO,
        valid_before: U256::from(VALID_BEFORE),
        nonce: B256::from(U256::from(nonce)),
    };
    let signature = PaymentSignature::from(vec![1; 65]);
    let payload = ExactPayload { permit: offer.permit(), ..ExactPayload::new(signature, authorization) };
    let window = Window::default();
    let payment = precheck(Arc::new(Terms::new(offer)), payload, window, START).unwrap();
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    Record::new(&payment, request, START, START + 30)
}

/// Returns the same for a permit (scheme `upto`), of at most 10 atomic units of a token.
pub fn permit(asset: Asset, payer: u8, nonce: u64) -> Record {
    record_of(asset, TransferMethod::Permit { facilitator: Address::repeat_byte(0xfa) }, payer, nonce)
}

/// Gives the record a payment id.
pub fn with_id(id: u8, mut record: Record) -> Record {
    record.id = Some(B256::repeat_byte(id));
    record
}

/// Reserves a new payment.
///
/// # Panics
/// If it is known already.
pub async fn reserve(ledger: &dyn Ledger, record: Record) -> Lease {
    match ledger.reserve(&record).await.unwrap() {
        Reservation::New(lease) => lease,
        Reservation::Known(record) => panic!("known already: {record:?}"),
    }
}

/// Admits a payment, given the payer's balance at a block.
///
/// # Errors
/// As [`Ledger::fulfil`].
pub async fn admit(ledger: &dyn Ledger, lease: &Lease, balance: u64, block: u64) -> Result<(), LedgerError> {
    let funds = Some(Funds { balance: U256::from(balance), block });
    ledger.fulfil(lease, &FulfilmentStep::Admit { funds, due: false }).await
}

/// Brings a reserved payment to `Produced` and `Due`.
///
/// # Panics
/// If the ledger refuses a step.
pub async fn produce(ledger: &dyn Ledger, lease: &Lease) {
    admit(ledger, lease, 1_000, 1).await.unwrap();
    work(ledger, lease).await;
}

/// Does the work of an admitted payment.
async fn work(ledger: &dyn Ledger, lease: &Lease) {
    ledger.fulfil(lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    ledger
        .fulfil(lease, &FulfilmentStep::Produce { charged: None, body: None, at: START, response: None })
        .await
        .unwrap();
}

/// Makes a payment whose work is done, and of which this much is charged.
async fn charge(ledger: &dyn Ledger, payer: u8, nonce: u64, charged: u64) -> Lease {
    let lease = reserve(ledger, record(payer, nonce)).await;
    admit(ledger, &lease, 1_000, 1).await.unwrap();
    ledger.fulfil(&lease, &FulfilmentStep::Start { until: 0 }).await.unwrap();
    let charged = Some(U256::from(charged));
    let produce = FulfilmentStep::Produce { charged, body: None, at: START, response: None };
    ledger.fulfil(&lease, &produce).await.unwrap();
    lease
}

/// Makes a payment whose work is done.
async fn due(ledger: &dyn Ledger, payer: u8, nonce: u64) -> PaymentKey {
    let lease = reserve(ledger, record(payer, nonce)).await;
    produce(ledger, &lease).await;
    lease.key
}

async fn settle(ledger: &dyn Ledger, key: &PaymentKey, transaction: u8, block: Option<u64>) {
    ledger.settle(key, &SettlementStep::Settle { transaction: hash(transaction), block, fee: None }).await.unwrap();
}

/// A failure that accounts for these transactions.
fn fail(by: u64, known_transactions: &[B256]) -> SettlementStep {
    let known_transactions = known_transactions.to_vec();
    SettlementStep::Fail { reason: Reason::UnexpectedSettleError, by, known_transactions }
}

/// Returns a hash of one repeated byte.
pub fn hash(n: u8) -> B256 {
    B256::repeat_byte(n)
}

/// Returns the states of a payment.
///
/// # Panics
/// If the payment is not in the ledger.
pub async fn state(ledger: &dyn Ledger, key: &PaymentKey) -> (Fulfilment, Settlement) {
    let record = ledger.get(key).await.unwrap().expect("a record");
    (record.fulfilment, record.settlement)
}

/// Awaits futures one after the other. All are made first, so spawned tasks run at the same time.
async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let futures: Vec<F> = futures.into_iter().collect();
    let mut results = Vec::with_capacity(futures.len());
    for future in futures {
        results.push(future.await);
    }
    results
}
