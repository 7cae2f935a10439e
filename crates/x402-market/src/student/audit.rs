//! Audits after the verdict.

use std::sync::Arc;

use super::{
    AuditReport, AuditedEvaluation, Feedback, Inner, StudentError, Truth,
    feedback::Judged,
    panel::{self, Work},
    teaching::{self, Pupil},
    truth,
};

/// Counts the truth for everyone who judged, and asks a few more about the same outputs.
pub(super) async fn audit(inner: &Arc<Inner>, feedback: &Feedback, told: &Truth) -> Result<AuditReport, StudentError> {
    let Some(sent) = &feedback.sent else { return Ok(AuditReport::default()) };
    let good = sent.with(told).ok_or(StudentError::TruthMismatch)?;
    let skill_name = &*sent.submission.task.skill;
    let skill = {
        let mut state = inner.state();
        // After a restart it has a number before evaluators are found.
        let numbered = state.skills.get(skill_name);
        numbered.map_or_else(|| state.skill(skill_name, &inner.reports), Ok)?
    };
    let mut report = AuditReport::default();
    for hire in &feedback.hires {
        for Judged { range, scores, payment, .. } in &hire.judged {
            let Some(pairs) = truth::compare(scores, &good, range) else { continue };
            let is_recorded = match payment {
                Some(payment) => inner.evidence.audit(*payment, pairs),
                // Nothing was charged, so no record of it can be reported.
                None => Ok(true),
            };
            let mut state = inner.state();
            match is_recorded {
                Ok(true) => {}
                Ok(false) => continue,
                Err(error) => {
                    tracing::warn!(%error, "could not record an audit");
                    state.spending.counts.unrecorded += 1;
                }
            }
            state.selector.learn_audit(hire.evaluator, skill, pairs);
            state.spending.audit(hire.evaluator, (skill, skill_name), pairs);
            report.evaluations.push(AuditedEvaluation { evaluator: hire.evaluator, pairs, is_exploration: false });
        }
    }
    if report.evaluations.is_empty() {
        return Ok(report);
    }
    inner.state().spending.counts.audits += 1;
    let judges = feedback.hires.iter().map(|hire| hire.evaluator).collect();
    let work = Work { submission: sent.submission.clone(), good: Some(good.clone()) };
    let (explored, mut pupils) = panel::explore(inner, work, skill, judges).await;
    report.evaluations.extend(explored);
    // Not before the audit has counted: whoever knows the truth could repeat it.
    pupils.extend(feedback.hires.iter().filter(|hire| !hire.judged.is_empty()).filter_map(|hire| {
        let mut state = inner.state();
        let known = state.evaluators.find(hire.evaluator)?;
        Some(Pupil { card: known.card.clone(), is_untrusted: known.is_untrusted, judged: hire.judged.clone() })
    }));
    report.lessons = teaching::teach(inner, sent, &good, pupils).await;
    Ok(report)
}
