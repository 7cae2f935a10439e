//! Base64 of JSON, as the x402 headers carry it.

use base64_simd::{STANDARD, STANDARD_NO_PAD};
use serde::{Serialize, de::DeserializeOwned};

/// The largest payment header that a server reads by default, in bytes.
///
/// An ordinary payment takes about 1.2 KB; the rest is for the long signatures of contract wallets.
pub const MAX_PAYMENT_HEADER: usize = 16 * 1024;

/// The largest `PAYMENT-REQUIRED` that a client reads, in bytes. Node's fetch has the same limit.
pub const MAX_REQUIRED_HEADER: usize = 16 * 1024;

/// The largest body of a 402 in which a client looks for an offer of x402 v1, in bytes.
pub const MAX_REQUIRED_BODY: usize = 64 * 1024;

/// Room for the JSON of most messages, in bytes.
const USUAL_SIZE: usize = 512;

/// Encodes a message as a header value.
///
/// # Errors
/// If `message` refuses to serialize. The messages of this module never do.
pub fn encode_header<T: Serialize>(message: &T) -> Result<String, serde_json::Error> {
    let mut json = Vec::with_capacity(USUAL_SIZE);
    serde_json::to_writer(&mut json, message)?;
    Ok(STANDARD.encode_to_string(json))
}

/// Decodes a message from a header value of at most `limit` bytes. A longer value is refused before it is read.
///
/// # Errors
/// See [`DecodeError`].
pub fn decode_header<T: DeserializeOwned>(value: &[u8], limit: usize) -> Result<T, DecodeError> {
    if value.len() > limit {
        return Err(DecodeError::TooLarge { size: value.len(), limit });
    }
    // Padding is optional in what others send.
    let codec = if value.len().is_multiple_of(4) { STANDARD } else { STANDARD_NO_PAD };
    let json = codec.decode_to_vec(value).map_err(|_| DecodeError::NotBase64)?;
    // Also in fields that are not parsed: other readers of the header refuse invalid UTF-8 (RFC 8259, section 8.1).
    let json = str::from_utf8(&json).map_err(|error| DecodeError::Json(serde::de::Error::custom(error)))?;
    serde_json::from_str(json).map_err(DecodeError::Json)
}

/// Why a header could not be decoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The header is longer than the limit.
    #[error("the header has {size} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Its size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The header is not standard base64 (RFC 4648, section 4).
    #[error("the header is not standard base64")]
    NotBase64,
    /// The header does not hold the expected JSON.
    #[error("the header does not hold the expected JSON: {0}")]
    Json(#[source] serde_json::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str) -> Result<serde_json::Value, DecodeError> {
        decode_header(text.as_bytes(), 64)
    }

    #[test]
    fn only_padding_is_optional() {
        assert_eq!(decode("eyJhIjoxfQ==").unwrap()["a"], 1);
        assert_eq!(decode("eyJhIjoxfQ").unwrap()["a"], 1);
        for text in ["eyJhIjoxfQ===", "eyJhIjoxfQ= =", " eyJhIjoxfQ==", "eyJhIjoxfR", "-_-_", "{\"a\":1}", "=", "a"] {
            assert!(matches!(decode(text), Err(DecodeError::NotBase64)), "{text:?}");
        }
        assert!(matches!(decode(""), Err(DecodeError::Json(_))));
    }

    #[test]
    fn an_oversized_header_is_refused_before_it_is_read() {
        let long = "A".repeat(65);
        assert!(matches!(decode(&long), Err(DecodeError::TooLarge { size: 65, limit: 64 })));
    }

    #[test]
    fn fields_that_are_not_parsed_must_be_utf8() {
        #[derive(Debug, serde::Deserialize)]
        struct Read {
            a: u8,
        }
        let read =
            |json: &[u8]| decode_header::<Read>(STANDARD.encode_to_string(json).as_bytes(), 64).map(|read| read.a);
        assert_eq!(read(br#"{"a":1,"b":"x"}"#).unwrap(), 1);
        assert!(matches!(read(b"{\"a\":1,\"b\":\"\xff\"}"), Err(DecodeError::Json(_))));
    }

    proptest::proptest! {
        #[test]
        fn any_text_survives_the_round_trip(text: String) {
            let header = encode_header(&text).unwrap();
            proptest::prop_assert_eq!(decode_header::<String>(header.as_bytes(), usize::MAX).unwrap(), text);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = decode_header::<crate::protocol::PaymentPayload>(&bytes, 1 << 16);
        }
    }
}
