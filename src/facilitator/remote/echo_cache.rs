//! The `resource` and `extensions` that payers returned of the 402, for payments that are being settled.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use crate::payment::{EchoedMetadata, PaymentKey, Prechecked};

/// How many payments are remembered, and how many bytes of their echoes. The oldest are forgotten first.
const MAX_PAYMENTS: usize = 4_096;
const MAX_BYTES: usize = 8 << 20;

/// The echo with which each payment was first sent to the facilitator, if it had one. A settlement is repeated with the identical body,
/// whoever asks for it.
#[derive(Debug, Default)]
pub(super) struct EchoCache(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_age: BTreeMap<u64, (PaymentKey, Option<Arc<EchoedMetadata>>)>,
    ages: HashMap<PaymentKey, u64>,
    next: u64,
    bytes: usize,
}

impl EchoCache {
    /// Returns the payment with the echo that it had first.
    pub(super) fn with_first(&self, payment: Prechecked) -> Prechecked {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = payment.key();
        let first = known.ages.get(&key).and_then(|age| known.by_age.get(age)).map(|(_, echo)| echo.clone());
        match first {
            Some(first) => payment.with_echoed(first),
            None => {
                known.insert(key, payment.echoed().cloned());
                payment
            }
        }
    }

    /// Forgets a payment whose settlement has ended.
    pub(super) fn forget(&self, key: &PaymentKey) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

impl Known {
    fn insert(&mut self, key: PaymentKey, echo: Option<Arc<EchoedMetadata>>) {
        self.bytes += size(echo.as_deref());
        self.by_age.insert(self.next, (key, echo));
        self.ages.insert(key, self.next);
        self.next += 1;
        while (self.ages.len() > MAX_PAYMENTS || self.bytes > MAX_BYTES)
            && let Some((_, (oldest, echo))) = self.by_age.pop_first()
        {
            self.ages.remove(&oldest);
            self.bytes -= size(echo.as_deref());
        }
    }

    fn remove(&mut self, key: &PaymentKey) {
        if let Some((_, echo)) = self.ages.remove(key).and_then(|age| self.by_age.remove(&age)) {
            self.bytes -= size(echo.as_deref());
        }
    }
}

fn size(echo: Option<&EchoedMetadata>) -> usize {
    echo.map_or(0, EchoedMetadata::size)
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, B256, U256};

    use super::*;
    use crate::{
        network::Network,
        protocol::{ResourceInfo, Verbatim},
    };

    fn key(number: u64) -> PaymentKey {
        let nonce = B256::from(U256::from(number));
        PaymentKey { network: Network::BASE, asset: Address::ZERO, payer: Address::ZERO, nonce }
    }

    #[test]
    fn cache_is_bounded_in_number_and_size() {
        let mut known = Known::default();
        for number in 0..MAX_PAYMENTS as u64 + 10 {
            known.insert(key(number), None);
        }
        assert_eq!((known.ages.len(), known.by_age.len()), (MAX_PAYMENTS, MAX_PAYMENTS));
        assert!(!known.ages.contains_key(&key(9)) && known.ages.contains_key(&key(10)), "the oldest is forgotten");

        let resource = ResourceInfo { url: "u".repeat(16_000), ..ResourceInfo::default() };
        let echo = EchoedMetadata::new(Verbatim::of(&resource).ok(), None).map(Arc::new);
        for number in 0..2 * (MAX_BYTES / 16_000) as u64 {
            known.insert(key(1_000_000 + number), echo.clone());
            assert!(known.bytes <= MAX_BYTES);
        }
        let keys: Vec<_> = known.ages.keys().copied().collect();
        keys.iter().for_each(|key| known.remove(key));
        assert_eq!((known.bytes, known.by_age.len()), (0, 0));
    }
}
