//! Charge and pay for single HTTP requests in USDC over x402.

mod clock;
#[cfg(feature = "devnet")]
pub mod devnet;
mod network;
mod usdc;

pub use clock::{Clock, ManualClock, Nonces, OsNonces, RandomnessError, SystemClock};
pub use network::{Asset, Network, ParseNetworkError};
pub use usdc::{ParseUsdcError, Usdc};
