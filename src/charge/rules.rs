//! What a seller charges by: its limits, and whom it gives credit.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;

use crate::{
    clock::{Clock, SystemClock},
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

    /// Returns `true` if work that was begun so often for one payment may be begun once more.
    pub(crate) const fn has_attempts_left(&self, attempts: u32) -> bool {
        attempts < self.attempts
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
/// A payer may owe no more than [`per_payer`](Self::per_payer), and no more than it has settled here in the last ten minutes, to the same
/// payee in the same token. A payment that is never settled stays owed for longer than that. So a payer that spends its balance elsewhere
/// takes at most `per_payer`, and has paid as much before; anybody can be many payers, and all of them together take no more than they have
/// paid. A reorganization that removes what a payer has settled can add to that.
///
/// ```
/// use tower_x402::{Usdc, server::DeferredPolicy};
///
/// let policy = DeferredPolicy::default().per_payer(Usdc::from_atomic(20_000));
/// # let _ = policy;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct DeferredPolicy {
    per_payer: Usdc,
}

impl Default for DeferredPolicy {
    fn default() -> Self {
        Self { per_payer: Usdc::from_atomic(50_000) }
    }
}

impl DeferredPolicy {
    /// Sets the most that one payer may owe on one network in one token. Default: $0.05. It never owes more than it has settled.
    pub const fn per_payer(mut self, amount: Usdc) -> Self {
        self.per_payer = amount;
        self
    }

    pub(crate) fn limit(&self) -> U256 {
        self.per_payer.into()
    }
}
