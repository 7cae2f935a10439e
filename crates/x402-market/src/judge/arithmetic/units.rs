//! Units and dimensions.

use super::number::Number;

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

    /// What people call it.
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

/// A unit, or a product of powers of units: how many base units it is, and of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub(super) factor: Number,
    pub(super) dimension: Dimension,
}

impl Unit {
    pub(super) const NONE: Self = Self { factor: Number::ONE, dimension: Dimension::NONE };

    /// The unit of that name. Symbols are case-sensitive, words are not.
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
        Some(Self { factor: self.factor.checked_pow(exponent)?, dimension: self.dimension.power(exponent)? })
    }

    pub(super) fn times(self, other: Self) -> Option<Self> {
        let dimension = self.dimension.times(other.dimension)?;
        Some(Self { factor: self.factor.checked_mul(other.factor)?, dimension })
    }

    pub(super) fn per(self, other: Self) -> Option<Self> {
        let dimension = self.dimension.per(other.dimension)?;
        Some(Self { factor: self.factor.checked_div(other.factor)?, dimension })
    }
}

fn simple(name: &str) -> Option<Unit> {
    let lower = name.to_lowercase();
    let find = |name: &str| {
        let found = UNITS.iter().find(|(names, ..)| names.contains(&name));
        found.and_then(|(_, numerator, denominator, dimension)| {
            Some(Unit { factor: Number::fraction(*numerator, *denominator)?, dimension: *dimension })
        })
    };
    // A word may be capitalized; `M` is not `m`.
    find(name).or_else(|| (name.len() > 2).then(|| find(&lower)).flatten())
}

/// Names, and how many base units it is as a fraction.
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
    use super::*;

    #[test]
    fn no_name_means_two_units() {
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
