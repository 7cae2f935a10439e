//! One submission and its panel.

use std::sync::Arc;

use alloy_primitives::Address;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};
use tower_x402::Usdc;

use super::{
    Failure, Feedback, Inner, OutputFeedback, PanelVerdict, StudentError, Truth,
    aggregate::{self, Habit, MemberScore},
    call::{self, Answer, Waiting, Work},
    desk::{Desk, Hired, Wanted},
    feedback::Hire,
    roster::Shape,
};
use crate::{EvaluatorId, Score, Submission, Verdict, selection::Skill};

/// Has a submission judged, and sometimes a hidden task before it.
pub(super) async fn run(
    inner: &Arc<Inner>,
    submission: &Submission,
    truth: Option<Truth>,
) -> Result<Feedback, StudentError> {
    let shape = Shape::of(submission);
    let audit = truth.is_some();
    if !audit {
        hidden(inner, submission).await;
    }
    let work = Arc::new(Work { submission: submission.clone(), truth });
    let mut panel = {
        let mut desk = inner.desk();
        let name = &*submission.task.skill;
        // Only what somebody judges gets a number.
        if !desk.roster.judges(name) {
            return Err(StudentError::NoEvaluators { skill: name.to_owned() });
        }
        let skill = desk.skill(name, &inner.heard)?;
        let now = inner.clock.now();
        let wanted = Wanted { skill, shape, seats: inner.seats, audit, hidden: false, now, excluded: &[] };
        let hired = desk.hire(&wanted)?;
        desk.ledger.tasks += 1;
        desk.ledger.audits += u64::from(audit);
        desk.ledger.kept += u64::from(hired.is_empty());
        let (answers, inbox) = mpsc::channel(hired.len() + inner.replacements + 1);
        let (examined, hired): (Vec<_>, Vec<_>) = hired.into_iter().partition(|hired| hired.examined);
        let excluded = examined.iter().chain(&hired).map(|hired| hired.card.pay_to()).collect();
        drop(desk);
        for hired in examined {
            call::start(inner, hired, &work, None);
        }
        let waiting = hired.into_iter().map(|hired| call::start(inner, hired, &work, Some(&answers))).collect();
        Panel { inner, work, skill, shape, audit, excluded, waiting, answers, inbox, said: Vec::new() }
    };
    panel.wait(Instant::now() + inner.deadline).await;
    Ok(panel.feedback())
}

/// Has a hidden task judged, sometimes, and waits until that is done: of two submissions that come at once from a student that otherwise
/// sends one after the other, one would be hidden. It comes first, since what follows at once upon an answer is not. That there is no
/// money for it is no reason to fail.
async fn hidden(inner: &Arc<Inner>, like: &Submission) {
    let hired = {
        let mut desk = inner.desk();
        hire_hidden(inner, &mut desk, like)
    };
    let Some((work, hired)) = hired else { return };
    let (answers, mut inbox) = mpsc::channel(hired.len());
    // It is judged to the end, whatever becomes of the submission.
    let started = hired.into_iter().map(|hired| {
        let mut waiting = call::start(inner, hired, &work, Some(&answers));
        waiting.over();
        waiting.ticket()
    });
    let tickets: Vec<_> = started.collect();
    drop(answers);
    let answered = async { while inbox.recv().await.is_some() {} };
    if timeout(inner.deadline, answered).await.is_err() {
        // Whoever takes longer than that has failed, and is asked for nothing meanwhile.
        let (now, mut desk) = (inner.clock.now(), inner.desk());
        tickets.into_iter().for_each(|ticket| desk.give_up(ticket, now));
    }
}

fn hire_hidden(inner: &Inner, desk: &mut Desk, like: &Submission) -> Option<(Arc<Work>, Vec<Hired>)> {
    let name = &*like.task.skill;
    let skill = desk.roster.judges(name).then(|| desk.skill(name, &inner.heard).ok())??;
    let (submission, truth) = desk.draw_gold(like)?;
    let (shape, now) = (Shape::of(&submission), inner.clock.now());
    let wanted = Wanted { skill, shape, seats: inner.seats, audit: true, hidden: true, now, excluded: &[] };
    let hired = desk.hire(&wanted).ok().filter(|hired| !hired.is_empty())?;
    desk.ledger.audits += 1;
    Some((Arc::new(Work { submission, truth: Some(truth) }), hired))
}

/// Those who are asked, and what they said.
struct Panel<'a> {
    inner: &'a Arc<Inner>,
    work: Arc<Work>,
    skill: Skill,
    shape: Shape,
    audit: bool,
    excluded: Vec<Address>,
    waiting: Vec<Waiting>,
    answers: mpsc::Sender<Answer>,
    inbox: mpsc::Receiver<Answer>,
    /// By position in `waiting`.
    said: Vec<(usize, Answer)>,
}

impl Panel<'_> {
    /// Until all have answered or nobody is left to replace those who failed, but not beyond the deadline.
    async fn wait(&mut self, deadline: Instant) {
        let mut replacements = self.inner.replacements;
        while self.said.len() < self.waiting.len() {
            let Ok(Some(answer)) = timeout_at(deadline, self.inbox.recv()).await else { break };
            let failed = answer.failure.is_some();
            self.note(answer);
            if failed && replacements > 0 && Instant::now() < deadline {
                replacements -= 1;
                self.replace();
            }
        }
        // What came at the very end.
        while let Ok(answer) = self.inbox.try_recv() {
            self.note(answer);
        }
        self.waiting.iter_mut().for_each(Waiting::give_up);
    }

    fn note(&mut self, answer: Answer) {
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.ticket() == answer.ticket) {
            self.waiting[at].over();
            self.said.push((at, answer));
        }
    }

    /// Hires someone else for a seat, if there is somebody and money for it.
    fn replace(&mut self) {
        let Self { inner, skill, shape, audit, .. } = *self;
        let now = inner.clock.now();
        let wanted = Wanted { skill, shape, seats: 1, audit, hidden: false, now, excluded: &self.excluded };
        let hired = inner.desk().hire(&wanted).unwrap_or_default();
        for hired in hired {
            self.excluded.push(hired.card.pay_to());
            if hired.examined {
                call::start(inner, hired, &self.work, None);
            } else {
                self.waiting.push(call::start(inner, hired, &self.work, Some(&self.answers)));
            }
        }
    }

    fn feedback(mut self) -> Feedback {
        let mut hires: Vec<_> =
            self.waiting.iter().map(|waiting| waiting.hire(Vec::new(), Some(Failure::Timeout))).collect();
        let mut outputs = vec![Vec::new(); self.shape.outputs];
        self.said.sort_by_key(|(at, _)| *at);
        for (at, answer) in self.said {
            for (opinions, verdict) in outputs.iter_mut().zip(answer.verdicts) {
                opinions.extend(verdict.map(|(by, verdict)| (hires[at].evaluator, by, verdict)));
            }
            hires[at] = self.waiting[at].hire(answer.payments, answer.failure);
        }
        let outputs = {
            let desk = self.inner.desk();
            let common = desk.norms.common(self.skill, |judge| desk.selector.expected_accuracy(judge, self.skill));
            outputs.into_iter().map(|opinions| weigh(&desk, self.skill, &common, opinions)).collect()
        };
        let sum = |of: fn(&Hire) -> Usdc| {
            hires.iter().fold(Usdc::ZERO, |sum, hire| sum.checked_add(of(hire)).unwrap_or(Usdc::MAX))
        };
        let (paid, held) = (sum(|hire| hire.sums().0), sum(|hire| hire.sums().1));
        Feedback { task: self.work.submission.task.id.clone(), outputs, hires, paid, held }
    }
}

/// Makes one verdict of several.
fn weigh(desk: &Desk, skill: Skill, common: &Habit, opinions: Vec<(Address, EvaluatorId, Verdict)>) -> OutputFeedback {
    let voice = |(evaluator, _, verdict): &(Address, EvaluatorId, Verdict)| {
        let habit = desk.norms.of(*evaluator, skill);
        let believed = desk.selector.expected_accuracy(*evaluator, skill);
        MemberScore {
            score: aggregate::calibrate(verdict.score.get(), &habit, common),
            chance: aggregate::chance(believed, verdict.confidence.get(), &habit),
        }
    };
    let voices: Vec<_> = opinions.iter().map(voice).collect();
    let total: f64 = voices.iter().map(|voice| aggregate::weight(voice.chance)).sum();
    let verdict = aggregate::combine(&voices);
    let opinion = |((evaluator, by, verdict), voice): ((Address, EvaluatorId, Verdict), &MemberScore)| PanelVerdict {
        evaluator,
        evaluator_id: by,
        weight: if total > 0.0 { aggregate::weight(voice.chance) / total } else { 0.0 },
        calibrated: Score::clamped(voice.score),
        verdict,
    };
    let mut members: Vec<_> = opinions.into_iter().zip(&voices).map(opinion).collect();
    members.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    OutputFeedback { verdict, members }
}
