//! What the logs of a transaction prove.
//!
//! A receipt's status proves nothing about one payment: some tokens do not revert on a used nonce, and a transaction may do
//! many things. `AuthorizationUsed` alone proves nothing either: `receiveWithAuthorization` and transfers to others by the
//! same nonce emit it too. Paid means both events of the same execution.

use alloy_primitives::{Address, B256, U256};
use alloy_sol_types::SolEvent;

use super::{
    rpc::{Log, Receipt},
    transfer::Token,
};
use crate::{eip3009::Authorization, facilitator::Prechecked};

/// What must have moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) token: Address,
    pub(crate) payer: Address,
    pub(crate) payee: Address,
    pub(crate) value: U256,
    pub(crate) nonce: B256,
}

impl Expected {
    pub(crate) fn of(token: Address, authorization: &Authorization) -> Self {
        Self {
            token,
            payer: authorization.from,
            payee: authorization.to,
            value: authorization.value,
            nonce: authorization.nonce,
        }
    }

    pub(crate) fn of_payment(payment: &Prechecked) -> Self {
        Self::of(payment.terms().offer().asset.address, payment.authorization())
    }

    /// Whether this transaction executed the authorization to its end.
    ///
    /// EIP-3009's reference marks the nonce and then moves the tokens, so in a transaction that does many things only a
    /// `Transfer` right after `AuthorizationUsed` counts: an earlier or later transfer of the same amount may belong to
    /// something else. A transaction that calls the token itself does one thing, in whatever order.
    pub(crate) fn is_paid_by(&self, receipt: &Receipt) -> bool {
        if !receipt.succeeded() {
            return false;
        }
        let logs = &receipt.logs;
        if receipt.to == Some(self.token) {
            return logs.iter().any(|log| self.is_use(log)) && logs.iter().any(|log| self.is_transfer(log));
        }
        logs.windows(2).any(|pair| self.is_use(&pair[0]) && self.is_transfer(&pair[1]))
    }

    /// Whether this transaction cancelled the authorization. Nothing else that is done with a nonce releases what it may have moved.
    #[cfg(feature = "client")]
    pub(crate) fn is_cancelled_by(&self, receipt: &Receipt) -> bool {
        let signature = Token::AuthorizationCanceled::SIGNATURE_HASH;
        receipt.succeeded() && receipt.logs.iter().any(|log| self.is_done_to_nonce(signature, log))
    }

    /// How many authorizations of the token this transaction executed: so many payments share its cost.
    pub(crate) fn count_uses(&self, receipt: &Receipt) -> usize {
        let is_use = |log: &&Log| {
            log.address == self.token && log.topics.first() == Some(&Token::AuthorizationUsed::SIGNATURE_HASH)
        };
        receipt.logs.iter().filter(is_use).count()
    }

    fn is_use(&self, log: &Log) -> bool {
        self.is_done_to_nonce(Token::AuthorizationUsed::SIGNATURE_HASH, log)
    }

    fn is_done_to_nonce(&self, event: B256, log: &Log) -> bool {
        log.address == self.token && !log.removed && log.topics == [event, self.payer.into_word(), self.nonce]
    }

    fn is_transfer(&self, log: &Log) -> bool {
        log.address == self.token
            && !log.removed
            && log.topics == [Token::Transfer::SIGNATURE_HASH, self.payer.into_word(), self.payee.into_word()]
            && log.data.as_ref() == self.value.to_be_bytes::<32>()
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::U64;

    use super::*;

    const TOKEN: Address = Address::repeat_byte(0xaa);

    fn expected() -> Expected {
        Expected {
            token: TOKEN,
            payer: Address::repeat_byte(1),
            payee: Address::repeat_byte(2),
            value: U256::from(1_000),
            nonce: B256::repeat_byte(3),
        }
    }

    fn log(topics: Vec<B256>, data: Vec<u8>) -> Log {
        Log {
            address: TOKEN,
            topics,
            data: data.into(),
            block_number: None,
            block_hash: None,
            transaction_hash: None,
            removed: false,
        }
    }

    fn used() -> Log {
        let Expected { payer, nonce, .. } = expected();
        log(vec![Token::AuthorizationUsed::SIGNATURE_HASH, payer.into_word(), nonce], vec![])
    }

    #[cfg(feature = "client")]
    fn cancelled(nonce: B256) -> Log {
        log(vec![Token::AuthorizationCanceled::SIGNATURE_HASH, expected().payer.into_word(), nonce], vec![])
    }

    fn moved(to: Address, value: u64) -> Log {
        let topics = vec![Token::Transfer::SIGNATURE_HASH, expected().payer.into_word(), to.into_word()];
        log(topics, U256::from(value).to_be_bytes_vec())
    }

    fn receipt(to: Address, logs: Vec<Log>) -> Receipt {
        Receipt {
            transaction_hash: B256::ZERO,
            block_number: U64::from(1),
            status: U64::from(1),
            to: Some(to),
            gas_used: U64::ZERO,
            effective_gas_price: U256::ZERO,
            l1_fee: None,
            logs,
        }
    }

    #[test]
    fn paid_is_the_use_of_the_nonce_with_exactly_its_transfer() {
        let (payee, router) = (expected().payee, Address::repeat_byte(9));
        let paid = |to, logs| expected().is_paid_by(&receipt(to, logs));
        assert!(paid(TOKEN, vec![used(), moved(payee, 1_000)]));
        assert!(paid(TOKEN, vec![moved(payee, 1_000), used()]));
        assert!(paid(router, vec![moved(router, 5), used(), moved(payee, 1_000)]));
        // Somebody else's transfer of the same amount stands before it: the nonce itself paid another address.
        assert!(!paid(router, vec![moved(payee, 1_000), used(), moved(router, 1_000)]));
        assert!(!paid(TOKEN, vec![used(), moved(payee, 999)]));
        assert!(!paid(TOKEN, vec![used(), moved(router, 1_000)]));
        assert!(!paid(TOKEN, vec![used()]));
        assert!(!paid(TOKEN, vec![moved(payee, 1_000)]));
        let foreign = Log { address: router, ..moved(payee, 1_000) };
        assert!(!paid(TOKEN, vec![used(), foreign]));
        let mut reverted = receipt(TOKEN, vec![used(), moved(payee, 1_000)]);
        reverted.status = U64::ZERO;
        assert!(!expected().is_paid_by(&reverted));
    }

    #[test]
    #[cfg(feature = "client")]
    fn only_a_cancellation_releases_a_nonce_that_is_used() {
        let releases = |log| expected().is_cancelled_by(&receipt(TOKEN, vec![log]));
        let cancelled = || cancelled(expected().nonce);
        assert!(releases(cancelled()));
        assert!(!releases(used()), "a transfer that is not seen may have taken place");
        assert!(!releases(self::cancelled(B256::repeat_byte(4))));
        assert!(!releases(Log { address: Address::repeat_byte(9), ..cancelled() }));
        assert!(!releases(Log { removed: true, ..cancelled() }));
        let mut reverted = receipt(TOKEN, vec![cancelled()]);
        reverted.status = U64::ZERO;
        assert!(!expected().is_cancelled_by(&reverted));
    }
}
