//! A judge that measures how easy English prose is to read. It needs no model.

mod text;

use std::{collections::HashMap, ops::Range};

use async_trait::async_trait;

use self::text::{Document, Sentence, syllables};
use crate::is_listed;
use x402_market::{
    Confidence, Critique, Issue, Place, Score, Severity, Submission, Verdict,
    judge::{Judge, JudgeError},
};

/// A judge of how clear English prose is: Flesch's reading ease, the length of sentences, repetition, the passive voice, paragraphs, and
/// filler words.
///
/// It does not judge whether the text is true, so its confidence is at most 0.7, and lower for short texts and texts that are hardly
/// English.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::{Submission, Task, judge::Judge};
/// use x402_judges::ProseJudge;
///
/// let task = Task::new("prose", "Why does bread rise?")?;
/// let clear = "Yeast eats sugar and makes gas. The gas is caught in the dough, so the dough grows.";
/// let verdicts = ProseJudge.judge(&Submission::single(task, clear)?).await?;
/// assert!(verdicts[0].score.get() > 0.9);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ProseJudge;

/// How many issues are reported at most. The least severe are left out.
const MAX_ISSUES: usize = 12;

#[async_trait]
impl Judge for ProseJudge {
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        Ok(submission.outputs().iter().map(|output| judge(output)).collect())
    }
}

fn judge(text: &str) -> Verdict {
    let document = Document::read(text);
    if document.words.is_empty() {
        let critique =
            Critique::new("There is no prose here.").issue(Issue::new(Severity::Critical, "there are no words"));
        return Verdict::new(Score::MIN, Confidence::clamped(0.9), critique);
    }
    let measures: Vec<Measure> = MEASURES.iter().map(|measure| measure(text, &document)).collect();
    let score: f64 = measures.iter().map(|measure| measure.weight * measure.score).sum();
    let strengths = measures.iter().filter(|measure| measure.score > 0.9).map(|measure| measure.strength);
    let critique = strengths.fold(Critique::new(summary(score, &document)), Critique::strength);
    let mut issues: Vec<Issue> = measures.iter().flat_map(|measure| measure.issues.clone()).collect();
    issues.sort_by_key(|issue| std::cmp::Reverse(issue.severity));
    let critique = issues.into_iter().take(MAX_ISSUES).fold(critique, Critique::issue);
    Verdict::new(Score::clamped(score), confidence(text, &document), critique)
}

fn summary(score: f64, document: &Document) -> String {
    let opinion = match score {
        score if score > 0.85 => "Clear prose",
        score if score > 0.6 => "Readable prose with weaknesses",
        _ => "Prose that is hard to read",
    };
    let (words, sentences, paragraphs) = (document.words.len(), document.sentences.len(), document.paragraphs.len());
    format!("{opinion}: {words} words, {sentences} sentences, {paragraphs} paragraphs. What it says was not judged.")
}

/// Returns how reliable the measures are: little for a short text, and hardly at all for another script.
fn confidence(text: &str, document: &Document) -> Confidence {
    #[allow(clippy::cast_precision_loss)]
    let by_length = (document.words.len() as f64 / 120.0).min(1.0);
    let letters = text.chars().filter(|character| character.is_alphabetic()).count().max(1);
    let foreign = text.chars().filter(|character| character.is_alphabetic() && !character.is_ascii()).count();
    let is_foreign = foreign * 10 > letters;
    Confidence::clamped(if is_foreign { 0.1 } else { 0.35f64.mul_add(by_length, 0.35) })
}

/// The result of one measure: a score from 0 to 1, and what to say about it.
struct Measure {
    weight: f64,
    score: f64,
    strength: &'static str,
    issues: Vec<Issue>,
}

/// How many places are reported for one kind of issue.
const EXAMPLES: usize = 3;

type Measurement = fn(&str, &Document) -> Measure;

const MEASURES: [Measurement; 6] = [readability, sentence_length, repetition, voice, structure, fillers];

/// Returns 1 at `good` or better, 0 at `bad` or worse, and is linear between.
fn between(value: f64, good: f64, bad: f64) -> f64 {
    ((bad - value) / (bad - good)).clamp(0.0, 1.0)
}

#[allow(clippy::cast_precision_loss)]
fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Measures Flesch's reading ease: 60 and more is plain English, 0 a legal text.
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

/// Measures the length of sentences. More than 35 words are too many.
fn sentence_length(text: &str, document: &Document) -> Measure {
    const LONG: usize = 35;
    let mean = ratio(document.words.len(), document.sentences.len());
    let mut long: Vec<_> = document.sentences.iter().filter(|sentence| sentence.words.len() > LONG).collect();
    let share = ratio(long.len(), document.sentences.len());
    let score = between(mean, 22.0, 45.0) * between(share, 0.05, 0.8).mul_add(0.7, 0.3);
    long.sort_by_key(|sentence| std::cmp::Reverse(sentence.words.len()));
    let remark = |sentence: &&Sentence| {
        let words = sentence.words.len();
        let severity = if words > 2 * LONG { Severity::Major } else { Severity::Minor };
        Issue::new(severity, format!("a sentence of {words} words"))
            .at(Place::of(text, sentence.bytes.clone()))
            .suggest("split it where a new thought begins")
    };
    let issues = long.iter().take(EXAMPLES).map(remark).collect();
    Measure { weight: 0.2, score, strength: "the sentences have a good length", issues }
}

/// Finds words that come twice in a row, sentences that begin alike, and a word that is used too often.
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
    // Ties are broken by the alphabet, so that the verdict is deterministic.
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

/// Finds the passive voice: "was done", "is being seen".
fn voice(text: &str, document: &Document) -> Measure {
    const BE: [&str; 8] = ["is", "are", "was", "were", "be", "been", "being", "am"];
    const IRREGULAR: [&str; 28] = [
        "done", "made", "given", "taken", "seen", "shown", "known", "written", "found", "held", "kept", "left", "lost",
        "paid", "put", "said", "sent", "set", "sold", "told", "thought", "built", "brought", "bought", "chosen",
        "driven", "drawn", "grown",
    ];
    let passive = |sentence: &&Sentence| {
        let words: Vec<String> =
            document.words[sentence.words.clone()].iter().map(|word| text[word.clone()].to_lowercase()).collect();
        let is_participle = |word: &str| word.len() > 4 && word.ends_with("ed") || IRREGULAR.contains(&word);
        words.iter().enumerate().any(|(at, word)| {
            let after = words.iter().skip(at + 1).take(2).map(String::as_str);
            // An adverb may be in between.
            let mut after = after.skip_while(|word| word.ends_with("ly") || *word == "not");
            BE.contains(&word.as_str()) && after.next().is_some_and(is_participle)
        })
    };
    let passives: Vec<_> = document.sentences.iter().filter(passive).collect();
    let share = ratio(passives.len(), document.sentences.len());
    let score = if passives.len() < 2 { 1.0 } else { between(share, 0.25, 0.9) };
    let remark = |sentence: &&Sentence| {
        Issue::new(Severity::Minor, "probably in the passive voice")
            .at(Place::of(text, sentence.bytes.clone()))
            .suggest("say who does it")
    };
    let issues = if score < 0.8 { passives.iter().take(EXAMPLES).map(remark).collect() } else { Vec::new() };
    Measure { weight: 0.1, score, strength: "it says who does what", issues }
}

/// Finds paragraphs that are too long, and a text that breaks off.
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
            // The whole paragraph is too long to quote.
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

/// Finds filler words.
fn fillers(text: &str, document: &Document) -> Measure {
    const FILLERS: &str = "\
        very really basically actually just quite simply literally totally obviously clearly somewhat rather honestly";
    let is_filler = |word: &&Range<usize>| is_listed(&text[(*word).clone()], FILLERS);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CLEAR: &str = "Yeast eats the sugar in the flour. As it eats, it makes a gas. The dough is elastic, so it holds \
        the gas in small bubbles, and each bubble makes the loaf a little taller.\n\nHeat ends the work. In the oven the gas \
        expands, the yeast dies, and the wet dough sets around the bubbles. What you slice in the morning is a sponge of \
        starch that remembers where the gas was.";

    fn described(text: &str) -> Vec<(String, String)> {
        let verdict = judge(text);
        let quote = |issue: &Issue| issue.place.as_ref().and_then(|place| place.quote()).unwrap_or_default().to_owned();
        verdict.critique.issues.iter().map(|issue| (issue.description.to_string(), quote(issue))).collect()
    }

    #[test]
    fn clear_prose_scores_high_and_murky_prose_low() {
        let murky = "The utilization of methodological considerations pertaining to the aforementioned organizational \
            infrastructure was basically determined by the committee to be really very substantially indicative of the \
            necessity of the implementation of additional methodological considerations which were subsequently considered \
            by the organizational committee and the infrastructure committee to be actually quite considerably problematic, \
            and considerations were considered, and it was decided that considerations should be considered again, and";
        let (clear, murky) = (judge(CLEAR), judge(murky));
        assert!(clear.score.get() > 0.9, "{clear:?}");
        assert!(murky.score.get() < 0.4, "{murky:?}");
        assert!(clear.critique.strengths.len() > murky.critique.strengths.len());
    }

    #[test]
    fn issues_name_their_place() {
        let long = format!("We went {}home. It rained.", "and then we walked on ".repeat(9));
        let described_long = described(&long);
        assert!(
            described_long.iter().any(|(what, quote)| what == "a sentence of 48 words" && quote.starts_with("We went")),
            "{described_long:?}"
        );
        let twice = described("We saw the the sea. Then we went home, and it was late when we came back.");
        assert!(twice.contains(&("\"the\" twice in a row".to_owned(), "the the".to_owned())), "{twice:?}");
        let broken = described("We went to the sea and then we walked home because");
        assert!(broken.iter().any(|(what, _)| what == "the text breaks off"), "{broken:?}");
        let passive =
            described("The cake was eaten. The dog was blamed. The truth was never told. The cake was finished.");
        assert!(
            passive.iter().any(|(what, quote)| what.contains("passive") && quote == "The dog was blamed."),
            "{passive:?}"
        );
        let filled =
            described("It was really very good. It was just so totally fine. We simply had to go there again soon.");
        assert!(filled.iter().any(|(what, quote)| what.contains("adds nothing") && quote == "really"), "{filled:?}");
        let wall = described(&"We went to the sea today. ".repeat(60));
        assert!(wall.iter().any(|(what, _)| what == "a paragraph of 360 words"), "{wall:?}");
        assert!(wall.iter().any(|(what, _)| what.contains("begin with \"we\"")), "{wall:?}");
    }

    #[test]
    fn confidence_is_low_for_short_and_foreign_texts() {
        let confidence = |text: &str| judge(text).confidence.get();
        assert!(confidence(CLEAR) > confidence("Yeast makes gas."));
        assert!(confidence("Дрожжи едят сахар и выделяют газ.") < 0.2);
        assert!(confidence(CLEAR) <= 0.7);
    }

    #[test]
    fn text_without_words_scores_zero() {
        for text in ["", " \n ", "12 + 3 = 15"] {
            assert_eq!(judge(text).score, Score::MIN, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[a-zA-Zé.!?\"'’…\\n 0-9-]{0,300}|\\PC{0,120}") {
            let verdict = judge(&text);
            for place in verdict.critique.issues.iter().filter_map(|issue| issue.place.as_ref()) {
                prop_assert!(place.is_in(&text), "{:?}", place);
            }
        }
    }
}
