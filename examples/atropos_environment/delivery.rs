//! Hands groups to the Atropos server: each at most once, and not none unless nobody can know.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{Instant, sleep};
use tower_x402::atropos::{
    AtroposClient, AtroposError, EnvRegistration, Environment, GroupError, GroupLimits, ReceivedGroup, RunInfo,
};

use crate::{flags::Flags, scoring::Scored};

/// The longest sequence, in tokens, prompt included.
const MAX_TOKENS: u64 = 16_384;
/// How long to look whether a group has arrived after all.
const LOOKING: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(250);

/// What became of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivered {
    Pushed,
    EqualScores,
    Unjudged,
    TooLong,
    /// It was sent and there was no answer.
    Unsure,
}

/// A place in the run.
pub(crate) struct Delivery {
    client: AtroposClient,
    registration: EnvRegistration,
    environment: Environment,
    max_queue: u64,
    patience: Duration,
}

impl Delivery {
    /// Joins as soon as the trainer has begun.
    pub(crate) async fn join(flags: &Flags) -> anyhow::Result<Self> {
        let client = AtroposClient::new(flags.atropos_url.as_str()).context("--atropos-url")?;
        let registration = EnvRegistration::new("x402_word_problems", usize::from(flags.group_size), MAX_TOKENS);
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

    /// Waits until the trainer wants more; joins again if the server has forgotten us.
    pub(crate) async fn wait_for_room(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            match self.environment.wait_for_room(self.max_queue, self.patience).await {
                Ok(_) => return Ok(()),
                Err(AtroposError::UnknownEnvironment) => self.join_again().await?,
                // To ask does no harm, so that it may be asked until patience ends.
                Err(AtroposError::Unreachable(_) | AtroposError::Unanswered { .. })
                    if begun.elapsed() < self.patience =>
                {
                    sleep(PAUSE).await;
                }
                Err(error) => return Err(error).context("--atropos-url"),
            }
        }
    }

    /// Hands over a group that was never sent.
    pub(crate) async fn push(&mut self, scored: &Scored) -> anyhow::Result<Delivered> {
        let group = match scored.group(self.limits()) {
            Ok(Some(group)) => group,
            Ok(None) => return Ok(Delivered::Unjudged),
            Err(GroupError::EqualScores) => return Ok(Delivered::EqualScores),
            Err(GroupError::TooLong { .. }) => return Ok(Delivered::TooLong),
            Err(error) => return Err(error).context("a group could not be made"),
        };
        let begun = Instant::now();
        loop {
            match self.environment.push(&group).await {
                Ok(_) => return Ok(Delivered::Pushed),
                Err(error) if error.is_unknown() => return Ok(self.look(&scored.id).await),
                Err(AtroposError::UnknownEnvironment) => self.join_again().await?,
                // Nothing was sent.
                Err(AtroposError::Unreachable(_)) if begun.elapsed() < self.patience => sleep(PAUSE).await,
                Err(error) => return Err(error).context("--atropos-url"),
            }
        }
    }

    /// Hands over a group that an earlier process has perhaps sent, unless that may have arrived.
    ///
    /// The last group that the server got tells: if it is this one it has arrived, and if it is an earlier one of this run nothing came
    /// after that. Only where another environment was last nobody knows.
    pub(crate) async fn push_perhaps_again(&mut self, scored: &Scored, run: &str) -> anyhow::Result<Delivered> {
        let latest = self.client.latest_example().await.context("--atropos-url")?;
        match latest.as_ref().map(ReceivedGroup::id) {
            Some(Some(id)) if id == scored.id => Ok(Delivered::Pushed),
            None => self.push(scored).await,
            Some(Some(id)) if id.starts_with(run) => self.push(scored).await,
            Some(_) => Ok(Delivered::Unsure),
        }
    }

    /// How many batches were made, if the server says so.
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
