//! Describes what a layer charges for, and checks the description.

use std::{collections::HashSet, future::Future, sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, Uri, request, response};

use super::{
    config::{Config, Settings},
    fingerprint::HEADERS,
    header_names::{PAYMENT_SIGNATURE, X_PAYMENT},
    layer::RequirePaymentLayer,
    offer::{Catalogue, Location, Offered, PaymentOption, Price, PriceError, Pricing, Quote},
    page::{self, BrowserPage},
};
use crate::{
    channels::Channels,
    charge::{DeferredPolicy, Limits, Seller, extensions::Declared},
    clock::Clock,
    facilitator::Facilitator,
    network::{Asset, Network},
    payment::Terms,
    protocol::{Extension, PaymentFlow, PaymentId, PaymentRequirements, ResourceInfo, TransferMethod, payment_status},
    upload::{EvictingSemaphore, permits_for},
    usdc::{ParseUsdcError, Usdc},
    vouchers::SCHEME,
};

/// Describes a [`RequirePaymentLayer`]. A price and a payee are needed, and a facilitator unless only vouchers are taken; everything else
/// has a default.
///
/// ```
/// # use alloy_primitives::address;
/// # use tower_x402::{Network, facilitator::Facilitator, server::{BuildError, RequirePaymentLayer}};
/// # fn example(facilitator: impl Facilitator) -> Result<RequirePaymentLayer, BuildError> {
/// RequirePaymentLayer::builder()
///     .price("$0.001")
///     .pay_to(Network::BASE, address!("70997970C51812dc3A010C7d01b50e0d17dc79C8"))
///     .facilitator(facilitator)
///     .public_origin("https://api.example")
///     .description("Evaluates arithmetic")
///     .build()
/// # }
/// ```
#[must_use]
pub struct RequirePaymentLayerBuilder {
    price: Option<Result<Price, ParseUsdcError>>,
    priced_by: Vec<HeaderName>,
    payees: Vec<(Result<Asset, Network>, Address)>,
    flows: Vec<PaymentFlow>,
    facilitators: Vec<Arc<dyn Facilitator>>,
    resource: ResourceInfo,
    /// `None` if it is the request that says where the resource is.
    location: Option<Location>,
    trusts_proxy: bool,
    extensions: Vec<Extension>,
    speaks_v1: bool,
    /// The kinds of permits that are offered, whichever account they name.
    permits: Vec<TransferMethod>,
    /// Whether exactly the price may be paid.
    takes_transfers: bool,
    settings: Settings,
}

impl RequirePaymentLayer {
    /// Returns a builder, which needs a price, a payee and a facilitator.
    pub fn builder() -> RequirePaymentLayerBuilder {
        RequirePaymentLayerBuilder::default()
    }
}

impl RequirePaymentLayerBuilder {
    /// Sets the price of every request: dollars as text (`"$0.001"`) or [`Usdc`]. For other prices, see
    /// [`price_with`](Self::price_with).
    pub fn price(mut self, price: impl TryInto<Usdc, Error: Into<ParseUsdcError>>) -> Self {
        self.price = Some(price.try_into().map(Price::Fixed).map_err(Into::into));
        self
    }

    /// Accepts USDC on `network`, paid to `payee`. Call it again to offer several networks.
    pub fn pay_to(mut self, network: Network, payee: Address) -> Self {
        self.payees.push((network.usdc().ok_or(network), payee));
        self
    }

    /// Adds a facilitator, which verifies and settles. Call it again for other networks; each offer goes to the first facilitator that
    /// serves it.
    pub fn facilitator(mut self, facilitator: impl Facilitator) -> Self {
        self.facilitators.push(Arc::new(facilitator));
        self
    }

    /// Sets the public origin, such as `https://api.example`, to which the request's path is added in the URL that the 402 names.
    ///
    /// Without it, or with an empty one, the 402 names the host that the request names itself: its `Host` header, or the host in its
    /// URI, where HTTP/2 has it. The scheme is the URI's if it has one, `http` for loopback hosts and `https` for others; see
    /// [`trust_forwarded_proto`](Self::trust_forwarded_proto). A request that names no host, several, or something else gets the path
    /// alone, which clients of v1 refuse. A client can choose its `Host`, so nothing else depends on it: neither the price nor what a
    /// payment is bound to, unless [`priced_by`](Self::priced_by) names it.
    pub fn public_origin(mut self, origin: impl Into<String>) -> Self {
        let origin = origin.into();
        let origin = origin.trim_end_matches('/');
        self.location = (!origin.is_empty()).then(|| Location::Origin(origin.to_owned()));
        self
    }

    /// Sets what is sold, for people and agents.
    pub fn description(mut self, description: impl Into<String>) -> Self {
        self.resource.description = Some(description.into());
        self
    }

    /// Offers a flow; call it again to offer several, the first being the preferred one. Default: `authorization`.
    pub fn flow(mut self, flow: PaymentFlow) -> Self {
        if !self.flows.contains(&flow) {
            self.flows.push(flow);
        }
        self
    }

    /// Sets how long the handler may take; then the request is answered 504. Nothing is charged for it, or, in the flow
    /// `upfront`, nothing more if the same payment is presented again. Default: 60 s; at most a day.
    pub fn handler_deadline(mut self, deadline: Duration) -> Self {
        self.settings.rules.limits.handler_deadline = deadline.min(LONGEST);
        self
    }

    /// Checks the description and makes the layer.
    ///
    /// # Errors
    /// [`BuildError`] says what is missing or does not fit together.
    pub fn build(self) -> Result<RequirePaymentLayer, BuildError> {
        let price = self.price.ok_or(BuildError::NoPrice)?.map_err(BuildError::Price)?;
        if matches!(price, Price::Fixed(Usdc::ZERO)) {
            return Err(BuildError::ZeroPrice);
        }
        check_limits(&self.settings.rules.limits)?;
        check_location(self.location.as_ref())?;
        check_status_url(self.settings.rules.status_url.as_deref())?;
        if self.resource.tags.len() > 5 {
            return Err(BuildError::TooManyTags(self.resource.tags.len()));
        }
        if self.payees.is_empty() {
            return Err(BuildError::NoPayee);
        }
        if self.payees.iter().any(|(_, pay_to)| pay_to.is_zero()) {
            return Err(BuildError::ZeroPayee);
        }
        let takes_exact = self.settings.takes_exact;
        if takes_exact && self.facilitators.is_empty() {
            return Err(BuildError::NoFacilitator);
        }
        let flows = if self.flows.is_empty() { vec![PaymentFlow::Authorization] } else { self.flows };
        let timeout = self.settings.rules.limits.max_timeout.as_secs();
        let mut options = Vec::new();
        for flow in flows.iter().copied().filter(|_| self.takes_transfers) {
            for (asset, pay_to) in &self.payees {
                let asset = asset.clone().map_err(BuildError::NoUsdc)?;
                let method = TransferMethod::Authorization;
                let mut option = PaymentOption { asset, pay_to: *pay_to, flow, method, facilitator: 0 };
                if takes_exact {
                    let sample = Terms::new(option.offer(U256::from(1), timeout));
                    let facilitator = self.facilitators.iter().position(|facilitator| facilitator.serves(&sample));
                    option.facilitator = facilitator.ok_or(BuildError::NotServed(option.asset.network))?;
                }
                options.push(option);
            }
        }
        if !takes_exact && !self.permits.is_empty() {
            return Err(BuildError::PermitsAndVouchersOnly);
        }
        for kind in self.permits.iter().filter(|kind| self.takes_transfers || **kind != TransferMethod::Permit) {
            for (asset, pay_to) in &self.payees {
                let asset = asset.clone().map_err(BuildError::NoUsdc)?;
                let (facilitator, method) = settler_of(&self.facilitators, *kind, asset.network)?;
                let flows = if method.may_settle_upfront() { flows.as_slice() } else { &[PaymentFlow::Authorization] };
                for flow in flows {
                    let (asset, flow) = (asset.clone(), *flow);
                    options.push(PaymentOption { asset, pay_to: *pay_to, flow, method, facilitator });
                }
            }
        }
        if takes_exact && self.settings.rules.deferred.is_some() {
            let mut settlers = options.iter().map(|option| (option, &self.facilitators[option.facilitator]));
            if let Some((option, _)) = settlers.find(|(_, facilitator)| !facilitator.settles_in_background()) {
                return Err(BuildError::NotDeferrable(option.asset.network));
            }
        }
        let voucher_offers = voucher_offers(&self.settings, &options)?;
        // Payments by voucher cannot be looked up.
        let status_url = self.settings.rules.status_url.as_deref().filter(|_| takes_exact);
        let extensions = declared(self.extensions, &self.location, self.settings.rules.payment_identifier, status_url)?;
        let extensions = Arc::new(extensions);
        let pricing = Pricing { price, headers: self.priced_by.into() };
        let location = self.location.unwrap_or(Location::Request { trusts_proxy: self.trusts_proxy });
        let offered = Offered {
            pricing,
            options,
            takes_exact,
            voucher_offers,
            max_timeout_seconds: timeout,
            resource: self.resource,
            location,
            extensions: extensions.clone(),
        };
        let catalogue = Catalogue::new(offered, self.speaks_v1);
        let (uri, headers) = (Uri::default(), HeaderMap::new());
        let longest = catalogue.render(&catalogue.target(&uri, &headers), &catalogue.longest(), None);
        let size = longest.map_or(usize::MAX, |offers| offers.header.len());
        if size > MAX_OFFERS {
            return Err(BuildError::OffersTooLarge { size });
        }
        warn_of_proxies(size, self.settings.page.is_some());
        let unpriced = permits_for(self.settings.rules.limits.request_body as u64).saturating_mul(2).max(UNPRICED);
        Ok(RequirePaymentLayer::new(Config {
            catalogue,
            seller: Arc::new(Seller::new(
                self.settings.route.clone(),
                self.facilitators,
                self.settings.rules.clone(),
                extensions,
            )),
            settings: self.settings,
            unpriced: EvictingSemaphore::new(unpriced),
        }))
    }
}

/// # Prices and payments
impl RequirePaymentLayerBuilder {
    /// Sets a price that depends on the request's head. It is called for unpaid and paid requests alike, so keep it quick.
    ///
    /// It sees what a payment is bound to: method, path, query, `Authorization`, `Cookie`, the payment itself, and the headers that
    /// [`priced_by`](Self::priced_by) names. Other headers, and a host in the URI, are kept from it: a payment that is still owed may be
    /// presented again with any of those, and is worked on at the price that was paid. The request's extensions are all there; use them
    /// only where they follow from what a payment is bound to.
    ///
    /// ```
    /// # use tower_x402::{Usdc, server::{Quote, RequirePaymentLayer}};
    /// let builder = RequirePaymentLayer::builder().price_with(|request| {
    ///     let is_preview = request.uri.query() == Some("preview");
    ///     async move { Ok(if is_preview { Quote::Free } else { Usdc::from_atomic(1_000).into() }) }
    /// });
    /// ```
    ///
    /// The quote may say [who is paid](Quote::To), too, so that one layer charges for many sellers.
    pub fn price_with<P, F>(mut self, price: P) -> Self
    where
        P: Fn(&request::Parts) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Quote, PriceError>> + Send + 'static,
    {
        self.price = Some(Ok(Price::Of(Arc::new(move |request| Box::pin(price(request))))));
        self
    }

    /// Sets a price that depends on the request's body, which is read whole first: up to
    /// [`max_request_body`](Self::max_request_body), within 30 s. It is called for unpaid and paid requests alike, so keep it quick. A
    /// request that cannot be priced is refused before anything is paid. Of the request's head it sees as much as
    /// [`price_with`](Self::price_with).
    ///
    /// Anybody may send a body. Those that are being read have 64 MiB in all, or twice the largest body if that is more. If another one
    /// needs the room, the request that has been sending longest is answered 503.
    ///
    /// ```
    /// # use tower_x402::{Usdc, server::{Quote, RequirePaymentLayer}};
    /// let builder = RequirePaymentLayer::builder().max_request_body(64 * 1024).price_with_body(|_request, body| {
    ///     let lines = body.split(|&byte| byte == b'\n').count() as u64;
    ///     async move { Ok(Usdc::from_atomic(10 * lines).into()) }
    /// });
    /// ```
    pub fn price_with_body<P, F>(mut self, price: P) -> Self
    where
        P: Fn(&request::Parts, &Bytes) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Quote, PriceError>> + Send + 'static,
    {
        self.price = Some(Ok(Price::OfBody(Arc::new(move |request, body| Box::pin(price(request, body))))));
        self
    }

    /// Names headers that a computed price depends on: the price sees them, and a payment is bound to their values as to the path. With
    /// `Host` the price sees the host in the URI too, which is where HTTP/2 has it. A payment that is presented again with another
    /// value is refused with 409. Call it again to name more.
    ///
    /// ```
    /// # use http::HeaderName;
    /// # use tower_x402::{Usdc, server::RequirePaymentLayer};
    /// let tier = HeaderName::from_static("x-tier");
    /// let builder = RequirePaymentLayer::builder().priced_by([tier.clone()]).price_with(move |request| {
    ///     let is_dear = request.headers.get(&tier).is_some_and(|tier| tier == "dear");
    ///     async move { Ok(Usdc::from_atomic(if is_dear { 1_000_000 } else { 1_000 }).into()) }
    /// });
    /// ```
    pub fn priced_by(mut self, headers: impl IntoIterator<Item = HeaderName>) -> Self {
        let is_seen = |name: &HeaderName| HEADERS.contains(name) || [&PAYMENT_SIGNATURE, &X_PAYMENT].contains(&name);
        self.priced_by.extend(headers.into_iter().filter(|name| !is_seen(name)));
        // In whichever order they are named, fingerprints are the same.
        self.priced_by.sort_by(|one, other| one.as_str().cmp(other.as_str()));
        self.priced_by.dedup();
        self
    }

    /// Accepts another EIP-3009 token with six decimals, paid to `payee`.
    pub fn pay_to_in(mut self, asset: Asset, payee: Address) -> Self {
        self.payees.push((Ok(asset), payee));
        self
    }

    /// Takes vouchers of payment channels (scheme `batch-settlement`) beside `exact`: each 402 has both offers, for the same price.
    ///
    /// A payer that fills a channel once then pays for each request with a signature, which is checked without asking a node. One
    /// transaction claims what many requests cost. The price may be what the work really cost: see [`ActualPrice`](super::ActualPrice).
    /// The request's body is read whole before the work, up to [`max_request_body`](Self::max_request_body). Default: off.
    ///
    /// ```
    /// # use tower_x402::{channels::Channels, server::RequirePaymentLayer};
    /// # fn example(channels: Channels) {
    /// let builder = RequirePaymentLayer::builder().price("$0.001").vouchers(channels);
    /// # }
    /// ```
    pub fn vouchers(mut self, channels: Channels) -> Self {
        self.settings.channels = Some(channels);
        self
    }

    /// Takes vouchers only: no `exact`, no x402 v1, no page for browsers. Needs no [`facilitator`](Self::facilitator), since the channels
    /// have their own; with one, transfers that were taken before are still answered. [`build`](Self::build) refuses payees on other chains
    /// than the channels', and a [`deferred`](Self::deferred) policy: a voucher is charged in the books, and claimed later anyway.
    pub fn vouchers_only(mut self, channels: Channels) -> Self {
        self.settings.takes_exact = false;
        self.settings.page = None;
        self.vouchers(channels)
    }

    /// Offers to be paid the price by permits of [Permit2](crate::permit2), too, in every token, to every payee and in every flow. Payers have to
    /// have let Permit2 move the token; one that has not is answered 412. Default: off.
    ///
    /// Any ERC-20 token can be paid by permit. With one that has no `transferWithAuthorization` (EIP-3009), the other offer is there all the
    /// same, and a payment for it is refused. The facilitator has to settle such permits: a remote one does not say in `/supported` whether it
    /// does. One that settles them by a contract of its own cannot be confirmed by a node.
    ///
    /// ```
    /// # use tower_x402::server::RequirePaymentLayer;
    /// let builder = RequirePaymentLayer::builder().price("$0.10").permits();
    /// ```
    pub fn permits(self) -> Self {
        self.permitting(TransferMethod::Permit)
    }

    /// Offers to be paid by permits for a maximum, too, in every token and to every payee: the price is then the highest that a request
    /// costs, and the handler says by [`ActualPrice`](super::ActualPrice) what it did cost, which may be nothing. A handler that says nothing
    /// charges the price. Default: off.
    ///
    /// A permit that is charged nothing is used up all the same: presented again, it gets the answer that it got. While the work lasts,
    /// nothing is locked: the guide says what payer and seller rely on. Payers have to have let Permit2 move the
    /// token; one that has not is answered 412.
    ///
    /// ```
    /// # use tower_x402::server::RequirePaymentLayer;
    /// let builder = RequirePaymentLayer::builder().price("$0.10").upto();
    /// ```
    pub fn upto(self) -> Self {
        self.permitting(TransferMethod::Maximum { facilitator: Address::ZERO })
    }

    fn permitting(mut self, method: TransferMethod) -> Self {
        if !self.permits.contains(&method) {
            self.permits.push(method);
        }
        self
    }

    /// Takes permits, and vouchers if there are [channels](Self::vouchers), and no transfer of the whole price: no `exact`, no x402 v1, no page
    /// for browsers. For prices that a request seldom costs in full. Transfers that were taken before are still answered. Otherwise like
    /// [`upto`](Self::upto).
    ///
    /// ```
    /// # use tower_x402::server::RequirePaymentLayer;
    /// let builder = RequirePaymentLayer::builder().price("$0.10").upto_only();
    /// ```
    pub fn upto_only(mut self) -> Self {
        self.takes_transfers = false;
        self.settings.page = None;
        self.upto()
    }

    /// Settles payments after the response was released, in batches, where the policy trusts the payer that far; any other
    /// payment is treated as without this. Default: off.
    ///
    /// Payers are offered `authorization` as before: theirs is not to choose. Where a payment is deferred, `PAYMENT-RESPONSE` says
    /// success without a transaction, and names the payment in the extension [`payment-status`](crate::protocol::payment_status).
    /// Responses that stream, and payments in `upfront` or in x402 v1, are not deferred.
    ///
    /// ```
    /// # use tower_x402::{Usdc, server::{DeferredPolicy, RequirePaymentLayer}};
    /// // Whoever has paid for three answers in the last ten minutes may owe for three more.
    /// let policy = DeferredPolicy::default().per_payer(Usdc::from_atomic(3_000));
    /// let builder = RequirePaymentLayer::builder().price("$0.001").deferred(policy);
    /// ```
    pub fn deferred(mut self, policy: DeferredPolicy) -> Self {
        self.settings.rules.deferred = Some(policy);
        self
    }

    /// Offers the extension `payment-identifier` in the 402: payers may then name their payments; see
    /// [what an id does](super#payment-identifiers). Default: on. Adds about 0.6 KB to the 402's header; without it, a payer can ask for a
    /// lost answer to a request that holds no secret only [a few times](Self::anonymous_replays).
    pub fn payment_identifier(mut self, ask: bool) -> Self {
        self.settings.rules.payment_identifier = ask;
        self
    }

    /// Serves clients of x402 v1, too. Default: on. When it is off, their `X-PAYMENT` header is ignored, and the body of the 402 is that
    /// of v2.
    pub fn v1(mut self, speak: bool) -> Self {
        self.speaks_v1 = speak;
        self
    }
}

/// # The resource
impl RequirePaymentLayerBuilder {
    /// Sets the public URL of the one resource that this layer charges for.
    pub fn resource_url(mut self, url: impl Into<String>) -> Self {
        self.location = Some(Location::Url(url.into()));
        self
    }

    /// Takes the scheme of a request's URL from `X-Forwarded-Proto`, or from the last element of `Forwarded`. Default: off.
    ///
    /// Turn it on behind a proxy that ends TLS and sets or removes both headers itself. It has no effect with a
    /// [`public_origin`](Self::public_origin) or a [`resource_url`](Self::resource_url). The host is that of the `Host` header, which the
    /// proxy has to pass on.
    pub fn trust_forwarded_proto(mut self, trust: bool) -> Self {
        self.trusts_proxy = trust;
        self
    }

    /// Sets the name of the service.
    pub fn service_name(mut self, name: impl Into<String>) -> Self {
        self.resource.service_name = Some(name.into());
        self
    }

    /// Sets the media type of a paid response.
    pub fn mime_type(mut self, mime_type: impl Into<String>) -> Self {
        self.resource.mime_type = Some(mime_type.into());
        self
    }

    /// Sets at most five labels.
    pub fn tags(mut self, tags: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.resource.tags = tags.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the label `route` under which the metric `x402_charged_units_total` counts what this layer charged. Use few, and nothing that a
    /// client chooses. Default: empty.
    pub fn route_label(mut self, label: impl Into<Arc<str>>) -> Self {
        self.settings.route = label.into();
        self
    }

    /// Declares where a [`PaymentStatus`](super::PaymentStatus) answers what became of a payment: an absolute URL, or a path
    /// (`/payments/status`) on the origin of what is sold. It is declared among the `extensions` of the 402
    /// ([`payment_status`](crate::protocol::payment_status)); clients of this crate ask only on the origin that they paid. Payments by voucher
    /// cannot be looked up there, so a layer that takes [vouchers only](Self::vouchers_only) does not declare it.
    pub fn status_url(mut self, url: impl Into<String>) -> Self {
        self.settings.rules.status_url = Some(url.into());
        self
    }

    /// Declares an extension in the 402. A payer returns it with its payment and may add values to it, which the handler reads from
    /// [`Echoed`](super::Echoed) in the request's extensions. A facilitator that uses extensions gets it, too. Call it again to declare several.
    ///
    /// An echo is refused before anything is reserved or paid if it is not what was declared (402, `extension_echo_mismatch`), if the
    /// extension's own [`check`](Extension::check) refuses it, or if it is longer than 8 KiB (400). What was not declared is not passed on.
    ///
    /// This sells a greeting to whoever the payer names:
    ///
    /// ```
    /// use http::{Request, Response};
    /// use serde_json::{Value, json};
    /// use tower_x402::{protocol::Extension, server::{Echoed, RequirePaymentLayer}};
    ///
    /// let greeting = Extension::new("greeting", json!({}), json!({ "properties": { "name": { "type": "string" } } }))
    ///     .check(|info| match info.get("name") {
    ///         None => Ok(()),
    ///         Some(Value::String(name)) if name.len() <= 40 => Ok(()),
    ///         Some(_) => Err("name is a text of at most 40 bytes".to_owned()),
    ///     });
    /// let builder = RequirePaymentLayer::builder().extension(greeting);
    ///
    /// async fn greet<B>(request: Request<B>) -> Response<String> {
    ///     let echoed = request.extensions().get::<Echoed>().cloned().unwrap_or_default();
    ///     let info: Option<Value> = echoed.info("greeting").unwrap_or_default();
    ///     let name = info.as_ref().and_then(|info| info["name"].as_str()).unwrap_or("stranger");
    ///     Response::new(format!("Hello, {name}!"))
    /// }
    /// ```
    pub fn extension(mut self, extension: Extension) -> Self {
        self.extensions.push(extension);
        self
    }

    /// Sets the page that a person's browser is shown: it explains the offer and pays it from a wallet. `None` turns it off. Programs are answered the same with and without it. Default: [`BrowserPage::new`].
    pub fn browser_page(mut self, page: Option<BrowserPage>) -> Self {
        self.settings.page = page;
        self
    }
}

/// # HTTP
impl RequirePaymentLayerBuilder {
    /// Sets which responses are charged for in the `authorization` flow. Default: status 2xx. A gRPC service
    /// would also look at `grpc-status`.
    pub fn success(mut self, is_success: impl Fn(&response::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.settings.success = Some(Box::new(is_success));
        self
    }

    /// Answers CORS preflights for any origin. Default: off; they are passed to the service unpaid, and answered with the head of
    /// its response only. A service that does costly work for any method should not see them.
    pub fn answer_preflights(mut self, answer: bool) -> Self {
        self.settings.answer_preflights = answer;
        self
    }
}

/// # Limits
impl RequirePaymentLayerBuilder {
    /// Sets how long a payer's authorization may be valid, in whole seconds. Default: 120 s.
    pub fn max_timeout(mut self, timeout: Duration) -> Self {
        self.settings.rules.limits.max_timeout = timeout;
        self
    }

    /// Sets how long before `validBefore` a settlement must begin. Default: 15 s; at most a day.
    pub fn settlement_margin(mut self, margin: Duration) -> Self {
        self.settings.rules.limits.settlement_margin = margin.min(LONGEST);
        self
    }

    /// Sets the largest request body that is read whole, in bytes. Default: 1 MiB.
    ///
    /// A body is read whole in the `upfront` flow, where the work for a payment is begun again, and where the
    /// [price depends on it](Self::price_with_body). When a payment is presented again for its answer, a longer body is compared as it
    /// passes.
    pub fn max_request_body(mut self, bytes: usize) -> Self {
        self.settings.rules.limits.request_body = bytes;
        self
    }

    /// Sets how many payments of payers that are known to have the money may be worked on or waited for at once; further ones are answered
    /// 503. Default: 4096. Others wait in places of their own, as many at once, while they are verified, and while their bodies arrive. Copies
    /// of one payment take at most an eighth of these places; further ones are answered 409. Of one payer or channel an eighth of the bodies
    /// may arrive at once: sixteen small ones at least with the default [`max_request_body`](Self::max_request_body), or one of the longest;
    /// the one that has taken longest makes room for the next. Payments whose work is done have another eighth for themselves.
    pub fn max_concurrent(mut self, payments: usize) -> Self {
        self.settings.rules.limits.concurrent = payments;
        self
    }

    /// Sets how long a copy of a payment waits for the first one's answer, before 409. Default: 90 s; at most a day.
    pub fn max_wait(mut self, wait: Duration) -> Self {
        self.settings.rules.limits.wait = wait.min(LONGEST);
        self
    }

    /// Sets how often the handler may be started for one payment. Default: 3.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.rules.limits.attempts = attempts;
        self
    }

    /// Sets how often, and for how long, the response to a request that holds no secret (no body, no `Authorization`, no
    /// `Cookie`, no payment identifier) is replayed. Default: 3 times within 60 s. A client that presents again what could not be settled
    /// at first, and is charged by that, gets the response in any case.
    pub fn anonymous_replays(mut self, times: u32, within: Duration) -> Self {
        self.settings.rules.limits.anonymous_replays = times;
        self.settings.rules.limits.anonymous_replay_age = within;
        self
    }

    /// Sets the clock that windows of validity are checked by. Default: the system's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.settings.rules.clock = clock;
        self
    }
}

impl Default for RequirePaymentLayerBuilder {
    fn default() -> Self {
        Self {
            price: None,
            priced_by: Vec::new(),
            payees: Vec::new(),
            flows: Vec::new(),
            facilitators: Vec::new(),
            resource: ResourceInfo::default(),
            location: None,
            trusts_proxy: false,
            extensions: Vec::new(),
            speaks_v1: true,
            permits: Vec::new(),
            takes_transfers: true,
            settings: Settings::default(),
        }
    }
}

debug_fields!(RequirePaymentLayerBuilder { price, payees, facilitators });

/// An error in the description of a layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No price was set: call `price` or `price_with`.
    #[error("no price: call .price(\"$0.001\") or .price_with(…)")]
    NoPrice,
    /// The text of the price cannot be read.
    #[error("the price cannot be read")]
    Price(#[source] ParseUsdcError),
    /// The price is zero: leave the layer out, or compute prices and return [`Quote::Free`].
    #[error("the price is zero: leave the route without the layer, or use .price_with(…) and Quote::Free")]
    ZeroPrice,
    /// No payee was set: call `pay_to`.
    #[error("no payee: call .pay_to(Network::BASE, address)")]
    NoPayee,
    /// The payee is the zero address.
    #[error("the payee is the zero address, where the money would be lost")]
    ZeroPayee,
    /// The network has no USDC known here: call `pay_to_in`.
    #[error(
        "no USDC is known on {0}: call .pay_to_in(Asset::new(…), address) with the token's EIP-712 name and version"
    )]
    NoUsdc(Network),
    /// No facilitator was set: call `facilitator`. Only a layer that takes nothing but vouchers needs none.
    #[error("no facilitator: call .facilitator(…)")]
    NoFacilitator,
    /// No facilitator serves this network: add one that does.
    #[error("no facilitator serves {0}: add one with .facilitator(…)")]
    NotServed(Network),
    /// No facilitator settles permits of this scheme on this network: add one that does, or offer none.
    #[error(
        "no facilitator settles permits of the scheme {scheme} on {network} so that they can be confirmed: add one whose /supported has it \
         and whose accounts are no contracts, or leave the permits out"
    )]
    NoPermits {
        /// The network.
        network: Network,
        /// The scheme.
        scheme: &'static str,
    },
    /// Only vouchers are taken, and permits are offered.
    #[error("only vouchers are taken: leave the permits out, or call .vouchers(…)")]
    PermitsAndVouchersOnly,
    /// No payee is on the chain of the channels: call `pay_to` for it.
    #[error("vouchers are for channels on {0}, where there is no payee: call .pay_to(…) for it")]
    NoChannelPayee(Network),
    /// Only vouchers are taken, and the channels are on another chain than this payee: leave the payee out, or take `exact`, too.
    #[error(
        "only vouchers are taken, and the channels are not on {0}: leave its .pay_to(…) out, or call .vouchers(…) and add a facilitator"
    )]
    NoChannelsOn(Network),
    /// Only vouchers are taken, which are never deferred.
    #[error("only vouchers are taken, and they are never deferred: leave .deferred(…) out, or call .vouchers(…)")]
    DeferredVouchers,
    /// A payer could withdraw from its channel before its work is charged and claimed.
    #[error(
        "handler_deadline and settlement_margin are {needed:?}, and the channels' withdraw_delay allows {longest:?}: lower them or raise it"
    )]
    WithdrawDelayTooShort {
        /// The time that work and settlement may take.
        needed: Duration,
        /// The time that a payer's withdrawal leaves for it.
        longest: Duration,
    },
    /// The facilitator for this network does not settle later by itself, so nothing can be deferred.
    #[error("the facilitator for {0} settles nothing by itself: leave .deferred(…) out, or use another one")]
    NotDeferrable(Network),
    /// `max_timeout` leaves no time to work and settle.
    #[error(
        "max_timeout is {max_timeout:?}, but handler_deadline and settlement_margin need {needed:?}: raise the first or lower the others"
    )]
    TimeoutTooShort {
        /// The timeout that was set, in whole seconds.
        max_timeout: Duration,
        /// The time that it must exceed.
        needed: Duration,
    },
    /// A limit is zero, so that nothing could be served.
    #[error("max_concurrent and max_attempts must be at least 1")]
    ZeroLimit,
    /// A URL is not an absolute one with http or https.
    #[error("{0:?} is not an absolute http or https URL")]
    Url(String),
    /// Two extensions have one name.
    #[error(
        "the extension {0:?} is declared twice: declare it once, and with .payment_identifier(true) or .status_url(…) not at all"
    )]
    ExtensionTwice(String),
    /// An extension describes the resource, which has no public URL: call `public_origin` or `resource_url`.
    #[error(
        "the extension {0:?} describes the resource, which needs a public URL: call .public_origin(\"https://api.example\") or .resource_url(…)"
    )]
    NoPublicUrl(String),
    /// There are more labels than the protocol allows.
    #[error("{0} tags: the protocol allows five")]
    TooManyTags(usize),
    /// The 402 would not fit in the headers that clients read: shorten the description or offer less.
    #[error(
        "the PAYMENT-REQUIRED header would have {size} bytes, more than clients read: shorten the description or offer less"
    )]
    OffersTooLarge {
        /// The size of `PAYMENT-REQUIRED`, in bytes.
        size: usize,
    },
}

/// How many permits there are for bodies that are read to be priced: 64 MiB.
const UNPRICED: u32 = 1024;
/// Some clients stop reading headers near 8 KB in all.
const MAX_OFFERS: usize = 6 * 1024;
/// The largest head of a response that nginx passes on, unless `proxy_buffer_size` says otherwise.
const NGINX_HEAD: usize = 4 * 1024;
/// What a 402 has in its head besides the offers and the headers of a page, with room for those of layers above.
const OTHER_HEADERS: usize = 512;
/// The longest that anything can be told to take; a clock's end is far beyond.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Returns the offers to pay with vouchers: one for each token and payee on the chain of the channels, without the amount.
fn voucher_offers(settings: &Settings, options: &[PaymentOption]) -> Result<Vec<PaymentRequirements>, BuildError> {
    let Some(channels) = &settings.channels else { return Ok(Vec::new()) };
    let limits = &settings.rules.limits;
    let (needed, longest) = (limits.handler_deadline + limits.settlement_margin, channels.longest_work());
    if needed > longest {
        return Err(BuildError::WithdrawDelayTooShort { needed, longest });
    }
    let mut offers: Vec<PaymentRequirements> = Vec::new();
    for option in options.iter().filter(|option| option.asset.network == channels.network()) {
        let extra = serde_json::to_value(channels.offer(&option.asset)).ok();
        let offer = PaymentRequirements {
            scheme: SCHEME.to_owned(),
            extra: extra.and_then(|extra| extra.as_object().cloned()).unwrap_or_default(),
            // Whatever the flow, it is the same offer.
            ..option.offer(U256::ZERO, limits.max_timeout.as_secs()).to_requirements()
        };
        if !offers.contains(&offer) {
            offers.push(offer);
        }
    }
    if offers.is_empty() {
        return Err(BuildError::NoChannelPayee(channels.network()));
    }
    if !settings.takes_exact {
        let mut networks = options.iter().map(|option| option.asset.network);
        if let Some(other) = networks.find(|network| *network != channels.network()) {
            return Err(BuildError::NoChannelsOn(other));
        }
        if settings.rules.deferred.is_some() {
            return Err(BuildError::DeferredVouchers);
        }
    }
    Ok(offers)
}

/// Returns the facilitator that settles permits of this kind, and the method as its offers have it: they may name the account that settles.
fn settler_of(
    facilitators: &[Arc<dyn Facilitator>],
    kind: TransferMethod,
    network: Network,
) -> Result<(usize, TransferMethod), BuildError> {
    let of_kind = |method: &TransferMethod| method.is_like(kind);
    let methods = facilitators.iter().map(|facilitator| facilitator.permit_methods(network).into_iter().find(of_kind));
    let found = methods.enumerate().find_map(|(index, method)| Some((index, method?)));
    found.ok_or(BuildError::NoPermits { network, scheme: kind.scheme() })
}

/// Tells the operator of offers with which a proxy answers 502 in place of the 402.
fn warn_of_proxies(size: usize, has_page: bool) {
    let head = size + OTHER_HEADERS + if has_page { page::size_of_headers() } else { 0 };
    if head > NGINX_HEAD {
        tracing::warn!(
            size,
            head,
            "the head of a 402 may have {head} bytes, {size} of them in PAYMENT-REQUIRED, and nginx answers 502 to more than 4096: say \
             proxy_buffer_size 8k; there, or shorten the description or offer less"
        );
    }
}

fn check_limits(limits: &Limits) -> Result<(), BuildError> {
    let needed = limits.handler_deadline.saturating_add(limits.settlement_margin);
    // Offers are made in whole seconds.
    let max_timeout = Duration::from_secs(limits.max_timeout.as_secs());
    if max_timeout <= needed {
        return Err(BuildError::TimeoutTooShort { max_timeout, needed });
    }
    if limits.concurrent == 0 || limits.attempts == 0 {
        return Err(BuildError::ZeroLimit);
    }
    Ok(())
}

fn check_location(location: Option<&Location>) -> Result<(), BuildError> {
    match location {
        Some(Location::Origin(text) | Location::Url(text)) if !is_http_url(text) => Err(BuildError::Url(text.clone())),
        _ => Ok(()),
    }
}

/// Returns the extensions that the 402 declares: those of the seller, and those that follow from other settings.
fn declared(
    sellers: Vec<Extension>,
    location: &Option<Location>,
    payment_identifier: bool,
    status_url: Option<&str>,
) -> Result<Declared, BuildError> {
    let ids = payment_identifier.then(PaymentId::extension);
    let known: Vec<_> = ids.into_iter().chain(status_url.map(payment_status::extension)).collect();
    let mut names = HashSet::new();
    if let Some(twice) = sellers.iter().chain(&known).find(|extension| !names.insert(extension.name())) {
        return Err(BuildError::ExtensionTwice(twice.name().to_owned()));
    }
    if let Some(homeless) = sellers.iter().find(|extension| extension.described().is_some() && location.is_none()) {
        return Err(BuildError::NoPublicUrl(homeless.name().to_owned()));
    }
    Ok(Declared::new(sellers, known))
}

/// A path that begins with two slashes names a host.
fn check_status_url(url: Option<&str>) -> Result<(), BuildError> {
    let is_path = |url: &str| url.starts_with('/') && !url.starts_with("//") && url.parse::<Uri>().is_ok();
    match url.filter(|url| !is_path(url) && !is_http_url(url)) {
        Some(url) => Err(BuildError::Url(url.to_owned())),
        None => Ok(()),
    }
}

fn is_http_url(text: &str) -> bool {
    let uri: Option<Uri> = text.parse().ok();
    uri.is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some())
}
