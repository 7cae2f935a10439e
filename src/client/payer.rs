//! The payer: chooses an offer and has its scheme sign for it.

use std::{sync::Arc, time::Duration};

use alloy_primitives::Address;
use http::{HeaderMap, Method};
use serde_json::{Map, Value};
use url::Url;

use super::{
    Budget, ChannelPolicy, JournalEntry, PaymentError, PermitPolicy, Refusal, SignedPayment,
    challenge::Challenge,
    channels::VoucherPayment,
    exact::ExactPayment,
    offer::{AcceptedOffer, OfferPolicy},
    payment::SchemePayment,
    purchase::Purchases,
    wallet::{Asked, Wallet, date_of},
};
use crate::{
    clock::{Clock, Nonces, OsNonces, SystemClock},
    eip3009::AuthorizationSigner,
    network::{Asset, Network},
    protocol::{ExactOffer, PaymentFlow, TransferMethod},
};

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
pub struct Payer(Arc<Inner>);

debug_fields!(Payer |this| { wallet: this.0.wallet, policy: this.0.policy });

struct Inner {
    wallet: Arc<Wallet>,
    policy: OfferPolicy,
    purchases: Purchases,
    /// What is added to the extensions of a 402, by their names.
    extensions: Vec<(String, Map<String, Value>)>,
}

impl Payer {
    /// Returns a builder with the default [`Budget`] and USDC on Base and Base Sepolia.
    pub fn builder(signer: impl AuthorizationSigner + 'static) -> PayerBuilder {
        let wallet = Wallet {
            signer: Box::new(signer),
            budget: Budget::default(),
            channels: None,
            permits: PermitPolicy::default(),
            max_window: Duration::from_secs(3_600),
            clock: Arc::new(SystemClock),
            nonces: Arc::new(OsNonces),
        };
        PayerBuilder { wallet, policy: OfferPolicy::default(), assets: None, extensions: Vec::new() }
    }

    /// Returns the budget.
    pub fn budget(&self) -> &Budget {
        &self.0.wallet.budget
    }

    /// Returns the payer's address.
    pub fn address(&self) -> Address {
        self.0.wallet.address()
    }

    /// Returns the tokens that it pays with.
    pub fn assets(&self) -> &[Asset] {
        &self.0.policy.assets
    }

    pub(super) fn wallet(&self) -> &Arc<Wallet> {
        &self.0.wallet
    }

    pub(super) fn now(&self) -> u64 {
        self.0.wallet.now()
    }

    pub(super) fn purchases(&self) -> &Purchases {
        &self.0.purchases
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
        payment.set_sent();
        Ok(Some(payment))
    }

    /// Signs for the best offer that can be paid. If there is none, the error is that of the best offer.
    pub(super) async fn sign(&self, mut challenge: Challenge, asked: Asked<'_>) -> Result<SignedPayment, PaymentError> {
        let Inner { wallet, policy, extensions, .. } = &*self.0;
        extensions.iter().for_each(|(name, info)| challenge.add_info(name, info));
        let challenge = &challenge;
        let channel =
            asked.purchase.and_then(|(key, _)| self.budget().journal().with_books(|books| books.of_purchase(key)));
        let mut refusal = None;
        for accepted in self.exact_first(policy.choose(challenge)?) {
            // Both are boxed, so that a payment by one scheme has no room for what another one needs.
            let signed: Result<Box<dyn SchemePayment>, _> = match &accepted.channel {
                Some(offer) => Box::pin(VoucherPayment::sign(wallet, challenge, (&accepted, offer), &asked, channel))
                    .await
                    .map(|payment| Box::new(payment) as _),
                // What may have been charged in a channel is paid from there, or not at all.
                None if channel.is_some() => continue,
                None => Box::pin(ExactPayment::sign(wallet, challenge.clone(), &accepted, &asked))
                    .await
                    .map(|payment| Box::new(payment) as _),
            };
            match signed {
                Ok(payment) => {
                    return Ok(SignedPayment::new(payment, wallet.clock.clone(), asked.method.as_str(), false));
                }
                Err(PaymentError::Refused(refused)) => refusal = refusal.or(Some(refused)),
                Err(error) => return Err(error),
            }
        }
        let otherwise = match channel {
            Some(channel) => Refusal::PurchaseOfChannel { channel },
            None => Refusal::NoPayableOffer { reasons: Vec::new() },
        };
        Err(refusal.unwrap_or(otherwise).into())
    }

    /// Returns a payment from the journal, to be presented again. It may have been used.
    pub(super) fn present_again(&self, entry: JournalEntry, is_paid: bool) -> Result<SignedPayment, PaymentError> {
        let (wallet, method) = (&self.0.wallet, entry.method.clone());
        let payment = ExactPayment::again(wallet, entry, is_paid)?;
        Ok(SignedPayment::new(Box::new(payment), wallet.clock.clone(), &method, true))
    }

    /// Makes a payment ready to be presented again. Returns `false` if it cannot be, or if it is known that it can never be used.
    pub(super) fn resume(&self, payment: &mut SignedPayment) -> bool {
        self.budget().journal().was_paid(payment.nonce()) != Some(false) && payment.resume()
    }

    /// Puts channels that are not worth opening yet behind the offers of `exact`.
    fn exact_first(&self, accepted: Vec<AcceptedOffer>) -> Vec<AcceptedOffer> {
        let Some(policy) = &self.0.wallet.channels else { return accepted };
        let is_early = |accepted: &AcceptedOffer| accepted.channel.is_some() && self.is_early(policy, accepted);
        let (early, mut first): (Vec<_>, Vec<_>) = accepted.into_iter().partition(is_early);
        first.extend(early);
        first
    }

    /// Returns `true` if too little was paid to the payee yet for a channel to pay off.
    fn is_early(&self, policy: &ChannelPolicy, accepted: &AcceptedOffer) -> bool {
        let payee = accepted.offer.pay_to;
        let is_open = || self.budget().journal().with_books(|books| books.has_channel_with(payee));
        if policy.exact_first == 0 || is_open() {
            return false;
        }
        let paid = self.budget().spent_by_payee().get(&payee).copied().unwrap_or_default();
        accepted.amount.checked_mul(policy.exact_first).is_none_or(|enough| paid < enough)
    }
}

/// Builder of a [`Payer`].
#[derive(Debug)]
#[must_use]
pub struct PayerBuilder {
    wallet: Wallet,
    policy: OfferPolicy,
    /// `None` for the default tokens.
    assets: Option<Vec<Asset>>,
    extensions: Vec<(String, Map<String, Value>)>,
}

impl PayerBuilder {
    /// Sets the budget. Default: [`Budget::default`], which allows $0.01 per payment and $1.00 in total.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.wallet.budget = budget;
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
        self.policy.prefer(rank);
        self
    }

    /// Sets the flows to pay in. Default: all.
    pub fn flows(mut self, flows: impl IntoIterator<Item = PaymentFlow>) -> Self {
        self.policy.flows = Some(flows.into_iter().collect());
        self
    }

    /// Pays by vouchers where a seller offers them (scheme `batch-settlement`), from channels that the payer opens and fills by itself.
    /// Default: off.
    ///
    /// At the same rank and price, a voucher is preferred to `exact`. Preferences see such an offer by its price, payee and token;
    /// [`flows`](Self::flows) does not apply to it.
    pub fn vouchers(mut self, policy: ChannelPolicy) -> Self {
        self.policy.withdraw_delay = Some(ChannelPolicy::MAX_WITHDRAW_DELAY);
        self.wallet.channels = Some(policy);
        self
    }

    /// Pays the price by permits of Permit2 where a seller offers that. Default: off.
    ///
    /// At the same rank and price, an authorization is preferred: it needs no approval. The signer signs the digest, which devices that show what
    /// they sign refuse. The policy is for all permits of the payer: the one that is given last holds.
    pub fn permits(self, policy: PermitPolicy) -> Self {
        self.permitting(TransferMethod::Permit, policy)
    }

    /// Pays at most the price, by permits of Permit2, where a seller offers that. Default: off.
    ///
    /// At the same rank and price, it is preferred to what costs the price: it may cost less. [`Budget`] limits apply to the price, which is the
    /// most that may be charged. A seller may charge all of it. For the signer and the policy, see [`permits`](Self::permits).
    pub fn upto(self, policy: PermitPolicy) -> Self {
        self.permitting(TransferMethod::Maximum { facilitator: Address::ZERO }, policy)
    }

    fn permitting(mut self, kind: TransferMethod, policy: PermitPolicy) -> Self {
        self.policy.permits.push(kind);
        self.wallet.permits = policy;
        self
    }

    /// Sets the longest time that an authorization is valid from its signature on, in whole seconds and at least one, even if the server
    /// asks for more. Default: one hour.
    ///
    /// If the signer takes so long that an authorization loses more than a quarter of its time, or 15 seconds, it is asked for another
    /// one with as much time added, up to three in all. They have one nonce, so only one can be used.
    pub fn max_window(mut self, window: Duration) -> Self {
        self.wallet.max_window = window;
        self
    }

    /// Adds these fields to the `info` of the extension of this name, wherever a server declares it. A payment returns all extensions of its
    /// 402; nothing is added if the server itself declares one of
    /// the fields. Call it again for other extensions.
    ///
    /// ```
    /// # #[cfg(feature = "local-signer")] {
    /// use alloy_signer_local::PrivateKeySigner;
    /// use serde_json::Map;
    /// use tower_x402::client::Payer;
    ///
    /// let name = Map::from_iter([("name".to_owned(), "Ada".into())]);
    /// let payer = Payer::builder(PrivateKeySigner::random()).extension("greeting", name).build();
    /// # }
    /// ```
    pub fn extension(mut self, name: impl Into<String>, info: Map<String, Value>) -> Self {
        self.extensions.push((name.into(), info));
        self
    }

    /// Sets the clock. Default: [`SystemClock`].
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.wallet.clock = clock;
        self
    }

    /// Sets the source of nonces and payment ids. Default: [`OsNonces`].
    pub fn nonces(mut self, nonces: impl Nonces) -> Self {
        self.wallet.nonces = Arc::new(nonces);
        self
    }

    /// Builds the payer.
    pub fn build(mut self) -> Payer {
        let default = || [Network::BASE, Network::BASE_SEPOLIA].into_iter().filter_map(Network::usdc).collect();
        self.policy.assets = self.assets.unwrap_or_else(default);
        let Self { wallet, policy, extensions, .. } = self;
        Payer(Arc::new(Inner { wallet: Arc::new(wallet), policy, purchases: Purchases::default(), extensions }))
    }
}
