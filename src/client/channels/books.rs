//! All channels of a journal, and which of them a request gets.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use alloy_primitives::{Address, B256};
use tokio::sync::Notify;

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
    /// Told when a lease ends.
    freed: Arc<Notify>,
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
}

/// Which of the channels a request wants.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted<'a> {
    /// The best one.
    Best,
    /// The best one that needs no deposit. This is why none can be made.
    NoDeposit(&'a Refusal),
    /// The best one that its seller did not call busy.
    NotBusy,
    /// This one, whatever it holds: its purchase was signed for there, and only there does the seller know it.
    Only(ChannelId),
}

/// The channel that a request gets.
#[derive(Debug)]
pub(super) enum Choice {
    /// This one, which is leased to it now. A deposit of this much may be made if one is needed.
    Lane(ChannelId, Box<ChannelEntry>, Usdc),
    /// One of those that are in use.
    Wait,
}

/// What a channel that nobody uses is worth to a request. The first that can be had is taken, and of equal ones the earlier lane, so that
/// later lanes are idle when there is little to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// It needs no deposit.
    Ready,
    /// Its pending deposit is sent again.
    Pending,
    /// A deposit fills it again.
    Empty,
    /// A deposit opens it.
    New,
    /// It needs no deposit, but its seller called it busy a while ago.
    Busy,
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
        let is_free = !self.leased.contains_key(&id);
        if is_free {
            self.leased.insert(id, Promise { payee, deposit: Usdc::ZERO });
        }
        is_free
    }

    /// Ends a lease, and wakes the requests that wait for one.
    pub(super) fn free(&mut self, id: ChannelId) {
        self.leased.remove(&id);
        self.freed.notify_waiters();
    }

    /// Returns what is told when a lease ends.
    pub(super) fn freed(&self) -> Arc<Notify> {
        self.freed.clone()
    }

    /// Notes that a channel's seller works on another request of it.
    pub(super) fn set_busy(&mut self, id: ChannelId, now: u64) {
        self.busy.retain(|_, until| *until > now);
        self.busy.insert(id, now.saturating_add(BUSY_FOR));
    }

    /// Returns the channel in which a named purchase was signed for, if it is remembered.
    pub(in crate::client) fn of_purchase(&self, key: B256) -> Option<ChannelId> {
        self.entries.iter().find(|(_, entry)| entry.has_purchase(key)).map(|(id, _)| *id)
    }

    pub(in crate::client) fn has_channel_with(&self, payee: Address) -> bool {
        self.entries.values().any(|entry| entry.config.receiver == payee)
    }

    /// Leases the channel for a request that is the first by its [`Rank`].
    ///
    /// No channel is filled or opened while a deposit in another one, which no request uses, neither helps nor has expired. A request that gets
    /// none waits if another request uses one.
    pub(super) fn choose(
        &mut self,
        policy: &ChannelPolicy,
        terms: &Terms,
        wanted: Wanted<'_>,
        (now, believe_refusals): (u64, bool),
    ) -> Result<Choice, Refusal> {
        self.check_disputes(terms)?;
        if let Wanted::Only(id) = wanted {
            return self.choose_only(id, terms, (now, believe_refusals));
        }
        let (mut found, mut is_any_in_use, mut is_any_unclear) = (Vec::new(), false, false);
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
            let Some(known) = self.entries.get(&id) else {
                found.push((Rank::New, id, ChannelEntry::new(terms.network, config)));
                // Lanes are opened in order; later ones exist only if the policy had another salt.
                break;
            };
            let mut entry = known.clone();
            entry.expire(now, believe_refusals);
            let rank = match entry.means(terms.price, now) {
                Means::Voucher if self.busy.get(&id).is_some_and(|until| *until > now) => Rank::Busy,
                Means::Voucher => Rank::Ready,
                Means::PendingDeposit => Rank::Pending,
                Means::NewDeposit { .. } => Rank::Empty,
                Means::Nothing => {
                    is_any_unclear = true;
                    continue;
                }
            };
            found.push((rank, id, entry));
            if rank == Rank::Ready {
                break;
            }
        }
        found.sort_by_key(|(rank, ..)| *rank);
        let mut refusal = None;
        for (rank, id, entry) in found {
            let room = match (rank, wanted) {
                (Rank::Ready | Rank::Pending, _) => Ok(Usdc::ZERO),
                (Rank::Empty | Rank::New, _) if is_any_unclear => Err(Refusal::DepositPending),
                (Rank::Empty | Rank::New, Wanted::NoDeposit(why)) => Err(why.clone()),
                (Rank::Empty | Rank::New, _) => self.room_for_deposit(policy, (id, &entry), terms),
                (Rank::Busy, Wanted::NotBusy) => continue,
                (Rank::Busy, _) => Ok(Usdc::ZERO),
            };
            match room {
                Ok(deposit) => {
                    self.leased.insert(id, Promise { payee: terms.config.receiver, deposit });
                    return Ok(Choice::Lane(id, Box::new(entry), deposit));
                }
                Err(why) => refusal = refusal.or(Some(why)),
            }
        }
        match is_any_in_use {
            true => Ok(Choice::Wait),
            false => Err(refusal.unwrap_or(Refusal::DepositPending)),
        }
    }

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
        let deposit = self.room_for_deposit(policy, (id, entry), terms)?;
        if let Some(promise) = self.leased.get_mut(&id) {
            promise.deposit = deposit;
        }
        Ok(deposit)
    }

    /// Returns the size of a deposit into a channel, as large as the limits allow.
    fn room_for_deposit(
        &self,
        policy: &ChannelPolicy,
        (id, entry): (ChannelId, &ChannelEntry),
        terms: &Terms,
    ) -> Result<Usdc, Refusal> {
        let needed = less(entry.ceiling(terms.price), entry.escrow);
        self.check_pins(terms)?;
        let payee = entry.config.receiver;
        let used = |of: Option<Address>| {
            let is_counted = |other: Address| of.is_none_or(|payee| other == payee);
            let entries = self.entries.values().filter(|other| is_counted(other.config.receiver));
            let others = self.leased.iter().filter(|(leased, promise)| **leased != id && is_counted(promise.payee));
            plus(sum(entries.map(ChannelEntry::reserved)), sum(others.map(|(_, promise)| promise.deposit)))
        };
        let mut deposit = needed.max(terms.target);
        for (payee, limit) in [(Some(payee), policy.escrow_per_payee), (None, policy.escrow_total)] {
            let remaining = less(limit, used(payee));
            if needed > remaining {
                return Err(Refusal::AboveEscrowLimit { payee, asked: needed, remaining, limit });
            }
            deposit = deposit.min(remaining);
        }
        Ok(deposit)
    }

    /// Refuses sellers that contradicted these books.
    fn check_disputes(&self, terms: &Terms) -> Result<(), Refusal> {
        let disputes = self.entries.values().filter_map(|entry| Some((entry, entry.dispute()?)));
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
