//! The message that a payer signs, in Permit2's EIP-712 domain.

use alloy_primitives::{B256, U256, keccak256};
use alloy_sol_types::{Eip712Domain, SolStruct as _};

use super::{PERMIT2, Permit};
use crate::{
    eip3009::{Authorization, TokenDomain},
    network::Network,
};

alloy_sol_types::sol! {
    /// The token, and the most that may be moved.
    #[derive(Debug)]
    struct TokenPermissions {
        address token;
        uint256 amount;
    }

    /// What the payer signs for beyond what Permit2 knows of.
    #[derive(Debug)]
    struct Witness {
        address to;
        address facilitator;
        uint256 validAfter;
    }

    /// Permit2's typed data with the scheme's witness.
    #[derive(Debug)]
    struct PermitWitnessTransferFrom {
        TokenPermissions permitted;
        address spender;
        uint256 nonce;
        uint256 deadline;
        Witness witness;
    }
}

/// Returns the hash of the witness's type, which the scheme's contract has, too.
#[cfg(feature = "onchain")]
pub(crate) fn witness_type_hash() -> B256 {
    keccak256(Witness::eip712_encode_type().as_bytes())
}

impl Permit {
    /// Returns Permit2's EIP-712 domain on a network. It has no version.
    pub fn domain(network: Network) -> TokenDomain {
        let chain_id = U256::from(network.chain_id());
        TokenDomain::new(Eip712Domain::new(Some("Permit2".into()), None, Some(chain_id), Some(PERMIT2), None))
    }

    /// Computes the EIP-712 hash that the payer signs, in the [domain](Self::domain) of the chain.
    pub fn signing_hash(&self, maximum: &Authorization, domain: &TokenDomain) -> B256 {
        let mut message = [0_u8; 66];
        message[..2].copy_from_slice(&[0x19, 0x01]);
        message[2..34].copy_from_slice(domain.separator().as_slice());
        message[34..].copy_from_slice(self.typed(maximum).eip712_hash_struct().as_slice());
        keccak256(message)
    }

    /// Returns alloy's typed data, for signers that display the message.
    pub(crate) fn typed(&self, maximum: &Authorization) -> PermitWitnessTransferFrom {
        let Authorization { from: _, to, value, valid_after, valid_before, nonce } = *maximum;
        PermitWitnessTransferFrom {
            permitted: TokenPermissions { token: self.token, amount: value },
            spender: self.spender,
            nonce: nonce.into(),
            deadline: valid_before,
            witness: Witness { to, facilitator: self.facilitator, validAfter: valid_after },
        }
    }
}
