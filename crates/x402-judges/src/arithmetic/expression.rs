//! Evaluates expressions exactly, with units.

use std::fmt;

use super::{
    lexer::{Spanned, Token},
    units::{Dimension, Number, Quantity, Unit},
};

/// How deep brackets, signs and powers may nest.
const MAX_DEPTH: usize = 64;

/// The reason why an expression has no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The expression cannot be read.
    Syntax,
    /// The expression divides by zero.
    DivisionByZero,
    /// A number or power is too large to be exact.
    TooLarge,
    /// The expression adds different dimensions.
    Mismatch(Dimension, Dimension),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax => f.write_str("it cannot be read"),
            Self::DivisionByZero => f.write_str("it divides by zero"),
            Self::TooLarge => f.write_str("its numbers are too large to be checked exactly"),
            Self::Mismatch(left, right) => write!(f, "it combines {} with {}", left.name(), right.name()),
        }
    }
}

/// Evaluates the expression that consists of all `tokens`.
pub(super) fn evaluate(tokens: &[Spanned]) -> Result<Quantity, Fault> {
    let mut parser = Parser { tokens, at: 0, depth: 0 };
    let value = parser.sum()?;
    if parser.at < tokens.len() { Err(Fault::Syntax) } else { Ok(value) }
}

/// Reads the unit that consists of all `tokens`, such as `km/h`.
pub(super) fn unit(tokens: &[Spanned]) -> Option<Unit> {
    let mut parser = Parser { tokens, at: 0, depth: 0 };
    let first = match parser.currency() {
        Some(unit) => parser.exponent(unit),
        None => parser.unit_power(),
    };
    let mut product = first.ok()?;
    while parser.at < tokens.len() {
        let over = parser.take(&Token::Over);
        if !over && !parser.take(&Token::Times) {
            return None;
        }
        let next = parser.unit_power().ok()?;
        product = if over { product.per(next)? } else { product.times(next)? };
    }
    Some(product)
}

struct Parser<'a> {
    tokens: &'a [Spanned],
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<&Token> {
        self.ahead(0)
    }

    fn ahead(&self, by: usize) -> Option<&Token> {
        self.tokens.get(self.at + by).map(|spanned| &spanned.token)
    }

    fn take(&mut self, wanted: &Token) -> bool {
        let found = self.peek() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T, Fault>) -> Result<T, Fault> {
        if self.depth == MAX_DEPTH {
            return Err(Fault::Syntax);
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    fn sum(&mut self) -> Result<Quantity, Fault> {
        let mut total = self.product()?;
        loop {
            let add: fn(Number, Number) -> Option<Number> = match self.peek() {
                Some(Token::Plus) => Number::checked_add,
                Some(Token::Minus) => Number::checked_sub,
                _ => return Ok(total),
            };
            self.at += 1;
            let term = self.product()?;
            if term.dimension != total.dimension {
                return Err(Fault::Mismatch(total.dimension, term.dimension));
            }
            total.value = add(total.value, term.value).ok_or(Fault::TooLarge)?;
        }
    }

    fn product(&mut self) -> Result<Quantity, Fault> {
        let mut total = self.signed()?;
        loop {
            let over = match self.peek() {
                Some(Token::Times | Token::Of) => false,
                Some(Token::Over) => true,
                _ => return Ok(total),
            };
            self.at += 1;
            let factor = match self.peek() {
                // "km/h", "$5 per kg": a unit alone means one of it.
                Some(Token::Unit(_)) => self.unit_power()?,
                _ => self.signed()?,
            };
            total = if over { divide(total, factor)? } else { multiply(total, factor)? };
        }
    }

    fn signed(&mut self) -> Result<Quantity, Fault> {
        if self.take(&Token::Minus) {
            return negative(self.nested(Self::signed)?);
        }
        if self.take(&Token::Plus) {
            return self.nested(Self::signed);
        }
        self.power()
    }

    /// Reads a quantity with an exponent. The exponent belongs to the unit if there is one.
    fn power(&mut self) -> Result<Quantity, Fault> {
        if let Some(unit) = self.currency() {
            return multiply(self.number()?, unit);
        }
        let base = match self.peek() {
            Some(Token::Open) => self.bracket()?,
            _ if self.is_fraction_of_unit() => {
                let upper = self.number()?;
                self.at += 1;
                divide(upper, self.number()?)?
            }
            _ => self.number()?,
        };
        let raised = self.exponent(base)?;
        // "8 €"
        if let Some(unit) = self.currency() {
            return multiply(raised, unit);
        }
        if matches!(self.peek(), Some(Token::Unit(_))) { multiply(raised, self.unit_power()?) } else { Ok(raised) }
    }

    /// Returns `true` if a fraction of a unit begins here: `2/3 h` is two thirds of an hour, `2 / 3 h` is two by three hours.
    fn is_fraction_of_unit(&self) -> bool {
        let rest = self.tokens.get(self.at..).unwrap_or_default();
        let [upper, over, lower, unit, ..] = rest else { return false };
        let kinds = (&upper.token, &over.token, &lower.token, &unit.token);
        matches!(kinds, (Token::Number(_, 0), Token::Over, Token::Number(_, 0), Token::Unit(_)))
            && upper.end == over.start
            && over.end == lower.start
    }

    /// Reads a number, or a whole number followed by a fraction.
    fn number(&mut self) -> Result<Quantity, Fault> {
        let value = match self.peek() {
            Some(Token::Number(value, _)) => *value,
            Some(Token::TooLong) => return Err(Fault::TooLarge),
            _ => return Err(Fault::Syntax),
        };
        self.at += 1;
        let value = match (self.peek(), self.ahead(1), self.ahead(2)) {
            (Some(Token::Number(upper, 0)), Some(Token::Over), Some(Token::Number(lower, 0)))
                if value.as_integer().is_some() && !lower.is_zero() =>
            {
                let fraction = upper.checked_div(*lower).and_then(|fraction| value.checked_add(fraction));
                self.at += 3;
                fraction.ok_or(Fault::TooLarge)?
            }
            _ => value,
        };
        Ok(Quantity { value, dimension: Dimension::NONE })
    }

    fn unit_power(&mut self) -> Result<Quantity, Fault> {
        let Some(&Token::Unit(unit)) = self.peek() else { return Err(Fault::Syntax) };
        self.at += 1;
        self.exponent(unit)
    }

    fn currency(&mut self) -> Option<Unit> {
        let Some(&Token::Currency(unit)) = self.peek() else { return None };
        self.at += 1;
        Some(unit)
    }

    fn exponent(&mut self, base: Quantity) -> Result<Quantity, Fault> {
        if !self.take(&Token::Power) {
            return Ok(base);
        }
        let exponent = self.nested(Self::exponent_operand)?;
        let whole =
            exponent.value.as_integer().filter(|_| exponent.dimension == Dimension::NONE).ok_or(Fault::Syntax)?;
        if base.value.is_zero() && whole < 0 {
            return Err(Fault::DivisionByZero);
        }
        base.power(whole).ok_or(Fault::TooLarge)
    }

    /// Reads an exponent. It has no unit: in `2^3 m` the unit belongs to the power.
    fn exponent_operand(&mut self) -> Result<Quantity, Fault> {
        if self.take(&Token::Minus) {
            return negative(self.nested(Self::exponent_operand)?);
        }
        let base = if matches!(self.peek(), Some(Token::Open)) { self.bracket()? } else { self.number()? };
        self.exponent(base)
    }

    fn bracket(&mut self) -> Result<Quantity, Fault> {
        self.at += 1;
        let inner = self.nested(Self::sum)?;
        if self.take(&Token::Close) { Ok(inner) } else { Err(Fault::Syntax) }
    }
}

fn negative(quantity: Quantity) -> Result<Quantity, Fault> {
    Ok(Quantity { value: quantity.value.checked_neg().ok_or(Fault::TooLarge)?, ..quantity })
}

fn multiply(a: Quantity, b: Quantity) -> Result<Quantity, Fault> {
    a.times(b).ok_or(Fault::TooLarge)
}

fn divide(a: Quantity, b: Quantity) -> Result<Quantity, Fault> {
    if b.value.is_zero() {
        return Err(Fault::DivisionByZero);
    }
    a.per(b).ok_or(Fault::TooLarge)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::lexer::tokens, *};

    fn value(text: &str) -> Result<String, Fault> {
        evaluate(&tokens(text)).map(|quantity| quantity.value.to_string())
    }

    #[test]
    fn precedence_is_the_usual_one() {
        for (text, result) in [
            ("17 * 23 + 4", "395"),
            ("2 + 3 * 4", "14"),
            ("(2 + 3) × 4", "20"),
            ("2^3^2", "512"),
            ("-2^2", "-4"),
            ("2^-1", "0.5"),
            ("8 / 4 / 2", "1"),
            ("10 - 4 - 3", "3"),
            ("1/3 + 1/6", "0.5"),
            ("2 1/2 + 1", "3.5"),
            ("15% of 80", "12"),
            ("1,234.5 * 2", "2469"),
            ("3 squared plus 1", "10"),
        ] {
            assert_eq!(value(text).as_deref(), Ok(result), "{text}");
        }
    }

    #[test]
    fn units_are_carried_along() {
        for (text, same) in [
            ("2 km + 300 m", "2300 m"),
            ("60 km/h * 2 h", "120 km"),
            ("100 km / 2 h", "50 km/h"),
            ("3 m * 4 m", "12 m^2"),
            ("12 m²", "12 square metres"),
            ("$3.50 * 4", "14 dollars"),
            ("2 l", "2000 cm^3"),
            ("2^3 m", "8 m"),
            ("2/3 h", "40 min"),
            ("6 m / 3 s", "2 m/s"),
        ] {
            assert_eq!(evaluate(&tokens(text)), evaluate(&tokens(same)), "{text}");
            assert!(evaluate(&tokens(text)).is_ok(), "{text}");
        }
        let mismatch = evaluate(&tokens("3 m + 2 s"));
        assert!(matches!(mismatch, Err(Fault::Mismatch(..))));
    }

    #[test]
    fn what_is_no_expression_is_refused() {
        for text in ["", "+", "2 +", "(2", "2)", "2 3", "2 (3)", "* 4", "2^(1/2)", "2 ^ (1 m)"] {
            assert_eq!(value(text), Err(Fault::Syntax), "{text}");
        }
        assert_eq!(value("1/(2-2)"), Err(Fault::DivisionByZero));
        assert_eq!(value("0^-1"), Err(Fault::DivisionByZero));
        assert_eq!(value("9^999999999"), Err(Fault::TooLarge));
        assert_eq!(value(&"9".repeat(60)), Err(Fault::TooLarge));
        assert_eq!(value(&format!("{}1{}", "(".repeat(5_000), ")".repeat(5_000))), Err(Fault::Syntax));
        assert_eq!(value(&format!("{}1", "-".repeat(5_000))), Err(Fault::Syntax));
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "[0-9 .,+*/^()$%=mkghsin²-]{0,60}") {
            let tokens = tokens(&text);
            let _ = (evaluate(&tokens), unit(&tokens));
        }
    }
}
