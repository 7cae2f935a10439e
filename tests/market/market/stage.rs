//! An evaluator on a port with its own chain, and students that buy from it.

use std::{net::SocketAddr, sync::Arc};

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use tokio::net::TcpListener;
use tower_x402::{
    Network,
    client::{Budget, Payer},
    facilitator::OnchainFacilitator,
};
use url::Url;
use x402_market::{
    AgentCard, AgentCardBuilder, CardFetcher, EvaluationClient, EvaluatorBuilder, EvaluatorService, EvaluatorStats,
    Score, VerifiedCard, judge::Judge,
};

use support::{chain::Chain, devnet::DevnetChain};

/// What one output costs, in units.
pub const PRICE: u64 = 1_000;

/// A chain, and who settles on it.
pub struct Stage {
    pub chain: DevnetChain,
    pub facilitator: Arc<OnchainFacilitator>,
}

/// An evaluator on a port.
pub struct Booth {
    pub url: Url,
    pub payee: PrivateKeySigner,
    pub service: EvaluatorService,
}

impl Stage {
    pub async fn set() -> Self {
        let chain = DevnetChain::start(None).await;
        let settler = PrivateKeySigner::random();
        chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
        let facilitator = OnchainFacilitator::builder().rpc_url(chain.rpc_url()).network(Network::BASE_SEPOLIA);
        let facilitator = facilitator.signer(settler).build().await.unwrap();
        Self { chain, facilitator: Arc::new(facilitator) }
    }

    pub async fn open(&self, judge: impl Judge) -> Booth {
        self.open_with(judge, |card| card, |evaluator| evaluator).await
    }

    /// An evaluator with another card, and other limits.
    pub async fn open_with(
        &self,
        judge: impl Judge,
        describe: impl FnOnce(AgentCardBuilder) -> AgentCardBuilder,
        limit: impl FnOnce(EvaluatorBuilder) -> EvaluatorBuilder,
    ) -> Booth {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let payee = PrivateKeySigner::random();
        let card = card(listener.local_addr().unwrap(), payee.address());
        let card = describe(card).build().unwrap().sign(&payee).await.unwrap();
        let evaluator = EvaluatorService::builder(card, judge).facilitator(self.facilitator.clone());
        let service = limit(evaluator).build().unwrap();
        let url = serve(listener, Router::new().fallback_service(service.clone()));
        Booth { url, payee, service }
    }

    /// A client with so much money.
    pub async fn student(&self, units: u64) -> EvaluationClient {
        EvaluationClient::new(self.payer(units).await).unwrap()
    }

    pub async fn payer(&self, units: u64) -> Payer {
        let key = PrivateKeySigner::random();
        self.chain.mint(key.address(), units).await;
        let budget = Budget::builder().per_payment("$1".parse().unwrap()).total("$1".parse().unwrap()).build();
        Payer::builder(key).asset(self.chain.asset()).budget(budget).build()
    }
}

impl Booth {
    pub async fn card(&self) -> Arc<VerifiedCard> {
        CardFetcher::new().unwrap().fetch(&self.url).await.unwrap()
    }

    pub fn stats(&self) -> EvaluatorStats {
        self.service.stats()
    }

    pub async fn income(&self, stage: &Stage) -> u64 {
        stage.chain.balance(self.payee.address()).await
    }
}

/// The card of an evaluator of arithmetic and prose.
pub fn card(address: SocketAddr, payee: Address) -> AgentCardBuilder {
    AgentCard::builder("The judge", format!("http://{address}"))
        .skill("arithmetic", "Marks sums", Score::MAX)
        .skill("prose", "Marks style", Score::new(0.6).unwrap())
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, payee)
}

/// Serves a router for as long as the test runs.
pub fn serve(listener: TcpListener, router: Router) -> Url {
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async { axum::serve(listener, router).await });
    url
}
