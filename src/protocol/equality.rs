//! Equality of JSON values.

use serde_json::{Number, Value};

/// Returns `true` if two values are equal as JSON: `1.0` equals 1. Integers that are no floating point number equal themselves only.
pub fn is_same_json(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| is_same_json(a, b)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same_json(a, b)),
        (Value::Number(x), Value::Number(y)) => x == y || (is_exact(x) && is_exact(y) && x.as_f64() == y.as_f64()),
        _ => a == b,
    }
}

/// Returns `true` if the number is the floating point number that it is turned into.
fn is_exact(number: &Number) -> bool {
    const LARGEST: u64 = 1 << f64::MANTISSA_DIGITS;
    let magnitude = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
    magnitude.is_none_or(|magnitude| magnitude < LARGEST)
}
