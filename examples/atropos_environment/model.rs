//! A model that says with which tokens it answered, and how likely each was.

use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE};
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, sleep};
use url::Url;
use x402_market::shared::{below, read_body};

use crate::rollout::{Rollout, Tokens};

/// The longest response, in bytes.
const LONGEST: usize = 4 << 20;
const PAUSE: Duration = Duration::from_secs(1);

/// An OpenAI-compatible endpoint. Token ids are asked for as of vLLM, with `return_token_ids`.
pub(crate) struct TokenModel {
    http: reqwest::Client,
    url: Url,
    model: String,
    key: Option<String>,
    patience: Duration,
}

#[derive(Deserialize)]
struct Response {
    prompt_token_ids: Option<Vec<u32>>,
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
    token_ids: Option<Vec<u32>>,
    logprobs: Option<Logprobs>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Vec<Logprob>,
}

#[derive(Deserialize)]
struct Logprob {
    logprob: f64,
}

impl TokenModel {
    pub(crate) fn new(base: &Url, model: &str, key: Option<String>, patience: Duration) -> anyhow::Result<Self> {
        let url = below(base, "chat/completions").context("--policy-url: not an http or https URL")?;
        let http = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build()?;
        Ok(Self { http, url, model: model.to_owned(), key, patience })
    }

    /// Returns several answers to a prompt. A model that is being restarted is waited for.
    pub(crate) async fn ask(&self, prompt: &str, count: usize) -> anyhow::Result<Vec<Rollout>> {
        let until = Instant::now() + self.patience;
        let response = loop {
            match self.try_ask(prompt, count).await {
                Ok(response) => break response,
                Err(error) if Instant::now() >= until => return Err(error).context("--policy-url"),
                Err(_) => sleep(PAUSE).await,
            }
        };
        let response: Response = serde_json::from_slice(&response).context("--policy-url: not a chat completion")?;
        if response.choices.len() != count {
            bail!("--policy-url: the model gave {} of {count} answers", response.choices.len());
        }
        let prompt = response.prompt_token_ids;
        let rollout = |Choice { message, token_ids, logprobs }: Choice| {
            let text = message.content.filter(|text| !text.is_empty()).unwrap_or_else(|| "(nothing)".to_owned());
            let tokens = prompt.clone().zip(token_ids).map(|(prompt, completion)| Tokens { prompt, completion });
            let logprobs: Option<Vec<f64>> =
                logprobs.map(|all| all.content.into_iter().map(|one| one.logprob).collect());
            // Those of a model's tokens say nothing about bytes.
            let logprobs = logprobs
                .filter(|logprobs| tokens.as_ref().is_some_and(|tokens| tokens.completion.len() == logprobs.len()));
            Rollout { text, action: None, tokens, logprobs }
        };
        Ok(response.choices.into_iter().map(rollout).collect())
    }

    async fn try_ask(&self, prompt: &str, count: usize) -> anyhow::Result<Vec<u8>> {
        let body = json!({
            "model": self.model, "messages": [{ "role": "user", "content": prompt }], "n": count, "temperature": 1.0,
            "logprobs": true, "return_token_ids": true,
        });
        let mut request = self.http.post(self.url.clone()).header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.timeout(self.patience).body(body.to_string());
        let response = request.send().await.map_err(reqwest::Error::without_url)?;
        let status = response.status();
        if !status.is_success() {
            bail!("the model's endpoint answered {status}");
        }
        read_body(response, LONGEST).await.map_err(|_| anyhow!("the model's answer broke off or is too long"))
    }
}
