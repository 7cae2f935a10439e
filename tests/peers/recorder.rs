//! Records exchanges: a proxy before a server or a facilitator, and the file into which its exchanges are written.
//!
//! `TOWER_X402_RECORD=1 cargo test -p tower-x402-tests --features test-peers --test peers -- anvil` writes `tests/exchanges/*.json` anew.

use std::{
    collections::BTreeMap,
    env, fs,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::Request,
    response::Response,
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::{HeaderMap, HeaderName};
use serde::Serialize;
use serde_json::{Value, value::RawValue};
use tokio::{net::TcpListener, task::JoinHandle};

use support::authorization::unix_now;

/// The headers that are recorded.
const HEADERS: [&str; 9] = [
    "accept",
    "authorization",
    "cache-control",
    "content-type",
    "payment-required",
    "payment-response",
    "payment-signature",
    "x-payment",
    "x-payment-response",
];

/// A recording proxy, stopped when dropped.
pub struct Recorder {
    pub url: String,
    exchanges: Arc<Mutex<Vec<Exchange>>>,
    task: JoinHandle<()>,
}

/// The subject of a file of exchanges.
pub struct Cell<'a> {
    /// The role of the peer: `client`, `server`, `facilitator`, or `facilitated`: a server behind our facilitator.
    pub role: &'static str,
    pub peer: &'static str,
    pub x402_version: u8,
    pub flow: &'a str,
    /// The outcome of the payment: `settled` or `refused`.
    pub outcome: &'static str,
}

#[derive(Clone, Serialize)]
struct Exchange {
    /// When the request arrived, in Unix seconds.
    at: u64,
    request: Message,
    response: Message,
}

#[derive(Clone, Serialize)]
struct Message {
    /// Method and path, or the status.
    head: String,
    headers: BTreeMap<String, Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<Box<RawValue>>,
}

impl Recorder {
    /// Starts a proxy before `url`, if recording is on.
    pub async fn before(url: &str) -> Option<Self> {
        env::var_os("TOWER_X402_RECORD")?;
        let exchanges = Arc::<Mutex<Vec<Exchange>>>::default();
        let (origin, log, client) = (url.to_owned(), exchanges.clone(), reqwest::Client::new());
        let handler = move |request: Request| forward(client.clone(), origin.clone(), request, log.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, Router::new().fallback(handler)).await.unwrap() });
        Some(Self { url, exchanges, task })
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Cell<'_> {
    /// Writes the exchanges of these proxies, in the order in which the requests arrived.
    pub fn write(&self, recorders: &[Recorder]) {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct File<'a> {
            peer: &'a str,
            version: String,
            role: &'a str,
            x402_version: u8,
            flow: &'a str,
            outcome: &'a str,
            exchanges: Vec<Exchange>,
        }
        let exchanges = recorders.iter().flat_map(|recorder| recorder.exchanges.lock().unwrap().clone()).collect();
        let Self { role, peer, x402_version, flow, outcome } = *self;
        let file = File { peer, version: version_of(peer), role, x402_version, flow, outcome, exchanges };
        let directory = support::repository().join("tests/exchanges");
        fs::create_dir_all(&directory).unwrap();
        let name = peer.trim_start_matches('@').replace('/', "-");
        let path = directory.join(format!("{role}-{name}-v{x402_version}-{flow}-{outcome}.json"));
        fs::write(path, serde_json::to_string_pretty(&file).unwrap() + "\n").unwrap();
    }
}

/// Returns the pinned version of a package.
fn version_of(peer: &str) -> String {
    let directory = support::repository().join("tests/peers");
    let read = |file: &str| fs::read_to_string(directory.join(file)).unwrap();
    let npm: Value = serde_json::from_str(&read("package.json")).unwrap();
    if let Some(version) = npm["dependencies"][peer].as_str() {
        return version.to_owned();
    }
    match peer {
        "x402-httpx" | "x402-requests" | "x402-fastapi" | "x402-python" => {
            let text = read("requirements.txt");
            let line = text.lines().find(|line| line.starts_with("x402[")).unwrap();
            line.split_once("==").unwrap().1.to_owned()
        }
        _ => {
            let package = if peer.starts_with("r402-") { "r402-http" } else { peer };
            let text = read("rust/Cargo.lock");
            let at = text.find(&format!("name = \"{package}\"\nversion = \"")).unwrap_or_else(|| panic!("{package}"));
            text[at..].split('"').nth(3).unwrap().to_owned()
        }
    }
}

async fn forward(
    client: reqwest::Client,
    origin: String,
    request: Request,
    log: Arc<Mutex<Vec<Exchange>>>,
) -> Response {
    let (parts, body) = request.into_parts();
    let (at, body) = (unix_now(), to_bytes(body, 1 << 20).await.unwrap());
    let head = format!("{} {}", parts.method, parts.uri);
    let asked = Message::new(head, &parts.headers, &body);
    let url = format!("{origin}{}", parts.uri);
    let answer = client.request(parts.method, url).headers(end_to_end(&parts.headers)).body(body).send().await.unwrap();
    let (status, headers) = (answer.status(), end_to_end(answer.headers()));
    let body = answer.bytes().await.unwrap();
    let response = Message::new(status.as_u16().to_string(), &headers, &body);
    log.lock().unwrap().push(Exchange { at, request: asked, response });
    let mut response = Response::new(Body::from(body));
    (*response.status_mut(), *response.headers_mut()) = (status, headers);
    response
}

/// A message that a proxy passes on.
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let hops = ["connection", "content-length", "keep-alive", "transfer-encoding"].map(HeaderName::from_static);
    let passed = headers.iter().filter(|(name, _)| !hops.contains(name));
    passed.map(|(name, value)| (name.clone(), value.clone())).collect()
}

impl Message {
    fn new(head: String, headers: &HeaderMap, body: &Bytes) -> Self {
        let known = HEADERS.iter().filter_map(|name| Some((name, headers.get(*name)?)));
        let headers = known.map(|(name, value)| {
            let value = value.to_str().unwrap();
            let message = BASE64_STANDARD.decode(value).ok().and_then(|bytes| object(&bytes));
            let base64 = |json| raw(format!("{{\"base64\": {json}}}"));
            ((*name).to_owned(), message.map_or_else(|| raw(Value::from(value).to_string()), base64))
        });
        let text = || raw(Value::from(String::from_utf8_lossy(body)).to_string());
        let body = (!body.is_empty()).then(|| object(body).unwrap_or_else(text));
        Self { head, headers: headers.collect(), body }
    }
}

/// Returns the body if it is a JSON object on one line. The line breaks in a file of exchanges are the file's own.
fn object(bytes: &[u8]) -> Option<Box<RawValue>> {
    let text = std::str::from_utf8(bytes).ok()?.to_owned();
    let is_object = text.starts_with('{') && !text.contains(['\n', '\r']);
    is_object.then(|| RawValue::from_string(text).ok())?
}

fn raw(json: String) -> Box<RawValue> {
    RawValue::from_string(json).unwrap()
}
