//! Finds the expression that a prompt asks for.

use super::{
    expression::{self, Fault},
    lexer::{self, Run, Spanned, Token},
    statements::has_unit,
    units::{Dimension, Quantity, Unit},
};
use crate::is_listed;

/// The question of a prompt.
#[derive(Clone, Debug)]
pub(super) struct Question {
    pub(super) value: Quantity,
    /// The unit of the answer and its spelling: the one that is asked for, or else one of the expression.
    pub(super) unit: Option<(Unit, String)>,
    /// Whether the prompt asks for that unit.
    pub(super) unit_asked: bool,
    /// Whether no other word in the prompt can change the meaning.
    pub(super) certain: bool,
}

/// Words that do not change the meaning.
const NEUTRAL: &str = "\
    a all an and answer are as by calculate compute convert do does each equal equals evaluate exactly far long heavy \
    big large cost costs distance area time total express expression final find following for give how in is it many \
    much of out please result show simplify solve step steps tell that the then there this to value what what's with \
    work working write your you can me unit units";

/// Words of operations that this judge does not know.
const MATHEMATICAL: &str = "\
    root sqrt log ln sin cos tan exp abs factorial mod modulo remainder average mean median sum product difference \
    quotient more less than half twice double thrice third quarter rounded round nearest increase decrease discount \
    ratio";

/// Reads the question of a prompt, or returns why it cannot be read.
pub(super) fn read(prompt: &str) -> Result<Question, String> {
    let tokens = lexer::read(prompt);
    let target = target(prompt, &tokens);
    let words =
        || tokens.iter().filter_map(|spanned| if let Token::Word(word) = &spanned.token { Some(word) } else { None });
    if let Some(word) = words().find(|word| is_listed(word, MATHEMATICAL)) {
        return Err(format!("the prompt says {word:?}, which is beyond plain arithmetic with units"));
    }
    let runs = lexer::runs(&tokens);
    let asked: Vec<&Run> = runs.iter().filter(|run| is_asked(&tokens, run, target.is_some())).collect();
    let [run] = asked.as_slice() else {
        let found = if asked.is_empty() { "no expression" } else { "several expressions" };
        return Err(format!("the prompt holds {found} that could be what is asked for"));
    };
    let expression = &tokens[(*run).clone()];
    let text = lexer::text_of(prompt, expression);
    let mut value = expression::evaluate(expression).map_err(|fault| describe(text, fault))?;
    let mut certain = runs.len() == 1 && words().all(|word| is_listed(word, NEUTRAL));
    // An exclamation, or a factorial?
    certain &= !expression.last().and_then(|last| prompt.get(last.end..)).is_some_and(|rest| rest.starts_with('!'));
    let unit_asked = target.is_some();
    if let Some((unit, name)) = &target {
        if value.dimension == Dimension::NONE && unit.dimension != Dimension::NONE {
            certain = false;
            value = value.times(*unit).ok_or_else(|| describe(text, Fault::TooLarge))?;
        } else if value.dimension != unit.dimension {
            let (have, want) = (value.dimension.name(), unit.dimension.name());
            return Err(format!("the prompt asks for {want} in {name}, but {text} is {have}"));
        }
    }
    let unit = target.or_else(|| natural_unit(prompt, expression, value.dimension));
    Ok(Question { value, unit, unit_asked, certain })
}

/// Returns the last value in a reference answer.
pub(super) fn of_reference(reference: &str) -> Option<Question> {
    let tokens = lexer::read(reference);
    let runs = lexer::runs(&tokens);
    let expression = &tokens[lexer::balanced(&tokens, runs.last()?.clone(), false)];
    let value = expression::evaluate(expression).ok()?;
    let unit = natural_unit(reference, expression, value.dimension);
    Some(Question { value, unit, unit_asked: false, certain: runs.len() == 1 })
}

fn describe(text: &str, fault: Fault) -> String {
    format!("{text} has no value here: {fault}")
}

/// Returns `true` if this run can be the question: numbers joined by an operator, or a quantity to convert.
fn is_asked(tokens: &[Spanned], run: &Run, has_target: bool) -> bool {
    let run = &tokens[run.clone()];
    let numbers = run.iter().filter(|spanned| spanned.token.is_number()).count();
    numbers > 1 || has_target && (has_unit(run) || numbers == 1)
}

/// Returns the unit after "in", "to" or "as a", or after "how many".
fn target(prompt: &str, tokens: &[Spanned]) -> Option<(Unit, String)> {
    let mut found = None;
    for at in 0..tokens.len() {
        let word = |ahead: usize, word: &str| tokens.get(at + ahead).is_some_and(|spanned| spanned.token.is_word(word));
        let begin = if word(0, "how") && word(1, "many") || word(0, "as") && word(1, "a") {
            at + 2
        } else if word(0, "in") || word(0, "to") || word(0, "as") {
            at + 1
        } else {
            continue;
        };
        let rest = tokens.get(begin..).unwrap_or_default();
        if !matches!(rest.first(), Some(Spanned { token: Token::Unit(_) | Token::Currency(_), .. })) {
            continue;
        }
        let length = rest.iter().take_while(|spanned| spanned.token.is_mathematical()).count();
        let unit = rest.get(..length).unwrap_or_default();
        if let Some(read) = expression::unit(unit) {
            found = Some((read, lexer::text_of(prompt, unit).to_owned()));
        }
    }
    found
}

/// Returns a unit of the expression that fits its value.
fn natural_unit(prompt: &str, run: &[Spanned], dimension: Dimension) -> Option<(Unit, String)> {
    if dimension == Dimension::NONE {
        return None;
    }
    let name = |spanned: &Spanned| prompt.get(spanned.start..spanned.end).unwrap_or_default().to_owned();
    let of = |spanned: &Spanned| match spanned.token {
        Token::Unit(unit) | Token::Currency(unit) => Some((unit, name(spanned))),
        _ => None,
    };
    let units: Vec<_> = run.iter().filter_map(of).collect();
    let fits = |unit: &Unit| unit.dimension == dimension;
    if let Some(found) = units.iter().find(|(unit, _)| fits(unit)) {
        return Some(found.clone());
    }
    let powers = units.iter().flat_map(|(unit, name)| {
        [2, 3].map(|exponent| unit.power(exponent).map(|unit| (unit, format!("{name}^{exponent}"))))
    });
    let quotients = units.iter().flat_map(|(upper, upper_name)| {
        units
            .iter()
            .map(move |(lower, lower_name)| upper.per(*lower).map(|unit| (unit, format!("{upper_name}/{lower_name}"))))
    });
    // The number of pairs is quadratic, so only the first are tried.
    powers.chain(quotients).take(256).flatten().find(|(unit, _)| fits(unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(prompt: &str) -> (String, String) {
        let question = read(prompt).unwrap_or_else(|reason| panic!("{prompt}: {reason}"));
        let (unit, name) = question.unit.unwrap_or((Unit::NONE, String::new()));
        (question.value.value.checked_div(unit.value).unwrap().to_string(), name)
    }

    #[test]
    fn expression_is_found_among_words() {
        for (prompt, value, unit) in [
            ("What is 17 * 23 + 4?", "395", ""),
            ("Calculate (2 + 3) × 4.", "20", ""),
            ("17 * 23 + 4 = ?", "395", ""),
            ("What is 15% of 80?", "12", ""),
            ("What is 2 km + 300 m in m?", "2300", "m"),
            ("How many seconds are in 2 hours?", "7200", "seconds"),
            ("Convert 90 km/h to m/s.", "25", "m/s"),
            ("How many inches are in 5 feet?", "60", "inches"),
            ("Convert 5 in to cm", "12.7", "cm"),
            ("What is 5 in in cm?", "12.7", "cm"),
            ("What is 3/4 as a percentage?", "75", "percentage"),
            ("A rectangle: 3 m * 4 m", "12", "m^2"),
            ("What is $3.50 * 4?", "14", "$"),
            ("What is 100 km / 2 h?", "50", "km/h"),
            ("Multiply: 1,250 times 4", "5000", ""),
        ] {
            assert_eq!(asked(prompt), (value.to_owned(), unit.to_owned()), "{prompt}");
        }
    }

    #[test]
    fn prompt_beyond_plain_arithmetic_is_refused() {
        for prompt in [
            "",
            "Who wrote Hamlet?",
            "Tom has 3 apples and buys 4 more.",
            "What is the square root of 16 + 9?",
            "Solve x + 3 = 7",
            "Solve 2x + 3 = 7",
            "What is 5! + 3?",
            "What is 1/0?",
            "What is 3 m + 2 s?",
            "What is 3 m + 2 m in kg?",
            "2 + 3 or 4 + 5?",
            "What is 2 (3)?",
            "What is 17?",
        ] {
            assert!(read(prompt).is_err(), "{prompt}: {:?}", read(prompt));
        }
    }

    #[test]
    fn other_words_make_the_question_uncertain() {
        assert!(read("What is 2 + 3?").unwrap().certain);
        assert!(!read("In base 7, what is 2 + 3?").unwrap().certain);
    }
}
