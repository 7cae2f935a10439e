//! Rolls out, judges and delivers one group after the other.

use std::{future::ready, path::PathBuf, pin::pin};

use anyhow::Context as _;
use tokio::sync::watch;
use x402_market::{Feedback, LengthError, Student, StudentError, Submission, Truth};

use crate::{
    checkpoint::{Checkpoint, Pending},
    delivery::{Delivered, Delivery},
    flags::{Flags, Tasks},
    policy::{Action, Problem, Rng, Strategy, actions, answer},
    rollout::{Answerer, Rollout},
    scoring::Scored,
    tasks::Question,
};

/// Distinguishes the random numbers that decide on audits from those of the run.
const AUDITS: u64 = 0x601d;

/// The parts of a run.
pub(crate) struct Run<'a> {
    pub(crate) flags: &'a Flags,
    pub(crate) student: &'a Student,
    pub(crate) answerer: &'a Answerer,
    pub(crate) delivery: &'a mut Delivery,
    pub(crate) checkpoint: &'a mut Checkpoint,
    /// Becomes true when the run is to stop after the present group.
    pub(crate) stop: watch::Receiver<bool>,
}

/// Why the run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Done,
    Stopped,
    /// The budget covers no further verdict.
    NoMoney,
}

impl Run<'_> {
    pub(crate) async fn go(mut self) -> anyhow::Result<End> {
        if let Some(pending) = self.checkpoint.pending.clone() {
            self.hand_over(pending).await?;
        }
        while self.checkpoint.tally.rolled_out < self.flags.groups {
            let mut stop = self.stop.clone();
            let room = tokio::select! {
                room = self.delivery.wait_for_room() => room,
                _ = stop.wait_for(|stop| *stop) => return Ok(End::Stopped),
            };
            room?;
            if !self.group().await? {
                return Ok(End::NoMoney);
            }
            self.checkpoint.tally.progress(self.flags.groups, self.flags.budget);
        }
        Ok(End::Done)
    }

    /// Rolls out a group, has it judged, learns from it and delivers it. Returns `false` if the budget does not cover the
    /// verdicts.
    async fn group(&mut self) -> anyhow::Result<bool> {
        let Checkpoint { policy, rng, levels, .. } = &mut *self.checkpoint;
        let question = match self.flags.tasks {
            Tasks::Words => Question::Words(Problem::any(rng)),
            Tasks::Code => levels.any(rng)?,
        };
        let skills = question.skills();
        let count = usize::from(self.flags.group_size);
        let answers = self.answerer.answers(policy, &question, count, rng).await?;
        // Numbers of their own: audits must not change the problems of the run.
        let number = self.checkpoint.tally.rolled_out;
        let mut luck = Rng::seeded(self.flags.seed ^ AUDITS ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let audited: Vec<bool> = skills.iter().map(|_| luck.unit() < self.flags.audit_rate).collect();
        let ask = |at: usize| {
            let submission = question.submission(skills[at].0, &answers)?;
            if audited[at] { anchored(submission, skills[at].0, &question, &mut luck.clone()) } else { Ok(submission) }
        };
        let second = if skills.len() > 1 { Some(ask(1)?) } else { None };
        let Some(said) = self.ask(&ask(0)?, second.as_ref()).await else { return Ok(false) };
        for (at, said) in said.iter().enumerate().filter(|(at, _)| audited[*at]) {
            if let Ok(feedback) = said {
                self.student.audit(feedback, &truth(skills[at].0, &question, &answers)).await?;
            }
        }
        // Verdicts that were paid for in one skill are used even if the other could not be judged.
        let (mut feedback, mut failed) = (Vec::new(), None);
        for said in said {
            feedback.push(verdicts(said).unwrap_or_else(|error| {
                failed.get_or_insert(error);
                None
            }));
        }
        if let Some(error) = failed.take_if(|_| feedback.iter().all(Option::is_none)) {
            return Err(error);
        }

        let Checkpoint { policy, tally, run, levels, .. } = &mut *self.checkpoint;
        let id = format!("{run}{}", tally.rolled_out);
        let scored = Scored::new(id, question, self.answerer.instruction(), answers, &feedback);
        let decided = scored.answers.iter().zip(scored.advantages());
        let group: Vec<_> =
            decided.filter_map(|(answer, advantage)| Some(answer.action?).zip(Some(advantage))).collect();
        match &scored.question {
            Question::Words(problem) => policy.learn(problem.kind, &group),
            Question::Program(program) if scored.scores.is_some() => levels.enter(program.level, scored.right()),
            Question::Program(_) => {}
        }
        tally.enter(&scored, policy, self.student.budget().spent());
        // From here on the verdicts are in the checkpoint, and are not bought again.
        self.hand_over(Pending { scored, sent: false }).await?;
        failed.map_or(Ok(true), Err)
    }

    /// Has a group judged in its skills. Returns `None`, and pays nothing, if the budget does not cover the first: style alone is
    /// not what the policy should learn.
    async fn ask(&self, first: &Submission, second: Option<&Submission>) -> Option<Vec<Said>> {
        let mut first = pin!(self.student.evaluate(first));
        // Whether the first skill can be paid for is known before anything is awaited.
        let early = tokio::select! {
            biased;
            said = &mut first => Some(said),
            () = ready(()) => None,
        };
        let second = second.map(|second| self.student.evaluate(second));
        match (early, second) {
            (Some(Err(StudentError::BudgetExhausted { .. })), _) => None,
            (Some(said), Some(second)) => Some(vec![said, second.await]),
            (Some(said), None) => Some(vec![said]),
            (None, Some(second)) => Some(<[Said; 2]>::from(tokio::join!(first, second)).into()),
            (None, None) => Some(vec![first.await]),
        }
    }

    /// Delivers a group. One that could not be sent stays in the checkpoint for the next run.
    async fn hand_over(&mut self, pending: Pending) -> anyhow::Result<()> {
        let Pending { scored, sent } = pending;
        // If the process ends after this, the group may have been sent.
        self.checkpoint.pending = Some(Pending { scored: scored.clone(), sent: true });
        self.save()?;
        let delivered = match sent {
            true => self.delivery.push_perhaps_again(&scored, &self.checkpoint.run).await,
            false => self.delivery.push(&scored).await,
        };
        match delivered {
            Ok(delivered) => self.delivered(delivered),
            Err(error) => {
                self.checkpoint.pending = Some(Pending { scored, sent });
                self.save()?;
                Err(error)
            }
        }
    }

    fn delivered(&mut self, delivered: Delivered) -> anyhow::Result<()> {
        let tally = &mut self.checkpoint.tally;
        match delivered {
            Delivered::Pushed => tally.pushed += 1,
            Delivered::EqualScores => tally.equal_scores += 1,
            Delivered::Unjudged => tally.unjudged += 1,
            Delivered::TooLong => tally.too_long += 1,
            Delivered::Unsure => tally.unsure += 1,
        }
        self.checkpoint.pending = None;
        self.save()
    }

    fn save(&self) -> anyhow::Result<()> {
        self.flags.checkpoint.as_ref().map_or(Ok(()), |path: &PathBuf| self.checkpoint.write(path))
    }
}

type Said = Result<Feedback, StudentError>;

/// Turns a missing evaluator or an exhausted budget into `None`: no reason to stop.
fn verdicts(said: Said) -> anyhow::Result<Option<Feedback>> {
    match said {
        Ok(feedback) => Ok(Some(feedback)),
        Err(StudentError::NoEvaluators { .. } | StudentError::BudgetExhausted { .. }) => Ok(None),
        Err(error) => Err(error).context("no evaluator could be asked"),
    }
}

/// Returns `true` if an answer made this way is good in this skill.
fn is_good(skill: &str, action: Action) -> bool {
    if skill == "prose" { action.style.is_plain() } else { action.strategy == Strategy::Sound }
}

/// Adds a good and a bad answer to a submission, so that an audit shows something even if all answers are equally good.
fn anchored(
    submission: Submission,
    skill: &str,
    question: &Question,
    luck: &mut Rng,
) -> Result<Submission, LengthError> {
    [true, false].into_iter().try_fold(submission, |submission, wanted| {
        let known = match question {
            Question::Words(problem) => {
                let known: Vec<_> = actions().filter(|action| is_good(skill, *action) == wanted).collect();
                answer(problem, luck.pick(&known))
            }
            Question::Program(program) => program.anchor(skill, wanted),
        };
        match submission.clone().with_anchor(known, wanted) {
            // There is no room in the largest groups.
            Err(_) if submission.outputs().len() + 2 > x402_market::MAX_OUTPUTS => Ok(submission),
            anchored => anchored,
        }
    })
}

/// Returns what is known of the answers. Of a model's answers that is whether the result is right; of programs, nothing.
fn truth(skill: &str, question: &Question, answers: &[Rollout]) -> Truth {
    let Question::Words(problem) = question else { return Truth::known(vec![None; answers.len()]) };
    let ending = format!("Answer: {}", problem.truth());
    let of = |answer: &Rollout| match answer.action {
        Some(action) => Some(is_good(skill, action)),
        None => (skill != "prose").then(|| answer.text.trim_end().ends_with(&ending)),
    };
    Truth::known(answers.iter().map(of))
}
