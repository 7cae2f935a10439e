//! The checks of a payment that need no I/O.

use std::sync::Arc;

use alloy_primitives::{B256, U256};

use super::{EchoedMetadata, PaymentKey, Terms};
use crate::{
    eip3009::{Authorization, PaymentSignature, RecoverError},
    permit2::{self, Permit},
    protocol::{ExactPayload, Reason},
};

/// A payment that passed all local checks against an offer. [`precheck`] returns it, and a ledger restores it from a record.
#[derive(Clone, Debug)]
pub struct Prechecked {
    terms: Arc<Terms>,
    payload: ExactPayload,
    authenticity: Authenticity,
    echoed: Option<Arc<EchoedMetadata>>,
    known_failures: u32,
    /// What is charged, if that is decided and may be less than what was signed for.
    charged: Option<U256>,
}

/// The result of checking a signature without a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authenticity {
    /// The payer's key signed.
    Proven,
    /// The payer's key did not sign: only a contract at the payer's address can accept the signature (ERC-1271). The error says why no
    /// address was recovered; without one, another key signed.
    ChainMustJudge(Option<RecoverError>),
}

/// The margins of an authorization's window of validity, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Window {
    /// The time that must remain before `validBefore`: the handler's deadline and the margin for settlement. Default: 0.
    pub remaining: u64,
    /// How far the payer's clock may be ahead of this one. Default: 0.
    pub skew: u64,
}

impl Window {
    /// Sets the time that must remain before `validBefore`, in seconds.
    #[must_use]
    pub const fn remaining(mut self, seconds: u64) -> Self {
        self.remaining = seconds;
        self
    }

    /// Sets how far the payer's clock may be ahead of this one, in seconds.
    #[must_use]
    pub const fn skew(mut self, seconds: u64) -> Self {
        self.skew = seconds;
        self
    }
}

/// Checks a payment against `terms` at the time `now` (Unix seconds), without I/O.
///
/// # Errors
/// [`Rejection`] with the protocol's reason code and one sentence for people.
pub fn precheck(terms: Arc<Terms>, payload: ExactPayload, window: Window, now: u64) -> Result<Prechecked, Rejection> {
    match check(&terms, &payload, window, now) {
        Ok(authenticity) => {
            Ok(Prechecked { terms, payload, authenticity, echoed: None, known_failures: 0, charged: None })
        }
        Err(rejection) => Err(terms.rejection(rejection)),
    }
}

fn check(terms: &Terms, payload: &ExactPayload, window: Window, now: u64) -> Result<Authenticity, Rejection> {
    let ExactPayload { authorization, signature, permit } = payload;
    let offer = terms.offer();
    check_permit(terms.permit(), *permit)?;
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
    check_window(terms, authorization, window, now)?;
    if signature.is_erc6492() {
        let detail = "the signature is for a wallet that is not deployed (ERC-6492); deploy the wallet first";
        return Err(Rejection::new(Reason::Eip6492FactoryNotAllowed, detail));
    }
    if signature.as_bytes().is_empty() {
        return Err(Rejection::new(Reason::Signature, "the signature is empty"));
    }
    // Bytes that cannot be a key's signature do not cost a hash.
    Ok(match signature.recover_from(|| terms.signing_hash(authorization)) {
        Ok(signer) if signer == authorization.from => Authenticity::Proven,
        Ok(_) => Authenticity::ChainMustJudge(None),
        Err(error) => Authenticity::ChainMustJudge(Some(error)),
    })
}

/// Compares the fields of a permit with those that follow from the offer.
fn check_permit(offered: Option<Permit>, signed: Option<Permit>) -> Result<(), Rejection> {
    let no = |code: &str, detail: &str| Err(Rejection::new(code.into(), detail));
    let (offered, signed) = match (offered, signed) {
        (None, None) => return Ok(()),
        (Some(offered), Some(signed)) => (offered, signed),
        (Some(_), None) => return no(Reason::InvalidPayload.as_str(), "the offer is to be paid by a permit"),
        (None, Some(_)) => return no(Reason::InvalidPayload.as_str(), "the offer is not to be paid by a permit"),
    };
    if signed.spender != offered.spender {
        return no(permit2::SPENDER_MISMATCH, "the permit's spender is not the contract of this scheme");
    }
    if signed.facilitator != offered.facilitator {
        return no(permit2::ACCOUNT_MISMATCH, "the permit names another facilitator than the offer, or none");
    }
    if signed.token != offered.token {
        return no(permit2::TOKEN_MISMATCH, "the permit is for another token than the offer's");
    }
    Ok(())
}

fn check_window(terms: &Terms, authorization: &Authorization, window: Window, now: u64) -> Result<(), Rejection> {
    let until_latest = terms.offer().max_timeout_seconds.saturating_add(window.skew);
    if terms.is_early(authorization, now) {
        return Err(Rejection::new(Reason::ValidAfter, format!("validAfter is not in the past (now is {now})")));
    }
    if terms.is_over(authorization, now) {
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
    /// Returns the terms that it was checked against.
    pub const fn terms(&self) -> &Arc<Terms> {
        &self.terms
    }

    /// Returns the message that the payer signed.
    pub const fn authorization(&self) -> &Authorization {
        &self.payload.authorization
    }

    /// Returns the payer's signature.
    pub const fn signature(&self) -> &PaymentSignature {
        &self.payload.signature
    }

    /// Computes the EIP-712 hash of the authorization.
    pub fn signing_hash(&self) -> B256 {
        self.terms.signing_hash(self.authorization())
    }

    /// Returns whether the signature is proven to be the payer's.
    pub const fn authenticity(&self) -> Authenticity {
        self.authenticity
    }

    /// Sets the other fields of the 402 that the payer echoed, for a facilitator that uses them. The ledger does not keep them.
    #[must_use]
    pub fn with_echoed(self, echoed: Option<Arc<EchoedMetadata>>) -> Self {
        Self { echoed, ..self }
    }

    /// Returns the other fields of the 402 that the payer echoed, if they are still known.
    pub const fn echoed(&self) -> Option<&Arc<EchoedMetadata>> {
        self.echoed.as_ref()
    }

    /// Marks the payment as presented again after this many [failures](crate::ledger::Record::failures) were recorded. A ledger settles a
    /// payment that failed only if it is presented with the number on record.
    #[must_use]
    pub fn again(self, failures: u32) -> Self {
        Self { known_failures: failures, ..self }
    }

    /// Returns how many [failures](crate::ledger::Record::failures) were on record when the payment was presented.
    pub const fn known_failures(&self) -> u32 {
        self.known_failures
    }

    /// Charges this much of a maximum, in atomic units. Until then all of it is verified and settled. Changes nothing unless the terms are
    /// a [maximum](crate::protocol::ExactOffer::is_maximum): of anything else the chain moves what was signed for.
    #[must_use]
    pub fn charging(self, amount: U256) -> Self {
        if self.terms.offer().is_maximum() { Self { charged: Some(amount), ..self } } else { self }
    }

    /// Returns what is charged of what was signed for, if that is decided.
    pub const fn charged(&self) -> Option<U256> {
        self.charged
    }

    /// Returns the amount that is verified and settled, in atomic units.
    pub fn amount(&self) -> U256 {
        self.charged.unwrap_or(self.payload.authorization.value)
    }

    /// Returns the payload that the payer sent.
    #[cfg(feature = "remote")]
    pub(crate) const fn payload(&self) -> &ExactPayload {
        &self.payload
    }

    /// Returns the payment's identity.
    pub fn key(&self) -> PaymentKey {
        PaymentKey::of(&self.terms, self.authorization())
    }

    /// Checks the window again, because time passes while a payment waits.
    #[cfg(feature = "server")]
    pub(crate) fn check_window(&self, window: Window, now: u64) -> Result<(), Rejection> {
        check_window(&self.terms, self.authorization(), window, now)
            .map_err(|rejection| self.terms.rejection(rejection))
    }

    /// Restores a payment from its record, which the ledger keeps only of payments that passed [`precheck`].
    #[cfg(any(feature = "server", feature = "onchain", feature = "remote"))]
    pub(crate) const fn restored(
        terms: Arc<Terms>,
        payload: ExactPayload,
        known_failures: u32,
        charged: Option<U256>,
    ) -> Self {
        Self { terms, payload, authenticity: Authenticity::Proven, echoed: None, known_failures, charged }
    }
}

/// Why a payment was rejected by a check.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {detail}")]
#[non_exhaustive]
pub struct Rejection {
    /// The protocol's reason code.
    pub reason: Reason,
    /// One sentence for people.
    pub detail: String,
}

impl Rejection {
    /// Creates a rejection.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}
