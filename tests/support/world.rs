//! One seller on a devnet, and what a test turns on it: the facilitator, the clock and the books of its channels, its handler, and payers
//! by each scheme, who pay by hand.

use std::{sync::Arc, time::Duration};

use alloy_primitives::U256;
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::{Request, Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tower_x402::{
    ManualClock, Network, Usdc,
    channels::{Channels, ChannelsBuilder, ClaimPolicy},
    facilitator::channels::{ChannelFacilitator, OnchainChannels, OnchainChannelsBuilder},
    ledger::{
        MemoryLedger,
        channels::{ChannelLedger, ChannelRecord},
    },
    server::{ActualPrice, RequirePaymentLayerBuilder},
    vouchers::{AuthorizerKey, Deposit, Voucher, abi::BatchSettlement},
};

use crate::{
    authorization::unix_now,
    chain::{Chain, Relayer},
    devnet::DevnetChain,
    escrow::{self, Channel},
    permit::approve,
    shop::{Answer, App, Customer, PRICE, Shop, demand, evaluate, paid, send},
};

/// What a request costs, as channels count it.
pub const COST: u128 = PRICE as u128;
/// What a payer usually deposits.
pub const DEPOSIT: u128 = 10_000;

/// A seller of evaluations on a devnet. It takes vouchers beside `exact` unless a test has other settings.
pub struct World {
    pub chain: DevnetChain,
    pub shop: Shop,
    /// The seller. Its handler does what the request [says](Self::obeying).
    pub app: App,
    pub channels: Channels,
    pub ledger: Arc<MemoryLedger>,
    pub authorizer: PrivateKeySigner,
    /// By which channels become stale.
    pub clock: Arc<ManualClock>,
    /// Has money, which Permit2 may move.
    pub payer: PrivateKeySigner,
    /// Told when a handler has begun that is held, and what it waits for.
    pub begun: Arc<Notify>,
    pub go_on: Arc<Notify>,
}

type Settings<B> = Box<dyn FnOnce(B) -> B + Send>;

/// A world before it begins.
pub struct WorldBuilder {
    chain: Option<DevnetChain>,
    shop: Option<Shop>,
    node: Option<String>,
    is_one_key: bool,
    layer: Option<Settings<RequirePaymentLayerBuilder>>,
    funds: u64,
    approved: U256,
}

impl WorldBuilder {
    /// Default: a devnet with a block per transaction.
    #[must_use]
    pub fn chain(self, chain: DevnetChain) -> Self {
        Self { chain: Some(chain), ..self }
    }

    /// Default: one whose facilitator has the usual settings.
    #[must_use]
    pub fn shop(self, shop: Shop) -> Self {
        Self { shop: Some(shop), ..self }
    }

    /// Where the channels reach the chain. Default: at the chain itself.
    #[must_use]
    pub fn node(self, url: &str) -> Self {
        Self { node: Some(url.to_owned()), ..self }
    }

    /// The channels send with the shop's key, instead of one of their own.
    #[must_use]
    pub fn one_key(self) -> Self {
        Self { is_one_key: true, ..self }
    }

    /// What the seller takes instead of vouchers beside `exact`.
    #[must_use]
    pub fn layer(
        self,
        settings: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder + Send + 'static,
    ) -> Self {
        Self { layer: Some(Box::new(settings)), ..self }
    }

    /// What the payer has, in units. Default: ten times the price.
    #[must_use]
    pub fn funds(self, funds: u64) -> Self {
        Self { funds, ..self }
    }

    /// What Permit2 may move of it. Default: all.
    #[must_use]
    pub fn approved(self, approved: U256) -> Self {
        Self { approved, ..self }
    }

    pub async fn open(self) -> World {
        let chain = match self.chain {
            Some(chain) => chain,
            None => DevnetChain::start(None).await,
        };
        let shop = match self.shop {
            Some(shop) => shop,
            None => Shop::open(&chain).await,
        };
        let (authorizer, payer) = (PrivateKeySigner::random(), PrivateKeySigner::random());
        chain.mint(payer.address(), self.funds).await;
        approve(&chain.devnet, payer.address(), self.approved);
        let (ledger, clock) = (Arc::new(MemoryLedger::new()), Arc::new(ManualClock::at(unix_now())));
        let contract = match self.is_one_key {
            true => OnchainChannels::builder().facilitator(&shop.facilitator).build().await.expect("the contracts"),
            false => {
                let node = self.node.unwrap_or_else(|| chain.rpc_url());
                contract(&chain, chain.gas_key().await, |contract| {
                    contract.rpc_url(node).block_time(Duration::from_millis(100))
                })
                .await
            }
        };
        let channels = channels_of(contract, &authorizer, ledger.clone(), clock.clone());
        // A hint, for payers that ask how much to deposit.
        let channels = channels.min_deposit("$0.01").build().expect("complete settings");
        let layer = match self.layer {
            Some(settings) => settings(shop.layer()),
            None => shop.layer().vouchers(channels.clone()),
        };
        let (begun, go_on) = Default::default();
        let app = obeying(&shop, layer, (&begun, &go_on));
        World { chain, shop, app, channels, ledger, authorizer, clock, payer, begun, go_on }
    }
}

impl World {
    pub fn builder() -> WorldBuilder {
        let (funds, approved) = (10 * PRICE, U256::MAX >> 1);
        WorldBuilder { chain: None, shop: None, node: None, is_one_key: false, layer: None, funds, approved }
    }

    pub async fn open() -> Self {
        Self::builder().open().await
    }

    /// A world whose blocks come at this pace.
    pub async fn with_blocks_every(block_time: Duration) -> Self {
        Self::builder().chain(DevnetChain::start(Some(block_time)).await).open().await
    }

    /// A world whose seller takes what these settings say.
    pub async fn with(
        settings: impl FnOnce(RequirePaymentLayerBuilder) -> RequirePaymentLayerBuilder + Send + 'static,
    ) -> Self {
        Self::builder().layer(settings).open().await
    }

    /// The layer of a seller that takes vouchers beside `exact`, to be finished.
    pub fn layer(&self) -> RequirePaymentLayerBuilder {
        self.shop.layer().vouchers(self.channels.clone())
    }

    /// A handler below this layer that returns the request's body and does what its words say, which are separated by commas: "costs 7"
    /// charges seven units, "slow 7" takes seven milliseconds, "fails" is a 500, and "held" tells `begun` and waits for `go_on`.
    pub fn obeying(&self, layer: RequirePaymentLayerBuilder) -> App {
        obeying(&self.shop, layer, (&self.begun, &self.go_on))
    }

    /// Sends a request, and lets this happen while its handler is held.
    pub async fn meanwhile(&self, request: Request<Body>, what: impl AsyncFnOnce()) -> Answer {
        let (answer, ()) = tokio::join!(send(&self.app, request), async {
            self.begun.notified().await;
            what().await;
            self.go_on.notify_one();
        });
        answer
    }

    /// What the payee has.
    pub async fn received(&self) -> u64 {
        self.chain.balance(self.shop.pay_to).await
    }

    /// The payer, as one that signs authorizations.
    pub fn customer(&self) -> Customer {
        Customer { from: self.payer.address(), signer: self.payer.clone() }
    }

    /// A channel of a new payer, which is not filled yet.
    pub async fn channel(&self) -> Channel {
        Channel::funded(&self.chain, self.shop.pay_to, &self.authorizer, 100 * PRICE).await
    }

    /// A deposit that can be executed for a minute.
    pub async fn sign_deposit(&self, channel: &Channel, units: u128) -> Deposit {
        channel.sign_deposit(&self.chain, units, unix_now() + 60).await
    }

    /// A channel that is filled by its payer's first request, which costs the price.
    pub async fn filled(&self, app: &App) -> Channel {
        self.filled_with(app, DEPOSIT).await
    }

    /// The same with another deposit.
    pub async fn filled_with(&self, app: &App, units: u128) -> Channel {
        let channel = self.channel().await;
        let deposit = self.sign_deposit(&channel, units).await;
        let answer = send(app, pay(app, &channel, COST, Some(&deposit), "first").await).await;
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        channel
    }

    /// What the books have of a channel that they know.
    pub async fn record(&self, channel: &Channel) -> ChannelRecord {
        self.ledger.channel(&channel.id()).await.expect("memory").expect("a known channel")
    }

    pub async fn charged(&self, channel: &Channel) -> u128 {
        self.record(channel).await.charged()
    }

    /// The payer announces that it withdraws so much. Returns the account that can do it.
    pub async fn announce_withdrawal(&self, channel: &Channel, amount: u128) -> Relayer {
        self.chain.fund(channel.payer.address(), U256::from(10).pow(U256::from(19))).await;
        let payer = Relayer::of(&self.chain.rpc_url(), channel.payer.clone());
        let withdraw = BatchSettlement::initiateWithdrawCall { config: (&channel.config).into(), amount };
        assert!(escrow::send(&self.chain, &payer, &withdraw).await.status());
        payer
    }

    /// The channels on the chain, as another process reaches them that sends with a key of its own.
    pub async fn contract(
        &self,
        settings: impl FnOnce(OnchainChannelsBuilder) -> OnchainChannelsBuilder,
    ) -> OnchainChannels {
        contract(&self.chain, self.chain.gas_key().await, settings).await
    }

    /// The same with this key.
    pub async fn contract_by(
        &self,
        sender: PrivateKeySigner,
        settings: impl FnOnce(OnchainChannelsBuilder) -> OnchainChannelsBuilder,
    ) -> OnchainChannels {
        contract(&self.chain, sender, settings).await
    }

    /// The seller's channels in another process, with the same books and clock. Nothing is claimed unless a test says so, or a withdrawal
    /// is announced.
    pub fn channels_of(&self, contract: impl ChannelFacilitator) -> ChannelsBuilder {
        channels_of(contract, &self.authorizer, self.ledger.clone(), self.clock.clone())
    }

    /// The same with other books.
    pub async fn process(&self, ledger: Arc<dyn ChannelLedger>) -> Channels {
        let contract = self.contract(|contract| contract.block_time(Duration::from_millis(100))).await;
        self.channels_of(contract).ledger(ledger).build().expect("complete settings")
    }

    /// A seller with these channels.
    pub fn seller(&self, channels: Channels) -> App {
        self.shop.app(self.shop.layer().vouchers(channels))
    }
}

async fn contract(
    chain: &DevnetChain,
    sender: PrivateKeySigner,
    settings: impl FnOnce(OnchainChannelsBuilder) -> OnchainChannelsBuilder,
) -> OnchainChannels {
    let contract = OnchainChannels::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url()).signer(sender);
    settings(contract).build().await.expect("the contracts are on the devnet")
}

/// The channels of a seller with this key, these books and this clock. Nothing is claimed unless a test says so, or a withdrawal is announced.
pub fn channels_of(
    contract: impl ChannelFacilitator,
    authorizer: &PrivateKeySigner,
    ledger: Arc<dyn ChannelLedger>,
    clock: Arc<ManualClock>,
) -> ChannelsBuilder {
    let never = ClaimPolicy::default().amount(Usdc::from_atomic(u64::MAX)).age(Duration::from_secs(u64::MAX >> 1));
    Channels::builder(contract, AuthorizerKey::new(authorizer.clone())).ledger(ledger).claims(never).clock(clock)
}

fn obeying(shop: &Shop, layer: RequirePaymentLayerBuilder, (begun, go_on): (&Arc<Notify>, &Arc<Notify>)) -> App {
    let signals = (begun.clone(), go_on.clone());
    shop.app_with(layer, move |_, body| {
        let (begun, go_on) = signals.clone();
        async move {
            let text = String::from_utf8_lossy(&body).into_owned();
            let mut response = Response::new(Body::from(body));
            for word in text.split(", ") {
                match word.split_once(' ').unwrap_or((word, "")) {
                    ("costs", units) => {
                        response.extensions_mut().insert(ActualPrice(Usdc::from_atomic(units.parse()?)));
                    }
                    ("slow", time) => tokio::time::sleep(Duration::from_millis(time.parse()?)).await,
                    ("fails", "") => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
                    ("held", "") => {
                        begun.notify_one();
                        go_on.notified().await;
                    }
                    _ => {}
                }
            }
            Ok(response)
        }
    })
}

/// The offer to pay with vouchers for this request.
pub async fn offer(app: &App, body: &'static str) -> Value {
    let demand = demand(&send(app, evaluate(body)).await);
    let offers = demand["accepts"].as_array().expect("offers");
    offers.iter().find(|offer| offer["scheme"] == "batch-settlement").expect("an offer for vouchers").clone()
}

pub async fn voucher(channel: &Channel, max: u128) -> Voucher {
    Voucher::sign(&Channel::escrow(), channel.id(), max, &channel.voucher_key).await.expect("a local key signs")
}

/// A payment of this kind, to be changed or sent, by a voucher for `max`.
pub async fn payment(kind: &str, accepted: &Value, channel: &Channel, max: u128) -> Value {
    let payload = json!({ "type": kind, "channelConfig": channel.config, "voucher": voucher(channel, max).await });
    json!({ "x402Version": 2, "accepted": accepted, "payload": payload })
}

/// A payment for any request, by a voucher for `max`.
pub async fn by_voucher(app: &App, channel: &Channel, max: u128) -> Value {
    payment("voucher", &offer(app, "a").await, channel, max).await
}

/// A request that is paid with a voucher for `max`.
pub async fn pay(
    app: &App,
    channel: &Channel,
    max: u128,
    deposit: Option<&Deposit>,
    body: &'static str,
) -> Request<Body> {
    let mut payment = payment("voucher", &offer(app, body).await, channel, max).await;
    if let Some(deposit) = deposit {
        payment["payload"]["type"] = "deposit".into();
        payment["payload"]["deposit"] = json!(deposit);
    }
    paid(evaluate(body), &payment)
}

/// Asks for what is left of a channel, or for this much.
pub async fn refund(app: &App, channel: &Channel, charged: u128, amount: Option<&str>) -> Answer {
    let mut payment = payment("refund", &offer(app, "refund").await, channel, charged).await;
    if let Some(amount) = amount {
        payment["payload"]["amount"] = amount.into();
    }
    send(app, paid(evaluate("refund"), &payment)).await
}

/// What the answer says that the request cost, and what was charged in all.
pub fn told(answer: &Answer) -> (String, String) {
    let settlement = answer.settlement().unwrap_or_else(|| panic!("no PAYMENT-RESPONSE: {answer:?}"));
    assert_eq!(settlement["success"], true, "{settlement}");
    let text = |value: &Value| value.as_str().expect("a decimal string").to_owned();
    let extra = &settlement["extra"];
    (text(&extra["chargedAmount"]), text(&extra["channelState"]["chargedCumulativeAmount"]))
}

/// Checks for the refusal of a voucher with this code.
#[track_caller]
pub fn refused(answer: &Answer, code: &str) {
    assert_eq!(answer.status, StatusCode::PAYMENT_REQUIRED, "{answer:?}");
    assert_eq!(answer.reason(), format!("invalid_batch_settlement_evm_{code}"), "{answer:?}");
}
