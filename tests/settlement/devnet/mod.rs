//! The devnet behaves as Base and its USDC, and injects faults.

mod chain;
mod faults;
mod fixture;
mod probe;
mod token;
