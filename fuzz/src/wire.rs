//! Messages, written and read.

use std::{collections::BTreeMap, fmt::Debug};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, value::RawValue};
use tower_x402::protocol::{DecodeError, Verbatim, decode_header, encode_header};

/// The value of a header: the input itself or, if it looks like the JSON of a message, the same in base64.
pub(super) fn as_header(input: &[u8]) -> Vec<u8> {
    if input.trim_ascii_start().starts_with(b"{") { BASE64_STANDARD.encode(input).into_bytes() } else { input.to_vec() }
}

pub(super) fn json<T: Serialize>(message: &T) -> Vec<u8> {
    serde_json::to_vec(message).expect("a message can be written")
}

/// The JSON inside a header, byte for byte. Where fields that nobody reads are not UTF-8 it is what `message` is written as.
pub(super) fn inside<T: Serialize>(header: &[u8], message: &T) -> Vec<u8> {
    decode_header::<Box<RawValue>>(header, header.len()).map_or_else(|_| json(message), |raw| raw.get().into())
}

/// A message, and what it becomes when it is written and read again, in a body and in a header; `None` if it is none.
pub(super) fn reread<T: Serialize + DeserializeOwned>(text: &[u8]) -> Option<(T, T)> {
    let message: T = serde_json::from_slice(text).ok()?;
    let written = json(&message);
    let again: T = serde_json::from_slice(&written).expect("what was written can be read");
    assert_eq!(show(&json(&again)), show(&written));

    let header = encode_header(&message).expect("a message can be written");
    let size = header.len();
    let bare = header.trim_end_matches('=');
    for value in [header.as_str(), bare] {
        let decoded: T = decode_header(value.as_bytes(), size).expect("what was written can be read");
        assert_eq!(show(&json(&decoded)), show(&written));
    }
    let refused = decode_header::<T>(header.as_bytes(), size - 1);
    assert!(matches!(refused, Err(DecodeError::TooLarge { .. })), "a limit is a limit");
    Some((message, again))
}

/// Writes and reads a value, which must not change it.
pub(super) fn same<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) {
    let read: T = serde_json::from_slice(&json(value)).expect("what was written can be read");
    assert_eq!(&read, value);
}

/// Text that is to be echoed is what came, byte for byte, and is written so.
pub(super) fn is_echoed<T>(came: &[u8], part: &Verbatim<T>) {
    assert!(String::from_utf8_lossy(came).contains(part.text()), "{}", part.text());
    assert_eq!(show(&json(part)), part.text());
}

/// Extensions return as they came, each byte for byte, except that an id may be in the place that is made for it.
pub(super) fn is_echoed_but_for_id(came: &str, sent: &str) {
    const NAME: &str = "payment-identifier";
    if came == sent {
        return;
    }
    let parts =
        |text: &str| serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(text).expect("only objects hold ids");
    let texts = |parts: BTreeMap<String, Box<RawValue>>| -> Vec<_> {
        parts.into_iter().map(|(name, part)| (name, part.get().to_owned())).collect()
    };
    let (mut came, mut sent) = (parts(came), parts(sent));
    let without_id = |part: Option<Box<RawValue>>| {
        let mut own = parts(part.expect("it was offered").get());
        let mut info = parts(own.remove("info").expect("it was offered so").get());
        info.remove("id");
        (texts(info), texts(own))
    };
    assert_eq!(without_id(sent.remove(NAME)), without_id(came.remove(NAME)));
    assert_eq!(texts(sent), texts(came));
}

/// How deeply arrays and objects are nested.
pub(super) fn depth(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

fn show(text: &[u8]) -> &str {
    std::str::from_utf8(text).expect("JSON is UTF-8")
}
