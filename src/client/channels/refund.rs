//! Asking a seller for money back from a channel.

use std::sync::Arc;

use alloy_primitives::B256;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::{
    ChannelFinding,
    entry::Correction,
    lease::Lease,
    payment::{correct, sign_voucher},
    report::refunded,
    state::{Code, code_of},
};
use crate::{
    client::{
        Payer, PaymentError, Refusal,
        answer::{AnswerHead, Said},
        challenge::{Challenge, header_of},
        wallet::Wallet,
    },
    protocol::header_name,
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
            wallet: self.wallet().clone(),
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
    wallet: Arc<Wallet>,
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
        let (voucher, _) = sign_voucher(&self.wallet, (self.lease.id(), entry), entry.charged).await?;
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
        HeaderName::from_static(header_name::PAYMENT_SIGNATURE)
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
        let answer = AnswerHead::new(status, headers, None, self.wallet.now(), || false);
        let refund = match answer.said(entry.network, entry.config.payer) {
            Said::Paid { response, transaction } => refunded(*response, entry).map(|amount| (amount, transaction)),
            Said::Failed { reason, .. } => {
                self.result.reason = Some(reason.as_str().into());
                return Ok(false);
            }
            _ => None,
        };
        if let Some((amount, transaction)) = refund {
            let asked = self.amount.unwrap_or(Usdc::MAX).min(entry.available());
            let amount = amount.unwrap_or(asked).min(asked);
            if entry.note_refund(transaction) {
                entry.refund_reported(amount, self.wallet.budget.releases_failed());
            }
            (self.result.amount, self.result.transaction, self.result.reason) = (amount, transaction, None);
            return Ok(false);
        }
        let theirs = match headers.contains_key(header_name::PAYMENT_REQUIRED) {
            true => Challenge::read(headers, None).ok().flatten(),
            false => None,
        };
        let reason = theirs.as_ref().and_then(Challenge::reason);
        self.result.reason = Some(
            reason.as_ref().map_or_else(|| format!("the server answered {status}"), |reason| reason.as_str().into()),
        );
        // A refusal with a code of the scheme is about the channel, and not about the offer.
        let Some(reason) = reason.filter(|reason| code_of(reason) != reason.as_str()) else {
            let offered = theirs.and_then(|challenge| Some((challenge.channel_offer(entry)?, challenge)));
            let Some(((index, _), challenge)) = offered.filter(|_| !self.is_theirs) else { return Ok(false) };
            (self.is_theirs, self.challenge, self.index) = (true, challenge, index);
            self.sign().await?;
            return Ok(true);
        };
        if Code::of(&reason) != Code::Mismatch || self.is_corrected {
            return Ok(false);
        }
        self.is_corrected = true;
        self.result.finding = match correct(headers, self.result.channel, entry) {
            Correction::Adopted => None,
            Correction::Charged(finding) => Some(finding),
            Correction::Unproven => {
                self.result.finding = Some(ChannelFinding::Unproven);
                return Ok(false);
            }
            Correction::Disputed(finding) => {
                self.result.finding = Some(finding);
                return Ok(false);
            }
        };
        self.sign().await?;
        Ok(true)
    }

    /// Records the outcome in budget and journal.
    pub async fn conclude(self) -> Refund {
        self.lease.write_soon().await;
        self.result
    }
}

debug_fields!(SignedRefundRequest { result });
