//! A judge that learns from lessons.
//!
//! `features.rs` turns a task and an output into numbers, `model.rs` learns from them, and this file judges, and keeps what was learned.

mod features;
mod model;

use std::{
    io,
    path::Path,
    sync::{Arc, Mutex},
};

use alloy_primitives::Address;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tower_x402::client::JournalFile;
use x402_market::{
    Confidence, Lesson, LongText, Score, Submission, Task, Verdict,
    judge::{Judge, JudgeError},
    shared::{json_line, lock},
};

use self::{
    features::Features,
    model::{Example, Model},
};

/// After how many lessons the file is replaced by what they add up to.
const LESSONS_PER_FILE: usize = 1_000;
/// How much the score of the judge beside it moves the log-odds, from its lowest to its highest score.
const BESIDE: f32 = 4.0;

/// A judge that learns from [lessons](Lesson), and sells what it learned.
///
/// It is a logistic regression on the words of an output and on [signals](LearningJudgeBuilder::signal), for each skill. It can stand
/// [beside](LearningJudgeBuilder::beside) another judge: at first it says what that one says, and learns where that is wrong.
///
/// - A lesson counts as far as its payer agrees with others. A payer whose truths contradict what others taught is soon not believed.
/// - Its score is the probability that the output is good, calibrated on the lessons before each was learned. So is its confidence.
/// - If its verdicts get worse, the world has changed: it learns faster for a while.
/// - It judges by a copy of what it learned, the [version](Judge::version), which is renewed after 8 lessons, or a
///   quarter of all; after 8 while the world changes.
/// - What it learned from a lesson is on disk before the lesson is acknowledged, if it was [opened](LearningJudgeBuilder::open) with a file.
///
/// Anybody can buy one verdict and teach one falsehood. Until a payer can be compared with others, its lessons count two fifths.
///
/// ```no_run
/// # fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_judges::{ArithmeticJudge, LearningJudge};
///
/// let judge = LearningJudge::builder()
///     .beside(ArithmeticJudge)
///     .signal("questions", |_task, output| output.matches('?').count() as f64 / 10.0)
///     .open("learned.jsonl")?;
/// # Ok(()) }
/// ```
///
/// The evaluator's card must say that it takes lessons ([`AgentCardBuilder::lessons`](x402_market::AgentCardBuilder::lessons)).
#[derive(Clone)]
pub struct LearningJudge(Arc<Inner>);

#[derive(Default)]
struct Inner {
    beside: Option<Box<dyn Judge>>,
    signals: Vec<(String, Signal)>,
    state: Mutex<State>,
}

type Signal = Box<dyn Fn(&Task, &str) -> f64 + Send + Sync>;

#[derive(Default)]
struct State {
    model: Model,
    file: Option<JournalFile>,
    lines: usize,
}

/// The settings of a [`LearningJudge`]. Create it with [`LearningJudge::builder`].
#[derive(Default)]
#[must_use]
pub struct LearningJudgeBuilder(Inner);

/// What a [`LearningJudge`] has learned from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LearningStats {
    /// Lessons, those that did not count included.
    pub lessons: u64,
    /// How many times what it judges by was renewed.
    pub version: u64,
    /// How many times it noticed that its verdicts got worse.
    pub drifts: u64,
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Line {
    Learned(Box<Model>),
    Lesson { payer: Address, examples: Vec<Example> },
}

impl LearningJudge {
    /// Starts the settings.
    pub fn builder() -> LearningJudgeBuilder {
        LearningJudgeBuilder::default()
    }

    /// Returns what it has learned from.
    pub fn stats(&self) -> LearningStats {
        lock(&self.0.state).model.stats
    }

    /// Returns how far the lessons of this payer are believed, from 0 to 1.
    pub fn trust(&self, payer: Address) -> f64 {
        lock(&self.0.state).model.trust(payer).into()
    }
}

impl LearningJudgeBuilder {
    /// Starts from the verdicts of another judge. It is asked for each verdict and for each lesson.
    pub fn beside(mut self, judge: impl Judge) -> Self {
        self.0.beside = Some(Box::new(judge));
        self
    }

    /// Adds a signal: a number about an output that is cheap to find out, such as whether a program can be read or how many warnings it
    /// has. It is cut to ±1. Length, share of the task's words, and whether brackets are closed are signals already.
    pub fn signal(mut self, name: impl Into<String>, of: impl Fn(&Task, &str) -> f64 + Send + Sync + 'static) -> Self {
        self.0.signals.push((name.into(), Box::new(of)));
        self
    }

    /// Creates a judge that forgets everything when the process ends.
    pub fn in_memory(self) -> LearningJudge {
        LearningJudge(Arc::new(self.0))
    }

    /// Creates a judge that keeps what it learns in this file, which is created if there is none. It must be opened with the same signals.
    ///
    /// # Errors
    /// The file cannot be opened, read or locked (it is locked while another process uses it), or a line of it is no lesson.
    pub fn open(mut self, path: impl AsRef<Path>) -> io::Result<LearningJudge> {
        let (file, text) = JournalFile::open(path.as_ref())?;
        let mut state = State { file: Some(file), lines: text.lines().count(), ..State::default() };
        for (number, line) in text.lines().enumerate() {
            match serde_json::from_str(line) {
                Ok(Line::Learned(model)) => state.model = *model,
                Ok(Line::Lesson { payer, examples }) => state.model.learn(payer, &examples),
                Err(_) => {
                    let problem = format!("line {} of what was learned is no lesson", number + 1);
                    return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
                }
            }
        }
        self.0.state = Mutex::new(state);
        Ok(self.in_memory())
    }
}

impl Inner {
    /// Returns the verdicts of the judge beside it, if there is one.
    async fn beside(&self, submission: &Submission) -> Result<Vec<Option<Verdict>>, JudgeError> {
        match &self.beside {
            Some(judge) => Ok(judge.judge(submission).await?.into_iter().map(Some).collect()),
            None => Ok(vec![None; submission.outputs().len()]),
        }
    }

    fn features(&self, task: &Task, output: &LongText, beside: Option<&Verdict>) -> Features {
        let own = self.signals.iter().map(|(name, of)| (&**name, of(task, output)));
        let offset = beside.map_or(0.0, |verdict| BESIDE * (verdict.score.get() as f32 - 0.5));
        Features::of(task, output, own.collect(), offset)
    }
}

#[async_trait]
impl Judge for LearningJudge {
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        self.0.beside.as_ref().map_or(Ok(()), |judge| judge.accepts(submission))
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        let beside = self.0.beside(submission).await?;
        let outputs = submission.outputs().iter().zip(&beside);
        let features: Vec<_> =
            outputs.map(|(output, beside)| self.0.features(&submission.task, output, beside.as_ref())).collect();
        let state = lock(&self.0.state);
        let verdict = |(features, beside): (&Features, Option<Verdict>)| {
            let good = state.model.probability(features);
            let critique = beside.map_or_else(
                || format!("By {} lessons, it is good with {:.0} %.", state.model.stats.lessons, 100.0 * good).into(),
                |verdict| verdict.critique,
            );
            Verdict::new(Score::clamped(good), Confidence::clamped(good.max(1.0 - good)), critique)
        };
        Ok(features.iter().zip(beside).map(verdict).collect())
    }

    async fn learn(&self, lesson: &Lesson) -> Result<(), JudgeError> {
        let task = &lesson.submission.task;
        let beside = self.0.beside(&lesson.submission).await?;
        let outputs = lesson.submission.outputs().iter().zip(&beside).zip(&*lesson.good);
        let examples = outputs.filter_map(|((output, beside), good)| {
            Some(Example { x: self.0.features(task, output, beside.as_ref()), good: (*good)? })
        });
        let (judge, payer, examples) = (self.clone(), lesson.payer, examples.collect());
        let learning = tokio::task::spawn_blocking(move || lock(&judge.0.state).learn(payer, examples));
        learning.await.map_err(JudgeError::failed)?.map_err(JudgeError::failed)
    }

    fn version(&self) -> Option<String> {
        Some(self.stats().version.to_string())
    }
}

impl State {
    /// Learns a lesson once it is on disk.
    fn learn(&mut self, payer: Address, examples: Vec<Example>) -> io::Result<()> {
        let lesson = Line::Lesson { payer, examples };
        if let Some(file) = &mut self.file {
            file.append(&json_line(&lesson)?, true)?;
            self.lines += 1;
        }
        let Line::Lesson { payer, examples } = &lesson else { return Ok(()) };
        self.model.learn(*payer, examples);
        if self.lines > LESSONS_PER_FILE
            && let Some(file) = &mut self.file
        {
            let learned = Line::Learned(Box::new(self.model.clone()));
            match json_line(&learned).and_then(|learned| file.replace(&learned)) {
                Ok(()) => self.lines = 1,
                // The file stays as it is until the next lesson.
                Err(error) => tracing::warn!(%error, "could not shorten the file of what was learned"),
            }
        }
        Ok(())
    }
}

tower_x402::debug_fields!(LearningJudge |this| { stats: this.stats() });
tower_x402::debug_fields!(LearningJudgeBuilder |this| { signals: this.0.signals.len() });

#[cfg(test)]
mod tests {
    use x402_market::judge::judge_fn;

    use super::*;

    fn submission(outputs: &[&str]) -> Submission {
        Submission::group(Task::new("prose", "Why?").unwrap(), outputs.iter().copied()).unwrap()
    }

    /// Teaches lessons in which one of two words makes an output good.
    fn teach(judge: &LearningJudge, payer: u8, lessons: usize, good: &str) {
        for number in 0..lessons {
            let example = |word: &str| {
                let output = LongText::new(format!("the {word} number {}", number % 3)).unwrap();
                let x = judge.0.features(&Task::new("prose", "Why?").unwrap(), &output, None);
                Example { x, good: word == good }
            };
            let examples = ["yes", "no", "yes", "no"].map(example).to_vec();
            lock(&judge.0.state).learn(Address::repeat_byte(payer), examples).unwrap();
        }
    }

    async fn scores(judge: &LearningJudge) -> [f64; 2] {
        let verdicts = judge.judge(&submission(&["the yes number 7", "the no number 7"])).await.unwrap();
        [verdicts[0].score.get(), verdicts[1].score.get()]
    }

    #[tokio::test]
    async fn what_was_learned_survives_a_restart_and_its_file_stays_small() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("learned.jsonl");
        let judge = LearningJudge::builder().open(&path).unwrap();
        teach(&judge, 1, 30, "yes");
        let (before, stats) = (scores(&judge).await, judge.stats());
        assert!(before[0] > 0.8 && before[1] < 0.2 && stats.lessons == 30, "{before:?} {stats:?}");
        assert!(LearningJudge::builder().open(&path).is_err(), "one process at a time");
        drop(judge);
        let judge = LearningJudge::builder().open(&path).unwrap();
        assert_eq!((scores(&judge).await, judge.stats()), (before, stats));
        teach(&judge, 1, LESSONS_PER_FILE, "yes");
        assert!(std::fs::read_to_string(&path).unwrap().lines().count() < 50);
        let (before, trust) = (scores(&judge).await, judge.trust(Address::repeat_byte(1)));
        drop(judge);
        let judge = LearningJudge::builder().open(&path).unwrap();
        assert_eq!((scores(&judge).await, judge.trust(Address::repeat_byte(1))), (before, trust));
        std::fs::write(folder.path().join("other"), "no lesson\n").unwrap();
        let other = LearningJudge::builder().open(folder.path().join("other")).err().unwrap();
        assert!(other.to_string().contains("line 1"), "{other}");
    }

    #[tokio::test]
    async fn change_of_the_world_is_noticed_and_learned_soon() {
        let judge = LearningJudge::builder().in_memory();
        (0..200).for_each(|number| teach(&judge, number % 4, 1, "yes"));
        assert_eq!(judge.stats().drifts, 0);
        (0..40).for_each(|number| teach(&judge, number % 4, 1, "no"));
        let (scores, stats) = (scores(&judge).await, judge.stats());
        assert!(stats.drifts > 0 && scores[0] < 0.3 && scores[1] > 0.7, "{scores:?} {stats:?}");
    }

    #[tokio::test]
    async fn untaught_it_says_what_the_judge_beside_it_says() {
        let beside = judge_fn(async |submission: Submission| {
            let verdict =
                |output: &LongText| Verdict::new(if output.contains("yes") { 0.9 } else { 0.2 }, 0.6, "so it is");
            Ok(submission.outputs().iter().map(verdict).collect())
        });
        let judge = LearningJudge::builder().beside(beside).signal("long", |_, output| output.len() as f64).in_memory();
        let [yes, no] = scores(&judge).await;
        assert!(yes > 0.8 && no < 0.3, "{yes} {no}");
        assert_eq!(judge.version().as_deref(), Some("0"));
    }

    /// A probability of 0.8 is right in eight cases of ten.
    #[tokio::test]
    async fn probabilities_are_calibrated() {
        let judge = LearningJudge::builder().in_memory();
        let task = Task::new("prose", "Why?").unwrap();
        let example = |number: usize| {
            // The word is right in three cases of four.
            let is_right = !number.is_multiple_of(4);
            let word = if (number / 4).is_multiple_of(2) { "yes" } else { "no" };
            let x = judge.0.features(&task, &LongText::new(word).unwrap(), None);
            Example { x, good: (word == "yes") == is_right }
        };
        for lesson in 0..150 {
            let examples = (0..8).map(|number| example(lesson * 8 + number)).collect();
            lock(&judge.0.state).learn(Address::repeat_byte(1), examples).unwrap();
        }
        let verdicts = judge.judge(&submission(&["yes", "no"])).await.unwrap();
        let [yes, no] = [&verdicts[0], &verdicts[1]].map(|verdict| verdict.score.get());
        assert!((yes - 0.75).abs() < 0.1 && (no - 0.25).abs() < 0.1, "{yes} {no}");
    }
}
