//! Word problems.

use serde::{Deserialize, Serialize};

use super::Rng;

/// The kind of a problem, which decides how it is solved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// A rate, with a unit to convert.
    Journey,
    /// A discount in percent.
    Sale,
    /// Lengths in two units.
    Length,
    /// Several items of one price and one of another.
    Shopping,
    /// A rate that drains an amount.
    Tank,
    /// Two percentages in sequence.
    Rises,
}

/// All kinds.
pub(crate) const KINDS: [Kind; 6] = [Kind::Journey, Kind::Sale, Kind::Length, Kind::Shopping, Kind::Tank, Kind::Rises];

/// A problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    /// The question.
    pub(crate) prompt: String,
    /// The question as a formula for the judge: what to compute, without the result.
    pub(crate) formula: String,
    /// Its numbers, in the template's order.
    pub(super) numbers: [i64; 3],
}

const NAMES: [&str; 8] = ["Ann", "Ben", "Cem", "Dora", "Emil", "Fay", "Gus", "Hana"];

impl Problem {
    /// Returns a random problem.
    pub(crate) fn any(rng: &mut Rng) -> Self {
        let kind = rng.pick(&KINDS);
        Self::of(kind, rng)
    }

    /// Returns a problem of this kind, all of whose steps have exact results.
    pub(crate) fn of(kind: Kind, rng: &mut Rng) -> Self {
        let name = rng.pick(&NAMES);
        let (numbers, prompt, formula) = match kind {
            Kind::Journey => {
                let (speed, time) = (rng.among(30, 150, 15), rng.among(20, 160, 20));
                let vehicle = rng.pick(&["train", "bus", "truck", "ferry"]);
                (
                    [speed, time, 0],
                    format!("A {vehicle} travels at {speed} km/h for {time} minutes. How far does it get, in km?"),
                    format!("What is {speed} km/h * {time} min in km?"),
                )
            }
            Kind::Sale => {
                // At $100 percent and dollars would be the same, and at 50% what is paid and what is not.
                let price = rng.pick(&[20, 40, 60, 80, 120, 140, 160, 180, 220, 240]);
                let percent = rng.among(5, 45, 5);
                let thing = rng.pick(&["coat", "lamp", "chair", "bag"]);
                (
                    [price, percent, 0],
                    format!("A {thing} costs ${price}. {name} gets {percent}% off. What does {name} pay, in dollars?"),
                    format!("What is ${price} * (1 - {percent}%)?"),
                )
            }
            Kind::Length => {
                let (far, near) = (rng.among(2, 19, 1), rng.among(50, 950, 50));
                (
                    [far, near, 0],
                    format!("{name} runs {far} km and then walks {near} m. How many metres is that together?"),
                    format!("What is {far} km + {near} m in m?"),
                )
            }
            Kind::Shopping => {
                let (count, price, other) = (rng.among(3, 12, 1), rng.among(2, 19, 1), rng.among(2, 30, 1));
                (
                    [count, price, other],
                    format!("{name} buys {count} books at ${price} each and a bag for ${other}. What do they cost?"),
                    format!("What is {count} * ${price} + ${other}?"),
                )
            }
            Kind::Tank => {
                let (rate, time, rest) = (rng.among(2, 15, 1), rng.among(3, 20, 1), rng.among(15, 200, 5));
                // Nor is what is left what was lost.
                let rest = if rest == rate * time { rest + 5 } else { rest };
                let full = rate * time + rest;
                (
                    [full, rate, time],
                    format!("A tank holds {full} l. It loses {rate} l/min for {time} min. How many litres are left?"),
                    format!("What is {full} l - {rate} l/min * {time} min in l?"),
                )
            }
            Kind::Rises => {
                let (rent, one, other) = (rng.among(200, 1_900, 100), rng.among(10, 50, 10), rng.among(10, 40, 10));
                (
                    [rent, one, other],
                    format!("A rent of ${rent} goes up by {one}%, and a year later by {other}%. What is it then?"),
                    format!("What is ${rent} * (1 + {one}%) * (1 + {other}%)?"),
                )
            }
        };
        Self { kind, prompt, formula, numbers }
    }
}

/// A number with up to four decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decimal(i64);

impl Decimal {
    const ONE: i64 = 10_000;

    pub(super) const fn whole(number: i64) -> Self {
        Self(number * Self::ONE)
    }

    /// Creates a number from a fraction that has at most four decimals.
    pub(super) const fn ratio(numerator: i64, denominator: i64) -> Self {
        Self(numerator * Self::ONE / denominator)
    }

    pub(super) const fn plus(self, number: i64) -> Self {
        Self(self.0 + number * Self::ONE)
    }

    /// Returns the next multiple of ten, plus ten.
    pub(super) const fn guess(self) -> Self {
        Self::whole((self.0 / Self::ONE / 10 + 2) * 10)
    }
}

impl std::fmt::Display for Decimal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (whole, rest) = (self.0 / Self::ONE, self.0 % Self::ONE);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        write!(f, "{whole}.{}", format!("{rest:04}").trim_end_matches('0'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_written_as_people_do() {
        for (decimal, text) in [
            (Decimal::whole(60), "60"),
            (Decimal::ratio(3, 4), "0.75"),
            (Decimal::ratio(5, 4).plus(2), "3.25"),
            (Decimal::ratio(1, 10_000), "0.0001"),
            (Decimal::whole(63).guess(), "80"),
            (Decimal::whole(60).guess(), "80"),
        ] {
            assert_eq!(decimal.to_string(), text);
        }
    }
}
