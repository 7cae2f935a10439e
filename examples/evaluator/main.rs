//! An evaluator that charges for its verdicts over x402: on arithmetic, prose, or anything a language model judges.

mod admin;
mod chain;
mod flags;
mod judge;
mod pairs;
#[path = "../policy/plain.rs"]
mod plain;
mod service;
#[path = "../serving.rs"]
mod serving;
#[path = "../settings.rs"]
mod settings;

use std::{net::SocketAddr, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::Parser as _;
use serde::Serialize;
use tokio::{
    net::TcpListener,
    time::{Instant, sleep, timeout},
};
use tower_x402::{Network, facilitator::Facilitator as _, ops::Operator};
use tracing::{info, warn};

use crate::{
    chain::Chain,
    flags::Flags,
    judge::Specialist,
    service::Evaluator,
    serving::{Serving, Signals, announce, exit_of, listen, log_of},
};

/// How long a stopping evaluator waits for the requests in progress: a handler's deadline and a settlement.
const LAST_REQUESTS: Duration = Duration::from_secs(90);
/// How long it then waits for settlements whose clients are gone: long enough to replace a stuck transaction twice.
const LAST_SETTLEMENTS: Duration = Duration::from_secs(45);

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    log_of("evaluator");
    if let Some((which, format)) = flags.printing() {
        let printed = async { admin::print(flags.open_ledger().await?.payments, which, format.into()).await };
        return exit_of("evaluator", printed.await);
    }
    let server = match Server::start(&flags).await {
        Ok(server) => server,
        Err(error) => return exit_of("evaluator", Err(error)),
    };
    match server.run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("evaluator: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The line that is printed when the evaluator is ready.
#[derive(Serialize)]
struct Ready<'a> {
    listening: SocketAddr,
    rpc_url: Option<&'a str>,
    asset: String,
    pay_to: String,
    network: Network,
}

/// A server that is ready to answer.
struct Server {
    listener: TcpListener,
    evaluator: Evaluator,
    /// For the operator.
    admin: Option<axum::Router>,
    signals: Signals,
    chain: Chain,
}

impl Server {
    async fn start(flags: &Flags) -> anyhow::Result<Self> {
        let signals = Signals::catch()?;
        let listener = listen(&flags.listen).await?;
        let chain = Chain::connect(flags).await?;
        let pay_to = chain.pay_to;
        let specialist = Specialist::of(flags)?;
        let listening = listener.local_addr()?;
        let base = judge::base(flags, listening)?;
        let card = specialist
            .card(base, flags.price, (chain.asset.clone(), pay_to), chain.key.as_ref())
            .await
            .context("the card")?;
        let tags = ["evaluation".to_owned(), specialist.skill];
        let facilitators = (chain.facilitator.clone(), chain.own.clone());
        // A catalogue needs a public URL.
        let listed = flags.public_url.is_some();
        let evaluator =
            Evaluator::open(card, specialist.judge, flags.handler_delay(), facilitators, listed, |paywall| {
                let paywall = paywall.flow(flags.payment_flow()).status_url(flags.status_url());
                let paywall = paywall.service_name("evaluator").tags(tags);
                let paywall = match flags.credit() {
                    Some(credit) => paywall.deferred(credit),
                    None => paywall,
                };
                let paywall = match chain.channels.clone() {
                    Some(channels) if flags.takes_vouchers_only() => paywall.vouchers_only(channels),
                    Some(channels) => paywall.vouchers(channels),
                    None => paywall,
                };
                match &flags.public_url {
                    Some(url) if url.has_path() => paywall.resource_url(&url.0),
                    Some(url) => paywall.public_origin(&url.0),
                    // The port may change with a restart, and open payments are presented again after it.
                    None => paywall.public_origin(""),
                }
            })?
            .channels(chain.channels.clone());
        announce(&Ready {
            listening,
            rpc_url: chain.rpc_url.as_deref(),
            asset: chain.asset.address.to_string(),
            pay_to: pay_to.to_string(),
            network: chain.asset.network,
        })?;
        info!(price = %flags.price, %pay_to, "selling verdicts");
        let token = flags.admin_token.clone();
        let admin = token.map(|token| {
            let operator = Operator::new(chain.facilitator.ledger().clone());
            let operator = match &chain.channels {
                Some(channels) => operator.channel_ledger(channels.ledger().clone()),
                None => operator,
            };
            admin::router(operator, token)
        });
        Ok(Self { listener, evaluator, admin, signals, chain })
    }

    /// Serves until a signal, then finishes the requests in progress.
    async fn run(mut self) -> anyhow::Result<()> {
        let mut router = self.evaluator.router();
        if let Some(admin) = self.admin {
            router = router.merge(admin);
        }
        let serving = Serving::begin(self.listener, router);
        self.signals.next().await;
        info!("stopping: answering the requests in progress");
        let finished = async {
            serving.finish(LAST_REQUESTS).await?;
            let deadline = Instant::now() + LAST_SETTLEMENTS;
            if let Some(channels) = &self.chain.channels {
                // What is not claimed now has to wait until the evaluator runs again.
                let claimed = timeout(LAST_SETTLEMENTS, channels.claim_all()).await.context("claims take too long")?;
                info!(claimed = claimed?.claimed, "claimed what was charged by vouchers");
            }
            // A settlement continues after its client disconnects.
            while self.evaluator.stats().await?.pending > 0 && Instant::now() < deadline {
                sleep(Duration::from_millis(50)).await;
            }
            anyhow::Ok(())
        };
        tokio::select! {
            finished = finished => finished?,
            () = self.signals.next() => warn!("stopped at once"),
        }
        info!(stats = ?self.evaluator.stats().await?, "stopped");
        Ok(())
    }
}
