//! Checking by the logs of a receipt that a transaction made a payment.
//!
//! A receipt's status proves nothing about one payment: some tokens do not revert on a used nonce, and a transaction may do
//! many things. `AuthorizationUsed` alone proves nothing either: `receiveWithAuthorization` and transfers to others with the
//! same nonce emit it too. A payment is made only if both events come from the same execution.

use alloy_primitives::{Address, B256, U256};
use alloy_sol_types::SolEvent;

use super::{
    batch_settler::BatchSettler,
    rpc::{Log, Receipt},
    transfer::Token,
};
use crate::{
    eip3009::Authorization,
    payment::Prechecked,
    permit2::{Permit, Proxy, SettleCall},
};

/// The events of an execution.
const EVENTS: [B256; 2] = [Token::AuthorizationUsed::SIGNATURE_HASH, Token::Transfer::SIGNATURE_HASH];

/// The transfer that a payment consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedTransfer {
    pub(crate) token: Address,
    pub(crate) payer: Address,
    pub(crate) payee: Address,
    pub(crate) value: U256,
    pub(crate) nonce: B256,
    /// The permit, if the nonce is that of one, and not of an EIP-3009 authorization.
    pub(crate) permit: Option<Permit>,
}

impl ExpectedTransfer {
    pub(crate) fn of(token: Address, authorization: &Authorization) -> Self {
        Self {
            token,
            payer: authorization.from,
            payee: authorization.to,
            value: authorization.value,
            nonce: authorization.nonce,
            permit: None,
        }
    }

    pub(crate) fn of_payment(payment: &Prechecked) -> Self {
        let terms = payment.terms();
        Self {
            value: payment.amount(),
            permit: terms.permit(),
            ..Self::of(terms.offer().asset.address, payment.authorization())
        }
    }

    /// Returns `true` if it is made by a permit.
    pub(crate) const fn is_by_permit(&self) -> bool {
        self.permit.is_some()
    }

    /// Returns `true` if this transaction executed the authorization and made the transfer. Of a permit that is proven only if the
    /// transaction is known to be one of ours: see [`Node::is_paid_by`](super::node::Node::is_paid_by) for those of others.
    ///
    /// EIP-3009's reference marks the nonce and then transfers the tokens. So in a transaction that does many things, only a
    /// `Transfer` right after `AuthorizationUsed` counts: an earlier or later transfer of the same amount may belong to
    /// something else. A transaction that calls the token itself makes one transfer, so there the order does not matter. In a batch, the
    /// first and last logs show which order the token has, and each transfer belongs to one payment.
    pub(crate) fn is_paid_by(&self, receipt: &Receipt) -> bool {
        if let Some(permit) = &self.permit {
            return self.is_permit_paid_by(permit, receipt);
        }
        if !receipt.succeeded() {
            return false;
        }
        let logs = &receipt.logs;
        if receipt.to == Some(self.token) {
            return logs.iter().any(|log| self.is_use(log)) && logs.iter().any(|log| self.is_transfer(log));
        }
        let [of_use, of_transfer] = if self.transfers_first(receipt) { [1, 0] } else { [0, 1] };
        logs.windows(2).any(|pair| self.is_use(&pair[of_use]) && self.is_transfer(&pair[of_transfer]))
    }

    /// Returns `true` if this call of the proxy moved the amount. Which permit it used, only its calldata says.
    fn is_permit_paid_by(&self, permit: &Permit, receipt: &Receipt) -> bool {
        let settled = [Proxy::Settled::SIGNATURE_HASH, Proxy::SettledWithPermit::SIGNATURE_HASH];
        let is_settled =
            |log: &Log| log.address == permit.spender && matches!(log.topics[..], [topic] if settled.contains(&topic));
        receipt.succeeded()
            && receipt.to == Some(permit.spender)
            && !self.value.is_zero()
            && receipt.logs.iter().any(|log| !log.removed && is_settled(log))
            && receipt.logs.iter().any(|log| self.is_transfer(log))
    }

    /// Returns the amount for which this call of the proxy settles the permit, or `None` if it settles another one.
    ///
    /// A nonce is one of its owner's, and anybody can call the proxy with a permit of its own, for a token of its own that makes any other
    /// transfer meanwhile. So all of the call is compared with the payment.
    pub(super) fn amount_settled_by(&self, call: &SettleCall) -> Option<U256> {
        let Self { payer: owner, payee, nonce, .. } = *self;
        let settles = SettleCall { permit: self.permit?, owner, payee, nonce, amount: call.amount };
        (*call == settles && !call.amount.is_zero()).then_some(call.amount)
    }

    /// Returns `true` if this is a batch in a token that transfers first and marks the nonce then.
    fn transfers_first(&self, receipt: &Receipt) -> bool {
        let event = |log: &Log| log.topics.first().filter(|_| log.address == self.token).copied();
        let is_either = |event: &B256| EVENTS.contains(event);
        let mut events = receipt.logs.iter().filter_map(event).filter(is_either);
        let ends = (events.next(), events.next_back());
        receipt.to == Some(BatchSettler::ADDRESS) && ends == (Some(EVENTS[1]), Some(EVENTS[0]))
    }

    /// Returns `true` if this transaction cancelled the authorization. No other use of the nonce proves that the payment was not made.
    #[cfg(feature = "client")]
    pub(crate) fn is_cancelled_by(&self, receipt: &Receipt) -> bool {
        let signature = Token::AuthorizationCanceled::SIGNATURE_HASH;
        receipt.succeeded() && receipt.logs.iter().any(|log| self.is_done_to_nonce(signature, log))
    }

    /// Returns how many authorizations of the token this transaction executed. So many payments share its cost.
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

    fn expected() -> ExpectedTransfer {
        ExpectedTransfer {
            token: TOKEN,
            payer: Address::repeat_byte(1),
            payee: Address::repeat_byte(2),
            value: U256::from(1_000),
            nonce: B256::repeat_byte(3),
            permit: None,
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
        let ExpectedTransfer { payer, nonce, .. } = expected();
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
            block_hash: B256::ZERO,
            status: U64::from(1),
            to: Some(to),
            gas_used: U64::ZERO,
            effective_gas_price: U256::ZERO,
            l1_fee: None,
            logs,
        }
    }

    #[test]
    fn paid_means_used_with_exactly_the_transfer() {
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
    fn transfer_in_a_batch_counts_for_one_payment() {
        let (payee, other) = (expected().payee, Address::repeat_byte(9));
        // Payments of one payer that differ in nothing but their nonce.
        let second = ExpectedTransfer { nonce: B256::repeat_byte(4), ..expected() };
        let used_by = |expected: ExpectedTransfer| {
            log(vec![Token::AuthorizationUsed::SIGNATURE_HASH, expected.payer.into_word(), expected.nonce], vec![])
        };
        let paid = |logs: Vec<Log>| {
            let receipt = receipt(BatchSettler::ADDRESS, logs);
            [expected(), second].map(|expected| expected.is_paid_by(&receipt))
        };
        let (first, then, moved_it) = (|| used_by(expected()), || used_by(second), || moved(payee, 1_000));
        assert_eq!(paid(vec![first(), moved_it(), then(), moved_it()]), [true, true]);
        assert_eq!(paid(vec![moved_it(), first(), moved_it(), then()]), [true, true]);
        // Marked and not moved, or moved elsewhere.
        assert_eq!(paid(vec![first(), moved_it(), then()]), [true, false]);
        assert_eq!(paid(vec![first(), then(), moved_it()]), [false, true]);
        assert_eq!(paid(vec![moved_it(), first(), then()]), [true, false]);
        assert_eq!(paid(vec![moved_it(), first(), moved(other, 1_000), then()]), [true, false]);
        assert_eq!(paid(vec![moved(other, 1_000), first(), moved_it(), then()]), [false, true]);
        // Logs of other contracts tell nothing of the token's order.
        let foreign = || Log { address: other, ..moved_it() };
        assert_eq!(paid(vec![foreign(), first(), moved_it(), then(), moved_it(), foreign()]), [true, true]);
        let elsewhere = receipt(other, vec![moved_it(), first()]);
        assert!(!expected().is_paid_by(&elsewhere), "it may have done other things");
    }

    #[test]
    #[cfg(feature = "client")]
    fn only_a_cancellation_counts_as_cancelled() {
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
