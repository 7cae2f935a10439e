//! The payment header: the message in it, in whichever version of the protocol.

use http::HeaderMap;
use serde::Deserialize;

use super::header_names::{PAYMENT_SIGNATURE, X_PAYMENT};
use crate::{
    charge::{Refusal, exact::Message},
    protocol::{DecodeError, MAX_PAYMENT_HEADER, Reason, Version, decode_header},
};

/// The one payment header of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawHeader<'a> {
    pub(super) version: Version,
    value: &'a [u8],
}

impl<'a> RawHeader<'a> {
    /// Returns the payment header, if there is one. That of v1 is ignored where v1 is turned off.
    pub(super) fn of(headers: &'a HeaderMap, speaks_v1: bool) -> Result<Option<Self>, Refusal> {
        let v2 = headers.get_all(&PAYMENT_SIGNATURE).iter().map(|value| (Version::V2, value));
        let v1 = headers.get_all(&X_PAYMENT).iter().map(|value| (Version::V1, value));
        let mut found = v2.chain(v1.filter(|_| speaks_v1));
        match (found.next(), found.next()) {
            (first, None) => Ok(first.map(|(version, value)| Self { version, value: value.as_bytes() })),
            (_, Some(_)) => Err(Refusal::malformed(Reason::InvalidPayload, "more than one payment header")),
        }
    }

    /// Reads the message in the header, whatever scheme it is of.
    pub(super) fn read(self) -> Result<Message, Refusal> {
        let message = match self.version {
            Version::V1 => decode_header(self.value, MAX_PAYMENT_HEADER).map(Message::V1),
            Version::V2 => decode_header(self.value, MAX_PAYMENT_HEADER).map(Message::V2),
        };
        message.map_err(|error| unreadable(&error, self))
    }
}

fn unreadable(error: &DecodeError, header: RawHeader<'_>) -> Refusal {
    #[derive(Deserialize)]
    struct Versioned {
        #[serde(rename = "x402Version")]
        version: u64,
    }
    // A byte order mark, in base64.
    if header.value.starts_with(b"77u/") {
        let detail = "the header's JSON begins with a byte order mark (U+FEFF): leave it out";
        return Refusal::malformed(Reason::InvalidPayload, detail);
    }
    let expected = u64::from(u8::from(header.version));
    if let DecodeError::Json(_) = error
        && let Ok(Versioned { version }) = decode_header(header.value, header.value.len())
        && version != expected
    {
        let detail = format!("x402Version {version} is not read in this header, only {expected}");
        return Refusal::malformed(Reason::InvalidX402Version, detail);
    }
    Refusal::malformed(Reason::InvalidPayload, error.to_string())
}

#[cfg(test)]
mod tests {
    use alloy_primitives::Address;
    use base64_simd::STANDARD;

    use super::*;
    use crate::charge::{Why, exact::PresentedPayment};

    const ACCEPTED: &str = r#""accepted":{"scheme":"exact"}"#;
    const SIGNATURE: &str = r#""signature":"0x0a0B""#;
    const FROM: &str = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";

    fn authorization(from: &str) -> String {
        format!(
            r#""authorization":{{"from":"{from}","to":"0x90f79bf6eb2c4f870365e785982e1f101e93b906","value":"1000","validAfter":"0","validBefore":"1800000120","nonce":"0x00000000000000000000000000000000000000000000000000000000000000ab"}}"#
        )
    }

    fn read(version: Version, json: &str) -> Result<PresentedPayment, Refusal> {
        let value = STANDARD.encode_to_string(json);
        RawHeader { version, value: value.as_bytes() }.read().map(PresentedPayment::new)
    }

    fn v2(fields: &[&str]) -> Result<PresentedPayment, Refusal> {
        read(Version::V2, &format!(r#"{{"x402Version":2,{}}}"#, fields.join(",")))
    }

    fn v1(fields: &[&str]) -> Result<PresentedPayment, Refusal> {
        read(Version::V1, &format!(r#"{{"x402Version":1,{}}}"#, fields.join(",")))
    }

    fn payload(fields: &[&str]) -> String {
        format!(r#""payload":{{{}}}"#, fields.join(","))
    }

    #[test]
    fn no_key_may_be_there_twice() {
        let payload_once = payload(&[SIGNATURE, &authorization(FROM)]);
        assert!(v2(&[ACCEPTED, &payload_once]).unwrap().payload().is_ok());
        assert!(v1(&[r#""scheme":"exact""#, r#""network":"base""#, &payload_once]).unwrap().payload().is_ok());
        for twice in [ACCEPTED, &payload_once, r#""x402Version":2"#, r#""resource":null"#, r#""extensions":null"#] {
            let fields = [ACCEPTED, &payload_once, r#""resource":null"#, r#""extensions":null"#, twice];
            assert!(v2(&fields).is_err(), "{twice}");
        }
        for twice in [&payload_once, r#""scheme":"exact""#, r#""network":"base""#, r#""x402Version":1"#] {
            let fields = [r#""scheme":"exact""#, r#""network":"base""#, &payload_once, twice];
            assert!(v1(&fields).is_err(), "{twice}");
        }
        let authorization_once = authorization(FROM);
        for twice in [SIGNATURE, &authorization_once] {
            let payload = payload(&[SIGNATURE, &authorization_once, twice]);
            assert!(v2(&[ACCEPTED, &payload]).unwrap().payload().is_err(), "{twice}");
        }
        for twice in
            [r#""value":"1000""#, r#""nonce":"0x00""#, r#""from":"0x70997970C51812dc3A010C7d01b50e0d17dc79C8""#]
        {
            let authorization = authorization_once.replacen('{', &format!("{{{twice},"), 1);
            let payload = payload(&[SIGNATURE, &authorization]);
            assert!(v2(&[ACCEPTED, &payload]).unwrap().payload().is_err(), "{twice}");
        }
    }

    #[test]
    fn byte_order_mark_is_named() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        let Err(refusal) = read(Version::V2, &format!("\u{feff}{payment}")) else { panic!("it is read") };
        let Why::Malformed(rejection) = refusal.why() else { panic!("{refusal}") };
        assert_eq!(rejection.reason, Reason::InvalidPayload);
        assert!(rejection.detail.contains("byte order mark"), "{}", rejection.detail);
    }

    #[test]
    fn nothing_may_follow_a_payment() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        assert!(read(Version::V2, &payment).is_ok());
        for text in [format!("{payment}{{}}"), format!("{payment},"), payment[..payment.len() - 1].to_owned()] {
            assert!(read(Version::V2, &text).is_err(), "{text}");
        }
    }

    #[test]
    fn longer_header_than_the_limit_is_refused() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        let longest = STANDARD.estimated_decoded_length(MAX_PAYMENT_HEADER);
        assert!(read(Version::V2, &format!("{payment:longest$}")).is_ok());
        assert!(read(Version::V2, &format!("{payment:0$}", longest + 1)).is_err());
    }

    #[test]
    fn payer_is_named_as_it_names_itself() {
        for from in [FROM.to_owned(), FROM.to_lowercase(), format!("0x{}", FROM[2..].to_uppercase())] {
            let payment = v2(&[ACCEPTED, &payload(&[SIGNATURE, &authorization(&from)])]).unwrap();
            assert_eq!(payment.payer(), from);
            assert_eq!(payment.payload().unwrap().authorization.from, FROM.parse::<Address>().unwrap());
        }
    }

    #[test]
    fn unreadable_address_is_refused() {
        for from in ["", "0x", &FROM[..40], &format!("{FROM}ff"), "me"] {
            let payment = v2(&[ACCEPTED, &payload(&[SIGNATURE, &authorization(from)])]).unwrap();
            assert!(payment.payload().is_err(), "{from:?}");
        }
    }
}
