//! USDC amounts.

use std::{fmt, str::FromStr};

use alloy_primitives::U256;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A USDC amount in atomic units. One USDC has 1,000,000 units, so a unit is a micro-dollar.
///
/// Amounts are exact. Arithmetic is checked, so it never rounds and never wraps. The largest amount is `u64::MAX` units, about
/// 18 trillion USDC.
///
/// ```
/// use tower_x402::Usdc;
///
/// let price: Usdc = "$0.001".parse()?;
/// assert_eq!(price.atomic(), 1_000);
/// assert_eq!(price.to_string(), "$0.001");
/// assert_eq!(price.checked_mul(250), Some("$0.25".parse()?));
/// # Ok::<(), tower_x402::ParseUsdcError>(())
/// ```
///
/// # As text
///
/// `FromStr` reads whole dollars: `$0.001`, `0.001`, `0.001 USDC` or `2`. `Display` writes them with at least two decimals. `serde`
/// reads and writes atomic units as a decimal string (`"1000"`), as x402 does.
///
/// ```
/// use tower_x402::{ParseUsdcError, Usdc};
///
/// assert_eq!("2.5 USDC".parse::<Usdc>()?.to_string(), "$2.50");
/// assert_eq!("$0.0000001".parse::<Usdc>(), Err(ParseUsdcError::TooFine));
/// assert_eq!(serde_json::to_string(&Usdc::from_atomic(1_000))?, r#""1000""#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Usdc(u64);

/// USDC has six decimal places on every chain this crate knows.
const DECIMALS: u32 = 6;
const UNIT: u64 = 1_000_000;

impl Usdc {
    /// An amount of zero.
    pub const ZERO: Self = Self(0);
    /// The largest amount, `u64::MAX` units.
    pub const MAX: Self = Self(u64::MAX);

    /// Creates an amount from atomic units (millionths of a USDC).
    pub const fn from_atomic(units: u64) -> Self {
        Self(units)
    }

    /// Returns the amount in atomic units (millionths of a USDC).
    pub const fn atomic(self) -> u64 {
        self.0
    }

    /// Returns the sum, or `None` if it is larger than [`MAX`](Self::MAX).
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(units) => Some(Self(units)),
            None => None,
        }
    }

    /// Returns the difference, or `None` if it is negative.
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(units) => Some(Self(units)),
            None => None,
        }
    }

    /// Returns the product, or `None` if it is larger than [`MAX`](Self::MAX).
    pub const fn checked_mul(self, factor: u64) -> Option<Self> {
        match self.0.checked_mul(factor) {
            Some(units) => Some(Self(units)),
            None => None,
        }
    }
}

impl From<Usdc> for U256 {
    fn from(amount: Usdc) -> Self {
        Self::from(amount.0)
    }
}

impl TryFrom<&str> for Usdc {
    type Error = ParseUsdcError;

    fn try_from(dollars: &str) -> Result<Self, Self::Error> {
        dollars.parse()
    }
}

impl TryFrom<String> for Usdc {
    type Error = ParseUsdcError;

    fn try_from(dollars: String) -> Result<Self, Self::Error> {
        dollars.parse()
    }
}

impl TryFrom<U256> for Usdc {
    type Error = ParseUsdcError;

    fn try_from(units: U256) -> Result<Self, Self::Error> {
        u64::try_from(units).map(Self).map_err(|_| ParseUsdcError::TooLarge)
    }
}

impl fmt::Display for Usdc {
    /// Writes dollars with two decimals, or as many as needed: `$1.00`, `$0.001`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fraction = format!("{:06}", self.0 % UNIT);
        let mut shown = fraction.trim_end_matches('0');
        if shown.len() < 2 {
            shown = &fraction[..2];
        }
        write!(f, "${}.{shown}", self.0 / UNIT)
    }
}

impl fmt::Debug for Usdc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Usdc {
    type Err = ParseUsdcError;

    /// Reads whole dollars: `$0.001`, `0.001`, `0.001 USDC` or `2`. For atomic units, use [`Usdc::from_atomic`].
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = text.trim();
        let number = number.strip_prefix('$').unwrap_or(number);
        let number = number.strip_suffix("USDC").map_or(number, str::trim_end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() {
            return Err(ParseUsdcError::NotANumber);
        }
        if !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit()) {
            return Err(ParseUsdcError::NotANumber);
        }
        let fraction = fraction.trim_end_matches('0');
        if fraction.len() > DECIMALS as usize {
            return Err(ParseUsdcError::TooFine);
        }
        let parse = |digits: &str| match digits {
            "" => Ok(0_u64),
            digits => digits.parse().map_err(|_| ParseUsdcError::TooLarge),
        };
        let scale = 10_u64.pow(DECIMALS - fraction.len() as u32);
        parse(whole)?
            .checked_mul(UNIT)
            .and_then(|units| units.checked_add(parse(fraction).ok()? * scale))
            .map(Self)
            .ok_or(ParseUsdcError::TooLarge)
    }
}

impl Serialize for Usdc {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Usdc {
    /// Reads atomic units from a decimal string, as x402 writes amounts.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(|_| de::Error::custom("expected atomic units as a decimal string"))
    }
}

/// Lets a function take `impl TryInto<Usdc, Error: Into<ParseUsdcError>>`: text or an amount.
impl From<std::convert::Infallible> for ParseUsdcError {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

/// An error while an amount was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseUsdcError {
    /// The text is not digits with at most one decimal point.
    #[error("not an amount: write dollars such as \"$0.001\"")]
    NotANumber,
    /// The text has more than six decimal places.
    #[error("finer than one atomic unit: USDC has six decimal places")]
    TooFine,
    /// The amount is larger than [`Usdc::MAX`].
    #[error("larger than 18 trillion USDC")]
    TooLarge,
}

/// Converts wei to USDC at a price per ether (10¹⁸ wei), rounded up to an atomic unit.
///
/// Returns `None` if the result is larger than [`Usdc::MAX`].
///
/// ```
/// use alloy_primitives::U256;
/// use tower_x402::{Usdc, ops::in_usdc};
///
/// let fee = U256::from(430_000_000_000_u64); // 86,000 gas at 5,000,000 wei
/// assert_eq!(in_usdc(fee, "$3000".parse()?), Some("$0.00129".parse()?));
/// # Ok::<(), tower_x402::ParseUsdcError>(())
/// ```
#[cfg(feature = "facilitator")]
pub fn in_usdc(wei: U256, per_ether: Usdc) -> Option<Usdc> {
    let ether = U256::from(1_000_000_000_000_000_000_u64);
    let scaled = wei.checked_mul(U256::from(per_ether.atomic()))?;
    Usdc::try_from(scaled.div_ceil(ether)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dollars_are_read_exactly() {
        for (text, units) in [
            ("$0.001", 1_000),
            ("0.000001", 1),
            (".5", 500_000),
            ("3.", 3_000_000),
            ("$1.000000000", 1_000_000),
            ("0.25 USDC", 250_000),
            ("18446744073709.551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(Usdc(units)), "{text}");
        }
    }

    #[test]
    fn inexact_and_too_large_amounts_are_refused() {
        use ParseUsdcError::*;
        for (text, error) in [
            ("", NotANumber),
            ("$", NotANumber),
            (".", NotANumber),
            ("-1", NotANumber),
            ("1e3", NotANumber),
            ("1.2.3", NotANumber),
            ("0.0000001", TooFine),
            ("18446744073709.551616", TooLarge),
            ("99999999999999999999999", TooLarge),
        ] {
            assert_eq!(text.parse::<Usdc>(), Err(error), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn displayed_amount_is_read_back(units: u64) {
            let amount = Usdc(units);
            proptest::prop_assert_eq!(amount.to_string().parse(), Ok(amount));
        }
    }
}
