//! What is remembered of transactions that may have used a permit.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use alloy_primitives::{Address, B256};

use crate::permit2::SettleCall;

/// Of how many transactions it is remembered what they called.
const MAX_REMEMBERED: usize = 4096;

/// What transactions called proxies with, as they were read. Their hashes commit to it, so each is asked for once: the payer of many
/// payments can have as many transactions looked at for each of them.
#[derive(Debug, Default)]
pub(super) struct SettleCalls(Mutex<Remembered>);

#[derive(Debug, Default)]
struct Remembered {
    calls: HashMap<B256, Called>,
    /// The oldest first.
    order: VecDeque<B256>,
}

/// What a transaction called.
#[derive(Clone, Copy, Debug)]
pub(super) enum Called {
    /// This proxy, to settle this, or for something else.
    Proxy(Address, Option<SettleCall>),
    Another,
}

impl SettleCalls {
    pub(super) fn get(&self, transaction: &B256) -> Option<Called> {
        self.lock().calls.get(transaction).copied()
    }

    pub(super) fn insert(&self, transaction: B256, called: Called) {
        let mut known = self.lock();
        if known.calls.insert(transaction, called).is_none() {
            known.order.push_back(transaction);
        }
        if known.order.len() > MAX_REMEMBERED
            && let Some(oldest) = known.order.pop_front()
        {
            known.calls.remove(&oldest);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
