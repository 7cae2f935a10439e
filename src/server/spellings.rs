//! In which words payers repeat an offer.

use std::sync::OnceLock;

use crate::{
    payment::Terms,
    protocol::{PaymentRequirements, Verbatim},
};

/// So many libraries write JSON in a way of their own.
const KNOWN: usize = 4;

/// Texts that were read and found to be the offer in other words. What a payer's library writes once it writes every time, and
/// comparing is a tenth of reading. The first few are kept: who sends others pays with a microsecond of ours, not with a lock.
#[derive(Clone, Debug, Default)]
pub(super) struct Spellings([OnceLock<Box<str>>; KNOWN]);

impl Spellings {
    /// As [`Terms::is_accepted_by`].
    pub(super) fn are_of(&self, terms: &Terms, accepted: &Verbatim<PaymentRequirements>) -> bool {
        let (text, own) = (accepted.text(), terms.text().text());
        if text == own || self.0.iter().map_while(OnceLock::get).any(|known| **known == *text) {
            return true;
        }
        let is_accepted = terms.is_accepted_by(accepted);
        // White space and fields that nobody asked for could make it as long as a header may be.
        if is_accepted && text.len() <= 2 * own.len() {
            for place in &self.0 {
                if place.set(text.into()).is_ok() {
                    break;
                }
            }
        }
        is_accepted
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, U256};

    use super::*;
    use crate::{
        network::Network,
        protocol::{ExactOffer, PaymentFlow},
    };

    fn terms(amount: u64) -> Terms {
        Terms::new(ExactOffer {
            asset: Network::BASE.usdc().unwrap(),
            amount: U256::from(amount),
            pay_to: Address::repeat_byte(7),
            max_timeout_seconds: 60,
            flow: PaymentFlow::Authorization,
        })
    }

    fn spelled(terms: &Terms, before: &str) -> Verbatim<PaymentRequirements> {
        let text = terms.text().text().replacen('{', &format!("{{{before}"), 1);
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_spelling_is_read_once_and_another_offer_is_never_taken_for_it() {
        let (terms, dearer, spellings) = (terms(1_000), terms(2_000), Spellings::default());
        for _ in 0..2 {
            assert!(spellings.are_of(&terms, terms.text()));
            assert!(spellings.are_of(&terms, &spelled(&terms, " ")));
            assert!(!spellings.are_of(&terms, dearer.text()));
            assert!(!spellings.are_of(&terms, &spelled(&dearer, " ")));
        }
        let known: Vec<_> = spellings.0.iter().filter_map(OnceLock::get).collect();
        assert_eq!(known, [spelled(&terms, " ").text()].map(Box::from).iter().collect::<Vec<_>>());
    }

    #[test]
    fn few_are_kept_and_none_that_is_long() {
        let (terms, spellings) = (terms(1_000), Spellings::default());
        assert!(spellings.are_of(&terms, &spelled(&terms, &" ".repeat(5_000))));
        assert!(spellings.0[0].get().is_none());
        for spaces in 1..=10 {
            assert!(spellings.are_of(&terms, &spelled(&terms, &" ".repeat(spaces))));
        }
        assert!(spellings.0.iter().all(|place| place.get().is_some()));
    }
}
