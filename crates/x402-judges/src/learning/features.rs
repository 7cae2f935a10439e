//! What is seen of an output: its words, hashed, and a few signals.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use x402_market::{Input, Task};

/// How many numbers there are to hash to.
const SIZE: u64 = 1 << 14;
/// How many words of an output are read.
const MAX_WORDS: usize = 4_096;

/// The features of an output: indices and values. They are stored, so the hash must never change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Features {
    /// What another judge says, as log-odds.
    pub(super) offset: f32,
    pub(super) values: Vec<(u32, f32)>,
}

impl Features {
    pub(super) fn of(task: &Task, output: &str, own: Vec<(&str, f64)>, offset: f32) -> Self {
        let skill = hash(0xcbf2_9ce4_8422_2325, &task.skill);
        let words: Vec<String> = words(output).take(MAX_WORDS).map(str::to_lowercase).collect();
        let single = words.iter().map(|word| hash(skill, word));
        let pairs = words.windows(2).map(|pair| hash(hash(skill, &pair[0]), &pair[1]));
        let seen: HashSet<u64> = single.chain(pairs).collect();
        let each = 1.0 / (seen.len().max(1) as f32).sqrt();
        // The sign makes collisions cancel out on average.
        let mut values: Vec<_> =
            seen.into_iter().map(|hash| (index(hash), if hash >> 63 == 0 { each } else { -each })).collect();
        values.sort_by_key(|(index, _)| *index);
        let asked: HashSet<String> = match &task.input {
            Input::Prompt(prompt) => self::words(prompt).take(MAX_WORDS).map(str::to_lowercase).collect(),
            Input::Messages(_) => HashSet::new(),
        };
        let shared = words.iter().filter(|word| asked.contains(*word)).count() as f64 / words.len().max(1) as f64;
        let length = (1.0 + output.len() as f64).ln() / 12.0;
        let common = [("", 1.0), ("length", length), ("shared", shared), ("closed", f64::from(is_closed(output)))];
        let beside = ("beside", f64::from(offset) / 4.0);
        for (name, value) in common.into_iter().chain([beside]).chain(own) {
            let value = if value.is_finite() { value.clamp(-1.0, 1.0) } else { 0.0 };
            values.push((index(hash(hash(skill, "signal"), name)), value as f32));
        }
        Self { offset, values }
    }
}

/// Returns runs of letters and digits, and other characters one by one.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        let first = rest.chars().next()?;
        let end =
            if first.is_alphanumeric() { rest.find(|c: char| !c.is_alphanumeric()) } else { Some(first.len_utf8()) };
        let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        Some(word)
    })
}

/// Returns `true` if all brackets are closed in order.
fn is_closed(text: &str) -> bool {
    let mut open = Vec::new();
    for character in text.chars() {
        match character {
            '(' => open.push(')'),
            '[' => open.push(']'),
            '{' => open.push('}'),
            ')' | ']' | '}' if open.pop() != Some(character) => return false,
            _ => {}
        }
    }
    open.is_empty()
}

/// FNV-1a, with a byte between texts that no text contains.
fn hash(before: u64, text: &str) -> u64 {
    text.bytes().chain([0xff]).fold(before, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn index(hash: u64) -> u32 {
    ((hash ^ (hash >> 32)) % SIZE) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_runs_of_letters_and_single_signs() {
        assert_eq!(words(" f(x1) = x1+2;").collect::<Vec<_>>(), ["f", "(", "x1", ")", "=", "x1", "+", "2", ";"]);
        assert!(is_closed("f([a], {b})") && !is_closed("f([a)]") && !is_closed("f("));
    }

    /// They are in files.
    #[test]
    fn hashes_stay_what_they_are() {
        let task = Task::new("prose", "Write.").unwrap();
        let features = Features::of(&task, "Yes.", vec![("own", f64::NAN)], 0.0);
        assert_eq!(features, Features::of(&task, "Yes.", vec![("own", 0.0)], 0.0));
        assert_eq!(features.values.len(), 3 + 6);
        assert_eq!(hash(0xcbf2_9ce4_8422_2325, "a"), 0x089b_c907_b544_c769);
    }
}
