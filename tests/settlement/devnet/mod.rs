//! The devnet behaves as Base and its USDC do, and fails as asked.

mod chain;
mod faults;
mod fixture;
mod probe;
mod token;
