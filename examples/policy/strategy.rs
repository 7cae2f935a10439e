//! Strategies to solve a problem: one is right, the others are typical mistakes.

use serde::{Deserialize, Serialize};

use super::problem::{Decimal, Kind, Problem};

/// A strategy to solve a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Strategy {
    /// Step by step, and right.
    Sound,
    /// Stops one step too early.
    Hasty,
    /// Right, but the answer has no unit.
    Unitless,
    /// By the typical misconception of the kind: percentages are added, units not converted, one minute taken for all.
    Naive,
    /// Right but for a slip in the last step.
    Slip,
    /// A guess in round numbers, without steps.
    Guess,
}

/// All strategies.
pub(crate) const STRATEGIES: [Strategy; 6] =
    [Strategy::Sound, Strategy::Hasty, Strategy::Unitless, Strategy::Naive, Strategy::Slip, Strategy::Guess];

/// A solution, before it is put into words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Working {
    pub(super) steps: Vec<Step>,
    /// The answer, with its unit if it has one.
    pub(super) answer: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// What the step is for.
    pub(super) purpose: &'static str,
    /// An equality.
    pub(super) equation: String,
}

/// The unit of a result.
#[derive(Clone, Copy)]
enum Unit {
    Before(&'static str),
    After(&'static str),
}

impl Unit {
    fn of(self, number: impl std::fmt::Display) -> String {
        match self {
            Self::Before(sign) => format!("{sign}{number}"),
            Self::After(name) => format!("{number} {name}"),
        }
    }
}

/// The right solution: two steps with their results.
struct Sound {
    first: (&'static str, String, String),
    /// Each step: label, left side and result.
    last: (&'static str, String, Decimal),
    unit: Unit,
    /// The misconception: left side and result.
    naive: (String, Decimal),
}

impl Problem {
    /// Returns `true` if a solution by this strategy is right, including the unit.
    pub(crate) const fn is_right(strategy: Strategy) -> bool {
        matches!(strategy, Strategy::Sound)
    }

    /// Returns the right answer.
    pub(crate) fn truth(&self) -> String {
        self.work(Strategy::Sound).answer
    }

    pub(super) fn work(&self, strategy: Strategy) -> Working {
        let Sound { first, last, unit, naive } = self.sound();
        let (purpose, left, result) = last;
        let first_step = Step { purpose: first.0, equation: format!("{} = {}", first.1, first.2) };
        let last_step = |result: Decimal| Step { purpose, equation: format!("{left} = {}", unit.of(result)) };
        let (steps, answer) = match strategy {
            Strategy::Sound => (vec![first_step, last_step(result)], unit.of(result)),
            Strategy::Hasty => (vec![first_step], first.2),
            Strategy::Unitless => (vec![first_step, last_step(result)], result.to_string()),
            Strategy::Naive => {
                let (left, result) = naive;
                let equation = format!("{left} = {result}");
                (vec![Step { purpose: "put the numbers together", equation }], unit.of(result))
            }
            Strategy::Slip => (vec![first_step, last_step(result.plus(10))], unit.of(result.plus(10))),
            Strategy::Guess => (Vec::new(), unit.of(result.guess())),
        };
        Working { steps, answer }
    }

    fn sound(&self) -> Sound {
        let [a, b, c] = self.numbers;
        let whole = Decimal::whole;
        match self.kind {
            Kind::Journey => {
                let speed = Decimal::ratio(a, 60);
                Sound {
                    first: ("find the speed by the minute", format!("{a} km/h"), format!("{speed} km/min")),
                    last: ("find the way", format!("{speed} km/min * {b} min"), Decimal::ratio(a * b, 60)),
                    unit: Unit::After("km"),
                    naive: (format!("{a} * {b}"), whole(a * b)),
                }
            }
            Kind::Sale => {
                let cut = Decimal::ratio(a * b, 100);
                Sound {
                    first: ("find the price cut", format!("{b}% of ${a}"), format!("${cut}")),
                    last: ("take it off the price", format!("${a} - ${cut}"), Decimal::ratio(a * (100 - b), 100)),
                    unit: Unit::Before("$"),
                    naive: (format!("{a} - {b}"), whole(a - b)),
                }
            }
            Kind::Length => Sound {
                first: ("turn the run into metres", format!("{a} km"), format!("{} m", a * 1_000)),
                last: ("add the walk", format!("{} m + {b} m", a * 1_000), whole(a * 1_000 + b)),
                unit: Unit::After("m"),
                naive: (format!("{a} + {b}"), whole(a + b)),
            },
            Kind::Shopping => Sound {
                first: ("find the cost of the books", format!("{a} * ${b}"), format!("${}", a * b)),
                last: ("add the bag", format!("${} + ${c}", a * b), whole(a * b + c)),
                unit: Unit::Before("$"),
                naive: (format!("{a} * ({b} + {c})"), whole(a * (b + c))),
            },
            Kind::Tank => Sound {
                first: ("find out how much is lost", format!("{b} l/min * {c} min"), format!("{} l", b * c)),
                last: ("take that from the tank", format!("{a} l - {} l", b * c), whole(a - b * c)),
                unit: Unit::After("l"),
                naive: (format!("{a} - {b}"), whole(a - b)),
            },
            Kind::Rises => {
                let first = a + a * b / 100;
                let last = Decimal::ratio(first * (100 + c), 100);
                Sound {
                    first: ("find the rent after one year", format!("${a} + {b}% of ${a}"), format!("${first}")),
                    last: ("raise that once more", format!("${first} + {c}% of ${first}"), last),
                    unit: Unit::Before("$"),
                    naive: (format!("{a} + {}% of {a}", b + c), whole(a + a * (b + c) / 100)),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Rng, *};

    #[test]
    fn a_right_solution_reads_as_one() {
        let problem =
            Problem { kind: Kind::Journey, prompt: String::new(), formula: String::new(), numbers: [90, 40, 0] };
        let work = problem.work(Strategy::Sound);
        let equations: Vec<_> = work.steps.iter().map(|step| &*step.equation).collect();
        assert_eq!(equations, ["90 km/h = 1.5 km/min", "1.5 km/min * 40 min = 60 km"]);
        assert_eq!((&*work.answer, &*problem.truth()), ("60 km", "60 km"));
        assert_eq!(problem.work(Strategy::Naive).answer, "3600 km");
        assert_eq!(problem.work(Strategy::Unitless).answer, "60");
    }

    #[test]
    fn no_other_strategy_comes_to_the_right_answer_by_chance() {
        let mut rng = Rng::seeded(4);
        for _ in 0..2_000 {
            let problem = Problem::any(&mut rng);
            for strategy in STRATEGIES.into_iter().filter(|strategy| !Problem::is_right(*strategy)) {
                assert_ne!(problem.work(strategy).answer, problem.truth(), "{strategy:?} {problem:?}");
            }
        }
    }
}
