//! Payments by an authorization or a permit of their own: signed, answered, and recorded.

use alloy_primitives::{B256, U256};
use async_trait::async_trait;
use http::HeaderValue;

use super::{
    Budget, JournalEntry, OfferRefusal, PaymentError, PaymentOutcome, PermitPolicy, Receipt, Refusal,
    answer::{AnswerHead, NextStep, Said},
    budget::Unsent,
    challenge::{Challenge, header_of},
    journal::Record,
    offer::AcceptedOffer,
    payment::SchemePayment,
    totals::{Charge, host_of},
    wallet::{Asked, Validity, Wallet, check_clock},
};
use crate::{
    decimal::parse_decimal,
    eip3009::{Authorization, PaymentSignature, TokenDomain},
    payment::PaymentKey,
    permit2::{PERMIT2, Permit},
    protocol::{ExactOffer, ExactPayload, Reason, Version},
    usdc::Usdc,
};

/// How far `validAfter` lies in the past, in seconds, since block time may be behind the client's clock.
const BACKDATED: u64 = 600;

/// A payment by a signature of its own, which the journal has.
#[derive(Debug)]
pub(super) struct ExactPayment {
    header: HeaderValue,
    entry: JournalEntry,
    budget: Budget,
    /// `None` if it was sent by an earlier request.
    unsent: Option<Unsent>,
    state: State,
    receipt: Receipt,
    /// What the seller says it charged of a maximum, if it may be believed.
    charged: Option<Usdc>,
    /// Shows what was charged of a maximum.
    permits: PermitPolicy,
}

/// What is known of a payment. Of all that is heard the highest stands: a failure after an unclear attempt can be caused by that attempt's own
/// success (a used nonce, a balance too low), and a later answer does not undo a settlement that an earlier one reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// It is signed, and nothing was heard of it.
    Signed,
    Failed,
    /// An attempt may have settled it.
    Unclear,
    Accepted,
    Settled,
}

impl State {
    const fn outcome(self) -> PaymentOutcome {
        match self {
            Self::Signed | Self::Unclear => PaymentOutcome::Unknown,
            Self::Failed => PaymentOutcome::Failed,
            Self::Accepted => PaymentOutcome::Accepted,
            Self::Settled => PaymentOutcome::Settled,
        }
    }
}

impl ExactPayment {
    /// Reserves the price of an offer, signs for it, and records that. When this returns, the payment may be sent.
    pub(super) async fn sign(
        wallet: &Wallet,
        mut challenge: Challenge,
        accepted: &AcceptedOffer,
        asked: &Asked<'_>,
    ) -> Result<Self, PaymentError> {
        let AcceptedOffer { index, offer, amount, .. } = accepted;
        let (now, permit) = (wallet.now(), offer.permit());
        if permit.is_some()
            && let Some(approved) = Box::pin(wallet.permits.short_of(wallet.address(), offer)).await
        {
            let reason = OfferRefusal::NotApproved { approved, needed: offer.amount };
            return Err(Refusal::NoPayableOffer { reasons: vec![reason] }.into());
        }
        let charge = Charge { amount: *amount, payee: offer.pay_to, host: host_of(asked.url), signed_at: now };
        let reservation = wallet.budget.reserve(charge, now)?;
        challenge.add_payment_id(wallet.nonces.next()?);
        let window = wallet.window(offer.max_timeout_seconds);
        check_clock(now, asked.date, window)?;
        let (authorization, signature) = Self::authorize(wallet, offer, window).await?;
        let entry = JournalEntry {
            signed_at: now,
            method: asked.method.to_string(),
            url: asked.url.to_string(),
            network: offer.network(),
            asset: offer.asset.address,
            payer: authorization.from,
            pay_to: authorization.to,
            amount: *amount,
            valid_before: authorization.valid_before.saturating_to(),
            nonce: authorization.nonce,
            permit,
            charged: None,
            version: challenge.version(),
            status_url: challenge.status_url(asked.url).map(String::from),
            purchase: asked.purchase.map(|(key, _)| key),
            request: asked.purchase.map(|(_, request)| request),
            payment: challenge
                .into_header(*index, &ExactPayload { signature, authorization, permit })
                .map_err(PaymentError::encode)?,
        };
        let header = header_of(&entry.payment)?;
        let unsent = reservation.record(entry.clone()).await.map_err(PaymentError::Journal)?;
        Ok(Self::new(wallet, header, entry, Some(unsent)))
    }

    /// Makes a payment of one that was sent before.
    pub(super) fn again(wallet: &Wallet, entry: JournalEntry, is_paid: bool) -> Result<Self, PaymentError> {
        let header = header_of(&entry.payment)?;
        let mut payment = Self::new(wallet, header, entry, None);
        payment.note(if is_paid { State::Accepted } else { State::Unclear });
        if is_paid {
            payment.set_charged(payment.entry.charged);
        }
        Ok(payment)
    }

    fn new(wallet: &Wallet, header: HeaderValue, entry: JournalEntry, unsent: Option<Unsent>) -> Self {
        let JournalEntry { network, asset, amount, payer, pay_to, nonce, .. } = entry;
        let receipt = Receipt::signed((network, asset), amount, (payer, pay_to), nonce);
        let (budget, permits) = (wallet.budget.clone(), wallet.permits.clone());
        Self { header, entry, budget, unsent, state: State::Signed, receipt, charged: None, permits }
    }

    /// Signs an authorization that is valid for `window` seconds from when its signature is there. If the signer took so long that it is not,
    /// another one with the same nonce is signed, with as much time added: at most one of them can ever be used.
    async fn authorize(
        wallet: &Wallet,
        offer: &ExactOffer,
        window: u64,
    ) -> Result<(Authorization, PaymentSignature), PaymentError> {
        let nonce = wallet.nonces.next()?;
        let permit = offer.permit().map(|permit| (permit, Permit::domain(offer.network())));
        let domain = TokenDomain::of(&offer.asset);
        let mut validity = Validity::new(window);
        loop {
            let now = wallet.now();
            let authorization = Authorization {
                from: wallet.address(),
                to: offer.pay_to,
                value: offer.amount,
                valid_after: U256::from(now.saturating_sub(BACKDATED)),
                valid_before: U256::from(validity.begin(now)),
                nonce,
            };
            let signature = match &permit {
                None => wallet.signer.sign(&authorization, &domain).await?,
                Some((permit, domain)) => {
                    wallet.signer.sign_digest(permit.signing_hash(&authorization, domain)).await?
                }
            };
            if validity.is_good(wallet.now())? {
                return Ok((authorization, signature));
            }
        }
    }

    /// Returns `true` if a node shows that the transaction which the seller names used this permit. Then what it moved was charged.
    async fn look_at_charge(&mut self) -> bool {
        let (true, Some(transaction)) = (self.is_charged_less(), self.receipt.transaction) else { return false };
        let JournalEntry { network, payer, pay_to, nonce, permit, .. } = self.entry;
        let Some(permit) = permit else { return false };
        let key = PaymentKey { network, asset: PERMIT2, payer, nonce };
        let shown = Box::pin(self.permits.charged_by(transaction, (&key, &permit, pay_to))).await;
        if shown.is_some() {
            self.set_charged(shown);
        }
        shown.is_some()
    }

    /// Returns the outcome for the journal. `is_proven` says that what was charged is known from the chain.
    fn record(&self, is_proven: bool) -> Record {
        let Receipt { nonce, outcome, transaction, .. } = self.receipt;
        let charged = self.charged;
        // Unless the permit is used up, all of it may be charged yet: like after a failure, only the chain releases the rest.
        let is_open = self.is_charged_less() && !is_proven;
        Record::Outcome { nonce, outcome: if is_open { PaymentOutcome::Failed } else { outcome }, transaction, charged }
    }

    /// Returns `true` if the seller says that it charged less than was signed for.
    fn is_charged_less(&self) -> bool {
        self.charged.is_some_and(|charged| charged < self.entry.amount)
    }

    fn set_charged(&mut self, charged: Option<Usdc>) {
        self.charged = charged;
        self.receipt.amount = charged.unwrap_or(self.entry.amount);
    }

    fn note(&mut self, heard: State) {
        self.state = self.state.max(heard);
        self.receipt.outcome = self.state.outcome();
    }

    /// Reads what an answer says of this payment.
    fn read(&self, answer: &AnswerHead<'_>) -> Said {
        let JournalEntry { network, payer, .. } = self.entry;
        let said = answer.said(network, payer);
        let Said::Paid { response, .. } = &said else { return said };
        let most: U256 = self.entry.amount.into();
        let is_maximum = self.is_maximum();
        let is_right = |amount: &String| match parse_decimal(amount) {
            Some(amount) if is_maximum => amount <= most,
            amount => amount == Some(most),
        };
        if response.amount.as_ref().is_none_or(is_right) {
            return said;
        }
        Said::Contradiction(if is_maximum { "names more than was signed for" } else { "names another amount" })
    }

    fn is_maximum(&self) -> bool {
        self.entry.permit.is_some_and(|permit| permit.is_maximum())
    }

    /// Returns what a seller says it charged of a maximum. Unless it names the transaction, all may be charged yet.
    fn charged_by(&self, said: &Said) -> Option<Usdc> {
        let Said::Paid { response, transaction } = said else { return None };
        if !self.is_maximum() {
            return None;
        }
        let charged = Usdc::try_from(parse_decimal(response.amount.as_ref()?)?).ok()?;
        (transaction.is_some() || charged == Usdc::ZERO).then_some(charged)
    }
}

#[async_trait]
impl SchemePayment for ExactPayment {
    fn version(&self) -> Version {
        self.entry.version
    }

    fn header(&self) -> &HeaderValue {
        &self.header
    }

    fn valid_before(&self) -> u64 {
        self.entry.valid_before
    }

    fn nonce(&self) -> B256 {
        self.entry.nonce
    }

    fn set_sent(&mut self) {
        if let Some(unsent) = &mut self.unsent {
            unsent.set_sent();
        }
    }

    fn answered(&mut self, answer: &AnswerHead<'_>) -> NextStep {
        let said = self.read(answer);
        let is_pending = matches!(&said, Said::Failed { reason: Reason::SettlementPending, .. });
        let next = if answer.is_transient || is_pending { answer.retry() } else { NextStep::Conclude };
        let (heard, transaction) = match &said {
            Said::Paid { transaction: Some(transaction), .. } => (State::Settled, Some(*transaction)),
            Said::Paid { transaction: None, .. } => (State::Accepted, None),
            Said::Failed { reason, transaction } => (heard(reason), *transaction),
            Said::Refused(reason) => (heard(reason), None),
            Said::Rejected => (State::Failed, None),
            Said::AskedAgain(_) | Said::Nothing => (State::Unclear, None),
            Said::Contradiction(what) => {
                tracing::warn!(nonce = %self.entry.nonce, what, "a payment response contradicts what was signed");
                (State::Unclear, None)
            }
        };
        if self.state.outcome().is_paid() && heard < self.state {
            return next;
        }
        self.note(heard);
        self.receipt.transaction = transaction;
        self.receipt.reason = said.why(answer.status);
        self.set_charged(self.charged_by(&said));
        next
    }

    fn unanswered(&mut self) -> NextStep {
        self.note(State::Unclear);
        NextStep::Retry { after: None }
    }

    async fn finish(&mut self) -> Receipt {
        let is_proven = self.look_at_charge().await;
        let record = self.record(is_proven);
        let Self { budget, receipt, .. } = self;
        // Its answer closes a payment only if it was made, and only if reconciliation did not close it before.
        if let Some(closed) = budget.journal().close(&record) {
            budget.spend(&closed);
        }
        if let Err(error) = budget.journal().write_outcome(record).await {
            tracing::warn!(%error, nonce = %receipt.nonce, "the outcome of a payment could not be written to the journal");
        }
        receipt.clone()
    }

    fn resume(&mut self, was_sent: bool) -> bool {
        // Its caller may have gone away before there was an answer.
        if was_sent {
            self.note(State::Unclear);
        }
        true
    }

    fn is_in_journal(&self) -> bool {
        true
    }
}

/// Returns what a reason says. A settled payment that is presented again can be refused with some of the reasons.
fn heard(reason: &Reason) -> State {
    match reason.of_authorization() {
        Reason::SettlementPending | Reason::NonceAlreadyUsed | Reason::DuplicateSettlement => State::Unclear,
        _ => State::Failed,
    }
}
