//! Exact rational numbers.

use std::{cmp::Ordering, fmt};

/// A fraction in lowest terms. Every operation is exact, or `None` where the result does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number {
    numerator: i128,
    /// Positive.
    denominator: i128,
}

/// The largest exponent; larger ones hardly ever fit.
const MAX_EXPONENT: u32 = 128;
/// How many decimal places are written out before a fraction is shown instead.
const MAX_PLACES: u32 = 12;

impl Number {
    pub(super) const ONE: Self = Self::integer(1);

    pub(super) const fn integer(value: i128) -> Self {
        Self { numerator: value, denominator: 1 }
    }

    pub(super) fn fraction(numerator: i128, denominator: i128) -> Option<Self> {
        if denominator == 0 {
            return None;
        }
        let divisor = i128::try_from(gcd(numerator.unsigned_abs(), denominator.unsigned_abs())).ok()?;
        let (numerator, denominator) = (numerator.checked_div(divisor)?, denominator.checked_div(divisor)?);
        if denominator < 0 {
            return Some(Self { numerator: numerator.checked_neg()?, denominator: denominator.checked_neg()? });
        }
        Some(Self { numerator, denominator })
    }

    /// Reads digits with at most one decimal point; anything else in the text is skipped (separators).
    pub(super) fn decimal(text: &str) -> Option<Self> {
        let (mut value, mut scale, mut places) = (0_i128, 1_i128, false);
        for c in text.chars() {
            if let Some(digit) = c.to_digit(10) {
                value = value.checked_mul(10)?.checked_add(digit.into())?;
                if places {
                    scale = scale.checked_mul(10)?;
                }
            }
            places |= c == '.';
        }
        Self::fraction(value, scale)
    }

    pub(super) const fn is_zero(self) -> bool {
        self.numerator == 0
    }

    pub(super) const fn as_integer(self) -> Option<i128> {
        if self.denominator == 1 { Some(self.numerator) } else { None }
    }

    pub(super) fn checked_neg(self) -> Option<Self> {
        Some(Self { numerator: self.numerator.checked_neg()?, ..self })
    }

    pub(super) fn checked_add(self, other: Self) -> Option<Self> {
        let left = self.numerator.checked_mul(other.denominator)?;
        let right = other.numerator.checked_mul(self.denominator)?;
        Self::fraction(left.checked_add(right)?, self.denominator.checked_mul(other.denominator)?)
    }

    pub(super) fn checked_sub(self, other: Self) -> Option<Self> {
        self.checked_add(other.checked_neg()?)
    }

    pub(super) fn checked_mul(self, other: Self) -> Option<Self> {
        // Reduced crosswise first, so that only results that do not fit overflow.
        let a = Self::fraction(self.numerator, other.denominator)?;
        let b = Self::fraction(other.numerator, self.denominator)?;
        Self::fraction(a.numerator.checked_mul(b.numerator)?, a.denominator.checked_mul(b.denominator)?)
    }

    /// `None` also for a division by zero.
    pub(super) fn checked_div(self, other: Self) -> Option<Self> {
        self.checked_mul(Self::fraction(other.denominator, other.numerator)?)
    }

    pub(super) fn checked_pow(self, exponent: i128) -> Option<Self> {
        let power = u32::try_from(exponent.unsigned_abs()).ok().filter(|power| *power <= MAX_EXPONENT)?;
        let (numerator, denominator) = (self.numerator.checked_pow(power)?, self.denominator.checked_pow(power)?);
        if exponent < 0 {
            return Self::fraction(denominator, numerator);
        }
        Self::fraction(numerator, denominator)
    }

    /// Whether `shown`, written with so many decimal places, is this number rounded to them.
    pub(super) fn rounds_to(self, shown: Self, places: u32) -> bool {
        let close = || {
            let difference = self.checked_sub(shown)?;
            let double = Self::fraction(difference.numerator.checked_abs()?, difference.denominator)?
                .checked_mul(Self::integer(2))?;
            let unit = Self::fraction(1, 10_i128.checked_pow(places)?)?;
            let excess = double.checked_sub(unit)?;
            Some(excess.numerator.cmp(&0) != Ordering::Greater)
        };
        close() == Some(true)
    }

    /// The number of decimal places it takes to write it exactly, if that is possible.
    pub(super) fn places(self) -> Option<u32> {
        let mut scale = 1_i128;
        for places in 0..=MAX_PLACES {
            if scale % self.denominator == 0 {
                return Some(places);
            }
            scale = scale.checked_mul(10)?;
        }
        None
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(places @ 1..) = self.places() else {
            return match self.denominator {
                1 => write!(f, "{}", self.numerator),
                denominator => write!(f, "{}/{denominator}", self.numerator),
            };
        };
        let digits = usize::try_from(places).unwrap_or_default();
        let denominator = self.denominator.unsigned_abs();
        let (mut rest, whole) =
            (self.numerator.unsigned_abs() % denominator, self.numerator.unsigned_abs() / denominator);
        let mut decimals = String::with_capacity(digits);
        for _ in 0..digits {
            // The denominator divides 10^12, so this fits.
            rest *= 10;
            decimals.push_str(&(rest / denominator).to_string());
            rest %= denominator;
        }
        write!(f, "{}{whole}.{decimals}", if self.numerator < 0 { "-" } else { "" })
    }
}

fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Number;

    fn number(text: &str) -> Number {
        match text.split_once('/') {
            Some((a, b)) => Number::fraction(a.parse().unwrap(), b.parse().unwrap()).unwrap(),
            None => Number::decimal(text).unwrap(),
        }
    }

    #[test]
    fn decimals_are_exact() {
        assert_eq!(number("0.1").checked_add(number("0.2")), Some(number("0.3")));
        assert_eq!(number("1,234.50"), number("2469/2"));
    }

    #[test]
    fn what_does_not_fit_is_none() {
        assert_eq!(Number::integer(i128::MAX).checked_add(Number::ONE), None);
        assert_eq!(Number::integer(i128::MIN).checked_neg(), None);
        assert_eq!(Number::integer(2).checked_pow(127), None);
        assert_eq!(Number::integer(0).checked_pow(-1), None);
        assert_eq!(Number::ONE.checked_div(Number::integer(0)), None);
        assert_eq!(Number::fraction(i128::MIN, -1), None);
    }

    #[test]
    fn numbers_are_shown_as_people_write_them() {
        for (text, shown) in [("5/1", "5"), ("-1/8", "-0.125"), ("1/3", "1/3"), ("2.50", "2.5"), ("-7/7", "-1")] {
            assert_eq!(number(text).to_string(), shown);
        }
    }

    #[test]
    fn rounding_is_to_the_nearest() {
        assert!(number("2/3").rounds_to(number("0.67"), 2));
        assert!(!number("2/3").rounds_to(number("0.66"), 2));
    }

    proptest! {
        #[test]
        fn arithmetic_never_panics(a: i128, b: i128, c: i128, d: i128, e: i128) {
            if let (Some(x), Some(y)) = (Number::fraction(a, b), Number::fraction(c, d)) {
                let _ = (x.checked_add(y), x.checked_sub(y), x.checked_mul(y), x.checked_div(y), x.checked_pow(e));
                let _ = (x.to_string(), x.rounds_to(y, e as u32));
            }
        }

        #[test]
        fn subtraction_undoes_addition(a: i32, b in 1..i32::MAX, c: i32, d in 1..i32::MAX) {
            let (x, y) = (Number::fraction(a.into(), b.into()).unwrap(), Number::fraction(c.into(), d.into()).unwrap());
            prop_assert_eq!(x.checked_add(y).unwrap().checked_sub(y), Some(x));
        }
    }
}
