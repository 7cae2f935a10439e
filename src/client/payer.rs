//! The payer: chooses an offer, reserves its price in the budget and signs.

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use alloy_primitives::{Address, B256, U256};
use http::{HeaderMap, Method, header};
use url::Url;

use super::{
    Budget, ChannelPolicy, JournalEntry, OfferRefusal, PaymentError, PermitPolicy, Refusal, SignedPayment,
    budget::{Charge, Reservation, host_of},
    channels::VoucherPayment,
    offer::{AcceptedOffer, Challenge, OfferPolicy},
    payment::header_of,
    purchase::Purchases,
};
use crate::{
    clock::{Clock, Nonces, OsNonces, SystemClock},
    eip3009::{Authorization, AuthorizationSigner, PaymentSignature, TokenDomain},
    network::{Asset, Network},
    protocol::{ExactOffer, ExactPayload, PaymentFlow},
    upto::Permit,
};

/// How far `validAfter` lies in the past, in seconds, since block time may be behind the client's clock.
const BACKDATED: u64 = 600;

/// Signs payments for 402 answers, within a budget. It does no HTTP itself.
///
/// Clones share signer and budget. [`PaymentMiddleware`](super::PaymentMiddleware) and [`AddPaymentLayer`](super::AddPaymentLayer) use a
/// payer with an HTTP client. Use it directly with any other client:
///
/// ```
/// # #[cfg(feature = "local-signer")]
/// # async fn example(headers: http::HeaderMap, body: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
/// use http::Method;
/// use tower_x402::client::{Payer, key};
///
/// let payer = Payer::builder(key::from_env("STUDENT_PRIVATE_KEY")?).build();
/// let url = "https://api.example/evaluate".parse()?;
/// // `headers` and `body` are those of a 402 that answered a POST to this URL.
/// if let Some(payment) = payer.pay(&Method::POST, &url, &headers, Some(body)).await? {
///     let (name, value) = (payment.header_name(), payment.header()); // send it with the same request
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Payer(Arc<Inner>, Arc<Purchases>);

debug_fields!(Payer |this| { payer: this.0 });

/// The request that was answered 402.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) method: &'a Method,
    pub(super) url: &'a Url,
    /// When the 402 was made by the seller's clock, in seconds since the Unix epoch.
    pub(super) date: Option<u64>,
    /// The hashes of the purchase's key and of the request, if the caller named the purchase.
    pub(super) purchase: Option<(B256, B256)>,
}

struct Inner {
    signer: Box<dyn AuthorizationSigner>,
    budget: Budget,
    policy: OfferPolicy,
    /// `None` if it opens no channels.
    channels: Option<ChannelPolicy>,
    permits: PermitPolicy,
    max_window: Duration,
    clock: Arc<dyn Clock>,
    nonces: Arc<dyn Nonces>,
}

impl Payer {
    /// Returns a builder with the default [`Budget`] and USDC on Base and Base Sepolia.
    pub fn builder(signer: impl AuthorizationSigner + 'static) -> PayerBuilder {
        let payer = Inner {
            signer: Box::new(signer),
            budget: Budget::default(),
            policy: OfferPolicy::default(),
            channels: None,
            permits: PermitPolicy::default(),
            max_window: Duration::from_secs(3_600),
            clock: Arc::new(SystemClock),
            nonces: Arc::new(OsNonces),
        };
        PayerBuilder { payer, assets: None }
    }

    /// Returns the budget.
    pub fn budget(&self) -> &Budget {
        &self.0.budget
    }

    /// Returns the payer's address.
    pub fn address(&self) -> Address {
        self.0.signer.address()
    }

    /// Returns the tokens that it pays with.
    pub fn assets(&self) -> &[Asset] {
        &self.0.policy.assets
    }

    pub(super) fn now(&self) -> u64 {
        self.0.clock.now()
    }

    /// Returns for how long an authorization is valid if the server asks for this, in seconds.
    pub(super) fn window(&self, max_timeout_seconds: u64) -> u64 {
        max_timeout_seconds.min(self.0.max_window.as_secs().max(1))
    }

    /// Signs a payment for a 402 that answered `method` on `url`.
    ///
    /// Takes the best offer that the budget covers (see [`PayerBuilder::prefer`]), reserves its price, signs an authorization for exactly
    /// this amount and records it in the budget's journal. When this returns, the payment may be sent.
    ///
    /// Returns `None` if the 402 is not of x402, or if the method is `HEAD`, for which no server charges.
    ///
    /// `body` is that of the 402. It is only needed for x402 v1, which has its offers there: if there is no header
    /// `PAYMENT-REQUIRED`, and if the body is JSON of at most [`MAX_REQUIRED_BODY`](crate::protocol::MAX_REQUIRED_BODY) bytes.
    ///
    /// # Errors
    /// See [`PaymentError`]. After an error nothing stays reserved.
    pub async fn pay(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        body: Option<&[u8]>,
    ) -> Result<Option<SignedPayment>, PaymentError> {
        if method == Method::HEAD {
            return Ok(None);
        }
        let Some(challenge) = Challenge::read(headers, body).map_err(PaymentError::Unreadable)? else {
            return Ok(None);
        };
        let asked = Asked { method, url, date: date_of(headers), purchase: None };
        let mut payment = self.sign(challenge, asked).await?;
        // The caller may send it from here on.
        payment.set_sent(true);
        Ok(Some(payment))
    }

    pub(super) async fn sign(&self, mut challenge: Challenge, asked: Asked<'_>) -> Result<SignedPayment, PaymentError> {
        let Asked { method, url, date, purchase } = asked;
        let now = self.now();
        let (AcceptedOffer { index, offer, amount, .. }, reservation) =
            match self.reserve(&challenge, &asked, now).await? {
                Reserved::Exact(accepted, reservation) => (*accepted, reservation),
                Reserved::Channel(payment) => {
                    return Ok(SignedPayment::by_voucher(*payment, self.0.clock.clone(), method));
                }
            };
        challenge.add_payment_id(self.0.nonces.next()?);
        let window = self.window(offer.max_timeout_seconds);
        check_clock(now, date, window)?;
        let (authorization, signature) = self.authorize(&offer, window).await?;
        let permit = offer.permit();
        let entry = JournalEntry {
            signed_at: now,
            method: method.to_string(),
            url: url.to_string(),
            network: offer.network(),
            asset: offer.asset.address,
            payer: authorization.from,
            pay_to: authorization.to,
            amount,
            valid_before: authorization.valid_before.saturating_to(),
            nonce: authorization.nonce,
            facilitator: permit.map(|permit| permit.facilitator),
            charged: None,
            version: challenge.version(),
            status_url: challenge.status_url(url).map(String::from),
            purchase: purchase.map(|(key, _)| key),
            request: purchase.map(|(_, request)| request),
            payment: challenge
                .into_header(index, &ExactPayload { signature, authorization, permit })
                .map_err(PaymentError::encode)?,
        };
        let header = header_of(&entry.payment)?;
        let journal = self.0.budget.journal();
        let unsent = journal.record_signed(entry.clone(), reservation).await.map_err(PaymentError::Journal)?;
        let Inner { permits, clock, .. } = &*self.0;
        Ok(SignedPayment::new(header, entry, (self.budget(), unsent), permits, clock.clone()))
    }

    /// Signs an authorization that is valid for `window` seconds from when its signature is there. If the signer took so long that it is not,
    /// another one with the same nonce is signed, with as much time added: at most one of them can ever be used.
    async fn authorize(
        &self,
        offer: &ExactOffer,
        window: u64,
    ) -> Result<(Authorization, PaymentSignature), PaymentError> {
        let nonce = self.0.nonces.next()?;
        let permit = offer.permit().map(|permit| (permit, Permit::domain(offer.network())));
        let domain = TokenDomain::of(&offer.asset);
        let mut validity = Validity::new(window);
        loop {
            let now = self.now();
            let authorization = Authorization {
                from: self.0.signer.address(),
                to: offer.pay_to,
                value: offer.amount,
                valid_after: U256::from(now.saturating_sub(BACKDATED)),
                valid_before: U256::from(validity.begin(now)),
                nonce,
            };
            let signature = match &permit {
                None => self.0.signer.sign(&authorization, &domain).await?,
                Some((permit, domain)) => {
                    self.0.signer.sign_digest(permit.signing_hash(&authorization, domain)).await?
                }
            };
            if validity.is_good(self.now())? {
                return Ok((authorization, signature));
            }
        }
    }

    /// Returns a payment from the journal, to be presented again. It may have been used.
    pub(super) fn present_again(&self, entry: JournalEntry, is_paid: bool) -> Result<SignedPayment, PaymentError> {
        let header = header_of(&entry.payment)?;
        let Inner { permits, clock, .. } = &*self.0;
        Ok(SignedPayment::again(header, entry, self.budget(), permits, (is_paid, clock.clone())))
    }

    pub(super) fn purchases(&self) -> &Purchases {
        &self.1
    }

    /// Reserves the price of the best offer that the budget covers. If it covers none, the error is that of the best offer.
    async fn reserve(&self, challenge: &Challenge, asked: &Asked<'_>, now: u64) -> Result<Reserved, PaymentError> {
        let mut refusal = None;
        let channel =
            asked.purchase.and_then(|(key, _)| self.0.budget.journal().with_books(|books| books.of_purchase(key)));
        for accepted in self.exact_first(self.0.policy.choose(challenge)?) {
            // What may have been charged in a channel is paid from there, or not at all.
            if channel.is_some() && accepted.channel.is_none() {
                continue;
            }
            if let Some(channel) = &accepted.channel {
                // Boxed, so that a payment by transfer has no room for it.
                // A payment is kept by the payer, and must not keep it.
                let payer = Self(self.0.clone(), Arc::default());
                match Box::pin(VoucherPayment::sign(&payer, challenge, &accepted, channel, asked)).await {
                    Ok(payment) => return Ok(Reserved::Channel(Box::new(payment))),
                    Err(PaymentError::Refused(refused)) => refusal = refusal.or(Some(refused)),
                    Err(error) => return Err(error),
                }
                continue;
            }
            if accepted.offer.permit().is_some()
                && let Some(approved) = Box::pin(self.0.permits.short_of(self.address(), &accepted.offer)).await
            {
                let reason = OfferRefusal::NotApproved { approved, needed: accepted.offer.amount };
                refusal = refusal.or(Some(Refusal::NoPayableOffer { reasons: vec![reason] }));
                continue;
            }
            let (amount, payee) = (accepted.amount, accepted.offer.pay_to);
            match self.0.budget.reserve(Charge { amount, payee, host: host_of(asked.url), signed_at: now }, now) {
                Ok(reservation) => return Ok(Reserved::Exact(Box::new(accepted), reservation)),
                Err(refused) => refusal = refusal.or(Some(refused)),
            }
        }
        let otherwise = match channel {
            Some(channel) => Refusal::PurchaseOfChannel { channel },
            None => Refusal::NoPayableOffer { reasons: Vec::new() },
        };
        Err(refusal.unwrap_or(otherwise).into())
    }
}

/// The window of validity of something that is signed, which begins when the signature is there.
pub(super) struct Validity {
    window: u64,
    /// How far the window is off its length when the signature is there, at most.
    tolerance: u64,
    /// How long the signer takes, as far as is known.
    lead: u64,
    begun: u64,
    valid_before: u64,
    signatures: u32,
}

impl Validity {
    /// How often a signer is asked at most.
    const MAX_SIGNATURES: u32 = 3;

    pub(super) const fn new(window: u64) -> Self {
        let quarter = window / 4;
        let tolerance = if quarter < 15 { quarter } else { 15 };
        Self { window, tolerance, lead: 0, begun: 0, valid_before: 0, signatures: 0 }
    }

    /// Returns when the window ends for something that is signed from `now` on.
    pub(super) const fn begin(&mut self, now: u64) -> u64 {
        self.begun = now;
        self.signatures += 1;
        self.valid_before = now.saturating_add(self.lead).saturating_add(self.window);
        self.valid_before
    }

    /// Returns `true` if the window is as long as it should be now that the signature is there; else it must be signed again.
    pub(super) fn is_good(&mut self, now: u64) -> Result<bool, PaymentError> {
        let took = now.saturating_sub(self.begun);
        if self.valid_before.saturating_sub(now).abs_diff(self.window) <= self.tolerance {
            return Ok(true);
        }
        self.lead = took;
        if self.signatures < Self::MAX_SIGNATURES {
            return Ok(false);
        }
        let (took, window) = (Duration::from_secs(took), Duration::from_secs(self.window));
        Err(PaymentError::SlowSigner { took, window })
    }
}

/// How far this clock may be ahead of the seller's, in seconds. Sellers refuse authorizations for longer than they offered.
const MAX_AHEAD: u64 = 30;
/// How much time an authorization must have left by the seller's clock, in seconds, unless it is offered for less than twice as long.
const MIN_LEFT: u64 = 20;
/// A seller's clock that is further off is taken to be wrong itself.
const MAX_BELIEVED: u64 = 24 * 60 * 60;

/// Compares this clock with that of the seller, in whose time an authorization must be valid.
fn check_clock(now: u64, date: Option<u64>, window: u64) -> Result<(), Refusal> {
    let Some(date) = date.filter(|date| date.abs_diff(now) <= MAX_BELIEVED) else { return Ok(()) };
    let (ahead, behind) = (now.saturating_sub(date), date.saturating_sub(now));
    if ahead > MAX_AHEAD {
        return Err(Refusal::ClockAhead { by: Duration::from_secs(ahead) });
    }
    if behind > window.saturating_sub(MIN_LEFT.min(window / 2)) {
        return Err(Refusal::ClockBehind { by: Duration::from_secs(behind) });
    }
    Ok(())
}

/// Returns the time of an answer by the clock of who made it, unless it comes from a cache.
pub(super) fn date_of(headers: &HeaderMap) -> Option<u64> {
    let date = headers.get(header::DATE).filter(|_| !headers.contains_key(header::AGE))?.to_str().ok()?;
    Some(httpdate::parse_http_date(date).ok()?.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

/// A payment of the chosen offer, as far as its scheme has got.
enum Reserved {
    Exact(Box<AcceptedOffer>, Reservation),
    Channel(Box<VoucherPayment>),
}

impl Payer {
    pub(super) fn channel_policy(&self) -> Option<&ChannelPolicy> {
        self.0.channels.as_ref()
    }

    pub(super) fn signer(&self) -> &dyn AuthorizationSigner {
        self.0.signer.as_ref()
    }

    pub(super) fn nonces(&self) -> &dyn Nonces {
        self.0.nonces.as_ref()
    }

    /// Puts channels that are not worth opening yet behind the offers of `exact`.
    fn exact_first(&self, accepted: Vec<AcceptedOffer>) -> Vec<AcceptedOffer> {
        let Some(policy) = self.channel_policy() else { return accepted };
        let is_early = |accepted: &AcceptedOffer| {
            accepted.channel.is_some() && policy.is_early(&self.0.budget, accepted.offer.pay_to, accepted.amount)
        };
        let (early, mut first): (Vec<_>, Vec<_>) = accepted.into_iter().partition(is_early);
        first.extend(early);
        first
    }
}

debug_fields!(Inner |this| { address: this.signer.address(), budget: this.budget, policy: this.policy });

/// Builder of a [`Payer`].
#[derive(Debug)]
#[must_use]
pub struct PayerBuilder {
    payer: Inner,
    /// `None` for the default tokens.
    assets: Option<Vec<Asset>>,
}

impl PayerBuilder {
    /// Sets the budget. Default: [`Budget::default`], which allows $0.01 per payment and $1.00 in total.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.payer.budget = budget;
        self
    }

    /// Adds a token to pay with. The first call replaces the default tokens.
    ///
    /// The budget counts its atomic units as those of USDC: six decimal places, one unit a micro-dollar. An offer with another EIP-712
    /// name or version than this asset has is refused.
    pub fn asset(mut self, asset: Asset) -> Self {
        self.assets.get_or_insert_default().push(asset);
        self
    }

    /// Adds USDC on these networks to the tokens to pay with. The first call replaces the default tokens. Networks without a known USDC
    /// are ignored. Default: Base and Base Sepolia.
    pub fn networks(mut self, networks: impl IntoIterator<Item = Network>) -> Self {
        self.assets.get_or_insert_default().extend(networks.into_iter().filter_map(Network::usdc));
        self
    }

    /// Prefers the offer with the lowest rank. Default: the cheapest.
    ///
    /// Each further call distinguishes offers of the same rank. Offers that are still equal are ordered by price, then
    /// `authorization` before `upfront`, then by the server's order. An offer that the budget does not cover is skipped. The
    /// rank is computed several times per offer.
    ///
    /// ```
    /// # #[cfg(feature = "local-signer")] {
    /// use std::cmp::Reverse;
    /// use alloy_signer_local::PrivateKeySigner;
    /// use tower_x402::{Network, client::Payer, protocol::PaymentFlow};
    ///
    /// let payer = Payer::builder(PrivateKeySigner::random())
    ///     .flows([PaymentFlow::Authorization])                  // never pay before the work
    ///     .prefer(|offer| offer.network() != Network::BASE)     // prefer Base, at any price,
    ///     .prefer(|offer| offer.amount)                         // then the cheapest offer,
    ///     .prefer(|offer| Reverse(offer.max_timeout_seconds))   // then the longest window
    ///     .build();
    /// # }
    /// ```
    pub fn prefer<K: Ord>(mut self, rank: impl Fn(&ExactOffer) -> K + Send + Sync + 'static) -> Self {
        self.payer.policy.prefer(rank);
        self
    }

    /// Sets the flows to pay in. Default: all.
    pub fn flows(mut self, flows: impl IntoIterator<Item = PaymentFlow>) -> Self {
        self.payer.policy.flows = Some(flows.into_iter().collect());
        self
    }

    /// Pays by vouchers where a seller offers them (scheme `batch-settlement`), from channels that the payer opens and fills by itself.
    /// Default: off.
    ///
    /// At the same rank and price, a voucher is preferred to `exact`. Preferences see such an offer by its price, payee and token;
    /// [`flows`](Self::flows) does not apply to it.
    pub fn vouchers(mut self, policy: ChannelPolicy) -> Self {
        self.payer.policy.withdraw_delay = Some(ChannelPolicy::MAX_WITHDRAW_DELAY);
        self.payer.channels = Some(policy);
        self
    }

    /// Pays at most the price where a seller offers that (scheme `upto`), by permits of Permit2. Default: off.
    ///
    /// At the same rank and price, a permit is preferred to `exact`: it may cost less. [`Budget`] limits apply to the price, which is the most
    /// that may be charged. A seller may charge all of it. The signer signs the digest, which devices that show what they sign refuse.
    pub fn upto(mut self, policy: PermitPolicy) -> Self {
        self.payer.policy.permits = true;
        self.payer.permits = policy;
        self
    }

    /// Sets the longest time that an authorization is valid from its signature on, in whole seconds and at least one, even if the server
    /// asks for more. Default: one hour.
    ///
    /// If the signer takes so long that an authorization loses more than a quarter of its time, or 15 seconds, it is asked for another
    /// one with as much time added, up to three in all. They have one nonce, so only one can be used.
    pub fn max_window(mut self, window: Duration) -> Self {
        self.payer.max_window = window;
        self
    }

    /// Sets the clock. Default: [`SystemClock`].
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.payer.clock = clock;
        self
    }

    /// Sets the source of nonces and payment ids. Default: [`OsNonces`].
    pub fn nonces(mut self, nonces: impl Nonces) -> Self {
        self.payer.nonces = Arc::new(nonces);
        self
    }

    /// Builds the payer.
    pub fn build(mut self) -> Payer {
        let default = || [Network::BASE, Network::BASE_SEPOLIA].into_iter().filter_map(Network::usdc).collect();
        self.payer.policy.assets = self.assets.unwrap_or_else(default);
        Payer(Arc::new(self.payer), Arc::default())
    }
}
