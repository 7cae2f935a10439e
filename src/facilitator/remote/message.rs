//! The bodies that are sent to a facilitator, and the meaning of its answers.

use alloy_primitives::{Address, B256};
use bytes::Bytes;
use serde::Deserialize;

use super::api::Answer;
use crate::{
    facilitator::FacilitatorError,
    network::Network,
    payment::{Prechecked, Rejection},
    permit2,
    protocol::{ExactOffer, FacilitatorRequest, PaymentPayload, Reason, Verbatim, VerifyResponse},
};

/// The longest reason code that is passed on, in bytes.
const MAX_CODE: usize = 96;
/// The longest message that is passed on, in characters.
const MAX_MESSAGE: usize = 160;

/// Returns the body for `/verify` and `/settle`: the same bytes for the same payment and echo, in every process. The offer in it is our
/// own, from the ledger. The payer chose only what it signed. Of a maximum, the requirements name what is charged.
pub(super) fn body_for(payment: &Prechecked) -> Result<Bytes, FacilitatorError> {
    let offer = payment.terms().text();
    let required = payment.charged().map(|amount| {
        let charged = ExactOffer { amount, ..payment.terms().offer().clone() };
        Verbatim::of_requirements(&charged.to_requirements())
    });
    let required = required.as_ref().unwrap_or(offer);
    let echo = payment.echoed();
    let body = || {
        let payment = PaymentPayload {
            resource: echo.and_then(|echo| echo.resource()).cloned(),
            extensions: echo.and_then(|echo| echo.extensions()).cloned(),
            ..PaymentPayload::new(offer.clone(), Verbatim::of(payment.payload())?)
        };
        serde_json::to_vec(&FacilitatorRequest::new(payment, required.clone())).map(Bytes::from)
    };
    body().map_err(|_| FacilitatorError::Misconfigured("a payment that cannot be written as JSON".into()))
}

/// The meaning of an answer to `/verify`.
#[derive(Debug)]
pub(super) enum Verification {
    Valid,
    Invalid(Rejection),
    /// The answer cannot be used.
    Unusable,
}

pub(super) fn read_verification(answer: &Answer, payment: &Prechecked) -> Verification {
    if answer.status.is_server_error() {
        return Verification::Unusable;
    }
    let Some(said) = read_object::<VerifyResponse>(&answer.body) else { return Verification::Unusable };
    match said.invalid_reason {
        _ if said.is_valid && answer.status.is_success() => match said.payer.as_deref() {
            Some(payer) if !is_address(payer, payment.authorization().from) => {
                tracing::error!("the facilitator found another payer than the one who signed");
                Verification::Unusable
            }
            _ => Verification::Valid,
        },
        Some(reason) if !said.is_valid => match sanitized(&reason) {
            Reason::UnexpectedVerifyError => Verification::Unusable,
            reason => Verification::Invalid(Rejection::new(reason, detail(said.invalid_message.as_deref()))),
        },
        _ => Verification::Unusable,
    }
}

/// Reads a message, which must be an object. By itself serde accepts a list of the fields, too.
pub(super) fn read_object<T: serde::de::DeserializeOwned>(body: &[u8]) -> Option<T> {
    let is_object = body.trim_ascii_start().starts_with(b"{");
    is_object.then(|| serde_json::from_slice(body).ok()).flatten()
}

/// The meaning of an answer to `/settle`.
#[derive(Debug)]
pub(super) enum Reply {
    /// This transaction made the payment, it says.
    Paid(B256),
    /// The outcome is not known yet, it says.
    Pending(Option<B256>),
    /// The payment was not executed, it says, for a reason that leaves no doubt.
    Refused { reason: Reason, detail: String, transaction: Option<B256> },
    /// It reports another payment than this one, or no transaction.
    Mismatch(&'static str),
    /// The answer cannot be used.
    Unusable,
}

/// A settlement response in which fields may be missing.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Settlement {
    pub(super) success: bool,
    pub(super) error_reason: Option<String>,
    pub(super) error_message: Option<String>,
    payer: Option<String>,
    transaction: Option<String>,
    network: Option<String>,
    amount: Option<String>,
}

impl Settlement {
    /// Returns the transaction that it names.
    pub(super) fn hash(&self) -> Option<B256> {
        self.transaction.as_deref()?.parse().ok().filter(|hash| *hash != B256::ZERO)
    }
}

/// Returns `true` if a facilitator may have answered so that it cannot read a message.
pub(super) fn is_refusal(answer: &Answer) -> bool {
    let can_be = match answer.status.as_u16() {
        401 | 403 | 404 | 405 => false,
        status => (200..300).contains(&status) || (400..500).contains(&status),
    };
    can_be && read_object::<serde_json::Map<String, serde_json::Value>>(&answer.body).is_some()
}

/// Reads an answer to `/settle`. Where nobody looks at the chain (`is_believed`), what was charged of a maximum has to be in it.
pub(super) fn read_settlement(answer: &Answer, payment: &Prechecked, is_believed: bool) -> Reply {
    if answer.status.is_server_error() {
        return Reply::Unusable;
    }
    let Some(said) = read_object::<Settlement>(&answer.body) else { return Reply::Unusable };
    let transaction = said.hash();
    if !said.success {
        let reason = sanitized(&Reason::from(said.error_reason.as_deref().unwrap_or_default()));
        return match reason {
            Reason::SettlementPending | Reason::DuplicateSettlement => Reply::Pending(transaction),
            reason if is_final(&reason) && !may_follow_execution(&reason, payment) => {
                Reply::Refused { reason, detail: detail(said.error_message.as_deref()), transaction }
            }
            // It may have been executed by another's transaction, or in spite of the error.
            _ => Reply::Unusable,
        };
    }
    if !answer.status.is_success() {
        return Reply::Unusable;
    }
    let network = payment.terms().offer().network();
    let is_ours = |named: &str| named.parse() == Ok(network) || Network::from_v1_name(named) == Some(network);
    let authorization = payment.authorization();
    if said.network.is_some_and(|named| !named.is_empty() && !is_ours(&named)) {
        return Reply::Mismatch("on another network");
    }
    if said.payer.is_some_and(|payer| !payer.is_empty() && !is_address(&payer, authorization.from)) {
        return Reply::Mismatch("by another payer");
    }
    match said.amount.filter(|amount| !amount.is_empty()) {
        Some(amount) if amount != payment.amount().to_string() => return Reply::Mismatch("of another amount"),
        None if is_believed && payment.terms().offer().is_maximum() => {
            return Reply::Mismatch("without the amount that was charged");
        }
        _ => {}
    }
    transaction.map_or(Reply::Mismatch("without a transaction"), Reply::Paid)
}

/// Returns `true` if this reason means that a payment that was never sent to anybody before is not executed. Every reason is named, so
/// that nobody adds one without deciding this.
fn is_final(reason: &Reason) -> bool {
    match reason {
        Reason::InsufficientFunds
        | Reason::ValidAfter
        | Reason::ValidBefore
        | Reason::Value
        | Reason::ValueMismatch
        | Reason::Signature
        | Reason::SignatureNewer
        | Reason::RecipientMismatch
        | Reason::MissingEip712Domain
        | Reason::NetworkMismatch
        | Reason::InsufficientBalance
        | Reason::TokenNameMismatch
        | Reason::TokenVersionMismatch
        | Reason::Eip3009NotSupported
        | Reason::Eip6492FactoryNotAllowed
        | Reason::AssetNotDeployed
        | Reason::InvalidNetwork
        | Reason::InvalidPayload
        | Reason::InvalidPaymentRequirements
        | Reason::ExtensionEchoMismatch
        | Reason::InvalidScheme
        | Reason::UnsupportedScheme
        | Reason::InvalidX402Version => true,
        // These may hide an execution. A nonce may be used, a simulation may revert, or a transaction may not pay because the payment was
        // already made: by the facilitator's own earlier transaction, or by a stranger's.
        Reason::NonceAlreadyUsed
        | Reason::SimulationFailed
        | Reason::InvalidTransactionState
        | Reason::SettlementPending
        | Reason::DuplicateSettlement
        | Reason::UnexpectedVerifyError
        | Reason::UnexpectedSettleError => false,
        Reason::Other(code) => permit2::NOT_EXECUTED.contains(&&**code),
    }
}

/// Returns `true` if this reason may be what the execution of a permit by somebody else leaves: an approval of just its amount is used up by
/// it, and so may the balance be. A facilitator may look at these before it looks at the nonce.
fn may_follow_execution(reason: &Reason, payment: &Prechecked) -> bool {
    let is_for_anybody = payment.terms().permit().is_some_and(|permit| permit.is_for_anybody());
    let is_money = matches!(reason, Reason::InsufficientFunds | Reason::InsufficientBalance);
    is_for_anybody && (is_money || reason.as_str() == permit2::ALLOWANCE_REQUIRED)
}

/// Returns a reason that may be passed on. Foreign text must consist of the characters of codes.
fn sanitized(reason: &Reason) -> Reason {
    match reason {
        Reason::Other(code) => {
            let is_code = !code.is_empty()
                && code.len() <= MAX_CODE
                && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'));
            // Permits have codes of their own, which mean the same.
            if is_code { reason.of_authorization() } else { Reason::UnexpectedVerifyError }
        }
        known => known.clone(),
    }
}

/// Returns the beginning of a facilitator's message, without control characters.
pub(super) fn detail(text: Option<&str>) -> String {
    let text: String = text.unwrap_or_default().chars().take(MAX_MESSAGE).collect();
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match text.trim() {
        "" => "the facilitator refused the payment".to_owned(),
        text => format!("the facilitator refused the payment: {text}"),
    }
}

fn is_address(text: &str, address: Address) -> bool {
    text.parse() == Ok(address)
}
