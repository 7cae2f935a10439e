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
    purchase::Purchase,
    record::Destination,
    request_body::{Read, RequestBody, digest_of},
    response_body::ResponseBody,
    sale::{self, Sale, Unfinished},
    settle::Settler,
};
use crate::{
    ledger::{BodyDigest, Fulfilment, FulfilmentStep, Lease, Ledger, LedgerError, Record, Settlement},
    payment::Verified,
    protocol::{PaymentFlow, Version, header_name},
    telemetry::{self, RequestOutcome},
};

/// How often it is looked whether a payer's other payments are settled.
const ADMISSION_POLL: Duration = Duration::from_millis(20);
/// How often the balance of a payer is read again that pays others all the time.
const MAX_LOOKS: u32 = 5;
/// For how long a ledger that fails is asked to take a step after the work, the last try not included, and the first pause.
const INSISTENCE: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// A paid request whose work may start.
pub(super) struct Job<S, B> {
    pub(super) held: Held,
    pub(super) purchase: Box<Purchase>,
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
    #[expect(clippy::manual_async_fn, reason = "an async fn has room for its arguments twice")]
    pub(super) fn run(mut self) -> impl Future<Output = Result<Response<ResponseBody<R>>, S::Error>> {
        async move {
            if let Err(answer) = before_work(&mut self.purchase, &mut self.held).await {
                self.held.give_back().await;
                return Ok(answer.into_response());
            }
            let until = self.purchase.lease_until(self.purchase.sale.config.clock.now());
            if let Err(error) = self.held.step(FulfilmentStep::Start { until }).await {
                // Work that was not begun is not charged, whether the ledger takes the payment back or not.
                let answer = self.purchase.sale.unrecorded(&error, &self.held.record, true);
                self.held.give_back().await;
                return Ok(answer.into_response());
            }
            let deadline = Instant::now() + self.purchase.sale.config.limits.handler_deadline;
            let (request, read) = paid_request(self.parts, self.work, Payment::of(&self.held.record));
            let response = 'worked: {
                let failed = match tokio::time::timeout_at(deadline, self.inner.oneshot(request)).await {
                    Ok(Ok(response)) => break 'worked response,
                    Ok(Err(error)) => {
                        telemetry::request(RequestOutcome::Failed);
                        Err(error)
                    }
                    Err(_elapsed) => {
                        let answer = self.purchase.sale.unfinished(Unfinished::TooSlow, &self.held.record);
                        Ok(answer.into_response())
                    }
                };
                Box::pin(self.held.release(read.digest())).await;
                return failed;
            };
            let (parts, body) = response.into_parts();
            if !(self.purchase.sale.config.is_success)(&parts) {
                telemetry::request(RequestOutcome::Unsuccessful);
                Box::pin(self.held.release(read.digest())).await;
                return Ok(self.held.unsuccessful(parts, body, &self.purchase.sale));
            }
            // A body that can be kept is part of the work: it is there, and kept, before anybody pays for it.
            let limit = self.purchase.facilitator.ledger().response_limit();
            let work = match Produced::of(&parts, body, limit, deadline).await {
                Ok(work) => work,
                Err(why) => {
                    Box::pin(self.held.release(read.digest())).await;
                    return Ok(self.purchase.sale.unfinished(why, &self.held.record).into_response());
                }
            };
            // In a box of its own: the two halves of a paid request then fit into those that an allocator keeps at hand.
            Ok(Box::pin(after_work(&mut self.purchase, &mut self.held, read.digest(), parts, work)).await)
        }
    }
}

fn failed(error: LedgerError) -> Answer {
    sale::ledger_failed(&error)
}

/// Verification and, where the flow wants it, settlement. The error is what the client is told.
async fn before_work(purchase: &mut Purchase, held: &mut Held) -> Result<(), Answer> {
    if held.record.settlement.paid_by().is_some() {
        return Ok(());
    }
    let upfront = purchase.payment.terms().offer().flow == PaymentFlow::Upfront;
    if held.record.settlement == Settlement::None {
        if purchase.verified.is_none() {
            purchase.verify().await?;
        }
        admit(purchase, held, upfront).await?;
    }
    if upfront {
        Box::pin(settle(purchase, held)).await?;
    }
    Ok(())
}

/// Counts the payment as in flight.
async fn admit(purchase: &mut Purchase, held: &mut Held, due: bool) -> Result<(), Answer> {
    match held.admit(purchase.verified, due).await {
        Ok(()) => Ok(()),
        Err(error) => Box::pin(admit_later(purchase, held, due, error)).await,
    }
}

/// Where that depends on what the payer's other payments are doing just now, looks again, a while.
async fn admit_later(
    purchase: &mut Purchase,
    held: &mut Held,
    due: bool,
    mut error: LedgerError,
) -> Result<(), Answer> {
    let deadline = Instant::now() + purchase.sale.config.limits.settlement_margin;
    let mut looks = 0;
    loop {
        match error {
            LedgerError::Stale if looks < MAX_LOOKS => {
                looks += 1;
                purchase.verify().await?;
            }
            LedgerError::BalancePending if Instant::now() < deadline => tokio::time::sleep(ADMISSION_POLL).await,
            LedgerError::InsufficientFunds | LedgerError::Stale | LedgerError::BalancePending => {
                return Err(purchase.sale.exposed());
            }
            error => return Err(failed(error)),
        }
        error = match held.admit(purchase.verified, due).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
    }
}

impl Purchase {
    async fn verify(&mut self) -> Result<(), Answer> {
        let verified = self.facilitator.as_ref().verify(&self.payment).await;
        self.verified = Some(verified.map_err(|error| self.sale.not_verified(&error))?);
        Ok(())
    }
}

/// The work succeeded: nothing but settlement stands between the response and the client.
#[expect(clippy::manual_async_fn, reason = "an async fn has room for its arguments twice")]
fn after_work<R>(
    purchase: &mut Purchase,
    held: &mut Held,
    read: BodyDigest,
    mut parts: response::Parts,
    work: Produced<R>,
) -> impl Future<Output = Response<ResponseBody<R>>> + Send
where
    R: Body<Data = Bytes> + Send + 'static,
{
    async move {
        let now = purchase.sale.config.clock.now();
        let step = FulfilmentStep::Produce { body: Some(read), at: now, response: work.to_keep(&parts, now) };
        if let Err(error) = insist(purchase.facilitator.ledger().as_ref(), &mut held.record, step).await {
            let is_given_back = held.give_back().await;
            return purchase.sale.unrecorded(&error, &held.record, is_given_back).into_response();
        }
        held.disarm();
        let lease = held.record.lease();
        let delivery = work.deliver(&parts, || Destination {
            ledger: purchase.facilitator.ledger().clone(),
            lease,
            busy: purchase.busy.take(),
            now,
        });
        if held.record.settlement.paid_by().is_none()
            && let Err(answer) = settle_or_defer(purchase, held, delivery.is_whole()).await
        {
            // The work is done and must not be done again: kept, in case the payment settles yet.
            drop(delivery);
            return answer.into_response();
        }
        telemetry::request(if held.record.settlement.paid_by().is_some() {
            RequestOutcome::Paid
        } else {
            RequestOutcome::Deferred
        });
        if let Some(receipt) = purchase.sale.receipt(&held.record) {
            mark_paid(&mut parts, receipt);
        }
        // Copies of the payment are answered as soon as there is something to answer them with.
        purchase.busy = None;
        Response::from_parts(parts, delivery.into_body(purchase.facilitator.ledger(), held.record.lease()))
    }
}

async fn settle(purchase: &mut Purchase, held: &mut Held) -> Result<(), Answer> {
    let verified = purchase.verified.unwrap_or_default();
    Settler::of(purchase).settle(&mut held.record, &verified).await
}

async fn settle_or_defer(purchase: &mut Purchase, held: &mut Held, may_defer: bool) -> Result<(), Answer> {
    if may_defer && is_deferred(purchase, held).await? { Ok(()) } else { settle(purchase, held).await }
}

/// Leaves the payment to the facilitator to settle later, if the seller trusts its payer that far. If not, it is settled now like any
/// other. The error is what the client is told if the ledger does not say: what it deferred is charged, whatever is tried now.
async fn is_deferred(purchase: &Purchase, held: &mut Held) -> Result<bool, Answer> {
    // A client of v1 could not be told where to ask for it.
    let Some(limit) = purchase.sale.config.credit.filter(|_| purchase.sale.version == Version::V2) else {
        return Ok(false);
    };
    let (step, key) = (FulfilmentStep::Defer { limit }, held.record.key);
    match insist(purchase.facilitator.ledger().as_ref(), &mut held.record, step).await {
        Ok(()) => {
            purchase.facilitator.settle_soon(&key);
            Ok(true)
        }
        Err(LedgerError::NoCredit) => Ok(false),
        Err(error) => {
            tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a payment was not deferred");
            if matches!(error, LedgerError::Backend(_)) {
                return Err(purchase.sale.pending(&held.record, None));
            }
            Ok(false)
        }
    }
}

/// Takes a step after the work, in the ledger and in the local copy. If the ledger fails it is asked again for a while: what is done
/// must not be done again because of one call, nor be charged for after the client was told that it is not.
async fn insist(ledger: &dyn Ledger, record: &mut Record, step: FulfilmentStep) -> Result<(), LedgerError> {
    match ledger.fulfil(&record.lease(), &step).await {
        Err(LedgerError::Backend(error)) => {
            tracing::warn!(%error, "the ledger did not take a step");
            Box::pin(insist_again(ledger, &record.lease(), &step)).await?;
        }
        answer => answer?,
    }
    Ok(record.fulfil(&step)?)
}

async fn insist_again(ledger: &dyn Ledger, lease: &Lease, step: &FulfilmentStep) -> Result<(), LedgerError> {
    let until = Instant::now() + INSISTENCE;
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        pause *= 2;
        let mut error = match ledger.fulfil(lease, step).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        if !matches!(error, LedgerError::Backend(_)) {
            // It may have been taken before, and the answer was lost.
            match ledger.get(&lease.key).await {
                Ok(Some(record)) if record.epoch == lease.epoch && has_taken(&record, step) => return Ok(()),
                Ok(_) => return Err(error),
                Err(unknown) => error = unknown,
            }
        }
        if Instant::now() + pause > until {
            return Err(error);
        }
    }
}

fn has_taken(record: &Record, step: &FulfilmentStep) -> bool {
    match step {
        FulfilmentStep::Produce { .. } => matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered),
        FulfilmentStep::Defer { .. } => record.deferred,
        _ => false,
    }
}

/// The record, with the right to change it. Dropped before it is [disarmed](Self::disarm), as when the handler panics, it releases
/// the payment, so that presenting it again is not refused until the lease ends.
pub(super) struct Held {
    record: Box<Record>,
    ledger: Option<Arc<dyn Ledger>>,
}

impl Held {
    pub(super) fn new(record: Box<Record>, purchase: &Purchase) -> Self {
        Self { record, ledger: Some(purchase.facilitator.ledger().clone()) }
    }

    /// Takes a step in the ledger, then in the local copy.
    async fn step(&mut self, step: FulfilmentStep) -> Result<(), LedgerError> {
        let Some(ledger) = &self.ledger else { return Err(LedgerError::LeaseLost) };
        ledger.fulfil(&self.record.lease(), &step).await?;
        Ok(self.record.fulfil(&step)?)
    }

    async fn admit(&mut self, verified: Option<Verified>, due: bool) -> Result<(), LedgerError> {
        self.step(FulfilmentStep::Admit { funds: verified.and_then(|verified| verified.funds), due }).await
    }

    async fn release(&mut self, body: BodyDigest) {
        if let Err(error) = self.step(FulfilmentStep::Release { body: Some(body) }).await {
            let key = &self.record.key;
            tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a failed attempt was not released");
        }
        self.disarm();
    }

    /// Leaves the payment as if it had not been presented, where that loses nothing. Returns whether the ledger has it so.
    async fn give_back(&mut self) -> bool {
        let Some(ledger) = self.disarm() else { return false };
        let given_back = give_back(ledger.as_ref(), &self.record).await;
        if let Err(error) = &given_back {
            let key = &self.record.key;
            tracing::debug!(%error, payer = %key.payer, nonce = %key.nonce, "a reservation was not given back");
        }
        given_back.is_ok()
    }

    fn disarm(&mut self) -> Option<Arc<dyn Ledger>> {
        self.ledger.take()
    }

    /// A response that the classifier does not call a success: charged only if the money had moved before.
    fn unsuccessful<R>(&self, mut parts: response::Parts, body: R, sale: &Sale) -> Response<ResponseBody<R>> {
        if let Some(receipt) = sale.receipt(&self.record) {
            mark_paid(&mut parts, receipt);
        }
        Response::from_parts(parts, ResponseBody::inner(body))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let (Some(ledger), Ok(runtime)) = (self.ledger.take(), tokio::runtime::Handle::try_current()) {
            let lease = self.record.lease();
            runtime.spawn(async move {
                // A lease that was lost in the meantime is somebody else's to release.
                let _ = ledger.fulfil(&lease, &FulfilmentStep::Release { body: None }).await;
            });
        }
    }
}

pub(super) async fn give_back(ledger: &dyn Ledger, record: &Record) -> Result<(), LedgerError> {
    let lease = record.lease();
    if record.is_discardable() && record.last_failure.is_none() {
        match ledger.discard(&lease).await {
            // The settlement wrote to the journal, although nothing came of it.
            Err(LedgerError::InvalidTransition(_)) => {}
            other => return other,
        }
    }
    ledger.fulfil(&lease, &FulfilmentStep::Release { body: None }).await
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
