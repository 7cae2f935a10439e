//! The environment: joins a run and pushes groups.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, sleep_until};

use super::{AtroposClient, AtroposError, GroupLimits, RunInfo, ScoredGroup};

/// The interval at which the server is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const SCORED_DATA: &str = "scored_data";
const SCORED_DATA_LIST: &str = "scored_data_list";

/// The registration of an environment.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EnvRegistration {
    /// The longest sequence that it makes, in tokens.
    pub max_token_length: u64,
    /// Its name, to which the server adds a number.
    pub desired_name: String,
    /// Its share of the batches, relative to the weights of other environments.
    pub weight: f64,
    /// The number of sequences per group. It must divide the size of a batch.
    pub group_size: usize,
    /// The least share of each batch that comes from it, 0 to 1. Batches wait for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_batch_allocation: Option<f64>,
}

impl EnvRegistration {
    /// Creates a registration of weight 1, for groups of `group_size` sequences of less than `max_token_length` tokens.
    pub fn new(name: impl Into<String>, group_size: usize, max_token_length: u64) -> Self {
        let desired_name = name.into();
        Self { max_token_length, desired_name, weight: 1.0, group_size, min_batch_allocation: None }
    }
}

/// An environment that has joined a run.
///
/// Call [`disconnect`](Self::disconnect) at the end. Dropping it does not tell the server.
#[derive(Debug)]
pub struct Environment {
    client: AtroposClient,
    id: u64,
    name: String,
    limits: GroupLimits,
    info: RunInfo,
    starting_step: u64,
    num_steps: u64,
}

/// The status of the run, for an environment.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct EnvStatus {
    /// The number of batches so far, counted from the starting step.
    pub current_step: u64,
    /// The number of groups in the queue, of this environment and of others that may be taken before its own.
    pub queue_size: u64,
    /// The number of its own groups in the queue.
    #[serde(default)]
    pub self_queue_size: u64,
    /// The share of batches that is not allocated to an environment.
    #[serde(default)]
    pub unallocated_fraction: f64,
    /// The largest group in the queue.
    #[serde(default)]
    pub max_group_size: u64,
    /// The weight of this environment.
    pub env_weight: f64,
}

/// The result of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pushed {
    /// The group is in the queue.
    Received,
    /// The group has another size than registered, and waits to be joined with others.
    Buffered {
        /// The number of sequences that wait.
        sequences: u64,
    },
}

impl AtroposClient {
    /// Joins the run, after waiting up to `patience` for the server and for the trainer to start. Dropping the future stops waiting.
    ///
    /// # Errors
    /// [`AtroposError::NotStarted`], [`AtroposError::Unreachable`] or [`AtroposError::NotSent`] when `patience` ends; [`AtroposError::GroupSize`] if
    /// the trainer's batches cannot be filled with such groups. After an error that [`is_unknown`](AtroposError::is_unknown) the server
    /// may count an environment that delivers nothing; with a `min_batch_allocation` its batches would wait for it.
    pub async fn register_env(
        &self,
        environment: &EnvRegistration,
        patience: Duration,
    ) -> Result<Environment, AtroposError> {
        // Without a deadline if `patience` is too long for an `Instant`.
        let deadline = Instant::now().checked_add(patience);
        loop {
            let late = match self.try_register_env(environment).await {
                Ok(Some(joined)) => return Ok(joined),
                Ok(None) => AtroposError::NotStarted(patience),
                Err(error) if error.is_not_sent() => error,
                Err(error) => return Err(error),
            };
            let next = Instant::now() + POLL_INTERVAL;
            if deadline.is_some_and(|deadline| next > deadline) {
                return Err(late);
            }
            sleep_until(next).await;
        }
    }

    /// Joins the run, or returns `None` if the trainer has not started.
    ///
    /// # Errors
    /// Those of [`register_env`](Self::register_env).
    pub async fn try_register_env(&self, environment: &EnvRegistration) -> Result<Option<Environment>, AtroposError> {
        #[derive(Deserialize)]
        #[serde(tag = "status")]
        enum Answer {
            #[serde(rename = "success")]
            Success { env_id: u64, wandb_name: String, starting_step: u64, num_steps: u64 },
            #[serde(rename = "wait for trainer to start")]
            Wait {},
        }
        // Checked first, so that the server does not count an environment that can never fill a batch.
        let Some(info) = self.info().await.map_err(AtroposError::before)? else { return Ok(None) };
        let group_size = environment.group_size;
        if group_size == 0 || info.batch_size % group_size as u64 != 0 {
            return Err(AtroposError::GroupSize { group_size, batch_size: info.batch_size });
        }
        match self.post("register-env", environment).await? {
            Answer::Wait {} => Ok(None),
            Answer::Success { env_id, wandb_name, starting_step, num_steps } => {
                let max_token_len = environment.max_token_length.min(info.max_token_len);
                Ok(Some(Environment {
                    client: self.clone(),
                    id: env_id,
                    name: wandb_name,
                    limits: GroupLimits { group_size, max_token_len },
                    info,
                    starting_step,
                    num_steps,
                }))
            }
        }
    }
}

#[derive(Serialize)]
struct Identified {
    env_id: u64,
}

#[derive(Serialize)]
struct Push<'a> {
    #[serde(flatten)]
    group: &'a ScoredGroup,
    env_id: u64,
}

impl Environment {
    /// Returns its id on the server, a number counted from 0.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Returns its name in Weights & Biases.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limits on its groups.
    pub const fn limits(&self) -> &GroupLimits {
        &self.limits
    }

    /// Returns the description of the run.
    pub const fn info(&self) -> &RunInfo {
        &self.info
    }

    /// Returns the step of the run when it joined.
    pub const fn starting_step(&self) -> u64 {
        self.starting_step
    }

    /// Returns the number of steps of the run.
    pub const fn num_steps(&self) -> u64 {
        self.num_steps
    }

    /// Returns the status of the run. Do not call it after [`disconnect`](Self::disconnect): the server divides by the weights of
    /// connected environments.
    ///
    /// # Errors
    /// [`AtroposError::UnknownEnvironment`] if the server has restarted, and other errors.
    pub async fn status(&self) -> Result<EnvStatus, AtroposError> {
        match self.client.get_with("status-env", &Identified { env_id: self.id }).await {
            // The server fails with 500 if it does not have the environment.
            Err(AtroposError::Failed { status: 500, .. }) => Err(AtroposError::UnknownEnvironment),
            other => other,
        }
    }

    /// Waits up to `patience` until the queue has fewer than `groups` groups. Dropping the future stops waiting.
    ///
    /// # Errors
    /// [`AtroposError::QueueFull`] when `patience` ends, and those of [`status`](Self::status).
    pub async fn wait_for_room(&self, groups: u64, patience: Duration) -> Result<EnvStatus, AtroposError> {
        let begun = Instant::now();
        loop {
            let status = self.status().await?;
            if status.queue_size < groups {
                return Ok(status);
            }
            if begun.elapsed() + POLL_INTERVAL > patience {
                return Err(AtroposError::QueueFull { queued: status.queue_size, waited: begun.elapsed() });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Pushes a group, once. It is not sent again if no answer comes, because the server would have it twice.
    ///
    /// Checks first that the server still has this environment. After a restart, the server counts environments from 0 again. If another
    /// environment has this one's id by then, the group counts as that one's.
    ///
    /// # Errors
    /// See [`AtroposError`]. [`is_unknown`](AtroposError::is_unknown) tells whether the group may have arrived,
    /// [`is_not_sent`](AtroposError::is_not_sent) whether it was not sent.
    pub async fn push(&self, group: &ScoredGroup) -> Result<Pushed, AtroposError> {
        #[derive(Deserialize)]
        struct Answer {
            status: String,
            #[serde(default)]
            buffer_size: u64,
        }
        group.check(&self.limits)?;
        self.must_be_known().await?;
        let answer: Answer = self.client.post(SCORED_DATA, &Push { group, env_id: self.id }).await?;
        match &*answer.status {
            "received" => Ok(Pushed::Received),
            "buffered" => Ok(Pushed::Buffered { sequences: answer.buffer_size }),
            _ => Err(AtroposError::Answer { call: SCORED_DATA, problem: "an unknown status".to_owned() }),
        }
    }

    /// Pushes several groups in one request, once.
    ///
    /// # Errors
    /// Those of [`push`](Self::push), and [`AtroposError::Answer`] if the server took fewer groups than were sent.
    pub async fn push_all(&self, groups: &[ScoredGroup]) -> Result<(), AtroposError> {
        #[derive(Deserialize)]
        struct Answer {
            groups_processed: usize,
        }
        for group in groups {
            group.check(&self.limits)?;
        }
        self.must_be_known().await?;
        let list: Vec<_> = groups.iter().map(|group| Push { group, env_id: self.id }).collect();
        let Answer { groups_processed } = self.client.post(SCORED_DATA_LIST, &list).await?;
        if groups_processed == groups.len() {
            return Ok(());
        }
        let problem = format!("{groups_processed} groups taken of {}", groups.len());
        Err(AtroposError::Answer { call: SCORED_DATA_LIST, problem })
    }

    /// Returns `true` if the last group that the server received has this [id](ScoredGroup::with_id).
    ///
    /// `false` does not prove that a group is missing: others may have pushed since, or the request may still be under way.
    ///
    /// # Errors
    /// See [`AtroposError`].
    pub async fn is_latest(&self, id: &str) -> Result<bool, AtroposError> {
        let latest = self.client.latest_example().await?;
        Ok(latest.is_some_and(|latest| latest.id() == Some(id)))
    }

    /// Leaves the run, so that no batch waits for this environment. Its groups stay in the queue.
    ///
    /// # Errors
    /// See [`AtroposError`]. It is safe to call this again.
    pub async fn disconnect(&self) -> Result<(), AtroposError> {
        #[derive(Deserialize)]
        struct Answer {
            status: String,
        }
        let Answer { status } = self.client.post("disconnect-env", &Identified { env_id: self.id }).await?;
        if status == "success" { Ok(()) } else { Err(AtroposError::UnknownEnvironment) }
    }

    /// A server that has restarted would accept the group, and could not register a trainer afterwards.
    async fn must_be_known(&self) -> Result<(), AtroposError> {
        self.status().await.map(drop).map_err(AtroposError::before)
    }
}
