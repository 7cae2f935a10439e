//! Time and randomness, injected so that every expiry and every nonce can be tested.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use alloy_primitives::B256;

/// Where the current time comes from.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Whole seconds since the Unix epoch, as block timestamps count them.
    fn now(&self) -> u64;
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }
}

/// A clock that a test sets by hand.
///
/// ```
/// use tower_x402::{Clock, ManualClock};
///
/// let clock = ManualClock::at(1_700_000_000);
/// clock.advance(30);
/// assert_eq!(clock.now(), 1_700_000_030);
/// ```
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that stands at `seconds` since the Unix epoch.
    pub const fn at(seconds: u64) -> Self {
        Self(AtomicU64::new(seconds))
    }

    /// Moves the clock forward by `seconds`.
    pub fn advance(&self, seconds: u64) {
        self.0.fetch_add(seconds, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Where authorization nonces come from.
///
/// A nonce must be unpredictable and must never repeat for one payer.
pub trait Nonces: fmt::Debug + Send + Sync + 'static {
    /// A fresh nonce, or an error if the source of randomness failed.
    fn next(&self) -> Result<B256, RandomnessError>;
}

/// Nonces from the operating system's random number generator.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsNonces;

impl Nonces for OsNonces {
    fn next(&self) -> Result<B256, RandomnessError> {
        let mut nonce = B256::ZERO;
        getrandom::fill(nonce.as_mut_slice()).map_err(|_| RandomnessError)?;
        Ok(nonce)
    }
}

/// The operating system gave no randomness; nothing was signed.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the operating system gave no randomness; nothing was signed")]
pub struct RandomnessError;
