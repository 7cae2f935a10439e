//! The scheme's error codes, as they are on the wire (`invalidReason`, `errorReason`, `error`).

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $suffix:literal,)*) => {
        $($(#[$doc])* pub const $name: &str = concat!("invalid_batch_settlement_evm_", $suffix);)*

        /// All codes of this module.
        pub const KNOWN: &[&str] = &[$($name,)* SETTLEMENT_PENDING];
    };
}

/// Returns the code of this module that equals `code`, if there is one.
///
/// ```
/// use tower_x402::vouchers::reason;
///
/// assert_eq!(reason::known("invalid_batch_settlement_evm_channel_busy"), Some(reason::CHANNEL_BUSY));
/// assert_eq!(reason::known("a_code_of_tomorrow"), None);
/// ```
pub fn known(code: &str) -> Option<&'static str> {
    KNOWN.iter().copied().find(|known| *known == code)
}

/// The transaction was sent and its outcome is not known yet. The channel on the chain tells. The only code without the scheme's prefix.
pub const SETTLEMENT_PENDING: &str = "settlement_pending";

codes! {
    /// The scheme of the payment or of the offer is another one.
    SCHEME = "scheme",
    /// The payment and the offer name different networks, or one that is not served.
    NETWORK_MISMATCH = "network_mismatch",
    /// The payload's type is unknown or not allowed here.
    PAYLOAD_TYPE = "payload_type",
    /// The channel's id is not `0x` and 64 hex digits.
    CHANNEL_ID_INVALID = "channel_id_invalid",
    /// The channel's id is not the digest of its configuration.
    CHANNEL_ID_MISMATCH = "channel_id_mismatch",
    /// The channel's receiver is not the offer's payee.
    RECEIVER_MISMATCH = "receiver_mismatch",
    /// The channel's receiver authorizer is not the offer's, or zero.
    RECEIVER_AUTHORIZER_MISMATCH = "receiver_authorizer_mismatch",
    /// The channel's token is not the offer's asset.
    TOKEN_MISMATCH = "token_mismatch",
    /// The channel's withdraw delay is not the offer's.
    WITHDRAW_DELAY_MISMATCH = "withdraw_delay_mismatch",
    /// The withdraw delay is outside 900..=2,592,000 seconds.
    WITHDRAW_DELAY_OUT_OF_RANGE = "withdraw_delay_out_of_range",
    /// The voucher is not signed by the channel's voucher key.
    VOUCHER_SIGNATURE = "voucher_signature",
    /// Nothing was deposited into the channel.
    CHANNEL_NOT_FOUND = "channel_not_found",
    /// The voucher's ceiling exceeds the channel's balance.
    CUMULATIVE_EXCEEDS_BALANCE = "cumulative_exceeds_balance",
    /// The voucher's ceiling does not cover what was claimed and this request.
    CUMULATIVE_BELOW_CLAIMED = "cumulative_below_claimed",
    /// The voucher's ceiling is not the charged amount plus the price.
    CUMULATIVE_AMOUNT_MISMATCH = "cumulative_amount_mismatch",
    /// Another request of the channel is in progress.
    CHANNEL_BUSY = "channel_busy",
    /// The seller's state of the channel could not be read or written.
    VERIFICATION_STATE_UNAVAILABLE = "verification_state_unavailable",
    /// The seller has no record of the channel any more.
    MISSING_CHANNEL = "missing_channel",
    /// The price would exceed what the payer signed.
    CHARGE_EXCEEDS_SIGNED_CUMULATIVE = "charge_exceeds_signed_cumulative",
    /// The seller requires a larger deposit.
    DEPOSIT_BELOW_MIN_DEPOSIT = "deposit_below_min_deposit",
    /// The deposit cannot be read, or its amount is zero.
    DEPOSIT_PAYLOAD = "deposit_payload",
    /// The voucher or the offer's amount cannot be read.
    VOUCHER_PAYLOAD = "voucher_payload",
    /// The payer's token balance does not cover the deposit.
    INSUFFICIENT_BALANCE = "insufficient_balance",
    /// The offer lacks the token's EIP-712 name or version.
    MISSING_EIP712_DOMAIN = "missing_eip712_domain",
    /// The deposit is not an ERC-3009 authorization.
    ERC3009_AUTHORIZATION_REQUIRED = "erc3009_authorization_required",
    /// The deposit's `validBefore` has passed or leaves too little time.
    PAYLOAD_AUTHORIZATION_VALID_BEFORE = "payload_authorization_valid_before",
    /// The deposit's `validAfter` has not passed.
    PAYLOAD_AUTHORIZATION_VALID_AFTER = "payload_authorization_valid_after",
    /// The payer did not sign the deposit's authorization.
    RECEIVE_AUTHORIZATION_SIGNATURE = "receive_authorization_signature",
    /// The deposit would revert.
    DEPOSIT_SIMULATION_FAILED = "deposit_simulation_failed",
    /// The deposit's transaction reverted.
    DEPOSIT_TRANSACTION_FAILED = "deposit_transaction_failed",
    /// The facilitator's key is not the channel's receiver authorizer.
    AUTHORIZER_ADDRESS_MISMATCH = "authorizer_address_mismatch",
    /// The facilitator has no authorizer key, and the message lacks the authorizer's signature.
    AUTHORIZER_NOT_CONFIGURED = "authorizer_not_configured",
    /// The claim cannot be read.
    CLAIM_PAYLOAD = "claim_payload",
    /// The claim would revert.
    CLAIM_SIMULATION_FAILED = "claim_simulation_failed",
    /// The claim's transaction reverted.
    CLAIM_TRANSACTION_FAILED = "claim_transaction_failed",
    /// The message that asks for the transfer of what was claimed cannot be read.
    SETTLE_PAYLOAD = "settle_payload",
    /// The transfer of what was claimed would revert.
    SETTLE_SIMULATION_FAILED = "settle_simulation_failed",
    /// The transaction that transfers what was claimed reverted.
    SETTLE_TRANSACTION_FAILED = "settle_transaction_failed",
    /// Nothing was claimed since the last transfer. Benign.
    NOTHING_TO_SETTLE = "nothing_to_settle",
    /// The refund cannot be read.
    REFUND_PAYLOAD = "refund_payload",
    /// The refund would revert.
    REFUND_SIMULATION_FAILED = "refund_simulation_failed",
    /// The refund's transaction reverted.
    REFUND_TRANSACTION_FAILED = "refund_transaction_failed",
    /// Nothing is left to refund.
    REFUND_NO_BALANCE = "refund_no_balance",
    /// The refund's amount is not a positive number.
    REFUND_AMOUNT_INVALID = "refund_amount_invalid",
    /// The chain could not be read.
    RPC_READ_FAILED = "rpc_read_failed",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_known_once() {
        for code in KNOWN {
            assert_eq!(known(code), Some(*code));
            assert_eq!(KNOWN.iter().filter(|other| *other == code).count(), 1, "{code}");
        }
        assert_eq!(CHANNEL_BUSY, "invalid_batch_settlement_evm_channel_busy");
    }
}
