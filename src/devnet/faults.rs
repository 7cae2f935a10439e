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
}

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
