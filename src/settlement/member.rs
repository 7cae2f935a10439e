//! One payment on its way to the chain.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
};

use alloy_primitives::B256;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use crate::{
    chain::{batch, receipt_check::ExpectedTransfer},
    payment::{Outcome, PaymentKey, Prechecked, Verified},
    settlement::FacilitatorError,
    telemetry,
};

/// Who is told what became of a payment.
pub(super) type Answer = oneshot::Sender<Result<Outcome, FacilitatorError>>;

/// A payment with what settling it needs, and how far that came.
pub(super) struct Member {
    pub(super) payment: Prechecked,
    /// When it was looked at last, and what its transfer took.
    pub(super) verified: Verified,
    /// The block at which it was first seen unused by this call.
    pub(super) seen_unused: Option<u64>,
    /// It was in a batch that did not pay it: it is looked at again, and gets a transaction of its own.
    pub(super) left_behind: bool,
    /// How often it was signed for.
    pub(super) attempts: usize,
    /// Until when it waits for a transaction.
    pub(super) patience: Instant,
    /// Every transaction in the journal.
    pub(super) journalled: Vec<B256>,
    /// Those that cannot pay any more: no node took them, or they are in a block and did not.
    pub(super) spent: Vec<B256>,
    /// Where the outcome goes, at most once; without it, or when nobody waits any more, it goes to the ledger.
    answer: Option<Answer>,
    pub(super) span: tracing::Span,
    begun: Instant,
    active: ActiveGuard,
}

impl Member {
    pub(super) fn new(
        payment: Prechecked,
        verified: Verified,
        answer: Option<Answer>,
        patience: Instant,
        active: ActiveGuard,
    ) -> Self {
        let key = payment.key();
        Self {
            seen_unused: verified.funds.map(|funds| funds.block),
            span: tracing::info_span!(
                "settle", network = %key.network, payer = %key.payer, nonce = %key.nonce, transaction = tracing::field::Empty
            ),
            begun: Instant::now(),
            payment,
            verified,
            left_behind: false,
            attempts: 0,
            patience,
            journalled: Vec::new(),
            spent: Vec::new(),
            answer,
            active,
        }
    }

    pub(super) fn key(&self) -> &PaymentKey {
        &self.active.key
    }

    /// What must move.
    pub(super) fn expected(&self) -> ExpectedTransfer {
        ExpectedTransfer::of_payment(&self.payment)
    }

    /// Its place in a batch whose payments may use so much gas each, if it may share a transaction with others.
    pub(super) fn packed(&self, gas_cap: u32) -> Option<batch::Member> {
        let needs_more = self.verified.gas.is_some_and(|gas| batch::needed(gas) > u64::from(gas_cap));
        if self.left_behind || self.verified.contract_wallet || needs_more {
            return None;
        }
        batch::Member::of(&self.payment).ok()
    }

    /// Another transaction has the nonce of its own, which cannot pay any more. It is looked at again before it is signed for anew: should
    /// that other transaction have paid it, nothing is spent on it.
    pub(super) fn displaced(&mut self) {
        self.spent.clone_from(&self.journalled);
        self.verified.gas = None;
    }

    /// Tells whoever waits; the outcome comes back if nobody does.
    pub(super) fn answer(
        &mut self,
        outcome: Result<Outcome, FacilitatorError>,
    ) -> Option<Result<Outcome, FacilitatorError>> {
        self.report(&outcome);
        match self.answer.take() {
            Some(sender) => sender.send(outcome).err(),
            None => Some(outcome),
        }
    }

    fn report(&self, outcome: &Result<Outcome, FacilitatorError>) {
        let (result, transaction) = match outcome {
            Ok(Outcome::Settled { fee: Some(_), transaction, .. }) => ("settled", Some(*transaction)),
            Ok(Outcome::Settled { transaction, .. }) => ("credited", Some(*transaction)),
            Ok(Outcome::Failed { transaction, .. }) => ("failed", *transaction),
            Ok(Outcome::Unknown { transaction }) => ("unknown", *transaction),
            Err(_) => ("unavailable", None),
        };
        if let Some(transaction) = transaction {
            self.span.record("transaction", tracing::field::display(transaction));
        }
        telemetry::settled(self.key().network, result, self.begun.elapsed());
    }

    /// Whether somebody waits.
    pub(super) fn is_awaited(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| !answer.is_closed())
    }

    /// Whether nothing that was sent may still be executed.
    pub(super) fn is_clean(&self) -> bool {
        self.journalled.iter().all(|transaction| self.spent.contains(transaction))
    }

    pub(super) fn unknown(&self) -> Outcome {
        Outcome::Unknown { transaction: self.journalled.last().copied() }
    }
}

/// The failures that those who asked for these payments knew of.
pub(super) fn known_failures(members: &[Member]) -> BTreeMap<PaymentKey, u32> {
    let have_failed = members.iter().filter(|member| member.payment.known_failures() > 0);
    have_failed.map(|member| (*member.key(), member.payment.known_failures())).collect()
}

/// The payments that this process settles now.
#[derive(Clone, Debug, Default)]
pub(crate) struct Active(Arc<ActiveInner>);

#[derive(Debug, Default)]
struct ActiveInner {
    keys: Mutex<HashSet<PaymentKey>>,
    fewer: Notify,
}

/// One of them, for as long as it lives.
pub(super) struct ActiveGuard {
    active: Active,
    key: PaymentKey,
}

impl Active {
    /// `None` if it is being settled already.
    pub(super) fn enter(&self, key: PaymentKey) -> Option<ActiveGuard> {
        let is_new = self.keys().insert(key);
        is_new.then(|| telemetry::backlog(1));
        is_new.then(|| ActiveGuard { active: self.clone(), key })
    }

    pub(super) fn count(&self) -> usize {
        self.keys().len()
    }

    pub(super) fn contains(&self, key: &PaymentKey) -> bool {
        self.keys().contains(key)
    }

    /// Returns when there are none.
    pub(super) async fn none(&self) {
        loop {
            let fewer = self.0.fewer.notified();
            if self.count() == 0 {
                return;
            }
            fewer.await;
        }
    }

    fn keys(&self) -> std::sync::MutexGuard<'_, HashSet<PaymentKey>> {
        self.0.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ActiveGuard {
    fn drop(&mut self) {
        self.active.keys().remove(&self.key);
        telemetry::backlog(-1);
        self.active.0.fewer.notify_waiters();
    }
}
