//! Delivers groups to the Atropos server, each at most once.

use std::time::Duration;

use anyhow::Context as _;
use atropos_client::{
    AtroposClient, AtroposError, EnvRegistration, Environment, GroupError, GroupLimits, ReceivedGroup, RunInfo,
};
use tokio::time::{Instant, sleep};

use crate::{
    flags::{Flags, Tasks},
    scoring::Scored,
};

/// The longest sequence, in tokens, including the prompt.
const MAX_TOKENS: u64 = 16_384;
/// How long to check whether a group arrived after all.
const LOOKING: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(250);
/// How often to check whether the trainer took a batch.
const LOOK: Duration = Duration::from_millis(500);
/// The longest pause between two attempts. Pauses double.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// The outcome of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivered {
    Pushed,
    EqualScores,
    Unjudged,
    TooLong,
    /// The group was sent and not answered.
    Unsure,
}

/// An environment that joined the run.
pub(crate) struct Delivery {
    client: AtroposClient,
    registration: EnvRegistration,
    environment: Environment,
    max_queue: u64,
    patience: Duration,
}

impl Delivery {
    /// Joins as soon as the trainer has started.
    pub(crate) async fn join(flags: &Flags) -> anyhow::Result<Self> {
        let client = AtroposClient::new(flags.atropos_url.as_str()).context("--atropos-url")?;
        let name = if flags.tasks == Tasks::Code { "x402_programs" } else { "x402_word_problems" };
        let registration = EnvRegistration::new(name, usize::from(flags.group_size), MAX_TOKENS);
        let patience = Duration::from_secs(flags.patience);
        let environment = client.register_env(&registration, patience).await.context("--atropos-url")?;
        Ok(Self { client, registration, environment, max_queue: flags.max_queue, patience })
    }

    pub(crate) const fn environment(&self) -> &Environment {
        &self.environment
    }

    pub(crate) const fn limits(&self) -> &GroupLimits {
        self.environment.limits()
    }

    pub(crate) const fn info(&self) -> &RunInfo {
        self.environment.info()
    }

    /// Waits until the trainer wants more. Joins again if the server has forgotten this environment.
    pub(crate) async fn wait_for_room(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut retry = Retry::new(self.patience);
        loop {
            match self.environment.wait_for_room(self.max_queue, Duration::ZERO).await {
                Ok(_) => return Ok(()),
                Err(AtroposError::QueueFull { .. }) if begun.elapsed() < self.patience => {
                    retry = Retry::new(self.patience);
                    sleep(LOOK).await;
                }
                Err(AtroposError::UnknownEnvironment) => self.join_again().await?,
                // Asking changes nothing, so it may be repeated.
                Err(error) if error.is_unknown() || error.is_not_sent() => retry.after(error).await?,
                Err(error) => return Err(error).context("--atropos-url"),
            }
        }
    }

    /// Delivers a group that was never sent. If this fails, it was not sent.
    pub(crate) async fn push(&mut self, scored: &Scored) -> anyhow::Result<Delivered> {
        let group = match scored.group(self.limits()) {
            Ok(Some(group)) => group,
            // Verdicts on identical answers are not bought.
            Ok(None) if scored.is_uniform() => return Ok(Delivered::EqualScores),
            Ok(None) => return Ok(Delivered::Unjudged),
            Err(GroupError::EqualScores) => return Ok(Delivered::EqualScores),
            Err(GroupError::TooLong { .. }) => return Ok(Delivered::TooLong),
            Err(error) => return Err(error).context("a group could not be made"),
        };
        let mut retry = Retry::new(self.patience);
        loop {
            match self.environment.push(&group).await {
                Ok(_) => return Ok(Delivered::Pushed),
                Err(error) if error.is_unknown() => return Ok(self.look(&scored.id).await),
                Err(AtroposError::UnknownEnvironment) => self.join_again().await?,
                Err(error) if error.is_not_sent() => retry.after(error).await?,
                Err(error) => return Err(error).context("--atropos-url"),
            }
        }
    }

    /// Delivers a group that an earlier process may have sent, unless it may have arrived.
    ///
    /// The server tells the last group that it received. If that is this one, it arrived. If it is an earlier one of this run, nothing
    /// came after it. If it is another environment's, or there is none (the server may have restarted), the outcome is unknown. A
    /// request that arrives more than [`LOOKING`] after its sender ended would not be noticed.
    pub(crate) async fn push_perhaps_again(&mut self, scored: &Scored, run: &str) -> anyhow::Result<Delivered> {
        // The other process's request may still be in transit.
        if self.look(&scored.id).await == Delivered::Pushed {
            return Ok(Delivered::Pushed);
        }
        let mut retry = Retry::new(self.patience);
        let latest = loop {
            match self.client.latest_example().await {
                Ok(latest) => break latest,
                Err(error) if error.is_unknown() || error.is_not_sent() => retry.after(error).await?,
                Err(error) => return Err(error).context("--atropos-url"),
            }
        };
        match latest.as_ref().and_then(ReceivedGroup::id) {
            Some(id) if id == scored.id => Ok(Delivered::Pushed),
            Some(id) if id.starts_with(run) => self.push(scored).await,
            _ => Ok(Delivered::Unsure),
        }
    }

    /// Returns the trainer's step, if the server tells it.
    pub(crate) async fn step(&self) -> Option<u64> {
        self.client.status().await.ok().map(|status| status.current_step)
    }

    pub(crate) async fn leave(&self) -> anyhow::Result<()> {
        match self.environment.disconnect().await {
            Ok(()) | Err(AtroposError::UnknownEnvironment) => Ok(()),
            Err(error) => Err(error).context("--atropos-url"),
        }
    }

    async fn look(&self, id: &str) -> Delivered {
        let until = Instant::now() + LOOKING;
        while Instant::now() < until {
            if self.environment.is_latest(id).await.unwrap_or(false) {
                return Delivered::Pushed;
            }
            sleep(PAUSE).await;
        }
        Delivered::Unsure
    }

    async fn join_again(&mut self) -> anyhow::Result<()> {
        eprintln!("the Atropos server has forgotten this environment; joining again");
        self.environment =
            self.client.register_env(&self.registration, self.patience).await.context("--atropos-url")?;
        Ok(())
    }
}

/// Paces attempts until a time limit.
struct Retry {
    until: Instant,
    pause: Duration,
}

impl Retry {
    fn new(patience: Duration) -> Self {
        Self { until: Instant::now() + patience, pause: PAUSE }
    }

    /// Waits before the next attempt, or returns the error when time is up.
    async fn after(&mut self, error: AtroposError) -> anyhow::Result<()> {
        if Instant::now() + self.pause > self.until {
            return Err(error).context("--atropos-url");
        }
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }
}
