//! What is sent to evaluators of a submission: each distinct output once, and the anchors.

use rand::{Rng, seq::SliceRandom};
use serde::{Deserialize, Serialize};

use super::Truth;
use crate::{LongText, Outputs, Submission, bounded::List};

/// A submission as it is sent, and where its own outputs are in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Sent {
    pub(super) submission: Submission,
    /// By output of the submission: its position among those sent.
    positions: Vec<usize>,
    /// By output sent: whether it is good, if it is an anchor.
    known: Vec<Option<bool>>,
}

impl Sent {
    /// Returns what to send. `None` if there is nothing to compare: all outputs are the same, and there is no anchor that differs from them.
    pub(super) fn of(submission: &Submission, rng: &mut impl Rng) -> Option<Self> {
        let outputs = submission.outputs();
        let mut sent: Vec<(&LongText, Option<bool>)> = Vec::new();
        for output in outputs {
            if !sent.iter().any(|(other, _)| *other == output) {
                sent.push((output, None));
            }
        }
        for (anchor, is_good) in &submission.anchors {
            match sent.iter_mut().find(|(other, _)| *other == anchor) {
                Some((_, known)) => *known = Some(*is_good),
                None => sent.push((anchor, Some(*is_good))),
            }
        }
        if sent.len() == 1 && !matches!(submission.outputs, Outputs::Single(_)) {
            return None;
        }
        if submission.anchors.is_empty() && !matches!(submission.outputs, Outputs::Group(_)) {
            let positions = (0..outputs.len()).collect();
            return Some(Self { submission: submission.clone(), positions, known: vec![None; outputs.len()] });
        }
        if !submission.anchors.is_empty() {
            sent.shuffle(rng);
        }
        let position = |output: &LongText| sent.iter().position(|(other, _)| *other == output);
        let positions = outputs.iter().filter_map(position).collect();
        let group = List::new(sent.iter().map(|(output, _)| (*output).clone())).ok()?;
        let known = sent.iter().map(|(_, known)| *known).collect();
        Some(Self { submission: Submission::new(submission.task.clone(), Outputs::Group(group)), positions, known })
    }

    /// Returns the number of the submission's own outputs.
    pub(super) fn outputs(&self) -> usize {
        self.positions.len()
    }

    /// Returns the verdicts on the submission's own outputs, in order, from those on the outputs sent.
    pub(super) fn own<T: Clone>(&self, sent: &[T]) -> Vec<T> {
        self.positions.iter().filter_map(|position| sent.get(*position).cloned()).collect()
    }

    /// Returns what is known of the outputs sent, without the anchors.
    pub(super) fn without_anchors(&self, good: &[Option<bool>]) -> Vec<Option<bool>> {
        good.iter().zip(&self.known).map(|(good, anchor)| good.filter(|_| anchor.is_none())).collect()
    }

    /// Returns of each output sent whether it is good, as far as that is known. `None` if the truth is about other outputs.
    pub(super) fn with(&self, truth: &Truth) -> Option<Vec<Option<bool>>> {
        if truth.good.len() != self.positions.len() {
            return None;
        }
        let mut known = self.known.clone();
        for (position, good) in self.positions.iter().zip(&truth.good) {
            let slot = known.get_mut(*position)?;
            *slot = good.or(*slot);
        }
        Some(known)
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};

    use super::*;
    use crate::Task;

    fn sent(submission: &Submission) -> Option<Sent> {
        Sent::of(submission, &mut Xoshiro256PlusPlus::seed_from_u64(3))
    }

    fn task() -> Task {
        Task::new("prose", "Write.").unwrap()
    }

    fn texts(sent: &Sent) -> Vec<&str> {
        sent.submission.outputs().iter().map(|output| &**output).collect()
    }

    #[test]
    fn identical_outputs_are_sent_once_and_a_group_of_one_distinct_output_not_at_all() {
        let group = |outputs: &[&str]| Submission::group(task(), outputs.iter().copied()).unwrap();
        let some = sent(&group(&["a", "b", "a", "c", "b"])).unwrap();
        assert_eq!((texts(&some), some.own(&[1, 2, 3])), (vec!["a", "b", "c"], vec![1, 2, 1, 3, 2]));
        let good = some.with(&Truth::good([true, false, true, false, false]));
        assert_eq!(good, Some(vec![Some(true), Some(false), Some(false)]));
        assert_eq!(some.with(&Truth::good([true])), None);
        assert_eq!(sent(&group(&["a", "a", "a"])), None);
        assert_eq!(sent(&group(&["a", "a"]).with_anchor("a", false).unwrap()), None);
        assert_eq!(sent(&Submission::pair(task(), "a", "a").unwrap()), None);
        assert!(sent(&Submission::single(task(), "a").unwrap()).is_some());
    }

    /// Otherwise a judge that the policy follows would never be audited again.
    #[test]
    fn group_of_one_distinct_output_is_sent_with_its_anchors() {
        let group = Submission::group(task(), ["a", "a", "a"]).unwrap();
        let some = sent(&group.with_anchor("x", true).unwrap().with_anchor("y", false).unwrap()).unwrap();
        assert_eq!((some.submission.outputs().len(), some.outputs()), (3, 3));
        let mut good = some.with(&Truth::good([false; 3])).unwrap();
        good.sort_unstable();
        assert_eq!(good, [Some(false), Some(false), Some(true)]);
    }

    #[test]
    fn anchors_are_mixed_in_and_known() {
        let outputs = ["a", "b", "c", "d"];
        let submission = Submission::group(task(), outputs).unwrap();
        let submission = submission.with_anchor("x", true).unwrap().with_anchor("b", false).unwrap();
        let some = sent(&submission).unwrap();
        let mut all = texts(&some);
        assert_eq!(some.own(&all), outputs, "anchors are not in the feedback");
        let of = |text: &str| all.iter().position(|other| *other == text).unwrap();
        let good = some.with(&Truth::good([true, true, false, false])).unwrap();
        assert_eq!(["x", "a", "b", "c"].map(|text| good[of(text)]), [Some(true), Some(true), Some(true), Some(false)]);
        all.sort_unstable();
        assert_eq!(all, ["a", "b", "c", "d", "x"]);
        let alone = sent(&Submission::single(task(), "a").unwrap().with_anchor("x", false).unwrap()).unwrap();
        assert_eq!(alone.submission.outputs().len(), 2);
        let pair = Submission::pair(task(), "a", "b").unwrap().with_anchor("x", false).unwrap();
        let good = sent(&pair).unwrap();
        assert_eq!(good.own(&good.with(&Truth::good([false, true])).unwrap()), [Some(false), Some(true)]);
        let json = serde_json::to_string(&pair).unwrap();
        assert!(!json.contains('x'), "anchors are not sent as such: {json}");
    }
}
