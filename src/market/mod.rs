//! The market.

mod agent_card;
mod bounded;
mod card_error;
mod card_fetcher;
mod card_signature;
mod client;
mod critique;
mod evaluation;
mod evaluator;
pub mod judge;
mod measure;
mod message;
mod pricing;
pub mod schema;
mod submission;
mod task;
mod verified_card;

pub use agent_card::{
    AgentCard, AgentCardBuilder, AgentExtension, AgentInterface, AgentSkill, CARD_PATH, Capabilities,
    EVALUATION_BINDING,
};
pub use bounded::{LengthError, List, Text};
pub use card_error::CardError;
pub use card_fetcher::CardFetcher;
pub use card_signature::CardSignature;
pub use client::{Bought, EvaluateError, EvaluationClient};
pub use critique::{Critique, Issue, Place, Severity, Span};
pub use evaluation::{Evaluation, EvaluatorId, Preference, Verdict};
pub use evaluator::{Earned, Evaluator, EvaluatorError, EvaluatorFuture, EvaluatorService, SkillStats, Stats};
pub use measure::{Confidence, OutOfRange, Reward, Score};
pub use message::{MESSAGE_VERSION, MessageError};
pub use pricing::{AcceptedToken, EXTENSION_URI, Expertise, Pricing, Schemas};
pub use submission::{MAX_OUTPUTS, Outputs, Submission};
pub use task::{Input, LongText, Message, SkillId, Task, TaskId};
pub use verified_card::VerifiedCard;
