//! The names of the protocol's headers.

use http::HeaderName;

use crate::protocol::header_name;

pub(super) static PAYMENT_SIGNATURE: HeaderName = HeaderName::from_static(header_name::PAYMENT_SIGNATURE);
pub(super) static X_PAYMENT: HeaderName = HeaderName::from_static(header_name::X_PAYMENT);
pub(super) const PAYMENT_REQUIRED: HeaderName = HeaderName::from_static(header_name::PAYMENT_REQUIRED);
pub(super) const PAYMENT_RESPONSE: HeaderName = HeaderName::from_static(header_name::PAYMENT_RESPONSE);
pub(super) const X_PAYMENT_RESPONSE: HeaderName = HeaderName::from_static(header_name::X_PAYMENT_RESPONSE);
