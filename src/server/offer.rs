//! What is on offer: prices, the offers made from them, and the 402 that names them.

use std::{borrow::Cow, fmt, future::Future, mem, pin::Pin, sync::Arc};

use alloy_primitives::{Address, U256};
use base64_simd::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header::HOST, request::Parts};
use serde_json::{Map, Value};

use super::{
    fingerprint::HEADERS,
    header_names::{PAYMENT_SIGNATURE, X_PAYMENT},
    resource_url::Target,
    v1::OffersV1,
};
use crate::{
    charge::{Offer, batch::VoucherOffer, extensions::Declared},
    network::Asset,
    payment::Terms,
    protocol::{
        ExactOffer, PaymentFlow, PaymentRequired, PaymentRequirements, ResourceInfo, TransferMethod, V2, encode_header,
    },
    usdc::Usdc,
};

/// The price of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Quote {
    /// The request is free and passes unpaid.
    Free,
    /// The request costs this much.
    Amount(Usdc),
    /// The request costs this much, and this address is paid in place of the layer's own payees: one layer can charge for many sellers.
    ///
    /// All rules for [prices](super::RequirePaymentLayerBuilder::price_with) hold for the payee: it depends on nothing that a payment is not
    /// bound to. Its payments are in the layer's ledger like all others, so whoever else is paid at this address shares that ledger. Credit
    /// ([`deferred`](super::RequirePaymentLayerBuilder::deferred)) is given to a payer for what it paid the same payee, and work that was paid for
    /// before (flow `upfront`) is done only for the payee that was paid. Vouchers are offered for
    /// the layer's own payees only. The zero address is answered 500.
    To {
        /// The payee.
        pay_to: Address,
        /// The price.
        amount: Usdc,
    },
}

impl From<Usdc> for Quote {
    fn from(amount: Usdc) -> Self {
        Self::Amount(amount)
    }
}

/// An error of a price function: the request is answered with this status, and nothing is charged. A request that was paid for before gets
/// its answer all the same.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct PriceError {
    status: StatusCode,
    message: String,
}

impl PriceError {
    /// Creates an error. `status` is 4xx if the request is to blame, 503 if a price is not available now; any that is no error becomes
    /// 500. `message` is a sentence for the client that says what to change.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let is_error = status.is_client_error() || status.is_server_error();
        Self { status: if is_error { status } else { StatusCode::INTERNAL_SERVER_ERROR }, message: message.into() }
    }

    /// Returns the status of the response.
    pub const fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the sentence for the client.
    pub fn message(&self) -> &str {
        &self.message
    }
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
    /// Returns the price of the request. A price function sees no more of it than a payment is bound to: otherwise a payment for a
    /// cheap request could be presented again with an expensive one.
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

/// One way to pay: a token, a payee, a flow, how the token is moved, and which facilitator settles it.
#[derive(Clone, Debug)]
pub(super) struct PaymentOption {
    pub(super) asset: Asset,
    pub(super) pay_to: Address,
    pub(super) flow: PaymentFlow,
    pub(super) method: TransferMethod,
    pub(super) facilitator: usize,
}

impl PaymentOption {
    pub(super) fn offer(&self, amount: U256, max_timeout_seconds: u64) -> ExactOffer {
        let Self { asset, pay_to, flow, method, .. } = self;
        ExactOffer { asset: asset.clone(), amount, pay_to: *pay_to, max_timeout_seconds, flow: *flow, method: *method }
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

/// What a layer was told to offer.
pub(super) struct Offered {
    pub(super) pricing: Pricing,
    pub(super) options: Vec<PaymentOption>,
    /// Whether the options are offered; if not, only vouchers are taken.
    pub(super) takes_exact: bool,
    /// The offers to pay with vouchers, without the amount.
    pub(super) voucher_offers: Vec<PaymentRequirements>,
    pub(super) max_timeout_seconds: u64,
    pub(super) resource: ResourceInfo,
    pub(super) location: Location,
    pub(super) extensions: Arc<Declared>,
}

/// All that the layer offers.
pub(super) struct Catalogue {
    offered: Offered,
    /// `None` if v1 is turned off.
    in_v1: Option<OffersV1>,
    /// `None` if the price depends on the request.
    fixed: Option<Fixed>,
    /// The 402 without an error for a fixed price.
    prebuilt: Option<Prebuilt>,
}

/// What is offered at a fixed price.
struct Fixed {
    offers: Arc<[Offer]>,
    by_voucher: Arc<[VoucherOffer]>,
}

/// A 402 that is written in advance, as far as it can be.
enum Prebuilt {
    /// At a fixed URL.
    Whole(RenderedOffers),
    /// For any URL.
    Template(OffersTemplate),
}

/// The offers as a 402 has them: the header for v2, the body for v1 and for people.
#[derive(Clone, Debug)]
pub(super) struct RenderedOffers {
    pub(super) header: HeaderValue,
    pub(super) body: Bytes,
}

impl Catalogue {
    pub(super) fn new(offered: Offered, speaks_v1: bool) -> Self {
        let in_v1 = speaks_v1.then(|| {
            let offers = offered.options.iter().map(|option| option.offer(U256::ZERO, offered.max_timeout_seconds));
            OffersV1::of(&offers.collect::<Vec<_>>(), offered.takes_exact, &offered.resource)
        });
        let mut catalogue = Self { offered, in_v1, fixed: None, prebuilt: None };
        if let Price::Fixed(amount) = catalogue.offered.pricing.price {
            let offers = catalogue.offers_at(amount);
            catalogue.fixed = Some(Fixed { by_voucher: catalogue.voucher_offers(&offers), offers: offers.clone() });
            catalogue.prebuilt = catalogue.prebuild(&offers);
        }
        catalogue
    }

    /// Returns what reads payments of v1, unless v1 is turned off.
    pub(super) fn in_v1(&self) -> Option<&OffersV1> {
        self.in_v1.as_ref()
    }

    /// Returns the offers at a fixed price.
    pub(super) fn fixed(&self) -> Option<&Arc<[Offer]>> {
        self.fixed.as_ref().map(|fixed| &fixed.offers)
    }

    /// Returns the headers that the price of a request depends on.
    pub(super) fn priced_by(&self) -> &[HeaderName] {
        &self.offered.pricing.headers
    }

    /// Returns `true` if a request must be read whole before it can be priced.
    pub(super) fn reads_body(&self) -> bool {
        matches!(self.offered.pricing.price, Price::OfBody(_))
    }

    /// Returns offers that take as much room in a 402 as any.
    pub(super) fn longest(&self) -> Arc<[Offer]> {
        self.fixed().cloned().unwrap_or_else(|| self.offers_at(Usdc::MAX))
    }

    /// Returns the offers for this request, or `None` if it is free. `body` is empty unless the price [depends on it](Self::reads_body).
    pub(super) async fn offers(&self, request: &mut Parts, body: &Bytes) -> Result<Option<Arc<[Offer]>>, PriceError> {
        let (amount, pay_to) = match self.offered.pricing.quote(request, body).await? {
            Quote::Free => return Ok(None),
            Quote::Amount(amount) => (amount, None),
            Quote::To { pay_to, amount } => (amount, Some(pay_to)),
        };
        if amount == Usdc::ZERO {
            return Ok(None);
        }
        let offers = self.offers_to(pay_to, amount);
        let is_payable = self.offered.takes_exact || !self.voucher_offers(&offers).is_empty();
        if pay_to.is_some_and(|payee| payee.is_zero() || !is_payable) {
            let detail = "the payee of this request cannot be paid here: it is the zero address, or only vouchers are taken, which are for others";
            return Err(PriceError::new(StatusCode::INTERNAL_SERVER_ERROR, detail));
        }
        Ok(Some(offers))
    }

    /// Writes the 402 for a request; `error` is a code and a sentence.
    pub(super) fn render(
        &self,
        target: &Target<'_>,
        offers: &[Offer],
        error: Option<(&str, &str)>,
    ) -> Option<RenderedOffers> {
        match (&self.prebuilt, error) {
            (Some(Prebuilt::Whole(demand)), None) => Some(demand.clone()),
            (Some(Prebuilt::Template(template)), None) => template.fill(&self.url(target)),
            _ => self.assemble(&self.url(target), offers, &self.voucher_offers(offers), error, None),
        }
    }

    /// Writes a 402 in which one of the [offers for vouchers](Self::voucher_offers) has these fields in `extra`, too.
    pub(super) fn render_corrective(
        &self,
        target: &Target<'_>,
        offers: &[Offer],
        error: (&str, &str),
        (index, more): (usize, Map<String, Value>),
    ) -> Option<RenderedOffers> {
        let mut voucher_offers = self.voucher_offers(offers).to_vec();
        if let Some(offer) = voucher_offers.get_mut(index) {
            let mut requirements = offer.requirements().clone();
            requirements.extra.extend(more);
            *offer = VoucherOffer::new(requirements);
        }
        self.assemble(&self.url(target), offers, &voucher_offers, Some(error), Some(index))
    }

    /// Returns the offers to pay the price of these offers with vouchers.
    pub(super) fn voucher_offers(&self, offers: &[Offer]) -> Arc<[VoucherOffer]> {
        if let Some(fixed) = &self.fixed {
            return fixed.by_voucher.clone();
        }
        let Some(amount) = offers.first().map(|offer| offer.terms.offer().amount.to_string()) else {
            return Arc::default();
        };
        // An offer for a payee that is not the layer's has no channels.
        let payees: Vec<_> = offers.iter().map(|offer| offer.terms.offer().pay_to.to_string()).collect();
        let templates = self.offered.voucher_offers.iter().filter(|offer| payees.contains(&offer.pay_to));
        templates.map(|offer| VoucherOffer::at(offer, &amount)).collect()
    }

    /// Returns what tells this seller from others that share its ledger and may see equal paths: nested routers shorten them. It is
    /// configured and does not change with the price. It is never a `Host`, or a client could choose what its payment is bound to.
    pub(super) fn seller(&self) -> [&str; 2] {
        let place = match &self.offered.location {
            Location::Url(place) | Location::Origin(place) => place,
            Location::Request { .. } => "",
        };
        [place, self.offered.resource.service_name.as_deref().unwrap_or_default()]
    }

    /// Returns the description of the resource, without its URL.
    pub(super) fn resource(&self) -> &ResourceInfo {
        &self.offered.resource
    }

    /// Returns the part of a request that its URL is made of.
    pub(super) fn target<'a>(&self, uri: &'a Uri, headers: &'a HeaderMap) -> Target<'a> {
        match &self.offered.location {
            Location::Url(_) | Location::Origin(_) => Target::of_path(uri),
            Location::Request { trusts_proxy } => Target::of(uri, headers, *trusts_proxy),
        }
    }

    /// Returns the resource's URL as the 402 names it.
    pub(super) fn url<'a>(&'a self, target: &'a Target<'_>) -> Cow<'a, str> {
        self.public_url(target).unwrap_or_else(|| target.url())
    }

    /// Returns the same if the seller configured it.
    pub(super) fn public_url(&self, target: &Target<'_>) -> Option<Cow<'_, str>> {
        match &self.offered.location {
            Location::Url(url) => Some(Cow::Borrowed(url)),
            Location::Origin(origin) => Some(Cow::Owned(format!("{origin}{}", target.path()))),
            Location::Request { .. } => None,
        }
    }

    /// Returns the offers to the layer's own payees, at the amount of these if there are any.
    pub(super) fn own_offers(&self, priced: Option<Arc<[Offer]>>) -> Arc<[Offer]> {
        match priced {
            Some(offers) if self.sold_by(&offers).is_none() => offers,
            _ => self.offers_at(Usdc::ZERO),
        }
    }

    /// Returns who is paid by these offers, if the price said so.
    pub(super) fn sold_by(&self, offers: &[Offer]) -> Option<Address> {
        let payees = offers.iter().map(|offer| offer.terms.offer().pay_to);
        payees.zip(&self.offered.options).find_map(|(payee, own)| (payee != own.pay_to).then_some(payee))
    }

    /// Returns the offers at this amount.
    pub(super) fn offers_at(&self, amount: Usdc) -> Arc<[Offer]> {
        self.offers_to(None, amount)
    }

    /// Returns the offers at this amount, to this payee or to the layer's own.
    fn offers_to(&self, payee: Option<Address>, amount: Usdc) -> Arc<[Offer]> {
        let offer = |option: &PaymentOption| {
            let offer = option.offer(amount.into(), self.offered.max_timeout_seconds);
            let pay_to = payee.unwrap_or(offer.pay_to);
            Offer { terms: Arc::new(Terms::new(ExactOffer { pay_to, ..offer })), facilitator: option.facilitator }
        };
        self.offered.options.iter().map(offer).collect()
    }

    fn prebuild(&self, offers: &[Offer]) -> Option<Prebuilt> {
        /// No URL, and in no description of a resource.
        const MARK: &str = "tower-x402: the URL of what was asked for";
        match &self.offered.location {
            Location::Url(url) => {
                self.assemble(url, offers, &self.voucher_offers(offers), None, None).map(Prebuilt::Whole)
            }
            Location::Origin(_) | Location::Request { .. } => {
                let demand = self.assemble(MARK, offers, &self.voucher_offers(offers), None, None)?;
                OffersTemplate::of(&demand, MARK).map(Prebuilt::Template)
            }
        }
    }

    /// Writes a 402. `corrected` is the index of the voucher offer that a refusal is about.
    fn assemble(
        &self,
        url: &str,
        offers: &[Offer],
        voucher_offers: &[VoucherOffer],
        error: Option<(&str, &str)>,
        corrected: Option<usize>,
    ) -> Option<RenderedOffers> {
        let exact = offers.iter().filter(|_| self.offered.takes_exact);
        let mut accepts: Vec<_> = exact.map(|offer| offer.terms.text().clone()).collect();
        let kept = corrected.map_or(0, |index| accepts.len() + index);
        accepts.extend(voucher_offers.iter().map(|offer| offer.text().clone()));
        let (code, sentence) = match error {
            Some((code, detail)) => (code, Cow::Owned(format!("{code}: {detail}"))),
            None => ("payment required", Cow::Borrowed("payment required")),
        };
        let required = PaymentRequired {
            x402_version: V2,
            error: Some(code.to_owned()),
            resource: ResourceInfo { url: url.to_owned(), ..self.offered.resource.clone() },
            accepts,
            extensions: self.offered.extensions.text().cloned(),
        };
        let mut header: HeaderValue = encode_header(&required).ok()?.try_into().ok()?;
        let body = match self.in_v1.as_ref().and_then(|in_v1| in_v1.body(offers, url, &sentence)) {
            Some(body) => body,
            None => {
                let required = PaymentRequired { error: Some(sentence.into_owned()), ..required.clone() };
                serde_json::to_vec(&required).ok()?.into()
            }
        };
        if error.is_some() && header.len() > SHORT_REFUSAL {
            let demand = self.assemble(url, offers, &self.voucher_offers(offers), None, None)?;
            let longest = demand.header.len().saturating_sub(RECEIPT).max(SHORT_REFUSAL);
            header = shortened(required, kept, longest)?;
        }
        Some(RenderedOffers { header, body })
    }
}

/// What may be added to the head of a refusal: `PAYMENT-RESPONSE`.
const RECEIPT: usize = 512;
/// A refusal of this size passes through any proxy, with a receipt.
const SHORT_REFUSAL: usize = 2560;

/// Writes the header of a refusal. What a client could read in the 402 before is left out as far as needed, so that a proxy that passed that
/// on passes this on, too. The offer at `kept` stays.
fn shortened(mut required: PaymentRequired, mut kept: usize, longest: usize) -> Option<HeaderValue> {
    let mut step = 0;
    loop {
        let header: HeaderValue = encode_header(&required).ok()?.try_into().ok()?;
        if header.len() <= longest || (step > 1 && required.accepts.len() < 2) {
            return Some(header);
        }
        match step {
            0 => required.resource = ResourceInfo { url: required.resource.url, ..ResourceInfo::default() },
            1 => required.extensions = None,
            _ if kept + 1 < required.accepts.len() => drop(required.accepts.pop()),
            _ => {
                required.accepts.remove(0);
                kept = kept.saturating_sub(1);
            }
        }
        step += 1;
    }
}

debug_fields!(Catalogue |this| { price: this.offered.pricing.price, options: this.offered.options });

/// The two forms of a 402 for a fixed price, to be filled in with the URL of what a request asks for.
#[derive(Clone, Debug)]
struct OffersTemplate {
    header: TextTemplate,
    body: TextTemplate,
}

/// A JSON text around one string that occurs in it, perhaps several times.
#[derive(Clone, Debug)]
struct TextTemplate {
    first: Box<str>,
    /// Each after one more occurrence.
    others: Vec<Box<str>>,
}

impl OffersTemplate {
    /// Makes a template of offers in which the URL is `mark`, a text that needs no escapes in JSON. Returns `None` if it is not in there.
    fn of(demand: &RenderedOffers, mark: &str) -> Option<Self> {
        let header = STANDARD.decode_to_vec(demand.header.as_bytes()).ok()?;
        Some(Self { header: TextTemplate::of(&header, mark)?, body: TextTemplate::of(&demand.body, mark)? })
    }

    /// Returns the offers for the resource at `url`.
    fn fill(&self, url: &str) -> Option<RenderedOffers> {
        let url = serde_json::to_string(url).ok()?;
        let header = STANDARD.encode_to_string(self.header.fill(&url)).try_into().ok()?;
        Some(RenderedOffers { header, body: Bytes::from(self.body.fill(&url)) })
    }
}

impl TextTemplate {
    fn of(json: &[u8], mark: &str) -> Option<Self> {
        let json = std::str::from_utf8(json).ok()?;
        let mark = format!("\"{mark}\"");
        let mut parts = json.split(&mark).map(Box::from);
        let form = Self { first: parts.next()?, others: parts.collect() };
        (!form.others.is_empty()).then_some(form)
    }

    fn fill(&self, string: &str) -> String {
        let length: usize = self.others.iter().map(|part| string.len() + part.len()).sum();
        let mut text = String::with_capacity(self.first.len() + length);
        text.push_str(&self.first);
        for part in &self.others {
            text.push_str(string);
            text.push_str(part);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;
    use crate::{network::Network, protocol::Verbatim};

    fn rendered(url: &str) -> RenderedOffers {
        let json = |times| {
            let urls = vec![serde_json::json!({ "url": url, "n": 1 }); times];
            serde_json::to_vec(&serde_json::json!({ "a": urls, "description": "the mark, in other words" })).unwrap()
        };
        RenderedOffers {
            header: HeaderValue::try_from(STANDARD.encode_to_string(json(1))).unwrap(),
            body: json(3).into(),
        }
    }

    #[test]
    fn smallest_deposit_of_an_offer_pays_for_a_request() {
        let usdc = Network::BASE.usdc().unwrap();
        for (deposit, amount, offered) in [
            ("9", "10", "10"),
            ("10", "9", "10"),
            ("10", "10", "10"),
            ("10", "11", "11"),
            ("11", "10", "11"),
            ("5", "1000", "1000"),
        ] {
            let mut template = ExactOffer::new(usdc.clone(), U256::ZERO, Address::ZERO, 60).to_requirements();
            template.extra.insert("minDeposit".to_owned(), deposit.into());
            let offer = VoucherOffer::at(&template, amount);
            assert_eq!(offer.requirements().extra["minDeposit"], offered, "{deposit} {amount}");
            assert_eq!(offer.requirements().amount, amount);
        }
    }

    #[test]
    fn shortened_refusal_keeps_the_offer_that_it_is_about() {
        let usdc = Network::BASE.usdc().unwrap();
        let offer = |price: u64| {
            Verbatim::of_requirements(
                &ExactOffer::new(usdc.clone(), U256::from(price), Address::ZERO, 60).to_requirements(),
            )
        };
        for kept in 0..4 {
            let required = PaymentRequired {
                x402_version: V2,
                error: Some("a_code".to_owned()),
                resource: ResourceInfo {
                    url: "/a".to_owned(),
                    description: Some("x".repeat(900)),
                    ..Default::default()
                },
                accepts: (0..4).map(offer).collect(),
                extensions: None,
            };
            let read = |header: &HeaderValue| {
                let json = STANDARD.decode_to_vec(header.as_bytes()).unwrap();
                serde_json::from_slice::<PaymentRequired>(&json).unwrap()
            };
            let header = shortened(required.clone(), kept, usize::MAX).unwrap();
            assert_eq!(read(&header).resource.description.unwrap().len(), 900);
            let header = shortened(required.clone(), kept, 1_000).unwrap();
            assert!(header.len() <= 1_000 && read(&header).accepts.len() < 4, "{}", header.len());
            assert!(read(&header).accepts.iter().any(|left| left.text() == required.accepts[kept].text()));
            let least = read(&shortened(required.clone(), kept, 0).unwrap());
            assert_eq!((least.accepts.len(), least.resource.url.as_str()), (1, "/a"));
            assert_eq!(least.accepts[0].text(), required.accepts[kept].text());
        }
    }

    #[test]
    fn filled_template_is_what_would_have_been_written() {
        let template = OffersTemplate::of(&rendered("the mark"), "the mark").unwrap();
        for url in ["", "/evaluate", "https://api.example/a%20b", "/\"}{\\", "/ü\u{1}"] {
            let (filled, written) = (template.fill(url).unwrap(), rendered(url));
            assert_eq!(filled.header, written.header, "{url}");
            assert_eq!(filled.body, written.body, "{url}");
        }
        assert!(OffersTemplate::of(&rendered("another"), "the mark").is_none());
    }
}
