//! The life of a request that carries a payment, until its work may start.
//!
//! Of any number of copies of a payment one is let through to [`Job`]; the others wait for what becomes of it, and are
//! answered from the ledger or take over where it left off.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tower_service::Service;

use super::{
    answer::{Answer, mark_paid, settlement_of},
    body::read_whole,
    claim::Header,
    job::{Job, Work},
    presented::{self, Presented, is_same},
    request_body::RequestBody,
    response_body::ResponseBody,
    sale::{self, Sale},
    settle::{resolve, settle_due},
    wait::Busy,
};
use crate::{
    facilitator::{Authenticity, Facilitator, Prechecked, Verified},
    ledger::{Fingerprint, Fulfilment, Lease, PaymentKey, Record, Reservation, Settlement},
    protocol::PaymentFlow,
};

/// How often a payment that another process works on is looked at.
const POLL: Duration = Duration::from_millis(200);

/// Serves a request that carries a payment header.
pub(super) async fn serve<S, B, R>(
    sale: Sale,
    inner: S,
    request: Request<B>,
) -> Result<Response<ResponseBody<R>>, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    let (parts, body) = request.into_parts();
    let purchase = match Purchase::begin(sale, &parts).await {
        Ok(purchase) => purchase,
        Err(answer) => return Ok(answer.into_response()),
    };
    match purchase.decide(body).await {
        Ok(Decision::Work(start, work)) => {
            let job = Job { purchase, start, parts, work, inner };
            // Detached (invariant I5): neither a client that goes away nor a timeout above cancels paid work.
            match tokio::spawn(job.run()).await {
                Ok(response) => response,
                Err(_panicked) => Ok(sale::crashed().into_response()),
            }
        }
        Ok(Decision::Replay(response)) => Ok(response),
        Err(answer) => Ok(answer.into_response()),
    }
}

/// A payment that may be worked on, with the request it is presented for.
pub(super) struct Purchase {
    pub(super) sale: Sale,
    pub(super) facilitator: Arc<dyn Facilitator>,
    pub(super) payment: Prechecked,
    /// What the verifier said, where it had to be asked for the payment's authenticity.
    pub(super) verified: Option<Verified>,
    pub(super) key: PaymentKey,
    request: Fingerprint,
    pub(super) permit: Arc<OwnedSemaphorePermit>,
}

/// The right to work.
pub(super) struct Start {
    pub(super) lease: Lease,
    pub(super) record: Record,
    pub(super) busy: Busy,
}

enum Decision<B, R> {
    Work(Start, Work<B>),
    Replay(Response<ResponseBody<R>>),
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
    async fn begin(mut sale: Sale, parts: &Parts) -> Result<Self, Answer> {
        let header = match Header::of(&parts.headers, sale.config.catalogue.speaks_v1()) {
            Ok(Some(header)) => header,
            Ok(None) => return Err(sale.demand()),
            Err(refusal) => return Err(sale.refuse(&refusal)),
        };
        sale.version = header.version;
        let config = &sale.config;
        let Presented { payment, is_known, facilitator } =
            presented::read(config, &sale.offers, header).await.map_err(|refusal| sale.refuse(&refusal))?;
        let permit = config.permits.clone().try_acquire_owned().map_err(|_| sale::overloaded())?;
        let mut purchase = Self {
            key: payment.key(),
            request: Fingerprint::of(parts),
            payment,
            facilitator,
            verified: None,
            permit: Arc::new(permit),
            sale,
        };
        if !is_known && purchase.payment.authenticity() != Authenticity::Proven {
            purchase.authenticate().await?;
        }
        Ok(purchase)
    }

    /// Asks the chain whether a contract at the payer's address accepts the signature, before anything is reserved.
    async fn authenticate(&mut self) -> Result<(), Answer> {
        let record = self.facilitator.ledger().get(&self.key).await.map_err(|error| sale::ledger_failed(&error))?;
        if record.is_some_and(|record| is_same(&record, &self.payment)) {
            return Ok(());
        }
        let verified = self.facilitator.verify(&self.payment).await;
        self.verified = Some(verified.map_err(|error| self.sale.not_verified(&error))?);
        Ok(())
    }

    async fn decide<B, R>(&self, body: B) -> Result<Decision<B, R>, Answer>
    where
        B: Body<Data = Bytes>,
    {
        let config = &self.sale.config;
        let ledger = self.facilitator.ledger();
        let deadline = Instant::now() + config.limits.wait;
        let mut body = Unread::new(body, self);
        // Paid before the work, the body must be known before the money moves.
        if self.payment.terms().offer().flow == PaymentFlow::Upfront {
            body.whole().await?;
        }
        loop {
            let Some(busy) = config.in_progress.enter(self.key) else {
                if let Some(record) = ledger.get(&self.key).await.map_err(|error| sale::ledger_failed(&error))? {
                    self.compare(&record)?;
                    // Whoever waits must have the whole request, to compare it once there is an answer.
                    body.whole().await?;
                }
                self.wait_here(deadline).await?;
                continue;
            };
            let record = self.new_record();
            let record = match ledger.reserve(record.clone()).await.map_err(|error| sale::ledger_failed(&error))? {
                Reservation::New(lease) => return Ok(Decision::Work(Start { lease, record, busy }, body.into_work())),
                Reservation::Known(known) => *known,
            };
            self.compare(&record)?;
            body.whole().await?;
            let now = config.clock.now();
            match self.judge(&record, now) {
                Verdict::Wait => {
                    drop(busy);
                    wait_until(deadline, tokio::time::sleep(POLL)).await?;
                }
                Verdict::Replay => {
                    body.compare(&record)?;
                    if let Some(response) = self.replay(&record, now).await? {
                        return Ok(Decision::Replay(response));
                    }
                    drop(busy);
                    wait_until(deadline, tokio::time::sleep(POLL)).await?;
                }
                Verdict::Resume => {
                    body.compare(&record)?;
                    let until = self.lease_until(now);
                    let lease = ledger.take_over(&self.key, record.epoch, now, until).await;
                    if let Some(lease) = lease.map_err(|error| sale::ledger_failed(&error))? {
                        return Ok(Decision::Work(Start { lease, record, busy }, body.into_work()));
                    }
                }
                Verdict::SettleThenReplay => {
                    body.compare(&record)?;
                    settle_due(self, record, busy).await?;
                }
                Verdict::Reconcile => {
                    if !resolve(self.facilitator.as_ref(), &record).await {
                        return Err(self.sale.pending(&record, None));
                    }
                }
                Verdict::Exhausted => return Err(sale::exhausted(&record)),
                Verdict::Dead => {
                    let reason =
                        record.last_failure.clone().unwrap_or(crate::protocol::Reason::InvalidTransactionState);
                    return Err(self.sale.not_settled(&record, reason, "this payment can never be settled", None));
                }
            }
        }
    }

    fn judge(&self, record: &Record, now: u64) -> Verdict {
        use Fulfilment::{Delivered, Produced, Released, Reserved, Working};
        let attempts_left = record.attempts < self.sale.config.limits.attempts;
        match (record.fulfilment, record.settlement) {
            (_, Settlement::Dead) => Verdict::Dead,
            (Reserved | Working, _) if record.lease_until >= now => Verdict::Wait,
            (_, Settlement::Submitted | Settlement::Unknown) => Verdict::Reconcile,
            (Produced | Delivered, Settlement::Settled { .. } | Settlement::Final { .. }) => Verdict::Replay,
            (Produced | Delivered, _) => Verdict::SettleThenReplay,
            (Reserved | Working | Released, _) if attempts_left => Verdict::Resume,
            (Reserved | Working | Released, _) => Verdict::Exhausted,
        }
    }

    /// Refuses a payment that was first used for another request (invariant I7), or that differs from the one known.
    fn compare(&self, record: &Record) -> Result<(), Answer> {
        let same = record.signing_hash == self.payment.signing_hash() && record.request == self.request;
        if same { Ok(()) } else { Err(sale::other_request()) }
    }

    async fn wait_here(&self, deadline: Instant) -> Result<(), Answer> {
        let in_progress = &self.sale.config.in_progress;
        let Some(waiting) = in_progress.watch(&self.key) else { return Ok(()) };
        let mut woken = std::pin::pin!(waiting.notified());
        woken.as_mut().enable();
        // Whoever finished before this copy was listening will not wake it.
        if in_progress.watch(&self.key).is_none_or(|now| !Arc::ptr_eq(&now, &waiting)) {
            return Ok(());
        }
        wait_until(deadline, woken).await
    }

    /// The stored response; `None` while it is still streaming elsewhere. Without a secret in the request anybody who reads the chain could ask, so that then it is
    /// given a few times and for a short time only.
    async fn replay<R>(&self, record: &Record, now: u64) -> Result<Option<Response<ResponseBody<R>>>, Answer> {
        let limits = &self.sale.config.limits;
        let ledger = self.facilitator.ledger();
        let stored = ledger.response(&self.key).await.map_err(|error| sale::ledger_failed(&error))?;
        if stored.is_none() && record.fulfilment == Fulfilment::Produced && record.lease_until >= now {
            return Ok(None);
        }
        let replays = ledger.count_replay(&self.key).await.map_err(|error| sale::ledger_failed(&error))?;
        let names_caller = record.request.names_caller || record.body.is_some_and(|body| body.length > 0);
        let age = now.saturating_sub(record.produced_at.unwrap_or(0));
        if !names_caller && (replays > limits.anonymous_replays || age > limits.anonymous_replay_age.as_secs()) {
            return Err(sale::answered_before(record));
        }
        let (Some(stored), Some(transaction)) = (stored, record.settlement.paid_by()) else {
            return Err(sale::answered_before(record));
        };
        let mut response = Response::new(ResponseBody::replay(stored.body.clone(), stored.trailers.clone()));
        *response.status_mut() = stored.status;
        *response.headers_mut() = stored.headers.clone();
        let (mut parts, body) = response.into_parts();
        mark_paid(&mut parts, &settlement_of(record, Ok(transaction)), self.sale.version);
        Ok(Some(Response::from_parts(parts, body)))
    }

    fn new_record(&self) -> Record {
        let now = self.sale.config.clock.now();
        Record {
            key: self.key,
            terms: self.payment.terms().clone(),
            authorization: self.payment.authorization().clone(),
            signature: self.payment.signature().clone(),
            signing_hash: self.payment.signing_hash(),
            request: self.request,
            body: None,
            fulfilment: Fulfilment::Reserved,
            settlement: Settlement::None,
            last_failure: None,
            attempts: 0,
            replays: 0,
            block_seen: None,
            transactions: Vec::new(),
            admitted: false,
            epoch: 0,
            lease_until: self.lease_until(now),
            reserved_at: now,
            produced_at: None,
        }
    }

    /// Work, settlement on either side of it, and some slack.
    fn lease_until(&self, now: u64) -> u64 {
        let limits = &self.sale.config.limits;
        now + (limits.handler_deadline + 2 * limits.settlement_margin).as_secs() + 30
    }
}

async fn wait_until(deadline: Instant, event: impl Future<Output = ()>) -> Result<(), Answer> {
    if Instant::now() >= deadline {
        return Err(sale::in_progress());
    }
    tokio::time::timeout_at(deadline, event).await.map_err(|_| sale::in_progress())
}

/// A request body that is read only if it must be.
struct Unread<'a, B> {
    purchase: &'a Purchase,
    body: Option<B>,
    whole: Option<Bytes>,
}

impl<'a, B: Body<Data = Bytes>> Unread<'a, B> {
    fn new(body: B, purchase: &'a Purchase) -> Self {
        Self { purchase, body: Some(body), whole: None }
    }

    async fn whole(&mut self) -> Result<(), Answer> {
        if let Some(body) = self.body.take() {
            let limits = &self.purchase.sale.config.limits;
            let bytes = read_whole(body, limits.request_body, limits.body_deadline).await;
            self.whole = Some(bytes.map_err(|error| sale::unread(&error))?);
        }
        Ok(())
    }

    /// Refuses another body than the one first presented.
    fn compare(&self, record: &Record) -> Result<(), Answer> {
        let whole = self.whole.as_deref().unwrap_or_default();
        if record.body.is_none_or(|read| read.matches(whole)) { Ok(()) } else { Err(sale::other_request()) }
    }

    fn into_work(self) -> Work<B> {
        match (self.whole, self.body) {
            (Some(bytes), _) => Work::Whole(bytes),
            (None, Some(body)) => Work::Streaming(body),
            (None, None) => Work::Whole(Bytes::new()),
        }
    }
}
