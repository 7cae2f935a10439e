//! The work of one request and nothing around it: a facilitator that answers at once, an axum handler with and without the
//! layer, payments signed in advance, each of them another one. For what counts and times it.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use alloy_primitives::{Address, B256, U256};
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use async_trait::async_trait;
use axum::{Router, body::Body, routing::post};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use tower::{Layer as _, Service};
use tower_x402::{
    Asset, Clock, ManualClock, Network, Usdc,
    channels::{Channels, ClaimPolicy},
    client::{AddPayment, AddPaymentLayer, Budget, Payer},
    eip3009::{Authorization, PaymentSignature, TokenDomain},
    facilitator::{
        Facilitator, FacilitatorError, VerifyError,
        channels::{ChannelError, ChannelFacilitator, Claimed, Executed, Settled, SignedRefund},
    },
    ledger::{Ledger, MemoryLedger, Record, ResponseLimits, channels::ChannelLedger},
    payment::{Prechecked, SettlementOutcome, Terms, Verified},
    protocol::{
        ExactOffer, ExactPayload, PaymentRequired, SettlementResponse, SupportedResponse, decode_header, encode_header,
    },
    server::{RequestBody, RequirePaymentLayer, RequirePaymentLayerBuilder},
    vouchers::{
        AuthorizerKey, ChannelConfig, ChannelId, ChannelObservation, ChannelOffer, ChannelPayload, ChannelState, Claim,
        Deposit, Escrow, Voucher, VoucherSignature,
    },
};

/// What the clocks here say, in Unix seconds.
pub const NOW: u64 = 1_800_000_000;
/// How long payments are valid, in seconds.
pub const VALID: u64 = 120;
/// Atomic units.
pub const PRICE: u64 = 1_000;
/// What the handler says.
pub const WORK: &str = r#"{"score":1}"#;
pub const TASK: &str = r#"{"task":"17 * 23","answer":"391"}"#;
const RESOURCE: &str = "https://api.example/evaluate";

/// Answers at once, and everybody is rich.
pub struct AtOnce {
    ledger: Arc<dyn Ledger>,
}

impl AtOnce {
    pub fn over(ledger: Arc<dyn Ledger>) -> Self {
        Self { ledger }
    }

    /// With a ledger in memory.
    pub fn in_memory(clock: Arc<dyn Clock>) -> Self {
        Self::over(Arc::new(MemoryLedger::with(ResponseLimits::default(), 10_000_000, clock)))
    }
}

impl std::fmt::Debug for AtOnce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AtOnce")
    }
}

#[async_trait]
impl Facilitator for AtOnce {
    fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.ledger
    }

    fn serves(&self, _: &Terms) -> bool {
        true
    }

    async fn supported(&self) -> Result<SupportedResponse, FacilitatorError> {
        Ok(SupportedResponse::default())
    }

    async fn verify(&self, _: &Prechecked) -> Result<Verified, VerifyError> {
        Ok(Verified::default())
    }

    async fn settle(&self, payment: &Prechecked, _: &Verified) -> Result<SettlementOutcome, FacilitatorError> {
        Ok(SettlementOutcome::Settled { transaction: payment.authorization().nonce, block: None, fee: None })
    }

    async fn reconcile(&self, _: &Record) -> Result<SettlementOutcome, FacilitatorError> {
        Ok(SettlementOutcome::Unknown { transaction: None })
    }
}

pub fn clock() -> Arc<dyn Clock> {
    Arc::new(ManualClock::at(NOW))
}

pub fn asset() -> Asset {
    Network::BASE_SEPOLIA.usdc().expect("USDC is on Base Sepolia")
}

pub fn pay_to() -> Address {
    Address::repeat_byte(0xba)
}

/// A layer that charges one price for one resource.
pub fn layer(facilitator: impl Facilitator, clock: Arc<dyn Clock>) -> RequirePaymentLayerBuilder {
    RequirePaymentLayer::builder()
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, pay_to())
        .resource_url(RESOURCE)
        .facilitator(facilitator)
        .clock(clock)
}

/// The handler alone.
pub fn bare() -> Router {
    Router::new().route("/evaluate", post(async |_: Bytes| WORK))
}

/// The handler below the layer.
pub fn sold(layer: RequirePaymentLayer) -> Router {
    bare().layer(layer)
}

/// The layer around a function that answers at once, without a router.
pub fn alone(layer: RequirePaymentLayer) -> impl Answers<Future: Send, Body: Send> + Clone + Send + 'static {
    layer.layer(tower::service_fn(|_: Request<RequestBody<Body>>| {
        ready(Ok::<_, Infallible>(Response::new(Full::from(WORK))))
    }))
}

/// What answers requests.
pub trait Answers: Service<Request<Body>, Error = Infallible, Response = Response<Self::Body>> {
    type Body;
}

impl<S: Service<Request<Body>, Error = Infallible, Response = Response<B>>, B> Answers for S {
    type Body = B;
}

/// The request, without a payment.
pub fn unpaid() -> Request<Body> {
    let request = Request::post("/evaluate").header("content-type", "application/json");
    request.body(Body::from(TASK)).expect("a request")
}

/// The request with a payment.
pub fn paid(payment: &HeaderValue) -> Request<Body> {
    let mut request = unpaid();
    request.headers_mut().insert("payment-signature", payment.clone());
    request
}

/// Answers one request on this thread.
pub async fn answer<A: Answers>(app: &mut A, request: Request<Body>) -> Response<A::Body> {
    match app.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// What a payment is signed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signed {
    /// The payer's key, which the server recovers.
    ByKey,
    /// By a contract wallet: nothing is recovered, the facilitator is asked.
    ByWallet,
}

/// Signs payments of many payers.
pub struct Mint {
    keys: Vec<PrivateKeySigner>,
    terms: Terms,
    next: u64,
}

impl Mint {
    pub fn new(payers: u8) -> Self {
        let keys = (1..=payers).map(|n| PrivateKeySigner::from_bytes(&B256::repeat_byte(n)).expect("a key")).collect();
        Self { keys, terms: terms(), next: 0 }
    }

    /// A payment that nobody has seen, valid from `now` on.
    pub fn payment(&mut self, signed: Signed, now: u64) -> ExactPayload {
        self.next += 1;
        let key = &self.keys[self.next as usize % self.keys.len()];
        let authorization = authorization(key.address(), B256::from(U256::from(self.next)), now);
        let signature = match signed {
            Signed::ByKey => {
                let hash = authorization.signing_hash(self.terms.domain());
                key.sign_hash_sync(&hash).expect("a local key signs").as_bytes().to_vec()
            }
            Signed::ByWallet => vec![7; 96],
        };
        ExactPayload::new(PaymentSignature::from(signature), authorization)
    }

    /// Its header, as a client of v2 writes it.
    pub fn header(&mut self, signed: Signed, now: u64) -> HeaderValue {
        let payload = serde_json::to_string(&self.payment(signed, now)).expect("JSON");
        let accepted = self.terms.text().text();
        let text = format!(
            r#"{{"x402Version":2,"resource":{{"url":"{RESOURCE}"}},"accepted":{accepted},"payload":{payload}}}"#
        );
        BASE64_STANDARD.encode(text).try_into().expect("base64 is a header value")
    }

    pub fn headers(&mut self, count: usize, signed: Signed, now: u64) -> Vec<HeaderValue> {
        (0..count).map(|_| self.header(signed, now)).collect()
    }
}

/// A chain on which every channel has as much money as vouchers can be for.
#[derive(Debug)]
pub struct RichChannels;

#[async_trait]
impl ChannelFacilitator for RichChannels {
    fn network(&self) -> Network {
        Network::BASE_SEPOLIA
    }

    async fn observe(&self, channels: &[ChannelId]) -> Result<Vec<ChannelObservation>, ChannelError> {
        let rich = |channel: &ChannelId| ChannelObservation {
            state: ChannelState {
                channel_id: *channel,
                balance: u128::MAX,
                total_claimed: 0,
                withdraw_requested_at: 0,
                refund_nonce: 0,
                charged_cumulative_amount: None,
            },
            withdrawal: 0,
            block: 1,
            time: 1,
        };
        Ok(channels.iter().map(rich).collect())
    }

    async fn verify_deposit(&self, _: &ChannelConfig, _: &Deposit) -> Result<ChannelObservation, ChannelError> {
        Err(ChannelError::Pending { transaction: None })
    }

    async fn deposit(&self, _: &ChannelConfig, _: &Voucher, _: &Deposit) -> Result<Executed, ChannelError> {
        Err(ChannelError::Pending { transaction: None })
    }

    async fn claim(&self, _: &[Claim], _: &AuthorizerKey) -> Result<Claimed, ChannelError> {
        Err(ChannelError::Pending { transaction: None })
    }

    async fn claim_signed(&self, _: &[Claim], _: &alloy_primitives::Bytes) -> Result<Claimed, ChannelError> {
        Err(ChannelError::Pending { transaction: None })
    }

    async fn settle(&self, _: Address, _: Address) -> Result<Option<Settled>, ChannelError> {
        Ok(None)
    }

    async fn refund_signed(&self, _: &SignedRefund) -> Result<Executed, ChannelError> {
        Err(ChannelError::Pending { transaction: None })
    }
}

/// The channels of a seller whose payers are rich. Call it in a runtime.
pub fn rich_channels(ledger: Arc<dyn ChannelLedger>, clock: Arc<dyn Clock>) -> Channels {
    let authorizer = PrivateKeySigner::from_bytes(&B256::repeat_byte(0xaa)).expect("a key");
    // Claims never come to an end here, so that everything is sold on credit.
    let claims = ClaimPolicy::default().amount(Usdc::MAX).age(Duration::from_secs(u64::MAX >> 1));
    let channels = Channels::builder(RichChannels, AuthorizerKey::new(authorizer)).ledger(ledger).claims(claims);
    channels.clock(clock).build().expect("complete settings")
}

/// Signs the vouchers of one channel, one after the other.
pub struct VoucherMint {
    key: PrivateKeySigner,
    config: ChannelConfig,
    accepted: String,
    charged: u128,
}

impl VoucherMint {
    /// For what `app` asks for vouchers.
    pub async fn of(app: &mut Router) -> Self {
        Self::of_channel(app, 0).await
    }

    /// The same for one of several channels.
    pub async fn of_channel(app: &mut Router, salt: u8) -> Self {
        let demand = answer(app, unpaid()).await.headers()["payment-required"].clone();
        let demand: PaymentRequired = decode_header(demand.as_bytes(), 1 << 16).expect("a 402");
        let offers = demand.accepts.iter().map(|offer| (offer.text().to_owned(), offer.read().expect("an offer")));
        let (accepted, offer) = offers.into_iter().find(|(_, offer)| offer.scheme == "batch-settlement").expect("one");
        let terms = ChannelOffer::try_from(&offer.extra).expect("an offer for vouchers");
        let key = PrivateKeySigner::from_bytes(&B256::repeat_byte(1)).expect("a key");
        let config = ChannelConfig {
            payer: Address::repeat_byte(0xca),
            payer_authorizer: key.address(),
            receiver: offer.pay_to.parse().expect("an address"),
            receiver_authorizer: terms.receiver_authorizer,
            token: offer.asset.parse().expect("an address"),
            withdraw_delay: terms.withdraw_delay,
            salt: B256::repeat_byte(salt),
        };
        Self { key, config, accepted, charged: 0 }
    }

    /// The header of the next payment.
    pub fn header(&mut self) -> HeaderValue {
        self.charged += u128::from(PRICE);
        let escrow = Escrow::on(Network::BASE_SEPOLIA);
        let channel_id = escrow.channel_id(&self.config);
        let digest = escrow.voucher_digest(channel_id, self.charged);
        let signature = self.key.sign_hash_sync(&digest).expect("a local key signs").as_bytes();
        let signature = VoucherSignature::try_from(signature).expect("one that the contract takes");
        let voucher = Voucher { channel_id, max_claimable_amount: self.charged, signature };
        let payload = ChannelPayload::Voucher { channel_config: self.config, voucher };
        let (payload, accepted) = (serde_json::to_string(&payload).expect("JSON"), &self.accepted);
        let text = format!(
            r#"{{"x402Version":2,"resource":{{"url":"{RESOURCE}"}},"accepted":{accepted},"payload":{payload}}}"#
        );
        BASE64_STANDARD.encode(text).try_into().expect("base64 is a header value")
    }
}

pub fn terms() -> Terms {
    Terms::new(ExactOffer::new(asset(), U256::from(PRICE), pay_to(), VALID))
}

pub fn authorization(from: Address, nonce: B256, now: u64) -> Authorization {
    Authorization {
        from,
        to: pay_to(),
        value: U256::from(PRICE),
        valid_after: U256::ZERO,
        valid_before: U256::from(now + VALID),
        nonce,
    }
}

/// The token's EIP-712 domain.
pub fn domain() -> TokenDomain {
    TokenDomain::of(&asset())
}

/// A server as a paying client sees it: it demands, or answers and says that it was paid.
#[derive(Clone)]
pub struct Seller {
    demand: HeaderValue,
    receipt: HeaderValue,
}

impl Seller {
    /// One that asks for what `app` asks for.
    pub async fn like(app: &mut Router) -> Self {
        let demand = answer(app, unpaid()).await.headers()["payment-required"].clone();
        let receipt =
            SettlementResponse::settled(B256::repeat_byte(0x77).to_string(), Network::BASE_SEPOLIA.to_string());
        let receipt = encode_header(&receipt).expect("JSON").try_into().expect("base64 is a header value");
        Self { demand, receipt }
    }
}

impl Service<Request<Full<Bytes>>> for Seller {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
        let mut response = Response::new(Full::from(WORK));
        if request.headers().contains_key("payment-signature") {
            response.headers_mut().insert("payment-response", self.receipt.clone());
        } else {
            *response.status_mut() = StatusCode::PAYMENT_REQUIRED;
            response.headers_mut().insert("payment-required", self.demand.clone());
        }
        ready(Ok(response))
    }
}

/// The request as a client sends it.
pub fn order() -> Request<Full<Bytes>> {
    let request = Request::post(RESOURCE).header("content-type", "application/json");
    request.body(Full::from(TASK)).expect("a request")
}

pub fn key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::repeat_byte(9)).expect("a key")
}

/// A client that pays, and whose money does not run out.
pub fn buyer(seller: Seller) -> AddPayment<Seller> {
    let budget = Budget::builder().total("$1000000".parse().expect("an amount")).build();
    AddPaymentLayer::new(Payer::builder(key()).budget(budget).build()).layer(seller)
}
