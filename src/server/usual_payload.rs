//! Payloads in the words that clients use, read without a JSON parser.

use std::str::FromStr;

use alloy_primitives::U256;

use super::letters::{Letters, Spelled, Spelling};
use crate::{
    decimal::parse_decimal,
    eip3009::{Authorization, PaymentSignature},
    protocol::ExactPayload,
};

/// Reads a payload that is written as nearly all are: without spaces, the authorization's fields in the order of EIP-3009. What it
/// reads is what serde would; `None` says only that serde must look, which takes longer.
pub(super) fn read(text: &str) -> Option<Spelled> {
    let mut text = Text(text);
    let (signature, (authorization, payer));
    if text.skip(r#"{"signature":""#).is_some() {
        signature = text.signature()?;
        text.skip(r#","authorization":"#)?;
        (authorization, payer) = text.authorization()?;
    } else {
        text.skip(r#"{"authorization":"#)?;
        (authorization, payer) = text.authorization()?;
        text.skip(r#","signature":""#)?;
        signature = text.signature()?;
    }
    (text.0 == "}").then_some(Spelled { exact: ExactPayload { signature, authorization }, payer })
}

/// What is still to be read.
struct Text<'t>(&'t str);

impl<'t> Text<'t> {
    fn skip(&mut self, expected: &str) -> Option<()> {
        self.0 = self.0.strip_prefix(expected)?;
        Some(())
    }

    /// The next so many bytes, and the end of the string. None of the values here has a backslash in it.
    fn string(&mut self, length: usize) -> Option<&'t str> {
        let (string, rest) = self.0.split_at_checked(length)?;
        self.0 = rest.strip_prefix('"')?;
        Some(string)
    }

    /// A number of so many bytes as `0x` and hex digits.
    fn hex<T: FromStr>(&mut self, name: &str, bytes: usize) -> Option<T> {
        self.skip(name)?;
        self.string(2 + 2 * bytes)?.parse().ok()
    }

    fn decimal(&mut self, name: &str) -> Option<U256> {
        self.skip(name)?;
        let digits = self.0.bytes().take_while(u8::is_ascii_digit).count();
        parse_decimal(self.string(digits)?)
    }

    fn signature(&mut self) -> Option<PaymentSignature> {
        PaymentSignature::parse(self.string(self.0.find('"')?)?)
    }

    fn authorization(&mut self) -> Option<(Authorization, Spelling)> {
        let Letters(from, payer) = self.hex(r#"{"from":""#, 20)?;
        let authorization = Authorization {
            from,
            to: self.hex(r#","to":""#, 20)?,
            value: self.decimal(r#","value":""#)?,
            valid_after: self.decimal(r#","validAfter":""#)?,
            valid_before: self.decimal(r#","validBefore":""#)?,
            nonce: self.hex(r#","nonce":""#, 32)?,
        };
        self.skip("}")?;
        Some((authorization, payer))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const SIGNATURE: &str = r#""signature":"0x0a0B""#;
    const AUTHORIZATION: &str = r#""authorization":{"from":"0x70997970C51812dc3A010C7d01b50e0d17dc79C8","to":"0x90f79bf6eb2c4f870365e785982e1f101e93b906","value":"1000","validAfter":"0","validBefore":"1800000120","nonce":"0x00000000000000000000000000000000000000000000000000000000000000ab"}"#;

    fn texts() -> [String; 2] {
        [format!("{{{SIGNATURE},{AUTHORIZATION}}}"), format!("{{{AUTHORIZATION},{SIGNATURE}}}")]
    }

    fn by_serde(text: &str) -> Option<Spelled> {
        serde_json::from_str(text).ok()
    }

    #[test]
    fn both_orders_are_read_as_serde_reads_them() {
        for text in texts() {
            let (read, expected) = (read(&text).expect("usual"), by_serde(&text).expect("a payload"));
            assert_eq!((read.exact, read.payer), (expected.exact, expected.payer));
        }
    }

    #[test]
    fn what_clients_of_other_packages_write_is_usual() {
        let payload: ExactPayload = serde_json::from_str(&texts()[0]).unwrap();
        assert!(read(&serde_json::to_string(&payload).unwrap()).is_some(), "what our own client writes");
        let unusual = serde_json::to_string_pretty(&payload).unwrap();
        assert!(read(&unusual).is_none() && by_serde(&unusual).is_some());
        let more = json!({ "signature": payload.signature, "authorization": payload.authorization, "more": 1 });
        assert!(read(&more.to_string()).is_none());
    }

    proptest! {
        /// Bytes changed, left out and put in anywhere, mostly such as mean something in JSON.
        #[test]
        fn nothing_is_read_in_another_way_than_by_serde(
            which in 0..2_usize,
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0..3_u8, r#"[ -~]|["\\{},:0xg+-]|é"#), 1..4),
        ) {
            let mut text = texts()[which].clone();
            for (place, kind, letter) in changes {
                let place = place.index(text.len());
                if !text.is_char_boundary(place) {
                    continue;
                }
                let end = place + text[place..].chars().next().map_or(0, char::len_utf8);
                match kind {
                    0 => text.replace_range(place..end, &letter),
                    1 => text.replace_range(place..end, ""),
                    _ => text.insert_str(place, &letter),
                }
            }
            if let Some(read) = read(&text) {
                let expected = by_serde(&text);
                prop_assert!(expected.is_some(), "{}", text);
                let expected = expected.unwrap();
                prop_assert_eq!((read.exact, read.payer), (expected.exact, expected.payer));
            }
        }
    }
}
