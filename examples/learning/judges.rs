//! How the evaluators judge. Nothing here is random: the same output of the same task always gets the same verdict.

use async_trait::async_trait;
use x402_judges::{ArithmeticJudge, ProseJudge};
use x402_market::{
    Confidence, Score, Submission, Task, Verdict,
    judge::{Judge, JudgeError},
};

use super::world::{ASPECTS, Answer, Errors, Seller};

/// A way to judge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Method {
    /// The verdict of one expert, whatever was asked.
    Expert(Expert),
    /// The verdict of the expert in the skill, inverted at this rate.
    Errs { rate: f64, salt: u64, errors: Errors },
    /// A pseudo-random verdict.
    Coin { salt: u64 },
    /// Always good.
    Flatterer { salt: u64 },
    /// The longer the better.
    Length,
    /// Good if it looks like a solution.
    Form,
}

/// An expert in one aspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expert {
    Arithmetic,
    Units,
    Prose,
}

const EXPERTS: [Expert; 3] = [Expert::Arithmetic, Expert::Units, Expert::Prose];

/// The judge of an evaluator.
pub(crate) struct SellersJudge(pub(crate) Seller);

#[async_trait]
impl Judge for SellersJudge {
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        let Seller { method, claims, .. } = self.0;
        let skill = ASPECTS.iter().position(|aspect| aspect.skill() == &*submission.task.skill).unwrap_or_default();
        let mut verdicts = Vec::new();
        for output in submission.outputs() {
            let score = method.score(&submission.task, skill, output).await?;
            // Confidence is what the card claims.
            let confidence = Confidence::clamped(claims[skill]);
            verdicts.push(Verdict::new(Score::clamped(score), confidence, format!("by {}", self.0.name)));
        }
        Ok(verdicts)
    }
}

impl Method {
    /// Returns a score from 0 to 1 for the aspect with this number.
    pub(crate) async fn score(self, task: &Task, aspect: usize, output: &str) -> Result<f64, JudgeError> {
        Ok(match self {
            Self::Expert(expert) => expert.score(task, output).await?,
            Self::Errs { rate, salt, errors } => {
                let score = EXPERTS[aspect].score(task, output).await?;
                let luck = match errors {
                    Errors::Independent => chance(salt, aspect, task.question(), output),
                    Errors::Systematic => {
                        let formula = task.context.as_deref().unwrap_or_default();
                        chance(salt, aspect, &without_numbers(formula), &without_numbers(output))
                    }
                };
                if luck < rate { 1.0 - score } else { score }
            }
            Self::Coin { salt } => f64::from(chance(salt, aspect, task.question(), output) < 0.5),
            // Equal scores would give it away.
            Self::Flatterer { salt } => 0.9 + 0.1 * chance(salt, aspect, task.question(), output),
            Self::Length => (output.len() as f64 / 800.0).min(1.0),
            Self::Form => form(output),
        })
    }
}

impl Expert {
    async fn score(self, task: &Task, output: &str) -> Result<f64, JudgeError> {
        let one = Submission::group(task.clone(), [output])?;
        let shipped = async |judge: &dyn Judge| {
            judge.judge(&one).await.map(|verdicts| verdicts.first().map_or(0.5, |verdict| verdict.score.get()))
        };
        Ok(match self {
            Self::Arithmetic => shipped(&ArithmeticJudge).await?,
            Self::Units => unit(task, output),
            Self::Prose => {
                // Equations alone are not prose.
                let words = output.split_whitespace().filter(|word| word.chars().all(char::is_alphabetic)).count();
                let clear = (shipped(&ProseJudge).await? - PLAIN) * STRETCH + 0.5;
                if words < 12 { 0.1 } else { clear.clamp(0.0, 1.0) }
            }
        })
    }
}

/// The measure of prose for an average text, and the weight of a difference from it.
const PLAIN: f64 = 0.75;
const STRETCH: f64 = 2.0;

/// Returns `true` if the answer has the unit of the formula.
fn unit(task: &Task, output: &str) -> f64 {
    let formula = task.context.as_deref().unwrap_or_default();
    let asked = match formula.rsplit_once(" in ") {
        Some((_, unit)) => unit.trim_end_matches('?'),
        None if formula.contains('$') => "$",
        None => "",
    };
    f64::from(Answer::of(output).unit == asked)
}

/// Returns a score for the look of a solution: announced steps, equations, a named answer, and a moderate length.
fn form(output: &str) -> f64 {
    let words = output.split_whitespace().count();
    let signs = [
        output.contains("First") || output.contains("Subsequently"),
        output.contains('='),
        output.contains("Answer:"),
        (10..=80).contains(&words),
    ];
    signs.into_iter().filter(|sign| *sign).count() as f64 / signs.len() as f64
}

/// Returns the text with all numbers replaced by the same one.
fn without_numbers(text: &str) -> String {
    let mut masked = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '0'..='9' if masked.ends_with('0') => {}
            // A dot is a decimal point or the end of a sentence.
            '.' if masked.ends_with('0') => {}
            '0'..='9' => masked.push('0'),
            _ => masked.push(character),
        }
    }
    masked
}

/// Returns a pseudo-random number from 0 to 1 that depends only on the arguments (FNV-1a with a finalizer).
fn chance(salt: u64, aspect: usize, question: &str, output: &str) -> f64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ (salt << 8 | aspect as u64);
    for byte in question.bytes().chain([0]).chain(output.bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((hash ^ (hash >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            policy::{KINDS, Problem, Rng, actions, answer},
            run::task,
            world::sellers,
        },
        *,
    };

    /// Returns an evaluator's accuracy over all possible outputs, by aspect.
    async fn accuracy(seller: &Seller) -> [f64; 3] {
        super::super::conduct::accuracy(seller.method).await.unwrap()
    }

    #[tokio::test]
    async fn specialists_know_their_own_and_nobody_else_knows_it_as_well() {
        let mut table = String::new();
        let mut best = [0.0_f64; 3];
        for seller in sellers(Errors::Independent, 0) {
            let right = accuracy(&seller).await;
            table.push_str(&format!("{}: {right:.2?}\n", seller.name));
            for (at, expert) in EXPERTS.into_iter().enumerate() {
                if seller.method == Method::Expert(expert) {
                    assert!(right[at] > 0.95, "{table}");
                } else {
                    best[at] = best[at].max(right[at]);
                }
            }
        }
        assert!(best.iter().all(|best| *best < 0.9), "{table}");
        println!("{table}");
    }

    #[tokio::test]
    async fn systematic_errors_are_the_same_whatever_the_numbers() {
        let mut rng = Rng::seeded(4);
        let method = Method::Errs { rate: 0.5, salt: 9, errors: Errors::Systematic };
        for kind in KINDS {
            let problems = [0; 12].map(|_| Problem::of(kind, &mut rng));
            for action in actions() {
                let mut scores = Vec::new();
                for problem in &problems {
                    let task = task(problem, ASPECTS[2], 0).unwrap();
                    scores.push(method.score(&task, 2, &answer(problem, action)).await.unwrap() > 0.5);
                }
                assert!(scores.iter().all(|score| *score == scores[0]), "{kind:?} {action:?}");
            }
        }
    }

    #[tokio::test]
    async fn the_same_output_always_gets_the_same_verdict() {
        let problem = Problem::of(KINDS[0], &mut Rng::seeded(3));
        for seller in sellers(Errors::Independent, 0) {
            for (aspect, of) in ASPECTS.into_iter().enumerate() {
                let task = task(&problem, of, 0).unwrap();
                for action in actions() {
                    let text = answer(&problem, action);
                    let once = seller.method.score(&task, aspect, &text).await.unwrap();
                    assert_eq!(once, seller.method.score(&task, aspect, &text).await.unwrap());
                    assert!((0.0..=1.0).contains(&once));
                }
            }
        }
    }
}
