//! `/verify` and `/settle` for payment channels (scheme `batch-settlement`).
//!
//! Nothing is recorded here: what was done before is found on the chain.

use std::sync::Arc;

use alloy_primitives::{Address, Bytes};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};

use super::{
    FacilitatorServiceBuilder, Shared,
    messages::{Answer, Operation},
};
use crate::{
    facilitator::channels::{ChannelError, ChannelFacilitator, Executed, RefundOrder, SignedRefund},
    network::Network,
    protocol::{PaymentRequirements, Reason, SupportedKind, SupportedResponse},
    vouchers::{
        AuthorizerKey, ChannelConfig, ChannelObservation, ChannelPayload, ChannelState, Claim, Escrow, RefundRequest,
        SCHEME, Voucher, amount, reason,
    },
};

/// The largest request body, in bytes: a batch of a hundred claims has 64 KiB or more.
pub(super) const MAX_BODY: usize = 256 * 1024;

/// The chains whose channels are served, and the key that may claim and refund for callers.
#[derive(Default)]
pub(super) struct Channels {
    pub(super) facilitators: Vec<Arc<dyn ChannelFacilitator>>,
    /// Used only for callers with a bearer key.
    pub(super) authorizer: Option<AuthorizerKey>,
    /// All callers of `/verify` and `/settle` have a bearer key.
    pub(super) are_callers_known: bool,
}

impl FacilitatorServiceBuilder {
    /// Serves payment channels on one network: `/verify` and `/settle` for deposits, claims, settlements and refunds, with the rules of
    /// version 1.1 of the scheme and vouchers kept by the seller. Default: none. Bodies may then have 256 KiB, so that a hundred claims fit.
    ///
    /// Vouchers must be signed by a key; those that only a payer's contract could check (ERC-1271) are refused.
    ///
    /// A caller that asks for a claim or refund sends the receiver authorizer's signature over it.
    pub fn channels(mut self, facilitator: impl ChannelFacilitator) -> Self {
        self.channels.facilitators.push(Arc::new(facilitator));
        self
    }

    /// Sets a key that sellers may name as their channels' receiver authorizer. Default: none.
    ///
    /// It signs claims and refunds that lack a signature, and only while a [`bearer_key`](Self::bearer_key) is required: anybody else could
    /// return to payers what sellers have earned. Each caller with a bearer key is trusted with all channels of this key.
    pub fn authorizer(mut self, key: AuthorizerKey) -> Self {
        self.channels.authorizer = Some(key);
        self
    }
}

/// The request body of `/verify` and `/settle`, as far as it is the same for all payloads.
pub(super) struct ChannelRequest {
    requirements: PaymentRequirements,
    accepted: PaymentRequirements,
    payload: Box<RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payment_payload: Payment,
    payment_requirements: PaymentRequirements,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Payment {
    x402_version: u64,
    accepted: PaymentRequirements,
    payload: Box<RawValue>,
}

/// A refusal: its code, and what is wrong.
type Refusal = (&'static str, String);

fn refuse<T>(reason: &'static str, detail: impl Into<String>) -> Result<T, Refusal> {
    Err((reason, detail.into()))
}

impl ChannelRequest {
    /// Returns `None` if the requirements are not of this scheme.
    pub(super) fn read(body: &[u8]) -> Option<Result<Self, Refusal>> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Peek {
            payment_requirements: Scheme,
        }
        #[derive(Deserialize)]
        struct Scheme {
            scheme: String,
        }
        let peek: Peek = serde_json::from_slice(body).ok()?;
        (peek.payment_requirements.scheme == SCHEME).then(|| match serde_json::from_slice::<Envelope>(body) {
            Ok(envelope) if envelope.payment_payload.x402_version == 2 => Ok(Self {
                requirements: envelope.payment_requirements,
                accepted: envelope.payment_payload.accepted,
                payload: envelope.payment_payload.payload,
            }),
            Ok(_) => refuse(reason::SCHEME, "the scheme exists in x402 version 2 only"),
            Err(error) => refuse(reason::PAYLOAD_TYPE, error.to_string()),
        })
    }

    fn read_payload(&self) -> Result<ChannelPayload, Refusal> {
        let error = match serde_json::from_str(self.payload.get()) {
            Ok(payload) => return Ok(payload),
            Err(error) => error.to_string(),
        };
        let payload: Value = serde_json::from_str(self.payload.get()).unwrap_or_default();
        let code = match payload["type"].as_str().unwrap_or_default() {
            "deposit" if payload["deposit"]["authorization"].get("permit2Authorization").is_some() => {
                reason::ERC3009_AUTHORIZATION_REQUIRED
            }
            "deposit" => reason::DEPOSIT_PAYLOAD,
            "voucher" => reason::VOUCHER_PAYLOAD,
            "refund" => reason::REFUND_PAYLOAD,
            "claim" => reason::CLAIM_PAYLOAD,
            "settle" => reason::SETTLE_PAYLOAD,
            _ => reason::PAYLOAD_TYPE,
        };
        refuse(code, error)
    }

    /// Returns the price of the request, at most.
    fn price(&self, code: &'static str) -> Result<u128, Refusal> {
        let amount = &self.requirements.amount;
        amount::parse(amount).ok_or_else(|| (code, format!("the offer's amount {amount:?} is not a decimal integer")))
    }

    /// Returns the refusal of a channel that is not the offer's.
    fn check_config(&self, config: &ChannelConfig, voucher: &Voucher, escrow: &Escrow) -> Result<(), Refusal> {
        if escrow.channel_id(config) != voucher.channel_id {
            return refuse(
                reason::CHANNEL_ID_MISMATCH,
                "the voucher names another channel than the configuration makes",
            );
        }
        if !is(&self.requirements.pay_to, config.receiver) {
            return refuse(reason::RECEIVER_MISMATCH, "the channel's receiver is not payTo");
        }
        if !is(&self.requirements.asset, config.token) {
            return refuse(reason::TOKEN_MISMATCH, "the channel's token is not the asset");
        }
        Ok(())
    }

    /// Checks the terms that a seller states in `extra`.
    fn check_terms(&self, config: &ChannelConfig) -> Result<(), Refusal> {
        let extra = &self.requirements.extra;
        let authorizer = extra.get("receiverAuthorizer").and_then(Value::as_str).unwrap_or_default();
        if config.receiver_authorizer.is_zero() || !is(authorizer, config.receiver_authorizer) {
            return refuse(
                reason::RECEIVER_AUTHORIZER_MISMATCH,
                "the channel's receiverAuthorizer is not extra.receiverAuthorizer",
            );
        }
        match extra.get("withdrawDelay") {
            Some(delay) if delay.as_u64() != Some(config.withdraw_delay.into()) => {
                return refuse(reason::WITHDRAW_DELAY_MISMATCH, "the channel's delay is not extra.withdrawDelay");
            }
            _ => {}
        }
        match config.validate() {
            Ok(()) => Ok(()),
            Err(error) => refuse(reason::WITHDRAW_DELAY_OUT_OF_RANGE, error.to_string()),
        }
    }
}

/// Returns `true` if the text is this address, in whatever case.
fn is(text: &str, address: Address) -> bool {
    text.parse() == Ok(address)
}

/// Checks a voucher against the channel: what is in it, and what was claimed. `more` is on its way into it.
///
/// The floor is that of version 1.1: with a lower ceiling a payer could be served for nothing by a seller that has lost its records.
fn check_amounts(voucher: &Voucher, channel: &ChannelState, more: u128, price: u128) -> Result<(), Refusal> {
    let max = voucher.max_claimable_amount;
    if channel.balance == 0 && more == 0 {
        return refuse(reason::CHANNEL_NOT_FOUND, "nothing was deposited into the channel");
    }
    let balance = channel.balance.saturating_add(more);
    if max > balance {
        let detail = format!("the voucher is for {max}, the channel's balance is {balance}");
        return refuse(reason::CUMULATIVE_EXCEEDS_BALANCE, detail);
    }
    let claimed = channel.total_claimed;
    if claimed.checked_add(price).is_none_or(|least| max < least) {
        let detail = format!("the voucher is for {max}, {claimed} was claimed and the price is {price}");
        return refuse(reason::CUMULATIVE_BELOW_CLAIMED, detail);
    }
    Ok(())
}

impl Channels {
    pub(super) fn is_empty(&self) -> bool {
        self.facilitators.is_empty()
    }

    /// Adds what is served to the answer of `/supported`.
    pub(super) fn add_to(&self, supported: &mut SupportedResponse) {
        let kinds = self.facilitators.iter().map(|facilitator| {
            let mut kind = SupportedKind::new(2, SCHEME, facilitator.network().to_string());
            kind.extra = self
                .authorizer()
                .map(|key| Map::from_iter([("receiverAuthorizer".to_owned(), key.address().to_string().into())]));
            kind
        });
        supported.kinds.extend(kinds);
        let senders = self.facilitators.iter().flat_map(|facilitator| facilitator.senders());
        for sender in senders.map(|sender| sender.to_string()) {
            let known = supported.signers.entry("eip155:*".to_owned()).or_default();
            if !known.contains(&sender) {
                known.push(sender);
            }
        }
    }

    /// The authorizer's key, if it may sign for callers.
    fn authorizer(&self) -> Option<&AuthorizerKey> {
        self.authorizer.as_ref().filter(|_| self.are_callers_known)
    }

    fn find(&self, request: &ChannelRequest) -> Result<&Arc<dyn ChannelFacilitator>, Refusal> {
        if request.accepted.scheme != SCHEME {
            return refuse(reason::SCHEME, "the payment accepted another scheme");
        }
        if request.accepted.network != request.requirements.network {
            return refuse(reason::NETWORK_MISMATCH, "the payment accepted another network");
        }
        let network: Option<Network> = request.requirements.network.parse().ok();
        let served = self.facilitators.iter().find(|facilitator| Some(facilitator.network()) == network);
        served.ok_or_else(|| (reason::NETWORK_MISMATCH, "channels on this network are not served here".to_owned()))
    }
}

impl Shared {
    /// Answers a request of the scheme.
    pub(super) async fn answer_channels(
        &self,
        operation: Operation,
        request: Result<ChannelRequest, Refusal>,
    ) -> Answer {
        let channels = &self.channels;
        let request = match (request, operation) {
            (Ok(request), _) => request,
            (Err((reason, detail)), Operation::Verify) => {
                return Answer::invalid_verification(Reason::from(reason), &detail);
            }
            (Err((reason, detail)), Operation::Settle) => {
                return Answer::invalid_settlement(Reason::from(reason), &detail);
            }
        };
        match operation {
            Operation::Verify => {
                let mut payer = None;
                match self.verify_channel(channels, &request, &mut payer).await {
                    Ok(observed) => verified(&observed, payer),
                    Err(Failure::Channel(ChannelError::Unavailable(error))) => {
                        tracing::warn!(%error, "a channel cannot be verified now");
                        Answer::unavailable("the payment cannot be verified now", error.retry_after())
                    }
                    Err(failure) => {
                        let (reason, detail, _) = failure.parts();
                        Answer::json(
                            StatusCode::OK,
                            &json!({
                                "isValid": false, "invalidReason": reason, "invalidMessage": detail,
                                "payer": payer.map(|payer| payer.to_string()),
                            }),
                        )
                    }
                }
            }
            Operation::Settle => {
                let network = &request.requirements.network;
                match self.settle_channel(channels, &request).await {
                    Ok(done) => done.into_answer(network),
                    Err(Failure::Channel(ChannelError::Unavailable(error))) => {
                        tracing::warn!(%error, "an action on a channel cannot be done now");
                        Answer::unavailable("nothing was sent", error.retry_after())
                    }
                    Err(failure) => {
                        let (reason, detail, transaction) = failure.parts();
                        Answer::json(
                            StatusCode::OK,
                            &json!({
                                "success": false, "errorReason": reason, "errorMessage": detail,
                                "transaction": transaction, "network": network,
                            }),
                        )
                    }
                }
            }
        }
    }

    async fn verify_channel(
        &self,
        channels: &Channels,
        request: &ChannelRequest,
        payer: &mut Option<Address>,
    ) -> Result<ChannelObservation, Failure> {
        let facilitator = channels.find(request)?;
        let (config, voucher, deposit, price) = match request.read_payload()? {
            ChannelPayload::Deposit { channel_config, voucher, deposit } => {
                let price = request.price(reason::DEPOSIT_PAYLOAD)?;
                (channel_config, voucher, Some(deposit), price.max(1))
            }
            ChannelPayload::Voucher { channel_config, voucher } => {
                // A voucher must promise something beyond what was claimed.
                (channel_config, voucher, None, request.price(reason::VOUCHER_PAYLOAD)?.max(1))
            }
            ChannelPayload::Refund(refund) => (refund.channel_config, refund.voucher, None, 0),
            _ => return Err((reason::PAYLOAD_TYPE, "only settled, not verified".to_owned()).into()),
        };
        *payer = Some(config.payer);
        let escrow = Escrow::on(facilitator.network());
        self.check_channel(request, &config, &voucher, &escrow)?;
        let observed = match &deposit {
            Some(deposit) => facilitator.verify_deposit(&config, deposit).await?,
            None => observe(&**facilitator, &escrow, &config).await?,
        };
        check_amounts(&voucher, &observed.state, deposit.map_or(0, |deposit| deposit.amount), price)?;
        Ok(observed)
    }

    /// Checks what needs no chain.
    fn check_channel(
        &self,
        request: &ChannelRequest,
        config: &ChannelConfig,
        voucher: &Voucher,
        escrow: &Escrow,
    ) -> Result<(), Refusal> {
        request.check_config(config, voucher, escrow)?;
        request.check_terms(config)?;
        self.check_payee(config.receiver)?;
        match voucher.is_of(config, escrow) {
            true => Ok(()),
            false => refuse(reason::VOUCHER_SIGNATURE, "the voucher is not signed by the channel's voucher key"),
        }
    }

    fn check_payee(&self, payee: Address) -> Result<(), Refusal> {
        match self.payees.is_empty() || self.payees.contains(&payee) {
            true => Ok(()),
            false => refuse(reason::RECEIVER_MISMATCH, "this payee is not served here"),
        }
    }

    async fn settle_channel(&self, channels: &Channels, request: &ChannelRequest) -> Result<Done, Failure> {
        let facilitator = channels.find(request)?;
        let escrow = Escrow::on(facilitator.network());
        match request.read_payload()? {
            ChannelPayload::Deposit { channel_config: config, voucher, deposit } => {
                self.check_channel(request, &config, &voucher, &escrow)?;
                let before = observe(&**facilitator, &escrow, &config).await?;
                // The amount may be what is charged by now, which can be nothing.
                let price = request.price(reason::DEPOSIT_PAYLOAD)?;
                check_amounts(&voucher, &before.state, deposit.amount, price)?;
                let executed = facilitator.deposit(&config, &voucher, &deposit).await?;
                Ok(Done::of(&executed, config.payer))
            }
            ChannelPayload::Claim { claims, claim_authorizer_signature } => {
                for claim in &claims {
                    self.check_payee(claim.voucher.channel.receiver)?;
                }
                let signature = match claim_authorizer_signature {
                    Some(signature) => signature,
                    None => sign_claims(channels, &escrow, &claims).await?,
                };
                let claimed = facilitator.claim_signed(&claims, &signature).await?;
                let transaction = claimed.transactions.first().map(ToString::to_string).unwrap_or_default();
                Ok(Done { transaction, ..Done::default() })
            }
            ChannelPayload::Settle { receiver, token } => {
                self.check_payee(receiver)?;
                match facilitator.settle(receiver, token).await? {
                    Some(settled) => Ok(Done {
                        transaction: settled.transaction.to_string(),
                        amount: Some(settled.amount),
                        ..Done::default()
                    }),
                    None => Err((reason::NOTHING_TO_SETTLE, "all that was claimed was transferred".to_owned()).into()),
                }
            }
            ChannelPayload::Refund(refund) => {
                let config = refund.channel_config;
                request.check_config(&config, &refund.voucher, &escrow)?;
                self.check_payee(config.receiver)?;
                let refund = sign_refund(channels, &escrow, *refund).await?;
                Ok(Done::of(&facilitator.refund_signed(&refund).await?, config.payer))
            }
            _ => Err((reason::PAYLOAD_TYPE, "vouchers are kept and claimed by the seller".to_owned()).into()),
        }
    }
}

async fn observe(
    facilitator: &dyn ChannelFacilitator,
    escrow: &Escrow,
    config: &ChannelConfig,
) -> Result<ChannelObservation, Failure> {
    let observed = facilitator.observe(&[escrow.channel_id(config)]).await?.pop();
    observed.ok_or_else(|| (reason::RPC_READ_FAILED, "the channel was not read".to_owned()).into())
}

/// Signs claims with the service's own key, for a caller that it knows.
async fn sign_claims(channels: &Channels, escrow: &Escrow, claims: &[Claim]) -> Result<Bytes, Failure> {
    let key = own_key(channels, claims.iter().map(|claim| &claim.voucher.channel))?;
    Ok(key.sign_claims(escrow, claims).await.map_err(ChannelError::from)?)
}

/// Completes a refund, with the service's own key where the caller did not sign.
async fn sign_refund(channels: &Channels, escrow: &Escrow, refund: RefundRequest) -> Result<SignedRefund, Failure> {
    let Some(amount) = refund.amount else {
        return Err((reason::REFUND_AMOUNT_INVALID, "a refund's amount is missing".to_owned()).into());
    };
    let Some(nonce) = refund.refund_nonce else {
        return Err((reason::REFUND_PAYLOAD, "refundNonce is missing".to_owned()).into());
    };
    let mut claims = refund.claims.unwrap_or_default();
    if claims.len() > 1 {
        return Err((reason::REFUND_PAYLOAD, "more than one claim".to_owned()).into());
    }
    let claim = claims.pop();
    let config = refund.channel_config;
    let refund_signature = match refund.refund_authorizer_signature {
        Some(signature) => signature,
        None => {
            let key = own_key(channels, [&config])?;
            key.sign_refund(escrow, escrow.channel_id(&config), nonce, amount).await.map_err(ChannelError::from)?
        }
    };
    let claim_signature = match (refund.claim_authorizer_signature, &claim) {
        (None, Some(claim)) => Some(sign_claims(channels, escrow, std::slice::from_ref(claim)).await?),
        (signature, _) => signature,
    };
    let order = RefundOrder { config, voucher: refund.voucher, amount, nonce, claim };
    Ok(SignedRefund { order, refund_signature, claim_signature })
}

/// Returns the service's key if it may sign for the caller, and is the authorizer of these channels.
fn own_key<'a>(
    channels: &Channels,
    configs: impl IntoIterator<Item = &'a ChannelConfig>,
) -> Result<&AuthorizerKey, Refusal> {
    let Some(key) = channels.authorizer() else {
        return refuse(reason::AUTHORIZER_NOT_CONFIGURED, "the receiver authorizer's signature is missing");
    };
    match configs.into_iter().all(|config| config.receiver_authorizer == key.address()) {
        true => Ok(key),
        false => {
            refuse(reason::AUTHORIZER_ADDRESS_MISMATCH, "the channel's receiverAuthorizer is not this facilitator")
        }
    }
}

/// Why a request of the scheme was not answered with a success.
enum Failure {
    Refused(Refusal),
    Channel(ChannelError),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<ChannelError> for Failure {
    fn from(error: ChannelError) -> Self {
        Self::Channel(error)
    }
}

impl Failure {
    /// Returns the code, the message and the transaction.
    fn parts(self) -> (&'static str, String, String) {
        match self {
            Self::Refused((reason, detail)) | Self::Channel(ChannelError::Rejected { reason, detail }) => {
                (reason, detail, String::new())
            }
            Self::Channel(ChannelError::Pending { transaction }) => (
                reason::SETTLEMENT_PENDING,
                "the outcome is not known yet: send the same request again".to_owned(),
                transaction.map(|hash| hash.to_string()).unwrap_or_default(),
            ),
            Self::Channel(ChannelError::Unavailable(error)) => {
                (reason::RPC_READ_FAILED, error.to_string(), String::new())
            }
        }
    }
}

/// What a successful `/settle` says.
#[derive(Default)]
struct Done {
    transaction: String,
    amount: Option<u128>,
    payer: Option<Address>,
    channel: Option<ChannelState>,
}

impl Done {
    fn of(executed: &Executed, payer: Address) -> Self {
        Self {
            transaction: executed.transaction.to_string(),
            amount: Some(executed.amount),
            payer: Some(payer),
            channel: Some(executed.observed.state),
        }
    }

    fn into_answer(self, network: &str) -> Answer {
        let mut body = json!({ "success": true, "transaction": self.transaction, "network": network });
        if let Some(amount) = self.amount {
            body["amount"] = amount.to_string().into();
        }
        if let Some(payer) = self.payer {
            body["payer"] = payer.to_string().into();
        }
        if let Some(channel) = self.channel {
            body["extra"] = json!({ "channelState": channel });
        }
        Answer::json(StatusCode::OK, &body)
    }
}

fn verified(observed: &ChannelObservation, payer: Option<Address>) -> Answer {
    let payer = payer.map(|payer| payer.to_string());
    Answer::json(StatusCode::OK, &json!({ "isValid": true, "payer": payer, "extra": observed.state }))
}
