//! One submission, from hiring to feedback.
//!
//! [`evaluate`] hires a panel, replaces members that fail, and aggregates their verdicts; [`explore`] asks others for an audit. Each call
//! to an evaluator is a task of its own that ends in bounded time and records what it cost, whether or not the panel still waits.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use alloy_primitives::{Address, U256};
use futures_util::future::join_all;
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, timeout_at},
};
use tower_x402::Usdc;

use super::{
    AuditedEvaluation, CallPayment, Failure, Feedback, Hire, Inner, OutputFeedback, PanelVerdict, StudentError,
    aggregate::{self, Member},
    feedback::Judged,
    known::KnownEvaluator,
    sent::Sent,
    spending::sum,
    state::{Ended, HireRequest, Hired, Part},
    teaching::{self, Pupil},
    truth,
};
use crate::{
    CardError, EvaluateError, EvaluatorId, Outputs, Submission, Verdict, VerifiedCard,
    evidence::{Evidence, EvidenceError},
    selection::Skill,
};

/// The shortest time between two fetches of a card because of a failure, in seconds. The new card shows whether the evaluator misquoted its
/// terms or changed them.
const CARD_RECHECK_INTERVAL: u64 = 60;

/// Has a submission judged.
pub(super) async fn evaluate(inner: &Arc<Inner>, submission: &Submission) -> Result<Feedback, StudentError> {
    let (skill, audits, sent, hired) = {
        let mut state = inner.state();
        let state = &mut *state;
        let skill = state.skill(&submission.task.skill, &inner.reports)?;
        let audits = state.spending.audited(skill);
        let Some(sent) = Sent::of(submission, &mut state.rng) else {
            state.spending.counts.tasks += 1;
            state.spending.counts.uniform += 1;
            let outputs = vec![OutputFeedback::default(); submission.outputs().len()];
            let (task, none) = (submission.task.id.clone(), Usdc::ZERO);
            return Ok(Feedback { task, outputs, hires: Vec::new(), audits, paid: none, held: none, sent: None });
        };
        let (submission, seats, now) = (&sent.submission, inner.panel_size, inner.clock.now());
        let request = HireRequest { skill, submission, seats, is_exploration: false, now, excluded: &[] };
        let hired = state.hire(&request)?;
        state.spending.counts.tasks += 1;
        state.spending.counts.kept += u64::from(hired.is_empty());
        (skill, audits, sent, hired)
    };
    let work = Work { submission: sent.submission.clone(), good: None };
    let mut panel = Panel::new(inner, work, skill, inner.max_replacements);
    panel.start(hired);
    panel.wait(Instant::now() + inner.deadline).await;
    Ok(panel.feedback(sent, audits))
}

/// Asks a few evaluators about outputs whose truth is known, but not the `judges` that have judged them.
pub(super) async fn explore(
    inner: &Arc<Inner>,
    work: Work,
    skill: Skill,
    judges: Vec<Address>,
) -> (Vec<AuditedEvaluation>, Vec<Pupil>) {
    let (submission, now) = (&work.submission, inner.clock.now());
    let request = HireRequest { skill, submission, seats: 0, is_exploration: true, now, excluded: &judges };
    // Lack of money is no error: the audit counts without them.
    let hired = inner.state().hire(&request).unwrap_or_default();
    let mut panel = Panel::new(inner, work, skill, 0);
    panel.start(hired);
    panel.wait(Instant::now() + inner.deadline).await;
    let good = panel.work.good.as_deref().unwrap_or_default();
    let of = |(at, answer): &(usize, Answer)| {
        let evaluator = panel.calls[*at].hired.card.pay_to();
        let pairs = answer.judged.iter().filter_map(|part| truth::compare(&part.scores, good, &part.range));
        pairs.map(|pairs| AuditedEvaluation { evaluator, pairs, is_exploration: true }).collect::<Vec<_>>()
    };
    let evaluations = panel.answered.iter().flat_map(of).collect();
    let pupil = |(at, answer): (usize, Answer)| {
        let Hired { card, is_untrusted, .. } = &panel.calls[at].hired;
        Pupil { card: card.clone(), is_untrusted: *is_untrusted, judged: answer.judged }
    };
    (evaluations, std::mem::take(&mut panel.answered).into_iter().map(pupil).collect())
}

/// What evaluators are asked to judge, and which outputs are good as far as that is known.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) submission: Submission,
    pub(super) good: Option<Vec<Option<bool>>>,
}

/// The evaluators that are asked, and their answers so far.
struct Panel<'a> {
    inner: &'a Arc<Inner>,
    work: Arc<Work>,
    skill: Skill,
    replacements: usize,
    /// Everyone who was hired for this submission.
    excluded: Vec<Address>,
    calls: Vec<CallHandle>,
    answers: mpsc::Sender<Answer>,
    inbox: mpsc::Receiver<Answer>,
    /// With their positions in `calls`.
    answered: Vec<(usize, Answer)>,
}

impl<'a> Panel<'a> {
    fn new(inner: &'a Arc<Inner>, work: Work, skill: Skill, replacements: usize) -> Self {
        // Nobody is asked twice, so there is room for all answers.
        let (answers, inbox) = mpsc::channel(inner.max_named.clamp(1, Semaphore::MAX_PERMITS));
        let (excluded, calls, answered) = (Vec::new(), Vec::new(), Vec::new());
        Self { inner, work: Arc::new(work), skill, replacements, excluded, calls, answers, inbox, answered }
    }

    fn start(&mut self, hired: Vec<Hired>) {
        for hired in hired {
            self.excluded.push(hired.card.pay_to());
            self.calls.push(start_call(self.inner, hired, &self.work, &self.answers));
        }
    }

    /// Waits until all members have answered and failed ones have no replacement left, or until the deadline.
    async fn wait(&mut self, deadline: Instant) {
        while self.answered.len() < self.calls.len() {
            let Ok(Some(answer)) = timeout_at(deadline, self.inbox.recv()).await else { break };
            let failed = answer.failure.is_some();
            self.accept(answer);
            if failed && self.replacements > 0 && Instant::now() < deadline {
                self.replacements -= 1;
                self.replace();
            }
        }
        // Answers that arrived just before the deadline count.
        while let Ok(answer) = self.inbox.try_recv() {
            self.accept(answer);
        }
        // The selector is told that they took too long.
        for call in self.calls.iter().filter(|call| !call.has_ended) {
            self.inner.state().give_up(call.hired.call);
        }
    }

    fn accept(&mut self, answer: Answer) {
        if let Some(at) = self.calls.iter().position(|call| call.hired.call == answer.call) {
            self.calls[at].has_ended = true;
            self.answered.push((at, answer));
        }
    }

    /// Hires another evaluator for one seat, if there is one and money for it.
    fn replace(&mut self) {
        let (inner, skill, now) = (self.inner, self.skill, self.inner.clock.now());
        let submission = &self.work.submission;
        let request = HireRequest { skill, submission, seats: 1, is_exploration: false, now, excluded: &self.excluded };
        let hired = inner.state().hire(&request).unwrap_or_default();
        self.start(hired);
    }

    fn feedback(mut self, sent: Sent, audits: u64) -> Feedback {
        let timed_out = |call: &CallHandle| call.hire(Vec::new(), Vec::new(), Some(Failure::Timeout));
        let mut hires: Vec<_> = self.calls.iter().map(timed_out).collect();
        let mut members = Vec::new();
        self.answered.sort_by_key(|(at, _)| *at);
        for (at, answer) in self.answered {
            let evaluator = hires[at].evaluator;
            let verdict = |(evaluator_id, verdict)| PanelVerdict { evaluator, evaluator_id, weight: 0.0, verdict };
            let verdicts: Vec<_> = answer.verdicts.into_iter().map(|given| given.map(verdict)).collect();
            let worth = self.inner.state().selector.expected_worth(evaluator, self.skill);
            members.push(Member { worth, verdicts: sent.own(&verdicts) });
            hires[at] = self.calls[at].hire(answer.payments, answer.judged, answer.failure);
        }
        let outputs = aggregate::aggregate(sent.outputs(), members);
        let (paid, held): (Vec<_>, Vec<_>) = hires.iter().map(Hire::sums).unzip();
        let task = self.work.submission.task.id.clone();
        Feedback { task, outputs, hires, audits, paid: sum(paid), held: sum(held), sent: Some(sent) }
    }
}

/// The answer of one evaluator.
#[derive(Debug)]
struct Answer {
    call: u64,
    /// By output.
    verdicts: Vec<Option<(EvaluatorId, Verdict)>>,
    payments: Vec<CallPayment>,
    judged: Vec<Judged>,
    failure: Option<Failure>,
}

/// A call that is waited for. If it is dropped, nothing more is signed for the call, and the evaluator is not blamed.
struct CallHandle {
    hired: Hired,
    is_wanted: Arc<AtomicBool>,
    has_ended: bool,
}

impl CallHandle {
    fn hire(&self, payments: Vec<CallPayment>, judged: Vec<Judged>, failure: Option<Failure>) -> Hire {
        let Hired { card, url, .. } = &self.hired;
        Hire { evaluator: card.pay_to(), name: card.card().name.clone(), url: url.clone(), payments, failure, judged }
    }
}

impl Drop for CallHandle {
    fn drop(&mut self) {
        if !self.has_ended {
            self.is_wanted.store(false, Ordering::Relaxed);
        }
    }
}

/// Starts a call and sends its answer to `answers`.
fn start_call(inner: &Arc<Inner>, hired: Hired, work: &Arc<Work>, answers: &mpsc::Sender<Answer>) -> CallHandle {
    let is_wanted = Arc::new(AtomicBool::new(true));
    let handle = CallHandle { hired: hired.clone(), is_wanted: is_wanted.clone(), has_ended: false };
    let (inner, work, answers) = (inner.clone(), work.clone(), answers.clone());
    let calls = inner.calls.clone();
    calls.send_modify(|calls| *calls += 1);
    tokio::spawn(async move {
        let answer = call(&inner, &hired, &work, &is_wanted).await;
        // The channel has room for all answers. The receiver may be gone.
        let _ = answers.try_send(answer);
        // Before the count falls, so that log files can be opened again once the student is idle.
        drop((inner, hired, work, is_wanted));
        calls.send_modify(|calls| *calls -= 1);
    });
    handle
}

/// Asks one evaluator, and records what became of it.
async fn call(inner: &Arc<Inner>, hired: &Hired, work: &Work, is_wanted: &Arc<AtomicBool>) -> Answer {
    let permit = inner.permits.acquire().await;
    let may_start = inner.state().start(hired.call);
    let mut parts = Vec::new();
    if may_start && is_wanted.load(Ordering::Relaxed) {
        parts = send_parts(inner, hired, &work.submission, is_wanted).await;
    }
    drop(permit);
    if is_wanted.load(Ordering::Relaxed) {
        explain_failures(inner, hired, &mut parts).await;
    } else {
        let is_unsigned = |part: &&mut Part| part.result.as_ref().is_err_and(|error| error.receipt().is_none());
        for part in parts.iter_mut().filter(is_unsigned) {
            part.explained = Some(Failure::NotPaid { detail: "the call was given up".to_owned() });
        }
    }
    let now = inner.clock.now();
    let skill = &*work.submission.task.skill;
    let ended = inner.state().end(hired, skill, &parts, work.good.as_deref(), now);
    let Ended { evidence, exploration_cost, failure, payments, judged, in_time } = ended;
    record(inner, evidence, exploration_cost, now);
    let mut verdicts = vec![None; work.submission.outputs().len()];
    for Part { range, result, .. } in parts {
        let Some(paid) = result.ok().filter(|_| in_time) else { continue };
        let evaluator_id = paid.evaluation.evaluator;
        for (slot, verdict) in verdicts[range].iter_mut().zip(Vec::from(paid.evaluation.verdicts)) {
            *slot = Some((evaluator_id.clone(), verdict));
        }
    }
    Answer { call: hired.call, verdicts, payments, judged, failure }
}

/// Writes evidence to the log. What the log refuses is known until the process ends.
fn record(inner: &Inner, evidence: Vec<Evidence>, exploration_cost: Usdc, now: u64) {
    for evidence in evidence {
        let mut recorded = inner.evidence.record(evidence.clone(), now);
        // A seller that lost its books charges the same part of the channel again. Only one record of it can be reported.
        if evidence.charge.is_some() && matches!(recorded, Err(EvidenceError::Duplicate)) {
            recorded = inner.evidence.record(Evidence { payment: None, charge: None, ..evidence }, now);
        }
        if let Err(error) = recorded {
            tracing::warn!(%error, "could not record evidence about an evaluator");
            inner.state().spending.counts.unrecorded += 1;
        }
    }
    if exploration_cost > Usdc::ZERO
        && let Err(error) = inner.evidence.record_exploration_cost(exploration_cost)
    {
        tracing::warn!(%error, "could not record the cost of an exploration");
    }
}

/// Sends all parts of a submission at once.
async fn send_parts(inner: &Inner, hired: &Hired, submission: &Submission, is_wanted: &Arc<AtomicBool>) -> Vec<Part> {
    let client = inner.client(hired.is_untrusted);
    let requests = split(submission, hired.max_outputs).into_iter().filter_map(|range| {
        // A part of a valid group is valid.
        let part = teaching::part(submission, range.clone(), hired.task_alias.clone())?;
        Some(async move {
            let result = client.evaluate_while(&hired.card, &part, is_wanted).await;
            Part { range, result, explained: None }
        })
    });
    join_all(requests).await
}

/// Splits a group into parts of at most `max_outputs`. Single outputs and pairs stay whole.
fn split(submission: &Submission, max_outputs: usize) -> Vec<Range<usize>> {
    let outputs = submission.outputs().len();
    let most = if matches!(submission.outputs, Outputs::Group(_)) { max_outputs.max(1) } else { outputs };
    // Parts of about one size: an evaluator that compares outputs can do nothing with a single one left over.
    let size = outputs.div_ceil(outputs.div_ceil(most).max(1)).max(1);
    (0..outputs).step_by(size).map(|start| start..(start + size).min(outputs)).collect()
}

/// Fetches the evaluator's card again if a failure may be due to changed terms, and explains the failures with it.
async fn explain_failures(inner: &Inner, hired: &Hired, parts: &mut [Part]) {
    if !parts.iter().any(Part::may_be_outdated_card) {
        return;
    }
    let card = current_card(inner, hired).await;
    for part in parts.iter_mut().filter(|part| part.may_be_outdated_card()) {
        let Err(error) = &part.result else { continue };
        part.explained = match (&card, Failure::of(error)) {
            (Some(card), _) if explains(card, &hired.card, error, part.range.len()) => Some(Failure::TermsChanged),
            (_, Failure::Declined { status, .. }) => Some(Failure::Unreachable { detail: format!("status {status}") }),
            _ => None,
        };
    }
}

/// Fetches the card that the evaluator shows now, unless that was done within the recheck interval.
async fn current_card(inner: &Inner, hired: &Hired) -> Option<Arc<VerifiedCard>> {
    let now = inner.clock.now();
    let evaluator = hired.card.pay_to();
    // It may have moved since it was hired.
    let is_there = |known: &&mut KnownEvaluator| known.url == hired.url;
    let is_due = inner.state().evaluators.find(evaluator).filter(is_there).is_some_and(|known| {
        let is_due = known.rechecked_at.is_none_or(|at| at.saturating_add(CARD_RECHECK_INTERVAL) <= now);
        if is_due {
            known.rechecked_at = Some(now);
        }
        is_due
    });
    if !is_due {
        return None;
    }
    let card = match inner.cards.fetch_and_pin(&hired.url, hired.is_untrusted).await {
        Ok(card) if card.pay_to() == evaluator => card,
        Err(CardError::PayeeChanged { .. } | CardError::BadSignature { .. } | CardError::Unsigned) => {
            if let Some(known) = inner.state().evaluators.find(evaluator).filter(is_there) {
                known.is_banned = true;
            }
            return None;
        }
        Ok(_) | Err(_) => return None,
    };
    let mut state = inner.state();
    let state = &mut *state;
    // The payee is known already, so there is room.
    let _ = state.evaluators.insert(&(hired.url.clone(), hired.is_untrusted), card.clone(), &state.skills);
    Some(card)
}

/// Returns `true` if the new card announces what the evaluator demanded, or that it has moved.
fn explains(new: &VerifiedCard, old: &VerifiedCard, error: &EvaluateError, outputs: usize) -> bool {
    match error {
        EvaluateError::PriceMismatch { demanded, .. } => {
            let price: Option<U256> = new.pricing().price_of(outputs).map(Into::into);
            price == Some(*demanded)
        }
        EvaluateError::PayeeMismatch { .. } => false,
        EvaluateError::TokenMismatch { network, asset } => {
            new.pricing().accepts.iter().any(|token| (token.network, token.asset) == (*network, *asset))
        }
        _ => new.endpoint() != old.endpoint(),
    }
}
