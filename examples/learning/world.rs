//! The world: the aspects that are judged, the truth about outputs, and the evaluators with their prices.

use serde::Serialize;

use super::{
    judges::{Expert, Method},
    policy::{Action, Problem, Style, answer},
};

/// An aspect of an output. Each is a skill of evaluators, and an evaluation is about one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Aspect {
    /// The number in the answer is right.
    Arithmetic,
    /// The answer has the unit that was asked for.
    Units,
    /// The explanation is easy to follow.
    Prose,
}

pub(crate) const ASPECTS: [Aspect; 3] = [Aspect::Arithmetic, Aspect::Units, Aspect::Prose];

impl Aspect {
    /// Returns the skill's name on cards.
    pub(crate) const fn skill(self) -> &'static str {
        match self {
            Self::Arithmetic => "arithmetic",
            Self::Units => "units",
            Self::Prose => "prose",
        }
    }

    /// Returns the rubric for evaluators.
    pub(crate) const fn rubric(self) -> &'static str {
        match self {
            Self::Arithmetic => "Is the number in the answer right?",
            Self::Units => "Is the answer in the unit that was asked for?",
            Self::Prose => "Is the way to the answer explained, in words that are easy to follow?",
        }
    }

    /// Returns the truth, by construction. Students get it in audits only.
    pub(crate) fn is_good(self, problem: &Problem, action: Action) -> bool {
        let (said, truth) = (Answer::of(&answer(problem, action)), Answer::of(&problem.truth()));
        match self {
            Self::Arithmetic => said.number == truth.number,
            Self::Units => said.unit == truth.unit,
            Self::Prose => action.style == Style::Clear,
        }
    }
}

/// Returns the quality of an output: the share of aspects that it is good at.
#[cfg(test)]
fn quality(problem: &Problem, action: Action) -> f64 {
    ASPECTS.iter().filter(|aspect| aspect.is_good(problem, action)).count() as f64 / ASPECTS.len() as f64
}

/// The answer at the end of an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) number: String,
    pub(crate) unit: String,
}

impl Answer {
    /// Reads the text after the last "Answer:", or the whole text without one.
    pub(crate) fn of(text: &str) -> Self {
        let said = text.rsplit("Answer:").next().unwrap_or_default().trim();
        let is_digit = |character: char| character.is_ascii_digit() || matches!(character, '.' | '-');
        let (number, unit) = said.chars().partition::<String, _>(|character| is_digit(*character));
        Self { number, unit: unit.trim().to_owned() }
    }
}

/// How generalists err.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Errors {
    /// At random for every output, so that errors cancel out
    Independent,
    /// Always in the same way about outputs that differ in numbers only, so that a student can exploit it
    Systematic,
}

/// An evaluator.
#[derive(Clone, Debug)]
pub(crate) struct Seller {
    pub(crate) name: &'static str,
    /// The price of an output, in µUSDC.
    pub(crate) price: u64,
    /// The worth that its card claims, in the order of [`ASPECTS`]: 2·accuracy − 1.
    pub(crate) claims: [f64; 3],
    pub(crate) method: Method,
}

/// The claims of evaluators that claim all skills.
const BOAST: [f64; 3] = [0.9; 3];

/// Returns all evaluators. A specialist, a liar, and the three cheap ones together cost the same. Which outputs an evaluator errs about
/// depends on the seed, so intervals over seeds are over worlds, too.
pub(crate) fn sellers(errors: Errors, seed: u64) -> Vec<Seller> {
    let salt = |number| seed.wrapping_mul(16).wrapping_add(number);
    let seller = |name, price, claims, method| Seller { name, price, claims, method };
    let errs = |rate, number| Method::Errs { rate, salt: salt(number), errors };
    vec![
        seller("abacus", 1_000, [0.9, 0.0, 0.0], Method::Expert(Expert::Arithmetic)),
        seller("yardstick", 1_000, [0.0, 0.9, 0.0], Method::Expert(Expert::Units)),
        seller("stylist", 1_000, [0.0, 0.0, 0.9], Method::Expert(Expert::Prose)),
        seller("coin", 1_000, BOAST, Method::Coin { salt: salt(1) }),
        seller("flatterer", 1_000, BOAST, Method::Flatterer { salt: salt(5) }),
        seller("by-length", 1_000, BOAST, Method::Length),
        seller("student-aide", 300, [0.32; 3], errs(0.34, 2)),
        seller("tutor", 400, [0.4; 3], errs(0.3, 3)),
        seller("checklist", 300, [0.2; 3], Method::Form),
        seller("professor", 3_000, [0.7; 3], errs(0.15, 4)),
    ]
}

/// The evaluators of the static mixture: the cheap ones.
pub(crate) const MIXTURE: [&str; 3] = ["student-aide", "tutor", "checklist"];

#[cfg(test)]
mod tests {
    use super::{
        super::policy::{KINDS, Rng, Strategy, actions},
        *,
    };

    #[test]
    fn only_a_sound_and_clear_output_is_good_at_everything() {
        let mut rng = Rng::seeded(1);
        for problem in KINDS.into_iter().map(|kind| Problem::of(kind, &mut rng)) {
            for action in actions() {
                let best = action.strategy == Strategy::Sound && action.style == Style::Clear;
                assert_eq!(quality(&problem, action) == 1.0, best, "{problem:?} {action:?}");
            }
        }
    }

    #[test]
    fn the_mixture_costs_as_much_as_a_specialist() {
        let sellers = sellers(Errors::Independent, 1);
        let price = |name: &&str| sellers.iter().find(|seller| seller.name == *name).unwrap().price;
        assert_eq!(MIXTURE.iter().map(price).sum::<u64>(), 1_000);
    }
}
