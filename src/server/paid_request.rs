//! A request that carries a payment, from its header to its response.

use alloy_primitives::B256;
use http::{Response, request::Parts};
use tracing::{Instrument as _, field::Empty};

use super::{
    answer::{Answer, Receipt, RequestContext, replayed},
    kept_response::KeptResponse,
    payment_header::RawHeader,
    request_body::LazyBody,
    response::ResponseBody,
    work::{self, Content, Handler},
};
use crate::{
    channels::Channels,
    charge::{
        Beginning, Held, Limits, Presented, Refusal, Unread, Why,
        batch::{self, BatchHeld, BatchRequest, PrecheckedVoucher},
        detached,
        exact::{ExactHeld, ExactRequest, Presentation, PresentedPayment},
        extensions,
    },
    ledger::{BodyDigest, Fingerprint, StoredResponse},
    protocol::{PaymentPayload, PaymentRequirements, Reason, Verbatim},
    telemetry::RequestOutcome,
    upload::Arrived,
};

/// Serves a request that carries a payment header.
pub(super) async fn serve<S: Handler<B, R>, B: Content, R: Content>(
    context: RequestContext,
    inner: S,
    parts: Parts,
    body: LazyBody<B>,
) -> Result<Response<ResponseBody<R>>, S::Error> {
    // Its fields are recorded once they are known; `tower_x402::ops` documents them.
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
    let response = answer(context, inner, parts, body).instrument(span.clone()).await;
    if let Ok(response) = &response {
        span.record("status", response.status().as_u16());
    }
    response
}

async fn answer<S: Handler<B, R>, B: Content, R: Content>(
    mut context: RequestContext,
    inner: S,
    parts: Parts,
    body: LazyBody<B>,
) -> Result<Response<ResponseBody<R>>, S::Error> {
    let payment = match read_header(&mut context, &parts) {
        Ok(Some(read)) => read,
        Ok(None) => return Ok(context.payment_required().into_response(ExactHeld::COUNT)),
        Err(refusal) => return Ok(context.refuse(refusal).into_response(ExactHeld::COUNT)),
    };
    let limits = context.config.settings.rules.limits;
    let mut request = HttpRequest { context: &context, body, limits };
    match context.config.settings.channels.clone() {
        Some(channels) if batch::is_voucher(&payment.message) => {
            let begun = Box::pin(begin_batch(&context, channels, payment, &parts, &mut request)).await;
            let body = request.body;
            Box::pin(go_on(context, begun, inner, parts, body)).await
        }
        _ => {
            let begun = begin_exact(&context, payment, &parts, &mut request).await;
            let body = request.body;
            go_on(context, begun, inner, parts, body).await
        }
    }
}

/// A payment as a header has it.
struct PaymentHeader {
    message: PaymentPayload,
    /// Other offers that it may have accepted.
    others: Vec<Verbatim<PaymentRequirements>>,
    /// Identifies the request by what the payer returned of extensions, as it wrote that.
    written: Option<Fingerprint>,
    /// Whether its payer can be told where to ask what became of the payment.
    may_defer: bool,
}

/// Reads the payment header, whatever scheme it is of.
fn read_header(context: &mut RequestContext, parts: &Parts) -> Result<Option<PaymentHeader>, Refusal> {
    let catalogue = &context.config.catalogue;
    let in_v1 = catalogue.in_v1();
    let Some(raw) = RawHeader::of(&parts.headers, in_v1.is_some())? else { return Ok(None) };
    let (message, others) = match in_v1.filter(|_| raw.is_v1()) {
        Some(in_v1) => in_v1.read(raw, &context.offers)?,
        None => (raw.read()?, Vec::new()),
    };
    context.echoed = context.config.seller.declared.read(message.extensions.as_ref());
    let written = extensions::written(message.extensions.as_ref());
    let written = written.map(|written| context.fingerprint_with(parts, Some(written)));
    Ok(Some(PaymentHeader { message, others, written, may_defer: !raw.is_v1() }))
}

/// Begins a request that is paid by one authorization: matches the payment to an offer and checks payee, amount, window and signature.
async fn begin_exact<B: Content>(
    context: &RequestContext,
    payment: PaymentHeader,
    parts: &Parts,
    request: &mut HttpRequest<'_, B>,
) -> Result<Beginning<ExactHeld>, Refusal> {
    let config = &context.config;
    let PaymentHeader { message, others, written, may_defer } = payment;
    let header = PresentedPayment::new(message).or_accepting(others);
    let id = header.id(config.settings.rules.payment_identifier)?;
    // Where only vouchers are taken now, transfers that are on record are answered all the same.
    let offers = if config.settings.takes_exact { &*context.offers } else { &[] };
    let found = header.find_payment(&config.seller, offers).await;
    let mut matched = found.map_err(|refusal| match refusal.why() {
        Why::Rejected(_) if !config.settings.takes_exact => {
            let detail = "only vouchers of payment channels (batch-settlement) are taken here";
            Refusal::rejected(Reason::UnsupportedScheme, detail)
        }
        _ => refusal,
    })?;
    if matched.facilitator.uses_extensions() {
        let url = config.catalogue.public_url(&context.target);
        let echo = url.and_then(|url| header.echo(&url, &config.seller.declared));
        matched.payment = matched.payment.with_echoed(echo);
    }
    let (payer, fingerprint) = (header.payer(), context.fingerprint(parts));
    let sold_by = config.catalogue.sold_by(&context.offers);
    let presentation = Presentation { payer, fingerprint, written, sold_by, id, may_defer };
    let paid = ExactRequest::new(config.seller.clone(), matched, presentation).await?;
    ExactHeld::begin(paid, request).await
}

/// Begins a request that is paid with a voucher.
async fn begin_batch<B: Content>(
    context: &RequestContext,
    channels: Channels,
    payment: PaymentHeader,
    parts: &Parts,
    request: &mut HttpRequest<'_, B>,
) -> Result<Beginning<BatchHeld>, Refusal> {
    let config = &context.config;
    let asks_for_ids = config.settings.rules.payment_identifier;
    let (offers, declared) = (config.catalogue.voucher_offers(&context.offers), &config.seller.declared);
    let prechecked = PrecheckedVoucher::read(&channels, asks_for_ids, &offers, declared, &payment.message)?;
    let head = (context.fingerprint(parts), payment.written);
    BatchHeld::begin(BatchRequest::new(config.seller.clone(), channels, prechecked, head), request).await
}

/// Works, replays or refuses, whatever the scheme.
async fn go_on<H: Held, S: Handler<B, R>, B: Content, R: Content>(
    context: RequestContext,
    begun: Result<Beginning<H>, Refusal>,
    inner: S,
    parts: Parts,
    body: LazyBody<B>,
) -> Result<Response<ResponseBody<R>>, S::Error> {
    match begun {
        Ok(Beginning::Work(held)) => {
            let if_panicked = held.if_panicked();
            // Boxed, since it is passed on several times until it is a task.
            match detached(Box::pin(work::run(context, held, inner, parts, body))).await {
                Some(response) => response,
                None => Ok(Answer::of(if_panicked.await).into_response(H::COUNT)),
            }
        }
        Ok(Beginning::Replay(stored, receipt)) => Ok(match (KeptResponse::read(&stored), Receipt::of(&receipt)) {
            (Some(kept), Some(receipt)) => {
                (H::COUNT)(RequestOutcome::Replayed);
                replayed(kept, receipt)
            }
            _ => Answer::of(Refusal::new(Why::Used).with_receipt(Some(receipt))).into_response(H::COUNT),
        }),
        Ok(Beginning::Refunded(channel, receipt)) => {
            Ok(Answer::refunded(channel).with_receipt(Receipt::of(&receipt)).into_response(H::COUNT))
        }
        Err(refusal) => Ok(context.refuse(refusal).into_response(H::COUNT)),
    }
}

/// An HTTP request, as charging knows it.
struct HttpRequest<'a, B> {
    context: &'a RequestContext,
    body: LazyBody<B>,
    limits: Limits,
}

impl<B: Content> Presented for HttpRequest<'_, B> {
    fn held(&self) -> u64 {
        self.body.bytes().len() as u64
    }

    fn arrived(&mut self) -> Arrived {
        self.body.arrived()
    }

    fn is_arriving(&self) -> bool {
        self.body.is_arriving()
    }

    async fn read(&mut self) -> Result<(), Unread> {
        self.body.read(&self.limits).await
    }

    async fn read_whole(&mut self) -> Result<(), Unread> {
        self.body.read_whole(&self.limits).await
    }

    async fn is_same(&mut self, read: &BodyDigest) -> Result<bool, Unread> {
        self.body.is_same(read, &self.limits).await
    }

    fn digest(&self) -> Option<BodyDigest> {
        self.body.digest()
    }

    fn is_workable(&self) -> bool {
        self.body.is_workable()
    }

    fn misfit(&self, kept: &StoredResponse) -> Option<String> {
        KeptResponse::read(kept)?.misfit(&self.context.asked)
    }
}

impl RequestContext {
    /// Returns what identifies the head of the request, with what its payer added to the seller's extensions.
    fn fingerprint(&self, parts: &Parts) -> Fingerprint {
        self.fingerprint_with(parts, self.echoed.added())
    }

    fn fingerprint_with(&self, parts: &Parts, echoed: Option<B256>) -> Fingerprint {
        let catalogue = &self.config.catalogue;
        Fingerprint::of(parts, catalogue.seller(), catalogue.priced_by(), echoed)
    }
}
