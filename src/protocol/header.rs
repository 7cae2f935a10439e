//! Base64 of JSON, as the x402 headers carry it.

use base64_simd::{STANDARD, STANDARD_NO_PAD};
use serde::{Serialize, de::DeserializeOwned};

/// The largest payment header that a server reads by default, in bytes.
///
/// An ordinary payment takes about 1.2 KB; the rest is for the long signatures of contract wallets.
pub const MAX_PAYMENT_HEADER: usize = 16 * 1024;

/// The largest `PAYMENT-REQUIRED` that a client reads, in bytes; Node's fetch stops at the same size.
pub const MAX_REQUIRED_HEADER: usize = 16 * 1024;

/// The largest body of a 402 in which a client looks for an offer of x402 v1, in bytes.
pub const MAX_REQUIRED_BODY: usize = 64 * 1024;

/// Room for the JSON of most messages, in bytes.
const USUAL_SIZE: usize = 512;

/// Writes a message as a header value.
///
/// # Errors
/// Only if `message` refuses to serialize; the messages of this module never do.
pub fn encode_header<T: Serialize>(message: &T) -> Result<String, serde_json::Error> {
    let mut json = Vec::with_capacity(USUAL_SIZE);
    serde_json::to_writer(&mut json, message)?;
    Ok(STANDARD.encode_to_string(json))
}

/// Reads a message from a header value of at most `limit` bytes.
///
/// # Errors
/// See [`DecodeError`]; the message is not looked at before its size is known to be within `limit`.
pub fn decode_header<T: DeserializeOwned>(value: &[u8], limit: usize) -> Result<T, DecodeError> {
    serde_json::from_str(&decode_text(value, limit)?).map_err(DecodeError::Json)
}

/// The JSON in a header value of at most `limit` bytes.
fn decode_text(value: &[u8], limit: usize) -> Result<String, DecodeError> {
    if value.len() > limit {
        return Err(DecodeError::TooLarge { size: value.len(), limit });
    }
    // Padding is written, and optional when read.
    let codec = if value.len().is_multiple_of(4) { STANDARD } else { STANDARD_NO_PAD };
    let json = codec.decode_to_vec(value).map_err(|_| DecodeError::NotBase64)?;
    // All of it, also what nobody reads: other readers of the same header refuse it (RFC 8259, section 8.1).
    String::from_utf8(json).map_err(|error| DecodeError::Json(serde::de::Error::custom(error.utf8_error())))
}

/// Why a header could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Longer than the reader is willing to look at.
    #[error("the header has {size} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Its size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// Not standard base64 (RFC 4648, section 4).
    #[error("the header is not standard base64")]
    NotBase64,
    /// Not JSON, or JSON of another shape.
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
    fn padding_is_optional_and_nothing_else_is() {
        assert_eq!(decode("eyJhIjoxfQ==").unwrap()["a"], 1);
        assert_eq!(decode("eyJhIjoxfQ").unwrap()["a"], 1);
        for text in ["eyJhIjoxfQ===", "eyJhIjoxfQ= =", " eyJhIjoxfQ==", "eyJhIjoxfR", "-_-_", "{\"a\":1}", "=", "a"] {
            assert!(matches!(decode(text), Err(DecodeError::NotBase64)), "{text:?}");
        }
        assert!(matches!(decode(""), Err(DecodeError::Json(_))));
    }

    #[test]
    fn an_oversized_header_is_not_looked_at() {
        let long = "A".repeat(65);
        assert!(matches!(decode(&long), Err(DecodeError::TooLarge { size: 65, limit: 64 })));
    }

    #[test]
    fn what_nobody_reads_must_be_text_too() {
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
