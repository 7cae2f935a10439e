//! The tests of the ledger's [contract](super#contract), for those who write a backend.
//!
//! Enable the feature `conformance` in your `[dev-dependencies]`, and make the tests with one line. `open` returns an empty ledger that goes
//! by the [`ManualClock`] that it is given, and what has to live as long as the ledger, such as its directory:
//!
//! ```
//! use std::sync::Arc;
//!
//! use tower_x402::{ManualClock, ledger::{MemoryLedger, ResponseLimits}};
//!
//! async fn open(clock: Arc<ManualClock>) -> (MemoryLedger, ()) {
//!     // Yours, with nothing in it.
//!     (MemoryLedger::with(ResponseLimits::default(), 10_000, clock), ())
//! }
//!
//! tower_x402::ledger_conformance!(open);
//! # fn main() {}
//! ```
//!
//! The contract's promises about crashes and about several processes depend on the storage, and need tests of their own. The functions that
//! make and move payments here are public for them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

pub mod channels;
#[doc(hidden)]
pub mod credit;
#[doc(hidden)]
pub mod failures;
#[doc(hidden)]
pub mod fulfilment;
#[doc(hidden)]
pub mod selling;
#[doc(hidden)]
pub mod settling;

use std::{future::Future, sync::Arc};

use alloy_primitives::{Address, B256, U256};
use bytes::Bytes;

use super::{channels::ChannelLedger, *};
use crate::{
    clock::ManualClock,
    eip3009::{Authorization, PaymentSignature},
    network::Asset,
    payment::{Funds, Terms, Window, precheck},
    protocol::{ExactOffer, ExactPayload, PaymentFlow, Reason, TransferMethod},
};

/// When the clock of every test starts, in Unix seconds.
pub const START: u64 = 1_800_000_000;

/// Makes a test of each promise of a ledger's contract, with the name of the promise. The argument is an `async fn` that opens an empty ledger; see
/// [`ledger::conformance`](crate::ledger::conformance).
///
/// A ledger of payments alone, or of payment channels alone, is tested by `ledger_conformance!(payments: open)` and
/// `ledger_conformance!(channels: open)`.
#[macro_export]
macro_rules! ledger_conformance {
    ($open:path) => {
        $crate::ledger_conformance! { payments: $open }
        $crate::ledger_conformance! { channels: $open }
    };
    (payments: $open:path) => {
        $crate::ledger_conformance! {
            @ check fulfilment $open:
                one_of_many_concurrent_reservations_wins,
                a_payment_takes_every_step,
                a_settled_payment_never_fails,
                an_unknown_outcome_stays_in_flight,
                a_lost_lease_changes_nothing,
                start_extends_the_lease,
                a_released_payment_that_is_leased_anew_has_one_owner,
                an_earlier_lease_is_void_after_later_ones,
                one_of_many_concurrent_takeovers_wins,
                an_outdated_epoch_takes_nothing_over,
                payments_in_flight_stay_within_the_balance,
                a_due_payment_that_is_released_stays_in_flight,
                the_longest_body_digest_is_kept,
                what_is_charged_is_what_is_settled_and_nothing_is_final,
                only_what_is_charged_stays_in_flight,
                a_settlement_of_nothing_is_final_in_one_step,
                repeated_steps_keep_the_first_times,
                a_payment_that_may_have_been_sent_is_not_discarded,
                a_dead_payment_is_not_in_flight,
                a_leased_payment_is_not_removed,
                the_latest_block_seen_is_kept,
                a_balance_read_before_a_transfer_is_stale,
                a_transfer_is_not_counted_twice,
                a_balance_read_between_two_transfers_counts_the_later_one,
                a_payment_that_was_worked_on_is_not_discarded,
                a_discarded_payment_can_be_reserved_again,
                responses_are_kept_and_replays_counted,
                records_are_removed_when_their_outcome_is_known,
                a_permit_of_unknown_outcome_is_given_up_after_a_week_and_stays_counted,
                one_of_many_payments_with_one_id_wins,
                an_id_is_free_when_its_record_is_removed,
                an_id_is_of_one_payment_whatever_was_signed_for_it,
                permits_are_in_flight_with_what_else_is_paid_in_their_token,
        }
        $crate::ledger_conformance! {
            @ check settling $open:
                one_of_many_processes_gets_a_nonce,
                a_submission_is_atomic,
                a_freed_nonce_is_open_to_all,
                a_nonce_held_too_long_may_be_replaced,
                the_newest_transaction_of_a_nonce_is_listed,
                nonces_in_final_blocks_are_removed,
                a_payment_is_settled_by_one_process_at_a_time,
                a_claim_holds_to_the_last_second,
                a_delegated_payment_is_unknown_until_it_is_reported,
                a_reorged_payment_is_due_and_in_flight,
                a_reorged_payment_is_idle_unless_it_is_worked_on,
                payments_are_listed_in_order_by_page,
                a_leased_or_claimed_payment_is_not_idle,
                a_complete_response_is_stored_with_its_step,
        }
        $crate::ledger_conformance! {
            @ check failures $open:
                a_queued_payment_that_failed_is_not_submitted,
                a_failed_payment_is_submitted_if_the_failure_is_known,
                a_failed_payment_is_delegated_only_if_the_failure_is_known,
                a_payment_submitted_by_another_process_does_not_fail,
                a_payment_delegated_by_another_process_does_not_fail,
                a_concurrent_failure_and_submission_exclude_each_other,
                a_failure_that_does_not_know_the_newest_transaction_is_refused,
        }
        $crate::ledger_conformance! {
            @ check credit $open:
                a_payer_owes_no_more_than_it_has_settled,
                what_was_settled_to_another_payee_does_not_count,
                what_was_settled_counts_for_ten_minutes,
                what_a_payer_owes_stays_within_its_limit,
                concurrent_deferrals_stay_within_the_limit,
                an_overdue_payment_ends_credit_until_it_settles,
                what_is_lost_is_owed_for_longer_than_what_was_settled_before_counts,
                a_reorged_payment_is_owed_again,
                what_a_reorganization_removed_was_not_settled,
                only_what_is_charged_is_owed,
                only_produced_due_payments_are_deferred_and_once,
                what_can_not_be_settled_any_more_is_not_deferred,
                a_deferred_payment_is_idle_at_once,
        }
    };
    (channels: $open:path) => {
        $crate::ledger_conformance! {
            @ check_channels selling $open:
                a_channel_is_opened_as_the_chain_has_it,
                a_channel_is_read_as_it_was_written,
                a_refused_step_changes_nothing,
                one_of_many_concurrent_requests_holds_a_channel,
                copies_of_a_request_are_charged_once,
                concurrent_charges_and_observations_lose_none,
                requests_on_different_channels_do_not_wait_for_each_other,
                a_request_that_lost_the_channel_charges_nothing,
                a_released_channel_is_free_and_uncharged,
                a_charge_stores_its_response,
                a_payers_id_finds_its_answer,
                replays_and_attempts_are_counted,
                an_observation_of_an_earlier_block_is_ignored,
                a_withdrawal_ends_credit_and_not_a_charge,
                a_signed_refund_covers_nothing,
                a_withdrawal_and_a_refund_add_up,
                a_claim_is_for_no_more_than_the_escrow_has,
                a_refund_that_was_not_sent_is_dropped,
                a_wrong_observation_is_corrected_by_the_next,
                one_refund_is_under_way_at_a_time_and_its_result_is_kept,
                a_block_that_is_too_high_is_replaced_by_a_later_one,
                a_reorged_claim_can_be_claimed_again,
                one_of_many_processes_claims,
                channels_are_listed_in_order_by_page,
        }
    };
    (@ $check:ident $tests:ident $open:path: $($test:ident,)*) => {
        $(
            #[test]
            fn $test() {
                $crate::ledger::conformance::$check($open, $crate::ledger::conformance::$tests::$test);
            }
        )*
    };
}

/// Runs a test of the contract of payments on a ledger that `open` returns, and keeps what comes with it.
#[doc(hidden)]
pub fn check<L: Ledger, K, O: Future<Output = (L, K)>, T: Future<Output = ()>>(
    open: impl FnOnce(Arc<ManualClock>) -> O,
    test: impl FnOnce(Arc<dyn Ledger>, Arc<ManualClock>) -> T,
) {
    block_on(async {
        let clock = Arc::new(ManualClock::at(START));
        let (ledger, _kept) = open(clock.clone()).await;
        test(Arc::new(ledger), clock).await;
    });
}

/// The same for the contract of payment channels.
#[doc(hidden)]
pub fn check_channels<L: ChannelLedger, K, O: Future<Output = (L, K)>, T: Future<Output = ()>>(
    open: impl FnOnce(Arc<ManualClock>) -> O,
    test: impl FnOnce(Arc<dyn ChannelLedger>, Arc<ManualClock>) -> T,
) {
    block_on(async {
        let clock = Arc::new(ManualClock::at(START));
        let (ledger, _kept) = open(clock.clone()).await;
        test(Arc::new(ledger), clock).await;
    });
}

fn block_on(test: impl Future<Output = ()>) {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(4).enable_all().build().unwrap().block_on(test);
}

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
    record_for(offer_of(asset, method), payer, nonce, START)
}

fn offer_of(asset: Asset, method: TransferMethod) -> ExactOffer {
    ExactOffer {
        asset,
        amount: U256::from(10),
        pay_to: Address::repeat_byte(0xee),
        max_timeout_seconds: 60,
        flow: PaymentFlow::Authorization,
        method,
    }
}

/// Returns the record of a payment that is signed at this time.
fn record_for(offer: ExactOffer, payer: u8, nonce: u64, now: u64) -> Record {
    let authorization = Authorization {
        from: Address::repeat_byte(payer),
        to: offer.pay_to,
        value: offer.amount,
        valid_after: U256::ZERO,
        valid_before: U256::from(now + 60),
        nonce: B256::from(U256::from(nonce)),
    };
    let signature = PaymentSignature::from(vec![1; 65]);
    let payload = ExactPayload { permit: offer.permit(), ..ExactPayload::new(signature, authorization) };
    let window = Window::default();
    let payment = precheck(Arc::new(Terms::new(offer)), payload, window, now).unwrap();
    let request = Fingerprint { digest: B256::ZERO, names_caller: false };
    Record::new(&payment, request, now, now + 30)
}

/// Returns the same for a permit, of at most 10 atomic units of a token.
pub fn permit(asset: Asset, payer: u8, nonce: u64) -> Record {
    record_of(asset, TransferMethod::Maximum { facilitator: Address::repeat_byte(0xfa) }, payer, nonce)
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

/// Leases a known payment anew, as of this epoch of its record. Returns `None` if it is not to be had.
///
/// # Panics
/// If the ledger fails otherwise.
pub async fn take_over(ledger: &dyn Ledger, key: &PaymentKey, seen: u64, now: u64, until: u64) -> Option<Lease> {
    match ledger.advance(key, &PaymentStep::TakeOver { seen, now, until }).await {
        Ok(record) => Some(record.lease()),
        Err(LedgerError::LeaseLost) => None,
        Err(error) => panic!("{error:?}"),
    }
}

/// Returns a response with this body, produced at [`START`].
pub fn response(body: &'static [u8]) -> StoredResponse {
    StoredResponse { head: Bytes::from_static(b"201"), body: Bytes::from_static(body), stored_at: START }
}

/// Admits a payment, given the payer's balance at a block.
///
/// # Errors
/// As [`Ledger::advance`].
pub async fn admit(ledger: &dyn Ledger, lease: &Lease, balance: u64, block: u64) -> Result<Record, LedgerError> {
    let funds = Some(Funds { balance: U256::from(balance), block });
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Admit { funds, due: false })).await
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
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    ledger
        .advance(
            &lease.key,
            &lease.step(FulfilmentStep::Produce { charged: None, body: None, at: START, response: None }),
        )
        .await
        .unwrap();
}

/// Makes a payment whose work is done, and of which this much is charged.
async fn charge(ledger: &dyn Ledger, payer: u8, nonce: u64, charged: u64) -> Lease {
    let lease = reserve(ledger, record(payer, nonce)).await;
    admit(ledger, &lease, 1_000, 1).await.unwrap();
    ledger.advance(&lease.key, &lease.step(FulfilmentStep::Start { until: 0 })).await.unwrap();
    let charged = Some(U256::from(charged));
    let produce = FulfilmentStep::Produce { charged, body: None, at: START, response: None };
    ledger.advance(&lease.key, &lease.step(produce.clone())).await.unwrap();
    lease
}

/// Makes a payment whose work is done.
async fn due(ledger: &dyn Ledger, payer: u8, nonce: u64) -> PaymentKey {
    let lease = reserve(ledger, record(payer, nonce)).await;
    produce(ledger, &lease).await;
    lease.key
}

async fn settle(ledger: &dyn Ledger, key: &PaymentKey, transaction: u8, block: Option<u64>) {
    ledger
        .advance(key, &SettlementStep::Settle { transaction: hash(transaction), block, fee: None }.into())
        .await
        .unwrap();
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

#[cfg(test)]
mod tests {
    /// The compiler finds a test that is listed and not there. This finds one that is there and not listed.
    #[test]
    fn macro_lists_every_test() {
        let listed = include_str!("mod.rs");
        let files = [
            include_str!("fulfilment.rs"),
            include_str!("settling.rs"),
            include_str!("failures.rs"),
            include_str!("credit.rs"),
            include_str!("selling.rs"),
        ];
        for test in files.into_iter().flat_map(str::lines).filter_map(|line| line.strip_prefix("pub async fn ")) {
            let name = test.split('(').next().unwrap_or(test);
            assert!(listed.contains(&format!("                {name},\n")), "{name}");
        }
    }
}
