//! `/verify` and `/settle` for payment channels (scheme `batch-settlement`).
//!
//! Nothing is recorded here: what was done before is found on the chain.

use std::sync::Arc;

use alloy_primitives::{Address, B256, Bytes, U256};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};
use tokio::time::Instant;
use tower_x402::{
    Network,
    eip3009::PaymentSignature,
    facilitator::{
        FacilitatorError,
        channels::{ChannelError, ChannelFacilitator, Executed, RefundOrder, SignedRefund, gas},
    },
    protocol::{PaymentRequirements, Reason, SupportedKind, SupportedResponse},
    vouchers::{
        AuthorizerKey, ChannelConfig, ChannelObservation, ChannelPayload, ChannelState, Claim, Escrow, RefundRequest,
        SCHEME, Voucher, reason,
    },
};

use crate::{
    FacilitatorServiceBuilder, Shared,
    access::Caller,
    gas::ReservedGas,
    messages::{Answer, InvalidRequest, Operation},
};

/// The largest request body where claims may have many rows, in bytes: a batch of a hundred has 64 KiB or more.
pub(crate) const MAX_BODY: usize = 256 * 1024;

/// The chains whose channels are served, and the key that may claim and refund for callers.
#[derive(Default)]
pub(crate) struct Channels {
    pub(crate) facilitators: Vec<Arc<dyn ChannelFacilitator>>,
    /// Used only for callers with a bearer key.
    pub(crate) authorizer: Option<AuthorizerKey>,
    /// All callers of `/verify` and `/settle` have a bearer key.
    pub(crate) are_callers_known: bool,
}

impl FacilitatorServiceBuilder {
    /// Serves payment channels on one network: `/verify` and `/settle` for deposits, claims, settlements and refunds, with the rules of
    /// version 1.1 of the scheme and vouchers kept by the seller. Default: none.
    ///
    /// Vouchers, claims and refunds must be signed by keys; signatures that only a contract could check (ERC-1271) are refused. Only
    /// channels of the [served tokens](Self::asset) are served.
    ///
    /// A caller that asks for a claim or refund sends the receiver authorizer's signature over it. `/supported` says in `extra.maxClaims` how
    /// many rows a claim may have; see [`max_gas`](Self::max_gas).
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
#[derive(Deserialize)]
pub(crate) struct ChannelRequest {
    #[serde(rename = "paymentPayload")]
    payment: Payment,
    #[serde(rename = "paymentRequirements")]
    requirements: PaymentRequirements,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Payment {
    x402_version: u64,
    accepted: PaymentRequirements,
    payload: Box<RawValue>,
}

/// The codes of actions whose transaction reverted.
const REVERTED: [&str; 4] = [
    reason::DEPOSIT_TRANSACTION_FAILED,
    reason::CLAIM_TRANSACTION_FAILED,
    reason::SETTLE_TRANSACTION_FAILED,
    reason::REFUND_TRANSACTION_FAILED,
];

fn rejected(reason: &'static str, detail: impl Into<String>) -> ChannelError {
    ChannelError::Rejected { reason, detail: detail.into() }
}

fn refuse<T>(reason: &'static str, detail: impl Into<String>) -> Result<T, ChannelError> {
    Err(rejected(reason, detail))
}

impl ChannelRequest {
    /// Returns `None` if the requirements are not of this scheme.
    pub(crate) fn read(body: &[u8]) -> Option<Result<Self, InvalidRequest>> {
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
        let invalid = |reason, detail| Err(InvalidRequest { reason: Reason::from(reason), detail });
        (peek.payment_requirements.scheme == SCHEME).then(|| match serde_json::from_slice::<Self>(body) {
            Ok(request) if request.payment.x402_version == 2 => Ok(request),
            Ok(_) => invalid(reason::SCHEME, "the scheme exists in x402 version 2 only".to_owned()),
            Err(error) => invalid(reason::PAYLOAD_TYPE, error.to_string()),
        })
    }

    fn read_payload(&self) -> Result<ChannelPayload, ChannelError> {
        let error = match serde_json::from_str(self.payment.payload.get()) {
            Ok(payload) => return Ok(payload),
            Err(error) => error.to_string(),
        };
        let payload: Value = serde_json::from_str(self.payment.payload.get()).unwrap_or_default();
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
    fn price(&self, code: &'static str) -> Result<u128, ChannelError> {
        let amount = &self.requirements.amount;
        let detail = || format!("the offer's amount {amount:?} is not a decimal integer");
        atomic(amount).ok_or_else(|| rejected(code, detail()))
    }

    /// Returns the refusal of a channel that is not the offer's.
    fn check_config(&self, config: &ChannelConfig, voucher: &Voucher, escrow: &Escrow) -> Result<(), ChannelError> {
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
    fn check_terms(&self, config: &ChannelConfig) -> Result<(), ChannelError> {
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

/// Reads an amount, of which there is one text only: two readers must not disagree.
fn atomic(text: &str) -> Option<u128> {
    let amount: u128 = text.parse().ok()?;
    (amount.to_string() == text).then_some(amount)
}

/// Returns `true` if the text is this address, in whatever case.
fn is(text: &str, address: Address) -> bool {
    text.parse() == Ok(address)
}

/// Checks a voucher against the channel: what is in it, and what was claimed. `more` is on its way into it.
///
/// The floor is that of version 1.1: with a lower ceiling a payer could be served for nothing by a seller that has lost its records.
fn check_amounts(voucher: &Voucher, channel: &ChannelState, more: u128, price: u128) -> Result<(), ChannelError> {
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
    pub(crate) fn is_empty(&self) -> bool {
        self.facilitators.is_empty()
    }

    /// Adds what is served to the answer of `/supported`.
    pub(crate) fn add_to(&self, supported: &mut SupportedResponse, max_claims: usize) {
        let kinds = self.facilitators.iter().map(|facilitator| {
            let mut kind = SupportedKind::new(2, SCHEME, facilitator.network().to_string());
            let mut extra = Map::from_iter([("maxClaims".to_owned(), max_claims.into())]);
            if let Some(key) = self.authorizer() {
                extra.insert("receiverAuthorizer".to_owned(), key.address().to_string().into());
            }
            kind.extra = Some(extra);
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

    /// Returns the gas that each chain's transactions have used.
    pub(crate) fn gas_used(&self) -> impl Iterator<Item = u64> {
        self.facilitators.iter().map(|facilitator| facilitator.gas_used())
    }

    /// The authorizer's key, if it may sign for callers.
    fn authorizer(&self) -> Option<&AuthorizerKey> {
        self.authorizer.as_ref().filter(|_| self.are_callers_known)
    }

    fn find(&self, request: &ChannelRequest) -> Result<&Arc<dyn ChannelFacilitator>, ChannelError> {
        if request.payment.accepted.scheme != SCHEME {
            return refuse(reason::SCHEME, "the payment accepted another scheme");
        }
        if request.payment.accepted.network != request.requirements.network {
            return refuse(reason::NETWORK_MISMATCH, "the payment accepted another network");
        }
        let network: Option<Network> = request.requirements.network.parse().ok();
        let served = self.facilitators.iter().find(|facilitator| Some(facilitator.network()) == network);
        served.map_or_else(|| refuse(reason::NETWORK_MISMATCH, "channels on this network are not served here"), Ok)
    }
}

impl Shared {
    /// Answers a request of the scheme.
    pub(crate) async fn answer_channels(
        &self,
        operation: Operation,
        request: &ChannelRequest,
        caller: Caller,
    ) -> Answer {
        let channels = &self.channels;
        match operation {
            Operation::Verify => {
                let mut payer = None;
                match self.verify_channel(channels, request, &mut payer).await {
                    Ok(observed) => verified(&observed, payer),
                    Err(ChannelError::Unavailable(error)) => {
                        tracing::warn!(%error, "a channel cannot be verified now");
                        Answer::unavailable("the payment cannot be verified now", error.retry_after())
                    }
                    Err(error) => {
                        let (reason, detail, _) = parts(error);
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
                match self.settle_channel(channels, request).await {
                    Ok(done) => done.into_answer(network),
                    Err(ChannelError::Unavailable(error)) => {
                        tracing::warn!(%error, "an action on a channel cannot be done now");
                        Answer::unavailable("nothing was sent", error.retry_after())
                    }
                    Err(error) => {
                        let (reason, detail, transaction) = parts(error);
                        if REVERTED.contains(&reason) {
                            self.gas.note_revert(caller);
                        }
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
    ) -> Result<ChannelObservation, ChannelError> {
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
            _ => return refuse(reason::PAYLOAD_TYPE, "only settled, not verified"),
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
    ) -> Result<(), ChannelError> {
        request.check_config(config, voucher, escrow)?;
        request.check_terms(config)?;
        self.check_served(escrow, config.receiver, config.token)?;
        match voucher.is_of(config, escrow) {
            true => Ok(()),
            false => refuse(reason::VOUCHER_SIGNATURE, "the voucher is not signed by the channel's voucher key"),
        }
    }

    /// Fails if the payee or the token is not served.
    fn check_served(&self, escrow: &Escrow, payee: Address, token: Address) -> Result<(), ChannelError> {
        if !self.payees.is_empty() && !self.payees.contains(&payee) {
            return refuse(reason::RECEIVER_MISMATCH, "this payee is not served here");
        }
        match self.serves_token(escrow.network(), token) {
            true => Ok(()),
            false => refuse(reason::TOKEN_MISMATCH, "this token is not served here"),
        }
    }

    /// Checks claims without the chain: whose they are, and that keys signed them and each of their vouchers.
    fn check_claims(&self, escrow: &Escrow, claims: &[Claim], signature: &Bytes) -> Result<(), ChannelError> {
        let entries: Vec<_> = claims.iter().map(|claim| claim.entry(escrow)).collect();
        let signer = signer_of(signature, escrow.claim_batch_digest(&entries));
        for (claim, entry) in claims.iter().zip(&entries) {
            let config = &claim.voucher.channel;
            self.check_served(escrow, config.receiver, config.token)?;
            let max_claimable_amount = claim.voucher.max_claimable_amount;
            let voucher = Voucher { channel_id: entry.channel, max_claimable_amount, signature: claim.signature };
            if voucher.signer(escrow) != Some(config.voucher_signer()) {
                return refuse(reason::VOUCHER_SIGNATURE, "a voucher is not signed by its channel's voucher key");
            }
            if signer != Some(config.receiver_authorizer) {
                return refuse(
                    reason::CLAIM_SIMULATION_FAILED,
                    "the claim is not signed by the receiverAuthorizer's key",
                );
            }
        }
        Ok(())
    }

    /// Checks without the chain that a key signed the refund, and the claim that goes before it.
    fn check_refund(&self, escrow: &Escrow, refund: &SignedRefund) -> Result<(), ChannelError> {
        let RefundOrder { config, amount, nonce, claim, .. } = &refund.order;
        if let (Some(claim), Some(signature)) = (claim, &refund.claim_signature) {
            self.check_claims(escrow, std::slice::from_ref(claim), signature)?;
        }
        let digest = escrow.refund_digest(escrow.channel_id(config), U256::from(*nonce), *amount);
        if *amount > 0 && signer_of(&refund.refund_signature, digest) != Some(config.receiver_authorizer) {
            return refuse(
                reason::REFUND_SIMULATION_FAILED,
                "the refund is not signed by the receiverAuthorizer's key",
            );
        }
        Ok(())
    }

    /// Reserves gas for the settlement of a request that may use so much.
    fn reserve_gas(&self, gas: u64, code: &'static str) -> Result<ReservedGas<'_>, ChannelError> {
        let most = self.gas.most();
        if gas > most {
            return refuse(code, format!("this may use {gas} gas, and at most {most} is paid for here"));
        }
        let busy = |retry_after| FacilitatorError::Busy { what: "the gas of this hour", retry_after }.into();
        self.gas.reserve(gas, self.gas_used(), Instant::now()).map_err(busy)
    }

    async fn settle_channel(&self, channels: &Channels, request: &ChannelRequest) -> Result<Done, ChannelError> {
        let facilitator = channels.find(request)?;
        let escrow = Escrow::on(facilitator.network());
        match request.read_payload()? {
            ChannelPayload::Deposit { channel_config: config, voucher, deposit } => {
                self.check_channel(request, &config, &voucher, &escrow)?;
                let before = observe(&**facilitator, &escrow, &config).await?;
                // The amount may be what is charged by now, which can be nothing.
                let price = request.price(reason::DEPOSIT_PAYLOAD)?;
                check_amounts(&voucher, &before.state, deposit.amount, price)?;
                let _gas = self.reserve_gas(gas::DEPOSIT, reason::DEPOSIT_PAYLOAD)?;
                let executed = facilitator.deposit(&config, &voucher, &deposit).await?;
                Ok(Done::of(&executed, config.payer))
            }
            ChannelPayload::Claim { claims, claim_authorizer_signature } => {
                let _gas = self.reserve_gas(gas::claim(claims.len()), reason::CLAIM_PAYLOAD)?;
                let signature = match claim_authorizer_signature {
                    Some(signature) => signature,
                    None => sign_claims(channels, &escrow, &claims).await?,
                };
                self.check_claims(&escrow, &claims, &signature)?;
                let claimed = facilitator.claim_signed(&claims, &signature).await?;
                let transaction = claimed.transactions.first().map(ToString::to_string).unwrap_or_default();
                Ok(Done { transaction, ..Done::default() })
            }
            ChannelPayload::Settle { receiver, token } => {
                self.check_served(&escrow, receiver, token)?;
                let _gas = self.reserve_gas(gas::SETTLE, reason::SETTLE_PAYLOAD)?;
                match facilitator.settle(receiver, token).await? {
                    Some(settled) => Ok(Done {
                        transaction: settled.transaction.to_string(),
                        amount: Some(settled.amount),
                        ..Done::default()
                    }),
                    None => refuse(reason::NOTHING_TO_SETTLE, "all that was claimed was transferred"),
                }
            }
            ChannelPayload::Refund(refund) => {
                let config = refund.channel_config;
                request.check_config(&config, &refund.voucher, &escrow)?;
                self.check_served(&escrow, config.receiver, config.token)?;
                let _gas = self.reserve_gas(gas::REFUND, reason::REFUND_PAYLOAD)?;
                let refund = sign_refund(channels, &escrow, *refund).await?;
                self.check_refund(&escrow, &refund)?;
                Ok(Done::of(&facilitator.refund_signed(&refund).await?, config.payer))
            }
            _ => refuse(reason::PAYLOAD_TYPE, "vouchers are kept and claimed by the seller"),
        }
    }
}

/// Returns the account whose key made a signature, if one did.
fn signer_of(signature: &Bytes, digest: B256) -> Option<Address> {
    PaymentSignature::from(signature.to_vec()).recover(digest).ok()
}

async fn observe(
    facilitator: &dyn ChannelFacilitator,
    escrow: &Escrow,
    config: &ChannelConfig,
) -> Result<ChannelObservation, ChannelError> {
    let observed = facilitator.observe(&[escrow.channel_id(config)]).await?.pop();
    observed.map_or_else(|| refuse(reason::RPC_READ_FAILED, "the channel was not read"), Ok)
}

/// Signs claims with the service's own key, for a caller that it knows.
async fn sign_claims(channels: &Channels, escrow: &Escrow, claims: &[Claim]) -> Result<Bytes, ChannelError> {
    let key = own_key(channels, claims.iter().map(|claim| &claim.voucher.channel))?;
    Ok(key.sign_claims(escrow, claims).await?)
}

/// Completes a refund, with the service's own key where the caller did not sign.
async fn sign_refund(
    channels: &Channels,
    escrow: &Escrow,
    refund: RefundRequest,
) -> Result<SignedRefund, ChannelError> {
    let Some(amount) = refund.amount else {
        return refuse(reason::REFUND_AMOUNT_INVALID, "a refund's amount is missing");
    };
    let Some(nonce) = refund.refund_nonce else {
        return refuse(reason::REFUND_PAYLOAD, "refundNonce is missing");
    };
    let mut claims = refund.claims.unwrap_or_default();
    if claims.len() > 1 {
        return refuse(reason::REFUND_PAYLOAD, "more than one claim");
    }
    let claim = claims.pop();
    let config = refund.channel_config;
    let refund_signature = match refund.refund_authorizer_signature {
        Some(signature) => signature,
        None => {
            let key = own_key(channels, [&config])?;
            key.sign_refund(escrow, escrow.channel_id(&config), nonce, amount).await?
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
) -> Result<&AuthorizerKey, ChannelError> {
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

/// Returns the code, the detail and the transaction that a failure is answered with.
fn parts(error: ChannelError) -> (&'static str, String, String) {
    match error {
        ChannelError::Rejected { reason, detail } => (reason, detail, String::new()),
        ChannelError::Pending { transaction } => (
            reason::SETTLEMENT_PENDING,
            "the outcome is not known yet: send the same request again".to_owned(),
            transaction.map(|hash| hash.to_string()).unwrap_or_default(),
        ),
        error => (reason::RPC_READ_FAILED, error.to_string(), String::new()),
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
