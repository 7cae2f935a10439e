//! A payment's record and its state machine: every backend takes its steps here.

use std::{fmt, sync::Arc};

use alloy_primitives::{B256, U256, keccak256};

use super::{
    JournaledTransaction, LedgerError,
    step::{BodyDigest, FulfilmentStep, PaymentStep, SettlementStep, Settling},
};
#[cfg(any(feature = "onchain", feature = "remote"))]
use crate::payment::SettlementOutcome;
use crate::{
    eip3009::{Authorization, PaymentSignature},
    payment::{PaymentKey, Prechecked, Terms},
    protocol::Reason,
};

/// How long after `validBefore` a record is kept, in seconds, so that a late reorganization still finds it.
pub(super) const RETENTION: u64 = 900;

/// How long after its deadline a permit is kept whose outcome nobody has found out, in seconds: a week, for a node that is away for days.
///
/// Its payer can use the nonce in a way that no chain tells from a settlement. An authorization's outcome is on the chain for ever.
const UNCLEAR: u64 = 7 * 86_400;

/// The record of one payment. [`Record::new`] creates it; a backend restores it with [`Record::from_json`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Record {
    /// The payment's identity.
    pub key: PaymentKey,
    /// The offer that it was accepted under. Later prices do not change it.
    pub terms: Arc<Terms>,
    /// The message that the payer signed. A permit is kept in the same fields (see [`permit2`](crate::permit2)).
    pub authorization: Authorization,
    /// The payer's signature.
    pub signature: PaymentSignature,
    /// The request that it pays for.
    pub request: Fingerprint,
    /// A digest of that request with what its payer returned of extensions, as it wrote that: the same payment has it again, whatever its
    /// seller declares later. `None` if it returned nothing but an [`id`](Self::id).
    pub written: Option<Fingerprint>,
    /// The part of that request's body that a handler has read.
    pub body: Option<BodyDigest>,
    /// The payer's id for the payment (the extension `payment-identifier`), as
    /// [`PaymentId::digest`](crate::protocol::PaymentId::digest): the id itself proves who presents the payment again. A payer gives
    /// it to one payment per network and token.
    pub id: Option<B256>,
    /// The state of the work.
    pub fulfilment: Fulfilment,
    /// The state of the money.
    pub settlement: Settlement,
    /// Why the last attempt to settle failed.
    pub last_failure: Option<Reason>,
    /// The number of attempts to settle that were recorded as failed.
    pub failures: u32,
    /// The number of times that the handler was started.
    pub attempts: u32,
    /// The number of times that the response was replayed.
    pub replays: u32,
    /// The latest block at which the authorization was seen unused.
    pub block_seen: Option<u64>,
    /// The hashes of all transactions that were submitted with it.
    pub transactions: Vec<B256>,
    /// `true` while its amount counts as in flight.
    pub admitted: bool,
    /// `true` if its response was released before it was settled.
    pub deferred: bool,
    /// `true` if its response was not there whole when the work was done, and streamed.
    pub streamed: bool,
    /// The number of the current lease. It grows by one with every owner.
    pub epoch: u64,
    /// When the current lease ends, in Unix seconds.
    pub lease_until: u64,
    /// When it was reserved, in Unix seconds.
    pub reserved_at: u64,
    /// When a response was first produced, in Unix seconds.
    pub produced_at: Option<u64>,
    /// The process that settles it.
    pub settling: Option<Settling>,
    /// When it was first known to be settled, in Unix seconds.
    pub settled_at: Option<u64>,
    /// Its share of the transaction fee, in wei, if this ledger's facilitator paid it.
    pub fee: Option<U256>,
    /// What is charged of the amount that was signed for, in atomic units, once that is decided. `None` if it is all of it.
    pub charged: Option<U256>,
}

/// The exclusive right to work on a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The payment.
    pub key: PaymentKey,
    /// The lease's number, as [`Record::epoch`].
    pub epoch: u64,
}

impl Lease {
    /// Returns a step of the work that the lease's owner takes.
    pub const fn step(&self, step: FulfilmentStep) -> PaymentStep {
        PaymentStep::Fulfil { epoch: self.epoch, step }
    }
}

/// A digest of the request that a payment was first used for: the seller's configured origin and name, method, path, query,
/// `Authorization`, `Cookie` and the other headers that its price depends on, and what the payer added to the seller's extensions.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// SHA-256 over these parts.
    pub digest: B256,
    /// `true` if the request named its caller (`Authorization` or `Cookie`), which the chain does not publish.
    pub names_caller: bool,
}

impl Fingerprint {
    /// Returns the fingerprint of payments that a facilitator settles for others. Their requests and responses are those of the sellers.
    pub(crate) fn of_settler() -> Self {
        Self { digest: keccak256("tower-x402 facilitator service"), names_caller: false }
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Two bytes tell requests apart in a log without revealing the digest.
        write!(f, "Fingerprint({:02x}{:02x}…)", self.digest[0], self.digest[1])
    }
}

/// The state of the work that a payment buys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fulfilment {
    /// Reserved; the handler was not started.
    Reserved,
    /// The handler runs.
    Working,
    /// The handler succeeded. Its response may not have reached the client.
    Produced,
    /// The response was sent, or the connection broke while it was.
    Delivered,
    /// The last attempt failed. The payment may be presented again.
    Released,
}

impl Fulfilment {
    /// Returns its name in databases.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Working => "working",
            Self::Produced => "produced",
            Self::Delivered => "delivered",
            Self::Released => "released",
        }
    }
}

/// The state of a payment's money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// Settlement was not requested.
    None,
    /// Settlement was requested, and nothing is submitted.
    Due,
    /// Submitted; its process awaits the result.
    Submitted,
    /// Submitted, or delegated to another facilitator, with an unknown outcome. Never treated as failed.
    Unknown,
    /// Included in a block: the payee was paid.
    Settled {
        /// The transaction that paid.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
    },
    /// Included in a final block; or nothing was charged, so that nothing is to be settled.
    Final {
        /// The transaction that paid; zero if nothing was charged.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
    },
    /// Proven never to be executed.
    Dead,
}

/// A [`Settlement`] without its data, to select payments by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SettlementState {
    /// Settlement was not requested.
    None,
    /// Settlement was requested, and nothing is submitted.
    Due,
    /// A transaction with the payment was submitted.
    Submitted,
    /// Submitted, with an unknown outcome.
    Unknown,
    /// Included in a block that a reorganization may remove.
    Settled,
    /// Included in a final block.
    Final,
    /// Proven never to be executed.
    Dead,
}

impl SettlementState {
    pub(super) const ALL: [Self; 7] =
        [Self::None, Self::Due, Self::Submitted, Self::Unknown, Self::Settled, Self::Final, Self::Dead];

    /// Returns its name in reports and databases.
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
    /// Returns the state without its data.
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

    /// Returns the transaction that paid, if the payment is settled or final.
    pub const fn paid_by(&self) -> Option<B256> {
        match self {
            Self::Settled { transaction, .. } | Self::Final { transaction, .. } => Some(*transaction),
            _ => None,
        }
    }

    /// Returns the block of the transaction that paid, if the payment is settled or final and the block is known.
    pub const fn block(&self) -> Option<u64> {
        match self {
            Self::Settled { block, .. } | Self::Final { block, .. } => *block,
            _ => None,
        }
    }
}

/// The record's state does not allow the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a payment that is {fulfilment:?} and {settlement:?} cannot take this step")]
#[non_exhaustive]
pub struct InvalidTransition {
    /// The state of the work.
    pub fulfilment: Fulfilment,
    /// The state of the money.
    pub settlement: Settlement,
}

/// The state machine.
impl Record {
    /// Takes a step at `now` (Unix seconds) by the ledger's clock, or refuses it and changes nothing.
    ///
    /// Whether a payer's balance or credit permits the step, [`PayerSums::allow`](super::PayerSums::allow) says.
    ///
    /// | step | changes | is refused with |
    /// |---|---|---|
    /// | `TakeOver` | the lease; a released payment is reserved again | [`LedgerError::LeaseLost`] if the epoch is another one, or if the current lease runs |
    /// | `Fulfil` | the work ([`fulfil`](Self::fulfil)) | [`LedgerError::LeaseLost`] if the lease is not the current one, [`LedgerError::InvalidTransition`], or [`LedgerError::NoCredit`] for a `Defer` of what can not be settled any more |
    /// | `Settle` | the money ([`settle`](Self::settle)) | [`LedgerError::InvalidTransition`] |
    /// | `Replay` | the number of replays | |
    ///
    /// # Errors
    /// Those of the table.
    pub fn apply(&mut self, step: &PaymentStep, now: u64) -> Result<(), LedgerError> {
        match step {
            PaymentStep::TakeOver { seen, now, .. } if self.epoch != *seen || self.is_leased(*now) => {
                return Err(LedgerError::LeaseLost);
            }
            PaymentStep::Fulfil { epoch, .. } if self.epoch != *epoch => return Err(LedgerError::LeaseLost),
            PaymentStep::TakeOver { until, .. } => {
                self.epoch += 1;
                self.lease_until = *until;
                if self.fulfilment == Fulfilment::Released {
                    // So that the lease counts.
                    self.fulfilment = Fulfilment::Reserved;
                }
            }
            // What is lent counts as owed for long enough only if it may be paid yet.
            PaymentStep::Fulfil { step: FulfilmentStep::Defer { .. }, .. }
                if self.terms.is_over(&self.authorization, now) =>
            {
                return Err(LedgerError::NoCredit);
            }
            PaymentStep::Fulfil { step, .. } => self.fulfil(step)?,
            PaymentStep::Settle(step) => self.settle(step, now)?,
            PaymentStep::Replay => self.replays = self.replays.saturating_add(1),
        }
        Ok(())
    }

    /// Checks that the owner of this lease may discard the payment.
    ///
    /// # Errors
    /// [`LedgerError::LeaseLost`] if the lease is not the current one, [`LedgerError::InvalidTransition`] unless the payment
    /// [is discardable](Self::is_discardable).
    pub fn check_discard(&self, lease: &Lease) -> Result<(), LedgerError> {
        if self.epoch != lease.epoch {
            return Err(LedgerError::LeaseLost);
        }
        if self.is_discardable() { Ok(()) } else { Err(self.invalid().into()) }
    }

    /// Returns `true` if the contract lets this step, after which the record is this one, become durable later: a crash loses nothing by
    /// it.
    pub fn may_lose(&self, step: &PaymentStep) -> bool {
        match step {
            PaymentStep::Fulfil { step, .. } => match step {
                FulfilmentStep::Admit { due, .. } => !due,
                FulfilmentStep::Start { .. } => self.attempts <= 1 && self.settlement == Settlement::None,
                step => matches!(step, FulfilmentStep::Deliver),
            },
            PaymentStep::Settle(step) => matches!(step, SettlementStep::Settle { .. } | SettlementStep::Finalize),
            PaymentStep::TakeOver { .. } | PaymentStep::Replay => false,
        }
    }

    /// Takes a step of fulfilment, or refuses it and changes nothing.
    ///
    /// | step | from | to |
    /// |---|---|---|
    /// | `Admit` | `Reserved`, `Released`, `Working`, not due | unchanged, in flight |
    /// | `Start` | in flight or settled; `Reserved`, `Released`, or `Working` (of an owner that died) | `Working` |
    /// | `Release` | `Reserved`, `Working` | `Released`; not in flight, unless due |
    /// | `Produce` | `Working` | `Produced`; due, or final if nothing is charged |
    /// | `Defer` | `Produced` and due, not deferred before | unchanged, deferred, its lease ended |
    /// | `Deliver` | `Produced`, `Delivered` | `Delivered` |
    ///
    /// # Errors
    /// [`InvalidTransition`] if the table does not allow the step.
    pub fn fulfil(&mut self, step: &FulfilmentStep) -> Result<(), InvalidTransition> {
        use Fulfilment::*;
        let paid = self.settlement.paid_by().is_some();
        match (step, self.fulfilment) {
            (FulfilmentStep::Admit { funds, due }, Reserved | Released | Working)
                if self.settlement == Settlement::None =>
            {
                self.admitted = true;
                self.block_seen = funds.map(|funds| funds.block).or(self.block_seen);
                if *due {
                    self.settlement = Settlement::Due;
                }
            }
            (FulfilmentStep::Start { until }, Reserved | Released | Working) if self.admitted || paid => {
                self.fulfilment = Working;
                self.lease_until = self.lease_until.max(*until);
                self.attempts += 1;
            }
            (FulfilmentStep::Release { body }, Reserved | Working) => {
                self.body = BodyDigest::longer(self.body, *body);
                self.fulfilment = Released;
                self.admitted &= self.settlement != Settlement::None;
            }
            (FulfilmentStep::Produce { charged, body, at, response }, Working) => {
                self.body = BodyDigest::longer(self.body, *body);
                self.fulfilment = Produced;
                self.streamed = response.is_none();
                self.produced_at = Some(*at);
                if self.settlement == Settlement::None {
                    self.charged = *charged;
                    self.settlement = Settlement::Due;
                    if self.amount().is_zero() {
                        self.charge_nothing(*at);
                    }
                }
            }
            (FulfilmentStep::Defer { .. }, Produced) if self.settlement == Settlement::Due && !self.deferred => {
                self.deferred = true;
                self.lease_until = 0;
            }
            (FulfilmentStep::Deliver, Produced | Delivered) => self.fulfilment = Delivered,
            _ => return Err(self.invalid()),
        }
        Ok(())
    }

    /// Takes a step of settlement at `now` (Unix seconds), or refuses it and changes nothing.
    ///
    /// | step | from | to |
    /// |---|---|---|
    /// | `Submit` | `Due`, `Submitted`, `Unknown` | `Submitted` |
    /// | `Settle` | anything but `Final` and `Dead` | `Settled`; `Final` if nothing is charged, by no transaction |
    /// | `Finalize` | `Settled`, `Final` | `Final` |
    /// | `Reorg` | `Settled` | `Due`, in flight again; its lease ended if the work is done |
    /// | `Claim` | `Due`, `Submitted`, `Unknown`, unless another process settles it | unchanged |
    /// | `Delegate` | `Due`, `Submitted`, `Unknown`, unless another process settles it or a failure is not known | `Unknown` |
    /// | `Fail` | `Due`; `Submitted`, `Unknown`, unless another process settled it last; not if a newer transaction is not known | `Due`, with one failure more |
    /// | `Invalidate` | anything but `Settled` and `Final` | `Dead` |
    /// | `MarkUnknown` | `Due`, `Submitted`, `Unknown` | `Unknown` |
    ///
    /// # Errors
    /// [`InvalidTransition`] if the table does not allow the step.
    pub fn settle(&mut self, step: &SettlementStep, now: u64) -> Result<(), InvalidTransition> {
        use Settlement::*;
        match (step, self.settlement) {
            (SettlementStep::Submit { transaction }, Due | Submitted | Unknown) => {
                if !self.transactions.contains(transaction) {
                    self.transactions.push(*transaction);
                }
                self.settlement = Submitted;
            }
            (SettlementStep::Settle { transaction: B256::ZERO, .. }, None | Due) if self.amount().is_zero() => {
                self.charge_nothing(now);
            }
            (SettlementStep::Settle { transaction, block, fee }, None | Due | Submitted | Unknown | Settled { .. }) => {
                self.settlement = Settled { transaction: *transaction, block: *block };
                self.admitted = false;
                self.settled_at = self.settled_at.or(Some(now));
                self.fee = fee.or(self.fee);
            }
            (SettlementStep::Reorg, Settled { .. }) => {
                self.settlement = Due;
                self.admitted = true;
                // Nobody holds the lease of finished work, and background settlement need not wait for it.
                if matches!(self.fulfilment, Fulfilment::Produced | Fulfilment::Delivered) {
                    self.lease_until = 0;
                }
                self.fee = Option::None;
            }
            (SettlementStep::Claim(settling), Due | Submitted | Unknown)
                if self.may_be_settled_by(settling.by, now) =>
            {
                self.settling = Some(*settling);
            }
            (SettlementStep::Delegate { settling, known_failures }, Due | Submitted | Unknown)
                if self.may_be_settled_by(settling.by, now) && self.failures == *known_failures =>
            {
                self.settling = Some(*settling);
                self.settlement = Unknown;
            }
            (SettlementStep::Finalize, Settled { transaction, block } | Final { transaction, block }) => {
                self.settlement = Final { transaction, block };
            }
            (SettlementStep::Fail { reason, by, known_transactions }, Due | Submitted | Unknown)
                if (self.settlement == Due || self.settling.is_none_or(|settling| settling.by == *by))
                    && self.transactions.last().is_none_or(|newest| known_transactions.contains(newest)) =>
            {
                self.settlement = Due;
                self.last_failure = Some(reason.clone());
                self.failures = self.failures.saturating_add(1);
            }
            (SettlementStep::Invalidate { reason }, None | Due | Submitted | Unknown | Dead) => {
                self.settlement = Dead;
                self.last_failure = Some(reason.clone());
                self.admitted = false;
            }
            (SettlementStep::MarkUnknown, Due | Submitted | Unknown) => self.settlement = Unknown,
            _ => return Err(self.invalid()),
        }
        Ok(())
    }

    /// Takes [`SettlementStep::Submit`] for a payment in this transaction, and notes the process that settles it.
    ///
    /// # Errors
    /// [`InvalidTransition`] unless the payment [may be submitted](Self::may_be_submitted).
    pub fn submit(&mut self, transaction: &JournaledTransaction, now: u64) -> Result<(), InvalidTransition> {
        if !self.may_be_submitted(transaction, now) {
            return Err(self.invalid());
        }
        self.settle(&SettlementStep::Submit { transaction: transaction.hash }, now)?;
        self.settling = Some(Settling { by: transaction.by, until: transaction.until });
        Ok(())
    }

    /// Uses up the payment without a transaction.
    fn charge_nothing(&mut self, at: u64) {
        self.settlement = Settlement::Final { transaction: B256::ZERO, block: None };
        self.settled_at = Some(at);
        self.admitted = false;
    }

    fn invalid(&self) -> InvalidTransition {
        InvalidTransition { fulfilment: self.fulfilment, settlement: self.settlement }
    }
}

impl Record {
    /// Creates the record of a payment seen for the first time at `now`, leased until `lease_until` (Unix seconds), without an
    /// [`id`](Self::id).
    pub fn new(payment: &Prechecked, request: Fingerprint, now: u64, lease_until: u64) -> Self {
        Self {
            key: payment.key(),
            terms: payment.terms().clone(),
            authorization: payment.authorization().clone(),
            signature: payment.signature().clone(),
            request,
            written: None,
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
            streamed: false,
            epoch: 0,
            lease_until,
            reserved_at: now,
            produced_at: None,
            settling: None,
            settled_at: None,
            fee: None,
            charged: payment.charged(),
        }
    }

    /// Computes the EIP-712 hash of what was signed. It takes a few rounds of Keccak, so it is not stored.
    pub fn signing_hash(&self) -> B256 {
        self.terms.signing_hash(&self.authorization)
    }

    /// Returns the amount that is settled, in atomic units: what is charged, or all that was signed for.
    pub fn amount(&self) -> U256 {
        self.charged.unwrap_or(self.authorization.value)
    }

    /// Returns the transaction that paid, if the payment is settled or final and anything was charged.
    pub fn transaction(&self) -> Option<B256> {
        self.settlement.paid_by().filter(|transaction| !transaction.is_zero())
    }

    /// Returns the current lease.
    pub fn lease(&self) -> Lease {
        Lease { key: self.key, epoch: self.epoch }
    }

    /// Returns `true` if the current lease runs at `now` (Unix seconds) and the work is not done.
    pub fn is_leased(&self, now: u64) -> bool {
        matches!(self.fulfilment, Fulfilment::Reserved | Fulfilment::Working) && self.lease_until >= now
    }

    /// Returns `true` if the transaction may settle the payment at `now` (Unix seconds): the payment is not paid, no other process
    /// settles it, and the transaction names every failure on record.
    pub fn may_be_submitted(&self, transaction: &JournaledTransaction, now: u64) -> bool {
        matches!(self.settlement, Settlement::Due | Settlement::Submitted | Settlement::Unknown)
            && self.may_be_settled_by(transaction.by, now)
            && self.failures == transaction.known_failures_of(&self.key)
    }

    /// Returns `true` if no other process than `by` settles the payment at `now` (Unix seconds).
    pub fn may_be_settled_by(&self, by: u64, now: u64) -> bool {
        self.settling.is_none_or(|settling| settling.by == by || settling.until < now)
    }

    /// Returns `true` if nothing is lost when the record is removed: it was never worked on, submitted, or taken over. An earlier owner
    /// would hold the lease of a new reservation under the same key.
    pub fn is_discardable(&self) -> bool {
        self.fulfilment == Fulfilment::Reserved
            && self.epoch == 0
            && self.attempts == 0
            && matches!(self.settlement, Settlement::None | Settlement::Due)
            && self.transactions.is_empty()
    }

    /// Returns `true` if the outcome of every submission is known.
    pub fn is_resolved(&self) -> bool {
        !matches!(self.settlement, Settlement::Submitted | Settlement::Unknown)
    }

    /// Returns `true` if the record is of no use any more at `now` (Unix seconds), some time after `validBefore`. A due payment, or one
    /// whose block is not final, is kept for another hour, and a leased one as long as its lease runs. A payment whose outcome is not known is
    /// kept until it is, but for a permit: that is given up a week after its deadline, and counts as [unresolved](super::Counts::unresolved).
    pub fn may_be_forgotten(&self, now: u64) -> bool {
        if self.is_leased(now) {
            return false;
        }
        let valid_before = u64::try_from(self.authorization.valid_before).unwrap_or(u64::MAX);
        let is_over_for = |seconds| valid_before.saturating_add(seconds) < now;
        match self.settlement {
            Settlement::None | Settlement::Final { .. } | Settlement::Dead => true,
            Settlement::Due | Settlement::Settled { .. } => is_over_for(3600),
            Settlement::Submitted | Settlement::Unknown => self.terms.permit().is_some() && is_over_for(UNCLEAR),
        }
    }

    /// Returns from when on the record is looked at, to be removed if it [may be forgotten](Self::may_be_forgotten), in Unix seconds. If it may
    /// not, it is looked at again a quarter of an hour later.
    pub fn forget_at(&self) -> u64 {
        u64::try_from(self.authorization.valid_before).unwrap_or(u64::MAX).saturating_add(RETENTION)
    }

    /// Returns the amount that counts as in flight, in atomic units.
    pub fn in_flight(&self) -> U256 {
        if self.admitted { self.amount() } else { U256::ZERO }
    }

    /// Returns the amount that is owed for a response released before settlement, in atomic units.
    pub fn owed(&self) -> U256 {
        let is_owed = self.deferred && self.settlement.paid_by().is_none();
        if is_owed { self.amount() } else { U256::ZERO }
    }

    /// Returns `true` if the payment was deferred and then failed to settle.
    pub(super) fn is_overdue(&self) -> bool {
        self.deferred
            && self.settlement.paid_by().is_none()
            && (self.settlement == Settlement::Dead || self.last_failure.is_some())
    }

    /// Returns the payment on record. Its signature was checked when it was reserved.
    #[cfg(any(feature = "server", feature = "onchain", feature = "remote"))]
    pub(crate) fn payment(&self) -> Prechecked {
        let payload = crate::protocol::ExactPayload {
            signature: self.signature.clone(),
            authorization: self.authorization.clone(),
            permit: self.terms.permit(),
        };
        Prechecked::restored(self.terms.clone(), payload, self.failures, self.charged)
    }

    /// Returns the outcome on record of a payment that the ledger refused to submit: it is paid, it failed after this settlement
    /// was requested, or another process settles it.
    #[cfg(any(feature = "onchain", feature = "remote"))]
    pub(crate) fn outcome(&self, asked: &Prechecked) -> SettlementOutcome {
        let transaction = self.transactions.last().copied();
        match (self.settlement, &self.last_failure) {
            (Settlement::Settled { transaction, block } | Settlement::Final { transaction, block }, _) => {
                SettlementOutcome::Settled { transaction, block, fee: self.fee }
            }
            (Settlement::Due, Some(reason)) if self.failures != asked.known_failures() => {
                let detail =
                    "an attempt to settle this payment failed elsewhere; presenting it again tries anew".to_owned();
                SettlementOutcome::Failed { reason: reason.clone(), detail, transaction, dead: false }
            }
            _ => SettlementOutcome::Unknown { transaction },
        }
    }

    /// Returns `true` if this is what the payer signed: the same message to the same token.
    #[cfg(feature = "server")]
    pub(crate) fn is_of(&self, payment: &Prechecked) -> bool {
        self.authorization == *payment.authorization()
            && self.terms.permit() == payment.terms().permit()
            && self.terms.domain().separator() == payment.terms().domain().separator()
    }
}
