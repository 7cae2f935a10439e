//! The reason codes that only this scheme has.

#![cfg_attr(not(feature = "full"), allow(dead_code, reason = "sellers, buyers and facilitators use different codes"))]

use crate::permit2::{ACCOUNT_MISMATCH, Codes};

/// The reason code of a permit that is for another facilitator.
pub const FACILITATOR_MISMATCH: &str = "upto_facilitator_mismatch";
/// The reason code of a charge of more than was signed for.
pub const AMOUNT_ABOVE_MAXIMUM: &str = "invalid_upto_evm_payload_settlement_exceeds_amount";

/// Its codes for what has another code where exactly the price is paid.
pub(crate) const CODES: &Codes = &[
    ("invalid_exact_evm_network_mismatch", "invalid_upto_evm_network_mismatch"),
    ("invalid_scheme", "invalid_upto_evm_scheme"),
    ("invalid_transaction_state", "invalid_upto_evm_transaction_failed"),
    (ACCOUNT_MISMATCH, FACILITATOR_MISMATCH),
    ("invalid_exact_evm_payload_authorization_value", AMOUNT_ABOVE_MAXIMUM),
];
