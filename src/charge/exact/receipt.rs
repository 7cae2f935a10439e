//! What a payer is told of its payment by `exact`: a settlement as the protocol has it.

use std::{future::Future, sync::Arc};

use alloy_primitives::{B256, hex};

use super::request::ExactRequest;
use crate::{
    charge::{Refusal, Unfinished, Why, detached},
    facilitator::Facilitator,
    ledger::{LedgerError, Record},
    payment::PaymentKey,
    protocol::{Reason, SettlementResponse, Verbatim, payment_status},
};

impl ExactRequest {
    /// Returns how the payment for a response was or will be settled; `None` if it is not.
    pub(super) fn receipt(&self, record: &Record) -> Option<SettlementResponse> {
        match record.settlement.paid_by() {
            Some(paid_by) => Some(settled(record, &self.payer, paid_by)),
            None => settled_later(record, &self.payer, self.seller.rules.status_url.as_deref()),
        }
    }

    /// The payment was not settled.
    pub(super) fn not_settled(
        &self,
        record: &Record,
        reason: Reason,
        detail: &str,
        transaction: Option<B256>,
    ) -> Refusal {
        let receipt = not_settled(record, &self.payer, reason.clone(), transaction);
        Refusal::rejected(reason, detail).with_receipt(Some(receipt))
    }

    /// It is not known whether the payment was settled.
    pub(super) fn pending(&self, record: &Record, transaction: Option<B256>) -> Refusal {
        let transaction = transaction.or_else(|| record.transactions.last().copied());
        let receipt = not_settled(record, &self.payer, Reason::SettlementPending, transaction);
        Refusal::new(Why::Pending).with_transaction(transaction).with_receipt(Some(receipt))
    }

    /// The work was begun and failed. A payer that paid for it before is told so: to pay anew would be to pay twice.
    pub(super) fn unfinished(&self, why: Unfinished, record: &Record) -> Refusal {
        match record.settlement.paid_by() {
            Some(paid_by) => paid_but(why, record, paid_by, &self.payer),
            None => why.into(),
        }
    }

    /// The ledger did not take a step of work that was verified, and paid for if the flow is so. Unless the payment `is_given_back`, the
    /// ledger may have taken the step all the same, and have what was produced charged for.
    pub(super) fn unrecorded(&self, error: LedgerError, record: &Record, is_given_back: bool) -> Refusal {
        let refusal = Refusal::from(error);
        if !matches!(refusal.why(), Why::Busy | Why::Unrecorded) {
            return refusal;
        }
        match record.settlement.paid_by() {
            Some(paid_by) => paid_but(Why::Unrecorded, record, paid_by, &self.payer),
            None if is_given_back => refusal,
            None => self.pending(record, None),
        }
    }
}

/// Something failed of which the payer has paid already.
pub(super) fn paid_but(why: impl Into<Refusal>, record: &Record, paid_by: B256, payer: &str) -> Refusal {
    let receipt = settled(record, payer, paid_by);
    why.into().with_transaction(Some(paid_by)).with_receipt(Some(receipt))
}

/// Returns a settlement as the payer is told of it.
fn settled(record: &Record, payer: &str, paid_by: B256) -> SettlementResponse {
    let amount = record.amount();
    // There is no transaction for a charge of nothing.
    let transaction = if amount.is_zero() { String::new() } else { hex::encode_prefixed(paid_by) };
    let settled = SettlementResponse::settled(transaction, record.terms.offer().network().to_string());
    SettlementResponse { payer: Some(payer.to_owned()), amount: Some(amount.to_string()), ..settled }
}

/// Returns a settlement that did not happen, or is not known to have happened.
fn not_settled(record: &Record, payer: &str, reason: Reason, transaction: Option<B256>) -> SettlementResponse {
    let transaction = transaction.map_or(String::new(), hex::encode_prefixed);
    let failed = SettlementResponse::failed(reason, record.terms.offer().network().to_string());
    SettlementResponse { payer: Some(payer.to_owned()), transaction, ..failed }
}

/// Returns what the payer is told of a payment that is settled after it has its response: success without a transaction, and the
/// payment's name. Returns `None` where it owes nothing yet.
fn settled_later(record: &Record, payer: &str, status_url: Option<&str>) -> Option<SettlementResponse> {
    let PaymentKey { network, asset, payer: from, nonce } = record.key;
    let pending = || payment_status::pending(network, asset, from, nonce, status_url);
    let extensions = record.deferred.then(|| Verbatim::of(&pending()).ok())?;
    Some(SettlementResponse { transaction: String::new(), extensions, ..settled(record, payer, B256::ZERO) })
}

/// A payment that is worked on, for what is said of it if the work panics.
pub(super) struct Known {
    facilitator: Arc<dyn Facilitator>,
    key: PaymentKey,
    payer: String,
}

impl Known {
    pub(super) fn of(request: &ExactRequest) -> Self {
        let ExactRequest { facilitator, key, payer, .. } = request;
        Self { facilitator: facilitator.clone(), key: *key, payer: payer.clone() }
    }

    /// Runs work in a task of its own.
    pub(super) async fn run<T: Send + 'static>(
        self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Refusal> {
        match detached(work).await {
            Some(done) => Ok(done),
            None => Err(self.panicked().await),
        }
    }

    /// A payer that paid before is told so: to pay anew would be to pay twice.
    pub(super) async fn panicked(self) -> Refusal {
        // Without the ledger there is less to say, and nothing else to do.
        let record = self.facilitator.ledger().get(&self.key).await.ok().flatten();
        match record.and_then(|record| record.settlement.paid_by().map(|paid_by| (record, paid_by))) {
            Some((record, paid_by)) => paid_but(Unfinished::Panicked, &record, paid_by, &self.payer),
            None => Unfinished::Panicked.into(),
        }
    }
}
