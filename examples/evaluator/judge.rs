//! The judges to choose from, and the card of each.

use std::net::SocketAddr;

use alloy_primitives::Address;
use alloy_signer_local::PrivateKeySigner;
use anyhow::Context as _;
use clap::ValueEnum;
use tower_x402::{Asset, Usdc};
use tracing::warn;
use url::Url;
use x402_judges::{ArithmeticJudge, ChatClient, LlmJudge, MAX_COMPARED, PairwiseJudge, ProseJudge};
use x402_market::{AgentCard, MAX_OUTPUTS, Score, judge::Judge};

use crate::flags::Flags;

const API_KEY: &str = "LLM_API_KEY";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Arithmetic,
    Prose,
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
            (Kind::Prose, _) => Self {
                judge: Box::new(ProseJudge),
                skill: "prose".to_owned(),
                name: "Prose evaluator",
                description: "How easy English prose is to read, measured".to_owned(),
                claim: 0.6,
                max_outputs: MAX_OUTPUTS,
            },
            (Kind::Pairwise, Some(model)) => Self {
                judge: Box::new(PairwiseJudge::new(model)),
                skill: "comparison".to_owned(),
                name: "Pairwise evaluator",
                description: format!("Which of several outputs is better at {specialty}, compared in both orders"),
                claim: 0.75,
                max_outputs: MAX_COMPARED,
            },
            (Kind::Pairwise, None) => Self {
                judge: Box::new(PairwiseJudge::new(ProseJudge)),
                skill: "comparison".to_owned(),
                name: "Pairwise evaluator",
                description: "Which of several texts is easier to read, compared in both orders".to_owned(),
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
