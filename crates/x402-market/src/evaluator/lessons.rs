//! Takes lessons: one for each submission that was judged, from the payer that paid for it.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use alloy_primitives::{Address, B256, keccak256};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit};
use tower_x402::server::drain;

use super::refusal::refusal;
use crate::{
    Submission,
    judge::Judge,
    lesson::{self, Lesson},
    lock::lock,
    respond::{Refusal, json_response, receive},
};

/// How many judged submissions are remembered. Lessons about older ones are refused.
const MAX_JUDGED: usize = 100_000;
/// How many lessons are read and learned at once.
const MAX_LESSONS: usize = 64;
/// How long a lesson may take to arrive.
const BODY_DEADLINE: Duration = Duration::from_secs(10);
/// How much longer than a submission a lesson may be, in bytes.
const MARGIN: usize = 4 * 1024;

/// Which submissions were judged for whom, and whether a lesson about them was taken. It is in memory only, so what was judged before a
/// restart cannot be taught, and no lesson counts twice.
pub(super) struct Lessons {
    judge: Arc<dyn Judge>,
    pay_to: Address,
    /// In bytes.
    max_length: usize,
    judged: Mutex<Judged>,
    permits: Semaphore,
}

#[derive(Default)]
struct Judged {
    is_taught: HashMap<B256, bool>,
    order: VecDeque<B256>,
}

impl Lessons {
    pub(super) fn new(judge: Arc<dyn Judge>, pay_to: Address, max_submission: usize) -> Self {
        let (judged, permits) = (Mutex::default(), Semaphore::new(MAX_LESSONS));
        Self { judge, pay_to, max_length: max_submission + MARGIN, judged, permits }
    }

    /// Remembers that a submission was judged for this payer.
    pub(super) fn remember(&self, payer: Address, submission: &Submission) {
        let key = key(payer, submission);
        let mut judged = lock(&self.judged);
        if judged.is_taught.contains_key(&key) {
            return;
        }
        judged.is_taught.insert(key, false);
        judged.order.push_back(key);
        if judged.order.len() > MAX_JUDGED
            && let Some(oldest) = judged.order.pop_front()
        {
            judged.is_taught.remove(&oldest);
        }
    }

    /// Answers a lesson.
    pub(super) async fn serve<B: Body<Data = Bytes> + Send + 'static>(
        &self,
        request: Request<B>,
    ) -> Response<Full<Bytes>> {
        let (parts, body) = request.into_parts();
        let mut body = Box::pin(body);
        let learned = match self.read(&parts.method, &mut body).await {
            Ok((_permit, json)) => self.learn(&json).await,
            Err(refused) => {
                drain(Request::new(body));
                Err(refused)
            }
        };
        let answer = |()| json_response(StatusCode::OK, &json!({ "learned": true }));
        learned.map_or_else(Refusal::into_response, answer)
    }

    /// Reads a lesson, and returns it with the permit to learn it.
    async fn read<B: Body<Data = Bytes>>(
        &self,
        method: &Method,
        body: &mut Pin<Box<B>>,
    ) -> Result<(SemaphorePermit<'_>, Bytes), Refusal> {
        if *method != Method::POST {
            return Err(Refusal::wrong_method("POST"));
        }
        let busy = |_| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "too many lessons are being taken");
        let permit = self.permits.try_acquire().map_err(|full| busy(full).later(Duration::from_secs(2)))?;
        Ok((permit, receive(body, self.max_length, BODY_DEADLINE).await?))
    }

    async fn learn(&self, json: &[u8]) -> Result<(), Refusal> {
        let refused = |status, code, detail: &str| Err(Refusal::new(status, code, detail));
        let lesson = Lesson::from_json(json)
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, "invalid_lesson", error.to_string()))?;
        if lesson.evaluator != self.pay_to || !lesson.is_signed() {
            let detail = "a lesson is for this evaluator, and signed by the key that paid";
            return refused(StatusCode::FORBIDDEN, "not_signed", detail);
        }
        let key = key(lesson.payer, &lesson.submission);
        match lock(&self.judged).is_taught.get_mut(&key) {
            Some(is_taught) if !*is_taught => *is_taught = true,
            Some(_) => {
                return refused(StatusCode::CONFLICT, "already_taught", "there was a lesson about this submission");
            }
            None => {
                let detail = "no such submission was judged for this payer since the evaluator was started";
                return refused(StatusCode::NOT_FOUND, "not_judged", detail);
            }
        }
        let learned = self.judge.learn(&lesson).await;
        if learned.is_err()
            && let Some(is_taught) = lock(&self.judged).is_taught.get_mut(&key)
        {
            *is_taught = false;
        }
        learned.map_err(refusal)
    }
}

fn key(payer: Address, submission: &Submission) -> B256 {
    keccak256([payer.as_slice(), lesson::digest(submission).as_slice()].concat())
}
