//! Quotes the price of a submission, and judges one that is paid for.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, request::Parts};
use http_body::Body;
use http_body_util::{BodyExt as _, Full};
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout};
use tower_x402::{
    Usdc,
    protocol::header_name,
    server::{AdmissionQueue, PriceError, Quote, VerifiedPayment},
};

use super::{
    Limits,
    lessons::Lessons,
    refusal::{internal, refusal},
    stats::{Counters, JudgingResult},
};
use crate::{
    Evaluation, EvaluatorId, LengthError, MAX_EVALUATION, Outputs, Pricing, Submission, Verdict,
    judge::{Judge, JudgeError},
    respond::{Refusal, json_response},
};

type Answer = Response<Full<Bytes>>;

/// What all requests share.
pub(super) struct Work {
    pub(super) judge: Arc<dyn Judge>,
    pub(super) identity: EvaluatorId,
    pub(super) pricing: Pricing,
    pub(super) skills: Vec<String>,
    pub(super) limits: Limits,
    /// Limits how many submissions are judged at once.
    pub(super) line: AdmissionQueue,
    pub(super) counters: Counters,
    /// `None` unless the card says that lessons are taken.
    pub(super) lessons: Option<Arc<Lessons>>,
}

impl Work {
    /// Returns the price of a request, or refuses it before it is paid. Without body and payment, it is the price of one output.
    pub(super) fn quote(&self, request: &Parts, body: &Bytes) -> Result<Quote, PriceError> {
        let names = [header_name::PAYMENT_SIGNATURE, header_name::X_PAYMENT];
        let is_paid = names.iter().any(|name| request.headers.contains_key(*name));
        if body.is_empty() && !is_paid {
            return Ok(Quote::Amount(self.pricing.price_per_output()));
        }
        if request.method != Method::POST {
            return Err(PriceError::new(StatusCode::METHOD_NOT_ALLOWED, "POST a submission".to_owned()));
        }
        let submission = self.read(body).map_err(|refusal| PriceError::new(refusal.status, refusal.detail))?;
        // The builder has checked that the price of as many outputs as there can be is an amount.
        Ok(Quote::Amount(self.pricing.price_of(submission.outputs().len()).unwrap_or(Usdc::MAX)))
    }

    /// Judges a submission that is paid for.
    pub(super) async fn serve<B: Body<Data = Bytes>>(&self, request: Request<B>) -> Result<Answer, Refusal> {
        if request.method() != Method::POST {
            return Err(Refusal::wrong_method("POST"));
        }
        let payer = request.extensions().get::<VerifiedPayment>().map(|payment| payment.payer);
        let broken = |_| Refusal::new(StatusCode::BAD_REQUEST, "body_broken", "the body broke off");
        let body = request.into_body().collect().await.map_err(broken)?;
        let submission = self.read(&body.to_bytes())?;
        let answer = self.judge(&submission).await?;
        if let (Some(lessons), Some(payer)) = (&self.lessons, payer) {
            lessons.remember(payer, &submission);
        }
        Ok(answer)
    }

    /// Reads a submission, and checks that this evaluator accepts it.
    fn read(&self, body: &[u8]) -> Result<Submission, Refusal> {
        let submission = Submission::from_json(body).map_err(|error| {
            let shape = r#"{"task": {"id": "t1", "skill": "…", "prompt": "…"}, "output": "…"}"#;
            Refusal::new(StatusCode::BAD_REQUEST, "invalid_submission", format!("{error}; send {shape}"))
        })?;
        let not_taken = |detail| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "not_taken", detail);
        if !self.skills.iter().any(|skill| *skill == *submission.task.skill) {
            let skills = self.skills.join(", ");
            return Err(not_taken(format!("task.skill: this evaluator has {skills}; ask another one")));
        }
        let (outputs, most) = (submission.outputs().len(), self.pricing.max_outputs);
        if outputs > most {
            return Err(not_taken(format!("{outputs} outputs, but this evaluator takes {most} at once")));
        }
        self.judge.accepts(&submission).map_err(refusal)?;
        Ok(submission)
    }

    async fn judge(&self, submission: &Submission) -> Result<Answer, Refusal> {
        let mut count = self.counters.submission(&submission.task.skill);
        let Some(_place) = self.line.enter().await else {
            count.result = JudgingResult::Busy;
            return Err(refusal(JudgeError::Busy { retry_after: Duration::from_secs(1) }));
        };
        self.counters.begin();
        let started = Instant::now();
        let verdicts = timeout(self.limits.time, self.judge.judge(submission)).await.map_err(|_| {
            count.result = JudgingResult::Late;
            let detail = "judging took longer than it may; nothing was charged";
            tracing::warn!("{detail}");
            Refusal::new(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", detail)
        })?;
        let took = started.elapsed();
        let verdicts: Vec<Verdict> = verdicts.map_err(|error| {
            count.result = match error {
                JudgeError::Rejected(_) => JudgingResult::Rejected,
                JudgeError::Busy { .. } => JudgingResult::Busy,
                JudgeError::Failed(_) => JudgingResult::Failed,
            };
            refusal(error)
        })?;
        // Students would refuse verdicts that do not fit, so they are not sold.
        let identity = self.identity().map_err(|error| {
            tracing::error!(%error, "the judge's version is too long; nothing was charged");
            internal()
        })?;
        let evaluation = Evaluation::new(identity, submission, verdicts).map_err(|error| {
            tracing::error!(%error, "the judge's verdicts do not fit the submission; nothing was charged");
            internal()
        })?;
        let response = answer(submission, &evaluation);
        let length = response.body().size_hint().lower();
        if length > MAX_EVALUATION as u64 {
            tracing::error!(length, "the judge's verdicts are longer than students accept; nothing was charged");
            return Err(internal());
        }
        count.result = JudgingResult::Judged { outputs: submission.outputs().len() as u64, took };
        Ok(response)
    }

    /// Returns the evaluator's id, with the version of what the judge has learned.
    fn identity(&self) -> Result<EvaluatorId, LengthError> {
        match self.judge.version() {
            Some(learned) => EvaluatorId::new(&*self.identity.id, format!("{}+{learned}", self.identity.version)),
            None => Ok(self.identity.clone()),
        }
    }
}

/// Returns the evaluation as JSON. That of a single output repeats the verdict's fields at the top level, for scripts.
fn answer(submission: &Submission, evaluation: &Evaluation) -> Answer {
    let is_single = matches!(submission.outputs, Outputs::Single(_));
    match (is_single, &*evaluation.verdicts) {
        (true, [verdict]) => {
            let parts = (serde_json::to_value(evaluation), serde_json::to_value(verdict));
            let (Ok(Value::Object(mut whole)), Ok(Value::Object(verdict))) = parts else {
                return internal().into_response();
            };
            whole.extend::<Map<String, Value>>(verdict);
            json_response(StatusCode::OK, &whole)
        }
        _ => json_response(StatusCode::OK, evaluation),
    }
}
