//! `x402 doctor`: checks everything that a seller needs, and says what to do.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use alloy_primitives::{Address, B256, U64, U256, keccak256, utils::format_ether};
use http::{StatusCode, header::HeaderName};
use http_body_util::{BodyExt as _, Limited};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time::timeout};
use tower_x402::{
    Asset, Network,
    facilitator::BatchSettler,
    permit2,
    protocol::{MAX_REQUIRED_HEADER, PaymentRequired, decode_header, header_name},
    signers::PrivateKeySigner,
    upto,
    vouchers::Escrow,
};

use crate::{
    chain::{ChainFlags, facilitator_token},
    charge::File,
    devnet,
    error::{Error, Sentence},
    keys::{self, KeyFlags, Role},
    node::{LOW_TANK, Node, NodeError},
    output,
    values::{HttpUrl, LedgerAt, account},
};

/// Beyond this, authorizations are misjudged, in seconds.
const SKEW: u64 = 30;
/// A payment header of a channel with its deposit, and some room.
const LONG_HEADER: usize = 6 * 1024;

/// Looks at everything that a seller needs, and says what is wrong and what to do: clock, node, token, keys, contracts, payee, facilitator,
/// service, ledger, and the public address through the proxy before it.
///
/// Takes the same flags, variables and file as `x402 charge`. It moves nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXIT STATUS
  0  nothing is wrong; there may be warnings
  1  something is wrong

EXAMPLES
  x402 doctor --config x402.toml
  x402 doctor --network base --rpc-url https://… --ledger sqlite:payments.sqlite --public-url https://api.example/evaluate")]
pub(crate) struct Command {
    /// The configuration file of x402 charge
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    chain: ChainFlags,
    /// The ledger: sqlite:PATH or postgres://USER@HOST/DATABASE. One in SQLite is looked at while no x402 charge runs
    #[arg(long, env = "X402_LEDGER", hide_env_values = true)]
    ledger: Option<LedgerAt>,
    /// The address that is paid
    #[arg(long, value_name = "ADDR", value_parser = account)]
    pay_to: Option<Address>,
    /// The facilitator that settles
    #[arg(long, value_name = "URL")]
    facilitator_url: Option<HttpUrl>,
    /// Permits (scheme upto) are to be taken: what they need must be there
    #[arg(long)]
    upto: bool,
    /// The service that is charged for
    #[arg(long, value_name = "URL")]
    upstream: Option<HttpUrl>,
    /// The address of a route that costs something, as clients ask for it
    #[arg(long, value_name = "URL")]
    public_url: Option<HttpUrl>,
    /// Print a JSON line for each check
    #[arg(long)]
    json: bool,
}

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Ok,
    Warning,
    Wrong,
}

/// Prints each check as it is made.
struct Report {
    json: bool,
    wrong: usize,
}

impl Report {
    fn add(&mut self, level: Level, check: &str, found: impl std::fmt::Display, to_do: &str) {
        self.wrong += usize::from(level == Level::Wrong);
        let word = match level {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Wrong => "wrong",
        };
        if self.json {
            let to_do = if to_do.is_empty() { Value::Null } else { to_do.into() };
            output::line(json!({ "check": check, "level": word, "found": found.to_string(), "to_do": to_do }));
            return;
        }
        output::line(format_args!("{word:<8} {check:<14} {found}"));
        if !to_do.is_empty() {
            output::line(format_args!("{:<23} {to_do}", ""));
        }
    }

    fn ok(&mut self, check: &str, found: impl std::fmt::Display) {
        self.add(Level::Ok, check, found, "");
    }

    fn silent(&mut self, check: &str, error: &NodeError, to_do: &str) {
        self.add(Level::Wrong, check, Sentence(error), to_do);
    }
}

impl Command {
    pub(crate) async fn run(self) -> Result<(), Error> {
        let file = self.config.as_deref().map(File::read).transpose()?.unwrap_or_default();
        let mut report = Report { json: self.json, wrong: 0 };
        if self.config.is_some() {
            match file.routes() {
                Ok(routes) => report.ok("file", format_args!("{} routes", routes.len())),
                Err(error) => report.add(Level::Wrong, "file", Sentence(&error), "Correct the file."),
            }
        }
        let chain = ChainFlags {
            network: self.chain.network.or(file.network),
            rpc_url: self.chain.rpc_url.clone().or(file.rpc_url),
            asset: self.chain.asset.or(file.asset),
            asset_name: self.chain.asset_name.clone().or(file.asset_name),
            asset_version: self.chain.asset_version.clone().or(file.asset_version),
        };
        let facilitator = self.facilitator_url.or(file.facilitator_url);
        let takes_permits = self.upto || file.upto;
        let node = chain.rpc_url.as_ref().map(Node::new).transpose()?;
        match &node {
            Some(node) => check_chain(&mut report, node, &chain, facilitator.is_some(), takes_permits).await?,
            None if facilitator.is_some() => report.add(
                Level::Warning,
                "node",
                "none is given, so that the facilitator's answers are not checked on the chain",
                "Give --rpc-url, or set X402_RPC_URL, unless you trust it.",
            ),
            None => report.add(
                Level::Warning,
                "node",
                "none is given, so that nothing can be asked of the chain",
                "Give --rpc-url, or set X402_RPC_URL; without it x402 charge needs --facilitator-url for real money.",
            ),
        }
        if let Some(url) = &facilitator {
            check_facilitator(&mut report, url, chain.network(), takes_permits).await?;
        }
        match self.pay_to.or(file.pay_to) {
            Some(pay_to) => check_payee(&mut report, node.as_ref(), pay_to).await,
            None if chain.rpc_url.is_none() && facilitator.is_none() => {}
            None => report.add(Level::Warning, "payee", "is not given", "Give --pay-to, which x402 charge needs."),
        }
        if let Some(upstream) = self.upstream.or(file.upstream) {
            check_upstream(&mut report, &upstream).await;
        }
        match self.ledger.or(file.ledger).unwrap_or(LedgerAt::Memory) {
            LedgerAt::Memory => report.add(
                Level::Warning,
                "ledger",
                "is in memory: what is known of payments ends with the process",
                "Give --ledger sqlite:payments.sqlite, or postgres://… for several processes.",
            ),
            ledger => match ledger.open().await {
                Ok(books) => match books.payments.counts().await {
                    Ok(counts) => report.ok(
                        "ledger",
                        format_args!(
                            "{} settled, {} pending, {} unknown",
                            counts.settled, counts.pending, counts.unknown
                        ),
                    ),
                    Err(error) => {
                        report.add(Level::Wrong, "ledger", Sentence(&error), "Check the disk or the database.")
                    }
                },
                Err(error) => report.add(Level::Wrong, "ledger", Sentence(&error), error.advice().unwrap_or_default()),
            },
        }
        match self.public_url.or(file.public_url) {
            Some(url) => check_public(&mut report, &url).await?,
            None => report.add(
                Level::Warning,
                "public address",
                "is not known",
                "Give --public-url with the address of a route that costs something, to check it through the proxy before it.",
            ),
        }
        match report.wrong {
            0 => Ok(()),
            wrong => Err(Error::Failed {
                what: format!("{wrong} of the checks found something wrong"),
                advice: "See above what to do.",
            }),
        }
    }
}

async fn check_chain(
    report: &mut Report,
    node: &Node,
    chain: &ChainFlags,
    has_facilitator: bool,
    takes_permits: bool,
) -> Result<(), Error> {
    let network = chain.network();
    match node.chain_id().await {
        Ok(id) if id == network.chain_id() => report.ok("node", format_args!("answers, on {network}")),
        Ok(id) => {
            report.add(
                Level::Wrong,
                "node",
                format_args!("is on eip155:{id}, not on {network}"),
                "Change --rpc-url or --network.",
            );
            return Ok(());
        }
        Err(error) => {
            report.silent("node", &error, "Check --rpc-url, its key and the network.");
            return Ok(());
        }
    }
    check_clock(report, node).await;
    check_history(report, node).await;
    match chain.asset() {
        Ok(asset) => check_token(report, node, &asset).await,
        Err(error) => report.add(Level::Wrong, "token", Sentence(&error), ""),
    }
    for (name, address, to_do) in [
        (
            "batch settler",
            BatchSettler::ADDRESS,
            "Payments are settled one by one without it. Anybody may deploy it once: see the guide on production.",
        ),
        ("channel escrow", Escrow::ADDRESS, "Payment channels cannot be used on this chain; transfers can."),
    ] {
        match node.code(address).await {
            Ok(code) if code.is_empty() => {
                report.add(Level::Warning, name, format_args!("there is none at {address}"), to_do)
            }
            Ok(_) => report.ok(name, address),
            Err(error) => report.silent(name, &error, "Try again, or use another node."),
        }
    }
    check_permits(report, node, takes_permits).await;
    for (name, role) in [("settlement key", Role::SETTLEMENT), ("channels key", Role::CHANNELS)] {
        match keys::find(role, &KeyFlags::default()).await {
            Ok(Some(key)) => {
                check_key(report, node, name, &key, network.chain_id()).await;
            }
            Ok(None) if role.is_settlement() && has_facilitator => report.ok(name, "is the facilitator's"),
            Ok(None) => {
                let to_do = match name {
                    "settlement key" => "x402 charge needs SETTLEMENT_PRIVATE_KEY, or --facilitator-url.",
                    _ => "Without CHANNELS_PRIVATE_KEY no vouchers are taken.",
                };
                report.add(Level::Warning, name, "is not set", to_do);
            }
            Err(error) => report.add(Level::Wrong, name, Sentence(&error), error.advice().unwrap_or_default()),
        }
    }
    Ok(())
}

/// Looks whether the chain has the contract that settles permits, with the Permit2 that it uses.
async fn check_permits(report: &mut Report, node: &Node, is_needed: bool) {
    const NAME: &str = "permits";
    let looked = async {
        Ok::<_, NodeError>((node.read(upto::PROXY, "PERMIT2()").await.ok(), node.code(permit2::PERMIT2).await?))
    };
    match looked.await {
        Ok((Some(uses), code)) if uses.as_ref() == permit2::PERMIT2.into_word().as_slice() && !code.is_empty() => {
            report.ok(NAME, format_args!("can be settled (upto), by {}", upto::PROXY))
        }
        Ok(_) => report.add(
            if is_needed { Level::Wrong } else { Level::Warning },
            NAME,
            format_args!("there is no Permit2 here, or no contract of the scheme upto at {}", upto::PROXY),
            "Leave --upto out: permits cannot be used on this chain; transfers can.",
        ),
        Err(error) => report.silent(NAME, &error, "Try again, or use another node."),
    }
}

async fn check_clock(report: &mut Report, node: &Node) {
    let block: Value = match node.call("eth_getBlockByNumber", json!(["latest", false])).await {
        Ok(block) => block,
        Err(error) => return report.silent("clock", &error, "Try again, or use another node."),
    };
    let Some(time) = number(&block["timestamp"]) else {
        return report.add(Level::Wrong, "clock", "the node gives no newest block", "Use a node that is in sync.");
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    match now.abs_diff(time) {
        apart @ ..=SKEW => report.ok("clock", format_args!("{apart} s from the newest block")),
        apart => report.add(
            Level::Wrong,
            "clock",
            format_args!("this clock and the newest block are {apart} s apart"),
            "Set the clock (timedatectl set-ntp true), or use a node that is in sync.",
        ),
    }
}

/// Looks for the receipt of a recent transaction, and for the logs and the state of earlier blocks.
async fn check_history(report: &mut Report, node: &Node) {
    const TO_DO: &str =
        "Use a node that gives receipts, logs and the state of final blocks: nothing can be confirmed without them.";
    let newest: u64 = match node.call::<U64>("eth_blockNumber", json!([])).await {
        Ok(newest) => newest.to(),
        Err(error) => return report.silent("receipts", &error, TO_DO),
    };
    let mut found = None;
    for number in (0..=newest).rev().take(20) {
        let block: Result<Value, _> = node.call("eth_getBlockByNumber", json!([U64::from(number), false])).await;
        match block {
            Ok(block) => found = block["transactions"][0].as_str().and_then(|hash| hash.parse::<B256>().ok()),
            Err(error) => return report.silent("receipts", &error, TO_DO),
        }
        if found.is_some() {
            break;
        }
    }
    match found {
        None => {
            report.add(Level::Warning, "receipts", "the newest blocks are empty, so that none can be asked for", "")
        }
        Some(hash) => match node.call::<Value>("eth_getTransactionReceipt", json!([hash])).await {
            Ok(Value::Null) => {
                report.add(Level::Wrong, "receipts", "the node does not have one of a recent transaction", TO_DO)
            }
            Ok(_) => report.ok("receipts", "the node has them"),
            Err(error) => report.silent("receipts", &error, TO_DO),
        },
    }
    let logs = json!([{ "address": Escrow::ADDRESS, "fromBlock": U64::from(newest.saturating_sub(500)), "toBlock": U64::from(newest) }]);
    match node.call::<Value>("eth_getLogs", logs).await {
        Ok(_) => report.ok("logs", "the node has them"),
        Err(error) => report.silent("logs", &error, TO_DO),
    }
    match node.call::<Value>("eth_getBalance", json!([Address::ZERO, "finalized"])).await {
        Ok(_) => report.ok("history", "the node has the state of the newest final block"),
        Err(error) => report.silent("history", &error, TO_DO),
    }
}

async fn check_token(report: &mut Report, node: &Node, asset: &Asset) {
    let Asset { address, name, version, .. } = asset;
    match node.read(*address, "decimals()").await {
        Ok(data) if data.len() == 32 && U256::from_be_slice(&data) == U256::from(6) => {}
        Ok(_) => {
            let to_do = "Check --asset: it must be the contract of an EIP-3009 token with six decimals.";
            return report.add(Level::Wrong, "token", format_args!("{address} is no token with six decimals"), to_do);
        }
        Err(error) => return report.silent("token", &error, "Check --asset, or use another node."),
    }
    // EIP-712: what is signed has to name the token as its contract does.
    let types = keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)");
    let domain =
        [types, keccak256(name), keccak256(version), U256::from(asset.network.chain_id()).into(), address.into_word()];
    let expected = keccak256(domain.concat());
    match node.read(*address, "DOMAIN_SEPARATOR()").await {
        Ok(data) if data.as_ref() == expected.as_slice() => {
            report.ok("token", format_args!("{address} ({name}, version {version})"))
        }
        Ok(_) => report.add(
            Level::Wrong,
            "token",
            format_args!("{address} is not {name:?}, version {version:?}: signatures for it would be invalid"),
            "Correct --asset-name and --asset-version; --network may be another one than the node's.",
        ),
        Err(error) => report.silent("token", &error, "Check --asset: the token may not have EIP-3009."),
    }
}

async fn check_key(report: &mut Report, node: &Node, name: &str, key: &PrivateKeySigner, chain_id: u64) {
    let address = key.address();
    if devnet::is_public(address) && !is_for_trying(node).await {
        report.add(
            Level::Wrong,
            name,
            format_args!("{address} is a key of devnets, which everybody knows"),
            "Use a key of your own: x402 wallet new FILE.",
        );
    }
    match node.code(address).await {
        Ok(code) if !code.is_empty() => report.add(
            Level::Wrong,
            name,
            format_args!(
                "{address} has delegated its account (EIP-7702), and nodes keep only a few of its transactions"
            ),
            "Use another key, or end the delegation.",
        ),
        Ok(_) => {}
        Err(error) => return report.silent(name, &error, "Try again, or use another node."),
    }
    match node.ether(address).await {
        Ok(U256::ZERO) => report.add(
            Level::Wrong,
            name,
            format_args!("{address} has no ETH for gas"),
            &format!("Send it a little ETH on eip155:{chain_id}."),
        ),
        Ok(wei) if wei < U256::from(LOW_TANK) => {
            report.add(
                Level::Warning,
                name,
                format_args!("{address} has {} ETH", format_ether(wei)),
                "Send it more soon.",
            );
        }
        Ok(wei) => report.ok(name, format_args!("{address} has {} ETH", format_ether(wei))),
        Err(error) => report.silent(name, &error, "Try again, or use another node."),
    }
    let count = async |block: &str| node.call::<U64>("eth_getTransactionCount", json!([address, block])).await;
    if let (Ok(mined), Ok(all)) = (count("latest").await, count("pending").await)
        && all > mined
    {
        let waiting = all - mined;
        report.add(
            Level::Warning,
            name,
            format_args!("{waiting} of its transactions are not in a block"),
            "Wait, unless a seller runs with this key.",
        );
    }
}

/// Asks a facilitator whether it settles on this network, and permits if they are to be taken.
async fn check_facilitator(
    report: &mut Report,
    url: &HttpUrl,
    network: Network,
    takes_permits: bool,
) -> Result<(), Error> {
    const NAME: &str = "facilitator";
    const TOKEN: &str = "Set FACILITATOR_TOKEN to the token that it gave you.";
    /// An answer with many networks, extensions and signers, in bytes.
    const LONGEST: usize = 256 * 1024;
    let client = reqwest::Client::builder().timeout(Duration::from_secs(15)).build().map_err(Error::Http)?;
    let origin = url.origin();
    let (base, token) = (url.as_str().trim_end_matches('/'), facilitator_token());
    let is_refusal = |status| matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
    let refused = |status| format!("{origin} refuses to answer ({status})");
    let mut asking = client.get(format!("{base}/supported"));
    if let Some(token) = &token {
        asking = asking.bearer_auth(token);
    }
    let answer = match asking.send().await {
        Ok(answer) => answer,
        Err(error) => {
            let found = format!("{origin} does not answer: {}", Sentence(&error.without_url()));
            report.add(Level::Wrong, NAME, found, "Check --facilitator-url.");
            return Ok(());
        }
    };
    let status = answer.status();
    if is_refusal(status) {
        report.add(Level::Wrong, NAME, refused(status), TOKEN);
        return Ok(());
    }
    let body = Limited::new(reqwest::Body::from(answer), LONGEST).collect().await.map(|body| body.to_bytes());
    let supported: Value = body.ok().and_then(|body| serde_json::from_slice(&body).ok()).unwrap_or_default();
    let kinds = supported["kinds"].as_array().map(Vec::as_slice).unwrap_or_default();
    let settles = |scheme: &str| {
        kinds.iter().find(|kind| {
            let named = kind["network"].as_str().unwrap_or_default();
            let is_here = named == "eip155:*" || named.parse::<Network>().is_ok_and(|named| named == network);
            kind["scheme"] == scheme && is_here
        })
    };
    if settles("exact").is_none() {
        let found = format!("{origin} does not say that it settles on {network} ({status})");
        let to_do = "Check --facilitator-url and --network, or use another facilitator.";
        report.add(Level::Wrong, NAME, found, to_do);
        return Ok(());
    }
    // Everybody may ask what is supported. Nothing is verified here: there is no payment.
    let mut asking = client.post(format!("{base}/verify")).header("content-type", "application/json").body("{}");
    if let Some(token) = &token {
        asking = asking.bearer_auth(token);
    }
    match asking.send().await.map(|answer| answer.status()) {
        Ok(status) if is_refusal(status) => report.add(Level::Wrong, NAME, refused(status), TOKEN),
        _ => report.ok(NAME, format_args!("{origin} settles on {network}")),
    }
    let account = settles(upto::SCHEME).and_then(|kind| kind["extra"]["facilitatorAddress"].as_str());
    match account.and_then(|account| account.parse::<Address>().ok()) {
        Some(account) if takes_permits => report.ok("permits", format_args!("{origin} settles them (upto), as {account}")),
        None if takes_permits => report.add(
            Level::Wrong,
            "permits",
            format_args!("{origin} does not say that it settles them (upto) on {network}"),
            "Leave --upto out, or use another facilitator. x402 facilitator settles them for callers with a key (FACILITATOR_KEYS).",
        ),
        _ => {}
    }
    Ok(())
}

/// Looks whether what is paid can be lost.
async fn check_payee(report: &mut Report, node: Option<&Node>, pay_to: Address) {
    const NAME: &str = "payee";
    if pay_to.is_zero() {
        report.add(Level::Wrong, NAME, "is the zero address: the token refuses it", "Give an address of yours.");
    } else if devnet::is_public(pay_to) {
        let is_risk = match node {
            Some(node) => !is_for_trying(node).await,
            None => true,
        };
        match is_risk {
            true => report.add(
                Level::Wrong,
                NAME,
                format_args!("{pay_to} is an address of devnets, whose key everybody knows"),
                "Give an address of yours: what is paid to this one is lost.",
            ),
            false => report.ok(NAME, format_args!("{pay_to}, of a devnet")),
        }
    } else {
        report.ok(NAME, pay_to);
    }
}

/// Opens a connection to the service, and sends nothing.
async fn check_upstream(report: &mut Report, url: &HttpUrl) {
    const NAME: &str = "service";
    let origin = url.origin();
    let place = url.host_and_port();
    let connected = async {
        let (host, port) = place?;
        timeout(Duration::from_secs(5), TcpStream::connect((host.as_str(), port))).await.ok()?.ok()
    };
    match connected.await {
        Some(_) => report.ok(NAME, format_args!("{origin} is there")),
        None => report.add(
            Level::Wrong,
            NAME,
            format_args!("nothing listens at {origin}"),
            "Start the service, or correct --upstream.",
        ),
    }
}

/// Returns `true` if the node is of a chain where the keys of devnets are no risk: such a node makes blocks when it is told to.
async fn is_for_trying(node: &Node) -> bool {
    let owner: Result<Value, _> = node.call("devnet_fund", json!([Address::ZERO, "0x0"])).await;
    let anvil: Result<Value, _> = node.call("anvil_nodeInfo", json!([])).await;
    owner.is_ok() || anvil.is_ok()
}

/// Asks for a paid route as a client does, and with a header as long as that of a payment.
async fn check_public(report: &mut Report, url: &HttpUrl) -> Result<(), Error> {
    const NAME: &str = "public address";
    let client = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(Duration::from_secs(15))
        .build()
        .map_err(Error::Http)?;
    let origin = url.origin();
    let answer = match client.get(url.as_str()).send().await {
        Ok(answer) => answer,
        Err(error) => {
            let to_do = "Check its name, its certificate, the proxy before it and whether x402 charge runs.";
            report.add(
                Level::Wrong,
                NAME,
                format_args!("{origin} does not answer: {}", Sentence(&error.without_url())),
                to_do,
            );
            return Ok(());
        }
    };
    let status = answer.status();
    let header = answer.headers().get(header_name::PAYMENT_REQUIRED);
    match header.map(|header| decode_header::<PaymentRequired>(header.as_bytes(), MAX_REQUIRED_HEADER)) {
        Some(Ok(required)) if status == StatusCode::PAYMENT_REQUIRED => {
            let head: usize = answer.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
            report.ok(NAME, format_args!("{origin} asks for a payment, with {head} bytes of headers"));
            if !required.resource.url.starts_with(&origin) {
                let found = format!("the 402 names another address: {}", required.resource.url.escape_debug());
                report.add(
                    Level::Warning,
                    NAME,
                    found,
                    "Give x402 charge --public-url, or have the proxy pass the Host header on.",
                );
            }
        }
        _ if status.is_redirection() => {
            report.add(
                Level::Wrong,
                NAME,
                format_args!("{origin} redirects ({status})"),
                "Give the address that it leads to: payers do not follow redirects.",
            );
        }
        _ if status == StatusCode::BAD_GATEWAY => {
            let to_do = "Start x402 charge; if it runs, raise the proxy's limit on response headers (nginx: proxy_buffer_size 8k).";
            report.add(Level::Wrong, NAME, format_args!("{origin} answers {status}"), to_do);
        }
        _ => {
            let to_do = "Give the address of a route that costs something for GET, and have the proxy pass PAYMENT-REQUIRED on.";
            report.add(Level::Wrong, NAME, format_args!("{origin} answers {status} without an offer"), to_do);
        }
    }
    let probe = HeaderName::from_static("x-request-id");
    match client.get(url.as_str()).header(probe, "0".repeat(LONG_HEADER)).send().await {
        Ok(answer) if answer.status() == status => {
            report.ok("header sizes", format_args!("a request header of {LONG_HEADER} bytes arrives"))
        }
        Ok(answer) => report.add(
            Level::Wrong,
            "header sizes",
            format_args!("a request header of {LONG_HEADER} bytes is answered {}", answer.status()),
            "Raise the proxy's limit on request headers (nginx: large_client_header_buffers 4 16k).",
        ),
        Err(_) => report.add(
            Level::Wrong,
            "header sizes",
            format_args!("a request header of {LONG_HEADER} bytes is not answered"),
            "Raise the proxy's limit on request headers (nginx: large_client_header_buffers 4 16k).",
        ),
    }
    Ok(())
}

fn number(value: &Value) -> Option<u64> {
    serde_json::from_value::<U64>(value.clone()).ok().map(|number| number.to())
}
