//! The client of a directory. It verifies everything that it can check itself.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use alloy_primitives::{Address, B256};
use alloy_signer::Signer;
use async_trait::async_trait;
use reqwest::{
    Client, Method, StatusCode,
    header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER},
    redirect,
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::{sleep, timeout};
use tower_x402::{Asset, Usdc};
use url::Url;

use super::{
    ReportError, SignedEvidence,
    report::{AcceptedReport, CardsBody, ListRequest, Problem, ReportsBody},
};
use x402_market::{
    CardSource, SourceError, VerifiedCard,
    evidence::{CallOutcome, EvidenceLog, EvidencePayment},
    shared::{BodyError, below, read_body},
};

/// The largest page that is read, in bytes.
const MAX_PAGE: usize = 8 << 20;
/// How many cards are collected, over all pages.
const MAX_CARDS: usize = 10_000;
/// How many bytes of cards are read, over all pages. The page that exceeds the limit is the last.
const MAX_TEXT: usize = 64 << 20;
/// How many cards and reports a page may have.
const CARDS_PER_PAGE: u64 = 50;
const REPORTS_PER_PAGE: u64 = 1_000;
/// How often a record is sent, and the longest pause in between.
const ATTEMPTS: usize = 5;
const MAX_PAUSE: Duration = Duration::from_secs(15);

/// A client of a directory: finds evaluators, publishes reports and reads those of others.
///
/// Every card and every signature is verified here. Entries that do not hold are skipped and counted. A page may have 8 MiB; all pages of
/// cards together 10,000 cards and 64 MiB. Redirects are not followed.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_directory::{CardQuery, DirectoryClient};
///
/// let directory = DirectoryClient::new("https://directory.example")?;
/// for found in directory.cards(&CardQuery::default().skill("prose")).await?.found {
///     println!("{} asks {}", found.url, found.card.pricing().price_per_output());
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

/// A query for evaluators: those that match everything that is set. The default matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct CardQuery {
    skill: Option<String>,
}

/// The cards that a directory lists.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FoundCards {
    /// The verified cards, in the order in which they were first listed.
    pub found: Vec<FoundCard>,
    /// The number of cards that were not valid or did not match the query.
    pub skipped: usize,
}

/// An evaluator that a directory lists. The card was verified. Whether it is still current, only the evaluator knows.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FoundCard {
    /// The URL of the card.
    pub url: Url,
    /// The card.
    pub card: VerifiedCard,
    /// When the directory first saw the card, by its own account, in seconds since the Unix epoch.
    pub first_seen: u64,
    /// When the directory last saw it.
    pub last_seen: u64,
}

/// A query for reports: those that match everything that is set. The default matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct ReportQuery {
    evaluator: Option<Address>,
    skill: Option<String>,
    payer: Option<Address>,
    after: u64,
}

/// A page of reports.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReportPage {
    /// The reports whose payers signed them.
    pub reports: Vec<AcceptedReport>,
    /// The number of reports of the page that were not signed by their payers or did not match the query.
    pub skipped: usize,
    /// The number after which the next page begins, for [`ReportQuery::after`].
    pub after: u64,
    /// `true` if there are further reports.
    pub more: bool,
}

/// The directory's decision about a report.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Publication {
    /// The report is accepted, now or before.
    Accepted,
    /// The payment has another report. Each payment supports one.
    Conflict,
    /// The payment is not on the chain, not claimed, or not deep enough. Send the report again later.
    NotYet,
    /// The directory cannot take the report now. Send it again later.
    Busy {
        /// How long to wait. One second, if the directory does not say.
        after: Duration,
    },
    /// The report will not be accepted.
    Refused {
        /// The directory's code for the reason.
        error: String,
        /// Its explanation, in at most 500 characters.
        detail: String,
    },
}

/// The result of publishing a log of evidence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// How many reports are accepted, now or before.
    pub accepted: usize,
    /// The payments whose reports should be sent again later.
    pub later: Vec<EvidencePayment>,
    /// The payments whose reports will not be accepted or cannot be signed, and why.
    pub refused: Vec<(EvidencePayment, String)>,
}

/// A directory could not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// The URL is not an http or https URL.
    #[error("the directory's URL is not an http or https URL")]
    Url,
    /// The directory could not be reached, or the HTTP client could not be created.
    #[error("the directory could not be reached")]
    Unreachable(#[source] reqwest::Error),
    /// The directory did not answer within the [timeout](DirectoryClient::timeout).
    #[error("the directory did not answer in time")]
    Timeout,
    /// The answer is too large.
    #[error("the directory's answer is larger than {MAX_PAGE} bytes")]
    TooLarge,
    /// The directory refused.
    #[error("the directory answered with status {status}: {error} {detail}")]
    Answered {
        /// The HTTP status.
        status: u16,
        /// The directory's code for the reason.
        error: String,
        /// Its explanation, in at most 500 characters.
        detail: String,
    },
    /// The answer is not what a directory answers.
    #[error("the directory's answer cannot be read: {0}")]
    Unreadable(String),
    /// The evidence cannot be signed.
    #[error(transparent)]
    Report(#[from] ReportError),
}

impl DirectoryClient {
    /// Creates a client of the directory below `url`.
    ///
    /// # Errors
    /// [`DirectoryError::Url`], or [`DirectoryError::Unreachable`] if the HTTP client cannot be created.
    pub fn new(url: impl AsRef<str>) -> Result<Self, DirectoryError> {
        let url = Url::parse(url.as_ref()).map_err(|_| DirectoryError::Url)?;
        let http = Client::builder().redirect(redirect::Policy::none()).build().map_err(DirectoryError::Unreachable)?;
        Ok(Self {
            http,
            cards: below(&url, "cards").ok_or(DirectoryError::Url)?,
            evidence: below(&url, "evidence").ok_or(DirectoryError::Url)?,
            timeout: Duration::from_secs(10),
        })
    }

    /// Returns the URL of the directory's reports.
    pub(crate) const fn url(&self) -> &Url {
        &self.evidence
    }

    /// Sets how long an answer may take. Default: 10 s. To list and to accept, the directory asks other servers first.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Asks the directory to list the evaluator at `url`: its base URL, or that of its card (`….json`).
    ///
    /// # Errors
    /// [`DirectoryError::Answered`] says why it is not listed.
    pub async fn list(&self, url: &Url) -> Result<(), DirectoryError> {
        let body = ListRequest { url: url.to_string() };
        let (status, _, body) = self.send(Method::POST, self.cards.clone(), Some(&body)).await?;
        if status.is_success() { Ok(()) } else { Err(answered(status, &body)) }
    }

    /// Returns the evaluators that match, from all pages.
    ///
    /// # Errors
    /// [`DirectoryError`] if a page cannot be read.
    pub async fn cards(&self, query: &CardQuery) -> Result<FoundCards, DirectoryError> {
        let (mut found, mut skipped, mut text, mut after) = (Vec::new(), 0, 0, 0);
        let mut seen = HashSet::new();
        loop {
            let mut url = self.cards.clone();
            url.query_pairs_mut()
                .append_pair("limit", &CARDS_PER_PAGE.to_string())
                .append_pair("after", &u64::to_string(&after))
                .extend_pairs(query.skill.iter().map(|skill| ("skill", skill)));
            let page: CardsBody = self.get(url).await?;
            let is_empty = page.cards.is_empty();
            for entry in page.cards {
                text += entry.card.get().len();
                let read = |url: &str, card: &str| {
                    let url: Url = url.parse().ok()?;
                    let card = VerifiedCard::verify(card.as_bytes(), &url).ok()?;
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
            // A lying directory cannot make this loop endless.
            let is_enough = found.len() + skipped >= MAX_CARDS || text >= MAX_TEXT;
            if !page.more || is_empty || page.after <= after || is_enough {
                return Ok(FoundCards { found, skipped });
            }
            after = page.after;
        }
    }

    /// Sends a report to the directory once.
    ///
    /// # Errors
    /// [`DirectoryError`] if the directory cannot be asked.
    pub async fn publish_signed(&self, report: &SignedEvidence) -> Result<Publication, DirectoryError> {
        let (status, after, body) = self.send(Method::POST, self.evidence.clone(), Some(report)).await?;
        if status.is_success() {
            return Ok(Publication::Accepted);
        }
        let Problem { error, detail } = problem(&body);
        Ok(match (status, &*error) {
            (StatusCode::CONFLICT, "not_yet") => Publication::NotYet,
            (StatusCode::CONFLICT, _) => Publication::Conflict,
            (StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT, _) => Publication::Busy { after },
            _ if status.is_server_error() => Publication::Busy { after },
            _ => Publication::Refused { error, detail },
        })
    }

    /// Publishes the evidence of a log about payments that `signer` made with `asset`, one after the other. Evidence that the
    /// directory cannot take at once is sent up to five times. Publishing the same log again changes nothing.
    ///
    /// `transaction` returns the transaction that settled a payment, if that is known. Otherwise the directory must search for it, and
    /// finds only recent ones. A payment by voucher can be reported once the evaluator has claimed it, as a rule within an hour; until then
    /// it is among [`Published::later`]. Its transaction is that of the claim, not of the deposit.
    ///
    /// Valid evaluations that were not audited are left out: they say nothing, and each payment supports one report.
    ///
    /// # Errors
    /// [`DirectoryError`] if the signer fails, or the directory cannot be asked.
    pub async fn publish_log(
        &self,
        log: &EvidenceLog,
        asset: &Asset,
        signer: &(impl Signer + Sync),
        transaction: impl Fn(&EvidencePayment) -> Option<B256>,
    ) -> Result<Published, DirectoryError> {
        let mut published = Published::default();
        for evidence in log.records() {
            let is_news =
                evidence.paid > Usdc::ZERO && !matches!(evidence.outcome, CallOutcome::Answered { pairs: None, .. });
            let mine = evidence.payment.filter(|payment| is_news && payment.payer == signer.address());
            let Some(payment) = mine else { continue };
            let transaction = transaction(&payment);
            let signed = SignedEvidence::sign(evidence, asset.network, asset.address, transaction, signer).await;
            let signed = match signed {
                Ok(signed) => signed,
                Err(error @ (ReportError::Sign(_) | ReportError::WrongSigner { .. })) => return Err(error.into()),
                Err(error) => {
                    published.refused.push((payment, error.to_string()));
                    continue;
                }
            };
            match self.publish_with_retries(&signed).await? {
                Publication::Accepted => published.accepted += 1,
                Publication::NotYet | Publication::Busy { .. } => published.later.push(payment),
                Publication::Conflict => published.refused.push((payment, "already_reported".to_owned())),
                Publication::Refused { error, .. } => published.refused.push((payment, error)),
            }
        }
        Ok(published)
    }

    async fn publish_with_retries(&self, report: &SignedEvidence) -> Result<Publication, DirectoryError> {
        let mut published = self.publish_signed(report).await?;
        for _ in 1..ATTEMPTS {
            let Publication::Busy { after } = published else { break };
            sleep(after.min(MAX_PAUSE)).await;
            published = self.publish_signed(report).await?;
        }
        Ok(published)
    }

    /// Returns a page of reports whose signatures hold. That their payments took place is the directory's claim, until you check it
    /// with a [`PaymentChecker`](super::PaymentChecker).
    ///
    /// # Errors
    /// [`DirectoryError`] if the page cannot be read.
    pub async fn reports(&self, query: &ReportQuery) -> Result<ReportPage, DirectoryError> {
        let mut url = self.evidence.clone();
        url.query_pairs_mut()
            .append_pair("limit", &REPORTS_PER_PAGE.to_string())
            .append_pair("after", &query.after.to_string())
            .extend_pairs(query.evaluator.iter().map(|evaluator| ("evaluator", evaluator.to_string())))
            .extend_pairs(query.skill.iter().map(|skill| ("skill", skill)))
            .extend_pairs(query.payer.iter().map(|payer| ("payer", payer.to_string())));
        let page: ReportsBody = self.get(url).await?;
        let (before, mut after) = (page.reports.len(), query.after);
        let mut reports = page.reports;
        reports.retain(|accepted| {
            let is_next = accepted.id > after;
            after = after.max(accepted.id);
            is_next && query.matches(accepted) && accepted.report.verify().is_ok()
        });
        let skipped = before - reports.len();
        // A page without new reports is the last one, whatever the directory says.
        let more = page.more && after > query.after;
        Ok(ReportPage { reports, skipped, after, more })
    }

    async fn get<T: DeserializeOwned>(&self, url: Url) -> Result<T, DirectoryError> {
        let (status, _, body) = self.send::<()>(Method::GET, url, None).await?;
        if status != StatusCode::OK {
            return Err(answered(status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| DirectoryError::Unreadable(error.to_string()))
    }

    /// Returns status and body of the answer, and how long to wait before the next request.
    async fn send<B: Serialize>(
        &self,
        method: Method,
        url: Url,
        body: Option<&B>,
    ) -> Result<(StatusCode, Duration, Vec<u8>), DirectoryError> {
        let mut request = self.http.request(method, url).header(ACCEPT, "application/json");
        if let Some(body) = body {
            let body = serde_json::to_vec(body).map_err(|error| DirectoryError::Unreadable(error.to_string()))?;
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        let exchange = async {
            let response = request.send().await.map_err(|error| DirectoryError::Unreachable(error.without_url()))?;
            let status = response.status();
            let pause = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            let body = read_body(response, MAX_PAGE).await.map_err(|error| match error {
                BodyError::Broken(error) => DirectoryError::Unreachable(error),
                BodyError::TooLarge => DirectoryError::TooLarge,
            })?;
            Ok((status, Duration::from_secs(pause.unwrap_or(1)), body))
        };
        timeout(self.timeout, exchange).await.unwrap_or(Err(DirectoryError::Timeout))
    }
}

/// All evaluators whose cards the directory lists: the first card of each payee, then the second of each, and so on. So a payee gains
/// nothing by listing more cards.
#[async_trait]
impl CardSource for DirectoryClient {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        let cards = self.cards(&CardQuery::default()).await.map_err(SourceError::new)?;
        let mut listed: HashMap<Address, usize> = HashMap::new();
        let ranked = cards.found.into_iter().map(|found| {
            let rank = listed.entry(found.card.pay_to()).or_default();
            *rank += 1;
            (*rank, found.url)
        });
        let mut ranked: Vec<(usize, Url)> = ranked.collect();
        // Stable: within a rank the order stays the directory's.
        ranked.sort_by_key(|(rank, _)| *rank);
        Ok(ranked.into_iter().map(|(_, url)| url).collect())
    }
}

tower_x402::debug_fields!(DirectoryClient |this| { cards: this.cards.as_str() });

impl CardQuery {
    /// Selects evaluators with this skill.
    pub fn skill(mut self, skill: impl Into<String>) -> Self {
        self.skill = Some(skill.into());
        self
    }

    fn matches(&self, card: &VerifiedCard) -> bool {
        self.skill.as_ref().is_none_or(|skill| card.card().has_skill(skill))
    }
}

impl ReportQuery {
    /// Selects reports about the evaluator that is paid at this address.
    pub fn evaluator(self, evaluator: Address) -> Self {
        Self { evaluator: Some(evaluator), ..self }
    }

    /// Selects reports about this skill.
    pub fn skill(self, skill: impl Into<String>) -> Self {
        Self { skill: Some(skill.into()), ..self }
    }

    /// Selects reports that this payer signed.
    pub fn payer(self, payer: Address) -> Self {
        Self { payer: Some(payer), ..self }
    }

    /// Selects reports with larger numbers than this one, to continue after a page: see [`ReportPage::after`]. Default: 0.
    pub fn after(self, number: u64) -> Self {
        Self { after: number, ..self }
    }

    fn matches(&self, accepted: &AcceptedReport) -> bool {
        let evidence = &accepted.report.evidence;
        self.evaluator.is_none_or(|evaluator| evaluator == evidence.evaluator)
            && self.skill.as_ref().is_none_or(|skill| *skill == evidence.skill)
            && self.payer.is_none_or(|payer| evidence.payment.is_some_and(|payment| payment.payer == payer))
    }
}

fn answered(status: StatusCode, body: &[u8]) -> DirectoryError {
    let Problem { error, detail } = problem(body);
    DirectoryError::Answered { status: status.as_u16(), error, detail }
}

/// Reads a refusal. It is untrusted text, so control characters are removed and long texts are cut.
fn problem(body: &[u8]) -> Problem {
    let Problem { error, detail } =
        serde_json::from_slice(body).unwrap_or_else(|_| Problem { error: "unknown".to_owned(), detail: String::new() });
    let cut = |text: String, most: usize| text.chars().filter(|c| !c.is_control()).take(most).collect();
    Problem { error: cut(error, 64), detail: cut(detail, 500) }
}
