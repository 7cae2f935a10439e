//! The extension `payment-status`, which this crate defines: a URL where a server reports the status of a payment.
//!
//! A server declares the URL in the `extensions` of its 402:
//!
//! ```json
//! { "payment-status": { "info": { "url": "https://api.example/payments/status" },
//!     "schema": { "type": "object", "properties": { "url": { "type": "string" } }, "required": ["url"] } } }
//! ```
//!
//! `schema` describes `info` in JSON Schema: the protocol asks for it, and some clients ignore all extensions if one has none.
//!
//! `GET` with the query parameters `network` (CAIP-2), `asset`, `payer` and `nonce` returns a [`Status`], or 404 for an unknown payment.
//! The URL may be a path on the paid resource's origin. Clients do not follow it to another origin.
//!
//! A server that responds before it settles names the payment in the `extensions` of its `PAYMENT-RESPONSE`, which reports success
//! with an empty transaction:
//!
//! ```json
//! { "payment-status": { "info": { "url": "…", "state": "pending",
//!     "network": "eip155:8453", "asset": "0x…", "payer": "0x…", "nonce": "0x…" } } }
//! ```

#[cfg(feature = "server")]
use alloy_primitives::Address;
use alloy_primitives::B256;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Extension;
#[cfg(feature = "server")]
use crate::network::Network;

/// The extension's name.
pub const NAME: &str = "payment-status";

/// Returns the extension that a server declares: it reports the status of payments at `url`.
pub fn extension(url: &str) -> Extension {
    let schema = json!({ "type": "object", "properties": { "url": { "type": "string" } }, "required": ["url"] });
    Extension::new(NAME, json!({ "url": url }), schema)
}

/// Returns the extension for a payment that the server will settle: the parameters to ask for its status with, and the URL if there is
/// one.
#[cfg(feature = "server")]
pub(crate) fn pending(
    network: Network,
    asset: Address,
    payer: Address,
    nonce: B256,
    url: Option<&str>,
) -> Map<String, Value> {
    let mut info = json!({
        "state": State::Pending,
        "network": network.to_string(),
        "asset": asset,
        "payer": payer,
        "nonce": nonce,
    });
    if let Some(url) = url {
        info["url"] = url.into();
    }
    Map::from_iter([(NAME.to_owned(), json!({ "info": info }))])
}

/// Returns the URL that a server's extensions declare.
pub fn declared(extensions: &Map<String, Value>) -> Option<&str> {
    extensions.get(NAME)?.get("info")?.get("url")?.as_str()
}

/// The status of a payment, as a server reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The state of the settlement.
    pub state: State,
    /// The transaction that paid or may pay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction: Option<B256>,
    /// The block that includes the transaction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u64>,
}

/// The state of a payment's settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum State {
    /// Not submitted yet.
    Pending,
    /// Submitted to the chain.
    Submitted,
    /// Submitted, with an unknown outcome.
    Unknown,
    /// Included in a block.
    Settled,
    /// Included in a final block.
    Final,
    /// Not executed so far. It may be until it expires.
    Failed,
    /// Proven never to be executed.
    Dead,
}

impl State {
    /// Returns `true` if the payment is settled or final.
    pub const fn is_paid(self) -> bool {
        matches!(self, Self::Settled | Self::Final)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_declaration_has_a_url() {
        assert_eq!(declared(&extension("/payments/status").declared()), Some("/payments/status"));
        for other in [json!({}), json!({ NAME: {} }), json!({ NAME: { "info": { "url": 7 } } }), json!({ NAME: "/s" })]
        {
            assert_eq!(declared(other.as_object().unwrap()), None, "{other}");
        }
    }

    #[test]
    fn a_status_has_only_the_known_fields() {
        let pending = Status { state: State::Pending, transaction: None, block: None };
        assert_eq!(serde_json::to_value(pending).unwrap(), json!({ "state": "pending" }));
        let read: Status = serde_json::from_value(json!({ "state": "final", "block": 7, "more": [] })).unwrap();
        assert_eq!((read.state.is_paid(), read.transaction, read.block), (true, None, Some(7)));
    }
}
