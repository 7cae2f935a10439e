//! The numbers in a verdict. Each has a range that is checked when it is created or read.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

/// The error for a number outside its range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{value} is not a {what}: it is outside {least}..={most}")]
#[non_exhaustive]
pub struct OutOfRange {
    /// The kind of number, such as `score`.
    pub what: &'static str,
    /// The number.
    pub value: f64,
    /// The smallest allowed number.
    pub least: f64,
    /// The largest allowed number.
    pub most: f64,
}

macro_rules! measure {
    ($(#[$documentation:meta])* $name:ident, $what:literal, $least:literal ..= $most:literal) => {
        $(#[$documentation])*
        #[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
        pub struct $name(f64);

        impl $name {
            /// The smallest value.
            pub const MIN: Self = Self($least);
            /// The largest value.
            pub const MAX: Self = Self($most);

            /// Creates a value.
            ///
            /// # Errors
            /// [`OutOfRange`] if the number is outside the range, or NaN.
            pub fn new(value: f64) -> Result<Self, OutOfRange> {
                if ($least..=$most).contains(&value) {
                    Ok(Self(value))
                } else {
                    Err(OutOfRange { what: $what, value, least: $least, most: $most })
                }
            }

            /// Creates the nearest value in the range, rounded to six decimal places. NaN becomes the smallest value.
            pub fn clamped(value: f64) -> Self {
                let rounded = (value * 1e6).round() / 1e6;
                if rounded.is_nan() { Self::MIN } else { Self(rounded.clamp($least, $most)) }
            }

            /// Returns the number.
            pub const fn get(self) -> f64 {
                self.0
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Self::new(f64::deserialize(deserializer)?).map_err(D::Error::custom)
            }
        }

        impl From<f64> for $name {
            /// Creates the nearest value in the range, as [`clamped`](Self::clamped) does. It is for numbers that are in the range unless
            /// there is a bug.
            fn from(value: f64) -> Self {
                Self::clamped(value)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

measure! {
    /// The quality of an output, from 0 (worthless) to 1 (nothing to improve).
    ///
    /// ```
    /// use x402_market::Score;
    ///
    /// assert_eq!(Score::new(0.75)?.get(), 0.75);
    /// assert!(Score::new(f64::NAN).is_err() && Score::new(1.1).is_err());
    /// # Ok::<(), x402_market::OutOfRange>(())
    /// ```
    Score, "score", 0.0..=1.0
}
measure! {
    /// The probability, from 0 to 1, that a verdict is right, as its evaluator states it.
    ///
    /// An evaluator that states 0.9 should be right nine times out of ten. Students check that in audits.
    Confidence, "confidence", 0.0..=1.0
}
measure! {
    /// The reward for an output in training, on the evaluator's own scale within ±1,000,000.
    Reward, "reward", -1e6..=1e6
}

impl From<Score> for Reward {
    /// Stretches the score to a range from -1 to 1.
    fn from(score: Score) -> Self {
        Self::clamped(score.get().mul_add(2.0, -1.0))
    }
}
