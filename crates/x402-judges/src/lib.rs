//! Judges for evaluators that sell verdicts over x402 with [`x402_market`].
//!
//! | judge | judges |
//! |---|---|
//! | [`ArithmeticJudge`] | worked arithmetic with units, exactly |
//! | [`LlmJudge`] | anything, with a language model behind an OpenAI-compatible endpoint ([`ChatClient`]); pairs in both orders |
//! | [`CodeJudge`] | programs: by hidden tests, growth of cost, safety, or the examples in the prompt (feature `code`) |
//! | [`LearningJudge`] | what its customers teach it: it learns from the truth about outputs that it judged |

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod arithmetic;
mod chat;
#[cfg(all(unix, feature = "code"))]
mod code;
mod learning;
mod llm;

pub use arithmetic::ArithmeticJudge;
pub use chat::{ChatClient, ChatError, ChatMessage};
#[cfg(all(unix, feature = "code"))]
pub use code::{CodeJudge, CodeWorkers};
pub use learning::{LearningJudge, LearningJudgeBuilder, LearningStats};
pub use llm::{LlmJudge, LlmJudgeBuilder};
