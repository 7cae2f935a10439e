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

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, B256, U256};

    use super::*;
    use crate::{
        eip3009::{Authorization, PaymentSignature},
        network::Network,
        payment::Terms,
        protocol::{ExactOffer, ExactPayload, ResourceInfo, Verbatim},
    };

    /// Returns a payment whose payer says that it pays for this resource.
    fn payment(number: usize, url: &str) -> Prechecked {
        let offer = ExactOffer::new(Network::BASE.usdc().unwrap(), U256::from(10), Address::repeat_byte(2), 60);
        let authorization = Authorization {
            from: Address::repeat_byte(1),
            to: offer.pay_to,
            value: offer.amount,
            valid_after: U256::ZERO,
            valid_before: U256::from(60),
            nonce: B256::from(U256::from(number)),
        };
        let payload = ExactPayload::new(PaymentSignature::from(vec![1; 65]), authorization);
        let resource = ResourceInfo { url: url.into(), ..ResourceInfo::default() };
        let echo = EchoedMetadata::new(Verbatim::of(&resource).ok(), None);
        Prechecked::restored(Arc::new(Terms::new(offer)), payload, 0, None).with_echoed(echo.map(Arc::new))
    }

    #[test]
    fn payment_keeps_its_first_echo_and_the_number_of_payments_is_bounded() {
        let cache = EchoCache::default();
        let last = MAX_PAYMENTS + 9;
        for number in 0..=last {
            cache.with_first(payment(number, "a"));
        }
        assert_eq!(cache.0.lock().unwrap().len(), MAX_PAYMENTS);
        // Nothing came after it that it could have been forgotten for.
        let (first, other) = (payment(last, "a"), payment(last, "b"));
        assert_eq!(cache.with_first(other.clone()).echoed(), first.echoed());
        cache.forget(&first.key());
        assert_eq!(cache.with_first(other.clone()).echoed(), other.echoed());
    }
}
