//! The reason codes of permits, and those of `exact` by an authorization that mean the same.
//!
//! Inside, a reason has the code of an authorization, whatever was signed. What is written about a permit has the permit's own code.

#![cfg_attr(not(feature = "full"), allow(dead_code, reason = "sellers, buyers and facilitators use different codes"))]

/// Codes of authorizations, and those of permits. Of several that mean the same, the first is written.
pub(crate) type Codes = [(&'static str, &'static str)];

/// The payer has not let Permit2 move so much of the token.
pub(crate) const ALLOWANCE_REQUIRED: &str = "permit2_allowance_required";
/// The permit is for another contract than the scheme's.
pub(crate) const SPENDER_MISMATCH: &str = "invalid_permit2_spender";
/// The permit is for another token.
pub(crate) const TOKEN_MISMATCH: &str = "permit2_token_mismatch";
/// The chain lacks Permit2 or the scheme's contract.
pub(crate) const PROXY_NOT_DEPLOYED: &str = "permit2_proxy_not_deployed";

/// The permit is for another account to have executed, or for none.
pub(crate) const ACCOUNT_MISMATCH: &str = "permit2_account_mismatch";

/// The codes of all permits. A scheme may have more.
pub(crate) const CODES: &Codes = &[
    ("insufficient_funds", "permit2_insufficient_balance"),
    ("invalid_exact_evm_payload_authorization_valid_after", "permit2_not_yet_valid"),
    ("invalid_exact_evm_payload_authorization_valid_after", "permit2_payment_too_early"),
    ("invalid_exact_evm_payload_authorization_valid_before", "permit2_deadline_expired"),
    ("invalid_exact_evm_payload_authorization_value", "permit2_invalid_amount"),
    ("invalid_exact_evm_payload_authorization_value_mismatch", "permit2_amount_mismatch"),
    ("invalid_exact_evm_payload_signature", "invalid_permit2_signature"),
    ("invalid_exact_evm_payload_recipient_mismatch", "invalid_permit2_recipient_mismatch"),
    ("invalid_exact_evm_nonce_already_used", "permit2_invalid_nonce"),
    ("invalid_exact_evm_transaction_simulation_failed", "permit2_simulation_failed"),
    ("invalid_payload", "unsupported_payload_type"),
];

/// What is wrong with a permit, or with an offer, has one code for an authorization. These are read, and never written in its place.
pub(crate) const MISMATCHES: &Codes =
    &[("invalid_payment_requirements", TOKEN_MISMATCH), ("invalid_payment_requirements", SPENDER_MISMATCH)];

/// A permit that is refused with one of these codes was not executed for this request; but a missing approval is also what remains of a permit
/// that anybody may have had executed. The others may hide an execution.
pub(crate) const NOT_EXECUTED: &[&str] = &[ALLOWANCE_REQUIRED, PROXY_NOT_DEPLOYED, ACCOUNT_MISMATCH];
