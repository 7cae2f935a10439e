//! `x402 facilitator`: verifies and settles for sellers that have no node.

use std::{convert::Infallible, time::Duration};

use alloy_primitives::Address;
use axum::body::Body;
use http::{Request, Response};
use serde_json::json;
use tokio::sync::watch;
use tower::ServiceExt as _;
use tower_x402::server::PeerAddress;
use tracing::{info, warn};
use x402_facilitator::FacilitatorService;

use crate::{
    admin::{About, Admin, AdminFlags},
    chain::{ChainFlags, Settlement},
    devnet::Local,
    error::Error,
    output,
    serve::{self, Peer},
    signals::Signals,
    values::{LedgerAt, account},
};

/// The time that a stopping facilitator gives requests and settlements.
const LAST_REQUESTS: Duration = Duration::from_secs(60);
/// For how long a paid resource stays in the catalogue.
const LISTED_FOR: Duration = Duration::from_secs(30 * 86_400);
const KEYS: &str = "FACILITATOR_KEYS";

/// Verifies and settles payments for sellers: POST /verify, POST /settle, GET /supported, GET /healthz.
///
/// Without --rpc-url, --network and keys, it runs on a chain in the process, and no real money moves.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
ENVIRONMENT
  SETTLEMENT_PRIVATE_KEY  the key that sends the transactions and pays their gas (32 bytes in hex); required with --rpc-url. There are
                          SETTLEMENT_PRIVATE_KEY_FILE and SETTLEMENT_KEYSTORE, too
  CHANNELS_PRIVATE_KEY    the key that sends what sellers ask for on payment channels, and pays its gas. With it, deposits, claims and
                          refunds are executed, too
  FACILITATOR_KEYS        comma-separated keys, one of which callers send as Authorization: Bearer … [default: anyone may call]. With keys,
                          permits (scheme upto) are settled, too: give them to sellers only
  X402_ADMIN_TOKEN        what callers of --admin must give, as a bearer token or as the password of any name: 16 letters and digits or
                          more [default: none is needed on an address of this machine]
  PGPASSWORD              the password for --ledger postgres://…, if the URL has none
  RUST_LOG                the log filter [default: warn,x402=info]; tower_x402=info logs every transaction

EXAMPLES
  x402 facilitator --listen 127.0.0.1:4023
  x402 charge --facilitator-url http://127.0.0.1:4023 --pay-to 0x… --upstream http://127.0.0.1:8000 --price '$0.001'")]
pub(crate) struct Command {
    /// The address to listen on; port 0 for any free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:4023")]
    listen: String,
    #[command(flatten)]
    chain: ChainFlags,
    /// Serve this payee only; repeatable [default: all]
    #[arg(long, value_name = "ADDR", value_parser = account)]
    payee: Vec<Address>,
    /// The most requests of each caller per minute
    #[arg(long, value_name = "N", default_value_t = 600)]
    rate: u32,
    /// The most gas for one request [default: 400000, or 16777216 if callers need a key]
    #[arg(long, value_name = "GAS")]
    max_gas: Option<u64>,
    /// The most gas in an hour, for all callers together
    #[arg(long, value_name = "GAS", default_value_t = 100_000_000)]
    gas_per_hour: u64,
    /// List up to N resources that were paid for at GET /discovery/resources, each for 30 days [default: none]
    #[arg(long, value_name = "N")]
    catalogue: Option<usize>,
    /// The ledger: memory, sqlite:PATH, or postgres://USER@HOST/DATABASE, which several facilitators may share
    #[arg(long, env = "X402_LEDGER", hide_env_values = true, default_value = "memory")]
    ledger: LedgerAt,
    #[command(flatten)]
    operator: AdminFlags,
    /// Print one JSON line when ready, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

impl Command {
    pub(crate) async fn run(self) -> Result<(), Error> {
        let mut signals = Signals::catch()?;
        let admin = match self.operator.admin {
            Some(address) => Some(Admin::open(address).await?),
            None => None,
        };
        let (listener, listening) = serve::listen("--listen", &self.listen).await?;
        let settlement = match &self.chain.rpc_url {
            Some(_) => Settlement::by_node(&self.chain, self.ledger.open().await?).await?,
            None => Settlement::in_process(&self.chain, &self.ledger, "--rpc-url").await?,
        };
        let mut service = FacilitatorService::builder(settlement.facilitator.clone())
            .asset(settlement.asset.clone())
            .rate(self.rate, Duration::from_secs(60))
            .gas_per_hour(self.gas_per_hour);
        if let Some(contract) = &settlement.contract {
            service = service.channels(contract.clone());
        }
        if let Some(gas) = self.max_gas {
            service = service.max_gas(gas);
        }
        if let Some(resources) = self.catalogue {
            service = service.catalogue(resources, LISTED_FOR);
        }
        service = self.payee.iter().fold(service, |service, payee| service.payee(*payee));
        let given = std::env::var_os(KEYS).unwrap_or_default();
        let keys = given.to_str().unwrap_or_default().split(',').map(str::trim);
        let keys: Vec<&str> = keys.filter(|key| !key.is_empty()).collect();
        if keys.is_empty() && !given.is_empty() {
            let problem = "has no key: give one or more, with commas between them, or unset it to serve anybody";
            return Err(Error::setting(KEYS, problem));
        }
        service = keys.iter().fold(service, |service, key| service.bearer_key(*key));
        // Whoever asks first says what a permit is charged: a stranger may be the buyer.
        service = service.permits(!keys.is_empty());
        let service = service.build();
        let answer = tower::service_fn(move |mut request: Request<Body>| {
            if let Some(Peer(peer)) = request.extensions().get().copied() {
                request.extensions_mut().insert(PeerAddress(peer.ip()));
            }
            let service = service.clone();
            async move {
                let Ok(response) = service.oneshot(request).await;
                Ok::<Response<Body>, Infallible>(response.map(Body::new))
            }
        });
        let (stop, stopped) = watch::channel(false);
        let operator_at = admin.as_ref().map(|admin| admin.address);
        if let Some(admin) = admin {
            let facts = json!({
                "command": "x402 facilitator",
                "listening": listening.to_string(),
                "network": settlement.asset.network.to_string(),
                "is_real": settlement.local.is_none(),
                "ledger": self.ledger.to_string(),
            });
            admin.serve(&settlement, About { facts, prices: Box::new(Vec::new) }, stopped.clone());
        }
        let address = settlement.own.as_ref().map(|own| own.settlement_address().to_string());
        let rpc_url = settlement.local.as_ref().map(Local::rpc_url);
        match self.json {
            true => output::line(json!({
                "listening": listening.to_string(),
                "admin": operator_at.map(|admin| admin.to_string()),
                "rpc_url": rpc_url,
                "asset": settlement.asset.address.to_string(),
                "network": settlement.asset.network.to_string(),
                "settlement_address": address,
            })),
            false => {
                let network = settlement.asset.network;
                output::line(format_args!("Settling on {network} for others at http://{listening}"));
                if let Some(admin) = operator_at {
                    output::line(format_args!("For the operator: http://{admin}/"));
                }
            }
        }
        if let Some(rpc_url) = rpc_url {
            output::warn(format_args!(
                "NO REAL MONEY: this runs on a chain in the process ({rpc_url}), which ends with it."
            ));
        } else if keys.is_empty() {
            output::warn(format_args!(
                "Anyone who reaches this address can have gas spent, up to --gas-per-hour. Set {KEYS} to ask for a key."
            ));
        }
        let serving = tokio::spawn(serve::serve(listener, answer, stopped, LAST_REQUESTS, false));
        signals.next().await;
        info!("stopping: answering the requests in progress");
        let _ = stop.send(true);
        let finished = async {
            if !serving.await.unwrap_or(false) {
                warn!("a client kept its request open");
            }
            if let Some(own) = &settlement.own
                && !own.drain(LAST_REQUESTS).await
            {
                warn!("some settlements are still open; they go on when this runs again");
            }
        };
        tokio::select! {
            () = finished => {}
            () = signals.next() => warn!("stopped at once"),
        }
        settlement.books.close().await;
        Ok(())
    }
}
