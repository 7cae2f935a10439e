//! How easy a text is to read.

use async_trait::async_trait;
use x402_market::{
    Submission, Verdict,
    judge::{Judge, JudgeError},
};

/// Judges how easy English prose is to read, by its longest sentence: 1 if it has at most 22 words, 0 from 45 words on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainJudge;

#[async_trait]
impl Judge for PlainJudge {
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        Ok(submission.outputs().iter().map(|output| judge(output)).collect())
    }
}

fn judge(text: &str) -> Verdict {
    let sentences = text.split(['.', '!', '?', ';', '\n']);
    let words = |sentence: &str| sentence.split_whitespace().filter(|word| word.contains(char::is_alphabetic)).count();
    let longest = sentences.map(words).max().unwrap_or(0);
    let score = (45.0 - longest as f64) / (45.0 - 22.0);
    Verdict::new(score, 0.7, format!("The longest sentence has {longest} words."))
}
