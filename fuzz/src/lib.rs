//! What must hold for any bytes from the network, whoever sent them.
//!
//! Each function takes arbitrary bytes and panics if a promise is broken. The fuzz targets call them with what libFuzzer
//! makes up; the test `fuzz_corpus` calls them with the seeds and with mutations of them, on stable Rust.

mod buyer;
mod seller;
mod wire;

use alloy_primitives::{B256, U256};
use serde_json::{Map, Value, value::RawValue};
use tower_x402::{
    Network,
    protocol::{
        DecodeError, ExactOffer, FacilitatorRequest, MAX_PAYMENT_HEADER, PaymentId, PaymentPayload, PaymentRequired,
        PaymentRequirements, SettlementResponse, SupportedKind, SupportedResponse, Verbatim, VerifyResponse,
        decode_header, encode_header, header_name, v1,
    },
    vouchers::{ChannelOffer, ChannelPayload, ChannelState, Escrow, RefundRequest},
};

use self::wire::{depth, is_echoed, reread, same};

/// How far an input got. Seeds are checked for it, so that they do not quietly cease to reach what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// It is no message.
    Unread,
    /// It is one, and nothing came of it.
    Read,
    /// A payment that passed every local check but the signature's: the chain was asked.
    Judged,
    /// A payment that was reserved, an offer that was paid, an answer that counts as settlement.
    Believed,
}

/// A promise about any bytes: panics if they break it.
pub type Property = fn(&[u8]) -> Depth;

/// Every property, by the name of its fuzz target and of its corpus.
pub const PROPERTIES: [(&str, Property); 7] = [
    ("payment_v1", payment_v1),
    ("payment_v2", payment_v2),
    ("required_v1", required_v1),
    ("required_v2", required_v2),
    ("answers", answers),
    ("card", card),
    ("channel", channel),
];

/// `X-PAYMENT`, or the JSON inside it: written as it is read, and good for nothing but what was signed.
pub fn payment_v1(input: &[u8]) -> Depth {
    let value = &wire::as_header(input);
    let message = decode_header::<v1::PaymentPayloadV1>(value, MAX_PAYMENT_HEADER).ok();
    let is_whole = message.as_ref().map(|message| {
        let json = wire::inside(value, message);
        reread::<v1::PaymentPayloadV1>(&json);
        is_echoed(&json, &message.payload);
        message.payload.read().map(|payload| same(&payload)).is_ok()
    });
    seller::present(header_name::X_PAYMENT, value, is_whole)
}

/// `PAYMENT-SIGNATURE`, or the JSON inside it: likewise.
pub fn payment_v2(input: &[u8]) -> Depth {
    let value = &wire::as_header(input);
    let message = decode_header::<PaymentPayload>(value, MAX_PAYMENT_HEADER).ok();
    let is_whole = message.as_ref().map(|message| {
        let json = wire::inside(value, message);
        reread::<PaymentPayload>(&json);
        is_echoed(&json, &message.accepted);
        is_echoed(&json, &message.payload);
        message.resource.iter().for_each(|resource| is_echoed(&json, resource));
        message.extensions.iter().for_each(|extensions| is_echoed(&json, extensions));
        let offer = offer(&message.accepted);
        let payload = message.payload.read().map(|payload| same(&payload));
        offer.is_some() && payload.is_ok() && has_good_id(&message.extensions)
    });
    seller::present(header_name::PAYMENT_SIGNATURE, value, is_whole)
}

/// The body of a 402 to a client of v1: paid within the budget or not at all.
pub fn required_v1(input: &[u8]) -> Depth {
    let mut depth = Depth::Unread;
    if let Some((message, _)) = reread::<v1::PaymentRequiredV1>(input) {
        for offer in &message.accepts {
            is_echoed(input, offer);
            if let Ok(offer) = offer.read() {
                same(&offer);
            }
        }
        depth = Depth::Read;
    }
    buyer::asked_in_v1(input).max(depth)
}

/// `PAYMENT-REQUIRED`, or the JSON inside it: echoed to the byte, and paid within the budget or not at all.
pub fn required_v2(input: &[u8]) -> Depth {
    if let Some((message, _)) = reread::<PaymentRequired>(input) {
        same(&message.resource);
        for accepted in &message.accepts {
            is_echoed(input, accepted);
            offer(accepted);
        }
        message.extensions.iter().for_each(|extensions| is_echoed(input, extensions));
    }
    buyer::asked(&wire::as_header(input))
}

/// What a facilitator answers, and `PAYMENT-RESPONSE`: a payer takes it for a settlement only if it says so of its payment.
pub fn answers(input: &[u8]) -> Depth {
    let mut read = false;
    read |= reread::<VerifyResponse>(input).map(|(first, second)| assert_eq!(first, second)).is_some();
    read |= reread::<SupportedResponse>(input).map(|(first, second)| assert_eq!(first, second)).is_some();
    read |= reread::<v1::SettlementResponseV1>(input).map(|(first, second)| assert_eq!(first, second)).is_some();
    read |= reread::<FacilitatorRequest>(input).is_some();
    if let Some((first, second)) = reread::<SettlementResponse>(input) {
        assert_eq!(first, second);
        first.extensions.iter().for_each(|extensions| is_echoed(input, extensions));
        let in_v1 = v1::SettlementResponseV1::from(&first);
        same(&in_v1);
        assert_eq!((in_v1.success, &in_v1.transaction), (first.success, &first.transaction));
        read = true;
    }
    buyer::told(&wire::as_header(input)).max(if read { Depth::Read } else { Depth::Unread })
}

/// JSON of any form and size in the places that the protocol leaves open, such as an agent's card of 64 KiB.
pub fn card(input: &[u8]) -> Depth {
    let Ok(card) = std::str::from_utf8(input) else { return Depth::Unread };
    let Ok(raw) = serde_json::from_str::<&RawValue>(card) else { return Depth::Unread };
    // Around it a payment that is good, and an offer to pay. Neither is worth less or more for it, unless it changes what was offered.
    let payment = seller::genuine_with("extensions", raw.get());
    let header = encode_header(&raw_json(&payment)).expect("JSON can be written");
    let fits = header.len() <= MAX_PAYMENT_HEADER;
    let mut is_kept = true;
    let is_whole = match decode_header::<PaymentPayload>(header.as_bytes(), MAX_PAYMENT_HEADER) {
        Ok(message) => {
            assert!(fits);
            // What is null is absent.
            assert_eq!(message.extensions.as_ref().map_or("null", Verbatim::text), raw.get());
            reread::<PaymentPayload>(payment.as_bytes());
            is_kept = keeps_the_offer(&message.extensions);
            Some(has_good_id(&message.extensions))
        }
        Err(DecodeError::TooLarge { size, limit }) => {
            assert!(!fits && size == header.len() && limit < size);
            None
        }
        Err(error) => panic!("{error}"),
    };
    let reached = seller::present(header_name::PAYMENT_SIGNATURE, header.as_bytes(), is_whole);
    let expected = match is_whole {
        Some(true) if is_kept => Depth::Believed,
        // Refused, since it was told that something else was offered.
        Some(true) => Depth::Read,
        _ => Depth::Unread,
    };
    assert_eq!(reached, expected);
    buyer::asked(encode_header(&raw_json(&buyer::demand_with(raw.get()))).expect("JSON can be written").as_bytes());

    let Ok(read) = serde_json::from_str::<Map<String, Value>>(raw.get()) else { return Depth::Read };
    assert!(read.values().all(|value| depth(value) < 128), "a reader's stack is bounded");
    let mut kind = SupportedKind::new(2, "exact", "base");
    kind.extra = Some(read.clone());
    same(&kind);
    let id = PaymentId::of_random(B256::repeat_byte(7));
    let offered: Verbatim<Map<String, Value>> = serde_json::from_str(raw.get()).expect("it is JSON");
    if let Some(named) = id.add_to(&offered) {
        assert_eq!(PaymentId::of(&named.read().expect("what was written can be read")), Ok(Some(id)));
        wire::is_echoed_but_for_id(raw.get(), named.text());
    }
    if let Ok(Some(id)) = PaymentId::of(&read) {
        assert!((16..=128).contains(&id.as_str().len()));
    }
    Depth::Believed
}

/// `payload` of a payment through a channel, `extra` of an offer, or a channel's state: written as it is read, and only what the key of the very
/// channel signed is a voucher of it.
pub fn channel(input: &[u8]) -> Depth {
    let mut depth = Depth::Unread;
    if let Some((first, second)) = reread::<ChannelState>(input) {
        assert_eq!(first, second);
        depth = Depth::Read;
    }
    if let Ok(extra) = serde_json::from_slice::<Map<String, Value>>(input)
        && let Ok(offer) = ChannelOffer::try_from(&extra)
    {
        same(&offer);
        depth = Depth::Read;
    }
    let Some((payload, again)) = reread::<ChannelPayload>(input) else { return depth };
    assert_eq!(payload, again);
    let (config, voucher) = match &payload {
        ChannelPayload::Deposit { channel_config, voucher, .. }
        | ChannelPayload::Voucher { channel_config, voucher } => (channel_config, voucher),
        ChannelPayload::Refund(refund) => {
            let RefundRequest { channel_config, voucher, .. } = &**refund;
            (channel_config, voucher)
        }
        _ => return Depth::Read,
    };
    let escrow = Escrow::on(Network::BASE_SEPOLIA);
    let is_signed = voucher.is_of(config, &escrow);
    if voucher.channel_id != escrow.channel_id(config) {
        assert!(!is_signed);
        return Depth::Read;
    }
    assert_eq!(is_signed, voucher.signer(&escrow) == Some(config.voucher_signer()));
    if is_signed { Depth::Believed } else { Depth::Judged }
}

/// An offer means the same after it is read and written; `None` if it is not an offer in the protocol's form.
fn offer(text: &Verbatim<PaymentRequirements>) -> Option<PaymentRequirements> {
    let requirements = text.read().ok()?;
    same(&requirements);
    if let Ok(offer) = ExactOffer::try_from(&requirements) {
        let written = offer.to_requirements();
        assert_eq!(ExactOffer::try_from(&written).as_ref(), Ok(&offer));
        let significant = |digits: &str| digits.trim_start_matches('0').to_owned();
        assert_eq!(significant(&written.amount), significant(&requirements.amount));
        // Read with 0x, 0X or neither, in any case.
        let digits = |text: &str| text.to_ascii_lowercase().trim_start_matches("0x").to_owned();
        assert_eq!(digits(&written.asset), digits(&requirements.asset));
        assert_eq!(digits(&written.pay_to), digits(&requirements.pay_to));
        assert_eq!(written.network.parse(), requirements.network.parse::<Network>());
        assert_eq!(written.max_timeout_seconds, requirements.max_timeout_seconds);
        // An offer that is paid by a permit may leave out the token's domain.
        let by_permit = requirements.scheme != "exact"
            || requirements.extra.get("assetTransferMethod").is_some_and(|method| method == "permit2");
        for field in ["name", "version"] {
            let [again, first] = [&written, &requirements].map(|offer| offer.extra.get(field));
            assert!(again == first || by_permit && again.is_none() && first.is_some_and(|text| text == ""));
        }
        assert!(offer.amount <= U256::MAX && requirements.amount.len() <= 78);
    }
    Some(requirements)
}

/// Whether a payment's extensions can be read where they are looked at for an id, and hold none that is none or is too long.
fn has_good_id(extensions: &Option<Verbatim<Map<String, Value>>>) -> bool {
    const LONGEST: usize = 8 * 1024;
    let is_short = |text: &str| {
        let texts: std::collections::BTreeMap<String, Box<RawValue>> = serde_json::from_str(text).unwrap_or_default();
        texts.get("payment-identifier").is_none_or(|text| text.get().len() <= LONGEST)
    };
    extensions.as_ref().is_none_or(|extensions| {
        extensions.read().is_ok_and(|all| PaymentId::of(&all).is_ok()) && is_short(extensions.text())
    })
}

/// Whether a payment's extensions leave as it was what the seller offered: that an id may be given.
fn keeps_the_offer(extensions: &Option<Verbatim<Map<String, Value>>>) -> bool {
    let Some(Ok(extensions)) = extensions.as_ref().map(Verbatim::read) else { return true };
    let echoed = extensions.get("payment-identifier");
    echoed.is_none_or(|echoed| echoed.get("info").unwrap_or(echoed).get("required") == Some(&Value::Bool(false)))
}

fn raw_json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).expect("JSON inside JSON is JSON")
}
