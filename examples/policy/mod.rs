//! A small policy that learns from rewards which of several strategies solves word problems, and which of several styles presents the
//! solution best.
//!
//! ```text
//! problem.rs   word problems of six kinds, made from templates, with their truth
//! strategy.rs  strategies to solve them, one of which is right
//! style.rs     styles to write a solution in
//! softmax.rs   chooses strategy and style: a log-linear policy, trained with REINFORCE
//! plain.rs     how easy a text is to read
//! tokens.rs    the policy as a language model over bytes
//! rng.rs       a random generator whose state can be saved
//! ```
//!
//! Nothing here does I/O, reads a clock or uses the system's randomness.

// Each example uses a part of it.
#![allow(dead_code, unused_imports)]

mod plain;
mod problem;
mod rng;
mod softmax;
mod strategy;
mod style;
mod tokens;

pub(crate) use plain::PlainJudge;
pub(crate) use problem::{KINDS, Kind, Problem};
pub(crate) use rng::Rng;
pub(crate) use softmax::{ACTIONS, Action, Policy, advantages};
pub(crate) use strategy::{STRATEGIES, Strategy};
pub(crate) use style::{STYLES, Style};
pub(crate) use tokens::log_probabilities;

/// Returns the answer that an action gives to a problem.
pub(crate) fn answer(problem: &Problem, action: Action) -> String {
    style::write(action.style, &problem.work(action.strategy))
}

/// Returns all actions, in the order of the policy's probabilities.
pub(crate) fn actions() -> impl Iterator<Item = Action> {
    STRATEGIES.into_iter().flat_map(|strategy| STYLES.into_iter().map(move |style| Action { strategy, style }))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use x402_judges::ArithmeticJudge;
    use x402_market::{Submission, Task, judge::Judge};

    use super::*;

    async fn score(judge: &impl Judge, problem: &Problem, answer: &str) -> f64 {
        let task = Task::new("any", &problem.prompt).unwrap().with_context(&problem.formula).unwrap();
        let verdicts = judge.judge(&Submission::single(task, answer).unwrap()).await.unwrap();
        assert!(verdicts[0].confidence.get() > 0.3, "{answer}: {:?}", verdicts[0]);
        verdicts[0].score.get()
    }

    #[tokio::test]
    async fn a_judge_of_arithmetic_tells_the_right_strategy_from_all_others_in_every_style() {
        let mut rng = Rng::seeded(1);
        for problem in KINDS.into_iter().flat_map(|kind| [0; 8].map(|_| kind)).map(|kind| Problem::of(kind, &mut rng)) {
            for action in actions() {
                let text = answer(&problem, action);
                let score = score(&ArithmeticJudge, &problem, &text).await;
                match action.strategy {
                    Strategy::Sound => assert_eq!(score, 1.0, "{problem:?} {text}"),
                    // Only the unit is wrong.
                    Strategy::Unitless => assert!((0.6..0.95).contains(&score), "{problem:?} {text}: {score}"),
                    _ => assert!(score < 0.5, "{problem:?} {text}: {score}"),
                }
            }
        }
    }

    #[tokio::test]
    async fn a_judge_of_prose_tells_plain_styles_from_the_others() {
        let mut rng = Rng::seeded(2);
        for kind in KINDS {
            let problem = Problem::of(kind, &mut rng);
            for action in actions() {
                let text = answer(&problem, action);
                let score = score(&PlainJudge, &problem, &text).await;
                assert_eq!(score > 0.8, action.style.is_plain(), "{score}: {text}");
                assert_eq!(score < 0.5, !action.style.is_plain(), "{score}: {text}");
            }
        }
    }

    #[test]
    fn the_same_seed_asks_and_answers_the_same() {
        let run = |seed| {
            let mut rng = Rng::seeded(seed);
            let policy = Policy::new();
            let tell = |_| {
                let problem = Problem::any(&mut rng);
                let action = policy.sample(problem.kind, &mut rng);
                (problem.prompt.clone(), answer(&problem, action))
            };
            (0..20).map(tell).collect::<Vec<_>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn there_are_many_problems_and_every_action_says_something_else() {
        let mut rng = Rng::seeded(3);
        let prompts: BTreeSet<_> = (0..500).map(|_| Problem::any(&mut rng).prompt).collect();
        assert!(prompts.len() > 250, "{}", prompts.len());
        for kind in KINDS {
            let problem = Problem::of(kind, &mut rng);
            let answers: BTreeSet<_> = actions().map(|action| answer(&problem, action)).collect();
            assert_eq!(answers.len(), ACTIONS, "{kind:?}: {answers:#?}");
        }
    }
}
