//! Trains one student in one arm.

use x402_market::{LengthError, Task};

use super::{
    policy::{ACTIONS, Action, KINDS, Kind, Policy, Problem, Rng, actions, advantages, answer},
    teacher::{Taught, Teacher},
    world::{ASPECTS, Aspect, Errors},
};

/// The sizes of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) groups: usize,
    pub(crate) group_size: usize,
    /// The budget per output, in µUSDC.
    pub(crate) budget: u64,
    /// The share of groups whose truth the student knows.
    pub(crate) audits: f64,
    /// How evaluators that are not experts err.
    pub(crate) errors: Errors,
}

impl Settings {
    /// Returns how many outputs are judged.
    pub(crate) const fn labels(&self) -> usize {
        self.groups * self.group_size
    }

    /// Returns the whole budget, in µUSDC.
    pub(crate) const fn total(&self) -> u64 {
        self.budget * self.labels() as u64
    }
}

/// The problem and the aspect of a group.
#[derive(Clone, Debug)]
pub(crate) struct Assignment {
    pub(crate) number: usize,
    pub(crate) problem: Problem,
    pub(crate) aspect: Aspect,
    pub(crate) audited: bool,
}

/// Returns the assignments of a seed, the same for all arms.
pub(crate) fn assignments(seed: u64, settings: &Settings) -> Vec<Assignment> {
    let mut luck = Rng::seeded(seed.wrapping_mul(2) + 1);
    let draw = |number| Assignment {
        number,
        problem: Problem::any(&mut luck),
        aspect: luck.pick(&ASPECTS),
        audited: luck.unit() < settings.audits,
    };
    (0..settings.groups).map(draw).collect()
}

/// Returns the task that evaluators get: with the formula and without the answer.
pub(crate) fn task(problem: &Problem, aspect: Aspect, number: usize) -> Result<Task, LengthError> {
    let task = Task::new(aspect.skill(), &problem.prompt)?.with_context(&problem.formula)?;
    task.with_rubric(aspect.rubric())?.with_id(format!("group {number}"))
}

/// The outputs of a group, and the truth about them.
#[derive(Clone, Debug)]
pub(crate) struct Group<'a> {
    pub(crate) assignment: &'a Assignment,
    pub(crate) actions: Vec<Action>,
    pub(crate) outputs: Vec<String>,
    pub(crate) good: Vec<bool>,
}

impl<'a> Group<'a> {
    pub(crate) fn roll_out(policy: &Policy, assignment: &'a Assignment, settings: &Settings, rng: &mut Rng) -> Self {
        let Assignment { problem, aspect, .. } = assignment;
        let actions: Vec<_> = (0..settings.group_size).map(|_| policy.sample(problem.kind, rng)).collect();
        let outputs = actions.iter().map(|action| answer(problem, *action)).collect();
        let good = actions.iter().map(|action| aspect.is_good(problem, *action)).collect();
        Self { assignment, actions, outputs, good }
    }
}

/// The course of a student's training.
#[derive(Clone, Debug, Default)]
pub(crate) struct Course {
    /// The expected quality after each group.
    pub(crate) quality: Vec<f64>,
    /// The entropy after each group, in nats.
    pub(crate) entropy: Vec<f64>,
    /// The share of different outputs in each group.
    pub(crate) distinct: Vec<f64>,
    /// The teacher's mean score of each group, if any, and the share of good outputs.
    pub(crate) scored: Vec<Option<(f64, f64)>>,
    /// The evaluators hired for each group, by position in the market.
    pub(crate) hired: Vec<Vec<usize>>,
    /// How often outputs are good at the end, by aspect and in all aspects.
    pub(crate) aspects: [f64; 3],
    pub(crate) flawless: f64,
}

/// Trains a policy. The result depends on `seed` and the teacher.
pub(crate) async fn train(seed: u64, settings: &Settings, teacher: &Teacher) -> anyhow::Result<Course> {
    let truths = Truths::new();
    let (mut policy, mut fate) = (Policy::new(), Rng::seeded(seed.wrapping_mul(2)));
    let mut course = Course::default();
    for assignment in &assignments(seed, settings) {
        let group = Group::roll_out(&policy, assignment, settings, &mut fate);
        let Taught { scores, hired } = teacher.teach(&group).await?;
        let known: Vec<_> =
            group.actions.iter().zip(&scores).filter_map(|(action, score)| Some((*action, (*score)?))).collect();
        let rewards: Vec<_> = known.iter().map(|(_, score)| *score).collect();
        let lesson: Vec<_> = known.iter().map(|(action, _)| *action).zip(advantages(&rewards)).collect();
        policy.learn(assignment.problem.kind, &lesson);

        let good = mean(group.good.iter().map(|good| f64::from(*good)));
        course.scored.push((!rewards.is_empty()).then(|| (mean(rewards.iter().copied()), good)));
        course.hired.push(hired);
        let mut different: Vec<_> = group.outputs.iter().collect();
        different.sort_unstable();
        different.dedup();
        course.distinct.push(different.len() as f64 / group.outputs.len() as f64);
        course.quality.push(truths.expect(&policy, |good| mean(good.iter().map(|good| f64::from(*good)))));
        course.entropy.push(policy.entropy());
    }
    course.aspects = [0, 1, 2].map(|aspect: usize| truths.expect(&policy, |good| f64::from(good[aspect])));
    course.flawless = truths.expect(&policy, |good| f64::from(good.iter().all(|good| *good)));
    Ok(course)
}

pub(crate) fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}

/// The truth about every action, which is the same for all problems of a kind.
struct Truths(Vec<(Kind, [[bool; 3]; ACTIONS])>);

impl Truths {
    fn new() -> Self {
        let of = |kind: Kind| {
            let problem = Problem::of(kind, &mut Rng::seeded(0));
            let mut truths = [[false; 3]; ACTIONS];
            for (truth, action) in truths.iter_mut().zip(actions()) {
                *truth = ASPECTS.map(|aspect| aspect.is_good(&problem, action));
            }
            (kind, truths)
        };
        Self(KINDS.into_iter().map(of).collect())
    }

    /// Returns the expectation of a property of outputs, over all kinds of problems.
    fn expect(&self, policy: &Policy, of: impl Fn(&[bool; 3]) -> f64) -> f64 {
        let expected = |(kind, truths): &(Kind, [[bool; 3]; ACTIONS])| {
            policy
                .probabilities(*kind)
                .iter()
                .zip(truths)
                .map(|(probability, good)| probability * of(good))
                .sum::<f64>()
        };
        mean(self.0.iter().map(expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_true_of_an_action_is_so_for_all_problems_of_a_kind() {
        let (truths, mut rng) = (Truths::new(), Rng::seeded(9));
        for (kind, truths) in &truths.0 {
            for _ in 0..40 {
                let problem = Problem::of(*kind, &mut rng);
                for (truth, action) in truths.iter().zip(actions()) {
                    assert_eq!(
                        *truth,
                        ASPECTS.map(|aspect| aspect.is_good(&problem, action)),
                        "{problem:?} {action:?}"
                    );
                }
            }
        }
    }

    #[tokio::test]
    async fn the_truth_teaches_and_silence_does_not() {
        let settings = Settings { groups: 200, group_size: 8, budget: 0, audits: 0.0, errors: Errors::Independent };
        let taught = train(1, &settings, &Teacher::Truth).await.unwrap();
        let quality = |course: &Course| course.quality[199];
        assert!(quality(&taught) > 0.75 && quality(&taught) > taught.quality[0] + 0.2, "{}", quality(&taught));
        let silent = train(1, &settings, &Teacher::Audits).await.unwrap();
        assert!((quality(&silent) - silent.quality[0]).abs() < 0.01);
        let again = train(1, &settings, &Teacher::Truth).await.unwrap();
        assert_eq!(again.quality, taught.quality);
    }
}
