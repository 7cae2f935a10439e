//! Settings of a directory.

use std::{sync::Arc, time::Duration};

use tokio::sync::Semaphore;
use tower_x402::{Clock, SystemClock, facilitator::service::RateLimit};

use super::{
    service::{DirectoryService, Places, Shared},
    store::{DirectoryStore, Limits},
    witness::Witness,
};
use crate::{CardError, CardFetcher};

/// Settings of a [`DirectoryService`].
#[derive(Debug)]
#[must_use]
pub struct DirectoryBuilder {
    store: DirectoryStore,
    witnesses: Vec<Witness>,
    private_hosts: bool,
    clock: Arc<dyn Clock>,
    limits: Limits,
    rate: (f64, f64),
    payer_rate: (f64, f64),
    at_once: usize,
    reads_at_once: usize,
    ages: Ages,
}

/// What happens to cards that do not answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ages {
    /// How often a card is asked for.
    pub(super) refresh: Duration,
    /// How long it may be missed before it is not listed any more.
    pub(super) unlist: Duration,
    /// And before it is forgotten.
    pub(super) forget: Duration,
}

impl DirectoryBuilder {
    pub(super) fn new(store: DirectoryStore) -> Self {
        const DAY: Duration = Duration::from_secs(86_400);
        Self {
            store,
            witnesses: Vec::new(),
            private_hosts: false,
            clock: Arc::new(SystemClock),
            limits: Limits {
                cards: 10_000,
                cards_per_host: 32,
                cards_per_payee: 8,
                voices: 1_000_000,
                voices_per_payer: 20_000,
                voices_for: 180 * DAY,
            },
            rate: (10.0, 100.0),
            payer_rate: (5.0, 100.0),
            at_once: 64,
            reads_at_once: 32,
            ages: Ages { refresh: Duration::from_secs(3_600), unlist: DAY, forget: 30 * DAY },
        }
    }

    /// Admits evidence about payments that this witness finds. Call it again for other networks; without any, cards are listed and
    /// no evidence is admitted.
    pub fn witness(mut self, witness: Witness) -> Self {
        self.witnesses.push(witness);
        self
    }

    /// Fetches cards from hosts that are not everybody's, too: of this machine, or of private networks. For trying it out, or where
    /// everybody who can list a card may reach these anyway; otherwise anyone can have the directory look around in there.
    pub fn private_hosts(mut self, allowed: bool) -> Self {
        self.private_hosts = allowed;
        self
    }

    /// Where the time comes from; the machine's clock unless set.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// How many cards are kept, and of one host; 10,000 and 32 unless set. A further one takes the place of one that is not listed any
    /// more or of the longest unseen one of whose evaluator nobody has spoken; if there is none it is refused.
    ///
    /// A host is a name, an IPv4 address or an IPv6 network of 64 bits. Whoever owns a domain has as many names below it as it likes, so
    /// this keeps nobody out who means it: what does is that evaluators nobody has paid make room for others, and that each payee has
    /// [only so many cards](Self::max_cards_per_payee).
    pub fn max_cards(mut self, cards: u64, per_host: u64) -> Self {
        (self.limits.cards, self.limits.cards_per_host) = (cards, per_host);
        self
    }

    /// How many cards of one payee are kept, with different endpoints and listed or not; 8 unless set. Further ones are refused; those that
    /// are known may still change.
    ///
    /// Cards with the same endpoint are one, whoever lists how many URLs that show it: it is listed by the URL beside its endpoint
    /// (`…/.well-known/agent-card.json` beside `…/evaluate`) or, if that is not known, by the shortest.
    ///
    /// Once somebody has spoken of a payee, none of its cards that are listed makes room for others. This is how many places one payment
    /// can hold.
    pub fn max_cards_per_payee(mut self, cards: u64) -> Self {
        self.limits.cards_per_payee = cards;
        self
    }

    /// How many voices are kept, and of one payer; 1,000,000 and 20,000 unless set. Beyond the first, those about the oldest payments
    /// make room, and payments that old have no voice any more; beyond the second, the payer's are refused.
    pub fn max_voices(mut self, voices: u64, per_payer: u64) -> Self {
        (self.limits.voices, self.limits.voices_per_payer) = (voices.max(1), per_payer);
        self
    }

    /// How long voices are kept, from the time of the payment; 180 days unless set.
    pub fn voices_for(mut self, time: Duration) -> Self {
        self.limits.voices_for = time;
        self
    }

    /// How many requests a caller may make per second, and at once after a pause; 10 and 100 unless set. A caller is an address, where
    /// the server in front puts a [`PeerAddress`](tower_x402::facilitator::service::PeerAddress) into the request's extensions; all
    /// others share one allowance.
    pub fn rate(mut self, per_second: f64, burst: f64) -> Self {
        self.rate = (per_second, burst);
        self
    }

    /// How many voices a payer may send per second, and at once after a pause; 5 and 100 unless set.
    pub fn payer_rate(mut self, per_second: f64, burst: f64) -> Self {
        self.payer_rate = (per_second, burst);
        self
    }

    /// How many cards may be fetched at once for those who want to be listed, and how many voices be looked at besides; 64 each unless
    /// set. The others are told to come again.
    pub fn at_once(mut self, requests: usize) -> Self {
        self.at_once = requests;
        self
    }

    /// How many readers may be answered at once; 32 unless set. The others are told to come again.
    pub fn reads_at_once(mut self, requests: usize) -> Self {
        self.reads_at_once = requests;
        self
    }

    /// How often [`upkeep`](DirectoryService::upkeep) asks for each card, how long one may be missed before it is not listed any more, and
    /// before it is forgotten; an hour, a day and thirty days unless set.
    pub fn card_ages(mut self, refresh: Duration, unlist: Duration, forget: Duration) -> Self {
        self.ages = Ages { refresh, unlist, forget };
        self
    }

    /// Makes the service.
    ///
    /// # Errors
    /// [`CardError::Unreachable`] if no HTTP client could be made.
    pub fn build(self) -> Result<DirectoryService, CardError> {
        let fetcher = CardFetcher::new()?;
        let fetcher = if self.private_hosts { fetcher } else { fetcher.public_only()? };
        let limit = |(per_second, burst): (f64, f64)| RateLimit::new(per_second.max(0.001), burst);
        let places = |places: usize| Semaphore::new(places.min(Semaphore::MAX_PERMITS));
        Ok(DirectoryService::of(Shared {
            store: self.store,
            witnesses: self.witnesses,
            fetcher,
            clock: self.clock,
            limits: self.limits,
            ages: self.ages,
            callers: limit(self.rate),
            payers: limit(self.payer_rate),
            places: Places {
                cards: places(self.at_once),
                voices: places(self.at_once),
                reads: places(self.reads_at_once),
            },
        }))
    }
}
