//! JSON that must be returned exactly as it came.

use std::{fmt, marker::PhantomData};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// A JSON text of type `T` that is kept byte for byte and read on demand.
///
/// ```
/// use tower_x402::protocol::{PaymentRequirements, Verbatim};
///
/// let text = r#"{"scheme":"exact","network":"eip155:8453","amount":"1000","asset":"0xA","payTo":"0xB",
///     "maxTimeoutSeconds":60,"extra":{"name":"USD Coin"},"aFieldOfTomorrow":[1, 2]}"#;
/// let offer: Verbatim<PaymentRequirements> = serde_json::from_str(text)?;
/// assert_eq!(offer.read()?.amount, "1000");
/// assert_eq!(serde_json::to_string(&offer)?, text);
/// # Ok::<(), serde_json::Error>(())
/// ```
pub struct Verbatim<T> {
    raw: Box<RawValue>,
    read_as: PhantomData<fn() -> T>,
}

impl<T> Verbatim<T> {
    /// The text itself.
    pub fn text(&self) -> &str {
        self.raw.get()
    }
}

impl<T: Serialize> Verbatim<T> {
    /// The text that `value` serializes to.
    pub fn of(value: &T) -> Result<Self, serde_json::Error> {
        serde_json::value::to_raw_value(value).map(|raw| Self { raw, read_as: PhantomData })
    }
}

impl Verbatim<crate::protocol::PaymentRequirements> {
    /// The text of an offer. Cannot fail: all its fields are text, numbers and maps with text keys.
    pub(crate) fn of_requirements(offer: &crate::protocol::PaymentRequirements) -> Self {
        let raw = serde_json::value::to_raw_value(offer).unwrap_or_else(|_| RawValue::NULL.to_owned());
        Self { raw, read_as: PhantomData }
    }
}

impl<'de, T: Deserialize<'de>> Verbatim<T> {
    /// Reads the text.
    pub fn read(&'de self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.raw.get())
    }
}

impl<T> Clone for Verbatim<T> {
    fn clone(&self) -> Self {
        Self { raw: self.raw.clone(), read_as: PhantomData }
    }
}

impl<T> PartialEq for Verbatim<T> {
    fn eq(&self, other: &Self) -> bool {
        self.text() == other.text()
    }
}

impl<T> fmt::Debug for Verbatim<T> {
    /// The length only: the text may hold a signature.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Verbatim({} bytes)", self.text().len())
    }
}

impl<T> Serialize for Verbatim<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.raw.serialize(serializer)
    }
}

impl<'de, T> Deserialize<'de> for Verbatim<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Box::<RawValue>::deserialize(deserializer).map(|raw| Self { raw, read_as: PhantomData })
    }
}
