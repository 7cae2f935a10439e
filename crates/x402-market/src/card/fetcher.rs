//! Fetches evaluators' cards and pins their payees.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::Address;
use reqwest::{
    Client, ClientBuilder, Response, StatusCode,
    header::{ACCEPT, ETAG, HeaderValue, IF_NONE_MATCH, LOCATION},
    redirect,
};
use url::Url;

use super::{CARD_PATH, CardError, VerifiedCard};
use crate::{
    lock::lock,
    net::{self, BodyError, below, read_body},
};

/// The largest card, in bytes.
const MAX_CARD: usize = 64 * 1024;
/// How many redirects on the same origin are followed.
const MAX_REDIRECTS: usize = 3;

/// A client that fetches and verifies cards. A card must have at most 64 KiB, come in time, from its own origin, and be signed by the payee.
///
/// The payee of an evaluator is pinned when its card is first fetched, or before by [`pin`](Self::pin). A later card with another payee is
/// refused with [`CardError::PayeeChanged`]. An unchanged card is not transferred again (ETag).
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::CardFetcher;
///
/// let cards = CardFetcher::new()?;
/// let card = cards.fetch(&"https://reasons.example".parse()?).await?;
/// println!("{} asks {} of {}", card.pay_to(), card.pricing().price_per_output(), card.endpoint());
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use]
pub struct CardFetcher {
    http: Client,
    /// The client for untrusted URLs.
    public: Client,
    timeout: Duration,
    max_evaluators: usize,
    public_only: bool,
    known: Mutex<HashMap<Url, Known>>,
}

/// A pinned evaluator.
#[derive(Debug)]
struct Known {
    payee: Address,
    /// Pinned by [`CardFetcher::pin`], so `forget` keeps it.
    is_permanent: bool,
    /// The last card, with its ETag.
    card: Option<(HeaderValue, Arc<VerifiedCard>)>,
}

/// A card that was fetched, and is not pinned yet.
#[derive(Debug)]
pub(crate) struct Fetched {
    url: Url,
    /// Its ETag.
    tag: Option<HeaderValue>,
    pub(crate) card: Arc<VerifiedCard>,
}

impl CardFetcher {
    /// Creates a fetcher.
    ///
    /// # Errors
    /// [`CardError::Unreachable`] if the HTTP client cannot be created.
    pub fn new() -> Result<Self, CardError> {
        let build = |client: ClientBuilder| client.redirect(redirect::Policy::none()).build();
        Ok(Self {
            http: build(Client::builder()).map_err(CardError::Unreachable)?,
            public: build(net::public_client()).map_err(CardError::Unreachable)?,
            timeout: Duration::from_secs(10),
            max_evaluators: 10_000,
            public_only: false,
            known: Mutex::default(),
        })
    }

    /// Sets how long fetching a card may take. Default: 10 s.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Refuses cards on hosts that are not public: this machine, private networks, and names that resolve to them. Use it for URLs from
    /// untrusted sources. It ignores proxies from the environment, because a proxy would resolve the names.
    pub fn public_only(self) -> Self {
        Self { public_only: true, ..self }
    }

    /// Sets how many evaluators are pinned. Default: 10,000. Cards of further ones are refused.
    pub fn max_evaluators(self, evaluators: usize) -> Self {
        Self { max_evaluators: evaluators, ..self }
    }

    /// Pins an evaluator's payee, for instance one that was saved from [`pins`](Self::pins).
    ///
    /// # Errors
    /// [`CardError::PayeeChanged`] if another payee is pinned, [`CardError::TooManyEvaluators`], or [`CardError::Invalid`] if the URL is
    /// not an http or https URL.
    pub fn pin(&self, evaluator: &Url, payee: Address) -> Result<(), CardError> {
        let url = card_url(evaluator)?;
        let mut all = lock(&self.known);
        self.pin_payee(&mut all, &url, payee)?.is_permanent = true;
        Ok(())
    }

    /// Returns the URLs of cards and their pinned payees, to be saved.
    pub fn pins(&self) -> Vec<(Url, Address)> {
        lock(&self.known).iter().map(|(url, known)| (url.clone(), known.payee)).collect()
    }

    /// Fetches and verifies the card of an evaluator, given its base URL or the URL of the card (`….json`).
    ///
    /// # Errors
    /// [`CardError`] says what is wrong with the card.
    pub async fn fetch(&self, evaluator: &Url) -> Result<Arc<VerifiedCard>, CardError> {
        self.fetch_and_pin(evaluator, false).await
    }

    /// Fetches a card and pins its payee. With `public_only`, only public hosts are asked.
    pub(crate) async fn fetch_and_pin(
        &self,
        evaluator: &Url,
        public_only: bool,
    ) -> Result<Arc<VerifiedCard>, CardError> {
        let fetched = self.look(evaluator, public_only).await?;
        self.keep(&fetched)?;
        Ok(fetched.card)
    }

    /// Fetches a card without pinning its payee, because an untrusted source can name any number of URLs. A pinned payee is compared. With
    /// `public_only`, only public hosts are asked.
    pub(crate) async fn look(&self, evaluator: &Url, public_only: bool) -> Result<Fetched, CardError> {
        let url = card_url(evaluator)?;
        let fetched = tokio::time::timeout(self.timeout, self.fetch_card(url, public_only || self.public_only));
        fetched.await.unwrap_or(Err(CardError::Timeout))
    }

    /// Pins the payee of a fetched card, and caches the card.
    pub(crate) fn keep(&self, fetched: &Fetched) -> Result<(), CardError> {
        let mut all = lock(&self.known);
        let known = self.pin_payee(&mut all, &fetched.url, fetched.card.pay_to())?;
        known.card = fetched.tag.clone().map(|tag| (tag, fetched.card.clone()));
        Ok(())
    }

    /// Unpins an evaluator, to make room for another one, and drops its cached card. One that was pinned by [`pin`](Self::pin) stays.
    pub(crate) fn forget(&self, evaluator: &Url) {
        let Ok(url) = card_url(evaluator) else { return };
        if let Entry::Occupied(known) = lock(&self.known).entry(url)
            && !known.get().is_permanent
        {
            known.remove();
        }
    }

    /// Fetches a card to be shown to others. Returns its URL, its JSON as it was sent (without duplicate fields), and the verified card.
    /// Nothing is cached or pinned.
    ///
    /// # Errors
    /// [`CardError`] says what is wrong with the card.
    pub async fn fetch_original(&self, evaluator: &Url) -> Result<(Url, String, VerifiedCard), CardError> {
        let url = card_url(evaluator)?;
        let fetched = async {
            let (answered, response) = self.ask(&url, None, self.public_only).await?;
            read(response, &answered).await
        };
        let (json, card) = tokio::time::timeout(self.timeout, fetched).await.unwrap_or(Err(CardError::Timeout))?;
        // Readers would disagree about a field that is there twice, so the JSON is written anew.
        let json: serde_json::Value = serde_json::from_slice(&json).map_err(|error| CardError::invalid(".", error))?;
        Ok((url, json.to_string(), card))
    }

    async fn fetch_card(&self, url: Url, public_only: bool) -> Result<Fetched, CardError> {
        let kept = lock(&self.known).get(&url).and_then(|known| known.card.clone());
        let (answered, response) = self.ask(&url, kept.as_ref().map(|(tag, _)| tag), public_only).await?;
        if let (StatusCode::NOT_MODIFIED, Some((tag, card))) = (response.status(), kept) {
            return Ok(Fetched { url, tag: Some(tag), card });
        }
        let tag = response.headers().get(ETAG).cloned();
        let (_, card) = read(response, &answered).await?;
        if let Some(known) = lock(&self.known).get(&url) {
            known.pays(card.pay_to())?;
        }
        Ok(Fetched { url, tag, card: Arc::new(card) })
    }

    /// Requests the card, and follows redirects on the same origin.
    async fn ask(&self, url: &Url, tag: Option<&HeaderValue>, public_only: bool) -> Result<(Url, Response), CardError> {
        if public_only && !net::may_be_public(url) {
            return Err(CardError::NotPublic);
        }
        let http = if public_only { &self.public } else { &self.http };
        let mut at = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = http.get(at.clone()).header(ACCEPT, "application/json");
            if let Some(tag) = tag {
                request = request.header(IF_NONE_MATCH, tag);
            }
            let response = request.send().await.map_err(|error| match net::is_refusal(&error) {
                true => CardError::NotPublic,
                false => CardError::Unreachable(error.without_url()),
            })?;
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED {
                return Ok((at, response));
            }
            let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
            let Some(to) = location.and_then(|location| at.join(location).ok()) else {
                return Err(CardError::Status(response.status().as_u16()));
            };
            if to.origin() != url.origin() {
                let to = format!("{}{}", to.origin().ascii_serialization(), to.path());
                return Err(CardError::Redirected { to });
            }
            at = to;
        }
        Err(CardError::Redirected { to: at.path().to_owned() })
    }

    /// Pins the payee of an evaluator, or compares it with the pinned one.
    fn pin_payee<'a>(
        &self,
        all: &'a mut HashMap<Url, Known>,
        url: &Url,
        payee: Address,
    ) -> Result<&'a mut Known, CardError> {
        let is_full = all.len() >= self.max_evaluators;
        match all.entry(url.clone()) {
            Entry::Occupied(known) => {
                known.get().pays(payee)?;
                Ok(known.into_mut())
            }
            Entry::Vacant(_) if is_full => Err(CardError::TooManyEvaluators { limit: self.max_evaluators }),
            Entry::Vacant(new) => Ok(new.insert(Known { payee, is_permanent: false, card: None })),
        }
    }
}

/// Reads and verifies a card that was answered at this URL.
async fn read(response: Response, at: &Url) -> Result<(Vec<u8>, VerifiedCard), CardError> {
    if response.status() != StatusCode::OK {
        return Err(CardError::Status(response.status().as_u16()));
    }
    let json = read_body(response, MAX_CARD).await.map_err(|error| match error {
        BodyError::Broken(error) => CardError::Unreachable(error),
        BodyError::TooLarge => CardError::TooLarge { limit: MAX_CARD },
    })?;
    let card = VerifiedCard::verify(&json, at)?;
    Ok((json, card))
}

impl Known {
    fn pays(&self, payee: Address) -> Result<(), CardError> {
        if self.payee == payee { Ok(()) } else { Err(CardError::PayeeChanged { pinned: self.payee, found: payee }) }
    }
}

/// Returns the URL of an evaluator's card, given its base URL or the URL of the card.
pub fn card_url(evaluator: &Url) -> Result<Url, CardError> {
    let is_card = evaluator.path().ends_with(".json");
    let url = below(evaluator, CARD_PATH).map(|card| if is_card { evaluator.clone() } else { card });
    url.ok_or_else(|| CardError::invalid("url", "it is not an http or https URL"))
}
