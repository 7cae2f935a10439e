//! The message that a payer signs, in Permit2's EIP-712 domain.

use alloy_primitives::{B256, U256, b256, keccak256};
use alloy_sol_types::Eip712Domain;

use super::{PERMIT2, Permit};
use crate::{
    eip3009::{Authorization, TokenDomain},
    network::Network,
};

/// Keccak-256 of `TokenPermissions(address token,uint256 amount)`.
const TOKEN_PERMISSIONS: B256 = b256!("618358ac3db8dc274f0cd8829da7e234bd48cd73c4a740aede1adec9846d06a1");

/// Keccak-256 of the EIP-712 types of a permit and of its witness, which is what is signed beyond what Permit2 knows of.
struct Types {
    permit: B256,
    witness: B256,
}

/// Of `Witness(address to,uint256 validAfter)`.
const FOR_ANYBODY: Types = Types {
    permit: b256!("ebc156cd23678a74c94df13d772ef5478420637f0c94bd10d509e1dc98f521c7"),
    witness: b256!("d97b3239a7f32295517bd14cb074edfdd188dfe5eb42f802bb26d4fd1eb12c37"),
};
/// Of `Witness(address to,address facilitator,uint256 validAfter)`.
const FOR_AN_ACCOUNT: Types = Types {
    permit: b256!("51dff6974ad4388c499e7fcfe838d2bd767162553a144098ce20ea661d70c2ee"),
    witness: b256!("d4171c445a74218b01d4fd8af34ff1106580ea1e36ff837e64484bfaa2253b75"),
};

impl Permit {
    /// Returns Permit2's EIP-712 domain on a network. It has no version.
    pub fn domain(network: Network) -> TokenDomain {
        let chain_id = U256::from(network.chain_id());
        TokenDomain::new(Eip712Domain::new(Some("Permit2".into()), None, Some(chain_id), Some(PERMIT2), None))
    }

    /// Computes the EIP-712 hash that the payer signs, in the [domain](Self::domain) of the chain.
    pub fn signing_hash(&self, signed: &Authorization, domain: &TokenDomain) -> B256 {
        let mut message = [0_u8; 66];
        message[..2].copy_from_slice(&[0x19, 0x01]);
        message[2..34].copy_from_slice(domain.separator().as_slice());
        message[34..].copy_from_slice(self.struct_hash(signed).as_slice());
        keccak256(message)
    }

    /// Returns the hash of the witness's type, which the proxy has, too.
    #[cfg(feature = "onchain")]
    pub(crate) const fn witness_type_hash(&self) -> B256 {
        self.types().witness
    }

    const fn types(&self) -> &'static Types {
        if self.facilitator.is_some() { &FOR_AN_ACCOUNT } else { &FOR_ANYBODY }
    }

    /// `hashStruct` of EIP-712.
    fn struct_hash(&self, signed: &Authorization) -> B256 {
        let Authorization { from: _, to, value, valid_after, valid_before, nonce } = *signed;
        let types = self.types();
        let witness = match self.facilitator {
            None => hash([types.witness, to.into_word(), valid_after.into()]),
            Some(account) => hash([types.witness, to.into_word(), account.into_word(), valid_after.into()]),
        };
        let permitted = hash([TOKEN_PERMISSIONS, self.token.into_word(), value.into()]);
        hash([types.permit, permitted, self.spender.into_word(), nonce, valid_before.into(), witness])
    }
}

/// Hashes words, as `abi.encode` writes them.
fn hash<const N: usize>(words: [B256; N]) -> B256 {
    keccak256(words.map(|word| word.0).as_flattened())
}
