//! What can be wrong with a card.

use std::fmt;

use alloy_primitives::Address;

/// Why a card is not made, or not trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CardError {
    /// The card could not be fetched.
    #[error("the card could not be fetched")]
    Unreachable(#[source] reqwest::Error),
    /// It did not come in time.
    #[error("the card did not come in time")]
    Late,
    /// There is none.
    #[error("asked for the card, the server answered with status {0}")]
    Status(u16),
    /// It is larger than a reader is willing to look at.
    #[error("the card has more than {limit} bytes")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// The server sends whoever asks elsewhere.
    #[error("asked for the card, the server redirects to {to}; a card must come from the origin that it is about")]
    Redirected {
        /// Where to, without its query.
        to: String,
    },
    /// Not an agent card, or not one with good terms.
    #[error("the card is not valid: {at}: {problem}")]
    Invalid {
        /// Where in the card.
        at: String,
        /// What is wrong there.
        problem: String,
    },
    /// Not the card of an evaluator.
    #[error("the card has no pricing extension: it is not an evaluator's")]
    NoPricing,
    /// Nobody vouches for it.
    #[error("the card is not signed")]
    Unsigned,
    /// None of its signatures is the payee's.
    #[error("the card is not signed with the key of {pay_to}, who would be paid, or was changed since")]
    BadSignature {
        /// Who would be paid.
        pay_to: Address,
    },
    /// The endpoint is on another origin than the card.
    #[error("the card's endpoint {endpoint} is not on the origin that the card comes from")]
    ForeignEndpoint {
        /// The endpoint.
        endpoint: String,
    },
    /// The card is signed, but does not say by itself where its evaluator is: a copy on another origin would be as good.
    #[error("the card's endpoint is relative: a signed card names it with its origin")]
    RelativeEndpoint,
    /// Somebody else is to be paid than when the evaluator was first seen.
    #[error("the card wants {found} to be paid, but this evaluator was known by {pinned}")]
    PayeeChanged {
        /// Who was to be paid.
        pinned: Address,
        /// Who is now.
        found: Address,
    },
    /// The card is at an address that is not everybody's, of this machine or its network, and only public ones are asked:
    /// [`CardFetcher::public_only`](super::CardFetcher::public_only),
    /// [`StudentBuilder::private_hosts`](super::StudentBuilder::private_hosts).
    #[error("the host of the card is not a public one, and others are not asked")]
    NotPublic,
    /// No more evaluators can be remembered.
    #[error("{limit} evaluators are known; no more are remembered")]
    TooManyEvaluators {
        /// How many can be.
        limit: usize,
    },
    /// A card is signed by whoever is paid.
    #[error("the card must be signed with the key of {pay_to}, who is paid, not of {signer}")]
    NotThePayee {
        /// Who is paid.
        pay_to: Address,
        /// Whose key it is.
        signer: Address,
    },
    /// The key refused or failed.
    #[error("the signer failed")]
    Sign(#[source] alloy_signer::Error),
}

impl CardError {
    pub(super) fn invalid(at: impl Into<String>, problem: &(impl fmt::Display + ?Sized)) -> Self {
        Self::Invalid { at: at.into(), problem: problem.to_string() }
    }
}
