//! Evaluators that sell verdicts, and students that buy them.
mod burst;
mod buying;
mod cards;
mod llm;
mod messages;
mod pricing;
mod selling;
mod stage;
mod vouchers;
