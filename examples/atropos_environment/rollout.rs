//! The source of answers: the policy in this process, or a model.

use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use tokio::{task::JoinSet, time::timeout};
use x402_judges::{ChatClient, ChatMessage};

use crate::{
    flags::{Flags, Tasks},
    model::TokenModel,
    policy::{Action, Policy, Rng, answer, log_probabilities},
    tasks::Question,
};

/// How long one answer of a model may take, including retries.
const PATIENCE: Duration = Duration::from_secs(120);
/// The longest answer, in characters; longer ones are cut.
const LONGEST: usize = 8_000;
const INSTRUCTION: &str = "Solve the problem. Explain each step in a short sentence with its equation. End with a line of the form \
                           \"Answer: 42 km\", with the unit.";

/// An answer, with what the trainer needs to know of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rollout {
    pub(crate) text: String,
    /// The action of the policy in this process.
    pub(crate) action: Option<Action>,
    /// The tokens, if the model told them. Otherwise the bytes are the tokens.
    #[serde(default)]
    pub(crate) tokens: Option<Tokens>,
    /// The log-probability of each token of the answer; for bytes, also of the end.
    pub(crate) logprobs: Option<Vec<f64>>,
}

/// The tokens of a prompt and of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tokens {
    pub(crate) prompt: Vec<u32>,
    pub(crate) completion: Vec<u32>,
}

/// The source of answers.
pub(crate) enum Answerer {
    /// The policy in this process.
    Here,
    /// A model behind an endpoint.
    Model(ChatClient),
    /// A model behind an endpoint that writes programs, and tells its tokens.
    Programmer(TokenModel),
}

impl Answerer {
    pub(crate) fn of(flags: &Flags) -> anyhow::Result<Self> {
        let Some(url) = &flags.policy_url else { return Ok(Self::Here) };
        let key = std::env::var("POLICY_API_KEY").ok();
        if flags.tasks == Tasks::Code {
            return Ok(Self::Programmer(TokenModel::new(url, &flags.policy_model, key, PATIENCE)?));
        }
        let model = ChatClient::new(url, &flags.policy_model).context("--policy-url")?.temperature(1.0);
        match key {
            Some(key) => Ok(Self::Model(model.api_key(&key).context("POLICY_API_KEY")?)),
            None => Ok(Self::Model(model)),
        }
    }

    pub(crate) const fn is_here(&self) -> bool {
        matches!(self, Self::Here)
    }

    /// Returns the prompt.
    pub(crate) const fn instruction(&self) -> Option<&'static str> {
        match self {
            Self::Here | Self::Programmer(_) => None,
            Self::Model(_) => Some(INSTRUCTION),
        }
    }

    /// Returns several answers to a question.
    pub(crate) async fn answers(
        &self,
        policy: &Policy,
        question: &Question,
        count: usize,
        rng: &mut Rng,
    ) -> anyhow::Result<Vec<Rollout>> {
        match (self, question) {
            (Self::Here, Question::Words(problem)) => {
                let draw = |_| {
                    let action = policy.sample(problem.kind, rng);
                    let text = answer(problem, action);
                    let logprobs = log_probabilities(policy, problem, &text);
                    Rollout { text, action: Some(action), tokens: None, logprobs }
                };
                Ok((0..count).map(draw).collect())
            }
            (Self::Here, Question::Program(_)) => bail!("programs are written by the model at --policy-url"),
            (Self::Model(model), _) => ask(model, question.prompt(), count).await,
            (Self::Programmer(model), _) => model.ask(question.prompt(), count).await,
        }
    }
}

/// Asks the model for several answers at once.
async fn ask(model: &ChatClient, prompt: &str, count: usize) -> anyhow::Result<Vec<Rollout>> {
    let mut asked = JoinSet::new();
    for _ in 0..count {
        let model = model.clone();
        let messages = [ChatMessage::system(INSTRUCTION), ChatMessage::user(prompt)];
        asked.spawn(async move { timeout(PATIENCE, model.ask(&messages)).await });
    }
    let mut answers = Vec::with_capacity(count);
    while let Some(answer) = asked.join_next().await {
        let Ok(answer) = answer? else { bail!("--policy-url: the model did not answer within {PATIENCE:?}") };
        let text: String = answer.context("--policy-url")?.chars().take(LONGEST).collect();
        // A trainer cannot learn from an empty answer.
        let text = if text.is_empty() { "(nothing)".to_owned() } else { text };
        answers.push(Rollout { text, action: None, tokens: None, logprobs: None });
    }
    Ok(answers)
}
