//! Fetches evaluators' cards, and remembers whom each of them had paid.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use alloy_primitives::Address;
use reqwest::{
    Client, Response, StatusCode,
    header::{ACCEPT, ETAG, HeaderValue, IF_NONE_MATCH, LOCATION},
    redirect,
};
use url::Url;

use super::{CARD_PATH, CardError, VerifiedCard};
use crate::net::{self, BodyError, below, read_body};

/// How often a server may send whoever asks for its card to another place of its own.
const MAX_REDIRECTS: usize = 3;

/// Fetches and verifies cards: within a size and a time, from the origin that was asked, signed by the payee.
///
/// The payee is pinned when an evaluator's card is first fetched ([`pin`](Self::pin) does it beforehand): a card that names
/// another one later is refused with [`CardError::PayeeChanged`]. A card that has not changed is not transferred again (ETag).
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::CardFetcher;
///
/// let cards = CardFetcher::new()?;
/// let card = cards.fetch(&"https://reasons.example".parse()?).await?;
/// println!("{} asks {} of {}", card.pay_to(), card.pricing().price_per_output, card.endpoint());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct CardFetcher {
    http: Client,
    /// For URLs of strangers, once there is one.
    public: OnceLock<Client>,
    max_bytes: usize,
    timeout: Duration,
    max_evaluators: usize,
    takes_unsigned: bool,
    public_only: bool,
    known: Mutex<HashMap<Url, Known>>,
}

/// An evaluator that was seen, or told of.
#[derive(Debug)]
struct Known {
    payee: Address,
    /// Told of: nobody but who told may have it forgotten.
    is_told: bool,
    /// With what the server calls this version of it.
    card: Option<(HeaderValue, Arc<VerifiedCard>)>,
}

/// A card, and where it was. Nothing is remembered of it yet.
#[derive(Debug)]
pub(crate) struct Fetched {
    url: Url,
    /// What the server calls this version of it.
    tag: Option<HeaderValue>,
    pub(crate) card: Arc<VerifiedCard>,
}

impl CardFetcher {
    /// Cards of up to 64 KiB, each within ten seconds, of up to 10,000 evaluators.
    ///
    /// # Errors
    /// [`CardError::Unreachable`] if no HTTP client could be made.
    pub fn new() -> Result<Self, CardError> {
        let http = Client::builder().redirect(redirect::Policy::none()).build().map_err(CardError::Unreachable)?;
        Ok(Self {
            http,
            public: OnceLock::new(),
            max_bytes: 64 * 1024,
            timeout: Duration::from_secs(10),
            max_evaluators: 10_000,
            takes_unsigned: false,
            public_only: false,
            known: Mutex::default(),
        })
    }

    /// The largest card, in bytes.
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// How long fetching a card may take.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Refuses cards on hosts that are not everybody's: addresses of this machine and of private networks, and names that mean
    /// one of these. For URLs that strangers supply. A proxy from the environment is not used then, since it would resolve the names.
    ///
    /// # Errors
    /// [`CardError::Unreachable`] if no HTTP client could be made.
    pub fn public_only(mut self) -> Result<Self, CardError> {
        self.public_http()?;
        self.public_only = true;
        Ok(self)
    }

    /// How many evaluators are remembered; cards of others are refused then.
    pub fn max_evaluators(mut self, evaluators: usize) -> Self {
        self.max_evaluators = evaluators;
        self
    }

    /// Takes cards that nobody signed, too: whoever can change what the server says can then be paid. A wrong signature is refused
    /// all the same.
    pub fn takes_unsigned(mut self, takes: bool) -> Self {
        self.takes_unsigned = takes;
        self
    }

    /// Remembers whom an evaluator has paid, from elsewhere.
    ///
    /// # Errors
    /// [`CardError::PayeeChanged`] if another payee is known, [`CardError::TooManyEvaluators`], or [`CardError::Invalid`] if the URL
    /// is not one of HTTP.
    pub fn pin(&self, evaluator: &Url, payee: Address) -> Result<(), CardError> {
        let url = card_url(evaluator)?;
        let mut all = self.lock();
        self.remember(&mut all, &url, payee)?.is_told = true;
        Ok(())
    }

    /// Who is known to be paid by whom, to be remembered elsewhere: the URLs of cards and their payees.
    pub fn pins(&self) -> Vec<(Url, Address)> {
        self.lock().iter().map(|(url, known)| (url.clone(), known.payee)).collect()
    }

    /// Fetches and checks the card of the evaluator at `evaluator`: its base URL, or that of the card itself (`….json`).
    ///
    /// # Errors
    /// [`CardError`].
    pub async fn fetch(&self, evaluator: &Url) -> Result<Arc<VerifiedCard>, CardError> {
        let fetched = self.look(evaluator, false).await?;
        self.keep(&fetched)?;
        Ok(fetched.card)
    }

    /// The same for a URL that a stranger named: from a host that is everybody's, or not at all, as with
    /// [`public_only`](Self::public_only).
    ///
    /// # Errors
    /// [`CardError`].
    pub async fn fetch_public(&self, evaluator: &Url) -> Result<Arc<VerifiedCard>, CardError> {
        let fetched = self.look(evaluator, true).await?;
        self.keep(&fetched)?;
        Ok(fetched.card)
    }

    /// The same for a URL that perhaps a stranger named, and nothing is remembered of it: there are as many URLs as somebody likes. Whom
    /// it is known to have paid is compared all the same.
    pub(crate) async fn look(&self, evaluator: &Url, is_strange: bool) -> Result<Fetched, CardError> {
        let url = card_url(evaluator)?;
        let fetched = tokio::time::timeout(self.timeout, self.fetch_card(url, is_strange || self.public_only));
        fetched.await.unwrap_or(Err(CardError::Late))
    }

    /// Pins the payee of a card, and remembers the card.
    pub(crate) fn keep(&self, fetched: &Fetched) -> Result<(), CardError> {
        let mut all = self.lock();
        let known = self.remember(&mut all, &fetched.url, fetched.card.pay_to())?;
        known.card = fetched.tag.clone().map(|tag| (tag, fetched.card.clone()));
        Ok(())
    }

    /// Forgets whom an evaluator had paid when its card was fetched, so that there is room for another one. What was told by
    /// [`pin`](Self::pin) stays.
    pub(crate) fn forget(&self, evaluator: &Url) {
        let Ok(url) = card_url(evaluator) else { return };
        if let Entry::Occupied(known) = self.lock().entry(url)
            && !known.get().is_told
        {
            known.remove();
        }
    }

    /// The card and its own URL, for those who show it to others: as it was sent, but for what canonical JSON leaves open. Nothing
    /// is remembered, and no payee pinned.
    #[cfg(feature = "directory")]
    pub(crate) async fn fetch_to_show(&self, evaluator: &Url) -> Result<(Url, String, VerifiedCard), CardError> {
        let url = card_url(evaluator)?;
        let fetched = async {
            let (answered, response) = self.ask(&url, None, self.public_only).await?;
            if response.status() != StatusCode::OK {
                return Err(CardError::Status(response.status().as_u16()));
            }
            let json = self.read(response).await?;
            let card = VerifiedCard::of(&json, &answered)?;
            // A field that is there twice would be read by some as the first and by others as the last.
            let json: serde_json::Value =
                serde_json::from_slice(&json).map_err(|error| CardError::invalid(".", &error))?;
            Ok((json.to_string(), card))
        };
        let (json, card) = tokio::time::timeout(self.timeout, fetched).await.unwrap_or(Err(CardError::Late))?;
        Ok((url, json, card))
    }

    async fn fetch_card(&self, url: Url, public_only: bool) -> Result<Fetched, CardError> {
        let kept = self.lock().get(&url).and_then(|known| known.card.clone());
        let (answered, response) = self.ask(&url, kept.as_ref().map(|(tag, _)| tag), public_only).await?;
        match (response.status(), kept) {
            (StatusCode::NOT_MODIFIED, Some((tag, card))) => return Ok(Fetched { url, tag: Some(tag), card }),
            (StatusCode::OK, _) => {}
            (other, _) => return Err(CardError::Status(other.as_u16())),
        }
        let tag = response.headers().get(ETAG).cloned();
        let json = self.read(response).await?;
        let card = match self.takes_unsigned {
            false => VerifiedCard::of(&json, &answered)?,
            true => VerifiedCard::of_any(&json, &answered)?,
        };
        if !card.is_signed() && !card.card().signatures.is_empty() {
            return Err(CardError::BadSignature { pay_to: card.pay_to() });
        }
        if let Some(known) = self.lock().get(&url) {
            known.pays(card.pay_to())?;
        }
        Ok(Fetched { url, tag, card: Arc::new(card) })
    }

    /// Asks for the card, wherever on the same origin it is.
    async fn ask(&self, url: &Url, tag: Option<&HeaderValue>, public_only: bool) -> Result<(Url, Response), CardError> {
        if public_only && !net::may_be_public(url) {
            return Err(CardError::NotPublic);
        }
        let http = if public_only { self.public_http()? } else { &self.http };
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
            let to = location.and_then(|location| at.join(location).ok());
            match to {
                Some(to) if to.origin() == url.origin() => at = to,
                Some(to) => {
                    return Err(CardError::Redirected {
                        to: format!("{}{}", to.origin().ascii_serialization(), to.path()),
                    });
                }
                None => return Err(CardError::Status(response.status().as_u16())),
            }
        }
        Err(CardError::Redirected { to: at.path().to_owned() })
    }

    async fn read(&self, response: Response) -> Result<Vec<u8>, CardError> {
        read_body(response, self.max_bytes).await.map_err(|error| match error {
            BodyError::Broken(error) => CardError::Unreachable(error),
            BodyError::TooLarge => CardError::TooLarge { limit: self.max_bytes },
        })
    }

    fn public_http(&self) -> Result<&Client, CardError> {
        if let Some(http) = self.public.get() {
            return Ok(http);
        }
        let http = net::public_client().redirect(redirect::Policy::none()).build().map_err(CardError::Unreachable)?;
        Ok(self.public.get_or_init(|| http))
    }

    /// Whom an evaluator has paid, from now on if nothing was known.
    fn remember<'a>(
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
            Entry::Vacant(new) => Ok(new.insert(Known { payee, is_told: false, card: None })),
        }
    }

    /// Nothing in there panics halfway through a change, so a poisoned lock guards sound data.
    fn lock(&self) -> MutexGuard<'_, HashMap<Url, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn pays(&self, payee: Address) -> Result<(), CardError> {
        if self.payee == payee { Ok(()) } else { Err(CardError::PayeeChanged { pinned: self.payee, found: payee }) }
    }
}

/// Where the card of the evaluator at this URL is.
pub(crate) fn card_url(evaluator: &Url) -> Result<Url, CardError> {
    let path = if evaluator.path().ends_with(".json") { "" } else { CARD_PATH };
    let url = if path.is_empty() { below(evaluator, path).map(|_| evaluator.clone()) } else { below(evaluator, path) };
    url.ok_or_else(|| CardError::invalid("url", "it is not an http or https URL"))
}
