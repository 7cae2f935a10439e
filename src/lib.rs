//! Charge and pay for single HTTP requests in USDC over x402.

#[cfg(feature = "client")]
pub mod client;
mod clock;
#[cfg(feature = "devnet")]
pub mod devnet;
pub mod eip3009;
#[cfg(feature = "facilitator")]
pub mod facilitator;
#[cfg(feature = "facilitator")]
pub mod ledger;
mod network;
pub mod protocol;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "onchain")]
mod settlement;
mod usdc;

pub use clock::{Clock, ManualClock, Nonces, OsNonces, RandomnessError, SystemClock};
pub use network::{Asset, Network, ParseNetworkError};
pub use usdc::{ParseUsdcError, Usdc};
