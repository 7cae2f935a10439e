//! The messages of x402 v2, their header encoding and the reason codes; [`v1`] has the messages of v1. No I/O.
//!
//! Everything here follows the [x402 specification](https://github.com/coinbase/x402/tree/main/specs). Fields that a payer has to echo
//! are kept as the text that was received ([`Verbatim`]), so that an offer is returned byte for byte, including unknown fields.
//!
//! ```
//! use tower_x402::protocol::{self, PaymentRequired};
//!
//! let header = "eyJ4NDAyVmVyc2lvbiI6MiwicmVzb3VyY2UiOnsidXJsIjoiaHR0cHM6Ly9hcGkuZXhhbXBsZS9ldmFsdWF0ZSJ9LCJhY2NlcHRzIjpbXX0=";
//! let required: PaymentRequired = protocol::decode_header(header.as_bytes(), protocol::MAX_REQUIRED_HEADER)?;
//! assert_eq!(required.resource.url, "https://api.example/evaluate");
//! # Ok::<(), protocol::DecodeError>(())
//! ```

mod equality;
mod exact;
mod exact_payload;
pub(crate) mod extension;
mod header;
mod messages;
mod payment_id;
pub mod payment_status;
mod reason;
#[cfg(feature = "facilitator")]
pub(crate) mod timestamp;
pub mod v1;
mod version;

#[doc(hidden)]
pub use equality::is_same_json;
pub use exact::{ExactOffer, OfferError, PaymentFlow, TransferMethod};
pub use exact_payload::ExactPayload;
pub use extension::Extension;
pub use header::{
    DecodeError, MAX_PAYMENT_HEADER, MAX_REQUIRED_BODY, MAX_REQUIRED_HEADER, decode_header, encode_header,
};
pub use messages::{
    FacilitatorRequest, PaymentPayload, PaymentRequired, PaymentRequirements, ResourceInfo, SettlementResponse,
    SupportedKind, SupportedResponse, Verbatim, VerifyResponse,
};
pub use payment_id::{PaymentId, PaymentIdError};
pub use reason::Reason;
pub use version::{UnknownVersion, V1, V2, Version};

/// The names of the HTTP headers, in lower case as HTTP/2 requires.
pub mod header_name {
    /// Server to client, on a 402: the offers.
    pub const PAYMENT_REQUIRED: &str = "payment-required";
    /// Client to server: the signed payment.
    pub const PAYMENT_SIGNATURE: &str = "payment-signature";
    /// Server to client: the settlement.
    pub const PAYMENT_RESPONSE: &str = "payment-response";
    /// Client to server: the signed payment, in v1.
    pub const X_PAYMENT: &str = "x-payment";
    /// Server to client: the settlement, in v1.
    pub const X_PAYMENT_RESPONSE: &str = "x-payment-response";
}
