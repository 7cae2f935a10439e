//! Turns verdicts into a scored group for the trainer.

use atropos_client::{ByteTokenizer, GroupError, GroupLimits, ScoredGroup, Sequence, SequenceMessage};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tower_x402::client::PaymentOutcome;
use x402_market::Feedback;

use crate::{
    policy::advantages,
    rollout::Rollout,
    tasks::{Question, Skills},
};

/// A question and its answers, judged and paid for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Scored {
    /// The group's name.
    pub(crate) id: String,
    pub(crate) question: Question,
    instruction: Option<String>,
    pub(crate) answers: Vec<Rollout>,
    /// Scores from 0 to 1; `None` if no evaluator gave a verdict.
    pub(crate) scores: Option<Vec<f64>>,
    overrides: Vec<Map<String, Value>>,
}

impl Scored {
    /// Combines the feedback, which is by skill in the order of [`Question::skills`].
    pub(crate) fn new(
        id: String,
        question: Question,
        instruction: Option<&str>,
        answers: Vec<Rollout>,
        feedback: &[Option<Feedback>],
    ) -> Self {
        let scores = scores(answers.len(), question.skills(), feedback);
        let overrides = (0..answers.len()).map(|at| overrides(at, &question, &answers[at], feedback)).collect();
        Self { id, question, instruction: instruction.map(str::to_owned), answers, scores, overrides }
    }

    /// Returns how much better than the mean each answer is; zeros without scores.
    pub(crate) fn advantages(&self) -> Vec<f64> {
        self.scores.as_deref().map_or_else(|| vec![0.0; self.answers.len()], advantages)
    }

    /// Returns the share of right answers. The trainer is not told.
    pub(crate) fn right(&self) -> f64 {
        self.question.right(&self.answers, self.scores.as_deref())
    }

    /// Returns `true` if all answers are the same.
    pub(crate) fn is_uniform(&self) -> bool {
        self.answers.iter().all(|answer| answer.text == self.answers[0].text)
    }

    /// Returns the group for the trainer; `None` without scores.
    pub(crate) fn group(&self, limits: &GroupLimits) -> Result<Option<ScoredGroup>, GroupError> {
        let Some(scores) = &self.scores else { return Ok(None) };
        let instruction = self.instruction.as_deref();
        let prompt = instruction.into_iter().chain([self.question.prompt()]).collect::<Vec<_>>().join("\n\n");
        let prompt = ByteTokenizer::prompt(&prompt);
        let mut sequences = Vec::with_capacity(self.answers.len());
        for (at, (answer, advantage)) in self.answers.iter().zip(self.advantages()).enumerate() {
            let sequence = match &answer.tokens {
                Some(tokens) => Sequence::new(&tokens.prompt, &tokens.completion, scores[at])?,
                None => Sequence::new(&prompt, &ByteTokenizer::completion(&answer.text), scores[at])?,
            };
            let sequence = sequence.with_advantage(advantage)?.with_overrides(self.overrides[at].clone());
            let asked = instruction.map(|text| SequenceMessage::new("system", text)).into_iter();
            let asked = asked.chain([SequenceMessage::new("user", self.question.prompt())]);
            let sequence = sequence.with_messages(asked.chain([SequenceMessage::new("assistant", &*answer.text)]));
            sequences.push(match &answer.logprobs {
                Some(logprobs) => sequence.with_inference_logprobs(logprobs)?,
                None => sequence,
            });
        }
        let about = json!({ "kind": self.question.kind(), "prompt": self.question.prompt() });
        let group = ScoredGroup::new(sequences, limits)?.with_id(&*self.id);
        Ok(Some(group.with_overrides(object(about))))
    }
}

/// Returns a weighted score per output over the skills in which all outputs were judged; `None` if the first is not one of them.
fn scores(outputs: usize, skills: Skills, feedback: &[Option<Feedback>]) -> Option<Vec<f64>> {
    let mut sums = vec![0.0; outputs];
    let mut weights = 0.0;
    for (at, ((_, weight), feedback)) in skills.iter().zip(feedback).enumerate() {
        let judged = feedback.iter().flat_map(|feedback| &feedback.outputs).filter_map(|output| output.verdict);
        let scores: Vec<f64> = judged.map(|judged| judged.score.get()).collect();
        if scores.len() == outputs {
            weights += weight;
            sums.iter_mut().zip(scores).for_each(|(sum, score)| *sum += weight * score);
        } else if at == 0 {
            return None;
        }
    }
    Some(sums.into_iter().map(|sum| sum / weights).collect())
}

/// Returns the critique of one answer, and the payments for it.
fn overrides(at: usize, question: &Question, answer: &Rollout, feedback: &[Option<Feedback>]) -> Map<String, Value> {
    let (mut critique, mut confidence, mut payments) = (Vec::new(), Map::new(), Vec::new());
    for ((skill, _), feedback) in question.skills().iter().zip(feedback) {
        let Some(feedback) = feedback else { continue };
        let Some(output) = feedback.outputs.get(at) else { continue };
        if let Some(judged) = output.verdict {
            confidence.insert((*skill).to_owned(), json!(judged.confidence));
        }
        critique.extend(output.members.iter().map(|opinion| {
            json!({
                "skill": skill,
                "evaluator": opinion.evaluator,
                "by": opinion.evaluator_id,
                "score": opinion.verdict.score,
                "confidence": opinion.verdict.confidence,
                "weight": opinion.weight,
                "critique": opinion.verdict.critique,
            })
        }));
        for hire in &feedback.hires {
            // One payment covers the whole group.
            payments.extend(hire.payments.iter().filter(|paid| paid.outcome != PaymentOutcome::Refused).map(|paid| {
                json!({
                    "skill": skill,
                    "evaluator": hire.evaluator,
                    "payer": paid.payer,
                    "nonce": paid.nonce,
                    "transaction": paid.transaction,
                    "amount": paid.amount,
                    "network": paid.network,
                    "outcome": paid.outcome,
                })
            }));
        }
    }
    let mut about = object(
        json!({ "kind": question.kind(), "critique": critique, "confidence": confidence, "payments": payments }),
    );
    if let Some(action) = answer.action {
        about.insert("action".to_owned(), json!(action));
    }
    about
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Policy, Problem, Rng, answer};

    /// Returns the feedback of a panel of one.
    fn said(scores: &[Option<f64>], nonce: u8) -> Feedback {
        let hash = |byte: u8| alloy_primitives::B256::repeat_byte(byte);
        let outputs: Vec<_> = scores
            .iter()
            .map(|score| {
                let judged =
                    score.map(|score| json!({ "score": score, "reward": 2.0 * score - 1.0, "confidence": 0.75 }));
                json!({ "judged": judged, "opinions": [] })
            })
            .collect();
        let payment = |outcome: &str| {
            json!({ "amount": "4000", "outcome": outcome, "transaction": hash(nonce), "network": "eip155:84532",
                    "payer": alloy_primitives::Address::repeat_byte(1), "nonce": hash(nonce) })
        };
        let hire = json!({ "evaluator": alloy_primitives::Address::repeat_byte(2), "name": "One", "url": "http://one.example",
                           "payments": [payment("settled"), payment("refused")], "failure": null });
        let feedback = json!({ "task": "", "outputs": outputs, "hires": [hire], "paid": "4000", "held": "0" });
        serde_json::from_value(feedback).unwrap()
    }

    fn scored(feedback: &[Option<Feedback>]) -> Scored {
        let mut rng = Rng::seeded(1);
        let problem = Problem::any(&mut rng);
        let draw = |_| {
            let action = Policy::new().sample(problem.kind, &mut rng);
            Rollout { text: answer(&problem, action), action: Some(action), tokens: None, logprobs: None }
        };
        let answers = (0..2).map(draw).collect();
        Scored::new("run-1".to_owned(), Question::Words(problem), None, answers, feedback)
    }

    #[test]
    fn scores_are_of_both_skills_or_of_what_is_right_alone() {
        let (right, style) = (said(&[Some(1.0), Some(0.0)], 1), said(&[Some(0.5), Some(1.0)], 2));
        let partly = said(&[Some(1.0), None], 3);
        for (feedback, scores) in [
            ([Some(right.clone()), Some(style.clone())], Some(vec![0.85, 0.3])),
            ([Some(right.clone()), None], Some(vec![1.0, 0.0])),
            ([Some(right), Some(partly.clone())], Some(vec![1.0, 0.0])),
            ([None, Some(style.clone())], None),
            ([Some(partly), Some(style)], None),
        ] {
            let found = scored(&feedback).scores;
            assert_eq!(found.is_some(), scores.is_some());
            for (found, score) in found.into_iter().flatten().zip(scores.into_iter().flatten()) {
                assert!((found - score).abs() < 1e-12, "{found} {score}");
            }
        }
    }

    #[test]
    fn each_sequence_says_what_was_paid_for_it() {
        let scored = scored(&[Some(said(&[Some(1.0), Some(0.0)], 1)), Some(said(&[Some(0.5), Some(1.0)], 2))]);
        let group = scored.group(&GroupLimits::new(2, 10_000)).unwrap().unwrap();
        let group = serde_json::to_value(group).unwrap();
        for about in group["overrides"].as_array().unwrap() {
            let payments = about["payments"].as_array().unwrap();
            assert_eq!(payments.len(), 2, "a refused one is none");
            assert_eq!((&payments[0]["amount"], &payments[0]["skill"]), (&json!("4000"), &json!("arithmetic")));
            assert_eq!(payments[1]["nonce"], json!(alloy_primitives::B256::repeat_byte(2)));
            assert_eq!(about["confidence"], json!({ "arithmetic": 0.75, "prose": 0.75 }));
        }
        assert_eq!(group["group_overrides"]["group_id"], "run-1");
        assert_eq!(group["advantages"][0].as_array().unwrap().last(), Some(&json!(1.0)));
    }

    #[test]
    fn nobody_who_judges_is_told_the_answer() {
        let mut rng = Rng::seeded(2);
        let problem = Problem::any(&mut rng);
        let answers = [Rollout { text: "I do not know.".to_owned(), action: None, tokens: None, logprobs: None }];
        let json = serde_json::to_string(&Question::Words(problem.clone()).submission("arithmetic", &answers).unwrap())
            .unwrap();
        assert!(json.contains(&problem.formula) && !json.contains(&problem.truth()), "{json}");
    }
}
