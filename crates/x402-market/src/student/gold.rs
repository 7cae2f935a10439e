//! Tasks whose truth is known, hidden among the others.

use std::collections::HashMap;

use rand::{Rng, RngExt, seq::SliceRandom};

use super::Truth;
use crate::{Input, LengthError, LongText, Outputs, Preference, Submission, Task};

/// A task with outputs that are known to be good or bad.
///
/// From time to time one is sent to evaluators as if it were a submission like any other, and shaped like the one that it goes before: as
/// many outputs, drawn at random and in random order; for a pair a good one and a bad one. So it is well to have several of both, tasks
/// that look like the real ones, and more of them than one evaluator is ever sent: each is used before any is used again. One without a
/// reference or a context goes before no submission that has one; what real ones do not have is left out of it.
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
    /// A task without outputs yet. Its id is never sent.
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

    /// A submission that looks like another one, if that can be made of this.
    fn shaped_like(&self, like: &Submission, rng: &mut impl Rng) -> Option<(Submission, Truth)> {
        let (task, real) = (&self.task, &like.task);
        let is_prompt = |task: &Task| matches!(task.input, Input::Prompt(_));
        // What the others always have can be taken from a task, but not be invented for it.
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
        // A field that the others never have would give it away.
        task.reference = task.reference.filter(|_| like.task.reference.is_some());
        task.context = task.context.filter(|_| like.task.context.is_some());
        task.rubric = like.task.rubric.as_ref().map(|rubric| task.rubric.unwrap_or_else(|| rubric.clone()));
        Some((Submission { task, outputs }, truth))
    }
}

/// All of them, by skill, in an order that nobody knows.
#[derive(Debug, Default)]
pub(super) struct Golds(HashMap<String, Shelf>);

#[derive(Debug, Default)]
struct Shelf {
    golds: Vec<Gold>,
    next: usize,
}

impl Golds {
    pub(super) fn new(golds: Vec<Gold>, rng: &mut impl Rng) -> Self {
        let mut shelves: HashMap<String, Shelf> = HashMap::new();
        for gold in golds {
            shelves.entry(gold.task.skill.to_string()).or_default().golds.push(gold);
        }
        // The order in which a map is walked must not decide what is drawn.
        let mut names: Vec<_> = shelves.keys().cloned().collect();
        names.sort_unstable();
        for name in names {
            if let Some(shelf) = shelves.get_mut(&name) {
                shelf.golds.shuffle(rng);
            }
        }
        Self(shelves)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next one that can be made to look like `like`.
    pub(super) fn next(&mut self, like: &Submission, rng: &mut impl Rng) -> Option<(Submission, Truth)> {
        let shelf = self.0.get_mut(&*like.task.skill)?;
        for _ in 0..shelf.golds.len() {
            let gold = &shelf.golds[shelf.next % shelf.golds.len()];
            shelf.next = (shelf.next + 1) % shelf.golds.len();
            if let Some(shaped) = gold.shaped_like(like, rng) {
                return Some(shaped);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};

    use super::*;

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
    fn a_gold_takes_the_shape_of_what_it_goes_along_with_and_its_truth_goes_with_it() {
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
    fn what_cannot_look_like_the_others_is_not_used() {
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
    fn each_is_used_before_any_is_used_again_and_only_for_its_skill() {
        let mut rng = rng();
        let golds = (0..7).map(|number| gold(&number.to_string())).collect();
        let mut golds = Golds::new(golds, &mut rng);
        let like = Submission::single(task("x"), "y").unwrap();
        for _ in 0..3 {
            let drawn = (0..7).map(|_| golds.next(&like, &mut rng).unwrap().0.task.question().to_owned());
            assert_eq!(drawn.collect::<HashSet<_>>().len(), 7);
        }
        let other = Submission::single(Task::new("arithmetic", "x").unwrap(), "y").unwrap();
        assert_eq!(golds.next(&other, &mut rng), None);
    }
}
