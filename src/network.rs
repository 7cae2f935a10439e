//! Chains and the USDC deployments on them.

use std::{fmt, str::FromStr};

use alloy_primitives::{Address, address};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// An EVM chain, written as CAIP-2 (`eip155:8453`).
///
/// ```
/// use tower_x402::Network;
///
/// let network: Network = "eip155:8453".parse()?;
/// assert_eq!(network, Network::BASE);
/// assert_eq!("base-sepolia".parse(), Ok(Network::BASE_SEPOLIA));
/// assert_eq!(Network::BASE_SEPOLIA.to_string(), "eip155:84532");
/// # Ok::<(), tower_x402::ParseNetworkError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(u64);

impl Network {
    /// Base, `eip155:8453`.
    pub const BASE: Self = Self(8453);
    /// Base Sepolia, the test network, `eip155:84532`.
    pub const BASE_SEPOLIA: Self = Self(84532);

    /// The EVM chain with this chain id (EIP-155).
    pub const fn eip155(chain_id: u64) -> Self {
        Self(chain_id)
    }

    /// The chain id (EIP-155).
    pub const fn chain_id(self) -> u64 {
        self.0
    }

    /// What x402 v1 calls this chain; it has no name for most.
    pub const fn v1_name(self) -> Option<&'static str> {
        match self {
            Self::BASE => Some("base"),
            Self::BASE_SEPOLIA => Some("base-sepolia"),
            _ => None,
        }
    }

    /// The chain that x402 v1 calls so.
    pub fn from_v1_name(name: &str) -> Option<Self> {
        [Self::BASE, Self::BASE_SEPOLIA].into_iter().find(|network| network.v1_name() == Some(name))
    }

    /// Circle's USDC on this chain, if this crate knows it.
    pub fn usdc(self) -> Option<Asset> {
        let (address, name) = match self {
            Self::BASE => (address!("833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"), "USD Coin"),
            Self::BASE_SEPOLIA => (address!("036CbD53842c5426634e7929541eC2318f3dCF7e"), "USDC"),
            _ => return None,
        };
        Some(Asset { network: self, address, name: name.to_owned(), version: "2".to_owned() })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "eip155:{}", self.0)
    }
}

impl FromStr for Network {
    type Err = ParseNetworkError;

    /// Reads CAIP-2 (`eip155:8453`) and the names that x402 v1 uses (`base`, `base-sepolia`).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(network) = Self::from_v1_name(text) {
            return Ok(network);
        }
        let digits = text.strip_prefix("eip155:").ok_or(ParseNetworkError)?;
        let canonical = !digits.is_empty()
            && digits.bytes().all(|b| b.is_ascii_digit())
            && (digits == "0" || !digits.starts_with('0'));
        if !canonical {
            return Err(ParseNetworkError);
        }
        digits.parse().map(Self).map_err(|_| ParseNetworkError)
    }
}

impl Serialize for Network {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// The text names no EVM chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an EVM network: write CAIP-2 such as \"eip155:8453\", or \"base\" or \"base-sepolia\"")]
pub struct ParseNetworkError;

/// A token that implements EIP-3009, with the two fields of its EIP-712 domain that only its deployment knows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Asset {
    /// The chain it lives on.
    pub network: Network,
    /// The token contract.
    pub address: Address,
    /// The EIP-712 domain's `name`; not the symbol and not always the ERC-20 name.
    pub name: String,
    /// The EIP-712 domain's `version`.
    pub version: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_caip2_is_read() {
        for text in
            ["eip155:", "eip155:08453", "eip155:+1", "eip155:99999999999999999999", "solana:5eykt4", "8453", "BASE"]
        {
            assert_eq!(text.parse::<Network>(), Err(ParseNetworkError), "{text}");
        }
    }

    #[test]
    fn usdc_is_known_on_base_only() {
        assert_eq!(Network::BASE.usdc().map(|asset| asset.name), Some("USD Coin".into()));
        assert_eq!(Network::BASE_SEPOLIA.usdc().map(|asset| asset.name), Some("USDC".into()));
        assert_eq!(Network::eip155(1).usdc(), None);
    }
}
