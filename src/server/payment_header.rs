//! The payment header, and the message in it.

use http::HeaderMap;
use serde::{Deserialize, de::DeserializeOwned};

use super::header_names::{PAYMENT_SIGNATURE, X_PAYMENT};
use crate::{
    charge::Refusal,
    protocol::{DecodeError, MAX_PAYMENT_HEADER, PaymentPayload, Reason, decode_header},
};

/// The one payment header of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawHeader<'a> {
    value: &'a [u8],
    is_v1: bool,
}

impl<'a> RawHeader<'a> {
    /// Returns the payment header, if there is one. That of v1 is ignored where v1 is turned off.
    pub(super) fn of(headers: &'a HeaderMap, speaks_v1: bool) -> Result<Option<Self>, Refusal> {
        let v2 = headers.get_all(&PAYMENT_SIGNATURE).iter().map(|value| (value, false));
        let v1 = headers.get_all(&X_PAYMENT).iter().map(|value| (value, true));
        let mut found = v2.chain(v1.filter(|_| speaks_v1));
        match (found.next(), found.next()) {
            (first, None) => Ok(first.map(|(value, is_v1)| Self { value: value.as_bytes(), is_v1 })),
            (_, Some(_)) => Err(Refusal::malformed(Reason::InvalidPayload, "more than one payment header")),
        }
    }

    /// Returns `true` if it is that of v1, which [`OffersV1`](super::v1::OffersV1) reads.
    pub(super) const fn is_v1(&self) -> bool {
        self.is_v1
    }

    /// Reads the message in the header of v2, whatever scheme it is of.
    pub(super) fn read(self) -> Result<PaymentPayload, Refusal> {
        self.decode(2)
    }

    /// Decodes the message in the header, which is to be of this version.
    pub(super) fn decode<T: DeserializeOwned>(self, version: u64) -> Result<T, Refusal> {
        decode_header(self.value, MAX_PAYMENT_HEADER).map_err(|error| unreadable(&error, self.value, version))
    }
}

fn unreadable(error: &DecodeError, header: &[u8], expected: u64) -> Refusal {
    #[derive(Deserialize)]
    struct Versioned {
        #[serde(rename = "x402Version")]
        version: u64,
    }
    // A byte order mark, in base64.
    if header.starts_with(b"77u/") {
        let detail = "the header's JSON begins with a byte order mark (U+FEFF): leave it out";
        return Refusal::malformed(Reason::InvalidPayload, detail);
    }
    if let DecodeError::Json(_) = error
        && let Ok(Versioned { version }) = decode_header(header, header.len())
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
    use crate::{
        charge::{Why, exact::PresentedPayment},
        protocol::v1,
    };

    const ACCEPTED: &str = r#""accepted":{"scheme":"exact"}"#;
    const SIGNATURE: &str = r#""signature":"0x0a0B""#;
    const FROM: &str = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";

    fn authorization(from: &str) -> String {
        format!(
            r#""authorization":{{"from":"{from}","to":"0x90f79bf6eb2c4f870365e785982e1f101e93b906","value":"1000","validAfter":"0","validBefore":"1800000120","nonce":"0x00000000000000000000000000000000000000000000000000000000000000ab"}}"#
        )
    }

    fn read(json: &str) -> Result<PresentedPayment, Refusal> {
        let value = STANDARD.encode_to_string(json);
        RawHeader { value: value.as_bytes(), is_v1: false }.read().map(PresentedPayment::new)
    }

    fn v2(fields: &[&str]) -> Result<PresentedPayment, Refusal> {
        read(&format!(r#"{{"x402Version":2,{}}}"#, fields.join(",")))
    }

    fn v1(fields: &[&str]) -> Result<v1::PaymentPayloadV1, Refusal> {
        let value = STANDARD.encode_to_string(format!(r#"{{"x402Version":1,{}}}"#, fields.join(",")));
        RawHeader { value: value.as_bytes(), is_v1: true }.decode(1)
    }

    fn payload(fields: &[&str]) -> String {
        format!(r#""payload":{{{}}}"#, fields.join(","))
    }

    #[test]
    fn no_key_may_be_there_twice() {
        let payload_once = payload(&[SIGNATURE, &authorization(FROM)]);
        assert!(v2(&[ACCEPTED, &payload_once]).unwrap().payload().is_ok());
        assert!(v1(&[r#""scheme":"exact""#, r#""network":"base""#, &payload_once]).unwrap().payload.read().is_ok());
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
        let Err(refusal) = read(&format!("\u{feff}{payment}")) else { panic!("it is read") };
        let Why::Malformed(rejection) = refusal.why() else { panic!("{refusal}") };
        assert_eq!(rejection.reason, Reason::InvalidPayload);
        assert!(rejection.detail.contains("byte order mark"), "{}", rejection.detail);
    }

    #[test]
    fn nothing_may_follow_a_payment() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        assert!(read(&payment).is_ok());
        for text in [format!("{payment}{{}}"), format!("{payment},"), payment[..payment.len() - 1].to_owned()] {
            assert!(read(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn longer_header_than_the_limit_is_refused() {
        let payment = format!(r#"{{"x402Version":2,{ACCEPTED},{}}}"#, payload(&[SIGNATURE, &authorization(FROM)]));
        let longest = STANDARD.estimated_decoded_length(MAX_PAYMENT_HEADER);
        assert!(read(&format!("{payment:longest$}")).is_ok());
        assert!(read(&format!("{payment:0$}", longest + 1)).is_err());
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
