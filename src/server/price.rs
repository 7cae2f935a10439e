//! What a request costs.

use std::{fmt, future::Future, mem, pin::Pin, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, Uri, header::HOST, request::Parts};

use super::{
    claim::{PAYMENT_SIGNATURE, X_PAYMENT},
    fingerprint::HEADERS,
};

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

/// A price, and the headers that it may depend on besides those of every [fingerprint](HEADERS) and the payment itself.
#[derive(Debug)]
pub(super) struct Pricing {
    pub(super) price: Price,
    pub(super) headers: Box<[HeaderName]>,
}

impl Pricing {
    /// What the request costs. Prices are told no more of it than a payment is bound to: whatever else they went by, a payment for a
    /// cheap request could be presented again with a dear one.
    pub(super) async fn quote(&self, request: &mut Parts, body: &Bytes) -> Result<Quote, PriceError> {
        match &self.price {
            Price::Fixed(amount) => Ok(Quote::Amount(*amount)),
            Price::Of(price) => self.ask(request, |request| price(request)).await,
            Price::OfBody(price) => self.ask(request, |request| price(request, body)).await,
        }
    }

    fn ask(&self, request: &mut Parts, price: impl FnOnce(&Parts) -> QuoteFuture) -> QuoteFuture {
        let mut told = HeaderMap::new();
        for name in HEADERS.iter().chain([&PAYMENT_SIGNATURE, &X_PAYMENT]).chain(&self.headers) {
            for value in request.headers.get_all(name) {
                told.append(name, value.clone());
            }
        }
        let headers = mem::replace(&mut request.headers, told);
        let uri = request.uri.clone();
        if !self.headers.contains(&HOST) {
            // HTTP/2 names the host here.
            request.uri = uri.path_and_query().cloned().map_or_else(Uri::default, Uri::from);
        }
        let quote = price(request);
        (request.headers, request.uri) = (headers, uri);
        quote
    }
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
