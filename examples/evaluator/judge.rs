//! The judges to choose from, and the card of each.

use std::net::SocketAddr;

use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use anyhow::Context as _;
use clap::ValueEnum;
use tower_x402::{Asset, Usdc};
use tracing::warn;
use url::Url;
use x402_judges::{AlgebraJudge, ArithmeticJudge, ChatClient, CodeJudge, CodeWorkers, LlmJudge, LooksJudge};
use x402_market::{AgentCard, MAX_OUTPUTS, Score, judge::Judge};

use crate::{
    flags::Flags,
    pairs::{MAX_COMPARED, Pairs},
    plain::PlainJudge,
};

const API_KEY: &str = "LLM_API_KEY";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Arithmetic,
    /// Derivations, step by step
    Formal,
    /// Derivations, at many points
    Numeric,
    Prose,
    /// Programs, by hidden tests
    Tests,
    /// Programs, by how their cost grows
    Growth,
    /// Programs, by what is unsafe in them
    Safety,
    /// Programs, by the examples in the prompt
    Example,
    /// Programs, by their looks
    Looks,
    Pairwise,
    Llm,
}

/// A judge, with what its card says.
pub(crate) struct Specialist {
    pub(crate) judge: Box<dyn Judge>,
    pub(crate) skill: String,
    name: &'static str,
    description: String,
    /// How often its verdicts are right, as its card claims: 0 to 1.
    claim: f64,
    /// How many outputs it judges at once.
    max_outputs: usize,
}

impl Specialist {
    /// Returns the judge of exact arithmetic.
    pub(crate) fn of_arithmetic() -> Self {
        Self {
            judge: Box::new(ArithmeticJudge),
            skill: "arithmetic".to_owned(),
            name: "Arithmetic evaluator",
            description: "Exact arithmetic and unit checking of a worked answer".to_owned(),
            claim: 0.99,
            max_outputs: MAX_OUTPUTS,
        }
    }

    /// Returns the judge that the flags select.
    pub(crate) fn of(flags: &Flags) -> anyhow::Result<Self> {
        let model = flags.llm_url.as_ref().map(|url| language_model(flags, &url.0)).transpose()?;
        let (skill, specialty) = (flags.skill.clone(), &flags.specialty);
        let specialist = match (flags.judge, model) {
            (Kind::Arithmetic, _) => Self::of_arithmetic(),
            (kind @ (Kind::Formal | Kind::Numeric), _) => {
                let (judge, how) = match kind {
                    Kind::Formal => (AlgebraJudge::formal(), "exactly, step by step"),
                    _ => (AlgebraJudge::numeric(), "at many points"),
                };
                Self {
                    judge: Box::new(judge),
                    skill: "algebra".to_owned(),
                    name: "Algebra evaluator",
                    description: format!("Derivations with variables, checked {how}"),
                    claim: 0.9,
                    max_outputs: MAX_OUTPUTS,
                }
            }
            (kind @ (Kind::Tests | Kind::Growth | Kind::Safety | Kind::Example | Kind::Looks), _) => {
                let (judge, how, claim) = of_code(kind, flags)?;
                Self {
                    judge,
                    skill: "code".to_owned(),
                    name: "Code evaluator",
                    description: format!("Programs in Starlark, judged by {how}"),
                    claim,
                    // They are judged one after the other, and each may take 4 s.
                    max_outputs: 8,
                }
            }
            (Kind::Prose, _) => Self {
                judge: Box::new(PlainJudge),
                skill: "prose".to_owned(),
                name: "Prose evaluator",
                description: "How easy English prose is to read, measured".to_owned(),
                claim: 0.6,
                max_outputs: MAX_OUTPUTS,
            },
            (Kind::Pairwise, Some(model)) => Self {
                judge: Box::new(Pairs(model)),
                skill: "comparison".to_owned(),
                name: "Pairwise evaluator",
                description: format!("Which of several outputs is better at {specialty}, compared in both orders"),
                claim: 0.75,
                max_outputs: MAX_COMPARED,
            },
            (Kind::Pairwise, None) => Self {
                judge: Box::new(Pairs(PlainJudge)),
                skill: "comparison".to_owned(),
                name: "Pairwise evaluator",
                description: "Which of several texts is easier to read".to_owned(),
                claim: 0.6,
                max_outputs: MAX_COMPARED,
            },
            (Kind::Llm, model) => Self {
                judge: Box::new(model.context("--judge llm needs --llm-url")?),
                skill: "general".to_owned(),
                name: "Model evaluator",
                description: format!("A language model judges {specialty}"),
                claim: 0.75,
                max_outputs: MAX_OUTPUTS,
            },
        };
        Ok(Self { skill: skill.unwrap_or(specialist.skill), ..specialist })
    }

    /// Returns the card, signed if the payee's key is known.
    pub(crate) async fn card(
        &self,
        base: Url,
        price: Usdc,
        (asset, pay_to): (Asset, Address),
        key: Option<&PrivateKeySigner>,
    ) -> anyhow::Result<AgentCard> {
        let card = AgentCard::builder(self.name, base)
            .description(&*self.description)
            .version(env!("CARGO_PKG_VERSION"))
            .skill(&*self.skill, &*self.description, Score::new(self.claim)?)
            .price(price)
            .max_outputs(self.max_outputs)
            .pay_to_in(asset, pay_to)
            .build()?;
        match key.filter(|key| key.address() == pay_to) {
            Some(key) => Ok(card.sign(key).await?),
            None => {
                warn!("the agent card is not signed, so most students will refuse it: set PAYEE_PRIVATE_KEY");
                Ok(card)
            }
        }
    }
}

/// Returns a judge of programs, what it judges by, and what its card claims.
fn of_code(kind: Kind, flags: &Flags) -> anyhow::Result<(Box<dyn Judge>, &'static str, f64)> {
    if kind == Kind::Looks {
        return Ok((Box::new(LooksJudge), "their looks", 0.6));
    }
    let worker = flags.code_worker.as_ref().context("judges of programs need --code-worker")?;
    let workers = CodeWorkers::new(worker, std::thread::available_parallelism()?.get());
    // Any 32 random bytes: whoever knows them knows the hidden tests.
    let secret = PrivateKeySigner::random().to_bytes().0;
    Ok(match kind {
        Kind::Tests => (Box::new(CodeJudge::tests(workers, secret)), "hidden tests", 0.9),
        Kind::Growth => (Box::new(CodeJudge::growth(workers, secret)), "how their cost grows", 0.5),
        Kind::Safety => (Box::new(CodeJudge::safety(workers)), "what is unsafe in them", 0.5),
        _ => (Box::new(CodeJudge::example(workers)), "the examples in the prompt", 0.5),
    })
}

/// Returns the base URL of the evaluator.
pub(crate) fn base(flags: &Flags, listening: SocketAddr) -> anyhow::Result<Url> {
    match &flags.public_url {
        // The whole URL of /evaluate.
        Some(url) if url.has_path() => Ok(url.0.parse::<Url>()?.join(".")?),
        Some(url) => Ok(url.0.parse()?),
        None => Ok(format!("http://{listening}").parse()?),
    }
}

fn language_model(flags: &Flags, url: &str) -> anyhow::Result<LlmJudge> {
    let mut model = ChatClient::new(url, &*flags.llm_model).context("--llm-url")?.json_mode(true);
    if let Ok(key) = std::env::var(API_KEY) {
        model = model.api_key(&key).context(API_KEY)?;
    }
    Ok(LlmJudge::builder(model).specialty(&*flags.specialty).build())
}
