//! The payer: chooses an offer, reserves its price in the budget and signs.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};
use http::{HeaderMap, Method};
use url::Url;

use super::{
    Budget, ChannelPolicy, JournalEntry, PaymentError, Refusal, SignedPayment,
    budget::{Charge, Reservation, host_of},
    channels::VoucherPayment,
    offer::{AcceptedOffer, Challenge, OfferPolicy},
    payment::header_of,
};
use crate::{
    clock::{Clock, Nonces, OsNonces, SystemClock},
    eip3009::{Authorization, AuthorizationSigner, TokenDomain},
    network::{Asset, Network},
    protocol::{ExactOffer, ExactPayload, PaymentFlow},
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
#[derive(Clone, Debug)]
pub struct Payer(Arc<Inner>);

struct Inner {
    signer: Box<dyn AuthorizationSigner>,
    budget: Budget,
    policy: OfferPolicy,
    /// `None` if it opens no channels.
    channels: Option<ChannelPolicy>,
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
        match Challenge::read(headers, body).map_err(PaymentError::Unreadable)? {
            Some(challenge) => self.sign(challenge, method, url).await.map(Some),
            None => Ok(None),
        }
    }

    pub(super) async fn sign(
        &self,
        mut challenge: Challenge,
        method: &Method,
        url: &Url,
    ) -> Result<SignedPayment, PaymentError> {
        let now = self.now();
        let (AcceptedOffer { index, offer, amount, .. }, reservation) =
            match self.reserve(&challenge, (method, url), now).await? {
                Reserved::Exact(accepted, reservation) => (*accepted, reservation),
                Reserved::Channel(payment) => return Ok(SignedPayment::by_voucher(*payment, self.0.clock.clone())),
            };
        challenge.add_payment_id(self.0.nonces.as_ref())?;
        let valid_before = now.saturating_add(self.window(offer.max_timeout_seconds));
        let authorization = Authorization {
            from: self.0.signer.address(),
            to: offer.pay_to,
            value: offer.amount,
            valid_after: U256::from(now.saturating_sub(BACKDATED)),
            valid_before: U256::from(valid_before),
            nonce: self.0.nonces.next()?,
        };
        let signature = self.0.signer.sign(&authorization, &TokenDomain::of(&offer.asset)).await?;
        let entry = JournalEntry {
            signed_at: now,
            method: method.to_string(),
            url: url.to_string(),
            network: offer.network(),
            asset: offer.asset.address,
            payer: authorization.from,
            pay_to: authorization.to,
            amount,
            valid_before,
            nonce: authorization.nonce,
            version: challenge.version(),
            status_url: challenge.status_url(url).map(String::from),
            payment: challenge
                .into_header(index, &ExactPayload { signature, authorization })
                .map_err(PaymentError::encode)?,
        };
        let header = header_of(&entry.payment)?;
        let journal = self.0.budget.journal().clone();
        let reservation = journal.record_signed(entry.clone(), reservation).await.map_err(PaymentError::Journal)?;
        Ok(SignedPayment::new(header, entry, reservation, journal, self.0.clock.clone()))
    }

    /// Reserves the price of the best offer that the budget covers. If it covers none, the error is that of the best offer.
    async fn reserve(
        &self,
        challenge: &Challenge,
        request: (&Method, &Url),
        now: u64,
    ) -> Result<Reserved, PaymentError> {
        let mut refusal = None;
        for accepted in self.exact_first(self.0.policy.choose(challenge)?) {
            if let Some(channel) = &accepted.channel {
                // Boxed, so that a payment by transfer has no room for it.
                match Box::pin(VoucherPayment::sign(self, challenge, &accepted, channel, request)).await {
                    Ok(payment) => return Ok(Reserved::Channel(Box::new(payment))),
                    Err(PaymentError::Refused(refused)) => refusal = refusal.or(Some(refused)),
                    Err(error) => return Err(error),
                }
                continue;
            }
            let (amount, payee) = (accepted.amount, accepted.offer.pay_to);
            match self.0.budget.reserve(Charge { amount, payee, host: host_of(request.1), signed_at: now }, now) {
                Ok(reservation) => return Ok(Reserved::Exact(Box::new(accepted), reservation)),
                Err(refused) => refusal = refusal.or(Some(refused)),
            }
        }
        Err(refusal.unwrap_or(Refusal::NoPayableOffer { reasons: Vec::new() }).into())
    }
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
        self.payer.policy.withdraw_delay = Some(policy.longest_delay());
        self.payer.channels = Some(policy);
        self
    }

    /// Sets the longest time that an authorization is valid, in whole seconds and at least one, even if the server asks for more.
    /// Default: one hour.
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
        Payer(Arc::new(self.payer))
    }
}
