//! The description of a paid route: its input and output, for clients that search for one.

use serde_json::{Map, Value, json};
use tower_x402::protocol::Extension;

use crate::schema::{self, SchemaError};

/// The extension's name.
pub const NAME: &str = "bazaar";

/// The encoding of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BodyType {
    /// `application/json`.
    Json,
    /// A form.
    FormData,
    /// Text.
    Text,
}

impl BodyType {
    /// Returns its name on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::FormData => "form-data",
            Self::Text => "text",
        }
    }
}

/// A description of a paid route: its input and output, by example and by JSON Schema.
///
/// Keep it short: it is in the header of every 402, which has room for about 4 KB of JSON in all.
///
/// ```
/// use serde_json::json;
/// use x402_bazaar::{BodyType, Discovery};
///
/// let discovery = Discovery::post(BodyType::Json)
///     .body(json!({ "output": "17 * 23 = 391" }))
///     .body_schema(json!({ "properties": { "output": { "type": "string" } }, "required": ["output"] }))
///     .output(json!({ "score": 1.0 }));
/// let extension = discovery.extension()?;
/// assert_eq!(extension.declared()["bazaar"]["info"]["input"]["method"], "POST");
/// # Ok::<(), x402_bazaar::InvalidDiscovery>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Discovery {
    method: &'static str,
    body_type: Option<BodyType>,
    query: Option<Value>,
    query_schema: Option<Value>,
    body: Option<Value>,
    body_schema: Option<Value>,
    output: Option<Value>,
    output_schema: Option<Value>,
}

impl Discovery {
    /// Describes a route with the method `GET`.
    pub const fn get() -> Self {
        Self::of("GET", None)
    }

    /// Describes a route with the method `DELETE`.
    pub const fn delete() -> Self {
        Self::of("DELETE", None)
    }

    /// Describes a route with the method `POST` and a body of this type.
    pub const fn post(body: BodyType) -> Self {
        Self::of("POST", Some(body))
    }

    /// Describes a route with the method `PUT` and a body of this type.
    pub const fn put(body: BodyType) -> Self {
        Self::of("PUT", Some(body))
    }

    /// Describes a route with the method `PATCH` and a body of this type.
    pub const fn patch(body: BodyType) -> Self {
        Self::of("PATCH", Some(body))
    }

    const fn of(method: &'static str, body_type: Option<BodyType>) -> Self {
        Self {
            method,
            body_type,
            query: None,
            query_schema: None,
            body: None,
            body_schema: None,
            output: None,
            output_schema: None,
        }
    }

    /// Sets an example of the query parameters: an object.
    pub fn query(mut self, example: Value) -> Self {
        self.query = Some(example);
        self
    }

    /// Sets the schema of the query parameters. It need not say that they are an object.
    pub fn query_schema(mut self, schema: Value) -> Self {
        self.query_schema = Some(schema);
        self
    }

    /// Sets an example of the body: an object, or for [`BodyType::Text`] a string.
    pub fn body(mut self, example: Value) -> Self {
        self.body = Some(example);
        self
    }

    /// Sets the schema of the body.
    pub fn body_schema(mut self, schema: Value) -> Self {
        self.body_schema = Some(schema);
        self
    }

    /// Sets an example of the response, which is JSON.
    pub fn output(mut self, example: Value) -> Self {
        self.output = Some(example);
        self
    }

    /// Sets the schema of the response. It is used only with an [example](Self::output).
    pub fn output_schema(mut self, schema: Value) -> Self {
        self.output_schema = Some(schema);
        self
    }

    /// Returns the extension as a server declares it, under its [name](NAME).
    ///
    /// # Errors
    /// [`InvalidDiscovery`] if an example does not match its schema: facilitators would refuse the extension.
    pub fn extension(&self) -> Result<Extension, InvalidDiscovery> {
        if self.body_type.is_none() && (self.body.is_some() || self.body_schema.is_some()) {
            return Err(InvalidDiscovery::Body(self.method));
        }
        let is_object = |example: &Option<Value>| example.as_ref().is_none_or(Value::is_object);
        let is_text = self.body_type == Some(BodyType::Text);
        if !is_object(&self.query) || !(is_text || is_object(&self.body)) {
            return Err(InvalidDiscovery::Example);
        }
        for schema in [&self.query_schema, &self.body_schema, &self.output_schema] {
            if !is_object(schema) {
                return Err(InvalidDiscovery::Schema(SchemaError::InvalidSchema("schema")));
            }
        }
        let extension = Extension::new(NAME, self.info(), self.schema()).describes_resource();
        check(&extension.declared()[NAME])?;
        Ok(extension)
    }

    fn info(&self) -> Value {
        let mut input = json!({ "type": "http", "method": self.method });
        if let Some(body) = self.body_type {
            let empty = if body == BodyType::Text { json!("") } else { json!({}) };
            input["bodyType"] = body.as_str().into();
            input["body"] = self.body.clone().unwrap_or(empty);
        }
        if let Some(query) = self.query_example() {
            input["queryParams"] = query;
        }
        let mut info = json!({ "input": input });
        if let Some(output) = &self.output {
            info["output"] = json!({ "type": "json", "example": output });
        }
        info
    }

    fn schema(&self) -> Value {
        let mut properties = json!({
            "type": { "type": "string", "const": "http" },
            "method": { "type": "string", "enum": [self.method] },
        });
        let mut required = vec!["type", "method"];
        if self.body_type.is_some() {
            let is_text = self.body_type == Some(BodyType::Text);
            let any = if is_text { json!({ "type": "string" }) } else { json!({ "properties": {} }) };
            properties["bodyType"] = json!({ "type": "string", "enum": ["json", "form-data", "text"] });
            properties["body"] = self.body_schema.clone().unwrap_or(any);
            required.extend(["bodyType", "body"]);
        }
        if self.query_example().is_some() {
            properties["queryParams"] = of_object(self.query_schema.as_ref().unwrap_or(&json!({ "properties": {} })));
        }
        let input =
            json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false });
        let mut described = json!({ "input": input });
        if let Some(example) = &self.output {
            let any = Value::Object(Map::new());
            let said = self.output_schema.as_ref();
            // A schema of an object, unless the example is something else.
            let of_example =
                if example.is_object() { of_object(said.unwrap_or(&any)) } else { said.unwrap_or(&any).clone() };
            let output = json!({ "type": { "type": "string" }, "example": of_example });
            described["output"] = json!({ "type": "object", "properties": output, "required": ["type"] });
        }
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": described,
            "required": ["input"],
        })
    }

    /// A request without a body has query parameters, if only an empty object.
    fn query_example(&self) -> Option<Value> {
        match (&self.query, &self.query_schema, self.body_type) {
            (Some(query), _, _) => Some(query.clone()),
            (None, None, Some(_)) => None,
            _ => Some(json!({})),
        }
    }
}

/// Why an extension is one that facilitators refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidDiscovery {
    /// A body was described for a method that has none.
    #[error("{0} has no body")]
    Body(&'static str),
    /// An example is not an object.
    #[error("an example of query or body is not an object (or text, for a body of text)")]
    Example,
    /// An example does not match its schema, or the schema cannot be checked.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// A field is missing, or has an unknown value.
    #[error("{0} is missing or unknown")]
    Form(&'static str),
}

/// Checks that an extension has a known form and that its `info` matches its `schema`, as a facilitator does before it lists a route.
///
/// # Errors
/// [`InvalidDiscovery`] if it does not.
pub fn check(extension: &Value) -> Result<(), InvalidDiscovery> {
    let info = extension.get("info").filter(|info| info.is_object()).ok_or(InvalidDiscovery::Form("info"))?;
    let schema = extension.get("schema").filter(|schema| schema.is_object()).ok_or(InvalidDiscovery::Form("schema"))?;
    let input = info.get("input").filter(|input| input.is_object()).ok_or(InvalidDiscovery::Form("info.input"))?;
    match input.get("type").and_then(Value::as_str) {
        Some("http") => {
            let is_one_of = |field: &str, known: &[&str]| match input.get(field) {
                None => true,
                Some(value) => value.as_str().is_some_and(|value| known.contains(&value)),
            };
            if !is_one_of("method", &["GET", "HEAD", "DELETE", "POST", "PUT", "PATCH"]) {
                return Err(InvalidDiscovery::Form("info.input.method"));
            }
            if !is_one_of("bodyType", &["json", "form-data", "text"]) {
                return Err(InvalidDiscovery::Form("info.input.bodyType"));
            }
            if input.get("bodyType").is_some() && !is_one_of("method", &["POST", "PUT", "PATCH"]) {
                return Err(InvalidDiscovery::Form("a method that has a body"));
            }
        }
        Some("mcp") => {
            // The specification and the official packages differ in this name.
            let has_name = ["toolName", "tool"].iter().any(|name| input.get(*name).is_some_and(is_name));
            if !has_name || !input.get("inputSchema").is_some_and(Value::is_object) {
                return Err(InvalidDiscovery::Form("info.input.toolName or inputSchema"));
            }
        }
        _ => return Err(InvalidDiscovery::Form("info.input.type")),
    }
    schema::check(schema, info)?;
    Ok(())
}

fn is_name(value: &Value) -> bool {
    value.as_str().is_some_and(|name| !name.is_empty())
}

/// Makes a schema one of objects.
fn of_object(schema: &Value) -> Value {
    let mut whole = json!({ "type": "object" });
    if let (Some(whole), Some(schema)) = (whole.as_object_mut(), schema.as_object()) {
        whole.extend(schema.clone());
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declared_route_passes_the_check_of_facilitators() {
        let described = Discovery::post(BodyType::Json)
            .query(json!({ "k": "1" }))
            .body(json!({ "output": "4" }))
            .body_schema(json!({ "type": "object", "required": ["output"] }))
            .output(json!({ "score": 1 }))
            .output_schema(json!({ "required": ["score"] }));
        for discovery in [
            Discovery::get(),
            Discovery::delete().query_schema(json!({ "properties": { "id": { "type": "string" } } })),
            Discovery::put(BodyType::FormData),
            Discovery::patch(BodyType::Text).body(json!("words")).output(json!([1, 2])),
            described.clone(),
        ] {
            let extension = discovery.extension().unwrap().declared();
            assert_eq!(check(&extension[NAME]), Ok(()), "{extension:?}");
        }
        let extension = described.extension().unwrap().declared().remove(NAME).unwrap();
        let input = json!({ "type": "http", "method": "POST", "bodyType": "json", "body": { "output": "4" },
            "queryParams": { "k": "1" } });
        assert_eq!(extension["info"]["input"], input);
        assert_eq!(extension["schema"]["properties"]["input"]["properties"]["method"]["enum"], json!(["POST"]));
    }

    #[test]
    fn examples_that_do_not_match_their_schemas_are_refused() {
        let schema = json!({ "required": ["output"] });
        let refused = |discovery: Discovery| discovery.extension().unwrap_err();
        let missing = Discovery::post(BodyType::Json).body_schema(schema.clone());
        assert!(matches!(
            refused(missing),
            InvalidDiscovery::Schema(SchemaError::Mismatch { keyword: "required", .. })
        ));
        let missing = Discovery::get().output(json!({})).output_schema(schema.clone());
        assert!(matches!(refused(missing), InvalidDiscovery::Schema(SchemaError::Mismatch { .. })));
        assert_eq!(refused(Discovery::get().body(json!({}))), InvalidDiscovery::Body("GET"));
        assert_eq!(refused(Discovery::get().query(json!("k=1"))), InvalidDiscovery::Example);
        assert_eq!(refused(Discovery::post(BodyType::Json).body(json!("text"))), InvalidDiscovery::Example);
        let elsewhere = json!({ "$ref": "https://example.com/schema" });
        assert!(matches!(refused(Discovery::get().query_schema(elsewhere)), InvalidDiscovery::Schema(_)));
    }

    #[test]
    fn an_extension_that_facilitators_refuse_is_invalid() {
        let good = Discovery::get().extension().unwrap().declared().remove(NAME).unwrap();
        for (field, value) in [
            ("/info", json!(null)),
            ("/schema", json!([])),
            ("/info/input", json!("GET")),
            ("/info/input/type", json!("ftp")),
            ("/info/input/method", json!("STEAL")),
            ("/info/input/type", json!("mcp")),
            ("/schema/properties/input/properties/method/enum", json!(["POST"])),
        ] {
            let mut bad = good.clone();
            *bad.pointer_mut(field).unwrap() = value;
            assert!(check(&bad).is_err(), "{field}");
        }
    }
}
