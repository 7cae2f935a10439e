//! All channels of a journal, and which of them a request gets.

use std::collections::{BTreeMap, HashMap};

use alloy_primitives::Address;

use super::{
    ChannelEntry, ChannelPolicy,
    entry::{Means, less, plus, sum},
};
use crate::{
    client::Refusal,
    network::Network,
    usdc::Usdc,
    vouchers::{ChannelConfig, ChannelId, Escrow},
};

/// How many sets of lanes are remembered by their ids, which take a hash each.
const MAX_LANE_SETS: usize = 1 << 10;

/// The channels of a journal. A channel is leased to one request at a time.
#[derive(Clone, Default)]
pub(in crate::client) struct Books {
    entries: BTreeMap<ChannelId, ChannelEntry>,
    leased: BTreeMap<ChannelId, Promise>,
    lanes: HashMap<(Network, ChannelConfig), Vec<ChannelId>>,
}

/// A deposit that a lease is about to sign. It takes room from the limits until it is in the books.
#[derive(Clone, Copy, Debug)]
struct Promise {
    payee: Address,
    deposit: Usdc,
}

/// The price of a request, and the channels that can pay it.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) network: Network,
    /// Of the first lane.
    pub(super) config: ChannelConfig,
    pub(super) price: Usdc,
    /// The size of a deposit, before limits.
    pub(super) target: Usdc,
}

/// The channel that a request gets.
#[derive(Debug)]
pub(super) enum Choice {
    /// This one, which is leased to it now. A deposit of this much may be made if one is needed.
    Lane(Box<ChannelEntry>, Usdc),
    /// One of those that are in use.
    Wait,
}

impl Books {
    pub(in crate::client) fn entries(&self) -> impl Iterator<Item = &ChannelEntry> {
        self.entries.values()
    }

    pub(in crate::client) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, id: ChannelId) -> Option<&ChannelEntry> {
        self.entries.get(&id)
    }

    /// Records a channel as it is now, and returns what it was before.
    pub(in crate::client) fn put(&mut self, entry: ChannelEntry) -> Option<ChannelEntry> {
        let id = entry.id();
        if let Some(promise) = self.leased.get_mut(&id) {
            promise.deposit = Usdc::ZERO;
        }
        self.entries.insert(id, entry)
    }

    /// Leases a channel, unless it is leased.
    pub(super) fn lease(&mut self, entry: &ChannelEntry) -> bool {
        let promise = Promise { payee: entry.config.receiver, deposit: Usdc::ZERO };
        let id = entry.id();
        let is_free = !self.leased.contains_key(&id);
        if is_free {
            self.leased.insert(id, promise);
        }
        is_free
    }

    pub(super) fn free(&mut self, id: ChannelId) {
        self.leased.remove(&id);
    }

    pub(super) fn has_channel_with(&self, payee: Address) -> bool {
        self.entries.values().any(|entry| entry.config.receiver == payee)
    }

    /// Leases the best channel for a request: one that needs no deposit, or else one that waits for its deposit, or else one to be filled
    /// again, or else a new one. Earlier lanes come first, so that later ones are idle when there is little to do.
    ///
    /// `no_deposit` is why no deposit can be made, if it is known that none can.
    pub(super) fn choose(
        &mut self,
        policy: &ChannelPolicy,
        terms: &Terms,
        (now, believe_refusals): (u64, bool),
        no_deposit: Option<&Refusal>,
    ) -> Result<Choice, Refusal> {
        self.check_disputes(terms)?;
        let (mut pending, mut empty, mut new, mut is_any_in_use) = (None, None, None, false);
        for lane in 0..policy.lanes.max(1) {
            let id = self.lane_id(policy, terms, lane);
            if self.leased.contains_key(&id) {
                is_any_in_use = true;
                continue;
            }
            let Some(entry) = self.entries.get(&id) else {
                let config = ChannelConfig { salt: policy.salt_of(lane), ..terms.config };
                new = Some(ChannelEntry::new(terms.network, config));
                // Lanes are opened in order; later ones exist only if the policy had another salt.
                break;
            };
            let mut entry = entry.clone();
            entry.expire(now, believe_refusals);
            match entry.means(terms.price, now) {
                Means::Voucher => {
                    self.lease(&entry);
                    return Ok(Choice::Lane(Box::new(entry), Usdc::ZERO));
                }
                Means::PendingDeposit => pending = pending.or(Some(entry)),
                Means::NewDeposit { .. } => empty = empty.or(Some(entry)),
                Means::Nothing => {}
            }
        }
        if let Some(entry) = pending {
            self.lease(&entry);
            return Ok(Choice::Lane(Box::new(entry), Usdc::ZERO));
        }
        let Some(entry) = empty.or(new) else {
            return if is_any_in_use { Ok(Choice::Wait) } else { Err(Refusal::DepositPending) };
        };
        self.lease(&entry);
        match no_deposit.cloned().map_or_else(|| self.promise(policy, &entry, terms), Err) {
            Ok(deposit) => Ok(Choice::Lane(Box::new(entry), deposit)),
            Err(refusal) => {
                self.free(entry.id());
                if is_any_in_use { Ok(Choice::Wait) } else { Err(refusal) }
            }
        }
    }

    /// Makes room for a deposit into a leased channel, as large as the limits allow. Returns its size.
    pub(super) fn promise(
        &mut self,
        policy: &ChannelPolicy,
        entry: &ChannelEntry,
        terms: &Terms,
    ) -> Result<Usdc, Refusal> {
        let id = entry.id();
        let needed = less(entry.ceiling(terms.price), entry.escrow);
        self.check_pins(terms)?;
        let payee = entry.config.receiver;
        let of_payee = |other: &&ChannelEntry| other.config.receiver == payee;
        let promised = |of: Option<Address>| {
            let others = self
                .leased
                .iter()
                .filter(|(leased, promise)| **leased != id && of.is_none_or(|payee| promise.payee == payee));
            sum(others.map(|(_, promise)| promise.deposit))
        };
        let in_escrow = sum(self.entries.values().filter(of_payee).map(ChannelEntry::reserved));
        let in_all = sum(self.entries.values().map(ChannelEntry::reserved));
        let rooms = [
            (Some(payee), policy.escrow_per_payee, plus(in_escrow, promised(Some(payee)))),
            (None, policy.escrow_total, plus(in_all, promised(None))),
        ];
        let mut deposit = needed.max(terms.target);
        for (payee, limit, used) in rooms {
            let remaining = less(limit, used);
            if needed > remaining {
                return Err(Refusal::AboveEscrowLimit { payee, asked: needed, remaining, limit });
            }
            deposit = deposit.min(remaining);
        }
        if let Some(promise) = self.leased.get_mut(&id) {
            promise.deposit = deposit;
        }
        Ok(deposit)
    }

    /// Refuses sellers that contradicted these books.
    fn check_disputes(&self, terms: &Terms) -> Result<(), Refusal> {
        let disputes = self.entries.values().filter_map(|entry| Some((entry, entry.dispute.as_ref()?)));
        match disputes.into_iter().find(|(entry, _)| entry.config.receiver == terms.config.receiver) {
            Some((entry, finding)) => Err(Refusal::ChannelDisputed { channel: entry.id(), finding: finding.clone() }),
            None => Ok(()),
        }
    }

    /// Refuses to fill a channel whose authorizer or delay the seller has changed while money is in its other channels.
    fn check_pins(&self, terms: &Terms) -> Result<(), Refusal> {
        let is_pinned = |entry: &&ChannelEntry| {
            let (one, other) = (entry.config, terms.config);
            let same = |config: ChannelConfig| (config.payer, config.payer_authorizer, config.receiver, config.token);
            entry.network == terms.network
                && same(one) == same(other)
                && (one.receiver_authorizer, one.withdraw_delay) != (other.receiver_authorizer, other.withdraw_delay)
                && !entry.is_empty()
        };
        match self.entries.values().find(is_pinned) {
            Some(entry) => Err(Refusal::ChannelTermsChanged { payee: entry.config.receiver, channel: entry.id() }),
            None => Ok(()),
        }
    }

    fn lane_id(&mut self, policy: &ChannelPolicy, terms: &Terms, lane: u32) -> ChannelId {
        if self.lanes.len() >= MAX_LANE_SETS {
            self.lanes.clear();
        }
        let ids = self.lanes.entry((terms.network, terms.config)).or_default();
        let escrow = Escrow::on(terms.network);
        while ids.len() <= lane as usize {
            let salt = policy.salt_of(ids.len() as u32);
            ids.push(escrow.channel_id(&ChannelConfig { salt, ..terms.config }));
        }
        ids[lane as usize]
    }
}
