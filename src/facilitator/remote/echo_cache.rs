//! The `resource` and `extensions` that payers returned of the 402, for payments that are being settled.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use crate::payment::{EchoedMetadata, PaymentKey, Prechecked};

/// How many payments are remembered. If there are more, any of them is forgotten.
const MAX_PAYMENTS: usize = 1_024;

/// The echo with which each payment was first sent to the facilitator, if it had one. A settlement is repeated with the identical body,
/// whoever asks for it.
#[derive(Debug, Default)]
pub(super) struct EchoCache(Mutex<HashMap<PaymentKey, Option<Arc<EchoedMetadata>>>>);

impl EchoCache {
    /// Returns the payment with the echo that it had first.
    pub(super) fn with_first(&self, payment: Prechecked) -> Prechecked {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = known.get(&payment.key()) {
            return payment.with_echoed(first.clone());
        }
        if known.len() >= MAX_PAYMENTS
            && let Some(any) = known.keys().next().copied()
        {
            known.remove(&any);
        }
        known.insert(payment.key(), payment.echoed().cloned());
        payment
    }

    /// Forgets a payment whose settlement has ended.
    pub(super) fn forget(&self, key: &PaymentKey) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}
