//! Secrets that callers of a listener give.

use std::fmt;

use alloy_primitives::hex;
use subtle::ConstantTimeEq as _;

use crate::error::Error;

/// The shortest token, in letters and digits.
const SHORTEST: usize = 16;

/// A secret that callers give. Not shown, and compared in constant time.
#[derive(Clone)]
pub(crate) struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Reads a token from a variable. Returns `None` if the variable is not set.
    pub(crate) fn find(variable: &str) -> Result<Option<Self>, Error> {
        match std::env::var(variable) {
            Ok(text) if text.len() >= SHORTEST && text.bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
                Ok(Some(Self(text)))
            }
            Ok(_) | Err(std::env::VarError::NotUnicode(_)) => {
                Err(Error::setting(variable, format!("expected at least {SHORTEST} letters and digits")))
            }
            Err(std::env::VarError::NotPresent) => Ok(None),
        }
    }

    /// Makes a new token. `variable` is where it could have been given instead.
    pub(crate) fn random(variable: &str) -> Result<Self, Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Error::setting(variable, format!("the system has no randomness for one: {error}")))?;
        Ok(Self(hex::encode(bytes)))
    }

    /// Returns `true` if this is the token.
    pub(crate) fn is(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }

    /// Returns the secret, to tell it to whoever starts the command.
    pub(crate) fn secret(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
impl From<&str> for Token {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}
