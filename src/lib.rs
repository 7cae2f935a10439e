//! Charge and pay for single HTTP requests in USDC over x402.

#[cfg(feature = "client")]
pub mod client;
mod clock;
pub mod eip3009;
mod network;
pub mod protocol;
mod usdc;

pub use clock::{Clock, ManualClock, Nonces, OsNonces, RandomnessError, SystemClock};
pub use network::{Asset, Network, ParseNetworkError};
pub use usdc::{ParseUsdcError, Usdc};
