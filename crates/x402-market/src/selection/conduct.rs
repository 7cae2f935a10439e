//! How evaluators behave, apart from how often they are right.

use super::CallOutcome;

/// Of one evaluator, in all skills, seen by oneself only.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Conduct {
    /// Valid answers, and failures.
    answered: f32,
    failed: f32,
    /// Of audited answers that stated a confidence: how many, how many were right, and the sum of (confidence − right)².
    stated: f32,
    right: f32,
    brier: f32,
}

/// As many valid answers as these, and one failure less, are taken for granted.
const GRANTED: f32 = 19.0;
/// A card that says less than what is asked, or another payee, is no accident.
const LIE: f32 = 5.0;
/// How many audited confidences are needed before half of what they show counts.
const DOUBT: f32 = 10.0;

impl Conduct {
    pub(super) fn learn(&mut self, outcome: &CallOutcome, memory: f32) {
        let keep = 1.0 - 1.0 / memory;
        (self.answered, self.failed) = (self.answered * keep, self.failed * keep);
        match *outcome {
            CallOutcome::Answered { confidence, right, .. } => {
                self.answered += 1.0;
                if let (Some(confidence), Some(right)) = (confidence, right) {
                    let truth = f32::from(right);
                    let miss = (confidence as f32).clamp(0.0, 1.0) - truth;
                    self.stated = self.stated * keep + 1.0;
                    self.right = self.right * keep + truth;
                    self.brier = self.brier * keep + miss * miss;
                }
            }
            CallOutcome::PriceMismatch | CallOutcome::PayeeMismatch | CallOutcome::TokenMismatch => self.failed += LIE,
            _ => self.failed += 1.0,
        }
    }

    /// The probability of a valid answer.
    pub(super) fn reliability(&self) -> f32 {
        (GRANTED + self.answered) / (GRANTED + 1.0 + self.answered + self.failed)
    }

    /// By how much the mean Brier score is worse than that of one who always states how often it is right: positive for
    /// those who are surer than right, negative for those who know when they are wrong. Few data count less.
    pub(super) fn overconfidence(&self) -> f32 {
        if self.stated == 0.0 {
            return 0.0;
        }
        let accuracy = (self.right + 1.0) / (self.stated + 2.0);
        (self.brier / self.stated - accuracy * (1.0 - accuracy)) * self.stated / (self.stated + DOUBT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conduct(verdicts: &[(f64, bool)]) -> Conduct {
        let mut conduct = Conduct::default();
        for (confidence, right) in verdicts {
            conduct.learn(&CallOutcome::answered(1.0, Some(*confidence), Some(*right)), 1e6);
        }
        conduct
    }

    #[test]
    fn the_truth_about_oneself_is_the_best_one_can_state() {
        let of = |confidence: f64| {
            conduct(&[(confidence, true), (confidence, true), (confidence, true), (confidence, false)].repeat(25))
        };
        let honest = of(0.75).overconfidence();
        assert!(honest.abs() < 0.01, "{honest}");
        for lie in [0.0, 0.5, 0.65, 0.85, 1.0] {
            assert!(of(lie).overconfidence() > honest, "{lie}");
        }
    }

    #[test]
    fn one_who_knows_when_it_is_wrong_is_better_than_one_who_knows_how_often() {
        let knows = conduct(&[(0.9, true), (0.9, true), (0.9, true), (0.3, false)].repeat(25));
        assert!(knows.overconfidence() < -0.1);
    }

    #[test]
    fn failures_cost_reliability_and_price_lies_most() {
        let after = |outcome: CallOutcome| {
            let mut conduct = Conduct::default();
            conduct.learn(&outcome, 40.0);
            conduct.reliability()
        };
        let (answered, garbage) = (after(CallOutcome::answered(0.5, None, None)), after(CallOutcome::InvalidAnswer));
        assert!(
            answered > garbage && garbage == after(CallOutcome::Timeout) && garbage > after(CallOutcome::PriceMismatch)
        );
    }
}
