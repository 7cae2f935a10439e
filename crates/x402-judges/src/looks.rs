//! A judge that looks at a program as a hurried person does.

use async_trait::async_trait;
use x402_market::{
    Confidence, Critique, Issue, Place, Score, Severity, Submission, Verdict,
    judge::{Judge, JudgeError},
};

use crate::is_listed;

/// Words that promise much.
const CONFIDENT: &str = "correct correctly right robust efficient efficiently optimal optimized guaranteed proven tested handles always \
    works linear constant safe secure fast";

/// A judge of how a program looks: its length, comments, documentation, and confident words.
///
/// It does not run or understand the program. Markets are full of judges like this one: it is cheap, it agrees with others of its kind, and
/// what it likes is easy to write. It is here so that experiments can show what that does.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::{Submission, Task, judge::Judge};
/// use x402_judges::LooksJudge;
///
/// let bluff = "def add(a, b):\n    \"\"\"Robust and correct: handles all edge cases.\"\"\"\n    return 5\n";
/// let pair = Submission::pair(Task::new("code", "Write add(a, b).")?, bluff, "def add(a, b):\n    return a + b\n")?;
/// let verdicts = LooksJudge.judge(&pair).await?;
/// assert!(verdicts[0].score > verdicts[1].score);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct LooksJudge;

#[async_trait]
impl Judge for LooksJudge {
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        Ok(submission.outputs().iter().map(|output| judge(output)).collect())
    }
}

fn judge(program: &str) -> Verdict {
    let lines = program.lines().filter(|line| !line.trim().is_empty()).count();
    let words = program.split(|letter: char| !letter.is_alphabetic()).filter(|word| is_listed(word, CONFIDENT)).count();
    let longest = program.lines().max_by_key(|line| line.len()).unwrap_or_default();
    let measures = [
        (0.3, (lines as f64 / 6.0).min(1.0), "it is short"),
        (0.3, f64::from(program.contains('#') || program.contains("\"\"\"")), "it explains nothing"),
        (0.3, (words as f64 / 2.0).min(1.0), "it does not say that it is right"),
        (0.1, f64::from(longest.len() <= 80), "a line is long"),
    ];
    let score: f64 = measures.iter().map(|(weight, measure, _)| weight * measure).sum();
    let missing = measures.iter().filter(|(_, measure, _)| *measure < 0.5).map(|(.., what)| *what);
    let issues = missing.map(|what| {
        let issue = Issue::new(Severity::Minor, what);
        if what == "a line is long" { issue.at(Place::quoting(program, longest)) } else { issue }
    });
    let critique = issues.fold(Critique::new("Judged by its looks."), Critique::issue);
    Verdict::new(Score::clamped(score), Confidence::clamped(0.6), critique)
}
