//! Asking a seller for money back from a channel.

use alloy_primitives::B256;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::{
    ChannelFinding,
    answer::RefundReport,
    entry::Correction,
    lease::Lease,
    payment::{code_of, sign_voucher},
};
use crate::{
    client::{Payer, PaymentError, Refusal, offer::Challenge, payment::header_of},
    protocol::{Version, header_name},
    usdc::Usdc,
    vouchers::{ChannelId, ChannelPayload, RefundRequest},
};

impl Payer {
    /// Signs a request for a refund of what is left in a channel, or of at most `amount`.
    ///
    /// Send it to the channel's [`url`](super::ChannelEntry::url) with its [`method`](super::ChannelEntry::method) and no body.
    /// `refund_channels` (feature `reqwest`) sends it, too. It accepts the offer that the channel was opened for, as the journal has it.
    ///
    /// Returns `None` if the channel is unknown or empty.
    ///
    /// # Errors
    /// See [`PaymentError`]; [`Refusal::LanesBusy`] while a request uses the channel.
    pub async fn refund(
        &self,
        channel: ChannelId,
        amount: Option<Usdc>,
    ) -> Result<Option<SignedRefundRequest>, PaymentError> {
        let budget = self.budget();
        let entry = budget.journal().with_books(|books| books.get(channel).cloned());
        let Some(entry) = entry.filter(|entry| entry.available() > Usdc::ZERO) else { return Ok(None) };
        let challenge = Challenge::of_channel(&entry).map_err(PaymentError::encode)?;
        let busy = Refusal::LanesBusy { payee: entry.config.receiver };
        let lease = Lease::get(budget, channel).ok_or(busy)?;
        let mut refund = SignedRefundRequest {
            payer: self.clone(),
            lease,
            challenge,
            index: 0,
            amount,
            header: HeaderValue::from_static(""),
            is_theirs: false,
            is_corrected: false,
            result: Refund { channel, amount: Usdc::ZERO, transaction: None, reason: None, finding: None },
        };
        refund.sign().await?;
        Ok(Some(refund))
    }
}

/// A signed request for a refund. It has its channel for itself.
///
/// Send [`header`](Self::header) under [`header_name`](Self::header_name), report the answer with [`answered`](Self::answered), send it again
/// if that returns `true`, and [`conclude`](Self::conclude).
#[must_use]
pub struct SignedRefundRequest {
    payer: Payer,
    lease: Lease,
    challenge: Challenge,
    index: usize,
    amount: Option<Usdc>,
    header: HeaderValue,
    /// The offer is the seller's present one, and not the one in the books.
    is_theirs: bool,
    is_corrected: bool,
    result: Refund,
}

/// The result of a request for a refund.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refund {
    /// The channel.
    pub channel: ChannelId,
    /// What the seller says that it refunded. In the budget it stays reserved until `reconcile_channels` has seen it on the chain.
    pub amount: Usdc,
    /// The transaction that the seller names.
    pub transaction: Option<B256>,
    /// Why nothing was refunded: the seller's reason code, or what its answer lacks.
    pub reason: Option<String>,
    /// Something that the seller said which contradicts the books.
    pub finding: Option<ChannelFinding>,
}

impl SignedRefundRequest {
    /// Signs a voucher for exactly what was charged, which lets the seller claim no more.
    async fn sign(&mut self) -> Result<(), PaymentError> {
        let entry = &self.lease.entry;
        let (voucher, _) = sign_voucher(&self.payer, (self.lease.id(), entry), entry.charged).await?;
        let request = RefundRequest {
            channel_config: entry.config,
            voucher,
            amount: self.amount.map(|amount| amount.atomic().into()),
            refund_nonce: None,
            claims: None,
            refund_authorizer_signature: None,
            claim_authorizer_signature: None,
        };
        let payload = ChannelPayload::Refund(Box::new(request));
        let text = self.challenge.channel_header(self.index, &payload).map_err(PaymentError::encode)?;
        self.header = header_of(&text)?;
        Ok(())
    }

    /// Returns the name of the payment header.
    pub const fn header_name(&self) -> HeaderName {
        HeaderName::from_static(Version::V2.payment_header())
    }

    /// Returns the value of the payment header, marked as sensitive.
    pub const fn header(&self) -> &HeaderValue {
        &self.header
    }

    /// Interprets an answer. Returns `true` if the request is to be sent again, with another [`header`](Self::header): the seller's books
    /// were behind or ahead, or it refunds only who accepts its present offer. That happens at most twice.
    ///
    /// # Errors
    /// [`PaymentError::Sign`] if the voucher could not be signed again, [`PaymentError::Encode`] if the seller's present offer leaves it no
    /// room in a payment header.
    pub async fn answered(&mut self, status: StatusCode, headers: &HeaderMap) -> Result<bool, PaymentError> {
        let entry = &mut self.lease.entry;
        match RefundReport::read(headers, entry) {
            RefundReport::Refunded { amount, transaction } => {
                let asked = self.amount.unwrap_or(Usdc::MAX).min(entry.available());
                let amount = amount.unwrap_or(asked).min(asked);
                entry.refund_reported(amount, self.payer.budget().releases_failed());
                self.result.amount = amount;
                self.result.transaction = transaction;
                self.result.reason = None;
                return Ok(false);
            }
            RefundReport::Failed { reason } => {
                self.result.reason = Some(reason.as_str().into());
                return Ok(false);
            }
            RefundReport::None => {}
        }
        let theirs = match headers.contains_key(header_name::PAYMENT_REQUIRED) {
            true => Challenge::read(headers, None).ok().flatten(),
            false => None,
        };
        let reason = theirs.as_ref().and_then(Challenge::reason);
        self.result.reason = Some(
            reason.as_ref().map_or_else(|| format!("the server answered {status}"), |reason| reason.as_str().into()),
        );
        let is_mismatch = reason
            .as_ref()
            .is_some_and(|reason| matches!(code_of(reason), "cumulative_amount_mismatch" | "cumulative_below_claimed"));
        // A refusal with a code of the scheme is about the channel, and not about the offer.
        let is_about_offer = reason.is_none_or(|reason| code_of(&reason) == reason.as_str());
        let offered = theirs.and_then(|challenge| Some((challenge.channel_offer(entry)?, challenge)));
        if is_about_offer {
            let Some(((index, _), challenge)) = offered.filter(|_| !self.is_theirs) else { return Ok(false) };
            (self.is_theirs, self.challenge, self.index) = (true, challenge, index);
            self.sign().await?;
            return Ok(true);
        }
        if !is_mismatch || self.is_corrected {
            return Ok(false);
        }
        self.is_corrected = true;
        let theirs = offered.map(|((_, offer), _)| offer);
        let state = theirs.as_ref().and_then(|offer| offer.channel_state.as_ref());
        let voucher = theirs.as_ref().and_then(|offer| offer.voucher_state.as_ref());
        match entry.correct(state.filter(|state| state.channel_id == self.result.channel), voucher) {
            Correction::Adopted => {
                self.sign().await?;
                Ok(true)
            }
            Correction::Charged(finding) => {
                self.result.finding = Some(finding);
                self.sign().await?;
                Ok(true)
            }
            Correction::Unproven => {
                self.result.finding = Some(ChannelFinding::Unproven);
                Ok(false)
            }
            Correction::Disputed(finding) => {
                self.result.finding = Some(finding);
                Ok(false)
            }
        }
    }

    /// Records the outcome in budget and journal.
    pub async fn conclude(self) -> Refund {
        if let Err(error) = self.lease.write(false, None).await {
            tracing::warn!(%error, "the outcome of a refund could not be written to the journal");
        }
        self.result
    }
}

debug_fields!(SignedRefundRequest { result });
