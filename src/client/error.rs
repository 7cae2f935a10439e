//! Errors of the paying client.

use std::{error::Error, fmt, io, time::Duration};

use alloy_primitives::{Address, U256};

use super::{ChannelFinding, PaymentOutcome, Receipt};
use crate::{
    clock::RandomnessError,
    eip3009::SignError,
    network::Network,
    protocol::{DecodeError, OfferError, PaymentFlow},
    usdc::Usdc,
    vouchers::{ChannelConfigError, ChannelId, ChannelOfferError},
};

/// The reason why the client refused to pay. Nothing was signed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The price is above the limit per payment. Raise [`BudgetBuilder::per_payment`](super::BudgetBuilder::per_payment) to pay it.
    #[error("the price is {asked}, above the limit of {limit} per payment")]
    AbovePaymentLimit {
        /// The price.
        asked: Usdc,
        /// The limit per payment.
        limit: Usdc,
    },
    /// The price is above what remains of the limit in total.
    #[error("the price is {asked}, but {remaining} remains of the total limit of {limit}")]
    AboveTotalLimit {
        /// The price.
        asked: Usdc,
        /// The limit without what is spent and reserved.
        remaining: Usdc,
        /// The limit in total.
        limit: Usdc,
    },
    /// The price is above what remains of the limit per payee.
    #[error("the price is {asked}, but {remaining} remains of the limit of {limit} for payee {payee}")]
    AbovePayeeLimit {
        /// The payee of the offer.
        payee: Address,
        /// The price.
        asked: Usdc,
        /// The limit without what this payee got or may still collect.
        remaining: Usdc,
        /// The limit per payee.
        limit: Usdc,
    },
    /// The price is above what remains of the limit per host.
    #[error("the price is {asked}, but {remaining} remains of the limit of {limit} for host {host}")]
    AboveHostLimit {
        /// The host of the request, without the port.
        host: String,
        /// The price.
        asked: Usdc,
        /// The limit without what this host got or may still collect.
        remaining: Usdc,
        /// The limit per host.
        limit: Usdc,
    },
    /// The price is above what remains of a limit per period. Try again later.
    #[error("the price is {asked}, but {remaining} remains of the limit of {limit} in {window:?}")]
    AboveWindowLimit {
        /// The length of the period.
        window: Duration,
        /// The price.
        asked: Usdc,
        /// The limit without what was signed in the last period.
        remaining: Usdc,
        /// The limit in any such period.
        limit: Usdc,
    },
    /// A deposit into a payment channel is above what [`ChannelPolicy`](super::ChannelPolicy) leaves for escrow. Raise the limit, or get
    /// money back from idle channels.
    #[error("a deposit of {asked} is needed, but {remaining} remains of the limit of {limit} in escrow{}", Of(payee))]
    AboveEscrowLimit {
        /// The payee, if the limit is that per payee.
        payee: Option<Address>,
        /// The smallest deposit that pays for the request.
        asked: Usdc,
        /// The limit without what is in escrow.
        remaining: Usdc,
        /// The limit.
        limit: Usdc,
    },
    /// The seller's terms (`receiverAuthorizer`, `withdrawDelay`) are not those of a channel that still holds money of this payer. No
    /// other channel is opened. Ask for a refund of the earlier channel, or withdraw from it.
    #[error("the terms of payee {payee} are not those of channel {channel}, which still holds money")]
    ChannelTermsChanged {
        /// The payee.
        payee: Address,
        /// The earlier channel.
        channel: ChannelId,
    },
    /// The seller contradicted this payer's books of a channel. Nothing more is signed for it.
    #[error("channel {channel} is in dispute: {finding}")]
    ChannelDisputed {
        /// The channel.
        channel: ChannelId,
        /// What the seller said or did.
        finding: ChannelFinding,
    },
    /// An earlier deposit neither arrived nor expired, and does not cover the price. Try again later.
    #[error("an earlier deposit neither arrived nor expired, and does not cover the price; try again later")]
    DepositPending,
    /// The purchase was signed for in a channel, may have been charged there, and the seller offers none. It is not paid for by another offer.
    /// Ask the seller, or buy it under another name.
    #[error(
        "the purchase may have been charged in channel {channel}, which the seller does not offer now; buy it under another name"
    )]
    PurchaseOfChannel {
        /// The channel.
        channel: ChannelId,
    },
    /// All channels to the payee were in use for too long. Allow more with [`ChannelPolicy::lanes`](super::ChannelPolicy::lanes), or a
    /// longer wait.
    #[error("all channels to payee {payee} are in use")]
    LanesBusy {
        /// The payee.
        payee: Address,
    },
    /// The client accepts none of the offers.
    #[error("none of the offers can be paid: {}", Reasons(reasons))]
    NoPayableOffer {
        /// One reason per offer, in the server's order.
        reasons: Vec<OfferRefusal>,
    },
    /// The request's body is a stream that is longer than what the client reads into memory, so that it cannot be sent a second time with the
    /// payment. Give it as bytes, or raise `PaymentMiddleware::max_buffered_body`.
    #[error(
        "the request's body is a stream that is too long to be sent again with a payment; give it as bytes, or raise \
         PaymentMiddleware::max_buffered_body"
    )]
    BodyNotReplayable,
    /// The request's URI is relative, so that limits per host cannot be checked. Give requests absolute URIs.
    #[error("the request's URI names no host; give requests absolute URIs")]
    NoHost,
    /// This machine's clock is ahead of the seller's, by which an authorization would be valid for too long. Set the clock.
    #[error("this machine's clock is {} s ahead of the seller's; set it", by.as_secs())]
    ClockAhead {
        /// The difference between this clock and the `Date` of the 402.
        by: Duration,
    },
    /// This machine's clock is behind the seller's, by which an authorization would soon expire. Set the clock.
    #[error("this machine's clock is {} s behind the seller's; set it", by.as_secs())]
    ClockBehind {
        /// The difference between the `Date` of the 402 and this clock.
        by: Duration,
    },
    /// The [`Purchase`](super::Purchase) was paid for another request: another method, URL or body. Use one purchase for one request.
    #[error("the purchase is for another request; use one purchase for one request")]
    OtherRequest,
    /// The 402 came from another URL than that of the request. Send the request to that URL if you want to pay there.
    #[error("the request was redirected to {to}; a payment is made only where the caller asked")]
    Redirected {
        /// The URL of the 402, without its query.
        to: String,
    },
}

/// The reason why the client does not accept an offer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfferRefusal {
    /// The offer does not have the fields of the protocol.
    #[error("the offer cannot be read")]
    Unreadable,
    /// The scheme, network or flow is not supported.
    #[error(transparent)]
    Unsupported(#[from] OfferError),
    /// The token is not one that this client pays with. Add it with [`PayerBuilder::asset`](super::PayerBuilder::asset).
    #[error("token {asset} on {network} is not one this client pays with")]
    UnknownAsset {
        /// The chain.
        network: Network,
        /// The token's address.
        asset: Address,
    },
    /// The offer gives a known token another EIP-712 name or version. A signature for it would be invalid.
    #[error("the offer gives token {asset} another EIP-712 name or version than it has")]
    WrongDomain {
        /// The token's address.
        asset: Address,
    },
    /// The amount is zero, or larger than [`Usdc`] can hold.
    #[error("the amount is zero or not an amount of USDC")]
    Amount,
    /// The offer's `maxTimeoutSeconds` is zero.
    #[error("maxTimeoutSeconds is zero")]
    NoTime,
    /// The offer of a payment channel cannot be read, or asks for something that this crate does not do.
    #[error(transparent)]
    Channel(#[from] ChannelOfferError),
    /// The contract would not open such a channel.
    #[error(transparent)]
    ChannelConfig(#[from] ChannelConfigError),
    /// The channel's withdraw delay is longer than a day, for which the money of a seller that does not answer any more would be locked.
    #[error("the seller's withdraw delay of {asked:?} is longer than the limit of {limit:?}")]
    WithdrawDelay {
        /// The delay in the offer.
        asked: Duration,
        /// The longest accepted one.
        limit: Duration,
    },
    /// The client does not pay by permits in this scheme. [`PayerBuilder`](super::PayerBuilder) has a setter for each.
    #[error("this client does not pay by permits in the scheme {scheme:?}")]
    Permit {
        /// The scheme.
        scheme: &'static str,
    },
    /// The payer has let Permit2 move less of the token than the offer's amount. Approve more.
    #[error(
        "Permit2 may move {approved} atomic units of the payer's token, and the offer is for {needed}: approve more"
    )]
    NotApproved {
        /// What the payer has approved, in atomic units.
        approved: U256,
        /// The offer's amount, in atomic units.
        needed: U256,
    },
    /// The client does not pay in this flow. See [`PayerBuilder::flows`](super::PayerBuilder::flows).
    #[error("this client does not pay in the flow \"{0}\"")]
    Flow(PaymentFlow),
}

/// Names the payee that a limit is for.
struct Of<'a>(&'a Option<Address>);

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |payee| write!(f, " for payee {payee}"))
    }
}

/// Shows several reasons as one sentence.
struct Reasons<'a>(&'a [OfferRefusal]);

impl fmt::Display for Reasons<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        if self.0.is_empty() {
            return f.write_str("there are none");
        }
        for (i, reason) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{reason}", if i == 0 { "" } else { "; " })?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// An error of a request that had to be paid for.
///
/// After all errors but [`Unanswered`](Self::Unanswered), no payment was sent, or the only one was a voucher that the seller refused. After
/// that one, repeat the same request, or use a [`Purchase`](super::Purchase): the same payment is presented again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PaymentError {
    /// The client refused to pay.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The header `PAYMENT-REQUIRED` of the 402, or its body of x402 v1, cannot be read.
    #[error("the server's payment requirements cannot be read")]
    Unreadable(#[source] DecodeError),
    /// The operating system gave no randomness for a nonce.
    #[error(transparent)]
    Randomness(#[from] RandomnessError),
    /// The signer refused or failed.
    #[error(transparent)]
    Sign(#[from] SignError),
    /// The signer was so slow, each time differently, that what it signed was not valid for the time that the server asks for. Nothing was
    /// sent.
    #[error("the signer took {took:?} for an authorization of {window:?}; it was not sent")]
    SlowSigner {
        /// How long the signer took the last time.
        took: Duration,
        /// How long the authorization should be valid.
        window: Duration,
    },
    /// The payment could not be written as a header of at most [`MAX_PAYMENT_HEADER`](crate::protocol::MAX_PAYMENT_HEADER) bytes. The
    /// server's 402 is too long, or has values that a header cannot have.
    #[error("the payment could not be encoded; it was not sent")]
    Encode(#[source] Box<dyn Error + Send + Sync>),
    /// The journal could not record the payment, so it was not sent. Check the disk.
    #[error("the journal could not record the payment; it was not sent")]
    Journal(#[source] io::Error),
    /// The payment was sent and no answer came. Its amount stays reserved; reconciliation finds out whether it was settled.
    ///
    /// That is said also if the last attempt could not connect: an HTTP client may have sent the request before, in an attempt of its own.
    #[error("a payment of {} was sent and not answered in {attempts} attempts; it may still be executed", receipt.amount)]
    Unanswered {
        /// The receipt of the payment. Its outcome is unknown unless an earlier attempt was answered.
        receipt: Box<Receipt>,
        /// The number of attempts.
        attempts: u32,
        /// The error of the last attempt.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
}

impl PaymentError {
    pub(super) fn encode(source: impl Error + Send + Sync + 'static) -> Self {
        Self::Encode(Box::new(source))
    }

    /// Returns the outcome of the payment, which is [`Refused`](PaymentOutcome::Refused) if none was sent.
    pub fn outcome(&self) -> PaymentOutcome {
        self.receipt().map_or(PaymentOutcome::Refused, |receipt| receipt.outcome)
    }

    /// Returns the receipt of the payment, if one was sent.
    pub fn receipt(&self) -> Option<&Receipt> {
        match self {
            Self::Unanswered { receipt, .. } => Some(receipt),
            _ => None,
        }
    }

    /// Returns the payment error inside an error of a reqwest client with middlewares, if it is one.
    #[cfg(feature = "reqwest")]
    pub fn of(error: &reqwest_middleware::Error) -> Option<&Self> {
        match error {
            reqwest_middleware::Error::Middleware(error) => error.downcast_ref(),
            reqwest_middleware::Error::Reqwest(_) => None,
        }
    }
}

/// An error of [`AddPayment`](super::AddPayment).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddPaymentError<E> {
    /// The inner service failed before anything was paid.
    #[error(transparent)]
    Inner(E),
    /// The request was not paid for, or its payment was not answered.
    #[error(transparent)]
    Payment(PaymentError),
}

impl<E> AddPaymentError<E> {
    /// Returns the payment error, if it is one.
    pub const fn payment(&self) -> Option<&PaymentError> {
        match self {
            Self::Inner(_) => None,
            Self::Payment(error) => Some(error),
        }
    }
}

impl<E, P: Into<PaymentError>> From<P> for AddPaymentError<E> {
    fn from(error: P) -> Self {
        Self::Payment(error.into())
    }
}
