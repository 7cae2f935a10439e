//! The trainer's side, and what anybody may ask.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AtroposClient, AtroposError, ReceivedGroup};

/// A run, as its trainer describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerRegistration {
    /// The group of runs in Weights & Biases; any name.
    pub wandb_group: String,
    /// The project in Weights & Biases; any name.
    pub wandb_project: String,
    /// How many sequences a batch has, over all its groups.
    pub batch_size: u64,
    /// The longest sequence, in tokens, prompt and completion together.
    pub max_token_len: u64,
    /// Where checkpoints are; may be empty.
    pub checkpoint_dir: String,
    /// After how many steps there is a checkpoint.
    pub save_checkpoint_interval: u64,
    /// The step to begin with.
    pub starting_step: u64,
    /// How many steps there will be.
    pub num_steps: u64,
}

/// What the server calls a trainer: a number of 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrainerId(pub u128);

/// What the trainer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunInfo {
    /// How many sequences a batch has.
    pub batch_size: u64,
    /// The longest sequence, in tokens.
    pub max_token_len: u64,
}

/// How far the run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct RunStatus {
    /// How many batches were made, from the starting step on.
    pub current_step: u64,
    /// How many groups wait.
    pub queue_size: u64,
}

/// Where the run reports to.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct WandbInfo {
    /// The group, if a trainer has registered.
    pub group: Option<String>,
    /// The project, if a trainer has registered.
    pub project: Option<String>,
}

impl TrainerRegistration {
    /// A run of `num_steps` batches of `batch_size` sequences of less than `max_token_len` tokens, without checkpoints.
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
    /// Registers a trainer. The first one describes the run; what later ones say of it is ignored by the server.
    ///
    /// # Errors
    /// [`AtroposError`]. Registering again after one does no harm.
    pub async fn register(&self, run: &TrainerRegistration) -> Result<TrainerId, AtroposError> {
        #[derive(Deserialize)]
        struct Registered {
            uuid: u128,
        }
        let Registered { uuid } = self.post("register", run).await?;
        Ok(TrainerId(uuid))
    }

    /// Takes the next batch: groups of together as many sequences as were registered for. `None` while there are not enough; ask again
    /// a little later. The first call also lets environments begin.
    ///
    /// Not to be dropped before it is done: a batch that was made and does not arrive is lost.
    ///
    /// # Errors
    /// [`AtroposError::NoTrainer`] before a trainer has registered. After one that [`is_unknown`](AtroposError::is_unknown) a batch
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

    /// What the trainer takes; `None` if none has registered.
    ///
    /// # Errors
    /// [`AtroposError`].
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

    /// How far the run is; zeros if no trainer has registered.
    ///
    /// # Errors
    /// [`AtroposError`].
    pub async fn status(&self) -> Result<RunStatus, AtroposError> {
        self.get("status").await
    }

    /// Where the run reports to.
    ///
    /// # Errors
    /// [`AtroposError`].
    pub async fn wandb_info(&self) -> Result<WandbInfo, AtroposError> {
        self.get("wandb_info").await
    }

    /// The group that the server got last, from whichever environment; `None` if it has got none.
    ///
    /// # Errors
    /// [`AtroposError`].
    pub async fn latest_example(&self) -> Result<Option<ReceivedGroup>, AtroposError> {
        // Before the first group the server answers one whose fields are all empty lists, also where none belongs.
        let latest: Value = self.get("latest_example").await?;
        if latest.get("tokens").and_then(Value::as_array).is_some_and(Vec::is_empty) {
            return Ok(None);
        }
        let problem = |_| AtroposError::Answer { call: "latest_example", problem: "it is no group".to_owned() };
        serde_json::from_value(latest).map(Some).map_err(problem)
    }
}
