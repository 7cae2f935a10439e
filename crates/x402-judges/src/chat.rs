//! A client of language models behind OpenAI-compatible endpoints.

use std::time::Duration;

use reqwest::{
    Client, Response, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER},
    redirect,
};
use serde::Serialize;
use serde_json::{Value, json};
use url::Url;

use x402_market::shared::{BodyError, below, read_body};

/// The pause before the first retry, doubled each time, unless the endpoint names one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The largest response of the endpoint, in bytes.
const MAX_ANSWER: usize = 256 * 1024;
/// A longer pause is not waited for, but returned as [`ChatError::Busy`].
const LONGEST_PAUSE: Duration = Duration::from_secs(20);

/// A client of a language model behind an OpenAI-compatible endpoint (`POST …/chat/completions`).
///
/// A request is retried after 429, 5xx or no answer, after the time that `Retry-After` names. The client sets no deadline: use
/// `tokio::time::timeout`.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_judges::{ChatClient, ChatMessage};
///
/// let model = ChatClient::new("http://127.0.0.1:11434/v1", "llama3.1")?.temperature(1.0);
/// println!("{}", model.ask(&[ChatMessage::user("What is 17 * 23?")]).await?);
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use]
pub struct ChatClient {
    http: Client,
    url: Url,
    model: String,
    authorization: Option<HeaderValue>,
    temperature: f32,
    retries: u32,
    json_mode: bool,
}

/// A message of a conversation with a language model.
#[derive(Clone, Debug, Serialize)]
pub struct ChatMessage {
    role: &'static str,
    content: String,
}

/// A language model gave no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The endpoint is not an http or https URL.
    #[error("the endpoint is not an http or https URL")]
    Url,
    /// The API key has characters that are not allowed in a header.
    #[error("the API key cannot be sent in a header")]
    Key,
    /// The HTTP client could not be created.
    #[error("the HTTP client could not be created")]
    Client(#[source] reqwest::Error),
    /// The endpoint is busy for longer than is waited for. Try again later.
    #[error("the model's endpoint is busy; try again in {retry_after:?}")]
    Busy {
        /// How long to wait.
        retry_after: Duration,
    },
    /// The endpoint could not be reached, refused, or is not OpenAI-compatible.
    #[error("{0}")]
    Failed(String),
}

impl ChatMessage {
    /// Creates a system message: the instructions for the model.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system", content: content.into() }
    }

    /// Creates a user message: the question.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user", content: content.into() }
    }

    /// Creates an assistant message: an earlier answer of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: "assistant", content: content.into() }
    }
}

#[derive(Serialize)]
struct ChatRequest<'a> {
    model: &'a str,
    messages: &'a [ChatMessage],
    temperature: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<Value>,
}

/// A request that failed.
enum Failed {
    /// A retry would not help.
    Finally(String),
    /// A retry may help. With the pause that the endpoint names.
    Temporarily(String, Option<Duration>),
}

impl ChatClient {
    /// Creates a client of this model. `base` is the URL below which `chat/completions` is.
    ///
    /// # Errors
    /// [`ChatError::Url`] or [`ChatError::Client`].
    pub fn new(base: impl AsRef<str>, model: impl Into<String>) -> Result<Self, ChatError> {
        let base = Url::parse(base.as_ref()).map_err(|_| ChatError::Url)?;
        let url = below(&base, "chat/completions").ok_or(ChatError::Url)?;
        let http = Client::builder().redirect(redirect::Policy::none()).connect_timeout(Duration::from_secs(10));
        let http = http.build().map_err(ChatError::Client)?;
        Ok(Self { http, url, model: model.into(), authorization: None, temperature: 0.0, retries: 3, json_mode: false })
    }

    /// Sets the API key, which is sent as `Authorization: Bearer …` and never shown.
    ///
    /// # Errors
    /// [`ChatError::Key`] if the key cannot be sent in a header.
    pub fn api_key(mut self, key: &str) -> Result<Self, ChatError> {
        let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| ChatError::Key)?;
        value.set_sensitive(true);
        self.authorization = Some(value);
        Ok(self)
    }

    /// Sets the sampling temperature. Default: 0, for the least random answers.
    pub const fn temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// Sets how often a request is retried after 429, 5xx or no answer. Default: 3.
    pub const fn retries(mut self, retries: u32) -> Self {
        self.retries = retries;
        self
    }

    /// Sets whether `response_format` asks for JSON. Default: `false`, because some endpoints refuse it.
    pub const fn json_mode(mut self, ask: bool) -> Self {
        self.json_mode = ask;
        self
    }

    /// Sends the conversation, and returns the model's answer.
    ///
    /// # Errors
    /// [`ChatError::Busy`] or [`ChatError::Failed`].
    pub async fn ask(&self, messages: &[ChatMessage]) -> Result<String, ChatError> {
        let mut pause = FIRST_PAUSE;
        for attempt in 0.. {
            let (failed, named) = match self.once(messages).await {
                Ok(answer) => return Ok(answer),
                Err(Failed::Finally(failed)) => return Err(ChatError::Failed(failed)),
                Err(Failed::Temporarily(failed, named)) => (failed, named),
            };
            let wait = named.unwrap_or(pause);
            if attempt >= self.retries || wait > LONGEST_PAUSE {
                return Err(match named {
                    Some(retry_after) => ChatError::Busy { retry_after },
                    None => ChatError::Failed(failed),
                });
            }
            tracing::debug!(failed, ?wait, "the request to the model is retried");
            tokio::time::sleep(wait).await;
            pause *= 2;
        }
        Err(ChatError::Failed("the model was never asked".to_owned()))
    }

    async fn once(&self, messages: &[ChatMessage]) -> Result<String, Failed> {
        let response_format = self.json_mode.then(|| json!({ "type": "json_object" }));
        let request = ChatRequest { model: &self.model, messages, temperature: self.temperature, response_format };
        let body = serde_json::to_vec(&request).map_err(|error| Failed::Finally(error.to_string()))?;
        let mut post = self.http.post(self.url.clone()).header(CONTENT_TYPE, "application/json").body(body);
        if let Some(authorization) = &self.authorization {
            post = post.header(AUTHORIZATION, authorization.clone());
        }
        let response = post.send().await.map_err(|error| Failed::Temporarily(error.without_url().to_string(), None))?;
        let status = response.status();
        if status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() {
            return Err(Failed::Temporarily(format!("the model's endpoint answered {status}"), retry_after(&response)));
        }
        if !status.is_success() {
            return Err(Failed::Finally(format!("the model's endpoint answered {status}")));
        }
        let json = read_body(response, MAX_ANSWER).await.map_err(|error| match error {
            BodyError::Broken(error) => Failed::Temporarily(error.to_string(), None),
            BodyError::TooLarge => {
                Failed::Finally(format!("the model's endpoint answered more than {MAX_ANSWER} bytes"))
            }
        })?;
        let answer: Value = serde_json::from_slice(&json)
            .map_err(|error| Failed::Finally(format!("the model's endpoint is not OpenAI-compatible: {error}")))?;
        let content = answer.pointer("/choices/0/message/content").and_then(Value::as_str);
        let missing = "the model gave no answer, or its endpoint is not OpenAI-compatible";
        content.map(str::to_owned).ok_or_else(|| Failed::Finally(missing.to_owned()))
    }
}

/// Reads `Retry-After`: seconds or a date (RFC 9110, section 10.2.3).
fn retry_after(response: &Response) -> Option<Duration> {
    let text = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(std::time::SystemTime::now()).unwrap_or_default())
}

tower_x402::debug_fields!(ChatClient |this| { at: this.url.origin().ascii_serialization(), model: this.model });
