//! Exact rational numbers, units and dimensions.

use std::fmt;

/// A fraction in lowest terms. Every operation is exact, or returns `None` if the result does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number {
    numerator: i128,
    /// Positive.
    denominator: i128,
}

/// The largest exponent. Results of larger ones hardly ever fit.
const MAX_EXPONENT: u32 = 128;
/// How many decimal places are written. A longer number is shown as a fraction.
const MAX_PLACES: u32 = 12;

impl Number {
    pub(crate) const ONE: Self = Self::integer(1);

    pub(crate) const fn integer(value: i128) -> Self {
        Self { numerator: value, denominator: 1 }
    }

    pub(super) fn fraction(numerator: i128, denominator: i128) -> Option<Self> {
        let divisor = i128::try_from(gcd(numerator.unsigned_abs(), denominator.unsigned_abs())).ok()?;
        // With the sign of the denominator, which becomes positive. A denominator of zero makes it zero, by which nothing is divided.
        let divisor = divisor * denominator.signum();
        Some(Self { numerator: numerator.checked_div(divisor)?, denominator: denominator.checked_div(divisor)? })
    }

    /// Reads digits with at most one decimal point. All other characters are skipped, such as separators.
    pub(crate) fn decimal(text: &str) -> Option<Self> {
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

    pub(crate) fn to_f64(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }

    pub(crate) const fn is_zero(self) -> bool {
        self.numerator == 0
    }

    pub(crate) const fn as_integer(self) -> Option<i128> {
        if self.denominator == 1 { Some(self.numerator) } else { None }
    }

    pub(super) fn checked_neg(self) -> Option<Self> {
        Some(Self { numerator: self.numerator.checked_neg()?, ..self })
    }

    pub(crate) fn checked_add(self, other: Self) -> Option<Self> {
        let left = self.numerator.checked_mul(other.denominator)?;
        let right = other.numerator.checked_mul(self.denominator)?;
        Self::fraction(left.checked_add(right)?, self.denominator.checked_mul(other.denominator)?)
    }

    pub(super) fn checked_sub(self, other: Self) -> Option<Self> {
        self.checked_add(other.checked_neg()?)
    }

    pub(crate) fn checked_mul(self, other: Self) -> Option<Self> {
        // Reduced crosswise first, so that only results that do not fit overflow.
        let a = Self::fraction(self.numerator, other.denominator)?;
        let b = Self::fraction(other.numerator, self.denominator)?;
        Self::fraction(a.numerator.checked_mul(b.numerator)?, a.denominator.checked_mul(b.denominator)?)
    }

    /// Divides. Returns `None` also for a division by zero.
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

    /// Returns `true` if `shown` is this number rounded to `places` decimal places.
    pub(super) fn rounds_to(self, shown: Self, places: u32) -> bool {
        let close = || {
            let difference = self.checked_sub(shown)?;
            let double = difference.numerator.checked_abs()?.checked_mul(2)?;
            Some(double.checked_mul(10_i128.checked_pow(places)?)? <= difference.denominator)
        };
        close() == Some(true)
    }

    /// Returns how many decimal places write the number exactly, if that is possible.
    pub(super) fn places(self) -> Option<u32> {
        (0..=MAX_PLACES).find(|places| 10_i128.pow(*places) % self.denominator == 0)
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
        let (numerator, denominator) = (self.numerator.unsigned_abs(), self.denominator.unsigned_abs());
        // The denominator divides this power of ten.
        let decimals = numerator % denominator * (10_u128.pow(places) / denominator);
        let sign = if self.numerator < 0 { "-" } else { "" };
        write!(f, "{sign}{}.{decimals:0width$}", numerator / denominator, width = places as usize)
    }
}

fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

/// The exponents of metre, kilogram, second, dollar, euro, pound sterling and byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dimension([i8; 7]);

impl Dimension {
    pub(super) const NONE: Self = Self([0; 7]);
    const LENGTH: Self = Self([1, 0, 0, 0, 0, 0, 0]);
    const AREA: Self = Self([2, 0, 0, 0, 0, 0, 0]);
    const VOLUME: Self = Self([3, 0, 0, 0, 0, 0, 0]);
    const MASS: Self = Self([0, 1, 0, 0, 0, 0, 0]);
    const TIME: Self = Self([0, 0, 1, 0, 0, 0, 0]);
    const DOLLARS: Self = Self([0, 0, 0, 1, 0, 0, 0]);
    const EUROS: Self = Self([0, 0, 0, 0, 1, 0, 0]);
    const STERLING: Self = Self([0, 0, 0, 0, 0, 1, 0]);
    const DATA: Self = Self([0, 0, 0, 0, 0, 0, 1]);

    fn combine(self, other: Self, operation: impl Fn(i8, i8) -> Option<i8>) -> Option<Self> {
        let mut exponents = self.0;
        for (exponent, with) in exponents.iter_mut().zip(other.0) {
            *exponent = operation(*exponent, with)?;
        }
        Some(Self(exponents))
    }

    pub(super) fn times(self, other: Self) -> Option<Self> {
        self.combine(other, i8::checked_add)
    }

    pub(super) fn per(self, other: Self) -> Option<Self> {
        self.combine(other, i8::checked_sub)
    }

    pub(super) fn power(self, exponent: i128) -> Option<Self> {
        let exponent = i8::try_from(exponent).ok();
        self.combine(Self::NONE, |own, _| if own == 0 { Some(0) } else { own.checked_mul(exponent?) })
    }

    /// Returns the name of the dimension.
    pub(super) fn name(self) -> &'static str {
        const SPEED: Dimension = Dimension([1, 0, -1, 0, 0, 0, 0]);
        match self {
            Self::NONE => "a plain number",
            Self::LENGTH => "a length",
            Self::AREA => "an area",
            Self::VOLUME => "a volume",
            Self::MASS => "a mass",
            Self::TIME => "a time",
            SPEED => "a speed",
            Self::DOLLARS | Self::EUROS | Self::STERLING => "an amount of money",
            Self::DATA => "an amount of data",
            _ => "a compound quantity",
        }
    }
}

/// A value in base units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Quantity {
    pub(super) value: Number,
    pub(super) dimension: Dimension,
}

/// A unit, or a product of powers of units: the quantity that is one of it.
pub(super) type Unit = Quantity;

impl Quantity {
    pub(super) const NONE: Self = Self { value: Number::ONE, dimension: Dimension::NONE };

    /// Returns the unit of this name. Symbols are case-sensitive, words are not.
    pub(super) fn named(name: &str) -> Option<Self> {
        if let Some(unit) = simple(name) {
            return Some(unit);
        }
        // m2, cm3
        let (base, exponent) = match name.strip_suffix('2') {
            Some(base) => (base, 2),
            None => (name.strip_suffix('3')?, 3),
        };
        simple(base).filter(|unit| unit.dimension == Dimension::LENGTH)?.power(exponent)
    }

    pub(super) fn power(self, exponent: i128) -> Option<Self> {
        Some(Self { value: self.value.checked_pow(exponent)?, dimension: self.dimension.power(exponent)? })
    }

    pub(super) fn times(self, other: Self) -> Option<Self> {
        let dimension = self.dimension.times(other.dimension)?;
        Some(Self { value: self.value.checked_mul(other.value)?, dimension })
    }

    pub(super) fn per(self, other: Self) -> Option<Self> {
        let dimension = self.dimension.per(other.dimension)?;
        Some(Self { value: self.value.checked_div(other.value)?, dimension })
    }
}

fn simple(name: &str) -> Option<Unit> {
    let lower = name.to_lowercase();
    let find = |name: &str| {
        let found = UNITS.iter().find(|(names, ..)| names.contains(&name));
        found.and_then(|(_, numerator, denominator, dimension)| {
            Some(Unit { value: Number::fraction(*numerator, *denominator)?, dimension: *dimension })
        })
    };
    // Words may be capitalized. `M` is not `m`.
    find(name).or_else(|| (name.len() > 2).then(|| find(&lower)).flatten())
}

/// Names, and the factor of the base units as a fraction.
type Row = (&'static [&'static str], i128, i128, Dimension);

const UNITS: &[Row] = &[
    (&["km", "kilometre", "kilometres", "kilometer", "kilometers"], 1_000, 1, Dimension::LENGTH),
    (&["m", "metre", "metres", "meter", "meters"], 1, 1, Dimension::LENGTH),
    (&["dm", "decimetre", "decimetres", "decimeter", "decimeters"], 1, 10, Dimension::LENGTH),
    (&["cm", "centimetre", "centimetres", "centimeter", "centimeters"], 1, 100, Dimension::LENGTH),
    (&["mm", "millimetre", "millimetres", "millimeter", "millimeters"], 1, 1_000, Dimension::LENGTH),
    (&["in", "inch", "inches"], 254, 10_000, Dimension::LENGTH),
    (&["ft", "foot", "feet"], 3_048, 10_000, Dimension::LENGTH),
    (&["yd", "yard", "yards"], 9_144, 10_000, Dimension::LENGTH),
    (&["mi", "mile", "miles"], 1_609_344, 1_000, Dimension::LENGTH),
    (&["ha", "hectare", "hectares"], 10_000, 1, Dimension::AREA),
    (&["l", "L", "litre", "litres", "liter", "liters"], 1, 1_000, Dimension::VOLUME),
    (&["dl", "dL", "decilitre", "decilitres", "deciliter", "deciliters"], 1, 10_000, Dimension::VOLUME),
    (&["cl", "cL", "centilitre", "centilitres", "centiliter", "centiliters"], 1, 100_000, Dimension::VOLUME),
    (&["ml", "mL", "millilitre", "millilitres", "milliliter", "milliliters"], 1, 1_000_000, Dimension::VOLUME),
    (&["t", "tonne", "tonnes"], 1_000, 1, Dimension::MASS),
    (&["kg", "kilogram", "kilograms"], 1, 1, Dimension::MASS),
    (&["g", "gram", "grams"], 1, 1_000, Dimension::MASS),
    (&["mg", "milligram", "milligrams"], 1, 1_000_000, Dimension::MASS),
    (&["lb", "lbs", "pound", "pounds"], 45_359_237, 100_000_000, Dimension::MASS),
    (&["oz", "ounce", "ounces"], 45_359_237, 1_600_000_000, Dimension::MASS),
    (&["week", "weeks"], 604_800, 1, Dimension::TIME),
    (&["day", "days"], 86_400, 1, Dimension::TIME),
    (&["h", "hr", "hrs", "hour", "hours"], 3_600, 1, Dimension::TIME),
    (&["min", "mins", "minute", "minutes"], 60, 1, Dimension::TIME),
    (&["s", "sec", "secs", "second", "seconds"], 1, 1, Dimension::TIME),
    (&["ms", "millisecond", "milliseconds"], 1, 1_000, Dimension::TIME),
    (&["$", "USD", "USDC", "dollar", "dollars"], 1, 1, Dimension::DOLLARS),
    (&["cent", "cents"], 1, 100, Dimension::DOLLARS),
    (&["€", "EUR", "euro", "euros"], 1, 1, Dimension::EUROS),
    (&["£", "GBP"], 1, 1, Dimension::STERLING),
    (&["GB", "gigabyte", "gigabytes"], 1_000_000_000, 1, Dimension::DATA),
    (&["MB", "megabyte", "megabytes"], 1_000_000, 1, Dimension::DATA),
    (&["kB", "KB", "kilobyte", "kilobytes"], 1_000, 1, Dimension::DATA),
    (&["B", "byte", "bytes"], 1, 1, Dimension::DATA),
    (&["%", "percent", "percentage"], 1, 100, Dimension::NONE),
    (&["dozen"], 12, 1, Dimension::NONE),
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
    fn results_that_do_not_fit_are_none() {
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

    #[test]
    fn each_name_means_one_unit() {
        let mut names: Vec<_> = UNITS.iter().flat_map(|(names, ..)| *names).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn symbols_keep_their_case_and_words_do_not() {
        assert_eq!(Unit::named("Metres"), Unit::named("m"));
        assert_eq!(Unit::named("M"), None);
        assert_eq!(Unit::named("cm2"), Unit::named("cm").and_then(|unit| unit.power(2)));
        assert_eq!(Unit::named("h2"), None);
    }
}
