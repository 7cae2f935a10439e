//! A judge of worked arithmetic with units. It is exact and needs no model.
//!
//! `lexer.rs` splits text into tokens, `question.rs` finds what the prompt asks for, `expression.rs` evaluates it, `statements.rs` checks the
//! equalities of an answer, and this file gives the verdict.

mod expression;
mod lexer;
mod question;
mod statements;
mod units;

use std::ops::Range;

use async_trait::async_trait;

pub(crate) use self::units::Number;
use self::{
    lexer::{Run, Spanned, Token},
    question::Question,
    statements::Verdict as Checked,
    units::{Dimension, Quantity, Unit},
};
use crate::undecided;
use x402_market::{
    Confidence, Critique, Issue, Place, Score, Severity, Submission, Task, Verdict,
    judge::{Judge, JudgeError},
};

/// The longest prompt, in bytes.
const MAX_PROMPT: usize = 4 * 1024;
/// The longest answer, in bytes.
const MAX_OUTPUT: usize = 16 * 1024;

/// A judge of worked arithmetic with units. It is exact.
///
/// It evaluates the expression in the prompt, checks every equality that the output states, and compares the final answer and its unit. A
/// reference answer takes precedence over the prompt. The formula of a word problem may be in the context. If the prompt cannot be read,
/// the verdict is neutral and its confidence low. Prompts may have 4 KiB and outputs 16 KiB.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::{Submission, Task, judge::Judge};
/// use x402_judges::ArithmeticJudge;
///
/// let task = Task::new("arithmetic", "What is 17 * 23 + 4?")?;
/// let verdicts = ArithmeticJudge.judge(&Submission::single(task, "17 * 23 = 381. Answer: 385")?).await?;
/// assert_eq!(verdicts[0].score.get(), 0.0);
/// assert_eq!(&*verdicts[0].critique.issues[0].description, "17 * 23 = 381 does not hold: 17 * 23 is 391");
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ArithmeticJudge;

#[async_trait]
impl Judge for ArithmeticJudge {
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        let prompt = ("task.prompt", submission.task.question().len(), MAX_PROMPT);
        let reference = submission.task.reference.as_ref().map(|text| ("task.reference", text.len(), MAX_PROMPT));
        let outputs = submission.outputs().iter().map(|output| ("output", output.len(), MAX_OUTPUT));
        let context = submission.task.context.as_ref().map(|text| ("task.context", text.len(), MAX_PROMPT));
        for (name, length, limit) in outputs.chain([prompt]).chain(reference).chain(context) {
            if length > limit {
                return Err(JudgeError::Rejected(format!("{name} has {length} bytes: shorten it to {limit}")));
            }
        }
        Ok(())
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.accepts(submission)?;
        Ok(submission.outputs().iter().map(|output| judge(&submission.task, output)).collect())
    }
}

/// How many issues and strengths are reported at most.
const MAX_REMARKS: usize = 20;
/// The weight of the right result. The rest is for right steps.
const RESULT_WEIGHT: f64 = 0.7;

/// The verdict on the final answer.
struct Final {
    credit: f64,
    right: bool,
    issue: Option<String>,
    /// The bytes of the answer.
    place: Range<usize>,
    /// Whether there is a final answer.
    found: bool,
}

/// Returns the question of a task. The reference answer comes first; a formula in the context comes before a prompt that is not certain.
fn question_of(task: &Task) -> Result<Question, String> {
    if let Some(question) = task.reference.as_deref().and_then(question::of_reference) {
        return Ok(question);
    }
    let asked = question::read(task.question());
    if asked.as_ref().is_ok_and(|question| question.certain) {
        return asked;
    }
    let in_context = task.context.as_deref().and_then(|context| question::read(context).ok());
    in_context.filter(|question| question.certain).map_or(asked, Ok)
}

/// Judges `output` as an answer to the task.
fn judge(task: &Task, output: &str) -> Verdict {
    let question = match question_of(task) {
        Ok(question) => question,
        Err(reason) => return undecided(&reason),
    };
    let tokens = lexer::read(output);

    let (mut strengths, mut issues) = (Vec::new(), Vec::new());
    let (mut right, mut wrong, mut unread) = (0_u32, 0_u32, 0_u32);
    for (verdict, place) in statements::check(output, &tokens) {
        match verdict {
            Checked::Holds(stated) => {
                right += 1;
                strengths.push(format!("{stated} is right"));
            }
            Checked::Wrong(issue) => {
                wrong += 1;
                issues.push(Issue::new(Severity::Major, issue).at(Place::of(output, place)));
            }
            Checked::Unread => unread += 1,
        }
    }
    let result = judge_final(&question, output, &tokens);
    let expected = written(&question);
    if let Some(issue) = result.issue {
        let severity = if result.credit >= 0.5 { Severity::Major } else { Severity::Critical };
        let place = Place::of(output, result.place).filter(|_| result.found);
        issues.push(Issue::new(severity, issue).at(place).suggest(format!("Answer: {expected}")));
    }
    if result.right {
        strengths.insert(0, "the final answer is right".to_owned());
    }

    let steps = if right + wrong > 0 { f64::from(right) / f64::from(right + wrong) } else { result.right.into() };
    let score = RESULT_WEIGHT.mul_add(result.credit, (1.0 - RESULT_WEIGHT) * steps);
    let mut summary = match (result.found, result.right, wrong) {
        (false, ..) => format!("There is no final answer; it should be {expected}."),
        (_, true, 0) => format!("Correct: the answer is {expected}."),
        (_, true, _) => format!("The answer {expected} is right, but {} does not hold.", count(wrong, "step")),
        (_, false, 0) if result.credit >= 0.5 => format!("Almost: the answer is {expected}."),
        (_, false, 0) => format!("Wrong: the answer is {expected}."),
        (_, false, _) => format!("Wrong: the answer is {expected}, and {} does not hold.", count(wrong, "step")),
    };
    if unread > 0 {
        summary.push_str(&format!(" Not checked: {}.", count(unread, "step")));
    }
    let certainty = if question.certain { 0.99 } else { 0.6 };
    let confidence = certainty * if unread > 0 { 0.9 } else { 1.0 };
    let critique = strengths.into_iter().take(MAX_REMARKS).fold(Critique::new(summary), Critique::strength);
    // The issue about the result is the last one, and is kept.
    let skipped = issues.len().saturating_sub(MAX_REMARKS);
    let critique = issues.into_iter().skip(skipped).fold(critique, Critique::issue);
    Verdict::new(Score::clamped(score), Confidence::clamped(confidence), critique)
}

fn judge_final(question: &Question, output: &str, tokens: &[Spanned]) -> Final {
    let expected = written(question);
    let Some((run, about)) = find_answer(output, tokens) else {
        let issue = Some(format!("no final answer was found; end with \"Answer: {expected}\""));
        return Final { credit: 0.0, right: false, issue, place: 0..0, found: false };
    };
    let shown = tokens.get(run).unwrap_or_default();
    let text = lexer::text_of(output, shown);
    let verdict = |credit, right, issue| Final { credit, right, issue, place: statements::span(shown), found: true };
    let value = match expression::evaluate(shown) {
        Ok(value) => value,
        Err(fault) => return verdict(0.0, false, Some(format!("the final answer {text} has no value: {fault}"))),
    };
    if statements::agrees(question.value, value, shown, about) {
        if !lexer::is_plain(shown) {
            return verdict(0.1, false, Some(format!("the final answer {text} is not worked out; it is {expected}")));
        }
        if question.unit_asked && !in_asked_unit(question, value, shown) {
            let issue = format!("the final answer {text} is in another unit than asked for: {expected}");
            return verdict(0.8, true, Some(issue));
        }
        return verdict(1.0, true, None);
    }
    let is_of_dimension = value.dimension == question.value.dimension;
    let lacks_unit = match is_of_dimension {
        // "75" instead of "75%".
        true => question.unit.as_ref().is_some_and(|(unit, _)| *unit != Unit::NONE),
        false => value.dimension == Dimension::NONE,
    };
    if lacks_unit && number_expected(question) == Some(value.value) {
        return verdict(0.6, false, Some(format!("the final answer {text} lacks its unit: it should be {expected}")));
    }
    if is_of_dimension {
        return verdict(0.0, false, Some(format!("the final answer {text} should be {expected}")));
    }
    let (is, should) = (value.dimension.name(), question.value.dimension.name());
    let number_right = shown.iter().any(|spanned| match (&spanned.token, number_expected(question)) {
        (Token::Number(number, _), Some(expected)) => *number == expected,
        _ => false,
    });
    let credit = if number_right { 0.1 } else { 0.0 };
    verdict(credit, false, Some(format!("the final answer {text} is {is}, but {should} was asked for: {expected}")))
}

/// Finds the final answer: the expression after the last "answer", or else the last one. Also whether it is called approximate.
fn find_answer(output: &str, tokens: &[Spanned]) -> Option<(Run, bool)> {
    let runs = lexer::runs(tokens);
    let named = tokens.iter().rposition(|spanned| spanned.token.is_word("answer"));
    let after = named.and_then(|named| {
        // "My answer to task 1: 395", "the answer to 2 + 2 is 4"
        let announced = announcement(output, tokens, named);
        [announced, Some(named)].into_iter().flatten().find_map(|at| {
            let first = runs.iter().position(|run| run.start > at)?;
            // At most a few words may be in between.
            (runs.get(first)?.start - at <= 6).then_some(first)
        })
    });
    let mut index = match after {
        Some(index) => index,
        None => runs.len().checked_sub(1)?,
    };
    // "Answer: 17 * 23 + 4 = 395"
    let signed = |run: &Run| tokens.get(run.end).map(|spanned| &spanned.token);
    while let (Some(Token::Equal | Token::About), Some(next)) = (signed(runs.get(index)?), runs.get(index + 1)) {
        if next.start != runs.get(index)?.end + 1 {
            break;
        }
        index += 1;
    }
    let run = trimmed(tokens, lexer::balanced(tokens, runs.get(index)?.clone(), false));
    let before = run.start.checked_sub(1).and_then(|at| tokens.get(at)).map(|spanned| &spanned.token);
    let about = match before {
        Some(Token::About) => true,
        Some(token) => ["about", "approximately", "roughly", "around"].iter().any(|word| token.is_word(word)),
        None => false,
    };
    Some((run, about))
}

/// Returns the first ":", "is" or "=" after `named` in the same sentence.
fn announcement(output: &str, tokens: &[Spanned], named: usize) -> Option<usize> {
    for (at, spanned) in tokens.iter().enumerate().skip(named + 1) {
        match (&spanned.token, output.get(spanned.start..spanned.end)?) {
            (Token::Equal | Token::About, _) | (Token::Stop, ":") => return Some(at),
            (token, _) if token.is_word("is") => return Some(at),
            (Token::Stop, "." | ";" | "\n") => return None,
            _ => {}
        }
    }
    None
}

/// Removes operators at the end.
fn trimmed(tokens: &[Spanned], run: Run) -> Run {
    let tail = tokens.get(run.clone()).unwrap_or_default().iter().rev();
    let operators = tail.take_while(|spanned| spanned.token.is_operator()).count();
    run.start..run.end - operators
}

/// Returns the expected number in the expected unit.
fn number_expected(question: &Question) -> Option<Number> {
    let unit = question.unit.as_ref().map_or(Unit::NONE, |(unit, _)| *unit);
    question.value.value.checked_div(unit.value)
}

fn in_asked_unit(question: &Question, value: Quantity, shown: &[Spanned]) -> bool {
    let asked = question.unit.as_ref().map(|(unit, _)| unit.value);
    // Zero is zero in every unit.
    !statements::has_unit(shown) || value.value.is_zero() || statements::unit_factor(value, shown) == asked
}

/// Returns the right answer as text.
fn written(question: &Question) -> String {
    let number =
        number_expected(question).map_or_else(|| question.value.value.to_string(), |number| number.to_string());
    match &question.unit {
        Some((_, name)) if matches!(name.as_str(), "$" | "€" | "£") => format!("{name}{number}"),
        Some((_, name)) if name == "%" => format!("{number}%"),
        Some((_, name)) => format!("{number} {name}"),
        None if question.value.dimension == Dimension::NONE => number,
        None => format!("{number} in base units (m, kg, s)"),
    }
}

fn count(number: u32, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::judge as judge_task;
    use x402_market::{Task, Verdict};

    fn judge(prompt: &str, reference: Option<&str>, output: &str) -> Verdict {
        let task = Task::new("arithmetic", prompt).unwrap();
        let task = reference.into_iter().fold(task, |task, reference| task.with_reference(reference).unwrap());
        judge_task(&task, output)
    }

    fn scores(prompt: &str, output: &str) -> (f64, Vec<String>) {
        let verdict = judge(prompt, None, output);
        assert!(verdict.confidence.get() > 0.5, "{verdict:?}");
        for place in verdict.critique.issues.iter().filter_map(|issue| issue.place.as_ref()) {
            assert!(place.is_in(output), "{place:?}");
        }
        let issues = verdict.critique.issues.iter().map(|issue| issue.description.to_string());
        (verdict.score.get(), issues.collect())
    }

    #[test]
    fn right_answer_with_right_steps_scores_one() {
        for (prompt, output) in [
            ("What is 17 * 23 + 4?", "17 * 23 = 391, and 4 more is 395. Answer: 395"),
            ("What is 17 * 23 + 4?", "395"),
            ("What is 17 * 23 + 4?", "My answer to task 1: 395"),
            ("What is 17 * 23 + 4?", "The answer to 17 * 23 + 4 is 395. I used 2 steps."),
            ("What is 17 * 23 + 4?", "17 * 20 = 340 and 17 * 3 = 51, so 340 + 51 + 4 = 395"),
            ("What is 5 € + 3 €?", "Answer: €8"),
            ("What is 17 * 23 + 4?", "The final answer is **395**."),
            ("What is 2 km + 300 m in m?", "2 km = 2000 m; 2000 m + 300 m = 2300 m\nAnswer: 2,300 metres"),
            ("What is 1/3 + 1/3?", "Answer: 2/3"),
            ("What is 1/3 + 1/3?", "Answer: 0.667"),
            ("What is 15% of 80?", "0.15 * 80 = 12. Answer: 12"),
            ("What is 3/4 in percent?", "Answer: 75%"),
            ("What is 5 - 8?", "Answer: -3"),
            ("What is 3 m * 4 m?", "Answer: 12 m²"),
            ("What is 40 min in h?", "40 min = 2/3 h. Answer: 2/3 h"),
            ("What is 40 min in h?", "Answer: about 0.7 h"),
            ("What is -5 / 2?", "Answer: -2 1/2"),
            ("What is $3.50 * 4?", "$3.50 * 4 = $14.00. Answer: $14"),
        ] {
            assert_eq!(scores(prompt, output), (1.0, vec![]), "{prompt} {output}");
        }
    }

    #[test]
    fn wrong_steps_and_wrong_answers_are_distinguished() {
        let (score, issues) = scores("What is 17 * 23 + 4?", "17 * 23 = 381, and 4 more is 385. Answer: 385");
        assert_eq!(score, 0.0);
        assert_eq!(issues, ["17 * 23 = 381 does not hold: 17 * 23 is 391", "the final answer 385 should be 395"]);

        let (score, issues) = scores("What is 17 * 23 + 4?", "17 * 23 = 381. Answer: 395");
        assert_eq!(score, 0.7);
        assert_eq!(issues.len(), 1);

        let (score, _) = scores("What is 17 * 23 + 4?", "17 * 23 = 391. Answer: 396");
        assert_eq!(score, 0.3);
    }

    #[test]
    fn repeating_the_question_is_no_answer() {
        for output in ["17 * 23 + 4", "Answer: 17 * 23 + 4", "17 * 23 + 4 = 17 * 23 + 4"] {
            let (score, issues) = scores("What is 17 * 23 + 4?", output);
            assert!(score < 0.1 && issues.len() == 1, "{output}: {score} {issues:?}");
        }
    }

    #[test]
    fn units_matter() {
        let prompt = "What is 2 km + 300 m in m?";
        let (missing, issues) = scores(prompt, "Answer: 2300");
        assert_eq!(issues, ["the final answer 2300 lacks its unit: it should be 2300 m"]);
        let (wrong, issues) = scores(prompt, "Answer: 2300 kg");
        assert_eq!(issues, ["the final answer 2300 kg is a mass, but a length was asked for: 2300 m"]);
        let (other, issues) = scores(prompt, "Answer: 2.3 km");
        assert_eq!(issues, ["the final answer 2.3 km is in another unit than asked for: 2300 m"]);
        let (off, _) = scores(prompt, "Answer: 2300 km");
        assert!(other > missing && missing > wrong && wrong > off, "{other} {missing} {wrong} {off}");
    }

    #[test]
    fn unreadable_prompt_is_not_judged() {
        let verdict = judge("Who wrote Hamlet?", None, "Shakespeare");
        assert_eq!((verdict.score.get(), verdict.reward.get()), (0.5, 0.0));
        assert!(verdict.confidence.get() < 0.2);
        assert!(verdict.critique.summary.starts_with("Not judged"), "{}", verdict.critique.summary);
    }

    #[test]
    fn reference_answer_replaces_an_unreadable_prompt() {
        let prompt = "Ann has three boxes of twelve eggs and breaks half a dozen. How many are whole?";
        let score = |output: &str| judge(prompt, Some("30"), output);
        assert_eq!(score("3 * 12 = 36, 36 - 6 = 30. Answer: 30").score.get(), 1.0);
        assert_eq!(score("3 * 12 = 36. Answer: 36").score.get(), 0.3, "the step is right");
        assert_eq!(score("Answer: 36").score.get(), 0.0);
        let judge = |reference: &str, output: &str| judge(prompt, Some(reference), output).score.get();
        assert_eq!(judge("3 * 12 = 36, and 36 - 6 = 30\n#### 30", "Answer: 30"), 1.0);
        assert_eq!(judge("2.5 km", "Answer: 2500 m"), 1.0);
        assert_eq!(judge("about half", "Answer: 15"), 0.5, "there is nothing to compare with");
        assert!(score("Answer: 36").confidence.get() > 0.9);
    }

    #[test]
    fn formula_in_the_context_replaces_only_a_word_problem() {
        let score = |prompt: &str, context: &str, output: &str| {
            let verdict = judge_task(&Task::new("arithmetic", prompt).unwrap().with_context(context).unwrap(), output);
            (verdict.score.get(), verdict.confidence.get() > 0.9)
        };
        let story = "A train travels at 90 km/h for 40 minutes. How far does it get, in km?";
        assert_eq!(score(story, "What is 90 km/h * 40 min in km?", "Answer: 60 km"), (1.0, true));
        assert_eq!(score(story, "What is 90 km/h * 40 min in km?", "Answer: 3600 km"), (0.0, true));
        assert_eq!(score(story, "Trains are slow.", "Answer: 60 km"), (0.5, false));
        assert_eq!(score("What is 2 + 3?", "What is 2 + 4?", "Answer: 5"), (1.0, true));
    }

    #[test]
    fn issues_name_their_place() {
        let output = "Zuerst: 17 × 23 = 381, dann Answer: 385";
        let verdict = judge("What is 17 * 23 + 4?", None, output);
        let quotes = verdict.critique.issues.iter().map(|issue| issue.place.as_ref().and_then(|place| place.quote()));
        assert_eq!(quotes.collect::<Vec<_>>(), [Some("17 × 23 = 381"), Some("385")]);
    }

    proptest! {
        #[test]
        fn no_text_panics(prompt in "\\PC{0,80}", output in "\\PC{0,120}") {
            judge(&prompt, Some(&output), &prompt);
            judge(&prompt, None, &output);
        }

        #[test]
        fn no_arithmetic_panics(
            prompt in "[0-9 .,+*/^()$%=≈mkghsinx²³!-]{0,60}",
            output in "([0-9 .,+*/^()$%=≈mkghsinx²³\n-]|answer|of|in|is|square ){0,60}",
        ) {
            let verdict = judge(&prompt, None, &output);
            for place in verdict.critique.issues.iter().filter_map(|issue| issue.place.as_ref()) {
                prop_assert!(place.is_in(&output), "{:?}", place);
            }
        }

        #[test]
        fn sums_are_judged_exactly(a in 0..1_000_000_i64, b in 0..1_000_000_i64, off in 1..1_000_i64) {
            let prompt = format!("What is {a} + {b}?");
            prop_assert_eq!(judge(&prompt, None, &format!("Answer: {}", a + b)).score.get(), 1.0);
            prop_assert_eq!(judge(&prompt, None, &format!("Answer: {}", a + b + off)).score.get(), 0.0);
        }
    }
}
