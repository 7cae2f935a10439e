//! Settling through somebody else, and finding out what became of it.

use std::{sync::Arc, time::Duration};

use alloy_primitives::B256;
use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::{
    Remote,
    api::Silence,
    message::{Reply, body_for, pause_of, read_settlement},
    witness::{Fate, Witness},
};
use crate::{
    facilitator::FacilitatorError,
    ledger::{LedgerError, Record, Settlement, SettlementStep, Settling},
    payment::{Outcome, PaymentKey, Prechecked},
    protocol::Reason,
};

/// The pause before the same body is sent again, doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// How often a facilitator is asked within one call that answers nothing of use. One that says "pending" is asked for as long as
/// the call may take.
const MAX_TRIES: u32 = 4;
/// How many transactions that a facilitator named are written down for a payment.
const MAX_NAMED: usize = 8;
/// What other processes wait beyond the time that a call may take, in seconds.
const SLACK: u64 = 10;

/// How long a call may insist.
#[derive(Clone, Copy)]
pub(super) enum Insistence {
    /// Until the time for a settlement has passed.
    Settle,
    /// Asks once: somebody asks again soon.
    Once,
}

/// What the facilitator said in the end.
struct Heard {
    reply: Reply,
    /// The transactions that it named, the newest last.
    named: Vec<B256>,
    /// Whether a request may have had an effect that the reply does not tell of.
    is_uncertain: bool,
    /// Whether no request has left.
    is_unsent: bool,
    retry_after: Duration,
}

impl Remote {
    /// One settlement of one payment; no other is under way in this process.
    pub(super) async fn settle_alone(
        self: Arc<Self>,
        payment: Prechecked,
        insistence: Insistence,
    ) -> Result<Outcome, FacilitatorError> {
        let key = payment.key();
        let record = self.ledger.get(&key).await?.ok_or(LedgerError::NotFound)?;
        if let Some(outcome) = known(&record) {
            return Ok(outcome);
        }
        let until = self.clock.now().saturating_add(self.settle_timeout.as_secs()).saturating_add(SLACK);
        // From here on it is unknown what becomes of it, whoever dies (invariant I4 has no transaction to journal here).
        let settling = Settling { by: self.process, until };
        let entrust = SettlementStep::Delegate { settling, known_failures: payment.known_failures() };
        match self.ledger.settle(&key, &entrust).await {
            Ok(()) => {}
            // Another process asks just now, or was told no since this one was asked.
            Err(LedgerError::InvalidTransition(_)) => {
                let record = self.ledger.get(&key).await?.ok_or(LedgerError::NotFound)?;
                return Ok(record.outcome(&payment));
            }
            Err(error) => return Err(error.into()),
        }
        let payment = self.echoes.with_first(payment);
        let is_first = record.settlement == Settlement::Due && record.transactions.is_empty();
        let body = body_for(&payment)
            .map_err(|_| FacilitatorError::Misconfigured("a payment that cannot be written as JSON".into()))?;
        let heard = self.ask(&payment, &record, body, insistence).await;
        let heard = Heard { is_uncertain: heard.is_uncertain || !is_first, ..heard };
        let outcome = self.judge(&payment, &record, heard).await;
        if matches!(outcome, Ok(Outcome::Settled { .. } | Outcome::Failed { .. })) {
            self.echoes.forget(&key);
        }
        outcome
    }

    /// Sends the body until there is an answer, one request after the other.
    async fn ask(&self, payment: &Prechecked, record: &Record, body: Bytes, insistence: Insistence) -> Heard {
        let deadline = Instant::now() + self.settle_timeout;
        let mut heard = Heard {
            reply: Reply::None,
            named: Vec::new(),
            is_uncertain: false,
            is_unsent: true,
            retry_after: Duration::from_secs(1),
        };
        let (mut pause, mut tries) = (FIRST_PAUSE, 0);
        loop {
            let answer = self.api.post("settle", body.clone()).await;
            let mut asked_pause = None;
            heard.reply = match &answer {
                Ok(answer) => {
                    heard.is_unsent = false;
                    asked_pause = pause_of(answer);
                    read_settlement(answer, payment)
                }
                Err(Silence::NotSent) => Reply::None,
                Err(Silence::Lost) => {
                    heard.is_unsent = false;
                    Reply::None
                }
            };
            match &heard.reply {
                Reply::Paid(_) | Reply::Refused { .. } | Reply::Lie(_) => return heard,
                Reply::Pending(transaction) => {
                    heard.is_uncertain = true;
                    if let Some(transaction) = *transaction {
                        self.note(record, &mut heard.named, transaction).await;
                    }
                }
                Reply::None => {
                    heard.is_uncertain |= !heard.is_unsent;
                    tries += 1;
                    if let Ok(answer) = &answer {
                        tracing::warn!(status = %answer.status, "the facilitator's answer to a settlement is of no use");
                    }
                }
            }
            let wait = asked_pause.unwrap_or(pause);
            heard.retry_after = wait.max(Duration::from_secs(1));
            pause = (pause * 2).min(LONGEST_PAUSE);
            let is_over = matches!(insistence, Insistence::Once) || tries >= MAX_TRIES;
            if is_over || Instant::now() + wait >= deadline {
                return heard;
            }
            sleep(wait).await;
        }
    }

    /// What that means, as far as it can be told.
    async fn judge(&self, payment: &Prechecked, record: &Record, heard: Heard) -> Result<Outcome, FacilitatorError> {
        let Heard { reply, mut named, is_uncertain, is_unsent, retry_after } = heard;
        let key = &record.key;
        let witness = self.witness(key.network);
        if is_unsent && !is_uncertain {
            self.give_back(key).await;
            return Err(FacilitatorError::Unreachable { what: "the facilitator", retry_after });
        }
        let mut claimed = record.transactions.iter().rev().take(MAX_NAMED).copied().collect::<Vec<_>>();
        match reply {
            Reply::Paid(transaction) => {
                let Some(witness) = witness else {
                    return Ok(Outcome::Settled { transaction, block: None, fee: None });
                };
                match witness.paid_in(payment, transaction).await {
                    Ok(Some(block)) if record.block_seen.is_none_or(|seen| seen < block) => {
                        return Ok(Outcome::Settled { transaction, block: Some(block), fee: None });
                    }
                    Ok(_) => {
                        tracing::error!(%transaction, payer = %key.payer, nonce = %key.nonce,
                            "the facilitator says that a transaction paid which did not, or is not on the chain");
                    }
                    Err(error) => {
                        tracing::error!(%error, %transaction, payer = %key.payer, nonce = %key.nonce,
                            "a settlement could not be confirmed");
                    }
                }
                self.note(record, &mut named, transaction).await;
            }
            Reply::Lie(what) => {
                tracing::error!(payer = %key.payer, nonce = %key.nonce, "the facilitator tells of a settlement {what}");
            }
            Reply::Refused { reason, detail, transaction } if !is_uncertain => {
                let Some(witness) = witness else {
                    return Ok(Outcome::Failed { reason, detail, transaction, dead: false });
                };
                claimed.extend(transaction);
                match witness.fate(payment, record.block_seen, &claimed).await {
                    Ok(Fate::Open) => return Ok(Outcome::Failed { reason, detail, transaction, dead: false }),
                    Ok(fate) => return Ok(told(fate, transaction)),
                    Err(error) => tracing::warn!(%error, "a failure could not be confirmed"),
                }
            }
            Reply::Refused { transaction, .. } => {
                // What was asked before may be why it fails now.
                if let Some(transaction) = transaction {
                    named.push(transaction);
                }
            }
            Reply::Pending(_) | Reply::None => {}
        }
        claimed.extend(&named);
        let last = claimed.last().copied();
        match witness {
            None => Ok(Outcome::Unknown { transaction: last }),
            Some(witness) => Ok(match witness.fate(payment, record.block_seen, &claimed).await {
                Ok(fate) => told(fate, last),
                Err(_) => Outcome::Unknown { transaction: last },
            }),
        }
    }

    /// What became of a payment that was entrusted before: the chain first, where it can be asked, then the facilitator.
    pub(super) async fn look_again(self: &Arc<Self>, record: &Record) -> Result<Outcome, FacilitatorError> {
        if let Some(outcome) = known(record) {
            return Ok(outcome);
        }
        let payment = record.payment();
        if let Some(witness) = self.witness(record.key.network) {
            let fate = witness.fate(&payment, record.block_seen, &record.transactions).await;
            if let Ok(fate @ (Fate::Paid { .. } | Fate::Spent { .. })) = fate {
                return Ok(told(fate, None));
            }
        }
        self.settle(payment, Insistence::Once).await
    }

    pub(super) fn witness(&self, network: crate::Network) -> Option<&dyn Witness> {
        self.witnesses.iter().find(|(of, _)| *of == network).map(|(_, witness)| witness.as_ref())
    }

    /// Writes down a transaction that the facilitator names, so that it can be looked for later.
    async fn note(&self, record: &Record, named: &mut Vec<B256>, transaction: B256) {
        let is_known = record.transactions.contains(&transaction) || named.contains(&transaction);
        if is_known || record.transactions.len() + named.len() >= MAX_NAMED {
            return;
        }
        named.push(transaction);
        if let Err(error) = self.ledger.settle(&record.key, &SettlementStep::Submit { transaction }).await {
            tracing::warn!(%error, %transaction, "a transaction was not written down");
        }
    }

    /// Nothing has left: it is due as before.
    async fn give_back(&self, key: &PaymentKey) {
        let step = SettlementStep::Fail { reason: Reason::UnexpectedSettleError, by: self.process };
        if let Err(error) = self.ledger.settle(key, &step).await {
            tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a payment stays unknown although it was not sent");
        }
    }
}

/// What the ledger knows for sure.
fn known(record: &Record) -> Option<Outcome> {
    match record.settlement {
        Settlement::Settled { transaction, block } | Settlement::Final { transaction, block } => {
            Some(Outcome::Settled { transaction, block, fee: record.fee })
        }
        Settlement::Dead => Some(Outcome::Failed {
            reason: record.last_failure.clone().unwrap_or(Reason::InvalidTransactionState),
            detail: "this payment can never be settled".to_owned(),
            transaction: None,
            dead: true,
        }),
        _ => None,
    }
}

fn told(fate: Fate, claimed: Option<B256>) -> Outcome {
    match fate {
        Fate::Paid { transaction, block } => Outcome::Settled { transaction, block: Some(block), fee: None },
        Fate::Spent { reason, detail, transaction, for_good } => {
            Outcome::Failed { reason, detail, transaction, dead: for_good }
        }
        Fate::Open | Fate::Unclear => Outcome::Unknown { transaction: claimed },
    }
}
