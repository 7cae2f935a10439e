//! Fault injection for JSON-RPC calls.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use serde_json::Value;

/// A JSON-RPC call, as a fault hook sees it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RpcCall<'a> {
    /// The method, such as `eth_sendRawTransaction`.
    pub method: &'a str,
    /// The positional parameters.
    pub params: &'a [Value],
    /// The number of earlier calls of this method since the last [`Faults::reset`].
    pub index: u64,
}

/// A fault of a JSON-RPC call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// No fault.
    #[default]
    None,
    /// The call has no effect and is answered with an error.
    Error {
        /// The JSON-RPC error code.
        code: i64,
        /// The error message.
        message: String,
    },
    /// The call takes effect and is answered with an error.
    ErrorAfter {
        /// The JSON-RPC error code.
        code: i64,
        /// The error message.
        message: String,
    },
    /// The call is lost: it has no effect, and the caller gets a transport error.
    DropBefore,
    /// The answer is lost: the call takes effect, and the caller gets a transport error.
    DropAfter,
    /// The call takes effect and is answered after a delay.
    Delay(Duration),
    /// The call takes effect at once and is answered after a delay.
    DelayAfter(Duration),
    /// The call arrives twice, as if a proxy had repeated it. The caller gets the second answer.
    Duplicate,
}

/// The longest delay of [`Faults::random`].
pub const LONGEST_DELAY: Duration = Duration::from_millis(250);

type Hook = Arc<dyn Fn(&RpcCall<'_>) -> Fault + Send + Sync>;

/// The fault injection of a devnet: a hook that decides about every JSON-RPC call, in the process and on ports.
///
/// ```
/// use x402_devnet::{Devnet, Fault};
///
/// # async fn example(devnet: &Devnet) {
/// // The first transaction reaches the chain, but the answer is lost.
/// devnet.faults().set(|call| match (call.method, call.index) {
///     ("eth_sendRawTransaction", 0) => Fault::DropAfter,
///     _ => Fault::None,
/// });
/// # }
/// ```
#[derive(Default)]
pub struct Faults {
    hook: RwLock<Option<Hook>>,
    calls: Mutex<BTreeMap<String, u64>>,
}

impl Faults {
    /// Sets the hook that decides about every call.
    pub fn set(&self, hook: impl Fn(&RpcCall<'_>) -> Fault + Send + Sync + 'static) {
        *self.hook.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(hook));
    }

    /// Sets a hook that injects random faults into a share of all calls, `rate` between 0 and 1. Delays are up to [`LONGEST_DELAY`].
    ///
    /// The fault of the n-th call of a method depends only on the seed.
    pub fn random(&self, seed: u64, rate: f64) {
        self.set(move |call| {
            let mut draws = Draws::of(seed, call);
            if draws.fraction() < rate { draws.fault() } else { Fault::None }
        });
    }

    /// Removes the hook.
    pub fn clear(&self) {
        *self.hook.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns the number of calls per method.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Resets the numbers of calls to zero.
    pub fn reset(&self) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Counts a call and returns its fault.
    pub(super) fn decide(&self, method: &str, params: &[Value]) -> Fault {
        let index = {
            let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let count = calls.entry(method.to_owned()).or_default();
            *count += 1;
            *count - 1
        };
        let hook = self.hook.read().unwrap_or_else(PoisonError::into_inner).clone();
        hook.map_or(Fault::None, |hook| hook(&RpcCall { method, params, index }))
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("calls", &self.calls()).finish_non_exhaustive()
    }
}

/// The random numbers of one call (splitmix64).
struct Draws(u64);

impl Draws {
    fn of(seed: u64, call: &RpcCall<'_>) -> Self {
        let mut draws = Self(seed);
        for number in call.method.bytes().map(u64::from).chain([call.index]) {
            draws.0 ^= number;
            draws.0 = draws.next();
        }
        draws
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 up to, but not including, 1.
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn fault(&mut self) -> Fault {
        let delay = LONGEST_DELAY.mul_f64(self.fraction());
        // An error that leaves open whether the call took effect.
        let (code, message) = (-32005, "the upstream is overloaded".to_owned());
        match self.next() % 7 {
            0 => Fault::Error { code, message },
            1 => Fault::ErrorAfter { code, message },
            2 => Fault::DropBefore,
            3 => Fault::DropAfter,
            4 => Fault::Delay(delay),
            5 => Fault::DelayAfter(delay),
            _ => Fault::Duplicate,
        }
    }
}
