//! What can be told of a payment without asking anybody.

use std::sync::Arc;

use alloy_primitives::{B256, U256};

use super::{Echo, PaymentKey, Terms};
use crate::{
    eip3009::{Authorization, PaymentSignature, RecoverError},
    protocol::{ExactPayload, Reason},
};

/// A payment that passed every local check against an offer of ours. Made by [`precheck`], or restored from the record of one that was.
#[derive(Clone, Debug)]
pub struct Prechecked {
    terms: Arc<Terms>,
    payload: ExactPayload,
    authenticity: Authenticity,
    echo: Option<Arc<Echo>>,
    known_failures: u32,
}

/// Who can tell whether the signature is the payer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authenticity {
    /// The payer's key made it.
    Proven,
    /// Not the payer's key: only a contract at the payer's address can accept it (ERC-1271). The error says why no
    /// address was recovered; without one, another key signed.
    ChainMustJudge(Option<RecoverError>),
}

/// The window of time in which an authorization must be usable, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// How much must remain before `validBefore`: the handler's deadline and the margin for settlement.
    pub remaining: u64,
    /// How far the payer's clock may run ahead of ours.
    pub skew: u64,
}

/// Checks a payment against `terms` at the time `now` (Unix seconds), without I/O.
///
/// # Errors
/// [`Rejection`] with the protocol's reason and one sentence that says what is wrong.
pub fn precheck(terms: Arc<Terms>, payload: ExactPayload, window: Window, now: u64) -> Result<Prechecked, Rejection> {
    let ExactPayload { authorization, signature } = &payload;
    let offer = terms.offer();
    if authorization.to != offer.pay_to {
        return Err(Rejection::new(
            Reason::RecipientMismatch,
            "the authorization pays another address than the offer's payTo",
        ));
    }
    if authorization.value != offer.amount {
        let detail =
            format!("the authorization is for {} atomic units, the offer for {}", authorization.value, offer.amount);
        return Err(Rejection::new(Reason::ValueMismatch, detail));
    }
    check_window(authorization, offer.max_timeout_seconds, window, now)?;
    if signature.is_erc6492() {
        let detail = "the signature is for a wallet that is not deployed (ERC-6492); deploy the wallet first";
        return Err(Rejection::new(Reason::Eip6492FactoryNotAllowed, detail));
    }
    if signature.as_bytes().is_empty() {
        return Err(Rejection::new(Reason::Signature, "the signature is empty"));
    }
    // What cannot be a key's signature is not hashed for.
    let authenticity = match signature.recover_from(|| authorization.signing_hash(terms.domain())) {
        Ok(signer) if signer == authorization.from => Authenticity::Proven,
        Ok(_) => Authenticity::ChainMustJudge(None),
        Err(error) => Authenticity::ChainMustJudge(Some(error)),
    };
    Ok(Prechecked { terms, payload, authenticity, echo: None, known_failures: 0 })
}

fn check_window(authorization: &Authorization, max_timeout: u64, window: Window, now: u64) -> Result<(), Rejection> {
    let until_latest = max_timeout.saturating_add(window.skew);
    if authorization.valid_after >= U256::from(now) {
        return Err(Rejection::new(Reason::ValidAfter, format!("validAfter is not in the past (now is {now})")));
    }
    if authorization.valid_before <= U256::from(now) {
        return Err(Rejection::new(Reason::ValidBefore, format!("validBefore has passed (now is {now})")));
    }
    if authorization.valid_before < U256::from(now.saturating_add(window.remaining)) {
        let detail = format!("validBefore leaves less than {} seconds (now is {now})", window.remaining);
        return Err(Rejection::new(Reason::ValidBefore, detail));
    }
    if authorization.valid_before > U256::from(now.saturating_add(until_latest)) {
        let detail = format!("validBefore lies more than {until_latest} seconds ahead (now is {now})");
        return Err(Rejection::new(Reason::ValidBefore, detail));
    }
    Ok(())
}

impl Prechecked {
    /// The terms it was checked against.
    pub const fn terms(&self) -> &Arc<Terms> {
        &self.terms
    }

    /// What the payer signed.
    pub const fn authorization(&self) -> &Authorization {
        &self.payload.authorization
    }

    /// The payer's signature.
    pub const fn signature(&self) -> &PaymentSignature {
        &self.payload.signature
    }

    /// The EIP-712 hash of the authorization, computed each time.
    pub fn signing_hash(&self) -> B256 {
        self.authorization().signing_hash(self.terms.domain())
    }

    /// Who can tell whether the signature is the payer's.
    pub const fn authenticity(&self) -> Authenticity {
        self.authenticity
    }

    /// The same payment with what else the payer returned of the 402, for a facilitator that makes something of it. The ledger
    /// does not keep it.
    pub fn with_echo(self, echo: Option<Arc<Echo>>) -> Self {
        Self { echo, ..self }
    }

    /// What else the payer returned of the 402, where that is still known.
    pub const fn echo(&self) -> Option<&Arc<Echo>> {
        self.echo.as_ref()
    }

    /// Marks the payment as presented by a payer that may know of this many [failures](crate::ledger::Record::failures): that settling
    /// it failed before is no reason not to try again. A payment that failed is settled only if it is presented with this, or made
    /// from the record.
    pub fn again(self, failures: u32) -> Self {
        Self { known_failures: failures, ..self }
    }

    /// Returns how many [failures](crate::ledger::Record::failures) were on record when the payment was presented.
    pub const fn known_failures(&self) -> u32 {
        self.known_failures
    }

    /// What the payer sent.
    #[cfg(feature = "remote")]
    pub(crate) const fn payload(&self) -> &ExactPayload {
        &self.payload
    }

    /// What identifies the payment.
    pub fn key(&self) -> PaymentKey {
        PaymentKey::of(&self.terms, self.authorization())
    }

    /// Whether it still is within its window: time passes while a payment waits.
    #[cfg(feature = "server")]
    pub(crate) fn check_window(&self, window: Window, now: u64) -> Result<(), Rejection> {
        check_window(self.authorization(), self.terms.offer().max_timeout_seconds, window, now)
    }

    /// Restores a payment from its record, which the ledger keeps only of payments that passed [`precheck`].
    #[cfg(any(feature = "server", feature = "onchain", feature = "remote"))]
    pub(crate) const fn restored(terms: Arc<Terms>, payload: ExactPayload, known_failures: u32) -> Self {
        Self { terms, payload, authenticity: Authenticity::Proven, echo: None, known_failures }
    }
}

/// Why a payment is not good.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {detail}")]
pub struct Rejection {
    /// The protocol's code.
    pub reason: Reason,
    /// One sentence that says what is wrong.
    pub detail: String,
}

impl Rejection {
    /// A rejection.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}
