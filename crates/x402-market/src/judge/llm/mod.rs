//! A specialist that asks a language model.

mod answer;
mod prompt;

use std::{fmt, num::NonZeroUsize, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::{sync::Semaphore, task::JoinSet};
use tower_x402::{Nonces, OsNonces};
use url::Url;

use self::{
    answer::read,
    prompt::{Markers, prompt},
};
use super::{Judge, JudgeError};
use crate::{ChatClient, ChatError, ChatMessage, LongText, Outputs, Submission, Task, Verdict};

/// Judges with a language model behind any OpenAI-compatible endpoint (`POST …/chat/completions`).
///
/// The model is told its specialty, and gets task and candidates between markers that no candidate can know, with the instruction
/// to take nothing in them for one: a candidate that asks for a good mark is no better for it. A pair is shown together, every
/// other output by itself. The answer must be JSON of a given form; if it is not, the model is told what is wrong, once.
///
/// Answers 429 and 5xx are tried again, after as long as `Retry-After` says, within the time limit.
///
/// ```no_run
/// # fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use x402_market::judge::LlmJudge;
///
/// let judge = LlmJudge::builder("http://127.0.0.1:11434/v1".parse()?, "llama3.1")
///     .specialty("the soundness of legal arguments; weigh precedent over rhetoric")
///     .api_key(std::env::var("LLM_API_KEY")?)
///     .build()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct LlmJudge(Arc<Inner>);

struct Inner {
    endpoint: ChatClient,
    specialty: String,
    time_limit: Duration,
    max_submission: usize,
    places: Semaphore,
    nonces: Arc<dyn Nonces>,
}

impl LlmJudge {
    /// Starts with the URL below which `chat/completions` is, and the model's name.
    pub fn builder(base: Url, model: impl Into<String>) -> LlmJudgeBuilder {
        LlmJudgeBuilder {
            base,
            model: model.into(),
            specialty: "the quality of answers".to_owned(),
            api_key: None,
            time_limit: Duration::from_secs(45),
            max_answer: 256 * 1024,
            max_submission: 128 * 1024,
            retries: 3,
            concurrency: 8,
            json_mode: true,
            nonces: Arc::new(OsNonces),
        }
    }
}

/// An API key, never shown.
#[derive(Clone)]
struct Secret(String);

/// Describes an [`LlmJudge`].
pub struct LlmJudgeBuilder {
    base: Url,
    model: String,
    specialty: String,
    api_key: Option<Secret>,
    time_limit: Duration,
    max_answer: usize,
    max_submission: usize,
    retries: u32,
    concurrency: usize,
    json_mode: bool,
    nonces: Arc<dyn Nonces>,
}

impl LlmJudgeBuilder {
    /// What it is a specialist for, as the model is told: "You judge …".
    pub fn specialty(mut self, specialty: impl Into<String>) -> Self {
        self.specialty = specialty.into();
        self
    }

    /// What the endpoint knows us by; sent as `Authorization: Bearer …` and never shown.
    pub fn api_key(mut self, key: impl Into<String>) -> Self {
        self.api_key = Some(Secret(key.into()));
        self
    }

    /// How long judging a submission may take, with everything that is tried again. Default 45 s.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = limit;
        self
    }

    /// The longest response of the endpoint, in bytes. Default 256 KiB.
    pub fn max_answer(mut self, bytes: usize) -> Self {
        self.max_answer = bytes;
        self
    }

    /// The longest task and outputs that are taken, in bytes together: a model's context is not endless. Default 128 KiB.
    pub fn max_submission(mut self, bytes: usize) -> Self {
        self.max_submission = bytes;
        self
    }

    /// How often a request is tried again after 429, 5xx or no answer. Default 3.
    pub fn retries(mut self, retries: u32) -> Self {
        self.retries = retries;
        self
    }

    /// How many requests are made at once, over all submissions. Default 8.
    pub fn concurrency(mut self, requests: NonZeroUsize) -> Self {
        self.concurrency = requests.get();
        self
    }

    /// Whether `response_format` asks the endpoint for JSON. Default yes; turn it off for endpoints that refuse it.
    pub fn json_mode(mut self, ask: bool) -> Self {
        self.json_mode = ask;
        self
    }

    /// Where markers come from.
    pub fn nonces(mut self, nonces: Arc<dyn Nonces>) -> Self {
        self.nonces = nonces;
        self
    }

    /// Checks the description and makes the judge.
    ///
    /// # Errors
    /// [`LlmJudgeError`].
    pub fn build(self) -> Result<LlmJudge, LlmJudgeError> {
        let endpoint = ChatClient::new(&self.base, self.model).map_err(LlmJudgeError::of)?;
        let endpoint = match self.api_key {
            Some(Secret(key)) => endpoint.api_key(&key).map_err(LlmJudgeError::of)?,
            None => endpoint,
        };
        let endpoint = endpoint.max_answer(self.max_answer).retries(self.retries).json_mode(self.json_mode);
        Ok(LlmJudge(Arc::new(Inner {
            endpoint,
            specialty: self.specialty,
            time_limit: self.time_limit,
            max_submission: self.max_submission,
            places: Semaphore::new(self.concurrency.min(Semaphore::MAX_PERMITS)),
            nonces: self.nonces,
        })))
    }
}

/// What is wrong with the description of an [`LlmJudge`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LlmJudgeError {
    /// Not an http or https URL.
    #[error("the endpoint is not an http or https URL")]
    Url,
    /// A key with characters that no header takes.
    #[error("the API key cannot be sent in a header")]
    Key,
    /// No HTTP client could be made.
    #[error("no HTTP client could be made")]
    Client(#[source] reqwest::Error),
}

impl LlmJudgeError {
    fn of(error: ChatError) -> Self {
        match error {
            ChatError::Key => Self::Key,
            ChatError::Client(error) => Self::Client(error),
            _ => Self::Url,
        }
    }
}

impl From<ChatError> for JudgeError {
    fn from(error: ChatError) -> Self {
        match error {
            ChatError::Busy { retry_after } => Self::Busy { retry_after },
            error => Self::failed(error),
        }
    }
}

#[async_trait]
impl Judge for LlmJudge {
    fn takes(&self, submission: &Submission) -> Result<(), JudgeError> {
        let task = prompt::length(&submission.task);
        let longest = submission.outputs().iter().map(|output| output.len());
        let outputs = if is_pair(submission) { longest.sum() } else { longest.max().unwrap_or(0) };
        let (length, most) = (task + outputs, self.0.max_submission);
        if length > most {
            let detail = format!("task and output have {length} bytes: shorten them to {most}");
            return Err(JudgeError::NotTaken(detail));
        }
        Ok(())
    }

    async fn judge(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        self.takes(submission)?;
        let judging = async {
            if is_pair(submission) {
                return self.0.ask(&submission.task, submission.outputs()).await;
            }
            self.one_by_one(submission).await
        };
        let judged = tokio::time::timeout(self.0.time_limit, judging).await;
        judged.unwrap_or_else(|_| Err(JudgeError::failed("the model did not answer in time")))
    }
}

impl LlmJudge {
    /// Judges each output for itself, some of them at once.
    async fn one_by_one(&self, submission: &Submission) -> Result<Vec<Verdict>, JudgeError> {
        let task = Arc::new(submission.task.clone());
        let mut asked = JoinSet::new();
        for (at, output) in submission.outputs().iter().cloned().enumerate() {
            let (judge, task) = (self.0.clone(), task.clone());
            asked.spawn(async move { (at, judge.ask(&task, &[output]).await) });
        }
        let mut verdicts = Vec::with_capacity(asked.len());
        while let Some(judged) = asked.join_next().await {
            let (at, judged) = judged.map_err(JudgeError::failed)?;
            verdicts.extend(judged?.into_iter().map(|verdict| (at, verdict)));
        }
        verdicts.sort_by_key(|(at, _)| *at);
        Ok(verdicts.into_iter().map(|(_, verdict)| verdict).collect())
    }
}

impl Inner {
    /// The model's verdicts on outputs that it sees together.
    async fn ask(&self, task: &Task, outputs: &[LongText]) -> Result<Vec<Verdict>, JudgeError> {
        let _place = self.places.acquire().await.map_err(JudgeError::failed)?;
        let nonce = self.nonces.next().map_err(JudgeError::failed)?;
        let mut messages = prompt(&self.specialty, task, outputs, &Markers::of(nonce));
        let answer = self.endpoint.ask(&messages).await?;
        let problem = match read(&answer, outputs) {
            Ok(verdicts) => return Ok(verdicts),
            Err(problem) => problem,
        };
        tracing::debug!(%problem, "the model's answer is not of the given form; it is asked once more");
        messages.push(ChatMessage::assistant(answer.chars().take(16 * 1024).collect::<String>()));
        messages.push(ChatMessage::user(prompt::repair(&problem)));
        read(&self.endpoint.ask(&messages).await?, outputs)
            .map_err(|problem| JudgeError::failed(format!("the model's answer is not of the given form: {problem}")))
    }
}

const fn is_pair(submission: &Submission) -> bool {
    matches!(submission.outputs, Outputs::Pair(_))
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LlmJudge")
            .field("endpoint", &self.endpoint)
            .field("specialty", &self.specialty)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for LlmJudgeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LlmJudgeBuilder")
            .field("model", &self.model)
            .field("specialty", &self.specialty)
            .finish_non_exhaustive()
    }
}
