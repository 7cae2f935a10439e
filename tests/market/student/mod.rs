//! A student that hires evaluators, good and bad, over a real chain.
mod auditing;
mod failing;
mod finding;
mod hiring;
mod restarting;
mod teaching;
