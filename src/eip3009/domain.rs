//! The EIP-712 domain of a token.

use alloy_primitives::{B256, U256};
use alloy_sol_types::Eip712Domain;

use crate::network::Asset;

/// The EIP-712 domain of one token, with its separator computed once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenDomain {
    domain: Eip712Domain,
    separator: B256,
}

impl TokenDomain {
    /// The domain of `asset`.
    pub fn of(asset: &Asset) -> Self {
        let domain = Eip712Domain::new(
            Some(asset.name.clone().into()),
            Some(asset.version.clone().into()),
            Some(U256::from(asset.network.chain_id())),
            Some(asset.address),
            None,
        );
        Self { separator: domain.separator(), domain }
    }

    /// The domain separator, equal to what the token's `DOMAIN_SEPARATOR()` returns.
    pub const fn separator(&self) -> B256 {
        self.separator
    }

    /// The domain in alloy's terms.
    pub const fn eip712(&self) -> &Eip712Domain {
        &self.domain
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::b256;

    use super::*;
    use crate::network::Network;

    #[test]
    fn separators_of_base_and_base_sepolia_are_pinned() {
        let separator = |network: Network| TokenDomain::of(&network.usdc().unwrap()).separator();
        assert_eq!(separator(Network::BASE), b256!("02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f"));
        assert_eq!(
            separator(Network::BASE_SEPOLIA),
            b256!("71f17a3b2ff373b803d70a5a07c046c1a2bc8e89c09ef722fcb047abe94c9818")
        );
    }
}
