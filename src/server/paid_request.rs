//! A request that carries a payment, from its header to its response.

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
        Beginning, Common, Held, Limits, Presented, Refusal, Unread, Why,
        batch::{self, BatchHeld, BatchRequest, PrecheckedVoucher},
        detached,
        exact::{ExactHeld, ExactRequest, Presentation, PresentedPayment},
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
            let begun = Box::pin(begin_batch(&context, channels, payment, &mut request)).await;
            let body = request.body;
            Box::pin(go_on(context, begun, inner, parts, body)).await
        }
        _ => {
            let begun = begin_exact(&context, payment, &mut request).await;
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
    /// What its scheme has no say in. A refusal is answered, and counted, as one of its scheme.
    common: Result<Common, Refusal>,
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
    let fingerprint = |added| Fingerprint::of(parts, catalogue.seller(), catalogue.priced_by(), added);
    let read = context.config.seller.read(message.extensions.as_ref(), fingerprint);
    let common = read.map(|(echoed, common)| {
        context.echoed = echoed;
        common
    });
    Ok(Some(PaymentHeader { message, others, common, may_defer: !raw.is_v1() }))
}

/// Begins a request that is paid by one authorization: matches the payment to an offer and checks payee, amount, window and signature.
async fn begin_exact<B: Content>(
    context: &RequestContext,
    payment: PaymentHeader,
    request: &mut HttpRequest<'_, B>,
) -> Result<Beginning<ExactHeld>, Refusal> {
    let config = &context.config;
    let PaymentHeader { message, others, common, may_defer } = payment;
    let Common { identity, refusal } = common?;
    let header = PresentedPayment::new(message).or_accepting(others);
    // Where only vouchers are taken now, transfers that are on record are answered all the same.
    let offers = if config.settings.takes_exact { &*context.offers } else { &[] };
    let found = header.find_payment(&config.seller, offers, refusal).await;
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
    let (payer, sold_by) = (header.payer(), config.catalogue.sold_by(&context.offers));
    let presentation = Presentation { payer, identity, sold_by, may_defer };
    let paid = ExactRequest::new(config.seller.clone(), matched, presentation).await?;
    ExactHeld::begin(paid, request).await
}

/// Begins a request that is paid with a voucher.
async fn begin_batch<B: Content>(
    context: &RequestContext,
    channels: Channels,
    payment: PaymentHeader,
    request: &mut HttpRequest<'_, B>,
) -> Result<Beginning<BatchHeld>, Refusal> {
    let (config, common) = (&context.config, payment.common?);
    let offers = config.catalogue.voucher_offers(&context.offers);
    let prechecked = PrecheckedVoucher::read(&channels, &offers, &payment.message)?;
    BatchHeld::begin(BatchRequest::new(config.seller.clone(), channels, prechecked, common), request).await
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
