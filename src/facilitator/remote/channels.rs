//! Payment channels through the same facilitator: it sends the transactions, and a node of the seller's tells what they did.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256};
use async_trait::async_trait;
use serde_json::{Map, Value};

use super::{
    Remote, RemoteBuildError, RemoteFacilitator,
    api::{Answer, NoAnswer},
    message::{Settlement, detail, read_object},
    observer::receipt,
    settle::MAX_TRIES,
};
use crate::{
    chain::{escrow, node::Node, rpc::Receipt},
    facilitator::{
        FacilitatorError, NotReady,
        channels::{
            ChannelError, OnchainChannels,
            onchain::{BlockRules, Sender, Turn},
        },
    },
    network::Asset,
    protocol::{FacilitatorRequest, PaymentPayload, PaymentRequirements, SupportedKind, Verbatim},
    settlement::{costs::PayerBackoff, line::Urgency, load::Call},
    vouchers::{ChannelPayload, SCHEME, reason},
};

/// Reasons that leave it open whether something was sent, or that pass.
const MAY_BE_SENT: [&str; 4] =
    [reason::SETTLEMENT_PENDING, reason::RPC_READ_FAILED, reason::CHANNEL_BUSY, reason::VERIFICATION_STATE_UNAVAILABLE];
/// Reasons that say that a transaction was sent and reverted.
const REVERTED: [&str; 4] = [
    reason::DEPOSIT_TRANSACTION_FAILED,
    reason::CLAIM_TRANSACTION_FAILED,
    reason::SETTLE_TRANSACTION_FAILED,
    reason::REFUND_TRANSACTION_FAILED,
];
/// `maxTimeoutSeconds` of the offer: the official packages' default.
const MAX_TIMEOUT: u64 = 300;
/// Claims per transaction: what hosted facilitators accept.
const CLAIMS: usize = 25;

impl RemoteFacilitator {
    /// Returns the payment channels of this token, whose transactions the facilitator sends and pays for (`POST /settle` of the scheme
    /// `batch-settlement`). The facilitator is trusted with nothing:
    ///
    /// - **The node decides.** What is in a channel is credit for many requests, so it is read from the contract, through the node that
    ///   [`confirm`](super::RemoteFacilitatorBuilder::confirm)s the facilitator's answers. A public endpoint is enough. Deposits, claims and
    ///   refunds are checked and simulated with it before the facilitator is asked, and count when it shows the contract's event.
    /// - **A lost answer** is no failure. The facilitator is asked again, with the same message, until
    ///   [`settle_timeout`](super::RemoteFacilitatorBuilder::settle_timeout) has passed. Then the chain is read: the contract executes each
    ///   action once, whoever asks for it.
    /// - **The authorizer's key stays here**: claims and refunds leave with its signature over what may be claimed and refunded.
    ///
    /// ```no_run
    /// # async fn example(key: tower_x402::vouchers::AuthorizerKey) -> anyhow::Result<()> {
    /// use std::sync::Arc;
    /// use tower_x402::{Network, channels::Channels, facilitator::RemoteFacilitator, ledger::SqliteLedger};
    ///
    /// let facilitator = RemoteFacilitator::builder("https://www.x402.org/facilitator")
    ///     .confirm(Network::BASE_SEPOLIA, "https://sepolia.base.org")
    ///     .build()
    ///     .await?;
    /// let contract = facilitator.channels(Network::BASE_SEPOLIA.usdc().expect("known")).await?;
    /// let channels = Channels::builder(contract, key).ledger(Arc::new(SqliteLedger::open("channels.sqlite").await?)).build()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`RemoteBuildError::NoNode`] without a node of this network, [`RemoteBuildError::NoContract`] if the chain lacks a contract,
    /// [`RemoteBuildError::NoChannels`] if the facilitator does not list the scheme in `/supported`.
    pub async fn channels(&self, asset: Asset) -> Result<OnchainChannels, RemoteBuildError> {
        let (remote, network) = (&self.remote, asset.network);
        let node = remote.observer(network).ok_or(RemoteBuildError::NoNode(network))?.node();
        let missing = escrow::missing_contract(node.rpc()).await.map_err(|_| RemoteBuildError::Node(network))?;
        if let Some((name, address)) = missing {
            return Err(RemoteBuildError::NoContract { name, address, network });
        }
        let supported = remote.supported.get(&remote.api).await.map_err(|_| RemoteBuildError::Unreachable)?;
        let is_channels = |kind: &SupportedKind| {
            let is_network = kind.network == "eip155:*" || kind.network.parse() == Ok(network);
            kind.x402_version == 2 && kind.scheme == SCHEME && is_network
        };
        let Some(kind) = supported.kinds.iter().find(|kind| is_channels(kind)) else {
            return Err(RemoteBuildError::NoChannels(network));
        };
        let max_claims = kind.extra.as_ref().and_then(|extra| extra.get("maxClaims")).and_then(Value::as_u64);
        let claims = max_claims.map_or(CLAIMS, |most| most.clamp(1, CLAIMS as u64) as usize);
        let clock = remote.journal.clock().clone();
        let reverts = PayerBackoff::default();
        let asking = Asking { remote: remote.clone(), node: node.clone(), asset: asset.clone(), claims, reverts };
        let rules = BlockRules::within(remote.settle_timeout);
        Ok(OnchainChannels::new(node.clone(), vec![asset], clock, Arc::new(asking), rules))
    }
}

/// Asks a facilitator for transactions.
struct Asking {
    remote: Arc<Remote>,
    node: Arc<Node>,
    asset: Asset,
    /// How many claims go into one transaction.
    claims: usize,
    /// The payers whose deposits and refunds reverted in transactions that the facilitator did not name.
    reverts: PayerBackoff,
}

/// The meaning of an answer to `/settle`.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    /// This transaction did it, it says, or may do so.
    Sent(B256),
    /// It was done before, it says.
    Done,
    /// Nothing was sent, it says, for a reason that leaves no doubt.
    Refused(&'static str, String),
    /// A transaction was sent and reverted, it says, and does not name it.
    Reverted,
    /// The answer cannot be used, or says that the outcome is not known yet.
    Unclear,
}

#[async_trait]
impl Sender for Asking {
    fn addresses(&self) -> Vec<Address> {
        Vec::new()
    }

    fn claims(&self) -> usize {
        self.claims
    }

    fn gas_used(&self) -> u64 {
        0
    }

    async fn cannot_send(&self) -> Option<NotReady> {
        (!self.remote.answers().await).then_some(NotReady::Facilitator)
    }

    async fn enter(&self, _: Urgency) -> Result<Turn, ChannelError> {
        Ok(Turn::default())
    }

    async fn join(&self, _: B256) -> Option<Result<Receipt, ChannelError>> {
        // The facilitator is asked again: it knows what it has sent.
        None
    }

    async fn send(&self, _: Turn, _: B256, _: Call, payload: ChannelPayload) -> Result<Receipt, ChannelError> {
        let payer = match &payload {
            ChannelPayload::Deposit { channel_config: config, .. } => Some(config.payer),
            ChannelPayload::Refund(refund) => Some(refund.channel_config.payer),
            _ => None,
        };
        // Each request may cost the facilitator a transaction.
        if payer.is_some_and(|payer| self.reverts.rejection(payer).is_some()) {
            let what = "deposits and refunds of a payer whose last ones reverted";
            return Err(FacilitatorError::Busy { what, retry_after: Duration::from_secs(30) }.into());
        }
        let body = self.body(&payload)?;
        let (mut pauses, mut is_unsent, mut transaction) = (self.remote.pauses(), true, None);
        for tries in 1.. {
            let answer = self.remote.api.post("settle", body.clone()).await;
            let is_first = is_unsent;
            is_unsent &= matches!(answer, Err(NoAnswer::NotSent));
            match answer.as_ref().map_or(Reply::Unclear, read) {
                Reply::Sent(named) => {
                    transaction = Some(named);
                    if let Ok(Some(receipt)) = receipt(&self.node, named).await {
                        return Ok(receipt);
                    }
                    tracing::warn!(transaction = %named, "the facilitator names a transaction that the node does not show");
                }
                // Its node may lag behind ours.
                Reply::Refused(reason::NOTHING_TO_SETTLE, _) if is_first => {}
                Reply::Refused(reason, detail) if is_first => return Err(ChannelError::rejected(reason, detail)),
                // An earlier request may be the reason why it fails now.
                Reply::Refused(..) | Reply::Done => break,
                Reply::Reverted => {
                    payer.into_iter().for_each(|payer| self.reverts.note_revert(payer));
                    break;
                }
                Reply::Unclear => {}
            }
            let wait = answer.ok().and_then(|answer| answer.retry_after).unwrap_or(pauses.next());
            if tries >= MAX_TRIES || !pauses.wait_for(wait).await {
                break;
            }
        }
        match is_unsent {
            true => {
                let retry_after = Duration::from_secs(2);
                Err(FacilitatorError::Unreachable { what: "the facilitator", retry_after }.into())
            }
            false => Err(ChannelError::Pending { transaction }),
        }
    }
}

impl Asking {
    /// Returns the request. The offer in it is for nothing, since a voucher is charged by the seller.
    fn body(&self, payload: &ChannelPayload) -> Result<bytes::Bytes, ChannelError> {
        let (receiver, config) = match payload {
            ChannelPayload::Deposit { channel_config: config, .. } => (config.receiver, Some(config)),
            ChannelPayload::Refund(refund) => (refund.channel_config.receiver, Some(&refund.channel_config)),
            ChannelPayload::Claim { claims, .. } => {
                let config = claims.first().map(|claim| &claim.voucher.channel);
                (config.map_or(Address::ZERO, |config| config.receiver), config)
            }
            ChannelPayload::Settle { receiver, .. } => (*receiver, None),
            ChannelPayload::Voucher { .. } => (Address::ZERO, None),
        };
        let mut extra = Map::new();
        extra.insert("name".to_owned(), self.asset.name.as_str().into());
        extra.insert("version".to_owned(), self.asset.version.as_str().into());
        if let Some(config) = config {
            extra.insert("receiverAuthorizer".to_owned(), config.receiver_authorizer.to_string().into());
            extra.insert("withdrawDelay".to_owned(), config.withdraw_delay.into());
        }
        let offer = PaymentRequirements {
            scheme: SCHEME.to_owned(),
            network: self.asset.network.to_string(),
            amount: "0".to_owned(),
            asset: self.asset.address.to_string(),
            pay_to: receiver.to_string(),
            max_timeout_seconds: MAX_TIMEOUT,
            extra,
        };
        let body = || {
            let offer = Verbatim::of(&offer)?;
            let payment = PaymentPayload::new(offer.clone(), Verbatim::of(payload)?);
            serde_json::to_vec(&FacilitatorRequest::new(payment, offer))
        };
        let body = body().map_err(|_| FacilitatorError::Misconfigured("a message that is no JSON".to_owned()))?;
        Ok(body.into())
    }
}

debug_fields!(Asking |this| { api: this.remote.api, asset: this.asset });

/// Reads an answer. What it says about amounts and balances does not matter: the chain is asked for those.
fn read(answer: &Answer) -> Reply {
    let Some(said) = read_object::<Settlement>(&answer.body).filter(|_| !answer.status.is_server_error()) else {
        return Reply::Unclear;
    };
    let code = said.error_reason.as_deref().and_then(reason::known);
    match (said.hash(), code) {
        (Some(transaction), _) => Reply::Sent(transaction),
        (None, _) if said.success => Reply::Done,
        (None, Some(code)) if REVERTED.contains(&code) => Reply::Reverted,
        (None, Some(code)) if !MAY_BE_SENT.contains(&code) => {
            Reply::Refused(code, detail(said.error_message.as_deref()))
        }
        _ => Reply::Unclear,
    }
}
