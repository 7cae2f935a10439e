//! What one transaction writes.

use std::sync::Arc;

use super::{
    super::{MemoryLedger, Record, Sender, StoredResponse, submission::Nonce},
    journal::Keys,
};
use crate::payment::PaymentKey;

/// Copies of what memory held at one time, `None` of what was gone.
pub(super) struct Batch {
    pub(super) payments: Vec<(PaymentKey, Option<Record>)>,
    pub(super) responses: Vec<(PaymentKey, Option<Arc<StoredResponse>>)>,
    pub(super) nonces: Vec<(Sender, u64, Option<Nonce>)>,
}

impl Batch {
    /// Nothing of it may be changed meanwhile.
    pub(super) fn of(keys: Keys, memory: &MemoryLedger) -> Self {
        let Keys { payments, responses, nonces } = keys;
        Self {
            payments: payments.into_iter().map(|key| (key, memory.snapshot(&key))).collect(),
            responses: responses.into_iter().map(|key| (key, memory.kept_response(&key))).collect(),
            nonces: nonces
                .into_iter()
                .map(|(sender, number)| (sender, number, memory.nonce(&sender, number)))
                .collect(),
        }
    }
}
