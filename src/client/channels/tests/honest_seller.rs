//! The books of a channel beside a seller that keeps the rules, over a network that loses and delays, with strangers who use what claims
//! publish: nothing leads to a dispute.

use proptest::prelude::*;

use super::{NOW, entry, signed_by, state, usdc};
use crate::client::channels::entry::{ChannelEntry, Correction, Means, PendingDeposit, Seen};

#[derive(Clone, Copy, Debug)]
enum Event {
    Pay {
        price: u64,
        charged: u64,
        fate: Fate,
    },
    /// A voucher that was delayed reaches the seller.
    Arrive {
        which: usize,
        charged: u64,
    },
    Refund {
        amount: u64,
        believed: bool,
    },
    Claim,
    /// What was put into claims is executed.
    Execute,
    /// The seller goes on without what it did not claim. No claim and no voucher of before is on its way.
    LoseBooks,
    /// A stranger pays with the rest of a voucher that was claimed.
    Stranger {
        which: usize,
    },
    /// The payer looks at a final block.
    Observe,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Answered { proven: bool },
    AnswerLost,
    Delayed,
    Left,
    WorkFailed,
}

/// A seller and the chain, in units of USDC.
#[derive(Debug, Default)]
struct Seller {
    charged: u64,
    /// What the newest voucher that was charged is for.
    newest: Option<u64>,
    /// What the vouchers are for that claims have published.
    published: Vec<u64>,
    /// Claims that are not executed yet: what is claimed.
    sent: u64,
    claimed: u64,
    balance: u64,
}

impl Seller {
    fn charged(&self) -> u64 {
        self.charged.max(self.claimed)
    }

    fn fits(&self, max: u64, price: u64) -> bool {
        self.charged() + price == max
    }

    /// Does the work of a voucher if it fits, and returns what it charged.
    fn take(&mut self, max: u64, price: u64, charged: u64) -> Option<u64> {
        if !self.fits(max, price) || max > self.balance {
            return None;
        }
        let charged = charged.min(price);
        if charged > 0 {
            (self.newest, self.charged) = (Some(max), self.charged() + charged);
        }
        Some(charged)
    }

    fn claim(&mut self) {
        if let Some(newest) = self.newest.filter(|_| self.charged > self.claimed) {
            self.published.push(newest);
            self.sent = self.sent.max(self.charged);
        }
    }

    fn execute(&mut self) {
        self.claimed = self.claimed.max(self.sent);
    }
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let prices = prop_oneof![Just(1_000_u64), 1..3_000_u64];
    let charges = || prop_oneof![Just(0_u64), Just(u64::MAX), 1..2_000_u64];
    let fate = prop_oneof![
        4 => any::<bool>().prop_map(|proven| Fate::Answered { proven }),
        1 => Just(Fate::AnswerLost),
        1 => Just(Fate::Delayed),
        1 => Just(Fate::Left),
        1 => Just(Fate::WorkFailed),
    ];
    let event = prop_oneof![
        8 => (prices, charges(), fate).prop_map(|(price, charged, fate)| Event::Pay { price, charged, fate }),
        2 => (0..8_usize, charges()).prop_map(|(which, charged)| Event::Arrive { which, charged }),
        1 => (1..20_000_u64, any::<bool>()).prop_map(|(amount, believed)| Event::Refund { amount, believed }),
        2 => Just(Event::Claim),
        2 => Just(Event::Execute),
        1 => Just(Event::LoseBooks),
        2 => (0..8_usize).prop_map(|which| Event::Stranger { which }),
        2 => Just(Event::Observe),
    ];
    proptest::collection::vec(event, 1..60)
}

/// Makes a deposit if a request needs one.
fn fill(entry: &mut ChannelEntry, seller: &mut Seller, price: u64, now: u64) {
    if let Means::NewDeposit { needed } = entry.means(usdc(price), now) {
        let amount = needed.atomic().max(10_000);
        let mut pending: PendingDeposit = super::deposit(amount);
        pending.valid_before = now + 300;
        entry.add_deposit(pending, now);
        entry.deposit_arrived();
        seller.balance += amount;
    }
}

/// Compares the books with the seller's.
fn correct(entry: &mut ChannelEntry, seller: &Seller, is_shown: bool) -> Correction {
    let shown = seller.newest.filter(|_| is_shown).map(|max| signed_by(&super::key(), entry, max));
    let theirs = state(entry, Some(seller.charged()), seller.claimed);
    entry.correct(Some(&theirs), shown.as_ref())
}

/// Pays, and returns the voucher if it is still on its way.
fn pay(
    entry: &mut ChannelEntry,
    seller: &mut Seller,
    (price, charged, fate): (u64, u64, Fate),
    now: u64,
) -> Option<(u64, u64)> {
    fill(entry, seller, price, now);
    let voucher = super::voucher(entry, price);
    let max = u64::try_from(voucher.max_claimable_amount).unwrap();
    let before = entry.sign(usdc(price), &voucher, false);
    match fate {
        Fate::Answered { proven } => match seller.take(max, price, charged) {
            Some(0) => entry.charge_nothing(before),
            Some(charged) => entry.charge(usdc(charged), usdc(max)),
            None if seller.fits(max, price) => {
                entry.refused(before);
                entry.escrow_is_missing();
            }
            None => {
                entry.refused(before);
                correct(entry, seller, proven);
            }
        },
        Fate::AnswerLost => _ = seller.take(max, price, charged),
        Fate::WorkFailed => entry.refused(before),
        Fate::Delayed => return Some((max, price)),
        Fate::Left => {
            entry.refused(before);
            entry.leave(usdc(price));
            return Some((max, price));
        }
    }
    None
}

proptest! {
    #[test]
    fn seller_that_keeps_the_rules_is_never_in_dispute(events in events()) {
        let (mut entry, mut seller, mut delayed, mut now) = (entry(), Seller::default(), Vec::new(), NOW);
        for event in events {
            now += 1;
            match event {
                Event::Pay { price, charged, fate } => {
                    delayed.extend(pay(&mut entry, &mut seller, (price, charged, fate), now));
                }
                Event::Arrive { which, charged } => {
                    if which < delayed.len() {
                        let (max, price) = delayed.remove(which);
                        seller.take(max, price, charged);
                    }
                }
                Event::Refund { amount, believed } => {
                    // A request for a refund names what was charged.
                    if entry.charged.atomic() != seller.charged() {
                        continue;
                    }
                    // What was charged is claimed in the same transaction.
                    seller.claim();
                    seller.execute();
                    let amount = amount.min(seller.balance.saturating_sub(seller.charged()));
                    seller.balance -= amount;
                    entry.refund_reported(usdc(amount), believed);
                }
                Event::Claim => seller.claim(),
                Event::Execute => seller.execute(),
                Event::LoseBooks => {
                    seller.execute();
                    (seller.charged, seller.newest) = (seller.claimed, None);
                    delayed.clear();
                }
                Event::Stranger { which } => {
                    let rest = |max: &u64| max.checked_sub(seller.charged()).filter(|rest| *rest > 0);
                    if let Some((max, rest)) = seller.published.get(which).and_then(|max| Some((*max, rest(max)?))) {
                        seller.take(max, rest, rest);
                    }
                }
                Event::Observe => {
                    now += 400;
                    let (balance, claimed) = (usdc(seller.balance), usdc(seller.claimed));
                    entry.observe(&Seen { balance, claimed, pending_used: None, time: now });
                }
            }
            prop_assert_eq!(entry.dispute(), None, "{:?} {:?}", entry, seller);
            prop_assert!(entry.charged <= entry.escrow);
        }
        // Whoever can show what was charged goes on.
        if correct(&mut entry, &seller, true) != Correction::Unproven {
            prop_assert_eq!(entry.charged.atomic(), seller.charged(), "{:?} {:?}", entry, seller);
        }
    }
}
