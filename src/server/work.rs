//! The work for a payment: runs the handler, charges for its response, and lets the client have it.

use bytes::Bytes;
use http::{Request, Response, request::Parts, response};
use http_body::Body;
use tokio::time::{Instant, timeout_at};
use tower::ServiceExt as _;
use tower_service::Service;

use super::{
    actual_price::{actual_price, take_overrides},
    answer::{Receipt, RequestContext, mark_paid},
    config::Settings,
    header_names::{PAYMENT_SIGNATURE, X_PAYMENT},
    request_body::{LazyBody, RequestBody, SoFarRead},
    response::{PaidBody, ResponseBody},
};
use crate::{
    charge::{Echoed, Held, Refusal, Unfinished, VerifiedPayment},
    ledger::BodyDigest,
    telemetry::RequestOutcome,
};

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

/// Runs the handler for a payment that is held. The payment is charged if the handler succeeds, and released otherwise.
pub(super) async fn run<H: Held, S: Handler<B, R>, B: Content, R: Content>(
    context: RequestContext,
    mut held: H,
    inner: S,
    parts: Parts,
    body: LazyBody<B>,
) -> Result<Response<ResponseBody<R>>, S::Error> {
    if let Err(refusal) = held.start().await {
        return Ok(context.refuse(refusal).into_response(H::COUNT));
    }
    let settings = &context.config.settings;
    let deadline = Instant::now() + settings.rules.limits.handler_deadline;
    let (body, read) = body.into_hashed();
    let paid = Request::from_parts(paid_head(parts, held.payment(), context.echoed.clone()), body);
    match run_handler(inner, paid, settings, held.response_limit(), deadline).await {
        Ok((parts, body)) => {
            let charged = Box::pin(charge(&context, held, read, parts, body, deadline)).await;
            Ok(charged.unwrap_or_else(|refusal| context.refuse(refusal).into_response(H::COUNT)))
        }
        Err(NotCharged::Unfinished(why)) => {
            let refusal = not_charged(&mut held, why, read.digest()).await;
            Ok(context.refuse(refusal).into_response(H::COUNT))
        }
        Err(NotCharged::Unsuccessful(mut parts, body)) => {
            (H::COUNT)(RequestOutcome::Unsuccessful);
            take_overrides(&mut parts);
            let receipt = held.release(read.digest()).await;
            if let Some(receipt) = receipt.and_then(|receipt| Receipt::of(&receipt)) {
                mark_paid(&mut parts, receipt);
            }
            Ok(Response::from_parts(parts, ResponseBody::inner(body)))
        }
        Err(NotCharged::Failed(error)) => {
            (H::COUNT)(RequestOutcome::Failed);
            held.release(read.digest()).await;
            Err(error)
        }
    }
}

/// Charges for the response of work that succeeded, and lets the client have it.
async fn charge<H: Held, R: Content>(
    context: &RequestContext,
    mut held: H,
    read: SoFarRead,
    mut parts: response::Parts,
    mut body: PaidBody<R>,
    deadline: Instant,
) -> Result<Response<ResponseBody<R>>, Refusal> {
    let amount = match actual_price(&mut parts, held.most()) {
        Ok(amount) => amount,
        Err(why) => {
            tracing::error!(why, "a handler asked for another price than it may; nothing was charged");
            return Err(not_charged(&mut held, Unfinished::Mispriced, read.digest()).await);
        }
    };
    let is_whole = body.is_whole();
    if !is_whole {
        body = body.record(&parts, &context.asked, held.recording());
        // A stream that fails before its first piece is work that came to nothing.
        if let Err(why) = body.begin(deadline).await {
            return Err(not_charged(&mut held, why, read.digest()).await);
        }
    }
    // A handler may read its request while its response streams, so this is looked at last.
    if read.is_broken() {
        // Whatever the handler made of a part of it, it is not what the payer asked for.
        return Err(not_charged(&mut held, Unfinished::RequestBrokeOff, read.digest()).await);
    }
    let response = body.to_keep(&parts, &context.asked, context.config.seller.now());
    if let Err(uncharged) = held.charge(amount, response, read.digest()).await {
        if uncharged.is_open {
            body.charged();
        }
        return Err(uncharged.refusal);
    }
    body.charged();
    // The work is done and must not be done again: if this fails, what streams is kept, in case the payment settles yet.
    held.settle(is_whole).await?;
    if let Some(receipt) = held.count(amount).and_then(|receipt| Receipt::of(&receipt)) {
        mark_paid(&mut parts, receipt);
    }
    Ok(Response::from_parts(parts, body.deliver(held.deliver())))
}

/// Releases the payment of work that came to nothing.
async fn not_charged<H: Held>(held: &mut H, why: Unfinished, read: BodyDigest) -> Refusal {
    let receipt = held.release(read).await;
    held.unfinished(why).with_receipt(receipt)
}

/// Why the handler's work is not charged for.
enum NotCharged<R, E> {
    Unsuccessful(response::Parts, R),
    Unfinished(Unfinished),
    Failed(E),
}

/// Runs the handler until `deadline`. A body that fits into the ledger is part of the work: it is read to its end.
async fn run_handler<S: Handler<B, R>, B: Content, R: Content>(
    inner: S,
    request: Request<RequestBody<B>>,
    settings: &Settings,
    response_limit: usize,
    deadline: Instant,
) -> Result<(response::Parts, PaidBody<R>), NotCharged<R, S::Error>> {
    let (parts, body) = match timeout_at(deadline, inner.oneshot(request)).await {
        Ok(Ok(response)) => response.into_parts(),
        Ok(Err(error)) => return Err(NotCharged::Failed(error)),
        Err(_elapsed) => return Err(NotCharged::Unfinished(Unfinished::TooSlow)),
    };
    if !settings.is_success(&parts) {
        return Err(NotCharged::Unsuccessful(parts, body));
    }
    let body = PaidBody::read(&parts, body, response_limit, deadline).await.map_err(NotCharged::Unfinished)?;
    Ok((parts, body))
}

/// Makes the head of the handler's request: with the payment and what its payer echoed in its extensions, and without the
/// header that carried it.
fn paid_head(mut parts: Parts, payment: VerifiedPayment, echoed: Echoed) -> Parts {
    parts.extensions.insert(payment);
    parts.extensions.insert(echoed);
    // Bearer data until the payment is settled; a handler that logs its headers must not log it.
    parts.headers.remove(&PAYMENT_SIGNATURE);
    parts.headers.remove(&X_PAYMENT);
    parts
}
