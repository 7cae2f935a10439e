//! Conversations with language models, over any OpenAI-compatible endpoint.

use std::{fmt, time::Duration};

use reqwest::{
    Client, Response, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER},
    redirect,
};
use serde::{Deserialize, Serialize};
use url::Url;

use super::net::{BodyError, below, read_body};

/// The pause before a request is tried again, doubled each time, where the endpoint names none.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// A longer `Retry-After` is passed on.
const LONGEST_PAUSE: Duration = Duration::from_secs(20);

/// Asks a language model behind any OpenAI-compatible endpoint (`POST …/chat/completions`).
///
/// Answers 429 and 5xx are tried again, after as long as `Retry-After` says. How long all of it may take is the caller's to limit.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::{ChatClient, ChatMessage};
///
/// let model = ChatClient::new(&"http://127.0.0.1:11434/v1".parse()?, "llama3.1")?.temperature(1.0);
/// println!("{}", model.ask(&[ChatMessage::user("What is 17 * 23?")]).await?);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ChatClient {
    http: Client,
    url: Url,
    model: String,
    authorization: Option<HeaderValue>,
    temperature: f32,
    max_answer: usize,
    retries: u32,
    json_mode: bool,
}

/// A message of the conversation with the model.
#[derive(Clone, Debug, Serialize)]
pub struct ChatMessage {
    role: &'static str,
    content: String,
}

/// Why a model said nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// Not an http or https URL.
    #[error("the endpoint is not an http or https URL")]
    Url,
    /// A key with characters that no header takes.
    #[error("the API key cannot be sent in a header")]
    Key,
    /// No HTTP client could be made.
    #[error("no HTTP client could be made")]
    Client(#[source] reqwest::Error),
    /// The endpoint wants to be asked later, later than is waited for.
    #[error("the model's endpoint is busy; try again in {retry_after:?}")]
    Busy {
        /// When to ask again.
        retry_after: Duration,
    },
    /// It could not be reached, refused, or does not speak as OpenAI's does.
    #[error("{0}")]
    Failed(String),
}

impl ChatMessage {
    /// What the model is told about its part.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system", content: content.into() }
    }

    /// What the model is asked.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user", content: content.into() }
    }

    /// What the model has said.
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

impl ChatClient {
    /// Asks this model at the URL below which `chat/completions` is, with temperature 0. Answers may have 256 KiB, and requests are
    /// tried again three times.
    ///
    /// # Errors
    /// [`ChatError::Url`] or [`ChatError::Client`].
    pub fn new(base: &Url, model: impl Into<String>) -> Result<Self, ChatError> {
        let url = below(base, "chat/completions").ok_or(ChatError::Url)?;
        let http = Client::builder().redirect(redirect::Policy::none()).connect_timeout(Duration::from_secs(10));
        let http = http.build().map_err(ChatError::Client)?;
        Ok(Self {
            http,
            url,
            model: model.into(),
            authorization: None,
            temperature: 0.0,
            max_answer: 256 * 1024,
            retries: 3,
            json_mode: false,
        })
    }

    /// What the endpoint knows us by; sent as `Authorization: Bearer …` and never shown.
    ///
    /// # Errors
    /// [`ChatError::Key`].
    pub fn api_key(mut self, key: &str) -> Result<Self, ChatError> {
        let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| ChatError::Key)?;
        value.set_sensitive(true);
        self.authorization = Some(value);
        Ok(self)
    }

    /// How much chance there is in its answers: 0 for as little as the model can.
    pub const fn temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// The longest response of the endpoint, in bytes.
    pub const fn max_answer(mut self, bytes: usize) -> Self {
        self.max_answer = bytes;
        self
    }

    /// How often a request is tried again after 429, 5xx or no answer.
    pub const fn retries(mut self, retries: u32) -> Self {
        self.retries = retries;
        self
    }

    /// Whether `response_format` asks the endpoint for JSON; some refuse it.
    pub const fn json_mode(mut self, ask: bool) -> Self {
        self.json_mode = ask;
        self
    }

    /// The model's next message.
    ///
    /// # Errors
    /// [`ChatError::Busy`] or [`ChatError::Failed`].
    pub async fn ask(&self, messages: &[ChatMessage]) -> Result<String, ChatError> {
        let mut pause = FIRST_PAUSE;
        for attempt in 0.. {
            let trouble = match self.once(messages).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            let Some(named) = trouble.again else { return Err(ChatError::Failed(trouble.what)) };
            let wait = named.unwrap_or(pause);
            if attempt >= self.retries || wait > LONGEST_PAUSE {
                return Err(match named {
                    Some(retry_after) => ChatError::Busy { retry_after },
                    None => ChatError::Failed(trouble.what),
                });
            }
            tracing::debug!(trouble = trouble.what, ?wait, "the model is asked again");
            tokio::time::sleep(wait).await;
            pause *= 2;
        }
        Err(ChatError::Failed("the model was never asked".to_owned()))
    }

    async fn once(&self, messages: &[ChatMessage]) -> Result<String, Trouble> {
        let response_format = self.json_mode.then_some(ResponseFormat { r#type: "json_object" });
        let request = ChatRequest { model: &self.model, messages, temperature: self.temperature, response_format };
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
        let json = read_body(response, self.max_answer).await.map_err(|error| match error {
            BodyError::Broken(error) => Trouble::passing(error.to_string(), None),
            BodyError::TooLarge => {
                Trouble::final_(format!("the model's endpoint answered more than {} bytes", self.max_answer))
            }
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

impl fmt::Debug for ChatClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.url.origin().ascii_serialization();
        f.debug_struct("ChatClient").field("at", &place).field("model", &self.model).finish_non_exhaustive()
    }
}
