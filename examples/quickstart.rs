//! A chain, an evaluator that charges and a student that pays, in one process.
#![allow(clippy::print_stdout)]

#[path = "evaluator/service.rs"]
mod service;

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use alloy_primitives::{U256, utils::format_ether};
use alloy_signer_local::PrivateKeySigner;
use anyhow::{Context as _, bail, ensure};
use reqwest::{StatusCode, header::CONTENT_TYPE};
use reqwest_middleware::ClientWithMiddleware;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_x402::{
    Usdc,
    channels::Channels,
    client::{Budget, ChannelPolicy, Payer, PaymentMiddleware, PaymentOutcome, ReceiptExt as _},
    facilitator::{Facilitator, OnchainFacilitator, channels::OnchainChannels},
    ledger::MemoryLedger,
    protocol::{MAX_REQUIRED_HEADER, PaymentRequired, decode_header, header_name},
    vouchers::AuthorizerKey,
};
use x402_devnet::{BlockTime, Devnet};
use x402_judges::ArithmeticJudge;
use x402_market::{AgentCard, Score};

use crate::service::Evaluator;

const HELP: &str = "\
Makes payments on a chain in this process. Takes no arguments and needs no network.

Starts a chain with its own USDC and a block every 200 ms, like Base; an evaluator that judges worked arithmetic for $0.001 an
answer; a student that buys four verdicts over HTTP, each with a transfer of its own; and one that deposits once, buys a hundred
verdicts with vouchers, and is charged for them with one claim. Prints what is requested, signed and settled, and compares
balances, budget and ledger. Exits with 0 if exactly the agreed amounts moved, and with 1 otherwise.

Usage: quickstart [--help | --version]";

const PRICE: &str = "$0.001";
const ALLOWANCE: &str = "$0.01";
/// How many verdicts are bought with vouchers.
const VERDICTS: u64 = 100;
const BLOCKS: Duration = Duration::from_millis(200);

/// What the student submits: a label, a prompt, and an answer to it.
const WORK: [(&str, &str, &str); 4] = [
    ("a right answer", "What is 17 * 23 + 4?", "17 * 23 = 391, and 4 more is 395. Answer: 395"),
    ("a slip on the way", "What is 17 * 23 + 4?", "17 * 23 = 381, and 4 more is 385. Answer: 385"),
    ("a unit forgotten", "What is 2 km + 300 m in m?", "2 km = 2000 m, so it is 2000 m + 300 m. Answer: 2300"),
    ("a unit mixed up", "How far is 90 km/h * 40 min in km?", "90 * 40 = 3600. Answer: 60 kg"),
];

#[tokio::main]
async fn main() -> ExitCode {
    // Without clap: a newcomer compiles this program first.
    match std::env::args().nth(1).as_deref() {
        None => {}
        Some("-h" | "--help") => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Some("-V" | "--version") => {
            println!("quickstart {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some(argument) => {
            eprintln!("quickstart: unexpected argument {argument}\n\n{HELP}");
            return ExitCode::from(2);
        }
    }
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("quickstart: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> anyhow::Result<()> {
    let price: Usdc = PRICE.parse()?;

    heading("1. A chain");
    let devnet = Devnet::builder().block_time(BlockTime::Every(BLOCKS)).start().await?;
    println!("   {}, a block every {BLOCKS:?}, USDC at {}", devnet.network(), devnet.asset().address);

    heading("2. An evaluator");
    let payee_key = PrivateKeySigner::random();
    let payee = payee_key.address();
    let settler = PrivateKeySigner::random();
    devnet.fund(settler.address(), U256::from(10).pow(U256::from(18)));
    let gas_before = devnet.eth_balance(settler.address());
    let facilitator = OnchainFacilitator::builder()
        .network(devnet.network())
        .client(devnet.rpc_client())
        .signer(settler.clone())
        .build()
        .await?;
    let contract = OnchainChannels::builder().facilitator(&facilitator).build().await?;
    let channels = Channels::builder(contract, AuthorizerKey::new(settler.clone()))
        .ledger(Arc::new(MemoryLedger::new()))
        .build()?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let origin = format!("http://{}", listener.local_addr()?);
    let card = AgentCard::builder("Arithmetic evaluator", &origin)
        .skill("arithmetic", "Exact arithmetic and unit checking of a worked answer", Score::new(0.99)?)
        .price(PRICE)
        .pay_to(devnet.network(), payee)
        .build()?
        .sign(&payee_key)
        .await?;
    let facilitators: (Arc<dyn Facilitator>, _) = (Arc::new(facilitator.clone()), Some(facilitator));
    let judge = Box::new(ArithmeticJudge);
    let evaluator = Evaluator::open(card, judge, Duration::ZERO, facilitators, false, |paywall| {
        paywall.vouchers(channels.clone())
    })?
    .channels(Some(channels.clone()));
    let url = format!("{origin}/evaluate");
    let router = evaluator.router();
    tokio::spawn(async { axum::serve(listener, router).await });
    println!("   POST {url} at {price}");
    println!("   pays to {payee}; the settlement key {} pays the gas", settler.address());

    heading("3. A student, with a budget and no ETH");
    let student = PrivateKeySigner::random();
    let payer = student.address();
    devnet.mint(payer, ALLOWANCE.parse()?)?;
    let budget = Budget::builder().per_payment(price).total(ALLOWANCE.parse()?).build();
    let paying = Payer::builder(student).budget(budget.clone()).asset(devnet.asset()).build();
    let client = PaymentMiddleware::new(paying).client(reqwest::Client::builder())?;
    println!("   {payer} holds {}", devnet.balance_of(payer)?);
    let (payer_before, payee_before) = (devnet.balance_of(payer)?, devnet.balance_of(payee)?);

    heading("4. A request without a payment");
    let demand = ask_unpaid(&url).await?;
    println!("   402 Payment Required: {demand}");

    heading("5. The same request by a client that pays");
    for (number, work) in WORK.iter().enumerate() {
        buy(&client, &url, number, work).await?;
    }

    heading("6. The books");
    let stats = evaluator.stats().await?;
    let (payer_after, payee_after) = (devnet.balance_of(payer)?, devnet.balance_of(payee)?);
    println!("   payer   {payer_before} -> {payer_after}");
    println!("   payee   {payee_before} -> {payee_after}");
    println!("   budget  {} spent, {} reserved, {} left", budget.spent(), budget.reserved(), budget.remaining());
    println!(
        "   ledger  {} settled, {} pending, {} unknown, {} failed; the judge ran {} times",
        stats.settled, stats.pending, stats.unknown, stats.failed, stats.handled
    );
    let gas_cost = gas_before.saturating_sub(devnet.eth_balance(settler.address()));
    println!("   gas     {} for {} transfers: {} ETH", stats.gas_used, stats.settled, format_ether(gas_cost));

    let count = u64::try_from(WORK.len())?;
    let due = price.checked_mul(count).context("the sum is too large")?;
    ensure!(payer_before.checked_sub(payer_after) == Some(due), "the payer did not pay exactly {due}");
    ensure!(payee_after.checked_sub(payee_before) == Some(due), "the payee did not receive exactly {due}");
    ensure!(budget.spent() == due, "the client's books say {}", budget.spent());
    ensure!((stats.settled, stats.handled) == (count, count), "the evaluator's books say {stats:?}");
    println!("\nThe books balance: {count} verdicts, {count} transfers, {due} from payer to payee.");

    heading("7. A hundred verdicts for one deposit");
    let due = price.checked_mul(VERDICTS).context("the sum is too large")?;
    let gas_for_one = gas_cost / U256::from(count);
    let gas_before = devnet.eth_balance(settler.address());
    let student = PrivateKeySigner::random();
    devnet.mint(student.address(), due)?;
    let budget = Budget::builder().per_payment(price).total(due).build();
    let paying = Payer::builder(student).budget(budget.clone()).asset(devnet.asset());
    let client = PaymentMiddleware::new(paying.vouchers(ChannelPolicy::new().deposit(due)).build())
        .client(reqwest::Client::builder())?;
    let started = Instant::now();
    for number in 0..VERDICTS {
        buy_with_a_voucher(&client, &url, number).await?;
        if number == 0 {
            println!(
                "   the first was answered after {} ms: its deposit of {due} waited for a block",
                started.elapsed().as_millis()
            );
        }
    }
    println!("   {VERDICTS} were answered after {} ms, each paid for with a signature", started.elapsed().as_millis());
    println!("   budget  {} spent, {} reserved, {} left", budget.spent(), budget.reserved(), budget.remaining());
    let report = channels.claim_all().await?;
    let received = devnet.balance_of(payee)?.checked_sub(payee_after);
    let gas_cost = gas_before.saturating_sub(devnet.eth_balance(settler.address()));
    println!("   one claim and one transfer moved {} units to the payee", report.settled);
    println!(
        "   gas     {} ETH for {VERDICTS} verdicts, where {VERDICTS} transfers would cost {} ETH",
        format_ether(gas_cost),
        format_ether(gas_for_one * U256::from(VERDICTS))
    );
    ensure!(received == Some(due), "the payee did not receive exactly {due}");
    ensure!(budget.spent() == due, "the client's books say {}", budget.spent());
    println!("\nThe books balance: {VERDICTS} verdicts, one deposit, one claim, {due} from payer to payee.");
    Ok(())
}

async fn buy_with_a_voucher(client: &ClientWithMiddleware, url: &str, number: u64) -> anyhow::Result<()> {
    let task = json!({ "id": format!("v{number}"), "skill": "arithmetic", "prompt": format!("What is {number} + 1?") });
    let submission = json!({ "task": task, "output": format!("Answer: {}", number + 1) }).to_string();
    let response = client.post(url).header(CONTENT_TYPE, "application/json").body(submission).send().await?;
    let (status, receipt) = (response.status(), response.receipt().cloned());
    let verdict: Value = serde_json::from_slice(&response.bytes().await?)?;
    ensure!(status == StatusCode::OK && verdict["score"] == 1.0, "verdict {number}: {status}, {receipt:?}, {verdict}");
    Ok(())
}

/// Requests without a payment and returns the offer in the 402.
async fn ask_unpaid(url: &str) -> anyhow::Result<String> {
    let response = reqwest::Client::new().post(url).send().await?;
    ensure!(response.status() == StatusCode::PAYMENT_REQUIRED, "expected 402, not {}", response.status());
    let header = response.headers().get(header_name::PAYMENT_REQUIRED).context("a 402 without PAYMENT-REQUIRED")?;
    let required: PaymentRequired = decode_header(header.as_bytes(), MAX_REQUIRED_HEADER)?;
    let offer = required.accepts.first().context("a 402 without an offer")?.read()?;
    Ok(format!("{} units of {} to {} on {}", offer.amount, offer.asset, offer.pay_to, offer.network))
}

async fn buy(client: &ClientWithMiddleware, url: &str, number: usize, work: &(&str, &str, &str)) -> anyhow::Result<()> {
    let (what, prompt, output) = *work;
    println!("\n   {what}: \"{prompt}\" - \"{output}\"");
    let task = json!({ "id": format!("t{}", number + 1), "skill": "arithmetic", "prompt": prompt });
    let submission = json!({ "task": task, "output": output }).to_string();

    let started = Instant::now();
    let response = client.post(url).header(CONTENT_TYPE, "application/json").body(submission).send().await?;
    let latency = started.elapsed();
    let status = response.status();
    let receipt = response.receipt().cloned().context("an answer without a receipt")?;
    let verdict: Value = serde_json::from_slice(&response.bytes().await?)?;
    let (PaymentOutcome::Settled, Some(transaction)) = (receipt.outcome, receipt.transaction) else {
        bail!("{status}, {}: {}", receipt.outcome, receipt.reason.unwrap_or_default());
    };
    println!("     signed   {} to {}", receipt.amount, receipt.pay_to);
    println!("     nonce    {}", receipt.nonce);
    println!("     settled  {transaction}");
    println!("     answer   {status} after {} ms, most of it the wait for the next block", latency.as_millis());
    println!(
        "     verdict  score {}, reward {}, confidence {}",
        verdict["score"], verdict["reward"], verdict["confidence"]
    );
    let remarks = verdict["critique"]["issues"].as_array().into_iter().flatten();
    let remarks = remarks.map(|issue| &issue["description"]);
    for remark in std::iter::once(&verdict["critique"]["summary"]).chain(remarks).filter_map(Value::as_str) {
        println!("              {remark}");
    }
    Ok(())
}

fn heading(text: &str) {
    println!("\n{text}");
}
