//! What a layer was built with, shared by all its services.

use std::{fmt, sync::Arc, time::Duration};

use http::response::Parts;
use tokio::sync::Semaphore;

use super::{line::WaitingLine, offer::Catalogue, page::BrowserPage, wait::InProgress};
use crate::{clock::Clock, facilitator::Facilitator, ledger::CreditLimit, payment::Window};

pub(super) type Classifier = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

pub(super) struct Config {
    pub(super) catalogue: Catalogue,
    pub(super) facilitators: Vec<Arc<dyn Facilitator>>,
    pub(super) limits: Limits,
    /// What may be owed for responses that were released before they were paid for.
    pub(super) credit: Option<CreditLimit>,
    /// Where payers are told what became of their payments.
    pub(super) status_url: Option<String>,
    pub(super) is_success: Classifier,
    pub(super) allow_upgrades: bool,
    pub(super) answer_preflights: bool,
    /// Whether payers may name their payments (the extension `payment-identifier`).
    pub(super) asks_for_ids: bool,
    /// What people are shown; `None` if they get what programs get.
    pub(super) page: Option<BrowserPage>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) in_progress: InProgress,
    pub(super) permits: Arc<Semaphore>,
    /// Places for payments that anybody could have made up: these must not take those of the proven ones.
    pub(super) unproven: WaitingLine,
    /// Places for requests that are read to be priced.
    pub(super) unpriced: Semaphore,
}

/// About how many payments the chain is asked at once whether they are genuine.
pub(super) const UNPROVEN: usize = 64;
/// How long others wait for that; about as long as the chain may take.
pub(super) const UNPROVEN_PATIENCE: Duration = Duration::from_secs(4);

/// Bounds of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) max_timeout: Duration,
    pub(super) handler_deadline: Duration,
    pub(super) settlement_margin: Duration,
    pub(super) clock_skew: Duration,
    pub(super) payment_header: usize,
    pub(super) request_body: usize,
    pub(super) body_deadline: Duration,
    pub(super) concurrent: usize,
    pub(super) wait: Duration,
    pub(super) attempts: u32,
    pub(super) anonymous_replays: u32,
    pub(super) anonymous_replay_age: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_timeout: Duration::from_secs(120),
            handler_deadline: Duration::from_secs(60),
            settlement_margin: Duration::from_secs(15),
            clock_skew: Duration::from_secs(30),
            payment_header: crate::protocol::MAX_PAYMENT_HEADER,
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
    /// How many copies of one payment may wait, so that nobody fills all places with one.
    pub(super) fn copies(&self) -> usize {
        (self.concurrent / 8).max(1)
    }

    /// How long after it was signed a payment that lasts as long as it may can still be presented, in seconds.
    pub(super) fn time_to_sign(&self) -> u64 {
        self.max_timeout.saturating_sub(self.handler_deadline + self.settlement_margin).as_secs()
    }

    pub(super) fn window(&self) -> Window {
        Window {
            remaining: (self.handler_deadline + self.settlement_margin).as_secs(),
            skew: self.clock_skew.as_secs(),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("catalogue", &self.catalogue)
            .field("facilitators", &self.facilitators)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
