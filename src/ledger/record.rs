//! One payment's record.

use std::{fmt, sync::Arc};

use alloy_primitives::{B256, U256};

use super::Submission;
use crate::{
    eip3009::{Authorization, PaymentSignature},
    payment::{PaymentKey, Prechecked, Terms},
    protocol::Reason,
};

/// Everything known of one payment.
#[derive(Clone, Debug)]
pub struct Record {
    /// What identifies it.
    pub key: PaymentKey,
    /// The offer it was accepted under; later prices do not change it.
    pub terms: Arc<Terms>,
    /// What the payer signed.
    pub authorization: Authorization,
    /// The payer's signature.
    pub signature: PaymentSignature,
    /// The request it pays for.
    pub request: Fingerprint,
    /// What was read of that request's body.
    pub body: Option<BodyDigest>,
    /// What the payer calls the payment (the extension `payment-identifier`):
    /// [`PaymentId::digest`](crate::protocol::PaymentId::digest), since the id itself proves who presents the payment again.
    /// One payer gives it to one payment of a network and token.
    pub id: Option<B256>,
    /// Progress of the work.
    pub fulfilment: Fulfilment,
    /// Progress of the money.
    pub settlement: Settlement,
    /// Why the last attempt to settle did not succeed.
    pub last_failure: Option<Reason>,
    /// How many attempts to settle were recorded as failed.
    pub failures: u32,
    /// How often the handler was started.
    pub attempts: u32,
    /// How often the response was replayed.
    pub replays: u32,
    /// The latest block at which the authorization was seen unused.
    pub block_seen: Option<u64>,
    /// Every transaction submitted for it.
    pub transactions: Vec<B256>,
    /// Whether its amount counts as in flight.
    pub admitted: bool,
    /// Whether its response was released before it was paid for.
    pub deferred: bool,
    /// Who may work on it: a number that grows with every owner.
    pub epoch: u64,
    /// Until when the owner's lease runs, in Unix seconds.
    pub lease_until: u64,
    /// When it was reserved, in Unix seconds.
    pub reserved_at: u64,
    /// When a response was first produced, in Unix seconds.
    pub produced_at: Option<u64>,
    /// Who looks after its settlement.
    pub settling: Option<Settling>,
    /// When it was first known to be settled, in Unix seconds.
    pub settled_at: Option<u64>,
    /// Its share of what the transaction that paid cost, in wei, where this ledger's facilitator paid for it.
    pub fee: Option<U256>,
}

/// Who looks after the settlement of a payment, so that several processes on one ledger do not submit it twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settling {
    /// A number that the process chose at random.
    pub by: u64,
    /// Until when others keep away, in Unix seconds.
    pub until: u64,
}

/// The right to work on a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The payment.
    pub key: PaymentKey,
    /// The owner's number.
    pub epoch: u64,
}

/// A digest of the request a payment was first used for: the seller's configured place and name, method, path, query,
/// `Authorization`, `Cookie` and whatever other headers its price depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// SHA-256 over these parts.
    pub digest: B256,
    /// Whether the request named its caller (`Authorization` or `Cookie`), which the chain does not publish.
    pub names_caller: bool,
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A few bytes tell two requests apart in a log without giving the digest away.
        write!(f, "Fingerprint({:02x}{:02x}…)", self.digest[0], self.digest[1])
    }
}

/// What a handler read of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyDigest {
    /// How many bytes.
    pub length: u64,
    /// SHA-256 of them.
    pub digest: B256,
    /// Whether the body ended there.
    pub complete: bool,
}

impl BodyDigest {
    /// Of two digests of one body, the one that covers more of it: an attempt that read little must not open the payment to
    /// other bodies.
    pub(super) fn more(known: Option<Self>, read: Option<Self>) -> Option<Self> {
        known.into_iter().chain(read).max_by_key(|digest| (digest.length, digest.complete))
    }
}

/// Progress of the work that a payment buys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fulfilment {
    /// Known, not yet worked on.
    Reserved,
    /// The handler runs.
    Working,
    /// The handler succeeded; its response may not have reached the client.
    Produced,
    /// The response was handed over, or broke off for good.
    Delivered,
    /// The last attempt did not succeed; the payment may be presented again.
    Released,
}

/// Progress of the money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// Not asked for.
    None,
    /// To be submitted.
    Due,
    /// Submitted; the outcome is being watched.
    Submitted,
    /// Submitted, perhaps; sight was lost. Never treated as failed.
    Unknown,
    /// Included in a block: the payee was paid.
    Settled {
        /// The transaction that paid.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
    },
    /// Included in a block that will not be undone.
    Final {
        /// The transaction that paid.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
    },
    /// Proven never to be executed.
    Dead,
}

/// [`Settlement`] without its data, to ask for payments by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SettlementState {
    /// Not asked for.
    None,
    /// To be submitted.
    Due,
    /// Submitted.
    Submitted,
    /// Submitted, perhaps.
    Unknown,
    /// Paid, in a block that may yet be undone.
    Settled,
    /// Paid for good.
    Final,
    /// Proven never to be executed.
    Dead,
}

impl SettlementState {
    /// How many there are.
    pub(super) const COUNT: usize = Self::Dead as usize + 1;

    /// Its name in reports and databases.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Due => "due",
            Self::Submitted => "submitted",
            Self::Unknown => "unknown",
            Self::Settled => "settled",
            Self::Final => "final",
            Self::Dead => "dead",
        }
    }
}

impl fmt::Display for SettlementState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Settlement {
    /// The state without its data.
    pub const fn state(&self) -> SettlementState {
        match self {
            Self::None => SettlementState::None,
            Self::Due => SettlementState::Due,
            Self::Submitted => SettlementState::Submitted,
            Self::Unknown => SettlementState::Unknown,
            Self::Settled { .. } => SettlementState::Settled,
            Self::Final { .. } => SettlementState::Final,
            Self::Dead => SettlementState::Dead,
        }
    }

    /// The transaction that paid, if the payment is settled.
    pub const fn paid_by(&self) -> Option<B256> {
        match self {
            Self::Settled { transaction, .. } | Self::Final { transaction, .. } => Some(*transaction),
            _ => None,
        }
    }

    /// The block of the transaction that paid, if the payment is settled and the block is known.
    pub const fn block(&self) -> Option<u64> {
        match self {
            Self::Settled { block, .. } | Self::Final { block, .. } => *block,
            _ => None,
        }
    }
}

impl Record {
    /// The record of a payment seen for the first time at `now`, to be leased until `lease_until` (Unix seconds); it has no
    /// [`id`](Self::id).
    pub fn new(payment: &Prechecked, request: Fingerprint, now: u64, lease_until: u64) -> Self {
        Self {
            key: payment.key(),
            terms: payment.terms().clone(),
            authorization: payment.authorization().clone(),
            signature: payment.signature().clone(),
            request,
            body: None,
            id: None,
            fulfilment: Fulfilment::Reserved,
            settlement: Settlement::None,
            last_failure: None,
            failures: 0,
            attempts: 0,
            replays: 0,
            block_seen: None,
            transactions: Vec::new(),
            admitted: false,
            deferred: false,
            epoch: 0,
            lease_until,
            reserved_at: now,
            produced_at: None,
            settling: None,
            settled_at: None,
            fee: None,
        }
    }

    /// The EIP-712 hash of the authorization. Computed each time: few need it, and it takes three rounds of Keccak.
    pub fn signing_hash(&self) -> B256 {
        self.authorization.signing_hash(self.terms.domain())
    }

    /// Returns the payment on record. Its signature was checked when it was reserved.
    #[cfg(any(feature = "server", feature = "onchain", feature = "remote"))]
    pub(crate) fn payment(&self) -> Prechecked {
        let payload = crate::protocol::ExactPayload {
            signature: self.signature.clone(),
            authorization: self.authorization.clone(),
        };
        Prechecked::restored(self.terms.clone(), payload, self.failures)
    }

    /// Returns the outcome on record of a payment that the ledger refused to have settled: it is paid, it failed after this settlement
    /// was asked for, or another process is at it.
    #[cfg(any(feature = "onchain", feature = "remote"))]
    pub(crate) fn outcome(&self, asked: &Prechecked) -> crate::payment::Outcome {
        use crate::payment::Outcome;

        let transaction = self.transactions.last().copied();
        match (self.settlement, &self.last_failure) {
            (Settlement::Settled { transaction, block } | Settlement::Final { transaction, block }, _) => {
                Outcome::Settled { transaction, block, fee: self.fee }
            }
            (Settlement::Due, Some(reason)) if self.failures != asked.known_failures() => {
                let detail =
                    "an attempt to settle this payment failed elsewhere; presenting it again tries anew".to_owned();
                Outcome::Failed { reason: reason.clone(), detail, transaction, dead: false }
            }
            _ => Outcome::Unknown { transaction },
        }
    }

    /// Whether this is what the payer signed here: the same message to the same token.
    #[cfg(feature = "server")]
    pub(crate) fn is_of(&self, payment: &Prechecked) -> bool {
        self.authorization == *payment.authorization()
            && self.terms.domain().separator() == payment.terms().domain().separator()
    }

    /// Returns `true` if the submission may settle the payment at `now` (Unix seconds): it is not paid, no other process looks after
    /// it, and the submission knows of every failure on record.
    pub fn may_be_submitted(&self, submission: &Submission, now: u64) -> bool {
        matches!(self.settlement, Settlement::Due | Settlement::Submitted | Settlement::Unknown)
            && self.may_be_settled_by(submission.by, now)
            && self.failures == submission.known_failures_of(&self.key)
    }

    /// Whether no other process than `by` looks after its settlement at `now` (Unix seconds).
    pub fn may_be_settled_by(&self, by: u64, now: u64) -> bool {
        self.settling.is_none_or(|settling| settling.by == by || settling.until < now)
    }

    /// The right to work on it, of the owner that this record names.
    pub fn lease(&self) -> Lease {
        Lease { key: self.key, epoch: self.epoch }
    }

    /// Whether its owner's lease still runs.
    pub fn is_leased(&self, now: u64) -> bool {
        matches!(self.fulfilment, Fulfilment::Reserved | Fulfilment::Working) && self.lease_until >= now
    }

    /// Gives it to a new owner until `until`. What was released is reserved again, so that the new owner's lease counts.
    pub fn lease_anew(&mut self, until: u64) {
        self.epoch += 1;
        self.lease_until = until;
        if self.fulfilment == Fulfilment::Released {
            self.fulfilment = Fulfilment::Reserved;
        }
    }

    /// Whether forgetting it loses nothing: no work was done, nothing was submitted, and nobody had it before. Who had it may still
    /// believe to have it, and would have a new reservation's lease.
    pub fn is_discardable(&self) -> bool {
        self.fulfilment == Fulfilment::Reserved
            && self.epoch == 0
            && self.attempts == 0
            && matches!(self.settlement, Settlement::None | Settlement::Due)
            && self.transactions.is_empty()
    }

    /// Whether its fate is known and cannot change by what this process does.
    pub fn is_resolved(&self) -> bool {
        !matches!(self.settlement, Settlement::Submitted | Settlement::Unknown)
    }

    /// Whether nothing can happen to it any more that this ledger would have to know, at `now` (Unix seconds), some time after
    /// `validBefore`. A block that is not final by then, or a payment never submitted, is given an hour; whoever works on it, all the time
    /// that it has.
    pub fn may_be_forgotten(&self, now: u64) -> bool {
        if self.is_leased(now) {
            return false;
        }
        let an_hour_later = u64::try_from(self.authorization.valid_before).unwrap_or(u64::MAX).saturating_add(3600);
        match self.settlement {
            Settlement::None | Settlement::Final { .. } | Settlement::Dead => true,
            Settlement::Due | Settlement::Settled { .. } => an_hour_later < now,
            Settlement::Submitted | Settlement::Unknown => false,
        }
    }

    /// Atomic units that count as in flight.
    pub fn in_flight(&self) -> U256 {
        if self.admitted { self.authorization.value } else { U256::ZERO }
    }

    /// Atomic units that are owed for what was handed over already.
    pub fn owed(&self) -> U256 {
        let is_owed = self.deferred && self.settlement.paid_by().is_none();
        if is_owed { self.authorization.value } else { U256::ZERO }
    }
}
