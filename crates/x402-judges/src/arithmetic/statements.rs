//! Finds and checks the equalities of a worked answer.

use std::ops::Range;

use super::{
    expression::{self, Fault},
    lexer::{self, Spanned, Token},
    units::{Dimension, Number, Quantity},
};

/// The verdict on one equality.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Holds(String),
    /// With a description of the error.
    Wrong(String),
    /// The equality cannot be read.
    Unread,
}

/// Checks every equality in `text`. Returns the verdicts in order, with the bytes of each equality.
pub(super) fn check(text: &str, tokens: &[Spanned]) -> Vec<(Verdict, Range<usize>)> {
    let mut verdicts = Vec::new();
    for (at, spanned) in tokens.iter().enumerate() {
        let (about, is_word) = match &spanned.token {
            Token::Equal => (false, false),
            Token::About => (true, false),
            token if token.is_word("is") => (false, true),
            _ => continue,
        };
        // "==", "≈=": one sign.
        if tokens.get(at + 1).is_some_and(|next| matches!(next.token, Token::Equal | Token::About)) {
            continue;
        }
        let (left, right) = (left_of(tokens, at, is_word), right_of(tokens, at));
        match (left, right) {
            (Side::Expression(left), Side::Expression(right)) => {
                // "is" often states no equality, and repeating an expression proves nothing.
                let says_something = lexer::text_of(text, left) != lexer::text_of(text, right);
                if says_something && (!is_word || !lexer::is_plain(left)) {
                    let place = span(left).start..span(right).end;
                    verdicts.push((compare(text, left, right, about), place));
                }
            }
            (Side::Unread, Side::Expression(_)) | (Side::Expression(_), Side::Unread) if !is_word => {
                verdicts.push((Verdict::Unread, spanned.start..spanned.end));
            }
            _ => {}
        }
    }
    verdicts
}

/// Returns the bytes of some tokens.
pub(super) fn span(tokens: &[Spanned]) -> Range<usize> {
    tokens.first().map_or(0, |first| first.start)..tokens.last().map_or(0, |last| last.end)
}

/// One side of an equals sign.
enum Side<'a> {
    Expression(&'a [Spanned]),
    /// There is something mathematical that this judge cannot read.
    Unread,
    Nothing,
}

/// Words that make the next number part of something else.
const BINDING: [&str; 13] =
    ["of", "by", "with", "from", "than", "to", "add", "subtract", "root", "between", "until", "log", "mod"];

fn left_of(tokens: &[Spanned], sign: usize, is_word: bool) -> Side<'_> {
    let before = tokens.get(..sign).unwrap_or_default();
    // "==": the sign may be of two characters.
    let before = match before.last() {
        Some(Spanned { token: Token::Equal | Token::About, .. }) => &before[..before.len() - 1],
        _ => before,
    };
    let mut start = before.len() - before.iter().rev().take_while(|spanned| spanned.token.is_mathematical()).count();
    // A unit cannot begin an expression, so it is a word.
    while before.get(start).is_some_and(|first| matches!(first.token, Token::Unit(_) | Token::Of)) {
        start += 1;
    }
    if start == before.len() {
        return Side::Nothing;
    }
    let run = lexer::balanced(before, start..before.len(), true);
    let at_bracket = run.start != start;
    let Some((side, first)) = before.get(run.clone()).and_then(|side| Some((side, side.first()?))) else {
        return Side::Nothing;
    };
    if side.last().is_none_or(|last| last.token.is_operator()) {
        return Side::Unread;
    }
    let previous = run.start.checked_sub(1).and_then(|at| before.get(at)).filter(|_| !at_bracket);
    if let Some(Spanned { token: Token::Word(word), end, .. }) = previous {
        let touches = *end == first.start;
        let is_sign = matches!(first.token, Token::Minus | Token::Plus)
            && !touches
            && side.get(1).is_some_and(|next| next.start == first.end);
        // "x + 3 =", "sqrt(16) =": the expression is longer than what was read.
        if touches || first.token.is_operator() && !is_sign || BINDING.contains(&word.to_lowercase().as_str())
            // "The sum of 3 and 4 * 2 is 11."
            || is_word && word.eq_ignore_ascii_case("and")
        {
            return Side::Unread;
        }
        if lexer::is_plain(side) && !has_unit(side) {
            return Side::Nothing;
        }
    }
    if matches!(first.token, Token::Times | Token::Over | Token::Power) {
        return Side::Unread;
    }
    Side::Expression(side)
}

fn right_of(tokens: &[Spanned], sign: usize) -> Side<'_> {
    let run = lexer::run_from(tokens, sign + 1);
    let run = lexer::balanced(tokens, run, false);
    let Some((side, last)) = tokens.get(run.clone()).and_then(|side| Some((side, side.last()?))) else {
        return Side::Nothing;
    };
    let next = tokens.get(run.end);
    let continued = next.is_some_and(|next| matches!(next.token, Token::Word(_)) && next.start == last.end);
    if last.token.is_operator() || continued { Side::Unread } else { Side::Expression(side) }
}

fn compare(text: &str, left: &[Spanned], right: &[Spanned], about: bool) -> Verdict {
    let (left_text, right_text) = (lexer::text_of(text, left), lexer::text_of(text, right));
    let sign = if about { "≈" } else { "=" };
    let stated = format!("{left_text} {sign} {right_text}");
    let (exact, shown) = match (expression::evaluate(left), expression::evaluate(right)) {
        (Ok(exact), Ok(shown)) => (exact, shown),
        (Err(Fault::Syntax | Fault::TooLarge), _) | (_, Err(Fault::Syntax | Fault::TooLarge)) => {
            return Verdict::Unread;
        }
        (Err(fault), _) => return Verdict::Wrong(format!("{left_text} cannot be: {fault}")),
        (_, Err(fault)) => return Verdict::Wrong(format!("{right_text} cannot be: {fault}")),
    };
    if exact.dimension != shown.dimension {
        let (left, right) = (exact.dimension.name(), shown.dimension.name());
        return Verdict::Wrong(format!("{stated} does not hold: the left side is {left}, the right side {right}"));
    }
    if agrees(exact, shown, right, about) {
        return Verdict::Holds(stated);
    }
    if !lexer::is_plain(right) {
        return Verdict::Wrong(format!("{stated} does not hold: {}", both(exact, shown, left, right)));
    }
    let should = in_unit_of(exact, shown, right)
        .map_or_else(|| format!("{} in base units", exact.value), |number| write_like(text, right, number));
    Verdict::Wrong(format!("{stated} does not hold: {left_text} is {should}"))
}

fn both(exact: Quantity, shown: Quantity, left: &[Spanned], right: &[Spanned]) -> String {
    let plain = exact.dimension == Dimension::NONE && !has_unit(left) && !has_unit(right);
    let base = if plain { "" } else { " in base units" };
    format!("the left side is {}, the right side {}{base}", exact.value, shown.value)
}

pub(super) fn has_unit(tokens: &[Spanned]) -> bool {
    tokens.iter().any(|spanned| matches!(spanned.token, Token::Unit(_) | Token::Currency(_)))
}

/// Returns `true` if `shown`, written as `tokens`, equals `exact`, or is rounded correctly where `about` or endless decimals allow it.
pub(super) fn agrees(exact: Quantity, shown: Quantity, tokens: &[Spanned], about: bool) -> bool {
    if exact == shown {
        return true;
    }
    let (Some((number, places)), Some(exact_number)) = (written(tokens), in_unit_of(exact, shown, tokens)) else {
        return false;
    };
    let endless = exact_number.places().is_none();
    let may_round = about || endless && places >= 2;
    exact.dimension == shown.dimension && may_round && exact_number.rounds_to(number, places)
}

/// Returns `exact` as a number in the unit of `shown`.
pub(super) fn in_unit_of(exact: Quantity, shown: Quantity, tokens: &[Spanned]) -> Option<Number> {
    exact.value.checked_div(unit_factor(shown, tokens)?)
}

/// Returns the factor of the unit in which `shown` is written. `None` if `shown` is zero.
pub(super) fn unit_factor(shown: Quantity, tokens: &[Spanned]) -> Option<Number> {
    if has_unit(tokens) { shown.value.checked_div(written(tokens)?.0) } else { Some(Number::ONE) }
}

/// Returns the number before the unit, and its decimal places.
fn written(tokens: &[Spanned]) -> Option<(Number, u32)> {
    let number: Vec<_> = tokens
        .iter()
        .filter(|spanned| !matches!(spanned.token, Token::Currency(_)))
        .take_while(|spanned| !matches!(spanned.token, Token::Unit(_)))
        .cloned()
        .collect();
    let places = number.iter().map(|spanned| if let Token::Number(_, places) = spanned.token { places } else { 0 });
    Some((expression::evaluate(&number).ok()?.value, places.max()?))
}

/// Returns the text of a plain quantity with another number.
fn write_like(text: &str, tokens: &[Spanned], number: Number) -> String {
    let first = tokens.iter().find(|spanned| spanned.token.is_number());
    let last = tokens.iter().rev().find(|spanned| spanned.token.is_number());
    let (Some(first), Some(last), false) = (first, last, !has_unit(tokens)) else { return number.to_string() };
    // A fraction is replaced whole. The exponent of a unit stays.
    let has_exponent = tokens.iter().any(|spanned| spanned.token == Token::Power);
    let until = if has_exponent { first.end } else { last.end };
    let end = tokens.last().map_or(until, |token| token.end);
    let before = match tokens.first() {
        Some(Spanned { token: Token::Currency(_), start, .. }) => text.get(*start..first.start),
        _ => None,
    };
    format!("{}{number}{}", before.unwrap_or_default(), text.get(until..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(text: &str) -> Vec<Verdict> {
        let tokens = lexer::read(text);
        check(text, &tokens).into_iter().map(|(verdict, _)| verdict).collect()
    }

    #[test]
    fn true_equalities_hold() {
        for text in [
            "17 * 23 = 391, and 4 more is 395.",
            "So 17 × 23 = 391",
            "- 17 * 23 = 391",
            "1. 17 * 23 = 391",
            "(17 * 23 = 391)",
            "17 times 23 is 391",
            "2 km = 2000 m",
            "so 2 km = 2000 m",
            "1/3 = 0.33",
            "1/8 ≈ 0.13",
            "3 m * 4 m = 12 m²",
            "$3.50 * 4 = $14",
            "15% of 80 = 12",
            "-3 + 5 = 2",
            "2 - 5 = -3",
            "-1/3 = -0.33",
            "90 km/h = 25 m/s",
        ] {
            assert!(matches!(verdicts(text).as_slice(), [Verdict::Holds(_)]), "{text}: {:?}", verdicts(text));
        }
        assert_eq!(verdicts("2 + 2 = 3 + 1 = 4").len(), 2);
    }

    #[test]
    fn wrong_equalities_are_corrected() {
        for (text, complaint) in [
            ("17 * 23 = 392", "17 * 23 = 392 does not hold: 17 * 23 is 391"),
            ("2 km = 200 m", "2 km = 200 m does not hold: 2 km is 2000 m"),
            ("3 m * 4 m = 12 m", "3 m * 4 m = 12 m does not hold: the left side is an area, the right side a length"),
            ("$3.50 * 4 = $15", "$3.50 * 4 = $15 does not hold: $3.50 * 4 is $14"),
            ("1/8 = 0.13", "1/8 = 0.13 does not hold: 1/8 is 0.125"),
            ("2/3 = 0.66", "2/3 = 0.66 does not hold: 2/3 is 2/3"),
            ("1 m / 2 = 2/3 m", "1 m / 2 = 2/3 m does not hold: 1 m / 2 is 0.5 m"),
            ("2 - 5 = -4", "2 - 5 = -4 does not hold: 2 - 5 is -3"),
            ("17 * 23 = 391 + 4", "17 * 23 = 391 + 4 does not hold: the left side is 391, the right side 395"),
            ("3 m + 2 s = 5", "3 m + 2 s cannot be: it combines a length with a time"),
        ] {
            assert_eq!(verdicts(text), [Verdict::Wrong(complaint.to_owned())], "{text}");
        }
    }

    #[test]
    fn statements_that_are_no_equalities_are_not_wrong() {
        for text in [
            "x + 3 = 7",
            "2x = 6",
            "sqrt(16) = 4",
            "the square root of 16 = 4",
            "the sum of 3 and 4 = 7",
            "the sum of 3 and 4 is 7",
            "Total = 12",
            "a = 3",
            "The root of 16 + 9 = 5",
            "5 apples + 3 apples = 8 apples",
            "This is 5",
            "f(2) = 7",
        ] {
            assert!(
                !verdicts(text).iter().any(|verdict| matches!(verdict, Verdict::Wrong(_))),
                "{text}: {:?}",
                verdicts(text)
            );
        }
    }
}
