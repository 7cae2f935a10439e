//! Finds expressions among words.

use super::lexer::{Spanned, Token};

/// The range of a text's tokens that one expression takes up.
pub(super) type Run = std::ops::Range<usize>;

/// Words after which "12 in" is not twelve inches.
const IN_WORDS: [&str; 9] = ["total", "all", "the", "a", "an", "each", "this", "my", "our"];

/// Decides, now that all tokens are known, which units are words after all.
pub(super) fn settle_units(text: &str, tokens: &mut [Spanned]) {
    for at in 0..tokens.len() {
        let Some(Spanned { token: Token::Unit(_), start, end }) = tokens.get(at) else { continue };
        let name = text.get(*start..*end).unwrap_or_default().to_owned();
        let is_in = name.eq_ignore_ascii_case("in");
        let previous = at.checked_sub(1).and_then(|before| tokens.get(before)).map(|spanned| &spanned.token);
        let next = tokens.get(at + 1);
        let is_unit = match previous {
            Some(Token::Number(..) | Token::TooLong | Token::Close) if is_in => match next {
                Some(Spanned { token: Token::Unit(_), start, end }) => text.get(*start..*end) == Some("in"),
                Some(Spanned { token: Token::Word(word), .. }) => !IN_WORDS.contains(&word.to_lowercase().as_str()),
                _ => true,
            },
            _ if is_in => {
                matches!(previous, Some(Token::Word(word)) if word == "in" || word.eq_ignore_ascii_case("many"))
            }
            _ => true,
        };
        if let Some(spanned) = tokens.get_mut(at).filter(|_| !is_unit) {
            spanned.token = Token::Word(name);
        }
    }
}

/// The expressions of a text: as many mathematical tokens in a row as there are, from a number, sign or bracket on.
pub(super) fn runs(tokens: &[Spanned]) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let run = run_from(tokens, at);
        if run.is_empty() {
            at += 1;
        } else {
            at = run.end;
            runs.push(run);
        }
    }
    runs.retain(|run| tokens[run.clone()].iter().any(|spanned| spanned.token.is_number()));
    runs
}

/// The expression that begins exactly at `at`; empty if none does.
pub(super) fn run_from(tokens: &[Spanned], at: usize) -> Run {
    let begins = |spanned: &Spanned| !matches!(spanned.token, Token::Unit(_) | Token::Of);
    let rest = tokens.get(at..).unwrap_or_default();
    if !rest.first().is_some_and(begins) {
        return at..at;
    }
    at..at + rest.iter().take_while(|spanned| spanned.token.is_mathematical()).count()
}

/// The part of a run between brackets that have no counterpart in it: the last such part, or the first.
pub(super) fn balanced(tokens: &[Spanned], run: Run, last: bool) -> Run {
    let mut open = Vec::new();
    let mut unmatched = Vec::new();
    for at in run.clone() {
        match tokens.get(at).map(|spanned| &spanned.token) {
            Some(Token::Open) => open.push(at),
            Some(Token::Close) if open.pop().is_none() => unmatched.push(at),
            _ => {}
        }
    }
    unmatched.extend(open);
    if last {
        unmatched.iter().max().map_or(run.start, |at| at + 1)..run.end
    } else {
        run.start..unmatched.iter().min().copied().unwrap_or(run.end)
    }
}

/// Whether the run holds a lone quantity: one number, or a simple fraction, with or without a unit.
pub(super) fn is_plain(tokens: &[Spanned]) -> bool {
    let is = |at: usize, kind: fn(&Token) -> bool| tokens.get(at).is_some_and(|spanned| kind(&spanned.token));
    // Of "12 m^2" only the 12 counts.
    let is_exponent = |at: usize| {
        at >= 2 && is(at - 1, |token| *token == Token::Power) && is(at - 2, |token| matches!(token, Token::Unit(_)))
    };
    let counts = |at: &usize| is(*at, Token::is_number) && !is_exponent(*at);
    let numbers: Vec<usize> = (0..tokens.len()).filter(counts).collect();
    let is_fraction = |upper: usize, lower: usize| upper + 2 == lower && is(upper + 1, |token| *token == Token::Over);
    match *numbers.as_slice() {
        [_] => true,
        [upper, lower] => is_fraction(upper, lower),
        [whole, upper, lower] => whole + 1 == upper && is_fraction(upper, lower),
        _ => false,
    }
}

/// The text of a run.
pub(super) fn text_of<'a>(text: &'a str, tokens: &[Spanned]) -> &'a str {
    match (tokens.first(), tokens.last()) {
        (Some(first), Some(last)) => text.get(first.start..last.end).unwrap_or_default().trim(),
        _ => "",
    }
}
