//! A ledger that notes every call, and of which one call fails, once.

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::Instant;
use tower_x402::ledger::{Ledger, LedgerError, channels::ChannelLedger};

use super::around_ledger::{Around, AroundChannels, AroundLedger, Call};

/// Which call fails, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The name of the call: a method, and of `fulfil` and `settle` the step.
    pub call: &'static str,
    /// How many calls of this name come before it.
    pub nth: usize,
    pub how: How,
}

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Nothing is done.
    Before,
    /// It is done, and the answer is lost.
    After,
    /// Nothing is done, nor in any other call for so long.
    GoneBefore(Duration),
    /// It is done and the answer is lost; then nothing is done for so long.
    GoneAfter(Duration),
}

/// The notes of a [`FaultyLedger`].
#[derive(Default)]
pub struct Calls(Mutex<State>);

#[derive(Default)]
struct State {
    calls: Vec<&'static str>,
    counts: HashMap<&'static str, usize>,
    fault: Option<Fault>,
    hit: bool,
    gone_until: Option<Instant>,
}

pub type FaultyLedger = AroundLedger<Calls>;

/// A ledger over another one, of which nothing fails and nothing is noted before it is [armed](Calls::arm).
pub fn faulty(ledger: Arc<dyn Ledger>) -> Arc<FaultyLedger> {
    AroundLedger::new(ledger, Calls::default())
}

pub type FaultyChannels = AroundChannels<Calls>;

/// The same over the books of channels.
pub fn faulty_channels(ledger: Arc<dyn ChannelLedger>) -> Arc<FaultyChannels> {
    AroundChannels::new(ledger, Calls::default())
}

impl Calls {
    /// Counts from here on, and lets this call fail.
    pub fn arm(&self, fault: Option<Fault>) {
        *self.0.lock().unwrap() = State { fault, ..State::default() };
    }

    /// Every call since it was armed, in order.
    pub fn made(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().calls.clone()
    }

    /// Whether the call that was to fail has failed.
    pub fn has_failed(&self) -> bool {
        self.0.lock().unwrap().hit
    }

    /// Whether an outage began with this call.
    pub fn was_away_at(&self, call: &str) -> bool {
        let state = self.0.lock().unwrap();
        state.gone_until.is_some() && state.fault.is_some_and(|fault| fault.call == call)
    }

    /// Whether this call fails before it is done, and after it.
    pub fn enter(&self, call: &'static str) -> [bool; 2] {
        let mut state = self.0.lock().unwrap();
        state.calls.push(call);
        let count = state.counts.entry(call).or_default();
        *count += 1;
        let nth = *count - 1;
        if state.gone_until.is_some_and(|until| Instant::now() < until) {
            return [true, false];
        }
        let Some(fault) = state.fault.filter(|fault| !state.hit && fault.call == call && fault.nth == nth) else {
            return [false, false];
        };
        state.hit = true;
        match fault.how {
            How::Before => [true, false],
            How::After => [false, true],
            How::GoneBefore(time) | How::GoneAfter(time) => {
                state.gone_until = Some(Instant::now() + time);
                let is_done = matches!(fault.how, How::GoneAfter(_));
                [!is_done, is_done]
            }
        }
    }
}

impl Around for Calls {
    async fn around<T: Send>(
        &self,
        call: Call<'_>,
        work: impl Future<Output = Result<T, LedgerError>> + Send,
    ) -> Result<T, LedgerError> {
        let call = call.name();
        let [before, after] = self.enter(call);
        if before {
            return Err(failed(call));
        }
        let answer = work.await?;
        if after { Err(failed(call)) } else { Ok(answer) }
    }
}

fn failed(call: &str) -> LedgerError {
    LedgerError::Backend(format!("{call} fails on purpose").into())
}
