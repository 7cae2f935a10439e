//! A resource as a facilitator lists it.

use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Map, Value, value::RawValue};
use url::Url;

use crate::protocol::{ExactOffer, OfferError, PaymentRequirements, Verbatim, timestamp, v1};

/// How many offers of one resource are looked at.
const MAX_OFFERS: usize = 64;

/// A resource that can be paid for, as somebody who settles payments says. Nothing of it is proven, and all of it may be years old:
/// what it costs and whom to pay is said by the 402 of the resource itself.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListedResource {
    /// Where it is: an absolute `http` or `https` URL without credentials. With a template of the path (`/users/:id`) where the
    /// [`raw`](Self::raw) item has a `routeTemplate`.
    pub url: Url,
    /// What it is spoken with: `http`, `mcp`, ….
    pub kind: String,
    /// The version of x402 it was paid in.
    pub x402_version: u64,
    /// The offers under which it was paid, as they are on the wire; those of v1 are spelled otherwise.
    pub accepts: Vec<Verbatim<PaymentRequirements>>,
    /// For people.
    pub description: Option<String>,
    /// Media type of the answer.
    pub mime_type: Option<String>,
    /// Name of the service.
    pub service_name: Option<String>,
    /// Labels.
    pub tags: Vec<String>,
    /// When the facilitator last learned of it, in Unix seconds.
    pub last_updated: Option<u64>,
    /// The item as it came, with what this crate does not know of.
    pub raw: Verbatim<Map<String, Value>>,
}

impl ListedResource {
    /// The offers that this crate can read, of v2 and of v1; those that it could not pay say why.
    pub fn offers(&self) -> Vec<Result<ExactOffer, OfferError>> {
        let read = |offer: &Verbatim<PaymentRequirements>| match offer.read() {
            Ok(offer) => Some(ExactOffer::try_from(&offer)),
            Err(_) => {
                let in_v1: v1::PaymentRequirements = serde_json::from_str(offer.text()).ok()?;
                Some(ExactOffer::try_from(&in_v1))
            }
        };
        self.accepts.iter().take(MAX_OFFERS).filter_map(read).collect()
    }

    /// What it takes and gives: the `info` of the extension [`bazaar`](crate::protocol::bazaar), if the item has it.
    pub fn info(&self) -> Option<Value> {
        self.raw.read().ok()?.get("extensions")?.get("bazaar")?.get("info").cloned()
    }

    /// `None` if it is nothing that could be asked for.
    pub(super) fn read(item: &RawValue) -> Option<Self> {
        let is_object = item.get().starts_with('{');
        let read: Item = is_object.then(|| serde_json::from_str(item.get()).ok()).flatten()?;
        let url = read.resource.or(read.url)?;
        let url = Url::parse(&url).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())?;
        if !url.username().is_empty() || url.password().is_some() {
            return None;
        }
        // In v1 the offer describes what it is for.
        let first: Option<Described> = read.accepts.first().and_then(|offer| serde_json::from_str(offer.text()).ok());
        let first = first.unwrap_or_default();
        let text = |own: Option<String>, of_offer: Option<String>| own.or(of_offer).filter(|text| !text.is_empty());
        Some(Self {
            url,
            kind: read.kind.unwrap_or_else(|| "http".to_owned()),
            x402_version: read.x402_version.unwrap_or(1),
            accepts: read.accepts,
            description: text(read.description, first.description),
            mime_type: text(read.mime_type, first.mime_type),
            service_name: read.service_name,
            tags: read.tags.unwrap_or_default(),
            last_updated: match read.last_updated {
                Some(Value::String(text)) => timestamp::parse(&text),
                Some(Value::Number(seconds)) => seconds.as_u64(),
                _ => None,
            },
            raw: serde_json::from_str(item.get()).ok()?,
        })
    }
}

/// All of it may be missing, or not be what it should.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Item {
    #[serde(default, deserialize_with = "lenient")]
    resource: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    url: Option<String>,
    #[serde(default, rename = "type", deserialize_with = "lenient")]
    kind: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    x402_version: Option<u64>,
    accepts: Vec<Verbatim<PaymentRequirements>>,
    #[serde(default, deserialize_with = "lenient")]
    description: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    mime_type: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    service_name: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    tags: Option<Vec<String>>,
    #[serde(default)]
    last_updated: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Described {
    #[serde(default, deserialize_with = "lenient")]
    description: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    mime_type: Option<String>,
}

/// What is of another type is as good as missing.
fn lenient<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).ok())
}
