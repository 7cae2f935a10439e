//! What is sent to a facilitator, and what its answers mean.

use std::time::Duration;

use alloy_primitives::{Address, B256};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::api::Answer;
use crate::{
    network::Network,
    payment::{Prechecked, Rejection},
    protocol::{ExactPayload, PaymentRequirements, Reason, ResourceInfo, Verbatim, VerifyResponse},
};

/// The longest reason code that is passed on.
const MAX_CODE: usize = 96;
/// How much of a facilitator's prose is passed on.
const MAX_WORDS: usize = 160;

/// The body for `/verify` and `/settle`: the same bytes for the same payment and echo, in whatever process and however often. What
/// is to be paid is our own offer, from the ledger: of that nothing is the payer's to choose but the signed authorization.
pub(super) fn body_for(payment: &Prechecked) -> Result<Bytes, serde_json::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Request<'a> {
        x402_version: u8,
        payment_payload: Payload<'a>,
        payment_requirements: &'a Verbatim<PaymentRequirements>,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Payload<'a> {
        x402_version: u8,
        #[serde(skip_serializing_if = "Option::is_none")]
        resource: Option<&'a Verbatim<ResourceInfo>>,
        accepted: &'a Verbatim<PaymentRequirements>,
        payload: &'a ExactPayload,
        #[serde(skip_serializing_if = "Option::is_none")]
        extensions: Option<&'a Verbatim<Map<String, Value>>>,
    }
    let offer = payment.terms().text();
    let echo = payment.echo();
    let payment_payload = Payload {
        x402_version: 2,
        resource: echo.and_then(|echo| echo.resource()),
        accepted: offer,
        payload: payment.payload(),
        extensions: echo.and_then(|echo| echo.extensions()),
    };
    let request = Request { x402_version: 2, payment_payload, payment_requirements: offer };
    serde_json::to_vec(&request).map(Bytes::from)
}

/// What an answer to `/verify` means.
#[derive(Debug)]
pub(super) enum Verdict {
    Valid,
    Invalid(Rejection),
    /// None that can be used.
    None,
}

pub(super) fn read_verdict(answer: &Answer, payment: &Prechecked) -> Verdict {
    if answer.status.is_server_error() {
        return Verdict::None;
    }
    let Some(said) = read_object::<VerifyResponse>(&answer.body) else { return Verdict::None };
    match said.invalid_reason {
        _ if said.is_valid && answer.status.is_success() => match said.payer.as_deref() {
            Some(payer) if !is_address(payer, payment.authorization().from) => {
                tracing::error!("the facilitator found another payer than the one who signed");
                Verdict::None
            }
            _ => Verdict::Valid,
        },
        Some(reason) if !said.is_valid => match known(&reason) {
            Reason::UnexpectedVerifyError => Verdict::None,
            reason => Verdict::Invalid(Rejection::new(reason, words(said.invalid_message.as_deref()))),
        },
        _ => Verdict::None,
    }
}

/// A message, which is an object: serde would take a list of its fields for one, too.
pub(super) fn read_object<T: serde::de::DeserializeOwned>(body: &[u8]) -> Option<T> {
    let is_object = body.trim_ascii_start().starts_with(b"{");
    is_object.then(|| serde_json::from_slice(body).ok()).flatten()
}

/// What an answer to `/settle` means.
#[derive(Debug)]
pub(super) enum Reply {
    /// It says that this transaction paid.
    Paid(B256),
    /// It says that it is not known yet.
    Pending(Option<B256>),
    /// It says that the payment was not executed, with a reason that means just that.
    Refused { reason: Reason, detail: String, transaction: Option<B256> },
    /// It says that another payment than this one was settled, or does not say what paid.
    Lie(&'static str),
    /// None that can be used.
    None,
}

/// Read with tolerance for what is left out.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Settlement {
    success: bool,
    error_reason: Option<String>,
    error_message: Option<String>,
    payer: Option<String>,
    transaction: Option<String>,
    network: Option<String>,
    amount: Option<String>,
}

pub(super) fn read_settlement(answer: &Answer, payment: &Prechecked) -> Reply {
    if answer.status.is_server_error() {
        return Reply::None;
    }
    let Some(said) = read_object::<Settlement>(&answer.body) else { return Reply::None };
    let transaction = said.transaction.as_deref().and_then(|hash| hash.parse().ok()).filter(|hash| *hash != B256::ZERO);
    if !said.success {
        let reason = known(&Reason::from(said.error_reason.as_deref().unwrap_or_default()));
        return match reason {
            Reason::SettlementPending | Reason::DuplicateSettlement => Reply::Pending(transaction),
            reason if is_final(&reason) => {
                Reply::Refused { reason, detail: words(said.error_message.as_deref()), transaction }
            }
            // It may have been executed: by another's transaction, or in spite of the error.
            _ => Reply::None,
        };
    }
    if !answer.status.is_success() {
        return Reply::None;
    }
    let network = payment.terms().offer().network();
    let is_ours = |named: &str| named.parse() == Ok(network) || Network::from_v1_name(named) == Some(network);
    let authorization = payment.authorization();
    if said.network.is_some_and(|named| !named.is_empty() && !is_ours(&named)) {
        return Reply::Lie("on another network");
    }
    if said.payer.is_some_and(|payer| !payer.is_empty() && !is_address(&payer, authorization.from)) {
        return Reply::Lie("by another payer");
    }
    if said.amount.is_some_and(|amount| !amount.is_empty() && amount != authorization.value.to_string()) {
        return Reply::Lie("of another amount");
    }
    transaction.map_or(Reply::Lie("without a transaction"), Reply::Paid)
}

/// How long the answer asks to wait, if it does.
pub(super) fn pause_of(answer: &Answer) -> Option<Duration> {
    answer.retry_after
}

/// Whether this reason, given for a payment that was never given to anybody before, means that it is not executed. Others may
/// hide an execution: a used nonce, a reverting simulation or a transaction that did not pay, which the facilitator's own earlier
/// transaction, or that of a stranger who saw it and was faster, left behind.
fn is_final(reason: &Reason) -> bool {
    !matches!(
        reason,
        Reason::NonceAlreadyUsed
            | Reason::SimulationFailed
            | Reason::InvalidTransactionState
            | Reason::SettlementPending
            | Reason::DuplicateSettlement
            | Reason::UnexpectedVerifyError
            | Reason::UnexpectedSettleError
            | Reason::Other(_)
    )
}

/// A reason that may be passed on: foreign text stays within the alphabet of codes.
fn known(reason: &Reason) -> Reason {
    match reason {
        Reason::Other(code) => {
            let is_code = !code.is_empty()
                && code.len() <= MAX_CODE
                && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'));
            if is_code { reason.clone() } else { Reason::UnexpectedVerifyError }
        }
        known => known.clone(),
    }
}

/// The beginning of what a facilitator says, without anything that a terminal would obey.
fn words(text: Option<&str>) -> String {
    let text: String = text.unwrap_or_default().chars().take(MAX_WORDS).collect();
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match text.trim() {
        "" => "the facilitator refused the payment".to_owned(),
        text => format!("the facilitator refused the payment: {text}"),
    }
}

fn is_address(text: &str, address: Address) -> bool {
    text.parse() == Ok(address)
}
