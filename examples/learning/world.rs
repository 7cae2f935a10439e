//! A world: tasks, which of their outputs are right, how outputs read, and who sells verdicts about them.

use std::sync::Arc;

use super::rng::Rng;

/// How many words an output has, and how many different ones there are of each sort.
const WORDS: usize = 12;
pub(crate) const COMMON: usize = 200;
pub(crate) const LOOKS: usize = 16;
pub(crate) const OF_CLASS: usize = 16;
/// The share of an output's words that are of its class.
const CLASS_SHARE: f64 = 0.15;

/// A task of a student.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    /// Its position in the course.
    pub(crate) group: usize,
    /// What the policy distinguishes.
    pub(crate) context: usize,
    /// What judging it takes.
    pub(crate) skill: usize,
}

/// The mean and the standard deviation of the score that a seller gives to an action, having sold so many evaluations to this payer.
pub(crate) type Rule = Arc<dyn Fn(&Task, usize, u64) -> (f64, f64) + Send + Sync>;

/// How a seller judges.
#[derive(Clone)]
pub(crate) enum Method {
    /// By construction: it is told the action.
    Rule(Rule),
    /// By what it learned from lessons, reading the text.
    Learns,
}

/// An evaluator.
#[derive(Clone)]
pub(crate) struct Seller {
    /// The price of an output, in µUSDC.
    pub(crate) price: u64,
    /// The skills that its card claims.
    pub(crate) claims: Vec<usize>,
    pub(crate) method: Method,
    /// After how many groups it takes another name.
    pub(crate) renames_every: Option<usize>,
}

impl Seller {
    pub(crate) fn new(
        price: u64,
        claims: impl IntoIterator<Item = usize>,
        rule: impl Fn(&Task, usize, u64) -> (f64, f64) + Send + Sync + 'static,
    ) -> Self {
        Self { price, claims: claims.into_iter().collect(), method: Method::Rule(Arc::new(rule)), renames_every: None }
    }

    /// Returns the number of its name.
    pub(crate) fn life(&self, group: usize) -> usize {
        self.renames_every.map_or(0, |every| group / every)
    }
}

/// How outputs read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Each action has words of its own, the same in all contexts.
    Actions,
    /// As `Actions`, but the first two actions have the same words.
    Hidden,
    /// Each action of each context has words of its own, and some words look advanced.
    Levels,
}

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) groups: usize,
    pub(crate) contexts: usize,
    pub(crate) actions: usize,
    pub(crate) skills: usize,
    /// Returns the skill that judging takes.
    pub(crate) skill: fn(&World, context: usize, group: usize) -> usize,
    /// Returns `true` if an action is right in a context.
    pub(crate) is_good: fn(context: usize, action: usize) -> bool,
    /// After how many groups each further context opens; `None` if all are open.
    pub(crate) opens_every: Option<usize>,
    /// The first context at which quality is measured.
    pub(crate) measured_from: usize,
    /// Whether contexts have weights in common, and the learning rate.
    pub(crate) policy: (bool, f64),
    pub(crate) reading: Reading,
    pub(crate) sellers: Vec<Seller>,
    /// The best seller of each skill, to compare with.
    pub(crate) best: Vec<usize>,
}

impl World {
    /// Draws the task of a group.
    pub(crate) fn task(&self, group: usize, rng: &mut Rng) -> Task {
        let (of_newest, any) = (rng.unit() < 2.0 / 3.0, rng.unit());
        let open = self.opens_every.map_or(self.contexts, |every| (group / every + 1).min(self.contexts));
        let drawn = (any * open as f64) as usize;
        let context = if self.opens_every.is_some() && of_newest { open - 1 } else { drawn };
        Task { group, context, skill: (self.skill)(self, context, group) }
    }

    /// Returns the words of an output, as numbers. `problem` is another one for each task.
    pub(crate) fn words(&self, problem: &[u64], context: usize, action: usize) -> Vec<u32> {
        let mut rng = Rng::of(problem);
        let (class, looks) = match self.reading {
            Reading::Actions => (action, 0.0),
            Reading::Hidden => (action.max(1), 0.0),
            Reading::Levels => (context * self.actions + action, looks(context, action)),
        };
        let mut rng = Rng::of(&[rng.next(), action as u64]);
        let word = |_| {
            let sort = rng.unit();
            let (from, count) = if sort < CLASS_SHARE {
                (COMMON + LOOKS + class * OF_CLASS, OF_CLASS)
            } else if sort < CLASS_SHARE + looks {
                (COMMON, LOOKS)
            } else {
                (0, COMMON)
            };
            (from + rng.below(count)) as u32
        };
        (0..WORDS).map(word).collect()
    }

    /// Returns how many different words there are.
    pub(crate) fn vocabulary(&self) -> usize {
        COMMON + LOOKS + self.contexts * self.actions * OF_CLASS
    }

    /// Returns the quality of a policy: the probability of a right output, over all contexts that are measured.
    pub(crate) fn quality(&self, policy: &super::table::Table) -> f64 {
        let of = |context| {
            let each = policy.probabilities(context).into_iter().enumerate();
            each.filter(|(action, _)| (self.is_good)(context, *action)).map(|(_, probability)| probability).sum::<f64>()
        };
        let measured = self.measured_from..self.contexts;
        let count = measured.len() as f64;
        measured.map(of).sum::<f64>() / count
    }

    /// Returns the effective number of ways in which right outputs are right: the exponential of their entropy, over all contexts.
    pub(crate) fn ways(&self, policy: &super::table::Table) -> f64 {
        let of = |context| {
            let each = policy.probabilities(context).into_iter().enumerate();
            let good: Vec<f64> = each.filter(|(at, _)| (self.is_good)(context, *at)).map(|(_, p)| p).collect();
            let sum: f64 = good.iter().sum();
            (-good.iter().map(|p| p / sum * (p / sum).max(f64::MIN_POSITIVE).ln()).sum::<f64>()).exp()
        };
        (0..self.contexts).map(of).sum::<f64>() / self.contexts as f64
    }
}

/// Returns the share of an output's words that look advanced.
fn looks(context: usize, action: usize) -> f64 {
    match action {
        0 => 0.15,
        1 if context >= 2 => 0.3,
        _ => 0.03,
    }
}

/// Returns the text of an output.
pub(crate) fn text(words: &[u32]) -> String {
    words.iter().map(|word| format!("w{word}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::{super::experiments::shift, *};

    #[test]
    fn an_output_reads_the_same_in_all_arms_and_levels_open_in_turn() {
        let world = shift(Vec::new());
        assert_eq!(world.words(&[1, 2], 3, 1), world.words(&[1, 2], 3, 1));
        assert_ne!(world.words(&[1, 2], 3, 1), world.words(&[1, 3], 3, 1));
        let advanced = |action| {
            let all = (0..400).flat_map(|problem| world.words(&[problem], 4, action));
            all.filter(|word| (COMMON..COMMON + LOOKS).contains(&(*word as usize))).count()
        };
        assert!(advanced(1) > advanced(0) && advanced(0) > 2 * advanced(2));
        let mut rng = Rng::seeded(1);
        assert!((0..120).all(|group| world.task(group, &mut rng).context == 0));
        let late: Vec<_> = (0..300).map(|_| world.task(839, &mut rng).context).collect();
        assert!((0..6).all(|level| late.contains(&level)) && late.iter().filter(|level| **level == 5).count() > 180);
    }

    #[test]
    fn hidden_errors_read_like_right_outputs() {
        let world = World { reading: Reading::Hidden, ..shift(Vec::new()) };
        let classes = |action| {
            let all = (0..200).flat_map(|problem| world.words(&[problem], 0, action));
            let mut all: Vec<_> = all.filter(|word| *word as usize >= COMMON).collect();
            all.sort_unstable();
            all.dedup();
            all
        };
        assert_eq!(classes(0), classes(1));
        assert!(classes(0).iter().all(|word| !classes(2).contains(word)));
    }
}
