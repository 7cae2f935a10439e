//! Comparing in both orders.

use x402_judges::{ChatClient, LlmJudge, PairwiseJudge};
use x402_market::{
    Confidence, Score, Submission, Task, Verdict,
    judge::{Judge, JudgeError, judge_fn},
};

fn task() -> Task {
    Task::new("prose", "Write.").unwrap()
}

fn verdict(score: f64) -> Verdict {
    Verdict::new(Score::clamped(score), Confidence::clamped(0.8), "compared")
}

fn scores(verdicts: &[Verdict]) -> Vec<f64> {
    verdicts.iter().map(|verdict| verdict.score.get()).collect()
}

/// Scores by length.
fn fair() -> impl Judge {
    judge_fn(async |submission: Submission| {
        let score = |output: &str| verdict(output.len() as f64 / 10.0);
        Ok(submission.outputs().iter().map(|output| score(output)).collect())
    })
}

#[tokio::test]
async fn fair_comparison_keeps_its_confidence() {
    let verdicts =
        PairwiseJudge::new(fair()).judge(&Submission::pair(task(), "four", "sixsix").unwrap()).await.unwrap();
    assert_eq!(scores(&verdicts), [0.4, 0.6]);
    assert_eq!(verdicts[0].confidence.get(), 0.8);
    assert!(verdicts[0].critique.issues.is_empty());
}

#[tokio::test]
async fn preference_for_the_first_halves_the_confidence() {
    let biased = judge_fn(async |_| Ok(vec![verdict(0.9), verdict(0.3)]));
    let verdicts = PairwiseJudge::new(biased).judge(&Submission::pair(task(), "a", "b").unwrap()).await.unwrap();
    assert_eq!(scores(&verdicts), [0.6, 0.6], "the bias cancels out");
    for verdict in &verdicts {
        assert_eq!(verdict.confidence.get(), 0.4);
        assert!(verdict.critique.issues[0].description.contains("order"));
    }
    let hesitant = judge_fn(async |submission: Submission| {
        let is_first = &*submission.outputs()[0] == "a";
        Ok(vec![verdict(if is_first { 0.9 } else { 0.5 }), verdict(0.5)])
    });
    let verdicts = PairwiseJudge::new(hesitant).judge(&Submission::pair(task(), "a", "b").unwrap()).await.unwrap();
    assert_eq!(verdicts[0].confidence.get(), 0.6, "a tie one way, a preference the other");
}

#[tokio::test]
async fn every_two_of_a_group_are_compared() {
    let group = Submission::group(task(), ["fivee", "a", "nine_nine"]).unwrap();
    let verdicts = PairwiseJudge::new(fair()).judge(&group).await.unwrap();
    assert_eq!(scores(&verdicts), [0.5, 0.1, 0.9]);
}

/// Otherwise a student would learn it only after it signed a payment.
#[tokio::test]
async fn pairs_that_the_inner_judge_rejects_are_rejected() {
    let model =
        || LlmJudge::builder(ChatClient::new("http://127.0.0.1:1/v1", "m").unwrap()).max_submission(200).build();
    let (short, long) = ("a".repeat(60), "b".repeat(120));
    let group = |outputs: [&str; 3]| Submission::group(task(), outputs).unwrap();
    let two_long = group([&short, &long, &long]);
    model().accepts(&two_long).expect("each by itself is short enough");
    let judge = PairwiseJudge::new(model());
    assert!(matches!(judge.accepts(&two_long), Err(JudgeError::Rejected(_))));
    assert!(matches!(judge.judge(&two_long).await, Err(JudgeError::Rejected(_))));
    judge.accepts(&group([&short, &long, &short])).expect("every two are short enough");
    judge.accepts(&Submission::pair(task(), &*short, &*long).unwrap()).unwrap();
}

#[tokio::test]
async fn one_output_and_nine_outputs_are_rejected() {
    let judge = PairwiseJudge::new(fair());
    for submission in [Submission::single(task(), "").unwrap(), Submission::group(task(), vec![""; 9]).unwrap()] {
        assert!(matches!(judge.accepts(&submission), Err(JudgeError::Rejected(_))));
        assert!(judge.judge(&submission).await.is_err());
    }
    let lazy = PairwiseJudge::new(judge_fn(async |_| Ok(vec![verdict(1.0)])));
    assert!(matches!(lazy.judge(&Submission::pair(task(), "", "").unwrap()).await, Err(JudgeError::Failed(_))));
}
