//! What a seller charges by: its limits, and whom it gives credit.

use std::{sync::Arc, time::Duration};

use crate::{
    clock::{Clock, SystemClock},
    ledger::CreditLimit,
    payment::Window,
    usdc::Usdc,
};

/// How far a payer's clock may run ahead, in seconds.
const CLOCK_SKEW: u64 = 30;

/// The settings that charging depends on, whatever the transport.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) limits: Limits,
    /// Which payments may be settled after the response has left.
    pub(crate) deferred: Option<DeferredPolicy>,
    /// Where payers are told what became of their payments.
    pub(crate) status_url: Option<String>,
    /// Whether payers may name their payments (the extension `payment-identifier`).
    pub(crate) payment_identifier: bool,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            deferred: None,
            status_url: None,
            payment_identifier: true,
            clock: Arc::new(SystemClock),
        }
    }
}

/// The bounds that a seller sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_timeout: Duration,
    pub(crate) handler_deadline: Duration,
    pub(crate) settlement_margin: Duration,
    pub(crate) request_body: usize,
    pub(crate) body_deadline: Duration,
    pub(crate) concurrent: usize,
    pub(crate) wait: Duration,
    pub(crate) attempts: u32,
    pub(crate) anonymous_replays: u32,
    pub(crate) anonymous_replay_age: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_timeout: Duration::from_secs(120),
            handler_deadline: Duration::from_secs(60),
            settlement_margin: Duration::from_secs(15),
            request_body: 1 << 20,
            body_deadline: Duration::from_secs(30),
            concurrent: 4096,
            wait: Duration::from_secs(90),
            attempts: 3,
            anonymous_replays: 3,
            anonymous_replay_age: Duration::from_secs(60),
        }
    }
}

impl Limits {
    /// Returns `true` if a response may be given again. Without a secret in its request, anybody who reads the chain could ask for it, so
    /// that then it is given a few times and for a short time only. `replays` counts this one, too; `age` is in seconds.
    pub(crate) fn may_replay(&self, has_secret: bool, replays: u32, age: u64) -> bool {
        has_secret || (replays <= self.anonymous_replays && age <= self.anonymous_replay_age.as_secs())
    }

    /// Returns how long after it was signed a payment that lasts as long as it may can still be presented, in seconds.
    pub(crate) fn time_to_sign(&self) -> u64 {
        self.max_timeout.saturating_sub(self.handler_deadline + self.settlement_margin).as_secs()
    }

    /// Returns until when a lease runs that begins now, in Unix seconds: the work, the settlement on either side of it, and some slack.
    pub(crate) fn lease_until(&self, now: u64) -> u64 {
        now + (self.handler_deadline + 2 * self.settlement_margin).as_secs() + 30
    }

    /// Returns the window of time in which an authorization must be usable.
    pub(crate) fn window(&self) -> Window {
        Window::default().remaining((self.handler_deadline + self.settlement_margin).as_secs()).skew(CLOCK_SKEW)
    }
}

/// A policy that says which payments are settled after the response has left, and how much may be owed at a time; see
/// [`deferred`](crate::server::RequirePaymentLayerBuilder::deferred).
///
/// A payer that spends its balance elsewhere before it is settled costs at most `per_payer`. A payment that is never settled counts
/// against that until its record ages out, some time after `validBefore`. Anybody can be many payers, each of which has to pay `history`
/// payments first: with a `per_payer` of no more than these payments are worth, payers that cheat have paid as much as they take. **The default lends
/// more than that below a price of $0.017**: set `per_payer` for what you sell.
///
/// ```
/// use tower_x402::{Usdc, server::DeferredPolicy};
///
/// let policy = DeferredPolicy::default().per_payer(Usdc::from_atomic(20_000)).history(10);
/// # let _ = policy;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct DeferredPolicy {
    per_payer: Usdc,
    history: u32,
}

impl Default for DeferredPolicy {
    fn default() -> Self {
        Self { per_payer: Usdc::from_atomic(50_000), history: 3 }
    }
}

impl DeferredPolicy {
    /// Sets the most that one payer may owe on one network in one token. Default: $0.05.
    pub const fn per_payer(mut self, amount: Usdc) -> Self {
        self.per_payer = amount;
        self
    }

    /// Sets the number of payments that a payer must have settled here before it gets credit, of those that the ledger still has on
    /// record. Default: 3; at least 1.
    pub const fn history(mut self, payments: u32) -> Self {
        self.history = payments;
        self
    }

    pub(crate) fn limit(&self) -> CreditLimit {
        CreditLimit {
            per_payer: self.per_payer.into(),
            // A payer that never paid is not known.
            history: self.history.max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_policy_gives_credit_to_payers_that_never_paid() {
        for (history, needed) in [(0, 1), (1, 1), (2, 2), (u32::MAX, u32::MAX)] {
            assert_eq!(DeferredPolicy { history, ..DeferredPolicy::default() }.limit().history, needed);
        }
    }
}
