//! Spending limits, and the sums that they are checked against.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;

use super::{
    ChannelEntry, Journal, JournalEntry, Refusal,
    channels::Change,
    journal::Record,
    sums::{add_to, less, sum},
    totals::{Charge, Limits, Totals},
};
use crate::usdc::Usdc;

/// Spending limits, shared by every payer that is built with a clone of this budget.
///
/// There are limits per payment and in total, and optional ones per payee, per host and per period. They cover the whole life of
/// the budget and, with a [`Journal`] in a file, the lives of earlier processes.
///
/// An amount is *reserved* before anything is signed, and becomes *spent* when a server reports that it was paid. A payment without
/// a proven outcome stays reserved, because the server can still use the signature. Only the chain can release it: see
/// `reconcile` (feature `onchain`).
///
/// A permit for a maximum counts as all of it, until the chain shows that less was charged. A seller that says so can still charge the
/// rest: the amount stays reserved until the transaction is seen, at once by the payer's node ([`PermitPolicy::node`](super::PermitPolicy))
/// or else by `reconcile`, which also releases a permit that has expired unused.
///
/// ```
/// use std::time::Duration;
/// use tower_x402::{Usdc, client::Budget};
///
/// let budget = Budget::builder()
///     .per_payment("$0.005".parse()?)
///     .per_payee("$1.00".parse()?)
///     .per_host("$1.00".parse()?)
///     .per_window(Duration::from_secs(3_600), "$0.50".parse()?)
///     .total("$2.00".parse()?)
///     .build();
/// assert_eq!(budget.remaining(), Usdc::from_atomic(2_000_000));
/// assert_eq!(budget.spent(), Usdc::ZERO);
/// # Ok::<(), tower_x402::ParseUsdcError>(())
/// ```
#[derive(Clone)]
pub struct Budget(Arc<Inner>);

struct Inner {
    limits: Limits,
    release_failed: bool,
    journal: Journal,
    totals: Mutex<Totals>,
}

impl Budget {
    /// The default limit per payment: $0.01.
    pub const DEFAULT_PER_PAYMENT: Usdc = Usdc::from_atomic(10_000);
    /// The default limit in total: $1.00.
    pub const DEFAULT_TOTAL: Usdc = Usdc::from_atomic(1_000_000);

    /// Returns a builder with the default limits and a journal in memory.
    pub fn builder() -> BudgetBuilder {
        BudgetBuilder {
            limits: Limits {
                per_payment: Self::DEFAULT_PER_PAYMENT,
                total: Self::DEFAULT_TOTAL,
                per_payee: None,
                per_host: None,
                hosts: BTreeMap::new(),
                windows: Vec::new(),
            },
            release_failed: false,
            journal: Journal::in_memory(),
        }
    }

    /// Returns the limit per payment.
    pub fn per_payment(&self) -> Usdc {
        self.0.limits.per_payment
    }

    /// Returns the limit in total.
    pub fn total(&self) -> Usdc {
        self.0.limits.total
    }

    /// Returns the sum of all payments that a server, or the chain, has confirmed.
    pub fn spent(&self) -> Usdc {
        self.totals().spent
    }

    /// Returns the sum of confirmed payments by payee. The sums add up to [`spent`](Self::spent) while no payment is under way.
    pub fn spent_by_payee(&self) -> BTreeMap<Address, Usdc> {
        let mut payees = self.0.journal.paid().payees;
        for channel in self.0.journal.channels() {
            if channel.spent() > Usdc::ZERO {
                add_to(payees.entry(channel.config.receiver).or_default(), channel.spent());
            }
        }
        payees
    }

    /// Returns the sum of payments that are under way or have no proven outcome.
    pub fn reserved(&self) -> Usdc {
        self.totals().reserved
    }

    /// Returns the part of [`reserved`](Self::reserved) that is in payment channels. It can be spent, at the payees of these channels only.
    pub fn in_escrow(&self) -> Usdc {
        self.0.journal.with_books(|books| {
            sum(books.entries().filter(|channel| channel.dispute().is_none()).map(ChannelEntry::available))
        })
    }

    /// Returns the limit in total without what is spent and reserved.
    pub fn remaining(&self) -> Usdc {
        self.totals().remaining(self.0.limits.total)
    }

    /// Returns the journal of payments signed under this budget.
    pub fn journal(&self) -> &Journal {
        &self.0.journal
    }

    /// Reserves an amount at time `now`, or returns the limit that forbids it.
    pub(super) fn reserve(&self, charge: Charge, now: u64) -> Result<Reservation, Refusal> {
        self.release_expired(now);
        self.totals().reserve(&self.0.limits, &charge, now)?;
        Ok(Reservation { budget: self.clone(), charge, is_held: false })
    }

    /// Reserves a deposit of `least` to `most` into a payment channel, as large as the limits allow. `charge` has the price of the request.
    pub(super) fn reserve_deposit(
        &self,
        charge: Charge,
        (least, most): (Usdc, Usdc),
        now: u64,
    ) -> Result<(Reservation, Usdc), Refusal> {
        self.release_expired(now);
        let mut totals = self.totals();
        let remaining = totals.remaining_for(&self.0.limits, &charge, now);
        let amount = least.max(most.min(remaining));
        let limits = Limits { per_payment: Usdc::MAX, ..self.0.limits.clone() };
        let deposit = Charge { amount, ..charge };
        totals.reserve(&limits, &deposit, now)?;
        drop(totals);
        Ok((Reservation { budget: self.clone(), charge: deposit, is_held: false }, amount))
    }

    /// Checks a price against the limit per payment.
    pub(super) fn check_price(&self, asked: Usdc) -> Result<(), Refusal> {
        let limit = self.per_payment();
        if asked > limit { Err(Refusal::AbovePaymentLimit { asked, limit }) } else { Ok(()) }
    }

    /// Returns `true` if expired payments are released on the server's word that they failed.
    pub(super) fn releases_failed(&self) -> bool {
        self.0.release_failed
    }

    /// Follows a channel, of which the journal has another entry now.
    pub(super) fn channel_changed(&self, before: Option<&ChannelEntry>, now: &ChannelEntry, changes: &[Change]) {
        self.totals().channel_changed(before, now, changes);
    }

    /// Releases the amounts of payments that their server reported as failed and that have expired by `now`, in seconds since the
    /// Unix epoch, and what it says it did not charge of expired permits. Does nothing unless the budget was built with [`release_failed`](BudgetBuilder::release_failed).
    ///
    /// Every reservation does this first. Call it before you read [`remaining`](Self::remaining) if no payment was made for a while.
    pub fn release_expired(&self, now: u64) {
        if !self.0.release_failed {
            return;
        }
        self.0.journal.take_expired(now).iter().for_each(|entry| self.spend(entry));
    }

    /// Records a proven outcome. Returns `false` if the payment was closed before.
    #[cfg(any(feature = "onchain", feature = "reqwest"))]
    pub(super) async fn resolve(&self, outcome: Record) -> bool {
        let Some(entry) = self.0.journal.close(&outcome) else { return false };
        let is_void = matches!(outcome, Record::Void { .. });
        self.0.journal.remember_resolved(entry.nonce, !is_void);
        match is_void {
            true => self.totals().release(&entry.charge()),
            false => self.spend(&entry),
        }
        if let Err(error) = self.0.journal.write_outcome(outcome).await {
            tracing::warn!(%error, nonce = %entry.nonce, "the outcome of a payment could not be written to the journal");
        }
        true
    }

    /// Counts what was charged as spent, of a payment that was closed. The rest of what was signed for is free again.
    pub(super) fn spend(&self, payment: &JournalEntry) {
        let (charge, spent) = (payment.charge(), payment.spent());
        let rest = Charge { amount: less(charge.amount, spent.amount), ..charge };
        let mut totals = self.totals();
        totals.spend(&spent);
        totals.release(&rest);
    }

    fn totals(&self) -> MutexGuard<'_, Totals> {
        self.0.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Budget {
    /// Returns a budget with the default limits and a journal in memory.
    fn default() -> Self {
        Self::builder().build()
    }
}

debug_fields!(Budget |this| { limits: this.0.limits, spent: this.spent(), reserved: this.reserved() });

/// Builder of a [`Budget`].
#[derive(Debug)]
#[must_use]
pub struct BudgetBuilder {
    limits: Limits,
    release_failed: bool,
    journal: Journal,
}

impl BudgetBuilder {
    /// Sets the most that one payment may cost. Default: $0.01.
    pub fn per_payment(mut self, limit: Usdc) -> Self {
        self.limits.per_payment = limit;
        self
    }

    /// Sets the most that may be spent over the life of the budget. Default: $1.00.
    pub fn total(mut self, limit: Usdc) -> Self {
        self.limits.total = limit;
        self
    }

    /// Sets the most that each payee (`payTo`) may get over the life of the budget, on all networks together. Default: no limit.
    pub fn per_payee(mut self, limit: Usdc) -> Self {
        self.limits.per_payee = Some(limit);
        self
    }

    /// Sets the most that requests to each host may cost over the life of the budget. Default: no limit.
    ///
    /// All ports of a host share its limit. Two names of one machine are two hosts.
    pub fn per_host(mut self, limit: Usdc) -> Self {
        self.limits.per_host = Some(limit);
        self
    }

    /// Sets the most that requests to this host may cost over the life of the budget, in place of [`per_host`](Self::per_host). `host` is as
    /// in URLs, in lower case and without a port.
    ///
    /// ```
    /// use tower_x402::client::Budget;
    ///
    /// let budget = Budget::builder().per_host("$0.10".parse()?).limit_host("judge.example", "$1.00".parse()?).build();
    /// # Ok::<(), tower_x402::ParseUsdcError>(())
    /// ```
    pub fn limit_host(mut self, host: impl Into<String>, limit: Usdc) -> Self {
        self.limits.hosts.insert(host.into(), limit);
        self
    }

    /// Adds a limit on what may be signed in any period of this length, in whole seconds, rounded up. Default: no limit.
    ///
    /// A payment counts from its signature on, unless its amount is released earlier. After a restart, payments older than a day
    /// may count for up to an hour longer.
    pub fn per_window(mut self, length: Duration, limit: Usdc) -> Self {
        self.limits.windows.push((length, limit));
        self
    }

    /// Releases payments that their server reported as failed, as soon as they have expired. Default: they stay reserved.
    ///
    /// This trusts the server. One that reports a failure, or a charge of less than was signed for, and settles more all the same collects
    /// more than the limits allow. Without it, only the chain can release such a payment.
    pub fn release_failed(mut self) -> Self {
        self.release_failed = true;
        self
    }

    /// Sets the journal that payments are recorded in. Default: one in memory.
    ///
    /// The budget starts from what the journal holds: paid entries are spent, unresolved ones are reserved. Use a journal for one
    /// budget only.
    pub fn journal(mut self, journal: Journal) -> Self {
        self.journal = journal;
        self
    }

    /// Builds the budget.
    pub fn build(self) -> Budget {
        let mut totals = Totals::new(&self.limits, self.journal.paid());
        self.journal.unresolved().iter().for_each(|entry| totals.add(&entry.charge()));
        self.journal.channels().iter().for_each(|channel| totals.add_channel(channel));
        Budget(Arc::new(Inner {
            limits: self.limits,
            release_failed: self.release_failed,
            journal: self.journal,
            totals: Mutex::new(totals),
        }))
    }
}

/// A reserved amount. If dropped before [`hold`](Self::hold), it is released; afterwards it stays reserved.
#[derive(Debug)]
pub(super) struct Reservation {
    budget: Budget,
    charge: Charge,
    is_held: bool,
}

impl Reservation {
    /// Keeps the amount reserved even if this is dropped: from here on a signature exists.
    pub(super) fn hold(&mut self) {
        self.is_held = true;
    }

    /// Records the payment that the amount is for; when this returns, it may be sent. If the payment is not recorded, or is not sent
    /// because the caller was cancelled in the meantime, its amount is released.
    pub(super) async fn record(mut self, entry: JournalEntry) -> io::Result<Unsent> {
        let (journal, recorded) = (self.budget.journal().clone(), entry.clone());
        let finish = move |journal: &Journal, record, written: io::Result<()>| {
            written?;
            // From here on the signature may survive this process: dropping the reservation must not free the amount.
            self.hold();
            journal.apply(record);
            Ok(Unsent { budget: self.budget.clone(), entry: recorded, is_sent: false })
        };
        journal.append(Record::Signed(entry), true, finish).await
    }

    #[cfg(test)]
    fn spend(mut self) {
        self.hold();
        self.budget.totals().spend(&self.charge);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.is_held {
            self.budget.totals().release(&self.charge);
        }
    }
}

/// A payment that the journal has, and that was not sent yet. If this is dropped before [`set_sent`](Self::set_sent), the payment is closed
/// and its amount released: nobody but this process has the signature.
#[derive(Debug)]
pub(super) struct Unsent {
    budget: Budget,
    entry: JournalEntry,
    is_sent: bool,
}

impl Unsent {
    /// Notes that the payment may have been sent.
    pub(super) const fn set_sent(&mut self) {
        self.is_sent = true;
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        let void = Record::Void { nonce: self.entry.nonce };
        if !self.is_sent && self.budget.journal().close(&void).is_some() {
            self.budget.totals().release(&self.entry.charge());
            self.budget.journal().write_soon(void);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    fn usdc(units: u64) -> Usdc {
        Usdc::from_atomic(units)
    }

    fn budget(per_payment: u64, total: u64) -> Budget {
        Budget::builder().per_payment(usdc(per_payment)).total(usdc(total)).build()
    }

    fn charge(amount: u64, payee: u8, host: &str, signed_at: u64) -> Charge {
        Charge { amount: usdc(amount), payee: Address::repeat_byte(payee), host: host.into(), signed_at }
    }

    fn reserve(budget: &Budget, amount: u64) -> Result<Reservation, Refusal> {
        budget.reserve(charge(amount, 1, "host", 0), 0)
    }

    #[test]
    fn refusal_names_the_exceeded_limit() {
        let budget = budget(10, 15);
        assert_eq!(reserve(&budget, 11).unwrap_err(), Refusal::AbovePaymentLimit { asked: usdc(11), limit: usdc(10) });
        let _kept = reserve(&budget, 10).unwrap();
        assert_eq!(
            reserve(&budget, 6).unwrap_err(),
            Refusal::AboveTotalLimit { asked: usdc(6), remaining: usdc(5), limit: usdc(15) }
        );
    }

    #[test]
    fn each_payee_and_each_host_has_its_own_limit() {
        let budget = Budget::builder().per_payee(usdc(10)).per_host(usdc(15)).build();
        let mut live = Vec::new();
        let mut reserve = |amount, payee, host| {
            budget.reserve(charge(amount, payee, host, 0), 0).map(|reservation| live.push(reservation))
        };
        reserve(10, 1, "a").unwrap();
        assert_eq!(
            reserve(1, 1, "b").unwrap_err(),
            Refusal::AbovePayeeLimit {
                payee: Address::repeat_byte(1),
                asked: usdc(1),
                remaining: usdc(0),
                limit: usdc(10)
            }
        );
        reserve(5, 2, "a").unwrap();
        assert_eq!(
            reserve(1, 3, "a").unwrap_err(),
            Refusal::AboveHostLimit { host: "a".into(), asked: usdc(1), remaining: usdc(0), limit: usdc(15) }
        );
        reserve(5, 2, "b").unwrap();
        drop(live);
        assert!(budget.reserve(charge(10, 1, "a", 0), 0).is_ok(), "it is released in every sum");
    }

    #[test]
    fn a_host_with_a_limit_of_its_own_has_that_in_place_of_the_others() {
        let budget = Budget::builder().per_host(usdc(5)).limit_host("a", usdc(9)).limit_host("b", usdc(0)).build();
        let _kept: Vec<_> =
            [(9, "a"), (5, "c")].map(|(amount, host)| budget.reserve(charge(amount, 1, host, 0), 0).unwrap()).into();
        for (host, limit) in [("a", 9), ("b", 0), ("c", 5)] {
            let refusal =
                Refusal::AboveHostLimit { host: host.into(), asked: usdc(1), remaining: usdc(0), limit: usdc(limit) };
            assert_eq!(budget.reserve(charge(1, 1, host, 0), 0).unwrap_err(), refusal);
        }
    }

    #[test]
    fn no_period_of_the_length_of_a_window_exceeds_its_limit() {
        let budget = Budget::builder().per_window(Duration::from_secs(60), usdc(10)).build();
        let buy = |amount, now| {
            let mut reservation = budget.reserve(charge(amount, 1, "a", now), now)?;
            reservation.hold();
            reservation.spend();
            Ok::<(), Refusal>(())
        };
        buy(4, 100).unwrap();
        buy(6, 130).unwrap();
        let window = Duration::from_secs(60);
        let refused = |asked, remaining| Refusal::AboveWindowLimit {
            window,
            asked: usdc(asked),
            remaining: usdc(remaining),
            limit: usdc(10),
        };
        assert_eq!(buy(1, 159).unwrap_err(), refused(1, 0));
        assert_eq!(buy(5, 160).unwrap_err(), refused(5, 4));
        buy(4, 160).unwrap();
        assert_eq!(buy(1, 189).unwrap_err(), refused(1, 0));
        buy(6, 190).unwrap();
    }

    #[test]
    fn concurrent_reservations_never_exceed_the_total() {
        let budget = budget(7, 1_000);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while let Ok(mut reservation) = reserve(&budget, 7) {
                        reservation.hold();
                        assert!(budget.spent().atomic() <= 1_000);
                        reservation.spend();
                    }
                });
            }
        });
        assert_eq!(budget.spent().atomic(), 994);
        assert_eq!(budget.reserved(), Usdc::ZERO);
    }

    proptest! {
        #[test]
        fn every_limit_holds_to_the_unit_for_any_sequence_of_payments(
            total in 0_u64..500,
            steps in prop::collection::vec((0_u64..60, 0_u8..3, 0_u8..3, 0_u8..5, 0_u64..20), 0..100),
        ) {
            type Kept = (u64, u8, u8, u64);
            const PAYEE: u64 = 150;
            const HOST: u64 = 200;
            const WINDOW: u64 = 120;
            const LENGTH: u64 = 50;
            let budget = Budget::builder()
                .per_payment(usdc(50)).total(usdc(total)).per_payee(usdc(PAYEE)).per_host(usdc(HOST))
                .per_window(Duration::from_secs(LENGTH), usdc(WINDOW))
                .build();
            // What was reserved and not released: amount, payee, host, time.
            let mut kept: Vec<Kept> = Vec::new();
            let (mut spent, mut live, mut now) = (0, Vec::new(), 0);
            for (amount, payee, host, fate, pause) in steps {
                now += pause;
                let sum = |of: &dyn Fn(&Kept) -> bool| {
                    amount + kept.iter().filter(|kept| of(kept)).map(|kept| kept.0).sum::<u64>()
                };
                let fits = amount <= 50 && sum(&|_| true) <= total && sum(&|kept| kept.1 == payee) <= PAYEE
                    && sum(&|kept| kept.2 == host) <= HOST && sum(&|kept| kept.3 + LENGTH > now) <= WINDOW;
                // An amount of zero exceeds no limit.
                let fits = fits || amount == 0;
                let answer = budget.reserve(charge(amount, payee, &host.to_string(), now), now);
                prop_assert_eq!(answer.is_ok(), fits);
                if let Ok(mut reservation) = answer {
                    match fate {
                        0 => drop(reservation),
                        1 => {
                            spent += amount;
                            reservation.hold();
                            reservation.spend();
                        }
                        2 => live.push(reservation),
                        _ => reservation.hold(),
                    }
                    if fate > 0 {
                        kept.push((amount, payee, host, now));
                    }
                }
                let reserved = kept.iter().map(|kept| kept.0).sum::<u64>() - spent;
                prop_assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (spent, reserved));
                prop_assert_eq!(budget.remaining().atomic(), total - spent - reserved);
            }
        }
    }
}
