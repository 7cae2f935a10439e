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
    response::{ResponseBody, misfit, replayed},
    settlement, vouchers,
    work::{self, Content, Handler},
};
use crate::{
    facilitator::Facilitator,
    ledger::{BodyDigest, Fingerprint, Fulfilment, LedgerError, Record, Settlement, StoredResponse},
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
    /// Its place among the payments that are not verified yet.
    place: Option<OwnedSemaphorePermit>,
    /// Its permit among the payments that are worked on; it gets one once its payer is known to have the money.
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
            place: None,
            permit: None,
            context,
        });
        request.describe(span);
        if config.permits.available_permits() == 0 {
            return Err(answer::overloaded());
        }
        let is_proven = request.payment.authenticity() == Authenticity::Proven;
        if is_proven {
            request.place = Some(config.unverified.enter_owned().await.ok_or_else(answer::overloaded)?);
        }
        // Paid before the work, the body is read before the payment is reserved. Nobody's is who has shown no money.
        if request.refusal.is_none() && (!is_proven || request.is_upfront()) {
            request.verified = Box::pin(request.authenticate()).await?;
        }
        Ok(request)
    }

    fn is_upfront(&self) -> bool {
        self.payment.terms().offer().flow == PaymentFlow::Upfront
    }

    /// Takes a permit to work in exchange for the place among the payments that are not verified, once the payer is known to have the money.
    pub(super) fn take_permit(&mut self) -> Result<(), Answer> {
        if self.permit.is_none() {
            let permit = self.context.config.permits.clone().try_acquire_owned();
            self.permit = Some(permit.map_err(|_| answer::overloaded())?);
        }
        self.place = None;
        Ok(())
    }

    /// Takes a permit for a payment that is known: to work, or to be answered.
    async fn take_permit_for(&mut self, record: &Record) -> Result<(), Answer> {
        if !matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered) {
            return self.take_permit();
        }
        if self.permit.is_none() {
            let permit = self.context.config.replays.enter_owned().await;
            self.permit = Some(permit.ok_or_else(answer::overloaded)?);
        }
        self.place = None;
        Ok(())
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

    /// Verifies the payment before it is reserved, unless it is known: where a contract at the payer's address has to accept the signature,
    /// anybody can make it up.
    async fn authenticate(&self) -> Result<Option<Verified>, Answer> {
        if self.is_known().await? {
            return Ok(None);
        }
        let _permit = match self.payment.authenticity() {
            Authenticity::Proven => None,
            _ => Some(self.context.config.unproven.enter().await.ok_or_else(answer::overloaded)?),
        };
        match self.facilitator.as_ref().verify(&self.payment).await {
            Ok(verified) => Ok(Some(verified)),
            // The money of a copy may have moved since it was looked for: then it is known, and not refused.
            Err(_) if self.is_known().await? => Ok(None),
            Err(error) => Err(self.context.not_verified(&error)),
        }
    }

    /// Returns `true` if the ledger has the payment.
    async fn is_known(&self) -> Result<bool, Answer> {
        let record = self.facilitator.ledger().get(&self.key).await.map_err(|error| answer::ledger_failed(&error))?;
        Ok(record.is_some_and(|record| is_same_payment(&record, &self.payment)))
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
        // Paid before the work, the body must be known before the money moves. That of a known payment is compared below.
        if self.is_upfront() && self.verified.is_some() {
            self.take_permit()?;
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
            let may_reserve = self.refusal.is_none() && body.is_workable() && (!self.is_upfront() || body.is_whole());
            let (in_progress, record) = if may_reserve {
                match self.reserve(body.digest(), in_progress).await {
                    Ok(Reserved::New(lease)) => return Ok(Next::Work(lease)),
                    Ok(Reserved::Known(in_progress, known)) => (in_progress, known),
                    Err(LedgerError::IdTaken { key }) => {
                        Box::pin(self.turn_to(key)).await?;
                        continue;
                    }
                    Err(error) => return Err(answer::ledger_failed(&error)),
                }
            } else {
                // Let in because it is known. If it is not any more, it is new, and must not be reserved under terms or
                // in a window that are not offered to this request, or for work that could not have its body.
                match (ledger.get(&self.key).await.map_err(|error| answer::ledger_failed(&error))?, &self.refusal) {
                    (Some(known), _) => (in_progress, Box::new(known)),
                    (None, Some(refusal)) => return Err(self.context.reject(StatusCode::PAYMENT_REQUIRED, refusal)),
                    (None, None) if body.is_workable() => return Err(answer::in_progress()),
                    (None, None) => return Err(answer::unread(&ReadError::TooLarge)),
                }
            };
            if let Some(next) = Box::pin(self.go_on(record, in_progress, body, deadline)).await? {
                return Ok(next);
            }
        }
    }

    /// Waits while another request in this process works on the payment.
    async fn wait_for_copy<B: Content>(&mut self, body: &mut LazyBody<B>, deadline: Instant) -> Result<(), Answer> {
        let config = self.context.config.clone();
        let waiting = config.in_progress.join(&self.key, config.settings.limits.copies());
        let Some(waiting) = waiting.map_err(|TooManyCopies| answer::in_progress())? else { return Ok(()) };
        let known = self.facilitator.ledger().get(&self.key).await;
        if let Some(record) = known.map_err(|error| answer::ledger_failed(&error))? {
            self.check_same_request(&record)?;
            if has_shown_money(&record) {
                self.take_permit_for(&record).await?;
                // It is compared once there is an answer; until then its client may send it.
                body.read(&config.settings.limits).await?;
            }
        }
        if self.place.take().is_none() {
            return wait_until(deadline, waiting.ended()).await;
        }
        // While it waits, its place is another payment's: anybody can sign, and send copies.
        let copy = config.unverified_copies.try_acquire().map_err(|_| answer::in_progress())?;
        wait_until(deadline, waiting.ended()).await?;
        drop(copy);
        self.place = Some(config.unverified.enter_owned().await.ok_or_else(answer::overloaded)?);
        Ok(())
    }

    /// Reserves the payment. A client that goes away meanwhile leaves nothing behind: the lease is then given back.
    async fn reserve(&self, body: Option<BodyDigest>, in_progress: InProgress) -> Result<Reserved, LedgerError> {
        let config = &self.context.config;
        let now = config.settings.clock.now();
        let record = Box::new(Record {
            body: body.filter(|_| self.is_upfront()),
            id: self.id.filter(|_| config.settings.payment_identifier),
            ..Record::new(&self.payment, self.fingerprint, now, self.lease_until(now))
        });
        let reserving = HeldLease::reserve(self.facilitator.ledger().clone(), record, in_progress);
        FinishOnDrop::new(reserving).await
    }

    /// Turns to the payment to which the payer gave the same id before, if it is for the same request: a payer that signs anew gets what it
    /// pays for by the first payment, and the new one is not used.
    async fn turn_to(&mut self, key: PaymentKey) -> Result<(), Answer> {
        let known = self.facilitator.ledger().get(&key).await.map_err(|error| answer::ledger_failed(&error))?;
        // It was forgotten a moment ago.
        let Some(record) = known else { return Err(answer::in_progress()) };
        let (payment, settings) = (record.payment(), &self.context.config.settings);
        let is_done = matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered);
        let is_usable = is_done
            || record.settlement.paid_by().is_some()
            || payment.check_window(settings.limits.window(), settings.clock.now()).is_ok();
        let is_same = record.request == self.fingerprint && self.facilitator.serves(&record.terms);
        if !is_same || !is_usable || record.settlement == Settlement::Dead {
            return Err(answer::other_id());
        }
        (self.key, self.payment, self.refusal, self.verified) = (key, payment, None, None);
        Ok(())
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
        let has_shown_money = has_shown_money(&record);
        if has_shown_money {
            self.take_permit_for(&record).await?;
            body.check_same(&record, limits).await?;
            body.read(limits).await?;
        }
        let now = config.settings.clock.now();
        match self.state_of(&record, now) {
            KnownPayment::Wait => {
                drop(in_progress);
                wait_until(deadline, tokio::time::sleep(POLL)).await?;
            }
            KnownPayment::Replay => {
                if let Some(response) = self.replay(&record, now).await? {
                    return Ok(Some(Next::Replay(response)));
                }
                drop(in_progress);
                wait_until(deadline, tokio::time::sleep(POLL)).await?;
            }
            KnownPayment::Resume => {
                if has_shown_money {
                    let read = body.read_whole(limits).await;
                    read.map_err(|answer| answer.with_receipt(self.context.receipt(&record)))?;
                }
                // A settled payment is owed its work; any other is begun only under terms that are offered now, and in time.
                if let Some(refusal) = self.refusal.as_ref().filter(|_| is_untouched(&record)) {
                    return Err(self.context.reject(StatusCode::PAYMENT_REQUIRED, refusal));
                }
                let ledger = self.facilitator.ledger().clone();
                let taking_over = HeldLease::take_over(ledger, record, now, self.lease_until(now), in_progress);
                let lease = FinishOnDrop::new(taking_over).await;
                return Ok(lease.map_err(|error| answer::ledger_failed(&error))?.map(Next::Work));
            }
            KnownPayment::SettleThenReplay => match self.kept(&record, now).await? {
                Kept::Whole(response) => {
                    self.check_fits(&response, &record)?;
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
            },
            KnownPayment::Reconcile => settlement::reconcile(self, record, in_progress).await?,
            KnownPayment::Exhausted => return Err(self.context.exhausted(&record)),
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

    /// Refuses to give a response to a request for which it is not right. The client may repeat the request.
    fn check_fits(&self, response: &StoredResponse, record: &Record) -> Result<(), Answer> {
        match misfit(response, &self.context.asked) {
            Some(names) => Err(answer::other_headers(&names).with_receipt(self.context.receipt(record))),
            None => Ok(()),
        }
    }

    /// Returns the stored response, or `None` while it is still streaming elsewhere.
    async fn replay<R>(&self, record: &Record, now: u64) -> Result<Option<Response<ResponseBody<R>>>, Answer> {
        let limits = &self.context.config.settings.limits;
        let ledger = self.facilitator.ledger();
        let stored = match self.kept(record, now).await? {
            Kept::Whole(response) => Some(response),
            Kept::NotYet => return Ok(None),
            Kept::Gone => None,
        };
        if let Some(response) = &stored {
            self.check_fits(response, record)?;
        }
        let replays = ledger.count_replay(&self.key).await.map_err(|error| answer::ledger_failed(&error))?;
        let has_secret = record.request.names_caller || record.id.is_some();
        let has_secret = has_secret || record.body.is_some_and(|body| body.length > 0);
        // Unless it was deferred, nobody has it before it is settled, however long that takes.
        let settled_at = record.settled_at.filter(|_| !record.deferred);
        let since = record.produced_at.max(settled_at).unwrap_or(0);
        let age = crate::clock::age(now, since);
        if !limits.may_replay(has_secret, replays, age) {
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

/// Returns `true` if the payment was verified before, now or in another process. A reservation alone costs its payer nothing.
fn has_shown_money(record: &Record) -> bool {
    // Only a payment that was verified is reserved with its body.
    record.admitted || record.attempts > 0 || record.body.is_some() || record.settlement != Settlement::None
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
