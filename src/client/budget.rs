//! How much may be spent.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{Journal, Refusal};
use crate::usdc::Usdc;

/// A spending limit per payment and in total, shared by everything that pays from it.
///
/// Clones share one set of books. The total is cumulative: it covers the whole life of the budget and, with a
/// [`Journal`] kept in a file, the lives of earlier processes too. An amount is *reserved* before anything is signed and
/// becomes *spent* when a server says that it was paid; a payment whose outcome is not known keeps its reservation, because
/// whoever holds the signature may still use it.
///
/// ```
/// use tower_x402::{Usdc, client::Budget};
///
/// let budget = Budget::builder().per_payment("$0.005".parse()?).total("$2.00".parse()?).build();
/// assert_eq!(budget.remaining(), Usdc::from_atomic(2_000_000));
/// assert_eq!(budget.spent(), Usdc::ZERO);
/// # Ok::<(), tower_x402::ParseUsdcError>(())
/// ```
#[derive(Clone)]
pub struct Budget(Arc<Inner>);

struct Inner {
    per_payment: Usdc,
    total: Usdc,
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
            per_payment: Self::DEFAULT_PER_PAYMENT,
            total: Self::DEFAULT_TOTAL,
            journal: Journal::in_memory(),
        }
    }

    /// The most that one payment may be.
    pub fn per_payment(&self) -> Usdc {
        self.0.per_payment
    }

    /// The most that may be spent in all.
    pub fn total(&self) -> Usdc {
        self.0.total
    }

    /// What servers have confirmed as paid.
    pub fn spent(&self) -> Usdc {
        self.books().spent
    }

    /// What payments under way or of unknown outcome hold back.
    ///
    /// A payment that a server called failed is counted until its authorization has expired and the next payment is made.
    pub fn reserved(&self) -> Usdc {
        self.books().reserved
    }

    /// What can still be promised: the total without what is spent and reserved.
    pub fn remaining(&self) -> Usdc {
        self.books().remaining(self.0.total)
    }

    /// The record of what was signed under this budget.
    pub fn journal(&self) -> &Journal {
        &self.0.journal
    }

    /// Sets `amount` aside at time `now`, or says which limit forbids it.
    pub(super) fn reserve(&self, amount: Usdc, now: u64) -> Result<Reservation, Refusal> {
        if amount > self.0.per_payment {
            return Err(Refusal::AbovePaymentLimit { asked: amount, limit: self.0.per_payment });
        }
        let mut books = self.books();
        books.release_expired(now);
        let remaining = books.remaining(self.0.total);
        if amount > remaining {
            return Err(Refusal::AboveTotalLimit { asked: amount, remaining, limit: self.0.total });
        }
        books.reserved = saturating_add(books.reserved, amount);
        drop(books);
        Ok(Reservation { budget: self.clone(), amount, on_drop: OnDrop::Release })
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
            .field("per_payment", &self.0.per_payment)
            .field("total", &self.0.total)
            .field("spent", &books.spent)
            .field("reserved", &books.reserved)
            .finish_non_exhaustive()
    }
}

/// Sets the limits of a [`Budget`].
#[derive(Debug)]
pub struct BudgetBuilder {
    per_payment: Usdc,
    total: Usdc,
    journal: Journal,
}

impl BudgetBuilder {
    /// The most that one payment may be.
    pub fn per_payment(mut self, limit: Usdc) -> Self {
        self.per_payment = limit;
        self
    }

    /// The most that may be spent over the life of the budget.
    pub fn total(mut self, limit: Usdc) -> Self {
        self.total = limit;
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
        let past = self.journal.take_past();
        let books = Books {
            spent: past.spent,
            reserved: past.failed.iter().fold(past.unknown, |sum, (_, amount)| saturating_add(sum, *amount)),
            expiring: past.failed.into_iter().map(Reverse).collect(),
        };
        Budget(Arc::new(Inner {
            per_payment: self.per_payment,
            total: self.total,
            journal: self.journal,
            books: Mutex::new(books),
        }))
    }
}

#[derive(Debug)]
struct Books {
    spent: Usdc,
    reserved: Usdc,
    /// Reservations of failed payments, by the time at which their authorizations are certainly void.
    expiring: BinaryHeap<Reverse<(u64, Usdc)>>,
}

impl Books {
    fn remaining(&self, total: Usdc) -> Usdc {
        total.checked_sub(self.spent).and_then(|left| left.checked_sub(self.reserved)).unwrap_or(Usdc::ZERO)
    }

    fn release(&mut self, amount: Usdc) {
        self.reserved = self.reserved.checked_sub(amount).unwrap_or(Usdc::ZERO);
    }

    fn release_expired(&mut self, now: u64) {
        while let Some(Reverse((void_at, amount))) = self.expiring.peek().copied()
            && void_at <= now
        {
            self.expiring.pop();
            self.release(amount);
        }
    }
}

/// Sums only reach the bound when journals of several lives are added up; then nothing is left, which is the safe side.
pub(super) fn saturating_add(a: Usdc, b: Usdc) -> Usdc {
    a.checked_add(b).unwrap_or(Usdc::MAX)
}

/// An amount set aside. Dropped before [`hold`](Self::hold), it is given back; after, it stays set aside.
#[derive(Debug)]
pub(super) struct Reservation {
    budget: Budget,
    amount: Usdc,
    on_drop: OnDrop,
}

#[derive(Clone, Copy, Debug)]
enum OnDrop {
    Release,
    Keep,
    Spend,
    ReleaseAt(u64),
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

    /// The money has not moved and cannot move from `void_at` on.
    pub(super) fn release_at(mut self, void_at: u64) {
        self.on_drop = OnDrop::ReleaseAt(void_at);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut books = self.budget.books();
        match self.on_drop {
            OnDrop::Keep => {}
            OnDrop::Release => books.release(self.amount),
            OnDrop::ReleaseAt(void_at) => books.expiring.push(Reverse((void_at, self.amount))),
            OnDrop::Spend => {
                books.release(self.amount);
                books.spent = saturating_add(books.spent, self.amount);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    fn budget(per_payment: u64, total: u64) -> Budget {
        Budget::builder().per_payment(Usdc::from_atomic(per_payment)).total(Usdc::from_atomic(total)).build()
    }

    #[test]
    fn refusals_name_the_limit() {
        let budget = budget(10, 15);
        assert!(matches!(
            budget.reserve(Usdc::from_atomic(11), 0),
            Err(Refusal::AbovePaymentLimit { asked, limit }) if asked.atomic() == 11 && limit.atomic() == 10
        ));
        let _kept = budget.reserve(Usdc::from_atomic(10), 0).unwrap();
        assert!(matches!(
            budget.reserve(Usdc::from_atomic(6), 0),
            Err(Refusal::AboveTotalLimit { asked, remaining, limit })
                if asked.atomic() == 6 && remaining.atomic() == 5 && limit.atomic() == 15
        ));
    }

    #[test]
    fn a_failed_payment_is_given_back_only_once_its_authorization_is_void() {
        let budget = budget(10, 10);
        let mut reservation = budget.reserve(Usdc::from_atomic(10), 0).unwrap();
        reservation.hold();
        reservation.release_at(100);
        assert!(budget.reserve(Usdc::from_atomic(1), 99).is_err());
        assert!(budget.reserve(Usdc::from_atomic(10), 100).is_ok());
    }

    #[test]
    fn threads_together_never_overspend_by_a_unit() {
        let budget = budget(7, 1_000);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while let Ok(mut reservation) = budget.reserve(Usdc::from_atomic(7), 0) {
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
        fn whatever_happens_the_books_balance(
            total in 0_u64..500,
            steps in prop::collection::vec((0_u64..60, 0_u8..5), 0..100),
        ) {
            let budget = budget(50, total);
            let (mut spent, mut reserved, mut live) = (0, 0, Vec::new());
            for (now, (amount, fate)) in steps.into_iter().enumerate() {
                let fits = amount <= 50 && spent + reserved + amount <= total;
                let answer = budget.reserve(Usdc::from_atomic(amount), now as u64);
                prop_assert_eq!(answer.is_ok(), fits);
                if let Ok(mut reservation) = answer {
                    match fate {
                        0 => drop(reservation),
                        1 => {
                            spent += amount;
                            reservation.hold();
                            reservation.spend();
                        }
                        2 => {
                            reserved += amount;
                            live.push(reservation);
                        }
                        3 => {
                            reserved += amount;
                            reservation.release_at(u64::MAX);
                        }
                        _ => {
                            reserved += amount;
                            reservation.hold();
                        }
                    }
                }
                prop_assert_eq!((budget.spent().atomic(), budget.reserved().atomic()), (spent, reserved));
                prop_assert_eq!(budget.remaining().atomic(), total - spent - reserved);
            }
        }
    }
}
