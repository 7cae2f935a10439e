//! Networks, and the USDC on them.

use std::{fmt, str::FromStr};

use alloy_primitives::{Address, address};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// An EVM chain, identified by its chain id (EIP-155) and written as CAIP-2 (`eip155:8453`).
///
/// Any chain id is a network. [`usdc`](Self::usdc) knows Circle's USDC on [`BASE`](Self::BASE) and
/// [`BASE_SEPOLIA`](Self::BASE_SEPOLIA); give the token of another network as an [`Asset`].
///
/// ```
/// use tower_x402::Network;
///
/// let network: Network = "eip155:8453".parse()?;
/// assert_eq!(network, Network::BASE);
/// assert_eq!("base-sepolia".parse(), Ok(Network::BASE_SEPOLIA));
/// assert_eq!(Network::eip155(10).to_string(), "eip155:10");
/// # Ok::<(), tower_x402::ParseNetworkError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(u64);

impl Network {
    /// Base, `eip155:8453`.
    pub const BASE: Self = Self(8453);
    /// Base Sepolia, the test network, `eip155:84532`.
    pub const BASE_SEPOLIA: Self = Self(84532);

    /// Creates the network with this chain id (EIP-155).
    pub const fn eip155(chain_id: u64) -> Self {
        Self(chain_id)
    }

    /// Returns the chain id (EIP-155).
    pub const fn chain_id(self) -> u64 {
        self.0
    }

    /// Returns the name of this network in x402 v1, such as `base`, if it has one.
    pub const fn v1_name(self) -> Option<&'static str> {
        match self {
            Self::BASE => Some("base"),
            Self::BASE_SEPOLIA => Some("base-sepolia"),
            _ => None,
        }
    }

    /// Returns the network with this name in x402 v1.
    pub fn from_v1_name(name: &str) -> Option<Self> {
        [Self::BASE, Self::BASE_SEPOLIA].into_iter().find(|network| network.v1_name() == Some(name))
    }

    /// Returns Circle's USDC on this network, if this crate knows it.
    ///
    /// ```
    /// use tower_x402::Network;
    ///
    /// let usdc = Network::BASE.usdc().expect("USDC on Base is known");
    /// assert_eq!(usdc.address.to_string(), "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913");
    /// assert_eq!(Network::eip155(1).usdc(), None);
    /// ```
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

    /// Reads CAIP-2 (`eip155:8453`) and the names of x402 v1 (`base`, `base-sepolia`).
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

/// An error while a network was read: the text is neither CAIP-2 of an EVM chain nor a name of x402 v1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an EVM network: write CAIP-2 such as \"eip155:8453\", or \"base\" or \"base-sepolia\"")]
#[non_exhaustive]
pub struct ParseNetworkError;

/// A token that implements EIP-3009, with the fields of its EIP-712 domain.
///
/// [`Network::usdc`] returns it for USDC. For another token, read `name` and `version` from its contract (`eip712Domain()`, EIP-5267,
/// or `name()` and `version()`): a signature under other values is invalid.
///
/// ```
/// use alloy_primitives::address;
/// use tower_x402::{Asset, Network};
///
/// // USDC on Optimism.
/// let contract = address!("0b2C639c533813f4Aa9D7837CAf62653d097Ff85");
/// let asset = Asset::new(Network::eip155(10), contract, "USD Coin", "2");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Asset {
    /// The network of the contract.
    pub network: Network,
    /// The address of the token contract.
    pub address: Address,
    /// The EIP-712 domain's `name`, which is not the symbol and not always the ERC-20 name.
    pub name: String,
    /// The EIP-712 domain's `version`.
    pub version: String,
}

impl Asset {
    /// Creates a token from its network, its contract's address, and the `name` and `version` of its EIP-712 domain.
    pub fn new(network: Network, address: Address, name: impl Into<String>, version: impl Into<String>) -> Self {
        Self { network, address, name: name.into(), version: version.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caip2_is_read_in_canonical_form_only() {
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
