//! Formulas with variables: reads them, computes them at a point, and expands them.

use std::{collections::BTreeMap, str::Chars};

use crate::arithmetic::Number;

/// How deep a formula may be nested.
const MAX_DEPTH: usize = 40;
/// The longest formula, in bytes.
const MAX_LENGTH: usize = 1_000;
/// How many terms an expanded formula may have.
const MAX_TERMS: usize = 400;
/// The largest exponent that is expanded.
const MAX_POWER: i128 = 24;

/// A value for each letter.
pub(super) type Point = [f64; 26];

pub(super) enum Formula {
    Number(Number),
    /// The letter, counted from `a`.
    Variable(usize),
    Negative(Box<Self>),
    Function(fn(f64) -> f64, Box<Self>),
    /// One of `+*/^`.
    Operation(Box<Self>, char, Box<Self>),
}

impl Formula {
    /// Reads a formula such as `2xy(y + 1)^2 / sqrt(3)`. Variables are single letters, without a space between them.
    pub(super) fn read(text: &str) -> Option<Self> {
        let text =
            text.trim().trim_end_matches(['.', ',', ';']).replace("**", "^").replace('²', "^2").replace('³', "^3");
        let mut reader = Reader { rest: text.chars(), depth: 0 };
        let formula = (text.len() <= MAX_LENGTH).then(|| reader.sum())??;
        reader.peek().is_none().then_some(formula)
    }

    /// Returns the value at a point. It is not finite where there is none.
    pub(super) fn at(&self, point: &Point) -> f64 {
        match self {
            Self::Number(number) => number.to_f64(),
            Self::Variable(letter) => point.get(*letter).copied().unwrap_or(f64::NAN),
            Self::Negative(formula) => -formula.at(point),
            Self::Function(function, of) => function(of.at(point)),
            Self::Operation(one, operation, other) => {
                let (one, other) = (one.at(point), other.at(point));
                match operation {
                    '+' => one + other,
                    '*' => one * other,
                    '/' => one / other,
                    _ => one.powf(other),
                }
            }
        }
    }

    /// Expands the formula to a fraction of polynomials. `None` if it is none, or too large.
    pub(super) fn expand(&self) -> Option<[Polynomial; 2]> {
        let one = || Polynomial::constant(Number::ONE);
        Some(match self {
            Self::Number(number) => [Polynomial::constant(*number), one()],
            Self::Variable(letter) => [Polynomial::variable(*letter)?, one()],
            Self::Function(..) => return None,
            Self::Negative(formula) => {
                let [upper, lower] = formula.expand()?;
                [upper.times(&Polynomial::constant(Number::integer(-1)))?, lower]
            }
            Self::Operation(base, '^', exponent) => {
                let Self::Number(exponent) = **exponent else { return None };
                let ([upper, lower], power) =
                    (base.expand()?, exponent.as_integer().filter(|power| *power <= MAX_POWER)?);
                let power = |base: &Polynomial| (0..power).try_fold(one(), |product, _| product.times(base));
                [power(&upper)?, power(&lower)?]
            }
            Self::Operation(left, operation, right) => {
                let ([a, b], [c, d]) = (left.expand()?, right.expand()?);
                match operation {
                    '*' => [a.times(&c)?, b.times(&d)?],
                    '/' if c.0.is_empty() => return None,
                    '/' => [a.times(&d)?, b.times(&c)?],
                    _ => [a.times(&d)?.plus(&c.times(&b)?)?, b.times(&d)?],
                }
            }
        })
    }
}

/// A polynomial: the factor of each product of powers. None is zero, so equal polynomials are equal.
#[derive(PartialEq)]
pub(super) struct Polynomial(BTreeMap<[u8; 26], Number>);

impl Polynomial {
    fn constant(number: Number) -> Self {
        Self(if number.is_zero() { BTreeMap::new() } else { BTreeMap::from([([0; 26], number)]) })
    }

    fn variable(letter: usize) -> Option<Self> {
        let mut powers = [0; 26];
        *powers.get_mut(letter)? = 1;
        Some(Self(BTreeMap::from([(powers, Number::ONE)])))
    }

    fn plus(mut self, other: &Self) -> Option<Self> {
        for (powers, factor) in &other.0 {
            self.add(*powers, *factor)?;
        }
        Some(self)
    }

    pub(super) fn times(&self, other: &Self) -> Option<Self> {
        let mut product = Self(BTreeMap::new());
        for (left, factor) in &self.0 {
            for (right, by) in &other.0 {
                let mut powers = *left;
                for (power, more) in powers.iter_mut().zip(right) {
                    *power = power.checked_add(*more)?;
                }
                product.add(powers, factor.checked_mul(*by)?)?;
            }
        }
        (product.0.len() <= MAX_TERMS).then_some(product)
    }

    fn add(&mut self, powers: [u8; 26], factor: Number) -> Option<()> {
        let sum = self.0.remove(&powers).unwrap_or(Number::integer(0)).checked_add(factor)?;
        if !sum.is_zero() {
            self.0.insert(powers, sum);
        }
        Some(())
    }
}

struct Reader<'a> {
    rest: Chars<'a>,
    depth: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<char> {
        self.rest.clone().find(|letter| !letter.is_whitespace())
    }

    fn next_if(&mut self, wanted: impl Fn(char) -> bool) -> Option<char> {
        let found = self.peek().filter(|letter| wanted(*letter))?;
        self.rest.find(|letter| *letter == found)
    }

    fn sum(&mut self) -> Option<Formula> {
        let mut sum = self.product()?;
        while let Some(sign) = self.next_if(|sign| matches!(sign, '+' | '-' | '−')) {
            let term = self.product()?;
            sum = operation(sum, '+', if sign == '+' { term } else { Formula::Negative(Box::new(term)) });
        }
        Some(sum)
    }

    fn product(&mut self) -> Option<Formula> {
        let mut product = self.signed()?;
        loop {
            product = match self.peek() {
                Some(sign @ ('*' | '×' | '·' | '/' | '÷')) => {
                    self.next_if(|_| true);
                    operation(product, if matches!(sign, '/' | '÷') { '/' } else { '*' }, self.signed()?)
                }
                Some('(') => operation(product, '*', self.power()?),
                // `2x`, `2 sin(x)`, `xy`, and no words of a sentence: after a letter, there is no space.
                Some(next)
                    if next.is_ascii_alphabetic()
                        && (self.rest.as_str().starts_with(next) || matches!(product, Formula::Number(_))) =>
                {
                    operation(product, '*', self.power()?)
                }
                _ => return Some(product),
            };
        }
    }

    fn signed(&mut self) -> Option<Formula> {
        match self.next_if(|sign| matches!(sign, '-' | '−')) {
            Some(_) => Some(Formula::Negative(Box::new(self.nested(Self::signed)?))),
            None => self.power(),
        }
    }

    fn power(&mut self) -> Option<Formula> {
        let base = self.atom()?;
        match self.next_if(|sign| sign == '^') {
            Some(_) => Some(operation(base, '^', self.nested(Self::signed)?)),
            None => Some(base),
        }
    }

    fn atom(&mut self) -> Option<Formula> {
        if self.next_if(|open| open == '(').is_some() {
            let inner = self.nested(Self::sum)?;
            return self.next_if(|close| close == ')').map(|_| inner);
        }
        let text = self.rest.as_str().trim_start();
        let is_number = text.starts_with(|digit: char| digit.is_ascii_digit());
        let length = text.find(|letter: char| {
            if is_number { !letter.is_ascii_digit() && letter != '.' } else { !letter.is_ascii_alphabetic() }
        });
        let (word, rest) = text.split_at(length.unwrap_or(text.len()));
        if is_number {
            self.rest = rest.chars();
            return Some(Formula::Number(Number::decimal(word)?));
        }
        let function: Option<fn(f64) -> f64> = match word {
            "sqrt" => Some(f64::sqrt),
            "sin" => Some(f64::sin),
            "cos" => Some(f64::cos),
            "tan" => Some(f64::tan),
            "exp" => Some(f64::exp),
            "ln" | "log" => Some(f64::ln),
            "abs" => Some(f64::abs),
            _ => None,
        };
        if let Some(function) = function.filter(|_| rest.trim_start().starts_with('(')) {
            self.rest = rest.chars();
            return Some(Formula::Function(function, Box::new(self.atom()?)));
        }
        let letter = self.next_if(|letter| letter.is_ascii_lowercase()).filter(|_| word.len() < 3)?;
        Some(Formula::Variable(usize::from(u8::try_from(letter).ok()? - b'a')))
    }

    fn nested(&mut self, read: impl FnOnce(&mut Self) -> Option<Formula>) -> Option<Formula> {
        self.depth += 1;
        let read = (self.depth <= MAX_DEPTH).then(|| read(self))??;
        self.depth -= 1;
        Some(read)
    }
}

fn operation(one: Formula, operation: char, other: Formula) -> Formula {
    Formula::Operation(Box::new(one), operation, Box::new(other))
}
