//! The identity of a payment.

use std::hash::{Hash, Hasher};

use alloy_primitives::{Address, B256};

use super::Terms;
use crate::{eip3009::Authorization, network::Network};

/// The identity of a payment: network, token, payer and the nonce of the authorization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PaymentKey {
    /// The chain.
    pub network: Network,
    /// The token.
    pub asset: Address,
    /// Who pays.
    pub payer: Address,
    /// The authorization's nonce.
    pub nonce: B256,
}

/// The nonce tells payments apart, but for those who choose the same one in several tokens.
impl Hash for PaymentKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // In one piece, which hashes faster.
        let mut bytes = [0; 52];
        bytes[..32].copy_from_slice(self.nonce.as_slice());
        bytes[32..].copy_from_slice(self.payer.as_slice());
        state.write(&bytes);
    }
}

impl PaymentKey {
    /// Returns the key of a payment by this authorization under `terms`.
    pub fn of(terms: &Terms, authorization: &Authorization) -> Self {
        let asset = &terms.offer().asset;
        Self { network: asset.network, asset: asset.address, payer: authorization.from, nonce: authorization.nonce }
    }
}
