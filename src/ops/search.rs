//! Finding a payment by what people have of it.

use std::str::FromStr;

use alloy_primitives::{Address, B256, hex};

use crate::ledger::Record;

/// What a payment is looked for by.
///
/// As text: `0x(payer):0x(nonce)`, or the first digits of the payer, the nonce or a transaction, at least eight of them.
///
/// ```
/// use tower_x402::ops::Search;
///
/// assert!("0x70997970C51812dc".parse::<Search>().is_ok());
/// assert!("0x7099".parse::<Search>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Search {
    /// The payment of this payer with this nonce, on whatever network and in whatever token.
    Payment {
        /// Who pays.
        payer: Address,
        /// The authorization's nonce.
        nonce: B256,
    },
    /// Payments that this transaction was to settle, or settled.
    Transaction(B256),
    /// Payments whose payer, nonce or transaction begins so: digits in lower case, without `0x`.
    Prefix(String),
}

/// Fewer digits fit too much.
const LEAST_DIGITS: usize = 8;

impl Search {
    /// Whether a payment is looked for.
    pub fn fits(&self, record: &Record) -> bool {
        let key = &record.key;
        let mut transactions = record.transactions.iter().copied().chain(record.settlement.paid_by());
        match self {
            Self::Payment { payer, nonce } => key.payer == *payer && key.nonce == *nonce,
            Self::Transaction(hash) => transactions.any(|transaction| transaction == *hash),
            Self::Prefix(digits) => {
                let begins = |bytes: &[u8]| hex::encode(bytes).starts_with(digits);
                begins(key.payer.as_slice())
                    || begins(key.nonce.as_slice())
                    || transactions.any(|transaction| begins(transaction.as_slice()))
            }
        }
    }
}

impl FromStr for Search {
    type Err = ParseSearchError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((payer, nonce)) = text.split_once(':') {
            let payer = payer.parse().map_err(|_| ParseSearchError)?;
            return Ok(Self::Payment { payer, nonce: nonce.parse().map_err(|_| ParseSearchError)? });
        }
        let digits = text.strip_prefix("0x").unwrap_or(text).to_ascii_lowercase();
        let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        match is_hex && (LEAST_DIGITS..=64).contains(&digits.len()) {
            true => Ok(Self::Prefix(digits)),
            false => Err(ParseSearchError),
        }
    }
}

/// The text is nothing to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected 0x(payer):0x(nonce), or 8 to 64 hexadecimal digits that a payer, a nonce or a transaction begins with"
)]
pub struct ParseSearchError;
