//! The command as users run it: its processes, over real connections, on a chain of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod attacks;
mod charging;
mod deploy;
mod end_to_end;
mod messages;
mod operating;
mod operator;
mod paying;
mod removed;
mod restart;
mod rules;
mod stage;
mod terminal;
mod upto;
mod what_can_go_wrong;
