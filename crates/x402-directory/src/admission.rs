//! Which cards a directory lists and which reports it accepts, and what it checks again later.

use std::{
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use alloy_primitives::Address;
use futures_util::stream::{self, StreamExt as _};
use http::StatusCode;
use serde_json::json;
use tower_x402::Usdc;
use url::{Host, Url};

use super::{
    AcceptedReport, SignedEvidence,
    payment_check::PaymentCheckError,
    report::ListRequest,
    service::{Answer, DirectoryService, Settings, Shared, too_many, unavailable},
    store::{Card, Listed, Offered, StoreError, Stored},
};
use x402_market::{
    CardError, VerifiedCard,
    evidence::MAX_SKILL_BYTES,
    shared::{Refusal, card_url, json_response},
};

/// The time between two rounds of upkeep.
const ROUND: Duration = Duration::from_secs(60);
/// How many cards are fetched in one round, and how many at the same time.
const CARDS_PER_ROUND: u64 = 1_000;
const MAX_FETCHES: usize = 8;
/// How many reports are read from the store at a time.
const REPORTS_PER_QUERY: u64 = 200;

impl DirectoryService {
    /// Runs background upkeep until the directory is dropped. Spawn it beside the server.
    ///
    /// It fetches cards again and unlists those that cannot be fetched, checks again the payments that were not final, and deletes
    /// what is old.
    pub async fn upkeep(self) {
        let weak = Arc::downgrade(&self.shared);
        drop(self);
        loop {
            let Some(shared) = weak.upgrade() else { return };
            if let Err(error) = shared.upkeep_once().await {
                tracing::error!(error = &error as &dyn std::error::Error, "upkeep of the directory failed");
            }
            drop(shared);
            tokio::time::sleep(ROUND).await;
        }
    }

    /// Runs one round of [`upkeep`](Self::upkeep) now.
    ///
    /// # Errors
    /// [`StoreError`] if the directory's file cannot be used.
    pub async fn upkeep_once(&self) -> Result<(), StoreError> {
        self.shared.upkeep_once().await
    }
}

impl Shared {
    async fn upkeep_once(&self) -> Result<(), StoreError> {
        let now = self.settings.clock.now();
        let until = now.saturating_sub(self.settings.limits.report_retention.as_secs());
        self.settings.store.delete_reports(until, &self.settings.limits).await?;
        self.recheck_payments().await?;
        // Last, because evaluators decide how long it takes.
        self.refresh_cards(now).await?;
        self.settings.store.delete_cards(now.saturating_sub(self.settings.ages.delete.as_secs())).await
    }

    /// Fetches every card that is due.
    async fn refresh_cards(&self, now: u64) -> Result<(), StoreError> {
        let Settings { store, ages, .. } = &self.settings;
        let due = store.due(now.saturating_sub(ages.refresh.as_secs()), CARDS_PER_ROUND).await?;
        let refreshing = due.into_iter().map(|url| async move {
            let is_fetched = match url.parse::<Url>() {
                Ok(parsed) => self.fetch(&parsed).await.is_ok(),
                Err(_) => false,
            };
            if is_fetched { Ok(()) } else { store.missed(&url, now, ages.unlist).await }
        });
        let mut refreshing = stream::iter(refreshing).buffer_unordered(MAX_FETCHES);
        while let Some(done) = refreshing.next().await {
            done?;
        }
        Ok(())
    }

    /// Checks again the payments that were not final. A report whose payment was reorged is deleted once all nodes agree on it.
    async fn recheck_payments(&self) -> Result<(), StoreError> {
        'checkers: for checker in &self.settings.checkers {
            let Some(finalized) = checker.finalized().await else { continue };
            let mut after = 0;
            loop {
                let pending = self.settings.store.pending(after, REPORTS_PER_QUERY).await?;
                let Some(last) = pending.last() else { break };
                after = last.id;
                for AcceptedReport { id, block, report, .. } in pending {
                    if block > finalized || !checker.serves(report.network, report.asset) {
                        continue;
                    }
                    match checker.exists_finally(&report, block).await {
                        Ok(Some(exists)) => {
                            if !exists {
                                tracing::warn!(id, "a payment was reorged; its report is deleted");
                            }
                            self.settings.store.finish_report(id, exists).await?;
                        }
                        Ok(None) | Err(PaymentCheckError::Report(_)) => {}
                        // The node is unavailable, so asking it for the other payments would fail, too.
                        Err(_) => continue 'checkers,
                    }
                }
            }
        }
        Ok(())
    }
}

/// How far a payer's clock may be ahead, in seconds.
const SKEW: u64 = 300;
/// The longest URL of a card.
const MAX_URL: usize = 2_048;
/// How many skills a card may name.
const MAX_SKILLS: usize = 64;
/// The least that a report about a charge on a payment channel is about, in atomic units. A transfer costs the gas of a transaction; a
/// charge is a part of a claim, and would cost nothing.
const LEAST_CHARGE: Usdc = Usdc::from_atomic(100);
/// A card that was fetched less than this many seconds ago is not fetched again.
const FRESH: u64 = 60;

impl Shared {
    /// Answers a request to list the evaluator at a URL.
    pub(super) async fn list(&self, body: &[u8]) -> Result<Answer, Refusal> {
        let bad = |detail: &str| Refusal::new(StatusCode::BAD_REQUEST, "bad_request", detail);
        let ListRequest { url } = serde_json::from_slice(body).map_err(|_| bad("send {\"url\": \"https://…\"}"))?;
        let url: Url = url.parse().map_err(|_| bad("the URL cannot be read"))?;
        let url = card_url(&url).map_err(refused_card)?;
        if url.as_str().len() > MAX_URL || !url.username().is_empty() || url.password().is_some() {
            return Err(bad("the URL is too long, or contains credentials"));
        }
        // Most servers ignore them, so anybody could list one card many times until its payee has no place left.
        if url.query().or(url.fragment()).is_some() {
            return Err(bad("the URL of a card has no query and no fragment"));
        }
        if let Some(at) = self.settings.store.checked_at(url.as_str()).await?
            && self.settings.clock.now() < at.saturating_add(FRESH)
        {
            return Ok(json_response(StatusCode::OK, &json!({ "url": url.as_str() })));
        }
        let (status, url, pay_to) = self.fetch(&url).await?;
        Ok(json_response(status, &json!({ "url": url, "payTo": pay_to })))
    }

    /// Fetches and stores a card. Returns the URL under which it is listed, and its payee.
    pub(super) async fn fetch(&self, url: &Url) -> Result<(StatusCode, String, Address), Refusal> {
        let (url, json, card) = self.fetcher.fetch_original(url).await.map_err(refused_card)?;
        let pay_to = card.pay_to();
        let card = to_store(&url, json, &card)?;
        let too_many = |error, detail| Err(Refusal::new(StatusCode::TOO_MANY_REQUESTS, error, detail));
        match self.settings.store.put_card(&card, self.settings.clock.now(), &self.settings.limits).await? {
            Listed::New => {
                tracing::info!(url = url.as_str(), %pay_to, "an evaluator was listed");
                Ok((StatusCode::CREATED, card.url, pay_to))
            }
            Listed::Renewed => Ok((StatusCode::OK, card.url, pay_to)),
            Listed::At(url) => Ok((StatusCode::OK, url, pay_to)),
            Listed::PayeeChanged(pinned) => {
                let error = CardError::PayeeChanged { pinned, found: pay_to };
                Err(Refusal::new(StatusCode::CONFLICT, "payee_changed", error))
            }
            Listed::TooManyOfHost => too_many("too_many_of_host", "the limit of cards of this host is reached"),
            Listed::TooManyOfPayee => too_many("too_many_of_payee", "the limit of cards of this payee is reached"),
            Listed::TooManySkills => {
                let detail = "the limit of skills of this evaluator is reached";
                Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "too_many_skills", detail))
            }
            Listed::Full => {
                let detail = "the limit of cards is reached, and all of their evaluators have reports";
                Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "full", detail).later(Duration::from_secs(3_600)))
            }
        }
    }

    /// Answers a report: accepts it if the payer signed it, its payment took place, and the evaluator has offered the skill for no more
    /// than was paid.
    pub(super) async fn accept_report(&self, body: &[u8]) -> Result<Answer, Refusal> {
        let unprocessable = |error, detail: &str| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error, detail);
        let mut report: SignedEvidence = serde_json::from_slice(body)
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, "bad_request", error))?;
        let key = report.verify().map_err(|error| unprocessable("bad_report", &error.to_string()))?;
        // After the signature, so that nobody can use up somebody else's allowance.
        if let Err(refused) = self.settings.payers.admit(key.payer) {
            return Err(too_many(refused.retry_after));
        }
        if let Some(stored) = self.settings.store.stored(&key, &report).await? {
            return stored_answer(stored);
        }
        let checker = self.settings.checkers.iter().find(|checker| checker.serves(report.network, report.asset));
        let checker = checker.ok_or_else(|| {
            unprocessable("not_served", "payments with this token on this network are not checked here")
        })?;
        if report.evidence.at > self.settings.clock.now().saturating_add(SKEW) {
            return Err(unprocessable("implausible_time", "the report is from the future"));
        }
        let skill = &report.evidence.skill;
        match self.settings.store.offered(report.evidence.evaluator, skill).await? {
            Offered::For(price) if report.evidence.paid.atomic() < price => {
                let detail = format!("the evaluator's lowest price for this skill was {price} units");
                return Err(unprocessable("underpaid", &detail));
            }
            Offered::For(_) => {}
            Offered::OtherSkills => {
                let detail = "no card of this evaluator that was seen here has this skill";
                return Err(unprocessable("unknown_skill", detail));
            }
            Offered::Nothing => {
                let detail = "no card that was seen here has this payee; list it first";
                return Err(unprocessable("unknown_evaluator", detail));
            }
        }
        if report.evidence.charge.is_some() && report.evidence.paid < LEAST_CHARGE {
            let detail = format!("a report about a charge on a payment channel is about {LEAST_CHARGE} at least");
            return Err(unprocessable("underpaid", &detail));
        }
        let payment = checker.check(&report).await.map_err(|error| refused_payment(&error))?;
        report.transaction = Some(payment.transaction);
        stored_answer(self.settings.store.put_report(&payment, &report, &self.settings.limits).await?)
    }
}

fn stored_answer(stored: Stored) -> Result<Answer, Refusal> {
    match stored {
        Stored::New(id) => Ok(json_response(StatusCode::CREATED, &json!({ "id": id }))),
        Stored::Duplicate(id) => Ok(json_response(StatusCode::OK, &json!({ "id": id }))),
        Stored::Conflict => {
            let detail = "this payment, or a part of it, has another report";
            Err(Refusal::new(StatusCode::CONFLICT, "already_reported", detail))
        }
        Stored::TooOld => {
            let detail = "reports about payments of that time were deleted, of all payers or of this one";
            Err(Refusal::new(StatusCode::GONE, "too_old", detail))
        }
        Stored::TooMany => {
            let detail = "the limit of reports of this payer is reached, until the oldest are deleted";
            Err(Refusal::new(StatusCode::TOO_MANY_REQUESTS, "too_many_reports", detail)
                .later(Duration::from_secs(3_600)))
        }
    }
}

/// Returns what is stored of a verified card.
fn to_store(url: &Url, json: String, card: &VerifiedCard) -> Result<Card, Refusal> {
    let bad = |detail| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "bad_card", detail);
    let mut skills: Vec<String> = card.card().skills.iter().map(|skill| skill.id.clone()).collect();
    skills.sort_unstable();
    skills.dedup();
    if skills.is_empty() || skills.len() > MAX_SKILLS {
        return Err(bad("a card has 1 to 64 skills"));
    }
    if skills.iter().any(|skill| skill.is_empty() || skill.len() > MAX_SKILL_BYTES) {
        return Err(bad("a skill's id has 1 to 128 bytes"));
    }
    let price = card.pricing().price_per_output().atomic();
    if i64::try_from(price).is_err() {
        return Err(bad("the price is too high"));
    }
    Ok(Card {
        url: url.to_string(),
        host: host_of(url),
        endpoint: card.pricing().endpoint.clone(),
        pay_to: card.pay_to(),
        price,
        json,
        skills,
    })
}

/// Returns what counts as one host: a name without a dot at its end, an IPv4 address, or an IPv6 network of 64 bits, because one
/// customer has all of its addresses.
fn host_of(url: &Url) -> String {
    match url.host() {
        Some(Host::Domain(name)) => name.trim_end_matches('.').to_ascii_lowercase(),
        Some(Host::Ipv4(address)) => address.to_string(),
        Some(Host::Ipv6(address)) => match address.to_canonical() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => {
                format!("{}/64", Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)))
            }
        },
        None => String::new(),
    }
}

fn refused_card(error: CardError) -> Refusal {
    match error {
        CardError::Unreachable(_) | CardError::Timeout | CardError::Status(_) => {
            Refusal::new(StatusCode::BAD_GATEWAY, "unreachable", error)
        }
        CardError::NotPublic => Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "not_public", error),
        _ => Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "bad_card", error),
    }
}

fn refused_payment(error: &PaymentCheckError) -> Refusal {
    let unprocessable = |name| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, name, error);
    match error {
        PaymentCheckError::Report(_) => unprocessable("bad_report"),
        PaymentCheckError::NotServed { .. } => unprocessable("not_served"),
        PaymentCheckError::NotPaid(_) => unprocessable("not_paid"),
        PaymentCheckError::Implausible { .. } => unprocessable("implausible_time"),
        PaymentCheckError::NotYet(_) => {
            Refusal::new(StatusCode::CONFLICT, "not_yet", error).later(Duration::from_secs(5))
        }
        PaymentCheckError::Unavailable(_) | PaymentCheckError::Url => unavailable(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_of_one_ipv6_network_are_one_host() {
        let host = |text: &str| host_of(&format!("http://{text}:80/card.json").parse().unwrap());
        assert_eq!(host("[2001:db8::1]"), host("[2001:db8:0:0:ffff::2]"));
        assert_ne!(host("[2001:db8::1]"), host("[2001:db8:0:1::1]"));
        assert_eq!(host("192.0.2.1"), host("[::ffff:192.0.2.1]"));
        assert_eq!(host("192.0.2.1"), host("0xc0.0.513"));
        assert_ne!(host("192.0.2.1"), host("192.0.2.2"));
        assert_eq!(host("a.example"), host("A.EXAMPLE."));
        assert_ne!(host("a.example"), host("b.example"));
    }
}
