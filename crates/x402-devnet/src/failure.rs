//! The errors of JSON-RPC, in the words and codes of the nodes on Base.

use std::borrow::Cow;

use alloy_json_rpc::ErrorPayload;
use alloy_primitives::{B256, Bytes, U256};
use alloy_sol_types::decode_revert_reason;
use serde_json::value::{RawValue, to_raw_value};

/// A JSON-RPC error.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) code: i64,
    pub(super) message: Cow<'static, str>,
    pub(super) data: Option<Bytes>,
}

impl Failure {
    pub(super) fn new(code: i64, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into(), data: None }
    }

    /// The node rejects the transaction, or it could not be executed.
    pub(super) fn rejected(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(-32000, message)
    }

    pub(super) fn invalid_params(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(-32602, message)
    }

    pub(super) fn method_not_found(method: &str) -> Self {
        Self::new(-32601, format!("the method {method} does not exist/is not available"))
    }

    pub(super) fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(-32603, message)
    }

    pub(super) fn insufficient_funds(balance: U256, cost: U256) -> Self {
        Self::rejected(format!("insufficient funds for gas * price + value: balance {balance}, tx cost {cost}"))
    }

    pub(super) fn unknown_block() -> Self {
        Self::rejected("header not found")
    }

    pub(super) fn reverted(data: Bytes) -> Self {
        let message = match decode_revert_reason(&data) {
            Some(reason) => format!("execution reverted: {}", reason.trim_start_matches("revert: ")).into(),
            None => Cow::Borrowed("execution reverted"),
        };
        Self { code: 3, message, data: Some(data) }
    }

    /// The transaction is in the pool, but was not included in time (EIP-7966).
    pub(super) fn not_in_time(transaction: B256) -> Self {
        let message = "the transaction was added to the mempool but was not processed in time";
        Self { code: 4, message: message.into(), data: Some(transaction.into()) }
    }
}

impl From<Failure> for ErrorPayload<Box<RawValue>> {
    fn from(failure: Failure) -> Self {
        let data = failure.data.and_then(|data| to_raw_value(&data).ok());
        Self { code: failure.code, message: failure.message, data }
    }
}
