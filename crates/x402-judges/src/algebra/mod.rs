//! Judges of derivations. `expression.rs` reads and computes formulas, and this file checks the steps.

mod expression;

use std::ops::Range;

use async_trait::async_trait;
use x402_market::{
    Confidence, Critique, Issue, Place, Score, Severity, Submission, Verdict,
    judge::{Judge, JudgeError},
};

use self::expression::{Formula, Point};

/// At how many points formulas are compared.
const POINTS: usize = 32;
/// At how many of them both must have a value.
const LEAST_POINTS: usize = 8;
/// How many steps are checked at most.
const MAX_STEPS: usize = 100;
/// How many issues are reported at most.
const MAX_ISSUES: usize = 12;

/// A judge of derivations such as `(a + b)^2 - (a - b)^2 = 4ab`.
///
/// It checks each equality of an output, and that the last formula is equal to the reference answer, or to the formula after the last colon
/// of the prompt. Lines may begin with `=`, to go on with the formula before. What cannot be read is not checked, and lowers the
/// confidence. It does not judge whether the last formula is simple.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_judges::AlgebraJudge;
/// use x402_market::{Submission, Task, judge::Judge};
///
/// let task = Task::new("algebra", "Expand: (x + 1)^2 - x^2")?;
/// let wrong = Submission::single(task, "(x + 1)^2 - x^2 = x^2 + 1 - x^2\n= 1")?;
/// for judge in [AlgebraJudge::formal(), AlgebraJudge::numeric()] {
///     let verdicts = judge.judge(&wrong).await?;
///     assert!(verdicts[0].score.get() < 0.5);
///     assert_eq!(verdicts[0].critique.issues[0].place.as_ref().unwrap().quote(), Some("x^2 + 1 - x^2"));
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AlgebraJudge {
    is_formal: bool,
}

impl AlgebraJudge {
    /// Creates a judge that expands both sides of each step to fractions of polynomials, and compares these exactly. It does not check
    /// steps with functions or large powers.
    pub const fn formal() -> Self {
        Self { is_formal: true }
    }

    /// Creates a judge that compares both sides of each step at 32 points. It checks functions too (`sqrt`, `sin`, `cos`, `tan`, `exp`,
    /// `ln`, `abs`), and does not see differences of less than a billionth.
    pub const fn numeric() -> Self {
        Self { is_formal: false }
    }

    /// Returns `true` if two formulas are equal, and `None` if that is not known.
    fn are_equal(self, one: &Formula, other: &Formula) -> Option<bool> {
        if self.is_formal {
            let ([a, b], [c, d]) = (one.expand()?, other.expand()?);
            return Some(a.times(&d)? == c.times(&b)?);
        }
        let values = (0..POINTS).map(point).map(|point| (one.at(&point), other.at(&point)));
        let values: Vec<_> = values.filter(|(one, other)| one.is_finite() && other.is_finite()).collect();
        let are_close = |(one, other): &(f64, f64)| (one - other).abs() <= 1e-9 * (1.0 + one.abs().max(other.abs()));
        (values.len() >= LEAST_POINTS).then(|| values.iter().all(are_close))
    }

    fn judge_output(self, goal: Option<&Formula>, output: &str) -> Verdict {
        let steps = steps(output);
        let (mut right, mut wrong, mut unread) = (0_u32, 0_u32, 0_u32);
        let mut issues = Vec::new();
        for [one, other] in &steps {
            let (before, after) = (&output[one.clone()], &output[other.clone()]);
            let read = (Formula::read(before), Formula::read(after));
            match read.0.zip(read.1).and_then(|(one, other)| self.are_equal(&one, &other)) {
                Some(true) => right += 1,
                Some(false) => {
                    wrong += 1;
                    let issue = Issue::new(Severity::Major, format!("{before} is not equal to {after}"));
                    issues.push(issue.at(Place::of(output, other.clone())));
                }
                None => unread += 1,
            }
        }
        let last = steps.last().map_or_else(|| trimmed(output, 0..output.len()), |[_, last]| last.clone());
        let answer = Formula::read(&output[last.clone()]);
        let is_answer = answer.as_ref().zip(goal).map(|(answer, goal)| self.are_equal(answer, goal));
        let (credit, certainty) = match is_answer {
            Some(Some(is_right)) => (f64::from(is_right), 0.95),
            // The answer or the goal cannot be read.
            Some(None) | None => (0.5, 0.2),
        };
        if credit == 0.0 {
            let issue = Issue::new(Severity::Critical, "the last formula is not what was asked for");
            issues.push(issue.at(Place::of(output, last)));
        }
        let share = if right + wrong > 0 { f64::from(right) / f64::from(right + wrong) } else { credit };
        let confidence = certainty * if unread > 0 { 0.8 } else { 1.0 };
        let summary = format!("{right} steps hold, {wrong} do not, and {unread} were not checked.");
        let critique = issues.into_iter().take(MAX_ISSUES).fold(Critique::new(summary), Critique::issue);
        Verdict::new(Score::clamped(0.5 * credit + 0.5 * share), Confidence::clamped(confidence), critique)
    }
}

#[async_trait]
impl Judge for AlgebraJudge {
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        let task = &submission.task;
        let asked = task.question().rsplit(':').next().unwrap_or_default();
        // Of an identity to be proved, the right side is to be reached.
        let asked = task.reference.as_deref().unwrap_or(asked).rsplit('=').next().unwrap_or_default();
        let goal = Formula::read(asked);
        Ok(submission.outputs().iter().map(|output| self.judge_output(goal.as_ref(), output)).collect())
    }
}

/// Returns the places of both sides of each equality.
fn steps(output: &str) -> Vec<[Range<usize>; 2]> {
    let (mut steps, mut before, mut at) = (Vec::new(), None, 0);
    for line in output.split_inclusive('\n') {
        for (number, side) in line.split('=').enumerate() {
            let place = trimmed(output, at..at + side.len());
            at += side.len() + 1;
            if place.is_empty() {
                continue;
            }
            if number > 0
                && let Some(before) = before
            {
                steps.push([before, place.clone()]);
            }
            before = Some(place);
        }
        // No sign follows the last side.
        at -= 1;
    }
    steps.truncate(MAX_STEPS);
    steps
}

/// Returns a place without the space around it.
fn trimmed(text: &str, place: Range<usize>) -> Range<usize> {
    let side = text.get(place.clone()).unwrap_or_default();
    let start = place.start + side.len() - side.trim_start().len();
    start..start + side.trim().len()
}

/// Returns one of the points: values from -3 to 3, which differ for each letter.
fn point(number: usize) -> Point {
    // Multiples of the golden ratio are spread evenly.
    let value = |letter: usize| ((number * 26 + letter + 1) as f64 * 0.618_033_988_749_895).fract() * 6.0 - 3.0;
    std::array::from_fn(value)
}

#[cfg(test)]
mod tests {
    use x402_market::Task;

    use super::*;

    async fn verdict(judge: AlgebraJudge, prompt: &str, output: &str) -> Verdict {
        let submission = Submission::single(Task::new("algebra", prompt).unwrap(), output).unwrap();
        judge.judge(&submission).await.unwrap().remove(0)
    }

    const BOTH: [AlgebraJudge; 2] = [AlgebraJudge::formal(), AlgebraJudge::numeric()];

    #[tokio::test]
    async fn derivation_that_holds_scores_one() {
        for (prompt, output) in [
            ("Expand: (x + 1)^2", "(x + 1)^2 = x^2 + x + x + 1 = x^2 + 2x + 1"),
            ("Prove: (a + b)^2 - (a - b)^2 = 4ab", "(a+b)^2 - (a-b)^2\n= a^2 + 2ab + b^2 - (a^2 - 2ab + b^2)\n= 4ab."),
            ("Simplify: (x² - 1)/(x - 1)", "(x² - 1)/(x - 1) = (x - 1)(x + 1)/(x - 1) = x + 1"),
            ("Simplify: 1/x + 1/y", "(x + y) / (xy)"),
            ("Factor: 0.5 x³ - 2x", "-x(2 - x)(2 + x) ÷ 2"),
        ] {
            for judge in BOTH {
                let verdict = verdict(judge, prompt, output).await;
                assert!(verdict.score.get() == 1.0 && verdict.confidence.get() > 0.9, "{output}: {verdict:?}");
            }
        }
    }

    #[tokio::test]
    async fn step_that_does_not_hold_is_named() {
        for judge in BOTH {
            let found = verdict(judge, "Expand: (x - y)^2", "(x - y)^2 = x^2 - y^2\n= x^2 - 2xy + y^2").await;
            let places: Vec<_> =
                found.critique.issues.iter().map(|issue| issue.place.as_ref().unwrap().quote().unwrap()).collect();
            assert_eq!(places, ["x^2 - y^2", "x^2 - 2xy + y^2"], "{found:?}");
            assert!(found.score.get() <= 0.5);
        }
    }

    #[tokio::test]
    async fn functions_are_compared_at_points_only() {
        let (prompt, output) = ("Simplify: sin(x)^2 + cos(x)^2", "sin(x)^2 + cos(x)^2 = 1");
        assert_eq!(verdict(BOTH[1], prompt, output).await.score.get(), 1.0);
        assert!(verdict(BOTH[0], prompt, output).await.confidence.get() < 0.3);
        assert_eq!(verdict(BOTH[1], prompt, "sin(x)^2 + cos(x)^2 = 2 sin(x)").await.score.get(), 0.0);
        // They differ by less than a billionth.
        let output = "x = x + 0.00000000001";
        assert_eq!(verdict(BOTH[1], "Simplify: x", output).await.score.get(), 1.0);
        assert_eq!(verdict(BOTH[0], "Simplify: x", output).await.score.get(), 0.0);
    }

    #[tokio::test]
    async fn no_text_panics_or_takes_long() {
        let deep = format!("{}x{}", "(".repeat(400), ")".repeat(400));
        for text in
            ["", "=", "a == b", "so x = 2", "x^999999999999", "(x + y + z + 1)^24 = 1", "1/0 = x/0", "é = ½", &deep]
        {
            for judge in BOTH {
                verdict(judge, text, text).await;
            }
        }
    }
}
