//! The market: a chain, evaluators on ports, and students that pay them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use alloy_primitives::{Address, U256, keccak256};
use alloy_signer_local::PrivateKeySigner;
use anyhow::{Context as _, ensure};
use async_trait::async_trait;
use axum::Router;
use tokio::{net::TcpListener, task::AbortHandle};
use tower_x402::{
    ManualClock, Usdc,
    client::{Budget, Payer},
    facilitator::OnchainFacilitator,
};
use url::Url;
use x402_devnet::Devnet;
use x402_market::{AgentCard, CardSource, EvaluatorService, Score, SourceError, StudentBuilder};

use super::{
    judges::SellersJudge,
    world::{ASPECTS, Errors, Seller, sellers},
};

/// The settlement key's ether at the start, in wei.
const GAS_TANK: u128 = 1_000_000_000_000_000_000_000;
/// The students' time, in Unix seconds. Their clock stands still.
pub(crate) const NOW: u64 = 1_800_000_000;

/// A chain with its own market.
pub(crate) struct Stage {
    devnet: Devnet,
    seed: u64,
    pub(crate) booths: Vec<Booth>,
}

/// An evaluator on a port, which closes on drop.
pub(crate) struct Booth {
    pub(crate) payee: Address,
    url: Url,
    server: AbortHandle,
}

impl Drop for Booth {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Stage {
    /// Starts a market. Keys and addresses depend only on `seed`; ports do not.
    pub(crate) async fn open(seed: u64, errors: Errors) -> anyhow::Result<Self> {
        let devnet = Devnet::start().await?;
        let settler = key(seed, "settler", 0)?;
        devnet.fund(settler.address(), U256::from(GAS_TANK));
        let settling = OnchainFacilitator::builder().network(devnet.network()).client(devnet.rpc_client());
        let facilitator = settling.signer(settler).build().await?;
        let mut booths = Vec::new();
        for (number, seller) in sellers(errors, seed).into_iter().enumerate() {
            let payee = key(seed, "seller", number)?;
            booths.push(Booth::open(seller, &payee, &devnet, &facilitator).await?);
        }
        Ok(Self { devnet, seed, booths })
    }

    /// Returns a student with `budget`, funded on the chain. `name` selects its key.
    pub(crate) fn student(
        &self,
        name: &str,
        budget: Usdc,
    ) -> anyhow::Result<(StudentBuilder, Address, Arc<AtomicUsize>)> {
        let key = key(self.seed, name, 0)?;
        let payer = key.address();
        self.devnet.mint(payer, budget)?;
        let limits = Budget::builder().per_payment(Usdc::MAX).total(budget).build();
        let paying = Payer::builder(key).asset(self.devnet.asset()).budget(limits).build();
        let shown = Arc::new(AtomicUsize::new(0));
        let urls = self.booths.iter().map(|booth| booth.url.clone()).collect();
        let student = x402_market::Student::builder(paying)
            .source(OneByOne { urls, shown: shown.clone() })
            .clock(Arc::new(ManualClock::at(NOW)))
            // One call at a time, because what is learned depends on the order of answers.
            .max_concurrent_calls(1)
            // No call times out, however busy the machine is.
            .deadline(std::time::Duration::from_secs(300));
        Ok((student, payer, shown))
    }

    /// Returns an account's balance on the chain.
    pub(crate) fn balance(&self, account: Address) -> anyhow::Result<u64> {
        Ok(self.devnet.balance_of(account)?.atomic())
    }

    /// Returns what all evaluators received together.
    pub(crate) fn income(&self) -> anyhow::Result<u64> {
        self.booths.iter().map(|booth| self.balance(booth.payee)).sum()
    }
}

/// Has a student find all evaluators one by one, in the order of the world.
pub(crate) async fn introduce(
    student: &x402_market::Student,
    shown: &AtomicUsize,
    booths: &[Booth],
) -> anyhow::Result<()> {
    for known in 1..=booths.len() {
        shown.store(known, Ordering::Relaxed);
        let report = student.discover().await;
        ensure!(report.refused.is_empty() && student.known_evaluators() == known, "not everyone was found: {report:?}");
    }
    Ok(())
}

/// A source that names as many evaluators as it may show so far.
struct OneByOne {
    urls: Vec<Url>,
    shown: Arc<AtomicUsize>,
}

#[async_trait]
impl CardSource for OneByOne {
    async fn evaluators(&self) -> Result<Vec<Url>, SourceError> {
        Ok(self.urls.iter().take(self.shown.load(Ordering::Relaxed)).cloned().collect())
    }

    fn is_untrusted(&self) -> bool {
        false
    }
}

impl Booth {
    async fn open(
        seller: Seller,
        payee: &PrivateKeySigner,
        devnet: &Devnet,
        facilitator: &OnchainFacilitator,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url: Url = format!("http://{}", listener.local_addr()?).parse()?;
        let mut card = AgentCard::builder(seller.name, url.clone());
        for (aspect, claim) in ASPECTS.into_iter().zip(seller.claims) {
            card = card.skill(aspect.skill(), aspect.rubric(), Score::new(claim)?);
        }
        let card = card.price(Usdc::from_atomic(seller.price)).pay_to(devnet.network(), payee.address());
        let card = card.build()?.sign(payee).await?;
        let service = EvaluatorService::builder(card, SellersJudge(seller)).facilitator(facilitator.clone()).build()?;
        let router = Router::new().fallback_service(service);
        let server = tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle();
        Ok(Self { payee: payee.address(), url, server })
    }
}

/// Returns a key that is the same in every run. It protects nothing: the chain ends with the program.
fn key(seed: u64, role: &str, number: usize) -> anyhow::Result<PrivateKeySigner> {
    PrivateKeySigner::from_bytes(&keccak256(format!("{role} {number} of {seed}"))).context("not a key")
}
