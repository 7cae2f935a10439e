//! The market.

mod bounded;
mod critique;
mod evaluation;
mod measure;
mod message;
pub mod schema;
mod submission;
mod task;

pub use bounded::{LengthError, List, Text};
pub use critique::{Critique, Issue, Place, Severity, Span};
pub use evaluation::{Evaluation, EvaluatorId, Preference, Verdict};
pub use measure::{Confidence, OutOfRange, Reward, Score};
pub use message::{MESSAGE_VERSION, MessageError};
pub use submission::{MAX_OUTPUTS, Outputs, Submission};
pub use task::{Input, LongText, Message, SkillId, Task, TaskId};
