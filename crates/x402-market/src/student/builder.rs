//! How a student is made.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use tokio::sync::{Semaphore, watch};
use tower_x402::{
    Clock, Nonces, OsNonces, SystemClock,
    client::{Payer, PaymentMiddleware, RetryPolicy},
};

use super::{CardSource, Gold, Inner, Student, StudentError, desk::Desk, gold::Golds, purse::Purse, roster::Roster};
use crate::{
    CardFetcher, EvaluationClient, LONGEST_WAIT,
    evidence::{CallOutcome, EvidenceLog},
    selection::{Selector, Thompson},
};

/// How many records a log in memory keeps.
const RECORDS: usize = 100_000;

/// Settings of a [`Student`]; all have defaults but the payer.
#[must_use]
pub struct StudentBuilder {
    payer: Payer,
    sources: Vec<Arc<dyn CardSource>>,
    cards: Option<CardFetcher>,
    private_hosts: bool,
    selector: Option<Box<dyn Selector>>,
    evidence: Option<EvidenceLog>,
    heard: Option<EvidenceLog>,
    golds: Vec<Gold>,
    audit_rate: f64,
    tasks: u64,
    done: u64,
    panel: usize,
    replacements: usize,
    deadline: Duration,
    at_once: usize,
    max_evaluators: usize,
    card_ttl: Duration,
    clock: Arc<dyn Clock>,
    seed: Option<u64>,
}

impl StudentBuilder {
    pub(super) fn new(payer: Payer) -> Self {
        Self {
            payer,
            sources: Vec::new(),
            cards: None,
            private_hosts: false,
            selector: None,
            evidence: None,
            heard: None,
            golds: Vec::new(),
            audit_rate: 0.05,
            tasks: 1_000,
            done: 0,
            panel: 1,
            replacements: 2,
            deadline: Duration::from_secs(30),
            at_once: 64,
            max_evaluators: 1_000,
            card_ttl: Duration::from_secs(60),
            clock: Arc::new(SystemClock),
            seed: None,
        }
    }

    /// Where to hear of evaluators; may be called again for more. Earlier sources are heard first.
    ///
    /// Whoever a source names is asked for a card over HTTP. What a directory or a facilitator lists, strangers put there: those
    /// evaluators are refused if they are on this machine or in a private network
    /// ([`private_hosts`](Self::private_hosts)), but not those that are named by their URLs.
    pub fn source(mut self, source: impl CardSource) -> Self {
        self.sources.push(Arc::new(source));
        self
    }

    /// Fetches cards, with limits and payees that are known already ([`CardFetcher::pin`]); [`CardFetcher::new`] if not set. Of whoever
    /// cannot be hired nothing is remembered.
    pub fn card_fetcher(mut self, cards: CardFetcher) -> Self {
        self.cards = Some(cards);
        self
    }

    /// Whether evaluators that were named by strangers ([`CardSource::is_untrusted`]) may be on this machine and in private
    /// networks, too; not, if not set: a list that anybody can write to could send the student there. They are asked without the
    /// proxy from the environment then, which would resolve their names.
    pub fn private_hosts(mut self, may: bool) -> Self {
        self.private_hosts = may;
        self
    }

    /// Who chooses; [`Thompson`] if not set. Before anything else it is told what is in the log of evidence.
    pub fn selector(mut self, selector: impl Selector + 'static) -> Self {
        self.selector = Some(Box::new(selector));
        self
    }

    /// Where what evaluators do is recorded; in memory, if not set. With a log in a file, and a budget with its journal in one, nothing is
    /// forgotten when the process ends.
    pub fn evidence(mut self, log: EvidenceLog) -> Self {
        self.evidence = Some(log);
        self
    }

    /// Where what others say is recorded ([`Student::add_report`]); in memory, if not set. It is a log of its own, so that no number of
    /// voices makes one's own observations be forgotten.
    pub fn reports(mut self, log: EvidenceLog) -> Self {
        self.heard = Some(log);
        self
    }

    /// A task whose truth is known, to be hidden among the others; may be called again for more.
    pub fn gold(mut self, gold: Gold) -> Self {
        self.golds.push(gold);
        self
    }

    /// The share of submissions before which a hidden task is judged, if there is one for the skill, from 0 to 1; 0.05 if not set. It
    /// takes at most half of what is left.
    pub fn audit_rate(mut self, share: f64) -> Self {
        self.audit_rate = if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) };
        self
    }

    /// Over how many submissions the budget is paced; 1,000 if not set. Any further one may cost what is left.
    pub fn tasks(mut self, tasks: u64) -> Self {
        self.tasks = tasks;
        self
    }

    /// How many of them were done before, by an earlier process ([`SpendingReport::tasks`](super::SpendingReport::tasks)); none, if not set.
    pub fn tasks_done(mut self, tasks: u64) -> Self {
        self.done = tasks;
        self
    }

    /// How many evaluators are wanted for each submission, at least one; one, if not set.
    pub fn panel_size(mut self, seats: usize) -> Self {
        self.panel = seats.max(1);
        self
    }

    /// How many may be hired for a submission in place of those who failed; two, if not set.
    pub fn max_replacements(mut self, evaluators: usize) -> Self {
        self.replacements = evaluators;
        self
    }

    /// How long a submission may take, a day at most; 30 seconds if not set. Who has not answered by then has failed.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline.min(LONGEST_WAIT);
        self
    }

    /// How many evaluators are asked at the same time, at least one; 64, if not set.
    pub fn max_concurrent_calls(mut self, evaluators: usize) -> Self {
        self.at_once = evaluators.clamp(1, Semaphore::MAX_PERMITS);
        self
    }

    /// How many evaluators are remembered; 1,000 if not set. Beyond that, a newcomer gets the place of one whose card is gone or no longer
    /// to be believed. A selector may look at fewer.
    pub fn max_evaluators(mut self, evaluators: usize) -> Self {
        self.max_evaluators = evaluators;
        self
    }

    /// How often a card is fetched again to see whether what looks like a lie is a change of terms; every 60 seconds at most, if not
    /// set, per evaluator.
    pub fn card_recheck_interval(mut self, ttl: Duration) -> Self {
        self.card_ttl = ttl;
        self
    }

    /// Where the time comes from.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// What chance depends on: which submissions are audited, and by what. From the operating system, if not set.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The student, which knows no evaluators yet: have it [discover](Student::discover) some.
    ///
    /// # Errors
    /// [`StudentError::Http`] if no HTTP client could be made, [`StudentError::Randomness`].
    pub fn build(self) -> Result<Student, StudentError> {
        let seed = match self.seed {
            Some(seed) => seed,
            None => {
                let nonce = OsNonces.next().map_err(|_| StudentError::Randomness)?;
                u64::from_be_bytes(nonce[..8].try_into().unwrap_or_default())
            }
        };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let payments = PaymentMiddleware::new(self.payer.clone())
            .retry(RetryPolicy::default().max_attempts(3).attempt_timeout(self.deadline));
        let http = |_| StudentError::Http;
        let patient = |client: EvaluationClient| client.ask_timeout(self.deadline).answer_timeout(self.deadline);
        let is_untrusted = |source: &Arc<dyn CardSource>| !self.private_hosts && source.is_untrusted();
        let sources: Vec<_> = self.sources.iter().map(|source| (source.clone(), is_untrusted(source))).collect();
        let public_client = match sources.iter().any(|(_, strangers)| *strangers) {
            true => Some(EvaluationClient::public_only(payments.clone()).map(patient).map_err(http)?),
            false => None,
        };
        let client = EvaluationClient::with(payments).map(patient).map_err(http)?;
        let cards = match self.cards {
            Some(cards) => cards,
            None => CardFetcher::new().map_err(|_| StudentError::Http)?,
        };
        let evidence = self.evidence.unwrap_or_else(|| EvidenceLog::in_memory(RECORDS));
        let heard = self.heard.unwrap_or_else(|| EvidenceLog::in_memory(RECORDS));
        let selector = self.selector.unwrap_or_else(|| Box::new(Thompson::seeded(rng.random())));
        let golds = Golds::new(self.golds, &mut rng);
        let purse = Purse::new(self.payer.budget().clone());
        let audit_rate = if golds.is_empty() { 0.0 } else { self.audit_rate };
        let roster = Roster::new(self.max_evaluators);
        let mut desk = Desk::new(selector, roster, purse, golds, rng, (self.tasks, audit_rate));
        desk.ledger.tasks = self.done;
        recall(&mut desk, &evidence, &self.payer);
        hear(&mut desk, &heard, &self.payer);
        let inner = Inner {
            client,
            public_client,
            cards,
            evidence,
            heard,
            sources,
            clock: self.clock,
            seats: self.panel,
            replacements: self.replacements,
            deadline: self.deadline,
            card_ttl: self.card_ttl.as_secs(),
            max_named: self.max_evaluators.saturating_mul(2),
            permits: Semaphore::new(self.at_once),
            calls: Arc::new(watch::Sender::new(0)),
            desk: Mutex::new(desk),
            payer: self.payer,
        };
        Ok(Student(Arc::new(inner)))
    }
}

/// Takes in what others said of the skills that there was work for; the rest is heard when there is.
fn hear(desk: &mut Desk, heard: &EvidenceLog, payer: &Payer) {
    heard.for_each(|evidence| {
        let speaker = evidence.payment.map(|payment| payment.payer).filter(|speaker| *speaker != payer.address());
        if let (Some(speaker), Some(skill)) = (speaker, desk.skills.get(&evidence.skill)) {
            desk.selector.learn_report(speaker, &evidence.observation(skill));
        }
    });
}

/// Takes in what is on record.
fn recall(desk: &mut Desk, evidence: &EvidenceLog, payer: &Payer) {
    let own = payer.address();
    // Others' records are about skills that there may be no work for; they must not fill the table.
    evidence.for_each(|evidence| {
        if evidence.payment.is_none_or(|payment| payment.payer == own) {
            desk.skills.insert(&evidence.skill);
        }
    });
    desk.selector.restore(evidence, &[own], &desk.skills);
    evidence.for_each(|evidence| {
        let is_own = evidence.payment.is_none_or(|payment| payment.payer == own);
        let Some(skill) = desk.skills.get(&evidence.skill).filter(|_| is_own) else { return };
        desk.ledger.recall(evidence, skill);
        if let CallOutcome::Answered { score, confidence: Some(confidence), .. } = evidence.outcome {
            desk.norms.learn(evidence.evaluator, skill, score, confidence);
        }
    });
}

impl fmt::Debug for StudentBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StudentBuilder").field("payer", &self.payer).field("panel", &self.panel).finish_non_exhaustive()
    }
}
