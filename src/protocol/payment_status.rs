//! The extension `payment-status`, of this crate's own: where a server tells what became of a payment, and how.
//!
//! A server declares in its 402's `extensions` where it answers:
//!
//! ```json
//! { "payment-status": { "info": { "url": "https://api.example/payments/status" } } }
//! ```
//!
//! `GET` with the query parameters `network` (CAIP-2), `asset`, `payer` and `nonce` then answers a [`Status`], or 404 for
//! a payment that the server does not know. The URL may be a path of the paid resource's origin; clients follow it to no
//! other origin.
//!
//! A server that answers before it settles names the payment in the `extensions` of its `PAYMENT-RESPONSE`, which says success
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

#[cfg(feature = "server")]
use crate::network::Network;

/// Its name among the extensions.
pub const NAME: &str = "payment-status";

/// What a server offers in a 402: the fate of a payment can be looked up at `url`.
pub fn declaration(url: &str) -> Map<String, Value> {
    Map::from_iter([(NAME.to_owned(), json!({ "info": { "url": url } }))])
}

/// What a server says of a payment that it will settle: the parameters to ask for it with, and, if it answers that, where.
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

/// The URL that a server's extensions declare.
pub fn declared(extensions: &Map<String, Value>) -> Option<&str> {
    extensions.get(NAME)?.get("info")?.get("url")?.as_str()
}

/// What a server knows of a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// How far the money is.
    pub state: State,
    /// The transaction that moved it or may move it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction: Option<B256>,
    /// The block that includes the transaction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u64>,
}

/// How far the money of a payment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum State {
    /// Known, and not submitted yet.
    Pending,
    /// Submitted to the chain.
    Submitted,
    /// Perhaps submitted; nobody can tell yet.
    Unknown,
    /// In a block.
    Settled,
    /// In a block that will not be undone.
    Final,
    /// Not executed so far; until it expires it may be.
    Failed,
    /// Proven on the chain never to be executed.
    Dead,
}

impl State {
    /// Whether the money has moved.
    pub const fn is_paid(self) -> bool {
        matches!(self, Self::Settled | Self::Final)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declaration_is_found_and_nothing_else_is() {
        assert_eq!(declared(&declaration("/payments/status")), Some("/payments/status"));
        for other in [json!({}), json!({ NAME: {} }), json!({ NAME: { "info": { "url": 7 } } }), json!({ NAME: "/s" })]
        {
            assert_eq!(declared(other.as_object().unwrap()), None, "{other}");
        }
    }

    #[test]
    fn a_status_is_as_short_as_what_is_known() {
        let pending = Status { state: State::Pending, transaction: None, block: None };
        assert_eq!(serde_json::to_value(pending).unwrap(), json!({ "state": "pending" }));
        let read: Status = serde_json::from_value(json!({ "state": "final", "block": 7, "more": [] })).unwrap();
        assert_eq!((read.state.is_paid(), read.transaction, read.block), (true, None, Some(7)));
    }
}
