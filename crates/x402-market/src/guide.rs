//! Guides, each of which starts with a task and code that runs.
//!
//! They are the files in `crates/x402-market/docs/guide` of the repository. Guides on charging and paying are in [`tower_x402`].

/// Being paid for judging.
#[doc = include_str!("../docs/guide/sell-verdicts.md")]
pub mod sell_verdicts {}

/// Buying judgement within a budget.
#[doc = include_str!("../docs/guide/hire-evaluators.md")]
pub mod hire_evaluators {}

/// Training a model on rewards that are bought.
#[doc = include_str!("../docs/guide/train-with-atropos.md")]
pub mod train_with_atropos {}
