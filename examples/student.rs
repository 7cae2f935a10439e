//! Buys evaluations of worked arithmetic answers and prints how each payment ended.
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeMap,
    error::Error,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use alloy_primitives::{Address, B256, U256, keccak256};
use alloy_provider::ProviderBuilder;
use alloy_signer_local::PrivateKeySigner;
use clap::Parser;
use futures_util::{StreamExt, stream};
use reqwest::{Url, header::CONTENT_TYPE};
use reqwest_middleware::ClientWithMiddleware;
use serde::Serialize;
use serde_json::{Value, json};
use tower_x402::{
    Asset, Network, Usdc,
    client::{
        Budget, ChannelPolicy, Journal, JournalError, Payer, PaymentError, PaymentMiddleware, PaymentOutcome, Purchase,
        Receipt, ReceiptExt, Reconciliation, RetryPolicy, key, reconcile, reconcile_channels, reconcile_with_servers,
        refund_channels,
    },
    vouchers::ChannelId,
};

/// Buys evaluations from an x402 evaluator, within a budget.
///
/// Sends worked arithmetic answers (some of them wrong) to the evaluator and pays for each, within the limits. Reads the
/// private key from the environment variable STUDENT_PRIVATE_KEY; its account needs USDC and no ETH.
#[derive(Parser)]
#[command(
    version,
    after_help = "\
OUTPUT
  One JSON line per purchase, when it ends:
    {\"status\", \"outcome\", \"transaction\", \"amount\", \"payer\", \"latency_ms\", \"body\"}
  status is the HTTP status, or null. amount is in atomic units (millionths of a USDC), or null if nothing was signed.
  A purchase that did not succeed also has \"error\". With --close, one line per payment channel:
    {\"channel\", \"refunded\", \"transaction\"}, and \"error\" if nothing came back
  At the end, one line {\"summary\": {...}}; its \"escrow\" is what is left in payment channels.

  outcome is one of
    settled   paid; the transaction is named
    accepted  paid; the server settles later, or claims the voucher
    failed    the server says that it was not paid, or did not ask for a payment
    unknown   the payment may have been made or may still be made; its amount stays reserved
    refused   the student did not pay; nothing was signed

EXIT STATUS
  0  every purchase ended settled or accepted (and, with --rpc-url, every transfer was found on the chain; with --close, every
     channel was refunded)
  1  at least one purchase did not, or one channel was not
  2  the student could not start

EXAMPLES
  student --url http://127.0.0.1:4021
  student --url http://127.0.0.1:4021 --count 100 --concurrency 10 --budget '$0.50' --max-payment '$0.002'
  student --url https://judge.example/evaluate --network base --journal ~/.student.jsonl
  student --url https://judge.example/evaluate --network base --journal ~/.student.jsonl --purchase monday --count 20
  student --url https://judge.example/evaluate --network base --journal ~/.student.jsonl --count 0 --close
  student --url http://127.0.0.1:4021 --network eip155:31337 --asset 0x5FbDB2315678afecb367f032d93F642f64180aa3 \\
      --asset-name 'USD Coin' --asset-version 2"
)]
struct Arguments {
    /// The evaluator; without a path, /evaluate is used
    #[arg(long)]
    url: Url,
    /// How many evaluations to buy
    #[arg(long, default_value_t = 1)]
    count: usize,
    /// How many purchases run at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: u16,
    /// The most to spend in total; with --journal, over all runs
    #[arg(long, default_value = "$1.00")]
    budget: Usdc,
    /// The most to spend on one evaluation
    #[arg(long, default_value = "$0.01")]
    max_payment: Usdc,
    /// A node to check transfers and balance with, after the run
    #[arg(long)]
    rpc_url: Option<Url>,
    /// Record what is signed in this file, and count what it already holds against the limits. At the start, ask what
    /// became of payments that are still open: the chain with --rpc-url, otherwise the evaluators. With --rpc-url, compare the
    /// payment channels with the chain, too
    #[arg(long)]
    journal: Option<PathBuf>,
    /// A name for these purchases, unique in the journal. A run with the same name is the same purchases: what was paid for is asked for
    /// again and not paid again, whatever became of the earlier run
    #[arg(long, requires = "journal")]
    purchase: Option<String>,
    /// Read the key from this encrypted keystore file (version 3), with the password in STUDENT_KEYSTORE_PASSWORD
    #[arg(long)]
    keystore: Option<PathBuf>,
    /// The most to spend in any hour
    #[arg(long)]
    max_per_hour: Option<Usdc>,
    /// The most that one payee can get; with --journal, over all runs
    #[arg(long)]
    max_per_payee: Option<Usdc>,
    /// The most to spend at one host; with --journal, over all runs
    #[arg(long)]
    max_per_host: Option<Usdc>,
    /// How many seconds to wait for each answer
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Pay on this network only: base, base-sepolia or eip155:N [default: base and base-sepolia]
    #[arg(long)]
    network: Option<Network>,
    /// Pay in this token, which must be worth a dollar and have six decimal places
    #[arg(long, requires_all = ["network", "asset_name", "asset_version"])]
    asset: Option<Address>,
    /// How to pay: by a transfer for each evaluation (exact), by vouchers of payment channels only, or both: three transfers to an
    /// evaluator, then vouchers if it offers them
    #[arg(long, value_enum, default_value = "both")]
    scheme: Scheme,
    /// How many payment channels may be open to one evaluator; each carries one request at a time
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    channels: u32,
    /// At the end, ask for refunds of what is left in the payment channels, those of earlier runs in --journal included. A later run
    /// fills them again
    #[arg(long)]
    close: bool,
    /// The EIP-712 name of --asset
    #[arg(long, requires = "asset")]
    asset_name: Option<String>,
    /// The EIP-712 version of --asset
    #[arg(long, requires = "asset")]
    asset_version: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Scheme {
    Exact,
    Vouchers,
    Both,
}

impl Arguments {
    /// Returns the payer.
    fn payer(&self, key: PrivateKeySigner, budget: Budget, assets: &[Asset]) -> Payer {
        let payer = assets.iter().cloned().fold(Payer::builder(key).budget(budget), |payer, asset| payer.asset(asset));
        // Escrow is a part of the budget, and may be all of it.
        let channels =
            ChannelPolicy::new().lanes(self.channels).escrow_per_payee(self.budget).escrow_total(self.budget);
        match self.scheme {
            Scheme::Exact => payer.build(),
            // The deposit costs the evaluator about as much gas.
            Scheme::Both => payer.vouchers(channels.exact_first(3)).build(),
            // Neither of the flows of `exact`.
            Scheme::Vouchers => payer.vouchers(channels).flows([]).build(),
        }
    }

    /// Returns the tokens to pay with.
    fn assets(&self) -> Result<Vec<Asset>, String> {
        match (self.network, self.asset, &self.asset_name, &self.asset_version) {
            (Some(network), Some(address), Some(name), Some(version)) => {
                Ok(vec![Asset::new(network, address, name.clone(), version.clone())])
            }
            (Some(network), ..) => {
                let asset = network.usdc().ok_or_else(|| {
                    format!("no USDC is known on {network}; give --asset, --asset-name and --asset-version")
                })?;
                Ok(vec![asset])
            }
            (None, ..) => Ok([Network::BASE, Network::BASE_SEPOLIA].into_iter().filter_map(Network::usdc).collect()),
        }
    }

    /// Returns the limits, with what the journal already holds.
    fn limits(&self) -> Result<Budget, JournalError> {
        const HOUR: Duration = Duration::from_secs(3_600);
        let mut budget = Budget::builder().per_payment(self.max_payment).total(self.budget);
        if let Some(limit) = self.max_per_hour {
            budget = budget.per_window(HOUR, limit);
        }
        if let Some(limit) = self.max_per_payee {
            budget = budget.per_payee(limit);
        }
        if let Some(limit) = self.max_per_host {
            budget = budget.per_host(limit);
        }
        if let Some(path) = &self.journal {
            budget = budget.journal(Journal::open(path)?);
        }
        Ok(budget.build())
    }

    /// Reads the key. Errors do not contain it.
    async fn key(&self) -> Result<PrivateKeySigner, Box<dyn Error>> {
        let Some(path) = self.keystore.clone() else { return Ok(key::from_env("STUDENT_PRIVATE_KEY")?) };
        let password = std::env::var("STUDENT_KEYSTORE_PASSWORD")
            .map_err(|_| "set STUDENT_KEYSTORE_PASSWORD to the password of the keystore")?;
        Ok(tokio::task::spawn_blocking(move || key::from_keystore(path, password)).await??)
    }

    fn endpoint(&self) -> Url {
        let mut url = self.url.clone();
        if url.path() == "/" {
            url.set_path("/evaluate");
        }
        url
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("student: {}", sentence(error.as_ref()));
            ExitCode::from(2)
        }
    }
}

/// Returns `true` if every purchase was paid.
async fn run(arguments: Arguments) -> Result<bool, Box<dyn Error>> {
    let key = arguments.key().await?;
    let payer = key.address();
    let assets = arguments.assets()?;
    let budget = arguments.limits()?;
    let timeout = Duration::from_secs(arguments.timeout);
    let paying = arguments.payer(key, budget.clone(), &assets);
    let client = PaymentMiddleware::new(paying.clone())
        .retry(RetryPolicy::default().attempt_timeout(timeout))
        .client(reqwest::Client::builder().timeout(timeout))?;
    let chain = match arguments.rpc_url {
        Some(ref url) => Some(Chain::connect(url.clone(), &assets, payer).await?),
        None => None,
    };

    let reconciled = look_back(&budget, arguments.rpc_url.as_ref()).await;

    let endpoint = arguments.endpoint();
    let started = Instant::now();
    let mut purchases = stream::iter(0..arguments.count)
        .map(|number| {
            let name = arguments.purchase.as_ref();
            let purchase = name.map_or_else(Purchase::new, |name| Purchase::named(format!("{name}/{number}")));
            buy(&client, &endpoint, number, payer, purchase)
        })
        .buffer_unordered(arguments.concurrency.into());
    let mut counts = BTreeMap::from(
        [
            PaymentOutcome::Settled,
            PaymentOutcome::Accepted,
            PaymentOutcome::Failed,
            PaymentOutcome::Unknown,
            PaymentOutcome::Refused,
        ]
        .map(|outcome| (outcome.as_str(), 0_usize)),
    );
    let mut receipts = Vec::new();
    while let Some((line, receipt)) = purchases.next().await {
        println!("{}", serde_json::to_string(&line)?);
        *counts.entry(line.outcome.as_str()).or_default() += 1;
        receipts.extend(receipt.filter(|receipt| receipt.outcome == PaymentOutcome::Settled));
    }

    let mut all_paid = counts["settled"] + counts["accepted"] == arguments.count;
    if arguments.close {
        for refund in refund_channels(&paying, Duration::ZERO, reqwest::Client::builder()).await? {
            all_paid &= refund.reason.is_none();
            let (channel, refunded, transaction) = (refund.channel, refund.amount, refund.transaction);
            println!("{}", serde_json::to_string(&Closed { channel, refunded, transaction, error: refund.reason })?);
        }
    }
    let channels = budget.journal().channels();
    let escrow: u128 = channels.iter().map(|channel| u128::from(channel.available().atomic())).sum();
    let mut summary = json!({
        "purchases": arguments.count,
        "spent": budget.spent(),
        "reserved": budget.reserved(),
        "budget": budget.total(),
        "escrow": escrow.to_string(),
        "elapsed_ms": milliseconds(started),
    });
    for (outcome, count) in counts {
        summary[outcome] = count.into();
    }
    if let Some(Reconciliation { paid, void, open, .. }) = reconciled {
        summary["reconciled"] = json!({ "paid": paid, "void": void, "open": open });
    }
    if let Some(chain) = chain {
        match chain.check(&receipts).await {
            Ok((found, balance)) => {
                all_paid &= found == receipts.len();
                summary["transfers_found"] = found.into();
                summary["balance_before"] = chain.balance_before.to_string().into();
                summary["balance_after"] = balance.to_string().into();
            }
            Err(error) => {
                all_paid = false;
                summary["error"] = sentence(error.as_ref()).into();
            }
        }
    }
    println!("{}", json!({ "summary": summary }));
    Ok(all_paid)
}

/// Asks the chain, or the evaluators if there is no node, what became of payments that earlier runs left open.
/// Payments without an answer stay reserved. Only the chain is asked about payment channels.
async fn look_back(budget: &Budget, node: Option<&Url>) -> Option<Reconciliation> {
    if let Some(url) = node
        && !budget.journal().channels().is_empty()
    {
        match reconcile_channels(budget, &ProviderBuilder::new().connect_http(url.clone())).await {
            Ok(found) => {
                for (channel, finding) in found.findings {
                    eprintln!("student: payment channel {channel}: {finding}");
                }
            }
            Err(error) => eprintln!("student: payment channels stay as the journal has them: {}", sentence(&error)),
        }
    }
    if budget.journal().unresolved().is_empty() {
        return None;
    }
    let found = match node {
        Some(url) => reconcile(budget, &ProviderBuilder::new().connect_http(url.clone())).await.map_err(Into::into),
        None => reconcile_with_servers(budget, reqwest::Client::builder()).await.map_err(Box::<dyn Error>::from),
    };
    match found {
        Ok(found) => {
            let Reconciliation { paid, void, open, .. } = found;
            eprintln!(
                "student: of the payments that were open, {paid} were made, {void} are void and {open} are still open"
            );
            Some(found)
        }
        Err(error) => {
            eprintln!("student: open payments stay reserved: {}", sentence(error.as_ref()));
            None
        }
    }
}

/// A payment channel that a refund was asked for, as it is printed.
#[derive(Serialize)]
struct Closed {
    channel: ChannelId,
    refunded: Usdc,
    transaction: Option<B256>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// One purchase, as it is printed.
#[derive(Serialize)]
struct Line {
    status: Option<u16>,
    outcome: PaymentOutcome,
    transaction: Option<B256>,
    amount: Option<Usdc>,
    payer: Address,
    latency_ms: u64,
    body: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

async fn buy(
    client: &ClientWithMiddleware,
    endpoint: &Url,
    number: usize,
    payer: Address,
    purchase: Purchase,
) -> (Line, Option<Receipt>) {
    let started = Instant::now();
    let ask = || {
        let request = client.post(endpoint.clone()).header(CONTENT_TYPE, "application/json");
        request.body(submission(number)).with_extension(purchase.clone()).send()
    };
    let mut line = Line {
        status: None,
        outcome: PaymentOutcome::Failed,
        transaction: None,
        amount: None,
        payer,
        latency_ms: 0,
        body: Value::Null,
        error: None,
    };
    let receipt = match ask().await {
        Ok(response) => {
            let status = response.status();
            line.status = Some(status.as_u16());
            let receipt = response.receipt().cloned();
            if receipt.is_none() {
                line.error = Some(format!("the server answered {status} without an offer that this client can pay"));
            }
            let body = match response.bytes().await {
                // The answer is paid for, and is given again.
                Err(_) if receipt.is_some() => match ask().await {
                    Ok(again) => again.bytes().await.map_err(|error| sentence(&error)),
                    Err(error) => Err(sentence(&error)),
                },
                first => first.map_err(|error| sentence(&error)),
            };
            match body {
                Ok(body) => {
                    line.body = serde_json::from_slice(&body)
                        .unwrap_or_else(|_| Value::from(String::from_utf8_lossy(&body).into_owned()));
                }
                Err(error) => line.error = Some(error),
            }
            receipt
        }
        Err(error) => {
            line.error = Some(sentence(&error));
            let payment = PaymentError::of(&error);
            line.outcome = payment.map_or(PaymentOutcome::Failed, PaymentError::outcome);
            payment.and_then(PaymentError::receipt).cloned()
        }
    };
    if let Some(receipt) = &receipt {
        line.outcome = receipt.outcome;
        line.transaction = receipt.transaction;
        line.amount = Some(receipt.amount);
        line.error = line.error.or_else(|| receipt.reason.clone());
    }
    line.latency_ms = milliseconds(started);
    (line, receipt)
}

/// Returns a worked answer to a new task; every third is wrong.
fn submission(number: usize) -> String {
    let (a, b, c) = (number + 17, number % 13 + 23, number % 7 + 4);
    let product = a * b;
    let sum = product + c + usize::from(number % 3 == 2);
    json!({
        "task": { "id": format!("t{}", number + 1), "skill": "arithmetic", "prompt": format!("What is {a} * {b} + {c}?") },
        "output": format!("{a} * {b} = {product}, and {c} more is {sum}. Answer: {sum}"),
    })
    .to_string()
}

fn milliseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Returns an error and its sources as one sentence.
fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

/// A node, to check what the evaluator reports.
struct Chain {
    client: reqwest::Client,
    url: Url,
    asset: Address,
    payer: Address,
    balance_before: U256,
}

impl Chain {
    async fn connect(url: Url, assets: &[Asset], payer: Address) -> Result<Self, Box<dyn Error>> {
        let client = reqwest::Client::new();
        let mut chain = Self { client, url, asset: Address::ZERO, payer, balance_before: U256::ZERO };
        let id: U256 = serde_json::from_value(chain.call("eth_chainId", json!([])).await?)?;
        chain.asset = assets
            .iter()
            .find(|asset| U256::from(asset.network.chain_id()) == id)
            .ok_or_else(|| {
                format!("--rpc-url is a node of eip155:{id}, on which the student has no token to pay with")
            })?
            .address;
        chain.balance_before = chain.balance().await?;
        Ok(chain)
    }

    /// Returns how many of the settled purchases the chain confirms, and the present balance.
    async fn check(&self, settled: &[Receipt]) -> Result<(usize, U256), Box<dyn Error>> {
        Ok((self.transfers(settled).await?, self.balance().await?))
    }

    /// Returns the payer's balance, in atomic units.
    async fn balance(&self) -> Result<U256, Box<dyn Error>> {
        let selector = &keccak256("balanceOf(address)")[..4];
        let data = alloy_primitives::hex::encode_prefixed([selector, self.payer.into_word().as_slice()].concat());
        let balance = self.call("eth_call", json!([{ "to": self.asset, "data": data }, "latest"])).await?;
        Ok(serde_json::from_value(balance)?)
    }

    /// Returns how many of the settled purchases have the logs that show their authorization used and their amount paid.
    async fn transfers(&self, settled: &[Receipt]) -> Result<usize, Box<dyn Error>> {
        let mut found = 0;
        for receipt in settled {
            let (payer, payee) = (receipt.payer.into_word(), receipt.pay_to.into_word());
            let used = json!([keccak256("AuthorizationUsed(address,bytes32)"), payer, receipt.nonce]);
            let moved = json!([keccak256("Transfer(address,address,uint256)"), payer, payee]);
            let amount = json!(B256::from(Into::<U256>::into(receipt.amount)));

            let transaction = self.call("eth_getTransactionReceipt", json!([receipt.transaction])).await?;
            let logs = transaction["logs"].as_array().into_iter().flatten();
            let logs: Vec<_> = logs.filter(|log| is_address(&log["address"], receipt.asset)).collect();
            let confirmed = transaction["status"] == "0x1"
                && logs.iter().any(|log| log["topics"] == used)
                && logs.iter().any(|log| log["topics"] == moved && log["data"] == amount);
            found += usize::from(confirmed);
        }
        Ok(found)
    }

    async fn call(&self, method: &str, params: Value) -> Result<Value, Box<dyn Error>> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string();
        let request = self.client.post(self.url.clone()).header(CONTENT_TYPE, "application/json").body(request);
        // The URL of a node often contains an API key.
        let response = request.send().await.map_err(reqwest::Error::without_url)?;
        let mut answer: Value = serde_json::from_slice(&response.bytes().await.map_err(reqwest::Error::without_url)?)?;
        match answer.get("error") {
            Some(error) => Err(format!("{method}: {error}").into()),
            None => Ok(answer["result"].take()),
        }
    }
}

/// Compares bytes, since nodes differ in the case of the digits.
fn is_address(text: &Value, address: Address) -> bool {
    text.as_str().and_then(|text| text.parse().ok()) == Some(address)
}
