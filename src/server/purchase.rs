//! The life of a request that carries a payment, until its work may start.
//!
//! Of any number of copies of a payment one is let through to [`Job`]; the others wait for what becomes of it, and are
//! answered from the ledger or take over where it left off.

use std::{future::Future, sync::Arc, time::Duration};

use alloy_primitives::B256;
use bytes::Bytes;
use http::{Request, Response, StatusCode, request::Parts};
use http_body::Body;
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tower_service::Service;
use tracing::{Instrument as _, field::Empty};

use super::{
    answer::{Answer, mark_paid},
    body::ReadError,
    crashed::Witness,
    job::{Held, Job, Work},
    lease::{Claimed, LeaseClaim},
    receipt::Receipt,
    request_body::RequestBody,
    response_body::ResponseBody,
    sale::{self, Sale},
    settle::{find_out, settle_due},
    unread::Unread,
    wait::{Busy, TooMany},
};
use crate::{
    facilitator::Facilitator,
    ledger::{BodyDigest, Fingerprint, Fulfilment, Record, Settlement, StoredResponse},
    payment::{PaymentKey, Prechecked, Rejection, Verified},
    protocol::{PaymentFlow, Reason},
    telemetry::{self, RequestOutcome},
};

/// How often a payment that another process works on is looked at.
const POLL: Duration = Duration::from_millis(200);

/// Serves a request that carries a payment header.
#[expect(clippy::manual_async_fn, reason = "an async fn has room for its arguments twice")]
pub(super) fn serve<S, B, R>(
    sale: Sale,
    inner: S,
    parts: Parts,
    work: Work<B>,
) -> impl Future<Output = Result<Response<ResponseBody<R>>, S::Error>> + Send
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    async move {
        // Filled in once what it says is known; `tower_x402::ops` documents it.
        let span = tracing::info_span!(
            "payment",
            network = Empty,
            asset = Empty,
            payer = Empty,
            nonce = Empty,
            amount = Empty,
            transaction = Empty,
            status = Empty
        );
        let response = 'sold: {
            let mut purchase = match Purchase::begin(sale, &parts, &span).instrument(span.clone()).await {
                Ok(purchase) => purchase,
                Err(answer) => break 'sold Ok(answer.into_response()),
            };
            match purchase.decide(&parts, work).instrument(span.clone()).await {
                Ok(Decision::Work(record, work)) => {
                    let witness = Witness::of(&purchase);
                    let job = Job { held: Held::new(record, &purchase), purchase, parts, work, inner };
                    // Detached (invariant I5): neither a client that goes away nor a timeout above cancels paid work.
                    match tokio::spawn(job.run().instrument(span.clone())).await {
                        Ok(response) => response,
                        Err(_panicked) => Ok(Box::pin(witness.crashed()).await.into_response()),
                    }
                }
                Ok(Decision::Replay(response)) => {
                    telemetry::request(RequestOutcome::Replayed);
                    Ok(*response)
                }
                Err(answer) => Ok(answer.into_response()),
            }
        };
        if let Ok(response) = &response
            && !span.is_disabled()
        {
            span.record("status", response.status().as_u16());
        }
        response
    }
}

/// A payment that may be worked on, with the request it is presented for.
pub(super) struct Purchase {
    pub(super) sale: Sale,
    pub(super) facilitator: Arc<dyn Facilitator>,
    pub(super) payment: Prechecked,
    /// Why it would be refused if it were new.
    pub(super) refusal: Option<Rejection>,
    /// What the verifier said, where it had to be asked for the payment's authenticity.
    pub(super) verified: Option<Verified>,
    pub(super) key: PaymentKey,
    pub(super) request: Fingerprint,
    /// The digest of what the payer calls it.
    pub(super) id: Option<B256>,
    /// Its place among those that are worked on; it has one when it is known not to be made up.
    pub(super) permit: Option<OwnedSemaphorePermit>,
    /// Copies of it wait until this is dropped; set when its work may start.
    pub(super) busy: Option<Busy>,
}

enum Decision<B, R> {
    /// It may, by the lease of the record.
    Work(Box<Record>, Work<B>),
    Replay(Box<Response<ResponseBody<R>>>),
}

/// What a payment that is known leads to.
enum Followed<R> {
    Work(Box<Record>),
    Replay(Box<Response<ResponseBody<R>>>),
    /// Things have changed; to be looked at again.
    Again,
}

/// Whether there is a response to replay.
enum Kept {
    Whole(Arc<StoredResponse>),
    /// It still streams elsewhere.
    NotYet,
    Gone,
}

/// What to do about a payment that is known.
enum Verdict {
    Wait,
    Replay,
    Resume,
    SettleThenReplay,
    Reconcile,
    Exhausted,
    Dead,
}

impl Purchase {
    /// Most payments are new, and one request has them. What else there may be is kept in boxes: it takes much room, which
    /// would be moved about with every payment.
    async fn decide<B, R>(&mut self, parts: &Parts, work: Work<B>) -> Result<Decision<B, R>, Answer>
    where
        B: Body<Data = Bytes>,
    {
        let config = self.sale.config.clone();
        let ledger = self.facilitator.ledger().clone();
        let mut deadline = Deadline(None);
        let mut body = Unread::new(work, config.clone());
        // Paid before the work, the body must be known before the money moves.
        if self.payment.terms().offer().flow == PaymentFlow::Upfront {
            deadline.by(config.limits.wait);
            Box::pin(body.whole()).await?;
        }
        loop {
            let Some(busy) = config.in_progress.enter(self.key) else {
                Box::pin(self.wait_for_copy(parts, &mut body, deadline.by(config.limits.wait))).await?;
                continue;
            };
            if self.refusal.is_none() {
                // Time has passed, for one that waited.
                self.refusal = self.payment.check_window(config.limits.window(), config.clock.now()).err();
            }
            let (busy, record) = if self.refusal.is_none() && body.is_workable() {
                let (busy, claimed) = LeaseClaim::first(&ledger, self.new_record(body.digest()), busy).await;
                match claimed.map_err(|error| sale::ledger_failed(&error))? {
                    Claimed::Granted(record) => {
                        self.busy = Some(busy);
                        return Ok(Decision::Work(record, body.into_work()));
                    }
                    Claimed::Known(known) => (busy, known),
                    Claimed::TooLate => continue,
                }
            } else {
                // Let in because it is known. If it is not any more, it is new, and must not be reserved under terms or
                // in a window that are not offered to this request, or for work that could not have its body.
                match (ledger.get(&self.key).await.map_err(|error| sale::ledger_failed(&error))?, &self.refusal) {
                    (Some(known), _) => (busy, Box::new(known)),
                    (None, Some(refusal)) => return Err(self.sale.reject(StatusCode::PAYMENT_REQUIRED, refusal)),
                    (None, None) => return Err(sale::unread(&ReadError::TooLarge)),
                }
            };
            let by = deadline.by(config.limits.wait);
            match Box::pin(self.follow(parts, record, busy, &mut body, by)).await? {
                Followed::Work(record) => return Ok(Decision::Work(record, body.into_work())),
                Followed::Replay(response) => return Ok(Decision::Replay(response)),
                Followed::Again => {}
            }
        }
    }

    /// Waits while another request in this process works on the payment.
    async fn wait_for_copy<B>(&self, parts: &Parts, body: &mut Unread<B>, deadline: Instant) -> Result<(), Answer>
    where
        B: Body<Data = Bytes>,
    {
        let config = &self.sale.config;
        let waiting = config.in_progress.join(&self.key, config.limits.copies());
        let Some(waiting) = waiting.map_err(|TooMany| sale::in_progress())? else { return Ok(()) };
        let known = self.facilitator.ledger().get(&self.key).await;
        if let Some(record) = known.map_err(|error| sale::ledger_failed(&error))? {
            self.compare(&record, parts)?;
            // It is compared once there is an answer; until then its client may send it.
            body.read().await?;
        }
        wait_until(deadline, waiting.ended()).await
    }

    /// Goes on with a payment that is known.
    async fn follow<B, R>(
        &mut self,
        parts: &Parts,
        record: Box<Record>,
        busy: Busy,
        body: &mut Unread<B>,
        deadline: Instant,
    ) -> Result<Followed<R>, Answer>
    where
        B: Body<Data = Bytes>,
    {
        self.compare(&record, parts)?;
        // Whatever offer it names now, it was accepted under the one in the record (invariant I6).
        self.payment = record.payment().with_echo(self.payment.echo().cloned());
        body.read().await?;
        let now = self.sale.config.clock.now();
        match self.judge(&record, now) {
            Verdict::Wait => {
                drop(busy);
                wait_until(deadline, tokio::time::sleep(POLL)).await?;
            }
            Verdict::Replay => {
                body.compare(&record).await?;
                if let Some(response) = self.replay(&record, now).await? {
                    return Ok(Followed::Replay(Box::new(response)));
                }
                drop(busy);
                wait_until(deadline, tokio::time::sleep(POLL)).await?;
            }
            Verdict::Resume => {
                body.compare(&record).await?;
                body.whole().await.map_err(|answer| answer.with_receipt(self.sale.receipt(&record)))?;
                // What is paid for is owed; anything else is begun on what is offered to this request now, and in time.
                if let Some(refusal) = self.refusal.as_ref().filter(|_| is_untouched(&record)) {
                    return Err(self.sale.reject(StatusCode::PAYMENT_REQUIRED, refusal));
                }
                let ledger = self.facilitator.ledger();
                let (busy, claimed) = LeaseClaim::again(ledger, record, now, self.lease_until(now), busy).await;
                if let Claimed::Granted(record) = claimed.map_err(|error| sale::ledger_failed(&error))? {
                    self.busy = Some(busy);
                    return Ok(Followed::Work(record));
                }
            }
            Verdict::SettleThenReplay => {
                body.compare(&record).await?;
                match self.kept(&record, now).await? {
                    Kept::Whole(response) => {
                        let is_unseen = is_unseen(&record);
                        let record = settle_due(self, record, busy).await?;
                        // Whoever pays for it gets it, whatever has become of what the ledger keeps.
                        if is_unseen && let Some(receipt) = self.sale.receipt(&record) {
                            return Ok(Followed::Replay(Box::new(replayed(&response, receipt))));
                        }
                    }
                    Kept::NotYet => {
                        drop(busy);
                        wait_until(deadline, tokio::time::sleep(POLL)).await?;
                    }
                    // It is owed for, and will be settled: its response left before.
                    Kept::Gone if record.deferred => return Err(self.sale.answered_before(&record)),
                    Kept::Gone => return Err(sale::not_kept()),
                }
            }
            Verdict::Reconcile => find_out(self, record, busy).await?,
            Verdict::Exhausted => {
                body.compare(&record).await?;
                return Err(self.sale.exhausted(&record));
            }
            Verdict::Dead => {
                let reason = record.last_failure.clone().unwrap_or(Reason::InvalidTransactionState);
                return Err(self.sale.not_settled(&record, reason, "this payment can never be settled", None));
            }
        }
        Ok(Followed::Again)
    }

    fn judge(&self, record: &Record, now: u64) -> Verdict {
        use Fulfilment::{Delivered, Produced, Released, Reserved, Working};
        let attempts_left = record.attempts < self.sale.config.limits.attempts;
        match (record.fulfilment, record.settlement) {
            (_, Settlement::Dead) => Verdict::Dead,
            // Answered on credit. If settling it was tried in vain, the payer may make up for it now.
            (Produced | Delivered, _) if record.deferred && record.last_failure.is_none() => Verdict::Replay,
            (Reserved | Working, _) if record.lease_until >= now => Verdict::Wait,
            (_, Settlement::Submitted | Settlement::Unknown) => Verdict::Reconcile,
            (Produced | Delivered, Settlement::Settled { .. } | Settlement::Final { .. }) => Verdict::Replay,
            (Produced | Delivered, _) => Verdict::SettleThenReplay,
            (Reserved | Working | Released, _) if attempts_left => Verdict::Resume,
            (Reserved | Working | Released, _) => Verdict::Exhausted,
        }
    }

    /// Refuses a payment that was first used for another request (invariant I7), or that differs from the one known. The id
    /// comes first: without it, nothing is learned of the request.
    fn compare(&self, record: &Record, parts: &Parts) -> Result<(), Answer> {
        // Who sends ids where nobody asks for them is not held to them, except to one that was accepted before.
        let same_id = record.id == self.id || (record.id.is_none() && !self.sale.config.asks_for_ids);
        if !same_id {
            return Err(sale::other_id());
        }
        let same =
            record.is_of(&self.payment) && (record.request == self.request || self.is_recorded_as(record, parts));
        if same { Ok(()) } else { Err(sale::other_request()) }
    }

    /// Returns `true` if the request is the one on record from before a change of fingerprints. Records age out, and this with them.
    fn is_recorded_as(&self, record: &Record, parts: &Parts) -> bool {
        let catalogue = &self.sale.config.catalogue;
        Fingerprint::uncounted(parts, catalogue.seller(), catalogue.priced_by()) == Some(record.request)
    }

    async fn kept(&self, record: &Record, now: u64) -> Result<Kept, Answer> {
        let stored = self.facilitator.ledger().response(&self.key).await;
        Ok(match stored.map_err(|error| sale::ledger_failed(&error))? {
            Some(response) => Kept::Whole(response),
            None if record.fulfilment == Fulfilment::Produced && record.lease_until >= now => Kept::NotYet,
            None => Kept::Gone,
        })
    }

    /// The stored response; `None` while it is still streaming elsewhere. Without a secret in the request anybody who reads
    /// the chain could ask, so that then it is given a few times and for a short time only.
    async fn replay<R>(&self, record: &Record, now: u64) -> Result<Option<Response<ResponseBody<R>>>, Answer> {
        let limits = &self.sale.config.limits;
        let ledger = self.facilitator.ledger();
        let stored = match self.kept(record, now).await? {
            Kept::Whole(response) => Some(response),
            Kept::NotYet => return Ok(None),
            Kept::Gone => None,
        };
        let replays = ledger.count_replay(&self.key).await.map_err(|error| sale::ledger_failed(&error))?;
        let has_secret = record.request.names_caller || record.id.is_some();
        let names_caller = has_secret || record.body.is_some_and(|body| body.length > 0);
        // Unless it was deferred, nobody has it before it is settled, however long that takes.
        let settled_at = record.settled_at.filter(|_| !record.deferred);
        let since = record.produced_at.max(settled_at).unwrap_or(0);
        let age = now.saturating_sub(since);
        if !names_caller && (replays > limits.anonymous_replays || age > limits.anonymous_replay_age.as_secs()) {
            return Err(self.sale.answered_before(record));
        }
        let (Some(stored), Some(receipt)) = (stored, self.sale.receipt(record)) else {
            return Err(self.sale.answered_before(record));
        };
        Ok(Some(replayed(&stored, receipt)))
    }

    fn new_record(&self, body: Option<BodyDigest>) -> Box<Record> {
        let now = self.sale.config.clock.now();
        let is_upfront = self.payment.terms().offer().flow == PaymentFlow::Upfront;
        Box::new(Record {
            body: body.filter(|_| is_upfront),
            id: self.id.filter(|_| self.sale.config.asks_for_ids),
            ..Record::new(&self.payment, self.request, now, self.lease_until(now))
        })
    }

    /// Work, settlement on either side of it, and some slack.
    pub(super) fn lease_until(&self, now: u64) -> u64 {
        let limits = &self.sale.config.limits;
        now + (limits.handler_deadline + 2 * limits.settlement_margin).as_secs() + 30
    }
}

/// Whether nothing was submitted for it: not to serve it costs the payer nothing.
fn is_untouched(record: &Record) -> bool {
    matches!(record.settlement, Settlement::None | Settlement::Due) && record.transactions.is_empty()
}

/// Whether nobody has its response: until it is settled for the first time, it is given to nobody without credit.
fn is_unseen(record: &Record) -> bool {
    record.fulfilment == Fulfilment::Produced && !record.deferred && record.settled_at.is_none()
}

/// The stored response, and how it was paid for.
fn replayed<R>(stored: &StoredResponse, receipt: Receipt) -> Response<ResponseBody<R>> {
    let mut response = Response::new(ResponseBody::replay(stored.body.clone(), stored.trailers.clone().map(Box::new)));
    *response.status_mut() = stored.status;
    *response.headers_mut() = stored.headers.clone();
    let (mut parts, body) = response.into_parts();
    mark_paid(&mut parts, receipt);
    Response::from_parts(parts, body)
}

/// Until when somebody waits, from when it first may have to: most payments wait for nobody, and need no clock for it.
struct Deadline(Option<Instant>);

impl Deadline {
    fn by(&mut self, wait: Duration) -> Instant {
        *self.0.get_or_insert_with(|| Instant::now() + wait)
    }
}

async fn wait_until(deadline: Instant, event: impl Future<Output = ()>) -> Result<(), Answer> {
    if Instant::now() >= deadline {
        return Err(sale::in_progress());
    }
    tokio::time::timeout_at(deadline, event).await.map_err(|_| sale::in_progress())
}
