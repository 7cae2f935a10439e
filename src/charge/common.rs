//! What is the same of a payment whatever its scheme and transport: it is read here before its scheme begins, and told to its span.

use alloy_primitives::{B256, U256};
use tracing::{Span, field::display};

use super::{
    Refusal, Seller,
    extensions::{Echoed, Extensions, payment_id, written},
};
use crate::{ledger::Fingerprint, payment::PaymentKey};

/// The part of a payment's message that its scheme has no say in.
pub(crate) struct Common {
    /// Why the payment is refused if it is new: the payer returned an extension otherwise than it is declared. One that is on record is
    /// answered all the same (invariant I6).
    pub(crate) refusal: Option<Refusal>,
    pub(crate) identity: Identity,
}

/// What tells the request of a payment from others.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    /// The head of the request, with what the payer added to the seller's extensions.
    pub(crate) head: Fingerprint,
    /// The same with what the payer returned of extensions as it wrote that, whatever its seller declares now.
    pub(crate) written: Option<Fingerprint>,
    /// The digest of the payment identifier, if there is one.
    pub(crate) id: Option<B256>,
    /// The same, where payers are asked for identifiers: a new payment is recorded under no other.
    pub(crate) asked_id: Option<B256>,
}

impl Seller {
    /// Reads the extensions that a payment came with: what the payer returned of the seller's, and what is common to all payments.
    /// `fingerprint` is that of its request, with these additions.
    ///
    /// # Errors
    /// A [`Refusal`] if the payment identifier is malformed and payers are asked for one.
    pub(crate) fn read(
        &self,
        extensions: Extensions<'_>,
        fingerprint: impl Fn(Option<B256>) -> Fingerprint,
    ) -> Result<(Echoed, Common), Refusal> {
        let asks_for_ids = self.rules.payment_identifier;
        let id = payment_id(extensions, asks_for_ids)?;
        let (echoed, refusal) = self.declared.read(extensions);
        let identity = Identity {
            head: fingerprint(echoed.added()),
            written: written(extensions).map(|written| fingerprint(Some(written))),
            id,
            asked_id: id.filter(|_| asks_for_ids),
        };
        Ok((echoed, Common { refusal, identity }))
    }
}

/// Records in the span of the request whose payment it is, and the most that it costs. Its nonce may not be known yet.
pub(super) fn describe(PaymentKey { network, asset, payer, .. }: &PaymentKey, amount: U256) {
    let span = Span::current();
    if !span.is_disabled() {
        span.record("network", display(network)).record("asset", display(asset));
        span.record("payer", display(payer)).record("amount", display(amount));
    }
}

/// Records in the span what its payment is known by.
pub(super) fn identify(nonce: B256) {
    Span::current().record("nonce", display(nonce));
}

/// Records in the span which transaction moved money for it.
pub(super) fn moved(transaction: B256) {
    Span::current().record("transaction", display(transaction));
}
