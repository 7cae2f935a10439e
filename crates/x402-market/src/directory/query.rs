//! What is asked for in the query of a URL.

use std::{borrow::Cow, str::FromStr};

use super::store::{CardFilter, VoiceFilter};

/// How many voices are on a page that says no other limit, and at most.
const USUAL: u64 = 100;
const MOST: u64 = 1_000;

/// Which cards are wanted. What is not known here is ignored.
pub(super) fn cards(query: &str) -> Result<CardFilter, &'static str> {
    let mut filter = CardFilter { limit: 20, ..CardFilter::default() };
    for (name, value) in parameters(query) {
        match &*name {
            "skill" => filter.skill = Some(value.into_owned()),
            "network" => filter.network = Some(parse(&value, "network is CAIP-2: eip155:8453")?),
            "maxPrice" => filter.max_price = Some(parse(&value, "maxPrice is in atomic units")?),
            "after" => filter.after = parse(&value, "after is a number")?,
            "limit" => filter.limit = parse::<u64>(&value, "limit is a number")?.clamp(1, 100),
            _ => {}
        }
    }
    Ok(filter)
}

/// Which voices are wanted.
pub(super) fn voices(query: &str) -> Result<VoiceFilter, &'static str> {
    let mut filter = VoiceFilter { limit: USUAL, ..VoiceFilter::default() };
    for (name, value) in parameters(query) {
        match &*name {
            "evaluator" => filter.evaluator = Some(parse(&value, "evaluator is an address")?),
            "skill" => filter.skill = Some(value.into_owned()),
            "payer" => filter.payer = Some(parse(&value, "payer is an address")?),
            "after" => filter.after = parse(&value, "after is a number")?,
            "limit" => filter.limit = parse::<u64>(&value, "limit is a number")?.clamp(1, MOST),
            _ => {}
        }
    }
    Ok(filter)
}

fn parameters(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    form_urlencoded::parse(query.as_bytes()).filter(|(_, value)| !value.is_empty())
}

fn parse<T: FromStr>(text: &str, problem: &'static str) -> Result<T, &'static str> {
    text.parse().map_err(|_| problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_page_is_larger_than_one_may_be() {
        let asked = |query| (cards(query).unwrap().limit, voices(query).unwrap().limit);
        assert_eq!(asked("limit=100000000"), (100, 1_000));
        assert_eq!(asked("limit=0"), (1, 1));
        assert_eq!(asked(""), (20, 100));
    }
}
