//! An OpenAI-compatible endpoint.

use std::{fmt, time::Duration};

use reqwest::{
    Client, Response, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER},
    redirect,
};
use serde::{Deserialize, Serialize};
use url::Url;

use super::LlmJudgeError;
use crate::market::{CardError, agent_card::below, card_fetcher::read, judge::JudgeError};

/// The pause before a request is tried again, doubled each time, where the endpoint names none.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// A longer `Retry-After` is passed on to the student.
const LONGEST_PAUSE: Duration = Duration::from_secs(20);

/// An API key, never shown.
#[derive(Clone)]
pub(super) struct Secret(pub(super) String);

#[derive(Clone)]
pub(super) struct Endpoint {
    http: Client,
    url: Url,
    model: String,
    authorization: Option<HeaderValue>,
    max_answer: usize,
    retries: u32,
    json_mode: bool,
}

/// A message of the conversation with the model.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ChatMessage {
    role: &'static str,
    content: String,
}

impl ChatMessage {
    pub(super) const fn system(content: String) -> Self {
        Self { role: "system", content }
    }

    pub(super) const fn user(content: String) -> Self {
        Self { role: "user", content }
    }

    pub(super) const fn assistant(content: String) -> Self {
        Self { role: "assistant", content }
    }
}

#[derive(Serialize)]
struct ChatRequest<'a> {
    model: &'a str,
    messages: &'a [ChatMessage],
    temperature: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<ResponseFormat>,
}

#[derive(Serialize)]
struct ResponseFormat {
    r#type: &'static str,
}

#[derive(Deserialize)]
struct ChatResponse {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    message: Content,
}

#[derive(Deserialize)]
struct Content {
    content: Option<String>,
}

/// Why there is no answer yet.
struct Trouble {
    what: String,
    /// Whether trying again may help, and what the endpoint says about when.
    again: Option<Option<Duration>>,
}

impl Endpoint {
    pub(super) fn new(
        base: &Url,
        model: String,
        key: Option<Secret>,
        max_answer: usize,
        retries: u32,
        json_mode: bool,
    ) -> Result<Self, LlmJudgeError> {
        let url = below(base, "chat/completions").ok_or(LlmJudgeError::Url)?;
        let authorization = key.map(|Secret(key)| {
            let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| LlmJudgeError::Key)?;
            value.set_sensitive(true);
            Ok(value)
        });
        let http = Client::builder().redirect(redirect::Policy::none()).connect_timeout(Duration::from_secs(10));
        let http = http.build().map_err(LlmJudgeError::Client)?;
        Ok(Self { http, url, model, authorization: authorization.transpose()?, max_answer, retries, json_mode })
    }

    /// The model's next message.
    pub(super) async fn chat(&self, messages: &[ChatMessage]) -> Result<String, JudgeError> {
        let mut pause = FIRST_PAUSE;
        for attempt in 0.. {
            let trouble = match self.ask(messages).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            let Some(named) = trouble.again else { return Err(JudgeError::failed(trouble.what)) };
            let wait = named.unwrap_or(pause);
            if attempt >= self.retries || wait > LONGEST_PAUSE {
                return Err(match named {
                    Some(retry_after) => JudgeError::Busy { retry_after },
                    None => JudgeError::failed(trouble.what),
                });
            }
            tracing::debug!(trouble = trouble.what, ?wait, "the model is asked again");
            tokio::time::sleep(wait).await;
            pause *= 2;
        }
        Err(JudgeError::failed("the model was never asked"))
    }

    async fn ask(&self, messages: &[ChatMessage]) -> Result<String, Trouble> {
        let response_format = self.json_mode.then_some(ResponseFormat { r#type: "json_object" });
        let request = ChatRequest { model: &self.model, messages, temperature: 0.0, response_format };
        let body = serde_json::to_vec(&request).map_err(|error| Trouble::final_(error.to_string()))?;
        let mut post = self.http.post(self.url.clone()).header(CONTENT_TYPE, "application/json").body(body);
        if let Some(authorization) = &self.authorization {
            post = post.header(AUTHORIZATION, authorization.clone());
        }
        let response = post.send().await.map_err(|error| Trouble::passing(error.without_url().to_string(), None))?;
        let status = response.status();
        if status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() {
            return Err(Trouble::passing(format!("the model's endpoint answered {status}"), retry_after(&response)));
        }
        if !status.is_success() {
            return Err(Trouble::final_(format!("the model's endpoint answered {status}")));
        }
        let json = read(response, self.max_answer).await.map_err(|error| match error {
            CardError::Unreachable(error) => Trouble::passing(error.to_string(), None),
            _ => Trouble::final_(format!("the model's endpoint answered more than {} bytes", self.max_answer)),
        })?;
        let answer: ChatResponse = serde_json::from_slice(&json).map_err(|error| {
            Trouble::final_(format!("the model's endpoint does not speak as OpenAI's does: {error}"))
        })?;
        let content = answer.choices.into_iter().next().and_then(|choice| choice.message.content);
        content.ok_or_else(|| Trouble::final_("the model said nothing".to_owned()))
    }
}

impl Trouble {
    const fn final_(what: String) -> Self {
        Self { what, again: None }
    }

    const fn passing(what: String, retry_after: Option<Duration>) -> Self {
        Self { what, again: Some(retry_after) }
    }
}

/// Seconds, or a date (RFC 9110, section 10.2.3).
fn retry_after(response: &Response) -> Option<Duration> {
    let text = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(std::time::SystemTime::now()).unwrap_or_default())
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.url.origin().ascii_serialization();
        f.debug_struct("Endpoint").field("at", &place).field("model", &self.model).finish_non_exhaustive()
    }
}
