//! A request that is paid by one authorization: whether its payment is new, to be worked on, or answered before.

use std::{future::Future, sync::Arc, time::Duration};

use alloy_primitives::Address;
use tokio::{sync::OwnedSemaphorePermit, time::Instant};

use crate::charge::{
    Identity, Presented, Refusal, Seller, Unread, Why, common,
    in_progress::InProgress,
    lease::{FinishOnDrop, HeldLease, Reserved},
    rooms::owner_of,
};
use crate::{
    clock::age,
    facilitator::Facilitator,
    ledger::{BodyDigest, Fulfilment, LedgerError, PaymentStep, Record, Settlement, StoredResponse},
    payment::{Authenticity, PaymentKey, Prechecked, Verified},
    protocol::{PaymentFlow, Reason, SettlementResponse, TransferMethod},
};

/// How often a payment that another process works on is looked at.
const POLL: Duration = Duration::from_millis(200);

/// A payment that may be worked on, with the request that it is presented for.
pub(crate) struct ExactRequest {
    pub(super) seller: Arc<Seller>,
    pub(super) facilitator: Arc<dyn Facilitator>,
    pub(super) payment: Prechecked,
    pub(super) key: PaymentKey,
    /// The payer's address as the payer writes it.
    pub(super) payer: String,
    /// The verifier's result, once it was asked.
    pub(super) verified: Option<Verified>,
    /// Its place among the payments that are not verified yet.
    place: Option<OwnedSemaphorePermit>,
    /// Its permit among the payments that are worked on; it gets one once its payer is known to have the money.
    pub(super) permit: Option<OwnedSemaphorePermit>,
    /// Why it would be refused if it were new.
    refusal: Option<Refusal>,
    identity: Identity,
    /// Who is paid for the request now, where its price says so.
    sold_by: Option<Address>,
    /// How much of the body of a known payment its body was compared with. It is compared again if the payment was read further meanwhile.
    compared: Option<Option<BodyDigest>>,
    /// Whether its payer can be told that it is settled later.
    pub(super) may_defer: bool,
}

/// A payment as it was presented, after it was matched to an offer and checked without I/O.
pub(crate) struct Matched {
    pub(crate) payment: Prechecked,
    /// Why it would be refused if it were new: it is on record under an offer that is not made any more.
    pub(crate) refusal: Option<Refusal>,
    pub(crate) facilitator: Arc<dyn Facilitator>,
}

/// How a payment was presented.
pub(crate) struct Presentation {
    /// The payer's address as the payer writes it.
    pub(crate) payer: String,
    pub(crate) identity: Identity,
    /// Who is paid for the request now, where its price says so.
    pub(crate) sold_by: Option<Address>,
    /// Whether the payer can be told that its payment is settled later.
    pub(crate) may_defer: bool,
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
    Whole(StoredResponse),
    /// It still streams elsewhere.
    NotYet,
    Gone,
}

impl ExactRequest {
    /// Gives the payment a place, and authenticates it where anybody could have made it up.
    ///
    /// Here and below, what most requests do not come to is boxed, so that it takes no room in the future of every request.
    pub(crate) async fn new(
        seller: Arc<Seller>,
        matched: Matched,
        presentation: Presentation,
    ) -> Result<Box<Self>, Refusal> {
        let Matched { payment, refusal, facilitator } = matched;
        let Presentation { payer, identity, sold_by, may_defer } = presentation;
        let mut request = Box::new(Self {
            key: payment.key(),
            seller: seller.clone(),
            facilitator,
            payment,
            payer,
            verified: None,
            place: None,
            permit: None,
            refusal,
            identity,
            sold_by,
            compared: None,
            may_defer,
        });
        common::describe(&request.key, request.payment.authorization().value);
        common::identify(request.key.nonce);
        if seller.permits.available_permits() == 0 {
            return Err(Why::Busy.into());
        }
        let is_proven = request.payment.authenticity() == Authenticity::Proven;
        if is_proven {
            request.place = Some(seller.unverified.enter_owned().await.ok_or(Why::Busy)?);
        }
        // Paid before the work, the body is read before the payment is reserved. Nobody's is who has shown no money.
        if request.refusal.is_none() && (!is_proven || request.is_upfront()) {
            let authenticated = Box::pin(request.authenticate()).await;
            request.verified = authenticated.map_err(|refusal| refusal.under(request.method()))?;
        }
        Ok(request)
    }

    pub(super) fn method(&self) -> TransferMethod {
        self.payment.terms().offer().method
    }

    pub(super) fn is_upfront(&self) -> bool {
        self.payment.terms().offer().flow == PaymentFlow::Upfront
    }

    /// Takes a permit to work in exchange for the place among the payments that are not verified, once the payer is known to have the money.
    pub(super) fn take_permit(&mut self) -> Result<(), Refusal> {
        if self.permit.is_none() {
            let permit = self.seller.permits.clone().try_acquire_owned();
            self.permit = Some(permit.map_err(|_| Why::Busy)?);
        }
        self.place = None;
        Ok(())
    }

    /// Leaves the places of payments that are not verified.
    pub(super) fn leave_place(&mut self) {
        self.place = None;
    }

    /// Takes a permit for a payment that is known: to be answered, or to work. One that has to be verified again has a place like a new one,
    /// until its payer is known to have the money: whoever has the price of one request can have any number of payments released.
    async fn take_permit_for(&mut self, record: &Record) -> Result<(), Refusal> {
        match record.fulfilment {
            Fulfilment::Produced | Fulfilment::Delivered => {
                if self.permit.is_none() {
                    self.permit = Some(self.seller.replays.enter_owned().await.ok_or(Why::Busy)?);
                }
                self.place = None;
                Ok(())
            }
            _ if record.settlement == Settlement::None => {
                if self.place.is_none() {
                    self.place = Some(self.seller.unverified.enter_owned().await.ok_or(Why::Busy)?);
                }
                Ok(())
            }
            _ => self.take_permit(),
        }
    }

    /// Verifies the payment before it is reserved, unless it is known: where a contract at the payer's address has to accept the signature,
    /// anybody can make it up.
    async fn authenticate(&self) -> Result<Option<Verified>, Refusal> {
        if self.is_known().await? {
            return Ok(None);
        }
        let _permit = match self.payment.authenticity() {
            Authenticity::Proven => None,
            _ => Some(self.seller.unproven.enter().await.ok_or(Why::Busy)?),
        };
        match self.facilitator.as_ref().verify(&self.payment).await {
            Ok(verified) => Ok(Some(verified)),
            // The money of a copy may have moved since it was looked for: then it is known, and not refused.
            Err(_) if self.is_known().await? => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns `true` if the ledger has the payment.
    async fn is_known(&self) -> Result<bool, Refusal> {
        let record = self.facilitator.ledger().get(&self.key).await?;
        Ok(record.is_some_and(|record| is_same_payment(&record, &self.payment)))
    }

    /// Leases the payment for work, or finds the response to it, after whatever there is to wait for.
    pub(super) async fn begin(mut self: Box<Self>, request: &mut impl Presented) -> Result<(Box<Self>, Next), Refusal> {
        let seller = self.seller.clone();
        let ledger = self.facilitator.ledger().clone();
        let deadline = Instant::now() + seller.rules.limits.wait;
        // Paid before the work, the body must be known before the money moves. That of a known payment is compared below.
        if self.is_upfront() && self.verified.is_some() {
            self.place = None;
            let arrived = request.arrived();
            let read = Box::pin(seller.arriving.read(owner_of(&self.key, false), arrived, request.read_whole())).await;
            read.ok_or(Why::Busy)??;
        }
        loop {
            let Some(in_progress) = seller.in_progress.enter(self.key) else {
                Box::pin(self.wait_for_copy(deadline, request.held())).await?;
                continue;
            };
            if self.refusal.is_none() {
                // Time has passed, for one that waited.
                let window = self.payment.check_window(seller.rules.limits.window(), seller.now());
                self.refusal = window.err().map(Refusal::from);
            }
            let digest = request.digest();
            let may_reserve =
                self.refusal.is_none() && request.is_workable() && (!self.is_upfront() || digest.is_some());
            let (in_progress, record) = if may_reserve {
                match self.reserve(digest, in_progress).await {
                    Ok(Reserved::New(lease)) => return Ok((self, Next::Work(lease))),
                    Ok(Reserved::Known(in_progress, known)) => (in_progress, known),
                    Err(LedgerError::IdTaken { key }) => {
                        Box::pin(self.turn_to(key)).await?;
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                }
            } else {
                // Let in because it is known. If it is not any more, it is new, and must not be reserved under terms or
                // in a window that are not offered to this request, or for work that could not have its body.
                match (ledger.get(&self.key).await?, self.refusal.take()) {
                    (Some(known), refusal) => {
                        self.refusal = refusal;
                        (Some(in_progress), Box::new(known))
                    }
                    (None, Some(refusal)) => return Err(refusal),
                    (None, None) if request.is_workable() => return Err(Why::InProgress.into()),
                    (None, None) => return Err(Unread::TooLarge.into()),
                }
            };
            if let Some(next) = Box::pin(self.go_on(record, in_progress, request, deadline)).await? {
                return Ok((self, next));
            }
        }
    }

    /// Waits, with so much of the body, while another request in this process works on the payment.
    async fn wait_for_copy(&mut self, deadline: Instant, held: u64) -> Result<(), Refusal> {
        let seller = self.seller.clone();
        let Some(waiting) = seller.in_progress.join(&self.key) else { return Ok(()) };
        let (mut has_place, mut is_public) = (self.place.is_some(), false);
        if let Some(record) = self.facilitator.ledger().get(&self.key).await? {
            self.check_same_request(&record)?;
            has_place &= !has_shown_money(&record);
            is_public = !is_untouched(&record);
        }
        // While it waits, its place is another payment's: anybody can sign, and send copies of what is on the chain. Its body waits, too.
        (self.place, self.permit) = (None, None);
        self.wait_until(deadline, (held, is_public), waiting.ended()).await?;
        if has_place {
            self.place = Some(seller.unverified.enter_owned().await.ok_or(Why::Busy)?);
        }
        Ok(())
    }

    /// Waits until a payment that another process works on, or whose response streams there, is to be looked at again. Copies in this process
    /// wait for this one, which holds nothing meanwhile.
    async fn wait_for_another(
        &mut self,
        deadline: Instant,
        waits: (u64, bool),
        in_progress: Option<InProgress>,
    ) -> Result<(), Refusal> {
        self.permit = None;
        let had_place = self.place.take().is_some();
        self.wait_until(deadline, waits, tokio::time::sleep(POLL)).await?;
        drop(in_progress);
        if had_place {
            self.place = Some(self.seller.unverified.enter_owned().await.ok_or(Why::Busy)?);
        }
        Ok(())
    }

    /// Waits for an event with so much of the body, in its owner's share of the room, until the deadline at most.
    async fn wait_until(
        &self,
        deadline: Instant,
        (held, is_public): (u64, bool),
        event: impl Future<Output = ()>,
    ) -> Result<(), Refusal> {
        let event = tokio::time::timeout_at(deadline, event);
        match self.seller.copies.wait(owner_of(&self.key, is_public), held, event).await {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err(Why::InProgress.into()),
        }
    }

    /// Reserves the payment. A client that goes away meanwhile leaves nothing behind: the lease is then given back.
    async fn reserve(&self, body: Option<BodyDigest>, in_progress: InProgress) -> Result<Reserved, LedgerError> {
        let now = self.seller.now();
        let record = Box::new(Record {
            body: body.filter(|_| self.is_upfront()),
            id: self.identity.asked_id,
            written: self.identity.written,
            ..Record::new(&self.payment, self.identity.head, now, self.lease_until(now))
        });
        let reserving = HeldLease::reserve(self.facilitator.ledger().clone(), record, Some(in_progress));
        FinishOnDrop::new(reserving).await
    }

    /// Turns to the payment to which the payer gave the same id before, if it is for the same request: a payer that signs anew gets what it
    /// pays for by the first payment, and the new one is not used.
    async fn turn_to(&mut self, key: PaymentKey) -> Result<(), Refusal> {
        // It was forgotten a moment ago.
        let Some(mut record) = self.facilitator.ledger().get(&key).await? else { return Err(Why::InProgress.into()) };
        let (payment, now) = (record.payment(), self.seller.now());
        // It may be charged yet, or was: then there is an answer to wait for.
        let is_open = matches!(record.fulfilment, Fulfilment::Produced | Fulfilment::Delivered)
            || matches!(record.settlement, Settlement::Submitted | Settlement::Unknown)
            || record.settlement.paid_by().is_some()
            || record.is_leased(now);
        let is_usable = is_open || payment.check_window(self.seller.rules.limits.window(), now).is_ok();
        let is_same = self.is_same_request(&record) && self.facilitator.knows(&record.terms);
        let refusal = Why::OtherId.into();
        if !is_same || record.settlement == Settlement::Dead {
            return Err(refusal);
        }
        if !is_usable {
            match self.is_executed(&mut record, &refusal).await {
                Ok(true) => {}
                Err(unclear) if unclear.retry_after().is_some() => return Err(unclear),
                Ok(false) | Err(_) => return Err(refusal),
            }
        }
        (self.key, self.payment, self.refusal, self.verified) = (key, payment, None, None);
        Ok(())
    }

    /// Goes on with a payment that is known. Returns `None` if it must be looked at again.
    async fn go_on(
        &mut self,
        mut record: Box<Record>,
        in_progress: Option<InProgress>,
        request: &mut impl Presented,
        deadline: Instant,
    ) -> Result<Option<Next>, Refusal> {
        self.check_same_request(&record)?;
        // Whatever offer it names now, it was accepted under the one in the record (invariant I6).
        self.payment = record.payment().with_echoed(self.payment.echoed().cloned());
        let (has_shown_money, is_public) = (has_shown_money(&record), !is_untouched(&record));
        if has_shown_money {
            if request.is_arriving() && self.compared != Some(record.body) {
                // Its client may never send it, and be another one than the payer. Nobody waits for it, and then the payment is looked at again.
                drop(in_progress);
                (self.place, self.permit, self.compared) = (None, None, Some(record.body));
                let arrived = request.arrived();
                let owner = owner_of(&self.key, is_public);
                let read = self.seller.known.read(owner, arrived, compare(request, &record)).await;
                read.ok_or(Why::Busy)??;
                return Ok(None);
            }
            self.take_permit_for(&record).await?;
            compare(request, &record).await?;
        }
        let now = self.seller.now();
        let waits = (request.held(), is_public);
        match self.state_of(&record, now) {
            KnownPayment::Wait => self.wait_for_another(deadline, waits, in_progress).await?,
            KnownPayment::Replay => {
                if let Some(replay) = self.replay(request, &record, now).await? {
                    return Ok(Some(replay));
                }
                self.wait_for_another(deadline, waits, in_progress).await?;
            }
            KnownPayment::Resume => {
                if has_shown_money {
                    let read = request.read_whole().await;
                    read.map_err(|why| Refusal::from(why).with_receipt(self.receipt(&record)))?;
                }
                // A settled payment is owed its work by whoever was paid; any other is begun only under terms that are offered now, and in time.
                if is_untouched(&record)
                    && let Some(refusal) = &self.refusal
                {
                    let is_executed = self.is_executed(&mut record, refusal).await?;
                    return if is_executed { Ok(None) } else { self.refusal.take().map_or(Ok(None), Err) };
                }
                if self.sold_by.is_some_and(|payee| payee != record.terms.offer().pay_to) {
                    return self.refuse(&mut record, Why::OtherRequest).await;
                }
                let ledger = self.facilitator.ledger().clone();
                let taking_over = HeldLease::take_over(ledger, record, now, self.lease_until(now), in_progress);
                return Ok(FinishOnDrop::new(taking_over).await?.map(Next::Work));
            }
            KnownPayment::SettleThenReplay => match self.kept(&record, now).await? {
                Kept::Whole(response) => {
                    self.check_fits(request, &response, &record)?;
                    let is_unseen = is_unseen(&record);
                    let record = self.settle_due(record, in_progress).await?;
                    // The payer gets it, even if the ledger has dropped its copy meanwhile.
                    if is_unseen && let Some(receipt) = self.receipt(&record) {
                        return Ok(Some(Next::Replay(response, receipt)));
                    }
                }
                Kept::NotYet => self.wait_for_another(deadline, waits, in_progress).await?,
                Kept::Gone if is_unseen(&record) => self.not_kept(record).await?,
                // It is owed for, and will be settled: its response left before.
                Kept::Gone => return Err(self.used(&record)),
            },
            KnownPayment::Reconcile => self.reconcile(record, in_progress).await?,
            KnownPayment::Exhausted => return self.refuse(&mut record, Why::Exhausted).await,
            KnownPayment::Dead => {
                let reason = record.last_failure.clone().unwrap_or(Reason::InvalidTransactionState);
                return Err(self.not_settled(&record, reason, "this payment can never be settled", None));
            }
        }
        Ok(None)
    }

    /// Refuses to go on with a payment. It is looked at again if it was paid for meanwhile: its payer is told so.
    async fn refuse(&self, record: &mut Record, why: Why) -> Result<Option<Next>, Refusal> {
        let refusal = Refusal::new(why).with_transaction(record.transaction()).with_receipt(self.receipt(record));
        if self.is_executed(record, &refusal).await? { Ok(None) } else { Err(refusal) }
    }

    fn state_of(&self, record: &Record, now: u64) -> KnownPayment {
        use Fulfilment::{Delivered, Produced, Released, Reserved, Working};
        let has_attempts_left = self.seller.rules.limits.has_attempts_left(record.attempts);
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
    fn check_same_request(&self, record: &Record) -> Result<(), Refusal> {
        // Payers that send ids where they are not asked for are not held to them, except to one that was accepted before.
        if record.id != self.identity.id && record.id != self.identity.asked_id {
            return Err(Why::OtherId.into());
        }
        if record.is_of(&self.payment) && self.is_same_request(record) { Ok(()) } else { Err(Why::OtherRequest.into()) }
    }

    /// Returns `true` if the record is of this request: with the same additions to what its seller declares, or as it was written then,
    /// whatever is declared since.
    fn is_same_request(&self, record: &Record) -> bool {
        let Identity { head, written, .. } = self.identity;
        record.request == head || (written.is_some() && record.written == written)
    }

    async fn kept(&self, record: &Record, now: u64) -> Result<Kept, Refusal> {
        Ok(match self.facilitator.ledger().response(&self.key).await? {
            Some(response) => Kept::Whole(response),
            None if record.streamed && record.fulfilment == Fulfilment::Produced && record.lease_until >= now => {
                Kept::NotYet
            }
            None => Kept::Gone,
        })
    }

    /// Refuses to give a response to a request for which it is not right. The client may repeat the request.
    fn check_fits(&self, request: &impl Presented, response: &StoredResponse, record: &Record) -> Result<(), Refusal> {
        match request.misfit(response) {
            Some(names) => Err(Refusal::new(Why::OtherHeaders(names)).with_receipt(self.receipt(record))),
            None => Ok(()),
        }
    }

    /// Returns the stored response, or `None` while it is still streaming elsewhere.
    async fn replay(&self, request: &mut impl Presented, record: &Record, now: u64) -> Result<Option<Next>, Refusal> {
        let stored = match self.kept(record, now).await? {
            Kept::Whole(response) => Some(response),
            Kept::NotYet => return Ok(None),
            Kept::Gone => None,
        };
        if let Some(response) = &stored {
            self.check_fits(request, response, record)?;
        }
        let replays = self.facilitator.ledger().advance(&self.key, &PaymentStep::Replay).await?.replays;
        let has_secret = record.request.names_caller || record.id.is_some();
        let has_secret = has_secret || record.body.is_some_and(|body| body.length > 0);
        // Unless it was deferred, nobody has it before it is settled, however long that takes.
        let settled_at = record.settled_at.filter(|_| !record.deferred);
        let since = record.produced_at.max(settled_at).unwrap_or(0);
        if !self.seller.rules.limits.may_replay(has_secret, replays, age(now, since)) {
            return Err(self.used(record));
        }
        let (Some(stored), Some(receipt)) = (stored, self.receipt(record)) else { return Err(self.used(record)) };
        Ok(Some(Next::Replay(stored, receipt)))
    }

    /// The payment was answered before, and the response is no longer kept, or not for this request.
    fn used(&self, record: &Record) -> Refusal {
        let refusal = Refusal::new(Why::Used).with_transaction(record.settlement.paid_by());
        refusal.with_receipt(self.receipt(record))
    }

    /// Returns a copy for a task of its own. Its verification is out of date; the facilitator looks again.
    pub(super) fn copy(&self, permit: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            seller: self.seller.clone(),
            facilitator: self.facilitator.clone(),
            payment: self.payment.clone(),
            payer: self.payer.clone(),
            verified: None,
            place: None,
            refusal: None,
            permit,
            ..*self
        }
    }

    pub(super) fn lease_until(&self, now: u64) -> u64 {
        self.seller.rules.limits.lease_until(now)
    }
}

/// How a payment goes on.
pub(super) enum Next {
    Work(HeldLease),
    Replay(StoredResponse, SettlementResponse),
}

/// Returns `true` if this is the payment on record: signed for the same, or with the same signature where only the chain can say so.
pub(crate) fn is_same_payment(record: &Record, prechecked: &Prechecked) -> bool {
    record.is_of(prechecked)
        && (prechecked.authenticity() == Authenticity::Proven || record.signature == *prechecked.signature())
}

/// Returns `true` if the payment was verified before, now or in another process. A reservation alone costs its payer nothing.
fn has_shown_money(record: &Record) -> bool {
    // Only a payment that was verified is reserved with its body.
    record.admitted || record.attempts > 0 || record.body.is_some() || record.settlement != Settlement::None
}

/// Reads the body, and refuses another one than was presented first.
async fn compare(request: &mut impl Presented, record: &Record) -> Result<(), Refusal> {
    if let Some(read) = &record.body
        && !request.is_same(read).await?
    {
        return Err(Why::OtherRequest.into());
    }
    Ok(request.read().await?)
}

/// Returns `true` if nothing was submitted for the payment: not to serve it costs the payer nothing.
fn is_untouched(record: &Record) -> bool {
    matches!(record.settlement, Settlement::None | Settlement::Due) && record.transactions.is_empty()
}

/// Returns `true` if nobody has the response: until it is settled for the first time, it is given to nobody without credit.
fn is_unseen(record: &Record) -> bool {
    record.fulfilment == Fulfilment::Produced && !record.deferred && record.settled_at.is_none()
}
