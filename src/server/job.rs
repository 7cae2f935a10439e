//! The work that a payment buys, and its settlement.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, request::Parts, response};
use http_body::Body;
use tokio::time::Instant;
use tower::ServiceExt as _;
use tower_service::Service;

use super::{
    answer::{Answer, mark_paid},
    payment::Payment,
    produced::Produced,
    purchase::{Purchase, Start},
    record::Destination,
    request_body::{Read, RequestBody, digest_of},
    response_body::ResponseBody,
    sale::{self, Sale},
    settle::Settler,
    wait::Busy,
};
use crate::{
    facilitator::Verified,
    ledger::{BodyDigest, FulfilmentStep, Lease, Ledger, LedgerError, Record, Settlement},
    metrics::{self, Ended},
    protocol::{PaymentFlow, Version, header_name},
};

/// How often it is looked whether a payer's other payments are settled.
const ADMISSION_POLL: Duration = Duration::from_millis(20);
/// How often the balance of a payer is read again that pays others all the time.
const MAX_LOOKS: u32 = 5;

/// A paid request whose work may start.
pub(super) struct Job<S, B> {
    pub(super) purchase: Box<Purchase>,
    pub(super) start: Start,
    pub(super) parts: Parts,
    pub(super) work: Work<B>,
    pub(super) inner: S,
}

/// The request body of the work.
pub(super) enum Work<B> {
    Streaming(B),
    Whole(Bytes),
}

impl<B: Body<Data = Bytes>> Work<B> {
    /// What was read; empty if nothing was yet.
    pub(super) fn whole(&self) -> &Bytes {
        static NOTHING: Bytes = Bytes::new();
        match self {
            Self::Streaming(_) => &NOTHING,
            Self::Whole(bytes) => bytes,
        }
    }

    /// The body for work that nobody pays for.
    pub(super) fn unhashed(self) -> RequestBody<B> {
        match self {
            Self::Streaming(body) => RequestBody::untouched(body),
            Self::Whole(bytes) => RequestBody::whole(bytes),
        }
    }
}

impl<S, B, R> Job<S, B>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    /// Verifies, works, settles: in the order that the flow demands.
    pub(super) async fn run(self) -> Result<Response<ResponseBody<R>>, S::Error> {
        let Self { purchase, start: Start { lease, record, busy }, parts, work, inner } = self;
        let ledger = purchase.facilitator.ledger().clone();
        let mut held = Held { record, guard: Abandon { ledger: Some(ledger), lease } };
        let verified = match before_work(&purchase, &mut held).await {
            Ok(verified) => verified,
            Err(answer) => {
                held.give_back().await;
                return Ok(answer.into_response());
            }
        };
        let until = purchase.lease_until(purchase.sale.config.clock.now());
        if let Err(error) = held.step(FulfilmentStep::Start { until }).await {
            held.give_back().await;
            return Ok(sale::ledger_failed(&error).into_response());
        }
        let deadline = Instant::now() + purchase.sale.config.limits.handler_deadline;
        let (request, read) = paid_request(parts, work, Payment::of(&held.record));
        let (parts, body) = match tokio::time::timeout_at(deadline, inner.oneshot(request)).await {
            Ok(Ok(response)) => response.into_parts(),
            Ok(Err(error)) => {
                metrics::request(Ended::Failed);
                held.release(read.digest()).await;
                return Err(error);
            }
            Err(_elapsed) => {
                held.release(read.digest()).await;
                return Ok(sale::too_slow().into_response());
            }
        };
        if !(purchase.sale.config.is_success)(&parts) {
            metrics::request(Ended::Unsuccessful);
            held.release(read.digest()).await;
            return Ok(held.unsuccessful(parts, body, &purchase.sale));
        }
        // A body that can be kept is part of the work: it is there, and kept, before anybody pays for it.
        let work = match Produced::of(&parts, body, purchase.facilitator.ledger().response_limit(), deadline).await {
            Ok(work) => work,
            Err(answer) => {
                held.release(read.digest()).await;
                return Ok(answer.into_response());
            }
        };
        Ok(after_work(&purchase, &mut held, busy, read.digest(), parts, work, &verified).await)
    }
}

/// Verification and, where the flow wants it, settlement. The error is what the client is told.
async fn before_work(purchase: &Purchase, held: &mut Held) -> Result<Verified, Answer> {
    if held.record.settlement.paid_by().is_some() {
        return Ok(Verified::default());
    }
    let upfront = purchase.payment.terms().offer().flow == PaymentFlow::Upfront;
    let mut verified = Verified::default();
    if held.record.settlement == Settlement::None {
        verified = match purchase.verified {
            Some(verified) => verified,
            None => verify(purchase).await?,
        };
        admit(purchase, held, &mut verified, upfront).await?;
    }
    if upfront {
        Box::pin(Settler::of(purchase).settle(&mut held.record, &verified)).await?;
    }
    Ok(verified)
}

/// Counts the payment as in flight. Where that depends on what the payer's other payments are doing just now, looks again,
/// a while.
async fn admit(purchase: &Purchase, held: &mut Held, verified: &mut Verified, due: bool) -> Result<(), Answer> {
    let deadline = Instant::now() + purchase.sale.config.limits.settlement_margin;
    let mut looks = 0;
    loop {
        match held.step(FulfilmentStep::Admit { funds: verified.funds, due }).await {
            Ok(()) => return Ok(()),
            Err(LedgerError::Stale) if looks < MAX_LOOKS => {
                looks += 1;
                *verified = verify(purchase).await?;
            }
            Err(LedgerError::Undecided) if Instant::now() < deadline => tokio::time::sleep(ADMISSION_POLL).await,
            Err(LedgerError::Exposed | LedgerError::Stale | LedgerError::Undecided) => {
                return Err(purchase.sale.exposed());
            }
            Err(error) => return Err(sale::ledger_failed(&error)),
        }
    }
}

async fn verify(purchase: &Purchase) -> Result<Verified, Answer> {
    let verified = purchase.facilitator.as_ref().verify(&purchase.payment).await;
    verified.map_err(|error| purchase.sale.not_verified(&error))
}

/// The work succeeded: nothing but settlement stands between the response and the client.
#[expect(clippy::manual_async_fn, reason = "an async fn has room for its arguments twice")]
fn after_work<R>(
    purchase: &Purchase,
    held: &mut Held,
    busy: Busy,
    read: BodyDigest,
    mut parts: response::Parts,
    work: Produced<R>,
    verified: &Verified,
) -> impl Future<Output = Response<ResponseBody<R>>> + Send
where
    R: Body<Data = Bytes> + Send + 'static,
{
    async move {
        let now = purchase.sale.config.clock.now();
        let response = work.to_keep(&parts, now);
        if let Err(error) = held.step(FulfilmentStep::Produce { body: Some(read), at: now, response }).await {
            held.give_back().await;
            return sale::ledger_failed(&error).into_response();
        }
        held.guard.disarm();
        let ledger = purchase.facilitator.ledger();
        let delivery = work.deliver(&parts, Destination { ledger: ledger.clone(), lease: held.guard.lease, busy, now });
        if held.record.settlement.paid_by().is_none()
            && !(delivery.is_whole() && is_deferred(purchase, ledger, held).await)
            && let Err(answer) = Settler::of(purchase).settle(&mut held.record, verified).await
        {
            // The work is done and must not be done again: kept, in case the payment settles yet.
            drop(delivery);
            return answer.into_response();
        }
        metrics::request(if held.record.settlement.paid_by().is_some() { Ended::Paid } else { Ended::Deferred });
        if let Some(receipt) = purchase.sale.receipt(&held.record) {
            mark_paid(&mut parts, receipt);
        }
        Response::from_parts(parts, delivery.into_body())
    }
}

/// Leaves the payment to the facilitator to settle later, if the seller trusts its payer that far. If not, or if anything is in
/// the way, it is settled now like any other.
async fn is_deferred(purchase: &Purchase, ledger: &Arc<dyn Ledger>, held: &mut Held) -> bool {
    // A client of v1 could not be told where to ask for it.
    let Some(limit) = purchase.sale.config.credit.filter(|_| purchase.sale.version == Version::V2) else {
        return false;
    };
    let step = FulfilmentStep::Defer { limit };
    match ledger.fulfil(&held.guard.lease, &step).await {
        Ok(()) => {
            purchase.facilitator.settle_soon(&held.guard.lease.key);
            held.record.fulfil(&step).is_ok()
        }
        Err(LedgerError::NoCredit) => false,
        Err(error) => {
            let key = &held.guard.lease.key;
            tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a payment was not deferred");
            false
        }
    }
}

/// The record and the right to change it.
struct Held {
    record: Box<Record>,
    guard: Abandon,
}

impl Held {
    /// Takes a step in the ledger, then in the local copy.
    async fn step(&mut self, step: FulfilmentStep) -> Result<(), LedgerError> {
        let Some(ledger) = &self.guard.ledger else { return Err(LedgerError::LeaseLost) };
        ledger.fulfil(&self.guard.lease, &step).await?;
        Ok(self.record.fulfil(&step)?)
    }

    async fn release(&mut self, body: BodyDigest) {
        if let Err(error) = self.step(FulfilmentStep::Release { body: Some(body) }).await {
            let key = &self.guard.lease.key;
            tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a failed attempt was not released");
        }
        self.guard.disarm();
    }

    /// Leaves the payment as if it had not been presented, where that loses nothing.
    async fn give_back(&mut self) {
        if let Some(ledger) = self.guard.disarm()
            && let Err(error) = give_back(ledger.as_ref(), &self.guard.lease, &self.record).await
        {
            let key = &self.guard.lease.key;
            tracing::debug!(%error, payer = %key.payer, nonce = %key.nonce, "a reservation was not given back");
        }
    }

    /// A response that the classifier does not call a success: charged only if the money had moved before.
    fn unsuccessful<R>(&self, mut parts: response::Parts, body: R, sale: &Sale) -> Response<ResponseBody<R>> {
        if let Some(receipt) = sale.receipt(&self.record) {
            mark_paid(&mut parts, receipt);
        }
        Response::from_parts(parts, ResponseBody::inner(body))
    }
}

pub(super) async fn give_back(ledger: &dyn Ledger, lease: &Lease, record: &Record) -> Result<(), LedgerError> {
    if record.is_discardable() && record.last_failure.is_none() {
        match ledger.discard(lease).await {
            // The settlement wrote to the journal, although nothing came of it.
            Err(LedgerError::Forbidden(_)) => {}
            other => return other,
        }
    }
    ledger.fulfil(lease, &FulfilmentStep::Release { body: None }).await
}

/// Releases the payment if the handler panics, so that presenting it again is not refused until the lease ends.
struct Abandon {
    ledger: Option<Arc<dyn Ledger>>,
    lease: Lease,
}

impl Abandon {
    fn disarm(&mut self) -> Option<Arc<dyn Ledger>> {
        self.ledger.take()
    }
}

impl Drop for Abandon {
    fn drop(&mut self) {
        if let (Some(ledger), Ok(runtime)) = (self.ledger.take(), tokio::runtime::Handle::try_current()) {
            let lease = self.lease;
            runtime.spawn(async move {
                // A lease that was lost in the meantime is somebody else's to release.
                let _ = ledger.fulfil(&lease, &FulfilmentStep::Release { body: None }).await;
            });
        }
    }
}

/// What was or will have been read of the request body.
enum ReadSoFar {
    Streaming(Read),
    Whole(BodyDigest),
}

impl ReadSoFar {
    fn digest(&self) -> BodyDigest {
        match self {
            Self::Streaming(read) => read.digest(),
            Self::Whole(digest) => *digest,
        }
    }
}

fn paid_request<B: Body<Data = Bytes>>(
    mut parts: Parts,
    work: Work<B>,
    payment: Payment,
) -> (Request<RequestBody<B>>, ReadSoFar) {
    parts.extensions.insert(payment);
    // Bearer data until the payment is settled; a handler that logs its headers must not log it.
    parts.headers.remove(header_name::PAYMENT_SIGNATURE);
    parts.headers.remove(header_name::X_PAYMENT);
    let (body, read) = match work {
        Work::Streaming(body) => {
            let (body, read) = RequestBody::hashed(body);
            (body, ReadSoFar::Streaming(read))
        }
        Work::Whole(bytes) => {
            let digest = digest_of(&bytes);
            (RequestBody::whole(bytes), ReadSoFar::Whole(digest))
        }
    };
    (Request::from_parts(parts, body), read)
}
