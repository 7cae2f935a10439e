//! Text and lists of bounded length. A message that exceeds a bound can be neither read nor created.

use std::{fmt, ops::Deref};

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

/// A text of `MIN` to `MAX` Unicode code points, as JSON Schema counts.
///
/// ```
/// use x402_market::Text;
///
/// assert_eq!(&*Text::<1, 8>::new("prose")?, "prose");
/// assert!(Text::<1, 8>::new("").is_err());
/// assert_eq!(&*Text::<0, 8>::cut("much too long"), "much to…");
/// # Ok::<(), x402_market::LengthError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Text<const MIN: usize, const MAX: usize>(String);

/// A list of `MIN` to `MAX` items.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<T>", bound(deserialize = "T: Deserialize<'de>"))]
pub struct List<T, const MIN: usize, const MAX: usize>(Vec<T>);

/// A text or list is too short or too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[error("length {length} is outside {least}..={most}")]
pub struct LengthError {
    /// The length in code points or items. Items beyond the first above the limit are not counted.
    pub length: usize,
    /// The smallest allowed length.
    pub least: usize,
    /// The largest allowed length.
    pub most: usize,
}

impl<const MIN: usize, const MAX: usize> Text<MIN, MAX> {
    /// Creates a text of valid length.
    ///
    /// # Errors
    /// [`LengthError`] if it is too short or too long.
    pub fn new(text: impl Into<String>) -> Result<Self, LengthError> {
        let text = text.into();
        let length = text.chars().count();
        if length < MIN || length > MAX { Err(LengthError { length, least: MIN, most: MAX }) } else { Ok(Self(text)) }
    }
}

impl<const MAX: usize> Text<0, MAX> {
    /// Creates a text, and shortens one that is too long, with an ellipsis at its end.
    pub fn cut(text: impl Into<String>) -> Self {
        let mut text = text.into();
        if text.chars().count() > MAX {
            let end = text.char_indices().nth(MAX.saturating_sub(1)).map_or(0, |(at, _)| at);
            text.truncate(end);
            text.extend((MAX > 0).then_some('…'));
        }
        Self(text)
    }
}

impl<const MAX: usize> Default for Text<0, MAX> {
    fn default() -> Self {
        Self(String::new())
    }
}

impl<const MIN: usize, const MAX: usize> Deref for Text<MIN, MAX> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<const MIN: usize, const MAX: usize> fmt::Display for Text<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<const MIN: usize, const MAX: usize> From<Text<MIN, MAX>> for String {
    fn from(text: Text<MIN, MAX>) -> Self {
        text.0
    }
}

impl<'de, const MIN: usize, const MAX: usize> Deserialize<'de> for Text<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl<T, const MIN: usize, const MAX: usize> List<T, MIN, MAX> {
    /// Creates a list of valid length.
    ///
    /// # Errors
    /// [`LengthError`] if it is too short or too long.
    pub fn new(items: impl IntoIterator<Item = T>) -> Result<Self, LengthError> {
        let items: Vec<T> = items.into_iter().take(MAX.saturating_add(1)).collect();
        let length = items.len();
        if length < MIN || length > MAX { Err(LengthError { length, least: MIN, most: MAX }) } else { Ok(Self(items)) }
    }

    /// Adds an item, or drops it if the list is full.
    pub fn push(&mut self, item: T) {
        self.0.extend((self.0.len() < MAX).then_some(item));
    }
}

impl<T, const MAX: usize> Default for List<T, 0, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MIN: usize, const MAX: usize> Deref for List<T, MIN, MAX> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T, const MIN: usize, const MAX: usize> From<List<T, MIN, MAX>> for Vec<T> {
    fn from(list: List<T, MIN, MAX>) -> Self {
        list.0
    }
}

impl<T, const MIN: usize, const MAX: usize> TryFrom<Vec<T>> for List<T, MIN, MAX> {
    type Error = LengthError;

    fn try_from(items: Vec<T>) -> Result<Self, LengthError> {
        Self::new(items)
    }
}
