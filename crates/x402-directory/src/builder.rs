//! The settings of a directory.

use std::{sync::Arc, time::Duration};

use tokio::sync::Semaphore;
use tower_x402::{Clock, SystemClock, server::RateLimit};

use super::{
    page::Pages,
    payment_check::PaymentChecker,
    service::{Ages, DirectoryService, Permits, Settings, Shared},
    store::{DirectoryStore, Limits},
};
use x402_market::{CardError, CardFetcher};

/// The settings of a [`DirectoryService`].
#[must_use]
pub struct DirectoryBuilder {
    settings: Settings,
    private_hosts: bool,
}

tower_x402::debug_fields!(DirectoryBuilder |this| { checkers: this.settings.checkers, limits: this.settings.limits });

impl DirectoryService {
    /// Starts the settings of a directory that uses this store.
    pub fn builder(store: DirectoryStore) -> DirectoryBuilder {
        const DAY: Duration = Duration::from_secs(86_400);
        let settings = Settings {
            store,
            checkers: Vec::new(),
            clock: Arc::new(SystemClock),
            limits: Limits {
                cards: 10_000,
                cards_per_host: 32,
                cards_per_payee: 8,
                reports: 1_000_000,
                reports_per_payer: 20_000,
                report_retention: 180 * DAY,
            },
            callers: RateLimit::new(10.0, 100.0),
            payers: RateLimit::new(5.0, 100.0),
            permits: Permits { cards: permits(64), reports: permits(64), reads: permits(32) },
            ages: Ages { refresh: Duration::from_secs(3_600), unlist: DAY, delete: 30 * DAY },
        };
        DirectoryBuilder { settings, private_hosts: false }
    }
}

impl DirectoryBuilder {
    /// Accepts reports about payments that this checker finds. Call it once for each network. Without a checker, cards are listed and
    /// no report is accepted.
    pub fn payment_checker(mut self, checker: PaymentChecker) -> Self {
        self.settings.checkers.push(checker);
        self
    }

    /// Sets whether cards are also fetched from hosts that are not public: this machine, or private networks. Default: `false`.
    ///
    /// Allow it for trials, or if everybody who can list a card can reach those hosts anyway. Otherwise anybody can make the directory
    /// send requests into its own network.
    pub fn private_hosts(self, allowed: bool) -> Self {
        Self { private_hosts: allowed, ..self }
    }

    /// Sets the clock. Default: the machine's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.settings.clock = clock;
        self
    }

    /// Sets how many cards are stored, in all and of one host. Default: 10,000 and 32.
    ///
    /// A further card replaces an unlisted one, or the one unseen for longest whose evaluator has no report. If there is none, it is
    /// refused. A host is a name, an IPv4 address or an IPv6 network of 64 bits.
    ///
    /// The limit of a host does not stop an attacker with a domain, which has any number of names. What does: evaluators without a paid
    /// report make room for others, and each payee has [few cards](Self::max_cards_per_payee).
    pub fn max_cards(mut self, cards: u64, per_host: u64) -> Self {
        (self.settings.limits.cards, self.settings.limits.cards_per_host) = (cards, per_host);
        self
    }

    /// Sets how many cards of one payee are stored, listed or not. Default: 8. Further ones are refused; stored ones may change.
    ///
    /// Cards with the same endpoint count as one, under however many URLs they are listed. The directory keeps the URL beside the
    /// endpoint (`…/.well-known/agent-card.json` beside `…/evaluate`), or else the shortest.
    ///
    /// Listed cards of a payee with a report do not make room for others. So this is how many places a single payment can hold.
    pub fn max_cards_per_payee(mut self, cards: u64) -> Self {
        self.settings.limits.cards_per_payee = cards;
        self
    }

    /// Sets how many reports are stored, in all and of one payer. Default: 1,000,000 and 20,000.
    ///
    /// Beyond the first limit, each further report replaces the oldest of the payer that has most reports, and no report of that payer about
    /// a payment that old is accepted any more. Beyond the second, further reports of the payer are refused.
    pub fn max_reports(mut self, reports: u64, per_payer: u64) -> Self {
        (self.settings.limits.reports, self.settings.limits.reports_per_payer) = (reports.max(1), per_payer);
        self
    }

    /// Sets how long reports are stored, from the time of the payment. Default: 180 days.
    pub fn report_retention(mut self, time: Duration) -> Self {
        self.settings.limits.report_retention = time;
        self
    }

    /// Sets how many requests a caller may make per second, and at once after a pause. Default: 10 and 100.
    ///
    /// A caller is an address, if the server in front puts a [`PeerAddress`](tower_x402::server::PeerAddress) into the
    /// request's extensions. All requests without one share one allowance.
    pub fn rate(mut self, per_second: f64, burst: f64) -> Self {
        self.settings.callers = RateLimit::new(per_second.max(0.001), burst);
        self
    }

    /// Sets how many reports a payer may send per second, and at once after a pause. Default: 5 and 100.
    pub fn payer_rate(mut self, per_second: f64, burst: f64) -> Self {
        self.settings.payers = RateLimit::new(per_second.max(0.001), burst);
        self
    }

    /// Sets how many requests to list a card are served at once, and separately how many reports. Default: 64 each. Further ones are
    /// answered 503.
    pub fn max_writes(mut self, requests: usize) -> Self {
        (self.settings.permits.cards, self.settings.permits.reports) = (permits(requests), permits(requests));
        self
    }

    /// Sets how many reading requests are served at once. Default: 32. Further ones are answered 503.
    pub fn max_reads(mut self, requests: usize) -> Self {
        self.settings.permits.reads = permits(requests);
        self
    }

    /// Sets how often [`upkeep`](DirectoryService::upkeep) fetches each card, and how long after a card was last seen it is unlisted and
    /// deleted. Default: 1 hour, 1 day and 30 days.
    pub fn card_ages(mut self, refresh: Duration, unlist: Duration, delete: Duration) -> Self {
        self.settings.ages = Ages { refresh, unlist, delete };
        self
    }

    /// Creates the service.
    ///
    /// # Errors
    /// [`CardError::Unreachable`] if the HTTP client cannot be created.
    pub fn build(self) -> Result<DirectoryService, CardError> {
        let fetcher = CardFetcher::new()?;
        let fetcher = if self.private_hosts { fetcher } else { fetcher.public_only() };
        let shared = Shared { settings: self.settings, fetcher, pages: Pages::default() };
        Ok(DirectoryService { shared: Arc::new(shared) })
    }
}

fn permits(permits: usize) -> Semaphore {
    Semaphore::new(permits.min(Semaphore::MAX_PERMITS))
}
