//! The page that a person reads: who sells what, for how much, and what those who paid report.
//!
//! It is drawn here, without scripts or anything loaded. Cards are texts of strangers, so everything goes through `escape`.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{LazyLock, Mutex},
};

use alloy_primitives::Address;
use base64_simd::STANDARD;
use bytes::Bytes;
use http::HeaderValue;
use sha2::{Digest as _, Sha256};
use x402_market::{AgentCard, Pricing, Text, shared::lock};

use crate::{interval::ninety_percent, report::CardEntry, store::Seen};

/// How many cards are on a page, and how many skills of each.
pub(crate) const CARDS: u64 = 20;
pub(crate) const SKILLS: usize = 4;
/// How many of the newest reports on a skill are read.
pub(crate) const REPORTS: u64 = 200;
/// How many comparisons of one payer count, so that nobody decides alone how an evaluator looks.
const COMPARISONS_PER_PAYER: f32 = 10.0;
/// Into how many parts the time of the reports is divided.
const PARTS: usize = 12;
/// How many pages are kept, and for how many seconds.
const KEPT: usize = 32;
const KEPT_FOR: u64 = 30;

const STYLE: &str = include_str!("page.css");

/// Nothing runs, loads or frames the page, and its form leads to itself.
pub(crate) static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let style = STANDARD.encode_to_string(Sha256::digest(STYLE.as_bytes()));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{style}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    );
    HeaderValue::try_from(policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
});

/// The skill that a page is about, and where it begins.
type Place = (Option<String>, u64);

/// Pages that were drawn a moment ago, and when.
#[derive(Default)]
pub(crate) struct Pages(Mutex<HashMap<Place, (u64, Bytes)>>);

impl Pages {
    pub(crate) fn get(&self, skill: Option<&str>, after: u64, now: u64) -> Option<Bytes> {
        let pages = lock(&self.0);
        let (drawn, page) = pages.get(&(skill.map(str::to_owned), after))?;
        (*drawn <= now && now - drawn < KEPT_FOR).then(|| page.clone())
    }

    pub(crate) fn put(&self, skill: Option<&str>, after: u64, now: u64, page: Bytes) {
        // No card has a skill with a longer name.
        if skill.is_some_and(|skill| skill.len() > 128) {
            return;
        }
        let mut pages = lock(&self.0);
        if pages.len() >= KEPT {
            pages.clear();
        }
        pages.insert((skill.map(str::to_owned), after), (now, page));
    }
}

/// An evaluator that is shown.
pub(crate) struct Shown {
    pub(crate) entry: CardEntry,
    card: AgentCard,
    pricing: Pricing,
    /// The skills that are shown.
    pub(crate) skills: Vec<String>,
}

impl Shown {
    /// Reads a card that was verified when it was listed. With `skill`, only that skill is shown.
    pub(crate) fn of(entry: CardEntry, skill: Option<&str>) -> Option<Self> {
        let card: AgentCard = serde_json::from_str(entry.card.get()).ok()?;
        let pricing = card.pricing().ok()?;
        let ids = card.skills.iter().map(|skill| skill.id.clone());
        let skills = ids.filter(|id| skill.is_none_or(|skill| skill == id)).take(SKILLS).collect();
        Some(Self { entry, card, pricing, skills })
    }
}

/// Draws a page. There are the reports on each skill of each evaluator, the newest first.
pub(crate) fn draw(skill: Option<&str>, shown: &[(Shown, Vec<Vec<Seen>>)], next: Option<u64>) -> String {
    let skill = skill.unwrap_or_default();
    let articles = shown.iter().enumerate().map(|(number, (shown, reports))| article(number, shown, reports));
    let articles = match shown.is_empty() {
        true => "<p>No evaluator is listed here.</p>\n".to_owned(),
        false => articles.collect(),
    };
    let further = next.map(|next| {
        let query = form_urlencoded::Serializer::new(String::new()).append_pair("skill", skill).finish();
        format!("<nav><a href=\"?{query}&amp;after={next}\">Further evaluators</a></nav>\n")
    });
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Evaluators</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Evaluators</h1>\n{INTRODUCTION}\
         <form><label for=\"skill\">Skill</label><input id=\"skill\" name=\"skill\" value=\"{}\">\
         <button>Show</button></form>\n{articles}{}</main>\n</body>\n</html>\n",
        escape(skill),
        further.unwrap_or_default()
    )
}

const INTRODUCTION: &str = "<p>Who sells judgement of texts and programs, for how much, and what those who paid report of their audits.</p>\n\
    <p class=\"quiet\">Worth is how well an evaluator orders good and bad outputs: 1 if always rightly, 0 like a coin, −1 if always wrongly; with \
    the range that contains it with 90 %. Each payer counts ten comparisons at most. This directory checks that the payments took place, \
    not that reports are true: an evaluator can pay itself. Compare with audits of your own.</p>\n";

fn article(number: usize, shown: &Shown, reports: &[Vec<Seen>]) -> String {
    let Shown { entry, card, pricing, skills } = shown;
    let row = |(skill, reports): (&String, &Vec<Seen>)| {
        let claim = pricing.claim(skill).filter(|claim| claim.get() > 0.0);
        let claim = claim.map_or_else(|| "nothing".to_owned(), |claim| format!("{:.2}", claim.get()));
        let (skill, worth, counts, course) = (escape(skill), worth(reports), counts(reports), course(reports));
        format!(
            "<tr><th scope=\"row\">{skill}</th><td>{claim}</td><td>{worth}</td><td>{counts}</td><td>{course}</td></tr>\n"
        )
    };
    let rows: String = skills.iter().zip(reports).map(row).collect();
    let more = card.skills.len().saturating_sub(SKILLS);
    let more = match more > 0 && skills.len() == SKILLS {
        true => format!("<p class=\"quiet\">It has {more} more skills.</p>\n"),
        false => String::new(),
    };
    format!(
        "<article>\n<h2 id=\"e{number}\">{}</h2>\n<p>{}</p>\n\
         <p class=\"quiet\">{} for each output, paid to {}. Listed since {}, last seen on {}. \
         <a rel=\"nofollow noreferrer\" href=\"{}\">Its card</a></p>\n\
         <div class=\"wide\" tabindex=\"0\" role=\"region\" aria-labelledby=\"e{number}\">\n<table>\n\
         <thead><tr><th scope=\"col\">Skill</th><th scope=\"col\">It claims</th><th scope=\"col\">Worth by audits</th>\
         <th scope=\"col\">Reports</th><th scope=\"col\">Over time</th></tr></thead>\n\
         <tbody>\n{rows}</tbody>\n</table>\n</div>\n{more}</article>\n",
        escape(&Text::<0, 100>::cut(&*card.name)),
        escape(&Text::<0, 300>::cut(&*card.description)),
        pricing.price_per_output(),
        entry.pay_to,
        date(entry.first_seen),
        date(entry.last_seen),
        escape(&entry.url)
    )
}

/// Draws the worth, with its interval as text and as a picture.
fn worth(reports: &[Seen]) -> String {
    let mut payers: BTreeMap<Address, [f32; 2]> = BTreeMap::new();
    for (payer, [right, wrong]) in reports.iter().filter_map(|report| Some((report.payer, report.pairs?.comparisons())))
    {
        let sum = payers.entry(payer).or_default();
        *sum = [sum[0] + right, sum[1] + wrong];
    }
    if payers.is_empty() {
        return "not audited".to_owned();
    }
    let mut beta = [1.0, 1.0];
    for [right, wrong] in payers.into_values() {
        let weight = (COMPARISONS_PER_PAYER / (right + wrong)).min(1.0);
        beta = [beta[0] + weight * right, beta[1] + weight * wrong];
    }
    let mean = f64::from((beta[0] - beta[1]) / (beta[0] + beta[1]));
    let [low, high] = ninety_percent(beta).map(|share| 2.0 * share - 1.0);
    let text = format!("{mean:.2} ({low:.2} to {high:.2})").replace('-', "−");
    let x = |worth: f64| 60.0 + 58.0 * worth;
    format!(
        "{text}<svg width=\"120\" height=\"14\" viewBox=\"0 0 120 14\" role=\"img\" aria-label=\"{text} on a scale from −1 to 1\">\
         <path class=\"axis\" d=\"M2 7H118M60 2V12\"/>\
         <rect class=\"range\" x=\"{:.1}\" y=\"3\" width=\"{:.1}\" height=\"8\"/><circle class=\"dot\" cx=\"{:.1}\" cy=\"7\" r=\"3\"/></svg>",
        x(low),
        x(high) - x(low),
        x(mean)
    )
}

/// Says how many reports there are, by how many payers, and since when.
fn counts(reports: &[Seen]) -> String {
    let Some(oldest) = reports.iter().map(|report| report.at).min() else {
        return "none".to_owned();
    };
    let audits = reports.iter().filter(|report| report.pairs.is_some()).count();
    let failed = reports.iter().filter(|report| report.has_failed).count();
    let mut payers: Vec<Address> = reports.iter().map(|report| report.payer).collect();
    payers.sort_unstable();
    payers.dedup();
    let all = if reports.len() as u64 >= REPORTS { "the newest " } else { "" };
    let failed = if failed > 0 { format!("; {failed} calls failed") } else { String::new() };
    let (number, payers, since) = (reports.len(), payers.len(), date(oldest));
    format!("{audits} audits in {all}{number} reports, by {payers} payers since {since}{failed}")
}

/// Draws how the worth has changed.
fn course(reports: &[Seen]) -> String {
    let audits = || reports.iter().filter_map(|report| Some((report.at, report.pairs?)));
    let (Some(first), Some(last)) = (audits().map(|(at, _)| at).min(), audits().map(|(at, _)| at).max()) else {
        return String::new();
    };
    let mut parts = [[0_u32; 2]; PARTS];
    for (at, pairs) in audits() {
        let part = ((at - first) as f64 / ((last - first) as f64 + 1.0) * PARTS as f64) as usize;
        let [sum, all] = &mut parts[part.min(PARTS - 1)];
        (*sum, *all) = (*sum + pairs.all() + pairs.right() - pairs.wrong(), *all + pairs.all());
    }
    let known = || parts.iter().enumerate().filter(|(_, [_, all])| *all > 0);
    let points: Vec<(usize, f64)> =
        known().map(|(part, [sum, all])| (part, f64::from(*sum) / f64::from(*all) - 1.0)).collect();
    if points.len() < 2 {
        return "too few audits".to_owned();
    }
    let (from, to) = (date(first), date(last));
    let told: Vec<String> = points.iter().map(|(_, worth)| format!("{worth:.2}").replace('-', "−")).collect();
    let line: Vec<String> =
        points.iter().map(|(part, worth)| format!("{},{:.1}", 5 + 10 * part, 20.0 - 18.0 * worth)).collect();
    format!(
        "<svg width=\"120\" height=\"40\" viewBox=\"0 0 120 40\" role=\"img\" aria-label=\"From {from} to {to}: {}\">\
         <path class=\"axis\" d=\"M2 20H118\"/><polyline class=\"course\" points=\"{}\"/></svg><span class=\"quiet\">{from} to {to}</span>",
        told.join(", "),
        line.join(" ")
    )
}

fn date(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    time.map_or_else(|| "an unknown day".to_owned(), |time| time.strftime("%-d %b %Y").to_string())
}

/// Returns text as text, in an element or in a quoted attribute.
fn escape(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            // Marks that turn the direction of the text that follows, which is not theirs.
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {}
            _ => html.push(character),
        }
    }
    html
}
