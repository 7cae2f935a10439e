//! A validator for the part of JSON Schema (draft 2020-12) that descriptions of requests need.
//!
//! The schemas come from strangers. So nothing is fetched, no regular expression is run, and the work is bounded: the crate `jsonschema`
//! promises none of these.

use std::collections::HashSet;

use serde_json::{Map, Value};
use tower_x402::protocol::is_same_json;

/// The greatest depth of nested schemas and values, including references.
const MAX_DEPTH: usize = 48;
/// The bound on the work, in [steps](Checker::charge).
const MAX_STEPS: usize = 320_000;
/// The steps to apply a schema to a value, apart from their contents.
const APPLYING: usize = 16;
/// The steps to write what is read in one step.
const WRITING: usize = 4;
/// The bytes of text that are read in one step.
const TEXT: usize = 64;
/// Keywords that constrain the value and are not supported. Unknown keywords do not constrain it.
const NOT_SUPPORTED: [&str; 17] = [
    "$dynamicRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "multipleOf",
    "pattern",
    "patternProperties",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$recursiveRef",
];

/// Why a value does not match a schema, or cannot be checked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// The value does not match.
    #[error("{path}: does not match the schema's {keyword:?}")]
    Mismatch {
        /// The place in the value, as a JSON pointer.
        path: String,
        /// The keyword that does not match.
        keyword: &'static str,
    },
    /// The schema has a keyword that is not supported, or refers to another document.
    #[error("the schema's {0:?} is not supported")]
    NotSupported(String),
    /// The schema is invalid.
    #[error("the schema's {0:?} is invalid")]
    InvalidSchema(&'static str),
    /// The schema has too many parts, or is nested too deep, to be checked.
    #[error("the schema is too large or nested too deep")]
    TooLarge,
}

/// Checks that `value` matches `schema`.
///
/// # Errors
/// [`SchemaError`] if it does not, or if it cannot be checked.
pub(crate) fn check(schema: &Value, value: &Value) -> Result<(), SchemaError> {
    check_references(schema, 0)?;
    Checker { root: schema, steps: 0 }.check(schema, value, "", 0)
}

/// Refuses references to other documents.
fn check_references(schema: &Value, depth: usize) -> Result<(), SchemaError> {
    if depth > 2 * MAX_DEPTH {
        return Err(SchemaError::TooLarge);
    }
    match schema {
        Value::Array(all) => all.iter().try_for_each(|one| check_references(one, depth + 1)),
        Value::Object(all) => all.iter().try_for_each(|(name, one)| {
            let refers = name == "$ref" || name == "$id";
            if refers && !one.as_str().is_some_and(|text| text.starts_with('#')) {
                return Err(SchemaError::NotSupported(name.clone()));
            }
            check_references(one, depth + 1)
        }),
        _ => Ok(()),
    }
}

struct Checker<'a> {
    root: &'a Value,
    steps: usize,
}

type Checked = Result<(), SchemaError>;

impl<'a> Checker<'a> {
    /// Counts steps before they are taken. A step takes about as long as reading a number.
    fn charge(&mut self, steps: usize) -> Checked {
        self.steps = self.steps.saturating_add(steps);
        if self.steps > MAX_STEPS { Err(SchemaError::TooLarge) } else { Ok(()) }
    }

    fn check(&mut self, schema: &'a Value, value: &Value, path: &str, depth: usize) -> Checked {
        self.charge(APPLYING + path.len() / TEXT)?;
        if depth > MAX_DEPTH {
            return Err(SchemaError::TooLarge);
        }
        let schema = match schema {
            Value::Bool(true) => return Ok(()),
            Value::Bool(false) => return Err(mismatch(path, "false")),
            Value::Object(schema) => schema,
            _ => return Err(SchemaError::InvalidSchema("schema")),
        };
        if let Some(keyword) = NOT_SUPPORTED.iter().find(|keyword| schema.contains_key(**keyword)) {
            return Err(SchemaError::NotSupported((*keyword).to_owned()));
        }
        if let Some(reference) = schema.get("$ref") {
            self.charge(weight(reference))?;
            let target = reference.as_str().and_then(|text| self.root.pointer(text.strip_prefix('#')?));
            let target = target.ok_or_else(|| SchemaError::NotSupported("$ref".to_owned()))?;
            self.check(target, value, path, depth + 1)?;
        }
        self.check_plain(schema, value, path)?;
        self.check_combined(schema, value, path, depth)?;
        match value {
            Value::Object(members) => self.check_object(schema, members, path, depth),
            Value::Array(items) => self.check_array(schema, items, path, depth),
            _ => Ok(()),
        }
    }

    /// Checks the keywords that do not look into objects and arrays.
    fn check_plain(&mut self, schema: &Map<String, Value>, value: &Value, path: &str) -> Checked {
        if let Some(kind) = schema.get("type") {
            let is_met = match kind {
                Value::String(kind) => is_of(kind, value),
                Value::Array(kinds) => {
                    self.charge(kinds.len())?;
                    kinds.iter().filter_map(Value::as_str).any(|kind| is_of(kind, value))
                }
                _ => return Err(SchemaError::InvalidSchema("type")),
            };
            if !is_met {
                return Err(mismatch(path, "type"));
            }
        }
        if let Some(expected) = schema.get("const")
            && !self.is_same(expected, value)?
        {
            return Err(mismatch(path, "const"));
        }
        if let Some(allowed) = schema.get("enum") {
            let allowed = allowed.as_array().ok_or(SchemaError::InvalidSchema("enum"))?;
            let mut is_met = false;
            for allowed in allowed {
                is_met = self.is_same(allowed, value)?;
                if is_met {
                    break;
                }
            }
            if !is_met {
                return Err(mismatch(path, "enum"));
            }
        }
        if let Value::String(text) = value {
            self.charge(text.len() / TEXT)?;
            check_size(schema, text.chars().count(), path, "minLength", "maxLength")?;
        }
        let Some(number) = value.as_f64() else { return Ok(()) };
        for keyword in ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"] {
            let Some(bound) = schema.get(keyword) else { continue };
            let bound = bound.as_f64().ok_or(SchemaError::InvalidSchema(keyword))?;
            let is_met = match keyword {
                "minimum" => number >= bound,
                "maximum" => number <= bound,
                "exclusiveMinimum" => number > bound,
                _ => number < bound,
            };
            if !is_met {
                return Err(mismatch(path, keyword));
            }
        }
        Ok(())
    }

    /// Compares two values. It reads no more than the size of the expected one.
    fn is_same(&mut self, expected: &Value, value: &Value) -> Result<bool, SchemaError> {
        self.charge(weight(expected))?;
        Ok(is_same_json(expected, value))
    }

    fn check_combined(&mut self, schema: &'a Map<String, Value>, value: &Value, path: &str, depth: usize) -> Checked {
        for keyword in ["allOf", "anyOf", "oneOf"] {
            let Some(all) = schema.get(keyword) else { continue };
            let all = all.as_array().filter(|all| !all.is_empty()).ok_or(SchemaError::InvalidSchema(keyword))?;
            let mut met = 0;
            for one in all {
                met += usize::from(self.is_met(one, value, path, depth + 1)?);
            }
            let is_met = match keyword {
                "allOf" => met == all.len(),
                "anyOf" => met > 0,
                _ => met == 1,
            };
            if !is_met {
                return Err(mismatch(path, keyword));
            }
        }
        match schema.get("not") {
            Some(not) if self.is_met(not, value, path, depth + 1)? => Err(mismatch(path, "not")),
            _ => Ok(()),
        }
    }

    /// Returns `true` if the value matches. Fails only if it cannot be checked.
    fn is_met(&mut self, schema: &'a Value, value: &Value, path: &str, depth: usize) -> Result<bool, SchemaError> {
        match self.check(schema, value, path, depth) {
            Ok(()) => Ok(true),
            Err(SchemaError::Mismatch { .. }) => Ok(false),
            Err(other) => Err(other),
        }
    }

    fn check_object(
        &mut self,
        schema: &'a Map<String, Value>,
        members: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Checked {
        check_size(schema, members.len(), path, "minProperties", "maxProperties")?;
        self.charge(members.iter().map(|(name, _)| 1 + name.len() / TEXT).sum())?;
        if let Some(required) = schema.get("required") {
            let required = required.as_array().ok_or(SchemaError::InvalidSchema("required"))?;
            self.charge(required.len())?;
            for name in required {
                let name = name.as_str().ok_or(SchemaError::InvalidSchema("required"))?;
                if !members.contains_key(name) {
                    return Err(mismatch(path, "required"));
                }
            }
        }
        let properties = match schema.get("properties") {
            Some(properties) => Some(properties.as_object().ok_or(SchemaError::InvalidSchema("properties"))?),
            None => None,
        };
        for (name, member) in members {
            let path = || format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"));
            match (properties.and_then(|properties| properties.get(name)), schema.get("additionalProperties")) {
                (Some(schema), _) => self.check(schema, member, &path(), depth + 1)?,
                (None, Some(Value::Bool(false))) => return Err(mismatch(&path(), "additionalProperties")),
                (None, Some(schema)) => self.check(schema, member, &path(), depth + 1)?,
                (None, None) => {}
            }
        }
        Ok(())
    }

    fn check_array(&mut self, schema: &'a Map<String, Value>, items: &[Value], path: &str, depth: usize) -> Checked {
        check_size(schema, items.len(), path, "minItems", "maxItems")?;
        let prefix = match schema.get("prefixItems") {
            Some(prefix) => prefix.as_array().ok_or(SchemaError::InvalidSchema("prefixItems"))?.as_slice(),
            None => &[],
        };
        for (index, item) in items.iter().enumerate() {
            if let Some(schema) = prefix.get(index).or_else(|| schema.get("items")) {
                self.check(schema, item, &format!("{path}/{index}"), depth + 1)?;
            }
        }
        if schema.get("uniqueItems") == Some(&Value::Bool(true)) {
            // Most unequal items have unequal texts. Comparing all pairs of a long list would take too long.
            let are_few = items.len() <= 64;
            let compared = if are_few { items.len() } else { 0 };
            self.charge(items.iter().map(weight).sum::<usize>().saturating_mul(WRITING + compared))?;
            let texts: HashSet<String> = items.iter().map(Value::to_string).collect();
            let is_pair = |(index, item): (usize, &Value)| items[..index].iter().any(|other| is_same_json(other, item));
            if texts.len() < items.len() || (are_few && items.iter().enumerate().any(is_pair)) {
                return Err(mismatch(path, "uniqueItems"));
            }
            if !are_few {
                return Err(SchemaError::TooLarge);
            }
        }
        Ok(())
    }
}

fn check_size(
    schema: &Map<String, Value>,
    size: usize,
    path: &str,
    least: &'static str,
    most: &'static str,
) -> Checked {
    let bound = |keyword| match schema.get(keyword) {
        Some(bound) => bound.as_f64().map(Some).ok_or(SchemaError::InvalidSchema(keyword)),
        None => Ok(None),
    };
    let size = size as f64;
    if bound(least)?.is_some_and(|least| size < least) {
        return Err(mismatch(path, least));
    }
    if bound(most)?.is_some_and(|most| size > most) {
        return Err(mismatch(path, most));
    }
    Ok(())
}

fn is_of(kind: &str, value: &Value) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0),
        _ => false,
    }
}

/// Returns the steps to read all of a value.
fn weight(value: &Value) -> usize {
    match value {
        Value::String(text) => 1 + text.len() / TEXT,
        Value::Array(items) => 1 + items.iter().map(weight).sum::<usize>(),
        Value::Object(members) => {
            1 + members.iter().map(|(name, member)| 1 + name.len() / TEXT + weight(member)).sum::<usize>()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 1,
    }
}

fn mismatch(path: &str, keyword: &'static str) -> SchemaError {
    SchemaError::Mismatch { path: if path.is_empty() { "the value".to_owned() } else { path.to_owned() }, keyword }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_schema_says_is_checked_where_it_is_said() {
        let schema = json!({
            "type": "object",
            "properties": { "list": { "type": "array", "items": { "$ref": "#/$defs/number" }, "minItems": 1 } },
            "required": ["list"],
            "additionalProperties": false,
            "$defs": { "number": { "type": "integer", "minimum": 0 } },
        });
        assert_eq!(check(&schema, &json!({ "list": [1, 2.0] })), Ok(()));
        let wrong = |value| match check(&schema, &value) {
            Err(SchemaError::Mismatch { path, keyword }) => (path, keyword),
            other => panic!("{other:?}"),
        };
        assert_eq!(wrong(json!([])), ("the value".to_owned(), "type"));
        assert_eq!(wrong(json!({})), ("the value".to_owned(), "required"));
        assert_eq!(wrong(json!({ "list": [] })), ("/list".to_owned(), "minItems"));
        assert_eq!(wrong(json!({ "list": [1, -1] })), ("/list/1".to_owned(), "minimum"));
        assert_eq!(wrong(json!({ "list": [1], "a/b": 1 })), ("/a~1b".to_owned(), "additionalProperties"));
    }

    #[test]
    fn integers_are_compared_exactly() {
        const LARGE: u64 = (1 << 53) + 1;
        for schema in [json!({ "const": LARGE }), json!({ "enum": [LARGE] })] {
            assert_eq!(check(&schema, &json!(LARGE)), Ok(()));
            check(&schema, &json!(LARGE - 1)).expect_err("the same floating point number");
        }
        assert_eq!(check(&json!({ "uniqueItems": true }), &json!([LARGE - 1, LARGE])), Ok(()));
        check(&json!({ "uniqueItems": true }), &json!([1, 1.0])).expect_err("the same number");
    }

    #[test]
    fn what_is_not_understood_is_not_passed() {
        for schema in [
            json!({ "pattern": "^(a+)+$" }),
            json!({ "$ref": "https://example.com/schema" }),
            json!({ "properties": { "x": { "$id": "http://127.0.0.1/" } } }),
            json!({ "$ref": "#/nowhere" }),
            json!({ "anyOf": [{ "if": {} }, true] }),
        ] {
            assert!(matches!(check(&schema, &json!("aaaa")), Err(SchemaError::NotSupported(_))), "{schema}");
        }
        assert_eq!(check(&json!({ "required": "x" }), &json!({})), Err(SchemaError::InvalidSchema("required")));
    }

    #[test]
    fn a_schema_that_takes_too_long_is_not_followed() {
        assert_eq!(check(&json!({ "$ref": "#" }), &json!(1)), Err(SchemaError::TooLarge));
        let wide = json!({ "anyOf": vec![json!({ "$ref": "#/$defs/a" }); 8],
            "$defs": { "a": { "anyOf": vec![json!({ "$ref": "#/$defs/b" }); 100] },
                "b": { "anyOf": vec![json!({ "type": "null" }); 100] } } });
        assert_eq!(check(&wide, &json!(1)), Err(SchemaError::TooLarge));
        let mut deep = json!(true);
        for _ in 0..100 {
            deep = json!({ "not": deep });
        }
        assert_eq!(check(&deep, &json!(1)), Err(SchemaError::TooLarge));
        let long: Vec<u32> = (0..1_000).collect();
        assert_eq!(check(&json!({ "uniqueItems": true }), &json!(long)), Err(SchemaError::TooLarge));
    }

    #[test]
    fn a_schema_that_looks_at_much_is_not_followed_as_far_as_one_that_looks_at_little() {
        let often = |what: &Value| {
            let many = |name: &str, times| vec![json!({ "$ref": format!("#/$defs/{name}") }); times];
            json!({ "anyOf": many("a", 90), "$defs": { "a": { "anyOf": many("b", 100) }, "b": what } })
        };
        assert_eq!(check(&often(&json!({ "type": "integer" })), &json!(1)), Ok(()));
        let members: Map<String, Value> = (0..900).map(|number| (number.to_string(), json!(0))).collect();
        let mut required = vec!["1"; 2_000];
        required.push("none");
        let (mut list, mut other) = (vec![vec![0; 9]; 400], vec![vec![0; 9]; 400]);
        (list[399][8], other[399][8]) = (1, 2);
        for (what, value) in [
            (json!({ "uniqueItems": true }), json!(vec![0; 4_500])),
            (json!({ "required": required }), json!(members)),
            (json!({ "properties": {} }), json!(members)),
            (json!({ "minLength": 8_001 }), json!("x".repeat(8_000))),
            (json!({ "enum": vec![1; 4_000] }), json!(0)),
            (json!({ "type": vec!["null"; 1_000] }), json!(0)),
            (json!({ "const": list }), json!(other)),
        ] {
            assert_eq!(check(&often(&what), &value), Err(SchemaError::TooLarge), "{what}");
        }
    }
}
