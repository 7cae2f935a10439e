//! A channel in use by one request.

use std::{io, sync::Arc};

use tokio::{sync::Notify, time::timeout};

use super::{
    ChannelEntry, ChannelPolicy,
    books::{Choice, Terms},
};
use crate::{
    client::{Budget, Refusal, budget::Reservation},
    usdc::Usdc,
    vouchers::ChannelId,
};

/// A channel that one request uses. Others wait, or take another one, until this is dropped.
///
/// The entry is a copy. [`write`](Self::write) puts it into the journal, and the difference into the budget.
pub(in crate::client) struct Lease {
    budget: Budget,
    id: ChannelId,
    pub(super) entry: ChannelEntry,
}

impl Lease {
    /// Leases the best channel for a request, and returns the deposit that may be made into it. `no_deposit` is why none can be made.
    pub(super) async fn best(
        budget: &Budget,
        policy: &ChannelPolicy,
        terms: &Terms,
        now: u64,
        no_deposit: Option<&Refusal>,
    ) -> Result<(Self, Usdc), Refusal> {
        let freed = freed(budget);
        let waiting = async {
            loop {
                let notified = freed.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                let choice = {
                    let at = (now, budget.releases_failed());
                    budget.journal().with_books(|books| books.choose(policy, terms, at, no_deposit))?
                };
                match choice {
                    Choice::Lane(id, entry, deposit) => return Ok((Self::of(budget, id, *entry), deposit)),
                    Choice::Wait => notified.await,
                }
            }
        };
        timeout(ChannelPolicy::LANE_WAIT, waiting)
            .await
            .unwrap_or(Err(Refusal::LanesBusy { payee: terms.config.receiver }))
    }

    /// Leases another channel for the request that has this one, which its seller called busy, and returns the deposit that may be made.
    /// Returns `None` if there is none at present but such as are busy, too.
    pub(super) fn another(&self, policy: &ChannelPolicy, terms: &Terms, now: u64) -> Option<(Self, Usdc)> {
        let at = (now, self.budget.releases_failed());
        self.budget.journal().with_books(|books| {
            let Ok(Choice::Lane(id, mut entry, deposit)) = books.choose(policy, terms, at, None) else { return None };
            if books.is_busy(id, now) {
                books.free(id);
                return None;
            }
            if entry.host.is_empty() {
                entry.host.clone_from(&self.entry.host);
            }
            (entry.method, entry.url) = (self.entry.method.clone(), self.entry.url.clone());
            Some((Self::of(&self.budget, id, *entry), deposit))
        })
    }

    /// Writes the entry and frees the channel, and has other requests take it only if there is no other one for a while.
    pub(super) async fn leave_busy(self, now: u64) {
        self.budget.journal().with_books(|books| books.set_busy(self.id, now));
        if let Err(error) = self.write(false, None).await {
            tracing::warn!(%error, "a channel could not be written to the journal");
        }
    }

    /// Wraps a channel that was leased in the books.
    fn of(budget: &Budget, id: ChannelId, entry: ChannelEntry) -> Self {
        Self { budget: budget.clone(), id, entry }
    }

    /// Leases this channel, or returns `None` if it is in use or unknown.
    pub(super) fn get(budget: &Budget, id: ChannelId) -> Option<Self> {
        let entry = budget.journal().with_books(|books| {
            let entry = books.get(id)?.clone();
            books.lease(id, entry.config.receiver).then_some(entry)
        })?;
        Some(Self::of(budget, id, entry))
    }

    pub(super) const fn id(&self) -> ChannelId {
        self.id
    }

    /// Makes room for a deposit into this channel. Returns its size.
    pub(super) fn promise(&self, policy: &ChannelPolicy, terms: &Terms) -> Result<Usdc, Refusal> {
        self.budget.journal().with_books(|books| books.promise(policy, (self.id, &self.entry), terms))
    }

    /// Writes the entry into the journal. If `durable`, it is on disk when this returns.
    ///
    /// `deposit` is the reservation of a deposit that the entry has and the journal has not. It is held from then on, or released if the
    /// entry cannot be written.
    pub(super) async fn write(mut self, durable: bool, mut deposit: Option<Reservation>) -> io::Result<Self> {
        let journal = self.budget.journal().clone();
        let changes = self.entry.take_changes();
        let entry = (self.id, self.entry.clone());
        // The lease goes along: if the caller is cancelled, the channel is free only once the entry is written, or will never be.
        let finish = move |before: Option<ChannelEntry>| {
            if let Some(reservation) = &mut deposit {
                reservation.hold();
            }
            self.budget.channel_changed(before.as_ref(), &self.entry, &changes);
            self
        };
        journal.write_channel(entry, durable, finish).await
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.budget.journal().with_books(|books| books.free(self.id));
        freed(&self.budget).notify_waiters();
    }
}

fn freed(budget: &Budget) -> Arc<Notify> {
    budget.journal().freed()
}
