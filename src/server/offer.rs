//! What is on offer, and the 402 that says so.

use std::{borrow::Cow, fmt, sync::Arc};

use alloy_primitives::{Address, U256};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, request::Parts};
use serde_json::{Map, Value};

use super::{
    blank::Blank,
    claim::Offered,
    offer_v1::InV1,
    price::{Price, PriceError, Pricing, Quote},
    target::Target,
};
use crate::{
    network::Asset,
    payment::Terms,
    protocol::{ExactOffer, PaymentFlow, PaymentRequired, ResourceInfo, V2, Verbatim, encode_header},
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

impl Way {
    pub(super) fn offer(&self, amount: U256, max_timeout_seconds: u64) -> ExactOffer {
        let Self { asset, pay_to, flow, .. } = self;
        ExactOffer { asset: asset.clone(), amount, pay_to: *pay_to, max_timeout_seconds, flow: *flow }
    }
}

/// Where the resource's URL comes from.
#[derive(Clone, Debug)]
pub(super) enum Location {
    /// One resource.
    Url(String),
    /// The request's path under this origin.
    Origin(String),
    /// The request itself, whose sender chooses its `Host`. A trusted proxy says by which scheme it was asked.
    Request { trusts_proxy: bool },
}

/// Everything on sale.
pub(super) struct Catalogue {
    pricing: Pricing,
    ways: Vec<Way>,
    max_timeout_seconds: u64,
    resource: ResourceInfo,
    location: Location,
    extensions: Option<Verbatim<Map<String, Value>>>,
    /// `None` if v1 is not spoken.
    in_v1: Option<InV1>,
    /// The terms at a fixed price.
    fixed: Option<Arc<[OnOffer]>>,
    /// The plain 402 for a fixed price.
    prebuilt: Option<Prebuilt>,
}

/// A 402 that is written before it is asked for, as far as it can be.
enum Prebuilt {
    /// At a fixed URL.
    Whole(Demand),
    /// Wherever the request goes.
    But(Blank),
}

/// Terms, and the facilitator that settles them.
#[derive(Clone, Debug)]
pub(super) struct OnOffer {
    pub(super) terms: Arc<Terms>,
    pub(super) facilitator: usize,
    /// What v1 calls its network, if it is made to v1.
    pub(super) v1_network: Option<&'static str>,
}

/// A 402 in its two forms: the header for v2, the body for v1 and for people.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    pub(super) header: HeaderValue,
    pub(super) body: Bytes,
}

impl Catalogue {
    pub(super) fn new(
        pricing: Pricing,
        ways: Vec<Way>,
        max_timeout_seconds: u64,
        resource: ResourceInfo,
        location: Location,
        extensions: Option<Verbatim<Map<String, Value>>>,
        speaks_v1: bool,
    ) -> Self {
        let in_v1 = speaks_v1.then(|| InV1::of(&ways, max_timeout_seconds, &resource));
        let mut catalogue = Self {
            pricing,
            ways,
            max_timeout_seconds,
            resource,
            location,
            extensions,
            in_v1,
            fixed: None,
            prebuilt: None,
        };
        if let Price::Fixed(amount) = catalogue.pricing.price {
            let offers = catalogue.offers_at(amount);
            catalogue.prebuilt = catalogue.prebuild(&offers);
            catalogue.fixed = Some(offers);
        }
        catalogue
    }

    /// Whether payments of v1 are read.
    pub(super) fn speaks_v1(&self) -> bool {
        self.in_v1.is_some()
    }

    /// What is on offer whatever the request.
    pub(super) fn fixed(&self) -> Option<&Arc<[OnOffer]>> {
        self.fixed.as_ref()
    }

    /// The headers that the price of a request depends on.
    pub(super) fn priced_by(&self) -> &[HeaderName] {
        &self.pricing.headers
    }

    /// Whether a request must be read whole before it can be priced.
    pub(super) fn reads_body(&self) -> bool {
        matches!(self.pricing.price, Price::OfBody(_))
    }

    /// What takes as much room in a 402 as anything that is on offer.
    pub(super) fn longest(&self) -> Arc<[OnOffer]> {
        self.fixed.clone().unwrap_or_else(|| self.offers_at(Usdc::MAX))
    }

    /// What is on offer for this request; `None` if it is free. `body` is empty unless the price [depends on it](Self::reads_body).
    pub(super) async fn offers(&self, request: &mut Parts, body: &Bytes) -> Result<Option<Arc<[OnOffer]>>, PriceError> {
        match self.pricing.quote(request, body).await? {
            Quote::Amount(amount) if amount > Usdc::ZERO => Ok(Some(self.offers_at(amount))),
            Quote::Amount(_) | Quote::Free => Ok(None),
        }
    }

    /// The 402 for a request; `error` is a code and a sentence.
    pub(super) fn demand(
        &self,
        target: &Target<'_>,
        offers: &[OnOffer],
        error: Option<(&str, &str)>,
    ) -> Option<Demand> {
        match (&self.prebuilt, error) {
            (Some(Prebuilt::Whole(demand)), None) => Some(demand.clone()),
            (Some(Prebuilt::But(blank)), None) => blank.fill(&self.url(target)),
            _ => self.assemble(&self.url(target), offers, error),
        }
    }

    /// What the 402 offers besides ways to pay.
    pub(super) fn extensions(&self) -> Offered<'_> {
        self.extensions.as_ref()
    }

    /// What tells this seller from others who share its ledger and may see equal paths: nested routers cut them short. Only
    /// what is configured, and does not change with the price; never a `Host`, or a client could choose what its payment is bound to.
    pub(super) fn seller(&self) -> [&str; 2] {
        let place = match &self.location {
            Location::Url(place) | Location::Origin(place) => place,
            Location::Request { .. } => "",
        };
        [place, self.resource.service_name.as_deref().unwrap_or_default()]
    }

    /// What is said of the resource, but for its URL.
    pub(super) fn resource(&self) -> &ResourceInfo {
        &self.resource
    }

    /// Takes from a request what its URL is made of.
    pub(super) fn target<'a>(&self, uri: &'a Uri, headers: &'a HeaderMap) -> Target<'a> {
        match &self.location {
            Location::Url(_) | Location::Origin(_) => Target::of_path(uri),
            Location::Request { trusts_proxy } => Target::of(uri, headers, *trusts_proxy),
        }
    }

    /// Where the resource is, as the 402 names it.
    pub(super) fn url<'a>(&'a self, target: &'a Target<'_>) -> Cow<'a, str> {
        self.public_url(target).unwrap_or_else(|| target.url())
    }

    /// The same, if it is the seller who says so.
    pub(super) fn public_url(&self, target: &Target<'_>) -> Option<Cow<'_, str>> {
        match &self.location {
            Location::Url(url) => Some(Cow::Borrowed(url)),
            Location::Origin(origin) => Some(Cow::Owned(format!("{origin}{}", target.path()))),
            Location::Request { .. } => None,
        }
    }

    fn offers_at(&self, amount: Usdc) -> Arc<[OnOffer]> {
        let offer = |(index, way): (usize, &Way)| {
            let is_in_v1 = self.in_v1.as_ref().is_some_and(|in_v1| in_v1.includes(index));
            OnOffer {
                terms: Arc::new(Terms::new(way.offer(amount.into(), self.max_timeout_seconds))),
                facilitator: way.facilitator,
                v1_network: way.asset.network.v1_name().filter(|_| is_in_v1),
            }
        };
        self.ways.iter().enumerate().map(offer).collect()
    }

    fn prebuild(&self, offers: &[OnOffer]) -> Option<Prebuilt> {
        /// No URL, and nothing that anybody would say of a resource.
        const MARK: &str = "tower-x402: the URL of what was asked for";
        match &self.location {
            Location::Url(url) => self.assemble(url, offers, None).map(Prebuilt::Whole),
            Location::Origin(_) | Location::Request { .. } => {
                let demand = self.assemble(MARK, offers, None)?;
                Blank::of(&demand, MARK).map(Prebuilt::But)
            }
        }
    }

    fn assemble(&self, url: &str, offers: &[OnOffer], error: Option<(&str, &str)>) -> Option<Demand> {
        let (code, sentence) = match error {
            Some((code, detail)) => (code, Cow::Owned(format!("{code}: {detail}"))),
            None => ("payment required", Cow::Borrowed("payment required")),
        };
        let mut required = PaymentRequired {
            x402_version: V2,
            error: Some(code.to_owned()),
            resource: ResourceInfo { url: url.to_owned(), ..self.resource.clone() },
            accepts: offers.iter().map(|offer| offer.terms.text().clone()).collect(),
            extensions: self.extensions.clone(),
        };
        let header = encode_header(&required).ok()?.try_into().ok()?;
        let body = match self.in_v1.as_ref().and_then(|in_v1| in_v1.body(offers, url, &sentence)) {
            Some(body) => body,
            None => {
                required.error = Some(sentence.into_owned());
                serde_json::to_vec(&required).ok()?.into()
            }
        };
        Some(Demand { header, body })
    }
}

impl fmt::Debug for Catalogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Catalogue")
            .field("price", &self.pricing.price)
            .field("ways", &self.ways)
            .finish_non_exhaustive()
    }
}
