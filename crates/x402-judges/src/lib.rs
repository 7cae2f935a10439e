//! Judges for evaluators that sell verdicts over x402 with [`x402_market`].
//!
//! | judge | judges |
//! |---|---|
//! | [`ArithmeticJudge`] | worked arithmetic with units, exactly |
//! | [`AlgebraJudge`] | derivations with variables: step by step, or at many points |
//! | [`LlmJudge`] | anything, with a language model behind an OpenAI-compatible endpoint ([`ChatClient`]); pairs in both orders |
//! | [`LooksJudge`] | how a program looks, and nothing else: cheap, and easily deceived |
//! | [`CodeJudge`] | programs: by hidden tests, growth of cost, safety, or the examples in the prompt (feature `code`) |
//! | [`LearningJudge`] | what its customers teach it: it learns from the truth about outputs that it judged |

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod algebra;
mod arithmetic;
mod chat;
#[cfg(all(unix, feature = "code"))]
mod code;
mod learning;
mod llm;
mod looks;

pub use algebra::AlgebraJudge;
pub use arithmetic::ArithmeticJudge;
pub use chat::{ChatClient, ChatError, ChatMessage};
#[cfg(all(unix, feature = "code"))]
pub use code::{CodeJudge, CodeWorkers};
pub use learning::{LearningJudge, LearningJudgeBuilder, LearningStats};
pub use llm::{LlmJudge, LlmJudgeBuilder};
pub use looks::LooksJudge;
use x402_market::Verdict;

/// Returns a neutral verdict.
fn undecided(reason: &str) -> Verdict {
    Verdict::new(0.5, 0.1, format!("Not judged: {reason}. Score and reward are neutral."))
}

/// Returns `true` if a word, in whatever case, is one of a text of words.
fn is_listed(word: &str, words: &str) -> bool {
    let word = word.to_lowercase();
    words.split(' ').any(|listed| listed == word)
}
