//! Metrics, spans, readiness, losses and the questions of an operator.

mod channels;
mod losses;
mod metrics;
mod operator;
mod readiness;
mod spans;
