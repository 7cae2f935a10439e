//! The work on a leased payment: verify, admit, run the handler, keep the response, settle.

use std::{future::Future, time::Duration};

use alloy_primitives::{Address, B256, U256};
use bytes::Bytes;
use http::{Request, Response, request::Parts, response};
use http_body::Body;
use tokio::time::{Instant, timeout_at};
use tower::ServiceExt as _;
use tower_service::Service;
use tracing::Instrument as _;

use super::{
    answer::{self, Answer, Receipt, mark_paid},
    builder::Settings,
    lease::HeldLease,
    paid_request::PaidRequest,
    payment_header::{PAYMENT_SIGNATURE, X_PAYMENT},
    request_body::{LazyBody, RequestBody},
    response::{PaidBody, RecordingLedger, RecordingTarget, ResponseBody, Unfinished},
    settlement::Settler,
};
use crate::{
    ledger::{BodyDigest, FulfilmentStep, LedgerError, Record, Settlement},
    network::Network,
    protocol::{PaymentFlow, Version},
    telemetry::{self, RequestOutcome},
};

/// How often it is looked whether a payer's other payments are settled.
const ADMISSION_POLL: Duration = Duration::from_millis(20);
/// How often the balance of a payer is read again that pays others all the time.
const MAX_BALANCE_READS: u32 = 5;

/// The service that is paid for. A request is worked on in a task of its own.
pub(super) trait Handler<B, R>:
    Service<Request<RequestBody<B>>, Response = Response<R>, Error: Send + 'static, Future: Send + 'static> + Send + 'static
{
}

impl<S, B, R> Handler<B, R> for S where
    S: Service<Request<RequestBody<B>>, Response = Response<R>, Error: Send + 'static, Future: Send + 'static>
        + Send
        + 'static
{
}

/// The body of a request to it, or of its response.
pub(super) trait Content: Body<Data = Bytes> + Send + 'static {}

impl<B: Body<Data = Bytes> + Send + 'static> Content for B {}

/// The verified payment for a request, in the request's extensions.
///
/// ```
/// use tower_x402::server::VerifiedPayment;
///
/// fn payer_of<B>(request: &http::Request<B>) -> Option<alloy_primitives::Address> {
///     request.extensions().get::<VerifiedPayment>().map(|payment| payment.payer)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifiedPayment {
    /// The payer's address.
    pub payer: Address,
    /// The payee's address.
    pub pay_to: Address,
    /// The amount, in atomic units of the asset.
    pub amount: U256,
    /// The token's address.
    pub asset: Address,
    /// The chain.
    pub network: Network,
    /// The authorization's nonce: with network, asset and payer it identifies the payment. Of a payment with a voucher it is the digest of
    /// voucher and request.
    pub nonce: B256,
    /// The flow: whether the payment is settled before or after the work.
    pub flow: PaymentFlow,
    /// The transaction that paid, if the payment was settled before the work, or that filled the payment channel for this request.
    pub transaction: Option<B256>,
    /// The number of this attempt at the work, from 1.
    pub attempt: u32,
}

impl VerifiedPayment {
    fn of(record: &Record) -> Self {
        let offer = record.terms.offer();
        Self {
            payer: record.key.payer,
            pay_to: offer.pay_to,
            amount: offer.amount,
            asset: record.key.asset,
            network: record.key.network,
            nonce: record.key.nonce,
            flow: offer.flow,
            transaction: record.settlement.paid_by(),
            attempt: record.attempts,
        }
    }
}

/// Verifies, works and settles, in the order that the flow demands.
pub(super) async fn run<S: Handler<B, R>, B: Content, R: Content>(
    mut request: Box<PaidRequest>,
    mut lease: HeldLease,
    inner: S,
    parts: Parts,
    body: LazyBody<B>,
) -> Result<Response<ResponseBody<R>>, S::Error> {
    let config = request.context.config.clone();
    if let Err(answer) = before_work(&mut request, &mut lease).await {
        lease.give_back().await;
        return Ok(answer.into_response());
    }
    let until = request.lease_until(config.settings.clock.now());
    if let Err(error) = lease.step(FulfilmentStep::Start { until }).await {
        // Work that was not begun is not charged, whether the ledger takes the payment back or not.
        let answer = request.context.unrecorded(&error, lease.record(), true);
        lease.give_back().await;
        return Ok(answer.into_response());
    }
    let deadline = Instant::now() + config.settings.limits.handler_deadline;
    let (body, read) = body.into_hashed();
    let paid = Request::from_parts(paid_head(parts, VerifiedPayment::of(lease.record())), body);
    let limit = request.facilitator.ledger().response_limit();
    match run_handler(inner, paid, &config.settings, limit, deadline).await {
        // Whatever the handler made of a part of it, it is not what the payer asked for.
        Ok(_) if read.is_broken() => {
            lease.release(read.digest()).await;
            Ok(request.context.unfinished(Unfinished::BODY_BROKE_OFF, lease.record()).into_response())
        }
        Ok((parts, body)) => Ok(Box::pin(after_work(&mut request, &mut lease, read.digest(), parts, body)).await),
        Err(why) => {
            lease.release(read.digest()).await;
            let (context, record) = (&request.context, lease.record());
            // Charged only if the money moved before the work.
            why.answer(context.receipt(record), |why| context.unfinished(why, record), telemetry::request)
        }
    }
}

/// Why the handler's work is not charged for.
pub(super) enum NotCharged<R, E> {
    Unsuccessful(response::Parts, R),
    Unfinished(Unfinished),
    Failed(E),
}

impl<R, E> NotCharged<R, E> {
    /// Answers, with the receipt if there is one all the same. `count` is told how the request ended.
    pub(super) fn answer(
        self,
        receipt: Option<Receipt>,
        unfinished: impl FnOnce(Unfinished) -> Answer,
        count: fn(RequestOutcome),
    ) -> Result<Response<ResponseBody<R>>, E> {
        match self {
            Self::Unsuccessful(mut parts, body) => {
                count(RequestOutcome::Unsuccessful);
                if let Some(receipt) = receipt {
                    mark_paid(&mut parts, receipt);
                }
                Ok(Response::from_parts(parts, ResponseBody::inner(body)))
            }
            Self::Unfinished(why) => Ok(unfinished(why).with_receipt(receipt).into_counted(count)),
            Self::Failed(error) => {
                count(RequestOutcome::Failed);
                Err(error)
            }
        }
    }
}

/// Runs the handler until `deadline`. A body that fits into the ledger is part of the work: it is read to its end.
pub(super) async fn run_handler<S: Handler<B, R>, B: Content, R: Content>(
    inner: S,
    request: Request<RequestBody<B>>,
    settings: &Settings,
    response_limit: usize,
    deadline: Instant,
) -> Result<(response::Parts, PaidBody<R>), NotCharged<R, S::Error>> {
    let (parts, body) = match timeout_at(deadline, inner.oneshot(request)).await {
        Ok(Ok(response)) => response.into_parts(),
        Ok(Err(error)) => return Err(NotCharged::Failed(error)),
        Err(_elapsed) => return Err(NotCharged::Unfinished(Unfinished::TOO_SLOW)),
    };
    if !settings.is_success(&parts) {
        return Err(NotCharged::Unsuccessful(parts, body));
    }
    let body = PaidBody::read(&parts, body, response_limit, deadline).await.map_err(NotCharged::Unfinished)?;
    Ok((parts, body))
}

/// Runs work in a task of its own, so that neither a client that goes away nor a timeout above cancels it (invariant I5). Returns `None`
/// if it panicked.
pub(super) async fn detached<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    tokio::spawn(work.in_current_span()).await.ok()
}

/// Verifies and admits the payment and, where the flow wants it, settles it. The error is what the client is told.
async fn before_work(request: &mut PaidRequest, lease: &mut HeldLease) -> Result<(), Answer> {
    let is_new = lease.record().settlement == Settlement::None;
    if is_new && request.verified.is_none() {
        request.verify().await?;
    }
    // From here on it is work for a payer that has the money.
    request.take_permit()?;
    if lease.record().settlement.paid_by().is_some() {
        return Ok(());
    }
    let is_upfront = request.payment.terms().offer().flow == PaymentFlow::Upfront;
    if is_new {
        admit(request, lease, is_upfront).await?;
    }
    if is_upfront {
        Box::pin(settle(request, lease)).await?;
    }
    Ok(())
}

/// Counts the payment as in flight. Where it depends on what the payer's other payments are doing just now whether the balance covers
/// it, looks again, a while.
async fn admit(request: &mut PaidRequest, lease: &mut HeldLease, is_due: bool) -> Result<(), Answer> {
    let deadline = Instant::now() + request.context.config.settings.limits.settlement_margin;
    let mut balance_reads = 0;
    loop {
        match lease.admit(request.verified, is_due).await {
            Ok(()) => return Ok(()),
            Err(LedgerError::Stale) if balance_reads < MAX_BALANCE_READS => {
                balance_reads += 1;
                Box::pin(request.verify()).await?;
            }
            Err(LedgerError::BalancePending) if Instant::now() < deadline => tokio::time::sleep(ADMISSION_POLL).await,
            Err(LedgerError::InsufficientFunds | LedgerError::Stale | LedgerError::BalancePending) => {
                return Err(request.context.not_covered());
            }
            Err(error) => return Err(answer::ledger_failed(&error)),
        }
    }
}

/// Keeps the response of work that succeeded, settles the payment and lets the client have it.
async fn after_work<R: Content>(
    request: &mut PaidRequest,
    lease: &mut HeldLease,
    read: BodyDigest,
    mut parts: response::Parts,
    mut body: PaidBody<R>,
) -> Response<ResponseBody<R>> {
    let ledger = request.facilitator.ledger().clone();
    let now = request.context.config.settings.clock.now();
    let step = FulfilmentStep::Produce {
        body: Some(read),
        at: now,
        response: body.to_keep(&parts, &request.context.asked, now),
    };
    if let Err(error) = lease.step_after_work(ledger.as_ref(), step).await {
        let is_given_back = lease.give_back().await;
        return request.context.unrecorded(&error, lease.record(), is_given_back).into_response();
    }
    lease.disarm();
    let is_whole = body.is_whole();
    if !is_whole {
        let (ledger, held) = (ledger.clone(), lease.record().lease());
        let ledger = RecordingLedger::Payment(ledger, held);
        let target = RecordingTarget { ledger, in_progress: lease.take_in_progress(), now };
        body = body.record(&parts, &request.context.asked, target);
    }
    if lease.record().settlement.paid_by().is_none()
        && let Err(answer) = settle_or_defer(request, lease, is_whole).await
    {
        // The work is done and must not be done again: kept, in case the payment settles yet.
        drop(body);
        return answer.into_response();
    }
    telemetry::request(if lease.record().settlement.paid_by().is_some() {
        RequestOutcome::Paid
    } else {
        RequestOutcome::Deferred
    });
    if let Some(receipt) = request.context.receipt(lease.record()) {
        mark_paid(&mut parts, receipt);
    }
    // Copies of the payment are answered as soon as there is something to answer them with.
    drop(lease.take_in_progress());
    Response::from_parts(parts, body.deliver(ledger, lease.record().lease()))
}

async fn settle(request: &mut PaidRequest, lease: &mut HeldLease) -> Result<(), Answer> {
    let verified = request.verified.unwrap_or_default();
    Settler::of(request).settle(lease.record_mut(), &verified).await
}

async fn settle_or_defer(request: &mut PaidRequest, lease: &mut HeldLease, may_defer: bool) -> Result<(), Answer> {
    if may_defer && defer(request, lease).await? { Ok(()) } else { settle(request, lease).await }
}

/// Leaves the payment to the facilitator to settle later, if the seller trusts its payer that far. Returns `false` if it must be settled
/// now like any other. The error is what the client is told if the ledger does not say: what it deferred is charged, whatever is tried now.
async fn defer(request: &PaidRequest, lease: &mut HeldLease) -> Result<bool, Answer> {
    // A client of v1 could not be told where to ask for it.
    let Some(policy) = request.context.config.settings.deferred.filter(|_| request.context.version == Version::V2)
    else {
        return Ok(false);
    };
    let (step, key) = (FulfilmentStep::Defer { limit: policy.limit() }, request.key);
    match lease.step_after_work(request.facilitator.ledger().as_ref(), step).await {
        Ok(()) => {
            request.facilitator.settle_soon(&key);
            Ok(true)
        }
        Err(LedgerError::NoCredit) => Ok(false),
        Err(error) => {
            tracing::warn!(%error, payer = %key.payer, nonce = %key.nonce, "a payment was not deferred");
            if matches!(error, LedgerError::Backend(_)) {
                return Err(request.context.pending(lease.record(), None));
            }
            Ok(false)
        }
    }
}

/// Makes the head of the handler's request: with the payment in its extensions, and without the header that carried it.
pub(super) fn paid_head(mut parts: Parts, payment: VerifiedPayment) -> Parts {
    parts.extensions.insert(payment);
    // Bearer data until the payment is settled; a handler that logs its headers must not log it.
    parts.headers.remove(&PAYMENT_SIGNATURE);
    parts.headers.remove(&X_PAYMENT);
    parts
}
