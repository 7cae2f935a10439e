//! Why a purchase was not made, or cannot be accounted for.

use std::{error::Error, fmt, io, time::Duration};

use alloy_primitives::Address;

use super::{Outcome, Receipt};
use crate::{
    clock::RandomnessError,
    eip3009::SignError,
    network::Network,
    protocol::{DecodeError, OfferError, PaymentFlow},
    usdc::Usdc,
};

/// Why the client did not pay. Nothing was signed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The best payable offer costs more than one payment may, and the budget covers no other.
    #[error("the price is {asked}, above the limit of {limit} per payment")]
    AbovePaymentLimit {
        /// The price.
        asked: Usdc,
        /// The limit per payment.
        limit: Usdc,
    },
    /// The budget does not cover the price.
    #[error("the price is {asked}, but {remaining} remains of the total limit of {limit}")]
    AboveTotalLimit {
        /// The price.
        asked: Usdc,
        /// What is neither spent nor reserved.
        remaining: Usdc,
        /// The limit in total.
        limit: Usdc,
    },
    /// This payee has had, or may yet collect, what one payee may have.
    #[error("the price is {asked}, but {remaining} remains of the limit of {limit} for payee {payee}")]
    AbovePayeeLimit {
        /// Whom the offer pays.
        payee: Address,
        /// The price.
        asked: Usdc,
        /// What this payee may still have.
        remaining: Usdc,
        /// The limit per payee.
        limit: Usdc,
    },
    /// This host has had, or may yet collect, what one host may have.
    #[error("the price is {asked}, but {remaining} remains of the limit of {limit} for host {host}")]
    AboveHostLimit {
        /// The host that asks, without its port.
        host: String,
        /// The price.
        asked: Usdc,
        /// What this host may still have.
        remaining: Usdc,
        /// The limit per host.
        limit: Usdc,
    },
    /// Too much was promised recently.
    #[error("the price is {asked}, but {remaining} remains of the limit of {limit} in {window:?}")]
    AboveWindowLimit {
        /// How far back the limit looks.
        window: Duration,
        /// The price.
        asked: Usdc,
        /// What may still be promised now.
        remaining: Usdc,
        /// The limit in any such time.
        limit: Usdc,
    },
    /// None of the offers is one that this client pays; one reason for each offer it looked at.
    #[error("none of the offers can be paid: {}", Listed(reasons))]
    NoPayableOffer {
        /// Why not, in the order of the offers.
        reasons: Vec<OfferRefusal>,
    },
    /// The request's body is a stream that could not be sent a second time with the payment.
    #[error("the request's body is a stream and cannot be sent again with a payment; give it as bytes")]
    BodyNotReplayable,
    /// The request's URI is relative, so that nobody can tell whom the payment would go to.
    #[error("the request's URI names no host; give requests absolute URIs")]
    NoHost,
    /// The 402 came from another address than the one the request was for.
    #[error("the request was redirected to {to}; a payment is made only where the caller asked")]
    Redirected {
        /// Where the 402 came from, without its query.
        to: String,
    },
}

/// Why one offer is not payable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfferRefusal {
    /// Not an offer in the protocol's form.
    #[error("the offer cannot be read")]
    Unreadable,
    /// A scheme, chain or flow that is not implemented.
    #[error(transparent)]
    Unsupported(#[from] OfferError),
    /// A token that the client was not told to trust.
    #[error("token {asset} on {network} is not one this client pays with")]
    UnknownAsset {
        /// The chain.
        network: Network,
        /// The token.
        asset: Address,
    },
    /// A trusted token under another name or version: a signature for it would be void.
    #[error("the offer gives token {asset} another EIP-712 name or version than it has")]
    WrongDomain {
        /// The token.
        asset: Address,
    },
    /// Zero, or more than any amount of USDC.
    #[error("the amount is zero or not an amount of USDC")]
    Amount,
    /// No time to pay in.
    #[error("maxTimeoutSeconds is zero")]
    NoTime,
    /// Less time than this client wants.
    #[error("maxTimeoutSeconds is {offered}, below this client's least of {least}")]
    Window {
        /// What the offer allows, in seconds.
        offered: u64,
        /// The least that is accepted, in seconds.
        least: u64,
    },
    /// The money would move when this client does not want it to.
    #[error("this client does not pay in the flow \"{0}\"")]
    Flow(PaymentFlow),
}

/// Several reasons as one sentence.
struct Listed<'a>(&'a [OfferRefusal]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Enough to see what is wrong; the rest is in the variant.
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

/// Why a request that had to be paid for has no response.
///
/// All but [`Unanswered`](Self::Unanswered) mean that no payment left this process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PaymentError {
    /// The client may not, or cannot, pay what is asked.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The 402's `PAYMENT-REQUIRED`, or its body if it says that it is of v1, cannot be read.
    #[error("the server's demand for payment cannot be read")]
    Unreadable(#[source] DecodeError),
    /// No nonce.
    #[error(transparent)]
    Randomness(#[from] RandomnessError),
    /// The key refused or failed.
    #[error(transparent)]
    Sign(#[from] SignError),
    /// The payment could not be written as a header, or not as one of at most
    /// [`MAX_PAYMENT_HEADER`](crate::protocol::MAX_PAYMENT_HEADER) bytes.
    #[error("the payment could not be encoded; it was not sent")]
    Encode(#[source] Box<dyn Error + Send + Sync>),
    /// The journal could not record the payment, so it was not sent.
    #[error("the journal could not record the payment; it was not sent")]
    Journal(#[source] io::Error),
    /// The payment was sent and no answer came, however often it was presented.
    #[error("a payment of {} was sent and not answered in {attempts} attempts; it may still be executed", receipt.amount)]
    Unanswered {
        /// What was signed; its outcome is whatever earlier answers proved, otherwise unknown.
        receipt: Box<Receipt>,
        /// How often it was presented.
        attempts: u32,
        /// The last failure.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
}

impl PaymentError {
    pub(super) fn encode(source: impl Error + Send + Sync + 'static) -> Self {
        Self::Encode(Box::new(source))
    }

    /// The outcome to keep books by: refused if nothing left this process.
    pub fn outcome(&self) -> Outcome {
        self.receipt().map_or(Outcome::Refused, |receipt| receipt.outcome)
    }

    /// What was signed, if a payment was sent.
    pub fn receipt(&self) -> Option<&Receipt> {
        match self {
            Self::Unanswered { receipt, .. } => Some(receipt),
            _ => None,
        }
    }

    /// The payment error inside a middleware error, if that is what it is.
    #[cfg(feature = "reqwest")]
    pub fn of(error: &reqwest_middleware::Error) -> Option<&Self> {
        match error {
            reqwest_middleware::Error::Middleware(error) => error.downcast_ref(),
            reqwest_middleware::Error::Reqwest(_) => None,
        }
    }
}
