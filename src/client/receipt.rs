//! What is known of a payment when its request has ended.

use std::fmt;

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};

use super::ChannelFinding;
use crate::{
    network::Network,
    usdc::Usdc,
    vouchers::{ChannelConfig, ChannelId},
};

/// The outcome of a payment, as far as the client can tell.
///
/// The client believes what a server reports about its own payment, but never counts an answer as a settlement that contradicts
/// what was signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PaymentOutcome {
    /// The server names the transaction that settled the payment. The amount is spent; of a maximum, see [`Receipt::amount`].
    Settled,
    /// The server accepted the payment and will settle it later. The amount is spent.
    Accepted,
    /// The server reports that the payment failed. This is no proof: the server can use the signature until it expires, so the amount
    /// stays reserved until the chain proves more.
    Failed,
    /// The outcome is not known: the payment may have been settled, or may yet be. The amount stays reserved.
    Unknown,
    /// The client refused to pay. Nothing was signed.
    Refused,
}

impl PaymentOutcome {
    /// Returns the outcome as text, in lower case.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Accepted => "accepted",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
            Self::Refused => "refused",
        }
    }

    /// Returns `true` if the server counts the payment as made.
    pub const fn is_paid(self) -> bool {
        matches!(self, Self::Settled | Self::Accepted)
    }
}

impl fmt::Display for PaymentOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The record of a payment: what was signed, and its outcome.
///
/// A paid response carries its receipt in its extensions, where [`ReceiptExt`] reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// The outcome.
    pub outcome: PaymentOutcome,
    /// The transaction that the server names.
    pub transaction: Option<B256>,
    /// The chain.
    pub network: Network,
    /// The token's address.
    pub asset: Address,
    /// The amount that was signed. Of a maximum it is what was charged: as the payer's node shows it
    /// ([`PermitPolicy::node`](super::PermitPolicy::node)), or else as the seller says. The budget believes only the chain that it was less
    /// than what was signed for.
    pub amount: Usdc,
    /// The payer's address.
    pub payer: Address,
    /// The payee's address.
    pub pay_to: Address,
    /// The authorization's nonce. With network, asset and payer it identifies the payment.
    pub nonce: B256,
    /// Why the payment is not settled: the server's reason code, or what is wrong with its answer.
    pub reason: Option<String>,
    /// The payment channel, if the payment was made by voucher. Then [`amount`](Self::amount) is what the seller charged, and
    /// [`nonce`](Self::nonce) the voucher's digest.
    pub channel: Option<ChannelReceipt>,
}

impl Receipt {
    /// Returns the receipt of a payment that was signed, and of which nothing was heard.
    pub(super) const fn signed(
        (network, asset): (Network, Address),
        amount: Usdc,
        (payer, pay_to): (Address, Address),
        nonce: B256,
    ) -> Self {
        let (outcome, transaction, reason) = (PaymentOutcome::Unknown, None, None);
        Self { outcome, transaction, network, asset, amount, payer, pay_to, nonce, reason, channel: None }
    }

    /// Returns `true` if the payment was made by voucher, from a payment channel.
    pub const fn is_by_voucher(&self) -> bool {
        self.channel.is_some()
    }
}

/// The channel's part of a [`Receipt`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelReceipt {
    /// The channel.
    pub id: ChannelId,
    /// The fields that make the channel: who paid, who may claim, in which token.
    pub config: ChannelConfig,
    /// The price of the request: the most that it could cost in this channel. [`Receipt::amount`] is what the seller charged of it.
    pub price: Usdc,
    /// What it could cost in other channels, which it left because the seller called them busy: their seller has a voucher of this request,
    /// too. With the price it is within [`BudgetBuilder::per_payment`](crate::client::BudgetBuilder::per_payment). A charge of such a voucher
    /// is a [finding](ChannelFinding::ChargedRefused) of a later request.
    pub left: Usdc,
    /// The deposit that was sent along, if one was.
    pub deposit: Option<Usdc>,
    /// What was charged in the channel in all.
    pub charged: Usdc,
    /// Something that the seller said which contradicts the books.
    pub finding: Option<ChannelFinding>,
}

/// Reads the receipt of a response.
pub trait ReceiptExt {
    /// Returns the receipt of the payment for this response. Returns `None` if nothing was paid.
    fn receipt(&self) -> Option<&Receipt>;
}

impl<B> ReceiptExt for http::Response<B> {
    fn receipt(&self) -> Option<&Receipt> {
        self.extensions().get()
    }
}

#[cfg(feature = "reqwest")]
impl ReceiptExt for ::reqwest::Response {
    fn receipt(&self) -> Option<&Receipt> {
        self.extensions().get()
    }
}
