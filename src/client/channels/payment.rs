//! One payment by voucher, from its signature to its receipt. `state.rs` decides what comes next; this does it.

use std::sync::Arc;

use alloy_primitives::B256;
use async_trait::async_trait;
use http::{HeaderMap, HeaderValue};

use super::{
    ChannelEntry, ChannelFinding, ChannelPolicy, PendingDeposit,
    books::{Terms, Wanted},
    entry::{Correction, Doubt, Means},
    lease::Lease,
    report::{Report, contradiction},
    state::{Code, DEPOSIT_FAILED, Event, Remedy, Sent, State, Tried, code_of, remedy},
};
use crate::{
    client::{
        ChannelReceipt, PaymentError, Receipt, Refusal,
        answer::{AnswerHead, NextStep, Said},
        budget::Reservation,
        challenge::{Challenge, header_of},
        offer::AcceptedOffer,
        payment::SchemePayment,
        sums::{less, plus},
        totals::{Charge, host_of},
        wallet::{Asked, Validity, Wallet, check_clock},
    },
    eip3009::TokenDomain,
    network::Asset,
    protocol::{Reason, SettlementResponse},
    usdc::Usdc,
    vouchers::{
        ChannelConfig, ChannelId, ChannelOffer, ChannelPayload, Deposit, Escrow, Voucher, VoucherSignature,
        VoucherState,
    },
};

/// How often a payment is signed again, whatever the seller answers.
const MAX_SIGNED_AGAIN: u32 = 4;

/// A payment by voucher that is under way.
pub(in crate::client) struct VoucherPayment {
    wallet: Arc<Wallet>,
    offered: Offered,
    terms: Terms,
    purchase: PurchaseName,
    hold: Hold,
    header: HeaderValue,
    sent: Sent,
    /// The present voucher's ceiling.
    max: Usdc,
    /// What was unclear before the present voucher was signed.
    before: Doubt,
    state: State,
    tried: Tried,
    /// What the seller can charge for this request by earlier vouchers, besides the present one (I15).
    cost: Usdc,
    /// The last voucher is to be sent again under the same identifier, since another one could cost too much.
    asks_again: bool,
    signed_again: u32,
    receipt: Receipt,
    channel_receipt: ChannelReceipt,
}

/// The offer that is paid.
struct Offered {
    challenge: Challenge,
    index: usize,
    asset: Asset,
    max_timeout: u64,
    /// This clock when the offer was there, and that of the seller when it was made.
    clocks: (u64, Option<u64>),
    /// The seller takes payment identifiers, and this payment has one.
    has_id: bool,
}

/// The name of the purchase that is paid for, as its hash.
#[derive(Clone, Copy)]
enum PurchaseName {
    None,
    /// It is signed for the first time.
    New(B256),
    /// It was signed for before, in this channel, and only there does the seller know it.
    Known(B256),
}

/// How the payment has its channel.
enum Hold {
    /// For itself.
    Held(Box<Lease>),
    /// The seller called it busy, and the payment has another one, for which nothing is signed yet. This deposit may be made there.
    Leaving { busy: Box<Lease>, next: Box<Lease>, deposit: Usdc },
    /// It was given back. Then this much was charged, and this was the last voucher.
    Paused { charged: Usdc, signed: Option<VoucherState> },
    /// Not any more.
    Gone,
}

impl VoucherPayment {
    /// Leases a channel for an offer, and signs. If the budget has no room for a deposit, a channel that needs none is waited for.
    ///
    /// A purchase that was `signed_in` a channel before is paid from there.
    pub(in crate::client) async fn sign(
        wallet: &Arc<Wallet>,
        challenge: &Challenge,
        (accepted, offer): (&AcceptedOffer, &ChannelOffer),
        asked: &Asked<'_>,
        signed_in: Option<ChannelId>,
    ) -> Result<Self, PaymentError> {
        let Some(policy) = &wallet.channels else { return Err(Refusal::NoPayableOffer { reasons: vec![] }.into()) };
        let (purchase, wanted) = match (asked.purchase, signed_in) {
            (None, _) => (PurchaseName::None, Wanted::Best),
            (Some((key, _)), None) => (PurchaseName::New(key), Wanted::Best),
            // Asking for its answer costs nothing, whatever the price is now.
            (Some((key, _)), Some(channel)) => (PurchaseName::Known(key), Wanted::Only(channel)),
        };
        if !purchase.is_known() {
            wallet.budget.check_price(accepted.amount)?;
        }
        let offer = (policy, challenge, accepted, offer);
        match Self::sign_in(wallet, offer, asked, (purchase, wanted)).await {
            Err(PaymentError::Refused(refusal)) if is_about_budget(&refusal) && !purchase.is_known() => {
                Self::sign_in(wallet, offer, asked, (purchase, Wanted::NoDeposit(&refusal))).await
            }
            signed => signed,
        }
    }

    async fn sign_in(
        wallet: &Arc<Wallet>,
        (policy, challenge, accepted, offer): (&ChannelPolicy, &Challenge, &AcceptedOffer, &ChannelOffer),
        asked: &Asked<'_>,
        (purchase, wanted): (PurchaseName, Wanted<'_>),
    ) -> Result<Self, PaymentError> {
        let (price, asset, clocks) = (accepted.amount, &accepted.offer.asset, (wallet.now(), asked.date));
        let config = ChannelConfig {
            payer: wallet.address(),
            payer_authorizer: policy.voucher_address(wallet.address()),
            receiver: accepted.offer.pay_to,
            receiver_authorizer: offer.receiver_authorizer,
            token: asset.address,
            withdraw_delay: offer.withdraw_delay,
            salt: policy.salt_of(0),
        };
        let target = policy.target(price, offer.min_deposit);
        let terms = Terms { network: asset.network, config, price, target };
        let (mut lease, deposit) = Lease::wait_for(&wallet.budget, policy, &terms, wanted, wallet.now()).await?;
        lease.entry.set_request(&host_of(asked.url), asked.method.as_str(), asked.url.as_str());
        let receipt =
            Receipt::signed((asset.network, asset.address), price, (config.payer, config.receiver), B256::ZERO);
        let channel_receipt = ChannelReceipt {
            id: lease.id(),
            config,
            price,
            left: Usdc::ZERO,
            deposit: None,
            charged: Usdc::ZERO,
            finding: None,
        };
        let mut challenge = challenge.clone();
        let has_id = challenge.add_payment_id(match purchase.key() {
            // The seller finds its answer by this, also after a restart.
            Some(key) => wallet.budget.journal().purchase_id(key, &*wallet.nonces).await?,
            None => wallet.nonces.next()?,
        });
        let max_timeout = accepted.offer.max_timeout_seconds;
        let mut payment = Self {
            wallet: wallet.clone(),
            offered: Offered { challenge, index: accepted.index, asset: asset.clone(), max_timeout, clocks, has_id },
            terms,
            purchase,
            hold: Hold::Gone,
            header: HeaderValue::from_static(""),
            sent: Sent::Voucher,
            max: Usdc::ZERO,
            before: Doubt::default(),
            state: State::Signed,
            tried: Tried::default(),
            cost: Usdc::ZERO,
            asks_again: false,
            signed_again: 0,
            receipt,
            channel_receipt,
        };
        let is_short = payment.is_short(&lease);
        payment.sign_for(Box::new(lease), deposit, purchase.is_known() && is_short).await?;
        Ok(payment)
    }

    /// Returns `true` if nothing can be signed without a deposit or above the limit per payment.
    fn is_short(&self, lease: &Lease) -> bool {
        let (now, price) = (self.wallet.now(), self.terms.price);
        lease.entry.means(price, now) != Means::Voucher || self.wallet.budget.check_price(price).is_err()
    }

    /// Signs what the channel needs now, records it, and makes the header. After an error nothing was sent.
    ///
    /// If it `asks`, it signs the last voucher again: the answer to a purchase that was signed for before may cost nothing. If the seller does not
    /// know the purchase, it refuses that voucher.
    async fn sign_for(&mut self, mut lease: Box<Lease>, deposit: Usdc, asks: bool) -> Result<(), PaymentError> {
        let (now, id, price) = (self.wallet.now(), lease.id(), self.terms.price);
        let entry = &mut lease.entry;
        let (mut reservation, mut along) = (None, None);
        let (sent, max) = match entry.last_signed().filter(|_| asks) {
            Some(last) => (Sent::Last, last),
            None => {
                self.wallet.budget.check_price(price)?;
                match entry.means(price, now) {
                    Means::Nothing => return Err(Refusal::DepositPending.into()),
                    Means::NewDeposit { needed } => {
                        reservation = Some(self.sign_deposit((id, &mut *entry), (needed, deposit), now).await?);
                        along = entry.pending.clone();
                    }
                    Means::PendingDeposit => along = entry.pending.clone(),
                    Means::Voucher => {}
                }
                let expires = along.as_ref().map(|pending| pending.valid_before);
                (expires.map_or(Sent::Voucher, |expires| Sent::Deposit { expires }), entry.ceiling(price))
            }
        };
        let (voucher, digest) = sign_voucher(&self.wallet, (id, &*entry), max).await?;
        let mut before = entry.sign(less(max, entry.charged), &voucher, along.is_some());
        if self.signed_again > 0 && self.channel_receipt.id == id {
            // The rest of the doubt is about earlier vouchers of this request.
            before = before.of_charge_up_to(self.before);
        }
        entry.used_at = now;
        if let Some(key) = self.purchase.key() {
            entry.add_purchase(key);
        }
        let channel_config = entry.config;
        let amount = along.as_ref().map(|pending| pending.amount);
        let payload = match along {
            Some(PendingDeposit { deposit, .. }) => ChannelPayload::Deposit { channel_config, voucher, deposit },
            None => ChannelPayload::Voucher { channel_config, voucher },
        };
        let Offered { challenge, index, .. } = &self.offered;
        let header = header_of(&challenge.channel_header(*index, &payload).map_err(PaymentError::encode)?)?;
        let lease = lease.write_durably(reservation).await.map_err(PaymentError::Journal)?;
        (self.header, self.sent, self.max, self.before) = (header, sent, max, before);
        self.receipt.nonce = digest;
        self.channel_receipt.id = id;
        self.channel_receipt.deposit = amount.or(self.channel_receipt.deposit);
        self.hold = Hold::Held(Box::new(lease));
        self.note(Event::Sent);
        Ok(())
    }

    async fn sign_deposit(
        &self,
        (id, entry): (ChannelId, &mut ChannelEntry),
        bounds: (Usdc, Usdc),
        now: u64,
    ) -> Result<Reservation, PaymentError> {
        let (wallet, (own, sellers)) = (&self.wallet, self.offered.clocks);
        let window = wallet.window(self.offered.max_timeout);
        check_clock(own, sellers, window)?;
        let charge =
            Charge { amount: self.terms.price, payee: entry.config.receiver, host: entry.host.clone(), signed_at: now };
        let (reservation, amount) = wallet.budget.reserve_deposit(charge, bounds, now)?;
        let (salt, domain) = (wallet.nonces.next()?, TokenDomain::of(&self.offered.asset));
        let units = u128::from(amount.atomic());
        let mut validity = Validity::new(window);
        let (deposit, valid_before) = loop {
            let valid_before = validity.begin(wallet.now());
            let deposit = Deposit::sign(id, units, valid_before, salt, &domain, &*wallet.signer).await?;
            if validity.is_good(wallet.now())? {
                break (deposit, valid_before);
            }
        };
        entry.add_deposit(PendingDeposit::new(deposit, amount, valid_before), now);
        Ok(reservation)
    }

    /// Signs for another channel than the busy one. If the budget has no room for a deposit, the payment stays with the busy one, and its
    /// voucher is sent again.
    async fn sign_in_place_of(
        &mut self,
        busy: Box<Lease>,
        next: Box<Lease>,
        deposit: Usdc,
    ) -> Result<(), PaymentError> {
        match self.sign_for(next, deposit, false).await {
            Err(PaymentError::Refused(refusal)) if is_about_budget(&refusal) => {
                self.hold = Hold::Held(busy);
                self.tried.leaving = true;
                Ok(())
            }
            signed => {
                let left = self.leave(busy).await;
                signed?;
                // Nothing is sent there while a later process would look for the purchase here.
                left?;
                self.cost = plus(self.cost, self.terms.price);
                self.channel_receipt.left = plus(self.channel_receipt.left, self.terms.price);
                self.tried = Tried::default();
                Ok(())
            }
        }
    }

    /// Gives a channel back whose seller called it busy, and which keeps the voucher.
    async fn leave(&self, mut busy: Box<Lease>) -> Result<(), PaymentError> {
        busy.entry.leave(self.terms.price);
        self.forget_purchase(&mut busy.entry);
        busy.leave_busy(self.wallet.now()).await.map_err(PaymentError::Journal)
    }

    /// Returns `true` if one more voucher may be signed for this request, although the seller could charge so much by earlier ones.
    fn may_sign_again(&self, cost: Usdc) -> bool {
        self.signed_again < MAX_SIGNED_AGAIN && plus(cost, self.terms.price) <= self.wallet.budget.per_payment()
    }

    fn sign_again_or_conclude(&mut self) -> NextStep {
        self.asks_again = false;
        match self.may_sign_again(self.cost) {
            true => NextStep::SignAgain,
            false => NextStep::Conclude,
        }
    }

    /// Does the same after a correction. If another voucher could cost too much, the last one asks for the answer: it allows nothing more, and a
    /// seller that takes ids gives the answer to a request that it has charged.
    fn sign_or_ask_again(&mut self) -> NextStep {
        let next = self.sign_again_or_conclude();
        self.asks_again = next == NextStep::Conclude && self.offered.has_id && self.signed_again < MAX_SIGNED_AGAIN;
        if self.asks_again { NextStep::SignAgain } else { next }
    }

    /// Takes another channel than the one that the seller calls busy, where one is free or may be opened.
    fn leave_busy_channel(&mut self) -> bool {
        let (Some(policy), Hold::Held(lease)) = (&self.wallet.channels, &self.hold) else { return false };
        let Some((mut next, deposit)) = lease.another(policy, &self.terms, self.wallet.now()) else { return false };
        let ChannelEntry { host, method, url, .. } = &lease.entry;
        next.entry.set_request(host, method, url);
        self.hold = match std::mem::replace(&mut self.hold, Hold::Gone) {
            Hold::Held(busy) => Hold::Leaving { busy, next: Box::new(next), deposit },
            other => other,
        };
        true
    }

    fn note(&mut self, event: Event) {
        self.state = self.state.after(event);
        self.receipt.outcome = self.state.outcome();
    }

    fn accepted(&mut self, event: Event, amount: Usdc, transaction: Option<B256>) {
        self.note(event);
        (self.receipt.amount, self.receipt.transaction, self.receipt.reason) = (amount, transaction, None);
    }

    fn unclear(&mut self, reason: Option<String>) {
        let with_deposit = matches!(self.sent, Sent::Deposit { .. });
        if let Hold::Held(lease) = &mut self.hold {
            // Also if an earlier attempt was refused.
            let amount = less(self.max, lease.entry.charged);
            lease.entry.unclear(amount, with_deposit);
        }
        self.note(Event::Unclear);
        self.receipt.reason = reason;
    }

    /// Notes that the seller charged nothing for this attempt.
    fn failed(&mut self, reason: String) {
        self.note(Event::Refused);
        if self.state == State::Refused
            && let Hold::Held(lease) = &mut self.hold
        {
            lease.entry.refused(self.before);
        }
        self.receipt.reason = Some(reason);
    }

    /// Notes that this channel did not pay for the purchase, unless an earlier voucher of it may have.
    fn forget_purchase(&self, entry: &mut ChannelEntry) {
        if let PurchaseName::New(key) = self.purchase {
            entry.forget_purchase(key);
        }
    }

    /// Notes that the seller reports a charge. The most that it may be is the price, or what it was when the purchase was signed for first; and by
    /// the last voucher, what that is for.
    fn reported(
        &mut self,
        (response, transaction): (SettlementResponse, Option<B256>),
        answer: &AnswerHead<'_>,
    ) -> Result<(), ChannelFinding> {
        let Hold::Held(lease) = &mut self.hold else { return Ok(()) };
        let entry = &mut lease.entry;
        let most = match (self.sent, self.purchase) {
            (Sent::Last, _) => less(self.max, entry.charged),
            (_, PurchaseName::Known(_)) => self.terms.price.max(entry.doubt),
            _ => self.terms.price,
        };
        // Without a name there is an earlier voucher if this one was signed in its place.
        let earlier = match self.purchase {
            PurchaseName::Known(_) => Some(entry.charged),
            PurchaseName::New(_) => Some(self.terms.price),
            PurchaseName::None => (self.signed_again > 0).then_some(self.terms.price),
        };
        let report = Report::of(response, entry, most, earlier.filter(|_| self.offered.has_id))?;
        let is_unused = report == Report::Charged(Usdc::ZERO) && !answer.status.is_success();
        match report {
            // The answer may be an old one that cost nothing: it says nothing about what was signed since, nor about a deposit.
            Report::Charged(Usdc::ZERO) if self.purchase.is_known() => {
                self.accepted(if is_unused { Event::Unused } else { Event::Repeated }, Usdc::ZERO, transaction);
            }
            Report::Charged(amount) => {
                if self.max > entry.escrow {
                    entry.deposit_arrived();
                }
                match (amount, self.state) {
                    (Usdc::ZERO, State::Signed) => entry.charge_nothing(self.before),
                    // An earlier copy may still be on its way.
                    (Usdc::ZERO, _) => entry.charge_nothing(entry.doubts()),
                    _ => entry.charge(amount, self.max),
                }
                self.accepted(if is_unused { Event::Unused } else { Event::Charged }, amount, transaction);
            }
            // By its word, the seller charged nothing for this voucher. The next answer tells.
            Report::Repeated(amount) => self.accepted(Event::Repeated, amount, transaction),
        }
        Ok(())
    }

    /// Notes an answer that contradicts the books, which stay as they are.
    fn contradicted(&mut self, finding: ChannelFinding, answer: &AnswerHead<'_>) -> NextStep {
        tracing::warn!(channel = %self.channel_receipt.id, %finding, "a payment response contradicts the books of its channel");
        self.unclear(Some(finding.to_string()));
        self.channel_receipt.finding = Some(finding);
        if answer.is_transient { answer.retry() } else { NextStep::Conclude }
    }

    /// Interprets a refusal with a reason code.
    fn refused(&mut self, reason: &Reason, answer: &AnswerHead<'_>) -> NextStep {
        let was_unclear = self.state == State::Unclear;
        self.failed(reason.to_string());
        let Hold::Held(lease) = &mut self.hold else { return NextStep::Conclude };
        let deposit_is_open = match self.sent {
            Sent::Deposit { .. } => was_unclear || self.before.is_about_deposit(),
            Sent::Voucher | Sent::Last => lease.entry.may_be_deposited(self.wallet.now()),
        };
        // An attempt that may be worked on stays where it is: only there does the seller know it.
        let may_leave = self.state == State::Refused
            && !self.purchase.is_known()
            && self.may_sign_again(plus(self.cost, self.terms.price));
        let Hold::Held(lease) = &mut self.hold else { return NextStep::Conclude };
        match remedy(Code::of(reason), self.sent, self.tried, may_leave, deposit_is_open) {
            Remedy::Leave => match self.leave_busy_channel() {
                true => NextStep::SignAgain,
                false => answer.retry(),
            },
            Remedy::Repeat => answer.retry(),
            Remedy::Correct => {
                self.tried.correction = true;
                self.correct(answer.headers, was_unclear)
            }
            Remedy::SignAgain => self.sign_again_or_conclude(),
            Remedy::AwaitDeposit => {
                lease.entry.presume_deposit(false);
                answer.retry()
            }
            Remedy::DepositAnew => {
                self.tried.deposit = true;
                lease.entry.escrow_is_missing();
                self.sign_again_or_conclude()
            }
            Remedy::CountOnDeposit => {
                self.tried.deposit = true;
                lease.entry.presume_deposit(true);
                self.sign_again_or_conclude()
            }
            Remedy::GiveUp => NextStep::Conclude,
        }
    }

    /// Compares the books with those of the seller.
    fn correct(&mut self, headers: &HeaderMap, was_unclear: bool) -> NextStep {
        let Hold::Held(lease) = &mut self.hold else { return NextStep::Conclude };
        let (id, before, was_known) = (lease.id(), lease.entry.charged, lease.entry.is_known());
        let (spent, opening) = (lease.entry.spent(), lease.entry.opening);
        let correction = correct(headers, id, &mut lease.entry);
        let is_opened = lease.entry.opening != opening;
        let grown = less(lease.entry.charged, before);
        let is_unexplained = self.before.is_about_charge() || !was_known || grown > self.terms.price;
        if was_unclear || !was_known || self.purchase.is_known() {
            // What no other request explains may have been charged for this very one, however the seller explains it.
            let others = if self.purchase.is_known() { Usdc::ZERO } else { self.before.charge() };
            self.cost = plus(self.cost, less(less(lease.entry.spent(), spent), others));
        }
        if let Correction::Charged(finding) = &correction {
            tracing::warn!(channel = %id, %finding, "a seller charged more than the answers explain");
            self.channel_receipt.finding = Some(finding.clone());
        }
        match correction {
            // An earlier attempt of this very payment was charged, and its answer is lost. It is not paid for twice. If an earlier request may
            // have been charged in its place, a seller that takes ids gives the answer again, or works for it: within the limit for this request.
            Correction::Adopted | Correction::Charged(_)
                if was_unclear && grown > Usdc::ZERO && !is_opened && !(self.offered.has_id && is_unexplained) =>
            {
                self.note(Event::Charged);
                // The rest is of others.
                self.receipt.amount = grown.min(self.terms.price);
                self.receipt.reason = Some("the seller charged the request, and its answer is lost".into());
                NextStep::Conclude
            }
            Correction::Adopted | Correction::Charged(_) => self.sign_or_ask_again(),
            Correction::Unproven => {
                self.channel_receipt.finding = Some(ChannelFinding::Unproven);
                NextStep::Conclude
            }
            Correction::Disputed(finding) => {
                tracing::warn!(channel = %id, %finding, "a seller contradicts the books of its channel");
                self.receipt.reason = Some(finding.to_string());
                self.channel_receipt.finding = Some(finding);
                NextStep::Conclude
            }
        }
    }

    fn whole_receipt(&self) -> Receipt {
        Receipt { channel: Some(self.channel_receipt.clone()), ..self.receipt.clone() }
    }
}

#[async_trait]
impl SchemePayment for VoucherPayment {
    fn header(&self) -> &HeaderValue {
        &self.header
    }

    /// A voucher never expires.
    fn valid_before(&self) -> u64 {
        match self.sent {
            Sent::Deposit { expires } => expires,
            Sent::Voucher | Sent::Last => u64::MAX,
        }
    }

    fn nonce(&self) -> B256 {
        self.receipt.nonce
    }

    fn set_sent(&mut self) {
        self.note(Event::Sent);
    }

    fn answered(&mut self, answer: &AnswerHead<'_>) -> NextStep {
        let Hold::Held(lease) = &self.hold else { return NextStep::Conclude };
        let said = answer.said(lease.entry.network, lease.entry.config.payer);
        let why = said.why(answer.status);
        match said {
            Said::Paid { response, transaction } => match self.reported((*response, transaction), answer) {
                Ok(()) => NextStep::Conclude,
                Err(finding) => self.contradicted(finding, answer),
            },
            Said::Contradiction(what) => self.contradicted(contradiction(what), answer),
            // A deposit that failed may be the facilitator's own fault, and perhaps it was sent. The same one can be made only once.
            Said::Failed { reason, transaction }
                if reason == Reason::SettlementPending || code_of(&reason) == DEPOSIT_FAILED =>
            {
                self.unclear(why);
                self.receipt.transaction = transaction;
                answer.retry()
            }
            Said::Failed { reason, transaction } => {
                self.receipt.transaction = transaction;
                self.refused(&reason, answer)
            }
            Said::Refused(reason) => self.refused(&reason, answer),
            Said::AskedAgain(_) => {
                self.unclear(why);
                NextStep::Conclude
            }
            Said::Rejected | Said::Nothing if answer.is_transient => {
                self.unclear(Some(format!("the server answered {}", answer.status)));
                answer.retry()
            }
            Said::Rejected => {
                self.failed(why.unwrap_or_default());
                NextStep::Conclude
            }
            Said::Nothing => {
                self.unclear(why);
                NextStep::Conclude
            }
        }
    }

    fn unanswered(&mut self) -> NextStep {
        if let Hold::Held(_) = self.hold {
            self.unclear(None);
        }
        NextStep::Retry { after: None }
    }

    async fn sign_again(&mut self) -> Result<(), PaymentError> {
        self.signed_again += 1;
        match std::mem::replace(&mut self.hold, Hold::Gone) {
            Hold::Leaving { busy, next, deposit } => self.sign_in_place_of(busy, next, deposit).await,
            Hold::Held(lease) => {
                let asks = std::mem::take(&mut self.asks_again);
                let means = lease.entry.means(self.terms.price, self.wallet.now());
                let deposit = match (means, &self.wallet.channels) {
                    (Means::NewDeposit { .. }, Some(policy)) if !asks => lease.promise(policy, &self.terms),
                    _ => Ok(Usdc::ZERO),
                };
                match deposit {
                    Ok(deposit) => self.sign_for(lease, deposit, asks).await,
                    Err(refusal) => {
                        self.hold = Hold::Held(lease);
                        Err(refusal.into())
                    }
                }
            }
            given_back => {
                self.hold = given_back;
                Ok(())
            }
        }
    }

    async fn finish(&mut self) -> Receipt {
        match std::mem::replace(&mut self.hold, Hold::Gone) {
            // The channel that was taken in its place has no voucher of this payment.
            Hold::Leaving { busy, .. } => {
                self.channel_receipt.charged = busy.entry.charged;
                if let Err(error) = self.leave(busy).await {
                    tracing::warn!(%error, "a payment channel that was left could not be written to the journal");
                }
            }
            Hold::Held(mut lease) => {
                if matches!(self.state, State::Unused | State::Refused) {
                    self.forget_purchase(&mut lease.entry);
                }
                self.channel_receipt.charged = lease.entry.charged;
                self.hold = paused(&lease);
                lease.write_soon().await;
            }
            given_back => self.hold = given_back,
        }
        self.whole_receipt()
    }

    /// What was signed is in the books, and stays in doubt.
    fn pause(&mut self) {
        self.hold = match std::mem::replace(&mut self.hold, Hold::Gone) {
            Hold::Held(lease) => paused(&lease),
            Hold::Leaving { .. } => Hold::Gone,
            given_back => given_back,
        };
    }

    /// Takes the channel again, unless it is in use, or others have used it since. A voucher that was charged needs no channel to ask for its
    /// answer again. After a refusal the next voucher is for the same sum.
    fn resume(&mut self, was_sent: bool) -> bool {
        match self.state {
            State::Charged => return true,
            State::Refused | State::Unused => return false,
            State::Signed | State::Unclear | State::Repeated => {}
        }
        let Hold::Paused { charged, signed } = self.hold else { return false };
        let Some(lease) = Lease::get(&self.wallet.budget, self.channel_receipt.id) else { return false };
        if (charged, signed) != (lease.entry.charged, lease.entry.signed) {
            return false;
        }
        // Others may have signed the same meanwhile.
        self.before = lease.entry.doubts();
        self.hold = Hold::Held(Box::new(lease));
        // An earlier request may have had no attempt left for what it was about to try.
        self.tried = Tried::default();
        // Its caller may have gone away before there was an answer.
        if was_sent {
            self.note(Event::Resumed);
        }
        true
    }

    fn is_in_journal(&self) -> bool {
        false
    }

    fn is_unused(&self) -> bool {
        self.state == State::Unused
    }
}

impl PurchaseName {
    const fn key(self) -> Option<B256> {
        match self {
            Self::None => None,
            Self::New(key) | Self::Known(key) => Some(key),
        }
    }

    const fn is_known(self) -> bool {
        matches!(self, Self::Known(_))
    }
}

fn paused(lease: &Lease) -> Hold {
    Hold::Paused { charged: lease.entry.charged, signed: lease.entry.signed }
}

/// Returns `true` if the budget has no room for a deposit.
const fn is_about_budget(refusal: &Refusal) -> bool {
    matches!(
        refusal,
        Refusal::AboveTotalLimit { .. }
            | Refusal::AbovePayeeLimit { .. }
            | Refusal::AboveHostLimit { .. }
            | Refusal::AboveWindowLimit { .. }
    )
}

/// Compares the books of a channel with the seller's in a corrective 402.
pub(super) fn correct(headers: &HeaderMap, id: ChannelId, entry: &mut ChannelEntry) -> Correction {
    let theirs = Challenge::read(headers, None).ok().flatten();
    let theirs = theirs.and_then(|challenge| challenge.channel_offer(entry)).map(|(_, offer)| offer);
    let state = theirs.as_ref().and_then(|offer| offer.channel_state.as_ref());
    let voucher = theirs.as_ref().and_then(|offer| offer.voucher_state.as_ref());
    entry.correct(state.filter(|state| state.channel_id == id), voucher)
}

/// Signs a voucher for `max` with the payer's voucher key. Returns its digest, too.
pub(super) async fn sign_voucher(
    wallet: &Wallet,
    (channel_id, entry): (ChannelId, &ChannelEntry),
    max: Usdc,
) -> Result<(Voucher, B256), PaymentError> {
    let max_claimable_amount = u128::from(max.atomic());
    let digest = Escrow::on(entry.network).voucher_digest(channel_id, max_claimable_amount);
    let key = wallet.channels.as_ref().and_then(|policy| policy.voucher_key.as_deref());
    let signature = key.unwrap_or(&*wallet.signer).sign_digest(digest).await?;
    let bytes: [u8; 65] = signature.as_bytes().try_into().map_err(PaymentError::encode)?;
    let signature = VoucherSignature::try_from(bytes).map_err(PaymentError::encode)?;
    Ok((Voucher { channel_id, max_claimable_amount, signature }, digest))
}

debug_fields!(VoucherPayment { receipt });
