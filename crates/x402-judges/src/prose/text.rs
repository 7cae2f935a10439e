//! Splits prose into paragraphs, sentences and words, with their positions.

use std::ops::Range;

/// A text in its parts. Ranges are of bytes, or of indices into `words`.
#[derive(Debug, Default)]
pub(super) struct Document {
    pub(super) paragraphs: Vec<Range<usize>>,
    pub(super) sentences: Vec<Sentence>,
    pub(super) words: Vec<Range<usize>>,
}

#[derive(Clone, Debug)]
pub(super) struct Sentence {
    pub(super) bytes: Range<usize>,
    /// The words of the sentence, as indices.
    pub(super) words: Range<usize>,
}

/// Abbreviations, whose full stop ends no sentence.
const ABBREVIATIONS: &[&str] =
    &["mr", "mrs", "ms", "dr", "prof", "st", "vs", "etc", "e.g", "i.e", "cf", "fig", "no", "approx", "inc", "jr", "sr"];

impl Document {
    pub(super) fn read(text: &str) -> Self {
        let mut document = Self::default();
        for paragraph in paragraphs(text) {
            for sentence in sentences(text, paragraph.clone()) {
                let first = document.words.len();
                document.words.extend(words(text, sentence.clone()));
                let words = first..document.words.len();
                if !words.is_empty() {
                    document.sentences.push(Sentence { bytes: sentence, words });
                }
            }
            document.paragraphs.push(paragraph);
        }
        document
    }

    /// Counts the words in a range of bytes.
    pub(super) fn words_in(&self, bytes: &Range<usize>) -> usize {
        let at = |byte| self.words.partition_point(|word| word.start < byte);
        at(bytes.end) - at(bytes.start)
    }
}

/// Returns the parts between empty lines, trimmed.
fn paragraphs(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut begun: Option<Range<usize>> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let content = line.trim();
        if content.is_empty() {
            found.extend(begun.take());
        } else {
            let start = at + (line.len() - line.trim_start().len());
            let end = start + content.len();
            begun = Some(begun.map_or(start, |paragraph| paragraph.start)..end);
        }
        at += line.len();
    }
    found.extend(begun);
    found
}

/// Returns the sentences of a paragraph. A list item begins a sentence.
fn sentences(text: &str, paragraph: Range<usize>) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let part = &text[paragraph.clone()];
    let mut start = 0;
    let mut characters = part.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        let next = characters.peek().map(|(_, next)| *next);
        let end = at + character.len_utf8();
        let ends = match character {
            '!' | '?' | '…' => next.is_none_or(|next| next.is_whitespace() || closes(next)),
            '.' => next.is_none_or(|next| next.is_whitespace() || closes(next)) && !is_abbreviation(&part[start..at]),
            '\n' => part[end..].trim_start().starts_with(['-', '*', '•']),
            _ => false,
        };
        if ends {
            // Closing quotation marks and brackets belong to the sentence.
            let mut end = end;
            while let Some((at, closing)) = characters.next_if(|(_, next)| closes(*next)) {
                end = at + closing.len_utf8();
            }
            found.push(start..end);
            start = end;
        }
    }
    found.push(start..part.len());
    let offset = paragraph.start;
    let trimmed = found.into_iter().filter_map(|range| {
        let sentence = &part[range.clone()];
        let start = offset + range.start + (sentence.len() - sentence.trim_start().len());
        let length = sentence.trim().len();
        (length > 0).then_some(start..start + length)
    });
    trimmed.collect()
}

const fn closes(character: char) -> bool {
    matches!(character, '"' | '”' | '’' | ')' | ']' | '»' | '\'')
}

fn is_abbreviation(before: &str) -> bool {
    let word = before.rsplit(|c: char| c.is_whitespace() || c == '(').next().unwrap_or_default().to_lowercase();
    let is_initial = word.chars().count() == 1 && word.chars().all(char::is_alphabetic) && word != "i";
    is_initial || ABBREVIATIONS.contains(&word.as_str())
}

/// Returns the words: letters, with apostrophes and hyphens between them. Numbers are no words.
fn words(text: &str, within: Range<usize>) -> Vec<Range<usize>> {
    let part = &text[within.clone()];
    let mut found = Vec::new();
    let mut begun: Option<Range<usize>> = None;
    for (at, character) in part.char_indices() {
        let is_joint = matches!(character, '\'' | '’' | '-');
        if character.is_alphabetic() {
            let start = begun.as_ref().map_or(at, |word| word.start);
            begun = Some(start..at + character.len_utf8());
        } else if !(is_joint && begun.as_ref().is_some_and(|word| word.end == at)) {
            found.extend(begun.take());
        }
    }
    found.extend(begun);
    found.into_iter().map(|word| within.start + word.start..within.start + word.end).collect()
}

/// Estimates the syllables of an English word by its groups of vowels.
pub(super) fn syllables(word: &str) -> usize {
    let word = word.to_lowercase();
    let letters: Vec<char> = word.chars().filter(|letter| letter.is_alphabetic()).collect();
    let is_vowel = |letter: &char| "aeiouyäöüàâéèêëîïôûù".contains(*letter);
    let starts = |at: usize| is_vowel(&letters[at]) && (at == 0 || !is_vowel(&letters[at - 1]));
    let groups = (0..letters.len()).filter(|&at| starts(at)).count();
    let is_silent = groups > 1
        && (word.ends_with('e') && !word.ends_with("le") || word.ends_with("es") || word.ends_with("ed"))
        && !["ted", "ded", "ses", "zes", "ches", "shes", "xes", "ges", "ces"].iter().any(|end| word.ends_with(end));
    groups.saturating_sub(usize::from(is_silent)).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(text: &str) -> (Vec<&str>, usize, usize) {
        let document = Document::read(text);
        let sentences = document.sentences.iter().map(|sentence| &text[sentence.bytes.clone()]).collect();
        (sentences, document.paragraphs.len(), document.words.len())
    }

    #[test]
    fn sentences_end_in_the_right_places() {
        assert_eq!(parts("One two. Three! Four?").0, ["One two.", "Three!", "Four?"]);
        assert_eq!(parts("Dr. Smith paid 3.50 dollars, e.g. for tea.").0.len(), 1);
        assert_eq!(parts("He said \"Go.\" Then he went.").0, ["He said \"Go.\"", "Then he went."]);
        assert_eq!(parts("Buy:\n- apples\n- pears").0, ["Buy:", "- apples", "- pears"]);
        assert_eq!(parts("A line\nand its end."), (vec!["A line\nand its end."], 1, 5));
        assert_eq!(parts("First.\n\n  \nSecond."), (vec!["First.", "Second."], 2, 2));
        assert_eq!(parts(" \n\n 12 + 3."), (vec![], 1, 0));
    }

    #[test]
    fn syllables_are_counted_about_right() {
        for (word, count) in [
            ("cat", 1),
            ("water", 2),
            ("made", 1),
            ("table", 2),
            ("jumped", 1),
            ("wanted", 2),
            ("beautiful", 3),
            ("rhythm", 1),
            ("university", 5),
            ("boxes", 2),
        ] {
            assert_eq!(syllables(word), count, "{word}");
        }
    }

    proptest! {
        #[test]
        fn every_range_is_within_the_text(text in "[a-zA-Zé.!?\"'’…\\n 0-9-]{0,200}|\\PC{0,80}") {
            let document = Document::read(&text);
            for range in document.paragraphs.iter().chain(&document.words) {
                prop_assert!(!text[range.clone()].trim().is_empty());
            }
            for sentence in &document.sentences {
                prop_assert_eq!(document.words_in(&sentence.bytes), sentence.words.len());
            }
        }
    }
}
