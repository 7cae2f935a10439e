//! Payment headers of which only the payload is new.

use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, value::RawValue};

use crate::protocol::{PaymentRequirements, ResourceInfo, V2, Verbatim};

/// So many clients write the rest of it in a way of their own.
const KNOWN: usize = 4;
/// The rest of most payments has half of this, in bytes.
const LONGEST: usize = 2_048;

/// What a payment of v2 says besides its payload: what a client was told, in the client's words.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) accepted: Verbatim<PaymentRequirements>,
    pub(super) resource: Option<Verbatim<ResourceInfo>>,
    pub(super) extensions: Option<Verbatim<Map<String, Value>>>,
}

/// A payment as it was taken apart.
pub(super) struct Taken<T> {
    pub(super) frame: Arc<Frame>,
    pub(super) payload: Result<T, serde_json::Error>,
    /// Where in the text it is, if its frame was not known.
    pub(super) place: Option<Range<usize>>,
}

/// Frames of payments that fit an offer, whoever signed them. What a client writes around a payload it writes around the next one, too,
/// and comparing is a tenth of reading. The first few are kept: who sends others pays with a microsecond of ours, not with a lock.
/// Where each request has a resource or a price of its own, they help nobody.
#[derive(Default)]
pub(super) struct Frames([OnceLock<Known>; KNOWN]);

struct Known {
    head: Box<str>,
    tail: Box<str>,
    frame: Arc<Frame>,
}

impl Frames {
    /// Takes a payment apart; `usual` may be faster than serde at reading its payload. The error is that of its frame.
    pub(super) fn take<T: DeserializeOwned>(
        &self,
        text: &str,
        usual: impl Fn(&str) -> Option<T>,
    ) -> Result<Taken<T>, serde_json::Error> {
        let read = |payload: &str| usual(payload).map_or_else(|| serde_json::from_str(payload), Ok);
        for known in self.0.iter().map_while(OnceLock::get) {
            // Between the two stood one value of JSON: where one stands now, nothing else can. Where it is none, the text may still be
            // a payment, with more in it than the known one had.
            if let Some(rest) = text.strip_prefix(&*known.head)
                && let Some(payload) = rest.strip_suffix(&*known.tail)
                && let Ok(payload) = read(payload)
            {
                return Ok(Taken { frame: known.frame.clone(), payload: Ok(payload), place: None });
            }
        }
        let Whole { resource, accepted, payload, extensions, .. } = serde_json::from_str(text)?;
        // The one is a part of the other.
        let start = payload.get().as_ptr().addr() - text.as_ptr().addr();
        Ok(Taken {
            frame: Arc::new(Frame { accepted, resource, extensions }),
            payload: read(payload.get()),
            place: Some(start..start + payload.get().len()),
        })
    }

    /// Keeps what stands around the payload at `place` in `text`, if there is room.
    pub(super) fn keep(&self, text: &str, place: Range<usize>, frame: &Arc<Frame>) {
        let (Some(head), Some(tail)) = (text.get(..place.start), text.get(place.end..)) else { return };
        let Some(free) = self.0.iter().find(|place| place.get().is_none()) else { return };
        if head.len() + tail.len() <= LONGEST {
            // Whoever was faster may have kept the same; both are right.
            let _ = free.set(Known { head: head.into(), tail: tail.into(), frame: frame.clone() });
        }
    }
}

/// [`PaymentPayload`](crate::protocol::PaymentPayload), taken apart in one pass.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Whole<'t> {
    #[expect(dead_code, reason = "read to be refused if it is another")]
    x402_version: V2,
    resource: Option<Verbatim<ResourceInfo>>,
    accepted: Verbatim<PaymentRequirements>,
    #[serde(borrow)]
    payload: &'t RawValue,
    extensions: Option<Verbatim<Map<String, Value>>>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(accepted: &str, payload: &str, tail: &str) -> String {
        format!(r#"{{"x402Version":2,"accepted":{accepted},"payload":{payload}{tail}}}"#)
    }

    fn take(frames: &Frames, text: &str) -> Result<(bool, Arc<Frame>, Value), serde_json::Error> {
        let Taken { frame, payload, place } = frames.take(text, |_| None)?;
        Ok((place.is_none(), frame, payload?))
    }

    fn learn(frames: &Frames, text: &str) {
        let Taken { frame, payload, place } = frames.take(text, |_| None).unwrap();
        let (place, payload): (_, Value) = (place.unwrap(), payload.unwrap());
        assert_eq!(serde_json::from_str::<Value>(&text[place.clone()]).unwrap(), payload);
        frames.keep(text, place, &frame);
    }

    #[test]
    fn of_what_is_known_only_the_payload_is_read() {
        let frames = Frames::default();
        learn(&frames, &text(r#"{"a":1}"#, r#"{"n":1}"#, ""));
        let (is_known, frame, payload) = take(&frames, &text(r#"{"a":1}"#, r#" {"n":2}"#, "")).unwrap();
        assert_eq!((is_known, frame.accepted.text(), payload), (true, r#"{"a":1}"#, json!({ "n": 2 })));
        let (is_known, frame, _) = take(&frames, &text(r#"{"a":2}"#, "{}", "")).unwrap();
        assert_eq!((is_known, frame.accepted.text()), (false, r#"{"a":2}"#));
    }

    #[test]
    fn more_than_is_known_is_read_as_if_nothing_were() {
        let frames = Frames::default();
        learn(&frames, &text("{}", "{}", ""));
        let (is_known, frame, payload) = take(&frames, &text("{}", r#"{"n":1}"#, r#","extensions":{"x":1}"#)).unwrap();
        assert_eq!((is_known, payload), (false, json!({ "n": 1 })));
        assert_eq!(frame.extensions.as_ref().unwrap().text(), r#"{"x":1}"#);
        for (payload, tail) in [("{}", r#","accepted":{"a":1}"#), ("{}", r#","payload":{}"#), ("", ""), ("{", "")] {
            let text = text("{}", payload, tail);
            assert!(take(&frames, &text).is_err(), "{text}");
        }
    }

    #[test]
    fn few_are_kept_and_none_that_is_long() {
        let frames = Frames::default();
        learn(&frames, &text(&format!("{{{}}}", " ".repeat(LONGEST)), "{}", ""));
        assert!(frames.0[0].get().is_none());
        for spaces in 0..10 {
            learn(&frames, &text(&format!("{{{}}}", " ".repeat(spaces)), "{}", ""));
        }
        assert!(frames.0.iter().all(|place| place.get().is_some()));
    }
}
