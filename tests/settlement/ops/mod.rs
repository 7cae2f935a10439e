//! Metrics, spans, readiness, losses and the questions of an operator.

mod losses;
mod metrics;
mod operator;
mod readiness;
mod spans;
