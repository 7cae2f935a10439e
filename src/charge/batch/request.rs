//! A request that is paid with a voucher: whether its channel has the money, and whether it was answered before.

use std::{future::Future, sync::Arc, time::Duration};

use alloy_primitives::{B256, U256, keccak256};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};

use super::{
    PrecheckedVoucher,
    channel::{ChannelLease, HeldChannel, receipt},
};
use crate::{
    channels::Channels,
    charge::{
        Common, Identity, Presented, Refusal, Seller, Why, common, lease::FinishOnDrop, queue::AdmissionQueue,
        rooms::PayerRoom,
    },
    clock::age,
    facilitator::channels::{ChannelError, Executed},
    ledger::{
        BodyDigest, Fingerprint, StoredResponse,
        channels::{Answer as Charged, ChannelLedgerError, ChannelRecord, ChannelStep, RequestName},
    },
    payment::{PaymentKey, Rejection},
    protocol::SettlementResponse,
    vouchers::{ChannelConfig, reason},
};

/// How often a channel that another process holds is looked at.
const POLL: Duration = Duration::from_millis(100);

/// A request that is paid with a voucher.
pub(crate) struct BatchRequest {
    pub(super) seller: Arc<Seller>,
    pub(super) channels: Channels,
    pub(super) payment: PrecheckedVoucher,
    identity: Identity,
    /// Identifies the request together with the voucher.
    pub(super) request_key: B256,
    /// How its payer names it.
    name: Option<RequestName>,
    /// Whether the request has something that a stranger does not know who reads the voucher on the chain.
    has_secret: bool,
    /// Whether the channel had money for the voucher when it was last looked at, and nobody but the payer can have the voucher.
    is_known: bool,
}

/// Who may be sending the request, and what for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// The payer, for work: nobody else has the voucher. Named by the channel, or by its address if it has shown no more than a deposit: that
    /// can be signed for any number of channels.
    Payer(B256),
    /// Anybody, for work: the voucher was charged in part, and may be on the chain. Its rest is the price.
    Public,
    /// Anybody, for the answer that the request got before, and no more: all of the voucher was charged, or the request under its name, or the
    /// rest of a public voucher is not the price.
    Charged,
    /// Anybody. A refund does not depend on the body, which is not read.
    Refund,
}

impl Standing {
    /// Returns the room in which the body of a request for this channel is read, and for whom it has a place there.
    fn room_to_read(self, seller: &Seller, channel: B256) -> (&PayerRoom, B256) {
        match self {
            Self::Payer(payer) => (&seller.arriving, payer),
            _ => (&seller.known, channel),
        }
    }

    /// The same for waiting. The payer's room is not the one where strangers wait who have read its vouchers on the chain: there, all that is
    /// presented of one channel has one share.
    fn room_to_wait(self, seller: &Seller, channel: B256) -> (&PayerRoom, B256) {
        match self {
            Self::Payer(payer) => (&seller.in_line, payer),
            _ => (&seller.copies, channel),
        }
    }
}

/// How a request goes on.
#[expect(clippy::large_enum_variant, reason = "it is taken apart by its only caller")]
pub(super) enum Next {
    Hold(Box<HeldChannel>),
    Replay(StoredResponse, SettlementResponse),
    /// The refund was made before.
    Refunded(ChannelRecord, Executed),
}

impl BatchRequest {
    pub(crate) fn new(
        seller: Arc<Seller>,
        channels: Channels,
        mut payment: PrecheckedVoucher,
        Common { identity, refusal }: Common,
    ) -> Self {
        // A refund is owed whatever came with its request.
        payment.refusal = payment.refusal.or(refusal.filter(|_| payment.refund.is_none()));
        let (request_key, name) = (B256::ZERO, None);
        let request =
            Self { seller, channels, payment, identity, request_key, name, has_secret: false, is_known: false };
        common::describe(&request.key(), U256::from(request.payment.price));
        request
    }

    /// Gets the channel for this request, after whatever there is to wait for, or finds the answer that it got before.
    pub(super) async fn begin(&mut self, presented: &mut impl Presented) -> Result<Next, Refusal> {
        let seller = self.seller.clone();
        let limits = &seller.rules.limits;
        let deadline = Instant::now() + limits.wait;
        let (standing, mut deposit) = Box::pin(self.admit()).await?;
        if standing == Standing::Refund {
            return Box::pin(self.begin_refund(deadline)).await;
        }
        let (room, owner) = standing.room_to_read(&seller, self.channel());
        let arrived = presented.arrived();
        room.read(owner, arrived, presented.read_whole()).await.ok_or(Why::Busy)??;
        let held = presented.held();
        let is_charged = standing == Standing::Charged;
        self.identify(presented.digest());
        let id = self.payment.voucher.channel_id;
        let key = PaymentKey { nonce: id.digest(), ..self.key() };
        let (room, owner) = standing.room_to_wait(&seller, self.channel());
        let mut line = None;
        // What was charged gets its answer and no work, and takes no place in the line from the payer's next request.
        while !is_charged && line.is_none() {
            line = seller.in_progress.enter(key);
            if line.is_none()
                && let Some(waiting) = seller.in_progress.join(&key)
            {
                self.until(deadline, room.wait(owner, held, waiting.ended())).await?;
            }
        }
        let mut is_filled = deposit.is_some() || self.payment.deposit.is_none();
        loop {
            let record = self.channels.record(&id).await?;
            if let Some(record) = &record
                && let Some(charged) = self.answer_in(record)?
            {
                // Its response may be streaming, and is kept when that ends. Other requests of the channel need not wait for it.
                drop(line);
                let streamed = PaymentKey { nonce: charged.request, ..self.key() };
                if let Some(streaming) = seller.in_progress.join(&streamed) {
                    self.until(deadline, room.wait(owner, held, streaming.ended())).await?;
                }
                let _permit = self.permit(true).await?;
                return Box::pin(self.replay(presented, record, charged)).await;
            }
            // Let in because it may have been answered under an earlier offer (invariant I6).
            if let Some(refusal) = self.payment.refusal.take() {
                return Err(refusal);
            }
            // Let in for its answer alone, outside of the line, as far as the books can be relied on.
            if let Some(record) = record.as_ref().filter(|record| is_charged && self.channels.is_fresh(record)) {
                return Err(self.refused(ChannelLedgerError::Mismatch(Box::new(record.clone()))));
            }
            let record = match record {
                _ if !is_filled => {
                    is_filled = true;
                    Box::pin(self.fill(record, &mut deposit)).await?
                }
                Some(record) if self.is_good(&record) => record,
                _ => Box::pin(self.look()).await?.ok_or_else(not_found)?,
            };
            self.check_credit(&record)?;
            let now = seller.now();
            let (request, voucher) = (self.request_key, self.payment.voucher.clone());
            let until = limits.lease_until(now);
            let is_free = record.pending.as_ref().is_none_or(|pending| pending.until <= now);
            // Two vouchers for the same amount are one: without a name, what is bought anew cannot be told from what is tried again.
            if is_free && self.name.is_some() && !limits.has_attempts_left(record.attempts_of(request)) {
                let receipt = receipt(Some(0), &record, record.charged(), deposit.as_ref());
                return Err(Refusal::new(Why::Exhausted).with_receipt(Some(receipt)));
            }
            // Who waits holds no permit meanwhile (invariant I12).
            let permit = self.permit(is_charged).await?;
            let (name, price) = (self.name, self.payment.price);
            let step = ChannelStep::Begin { request, name, voucher, price, now, until };
            match FinishOnDrop::new(ChannelLease::begin(self.channels.clone(), record.id, step)).await {
                Ok(lease) => {
                    let held = HeldChannel { lease, deposit, _line: line, _turn: None, _permit: permit };
                    return Ok(Next::Hold(Box::new(held)));
                }
                // A copy of the request was answered meanwhile.
                Err(ChannelLedgerError::Answered(_)) => {}
                // Another process holds it.
                Err(ChannelLedgerError::Busy { .. }) => {
                    drop(permit);
                    self.until(deadline, room.wait(owner, held, tokio::time::sleep(POLL))).await?;
                }
                Err(error) => return Err(self.refused(error)),
            }
        }
    }

    /// Gets the channel for a refund, or finds the one that was made for this request before.
    ///
    /// Anybody who has read the newest voucher in a claim can ask for a refund. So what the books refuse is refused before anything is waited
    /// for, and refunds of a channel wait for each other in a line of their own. Of them, one at a time looks at the chain, and only then gets
    /// into the line where the payer's vouchers wait. If that is in use it looks again later, so that they get into it first.
    async fn begin_refund(&mut self, deadline: Instant) -> Result<Next, Refusal> {
        let seller = self.seller.clone();
        self.identify(None);
        let id = self.payment.voucher.channel_id;
        let line = PaymentKey { nonce: id.digest(), ..self.key() };
        let refunds = PaymentKey { nonce: keccak256([&b"refunds"[..], id.digest().as_slice()].concat()), ..line };
        let (room, owner) = Standing::Refund.room_to_wait(&seller, self.channel());
        let mut turn = None;
        loop {
            let record = self.channels.record(&id).await?;
            if let Some(record) = record.as_ref().filter(|record| self.channels.is_fresh(record)) {
                match self.check_refund(record) {
                    // Money may have come since.
                    Ok(_) => {}
                    Err(refusal) if refusal.code() == reason::REFUND_NO_BALANCE => {}
                    // What became of this very refund is on the chain, and may not be in the books yet.
                    Err(_) if record.refund.is_some_and(|last| last.request == self.request_key) => {}
                    Err(refusal) => return Err(refusal),
                }
            }
            if turn.is_none() {
                turn = seller.in_progress.enter(refunds);
                if turn.is_none()
                    && let Some(waiting) = seller.in_progress.join(&refunds)
                {
                    self.until(deadline, room.wait(owner, 0, waiting.ended())).await?;
                }
                continue;
            }
            if let Some(waiting) = seller.in_progress.join(&line) {
                self.until(deadline, room.wait(owner, 0, waiting.ended())).await?;
                continue;
            }
            // The contract's nonce must be the one of now.
            let record = self.look().await?.ok_or_else(not_found)?;
            if let Some(executed) = self.check_refund(&record)? {
                return Ok(Next::Refunded(record, executed));
            }
            let Some(line) = seller.in_progress.enter(line) else { continue };
            let permit = self.permit(false).await?;
            let (request, voucher, now) = (self.request_key, self.payment.voucher.clone(), seller.now());
            let until = seller.rules.limits.lease_until(now);
            let step = ChannelStep::Begin { request, name: None, voucher, price: 0, now, until };
            match FinishOnDrop::new(ChannelLease::begin(self.channels.clone(), record.id, step)).await {
                Ok(lease) => {
                    let held = HeldChannel { lease, deposit: None, _line: Some(line), _turn: turn, _permit: permit };
                    return Ok(Next::Hold(Box::new(held)));
                }
                // Another process holds it.
                Err(ChannelLedgerError::Busy { .. }) => {
                    drop((line, permit));
                    self.until(deadline, room.wait(owner, 0, tokio::time::sleep(POLL))).await?;
                }
                Err(error) => return Err(self.refused(error)),
            }
        }
    }

    /// Refuses a refund that these books exclude, or returns the one that was made for this request before.
    fn check_refund(&self, record: &ChannelRecord) -> Result<Option<Executed>, Refusal> {
        self.check_amount(record)?;
        let PrecheckedVoucher { voucher, refund, .. } = &self.payment;
        let checked = self.channels.check_refund(record, self.request_key, voucher, refund.flatten());
        checked.map_err(|error| self.not_moved(&error))
    }

    /// Ends once the channel is known to have the money, if the request needs any. Returns the deposit if it had to be made for that. Before,
    /// no body is read, and no permit taken that payers need: anybody can sign vouchers of channels that nobody filled.
    async fn admit(&mut self) -> Result<(Standing, Option<Executed>), Refusal> {
        if self.seller.permits.available_permits() == 0 {
            return Err(Why::Busy.into());
        }
        let PrecheckedVoucher { config, voucher, deposit, refund, .. } = &self.payment;
        let record = self.channels.record(&voucher.channel_id).await?;
        let is_shown = record.as_ref().is_some_and(|record| self.has_shown_money(record));
        let max = voucher.max_claimable_amount;
        // Or one before it, if less was charged for what came after it.
        let is_public = |record: &ChannelRecord| {
            record.published == max || record.voucher.as_ref().is_some_and(|newest| newest.max_claimable_amount == max)
        };
        let id = self.identity.asked_id;
        let has_answer = |record: &ChannelRecord| id.is_some_and(|id| record.answer_named(id).is_some());
        let standing = match &record {
            _ if refund.is_some() => Standing::Refund,
            Some(record) if max <= record.charged() || has_answer(record) => Standing::Charged,
            Some(record) if is_public(record) && self.is_right(record) => Standing::Public,
            Some(record) if is_public(record) => Standing::Charged,
            _ if deposit.is_some() && !is_shown => Standing::Payer(config.payer.into_word()),
            _ => Standing::Payer(voucher.channel_id.digest()),
        };
        let has_balance = record.as_ref().is_some_and(|record| record.observed.state.balance > 0);
        self.is_known = has_balance && matches!(standing, Standing::Payer(_));
        if standing == Standing::Charged {
            return Ok((standing, None));
        }
        if let Some(refusal) = self.payment.refusal.take() {
            return Err(refusal);
        }
        Ok((standing, if is_shown { None } else { self.show_money(record).await? }))
    }

    /// Returns `true` if the books show that the payer has the money.
    fn has_shown_money(&self, record: &ChannelRecord) -> bool {
        // A channel that is in the books was filled once. A refund holds nothing before the chain was looked at.
        self.payment.refund.is_some() || self.is_good(record)
    }

    /// Asks the chain whether the channel has the money, or whether a deposit that came along would be made. Returns the deposit if it was
    /// under way already, and is made now.
    async fn show_money(&self, known: Option<ChannelRecord>) -> Result<Option<Executed>, Refusal> {
        let PrecheckedVoucher { config, voucher, deposit, refund, .. } = &self.payment;
        if let Some(deposit) = deposit {
            let place = self.places().enter().await.ok_or(Why::Busy)?;
            let verified = self.channels.verify_deposit(config, deposit).await;
            drop(place);
            match verified {
                Ok(before) if voucher.max_claimable_amount <= before.state.balance.saturating_add(deposit.amount) => {
                    return Ok(None);
                }
                Ok(_) | Err(ChannelError::Rejected { .. } | ChannelError::Pending { .. }) => {
                    // A deposit that was sent before would not be made once more. Whether it was is known where deposits are made.
                    let mut made = None;
                    self.fill(known, &mut made).await?;
                    return Ok(made);
                }
                Err(error) => return Err(self.not_moved(&error)),
            }
        }
        match self.look().await? {
            Some(record) if refund.is_some() || self.is_covered(&record) => Ok(None),
            Some(record) => {
                self.check_amount(&record)?;
                Err(self.refused(ChannelLedgerError::ExceedsBalance(Box::new(record))))
            }
            None => Err(not_found()),
        }
    }

    /// Returns the places in which it waits for the chain.
    fn places(&self) -> &AdmissionQueue {
        if self.is_known { &self.seller.stale } else { &self.seller.unproven }
    }

    /// Notes what identifies the request: the voucher, the request's head and body, and the payment identifier if there is one.
    fn identify(&mut self, body: Option<BodyDigest>) {
        let PrecheckedVoucher { voucher, refund, .. } = &self.payment;
        let Identity { head, written, asked_id: id, .. } = self.identity;
        self.has_secret = head.names_caller || id.is_some() || body.is_some_and(|body| body.length > 0);
        let request = match refund {
            None => {
                let body = body.map_or(B256::ZERO, |body| body.digest);
                let with_body = |head: Fingerprint| keccak256([head.digest, body].concat());
                self.name = id.map(|id| RequestName { id, request: with_body(head) });
                let request = with_body(written.unwrap_or(head));
                keccak256([request, id.unwrap_or_default()].concat())
            }
            // It is the same wherever it is asked for. Its voucher may be the one that paid last.
            Some(None) => keccak256(b"refund of all"),
            Some(Some(amount)) => keccak256([&b"refund"[..], &amount.to_be_bytes()].concat()),
        };
        self.request_key = ChannelRecord::request_key(voucher, request);
        common::identify(self.request_key);
    }

    /// Returns the answer that the request got before: with this voucher or, under its payer's name for it, with another one.
    fn answer_in(&self, record: &ChannelRecord) -> Result<Option<Charged>, Refusal> {
        if let Some(charged) = record.answer_to(self.request_key) {
            return Ok(Some(*charged));
        }
        match self.name.and_then(|name| record.answer_named(name.id)) {
            Some(charged) if charged.name == self.name => Ok(Some(*charged)),
            Some(_) => Err(Why::OtherId.into()),
            None => Ok(None),
        }
    }

    pub(super) fn key(&self) -> PaymentKey {
        let ChannelConfig { token, payer, .. } = self.payment.config;
        PaymentKey { network: self.channels.network(), asset: token, payer, nonce: self.request_key }
    }

    /// Takes a permit to get an answer that is there, or to work.
    async fn permit(&self, for_answer: bool) -> Result<OwnedSemaphorePermit, Refusal> {
        let permit = match for_answer {
            true => self.seller.replays.enter_owned().await,
            false => self.seller.permits.clone().try_acquire_owned().ok(),
        };
        permit.ok_or_else(|| Why::Busy.into())
    }

    /// Waits for an event, as long as it has a place, until the deadline at most.
    async fn until(&self, deadline: Instant, event: impl Future<Output = Option<()>>) -> Result<(), Refusal> {
        tokio::time::timeout_at(deadline, event).await.ok().flatten().ok_or_else(|| self.busy())
    }

    /// Returns what names the channel as the owner of a place.
    fn channel(&self) -> B256 {
        self.payment.voucher.channel_id.digest()
    }

    /// Looks at the channel on the chain. Returns `None` if nothing is in it. Strangers can name channels that do not exist, so only so many
    /// do at once.
    async fn look(&self) -> Result<Option<ChannelRecord>, Refusal> {
        let _place = self.places().enter().await.ok_or(Why::Busy)?;
        let PrecheckedVoucher { config, voucher, .. } = &self.payment;
        self.channels.refresh(voucher.channel_id, config).await.map_err(|error| self.not_moved(&error))
    }

    /// Fills the channel, if the voucher is the right one then. A deposit that was made before is found and not made again.
    async fn fill(&self, known: Option<ChannelRecord>, made: &mut Option<Executed>) -> Result<ChannelRecord, Refusal> {
        let PrecheckedVoucher { config, voucher, deposit, price, .. } = &self.payment;
        let Some(deposit) = deposit else { return Err(self.busy()) };
        if deposit.amount < self.channels.least_deposit(*price) {
            // Each costs the seller a transaction.
            let detail =
                "the deposit is less than the smallest one that is taken (minDeposit, or the price of the request)";
            return Err(Refusal::rejected(reason::DEPOSIT_BELOW_MIN_DEPOSIT, detail));
        }
        let known = match known {
            Some(known) => Some(known),
            None => self.look().await?,
        };
        let covered = match &known {
            Some(known) => {
                self.check_amount(known)?;
                known.covered()
            }
            // The contract has nothing of it, so nothing was ever claimed.
            None if voucher.max_claimable_amount == *price => 0,
            None => {
                let detail = "the channel is new, and the voucher is not for the price of one request";
                return Err(Refusal::rejected(reason::CUMULATIVE_AMOUNT_MISMATCH, detail));
            }
        };
        if voucher.max_claimable_amount > covered.saturating_add(deposit.amount) {
            let detail = "the voucher is for more than what is in the channel and the deposit together";
            return Err(Refusal::rejected(reason::CUMULATIVE_EXCEEDS_BALANCE, detail));
        }
        let filled = self.channels.fill(config, voucher, deposit).await;
        let (executed, record) = filled.map_err(|error| self.not_moved(&error))?;
        common::moved(executed.transaction);
        *made = Some(executed);
        Ok(record)
    }

    /// Refuses a voucher that is not for what was charged and the price, before money is moved for it.
    fn check_amount(&self, record: &ChannelRecord) -> Result<(), Refusal> {
        match self.is_right(record) {
            true => Ok(()),
            false => Err(self.refused(ChannelLedgerError::Mismatch(Box::new(record.clone())))),
        }
    }

    /// Returns `true` if the voucher is for what was charged and the price.
    fn is_right(&self, record: &ChannelRecord) -> bool {
        record.charged().checked_add(self.payment.price) == Some(self.payment.voucher.max_claimable_amount)
    }

    /// Refuses work while too much of the channel is unclaimed, or for too long: as long as claims fail, all that is charged can be lost.
    fn check_credit(&self, record: &ChannelRecord) -> Result<(), Refusal> {
        if self.payment.price == 0 || self.channels.gives_credit(record, self.payment.price) {
            return Ok(());
        }
        Err(Why::Unclaimed.into())
    }

    /// Returns `true` if the books show that the channel covers the voucher.
    fn is_covered(&self, record: &ChannelRecord) -> bool {
        self.payment.voucher.max_claimable_amount <= record.covered()
    }

    /// Returns `true` if they show it, and the channel was looked at a short while ago.
    fn is_good(&self, record: &ChannelRecord) -> bool {
        self.channels.is_fresh(record) && self.is_covered(record)
    }

    /// Returns the response that the request got before.
    async fn replay(
        &self,
        presented: &mut impl Presented,
        record: &ChannelRecord,
        charged: Charged,
    ) -> Result<Next, Refusal> {
        let stored = self.channels.response(record, charged.request).await?;
        let (now, limits) = (self.seller.now(), &self.seller.rules.limits);
        let streamed = PaymentKey { nonce: charged.request, ..self.key() };
        let may_stream = charged.streamed && limits.lease_until(charged.at) >= now;
        if stored.is_none() && may_stream && !self.seller.in_progress.has_ended(&streamed) {
            // In another process, for as long as the lease of a payment by `exact`.
            return Err(Why::InProgress.into());
        }
        let receipt = receipt(Some(charged.charged), record, charged.total, None);
        if let Some(names) = stored.as_ref().and_then(|stored| presented.misfit(stored)) {
            return Err(Refusal::new(Why::OtherHeaders(names)).with_receipt(Some(receipt)));
        }
        let replays = match self.has_secret {
            true => charged.replays,
            false => {
                let step = ChannelStep::Replay { request: charged.request };
                let counted = self.channels.advance(&record.id, &step).await.map_err(|error| self.refused(error))?;
                counted.answer_to(charged.request).map_or(u32::MAX, |answer| answer.replays)
            }
        };
        match stored.filter(|_| limits.may_replay(self.has_secret, replays, age(now, charged.at))) {
            Some(stored) => Ok(Next::Replay(stored, receipt)),
            None => Err(Refusal::new(Why::Used).with_receipt(Some(receipt))),
        }
    }

    pub(super) fn busy(&self) -> Refusal {
        let detail = "another request of this channel is being worked on; repeat this one later";
        Refusal::rejected(reason::CHANNEL_BUSY, detail)
    }

    /// Withholds the newest voucher from strangers, who can have those that were claimed (invariant I7): they could buy with the rest of it. One
    /// that is used up is shown to anybody, and counts as public from then on.
    pub(super) async fn withhold(&self, mut refusal: Refusal) -> Refusal {
        let max = self.payment.voucher.max_claimable_amount;
        let Some(record) = refusal.channel_mut() else { return refusal };
        let Some(newest) = record.voucher.as_ref().map(|newest| newest.max_claimable_amount) else { return refusal };
        if newest == max || record.is_newest_claimed() || !record.may_be_public(max) {
            return refusal;
        }
        let is_shown = match record.is_used_up() {
            true if newest <= record.published => Ok(true),
            true => Ok(self.channels.advance(&record.id, &ChannelStep::Publish { max: newest }).await.is_ok()),
            false => self.has_signed_deposit().await,
        };
        match is_shown {
            Ok(true) => refusal,
            Ok(false) => {
                record.voucher = None;
                refusal
            }
            Err(unknown) => unknown,
        }
    }

    /// Returns `true` if a deposit came along that was not made yet: nobody but the payer can have signed it. One that has lost its books sends
    /// it. Fails if that cannot be found out now.
    async fn has_signed_deposit(&self) -> Result<bool, Refusal> {
        let Some(deposit) = &self.payment.deposit else { return Ok(false) };
        let _place = self.places().enter().await.ok_or(Why::Busy)?;
        match self.channels.verify_deposit(&self.payment.config, deposit).await {
            Ok(_) => Ok(true),
            Err(ChannelError::Unavailable(error)) => Err((&error).into()),
            Err(_) => Ok(false),
        }
    }

    /// The books refused the voucher. The payer is told what would be right, so that it can sign again.
    pub(super) fn refused(&self, error: ChannelLedgerError) -> Refusal {
        match error {
            ChannelLedgerError::Mismatch(record) => {
                let detail = "the voucher is not for what was charged so far and the price of this request";
                let rejection = Rejection::new(reason::CUMULATIVE_AMOUNT_MISMATCH.into(), detail);
                Why::Misstated(rejection, self.payment.offer, record).into()
            }
            ChannelLedgerError::ExceedsBalance(record) => {
                let detail = match record.observed.withdrawal {
                    0 => "the voucher is for more than what is in the channel; fill it",
                    _ => "a withdrawal was announced, and the rest of the channel does not cover the voucher",
                };
                Refusal::rejected(reason::CUMULATIVE_EXCEEDS_BALANCE, detail)
            }
            ChannelLedgerError::Ledger(error) => error.into(),
            _ => self.busy(),
        }
    }

    /// The chain was not asked, or money did not move.
    pub(super) fn not_moved(&self, error: &ChannelError) -> Refusal {
        match error {
            ChannelError::Rejected { reason, detail } => Refusal::rejected(*reason, detail.clone()),
            ChannelError::Pending { transaction } => Refusal::new(Why::Moving).with_transaction(*transaction),
            ChannelError::Unavailable(error) => error.into(),
        }
    }
}

fn not_found() -> Refusal {
    Refusal::rejected(reason::CHANNEL_NOT_FOUND, "nothing was deposited into this channel")
}
