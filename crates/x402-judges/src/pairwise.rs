//! A judge that compares outputs in both orders.

use async_trait::async_trait;

use x402_market::{
    Confidence, Critique, Issue, LongText, Outputs, Score, Severity, Submission, Verdict,
    judge::{Judge, JudgeError},
};

/// A judge that compares outputs with the help of another judge. That one sees each pair in both orders, because many judges, language
/// models above all, favour the first output.
///
/// The score is the mean of both orders. If the orders disagree about which output is better, the confidence is halved and the critique
/// says so. Pairs and groups of up to eight outputs are accepted; of a group, every two outputs are compared.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::{Submission, Task, judge::Judge};
/// use x402_judges::{ArithmeticJudge, PairwiseJudge};
///
/// let pair = Submission::pair(Task::new("arithmetic", "What is 2 + 2?")?, "Answer: 4", "Answer: 5")?;
/// let verdicts = PairwiseJudge::new(ArithmeticJudge).judge(&pair).await?;
/// assert!(verdicts[0].score > verdicts[1].score);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PairwiseJudge<J>(J);

/// The largest group that a [`PairwiseJudge`] accepts. Set it on the card
/// ([`max_outputs`](x402_market::AgentCardBuilder::max_outputs)). The number of comparisons grows with its square.
pub const MAX_COMPARED: usize = 8;

impl<J: Judge> PairwiseJudge<J> {
    /// Creates a judge that gives pairs to `judge`.
    pub const fn new(judge: J) -> Self {
        Self(judge)
    }

    /// Returns the verdicts on two outputs, merged from both orders.
    async fn compare(&self, submission: &Submission, pair: [&LongText; 2]) -> Result<[Verdict; 2], JudgeError> {
        let [first, second] = pair.map(Clone::clone);
        let ordered = |pair| Submission::new(submission.task.clone(), Outputs::Pair(pair));
        let (forth, back) = (ordered([first.clone(), second.clone()]), ordered([second, first]));
        let (forth, back) = tokio::try_join!(self.0.judge(&forth), self.0.judge(&back))?;
        let [first_forth, second_forth] = two(forth)?;
        let [second_back, first_back] = two(back)?;
        let order = |first: &Verdict, second: &Verdict| first.score.get().total_cmp(&second.score.get());
        let (before, after) = (order(&first_forth, &second_forth), order(&first_back, &second_back));
        let trust = match (before, after) {
            (before, after) if before == after => 1.0,
            (before, after) if before.is_eq() || after.is_eq() => 0.75,
            _ => 0.5,
        };
        Ok([merged(first_forth, &first_back, trust), merged(second_forth, &second_back, trust)])
    }
}

#[async_trait]
impl<J: Judge> Judge for PairwiseJudge<J> {
    fn accepts(&self, submission: &Submission) -> Result<(), JudgeError> {
        match submission.outputs().len() {
            2..=MAX_COMPARED => {
                // The other judge is sent pairs. It may accept each output, but not every two together.
                let mut asked = submission.clone();
                for (_, [first, second]) in pairs(submission) {
                    for pair in [[first, second], [second, first]] {
                        asked.outputs = Outputs::Pair(pair.map(Clone::clone));
                        self.0.accepts(&asked)?;
                    }
                }
                Ok(())
            }
            outputs => {
                let detail =
                    format!("{outputs} outputs: send a pair, or a group of 2 to {MAX_COMPARED}, to be compared");
                Err(JudgeError::Rejected(detail))
            }
        }
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.accepts(submission)?;
        let mut collected: Vec<Vec<Verdict>> = submission.outputs().iter().map(|_| Vec::new()).collect();
        for (places, pair) in pairs(submission) {
            let verdicts = self.compare(submission, pair).await?;
            for (at, verdict) in places.into_iter().zip(verdicts) {
                collected.get_mut(at).into_iter().for_each(|verdicts| verdicts.push(verdict.clone()));
            }
        }
        collected.into_iter().map(averaged).collect()
    }
}

/// Returns every two outputs, with their positions.
fn pairs(submission: &Submission) -> Vec<([usize; 2], [&LongText; 2])> {
    let mut pairs = Vec::new();
    for (one, first) in submission.outputs().iter().enumerate() {
        let later = submission.outputs().iter().enumerate().skip(one + 1);
        pairs.extend(later.map(|(other, second)| ([one, other], [first, second])));
    }
    pairs
}

fn two(verdicts: Vec<Verdict>) -> Result<[Verdict; 2], JudgeError> {
    verdicts.try_into().map_err(|verdicts: Vec<Verdict>| {
        JudgeError::failed(format!("{} verdicts where two outputs were compared", verdicts.len()))
    })
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    #[allow(clippy::cast_precision_loss)]
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}

/// Merges the verdicts on one output from both orders.
fn merged(forth: Verdict, back: &Verdict, trust: f64) -> Verdict {
    let score = mean([forth.score.get(), back.score.get()].into_iter());
    let confidence = trust * mean([forth.confidence.get(), back.confidence.get()].into_iter());
    let mut critique: Critique = forth.critique;
    if trust < 1.0 {
        let detail = "which output is better depends on the order in which they are compared";
        critique = critique.issue(Issue::new(Severity::Minor, detail));
    }
    Verdict::new(Score::clamped(score), Confidence::clamped(confidence), critique)
}

/// Averages the verdicts on one output from all comparisons. The critique is that of the most confident one.
fn averaged(verdicts: Vec<Verdict>) -> Result<Verdict, JudgeError> {
    let score = mean(verdicts.iter().map(|verdict| verdict.score.get()));
    let confidence = mean(verdicts.iter().map(|verdict| verdict.confidence.get()));
    let surest = verdicts.into_iter().max_by(|one, other| one.confidence.get().total_cmp(&other.confidence.get()));
    let surest = surest.ok_or_else(|| JudgeError::failed("there is nothing to compare with"))?;
    Ok(Verdict::new(Score::clamped(score), Confidence::clamped(confidence), surest.critique))
}
