//! A chain, a market of evaluators on it, and students.

use std::{net::SocketAddr, sync::Arc};

use alloy_primitives::{Address, U256};
use alloy_signer_local::PrivateKeySigner;
use axum::Router;
use tokio::net::TcpListener;
use tower_x402::{
    Network, Usdc,
    client::{Budget, Journal, Payer},
    facilitator::OnchainFacilitator,
};
use url::Url;
use x402_market::{
    AgentCard, AgentCardBuilder, Confidence, EvaluatorService, Score, Student, StudentBuilder, Submission, Task,
    Verdict,
    judge::{Judge, output_judge},
    selection::{Candidate, Job, Observation, Selector},
};

use crate::{chain::Chain, devnet::DevnetChain};

/// What one output costs, in units, unless somebody asks for more.
pub const PRICE: u64 = 1_000;

/// A chain, and who settles on it.
pub struct Stage {
    pub chain: DevnetChain,
    pub facilitator: Arc<OnchainFacilitator>,
}

/// An evaluator on a port.
pub struct Booth {
    pub url: Url,
    pub payee: Address,
    pub server: tokio::task::AbortHandle,
}

impl Stage {
    pub async fn set() -> Self {
        Self::set_with_finality(0).await
    }

    /// On a chain whose blocks are final only so many blocks later.
    pub async fn set_with_finality(depth: u64) -> Self {
        let chain = DevnetChain::start_with(None, depth).await;
        let settler = PrivateKeySigner::random();
        chain.fund(settler.address(), U256::from(10).pow(U256::from(18))).await;
        let facilitator = OnchainFacilitator::builder().rpc_url(chain.rpc_url()).network(Network::BASE_SEPOLIA);
        let facilitator = facilitator.signer(settler).build().await.unwrap();
        Self { chain, facilitator: Arc::new(facilitator) }
    }

    pub async fn open(&self, judge: impl Judge) -> Booth {
        self.open_with(judge, |card| card).await
    }

    /// An evaluator with another card.
    pub async fn open_with(
        &self,
        judge: impl Judge,
        describe: impl FnOnce(AgentCardBuilder) -> AgentCardBuilder,
    ) -> Booth {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let key = PrivateKeySigner::random();
        let card = describe(card(listener.local_addr().unwrap(), key.address()));
        let card = card.build().unwrap().sign(&key).await.unwrap();
        let service = EvaluatorService::builder(card, judge).facilitator(self.facilitator.clone()).build().unwrap();
        let (url, server) = serve(listener, Router::new().fallback_service(service));
        Booth { url, payee: key.address(), server }
    }

    pub async fn payer(&self, units: u64) -> Payer {
        self.payer_with(units, PrivateKeySigner::random(), Journal::in_memory()).await
    }

    pub async fn payer_with(&self, units: u64, key: PrivateKeySigner, journal: Journal) -> Payer {
        self.chain.mint(key.address(), units).await;
        let budget = Budget::builder().per_payment("$1".parse().unwrap()).total(Usdc::from_atomic(units));
        Payer::builder(key).asset(self.chain.asset()).budget(budget.journal(journal).build()).build()
    }

    /// A student that knows these evaluators, and has so many units.
    pub async fn student(
        &self,
        units: u64,
        booths: &[&Booth],
        settings: impl FnOnce(StudentBuilder) -> StudentBuilder,
    ) -> Student {
        let urls: Vec<_> = booths.iter().map(|booth| booth.url.clone()).collect();
        let builder = Student::builder(self.payer(units).await).source(urls).tasks(20).seed(1);
        let student = settings(builder).build().unwrap();
        let report = student.discover().await;
        assert_eq!(report.found.len(), booths.len(), "{report:?}");
        student
    }

    /// What this evaluator got, as the chain has it.
    pub async fn income(&self, booth: &Booth) -> u64 {
        self.chain.balance(booth.payee).await
    }
}

/// The card of an evaluator of prose and arithmetic.
pub fn card(address: SocketAddr, payee: Address) -> AgentCardBuilder {
    AgentCard::builder("The judge", format!("http://{address}"))
        .skill("arithmetic", "Marks sums", Score::new(0.9).unwrap())
        .skill("prose", "Marks style", Score::new(0.9).unwrap())
        .price("$0.001")
        .pay_to(Network::BASE_SEPOLIA, payee)
}

/// Serves a router for as long as the test runs, or until it is aborted.
pub fn serve(listener: TcpListener, router: Router) -> (Url, tokio::task::AbortHandle) {
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let server = tokio::spawn(async { axum::serve(listener, router).await });
    (url, server.abort_handle())
}

/// Gives every output the same score.
pub fn says(score: f64) -> impl Judge {
    output_judge(move |_: Arc<Task>, _: String| async move { Ok(verdict(score)) })
}

/// Gives a high score to outputs with "good" in them, and a low one to others.
pub fn honest() -> impl Judge {
    output_judge(async |_: Arc<Task>, output: String| Ok(verdict(if output.contains("good") { 0.9 } else { 0.1 })))
}

pub fn verdict(score: f64) -> Verdict {
    Verdict::new(Score::new(score).unwrap(), Confidence::new(0.9).unwrap(), "as it seems")
}

pub fn group(outputs: &[&str]) -> Submission {
    Submission::group(task(), outputs.iter().copied()).unwrap()
}

pub fn single(output: &str) -> Submission {
    Submission::single(task(), output).unwrap()
}

pub fn task() -> Task {
    Task::new("prose", "Write.").unwrap().with_id("mine").unwrap()
}

/// Hires the cheapest evaluators.
#[derive(Debug, Default)]
pub struct Cheapest;

impl Selector for Cheapest {
    fn select(&mut self, job: &Job, market: &[Candidate]) -> Vec<usize> {
        let mut order: Vec<_> = (0..market.len()).collect();
        order.sort_unstable_by_key(|position| (market[*position].price, *position));
        job.hire(market, order)
    }

    fn learn(&mut self, _: &Observation) {}
}
