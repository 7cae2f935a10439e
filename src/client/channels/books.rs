//! All channels of a journal, and which of them a request gets.

use std::collections::{BTreeMap, HashMap};

use alloy_primitives::{Address, B256};

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
/// How long another channel is preferred to one that its seller called busy, in seconds.
const BUSY_FOR: u64 = 30;

/// The channels of a journal. A channel is leased to one request at a time.
#[derive(Clone, Default)]
pub(in crate::client) struct Books {
    entries: BTreeMap<ChannelId, ChannelEntry>,
    leased: BTreeMap<ChannelId, Promise>,
    /// Channels that their seller works on, although no request of these books uses them, and until when another one is preferred, in
    /// seconds since the Unix epoch.
    busy: BTreeMap<ChannelId, u64>,
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
    /// The only channel that may pay: the purchase was signed for there before, and only there does the seller know it.
    pub(super) only: Option<ChannelId>,
}

/// The channel that a request gets.
#[derive(Debug)]
pub(super) enum Choice {
    /// This one, which is leased to it now. A deposit of this much may be made if one is needed.
    Lane(ChannelId, Box<ChannelEntry>, Usdc),
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
    pub(in crate::client) fn put(&mut self, id: ChannelId, entry: ChannelEntry) -> Option<ChannelEntry> {
        if let Some(promise) = self.leased.get_mut(&id) {
            promise.deposit = Usdc::ZERO;
        }
        self.entries.insert(id, entry)
    }

    /// Leases a channel, unless it is leased.
    pub(super) fn lease(&mut self, id: ChannelId, payee: Address) -> bool {
        let promise = Promise { payee, deposit: Usdc::ZERO };
        let is_free = !self.leased.contains_key(&id);
        if is_free {
            self.leased.insert(id, promise);
        }
        is_free
    }

    pub(super) fn free(&mut self, id: ChannelId) {
        self.leased.remove(&id);
    }

    /// Notes that a channel's seller works on another request of it.
    pub(super) fn set_busy(&mut self, id: ChannelId, now: u64) {
        self.busy.retain(|_, until| *until > now);
        self.busy.insert(id, now.saturating_add(BUSY_FOR));
    }

    pub(super) fn is_busy(&self, id: ChannelId, now: u64) -> bool {
        self.busy.get(&id).is_some_and(|until| *until > now)
    }

    /// Returns the channel in which a named purchase was signed for, if it is remembered.
    pub(in crate::client) fn of_purchase(&self, key: B256) -> Option<ChannelId> {
        self.entries.iter().find(|(_, entry)| entry.has_purchase(key)).map(|(id, _)| *id)
    }

    pub(super) fn has_channel_with(&self, payee: Address) -> bool {
        self.entries.values().any(|entry| entry.config.receiver == payee)
    }

    /// Leases the best channel for a request: one that needs no deposit, or else one that waits for its deposit, or else one to be filled
    /// again, or else a new one, or else one that its seller called busy. Earlier lanes come first, so that later ones are idle when there is
    /// little to do. No lane is filled while a deposit in another one, which no request uses, neither helps nor has expired.
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
        if let Some(only) = terms.only {
            return self.choose_only(only, terms, (now, believe_refusals));
        }
        let payee = terms.config.receiver;
        let (mut ready, mut pending, mut empty, mut new, mut busy) = (None, None, None, None, None);
        let (mut is_any_in_use, mut is_any_unclear) = (false, false);
        let escrow = Escrow::on(terms.network);
        if self.lanes.len() >= MAX_LANE_SETS {
            self.lanes.clear();
        }
        let ids = self.lanes.entry((terms.network, terms.config)).or_default();
        for lane in 0..policy.lanes.max(1) {
            let config = ChannelConfig { salt: policy.salt_of(lane), ..terms.config };
            if ids.len() <= lane as usize {
                ids.push(escrow.channel_id(&config));
            }
            let id = ids[lane as usize];
            if self.leased.contains_key(&id) {
                is_any_in_use = true;
                continue;
            }
            let Some(entry) = self.entries.get(&id) else {
                new = Some((id, ChannelEntry::new(terms.network, config)));
                // Lanes are opened in order; later ones exist only if the policy had another salt.
                break;
            };
            let mut entry = entry.clone();
            entry.expire(now, believe_refusals);
            match entry.means(terms.price, now) {
                Means::Voucher if self.busy.get(&id).is_some_and(|until| *until > now) => {
                    busy = busy.or(Some((id, entry)));
                }
                Means::Voucher => {
                    ready = Some((id, entry));
                    break;
                }
                Means::PendingDeposit => pending = pending.or(Some((id, entry))),
                Means::NewDeposit { .. } => empty = empty.or(Some((id, entry))),
                Means::Nothing => is_any_unclear = true,
            }
        }
        if let Some((id, entry)) = ready.or(pending) {
            self.lease(id, payee);
            return Ok(Choice::Lane(id, Box::new(entry), Usdc::ZERO));
        }
        let mut refusal = Refusal::DepositPending;
        if let Some((id, entry)) = empty.or(new).filter(|_| !is_any_unclear) {
            self.lease(id, payee);
            match no_deposit.cloned().map_or_else(|| self.promise(policy, (id, &entry), terms), Err) {
                Ok(deposit) => return Ok(Choice::Lane(id, Box::new(entry), deposit)),
                Err(why) => {
                    self.free(id);
                    refusal = why;
                }
            }
        }
        match busy {
            Some((id, entry)) => {
                self.lease(id, payee);
                Ok(Choice::Lane(id, Box::new(entry), Usdc::ZERO))
            }
            None if is_any_in_use => Ok(Choice::Wait),
            None => Err(refusal),
        }
    }

    /// Leases the channel in which a purchase was signed for, whatever it holds: the seller is asked for the answer first.
    fn choose_only(
        &mut self,
        only: ChannelId,
        terms: &Terms,
        (now, believe_refusals): (u64, bool),
    ) -> Result<Choice, Refusal> {
        let is_offered = |entry: &&ChannelEntry| {
            let config = ChannelConfig { salt: terms.config.salt, ..entry.config };
            (entry.network, config) == (terms.network, terms.config)
        };
        let Some(entry) = self.entries.get(&only).filter(is_offered) else {
            return Err(Refusal::PurchaseOfChannel { channel: only });
        };
        let mut entry = Box::new(entry.clone());
        if !self.lease(only, entry.config.receiver) {
            return Ok(Choice::Wait);
        }
        entry.expire(now, believe_refusals);
        Ok(Choice::Lane(only, entry, Usdc::ZERO))
    }

    /// Makes room for a deposit into a leased channel, as large as the limits allow. Returns its size.
    pub(super) fn promise(
        &mut self,
        policy: &ChannelPolicy,
        (id, entry): (ChannelId, &ChannelEntry),
        terms: &Terms,
    ) -> Result<Usdc, Refusal> {
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
}
