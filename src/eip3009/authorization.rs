//! The authorization itself.

use alloy_primitives::{Address, B256, U256, b256, keccak256};
use serde::{Deserialize, Serialize, Serializer};

use super::TokenDomain;

/// Keccak-256 of the type's name and fields, as EIP-3009 gives it.
const TYPE_HASH: B256 = b256!("7c7c6cdb67a18743f49ec6fa9b35f50d52ed05cbed4cc592e13b44501c1a2267");

/// A transfer that the payer allows anybody to execute once (EIP-3009, `transferWithAuthorization`).
///
/// As JSON its addresses are written with their checksum (EIP-55) and read with or without: the facilitator of the official
/// Python package takes no others.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Authorization {
    /// The payer.
    #[serde(serialize_with = "checksummed")]
    pub from: Address,
    /// The payee.
    #[serde(serialize_with = "checksummed")]
    pub to: Address,
    /// Atomic units of the token.
    #[serde(with = "crate::decimal")]
    pub value: U256,
    /// Unix time in seconds; block time must be greater.
    #[serde(with = "crate::decimal")]
    pub valid_after: U256,
    /// Unix time in seconds; block time must be smaller.
    #[serde(with = "crate::decimal")]
    pub valid_before: U256,
    /// Chosen by the payer, used once.
    pub nonce: B256,
}

impl Authorization {
    /// The EIP-712 hash that the payer signs.
    pub fn signing_hash(&self, domain: &TokenDomain) -> B256 {
        let mut message = [0_u8; 66];
        message[..2].copy_from_slice(&[0x19, 0x01]);
        message[2..34].copy_from_slice(domain.separator().as_slice());
        message[34..].copy_from_slice(self.struct_hash().as_slice());
        keccak256(message)
    }

    /// `hashStruct` of EIP-712. The type has static fields only, a word each, and its hash is known.
    fn struct_hash(&self) -> B256 {
        let words = [
            TYPE_HASH,
            self.from.into_word(),
            self.to.into_word(),
            self.value.into(),
            self.valid_after.into(),
            self.valid_before.into(),
            self.nonce,
        ];
        let mut data = [0_u8; 7 * 32];
        for (place, word) in data.chunks_exact_mut(32).zip(words) {
            place.copy_from_slice(word.as_slice());
        }
        keccak256(data)
    }

    /// The typed data in alloy's terms, for signers that show what they sign.
    #[cfg(any(test, feature = "client"))]
    pub(crate) fn typed(&self) -> super::TransferWithAuthorization {
        super::TransferWithAuthorization {
            from: self.from,
            to: self.to,
            value: self.value,
            validAfter: self.valid_after,
            validBefore: self.valid_before,
            nonce: self.nonce,
        }
    }
}

/// The JSON that is read as the same authorization; a checksum takes a hash, and longer to write than all the rest.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn without_checksums<S: Serializer>(it: &Authorization, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Plain {
        from: Address,
        to: Address,
        #[serde(with = "crate::decimal")]
        value: U256,
        #[serde(with = "crate::decimal")]
        valid_after: U256,
        #[serde(with = "crate::decimal")]
        valid_before: U256,
        nonce: B256,
    }
    let Authorization { from, to, value, valid_after, valid_before, nonce } = *it;
    Plain { from, to, value, valid_after, valid_before, nonce }.serialize(serializer)
}

fn checksummed<S: Serializer>(address: &Address, serializer: S) -> Result<S::Ok, S::Error> {
    // Address displays as EIP-55 says.
    serializer.collect_str(address)
}

#[cfg(test)]
mod tests {
    use alloy_primitives::address;
    use alloy_sol_types::SolStruct as _;

    use super::*;
    use crate::network::Network;

    #[test]
    fn the_hash_is_the_one_that_a_general_encoder_makes() {
        let authorization = Authorization {
            from: Address::repeat_byte(0xf1),
            to: Address::repeat_byte(0x22),
            value: U256::MAX,
            valid_after: U256::from(3),
            valid_before: U256::from(u64::MAX),
            nonce: b256!("00000000000000000000000000000000000000000000000000000000000000ab"),
        };
        let domain = TokenDomain::of(&Network::BASE.usdc().unwrap());
        assert_eq!(authorization.typed().eip712_type_hash(), TYPE_HASH);
        assert_eq!(authorization.signing_hash(&domain), authorization.typed().eip712_signing_hash(domain.eip712()));
    }

    #[test]
    fn addresses_are_written_with_their_checksum_and_read_without_it() {
        let from = address!("70997970C51812dc3A010C7d01b50e0d17dc79C8");
        let authorization = Authorization {
            from,
            to: address!("90F79bf6EB2c4f870365E785982E1f101E93b906"),
            value: U256::from(1_000),
            valid_after: U256::ZERO,
            valid_before: U256::from(60),
            nonce: b256!("00000000000000000000000000000000000000000000000000000000000000ab"),
        };
        let json = serde_json::to_string(&authorization).unwrap();
        assert!(json.contains(r#""from":"0x70997970C51812dc3A010C7d01b50e0d17dc79C8""#), "{json}");
        assert!(json.contains(r#""to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906""#), "{json}");
        for text in [json.to_lowercase().replace("valida", "validA").replace("validb", "validB"), json] {
            assert_eq!(serde_json::from_str::<Authorization>(&text).unwrap(), authorization);
        }
    }
}
