//! What must be true of extensions that are echoed.

#[cfg(any(feature = "server", test))]
use serde_json::Map;
use serde_json::Value;

/// The first extension of which `echoed` does not repeat what was `offered`. A payer may leave an extension out and may add to
/// it; what the server said in its `info` it may neither change nor take away (x402 v2, section 5.2).
#[cfg(any(feature = "server", test))]
pub(crate) fn altered<'a>(offered: &'a Map<String, Value>, echoed: &Map<String, Value>) -> Option<&'a str> {
    let altered = offered
        .iter()
        .find(|(name, offered)| echoed.get(*name).is_some_and(|echoed| !contains(info_of(echoed), info_of(offered))));
    altered.map(|(name, _)| name.as_str())
}

/// Whether two values mean the same, however they are written: `1.0` is 1.
pub(crate) fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| is_same(a, b)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b)),
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
        _ => a == b,
    }
}

#[cfg(any(feature = "server", test))]
fn info_of(extension: &Value) -> &Value {
    extension.get("info").unwrap_or(extension)
}

#[cfg(any(feature = "server", test))]
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(name, part)| whole.get(name).is_some_and(|whole| contains(whole, part)))
        }
        _ => is_same(whole, part),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(echoed: Value) -> Option<String> {
        let offered =
            json!({ "a": { "info": { "x": 1, "list": [1, 2], "deep": { "y": "z" } }, "schema": {} }, "b": 7 });
        altered(offered.as_object().unwrap(), echoed.as_object().unwrap()).map(str::to_owned)
    }

    #[test]
    fn what_was_offered_may_be_left_out_or_added_to() {
        for echoed in [
            json!({}),
            json!({ "b": 7.0 }),
            json!({ "c": "new" }),
            json!({ "a": { "info": { "x": 1.0, "list": [1, 2], "deep": { "y": "z", "more": [] }, "id": "mine" } } }),
        ] {
            assert_eq!(told(echoed.clone()), None, "{echoed}");
        }
    }

    #[test]
    fn what_was_offered_may_not_be_changed_or_taken_away() {
        for info in [
            json!({}),
            json!({ "x": 2, "list": [1, 2], "deep": { "y": "z" } }),
            json!({ "x": 1, "list": [1, 2, 3], "deep": { "y": "z" } }),
            json!({ "x": 1, "list": [1, 2], "deep": {} }),
            json!({ "x": 1, "list": [1, 2], "deep": null }),
            json!([1]),
        ] {
            assert_eq!(told(json!({ "a": { "info": info } })).as_deref(), Some("a"), "{info}");
        }
        assert_eq!(told(json!({ "b": "7" })).as_deref(), Some("b"));
    }
}
