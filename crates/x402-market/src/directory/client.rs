//! Reads and writes directories, and believes them nothing that can be checked.

use std::{collections::HashSet, fmt, time::Duration};

use alloy_primitives::{Address, B256};
use alloy_signer::Signer;
use reqwest::{
    Client, Method, Response, StatusCode,
    header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER},
    redirect,
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::{sleep, timeout};
use tower_x402::{Asset, Network, Usdc, client::Receipt};
use url::Url;

use super::{
    SignedEvidence, VoiceError,
    report::{Admitted, CardPage, ListMe, Problem, VoicePage},
};
use crate::{
    VerifiedCard,
    evidence::{Evidence, EvidenceLog, PaymentId},
    net::{BodyError, below, read_body},
};

/// The largest page that is read, in bytes.
const MAX_PAGE: usize = 8 << 20;
/// How many cards are collected, over all pages.
const MAX_CARDS: usize = 10_000;
/// How many bytes of cards are read, over all pages; the page that goes beyond is the last.
const MAX_TEXT: usize = 64 << 20;
/// How many cards and voices are asked for at once.
const CARDS_A_PAGE: u64 = 50;
const VOICES_A_PAGE: u64 = 1_000;
/// How often it is tried to publish one record, and how long is waited in between at most.
const ATTEMPTS: usize = 5;
const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// Speaks to a directory: finds evaluators, publishes evidence and reads that of others.
///
/// Bounded in every way: pages of 8 MiB, a time for each, 10,000 cards and 64 MiB of them over all pages. Redirects are not followed. Every card and every
/// signature is verified here; what does not hold is skipped and counted.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::directory::{CardQuery, DirectoryClient};
///
/// let directory = DirectoryClient::new(&"https://directory.example".parse()?)?;
/// for found in directory.cards(&CardQuery { skill: Some("prose".into()), ..CardQuery::default() }).await?.found {
///     println!("{} asks {}", found.url, found.card.pricing().price_per_output);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct DirectoryClient {
    http: Client,
    cards: Url,
    evidence: Url,
    timeout: Duration,
}

/// Which evaluators are wanted; what is left out does not matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CardQuery {
    /// With this skill.
    pub skill: Option<String>,
    /// Who can be paid there.
    pub network: Option<Network>,
    /// Who ask no more for an output.
    pub max_price: Option<Usdc>,
}

/// What a directory lists.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FoundCards {
    /// Those that are what they should be, in the order in which they were listed first.
    pub found: Vec<FoundCard>,
    /// How many were not.
    pub skipped: usize,
}

/// An evaluator that a directory lists. The card was verified; that the evaluator still stands by it, only it can tell.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FoundCard {
    /// Where the card is.
    pub url: Url,
    /// The card.
    pub card: VerifiedCard,
    /// When the directory first saw it, by its own account, in seconds since the Unix epoch.
    pub first_seen: u64,
    /// When it saw it last.
    pub last_seen: u64,
}

/// Which voices are wanted; what is left out does not matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VoiceQuery {
    /// About whom.
    pub evaluator: Option<Address>,
    /// In which skill.
    pub skill: Option<String>,
    /// Whose.
    pub payer: Option<Address>,
    /// Only those with larger numbers; where the last page ended.
    pub after: u64,
}

/// A page of voices.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Voices {
    /// Those whose payers signed them.
    pub voices: Vec<Admitted>,
    /// How many of the page were not signed by their payers, or were not asked for.
    pub skipped: usize,
    /// Where to go on.
    pub after: u64,
    /// Whether there were further ones.
    pub more: bool,
}

/// What became of a record that was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Publication {
    /// It is admitted, now or before.
    Admitted,
    /// The payment has said something else before.
    Spoken,
    /// The payment is not on the chain, or not deep enough: send it again later.
    NotYet,
    /// The directory cannot take it now: send it again later.
    Busy {
        /// When, if it says so.
        after: Duration,
    },
    /// It will not be admitted.
    Refused {
        /// The directory's word for the reason.
        error: String,
        /// Its explanation, in at most 500 characters.
        detail: String,
    },
}

/// What became of a log that was published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// How many records are admitted, now or before.
    pub admitted: usize,
    /// Which should be sent again later.
    pub later: Vec<PaymentId>,
    /// Which will not be admitted, or cannot be said, and why not.
    pub refused: Vec<(PaymentId, String)>,
}

/// Why a directory could not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// Not a URL of HTTP.
    #[error("the directory's URL is not an http or https URL")]
    Url,
    /// It could not be reached, or no HTTP client be made.
    #[error("the directory could not be reached")]
    Unreachable(#[source] reqwest::Error),
    /// It did not answer in time.
    #[error("the directory did not answer in time")]
    Late,
    /// Its answer is too large.
    #[error("the directory's answer is larger than {MAX_PAGE} bytes")]
    TooLarge,
    /// It answered with another status.
    #[error("the directory answered with status {status}: {error} {detail}")]
    Answered {
        /// The status.
        status: u16,
        /// Its word for the reason.
        error: String,
        /// Its explanation, in at most 500 characters.
        detail: String,
    },
    /// Its answer makes no sense.
    #[error("the directory's answer is not one: {0}")]
    Unreadable(String),
    /// The record cannot be signed.
    #[error(transparent)]
    Voice(#[from] VoiceError),
}

impl DirectoryClient {
    /// A client of the directory below `url`, which waits ten seconds for each answer.
    ///
    /// # Errors
    /// [`DirectoryError::Url`], or [`DirectoryError::Unreachable`] if no HTTP client could be made.
    pub fn new(url: &Url) -> Result<Self, DirectoryError> {
        let http = Client::builder().redirect(redirect::Policy::none()).build().map_err(DirectoryError::Unreachable)?;
        Ok(Self {
            http,
            cards: below(url, "cards").ok_or(DirectoryError::Url)?,
            evidence: below(url, "evidence").ok_or(DirectoryError::Url)?,
            timeout: Duration::from_secs(10),
        })
    }

    /// Where its evidence is.
    pub(crate) const fn url(&self) -> &Url {
        &self.evidence
    }

    /// How long an answer is waited for. Listing and publishing make the directory ask others first.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Has the evaluator at `url` listed: its base URL, or that of its card (`….json`).
    ///
    /// # Errors
    /// [`DirectoryError::Answered`] says why it is not.
    pub async fn list(&self, url: &Url) -> Result<(), DirectoryError> {
        let body = ListMe { url: url.to_string() };
        let (status, body) = self.send(Method::POST, self.cards.clone(), Some(&body)).await?;
        if status.is_success() { Ok(()) } else { Err(answered(status.status, &body)) }
    }

    /// The evaluators that match, from all pages.
    ///
    /// # Errors
    /// If a page cannot be had.
    pub async fn cards(&self, query: &CardQuery) -> Result<FoundCards, DirectoryError> {
        let (mut found, mut skipped, mut text, mut after) = (Vec::new(), 0, 0, 0);
        let mut seen = HashSet::new();
        loop {
            let mut url = self.cards.clone();
            url.query_pairs_mut()
                .append_pair("limit", &CARDS_A_PAGE.to_string())
                .append_pair("after", &u64::to_string(&after))
                .extend_pairs(query.skill.iter().map(|skill| ("skill", skill)))
                .extend_pairs(query.network.iter().map(|network| ("network", network.to_string())))
                .extend_pairs(query.max_price.iter().map(|price| ("maxPrice", price.atomic().to_string())));
            let page: CardPage = self.get(url).await?;
            let is_empty = page.cards.is_empty();
            for entry in page.cards {
                text += entry.card.get().len();
                let read = |url: &str, card: &str| {
                    let url: Url = url.parse().ok()?;
                    let card = VerifiedCard::of(card.as_bytes(), &url).ok()?;
                    query.matches(&card).then_some((url, card))
                };
                match read(&entry.url, entry.card.get()) {
                    Some((url, card)) if seen.insert(url.clone()) => {
                        let (first_seen, last_seen) = (entry.first_seen, entry.last_seen);
                        found.push(FoundCard { url, card, first_seen, last_seen });
                    }
                    _ => skipped += 1,
                }
            }
            // Whatever it says, it cannot keep us going round.
            let is_enough = found.len() + skipped >= MAX_CARDS || text >= MAX_TEXT;
            if !page.more || is_empty || page.after <= after || is_enough {
                return Ok(FoundCards { found, skipped });
            }
            after = page.after;
        }
    }

    /// Signs a record with the key that paid, and publishes it, once.
    ///
    /// # Errors
    /// If it cannot be signed, or the directory not be asked.
    pub async fn publish(
        &self,
        evidence: Evidence,
        receipt: &Receipt,
        signer: &(impl Signer + Sync),
    ) -> Result<Publication, DirectoryError> {
        let Receipt { network, asset, transaction, .. } = *receipt;
        self.publish_signed(&SignedEvidence::sign(evidence, network, asset, transaction, signer).await?).await
    }

    /// Publishes what was signed, once.
    ///
    /// # Errors
    /// If the directory cannot be asked.
    pub async fn publish_signed(&self, said: &SignedEvidence) -> Result<Publication, DirectoryError> {
        let (status, body) = self.send(Method::POST, self.evidence.clone(), Some(said)).await?;
        if status.is_success() {
            return Ok(Publication::Admitted);
        }
        let Problem { error, detail } = problem(&body);
        Ok(match (status.status, &*error) {
            (StatusCode::CONFLICT, "not_yet") => Publication::NotYet,
            (StatusCode::CONFLICT, _) => Publication::Spoken,
            (StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT, _) => {
                Publication::Busy { after: status.retry_after }
            }
            (status_code, _) if status_code.is_server_error() => Publication::Busy { after: status.retry_after },
            _ => Publication::Refused { error, detail },
        })
    }

    /// Publishes the records of a log about what `signer` paid with `asset`, one after the other; what the directory cannot take
    /// at once is tried a few times. `transaction` says which transaction settled a payment, if that is known: otherwise the
    /// directory must search for it, and finds only recent ones. Publishing the same log again changes nothing.
    ///
    /// A record that says whether a verdict was right tells the evaluator that the task was an audit. Publish after the tasks
    /// of which that may not be known.
    ///
    /// # Errors
    /// If the signer fails, or the directory cannot be asked.
    pub async fn publish_log(
        &self,
        log: &EvidenceLog,
        asset: &Asset,
        signer: &(impl Signer + Sync),
        transaction: impl Fn(&PaymentId) -> Option<B256>,
    ) -> Result<Published, DirectoryError> {
        let mut published = Published::default();
        let mine = log.find(&crate::evidence::EvidenceQuery { payer: Some(signer.address()), ..Default::default() });
        for evidence in mine {
            let Some(voice) = evidence.payment.filter(|_| evidence.paid > Usdc::ZERO) else { continue };
            let transaction = transaction(&voice);
            let signed = SignedEvidence::sign(evidence, asset.network, asset.address, transaction, signer).await;
            let signed = match signed {
                Ok(signed) => signed,
                Err(error @ (VoiceError::Sign(_) | VoiceError::WrongSigner { .. })) => return Err(error.into()),
                Err(error) => {
                    published.refused.push((voice, error.to_string()));
                    continue;
                }
            };
            match self.insist(&signed).await? {
                Publication::Admitted => published.admitted += 1,
                Publication::NotYet | Publication::Busy { .. } => published.later.push(voice),
                Publication::Spoken => published.refused.push((voice, "spoken".to_owned())),
                Publication::Refused { error, .. } => published.refused.push((voice, error)),
            }
        }
        Ok(published)
    }

    async fn insist(&self, said: &SignedEvidence) -> Result<Publication, DirectoryError> {
        let mut published = self.publish_signed(said).await?;
        for _ in 1..ATTEMPTS {
            let Publication::Busy { after } = published else { break };
            sleep(after.min(LONGEST_WAIT)).await;
            published = self.publish_signed(said).await?;
        }
        Ok(published)
    }

    /// A page of voices whose payers signed them. That their payments took place is the directory's word, until
    /// [`Witness`](super::Witness) is asked.
    ///
    /// # Errors
    /// If the page cannot be had.
    pub async fn voices(&self, query: &VoiceQuery) -> Result<Voices, DirectoryError> {
        let mut url = self.evidence.clone();
        url.query_pairs_mut()
            .append_pair("limit", &VOICES_A_PAGE.to_string())
            .append_pair("after", &query.after.to_string())
            .extend_pairs(query.evaluator.iter().map(|evaluator| ("evaluator", evaluator.to_string())))
            .extend_pairs(query.skill.iter().map(|skill| ("skill", skill)))
            .extend_pairs(query.payer.iter().map(|payer| ("payer", payer.to_string())));
        let page: VoicePage = self.get(url).await?;
        let (before, mut after) = (page.voices.len(), query.after);
        let mut voices = page.voices;
        voices.retain(|voice| {
            let is_next = voice.id > after;
            after = after.max(voice.id);
            is_next && query.matches(voice) && voice.said.verify().is_ok()
        });
        let skipped = before - voices.len();
        // A page without anything new is the last one, whatever it says.
        let more = page.more && after > query.after;
        Ok(Voices { voices, skipped, after, more })
    }

    async fn get<T: DeserializeOwned>(&self, url: Url) -> Result<T, DirectoryError> {
        let (status, body) = self.send::<()>(Method::GET, url, None).await?;
        if status.status != StatusCode::OK {
            return Err(answered(status.status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| DirectoryError::Unreadable(error.to_string()))
    }

    async fn send<B: Serialize>(
        &self,
        method: Method,
        url: Url,
        body: Option<&B>,
    ) -> Result<(Status, Vec<u8>), DirectoryError> {
        let mut request = self.http.request(method, url).header(ACCEPT, "application/json");
        if let Some(body) = body {
            let body = serde_json::to_vec(body).map_err(|error| DirectoryError::Unreadable(error.to_string()))?;
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        let exchange = async {
            let response = request.send().await.map_err(|error| DirectoryError::Unreachable(error.without_url()))?;
            let status = Status::of(&response);
            let body = read_body(response, MAX_PAGE).await.map_err(|error| match error {
                BodyError::Broken(error) => DirectoryError::Unreachable(error),
                BodyError::TooLarge => DirectoryError::TooLarge,
            })?;
            Ok((status, body))
        };
        timeout(self.timeout, exchange).await.unwrap_or(Err(DirectoryError::Late))
    }
}

impl fmt::Debug for DirectoryClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectoryClient").field("cards", &self.cards.as_str()).finish_non_exhaustive()
    }
}

impl CardQuery {
    fn matches(&self, card: &VerifiedCard) -> bool {
        let accepts = |network: &Network| card.pricing().accepts.iter().any(|token| token.network == *network);
        self.skill.as_ref().is_none_or(|skill| card.card().has_skill(skill))
            && self.network.as_ref().is_none_or(accepts)
            && self.max_price.is_none_or(|price| card.pricing().price_per_output <= price)
    }
}

impl VoiceQuery {
    fn matches(&self, voice: &Admitted) -> bool {
        let evidence = &voice.said.evidence;
        self.evaluator.is_none_or(|evaluator| evaluator == evidence.evaluator)
            && self.skill.as_ref().is_none_or(|skill| *skill == evidence.skill)
            && self.payer.is_none_or(|payer| evidence.payment.is_some_and(|payment| payment.payer == payer))
    }
}

/// The head of an answer.
#[derive(Clone, Copy, Debug)]
struct Status {
    status: StatusCode,
    retry_after: Duration,
}

impl Status {
    fn of(response: &Response) -> Self {
        let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        Self { status: response.status(), retry_after: Duration::from_secs(seconds.unwrap_or(1)) }
    }

    fn is_success(self) -> bool {
        matches!(self.status, StatusCode::OK | StatusCode::CREATED)
    }
}

fn answered(status: StatusCode, body: &[u8]) -> DirectoryError {
    let Problem { error, detail } = problem(body);
    DirectoryError::Answered { status: status.as_u16(), error, detail }
}

/// What a directory says is wrong; foreign text, so no more of it than can be shown.
fn problem(body: &[u8]) -> Problem {
    let Problem { error, detail } =
        serde_json::from_slice(body).unwrap_or_else(|_| Problem { error: "unknown".to_owned(), detail: String::new() });
    let cut = |text: String, most: usize| text.chars().filter(|c| !c.is_control()).take(most).collect();
    Problem { error: cut(error, 64), detail: cut(detail, 500) }
}
