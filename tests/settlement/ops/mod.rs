//! What an operator sees of a service that charges.

mod losses;
mod metrics;
mod operator;
mod readiness;
mod spans;
