//! Audits: tasks with a known truth, and whether a verdict agrees with it.

use std::{collections::HashMap, ops::Range};

use rand::{Rng, RngExt, seq::SliceRandom};
use serde::{Deserialize, Serialize};

use crate::{
    Evaluation, Input, LengthError, LongText, Outputs, Preference, Submission, Task, Verdict, evidence::CallOutcome,
};

/// A gold task: a task with outputs that are known to be good or bad.
///
/// Gold tasks show the student how often each evaluator is right. Now and then one is sent to evaluators as if it were an ordinary
/// submission, in the shape of the submission that follows it: as many outputs, drawn at random and in random order, or a good and a bad
/// one for a pair.
///
/// For evaluators not to recognize them, give gold tasks that look like your real ones, several good and bad outputs for each, and more
/// tasks than any evaluator is sent: all are used before one is used again. A gold task without a reference or a context precedes only
/// submissions without one, and fields that your submission lacks are left out of it.
///
/// ```
/// use x402_market::{Gold, Task};
///
/// let gold = Gold::new(Task::new("arithmetic", "What is 17 * 23?")?).good("391")?.bad("381")?.bad("It is 400.")?;
/// # Ok::<(), x402_market::LengthError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Gold {
    task: Task,
    outputs: Vec<(LongText, bool)>,
}

impl Gold {
    /// Creates a gold task without outputs. The task's id is never sent.
    #[must_use]
    pub const fn new(task: Task) -> Self {
        Self { task, outputs: Vec::new() }
    }

    /// Adds an output that deserves a score above one half.
    ///
    /// # Errors
    /// [`LengthError`] if it is too long.
    pub fn good(self, output: impl Into<String>) -> Result<Self, LengthError> {
        self.with(output, true)
    }

    /// Adds an output that deserves a score below one half.
    ///
    /// # Errors
    /// [`LengthError`] if it is too long.
    pub fn bad(self, output: impl Into<String>) -> Result<Self, LengthError> {
        self.with(output, false)
    }

    fn with(mut self, output: impl Into<String>, good: bool) -> Result<Self, LengthError> {
        self.outputs.push((LongText::new(output)?, good));
        Ok(self)
    }

    /// Makes a submission that looks like another one, if this task allows it.
    fn shaped_like(&self, like: &Submission, rng: &mut impl Rng) -> Option<(Submission, Truth)> {
        let (task, real) = (&self.task, &like.task);
        let is_prompt = |task: &Task| matches!(task.input, Input::Prompt(_));
        // A field can be left out of a task, but not be made up for it.
        let lacks = |field: fn(&Task) -> bool| field(real) && !field(task);
        if is_prompt(task) != is_prompt(real)
            || lacks(|task| task.reference.is_some())
            || lacks(|task| task.context.is_some())
        {
            return None;
        }
        let mut drawn: Vec<_> = self.outputs.iter().collect();
        drawn.shuffle(rng);
        let text = |(text, _): &(LongText, bool)| text.clone();
        let (outputs, truth) = match &like.outputs {
            Outputs::Single(_) => {
                let one = drawn.first()?;
                (Outputs::Single(text(one)), Truth::good([one.1]))
            }
            Outputs::Pair(_) => {
                let good = drawn.iter().find(|(_, good)| *good)?;
                let bad = drawn.iter().find(|(_, good)| !*good)?;
                match rng.random_bool(0.5) {
                    true => (Outputs::Pair([text(good), text(bad)]), Truth::Better(Preference::First)),
                    false => (Outputs::Pair([text(bad), text(good)]), Truth::Better(Preference::Second)),
                }
            }
            Outputs::Group(group) => {
                let some = drawn.get(..group.len())?;
                let texts = some.iter().map(|output| String::from(text(output)));
                let group = Submission::group(self.task.clone(), texts).ok()?.outputs;
                (group, Truth::good(some.iter().map(|(_, good)| *good)))
            }
        };
        let mut task = self.task.clone();
        // A field that real submissions lack would give the task away.
        task.reference = task.reference.filter(|_| real.reference.is_some());
        task.context = task.context.filter(|_| real.context.is_some());
        task.rubric = real.rubric.as_ref().map(|rubric| task.rubric.unwrap_or_else(|| rubric.clone()));
        Some((Submission { task, outputs }, truth))
    }
}

/// All gold tasks, by skill, in random order.
#[derive(Debug, Default)]
pub(super) struct GoldTasks(HashMap<String, SkillGolds>);

#[derive(Debug, Default)]
struct SkillGolds {
    golds: Vec<Gold>,
    next: usize,
}

impl GoldTasks {
    pub(super) fn new(golds: Vec<Gold>, rng: &mut impl Rng) -> Self {
        let mut by_skill: HashMap<String, SkillGolds> = HashMap::new();
        for gold in golds {
            by_skill.entry(gold.task.skill.to_string()).or_default().golds.push(gold);
        }
        // A fixed order of skills, so that the seed alone decides.
        let mut skills: Vec<_> = by_skill.keys().cloned().collect();
        skills.sort_unstable();
        for skill in skills {
            if let Some(of_skill) = by_skill.get_mut(&skill) {
                of_skill.golds.shuffle(rng);
            }
        }
        Self(by_skill)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next gold task that can be made to look like `like`.
    pub(super) fn next(&mut self, like: &Submission, rng: &mut impl Rng) -> Option<(Submission, Truth)> {
        let of_skill = self.0.get_mut(&*like.task.skill)?;
        for _ in 0..of_skill.golds.len() {
            let gold = &of_skill.golds[of_skill.next % of_skill.golds.len()];
            of_skill.next = (of_skill.next + 1) % of_skill.golds.len();
            if let Some(shaped) = gold.shaped_like(like, rng) {
                return Some(shaped);
            }
        }
        None
    }
}

/// The truth about the outputs of a submission.
///
/// A verdict on one output is *right* if its score is on the right side of one half: above for a good output, below for a bad one. A score
/// of exactly one half is not right. A comparison is right if it prefers the better output.
///
/// ```
/// use x402_market::{Preference, Truth};
///
/// let group = Truth::good([true, false, true]);   // of three outputs, the second is bad
/// let pair = Truth::Better(Preference::First);    // of a pair, the first is better
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum Truth {
    /// For each output, in order, `true` if it is good.
    Good(Vec<bool>),
    /// The better output of a pair.
    Better(Preference),
}

impl Truth {
    /// Says of each output, in order, whether it is good.
    #[must_use]
    pub fn good(outputs: impl IntoIterator<Item = bool>) -> Self {
        Self::Good(outputs.into_iter().collect())
    }

    /// Returns `true` if this can be the truth about a submission.
    pub(super) fn fits(&self, submission: &Submission) -> bool {
        match self {
            Self::Good(good) => good.len() == submission.outputs().len(),
            Self::Better(_) => matches!(submission.outputs, Outputs::Pair(_)),
        }
    }

    /// Returns the truth about some of the outputs.
    pub(super) fn part(&self, range: &Range<usize>) -> Self {
        match self {
            Self::Good(good) => Self::Good(good.get(range.clone()).unwrap_or_default().to_vec()),
            Self::Better(better) => Self::Better(*better),
        }
    }

    /// Returns `true` if the verdict on the output at this position is right.
    fn agrees(&self, verdicts: &[Verdict], at: usize) -> bool {
        match self {
            Self::Good(good) => {
                let score = verdicts[at].score.get();
                good.get(at).is_some_and(|good| if *good { score > 0.5 } else { score < 0.5 })
            }
            Self::Better(better) => Evaluation::preferred(verdicts) == Some(*better),
        }
    }
}

/// Returns the outcome to record for an evaluation.
///
/// Each payment supports one record, so one verdict is drawn at random: the share of records that are right is then the share of verdicts
/// that are.
pub(super) fn outcome(verdicts: &[Verdict], truth: Option<&Truth>, rng: &mut impl Rng) -> CallOutcome {
    if verdicts.is_empty() {
        return CallOutcome::InvalidAnswer;
    }
    let at = rng.random_range(0..verdicts.len());
    let verdict = &verdicts[at];
    let right = truth.map(|truth| truth.agrees(verdicts, at));
    CallOutcome::answered(verdict.score.get(), Some(verdict.confidence.get()), right)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};

    use super::*;
    use crate::{Confidence, Score};

    fn rng() -> Xoshiro256PlusPlus {
        Xoshiro256PlusPlus::seed_from_u64(1)
    }

    fn task(prompt: &str) -> Task {
        Task::new("prose", prompt).unwrap()
    }

    /// Three good ones and two bad ones.
    fn gold(prompt: &str) -> Gold {
        let gold = Gold::new(task(prompt)).good("good 1").unwrap().good("good 2").unwrap().good("good 3").unwrap();
        gold.bad("bad 1").unwrap().bad("bad 2").unwrap()
    }

    #[test]
    fn gold_task_takes_the_shape_of_the_submission_and_keeps_its_truth() {
        let mut rng = rng();
        let is_good = |output: &LongText| output.starts_with("good");
        for _ in 0..50 {
            let single = Submission::single(task("x"), "y").unwrap();
            let (shaped, truth) = gold("?").shaped_like(&single, &mut rng).unwrap();
            assert!(matches!(shaped.outputs, Outputs::Single(_)));
            assert_eq!(truth, Truth::good(shaped.outputs().iter().map(is_good)));

            let group = Submission::group(task("x"), ["1", "2", "3", "4"]).unwrap();
            let (shaped, truth) = gold("?").shaped_like(&group, &mut rng).unwrap();
            assert!(matches!(shaped.outputs, Outputs::Group(_)) && shaped.outputs().len() == 4);
            assert_eq!(truth, Truth::good(shaped.outputs().iter().map(is_good)));
            assert_eq!(shaped.outputs().iter().map(|output| output.to_string()).collect::<HashSet<_>>().len(), 4);

            let pair = Submission::pair(task("x"), "1", "2").unwrap();
            let (shaped, truth) = gold("?").shaped_like(&pair, &mut rng).unwrap();
            let better = if is_good(&shaped.outputs()[0]) { Preference::First } else { Preference::Second };
            assert_eq!(truth, Truth::Better(better));
            assert_ne!(is_good(&shaped.outputs()[0]), is_good(&shaped.outputs()[1]));
        }
    }

    #[test]
    fn gold_task_that_cannot_look_like_the_submission_is_not_used() {
        let mut rng = rng();
        let six = Submission::group(task("x"), ["1", "2", "3", "4", "5", "6"]).unwrap();
        assert_eq!(gold("?").shaped_like(&six, &mut rng), None, "it has five");
        let pair = Submission::pair(task("x"), "1", "2").unwrap();
        assert_eq!(Gold::new(task("?")).good("good").unwrap().shaped_like(&pair, &mut rng), None, "none is bad");
        let message = crate::Message::new("user", "x").unwrap();
        let chat = Submission::single(Task::chat("prose", [message]).unwrap(), "y").unwrap();
        assert_eq!(gold("?").shaped_like(&chat, &mut rng), None);
        for richer in [task("x").with_reference("the truth"), task("x").with_context("a test")] {
            let richer = Submission::single(richer.unwrap(), "y").unwrap();
            assert_eq!(gold("?").shaped_like(&richer, &mut rng), None);
        }
    }

    #[test]
    fn gold_tasks_of_a_skill_are_all_used_before_one_repeats() {
        let mut rng = rng();
        let golds = (0..7).map(|number| gold(&number.to_string())).collect();
        let mut golds = GoldTasks::new(golds, &mut rng);
        let like = Submission::single(task("x"), "y").unwrap();
        for _ in 0..3 {
            let drawn = (0..7).map(|_| golds.next(&like, &mut rng).unwrap().0.task.question().to_owned());
            assert_eq!(drawn.collect::<HashSet<_>>().len(), 7);
        }
        let other = Submission::single(Task::new("arithmetic", "x").unwrap(), "y").unwrap();
        assert_eq!(golds.next(&other, &mut rng), None);
    }

    fn verdicts(scores: &[f64]) -> Vec<Verdict> {
        let confidence = Confidence::new(0.8).unwrap();
        scores.iter().map(|score| Verdict::new(Score::new(*score).unwrap(), confidence, "")).collect()
    }

    fn right(scores: &[f64], truth: &Truth, seed: u64) -> Option<bool> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        match outcome(&verdicts(scores), Some(truth), &mut rng) {
            CallOutcome::Answered { right, .. } => right,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn score_is_right_on_the_right_side_of_one_half_only() {
        for (score, good, expected) in
            [(0.51, true, true), (0.5, true, false), (0.49, true, false), (0.49, false, true), (0.5, false, false)]
        {
            assert_eq!(right(&[score], &Truth::good([good]), 1), Some(expected), "{score} {good}");
        }
        let better = Truth::Better(Preference::First);
        assert_eq!(right(&[0.4, 0.3], &better, 1), Some(true));
        assert_eq!(right(&[0.3, 0.4], &better, 1), Some(false));
        assert_eq!(right(&[0.4, 0.4], &better, 1), Some(false));
    }

    #[test]
    fn recorded_verdicts_of_groups_are_right_as_often_as_all_verdicts() {
        let truth = Truth::good([true, true, true, false]);
        let scores = [0.9, 0.9, 0.1, 0.1];
        let rights = (0..1_000).filter(|seed| right(&scores, &truth, *seed) == Some(true)).count();
        assert!((700..800).contains(&rights), "three of four: {rights}");
    }
}
