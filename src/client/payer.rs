//! Who pays, with what, and how much at most.

use std::{fmt, sync::Arc, time::Duration};

use alloy_primitives::U256;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde_json::{Map, Value};
use url::Url;

use super::{
    Budget, JournalEntry, Payment, PaymentError,
    choose::{Asked, Choice, choose},
    promise::{Promise, host_of},
};
use crate::{
    clock::{Clock, Nonces, OsNonces, RandomnessError, SystemClock},
    eip3009::{Authorization, AuthorizationSigner, PaymentSignature, TokenDomain},
    network::{Asset, Network},
    protocol::{
        DecodeError, ExactPayload, MAX_PAYMENT_HEADER, MAX_REQUIRED_HEADER, PaymentId, PaymentPayload, V2, Verbatim,
        decode_header, encode_header, header_name,
    },
};

/// How far `validAfter` lies in the past, in seconds: block time may be behind the client's clock.
const BACKDATED: u64 = 600;

/// Signs payments for 402 answers, within a budget. Independent of the HTTP client.
///
/// Clones share signer and budget.
///
/// ```
/// # #[cfg(feature = "local-signer")]
/// # async fn example(headers: http::HeaderMap) -> Result<(), Box<dyn std::error::Error>> {
/// use alloy_signer_local::PrivateKeySigner;
/// use http::Method;
/// use tower_x402::client::Payer;
///
/// let payer = Payer::builder(PrivateKeySigner::random()).build();
/// let url = "https://api.example/evaluate".parse()?;
/// // `headers` are those of a 402 that answered a POST to this URL.
/// if let Some(payment) = payer.pay(&Method::POST, &url, &headers).await? {
///     let value = payment.header(); // send it as PAYMENT-SIGNATURE with the same request
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Payer(Arc<Inner>);

struct Inner {
    signer: Box<dyn AuthorizationSigner>,
    budget: Budget,
    assets: Vec<Asset>,
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
            max_window: Duration::from_secs(3_600),
            clock: Arc::new(SystemClock),
            nonces: Arc::new(OsNonces),
        }
    }

    /// The budget it pays from.
    pub fn budget(&self) -> &Budget {
        &self.0.budget
    }

    /// Whether an answer asks for a payment; a 402 of somebody else's making does not.
    pub(super) fn is_asked(status: StatusCode, headers: &HeaderMap) -> bool {
        status == StatusCode::PAYMENT_REQUIRED && headers.contains_key(header_name::PAYMENT_REQUIRED)
    }

    /// Unix time by its clock.
    pub(super) fn now(&self) -> u64 {
        self.0.clock.now()
    }

    /// Signs a payment for a 402 with these headers that answered `method` on `url`; `None` if the 402 is not x402's.
    ///
    /// The cheapest payable offer is chosen, its price reserved in the budget, the authorization signed and recorded in the
    /// budget's journal, in this order. When this returns, the payment may be sent.
    ///
    /// # Errors
    /// See [`PaymentError`]; nothing is reserved then.
    pub async fn pay(&self, method: &Method, url: &Url, headers: &HeaderMap) -> Result<Option<Payment>, PaymentError> {
        let Some(value) = headers.get(header_name::PAYMENT_REQUIRED) else { return Ok(None) };
        let mut asked: Asked =
            decode_header(value.as_bytes(), MAX_REQUIRED_HEADER).map_err(PaymentError::Unreadable)?;
        let choice = choose(&asked, &self.0.assets)?;
        asked.extensions = named(asked.extensions, self.0.nonces.as_ref())?;

        let now = self.now();
        let promise = Promise { amount: choice.amount, payee: choice.offer.pay_to, host: host_of(url), at: now };
        let mut reservation = self.0.budget.reserve(promise, now)?;
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
            payment: encode(asked, choice, authorization, signature)?,
        };
        let mut header = HeaderValue::from_str(&entry.payment).map_err(PaymentError::encode)?;
        header.set_sensitive(true);

        // From here on the signature may survive this process; losing sight of it must not free the money.
        reservation.hold();
        let journal = self.0.budget.journal().clone();
        if let Err(error) = journal.signed(entry.clone()).await {
            reservation.release();
            return Err(PaymentError::Journal(error));
        }
        Ok(Some(Payment::new(header, entry, reservation, journal, self.0.clock.clone())))
    }
}

/// The extensions that a payment returns. Where the server lets it be named, it gets an id of its own: made of other
/// randomness than the nonce, which the chain publishes.
fn named(
    offered: Option<Verbatim<Map<String, Value>>>,
    nonces: &dyn Nonces,
) -> Result<Option<Verbatim<Map<String, Value>>>, RandomnessError> {
    let Some(offered) = offered else { return Ok(None) };
    let id = PaymentId::of_random(nonces.next()?);
    Ok(Some(id.add_to(&offered).unwrap_or(offered)))
}

/// The payment as the header carries it: the offer and the resource return as they came.
fn encode(
    asked: Asked,
    choice: Choice,
    authorization: Authorization,
    signature: PaymentSignature,
) -> Result<String, PaymentError> {
    let payload = Verbatim::of(&ExactPayload { signature, authorization }).map_err(PaymentError::encode)?;
    let header = encode_header(&PaymentPayload {
        x402_version: V2,
        resource: asked.resource,
        accepted: choice.accepted,
        payload,
        extensions: asked.extensions,
    });
    let header = header.map_err(PaymentError::encode)?;
    // What came with the offer goes back with it; a long 402 makes a payment that is too long to be read.
    let (size, limit) = (header.len(), MAX_PAYMENT_HEADER);
    if size > limit { Err(PaymentError::encode(DecodeError::TooLarge { size, limit })) } else { Ok(header) }
}

impl fmt::Debug for Payer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Payer")
            .field("address", &self.0.signer.address())
            .field("budget", &self.0.budget)
            .field("assets", &self.0.assets)
            .finish_non_exhaustive()
    }
}

/// Configures a [`Payer`].
pub struct PayerBuilder {
    signer: Box<dyn AuthorizationSigner>,
    budget: Option<Budget>,
    assets: Option<Vec<Asset>>,
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
    pub fn build(self) -> Payer {
        let default = || [Network::BASE, Network::BASE_SEPOLIA].into_iter().filter_map(Network::usdc).collect();
        Payer(Arc::new(Inner {
            signer: self.signer,
            budget: self.budget.unwrap_or_default(),
            assets: self.assets.unwrap_or_else(default),
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
            .finish_non_exhaustive()
    }
}
