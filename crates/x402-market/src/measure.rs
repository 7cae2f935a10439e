//! Numbers of a verdict, each within its range.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Not a number, or not one in the range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{value} is not a {what}: it must be from {least} to {most}")]
pub struct OutOfRange {
    /// What it should have been.
    pub what: &'static str,
    /// What it is.
    pub value: f64,
    /// The least that is allowed.
    pub least: f64,
    /// The most that is allowed.
    pub most: f64,
}

macro_rules! measure {
    ($(#[$documentation:meta])* $name:ident, $what:literal, $least:literal ..= $most:literal) => {
        $(#[$documentation])*
        #[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
        #[serde(try_from = "f64", into = "f64")]
        pub struct $name(f64);

        impl $name {
            /// The least.
            pub const MIN: Self = Self($least);
            /// The most.
            pub const MAX: Self = Self($most);

            /// Checks the range.
            ///
            /// # Errors
            /// [`OutOfRange`], for what is not a number too.
            pub fn new(value: f64) -> Result<Self, OutOfRange> {
                if ($least..=$most).contains(&value) {
                    Ok(Self(value))
                } else {
                    Err(OutOfRange { what: $what, value, least: $least, most: $most })
                }
            }

            /// The nearest value in the range, rounded to six decimal places; what is not a number becomes the least.
            pub fn clamped(value: f64) -> Self {
                let rounded = (value * 1e6).round() / 1e6;
                if rounded.is_nan() { Self::MIN } else { Self(rounded.clamp($least, $most)) }
            }

            /// The number.
            pub const fn get(self) -> f64 {
                self.0
            }
        }

        impl TryFrom<f64> for $name {
            type Error = OutOfRange;

            fn try_from(value: f64) -> Result<Self, OutOfRange> {
                Self::new(value)
            }
        }

        impl From<$name> for f64 {
            fn from(value: $name) -> Self {
                value.0
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
    /// How good an output is: from 0 (worthless) to 1 (nothing to improve).
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
    /// The probability that the verdict is right, in the evaluator's own opinion: from 0 to 1.
    ///
    /// Students hold evaluators to it: one that says 0.9 should be right nine times of ten.
    Confidence, "confidence", 0.0..=1.0
}
measure! {
    /// What a learner should be given for an output, on the evaluator's own scale within ±1,000,000.
    Reward, "reward", -1e6..=1e6
}

impl From<Score> for Reward {
    /// From -1 to 1.
    fn from(score: Score) -> Self {
        Self::clamped(score.get().mul_add(2.0, -1.0))
    }
}
