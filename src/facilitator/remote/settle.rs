//! Settling through a remote facilitator, finding out what became of it, and doing so in the background.

use std::{sync::Arc, time::Duration};

use alloy_primitives::B256;
use bytes::Bytes;

use super::{
    Remote,
    api::NoAnswer,
    message::{Reply, body_for, read_settlement},
    observer::{ChainObserver, Fate},
};
use crate::{
    facilitator::FacilitatorError,
    ledger::{LedgerError, Listing, Pauses, Record, Settlement, SettlementStep, Settling},
    network::Network,
    payment::{Prechecked, SettlementOutcome},
    protocol::Reason,
    settlement::{
        journal::Journal,
        reconciler::{self, OPEN, Reconcile},
    },
};

/// The pause before the same body is sent again, doubled up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(3);
/// How many unusable answers end a call. An answer of "pending" is asked again for as long as the call may take.
pub(super) const MAX_TRIES: u32 = 4;
/// How many transactions that a facilitator named are recorded for a payment.
const MAX_NAMED: usize = 8;
/// How long other processes leave the payment alone, in seconds, beyond the time that a call may take.
const SETTLING_SLACK: u64 = 10;
/// The longest pause between two reconciliations of one payment, in seconds.
const LONGEST_PAUSE: u64 = 300;

/// Whether a request is repeated.
#[derive(Clone, Copy)]
pub(super) enum Repeat {
    /// Until the time for a settlement has passed.
    UntilTimeout,
    /// Never: reconciliation asks again soon.
    Never,
}

/// The facilitator's last answer to a settlement.
struct Asked {
    reply: Reply,
    /// The transactions that it named, the newest last.
    named: Vec<B256>,
    /// A request may have had an effect that the reply does not report.
    is_uncertain: bool,
    /// No request has left this process.
    is_unsent: bool,
    retry_after: Duration,
}

impl Remote {
    /// Settles one payment. No other settlement of it runs in this process.
    pub(super) async fn settle_exclusively(
        self: Arc<Self>,
        payment: Prechecked,
        repeat: Repeat,
    ) -> Result<SettlementOutcome, FacilitatorError> {
        let key = payment.key();
        let ledger = self.journal.ledger();
        let record = ledger.get(&key).await?.ok_or(LedgerError::NotFound)?;
        if let Some(outcome) = recorded_outcome(&record) {
            return Ok(outcome);
        }
        let until = self.journal.now().saturating_add(self.settle_timeout.as_secs()).saturating_add(SETTLING_SLACK);
        // From here on the outcome is unknown, even if this process dies (invariant I4 has no transaction to journal here).
        let settling = Settling { by: self.journal.process_id(), until };
        let delegate = SettlementStep::Delegate { settling, known_failures: payment.known_failures() };
        match ledger.advance(&key, &delegate.into()).await {
            Ok(_) => {}
            // Another process settles it, or recorded a failure since this settlement was asked for.
            Err(LedgerError::InvalidTransition(_)) => {
                let record = ledger.get(&key).await?.ok_or(LedgerError::NotFound)?;
                return Ok(record.outcome(&payment));
            }
            Err(error) => return Err(error.into()),
        }
        let payment = self.echoes.with_first(payment);
        let is_first = record.settlement == Settlement::Due && record.transactions.is_empty();
        let asked = self.ask(&payment, &record, body_for(&payment)?, repeat).await;
        let asked = Asked { is_uncertain: asked.is_uncertain || !is_first, ..asked };
        let outcome = self.conclude(&payment, &record, asked).await;
        if matches!(outcome, Ok(SettlementOutcome::Settled { .. } | SettlementOutcome::Failed { .. })) {
            self.echoes.forget(&key);
        }
        outcome
    }

    /// Returns the pauses between the requests of one call.
    pub(super) fn pauses(&self) -> Pauses {
        Pauses::new(FIRST_PAUSE, self.settle_timeout).up_to(MAX_PAUSE)
    }

    /// Sends the body until there is an answer, one request after the other.
    async fn ask(&self, payment: &Prechecked, record: &Record, body: Bytes, repeat: Repeat) -> Asked {
        let mut asked = Asked {
            reply: Reply::Unusable,
            named: Vec::new(),
            is_uncertain: false,
            is_unsent: true,
            retry_after: Duration::from_secs(1),
        };
        let (mut pauses, mut tries) = (self.pauses(), 0);
        loop {
            let answer = self.api.post("settle", body.clone()).await;
            asked.is_unsent &= matches!(answer, Err(NoAnswer::NotSent));
            asked.reply = match &answer {
                Ok(answer) => read_settlement(answer, payment, self.observer(record.key.network).is_none()),
                Err(NoAnswer::NotSent | NoAnswer::Lost) => Reply::Unusable,
            };
            match &asked.reply {
                Reply::Paid(_) | Reply::Refused { .. } | Reply::Mismatch(_) => return asked,
                Reply::Pending(transaction) => {
                    asked.is_uncertain = true;
                    if let Some(transaction) = *transaction {
                        self.record_named(record, &mut asked.named, transaction).await;
                    }
                }
                Reply::Unusable => {
                    asked.is_uncertain |= !asked.is_unsent;
                    tries += 1;
                    if let Ok(answer) = &answer {
                        tracing::warn!(status = %answer.status, "the facilitator's answer to a settlement cannot be used");
                    }
                }
            }
            let wait = answer.ok().and_then(|answer| answer.retry_after).unwrap_or(pauses.next());
            asked.retry_after = wait.max(Duration::from_secs(1));
            let is_over = matches!(repeat, Repeat::Never) || tries >= MAX_TRIES;
            if is_over || !pauses.wait_for(wait).await {
                return asked;
            }
        }
    }

    /// Returns the outcome that the answer, and the chain where it can be asked, prove.
    async fn conclude(
        &self,
        payment: &Prechecked,
        record: &Record,
        asked: Asked,
    ) -> Result<SettlementOutcome, FacilitatorError> {
        let Asked { reply, mut named, is_uncertain, is_unsent, retry_after } = asked;
        let key = &record.key;
        let observer = self.observer(key.network);
        if is_unsent && !is_uncertain {
            self.give_back(record).await;
            return Err(FacilitatorError::Unreachable { what: "the facilitator", retry_after });
        }
        let mut claimed = record.transactions.iter().rev().take(MAX_NAMED).copied().collect::<Vec<_>>();
        match reply {
            Reply::Paid(transaction) => {
                let Some(observer) = observer else {
                    return Ok(SettlementOutcome::Settled { transaction, block: None, fee: None });
                };
                match observer.paid_in(payment, transaction).await {
                    Ok(Some(block)) if record.block_seen.is_none_or(|seen| seen < block) => {
                        return Ok(SettlementOutcome::Settled { transaction, block: Some(block), fee: None });
                    }
                    Ok(_) => {
                        tracing::error!(%transaction, payer = %key.payer, nonce = %key.nonce,
                            "the facilitator reports a transaction that did not make the payment, or is not on the chain");
                    }
                    Err(error) => {
                        tracing::error!(%error, %transaction, payer = %key.payer, nonce = %key.nonce,
                            "a settlement could not be confirmed");
                    }
                }
                self.record_named(record, &mut named, transaction).await;
            }
            Reply::Mismatch(what) => {
                tracing::error!(payer = %key.payer, nonce = %key.nonce, "the facilitator reports a settlement {what}");
            }
            Reply::Refused { reason, detail, transaction } if !is_uncertain => {
                let Some(observer) = observer else {
                    return Ok(SettlementOutcome::Failed { reason, detail, transaction, dead: false });
                };
                claimed.extend(transaction);
                match observer.fate(payment, record.block_seen, &claimed).await {
                    Ok(Fate::Open) => {
                        return Ok(SettlementOutcome::Failed { reason, detail, transaction, dead: false });
                    }
                    Ok(fate) => return Ok(fate.outcome(transaction)),
                    Err(error) => tracing::warn!(%error, "a failure could not be confirmed"),
                }
            }
            // An earlier request may be the reason why it fails now.
            Reply::Refused { transaction, .. } => named.extend(transaction),
            Reply::Pending(_) | Reply::Unusable => {}
        }
        claimed.extend(&named);
        let last = claimed.last().copied();
        Ok(match observer {
            None => SettlementOutcome::Unknown { transaction: last },
            Some(observer) => match observer.fate(payment, record.block_seen, &claimed).await {
                Ok(fate) => fate.outcome(last),
                Err(_) => SettlementOutcome::Unknown { transaction: last },
            },
        })
    }

    /// Returns the outcome of a payment. Asks the chain first, where that is possible, then the facilitator, if it was asked before: it would
    /// settle a payment that nobody wants to be settled.
    pub(super) async fn reconcile(self: &Arc<Self>, record: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        if let Some(outcome) = recorded_outcome(record) {
            return Ok(outcome);
        }
        let payment = record.payment();
        let fate = match self.observer(record.key.network) {
            Some(observer) => Some(observer.fate(&payment, record.block_seen, &record.transactions).await),
            None => None,
        };
        let is_delegated = matches!(record.settlement, Settlement::Submitted | Settlement::Unknown);
        let transaction = record.transactions.last().copied();
        match fate.transpose() {
            Ok(Some(Fate::Known(outcome))) => Ok(outcome),
            _ if is_delegated => self.settle(payment, Repeat::Never).await,
            Ok(Some(Fate::Unclear)) => Ok(SettlementOutcome::Unknown { transaction }),
            Ok(Some(Fate::Open) | None) => {
                let (reason, detail) =
                    (Reason::InvalidTransactionState, "no transaction executed it so far".to_owned());
                Ok(SettlementOutcome::Failed { reason, detail, transaction, dead: false })
            }
            Err(error) => Err(error),
        }
    }

    pub(super) fn observer(&self, network: Network) -> Option<&ChainObserver> {
        self.observers.iter().find(|observer| observer.network() == network)
    }

    /// Records a transaction that the facilitator names, so that it can be looked up later.
    async fn record_named(&self, record: &Record, named: &mut Vec<B256>, transaction: B256) {
        let is_known = record.transactions.contains(&transaction) || named.contains(&transaction);
        if is_known || record.transactions.len() + named.len() >= MAX_NAMED {
            return;
        }
        named.push(transaction);
        let step = SettlementStep::Submit { transaction };
        if let Err(error) = self.journal.ledger().advance(&record.key, &step.into()).await {
            tracing::warn!(%error, %transaction, "a transaction was not recorded");
        }
    }

    /// Makes the payment due again, since no request has left this process.
    async fn give_back(&self, record: &Record) {
        let key = &record.key;
        let step = SettlementStep::Fail {
            reason: Reason::UnexpectedSettleError,
            by: self.journal.process_id(),
            known_transactions: record.transactions.clone(),
        };
        if let Err(error) = self.journal.ledger().advance(key, &step.into()).await {
            tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a payment stays unknown although it was not sent");
        }
    }
}

impl Reconcile for Remote {
    const CONCURRENCY: usize = 8;

    fn journal(&self) -> &Journal {
        &self.journal
    }

    fn serves(&self, network: Network) -> bool {
        if self.networks.is_empty() { self.supported.serves(network) } else { self.networks.contains(&network) }
    }

    async fn run_pass(self: &Arc<Self>) {
        if let Err(error) = reconciler::reconcile_listed(self, Listing::of(OPEN)).await {
            tracing::warn!(%error, "open payments could not be reconciled");
        }
        for observer in &self.observers {
            // Nothing is verified while its node refuses receipts.
            observer.recheck().await;
        }
    }

    async fn reconcile_payment(self: &Arc<Self>, record: Record) -> Result<(), FacilitatorError> {
        let is_due = record.settlement == Settlement::Due;
        if is_due && !self.journal.is_owed(&record).await? {
            return Ok(());
        }
        if !self.journal.claim(&record, LONGEST_PAUSE).await? {
            return Ok(());
        }
        let outcome =
            if is_due { self.settle(record.payment(), Repeat::Never).await? } else { self.reconcile(&record).await? };
        if matches!(outcome, SettlementOutcome::Unknown { .. }) {
            // The ledger has it as unknown already. Settling it took a claim of its own, shorter than this one.
            self.journal.claim(&record, LONGEST_PAUSE).await?;
            return Ok(());
        }
        let step = SettlementStep::of(&outcome, self.journal.process_id(), &record.transactions);
        Ok(self.journal.try_record(&record.key, step).await?)
    }

    async fn follow_settled(self: &Arc<Self>) {
        // A node that is down must not keep the chains of others from being followed.
        for observer in &self.observers {
            if let Err(error) = observer.follow_settled(self).await {
                tracing::warn!(%error, network = %observer.network(), "settled payments could not be followed");
            }
        }
    }
}

/// Returns the outcome if the ledger knows it for certain.
fn recorded_outcome(record: &Record) -> Option<SettlementOutcome> {
    match record.settlement {
        Settlement::Settled { transaction, block } | Settlement::Final { transaction, block } => {
            Some(SettlementOutcome::Settled { transaction, block, fee: record.fee })
        }
        Settlement::Dead => Some(SettlementOutcome::Failed {
            reason: record.last_failure.clone().unwrap_or(Reason::InvalidTransactionState),
            detail: "this payment can never be settled".to_owned(),
            transaction: None,
            dead: true,
        }),
        _ => None,
    }
}
