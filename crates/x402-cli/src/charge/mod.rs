//! `x402 charge`: a reverse proxy that charges for an HTTP service in any language.

mod bounded;
mod config;
mod forward;
mod routes;

use std::{net::SocketAddr, path::PathBuf, pin::pin, time::Duration};

use alloy_primitives::Address;
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tower_x402::{Network, Usdc, facilitator::Facilitator, protocol::PaymentFlow};
use tracing::{info, warn};

pub(crate) use self::config::File;
use self::{
    config::EXAMPLE,
    forward::Forwarder,
    routes::{Common, Pattern, Permits, Price, Route, Routes},
};
use crate::{
    admin::{About, Admin, AdminFlags},
    chain::{ChainFlags, Settlement},
    devnet::{self, Local},
    error::{Error, Sentence},
    output, pay, serve,
    signals::{Signals, hangups},
    values::{HttpUrl, LedgerAt, account, some_amount},
};

/// The time that a stopping seller gives settlements whose clients are gone: enough to replace a stuck transaction twice.
const LAST_SETTLEMENTS: Duration = Duration::from_secs(45);
/// The time that the requests in progress have besides the work.
const LAST_ANSWERS: Duration = Duration::from_secs(30);
/// The pause before a facilitator that did not answer is asked again, at first. It doubles up to the longest.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
const DEFAULT_TIMEOUT: u64 = 60;
const DEFAULT_MAX_BODY: usize = 1 << 20;
const DEFAULT_LISTEN: &str = "127.0.0.1:4021";

/// Charges for an HTTP service: passes each request that was paid for on to --upstream, and its answer back.
///
/// The service needs to know nothing of payments. An answer that is not a success (2xx) is not charged for, nor is one that takes too
/// long. Answers stream in both directions. WebSockets and other upgrades are refused.
///
/// Without --rpc-url, --facilitator-url, --network and keys, everything runs on a chain in the process: then no real money moves.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
WHAT THE SERVICE IS TOLD
  In headers that a client cannot set, since the proxy removes all that begin with x402-. Let the service listen on 127.0.0.1, so that
  nobody reaches it without the proxy:
    X402-Payer, X402-Pay-To, X402-Asset, X402-Network
    X402-Amount       atomic units; by voucher or permit the most that may be charged
    X402-Payment      identifies the payment; the same in each attempt at the same work
    X402-Attempt      1, or more if earlier attempts at the work failed
    X402-Flow         authorization (settled after the work) or upfront
    X402-Transaction  the transaction that settled it, if it was settled before the work

WHAT THE SERVICE MAY SAY
  X402-Actual-Price: $0.0004    what the work really cost, up to the price, which may be nothing. Payments by voucher and by permit
                                (--upto) are charged this much; a payment by transfer is for the price. It counts with --upto and in
                                routes with a max_price. The header is removed

ENVIRONMENT
  SETTLEMENT_PRIVATE_KEY  the key that sends the transactions and pays their gas (32 bytes in hex); required with --rpc-url, unless
                          --facilitator-url is given. It needs a little ETH and no USDC, and does not hold the income
  CHANNELS_PRIVATE_KEY    the key that claims what was charged by vouchers. With it, vouchers are taken. It may be the settlement key.
                          Otherwise it needs ether of its own. Keep it: another key makes other channels
                          For both there are …_PRIVATE_KEY_FILE (a file that not everybody may read), and …_KEYSTORE with
                          …_KEYSTORE_PASSWORD or …_KEYSTORE_PASSWORD_FILE
  FACILITATOR_TOKEN       sent to --facilitator-url as Authorization: Bearer …
  X402_ADMIN_TOKEN        what callers of --admin must give, as a bearer token or as the password of any name: 16 letters and digits or
                          more [default: none is needed on an address of this machine]
  PGPASSWORD              the password for --ledger postgres://…, if the URL has none
  RUST_LOG                the log filter [default: warn,x402=info]; tower_x402=info logs every transaction

SIGNALS
  SIGTERM, SIGINT  answer the requests in progress, claim what was charged by vouchers, and stop; a second one stops at once
  SIGHUP           read the routes of --config again; the rest stays as it is until a restart

EXAMPLES
  x402 charge --upstream http://127.0.0.1:8000 --price '$0.001'
  SETTLEMENT_PRIVATE_KEY_FILE=settlement.key x402 charge --upstream http://127.0.0.1:8000 --price '$0.001' --pay-to 0x… \\
      --network base --rpc-url https://mainnet.base.org --ledger sqlite:payments.sqlite
  x402 charge --upstream http://127.0.0.1:8000 --price '$0.05' --upto      the service says what each answer cost, up to that
  x402 charge --print-config > x402.toml && x402 charge --config x402.toml")]
pub(crate) struct Command {
    /// The service that is charged for
    #[arg(long, value_name = "URL")]
    upstream: Option<HttpUrl>,
    /// The price of every request that no route of --config is for
    #[arg(long, value_parser = some_amount)]
    price: Option<Usdc>,
    /// The address that is paid [default: on a chain in the process, one of its accounts]
    #[arg(long, value_name = "ADDR", value_parser = account)]
    pay_to: Option<Address>,
    /// The address to listen on; port 0 for any free one [default: 127.0.0.1:4021]
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// A configuration file, with routes and prices. Flags count instead of its fields
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print a configuration file to start from, and exit
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    chain: ChainFlags,
    /// A facilitator that verifies and settles; needs --pay-to. With --rpc-url too, its answers are checked on the chain
    #[arg(long, value_name = "URL")]
    facilitator_url: Option<HttpUrl>,
    /// The ledger: memory, sqlite:PATH, or postgres://USER@HOST/DATABASE, which several processes may share [default: memory]
    #[arg(long, env = "X402_LEDGER", hide_env_values = true)]
    ledger: Option<LedgerAt>,
    /// The public address of this service, without a path [default: the Host of each request]
    #[arg(long, value_name = "URL")]
    public_url: Option<HttpUrl>,
    /// Believe what a proxy before this one says of the client (X-Forwarded-For)
    #[arg(long)]
    behind_proxy: bool,
    /// How many seconds the service may take for the head of an answer, and for each pause in its body [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=240))]
    timeout: Option<u64>,
    /// When a transfer is settled: after the work, if it succeeded, or before it (upfront). Vouchers are charged after the work [default:
    /// authorization]
    #[arg(long, value_enum)]
    flow: Option<Flow>,
    /// Offer to be paid by permit, too (scheme upto, by Permit2): payers sign for the price as the most, and are charged what the service says
    /// in X402-Actual-Price, which may be nothing
    #[arg(long)]
    upto: bool,
    /// The largest request body, in bytes [default: 1048576]
    #[arg(long, value_name = "BYTES")]
    max_body: Option<usize>,
    #[command(flatten)]
    operator: AdminFlags,
    /// Print one JSON line when ready, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

/// When a transfer is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Flow {
    Authorization,
    Upfront,
}

/// Flags and file together.
struct Settings {
    upstream: HttpUrl,
    listen: String,
    chain: ChainFlags,
    facilitator_url: Option<HttpUrl>,
    ledger: LedgerAt,
    pay_to: Option<Address>,
    public_url: Option<HttpUrl>,
    behind_proxy: bool,
    timeout: Duration,
    flow: PaymentFlow,
    upto: bool,
    max_body: usize,
    admin: Option<SocketAddr>,
    routes: Vec<Route>,
}

impl Command {
    fn settings(&self) -> Result<Settings, Error> {
        let file = self.config.as_deref().map(File::read).transpose()?.unwrap_or_default();
        let routes = self.routes(&file)?;
        let chain = &self.chain;
        // A token of the flags does not take its name from the file.
        let token = match chain.asset {
            Some(_) => (chain.asset, chain.asset_name.clone(), chain.asset_version.clone()),
            None => (file.asset, file.asset_name, file.asset_version),
        };
        let upstream = self.upstream.clone().or(file.upstream).ok_or_else(|| {
            Error::setting("--upstream", "give the URL of the service to charge for, such as http://127.0.0.1:8000")
        })?;
        if upstream.has_query_or_fragment() {
            let problem = "has a query or a fragment, after which no path can stand: leave it out";
            return Err(Error::setting("--upstream", problem));
        }
        let public_url = self.public_url.clone().or(file.public_url);
        if public_url.as_ref().is_some_and(|url| url.has_user() || url.has_query_or_fragment()) {
            let problem =
                "is shown to every client, and used before each path: leave out user, password, query and fragment";
            return Err(Error::setting("--public-url", problem));
        }
        Ok(Settings {
            upstream,
            listen: self.listen.clone().or(file.listen).unwrap_or_else(|| DEFAULT_LISTEN.to_owned()),
            chain: ChainFlags {
                network: chain.network.or(file.network),
                rpc_url: chain.rpc_url.clone().or(file.rpc_url),
                asset: token.0,
                asset_name: token.1,
                asset_version: token.2,
            },
            facilitator_url: self.facilitator_url.clone().or(file.facilitator_url),
            ledger: self.ledger.clone().or(file.ledger).unwrap_or(LedgerAt::Memory),
            pay_to: self.pay_to.or(file.pay_to),
            public_url,
            behind_proxy: self.behind_proxy || file.behind_proxy,
            timeout: Duration::from_secs(self.timeout.or(file.timeout_seconds).unwrap_or(DEFAULT_TIMEOUT)),
            flow: match self.flow.or(file.flow) {
                Some(Flow::Upfront) => PaymentFlow::Upfront,
                Some(Flow::Authorization) | None => PaymentFlow::Authorization,
            },
            upto: self.upto || file.upto,
            max_body: self.max_body.or(file.max_body).unwrap_or(DEFAULT_MAX_BODY),
            admin: self.operator.admin.or(file.admin),
            routes,
        })
    }

    /// Returns the routes of the file, and one for everything else if there is a price for it.
    fn routes(&self, file: &File) -> Result<Vec<Route>, Error> {
        let mut routes = file.routes()?;
        let default = self.price.or(file.price);
        if let Some(price) = default {
            let path = Pattern::Below("/".to_owned());
            let (price, place) = (Price::Fixed(price), "--price".to_owned());
            routes.push(Route { path, methods: Vec::new(), price, description: None, place });
        }
        match routes.is_empty() {
            true => Err(Error::setting(
                "--price",
                "say what a request costs, such as --price '$0.001', or give routes in --config",
            )),
            false => Ok(routes),
        }
    }

    pub(crate) async fn run(self) -> Result<(), Error> {
        if self.print_config {
            output::bytes(EXAMPLE.as_bytes());
            return Ok(());
        }
        let settings = self.settings()?;
        let (mut signals, mut hangups) = (Signals::catch()?, hangups()?);
        let admin = match settings.admin {
            Some(address) => Some(Admin::open(address).await?),
            None => None,
        };
        let (listener, listening) = serve::listen("--listen", &settings.listen).await?;
        let settlement = settings.settlement().await?;
        let pay_to = match (settings.pay_to, &settlement.local) {
            (Some(pay_to), _) => pay_to,
            (None, Some(local)) => local.payee,
            (None, None) => return Err(Error::setting("--pay-to", "give the address that is paid")),
        };
        let mut common = Common {
            pay_to,
            public_url: settings.public_url.clone(),
            behind_proxy: settings.behind_proxy,
            timeout: settings.timeout,
            flow: settings.flow,
            permits: settings.permits(&settlement).await,
            max_body: settings.max_body,
        };
        let forwarder = Forwarder::new(&settings.upstream, settings.timeout, settings.behind_proxy)?;
        let routes = Routes::new(&settings.routes, &common, &settlement, &forwarder)?;
        let (stop, stopped) = watch::channel(false);
        let operator_at = admin.as_ref().map(|admin| admin.address);
        if let Some(admin) = admin {
            let facts = json!({
                "command": "x402 charge",
                "listening": listening.to_string(),
                "upstream": settings.upstream.origin(),
                "pay_to": pay_to.to_string(),
                "network": settlement.asset.network.to_string(),
                "is_real": settlement.local.is_none(),
                "ledger": settings.ledger.to_string(),
            });
            let of = routes.clone();
            admin.serve(&settlement, About { facts, prices: Box::new(move || of.prices()) }, stopped.clone());
        }
        self.announce(&settings, &settlement, &common, (listening, operator_at));

        let patience = settings.timeout + LAST_ANSWERS;
        let serving = tokio::spawn(serve::serve(listener, routes.clone(), stopped, patience, common.behind_proxy));
        let mut answered = pin!(answered(&*settlement.facilitator));
        let mut waits = common.permits == Permits::Awaited;
        loop {
            tokio::select! {
                () = signals.next() => break,
                _ = hangups.recv() => self.reload(&routes, &common, &settlement, &forwarder),
                () = &mut answered, if waits => {
                    waits = false;
                    let taken = Common { permits: Permits::Taken, ..common.clone() };
                    match routes.renew(&taken, &settlement, &forwarder) {
                        Ok(()) => {
                            common = taken;
                            info!("the facilitator answers: permits (--upto) are taken");
                        }
                        Err(error) => warn!("no permits are taken until a restart: {}", Sentence(&error)),
                    }
                }
            }
        }
        info!("stopping: answering the requests in progress");
        let _ = stop.send(true);
        tokio::select! {
            () = finish(serving, &settlement) => info!("stopped"),
            () = signals.next() => warn!("stopped at once"),
        }
        settlement.books.close().await;
        Ok(())
    }

    fn reload(&self, routes: &Routes, common: &Common, settlement: &Settlement, to: &Forwarder) {
        let read = || {
            let file = self.config.as_deref().map(File::read).transpose()?.unwrap_or_default();
            let new = self.routes(&file)?;
            routes.replace(&new, common, settlement, to).map(|()| new.len())
        };
        match read() {
            Ok(count) => info!(routes = count, "the routes were read again"),
            Err(error) => warn!("the routes stay as they were: {}", Sentence(&error)),
        }
    }

    fn announce(
        &self,
        settings: &Settings,
        settlement: &Settlement,
        common: &Common,
        at: (SocketAddr, Option<SocketAddr>),
    ) {
        let (listening, admin) = at;
        let pay_to = common.pay_to;
        let rpc_url = settlement.local.as_ref().map(Local::rpc_url);
        if let Some(rpc_url) = &rpc_url {
            let (name, key) = Local::export_payer();
            let approve = match settings.upto {
                true => format!(
                    "  export X402_RPC_URL={rpc_url}\n  x402 wallet approve '$1'     once, so that at most the price can be charged\n"
                ),
                false => String::new(),
            };
            let pay = settings.routes.iter().find_map(|route| route.to_pay(pay::DEFAULT_BUDGET)).unwrap_or_default();
            output::warn(format_args!(
                "NO REAL MONEY: this runs on a chain in the process, which ends with it. For real money give --rpc-url or --facilitator-url.\n\
                 To pay on this chain ({rpc_url}):\n  export {name}={key}\n{approve}  x402 pay http://{listening}{pay}"
            ));
        }
        if settlement.local.is_none() && settlement.asset.network == Network::BASE && devnet::is_public(pay_to) {
            output::warn(format_args!(
                "Everybody knows the key of {pay_to}, which a devnet has: what is paid to it is lost."
            ));
        }
        if self.json {
            output::line(json!({
                "listening": listening.to_string(),
                "admin": admin.map(|admin| admin.to_string()),
                "rpc_url": rpc_url,
                "asset": settlement.asset.address.to_string(),
                "pay_to": pay_to.to_string(),
                "network": settlement.asset.network.to_string(),
                "vouchers": settlement.channels.is_some(),
                "upto": common.permits == Permits::Taken,
            }));
            return;
        }
        output::line(format_args!(
            "Charging at http://{listening} for {}, paid to {pay_to} on {}",
            settings.upstream.origin(),
            settlement.asset.network
        ));
        for route in &settings.routes {
            let methods: Vec<_> = route.methods.iter().map(http::Method::as_str).collect();
            let methods = if methods.is_empty() { "any method".to_owned() } else { methods.join(", ") };
            output::line(format_args!("  {:<24} {:<12} {}", route.path.to_string(), methods, route.price));
        }
        if let Some(admin) = admin {
            output::line(format_args!("For the operator: http://{admin}/"));
        }
        if !settings.ledger.is_durable() && settlement.local.is_none() {
            output::warn(
                "The ledger is in memory: what is known of payments ends with the process. Give --ledger sqlite:payments.sqlite",
            );
        }
    }
}

impl Settings {
    /// Returns whether permits are taken. Only a facilitator that does not answer is waited for: one in this process knows.
    async fn permits(&self, settlement: &Settlement) -> Permits {
        match self.upto {
            false => Permits::Unwanted,
            true if settlement.own.is_none() && settlement.facilitator.supported().await.is_err() => {
                warn!("permits (--upto) are taken as soon as the facilitator answers");
                Permits::Awaited
            }
            true => Permits::Taken,
        }
    }

    async fn settlement(&self) -> Result<Settlement, Error> {
        match (&self.facilitator_url, &self.chain.rpc_url) {
            (Some(url), _) => Settlement::by_facilitator(url, &self.chain, self.ledger.open().await?).await,
            (None, Some(_)) => Settlement::by_node(&self.chain, self.ledger.open().await?).await,
            (None, None) => Settlement::in_process(&self.chain, &self.ledger, "--rpc-url or --facilitator-url").await,
        }
    }
}

/// Waits until the facilitator says what it settles.
async fn answered(facilitator: &dyn Facilitator) {
    let mut pause = PAUSE;
    while facilitator.supported().await.is_err() {
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Waits for the requests in progress, claims what was charged by vouchers, and waits for open settlements.
async fn finish(serving: tokio::task::JoinHandle<bool>, settlement: &Settlement) {
    if !serving.await.unwrap_or(false) {
        warn!("a client kept its request open");
    }
    if let Some(channels) = &settlement.channels {
        match timeout(LAST_SETTLEMENTS, channels.claim_all()).await {
            Ok(Ok(report)) => info!(claimed = report.claimed, "claimed what was charged by vouchers"),
            Ok(Err(error)) => {
                warn!("what was charged by vouchers is claimed when this runs again: {}", Sentence(&error))
            }
            Err(_elapsed) => warn!("claims take too long; they go on when this runs again"),
        }
    }
    let deadline = Instant::now() + LAST_SETTLEMENTS;
    // A settlement goes on after its client disconnects.
    while Instant::now() < deadline {
        match settlement.books.payments.counts().await {
            Ok(counts) if counts.pending > 0 => sleep(Duration::from_millis(50)).await,
            _ => return,
        }
    }
    warn!("some settlements are still open; they go on when this runs again");
}
