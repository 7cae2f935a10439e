//! A market in this process: a chain, and evaluators of different price and quality.

use std::sync::Arc;

use alloy_primitives::{Address, U256, keccak256};
use alloy_signer_local::PrivateKeySigner;
use anyhow::Context as _;
use async_trait::async_trait;
use axum::Router;
use tokio::net::TcpListener;
use tower_x402::{
    channels::Channels,
    facilitator::{OnchainFacilitator, channels::OnchainChannels},
    ledger::MemoryLedger,
    vouchers::AuthorizerKey,
};
use url::Url;
use x402_devnet::{Devnet, DevnetPort};
use x402_judges::{ArithmeticJudge, CodeJudge, CodeWorkers};
use x402_market::{
    AgentCard, Confidence, EvaluatorService, Score, Submission, Verdict,
    judge::{Judge, JudgeError},
};

use crate::{
    flags::{Flags, Tasks},
    policy::PlainJudge,
};

/// What each key that pays for gas gets: one ether, in wei.
const GAS_TANK: u64 = 1_000_000_000_000_000_000;

/// The chain and the evaluators. They end with the process.
pub(crate) struct Hall {
    pub(crate) devnet: Devnet,
    pub(crate) rpc_url: Url,
    pub(crate) evaluators: Vec<Url>,
    _port: DevnetPort,
}

/// The description of an evaluator.
struct Stall {
    name: &'static str,
    price: &'static str,
    /// Each skill with the worth that the card claims, and how often it does not err.
    skills: &'static [(&'static str, f64, f64)],
}

/// The evaluators. Their cards say little about their quality.
const STALLS: [Stall; 5] = [
    Stall { name: "Exact", price: "$0.0004", skills: &[("arithmetic", 0.95, 1.0)] },
    Stall { name: "Plain English", price: "$0.0003", skills: &[("prose", 0.9, 1.0)] },
    Stall { name: "Bargain", price: "$0.0001", skills: &[("arithmetic", 0.9, 0.7), ("prose", 0.9, 0.7)] },
    Stall { name: "Boaster", price: "$0.0004", skills: &[("arithmetic", 0.99, 0.5), ("prose", 0.99, 0.5)] },
    Stall { name: "Department", price: "$0.0009", skills: &[("arithmetic", 0.9, 0.9), ("prose", 0.9, 0.9)] },
];

/// Those that judge programs.
const OF_CODE: [Stall; 5] = [
    Stall { name: "Hidden tests", price: "$0.0004", skills: &[("code", 0.95, 1.0)] },
    Stall { name: "Growth", price: "$0.0004", skills: &[("growth", 0.9, 1.0)] },
    Stall { name: "Safety", price: "$0.0002", skills: &[("safety", 0.9, 1.0)] },
    Stall { name: "Bargain", price: "$0.0001", skills: &[("code", 0.9, 0.7), ("safety", 0.9, 0.7)] },
    Stall { name: "Boaster", price: "$0.0004", skills: &[("code", 0.99, 0.5), ("growth", 0.99, 0.5)] },
];

impl Hall {
    /// Starts the market and gives the payer its budget.
    pub(crate) async fn open(payer: Address, flags: &Flags) -> anyhow::Result<Self> {
        let (stalls, workers) = match flags.tasks {
            Tasks::Words => (&STALLS, None),
            Tasks::Code => {
                let worker = flags.code_worker.as_ref().context("evaluators of programs need --code-worker")?;
                (&OF_CODE, Some(CodeWorkers::new(worker, std::thread::available_parallelism()?.get())))
            }
        };
        let devnet = Devnet::start().await?;
        devnet.mint(payer, flags.budget)?;
        let settler = PrivateKeySigner::random();
        devnet.fund(settler.address(), U256::from(GAS_TANK));
        let facilitator = OnchainFacilitator::builder().network(devnet.network()).client(devnet.rpc_client());
        let facilitator = facilitator.signer(settler.clone()).build().await?;
        let contract = OnchainChannels::builder().facilitator(&facilitator).build().await?;
        let channels = Channels::builder(contract, AuthorizerKey::new(settler)).ledger(Arc::new(MemoryLedger::new()));
        let channels = channels.build()?;
        let mut evaluators = Vec::new();
        for stall in stalls {
            evaluators.push(stall.open(&devnet, &facilitator, &channels, workers.clone()).await?);
        }
        let port = devnet.serve("127.0.0.1:0").await?;
        Ok(Self { rpc_url: port.url().clone(), devnet, evaluators, _port: port })
    }
}

impl Stall {
    async fn open(
        &self,
        devnet: &Devnet,
        facilitator: &OnchainFacilitator,
        channels: &Channels,
        workers: Option<CodeWorkers>,
    ) -> anyhow::Result<Url> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url: Url = format!("http://{}", listener.local_addr()?).parse()?;
        let key = PrivateKeySigner::random();
        let mut card = AgentCard::builder(self.name, url.clone());
        for (skill, claim, _) in self.skills {
            card = card.skill(*skill, format!("Judges {skill}"), Score::new(*claim)?);
        }
        let card = card.price(self.price).pay_to(devnet.network(), key.address()).build()?.sign(&key).await?;
        // Whoever knows the secret knows the hidden tests.
        let secret = PrivateKeySigner::random().to_bytes().0;
        let judge = Fallible { name: self.name, skills: self.skills, workers, secret };
        let evaluator = EvaluatorService::builder(card, judge).facilitator(facilitator.clone());
        let evaluator = evaluator.paywall(|paywall| paywall.vouchers(channels.clone())).build()?;
        tokio::spawn(async { axum::serve(listener, Router::new().fallback_service(evaluator)).await });
        Ok(url)
    }
}

/// The crate's judge of the skill, whose verdict is inverted as often as this evaluator errs.
struct Fallible {
    name: &'static str,
    skills: &'static [(&'static str, f64, f64)],
    /// Where judges of programs run them.
    workers: Option<CodeWorkers>,
    secret: [u8; 32],
}

#[async_trait]
impl Judge for Fallible {
    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        let skill = &*submission.task.skill;
        let accuracy = self.skills.iter().find(|(name, ..)| *name == skill).map_or(0.5, |(.., accuracy)| *accuracy);
        let verdicts = match (skill, self.workers.clone()) {
            ("code", Some(workers)) => CodeJudge::tests(workers, self.secret).judge(submission).await?,
            ("growth", Some(workers)) => CodeJudge::growth(workers, self.secret).judge(submission).await?,
            ("safety", Some(workers)) => CodeJudge::safety(workers).judge(submission).await?,
            ("prose", _) => PlainJudge.judge(submission).await?,
            _ => ArithmeticJudge.judge(submission).await?,
        };
        let outputs = submission.outputs().iter();
        Ok(outputs.zip(verdicts).map(|(output, verdict)| self.maybe_wrong(output, verdict, accuracy)).collect())
    }
}

impl Fallible {
    fn maybe_wrong(&self, output: &str, verdict: Verdict, accuracy: f64) -> Verdict {
        // Depends on the output only, so that asking twice does not help.
        let hash = keccak256([self.name.as_bytes(), output.as_bytes()].concat());
        let luck = f64::from(u16::from_be_bytes([hash[0], hash[1]])) / f64::from(u16::MAX);
        if luck < accuracy {
            return verdict;
        }
        let score = Score::clamped(1.0 - verdict.score.get());
        Verdict::new(score, Confidence::clamped(0.9), "A matter of experience.")
    }
}
