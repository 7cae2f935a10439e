//! A client of the API server of [Atropos](https://github.com/NousResearch/atropos), through which environments of reinforcement
//! learning hand scored answers to a trainer (PyPI `atroposlib` 0.4). It is for environments and trainers that are written in Rust.
//!
//! A **trainer** [registers](AtroposClient::register) a run and then pulls [batches](AtroposClient::batch). An **environment**
//! [joins](AtroposClient::register_env) when the trainer has started, lets its policy answer tasks, and [pushes](Environment::push) groups
//! of scored answers.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use atropos_client::{AtroposClient, ByteTokenizer, EnvRegistration, ScoredGroup, Sequence};
//!
//! let server = AtroposClient::new("http://127.0.0.1:8000")?;
//! let environment = server.register_env(&EnvRegistration::new("sums", 2, 512), Duration::from_secs(600)).await?;
//! let prompt = ByteTokenizer::prompt("What is 17 * 23?");
//! let right = Sequence::new(&prompt, &ByteTokenizer::completion("391"), 1.0)?;
//! let wrong = Sequence::new(&prompt, &ByteTokenizer::completion("381"), 0.0)?;
//! let group = ScoredGroup::new([right, wrong], environment.limits())?;
//! environment.wait_for_room(4, Duration::from_secs(600)).await?;
//! environment.push(&group).await?;
//! environment.disconnect().await?;
//! # Ok(()) }
//! ```
//!
//! # What the server does not protect against, and what this client does
//!
//! - **A group that is pushed twice is in the queue twice**, because there is no idempotency key. This client never repeats a request that
//!   may have been received. If no answer came, the error [says so](AtroposError::is_unknown), and [`Environment::is_latest`] checks
//!   whether the group is the last one that the server received, by an id in its `group_overrides`. A request that was
//!   [not sent](AtroposError::is_not_sent) may be repeated.
//! - **A batch can be pulled once.** If the answer to [`AtroposClient::batch`] does not arrive, the batch is lost.
//! - **Some groups are useless or block the queue**: equal scores teach nothing, sequences that are too long are cut, and groups whose size
//!   does not divide the batch keep it from being filled. A [`ScoredGroup`] with any of these cannot be created, and
//!   [`AtroposClient::register_env`] refuses a group size that does not divide the batch.
//! - **A restart loses everything**: trainer, environments and queue. A group that arrives before a trainer has registered keeps the
//!   server from accepting one, so [`Environment::push`] first checks that the server still has the environment. Environments are numbered
//!   from 0 again after a restart. If another one has got the number by then, groups count as that one's.
//! - **An environment that is registered twice** leaves one behind that never delivers. A registration is repeated only if it surely
//!   never reached the server.
//!
//! Answers are bounded in size and time. No error shows parts of a request's body.

mod client;
mod environment;
mod error;
mod group;
mod sequence;
mod trainer;

pub use client::AtroposClient;
pub use environment::{EnvRegistration, EnvStatus, Environment, Pushed};
pub use error::{AtroposError, GroupError};
pub use group::{GroupLimits, ReceivedGroup, ScoredGroup};
pub use sequence::{ByteTokenizer, Sequence, SequenceMessage};
pub use trainer::{RunInfo, RunStatus, TrainerId, TrainerRegistration, WandbInfo};
