//! How easy a text is to read.

/// Returns 1 if no sentence has more than 22 words, and 0 if one has 45.
pub(crate) fn plainness(text: &str) -> f64 {
    let sentences = text.split(['.', '!', '?', ';', '\n']);
    let words = |sentence: &str| sentence.split_whitespace().filter(|word| word.contains(char::is_alphabetic)).count();
    let longest = sentences.map(words).max().unwrap_or(0);
    ((45.0 - longest as f64) / (45.0 - 22.0)).clamp(0.0, 1.0)
}
