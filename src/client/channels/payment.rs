//! One payment by voucher, from its signature to its receipt.

use std::time::Duration;

use alloy_primitives::B256;
use http::{HeaderMap, HeaderValue, StatusCode};

use super::{
    ChannelEntry, ChannelFinding, PendingDeposit,
    answer::Report,
    books::Terms,
    entry::{Correction, Doubt, Means, less, plus},
    lease::Lease,
};
use crate::{
    client::{
        NextStep, Payer, PaymentError, PaymentOutcome, Receipt, Refusal,
        budget::{Charge, Reservation, host_of},
        offer::{AcceptedOffer, Challenge},
        payer::{Asked, Validity},
        payment::{header_of, is_rejection},
    },
    eip3009::TokenDomain,
    network::Asset,
    protocol::Reason,
    usdc::Usdc,
    vouchers::{
        ChannelConfig, ChannelId, ChannelOffer, ChannelPayload, Deposit, Escrow, Voucher, VoucherSignature,
        VoucherState,
    },
};

/// How often a payment is signed again, whatever the seller answers.
const MAX_SIGNED_AGAIN: u32 = 4;
/// The prefix of the scheme's reason codes.
const PREFIX: &str = "invalid_batch_settlement_evm_";

/// The channel's part of a [`Receipt`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelReceipt {
    /// The channel.
    pub id: ChannelId,
    /// The fields that make the channel: who paid, who may claim, in which token.
    pub config: ChannelConfig,
    /// The price of the request: the most that it could cost in this channel. [`Receipt::amount`] is what the seller charged of it.
    pub price: Usdc,
    /// What it could cost in other channels, which it left because the seller called them busy: their seller has a voucher of this request,
    /// too. With the price it is within [`BudgetBuilder::per_payment`](crate::client::BudgetBuilder::per_payment). A charge of such a voucher
    /// is a [finding](ChannelFinding::ChargedRefused) of a later request.
    pub left: Usdc,
    /// The deposit that was sent along, if one was.
    pub deposit: Option<Usdc>,
    /// What was charged in the channel in all.
    pub charged: Usdc,
    /// Something that the seller said which contradicts the books.
    pub finding: Option<ChannelFinding>,
}

/// A payment by voucher that is under way. It has its channel for itself.
pub(in crate::client) struct VoucherPayment {
    payer: Payer,
    /// `None` only while it is written.
    lease: Option<Lease>,
    challenge: Challenge,
    index: usize,
    asset: Asset,
    max_timeout: u64,
    terms: Terms,
    header: HeaderValue,
    /// When the deposit expires that is sent along.
    deposit_expires: Option<u64>,
    /// The hash of the purchase's key, if it has a name. The seller may have charged it before under that.
    purchase: Option<B256>,
    /// It was signed for before, in this channel, and only there does the seller know it.
    is_repeated: bool,
    /// The seller was sent a voucher.
    was_asked: bool,
    /// That is the last one that was signed before, to ask for the answer.
    is_asking: bool,
    /// The seller takes payment identifiers, and this one has one.
    has_id: bool,
    /// What was unclear before this payment was sent.
    doubt: Doubt,
    /// The voucher counts on the pending deposit, which is sent along or presumed to have arrived.
    needs_deposit: bool,
    /// An attempt of this payment had no clear answer.
    in_doubt: bool,
    /// The present voucher was charged, by the seller's word: it has the answer, and needs no channel for it.
    is_charged: bool,
    /// The work failed, and the voucher was charged with nothing.
    is_unused: bool,
    is_corrected: bool,
    is_switched: bool,
    /// The channel that is left for another one, which is not signed for yet, and the deposit that may be made there.
    left: Option<(Lease, Usdc)>,
    may_leave: bool,
    /// What the seller can charge for this request by earlier vouchers, besides the present one.
    cost: Usdc,
    signed_again: u32,
    /// What was charged and signed when the channel was given back.
    paused_at: Option<(Usdc, Option<VoucherState>)>,
    receipt: Receipt,
}

impl VoucherPayment {
    /// Leases a channel for an offer, and signs. If the budget has no room for a deposit, a channel that needs none is waited for.
    pub(in crate::client) async fn sign(
        payer: &Payer,
        challenge: &Challenge,
        accepted: &AcceptedOffer,
        channel: &ChannelOffer,
        asked: &Asked<'_>,
    ) -> Result<Self, PaymentError> {
        match Self::sign_from_best(payer, challenge, accepted, channel, asked, None).await {
            Err(PaymentError::Refused(refusal)) if is_about_budget(&refusal) => {
                Self::sign_from_best(payer, challenge, accepted, channel, asked, Some(&refusal)).await
            }
            other => other,
        }
    }

    async fn sign_from_best(
        payer: &Payer,
        challenge: &Challenge,
        accepted: &AcceptedOffer,
        channel: &ChannelOffer,
        asked: &Asked<'_>,
        no_deposit: Option<&Refusal>,
    ) -> Result<Self, PaymentError> {
        let Some(policy) = payer.channel_policy() else {
            return Err(Refusal::NoPayableOffer { reasons: vec![] }.into());
        };
        let (budget, price, asset) = (payer.budget(), accepted.amount, &accepted.offer.asset);
        budget.check_price(price)?;
        let config = ChannelConfig {
            payer: payer.address(),
            payer_authorizer: policy.voucher_address(payer.address()),
            receiver: accepted.offer.pay_to,
            receiver_authorizer: channel.receiver_authorizer,
            token: asset.address,
            withdraw_delay: channel.withdraw_delay,
            salt: policy.salt_of(0),
        };
        let target = policy.target(price, channel.min_deposit);
        let purchase = asked.purchase.map(|(key, _)| key);
        let only = purchase.and_then(|key| budget.journal().with_books(|books| books.of_purchase(key)));
        let terms = Terms { network: asset.network, config, price, target, only };
        let (mut lease, deposit) = Lease::best(budget, policy, &terms, payer.now(), no_deposit).await?;
        let entry = &mut lease.entry;
        if entry.host.is_empty() {
            entry.host = host_of(asked.url);
        }
        (entry.method, entry.url) = (asked.method.to_string(), asked.url.to_string());
        let id = lease.id();
        let receipt = Receipt {
            outcome: PaymentOutcome::Unknown,
            transaction: None,
            network: asset.network,
            asset: asset.address,
            amount: price,
            payer: config.payer,
            pay_to: config.receiver,
            nonce: B256::ZERO,
            reason: None,
            channel: Some(ChannelReceipt {
                id,
                config,
                price,
                left: Usdc::ZERO,
                deposit: None,
                charged: Usdc::ZERO,
                finding: None,
            }),
        };
        let mut challenge = challenge.clone();
        let has_id = challenge.add_payment_id(match asked.purchase {
            // The seller finds its answer by this, also after a restart.
            Some((key, _)) => budget.journal().purchase_id(key, payer.nonces()).await?,
            None => payer.nonces().next()?,
        });
        let mut payment = Self {
            payer: payer.clone(),
            lease: Some(lease),
            challenge,
            index: accepted.index,
            asset: asset.clone(),
            max_timeout: accepted.offer.max_timeout_seconds,
            terms,
            header: HeaderValue::from_static(""),
            deposit_expires: None,
            purchase,
            is_repeated: only.is_some(),
            was_asked: false,
            is_asking: false,
            has_id,
            doubt: Doubt::default(),
            needs_deposit: false,
            in_doubt: false,
            is_charged: false,
            is_unused: false,
            is_corrected: false,
            is_switched: false,
            left: None,
            may_leave: true,
            cost: Usdc::ZERO,
            signed_again: 0,
            paused_at: None,
            receipt,
        };
        payment.sign_for(deposit).await?;
        Ok(payment)
    }

    /// Signs what the channel needs now, records it, and makes the header. After an error nothing was sent.
    async fn sign_for(&mut self, deposit: Usdc) -> Result<(), PaymentError> {
        let Some(mut lease) = self.lease.take() else { return Err(Refusal::DepositPending.into()) };
        let now = self.payer.now();
        let (id, entry, price) = (lease.id(), &mut lease.entry, self.terms.price);
        let is_first = !std::mem::replace(&mut self.was_asked, true);
        let means = entry.means(price, now);
        // The answer to a purchase that was signed for before may cost nothing. If the seller does not know the purchase, it refuses the last
        // voucher, and another one is signed.
        let last = entry.last_signed().filter(|_| self.is_repeated && is_first && means != Means::Voucher);
        self.is_asking = last.is_some();
        let (means, max) = last.map_or((means, entry.ceiling(price)), |last| (Means::Voucher, last));
        let reservation = match means {
            Means::NewDeposit { needed } => Some(self.sign_deposit((id, entry), (needed, deposit), now).await?),
            Means::Nothing => return Err(Refusal::DepositPending.into()),
            Means::Voucher | Means::PendingDeposit => None,
        };
        let deposit = entry.pending.clone().filter(|_| means != Means::Voucher);
        self.needs_deposit = max > entry.escrow;
        let (voucher, digest) = sign_voucher(&self.payer, (id, entry), max).await?;
        self.doubt = entry.sign(price, &voucher, deposit.is_some());
        entry.used_at = now;
        if let Some(key) = self.purchase {
            entry.add_purchase(key);
        }

        let channel_config = entry.config;
        let sent = deposit.as_ref().map(|pending| (pending.amount, pending.valid_before));
        let payload = match deposit {
            Some(PendingDeposit { deposit, .. }) => ChannelPayload::Deposit { channel_config, voucher, deposit },
            None => ChannelPayload::Voucher { channel_config, voucher },
        };
        let text = self.challenge.channel_header(self.index, &payload).map_err(PaymentError::encode)?;
        self.header = header_of(&text)?;
        self.deposit_expires = sent.map(|(_, valid_before)| valid_before);
        self.receipt.nonce = digest;
        if let Some(receipt) = &mut self.receipt.channel {
            receipt.deposit = sent.map(|(amount, _)| amount).or(receipt.deposit);
        }
        self.lease = Some(lease.write(true, reservation).await.map_err(PaymentError::Journal)?);
        Ok(())
    }

    async fn sign_deposit(
        &self,
        (id, entry): (ChannelId, &mut ChannelEntry),
        bounds: (Usdc, Usdc),
        now: u64,
    ) -> Result<Reservation, PaymentError> {
        let charge =
            Charge { amount: self.terms.price, payee: entry.config.receiver, host: entry.host.clone(), signed_at: now };
        let (reservation, amount) = self.payer.budget().reserve_deposit(charge, bounds, now)?;
        let (salt, domain) = (self.payer.nonces().next()?, TokenDomain::of(&self.asset));
        let units = u128::from(amount.atomic());
        let mut validity = Validity::new(self.payer.window(self.max_timeout));
        let (deposit, valid_before) = loop {
            let valid_before = validity.begin(self.payer.now());
            let deposit = Deposit::sign(id, units, valid_before, salt, &domain, self.payer.signer()).await?;
            if validity.is_good(self.payer.now())? {
                break (deposit, valid_before);
            }
        };
        entry.add_deposit(PendingDeposit::new(deposit, amount, valid_before), now);
        Ok(reservation)
    }

    pub(in crate::client) const fn header(&self) -> &HeaderValue {
        &self.header
    }

    /// A voucher never expires.
    pub(in crate::client) fn valid_before(&self) -> u64 {
        self.deposit_expires.unwrap_or(u64::MAX)
    }

    /// Signs again, after [`NextStep::SignAgain`].
    pub(in crate::client) async fn sign_again(&mut self) -> Result<(), PaymentError> {
        if let Some((busy, deposit)) = self.left.take() {
            return self.sign_in_place_of(busy, deposit).await;
        }
        let Some(lease) = &self.lease else { return Ok(()) };
        let deposit = match (lease.entry.means(self.terms.price, self.payer.now()), self.payer.channel_policy()) {
            (Means::NewDeposit { .. }, Some(policy)) => lease.promise(policy, &self.terms)?,
            _ => Usdc::ZERO,
        };
        self.sign_for(deposit).await
    }

    /// Signs for another channel than the busy one. If the budget has no room for a deposit, the payment stays with the busy one, and its
    /// voucher is sent again.
    async fn sign_in_place_of(&mut self, mut busy: Lease, deposit: Usdc) -> Result<(), PaymentError> {
        let (doubt, needs_deposit) = (self.doubt, self.needs_deposit);
        match self.sign_for(deposit).await {
            Err(PaymentError::Refused(refusal)) if is_about_budget(&refusal) => {
                (self.lease, self.doubt, self.needs_deposit) = (Some(busy), doubt, needs_deposit);
                self.may_leave = false;
            }
            signed => {
                busy.entry.leave(self.terms.price);
                self.forget_purchase(&mut busy.entry);
                busy.leave_busy(self.payer.now()).await;
                signed?;
                self.cost = plus(self.cost, self.terms.price);
                if let Some(receipt) = &mut self.receipt.channel {
                    receipt.left = plus(receipt.left, self.terms.price);
                }
                (self.is_corrected, self.is_switched) = (false, false);
            }
        }
        if let (Some(receipt), Some(lease)) = (&mut self.receipt.channel, &self.lease) {
            receipt.id = lease.id();
        }
        Ok(())
    }

    /// Takes another channel than the one that the seller calls busy, where one is free or may be opened, and if the seller may charge the
    /// request in both.
    ///
    /// An attempt that may be worked on stays where it is: only there does the seller know it.
    fn leave_busy_lane(&mut self) -> bool {
        let (Some(policy), Some(lease)) = (self.payer.channel_policy(), &self.lease) else { return false };
        let is_stuck = self.in_doubt || self.is_repeated || self.deposit_expires.is_some() || !self.may_leave;
        if is_stuck || !self.may_sign_again(plus(self.cost, self.terms.price)) {
            return false;
        }
        let Some((other, deposit)) = lease.another(policy, &self.terms, self.payer.now()) else { return false };
        self.signed_again += 1;
        self.left = self.lease.replace(other).map(|busy| (busy, deposit));
        true
    }

    /// Returns `true` if one more voucher may be signed for this request, although the seller could charge so much by earlier ones.
    fn may_sign_again(&self, cost: Usdc) -> bool {
        self.signed_again < MAX_SIGNED_AGAIN && plus(cost, self.terms.price) <= self.payer.budget().per_payment()
    }

    fn sign_again_or_conclude(&mut self) -> NextStep {
        if !self.may_sign_again(self.cost) {
            return NextStep::Conclude;
        }
        self.signed_again += 1;
        NextStep::SignAgain
    }

    /// Interprets an answer. `transient` says whether the status alone makes it worth sending the payment again.
    pub(in crate::client) fn answered(
        &mut self,
        status: StatusCode,
        headers: &HeaderMap,
        transient: bool,
        retry_after: Option<Duration>,
    ) -> NextStep {
        let Some(lease) = &self.lease else { return NextStep::Conclude };
        let retry = NextStep::Retry { after: retry_after };
        // The price may have been another one when the purchase was signed for first.
        let most = if self.is_repeated { self.terms.price.max(lease.entry.doubt) } else { self.terms.price };
        match Report::read(headers, &lease.entry, (most, self.has_id)) {
            Report::Charged { amount, transaction } => {
                self.charged(amount, transaction);
                if amount == Usdc::ZERO && !status.is_success() {
                    // The work failed: what comes next under its name is bought anew.
                    self.is_unused = true;
                }
                NextStep::Conclude
            }
            // By its word, the seller charged nothing for this voucher. The next answer tells.
            Report::Repeated { amount, transaction } => {
                self.accepted(amount, transaction);
                NextStep::Conclude
            }
            Report::Failed { reason: Reason::SettlementPending, transaction } => {
                self.unclear(Some("settlement_pending".into()));
                self.receipt.transaction = transaction;
                retry
            }
            // Perhaps the facilitator's own fault, and perhaps it was sent. The same deposit can be made only once.
            Report::Failed { reason, transaction } if code_of(&reason) == "deposit_transaction_failed" => {
                self.unclear(Some(reason.to_string()));
                self.receipt.transaction = transaction;
                retry
            }
            Report::Failed { reason, transaction } => {
                self.receipt.transaction = transaction;
                self.refused(&reason, headers, retry)
            }
            Report::Contradiction(finding) => {
                tracing::warn!(channel = %lease.id(), %finding, "a payment response contradicts the books of its channel");
                self.unclear(Some(finding.to_string()));
                self.find(finding);
                if transient { retry } else { NextStep::Conclude }
            }
            Report::None if status == StatusCode::PAYMENT_REQUIRED => {
                let challenge = Challenge::read(headers, None).ok().flatten();
                match challenge.as_ref().and_then(Challenge::reason) {
                    Some(reason) => self.refused(&reason, headers, retry),
                    None => {
                        self.unclear(Some("the server asked again".into()));
                        NextStep::Conclude
                    }
                }
            }
            Report::None if transient => {
                self.unclear(Some(format!("the server answered {status}")));
                retry
            }
            Report::None if status.is_redirection() || is_rejection(status) => {
                self.failed(format!("the server answered {status}"));
                NextStep::Conclude
            }
            Report::None => {
                self.unclear(Some(format!("the server answered {status} without a receipt")));
                NextStep::Conclude
            }
        }
    }

    /// Notes that no answer came.
    pub(in crate::client) fn unanswered(&mut self) -> NextStep {
        if self.lease.is_some() {
            self.unclear(None);
        }
        NextStep::Retry { after: None }
    }

    fn charged(&mut self, amount: Usdc, transaction: Option<B256>) {
        let Some(lease) = &mut self.lease else { return };
        if self.needs_deposit {
            lease.entry.deposit_arrived();
        }
        lease.entry.charge(amount);
        self.is_charged = true;
        self.accepted(amount, transaction);
    }

    fn accepted(&mut self, amount: Usdc, transaction: Option<B256>) {
        self.in_doubt = false;
        self.receipt.outcome = PaymentOutcome::Accepted;
        self.receipt.amount = amount;
        self.receipt.transaction = transaction;
        self.receipt.reason = None;
    }

    fn unclear(&mut self, reason: Option<String>) {
        self.in_doubt = true;
        if let Some(lease) = &mut self.lease {
            // Also if an earlier attempt was refused.
            lease.entry.unclear(self.terms.price, self.deposit_expires.is_some());
        }
        self.receipt.outcome = PaymentOutcome::Unknown;
        self.receipt.reason = reason;
    }

    /// Notes that the seller charged nothing for this attempt. After an unclear attempt that says nothing about the earlier one.
    fn failed(&mut self, reason: String) {
        if !self.in_doubt
            && let Some(lease) = &mut self.lease
        {
            lease.entry.refused(self.doubt);
        }
        self.receipt.outcome = if self.in_doubt { PaymentOutcome::Unknown } else { PaymentOutcome::Failed };
        self.receipt.reason = Some(reason);
    }

    /// Notes that this channel did not pay for the purchase, unless an earlier voucher of it may have.
    fn forget_purchase(&self, entry: &mut ChannelEntry) {
        if let Some(key) = self.purchase.filter(|_| !self.is_repeated) {
            entry.forget_purchase(key);
        }
    }

    fn find(&mut self, finding: ChannelFinding) {
        if let Some(receipt) = &mut self.receipt.channel {
            receipt.finding = Some(finding);
        }
    }

    /// Interprets a refusal with a reason code.
    fn refused(&mut self, reason: &Reason, headers: &HeaderMap, retry: NextStep) -> NextStep {
        let (was_in_doubt, with_deposit) = (self.in_doubt, self.deposit_expires.is_some());
        self.failed(reason.to_string());
        if code_of(reason) == "channel_busy" && self.leave_busy_lane() {
            return NextStep::SignAgain;
        }
        let Some(lease) = &mut self.lease else { return NextStep::Conclude };
        let may_have_arrived = with_deposit && (was_in_doubt || self.doubt.is_about_deposit());
        match code_of(reason) {
            "channel_busy" | "verification_state_unavailable" | "rpc_read_failed" => retry,
            "cumulative_amount_mismatch" | "cumulative_below_claimed" if !self.is_corrected => {
                self.is_corrected = true;
                self.correct(headers, was_in_doubt)
            }
            // The seller does not know the purchase: it is paid for now.
            _ if self.is_asking => self.sign_again_or_conclude(),
            // The deposit may be on its way into a block. The voucher is sent again, and then the same deposit, but no other one.
            "channel_not_found" | "cumulative_exceeds_balance"
                if !with_deposit && lease.entry.may_be_deposited(self.payer.now()) =>
            {
                lease.entry.presume_deposit(false);
                retry
            }
            "channel_not_found" | "cumulative_exceeds_balance" if !with_deposit && !self.is_switched => {
                self.is_switched = true;
                lease.entry.escrow_is_missing();
                self.sign_again_or_conclude()
            }
            // The deposit cannot be made, perhaps because it was made before.
            "deposit_simulation_failed"
            | "deposit_transaction_failed"
            | "receive_authorization_signature"
            | "insufficient_balance"
                if may_have_arrived && !self.is_switched =>
            {
                self.is_switched = true;
                lease.entry.presume_deposit(true);
                self.sign_again_or_conclude()
            }
            _ => NextStep::Conclude,
        }
    }

    /// Compares the books with those of the seller, once per payment.
    fn correct(&mut self, headers: &HeaderMap, was_in_doubt: bool) -> NextStep {
        let is_unclear_before = self.doubt.is_about_charge();
        let Some(lease) = &mut self.lease else { return NextStep::Conclude };
        let (id, before, was_known) = (lease.id(), lease.entry.charged, lease.entry.is_known);
        let theirs = Challenge::read(headers, None).ok().flatten();
        let theirs = theirs.and_then(|challenge| challenge.channel_offer(&lease.entry)).map(|(_, offer)| offer);
        let state = theirs.as_ref().and_then(|offer| offer.channel_state.as_ref());
        let state = state.filter(|state| state.channel_id == id);
        let voucher = theirs.as_ref().and_then(|offer| offer.voucher_state.as_ref());
        let correction = lease.entry.correct(state, voucher);
        let grown = less(lease.entry.charged, before);
        let is_unexplained = is_unclear_before || !was_known || grown > self.terms.price;
        if let Correction::Charged(finding) = &correction {
            tracing::warn!(channel = %id, %finding, "a seller charged a request that it had refused");
            if !was_known {
                // It may be this very request.
                self.cost = plus(self.cost, grown);
            }
            self.find(finding.clone());
        }
        match correction {
            // An earlier attempt of this very payment was charged, and its answer is lost. It is not paid for twice. If an earlier request may
            // have been charged in its place, a seller that takes ids gives the answer again, or works for it.
            Correction::Adopted | Correction::Charged(_)
                if was_in_doubt && grown > Usdc::ZERO && !(self.has_id && is_unexplained) =>
            {
                self.is_charged = true;
                self.receipt.outcome = PaymentOutcome::Accepted;
                self.receipt.amount = grown;
                self.receipt.reason = Some("the seller charged the request, and its answer is lost".into());
                self.in_doubt = false;
                NextStep::Conclude
            }
            Correction::Adopted | Correction::Charged(_) => self.sign_again_or_conclude(),
            Correction::Unproven => {
                self.find(ChannelFinding::Unproven);
                NextStep::Conclude
            }
            Correction::Disputed(finding) => {
                tracing::warn!(channel = %id, %finding, "a seller contradicts the books of its channel");
                self.receipt.reason = Some(finding.to_string());
                self.find(finding);
                NextStep::Conclude
            }
        }
    }

    /// Records the outcome in budget and journal, and returns the receipt.
    pub(in crate::client) async fn finish(&mut self) -> Receipt {
        let (left, lease) = (self.left.take(), self.lease.take());
        let is_left = left.is_some();
        // A channel that was taken in place of a busy one has no voucher of this payment.
        let Some(mut lease) = left.map(|(busy, _)| busy).or(lease) else { return self.receipt.clone() };
        if let Some(channel) = &mut self.receipt.channel {
            channel.charged = lease.entry.charged;
        }
        if is_left {
            lease.entry.leave(self.terms.price);
            self.forget_purchase(&mut lease.entry);
            lease.leave_busy(self.payer.now()).await;
            return self.receipt.clone();
        }
        if self.is_unused || self.receipt.outcome == PaymentOutcome::Failed {
            self.forget_purchase(&mut lease.entry);
        }
        self.paused_at = Some((lease.entry.charged, lease.entry.signed));
        // It need not be durable: without it the next voucher, or the seller's correction, tells the same.
        if let Err(error) = lease.write(false, None).await {
            tracing::warn!(%error, "the outcome of a payment could not be written to the journal");
        }
        self.receipt.clone()
    }

    /// Gives the channel back. What was signed is in the books, and stays in doubt.
    pub(in crate::client) fn pause(&mut self) {
        let lease = self.lease.take();
        // The other channel has no voucher of this payment.
        if let (Some(lease), None) = (lease, self.left.take()) {
            self.paused_at = Some((lease.entry.charged, lease.entry.signed));
        }
    }

    /// Takes the channel again, to present the same voucher. Returns `false` if it is in use, or if others have used it since. A voucher that
    /// was charged needs no channel to ask for its answer again.
    pub(in crate::client) fn resume(&mut self, was_sent: bool) -> bool {
        if self.is_charged {
            return true;
        }
        // Nothing was charged for a voucher that was refused: the next one is for the same sum.
        if self.receipt.outcome == PaymentOutcome::Failed {
            return false;
        }
        let Some(id) = self.receipt.channel.as_ref().map(|channel| channel.id) else { return false };
        let Some(lease) = Lease::get(self.payer.budget(), id) else { return false };
        if self.paused_at.take() != Some((lease.entry.charged, lease.entry.signed)) {
            return false;
        }
        self.lease = Some(lease);
        // Its caller may have gone away before there was an answer.
        self.in_doubt |= was_sent;
        true
    }

    pub(in crate::client) const fn nonce(&self) -> B256 {
        self.receipt.nonce
    }
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

/// Returns a reason code without the scheme's prefix.
pub(super) fn code_of(reason: &Reason) -> &str {
    reason.as_str().strip_prefix(PREFIX).unwrap_or(reason.as_str())
}

/// Signs a voucher for `max` with the payer's voucher key. Returns its digest, too.
pub(super) async fn sign_voucher(
    payer: &Payer,
    (channel_id, entry): (ChannelId, &ChannelEntry),
    max: Usdc,
) -> Result<(Voucher, B256), PaymentError> {
    let max_claimable_amount = u128::from(max.atomic());
    let digest = Escrow::on(entry.network).voucher_digest(channel_id, max_claimable_amount);
    let key = payer.channel_policy().and_then(|policy| policy.voucher_key.as_deref());
    let signature = key.unwrap_or(payer.signer()).sign_digest(digest).await?;
    let bytes: [u8; 65] = signature.as_bytes().try_into().map_err(PaymentError::encode)?;
    let signature = VoucherSignature::try_from(bytes).map_err(PaymentError::encode)?;
    Ok((Voucher { channel_id, max_claimable_amount, signature }, digest))
}

debug_fields!(VoucherPayment { receipt });
