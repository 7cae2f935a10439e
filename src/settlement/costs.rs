//! What settling costs: totals, the expected cost of a payment, and payers whose payments waste gas.

use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::{Address, U256};
use tokio::time::Instant;

use crate::{
    chain::rpc::Receipt,
    network::Network,
    payment::Rejection,
    protocol::Reason,
    telemetry,
    usdc::{Usdc, in_usdc},
};

/// Totals of an [`OnchainFacilitator`](crate::facilitator::OnchainFacilitator) since it was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SettlementStats {
    /// Payments settled by transactions of this process.
    pub settled: u64,
    /// Payments settled by transactions of others.
    pub settled_by_others: u64,
    /// Transactions of this process that were included.
    pub transactions: u64,
    /// Transactions of this process that were included and did not make their payment.
    pub reverted: u64,
    /// Settled payments that were removed by a reorganization.
    pub reorged: u64,
    /// Payments whose fee exceeded their amount, if the
    /// [native price](crate::facilitator::OnchainFacilitatorBuilder::native_price) is known.
    pub losses: u64,
    /// Gas used by transactions of this process.
    pub gas_used: u64,
    /// Of that, what calls used, such as those of payment channels that send with the same keys.
    pub gas_of_calls: u64,
    /// The cost of these transactions, in wei, data availability included.
    pub spent: U256,
    /// Transactions in flight now.
    pub in_flight: u64,
    /// Payments waiting for settlement now, those in flight included.
    pub pending: u64,
}

/// Gas for a payment before any was settled here: alone, to a payee that has tokens.
const ASSUMED_GAS: u64 = 86_000;
/// The divisor of the moving averages: about the last eight transactions count.
const AVERAGED: u64 = 8;
/// Wei in one ether.
const ETHER: u64 = 1_000_000_000_000_000_000;

/// Totals, and the expected cost of a payment.
#[derive(Debug)]
pub(crate) struct Costs {
    network: Network,
    totals: Mutex<SettlementStats>,
    /// Atomic units of USDC per ether; 0 if not known.
    native_price: AtomicU64,
    refuse_losses: bool,
    recent: Mutex<Recent>,
}

/// Averages per payment over recent transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Recent {
    gas: u64,
    /// Wei charged in addition to gas: data availability.
    extra: u128,
}

impl Costs {
    pub(crate) fn new(network: Network, native_price: Option<Usdc>, refuse_losses: bool) -> Self {
        Self {
            network,
            totals: Mutex::default(),
            native_price: AtomicU64::new(native_price.map_or(0, Usdc::atomic)),
            refuse_losses,
            recent: Mutex::new(Recent { gas: ASSUMED_GAS, extra: 0 }),
        }
    }

    /// Returns the totals; `in_flight` and `pending` are the caller's to set.
    pub(super) fn totals(&self) -> SettlementStats {
        *self.lock_totals()
    }

    /// Counts a transaction of this process that was included.
    pub(super) fn count_included(&self, receipt: &Receipt, is_call: bool, latency: Duration) {
        let (gas, block) = (receipt.gas_used.saturating_to::<u64>(), receipt.block());
        tracing::info!(transaction = %receipt.transaction_hash, block, gas, ?latency, "included");
        telemetry::included(self.network, receipt.succeeded(), gas, receipt.cost(), latency);
        let mut totals = self.lock_totals();
        totals.transactions += 1;
        totals.gas_used = totals.gas_used.saturating_add(gas);
        totals.gas_of_calls = totals.gas_of_calls.saturating_add(if is_call { gas } else { 0 });
        totals.spent = totals.spent.saturating_add(receipt.cost());
    }

    /// Counts the payments that an included transaction settled, given their amounts. Reports those that cost more than they brought in.
    pub(super) fn count_settled(&self, receipt: &Receipt, amounts: &[U256]) {
        let payments = amounts.len() as u64;
        self.lock_totals().settled += payments;
        let Some(gas) = receipt.gas_used.saturating_to::<u64>().checked_div(payments) else { return };
        let share = receipt.cost() / U256::from(payments);
        let cost_of_gas = receipt.effective_gas_price.saturating_mul(U256::from(gas));
        self.observe(gas, share.saturating_sub(cost_of_gas).saturating_to());
        let lost = amounts.iter().filter(|amount| self.exceeds(share, **amount)).count() as u64;
        if let Some(price) = self.native_price().filter(|_| lost > 0) {
            let cost = in_usdc(share, price);
            tracing::warn!(
                transaction = %receipt.transaction_hash, lost, payments, fee_wei = %share, ?cost,
                "settled at a loss: each of these payments cost more than it brought in"
            );
            self.lock_totals().losses += lost;
            telemetry::lost(self.network, lost);
        }
    }

    pub(super) fn count_settled_by_other(&self) {
        self.lock_totals().settled_by_others += 1;
    }

    pub(super) fn count_reverted(&self) {
        self.lock_totals().reverted += 1;
    }

    pub(super) fn count_reorged(&self) {
        self.lock_totals().reorged += 1;
    }

    /// Returns the price of an ether, if it was set.
    pub(crate) fn native_price(&self) -> Option<Usdc> {
        Some(self.native_price.load(Ordering::Relaxed)).filter(|price| *price > 0).map(Usdc::from_atomic)
    }

    pub(crate) fn set_native_price(&self, price: Usdc) {
        self.native_price.store(price.atomic(), Ordering::Relaxed);
    }

    /// Returns `true` if payments that would cost more than they bring in are refused.
    pub(super) const fn refuses_losses(&self) -> bool {
        self.refuse_losses
    }

    /// Returns `true` if settling this amount is expected to cost more than it brings in.
    pub(super) fn is_loss(&self, gas_price: u128, amount: U256) -> bool {
        self.exceeds(self.expected(gas_price), amount)
    }

    /// Returns `true` if so much wei is worth more than this amount of USDC; `false` if the price of ether is not known.
    fn exceeds(&self, wei: U256, amount: U256) -> bool {
        let Some(price) = self.native_price() else { return false };
        wei.saturating_mul(price.into()) > amount.saturating_mul(U256::from(ETHER))
    }

    fn observe(&self, gas: u64, extra: u128) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.gas = (recent.gas * (AVERAGED - 1)).saturating_add(gas) / AVERAGED;
        recent.extra =
            recent.extra.saturating_mul(u128::from(AVERAGED - 1)).saturating_add(extra) / u128::from(AVERAGED);
    }

    /// Returns the expected cost of one payment, in wei.
    fn expected(&self, gas_price: u128) -> U256 {
        let recent = *self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        U256::from(gas_price).saturating_mul(U256::from(recent.gas)).saturating_add(U256::from(recent.extra))
    }

    fn lock_totals(&self) -> MutexGuard<'_, SettlementStats> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many reverts in [`REVERT_MEMORY`] have no consequence.
const FREE_REVERTS: u32 = 1;
/// The first pause, doubled with each further revert.
const FIRST_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(3_600);
/// How long a revert is remembered: past the longest pause, or after it the count would begin again.
const REVERT_MEMORY: Duration = Duration::from_secs(7_200);
/// How many payers are remembered.
const MAX_PAYERS: usize = 4_096;

/// Makes payers wait whose payments were sent and did not pay.
///
/// The seller pays for gas. A contract wallet can make payments look good and then fail, as often as it likes and for free. The first
/// time may be bad luck; after that the payer has to wait, each time longer.
#[derive(Debug, Default)]
pub(crate) struct PayerBackoff(Mutex<HashMap<Address, Reverts>>);

#[derive(Clone, Copy, Debug)]
struct Reverts {
    count: u32,
    last: Instant,
}

impl PayerBackoff {
    /// Notes that a transaction for this payer was included and did not pay.
    pub(crate) fn note_revert(&self, payer: Address) {
        let mut payers = self.lock();
        if payers.len() >= MAX_PAYERS && !payers.contains_key(&payer) {
            payers.retain(|_, reverts| reverts.last.elapsed() < REVERT_MEMORY);
            let oldest = payers.iter().min_by_key(|(_, reverts)| reverts.last).map(|(payer, _)| *payer);
            if let Some(oldest) = oldest.filter(|_| payers.len() >= MAX_PAYERS) {
                payers.remove(&oldest);
            }
        }
        let now = Instant::now();
        let reverts = payers.entry(payer).or_insert(Reverts { count: 0, last: now });
        let count = if reverts.last.elapsed() < REVERT_MEMORY { reverts.count.saturating_add(1) } else { 1 };
        *reverts = Reverts { count, last: now };
    }

    /// Returns `true` if a transaction for this payer did not pay, of late.
    pub(crate) fn is_known(&self, payer: Address) -> bool {
        self.lock().contains_key(&payer)
    }

    /// Returns the reason if payments of this payer are refused now.
    pub(crate) fn rejection(&self, payer: Address) -> Option<Rejection> {
        let reverts = self.lock().get(&payer).copied()?;
        let doublings = reverts.count.checked_sub(FREE_REVERTS + 1)?;
        let pause = FIRST_PAUSE.saturating_mul(1 << doublings.min(16)).min(LONGEST_PAUSE);
        let left = pause.checked_sub(reverts.last.elapsed()).filter(|left| !left.is_zero())?;
        let detail = format!(
            "{} payments of this payer were sent and did not pay; try again in {} seconds",
            reverts.count,
            left.as_secs() + 1
        );
        Some(Rejection::new(Reason::InvalidTransactionState, detail))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Address, Reverts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(native_price: Option<&str>) -> Costs {
        Costs::new(Network::BASE, native_price.map(dollars), true)
    }

    fn dollars(text: &str) -> Usdc {
        text.parse().unwrap()
    }

    #[test]
    fn fee_is_compared_with_the_amount_to_the_wei() {
        let costs = costs(Some("$2000"));
        // $0.001 is 5 * 10^11 wei.
        let (limit, amount) = (U256::from(500_000_000_000_u64), U256::from(1_000));
        assert!(!costs.exceeds(limit, amount));
        assert!(costs.exceeds(limit + U256::from(1), amount));
        costs.set_native_price(dollars("$1000"));
        assert!(!costs.exceeds(limit + U256::from(1), amount));
    }

    #[test]
    fn without_a_price_of_ether_nothing_is_a_loss() {
        assert!(!costs(None).exceeds(U256::MAX, U256::ZERO));
    }

    #[test]
    fn expected_cost_follows_recent_payments() {
        let costs = costs(None);
        assert_eq!(costs.expected(10), U256::from(860_000));
        for _ in 0..64 {
            costs.observe(40_000, 700);
        }
        let expected: u64 = costs.expected(10).to();
        assert!((400_000..=401_000).contains(&expected), "{expected}");
    }

    #[tokio::test(start_paused = true)]
    async fn each_revert_after_the_first_doubles_the_pause() {
        let (backoff, payer) = (PayerBackoff::default(), Address::repeat_byte(1));
        backoff.note_revert(payer);
        assert_eq!(backoff.rejection(payer), None);
        for seconds in [30, 60, 120, 240, 480, 960, 1_920, 3_600, 3_600] {
            backoff.note_revert(payer);
            tokio::time::advance(Duration::from_secs(seconds - 1)).await;
            assert!(backoff.rejection(payer).is_some());
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(backoff.rejection(payer), None);
        }
        assert_eq!(backoff.rejection(Address::repeat_byte(2)), None);
        tokio::time::advance(REVERT_MEMORY).await;
        backoff.note_revert(payer);
        assert_eq!(backoff.rejection(payer), None, "the others are forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn number_of_remembered_payers_is_bounded() {
        let backoff = PayerBackoff::default();
        for n in 0..=MAX_PAYERS as u64 {
            backoff.note_revert(Address::left_padding_from(&n.to_be_bytes()));
        }
        assert_eq!(backoff.lock().len(), MAX_PAYERS);
    }
}
