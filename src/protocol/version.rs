//! The numbers in `x402Version`.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

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
                        "x402Version {other} is not read here, only {}",
                        $number
                    ))),
                }
            }
        }
    };
}

version! {
    /// The number 1 in `x402Version`; no other number is read.
    V1 = 1
}

version! {
    /// The number 2 in `x402Version`; no other number is read.
    V2 = 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_version_is_read() {
        assert!(serde_json::from_str::<V1>("1").is_ok());
        assert!(serde_json::from_str::<V2>("2").is_ok());
        for text in ["0", "3", "\"1\"", "\"2\"", "1.0", "2.0", "null", "257", "258"] {
            assert!(serde_json::from_str::<V1>(text).is_err(), "{text}");
            assert!(serde_json::from_str::<V2>(text).is_err(), "{text}");
        }
        assert!(serde_json::from_str::<V1>("2").is_err());
        assert!(serde_json::from_str::<V2>("1").is_err());
    }
}
