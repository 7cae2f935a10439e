//! Compares every two outputs of a group.

use async_trait::async_trait;
use x402_market::{
    Outputs, Submission, Verdict,
    judge::{Judge, JudgeError},
};

/// The largest group that is compared. The number of comparisons grows with its square.
pub(crate) const MAX_COMPARED: usize = 8;

/// A judge that gives every two outputs to another judge, as a pair. The score is the mean of all comparisons.
pub(crate) struct Pairs<J>(pub(crate) J);

#[async_trait]
impl<J: Judge> Judge for Pairs<J> {
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        let outputs = submission.outputs().len();
        if !(2..=MAX_COMPARED).contains(&outputs) {
            let detail = format!("{outputs} outputs: send a pair, or a group of 2 to {MAX_COMPARED}, to be compared");
            return Err(JudgeError::Rejected(detail));
        }
        // The other judge may accept each output, but not every two together.
        pairs(submission).iter().try_for_each(|(_, pair)| self.0.accepts(pair))
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.accepts(submission)?;
        let mut compared = vec![Vec::new(); submission.outputs().len()];
        for (places, pair) in pairs(submission) {
            let verdicts = self.0.judge(&pair).await?;
            if verdicts.len() != 2 {
                return Err(JudgeError::failed(format!("{} verdicts on a pair", verdicts.len())));
            }
            places.into_iter().zip(verdicts).for_each(|(at, verdict)| compared[at].push(verdict));
        }
        compared.into_iter().map(mean).collect()
    }
}

/// Returns every two outputs, with their positions.
fn pairs(submission: &Submission) -> Vec<([usize; 2], Submission)> {
    let outputs = submission.outputs();
    let places = (0..outputs.len()).flat_map(|one| (one + 1..outputs.len()).map(move |other| [one, other]));
    let pair = |places: [usize; 2]| {
        let pair = Outputs::Pair(places.map(|at| outputs[at].clone()));
        (places, Submission::new(submission.task.clone(), pair))
    };
    places.map(pair).collect()
}

/// Returns the mean of the verdicts on one output, with the critique of the most confident.
fn mean(verdicts: Vec<Verdict>) -> Result<Verdict, JudgeError> {
    let mean = |of: fn(&Verdict) -> f64| verdicts.iter().map(of).sum::<f64>() / verdicts.len() as f64;
    let (score, confidence) = (mean(|verdict| verdict.score.get()), mean(|verdict| verdict.confidence.get()));
    let surest = verdicts.into_iter().max_by(|one, other| one.confidence.get().total_cmp(&other.confidence.get()));
    let surest = surest.ok_or_else(|| JudgeError::failed("there is nothing to compare with"))?;
    Ok(Verdict::new(score, confidence, surest.critique))
}

#[cfg(test)]
mod tests {
    use x402_market::{Task, judge::judge_fn};

    use super::*;

    /// Prefers the longer one of two outputs, and takes pairs of at most nine bytes.
    struct Longer;

    #[async_trait]
    impl Judge for Longer {
        fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
            let length: usize = submission.outputs().iter().map(|output| output.len()).sum();
            if length > 9 { Err(JudgeError::Rejected("too long".to_owned())) } else { Ok(()) }
        }

        async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
            let [first, second] = [0, 1].map(|at| submission.outputs()[at].len());
            Ok([first > second, second > first].map(|wins| Verdict::new(f64::from(wins), 0.8, "compared")).into())
        }
    }

    fn group(outputs: &[&str]) -> Submission {
        Submission::group(Task::new("comparison", "Write.").unwrap(), outputs.iter().copied()).unwrap()
    }

    #[tokio::test]
    async fn every_two_of_a_group_are_compared() {
        let verdicts = Pairs(Longer).judge(&group(&["aaa", "a", "aaaa"])).await.unwrap();
        assert_eq!(verdicts.iter().map(|verdict| verdict.score.get()).collect::<Vec<_>>(), [0.5, 0.0, 1.0]);
    }

    /// Otherwise a student would learn it only after it signed a payment.
    #[tokio::test]
    async fn groups_with_a_pair_that_the_inner_judge_rejects_are_rejected() {
        let long = group(&["aaaaa", "a", "aaaaa"]);
        assert!(matches!(Pairs(Longer).accepts(&long), Err(JudgeError::Rejected(_))));
        assert!(matches!(Pairs(Longer).judge(&long).await, Err(JudgeError::Rejected(_))));
        Pairs(Longer).accepts(&group(&["aaaaa", "a", "aaaa"])).unwrap();
    }

    #[tokio::test]
    async fn one_output_and_nine_outputs_are_rejected() {
        for outputs in [&["a"][..], &["a"; 9]] {
            assert!(matches!(Pairs(Longer).accepts(&group(outputs)), Err(JudgeError::Rejected(_))));
        }
        let lazy = Pairs(judge_fn(async |_| Ok(vec![Verdict::new(1.0, 1.0, "")])));
        assert!(matches!(lazy.judge(&group(&["a", "b"])).await, Err(JudgeError::Failed(_))));
    }
}
