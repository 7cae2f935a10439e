//! The settings of a student.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_signer::Signer;
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use tokio::sync::{Semaphore, watch};
use tower_x402::{
    Clock, Nonces, OsNonces, SystemClock,
    client::{Payer, PaymentMiddleware, RetryPolicy},
};

use super::{
    CardSource, Inner, Student, StudentError,
    known::KnownEvaluators,
    spending::{AvailableBudget, SpendingRecords},
    state::State,
};
use crate::{
    CardFetcher, EvaluationClient, LONGEST_WAIT,
    evidence::EvidenceLog,
    selection::{Selector, Skills, Thompson},
};

/// How many records a log in memory keeps.
const RECORDS_IN_MEMORY: usize = 100_000;

/// How many evaluators are asked at the same time.
const MAX_CONCURRENT_CALLS: usize = 64;

/// A builder of a [`Student`]. All settings but the payer have defaults.
#[must_use]
pub struct StudentBuilder {
    payer: Payer,
    sources: Vec<Arc<dyn CardSource>>,
    card_fetcher: Option<CardFetcher>,
    private_hosts: bool,
    selector: Option<Box<dyn Selector>>,
    evidence: EvidenceLog,
    reports: EvidenceLog,
    tasks: u64,
    tasks_done: u64,
    panel_size: usize,
    max_replacements: usize,
    deadline: Duration,
    max_evaluators: usize,
    clock: Arc<dyn Clock>,
    seed: Option<u64>,
    teacher: Option<Arc<dyn Signer + Send + Sync>>,
}

impl Student {
    /// Creates a builder. Evaluators are paid from `payer`'s budget.
    pub fn builder(payer: Payer) -> StudentBuilder {
        StudentBuilder {
            payer,
            sources: Vec::new(),
            card_fetcher: None,
            private_hosts: false,
            selector: None,
            evidence: EvidenceLog::in_memory(RECORDS_IN_MEMORY),
            reports: EvidenceLog::in_memory(RECORDS_IN_MEMORY),
            tasks: 1_000,
            tasks_done: 0,
            panel_size: 1,
            max_replacements: 2,
            deadline: Duration::from_secs(30),
            max_evaluators: 1_000,
            clock: Arc::new(SystemClock),
            seed: None,
            teacher: None,
        }
    }
}

impl StudentBuilder {
    /// Adds a source of evaluators. Evaluators of earlier sources come first.
    ///
    /// The student fetches the card of every URL that a source names. Anybody can add URLs to a directory or a facilitator's list, so
    /// those evaluators are refused on this machine and in private networks, unless [`private_hosts`](Self::private_hosts) is set.
    pub fn source(mut self, source: impl CardSource) -> Self {
        self.sources.push(Arc::new(source));
        self
    }

    /// Sets the card fetcher, with its limits and [pinned payees](CardFetcher::pin). Default: [`CardFetcher::new`].
    pub fn card_fetcher(self, cards: CardFetcher) -> Self {
        Self { card_fetcher: Some(cards), ..self }
    }

    /// Allows evaluators of [untrusted sources](CardSource::is_untrusted) on this machine and in private networks. Default: `false`,
    /// because a list that anybody can write to could direct the student's requests there.
    ///
    /// Without it, evaluators of untrusted sources are not asked through a proxy from the environment, which would resolve their names.
    pub fn private_hosts(self, allowed: bool) -> Self {
        Self { private_hosts: allowed, ..self }
    }

    /// Sets the selector, which chooses evaluators. Default: [`Thompson`]. It first learns what is in the evidence log.
    pub fn selector(self, selector: impl Selector + 'static) -> Self {
        Self { selector: Some(Box::new(selector)), ..self }
    }

    /// Sets the log of what evaluators did. Default: one in memory.
    ///
    /// With a log in a file, and a budget with its journal in another, a student can be restarted without losing what it knows.
    pub fn evidence(self, log: EvidenceLog) -> Self {
        Self { evidence: log, ..self }
    }

    /// Sets the log of other payers' [reports](Student::add_report). Default: one in memory. It is a log of its own, so that reports cannot
    /// displace the student's own evidence.
    pub fn reports(self, log: EvidenceLog) -> Self {
        Self { reports: log, ..self }
    }

    /// Sets the number of submissions over which the budget is paced. Default: 1,000. Any further submission may cost what remains.
    pub fn tasks(self, tasks: u64) -> Self {
        Self { tasks, ..self }
    }

    /// Sets how many of these submissions an earlier process has done: its [`SpendingReport::tasks`](super::SpendingReport::tasks).
    /// Default: 0.
    pub fn tasks_done(self, tasks: u64) -> Self {
        Self { tasks_done: tasks, ..self }
    }

    /// Sets how many evaluators are wanted for each submission, at least 1. Default: 1.
    pub fn panel_size(self, evaluators: usize) -> Self {
        Self { panel_size: evaluators.max(1), ..self }
    }

    /// Sets how many failed evaluators of a submission are replaced. Default: 2.
    pub fn max_replacements(self, evaluators: usize) -> Self {
        Self { max_replacements: evaluators, ..self }
    }

    /// Sets how long a submission may take, at most a day. Default: 30 seconds. An evaluator that has not answered by then has failed.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline: deadline.min(LONGEST_WAIT), ..self }
    }

    /// Sets how many evaluators are known at most. Default: 1,000. Beyond that, a new one replaces one without a valid card. The selector
    /// may consider fewer.
    pub fn max_evaluators(self, evaluators: usize) -> Self {
        Self { max_evaluators: evaluators, ..self }
    }

    /// Sets the clock. Default: the system's.
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// Sets the seed of all random choices: the order in which anchors are mixed in, and those of the default selector. Default: from the
    /// operating system.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Allows lessons: after an audit, evaluators that take them are told which of the outputs that they judged are good, apart from anchors.
    /// `signer` is the payer's key. Default: they are told nothing.
    ///
    /// Lessons make evaluators that learn better, for everybody. They also show evaluators, after the fact, which submissions were audited,
    /// and what the truth is: allow them only if both may be known.
    pub fn teach(self, signer: impl Signer + Send + Sync + 'static) -> Self {
        Self { teacher: Some(Arc::new(signer)), ..self }
    }

    /// Builds the student. It knows no evaluators yet: call [`discover`](Student::discover).
    ///
    /// # Errors
    /// [`StudentError::Http`] if no HTTP client could be created, [`StudentError::Randomness`] if there is no seed.
    pub fn build(self) -> Result<Student, StudentError> {
        let random = || OsNonces.next().map(|nonce| u64::from_be_bytes(nonce[..8].try_into().unwrap_or_default()));
        let seed = self.seed.map_or_else(random, Ok).map_err(|_| StudentError::Randomness)?;
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let payments = PaymentMiddleware::new(self.payer.clone())
            .retry(RetryPolicy::default().max_attempts(3).attempt_timeout(self.deadline));
        let with_deadline = |client: EvaluationClient| client.ask_timeout(self.deadline).answer_timeout(self.deadline);
        let must_be_public = |source: &Arc<dyn CardSource>| !self.private_hosts && source.is_untrusted();
        let sources: Vec<_> = self.sources.iter().map(|source| (source.clone(), must_be_public(source))).collect();
        let needs_public = sources.iter().any(|(_, must_be_public)| *must_be_public);
        let public_client = needs_public.then(|| EvaluationClient::public_only(payments.clone())).transpose();
        let public_client = public_client.map_err(|_| StudentError::Http)?;
        let client = EvaluationClient::with(payments).map_err(|_| StudentError::Http)?;
        let cards = self.card_fetcher.map_or_else(CardFetcher::new, Ok).map_err(|_| StudentError::Http)?;
        let selector = self.selector.unwrap_or_else(|| Box::new(Thompson::seeded(rng.random())));
        let mut state = State {
            selector,
            skills: Skills::default(),
            evaluators: KnownEvaluators::new(self.max_evaluators),
            available: AvailableBudget::new(self.payer.budget().clone()),
            spending: SpendingRecords::new(self.tasks_done),
            rng,
            tasks: self.tasks,
            calls: HashMap::new(),
            next_call: 0,
        };
        state.restore(&self.evidence, &self.reports, self.payer.address());
        Ok(Student(Arc::new(Inner {
            client: with_deadline(client),
            public_client: public_client.map(with_deadline),
            cards,
            evidence: self.evidence,
            reports: self.reports,
            sources,
            clock: self.clock,
            panel_size: self.panel_size,
            max_replacements: self.max_replacements,
            deadline: self.deadline,
            max_named: self.max_evaluators.saturating_mul(2),
            permits: Semaphore::new(MAX_CONCURRENT_CALLS),
            calls: Arc::new(watch::Sender::new(0)),
            state: Mutex::new(state),
            payer: self.payer,
            teacher: self.teacher,
        })))
    }
}

tower_x402::debug_fields!(StudentBuilder { payer, panel_size });
