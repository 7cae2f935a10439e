//! What a request cost, as its handler says, where that may be less than the price.

use http::{HeaderName, HeaderValue, response};
use serde::Deserialize;

use crate::usdc::Usdc;

/// Where handlers of the official packages say what a request cost.
const OVERRIDES: HeaderName = HeaderName::from_static("settlement-overrides");

/// What a request cost, if that is less than its price. A handler puts it into the extensions of its response.
///
/// Only payments by voucher and for a maximum are charged less than the price; any other is for the
/// price. More than the price is an error of the handler: the request is answered 500, and nothing is charged.
///
/// ```
/// use tower_x402::{Usdc, server::ActualPrice};
///
/// fn answer(tokens: u64) -> http::Response<String> {
///     let mut response = http::Response::new("...".to_owned());
///     response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(2 * tokens)));
///     response
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActualPrice(pub Usdc);

/// Takes out of a response what the handler says of its price.
pub(super) fn take_overrides(parts: &mut response::Parts) -> (Option<ActualPrice>, Option<HeaderValue>) {
    (parts.extensions.remove(), parts.headers.remove(&OVERRIDES))
}

/// Returns what the handler asks for its response, in atomic units; `None` where the price is what was signed for. The error says what is
/// wrong with it.
pub(super) fn actual_price(parts: &mut response::Parts, most: Option<u128>) -> Result<Option<u128>, &'static str> {
    let (actual, header) = take_overrides(parts);
    let Some(price) = most else { return Ok(None) };
    let amount = match (actual, header) {
        (Some(ActualPrice(amount)), _) => amount.atomic().into(),
        (None, Some(header)) => overridden(header.as_bytes(), price).ok_or("Settlement-Overrides cannot be read")?,
        (None, None) => price,
    };
    if amount > price { Err("more than the price") } else { Ok(Some(amount)) }
}

/// Reads `{"amount": "…"}`: atomic units, a share of the price (`33.33%`), or dollars (`$0.05`).
fn overridden(header: &[u8], price: u128) -> Option<u128> {
    #[derive(Deserialize)]
    struct Overrides {
        #[serde(default)]
        amount: Option<String>,
    }
    let Overrides { amount } = serde_json::from_slice(header).ok()?;
    let Some(amount) = amount else { return Some(price) };
    if let Some(share) = amount.strip_suffix('%') {
        let (whole, cents) = share.split_once('.').unwrap_or((share, ""));
        let is_number = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
        if whole.is_empty() || cents.len() > 2 || !is_number(whole) || !is_number(cents) {
            return None;
        }
        let hundredths: u128 = format!("{whole}{cents:0<2}").parse().ok()?;
        return (hundredths <= 10_000).then(|| price.checked_mul(hundredths).map(|amount| amount / 10_000))?;
    }
    match amount.starts_with('$') {
        true => Usdc::try_from(amount.as_str()).ok().map(|amount| amount.atomic().into()),
        false => crate::vouchers::amount::parse(&amount),
    }
}
