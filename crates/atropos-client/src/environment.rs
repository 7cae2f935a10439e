//! The environment's side.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, sleep_until};

use super::{AtroposClient, AtroposError, GroupLimits, RunInfo, ScoredGroup};

/// How often the server is asked whether something has changed.
const LOOK: Duration = Duration::from_millis(500);
const SCORED_DATA: &str = "scored_data";
const SCORED_DATA_LIST: &str = "scored_data_list";

/// What an environment says about itself.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnvRegistration {
    /// The longest sequence it makes, in tokens.
    pub max_token_length: u64,
    /// What it wants to be called; the server adds a number.
    pub desired_name: String,
    /// How much of the batches it wants to fill, relative to the others.
    pub weight: f64,
    /// How many sequences its groups have. A batch is a multiple of it.
    pub group_size: usize,
    /// The least share of each batch that is to come from it, 0 to 1. Batches wait for it then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_batch_allocation: Option<f64>,
}

impl EnvRegistration {
    /// An environment of weight 1 that makes groups of `group_size` sequences of less than `max_token_length` tokens.
    pub fn new(name: impl Into<String>, group_size: usize, max_token_length: u64) -> Self {
        let desired_name = name.into();
        Self { max_token_length, desired_name, weight: 1.0, group_size, min_batch_allocation: None }
    }
}

/// An environment that has joined a run.
///
/// Dropping it says nothing to the server; [`disconnect`](Self::disconnect) does.
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

/// How the run looks from an environment.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct EnvStatus {
    /// How many batches were made, from the starting step on.
    pub current_step: u64,
    /// How many groups wait, of this environment and of others as far as they may be taken before its own.
    pub queue_size: u64,
    /// How many of its own groups wait.
    #[serde(default)]
    pub self_queue_size: u64,
    /// The share of batches that no environment has asked for.
    #[serde(default)]
    pub unallocated_fraction: f64,
    /// The largest group in the queue.
    #[serde(default)]
    pub max_group_size: u64,
    /// The share of this environment.
    pub env_weight: f64,
}

/// What the server did with a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pushed {
    /// It is in the queue.
    Received,
    /// It has another size than registered, and waits for others to be joined with.
    Buffered {
        /// How many sequences wait so.
        sequences: u64,
    },
}

impl AtroposClient {
    /// Joins the run as soon as the trainer has begun, which is waited for. Dropping the future stops waiting.
    ///
    /// A server that cannot be reached or asked about the run yet is waited for too.
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
        // A patience beyond all time has no end.
        let deadline = Instant::now().checked_add(patience);
        loop {
            let late = match self.try_register_env(environment).await {
                Ok(Some(joined)) => return Ok(joined),
                Ok(None) => AtroposError::NotStarted(patience),
                Err(error) if error.is_not_sent() => error,
                Err(error) => return Err(error),
            };
            let next = Instant::now() + LOOK;
            if deadline.is_some_and(|deadline| next > deadline) {
                return Err(late);
            }
            sleep_until(next).await;
        }
    }

    /// Joins the run if the trainer has begun; `None` if it has not.
    ///
    /// # Errors
    /// As of [`register_env`](Self::register_env).
    pub async fn try_register_env(&self, environment: &EnvRegistration) -> Result<Option<Environment>, AtroposError> {
        #[derive(Deserialize)]
        #[serde(tag = "status")]
        enum Answer {
            #[serde(rename = "success")]
            Success { env_id: u64, wandb_name: String, starting_step: u64, num_steps: u64 },
            #[serde(rename = "wait for trainer to start")]
            Wait {},
        }
        // First, so that the server does not count an environment that could never deliver.
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
    /// What the server calls it: a number, counted from 0.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Its name in Weights & Biases.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What its groups must keep to.
    pub const fn limits(&self) -> &GroupLimits {
        &self.limits
    }

    /// What the trainer takes.
    pub const fn info(&self) -> &RunInfo {
        &self.info
    }

    /// The step that the run was at when it joined.
    pub const fn starting_step(&self) -> u64 {
        self.starting_step
    }

    /// How many steps the run has.
    pub const fn num_steps(&self) -> u64 {
        self.num_steps
    }

    /// How the run looks from here. Not to be asked after [`disconnect`](Self::disconnect): the server divides by the weight of those
    /// who are connected.
    ///
    /// # Errors
    /// [`AtroposError::UnknownEnvironment`] if the server has restarted, and others.
    pub async fn status(&self) -> Result<EnvStatus, AtroposError> {
        match self.client.get_with("status-env", &Identified { env_id: self.id }).await {
            // The server looks it up without a look whether it is there.
            Err(AtroposError::Failed { status: 500, .. }) => Err(AtroposError::UnknownEnvironment),
            other => other,
        }
    }

    /// Waits until fewer than `groups` groups wait for the trainer. Dropping the future stops waiting.
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
            if begun.elapsed() + LOOK > patience {
                return Err(AtroposError::QueueFull { queued: status.queue_size, waited: begun.elapsed() });
            }
            sleep(LOOK).await;
        }
    }

    /// Hands a group over, once. It is not sent again where no answer comes: the server would have it twice.
    ///
    /// The server is asked before whether it still knows this environment. It knows it by a number only, and counts anew after a
    /// restart: where another environment has this one's number by then, the group counts as that one's.
    ///
    /// # Errors
    /// [`AtroposError`]; whether the group may have arrived all the same, [`AtroposError::is_unknown`] says, and whether it was not
    /// even sent, [`AtroposError::is_not_sent`].
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

    /// Hands several groups over in one request, once.
    ///
    /// # Errors
    /// [`AtroposError`], as of [`push`](Self::push). An answer that speaks of fewer groups than were sent is one.
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

    /// Whether the last group that the server has got is the one of this [id](ScoredGroup::with_id): then it has arrived. If not,
    /// that says little: others may have pushed since, or the request is still on its way.
    ///
    /// # Errors
    /// [`AtroposError`].
    pub async fn is_latest(&self, id: &str) -> Result<bool, AtroposError> {
        let latest = self.client.latest_example().await?;
        Ok(latest.is_some_and(|latest| latest.id() == Some(id)))
    }

    /// Says goodbye: no batch is to wait for it. What it has pushed stays.
    ///
    /// # Errors
    /// [`AtroposError`]; asking again does no harm.
    pub async fn disconnect(&self) -> Result<(), AtroposError> {
        #[derive(Deserialize)]
        struct Answer {
            status: String,
        }
        let Answer { status } = self.client.post("disconnect-env", &Identified { env_id: self.id }).await?;
        if status == "success" { Ok(()) } else { Err(AtroposError::UnknownEnvironment) }
    }

    /// A server that has restarted would take the group, and no trainer after it.
    async fn must_be_known(&self) -> Result<(), AtroposError> {
        self.status().await.map(drop).map_err(AtroposError::before)
    }
}
