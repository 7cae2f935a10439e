//! What callers may make the service pay: gas for one request, in an hour, and for transactions that revert.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tower_x402::{
    payment::{Prechecked, Verified},
    server::{RateLimit, TooManyRequests},
};

use crate::{FacilitatorServiceBuilder, access::Caller};

/// The most gas for one request of a caller whom nobody knows, unless set.
const ANONYMOUS: u64 = 400_000;
/// The most gas for one request of a caller with a key, unless set: what a transaction may use (EIP-7825).
const KNOWN: u64 = 1 << 24;
/// Gas in an hour, unless set.
const PER_HOUR: u64 = 100_000_000;
const HOUR: Duration = Duration::from_secs(3_600);
/// How many settlements of one caller may revert at once, and the pause until one more may, in seconds. Payers can do this to an honest
/// seller, so it is no ban.
const FREE_REVERTS: f64 = 10.0;
const REVERT_PAUSE: f64 = 60.0;
/// Gas of a transfer's transaction beside the call of the token, and for each byte of its data, at most (EIP-7623).
const TRANSFER: u64 = 60_000;
const PER_BYTE: u64 = 40;

impl FacilitatorServiceBuilder {
    /// Sets the most gas that one request to settle may use, in all its transactions. Default: 400,000 if anybody may call, and 16,777,216 if
    /// callers need a [`bearer_key`](Self::bearer_key).
    ///
    /// A transfer uses some 86,000, and a deposit into a payment channel some 150,000. For channels the bounds count: 400,000 for a deposit,
    /// 300,000 for a refund, 200,000 for a transfer to the receiver, and for a claim 150,000 and 60,000 for each row, so that four rows are
    /// what anybody may ask for. What may need more is refused and costs nothing.
    pub fn max_gas(mut self, gas: u64) -> Self {
        self.max_gas = Some(gas);
        self
    }

    /// Sets the most gas that all callers together may have used in an hour. Default: 100 million, some 1,100 payments one by one.
    ///
    /// A quarter may be used at once, and the rest comes back over the hour. Requests to settle are answered 503 while too little is left;
    /// those that are under way are finished.
    pub fn gas_per_hour(mut self, gas: u64) -> Self {
        self.gas_per_hour = Some(gas);
        self
    }
}

/// Returns the most gas that the settlement of a payment may use, if its simulation tells.
pub(crate) fn of_transfer(payment: &Prechecked, verified: &Verified) -> Option<u64> {
    let signature = payment.signature().as_bytes().len() as u64;
    let call = verified.gas?;
    Some(call.saturating_add(call / 8).saturating_add(TRANSFER).saturating_add(signature.saturating_mul(PER_BYTE)))
}

/// The gas that callers may make the service pay for.
pub(crate) struct GasBudget {
    /// For one request.
    most: u64,
    /// What may be used at once. Three times as much comes back in an hour.
    burst: f64,
    state: Mutex<State>,
    reverts: RateLimit,
}

struct State {
    left: f64,
    at: Instant,
    /// The gas used in all when `left` was computed.
    used: u64,
    /// Bounds of the settlements under way.
    reserved: u64,
}

/// Gas that a settlement under way may use.
pub(crate) struct ReservedGas<'a> {
    budget: &'a GasBudget,
    gas: u64,
}

impl GasBudget {
    pub(crate) fn new(max_gas: Option<u64>, per_hour: Option<u64>, are_callers_known: bool) -> Self {
        let burst = per_hour.unwrap_or(PER_HOUR) as f64 / 4.0;
        Self {
            most: max_gas.unwrap_or(if are_callers_known { KNOWN } else { ANONYMOUS }),
            burst,
            state: Mutex::new(State { left: burst, at: Instant::now(), used: 0, reserved: 0 }),
            reverts: RateLimit::new(1.0 / REVERT_PAUSE, FREE_REVERTS),
        }
    }

    /// Returns the most gas for one request.
    pub(crate) fn most(&self) -> u64 {
        self.most
    }

    /// Reserves gas for a settlement. `used` is what was used in all since the start.
    ///
    /// # Errors
    /// The time until there is enough of it.
    pub(crate) fn reserve(&self, gas: u64, used: u64, now: Instant) -> Result<ReservedGas<'_>, Duration> {
        let mut state = self.lock();
        let per_second = 3.0 * self.burst / HOUR.as_secs_f64();
        let back = now.saturating_duration_since(state.at).as_secs_f64() * per_second;
        let spent = used.saturating_sub(state.used) as f64;
        // Settlements that outlast their reservation leave a debt.
        state.left = (state.left + back).min(self.burst) - spent;
        (state.at, state.used) = (now, used.max(state.used));
        let missing = (gas as f64).min(self.burst) - (state.left - state.reserved as f64);
        if missing > 0.0 {
            let wait = Duration::try_from_secs_f64(missing / per_second).unwrap_or(HOUR);
            return Err(wait.clamp(Duration::from_secs(1), HOUR));
        }
        state.reserved = state.reserved.saturating_add(gas);
        Ok(ReservedGas { budget: self, gas })
    }

    /// Fails if too many settlements of this caller have reverted. Callers with a key are the operator's to judge.
    pub(crate) fn check_caller(&self, caller: Caller) -> Result<(), TooManyRequests> {
        if caller.is_known { Ok(()) } else { self.reverts.check(caller.counted) }
    }

    /// Notes that a settlement of this caller reverted at the service's cost.
    pub(crate) fn note_revert(&self, caller: Caller) {
        let _ = self.reverts.admit(caller.counted);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ReservedGas<'_> {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.reserved = state.reserved.saturating_sub(self.gas);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_no_hour_more_gas_is_used_than_is_set() {
        let budget = GasBudget::new(None, Some(4_000_000), false);
        let start = Instant::now();
        let mut used = 0;
        let mut minutes = Vec::new();
        for minute in 0..180 {
            let now = start + Duration::from_secs(60) * minute;
            let before = used;
            while let Ok(_reserved) = budget.reserve(250_000, used, now) {
                used += 250_000;
            }
            minutes.push(used - before);
        }
        assert_eq!(minutes[0], 1_000_000, "a quarter at once");
        let most = minutes.windows(60).map(|hour| hour.iter().sum::<u64>()).max();
        assert!(most <= Some(4_000_000) && most >= Some(3_750_000), "{most:?}");
        assert!(used > 9_000_000, "{used}: the rest comes back over the hour");
    }

    #[test]
    fn settlements_under_way_count_and_those_that_cost_nothing_do_not() {
        let budget = GasBudget::new(None, Some(4_000_000), false);
        let now = Instant::now();
        let held: Vec<_> = (0..4).map(|_| budget.reserve(250_000, 0, now).expect("there is enough")).collect();
        assert_eq!(budget.reserve(250_000, 0, now).err(), Some(Duration::from_secs(300)));
        drop(held);
        assert!(budget.reserve(250_000, 0, now).is_ok());
        // What was used after its request had ended is a debt.
        assert_eq!(budget.reserve(250_000, 1_750_000, now).err(), Some(Duration::from_secs(1_200)));
        assert!(budget.reserve(250_000, 1_750_000, now + Duration::from_secs(1_200)).is_ok());
    }

    #[test]
    fn a_budget_below_one_request_serves_one_at_a_time() {
        let budget = GasBudget::new(None, Some(1_000), true);
        let now = Instant::now();
        let first = budget.reserve(KNOWN, 0, now).expect("nothing is under way");
        assert!(budget.reserve(1, 0, now).is_err());
        drop(first);
        assert!(budget.reserve(KNOWN, 0, now).is_ok());
    }
}
