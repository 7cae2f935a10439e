//! Who pays, with what, and how much at most.

use std::{fmt, sync::Arc, time::Duration};

use alloy_primitives::{Address, U256};
use http::{HeaderMap, HeaderValue, Method};
use url::Url;

use super::{
    Budget, JournalEntry, Payment, PaymentError, Refusal,
    budget::Reservation,
    choose::{Choice, Taste},
    demand::Demand,
    promise::{Promise, host_of},
};
use crate::{
    clock::{Clock, Nonces, OsNonces, SystemClock},
    eip3009::{Authorization, AuthorizationSigner, TokenDomain},
    network::{Asset, Network},
    protocol::{DecodeError, ExactOffer, ExactPayload, MAX_PAYMENT_HEADER, PaymentFlow},
};

/// How far `validAfter` lies in the past, in seconds: block time may be behind the client's clock.
const BACKDATED: u64 = 600;

/// Signs payments for 402 answers, within a budget. Independent of the HTTP client.
///
/// Clones share signer and budget.
///
/// ```
/// # #[cfg(feature = "local-signer")]
/// # async fn example(headers: http::HeaderMap, body: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_signer_local::PrivateKeySigner;
/// use http::Method;
/// use tower_x402::client::Payer;
///
/// let payer = Payer::builder(PrivateKeySigner::random()).build();
/// let url = "https://api.example/evaluate".parse()?;
/// // `headers` and `body` are those of a 402 that answered a POST to this URL.
/// if let Some(payment) = payer.pay(&Method::POST, &url, &headers, Some(body)).await? {
///     let (name, value) = (payment.header_name(), payment.header()); // send it with the same request
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Payer(Arc<Inner>);

struct Inner {
    signer: Box<dyn AuthorizationSigner>,
    budget: Budget,
    taste: Taste,
    max_window: Duration,
    clock: Arc<dyn Clock>,
    nonces: Arc<dyn Nonces>,
}

impl Payer {
    /// Starts with the default [`Budget`] and USDC on Base and Base Sepolia.
    pub fn builder(signer: impl AuthorizationSigner + 'static) -> PayerBuilder {
        PayerBuilder {
            signer: Box::new(signer),
            budget: None,
            assets: None,
            taste: Taste::new(Vec::new()),
            max_window: Duration::from_secs(3_600),
            clock: Arc::new(SystemClock),
            nonces: Arc::new(OsNonces),
        }
    }

    /// The budget it pays from.
    pub fn budget(&self) -> &Budget {
        &self.0.budget
    }

    /// Whose money it is.
    pub fn address(&self) -> Address {
        self.0.signer.address()
    }

    /// The tokens it pays with.
    pub fn assets(&self) -> &[Asset] {
        &self.0.taste.assets
    }

    /// Unix time by its clock.
    pub(super) fn now(&self) -> u64 {
        self.0.clock.now()
    }

    /// Signs a payment for a 402 with these headers that answered `method` on `url`; `None` if the 402 is not x402's, or if the method
    /// is `HEAD`: its answer holds nothing to pay for, and no server charges for it.
    ///
    /// `body` is that of the 402. It is only looked at where there is no `PAYMENT-REQUIRED`, as in x402 v1, and only if it has no
    /// more than [`MAX_REQUIRED_BODY`](crate::protocol::MAX_REQUIRED_BODY) bytes; a 402 whose body is not JSON, longer or
    /// slow to come needs none.
    ///
    /// Of the payable offers the best is chosen that the budget covers ([`PayerBuilder::prefer`] says which is best), its price
    /// reserved in the budget, the authorization signed and recorded in the budget's journal, in this order. When this
    /// returns, the payment may be sent.
    ///
    /// # Errors
    /// See [`PaymentError`]; nothing is reserved then.
    pub async fn pay(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        body: Option<&[u8]>,
    ) -> Result<Option<Payment>, PaymentError> {
        if method == Method::HEAD {
            return Ok(None);
        }
        match Demand::read(headers, body).map_err(PaymentError::Unreadable)? {
            Some(demand) => self.meet(demand, method, url).await.map(Some),
            None => Ok(None),
        }
    }

    /// Signs what is demanded.
    pub(super) async fn meet(&self, mut demand: Demand, method: &Method, url: &Url) -> Result<Payment, PaymentError> {
        let now = self.now();
        let (choice, reservation) = self.reserve(&demand, url, now)?;
        demand.name(self.0.nonces.as_ref())?;
        let window = choice.offer.max_timeout_seconds.min(self.0.max_window.as_secs().max(1));
        let valid_before = now.saturating_add(window);
        let authorization = Authorization {
            from: self.0.signer.address(),
            to: choice.offer.pay_to,
            value: choice.offer.amount,
            valid_after: U256::from(now.saturating_sub(BACKDATED)),
            valid_before: U256::from(valid_before),
            nonce: self.0.nonces.next()?,
        };
        let signature = self.0.signer.sign(&authorization, &TokenDomain::of(&choice.offer.asset)).await?;
        let entry = JournalEntry {
            signed_at: now,
            method: method.to_string(),
            url: url.to_string(),
            network: choice.offer.network(),
            asset: choice.offer.asset.address,
            payer: authorization.from,
            pay_to: authorization.to,
            amount: choice.amount,
            valid_before,
            nonce: authorization.nonce,
            version: demand.version(),
            status_url: demand.status_url(url).map(String::from),
            payment: demand
                .answer(choice.index, &ExactPayload { signature, authorization })
                .map_err(PaymentError::encode)?,
        };
        // What came with the offer goes back with it; a long 402 makes a payment that is too long to be read.
        let (size, limit) = (entry.payment.len(), MAX_PAYMENT_HEADER);
        if size > limit {
            return Err(PaymentError::encode(DecodeError::TooLarge { size, limit }));
        }
        let mut header = HeaderValue::from_str(&entry.payment).map_err(PaymentError::encode)?;
        header.set_sensitive(true);

        let journal = self.0.budget.journal().clone();
        let reservation = journal.signed_for(entry.clone(), reservation).await.map_err(PaymentError::Journal)?;
        Ok(Payment::new(header, entry, reservation, journal, self.0.clock.clone()))
    }

    /// The best offer that the budget covers; if it covers none, what it says to the best.
    fn reserve(&self, demand: &Demand, url: &Url, now: u64) -> Result<(Choice, Reservation), Refusal> {
        let mut refusal = None;
        for choice in self.0.taste.choose(demand)? {
            let promise = Promise { amount: choice.amount, payee: choice.offer.pay_to, host: host_of(url), at: now };
            match self.0.budget.reserve(promise, now) {
                Ok(reservation) => return Ok((choice, reservation)),
                Err(refused) => refusal = refusal.or(Some(refused)),
            }
        }
        Err(refusal.unwrap_or(Refusal::NoPayableOffer { reasons: Vec::new() }))
    }
}

impl fmt::Debug for Payer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Payer")
            .field("address", &self.0.signer.address())
            .field("budget", &self.0.budget)
            .field("taste", &self.0.taste)
            .finish_non_exhaustive()
    }
}

/// Configures a [`Payer`].
pub struct PayerBuilder {
    signer: Box<dyn AuthorizationSigner>,
    budget: Option<Budget>,
    assets: Option<Vec<Asset>>,
    taste: Taste,
    max_window: Duration,
    clock: Arc<dyn Clock>,
    nonces: Arc<dyn Nonces>,
}

impl PayerBuilder {
    /// What may be spent.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Pays with this token; the first call replaces the default tokens, further calls add to it.
    ///
    /// Its amounts are counted in the budget as USDC is: six decimal places, one unit a micro-dollar. Name and version are
    /// taken from here; an offer that says otherwise is refused.
    pub fn asset(mut self, asset: Asset) -> Self {
        self.assets.get_or_insert_default().push(asset);
        self
    }

    /// Pays with USDC on these networks only; those on which this crate knows no USDC are ignored.
    pub fn networks(mut self, networks: impl IntoIterator<Item = Network>) -> Self {
        self.assets.get_or_insert_default().extend(networks.into_iter().filter_map(Network::usdc));
        self
    }

    /// Of several payable offers, takes the one that ranks lowest. Offers of the same rank are told apart by the next
    /// preference, if this is called again, and in the end by price, then by flow (`authorization` before `upfront`), then by
    /// the server's order. Without any preference that is all: the cheapest is taken.
    ///
    /// An offer that the budget does not cover is passed over for the next best. The rank is asked for often; keep it cheap.
    ///
    /// ```
    /// # #[cfg(feature = "local-signer")] {
    /// use std::{cmp::Reverse, time::Duration};
    /// use alloy_signer_local::PrivateKeySigner;
    /// use tower_x402::{Network, client::Payer, protocol::PaymentFlow};
    ///
    /// let payer = Payer::builder(PrivateKeySigner::random())
    ///     .flows([PaymentFlow::Authorization])                      // never pay before the work
    ///     .min_window(Duration::from_secs(30))                      // nor with less time than that to be served
    ///     .prefer_networks([Network::BASE, Network::BASE_SEPOLIA])  // rather on Base, whatever it costs
    ///     .prefer(|offer| offer.amount)                             // and there the cheapest,
    ///     .prefer(|offer| Reverse(offer.max_timeout_seconds))       // of equal ones that with the longest window
    ///     .build();
    /// # }
    /// ```
    pub fn prefer<K: Ord>(mut self, rank: impl Fn(&ExactOffer) -> K + Send + Sync + 'static) -> Self {
        self.taste.prefer(rank);
        self
    }

    /// [Prefers](Self::prefer) earlier networks of this list to later ones, and those to networks that are not in it. On which
    /// ones is paid at all, [`networks`](Self::networks) says.
    pub fn prefer_networks(mut self, networks: impl IntoIterator<Item = Network>) -> Self {
        self.taste.prefer_networks(networks.into_iter().collect());
        self
    }

    /// Pays in these flows only. Any, unless set.
    pub fn flows(mut self, flows: impl IntoIterator<Item = PaymentFlow>) -> Self {
        self.taste.flows = Some(flows.into_iter().collect());
        self
    }

    /// Refuses offers whose `maxTimeoutSeconds` is less than this; in whole seconds, rounded up. One second unless set.
    pub fn min_window(mut self, window: Duration) -> Self {
        self.taste.min_window = window.as_secs().saturating_add((window.subsec_nanos() > 0).into());
        self
    }

    /// The longest time an authorization is valid, whatever the server asks for. One hour unless set.
    pub fn max_window(mut self, window: Duration) -> Self {
        self.max_window = window;
        self
    }

    /// Where the time comes from.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Where nonces come from.
    pub fn nonces(mut self, nonces: impl Nonces) -> Self {
        self.nonces = Arc::new(nonces);
        self
    }

    /// The payer.
    pub fn build(mut self) -> Payer {
        let default = || [Network::BASE, Network::BASE_SEPOLIA].into_iter().filter_map(Network::usdc).collect();
        self.taste.assets = self.assets.unwrap_or_else(default);
        Payer(Arc::new(Inner {
            signer: self.signer,
            budget: self.budget.unwrap_or_default(),
            taste: self.taste,
            max_window: self.max_window,
            clock: self.clock,
            nonces: self.nonces,
        }))
    }
}

impl fmt::Debug for PayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PayerBuilder")
            .field("address", &self.signer.address())
            .field("budget", &self.budget)
            .field("assets", &self.assets)
            .field("taste", &self.taste)
            .finish_non_exhaustive()
    }
}
