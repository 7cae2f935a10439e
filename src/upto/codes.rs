//! The reason codes of permits, and those of `exact` that mean the same.
//!
//! Inside, a reason has the code of `exact`, whatever was signed. What is written about a permit has the scheme's own code.

#![cfg_attr(not(feature = "full"), allow(dead_code, reason = "sellers, buyers and facilitators use different codes"))]

/// The payer has not let Permit2 move so much of the token.
pub(crate) const ALLOWANCE_REQUIRED: &str = "permit2_allowance_required";
/// The reason code of a permit that is for another facilitator.
pub const FACILITATOR_MISMATCH: &str = "upto_facilitator_mismatch";
/// The permit is for another contract than the scheme's.
pub(crate) const SPENDER_MISMATCH: &str = "invalid_permit2_spender";
/// The permit is for another token.
pub(crate) const TOKEN_MISMATCH: &str = "permit2_token_mismatch";
/// The chain lacks Permit2 or the scheme's contract.
pub(crate) const PROXY_NOT_DEPLOYED: &str = "permit2_proxy_not_deployed";
/// The reason code of a charge of more than was signed for.
pub const AMOUNT_ABOVE_MAXIMUM: &str = "invalid_upto_evm_payload_settlement_exceeds_amount";

/// The code of `exact`, and that of a permit. Of several that mean the same, the first is written.
const CODES: [(&str, &str); 16] = [
    ("insufficient_funds", "permit2_insufficient_balance"),
    ("invalid_exact_evm_payload_authorization_valid_after", "permit2_not_yet_valid"),
    ("invalid_exact_evm_payload_authorization_valid_after", "permit2_payment_too_early"),
    ("invalid_exact_evm_payload_authorization_valid_before", "permit2_deadline_expired"),
    ("invalid_exact_evm_payload_authorization_value", "permit2_invalid_amount"),
    ("invalid_exact_evm_payload_authorization_value_mismatch", "permit2_amount_mismatch"),
    ("invalid_exact_evm_payload_signature", "invalid_permit2_signature"),
    ("invalid_exact_evm_payload_recipient_mismatch", "invalid_permit2_recipient_mismatch"),
    ("invalid_exact_evm_network_mismatch", "invalid_upto_evm_network_mismatch"),
    ("invalid_exact_evm_nonce_already_used", "permit2_invalid_nonce"),
    ("invalid_exact_evm_transaction_simulation_failed", "permit2_simulation_failed"),
    ("invalid_payload", "unsupported_payload_type"),
    ("invalid_scheme", "invalid_upto_evm_scheme"),
    ("invalid_transaction_state", "invalid_upto_evm_transaction_failed"),
    (OFFER, TOKEN_MISMATCH),
    (OFFER, SPENDER_MISMATCH),
];
/// What is wrong with an offer has no other code for permits.
const OFFER: &str = "invalid_payment_requirements";

/// Returns the code with which a permit is refused for this reason.
pub(crate) fn of_permit(code: &str) -> &str {
    let is_written = |(exact, _): &&(&str, &str)| *exact == code && code != OFFER;
    CODES.iter().find(is_written).map_or(code, |(_, permit)| permit)
}

/// Returns the code of `exact` that means the same as this code of a permit.
pub(crate) fn of_exact(code: &str) -> &str {
    CODES.iter().find(|(_, permit)| *permit == code).map_or(code, |(exact, _)| exact)
}

/// Returns `true` if a permit that is refused with this code was not executed for this request. The others that are not in `exact` may hide
/// an execution.
pub(crate) fn is_not_executed(code: &str) -> bool {
    [ALLOWANCE_REQUIRED, FACILITATOR_MISMATCH, PROXY_NOT_DEPLOYED, AMOUNT_ABOVE_MAXIMUM].contains(&code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_that_is_written_reads_back_as_the_reason() {
        for (exact, _) in CODES {
            assert_eq!(of_exact(of_permit(exact)), exact);
        }
        assert_eq!((of_permit("another"), of_exact("another")), ("another", "another"));
        assert_eq!(of_exact("permit2_payment_too_early"), "invalid_exact_evm_payload_authorization_valid_after");
    }
}
