//! What one request of a stranger costs a service that anybody may call: requests to its node, and gas of its key. These are rows of *What
//! strangers can make us pay* in SECURITY.md.

use std::{ops::RangeInclusive, time::Duration};

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::body::Body;
use http::Request;
use serde_json::{Value, json};
use support::{
    authorization::random_address,
    chain::Chain as _,
    changed,
    devnet::DevnetChain,
    escrow::Channel,
    permit::{ExactPermit, approve},
    scripted::customer,
    shop::{Customer, PRICE},
};
use tower::ServiceExt as _;
use tower_x402::{
    Network,
    facilitator::{OnchainFacilitator, channels::OnchainChannels},
    vouchers::{ChannelConfig, ChannelPayload},
};
use x402_devnet::Fault;
use x402_facilitator::FacilitatorService;

use super::service::{purchase, request};
use crate::channels::service::{Stage, burn_call, post};

const NO_GAS: RangeInclusive<u64> = 0..=0;
const DEPOSIT: u128 = 10_000;

/// What is sent and where, how many requests to the node it takes, if that is always the same, and how much gas.
type Row = (&'static str, &'static str, Value, Option<u64>, RangeInclusive<u64>);

/// A service with one key, which does nothing by itself while it is measured.
async fn open() -> (Stage, OnchainFacilitator) {
    let chain = DevnetChain::start(None).await;
    let bank = OnchainFacilitator::builder().network(Network::BASE_SEPOLIA).rpc_url(chain.rpc_url());
    let bank = bank.reconcile_interval(Duration::from_secs(3_600)).signer(chain.gas_key().await).build().await.unwrap();
    let channels = OnchainChannels::builder().facilitator(&bank).build().await.unwrap();
    let service = FacilitatorService::builder(bank.clone()).channels(channels.clone());
    let service = service.catalogue(100, Duration::from_secs(3_600)).build();
    let channel = Channel::funded(&chain, random_address(), &PrivateKeySigner::random(), 100_000).await;
    (Stage { chain, channels, service, channel }, bank)
}

/// A permit of `exact` to a payee of its choice.
fn permit(payer: &Customer) -> Value {
    let asset = Network::BASE_SEPOLIA.usdc().unwrap();
    let offer = json!({
        "scheme": "exact", "network": "eip155:84532", "amount": PRICE.to_string(), "asset": asset.address,
        "payTo": random_address(), "maxTimeoutSeconds": 60,
        "extra": { "name": asset.name, "version": asset.version, "assetTransferMethod": "permit2" },
    });
    let demand = json!({ "x402Version": 2, "accepts": [offer], "resource": { "url": "https://a.example/" } });
    let permit = ExactPermit { from: payer.from, ..ExactPermit::sign(&payer.signer, &demand) };
    json!({ "x402Version": 2, "paymentPayload": permit.payload(), "paymentRequirements": permit.offer })
}

fn exact(payer: &Customer) -> Value {
    request(&purchase(payer, random_address()))
}

/// The same with another price.
fn priced(body: Value, price: u128) -> Value {
    changed(body, |body| {
        body["paymentRequirements"]["amount"] = price.to_string().into();
        body["paymentPayload"]["accepted"]["amount"] = price.to_string().into();
    })
}

#[tokio::test]
async fn each_request_costs_a_service_what_the_table_says() {
    let (stage, bank) = open().await;
    let chain = &stage.chain;
    let payer = Customer::with_funds(chain, 100 * PRICE).await;
    let unapproved = Customer::with_funds(chain, PRICE).await;
    let penniless = customer();
    for payer in [&payer, &penniless] {
        approve(&chain.devnet, payer.from, U256::MAX >> 1);
    }
    // Signed by another key, in the name of a payer with money or of nobody.
    let forged = async || Customer { from: Customer::with_funds(chain, PRICE).await.from, ..customer() };
    let nobody = Customer { from: random_address(), ..customer() };

    // Their checks of signatures take any amount of gas.
    let burn = |account: Address, gas| {
        chain.devnet.execute(Address::repeat_byte(9), account, burn_call(gas)).unwrap();
    };
    let owner = customer();
    let wallet = chain.deploy_wallet(owner.from).await;
    chain.mint(wallet, 100 * PRICE).await;
    approve(&chain.devnet, wallet, U256::MAX >> 1);
    burn(wallet, 150_000);
    let wallet = Customer { from: wallet, ..owner };
    let delegated = Channel::funded(chain, random_address(), &PrivateKeySigner::random(), 100_000).await;
    chain.delegate(delegated.config.payer, wallet.from).await;
    burn(delegated.config.payer, 200_000);

    let seller = (random_address(), stage.channel.authorizer.clone());
    let mut channels = Vec::new();
    for _ in 0..7 {
        channels.push(Channel::funded(chain, seller.0, &seller.1, 100_000).await);
    }
    let [one, two, three, four, empty, contracts, foreign] = &mut channels[..] else { unreachable!() };
    contracts.config.receiver_authorizer = wallet.from;
    foreign.config.token = random_address();
    for channel in [&*one, two, three, four, contracts] {
        channel.deposit(chain, &chain.relayer().await, DEPOSIT).await;
    }
    let (one, empty, contracts, foreign) = (&*one, &*empty, &*contracts, &*foreign);
    let all = [one, two, three, four];
    let transfer = |channel: &Channel| {
        let ChannelConfig { receiver, token, .. } = channel.config;
        stage.request(&ChannelPayload::Settle { receiver, token })
    };
    let voucher = async |channel: &Channel| {
        let stage = stage.of(channel).await;
        let (channel_config, voucher) = (channel.config, stage.voucher(PRICE.into()).await);
        stage.request(&ChannelPayload::Voucher { channel_config, voucher })
    };
    // The price is what the deposit covers.
    let deposit = async |channel: &Channel, units: u128| {
        let (stage, price) = (stage.of(channel).await, units.min(PRICE.into()));
        priced(stage.request(&stage.deposit(units, price).await), price)
    };
    let unsigned = Channel { payer: PrivateKeySigner::random(), ..empty.clone() };
    let poor = Channel { config: ChannelConfig { payer: penniless.from, ..empty.config }, ..empty.clone() };
    let poor = Channel { payer: penniless.signer.clone(), ..poor };

    let (settled, deposited) = (exact(&payer), deposit(empty, DEPOSIT).await);
    // What a process asks once, it has asked.
    let warm = Channel::funded(chain, random_address(), &seller.1, 100_000).await;
    post(&stage.service, "/settle", &deposit(&warm, DEPOSIT).await, None).await;

    let rows: Vec<Row> = vec![
        ("exact, false signature", "/verify", exact(&forged().await), Some(1), NO_GAS),
        ("exact, false signature in the name of nobody", "/verify", exact(&nobody), Some(3), NO_GAS),
        ("exact", "/verify", exact(&payer), Some(1), NO_GAS),
        ("exact without money", "/verify", exact(&penniless), Some(3), NO_GAS),
        ("permit", "/verify", permit(&payer), Some(3), NO_GAS),
        ("permit, false signature", "/verify", permit(&forged().await), Some(3), NO_GAS),
        ("permit without approval", "/verify", permit(&unapproved), Some(3), NO_GAS),
        ("permit without money", "/verify", permit(&penniless), Some(5), NO_GAS),
        ("voucher", "/verify", voucher(one).await, Some(1), NO_GAS),
        ("voucher for no channel", "/verify", voucher(empty).await, Some(1), NO_GAS),
        ("refund", "/verify", stage.of(one).await.signed_refund(1).await, Some(1), NO_GAS),
        ("deposit", "/verify", deposit(empty, 5_000).await, Some(2), NO_GAS),
        ("unsigned deposit", "/verify", deposit(&unsigned, 5_000).await, Some(3), NO_GAS),
        ("empty deposit", "/verify", deposit(&poor, 5_000).await, Some(2), NO_GAS),
        ("exact, false signature", "/settle", exact(&forged().await), Some(1), NO_GAS),
        ("exact without money", "/settle", exact(&penniless), Some(3), NO_GAS),
        ("permit without money", "/settle", permit(&penniless), Some(5), NO_GAS),
        ("unsigned deposit", "/settle", deposit(&unsigned, 5_000).await, Some(5), NO_GAS),
        ("empty deposit", "/settle", deposit(&poor, 5_000).await, Some(4), NO_GAS),
        ("claim of a contract", "/settle", stage.of(contracts).await.claims(&[contracts], 1).await, Some(0), NO_GAS),
        ("refund of a contract", "/settle", stage.of(contracts).await.signed_refund(1).await, Some(0), NO_GAS),
        ("deposit of another token", "/settle", deposit(foreign, 5_000).await, Some(0), NO_GAS),
        ("claim of another token", "/settle", stage.of(foreign).await.claims(&[foreign], 1).await, Some(0), NO_GAS),
        ("refund of another token", "/settle", stage.of(foreign).await.signed_refund(1).await, Some(0), NO_GAS),
        ("transfer of another token", "/settle", transfer(foreign), Some(0), NO_GAS),
        ("claim of five rows", "/settle", stage.of(one).await.claims(&all, 5).await, Some(0), NO_GAS),
        // Of a payee that had nothing before.
        ("exact", "/settle", settled.clone(), None, 70_000..=103_000),
        ("exact, again", "/settle", settled, Some(0), NO_GAS),
        ("exact of a wallet", "/settle", exact(&wallet), None, 200_000..=400_000),
        ("permit", "/settle", permit(&payer), None, 80_000..=120_000),
        ("permit of a wallet", "/settle", permit(&wallet), None, 200_000..=400_000),
        ("deposit", "/settle", deposited.clone(), None, 120_000..=160_000),
        ("deposit, again", "/settle", deposited, Some(5), NO_GAS),
        ("deposit of one unit", "/settle", deposit(one, 1).await, None, 80_000..=160_000),
        ("deposit of a wallet", "/settle", deposit(&delegated, 1).await, None, 300_000..=400_000),
        ("claim of four rows", "/settle", stage.of(one).await.claims(&all, 4).await, None, 100_000..=390_000),
        ("transfer", "/settle", transfer(one), None, 40_000..=200_000),
        ("refund", "/settle", stage.of(one).await.signed_refund(1).await, None, 60_000..=300_000),
        ("kinds", "/supported", Value::Null, Some(0), NO_GAS),
        ("catalogue", "/discovery/resources", Value::Null, Some(0), NO_GAS),
        ("health", "/healthz", Value::Null, Some(0), NO_GAS),
    ];
    // Their code burns more in the transaction than in its simulation.
    let mut reverts = Vec::new();
    for (what, body, account) in [
        ("exact that reverts", exact(&wallet), wallet.from),
        ("permit that reverts", permit(&wallet), wallet.from),
        ("deposit that reverts", deposit(&delegated, 1_000).await, delegated.config.payer),
    ] {
        reverts.push((what, "/settle", body, None, 300_000..=400_000, Some(account)));
    }
    let rows = rows.into_iter().map(|(what, path, body, requests, gas)| (what, path, body, requests, gas, None));
    let mut wrong = Vec::new();
    for (what, path, body, requests, gas, reverting) in rows.chain(reverts) {
        let faults = chain.devnet.faults();
        faults.reset();
        if let Some(account) = reverting {
            let devnet = chain.devnet.clone();
            faults.set(move |call| {
                let burnt = match call.method {
                    method if method.starts_with("eth_sendRaw") => 10_000_000,
                    "eth_estimateGas" | "eth_call" => 150_000,
                    _ => return Fault::None,
                };
                devnet.execute(Address::repeat_byte(9), account, burn_call(burnt)).unwrap();
                Fault::None
            });
        }
        let before = bank.stats().gas_used;
        let (status, answer) = match &body {
            Value::Null => (get(&stage.service, path).await, Value::Null),
            body => post(&stage.service, path, body, None).await,
        };
        let calls = faults.calls();
        let (asked, used) = (calls.values().sum::<u64>(), bank.stats().gas_used - before);
        let is_made = answer["success"] == true;
        let is_expected = status == 200 && is_made == (reverting.is_none() && (used > 0 || what.ends_with("again")));
        let is_exact = requests.is_none_or(|requests| requests == asked);
        let row = format!("{path}, {what}: {asked} requests, {used} gas, {calls:?}");
        println!("{row}");
        if !(is_expected && is_exact && gas.contains(&used)) {
            wrong.push(format!("{row}, {status} {answer}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

async fn get(service: &FacilitatorService, path: &str) -> u16 {
    service.clone().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap().status().as_u16()
}
