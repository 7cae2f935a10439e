//! The steps that a payment's record may take.

use std::sync::Arc;

use alloy_primitives::{B256, U256};

use super::{BodyDigest, CreditLimit, Fulfilment, Record, Settlement, Settling, StoredResponse, Submission};
use crate::{
    payment::{Funds, Outcome},
    protocol::Reason,
};

/// A step along the axis of fulfilment.
#[derive(Clone, Debug)]
pub enum FulfilmentStep {
    /// The payment was verified: count it as in flight. `due` asks for settlement at once (flow `upfront`).
    Admit {
        /// What the payer was seen to own; `None` where the verifier answers for the balance itself.
        funds: Option<Funds>,
        /// Whether it is to be settled before the work.
        due: bool,
    },
    /// The handler starts. What came before it, settlement included, may have taken most of the lease.
    Start {
        /// Until when the lease runs from now on, in Unix seconds; it is never shortened.
        until: u64,
    },
    /// The attempt did not succeed.
    Release {
        /// What it read of the request body.
        body: Option<BodyDigest>,
    },
    /// The handler succeeded; an unsettled payment becomes due.
    Produce {
        /// What it read of the request body.
        body: Option<BodyDigest>,
        /// When, in Unix seconds.
        at: u64,
        /// The response, if it is whole already; kept for replays, within the bounds, in the same breath as the step. One that
        /// is still streaming is [stored](super::Ledger::store_response) when it has ended.
        response: Option<Arc<StoredResponse>>,
    },
    /// The response is released before the payment is settled, within `limit`; its lease ends, so that whoever settles what is
    /// due finds it at once.
    Defer {
        /// What may be owed, this payment included.
        limit: CreditLimit,
    },
    /// The response was handed over, or broke off for good.
    Deliver,
}

/// A step along the axis of settlement.
#[derive(Clone, Debug)]
pub enum SettlementStep {
    /// A transaction is about to leave the process.
    Submit {
        /// Its hash.
        transaction: B256,
    },
    /// The payee was paid.
    Settle {
        /// The transaction that paid, ours or not.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
        /// Its share of what that transaction cost, in wei, if the facilitator paid for it.
        fee: Option<U256>,
    },
    /// Its block will not be undone.
    Finalize,
    /// Its block was replaced, and the transaction that paid is in none any more: it is due again.
    Reorg,
    /// A process looks after its settlement; others keep away until then.
    Claim(Settling),
    /// The same, and the payment is about to be given to somebody who settles it in transactions of their own. Until they say what
    /// became of it, it is `Unknown`: also if this process dies before they answer, or before they were asked.
    Delegate {
        /// Who gives it away, and until when others keep away.
        settling: Settling,
        /// How many [failures](Record::failures) whoever asked for the settlement knew of. If there are more on record, the payer may
        /// have been told of one since, and the step is refused.
        known_failures: u32,
    },
    /// Not executed, so far: it is due again. The payer may be told so: from now on, the payment is settled only for whoever asks
    /// knowing of this failure.
    Fail {
        /// Why.
        reason: Reason,
        /// The process that says so, as in [`Settling::by`]; 0 for none.
        by: u64,
    },
    /// Proven never to be executed.
    Invalidate {
        /// Why.
        reason: Reason,
    },
    /// Sight was lost of a submission.
    MarkUnknown,
}

impl SettlementStep {
    /// Returns the step that records an outcome, told by the facilitator whose [process](crate::facilitator::Facilitator::process_id)
    /// is `by`.
    pub fn of(outcome: &Outcome, by: u64) -> Self {
        match outcome.clone() {
            Outcome::Settled { transaction, block, fee } => Self::Settle { transaction, block, fee },
            Outcome::Failed { reason, dead: true, .. } => Self::Invalidate { reason },
            Outcome::Failed { reason, .. } => Self::Fail { reason, by },
            Outcome::Unknown { .. } => Self::MarkUnknown,
        }
    }
}

/// A step that the record's state does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a payment that is {fulfilment:?} and {settlement:?} cannot take this step")]
pub struct InvalidTransition {
    /// Where the work stands.
    pub fulfilment: Fulfilment,
    /// Where the money stands.
    pub settlement: Settlement,
}

impl Record {
    /// Takes a step of fulfilment, or refuses it and changes nothing.
    ///
    /// | step | from | to |
    /// |---|---|---|
    /// | `Admit` | `Reserved`, `Released` | unchanged, in flight |
    /// | `Start` | admitted or settled, `Reserved` or `Released` or `Working` (a dead owner's) | `Working` |
    /// | `Release` | `Reserved`, `Working` | `Released`, out of flight unless due |
    /// | `Produce` | `Working` | `Produced` |
    /// | `Defer` | `Produced` and due, not deferred before | unchanged, deferred, its lease ended |
    /// | `Deliver` | `Produced`, `Delivered` | `Delivered` |
    ///
    /// # Errors
    /// [`InvalidTransition`].
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
                self.body = BodyDigest::more(self.body, *body);
                self.fulfilment = Released;
                self.admitted &= self.settlement != Settlement::None;
            }
            (FulfilmentStep::Produce { body, at, .. }, Working) => {
                self.body = BodyDigest::more(self.body, *body);
                self.fulfilment = Produced;
                self.produced_at = Some(*at);
                if self.settlement == Settlement::None {
                    self.settlement = Settlement::Due;
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
    /// | `Settle` | anything but `Final` and `Dead` | `Settled` |
    /// | `Finalize` | `Settled`, `Final` | `Final` |
    /// | `Reorg` | `Settled` | `Due`, in flight again; its lease ended if the work is done |
    /// | `Claim` | `Due`, `Submitted`, `Unknown`, unless another process has it | unchanged |
    /// | `Delegate` | `Due`, `Submitted`, `Unknown`, unless another process has it or a failure is not known | `Unknown` |
    /// | `Fail` | `Due`; `Submitted`, `Unknown`, unless another process has it | `Due`, with one failure more |
    /// | `Invalidate` | anything unpaid | `Dead` |
    /// | `MarkUnknown` | `Due`, `Submitted`, `Unknown` | `Unknown` |
    ///
    /// # Errors
    /// [`InvalidTransition`].
    pub fn settle(&mut self, step: &SettlementStep, now: u64) -> Result<(), InvalidTransition> {
        use Settlement::*;
        match (step, self.settlement) {
            (SettlementStep::Submit { transaction }, Due | Submitted | Unknown) => {
                if !self.transactions.contains(transaction) {
                    self.transactions.push(*transaction);
                }
                self.settlement = Submitted;
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
                // Who settled it is gone, and the upkeep need not wait for it.
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
            (SettlementStep::Fail { reason, by }, Due | Submitted | Unknown)
                if self.settlement == Due || self.may_be_settled_by(*by, now) =>
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

    /// Takes [`SettlementStep::Submit`] on behalf of a submission.
    ///
    /// # Errors
    /// [`InvalidTransition`].
    pub fn submit(&mut self, submission: &Submission, now: u64) -> Result<(), InvalidTransition> {
        if !self.may_be_submitted(submission, now) {
            return Err(self.invalid());
        }
        self.settle(&SettlementStep::Submit { transaction: submission.hash }, now)?;
        self.settling = Some(Settling { by: submission.by, until: submission.until });
        Ok(())
    }

    fn invalid(&self) -> InvalidTransition {
        InvalidTransition { fulfilment: self.fulfilment, settlement: self.settlement }
    }
}
