//! The source of answers: the policy in this process, or a model.

use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use tokio::{task::JoinSet, time::timeout};
use x402_judges::{ChatClient, ChatMessage};

use crate::{
    flags::Flags,
    policy::{Action, Policy, Problem, Rng, answer, log_probabilities},
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
    /// The log-probability of each byte and of the end.
    pub(crate) logprobs: Option<Vec<f64>>,
}

/// The source of answers.
pub(crate) enum Answerer {
    /// The policy in this process.
    Here,
    /// A model behind an endpoint.
    Model(ChatClient),
}

impl Answerer {
    pub(crate) fn of(flags: &Flags) -> anyhow::Result<Self> {
        let Some(url) = &flags.policy_url else { return Ok(Self::Here) };
        let model = ChatClient::new(url, &flags.policy_model).context("--policy-url")?.temperature(1.0);
        match std::env::var("POLICY_API_KEY") {
            Ok(key) => Ok(Self::Model(model.api_key(&key).context("POLICY_API_KEY")?)),
            Err(_) => Ok(Self::Model(model)),
        }
    }

    pub(crate) const fn is_here(&self) -> bool {
        matches!(self, Self::Here)
    }

    /// Returns the prompt.
    pub(crate) const fn instruction(&self) -> Option<&'static str> {
        match self {
            Self::Here => None,
            Self::Model(_) => Some(INSTRUCTION),
        }
    }

    /// Returns several answers to a problem.
    pub(crate) async fn answers(
        &self,
        policy: &Policy,
        problem: &Problem,
        count: usize,
        rng: &mut Rng,
    ) -> anyhow::Result<Vec<Rollout>> {
        match self {
            Self::Here => {
                let draw = |_| {
                    let action = policy.sample(problem.kind, rng);
                    let text = answer(problem, action);
                    let logprobs = log_probabilities(policy, problem, &text);
                    Rollout { text, action: Some(action), logprobs }
                };
                Ok((0..count).map(draw).collect())
            }
            Self::Model(model) => ask(model, &problem.prompt, count).await,
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
        answers.push(Rollout { text, action: None, logprobs: None });
    }
    Ok(answers)
}
