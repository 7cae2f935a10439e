//! A request that is paid with a voucher of a payment channel (scheme `batch-settlement`), from its header to its response.
//!
//! A channel has one request at a time; others wait for it in a line. What a request costs is charged after the work, at most its price,
//! by one step of the books. The chain is asked only if the channel was not looked at for a while, or is to be filled or refunded.

use std::{future::Future, sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256, keccak256};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, request::Parts, response};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tracing::{Span, field::display};

use super::{
    answer::{self, Answer, Receipt, RequestContext, mark_paid},
    lease::{FinishOnDrop, InProgress, TooManyCopies, WaitingCopy, pauses_after_work},
    offer::VoucherOffer,
    payment_header::{Message, RawHeader, check_extensions, payment_id},
    queue::AdmissionQueue,
    request_body::LazyBody,
    response::{PaidBody, RecordingLedger, RecordingTarget, ResponseBody, misfit, replayed},
    work::{Content, Handler, NotCharged, VerifiedPayment, detached, paid_head, run_handler},
};
use crate::{
    channels::Channels,
    clock::age,
    facilitator::channels::{ChannelError, Executed},
    ledger::{
        Fingerprint, LedgerError, StoredResponse,
        channels::{Answer as Charged, ChannelLedgerError, ChannelRecord, ChannelStep, RequestName},
    },
    payment::PaymentKey,
    protocol::{PaymentFlow, PaymentPayload, PaymentRequirements, Verbatim, Version},
    telemetry::{self, RequestOutcome},
    usdc::Usdc,
    vouchers::{ChannelConfig, ChannelId, ChannelPayload, Deposit, RefundRequest, SCHEME, Voucher, reason},
};

/// Where handlers of the official packages say what a request cost.
const OVERRIDES: HeaderName = HeaderName::from_static("settlement-overrides");
/// When a payer may ask again whose channel has to be claimed first.
const RETRY_UNCLAIMED: Duration = Duration::from_secs(30);
/// How often a channel that another process holds is looked at.
const POLL: Duration = Duration::from_millis(100);

/// What a request cost, if that is less than its price. A handler puts it into the extensions of its response.
///
/// Only payments with vouchers are charged less than the price; an `exact` payment is for the price. More than the price is an error of the
/// handler: the request is answered 500, and nothing is charged.
///
/// ```
/// use tower_x402::{Usdc, server::ActualPrice};
///
/// fn answer(tokens: u64) -> http::Response<String> {
///     let mut response = http::Response::new("...".to_owned());
///     response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(2 * tokens)));
///     response
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActualPrice(pub Usdc);

/// Returns `true` if the payment accepts an offer of this scheme.
pub(super) fn is_voucher(payment: &PaymentPayload) -> bool {
    #[derive(Deserialize)]
    struct Accepted {
        scheme: String,
    }
    serde_json::from_str(payment.accepted.text()).is_ok_and(|accepted: Accepted| accepted.scheme == SCHEME)
}

/// Returns `true` if the request asks for a refund, which has no price.
pub(super) fn is_refund(parts: &Parts) -> bool {
    #[derive(Deserialize)]
    struct Payload {
        r#type: String,
    }
    let Ok(Some(header)) = RawHeader::of(&parts.headers, false) else { return false };
    let Ok(Message::V2(payment)) = Message::read(header) else { return false };
    is_voucher(&payment)
        && serde_json::from_str(payment.payload.text()).is_ok_and(|payload: Payload| payload.r#type == "refund")
}

/// Serves a request that carries such a payment.
pub(super) async fn serve<S: Handler<B, R>, B: Content, R: Content>(
    channels: Channels,
    mut context: RequestContext,
    payment: PaymentPayload,
    inner: S,
    parts: Parts,
    body: LazyBody<B>,
) -> Result<Response<ResponseBody<R>>, S::Error> {
    let prechecked = match PrecheckedVoucher::read(&channels, &mut context, &payment) {
        Ok(prechecked) => prechecked,
        Err(answer) => return Ok(answer.into_voucher_response()),
    };
    let mut request = VoucherRequest {
        channels,
        context,
        payment: prechecked,
        request_key: B256::ZERO,
        name: None,
        has_secret: false,
        is_known: false,
    };
    request.describe();
    let done = match request.begin(&parts, body).await {
        Err(answer) => return Ok(answer.into_voucher_response()),
        Ok(Next::Replay(stored, charged, record)) => {
            telemetry::voucher_request(RequestOutcome::Replayed);
            return Ok(match request.context.voucher_receipt(&request.statement(&charged, &record), None) {
                Some(receipt) => replayed(&stored, receipt),
                None => answer::not_kept().into_voucher_response(),
            });
        }
        Ok(Next::Refund(held)) => {
            detached(Box::pin(async move { Ok(request.refund(held).await.into_voucher_response()) })).await
        }
        Ok(Next::Work(held, body)) => detached(Box::pin(request.work(held, inner, parts, body))).await,
    };
    done.unwrap_or_else(|| Ok(answer::panicked(None, "", Version::V2).into_voucher_response()))
}

/// A payment by voucher that fits our offer and is signed by its payer. Whether anything was deposited into the channel is not known yet.
struct PrecheckedVoucher {
    config: ChannelConfig,
    voucher: Voucher,
    deposit: Option<Deposit>,
    /// The amount asked for, if it is a request for a refund.
    refund: Option<Option<u128>>,
    /// The price; 0 for a refund.
    price: u128,
    /// Which of the channel offers was accepted.
    offer: usize,
    /// The digest of its payment identifier, where these are offered.
    id: Option<B256>,
    /// Why it would be refused if it were new: it does not fit what is offered now.
    refusal: Option<Answer>,
}

impl PrecheckedVoucher {
    /// Reads the payload, and checks it against its signature and our offer. Asks nobody.
    fn read(channels: &Channels, context: &mut RequestContext, payment: &PaymentPayload) -> Result<Self, Answer> {
        let payload: ChannelPayload = serde_json::from_str(payment.payload.text()).map_err(|error| {
            let detail = format!("the payload cannot be read: {error}");
            context.refuse_voucher(StatusCode::BAD_REQUEST, reason::PAYLOAD_TYPE, &detail, None)
        })?;
        let (config, voucher, deposit, refund) = match payload {
            ChannelPayload::Deposit { channel_config, voucher, deposit } => {
                (channel_config, voucher, Some(deposit), None)
            }
            ChannelPayload::Voucher { channel_config, voucher } => (channel_config, voucher, None, None),
            ChannelPayload::Refund(refund) => {
                let RefundRequest { channel_config, voucher, amount, .. } = *refund;
                (channel_config, voucher, None, Some(amount))
            }
            _ => {
                let detail = "a seller takes deposits, vouchers and requests for refunds";
                return Err(context.refuse_voucher(StatusCode::BAD_REQUEST, reason::PAYLOAD_TYPE, detail, None));
            }
        };
        context.payer = config.payer.to_string();
        let settings = &context.config.settings;
        let id = payment_id(payment.extensions.as_ref(), settings.payment_identifier);
        let id = id.map_err(|refusal| context.refuse(&refusal))?.filter(|_| settings.payment_identifier);
        let refuse = |code, detail: &str| context.refuse_voucher(StatusCode::PAYMENT_REQUIRED, code, detail, None);
        let checks = [
            (config.validate().is_err(), reason::CHANNEL_ID_MISMATCH, "the contract would not open this channel"),
            (
                channels.escrow().channel_id(&config) != voucher.channel_id,
                reason::CHANNEL_ID_MISMATCH,
                "channelId is not that of channelConfig on this chain",
            ),
            (
                config.payer_authorizer.is_zero(),
                reason::VOUCHER_SIGNATURE,
                "a channel needs a key that signs its vouchers (payerAuthorizer)",
            ),
        ];
        if let Some((_, code, detail)) = checks.into_iter().find(|(is_wrong, ..)| *is_wrong) {
            return Err(refuse(code, detail));
        }
        if !channels.is_signed(&config, &voucher) {
            return Err(refuse(
                reason::VOUCHER_SIGNATURE,
                "the voucher is not signed by the channel's payerAuthorizer",
            ));
        }
        let offers = context.config.catalogue.voucher_offers(&context.offers);
        let is_chosen = |offer: &VoucherOffer| match refund {
            // A refund is owed whatever is offered now, and to whatever request.
            Some(_) => is_of_channel(offer.requirements(), &config) && is_on(offer.requirements(), &payment.accepted),
            None => offer.is_accepted_by(&payment.accepted),
        };
        let offer = offers.iter().position(is_chosen);
        let accepted = offer.map(|index| offers[index].requirements());
        let terms = Self::check_terms(channels, &config, refund.is_some(), accepted);
        let offered = context.config.catalogue.extensions();
        let (price, refusal) = match terms {
            Err((code, detail)) => (0, Some(refuse(code, detail))),
            Ok(price) if refund.is_some() => (price, None),
            Ok(price) => match check_extensions(payment.extensions.as_ref(), offered) {
                Ok(()) => (price, None),
                Err(rejection) => (price, Some(context.reject(StatusCode::PAYMENT_REQUIRED, &rejection))),
            },
        };
        Ok(Self { config, voucher, deposit, refund, price, offer: offer.unwrap_or_default(), id, refusal })
    }

    /// Returns the price of the accepted offer, or what does not fit it: a code and a sentence.
    fn check_terms(
        channels: &Channels,
        config: &ChannelConfig,
        is_refund: bool,
        accepted: Option<&PaymentRequirements>,
    ) -> Result<u128, (&'static str, &'static str)> {
        let Some(accepted) = accepted else {
            let detail = "the accepted network, asset, amount, payTo, maxTimeoutSeconds or extra is not what is offered for this request";
            return Err(("invalid_payment_requirements", detail));
        };
        let (asset, pay_to): (Option<Address>, Option<Address>) =
            (accepted.asset.parse().ok(), accepted.pay_to.parse().ok());
        let checks = [
            (Some(config.receiver) != pay_to, reason::RECEIVER_MISMATCH, "the channel's receiver is not payTo"),
            (
                !channels.has_authorizer(config),
                reason::RECEIVER_AUTHORIZER_MISMATCH,
                "the channel's receiverAuthorizer is not the offered one",
            ),
            (Some(config.token) != asset, reason::TOKEN_MISMATCH, "the channel's token is not the asset"),
            (
                !is_refund && !channels.has_delay(config),
                reason::WITHDRAW_DELAY_MISMATCH,
                "the channel's withdrawDelay is not the offered one",
            ),
        ];
        match checks.into_iter().find(|(is_wrong, ..)| *is_wrong) {
            Some((_, code, detail)) => Err((code, detail)),
            None if is_refund => Ok(0),
            None => accepted.amount.parse().map_err(|_| (reason::VOUCHER_PAYLOAD, "amount is no amount")),
        }
    }
}

/// Returns `true` if the offer is for the chain of the accepted one.
fn is_on(offered: &PaymentRequirements, accepted: &Verbatim<PaymentRequirements>) -> bool {
    accepted.read().is_ok_and(|accepted| accepted.network == offered.network)
}

/// Returns `true` if the offer is for channels with this receiver and token.
fn is_of_channel(offered: &PaymentRequirements, config: &ChannelConfig) -> bool {
    offered.pay_to.parse() == Ok(config.receiver) && offered.asset.parse() == Ok(config.token)
}

/// A request that is paid with a voucher.
struct VoucherRequest {
    channels: Channels,
    context: RequestContext,
    payment: PrecheckedVoucher,
    /// Identifies the request together with the voucher.
    request_key: B256,
    /// How its payer names it.
    name: Option<RequestName>,
    /// Whether the request has something that a stranger does not know who reads the voucher on the chain.
    has_secret: bool,
    /// Whether the channel had money for the voucher when it was last looked at, and nobody but the payer can have the voucher.
    is_known: bool,
}

/// A channel that this request holds.
struct HeldChannel {
    lease: ChannelLease,
    /// The deposit that was made for this request.
    deposit: Option<Executed>,
    /// Lets the next request of the channel go on when it is dropped.
    _line: InProgress,
    _permit: OwnedSemaphorePermit,
}

/// How a request goes on.
enum Next<B> {
    Work(Box<HeldChannel>, LazyBody<B>),
    Refund(Box<HeldChannel>),
    Replay(Arc<StoredResponse>, Charged, Box<ChannelRecord>),
}

impl VoucherRequest {
    /// Gets the channel for this request, after whatever there is to wait for, or finds the answer that it got before.
    async fn begin<B: Content>(&mut self, parts: &Parts, mut body: LazyBody<B>) -> Result<Next<B>, Answer> {
        let config = self.context.config.clone();
        let limits = &config.settings.limits;
        let deadline = Instant::now() + limits.wait;
        let (permit, mut deposit) = Box::pin(self.admit()).await?;
        body.read_whole(limits).await?;
        self.identify(parts, body.bytes());
        let id = self.payment.voucher.channel_id;
        let line = loop {
            let key = PaymentKey { nonce: id.digest(), ..self.key() };
            if let Some(line) = config.in_progress.enter(key) {
                break line;
            }
            if let Some(waiting) = self.join(&key)? {
                self.wait(deadline, waiting.ended()).await?;
            }
        };
        let mut is_filled = deposit.is_some() || self.payment.deposit.is_none();
        loop {
            let record = self.channels.record(&id).await.map_err(|error| answer::ledger_failed(&error))?;
            if let Some(record) = &record
                && let Some(charged) = self.answer_in(record)?
            {
                // Its response may be streaming, and is kept when that ends. Other requests of the channel need not wait for it.
                drop(line);
                if let Some(streaming) = self.join(&PaymentKey { nonce: charged.request, ..self.key() })? {
                    self.wait(deadline, streaming.ended()).await?;
                }
                return Box::pin(self.replay(record, charged)).await;
            }
            // Let in because it may have been answered under an earlier offer (invariant I6).
            if let Some(refusal) = self.payment.refusal.take() {
                return Err(refusal);
            }
            let record = match record {
                _ if !is_filled => {
                    is_filled = true;
                    Box::pin(self.fill(record, &mut deposit)).await?
                }
                // A refund needs the contract's nonce as it is now.
                Some(record) if self.payment.refund.is_none() && self.is_good(&record) => record,
                _ => match Box::pin(self.look()).await? {
                    Some(record) => record,
                    None => {
                        return Err(self.refuse(reason::CHANNEL_NOT_FOUND, "nothing was deposited into this channel"));
                    }
                },
            };
            self.check_credit(&record)?;
            let now = config.settings.clock.now();
            let (request, voucher) = (self.request_key, self.payment.voucher.clone());
            let until = now + (limits.handler_deadline + 2 * limits.settlement_margin).as_secs() + 30;
            let is_free = record.pending.as_ref().is_none_or(|pending| pending.until <= now);
            // Two vouchers for the same amount are one: without a name, what is bought anew cannot be told from what is tried again.
            if is_free && self.name.is_some() && record.attempts_of(request) >= limits.attempts {
                let statement = Statement { charged: Some(0), record: &record, total: record.charged() };
                let receipt = self.context.voucher_receipt(&statement, deposit.as_ref());
                return Err(answer::exhausted(None).with_receipt(receipt));
            }
            let (name, price) = (self.name, self.payment.price);
            let step = ChannelStep::Begin { request, name, voucher, price, now, until };
            match FinishOnDrop::new(ChannelLease::begin(self.channels.clone(), record.id, step)).await {
                Ok(lease) => {
                    let held = Box::new(HeldChannel { lease, deposit, _line: line, _permit: permit });
                    return Ok(match self.payment.refund {
                        Some(_) => Next::Refund(held),
                        None => Next::Work(held, body),
                    });
                }
                // A copy of the request was answered meanwhile.
                Err(ChannelLedgerError::Answered(_)) => {}
                // Another process holds it.
                Err(ChannelLedgerError::Busy { .. }) => self.wait(deadline, tokio::time::sleep(POLL)).await?,
                Err(error) => return Err(self.refused(error)),
            }
        }
    }

    /// Returns a permit once the channel is known to have the money, and the deposit if it had to be made for that. Before, no body is read,
    /// and no permit taken that payers need: anybody can sign vouchers of channels that nobody filled.
    async fn admit(&mut self) -> Result<(OwnedSemaphorePermit, Option<Executed>), Answer> {
        let config = self.context.config.clone();
        if config.permits.available_permits() == 0 {
            return Err(answer::overloaded());
        }
        let record = self.channels.record(&self.payment.voucher.channel_id).await;
        let record = record.map_err(|error| answer::ledger_failed(&error))?;
        let max = self.payment.voucher.max_claimable_amount;
        let is_refund = self.payment.refund.is_some();
        let is_charged = !is_refund && record.as_ref().is_some_and(|record| max <= record.charged());
        if let Some(refusal) = self.payment.refusal.take_if(|_| !is_charged) {
            return Err(refusal);
        }
        if is_charged {
            // It was charged for before, and gets no more than its answer. It may be on the chain for everybody to read.
            let permit = config.replays.enter_owned().await.ok_or_else(answer::overloaded)?;
            return Ok((permit, None));
        }
        self.is_known = !is_refund && record.as_ref().is_some_and(|record| record.observed.state.balance > 0);
        let deposit = match record {
            Some(record) if self.has_shown_money(&record) => None,
            record => self.show_money(record).await?,
        };
        let permit = config.permits.clone().try_acquire_owned().map_err(|_| answer::overloaded())?;
        Ok((permit, deposit))
    }

    /// Returns `true` if the books show that the payer has the money.
    fn has_shown_money(&self, record: &ChannelRecord) -> bool {
        match self.payment.refund {
            Some(_) => self.channels.is_fresh(record) && record.observed.state.balance > 0,
            None => self.is_good(record),
        }
    }

    /// Asks the chain whether the channel has the money, or whether a deposit that came along would be made. Returns the deposit if it was
    /// under way already, and is made now.
    async fn show_money(&self, known: Option<ChannelRecord>) -> Result<Option<Executed>, Answer> {
        let PrecheckedVoucher { config, voucher, deposit, refund, .. } = &self.payment;
        if let Some(deposit) = deposit {
            let place = self.places().enter().await.ok_or_else(answer::overloaded)?;
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
            None => Err(self.refuse(reason::CHANNEL_NOT_FOUND, "nothing was deposited into this channel")),
        }
    }

    /// Returns the places in which it waits for the chain.
    fn places(&self) -> &AdmissionQueue {
        let config = &self.context.config;
        if self.is_known { &config.stale } else { &config.unproven }
    }

    /// Records in the span which payment this is. Its nonce follows when the request was read.
    fn describe(&self) {
        let (span, ChannelConfig { token, payer, .. }) = (Span::current(), self.payment.config);
        span.record("network", display(self.channels.network())).record("asset", display(token));
        span.record("payer", display(payer)).record("amount", display(self.payment.price));
    }

    /// Notes what identifies the request: the voucher, the request's head and body, and the payment identifier if there is one.
    fn identify(&mut self, parts: &Parts, body: &[u8]) {
        let (catalogue, PrecheckedVoucher { voucher, refund, id, .. }) =
            (&self.context.config.catalogue, &self.payment);
        let head = Fingerprint::of(parts, catalogue.seller(), catalogue.priced_by());
        self.has_secret = head.names_caller || id.is_some() || !body.is_empty();
        let request = match refund {
            None => {
                let request = keccak256([head.digest.as_slice(), &Sha256::digest(body)].concat());
                self.name = id.map(|id| RequestName { id, request });
                keccak256([request, id.unwrap_or_default()].concat())
            }
            // It is the same wherever it is asked for. Its voucher may be the one that paid last.
            Some(None) => keccak256(b"refund of all"),
            Some(Some(amount)) => keccak256([&b"refund"[..], &amount.to_be_bytes()].concat()),
        };
        self.request_key = ChannelRecord::request_key(voucher, request);
        Span::current().record("nonce", display(self.request_key));
    }

    /// Returns the answer that the request got before: with this voucher or, under its payer's name for it, with another one.
    fn answer_in(&self, record: &ChannelRecord) -> Result<Option<Charged>, Answer> {
        if let Some(charged) = record.answer_to(self.request_key) {
            return Ok(Some(*charged));
        }
        match self.name.and_then(|name| record.answer_named(name.id)) {
            Some(charged) if charged.name == self.name => Ok(Some(*charged)),
            Some(_) => Err(answer::other_id()),
            None => Ok(None),
        }
    }

    fn key(&self) -> PaymentKey {
        let ChannelConfig { token, payer, .. } = self.payment.config;
        PaymentKey { network: self.channels.network(), asset: token, payer, nonce: self.request_key }
    }

    /// Joins the requests that wait for this one.
    fn join(&self, key: &PaymentKey) -> Result<Option<WaitingCopy>, Answer> {
        let config = &self.context.config;
        let waiting = config.in_progress.join(key, config.settings.limits.copies());
        waiting.map_err(|TooManyCopies| self.busy())
    }

    /// Waits, until the deadline at most.
    async fn wait(&self, deadline: Instant, event: impl Future<Output = ()>) -> Result<(), Answer> {
        tokio::time::timeout_at(deadline, event).await.map_err(|_| self.busy())
    }

    /// Looks at the channel on the chain. Returns `None` if nothing is in it. Strangers can name channels that do not exist, so only so many
    /// do at once.
    async fn look(&self) -> Result<Option<ChannelRecord>, Answer> {
        let _place = self.places().enter().await.ok_or_else(answer::overloaded)?;
        let PrecheckedVoucher { config, voucher, .. } = &self.payment;
        self.channels.refresh(voucher.channel_id, config).await.map_err(|error| self.not_moved(&error))
    }

    /// Fills the channel, if the voucher is the right one then. A deposit that was made before is found and not made again.
    async fn fill(&self, known: Option<ChannelRecord>, made: &mut Option<Executed>) -> Result<ChannelRecord, Answer> {
        let PrecheckedVoucher { config, voucher, deposit, price, .. } = &self.payment;
        let Some(deposit) = deposit else { return Err(self.busy()) };
        if deposit.amount < self.channels.least_deposit(*price) {
            // Each costs the seller a transaction.
            let detail =
                "the deposit is less than the smallest one that is taken (minDeposit, or the price of the request)";
            return Err(self.refuse(reason::DEPOSIT_BELOW_MIN_DEPOSIT, detail));
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
                return Err(self.refuse(reason::CUMULATIVE_AMOUNT_MISMATCH, detail));
            }
        };
        if voucher.max_claimable_amount > covered.saturating_add(deposit.amount) {
            let detail = "the voucher is for more than what is in the channel and the deposit together";
            return Err(self.refuse(reason::CUMULATIVE_EXCEEDS_BALANCE, detail));
        }
        let filled = self.channels.fill(config, voucher, deposit).await;
        let (executed, record) = filled.map_err(|error| self.not_moved(&error))?;
        *made = Some(executed);
        Ok(record)
    }

    /// Refuses a voucher that is not for what was charged and the price, before money is moved for it.
    fn check_amount(&self, record: &ChannelRecord) -> Result<(), Answer> {
        let right = record.charged().checked_add(self.payment.price);
        if right == Some(self.payment.voucher.max_claimable_amount) {
            return Ok(());
        }
        Err(self.refused(ChannelLedgerError::Mismatch(Box::new(record.clone()))))
    }

    /// Refuses work while too much of the channel is unclaimed, or for too long: as long as claims fail, all that is charged can be lost.
    fn check_credit(&self, record: &ChannelRecord) -> Result<(), Answer> {
        if self.payment.price == 0 || self.channels.gives_credit(record, self.payment.price) {
            return Ok(());
        }
        let detail = "what was charged on this channel has to be claimed before more is sold on it; nothing was charged for \
             this request; repeat it later";
        let answer = Answer::problem(StatusCode::SERVICE_UNAVAILABLE, "claim_pending", detail, None);
        Err(answer.retry_after(RETRY_UNCLAIMED))
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
    async fn replay<B>(&self, record: &ChannelRecord, charged: Charged) -> Result<Next<B>, Answer> {
        let settings = &self.context.config.settings;
        let stored = self.channels.response(record, charged.request).await;
        let stored = stored.map_err(|error| answer::ledger_failed(&error))?;
        let receipt = || self.context.voucher_receipt(&self.statement(&charged, record), None);
        if let Some(names) = stored.as_ref().and_then(|stored| misfit(stored, &self.context.asked)) {
            return Err(answer::other_headers(&names).with_receipt(receipt()));
        }
        let replays = match self.has_secret {
            true => charged.replays,
            false => {
                let step = ChannelStep::Replay { request: charged.request };
                let counted = self.channels.advance(&record.id, &step).await.map_err(|error| self.refused(error))?;
                counted.answer_to(charged.request).map_or(u32::MAX, |answer| answer.replays)
            }
        };
        let age = age(settings.clock.now(), charged.at);
        match stored.filter(|_| settings.limits.may_replay(self.has_secret, replays, age)) {
            Some(stored) => Ok(Next::Replay(stored, charged, Box::new(record.clone()))),
            None => {
                let detail = "this voucher was used for this request and its response is no longer available";
                let answer = Answer::problem(StatusCode::CONFLICT, "payment_already_used", detail, None);
                Err(answer.with_receipt(receipt()))
            }
        }
    }

    /// Runs the handler and charges for its response.
    async fn work<S: Handler<B, R>, B: Content, R: Content>(
        self,
        mut held: Box<HeldChannel>,
        inner: S,
        parts: Parts,
        body: LazyBody<B>,
    ) -> Result<Response<ResponseBody<R>>, S::Error> {
        let settings = &self.context.config.settings;
        let deadline = Instant::now() + settings.limits.handler_deadline;
        let paid = Request::from_parts(paid_head(parts, self.verified_payment(&held)), body.into_unhashed());
        let limit = self.channels.ledger().channel_response_limit();
        match run_handler(inner, paid, settings, limit, deadline).await {
            Ok((parts, body)) => {
                Ok(self.after_work(held, parts, body, deadline).await.unwrap_or_else(Answer::into_voucher_response))
            }
            Err(mut why) => {
                if let NotCharged::Unsuccessful(parts, _) = &mut why {
                    take_overrides(parts);
                }
                why.answer(self.uncharged(&mut held).await, answer::unfinished, telemetry::voucher_request)
            }
        }
    }

    /// Charges for the response of work that succeeded, and lets the client have it. The error is what the client is told instead.
    async fn after_work<R: Content>(
        &self,
        mut held: Box<HeldChannel>,
        mut parts: response::Parts,
        mut body: PaidBody<R>,
        deadline: Instant,
    ) -> Result<Response<ResponseBody<R>>, Answer> {
        let amount = match actual_price(&mut parts, self.payment.price) {
            Ok(amount) => amount,
            Err(why) => {
                tracing::error!(why, "a handler asked for another price than it may; nothing was charged");
                let detail = "the work was not priced as it may be; nothing was charged for it";
                let answer = Answer::problem(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", detail, None);
                return Err(answer.with_receipt(self.uncharged(&mut held).await));
            }
        };
        let now = self.context.config.settings.clock.now();
        if !body.is_whole() {
            body = body.record(&parts, &self.context.asked, self.recording(&held.lease.record, now));
            if let Err(why) = body.begin(deadline).await {
                return Err(answer::unfinished(why).with_receipt(self.uncharged(&mut held).await));
            }
        }
        let response = body.to_keep(&parts, &self.context.asked, now);
        let step = ChannelStep::Charge { epoch: held.lease.record.epoch, amount, response, now };
        match self.charge(&held.lease.record, &step).await {
            Ok(record) => held.lease.charged(record),
            // The response is not given, and the channel is freed.
            Err(error) => {
                body.discard();
                return Err(self.not_charged(&error));
            }
        }
        telemetry::voucher_request(RequestOutcome::Paid);
        let record = &held.lease.record;
        let statement = Statement { charged: Some(amount), record, total: record.charged() };
        if let Some(receipt) = self.context.voucher_receipt(&statement, held.deposit.as_ref()) {
            mark_paid(&mut parts, receipt);
        }
        Ok(Response::from_parts(parts, body.into_response_body()))
    }

    /// Returns where a response that streams is kept.
    fn recording(&self, record: &ChannelRecord, now: u64) -> RecordingTarget {
        let ledger = RecordingLedger::Channel(self.channels.ledger().clone(), record.response_key(self.request_key));
        RecordingTarget { ledger, in_progress: self.context.config.in_progress.enter(self.key()), now }
    }

    /// Charges for work that is done. If the ledger fails it is asked again for a while.
    async fn charge(&self, held: &ChannelRecord, step: &ChannelStep) -> Result<ChannelRecord, ChannelLedgerError> {
        let mut pauses = pauses_after_work();
        loop {
            let error = match self.channels.advance(&held.id, step).await {
                Ok(record) => return Ok(record),
                Err(error) => error,
            };
            match &error {
                ChannelLedgerError::Ledger(LedgerError::Backend(_)) => {}
                // It may have been charged before, and the answer was lost.
                ChannelLedgerError::LeaseLost => match self.channels.record(&held.id).await {
                    Ok(Some(record)) if record.answer_to(self.request_key).is_some() => return Ok(record),
                    Ok(_) => return Err(error),
                    Err(_) => {}
                },
                _ => return Err(error),
            }
            if !pauses.wait().await {
                return Err(error);
            }
        }
    }

    /// Refunds what is left, or as much of it as was asked for.
    async fn refund(self, mut held: Box<HeldChannel>) -> Answer {
        let PrecheckedVoucher { voucher, refund, .. } = &self.payment;
        let asked = refund.flatten();
        let refunded = self.channels.refund(&held.lease.record, self.request_key, voucher, asked).await;
        held.lease.release().await;
        let (executed, record) = match refunded {
            Ok(refunded) => refunded,
            Err(error) => return self.not_moved(&error),
        };
        let body = serde_json::json!({ "message": "Refund acknowledged", "channelId": record.id });
        let statement = Statement { charged: None, record: &record, total: record.charged() };
        Answer::done(&body).with_receipt(self.context.voucher_receipt(&statement, Some(&executed)))
    }

    /// Returns the payment as the handler sees it.
    fn verified_payment(&self, held: &HeldChannel) -> VerifiedPayment {
        let ChannelRecord { config, network, .. } = &held.lease.record;
        VerifiedPayment {
            payer: config.payer,
            pay_to: config.receiver,
            amount: U256::from(self.payment.price),
            asset: config.token,
            network: *network,
            nonce: self.request_key,
            flow: PaymentFlow::Authorization,
            transaction: held.deposit.map(|deposit| deposit.transaction),
            attempt: held.lease.record.attempts_of(self.request_key),
        }
    }

    /// Returns what the payer is told of a request that was charged for.
    fn statement<'a>(&self, charged: &Charged, record: &'a ChannelRecord) -> Statement<'a> {
        Statement { charged: Some(charged.charged), record, total: charged.total }
    }

    /// Frees the channel. Returns a receipt if a deposit was made: the payer learns of it although nothing was charged.
    async fn uncharged(&self, held: &mut HeldChannel) -> Option<Receipt> {
        let record = held.lease.release().await;
        let statement = Statement { charged: Some(0), record, total: record.charged() };
        held.deposit.as_ref().and_then(|deposit| self.context.voucher_receipt(&statement, Some(deposit)))
    }

    /// The work is done, and the books did not take the charge for it.
    fn not_charged(&self, error: &ChannelLedgerError) -> Answer {
        match error {
            ChannelLedgerError::Ledger(error) => answer::ledger_failed(error),
            error => {
                tracing::error!(%error, channel = %self.payment.voucher.channel_id, "work could not be charged for");
                self.busy()
            }
        }
    }

    fn refuse(&self, code: &str, detail: &str) -> Answer {
        self.context.refuse_voucher(StatusCode::PAYMENT_REQUIRED, code, detail, None)
    }

    fn busy(&self) -> Answer {
        self.refuse(reason::CHANNEL_BUSY, "another request of this channel is being worked on; repeat this one later")
    }

    /// The books refused the voucher. The payer is told what would be right, so that it can sign again.
    fn refused(&self, error: ChannelLedgerError) -> Answer {
        match error {
            ChannelLedgerError::Mismatch(record) => {
                let detail = "the voucher is not for what was charged so far and the price of this request";
                let corrective = Some((self.payment.offer, &*record));
                let code = reason::CUMULATIVE_AMOUNT_MISMATCH;
                self.context.refuse_voucher(StatusCode::PAYMENT_REQUIRED, code, detail, corrective)
            }
            ChannelLedgerError::ExceedsBalance(record) => {
                let detail = match record.observed.withdrawal {
                    0 => "the voucher is for more than what is in the channel; fill it",
                    _ => "a withdrawal was announced, and the rest of the channel does not cover the voucher",
                };
                self.refuse(reason::CUMULATIVE_EXCEEDS_BALANCE, detail)
            }
            ChannelLedgerError::Ledger(error) => answer::ledger_failed(&error),
            _ => self.busy(),
        }
    }

    /// The chain was not asked, or money did not move.
    fn not_moved(&self, error: &ChannelError) -> Answer {
        match error {
            ChannelError::Rejected { reason, detail } => self.refuse(reason, detail),
            ChannelError::Pending { transaction } => {
                let detail =
                    "the transaction is under way and in no block yet; repeat the same request with the same payment";
                Answer::problem(StatusCode::SERVICE_UNAVAILABLE, reason::SETTLEMENT_PENDING, detail, *transaction)
                    .retry_soon()
            }
            ChannelError::Unavailable(error) => answer::unavailable(error),
        }
    }
}

/// What a payer is told of a request and its channel.
pub(super) struct Statement<'a> {
    /// What the request cost; `None` for a refund.
    pub(super) charged: Option<u128>,
    pub(super) record: &'a ChannelRecord,
    /// What was charged in all after it.
    pub(super) total: u128,
}

/// The right to charge a channel. Dropped before it is [charged](Self::charged), as when the handler panics, it frees the channel.
struct ChannelLease {
    /// `None` once there is nothing to free.
    channels: Option<Channels>,
    record: ChannelRecord,
}

impl ChannelLease {
    async fn begin(channels: Channels, id: ChannelId, step: ChannelStep) -> Result<Self, ChannelLedgerError> {
        let record = channels.advance(&id, &step).await?;
        Ok(Self { channels: Some(channels), record })
    }

    /// Frees the channel without a charge. Returns the channel as it is then.
    async fn release(&mut self) -> &ChannelRecord {
        if let Some(channels) = self.channels.take()
            && let Some(freed) = release(&channels, &self.record).await
        {
            self.record = freed;
        }
        &self.record
    }

    /// Notes that the request was charged for, which freed the channel.
    fn charged(&mut self, record: ChannelRecord) {
        self.channels = None;
        self.record = record;
    }
}

impl Drop for ChannelLease {
    fn drop(&mut self) {
        if let (Some(channels), Ok(runtime)) = (self.channels.take(), tokio::runtime::Handle::try_current()) {
            let record = self.record.clone();
            runtime.spawn(async move { release(&channels, &record).await });
        }
    }
}

async fn release(channels: &Channels, record: &ChannelRecord) -> Option<ChannelRecord> {
    let freed = channels.advance(&record.id, &ChannelStep::Release { epoch: record.epoch }).await;
    freed.inspect_err(|error| tracing::warn!(%error, channel = %record.id, "a channel was not freed")).ok()
}

/// Takes out of a response what the handler says of its price.
fn take_overrides(parts: &mut response::Parts) -> (Option<ActualPrice>, Option<HeaderValue>) {
    (parts.extensions.remove(), parts.headers.remove(&OVERRIDES))
}

/// Returns what the handler asks for its response, in atomic units. The error says what is wrong with it.
fn actual_price(parts: &mut response::Parts, price: u128) -> Result<u128, &'static str> {
    let amount = match take_overrides(parts) {
        (Some(ActualPrice(amount)), _) => amount.atomic().into(),
        (None, Some(header)) => overridden(header.as_bytes(), price).ok_or("Settlement-Overrides cannot be read")?,
        (None, None) => price,
    };
    if amount > price { Err("more than the price") } else { Ok(amount) }
}

/// Reads `{"amount": "…"}`: atomic units, a share of the price (`33.33%`), or dollars (`$0.05`).
fn overridden(header: &[u8], price: u128) -> Option<u128> {
    #[derive(Deserialize)]
    struct Overrides {
        #[serde(default)]
        amount: Option<String>,
    }
    let Overrides { amount } = serde_json::from_slice(header).ok()?;
    let Some(amount) = amount else { return Some(price) };
    if let Some(share) = amount.strip_suffix('%') {
        let (whole, cents) = share.split_once('.').unwrap_or((share, ""));
        let is_number = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
        if whole.is_empty() || cents.len() > 2 || !is_number(whole) || !is_number(cents) {
            return None;
        }
        let hundredths: u128 = format!("{whole}{cents:0<2}").parse().ok()?;
        return (hundredths <= 10_000).then(|| price.checked_mul(hundredths).map(|amount| amount / 10_000))?;
    }
    match amount.starts_with('$') {
        true => Usdc::try_from(amount.as_str()).ok().map(|amount| amount.atomic().into()),
        false => crate::vouchers::amount::parse(&amount),
    }
}
