//! The verdict on a worked answer.

use super::{
    Critique, Evaluation,
    clause::{self, Run},
    expression::{self, Quantity},
    lexer::{self, Spanned, Token},
    question::{self, Question},
    statements::{self, Verdict},
    units::{Dimension, Unit},
};

/// More issues or strengths than this are only counted.
const MAX_REMARKS: usize = 20;
/// What the right result is worth; the rest is for right steps.
const RESULT_WEIGHT: f64 = 0.7;

/// What is wrong with the final answer, and how much of it counts all the same.
struct Final {
    credit: f64,
    right: bool,
    issue: Option<String>,
    /// Whether there was an answer to look at.
    found: bool,
}

/// Judges `output` as an answer to `prompt`.
pub(crate) fn judge(prompt: &str, output: &str) -> Evaluation {
    let question = match question::read(prompt) {
        Ok(question) => question,
        Err(reason) => return undecided(&reason),
    };
    let mut tokens = lexer::tokens(output);
    clause::settle_units(output, &mut tokens);

    let mut critique = Critique::default();
    let (mut right, mut wrong, mut unread) = (0_u32, 0_u32, 0_u32);
    for verdict in statements::check(output, &tokens) {
        match verdict {
            Verdict::Holds(stated) => {
                right += 1;
                critique.strengths.push(format!("{stated} is right"));
            }
            Verdict::Wrong(issue) => {
                wrong += 1;
                critique.issues.push(issue);
            }
            Verdict::Unread => unread += 1,
        }
    }
    let result = judge_final(&question, output, &tokens);
    critique.issues.extend(result.issue);
    if result.right {
        critique.strengths.insert(0, "the final answer is right".to_owned());
    }

    let steps = if right + wrong > 0 {
        f64::from(right) / f64::from(right + wrong)
    } else if result.right {
        1.0
    } else {
        0.0
    };
    let score = RESULT_WEIGHT.mul_add(result.credit, (1.0 - RESULT_WEIGHT) * steps);
    let expected = written(&question);
    critique.summary = match (result.found, result.right, wrong) {
        (false, ..) => format!("There is no final answer; it should be {expected}."),
        (_, true, 0) => format!("Correct: the answer is {expected}."),
        (_, true, _) => format!("The answer {expected} is right, but {} does not hold.", count(wrong, "step")),
        (_, false, 0) if result.credit >= 0.5 => format!("Almost: the answer is {expected}."),
        (_, false, 0) => format!("Wrong: the answer is {expected}."),
        (_, false, _) => format!("Wrong: the answer is {expected}, and {} does not hold.", count(wrong, "step")),
    };
    if unread > 0 {
        critique.summary.push_str(&format!(" Not checked: {}.", count(unread, "step")));
    }
    shorten(&mut critique.issues);
    shorten(&mut critique.strengths);
    let certainty = if question.certain { 0.99 } else { 0.6 };
    let confidence = certainty * if unread > 0 { 0.9 } else { 1.0 };
    Evaluation { score: rounded(score), reward: rounded(2.0 * score - 1.0), confidence: rounded(confidence), critique }
}

/// The verdict where there is none.
fn undecided(reason: &str) -> Evaluation {
    let summary = format!("Not judged: {reason}. Score and reward are neutral.");
    Evaluation { score: 0.5, reward: 0.0, confidence: 0.1, critique: Critique { summary, ..Critique::default() } }
}

fn judge_final(question: &Question, output: &str, tokens: &[Spanned]) -> Final {
    let expected = written(question);
    let Some((run, about)) = find_answer(output, tokens) else {
        let issue = Some(format!("no final answer was found; end with \"Answer: {expected}\""));
        return Final { credit: 0.0, right: false, issue, found: false };
    };
    let shown = tokens.get(run).unwrap_or_default();
    let text = clause::text_of(output, shown);
    let verdict = |credit, right, issue| Final { credit, right, issue, found: true };
    let value = match expression::evaluate(shown) {
        Ok(value) => value,
        Err(fault) => return verdict(0.0, false, Some(format!("the final answer {text} has no value: {fault}"))),
    };
    if statements::agrees(question.value, value, shown, about) {
        if !clause::is_plain(shown) {
            return verdict(0.1, false, Some(format!("the final answer {text} is not worked out; it is {expected}")));
        }
        if question.unit_asked && !in_asked_unit(question, value, shown) {
            return verdict(
                0.8,
                true,
                Some(format!("the final answer {text} is in another unit than asked for: {expected}")),
            );
        }
        return verdict(1.0, true, None);
    }
    if value.dimension == question.value.dimension {
        // "75" where "75%" is meant.
        if in_named_unit(question, value) && question.unit.as_ref().is_some_and(|(unit, _)| *unit != Unit::NONE) {
            return verdict(
                0.6,
                false,
                Some(format!("the final answer {text} lacks its unit: it should be {expected}")),
            );
        }
        return verdict(0.0, false, Some(format!("the final answer {text} should be {expected}")));
    }
    if value.dimension == Dimension::NONE && in_named_unit(question, value) {
        return verdict(0.6, false, Some(format!("the final answer {text} lacks its unit: it should be {expected}")));
    }
    let (is, should) = (value.dimension.name(), question.value.dimension.name());
    let number_right = shown.iter().any(|spanned| match (&spanned.token, number_expected(question)) {
        (Token::Number(number, _), Some(expected)) => *number == expected,
        _ => false,
    });
    let credit = if number_right { 0.1 } else { 0.0 };
    verdict(credit, false, Some(format!("the final answer {text} is {is}, but {should} was asked for: {expected}")))
}

/// The run after the last "answer", or else the last one; and whether it is said to be approximate.
fn find_answer(output: &str, tokens: &[Spanned]) -> Option<(Run, bool)> {
    let runs = clause::runs(tokens);
    let named = tokens.iter().rposition(|spanned| spanned.token.is_word("answer"));
    let after = named.and_then(|named| {
        // "My answer to task 1: 395", "the answer to 2 + 2 is 4"
        let announced = announcement(output, tokens, named);
        [announced, Some(named)].into_iter().flatten().find_map(|at| {
            let first = runs.iter().position(|run| run.start > at)?;
            // Only a few words may stand between.
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
    let run = trimmed(tokens, clause::balanced(tokens, runs.get(index)?.clone(), false));
    let before = run.start.checked_sub(1).and_then(|at| tokens.get(at)).map(|spanned| &spanned.token);
    let about = match before {
        Some(Token::About) => true,
        Some(token) => ["about", "approximately", "roughly", "around"].iter().any(|word| token.is_word(word)),
        None => false,
    };
    Some((run, about))
}

/// The first ":", "is" or "=" after `named` in the same sentence.
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

/// Without operators at its end.
fn trimmed(tokens: &[Spanned], run: Run) -> Run {
    let tail = tokens.get(run.clone()).unwrap_or_default().iter().rev();
    let operators = tail.take_while(|spanned| spanned.token.is_operator()).count();
    run.start..run.end - operators
}

/// The number expected before the unit.
fn number_expected(question: &Question) -> Option<super::number::Number> {
    let unit = question.unit.as_ref().map_or(Unit::NONE, |(unit, _)| *unit);
    question.value.value.checked_div(unit.factor)
}

/// Whether a plain number is right but for the unit it should carry.
fn in_named_unit(question: &Question, value: Quantity) -> bool {
    number_expected(question) == Some(value.value)
}

fn in_asked_unit(question: &Question, value: Quantity, shown: &[Spanned]) -> bool {
    let asked = question.unit.as_ref().map(|(unit, _)| unit.factor);
    // Zero is zero in every unit.
    !statements::has_unit(shown) || value.value.is_zero() || statements::unit_factor(value, shown) == asked
}

/// The right answer as text.
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

fn shorten(remarks: &mut Vec<String>) {
    let more = remarks.len().saturating_sub(MAX_REMARKS);
    if more > 0 {
        remarks.truncate(MAX_REMARKS);
        remarks.push(format!("and {more} more"));
    }
}

/// To four places, so that 0.7 is not shown as 0.7000000000000001.
fn rounded(number: f64) -> f64 {
    (number * 10_000.0).round() / 10_000.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::judge;

    fn scores(prompt: &str, output: &str) -> (f64, Vec<String>) {
        let evaluation = judge(prompt, output);
        assert!(evaluation.confidence > 0.5, "{evaluation:?}");
        (evaluation.score, evaluation.critique.issues)
    }

    #[test]
    fn a_right_answer_with_right_steps_is_worth_everything() {
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
    fn a_wrong_step_and_a_wrong_answer_are_told_apart() {
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
    fn what_cannot_be_read_is_not_judged() {
        let evaluation = judge("Who wrote Hamlet?", "Shakespeare");
        assert_eq!((evaluation.score, evaluation.reward), (0.5, 0.0));
        assert!(evaluation.confidence < 0.2);
        assert!(evaluation.critique.summary.starts_with("Not judged"), "{}", evaluation.critique.summary);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(prompt in "\\PC{0,80}", output in "\\PC{0,120}") {
            judge(&prompt, &output);
        }

        #[test]
        fn no_arithmetic_makes_it_panic(
            prompt in "[0-9 .,+*/^()$%=≈mkghsinx²³!-]{0,60}",
            output in "([0-9 .,+*/^()$%=≈mkghsinx²³\n-]|answer|of|in|is|square ){0,60}",
        ) {
            let evaluation = judge(&prompt, &output);
            prop_assert!((0.0..=1.0).contains(&evaluation.score));
            prop_assert!((-1.0..=1.0).contains(&evaluation.reward));
            prop_assert!((0.0..=1.0).contains(&evaluation.confidence));
        }

        #[test]
        fn sums_are_judged_exactly(a in 0..1_000_000_i64, b in 0..1_000_000_i64, off in 1..1_000_i64) {
            let prompt = format!("What is {a} + {b}?");
            prop_assert_eq!(judge(&prompt, &format!("Answer: {}", a + b)).score, 1.0);
            prop_assert_eq!(judge(&prompt, &format!("Answer: {}", a + b + off)).score, 0.0);
        }
    }
}
