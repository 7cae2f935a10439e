//! The message that a payer signs, and the EIP-712 domain of the token that it is for.

use alloy_primitives::{Address, B256, U256, b256, keccak256};
use alloy_sol_types::Eip712Domain;
use serde::{Deserialize, Serialize, Serializer};

use crate::network::Asset;

/// Keccak-256 of the EIP-712 type, as in EIP-3009.
const TYPE_HASH: B256 = b256!("7c7c6cdb67a18743f49ec6fa9b35f50d52ed05cbed4cc592e13b44501c1a2267");

/// A transfer that anybody may execute once (EIP-3009, `transferWithAuthorization`).
///
/// Its JSON has checksummed addresses (EIP-55), because the facilitator of the official Python package accepts no others. Addresses
/// without a checksum are read, too.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Authorization {
    /// The payer.
    #[serde(serialize_with = "checksummed")]
    pub from: Address,
    /// The payee.
    #[serde(serialize_with = "checksummed")]
    pub to: Address,
    /// The amount, in atomic units of the token.
    #[serde(with = "crate::decimal")]
    pub value: U256,
    /// The authorization is valid in blocks after this time, in Unix seconds.
    #[serde(with = "crate::decimal")]
    pub valid_after: U256,
    /// The authorization is valid in blocks before this time, in Unix seconds.
    #[serde(with = "crate::decimal")]
    pub valid_before: U256,
    /// A number that the payer chose. It can be used once.
    pub nonce: B256,
}

impl Authorization {
    /// Computes the EIP-712 hash that the payer signs.
    pub fn signing_hash(&self, domain: &TokenDomain) -> B256 {
        let mut message = [0_u8; 66];
        message[..2].copy_from_slice(&[0x19, 0x01]);
        message[2..34].copy_from_slice(domain.separator().as_slice());
        message[34..].copy_from_slice(self.struct_hash().as_slice());
        keccak256(message)
    }

    /// `hashStruct` of EIP-712: all fields are static, one word each.
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

    /// Returns alloy's typed data, for signers that display the message.
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

    /// Returns alloy's typed data of a transfer that only the payee may execute (`receiveWithAuthorization`).
    #[cfg(feature = "facilitator")]
    pub(crate) fn typed_receive(&self) -> super::ReceiveWithAuthorization {
        super::ReceiveWithAuthorization {
            from: self.from,
            to: self.to,
            value: self.value,
            validAfter: self.valid_after,
            validBefore: self.valid_before,
            nonce: self.nonce,
        }
    }
}

/// Writes the JSON without checksums, which take a hash each: for databases.
#[cfg(feature = "facilitator")]
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

pub(crate) fn checksummed<S: Serializer>(address: &Address, serializer: S) -> Result<S::Ok, S::Error> {
    // `Display` of an address is EIP-55.
    serializer.collect_str(address)
}

/// The EIP-712 domain of a token, with its separator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenDomain {
    domain: Eip712Domain,
    separator: B256,
}

impl TokenDomain {
    /// Returns the domain of `asset`.
    pub fn of(asset: &Asset) -> Self {
        Self::new(Eip712Domain::new(
            Some(asset.name.clone().into()),
            Some(asset.version.clone().into()),
            Some(U256::from(asset.network.chain_id())),
            Some(asset.address),
            None,
        ))
    }

    pub(crate) fn new(domain: Eip712Domain) -> Self {
        Self { separator: domain.separator(), domain }
    }

    /// Returns the domain separator, as the token's `DOMAIN_SEPARATOR()` does.
    pub const fn separator(&self) -> B256 {
        self.separator
    }

    /// Returns alloy's form of the domain.
    pub const fn eip712(&self) -> &Eip712Domain {
        &self.domain
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::address;
    use alloy_sol_types::SolStruct as _;

    use super::*;
    use crate::network::Network;

    #[test]
    fn the_hash_is_that_of_alloys_encoder() {
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
    fn addresses_are_written_with_a_checksum_and_read_without() {
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

    #[test]
    fn separators_of_base_and_base_sepolia_are_known() {
        let separator = |network: Network| TokenDomain::of(&network.usdc().unwrap()).separator();
        assert_eq!(separator(Network::BASE), b256!("02fa7265e7c5d81118673727957699e4d68f74cd74b7db77da710fe8a2c7834f"));
        assert_eq!(
            separator(Network::BASE_SEPOLIA),
            b256!("71f17a3b2ff373b803d70a5a07c046c1a2bc8e89c09ef722fcb047abe94c9818")
        );
    }
}
