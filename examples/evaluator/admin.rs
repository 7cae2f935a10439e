//! The operator's questions: on the command line while no evaluator runs, or over HTTP with a token.

use std::{fmt, hint::black_box, io, str::FromStr, sync::Arc};

use axum::{
    Json, Router,
    body::Body,
    extract::{Query, Request, State},
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use futures_util::{future::BoxFuture, stream};
use serde::Deserialize;
use serde_json::{Value, json};
use tower_x402::{
    ledger::{Ledger, LedgerError},
    ops::{ExportEntry, ExportFormat, Operator, PaymentFilter, PaymentSearch, PeriodReport},
};

/// How many payments a search returns at most.
const MAX_FOUND: usize = 100;

/// Writes these payments to standard output.
pub(crate) async fn print(ledger: Arc<dyn Ledger>, which: PaymentFilter, format: ExportFormat) -> anyhow::Result<()> {
    let mut export = Operator::new(ledger).export(which, format);
    while let Some(lines) = export.next().await? {
        // The reader may close the pipe early.
        if io::Write::write_all(&mut io::stdout().lock(), lines.as_bytes()).is_err() {
            break;
        }
    }
    Ok(())
}

/// Returns the routes below `/admin`, which require the token.
pub(crate) fn router(operator: Operator, token: Token) -> Router {
    Router::new()
        .route("/admin/payments", get(payments))
        .route("/admin/channels", get(channels))
        .route("/admin/report", get(report))
        .layer(middleware::from_fn_with_state(token, admit))
        .with_state(operator)
}

#[derive(Deserialize)]
struct Question {
    state: Option<String>,
    find: Option<String>,
    format: Option<String>,
}

impl Question {
    fn format(&self) -> Result<ExportFormat, Refusal> {
        match self.format.as_deref() {
            None | Some("jsonl") => Ok(ExportFormat::JsonLines),
            Some("csv") => Ok(ExportFormat::Csv),
            Some(_) => Err(refuse(StatusCode::BAD_REQUEST, "format: expected csv or jsonl")),
        }
    }

    fn state<F: FromStr<Err: fmt::Display>>(&self) -> Result<F, Refusal> {
        let state = self.state.as_deref().unwrap_or("all").parse();
        state.map_err(|error| refuse(StatusCode::BAD_REQUEST, &format!("state: {error}")))
    }
}

async fn payments(State(operator): State<Operator>, Query(question): Query<Question>) -> Result<Response, Refusal> {
    let format = question.format()?;
    if let Some(text) = &question.find {
        let search: PaymentSearch =
            text.parse().map_err(|error| refuse(StatusCode::BAD_REQUEST, &format!("find: {error}")))?;
        let found = operator.find(&search, MAX_FOUND).await.map_err(|error| failed(&error))?;
        return Ok(Json(found.iter().map(ExportEntry::of).collect::<Vec<_>>()).into_response());
    }
    let export = operator.export(question.state()?, format);
    Ok(stream_of(export, |export| Box::pin(export.next()), format))
}

async fn channels(State(operator): State<Operator>, Query(question): Query<Question>) -> Result<Response, Refusal> {
    let format = question.format()?;
    let export = operator.export_channels(question.state()?, format);
    Ok(stream_of(export, |export| Box::pin(export.next()), format))
}

/// The next lines of an export.
type Lines<'a> = BoxFuture<'a, Result<Option<String>, LedgerError>>;

/// Streams an export page by page. If the ledger fails the body breaks off, so that a part is not taken for the whole.
fn stream_of<E: Send + 'static>(export: E, next: fn(&mut E) -> Lines<'_>, format: ExportFormat) -> Response {
    let pieces = stream::unfold(Some(export), move |export| async move {
        let mut export = export?;
        match next(&mut export).await {
            Ok(piece) => Some((Ok(piece?), Some(export))),
            Err(error) => Some((Err(error), None)),
        }
    });
    let headers = [(header::CONTENT_TYPE, format.media_type()), (header::CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(Box::pin(pieces))).into_response()
}

async fn report(State(operator): State<Operator>) -> Result<Json<PeriodReport>, Refusal> {
    operator.report().await.map(Json).map_err(|error| failed(&error))
}

async fn admit(State(token): State<Token>, request: Request, next: Next) -> Response {
    let given =
        request.headers().get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    if given.is_some_and(|given| token.is(given)) {
        return next.run(request).await;
    }
    let mut response = refuse(StatusCode::UNAUTHORIZED, "Authorization: Bearer (the admin token)").into_response();
    response.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
    response
}

/// A status, and what is wrong.
type Refusal = (StatusCode, Json<Value>);

fn failed(error: &LedgerError) -> Refusal {
    refuse(StatusCode::SERVICE_UNAVAILABLE, &error.to_string())
}

fn refuse(status: StatusCode, message: &str) -> Refusal {
    (status, Json(json!({ "error": message })))
}

/// The admin token.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token(String);

impl Token {
    /// Returns `true` if the tokens are equal. Takes constant time for a given length.
    fn is(&self, given: &[u8]) -> bool {
        let token = self.0.as_bytes();
        let differs = token.iter().zip(given).fold(0, |differs, (a, b)| black_box(differs | (a ^ b)));
        token.len() == given.len() && differs == 0
    }
}

impl FromStr for Token {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_token = text.len() >= 16 && text.bytes().all(|byte| byte.is_ascii_graphic());
        if is_token { Ok(Self(text.to_owned())) } else { Err("expected at least 16 visible ASCII characters") }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// An export format: `csv` or `jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    Csv,
    Jsonl,
}

impl From<Format> for ExportFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Csv => Self::Csv,
            Format::Jsonl => Self::JsonLines,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_itself_only_and_not_shown() {
        let token: Token = "correct-horse-battery".parse().unwrap();
        assert!(token.is(b"correct-horse-battery"));
        for other in ["", "correct-horse-batter", "correct-horse-battery ", "Correct-horse-battery"] {
            assert!(!token.is(other.as_bytes()), "{other:?}");
        }
        assert_eq!(format!("{token:?}"), "Token");
        assert!("".parse::<Token>().is_err() && "short".parse::<Token>().is_err());
    }
}
