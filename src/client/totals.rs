//! The sums that limits are checked against. No I/O.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};
use url::Url;

use super::{ChannelEntry, Refusal, channels::Change};
use crate::usdc::Usdc;

/// The amount of one payment, with everything that limits are set on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Charge {
    pub(super) amount: Usdc,
    pub(super) payee: Address,
    /// Without the port: all ports of a machine have one operator.
    pub(super) host: String,
    /// When it was signed, in seconds since the Unix epoch.
    pub(super) signed_at: u64,
}

/// Returns the host that `per_host` counts a URL under.
pub(super) fn host_of(url: &Url) -> String {
    url.host_str().unwrap_or_default().to_owned()
}

/// Returns what a channel takes out of a budget, or gives back to it.
fn channel_charge(channel: &ChannelEntry, amount: Usdc, signed_at: u64) -> Charge {
    Charge { amount, payee: channel.config.receiver, host: channel.host.clone(), signed_at }
}

/// The limits of a budget.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) per_payment: Usdc,
    pub(super) total: Usdc,
    pub(super) per_payee: Option<Usdc>,
    pub(super) per_host: Option<Usdc>,
    /// Of single hosts, in place of `per_host`.
    pub(super) hosts: BTreeMap<String, Usdc>,
    pub(super) windows: Vec<(Duration, Usdc)>,
}

impl Limits {
    fn of_host(&self, host: &str) -> Option<Usdc> {
        self.hosts.get(host).copied().or(self.per_host)
    }
}

/// The sums that the limits apply to. A charge is in all of them from its reservation until it is released.
#[derive(Debug)]
pub(super) struct Totals {
    pub(super) spent: Usdc,
    pub(super) reserved: Usdc,
    payees: HashMap<Address, Usdc>,
    hosts: HashMap<String, Usdc>,
    windows: Vec<RollingWindow>,
}

impl Totals {
    pub(super) fn new(limits: &Limits, paid: PaidTotals) -> Self {
        let mut windows: Vec<_> =
            limits.windows.iter().map(|(length, limit)| RollingWindow::new(*length, *limit)).collect();
        for window in &mut windows {
            for (signed_at, amount) in &paid.times {
                window.add(*signed_at, *amount);
            }
        }
        Self {
            spent: paid.spent,
            reserved: Usdc::ZERO,
            payees: paid.payees.into_iter().collect(),
            hosts: paid.hosts.into_iter().collect(),
            windows,
        }
    }

    pub(super) fn reserve(&mut self, limits: &Limits, charge: &Charge, now: u64) -> Result<(), Refusal> {
        let asked = charge.amount;
        if asked > limits.per_payment {
            return Err(Refusal::AbovePaymentLimit { asked, limit: limits.per_payment });
        }
        let remaining = self.remaining(limits.total);
        if asked > remaining {
            return Err(Refusal::AboveTotalLimit { asked, remaining, limit: limits.total });
        }
        if let Some(limit) = limits.per_payee {
            let remaining = remaining_of(limit, self.payees.get(&charge.payee));
            if asked > remaining {
                return Err(Refusal::AbovePayeeLimit { payee: charge.payee, asked, remaining, limit });
            }
        }
        if let Some(limit) = limits.of_host(&charge.host) {
            let remaining = remaining_of(limit, self.hosts.get(&charge.host));
            if asked > remaining {
                return Err(Refusal::AboveHostLimit { host: charge.host.clone(), asked, remaining, limit });
            }
        }
        for window in &mut self.windows {
            window.remove_older(now);
            let remaining = remaining_of(window.limit, Some(&window.sum));
            if asked > remaining {
                let (window, limit) = (Duration::from_secs(window.length), window.limit);
                return Err(Refusal::AboveWindowLimit { window, asked, remaining, limit });
            }
        }
        self.add(charge);
        Ok(())
    }

    /// Adds a charge without checking limits, which may have been lowered since it was signed.
    pub(super) fn add(&mut self, charge: &Charge) {
        add_to(&mut self.reserved, charge.amount);
        add_to(self.payees.entry(charge.payee).or_default(), charge.amount);
        add_to(self.hosts.entry(charge.host.clone()).or_default(), charge.amount);
        for window in &mut self.windows {
            window.add(charge.signed_at, charge.amount);
        }
    }

    /// Returns the largest amount that every limit but that per payment leaves room for.
    pub(super) fn remaining_for(&mut self, limits: &Limits, charge: &Charge, now: u64) -> Usdc {
        let payee = limits.per_payee.map(|limit| remaining_of(limit, self.payees.get(&charge.payee)));
        let host = limits.of_host(&charge.host).map(|limit| remaining_of(limit, self.hosts.get(&charge.host)));
        let windows = self.windows.iter_mut().map(|window| {
            window.remove_older(now);
            remaining_of(window.limit, Some(&window.sum))
        });
        let least = windows.chain(payee).chain(host).min().unwrap_or(Usdc::MAX);
        least.min(self.remaining(limits.total))
    }

    /// Adds a channel of an earlier process: its deposits are reserved, and what was charged of them is spent.
    pub(super) fn add_channel(&mut self, channel: &ChannelEntry) {
        for (signed_at, amount) in channel.deposits() {
            self.add(&channel_charge(channel, *amount, *signed_at));
        }
        self.spend(&channel_charge(channel, channel.spent(), channel.used_at));
    }

    /// Moves what a channel was charged since from reserved to spent, and follows the changes of its deposits. Signed deposits have
    /// reservations of their own.
    pub(super) fn channel_changed(&mut self, before: Option<&ChannelEntry>, now: &ChannelEntry, changes: &[Change]) {
        let spent_before = before.map(ChannelEntry::spent);
        for change in changes {
            match *change {
                Change::Released { signed_at, amount } => self.release(&channel_charge(now, amount, signed_at)),
                Change::Found { at, amount } => self.add(&channel_charge(now, amount, at)),
            }
        }
        self.spend(&channel_charge(now, remaining_of(now.spent(), spent_before.as_ref()), now.used_at));
    }

    pub(super) fn spend(&mut self, charge: &Charge) {
        subtract_from(&mut self.reserved, charge.amount);
        add_to(&mut self.spent, charge.amount);
    }

    pub(super) fn release(&mut self, charge: &Charge) {
        subtract_from(&mut self.reserved, charge.amount);
        if let Some(sum) = self.payees.get_mut(&charge.payee) {
            subtract_from(sum, charge.amount);
        }
        if let Some(sum) = self.hosts.get_mut(&charge.host) {
            subtract_from(sum, charge.amount);
        }
        for window in &mut self.windows {
            window.subtract(charge.signed_at, charge.amount);
        }
    }

    pub(super) fn remaining(&self, total: Usdc) -> Usdc {
        remaining_of(remaining_of(total, Some(&self.spent)), Some(&self.reserved))
    }
}

/// The sum of what was signed in the last `length` seconds.
#[derive(Debug)]
struct RollingWindow {
    length: u64,
    limit: Usdc,
    sum: Usdc,
    by_second: BTreeMap<u64, Usdc>,
}

impl RollingWindow {
    fn new(length: Duration, limit: Usdc) -> Self {
        let seconds = length.as_secs().saturating_add((length.subsec_nanos() > 0).into()).max(1);
        Self { length: seconds, limit, sum: Usdc::ZERO, by_second: BTreeMap::new() }
    }

    fn add(&mut self, signed_at: u64, amount: Usdc) {
        add_to(self.by_second.entry(signed_at).or_default(), amount);
        add_to(&mut self.sum, amount);
    }

    fn subtract(&mut self, signed_at: u64, amount: Usdc) {
        if let Some(sum) = self.by_second.get_mut(&signed_at) {
            subtract_from(sum, amount);
            subtract_from(&mut self.sum, amount);
        }
    }

    fn remove_older(&mut self, now: u64) {
        while let Some(oldest) = self.by_second.first_entry()
            && oldest.key().saturating_add(self.length) <= now
        {
            subtract_from(&mut self.sum, oldest.remove());
        }
    }
}

pub(super) fn remaining_of(limit: Usdc, used: Option<&Usdc>) -> Usdc {
    limit.checked_sub(used.copied().unwrap_or_default()).unwrap_or(Usdc::ZERO)
}

/// Sums reach the bound only if journals of several lives are added up. Then nothing remains, which is the safe side.
fn add_to(sum: &mut Usdc, amount: Usdc) {
    *sum = sum.checked_add(amount).unwrap_or(Usdc::MAX);
}

fn subtract_from(sum: &mut Usdc, amount: Usdc) {
    *sum = sum.checked_sub(amount).unwrap_or(Usdc::ZERO);
}

/// The sums of paid entries that a later process needs for its limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PaidTotals {
    pub(super) spent: Usdc,
    pub(super) payees: BTreeMap<Address, Usdc>,
    pub(super) hosts: BTreeMap<String, Usdc>,
    /// By second of the signature.
    #[serde(with = "pairs")]
    pub(super) times: BTreeMap<u64, Usdc>,
}

impl PaidTotals {
    /// How long times are kept to the second, in seconds.
    const EXACT: u64 = 24 * 60 * 60;
    /// The length of the periods that older times are summed by, in seconds.
    const COARSE: u64 = 60 * 60;

    pub(super) fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    pub(super) fn add(&mut self, charge: &Charge) {
        add_to(&mut self.spent, charge.amount);
        add_to(self.payees.entry(charge.payee).or_default(), charge.amount);
        add_to(self.hosts.entry(charge.host.clone()).or_default(), charge.amount);
        add_to(self.times.entry(charge.signed_at).or_default(), charge.amount);
        // At most `EXACT` of these are of the last day, so that compacting removes at least half of them.
        if self.times.len() as u64 > 2 * Self::EXACT {
            self.compact();
        }
    }

    /// Sums up times older than a day by the hour. Each hour counts as paid at its last payment, so that a rolling limit counts it for
    /// too long rather than too short.
    pub(super) fn compact(&mut self) {
        let Some((&newest, _)) = self.times.last_key_value() else { return };
        let exact = self.times.split_off(&newest.saturating_sub(Self::EXACT));
        let mut hours = BTreeMap::new();
        for (at, amount) in std::mem::replace(&mut self.times, exact) {
            let (last, sum) = hours.entry(at / Self::COARSE).or_insert((at, Usdc::ZERO));
            *last = at.max(*last);
            add_to(sum, amount);
        }
        self.times.extend(hours.into_values());
    }
}

/// Writes a map as pairs: in a tagged enum, serde reads the keys of a JSON object as text only.
mod pairs {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serializer};

    use crate::usdc::Usdc;

    pub(super) fn serialize<S: Serializer>(times: &BTreeMap<u64, Usdc>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(times)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<u64, Usdc>, D::Error> {
        Ok(Vec::deserialize(deserializer)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compacting_times_keeps_every_unit_and_makes_none_older() {
        let mut paid = PaidTotals::default();
        let times = [0, 10, 3_599, 3_600, 90_000, 100_000, 100_001];
        for at in times {
            let charge = Charge { amount: Usdc::from_atomic(3), payee: Address::ZERO, host: "h".into(), signed_at: at };
            paid.add(&charge);
        }
        paid.compact();
        let kept: Vec<_> = paid.times.iter().map(|(at, amount)| (*at, amount.atomic())).collect();
        assert_eq!(kept, [(3_599, 9), (3_600, 3), (90_000, 3), (100_000, 3), (100_001, 3)]);
        assert_eq!(paid.spent.atomic(), 21);
        let text = serde_json::to_string(&paid).unwrap();
        assert_eq!(serde_json::from_str::<PaidTotals>(&text).unwrap(), paid);
    }
}
