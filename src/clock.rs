//! Time and randomness as parameters, so that tests control every expiry and every nonce.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use alloy_primitives::B256;

/// A source of the current time.
///
/// Everything that expires takes a clock: authorizations, leases, offers, records. The default is [`SystemClock`]; tests use a
/// [`ManualClock`].
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the time in whole seconds since the Unix epoch, the unit of block timestamps.
    fn now(&self) -> u64;
}

/// The system clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }
}

/// A clock that stands still until a test advances it.
///
/// Builders take an `Arc<dyn Clock>`, so that the test keeps a handle.
///
/// ```
/// use std::sync::Arc;
/// use tower_x402::{Clock, ManualClock};
///
/// let clock = Arc::new(ManualClock::at(1_700_000_000));
/// let injected: Arc<dyn Clock> = clock.clone();
/// clock.advance(30);
/// assert_eq!(injected.now(), 1_700_000_030);
/// ```
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Creates a clock that stands at `seconds` since the Unix epoch.
    pub const fn at(seconds: u64) -> Self {
        Self(AtomicU64::new(seconds))
    }

    /// Advances the clock by `seconds`.
    pub fn advance(&self, seconds: u64) {
        self.0.fetch_add(seconds, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How far the clocks of two processes may be apart, in seconds.
#[cfg(any(feature = "server", feature = "onchain"))]
const SKEW: u64 = 60;

/// Returns how long ago something was, in seconds. If that is more than a minute ahead, it was noted by a clock that was wrong, and nothing is
/// known of its age: `u64::MAX`. For whatever has to be recent; where a high age permits something, subtract instead.
#[cfg(any(feature = "server", feature = "onchain"))]
pub(crate) const fn age(now: u64, then: u64) -> u64 {
    match now.checked_sub(then) {
        Some(age) => age,
        None if then - now <= SKEW => 0,
        None => u64::MAX,
    }
}

/// A source of authorization nonces (32 bytes, EIP-3009).
///
/// A nonce must be unpredictable, and must never repeat for one payer. The default is [`OsNonces`]; deterministic tests use their own.
///
/// ```
/// use tower_x402::{Nonces, OsNonces};
///
/// assert_ne!(OsNonces.next()?, OsNonces.next()?);
/// # Ok::<(), tower_x402::RandomnessError>(())
/// ```
pub trait Nonces: fmt::Debug + Send + Sync + 'static {
    /// Returns a new nonce.
    ///
    /// # Errors
    /// [`RandomnessError`] if the source of randomness failed.
    fn next(&self) -> Result<B256, RandomnessError>;
}

/// A source of nonces that asks the operating system for random bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsNonces;

impl Nonces for OsNonces {
    fn next(&self) -> Result<B256, RandomnessError> {
        let mut nonce = B256::ZERO;
        getrandom::fill(nonce.as_mut_slice()).map_err(|_| RandomnessError)?;
        Ok(nonce)
    }
}

/// The operating system gave no randomness. Nothing was signed.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the operating system gave no randomness; nothing was signed")]
pub struct RandomnessError;
