//! Selling on payment channels: the seller's books, the escrow contract and the key that claims, together.
//!
//! [`Channels`] is what a [`RequirePaymentLayer`](crate::server::RequirePaymentLayer) needs to take vouchers beside `exact`. It knows which
//! vouchers are good without asking a node as long as it looked at their channel a short while ago, and claims in the background.
//!
//! | file | question it answers |
//! |---|---|
//! | `mod` | what does a seller need to take vouchers, and how is a channel looked at, filled and refunded? |
//! | `claims` | when is claimed what was charged, and what happens if that fails? |
//! | `at_risk` | when is claimed what a withdrawal could take? |
//! | `idle` | which channels does the seller refund without being asked? |

mod at_risk;
mod claims;
mod idle;

use std::{fmt, sync::Arc, time::Duration};

use alloy_primitives::{B256, keccak256};
use tracing::Instrument as _;

use at_risk::AtRisk;
pub use claims::{ClaimPolicy, ClaimReport};
pub use idle::RefundReport;

use crate::{
    clock::{Clock, SystemClock, age},
    facilitator::{
        FacilitatorError, NotReady, Readiness,
        channels::{ChannelError, ChannelFacilitator, Executed, RefundOrder},
        single_flight::{NoResult, SingleFlight},
    },
    ledger::{
        LedgerError, StoredResponse,
        channels::{
            self as channel_ledger, ChannelLedger, ChannelLedgerError, ChannelRecord, ChannelStep, ExecutedRefund,
            LastRefund,
        },
    },
    network::{Asset, Network},
    settlement::readiness::ReadinessCache,
    telemetry,
    usdc::{ParseUsdcError, Usdc},
    vouchers::{
        AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, ChannelOffer, Deposit, Escrow, MAX_WITHDRAW_DELAY,
        MIN_WITHDRAW_DELAY, Voucher, reason,
    },
};

/// How long readiness is cached.
const READINESS_TTL: Duration = Duration::from_secs(1);
/// For how many seconds a channel that was looked at is believed to be as it was: a third of the time that the shortest withdrawal takes.
const LONGEST_TRUST: u64 = 300;
/// How long after a refund a part of the same channel is refunded again, in seconds. Each costs the seller gas.
const REFUND_PAUSE: u64 = 3_600;
/// The smallest part of a channel that is refunded, in atomic units: several times what its gas costs on Base.
const LEAST_REFUND: u128 = 5_000;
/// For how long nobody else looks after a refund that is under way, in seconds: its process may have died before it sent anything. To ask
/// for the same refund again is safe, since the contract executes it once.
const REFUND_LEASE: u64 = 20;

/// The channels of one seller on one chain. A clone is the same channels.
///
/// ```
/// # use std::sync::Arc;
/// # use tower_x402::{facilitator::channels::ChannelFacilitator, ledger::MemoryLedger, vouchers::AuthorizerKey};
/// # use tower_x402::{channels::{Channels, ChannelsBuildError}};
/// # fn example(contract: impl ChannelFacilitator, key: AuthorizerKey) -> Result<Channels, ChannelsBuildError> {
/// // `key` is the `receiverAuthorizer` of the seller's channels: it signs claims and refunds.
/// Channels::builder(contract, key).ledger(Arc::new(MemoryLedger::new())).min_deposit("$0.10").build()
/// # }
/// ```
#[derive(Clone)]
pub struct Channels(Arc<Inner>);

/// A deposit that was made, and the channel with it.
type Filled = Result<(Executed, ChannelRecord), ChannelError>;

struct Inner {
    escrow: Escrow,
    facilitator: Arc<dyn ChannelFacilitator>,
    ledger: Arc<dyn ChannelLedger>,
    authorizer: AuthorizerKey,
    withdraw_delay: u32,
    min_deposit: Option<Usdc>,
    requires_min_deposit: bool,
    policy: ClaimPolicy,
    clock: Arc<dyn Clock>,
    /// The deposits that are being made, by all that they depend on.
    fillings: Arc<SingleFlight<B256, Filled>>,
    /// The channels that are claimed at once.
    at_risk: Arc<AtRisk>,
    readiness: ReadinessCache,
}

impl Channels {
    /// Returns a builder. `authorizer` is the key that claims and refunds in the receiver's name: it is a part of each channel, so that with
    /// another one a seller has other channels.
    pub fn builder(facilitator: impl ChannelFacilitator, authorizer: AuthorizerKey) -> ChannelsBuilder {
        ChannelsBuilder {
            facilitator: Arc::new(facilitator),
            ledger: None,
            authorizer,
            withdraw_delay: Duration::from_secs(MIN_WITHDRAW_DELAY.into()),
            min_deposit: None,
            requires_min_deposit: false,
            policy: ClaimPolicy::default(),
            clock: Arc::new(SystemClock),
        }
    }

    /// Returns the chain.
    pub fn network(&self) -> Network {
        self.0.facilitator.network()
    }

    /// Returns the books.
    pub fn ledger(&self) -> &Arc<dyn ChannelLedger> {
        &self.0.ledger
    }

    /// Claims all that was charged and is not claimed, whatever the policy says, and has it transferred. A caller that goes away does not
    /// cancel it.
    ///
    /// # Errors
    /// [`ChannelError`] if nothing could be claimed. What was not claimed stays in the books.
    pub async fn claim_all(&self) -> Result<ClaimReport, ChannelError> {
        // Cancelled halfway, it would keep the channels from being claimed until its leases end.
        let inner = Arc::clone(&self.0);
        let claiming = tokio::spawn(async move { inner.claim_everything().await }.in_current_span());
        claiming.await.unwrap_or(Err(ChannelError::Pending { transaction: None }))
    }

    /// Returns whether deposits and claims could be made now, and why not. For the health check of a load balancer: the chain and the ledger
    /// are asked at most once a second.
    ///
    /// | reason | when |
    /// |---|---|
    /// | [`NotReady::Ledger`] | the ledger fails |
    /// | [`NotReady::Node`], [`NotReady::NodeBehind`] | the node does not answer, or its newest block is too old to rely on |
    /// | [`NotReady::InsufficientGas`], [`NotReady::GasPrice`] | the key that sends transactions cannot pay for them, or gas costs too much |
    /// | [`NotReady::Facilitator`] | the facilitator that sends the transactions does not answer |
    /// | [`NotReady::ClaimsFail`] | a withdrawal could take what was charged, and the last attempt to claim it failed |
    ///
    /// A payer that announces a withdrawal does not make the seller unready: its channel is claimed, and only if that fails there is a reason.
    pub async fn readiness(&self) -> Readiness {
        let check = async {
            let readiness = self.0.check_readiness().await;
            telemetry::channels_ready(self.network(), readiness.is_ready());
            readiness
        };
        self.0.readiness.get_or_check(check).await
    }

    /// Returns `extra` of an offer in this token.
    pub(crate) fn offer(&self, asset: &Asset) -> ChannelOffer {
        ChannelOffer {
            name: asset.name.to_string(),
            version: asset.version.to_string(),
            receiver_authorizer: self.0.authorizer.address(),
            withdraw_delay: self.0.withdraw_delay,
            min_deposit: self.0.min_deposit.map(|amount| amount.atomic().into()),
            channel_state: None,
            voucher_state: None,
        }
    }

    /// Returns the smallest deposit that is taken with a request of this price.
    pub(crate) fn least_deposit(&self, price: u128) -> u128 {
        let required = self.0.min_deposit.filter(|_| self.0.requires_min_deposit);
        required.map_or(price, |amount| price.max(amount.atomic().into()))
    }

    /// Returns the contract.
    pub(crate) fn escrow(&self) -> &Escrow {
        &self.0.escrow
    }

    /// Returns `true` if the channel was looked at so recently that no withdrawal can have taken what its vouchers are for.
    pub(crate) fn is_fresh(&self, record: &ChannelRecord) -> bool {
        age(self.0.clock.now(), record.observed_at) <= LONGEST_TRUST
    }

    /// Returns `true` if a request of this price may be sold on the channel before something of it is claimed.
    pub(crate) fn gives_credit(&self, record: &ChannelRecord, price: u128) -> bool {
        self.0.policy.gives_credit(record, price, self.0.clock.now())
    }

    /// Looks at a channel on the chain, and opens it in the books. Returns `None` if nothing is in it and the books do not have it, and fails
    /// if the node is behind the books.
    pub(crate) async fn refresh(
        &self,
        id: ChannelId,
        config: &ChannelConfig,
    ) -> Result<Option<ChannelRecord>, ChannelError> {
        let observed = self.0.facilitator.observe(&[id]).await?;
        let Some(observation) = observed.first().copied().filter(|seen| seen.state.channel_id == id) else {
            return Err(FacilitatorError::Misconfigured("the node told of another channel".to_owned()).into());
        };
        let record = if observation.state.balance > 0 {
            self.note(id, config, observation).await?
        } else {
            // Anybody can name a channel that is empty.
            let step = ChannelStep::Observe { observation, now: self.0.clock.now() };
            match self.advance(&id, &step).await {
                Err(ChannelLedgerError::NotFound) => return Ok(None),
                noted => noted.map_err(in_the_books)?,
            }
        };
        self.check_fresh(record).map(Some)
    }

    /// Fails if the books have a later block than the node that was just asked, which does not show what has happened since (invariant I11).
    fn check_fresh(&self, record: ChannelRecord) -> Result<ChannelRecord, ChannelError> {
        if self.is_fresh(&record) {
            return Ok(record);
        }
        let what = "a node that has the newest blocks";
        Err(FacilitatorError::Unreachable { what, retry_after: Duration::from_secs(5) }.into())
    }

    /// Returns the channel as it is before the deposit, if the deposit would be made now. Moves nothing.
    pub(crate) async fn verify_deposit(
        &self,
        config: &ChannelConfig,
        deposit: &Deposit,
    ) -> Result<ChannelObservation, ChannelError> {
        self.0.facilitator.verify_deposit(config, deposit).await
    }

    /// Executes a deposit, and notes what is in the channel then. A caller that goes away does not cancel it: a payer that waits for less long
    /// each time finds the deposit in the books when it comes back.
    pub(crate) async fn fill(&self, config: &ChannelConfig, voucher: &Voucher, deposit: &Deposit) -> Filled {
        let (config, voucher, deposit) = (*config, voucher.clone(), deposit.clone());
        // All that the result depends on: the voucher was checked.
        let input = serde_json::to_vec(&(config, &deposit))
            .map_err(|error| ChannelError::rejected(reason::DEPOSIT_PAYLOAD, error.to_string()))?;
        let filling = {
            let channels = self.clone();
            move || async move {
                let executed = channels.0.facilitator.deposit(&config, &voucher, &deposit).await?;
                let record = channels.note(voucher.channel_id, &config, executed.observed).await?;
                Ok((executed, record))
            }
        };
        let (executed, record) = match self.0.fillings.run(keccak256(&input), filling).await {
            Ok(filled) => filled?,
            Err(NoResult::Full) => {
                let retry_after = Duration::from_secs(2);
                return Err(FacilitatorError::Busy { what: "deposits", retry_after }.into());
            }
            Err(NoResult::Lost) => return Err(ChannelError::Pending { transaction: None }),
        };
        // The deposit may have been made long ago, and withdrawn since.
        Ok((executed, self.check_fresh(record)?))
    }

    /// Returns the refund that was made for this request before, or refuses what [`refund`](Self::refund) would refuse by the books. Asks
    /// nobody.
    pub(crate) fn check_refund(
        &self,
        record: &ChannelRecord,
        request: B256,
        voucher: &Voucher,
        asked: Option<u128>,
    ) -> Result<Option<Executed>, ChannelError> {
        let now = self.0.clock.now();
        match earlier_refund(record, request, asked, now) {
            Some(last) => Ok(executed(record, &last)),
            None => refundable(record, (request, asked), voucher, now).map(|_| None),
        }
    }

    /// Refunds at most `asked` of what was not charged, all if `None`, and claims what was charged in the same transaction. The channel
    /// must be held, by a request with this voucher or by [`BeginClaim`](ChannelStep::BeginClaim), and have been looked at just before.
    ///
    /// `request` identifies who asks: a repeated request gets the same refund. It is zero for a refund that no payer asked for, which need
    /// not be worth its gas.
    pub(crate) async fn refund(
        &self,
        record: &ChannelRecord,
        request: B256,
        voucher: &Voucher,
        asked: Option<u128>,
    ) -> Result<(Executed, ChannelRecord), ChannelError> {
        let now = self.0.clock.now();
        let before = earlier_refund(record, request, asked, now);
        if let Some(executed) = before.and_then(|last| executed(record, &last)) {
            return Ok((executed, record.clone()));
        }
        let (record, signed) = match before {
            // It is in a block, and was not noted.
            Some(last) if last.nonce < record.observed.state.refund_nonce => (record.clone(), last),
            Some(last) if last.until > now => return Err(ChannelError::Pending { transaction: None }),
            _ => self.sign_refund(record, (request, asked, before), voucher, now).await?,
        };
        let order = order(&record, &signed, voucher);
        let executed = match self.0.facilitator.refund(&order, &self.0.authorizer).await {
            Ok(executed) => executed,
            Err(error @ ChannelError::Pending { .. }) => return Err(error),
            // The transaction of an earlier process may wait in the node's pool, and what it does be in the node's simulations.
            Err(error) if is_open(before) && !is_empty(&error) => {
                return Err(match error {
                    ChannelError::Rejected { .. } => ChannelError::Pending { transaction: None },
                    error => error,
                });
            }
            Err(error) => {
                let end = match error {
                    // Nothing was sent.
                    ChannelError::Unavailable(_) => ChannelStep::DropRefund { until: signed.until },
                    _ => ChannelStep::EndRefund { nonce: signed.nonce, executed: None },
                };
                self.0.end_refund(&record, &end).await;
                return Err(error);
            }
        };
        self.0.end_refund(&record, &done(&signed, &executed)).await;
        let record = self.note(record.id, &record.config, executed.observed).await?;
        Ok((executed, record))
    }

    /// Counts a refund as gone, before it is signed. If it is not executed, the payer may ask again.
    async fn sign_refund(
        &self,
        record: &ChannelRecord,
        (request, asked, before): (B256, Option<u128>, Option<LastRefund>),
        voucher: &Voucher,
        now: u64,
    ) -> Result<(ChannelRecord, LastRefund), ChannelError> {
        let amount = match before {
            Some(last) => last.amount,
            None => refundable(record, (request, asked), voucher, now)?,
        };
        // Before the amount is counted as gone.
        self.0.facilitator.may_refund().await?;
        let step = ChannelStep::Refund { request, amount, now, until: now.saturating_add(REFUND_LEASE) };
        let record = match self.advance(&record.id, &step).await {
            // Another one, which may be for all that is left.
            Err(ChannelLedgerError::Busy { .. }) => return Err(ChannelError::Pending { transaction: None }),
            record => record.map_err(in_the_books)?,
        };
        let lost = || FacilitatorError::Misconfigured("the ledger did not keep a refund".to_owned());
        let signed = record.refund.ok_or_else(lost)?;
        Ok((record, signed))
    }

    /// Takes a step, and claims at once if a withdrawal was announced, or half of the credit is used.
    pub(crate) async fn advance(
        &self,
        id: &ChannelId,
        step: &ChannelStep,
    ) -> Result<ChannelRecord, ChannelLedgerError> {
        let record = self.0.ledger.advance(id, step).await?;
        self.0.notice(&record);
        if matches!(step, ChannelStep::Charge { .. }) && record.unclaimed() > self.0.policy.most_unclaimed() / 2 {
            self.0.at_risk.add(record.id, record.at_risk());
        }
        Ok(record)
    }

    /// Returns a channel in the books.
    pub(crate) async fn record(&self, id: &ChannelId) -> Result<Option<ChannelRecord>, LedgerError> {
        self.0.ledger.channel(id).await
    }

    /// Returns the response that a request got, if it is kept.
    pub(crate) async fn response(
        &self,
        record: &ChannelRecord,
        request: B256,
    ) -> Result<Option<StoredResponse>, LedgerError> {
        self.0.ledger.response(&record.response_key(request)).await
    }

    /// Returns `true` if the voucher is signed by the channel's voucher key. That it names this channel must have been checked.
    pub(crate) fn is_signed(&self, config: &ChannelConfig, voucher: &Voucher) -> bool {
        voucher.signer(&self.0.escrow) == Some(config.voucher_signer())
    }

    /// Returns how long work may take: what it costs must be claimed before a withdrawal can end that was announced right after the channel
    /// was looked at.
    pub(crate) fn longest_work(&self) -> Duration {
        let left = u64::from(self.0.withdraw_delay).saturating_sub(LONGEST_TRUST);
        Duration::from_secs(left).saturating_sub(claims::TIME_TO_CLAIM)
    }

    /// Returns `true` if the channel's authorizer is this seller's.
    pub(crate) fn has_authorizer(&self, config: &ChannelConfig) -> bool {
        config.receiver_authorizer == self.0.authorizer.address()
    }

    /// Returns `true` if the channel's withdraw delay is this seller's.
    pub(crate) fn has_delay(&self, config: &ChannelConfig) -> bool {
        config.withdraw_delay == self.0.withdraw_delay
    }

    async fn note(
        &self,
        id: ChannelId,
        config: &ChannelConfig,
        observation: ChannelObservation,
    ) -> Result<ChannelRecord, ChannelError> {
        let (network, now) = (self.network(), self.0.clock.now());
        let step = ChannelStep::Open { network, config: *config, observation, now };
        self.advance(&id, &step).await.map_err(in_the_books)
    }
}

impl Inner {
    /// Notes what became of a refund. If that fails, it is found on the chain when it is asked for again.
    async fn end_refund(&self, record: &ChannelRecord, end: &ChannelStep) {
        if let Err(error) = self.ledger.advance(&record.id, end).await {
            tracing::warn!(%error, channel = %record.id, "the result of a refund was not recorded");
        }
    }

    /// Finds the transaction of a refund that was made by a process that is gone, as long as it is in the newest blocks, so that its payer is
    /// told whenever it asks again.
    async fn find_refund(&self, record: &ChannelRecord) {
        let is_lost = |last: &LastRefund| {
            let is_made = last.nonce < record.observed.state.refund_nonce;
            is_made && last.executed.is_none() && age(self.clock.now(), last.asked_at) < REFUND_PAUSE
        };
        let (Some(last), Some(voucher)) = (record.refund.filter(is_lost), record.voucher.as_ref()) else { return };
        // Its nonce is used, so that nothing is sent.
        match self.facilitator.refund(&order(record, &last, voucher), &self.authorizer).await {
            Ok(executed) => self.end_refund(record, &done(&last, &executed)).await,
            Err(error) => tracing::warn!(%error, channel = %record.id, "a refund that was made was not found"),
        }
    }

    async fn check_readiness(&self) -> Readiness {
        let mut readiness = self.facilitator.readiness().await;
        if self.ledger.channels(None, 1).await.is_err() {
            readiness.reasons.push(NotReady::Ledger);
        }
        let units = self.at_risk.failing();
        if units > 0 {
            readiness.reasons.push(NotReady::ClaimsFail { units });
        }
        readiness
    }
}

impl fmt::Debug for Channels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channels")
            .field("facilitator", &self.0.facilitator)
            .field("authorizer", &self.0.authorizer)
            .field("policy", &self.0.policy)
            .finish_non_exhaustive()
    }
}

/// Returns the order for a refund that the books have.
fn order(record: &ChannelRecord, signed: &LastRefund, voucher: &Voucher) -> RefundOrder {
    RefundOrder {
        config: record.config,
        voucher: voucher.clone(),
        amount: signed.amount,
        nonce: signed.nonce,
        claim: record.claim(),
    }
}

/// Returns the step that notes what was refunded.
fn done(signed: &LastRefund, executed: &Executed) -> ChannelStep {
    let Executed { transaction, amount, .. } = *executed;
    ChannelStep::EndRefund { nonce: signed.nonce, executed: Some(ExecutedRefund { transaction, amount }) }
}

/// Returns the refund that was begun for this request before, and that it is answered with or goes on with.
fn earlier_refund(record: &ChannelRecord, request: B256, asked: Option<u128>, now: u64) -> Option<LastRefund> {
    record.refund.filter(|last| last.request == request).filter(|last| match last.executed {
        Some(_) => is_repeated(record, last, asked, now),
        None => age(now, last.asked_at) < REFUND_PAUSE,
    })
}

/// Returns what a refund did, once that is known.
fn executed(record: &ChannelRecord, last: &LastRefund) -> Option<Executed> {
    let ExecutedRefund { transaction, amount } = last.executed?;
    Some(Executed { transaction, amount, observed: record.observed })
}

/// Returns `true` if the same refund was begun before, and its outcome is not known.
fn is_open(before: Option<LastRefund>) -> bool {
    before.is_some_and(|last| last.until > 0)
}

/// Returns `true` if the contract shows that nothing is left.
fn is_empty(error: &ChannelError) -> bool {
    matches!(error, ChannelError::Rejected { reason: reason::REFUND_NO_BALANCE, .. })
}

/// Returns `true` if a request for a refund is for the one that was made: nothing is left that it could be for, or it asks for a part
/// soon again.
fn is_repeated(record: &ChannelRecord, last: &LastRefund, asked: Option<u128>, now: u64) -> bool {
    let left = record.observed.state.balance.saturating_sub(record.charged());
    let is_part_again = asked.is_some() && !last.is_all && age(now, last.asked_at) < REFUND_PAUSE;
    last.nonce < record.observed.state.refund_nonce && (left == 0 || is_part_again)
}

/// Returns the amount to refund. A part must be worth its gas, and comes once in a while. All that is left is refunded whenever something
/// was charged since, if the payer asks: by a voucher that was in a claim anybody can ask, and gets it once in a while as well.
fn refundable(
    record: &ChannelRecord,
    (request, asked): (B256, Option<u128>),
    voucher: &Voucher,
    now: u64,
) -> Result<u128, ChannelError> {
    let left = record.observed.state.balance.saturating_sub(record.charged());
    let amount = asked.unwrap_or(left).min(left);
    if asked == Some(0) {
        return Err(ChannelError::rejected(reason::REFUND_AMOUNT_INVALID, "a refund of nothing"));
    }
    if amount == 0 {
        return Err(ChannelError::rejected(reason::REFUND_NO_BALANCE, "nothing is left to refund"));
    }
    if request.is_zero() {
        return Ok(amount);
    }
    let is_all = amount == left;
    if !is_all && amount < LEAST_REFUND {
        let detail = format!("the smallest part to refund is {LEAST_REFUND} units; ask for so much, or for all");
        return Err(ChannelError::rejected(reason::REFUND_AMOUNT_INVALID, detail));
    }
    let is_soon = |last: &LastRefund| {
        let is_paid_for = last.charged < record.charged() && !record.may_be_public(voucher.max_claimable_amount);
        let uses_it_up = !is_all || (last.is_all && !is_paid_for);
        last.executed.is_some() && uses_it_up && age(now, last.asked_at) < REFUND_PAUSE
    };
    if let Some(last) = record.refund.filter(is_soon) {
        let wait = REFUND_PAUSE.saturating_sub(age(now, last.asked_at));
        let detail = format!("a refund was made a short while ago, and each costs gas; ask again in {wait} seconds");
        return Err(ChannelError::rejected(reason::CHANNEL_BUSY, detail));
    }
    Ok(amount)
}

/// A step of the books that cannot be refused by a channel's state failed.
fn in_the_books(error: ChannelLedgerError) -> ChannelError {
    match error {
        ChannelLedgerError::Ledger(error) => FacilitatorError::from(error).into(),
        other => FacilitatorError::Busy {
            what: if matches!(other, ChannelLedgerError::NotFound) { "a forgotten channel" } else { "a channel" },
            retry_after: Duration::from_secs(1),
        }
        .into(),
    }
}

/// Builder of [`Channels`].
#[must_use]
pub struct ChannelsBuilder {
    facilitator: Arc<dyn ChannelFacilitator>,
    ledger: Option<Arc<dyn ChannelLedger>>,
    authorizer: AuthorizerKey,
    withdraw_delay: Duration,
    min_deposit: Option<Result<Usdc, ParseUsdcError>>,
    requires_min_deposit: bool,
    policy: ClaimPolicy,
    clock: Arc<dyn Clock>,
}

impl ChannelsBuilder {
    /// Sets the ledger, which is needed. Several processes that sell with one authorizer share one. Channels on other chains, and those of
    /// other authorizers, may be in it as well, and are left alone.
    pub fn ledger(mut self, ledger: Arc<dyn ChannelLedger>) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Sets how long a payer that withdraws by itself has to wait, in whole seconds. It is a part of each channel. What was charged must be
    /// claimed before: a layer's [`handler_deadline`](crate::server::RequirePaymentLayerBuilder::handler_deadline) must be at least ten minutes
    /// shorter. Default: 15 minutes, the shortest; at most 30 days.
    pub const fn withdraw_delay(mut self, delay: Duration) -> Self {
        self.withdraw_delay = delay;
        self
    }

    /// Sets the deposit that the 402 suggests: dollars as text (`"$0.10"`) or [`Usdc`]. Smaller ones are taken, too, from the price of the
    /// request on, unless [`require_min_deposit`](Self::require_min_deposit) is set. Default: none is suggested.
    pub fn min_deposit(mut self, amount: impl TryInto<Usdc, Error: Into<ParseUsdcError>>) -> Self {
        self.min_deposit = Some(amount.try_into().map_err(Into::into));
        self
    }

    /// Refuses deposits below the suggested one, since each costs the seller a transaction. Default: they are taken, as the scheme wants it.
    pub const fn require_min_deposit(mut self) -> Self {
        self.requires_min_deposit = true;
        self
    }

    /// Sets when to claim, and when to refund idle channels. Default: [`ClaimPolicy::default`].
    pub const fn claims(mut self, policy: ClaimPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Sets the clock. Default: [`SystemClock`].
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Checks the settings, and starts to claim in the background. Call it in a tokio runtime.
    ///
    /// # Errors
    /// [`ChannelsBuildError`] says what is missing or out of range.
    pub fn build(self) -> Result<Channels, ChannelsBuildError> {
        let ledger = self.ledger.ok_or(ChannelsBuildError::NoLedger)?;
        let withdraw_delay = u32::try_from(self.withdraw_delay.as_secs())
            .ok()
            .filter(|delay| (MIN_WITHDRAW_DELAY..=MAX_WITHDRAW_DELAY).contains(delay))
            .ok_or(ChannelsBuildError::WithdrawDelay(self.withdraw_delay))?;
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| ChannelsBuildError::NoRuntime)?;
        let channels = Channels(Arc::new(Inner {
            escrow: Escrow::on(self.facilitator.network()),
            facilitator: self.facilitator,
            ledger: channel_ledger::measured(ledger),
            authorizer: self.authorizer,
            withdraw_delay,
            min_deposit: self.min_deposit.transpose().map_err(ChannelsBuildError::MinDeposit)?,
            requires_min_deposit: self.requires_min_deposit,
            policy: self.policy,
            clock: self.clock,
            fillings: Arc::default(),
            at_risk: Arc::default(),
            readiness: ReadinessCache::new(READINESS_TTL),
        }));
        runtime.spawn(at_risk::run(Arc::downgrade(&channels.0)));
        runtime.spawn(claims::run(Arc::downgrade(&channels.0)));
        if self.policy.refunds_idle() {
            runtime.spawn(idle::run(Arc::downgrade(&channels.0)));
        }
        Ok(channels)
    }
}

impl fmt::Debug for ChannelsBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChannelsBuilder").field("authorizer", &self.authorizer).finish_non_exhaustive()
    }
}

/// Why channels cannot be sold on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelsBuildError {
    /// No ledger is set. Set one with [`ChannelsBuilder::ledger`].
    #[error("no ledger for payment channels: call .ledger(…)")]
    NoLedger,
    /// The withdraw delay is outside the contract's bounds.
    #[error("a withdraw delay of {0:?} is outside {MIN_WITHDRAW_DELAY}..={MAX_WITHDRAW_DELAY} seconds")]
    WithdrawDelay(Duration),
    /// The suggested deposit is no amount.
    #[error("min_deposit is not an amount of dollars such as \"$0.10\"")]
    MinDeposit(#[source] ParseUsdcError),
    /// There is no tokio runtime to claim in.
    #[error("no tokio runtime to claim in: call build() in one")]
    NoRuntime,
}
