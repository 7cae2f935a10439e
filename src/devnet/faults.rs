//! Failures on demand.

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
    /// How many calls of this method came before, since the last [`Faults::reset`].
    pub index: u64,
}

/// What goes wrong with a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// It is answered with an error and has no effect.
    Error {
        /// The JSON-RPC error code.
        code: i64,
        /// The error message.
        message: String,
    },
    /// It takes effect and is answered with an error.
    ErrorAfter {
        /// The JSON-RPC error code.
        code: i64,
        /// The error message.
        message: String,
    },
    /// It is lost: no effect, and a transport error for the caller.
    DropBefore,
    /// It takes effect and the answer is lost: a transport error for the caller.
    DropAfter,
    /// It takes effect, and is answered, later.
    Delay(Duration),
    /// It takes effect at once and is answered later.
    DelayAfter(Duration),
    /// It arrives twice, as if something on the way had repeated it: the caller gets the second answer.
    Duplicate,
}

/// The longest delay of [`Faults::random`].
pub const LONGEST_DELAY: Duration = Duration::from_millis(250);

type Hook = Arc<dyn Fn(&RpcCall<'_>) -> Fault + Send + Sync>;

/// The devnet's fault injection: one hook that decides about every JSON-RPC call, in-process and on ports alike.
///
/// ```
/// use tower_x402::devnet::{Devnet, Fault};
///
/// # async fn example(devnet: &Devnet) {
/// // The first broadcast reaches the chain, but the caller never learns.
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
    /// Lets `hook` decide about every call from now on, in place of the hook before.
    pub fn set(&self, hook: impl Fn(&RpcCall<'_>) -> Fault + Send + Sync + 'static) {
        *self.hook.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(hook));
    }

    /// Lets this share of all calls, between 0 and 1, go wrong from now on: each in one of the ways of [`Fault`], the delays up to
    /// [`LONGEST_DELAY`]. What happens to the n-th call of a method follows from the seed.
    pub fn random(&self, seed: u64, rate: f64) {
        self.set(move |call| {
            let mut draws = Draws::of(seed, call);
            if draws.fraction() < rate { draws.fault() } else { Fault::None }
        });
    }

    /// Removes the hook: nothing fails any more.
    pub fn clear(&self) {
        *self.hook.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// How often each method was called.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts calls from zero again.
    pub fn reset(&self) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Counts the call and decides about it.
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

/// What chance has in store for one call: splitmix64.
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

    /// Between 0 and 1, 1 excluded.
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn fault(&mut self) -> Fault {
        let delay = LONGEST_DELAY.mul_f64(self.fraction());
        // Words that say neither yes nor no.
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
