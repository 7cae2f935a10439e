//! Programs that are started, driven from outside, and killed.

mod client_restart;
mod crash;
mod examples;
mod guides;
mod soak;
