//! The facilitator service for channels, asked over HTTP's types: recorded messages of the official packages, each rule with its code, and
//! whom it signs for.

use std::sync::Arc;

use alloy_primitives::{Address, B256, U256, address};
use alloy_provider::Provider as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::{SolCall as _, sol};
use axum::body::Body;
use http::{Request, header::AUTHORIZATION};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use support::{
    authorization::random_address,
    chain::Chain,
    devnet::DevnetChain,
    escrow::{Channel, send},
};
use tower::ServiceExt as _;
use tower_x402::{
    ManualClock, Network,
    facilitator::{
        OnchainFacilitator,
        channels::{ChannelFacilitator as _, OnchainChannels, SignedRefund},
    },
    server::PeerAddress,
    vouchers::{AuthorizerKey, ChannelConfig, ChannelPayload, Claim, RefundRequest, Voucher, reason},
};
use x402_devnet::Fault;
use x402_facilitator::{FacilitatorService, FacilitatorServiceBuilder};

use super::{
    builder,
    faults::{SEND, SEND_SYNC},
    gas_key,
};

/// When the exchange was recorded, more or less: its deposits are valid.
const RECORDED_AT: u64 = 1_795_445_400;
pub(crate) const PRICE: u128 = 1_000;

pub(crate) struct Stage {
    pub(crate) chain: DevnetChain,
    pub(crate) channels: OnchainChannels,
    pub(crate) service: FacilitatorService,
    pub(crate) channel: Channel,
}

impl Stage {
    async fn open(settings: impl FnOnce(FacilitatorServiceBuilder) -> FacilitatorServiceBuilder) -> Self {
        let chain = DevnetChain::start(None).await;
        let channels = builder(&chain).signer(gas_key(&chain).await).build().await.unwrap();
        let service = settings(service(&chain, channels.clone()).await).build();
        let channel = Channel::funded(&chain, random_address(), &PrivateKeySigner::random(), 100_000).await;
        Self { chain, channels, service, channel }
    }

    /// The same with another channel.
    pub(crate) async fn of(&self, channel: &Channel) -> Self {
        Self {
            chain: DevnetChain::of(self.chain.devnet.clone()).await,
            channels: self.channels.clone(),
            service: self.service.clone(),
            channel: channel.clone(),
        }
    }

    async fn with_money() -> Self {
        let stage = Self::open(|service| service).await;
        stage.channel.deposit(&stage.chain, &stage.chain.relayer().await, 10_000).await;
        stage
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = post(&self.service, path, body, None).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// The requirements of the channel's seller.
    fn requirements(&self) -> Value {
        let asset = self.chain.asset();
        json!({
            "scheme": "batch-settlement", "network": "eip155:84532", "amount": PRICE.to_string(), "asset": asset.address,
            "payTo": self.channel.config.receiver, "maxTimeoutSeconds": 300, "extra": {
                "name": asset.name, "version": asset.version, "withdrawDelay": 900,
                "receiverAuthorizer": self.channel.config.receiver_authorizer,
            },
        })
    }

    pub(crate) fn request(&self, payload: &ChannelPayload) -> Value {
        let requirements = self.requirements();
        json!({
            "x402Version": 2, "paymentRequirements": requirements,
            "paymentPayload": { "x402Version": 2, "accepted": requirements, "payload": payload },
        })
    }

    pub(crate) async fn voucher(&self, max: u128) -> Voucher {
        Voucher::sign(&Channel::escrow(), self.channel.id(), max, &self.channel.voucher_key).await.unwrap()
    }

    pub(crate) async fn deposit(&self, units: u128, max: u128) -> ChannelPayload {
        let until = self.chain.timestamp().await + 3_600;
        let deposit = self.channel.sign_deposit(&self.chain, units, until).await;
        ChannelPayload::Deposit { channel_config: self.channel.config, voucher: self.voucher(max).await, deposit }
    }

    /// A claim of 3,000 units, in so many rows of these channels.
    pub(crate) async fn claims(&self, channels: &[&Channel], rows: usize) -> Value {
        let mut claims = Vec::new();
        for channel in channels {
            claims.push(channel.row(3_000, 3_000).await);
        }
        let claims: Vec<Claim> = claims.iter().cycle().take(rows).cloned().collect();
        let key = AuthorizerKey::new(self.channel.authorizer.clone());
        let signature = Some(key.sign_claims(&Channel::escrow(), &claims).await.unwrap());
        self.request(&ChannelPayload::Claim { claims, claim_authorizer_signature: signature })
    }

    /// A refund of so many units, signed by the authorizer's key.
    pub(crate) async fn signed_refund(&self, units: u128) -> Value {
        let key = AuthorizerKey::new(self.channel.authorizer.clone());
        let order = super::order(&self.channel, units, 0, None);
        let signed = SignedRefund::sign(order, Network::BASE_SEPOLIA, &key).await.unwrap();
        let mut refund = self.refund(units, 0, None).await;
        refund.refund_authorizer_signature = Some(signed.refund_signature);
        self.request(&ChannelPayload::Refund(Box::new(refund)))
    }

    /// Has each check of a signature by this wallet burn so much gas.
    async fn burn(&self, wallet: Address, gas: u64) {
        self.chain.devnet.execute(Address::repeat_byte(9), wallet, burn_call(gas)).unwrap();
    }

    /// How many transactions the service has sent for channels.
    async fn sent(&self) -> u64 {
        self.chain.provider().get_transaction_count(self.channels.senders()[0]).await.unwrap()
    }

    fn gas_used(&self) -> u64 {
        self.channels.gas_used()
    }

    async fn refund(&self, amount: u128, nonce: u128, claim: Option<Claim>) -> RefundRequest {
        RefundRequest {
            channel_config: self.channel.config,
            voucher: self.voucher(1).await,
            amount: Some(amount),
            refund_nonce: Some(nonce),
            claims: claim.map(|claim| vec![claim]),
            refund_authorizer_signature: None,
            claim_authorizer_signature: None,
        }
    }
}

async fn service(chain: &DevnetChain, channels: OnchainChannels) -> FacilitatorServiceBuilder {
    let exact = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url());
    // A key of its own: nobody else may send with that of the channels.
    let exact = exact.clock(Arc::new(ManualClock::at(chain.timestamp().await)));
    let exact = exact.signer(gas_key(chain).await).build().await.unwrap();
    FacilitatorService::builder(exact).channels(channels)
}

pub(crate) async fn post(service: &FacilitatorService, path: &str, body: &Value, key: Option<&str>) -> (u16, Value) {
    let mut request = Request::post(path).body(Body::from(body.to_string())).unwrap();
    if let Some(key) = key {
        request.headers_mut().insert(AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
    }
    let response = service.clone().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap())
}

#[tokio::test]
async fn recorded_messages_of_the_official_packages_get_the_same_answers() {
    let chain = DevnetChain::start_at(RECORDED_AT).await;
    chain.mint(address!("3C44CdDdB6a900fa2b585dd299e03d12FA4293BC"), 100_000).await;
    let channels = builder(&chain).clock(Arc::new(ManualClock::at(RECORDED_AT)));
    let channels = channels.signer(gas_key(&chain).await).build().await.unwrap();
    let service = service(&chain, channels).await.build();
    let recorded: Vec<Value> =
        serde_json::from_str(include_str!("../../vectors/batch_settlement_exchange.json")).unwrap();
    let mut replayed = Vec::new();
    for pair in recorded.windows(2) {
        let (kind, answered) = (pair[0]["k"].as_str().unwrap(), &pair[1]["v"]);
        let Some(operation) = kind.strip_suffix(".request") else { continue };
        let (status, answer) = post(&service, &format!("/{operation}"), &pair[0]["v"], None).await;
        assert_eq!(status, 200, "{answer}");
        let payload = &pair[0]["v"]["paymentPayload"]["payload"]["type"];
        // Messages are ours, hashes the chain's; what was charged was added to the recording by the server.
        let comparable = |answer: &Value| {
            let mut fields = answer.as_object().unwrap().clone();
            for ours in ["invalidMessage", "errorMessage", "transaction"] {
                fields.remove(ours);
            }
            if let Some(extra) = fields.get_mut("extra").and_then(Value::as_object_mut) {
                extra.remove("chargedAmount");
                if let Some(state) = extra.get_mut("channelState").and_then(Value::as_object_mut) {
                    state.remove("chargedCumulativeAmount");
                }
            }
            fields
        };
        assert_eq!(comparable(&answer), comparable(answered), "{kind} of {payload}");
        if operation == "settle" {
            let hash: B256 = answer["transaction"].as_str().unwrap().parse().unwrap();
            assert!(chain.receipt(hash).await.status());
            // Asked again, nothing moves.
            let (_, again) = post(&service, "/settle", &pair[0]["v"], None).await;
            match payload.as_str().unwrap() {
                "deposit" | "refund" => assert_eq!(again["transaction"], answer["transaction"], "{again}"),
                "claim" => assert_eq!((&again["success"], &again["transaction"]), (&json!(true), &json!(""))),
                _ => assert_eq!(again["errorReason"], reason::NOTHING_TO_SETTLE),
            }
        }
        replayed.push(format!("{operation} {}", payload.as_str().unwrap()));
    }
    let expected = [
        "verify deposit",
        "settle deposit",
        "settle claim",
        "settle settle",
        "verify refund",
        "settle refund",
        "verify voucher",
        "verify deposit",
        "settle deposit",
    ];
    assert_eq!(replayed, expected);
    assert_eq!(chain.balance(address!("9965507D1a55bcC2695C58ba16FB37d819B0A4dc")).await, 5_300);
}

#[tokio::test]
async fn each_rule_has_its_code() {
    let stage = Stage::with_money().await;
    send(
        &stage.chain,
        &stage.chain.relayer().await,
        &support::escrow::claim_call(&[stage.channel.row(4_000, 4_000).await], &stage.channel.authorizer),
    )
    .await;
    let config = stage.channel.config;
    let by = |channel_config: ChannelConfig, voucher: Voucher| ChannelPayload::Voucher { channel_config, voucher };
    let good = stage.request(&by(config, stage.voucher(5_000).await));
    let answer = stage.post("/verify", &good).await;
    assert_eq!((&answer["isValid"], &answer["extra"]["totalClaimed"]), (&json!(true), &json!("4000")), "{answer}");
    assert_eq!(answer["payer"], config.payer.to_string());

    let with = |path: &str, value: Value| {
        let mut changed = good.clone();
        *changed.pointer_mut(path).unwrap() = value;
        changed
    };
    let requirements = |field: &str, value: Value| with(&format!("/paymentRequirements/{field}"), value);
    let stranger = Voucher::sign(&Channel::escrow(), stage.channel.id(), 5_000, &stage.channel.payer).await.unwrap();
    let other = ChannelConfig { salt: B256::repeat_byte(1), ..config };
    let other_id = Channel::escrow().channel_id(&other);
    let unfunded = Voucher::sign(&Channel::escrow(), other_id, 5_000, &stage.channel.voucher_key).await.unwrap();
    let unreadable = |payload: Value| with("/paymentPayload/payload", payload);
    let permit2 = json!({ "permit2Authorization": {} });
    let cases = [
        (unreadable(json!({ "type": "refund" })), reason::REFUND_PAYLOAD),
        (unreadable(json!({ "type": "claim" })), reason::CLAIM_PAYLOAD),
        (
            unreadable(json!({ "type": "deposit", "deposit": { "authorization": permit2 } })),
            reason::ERC3009_AUTHORIZATION_REQUIRED,
        ),
        (with("/paymentPayload/accepted/scheme", json!("exact")), reason::SCHEME),
        (with("/paymentPayload/accepted/network", json!("eip155:1")), reason::NETWORK_MISMATCH),
        (requirements("payTo", json!(random_address())), reason::RECEIVER_MISMATCH),
        (requirements("asset", json!(random_address())), reason::TOKEN_MISMATCH),
        (requirements("extra/receiverAuthorizer", json!(random_address())), reason::RECEIVER_AUTHORIZER_MISMATCH),
        (requirements("extra/withdrawDelay", json!(901)), reason::WITHDRAW_DELAY_MISMATCH),
        (requirements("amount", json!("01000")), reason::VOUCHER_PAYLOAD),
        (requirements("amount", json!("-1")), reason::VOUCHER_PAYLOAD),
        (with("/paymentPayload/payload/type", json!("gift")), reason::PAYLOAD_TYPE),
        (with("/paymentPayload/payload/type", json!("deposit")), reason::DEPOSIT_PAYLOAD),
        (with("/paymentPayload/payload/type", json!("settle")), reason::SETTLE_PAYLOAD),
        (with("/paymentPayload/payload/voucher/maxClaimableAmount", json!("1e3")), reason::VOUCHER_PAYLOAD),
        (stage.request(&by(other, stage.voucher(5_000).await)), reason::CHANNEL_ID_MISMATCH),
        (stage.request(&by(other, unfunded)), reason::CHANNEL_NOT_FOUND),
        (stage.request(&by(config, stranger)), reason::VOUCHER_SIGNATURE),
        (stage.request(&by(config, stage.voucher(10_001).await)), reason::CUMULATIVE_EXCEEDS_BALANCE),
        // What a seller that lost its records would have served for one unit.
        (stage.request(&by(config, stage.voucher(4_001).await)), reason::CUMULATIVE_BELOW_CLAIMED),
        (stage.request(&by(config, stage.voucher(4_999).await)), reason::CUMULATIVE_BELOW_CLAIMED),
        (stage.request(&stage.deposit(1_000, 4_999).await), reason::CUMULATIVE_BELOW_CLAIMED),
        (stage.request(&stage.deposit(1_000, 11_001).await), reason::CUMULATIVE_EXCEEDS_BALANCE),
        (stage.request(&stage.deposit(100_000, 5_000).await), reason::INSUFFICIENT_BALANCE),
    ];
    for (request, expected) in &cases {
        let answer = stage.post("/verify", request).await;
        assert_eq!((&answer["isValid"], &answer["invalidReason"]), (&json!(false), &json!(expected)), "{request}");
    }
    // A free request still needs a promise beyond what was claimed.
    let mut free = stage.request(&by(config, stage.voucher(4_000).await));
    free["paymentRequirements"]["amount"] = json!("0");
    assert_eq!(stage.post("/verify", &free).await["invalidReason"], reason::CUMULATIVE_BELOW_CLAIMED);
    // A refund needs none.
    let mut refund = stage.refund(1, 0, None).await;
    refund.voucher = stage.voucher(4_000).await;
    let refund = stage.request(&ChannelPayload::Refund(Box::new(refund)));
    assert_eq!(stage.post("/verify", &refund).await["isValid"], true);
    // The seller keeps vouchers, so they are not settled here.
    let settled = stage.post("/settle", &good).await;
    assert_eq!((&settled["success"], &settled["errorReason"]), (&json!(false), &json!(reason::PAYLOAD_TYPE)));
    let (status, answer) = post(&stage.service, "/verify", &with("/paymentPayload/x402Version", json!(1)), None).await;
    assert_eq!((status, &answer["invalidReason"]), (400, &json!(reason::SCHEME)), "{answer}");
    let (status, answer) = post(&stage.service, "/verify", &requirements("amount", json!(1_000)), None).await;
    assert_eq!((status, &answer["isValid"]), (400, &json!(false)), "{answer}");
}

#[tokio::test]
async fn a_deposit_settled_again_and_at_once_is_one_transaction() {
    let stage = Stage::open(|service| service).await;
    let request = stage.request(&stage.deposit(10_000, PRICE).await);
    let answers = futures_util::future::join_all((0..10).map(|_| stage.post("/settle", &request))).await;
    assert_eq!((&answers[0]["success"], &answers[0]["amount"]), (&json!(true), &json!("10000")), "{}", answers[0]);
    assert_eq!(answers[0]["extra"]["channelState"]["balance"], "10000");
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    assert_eq!(stage.post("/settle", &request).await, answers[0]);
    assert_eq!(stage.channel.state(&stage.chain).await, (10_000, 0));
    // Nothing moves for a deposit whose voucher does not pay.
    let unpaid = stage.request(&stage.deposit(5_000, PRICE - 1).await);
    assert_eq!(stage.post("/settle", &unpaid).await["errorReason"], reason::CUMULATIVE_BELOW_CLAIMED);
    assert_eq!(stage.channel.state(&stage.chain).await, (10_000, 0));
}

#[tokio::test]
async fn only_named_payees_are_served() {
    let stage = Stage::open(|service| service.payee(random_address())).await;
    let request = stage.request(&stage.deposit(10_000, PRICE).await);
    assert_eq!(stage.post("/verify", &request).await["invalidReason"], reason::RECEIVER_MISMATCH);
    assert_eq!(stage.post("/settle", &request).await["errorReason"], reason::RECEIVER_MISMATCH);
    assert_eq!(stage.channel.state(&stage.chain).await, (0, 0));
}

/// Anybody else could hand back to payers what sellers have earned.
#[tokio::test]
async fn refunds_and_claims_are_signed_only_for_callers_with_a_key() {
    for (has_authorizer, bearer, expected) in [
        (false, None, reason::AUTHORIZER_NOT_CONFIGURED),
        (false, Some("secret"), reason::AUTHORIZER_NOT_CONFIGURED),
        (true, None, reason::AUTHORIZER_NOT_CONFIGURED),
        (true, Some("secret"), ""),
    ] {
        let own = PrivateKeySigner::random();
        let mut stage = Stage::open(|mut service| {
            if has_authorizer {
                service = service.authorizer(AuthorizerKey::new(own.clone()));
            }
            if let Some(bearer) = bearer {
                service = service.bearer_key(bearer);
            }
            service
        })
        .await;
        stage.channel = Channel::funded(&stage.chain, random_address(), &own, 100_000).await;
        stage.channel.deposit(&stage.chain, &stage.chain.relayer().await, 10_000).await;
        let claim = stage.channel.row(3_000, 3_000).await;
        let claims =
            stage.request(&ChannelPayload::Claim { claims: vec![claim.clone()], claim_authorizer_signature: None });
        let refund = stage.refund(2_000, 0, Some(stage.channel.row(4_000, 4_000).await)).await;
        let refund = stage.request(&ChannelPayload::Refund(Box::new(refund)));
        for request in [&claims, &refund] {
            let (status, answer) = post(&stage.service, "/settle", request, bearer).await;
            assert_eq!((status, answer["errorReason"].as_str().unwrap_or_default()), (200, expected), "{answer}");
            if bearer.is_some() {
                assert_eq!(post(&stage.service, "/settle", request, None).await.0, 401);
                assert_eq!(post(&stage.service, "/settle", request, Some("guess")).await.0, 401);
            }
        }
        let moved = if expected.is_empty() { (8_000, 4_000) } else { (10_000, 0) };
        assert_eq!(stage.channel.state(&stage.chain).await, moved);

        // The key is none of another seller's channel.
        let foreign = Channel::funded(&stage.chain, random_address(), &PrivateKeySigner::random(), 100_000).await;
        let claims = vec![foreign.row(1, 1).await];
        let request = stage.request(&ChannelPayload::Claim { claims, claim_authorizer_signature: None });
        let expected = if expected.is_empty() { reason::AUTHORIZER_ADDRESS_MISMATCH } else { expected };
        assert_eq!(post(&stage.service, "/settle", &request, bearer).await.1["errorReason"], expected);

        let supported = stage.service.clone().oneshot(Request::get("/supported").body(Body::empty()).unwrap()).await;
        let supported = supported.unwrap().into_body().collect().await.unwrap().to_bytes();
        let supported: Value = serde_json::from_slice(&supported).unwrap();
        let kinds = supported["kinds"].as_array().unwrap();
        let kind = kinds.iter().find(|kind| kind["scheme"] == "batch-settlement").expect("it is listed");
        assert_eq!((&kind["network"], &kind["x402Version"]), (&json!("eip155:84532"), &json!(2)));
        assert_eq!(supported["signers"]["eip155:*"].as_array().unwrap().len(), 2, "of exact, and of channels");
        let advertised = kind["extra"].get("receiverAuthorizer").is_some();
        assert_eq!(advertised, has_authorizer && bearer.is_some(), "{kind}");
    }
}

#[tokio::test]
async fn a_refund_that_the_seller_signed_needs_no_key_of_the_service() {
    let stage = Stage::with_money().await;
    let claim = stage.channel.row(3_000, 2_500).await;
    let order = super::order(&stage.channel, 50_000, 0, Some(claim.clone()));
    let key = AuthorizerKey::new(stage.channel.authorizer.clone());
    let signed = SignedRefund::sign(order, Network::BASE_SEPOLIA, &key).await.unwrap();
    let mut refund = stage.refund(50_000, 0, Some(claim.clone())).await;
    refund.refund_authorizer_signature = Some(signed.refund_signature);
    refund.claim_authorizer_signature = signed.claim_signature;
    for (changed, expected) in [
        (RefundRequest { amount: None, ..refund.clone() }, reason::REFUND_AMOUNT_INVALID),
        (RefundRequest { amount: Some(0), ..refund.clone() }, reason::REFUND_AMOUNT_INVALID),
        (RefundRequest { refund_nonce: None, ..refund.clone() }, reason::REFUND_PAYLOAD),
        (RefundRequest { claims: Some(vec![claim.clone(), claim]), ..refund.clone() }, reason::REFUND_PAYLOAD),
        (RefundRequest { amount: Some(1), ..refund.clone() }, reason::REFUND_SIMULATION_FAILED),
        (RefundRequest { refund_authorizer_signature: None, ..refund.clone() }, reason::AUTHORIZER_NOT_CONFIGURED),
    ] {
        let request = stage.request(&ChannelPayload::Refund(Box::new(changed)));
        assert_eq!(stage.post("/settle", &request).await["errorReason"], expected);
    }
    let request = stage.request(&ChannelPayload::Refund(Box::new(refund)));
    let answer = stage.post("/settle", &request).await;
    assert_eq!((&answer["success"], &answer["amount"]), (&json!(true), &json!("7500")), "{answer}");
    assert_eq!(answer["extra"]["channelState"]["refundNonce"], "1");
    assert_eq!(stage.post("/settle", &request).await["transaction"], answer["transaction"]);
    assert_eq!(stage.chain.balance(stage.channel.config.payer).await, 97_500);
}

#[tokio::test]
async fn a_large_batch_of_claims_fits_into_one_request_of_a_known_caller() {
    let stage = Stage::open(|service| service.bearer_key("secret")).await;
    stage.channel.deposit(&stage.chain, &stage.chain.relayer().await, 10_000).await;
    let request = stage.claims(&[&stage.channel], 150).await;
    assert!(request.to_string().len() > 64 * 1024);
    let (status, answer) = post(&stage.service, "/settle", &request, Some("secret")).await;
    assert_eq!((status, &answer["success"]), (200, &json!(true)), "{answer}");
    assert_eq!(stage.channel.state(&stage.chain).await, (10_000, 3_000));
    assert_eq!(max_claims(&stage.service).await, 277);
}

#[tokio::test]
async fn a_stranger_may_claim_four_rows_at_once() {
    let stage = Stage::with_money().await;
    assert_eq!(max_claims(&stage.service).await, 4);
    let five = stage.post("/settle", &stage.claims(&[&stage.channel], 5).await).await;
    assert_eq!((&five["success"], &five["errorReason"]), (&json!(false), &json!(reason::CLAIM_PAYLOAD)), "{five}");
    assert!(five["errorMessage"].as_str().unwrap().contains("400000"), "{five}");
    let four = stage.post("/settle", &stage.claims(&[&stage.channel], 4).await).await;
    assert_eq!(four["success"], true, "{four}");
    assert_eq!(stage.channel.state(&stage.chain).await, (10_000, 3_000));
    // A larger body is not even read.
    let (status, answer) = post(&stage.service, "/settle", &stage.claims(&[&stage.channel], 150).await, None).await;
    assert_eq!((status, &answer["error"]), (413, &json!("body_too_large")));
}

/// Calls of a token cost the service gas, so nobody but the operator chooses it.
#[tokio::test]
async fn a_token_that_is_not_served_is_refused_in_every_message() {
    let mut stage = Stage::open(|service| service).await;
    stage.channel.config.token = random_address();
    let key = AuthorizerKey::new(stage.channel.authorizer.clone());
    let voucher = ChannelPayload::Voucher { channel_config: stage.channel.config, voucher: stage.voucher(2_000).await };
    let deposit = stage.deposit(10_000, PRICE).await;
    let signed =
        SignedRefund::sign(super::order(&stage.channel, 1, 0, None), Network::BASE_SEPOLIA, &key).await.unwrap();
    let mut refund = stage.refund(1, 0, None).await;
    refund.refund_authorizer_signature = Some(signed.refund_signature);
    let refund = ChannelPayload::Refund(Box::new(refund));
    let settle = ChannelPayload::Settle { receiver: stage.channel.config.receiver, token: stage.channel.config.token };
    let [voucher, deposit, refund, settle] = [voucher, deposit, refund, settle].map(|payload| stage.request(&payload));
    for request in [&voucher, &deposit] {
        assert_eq!(stage.post("/verify", request).await["invalidReason"], reason::TOKEN_MISMATCH);
    }
    for request in [&deposit, &refund, &settle, &stage.claims(&[&stage.channel], 1).await] {
        assert_eq!(stage.post("/settle", request).await["errorReason"], reason::TOKEN_MISMATCH);
    }
}

/// A contract accepts any signature at any length of time, at the cost of whoever sends the transaction.
#[tokio::test]
async fn authorizers_that_are_contracts_cost_nothing() {
    let mut stage = Stage::open(|service| service).await;
    let wallet = stage.chain.deploy_wallet(stage.channel.authorizer.address()).await;
    stage.burn(wallet, 10_000_000).await;
    stage.channel.config.receiver_authorizer = wallet;
    stage.channel.deposit(&stage.chain, &stage.chain.relayer().await, 10_000).await;
    let claim = stage.post("/settle", &stage.claims(&[&stage.channel], 1).await).await;
    assert_eq!(claim["errorReason"], reason::CLAIM_SIMULATION_FAILED, "{claim}");
    let refund = stage.post("/settle", &stage.signed_refund(1).await).await;
    assert_eq!(refund["errorReason"], reason::REFUND_SIMULATION_FAILED, "{refund}");
    assert_eq!(stage.channel.state(&stage.chain).await, (10_000, 0));
    assert_eq!(stage.sent().await, 0);
}

/// An account with delegated code (EIP-7702) signs with its key, and the contract asks its code.
#[tokio::test]
async fn claims_and_refunds_cost_no_more_than_their_bounds() {
    // Beside what the code burns a claim takes some 80,000 gas, and a refund a little less.
    for (burnt, is_claimed, is_refunded) in [(80_000, true, true), (200_000, false, true), (300_000, false, false)] {
        let stage = Stage::open(|service| service).await;
        let wallet = stage.chain.deploy_wallet(random_address()).await;
        let authorizer = stage.channel.config.receiver_authorizer;
        stage.chain.delegate(authorizer, wallet).await;
        stage.burn(authorizer, burnt).await;
        stage.channel.deposit(&stage.chain, &stage.chain.relayer().await, 10_000).await;
        let claim = stage.post("/settle", &stage.claims(&[&stage.channel], 1).await).await;
        assert_eq!(claim["success"], is_claimed, "{burnt}: {claim}");
        let refund = stage.post("/settle", &stage.signed_refund(1).await).await;
        assert_eq!(refund["success"], is_refunded, "{burnt}: {refund}");
        for (answer, most, code) in
            [(claim, 210_000, reason::CLAIM_SIMULATION_FAILED), (refund, 300_000, reason::REFUND_SIMULATION_FAILED)]
        {
            if answer["success"] == true {
                let gas = stage.chain.gas_used(answer["transaction"].as_str().unwrap().parse().unwrap()).await;
                assert!(gas > burnt && gas <= most, "{gas}");
            } else {
                assert_eq!(answer["errorReason"], code);
            }
        }
    }
}

/// The payer's code lets the simulation pass, and burns all gas in the transaction.
#[tokio::test]
async fn a_deposit_that_reverts_costs_400_000_gas() {
    let mut stage = Stage::open(|service| service).await;
    let wallet = stage.chain.deploy_wallet(random_address()).await;
    let devnet = stage.chain.devnet.clone();
    // Each payer is new: the first two reverts of a payer are not held against it.
    for _ in 0..2 {
        stage.channel = Channel::funded(&stage.chain, random_address(), &stage.channel.authorizer, 100_000).await;
        let payer = stage.channel.config.payer;
        stage.chain.delegate(payer, wallet).await;
        let devnet = devnet.clone();
        stage.chain.devnet.faults().set(move |call| {
            let burnt = match call.method {
                SEND | SEND_SYNC => 10_000_000,
                "eth_estimateGas" => 200_000,
                _ => return Fault::None,
            };
            devnet.execute(Address::repeat_byte(9), payer, burn_call(burnt)).unwrap();
            Fault::None
        });
        let used = stage.gas_used();
        let request = stage.request(&stage.deposit(10_000, PRICE).await);
        assert_eq!(stage.post("/settle", &request).await["errorReason"], reason::DEPOSIT_TRANSACTION_FAILED);
        let gas = stage.gas_used() - used;
        assert!((300_000..=400_000).contains(&gas), "{gas}");
    }
}

/// The authorizer's code does the same to claims. No payer is behind them, whose deposits could be held against it: it is the caller.
#[tokio::test]
async fn stranger_whose_claims_revert_has_to_wait() {
    let stage = Stage::open(|service| service).await;
    let wallet = stage.chain.deploy_wallet(random_address()).await;
    let authorizer = stage.channel.config.receiver_authorizer;
    stage.chain.delegate(authorizer, wallet).await;
    stage.channel.deposit(&stage.chain, &stage.chain.relayer().await, 10_000).await;
    let devnet = stage.chain.devnet.clone();
    stage.chain.devnet.faults().set(move |call| {
        let burnt = match call.method {
            SEND | SEND_SYNC => 10_000_000,
            "eth_estimateGas" => 50_000,
            _ => return Fault::None,
        };
        devnet.execute(Address::repeat_byte(9), authorizer, burn_call(burnt)).unwrap();
        Fault::None
    });
    let claim = stage.claims(&[&stage.channel], 1).await.to_string();
    let ask = async |peer: u8| {
        let mut request = Request::post("/settle").body(Body::from(claim.clone())).unwrap();
        request.extensions_mut().insert(PeerAddress([192, 0, 2, peer].into()));
        let response = stage.service.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
        (status, answer["errorReason"].as_str().unwrap_or_default().to_owned())
    };
    let reverted = (200, reason::CLAIM_TRANSACTION_FAILED.to_owned());
    for _ in 0..10 {
        assert_eq!(ask(1).await, reverted);
    }
    let sent = stage.sent().await;
    assert_eq!(ask(1).await.0, 429);
    assert_eq!(stage.sent().await, sent, "no gas is spent on it");
    assert_eq!(ask(2).await, reverted, "others do not wait for it");
}

#[tokio::test]
async fn the_gas_of_an_hour_is_bounded_over_all_callers() {
    let stage = Stage::open(|service| service.gas_per_hour(1_600_000)).await;
    let refused = json!({ "error": "unavailable", "detail": "nothing was sent" });
    let deposits = [stage.deposit(1_000, PRICE).await, stage.deposit(1_000, PRICE).await];
    let [first, second] = deposits.map(|deposit| stage.request(&deposit));
    assert_eq!(stage.post("/settle", &first).await["success"], true);
    let used = stage.gas_used();
    // A quarter of it may be used at once.
    let (status, answer) = post(&stage.service, "/settle", &second, None).await;
    assert_eq!((status, answer), (503, refused));
    // What needs less is done.
    assert_eq!(
        stage.post("/settle", &stage.claims(&[&stage.channel], 1).await).await["errorReason"],
        "invalid_batch_settlement_evm_claim_simulation_failed"
    );
    assert_eq!(stage.gas_used(), used);
    // Looking costs no gas.
    assert_eq!(stage.post("/verify", &second).await["isValid"], true);
}

/// Returns how many rows of a claim the service says that it takes.
async fn max_claims(service: &FacilitatorService) -> u64 {
    let supported = service.clone().oneshot(Request::get("/supported").body(Body::empty()).unwrap()).await;
    let supported = supported.unwrap().into_body().collect().await.unwrap().to_bytes();
    let supported: Value = serde_json::from_slice(&supported).unwrap();
    let kinds = supported["kinds"].as_array().unwrap();
    let kind = kinds.iter().find(|kind| kind["scheme"] == "batch-settlement").expect("it is listed");
    kind["extra"]["maxClaims"].as_u64().unwrap()
}

/// The call that has a wallet's checks of signatures burn so much gas.
pub(crate) fn burn_call(gas: u64) -> Vec<u8> {
    TestWallet::setGasBurnCall { amount: U256::from(gas) }.abi_encode()
}

sol! {
    interface TestWallet {
        function setGasBurn(uint256 amount) external;
    }
}
