//! What is promised and spent, held against the limits.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use alloy_primitives::Address;

use super::{
    Refusal,
    promise::{Promise, Tally, add_to, take_from},
};
use crate::usdc::Usdc;

/// The limits of a budget.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) per_payment: Usdc,
    pub(super) total: Usdc,
    pub(super) per_payee: Option<Usdc>,
    pub(super) per_host: Option<Usdc>,
    pub(super) windows: Vec<(Duration, Usdc)>,
}

/// Every sum that a limit is set on. A promise is in all of them from its reservation until it is given back.
#[derive(Debug)]
pub(super) struct Books {
    pub(super) spent: Usdc,
    pub(super) reserved: Usdc,
    payees: HashMap<Address, Usdc>,
    hosts: HashMap<String, Usdc>,
    windows: Vec<Window>,
}

impl Books {
    /// Books that start from what was spent before.
    pub(super) fn new(limits: &Limits, past: Tally) -> Self {
        let mut windows: Vec<_> = limits.windows.iter().map(|(length, limit)| Window::new(*length, *limit)).collect();
        for window in &mut windows {
            for (at, amount) in &past.times {
                window.add(*at, *amount);
            }
        }
        Self {
            spent: past.spent,
            reserved: Usdc::ZERO,
            payees: past.payees.into_iter().collect(),
            hosts: past.hosts.into_iter().collect(),
            windows,
        }
    }

    /// Sets the promise aside, or says which limit forbids it.
    pub(super) fn reserve(&mut self, limits: &Limits, promise: &Promise, now: u64) -> Result<(), Refusal> {
        let asked = promise.amount;
        if asked > limits.per_payment {
            return Err(Refusal::AbovePaymentLimit { asked, limit: limits.per_payment });
        }
        let remaining = self.remaining(limits.total);
        if asked > remaining {
            return Err(Refusal::AboveTotalLimit { asked, remaining, limit: limits.total });
        }
        if let Some(limit) = limits.per_payee {
            let remaining = left(limit, self.payees.get(&promise.payee));
            if asked > remaining {
                return Err(Refusal::AbovePayeeLimit { payee: promise.payee, asked, remaining, limit });
            }
        }
        if let Some(limit) = limits.per_host {
            let remaining = left(limit, self.hosts.get(&promise.host));
            if asked > remaining {
                return Err(Refusal::AboveHostLimit { host: promise.host.clone(), asked, remaining, limit });
            }
        }
        for window in &mut self.windows {
            window.forget(now);
            let remaining = left(window.limit, Some(&window.sum));
            if asked > remaining {
                let (window, limit) = (Duration::from_secs(window.length), window.limit);
                return Err(Refusal::AboveWindowLimit { window, asked, remaining, limit });
            }
        }
        self.add(promise);
        Ok(())
    }

    /// Enters a promise that was made before, whatever the limits are now.
    pub(super) fn add(&mut self, promise: &Promise) {
        add_to(&mut self.reserved, promise.amount);
        add_to(self.payees.entry(promise.payee).or_default(), promise.amount);
        add_to(self.hosts.entry(promise.host.clone()).or_default(), promise.amount);
        for window in &mut self.windows {
            window.add(promise.at, promise.amount);
        }
    }

    /// The promise was kept.
    pub(super) fn spend(&mut self, promise: &Promise) {
        take_from(&mut self.reserved, promise.amount);
        add_to(&mut self.spent, promise.amount);
    }

    /// Nobody can collect on the promise any more.
    pub(super) fn release(&mut self, promise: &Promise) {
        take_from(&mut self.reserved, promise.amount);
        if let Some(sum) = self.payees.get_mut(&promise.payee) {
            take_from(sum, promise.amount);
        }
        if let Some(sum) = self.hosts.get_mut(&promise.host) {
            take_from(sum, promise.amount);
        }
        for window in &mut self.windows {
            window.take(promise.at, promise.amount);
        }
    }

    pub(super) fn remaining(&self, total: Usdc) -> Usdc {
        left(left(total, Some(&self.spent)), Some(&self.reserved))
    }
}

fn left(limit: Usdc, used: Option<&Usdc>) -> Usdc {
    limit.checked_sub(used.copied().unwrap_or_default()).unwrap_or(Usdc::ZERO)
}

/// What was promised in the last `length` seconds.
#[derive(Debug)]
struct Window {
    length: u64,
    limit: Usdc,
    sum: Usdc,
    times: BTreeMap<u64, Usdc>,
}

impl Window {
    fn new(length: Duration, limit: Usdc) -> Self {
        let seconds = length.as_secs().saturating_add((length.subsec_nanos() > 0).into()).max(1);
        Self { length: seconds, limit, sum: Usdc::ZERO, times: BTreeMap::new() }
    }

    fn add(&mut self, at: u64, amount: Usdc) {
        add_to(self.times.entry(at).or_default(), amount);
        add_to(&mut self.sum, amount);
    }

    fn take(&mut self, at: u64, amount: Usdc) {
        if let Some(sum) = self.times.get_mut(&at) {
            take_from(sum, amount);
            take_from(&mut self.sum, amount);
        }
    }

    fn forget(&mut self, now: u64) {
        while let Some(oldest) = self.times.first_entry()
            && oldest.key().saturating_add(self.length) <= now
        {
            take_from(&mut self.sum, oldest.remove());
        }
    }
}
