//! What a signature promises, and sums of promises kept.

use std::collections::BTreeMap;

use alloy_primitives::Address;
use serde::{Deserialize, Serialize};
use url::Url;

use crate::usdc::Usdc;

/// An amount that somebody may collect, with all that limits are set on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Promise {
    pub(super) amount: Usdc,
    pub(super) payee: Address,
    /// Without the port: whoever has the host has all of them.
    pub(super) host: String,
    /// Unix time in seconds.
    pub(super) at: u64,
}

/// The host as limits are kept by.
pub(super) fn host_of(url: &Url) -> String {
    url.host_str().unwrap_or_default().to_owned()
}

/// Payments that were made, without the payments: what the limits of a later process need to know of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    pub(super) spent: Usdc,
    pub(super) payees: BTreeMap<Address, Usdc>,
    pub(super) hosts: BTreeMap<String, Usdc>,
    /// By second of the signature.
    #[serde(with = "pairs")]
    pub(super) times: BTreeMap<u64, Usdc>,
}

impl Tally {
    /// Times are exact for this long, in seconds.
    const EXACT: u64 = 24 * 60 * 60;
    /// Older ones are summed by so many seconds.
    const COARSE: u64 = 60 * 60;

    pub(super) fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    pub(super) fn add(&mut self, promise: &Promise) {
        add_to(&mut self.spent, promise.amount);
        add_to(self.payees.entry(promise.payee).or_default(), promise.amount);
        add_to(self.hosts.entry(promise.host.clone()).or_default(), promise.amount);
        add_to(self.times.entry(promise.at).or_default(), promise.amount);
        // As many seconds are exact at most, so that half of them are due.
        if self.times.len() as u64 > 2 * Self::EXACT {
            self.thin();
        }
    }

    /// Forgets the seconds of what is older than a day: each hour's payments count as made by its last one, so that a
    /// rolling limit counts them for too long rather than too short.
    pub(super) fn thin(&mut self) {
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

/// Sums only reach the bound when journals of several lives are added up; then nothing is left, which is the safe side.
pub(super) fn add_to(sum: &mut Usdc, amount: Usdc) {
    *sum = sum.checked_add(amount).unwrap_or(Usdc::MAX);
}

pub(super) fn take_from(sum: &mut Usdc, amount: Usdc) {
    *sum = sum.checked_sub(amount).unwrap_or(Usdc::ZERO);
}

/// A map with numbers for keys as pairs: in a tagged enum serde takes JSON's keys for text only.
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
    fn thinning_keeps_every_unit_and_makes_nothing_older() {
        let mut tally = Tally::default();
        let times = [0, 10, 3_599, 3_600, 90_000, 100_000, 100_001];
        for at in times {
            let promise = Promise { amount: Usdc::from_atomic(3), payee: Address::ZERO, host: "h".into(), at };
            tally.add(&promise);
        }
        tally.thin();
        let kept: Vec<_> = tally.times.iter().map(|(at, amount)| (*at, amount.atomic())).collect();
        assert_eq!(kept, [(3_599, 9), (3_600, 3), (90_000, 3), (100_000, 3), (100_001, 3)]);
        assert_eq!(tally.spent.atomic(), 21);
        let text = serde_json::to_string(&tally).unwrap();
        assert_eq!(serde_json::from_str::<Tally>(&text).unwrap(), tally);
    }
}
