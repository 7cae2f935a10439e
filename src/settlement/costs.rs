//! What settling a payment costs, against what it brings in.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use alloy_primitives::U256;

use super::{engine::Engine, member::Member};
use crate::{chain::rpc::Receipt, settlement::FacilitatorError, telemetry, usdc::Usdc};

/// Gas for a payment before any was settled here: alone, to a payee that has tokens.
const ASSUMED_GAS: u64 = 86_000;
/// The last transactions weigh so much more than those before: about the last eight count.
const WEIGHT: u64 = 8;
/// When to look again at what gas costs.
const RETRY: Duration = Duration::from_secs(10);
/// Wei in one ether.
const ETHER: u64 = 1_000_000_000_000_000_000;

/// What gas is worth, and how much of it a payment takes.
#[derive(Debug)]
pub(crate) struct Costs {
    /// Atomic units of USDC per ether; 0 if not known.
    native_price: AtomicU64,
    refuse_losses: bool,
    recent: Mutex<Recent>,
}

/// Averages per payment over recent transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Recent {
    gas: u64,
    /// Wei that were charged beside the gas: data availability.
    beside: u128,
}

impl Costs {
    pub(crate) fn new(native_price: Option<Usdc>, refuse_losses: bool) -> Self {
        Self {
            native_price: AtomicU64::new(native_price.map_or(0, Usdc::atomic)),
            refuse_losses,
            recent: Mutex::new(Recent { gas: ASSUMED_GAS, beside: 0 }),
        }
    }

    /// What an ether is worth, if that was said.
    pub(crate) fn native_price(&self) -> Option<Usdc> {
        Some(self.native_price.load(Ordering::Relaxed)).filter(|price| *price > 0).map(Usdc::from_atomic)
    }

    pub(crate) fn set_native_price(&self, price: Usdc) {
        self.native_price.store(price.atomic(), Ordering::Relaxed);
    }

    /// Whether so much wei is worth more than so many atomic units of USDC; not, if nobody said what wei is worth.
    fn exceed(&self, wei: U256, units: U256) -> bool {
        let Some(price) = self.native_price() else { return false };
        wei.saturating_mul(price.into()) > units.saturating_mul(U256::from(ETHER))
    }

    fn observe(&self, gas: u64, beside: u128) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.gas = (recent.gas * (WEIGHT - 1)).saturating_add(gas) / WEIGHT;
        recent.beside =
            recent.beside.saturating_mul(u128::from(WEIGHT - 1)).saturating_add(beside) / u128::from(WEIGHT);
    }

    /// What settling one payment takes in wei, as far as recent ones tell.
    fn expected(&self, gas_price: u128) -> U256 {
        let recent = *self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        U256::from(gas_price).saturating_mul(U256::from(recent.gas)).saturating_add(U256::from(recent.beside))
    }
}

impl Engine {
    /// Refuses a payment that would cost more than it brings in, where that was asked for.
    pub(crate) async fn refuse_a_loss(&self, units: U256) -> Result<(), FacilitatorError> {
        if !self.costs.refuse_losses {
            return Ok(());
        }
        let gas_price = self.fees.price(&self.rpc).await?;
        let expected = self.costs.expected(gas_price);
        if self.costs.exceed(expected, units) {
            tracing::warn!(%expected, %units, "a payment is refused: gas costs more");
            return Err(FacilitatorError::Busy { what: "gas costs more than the payment", retry_after: RETRY });
        }
        Ok(())
    }

    /// Learns from a transaction that paid for these, and reports those that cost more than they brought in.
    pub(super) fn weigh(&self, receipt: &Receipt, paid: &[Member]) {
        let payments = paid.len() as u64;
        let Some(gas) = receipt.gas_used.saturating_to::<u64>().checked_div(payments) else { return };
        let share = receipt.cost() / U256::from(payments);
        let of_gas = receipt.effective_gas_price.saturating_mul(U256::from(gas));
        self.costs.observe(gas, share.saturating_sub(of_gas).saturating_to());
        let lost = paid.iter().filter(|member| self.costs.exceed(share, member.expected().value)).count() as u64;
        if let Some(price) = self.costs.native_price().filter(|_| lost > 0) {
            let cost = crate::usdc::in_usdc(share, price);
            tracing::warn!(
                transaction = %receipt.transaction_hash, lost, payments, fee_wei = %share, ?cost,
                "settled at a loss: each of these payments cost more than it brought in"
            );
            self.totals().losses += lost;
            telemetry::lost(self.network, lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dollars(text: &str) -> Usdc {
        text.parse().unwrap()
    }

    #[test]
    fn a_fee_exceeds_an_amount_by_the_price_of_ether_to_the_wei() {
        let costs = Costs::new(Some(dollars("$2000")), true);
        // $0.001 is 5 * 10^11 wei.
        let (limit, units) = (U256::from(500_000_000_000_u64), U256::from(1_000));
        assert!(!costs.exceed(limit, units));
        assert!(costs.exceed(limit + U256::from(1), units));
        costs.set_native_price(dollars("$1000"));
        assert!(!costs.exceed(limit + U256::from(1), units));
        assert!(!Costs::new(None, true).exceed(U256::MAX, U256::ZERO), "nobody said what it is worth");
    }

    #[test]
    fn the_expectation_follows_what_recent_payments_took() {
        let costs = Costs::new(None, false);
        assert_eq!(costs.expected(10), U256::from(860_000));
        for _ in 0..64 {
            costs.observe(40_000, 700);
        }
        let expected: u64 = costs.expected(10).to();
        assert!((400_000..=401_000).contains(&expected), "{expected}");
    }
}
