//! A channel in use by one request.

use std::{io, time::Duration};

use tokio::time::timeout;

use super::{
    ChannelEntry, ChannelPolicy,
    books::{Books, Choice, Terms, Wanted},
};
use crate::{
    client::{Budget, Journal, Refusal, budget::Reservation, journal::Record},
    usdc::Usdc,
    vouchers::ChannelId,
};

/// How long a request waits for a channel if all are in use.
const WAIT: Duration = Duration::from_secs(60);

/// A channel that one request uses. Others wait, or take another one, until this is dropped.
///
/// The entry is a copy. [`write`](Self::write) puts it into the journal, and the difference into the budget.
pub(in crate::client) struct Lease {
    budget: Budget,
    id: ChannelId,
    pub(super) entry: ChannelEntry,
}

impl Lease {
    /// Leases the channel that a request wants, and returns the deposit that may be made into it. Waits for one if all are in use.
    pub(super) async fn wait_for(
        budget: &Budget,
        policy: &ChannelPolicy,
        terms: &Terms,
        wanted: Wanted<'_>,
        now: u64,
    ) -> Result<(Self, Usdc), Refusal> {
        let freed = with_books(budget, |books| books.freed());
        let waiting = async {
            loop {
                let notified = freed.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                match Self::choose(budget, policy, terms, wanted, now)? {
                    Some(chosen) => return Ok(chosen),
                    None => notified.await,
                }
            }
        };
        timeout(WAIT, waiting).await.unwrap_or(Err(Refusal::LanesBusy { payee: terms.config.receiver }))
    }

    /// Leases another channel for the request that has this one, which its seller called busy, and returns the deposit that may be made.
    /// Returns `None` if there is none at present but such as are busy, too.
    pub(super) fn another(&self, policy: &ChannelPolicy, terms: &Terms, now: u64) -> Option<(Self, Usdc)> {
        Self::choose(&self.budget, policy, terms, Wanted::NotBusy, now).ok().flatten()
    }

    /// Returns `None` if the request has to wait.
    fn choose(
        budget: &Budget,
        policy: &ChannelPolicy,
        terms: &Terms,
        wanted: Wanted<'_>,
        now: u64,
    ) -> Result<Option<(Self, Usdc)>, Refusal> {
        let at = (now, budget.releases_failed());
        Ok(match with_books(budget, |books| books.choose(policy, terms, wanted, at))? {
            Choice::Lane(id, entry, deposit) => Some((Self { budget: budget.clone(), id, entry: *entry }, deposit)),
            Choice::Wait => None,
        })
    }

    /// Leases this channel, or returns `None` if it is in use or unknown.
    pub(super) fn get(budget: &Budget, id: ChannelId) -> Option<Self> {
        let entry = with_books(budget, |books| {
            let entry = books.get(id)?.clone();
            books.lease(id, entry.config.receiver).then_some(entry)
        })?;
        Some(Self { budget: budget.clone(), id, entry })
    }

    pub(super) const fn id(&self) -> ChannelId {
        self.id
    }

    /// Makes room for a deposit into this channel. Returns its size.
    pub(super) fn promise(&self, policy: &ChannelPolicy, terms: &Terms) -> Result<Usdc, Refusal> {
        with_books(&self.budget, |books| books.promise(policy, (self.id, &self.entry), terms))
    }

    /// Writes the entry and frees the channel, and has other requests take it only if there is no other one for a while. It is on disk when
    /// this returns: a purchase that is paid in another channel must not be found here after a power cut.
    pub(super) async fn leave_busy(self, now: u64) -> io::Result<()> {
        with_books(&self.budget, |books| books.set_busy(self.id, now));
        self.write_durably(None).await.map(drop)
    }

    /// Writes the entry, which need not be durable, and frees the channel.
    ///
    /// If it cannot be written, it holds all the same for this process. A later one knows less, and the next voucher or the seller's correction
    /// tells it.
    pub(super) async fn write_soon(self) {
        if let Err(error) = self.write(false, None).await {
            tracing::warn!(%error, "the state of a payment channel could not be written to the journal");
        }
    }

    /// Writes the entry into the journal; it is on disk when this returns.
    ///
    /// `deposit` is the reservation of a deposit that the entry has and the journal has not. It is held from then on, or released if the
    /// entry cannot be written.
    pub(super) async fn write_durably(self, deposit: Option<Reservation>) -> io::Result<Self> {
        self.write(true, deposit).await
    }

    async fn write(mut self, durable: bool, mut deposit: Option<Reservation>) -> io::Result<Self> {
        let (journal, changes) = (self.budget.journal().clone(), self.entry.take_changes());
        let record = Record::Channel(Box::new(self.entry.clone()));
        // The lease goes along: if the caller is cancelled, the channel is free only once the entry is written, or will never be.
        let put = move |journal: &Journal, record, written: io::Result<()>| {
            if durable {
                written?;
            } else if let Err(error) = written {
                tracing::warn!(%error, "the state of a payment channel could not be written to the journal");
            }
            let before = match record {
                Record::Channel(entry) => journal.with_books(|books| books.put(self.id, *entry)),
                _ => None,
            };
            if let Some(reservation) = &mut deposit {
                reservation.hold();
            }
            self.budget.channel_changed(before.as_ref(), &self.entry, &changes);
            Ok(self)
        };
        journal.append(record, durable, put).await
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        with_books(&self.budget, |books| books.free(self.id));
    }
}

fn with_books<T>(budget: &Budget, ask: impl FnOnce(&mut Books) -> T) -> T {
    budget.journal().with_books(ask)
}
