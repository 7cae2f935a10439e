//! What makes prose hard to read, measured.

use std::{collections::HashMap, ops::Range};

use super::text::{Document, syllables};
use crate::{Issue, Place, Severity};

/// One measure: how well the text does, from 0 to 1, and what to say about it.
pub(super) struct Measure {
    pub(super) weight: f64,
    pub(super) score: f64,
    pub(super) strength: &'static str,
    pub(super) issues: Vec<Issue>,
}

/// How many places are named for one kind of issue.
const EXAMPLES: usize = 3;

type Measurement = fn(&str, &Document) -> Measure;

pub(super) const ALL: [Measurement; 6] = [readability, sentence_length, repetition, voice, structure, fillers];

/// 1 at `good` or better, 0 at `bad` or worse, and a straight line between.
fn between(value: f64, good: f64, bad: f64) -> f64 {
    ((bad - value) / (bad - good)).clamp(0.0, 1.0)
}

#[allow(clippy::cast_precision_loss)]
fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Flesch's reading ease: 60 and more is plain English, 0 a legal text.
fn readability(text: &str, document: &Document) -> Measure {
    let all: usize = document.words.iter().map(|word| syllables(&text[word.clone()])).sum();
    let (words, sentences) = (document.words.len(), document.sentences.len());
    let ease = 84.6f64.mul_add(-ratio(all, words), 1.015f64.mul_add(-ratio(words, sentences), 206.835));
    let score = between(ease, 60.0, 0.0);
    let severity = if score < 0.3 { Severity::Major } else { Severity::Minor };
    let issue = Issue::new(
        severity,
        format!("the text is hard to read: Flesch's reading ease is {ease:.0}, plain English has 60"),
    )
    .suggest("use shorter sentences and shorter words");
    Measure {
        weight: 0.25,
        score,
        strength: "the words and sentences are easy to read",
        issues: issues(score < 0.6, [issue]),
    }
}

/// Sentences of more than thirty-five words lose their readers.
fn sentence_length(text: &str, document: &Document) -> Measure {
    const LONG: usize = 35;
    let mean = ratio(document.words.len(), document.sentences.len());
    let mut long: Vec<_> = document.sentences.iter().filter(|sentence| sentence.words.len() > LONG).collect();
    let share = ratio(long.len(), document.sentences.len());
    let score = between(mean, 22.0, 45.0) * between(share, 0.05, 0.8).mul_add(0.7, 0.3);
    long.sort_by_key(|sentence| std::cmp::Reverse(sentence.words.len()));
    let remark = |sentence: &&super::text::Sentence| {
        let words = sentence.words.len();
        let severity = if words > 2 * LONG { Severity::Major } else { Severity::Minor };
        Issue::new(severity, format!("a sentence of {words} words"))
            .at(Place::of(text, sentence.bytes.clone()))
            .suggest("split it where a new thought begins")
    };
    let issues = long.iter().take(EXAMPLES).map(remark).collect();
    Measure { weight: 0.2, score, strength: "the sentences have a good length", issues }
}

/// Words that come twice in a row, sentences that begin alike, and a word that is everywhere.
fn repetition(text: &str, document: &Document) -> Measure {
    let word = |range: &Range<usize>| text[range.clone()].to_lowercase();
    let mut found = Vec::new();
    let twice = document.words.windows(2).filter(|pair| {
        let between = &text[pair[0].end..pair[1].start];
        between.chars().all(char::is_whitespace)
            && word(&pair[0]) == word(&pair[1])
            && !["had", "that"].contains(&&*word(&pair[0]))
    });
    let twice: Vec<_> = twice.collect();
    found.extend(twice.iter().take(EXAMPLES).map(|pair| {
        Issue::new(Severity::Minor, format!("\"{}\" twice in a row", &text[pair[0].clone()]))
            .at(Place::of(text, pair[0].start..pair[1].end))
            .suggest("leave one out")
    }));
    let first =
        |at: usize| document.sentences[at].words.clone().next().and_then(|at| document.words.get(at)).map(&word);
    let alike = (2..document.sentences.len()).filter(|&at| first(at) == first(at - 1) && first(at) == first(at - 2));
    let alike: Vec<usize> = alike.collect();
    found.extend(alike.iter().take(1).map(|&at| {
        let opening = first(at).unwrap_or_default();
        Issue::new(Severity::Minor, format!("several sentences in a row begin with \"{opening}\""))
            .at(Place::of(text, document.sentences[at].bytes.clone()))
            .suggest("begin with something else")
    }));
    let mut counts: HashMap<String, usize> = HashMap::new();
    for range in document.words.iter().filter(|range| range.len() > 4) {
        *counts.entry(word(range)).or_default() += 1;
    }
    // The alphabet decides between equals, so that the verdict is always the same.
    let most = counts.iter().max_by(|one, other| one.1.cmp(other.1).then_with(|| other.0.cmp(one.0)));
    let share = most.filter(|(_, count)| **count >= 4).map_or(0.0, |(_, count)| ratio(*count, document.words.len()));
    if let Some((word, count)) = most.filter(|_| share > 0.06) {
        let severity = if share > 0.12 { Severity::Major } else { Severity::Minor };
        found.push(Issue::new(severity, format!("\"{word}\" comes {count} times in {} words", document.words.len())));
    }
    let slips = ratio(twice.len() + alike.len(), document.sentences.len());
    let score = between(share, 0.05, 0.2) * between(slips, 0.0, 1.0);
    Measure { weight: 0.2, score, strength: "it does not repeat itself", issues: found }
}

/// "was done", "is being seen": who did it?
fn voice(text: &str, document: &Document) -> Measure {
    const BE: [&str; 8] = ["is", "are", "was", "were", "be", "been", "being", "am"];
    const IRREGULAR: [&str; 28] = [
        "done", "made", "given", "taken", "seen", "shown", "known", "written", "found", "held", "kept", "left", "lost",
        "paid", "put", "said", "sent", "set", "sold", "told", "thought", "built", "brought", "bought", "chosen",
        "driven", "drawn", "grown",
    ];
    let passive = |sentence: &&super::text::Sentence| {
        let words: Vec<String> =
            document.words[sentence.words.clone()].iter().map(|word| text[word.clone()].to_lowercase()).collect();
        let is_participle = |word: &str| word.len() > 4 && word.ends_with("ed") || IRREGULAR.contains(&word);
        words.iter().enumerate().any(|(at, word)| {
            let after = words.iter().skip(at + 1).take(2).map(String::as_str);
            // An adverb may stand between.
            let mut after = after.skip_while(|word| word.ends_with("ly") || *word == "not");
            BE.contains(&word.as_str()) && after.next().is_some_and(is_participle)
        })
    };
    let passives: Vec<_> = document.sentences.iter().filter(passive).collect();
    let share = ratio(passives.len(), document.sentences.len());
    let score = if passives.len() < 2 { 1.0 } else { between(share, 0.25, 0.9) };
    let remark = |sentence: &&super::text::Sentence| {
        Issue::new(Severity::Minor, "probably in the passive voice")
            .at(Place::of(text, sentence.bytes.clone()))
            .suggest("say who does it")
    };
    let issues = if score < 0.8 { passives.iter().take(EXAMPLES).map(remark).collect() } else { Vec::new() };
    Measure { weight: 0.1, score, strength: "it says who does what", issues }
}

/// Paragraphs that are walls, and an end that is none.
fn structure(text: &str, document: &Document) -> Measure {
    const WALL: usize = 180;
    let walls = document.paragraphs.iter().map(|paragraph| (document.words_in(paragraph), paragraph));
    let mut walls: Vec<_> = walls.filter(|(words, _)| *words > WALL).collect();
    walls.sort_by_key(|(words, _)| std::cmp::Reverse(*words));
    #[allow(clippy::cast_precision_loss)]
    let mut score = walls.first().map_or(1.0, |(words, _)| between(*words as f64, WALL as f64, 500.0));
    let mut found: Vec<Issue> = walls
        .iter()
        .take(EXAMPLES)
        .map(|(words, paragraph)| {
            // The whole would be too much to quote.
            let first = document.sentences.iter().find(|sentence| sentence.bytes.start >= paragraph.start);
            Issue::new(Severity::Major, format!("a paragraph of {words} words"))
                .at(first.and_then(|sentence| Place::of(text, sentence.bytes.clone())))
                .suggest("one thought, one paragraph")
        })
        .collect();
    let last = text.trim_end();
    let is_ended = last.ends_with(|end: char| !end.is_alphanumeric() && end != ',' && end != ';');
    if !is_ended && document.words.len() > 8 {
        score *= 0.7;
        let last = document.sentences.last().and_then(|sentence| Place::of(text, sentence.bytes.clone()));
        found.push(Issue::new(Severity::Major, "the text breaks off").at(last).suggest("finish the last sentence"));
    }
    Measure { weight: 0.15, score, strength: "it is divided well", issues: found }
}

/// Words that say nothing.
fn fillers(text: &str, document: &Document) -> Measure {
    const FILLERS: [&str; 14] = [
        "very",
        "really",
        "basically",
        "actually",
        "just",
        "quite",
        "simply",
        "literally",
        "totally",
        "obviously",
        "clearly",
        "somewhat",
        "rather",
        "honestly",
    ];
    let is_filler = |word: &&Range<usize>| FILLERS.contains(&&*text[(*word).clone()].to_lowercase());
    let found: Vec<_> = document.words.iter().filter(is_filler).collect();
    let score = if found.len() < 2 { 1.0 } else { between(ratio(found.len(), document.words.len()), 0.015, 0.08) };
    let remark = |word: &&Range<usize>| {
        Issue::new(Severity::Minor, format!("\"{}\" adds nothing", &text[(*word).clone()]))
            .at(Place::of(text, (*word).clone()))
            .suggest("leave it out")
    };
    let issues = if score < 0.8 { found.iter().take(EXAMPLES).map(remark).collect() } else { Vec::new() };
    Measure { weight: 0.1, score, strength: "every word counts", issues }
}

fn issues(are_there: bool, issues: [Issue; 1]) -> Vec<Issue> {
    if are_there { issues.into() } else { Vec::new() }
}
