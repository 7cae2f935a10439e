//! What happens to a payment: the steps of its record.

use alloy_primitives::{B256, U256};

use super::StoredResponse;
use crate::{
    payment::{Funds, SettlementOutcome},
    protocol::Reason,
};

/// A step of a payment, which [`Record::apply`](super::Record::apply) takes. A new step is a breaking change, so that no backend overlooks it.
#[derive(Clone, Debug)]
pub enum PaymentStep {
    /// Leases a known payment to the caller. Times are in Unix seconds.
    TakeOver {
        /// The [epoch](super::Record::epoch) of the record that the caller decided on.
        seen: u64,
        /// The time by the caller's clock.
        now: u64,
        /// When the lease ends.
        until: u64,
    },
    /// A step of the work, by the owner of the current lease ([`Lease::step`](super::Lease::step)).
    Fulfil {
        /// The number of the lease.
        epoch: u64,
        /// The step.
        step: FulfilmentStep,
    },
    /// A step of the money. It reports a fact about the chain, and needs no lease.
    Settle(SettlementStep),
    /// The response is replayed. Counts in [`Record::replays`](super::Record::replays).
    Replay,
}

impl PaymentStep {
    /// Returns the response that is kept with the step.
    pub const fn response(&self) -> Option<&StoredResponse> {
        match self {
            Self::Fulfil { step: FulfilmentStep::Produce { response, .. }, .. } => response.as_ref(),
            _ => None,
        }
    }
}

impl From<SettlementStep> for PaymentStep {
    fn from(step: SettlementStep) -> Self {
        Self::Settle(step)
    }
}

/// A step of fulfilment. A new step is a breaking change, so that no backend overlooks it.
#[derive(Clone, Debug)]
pub enum FulfilmentStep {
    /// The payment was verified. Its amount counts as in flight from now on.
    Admit {
        /// The payer's balance; `None` where the verifier has checked it against everything in flight.
        funds: Option<Funds>,
        /// `true` to settle at once, before the work (flow `upfront`).
        due: bool,
    },
    /// The handler starts.
    Start {
        /// When the lease ends from now on, in Unix seconds: verification and settlement may have used most of it. The step never
        /// shortens the lease.
        until: u64,
    },
    /// The attempt failed.
    Release {
        /// The part of the request body that the handler read.
        body: Option<BodyDigest>,
    },
    /// The handler succeeded. An unsettled payment becomes due, unless nothing is charged: then it is used up, and final.
    Produce {
        /// What is charged of the amount that was signed for, in atomic units; `None` for all of it.
        charged: Option<U256>,
        /// The part of the request body that the handler read.
        body: Option<BodyDigest>,
        /// When, in Unix seconds.
        at: u64,
        /// The response, if it is complete. It is kept for replays, within the limits, atomically with the step. A streaming response is
        /// [stored](super::ResponseLedger::store_response) when it ends.
        response: Option<StoredResponse>,
    },
    /// The response is released before the payment is settled. The lease ends, so that background settlement takes the payment at once.
    /// Point 9 of the [contract](crate::ledger) says how much of that a payer gets.
    Defer {
        /// The most that the payer may owe on this network and in this token, this payment included, in atomic units.
        limit: U256,
    },
    /// The response was sent, or the connection broke while it was.
    Deliver,
}

/// A step of settlement. A new step is a breaking change, so that no backend overlooks it.
#[derive(Clone, Debug)]
pub enum SettlementStep {
    /// A transaction is about to leave the process.
    Submit {
        /// Its hash.
        transaction: B256,
    },
    /// The payee was paid.
    Settle {
        /// The transaction that paid, whoever sent it. Zero for a payment of which nothing is charged: it is used up, and final.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
        /// The payment's share of the transaction fee, in wei, if the facilitator paid it.
        fee: Option<U256>,
    },
    /// The block of the transaction is final.
    Finalize,
    /// A reorganization removed the transaction that paid. The payment is due again.
    Reorg,
    /// A process settles the payment; others leave it alone until then.
    Claim(Settling),
    /// A process settles the payment through another facilitator. The payment is `Unknown` until that facilitator reports the outcome, also
    /// if this process ends before.
    Delegate {
        /// The process that delegates it, and until when others leave it alone.
        settling: Settling,
        /// The number of [failures](super::Record::failures) that were known when settlement was requested. If more are on record, the payer
        /// may have been told of one, and the step is refused.
        known_failures: u32,
    },
    /// Not executed so far. The payment is due again, and is settled only for a request made with knowledge of this failure, because
    /// the payer may be told of it.
    Fail {
        /// Why.
        reason: Reason,
        /// The process that reports it, as in [`Settling::by`]; 0 for none.
        by: u64,
        /// The payment's [transactions](super::Record::transactions) that it knows of. If the newest on record is not among them, it may pay
        /// the payment yet, and the step is refused.
        known_transactions: Vec<B256>,
    },
    /// Proven never to be executed.
    Invalidate {
        /// Why.
        reason: Reason,
    },
    /// The outcome of a submission is unknown.
    MarkUnknown,
}

impl SettlementStep {
    /// Returns the step that records an outcome, reported by the facilitator whose
    /// [process](crate::facilitator::Facilitator::process_id) is `by`. `known_transactions` are those on record when the facilitator was
    /// asked; a failure accounts for them and for the one that it names.
    pub fn of(outcome: &SettlementOutcome, by: u64, known_transactions: &[B256]) -> Self {
        match outcome.clone() {
            SettlementOutcome::Settled { transaction, block, fee } => Self::Settle { transaction, block, fee },
            SettlementOutcome::Failed { reason, dead: true, .. } => Self::Invalidate { reason },
            SettlementOutcome::Failed { reason, transaction, .. } => {
                let known_transactions = known_transactions.iter().copied().chain(transaction).collect();
                Self::Fail { reason, by, known_transactions }
            }
            SettlementOutcome::Unknown { .. } => Self::MarkUnknown,
        }
    }
}

/// The process that settles a payment, so that no other one submits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settling {
    /// A number that the process chose at random.
    pub by: u64,
    /// The end of the claim, in Unix seconds. Other processes leave the payment alone until then.
    pub until: u64,
}

/// A digest of the part of a request body that a handler read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyDigest {
    /// Bytes read.
    pub length: u64,
    /// SHA-256 of these bytes.
    pub digest: B256,
    /// `true` if the body ended there.
    pub complete: bool,
}

impl BodyDigest {
    /// Returns the digest that covers more of the body. Otherwise an attempt that read little would open the payment to other bodies.
    pub(super) fn longer(known: Option<Self>, read: Option<Self>) -> Option<Self> {
        known.into_iter().chain(read).max_by_key(|digest| (digest.length, digest.complete))
    }
}
