//! The trainer: registers a run and pulls batches. Also the requests that anybody may send.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AtroposClient, AtroposError, ReceivedGroup};

/// The registration of a trainer, which describes the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrainerRegistration {
    /// The group of runs in Weights & Biases; any name.
    pub wandb_group: String,
    /// The project in Weights & Biases; any name.
    pub wandb_project: String,
    /// The number of sequences per batch, over all its groups.
    pub batch_size: u64,
    /// The longest sequence, in tokens, prompt and completion together.
    pub max_token_len: u64,
    /// The directory of checkpoints. May be empty.
    pub checkpoint_dir: String,
    /// The number of steps between checkpoints.
    pub save_checkpoint_interval: u64,
    /// The first step.
    pub starting_step: u64,
    /// The number of steps.
    pub num_steps: u64,
}

/// The id of a trainer on the server, a number of 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrainerId(pub u128);

/// The limits of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunInfo {
    /// The number of sequences per batch.
    pub batch_size: u64,
    /// The longest sequence, in tokens.
    pub max_token_len: u64,
}

/// The progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct RunStatus {
    /// The number of batches so far, counted from the starting step.
    pub current_step: u64,
    /// The number of groups in the queue.
    pub queue_size: u64,
}

/// The group and project of a run in Weights & Biases.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct WandbInfo {
    /// The group, if a trainer has registered.
    pub group: Option<String>,
    /// The project, if a trainer has registered.
    pub project: Option<String>,
}

impl TrainerRegistration {
    /// Creates a registration for `num_steps` batches of `batch_size` sequences of less than `max_token_len` tokens, without checkpoints.
    pub fn new(project: impl Into<String>, batch_size: u64, max_token_len: u64, num_steps: u64) -> Self {
        let project = project.into();
        Self {
            wandb_group: project.clone(),
            wandb_project: project,
            batch_size,
            max_token_len,
            checkpoint_dir: String::new(),
            save_checkpoint_interval: num_steps.max(1),
            starting_step: 0,
            num_steps,
        }
    }
}

impl AtroposClient {
    /// Registers a trainer. The first one describes the run; the server ignores the descriptions of later ones.
    ///
    /// # Errors
    /// See [`AtroposError`]. It is safe to register again after an error.
    pub async fn register(&self, run: &TrainerRegistration) -> Result<TrainerId, AtroposError> {
        #[derive(Deserialize)]
        struct Registered {
            uuid: u128,
        }
        let Registered { uuid } = self.post("register", run).await?;
        Ok(TrainerId(uuid))
    }

    /// Pulls the next batch, with as many sequences as were registered. Returns `None` while there are not enough: call again later.
    ///
    /// The first call lets environments start. Do not drop the future before it is done, because a batch that does not arrive is
    /// lost.
    ///
    /// # Errors
    /// [`AtroposError::NoTrainer`] before a trainer has registered. After an error that [`is_unknown`](AtroposError::is_unknown), a batch
    /// may be lost.
    pub async fn batch(&self) -> Result<Option<Vec<ReceivedGroup>>, AtroposError> {
        #[derive(Deserialize)]
        struct Batch {
            status: Option<String>,
            batch: Option<Vec<ReceivedGroup>>,
        }
        let Batch { status, batch } = self.get("batch").await?;
        match status {
            Some(status) if status == "error" => Err(AtroposError::NoTrainer),
            _ => Ok(batch),
        }
    }

    /// Returns the limits of the run, or `None` if no trainer has registered.
    ///
    /// # Errors
    /// See [`AtroposError`].
    pub async fn info(&self) -> Result<Option<RunInfo>, AtroposError> {
        #[derive(Deserialize)]
        struct Info {
            batch_size: i64,
            #[serde(default)]
            max_token_len: i64,
        }
        let Info { batch_size, max_token_len } = self.get("info").await?;
        let (batch_size, max_token_len) = (u64::try_from(batch_size).ok(), u64::try_from(max_token_len).ok());
        Ok(batch_size.zip(max_token_len).map(|(batch_size, max_token_len)| RunInfo { batch_size, max_token_len }))
    }

    /// Returns the progress of the run, with zeros if no trainer has registered.
    ///
    /// # Errors
    /// See [`AtroposError`].
    pub async fn status(&self) -> Result<RunStatus, AtroposError> {
        self.get("status").await
    }

    /// Returns group and project of the run in Weights & Biases.
    ///
    /// # Errors
    /// See [`AtroposError`].
    pub async fn wandb_info(&self) -> Result<WandbInfo, AtroposError> {
        self.get("wandb_info").await
    }

    /// Returns the group that the server received last, from any environment, or `None` if there is none.
    ///
    /// # Errors
    /// See [`AtroposError`].
    pub async fn latest_example(&self) -> Result<Option<ReceivedGroup>, AtroposError> {
        // Before the first group, the server answers one whose fields are all empty lists, even those that are not lists.
        let latest: Value = self.get("latest_example").await?;
        if latest.get("tokens").and_then(Value::as_array).is_some_and(Vec::is_empty) {
            return Ok(None);
        }
        let problem = |_| AtroposError::Answer { call: "latest_example", problem: "it is not a group".to_owned() };
        serde_json::from_value(latest).map(Some).map_err(problem)
    }
}
