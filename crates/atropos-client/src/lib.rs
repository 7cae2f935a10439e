//! A client of the API server of [Atropos](https://github.com/NousResearch/atropos), through which environments of reinforcement
//! learning hand scored answers to a trainer (PyPI `atroposlib` 0.4). It is for environments and trainers that are written in Rust.
//!
//! A **trainer** [registers](AtroposClient::register) a run and then pulls [batches](AtroposClient::batch). An **environment**
//! [joins](AtroposClient::register_env) once the trainer has begun, has its policy answer tasks, and [pushes](Environment::push)
//! groups of scored answers, as fast as the trainer takes them.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use atropos_client::{AtroposClient, Bytes, EnvRegistration, ScoredGroup, Sequence};
//!
//! let server = AtroposClient::new("http://127.0.0.1:8000")?;
//! let environment = server.register_env(&EnvRegistration::new("sums", 2, 512), Duration::from_secs(600)).await?;
//! let prompt = Bytes::prompt("What is 17 * 23?");
//! let right = Sequence::new(&prompt, &Bytes::completion("391"), 1.0)?;
//! let wrong = Sequence::new(&prompt, &Bytes::completion("381"), 0.0)?;
//! let group = ScoredGroup::new([right, wrong], environment.limits())?;
//! environment.wait_for_room(4, Duration::from_secs(600)).await?;
//! environment.push(&group).await?;
//! environment.disconnect().await?;
//! # Ok(()) }
//! ```
//!
//! # What the server does not forgive, and what is done about it
//!
//! - **A group that is pushed twice is there twice.** There is no idempotency key. So nothing that was sent is ever sent again
//!   unasked: where no answer came, the error [says so](AtroposError::is_unknown), and [`Environment::is_latest`] looks whether
//!   the group is the last one that the server got, which it recognizes by an id in its `group_overrides`. What was
//!   [not even sent](AtroposError::is_not_sent) may be pushed again.
//! - **A batch that is pulled is gone.** An answer to [`AtroposClient::batch`] that does not arrive cannot be asked for again.
//! - **A group whose scores are all equal** teaches nothing, sequences that are too long are cut somewhere else, and groups whose size
//!   does not divide the batch keep it from ever being filled. A [`ScoredGroup`] with any of these cannot be made, and
//!   [`AtroposClient::register_env`] refuses a group size that does not fit the trainer's batches.
//! - **Everything is in its memory.** After a restart it knows neither trainer nor environments, and a group that reaches it before a
//!   trainer has registered keeps it from ever taking one: `/register` takes the run's description only where there is no queue
//!   yet. [`Environment::push`] therefore asks first whether the environment is still known. The server knows environments by
//!   numbers, from 0 again after a restart: where another one has got the number by then, groups count as that one's.
//! - **Registering an environment twice** leaves one of them behind that never delivers. Only what surely never reached the
//!   server is sent again.
//!
//! Answers are bounded in size and time, and nothing of a request's body is in an error.

mod bytes;
mod client;
mod environment;
mod error;
mod group;
mod received;
mod sequence;
mod trainer;

pub use bytes::Bytes;
pub use client::AtroposClient;
pub use environment::{EnvRegistration, EnvStatus, Environment, Pushed};
pub use error::AtroposError;
pub use group::{GroupError, GroupLimits, ScoredGroup};
pub use received::ReceivedGroup;
pub use sequence::{Message, Sequence};
pub use trainer::{RunInfo, RunStatus, TrainerId, TrainerRegistration, WandbInfo};
