//! Which cards a directory lists, whose reports it accepts, and for how long.

use std::{
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use alloy_primitives::Address;
use http::StatusCode;
use serde_json::json;
use url::{Host, Url};

use super::{
    SignedEvidence,
    report::ListMe,
    service::{Answer, DirectoryService, Shared},
    store::{Card, Listed, Offered, Said, StoreError},
    witness::{Witness, WitnessError},
};
use crate::{CardError, VerifiedCard, card::card_url};

/// How often there is something to do, at the most.
const ROUND: Duration = Duration::from_secs(60);
/// How many cards are asked for in one round, and how many at once.
const CARDS: u64 = 1_000;
const AT_ONCE: usize = 8;
/// How many payments are looked at again at once.
const VOICES: u64 = 200;

impl DirectoryService {
    /// Keeps the directory true, until it is dropped: asks for cards again and unlists those that do not answer, looks again at
    /// payments that were not final, and forgets what is old. Spawn it beside the server.
    pub async fn upkeep(self) {
        let weak = Arc::downgrade(&self.shared);
        drop(self);
        loop {
            let Some(shared) = weak.upgrade() else { return };
            if let Err(error) = shared.tidy().await {
                tracing::error!(error = &error as &dyn std::error::Error, "the directory cannot be kept in order");
            }
            drop(shared);
            tokio::time::sleep(ROUND).await;
        }
    }

    /// One round of [`upkeep`](Self::upkeep), now.
    ///
    /// # Errors
    /// If the directory's file cannot be used.
    pub async fn tidy(&self) -> Result<(), StoreError> {
        self.shared.tidy().await
    }
}

impl Shared {
    async fn tidy(self: &Arc<Self>) -> Result<(), StoreError> {
        let now = self.clock.now();
        self.store.forget_voices(now.saturating_sub(self.limits.voices_for.as_secs())).await?;
        self.look_again().await?;
        // Last, since evaluators decide how long it takes.
        self.refresh_cards(now).await?;
        self.store.forget_cards(now.saturating_sub(self.ages.forget.as_secs())).await
    }

    /// Asks for every card whose time has come.
    async fn refresh_cards(self: &Arc<Self>, now: u64) -> Result<(), StoreError> {
        let due = self.store.due(now.saturating_sub(self.ages.refresh.as_secs()), CARDS).await?;
        let mut due = due.into_iter();
        let mut asking = tokio::task::JoinSet::new();
        loop {
            while asking.len() < AT_ONCE
                && let Some(url) = due.next()
            {
                let shared = self.clone();
                asking.spawn(async move {
                    let fetched = match url.parse::<Url>() {
                        Ok(parsed) => shared.fetch(&parsed).await.is_ok(),
                        Err(_) => false,
                    };
                    if fetched { Ok(()) } else { shared.store.missed(&url, now, shared.ages.unlist).await }
                });
            }
            match asking.join_next().await {
                Some(Ok(done)) => done?,
                Some(Err(_)) => {}
                None => return Ok(()),
            }
        }
    }

    /// Looks again at payments that could have been undone. A voice whose payment was is removed; while not all nodes say so, it stays.
    async fn look_again(&self) -> Result<(), StoreError> {
        for witness in &self.witnesses {
            if let Some(is_final) = witness.finalized().await {
                self.look_again_with(witness, is_final).await?;
            }
        }
        Ok(())
    }

    async fn look_again_with(&self, witness: &Witness, is_final: u64) -> Result<(), StoreError> {
        let mut after = 0;
        loop {
            let open = self.store.not_final(after, VOICES).await?;
            let Some(last) = open.last() else { return Ok(()) };
            after = last.id;
            for voice in open {
                if voice.block > is_final || !witness.serves(voice.said.network, voice.said.asset) {
                    continue;
                }
                match witness.stands(&voice.said, voice.block).await {
                    Ok(Some(stands)) => {
                        if !stands {
                            tracing::warn!(id = voice.id, "a payment was undone, and has no voice any more");
                        }
                        self.store.close_voice(voice.id, stands).await?;
                    }
                    Ok(None) | Err(WitnessError::Voice(_)) => {}
                    // It would be asked for all others in vain.
                    Err(_) => return Ok(()),
                }
            }
        }
    }
}

/// How far the clocks of others may be ahead, in seconds.
const SKEW: u64 = 300;
/// The longest URL of a card.
const MAX_URL: usize = 2_048;
/// How many skills a card may name.
const MAX_SKILLS: usize = 64;
/// The longest name of a skill, in bytes; evidence takes no longer ones.
const MAX_SKILL: usize = 128;
/// A card that was asked for less than this many seconds ago is not asked for again.
const FRESH: u64 = 60;

impl Shared {
    /// Lists the evaluator at a URL.
    pub(super) async fn list(&self, body: &[u8]) -> Result<Answer, Answer> {
        let bad = |detail: &str| Answer::problem(StatusCode::BAD_REQUEST, "bad_request", detail);
        let ListMe { url } = serde_json::from_slice(body).map_err(|_| bad("send {\"url\": \"https://…\"}"))?;
        let url: Url = url.parse().map_err(|_| bad("the URL is none"))?;
        let url = card_url(&url).map_err(refused_card)?;
        if url.as_str().len() > MAX_URL || !url.username().is_empty() || url.password().is_some() {
            return Err(bad("the URL is too long, or holds credentials"));
        }
        // Most servers answer it alike with any: a stranger could list one card until its payee has no place left.
        if url.query().or(url.fragment()).is_some() {
            return Err(bad("the URL of a card has no query and no fragment"));
        }
        if let Some(at) = self.store.checked_at(url.as_str()).await?
            && self.clock.now() < at.saturating_add(FRESH)
        {
            return Ok(Answer::json(StatusCode::OK, &json!({ "url": url.as_str() })));
        }
        let (status, url, pay_to) = self.fetch(&url).await?;
        Ok(Answer::json(status, &json!({ "url": url, "payTo": pay_to })))
    }

    /// Fetches a card and keeps it. By which URL it is listed, and who is paid.
    pub(super) async fn fetch(&self, url: &Url) -> Result<(StatusCode, String, Address), Answer> {
        let (url, json, card) = self.fetcher.fetch_to_show(url).await.map_err(refused_card)?;
        let pay_to = card.pay_to();
        let card = to_keep(&url, json, &card)?;
        match self.store.put_card(&card, self.clock.now(), &self.limits).await? {
            Listed::New => {
                tracing::info!(url = url.as_str(), %pay_to, "a new evaluator is listed");
                Ok((StatusCode::CREATED, card.url, pay_to))
            }
            Listed::Renewed => Ok((StatusCode::OK, card.url, pay_to)),
            Listed::At(url) => Ok((StatusCode::OK, url, pay_to)),
            Listed::PayeeChanged(pinned) => {
                let error = CardError::PayeeChanged { pinned, found: pay_to };
                Err(Answer::problem(StatusCode::CONFLICT, "payee_changed", error))
            }
            Listed::TooManyOfHost => {
                let detail = "as many cards of this host are known as may be";
                Err(Answer::problem(StatusCode::TOO_MANY_REQUESTS, "too_many_of_host", detail))
            }
            Listed::TooManyOfPayee => {
                let detail = "as many cards of this payee are known as may be";
                Err(Answer::problem(StatusCode::TOO_MANY_REQUESTS, "too_many_of_payee", detail))
            }
            Listed::TooManySkills => {
                let detail = "its evaluator has offered as many skills as may be";
                Err(Answer::problem(StatusCode::UNPROCESSABLE_ENTITY, "too_many_skills", detail))
            }
            Listed::Full => {
                let detail = "as many cards are known as may be, and all of their evaluators were spoken of";
                Err(Answer::problem(StatusCode::SERVICE_UNAVAILABLE, "full", detail).later(Duration::from_secs(3_600)))
            }
        }
    }

    /// Admits a voice.
    pub(super) async fn hear(&self, body: &[u8]) -> Result<Answer, Answer> {
        let unprocessable = |error, detail: &str| Answer::problem(StatusCode::UNPROCESSABLE_ENTITY, error, detail);
        let mut said: SignedEvidence = serde_json::from_slice(body)
            .map_err(|error| Answer::problem(StatusCode::BAD_REQUEST, "bad_request", error))?;
        let of = said.verify().map_err(|error| unprocessable("bad_voice", &error.to_string()))?;
        // After the signature: nobody uses up somebody else's allowance.
        if let Err(refused) = self.payers.admit_account(of.voice.payer) {
            return Err(Answer::too_many(refused.retry_after));
        }
        if let Some(before) = self.store.heard(&of, &said).await? {
            return said_before(before);
        }
        let witness = self.witness(&said).ok_or_else(|| {
            unprocessable("not_served", "payments with this token on this network are not looked at here")
        })?;
        if said.evidence.at > self.clock.now().saturating_add(SKEW) {
            return Err(unprocessable("implausible_time", "the record is from the future"));
        }
        let skill = &said.evidence.skill;
        match self.store.offered(said.evidence.evaluator, skill).await? {
            Offered::For(price) if said.evidence.paid.atomic() < price => {
                let detail = format!("the evaluator was never seen to ask less than {price} units for this");
                return Err(unprocessable("underpaid", &detail));
            }
            Offered::For(_) => {}
            Offered::OtherSkills => {
                return Err(unprocessable(
                    "unknown_skill",
                    "the evaluator never had this skill on a card that was seen here",
                ));
            }
            Offered::Nothing => {
                return Err(unprocessable(
                    "unknown_evaluator",
                    "no card that is known here has this payee; list it first",
                ));
            }
        }
        let payment = witness.check(&said).await.map_err(|error| refused_payment(&error))?;
        said.transaction = Some(payment.transaction);
        said_before(self.store.put_voice(&payment, &said, &self.limits).await?)
    }

    pub(super) fn witness(&self, said: &SignedEvidence) -> Option<&Witness> {
        self.witnesses.iter().find(|witness| witness.serves(said.network, said.asset))
    }
}

fn said_before(said: Said) -> Result<Answer, Answer> {
    match said {
        Said::New(id) => Ok(Answer::json(StatusCode::CREATED, &json!({ "id": id }))),
        Said::Again(id) => Ok(Answer::json(StatusCode::OK, &json!({ "id": id }))),
        Said::Otherwise => {
            Err(Answer::problem(StatusCode::CONFLICT, "spoken", "this payment has said something else before"))
        }
        Said::TooOld => {
            Err(Answer::problem(StatusCode::GONE, "too_old", "what was said about payments of that time was forgotten"))
        }
        Said::TooMany => {
            let detail = "as many voices of this payer are kept as may be, until the first are forgotten";
            Err(Answer::problem(StatusCode::TOO_MANY_REQUESTS, "too_many_voices", detail)
                .later(Duration::from_secs(3_600)))
        }
    }
}

/// What of a verified card is kept.
fn to_keep(url: &Url, json: String, card: &VerifiedCard) -> Result<Card, Answer> {
    let bad = |detail| Answer::problem(StatusCode::UNPROCESSABLE_ENTITY, "bad_card", detail);
    let mut skills: Vec<String> = card.card().skills.iter().map(|skill| skill.id.clone()).collect();
    skills.sort_unstable();
    skills.dedup();
    if skills.is_empty() || skills.len() > MAX_SKILLS {
        return Err(bad("a card has 1 to 64 skills"));
    }
    if skills.iter().any(|skill| skill.is_empty() || skill.len() > MAX_SKILL) {
        return Err(bad("a skill's id has 1 to 128 bytes"));
    }
    let price = card.pricing().price_per_output.atomic();
    if i64::try_from(price).is_err() {
        return Err(bad("the price is beyond all money"));
    }
    Ok(Card {
        url: url.to_string(),
        host: host_of(url),
        endpoint: card.pricing().endpoint.clone(),
        pay_to: card.pay_to(),
        price,
        json,
        skills,
        networks: card.pricing().accepts.iter().map(|token| token.network).collect(),
    })
}

/// What is counted as one host: a name without the dot at its end, an IPv4 address, or an IPv6 network of 64 bits, since one customer
/// has all of its addresses.
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

fn refused_card(error: CardError) -> Answer {
    match error {
        CardError::Unreachable(_) | CardError::Late | CardError::Status(_) => {
            Answer::problem(StatusCode::BAD_GATEWAY, "unreachable", error)
        }
        CardError::NotPublic => Answer::problem(StatusCode::UNPROCESSABLE_ENTITY, "not_public", error),
        _ => Answer::problem(StatusCode::UNPROCESSABLE_ENTITY, "bad_card", error),
    }
}

fn refused_payment(error: &WitnessError) -> Answer {
    let unprocessable = |name| Answer::problem(StatusCode::UNPROCESSABLE_ENTITY, name, error);
    match error {
        WitnessError::Voice(_) => unprocessable("bad_voice"),
        WitnessError::NotServed { .. } => unprocessable("not_served"),
        WitnessError::NotPaid(_) => unprocessable("not_paid"),
        WitnessError::Implausible { .. } => unprocessable("implausible_time"),
        WitnessError::NotYet(_) => {
            Answer::problem(StatusCode::CONFLICT, "not_yet", error).later(Duration::from_secs(5))
        }
        WitnessError::Unavailable(_) | WitnessError::Url => Answer::unavailable(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_many_addresses_or_names_of_one_host_is_one_host() {
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
