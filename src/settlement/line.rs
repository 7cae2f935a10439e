//! The line of those that wait for a place in the window of an account: the most urgent is served first.

use std::{
    cmp::Reverse,
    sync::{Mutex, MutexGuard, PoisonError},
};

use alloy_primitives::Address;
use tokio::sync::oneshot;

/// How many calls of one lane may wait. Each lane has its own places, so that a flood of one kind of call takes none of another's.
const MAX_WAITING: usize = 1_000;
/// Wei for one atomic unit of USDC, where an ether costs 10,000 dollars.
///
/// It decides only how far a claim at risk may exceed `max_gas_price`. Where an ether costs less, such a claim spends less than it brings
/// in. A price feed would have to be right just when the chain is in disorder.
const WEI_PER_UNIT: u128 = 100_000_000;

/// The kinds of calls, the least urgent first.
///
/// Who can wait without a loss, or can make many at no cost, is behind those who cannot: strangers send deposits at will; a refund is only
/// late, and needs money in a channel; a seller's own claim takes what was earned out of the payer's reach; a claim at risk is lost if it is
/// late. What others signed is never at risk here, since a channel of one's own costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// Deposits into channels.
    Deposit,
    /// Refunds to payers.
    Refund,
    /// Payments, claims that others signed, and transfers of what was claimed. All up to here leave the gas that is kept for claims.
    Payment,
    /// Claims of one's own.
    Claim,
    /// Claims of what an announced withdrawal could take.
    AtRisk,
}

/// How urgent a call is. Within a lane the larger amount is served first: who makes others wait must have more money than they in a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Urgency {
    lane: Lane,
    amount: u128,
    /// What may be spent, in wei, even if gas costs more than the ceiling.
    worth: u128,
    /// The gas that it may use, where that may be spent.
    gas: u64,
}

impl Urgency {
    pub(crate) const fn deposit(amount: u128) -> Self {
        Self { lane: Lane::Deposit, amount, worth: 0, gas: 0 }
    }

    pub(crate) const fn refund(amount: u128) -> Self {
        Self { lane: Lane::Refund, amount, worth: 0, gas: 0 }
    }

    /// Payments, a claim that somebody else signed, or a transfer of what was claimed.
    pub(crate) const fn payment() -> Self {
        Self { lane: Lane::Payment, amount: 0, worth: 0, gas: 0 }
    }

    /// A claim of one's own, which may use so much gas. If an amount of it is at risk, it may spend that, even if gas costs more than the
    /// ceiling.
    pub(crate) const fn claim(at_risk: u128, gas: u64) -> Self {
        let lane = if at_risk > 0 { Lane::AtRisk } else { Lane::Claim };
        Self { lane, amount: at_risk, worth: at_risk.saturating_mul(WEI_PER_UNIT), gas }
    }

    pub(super) const fn lane(&self) -> Lane {
        self.lane
    }

    /// Returns what may be spent, in wei, even if gas costs more than the ceiling.
    pub(super) const fn worth(&self) -> u128 {
        self.worth
    }

    /// Who has more is served first. A claim of one's own that is not at risk waits for the payments that came before it.
    fn rank(&self) -> (Lane, u128) {
        let lane = if self.lane == Lane::Payment { Lane::Claim } else { self.lane };
        (lane, self.amount)
    }

    /// Returns the most that may be offered for a unit of gas, in wei, where that is more than the ceiling.
    fn max_fee(&self, gas: u64) -> u128 {
        self.worth / u128::from(gas.max(1))
    }
}

/// Those who wait for places of the type `P`, in the order in which they came.
#[derive(Debug)]
pub(super) struct Line<P>(Mutex<Vec<Waiting<P>>>);

#[derive(Debug)]
struct Waiting<P> {
    urgency: Urgency,
    /// The only account that may send it.
    of: Option<Address>,
    place: oneshot::Sender<P>,
}

impl<P> Default for Line<P> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<P> Line<P> {
    /// Joins the line, for a place of any account or `of` this one. The place comes through the receiver, which fails if somebody more urgent
    /// needs the room. Returns `None` if the lane is full of others that are as urgent.
    pub(super) fn join(&self, urgency: Urgency, of: Option<Address>) -> Option<oneshot::Receiver<P>> {
        let mut waiting = self.lock();
        waiting.retain(|other| !other.place.is_closed());
        let in_lane = || waiting.iter().enumerate().filter(|(_, other)| other.urgency.lane == urgency.lane);
        if in_lane().count() >= MAX_WAITING {
            // Of those with the least amount, the one that came last.
            let (index, least) = in_lane().rev().min_by_key(|(_, other)| other.urgency.rank())?;
            if least.urgency.rank() >= urgency.rank() {
                return None;
            }
            waiting.remove(index);
        }
        let (place, receiver) = oneshot::channel();
        waiting.push(Waiting { urgency, of, place });
        Some(receiver)
    }

    /// Gives places to those who wait, the most urgent first, for as long as `take` has one for them. Who can have a place of one account only
    /// keeps nobody else waiting.
    pub(super) fn serve(&self, mut take: impl FnMut(&Urgency, Option<Address>) -> Option<P>) {
        let mut waiting = self.lock();
        waiting.retain(|other| !other.place.is_closed());
        let mut passed = 0;
        // Of those that are as urgent, the one that came first.
        waiting.sort_by_key(|other| Reverse(other.urgency.rank()));
        while let Some(first) = waiting.get(passed) {
            match (take(&first.urgency, first.of), first.of) {
                // Whoever has just gone drops its place, which frees it.
                (Some(place), _) => drop(waiting.remove(passed).place.send(place)),
                (None, Some(_)) => passed += 1,
                (None, None) => return,
            }
        }
    }

    /// Returns the most that may be offered for a unit of gas, in wei, by those for which somebody here waits that must not wait for a
    /// ceiling, if `others` is the gas of all of them.
    pub(super) fn most(&self, others: u64) -> u128 {
        let waiting = self.lock();
        let waiting = waiting.iter().filter(|other| !other.place.is_closed());
        waiting.map(|other| other.urgency.max_fee(other.urgency.gas.saturating_add(others))).max().unwrap_or(0)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Waiting<P>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who is served, and in which order.
    fn order(line: &Line<usize>, mut waiting: Vec<(&'static str, oneshot::Receiver<usize>)>) -> Vec<&'static str> {
        let mut places = 0..waiting.len();
        line.serve(|_, _| places.next());
        let place = |(name, place): &mut (_, oneshot::Receiver<usize>)| (place.try_recv().unwrap(), *name);
        let mut served: Vec<(usize, &str)> = waiting.iter_mut().map(place).collect();
        served.sort_unstable();
        served.into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn the_most_urgent_lane_is_served_first_and_in_it_the_largest_amount_and_then_who_came_first() {
        let line = Line::default();
        let join = |name, urgency| (name, line.join(urgency, None).unwrap());
        let waiting = vec![
            join("a small deposit", Urgency::deposit(1)),
            join("a large deposit", Urgency::deposit(9)),
            join("another small deposit", Urgency::deposit(1)),
            join("a refund", Urgency::refund(1)),
            join("a payment", Urgency::payment()),
            join("a claim", Urgency::claim(0, 1)),
            join("another payment", Urgency::payment()),
            join("a claim at risk", Urgency::claim(5, 1)),
            join("a larger claim at risk", Urgency::claim(6, 1)),
        ];
        let served = [
            "a larger claim at risk",
            "a claim at risk",
            "a payment",
            "a claim",
            "another payment",
            "a refund",
            "a large deposit",
            "a small deposit",
            "another small deposit",
        ];
        assert_eq!(order(&line, waiting), served);
    }

    #[test]
    fn a_full_lane_takes_no_place_of_another_and_gives_way_to_a_larger_amount() {
        let line = Line::<()>::default();
        let mut small: Vec<_> = (0..MAX_WAITING).map(|_| line.join(Urgency::deposit(1), None).unwrap()).collect();
        assert!(line.join(Urgency::deposit(1), None).is_none(), "the lane is full");
        let claim = line.join(Urgency::claim(0, 1), None);
        let refund = line.join(Urgency::refund(1), None);
        assert!(claim.is_some() && refund.is_some());
        let large = line.join(Urgency::deposit(2), None);
        assert!(large.is_some());
        let told = |place: &mut oneshot::Receiver<()>| place.try_recv() == Err(oneshot::error::TryRecvError::Closed);
        assert!(told(small.last_mut().unwrap()) && !told(&mut small[0]), "the one that came last made room");
        // Who has gone makes room, too.
        drop(small);
        assert!(line.join(Urgency::deposit(1), None).is_some());
    }

    #[test]
    fn what_one_account_must_send_waits_for_that_one_and_keeps_nobody_else_waiting() {
        let line = Line::default();
        let busy = Address::repeat_byte(1);
        let mut permit = line.join(Urgency::payment(), Some(busy)).unwrap();
        let mut claim = line.join(Urgency::payment(), None).unwrap();
        let mut places = 0..1;
        line.serve(|_, of| if of == Some(busy) { None } else { places.next() });
        assert_eq!((claim.try_recv().ok(), permit.try_recv().ok()), (Some(0), None));
        line.serve(|_, of| (of == Some(busy)).then_some(7));
        assert_eq!(permit.try_recv().ok(), Some(7));
    }

    #[test]
    fn a_claim_at_risk_may_spend_what_it_is_worth() {
        // $1, where an ether costs $10,000: 10^14 wei.
        assert_eq!(Urgency::claim(1_000_000, 1).max_fee(100_000), 1_000_000_000);
        for other in [Urgency::deposit(1_000_000), Urgency::payment(), Urgency::claim(0, 1)] {
            assert_eq!(other.max_fee(0), 0);
        }
    }

    #[test]
    fn those_that_a_claim_at_risk_waits_for_share_what_it_is_worth_for_as_long_as_it_waits() {
        let line = Line::<()>::default();
        let _deposit = line.join(Urgency::deposit(u128::MAX), None).unwrap();
        assert_eq!(line.most(1), 0);
        let claim = line.join(Urgency::claim(1_000_000, 100_000), None).unwrap();
        assert_eq!(line.most(300_000), 250_000_000);
        drop(claim);
        assert_eq!(line.most(1), 0);
    }
}
