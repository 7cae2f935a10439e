//! Splits text into tokens, and finds the expressions among the words.

use std::ops::Range;

use super::units::{Number, Unit};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// A number and how many decimal places it was written with.
    Number(Number, u32),
    Plus,
    Minus,
    Times,
    /// "of" after a quantity: times.
    Of,
    Over,
    Power,
    Open,
    Close,
    /// A word that may be a unit.
    Unit(Unit),
    /// A currency sign, such as `$`, before the number.
    Currency(Unit),
    /// `=`.
    Equal,
    /// `≈`.
    About,
    /// A number that is too large.
    TooLong,
    Word(String),
    /// The end of a clause, or any other character.
    Stop,
}

/// A token with the bytes where it begins and ends.
#[derive(Clone, Debug)]
pub(super) struct Spanned {
    pub(super) token: Token,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Token {
    /// Returns `true` if the token can be part of an expression.
    pub(super) const fn is_mathematical(&self) -> bool {
        !matches!(self, Self::Equal | Self::About | Self::Word(_) | Self::Stop)
    }

    pub(super) const fn is_operator(&self) -> bool {
        matches!(self, Self::Plus | Self::Minus | Self::Times | Self::Of | Self::Over | Self::Power)
    }

    pub(super) const fn is_number(&self) -> bool {
        matches!(self, Self::Number(..) | Self::TooLong)
    }

    /// Returns `true` if the token can end a quantity, so that a unit may follow.
    const fn ends_quantity(&self) -> bool {
        matches!(self, Self::Number(..) | Self::TooLong | Self::Close | Self::Unit(_))
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        matches!(self, Self::Word(own) if own.eq_ignore_ascii_case(word))
    }
}

/// Returns the tokens of a text, and decides which of its words are units.
pub(super) fn read(text: &str) -> Vec<Spanned> {
    let mut tokens = tokens(text);
    settle_units(text, &mut tokens);
    tokens
}

pub(super) fn tokens(text: &str) -> Vec<Spanned> {
    let mut lexer = Lexer { text, at: 0, tokens: Vec::new() };
    while let Some(next) = lexer.peek() {
        lexer.step(next);
    }
    lexer.tokens
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    tokens: Vec<Spanned>,
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn push(&mut self, token: Token, length: usize) {
        self.tokens.push(Spanned { token, start: self.at, end: self.at + length });
        self.at += length;
    }

    fn step(&mut self, next: char) {
        let rest = self.rest();
        let starts_with_digit = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        if starts_with_digit(rest) || rest.strip_prefix('.').is_some_and(starts_with_digit) {
            return self.number(rest);
        }
        if let Some(after) = rest.strip_prefix("**") {
            // It may be Markdown's bold. A power has numbers on both sides.
            let power = self.follows_quantity() && starts_with_digit(after.trim_start());
            return if power { self.push(Token::Power, 2) } else { self.at += 2 };
        }
        let length = next.len_utf8();
        let token = match next {
            // The marker of a list item.
            '-' | '*' | '+' if self.begins_line() && rest[1..].starts_with(' ') => Token::Stop,
            '+' => Token::Plus,
            '-' | '−' | '–' => Token::Minus,
            '*' | '×' | '·' | '⋅' => Token::Times,
            '/' | '÷' => Token::Over,
            '^' => Token::Power,
            '(' | '[' => Token::Open,
            ')' | ']' => Token::Close,
            '=' => Token::Equal,
            '≈' | '≅' => Token::About,
            '²' | '³' => {
                self.push(Token::Power, 0);
                Token::Number(Number::integer(if next == '²' { 2 } else { 3 }), 0)
            }
            '$' | '€' | '£' => Unit::named(next.encode_utf8(&mut [0; 4])).map_or(Token::Stop, Token::Currency),
            '%' => Unit::named("%").map_or(Token::Stop, Token::Unit),
            // Marks of emphasis and code are ignored.
            '`' | '_' | '\\' => return self.at += length,
            c if c.is_alphabetic() => return self.word(rest),
            c if c.is_whitespace() && c != '\n' => return self.at += length,
            _ => Token::Stop,
        };
        self.push(token, length);
    }

    /// Reads a number: digits, with commas before groups of three, and decimals.
    fn number(&mut self, text: &str) {
        let bytes = text.as_bytes();
        let digits = |from: usize| bytes.iter().skip(from).take_while(|byte| byte.is_ascii_digit()).count();
        let mut end = digits(0);
        if (1..=3).contains(&end) {
            while bytes.get(end) == Some(&b',') && digits(end + 1) == 3 {
                end += 4;
            }
        }
        let mut places = 0;
        if bytes.get(end) == Some(&b'.') {
            places = digits(end + 1);
            end += if places > 0 { places + 1 } else { 0 };
        }
        let number = Number::decimal(&text[..end]).zip(u32::try_from(places).ok());
        self.push(number.map_or(Token::TooLong, |(number, places)| Token::Number(number, places)), end);
    }

    fn word(&mut self, text: &str) {
        let begins_factor = |c: char| matches!(c, '(' | '$' | '.') || c.is_ascii_digit();
        let end = text.find(|c: char| !c.is_alphabetic() && !c.is_ascii_digit() && c != '\'').unwrap_or(text.len());
        let mut word = &text[..end];
        // "3x4": letters end where digits begin, except in units such as m2.
        if let Some(digit) = word.find(|c: char| c.is_ascii_digit()).filter(|_| Unit::named(word).is_none()) {
            word = &word[..digit];
        }
        let token = match word.to_lowercase().as_str() {
            "plus" => Token::Plus,
            "minus" => Token::Minus,
            "times" => Token::Times,
            // Otherwise it is the unknown of an equation.
            "x" if self.follows_quantity() && text[1..].trim_start().starts_with(begins_factor) => Token::Times,
            "over" if self.follows_quantity() => Token::Over,
            "of" if self.follows_quantity() => Token::Of,
            "divided" | "multiplied" if self.follows_quantity() => match after(text, word, "by") {
                Some(length) => {
                    let operator = if word.starts_with(['d', 'D']) { Token::Over } else { Token::Times };
                    return self.push(operator, length);
                }
                None => Token::Word(word.to_owned()),
            },
            "squared" | "cubed" if self.follows_quantity() => {
                self.push(Token::Power, 0);
                Token::Number(Number::integer(if word.starts_with(['s', 'S']) { 2 } else { 3 }), 0)
            }
            "equals" => Token::Equal,
            shape @ ("square" | "cubic") => {
                let exponent = if shape == "square" { 2 } else { 3 };
                return self.shaped(text, word, exponent);
            }
            "per" if self.follows_quantity() => Token::Over,
            _ => Unit::named(word).map_or_else(|| Token::Word(word.to_owned()), Token::Unit),
        };
        self.push(token, word.len());
    }

    /// Reads "square metres", "cubic centimetres".
    fn shaped(&mut self, text: &str, word: &str, exponent: i128) {
        let base = text[word.len()..].trim_start();
        let name = &base[..base.find(|c: char| !c.is_alphabetic()).unwrap_or(base.len())];
        match Unit::named(name).and_then(|unit| unit.power(exponent)) {
            Some(unit) => self.push(Token::Unit(unit), text.len() - base.len() + name.len()),
            None => self.push(Token::Word(word.to_owned()), word.len()),
        }
    }

    fn begins_line(&self) -> bool {
        let before = self.text.get(..self.at).unwrap_or_default();
        before.rsplit('\n').next().is_none_or(|line| line.trim_start().is_empty())
    }

    fn follows_quantity(&self) -> bool {
        self.tokens.last().is_some_and(|last| last.token.ends_quantity())
    }
}

/// Returns the length of `first` and `second` with spaces in between, if `text` begins with them.
fn after(text: &str, first: &str, second: &str) -> Option<usize> {
    let rest = text[first.len()..].trim_start();
    let tail = rest.strip_prefix(second).filter(|tail| !tail.starts_with(char::is_alphanumeric))?;
    Some(text.len() - tail.len())
}

/// A range of tokens that form one expression.
pub(super) type Run = Range<usize>;

/// Words before which "12 in" does not mean twelve inches.
const IN_WORDS: [&str; 9] = ["total", "all", "the", "a", "an", "each", "this", "my", "our"];

/// Turns units into words where the neighbouring tokens show that they are words.
fn settle_units(text: &str, tokens: &mut [Spanned]) {
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

/// Returns the expressions of a text: longest runs of mathematical tokens that begin with a number, sign or bracket.
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

/// Returns the expression that begins at `at`. It is empty if there is none.
pub(super) fn run_from(tokens: &[Spanned], at: usize) -> Run {
    let begins = |spanned: &Spanned| !matches!(spanned.token, Token::Unit(_) | Token::Of);
    let rest = tokens.get(at..).unwrap_or_default();
    if !rest.first().is_some_and(begins) {
        return at..at;
    }
    at..at + rest.iter().take_while(|spanned| spanned.token.is_mathematical()).count()
}

/// Returns the part of a run without unmatched brackets: the last such part, or the first.
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

/// Returns `true` if the run is a single quantity: a number or a simple fraction, with or without a unit.
pub(super) fn is_plain(tokens: &[Spanned]) -> bool {
    let is = |at: usize, kind: fn(&Token) -> bool| tokens.get(at).is_some_and(|spanned| kind(&spanned.token));
    // In "12 m^2" only the 12 counts.
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

/// Returns the text of a run.
pub(super) fn text_of<'a>(text: &'a str, tokens: &[Spanned]) -> &'a str {
    match (tokens.first(), tokens.last()) {
        (Some(first), Some(last)) => text.get(first.start..last.end).unwrap_or_default().trim(),
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<Token> {
        tokens(text).into_iter().map(|spanned| spanned.token).collect()
    }

    fn integer(value: i128) -> Token {
        Token::Number(Number::integer(value), 0)
    }

    #[test]
    fn commas_separate_thousands_or_clauses() {
        assert_eq!(kinds("1,234,567"), [integer(1_234_567)]);
        assert_eq!(kinds("391, 4"), [integer(391), Token::Stop, integer(4)]);
        assert_eq!(kinds("1,2"), [integer(1), Token::Stop, integer(2)]);
    }

    #[test]
    fn point_ends_a_sentence_or_begins_decimals() {
        assert_eq!(kinds("3."), [integer(3), Token::Stop]);
        assert_eq!(kinds(".5"), [Token::Number(Number::fraction(1, 2).unwrap(), 1)]);
    }

    #[test]
    fn operators_may_be_words() {
        let expected = [integer(6), Token::Over, integer(2), Token::Times, integer(3)];
        assert_eq!(kinds("6 divided by 2 multiplied by 3"), expected);
        assert_eq!(kinds("6 ÷ 2 x 3"), expected);
        assert_eq!(kinds("6/2x3"), expected);
    }

    #[test]
    fn bold_is_not_a_power() {
        assert_eq!(kinds("**395**"), [integer(395)]);
        assert_eq!(kinds("2**3"), [integer(2), Token::Power, integer(3)]);
    }
}
