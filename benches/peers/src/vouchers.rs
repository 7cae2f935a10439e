//! Paid requests by voucher over loopback, each seller with the escrow on a chain in a process of its own.
//!
//! Before the figures are taken each payer fills a channel with one deposit, through the seller. Of the official packages it is the
//! express server with its facilitator; no other Rust server takes vouchers.

use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use alloy_primitives::B256;
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use axum::{Router, routing::post};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::HeaderValue;
use tower_x402::{
    Network, SystemClock,
    channels::Channels,
    eip3009::{Authorization, PaymentSignature},
    facilitator::channels::OnchainChannels,
    ledger::{MemoryLedger, SqliteLedger, channels::ChannelLedger},
    protocol::{PaymentRequired, decode_header},
    server::RequirePaymentLayer,
    vouchers::{AuthorizerKey, ChannelConfig, ChannelId, ChannelOffer, ChannelPayload, Deposit, Escrow, Voucher},
};

use crate::{
    Result,
    awake::Awake,
    generator, hot_path,
    listening::Listening,
    load::{Driven, drive, median, send},
    own::{Node, settler},
    paced::percentile,
    payments::keys,
    sellers,
};

const PAYERS: u8 = 200;
const PAYMENTS: usize = 20_000;
const TURNS: usize = 3;
/// Of express, which takes its time.
const FEW: usize = 1_000;

/// How many connections there are by default.
pub const CONNECTIONS: usize = 200;

/// With a channel for each connection, since a channel has one request at a time.
pub fn run(connections: usize) -> Result {
    let _awake = Awake::keep_if_possible();
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(all(connections))
}

async fn all(connections: usize) -> Result {
    let recoveries = recoveries();
    let directory = tempfile::tempdir()?;
    let handler = post(async |_: Bytes| hot_path::WORK);
    let names = ["by voucher, SQLite", "by voucher, in memory", "exact, SQLite", "exact, in memory"];
    let mut rows = Vec::from(names.map(|name| (name, Vec::new())));
    let (mut half, mut commits) = (None, [0.0; 2]);
    for turn in 0..TURNS {
        let path = |name| directory.path().join(format!("{name}-{turn}.sqlite"));
        let node = Node::start().await?;
        let sqlite = Arc::new(SqliteLedger::open(path("vouchers")).await?);
        for (row, ledger) in [(0, sqlite.clone() as Arc<dyn ChannelLedger>), (1, Arc::new(MemoryLedger::new()))] {
            let server = Listening::here(ours(&node.url, ledger).await?).await?;
            let mut payers = Payers::with_channels(&server, connections).await?;
            let before = sqlite.commits();
            rows[row].1.push(payers.drive(&server, PAYMENTS, None).await?);
            if row == 0 {
                commits[0] = (sqlite.commits() - before) as f64 / PAYMENTS as f64;
            }
            if row == 0 && turn + 1 == TURNS {
                let rate = median(rows[0].1.iter().map(Driven::rate).collect()) / 2.0;
                half = Some((rate, payers.drive(&server, (4.0 * rate) as usize, Some(rate)).await?));
            }
        }
        let sqlite = Arc::new(SqliteLedger::open(path("exact")).await?);
        let in_memory = hot_path::AtOnce::in_memory(Arc::new(SystemClock));
        for (row, facilitator) in [(2, hot_path::AtOnce::over(sqlite.clone())), (3, in_memory)] {
            let server = Listening::here(sellers::ours_with(&handler, facilitator)?).await?;
            rows[row].1.push(drive(&server, &server.demand().await?, connections, PAYMENTS, None).await?);
        }
        commits[1] = sqlite.commits() as f64 / PAYMENTS as f64;
    }
    let node = Node::start().await?;
    match Listening::express_with_channels(&node.url, &settler()?).await? {
        Some(express) => {
            let mut payers = Payers::with_channels(&express, connections).await?;
            let mut runs = Vec::new();
            for _ in 0..=TURNS {
                runs.push(payers.drive(&express, FEW, None).await?);
            }
            // The first warms up.
            rows.push(("@x402/express 2.27.0, by voucher, in memory", runs.split_off(1)));
        }
        None => println!("without @x402/express: `npm install` in tests/peers installs it"),
    }
    println!("paid requests a second, {connections} connections, a channel each, median of {TURNS} runs of {PAYMENTS}");
    println!("| | a second | to recovering alone | processor time of the seller, µs each | to a recovery |");
    println!("|---|---|---|---|---|");
    let recovery = 2e6 / recoveries;
    println!("| recovering the signer alone, on both processors | {recoveries:.0} | 1.00 × | {recovery:.1} | 1.00 × |");
    for (name, runs) in rows {
        let rate = median(runs.iter().map(Driven::rate).collect());
        let each = median(runs.iter().map(Driven::seller_each).collect());
        println!("| {name} | {rate:.0} | {:.2} × | {each:.1} | {:.2} × |", rate / recoveries, each / recovery);
    }
    println!("\ncommits of SQLite per request: {:.3} by voucher, {:.3} exact", commits[0], commits[1]);
    if let Some((rate, mut driven)) = half {
        driven.times.sort();
        let [p50, p99] = [50, 99].map(|percent| percentile(&driven.times, percent));
        println!("by voucher, SQLite, at {rate:.0} a second, half of that: p50 {p50:.2} ms, p99 {p99:.2} ms");
    }
    Ok(())
}

/// How many signers a second can be recovered on two processors that do nothing else.
fn recoveries() -> f64 {
    const EACH: usize = 10_000;
    let key = &keys(1)[0];
    let payment = |nonce| {
        let authorization = hot_path::authorization(key.address(), B256::from(nonce), 0);
        let hash = authorization.signing_hash(&hot_path::domain());
        (authorization, key.sign_hash_sync(&hash).expect("a local key signs").as_bytes().to_vec())
    };
    let payments: Vec<(Authorization, Vec<u8>)> =
        (1..=50_u64).map(|nonce| payment(alloy_primitives::U256::from(nonce))).collect();
    let recover = || {
        for (authorization, signature) in payments.iter().cycle().take(EACH) {
            let hash = authorization.signing_hash(&hot_path::domain());
            assert_eq!(PaymentSignature::from(signature.clone()).recover(hash).ok(), Some(key.address()));
        }
    };
    recover();
    let started = Instant::now();
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(&recover))));
    (2 * EACH) as f64 / started.elapsed().as_secs_f64()
}

async fn ours(rpc_url: &str, ledger: Arc<dyn ChannelLedger>) -> Result<Router> {
    let key = settler()?;
    let contract = OnchainChannels::builder().rpc_url(rpc_url).network(Network::BASE_SEPOLIA).signer(key.clone());
    let channels = Channels::builder(contract.build().await?, AuthorizerKey::new(key)).ledger(ledger).build()?;
    let layer: RequirePaymentLayer =
        hot_path::layer(hot_path::AtOnce::in_memory(Arc::new(SystemClock)), Arc::new(SystemClock))
            .vouchers(channels)
            .build()?;
    Ok(Router::new().route("/evaluate", post(async |_: Bytes| hot_path::WORK)).layer(layer))
}

/// Payers with a channel each, who pay in turns.
struct Payers {
    accepted: String,
    channels: Vec<PayersChannel>,
    next: usize,
}

struct PayersChannel {
    key: PrivateKeySigner,
    id: ChannelId,
    config: ChannelConfig,
    charged: u128,
}

impl Payers {
    /// Has each of them fill a channel, and pay a first request by it.
    async fn with_channels(server: &Listening, count: usize) -> Result<Self> {
        let demand: PaymentRequired = decode_header(server.demand().await?["payment-required"].as_bytes(), 1 << 16)?;
        let mut offers = demand.accepts.iter().filter_map(|offer| Some((offer.text(), offer.read().ok()?)));
        let (text, offer) = offers.find(|(_, offer)| offer.scheme == "batch-settlement").ok_or("no offer")?;
        let terms = ChannelOffer::try_from(&offer.extra)?;
        let (receiver, token) = (offer.pay_to.parse()?, offer.asset.parse()?);
        let keys = keys(PAYERS);
        let channel = |number: usize| {
            let key = keys[number % keys.len()].clone();
            let config = ChannelConfig {
                payer: key.address(),
                payer_authorizer: key.address(),
                receiver,
                receiver_authorizer: terms.receiver_authorizer,
                token,
                withdraw_delay: terms.withdraw_delay,
                salt: B256::left_padding_from(&(number / keys.len()).to_be_bytes()),
            };
            PayersChannel { key, id: escrow().channel_id(&config), config, charged: 0 }
        };
        let mut payers = Self { accepted: text.to_owned(), channels: (0..count).map(channel).collect(), next: 0 };
        let mut requests = Vec::new();
        for _ in 0..count {
            requests.push(payers.request(true).await?);
        }
        // One after the other: the official facilitator gives deposits that come together one account nonce.
        let answers = send(server, 1, requests, None).await?;
        assert_eq!(answers.refused, 0, "each deposit is executed");
        Ok(payers)
    }

    async fn drive(&mut self, server: &Listening, count: usize, rate: Option<f64>) -> Result<Driven> {
        let mut requests = Vec::with_capacity(count);
        for _ in 0..count {
            requests.push(self.request(false).await?);
        }
        let driven = send(server, self.channels.len(), requests, rate).await?;
        assert_eq!(driven.refused, 0, "each voucher buys an answer");
        Ok(driven)
    }

    /// The next payer's request, with the deposit for all that follow or without.
    async fn request(&mut self, deposits: bool) -> Result<Vec<u8>> {
        let next = self.next % self.channels.len();
        let channel = &mut self.channels[next];
        self.next += 1;
        channel.charged += u128::from(hot_path::PRICE);
        let voucher = Voucher::sign(&escrow(), channel.id, channel.charged, &channel.key).await?;
        let channel_config = channel.config;
        let payload = match deposits {
            true => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
                let (salt, domain) = (B256::repeat_byte(1), hot_path::domain());
                let amount = 1_000 * u128::from(hot_path::PRICE);
                let deposit = Deposit::sign(channel.id, amount, now + 600, salt, &domain, &channel.key).await?;
                ChannelPayload::Deposit { channel_config, voucher, deposit }
            }
            false => ChannelPayload::Voucher { channel_config, voucher },
        };
        let (accepted, payload) = (&self.accepted, serde_json::to_string(&payload)?);
        let payment = format!(r#"{{"x402Version":2,"accepted":{accepted},"payload":{payload}}}"#);
        let header = HeaderValue::try_from(BASE64_STANDARD.encode(payment))?;
        Ok(generator::request(&header))
    }
}

fn escrow() -> Escrow {
    Escrow::on(Network::BASE_SEPOLIA)
}
