//! A specialist that needs no model: how easy English prose is to read.

mod measures;
mod text;

use async_trait::async_trait;

use self::{measures::Measure, text::Document};
use super::{Judge, JudgeError};
use crate::{Confidence, Critique, Issue, Score, Severity, Submission, Verdict};

/// Judges how clear English prose is, by measure: Flesch's reading ease, the length of sentences, repetition, the passive voice,
/// paragraphs, and words that say nothing.
///
/// What the text says it does not judge, which its confidence admits: at most 0.7, and little for short texts and for those that
/// are hardly English.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::{Submission, Task, judge::{Judge, ProseJudge}};
///
/// let task = Task::new("prose", "Why does bread rise?")?;
/// let clear = "Yeast eats sugar and makes gas. The gas is caught in the dough, so the dough grows.";
/// let verdicts = ProseJudge.judge(&Submission::single(task, clear)?).await?;
/// assert!(verdicts[0].score.get() > 0.9);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ProseJudge;

/// More issues than these are left out, the least severe ones first.
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
    let measures: Vec<Measure> = measures::ALL.iter().map(|measure| measure(text, &document)).collect();
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

/// What measures can know: little of a short text, and next to nothing of one in another script.
fn confidence(text: &str, document: &Document) -> Confidence {
    #[allow(clippy::cast_precision_loss)]
    let by_length = (document.words.len() as f64 / 120.0).min(1.0);
    let letters = text.chars().filter(|character| character.is_alphabetic()).count().max(1);
    let foreign = text.chars().filter(|character| character.is_alphabetic() && !character.is_ascii()).count();
    let is_foreign = foreign * 10 > letters;
    Confidence::clamped(if is_foreign { 0.1 } else { 0.35f64.mul_add(by_length, 0.35) })
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
    fn an_issue_names_what_it_is_about() {
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
    fn it_is_less_sure_of_what_it_cannot_measure() {
        let confidence = |text: &str| judge(text).confidence.get();
        assert!(confidence(CLEAR) > confidence("Yeast makes gas."));
        assert!(confidence("Дрожжи едят сахар и выделяют газ.") < 0.2);
        assert!(confidence(CLEAR) <= 0.7);
    }

    #[test]
    fn no_text_is_worth_nothing() {
        for text in ["", " \n ", "12 + 3 = 15"] {
            assert_eq!(judge(text).score, Score::MIN, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[a-zA-Zé.!?\"'’…\\n 0-9-]{0,300}|\\PC{0,120}") {
            let verdict = judge(&text);
            for place in verdict.critique.issues.iter().filter_map(|issue| issue.place.as_ref()) {
                prop_assert!(place.is_in(&text), "{:?}", place);
            }
        }
    }
}
