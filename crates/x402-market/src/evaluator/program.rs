//! An evaluator as a whole program: card, payments on a chain, and server.

use std::{io, sync::Arc};

use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use tokio::net::{TcpListener, ToSocketAddrs};
use tower_x402::{
    Network, ParseUsdcError, Usdc,
    facilitator::{OnchainBuildError, OnchainFacilitator},
};

use super::{EvaluatorError, EvaluatorService};
use crate::{AgentCard, AgentCardBuilder, CardError, Score, judge::Judge};

/// An evaluator that settles on a chain and serves HTTP.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::{Network, client::key};
/// use x402_market::{Evaluator, Verdict, judge::output_judge};
///
/// let judge = output_judge(async |_task, output| {
///     let score = if output.contains("because") { 1.0 } else { 0.0 };
///     Ok(Verdict::new(score, 0.7, "whether it gives reasons"))
/// });
/// Evaluator::new("Reasons", "https://reasons.example", judge)
///     .skill("reasoning", "Says whether an answer gives reasons", 0.4)
///     .price("$0.001")
///     .key(key::from_env("SETTLEMENT_PRIVATE_KEY")?)
///     .network(Network::BASE_SEPOLIA)
///     .serve("0.0.0.0:4021")
///     .await?;
/// # Ok(()) }
/// ```
///
/// It keeps its payments in memory. [`EvaluatorService`] is for everything else: a ledger in a database, other facilitators, vouchers,
/// limits, and routes of your own.
#[must_use]
pub struct Evaluator {
    card: AgentCardBuilder,
    judge: Arc<dyn Judge>,
    key: Option<PrivateKeySigner>,
    network: Network,
    rpc_url: Option<String>,
}

impl Evaluator {
    /// Starts the settings. `url` is where students reach the evaluator.
    pub fn new(name: impl Into<String>, url: impl AsRef<str>, judge: impl Judge) -> Self {
        let card = AgentCard::builder(name, url);
        Self { card, judge: Arc::new(judge), key: None, network: Network::BASE, rpc_url: None }
    }

    /// Adds a skill. `worth` is the [worth](crate::evidence::Pairs::worth) that the evaluator claims, from 0 to 1.
    pub fn skill(self, id: impl Into<String>, description: impl Into<String>, worth: impl Into<Score>) -> Self {
        Self { card: self.card.skill(id, description, worth), ..self }
    }

    /// Sets the price of judging one output: dollars as text (`"$0.001"`) or [`Usdc`]. Required.
    pub fn price(self, price: impl TryInto<Usdc, Error: Into<ParseUsdcError>>) -> Self {
        Self { card: self.card.price(price), ..self }
    }

    /// Sets the key that is paid, signs the card, and pays gas: its account needs some ether. Required.
    pub fn key(self, key: PrivateKeySigner) -> Self {
        Self { key: Some(key), ..self }
    }

    /// Sets the chain. Default: Base.
    pub fn network(self, network: Network) -> Self {
        Self { network, ..self }
    }

    /// Sets the node. Default: the public one of Base or Base Sepolia, which is for trials. Required on other chains.
    pub fn rpc_url(self, url: impl Into<String>) -> Self {
        Self { rpc_url: Some(url.into()), ..self }
    }

    /// Serves the evaluator at an address such as `0.0.0.0:4021`, until the future is dropped.
    ///
    /// # Errors
    /// [`ServeError`] if a setting is missing or does not fit, the node cannot be used, or the address is taken.
    pub async fn serve(self, address: impl ToSocketAddrs) -> Result<(), ServeError> {
        self.serve_on(TcpListener::bind(address).await?).await
    }

    /// Serves the evaluator on a listener.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    pub async fn serve_on(self, listener: TcpListener) -> Result<(), ServeError> {
        let key = self.key.ok_or(ServeError::Missing("key"))?;
        let node = self.rpc_url.or_else(|| public_node(self.network).map(str::to_owned));
        let facilitator = OnchainFacilitator::builder()
            .network(self.network)
            .rpc_url(node.ok_or(ServeError::Missing("rpc_url"))?)
            .signer(key.clone())
            .build()
            .await?;
        let card = self.card.pay_to(self.network, alloy_signer::Signer::address(&key)).build()?.sign(&key).await?;
        let service = EvaluatorService::builder(card, self.judge).facilitator(facilitator).build()?;
        Ok(axum::serve(listener, Router::new().fallback_service(service)).await?)
    }
}

fn public_node(network: Network) -> Option<&'static str> {
    match network {
        Network::BASE => Some("https://mainnet.base.org"),
        Network::BASE_SEPOLIA => Some("https://sepolia.base.org"),
        _ => None,
    }
}

tower_x402::debug_fields!(Evaluator { card, network });

/// The reason why an evaluator is not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A required setting is missing.
    #[error("call .{0}(…)")]
    Missing(&'static str),
    /// The card does not fit, or could not be signed.
    #[error(transparent)]
    Card(#[from] CardError),
    /// The service does not fit.
    #[error(transparent)]
    Evaluator(#[from] EvaluatorError),
    /// The chain cannot be used.
    #[error(transparent)]
    Chain(#[from] OnchainBuildError),
    /// The address is taken, or the listener failed.
    #[error("the evaluator cannot be served")]
    Io(#[from] io::Error),
}
