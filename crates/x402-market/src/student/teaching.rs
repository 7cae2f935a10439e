//! Lessons for evaluators that were audited, if the student's owner allows them.

use std::{ops::Range, sync::Arc, time::Duration};

use tokio::{task::JoinSet, time::timeout};

use super::{Inner, feedback::Judged, sent::Sent};
use crate::{Lesson, Outputs, Submission, TaskId, VerifiedCard};

/// How long all lessons of an audit may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// An evaluator that judged what is taught.
pub(super) struct Pupil {
    pub(super) card: Arc<VerifiedCard>,
    pub(super) is_untrusted: bool,
    pub(super) judged: Vec<Judged>,
}

/// Tells evaluators that take lessons which outputs are good. Anchors are left out: whoever knew them would recognize them. Returns how many
/// lessons were taken.
pub(super) async fn teach(inner: &Arc<Inner>, sent: &Sent, good: &[Option<bool>], pupils: Vec<Pupil>) -> usize {
    let Some(signer) = &inner.teacher else { return 0 };
    let good = sent.without_anchors(good);
    let mut lessons = JoinSet::new();
    for Pupil { card, is_untrusted, judged } in pupils.into_iter().filter(|pupil| pupil.card.pricing().lessons) {
        for Judged { range, alias, .. } in judged {
            let told = good.get(range.clone()).unwrap_or_default().to_vec();
            let Some(part) = part(&sent.submission, range, alias).filter(|_| told.iter().any(Option::is_some)) else {
                continue;
            };
            let (inner, signer, card) = (inner.clone(), signer.clone(), card.clone());
            lessons.spawn(async move {
                let Ok(lesson) = Lesson::sign(part, told, card.pay_to(), &*signer).await else { return false };
                let taken = inner.client(is_untrusted).teach(&card, &lesson).await;
                taken.inspect_err(|error| tracing::debug!(%error, "an evaluator did not take a lesson")).is_ok()
            });
        }
    }
    let mut taken = 0;
    let all = async {
        while let Some(is_taken) = lessons.join_next().await {
            taken += usize::from(is_taken.unwrap_or_default());
        }
    };
    // What was not taken by then is given up.
    let _ = timeout(DEADLINE, all).await;
    taken
}

/// Returns a part of a submission as it is sent: a group in parts, everything else whole, under an id that says nothing.
pub(super) fn part(submission: &Submission, range: Range<usize>, alias: TaskId) -> Option<Submission> {
    let mut part = match &submission.outputs {
        Outputs::Group(group) => {
            let outputs = group.get(range)?.iter().cloned().map(String::from);
            Submission::group(submission.task.clone(), outputs).ok()?
        }
        _ => Submission::new(submission.task.clone(), submission.outputs.clone()),
    };
    part.task.id = alias;
    Some(part)
}
