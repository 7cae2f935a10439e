//! A card whose terms its payee stands by.

use alloy_primitives::Address;
use serde_json::Value;
use url::Url;

use super::{agent_card::AgentCard, card_error::CardError, card_signature, pricing::Pricing};

/// How many values a card may hold: each takes many times as much memory as text, and cards are kept. The largest that
/// [`AgentCard::builder`] makes has less than a thousand.
const MAX_VALUES: usize = 4_096;

/// An evaluator's card, checked: its terms can be read, its endpoint is on its own origin, and it is signed with the key that is
/// paid (unless whoever checked it did not insist). A signed one names its endpoint with the origin, so that a copy elsewhere is
/// nobody's card.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifiedCard {
    card: AgentCard,
    pricing: Pricing,
    endpoint: Url,
    is_signed: bool,
}

impl VerifiedCard {
    /// Checks a card that comes from `url`.
    ///
    /// # Errors
    /// [`CardError`] says what is wrong with it.
    pub fn of(json: &[u8], url: &Url) -> Result<Self, CardError> {
        let checked = Self::of_any(json, url)?;
        let pay_to = checked.pricing.pay_to;
        match checked.is_signed {
            true => Ok(checked),
            false if checked.card.signatures.is_empty() => Err(CardError::Unsigned),
            false => Err(CardError::BadSignature { pay_to }),
        }
    }

    /// The same, signed or not.
    pub(super) fn of_any(json: &[u8], url: &Url) -> Result<Self, CardError> {
        let raw: Value = serde_json::from_slice(json).map_err(|error| CardError::invalid(".", &error))?;
        if count(&raw) > MAX_VALUES {
            return Err(CardError::invalid(".", &format_args!("it has more than {MAX_VALUES} values")));
        }
        let card: AgentCard = serde_path_to_error::deserialize(&raw).map_err(|error| {
            let at = error.path().to_string();
            CardError::invalid(at, &error.into_inner())
        })?;
        let pricing = card.pricing()?;
        let endpoint = url.join(&pricing.endpoint).map_err(|error| CardError::invalid("pricing.endpoint", &error))?;
        if endpoint.origin() != url.origin() {
            return Err(CardError::ForeignEndpoint { endpoint: endpoint.into() });
        }
        let is_signed = card_signature::is_signed_by(&card.signatures, &raw, pricing.pay_to);
        // What is signed must mean the same wherever it is read.
        if is_signed && Url::parse(&pricing.endpoint).is_err() {
            return Err(CardError::RelativeEndpoint);
        }
        Ok(Self { card, pricing, endpoint, is_signed })
    }

    /// The card.
    pub const fn card(&self) -> &AgentCard {
        &self.card
    }

    /// Its terms.
    pub const fn pricing(&self) -> &Pricing {
        &self.pricing
    }

    /// Where submissions are posted.
    pub const fn endpoint(&self) -> &Url {
        &self.endpoint
    }

    /// Who is paid.
    pub const fn pay_to(&self) -> Address {
        self.pricing.pay_to
    }

    /// Whether the payee's key signed it.
    pub const fn is_signed(&self) -> bool {
        self.is_signed
    }
}

/// How many values there are, this one included. They nest no deeper than `serde_json` reads.
fn count(value: &Value) -> usize {
    let within = match value {
        Value::Array(items) => items.iter().map(count).sum::<usize>(),
        Value::Object(fields) => fields.values().map(count).sum::<usize>(),
        _ => 0,
    };
    1 + within
}
