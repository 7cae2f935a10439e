//! The versions of the protocol, and the numbers in `x402Version`.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::header_name;

/// A version of x402. Its JSON is its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
#[non_exhaustive]
pub enum Version {
    /// Offers are in the body of the 402, payments in `X-PAYMENT`.
    V1,
    /// Offers are in `PAYMENT-REQUIRED`, payments in `PAYMENT-SIGNATURE`.
    #[default]
    V2,
}

impl Version {
    /// Returns the name of the header with the payment.
    pub const fn payment_header(self) -> &'static str {
        match self {
            Self::V1 => header_name::X_PAYMENT,
            Self::V2 => header_name::PAYMENT_SIGNATURE,
        }
    }

    /// Returns the name of the header with the settlement.
    pub const fn response_header(self) -> &'static str {
        match self {
            Self::V1 => header_name::X_PAYMENT_RESPONSE,
            Self::V2 => header_name::PAYMENT_RESPONSE,
        }
    }
}

impl From<Version> for u8 {
    fn from(version: Version) -> Self {
        match version {
            Version::V1 => 1,
            Version::V2 => 2,
        }
    }
}

impl TryFrom<u8> for Version {
    type Error = UnknownVersion;

    fn try_from(number: u8) -> Result<Self, UnknownVersion> {
        match number {
            1 => Ok(Self::V1),
            2 => Ok(Self::V2),
            other => Err(UnknownVersion(other)),
        }
    }
}

/// The number is not of a version of x402 that this crate knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown x402 version {0}; the known ones are 1 and 2")]
pub struct UnknownVersion(pub u8);

macro_rules! version {
    ($(#[$doc:meta])* $name:ident = $number:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name;

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_u8($number)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                match u64::deserialize(deserializer)? {
                    $number => Ok(Self),
                    other => Err(de::Error::custom(format_args!(
                        "x402Version is {other}, not {}",
                        $number
                    ))),
                }
            }
        }
    };
}

version! {
    /// The number 1 in `x402Version`. Other numbers do not parse.
    V1 = 1
}

version! {
    /// The number 2 in `x402Version`. Other numbers do not parse.
    V2 = 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_versions_do_not_parse() {
        assert!(serde_json::from_str::<V1>("1").is_ok());
        assert!(serde_json::from_str::<V2>("2").is_ok());
        for text in ["0", "3", "\"1\"", "\"2\"", "1.0", "2.0", "null", "257", "258"] {
            assert!(serde_json::from_str::<V1>(text).is_err(), "{text}");
            assert!(serde_json::from_str::<V2>(text).is_err(), "{text}");
        }
        assert!(serde_json::from_str::<V1>("2").is_err());
        assert!(serde_json::from_str::<V2>("1").is_err());
        for (text, version) in [("1", Some(Version::V1)), ("2", Some(Version::V2)), ("3", None), ("\"1\"", None)] {
            assert_eq!(serde_json::from_str(text).ok(), version, "{text}");
        }
        assert_eq!(serde_json::to_string(&Version::V1).unwrap(), "1");
    }
}
