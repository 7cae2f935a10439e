//! The buyer's books of one channel: what was deposited, charged and signed. No I/O.

use std::collections::VecDeque;

use alloy_primitives::B256;
use serde::{Deserialize, Serialize};

use super::ChannelFinding;
use crate::{
    client::sums::{less, plus, sum},
    network::Network,
    usdc::Usdc,
    vouchers::{ChannelConfig, ChannelId, ChannelState, Deposit, DepositAuthorization, Escrow, Voucher, VoucherState},
};

/// How long after `validBefore` a deposit can no longer be executed by any reasonable clock, in seconds.
const EXPIRY_MARGIN: u64 = 60;
/// A deposit is not sent again if it expires within this time, in seconds: the seller must still get it into a block.
const MIN_WINDOW: u64 = 10;
/// How many deposits are kept apart. Older ones are added up.
const MAX_DEPOSITS: usize = 16;
/// How many named purchases are remembered: more than the answers that sellers of this crate remember of a channel, since some purchases are not
/// charged. [`Purchase`](crate::client::Purchase) says what becomes of those that either side has forgotten.
const MAX_PURCHASES: usize = 8;

/// A payment channel, as the journal holds it.
///
/// The fields obey `charged <= signed <= escrow`, except that a [pending](Self::pending) deposit covers what is signed with it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ChannelEntry {
    /// The chain.
    pub network: Network,
    /// The seven fields that make the channel. Keep them: nobody can withdraw without them.
    pub config: ChannelConfig,
    /// The host that the budget counts the channel under: that of its first request.
    pub host: String,
    /// The method of the last request that it paid for.
    pub method: String,
    /// The URL of the last request that it paid for.
    pub url: String,
    /// When it was last used, in seconds since the Unix epoch.
    pub used_at: u64,
    /// What the seller had charged before these books were opened.
    pub opening: Usdc,
    /// What the seller has charged in all, as far as its answers are in order. The next voucher starts from here.
    pub charged: Usdc,
    /// The most that was ever charged. Above [`charged`](Self::charged) if the seller lost some of its books.
    pub highest: Usdc,
    /// The largest price of the requests since then whose outcome is unclear: the seller may have charged up to this much more.
    pub doubt: Usdc,
    /// The largest price of the requests since then that left this channel because the seller called it busy. The seller has their vouchers,
    /// and said that it does not work on them: a charge of one is a [finding](ChannelFinding::ChargedRefused).
    pub left: Usdc,
    /// The highest ceiling of the vouchers by which the seller charged something, or may have. Above what was charged if one was charged in
    /// part: a claim publishes it, and then a stranger can pay with the rest ([`ChargedTheRest`](ChannelFinding::ChargedTheRest)).
    #[serde(default)]
    pub accepted: Usdc,
    /// The highest voucher that was signed.
    pub signed: Option<VoucherState>,
    /// What the channel holds, claimed or not (`balance` in the contract), as far as is known.
    pub escrow: Usdc,
    /// Deposits that the seller says it does not have. Only the chain can tell, so they stay reserved.
    pub missing: Usdc,
    /// The deposit that was signed and of which nobody has said that it arrived.
    pub pending: Option<PendingDeposit>,
    /// The transaction of the last refund that the seller reported.
    #[serde(default)]
    last_refund: Option<B256>,
    /// The deposits that were signed.
    deposits: Deposits,
    /// How far the seller and these books agree.
    trust: Trust,
    /// The hashes of the keys of the last named purchases that were signed for here, and which the seller may have charged.
    purchases: VecDeque<B256>,
}

/// The deposits that were signed for a channel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Deposits {
    /// What the budget counts: signed deposits less refunds, by the time of the signature.
    sums: Vec<(u64, Usdc)>,
    /// How they changed without a signature since the budget heard of it.
    #[serde(skip)]
    changes: Vec<Change>,
    /// When the last one that was ever signed expires, in seconds since the Unix epoch.
    until: u64,
}

/// How far the seller and these books agree.
///
/// | | `New` | `Observed` | `Known` | `Unproven` | `Disputed` |
/// |---|---|---|---|---|---|
/// | the seller charges a request, or what it says of charges is proven or explained | `Known` | `Known` | `Known` | `Known` | `Disputed` |
/// | it refuses a voucher and proves nothing | `New` | `Observed` | `Unproven` | `Unproven` | `Disputed` |
/// | the channel is looked up on the chain | `Observed` if it holds money | `Observed` | `Known` | `Known` | `Disputed` |
/// | seller or chain say what these books exclude | `Disputed` | `Disputed` | `Disputed` | `Disputed` | `Disputed` |
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Trust {
    /// These books know of no charge yet. There may be some: an earlier journal may have been lost.
    New,
    /// They know what the chain has. There may be charges that were not claimed yet.
    Observed,
    /// These books are complete.
    Known,
    /// The seller refused a voucher and proved nothing, so that what the chain says is believed of the charges, too.
    Unproven,
    /// Nothing more is signed.
    Disputed(ChannelFinding),
}

/// A signed deposit on its way into the channel.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct PendingDeposit {
    /// The amount, and the signed authorization. It is money until it expires.
    pub deposit: Deposit,
    /// The amount.
    pub amount: Usdc,
    /// When the authorization expires, in seconds since the Unix epoch.
    pub valid_before: u64,
    arrival: Arrival,
}

/// Whether a deposit may have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Arrival {
    /// Every attempt to send it was refused.
    Refused,
    /// An attempt had no clear answer.
    Unclear,
    /// A seller cannot execute it, which an earlier execution explains. It is kept until that is proven: if the seller does not find the money
    /// either, the same deposit is sent again.
    Presumed,
}

impl PendingDeposit {
    pub(super) fn new(deposit: Deposit, amount: Usdc, valid_before: u64) -> Self {
        Self { deposit, amount, valid_before, arrival: Arrival::Refused }
    }

    /// Returns the nonce of the authorization, by which the token tells whether it was used.
    pub fn nonce(&self, channel: ChannelId) -> B256 {
        let DepositAuthorization::Erc3009 { salt, .. } = &self.deposit.authorization;
        Deposit::nonce(channel, *salt)
    }

    fn can_be_sent(&self, now: u64) -> bool {
        now.saturating_add(MIN_WINDOW) < self.valid_before
    }
}

debug_fields!(PendingDeposit { amount, valid_before, arrival });

/// A change of what the budget counts that no signature of this process made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Change {
    /// A deposit came back, or can never be made.
    Released { signed_at: u64, amount: Usdc },
    /// The chain has a deposit that these books did not have.
    #[cfg_attr(not(feature = "onchain"), expect(dead_code))]
    Found { at: u64, amount: Usdc },
}

/// How a request of some price can be paid from the channel as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Means {
    /// By a voucher alone. It may count on a deposit that is presumed to have arrived.
    Voucher,
    /// By a voucher and the pending deposit, sent again.
    PendingDeposit,
    /// By a voucher and a new deposit of at least this much.
    NewDeposit { needed: Usdc },
    /// Not before the pending deposit has arrived or expired.
    Nothing,
}

/// What was unclear about a channel at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Doubt {
    charge: Usdc,
    deposit: bool,
}

impl Doubt {
    /// Returns this doubt, with at most the charge that `earlier` was about.
    pub(super) fn of_charge_up_to(self, earlier: Self) -> Self {
        Self { charge: self.charge.min(earlier.charge), ..self }
    }

    /// Returns the most that a request may have been charged.
    pub(super) const fn charge(self) -> Usdc {
        self.charge
    }

    /// Returns `true` if a request may have been charged.
    pub(super) fn is_about_charge(self) -> bool {
        self.charge > Usdc::ZERO
    }

    /// Returns `true` if the pending deposit may have arrived.
    pub(super) const fn is_about_deposit(self) -> bool {
        self.deposit
    }
}

/// A channel as a final block had it.
#[cfg(feature = "onchain")]
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) balance: Usdc,
    pub(super) claimed: Usdc,
    /// Whether the pending deposit was made, if there is one and the token said so.
    pub(super) pending_used: Option<bool>,
    /// The block's timestamp.
    pub(super) time: u64,
}

/// What a corrective 402 led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Correction {
    /// The books agree with the seller's, and the next voucher starts from there.
    Adopted,
    /// The same, and the seller charged a request that it had refused.
    Charged(ChannelFinding),
    /// The seller's answer proves nothing. The chain can tell.
    Unproven,
    /// The seller says something that these books exclude.
    Disputed(ChannelFinding),
}

impl ChannelEntry {
    pub(super) fn new(network: Network, config: ChannelConfig) -> Self {
        Self {
            network,
            config,
            host: String::new(),
            method: String::new(),
            url: String::new(),
            used_at: 0,
            opening: Usdc::ZERO,
            charged: Usdc::ZERO,
            highest: Usdc::ZERO,
            doubt: Usdc::ZERO,
            left: Usdc::ZERO,
            accepted: Usdc::ZERO,
            signed: None,
            escrow: Usdc::ZERO,
            missing: Usdc::ZERO,
            pending: None,
            last_refund: None,
            deposits: Deposits::default(),
            trust: Trust::New,
            purchases: VecDeque::new(),
        }
    }

    /// Returns the channel's id.
    pub fn id(&self) -> ChannelId {
        Escrow::on(self.network).channel_id(&self.config)
    }

    /// Returns what was charged since these books were opened. The budget counts it as spent.
    pub fn spent(&self) -> Usdc {
        less(self.highest, self.opening)
    }

    /// Returns what is in escrow or on its way there and was not charged. The budget counts it as reserved.
    pub fn reserved(&self) -> Usdc {
        less(self.deposits.sum(), self.spent())
    }

    /// Returns what can still be signed without a deposit.
    pub fn available(&self) -> Usdc {
        less(self.escrow, self.charged)
    }

    /// Returns the sums of deposits that the budget counts, by the time of their signature.
    pub(in crate::client) fn deposits(&self) -> &[(u64, Usdc)] {
        &self.deposits.sums
    }

    /// Returns how the deposits changed without a signature since the last time.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.deposits.changes)
    }

    /// Returns why nothing more is signed for this channel, if that is so.
    pub const fn dispute(&self) -> Option<&ChannelFinding> {
        match &self.trust {
            Trust::Disputed(finding) => Some(finding),
            Trust::New | Trust::Observed | Trust::Known | Trust::Unproven => None,
        }
    }

    /// Returns `true` once a request was charged, or the seller said what was and that is proven or explained: from then on these books are
    /// complete.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self.trust, Trust::New | Trust::Observed)
    }

    /// Notes the request that the channel pays for.
    pub(super) fn set_request(&mut self, host: &str, method: &str, url: &str) {
        if self.host.is_empty() {
            host.clone_into(&mut self.host);
        }
        method.clone_into(&mut self.method);
        url.clone_into(&mut self.url);
    }

    /// Returns `true` if no money of the payer's is left in it, as far as is known.
    pub(super) fn is_empty(&self) -> bool {
        self.reserved() == Usdc::ZERO
    }

    /// Returns the voucher's ceiling for a request of this price.
    pub(super) fn ceiling(&self, amount: Usdc) -> Usdc {
        plus(self.charged, amount)
    }

    /// Returns the most that a voucher was signed for.
    pub(super) fn last_signed(&self) -> Option<Usdc> {
        self.signed.and_then(|last| u64::try_from(last.signed_max_claimable).ok()).map(Usdc::from_atomic)
    }

    pub(super) fn means(&self, amount: Usdc, now: u64) -> Means {
        let needed = less(self.ceiling(amount), self.escrow);
        match &self.pending {
            _ if needed == Usdc::ZERO => Means::Voucher,
            None => Means::NewDeposit { needed },
            Some(pending) if pending.amount < needed => Means::Nothing,
            Some(pending) if pending.arrival == Arrival::Presumed => Means::Voucher,
            Some(pending) if pending.can_be_sent(now) => Means::PendingDeposit,
            Some(_) => Means::Nothing,
        }
    }

    /// Returns `true` while the pending deposit may still be executed: until then no other one is signed in its place.
    pub(super) fn may_be_deposited(&self, now: u64) -> bool {
        self.pending.as_ref().is_some_and(|pending| now < pending.valid_before.saturating_add(EXPIRY_MARGIN))
    }

    /// Gives up on a deposit that has expired.
    ///
    /// If an attempt to send it was not answered, it may have arrived: the next voucher will tell. If every attempt was refused, it stays
    /// reserved until the chain proves more, or is free if `believe_refusals`.
    pub(super) fn expire(&mut self, now: u64, believe_refusals: bool) {
        let expired = |pending: &mut PendingDeposit| now >= pending.valid_before.saturating_add(EXPIRY_MARGIN);
        let Some(pending) = self.pending.take_if(expired) else { return };
        match pending.arrival {
            Arrival::Unclear | Arrival::Presumed => self.escrow = plus(self.escrow, pending.amount),
            Arrival::Refused if believe_refusals => self.release(pending.amount),
            Arrival::Refused => self.missing = plus(self.missing, pending.amount),
        }
    }

    /// Adds a deposit that was signed.
    pub(super) fn add_deposit(&mut self, pending: PendingDeposit, now: u64) {
        let Deposits { sums, until, .. } = &mut self.deposits;
        sums.push((now, pending.amount));
        if sums.len() > MAX_DEPOSITS {
            // As if signed with the later one: a limit per period counts it for too long rather than too short.
            let (_, oldest) = sums.remove(0);
            sums[0].1 = plus(sums[0].1, oldest);
        }
        *until = pending.valid_before.max(*until);
        self.pending = Some(pending);
    }

    /// Records a voucher that is about to be sent with a request of this price, and with the pending deposit if `with_deposit`.
    ///
    /// From here on both are in doubt, also if this process ends. [`refused`](Self::refused) takes the doubt back.
    pub(super) fn sign(&mut self, amount: Usdc, voucher: &Voucher, with_deposit: bool) -> Doubt {
        let before = self.doubts();
        self.unclear(amount, with_deposit);
        if self.signed.is_none_or(|signed| signed.signed_max_claimable < voucher.max_claimable_amount) {
            self.signed =
                Some(VoucherState { signed_max_claimable: voucher.max_claimable_amount, signature: voucher.signature });
        }
        before
    }

    /// Records that the seller may charge a request of this price, and may have made the pending deposit if it was sent along.
    pub(super) fn unclear(&mut self, amount: Usdc, with_deposit: bool) {
        self.doubt = self.doubt.max(amount);
        if let Some(pending) =
            self.pending.as_mut().filter(|pending| with_deposit && pending.arrival == Arrival::Refused)
        {
            pending.arrival = Arrival::Unclear;
        }
    }

    /// Returns `true` if this named purchase may have been charged here.
    pub(super) fn has_purchase(&self, key: B256) -> bool {
        self.purchases.contains(&key)
    }

    /// Notes that a voucher is signed for this named purchase. The oldest one is forgotten.
    pub(super) fn add_purchase(&mut self, key: B256) {
        if self.has_purchase(key) {
            return;
        }
        self.purchases.push_back(key);
        if self.purchases.len() > MAX_PURCHASES {
            self.purchases.pop_front();
        }
    }

    /// Notes that the seller did not charge it.
    pub(super) fn forget_purchase(&mut self, key: B256) {
        self.purchases.retain(|known| *known != key);
    }

    pub(super) fn doubts(&self) -> Doubt {
        let is_open = |pending: &PendingDeposit| pending.arrival != Arrival::Refused;
        Doubt { charge: self.doubt, deposit: self.pending.as_ref().is_some_and(is_open) }
    }

    /// Records that the seller refused a request, and with it all that was sent since `before`.
    pub(super) fn refused(&mut self, before: Doubt) {
        self.doubt = before.charge;
        if let Some(pending) = self.pending.as_mut().filter(|_| !before.deposit) {
            pending.arrival = Arrival::Refused;
        }
    }

    /// Records that a request of this price leaves the channel, because the seller calls it busy. The seller keeps the voucher.
    pub(super) fn leave(&mut self, amount: Usdc) {
        self.left = self.left.max(amount);
    }

    /// Records that the seller charged the request of the last voucher, which is for `max`. That clears every doubt: it accepts a voucher only
    /// if it agrees on what was charged before.
    pub(super) fn charge(&mut self, amount: Usdc, max: Usdc) {
        self.accepted = self.accepted.max(max);
        self.charged = plus(self.charged, amount);
        self.highest = self.highest.max(self.charged);
        (self.doubt, self.left) = (Usdc::ZERO, Usdc::ZERO);
        self.agreed();
    }

    /// Records that the seller did the work of the last voucher for nothing. What was sent before it still fits the seller's books, and is in
    /// doubt as it was.
    pub(super) fn charge_nothing(&mut self, before: Doubt) {
        self.doubt = before.charge;
        self.agreed();
    }

    /// Counts on the pending deposit, which the seller cannot execute, perhaps because it was executed before; or not any more.
    pub(super) fn presume_deposit(&mut self, is_presumed: bool) {
        if let Some(pending) = &mut self.pending {
            pending.arrival = if is_presumed { Arrival::Presumed } else { Arrival::Unclear };
        }
    }

    /// Records that the pending deposit has arrived.
    pub(super) fn deposit_arrived(&mut self) {
        if let Some(pending) = self.pending.take() {
            self.escrow = plus(self.escrow, pending.amount);
        }
    }

    /// Records that the seller does not find what is in escrow above what it charged.
    pub(super) fn escrow_is_missing(&mut self) {
        self.missing = plus(self.missing, self.available());
        self.escrow = self.escrow.min(self.charged);
    }

    /// Notes which refund the seller reports, and returns `true` if that is not the last one again, as whoever asks too soon may be told.
    pub(super) fn note_refund(&mut self, transaction: Option<B256>) -> bool {
        let is_new = transaction.is_none() || transaction != self.last_refund;
        self.last_refund = transaction.or(self.last_refund);
        is_new
    }

    /// Records that the seller reports a refund. Only the chain can prove it, so it stays reserved unless `believed`.
    pub(super) fn refund_reported(&mut self, amount: Usdc, believed: bool) {
        let amount = amount.min(self.available());
        self.escrow = less(self.escrow, amount);
        if believed {
            self.release(amount);
        } else {
            self.missing = plus(self.missing, amount);
        }
    }

    /// Takes an amount that somebody reports out of what the budget counts as reserved, but not what the seller may have charged.
    fn release(&mut self, amount: Usdc) {
        self.take_out(amount.min(less(self.reserved(), self.doubt.max(self.left))));
    }

    /// Takes an amount out of what the budget counts as reserved, the oldest deposits first.
    fn take_out(&mut self, amount: Usdc) {
        let mut rest = amount.min(self.reserved());
        let Deposits { sums, changes, .. } = &mut self.deposits;
        for (signed_at, deposit) in &mut *sums {
            let taken = rest.min(*deposit);
            *deposit = less(*deposit, taken);
            rest = less(rest, taken);
            if taken > Usdc::ZERO {
                changes.push(Change::Released { signed_at: *signed_at, amount: taken });
            }
        }
        sums.retain(|(_, deposit)| *deposit > Usdc::ZERO);
    }

    /// Compares these books with the seller's in a corrective 402.
    ///
    /// Less than was charged is always adopted, since it only lowers what is signed. More is adopted if unclear requests explain it, or the rest
    /// of a voucher that was charged in part: these books signed for it, or the seller shows the payer's own signature. Books that know nothing
    /// of the channel yet, because an earlier journal was lost, adopt whatever the payer's own signature proves: the seller could claim that much anyway. If these books signed it, that is a charge of
    /// a request that the seller refused.
    pub(super) fn correct(&mut self, theirs: Option<&ChannelState>, voucher: Option<&VoucherState>) -> Correction {
        // A seller that lost its books starts from what it has claimed.
        let claimed = theirs.map(|state| state.total_claimed).filter(|claimed| *claimed < self.charged.atomic().into());
        let Some(asserted) = theirs.and_then(|state| state.charged_cumulative_amount).or(claimed) else {
            return self.unproven();
        };
        let limit = self.limit();
        let Ok(charged) = u64::try_from(asserted).map(Usdc::from_atomic) else {
            return self.disputed(ChannelFinding::ChargeNotInBooks { asserted, limit });
        };
        if charged < self.charged {
            self.lower(charged);
            self.agreed();
            return Correction::Adopted;
        }
        // What these books signed and may have been charged, the seller need not show.
        let is_in_books = charged <= limit && self.last_signed().is_some_and(|signed| charged <= signed);
        let is_proven = is_in_books
            || voucher.is_some_and(|voucher| voucher.signed_max_claimable >= asserted && self.is_ours(voucher));
        // An earlier journal signed it, so the charge is from before these books.
        let is_older = !self.is_known() && voucher.is_some_and(|shown| !self.has_signed(shown) && self.is_ours(shown));
        match charged <= limit {
            _ if !is_proven => self.unproven(),
            false if self.is_known() => self.disputed(ChannelFinding::ChargeNotInBooks { asserted, limit }),
            // What was refunded, or never arrived, pays for nothing. Or the channel holds more than these books know.
            _ if self.is_known() && charged > self.highest.max(plus(self.opening, self.deposits.sum())) => {
                self.unproven()
            }
            _ if is_older => {
                self.open_at(charged);
                self.signed = voucher.copied();
                self.accepted = self.last_signed().unwrap_or(charged);
                Correction::Adopted
            }
            _ => {
                let finding = self.raise(charged);
                let is_first = !self.is_known();
                if let Some(shown) = voucher.filter(|shown| is_first && self.has_signed(shown) && self.is_ours(shown)) {
                    // It was charged, and a claim publishes its rest. Later ones may have been refused.
                    let ceiling = u64::try_from(shown.signed_max_claimable).map(Usdc::from_atomic);
                    self.accepted = self.accepted.max(ceiling.unwrap_or_default());
                }
                self.agreed();
                self.cover_charges();
                finding.map_or(Correction::Adopted, Correction::Charged)
            }
        }
    }

    /// Returns the most that the seller can have charged.
    fn limit(&self) -> Usdc {
        self.highest.max(self.accepted).max(plus(self.charged, self.doubt.max(self.left)))
    }

    /// Starts from less than was charged, which the seller has lost. What was signed may still be claimed.
    fn lower(&mut self, charged: Usdc) {
        self.accepted = self.limit();
        self.charged = charged;
    }

    /// Records that so much was charged, and returns the part that no unclear request explains.
    fn raise(&mut self, charged: Usdc) -> Option<ChannelFinding> {
        let unclear = self.highest.max(plus(self.charged, self.doubt));
        let refused = less(charged, unclear.max(self.accepted));
        let rest = less(charged, unclear);
        if charged > self.charged {
            // Its voucher may have been charged in part.
            self.accepted = self.limit();
            (self.doubt, self.left) = (Usdc::ZERO, Usdc::ZERO);
        }
        self.charged = charged;
        self.highest = self.highest.max(charged);
        match (refused, rest) {
            (Usdc::ZERO, Usdc::ZERO) => None,
            (Usdc::ZERO, charged) => Some(ChannelFinding::ChargedTheRest { charged }),
            (charged, _) => Some(ChannelFinding::ChargedRefused { charged }),
        }
    }

    /// Returns `true` if these books signed a voucher for as much.
    fn has_signed(&self, voucher: &VoucherState) -> bool {
        self.signed.is_some_and(|signed| voucher.signed_max_claimable <= signed.signed_max_claimable)
    }

    /// Finds the deposit that paid for what was charged: the seller charged it, so it has arrived.
    fn cover_charges(&mut self) {
        if self.charged > self.escrow {
            self.deposit_arrived();
        }
        let uncovered = less(self.charged, self.escrow);
        self.missing = less(self.missing, uncovered);
        self.escrow = plus(self.escrow, uncovered);
    }

    /// Starts the books of a channel in which this much was charged.
    fn open_at(&mut self, charged: Usdc) {
        let before = self.opening;
        self.begin_at(charged);
        match self.trust {
            // The escrow on the chain includes the deposits that paid for it.
            Trust::Observed => self.take_out(less(self.opening, before)),
            _ => self.escrow = plus(self.escrow, charged),
        }
        self.escrow = self.escrow.max(charged);
        self.agreed();
    }

    /// Takes what these books cannot explain for charged before them.
    fn begin_at(&mut self, charged: Usdc) {
        self.opening = less(charged, self.spent());
        (self.charged, self.highest) = (charged, charged);
        (self.doubt, self.left) = (Usdc::ZERO, Usdc::ZERO);
    }

    /// Compares these books with the chain, as of a final block. Returns whether they agree.
    ///
    /// Nothing is released while a deposit that was signed can still be made.
    #[cfg(feature = "onchain")]
    pub(super) fn observe(&mut self, seen: &Seen) -> Correction {
        let Seen { balance, claimed, .. } = *seen;
        let limit = self.limit();
        let mut finding = None;
        // What these books signed is theirs, also if the seller refused it. What is claimed beyond that is of vouchers from before.
        let is_ours = self.last_signed().is_some_and(|signed| claimed <= signed);
        if !self.is_known() && claimed > limit && !is_ours {
            self.begin_at(claimed);
        } else if self.is_known() && claimed > limit {
            return self.disputed(ChannelFinding::ClaimedTooMuch { claimed, charged: limit });
        } else if claimed > self.charged {
            finding = self.raise(claimed);
            if claimed > limit {
                // A claim publishes the voucher's rest.
                self.accepted = self.accepted.max(self.last_signed().unwrap_or_default());
            }
        } else if self.trust == Trust::Unproven {
            self.lower(claimed);
        }
        let is_final = seen.time >= self.deposits.until;
        if seen.pending_used == Some(true) || is_final {
            self.pending = None;
        }
        let pending = self.pending.as_ref().map_or(Usdc::ZERO, |pending| pending.amount);
        let counted = self.deposits.sum();
        let held = plus(less(balance, self.opening), pending);
        if held > counted {
            let found = less(held, counted);
            self.deposits.sums.push((self.used_at, found));
            self.deposits.changes.push(Change::Found { at: self.used_at, amount: found });
            self.escrow = balance;
        } else if is_final {
            // Whatever the seller charged, it can claim no more than what is there.
            self.take_out(less(counted, held));
            self.escrow = balance;
            self.missing = Usdc::ZERO;
        } else {
            self.escrow = self.escrow.max(balance);
        }
        if self.is_known() {
            self.agreed();
        } else if balance > Usdc::ZERO {
            self.trust = Trust::Observed;
        }
        finding.map_or(Correction::Adopted, Correction::Charged)
    }

    pub(super) fn disputed(&mut self, finding: ChannelFinding) -> Correction {
        if self.dispute().is_none() {
            self.trust = Trust::Disputed(finding.clone());
        }
        Correction::Disputed(finding)
    }

    fn unproven(&mut self) -> Correction {
        if self.trust == Trust::Known {
            self.trust = Trust::Unproven;
        }
        Correction::Unproven
    }

    fn agreed(&mut self) {
        if self.dispute().is_none() {
            self.trust = Trust::Known;
        }
    }

    /// Returns `true` if this payer signed the voucher.
    fn is_ours(&self, voucher: &VoucherState) -> bool {
        let escrow = Escrow::on(self.network);
        let voucher = Voucher {
            channel_id: escrow.channel_id(&self.config),
            max_claimable_amount: voucher.signed_max_claimable,
            signature: voucher.signature,
        };
        voucher.is_of(&self.config, &escrow)
    }
}

impl Deposits {
    fn sum(&self) -> Usdc {
        sum(self.sums.iter().map(|(_, amount)| *amount))
    }
}

// Without signatures, and the URL, which may hold a token.
debug_fields!(ChannelEntry |this| {
    id: this.id(),
    network: this.network,
    payer: this.config.payer,
    receiver: this.config.receiver,
    charged: this.charged,
    doubt: this.doubt,
    escrow: this.escrow,
    missing: this.missing,
    pending: this.pending,
    dispute: this.dispute(),
});
