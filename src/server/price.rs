//! What a request costs.

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use bytes::Bytes;
use http::{StatusCode, request::Parts};

use crate::usdc::Usdc;

/// The price of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quote {
    /// Nothing: the request passes unpaid.
    Free,
    /// This much.
    Amount(Usdc),
}

impl From<Usdc> for Quote {
    fn from(amount: Usdc) -> Self {
        Self::Amount(amount)
    }
}

/// A request cannot be priced. It is answered with this status; nothing is asked for and nothing is charged.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct PriceError {
    /// 4xx if the request is to blame, 503 if a price is not available now.
    pub status: StatusCode,
    /// What the client should change.
    pub message: String,
}

pub(super) type QuoteFuture = Pin<Box<dyn Future<Output = Result<Quote, PriceError>> + Send>>;

type PriceOfBody = dyn Fn(&Parts, &Bytes) -> QuoteFuture + Send + Sync;

/// A fixed price, or a function of the request, with its body or without.
#[derive(Clone)]
pub(super) enum Price {
    Fixed(Usdc),
    Of(Arc<dyn Fn(&Parts) -> QuoteFuture + Send + Sync>),
    OfBody(Arc<PriceOfBody>),
}

impl fmt::Debug for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(amount) => amount.fmt(f),
            Self::Of(_) => f.write_str("a function of the request"),
            Self::OfBody(_) => f.write_str("a function of the request and its body"),
        }
    }
}
