//! Writes the page. Whatever comes from the seller or from the request is escaped on its way in, by the only function that can
//! put it there.

use std::{fmt::Write as _, sync::LazyLock};

use base64_simd::STANDARD;
use serde_json::Value;

use super::{SCRIPT, STYLE, settings::BrowserPage};
use crate::{
    charge::Offer,
    network::Network,
    protocol::{ExactOffer, PaymentFlow, ResourceInfo},
    server::offer::RenderedOffers,
    usdc::Usdc,
};

/// The content of one page.
pub(super) struct Shown<'a> {
    pub(super) page: &'a BrowserPage,
    pub(super) resource: &'a ResourceInfo,
    /// Where the resource is, as the offer says.
    pub(super) url: &'a str,
    pub(super) query: Option<&'a str>,
    pub(super) offers: &'a [Offer],
    pub(super) rendered: &'a RenderedOffers,
    /// How long after the button is pressed a payment may arrive, in seconds.
    pub(super) seconds_to_sign: u64,
}

/// The page; `None` if the demand cannot be read back, which is never so.
pub(super) fn render(shown: &Shown<'_>) -> Option<String> {
    // The very offer that the header makes is what the script signs.
    let data = String::from_utf8(STANDARD.decode_to_vec(shown.rendered.header.as_bytes()).ok()?).ok()?;
    let json = serde_json::to_string_pretty(&serde_json::from_str::<Value>(&data).ok()?).ok()?;
    let address = match shown.query {
        Some(query) if !shown.url.contains('?') => format!("{}?{query}", shown.url),
        _ => shown.url.to_owned(),
    };
    let title = shown.page.name.as_deref().or(shown.resource.service_name.as_deref()).unwrap_or("This has a price");
    let description =
        shown.resource.description.as_deref().unwrap_or("The answer to this request is sold by the request.");
    let mut html = String::new();
    for part in TEMPLATE.iter() {
        match part {
            Part::Text(text) => html.push_str(text),
            Part::Slot("title") => escape(&mut html, title),
            Part::Slot("description") => escape(&mut html, description),
            Part::Slot("address") => escape(&mut html, &address),
            Part::Slot("url") => escape(&mut html, &quotable(&address)),
            Part::Slot("method") => escape(&mut html, shown.page.method().as_str()),
            Part::Slot("offers") => offers(&mut html, shown),
            Part::Slot("pay") => pay(&mut html, shown),
            Part::Slot("json") => escape(&mut html, &json),
            // Within a script element only "<" can end it or begin a comment; JSON knows another spelling of it.
            Part::Slot("data") => html.push_str(&data.replace('<', "\\u003c")),
            Part::Slot(_) => {}
        }
    }
    Some(html)
}

enum Part {
    Text(&'static str),
    Slot(&'static str),
}

/// The template, cut at its slots; style and script are in their places.
static TEMPLATE: LazyLock<Vec<Part>> = LazyLock::new(|| {
    let mut parts = Vec::new();
    let mut pieces = include_str!("page.html").split("{{");
    parts.extend(pieces.next().map(Part::Text));
    for piece in pieces {
        let (slot, text) = piece.split_once("}}").unwrap_or((piece, ""));
        parts.push(match slot {
            "style" => Part::Text(STYLE),
            "script" => Part::Text(SCRIPT),
            slot => Part::Slot(slot),
        });
        parts.push(Part::Text(text));
    }
    parts
});

/// Returns `true` if the button pays this offer. An `upfront` offer is paid only if the service is known to answer `GET`.
fn is_payable(page: &BrowserPage, offer: &ExactOffer) -> bool {
    is_shown(offer) && page.answers_get().unwrap_or(offer.flow == PaymentFlow::Authorization)
}

/// Permits are left to programs: the wallet would have to approve Permit2 first.
fn is_shown(offer: &ExactOffer) -> bool {
    offer.permit().is_none()
}

/// One after the other, as in `accepts`; the script finds them by their number.
fn offers(html: &mut String, shown: &Shown<'_>) {
    let first = shown.offers.iter().position(|offer| is_payable(shown.page, offer.terms.offer()));
    let is_choice = shown.offers.iter().filter(|offer| is_shown(offer.terms.offer())).count() > 1;
    html.push_str(if is_choice { "<div role=\"radiogroup\" aria-labelledby=\"price\">\n" } else { "<div>\n" });
    for (index, offer) in shown.offers.iter().enumerate() {
        let offer = offer.terms.offer();
        if !is_shown(offer) {
            continue;
        }
        let (number, token) = amount(offer);
        let state = match first {
            Some(first) if first == index => " checked",
            _ if is_payable(shown.page, offer) => "",
            _ => " disabled",
        };
        let _ = write!(
            html,
            "<div class=\"offer\">\n<label><input type=\"radio\" name=\"offer\" autocomplete=\"off\" value=\"{index}\"{state} "
        );
        html.push_str("data-price=\"");
        escape(html, &format!("{number} {token}"));
        html.push_str("\"><span class=\"amount\">");
        escape(html, &number);
        html.push_str(" <small>");
        escape(html, token);
        html.push_str("</small></span> <span>on ");
        escape(html, &name_of(offer.network()));
        html.push_str("</span></label>\n<dl>\n");
        row(html, "Paid to", &offer.pay_to.to_string(), true);
        row(html, "Token", &offer.asset.address.to_string(), true);
        let charged = match offer.flow {
            PaymentFlow::Upfront => "Before the work. If the work fails, asking again costs nothing more",
            _ => "After the work, and only if the answer is a success",
        };
        row(html, "Charged", charged, false);
        let window = format!("What you sign can be used for {} seconds, once", offer.max_timeout_seconds);
        row(html, "Valid", &window, false);
        if first.is_some() && !is_payable(shown.page, offer) {
            row(html, "Paid by", "Programs: the seller does not say that a browser is answered", false);
        }
        html.push_str("</dl>\n</div>\n");
    }
    html.push_str("</div>\n");
}

fn row(html: &mut String, term: &str, text: &str, is_code: bool) {
    let (open, close) = if is_code { ("<code>", "</code>") } else { ("", "") };
    let _ = write!(html, "<div><dt>{term}</dt><dd>{open}");
    escape(html, text);
    let _ = writeln!(html, "{close}</dd></div>");
}

/// The button, or why there is none.
fn pay(html: &mut String, shown: &Shown<'_>) {
    let payable = shown.offers.iter().map(|offer| offer.terms.offer()).find(|offer| is_payable(shown.page, offer));
    let Some(offer) = payable else {
        html.push_str("<p class=\"note\" id=\"no-button\">");
        match shown.page.answers_get() {
            Some(false) => {
                html.push_str(
                    "There is nothing to pay for in a browser: it asks with GET, and what is sold here answers ",
                );
                escape(html, shown.page.method().as_str());
                html.push_str(" only.");
            }
            _ => html.push_str(
                "This is charged before the work, and the seller does not say that a browser's GET is answered.",
            ),
        }
        html.push_str(" A program can pay: see below.</p>\n");
        return;
    };
    let (number, token) = amount(offer);
    html.push_str("<button id=\"pay\" type=\"button\" aria-describedby=\"pay-note\" hidden>Pay ");
    escape(html, &format!("{number} {token}"));
    html.push_str("</button>\n<p id=\"status\" role=\"status\"></p>\n");
    let _ = writeln!(
        html,
        "<p class=\"note\" id=\"pay-note\">Your wallet shows what it signs: this amount, to this payee, no more. You pay no gas. Confirm \
         within {} seconds.</p>",
        shown.seconds_to_sign
    );
    html.push_str("<noscript><p class=\"note\">Paying here needs JavaScript and a wallet. A program needs neither.</p></noscript>\n");
}

/// The price and what it is in: `("0.001", "USDC")`.
fn amount(offer: &ExactOffer) -> (String, &str) {
    let number = match Usdc::try_from(offer.amount) {
        Ok(amount) => amount.to_string().trim_start_matches('$').to_owned(),
        Err(_) => format!("{} millionths of", offer.amount),
    };
    let is_usdc = offer.network().usdc().is_some_and(|usdc| usdc == offer.asset);
    (number, if is_usdc { "USDC" } else { &offer.asset.name })
}

fn name_of(network: Network) -> String {
    match network {
        Network::BASE => "Base".to_owned(),
        Network::BASE_SEPOLIA => "Base Sepolia, a test network".to_owned(),
        other => format!("the chain {}", other.chain_id()),
    }
}

/// Text in an element or in a quoted attribute.
fn escape(html: &mut String, text: &str) {
    let mut rest = text;
    while let Some(at) = rest.find(['&', '<', '>', '"', '\'']) {
        html.push_str(&rest[..at]);
        html.push_str(match rest.as_bytes()[at] {
            b'&' => "&amp;",
            b'<' => "&lt;",
            b'>' => "&gt;",
            b'"' => "&quot;",
            _ => "&#39;",
        });
        rest = &rest[at + 1..];
    }
    html.push_str(rest);
}

/// A URL that can be pasted between quotes into a shell or a program: what would end them is percent-encoded.
fn quotable(url: &str) -> String {
    let mut quotable = String::with_capacity(url.len());
    for char in url.chars() {
        match char {
            '\'' | '"' | '\\' | '`' | '\0'..=' ' => {
                let _ = write!(quotable, "%{:02x}", u32::from(char));
            }
            char => quotable.push(char),
        }
    }
    quotable
}
