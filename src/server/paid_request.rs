//! A request that carries a payment, from its header to its response.
//!
//! Of any number of copies of a payment one is leased and [worked for](work::run). The others wait for what becomes of it, and are
//! answered from the ledger or take over where it left off.

use std::{future::Future, sync::Arc, time::Duration};

use alloy_primitives::B256;
use http::{Response, StatusCode, request::Parts};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tracing::{
    Instrument as _, Span,
    field::{Empty, display},
};

use super::{
    answer::{self, Answer, RequestContext},
    lease::{FinishOnDrop, HeldLease, InProgress, Reserved, TooManyCopies},
    payment_header::{Matched, Message, PaymentHeader, RawHeader, is_same_payment},
    request_body::{LazyBody, ReadError},
    response::{ResponseBody, replayed},
    settlement, vouchers,
    work::{self, Content, Handler},
};
use crate::{
    facilitator::Facilitator,
    ledger::{BodyDigest, Fingerprint, Fulfilment, Record, Settlement, StoredResponse},
    payment::{Authenticity, PaymentKey, Prechecked, Rejection, Verified},
    protocol::{PaymentFlow, Reason, Version},
    telemetry::{self, RequestOutcome},
};

/// How often a payment that another process works on is looked at.
const POLL: Duration = Duration::from_millis(200);

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
    let response = answer(context, inner, parts, body, &span).instrument(span.clone()).await;
    if let Ok(response) = &response {
        span.record("status", response.status().as_u16());
    }
    response
}

async fn answer<S: Handler<B, R>, B: Content, R: Content>(
    mut context: RequestContext,
    inner: S,
    parts: Parts,
    mut body: LazyBody<B>,
    span: &Span,
) -> Result<Response<ResponseBody<R>>, S::Error> {
    let message = match read_header(&mut context, &parts) {
        Ok(message) => message,
        Err(answer) => return Ok(answer.into_response()),
    };
    let message = match (context.config.settings.channels.clone(), message) {
        (Some(channels), Message::V2(payment)) if vouchers::is_voucher(&payment) => {
            return Box::pin(vouchers::serve(channels, context, payment, inner, parts, body)).await;
        }
        (_, message) => message,
    };
    if !context.config.settings.takes_exact {
        return Ok(context.not_exact().into_response());
    }
    let mut request = match PaidRequest::read(context, message, &parts, span).await {
        Ok(request) => request,
        Err(answer) => return Ok(answer.into_response()),
    };
    match request.lease_or_replay(&mut body).await {
        Ok(Next::Work(lease)) => {
            let detached = Detached::of(&request);
            // Boxed, since it is passed on several times until it is a task.
            match detached.run(Box::pin(work::run(request, lease, inner, parts, body))).await {
                Ok(response) => response,
                Err(answer) => Ok(answer.into_response()),
            }
        }
        Ok(Next::Replay(response)) => {
            telemetry::request(RequestOutcome::Replayed);
            Ok(response)
        }
        Err(answer) => Ok(answer.into_response()),
    }
}

/// Reads the payment header, whatever scheme it is of.
fn read_header(context: &mut RequestContext, parts: &Parts) -> Result<Message, Answer> {
    let raw = RawHeader::of(&parts.headers, context.config.catalogue.speaks_v1());
    let Some(raw) = raw.map_err(|refusal| context.refuse(&refusal))? else {
        return Err(context.payment_required());
    };
    context.version = raw.version;
    Message::read(raw).map_err(|refusal| context.refuse(&refusal))
}

/// A payment that may be worked on, with the request that it is presented for.
pub(super) struct PaidRequest {
    pub(super) context: RequestContext,
    pub(super) facilitator: Arc<dyn Facilitator>,
    pub(super) payment: Prechecked,
    pub(super) key: PaymentKey,
    /// The verifier's result, once it was asked.
    pub(super) verified: Option<Verified>,
    /// Its permit among the payments that are worked on; it gets one once it is authenticated.
    pub(super) permit: Option<OwnedSemaphorePermit>,
    /// Why it would be refused if it were new.
    refusal: Option<Rejection>,
    fingerprint: Fingerprint,
    /// The digest of its payment identifier.
    id: Option<B256>,
}

/// How a request goes on.
enum Next<R> {
    Work(HeldLease),
    Replay(Response<ResponseBody<R>>),
}

/// What to do about a payment that is on record.
enum KnownPayment {
    Wait,
    Replay,
    Resume,
    SettleThenReplay,
    Reconcile,
    Exhausted,
    Dead,
}

/// Whether there is a response to replay.
enum Kept {
    Whole(Arc<StoredResponse>),
    /// It still streams elsewhere.
    NotYet,
    Gone,
}

impl PaidRequest {
    /// Reads a payment of `exact`, matches it to an offer and authenticates it. The error is what the client is told.
    ///
    /// Here and below, what most requests do not come to is boxed, so that it takes no room in the future of every request.
    async fn read(
        mut context: RequestContext,
        message: Message,
        parts: &Parts,
        span: &Span,
    ) -> Result<Box<Self>, Answer> {
        let config = context.config.clone();
        let header = PaymentHeader::exact(message);
        context.payer = header.payer();
        let id = header.id(config.settings.payment_identifier).map_err(|refusal| context.refuse(&refusal))?;
        let matched = header.find_payment(&config, &context.offers).await;
        let Matched { payment, refusal, facilitator } = matched.map_err(|refusal| context.refuse(&refusal))?;
        let catalogue = &config.catalogue;
        let payment = match facilitator.uses_extensions() {
            true => {
                let url = catalogue.public_url(&context.target);
                payment.with_echoed(url.and_then(|url| header.echo(&url, catalogue.extensions())))
            }
            false => payment,
        };
        let mut request = Box::new(Self {
            key: payment.key(),
            fingerprint: Fingerprint::of(parts, catalogue.seller(), catalogue.priced_by()),
            id,
            payment,
            refusal,
            facilitator,
            verified: None,
            permit: None,
            context,
        });
        request.describe(span);
        if request.refusal.is_none() && request.payment.authenticity() != Authenticity::Proven {
            request.verified = Box::pin(request.authenticate()).await?;
        }
        let permit = config.permits.clone().try_acquire_owned().map_err(|_| answer::overloaded())?;
        request.permit = Some(permit);
        Ok(request)
    }

    /// Records in the span which payment this is.
    fn describe(&self, span: &Span) {
        if span.is_disabled() {
            return;
        }
        let PaymentKey { network, asset, payer, nonce } = self.key;
        span.record("network", display(network)).record("asset", display(asset));
        span.record("payer", display(payer)).record("nonce", display(nonce));
        span.record("amount", display(self.payment.authorization().value));
    }

    /// Asks the chain whether a contract at the payer's address accepts the signature, before anything is reserved and before
    /// the payment takes a permit: anybody can make such payments up.
    async fn authenticate(&self) -> Result<Option<Verified>, Answer> {
        let record = self.facilitator.ledger().get(&self.key).await.map_err(|error| answer::ledger_failed(&error))?;
        if record.is_some_and(|record| is_same_payment(&record, &self.payment)) {
            return Ok(None);
        }
        let _permit = self.context.config.unproven.enter().await.ok_or_else(answer::overloaded)?;
        let verified = self.facilitator.as_ref().verify(&self.payment).await;
        verified.map(Some).map_err(|error| self.context.not_verified(&error))
    }

    /// Verifies the payment with the facilitator.
    pub(super) async fn verify(&mut self) -> Result<(), Answer> {
        let verified = self.facilitator.as_ref().verify(&self.payment).await;
        self.verified = Some(verified.map_err(|error| self.context.not_verified(&error))?);
        Ok(())
    }

    /// Leases the payment for work, or finds the response to it, after whatever there is to wait for.
    async fn lease_or_replay<B: Content, R>(&mut self, body: &mut LazyBody<B>) -> Result<Next<R>, Answer> {
        let config = self.context.config.clone();
        let ledger = self.facilitator.ledger().clone();
        let deadline = Instant::now() + config.settings.limits.wait;
        // Paid before the work, the body must be known before the money moves.
        if self.payment.terms().offer().flow == PaymentFlow::Upfront {
            Box::pin(body.read_whole(&config.settings.limits)).await?;
        }
        loop {
            let Some(in_progress) = config.in_progress.enter(self.key) else {
                Box::pin(self.wait_for_copy(body, deadline)).await?;
                continue;
            };
            if self.refusal.is_none() {
                // Time has passed, for one that waited.
                self.refusal =
                    self.payment.check_window(config.settings.limits.window(), config.settings.clock.now()).err();
            }
            let (in_progress, record) = if self.refusal.is_none() && body.is_workable() {
                match self.reserve(body.digest(), in_progress).await? {
                    Reserved::New(lease) => return Ok(Next::Work(lease)),
                    Reserved::Known(in_progress, known) => (in_progress, known),
                }
            } else {
                // Let in because it is known. If it is not any more, it is new, and must not be reserved under terms or
                // in a window that are not offered to this request, or for work that could not have its body.
                match (ledger.get(&self.key).await.map_err(|error| answer::ledger_failed(&error))?, &self.refusal) {
                    (Some(known), _) => (in_progress, Box::new(known)),
                    (None, Some(refusal)) => return Err(self.context.reject(StatusCode::PAYMENT_REQUIRED, refusal)),
                    (None, None) => return Err(answer::unread(&ReadError::TooLarge)),
                }
            };
            if let Some(next) = Box::pin(self.go_on(record, in_progress, body, deadline)).await? {
                return Ok(next);
            }
        }
    }

    /// Waits while another request in this process works on the payment.
    async fn wait_for_copy<B: Content>(&self, body: &mut LazyBody<B>, deadline: Instant) -> Result<(), Answer> {
        let config = &self.context.config;
        let waiting = config.in_progress.join(&self.key, config.settings.limits.copies());
        let Some(waiting) = waiting.map_err(|TooManyCopies| answer::in_progress())? else { return Ok(()) };
        let known = self.facilitator.ledger().get(&self.key).await;
        if let Some(record) = known.map_err(|error| answer::ledger_failed(&error))? {
            self.check_same_request(&record)?;
            // It is compared once there is an answer; until then its client may send it.
            body.read(&config.settings.limits).await?;
        }
        wait_until(deadline, waiting.ended()).await
    }

    /// Reserves the payment. A client that goes away meanwhile leaves nothing behind: the lease is then given back.
    async fn reserve(&self, body: Option<BodyDigest>, in_progress: InProgress) -> Result<Reserved, Answer> {
        let config = &self.context.config;
        let now = config.settings.clock.now();
        let is_upfront = self.payment.terms().offer().flow == PaymentFlow::Upfront;
        let record = Box::new(Record {
            body: body.filter(|_| is_upfront),
            id: self.id.filter(|_| config.settings.payment_identifier),
            ..Record::new(&self.payment, self.fingerprint, now, self.lease_until(now))
        });
        let reserving = HeldLease::reserve(self.facilitator.ledger().clone(), record, in_progress);
        FinishOnDrop::new(reserving).await.map_err(|error| answer::ledger_failed(&error))
    }

    /// Goes on with a payment that is known. Returns `None` if it must be looked at again.
    async fn go_on<B: Content, R>(
        &mut self,
        record: Box<Record>,
        in_progress: InProgress,
        body: &mut LazyBody<B>,
        deadline: Instant,
    ) -> Result<Option<Next<R>>, Answer> {
        self.check_same_request(&record)?;
        // Whatever offer it names now, it was accepted under the one in the record (invariant I6).
        self.payment = record.payment().with_echoed(self.payment.echoed().cloned());
        let config = self.context.config.clone();
        let limits = &config.settings.limits;
        body.read(limits).await?;
        let now = config.settings.clock.now();
        match self.state_of(&record, now) {
            KnownPayment::Wait => {
                drop(in_progress);
                wait_until(deadline, tokio::time::sleep(POLL)).await?;
            }
            KnownPayment::Replay => {
                body.check_same(&record, limits).await?;
                if let Some(response) = self.replay(&record, now).await? {
                    return Ok(Some(Next::Replay(response)));
                }
                drop(in_progress);
                wait_until(deadline, tokio::time::sleep(POLL)).await?;
            }
            KnownPayment::Resume => {
                body.check_same(&record, limits).await?;
                let read = body.read_whole(limits).await;
                read.map_err(|answer| answer.with_receipt(self.context.receipt(&record)))?;
                // A settled payment is owed its work; any other is begun only under terms that are offered now, and in time.
                if let Some(refusal) = self.refusal.as_ref().filter(|_| is_untouched(&record)) {
                    return Err(self.context.reject(StatusCode::PAYMENT_REQUIRED, refusal));
                }
                let ledger = self.facilitator.ledger().clone();
                let taking_over = HeldLease::take_over(ledger, record, now, self.lease_until(now), in_progress);
                let lease = FinishOnDrop::new(taking_over).await;
                return Ok(lease.map_err(|error| answer::ledger_failed(&error))?.map(Next::Work));
            }
            KnownPayment::SettleThenReplay => {
                body.check_same(&record, limits).await?;
                match self.kept(&record, now).await? {
                    Kept::Whole(response) => {
                        let is_unseen = is_unseen(&record);
                        let record = settlement::settle_due(self, record, in_progress).await?;
                        // The payer gets it, even if the ledger has dropped its copy meanwhile.
                        if is_unseen && let Some(receipt) = self.context.receipt(&record) {
                            return Ok(Some(Next::Replay(replayed(&response, receipt))));
                        }
                    }
                    Kept::NotYet => {
                        drop(in_progress);
                        wait_until(deadline, tokio::time::sleep(POLL)).await?;
                    }
                    // It is owed for, and will be settled: its response left before.
                    Kept::Gone if record.deferred => return Err(self.context.answered_before(&record)),
                    Kept::Gone => return Err(answer::not_kept()),
                }
            }
            KnownPayment::Reconcile => settlement::reconcile(self, record, in_progress).await?,
            KnownPayment::Exhausted => {
                body.check_same(&record, limits).await?;
                return Err(self.context.exhausted(&record));
            }
            KnownPayment::Dead => {
                let reason = record.last_failure.clone().unwrap_or(Reason::InvalidTransactionState);
                return Err(self.context.not_settled(&record, reason, "this payment can never be settled", None));
            }
        }
        Ok(None)
    }

    fn state_of(&self, record: &Record, now: u64) -> KnownPayment {
        use Fulfilment::{Delivered, Produced, Released, Reserved, Working};
        let has_attempts_left = record.attempts < self.context.config.settings.limits.attempts;
        match (record.fulfilment, record.settlement) {
            (_, Settlement::Dead) => KnownPayment::Dead,
            // Answered on credit. If settling it was tried in vain, the payer may make up for it now.
            (Produced | Delivered, _) if record.deferred && record.last_failure.is_none() => KnownPayment::Replay,
            (Reserved | Working, _) if record.lease_until >= now => KnownPayment::Wait,
            (_, Settlement::Submitted | Settlement::Unknown) => KnownPayment::Reconcile,
            (Produced | Delivered, Settlement::Settled { .. } | Settlement::Final { .. }) => KnownPayment::Replay,
            (Produced | Delivered, _) => KnownPayment::SettleThenReplay,
            (Reserved | Working | Released, _) if has_attempts_left => KnownPayment::Resume,
            (Reserved | Working | Released, _) => KnownPayment::Exhausted,
        }
    }

    /// Refuses a payment that was first used for another request (invariant I7), or that differs from the one known. The id
    /// comes first: without it, nothing is learned of the request.
    fn check_same_request(&self, record: &Record) -> Result<(), Answer> {
        // Payers that send ids where they are not offered are not held to them, except to one that was accepted before.
        let is_same_id =
            record.id == self.id || (record.id.is_none() && !self.context.config.settings.payment_identifier);
        if !is_same_id {
            return Err(answer::other_id());
        }
        if record.is_of(&self.payment) && record.request == self.fingerprint {
            Ok(())
        } else {
            Err(answer::other_request())
        }
    }

    async fn kept(&self, record: &Record, now: u64) -> Result<Kept, Answer> {
        let stored = self.facilitator.ledger().response(&self.key).await;
        Ok(match stored.map_err(|error| answer::ledger_failed(&error))? {
            Some(response) => Kept::Whole(response),
            None if record.fulfilment == Fulfilment::Produced && record.lease_until >= now => Kept::NotYet,
            None => Kept::Gone,
        })
    }

    /// Returns the stored response, or `None` while it is still streaming elsewhere. Without a secret in the request anybody who reads
    /// the chain could ask, so that then it is given a few times and for a short time only.
    async fn replay<R>(&self, record: &Record, now: u64) -> Result<Option<Response<ResponseBody<R>>>, Answer> {
        let limits = &self.context.config.settings.limits;
        let ledger = self.facilitator.ledger();
        let stored = match self.kept(record, now).await? {
            Kept::Whole(response) => Some(response),
            Kept::NotYet => return Ok(None),
            Kept::Gone => None,
        };
        let replays = ledger.count_replay(&self.key).await.map_err(|error| answer::ledger_failed(&error))?;
        let has_secret = record.request.names_caller || record.id.is_some();
        let names_caller = has_secret || record.body.is_some_and(|body| body.length > 0);
        // Unless it was deferred, nobody has it before it is settled, however long that takes.
        let settled_at = record.settled_at.filter(|_| !record.deferred);
        let since = record.produced_at.max(settled_at).unwrap_or(0);
        let age = now.saturating_sub(since);
        if !names_caller && (replays > limits.anonymous_replays || age > limits.anonymous_replay_age.as_secs()) {
            return Err(self.context.answered_before(record));
        }
        let (Some(stored), Some(receipt)) = (stored, self.context.receipt(record)) else {
            return Err(self.context.answered_before(record));
        };
        Ok(Some(replayed(&stored, receipt)))
    }

    /// Returns until when a lease runs that begins now: the work, the settlement on either side of it, and some slack.
    pub(super) fn lease_until(&self, now: u64) -> u64 {
        let limits = &self.context.config.settings.limits;
        now + (limits.handler_deadline + 2 * limits.settlement_margin).as_secs() + 30
    }
}

/// Returns `true` if nothing was submitted for the payment: not to serve it costs the payer nothing.
fn is_untouched(record: &Record) -> bool {
    matches!(record.settlement, Settlement::None | Settlement::Due) && record.transactions.is_empty()
}

/// Returns `true` if nobody has the response: until it is settled for the first time, it is given to nobody without credit.
fn is_unseen(record: &Record) -> bool {
    record.fulfilment == Fulfilment::Produced && !record.deferred && record.settled_at.is_none()
}

async fn wait_until(deadline: Instant, event: impl Future<Output = ()>) -> Result<(), Answer> {
    if Instant::now() >= deadline {
        return Err(answer::in_progress());
    }
    tokio::time::timeout_at(deadline, event).await.map_err(|_| answer::in_progress())
}

/// Runs work on a payment [detached](work::detached).
pub(super) struct Detached {
    facilitator: Arc<dyn Facilitator>,
    key: PaymentKey,
    version: Version,
    payer: String,
}

impl Detached {
    pub(super) fn of(request: &PaidRequest) -> Self {
        let PaidRequest { facilitator, key, context, .. } = request;
        let RequestContext { version, payer, .. } = context;
        Self { facilitator: facilitator.clone(), key: *key, version: *version, payer: payer.clone() }
    }

    /// Waits for the work. The error is what the client is told if it panicked.
    pub(super) async fn run<T>(self, work: impl Future<Output = T> + Send + 'static) -> Result<T, Answer>
    where
        T: Send + 'static,
    {
        match work::detached(work).await {
            Some(done) => Ok(done),
            None => {
                // Without the ledger there is less to say, and nothing else to do.
                let record = self.facilitator.ledger().get(&self.key).await.ok().flatten();
                Err(answer::panicked(record.as_ref(), &self.payer, self.version))
            }
        }
    }
}
