//! A payment with a voucher of a payment channel (scheme `batch-settlement`), from its check to its charge.
//!
//! A channel has one request at a time; others wait for it in a line. What a request costs is charged after the work, at most its price,
//! by one step of the books. The chain is asked only if the channel was not looked at for a while, or is to be filled or refunded.
//!
//! | file | question it answers |
//! |---|---|
//! | `mod` | does a voucher fit what is offered, and is it signed? |
//! | `request` | has its channel the money, and is its request new or answered before? |
//! | `held` | what is charged for the work? |
//! | `channel` | who frees a channel, and what is its payer told of it? |

mod channel;
mod held;
mod request;

use alloy_primitives::Address;
use serde::Deserialize;
use serde_json::Value;

pub(crate) use held::BatchHeld;
pub(crate) use request::BatchRequest;

use super::Refusal;
use crate::{
    channels::Channels,
    protocol::{PaymentPayload, PaymentRequirements, Verbatim},
    vouchers::{ChannelConfig, ChannelPayload, Deposit, RefundRequest, SCHEME, Voucher, reason},
};

/// Returns `true` if the payment accepts an offer of this scheme.
pub(crate) fn is_voucher(payment: &PaymentPayload) -> bool {
    #[derive(Deserialize)]
    struct Accepted {
        scheme: String,
    }
    serde_json::from_str(payment.accepted.text()).is_ok_and(|accepted: Accepted| accepted.scheme == SCHEME)
}

/// Returns `true` if the payment asks for a refund, which has no price.
pub(crate) fn is_refund(payment: &PaymentPayload) -> bool {
    #[derive(Deserialize)]
    struct Payload {
        r#type: String,
    }
    is_voucher(payment)
        && serde_json::from_str(payment.payload.text()).is_ok_and(|payload: Payload| payload.r#type == "refund")
}

/// An offer to pay with vouchers.
#[derive(Clone, Debug)]
pub(crate) struct VoucherOffer {
    requirements: PaymentRequirements,
    text: Verbatim<PaymentRequirements>,
}

impl VoucherOffer {
    pub(crate) fn new(requirements: PaymentRequirements) -> Self {
        Self { text: Verbatim::of_requirements(&requirements), requirements }
    }

    /// Returns the offer at another price.
    pub(crate) fn at(template: &PaymentRequirements, amount: &str) -> Self {
        let mut requirements = PaymentRequirements { amount: amount.to_owned(), ..template.clone() };
        if let Some(deposit) = requirements.extra.get_mut("minDeposit") {
            // A deposit pays for one request at least.
            let is_too_small =
                |deposit: &str| deposit.len() < amount.len() || (deposit.len() == amount.len() && deposit < amount);
            if deposit.as_str().is_some_and(is_too_small) {
                *deposit = Value::String(amount.to_owned());
            }
        }
        Self::new(requirements)
    }

    pub(crate) fn requirements(&self) -> &PaymentRequirements {
        &self.requirements
    }

    /// Returns the offer as a 402 has it.
    pub(crate) fn text(&self) -> &Verbatim<PaymentRequirements> {
        &self.text
    }

    /// Returns `true` if the offer that a payer says it accepts is this one: the same text, or the same fields with at least the offered
    /// `extra`.
    pub(crate) fn is_accepted_by(&self, accepted: &Verbatim<PaymentRequirements>) -> bool {
        if accepted.text() == self.text.text() {
            return true;
        }
        let (Ok(accepted), offered) = (accepted.read(), &self.requirements) else { return false };
        let has = |(name, value)| accepted.extra.get(name).is_some_and(|theirs| is_same(value, theirs));
        accepted.scheme == offered.scheme
            && accepted.network == offered.network
            && accepted.amount == offered.amount
            && accepted.asset.eq_ignore_ascii_case(&offered.asset)
            && accepted.pay_to.eq_ignore_ascii_case(&offered.pay_to)
            && accepted.max_timeout_seconds == offered.max_timeout_seconds
            && offered.extra.iter().all(has)
    }
}

/// Compares values of `extra`: texts without case, since addresses are among them.
fn is_same(offered: &Value, accepted: &Value) -> bool {
    match (offered, accepted) {
        (Value::String(offered), Value::String(accepted)) => offered.eq_ignore_ascii_case(accepted),
        _ => offered == accepted,
    }
}

/// A payment by voucher that fits our offer and is signed by its payer. Whether anything was deposited into the channel is not known yet.
pub(crate) struct PrecheckedVoucher {
    config: ChannelConfig,
    voucher: Voucher,
    deposit: Option<Deposit>,
    /// The amount asked for, if it is a request for a refund.
    refund: Option<Option<u128>>,
    /// The price; 0 for a refund.
    price: u128,
    /// The number of the channel offer that was accepted.
    offer: usize,
    /// Why it would be refused if it were new: it does not fit what is offered now.
    refusal: Option<Refusal>,
}

impl PrecheckedVoucher {
    /// Reads the payload, and checks it against its signature and our offer. Asks nobody.
    pub(crate) fn read(
        channels: &Channels,
        offers: &[VoucherOffer],
        payment: &PaymentPayload,
    ) -> Result<Self, Refusal> {
        let payload: ChannelPayload = serde_json::from_str(payment.payload.text()).map_err(|error| {
            Refusal::malformed(reason::PAYLOAD_TYPE, format!("the payload cannot be read: {error}"))
        })?;
        let (config, voucher, deposit, refund) = match payload {
            ChannelPayload::Deposit { channel_config, voucher, deposit } => {
                (channel_config, voucher, Some(deposit), None)
            }
            ChannelPayload::Voucher { channel_config, voucher } => (channel_config, voucher, None, None),
            ChannelPayload::Refund(refund) => {
                let RefundRequest { channel_config, voucher, amount, .. } = *refund;
                (channel_config, voucher, None, Some(amount))
            }
            _ => {
                let detail = "a seller takes deposits, vouchers and requests for refunds";
                return Err(Refusal::malformed(reason::PAYLOAD_TYPE, detail));
            }
        };
        let checks = [
            (config.validate().is_err(), reason::CHANNEL_ID_MISMATCH, "the contract would not open this channel"),
            (
                channels.escrow().channel_id(&config) != voucher.channel_id,
                reason::CHANNEL_ID_MISMATCH,
                "channelId is not that of channelConfig on this chain",
            ),
            (
                config.payer_authorizer.is_zero(),
                reason::VOUCHER_SIGNATURE,
                "a channel needs a key that signs its vouchers (payerAuthorizer)",
            ),
        ];
        if let Some((_, code, detail)) = checks.into_iter().find(|(is_wrong, ..)| *is_wrong) {
            return Err(Refusal::rejected(code, detail));
        }
        if !channels.is_signed(&config, &voucher) {
            let detail = "the voucher is not signed by the channel's payerAuthorizer";
            return Err(Refusal::rejected(reason::VOUCHER_SIGNATURE, detail));
        }
        let is_chosen = |offer: &VoucherOffer| match refund {
            // A refund is owed whatever is offered now, and to whatever request.
            Some(_) => is_of_channel(offer.requirements(), &config) && is_on(offer.requirements(), &payment.accepted),
            None => offer.is_accepted_by(&payment.accepted),
        };
        let offer = offers.iter().position(is_chosen);
        let accepted = offer.map(|index| offers[index].requirements());
        let (price, refusal) = match Self::check_terms(channels, &config, refund.is_some(), accepted) {
            Ok(price) => (price, None),
            Err((code, detail)) => (0, Some(Refusal::rejected(code, detail))),
        };
        Ok(Self { config, voucher, deposit, refund, price, offer: offer.unwrap_or_default(), refusal })
    }

    /// Returns the price of the accepted offer, or what does not fit it: a code and a sentence.
    fn check_terms(
        channels: &Channels,
        config: &ChannelConfig,
        is_refund: bool,
        accepted: Option<&PaymentRequirements>,
    ) -> Result<u128, (&'static str, &'static str)> {
        let Some(accepted) = accepted else {
            let detail = "the accepted network, asset, amount, payTo, maxTimeoutSeconds or extra is not what is offered for this request";
            return Err(("invalid_payment_requirements", detail));
        };
        let (asset, pay_to): (Option<Address>, Option<Address>) =
            (accepted.asset.parse().ok(), accepted.pay_to.parse().ok());
        let checks = [
            (Some(config.receiver) != pay_to, reason::RECEIVER_MISMATCH, "the channel's receiver is not payTo"),
            (
                !channels.has_authorizer(config),
                reason::RECEIVER_AUTHORIZER_MISMATCH,
                "the channel's receiverAuthorizer is not the offered one",
            ),
            (Some(config.token) != asset, reason::TOKEN_MISMATCH, "the channel's token is not the asset"),
            (
                !is_refund && !channels.has_delay(config),
                reason::WITHDRAW_DELAY_MISMATCH,
                "the channel's withdrawDelay is not the offered one",
            ),
        ];
        match checks.into_iter().find(|(is_wrong, ..)| *is_wrong) {
            Some((_, code, detail)) => Err((code, detail)),
            None if is_refund => Ok(0),
            None => accepted.amount.parse().map_err(|_| (reason::VOUCHER_PAYLOAD, "amount is no amount")),
        }
    }
}

/// Returns `true` if the offer is for the chain of the accepted one.
fn is_on(offered: &PaymentRequirements, accepted: &Verbatim<PaymentRequirements>) -> bool {
    accepted.read().is_ok_and(|accepted| accepted.network == offered.network)
}

/// Returns `true` if the offer is for channels with this receiver and token.
fn is_of_channel(offered: &PaymentRequirements, config: &ChannelConfig) -> bool {
    offered.pay_to.parse() == Ok(config.receiver) && offered.asset.parse() == Ok(config.token)
}
