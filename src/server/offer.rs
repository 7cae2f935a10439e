//! What is on offer, and the 402 that says so.

use std::{borrow::Cow, fmt, sync::Arc};

use alloy_primitives::Address;
use bytes::Bytes;
use http::{HeaderValue, Uri, request::Parts};

use super::price::{Price, PriceError, Quote};
use crate::{
    facilitator::Terms,
    network::Asset,
    protocol::{ExactOffer, PaymentFlow, PaymentRequired, ResourceInfo, V2, encode_header},
    usdc::Usdc,
};

/// One way to be paid: a token, a payee, a flow, and which facilitator settles it.
#[derive(Clone, Debug)]
pub(super) struct Way {
    pub(super) asset: Asset,
    pub(super) pay_to: Address,
    pub(super) flow: PaymentFlow,
    pub(super) facilitator: usize,
}

/// Where the resource's URL comes from; never from the request's `Host`, which a client chooses.
#[derive(Clone, Debug)]
pub(super) enum Location {
    /// One resource.
    Url(String),
    /// The request's path under this origin; empty if the origin is not known.
    Origin(String),
}

/// Everything on sale.
pub(super) struct Catalogue {
    price: Price,
    ways: Vec<Way>,
    max_timeout_seconds: u64,
    resource: ResourceInfo,
    location: Location,
    /// The terms at a fixed price.
    fixed: Option<Arc<[OnOffer]>>,
    /// The plain 402 for a fixed price at a fixed URL.
    prebuilt: Option<Demand>,
}

/// Terms, and the facilitator that settles them.
#[derive(Clone, Debug)]
pub(super) struct OnOffer {
    pub(super) terms: Arc<Terms>,
    pub(super) facilitator: usize,
}

/// A 402 in its two forms.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    pub(super) header: HeaderValue,
    pub(super) body: Bytes,
}

impl Catalogue {
    pub(super) fn new(
        price: Price,
        ways: Vec<Way>,
        max_timeout_seconds: u64,
        resource: ResourceInfo,
        location: Location,
    ) -> Self {
        let mut catalogue = Self { price, ways, max_timeout_seconds, resource, location, fixed: None, prebuilt: None };
        if let Price::Fixed(amount) = catalogue.price {
            let offers = catalogue.offers_at(amount);
            if let Location::Url(_) = catalogue.location {
                catalogue.prebuilt = catalogue.assemble(&Uri::default(), &offers, None);
            }
            catalogue.fixed = Some(offers);
        }
        catalogue
    }

    /// What is on offer whatever the request.
    pub(super) fn fixed(&self) -> Option<&[OnOffer]> {
        self.fixed.as_deref()
    }

    /// What is on offer for this request; `None` if it is free.
    pub(super) async fn offers(&self, request: &Parts) -> Result<Option<Arc<[OnOffer]>>, PriceError> {
        match (&self.fixed, &self.price) {
            (Some(offers), _) => Ok(Some(offers.clone())),
            (None, Price::Fixed(amount)) => Ok(Some(self.offers_at(*amount))),
            (None, Price::Of(price)) => match price(request).await? {
                Quote::Amount(amount) if amount > Usdc::ZERO => Ok(Some(self.offers_at(amount))),
                Quote::Amount(_) | Quote::Free => Ok(None),
            },
        }
    }

    /// The 402 for a request; `error` is a code and a sentence.
    pub(super) fn demand(&self, uri: &Uri, offers: &[OnOffer], error: Option<(&str, &str)>) -> Option<Demand> {
        match (&self.prebuilt, error) {
            (Some(prebuilt), None) => Some(prebuilt.clone()),
            _ => self.assemble(uri, offers, error),
        }
    }

    fn offers_at(&self, amount: Usdc) -> Arc<[OnOffer]> {
        let terms = |way: &Way| {
            Arc::new(Terms::new(ExactOffer {
                asset: way.asset.clone(),
                amount: amount.into(),
                pay_to: way.pay_to,
                max_timeout_seconds: self.max_timeout_seconds,
                flow: way.flow,
            }))
        };
        self.ways.iter().map(|way| OnOffer { terms: terms(way), facilitator: way.facilitator }).collect()
    }

    fn assemble(&self, uri: &Uri, offers: &[OnOffer], error: Option<(&str, &str)>) -> Option<Demand> {
        let url = match &self.location {
            Location::Url(url) => Cow::Borrowed(url.as_str()),
            Location::Origin(origin) => Cow::Owned(format!("{origin}{}", uri.path())),
        };
        let mut required = PaymentRequired {
            x402_version: V2,
            error: Some(error.map_or("payment required", |(code, _)| code).to_owned()),
            resource: ResourceInfo { url: url.into_owned(), ..self.resource.clone() },
            accepts: offers.iter().map(|offer| offer.terms.text().clone()).collect(),
            extensions: None,
        };
        let header = encode_header(&required).ok()?.try_into().ok()?;
        if let Some((code, detail)) = error {
            required.error = Some(format!("{code}: {detail}"));
        }
        Some(Demand { header, body: serde_json::to_vec(&required).ok()?.into() })
    }
}

impl fmt::Debug for Catalogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Catalogue").field("price", &self.price).field("ways", &self.ways).finish_non_exhaustive()
    }
}
