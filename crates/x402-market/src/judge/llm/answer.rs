//! What the model answers.

use serde::Deserialize;

use crate::{Confidence, Critique, Issue, List, LongText, MAX_OUTPUTS, Place, Score, Severity, Verdict};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    verdicts: List<Judged, 1, MAX_OUTPUTS>,
}

#[derive(Deserialize)]
struct Judged {
    score: Score,
    confidence: Confidence,
    summary: String,
    #[serde(default)]
    strengths: Vec<String>,
    #[serde(default)]
    issues: Vec<Found>,
}

#[derive(Deserialize)]
struct Found {
    severity: Severity,
    description: String,
    quote: Option<String>,
    suggestion: Option<String>,
}

/// The verdicts, or what is wrong with the answer.
pub(super) fn read(answer: &str, outputs: &[LongText]) -> Result<Vec<Verdict>, String> {
    let json = unfenced(answer.trim());
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let Answer { verdicts } = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| error.to_string())?;
    deserializer.end().map_err(|_| "there is more than one JSON object".to_owned())?;
    if verdicts.len() != outputs.len() {
        return Err(format!("there are {} verdicts for {} candidates", verdicts.len(), outputs.len()));
    }
    let verdicts = Vec::from(verdicts).into_iter().zip(outputs);
    Ok(verdicts.map(|(judged, output)| judged.verdict(output)).collect())
}

/// Many models cannot help putting JSON into a code block.
fn unfenced(answer: &str) -> &str {
    let inner = answer.strip_prefix("```").and_then(|rest| rest.strip_suffix("```"));
    inner.map_or(answer, |inner| inner.strip_prefix("json").unwrap_or(inner).trim())
}

impl Judged {
    fn verdict(self, output: &str) -> Verdict {
        let critique = self.strengths.into_iter().fold(Critique::new(self.summary), Critique::strength);
        let critique = self.issues.into_iter().map(|found| found.issue(output)).fold(critique, Critique::issue);
        Verdict::new(self.score, self.confidence, critique)
    }
}

impl Found {
    fn issue(self, output: &str) -> Issue {
        // What is not there word for word is no place; models paraphrase.
        let quote = self.quote.filter(|quote| !quote.trim().is_empty());
        let issue =
            Issue::new(self.severity, self.description).at(quote.and_then(|quote| Place::quoting(output, &quote)));
        match self.suggestion.filter(|suggestion| !suggestion.is_empty()) {
            Some(suggestion) => issue.suggest(suggestion),
            None => issue,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn outputs() -> [LongText; 1] {
        [LongText::new("The sky is green.").unwrap()]
    }

    #[test]
    fn an_answer_is_read_and_its_quotes_are_found() {
        let answer = r#"{"verdicts": [{"score": 0.1, "confidence": 0.9, "summary": "Wrong.", "issues": [
            {"severity": "critical", "description": "it is blue", "quote": "green", "suggestion": "blue"},
            {"severity": "minor", "description": "no reason", "quote": "because"}]}]}"#;
        for answer in [answer.to_owned(), format!("```json\n{answer}\n```"), format!("\n{answer} ")] {
            let verdicts = read(&answer, &outputs()).unwrap();
            let issues = &verdicts[0].critique.issues;
            assert_eq!(issues[0].place.as_ref().and_then(|place| place.span()).unwrap().start, 11);
            assert_eq!(issues[1].place, None);
        }
    }

    #[test]
    fn what_is_not_of_the_form_is_told() {
        let with = |score: &str| format!(r#"{{"verdicts": [{{"score": {score}, "confidence": 1, "summary": ""}}]}}"#);
        assert!(read(&with("1.5"), &outputs()).unwrap_err().contains("verdicts[0].score: 1.5 is not a score"));
        assert!(read(&with("\"high\""), &outputs()).unwrap_err().contains("verdicts[0].score"));
        assert!(read(&format!("Sure! {}", with("1")), &outputs()).is_err());
        assert!(read(&format!("{} {}", with("1"), with("0")), &outputs()).unwrap_err().contains("more than one"));
        let two = [outputs(), outputs()].concat();
        assert!(read(&with("1"), &two).unwrap_err().contains("1 verdicts for 2"));
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(answer in "(```|json|\\{|\\}|\"verdicts\"|:|\\[|\\]|\"score\"|1|,| ){0,40}|\\PC{0,60}") {
            let _ = read(&answer, &outputs());
        }
    }
}
