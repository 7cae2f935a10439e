//! An offer with all that follows from it, computed once.

use alloy_primitives::{B256, keccak256};

use crate::{
    eip3009::TokenDomain,
    protocol::{ExactOffer, PaymentRequirements, Verbatim},
};

/// The terms of a sale: an offer, its text on the wire, its digest and the token's EIP-712 domain.
///
/// ```
/// # use tower_x402::{Network, Usdc, payment::Terms, protocol::{ExactOffer, PaymentFlow}};
/// let terms = Terms::new(ExactOffer {
///     asset: Network::BASE.usdc().expect("known"),
///     amount: Usdc::from_atomic(1_000).into(),
///     pay_to: alloy_primitives::address!("70997970C51812dc3A010C7d01b50e0d17dc79C8"),
///     max_timeout_seconds: 120,
///     flow: PaymentFlow::Authorization,
/// });
/// assert!(terms.text().text().contains("\"amount\":\"1000\""));
/// ```
#[derive(Clone, Debug)]
pub struct Terms {
    offer: ExactOffer,
    text: Verbatim<PaymentRequirements>,
    digest: B256,
    domain: TokenDomain,
}

impl Terms {
    /// The terms of an offer.
    pub fn new(offer: ExactOffer) -> Self {
        let text = Verbatim::of_requirements(&offer.to_requirements());
        Self { digest: keccak256(text.text()), domain: TokenDomain::of(&offer.asset), text, offer }
    }

    /// The offer.
    pub const fn offer(&self) -> &ExactOffer {
        &self.offer
    }

    /// The offer as it is sent.
    pub const fn text(&self) -> &Verbatim<PaymentRequirements> {
        &self.text
    }

    /// Keccak-256 of that text.
    pub const fn digest(&self) -> B256 {
        self.digest
    }

    /// The token's EIP-712 domain.
    pub const fn domain(&self) -> &TokenDomain {
        &self.domain
    }

    /// Whether what a payer says it accepted is this offer: the same text, or the same fields with at least the offered
    /// `extra`. Addresses compare without case.
    pub fn is_accepted_by(&self, accepted: &Verbatim<PaymentRequirements>) -> bool {
        if accepted.text() == self.text.text() {
            return true;
        }
        let (Ok(accepted), Ok(offered)) = (accepted.read(), self.text.read()) else { return false };
        accepted.scheme == offered.scheme
            && accepted.network == offered.network
            && accepted.amount == offered.amount
            && accepted.asset.eq_ignore_ascii_case(&offered.asset)
            && accepted.pay_to.eq_ignore_ascii_case(&offered.pay_to)
            && accepted.max_timeout_seconds == offered.max_timeout_seconds
            && offered.extra.iter().all(|(name, value)| accepted.extra.get(name) == Some(value))
            // A flow that was not offered must not be smuggled in beside the offered fields.
            && accepted.extra.get("paymentFlow") == offered.extra.get("paymentFlow")
    }
}
