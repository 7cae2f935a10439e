//! Asks one evaluator, to the end, whether or not anybody still waits for it.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use alloy_primitives::U256;
use tokio::{sync::mpsc, task::JoinSet};
use tower_x402::Usdc;

use super::{
    Failure, Inner, Truth,
    desk::{Finished, Hired, Part},
    feedback::{CallPayment, Hire},
    roster::Entry,
};
use crate::{
    CardError, EvaluateError, EvaluatorId, Outputs, Submission, TaskId, Verdict, VerifiedCard, evidence::Evidence,
};

/// A submission, and what is known of it.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) submission: Submission,
    pub(super) truth: Option<Truth>,
}

/// What a call gave.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) ticket: u64,
    /// By output.
    pub(super) verdicts: Vec<Option<(EvaluatorId, Verdict)>>,
    pub(super) payments: Vec<CallPayment>,
    pub(super) failure: Option<Failure>,
}

/// A call that somebody waits for. Dropped, nobody does: what is not paid for by then will not be, and the evaluator is not to blame.
#[derive(Debug)]
pub(super) struct Waiting {
    ticket: u64,
    wanted: Arc<AtomicBool>,
    inner: Arc<Inner>,
    pub(super) hired: Hired,
    is_over: bool,
}

impl Waiting {
    pub(super) const fn ticket(&self) -> u64 {
        self.ticket
    }

    /// It has answered.
    pub(super) const fn over(&mut self) {
        self.is_over = true;
    }

    /// It took too long.
    pub(super) fn give_up(&mut self) {
        if !self.is_over {
            self.inner.desk().give_up(self.ticket, self.inner.clock.now());
        }
    }

    /// As it is told to the student.
    pub(super) fn hire(&self, payments: Vec<CallPayment>, failure: Option<Failure>) -> Hire {
        let Hired { card, url, .. } = &self.hired;
        Hire { evaluator: card.pay_to(), name: card.card().name.clone(), url: url.clone(), payments, failure }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_over {
            self.wanted.store(false, Ordering::Relaxed);
        }
    }
}

/// Starts a call. Its answer is sent to `answers`; it ends by itself, in bounded time, and keeps the books, wanted or not.
pub(super) fn start(
    inner: &Arc<Inner>,
    hired: Hired,
    work: &Arc<Work>,
    answers: Option<&mpsc::Sender<Answer>>,
) -> Waiting {
    let wanted = Arc::new(AtomicBool::new(true));
    let waiting = Waiting {
        ticket: hired.ticket,
        wanted: wanted.clone(),
        inner: inner.clone(),
        hired: hired.clone(),
        is_over: answers.is_none(),
    };
    let (inner, work, answers) = (inner.clone(), work.clone(), answers.cloned());
    let calls = inner.calls.clone();
    calls.send_modify(|calls| *calls += 1);
    tokio::spawn(async move {
        let answer = call(&inner, &hired, &work, &wanted).await;
        if let Some(answers) = answers {
            // Whoever waits has room for all answers; nobody may be left.
            let _ = answers.try_send(answer);
        }
        // Files are free for the next one as soon as nothing is under way.
        drop((inner, hired, work, wanted));
        calls.send_modify(|calls| *calls -= 1);
    });
    waiting
}

async fn call(inner: &Arc<Inner>, hired: &Hired, work: &Work, wanted: &Arc<AtomicBool>) -> Answer {
    let permit = inner.permits.acquire().await;
    let may_start = inner.desk().start(hired.ticket);
    let is_wanted = || wanted.load(Ordering::Relaxed);
    let mut parts = Vec::new();
    if may_start && is_wanted() {
        parts = ask(inner, hired, &work.submission, wanted).await;
    }
    drop(permit);
    if is_wanted() {
        explain(inner, hired, &mut parts).await;
    } else {
        let unsigned =
            parts.iter_mut().filter(|part| part.result.as_ref().is_err_and(|error| error.receipt().is_none()));
        let detail = "nobody waits for it any more";
        unsigned.for_each(|part| part.excuse = Some(Failure::NotPaid { detail: detail.to_owned() }));
    }
    let now = inner.clock.now();
    let name = &*work.submission.task.skill;
    let Finished { evidence, examination, failure, payments, in_time } =
        inner.desk().finish(hired, name, &parts, work.truth.as_ref(), now);
    record(inner, evidence, examination, now);
    let mut verdicts = vec![None; work.submission.outputs().len()];
    for Part { range, result, .. } in parts {
        let Some(bought) = result.ok().filter(|_| in_time) else { continue };
        let by = bought.evaluation.evaluator;
        for (slot, verdict) in verdicts[range].iter_mut().zip(Vec::from(bought.evaluation.verdicts)) {
            *slot = Some((by.clone(), verdict));
        }
    }
    Answer { ticket: hired.ticket, verdicts, payments, failure }
}

/// Writes down what happened. What cannot be written is known for as long as the process lives.
fn record(inner: &Inner, evidence: Vec<Evidence>, examination: Usdc, now: u64) {
    for evidence in evidence {
        if let Err(error) = inner.evidence.record(evidence, now) {
            tracing::warn!(%error, "what an evaluator did could not be recorded");
            inner.desk().ledger.unrecorded += 1;
        }
    }
    if examination > Usdc::ZERO
        && let Err(error) = inner.evidence.record_exploration_cost(examination)
    {
        tracing::warn!(%error, "what an examination has cost could not be recorded");
    }
}

/// Sends all parts at once.
async fn ask(inner: &Arc<Inner>, hired: &Hired, submission: &Submission, wanted: &Arc<AtomicBool>) -> Vec<Part> {
    let mut requests = JoinSet::new();
    for (range, mut submission) in split(submission, hired.most) {
        submission.task.id = TaskId::new(hired.alias.clone()).unwrap_or_default();
        let (inner, card, is_strange, wanted) = (inner.clone(), hired.card.clone(), hired.is_strange, wanted.clone());
        requests.spawn(async move {
            let result = inner.client(is_strange).evaluate_while(&card, &submission, &wanted).await;
            Part { range, result, excuse: None }
        });
    }
    let mut parts = requests.join_all().await;
    parts.sort_by_key(|part| part.range.start);
    parts
}

/// The submission in parts of at most so many outputs. Only groups are split.
fn split(submission: &Submission, most: usize) -> Vec<(Range<usize>, Submission)> {
    let Outputs::Group(group) = &submission.outputs else {
        return vec![(0..submission.outputs().len(), submission.clone())];
    };
    // Of one size: who compares outputs with each other can do nothing with one that is left over.
    let parts = group.len().div_ceil(most.max(1)).max(1);
    let most = group.len().div_ceil(parts).max(1);
    let part = |(number, outputs): (usize, &[_])| {
        let texts = outputs.iter().cloned().map(String::from);
        let start = number * most;
        // What fits into the whole fits into a part.
        let part = Submission::group(submission.task.clone(), texts).ok()?;
        Some((start..start + outputs.len(), part))
    };
    group.chunks(most).enumerate().filter_map(part).collect()
}

/// Looks whether failures are explained by a new card, which is known from then on.
async fn explain(inner: &Inner, hired: &Hired, parts: &mut [Part]) {
    if !parts.iter().any(Part::may_be_the_cards) {
        return;
    }
    let card = new_card(inner, hired).await;
    for part in parts.iter_mut().filter(|part| part.may_be_the_cards()) {
        let Err(error) = &part.result else { continue };
        part.excuse = match (&card, Failure::of(error)) {
            (Some(card), _) if is_explained(error, part.range.len(), &hired.card, card) => Some(Failure::TermsChanged),
            (_, Failure::Declined { status, .. }) => Some(Failure::Unreachable { detail: format!("status {status}") }),
            _ => None,
        };
    }
}

/// The card that it has now, if it was not asked for a moment ago.
async fn new_card(inner: &Inner, hired: &Hired) -> Option<Arc<VerifiedCard>> {
    let now = inner.clock.now();
    let evaluator = hired.card.pay_to();
    // It may have moved meanwhile.
    let is_there = |entry: &&mut Entry| entry.url == hired.url;
    let may_look = inner.desk().roster.find(evaluator).filter(is_there).is_some_and(|entry| {
        let may = entry.suspected.is_none_or(|at| at.saturating_add(inner.card_ttl) <= now);
        if may {
            entry.suspected = Some(now);
        }
        may
    });
    if !may_look {
        return None;
    }
    let card = match inner.card(&hired.url, hired.is_strange).await {
        Ok(card) if card.pay_to() == evaluator => card,
        Err(CardError::PayeeChanged { .. } | CardError::BadSignature { .. } | CardError::Unsigned) => {
            let mut desk = inner.desk();
            if let Some(entry) = desk.roster.find(evaluator).filter(is_there) {
                entry.banned = true;
            }
            return None;
        }
        Ok(_) | Err(_) => return None,
    };
    let mut desk = inner.desk();
    let desk = &mut *desk;
    // Its payee is the same, so there is room.
    let _ = desk.roster.enter((hired.url.clone(), hired.is_strange), card.clone(), &desk.skills, || now);
    Some(card)
}

/// Whether what was demanded for so many outputs, or that nobody was there, is what the new card says.
fn is_explained(error: &EvaluateError, outputs: usize, old: &VerifiedCard, new: &VerifiedCard) -> bool {
    match error {
        EvaluateError::PriceMismatch { asked, .. } => {
            let price: Option<U256> = new.pricing().price_of(outputs).map(Into::into);
            price == Some(*asked)
        }
        EvaluateError::PayeeMismatch { .. } => false,
        EvaluateError::TokenMismatch { network, asset } => {
            new.pricing().accepts.iter().any(|token| (token.network, token.asset) == (*network, *asset))
        }
        _ => new.endpoint() != old.endpoint(),
    }
}
