//! Payments: the offer that a payer accepted, the authorization that it signed, and the checks that need no I/O.
//!
//! [`Terms`] hold an offer with its text and its EIP-712 domain. [`precheck`] checks a payment against them and returns a
//! [`Prechecked`] payment; a facilitator verifies and settles nothing else. A ledger restores one from its record. A
//! [`PaymentKey`] identifies a payment, and a [`SettlementOutcome`] is the result of settling it.

mod precheck;

use std::hash::{Hash, Hasher};

use alloy_primitives::{Address, B256, U256};
use serde_json::{Map, Value};

use crate::{
    eip3009::{Authorization, TokenDomain},
    network::Network,
    permit2::Permit,
    protocol::{ExactOffer, PaymentRequirements, Reason, ResourceInfo, Verbatim},
};

pub use precheck::{Authenticity, Prechecked, Rejection, Window, precheck};

/// The identity of a payment: network, payer, the nonce of what was signed, and the contract that keeps used nonces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PaymentKey {
    /// The chain.
    pub network: Network,
    /// The token. Of a permit it is [`PERMIT2`](crate::permit2::PERMIT2), whose nonces are one set for all tokens.
    pub asset: Address,
    /// The payer.
    pub payer: Address,
    /// The authorization's nonce.
    pub nonce: B256,
}

impl PaymentKey {
    /// Returns the key of a payment by this authorization under `terms`.
    pub fn of(terms: &Terms, authorization: &Authorization) -> Self {
        let (network, asset) = (terms.offer().network(), terms.offer().nonce_keeper());
        Self { network, asset, payer: authorization.from, nonce: authorization.nonce }
    }

    /// Returns the key as bytes, which are in the order of keys: a database can keep it in one column.
    ///
    /// ```
    /// # use tower_x402::{Network, payment::PaymentKey};
    /// # use alloy_primitives::{Address, B256};
    /// let key = PaymentKey { network: Network::BASE, asset: Address::ZERO, payer: Address::ZERO, nonce: B256::ZERO };
    /// assert_eq!(PaymentKey::from_bytes(&key.to_bytes()), Some(key));
    /// ```
    pub fn to_bytes(&self) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[..8].copy_from_slice(&self.network.chain_id().to_be_bytes());
        bytes[8..28].copy_from_slice(self.asset.as_slice());
        bytes[28..48].copy_from_slice(self.payer.as_slice());
        bytes[48..].copy_from_slice(self.nonce.as_slice());
        bytes
    }

    /// Restores a key from what [`to_bytes`](Self::to_bytes) returned, or returns `None` if the bytes are something else.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (chain_id, rest) = bytes.split_first_chunk()?;
        let (asset, rest) = rest.split_first_chunk::<20>()?;
        let (payer, rest) = rest.split_first_chunk::<20>()?;
        let nonce = <[u8; 32]>::try_from(rest).ok()?;
        Some(Self {
            network: Network::eip155(u64::from_be_bytes(*chain_id)),
            asset: asset.into(),
            payer: payer.into(),
            nonce: nonce.into(),
        })
    }
}

impl Hash for PaymentKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Payer and nonce tell nearly all payments apart, and one piece hashes faster than four.
        let mut bytes = [0; 52];
        bytes[..32].copy_from_slice(self.nonce.as_slice());
        bytes[32..].copy_from_slice(self.payer.as_slice());
        state.write(&bytes);
    }
}

/// The terms of a payment: an offer with its JSON and the EIP-712 domain of what is signed, each computed once.
///
/// ```
/// # use tower_x402::{Network, Usdc, payment::Terms, protocol::ExactOffer};
/// let usdc = Network::BASE.usdc().expect("known");
/// let pay_to = alloy_primitives::address!("70997970C51812dc3A010C7d01b50e0d17dc79C8");
/// let terms = Terms::new(ExactOffer::new(usdc, Usdc::from_atomic(1_000).into(), pay_to, 120));
/// assert!(terms.text().text().contains("\"amount\":\"1000\""));
/// ```
#[derive(Clone, Debug)]
pub struct Terms {
    offer: ExactOffer,
    text: Verbatim<PaymentRequirements>,
    domain: TokenDomain,
}

impl Terms {
    /// Creates the terms of an offer.
    pub fn new(offer: ExactOffer) -> Self {
        let text = Verbatim::of_requirements(&offer.to_requirements());
        let domain = match offer.permit() {
            None => TokenDomain::of(&offer.asset),
            Some(_) => Permit::domain(offer.network()),
        };
        Self { domain, text, offer }
    }

    /// Returns the offer.
    pub const fn offer(&self) -> &ExactOffer {
        &self.offer
    }

    /// Returns the offer's JSON, as it is sent.
    pub const fn text(&self) -> &Verbatim<PaymentRequirements> {
        &self.text
    }

    /// Returns the EIP-712 domain of what is signed: the token's, or of a permit that of Permit2.
    pub const fn domain(&self) -> &TokenDomain {
        &self.domain
    }

    /// Returns the fields of a permit that follow from the offer, if it is paid by one.
    pub const fn permit(&self) -> Option<Permit> {
        self.offer.permit()
    }

    /// Computes the EIP-712 hash that the payer signs.
    pub fn signing_hash(&self, authorization: &Authorization) -> B256 {
        match self.permit() {
            None => authorization.signing_hash(&self.domain),
            Some(permit) => permit.signing_hash(authorization, &self.domain),
        }
    }

    /// Returns `true` if what was signed can not be executed any more in a block at this time, in Unix seconds.
    pub(crate) fn is_over(&self, authorization: &Authorization, time: u64) -> bool {
        match self.permit() {
            None => authorization.valid_before <= U256::from(time),
            // Valid up to and including its deadline.
            Some(_) => authorization.valid_before < U256::from(time),
        }
    }

    /// Returns `true` if what was signed can not be executed yet in a block at this time, in Unix seconds.
    pub(crate) fn is_early(&self, authorization: &Authorization, time: u64) -> bool {
        match self.permit() {
            None => authorization.valid_after >= U256::from(time),
            Some(_) => authorization.valid_after > U256::from(time),
        }
    }

    /// Returns the code with which a payment under these terms is refused for this reason.
    ///
    /// ```
    /// # use tower_x402::{payment::Terms, protocol::Reason};
    /// # fn example(terms: &Terms) -> Reason {
    /// // Permits have codes of their own for some of what is refused.
    /// terms.reason(Reason::InsufficientFunds)
    /// # }
    /// ```
    pub fn reason(&self, reason: Reason) -> Reason {
        self.offer.method.reason(&reason)
    }

    /// Returns the rejection with that code.
    pub(crate) fn rejection(&self, Rejection { reason, detail }: Rejection) -> Rejection {
        Rejection { reason: self.reason(reason), detail }
    }

    /// Returns `true` if the offer that a payer says it accepted is this one: the same text, or the same fields with at least the
    /// offered `extra`. Addresses compare without case.
    pub fn is_accepted_by(&self, accepted: &Verbatim<PaymentRequirements>) -> bool {
        if accepted.text() == self.text.text() {
            return true;
        }
        let (Ok(accepted), Ok(offered)) = (accepted.read(), self.text.read()) else { return false };
        offered.is_accepted_as(&accepted)
    }
}

/// The largest [`EchoedMetadata`] that is passed on, in bytes of JSON. An ordinary payment has less than 4 KB.
pub const MAX_ECHOED_BYTES: usize = 16 * 1024;

/// The fields of a 402 that a payer echoed besides the offer (`resource` and `extensions` of a payment in x402 v2), byte for byte.
///
/// They do not affect the payment and are not kept in the ledger. A remote facilitator gets them with the payment, because some
/// extensions are meant for it: one that catalogues resources learns from them what was paid for.
#[derive(Clone, Debug, PartialEq)]
pub struct EchoedMetadata {
    resource: Option<Verbatim<ResourceInfo>>,
    extensions: Option<Verbatim<Map<String, Value>>>,
}

impl EchoedMetadata {
    /// Returns the echoed fields; `None` if there are none, or more than [`MAX_ECHOED_BYTES`].
    pub fn new(
        resource: Option<Verbatim<ResourceInfo>>,
        extensions: Option<Verbatim<Map<String, Value>>>,
    ) -> Option<Self> {
        let echoed = Self { resource, extensions };
        (1..=MAX_ECHOED_BYTES).contains(&echoed.size()).then_some(echoed)
    }

    /// Returns the resource that the payer says it pays for.
    pub const fn resource(&self) -> Option<&Verbatim<ResourceInfo>> {
        self.resource.as_ref()
    }

    /// Returns the extensions that the payer echoed or added.
    pub const fn extensions(&self) -> Option<&Verbatim<Map<String, Value>>> {
        self.extensions.as_ref()
    }

    /// Returns the size in bytes of JSON.
    pub fn size(&self) -> usize {
        let resource = self.resource.as_ref().map_or(0, |resource| resource.text().len());
        resource + self.extensions.as_ref().map_or(0, |extensions| extensions.text().len())
    }
}

/// The result of verifying a payment, good for a few seconds.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Verified {
    /// The payer's balance, if the ledger has to compare it with the payments in flight.
    pub funds: Option<Funds>,
    /// The gas that the transfer took in simulation.
    pub gas: Option<u64>,
    /// When, in Unix seconds.
    pub at: u64,
    /// `true` if the payer has code, which checks the signature and runs when the payment is settled. Such a payment gets a
    /// transaction of its own.
    pub contract_wallet: bool,
}

/// The payer's balance at a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Funds {
    /// The balance, in atomic units.
    pub balance: U256,
    /// The block at which it was read.
    pub block: u64,
}

/// The result of settling a payment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettlementOutcome {
    /// The payee was paid.
    Settled {
        /// The transaction that paid.
        transaction: B256,
        /// Its block, if known.
        block: Option<u64>,
        /// The payment's share of the transaction fee, in wei, if the facilitator paid it and reports it.
        fee: Option<U256>,
    },
    /// The authorization was not executed.
    Failed {
        /// Why.
        reason: Reason,
        /// Why, for people.
        detail: String,
        /// The transaction that was included and did not pay, if there is one.
        transaction: Option<B256>,
        /// Whether it is proven that the authorization can never be executed. Otherwise it may still be.
        dead: bool,
    },
    /// The outcome is not known yet. Never treat it as failed.
    Unknown {
        /// The transaction that may pay, if there is one.
        transaction: Option<B256>,
    },
}

#[cfg(feature = "onchain")]
impl SettlementOutcome {
    /// Returns the outcome of a payment whose authorization is unused in a final block after `valid_before`.
    pub(crate) fn expired(valid_before: U256, transaction: Option<B256>) -> Self {
        let detail = format!("unused when validBefore, {valid_before}, passed");
        Self::Failed { reason: Reason::ValidBefore, detail, transaction, dead: true }
    }

    /// Returns the outcome of a payment whose authorization this transaction, if it is known, cancelled or used for something else; `dead` if
    /// that is final.
    pub(crate) fn used_otherwise(transaction: Option<B256>, dead: bool) -> Self {
        let detail = "the payer cancelled the authorization or used its nonce for something else".to_owned();
        Self::Failed { reason: Reason::NonceAlreadyUsed, detail, transaction, dead }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_of_a_key_depends_on_payer_and_nonce() {
        use std::hash::BuildHasher as _;

        let key = |payer, nonce| PaymentKey {
            network: Network::BASE,
            asset: Address::ZERO,
            payer: Address::repeat_byte(payer),
            nonce: B256::repeat_byte(nonce),
        };
        let hasher = std::hash::RandomState::new();
        let hashes = [key(1, 1), key(1, 2), key(2, 1)].map(|key| hasher.hash_one(key));
        assert!(hashes[0] != hashes[1] && hashes[0] != hashes[2]);
    }

    #[test]
    fn echoed_metadata_is_bounded_and_never_empty() {
        let url =
            |length: usize| Verbatim::of(&ResourceInfo { url: "u".repeat(length), ..ResourceInfo::default() }).ok();
        assert!(EchoedMetadata::new(None, None).is_none());
        let overhead = EchoedMetadata::new(url(0), None).unwrap().size();
        assert_eq!(EchoedMetadata::new(url(MAX_ECHOED_BYTES - overhead), None).unwrap().size(), MAX_ECHOED_BYTES);
        assert!(EchoedMetadata::new(url(MAX_ECHOED_BYTES - overhead + 1), None).is_none());
    }
}
