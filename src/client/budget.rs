//! How much may be spent.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;

use super::{
    Journal, Refusal,
    books::{Books, Limits},
    promise::Promise,
};
use crate::usdc::Usdc;

/// Spending limits, shared by everything that pays from them.
///
/// Clones share one set of books. There are limits per payment and in total, and on request per payee, per host and in any
/// period of time. All are cumulative: they cover the whole life of the budget and, with a [`Journal`] kept in a file,
/// the lives of earlier processes too. An amount is *reserved* before anything is signed and becomes *spent* when a server
/// says that it was paid. A payment whose outcome is not proven keeps its reservation, because whoever holds the signature
/// may still use it: only the chain can
/// tell (`reconcile`, with the feature `onchain`).
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
    books: Mutex<Books>,
}

impl Budget {
    /// The limit per payment unless another is set: $0.01.
    pub const DEFAULT_PER_PAYMENT: Usdc = Usdc::from_atomic(10_000);
    /// The limit in total unless another is set: $1.00.
    pub const DEFAULT_TOTAL: Usdc = Usdc::from_atomic(1_000_000);

    /// Starts from the default limits.
    pub fn builder() -> BudgetBuilder {
        BudgetBuilder {
            limits: Limits {
                per_payment: Self::DEFAULT_PER_PAYMENT,
                total: Self::DEFAULT_TOTAL,
                per_payee: None,
                per_host: None,
                windows: Vec::new(),
            },
            release_failed: false,
            journal: Journal::in_memory(),
        }
    }

    /// The most that one payment may be.
    pub fn per_payment(&self) -> Usdc {
        self.0.limits.per_payment
    }

    /// The most that may be spent in all.
    pub fn total(&self) -> Usdc {
        self.0.limits.total
    }

    /// What servers, or the chain, have confirmed as paid.
    pub fn spent(&self) -> Usdc {
        self.books().spent
    }

    /// What each payee got of that; together it is what was [`spent`](Self::spent), once nothing is under way.
    pub fn spent_by_payee(&self) -> BTreeMap<Address, Usdc> {
        self.0.journal.paid().payees
    }

    /// What payments under way or without a proven outcome hold back.
    pub fn reserved(&self) -> Usdc {
        self.books().reserved
    }

    /// What can still be promised: the total without what is spent and reserved.
    pub fn remaining(&self) -> Usdc {
        self.books().remaining(self.0.limits.total)
    }

    /// The record of what was signed under this budget.
    pub fn journal(&self) -> &Journal {
        &self.0.journal
    }

    /// Sets an amount aside at time `now`, or says which limit forbids it.
    pub(super) fn reserve(&self, promise: Promise, now: u64) -> Result<Reservation, Refusal> {
        self.release_expired(now);
        self.books().reserve(&self.0.limits, &promise, now)?;
        Ok(Reservation { budget: self.clone(), promise, on_drop: OnDrop::Release })
    }

    /// Gives back the amounts of payments that their server reported as failed and whose authorizations have expired by `now`, in seconds
    /// since the Unix epoch; only if the budget [releases such payments](BudgetBuilder::release_failed).
    ///
    /// Every reservation does this first. Call it before you read [`remaining`](Self::remaining) where no payment was made for a while.
    pub fn release_expired(&self, now: u64) {
        if !self.0.release_failed {
            return;
        }
        let expired = self.0.journal.take_expired(now);
        let mut books = self.books();
        expired.iter().for_each(|entry| books.release(&entry.promise()));
    }

    /// Enters what is proven about a payment; `false` if it was closed in the meantime.
    #[cfg(any(feature = "onchain", feature = "reqwest"))]
    pub(super) async fn resolve(&self, proven: super::journal_record::Record) -> bool {
        let Some(entry) = self.0.journal.close(&proven) else { return false };
        self.0.journal.note_fate(entry.nonce, !matches!(proven, super::journal_record::Record::Void { .. }));
        match proven {
            super::journal_record::Record::Void { .. } => self.books().release(&entry.promise()),
            _ => self.books().spend(&entry.promise()),
        }
        if let Err(error) = self.0.journal.closed(proven).await {
            tracing::warn!(%error, nonce = %entry.nonce, "what became of a payment could not be recorded");
        }
        true
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Budget {
    /// The default limits and a journal in memory.
    fn default() -> Self {
        Self::builder().build()
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let books = self.books();
        f.debug_struct("Budget")
            .field("limits", &self.0.limits)
            .field("spent", &books.spent)
            .field("reserved", &books.reserved)
            .finish_non_exhaustive()
    }
}

/// Sets the limits of a [`Budget`].
#[derive(Debug)]
pub struct BudgetBuilder {
    limits: Limits,
    release_failed: bool,
    journal: Journal,
}

impl BudgetBuilder {
    /// The most that one payment may be.
    pub fn per_payment(mut self, limit: Usdc) -> Self {
        self.limits.per_payment = limit;
        self
    }

    /// The most that may be spent over the life of the budget.
    pub fn total(mut self, limit: Usdc) -> Self {
        self.limits.total = limit;
        self
    }

    /// The most that any one payee (`payTo`) may get over the life of the budget, on all networks together.
    pub fn per_payee(mut self, limit: Usdc) -> Self {
        self.limits.per_payee = Some(limit);
        self
    }

    /// The most that requests to any one host may cost over the life of the budget. Ports do not count as hosts of their
    /// own; names of the same machine do.
    pub fn per_host(mut self, limit: Usdc) -> Self {
        self.limits.per_host = Some(limit);
        self
    }

    /// The most that may be promised in any period of this length (in whole seconds, rounded up). May be set for several
    /// lengths.
    ///
    /// A payment counts from its signature on, unless its amount is given back before. After a restart, payments of more
    /// than a day ago may count for up to an hour longer.
    pub fn per_window(mut self, length: Duration, limit: Usdc) -> Self {
        self.limits.windows.push((length, limit));
        self
    }

    /// Gives back what a server called failed once its authorization has expired, taking the server's word for it that it
    /// did not execute it before.
    ///
    /// Without this, and without a look at the chain, a failed payment stays reserved for good: a server that lies about
    /// a failure could otherwise collect more than the limits allow.
    pub fn release_failed(mut self) -> Self {
        self.release_failed = true;
        self
    }

    /// Records what is signed in `journal`, and starts from what it already holds: its paid entries count as spent and
    /// its unresolved ones as reserved. A journal belongs to one budget.
    pub fn journal(mut self, journal: Journal) -> Self {
        self.journal = journal;
        self
    }

    /// The budget.
    pub fn build(self) -> Budget {
        let mut books = Books::new(&self.limits, self.journal.paid());
        self.journal.unresolved().iter().for_each(|entry| books.add(&entry.promise()));
        Budget(Arc::new(Inner {
            limits: self.limits,
            release_failed: self.release_failed,
            journal: self.journal,
            books: Mutex::new(books),
        }))
    }
}

/// An amount set aside. Dropped before [`hold`](Self::hold), it is given back; after, it stays set aside.
#[derive(Debug)]
pub(super) struct Reservation {
    budget: Budget,
    promise: Promise,
    on_drop: OnDrop,
}

#[derive(Clone, Copy, Debug)]
enum OnDrop {
    Release,
    Keep,
    Spend,
}

impl Reservation {
    /// From here on a signature exists, and losing sight of it must not free the money.
    pub(super) fn hold(&mut self) {
        self.on_drop = OnDrop::Keep;
    }

    /// The signature never left this process.
    pub(super) fn release(mut self) {
        self.on_drop = OnDrop::Release;
    }

    /// The money has moved, or is owed.
    pub(super) fn spend(mut self) {
        self.on_drop = OnDrop::Spend;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        match self.on_drop {
            OnDrop::Keep => {}
            OnDrop::Release => self.budget.books().release(&self.promise),
            OnDrop::Spend => self.budget.books().spend(&self.promise),
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

    fn promise(amount: u64, payee: u8, host: &str, at: u64) -> Promise {
        Promise { amount: usdc(amount), payee: Address::repeat_byte(payee), host: host.into(), at }
    }

    fn reserve(budget: &Budget, amount: u64) -> Result<Reservation, Refusal> {
        budget.reserve(promise(amount, 1, "host", 0), 0)
    }

    #[test]
    fn refusals_name_the_limit() {
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
            budget.reserve(promise(amount, payee, host, 0), 0).map(|reservation| live.push(reservation))
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
        assert!(budget.reserve(promise(10, 1, "a", 0), 0).is_ok(), "given back everywhere");
    }

    #[test]
    fn no_period_of_the_windows_length_sees_more_than_its_limit() {
        let budget = Budget::builder().per_window(Duration::from_secs(60), usdc(10)).build();
        let buy = |amount, now| {
            let mut reservation = budget.reserve(promise(amount, 1, "a", now), now)?;
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
    fn threads_together_never_overspend_by_a_unit() {
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
        fn whatever_happens_every_limit_holds_to_the_unit(
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
            // What was promised and not given back: amount, payee, host, time.
            let mut kept: Vec<Kept> = Vec::new();
            let (mut spent, mut live, mut now) = (0, Vec::new(), 0);
            for (amount, payee, host, fate, pause) in steps {
                now += pause;
                let sum = |of: &dyn Fn(&Kept) -> bool| {
                    amount + kept.iter().filter(|kept| of(kept)).map(|kept| kept.0).sum::<u64>()
                };
                let fits = amount <= 50 && sum(&|_| true) <= total && sum(&|kept| kept.1 == payee) <= PAYEE
                    && sum(&|kept| kept.2 == host) <= HOST && sum(&|kept| kept.3 + LENGTH > now) <= WINDOW;
                // Only sums are refused: nothing is asked for nothing.
                let fits = fits || amount == 0;
                let answer = budget.reserve(promise(amount, payee, &host.to_string(), now), now);
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
